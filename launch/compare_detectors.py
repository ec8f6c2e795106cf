"""Failure detectors side by side: FLOAT and the cheap alarms, calibrated on successful rollouts, judged on
held-out ones.

    python launch/compare_detectors.py RUN [RUN ...] --rollouts 200

For each run: rollouts of its policy from starts of their own; the even half calibrates (its successes alone),
the odd half is judged. Balanced accuracy is the mean of the share of failures that alarm and of successes
that do not; `early` is the share of failures alarmed at least 10 % of the episode before its end. "+ time": a
rollout that outlasts the successes is an alarm too.

Where every failure is a time-out and a success ends the episode, the time tells them apart. So two more
numbers: `running` is the AUROC among judged rollouts that still run at the same time (of elapsed time 0.5),
`before clock` the share of failures that are alarmed before elapsed time alone alarms at the same rate of
false alarms. "largest" is the largest of the normalised scores of FLOAT, stuck and far (distance to
demonstrated states); the first half of the calibration successes normalises, the second sets its threshold.

So that time tells nothing at all, `timeless` is the balanced accuracy with every failure judged over the
checks that a success lasts, averaged over the successes (elapsed time: 0.5). And where the simulator has
snapshots and an expert, it is tried out from which check on a judged failure was lost: `lost` is the AUROC
between episodes that are lost by now and ones that will succeed, `delay` the median time from the loss to the
alarm [s], `on time` the share of lost episodes that alarm before or at most a second after their loss.
`launch/ledge.py` is a task for it.
"""

import json
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
import tyro

from robo_rl.checkpoint import load_policy
from robo_rl.data.reader import load
from robo_rl.experiment.config import load_config
from robo_rl.experiment.correct import demos_of
from robo_rl.experiment.envs import make_env
from robo_rl.experiment.folder import pick_checkpoint
from robo_rl.human import alarms, detect
from robo_rl.human.lost import auroc_once_lost, caught_in_time, expert_wins, lost_from
from robo_rl.policies import obs_tensors
from robo_rl.rollout import run_chunk

MEASURES = ("balanced", "caught", "quiet", "early", "running", "before_clock", "when", "timeless")
LOSSES = ("lost", "on_time", "delay")
WORDS = {
    "running": "AUROC among rollouts that run at the same time",
    "before_clock": "share of failures called before the clock",
    "balanced": "balanced accuracy",
    "timeless": "balanced accuracy, each failure judged over the time that a success lasts",
    "lost": "AUROC of the lost among rollouts that run at the same time",
    "on_time": "share of the lost called within a second of their loss",
}
START = 1_300_000_000  # starts that nothing else uses


@dataclass(frozen=True)
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    rollouts: int = 200
    checkpoint: str = "best"
    alpha: float = 0.05
    """False-alarm rate the thresholds are calibrated for."""
    out: str = ""
    save: bool = False
    """Write rows into results/human.json."""
    label: str = ""
    """How the rows name the run: the command that made it."""


def rollouts(env, policy, count: int) -> list[dict]:
    """`count` episodes: embeddings [T,F], actions [T,A], chunk samples [T,4,D], success; one row per
    decision."""
    n, out, generator = env.num_envs, [], torch.Generator().manual_seed(0)
    for first in range(0, count, n):
        raw, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": START + first + np.arange(n)})
        rows, over, won, length, states = [], np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, int), []
        while not over.all():
            obs = obs_tensors(raw, policy.spec)
            if hasattr(env, "get_state"):
                states.append(env.get_state())
            with torch.no_grad():
                phi = policy.encode(obs).pooled.numpy()
                tries = [policy.act(obs, generator, explore=False) for _ in range(4)]
            rows.append(
                (phi, tries[0].actions.numpy()[:, 0], np.stack([c.x0.flatten(1).numpy() for c in tries], 1))
            )
            raw, _, _, terminated, truncated, ok, _ = run_chunk(env, tries[0].actions.numpy(), 1.0)
            length += ~over
            over, won = terminated | truncated, won | ok
        out += [
            {
                "phi": np.stack([r[0][i] for r in rows[: length[i]]]),
                "act": np.stack([r[1][i] for r in rows[: length[i]]]),
                "tries": np.stack([r[2][i] for r in rows[: length[i]]]),
                "success": bool(won[i]),
                "states": []
                if won[i]
                else [{k: v[i].copy() for k, v in s.items()} for s in states[: length[i]]],
            }
            for i in range(n)
        ]
    return out[:count]


