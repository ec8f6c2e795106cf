"""Success of an evaluation by task and by instruction, and what is told of it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from robo_rl.starts import task_of
from robo_rl.stats import per_task, wilson

INDENT = " " * 16
TOLD = 4  # of the instructions that fall behind
HOPELESS = 0.2  # upper bound of the success of one that RL may not find
HINT = (
    "RL tries actions near those of the policy, and may find no success of {}. Show more of it (more "
    "--demos, --demos-most, a data set that has it), or correct the policy: robo_rl correct"
)


def by_task(success: list, starts: np.ndarray, tasks: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Success, its 95 % Wilson interval and n of each of several tasks, from episodes of `starts` [n]."""
    out, which = {}, task_of(starts, len(tasks))
    for k, task in enumerate(tasks):
        mine = [s for s, t in zip(success, which, strict=True) if t == k]
        if mine:
            out[task] = dict(zip(("success", "low", "high"), wilson(sum(mine), len(mine)), strict=True)) | {
                "n": len(mine)
            }
    return out


def by_instruction(result: Mapping[str, Any], least: int = 2) -> dict[str, dict[str, Any]]:
    """The same of each instruction of an evaluation's episodes; {} where they had fewer than `least`."""
    rows = per_task(result["task"], result["success"], groups=result.get("origin"))
    if len(rows) < least:
        return {}
    return {r.task: {"success": r.rate.value, "low": r.rate.low, "high": r.rate.high, "n": r.n} for r in rows}


def told_of(result: Mapping[str, Any], hint: bool) -> list[str]:
    """Lines for people: success of each of several tasks, or of the instructions that fall behind the others,
    the lowest first; with `hint` what to do about one that hardly ever succeeds."""
    if tasks := result.get("tasks"):
        return [INDENT + "   ".join(words_of(t, one) for t, one in tasks.items())]
    rows = result.get("instructions", {})
    best = max((one["low"] for one in rows.values()), default=0.0)
    behind = sorted((t for t, one in rows.items() if one["high"] < best), key=lambda t: rows[t]["success"])
    if not behind:
        return []
    more = f"   and {len(behind) - TOLD} more" if len(behind) > TOLD else ""
    lines = [INDENT + "   ".join(words_of(t, rows[t]) for t in behind[:TOLD]) + more]
    hopeless = [repr(t) for t in behind if rows[t]["high"] < HOPELESS]
    return lines + ([HINT.format(", ".join(hopeless[:TOLD]))] if hint and hopeless else [])


def words_of(task: str, row: Mapping[str, Any]) -> str:
    return f"{task} {row['success']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
