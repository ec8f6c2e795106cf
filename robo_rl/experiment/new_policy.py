"""Policies that supervision makes anew, and whether their hidden layers are of tanh or of ReLU."""

from dataclasses import replace

import numpy as np

from robo_rl.errors import UserError, quoted
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.envs import obs_spec
from robo_rl.experiment.run import Run, Stopped
from robo_rl.experiment.supervised_frames import SupervisedFrames, demonstrated
from robo_rl.options import LoraOptions

HOLD = 10  # of so many episodes one is held out
FEW = 20  # episodes; of fewer none is, for each teaches more than it would tell
SHORT = 600  # updates that tell which of two policies generalises
COMPARED = ("tanh", "relu")
# whose hidden layers have an activation
OURS = ("flow", "diffusion", "gaussian", "squashed", "guided", "steered")


def fresh_policy(config: TrainConfig, spec, dataset, rows: np.ndarray | None = None):
    """A policy that knows the scales of a data set's rows (None: all) and nothing else. Adapters are for RL:
    of weights that know nothing all must learn."""
    from robo_rl.data.reader import chunks
    from robo_rl.demos import fit_normalisers
    from robo_rl.policies import make_policy

    policy = make_policy(replace(config.policy, lora=LoraOptions()), spec, config.seed)
    check_relative(policy, dataset)
    if not (config.policy.folder and config.policy.statistics == "folder"):
        fit_normalisers(policy, dataset, config.data.normaliser, rows)
    if learn := getattr(policy, "fit_actions", None):
        _, taught, _ = chunks(dataset, config.policy.horizon)
        learn(taught if rows is None else taught[rows])
    return policy.to(config.device)


def check_relative(policy, dataset) -> None:
    """Raise UserError where a model's actions are relative to the state and those of the data set are no
    positions."""
    from robo_rl.data.labels import need_units

    delta = getattr(getattr(policy, "processor", None), "options", None)
    if delta is None or not any(delta.delta):
        return
    kinds, names = need_units(dataset.meta).kind, dataset.features.action
    if wrong := [
        f"{name} ({kind})"
        for name, kind, moves in zip(names, kinds, delta.delta, strict=False)
        if moves and kind != "absolute"
    ]:
        raise UserError(
            f"{policy.options.folder}: its actions are positions relative to the state; of the data set "
            f"{dataset.meta.root} {', '.join(wrong)} are none. State what they are: robo_rl data label "
            f"{quoted(dataset.meta.root)} --units …"
        )


def policy_of_demos(run: Run, dataset, activation: str):
    """A `fresh_policy` for the run's env that knows the scales of what was demonstrated."""
    config, told = run.config, demonstrated(run.config, dataset)
    config = replace(config, policy=replace(config.policy, activation=activation))
    spec = obs_spec(run.env, len(dataset.tasks) > 1, config.policy.text)
    return fresh_policy(config, spec, dataset, None if told.all() else np.flatnonzero(told))


def held_out(frames: SupervisedFrames) -> np.ndarray:
    """bool [F]: the frames of every tenth episode of those that are learnt from; of fewer than `FEW` episodes
    none."""
    episodes = frames.episodes
    out = episodes[HOLD - 1 :: HOLD] if len(episodes) >= FEW else episodes[:0]
    return np.isin(frames.data.episode_index, out)


def loss_on(policy, frames: SupervisedFrames, config: TrainConfig, which: np.ndarray) -> float:
    """Supervised loss of a policy on the frames that are in `which` bool [F]."""
    from robo_rl.algos import bc
    from robo_rl.devices import device_of, sampled_on

    sample = sampled_on(device_of(policy), frames.sampler(config, policy.spec, which))
    return bc.mean_loss(policy, sample, config.bc, config.seed + 11)


def compares(config: TrainConfig) -> bool:
    """Whether supervision compares the activations of a policy of ours, which it makes in no fewer updates
    than that takes."""
    made = config.demos != "0" and not config.init and config.policy.kind in OURS
    return config.bc.compare and made and config.bc.updates >= SHORT


def better_activation(run: Run, frames: SupervisedFrames) -> str:
    """That of `COMPARED` whose policy, after `SHORT` updates on most of the episodes, has the lower loss on
    those that are held out; of fewer than `FEW` episodes the configured one. It is found once for so many
    episodes. Raises Stopped when a signal comes."""
    from robo_rl.algos import bc
    from robo_rl.devices import device_of, sampled_on

    config, data, count = run.config, frames.data, len(frames.episodes)
    if not compares(config) or count < FEW:
        return config.policy.activation
    if run.compared[0] == count:
        return run.compared[1]
    out, losses = held_out(frames), dict.fromkeys(COMPARED, 0.0)
    options = replace(config.bc, updates=SHORT)
    run.report.start("compare", SHORT * len(COMPARED), "updates")
    for i, activation in enumerate(COMPARED):
        policy = policy_of_demos(run, data, activation)
        sample = sampled_on(device_of(policy), frames.sampler(config, policy.spec, ~out))

        def tick(update: int, loss: float, before: int = i * SHORT) -> None:
            run.report.advance(before + update, note=f"loss {loss:.3f}")
            if run.stop.asked:
                raise Stopped

        bc.train(policy, sample, options, config.seed + 10, tick)
        losses[activation] = loss_on(policy, frames, config, out)
    run.compared = count, min(losses, key=losses.__getitem__)
    said = ", ".join(f"{loss:.3f} with {name}" for name, loss in losses.items())
    run.report.say(f"loss on held-out episodes {said}: --policy.activation {run.compared[1]}")
    return run.compared[1]
