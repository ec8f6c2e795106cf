"""Several runs side by side: those that differ in nothing but their seed are one group, whose mean and
interval are over seeds (`robo_rl compare`)."""

import json
import math
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from robo_rl.errors import UserError
from robo_rl.files import write_bytes
from robo_rl.log import open_run, si
from robo_rl.report.charts import Series, chart
from robo_rl.report.data import Evaluation, RunRecord, difference, load, totals
from robo_rl.report.text import RETURN, SUCCESS, Words, duration, esc, filled, flat
from robo_rl.stats import Interval, difference_over_seeds, mean_over_seeds

# what says nothing about what a run learnt: where and on what it ran
ASIDE = ("seed", "out", "resume", "video", "wandb", "threads", "torch_threads", "workers", "hang")
FOLDERS = ("init", "demos")  # may name another folder for each seed
FIRST = ("task", "algo", "preset", "obs", "policy.kind", "policy.size", "sim")  # names of groups begin with
COLOURS = (1, 3, 2, 4, 5, 7)


@dataclass(frozen=True, slots=True)
class Curve:
    """Evaluations of a run on the starts that choose, [n] each: steps, seconds, success (or return)."""

    steps: np.ndarray
    seconds: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Runs that differ in their seed alone. `name`: the options in which it differs from the other groups."""

    name: str
    options: dict[str, str]
    runs: tuple[RunRecord, ...]

    @property
    def seeds(self) -> list[int]:
        return [int(r.info.get("seed") or 0) for r in self.runs]

    def values(self, which: str) -> list[float]:
        """Success, or mean return, of each seed's evaluation "start", "end" or "best"; nan where it has
        none."""
        evals: list[Evaluation | None] = [getattr(r, which) for r in self.runs]
        return [math.nan if e is None else e.rate.value for e in evals]


def run_folders(paths: Sequence["str | Path"]) -> list[Path]:
    """The run folders at `paths`; a folder of runs (robo_rl train --seeds) stands for all of them."""
    found: list[Path] = []
    for path in paths:
        within = sorted(p.parent for p in Path(path).glob("*/run.json")) if Path(path).is_dir() else []
        whole = (Path(path) / "run.json").is_file()
        found += within if within and not whole else [open_run(path)]
    twice = [p for k, p in enumerate(found) if p.resolve() in {q.resolve() for q in found[:k]}]
    if twice:
        raise UserError(f"{twice[0]} is given twice")
    return found


def grouped(runs: Sequence[RunRecord]) -> list[SeedGroup]:
    """Groups in the order in which their first runs are given.

    Where a seed occurs twice among runs of the same options they are parted by the folders that they begin
    with, then by the folder that they are in (one configuration before and after a change of the code).
    """
    told = [dict(flat(run.info.get("config") or {})) for run in runs]
    for run, options in zip(runs, told, strict=True):
        if not options:
            raise UserError(f"{run.folder} does not say its options (config in run.json): leave it out")
    names = sorted({k for options in told for k in options})
    differ = [k for k in names if k not in ASIDE and len({o.get(k) for o in told}) > 1]
    finer: list[Callable[[int], Hashable]] = [
        lambda i: tuple(told[i].get(k) for k in differ if k not in FOLDERS),
        lambda i: tuple(told[i].get(k) for k in FOLDERS),
        lambda i: runs[i].folder.resolve().parent,
        lambda i: runs[i].folder.resolve(),
    ]
    parts = [list(range(len(runs)))]
    for k, key in enumerate(finer):
        split: list[list[int]] = []
        for members in parts:
            seeds = [runs[i].info.get("seed") for i in members]
            by_key: dict[Hashable, list[int]] = {}
            for i in members:
                by_key.setdefault(key(i) if k == 0 or len(set(seeds)) < len(seeds) else None, []).append(i)
            split += by_key.values()
        parts = split
    parts.sort(key=min)
    heads = [told[members[0]] for members in parts]
    between = [k for k in differ if len({h.get(k) for h in heads}) > 1]
    labels = labels_of(heads, between)
    for label in {x for x in labels if labels.count(x) > 1}:
        same = [k for k, x in enumerate(labels) if x == label]
        where = [os.path.commonpath([str(runs[i].folder.resolve()) for i in parts[k]]) for k in same]
        shared = os.path.commonpath(where)
        for k, path in zip(same, where, strict=True):
            labels[k] = f"{label} {os.path.relpath(path, shared)}".strip()
    return [
        SeedGroup(label, {k: head.get(k, "–") for k in between}, tuple(runs[i] for i in members))
        for label, head, members in zip(labels, heads, parts, strict=True)
    ]


def labels_of(heads: Sequence[dict[str, str]], between: Sequence[str]) -> list[str]:
    """A short name for each of several sets of options: as many of those `between` as tell them apart."""
    rest = [k for k in between if k not in (*FIRST, *FOLDERS)]
    order = [*(k for k in FIRST if k in between), *rest, *(k for k in FOLDERS if k in between)]
    chosen: list[str] = []
    apart = 1
    for k in order:
        now = len({tuple(h.get(j) for j in (*chosen, k)) for h in heads})
        if now > apart:
            chosen, apart = [*chosen, k], now
    if not chosen:
        return [" ".join(filter(None, (h.get("task"), h.get("algo")))) or "run" for h in heads]
    return [" ".join(f"{k}={h.get(k, '–')}" for k in chosen) for h in heads]


def notes_of(run: RunRecord) -> list[str]:
    """What is to be known of a run's row."""
    unfinished = run.metrics and not any(e.label == "final" for e in run.evals)
    rl = (run.info.get("config") or {}).get("algo") != "bc"
    more = ["no final evaluation: it is still going, or it was stopped; its end is its latest evaluation"]
    return [*run.notes, *more * bool(unfinished and rl)]


