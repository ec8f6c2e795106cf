"""Success of an evaluation by task and by instruction, and what is told of it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from robo_rl.starts import task_of
from robo_rl.stats import per_task

INDENT = " " * 16
TOLD = 4  # of the instructions that fall behind
HOPELESS = 0.2  # upper bound of the success of one that RL may not find
HINT = (
    "RL tries actions near those of the policy, and may find no success of {}. Show more of it (more "
    "--demos, --demos-most, a data set that has it), or correct the policy: robo_rl correct"
)


def by_task(success: list, starts: np.ndarray, tasks: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Success, its 95 % Wilson interval and n of each of several tasks, from episodes of `starts` [n]."""
    rows = by_instruction(
        {"task": [tasks[k] for k in task_of(starts, len(tasks))], "success": success}, least=1
    )
    return {task: rows[task] for task in tasks if task in rows}


def by_instruction(result: Mapping[str, Any], least: int = 2) -> dict[str, dict[str, Any]]:
    """The same of each instruction of an evaluation's episodes; {} where they had fewer than `least`."""
    rows = per_task(result["task"], result["success"], groups=result.get("origin"))
    if len(rows) < least:
        return {}
    return {r.task: {"success": r.rate.value, "low": r.rate.low, "high": r.rate.high, "n": r.n} for r in rows}


def told_of(result: Mapping[str, Any], hint: bool) -> list[str]:
    """Lines for people: success of each of several tasks, or of the instructions that fall behind the others;
    with `hint` what to do about one that hardly ever succeeds."""
    if tasks := result.get("tasks"):
        return [INDENT + "   ".join(words_of(t, one) for t, one in tasks.items())]
    words, advice = behind(result.get("instructions", {}))
    return [line for line in (words and INDENT + words, hint and advice) if line]


def behind(rows: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """(success of the instructions whose interval lies below that of the best, the lowest first; what to do
    about those that hardly ever succeed) of the `rows` of `by_instruction`; "" where there are none."""
    best = max((one["low"] for one in rows.values()), default=0.0)
    lagging = sorted((t for t, one in rows.items() if one["high"] < best), key=lambda t: rows[t]["success"])
    hopeless = [repr(t) for t in lagging if rows[t]["high"] < HOPELESS]
    more = f"   and {len(lagging) - TOLD} more" if len(lagging) > TOLD else ""
    words = "   ".join(words_of(t, rows[t]) for t in lagging[:TOLD]) + more
    return words, HINT.format(", ".join(hopeless[:TOLD])) if hopeless else ""


def words_of(task: str, row: Mapping[str, Any]) -> str:
    return f"{task} {row['success']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
