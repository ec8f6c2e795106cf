"""The charts of a run's training: success, health, who worked when, where the time went."""

import contextlib
from collections.abc import Callable

import numpy as np

from robo_rl.files import parse_json
from robo_rl.health import COUNTED, newest_findings
from robo_rl.report.charts import Series, chart, lanes, stacked
from robo_rl.report.data import Evaluation, RunRecord, totals
from robo_rl.report.text import duration, esc
from robo_rl.starts import CHOOSE, REPORT
from robo_rl.stats import Interval, bootstrap_mean

PARTS = (
    ("time/sim", "simulator", 1),
    ("time/policy", "policy", 2),
    ("time/collect", "acting", 1),
    ("time/update", "update", 3),
    # the rest of the wall time is "other"
    ("time/eval", "evaluation", 5),
    ("time/rollouts", "waiting for rollouts", 7),
)
WINDOW = 30.0  # seconds of the timeline that are drawn


def rl_series(run: RunRecord, key: str, name: str, colour: int = 1, look: str = "line") -> list[Series]:
    """One metric of the RL stage over environment steps; [] if it was never logged."""
    if key not in run.metrics:
        return []
    rows = (run.metrics["stage"] == "rl") & ~_never(run.metrics[key])
    return [Series(name, run.metrics["step"][rows].astype(float), run.metrics[key][rows], colour, look=look)]


def per_episode(run: RunRecord, key: str, name: str, least: int = 20) -> list[Series]:
    """A mean over training episodes, taken over rows until there are `least` of them: a single one tells
    nothing."""
    series = rl_series(run, key, name, 6, "thin")
    if not series or "train/episodes" not in run.metrics:
        return series
    rows = (run.metrics["stage"] == "rl") & ~_never(run.metrics[key])
    count, s = np.nan_to_num(run.metrics["train/episodes"][rows]), series[0]
    if not len(s.y) or np.median(count) >= least:
        return series
    whole, won = np.cumsum(count), np.cumsum(count * s.y)
    # rows before this one are old enough to leave out
    back = np.searchsorted(whole, whole - least, side="right")
    before = np.concatenate([[0.0], whole]), np.concatenate([[0.0], won])
    n = whole - before[0][back]
    fits = whole >= least
    return [
        Series(
            f"{name}, last {least}",
            s.x[fits],
            ((won - before[1][back]) / np.maximum(n, 1))[fits],
            6,
            look="thin",
        )
    ]


def _never(v: np.ndarray) -> np.ndarray:
    return ~np.isfinite(v)


def evaluation_series(evals: list[Evaluation], measure: Callable[[Evaluation], Interval]) -> list[Series]:
    """What `measure` gives of evaluations over steps: of those on the starts that choose, one a step, and
    beside them of those that are reported."""
    told = [e for e in evals if e.which == REPORT]
    line = {}
    for e in evals:  # one point per step; in runs that knew one list "final" and step_… name the same policy
        if e.which == CHOOSE and (e.label != "best" or e.step not in line):
            line[e.step if e.label != "sft" else 0] = e
    series = []
    if shown := sorted((line or {e.step: e for e in told}).items()):
        r, x = np.array([measure(e) for _, e in shown]), np.array([s for s, _ in shown], dtype=float)
        series.append(Series("evaluation, 95 % interval", x, r[:, 0], 1, r[:, 1], r[:, 2], "dots"))
    if told and line:
        r, x = np.array([measure(e) for e in told]), np.array([float(e.step) for e in told])
        series.append(Series("on the starts that are reported", x, r[:, 0], 2, r[:, 1], r[:, 2], "dots"))
    return series


def success_chart(run: RunRecord) -> str:
    """Success of evaluations and of training episodes over environment steps."""
    series = per_episode(run, "train/success", "training episodes (exploring)")
    series += evaluation_series([e for e in run.evals if len(e.success)], lambda e: e.rate)
    if run.start is not None:
        s = run.start
        series.append(
            Series(
                s.name,
                np.array([0.0 if s.label == "sft" else float(s.step)]),
                np.array([s.rate.value]),
                3,
                np.array([s.rate.low]),
                np.array([s.rate.high]),
                "dots",
            )
        )
    return chart(
        "Success over training",
        "share of episodes that succeed",
        series,
        percent=True,
        y_range=(0, 1),
        tall=True,
        missing="No evaluation and no training success was logged yet.",
    )


def return_chart(run: RunRecord, tall: bool = False) -> str:
    series = per_episode(run, "train/return", "training episodes")
    series += evaluation_series(
        [e for e in run.evals if len(e.returns)],
        lambda e: bootstrap_mean(e.returns, resamples=1000, groups=e.origins),
    )
    return chart(
        "Return", "mean sum of rewards per episode", series, tall=tall, missing="No returns were logged yet."
    )


