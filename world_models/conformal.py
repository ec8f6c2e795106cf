"""Upper bounds on a model's error that hold in a stated share of new episodes, by horizon: split conformal
prediction.

    score_t = error_t / max(uncertainty_t, TINY)          bound_t = q_t max(uncertainty_t, TINY)
    q_t = the `level` quantile of  sum_k sum_j 1/((K+1) n_k) delta(score_tkj)  +  1/(K+1) delta(infinity)

over K calibration episodes with n_k windows each that reach step t. Every step has a factor of its own, for
errors and uncertainties grow differently along a rollout. Episodes are exchangeable, windows of one episode
are not: so an episode counts as one, whatever the number of its windows. A window of a new episode then lies
below its bound with a probability of at least `level`; with fewer than level/(1-level) episodes the factor is
infinite, for nothing can be promised.

Source: Lee, Barber and Willett 2023 (arXiv 2306.06342), hierarchical conformal prediction; with one window
per episode it is split conformal prediction (Papadopoulos 2002; Lei et al. 2018, alg. 2).

Axes: `B` windows, `T` control steps of a window.
"""

from collections.abc import Sequence

import numpy as np

from robo_rl.stats import Interval, bootstrap_mean

LEVEL = 0.9
TINY = 1e-9  # an uncertainty below it (an ensemble of one) is taken for it
FOLDS = 10


def weighted_quantile(scores: np.ndarray, groups: np.ndarray, level: float = LEVEL) -> float:
    """q of the module: scores [n] of windows that belong to the episodes `groups` int[n]; infinity where they
    are too few."""
    if not len(scores):
        return float("inf")
    _, which, count = np.unique(groups, return_inverse=True, return_counts=True)
    weight = 1 / ((len(count) + 1) * count[which])
    order = np.argsort(scores, kind="stable")
    reached = np.flatnonzero(np.cumsum(weight[order]) >= level - 1e-9)  # the sum of equal weights rounds
    return float(scores[order[reached[0]]]) if len(reached) else float("inf")


def scores_of(error: np.ndarray, uncertainty: np.ndarray) -> np.ndarray:
    """error / uncertainty, both [B,T]."""
    return error / np.maximum(uncertainty, TINY)


def factors(score: np.ndarray, seen: np.ndarray, episode: np.ndarray, level: float = LEVEL) -> np.ndarray:
    """float64[T]: q_t of every step, from scores [B,T] where seen bool[B,T], of windows of episodes
    int[B]."""
    return np.array([weighted_quantile(score[m, t], episode[m], level) for t, m in enumerate(seen.T)])


def folds_of(episode: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """int64[B]: which of `folds` parts each window belongs to; the windows of an episode stay together."""
    names, which = np.unique(episode, return_inverse=True)
    return (np.random.default_rng([seed, 41]).permutation(len(names)) % folds)[which]


def cross_factors(
    score: np.ndarray,
    seen: np.ndarray,
    episode: np.ndarray,
    level: float = LEVEL,
    folds: int = FOLDS,
    seed: int = 0,
) -> np.ndarray:
    """float64[B,T]: for every window the factors that all other folds' episodes give."""
    fold, out = folds_of(episode, folds, seed), np.full(score.shape, np.inf)
    for k in np.unique(fold):
        others = fold != k
        out[~others] = factors(score[others], seen[others], episode[others], level)
    return out


def coverage(
    score: np.ndarray, seen: np.ndarray, episode: np.ndarray, q: np.ndarray, horizons: Sequence[int]
) -> dict[int, Interval]:
    """Share of episodes whose windows lie within the bound q ([T] or [B,T]) at each horizon, with its
    bootstrap interval over episodes; a horizon that fewer than two episodes reach, or where no bound is
    finite, is left out."""
    inside = score <= q
    out = {}
    for h in horizons:
        if h > score.shape[1]:
            continue
        m = seen[:, h - 1] & np.isfinite(np.broadcast_to(q, score.shape)[:, h - 1])
        names, which = np.unique(episode[m], return_inverse=True)
        if len(names) > 1:
            share = np.bincount(which, inside[m, h - 1]) / np.bincount(which)
            out[h] = bootstrap_mean(share)
    return out
