"""The page of a run that learnt from a data set alone (`--sim none`): episodes that it did not learn from
judge it."""

import math
from dataclasses import replace

import numpy as np

from robo_rl.errors import UserError, plural, quoted
from robo_rl.files import read_json
from robo_rl.log import si
from robo_rl.report.charts import Series, chart, legend_of
from robo_rl.report.data import RunRecord, totals
from robo_rl.report.labels import label_table
from robo_rl.report.text import duration, esc
from robo_rl.report.training import sft_chart, watched


def is_without_env(run: RunRecord) -> bool:
    """Whether there was nothing to play in."""
    return run.config.get("sim") == "none"


def _read(run: RunRecord, name: str, kind: type):
    """A JSON file of the run; None where it is not there, or cannot be read."""
    try:
        return read_json(run.folder / name, kind)
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
    told = run.held_out
    axes = told["axes"] if told else []
    table = axis_table(axes) if axes else '<div class="empty">No episode has judged this run yet.</div>'
    of = f" {counted(told)}" if told else ""
    return f"""{verdict(run, told)}{tiles(run, told)}
<h2>Held-out episodes</h2>
<p>How far the actions that the policy would execute are from those recorded, in episodes that it did not
learn from.{of}</p>
{table}
{others(run)}
{curves(_read(run, "heldout_episodes.json", list) or [])}
<h2>Training</h2>
<div class="grid">{sft_chart(run)}{error_chart(run, told)}</div>
{label_table(run)}
{watched(run)}"""


def counted(told: dict) -> str:
    """Of how many episodes the errors are."""
    n, many = len(told["episodes"]), told.get("low") is not None
    within = " In brackets 95 % intervals over episodes" + (", narrow for so few." if n < 20 else ".")
    return f"{plural(n, 'episode')}, {told['frames']:,} chunks.{within * many}"


def chosen(told: dict) -> str:
    """Which checkpoint it is about, and why."""
    looks = told.get("looks") or []
    if len(looks) < 2:
        return ""
    best, (last, error) = dict(looks)[told["update"]], looks[-1]
    if told["update"] == last:
        return f" The last checkpoint, of update {last:,}, is the best of {len(looks)}."
    return (
        f" Of {len(looks)} checkpoints that of update {told['update']:,} is used, whose error was the least: "
        f"{best:.3f}, after the last of {last:,} updates {error:.3f} (<code>--checkpoint last</code> takes "
        "that one). It was chosen on these episodes, so its figure is a little on the bright side."
    )


def others(run: RunRecord) -> str:
    """What `robo_rl eval RUN --demos` measured on other data sets."""
    told = [_read(run, path.name, dict) for path in sorted(run.folder.glob("eval-data-*.json"))]
    rows = "".join(
        f'<tr><td class="name">{esc(e["demos"])}{" (learnt from)" * e["learnt_from"]}</td>'
        f'<td>{esc(e["checkpoint"])}</td><td class="n">{len(e["episodes"])}</td>'
        f'<td class="n"><b>{number(e["error"])}</b>{spread(e)}</td>'
        f'<td class="n">{number(e["error_of_state"])}</td></tr>'
        for e in filter(None, told)
    )
    table = (
        '<div class="card scroll pad"><table><tr><th>Data set</th><th>Checkpoint</th>'
        '<th class="n">Episodes</th><th class="n">Share of the mean action\'s error</th>'
        '<th class="n">of staying there</th></tr>'
        f"{rows}</table></div>"
    )
    return (
        "<h2>Other data</h2><p>Recorded as the run's own was: "
        f"<code>robo_rl eval {esc(quoted(run.folder))} --demos FOLDER</code></p>{table * bool(rows)}"
    )


def error_chart(run: RunRecord, told: "dict | None") -> str:
    """The error on held-out episodes over updates, and where it was least."""
    m = run.metrics
    if "heldout/error" not in m:
        return ""
    rows = np.isfinite(m["heldout/error"])
    x, y = m["step"][rows].astype(float), m["heldout/error"][rows]
    series = [Series("held-out episodes", x, y, 1)]
    if told and (used := x == told.get("update")).any():
        series.append(Series("the checkpoint that is used", x[used][-1:], y[used][-1:], 3, look="dots"))
    return chart(
        "Error of the actions",
        "of held-out episodes, as a share of that of the mean action",
        series,
        x_name="updates",
        zero=True,
    )


