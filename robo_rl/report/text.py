"""How a page says numbers: durations, rates, differences, intervals; and text that is safe in HTML."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from robo_rl.stats import Interval


def duration(seconds: float) -> str:
    """48 s, 9 min 13 s, 2 h 05 min."""
    if not math.isfinite(seconds):
        return "–"
    s = round(seconds)
    return (
        f"{s // 3600} h {s // 60 % 60:02d} min"
        if s >= 3600
        else f"{s // 60} min {s % 60:02d} s"
        if s >= 60
        else f"{s} s"
        if s >= 10
        else f"{seconds:.1f} s"
    )


def pct(v: float) -> str:
    return f"{100 * v:.1f} %" if math.isfinite(v) else "–"


def points(v: float) -> str:
    """A difference in percentage points, signed."""
    return f"{100 * v:+.1f}".replace("-", "−") if math.isfinite(v) else "–"


def interval(i: Interval) -> str:
    return f"{100 * i.low:.1f} … {100 * i.high:.1f} %"


def change(i: Interval) -> str:
    return f"{points(i.low)} … {points(i.high)}"


@dataclass(frozen=True, slots=True)
class Words:
    """How a page says what evaluations measured: success, or the mean return of a task that knows none."""

    unit: str
    number: Callable[[float], str]
    amount: Callable[[float], str]
    step: Callable[[float], str]
    interval: Callable[[Interval], str]
    change: Callable[[Interval], str]


def _number(v: float) -> str:
    return f"{v:.4g}".replace("-", "−") if math.isfinite(v) else "–"


def _signed(v: float) -> str:
    return f"{v:+.3g}".replace("-", "−") if math.isfinite(v) else "–"


SUCCESS = Words(
    "% success", lambda v: f"{100 * v:.1f}", pct, lambda v: f"{points(v)} points", interval, change
)
RETURN = Words(
    "mean return",
    _number,
    _number,
    _signed,
    lambda i: f"{_number(i.low)} … {_number(i.high)}",
    lambda i: f"{_signed(i.low)} … {_signed(i.high)}",
)

ERROR = Words(  # on held-out episodes
    "error (1: the mean action's)", _number, _number, _signed, RETURN.interval, RETURN.change
)


def esc(x: object) -> str:
    return escape(str(x))


def flat(d: dict, prefix: str = "") -> list[tuple[str, str]]:
    """Nested dict as (dotted key, text) pairs."""
    out = []
    for k, v in d.items():
        if isinstance(v, dict) and v:
            out += flat(v, f"{prefix}{k}.")
        else:
            out.append((f"{prefix}{k}", v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)))
    return out


def filled(title: str, body: str) -> str:
    """The whole page of that title, with the styles and the script of all pages."""
    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    return template.replace("{{title}}", esc(title)).replace("{{body}}", body)
