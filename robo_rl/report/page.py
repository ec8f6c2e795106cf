"""One self-contained HTML page about a run, to read offline, mail or archive.

Reads RUN/run.json, metrics.jsonl, evals/*.json and videos/*.mp4 (any of the last three may be missing: the
page says so) and writes RUN/report.html with plots, videos and styles inside.
"""

import base64
import contextlib
import math
import shlex
from datetime import datetime
from pathlib import Path

import numpy as np

from robo_rl.errors import quoted
from robo_rl.experiment.by_task import behind, by_instruction
from robo_rl.experiment.correct import read_rounds
from robo_rl.files import write_bytes
from robo_rl.health import newest_findings
from robo_rl.log import si
from robo_rl.report.charts import whisker
from robo_rl.report.data import NAMES, Evaluation, RunRecord, difference, totals
from robo_rl.report.held_out import is_without_env
from robo_rl.report.held_out import sections as held_out_sections
from robo_rl.report.labels import label_table
from robo_rl.report.people import people
from robo_rl.report.starts import group_map, start_map, task_map
from robo_rl.report.text import RETURN, SUCCESS, change, duration, esc, filled, flat, interval, pct, points
from robo_rl.report.training import (
    asynchrony,
    health,
    return_chart,
    sft_chart,
    success_chart,
    throughput,
    watched,
)
from robo_rl.starts import CHOOSE, REPORT
from robo_rl.stats import Interval, bootstrap_mean, per_task

VIDEO_BYTES = 48_000_000  # most video put into one page


def header(run: RunRecord) -> str:
    """The top of the page: the run, its task and method, its versions."""
    info, config = run.info, run.config
    git = info.get("git")
    git = " ".join(f"{v}" for _, v in flat(git)) if isinstance(git, dict) else git
    created = str(info.get("created") or "")
    with contextlib.suppress(ValueError):
        created = datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M %Z").strip()
    of_data = ("sim", "algo", "policy", "demos")
    facts = [
        (k, config.get(k) if config.get(k) not in (None, "") else info.get(k))
        for k in (of_data if is_without_env(run) else ("sim", "task", "algo", "policy", "obs"))
    ]
    facts += [
        ("seed", info.get("seed")),
        ("date", created),
        ("robo_rl", info.get("version")),
        ("git", str(git)[:12] if git else None),
    ]
    chips = "".join(
        f"<li><span>{esc(k)}</span>{esc(v)}</li>"
        for k, v in facts
        if v not in (None, "") and not isinstance(v, (dict, list))
    )
    name = info.get("name") or run.folder.resolve().name
    return (
        f'<header><p class="eyebrow">robo_rl run</p><h1>{esc(name)}</h1><ul '
        f'class="facts">{chips}</ul></header>'
    )


