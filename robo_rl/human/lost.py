"""When an episode was lost: not guessed from a score, but tried out. From a snapshot of every check the
scripted expert goes on; the episode is lost from the first check on after which the expert succeeds no more.
A failure that the expert could still have turned into a success at its end was only late.
"""

from collections.abc import Sequence

import numpy as np


def lost_from(can_win: Sequence[bool]) -> int:
    """First check after which nobody wins; -1: whoever took over at the last check would still win."""
    won = np.flatnonzero(can_win)
    first = int(won[-1]) + 1 if len(won) else 0
    return first if first < len(can_win) else -1


def expert_wins(env, snapshots: Sequence[dict[str, np.ndarray]], steps: int) -> np.ndarray:
    """bool[K]: whether the expert of `env` succeeds within `steps` control steps from each of K snapshots,
    rows of `get_state` of one env each. `env`: of the same task, with a limit that leaves so many steps; its
    own episodes are overwritten."""
    n, out = env.num_envs, np.zeros(len(snapshots), bool)
    env.reset(options={"reset_mask": np.ones(n, bool), "starts": np.zeros(n, np.int64)})
    for first in range(0, len(snapshots), n):
        some = snapshots[first : first + n]
        rows = [some[min(i, len(some) - 1)] for i in range(n)]
        env.set_state({k: np.stack([r[k] for r in rows]) for k in rows[0]})
        over, won = np.zeros(n, bool), np.zeros(n, bool)
        for _ in range(steps):
            _, _, terminated, truncated, info = env.step(env.expert_action())
            won |= np.asarray(info["success"]) & ~over
            over |= np.asarray(terminated) | np.asarray(truncated)
            if over.all():
                break
        out[first : first + len(some)] = won[: len(some)]
    return out


def caught_in_time(alarms: Sequence[int], lengths: Sequence[int]) -> float:
    """Share of failures with an alarm (first check; -1: none), each judged over the checks that a success
    lasts, averaged over the lengths of successes. Of elapsed time it is the share of successes that it takes
    for failures: it tells nothing."""
    a, limit = np.asarray(alarms), np.asarray(lengths)
    return (
        float(((a >= 0)[:, None] & (a[:, None] < limit[None])).mean())
        if len(a) and len(limit)
        else float("nan")
    )


def auroc_once_lost(scores: Sequence[np.ndarray], lost: Sequence[int | None]) -> float:
    """Share of pairs of an episode that is lost by now and one that will succeed, both running at the same
    check, in which the lost one has the larger score (a tie counts half). lost: first check of a lost
    episode, -1 of a failure that was only late (left out), None of a success. NaN without such a pair."""
    right = pairs = 0.0
    for t in range(max(len(s) for s in scores)):
        bad = np.array(
            [s[t] for s, x in zip(scores, lost, strict=True) if x is not None and 0 <= x <= t < len(s)]
        )
        good = np.array([s[t] for s, x in zip(scores, lost, strict=True) if x is None and t < len(s)])
        apart = bad[:, None] - good[None]
        right, pairs = right + float((apart > 0).sum() + 0.5 * (apart == 0).sum()), pairs + apart.size
    return right / pairs if pairs else float("nan")
