"""What `robo_rl compare` prints, and its page: groups of runs with their curves, ends and differences."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from robo_rl.files import write_bytes
from robo_rl.log import si
from robo_rl.report.charts import Series, chart
from robo_rl.report.compare import (
    SeedGroup,
    by_task,
    compared,
    curve,
    judged,
    mean_curve,
    measure,
    notes_of,
    over,
    reached,
    same_tasks,
    summary,
)
from robo_rl.report.data import RunRecord, totals
from robo_rl.report.text import ERROR, RETURN, SUCCESS, Words, duration, esc, filled
from robo_rl.stats import Interval

COLOURS = (1, 3, 2, 4, 5, 7, 8, 9, 10, 11, 12, 6)
BANDS = 6  # groups whose seeds are drawn beside their mean: those of more cover each other


def say_of(groups: Sequence[SeedGroup]) -> Words:
    """How the measure of these groups is said."""
    return {"success": SUCCESS, "return": RETURN, "error": ERROR}[measure(groups[0].runs[0])]


def columns_of(groups: Sequence[SeedGroup]) -> dict[str, str]:
    """{evaluation: head of its column}"""
    if say_of(groups) is ERROR:
        return {"end": ERROR.unit}
    return {k: k for k in ("start", "end", "best")}


def words_of(value: Interval, say: Words) -> str:
    """A mean over seeds, and its interval where there is one."""
    return say.amount(value.value) + (f" [{say.interval(value)}]" if math.isfinite(value.low) else "")


def to_reach(run: RunRecord, least: float, seconds: bool = False) -> str:
    """Steps, or time, to the first evaluation of `least` or more; "> …", all of the run, without one."""
    hit, c = reached(run, least), curve(run)
    many = hit if hit else tuple(x[-1] if len(x) else math.nan for x in (c.steps, c.seconds))
    told = duration(many[1]) if seconds else si(many[0]) if math.isfinite(many[0]) else "–"
    return told if hit or told == "–" else f"> {told}"


def verdict(after: SeedGroup, before: SeedGroup, change: Interval) -> str:
    less = say_of([after]) is ERROR
    if not same_tasks(after, before):
        return "of other data" if less else "of other tasks"
    if not math.isfinite(change.low):
        return "unknown: more seeds"
    up, down = ("worse", "better") if less else ("better", "worse")
    return up if change.low > 0 else down if change.high < 0 else "no clear difference"


def lines(groups: Sequence[SeedGroup], least: float) -> list[str]:
    """What the command prints: a row for each group, then how each differs from the first."""
    say, columns = say_of(groups), columns_of(groups)
    head = ["", "seeds", *columns.values()] + [f"steps to {100 * least:g} %"] * judged(groups)
    rows = [
        [g.name, str(len(g.runs)), *(words_of(over(g, k), say) for k in columns)]
        + [", ".join(to_reach(r, least) for r in g.runs)] * judged(groups)
        for g in groups
    ]
    wide = [max(len(r[k]) for r in (head, *rows)) for k in range(len(head))]
    out = ["  ".join(cell.ljust(w) for cell, w in zip(r, wide, strict=True)).rstrip() for r in (head, *rows)]
    for g in groups[1:]:
        change, how = compared(g, groups[0])
        told = f" (95 % {say.change(change)})" if math.isfinite(change.low) else ""
        better = verdict(g, groups[0], change)
        out.append(f"{g.name} - {groups[0].name}: {say.step(change.value)}{told}, {how}: {better}")
    return out


def curves_chart(groups: Sequence[SeedGroup], seconds: bool) -> str:
    """Every group's mean over its seeds; of up to `BANDS` groups also the band from its least to its greatest
    seed, and the seeds."""
    series: list[Series] = []
    whole = len(groups) <= BANDS
    for k, g in enumerate(groups):
        colour, curves = COLOURS[k % len(COLOURS)], [curve(r) for r in g.runs]
        if (found := mean_curve(curves, seconds)) is not None:
            x, y = found
            ends = (y.min(0), y.max(0)) if whole else (None, None)
            series.append(Series(g.name, x, y.mean(0), colour, *ends, "dots"))
        series += [
            Series(f"{g.name}, seed {s}", c.seconds if seconds else c.steps, c.values, colour, look="seed")
            for s, c in zip(g.seeds, curves, strict=True)
            if len(curves) > 1 and whole
        ]
    known, less = judged(groups), say_of(groups) is ERROR
    steps = "updates" if less else "steps"
    return chart(
        f"{measure(groups[0].runs[0]).capitalize()} over {'time' if seconds else steps}",
        "mean of the seeds" + whole * ", band from the least to the greatest; thin: each seed"
        if any(len(g.runs) > 1 for g in groups)
        else "evaluations",
        series,
        x_name="seconds of the run" if seconds else "updates" if less else "environment steps of RL",
        zero=less,
        percent=known,
        y_range=(0, 1) if known else None,
        tall=True,
        missing="No evaluation was logged in these runs.",
    )


def page(groups: Sequence[SeedGroup], least: float) -> str:
    """The whole page."""
    runs = [r for g in groups for r in g.runs]
    less = say_of(groups) is ERROR
    names = {str(r.config.get("demos" if less else "task") or "runs") for r in runs}
    title = " and ".join(sorted(names))
    along = "Errors on held-out episodes" if less else "Evaluations on the starts that choose"
    along += ", as a share of that of the mean action." * less or "."
    notes = "".join(f"<li>{esc(r.folder.name)}: {esc(n)}</li>" for r in runs for n in notes_of(r))
    body = f"""