def verdict(run: RunRecord) -> str:
    """The card on top: success before and after with intervals, and the difference."""
    start, end = run.start, run.end
    only = end or start or (run.evals[0] if run.evals else None)
    if only is None:
        return (
            '<section class="card verdict" style="grid-template-columns:1fr"><div>'
            '<span class="badge even">not evaluated yet</span><p style="margin-top:10px">This run has no '
            f"evaluation, so nothing can be said about its success. Make one: "
            f"<code>robo_rl eval {esc(quoted(run.folder))}</code></p></div></section>"
        )
    say = SUCCESS if run.judged else RETURN
    if start and end:
        d = difference(start, end)
        kind = {"improved": "good", "worse": "bad"}.get(d.verdict, "even")
        how = f"paired over {d.n} shared starts" if d.paired else "two separate sets of starts"
        text = (
            f'<span class="badge {kind}">{esc(d.verdict)}</span><div class="big">'
            f'{say.number(start.rate.value)}<span class="to">→</span>{say.number(end.rate.value)} '
            f"<small>{say.unit}</small></div>"
            f"<p><b>{say.step(d.change.value)}</b>, 95 % interval {say.change(d.change)}, {how}.</p>"
        )
    else:
        text = (
            f'<span class="badge even">nothing to compare with</span><div class="big">'
            f"{say.number(only.rate.value)} <small>{say.unit}</small></div>"
            f"<p>{esc(only.name)}, 95 % interval {say.interval(only.rate)}.</p>"
        )
    shown = [(e, c) for e, c in ((start, 3), (end, 1)) if e] or [(only, 1)]
    shown += [(e, 2) for e in run.evals if e.label == "best"]
    low, high = (0.0, 1.0) if run.judged else ends_of([e.rate for e, _ in shown])

    def scaled(i: Interval) -> Interval:
        return Interval(*((v - low) / (high - low) for v in i))

    rows = "".join(
        f'<span>{esc(e.name)}</span>{whisker(*scaled(e.rate), c)}<span class="r">'
        f"{say.amount(e.rate.value)}<small>{say.interval(e.rate)} · "
        f"{f'{int(e.success.sum())}/' * e.judged}{e.episodes}{' episodes' * (not e.judged)}</small></span>"
        for e, c in shown
    )
    marks = ("0", "50", "100 %") if run.judged else [say.number(v) for v in (low, (low + high) / 2, high)]
    scale = f'<span class="scale">{"".join(f"<span>{mark}</span>" for mark in marks)}</span>'
    return f'<section class="card verdict"><div>{text}</div><div class="rows">{rows}{scale}</div></section>'


def ends_of(intervals: list[Interval]) -> tuple[float, float]:
    """Ends of an axis that has all of the intervals."""
    values = [v for i in intervals for v in i if math.isfinite(v)] or [0.0]
    return min(values), max(values) if max(values) > min(values) else min(values) + 1.0


def tiles(run: RunRecord) -> str:
    """The figures that say most of a run, a tile each."""
    t = totals(run)
    stages = " · ".join(
        f"{k} {duration(t[f'{s}_s'])}" for k, s in (("SFT", "sft"), ("RL", "rl")) if t[f"{s}_s"] > 0
    )
    fast = run.metrics.get("rate/steps_per_s", np.array([]))
    fast = fast[np.isfinite(fast)]
    cells = [
        ("Training time", duration(t["time_s"]), stages or "no metrics yet"),
        (
            "Environment steps",
            si(t["env_steps"]) if math.isfinite(t["env_steps"]) else "–",
            "in the RL stage",
        ),
        (
            "Speed",
            f"{si(t['steps_per_s'])}/s" if math.isfinite(t["steps_per_s"]) else "–",
            "env steps, whole RL stage"
            + (f"; median update {si(float(np.median(fast)))}/s" if len(fast) else ""),
        ),
    ]
    end = run.end or run.start
    if end is not None and end.judged and len(end.returns):
        r = bootstrap_mean(end.returns, groups=end.origins)
        cells.append(("Return", f"{r.value:.3g}", f"{esc(end.name)}, 95 % {r.low:.3g} … {r.high:.3g}"))
    if run.evals:
        sizes = sorted({len(e.success) for e in run.evals})
        span = " to ".join(str(n) for n in sizes[:: len(sizes) - 1 or 1])
        cells.append(("Evaluations", str(len(run.evals)), f"of {span} episodes each"))
    return (
        '<section class="tiles">'
        + "".join(
            f'<div class="card tile"><span>{a}</span><b>{b}</b><small>{c}</small></div>' for a, b, c in cells
        )
        + "</section>"
    )


def in_model(run: RunRecord) -> str:
    """What a run in a world model says of its intervals."""
    if not any(e.origins for e in run.evals):
        return ""
    return (
        " This run acted in a world model: episodes that begin from the same recorded frame count as one in "
        "the intervals, and success there is not yet success in the simulator or on the robot."
    )


def chosen_on_its_frames(run: RunRecord) -> bool:
    """Whether the best checkpoint was chosen on recorded frames of a model that it is reported on as well."""
    chose = [set(e.origins) for e in run.evals if e.which == CHOOSE and e.origins]
    own = set((run.best.origins if run.best else None) or ())
    return bool(own) and (not chose or bool(own & set.union(*chose)))