def ratio_chart(run: RunRecord) -> str:
    """The ends of the log-ratios of updates: percentiles and the largest; "" where a method has none."""
    series = []
    m = run.metrics
    if "train/log_ratio_p01" in m and "train/log_ratio_p99" in m:
        rows = (
            (m["stage"] == "rl")
            & np.isfinite(m["train/log_ratio_p01"])
            & np.isfinite(m["train/log_ratio_p99"])
        )
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
    if not any(len(s.x) for s in series):
        return ""
    return chart("Ratio tails", "log of new over old probability [nats]", series, zero=True)


HEALTH = (  # metric, title, what it is, colour, percent, zero in the range
    ("train/kl", "KL", "of the new policy from the one that acted [nats]", 5, False, True),
    ("train/clip_fraction", "Clip fraction", "share of samples whose ratio was clipped", 3, True, True),
    (
        "train/explained_variance",
        "Explained variance",
        "of returns, by the value function; 1 is perfect",
        2,
        False,
        True,
    ),
    ("train/value_loss", "Value loss", "per update", 2, False, True),
    ("train/policy_loss", "Policy loss", "per update", 1, False, False),
    ("train/entropy", "Entropy", "of the policy [nats]", 1, False, False),
    ("train/noise", "Noise level", "of exploring actions", 3, False, True),
)


def health(run: RunRecord) -> str:
    """The charts of both stages; what was never logged is named below them, the rest of the metrics folded
    away."""
    m, ratios, charts = run.metrics, ratio_chart(run), []
    absent = [] if ratios else ["ratio tails"]
    for key, title, what, colour, percent, zero in HEALTH:
        series = rl_series(run, key, title.lower() if title != "KL" else title, colour)
        if series and len(series[0].x):
            charts.append(chart(title, what, series, percent=percent, zero=zero))
        else:
            absent.append(title.lower() if title != "KL" else title)
    charts.insert(1, ratios)  # KL beside the return, then the ratios
    charts.insert(0, return_chart(run) if run.judged else "")  # else it is on top of the page
    shown = {
        "train/success",
        "train/return",
        "train/ratio_max",
        "train/log_ratio_p01",
        "train/log_ratio_p99",
        "train/log_ratio_absmax",
        "rate/steps_per_s",
        "eval/success",
        "eval/low",
        "eval/high",
        "eval/return",
        "step",
        "time",
        "stage",
        "sft/loss",
        *(f"{g}/{k}" for g in ("report", "best") for k in ("success", "low", "high", "return")),
        *(k for k, *_ in PARTS),
        *(k for k, *_ in HEALTH),
    }
    rest = [
        k
        for k in m
        if k not in shown
        and not k.startswith(("eval/success/", "tasks/share/"))
        and len(rl_series(run, k, k)[0].x)
    ]
    more = f'<p class="foot">Not logged by this run: {", ".join(absent)}.</p>' if absent else ""
    if rest:
        more += (
            f"<details><summary>All other metrics ({len(rest)})</summary><div class='small'>"
            + "".join(chart(k, "as logged", rl_series(run, k, k, 7)) for k in rest)
            + "</div></details>"
        )
    return f'<div class="small">{sft_chart(run)}{"".join(charts)}</div>{more}'


def watched(run: RunRecord) -> str:
    """The healthy range of every number that was watched, and what left it; "" where nothing was. Numbers
    that the run never logged are left out."""
    logged = {key.removeprefix("train/") for key in run.metrics} | set(COUNTED)
    ranges = [r for r in run.ranges if r["metric"] in logged]
    if not ranges:
        return ""
    rows = ""
    for r in ranges:
        mine = [f for f in run.findings if f.metric == r["metric"]]
        cells = esc("".join(newest_findings(mine))) or "inside"
        rows += (
            f"<tr{' class=bad' if mine else ''}><td>{esc(r['title'])}</td><td>{esc(r['healthy'])}</td>"
            f"<td>{cells}</td></tr>"
        )
    return (
        "<h2>Healthy ranges</h2><p>Watched in every update; three in a row outside, or one far outside, is "
        "said while the run goes on.</p><div class='card "
        f"pad'><table><tr><th>number</th><th>healthy</th><th>this run</th></tr>{rows}</table></div>"
    )


def sft_chart(run: RunRecord) -> str:
    """Supervised loss over updates."""
    m = run.metrics
    if "sft/loss" not in m:
        return chart("Supervised loss", "on the demonstrations", [], missing="No SFT was logged.")
    rows = (m["stage"] == "sft") & np.isfinite(m["sft/loss"])
    step = m["step"][rows].astype(float)
    by_step = len(step) < 2 or step.max() > step.min()
    series = [Series("loss", step if by_step else m["time"][rows], m["sft/loss"][rows], 2)]
    if by_step and "recap/loss" in m:
        told = np.isfinite(m["recap/loss"])
        series.append(Series("told the advantage", m["step"][told].astype(float), m["recap/loss"][told], 3))
    if by_step and "heldout/loss" in m:
        others = np.isfinite(m["heldout/loss"])
        series.append(
            Series("held-out episodes", m["step"][others].astype(float), m["heldout/loss"][others], 1)
        )
    return chart(
        "Supervised loss",
        "on the demonstrations" + (" and on held-out episodes" if "heldout/loss" in m else ""),
        series,
        log=True,
        x_name="updates" if by_step else "time [s]",
    )


