"""One self-contained HTML page of a data set: every shown episode with its videos, and a curve per axis of
state and action.

Videos are made small and put into the page, so it is read offline, mailed or archived. A cursor shows one
moment in all of them.
"""

import base64
import json
import tempfile
from pathlib import Path

import numpy as np

from robo_rl.data import video
from robo_rl.data.assemble import parse_episodes
from robo_rl.data.check import facts_of, findings_of
from robo_rl.data.labels import units_of
from robo_rl.data.reader import Dataset, load
from robo_rl.files import write_bytes
from robo_rl.report.text import esc
from robo_rl.types import Each, silently

SHOWN = 12  # episodes, where nobody says which
POINTS = 240  # of a curve
WIDE, HIGH = 240, 54  # of a curve's box [units of its drawing]
LEGEND = (
    "<p class=legend><b>action</b> and <i>state</i>, each axis over its own range. Move over a curve to see "
    "a moment; play runs all cameras together.</p>"
)


def write_page(folder: Path, out: Path, episodes: str = "", width: int = 240, each: Each = silently) -> int:
    """Write the page to `out` -> its size [bytes]."""
    data = load(folder)
    if episodes:
        chosen = parse_episodes(episodes, len(data))
    else:
        chosen = np.unique(np.linspace(0, len(data) - 1, SHOWN).round().astype(int))
    units = units_of(data.meta)
    body = [
        header(data, folder, chosen),
        *(
            episode(data, e, units.unit if units else (), width)
            for e in each("films", chosen.tolist(), "episodes")
        ),
    ]
    template = Path(__file__).with_name("dataset.html").read_text(encoding="utf-8")
    page = template.replace("<!-- title -->", esc(folder.resolve().name)).replace(
        "<!-- body -->", "\n".join(body)
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, page.encode())
    return out.stat().st_size


def header(data: Dataset, folder: Path, chosen: np.ndarray) -> str:
    """What the data set is, and what will make trouble."""
    units = units_of(data.meta)
    facts = "".join(f"<dt>{esc(k)}</dt><dd>{esc(v)}</dd>" for k, v in facts_of(data, units))
    notes = "".join(f"<li>{esc(line)}</li>" for line in findings_of(data, units))
    few = (
        f"<p class=few>Shown are {len(chosen)} of {len(data)} episodes.</p>"
        if len(chosen) < len(data)
        else ""
    )
    return (
        f"<header><p class=eyebrow>data set</p><h1>{esc(folder.resolve().name)}</h1><dl>{facts}</dl>"
        + (f"<ul class=notes>{notes}</ul>" if notes else "")
        + few
        + LEGEND
        + "</header>"
    )


def episode(data: Dataset, e: int, units: tuple[str, ...], width: int) -> str:
    """A card: task, videos, curves."""
    a, b = int(data.from_[e]), int(data.to[e])
    seconds = (b - a) / data.features.fps
    kind, word = ("won", "success") if data.success[e] else ("lost", "failure")
    mark = f"<span class={kind}>{word}</span>" if data.is_judged else ""
    films = "".join(
        f"<figure><video muted playsinline preload=auto src='{film(data, view, e, width)}'></video>"
        f"<figcaption>{esc(view)}</figcaption></figure>"
        for view in data.views
    )
    pick = np.unique(np.linspace(a, b - 1, min(POINTS, b - a)).round().astype(int))
    same = data.features.state == data.features.action
    names, charts = data.features.action, []
    for i, name in enumerate(names):
        unit = units[i] if i < len(units) else ""
        charts.append(chart(name, unit, data.action[pick, i], data.state[pick, i] if same else None))
    if not same:
        charts += [chart(name, "", None, data.state[pick, i]) for i, name in enumerate(data.features.state)]
    play = "<button type=button aria-label='play or pause'>play</button>" if data.views else ""
    return (
        f"<section data-seconds={seconds:.3f} data-frames={b - a}><h2>Episode {e} "
        f"{mark}<small>{esc(data.task(e))}</small></h2><p class=time>{play}<output>0.00 s</output> of "
        f"{seconds:.2f} s</p><div class=films>{films}</div><div "
        f"class=charts>{''.join(charts)}</div></section>"
    )


def film(data: Dataset, view: str, e: int, width: int) -> str:
    """The video of an episode, small, as a data URL."""
    h, w = data.views[view]
    step = max(1, round(w / width))
    clips = (np.ascontiguousarray(block[:, ::step, ::step]) for _, block in data.blocks(view, e))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        video.encode(path, clips, data.features.fps, gop=12, quality=26)
        return f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"


def chart(name: str, unit: str, action: "np.ndarray | None", state: "np.ndarray | None") -> str:
    """Curves of one axis over the episode: action, and the state where it is the same axis."""
    lines = {kind: x for kind, x in (("state", state), ("action", action)) if x is not None}
    low, high = (float(f([f(x) for x in lines.values()])) for f in (np.min, np.max))
    span = max(high - low, 1e-9)

    def path(x: np.ndarray) -> str:
        across = np.linspace(0, WIDE, len(x))
        down = HIGH - 3 - (HIGH - 6) * (x - low) / span if high > low else np.full(len(x), HIGH / 2)
        return " ".join(f"{u:.1f},{v:.1f}" for u, v in zip(across, down, strict=True))

    drawn = "".join(f"<polyline class={kind} points='{path(x)}'/>" for kind, x in lines.items())
    values = esc(json.dumps({kind: [float(f"{v:.4g}") for v in x] for kind, x in lines.items()}))
    return (
        f"<figure class=axis data-values='{values}'><figcaption><b>{esc(name)}</b><i></i><span>{low:.3g} … "
        f"{high:.3g} {esc('' if unit == '1' else unit)}</span></figcaption><svg viewBox='0 0 {WIDE} {HIGH}' "
        f"preserveAspectRatio=none>{drawn}<line y1=0 y2={HIGH} x1=0 x2=0 /></svg></figure>"
    )