def task_table(run: RunRecord) -> str:
    """Success of each task or instruction, before and after RL, with intervals."""
    end, start = run.end or run.start or (run.evals[0] if run.evals else None), run.start
    if end is None:
        return '<div class="empty">No evaluation yet.</div>'
    if not end.task:
        return '<div class="empty">The evaluation does not say which task each episode had.</div>'
    before = (
        {r.task: r for r in per_task(start.task, start.success, groups=start.origins)}
        if start and start is not end and start.task
        else {}
    )
    rows = []
    for row in per_task(end.task, end.success, groups=end.origins):
        cells = [f'<td class="name">{esc(row.task) or "(no instruction)"}</td>']
        if before:
            old = before.get(row.task)
            cells.append(f'<td class="n">{pct(old.rate.value) if old else "–"}</td>')
        cells.append(
            f'<td class="n"><b>{pct(row.rate.value)}</b></td><td>{whisker(*row.rate, 1)}</td>'
            f'<td class="n"><small>{interval(row.rate)}</small></td>'
        )
        if before:
            d = (
                difference(_only(start, row.task), _only(end, row.task))
                if start and row.task in before
                else None
            )
            look = {"improved": "up", "worse": "down"}.get(d.verdict, "") if d else ""
            cells.append(
                f'<td class="n"><span class="{look}">{points(d.change.value)}</span> '
                f"<small>{change(d.change)}"
                "</small></td>"
                if d
                else '<td class="n">–</td>'
            )
        cells.append(f'<td class="n">{row.successes} / {row.n}</td>')
        rows.append("<tr>" + "".join(cells) + "</tr>")
    more = ('<th class="n">Before</th>', '<th class="n">Change in points</th>') if before else ("", "")
    return (
        '<div class="card scroll pad"><table><tr><th>Task or instruction</th>'
        + more[0]
        + '<th class="n">Success'
        '</th><th></th><th class="n">95 % interval</th>'
        + more[1]
        + '<th class="n">Episodes</th></tr>'
        + "".join(rows)
        + "</table></div>"
    )


def _only(e: Evaluation, task: str) -> Evaluation:
    rows = [i for i, t in enumerate(e.task) if t == task]
    return Evaluation(
        e.label,
        e.step,
        e.success[rows],
        [e.starts[i] for i in rows] if e.starts else [],
        [task] * len(rows),
        e.returns[rows] if len(e.returns) else e.returns,
        e.which,
        None if e.origins is None else [e.origins[i] for i in rows],
    )


def video_grid(run: RunRecord, notes: list[str]) -> str:
    """Players with the videos inside, start and end side by side; what does not fit is named in `notes`."""
    if not run.videos:
        return (
            '<div class="empty">No videos in this run. Training films the policy before and after RL where '
            "the "
            "machine can render.</div>"
        )
    rates, say = {e.label: e for e in run.evals}, SUCCESS if run.judged else RETURN
    figures, room = [], VIDEO_BYTES
    for label, path in run.videos:
        size = path.stat().st_size
        if size > room:
            notes.append(
                f"The video {path.name} ({size / 1e6:.0f} MB) was left out: the page holds at most "
                f"{VIDEO_BYTES / 1e6:.0f} MB of video."
            )
            continue
        room -= size
        data = base64.b64encode(path.read_bytes()).decode()
        says = (
            f"{say.amount(rates[label].rate.value)} over {len(rates[label].success)} starts"
            if label in rates
            else ""
        )
        figures.append(
            f'<figure class="card video"><video controls loop muted playsinline preload="auto" '
            f'src="data:video/mp4;base64,{data}"></video><figcaption><b>'
            f"{esc(NAMES.get(label, label.replace('_', ' ')))}</b><span>{says}</span></figcaption></figure>"
        )
    first = 2 if {"sft", "final"} <= {label for label, _ in run.videos} else 4
    more = figures[first:]
    rest = (
        f"<details><summary>More videos ({len(more)})</summary><div "
        f"class='grid'>{''.join(more)}</div></details>"
        if more
        else ""
    )
    return f'<div class="grid">{"".join(figures[:first])}</div>{rest}'


