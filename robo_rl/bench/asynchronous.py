"""`robo_rl bench async`: collecting and learning at once against one after the other, and what the runtime
costs.

Sims that compute: the whole run on this machine's cores, with workers beside the learner, with the same
workers that wait for it (`--max-staleness 0`), in one process, and as a user would have it without us:
Gymnasium's AsyncVectorEnv and the same learner in turn. The limit is physics and the bare update spread over
all cores. Sims that wait, as robots and remote sims do: 16 arms, each with a pace of its own for every
episode (log-normal, sigma 1); the limit is that no arm ever waits. One feed at a time exists, so nobody works
during another's turn; all take turns in every repeat.
"""

import functools
import importlib
import mmap
import multiprocessing
import os
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from robo_rl.bench.peers import Subprocesses
from robo_rl.bench.rows import BARE, LEAST, PHYSICAL, at_least, columns, in_turns, make_row, versioned
from robo_rl.experiment.config import TrainConfig, on_policy_options
from robo_rl.experiment.envs import make_env, obs_spec, probe_env
from robo_rl.experiment.feeds import make_feed
from robo_rl.experiment.parallel import shares
from robo_rl.experiment.recipes import recipe
from robo_rl.files import cores
from robo_rl.noise import mix
from robo_rl.policies import make_policy
from robo_rl.rollout import Collector
from robo_rl.runtime.in_process import InProcessFeed
from robo_rl.runtime.process_pool import duplex_pair
from robo_rl.runtime.rollout_buffer import RolloutBuffer
from robo_rl.runtime.worker import Worker

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions
    from robo_rl.bench.rows import Report

ARMS, PACE, SIGMA = 16, 0.004, 1.0  # robots that wait, median seconds per control step, spread over episodes


