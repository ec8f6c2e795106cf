"""The map of a run's starts: how many the policy is expected to solve, and where its episodes went, over
environment steps; and of its tasks, where it has several."""

import numpy as np

from robo_rl.report.charts import Series, chart, stacked
from robo_rl.report.data import RunRecord

FIFTHS = ("0 to 20 %", "20 to 40 %", "40 to 60 %", "60 to 80 %", "80 to 100 %")
MOST = 40  # bars
COLOURS = 7  # of the page


def pieces_of(run: RunRecord, key: str) -> tuple[np.ndarray, list[np.ndarray], list[float]]:
    """(rows of RL that have the metric `key`, at most MOST groups of them, the steps between the groups); no
    group: there are none."""
    m = run.metrics
    rows = (m["stage"] == "rl") & np.isfinite(m[key]) if key in m else np.zeros(0, bool)
    step = m["step"][rows].astype(float) if len(rows) else np.zeros(0)
    pieces = np.array_split(np.arange(len(step)), min(MOST, len(step))) if len(step) else []
    return rows, pieces, [0.0, *(float(step[p[-1]]) for p in pieces)]


def task_map(run: RunRecord) -> str:
    """Two charts of a run over several tasks, success of each and its share of the rollouts; "" of a run over
    one."""
    m, prefix = run.metrics, "eval/success/"
    names = [key.removeprefix(prefix) for key in m if key.startswith(prefix)]
    if len(names) < 2:
        return ""
    series = []
    for k, name in enumerate(names):
        seen = np.isfinite(m[prefix + name])
        # what the supervised stage counts are updates
        step = np.where(m["stage"] == "rl", m["step"], 0)[seen].astype(float)
        series.append(Series(name, step, m[prefix + name][seen], k % COLOURS + 1, look="dots"))
    charts = [
        chart(
            "Success by task",
            "share of evaluation episodes that succeed",
            series,
            percent=True,
            y_range=(0, 1),
        )
    ]
    rows, pieces, edges = pieces_of(run, f"tasks/share/{names[0]}")
    if pieces:
        bars = []
        for k, name in enumerate(names):
            share = m[f"tasks/share/{name}"][rows]
            bars.append((name, k % COLOURS + 1, np.array([share[p].mean() for p in pieces])))
        charts.append(
            stacked(
                "Rollouts by task",
                "share of the control steps of training",
                edges,
                bars,
                x_name="environment steps",
            )
        )
    return f'<h2>Tasks</h2><div class="grid">{"".join(charts)}</div>'


def start_map(run: RunRecord) -> str:
    """Two charts, shares of the pool and of its episodes by predicted success; "" where no sampler played a
    pool (`--starts`)."""
    m = run.metrics
    rows, pieces, edges = pieces_of(run, "starts/pool_0")
    if not pieces:
        return ""
    charts = []
    for key, title, what in (
        ("pool", "Starts by success", "share of the pool of starts, by the success that is expected of them"),
        ("played", "Episodes by success", "share of the episodes that began in the pool, by the same"),
    ):
        share = np.stack([m[f"starts/{key}_{i}"][rows] for i in range(len(FIFTHS))])
        means = np.stack([share[:, p].mean(1) for p in pieces], 1)
        charts.append(
            stacked(
                title,
                what,
                edges,
                [(name, i + 1, means[i]) for i, name in enumerate(FIFTHS)],
                x_name="environment steps",
            )
        )
    return f'<h2>Where rollouts went</h2><div class="grid">{"".join(charts)}</div>'


def group_map(run: RunRecord) -> str:
    """Two charts, the sizes of groups and their episodes by predicted success; "" where every start has the
    same number (`--rl.allocate`)."""
    m = run.metrics
    rows, pieces, edges = pieces_of(run, "groups/size_mean")
    if not pieces:
        return ""
    step = m["step"][rows].astype(float)
    sizes = [
        Series(name, step, m[f"groups/size_{name}"][rows], i + 1)
        for i, name in enumerate(("min", "mean", "max"))
    ]
    share = np.stack([m[f"groups/played_{i}"][rows] for i in range(len(FIFTHS))])
    bars = [(name, i + 1, np.array([share[i, p].mean() for p in pieces])) for i, name in enumerate(FIFTHS)]
    charts = [
        chart("Episodes of a start", "episodes planned for the starts of a round: least, mean, most", sizes),
        stacked(
            "Episodes by success of their start",
            "share of the planned episodes, by the success that was expected",
            edges,
            bars,
            x_name="environment steps",
        ),
    ]
    return f'<h2>How many episodes</h2><div class="grid">{"".join(charts)}</div>'