def configuration(run: RunRecord) -> str:
    """How the run was made: its options by group, the command, versions."""

    def table(title: str, pairs: list[tuple[str, str]]) -> str:
        rows = "".join(
            f"<tr><td>{esc(k)}</td><td>{f'<code>{esc(v)}</code>' if v else '–'}</td></tr>" for k, v in pairs
        )
        rows = rows or "<tr><td>not recorded</td></tr>"
        return f'<div class="card pad"><h3>{esc(title)}</h3><table class="kv">{rows}</table></div>'

    info, argv = run.info, run.info.get("argv")
    about = [("folder", str(run.folder.resolve()))]
    if argv:
        words = [str(a) for a in argv] if isinstance(argv, list) else [str(argv)]
        about.append(("command", shlex.join(words if "robo_rl" in words[0] else ["robo_rl", *words])))
    about += flat({k: info[k] for k in ("created", "version", "git", "seed") if info.get(k) is not None})
    config = run.config
    groups = {k: v for k, v in config.items() if isinstance(v, dict) and v}
    tables = [
        table("Run", about),
        table("Options", flat({k: v for k, v in config.items() if k not in groups})),
        *(table(k, flat(v)) for k, v in groups.items()),
        table("Versions", flat(info.get("versions") or {})),
    ]
    return f'<div class="masonry">{"".join(tables)}</div>'


def not_finite(run: RunRecord) -> list[str]:
    """Metrics that were logged and later lost their numbers: a sign of divergence."""
    out = []
    for key, v in run.metrics.items():
        if key in ("step", "stage") or not np.isfinite(v).any():
            continue
        last = np.flatnonzero(np.isfinite(v))[-1]
        kin = [k for k in run.metrics if k.split("/")[0] == key.split("/")[0] and "/" in k and k != key]
        later = max(
            (
                np.flatnonzero(np.isfinite(run.metrics[k]))[-1]
                for k in kin
                if np.isfinite(run.metrics[k]).any()
            ),
            default=last,
        )
        if later - last > 3 and key.startswith("train/"):
            out.append(f"{key} has no finite value after step {si(float(run.metrics['step'][last]))}.")
    return out


def lagging(end: Evaluation | None) -> list[str]:
    """What is told of the instructions that succeed less often than the others."""
    if end is None or not end.judged or not end.task:
        return []
    words, advice = behind(by_instruction({"task": end.task, "success": end.success, "origin": end.origins}))
    return [f"{line}." for line in (words and f"Behind the other instructions: {words}", advice) if line]


