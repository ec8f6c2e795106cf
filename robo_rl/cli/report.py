"""`robo_rl report RUN`: one self-contained HTML page about a run, to read offline, mail or archive.

Reads RUN/run.json, metrics.jsonl, evals/*.json and videos/*.mp4 (any of the last three may be missing: the page
says so) and writes RUN/report.html with plots, videos and styles inside.
"""

import base64
import json
import math
import statistics
import sys
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from robo_rl.cli.charts import Series, chart, number, stacked, whisker
from robo_rl.errors import UserError
from robo_rl.files import read_json, write_bytes
from robo_rl.log import clock_text, open_run, read_metrics, si
from robo_rl.stats import (
    Interval,
    bootstrap_mean,
    match,
    paired_difference,
    per_task,
    unpaired_difference,
    wilson,
)

VIDEO_BYTES = 48_000_000  # most video put into one page
PARTS = (("time/sim", "simulator", 1), ("time/policy", "policy", 2), ("time/update", "update", 3),
         ("time/eval", "evaluation", 5))  # the rest of the wall time is "other"
NAMES = {"sft": "before RL (SFT)", "final": "after RL", "best": "best checkpoint"}


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about a run: success, training health, throughput, videos."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="run folder")]
    json: bool = False
    """print one JSON document with the page's path and the summary numbers, and nothing else"""
    out: str = ""
    """where to write the page; empty: RUN/report.html"""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One file of RUN/evals: n episodes from n starts with one policy."""

    label: str
    step: int
    success: np.ndarray  # [n] bool
    starts: list
    task: list[str]
    returns: np.ndarray  # [n], empty if not stored

    @property
    def rate(self) -> Interval:
        return wilson(int(self.success.sum()), len(self.success))

    @property
    def name(self) -> str:
        return NAMES.get(self.label, self.label.replace("_", " "))


@dataclass(frozen=True, slots=True)
class Difference:
    """Success of `after` minus `before`: on `n` shared starts if `paired`, else as two samples."""

    change: Interval
    paired: bool
    n: int

    @property
    def verdict(self) -> str:
        return "improved" if self.change.low > 0 else "worse" if self.change.high < 0 else "no clear change"


@dataclass(frozen=True, slots=True)
class Run:
    """Everything the page is made from."""

    folder: Path
    info: dict
    metrics: dict[str, np.ndarray]
    evals: list[Evaluation]  # in the order of their steps
    videos: list[tuple[str, Path]]  # (label, file), whole files only, start and end first
    notes: list[str]

    @property
    def start(self) -> "Evaluation | None":
        """The policy RL began with: label "sft", else the first of several evaluations."""
        return next((e for e in self.evals if e.label == "sft"), self.evals[0] if len(self.evals) > 1 else None)

    @property
    def end(self) -> "Evaluation | None":
        """What came out: label "final", else the latest that is neither the start nor picked as the best."""
        late = [e for e in self.evals if e is not self.start and e.label != "best"]
        return next((e for e in late if e.label == "final"), late[-1] if late else None)


# ------------------------------------------------------------------------------------------------- reading


def load_evaluation(path: Path) -> Evaluation:
    """Read and check one evaluation; UserError says what is wrong with the file."""
    d = read_json(path)
    try:
        success = np.asarray(d["success"], dtype=float)
        n = len(success)
        starts, task, returns = (list(d.get(k) or []) for k in ("starts", "task", "return"))
        ok = (np.isin(success, (0.0, 1.0)).all() and len(starts) in (0, n) and len(task) in (0, n)
              and len(returns) in (0, n))
        if not ok:
            raise ValueError("lengths differ, or success is not 0 and 1")
        return Evaluation(str(d.get("label") or path.stem), int(d.get("step") or 0), success.astype(bool), starts,
                          [str(t) for t in task], np.asarray(returns, dtype=float))
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path} is damaged ({e}); delete it, or evaluate again") from None


def whole_mp4(path: Path) -> bool:
    """True if the file is a chain of complete MP4 boxes with an index (`moov`): not cut off while written."""
    size, at, kinds = path.stat().st_size, 0, set()
    with open(path, "rb") as f:
        while at < size:
            f.seek(at)
            head = f.read(16)
            if len(head) < 8:
                return False
            length = int.from_bytes(head[:4], "big")
            if length == 1:
                length = int.from_bytes(head[8:16], "big")
            length = length or size - at
            if length < 8 or at + length > size or (at == 0 and head[4:8] != b"ftyp"):
                return False
            kinds.add(head[4:8])
            at += length
    return b"moov" in kinds


def load(folder: Path) -> Run:
    """Read a run folder; damaged evaluations and videos become notes."""
    info = read_json(folder / "run.json")
    if not isinstance(info, dict):
        raise UserError(f"{folder / 'run.json'} is damaged (no JSON object); restore it from a copy")
    notes, evals, videos = [], [], []
    for path in sorted((folder / "evals").glob("*.json")):
        try:
            evals.append(load_evaluation(path))
        except UserError as e:
            notes.append(str(e))
    order = {"sft": -1, "best": 1, "final": 2}
    evals.sort(key=lambda e: (e.label != "sft", e.step, order.get(e.label, 0), e.label))
    for path in sorted((folder / "videos").glob("*.mp4")):
        if whole_mp4(path):
            videos.append((path.stem, path))
        else:
            notes.append(f"The video {path.name} is no whole MP4 file (cut off while written?) and was left out.")
    rank = {"sft": 0, "final": 1, "best": 2}
    videos.sort(key=lambda v: (rank.get(v[0], 9), v[0]))
    return Run(folder, info, read_metrics(folder), evals, videos, notes)


def difference(before: Evaluation, after: Evaluation) -> Difference:
    """Paired on the shared starts where those are all of the smaller evaluation, else unpaired."""
    keys = [list(zip(e.starts, e.task or [""] * len(e.starts))) for e in (after, before)]
    i, j = match(*keys)
    if len(i) and len(i) == min(len(before.success), len(after.success)):
        return Difference(paired_difference(after.success[i], before.success[j]), True, len(i))
    x, y = after.success, before.success
    return Difference(unpaired_difference(int(x.sum()), len(x), int(y.sum()), len(y)), False, 0)


def totals(run: Run) -> dict[str, float]:
    """time_s and env_steps of the whole run, time by stage, steps_per_s over the RL stage (nan if unknown)."""
    m = run.metrics
    if not m:
        return dict.fromkeys(("time_s", "env_steps", "sft_s", "rl_s", "steps_per_s"), math.nan)
    rl = m["stage"] == "rl"
    end = float(np.nanmax(m["time"]))
    sft_end = float(np.nanmax(m["time"][~rl])) if (~rl).any() else 0.0
    steps, t = m["step"][rl], m["time"][rl]
    rate = math.nan
    if len(steps) > 1 and t[-1] > t[0]:
        rate = float((steps[-1] - steps[0]) / (t[-1] - t[0]))
    elif np.isfinite(m.get("rate/steps_per_s", np.array([math.nan]))).any():
        rate = float(np.nanmedian(m["rate/steps_per_s"]))
    return {"time_s": end, "env_steps": float(steps[-1]) if len(steps) else 0.0, "sft_s": sft_end,
            "rl_s": end - sft_end if rl.any() else 0.0, "steps_per_s": rate}


# -------------------------------------------------------------------------------------------------- wording


def pct(v: float) -> str:
    return f"{100 * v:.1f} %" if math.isfinite(v) else "–"


def points(v: float) -> str:
    """A difference in percentage points, signed."""
    return f"{100 * v:+.1f}".replace("-", "−") if math.isfinite(v) else "–"


def interval(i: Interval) -> str:
    return f"{100 * i.low:.1f} … {100 * i.high:.1f} %"


def change(i: Interval) -> str:
    return f"{points(i.low)} … {points(i.high)}"


def esc(x: object) -> str:
    return escape(str(x))


# --------------------------------------------------------------------------------------------------- pieces


def flat(d: dict, prefix: str = "") -> list[tuple[str, str]]:
    """Nested dict as (dotted key, text) pairs."""
    out = []
    for k, v in d.items():
        if isinstance(v, dict) and v:
            out += flat(v, f"{prefix}{k}.")
        else:
            out.append((f"{prefix}{k}", v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)))
    return out


def header(run: Run) -> str:
    info, config = run.info, run.info.get("config") or {}
    git = info.get("git")
    git = " ".join(f"{v}" for _, v in flat(git)) if isinstance(git, dict) else git
    created = str(info.get("created") or "")
    try:
        created = datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        pass
    facts = [(k, config.get(k) if config.get(k) not in (None, "") else info.get(k))
             for k in ("sim", "task", "algo", "policy", "obs")]
    facts += [("seed", info.get("seed")), ("date", created), ("robo_rl", info.get("version")),
              ("git", str(git)[:12] if git else None)]
    chips = "".join(f"<li><span>{esc(k)}</span>{esc(v)}</li>" for k, v in facts
                    if v not in (None, "") and not isinstance(v, (dict, list)))
    name = info.get("name") or run.folder.resolve().name
    return f'<header><p class="eyebrow">robo_rl run</p><h1>{esc(name)}</h1><ul class="facts">{chips}</ul></header>'


def verdict(run: Run) -> str:
    """The card on top: success before and after with intervals, and the difference."""
    start, end = run.start, run.end
    only = end or start or (run.evals[0] if run.evals else None)
    if only is None:
        return ('<section class="card verdict" style="grid-template-columns:1fr"><div>'
                '<span class="badge even">not evaluated yet</span><p style="margin-top:10px">This run has no '
                f"evaluation, so nothing can be said about its success. Make one: "
                f"<code>robo_rl eval {esc(run.folder)}</code></p></div></section>")
    if start and end:
        d = difference(start, end)
        kind = {"improved": "good", "worse": "bad"}.get(d.verdict, "even")
        how = f"paired over {d.n} shared starts" if d.paired else "two separate sets of starts"
        text = (f'<span class="badge {kind}">{esc(d.verdict)}</span><div class="big">{100 * start.rate.value:.1f}'
                f'<span class="to">→</span>{100 * end.rate.value:.1f} <small>% success</small></div>'
                f"<p><b>{points(d.change.value)} points</b>, 95 % interval {change(d.change)}, {how}.</p>")
    else:
        text = (f'<span class="badge even">one evaluation, nothing to compare with yet</span><div class="big">'
                f"{100 * only.rate.value:.1f} <small>% success</small></div>"
                f"<p>{esc(only.name)}, 95 % interval {interval(only.rate)}.</p>")
    shown = [(e, c) for e, c in ((start, 6), (end, 1)) if e] or [(only, 1)]
    shown += [(e, 2) for e in run.evals if e.label == "best"]
    rows = "".join(f'<span>{esc(e.name)}</span>{whisker(*e.rate, c)}<span class="r">{pct(e.rate.value)}<small>'
                   f"{interval(e.rate)}<br>{int(e.success.sum())} of {len(e.success)} starts</small></span>"
                   for e, c in shown)
    scale = '<span class="scale"><span>0</span><span>50</span><span>100 %</span></span>'
    return f'<section class="card verdict"><div>{text}</div><div class="rows">{rows}{scale}</div></section>'


def tiles(run: Run) -> str:
    t = totals(run)
    stages = " · ".join(f"{k} {clock_text(t[f'{s}_s'])}" for k, s in (("SFT", "sft"), ("RL", "rl")) if t[f"{s}_s"] > 0)
    fast = run.metrics.get("rate/steps_per_s", np.array([]))
    fast = fast[np.isfinite(fast)]
    cells = [("Training time", clock_text(t["time_s"]), stages or "no metrics yet"),
             ("Environment steps", si(t["env_steps"]) if math.isfinite(t["env_steps"]) else "–", "in the RL stage"),
             ("Speed", f"{si(t['steps_per_s'])}/s" if math.isfinite(t["steps_per_s"]) else "–",
              f"steps, all included; median {si(float(np.median(fast)))}/s" if len(fast) else "steps, all included")]
    end = run.end or run.start
    if end is not None and len(end.returns):
        r = bootstrap_mean(end.returns)
        cells.append(("Return", number(r.value), f"{esc(end.name)}, 95 % {number(r.low)} … {number(r.high)}"))
    if len(run.evals):
        cells.append(("Evaluations", str(len(run.evals)),
                      f"{statistics.median([len(e.success) for e in run.evals]):.0f} episodes each (median)"))
    return '<section class="tiles">' + "".join(
        f'<div class="card tile"><span>{a}</span><b>{b}</b><small>{c}</small></div>' for a, b, c in cells) + "</section>"


def rl_series(run: Run, key: str, name: str, colour: int = 1, look: str = "line") -> list[Series]:
    """One metric of the RL stage over environment steps; [] if it was never logged."""
    if key not in run.metrics:
        return []
    rows = (run.metrics["stage"] == "rl") & ~_never(run.metrics[key])
    return [Series(name, run.metrics["step"][rows].astype(float), run.metrics[key][rows], colour, look=look)]


def _never(v: np.ndarray) -> np.ndarray:
    return ~np.isfinite(v)


def success_chart(run: Run) -> str:
    evals = [e for e in run.evals if len(e.success)]
    line = {}
    for e in evals:  # one point per step; "final" and step_… name the same policy
        if e.label != "best" or e.step not in line:
            line[e.step if e.label != "sft" else 0] = e
    shown = sorted(line.items())
    series = rl_series(run, "train/success", "training episodes (exploring)", 6, "thin")
    if shown:
        r = np.array([e.rate for _, e in shown])
        x = np.array([s for s, _ in shown], dtype=float)
        series.append(Series("evaluation, 95 % interval", x, r[:, 0], 1, r[:, 1], r[:, 2], "dots"))
    if run.start is not None:
        s = run.start
        series.append(Series(s.name, np.array([0.0 if s.label == "sft" else float(s.step)]),
                             np.array([s.rate.value]), 3, np.array([s.rate.low]), np.array([s.rate.high]), "dots"))
    return chart("Success over training", "share of episodes that succeed", series, percent=True, y_range=(0, 1),
                 tall=True, missing="No evaluation and no training success was logged yet.")


def return_chart(run: Run) -> str:
    series = rl_series(run, "train/return", "training episodes", 6, "thin")
    evals = sorted((e for e in run.evals if len(e.returns) and e.label != "best"),
                   key=lambda e: 0 if e.label == "sft" else e.step)
    if evals:
        r = np.array([bootstrap_mean(e.returns, resamples=1000) for e in evals])
        x = np.array([0.0 if e.label == "sft" else float(e.step) for e in evals])
        series.append(Series("evaluation, 95 % interval", x, r[:, 0], 1, r[:, 1], r[:, 2], "dots"))
    return chart("Return", "mean sum of rewards per episode", series, missing="No returns were logged yet.")


def ratio_chart(run: Run) -> str:
    series = []
    m = run.metrics
    if "train/log_ratio_p01" in m and "train/log_ratio_p99" in m:
        rows = (m["stage"] == "rl") & np.isfinite(m["train/log_ratio_p01"]) & np.isfinite(m["train/log_ratio_p99"])
        low, high = m["train/log_ratio_p01"][rows], m["train/log_ratio_p99"][rows]
        x = m["step"][rows].astype(float)
        series.append(Series("1 % … 99 % of samples", x, (low + high) / 2, 1, low, high, "band"))
    if "train/ratio_max" in m:
        with np.errstate(divide="ignore", invalid="ignore"):
            top = np.log(m["train/ratio_max"])
        rows = (m["stage"] == "rl") & np.isfinite(top)
        series.append(Series("largest", m["step"][rows].astype(float), top[rows], 4))
    series += rl_series(run, "train/log_ratio_max", "largest |log ratio|", 5)
    return chart("Ratio tails", "log of new over old probability [nats]; 0 where nothing changed", series, zero=True)


def health(run: Run) -> str:
    """The charts of the RL stage."""
    c = [return_chart(run),
         chart("KL", "of the new policy from the one that acted [nats]", rl_series(run, "train/kl", "KL", 5), zero=True),
         chart("Clip fraction", "share of samples whose ratio was clipped",
               rl_series(run, "train/clip_fraction", "clipped", 3), percent=True, zero=True),
         ratio_chart(run),
         chart("Explained variance", "of the returns by the value function; 1 is perfect, 0 is a constant",
               rl_series(run, "train/explained_variance", "explained variance", 2), zero=True),
         chart("Losses", "per update", rl_series(run, "train/value_loss", "value", 2)
               + rl_series(run, "train/policy_loss", "policy", 1)),
         chart("Exploration", "entropy [nats] and noise level of the policy",
               rl_series(run, "train/entropy", "entropy", 1) + rl_series(run, "train/noise", "noise level", 3))]
    shown = {"train/success", "train/return", "train/kl", "train/clip_fraction", "train/ratio_max",
             "train/log_ratio_p01", "train/log_ratio_p99", "train/log_ratio_max", "train/explained_variance",
             "train/value_loss", "train/policy_loss", "train/entropy", "train/noise", "rate/steps_per_s", "step",
             "time", "stage", "sft/loss", *(k for k, _, _ in PARTS)}
    rest = [k for k in run.metrics if k not in shown and len(rl_series(run, k, k)[0].x)]
    more = ""
    if rest:
        more = (f"<details><summary>All other metrics ({len(rest)})</summary><div class='grid'>"
                + "".join(chart(k, "as logged", rl_series(run, k, k, 7)) for k in rest) + "</div></details>")
    return f'<div class="grid">{"".join(c)}</div>{more}'


def sft_chart(run: Run) -> str:
    m = run.metrics
    if "sft/loss" not in m:
        return chart("Supervised loss", "flow matching on the demonstrations", [], missing="No SFT was logged.")
    rows = (m["stage"] == "sft") & np.isfinite(m["sft/loss"])
    step = m["step"][rows].astype(float)
    by_step = len(step) < 2 or step.max() > step.min()
    return chart("Supervised loss", "on the demonstrations",
                 [Series("loss", step if by_step else m["time"][rows], m["sft/loss"][rows], 2)], log=True,
                 x_name="updates" if by_step else "time [s]")


def seconds(run: Run) -> "tuple[np.ndarray, np.ndarray] | None":
    """(wall time at each line [n], seconds spent in each of PARTS and other [n, parts+1]) since the line before."""
    m = run.metrics
    if not m or not any(k in m for k, _, _ in PARTS):
        return None
    t = np.maximum.accumulate(np.nan_to_num(m["time"]))
    took = np.diff(t, prepend=0.0)
    parts = np.stack([np.nan_to_num(m[k]) if k in m else np.zeros(len(t)) for k, _, _ in PARTS], 1).clip(0)
    other = (took - parts.sum(1))[:, None]
    return t, np.concatenate([parts, other], 1)


def throughput(run: Run) -> str:
    speed = chart("Speed", "environment steps per second", rl_series(run, "rate/steps_per_s", "steps/s", 1), zero=True)
    spent = seconds(run)
    if spent is None or spent[0][-1] <= 0:
        return (f'<div class="grid">{speed}<div class="card" style="padding:18px"><p class="empty">Time by stage '
                "was not logged in this run.</p></div></div>")
    t, by = spent
    bins = int(min(40, max(1, len(t))))
    edges = np.linspace(0, t[-1], bins + 1)
    which = np.clip(np.searchsorted(edges, t, side="left") - 1, 0, bins - 1)
    sums = np.stack([np.bincount(which, weights=by[:, k], minlength=bins) for k in range(by.shape[1])], 1).clip(0)
    used = sums.sum(1) > 0
    cuts = np.concatenate([[0.0], edges[1:][used]])  # bins without a line belong to the next one
    if cuts[-1] < t[-1]:
        cuts[-1] = t[-1]
    share = sums[used] / sums[used].sum(1, keepdims=True)
    names = [(n, c) for _, n, c in PARTS] + [("other", 6)]
    unit, size = ("min", 60.0) if t[-1] >= 180 else ("s", 1.0)
    bars = stacked("Where the time goes", "share of the wall time", cuts / size,
                   [(n, c, share[:, k]) for k, (n, c) in enumerate(names)], x_name=f"time since the start [{unit}]")
    total = by.sum(0).clip(0)
    whole = max(float(total.sum()), 1e-9)
    steps = totals(run)["env_steps"]
    rows = "".join(
        f'<tr><td class="name"><s class="c{c}"></s>{n}</td><td class="n">{clock_text(total[k])}</td><td class="n">'
        f'{100 * total[k] / whole:.0f} %</td><td style="width:34%"><span class="bar c{c}" style="width:'
        f'{100 * total[k] / whole:.1f}%"></span></td><td class="n">'
        f"{1e6 * total[k] / steps if steps else math.nan:.3g}</td></tr>".replace(">nan<", ">–<")
        for k, (n, c) in enumerate(names))
    table = ('<div class="card scroll pad"><table><tr><th>Part</th><th class="n">Time</th><th class="n">Share</th>'
             f'<th></th><th class="n">µs per step</th></tr>{rows}</table></div>')
    return f'<div class="grid">{bars}{speed}</div><div style="margin-top:14px">{table}</div>'


def task_table(run: Run) -> str:
    end, start = run.end or run.start or (run.evals[0] if run.evals else None), run.start
    if end is None:
        return '<div class="empty">No evaluation yet.</div>'
    if not end.task:
        return '<div class="empty">The evaluation does not say which task each episode had.</div>'
    before = {r.task: r for r in per_task(start.task, start.success)} if start and start is not end and start.task else {}
    rows = []
    for row in per_task(end.task, end.success):
        cells = [f'<td class="name">{esc(row.task) or "(no instruction)"}</td>']
        if before:
            old = before.get(row.task)
            cells.append(f'<td class="n">{pct(old.rate.value) if old else "–"}</td>')
        cells.append(f'<td class="n"><b>{pct(row.rate.value)}</b></td><td>{whisker(*row.rate, 1)}</td>'
                     f'<td class="n"><small>{interval(row.rate)}</small></td>')
        if before:
            d = difference(_only(start, row.task), _only(end, row.task)) if row.task in before else None
            look = {"improved": "up", "worse": "down"}.get(d.verdict, "") if d else ""
            cells.append(f'<td class="n"><span class="{look}">{points(d.change.value)}</span> <small>{change(d.change)}'
                         "</small></td>" if d else '<td class="n">–</td>')
        cells.append(f'<td class="n">{row.successes} / {row.n}</td>')
        rows.append("<tr>" + "".join(cells) + "</tr>")
    more = ('<th class="n">Before</th>', '<th class="n">Change in points</th>') if before else ("", "")
    return ('<div class="card scroll pad"><table><tr><th>Task or instruction</th>' + more[0] + '<th class="n">Success'
            '</th><th></th><th class="n">95 % interval</th>' + more[1] + '<th class="n">Episodes</th></tr>'
            + "".join(rows) + "</table></div>")


def _only(e: Evaluation, task: str) -> Evaluation:
    rows = [i for i, t in enumerate(e.task) if t == task]
    return Evaluation(e.label, e.step, e.success[rows], [e.starts[i] for i in rows] if e.starts else [],
                      [task] * len(rows), e.returns[rows] if len(e.returns) else e.returns)


def video_grid(run: Run, notes: list[str]) -> str:
    """Players with the videos inside, start and end side by side; what does not fit is named in `notes`."""
    if not run.videos:
        return (f'<div class="empty">No videos in this run. Film the policy: <code>robo_rl eval {esc(run.folder)} '
                "--video</code></div>")
    rates = {e.label: e for e in run.evals}
    figures, room = [], VIDEO_BYTES
    for label, path in run.videos:
        size = path.stat().st_size
        if size > room:
            notes.append(f"The video {path.name} ({size / 1e6:.0f} MB) was left out: the page holds at most "
                         f"{VIDEO_BYTES / 1e6:.0f} MB of video.")
            continue
        room -= size
        data = base64.b64encode(path.read_bytes()).decode()
        says = f"{pct(rates[label].rate.value)} over {len(rates[label].success)} starts" if label in rates else ""
        figures.append(f'<figure class="card video"><video controls loop muted playsinline preload="auto" '
                       f'src="data:video/mp4;base64,{data}"></video><figcaption><b>'
                       f"{esc(NAMES.get(label, label.replace('_', ' ')))}</b><span>{says}</span></figcaption></figure>")
    first = 2 if {"sft", "final"} <= {label for label, _ in run.videos} else 4
    more = figures[first:]
    rest = (f"<details><summary>More videos ({len(more)})</summary><div class='grid'>{''.join(more)}</div></details>"
            if more else "")
    return f'<div class="grid">{"".join(figures[:first])}</div>{rest}'


def configuration(run: Run) -> str:
    def table(title: str, pairs: list[tuple[str, str]]) -> str:
        rows = "".join(f"<tr><td>{esc(k)}</td><td><code>{esc(v)}</code></td></tr>" for k, v in pairs)
        empty = '<p class="empty">Not recorded.</p>'
        return (f'<div class="card pad"><h3>{title}</h3>'
                f'{f"<table class=kv>{rows}</table>" if rows else empty}</div>')

    info = run.info
    argv = info.get("argv")
    about = [("folder", str(run.folder.resolve()))]
    about += [("command", " ".join(str(a) for a in argv) if isinstance(argv, list) else str(argv))] if argv else []
    about += flat({k: info[k] for k in ("created", "version", "git", "seed") if info.get(k) is not None})
    versions = info.get("versions") or {}
    config = info.get("config") or {}
    right = table("Run", about) + '<div style="height:14px"></div>' + table("Versions", flat(versions))
    return f'<div class="grid">{table("Configuration", flat(config))}<div>{right}</div></div>'


def not_finite(run: Run) -> list[str]:
    """Metrics that were logged and later lost their numbers: a sign of divergence."""
    out = []
    for key, v in run.metrics.items():
        if key in ("step", "stage") or not np.isfinite(v).any():
            continue
        last = np.flatnonzero(np.isfinite(v))[-1]
        kin = [k for k in run.metrics if k.split("/")[0] == key.split("/")[0] and "/" in k and k != key]
        later = max((np.flatnonzero(np.isfinite(run.metrics[k]))[-1] for k in kin
                     if np.isfinite(run.metrics[k]).any()), default=last)
        if later - last > 3 and key.startswith("train/"):
            out.append(f"{key} has no finite value after step {si(float(run.metrics['step'][last]))}.")
    return out


def page(run: Run) -> str:
    """The whole page."""
    notes = [*run.notes, *not_finite(run)]
    if run.start and run.end and not difference(run.start, run.end).paired:
        notes.append("The evaluations before and after RL used different starts, so the difference is not paired.")
    if any(e.label == "best" for e in run.evals):
        notes.append("The best checkpoint was picked for its success, so its rate is on the bright side.")
    if run.metrics and not any(e.label == "final" for e in run.evals):
        notes.append("There is no final evaluation: the run is still going, or it was stopped.")
    videos = video_grid(run, notes)
    rl = bool(run.metrics) and bool((run.metrics["stage"] == "rl").any())
    training = health(run) if rl else ('<div class="empty">No RL updates yet. They appear here once the RL stage '
                                       "has begun.</div>")
    note_card = ('<section class="card notes"><ul>' + "".join(f"<li>{esc(n)}</li>" for n in notes)
                 + "</ul></section>") if notes else ""
    sections = [
        header(run), verdict(run), tiles(run), note_card,
        f'<h2>Success</h2><p>Evaluations use fixed starts and the policy without exploration; bands are Wilson 95 % '
        f"intervals over starts. They say nothing about other training seeds.</p>{success_chart(run)}",
        f"<h2>Success per task</h2>{task_table(run)}",
        f"<h2>Before and after</h2>{videos}",
        f"<h2>Training</h2><p>Supervised stage, then reinforcement learning.</p>{sft_chart(run)}"
        f'<div style="height:14px"></div>{training}',
        f"<h2>Throughput</h2>{throughput(run)}",
        f"<h2>Configuration</h2>{configuration(run)}",
        "<footer>Made by <code>robo_rl report</code>. Intervals: Wilson (rates), Newcombe method 10 (differences), "
        "percentile bootstrap (returns).</footer>"]
    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    name = str(run.info.get("name") or run.folder.resolve().name)
    return template.replace("{{title}}", esc(f"{name} · robo_rl")).replace("{{body}}", "\n".join(sections))


def summary(run: Run, path: Path) -> dict:
    """The numbers of the page, for scripts."""
    def rate(e: "Evaluation | None") -> "dict | None":
        return e and {"label": e.label, "step": e.step, "n": len(e.success), "successes": int(e.success.sum()),
                      "success": e.rate.value, "low": e.rate.low, "high": e.rate.high}

    config = run.info.get("config") or {}
    d = difference(run.start, run.end) if run.start and run.end else None
    end = run.end or run.start
    return {
        "page": str(path), "run": str(run.folder), "name": run.info.get("name"), "created": run.info.get("created"),
        "sim": config.get("sim"), "task": config.get("task"), "algo": config.get("algo"), "seed": run.info.get("seed"),
        "version": run.info.get("version"), "git": run.info.get("git"),
        "start": rate(run.start), "final": rate(run.end), "evaluations": [rate(e) for e in run.evals],
        "difference": d and {"value": d.change.value, "low": d.change.low, "high": d.change.high,
                             "paired": d.paired, "n": d.n},
        "verdict": d.verdict if d else "unknown",
        "tasks": [{"task": r.task, "n": r.n, "success": r.rate.value, "low": r.rate.low, "high": r.rate.high}
                  for r in (per_task(end.task, end.success) if end and end.task else [])],
        **{k: v if math.isfinite(v) else None for k, v in totals(run).items()},
        "notes": run.notes,
    }


def run(args: Report) -> int:
    """Write the page; returns the exit status."""
    record = load(open_run(args.run))
    path = Path(args.out) if args.out else record.folder / "report.html"
    if path.is_dir():
        path = path / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, page(record).encode())
    if args.json:
        print(json.dumps(summary(record, path), indent=1, ensure_ascii=False, allow_nan=False))
        return 0
    if record.start and record.end:
        d = difference(record.start, record.end)
        print(f"success {pct(record.start.rate.value)} → {pct(record.end.rate.value)}: {d.verdict}, "
              f"{points(d.change.value)} points (95 % {change(d.change)})")
    for note in record.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"open {path}")
    return 0