def curves(episodes: list[dict]) -> str:
    """The actions recorded in episodes, and those predicted, an axis a chart."""
    if not episodes:
        return ""
    empty = np.empty(0)
    recorded, predicted, starts = (
        Series(name, empty, empty, colour, look=look)
        for name, colour, look in (
            ("recorded", 7, "line"),
            ("predicted", 1, "line"),
            ("begin of a chunk", 1, "marks"),
        )
    )
    figures = ""
    for at, e in enumerate(episodes):
        t = np.arange(len(e["recorded"])) / e["rate"]
        true, made = (np.array(e[k], float) for k in ("recorded", "predicted"))
        begin = slice(None, None, e["execute"])
        charts = "".join(
            chart(
                axis["name"],
                "no unit" if axis["unit"] == "1" else axis["unit"],
                [
                    replace(recorded, x=t, y=true[:, i]),
                    replace(predicted, x=t, y=made[:, i]),
                    replace(starts, x=t[begin], y=made[begin, i]),
                ],
                x_name="time [s]",
                legend=False,
            )
            for i, axis in enumerate(e["axes"])
        )
        cut = f", the first {t[-1]:.0f} s of {e['frames'] / e['rate']:.0f} s" if len(t) < e["frames"] else ""
        which = f"the {e['which']} error of {e['of']}" if e["of"] > 1 else "error"
        which += f" ({e['error']:.2f} of that of the mean action)"
        figures += (
            f"<details{' open' * (at == 0)}><summary>Episode {e['episode']}, {which}: "
            f"{esc(e['task'])}{cut}</summary><div class='small'>{charts}</div></details>"
        )
    return f"""<h2>Predicted and recorded actions</h2>
<p>Along held-out episodes: at the begin of every chunk the policy sees what was recorded there, and predicts
the actions that it would execute.</p>
{legend_of([recorded, predicted, starts])}{figures}"""


def verdict(run: RunRecord, told: "dict | None") -> str:
    """The card on top."""
    next_step = (
        "It does not say whether the policy succeeds; that takes its robot: "
        f"<code>robo_rl deploy {esc(quoted(run.folder))}</code>"
    )
    if told is None:
        badge, big = "not judged", ""
        text = (
            "No held-out episode has judged this run: it is still going, it was stopped (<code>robo_rl train "
            f"--resume {esc(quoted(run.folder))}</code>), or none was held out (--data.held-out 0)."
        )
    else:
        share, still = mean_share(told["axes"]), mean_share(told["axes"], "error_of_state")
        low, high = told.get("low"), told.get("high")
        within = "" if low is None else f", 95 % interval {low:.2f} to {high:.2f}"
        badge = "judged by held-out episodes"
        big = f'<div class="big">{share:.2f} <small>of the error of the mean action</small></div>'
        stays = f" Staying where it is would have {still:.2f}." if math.isfinite(still) else ""
        text = f"Mean over the axes that move{within}.{stays}{chosen(told)} {next_step}"
    return (
        '<section class="card verdict" style="grid-template-columns:1fr"><div>'
        f'<span class="badge even">{badge}</span>{big}<p style="margin-top:10px">{text}</p></div></section>'
    )


def tiles(run: RunRecord, told: "dict | None") -> str:
    """The figures that say most of it."""
    updates = run.metrics["step"].max() if run.metrics else math.nan
    cells = [
        ("Training time", duration(totals(run)["time_s"]), "supervision alone"),
        ("Updates", si(float(updates)) if math.isfinite(updates) else "–", updates_of(run)),
    ]
    if told:
        episodes = len(told["episodes"])
        cells += [
            ("Loss", f"{told['loss']:.3f}", "on held-out episodes"),
            ("Held out", str(episodes), f"episodes, {told['frames']:,} chunks"),
        ]
    inside = "".join(
        f'<div class="card tile"><span>{a}</span><b>{b}</b><small>{c}</small></div>' for a, b, c in cells
    )
    return f'<section class="tiles">{inside}</section>'


def updates_of(run: RunRecord) -> str:
    """What the updates were made on."""
    if run.config.get("algo") != "recap":
        return "of the supervised stage"
    return f"the last {si(float(run.config['rl']['updates']))} of them told the advantage"


def number(x: "float | None") -> str:
    return "–" if x is None else f"{x:.3g}"


def spread(row: dict) -> str:
    """The interval of an error, where it has one."""
    return "" if row.get("low") is None else f" <small>[{number(row['low'])}, {number(row['high'])}]</small>"


def axis_table(axes: list[dict]) -> str:
    """The errors of every axis of the action."""

    rows = "".join(
        f'<tr><td class="name">{esc(a["name"])}</td><td>{esc(a["unit"])}</td>'
        f'<td class="n"><b>{number(a["error"])}</b>{spread(a)}</td>'
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
