"""Several runs side by side: those that differ in nothing but their seed are one group, whose mean and
interval are over seeds (`robo_rl compare`)."""

import contextlib
import math
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from robo_rl.errors import UserError, in_range, quoted
from robo_rl.files import folder_of, read_json
from robo_rl.log import RUNS, open_run
from robo_rl.report.data import Evaluation, RunRecord, difference, load
from robo_rl.report.held_out import is_without_env
from robo_rl.report.text import flat
from robo_rl.results import COMMON
from robo_rl.stats import (
    Interval,
    TaskRow,
    counts,
    difference_over_seeds,
    mean_over_seeds,
    per_task,
    unpaired_difference,
    wilson,
)

# what says nothing about what a run learnt: where and on what it ran
ASIDE = ("seed", "out", "resume", "video", "wandb", "threads", "torch_threads", "workers", "hang")
FOLDERS = ("init", "demos")  # may name another folder for each seed
FIRST = ("task", "algo", "preset", "obs", "policy.kind", "policy.size", "sim")  # names of groups begin with


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
        """Success, or mean return, of each seed's evaluation "start", "end" or "best"; of runs without an env
        the error on held-out episodes, as a share of the mean action's; nan where it has none."""
        return [value_of(r, which) for r in self.runs]


def value_of(run: RunRecord, which: str) -> float:
    """`SeedGroup.values` of one."""
    if measure(run) == "error":
        return math.nan if which == "start" else float(run.held_out["error"])  # pyright: ignore[reportOptionalSubscript]  # by measure
    return math.nan if (e := evaluation(run, which)) is None else e.rate.value


def measure(run: RunRecord) -> str:
    """What judges a run: "success", "return" where its task knows none, "error" where there was no env."""
    error = run.held_out.get("error") if run.held_out and not run.evals else None
    if error is not None and math.isfinite(error):
        return "error"
    return "success" if run.judged else "return"


def evaluation(run: RunRecord, which: str) -> "Evaluation | None":
    """The run's evaluation "start", "end" or "best"; a run without RL, or that its first evaluation ended,
    ends as it starts."""
    if which == "end" and (final := next((e for e in run.evals if e.label == "final"), None)):
        return final
    if which == "best" or which == "end" and has_rl(run):
        return getattr(run, which)
    return getattr(run, which) or run.start or (run.evals[0] if run.evals else None)


def has_rl(run: RunRecord) -> bool:
    """Whether RL follows supervision in this run, or has begun."""
    return run.config.get("algo") != "bc" and run.config.get("steps") != 0 and not is_without_env(run)


def within(path: Path) -> list[Path]:
    """The runs in a folder of runs, in the order in which they were asked for; [] of any other."""
    if not path.is_dir() or (path / "run.json").is_file():
        return []
    with contextlib.suppress(UserError, KeyError, TypeError):
        asked = list(read_json(path / RUNS)["runs"])
        rank = {name: k for k, name in enumerate(asked)}
        return sorted(
            (p.parent for p in path.glob("*/run.json")), key=lambda p: (rank.get(p.name, len(rank)), p)
        )
    return sorted(p.parent for p in path.glob("*/run.json"))


def run_folders(paths: Sequence["str | Path"]) -> list[Path]:
    """The run folders at `paths`; a folder of runs (robo_rl train --seeds) stands for all of them."""
    found: list[Path] = []
    for path in paths:
        found += within(Path(path)) or [open_run(path)]
    twice = [p for k, p in enumerate(found) if p.resolve() in {q.resolve() for q in found[:k]}]
    if twice:
        raise UserError(f"{twice[0]} is given twice")
    return found


def grouped(runs: Sequence[RunRecord]) -> list[SeedGroup]:
    """Groups in the order in which their first runs are given.

    Where a seed occurs twice among runs of the same options they are parted by the folders that they begin
    with, then by the folder that they are in (one configuration before and after a change of the code).
    """
    told: list[dict[str, str]] = []
    for run in runs:
        config, seed = run.info.get("config"), run.info.get("seed") or 0
        if not isinstance(config, dict) or not config or not isinstance(seed, int):
            raise UserError(
                f"{run.folder} does not say its options (config and seed in run.json): leave it out"
            )
        told.append(dict(flat(config)))
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