def page(run: RunRecord) -> str:
    """The whole page."""
    notes = [
        *(text[0].upper() + text[1:] + "." for text in newest_findings(run.findings)),
        *run.notes,
        *not_finite(run),
    ]
    if run.start and run.end and not difference(run.start, run.end).paired:
        notes.append(
            f"The evaluations of {run.start.name} and {run.end.name} used different starts, so the "
            "difference is not paired."
        )
    chosen = run.best is not None and run.best.which == CHOOSE
    if run.best is not None and (run.best.label == "best" or not chosen):
        notes.append(
            "The best checkpoint was picked on these starts, so its figure is on the bright side."
            if chosen
            else f"The best checkpoint was chosen on the starts of list {CHOOSE} and is reported on those of "
            f"list {REPORT}."
            + (" In a model both begin from the same recorded frames." if chosen_on_its_frames(run) else "")
        )
    notes += lagging(run.end or run.start)
    alone = is_without_env(run)
    if run.metrics and not alone and not any(e.label == "final" for e in run.evals):
        notes.append("There is no final evaluation: the run is still going, or it was stopped.")
    videos = video_grid(run, notes)
    rl = bool(run.metrics) and bool((run.metrics["stage"] == "rl").any())
    training = (
        health(run)
        if rl
        else (
            f'{sft_chart(run)}<div class="gap"></div><div class="empty">No RL updates yet. '
            "They appear here once the RL stage has begun.</div>"
        )
    )
    note_card = (
        (
            '<section class="card notes"><ul>'
            + "".join(f"<li>{esc(n)}</li>" for n in notes)
            + "</ul></section>"
        )
        if notes
        else ""
    )
    judged = f"""{verdict(run)}{tiles(run)}{note_card}
<h2>{"Success" if run.judged else "Return"}</h2>
<p>Evaluations use fixed starts and the policy without exploration. Bands are 95 % intervals over starts;
they say nothing about other training seeds.{in_model(run)}</p>
{success_chart(run) if run.judged else return_chart(run, tall=True)}
{f"<h2>Success per task</h2>{task_table(run)}" if run.judged else ""}
<h2>Before and after</h2>
{videos}
<h2>Training</h2>
{training}
{watched(run)}
{label_table(run)}
{task_map(run)}{start_map(run)}{group_map(run)}{asynchrony(run)}{people(run)}
<h2>Throughput</h2>
{throughput(run)}"""
    sections = f"""
{header(run)}{held_out_sections(run) + note_card if alone else judged}
<h2>Configuration</h2>
{configuration(run)}
<footer>Made by <code>robo_rl report</code>. Intervals: Wilson for rates, Newcombe's method 10 for differences,
percentile bootstrap for returns.</footer>"""  # noqa: E501
    name = str(run.info.get("name") or run.folder.resolve().name)
    return filled(f"{name} · robo_rl", sections)


def summary(run: RunRecord, path: Path) -> dict:
    """The numbers of the page, for scripts."""

    def rate(e: "Evaluation | None") -> "dict | None":
        return e and {
            "label": e.label,
            "step": e.step,
            "list": e.which,
            "n": len(e.success),
            "recorded_starts": None if e.origins is None else len(set(e.origins)),
            **(
                {"successes": int(e.success.sum()), "success": e.rate.value}
                if e.judged
                else {"return": e.rate.value}
            ),
            "low": e.rate.low,
            "high": e.rate.high,
        }

    config = run.config
    d = difference(run.start, run.end) if run.start and run.end else None
    end = run.end or run.start
    judged = end is not None and end.judged and bool(end.task)
    return {
        "page": str(path),
        "run": str(run.folder),
        "name": run.info.get("name"),
        "created": run.info.get("created"),
        "sim": config.get("sim"),
        "task": config.get("task"),
        "algo": config.get("algo"),
        "seed": run.info.get("seed"),
        "version": run.info.get("version"),
        "git": run.info.get("git"),
        "start": rate(run.start),
        "final": rate(run.end),
        "best": rate(run.best),
        "evaluations": [rate(e) for e in run.evals],
        "difference": d
        and {
            "value": d.change.value,
            "low": d.change.low,
            "high": d.change.high,
            "paired": d.paired,
            "n": d.n,
        },
        "verdict": d.verdict if d else "unknown",
        "tasks": [
            {"task": r.task, "n": r.n, "success": r.rate.value, "low": r.rate.low, "high": r.rate.high}
            for r in (per_task(end.task, end.success, groups=end.origins) if end and judged else [])
        ],
        **{k: v if math.isfinite(v) else None for k, v in totals(run).items()},
        "notes": run.notes,
        "held_out": run.held_out,
        "rounds": read_rounds(run.folder),
        "unhealthy": [
            {"metric": f.metric, "begin": f.begin, "end": f.end, "worst": f.worst, "text": f.text}
            for f in run.findings
        ],
    }


def write_page(run: RunRecord, out: str | Path = "") -> Path:
    """Write the page of `run` to the file or into the folder `out` (RUN/report.html where that is empty) ->
    its path."""
    path = Path(out) if out else run.folder / "report.html"
    if path.is_dir():
        path = path / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, page(run).encode())
    return path
