"""`robo_rl bench bridge`: messages between two processes over DDS, the bridge's own work, and how chunks
join.

One way: a child publishes JointState of 7 joints with its monotonic clock as stamp, 1000 times a second; the
receiver polls. Both read the machine's one clock, so the difference is the latency. From chunk to command:
the bridge's own work between a policy's answer and the joint targets handed to DDS, in lockstep on the
simulated arm. Joins: chunks of a noisy plan arrive late by 0 to 400 ms with jitter, at most 5 mm of a step
allowed; the schedule's largest step of a command against temporal ensembling (ACT, LeRobot) and against naive
switching, which takes each as it comes.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from controllers.loop import undisturbed
from controllers.policy_client import InProcessPolicy
from controllers.schedule import ActionChunk, Schedule
from controllers.transport import JointState, Transport
from robo_rl.bench.rows import BARE, LEAST, NONE, PHYSICAL, Report, at_most, columns, make_row
from robo_rl.errors import MissingDependency

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions

DOMAIN = 99
SPEAK = """
import os, sys, time
from contextlib import suppress
from controllers.loop import real_time, undisturbed
from controllers.transport import JointState
from robo_rl.experiment.wire import connect
parent = os.getppid()
wire = connect("bench_speaker", {domain})
out = wire.publisher("joint_states", JointState)
names, row = tuple(f"joint{{i}}" for i in range(7)), (0.5,) * 7
with undisturbed():
    real_time(lambda: out.publish(JointState(time.monotonic(), names, row, row, row)), 0.001, {seconds},
              going=lambda: os.getppid() == parent)