def seconds(run: RunRecord) -> "tuple[np.ndarray, dict[str, np.ndarray]] | None":
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
    by = {
        name: np.where(sft & (name != "evaluation"), 0.0, np.nan_to_num(m[k]).clip(0))
        if k in m
        else np.zeros(len(t))
        for k, name, _ in PARTS
    }
    rest = (took - sum(by.values())).clip(0)
    return t, {"SFT": np.where(sft, rest, 0.0), **by, "other": np.where(sft, 0.0, rest)}


def throughput(run: RunRecord) -> str:
    """Environment steps per second, and where the time goes."""
    speed = chart(
        "Speed", "environment steps per second", rl_series(run, "rate/steps_per_s", "steps/s", 1), zero=True
    )
    spent = seconds(run)
    if spent is None or spent[0][-1] <= 0:
        return (
            f'<div class="grid">{speed}<figure class="card chart"><figcaption><b>Where the time goes</b>'
            '</figcaption><p class="empty">Time by stage was not logged in this run.</p></figure></div>'
        )
    t, by = spent
    colour = {"SFT": 4, **{name: c for _, name, c in PARTS}, "other": 6}
    by = {name: v for name, v in by.items() if v.sum() > 0}
    bins = min(40, len(t))
    edges = np.linspace(0, t[-1], bins + 1)
    which = np.clip(np.searchsorted(edges, t, side="left") - 1, 0, bins - 1)
    sums = {name: np.bincount(which, weights=v, minlength=bins) for name, v in by.items()}
    height = np.sum([*sums.values()], 0)
    used = height > 0
    cuts = np.concatenate([[0.0], edges[1:][used]])  # a bin in which no line ended belongs to the next one
    cuts[-1] = t[-1]
    unit, size = ("h", 3600.0) if t[-1] >= 3 * 3600 else ("min", 60.0) if t[-1] >= 180 else ("s", 1.0)
    bars = stacked(
        "Where the time goes",
        "share of the wall time",
        (cuts / size).tolist(),
        [(name, colour[name], v[used] / height[used]) for name, v in sums.items()],
        x_name=f"time since the start [{unit}]",
    )
    whole = sum(v.sum() for v in by.values())
    steps = totals(run)["env_steps"]
    rows = ""
    for name, v in by.items():
        part = float(v.sum())
        each = f"{1e6 * part / steps:.3g}" if steps and name not in ("SFT", "evaluation") else "–"
        rows += (
            f'<tr><td class="name"><s class="c{colour[name]}"></s>{name}</td><td '
            f'class="n">{duration(part)}</td><td class="n">{100 * part / whole:.0f} %</td><td '
            f'style="width:34%"><span class="bar c{colour[name]}" '
            f'style="width:{100 * part / whole:.1f}%"></span></td><td class="n">{each}</td></tr>'
        )
    table = (
        '<div class="card scroll pad"><table><tr><th>Part</th><th class="n">Time</th><th class="n">Share</th>'
        f'<th></th><th class="n">µs per env step</th></tr>{rows}</table></div>'
    )
    return f'<div class="grid">{bars}{speed}</div><div class="gap"></div>{table}'


def asynchrony(run: RunRecord) -> str:
    """How old the data were, how much of it counted, who waited, and who worked when; "" without worker
    processes."""
    if "workers/sim" not in run.metrics:
        return ""
    charts = [
        chart(
            "Staleness",
            "versions behind, of what was trained on",
            [
                *rl_series(run, "staleness/mean", "mean", 1),
                *rl_series(run, "staleness/max", "greatest", 2, "thin"),
            ],
            zero=True,
        ),
        chart(
            "Waiting",
            "share of the time",
            [
                *rl_series(run, "workers/wait", "workers", 3),
                *rl_series(run, "util/learner_wait", "learner", 2),
            ],
            percent=True,
            y_range=(0.0, 1.0),
        ),
        chart(
            "Effective samples",
            "share of the batch that the importance weights leave",
            rl_series(run, "train/ess_frac", "ESS / N", 1),
            percent=True,
            y_range=(0.0, 1.0),
            missing="All of the data was fresh.",
        ),
        chart(
            "Rollouts in flight",
            "fragments",
            [
                *rl_series(run, "queue/leased", "being made", 1),
                *rl_series(run, "queue/ready", "finished", 2),
                *rl_series(run, "queue/taken", "kept for the next checkpoint", 3),
            ],
            zero=True,
        ),
    ]
    return (
        f'<h2>Who worked when</h2>{timeline(run)}<div class="gap"></div><div '
        f'class="small">{"".join(charts)}</div>'
    )


def timeline(run: RunRecord) -> str:
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
    rows = [
        (w, 2 if w == "learner" else 5 if w == "eval" else 1, [(a, b) for who, a, b in spans if who == w])
        for w in names
    ]
    return lanes(
        "Timeline",
        f"the last {WINDOW:.0f} s of training; blank is waiting",
        rows,
        x_name="time since the start [s]",
    )
