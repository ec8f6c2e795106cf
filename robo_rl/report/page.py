"""`robo_rl report RUN`: one self-contained HTML page about a run, to read offline, mail or archive.

Reads RUN/run.json, metrics.jsonl, evals/*.json and videos/*.mp4 (any of the last three may be missing: the page
says so) and writes RUN/report.html with plots, videos and styles inside.
"""

import base64
import contextlib
import json
import math
import shlex
import sys
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from robo_rl.files import parse_json, read_json, write_bytes
from robo_rl.log import open_run, si
from robo_rl.report.charts import Series, chart, lanes, stacked, whisker
from robo_rl.report.data import NAMES, Evaluation, Run, difference, load, totals
from robo_rl.selection import CHOOSE, REPORT
from robo_rl.stats import Interval, bootstrap_mean, per_task

VIDEO_BYTES = 48_000_000  # most video put into one page
PARTS = (("time/sim", "simulator", 1), ("time/policy", "policy", 2), ("time/collect", "acting", 1), ("time/update", "update", 3),
         ("time/eval", "evaluation", 5), ("time/rollouts", "waiting for rollouts", 7))  # the rest of the wall time is "other"


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about a run: success, training health, throughput, videos."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="run folder")]
    json: bool = False
    """print one JSON document with the page's path and the summary numbers, and nothing else"""
    out: str = ""
    """where to write the page; empty: RUN/report.html"""


# -------------------------------------------------------------------------------------------------- wording


def duration(seconds: float) -> str:
    """48 s, 9 min 13 s, 2 h 05 min."""
    if not math.isfinite(seconds):
        return "–"
    s = round(seconds)
    return (f"{s // 3600} h {s // 60 % 60:02d} min" if s >= 3600 else f"{s // 60} min {s % 60:02d} s" if s >= 60
            else f"{s} s" if s >= 10 else f"{seconds:.1f} s")


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
        created = datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M %Z").strip()
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
    shown = [(e, c) for e, c in ((start, 3), (end, 1)) if e] or [(only, 1)]
    shown += [(e, 2) for e in run.evals if e.label == "best"]
    rows = "".join(f'<span>{esc(e.name)}</span>{whisker(*e.rate, c)}<span class="r">{pct(e.rate.value)}<small>'
                   f"{interval(e.rate)} · {int(e.success.sum())}/{len(e.success)}</small></span>"
                   for e, c in shown)
    scale = '<span class="scale"><span>0</span><span>50</span><span>100 %</span></span>'
    return f'<section class="card verdict"><div>{text}</div><div class="rows">{rows}{scale}</div></section>'


def tiles(run: Run) -> str:
    t = totals(run)
    stages = " · ".join(f"{k} {duration(t[f'{s}_s'])}" for k, s in (("SFT", "sft"), ("RL", "rl")) if t[f"{s}_s"] > 0)
    fast = run.metrics.get("rate/steps_per_s", np.array([]))
    fast = fast[np.isfinite(fast)]
    cells = [("Training time", duration(t["time_s"]), stages or "no metrics yet"),
             ("Environment steps", si(t["env_steps"]) if math.isfinite(t["env_steps"]) else "–", "in the RL stage"),
             ("Speed", f"{si(t['steps_per_s'])}/s" if math.isfinite(t["steps_per_s"]) else "–",
              "env steps, whole RL stage" + (f"; median update {si(float(np.median(fast)))}/s" if len(fast) else ""))]
    end = run.end or run.start
    if end is not None and len(end.returns):
        r = bootstrap_mean(end.returns)
        cells.append(("Return", f"{r.value:.3g}", f"{esc(end.name)}, 95 % {r.low:.3g} … {r.high:.3g}"))
    if run.evals:
        sizes = sorted({len(e.success) for e in run.evals})
        span = " to ".join(str(n) for n in sizes[:: len(sizes) - 1 or 1])
        cells.append(("Evaluations", str(len(run.evals)), f"of {span} episodes each"))
    return '<section class="tiles">' + "".join(
        f'<div class="card tile"><span>{a}</span><b>{b}</b><small>{c}</small></div>' for a, b, c in cells) + "</section>"


