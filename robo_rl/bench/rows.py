"""Rows of `robo_rl bench`: measuring in turns, what a row promises, and how it is printed.

A limit is physical (bytes over measured bandwidth, the period of a loop, arms that never wait) or a bare call
that does the part nobody can leave out; it is measured, never computed from our own figure. A peer is the
best that a user could take instead, with its version; one that is not installed stays in the row and says so.
All sides of a row do the same work and take turns in every repeat.
"""

import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

SCALE = {
    "s": 1.0,
    "ms": 1e3,
    "us": 1e6,
    "mm": 1e3,
    "GiB": 1.0,
}  # of times, lengths and memory, less is better; others are rates, units of work per s
SLICE = 0.02  # s, least length of one turn
LEAST = 5  # turns of each side
BARE, PHYSICAL = "bare call", "physical"  # kinds of limits
WALL, CPU, NONE = "wall clock", "CPU time of the thread", "no clock: a simulation that repeats"
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Bar:
    """A demand and whether it was met."""

    text: str
    passed: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line: ours beside the limit and the best peer.

    `of_limit` is 1 at the limit and less below it, `over_peer` above 1 where we are faster, both for rates
    and times: medians over the `n` repeats of the ratio within a repeat. Each `_iqr` is the quartiles of the
    same repeats. `others`: the remaining limits and peers as dicts of role, name, value, ratio; those that
    were not measured have a `why` instead. `no_peer`: why nothing does this job. `work`: what each side does
    and how that was checked.
    """

    what: str
    unit: str
    ours: float
    limit: float
    limit_is: str
    of_limit: float
    limit_kind: str = ""
    peer: float | None = None
    peer_is: str = ""
    over_peer: float | None = None
    n: int = 1
    ours_iqr: Span | None = None
    of_limit_iqr: Span | None = None
    over_peer_iqr: Span | None = None
    clock: str = WALL
    work: str = ""
    others: list[dict] = field(default_factory=list)
    no_peer: str = ""
    bars: list[Bar] = field(default_factory=list)
    note: str = ""


class Report:
    """Rows as they come, and what could not be measured."""

    def __init__(self, say: Callable[[str], None], changed: Callable[[], None] = lambda: None):
        self.rows: list[Row] = []
        self.skipped: list[dict[str, str]] = []
        self.say, self.changed = say, changed

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.changed()
        self.say(text_of(row))

    def skip(self, what: str, why: str) -> None:
        self.skipped.append({"what": what, "why": why})
        self.changed()
        self.say(f"{what}: not measured, {why}")


# ---- measuring ---------------------------------------------------------------------------------------------


def in_turns(
    work: "Mapping[str, tuple[Callable[[], object], float]]",
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    least: int = LEAST,
    slice_s: float = SLICE,
) -> dict[str, np.ndarray]:
    """Seconds per unit of work, `[repeats]` per name, of calls that take turns for about `seconds` in all.

    work: name -> (call, units of work it does). A turn repeats its call for `slice_s` at least. The order is
    reversed every other repeat. `clock` may count CPU time of this thread: on a busy machine that is what a
    call costs.
    """
    counts = {}
    for name, (call, _) in work.items():
        call()
        began = clock()
        call()
        turn = min(slice_s, seconds / (2 * least * len(work)))
        counts[name] = max(1, round(turn / max(clock() - began, 1e-7)))
    out: dict[str, list[float]] = {name: [] for name in work}
    end, repeats = time.perf_counter() + seconds, 0
    while repeats < least or time.perf_counter() < end:
        for name in list(work)[:: -1 if repeats % 2 else 1]:
            call, units = work[name]
            count = range(counts[name])
            began = clock()
            for _ in count:
                call()
            out[name].append((clock() - began) / (len(count) * units))
        repeats += 1
    return {name: np.array(t) for name, t in out.items()}


def columns(repeats: list[dict[str, float]]) -> dict[str, np.ndarray]:
    """Repeats of {name: seconds} as {name: seconds [repeats]}."""
    return {k: np.array([r[k] for r in repeats]) for k in repeats[0]}


def quartiles(x: np.ndarray) -> Span:
    low, high = np.percentile(x, (25, 75))
    return float(low), float(high)


def in_unit(times: np.ndarray, unit: str) -> np.ndarray:
    """Seconds per unit of work as times in `unit`, or as rates."""
    return times * SCALE[unit] if unit in SCALE else 1 / times


def make_row(
    what: str,
    unit: str,
    times: Mapping[str, np.ndarray],
    limits: Mapping[str, str],
    peers: Sequence[str] = (),
    missing: Mapping[str, str] | None = None,
    bars: Callable[[float, float, float], list[Bar]] = lambda ours, of_limit, over_peer: [],
    **more,
) -> Row:
    """Row from seconds per unit of work `[repeats]` of "ours", of each limit {name: kind} and of each peer.

    The fastest limit and the fastest peer are the row's; the rest stand beside them. missing: peers that were
    not measured -> why. bars: (ours, of_limit, over_peer, NaN without a peer) -> demands. more: other fields
    of the row.
    """
    ours = times["ours"]
    limit, *limits_left = sorted(limits, key=lambda k: np.median(times[k] / ours))
    best, *peers_left = sorted(peers, key=lambda k: np.median(times[k] / ours)) or [""]
    of_limit, figures = times[limit] / ours, in_unit(ours, unit)
    over = times[best] / ours if best else np.array([np.nan])
    number, ratio, gain = (float(np.median(x)) for x in (figures, of_limit, over))

    def other(role: str, name: str) -> dict:
        return {
            "role": role,
            "name": name,
            "value": float(np.median(in_unit(times[name], unit))),
            "ratio": float(np.median(times[name] / ours)),
        }

    others = [other("limit", k) | {"kind": limits[k]} for k in limits_left] + [
        other("peer", k) for k in peers_left
    ]
    others += [{"role": "peer", "name": k, "why": why} for k, why in (missing or {}).items()]
    return Row(
        what=what,
        unit=unit,
        ours=number,
        limit=float(np.median(in_unit(times[limit], unit))),
        limit_is=limit,
        limit_kind=limits[limit],
        of_limit=ratio,
        n=len(ours),
        ours_iqr=quartiles(figures),
        of_limit_iqr=quartiles(of_limit),
        peer=float(np.median(in_unit(times[best], unit))) if best else None,
        peer_is=best,
        over_peer=gain if best else None,
        over_peer_iqr=quartiles(over) if best else None,
        others=others,
        bars=bars(number, ratio, gain),
        **more,
    )


def versioned(package: str) -> str:
    """Name and version of an installed package."""
    return f"{package} {importlib.metadata.version(package)}"


def lacking(module: str, package: str, extra: str = "bench") -> str:
    """Why a peer cannot run here, or "" where its module is installed."""
    there = importlib.util.find_spec(module) is not None
    return "" if there else f"{package} is not installed (pip install 'robo_rl[{extra}]')"


def at_least(name: str, x: float, target: float) -> Bar:
    return Bar(f"{name} >= {target:g}", bool(x >= target))


def at_most(name: str, x: float, target: float) -> Bar:
    return Bar(f"{name} <= {target:g}", bool(x <= target))


# ---- printing ----------------------------------------------------------------------------------------------


def number(x: float) -> str:
    """Three digits, or whole thousands apart: 4.52, 98.1, 64,210."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def span(x: Span | None) -> str:
    return f" [{number(x[0])}, {number(x[1])}]" if x else ""


