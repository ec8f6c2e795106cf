"""`robo_rl eval RUN --demos FOLDER`: how near a run's actions are to recorded ones, without a simulator."""

import json
import math
import re
import sys
from pathlib import Path

from robo_rl.errors import plural
from robo_rl.experiment.open_loop import evaluate_recorded


def run(
    checkpoint: Path, demos: str, episodes: int, device: str, as_json: bool, against: Path | None = None
) -> int:
    """Write RUN/eval-data-<data set>-<checkpoint>.json and print a table or JSON; `against`: another
    checkpoint folder, whose error is compared episode by episode."""
    from robo_rl import files
    from robo_rl.device_names import check_device
    from robo_rl.log import Progress

    check_device(device)

    def along(folder: Path) -> dict:
        with Progress() as progress:
            return evaluate_recorded(
                folder,
                demos,
                folder.name,
                episodes,
                device,
                lambda chunks: progress.start("eval", chunks, "chunks"),
                progress.update,
            )

    result = along(checkpoint)
    name = re.sub("[^A-Za-z0-9_.]+", "-", Path(demos).resolve().name)
    out = checkpoint.parent.parent / f"eval-data-{name}-{result['checkpoint']}.json"
    result = files.plain(result)
    files.write_json(out, result)
    if against:
        result["against"] = files.plain(compared(result, along(against)))
    if as_json:
        print(json.dumps(result | {"file": str(out)}, indent=1))
        return 0
    print(table(result))
    print(f"  written to {out}", file=sys.stderr)
    return 0


def compared(result: dict, other: dict) -> dict:
    """The error of `result` minus that of `other`, paired by episode, with its 95 % interval."""
    from robo_rl.stats import bootstrap_mean

    pairs = zip(result["error_of_episode"], other["error_of_episode"], strict=True)
    gains = [math.nan if mine is None else mine - theirs for mine, theirs in pairs]
    difference = dict(zip(("difference", "low", "high"), bootstrap_mean(gains), strict=True))
    return {k: other[k] for k in ("run", "checkpoint", "error", "learnt_from")} | difference


def table(result: dict) -> str:
    """The result for people."""
    axes, n = result["axes"], len(result["episodes"])
    width = max(len(a["name"]) for a in axes)

    def number(x: "float | None") -> str:
        return "–" if x is None else f"{x:.3g}"

    def interval(row: dict) -> str:
        return "" if row["low"] is None else f"[{number(row['low'])}, {number(row['high'])}]"

    lines = [
        f"{result['run']} · {result['checkpoint']} · {result['demos']}: {plural(n, 'episode')}, "
        f"{result['frames']:,} chunks",
        f"  {'axis':<{width}}  unit         error  95 % interval       of the mean action  of staying there",
    ]
    lines += [
        f"  {a['name']:<{width}}  {a['unit']:<11}  {number(a['error']):<5}  {interval(a):<18}  "
        f"{number(a['error_of_mean'] or None):<18}  {number(a['error_of_state'])}"
        for a in axes
    ]
    few = f" over {n} episodes" + (" (narrow for so few)" if n < 20 else "")
    spread = f"  95 % interval {interval(result)}{few}" if result["low"] is not None else ""
    lines.append(f"  mean error, as a share of that of the mean action: {number(result['error'])}{spread}")
    lines.append(f"  staying where it is would have {number(result['error_of_state'])}")
    if result["learnt_from"]:
        lines.append("  these episodes are those that the run learnt from: its error on others is larger")
    if new := result.get("not_learnt"):
        lines.append(
            f"  the run never learnt the instruction {', '.join(map(repr, new[:3]))} of such episodes"
        )
    if other := result.get("against"):
        there = " (which learnt from these episodes)" if other["learnt_from"] else ""
        whom = f"{other['run']} · {other['checkpoint']} ({number(other['error'])}){there}"
        lines.append(
            f"  difference to {whom}, paired by episode: {number(other['difference'])}  95 % interval "
            f"{interval(other)}; below 0: this run is nearer"
        )
    return "\n".join(lines)
