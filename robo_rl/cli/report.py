"""`robo_rl report RUN`: one self-contained HTML page about a run, to read offline, mail or archive."""

import json
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True)
class ReportOptions:
    """Write one self-contained HTML page about a run: success, training health, throughput, videos."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="run folder")]
    """Run folder."""
    json: bool = False
    """print one JSON document with the page's path and the summary numbers, and nothing else"""
    out: str = ""
    """where to write the page; empty: RUN/report.html"""


def run(args: ReportOptions) -> int:
    """Write the page; returns the exit status."""
    from robo_rl.log import open_run
    from robo_rl.report.data import difference, load
    from robo_rl.report.held_out import mean_share
    from robo_rl.report.page import summary, write_page
    from robo_rl.report.text import RETURN, SUCCESS

    record = load(open_run(args.run))
    path = write_page(record, args.out)
    if args.json:
        print(json.dumps(summary(record, path), indent=1, ensure_ascii=False, allow_nan=False))
        return 0
    what, say = ("success", SUCCESS) if record.judged else ("mean return", RETURN)
    if record.start and record.end:
        d = difference(record.start, record.end)
        print(
            f"{what} {say.amount(record.start.rate.value)} → {say.amount(record.end.rate.value)}: "
            f"{d.verdict}, {say.step(d.change.value)} (95 % {say.change(d.change)})"
        )
    elif only := record.end or record.start:
        print(f"{what} {say.amount(only.rate.value)} (95 % {say.interval(only.rate)}): {only.name}")
    elif record.held_out:
        share = mean_share(record.held_out["axes"])
        print(f"error of the actions on held-out episodes: {share:.2f} of that of the mean action")
    for note in [*(f.text for f in record.findings), *record.notes]:
        print(f"note: {note}", file=sys.stderr)
    print(f"open {path}")
    return 0