def measure(args: "BenchOptions", report: "Report") -> None:
    """All rows of `robo_rl bench async`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        overhead(args, report)
        handover(args, report)
        computing(args, report)
        waiting(args, report)
    finally:
        torch.set_num_threads(threads)


def learner_for(t: TrainConfig, env):
    return importlib.import_module(f"robo_rl.algos.{t.algo}").make(
        make_policy(t.policy, obs_spec(env, False), 0), t.rl, 0
    )


def steps_per_second(
    t: TrainConfig, seconds: float, env=None, wrap=None, means: dict[str, list[float]] | None = None
) -> tuple[float, float, dict[str, float]]:
    """(env steps per second, share of all cores that was busy, last statistics) of a run that is under
    way; `means` collects every statistic."""
    env = env or probe_env(t)
    learner = learner_for(t, env)
    with tempfile.TemporaryDirectory() as folder:
        feed, _ = make_feed(t, Path(folder), env, learner, None, wrap)
        try:
            steps, stats, begin, busy, i = 0.0, {}, 0.0, 0.0, 0
            while i < 3 + LEAST or time.perf_counter() - begin < seconds:  # a full queue is soon spent
                if i == 3:  # the pipeline is full
                    begin, steps = time.perf_counter(), 0.0
                    psutil.cpu_percent()
                clock = time.perf_counter()
                rollout = feed.next()
                assert rollout is not None
                waited = time.perf_counter() - clock
                learner.update(rollout, 0.1, feed.version)
                feed.publish()
                if means is not None and i >= 3:
                    took = time.perf_counter() - clock
                    for k, v in (rollout.stats | feed.stats() | {"util/learner_wait": waited / took}).items():
                        means.setdefault(k, []).append(v)
                if feed.crowded():
                    feed.state()
                    feed.commit()
                steps += rollout.stats["env_steps"]
                stats = rollout.stats
                i += 1
            busy = psutil.cpu_percent() / 100
            return steps / (time.perf_counter() - begin), busy, stats
        finally:
            feed.close()


def repeats(args: "BenchOptions") -> int:
    return 3 if args.quick else 5


def in_rounds(
    args: "BenchOptions",
    modes: "Mapping[str, tuple[TrainConfig, Callable | None]]",
    wrap=None,
    parts: "dict[str, Callable[[], float]] | None" = None,
) -> tuple[dict, dict, dict]:
    """({mode: seconds per env step [repeats]}, {mode: its last statistics}, {part: seconds [repeats]}) of
    whole runs in turns; a mode is its options and, if it collects in one process, what makes its env;
    parts are measured after them."""
    times, stats, found = [], {}, []
    for k in range(repeats(args)):
        row = {}
        for name in list(modes)[:: -1 if k % 2 else 1]:
            t, build = modes[name]
            rate, busy, last = steps_per_second(t, args.slice, build() if build else None, wrap)
            row[name], stats[name] = 1 / rate, last | {"busy": busy}
        times.append(row)
        found.append({name: part() for name, part in (parts or {}).items()})
    return columns(times), stats, columns(found)


def computing(args: "BenchOptions", report: "Report") -> None:
    """pick_cube with the preset of `robo_rl train`."""
    if cores() < 2:
        report.skip("sims that compute", "this machine has one core")
        return
    base = replace(recipe("mujoco", "", "pi_rl", "state", "full"), demos="0")
    if args.envs:
        base = replace(base, envs=args.envs)
    n, alone = cores(), replace(base, workers=0, max_staleness=0)
    waiting, user = (
        "the same workers, --max-staleness 0",
        f"{versioned('gymnasium')} AsyncVectorEnv, the same learner in turn",
    )
    modes: dict[str, tuple[TrainConfig, Callable | None]] = {"ours": (replace(base, max_staleness=1), None)}
    if args.peers:
        modes |= {
            waiting: (replace(base, max_staleness=0), None),
            "one process, --workers 0": (alone, None),
            user: (
                alone,
                lambda: Subprocesses(
                    [
                        functools.partial(make_env, replace(alone, threads=1), m)
                        for m in shares(base.envs, n, 0)
                    ]
                ),
            ),
        }
    bare, parts = "physics and the bare update on all cores", bare_parts(base, args.quick)
    times, stats, one = in_rounds(args, modes, parts=parts)
    times[bare] = one["physics"] + one["update"] / n
    rates = {name: 1 / float(np.median(t)) for name, t in one.items()}
    report.add(
        make_row(
            f"pick_cube, pi_rl, {n} workers beside the learner",
            "steps/s",
            times,
            {bare: BARE},
            list(modes)[1:],
            bars=lambda ours, of_limit, over_peer: (
                [at_least("over the best synchronous way", over_peer, 1.0)] * bool(args.peers)
            ),
            work="the same options of env, policy and learner; whole updates once the pipeline is full",
            no_peer="" if args.peers else "--no-peers",
            note=f"alone [steps/s]: physics on all cores {rates['physics']:,.0f}, bare updates on one "
            f"{rates['update']:,.0f}, the learner's updates {rates['learner']:,.0f}; "
            f"{stats['ours']['busy']:.2f} of all cores busy, mean staleness "
            f"{stats['ours']['staleness/mean']:.2f}",
        )
    )


def bare_parts(t: TrainConfig, quick: bool) -> "dict[str, Callable[[], float]]":
    """Ways to measure seconds per env step: of physics alone on all cores, of bare updates and of our
    learner's on one."""
    from robo_rl.bench.sim import Stretch
    from robo_rl.bench.train import MANY, bare_update, update_work
    from sims.mujoco.model import SUBSTEPS

    env = make_env(t, t.envs)
    learner = learner_for(t, env)
    stretch = Stretch(env, cores(), SUBSTEPS, quick)
    stretch.check()
    o, spec, chunk = t.policy, learner.policy.spec, learner.policy.chunk
    body, size = (
        [o.hidden] * o.layers,
        min(on_policy_options(t).minibatch, t.envs * on_policy_options(t).decisions),
    )
    step, units = update_work(
        bare_update([spec.state + chunk, *body, chunk], [spec.state, *body, 1], size, o.activation),
        size * o.execute / on_policy_options(t).epochs,
        True,
    )["update, 1 thread"]
    collector = Collector(make_env(t, t.envs), learner.policy, on_policy_options(t).gamma, 1)
    rollout = collector.collect(learner.sampler, on_policy_options(t).decisions)

    def timed(call: Callable[[], object], steps: float) -> float:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) / steps

    step()
    assert units == MANY * size * o.execute / on_policy_options(t).epochs
    return {
        "physics": lambda: min(call()[0] for call in stretch.calls.values()) / stretch.units,
        "update": lambda: timed(step, units),
        "learner": lambda: timed(
            lambda: learner.update(rollout, 0.1), t.envs * on_policy_options(t).decisions * o.execute
        ),
    }


