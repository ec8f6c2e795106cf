"""Consoles for tests: a small run, `robo_rl console` on it, and a page without a browser."""

import asyncio
import contextlib
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from commands import TINY, Command, robo_rl

from robo_rl.human.console.access import exchange_address

RUNS: list[Path] = []


def trained(factory) -> Path:
    """A folder with a run `run`; trained once, and then copied."""
    if not RUNS:
        folder = factory.mktemp("run")
        tiny = [
            a
            for i, a in enumerate(TINY)
            if not any(str(x).startswith("--rl.") for x in TINY[max(0, i - 1) : i + 1])
        ]
        done = robo_rl(folder, "train", "--algo", "bc", *tiny, "--out", "run")
        assert done.code == 0, done.err
        RUNS.append(folder)
    folder = factory.mktemp("console")
    shutil.copytree(RUNS[0] / "run", folder / "run")
    return folder


@contextlib.contextmanager
def console(folder, *argv, first=None):
    """A console that runs -> (its command, {operator: address})."""
    pytest.importorskip("websockets", reason="needs robo_rl[console]")
    command = Command(
        folder,
        [
            "console",
            "run",
            "--port",
            "0",
            "--robots",
            "2",
            "--operators",
            "ann,bob",
            "--max-delay",
            "30",
            *argv,
        ],
        env={"PYTHONUNBUFFERED": "1"},
        first=first,
    )
    try:
        command.until(lambda: command.out.exists() and command.out.read_text().count("http://") == 2, 120)
        yield command, dict(re.findall(r"(\w+): (http\S+)", command.out.read_text()))
    finally:
        if command.process.is_alive():
            command.process.kill()
        command.process.join()


class Page:
    """What the page is to the console."""

    def __init__(self, ws):
        self.ws, self.state, self.said, self.pictures = ws, None, [], 0

    async def hear(self, until, timeout=60):
        end = time.monotonic() + timeout
        while not until(self):
            m = await asyncio.wait_for(self.ws.recv(), max(0.01, end - time.monotonic()))
            if isinstance(m, bytes):
                length = int.from_bytes(m[:4], "little")
                head = json.loads(m[4 : 4 + length])
                if head["pictures"]:
                    self.pictures += 1
                    assert m[4 + length : 6 + length] == b"\xff\xd8"
                    assert len(m) == 4 + length + sum(p["bytes"] for p in head["pictures"])
                await self.ws.send(json.dumps({"t": "seen", "frame": head["frame"]}))
            elif (m := json.loads(m))["t"] == "state":
                self.state = m
            else:
                self.said.append(m)

    async def ask(self, **message):
        """Send, and wait for the answer."""
        before = len(self.said)
        await self.ws.send(json.dumps(message))
        await self.hear(lambda p: len(p.said) > before)
        return self.said[-1]


SESSIONS: dict[str, tuple] = {}  # an address works once; what it was exchanged for works from then on


def connect(address):
    from websockets.asyncio.client import connect

    if address not in SESSIONS:
        SESSIONS[address] = exchange_address(address)
    at, headers = SESSIONS[address]
    return connect(at, additional_headers=headers, open_timeout=60)


async def drive(page, number, steps=20, action=None, **more):
    a = action if action is not None else [0.2] * len(page.state["axes"])
    for _ in range(steps):
        await page.ws.send(
            json.dumps(
                {"t": "drive", "robot": 0, "number": number, "action": a, "phase": "correction", **more}
            )
        )
        await asyncio.sleep(0.02)
