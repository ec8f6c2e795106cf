"""`robo_rl bench async`: collecting and learning at once against one after the other, and what the runtime costs.

Sims that compute: the whole run on this machine's cores, synchronous (all cores simulate, then one learns) and with
workers. Sims that wait, as robots and remote sims do: 16 arms, each with a pace of its own for every episode (log-normal,
sigma 1), in lockstep, synchronous and asynchronous. One feed at a time exists, so nobody works during another's turn.
"""

import functools
import importlib
import mmap
import multiprocessing
import os
import struct
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from robo_rl.cli.bench_rows import Row, at_least, at_most, in_turns, make_row
from robo_rl.cli.feeds import cores, make_feed
from robo_rl.cli.presets import preset
from robo_rl.cli.train import Train, make_env, obs_spec, probe_env
from robo_rl.policies import make_policy
from robo_rl.rollout import Collector, mix
from robo_rl.runtime.local import Local
from robo_rl.runtime.processes import pair
from robo_rl.runtime.slots import Slots
from robo_rl.runtime.worker import Worker

if TYPE_CHECKING:
    from robo_rl.cli.bench import Bench
    from robo_rl.cli.bench_rows import Report

ARMS, PACE, SIGMA = 16, 0.004, 1.0  # robots that wait, median seconds per control step, spread over episodes


def measure(args: "Bench", report: "Report") -> None:
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


def learner_for(t: Train, env):
    return importlib.import_module(f"robo_rl.algos.{t.algo}").make(make_policy(t.policy, obs_spec(env, False), 0), t.rl, 0)


def steps_per_second(t: Train, seconds: float, env=None, wrap=None,
                     means: dict[str, list[float]] | None = None) -> tuple[float, float, dict[str, float]]:
    """(env steps per second, share of all cores that was busy, last statistics) of a run that is under way; `means`
    collects every statistic."""
    env = env or probe_env(t)
    learner = learner_for(t, env)
    with tempfile.TemporaryDirectory() as folder:
        feed, _ = make_feed(t, Path(folder), env, learner, None, wrap)
        try:
            steps, stats, begin, busy, i = 0.0, {}, 0.0, 0.0, 0
            while i < 4 or time.perf_counter() - begin < seconds:
                if i == 3:  # the pipeline is full
                    begin, steps = time.perf_counter(), 0.0
                    psutil.cpu_percent()
                clock = time.perf_counter()
                rollout = feed.next()
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


def computing(args: "Bench", report: "Report") -> None:
    """pick_cube with the preset of `robo_rl train`."""
    if cores() < 2:
        report.skip("sims that compute", "this machine has one core")
        return
    base = replace(preset("mujoco", "", "pi_rl", "state", "full"), demos="0")
    runs: dict[str, list[tuple[float, float, dict]]] = {"sync": [], "async": []}
    for _ in range(1 if args.quick else 3):
        for name, t in (("sync", replace(base, workers=0, max_staleness=0)), ("async", replace(base, max_staleness=1))):
            runs[name].append(steps_per_second(t, args.slice))
    ours, peer = (float(np.median([r[0] for r in runs[k]])) for k in ("async", "sync"))
    busy = float(np.median([r[1] for r in runs["async"]]))
    gain = float(np.median([a[0] / s[0] for a, s in zip(runs["async"], runs["sync"], strict=True)]))
    report.add(Row(what="pick_cube, pi_rl, workers beside the learner", unit="steps/s", ours=ours, limit=ours / busy,
                   limit_is="every core busy all the time", of_limit=busy, peer=peer, peer_is="synchronous, one process",
                   over_peer=gain, bars=[at_least("over synchronous", gain, 1.0), at_least("busy cores", busy, 0.9)],
                   note=f"staleness {runs['async'][-1][2]['stal/mean']:.2f} on average"))


class Waits:
    """A vector env whose steps take real time: each episode of each env has a pace of its own; the slowest counts."""

    def __init__(self, env, seed: int, pace: float = PACE):
        self.env, self.seed, self.count, self.median = env, seed, 0, pace
        self.pace = self._draw(env.num_envs)

    def _draw(self, n: int) -> np.ndarray:
        self.count += 1
        return self.median * np.exp(SIGMA * np.random.default_rng(mix(self.seed, self.count)).standard_normal(n))

    def __getattr__(self, name: str):
        return getattr(self.env, name)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.env.num_envs, bool))
        self.pace = np.where(mask, self._draw(self.env.num_envs), self.pace)
        return self.env.reset(seed=seed, options=options)

    def step(self, actions):
        time.sleep(float(self.pace.max()))
        return self.env.step(actions)


def slow(t: Train, n: int, pace: float = PACE):
    """The env of a run, made to wait `pace` seconds per control step in the median."""
    return Waits(make_env(t, n), mix(t.seed, time.monotonic_ns()), pace)


