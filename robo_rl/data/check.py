"""What a data set is, and what of it will make trouble: read whole, every picture too, and told in lines.

Damage raises `BrokenDataset` (the reader's). What is only suspicious is a finding, each with what to do.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from robo_rl.data import checksums, labels, layout, statistics
from robo_rl.data.reader import Dataset, all_but, load
from robo_rl.data.repair import decode_all
from robo_rl.errors import quoted
from robo_rl.types import Each, silently

SHORT = 0.2  # of the median length: an episode that is shorter was broken off
TURNS = 4 * np.pi  # no joint of an arm turns farther than twice
JUMP = 20.0  # times the 95 % quantile of an axis' steps: more is no motion


@dataclass(frozen=True, slots=True)
class DataReport:
    """facts: (what, value); axes: (name, unit, min, q01, median, q99, max) of every action axis; findings:
    what to look after."""

    facts: list[tuple[str, str]]
    axes: list[tuple[str, str, float, float, float, float, float]]
    findings: list[str]


def check_data(root: "Path | str", pictures: bool = True, each: Each = silently) -> DataReport:
    """Read a data set and look at it. pictures: decode every one. Raises BrokenDataset for damage."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of missing checksums: among the findings
        data = load(root)
    if pictures:
        decode_all(data, each)
    units = labels.units_of(data.meta)
    levels = [0, 0.01, 0.5, 0.99, 1]
    table = np.quantile(data.action.astype(np.float64), levels, axis=0)
    names = units.unit if units is not None else ("?",) * len(data.features.action)
    axes = [
        (name, unit, *map(float, table[:, i]))
        for i, (name, unit) in enumerate(zip(data.features.action, names, strict=True))
    ]
    return DataReport(facts_of(data, units), axes, findings_of(data, units))  # pyright: ignore[reportArgumentType]


def facts_of(data: Dataset, units: labels.Units | None) -> list[tuple[str, str]]:
    """What it holds."""
    f, lengths = data.features, data.to - data.from_
    size = sum(h * w * 3 for h, w in data.views.values()) * len(data.action)
    counts = np.bincount(data.task_index[data.from_], minlength=len(data.tasks))
    success = f"{int(data.success.sum())} of {len(data)} episodes" if data.is_judged else "not recorded"
    return [
        ("robot", f.robot or "not stated"),
        (
            "episodes",
            f"{len(data)}, {lengths.min()} to {lengths.max()} frames, {len(data.action) / f.fps / 60:.1f} "
            "min in all",
        ),
        ("rate", f"{f.fps:g} frames a second"),
        (
            "tasks",
            "; ".join(f"{task!r} ({n})" for task, n in zip(data.tasks[:5], counts, strict=False))
            + (f"; and {len(data.tasks) - 5} more" if len(data.tasks) > 5 else ""),
        ),
        ("cameras", ", ".join(f"{v} {h}x{w}" for v, (h, w) in data.views.items()) or "none"),
        *(
            [("decoded", f"{size / 1e9:.2g} GB of pictures; training keeps at most --data.cache-mb of them")]
            if size
            else []
        ),
        ("state", f"{len(f.state)} numbers"),
        ("action", f"{len(f.action)} axes, {units or 'units not stated'}"),
        ("success", success),
        ("reward", "recorded" if "next.reward" in data.meta.info["features"] else "not recorded"),
        ("checksums", "all files" if data.meta.verifier.sums is not None else "none"),
    ]


