"""The twin of a configuration: the same run at a tiny size through the same code, on a CPU in about a minute
(`robo_rl train --twin`)."""

from dataclasses import fields, replace

from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.parallel import group_size
from robo_rl.options import OffPolicyOptions, RolloutOptions

WIDTH = {
    "hidden": 32,
    "layers": 2,
    "width": 32,
    "depth": 1,
    "critic_hidden": 32,
    "critics": 2,
    "candidates": 2,
}
SMALL = {
    "critic_hidden": 32,
    "critics": 2,
    "decisions": 4,
    "minibatch": 32,
    "warmup": 64,
    "pretrain": 20,
    "capacity": 4000,
    "batch": 32,
    "critic_warmup": 1,
    "episodes": 8,
    "rounds": 1,
    "updates": 20,
    "value_updates": 20,
    "judge_episodes": 8,
    "rehearse_episodes": 8,
}
SYNTHETIC = {"synthetic_rows": 500, "synthetic_updates": 20}  # refused where nothing is made
SUPERVISED = {
    "updates": 20,
    "most": 0,  # three times as many, again and again
    "own": 8,
    "ground": 5,
    "head": 20,
    "batch": 32,
    "noises": 2,
}
ENVS, UPDATES, WORKERS = 8, 3, 1
EPISODE = 200  # control steps that no episode of most tasks is longer than


def twin(config: TrainConfig) -> TrainConfig:
    """The configuration with small networks, few envs, demonstrations and steps; task, method, observation,
    precision, adapters and kinds of processes are its own."""
    group = group_size(config) if isinstance(config.rl, RolloutOptions) and config.algo != "bc" else 0
    envs = max(ENVS, group)
    policy = replace(
        config.policy,
        **_smaller(config.policy, WIDTH),
        **({"size": "tiny"} if hasattr(config.policy, "size") else {}),
    )
    rl = replace(
        config.rl, **_smaller(config.rl, SMALL | (SYNTHETIC if getattr(config.rl, "synthetic", 0) else {}))
    )
    steps = (
        400
        if isinstance(config.rl, OffPolicyOptions)
        else UPDATES * envs * policy.execute * (1 if group else getattr(rl, "decisions", 1))
    )
    if config.dream and not config.dream_model:
        from robo_rl.experiment.dream import LEAST  # episodes before a first model

        steps += LEAST * EPISODE
    return replace(
        config,
        device="cpu",
        policy=policy,
        rl=rl,
        envs=min(config.envs, envs),
        eval_episodes=4,
        eval_envs=4,
        eval_every=0,
        target=0.0,
        demos=config.demos if not config.demos.isdecimal() else str(min(int(config.demos), 3)),
        steps=min(config.steps, steps),
        video=False,
        bc=replace(config.bc, **_smaller(config.bc, SUPERVISED)),
        dream_updates=min(config.dream_updates, 20),
        image_size=min(config.image_size, 32),
        workers=None if config.workers is None else min(config.workers, WORKERS),
        learners=min(config.learners, 2),
        threads=1,
        torch_threads=1,
        wandb="",
        **({"demos_most": 0} if hasattr(config, "demos_most") else {}),
    )


def _smaller(options, least: dict[str, int]) -> dict[str, int]:
    """The fields of `options` among `least` that are above it."""
    return {
        f.name: least[f.name]
        for f in fields(options)
        if f.name in least and getattr(options, f.name) > least[f.name]
    }
