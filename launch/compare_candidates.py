"""What a group that teaches costs: played exactly, or as candidates of a cheaper policy of which the extremes
are played again (Sol-RL).

    python launch/compare_candidates.py RUN

The best policy of RUN explores in the run's own task. A group teaches where what is learnt from is mixed.
Seconds are those of one core, of the policy and the simulator together; nothing is learnt.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch


def measure(
    run: str, group: int, candidates: int, by: str, steps: int, groups: int, seed: int
) -> dict[str, float]:
    """Play so many groups -> figures per group that teaches, agreement of both stages."""
    from robo_rl import checkpoint
    from robo_rl.experiment.config import load_config
    from robo_rl.experiment.envs import make_env
    from robo_rl.experiment.folder import pick_checkpoint
    from robo_rl.options import PiRlOptions
    from robo_rl.rollout import Collector
    from robo_rl.runtime.candidates import make_cheap
    from robo_rl.runtime.episode_slots import EpisodeSlots
    from robo_rl.runtime.in_process import InProcessFeed

    folder, at = pick_checkpoint(Path(run), "best")
    policy = checkpoint.load_policy(at)[0].eval()
    options = PiRlOptions(
        decisions=0,
        advantage="dr_grpo",
        group=group,
        candidates=candidates,
        candidates_by=by,
        candidates_steps=steps,
    )
    env = make_env(replace(load_config(folder), threads=1), max(group, candidates))
    collector = Collector(env, policy, 0.99, seed)
    feed = InProcessFeed(
        1,
        lambda i, refresh: EpisodeSlots(
            i, collector, policy, refresh, group, True, None, None, *make_cheap(options, policy)
        ),
        group,
        0,
        collector.longest(),
        seed,
    )
    told, mixed, began = list[dict[str, float]](), 0, time.process_time()
    for _ in range(groups):
        r = feed.next()
        told.append(r.stats)
        mixed += bool((r.outcome != r.outcome[0]).any())
        feed.publish()
    seconds, taught = time.process_time() - began, max(mixed, 1)
    spent = {k: v for k, v in feed.stats().items() if k.startswith("time/")}
    feed.close()
    out = {
        "teaches": mixed / groups,
        "seconds": seconds / taught,
        "steps": sum(s["env_steps"] for s in told) / taught,
    }
    out |= {f"wall {k[5:]}": v / taught for k, v in spent.items()}
    more = ("success", "candidates/again", "candidates/same", "candidates/rank")
    return out | {
        k: float(np.mean([s[k] for s in told if k in s])) for k in more if any(k in s for s in told)
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("run")
    p.add_argument("--groups", type=int, default=16)
    p.add_argument("--group", type=int, default=8)
    p.add_argument("--candidates", type=int, default=32)
    p.add_argument("--steps", type=int, nargs="+", default=[2])
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    torch.set_num_threads(1)
    ways = {f"{n} played exactly": (n, 0, "steps", 1) for n in (args.group, args.candidates)}
    ways |= {
        f"{args.candidates} candidates, {k} denoise steps": (args.group, args.candidates, "steps", k)
        for k in args.steps
    }
    ways |= {
        f"{args.candidates} candidates, {by}": (args.group, args.candidates, by, 1) for by in ("bf16", "int8")
    }
    for name, (group, candidates, by, steps) in ways.items():
        found = measure(args.run, group, candidates, by, steps, args.groups, args.seed)
        print(f"{name}: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)


if __name__ == "__main__":
    main()