def text_of(row: Row) -> str:
    """A row as printed: ours, then one line for the limit, for the peer and for the rest."""
    marks = "".join(f"  [{'pass' if b.passed else 'FAIL'}: {b.text}]" for b in row.bars)
    kind = f", {row.limit_kind}" if row.limit_kind else ""
    lines = [
        f"{row.what}: {number(row.ours)} {row.unit}{span(row.ours_iqr)}, n = {row.n}, {row.clock}{marks}",
        f"limit: {row.limit_is}{kind}, {number(row.limit)}: {row.of_limit:.2f}{_ratio(row.of_limit_iqr)} of "
        "it",
    ]
    if row.peer is not None:
        lines.append(
            f"peer: {row.peer_is}, {number(row.peer)}: {row.over_peer:.2f} x{_ratio(row.over_peer_iqr)}"
        )
    lines += [
        f"{o['role']}: {o['name']}: not measured, {o['why']}"
        if "why" in o
        else f"also: {o['name']}, {number(o['value'])}: {o['ratio']:.2f}"
        for o in row.others
    ]
    if row.no_peer:
        lines.append(f"no peer: {row.no_peer}")
    lines += [f"work: {row.work}"] * bool(row.work) + [row.note] * bool(row.note)
    return "\n    ".join(lines)


def _ratio(x: Span | None) -> str:
    return f" [{x[0]:.2f}, {x[1]:.2f}]" if x else ""
