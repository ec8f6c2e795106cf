"""`robo_rl bench bridge`: messages between two processes over DDS, the bridge's own work, and how chunks join.

One way: a child publishes JointState of 7 joints with its monotonic clock as stamp, 1000 times a second; the receiver
polls. Both read the machine's one clock, so the difference is the latency. From chunk to command: the bridge's own work
between a policy's answer and the joint targets handed to DDS, in lockstep on the simulated arm. Joins: chunks of a noisy plan arrive late by
0 to 400 ms with jitter; the schedule's largest step of a command against naive switching, which takes each as it comes.
"""

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from controllers.bridge import Inline
from controllers.loop import undisturbed
from controllers.schedule import Chunk, Schedule
from controllers.transport import JointState, Transport
from robo_rl.cli.bench_rows import Report, Row, at_most
from robo_rl.errors import MissingDependency

if TYPE_CHECKING:
    from robo_rl.cli.bench import Bench

DOMAIN = 99
SPEAK = """
import os, sys, time
from contextlib import suppress
from controllers.loop import real_time, undisturbed
from controllers.transport import JointState
from robo_rl.cli.wire import connect
parent = os.getppid()
wire = connect("bench_speaker", {domain})
out = wire.publisher("joint_states", JointState)
names, row = tuple(f"joint{{i}}" for i in range(7)), (0.5,) * 7
with undisturbed():
    real_time(lambda: out.publish(JointState(time.monotonic(), names, row, row, row)), 0.001, {seconds},
              going=lambda: os.getppid() == parent)
wire.close()
"""


def measure(args: "Bench", report: Report) -> None:
    """All rows of `robo_rl bench bridge`."""
    joins(args, report)
    for what, row in (("DDS one way", one_way), ("from chunk to command", chunk_to_command)):
        try:
            row(args, report)
        except MissingDependency as e:
            report.skip(what, str(e))


def one_way(args: "Bench", report: Report) -> None:
    """Latency of JointState at 1 kHz between two processes on loopback."""
    from robo_rl.cli.wire import connect
    seconds = max(args.slice / 2, 0.5)
    wire = connect("bench_listener", DOMAIN)
    child = None
    try:
        box = wire.subscription("joint_states", JointState, depth=64)
        child = subprocess.Popen([sys.executable, "-c", SPEAK.format(domain=DOMAIN, seconds=seconds + 1.0)])
        end = time.monotonic() + 180.0
        while not box.take() and time.monotonic() < end:
            time.sleep(0.001)
        with undisturbed() as real:
            box.take()  # what waited while this process tidied up
            ages, end = [], time.monotonic() + seconds
            while time.monotonic() < end:
                ages += [got.at - got.message.stamp for got in box.take()]
                time.sleep(1e-5)  # a real-time thread that never sleeps is throttled
    finally:
        if child:
            child.kill()
            child.wait()
        wire.close()
    if not ages:
        report.skip("DDS one way", "nothing came within 180 s")
        return
    us = 1e6 * np.array(ages)
    median, p99 = float(np.median(us)), float(np.percentile(us, 99))
    said = f"p99 {p99:.0f} us, max {us.max():.0f} us, {len(us)} of {round(1000 * seconds)} messages; " \
           f"real-time priority {'on' if real else 'not permitted'}"
    bars = [at_most("median us", median, 150)] + ([at_most("p99 us", p99, 400)] if real else [])
    pipe = 1e6 * bare_pipe()
    report.add(Row(what="DDS one way, JointState at 1 kHz, two processes", unit="us", ours=median, limit=pipe,
                   limit_is="a byte through a pipe, there and back, halved", of_limit=pipe / median, bars=bars, note=said))


class Both:
    """A lockstep wire whose joint targets go out over DDS as well; at: when the last one was handed over [s]."""

    def __init__(self, loop: Transport, dds: Transport):
        self.loop, self.dds, self.at = loop, dds, 0.0

    def __getattr__(self, name: str):
        return getattr(self.loop, name)

    def publisher(self, topic: str, kind: type, quality: str = "state"):
        here = self.loop.publisher(topic, kind, quality)
        if topic != "target_joint":
            return here
        self.there = self.dds.publisher(topic, kind, quality)

        def publish(message: JointState) -> None:
            self.there.publish(message)
            self.at = time.perf_counter()
            here.publish(message)
        return SimpleNamespace(publish=publish)


class Answering(Inline):
    """A policy that answers at once; at: when its last answer was taken [s]."""

    at = 0.0

    def poll(self, now: float):
        answer = super().poll(now)
        self.at = time.perf_counter() if answer else self.at
        return answer