def rl_series(run: Run, key: str, name: str, colour: int = 1, look: str = "line") -> list[Series]:
    """One metric of the RL stage over environment steps; [] if it was never logged."""
    if key not in run.metrics:
        return []
    rows = (run.metrics["stage"] == "rl") & ~_never(run.metrics[key])
    return [Series(name, run.metrics["step"][rows].astype(float), run.metrics[key][rows], colour, look=look)]


def per_episode(run: Run, key: str, name: str, least: int = 20) -> list[Series]:
    """A mean over training episodes, taken over rows until there are `least` of them: a single one tells nothing."""
    series = rl_series(run, key, name, 6, "thin")
    if not series or "train/episodes" not in run.metrics:
        return series
    rows = (run.metrics["stage"] == "rl") & ~_never(run.metrics[key])
    count, s = np.nan_to_num(run.metrics["train/episodes"][rows]), series[0]
    if not len(s.y) or np.median(count) >= least:
        return series
    whole, won = np.cumsum(count), np.cumsum(count * s.y)
    back = np.searchsorted(whole, whole - least, side="right")  # rows before this one are old enough to leave out
    before = np.concatenate([[0.0], whole]), np.concatenate([[0.0], won])
    n = whole - before[0][back]
    fits = whole >= least
    return [Series(f"{name}, last {least}", s.x[fits], ((won - before[1][back]) / np.maximum(n, 1))[fits], 6, look="thin")]


def _never(v: np.ndarray) -> np.ndarray:
    return ~np.isfinite(v)


def success_chart(run: Run) -> str:
    evals = [e for e in run.evals if len(e.success)]
    told = [e for e in evals if e.which == REPORT]
    line = {}
    for e in evals:  # one point per step; in runs that knew one list "final" and step_… name the same policy
        if e.which == CHOOSE and (e.label != "best" or e.step not in line):
            line[e.step if e.label != "sft" else 0] = e
    shown = sorted((line or {e.step: e for e in told}).items())
    series = per_episode(run, "train/success", "training episodes (exploring)")
    if shown:
        r = np.array([e.rate for _, e in shown])
        x = np.array([s for s, _ in shown], dtype=float)
        series.append(Series("evaluation, 95 % interval", x, r[:, 0], 1, r[:, 1], r[:, 2], "dots"))
    if told and line:
        r = np.array([e.rate for e in told])
        series.append(Series("on the starts that are reported", np.array([float(e.step) for e in told]), r[:, 0], 2, r[:, 1], r[:, 2],
                             "dots"))
    if run.start is not None:
        s = run.start
        series.append(Series(s.name, np.array([0.0 if s.label == "sft" else float(s.step)]),
                             np.array([s.rate.value]), 3, np.array([s.rate.low]), np.array([s.rate.high]), "dots"))
    return chart("Success over training", "share of episodes that succeed", series, percent=True, y_range=(0, 1),
                 tall=True, missing="No evaluation and no training success was logged yet.")


def return_chart(run: Run) -> str:
    series = per_episode(run, "train/return", "training episodes")
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
    if "train/log_ratio_absmax" in m:
        series += rl_series(run, "train/log_ratio_absmax", "largest |log ratio|", 4)
    elif "train/ratio_max" in m:
        with np.errstate(divide="ignore", invalid="ignore"):
            top = np.log(m["train/ratio_max"])
        rows = (m["stage"] == "rl") & np.isfinite(top)
        series.append(Series("largest", m["step"][rows].astype(float), top[rows], 4))
    return chart("Ratio tails", "log of new over old probability [nats]", series, zero=True)


HEALTH = (  # metric, title, what it is, colour, percent, zero in the range
    ("train/kl", "KL", "of the new policy from the one that acted [nats]", 5, False, True),
    ("train/clip_fraction", "Clip fraction", "share of samples whose ratio was clipped", 3, True, True),
    ("train/explained_variance", "Explained variance", "of returns, by the value function; 1 is perfect",
     2, False, True),
    ("train/value_loss", "Value loss", "per update", 2, False, True),
    ("train/policy_loss", "Policy loss", "per update", 1, False, False),
    ("train/entropy", "Entropy", "of the policy [nats]", 1, False, False),
    ("train/noise", "Noise level", "of exploring actions", 3, False, True))


