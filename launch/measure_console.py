"""Measure the console on loopback: pictures per second and robot, take-over to first human action, stop after
a lost connection.

python launch/measure_console.py RUN --robots 8
"""

import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil
import tyro

from robo_rl.files import parse_json
from robo_rl.human.console.access import exchange_address


@dataclass(frozen=True)
class Args:
    run: tyro.conf.Positional[str]
    robots: int = 8
    speed: float = 0.5
    size: int = 480
    seconds: float = 20.0
    takes: int = 10


async def seen(ws) -> "str | bytes":
    """The next message; a frame is acknowledged, as the page does once it has shown it."""
    m = await ws.recv()
    if isinstance(m, bytes):
        head = parse_json(m[4 : 4 + int.from_bytes(m[:4], "little")], "a frame")
        await ws.send(json.dumps({"t": "seen", "frame": head["frame"]}))
    return m


async def state(ws) -> dict:
    """The next state; pictures and answers before it are dropped."""
    while True:
        m = await seen(ws)
        if isinstance(m, str) and (answer := parse_json(m, "an answer"))["t"] == "state":
            return answer


async def hold(ws, robot: int) -> int:
    """Take a robot -> number of the hold."""
    await ws.send(json.dumps({"t": "take", "robot": robot}))
    while True:
        m = await seen(ws)
        if isinstance(m, str) and (answer := parse_json(m, "an answer"))["t"] in ("hold", "error"):
            return answer.get("number", 0)


async def watch(ws, out: dict) -> None:
    """Keep the phase of robot 0 in `out` as a page sees it."""
    while True:
        out["phase"] = (await state(ws))["robots"][0]["phase"]


async def steer(ws, steps: int, command: dict) -> None:
    """Send a command every 20 ms, and acknowledge frames in between."""
    for _ in range(steps):
        await ws.send(json.dumps(command))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                while True:
                    await seen(ws)


async def measure(args: Args, ann: str, bob: str, server: psutil.Process) -> dict:
    from websockets.asyncio.client import connect

    counts, out = [0] * args.robots, {}
    (at, a_headers), (_, b_headers) = exchange_address(ann), exchange_address(bob)
    async with (
        connect(at, additional_headers=a_headers, open_timeout=60) as a,
        connect(at, additional_headers=b_headers, open_timeout=60) as b,
    ):
        first, seen_by_bob = await state(a), {}
        watching = asyncio.create_task(watch(b, seen_by_bob))
        await asyncio.sleep(3)
        until, began, spent = time.monotonic() + args.seconds, time.monotonic(), sum(server.cpu_times()[:2])
        while time.monotonic() < until:
            m = await seen(a)
            if isinstance(m, bytes):
                head = parse_json(m[4 : 4 + int.from_bytes(m[:4], "little")], "a frame")
                for robot in {p["robot"] for p in head["pictures"]}:
                    counts[robot] += 1
        took, spent = time.monotonic() - began, sum(server.cpu_times()[:2]) - spent
        out["pictures_per_s_and_robot"] = min(counts) / took
        out["cpu_share"] = spent / took
        out["pictures_per_cpu_s_and_robot"] = min(counts) / spent
        drive = {"t": "drive", "action": [0.2] * len(first["axes"]), "phase": "correction"}
        for k in range(args.takes):
            robot = k % args.robots
            number = await hold(a, robot)
            await steer(a, 15, drive | {"robot": robot, "number": number})
            await a.send(json.dumps({"t": "back", "robot": robot, "number": number}))
        first_ms = (await state(a))["account"]["first_ms"]
        for _ in range(50):
            first_ms = (await state(a))["account"]["first_ms"] or first_ms
        out["take_over_to_first_action_ms"] = {
            "median": statistics.median(first_ms),
            "max": max(first_ms),
            "n": len(first_ms),
        }
        number = await hold(a, 0)
        command = drive | {"robot": 0, "number": number}
        await steer(a, 30, command)
        while seen_by_bob["phase"] != "correction":
            await steer(a, 1, command)
        a.transport.abort()
        began = time.monotonic()
        while seen_by_bob["phase"] == "correction":
            await asyncio.sleep(0.001)
        watching.cancel()
        out["stop_seen_after_lost_connection_ms"] = 1000 * (time.monotonic() - began)
    return out


def main(args: Args) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "robo_rl",
            "console",
            args.run,
            "--robots",
            str(args.robots),
            "--port",
            "0",
            "--operators",
            "ann,bob",
            "--speed",
            str(args.speed),
            "--size",
            str(args.size),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=None,
    )
    try:
        found = {}
        while len(found) < 2:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the console did not start")
            found |= dict(re.findall(r"(\w+): http(://\S+)", line))
        ann, bob = ("http" + found[n] for n in ("ann", "bob"))
        print(json.dumps(asyncio.run(measure(args, ann, bob, psutil.Process(process.pid))), indent=1))
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main(tyro.cli(Args))