def findings_of(data: Dataset, units: labels.Units | None) -> list[str]:
    """What is suspicious, in one line each."""
    root, out = data.meta.root, []
    if units is None:
        out.append(f"nobody stated the units of the actions; {labels.how_to_state(data.meta)}")
    if units is not None:
        far = np.abs(data.action).max(0)
        turns = [
            i
            for i, (unit, kind) in enumerate(zip(units.unit, units.kind, strict=True))
            if (unit, kind) == ("rad", "absolute") and far[i] > TURNS
        ]
        if turns:
            out.append(
                f"action axis {data.features.action[turns[0]]!r} is said to be in rad and goes to "
                f"{far[turns[0]]:.3g}: are these degrees? State them: robo_rl data label {quoted(root)} "
                "--units …"
            )
    if not data.is_judged:
        out.append(
            "no episode is said to have succeeded or failed; bc does not need it, others do: robo_rl data "
            f"label {quoted(root)} --success …"
        )
    if data.meta.verifier.sums is None:
        out.append(
            "there are no checksums, so damage may go unseen; write them: robo_rl data repair "
            f"{quoted(root)} --accept"
        )
    elif (tolerance := data.meta.verifier.sums.tolerance) > checksums.TOLERANCE:
        out.append(
            f"gaps of its timestamps were accepted, up to {tolerance:.3g} s: a chunk of actions that crosses "
            "one is learnt from as if there were none"
        )
    out += _statistics_findings(data)
    inside = np.ones(len(data.action) - 1, bool)
    inside[data.to[:-1] - 1] = False
    for what, names, x in (
        ("action", data.features.action, data.action),
        ("state", data.features.state, data.state),
    ):
        steps = np.abs(np.diff(x.astype(np.float64), axis=0)) * inside[:, None]
        for i, name in enumerate(names):
            if np.ptp(x[:, i]) == 0:
                out.append(f"{what} axis {name!r} never moves (always {x[0, i]:g}): nothing is learnt of it")
                continue
            moved = steps[steps[:, i] > 0, i]
            if len(moved) > 20 and steps[:, i].max() > JUMP * np.quantile(moved, 0.95):
                row = int(steps[:, i].argmax())
                e = int(data.episode_index[row])
                out.append(
                    f"{what} axis {name!r} jumps by {steps[row, i]:.3g} at frame {row - data.from_[e]} of "
                    f"episode {e}, where 95 % of its steps are below {np.quantile(moved, 0.95):.3g}: look at "
                    f"it, robo_rl data view {quoted(root)}"
                )
    lengths = data.to - data.from_
    short = np.flatnonzero(lengths < max(2, SHORT * np.median(lengths)))
    if len(short):
        out.append(
            f"far shorter than the others: {len(short)} episode{'s' * (len(short) > 1)} (the first is "
            f"{short[0]}, of {lengths[short[0]]} frames); leave out what was broken off: "
            f"{all_but(short, len(data), root)}"
        )
    return out


def _statistics_findings(data: Dataset) -> list[str]:
    """Whether stats.json has the quantiles of all frames: others average those of the episodes, which is
    something else."""
    root = data.meta.root
    again = f"make them of all frames: robo_rl data stats {quoted(root)}"
    try:
        totals = statistics.stats_from_json((root / layout.STATS).read_text(encoding="utf-8"))
        of = {
            key: totals[key] for key in ("observation.state", "action") if key in data.meta.info["features"]
        }
    except (OSError, ValueError, KeyError):
        return [f"there are no statistics ({layout.STATS}) of state and action; {again}"]
    out = []
    for key, x in (("observation.state", data.state), ("action", data.action)):
        per = of.get(key, {})
        if key in of and any(q not in per for q in ("q01", "q99")):
            out.append(f"{layout.STATS} has no quantiles (q01, q99) of {key}; {again}")
            continue
        if key in of:
            own, spread = statistics.quantiles_of(x), np.maximum(x.std(0), 1e-9)
            if any(per[q].size != x.shape[1] for q in ("q01", "q99")):
                out.append(f"{layout.STATS} has other axes of {key} than the frames; {again}")
                continue
            off = max(float((np.abs(per[q].reshape(-1) - own[q][0]) / spread).max()) for q in ("q01", "q99"))
            if not off <= 0.02:  # nan too
                out.append(
                    f"the quantiles of {key} in {layout.STATS} are off by up to {off:.2g} std of the data; "
                    f"{again}"
                )
    return out
