"""Names in files of earlier versions, and what they are called now; whoever reads such a file asks here.

Files keep the names that they were written with; nothing is rewritten. Unknown names pass through.
"""

from collections.abc import Mapping
from typing import Any

METRICS = {  # of a row of metrics.jsonl, behind the last "/" of a prefix or whole
    "human/share": "human/step_share",
    "human/helped": "human/assisted",
    "human/alone": "human/unassisted_success",
    "train/own": "train/learner_share",
    "critic/own": "critic/learner_share",
}
PREFIXES = {"stal/": "staleness/"}  # of metrics
OPTIONS = {"person": "scripted_operator"}  # of a method that learns from replay, and of `correct`
CORRECT = OPTIONS | {"own": "learn_from_successes"}
SCRIPTED_OPERATOR = {
    "reaction": "reaction_time",
    "error": "slip_rate",
    "notice": "notice_time",
    "gate": "disagreement",
    "late": "late_share",
    "agree": "agree_time",
    "least": "least_time",
    "recovery": "recovery_time",
    "subtask": "until_subtask",
    "finish": "until_end",
    "attend": "attended_share",
    "leave": "leave_after",
}
# options by which a run that was called rlpd is told from one of the paper's method
DEMO_SAC = {"imitate", "ramp"}
ROUND = {"account": "operator_stats"}  # of a round of rounds.json, and of the file of an unfinished one
STATS_FILE = {"operator_stats.json": "account.json"}  # today's name: before
OPERATOR_STATS = {
    "alone": "unassisted_successes",
    "calls": "help_requests",
    "alone_rate": "unassisted_success_rate",
}


def renamed(table: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`table` with its keys under today's names."""
    return {names.get(key, key): value for key, value in table.items()}


def metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    return {
        METRICS.get(key)
        or next((new + key[len(old) :] for old, new in PREFIXES.items() if key.startswith(old)), key): value
        for key, value in row.items()
    }


def options(table: Mapping[str, Any], names: Mapping[str, str] = OPTIONS) -> dict[str, Any]:
    """Options as run.json or a configuration file has them: a run's, whose method's are in `rl`, or with
    `names` CORRECT those of `robo_rl correct`."""
    out = renamed(table, names)
    if out.get("algo") == "rlpd" and isinstance(out.get("rl"), Mapping) and DEMO_SAC & set(out["rl"]):
        out["algo"] = "demo_sac"
    for name, inner in (
        ("rl", lambda rl: options(rl)),
        ("scripted_operator", lambda person: renamed(person, SCRIPTED_OPERATOR)),
    ):
        if isinstance(out.get(name), Mapping):
            out[name] = inner(out[name])
    return out


def round_stats(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A round of rounds.json, or the file of an unfinished one."""
    out = renamed(entry, ROUND)
    if isinstance(out.get("operator_stats"), Mapping):
        out["operator_stats"] = renamed(out["operator_stats"], OPERATOR_STATS)
    return out
