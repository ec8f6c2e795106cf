"""Rollout-GDRO: how many episodes a bin of difficulty gets, learnt as a bandit under an exact budget. B bins,
arms n_min..n_max.

    choose n_b to maximise sum q_b J_b(n_b)  with  sum q_b n_b = the mean number of episodes

q_b is the share of groups in bin b, J_b what n episodes of it are worth. Source: arXiv 2601.19280 (Prompt-
and Rollout-GDRO); code kishanpb/verl-gdro.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from robo_rl.errors import UserError, in_range
from robo_rl.rollout_control.samplers import draws, restore, state_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def best_plan(worth: Floats, groups: Ints, budget: int, low: int) -> Ints:
    """The arms n_b [B] with the greatest sum of groups_b worth[b, n_b - low], and exactly sum groups_b n_b =
    budget episodes.

    `worth` [B, arms], arm j being low + j episodes a group; `groups` [B] groups of each bin in this round.
    Dynamic programming over bins and episodes: O(B budget arms). A bin without groups gets `low`. Where no
    plan spends exactly the budget, the nearest spend below it does.
    """
    bins, arms = worth.shape
    if low * int(groups.sum()) > budget:
        raise UserError(f"{budget} episodes are fewer than {low} for each of {int(groups.sum())} groups")
    value, choice = np.full(budget + 1, -np.inf), np.zeros((bins, budget + 1), np.int64)
    value[0] = 0.0
    for b in range(bins):
        new = np.full(budget + 1, -np.inf)
        for j in range(arms if groups[b] else 1):
            cost = int(groups[b]) * (low + j)
            if cost > budget:
                break
            candidate = np.full(budget + 1, -np.inf)
            candidate[cost:] = value[: budget + 1 - cost] + groups[b] * worth[b, j]
            better = candidate > new
            new[better], choice[b][better] = candidate[better], j
        value = new
    left = int(np.flatnonzero(np.isfinite(value)).max())
    plan = np.zeros(bins, np.int64)
    for b in range(bins - 1, -1, -1):
        plan[b] = low + choice[b, left]
        left -= int(groups[b]) * plan[b]
    return plan


@dataclass(slots=True)
class RolloutGdro:
    """EXP3.P over the arms of every bin, planned by `best_plan`, with a shadow price for episodes.

        loss_b(n) = -J + mu n                        J of the arm that was played
        estimate += (loss of the played arm) / (its probability + ix),  log-weights = -eta estimate
        pi = (1 - gamma) softmax(log-weights) + gamma / arms
        mu <- max(0, mu + 0.05 (spent mean - mean)),    the spent mean an average with weight `ema`

    The plan has the greatest sum over bins of log pi + Gumbel noise: without a budget a draw from pi
    (Gumbel-max), with one it is met exactly in every round. Source: arXiv 2601.19280.
    Where we differ: `ix` of EXP3-IX bounds the estimate in place of EXP3.P's bonus, and the noise takes the
    place of drawing and repairing.
    """

    bins: int
    mean: int
    low: int = 2
    eta: float = 0.1
    gamma: float = 0.1
    ix: float = 0.05
    ema: float = 0.3
    seed: int = 0
    calls: int = 0
    mu: float = 0.0
    spent: float = field(init=False)
    log_weights: Floats = field(init=False)

    def __post_init__(self) -> None:
        in_range("low", self.low, 1, self.mean)
        for name in ("gamma", "ema"):
            in_range(name, getattr(self, name), 0, 1)
        self.spent = float(self.mean)
        self.log_weights = np.zeros((self.bins, 3 * self.mean - self.low + 1))

    def chances(self) -> Floats:
        """Probability of each arm [B, arms]."""
        w = np.exp(self.log_weights - self.log_weights.max(1, keepdims=True))
        return (1 - self.gamma) * w / w.sum(1, keepdims=True) + self.gamma / w.shape[1]

    def propose(self, groups: Ints) -> Ints:
        """Episodes a group [B] for `groups` [B] groups of each bin: sum groups_b n_b = mean sum groups_b,
        exactly where it can be."""
        rng = draws(self.seed, self.calls)
        self.calls += 1
        drawn = (np.log(self.chances()) + rng.gumbel(size=self.log_weights.shape)) / np.maximum(groups, 1)[
            :, None
        ]
        return best_plan(drawn, groups, self.mean * int(groups.sum()), self.low)

    def observe(self, n: Ints, worth: Floats, groups: Ints) -> None:
        """`worth` [B]: what the n [B] episodes of a group of each bin were worth (J in [0, 1], such as the
        mean |A| of the group)."""
        played = np.flatnonzero(groups > 0)
        arms = n[played] - self.low
        p = self.chances()[played, arms]
        loss = -worth[played] + self.mu * n[played]
        self.log_weights[played, arms] -= self.eta * loss / (p + self.ix)
        self.log_weights -= self.log_weights.max(1, keepdims=True)
        spent = float(n[played] @ groups[played]) / float(groups[played].sum())
        self.spent += self.ema * (spent - self.spent)
        self.mu = max(0.0, self.mu + 0.05 * (self.spent - self.mean))

    def state_dict(self) -> dict:
        return state_of(self, ("calls", "mu", "spent", "log_weights"))

    def load_state_dict(self, state: dict) -> None:
        restore(self, ("calls", "mu", "spent", "log_weights"), state)