def names_apart(folders: Sequence[Path]) -> dict[Path, str]:
    """{run folder: the options in which it differs from the others, but for the seed and what a row says
    anyway}."""
    groups = grouped([load(folder) for folder in folders])
    if len(groups) == 1:
        return dict.fromkeys(folders, "")
    told = {
        run.folder: ", ".join(
            k for k in group.name.split() if k.split("=")[0] not in ("sim", "task", "algo", "obs")
        )
        for group in groups
        for run in group.runs
    }
    return {folder: told[folder] for folder in folders}


def notes_of(run: RunRecord) -> list[str]:
    """What is to be known of a run's row."""
    unfinished = run.metrics and not any(e.label == "final" for e in run.evals)
    end = "it has no end yet" if evaluation(run, "end") is None else "its end is its latest evaluation"
    more = [f"no final evaluation: it is still going, or it was stopped; {end}"]
    return [*run.notes, *more * bool(unfinished and has_rl(run))]


def curve(run: RunRecord) -> Curve:
    """Of what the run has logged; of several evaluations at one step the last."""
    keys = {"error": "heldout/error", "success": "eval/success", "return": "eval/return"}
    m, key = run.metrics, keys[measure(run)]
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
    if measure(run) == "error":
        return None
    c = curve(run)
    hit = np.flatnonzero(c.values >= least)
    return (float(c.steps[hit[0]]), float(c.seconds[hit[0]])) if len(hit) else None


def compared(after: SeedGroup, before: SeedGroup) -> tuple[Interval, str]:
    """(what `after` ends with minus what `before` does, how that is known)."""
    a, b = (dict(zip(g.seeds, g.values("end"), strict=True)) for g in (after, before))
    a, b = ({s: v for s, v in g.items() if math.isfinite(v)} for g in (a, b))
    if len(a) == len(b) == 1 and len(after.runs) == len(before.runs) == 1:
        mine, theirs = (evaluation(g.runs[0], "end") for g in (after, before))
        if mine is None or theirs is None:
            change = next(iter(a.values())) - next(iter(b.values()))
            return Interval(change, math.nan, math.nan), "one seed each"
        d = difference(theirs, mine)
        return d.change, f"one seed each, interval over {d.n} shared starts" if d.paired else "one seed each"
    shared = sorted(a.keys() & b.keys())
    if len(shared) >= 2 and len(shared) == max(len(a), len(b)):
        d, how = mean_over_seeds([a[s] - b[s] for s in shared]), f"paired over {len(shared)} seeds"
    else:
        d, how = difference_over_seeds(list(a.values()), list(b.values())), f"{len(a)} and {len(b)} seeds"
    if not math.isfinite(d.low) or not judged([after, before]):
        return d, how
    if d.low < d.high:
        return Interval(d.value, max(-1.0, d.low), min(1.0, d.high)), how
    return unpaired_difference(
        *pooled(after, "end"), *pooled(before, "end")
    ), f"{how}, all alike: over starts"


def pooled(group: SeedGroup, which: str) -> tuple[float, int]:
    """(successes, starts) of this evaluation of all seeds together."""
    each = [counts(e.success, e.origins) for r in group.runs if (e := evaluation(r, which)) is not None]
    return sum(x for x, _ in each), sum(n for _, n in each)


