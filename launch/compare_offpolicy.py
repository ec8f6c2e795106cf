"""Methods that learn from replay, side by side: the same demonstrations, control steps and starts of
evaluation.

    python launch/compare_offpolicy.py                                 # SAC, EXPO and PA-RL over four tasks
                                                            and three seeds
    python launch/compare_offpolicy.py --tasks push_cube --methods demo_sac hil_serl --seeds 1 --rl.utd 4

Each run is `robo_rl train --algo METHOD` with the preset of the method and the budget below (what else is
given goes to every run), one after the other: success before RL and after it with 95 % intervals, and CPU
time of the whole run. `sac` is demo_sac without a teacher, without imitation and a slow beginning, `synther`
and `guided` are its preset with a quarter of every batch made by diffusion; `rlpd` is the paper's method with
its own numbers in place of the budget. At the end each method against the first one, paired over seeds and
starts (conditional on these seeds: another three would differ by more). `--keep FILE` holds every result;
what it has is not run again. `--jobs N` runs N at a time, one thread each.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from robo_rl.files import keep_row, kept_rows, read_json
from robo_rl.options import RL_OPTIONS, OffPolicyOptions

ALONE = "--policy.no-teacher --rl.bc-coef 0 --rl.ramp 0 --rl.lr 3e-4"
METHODS = (
    {"sac": ("demo_sac", ALONE)}
    | {m: (m, "") for m, options in RL_OPTIONS.items() if issubclass(options, OffPolicyOptions)}
    | {
        "synther": ("demo_sac", "--rl.synthetic 0.25"),
        "guided": ("demo_sac", "--rl.synthetic 0.25 --rl.synthetic-kind guided"),
    }
)
BUDGET = "--rl.utd 1 --rl.batch 128 --rl.tau 0.02 --rl.actor-every 4 --rl.warmup 4000"


def one(task: str, method: str, seed: int, steps: int, demos: int, more: list[str]) -> dict:
    """Train once -> {task, method, seed, sft, final: 0/1 per start, cpu [s]}."""
    algo, extra = METHODS[method]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "said", "w+", encoding="utf-8") as said:
        run = Path(folder) / "run"
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "robo_rl",
                "train",
                "--task",
                task,
                "--algo",
                algo,
                "--seed",
                str(seed),
                "--steps",
                str(steps),
                "--eval-every",
                str(10 * steps),
                "--eval-episodes",
                "200",
                "--demos",
                str(demos),
                "--out",
                str(run),
                "--no-video",
                "--threads",
                "1",
                *([] if algo == "rlpd" else BUDGET.split()),
                *extra.split(),
                *more,
            ],
            stderr=said,
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            said.seek(0)
            raise SystemExit(f"{task} {method} seed {seed}: {said.read()[-2000:]}")
        won = {name: read_json(run / "evals" / f"{name}.json")["success"] for name in ("sft", "final")}
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "steps": steps,
        "demos": demos,
        "more": more,
        "cpu": round(used.ru_utime + used.ru_stime, 1),
    } | won


def say(rows: list[dict], tasks: list[str], methods: list[str]) -> None:
    """The table: success per seed, then the paired difference to the first method."""
    from robo_rl.stats import paired_difference

    for task in tasks:
        of = {
            m: sorted((r for r in rows if (r["task"], r["method"]) == (task, m)), key=lambda r: r["seed"])
            for m in methods
        }
        for m in methods:
            words = "  ".join(
                f"{sum(r['sft']) / len(r['sft']):.3f} -> {sum(r['final']) / len(r['final']):.3f}"
                for r in of[m]
            )
            pairs = [(a, b) for a in of[m] for b in of[methods[0]] if a["seed"] == b["seed"]]
            line = f"{task:<12} {m:<9} {words}  {sum(r['cpu'] for r in of[m]) / max(1, len(of[m])):4.0f} s"
            if m != methods[0] and pairs:
                d = paired_difference(
                    [x for a, _ in pairs for x in a["final"]], [x for _, b in pairs for x in b["final"]]
                )
                line += f"  {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
            print(line)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--tasks", nargs="+", default=["push_cube", "open_drawer", "reach", "pick_cube"])
    p.add_argument("--methods", nargs="+", default=["sac", "expo", "pa_rl"], choices=METHODS)
    p.add_argument("--steps", type=int, default=12_000)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--demos", type=int, default=10)
    p.add_argument("--jobs", type=int, default=1)
    p.add_argument("--keep", type=Path)
    args, more = p.parse_known_args()
    rows = kept_rows(args.keep)
    wanted = [
        {"task": task, "method": method, "seed": seed, "steps": args.steps, "demos": args.demos, "more": more}
        for seed in range(args.seeds)
        for task in args.tasks
        for method in args.methods
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed(
            [pool.submit(one, **w) for w in wanted if not any(w.items() <= r.items() for r in rows)]
        ):
            rows.append(r := done.result())
            keep_row(args.keep, r)
            print(
                f"{r['task']:<12} seed {r['seed']}  {r['method']:<9} {sum(r['sft']) / 200:.3f} -> "
                f"{sum(r['final']) / 200:.3f}  {r['cpu']:.0f} s",
                flush=True,
            )
    say(
        [r for r in rows if (r["steps"], r["demos"], r["more"]) == (args.steps, args.demos, more)],
        args.tasks,
        args.methods,
    )


if __name__ == "__main__":
    main()
