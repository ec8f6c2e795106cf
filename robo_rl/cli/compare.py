"""`robo_rl compare RUN…`: runs side by side; those that differ in their seed alone are one group."""

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from robo_rl.errors import in_range
from robo_rl.results import COMMON


@dataclass(frozen=True)
class CompareRunsOptions:
    """Compare runs: a table, and one self-contained HTML page with their curves."""

    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(help="run folders, or a folder of runs")
    ]
    """Run folders, or a folder of runs, as robo_rl train --seeds writes one."""
    reach: float = COMMON
    """Success whose first evaluation counts as reached."""
    json: bool = False
    """print one JSON document with the page's path and the numbers, and nothing else"""
    out: str = ""
    """where to write the page; empty: compare.html in the folder that holds all runs"""

    def __post_init__(self) -> None:
        in_range("reach", self.reach, 0, 1)


def run(args: CompareRunsOptions) -> int:
    """Write the page; returns the exit status."""
    from robo_rl.report.compare import notes_of, read_groups
    from robo_rl.report.compare_page import as_json, lines, write

    def note(words: str) -> None:
        print(f"note: {words}", file=sys.stderr)

    groups = read_groups(args.runs, note)
    path = write(groups, args.reach, args.out)
    told = [as_json(groups, args.reach, path)] if args.json else lines(groups, args.reach)
    print("\n".join(told))
    for run in (r for g in groups for r in g.runs):
        for words in notes_of(run):
            note(f"{run.folder}: {words}")
    if not args.json:
        print(f"open {path}")
    return 0
