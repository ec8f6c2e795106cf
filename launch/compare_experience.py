"""DreamGym on a household in words: RL in an experience model, with each of its parts left out, and success
in the household itself.

    python launch/compare_experience.py                                    # three seeds
    python launch/compare_experience.py --seeds 1 --episodes 30 --demos 20 --fit 20 --steps 600 --envs 16
    --starts 20

Per seed: `--demos` of the expert are recorded in the household (`sims/words.py`), a weak policy is cloned
from them, `--episodes` of it, of the expert and of random commands are recorded, a text model learns from all
of them (`world_models/text.py`), and PPO goes on from the weak policy inside the model for `--steps`
commands. Left out in turn: the reasons, the retrieved steps, the tasks that the model writes (then every
recorded start is drawn alike). "And again" records `--episodes` of the policy that came of it, learns a model
from everything and goes on in that. Beside them PPO in the household itself, for as many commands as were
recorded, and for `--steps`.
Printed: success in the household on the same starts, the differences to the weak policy and to the whole with
95 % intervals, and how many next texts and outcomes of each model are exact on new episodes. Runs stay in
`--out`; what is done is not done again.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import robo_rl
from robo_rl.files import keep_row, kept_rows
from robo_rl.stats import paired_difference, wilson
from world_models import learning
from world_models import model as worlds
from world_models.text_options import TextConfig, TextFitOptions, TextOptions

SIM = "sims.words:make"
MODELS = {
    "whole": TextOptions(),
    "no reasons": TextOptions(reason=False),
    "no retrieval": TextOptions(retrieve=0),
}
POLICY = {"kind": "gaussian", "horizon": 1, "execute": 1, "hidden": 128, "layers": 2, "init_std": 0.3}
LEFT_OUT = {
    "in the model": ("whole", True),
    "in the model without written tasks": ("whole", False),
    "in the model without retrieval": ("no retrieval", True),
    "in the model without reasons": ("no reasons", True),
}
AGAIN = "in the model and again"
ORDER = (
    "weak",
    "in the model",
    AGAIN,
    "in the model without written tasks",
    "in the household for as many commands as recorded",
    "in the model without retrieval",
    "in the model without reasons",
    "in the household for as many as in the model",
)


def record(where: Path, episodes: int, seed: int, policy: str = "", noise: float = 0.6) -> Path:
    """A data set of so many episodes of the household, if it is not there."""
    if not (where / "meta").exists():
        robo_rl.collect(
            where, SIM, episodes=episodes, seed=seed, policy=policy, noise=noise if policy else 0.0
        )
    return where


def commands(folders: list[Path]) -> int:
    return sum(len(robo_rl.load_dataset(d).state) for d in folders)


def learnt_model(where: Path, name: str, data: list[Path], seed: int, args) -> Path:
    """The run of a text model."""
    if (where / "run.json").exists() and not (where / "model" / "world.json").exists():
        learning.train(TextConfig(resume=str(where)))
    elif not (where / "run.json").exists():
        learning.train(
            TextConfig(
                data=tuple(map(str, data)),
                out=str(where),
                seed=seed,
                net=MODELS[name],
                fit=TextFitOptions(updates=args.fit),
                horizon=20,
            )
        )
    return where


def exact(run: Path, new: Path) -> dict:
    """Shares of a model's next texts that are right in every sentence, where the text changes too, and of
    outcomes."""
    model, d = worlds.load(run), robo_rl.load_dataset(new)
    at = np.flatnonzero(np.isfinite(d.after).all(1))
    won = np.zeros(len(d.state), bool)
    won[d.to[d.success] - 1] = True
    _, p = model.step(
        model.start({"state": d.state[at]}, np.zeros(len(at), np.int64)),
        torch.from_numpy(d.action[at])[:, None],
    )
    right = (p.obs["state"][:, 0].numpy() == d.after[at]).all(1)
    moved = (d.after[at] != d.state[at]).any(1)
    says = p.success[:, 0].numpy() > 0.5
    return {
        "next": right.tolist(),
        "changing": right[moved].tolist(),
        "outcome": (says == won[at]).tolist(),
        "successes found": says[won[at]].tolist(),
    }


def begun(where: Path, label: str) -> bool:
    """Whether there is a run; one that was stopped goes on to its end."""
    there = (where / "run.json").exists()
    if there and not (where / "evals" / f"{label}.json").exists():
        robo_rl.resume(where, quiet=True)
    return there


def trained(where: Path, sim: str, init: Path, steps: int, hard: float, seed: int, args) -> Path:
    """PPO from the policy of `init`, with the same options in a model and in the household."""
    if not begun(where, "final"):
        config = robo_rl.recipe(
            sim="wm:model",
            algo="ppo",
            init=str(init),
            steps=steps,
            envs=args.envs,
            seed=seed,
            workers=0,
            video=False,
            out=str(where),
            eval_episodes=20,
            eval_every=steps,
            dream_hard=hard,
            rl={"decisions": 10, "critic_warmup": 3, "minibatch": 512, "lr": args.lr, "trust_kl": 0.005},
        )
        robo_rl.train(replace(config, sim=sim), quiet=True)
    return where


def one(name: str, seed: int, folder: Path, args) -> dict:
    """0/1 per start of one condition, and the figures of its model."""
    weak, found, run = folder / "weak", {}, folder / name.replace(" ", "-")
    demos = record(folder / "demos", args.demos, 10 * seed + 1)
    if not begun(weak, "sft"):
        robo_rl.train(
            robo_rl.recipe(
                sim=SIM,
                algo="bc",
                demos=str(demos),
                seed=seed,
                workers=0,
                video=False,
                out=str(weak),
                policy=POLICY,
                eval_episodes=20,
                bc={"updates": args.clone, "batch": 128},
            ),
            quiet=True,
        )
    data = [demos, record(folder / "mixed", args.episodes, 10 * seed + 2, f"{weak},expert,random")]
    new = record(folder / "new", 40, 10 * seed + 3, f"{weak},expert,random")
    if name in LEFT_OUT:
        which, written = LEFT_OUT[name]
        model = learnt_model(folder / which.replace(" ", "-"), which, data, seed, args)
        run = trained(run, f"wm:{model}", weak, args.steps, args.hard * written, seed, args)
        found["exact"] = exact(model, new)
    elif name == AGAIN:
        first = folder / "in-the-model"
        data.append(record(folder / "after", args.episodes, 10 * seed + 4, str(first), 0.3))
        model = learnt_model(folder / "whole-again", "whole", data, seed, args)
        run = trained(run, f"wm:{model}", first, args.steps, args.hard, seed, args)
        found["exact"] = exact(model, new)
    elif name == "weak":
        run = weak
    else:
        run = trained(run, SIM, weak, commands(data) if "recorded" in name else args.steps, 0.0, seed, args)
    result = robo_rl.evaluate(
        robo_rl.load_policy(run, "best" if run is weak else "last"),
        robo_rl.make_env(SIM, num_envs=100),
        episodes=args.starts,
    )
    return found | {"success": result.success.astype(int).tolist(), "recorded": commands(data)}


def say(rows: list[dict]) -> None:
    """Success pooled over seeds, and the paired differences."""
    of = {(r["name"], r["seed"]): r for r in rows}
    for name in dict.fromkeys(r["name"] for r in rows):
        mine = [r for r in rows if r["name"] == name]
        won = [x for r in mine for x in r["success"]]
        i = wilson(sum(won), len(won))
        line = (
            f"{name}: {i.value:.3f} [{i.low:.3f}, {i.high:.3f}] ("
            + ", ".join(f"{np.mean(r['success']):.3f}" for r in mine)
            + ")"
        )
        for other in ("weak", "in the model"):
            pairs = [
                (r["success"], of[other, r["seed"]]["success"])
                for r in mine
                if (other, r["seed"]) in of and other != name
            ]
            if pairs:
                a, b = ([x for p in pairs for x in p[k]] for k in (0, 1))
                d = paired_difference(a, b)
                line += f"; less {other} {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
        print(line)
        if "exact" in mine[0]:
            exacts = {k: [x for r in mine for x in r["exact"][k]] for k in mine[0]["exact"]}
            print(
                "   exact on new episodes: "
                + ", ".join(f"{k} {np.mean(x):.3f} of {len(x)}" for k, x in exacts.items())
            )


def main(given: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument(
        "--episodes", type=int, default=300, help="of the weak policy, the expert and random commands"
    )
    p.add_argument("--demos", type=int, default=300, help="of the expert, for the weak policy and the model")
    p.add_argument("--clone", type=int, default=1500, help="updates of the weak policy")
    p.add_argument("--fit", type=int, default=1600, help="updates of a text model")
    p.add_argument("--steps", type=int, default=40_000, help="commands of RL in a model")
    p.add_argument(
        "--hard", type=float, default=0.6, help="share of episodes that begin in tasks drawn by value"
    )
    p.add_argument("--envs", type=int, default=128)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--starts", type=int, default=300)
    p.add_argument("--only", default=",".join(ORDER), help="of the conditions, with commas between")
    p.add_argument("--out", type=Path, default=Path("runs/experience"))
    args = p.parse_args(given)
    torch.set_num_threads(1)
    keep, want, rows = (
        args.out / "rows.jsonl",
        {k: v for k, v in vars(args).items() if k not in ("seeds", "out", "only")},
        [],
    )
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for name in args.only.split(","):
            found = next(
                (r for r in kept_rows(keep) if (r["name"], r["seed"], r["with"]) == (name, seed, want)), None
            )
            if found is None:
                found = one(name, seed, args.out / f"seed-{seed}", args) | {
                    "name": name,
                    "seed": seed,
                    "with": want,
                }
                keep_row(keep, found)
                print(f"  seed {seed}, {name}: {np.mean(found['success']):.3f}", flush=True)
            rows.append(found)
    say(rows)


if __name__ == "__main__":
    main()