def curve(run: RunRecord) -> Curve:
    """Of what the run has logged; of several evaluations at one step the last."""
    m, key = run.metrics, "eval/success" if run.judged else "eval/return"
    if key not in m:
        none = np.zeros(0)
        return Curve(none, none, none)
    rows = np.flatnonzero(np.isfinite(m[key]))
    last = {int(m["step"][i]): i for i in rows}
    at = np.array([last[s] for s in sorted(last)], dtype=np.int64)
    return Curve(m["step"][at].astype(float), m["time"][at], m[key][at])


def mean_curve(curves: Sequence[Curve], seconds: bool = False) -> "tuple[np.ndarray, np.ndarray] | None":
    """(x [n], values [seeds, n]) where every seed still runs, between its evaluations on a straight line."""
    xs = [c.seconds if seconds else c.steps for c in curves]
    if not curves or not all(len(x) for x in xs):
        return None
    low, high = max(x[0] for x in xs), min(x[-1] for x in xs)
    grid = np.unique(np.concatenate(xs))
    grid = grid[(grid >= low) & (grid <= high)]
    if not len(grid):
        return None
    return grid, np.array([np.interp(grid, x, c.values) for x, c in zip(xs, curves, strict=True)])


def reached(run: RunRecord, least: float) -> "tuple[float, float] | None":
    """(steps, seconds) to the first evaluation of `least` or more; None: not within the run."""
    c = curve(run)
    hit = np.flatnonzero(c.values >= least)
    return (float(c.steps[hit[0]]), float(c.seconds[hit[0]])) if len(hit) else None


def compared(after: SeedGroup, before: SeedGroup) -> tuple[Interval, str]:
    """(what `after` ends with minus what `before` does, how that is known)."""
    a, b = (dict(zip(g.seeds, g.values("end"), strict=True)) for g in (after, before))
    a, b = ({s: v for s, v in g.items() if math.isfinite(v)} for g in (a, b))
    if len(a) == len(b) == 1 and len(after.runs) == len(before.runs) == 1:
        mine, theirs = after.runs[0].end, before.runs[0].end
        assert mine is not None and theirs is not None
        d = difference(theirs, mine)
        return d.change, f"one seed each, interval over {d.n} shared starts" if d.paired else "one seed each"
    shared = sorted(a.keys() & b.keys())
    if len(shared) >= 2 and len(shared) == max(len(a), len(b)):
        return mean_over_seeds([a[s] - b[s] for s in shared]), f"paired over {len(shared)} seeds"
    return (difference_over_seeds(list(a.values()), list(b.values())), f"{len(a)} and {len(b)} seeds")


def summary(groups: Sequence[SeedGroup], least: float) -> dict:
    """The numbers of the page, for scripts."""

    def told(i: Interval) -> dict:
        return {k: v if math.isfinite(v) else None for k, v in i._asdict().items()}

    def of_run(run: RunRecord) -> dict:
        hit = reached(run, least)
        return {
            "run": str(run.folder),
            "seed": run.info.get("seed"),
            **{k: e.rate.value if (e := getattr(run, k)) else None for k in ("start", "end", "best")},
            "steps_to": hit[0] if hit else None,
            "seconds_to": hit[1] if hit else None,
            "steps": float(run.metrics["step"].max()) if run.metrics else None,
        }

    return {
        "what": "success" if judged(groups) else "return",
        "least": least,
        "groups": [
            {
                "name": g.name,
                "options": g.options,
                **{k: told(over(g, k)) for k in ("start", "end", "best")},
                "runs": [of_run(r) for r in g.runs],
            }
            for g in groups
        ],
        "differences": [
            {"after": g.name, "before": groups[0].name, **told(d), "how": how}
            for g in groups[1:]
            for d, how in [compared(g, groups[0])]
        ],
    }