def find_losses(config, limit: int, judged: list[dict], most: int = 100) -> bool:
    """`lost` of each judged rollout: its first lost check, -1: it was only late, None: a success. False: the
    simulator cannot tell.
    limit: control steps of an episode."""
    steps = 2 * limit
    env = make_env(replace(config, max_steps=10 * steps), most)
    able = hasattr(env, "expert_action") and hasattr(env, "get_state")
    for x in judged:
        x["lost"] = None if x["success"] or not able else lost_from(expert_wins(env, x["states"], steps))
        x["states"] = []
    env.close()
    return able


def demo_embeddings(policy, data, every: int) -> list[np.ndarray]:
    """Embeddings of every `every`-th frame of each demonstration."""
    phi = detect.embed(policy, {"state": data.state})
    return [phi[a:b:every] for a, b in zip(data.from_, data.to, strict=True)]


def judged(
    rollouts: list[dict], name: str, threshold: detect.Threshold, clock: detect.Threshold, check: float
) -> dict:
    """The measures of one detector on held-out rollouts; check: seconds between two checks."""
    alarms = [(x, detect.first_alarm(x[name], threshold)) for x in rollouts]
    bad = [(x, a) for x, a in alarms if not x["success"]]
    good = [a for x, a in alarms if x["success"]]
    clocks = [
        c if (c := detect.first_alarm(x["elapsed time"], clock)) >= 0 else len(x["phi"]) for x, _ in bad
    ]

    def share(flags: list) -> float:
        return float(np.mean(flags)) if flags else float("nan")

    caught, quiet = share([a >= 0 for _, a in bad]), share([a < 0 for a in good])
    timeless = caught_in_time([a for _, a in bad], [len(x["phi"]) for x, _ in alarms if x["success"]])
    delays = [check * (a - x["lost"]) for x, a in bad if x["lost"] >= 0 and a >= 0]
    lost = [a for x, a in bad if x["lost"] >= 0]
    return {
        "timeless": (timeless + quiet) / 2,
        "losses": len(lost),
        "lost": auroc_once_lost([x[name] for x in rollouts], [x["lost"] for x in rollouts]),
        "delay": float(np.median(delays)) if delays else float("nan"),
        "on_time": share([0 <= a <= x["lost"] + 1 / check for x, a in bad if x["lost"] >= 0]),
        "balanced": (caught + quiet) / 2,
        "caught": caught,
        "quiet": quiet,
        "early": share([0 <= a <= 0.9 * (len(x["phi"]) - 1) for x, a in bad]),
        "running": detect.auroc_while_running(
            [x[name] for x in rollouts], [not x["success"] for x in rollouts]
        ),
        "before_clock": share([0 <= a < c for (_, a), c in zip(bad, clocks, strict=True)]),
        "when": float(np.median([a / len(x["phi"]) for x, a in bad if a >= 0]))
        if caught > 0
        else float("nan"),
        "failures": len(bad),
        "successes": len(good),
    }


def save(args: Args, run: str, config, table: list[dict]) -> None:
    """Rows of this run in results/human.json."""
    from robo_rl.provenance import git_hash, machine_name
    from robo_rl.results import ResultRow, add_rows

    add_rows(
        "results/human.json",
        "A person in the loop",
        [
            ResultRow(
                what=f"detectors, {WORDS[word]} at {args.alpha:g} false alarms: {row['detector']}, "
                f"{config.task}",
                value=round(row[word], 3),
                n=row["failures"] + row["successes"],
                seeds=(config.seed,),
                commit=git_hash(),
                note=f"{row['failures']} failures, {row['losses']} of them lost, {row['successes']} "
                "successes",
                date=time.strftime("%Y-%m-%d"),
                machine=machine_name(),
                files=("robo_rl/human/detect.py", "robo_rl/human/lost.py", "launch/compare_detectors.py"),
                command=f"python launch/compare_detectors.py {args.label or run} --rollouts {args.rollouts} "
                f"--alpha {args.alpha:g} --save",
            )
            for row in table
            if row["detector"]
            in ("FLOAT", "stuck", "far", "elapsed time", "largest", "FLOAT + time", "largest + time")
            for word in WORDS
            if not np.isnan(row[word])
        ],
    )