class Waits:
    """A vector env whose steps take real time: each episode of each env has a pace of its own; the slowest
    counts."""

    def __init__(self, env, seed: int, pace: float = PACE):
        self.env, self.seed, self.count, self.median = env, seed, 0, pace
        self.pace = self._draw(env.num_envs)

    def _draw(self, n: int) -> np.ndarray:
        self.count += 1
        return self.median * np.exp(
            SIGMA * np.random.default_rng(mix(self.seed, self.count)).standard_normal(n)
        )

    def __getattr__(self, name: str):
        return getattr(self.env, name)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.env.num_envs, bool))
        self.pace = np.where(mask, self._draw(self.env.num_envs), self.pace)
        return self.env.reset(seed=seed, options=options)

    def step(self, actions):
        time.sleep(float(self.pace.max()))
        return self.env.step(actions)


def slow(t: TrainConfig, n: int, pace: float = PACE):
    """The env of a run, made to wait `pace` seconds per control step in the median."""
    return Waits(make_env(t, n), mix(t.seed, time.monotonic_ns()), pace)


def waiting(args: "BenchOptions", report: "Report") -> None:
    """16 arms that wait, reach."""
    base = recipe("mujoco", "reach", "pi_rl", "state", "full")
    base = replace(
        base, demos="0", envs=ARMS, threads=1, rl=replace(base.rl, decisions=8, minibatch=64, epochs=2)
    )
    alone = replace(base, workers=0, max_staleness=0)
    user = f"{versioned('gymnasium')} AsyncVectorEnv, the same learner in turn"
    modes: dict[str, tuple[TrainConfig, Callable | None]] = {
        "ours": (replace(base, workers=ARMS, max_staleness=4, server=True), None)
    }
    if args.peers:
        modes |= {
            "the same workers, --max-staleness 0": (
                replace(base, workers=ARMS, max_staleness=0, server=True),
                None,
            ),
            user: (
                alone,
                lambda: Subprocesses(
                    [functools.partial(slow, replace(alone, seed=i), 1) for i in range(ARMS)]
                ),
            ),
            "one lockstep vector env": (alone, lambda: slow(alone, ARMS)),
        }
    times, stats, _ = in_rounds(args, modes, functools.partial(slow, base))
    limit = "no arm ever waits for another or for the learner"
    times[limit] = np.full(len(times["ours"]), PACE * np.exp(SIGMA**2 / 2) / ARMS)
    report.add(
        make_row(
            f"{ARMS} arms that wait (log-normal, sigma {SIGMA:g})",
            "steps/s",
            times,
            {limit: PHYSICAL},
            list(modes)[1:],
            no_peer="" if args.peers else "--no-peers",
            bars=lambda ours, of_limit, over_peer: (
                [at_least("over the best synchronous way", over_peer, 2.5)] * args.peers
            ),
            work="the same arms, policy and learner; every episode of an arm draws its pace anew",
            note=f"mean staleness {stats['ours']['staleness/mean']:.1f}, "
            f"{stats['ours']['staleness/masked']:.3f} of the decisions masked",
        )
    )


def overhead(args: "BenchOptions", report: "Report") -> None:
    """What leases and the ledger add to the plain loop in one process."""
    t = replace(recipe("mujoco", "", "pi_rl", "state", "full"), demos="0", workers=0, envs=64)

    def plain():
        env = make_env(t, t.envs)
        learner = learner_for(t, env)
        collector = Collector(env, learner.policy, on_policy_options(t).gamma, 1)

        def loop():
            learner.update(collector.collect(learner.sampler, on_policy_options(t).decisions), 0.1)

        return loop

    def runtime():
        env = make_env(t, t.envs)
        learner = learner_for(t, env)
        feed = InProcessFeed(
            1,
            lambda i, refresh: Worker(
                i, Collector(env, learner.policy, on_policy_options(t).gamma, 1), learner.policy, refresh, 0
            ),
            t.envs * on_policy_options(t).decisions,
            0,
            on_policy_options(t).decisions,
            0,
        )

        def loop():
            rollout = feed.next()
            assert rollout is not None
            learner.update(rollout, 0.1, feed.version)
            feed.publish()

        return loop

    units = t.envs * on_policy_options(t).decisions * t.policy.execute
    times = in_turns({"ours": (runtime(), units), "the plain loop": (plain(), units)}, args.slice)
    report.add(
        make_row(
            "the runtime in one process",
            "steps/s",
            times,
            {"the plain loop": BARE},
            bars=lambda ours, of_limit, _: [at_least("of the plain loop", of_limit, 0.95)],
            work="the same env, collector and learner on both sides",
            no_peer="the plain loop, collect and update by turns, is what one would write",
        )
    )


