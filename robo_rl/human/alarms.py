"""One alarm out of several scores: the largest of FLOAT, stuck and far, each normalised by its mean and
deviation on successes at that time, with one conformal threshold (`robo_rl.human.detect`). What a score knows
at a check it knows from the rollout so far.
"""

import math
from collections.abc import Sequence

import numpy as np

from robo_rl.human.detect import (
    DemoEmbeddings,
    Match,
    Threshold,
    by_time,
    calibrate,
    far_score,
    float_index,
    largest,
    normalised,
    rewind_point,
    stuck_score,
)

STUCK = 3  # checks over which a robot that does not move is stuck
NAMES = ("FLOAT", "stuck", "far")


def scores_now(
    points: np.ndarray, ref: DemoEmbeddings, demos: Sequence[np.ndarray]
) -> tuple[np.ndarray, Match]:
    """(FLOAT, stuck, far) of a rollout so far, embeddings [P, F], at its last check, and FLOAT's match."""
    match = float_index(points, ref)
    return np.array([match.index, stuck_score(points, STUCK)[-1], far_score(points[-1:], demos)[0]]), match


def scores_by_check(points: np.ndarray, ref: DemoEmbeddings, demos: Sequence[np.ndarray]) -> np.ndarray:
    """[T, 3] of a whole rollout [T, F], each row as it was known at its check."""
    return np.stack([scores_now(points[:k], ref, demos)[0] for k in range(1, len(points) + 1)])


def largest_threshold(
    successes: Sequence[np.ndarray], alpha: float
) -> tuple[list[tuple[np.ndarray, np.ndarray]], Threshold]:
    """(mean and deviation by time of each score, the threshold of the largest) from scores [T, 3] of
    successes: one half normalises, the other gives the threshold. UserError: too few for the rate `alpha` of
    false alarms."""
    scales = scales_of(successes[::2]) if len(successes) > 1 else []
    return scales, calibrate([largest_of(x, scales) for x in successes[1::2]], alpha)


def scales_of(successes: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Mean and deviation by time of each score, from scores [T, 3] of successes."""
    return [by_time([x[:, k] for x in successes]) for k in range(len(NAMES))]


def largest_of(scores: np.ndarray, scales: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The largest [T] of the normalised scores [T, 3]."""
    return largest(*(normalised(scores[:, k], *scale) for k, scale in enumerate(scales)))


class LargestMonitor:
    """The largest score on N running robots; begun, checked and asked for a point to go back to as
    `detect.FailureMonitor` is.

    scales, threshold: of `largest_threshold`; limit[t]: of what one point's transport may cost, for the
    rewind point.
    """

    def __init__(
        self,
        ref: DemoEmbeddings,
        demos: Sequence[np.ndarray],
        scales: Sequence[tuple[np.ndarray, np.ndarray]],
        threshold: Threshold,
        limit: np.ndarray,
        num_envs: int,
    ):
        self.ref, self.demos, self.scales, self.threshold, self.limit = ref, demos, scales, threshold, limit
        self.points: list[list[np.ndarray]] = [[] for _ in range(num_envs)]
        self.scores: list[list[np.ndarray]] = [[] for _ in range(num_envs)]
        self.match: list[Match | None] = [None] * num_envs

    def begin(self, i: int, keep: int = 0) -> None:
        """Robot `i` starts anew, or goes back to its first `keep` checks."""
        del self.points[i][keep:], self.scores[i][keep:]
        self.match[i] = None

    def check(self, i: int, point: np.ndarray) -> float:
        """One check of robot `i` at embedding [F] -> 1 + how far the largest score is above its threshold (an
        alarm where > 1)."""
        self.points[i].append(point)
        now, self.match[i] = scores_now(np.stack(self.points[i]), self.ref, self.demos)
        self.scores[i].append(now)
        limit = float(self.threshold.at(len(self.points[i]) - 1))
        return (
            math.inf
            if limit == -math.inf
            else 1 + float(largest_of(np.stack(self.scores[i]), self.scales)[-1]) - limit
        )

    def rewind_to(self, i: int) -> int:
        """The check to go back to."""
        match = self.match[i]
        return 0 if match is None else rewind_point(match.matched, self.limit)