wire.close()
"""


def measure(args: "BenchOptions", report: Report) -> None:
    """All rows of `robo_rl bench bridge`."""
    joins(args, report)
    for what, row in (("DDS one way", one_way), ("from chunk to command", chunk_to_command)):
        try:
            row(args, report)
        except MissingDependency as e:
            report.skip(what, str(e))


def one_way(args: "BenchOptions", report: Report) -> None:
    """Latency of JointState at 1 kHz between two processes on loopback."""
    from robo_rl.experiment.wire import connect

    seconds = max(args.slice / 2, 0.5)
    wire = connect("bench_listener", DOMAIN)
    child = None
    try:
        box = wire.subscription("joint_states", JointState, depth=64)
        child = subprocess.Popen(
            [sys.executable, "-c", SPEAK.format(domain=DOMAIN, seconds=2 * seconds + 5.0)]
        )
        end = time.monotonic() + 180.0
        while not box.take() and time.monotonic() < end:
            time.sleep(0.001)
        with undisturbed() as real:
            box.take()  # what waited while this process tidied up
            parts, pipes = [], []
            for _ in range(LEAST):
                box.take()
                ages, end = [], time.monotonic() + seconds / LEAST
                while time.monotonic() < end:
                    ages += [got.at - got.message.stamp for got in box.take()]
                    time.sleep(1e-5)  # a real-time thread that never sleeps is throttled
                parts.append(ages)
                pipes.append(bare_pipe(60))
    finally:
        if child:
            child.kill()
            child.wait()
        wire.close()
    if not all(parts):
        report.skip("DDS one way", "nothing came within 180 s")
        return
    us = 1e6 * np.concatenate(parts)
    median, p99, limit = (
        float(np.median(us)),
        float(np.percentile(us, 99)),
        "a byte through a pipe, there and back, halved",
    )
    said = (
        f"p99 {p99:.0f} us, max {us.max():.0f} us, {len(us)} of {round(1000 * seconds)} messages; "
        f"real-time priority {'on' if real else 'not permitted'}"
    )
    bars = [at_most("median us", median, 150)] + ([at_most("p99 us", p99, 400)] if real else [])
    times = columns(
        [{"ours": float(np.median(ages)), limit: pipe} for ages, pipe in zip(parts, pipes, strict=True)]
    )
    report.add(
        make_row(
            "DDS one way, JointState at 1 kHz, two processes",
            "us",
            times,
            {limit: BARE},
            bars=lambda *_: bars,
            note=said,
            no_peer="rclpy is on no package index, and its messages take DDS too",
            work="the limit wakes another process with one byte; ours carries 21 numbers, 7 names and a "
            "stamp",
        )
    )


class Both:
    """A lockstep wire whose joint targets go out over DDS as well; at: when the last one was handed over
    [s]."""

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


class Answering(InProcessPolicy):
    """A policy that answers at once; at: when its last answer was taken [s]."""

    at = 0.0

    def poll(self, now: float):
        answer = super().poll(now)
        self.at = time.perf_counter() if answer else self.at
        return answer


def to_and_fro(rng: np.random.Generator):
    """A policy of one row [1,7] at random, and then back: however long it moves an arm, that stays where it
    began."""
    rows: list[np.ndarray] = []

    def decide(obs) -> np.ndarray:
        if not rows:
            rows.extend((row := rng.uniform(-0.3, 0.3, (1, 7)), -row))
        return rows.pop(0)

    return decide


def chunk_to_command(args: "BenchOptions", report: Report) -> None:
    """What the bridge does between an answer of the policy and its first command on the wire."""
    from controllers.robot import load_robot
    from robo_rl.experiment.arm import TRAINING_SPEED, make_lockstep_arm, policy_interface
    from robo_rl.experiment.scenes import start_placement
    from robo_rl.experiment.wire import connect

    robot, rng = load_robot("sim"), np.random.default_rng(0)
    task = policy_interface(
        SimpleNamespace(sim="mujoco", task="pick_cube", control=""),
        SimpleNamespace(state=36, views=(), image_size=0),
    )
    wire, wires = connect("bench_bridge", DOMAIN), []
    try:
        body = make_lockstep_arm(
            robot,
            task,
            TRAINING_SPEED,
            wrap_transport=lambda loop: wires.append(Both(loop, wire)) or wires[-1],
        )
        body.begin(*start_placement(robot, "pick_cube", 0))
        mind, ours, bare = Answering(to_and_fro(rng)), [], []
        message = JointState(0.0, robot.joints, robot.home)
        with undisturbed():
            end = time.monotonic() + max(args.slice / 2, 0.5)
            while len(ours) < LEAST or time.monotonic() < end:
                body.tick(mind)
                assert body.governor.state == body.bridge.governor.state == "ACTIVE", (
                    "an arm that was stopped commands nothing"
                )
                ours.append(wires[0].at - mind.at)
                began = time.perf_counter()
                wires[0].there.publish(message)
                bare.append(time.perf_counter() - began)
    finally:
        wire.close()
    limit = "handing the message to DDS"
    report.add(
        make_row(
            "from chunk to command: a policy's answer to joint targets on DDS",
            "us",
            {"ours": np.array(ours), limit: np.array(bare)},
            {limit: BARE},
            note=f"p99 {1e6 * np.percentile(ours, 99):.0f} us",
            work="one message of joint targets is handed over on both sides",
            no_peer="no other bridge governs joint targets in this interpreter",
        )
    )


def bare_pipe(count: int = 300) -> float:
    """Seconds that a byte takes one way between two processes."""
    echo = "import os\nwhile b := os.read(0, 1): os.write(1, b)"
    child = subprocess.Popen(
        [sys.executable, "-c", echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert child.stdin is not None and child.stdout is not None
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
    return curve(t0 + dt * np.arange(rows)) + rng.normal(0, 0.004, 3)


def curve(t: np.ndarray) -> np.ndarray:
    """Where the plan wants to be at times t [n] [s]: [n, 3] [m]."""
    return 0.05 * np.stack([np.sin(t), np.cos(1.3 * t), np.sin(0.7 * t)], 1)


def arriving(
    latency: float, jitter: float, seed: int, seconds: float, dt: float, rows: int
) -> Iterator[tuple[int, float, list[ActionChunk]]]:
    """(period, time, chunks that came in it): the policy is asked every 8 periods, or when its last answer
    is here."""
    rng, coming, asked = np.random.default_rng(seed), [], -np.inf
    for k in range(round(seconds / dt)):
        now = k * dt
        if now - asked >= max(8 * dt, latency):
            asked = now
            late = latency + jitter * rng.random()
            coming.append((now + late, ActionChunk(plan(rng, now, rows, dt), now)))
        here = [c for c in coming if c[0] <= now]
        coming = [c for c in coming if c[0] > now]
        yield k, now, [chunk for _, chunk in here]


def switched(
    latency: float,
    jitter: float,
    seed: int,
    *,
    naive: bool,
    seconds: float = 20.0,
    dt: float = 0.02,
    rows: int = 32,
    most: float = 0.005,
) -> tuple[float, dict[str, int], int]:
    """(largest step of a command [m], counts of the schedule, rows that ran in another period than their
    own)."""
    schedule = Schedule(dt, 3, max_step=np.inf if naive else most)
    last, worst, wrong = None, 0.0, 0
    for k, now, chunks in arriving(latency, jitter, seed, seconds, dt, rows):
        for chunk in chunks:
            if naive:
                schedule.last = None  # no join: the command jumps
            schedule.add(chunk, now)
        row = schedule.row(now)
        if row is None:
            continue
        assert schedule.chunk is not None
        wrong += round((schedule.chunk.t0 + row.index * dt) / dt) != k
        if last is not None:
            worst = max(worst, float(np.abs(row.values - last).max()))
        last = row.values
    return worst, dict(schedule.counts), wrong


def ensembled(
    latency: float,
    jitter: float,
    seed: int,
    seconds: float = 20.0,
    dt: float = 0.02,
    rows: int = 32,
    decay: float = 0.01,
) -> float:
    """Largest step [m] of temporal ensembling: the mean of all chunks' rows for a period, weights
    exp(-decay i), i = 0 the oldest (ACT, arXiv 2304.13705, section IV-B; LeRobot's default decay)."""
    here: list[ActionChunk] = []
    last, worst = None, 0.0
    for _, now, chunks in arriving(latency, jitter, seed, seconds, dt, rows):
        here = [c for c in here + chunks if now < c.t0 + rows * dt - 1e-9]
        if not here:
            continue
        due = np.stack([c.rows[round((now - c.t0) / dt)] for c in sorted(here, key=lambda c: c.t0)])
        weight = np.exp(-decay * np.arange(len(due)))
        command = weight @ due / weight.sum()
        if last is not None:
            worst = max(worst, float(np.abs(command - last).max()))
        last = command
    return worst


def joins(args: "BenchOptions", report: Report) -> None:
    """Largest step of a command where chunks join, over latencies of 0 to 400 ms."""
    runs = [(latency, jitter) for latency in (0.0, 0.1, 0.2, 0.4) for jitter in (0.0, 0.1)]
    ours = [switched(a, b, k, naive=False) for k, (a, b) in enumerate(runs)]
    limit, ensemble, naive = (
        "the plan's own largest step, nothing to join",
        "temporal ensembling, decay 0.01 (ACT, LeRobot)",
        "naive switching",
    )
    steps = {
        "ours": np.array([r[0] for r in ours]),
        limit: np.full(len(runs), np.abs(np.diff(curve(np.arange(0, 20, 0.02)), axis=0)).max()),
    }
    if args.peers:
        steps[ensemble] = np.array([ensembled(a, b, k) for k, (a, b) in enumerate(runs)])
        steps[naive] = np.array([switched(a, b, k, naive=True)[0] for k, (a, b) in enumerate(runs)])
    wrong, step = sum(r[2] for r in ours), 1e3 * float(steps["ours"].max())
    report.add(
        make_row(
            "largest step of a command where chunks join, latency 0 to 400 ms",
            "mm",
            steps,
            {limit: PHYSICAL},
            [ensemble, naive] if args.peers else [],
            clock=NONE,
            no_peer="" if args.peers else "--no-peers",
            bars=lambda *_: [
                at_most("mm in the worst run", step, 5.0 + 1e-6),
                at_most("rows late or twice", wrong, 0),
            ],
            work=f"{len(runs)} runs of 20 s with the same chunks, arriving at the same times",
            note=f"{sum(r[1].get('executed', 0) for r in ours)} rows ran, {wrong} of them late or twice",
        )
    )