def waiting(args: "Bench", report: "Report") -> None:
    """16 arms that wait, reach."""
    base = preset("mujoco", "reach", "pi_rl", "state", "full")
    base = replace(base, demos="0", envs=ARMS, threads=1, rl=replace(base.rl, decisions=8, minibatch=64, epochs=2))
    modes = {"lockstep": replace(base, workers=0, max_staleness=0),
             "sync": replace(base, workers=ARMS, max_staleness=0, server=True),
             "ours": replace(base, workers=ARMS, max_staleness=4, server=True)}
    got: dict[str, list] = {k: [] for k in modes}
    for _ in range(1 if args.quick else 3):
        for name, t in modes.items():
            env = slow(t, ARMS) if name == "lockstep" else None
            got[name].append(steps_per_second(t, args.slice, env, functools.partial(slow, t)))
    rate = {k: float(np.median([r[0] for r in v])) for k, v in got.items()}
    gain = float(np.median([a[0] / s[0] for a, s in zip(got["ours"], got["lockstep"], strict=True)]))
    ideal = ARMS / (PACE * np.exp(SIGMA**2 / 2))
    report.add(Row(what=f"{ARMS} arms that wait (log-normal, sigma {SIGMA:g})", unit="steps/s", ours=rate["ours"],
                   limit=ideal, limit_is="no arm ever waits for another", of_limit=rate["ours"] / ideal,
                   peer=rate["lockstep"], peer_is="one lockstep vector env", over_peer=gain,
                   bars=[at_least("over synchronous", gain, 2.5)],
                   note=f"synchronous workers {rate['sync']:.0f} steps/s; staleness {got['ours'][-1][2]['stal/mean']:.1f} "
                        f"on average, {got['ours'][-1][2]['stal/masked']:.3f} of the decisions masked"))


def overhead(args: "Bench", report: "Report") -> None:
    """What leases and the ledger add to the plain loop in one process."""
    t = replace(preset("mujoco", "", "pi_rl", "state", "full"), demos="0", workers=0, envs=64)

    def plain():
        env = make_env(t, t.envs)
        learner = learner_for(t, env)
        collector = Collector(env, learner.policy, t.rl.gamma, 1)

        def loop():
            learner.update(collector.collect(learner.sampler, t.rl.decisions), 0.1)
        return loop

    def runtime():
        env = make_env(t, t.envs)
        learner = learner_for(t, env)
        feed = Local(1, lambda i, refresh: Worker(i, Collector(env, learner.policy, t.rl.gamma, 1), learner.policy, refresh, 0),
                     t.envs * t.rl.decisions, 0, t.rl.decisions, 0)

        def loop():
            learner.update(feed.next(), 0.1, feed.version)
            feed.publish()
        return loop
    units = t.envs * t.rl.decisions * t.policy.execute
    times = in_turns({"ours": (runtime(), units), "the plain loop": (plain(), units)}, args.slice)
    report.add(make_row("the runtime in one process", "steps/s", times, "the plain loop",
                        bars=lambda ours, of_limit, _: [at_least("of the plain loop", of_limit, 0.95)]))


def handover(args: "Bench", report: "Report") -> None:
    """1 MB of a rollout from another process: written into a slot, announced, there to read.

    The limit is taken in turns with it, for caches and sleeping cores as it finds them: a process copies as many bytes
    into shared memory, writes a byte into a pipe, and the one that wakes, on another core, copies them out.
    """
    rows = {"obs/state": ((64, 256), np.dtype(np.float32)), "final/state": ((64, 1), np.dtype(np.float32)),
            "done": ((64,), np.dtype(bool)), "mask": ((64,), np.dtype(bool)), "success": ((64,), np.dtype(bool)),
            "executed": ((64,), np.dtype(np.int64)), "lengths": ((64,), np.dtype(np.int64)), "version": ((), np.dtype(np.int64)),
            **{k: ((64,), np.dtype(np.float32)) for k in ("rewards", "discounts", "returns", "gains")},
            "x0": ((64, 1, 1), np.dtype(np.float32)), "logp": ((64, 1), np.dtype(np.float32))}
    fork, near = multiprocessing.get_context("fork"), os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slots.bin"
        slots = Slots.create(path, [rows], 16, 2)
        size = sum(v.nbytes for v in slots.columns(0, 0).values())
        shared, target = np.frombuffer(mmap.mmap(-1, size), np.uint8), np.zeros(size, np.uint8)
        os.sched_setaffinity(0, {min(near)})
        (mine, theirs), there, back = pair(), os.pipe(), os.pipe()
        children = [fork.Process(target=_writer, args=(theirs, path)),
                    fork.Process(target=_copier, args=(shared, there[0], back[1]))]
        for child in children:
            child.start()
            if len(near) > 1:  # as workers are
                os.sched_setaffinity(child.pid, near - {min(near)})
        lags, limits = [], []
        for _ in range(20 if args.quick else 300):
            mine.send(0)
            began = mine.recv()
            slots.columns(0, 0)
            lags.append(time.perf_counter() - began)
            os.write(there[1], b"?")
            began, = struct.unpack("d", os.read(back[0], 8))
            np.copyto(target, shared)
            limits.append(time.perf_counter() - began)
        mine.send(None)
        os.write(there[1], b".")
        for child in children:
            child.join(10)
        for fd in (*there, *back):
            os.close(fd)
        os.sched_setaffinity(0, near)
    ours, limit = (float(np.median(v[5:])) for v in (lags, limits))
    report.add(Row(what="hand-over of 1 MB between processes", unit="us", ours=ours * 1e6, limit=limit * 1e6,
                   limit_is="two copies + a byte through a pipe", of_limit=limit / ours,
                   bars=[at_most("us", ours * 1e6, limit * 1e6)]))


def _copier(shared: np.ndarray, there: int, back: int) -> None:
    source = np.ones_like(shared)
    while os.read(there, 1) == b"?":
        began = time.perf_counter()  # CLOCK_MONOTONIC: the same for both processes
        np.copyto(shared, source)
        os.write(back, struct.pack("d", began))


def _writer(pipe, path: Path) -> None:
    slots = Slots.open(path)
    data = {k: np.zeros_like(v) for k, v in slots.columns(0, 0).items()}
    while pipe.recv() is not None:
        began = time.perf_counter()
        for k, v in slots.columns(0, 0).items():
            v[:] = data[k]
        pipe.send(began)
