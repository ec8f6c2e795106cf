"""RL inside a world model, in rounds: what comes of it is recorded outside, and the model learns again.

    python launch/rounds_in_model.py runs/weak data/a data/b --out runs/rounds --rounds 3

Each round learns a model of all data sets so far (`robo_rl wm train`), goes on from the run POLICY by RL
inside it (`robo_rl train --sim wm:…`), and measures the policy that came of it in the simulator and, from the
same starts, in the model. Then `--episodes` of that policy are recorded in the simulator, with little noise
on the actions, for the next round. Every round's RL begins from POLICY again, so that what one model was
wrong about is not carried on. A policy of pictures learns in an `encoded` model.

What is in `--out` already is not done again: a run that was stopped goes on when the same command is given.
For models as in Dyna (Sutton 1991) and MBPO (Janner et al. 2019), with whole episodes from recorded starts.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import robo_rl
from robo_rl.demos import check_fits
from robo_rl.errors import UserError, as_script, in_range
from robo_rl.experiment.config import TrainConfig, load_config
from robo_rl.experiment.envs import make_env, obs_spec
from robo_rl.experiment.folder import pick_run
from robo_rl.files import read_json
from world_models import learning, options

# what is recorded is as in the run
ALIKE = ("obs", "reward", "control", "randomise", "image_size", "max_steps")


def record(where: Path, policy: str, args: argparse.Namespace, seed: int) -> Path:
    """`--episodes` of a policy in the simulator of its run, as a data set; what is missing of them."""
    config = args.config
    there = len(robo_rl.load_dataset(where)) if (where / "meta" / "info.json").exists() else 0
    if there < args.episodes:
        robo_rl.collect(
            where,
            config.sim,
            config.task,
            episodes=args.episodes - there,
            policy=policy,
            noise=args.noise,
            seed=seed + there,
            **{k: getattr(config, k) for k in ALIKE},
        )
    return where


def is_begun(where: Path, key: str, given: list[Path]) -> bool:
    """Whether `where` holds a run. UserError: one whose option `key` is not `given`."""
    if not (where / "run.json").exists():
        return False
    had = read_json(where / "run.json")["config"][key]
    had = [had] if isinstance(had, str) else had
    if [Path(x).resolve() for x in had] != [x.resolve() for x in given]:
        raise UserError(
            f"{where} was begun with {', '.join(had)}, not with {', '.join(map(str, given))}; give what it "
            "was begun with, or another --out"
        )
    return True


def learn(where: Path, data: list[Path], args: argparse.Namespace, seed: int) -> Path:
    """The run of a model of `data`."""
    begun = is_begun(where, "data", data)
    if (where / "model" / "world.json").exists():
        return where
    pictures = args.config.obs == "rgb"
    kind = options.EncodedConfig if pictures else options.WorldModelConfig
    if begun:
        config = kind(resume=str(where))
    else:
        config = kind(data=tuple(map(str, data)), out=str(where), seed=seed)
        if args.updates:
            fit = options.FitOptions(updates=args.updates)
            whole: Any = options.EncodedFitOptions(pictures=args.updates, dynamics=fit) if pictures else fit
            config = replace(config, fit=whole)
    if learning.train(config).code:
        raise UserError("stopped; the same command goes on")
    return where


def inside(sim: str, where: Path, args: argparse.Namespace, seed: int) -> TrainConfig:
    """The options of RL in `sim`, a model."""
    return robo_rl.recipe(
        sim=sim,
        obs=args.config.obs,
        algo=args.algo,
        preset=args.preset,
        init=args.policy,
        steps=args.steps,
        patience=0,
        eval_episodes=args.starts,
        workers=args.workers,
        seed=seed,
        video=False,
        out=str(where),
    )


def improve(where: Path, model: Path, args: argparse.Namespace, seed: int) -> Path:
    """The run of RL inside a model."""
    begun = is_begun(where, "init", [Path(args.policy)])
    if (where / "evals" / "final.json").exists():
        return where
    result = robo_rl.resume(where) if begun else robo_rl.train(inside(f"wm:{model}", where, args, seed))
    if not result.finished:
        raise UserError("stopped; the same command goes on")
    return where


def parsed(given: list[str] | None) -> argparse.Namespace:
    """The options, and `config`, that of the run POLICY."""
    p = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    p.add_argument("policy", help="run folder of the policy that every round begins with")
    p.add_argument("data", nargs="+", type=Path, help="data sets of the task, failures among them")
    p.add_argument("--out", type=Path, default=Path("runs/rounds"))
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--episodes", type=int, default=600, help="that are recorded after a round")
    p.add_argument("--noise", type=float, default=0.15, help="on their actions")
    p.add_argument("--steps", type=int, default=400_000, help="of RL in a model")
    p.add_argument("--algo", default="pi_rl")
    p.add_argument("--preset", default="quick")
    p.add_argument("--updates", type=int, default=0, help="of a model; 0: as robo_rl wm train")
    p.add_argument("--workers", type=int, help="processes of RL; without: as robo_rl train")
    p.add_argument("--starts", type=int, default=200, help="that success is measured on")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(given)
    for name, least in (("rounds", 1), ("episodes", 1), ("steps", 1), ("updates", 0), ("starts", 1)):
        in_range(f"--{name}", getattr(args, name), least, 1e9)
    in_range("--noise", args.noise, 0, 1)
    args.config = load_config(pick_run(Path(args.policy)))
    inside(args.config.sim, args.out, args, args.seed)  # a mistake is told before a model is learnt
    return args


def main(given: list[str] | None = None) -> None:
    args = parsed(given)
    torch.set_num_threads(1)
    env, data = make_env(args.config, min(args.starts, 100)), list(args.data)
    for where in data:  # before a model is learnt from it
        check_fits(robo_rl.load_dataset(where).meta, obs_spec(env, language=False))
    before = robo_rl.evaluate(robo_rl.load_policy(args.policy), env, args.starts)
    print(f"{args.policy}\n  in the simulator  {before}", flush=True)
    for k in range(args.rounds):
        seed = args.seed + 1000 * k
        model = learn(args.out / f"model-{k}", data, args, seed)
        run = improve(args.out / f"inside-{k}", model, args, seed)
        policy, world = robo_rl.load_policy(run, "last"), robo_rl.load_world_model(model)
        real = robo_rl.evaluate(policy, env, args.starts)
        inside = robo_rl.evaluate(policy, world, args.starts, simulator=env)
        gain = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*real.minus(before))
        print(f"round {k + 1}: {run}\n  in the model      {inside}")
        print(f"  in the simulator  {real}\n  gained            {gain}", flush=True)
        if k + 1 < args.rounds:
            data.append(record(args.out / f"data-{k}", str(run), args, seed + 7))
    env.close()


if __name__ == "__main__":
    as_script(main)