def health(run: Run) -> str:
    """The charts of both stages; what was never logged is named below them, the rest of the metrics folded away."""
    m, absent, charts = run.metrics, [], [return_chart(run), ratio_chart(run)]
    for key, title, what, colour, percent, zero in HEALTH:
        series = rl_series(run, key, title.lower() if title != "KL" else title, colour)
        if series and len(series[0].x):
            charts.append(chart(title, what, series, percent=percent, zero=zero))
        else:
            absent.append(title.lower() if title != "KL" else title)
    charts.insert(1, charts.pop(2) if len(charts) > 2 else "")  # KL beside the return, then the ratios
    shown = {"train/success", "train/return", "train/ratio_max", "train/log_ratio_p01", "train/log_ratio_p99",
             "train/log_ratio_absmax", "rate/steps_per_s", "eval/success", "eval/low", "eval/high",
             "eval/return", "step", "time", "stage", "sft/loss", *(f"{g}/{k}" for g in ("report", "best") for k in ("success", "low", "high", "return")),
             *(k for k, *_ in PARTS), *(k for k, *_ in HEALTH)}
    rest = [k for k in m if k not in shown and len(rl_series(run, k, k)[0].x)]
    more = f'<p class="foot">Not logged by this run: {", ".join(absent)}.</p>' if absent else ""
    if rest:
        more += (f"<details><summary>All other metrics ({len(rest)})</summary><div class='small'>"
                 + "".join(chart(k, "as logged", rl_series(run, k, k, 7)) for k in rest) + "</div></details>")
    return f'<div class="small">{sft_chart(run)}{"".join(charts)}</div>{more}'


def watched(run: Run) -> str:
    """The healthy range of every number that was watched, and what left it; "" where nothing was."""
    if not run.ranges:
        return ""
    rows = ""
    for r in run.ranges:
        mine = [f for f in run.findings if f.metric == r["metric"]]
        cells = "<br>".join(esc(f.text) for f in mine) or "inside"
        rows += (f"<tr{' class=bad' if mine else ''}><td>{esc(r['title'])}</td><td>{esc(r['healthy'])}</td>"
                 f"<td>{cells}</td></tr>")
    return ("<h2>Healthy ranges</h2><p>Watched in every update; three in a row outside, or one far outside, is said while "
            "the run goes on.</p><div class='card pad'><table><tr><th>number</th><th>healthy</th><th>this run</th></tr>"
            f"{rows}</table></div>")


def sft_chart(run: Run) -> str:
    m = run.metrics
    if "sft/loss" not in m:
        return chart("Supervised loss", "on the demonstrations", [], missing="No SFT was logged.")
    rows = (m["stage"] == "sft") & np.isfinite(m["sft/loss"])
    step = m["step"][rows].astype(float)
    by_step = len(step) < 2 or step.max() > step.min()
    return chart("Supervised loss", "on the demonstrations",
                 [Series("loss", step if by_step else m["time"][rows], m["sft/loss"][rows], 2)], log=True,
                 x_name="updates" if by_step else "time [s]")


def seconds(run: Run) -> "tuple[np.ndarray, dict[str, np.ndarray]] | None":
    """(wall time [lines], seconds since the line before by part [lines]); None where no part was timed.

    Parts: those of PARTS in the RL stage, evaluation in both, "SFT" for the rest of that stage (with the
    demonstrations), "other" for what was not timed.
    """
    m = run.metrics
    if not m or not any(k in m for k, _, _ in PARTS):
        return None
    t = np.maximum.accumulate(np.nan_to_num(m["time"]))
    took = np.diff(t, prepend=0.0)
    sft = m["stage"] == "sft"
    by = {name: np.where(sft & (name != "evaluation"), 0.0, np.nan_to_num(m[k]).clip(0)) if k in m
          else np.zeros(len(t)) for k, name, _ in PARTS}
    rest = (took - sum(by.values())).clip(0)
    return t, {"SFT": np.where(sft, rest, 0.0), **by, "other": np.where(sft, 0.0, rest)}