<header><p class="eyebrow">robo_rl runs</p><h1>{esc(title)}</h1>
<ul class="facts"><li><span>runs</span>{len(runs)}</li><li><span>groups</span>{len(groups)}</li></ul></header>
{f'<section class="card notes"><ul>{notes}</ul></section>' if notes else ""}
<h2>Where they end</h2>
<p>Runs that differ in their seed alone are one group. Intervals are Student's over its seeds, 95 %; of seeds
that end all alike, over the starts of all.</p>
{ends_table(groups, least)}
{differences_table(groups)}
{tasks_table(groups)}
{axes_table(groups)}
<h2>Along the way</h2>
<p>{along} The mean of a group ends where the first of its seeds ends.</p>
{curves_chart(groups, False)}<div class="gap"></div>{curves_chart(groups, True)}
{options_table(groups)}
<h2>Runs</h2>
{runs_table(groups, least)}
<footer>Made by <code>robo_rl compare</code>. Intervals over seeds: Student's; of differences between
other seeds: Welch's.</footer>"""
    return filled(f"{title} · robo_rl", body)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells (HTML), the first of which names the row."""
    top = "".join(f'<th class="n">{esc(h)}</th>' if k else f"<th>{esc(h)}</th>" for k, h in enumerate(head))
    told = (
        f'<tr><td class="name">{row[0]}</td>'
        + "".join(f'<td class="n">{cell}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="card scroll pad"><table><tr>{top}</tr>{"".join(told)}</table></div>'


def ends(v: Interval, say: Words) -> str:
    """A mean over seeds and its interval as a cell."""
    more = say.interval(v) if math.isfinite(v.low) else "one seed"
    return f"<b>{say.amount(v.value)}</b> <small>{more}</small>"


def tasks_table(groups: Sequence[SeedGroup]) -> str:
    """Success at the end by task or instruction, where there are several."""
    told = [by_task(g) for g in groups]
    tasks = sorted({task for one in told for task in one})
    rows = [
        [esc(task), *(ends(one[task], SUCCESS) if task in one else "–" for one in told)] for task in tasks
    ]
    return (
        f"<h2>Success per task, at the end</h2>{table(['', *(g.name for g in groups)], rows)}" if rows else ""
    )


def axes_table(groups: Sequence[SeedGroup]) -> str:
    """The error of every axis of the actions on held-out episodes, mean over the seeds, in its unit."""
    each = [[(r.held_out or {}).get("axes") or [] for r in g.runs] for g in groups]
    names = [(a["name"], a["unit"]) for a in each[0][0]]
    if say_of(groups) is not ERROR or any(
        [(a["name"], a["unit"]) for a in x] != names for g in each for x in g
    ):
        return ""
    rows = [
        [
            f"{esc(name)} <small>{'' if unit == '1' else esc(unit)}</small>",
            *(f"{sum(x[k]['error'] for x in g) / len(g):.3g}" for g in each),
            f"{each[0][0][k]['error_of_mean']:.3g}",
        ]
        for k, (name, unit) in enumerate(names)
    ]
    head = ["", *(g.name for g in groups), "the mean action"]
    return f"<h2>Error of every axis</h2>{table(head, rows)}"


def ends_table(groups: Sequence[SeedGroup], least: float) -> str:
    known, say, columns = judged(groups), say_of(groups), columns_of(groups)
    return table(
        ["", "seeds", *columns.values()] + [f"steps to {100 * least:g} %"] * known,
        [
            [esc(g.name), ", ".join(map(str, g.seeds)), *(ends(over(g, k), say) for k in columns)]
            + [esc(", ".join(to_reach(r, least) for r in g.runs))] * known
            for g in groups
        ],
    )


def differences_table(groups: Sequence[SeedGroup]) -> str:
    if len(groups) < 2:
        return ""
    say = say_of(groups)
    rows = []
    for g in groups[1:]:
        d, how = compared(g, groups[0])
        told = say.change(d) if math.isfinite(d.low) else "–"
        rows.append(
            [esc(f"{g.name} − {groups[0].name}"), say.step(d.value), told, esc(how), verdict(g, groups[0], d)]
        )
    head = ["", "end", "95 % interval", "how", ""]
    return f"<h2>Difference from the first</h2>{table(head, rows)}"


def options_table(groups: Sequence[SeedGroup]) -> str:
    options = sorted({k for g in groups for k in g.options})
    if not options:
        return ""
    rows = [[esc(k), *(f"<code>{esc(g.options[k])}</code>" for g in groups)] for k in options]
    return f"<h2>Options that differ</h2>{table(['', *(g.name for g in groups)], rows)}"


def runs_table(groups: Sequence[SeedGroup], least: float) -> str:
    known, columns = judged(groups), columns_of(groups)
    say, rows = say_of(groups), []
    for g in groups:
        ends = zip(*(g.values(k) for k in columns), strict=True)
        for seed, run, values in zip(g.seeds, g.runs, ends, strict=True):
            told = [say.amount(v) if math.isfinite(v) else "–" for v in values]
            hit = [esc(to_reach(run, least, seconds)) for seconds in (False, True)] * known
            where = f"<code>{esc(run.folder)}</code>"
            rows.append([esc(g.name), str(seed), *told, *hit, duration(totals(run)["time_s"]), where])
    more = [f"steps to {100 * least:g} %", "time to it"] * known
    return table(["", "seed", *columns.values(), *more, "time", "folder"], rows)


def write(groups: Sequence[SeedGroup], least: float, out: str = "") -> Path:
    """Write the page to the file or into the folder `out` (where that is empty, compare.html in the folder
    that holds all runs) -> its path."""
    if not out:
        out = os.path.commonpath([str(r.folder.resolve().parent) for g in groups for r in g.runs])
    path = Path(out) / "compare.html" if Path(out).is_dir() else Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, page(groups, least).encode())
    return path


def as_json(groups: Sequence[SeedGroup], least: float, path: Path) -> str:
    return json.dumps(
        {"page": str(path), **summary(groups, least)}, indent=1, ensure_ascii=False, allow_nan=False
    )
