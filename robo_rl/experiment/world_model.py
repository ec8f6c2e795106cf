"""How far a world model can be trusted with policies: their success in it and in the simulator, on the same starts."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from robo_rl import checkpoint
from robo_rl.data.reader import load as load_data
from robo_rl.errors import UserError
from robo_rl.evaluation import eval_starts, evaluate
from robo_rl.experiment.config import load_config
from robo_rl.experiment.envs import make_env
from robo_rl.experiment.folder import pick_checkpoint
from robo_rl.log import Progress
from robo_rl.policies import obs_tensors
from robo_rl.selection import REPORT
from world_models import trust
from world_models.evaluate import compare_models, measure, measure_open_loop
from world_models.imagine import play
from world_models.model import load
from world_models.options import WorldEvalConfig


def find_policies(paths: tuple[str, ...]) -> list[tuple[str, Path, Path]]:
    """(name, run folder, checkpoint folder) of every checkpoint of the runs, and of the checkpoints named."""
    out = []
    for path in map(Path, paths):
        run, folder = pick_checkpoint(path, "last")
        found = [folder] if (path / "meta.json").exists() else checkpoint.checkpoints(run)
        out += [(f"{run.name}/{int(at.name.removeprefix('step_'))}", run, at) for at in found]
    return out


def make_real(spec, runs: list[Path], num_envs: int):
    """The simulator that a model stands for, made as the first of the runs that did not act in a model."""
    configs = [load_config(r) for r in runs]
    real = next((c for c in configs if not c.sim.startswith("wm:")), None)
    control = spec.control
    acted = real or replace(configs[0], sim=control.sim, task=control.task, judge="", obs="rgb" if control.views else "state")
    env = make_env(acted, num_envs)
    for name, mine, theirs in (("action axes are", control.action_names, env.spec.action_names),
                               ("cameras are", control.views, env.spec.views), ("control period [s] is", control.period, env.spec.period),
                               ("state size is", spec.state, (env.single_observation_space["state"].shape or (0,))[0])):
        if mine != theirs:
            raise UserError(f"the model's {name} {mine}, those of {env.spec.id} are {theirs}: give --policies runs of the sim, "
                            "task, control and obs that the model learnt from")
    return env


def compare_policies(model, env, policies: list, config: WorldEvalConfig, tick=lambda done: None) -> dict:
    """Success of every (name, policy) on the same starts in the model and in the simulator `env` -> document."""
    starts, n = eval_starts(config.episodes, REPORT + config.seed), env.num_envs  # no checkpoint was chosen on these
    imagined, real, rows = [], [], []
    for k, (_, policy) in enumerate(policies):
        real.append(evaluate(env, policy, starts, config.seed)["success"])
        won, cut, doubt = [], [], []
        for batch, first in enumerate(range(0, len(starts), n)):
            ids = starts[first:first + n]
            padded = np.concatenate([ids, np.repeat(ids[-1:], n - len(ids))])
            obs, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": padded})
            generator = torch.Generator().manual_seed(config.seed * 7919 + batch)  # the noise that evaluate gave

            def act(o, policy=policy, generator=generator):
                return policy.act(obs_tensors(o, policy.spec), generator, explore=False).actions.numpy()
            got = play(model, act, {k: np.array(v) for k, v in obs.items()}, env.spec.max_steps, config.seed)
            for have, new in ((won, got.success), (cut, got.cut), (doubt, got.uncertainty)):
                have += new[:len(ids)].tolist()
        imagined.append(won)
        rows.append({"cut": float(np.mean(cut)), "uncertainty": float(np.mean(doubt))})
        tick(k + 1)
    names = [name for name, _ in policies]
    m, r = np.array(imagined, float), np.array(real, float)
    gaps = trust.exploitation(names, m, r, config.tolerance)
    a, b = m.mean(1), r.mean(1)
    ranking = {"policies": len(names), "spearman": trust.spearman_interval(m, r)._asdict(), "pearson": trust.pearson(a, b),
               "worst_regret": trust.worst_regret(a, b), "choice_regret": trust.choice_regret(a, b),
               "mean_max_rank_violation": trust.mean_max_rank_violation(a, b), "starts": config.episodes}
    return {"policies": [asdict(g) | {"gap": g.gap._asdict()} | row for g, row in zip(gaps, rows, strict=False)], "ranking": ranking,
            "exploitation": {"alarm": any(g.alarm for g in gaps), "tolerance": config.tolerance,
                             "policies": [g.name for g in gaps if g.alarm]}}


def evaluate_model(config: WorldEvalConfig) -> tuple[dict, dict]:
    """`measure`, then the comparison with another model and with the simulator, if asked for."""
    model, found = load(config.model), find_policies(config.policies)
    other = load(config.against) if config.against else None
    env = make_real(model.spec, [run for _, run, _ in found], min(config.episodes, 32 if model.spec.control.views else 10**5)) \
        if found else None
    doc, arrays = measure(model, load_data(config.dataset), config)
    if other is not None:
        _, theirs = measure_open_loop(other, arrays["windows"], arrays["scale"], config)
        doc["against"] = compare_models(arrays["errors"], theirs["errors"], arrays["windows"].seen, config.against)
    if env is not None:
        with Progress() as progress:
            progress.start("rank", len(found), "policies")
            policies = [(name, checkpoint.load_policy(folder)[0]) for name, _, folder in found]
            doc |= compare_policies(model, env, policies, config, progress.update)
        env.close()
    return doc, arrays
