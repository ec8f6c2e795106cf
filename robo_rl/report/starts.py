"""The map of a run's starts: how many the policy is expected to solve, and where its episodes went, over environment steps."""

import numpy as np

from robo_rl.report.charts import stacked
from robo_rl.report.data import RunRecord

FIFTHS = ("0 to 20 %", "20 to 40 %", "40 to 60 %", "60 to 80 %", "80 to 100 %")
MOST = 40  # bars


def start_map(run: RunRecord) -> str:
    """Two charts, shares of the pool and of its episodes by predicted success; "" where no sampler played a pool (`--starts`)."""
    m = run.metrics
    if "starts/pool_0" not in m:
        return ""
    rows = (m["stage"] == "rl") & np.isfinite(m["starts/pool_0"])
    step = m["step"][rows].astype(float)
    if not len(step):
        return ""
    pieces = np.array_split(np.arange(len(step)), min(MOST, len(step)))
    edges = [0.0, *(float(step[p[-1]]) for p in pieces)]
    charts = []
    for key, title, what in (("pool", "Starts by success", "share of the pool of starts, by the success that is expected of them"),
                             ("played", "Episodes by success", "share of the episodes that began in the pool, by the same")):
        share = np.stack([m[f"starts/{key}_{i}"][rows] for i in range(len(FIFTHS))])
        means = np.stack([share[:, p].mean(1) for p in pieces], 1)
        charts.append(stacked(title, what, edges, [(name, i + 1, means[i]) for i, name in enumerate(FIFTHS)], x_name="environment steps"))
    return f'<h2>Where rollouts went</h2><div class="grid">{"".join(charts)}</div>'