def judged(groups: Sequence[SeedGroup]) -> bool:
    """Whether all tasks know success."""
    return all(r.judged for g in groups for r in g.runs)


def over(group: SeedGroup, which: str) -> Interval:
    """Mean over the seeds that have this evaluation; success ends at 0 and 1."""
    i = mean_over_seeds([v for v in group.values(which) if math.isfinite(v)])
    if not judged([group]) or not math.isfinite(i.low):
        return i
    return Interval(i.value, max(0.0, i.low), min(1.0, i.high))


def compare(runs: Sequence["str | Path"], reach: float = 0.9) -> dict:
    """Runs side by side: what `robo_rl compare --json` prints, without a page.

    * runs: run folders, or a folder of runs (robo_rl train --seeds). Those that differ in nothing but their
      seed are one group.
    * reach: success whose first evaluation counts as reached.

    "groups": of each its name (the options that differ), mean success (or return, of a task that knows none)
    over its seeds at the "start", "end" and of the "best" checkpoint, with Student's 95 % interval, and its
    runs; "differences" of the ends from the first group's: over pairs of one seed where both have the same
    seeds, else Welch's, of one seed each over the starts. UserError: fewer than two runs, one without an
    evaluation.
    """
    return summary(read_groups(runs), reach)


def read_groups(paths: Sequence["str | Path"]) -> list[SeedGroup]:
    """The groups of the runs at `paths`. UserError: fewer than two runs, one without an evaluation."""
    runs = [load(folder) for folder in run_folders(paths)]
    if len(runs) < 2:
        raise UserError(
            "compare takes two runs or more, or a folder of runs (robo_rl train --seeds 0,1,2); of one run: "
            "robo_rl report RUN"
        )
    for run in runs:
        if not run.evals:
            more = " (along recorded episodes alone: compare its report)" if run.held_out else ""
            raise UserError(
                f"{run.folder} has no evaluation yet{more}; leave it out, or robo_rl eval {run.folder}"
            )
    if len({r.judged for r in runs}) > 1:
        raise UserError("some of these runs have success and some returns alone: compare runs of one kind")
    return grouped(runs)


# ---- words and the page


def words_of(value: Interval, say: Words) -> str:
    """A mean over seeds, and its interval where there is one."""
    return say.amount(value.value) + (f" [{say.interval(value)}]" if math.isfinite(value.low) else "")


def to_reach(run: RunRecord, least: float, seconds: bool = False) -> str:
    """Steps, or time, to the first evaluation of `least` or more; "> …", all of the run, without one."""
    hit, c = reached(run, least), curve(run)
    many = hit if hit else tuple(x[-1] if len(x) else math.nan for x in (c.steps, c.seconds))
    told = duration(many[1]) if seconds else si(many[0]) if math.isfinite(many[0]) else "–"
    return told if hit else f"> {told}"


def verdict(change: Interval) -> str:
    if not math.isfinite(change.low):
        return "unknown: more seeds"
    return "better" if change.low > 0 else "worse" if change.high < 0 else "no clear difference"


def lines(groups: Sequence[SeedGroup], least: float) -> list[str]:
    """What the command prints: a row for each group, then how each differs from the first."""
    say = SUCCESS if judged(groups) else RETURN
    head = ["", "seeds", "start", "end", "best"] + [f"steps to {100 * least:g} %"] * judged(groups)
    rows = [
        [g.name, str(len(g.runs)), *(words_of(over(g, k), say) for k in ("start", "end", "best"))]
        + [", ".join(to_reach(r, least) for r in g.runs)] * judged(groups)
        for g in groups
    ]
    wide = [max(len(r[k]) for r in (head, *rows)) for k in range(len(head))]
    out = ["  ".join(cell.ljust(w) for cell, w in zip(r, wide, strict=True)).rstrip() for r in (head, *rows)]
    for g in groups[1:]:
        change, how = compared(g, groups[0])
        told = f" (95 % {say.change(change)})" if math.isfinite(change.low) else ""
        out.append(f"{g.name} - {groups[0].name}: {say.step(change.value)}{told}, {how}: {verdict(change)}")
    return out


