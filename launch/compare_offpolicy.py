"""Methods that learn from replay, side by side: the same demonstrations, control steps and starts of evaluation.

    python launch/compare_offpolicy.py --tasks pick_cube push_cube --methods rlpd expo pa_rl --steps 20000 --seeds 3

Each run is `robo_rl train --algo METHOD` with its defaults, one after the other; the table has success with its 95 % interval
before RL and after, and the wall-clock time of the whole run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

METHODS = ("rlpd", "hil_serl", "expo", "pa_rl", "iql", "calql", "wsrl", "aloe")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tasks", nargs="+", default=["pick_cube", "push_cube", "stack_cube", "peg_insert"])
    p.add_argument("--methods", nargs="+", default=["rlpd", "expo", "pa_rl"], choices=METHODS)
    p.add_argument("--steps", type=int, default=20_000)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--demos", type=int, default=20)
    args, more = p.parse_known_args()
    from robo_rl.stats import wilson
    for task in args.tasks:
        for seed in range(args.seeds):
            for method in args.methods:
                with tempfile.TemporaryDirectory() as folder:
                    run, began = Path(folder) / "run", time.monotonic()
                    done = subprocess.run(
                        [sys.executable, "-m", "robo_rl", "train", "--task", task, "--algo", method, "--seed", str(seed), "--steps",
                         str(args.steps), "--eval-every", str(10 * args.steps), "--eval-episodes", "200", "--demos", str(args.demos),
                         "--out", str(run), "--no-video", *more], check=False, stderr=subprocess.PIPE, text=True, timeout=7200)
                    if done.returncode:
                        sys.exit(done.stderr[-2000:])
                    took, said = time.monotonic() - began, []
                    for name in ("sft", "final"):
                        won = json.loads((run / "evals" / f"{name}.json").read_text())["success"]
                        at = wilson(sum(won), len(won))
                        said.append(f"{sum(won) / len(won):.3f} [{at.low:.3f}, {at.high:.3f}]")
                    print(f"{task:<12} seed {seed}  {method:<9} {said[0]} -> {said[1]}  {took:5.0f} s", flush=True)


if __name__ == "__main__":
    main()
