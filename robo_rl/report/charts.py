"""Charts as plain HTML and inline SVG: no script needed to read them, no network, colours from the page's
CSS.

The SVG of a chart is stretched to its box, so only shapes live in it (strokes do not scale); all text is HTML
placed by percentages and keeps its size on any screen. A block of JSON beside it feeds the hover read-out.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from robo_rl.log import si

POINTS = 400  # most points drawn of one series


@dataclass(frozen=True, slots=True)
class Series:
    """A line over x [n]; `low`, `high` [n] shade a band around it. `look`: "line", "dots" (line and dots),
    "thin" (raw values), "seed" (the same, without a name in the legend and the read-out), "band" (no line) or
    "marks" (small dots alone, which the read-out leaves out)."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 1  # --c1 .. --c12 of the page
    low: "np.ndarray | None" = None
    high: "np.ndarray | None" = None
    look: str = "line"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) inside [low, high]."""
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def number(v: float, percent: bool = False) -> str:
    """A tick or a read-out."""
    if not math.isfinite(v):
        return "–"
    if percent:
        return f"{100 * v:.4g} %"
    return si(v) if abs(v) >= 1000 else f"{v:.4g}"


def thin(s: Series, most: int = POINTS) -> Series:
    """At most `most` points: means of equal runs of points; without a band of its own, their least and
    greatest become one, so that no peak is lost."""
    n = len(s.x)
    if n <= most:
        return s
    edges = np.linspace(0, n, most + 1).astype(int)
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]

    def each(f, v):
        return np.array([f(w) if (w := v[p][np.isfinite(v[p])]).size else math.nan for p in parts])

    low = each(np.min, s.y if s.low is None else s.low)
    high = each(np.max, s.y if s.high is None else s.high)
    return Series(s.name, each(np.mean, s.x), each(np.mean, s.y), s.colour, low, high, s.look)


def chart(
    title: str,
    what: str,
    series: Sequence[Series],
    *,
    x_name: str = "environment steps",
    percent: bool = False,
    y_range: "tuple[float, float] | None" = None,
    zero: bool = False,
    log: bool = False,
    tall: bool = False,
    legend: bool = True,
    missing: str = "Not logged in this run.",
) -> str:
    """A figure: title, what is shown (with its unit), legend, plot. `zero` puts 0 into the range; `log` takes
    a logarithmic y axis where all values are positive and span more than 30-fold."""
    head = f"<figcaption><b>{escape(title)}</b><span>{escape(what)}</span></figcaption>"
    kept = [thin(s) for s in series if len(s.x) and np.isfinite(s.y).any()]
    if not kept:
        return f'<figure class="card chart">{head}<p class="empty">{escape(missing)}</p></figure>'

    ys = np.concatenate([v[np.isfinite(v)] for s in kept for v in (s.y, s.low, s.high) if v is not None])
    xs = np.concatenate([s.x for s in kept])
    log = bool(log and ys.min() > 0 and ys.max() > 30 * ys.min())
    y0, y1 = _y_span(float(ys.min()), float(ys.max()), y_range, zero, log)
    x0, x1 = float(xs.min()), float(xs.max())
    if x1 <= x0:
        x0, x1 = x0 - 0.5, x1 + 0.5

    def px(x: float) -> float:
        return 100 * (x - x0) / (x1 - x0)

    def py(y: float) -> float:
        return 100 * (1 - ((math.log10(y) if log else y) - y0) / (y1 - y0))

    y_ticks = (
        [
            m * 10.0**k
            for k in range(math.floor(y0), math.ceil(y1) + 1)
            for m in (1, 2, 5)
            if y0 <= math.log10(m * 10.0**k) <= y1
        ]
        if log
        else ticks(y0, y1, 5 if tall else 4)
    )
    if log and len(y_ticks) > 6:
        y_ticks = [t for t in y_ticks if f"{t:e}"[0] == "1"]
    x_ticks = ticks(x0, x1, 5)
    svg = [
        f'<path class="tick{" zero" if t == 0 and y0 < 0 else ""}" d="M0 {py(t):.2f}H100"/>' for t in y_ticks
    ]
    for s in kept:
        if s.low is not None and s.high is not None:
            svg += [
                f'<path class="band c{s.colour}" d="M{_points(s, s.high, a, b, px, py)}'
                f'L{_points(s, s.low, a, b, px, py, -1)}Z"/>'
                for a, b in _runs(np.isfinite(s.low) & np.isfinite(s.high))
            ]
    for s in kept:
        runs = _runs(np.isfinite(s.y))
        if s.look not in ("band", "marks"):
            svg += [
                f'<path class="line {s.look} c{s.colour}" d="M{_points(s, s.y, a, b, px, py)}"/>'
                for a, b in runs
            ]
        dots = (
            range(len(s.x))
            if s.look in ("dots", "marks")
            else [a for a, b in runs if b - a == 1 and s.look != "band"]
        )
        svg += [
            f'<path class="dot {s.look} c{s.colour}" d="M{px(s.x[i]):.2f} {py(s.y[i]):.2f}h0"/>'
            for i in dots
            if math.isfinite(s.y[i])
        ]
    labels = [f'<i class="y" style="top:{py(t):.2f}%">{number(t, percent)}</i>' for t in y_ticks]
    labels += [f'<i class="x" style="left:{px(t):.2f}%">{number(t)}</i>' for t in x_ticks]
    told = [s for s in kept if s.look != "seed"]
    named = legend and (len(told) > 1 or told[:1] and told[0].look == "band")
    data = {
        "x": [x0, x1],
        "y": [y0, y1],
        "log": log,
        "percent": percent,
        "xName": x_name,
        "series": [_told(s) for s in told if s.look != "marks"],
    }
    return (
        f'<figure class="card chart{" tall" if tall else ""}">{head}{legend_of(told) if named else ""}'
        f'<div class="plot" role="img" aria-label="{escape(title)}: {escape(what)}">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(svg)}</svg>{"".join(labels)}</div>'
        f'<div class="xname">{escape(x_name)}</div>{_json(data)}</figure>'
    )


def legend_of(series: Sequence[Series]) -> str:
    """The names of series beside their colours."""
    names = "".join(f'<span><s class="{s.look} c{s.colour}"></s>{escape(s.name)}</span>' for s in series)
    return f'<div class="legend">{names}</div>'


def stacked(
    title: str,
    what: str,
    edges: Sequence[float],
    parts: Sequence[tuple[str, int, np.ndarray]],
    *,
    x_name: str,
) -> str:
    """Stacked bars: `parts` are (name, colour, share [bins] of 0..1), bar i spans edges[i] .. edges[i+1]."""
    head = f"<figcaption><b>{escape(title)}</b><span>{escape(what)}</span></figcaption>"
    x0, x1 = float(edges[0]), float(edges[-1])
    base = np.zeros(len(edges) - 1)
    svg = [f'<path class="tick" d="M0 {y}H100"/>' for y in (0, 25, 50, 75, 100)]
    gap = min(0.3, 12 / len(base))
    for _, colour, share in parts:
        for i, v in enumerate(share):
            if v > 0:
                left, right = (100 * (edges[i + k] - x0) / (x1 - x0) for k in (0, 1))
                svg.append(
                    f'<rect class="c{colour}" x="{left:.2f}" y="{100 * (1 - base[i] - v):.2f}" '
                    f'width="{max(right - left - gap, 0.05):.2f}" height="{100 * v:.2f}"/>'
                )
        base = base + share
    labels = [f'<i class="y" style="top:{100 - y}%">{y} %</i>' for y in (0, 25, 50, 75, 100)]
    labels += [
        f'<i class="x" style="left:{100 * (t - x0) / (x1 - x0):.2f}%">{number(t)}</i>'
        for t in ticks(x0, x1, 5)
    ]
    legend = "".join(f'<span><s class="box c{c}"></s>{escape(n)}</span>' for n, c, _ in parts)
    middle = _round((np.asarray(edges[:-1]) + np.asarray(edges[1:])) / 2)
    data = {
        "x": [x0, x1],
        "y": [0, 1],
        "log": False,
        "percent": True,
        "xName": x_name,
        "stacked": True,
        "series": [{"name": n, "c": c, "x": middle, "y": _round(v)} for n, c, v in parts],
    }
    return (
        f'<figure class="card chart">{head}<div class="legend">{legend}</div>'
        f'<div class="plot" role="img" aria-label="{escape(title)}">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(svg)}</svg>{"".join(labels)}</div>'
        f'<div class="xname">{escape(x_name)}</div>{_json(data)}</figure>'
    )


def lanes(
    title: str, what: str, rows: Sequence[tuple[str, int, Sequence[tuple[float, float]]]], *, x_name: str
) -> str:
    """One lane per role: `rows` are (name, colour, [(begin, end) ...]); blank is waiting."""
    head = f"<figcaption><b>{escape(title)}</b><span>{escape(what)}</span></figcaption>"
    every = [t for _, _, spans in rows for s in spans for t in s]
    if not every:
        return ""
    x0, x1 = min(every), max(max(every), min(every) + 1e-9)
    high, svg, labels = 100 / len(rows), [], []
    for i, (name, colour, spans) in enumerate(rows):
        labels.append(f'<i class="y" style="top:{(i + 0.5) * high:.2f}%">{escape(name)}</i>')
        svg += [
            f'<rect class="c{colour}" x="{100 * (a - x0) / (x1 - x0):.3f}" y="{(i + 0.15) * high:.2f}" '
            f'width="{max(100 * (b - a) / (x1 - x0) - 0.1, 0.05):.3f}" height="{0.7 * high:.2f}"/>'
            for a, b in spans
        ]
    labels += [
        f'<i class="x" style="left:{100 * (t - x0) / (x1 - x0):.2f}%">{number(t)}</i>'
        for t in ticks(x0, x1, 6)
    ]
    return (
        f'<figure class="card chart lanes">{head}<div class="plot" role="img" aria-label="{escape(title)}: '
        f'{escape(what)}"><svg viewBox="0 0 100 100" '
        f'preserveAspectRatio="none">{"".join(svg)}</svg>{"".join(labels)}</div><div '
        f'class="xname">{escape(x_name)}</div></figure>'
    )


def whisker(value: float, low: float, high: float, colour: int) -> str:
    """A rate in 0..1 with its interval on a track from 0 to 100 %."""
    if not math.isfinite(value):
        return '<span class="track"></span>'
    return (
        f'<span class="track"><span class="span c{colour}" style="left:{100 * low:.2f}%;'
        f'width:{100 * (high - low):.2f}%"></span><span class="at c{colour}" style="left:{100 * value:.2f}%">'
        "</span></span>"
    )


def _y_span(
    low: float, high: float, given: "tuple[float, float] | None", zero: bool, log: bool
) -> tuple[float, float]:
    """The ends of a y axis for values from low to high: `given`, or those and some room; of a logarithmic
    axis their logarithms."""
    if log:
        y0, y1 = math.log10(low), math.log10(high)
    else:
        y0, y1 = given or ((min(low, 0.0), max(high, 0.0)) if zero else (low, high))
    if y1 - y0 < 1e-12 * max(abs(y0), abs(y1), 1e-3):  # a constant
        return y0 - (abs(y0) or 1.0) * 0.5, y1 + (abs(y1) or 1.0) * 0.5
    if given is not None:
        return y0, y1
    pad = 0.06 * (y1 - y0)
    return y0 - pad * (not (zero and y0 == 0)), y1 + pad


def _told(s: Series) -> dict[str, object]:
    """What the page's script is told of a series."""
    out: dict[str, object] = {
        "name": s.name,
        "c": s.colour,
        "x": _round(s.x),
        "y": _round(s.y),
        "band": s.look == "band",
    }
    if s.low is None or s.high is None:
        return out
    return out | {"low": _round(s.low), "high": _round(s.high)}


def _runs(ok: np.ndarray) -> list[tuple[int, int]]:
    """[a, b) of every stretch of True."""
    edge = np.flatnonzero(np.diff(np.concatenate([[False], ok, [False]]).astype(int)))
    return list(zip(edge[::2].tolist(), edge[1::2].tolist(), strict=False))


def _points(s: Series, v: np.ndarray, a: int, b: int, px, py, way: int = 1) -> str:
    return "L".join(f"{px(s.x[i]):.2f} {min(max(py(v[i]), -5), 105):.2f}" for i in range(a, b)[::way])


def _round(v: np.ndarray) -> list["float | None"]:
    return [float(f"{u:.5g}") if math.isfinite(u) else None for u in v]


def _json(data: object) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'