def handover(args: "BenchOptions", report: "Report") -> None:
    """1 MB of a rollout from another process: written into a slot, announced, there to read.

    The limit and the peer are taken in turns with it, for caches and sleeping cores as they find them: a
    process copies as many bytes into shared memory, writes a byte into a pipe, and the one that wakes, on
    another core, copies them out; or it sends the columns through a `multiprocessing.Pipe`.
    """
    rows = {
        "obs/state": ((64, 256), np.dtype(np.float32)),
        "final/state": ((64, 1), np.dtype(np.float32)),
        "done": ((64,), np.dtype(bool)),
        "mask": ((64,), np.dtype(bool)),
        "success": ((64,), np.dtype(bool)),
        "executed": ((64,), np.dtype(np.int64)),
        "lengths": ((64,), np.dtype(np.int64)),
        "version": ((), np.dtype(np.int64)),
        **{k: ((64,), np.dtype(np.float32)) for k in ("rewards", "discounts", "returns", "gains")},
        "x0": ((64, 1, 1), np.dtype(np.float32)),
        "logp": ((64, 1), np.dtype(np.float32)),
    }
    fork, near = multiprocessing.get_context("fork"), os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slots.bin"
        buffer = RolloutBuffer.create(path, [rows], 16, 2)
        size = sum(v.nbytes for v in buffer.columns(0, 0).values())
        shared, target = np.frombuffer(mmap.mmap(-1, size), np.uint8), np.zeros(size, np.uint8)
        os.sched_setaffinity(0, {min(near)})
        (mine, theirs), there, back, (here, far) = duplex_pair(), os.pipe(), os.pipe(), fork.Pipe()
        children = [
            fork.Process(target=_writer, args=(theirs, path)),
            fork.Process(target=_copier, args=(shared, there[0], back[1])),
            fork.Process(target=_sender, args=(far, path)),
        ]
        for child in children:
            child.start()
            if len(near) > 1 and child.pid is not None:  # as workers are
                os.sched_setaffinity(child.pid, near - {min(near)})
        limit, peer, times = (
            "two copies and a byte through a pipe",
            "multiprocessing.Pipe, the columns pickled",
            [],
        )
        for _ in range(25 if args.quick else 300):
            mine.send(0)
            began = mine.recv()
            buffer.columns(0, 0)
            row = {"ours": time.perf_counter() - began}
            os.write(there[1], b"?")
            (began,) = struct.unpack("d", os.read(back[0], 8))
            np.copyto(target, shared)
            row[limit] = time.perf_counter() - began
            if args.peers:
                here.send(b"?")
                began, got = here.recv()
                row[peer] = time.perf_counter() - began
                assert sum(v.nbytes for v in got.values()) == size, "the peer sent something else"
            times.append(row)
        mine.send(None)
        here.send(b".")
        os.write(there[1], b".")
        for child in children:
            child.join(10)
        for fd in (*there, *back):
            os.close(fd)
        os.sched_setaffinity(0, near)
    report.add(
        make_row(
            "hand-over of 1 MB between processes",
            "us",
            columns(times[5:]),
            {limit: BARE},
            [peer] if args.peers else [],
            no_peer="" if args.peers else "--no-peers",
            bars=lambda ours, of_limit, _: [at_least("of limit", of_limit, 1)],
            work=f"{size} bytes that another process has, there to read in this one; the limit's and the "
            "peer's are this process's own, ours stay shared",
        )
    )


def _sender(pipe, path: Path) -> None:
    data = {k: np.zeros_like(v) for k, v in RolloutBuffer.open(path).columns(0, 0).items()}
    while pipe.recv() == b"?":
        pipe.send((time.perf_counter(), data))


def _copier(shared: np.ndarray, there: int, back: int) -> None:
    source = np.ones_like(shared)
    while os.read(there, 1) == b"?":
        began = time.perf_counter()  # CLOCK_MONOTONIC: the same for both processes
        np.copyto(shared, source)
        os.write(back, struct.pack("d", began))


def _writer(pipe, path: Path) -> None:
    buffer = RolloutBuffer.open(path)
    data = {k: np.zeros_like(v) for k, v in buffer.columns(0, 0).items()}
    while pipe.recv() is not None:
        began = time.perf_counter()
        for k, v in buffer.columns(0, 0).items():
            v[:] = data[k]
        pipe.send(began)