def chunk_to_command(args: "Bench", report: Report) -> None:
    """What the bridge does between an answer of the policy and its first command on the wire."""
    from controllers.robot import load_robot
    from robo_rl.cli.robots import TRAINED, expected, lockstep, placed
    from robo_rl.cli.wire import connect
    robot, rng = load_robot("sim"), np.random.default_rng(0)
    task = expected(SimpleNamespace(sim="mujoco", task="pick_cube", control=""),
                    SimpleNamespace(state=36, views=(), image_size=0))
    wire, wires = connect("bench_bridge", DOMAIN), []
    try:
        body = lockstep(robot, task, TRAINED, wired=lambda loop: wires.append(Both(loop, wire)) or wires[-1])
        body.begin(*placed(robot, "pick_cube", 0))
        mind = Answering(lambda obs: rng.uniform(-0.3, 0.3, (1, 7)))
        ours, bare, end = [], [], time.monotonic() + max(args.slice / 2, 0.5)
        message = JointState(0.0, robot.joints, robot.home)
        with undisturbed():
            while time.monotonic() < end:
                body.tick(mind)
                ours.append(wires[0].at - mind.at)
                began = time.perf_counter()
                wires[0].there.publish(message)
                bare.append(time.perf_counter() - began)
    finally:
        wire.close()
    us, limit = 1e6 * float(np.median(ours)), 1e6 * float(np.median(bare))
    report.add(Row(what="from chunk to command: a policy's answer to joint targets on DDS", unit="us", ours=us, limit=limit,
                   limit_is="handing the message to DDS", of_limit=limit / us,
                   note=f"p99 {1e6 * np.percentile(ours, 99):.0f} us, {len(ours)} chunks; state {body.governor.state}"))


def bare_pipe(count: int = 300) -> float:
    """Seconds that a byte takes one way between two processes."""
    echo = "import os\nwhile b := os.read(0, 1): os.write(1, b)"
    child = subprocess.Popen([sys.executable, "-c", echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    times = []
    for _ in range(count):
        began = time.perf_counter()
        child.stdin.write(b"x")
        child.stdout.read(1)
        times.append(time.perf_counter() - began)
    child.stdin.close()
    child.wait()
    return float(np.median(times)) / 2


def plan(rng: np.random.Generator, t0: float, rows: int, dt: float) -> np.ndarray:
    """A chunk [rows, 3] [m] along a slow curve, off it by a constant few millimetres as policies are."""
    t = t0 + dt * np.arange(rows)
    return 0.05 * np.stack([np.sin(t), np.cos(1.3 * t), np.sin(0.7 * t)], 1) + rng.normal(0, 0.004, 3)


def switched(latency: float, jitter: float, seed: int, *, naive: bool, seconds: float = 20.0, dt: float = 0.02,
             rows: int = 32, most: float = 0.005) -> tuple[float, dict[str, int], int]:
    """(largest step of a command [m], counts of the schedule, rows that ran in another period than their own)."""
    rng = np.random.default_rng(seed)
    schedule = Schedule(dt, 3, max_step=np.inf if naive else most)
    coming: list[tuple[float, Chunk]] = []
    last, worst, wrong, asked = None, 0.0, 0, -np.inf
    steps = round(seconds / dt)
    for k in range(steps):
        now = k * dt
        if now - asked >= max(8 * dt, latency):
            asked = now
            late = latency + jitter * rng.random()
            coming.append((now + late, Chunk(plan(rng, now, rows, dt), now)))
        for due, chunk in [c for c in coming if c[0] <= now]:
            coming.remove((due, chunk))
            if naive:
                schedule.last = None  # no join: the command jumps
            schedule.add(chunk, now)
        row = schedule.row(now)
        if row is None:
            continue
        period = round((schedule.chunk.t0 + row.index * dt) / dt)
        wrong += period != k
        if last is not None:
            worst = max(worst, float(np.abs(row.values - last).max()))
        last = row.values
    return worst, dict(schedule.counts), wrong


def joins(args: "Bench", report: Report) -> None:
    """Largest step of a command where chunks join, over latencies of 0 to 400 ms."""
    runs = [(latency, jitter) for latency in (0.0, 0.1, 0.2, 0.4) for jitter in (0.0, 0.1)]
    ours = [switched(a, b, k, naive=False) for k, (a, b) in enumerate(runs)]
    bare = [switched(a, b, k, naive=True) for k, (a, b) in enumerate(runs)]
    step, jump = (1e3 * max(r[0] for r in rows) for rows in (ours, bare))
    wrong = sum(r[2] for r in ours)
    report.add(Row(what="largest step of a command where chunks join, latency 0 to 400 ms", unit="mm", ours=step,
                   limit=5.0, limit_is="what the governor allows", of_limit=min(5.0 / step, 1.0), peer=jump,
                   peer_is="naive switching", over_peer=jump / step,
                   bars=[at_most("mm", step, 5.0 + 1e-6), at_most("rows late or twice", wrong, 0)],
                   note=f"{sum(r[1].get('executed', 0) for r in ours)} rows ran, {wrong} of them late or twice"))
