"""Learning from robots that wait: asynchronous against lockstep, the same control steps, success and
wall-clock time.

    python launch/compare_waiting.py --steps 300000 --seeds 3

16 arms of pick_cube, each with a pace of its own for every episode (log-normal, sigma 1, median `--pace`
seconds per control step, as `robo_rl bench async` has it). Both begin with the same supervised policy and are
evaluated on the same 200 starts.
"""

import argparse
import functools
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np


def learn(run: Path, t, wrap, steps: int) -> tuple[float, dict]:
    """Online RL from the checkpoint of `run` -> (seconds, evaluation)."""
    from robo_rl import checkpoint
    from robo_rl.algos import pi_rl
    from robo_rl.bench.asynchronous import ARMS
    from robo_rl.evaluation import evaluate
    from robo_rl.experiment.envs import make_env
    from robo_rl.experiment.feeds import make_feed
    from robo_rl.starts import eval_starts

    policy, _ = checkpoint.load_policy(checkpoint.checkpoints(run)[-1])
    learner = pi_rl.make(policy, t.rl, t.seed)
    env = wrap(ARMS) if not t.workers else make_env(t, ARMS)
    with tempfile.TemporaryDirectory() as folder:
        feed, _ = make_feed(t, Path(folder), env, learner, None, wrap)
        done, began, ages = 0.0, 0.0, []
        try:
            while done < steps:
                rollout = feed.next()
                began = began or time.monotonic()  # without the start of the processes
                done += rollout.stats["env_steps"]
                ages.append(rollout.stats["staleness/mean"])
                learner.update(rollout, min(done / steps, 1.0), feed.version)
                feed.publish()
                if feed.crowded():
                    feed.commit()
            took = time.monotonic() - began
        finally:
            feed.close()
    test = make_env(t, 200)
    return took, evaluate(test, learner.sampler, eval_starts(200)) | {"age": float(np.mean(ages))}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--steps", type=int, default=300_000)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--pace", type=float, default=0.004, help="median seconds per control step")
    args = p.parse_args()
    from robo_rl.bench.asynchronous import ARMS, slow
    from robo_rl.cli import main as robo_rl
    from robo_rl.experiment.recipes import recipe
    from robo_rl.stats import wilson

    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            try:
                robo_rl(["train", "--algo", "bc", "--seed", str(seed), "--out", str(run), "--no-video"])
            except SystemExit as e:
                if e.code:
                    raise
            base = recipe("mujoco", "pick_cube", "pi_rl", "state", "full")
            base = replace(
                base,
                seed=seed,
                envs=ARMS,
                threads=1,
                rl=replace(base.rl, decisions=32, minibatch=256, epochs=4),
            )
            took = {}
            for name, more in (
                ("lockstep", {"workers": 0, "max_staleness": 0}),
                ("asynchronous", {"workers": ARMS, "max_staleness": 4, "server": True}),
            ):
                t = replace(base, **more)
                took[name], result = learn(run, t, functools.partial(slow, t, pace=args.pace), args.steps)
                won = sum(result["success"])
                at = wilson(won, 200)
                print(
                    f"seed {seed}  {name:<12} success {won / 200:.3f} [{at.low:.3f}, {at.high:.3f}]  "
                    f"{took[name]:6.0f} s  {result['age']:.1f} versions behind",
                    flush=True,
                )
            print(f"seed {seed}  {took['lockstep'] / took['asynchronous']:.2f} x faster", flush=True)


if __name__ == "__main__":
    main()
