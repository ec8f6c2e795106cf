"""Which candidates of a start are played again exactly: those of least and of greatest outcome (Sol-RL, arXiv
2604.06916).

    M candidates, played by a cheaper policy, candidate i with noise of (start, i)
                                                            `robo_rl.policies.cheap`
    G of them, the extremes, played again from the same start with the same noise by the exact policy; these
    alone are learnt from

What the choice does to the estimate. Given its outcome no candidate is likelier to be chosen than another. So
where outcomes are binary and both policies are one, those chosen are j successes and G - j failures, each
drawn as from the policy given its outcome. With the advantage R - mean R of the G,

    E[1/G sum A grad log pi] = E[(j/G)(1 - j/G)] (E[grad log pi | success] - E[grad log pi | failure])
                             = E[(j/G)(1 - j/G)] / (p (1 - p))  grad p

so a start pulls in the direction of its own policy gradient, with a weight that grows as p leaves 1/2 (where
both halves are full it is the gradient of the log odds, over 4). Starts are weighted other than alike. Graded
outcomes: the best and the worst pull, and the sum is another direction. And where the cheaper policy
disagrees with the exact one, noise was chosen by another outcome than the one that is learnt from: how often
is measured (`rank_correlation`), not corrected. The success of those chosen says nothing of the policy's.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def extremes(outcome: Floats, n: int) -> Ints:
    """Which n of the candidates [M], in their order: the n // 2 of least outcome and the others of greatest;
    of equals by number alone."""
    order = np.argsort(outcome, kind="stable")
    return np.sort(np.concatenate([order[: n // 2], order[len(order) - (n - n // 2) :]])).astype(np.int64)


def ranks(x: Floats) -> Floats:
    """Ranks of x [n] from 0; equals share their mean."""
    _, at, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[at]


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's correlation of a and b [n]; 0 where either is all alike."""
    x, y = (r - r.mean() for r in (ranks(a), ranks(b)))
    return float(x @ y / np.sqrt((x @ x) * (y @ y))) if x.any() and y.any() else 0.0
