"""Measure the console on loopback: pictures per second and robot, take-over to first human action, stop after a lost
connection.

    python launch/measure_console.py RUN --robots 8
"""

import asyncio
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


@dataclass(frozen=True)
class Args:
    run: tyro.conf.Positional[str]
    robots: int = 8
    speed: float = 0.5
    size: int = 192
    seconds: float = 20.0
    takes: int = 10


async def state(ws) -> dict:
    """The next state; pictures and answers before it are dropped."""
    while True:
        m = await ws.recv()
        if isinstance(m, str) and parse_json(m, "an answer", limit=1 << 24)["t"] == "state":
            return parse_json(m, "an answer", limit=1 << 24)


async def hold(ws, robot: int) -> int:
    """Take a robot -> number of the hold."""
    await ws.send(json.dumps({"t": "take", "robot": robot}))
    while True:
        m = await ws.recv()
        if isinstance(m, str) and parse_json(m, "an answer", limit=1 << 24)["t"] in ("hold", "error"):
            return parse_json(m, "an answer", limit=1 << 24).get("number", 0)


async def measure(args: Args, ann: str, bob: str, server: psutil.Process) -> dict:
    from websockets.asyncio.client import connect
    counts, out = [0] * args.robots, {}
    async with connect(ann, open_timeout=60) as a, connect(bob, open_timeout=60) as b:
        first = await state(a)
        await asyncio.sleep(3)
        until, began, spent = time.monotonic() + args.seconds, time.monotonic(), sum(server.cpu_times()[:2])
        while time.monotonic() < until:
            m = await a.recv()
            if isinstance(m, bytes):
                counts[m[0]] += 1
        took, spent = time.monotonic() - began, sum(server.cpu_times()[:2]) - spent
        out["pictures_per_s_and_robot"] = min(counts) / took
        out["cpu_share"] = spent / took
        out["pictures_per_cpu_s_and_robot"] = min(counts) / spent
        drive = {"t": "drive", "action": [0.2] * len(first["axes"]), "phase": "correction"}
        for k in range(args.takes):
            robot = k % args.robots
            number = await hold(a, robot)
            for _ in range(15):
                await a.send(json.dumps(drive | {"robot": robot, "number": number}))
                await asyncio.sleep(0.02)
            await a.send(json.dumps({"t": "back", "robot": robot, "number": number}))
        first_ms = (await state(a))["account"]["first_ms"]
        for _ in range(50):
            first_ms = (await state(a))["account"]["first_ms"] or first_ms
        out["take_over_to_first_action_ms"] = {"median": statistics.median(first_ms), "max": max(first_ms),
                                               "n": len(first_ms)}
        number = await hold(a, 0)
        for _ in range(30):
            await a.send(json.dumps(drive | {"robot": 0, "number": number}))
            await asyncio.sleep(0.02)
        a.transport.abort()
        began = time.monotonic()
        while (await state(b))["robots"][0]["phase"] == "correction":
            pass
        out["stop_seen_after_lost_connection_ms"] = 1000 * (time.monotonic() - began)
    return out


def main(args: Args) -> None:
    process = subprocess.Popen([sys.executable, "-m", "robo_rl", "console", args.run, "--robots", str(args.robots),
                                "--port", "0",
                                "--operators", "ann,bob", "--speed", str(args.speed), "--size", str(args.size)],
                               stdout=subprocess.PIPE, text=True, env=None)
    try:
        found = {}
        while len(found) < 2:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the console did not start")
            found |= dict(re.findall(r"(\w+): http(://\S+)", line))
        ann, bob = ("ws" + found[n].replace("/?", "/ws?") for n in ("ann", "bob"))
        print(json.dumps(asyncio.run(measure(args, ann, bob, psutil.Process(process.pid))), indent=1))
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main(tyro.cli(Args))
