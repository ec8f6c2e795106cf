"""The page of a run that learnt from a data set alone (`--sim none`): episodes that it did not learn from
judge it."""

import math

from robo_rl.errors import UserError
from robo_rl.files import read_json
from robo_rl.log import si
from robo_rl.report.data import RunRecord, totals
from robo_rl.report.text import duration, esc
from robo_rl.report.training import sft_chart, watched


def is_without_env(run: RunRecord) -> bool:
    """Whether there was nothing to play in."""
    return (run.info.get("config") or {}).get("sim") == "none"


def held_out(run: RunRecord) -> "dict | None":
    """RUN/heldout.json; None where it is not there (yet), or cannot be read."""
    try:
        return read_json(run.folder / "heldout.json", dict)
    except (OSError, UserError, ValueError):
        return None


def mean_share(axes: list[dict], name: str = "error") -> float:
    """Mean over axes of their error `name` as a share of that of the mean action, where both are known; nan
    where none is."""
    shares = [
        a[name] / a["error_of_mean"] for a in axes if a["error_of_mean"] > 0 and a.get(name) is not None
    ]
    return sum(shares) / len(shares) if shares else math.nan


def sections(run: RunRecord) -> str:
    """What stands between the head of the page and the configuration."""
    told = held_out(run)
    axes = told["axes"] if told else []
    table = axis_table(axes) if axes else '<div class="empty">No episode has judged this run yet.</div>'
    return f"""{verdict(run, told)}{tiles(run, told)}
<h2>Held-out episodes</h2>
<p>How far the actions that the policy would execute are from those recorded, in frames of episodes that it
did not learn from.</p>
{table}
<h2>Training</h2>
{sft_chart(run)}
{watched(run)}"""


def verdict(run: RunRecord, told: "dict | None") -> str:
    """The card on top."""
    next_step = (
        "It does not say whether the policy succeeds; that takes its robot: "
        f"<code>robo_rl deploy {esc(run.folder)}</code>"
    )
    if told is None:
        badge, big = "not judged", ""
        text = (
            "No held-out episode has judged this run: it is still going, it was stopped (<code>robo_rl train "
            f"--resume {esc(run.folder)}</code>), or none was held out (--data.held-out 0)."
        )
    else:
        share, still = mean_share(told["axes"]), mean_share(told["axes"], "error_of_state")
        badge = "judged by held-out episodes"
        big = f'<div class="big">{share:.2f} <small>of the error of the mean action</small></div>'
        stays = f" Staying where it is would have {still:.2f}." if math.isfinite(still) else ""
        text = f"Mean over the axes that move.{stays} {next_step}"
    return (
        '<section class="card verdict" style="grid-template-columns:1fr"><div>'
        f'<span class="badge even">{badge}</span>{big}<p style="margin-top:10px">{text}</p></div></section>'
    )


def tiles(run: RunRecord, told: "dict | None") -> str:
    """The figures that say most of it."""
    updates = run.metrics["step"].max() if run.metrics else math.nan
    cells = [
        ("Training time", duration(totals(run)["time_s"]), "supervision alone"),
        ("Updates", si(float(updates)) if math.isfinite(updates) else "–", "of the supervised stage"),
    ]
    if told:
        episodes = len(told["episodes"])
        cells += [
            ("Loss", f"{told['loss']:.3f}", "on held-out episodes"),
            ("Held out", str(episodes), f"episodes, {told['frames']:,} frames looked at"),
        ]
    inside = "".join(
        f'<div class="card tile"><span>{a}</span><b>{b}</b><small>{c}</small></div>' for a, b, c in cells
    )
    return f'<section class="tiles">{inside}</section>'


def axis_table(axes: list[dict]) -> str:
    """The errors of every axis of the action."""

    def number(x: "float | None") -> str:
        return "–" if x is None else f"{x:.3g}"

    rows = "".join(
        f'<tr><td class="name">{esc(a["name"])}</td><td>{esc(a["unit"])}</td>'
        f'<td class="n"><b>{number(a["error"])}</b></td>'
        f'<td class="n">{number(a["error_of_mean"])}</td><td class="n">{number(a.get("error_of_state"))}</td>'
        + (
            f'<td class="n">{a["error"] / a["error_of_mean"]:.2f}</td></tr>'
            if a["error_of_mean"] > 0
            else '<td class="n"><small>never moves</small></td></tr>'
        )
        for a in axes
    )
    return (
        '<div class="card scroll pad"><table><tr><th>Axis of the action</th><th>Unit</th>'
        '<th class="n">Mean error</th><th class="n">of the mean action</th>'
        '<th class="n">of staying there</th>'
        f'<th class="n">Share of the mean action\'s</th></tr>{rows}</table></div>'
    )