def throughput(run: Run) -> str:
    speed = chart("Speed", "environment steps per second", rl_series(run, "rate/steps_per_s", "steps/s", 1), zero=True)
    spent = seconds(run)
    if spent is None or spent[0][-1] <= 0:
        return (f'<div class="grid">{speed}<figure class="card chart"><figcaption><b>Where the time goes</b>'
                '</figcaption><p class="empty">Time by stage was not logged in this run.</p></figure></div>')
    t, by = spent
    colour = {"SFT": 4, **{name: c for _, name, c in PARTS}, "other": 6}
    by = {name: v for name, v in by.items() if v.sum() > 0}
    bins = min(40, len(t))
    edges = np.linspace(0, t[-1], bins + 1)
    which = np.clip(np.searchsorted(edges, t, side="left") - 1, 0, bins - 1)
    sums = {name: np.bincount(which, weights=v, minlength=bins) for name, v in by.items()}
    height = sum(sums.values())
    used = height > 0
    cuts = np.concatenate([[0.0], edges[1:][used]])  # a bin in which no line ended belongs to the next one
    cuts[-1] = t[-1]
    unit, size = ("h", 3600.0) if t[-1] >= 3 * 3600 else ("min", 60.0) if t[-1] >= 180 else ("s", 1.0)
    bars = stacked("Where the time goes", "share of the wall time", cuts / size,
                   [(name, colour[name], v[used] / height[used]) for name, v in sums.items()],
                   x_name=f"time since the start [{unit}]")
    whole = sum(v.sum() for v in by.values())
    steps = totals(run)["env_steps"]
    rows = ""
    for name, v in by.items():
        part = float(v.sum())
        each = f"{1e6 * part / steps:.3g}" if steps and name not in ("SFT", "evaluation") else "–"
        rows += (f'<tr><td class="name"><s class="c{colour[name]}"></s>{name}</td><td class="n">{duration(part)}</td>'
                 f'<td class="n">{100 * part / whole:.0f} %</td><td style="width:34%"><span class="bar '
                 f'c{colour[name]}" style="width:{100 * part / whole:.1f}%"></span></td><td class="n">{each}</td></tr>')
    table = ('<div class="card scroll pad"><table><tr><th>Part</th><th class="n">Time</th><th class="n">Share</th>'
             f'<th></th><th class="n">µs per env step</th></tr>{rows}</table></div>')
    return f'<div class="grid">{bars}{speed}</div><div class="gap"></div>{table}'


WINDOW = 30.0  # seconds of the timeline that are drawn


def asynchrony(run: Run) -> str:
    """How old the data were, how much of it counted, who waited, and who worked when; "" without worker processes."""
    if "workers/sim" not in run.metrics:
        return ""
    charts = [
        chart("Staleness", "versions behind, of what was trained on",
              [*rl_series(run, "stal/mean", "mean", 1), *rl_series(run, "stal/max", "greatest", 2, "thin")], zero=True),
        chart("Waiting", "share of the time", [*rl_series(run, "workers/wait", "workers", 3),
                                               *rl_series(run, "util/learner_wait", "learner", 2)], percent=True,
              y_range=(0.0, 1.0)),
        chart("Effective samples", "share of the batch that the importance weights leave",
              rl_series(run, "train/ess_frac", "ESS / N", 1), percent=True, y_range=(0.0, 1.0),
              missing="All of the data was fresh."),
        chart("Rollouts in flight", "fragments", [*rl_series(run, "queue/leased", "being made", 1),
                                                  *rl_series(run, "queue/ready", "finished", 2),
                                                  *rl_series(run, "queue/taken", "kept for the next checkpoint", 3)], zero=True)]
    return f'<h2>Who worked when</h2>{timeline(run)}<div class="gap"></div><div class="small">{"".join(charts)}</div>'


def timeline(run: Run) -> str:
    """The last seconds before the final evaluation, a lane per process."""
    path, spans = run.folder / "timeline.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # a torn last line
            spans += parse_json(line, str(path), list, limit=1 << 24)
    ends = [b for who, _, b in spans if who == "learner"]
    if not ends:
        return ""
    end = max(ends)
    spans = [(who, max(a, end - WINDOW), min(b, end)) for who, a, b in spans if b > end - WINDOW and a < end]
    names = sorted({who for who, _, _ in spans}, key=lambda w: (w != "learner", w != "eval", w))
    rows = [(w, 2 if w == "learner" else 5 if w == "eval" else 1, [(a, b) for who, a, b in spans if who == w])
            for w in names]
    return lanes("Timeline", f"the last {WINDOW:.0f} s of training; blank is waiting", rows, x_name="time since the start [s]")


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
        return ('<div class="empty">No videos in this run. Training films the policy before and after RL where the '
                "machine can render.</div>")
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


