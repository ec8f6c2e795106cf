"""A picture of measured runs: success after supervision and after RL, a line per run."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, WIDE, RIGHT = 560, 400, 20  # pixels: names, the axis from 0 to 1, margin
TOP, LINE, BOTTOM = 46, 20, 14
MADE = "<!-- by robo_rl results page -->"
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.grid { stroke: #d0d7de } .way { stroke: #8c959f; stroke-width: 2 }
.before { fill: #57606a } .after { fill: #0969da } .seed { opacity: 0.45 }
@media (prefers-color-scheme: dark) {
text { fill: #c9d1d9 } .grid { stroke: #30363d } .way { stroke: #6e7681 }
.before { fill: #8b949e } .after { fill: #58a6ff }
}
"""


@dataclass(frozen=True, slots=True)
class RunDots:
    """Success of the seeds of one run, each in [0, 1]: after supervision and after RL."""

    name: str
    before: tuple[float, ...]
    after: tuple[float, ...]


def chart(runs: Sequence[RunDots]) -> str:
    """The picture as SVG, which needs nothing beside it."""
    height = TOP + LINE * len(runs) + BOTTOM
    width = LEFT + WIDE + RIGHT
    foot = height - BOTTOM + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">',
        f"<title>Success of {len(runs)} runs after supervision and after RL</title>",
        f"<style>{STYLE}</style>",
        f'<circle class="before" cx="{LEFT}" cy="12" r="5"/>'
        f'<text x="{LEFT + 10}" y="16">after supervision</text>',
        f'<circle class="after" cx="{LEFT + 130}" cy="12" r="5"/>'
        f'<text x="{LEFT + 140}" y="16">after RL</text>',
        f'<circle class="after seed" cx="{LEFT + 215}" cy="12" r="3"/>'
        f'<text x="{LEFT + 225}" y="16">a seed of several</text>',
    ]
    for tenth in range(0, 11, 2):
        x = at(tenth / 10)
        parts.append(f'<line class="grid" x1="{x:g}" x2="{x:g}" y1="{TOP - 8}" y2="{foot}"/>')
        parts.append(f'<text x="{x:g}" y="{TOP - 13}" text-anchor="middle">{tenth / 10:g}</text>')
    for k, run in enumerate(runs):
        y = TOP + LINE * k + LINE / 2
        parts.append(
            f'<text x="{LEFT - 12}" y="{y + 4:g}" text-anchor="end">{escape(shortened(run.name))}</text>'
        )
        begins, ends = (at(sum(dots) / len(dots)) for dots in (run.before, run.after))
        parts.append(f'<line class="way" x1="{begins:g}" x2="{ends:g}" y1="{y:g}" y2="{y:g}"/>')
        for look, dots, mean in (("before", run.before, begins), ("after", run.after, ends)):
            seeds = dots if len(dots) > 1 else ()
            parts += [f'<circle class="{look} seed" cx="{at(dot):g}" cy="{y:g}" r="3"/>' for dot in seeds]
            parts.append(f'<circle class="{look}" cx="{mean:g}" cy="{y:g}" r="5"/>')
    return "\n".join([*parts, MADE, "</svg>", ""])


def at(share: float) -> float:
    """Where a success stands on the axis, to a tenth of a pixel."""
    return round(LEFT + WIDE * share, 1)


def shortened(name: str, most: int = 84) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