def main(args: Args) -> None:
    torch.set_num_threads(1)
    table = []
    for path in args.runs:
        run, folder = pick_checkpoint(args_path(path), args.checkpoint)
        config = load_config(run)
        policy, _ = load_policy(folder)
        env = make_env(config, min(100, args.rollouts))
        data = load(demos_of(run, config))
        demos = demo_embeddings(policy, data, policy.options.execute)
        ref = detect.demo_embeddings(demos[:20])
        phi = np.concatenate(demos)
        value = np.concatenate([0.9 ** np.arange(len(x))[::-1] for x in demos])
        mean, eye = phi.mean(0), np.eye(phi.shape[1])
        weights = np.linalg.solve(
            (phi - mean).T @ (phi - mean) + 10 * eye, (phi - mean).T @ (value - value.mean())
        )
        seen, took, begun = rollouts(env, policy, args.rollouts), [], len(table)
        check = policy.options.execute * env.spec.period
        env.close()

        def float_scores(x, ref=ref, took=took):
            out = []
            for k in range(1, len(x["phi"]) + 1):
                began = time.process_time()
                out.append(detect.float_index(x["phi"][:k], ref).index)
                took.append(time.process_time() - began)
            return np.array(out)

        scores = {
            "FLOAT": float_scores,
            "stuck": lambda x: detect.stuck_score(x["phi"], alarms.STUCK),
            "limit": lambda x: detect.limit_score(x["act"], 5),
            "far": lambda x, demos=demos[:20]: detect.far_score(x["phi"], demos),
            "critic drop": lambda x, mean=mean, weights=weights: detect.drop_score(
                (x["phi"] - mean) @ weights
            ),
            "uncertainty": lambda x: detect.spread_score(x["tries"]),
            "elapsed time": lambda x: detect.late_score(len(x["phi"])),
        }
        even, odd = seen[::2], seen[1::2]
        fine = [x for x in even if x["success"]]
        able = find_losses(config, env.spec.max_steps, odd)
        for x in seen:
            x |= {name: score(x) for name, score in scores.items()}
            x["three"] = np.stack([x[name] for name in alarms.NAMES], 1)
        scales = alarms.scales_of([x["three"] for x in fine[::2]])
        for x in seen:
            x["largest"] = alarms.largest_of(x["three"], scales)
        clock = detect.calibrate([x["elapsed time"] for x in fine], args.alpha, False)
        for name, outlast in [(n, o) for n in (*scores, "largest") for o in (False, True)]:
            key = f"{name} + time" if outlast else name
            threshold = detect.calibrate(
                [x[name] for x in (fine[1::2] if name == "largest" else fine)], args.alpha, outlast
            )
            row = {"task": config.task, "detector": key} | judged(odd, name, threshold, clock, check)
            if key == "FLOAT":
                row["ms_per_check"] = {
                    "median": 1e3 * float(np.median(took)),
                    "p99": 1e3 * float(np.quantile(took, 0.99)),
                }
            table.append(row)
            words = (*MEASURES, *(LOSSES if able else ()))
            print(
                f"{config.task:<12} {key:<20} "
                + "  ".join(f"{word.replace('_', ' ')} {row[word]:.3f}" for word in words)
                + f"  ({row['failures']} failures, {row['losses']} lost, {row['successes']} successes) "
                f"{row.get('ms_per_check', '')}",
                flush=True,
            )
        if args.save:
            save(args, path, config, table[begun:])
    if args.out:
        with open(args.out, "w", encoding="utf-8") as f:
            json.dump(table, f, indent=1)


def args_path(path: str):
    from pathlib import Path

    return Path(path)


if __name__ == "__main__":
    main(tyro.cli(Args))