def curves_chart(groups: Sequence[SeedGroup], seconds: bool) -> str:
    """Every group's mean over its seeds, between its least and its greatest seed, and the seeds."""
    series: list[Series] = []
    for k, g in enumerate(groups):
        colour, curves = COLOURS[k % len(COLOURS)], [curve(r) for r in g.runs]
        if (found := mean_curve(curves, seconds)) is not None:
            x, y = found
            series.append(Series(g.name, x, y.mean(0), colour, y.min(0), y.max(0), "dots"))
        series += [
            Series(f"{g.name}, seed {s}", c.seconds if seconds else c.steps, c.values, colour, look="seed")
            for s, c in zip(g.seeds, curves, strict=True)
            if len(curves) > 1
        ]
    known = judged(groups)
    return chart(
        ("Success" if known else "Return") + (" over time" if seconds else " over steps"),
        "mean of the seeds, band from the least to the greatest; thin: each seed"
        if any(len(g.runs) > 1 for g in groups)
        else "evaluations",
        series,
        x_name="seconds of the run" if seconds else "environment steps of RL",
        percent=known,
        y_range=(0, 1) if known else None,
        tall=True,
        missing="No evaluation was logged in these runs.",
    )


def page(groups: Sequence[SeedGroup], least: float) -> str:
    """The whole page."""
    runs = [r for g in groups for r in g.runs]
    title = " and ".join(sorted({str((r.info.get("config") or {}).get("task") or "runs") for r in runs}))
    notes = "".join(f"<li>{esc(r.folder.name)}: {esc(n)}</li>" for r in runs for n in notes_of(r))
    body = f"""
<header><p class="eyebrow">robo_rl runs</p><h1>{esc(title)}</h1>
<ul class="facts"><li><span>runs</span>{len(runs)}</li><li><span>groups</span>{len(groups)}</li></ul></header>
{f'<section class="card notes"><ul>{notes}</ul></section>' if notes else ""}
<h2>Where they end</h2>
<p>Runs that differ in their seed alone are one group. Intervals are Student's over its seeds, 95 %.</p>
{ends_table(groups, least)}
{differences_table(groups)}
<h2>Along the way</h2>
<p>Evaluations on the starts that choose. The mean of a group ends where the first of its seeds ends.</p>
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


def ends_table(groups: Sequence[SeedGroup], least: float) -> str:
    known = judged(groups)
    say = SUCCESS if known else RETURN

    def ends(v: Interval) -> str:
        more = say.interval(v) if math.isfinite(v.low) else "one seed"
        return f"<b>{say.amount(v.value)}</b> <small>{more}</small>"

    return table(
        ["", "seeds", "start", "end", "best"] + [f"steps to {100 * least:g} %"] * known,
        [
            [esc(g.name), ", ".join(map(str, g.seeds)), *(ends(over(g, k)) for k in ("start", "end", "best"))]
            + [esc(", ".join(to_reach(r, least) for r in g.runs))] * known
            for g in groups
        ],
    )


def differences_table(groups: Sequence[SeedGroup]) -> str:
    if len(groups) < 2:
        return ""
    say = SUCCESS if judged(groups) else RETURN
    rows = []
    for g in groups[1:]:
        d, how = compared(g, groups[0])
        told = say.change(d) if math.isfinite(d.low) else "–"
        rows.append([esc(f"{g.name} − {groups[0].name}"), say.step(d.value), told, esc(how), verdict(d)])
    head = ["", "end", "95 % interval", "how", ""]
    return f"<h2>Difference from the first</h2>{table(head, rows)}"


def options_table(groups: Sequence[SeedGroup]) -> str:
    options = sorted({k for g in groups for k in g.options})
    if not options:
        return ""
    rows = [[esc(k), *(f"<code>{esc(g.options[k])}</code>" for g in groups)] for k in options]
    return f"<h2>Options that differ</h2>{table(['', *(g.name for g in groups)], rows)}"


def runs_table(groups: Sequence[SeedGroup], least: float) -> str:
    known = judged(groups)
    say, rows = SUCCESS if known else RETURN, []
    for g in groups:
        ends = zip(*(g.values(k) for k in ("start", "end", "best")), strict=True)
        for seed, run, values in zip(g.seeds, g.runs, ends, strict=True):
            told = [say.amount(v) if math.isfinite(v) else "–" for v in values]
            hit = [esc(to_reach(run, least, seconds)) for seconds in (False, True)] * known
            where = f"<code>{esc(run.folder)}</code>"
            rows.append([esc(g.name), str(seed), *told, *hit, duration(totals(run)["time_s"]), where])
    more = [f"steps to {100 * least:g} %", "time to it"] * known
    return table(["", "seed", "start", "end", "best", *more, "time", "folder"], rows)


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
