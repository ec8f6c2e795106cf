"""`robo_rl doctor`: what works on this machine, and the exact command for what does not.

Every probe (`robo_rl/probes.py`) runs in a process of its own with a deadline, all at once: a driver that crashes or hangs
costs one line of the table, not the doctor.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from robo_rl.probes import PROBES, Probe, Row

DEADLINE = 15.0  # seconds, of each probe


@dataclass(frozen=True)
class Doctor:
    """Check this machine: what works, what does not, and what to install."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON document and nothing else."""


def ask(probe: Probe, deadline: float) -> list[Row]:
    """The rows of `probe`, or rows that say how it failed; takes at most `deadline` seconds."""
    code = f"from robo_rl.probes import answer; answer({probe.target!r})"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                             stdin=subprocess.DEVNULL, env=env, start_new_session=True, text=True)
    try:
        text, _ = child.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return [Row(what, "limited", f"no answer in {deadline:g} s; is the machine busy?", "robo_rl doctor")
                for what in probe.whats]
    from robo_rl.files import parse_json
    try:
        rows = parse_json(text.strip().splitlines()[-1], "its answer", (list, str))
    except (IndexError, ValueError):
        code = child.returncode
        return _failed(probe, f"crashed ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})")
    return _failed(probe, rows) if isinstance(rows, str) else [Row(**row) for row in rows]


def _failed(probe: Probe, fact: str) -> list[Row]:
    return [Row(what, "missing", fact, probe.remedy) for what in probe.whats]


def examine(probes: tuple[Probe, ...] = PROBES, deadline: float = DEADLINE) -> list[Row]:
    """Ask all probes at once; rows in the order of the probes."""
    rows: dict[int, list[Row]] = {}

    def one(i: int) -> None:
        rows[i] = ask(probes[i], deadline)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(probes))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return [row for i in range(len(probes)) for row in rows[i]]


def run(args: Doctor, probes: tuple[Probe, ...] = PROBES, deadline: float = DEADLINE) -> int:
    """Print the table or the document; 0 if what robo_rl cannot do without is there, else 1."""
    from robo_rl import __version__
    rows = examine(probes, deadline)
    needed = {what for p in probes if p.needed for what in p.whats} - {"CUDA"}
    healthy = not any(row.what in needed and row.status == "missing" for row in rows)
    if args.json:
        document = {"version": __version__, "healthy": healthy,
                    "rows": [asdict(row) | {"needed": row.what in needed} for row in rows]}
        print(json.dumps(document, indent=1))
    else:
        _table(rows, healthy)
    return 0 if healthy else 1


def _table(rows: list[Row], healthy: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    colour = {"ok": "green", "limited": "yellow", "missing": "red"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "", "fact"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(row.what, f"[{colour[row.status]}]{row.status}[/]", row.fact.replace("[", "\\["))
    console = Console(highlight=False)
    console.print(table)
    cures = list(dict.fromkeys((row.what, row.remedy) for row in rows if row.status != "ok" and row.remedy))
    if cures:
        console.print("\n[bold]To get the rest[/]")
        for what, remedy in cures:
            console.print(f"  {what}:", markup=False)
            console.print(f"    {remedy}", markup=False, soft_wrap=True)  # one line, to be copied
    console.print("\nrobo_rl works here." if healthy else "\n[red]robo_rl does not work here yet.[/]")
