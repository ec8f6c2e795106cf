"""Where the rollouts of a training run come from: this process, or worker processes beside it."""

import functools
import os
import shutil
from dataclasses import replace
from pathlib import Path

from robo_rl.errors import UserError
from robo_rl.experiment.train import OFF_POLICY, Train, make_env


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def group_size(args: Train) -> int:
    """Episodes per start, 0 without a group advantage."""
    return args.rl.group if args.rl.advantage != "gae" else 0


def workers(args: Train) -> int:
    """Worker processes of this run; 0: everything in one process."""
    if args.workers is not None:
        return args.workers
    if args.algo in OFF_POLICY:
        return 0  # simulators take a twentieth of the time: with --workers 1 acting goes on beside, as an arm must
    units = args.envs // (group_size(args) or 1)
    on_gpu = args.sim in ("isaacgym", "isaaclab")
    return 0 if cores() < 2 or on_gpu else min(cores(), units)


def staleness(args: Train) -> int:
    """Bound on the age [versions] of what is trained on."""
    return int(workers(args) > 0) if args.max_staleness is None else args.max_staleness


def lanes(args: Train) -> bool:
    """Whether episodes of groups wait for no other: with staleness, on this machine, each worker deciding for itself."""
    return bool(group_size(args)) and staleness(args) > 0 and not args.server and args.backend == "processes"


def batch(args: Train) -> int:
    """Samples of an update: episodes of whole groups, or decisions of all envs."""
    group = group_size(args)
    rounds = max(1, args.periodic)
    return max(1, int(args.envs * rounds / args.over_provision) // group) * group if group else args.envs * args.rl.decisions


def check(args: Train) -> None:
    """Raise UserError for workers that do not fit the envs."""
    n, group = workers(args), group_size(args) or 1
    if args.periodic and (staleness(args) or not group_size(args) or args.rl.epochs != 1 or args.algo == "nft"):
        raise UserError("--periodic takes one step per batch of fresh groups: it needs --max-staleness 0, a group advantage "
                        "(--rl.advantage grpo), --rl.epochs 1, and pi_rl, ppo, dppo or reinflow")
    if args.over_provision > 1 and not lanes(args):
        raise UserError("--over-provision above 1 needs a group advantage (--rl.advantage grpo), --max-staleness of at "
                        "least 1, and neither --server nor --backend ray")
    if args.over_provision > staleness(args) + 1:
        raise UserError(f"--over-provision must be at most --max-staleness + 1 = {staleness(args) + 1}, got "
                        f"{args.over_provision:g}: more would never be admitted")
    if args.learners > 1:
        from robo_rl.runtime.sharded import check
        if args.periodic:
            raise UserError("--periodic adds up gradients in one process: it goes without --learners")
        check(args.algo, args.rl, args.learners)
    if args.backend == "ray":
        if n == 0 or args.server:
            raise UserError("--backend ray needs --workers of at least 1 and no --server")
    if n * group > args.envs:
        raise UserError(f"--workers {n} need at least {n * group} --envs" +
                        (f" (groups of {group} stay together)" if group > 1 else "") + f", got {args.envs}")
    if args.backend == "ray":
        from robo_rl.runtime import ray_crew
        ray_crew.check(args.ray_address)  # now, not after the supervised stage


def shares(envs: int, workers: int, group: int) -> list[int]:
    """Envs of each worker, as even as groups allow."""
    units = envs // (group or 1)
    return [(units // workers + (i < units % workers)) * (group or 1) for i in range(workers)]


def make_feed(args: Train, folder: Path, env, learner, saved: dict | None, build=None):
    """(feed, whether it goes on exactly) for a run; `saved` is `feed.state()` of its checkpoint.

    `build(number of envs)` makes a worker's env, if not `make_env`.
    """
    import torch

    from robo_rl.rollout import Collector, layout
    from robo_rl.runtime.lanes import Lanes
    from robo_rl.runtime.local import Local
    from robo_rl.runtime.worker import Job, Worker

    n, group, o, eta, free = workers(args), group_size(args), args.rl, staleness(args), lanes(args)
    policy, explore, seed = learner.sampler, args.algo != "nft", args.seed + 1
    if n == 0:
        def make(i, refresh):
            collector = Collector(env, policy, o.gamma, seed, i)
            return Lanes(i, collector, policy, refresh, group, explore) if free else \
                Worker(i, collector, policy, refresh, eta, explore, group)
        feed = Local(1, make, batch(args), eta, o.decisions, seed)
        return feed, feed.load_state(saved) if saved else True
    from robo_rl.runtime.crewed import Crewed
    probe = Collector(env, policy, o.gamma, seed)
    rows = layout(policy, {k: torch.from_numpy(v) for k, v in probe.obs.items()}, explore)
    sizes = shares(args.envs, n, group)
    leased = [group] * n if free else sizes  # envs of a fragment
    layouts = [{k: ((m, *row[1:]), d) for k, (row, d) in rows.items()} for m in leased]
    decisions = probe.longest() if group else o.decisions
    env.close()
    flight = folder / "flight"
    build = build or functools.partial(make_env, replace(args, threads=args.threads or max(1, cores() // n)))
    jobs = [Job(i, build, m, policy.options, policy.spec, o.gamma, seed, eta, explore, group, flight,
                flight / "weights.bin", served=args.server, lanes=free) for i, m in enumerate(sizes)]
    if args.backend == "ray":
        from robo_rl.runtime.ray_crew import RayCrew
        crew = RayCrew(jobs, policy, args.ray_address, args.hang)
    else:
        from robo_rl.runtime.processes import Processes
        crew = Processes(jobs, policy, args.hang)
    return Crewed(flight, crew, leased, layouts, batch(args), decisions, eta, saved, group, bool(args.periodic)), True


def discard(folder: Path) -> None:
    """A finished run keeps no rollouts in flight."""
    for name in ("flight", "ranks"):
        shutil.rmtree(folder / name, ignore_errors=True)
