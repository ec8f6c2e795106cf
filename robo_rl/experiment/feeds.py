"""Where the rollouts of a training run come from: this process, or worker processes beside it."""

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig, on_the_wire, rollout_options
from robo_rl.experiment.envs import make_env
from robo_rl.experiment.parallel import batch, episode_slots, group_size, shares, staleness, workers
from robo_rl.files import cores
from robo_rl.noise import mix
from robo_rl.policies.exploration import explores

if TYPE_CHECKING:
    from robo_rl.rollout_control import StartControl
    from robo_rl.runtime.planned import PlannedGroups


def make_feed(
    config: TrainConfig,
    folder: Path,
    env,
    learner,
    saved: dict | None,
    build=None,
    control: "StartControl | None" = None,
    planned: "PlannedGroups | None" = None,
):
    """(feed, whether it goes on exactly) for a run; `saved` is `feed.state()` of its checkpoint.

    `build(number of envs)` makes a worker's env, if not `make_env`; `control` decides where episodes begin,
    `planned` how many.
    """
    from robo_rl.rollout import Collector
    from robo_rl.runtime.branches import make_control, tree_layout
    from robo_rl.runtime.candidates import candidate_layout, make_cheap
    from robo_rl.runtime.device import on_device
    from robo_rl.runtime.episode_slots import EpisodeSlots
    from robo_rl.runtime.in_process import InProcessFeed
    from robo_rl.runtime.planned import group_layout
    from robo_rl.runtime.worker import Job, Worker

    if on_device(env):
        return device_feed(config, env, learner, saved, control)
    n, group, o = workers(config), group_size(config), rollout_options(config)
    eta, free = staleness(config), episode_slots(config)
    policy, explore, seed = learner.sampler, explores(config.algo, config.policy), config.seed + 1
    tree = o if group and o.advantage == "tree" else None
    shape, choosing = planned.shape if planned else None, o if group and o.candidates else None
    width = shape.most if shape else group  # members that fit a slot
    if n == 0:

        def make(i, refresh):
            collector = Collector(env, policy, o.gamma, seed, i, control)
            if not free:
                return Worker(i, collector, policy, refresh, eta, explore, group)
            branches, cheap = make_control(tree, collector), make_cheap(choosing, policy)
            return EpisodeSlots(i, collector, policy, refresh, width, explore, branches, shape, *cheap)

        again = collectors_anew(config, policy, build, control)
        feed = InProcessFeed(1, make, batch(config), eta, o.decisions, seed, planned, again)
        return feed, feed.load_state(saved) if saved else True
    from robo_rl.runtime.worker_pool import WorkerPoolFeed

    probe = Collector(env, policy, o.gamma, seed, starts=control)
    rows = probe.layout(policy, explore)
    sizes = shares(config.envs, n, group)
    leased = [group] * n if free else sizes  # envs of a fragment

    def layout(m: int) -> dict:  # of a fragment of m envs
        columns = {k: ((m, *row[1:]), d) for k, (row, d) in rows.items()}
        if tree:
            return columns | tree_layout(m)
        if shape:
            return columns | group_layout(m)
        return columns | (candidate_layout(m, o.candidates) if choosing else {})

    layouts = [layout(m) for m in ([width] * n if free else sizes)]
    decisions = probe.longest() if group else o.decisions
    env.close()
    flight = folder / "flight"
    if control is not None:
        publish_control(control, flight)
    build = build or functools.partial(
        make_env, replace(config, threads=config.threads or max(1, cores() // n))
    )
    jobs = [
        Job(
            i,
            build,
            m,
            policy.options,
            policy.spec,
            o.gamma,
            seed,
            eta,
            explore,
            width,
            flight,
            flight / "weights.bin",
            served=config.server,
            episode_slots=free,
            starts=control is not None,
            tree=tree,
            shape=shape,
            choose=choosing,
        )
        for i, m in enumerate(sizes)
    ]
    pool, once = make_pool(config, jobs, policy), bool(config.periodic)
    return WorkerPoolFeed(
        flight, pool, leased, layouts, batch(config), decisions, eta, saved, group, once, planned
    ), True


def collectors_anew(config: TrainConfig, policy, build, control):
    """`again` of an `InProcessFeed`; None: a failure of the simulator is to end the run."""
    from robo_rl.rollout import Collector

    if on_the_wire(config):
        return None
    make, gamma = build or functools.partial(make_env, config), rollout_options(config).gamma
    return lambda i, key: Collector(make(config.envs), policy, gamma, mix(config.seed + 1, key), i, control)


def make_pool(config: TrainConfig, jobs: list, policy):
    """Processes of this machine, or of a Ray cluster, that do `jobs`."""
    if config.backend == "ray":
        from robo_rl.runtime.ray_pool import RayPool

        return RayPool(jobs, policy, config.ray_address, config.hang)
    from robo_rl.runtime.process_pool import ProcessPool

    return ProcessPool(jobs, policy, config.hang)


def device_feed(config: TrainConfig, env, learner, saved: dict | None, control: "StartControl | None"):
    """The feed of a simulator whose tensors are on a device; as `make_feed`."""
    from robo_rl.runtime.device import DeviceCollector, DeviceFeed

    o, group = rollout_options(config), group_size(config)
    if (
        workers(config)
        or staleness(config)
        or config.periodic
        or control is not None
        or group
        and (o.advantage == "tree" or o.candidates)
    ):
        raise UserError(
            f"--sim {config.sim} computes on {env.device}, in this process alone: it goes with --workers 0 "
            "and without --max-staleness, --periodic, --rl.advantage tree, --rl.allocate, --rl.candidates "
            "and samplers of starts (--starts uniform)"
        )
    feed = DeviceFeed(
        DeviceCollector(env, learner.sampler, o.gamma, config.seed + 1),
        learner.sampler,
        o.decisions,
        group,
        explores(config.algo, config.policy),
    )
    return feed, feed.load_state(saved) if saved else True


def publish_control(control: "StartControl", flight: Path) -> None:
    """From now on every table of `control` is published in the folder `flight`, for worker processes."""
    from robo_rl.files import private_folder
    from robo_rl.runtime.start_file import publish_states, publish_table

    private_folder(flight)
    publish_states(flight, control.stored)
    control.publish = functools.partial(publish_table, flight)
    control.publish(control.table)


def discard(folder: Path) -> None:
    """A finished run keeps no rollouts in flight."""
    for name in ("flight", "ranks"):
        shutil.rmtree(folder / name, ignore_errors=True)