def rounds_of(run: Run) -> list[dict]:
    """Rounds of practice with people (`robo_rl correct`), or []."""
    path = run.folder / "rounds.json"
    return read_json(path, list) if path.exists() else []


def people(run: Run) -> str:
    """What the people beside the robots did, by round, and what it gave."""
    rounds = rounds_of(run)
    if not rounds:
        return beside(run)
    names = [("operator_minutes", "operator minutes", ".2f"), ("interventions", "interventions", "d"),
             ("interventions_per_hour", "per robot hour", ".0f"), ("interventions_per_success", "per success", ".2f"),
             ("reaction_mean", "reaction [s]", ".2f"), ("human_share", "human steps", ".1%"),
             ("utilisation", "operators busy", ".0%")]
    head = "".join(f"<th>{t}</th>" for t in ("round", "success", *(label for _, label, _ in names), "gain per minute"))
    rows, minutes = "", 0.0
    for x in rounds:
        a, e = x["account"], x["eval"]
        minutes += a.get("operator_minutes", 0.0)
        cells = [str(x["round"]), f"{pct(e['success'])} ({100 * e['low']:.1f} … {100 * e['high']:.1f} %)"]
        cells += [format(a[key], how) if key in a else "–" for key, _, how in names]
        cells.append(f"{(e['success'] - rounds[0]['eval']['success']) / minutes:+.3f}" if minutes else "–")
        rows += "<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
    return ("<h2>People</h2><p>Practice with a person beside the robots; success is without help, on the fixed starts. The gain is "
            f"success per operator minute since round 0.</p><div class='card pad'><table><tr>{head}</tr>{rows}</table></div>")


def beside(run: Run) -> str:
    """What the person beside a run that learns from replay did, and what a minute of it gave; "" where there was none."""
    minutes = rl_series(run, "human/operator_minutes", "operator minutes", 3)
    if not minutes or not len(minutes[0].y):
        return ""
    total, gain = float(minutes[0].y[-1]), ""
    if run.start is not None and run.end is not None and total > 0:
        gain = f" Success without help went up by {points(run.end.rate.value - run.start.rate.value)} points, " \
               f"{100 * (run.end.rate.value - run.start.rate.value) / total:.0f} a minute."
    charts = [chart("Operator minutes", "since the start", minutes, zero=True),
              chart("Human steps", "share of the control steps of the episodes that ended", per_episode(run, "human/share", "human"),
                    percent=True, y_range=(0.0, 1.0), missing="Nobody took over."),
              chart("Alone", "share of training episodes that succeeded without help", per_episode(run, "human/alone", "alone"),
                    percent=True, y_range=(0.0, 1.0), missing="No episode ended.")]
    return f"<h2>People</h2><p>A person helped for {total:.1f} minutes.{gain}</p><div class='small'>{''.join(charts)}</div>"


def configuration(run: Run) -> str:
    """How the run was made: its options by group, the command, versions."""
    def table(title: str, pairs: list[tuple[str, str]]) -> str:
        rows = "".join(f"<tr><td>{esc(k)}</td><td>{f'<code>{esc(v)}</code>' if v else '–'}</td></tr>" for k, v in pairs)
        rows = rows or "<tr><td>not recorded</td></tr>"
        return f'<div class="card pad"><h3>{esc(title)}</h3><table class="kv">{rows}</table></div>'

    info, argv = run.info, run.info.get("argv")
    about = [("folder", str(run.folder.resolve()))]
    if argv:
        words = [str(a) for a in argv] if isinstance(argv, list) else [str(argv)]
        about.append(("command", shlex.join(words if "robo_rl" in words[0] else ["robo_rl", *words])))
    about += flat({k: info[k] for k in ("created", "version", "git", "seed") if info.get(k) is not None})
    config = info.get("config") or {}
    groups = {k: v for k, v in config.items() if isinstance(v, dict) and v}
    tables = [table("Run", about), table("Options", flat({k: v for k, v in config.items() if k not in groups})),
              *(table(k, flat(v)) for k, v in groups.items()), table("Versions", flat(info.get("versions") or {}))]
    return f'<div class="masonry">{"".join(tables)}</div>'


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
        if later - last > 3 and key.startswith("train/") and not key.startswith("train/skipped_"):  # told only where some were
            out.append(f"{key} has no finite value after step {si(float(run.metrics['step'][last]))}.")
    return out


