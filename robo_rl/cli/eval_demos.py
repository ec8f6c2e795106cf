"""`robo_rl eval RUN --demos FOLDER`: how near a run's actions are to recorded ones, without a simulator."""

import json
import re
import sys
from pathlib import Path

from robo_rl.experiment.folder import pick_checkpoint
from robo_rl.experiment.open_loop import evaluate_recorded


def run(path: str, demos: str, checkpoint: str, episodes: int, device: str, as_json: bool) -> int:
    """Write RUN/eval-data-<data set>-<checkpoint>.json and print a table or JSON."""
    from robo_rl import files
    from robo_rl.device_names import check_device
    from robo_rl.log import Progress

    check_device(device)
    folder, _ = pick_checkpoint(Path(path), checkpoint)
    with Progress() as progress:
        result = evaluate_recorded(
            path,
            demos,
            checkpoint,
            episodes,
            device,
            lambda chunks: progress.start("eval", chunks, "chunks"),
            progress.update,
        )
    name = re.sub("[^A-Za-z0-9_.]+", "-", Path(demos).resolve().name)
    out = folder / f"eval-data-{name}-{result['checkpoint']}.json"
    result = files.plain(result)
    files.write_json(out, result)
    if as_json:
        print(json.dumps(result | {"file": str(out)}, indent=1))
        return 0
    print(table(result))
    print(f"  written to {out}", file=sys.stderr)
    return 0


def table(result: dict) -> str:
    """The result for people."""
    axes, n = result["axes"], len(result["episodes"])
    width = max(len(a["name"]) for a in axes)

    def number(x: "float | None") -> str:
        return "–" if x is None else f"{x:.3g}"

    def interval(row: dict) -> str:
        return "" if row["low"] is None else f"[{number(row['low'])}, {number(row['high'])}]"

    lines = [
        f"{result['run']} · {result['checkpoint']} · {result['demos']}: {n} episode{'s' * (n != 1)}, "
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
    lines.append(f"  of staying where it is: {number(result['error_of_state'])}")
    if result["learnt_from"]:
        lines.append("  these episodes are those that the run learnt from: its error on others is larger")
    return "\n".join(lines)
