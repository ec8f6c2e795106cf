"""PEAR: weights of supervised learning for the RL that follows it (arXiv 2602.01058, by an unofficial
implementation).

    d_j = clip(log pi(chunk j) - log beta(chunk j), -0.08, 0.3)          beta: who showed the demonstrations
    w_i = clip(prod over the chunks j that follow chunk i of gamma exp(d_j), 0.1, 10)
    loss = sum w_i loss_i / sum w_i

A demonstrated chunk counts by how likely what follows it is under the policy that learns: RL will play its
own continuations, and a first step whose continuation the policy cannot make is a step that RL cannot use.
Weights are numbers; no gradient goes through them.
Where we differ: a flow has no density at hand, so log pi is minus the mean squared error of the executed
entries of what the policy does without exploring, in standard deviations of the demonstrated actions (a
Gaussian of variance 1/2, as a mean over entries); and the loss is divided by the sum of weights.
"""

import numpy as np
from numpy.typing import NDArray

DOWN, UP, GAMMA = -0.08, 0.3, 0.999
LEAST, MOST = 0.1, 10.0  # of a weight


def suffix_weights(log_ratio: NDArray, last: NDArray, block: int, gamma: float = GAMMA) -> NDArray:
    """Weights [n] of the chunks that begin at each of n frames; `last` [n]: the last frame of the episode of
    each.

    The chunks that follow the one of frame i begin at i + block, i + 2 block, … up to last[i].
    """
    d, log_w = np.clip(log_ratio, DOWN, UP) + np.log(gamma), np.zeros(len(log_ratio))
    for i in range(len(d) - block - 1, -1, -1):
        if i + block <= last[i]:
            log_w[i] = d[i + block] + log_w[i + block]
    return np.clip(np.exp(log_w), LEAST, MOST)