def page(run: Run) -> str:
    """The whole page."""
    notes = [*(f.text[0].upper() + f.text[1:] + "." for f in run.findings), *run.notes, *not_finite(run)]
    if run.start and run.end and not difference(run.start, run.end).paired:
        notes.append("The evaluations before and after RL used different starts, so the difference is not paired.")
    chosen = run.best is not None and run.best.which == CHOOSE
    if run.best is not None and (run.best.label == "best" or not chosen):
        notes.append("The best checkpoint was picked for its success, so its rate is on the bright side." if chosen else
                     f"The best checkpoint was chosen on the starts of list {CHOOSE} and is reported on those of list {REPORT}.")
    if run.metrics and not any(e.label == "final" for e in run.evals):
        notes.append("There is no final evaluation: the run is still going, or it was stopped.")
    videos = video_grid(run, notes)
    rl = bool(run.metrics) and bool((run.metrics["stage"] == "rl").any())
    training = health(run) if rl else (f'{sft_chart(run)}<div class="gap"></div><div class="empty">No RL updates yet. '
                                       "They appear here once the RL stage has begun.</div>")
    note_card = ('<section class="card notes"><ul>' + "".join(f"<li>{esc(n)}</li>" for n in notes)
                 + "</ul></section>") if notes else ""
    sections = f"""
{header(run)}{verdict(run)}{tiles(run)}{note_card}
<h2>Success</h2>
<p>Evaluations use fixed starts and the policy without exploration. Bands are Wilson 95 % intervals over starts;
they say nothing about other training seeds.</p>
{success_chart(run)}
<h2>Success per task</h2>
{task_table(run)}
<h2>Before and after</h2>
{videos}
<h2>Training</h2>
{training}
{watched(run)}
{asynchrony(run)}{people(run)}
<h2>Throughput</h2>
{throughput(run)}
<h2>Configuration</h2>
{configuration(run)}
<footer>Made by <code>robo_rl report</code>. Intervals: Wilson for rates, Newcombe's method 10 for differences,
percentile bootstrap for returns.</footer>"""
    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    name = str(run.info.get("name") or run.folder.resolve().name)
    return template.replace("{{title}}", esc(f"{name} · robo_rl")).replace("{{body}}", sections)


def summary(run: Run, path: Path) -> dict:
    """The numbers of the page, for scripts."""
    def rate(e: "Evaluation | None") -> "dict | None":
        return e and {"label": e.label, "step": e.step, "list": e.which, "n": len(e.success), "successes": int(e.success.sum()),
                      "success": e.rate.value, "low": e.rate.low, "high": e.rate.high}

    config = run.info.get("config") or {}
    d = difference(run.start, run.end) if run.start and run.end else None
    end = run.end or run.start
    return {
        "page": str(path), "run": str(run.folder), "name": run.info.get("name"), "created": run.info.get("created"),
        "sim": config.get("sim"), "task": config.get("task"), "algo": config.get("algo"), "seed": run.info.get("seed"),
        "version": run.info.get("version"), "git": run.info.get("git"),
        "start": rate(run.start), "final": rate(run.end), "best": rate(run.best), "evaluations": [rate(e) for e in run.evals],
        "difference": d and {"value": d.change.value, "low": d.change.low, "high": d.change.high,
                             "paired": d.paired, "n": d.n},
        "verdict": d.verdict if d else "unknown",
        "tasks": [{"task": r.task, "n": r.n, "success": r.rate.value, "low": r.rate.low, "high": r.rate.high}
                  for r in (per_task(end.task, end.success) if end and end.task else [])],
        **{k: v if math.isfinite(v) else None for k, v in totals(run).items()},
        "notes": run.notes, "rounds": rounds_of(run),
        "unhealthy": [{"metric": f.metric, "begin": f.begin, "end": f.end, "worst": f.worst, "text": f.text}
                      for f in run.findings],
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
    for note in [*(f.text for f in record.findings), *record.notes]:
        print(f"note: {note}", file=sys.stderr)
    print(f"open {path}")
    return 0