def summary(groups: Sequence[SeedGroup], least: float) -> dict:
    """The numbers of the page, for scripts."""

    def told(i: Interval) -> dict:
        return {k: v if math.isfinite(v) else None for k, v in i._asdict().items()}

    def of_run(run: RunRecord) -> dict:
        hit = reached(run, least)
        return {
            "run": str(run.folder),
            "seed": run.info.get("seed"),
            **{k: v if math.isfinite(v := value_of(run, k)) else None for k in ("start", "end", "best")},
            "steps_to": hit[0] if hit else None,
            "seconds_to": hit[1] if hit else None,
            "steps": float(run.metrics["step"].max()) if run.metrics else None,
        }

    return {
        "what": measure(groups[0].runs[0]),
        "least": least,
        "groups": [
            {
                "name": g.name,
                "options": g.options,
                **{k: told(over(g, k)) for k in ("start", "end", "best")},
                "tasks": {task: told(i) for task, i in by_task(g).items()},
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


def by_task(group: SeedGroup) -> dict[str, Interval]:
    """{task or instruction: mean success over the seeds at the end}, {} where there is one alone."""
    each: dict[str, list[TaskRow]] = {}
    for run in group.runs:
        end = evaluation(run, "end")
        if end is not None and end.judged and end.task:
            for row in per_task(end.task, end.success, groups=end.origins):
                each.setdefault(row.task, []).append(row)
    if len(each) < 2:
        return {}
    return {
        task: spread([r.rate.value for r in rows], sum(r.successes for r in rows), sum(r.n for r in rows))
        for task, rows in each.items()
    }


def judged(groups: Sequence[SeedGroup]) -> bool:
    """Whether all tasks know success."""
    return all(measure(r) == "success" for g in groups for r in g.runs)


def over(group: SeedGroup, which: str) -> Interval:
    """Mean over the seeds that have this evaluation."""
    values = [v for v in group.values(which) if math.isfinite(v)]
    return spread(values, *pooled(group, which)) if judged([group]) else mean_over_seeds(values)


def spread(rates: Sequence[float], successes: float, n: int) -> Interval:
    """Mean of the success of each seed, which ends at 0 and 1. Seeds that are all alike say nothing of their
    spread: the interval is then over the n starts of all, of which so many succeeded."""
    i = mean_over_seeds(rates)
    if not math.isfinite(i.low):
        return i
    return wilson(successes, n) if i.low == i.high else Interval(i.value, max(0.0, i.low), min(1.0, i.high))


def same_tasks(a: SeedGroup, b: SeedGroup) -> bool:
    """Whether two groups learnt the same, so that a difference says which is better."""
    mine, theirs = ({same_of(r) for r in g.runs} for g in (a, b))
    return mine == theirs


def same_of(run: RunRecord) -> tuple[str, ...]:
    """The task; of a run without an env its data set and what of it was held out."""
    config = run.config
    if measure(run) != "error":
        return (str(config.get("task")),)
    told = (config.get("demos"), (config.get("data") or {}).get("held_out"))
    return tuple(map(str, told))


def compare(runs: "str | Path | Sequence[str | Path]", reach: float = COMMON) -> dict:
    """Runs side by side: what `robo_rl compare --json` prints, without a page.

    * runs: run folders, or a folder of runs (robo_rl train --seeds). Those that differ in nothing but their
      seed are one group.
    * reach: success whose first evaluation counts as reached.

    "groups": of each its name (the options that differ), mean over its seeds at the "start", "end" and of the
    "best" checkpoint, with Student's 95 % interval, and its runs; "what" says of what: success, return where
    a task knows none, error on held-out episodes (as a share of that of the mean action) where there was no
    env; "differences" of the ends from the first group's: over pairs of one seed where both have the same
    seeds, else Welch's, of one seed each over the starts; "left_out": what a folder of runs has without an
    evaluation. UserError: fewer than two runs, one that is named and has no evaluation.
    """
    if not isinstance(reach, (int, float)):
        raise UserError(
            f"compare takes all runs in one list, compare([RUN, RUN]); reach is a number, got {reach!r}"
        )
    in_range("reach", reach, 0, 1)
    left_out: list[str] = []
    each = list(runs) if isinstance(runs, Iterable) and not isinstance(runs, str) else [runs]
    paths = [folder_of(run, "compare", "a run, or a list of such") for run in each]
    return summary(read_groups(paths, left_out.append), reach) | {"left_out": left_out}


def read_groups(
    paths: Sequence["str | Path"], tell: Callable[[str], None] = lambda words: None
) -> list[SeedGroup]:
    """The groups of the runs at `paths`; tell(words) hears of runs of a folder of runs that are left out for
    want of an evaluation. UserError: fewer than two runs, one that is named and has no evaluation."""
    runs: list[RunRecord] = []
    named = {Path(path).resolve() for path in paths}
    for folder in run_folders(paths):
        run = load(folder)
        if run.evals or measure(run) == "error":
            runs.append(run)
            continue
        why = f"{folder} has no evaluation yet"
        if folder.resolve() in named:
            if is_without_env(run):
                raise UserError(
                    f"no held-out episode has judged {folder}: end it with robo_rl train --resume "
                    f"{quoted(folder)}, or if --data.held-out is 0 leave it out"
                )
            raise UserError(f"{why}; leave it out, or robo_rl eval {quoted(folder)}")
        tell(f"{why}: left out")
    if len(runs) < 2:
        raise UserError(
            "compare takes two runs with evaluations or more, or a folder of runs (robo_rl train --seeds "
            "0,1,2); of one run: robo_rl report RUN"
        )
    if len(kinds := sorted({measure(r) for r in runs})) > 1:
        raise UserError(f"these runs are judged by {' and by '.join(kinds)}: compare runs of one kind")
    return grouped(runs)
