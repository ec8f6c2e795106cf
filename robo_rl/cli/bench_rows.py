"""Rows of `robo_rl bench`: measuring in turns, and what is printed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

SCALE = {"ms": 1e3, "us": 1e6}  # of times; other units are rates: units of work per second
SLICE = 0.02  # s, least length of one turn


@dataclass(frozen=True, slots=True)
class Bar:
    """A demand and whether it was met."""

    text: str
    passed: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line: ours beside the limit and, where there is one, a peer.

    `of_limit` is 1 at the limit and less below it, `over_peer` above 1 where we are faster, both for rates and times.
    `recorded` are figures of programs that were not run here, measured once on another machine of 2 cores.
    """

    what: str
    unit: str
    ours: float
    limit: float
    limit_is: str
    of_limit: float
    peer: float | None = None
    peer_is: str = ""
    over_peer: float | None = None
    recorded: dict[str, float] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    note: str = ""


class Report:
    """Rows as they come, and what could not be measured."""

    def __init__(self, say: Callable[[str], None]):
        self.rows: list[Row] = []
        self.skipped: list[dict[str, str]] = []
        self.say = say

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.say(line(row))

    def skip(self, what: str, why: str) -> None:
        self.skipped.append({"what": what, "why": why})
        self.say(f"{what}: not measured, {why}")


def in_turns(work: dict[str, "tuple[Callable[[], object], float]"], seconds: float,
             clock: Callable[[], float] = time.perf_counter, least: int = 3) -> dict[str, np.ndarray]:
    """Seconds per unit of work, `[rounds]` per name, of calls that take turns for about `seconds` in all.

    work: name -> (call, units of work it does). A turn repeats its call for SLICE seconds at least. The order is
    reversed every other round. `clock` may count CPU time of this thread: on a busy machine that is what a call costs.
    """
    repeats = {}
    for name, (call, _) in work.items():
        call()
        began = clock()
        call()
        slice_s = min(SLICE, seconds / (2 * least * len(work)))
        repeats[name] = max(1, round(slice_s / max(clock() - began, 1e-7)))
    out: dict[str, list[float]] = {name: [] for name in work}
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < least or time.perf_counter() < end:
        for name in list(work)[:: -1 if rounds % 2 else 1]:
            call, units = work[name]
            count = range(repeats[name])
            began = clock()
            for _ in count:
                call()
            out[name].append((clock() - began) / (len(count) * units))
        rounds += 1
    return {name: np.array(t) for name, t in out.items()}


def value(times: np.ndarray, unit: str) -> float:
    """Median time in `unit`, or the median rate."""
    t = float(np.median(times))
    return t * SCALE[unit] if unit in SCALE else 1 / t


def make_row(what: str, unit: str, times: dict[str, np.ndarray], limit: str, peer: str = "",
             bars: Callable[[float, float, float], list[Bar]] = lambda ours, of_limit, over_peer: [], **more) -> Row:
    """Row from seconds per unit of work of "ours", `limit` and `peer` (keys of `times`, also their names).

    bars: (ours, of_limit, over_peer, NaN without a peer) -> demands.
    """
    ours = times["ours"]
    of_limit = float(np.median(times[limit] / ours))
    over_peer = float(np.median(times[peer] / ours)) if peer else float("nan")
    number = value(ours, unit)
    return Row(what=what, unit=unit, ours=number, limit=value(times[limit], unit), limit_is=limit, of_limit=of_limit,
               peer=value(times[peer], unit) if peer else None, peer_is=peer, over_peer=over_peer if peer else None,
               bars=bars(number, of_limit, over_peer), **more)


def at_least(name: str, x: float, target: float) -> Bar:
    return Bar(f"{name} >= {target:g}", bool(x >= target))


def at_most(name: str, x: float, target: float) -> Bar:
    return Bar(f"{name} <= {target:g}", bool(x <= target))


# ---- printing ----------------------------------------------------------------------------------------------------

def number(x: float) -> str:
    """Three digits, or whole thousands apart: 4.52, 98.1, 64,210."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def line(row: Row) -> str:
    peer = "" if row.peer is None else f"; {row.over_peer:.2f} x {row.peer_is} ({number(row.peer)})"
    marks = "".join(f"  [{'pass' if b.passed else 'FAIL'}: {b.text}]" for b in row.bars)
    return (f"{row.what}: {number(row.ours)} {row.unit}; {row.of_limit:.2f} of {row.limit_is} "
            f"({number(row.limit)}){peer}{marks}")


def table(document: dict) -> str:
    """The document as text."""
    rows, m = document["rows"], document["machine"]
    cells = [("", "ours", "limit", "of limit", "peer", "over peer", "bars")]
    for r in rows:
        peer = ("-", "-") if r["peer"] is None else (number(r["peer"]), f"{r['over_peer']:.2f} x")
        marks = ", ".join(f"{'pass' if b['passed'] else 'FAIL'} {b['text']}" for b in r["bars"]) or "-"
        cells.append((r["what"], f"{number(r['ours'])} {r['unit']}", number(r["limit"]), f"{r['of_limit']:.2f}", *peer,
                      marks))
    widths = [max(len(c[i]) for c in cells) for i in range(6)]
    text = [f"{m['cpu']}, {m['cores']} cores, load {m['load']:.1f} before and {document['load_after']:.1f} after"]
    if max(m["load"], 0) > 0.5:
        text[0] += ": the machine was busy, trust the ratios only"
    for k, c in enumerate(cells):
        padded = [c[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(c[1:6], widths[1:], strict=True)), c[6]]
        text.append("  ".join(padded).rstrip())
        if k and (more := _footnote(rows[k - 1])):
            text.append(f"    {more}")
    text += [f"not measured: {s['what']}: {s['why']}" for s in document["skipped"]]
    return "\n".join(text)


def _footnote(r: dict) -> str:
    parts = [f"limit: {r['limit_is']}"]
    if r["peer_is"]:
        parts.append(f"peer: {r['peer_is']}")
    if r["recorded"]:
        figures = ", ".join(f"{k} {number(v)}" for k, v in r["recorded"].items())
        parts.append(f"recorded on another machine, not run here [{r['unit']}]: {figures}")
    if r["note"]:
        parts.append(r["note"])
    return "; ".join(parts)
