"""Instructions as numbers that a world model is conditioned on.

An instruction is the words and pairs of neighbouring words that it has and not all others have (1 or 0), so
that "pick up the red cube" and "pick up the blue cube" share what they have in common. More than MOST such
numbers are projected to MOST by fixed random directions. One instruction alone needs none.

A model knows the instructions that it was learnt on, by their words as they were recorded; any other is
refused.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from robo_rl.errors import UserError

MOST = 64


def features(tasks: Sequence[str]) -> np.ndarray:
    """float32[n,W] of n instructions, rows that differ where the instructions do; W = 0 for one."""
    if len(tasks) < 2:
        return np.zeros((len(tasks), 0), np.float32)
    parts = [parts_of(t) for t in tasks]
    telling = sorted({p for some in parts for p in some if any(p not in other for other in parts)})
    out = np.array([[p in some for p in telling] for some in parts], np.float32).reshape(len(tasks), -1)
    if len(np.unique(out, axis=0)) < len(tasks):  # the same words in an order that pairs do not tell
        out = np.concatenate([out, np.eye(len(tasks), dtype=np.float32)], 1)
    if out.shape[1] > MOST:
        out = (
            out
            @ np.random.default_rng(61).normal(size=(out.shape[1], MOST)).astype(np.float32)
            / np.sqrt(out.sum(1).mean())
        )
    return out


def parts_of(task: str) -> set[str]:
    """Words and pairs of neighbours."""
    words = task.lower().split()
    return {*words, *(f"{a} {b}" for a, b in zip(words, words[1:], strict=False))}


def places(known: Sequence[str], asked: "Iterable[str] | None", what: str) -> np.ndarray:
    """int64[n]: which of `known` each instruction is; UserError for one that is not, or for none where there
    are several."""
    if asked is None:
        raise UserError(f"{what} knows {len(known)} instructions; an observation must say which: obs['task']")
    at = {t: i for i, t in enumerate(known)}
    words = [str(t) for t in asked]
    if new := next((w for w in words if w not in at), None):
        raise UserError(f"{what} was never taught {new!r}; it knows {listed(known)}")
    return np.array([at[w] for w in words], np.int64)


def listed(tasks: Sequence[str]) -> str:
    """The first few of them."""
    return ", ".join(repr(t) for t in tasks[:4]) + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else "")


def reads_text(options: Any) -> bool:
    """Whether a model with these options is conditioned on the instruction (one without options of ours is
    taken at its word)."""
    inner = getattr(options, "dynamics", getattr(options, "proprio", options))
    return getattr(inner, "text", True)


def check_text(options: Any, tasks: Iterable[str], where: str) -> None:
    """Raise UserError for recorded `tasks` that are several where the model reads no text."""
    if not reads_text(options) and len(found := sorted(set(tasks))) > 1:
        raise UserError(
            f"data set {where} has {len(found)} instructions ({listed(found)}); a world model without text "
            "would average over them: leave the option …no-text out"
        )


def check_known(known: Sequence[str], tasks: Iterable[str], where: str) -> None:
    """Raise UserError for recorded `tasks` that a model of the instructions `known` never saw."""
    if tuple(known) != ("",) and (new := sorted(set(tasks) - set(known))):
        raise UserError(
            f"data set {where} has the instruction {new[0]!r}, which the world model was never taught; it "
            f"knows {listed(known)}. Train one on episodes of it"
        )
