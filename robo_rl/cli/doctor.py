"""`robo_rl doctor`: what works on this machine, and the exact command for what does not."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from robo_rl.probes import DEADLINE, PROBES, Probe, ProbeResult, examine, needed_names


@dataclass(frozen=True)
class DoctorOptions:
    """Check this machine: what works, what does not, and what to install."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON document and nothing else."""


def run(options: DoctorOptions, probes: tuple[Probe, ...] = PROBES, deadline: float = DEADLINE) -> int:
    """Print the table or the document; 0 if what robo_rl cannot do without is there, else 1."""
    from robo_rl import __version__

    results, needed = examine(probes, deadline), needed_names(probes)
    healthy = not any(r.what in needed and r.status == "missing" for r in results)
    if options.json:
        document = {
            "version": __version__,
            "healthy": healthy,
            "rows": [asdict(r) | {"needed": r.what in needed} for r in results],
        }
        print(json.dumps(document, indent=1))
    else:
        _table(results, healthy)
    return 0 if healthy else 1


def _table(rows: list[ProbeResult], healthy: bool) -> None:
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
