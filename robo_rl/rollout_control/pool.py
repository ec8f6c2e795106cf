"""A pool of starts as the arms of a sampler: what `--starts NAME` plays.

    arms  = sampler.propose(rows)              robo_rl.rollout_control.samplers, .predictors, .v0, .mixtures
    table = the starts of these arms, and with probability `uniform` any start of the task

A task has 2^31 starts, of which hardly one would come twice. A pool of K of them, the same for the whole run,
is played often enough to be known; the uniform share keeps all others in play, and its episodes are not
counted.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from robo_rl.rollout_control.mixtures import PromptGdro
from robo_rl.rollout_control.predictors import Dots
from robo_rl.rollout_control.samplers import Arms, Dps, Floats, Mopps, RoundRobin, Sfl, Vade
from robo_rl.rollout_control.v0 import V0
from robo_rl.starts import StartTable, hashed, own_starts

BINS = 5  # of success, in the metrics


class ArmSampler(Protocol):
    """What chooses arms (`robo_rl.rollout_control.samplers`)."""

    def propose(self, n: int) -> Arms: ...
    def observe(self, arms: Arms, success: Floats, age: "Floats | int" = 0) -> None: ...
    def predict(self) -> Floats: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> None: ...


# name -> sampler of K arms, seed and the first observations [K,D] of their starts
ARM_SAMPLERS: dict[str, Callable[[int, int, Floats], ArmSampler]] = {
    "pool": lambda k, seed, features: RoundRobin(k, seed),
    "vade": lambda k, seed, features: Vade(k, seed),
    "mopps": lambda k, seed, features: Mopps(k, seed, pool=2),
    "dps": lambda k, seed, features: Dps(k, seed),
    "sfl": lambda k, seed, features: Sfl(k, seed, candidates=128, tries=3, keep=32, period=8),
    "prompt_gdro": lambda k, seed, features: PromptGdro(k, seed),
    "dots": lambda k, seed, features: Dots(features, seed),
    "v0": lambda k, seed, features: V0(features, seed),
}
FROM_OBSERVATIONS = ("dots", "v0")


def pool_ids(k: int, seed: int) -> np.ndarray:
    """K starts of a task, int64 in 0 .. 2^31-1, all different."""
    ids = np.unique(own_starts(hashed(seed, 17, np.arange(2 * k))))
    return np.random.default_rng([seed, 17]).permutation(ids)[:k]


class PoolSampler:
    """The `Sampler` of a run: `ids` [K] are the pool, `rows` arms make a table, `uniform` is the share of any
    start of the task."""

    def __init__(self, ids: np.ndarray, arms: ArmSampler, rows: int, uniform: float):
        self.arms, self.rows, self.uniform = arms, rows, uniform
        self.ids, self.order = np.asarray(ids, np.int64), np.argsort(ids)
        self.played, self.proposed = np.zeros(BINS), np.zeros(0, np.int64)

    def propose(self, generator: np.random.Generator) -> StartTable:
        self.proposed, weights = np.unique(self.arms.propose(self.rows), return_counts=True)
        return StartTable(self.ids[self.proposed], weights.astype(np.float64), self.uniform)

    def observe(
        self,
        starts: np.ndarray,
        tasks: np.ndarray,
        success: np.ndarray,
        returns: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        at = np.minimum(np.searchsorted(self.ids, starts, sorter=self.order), len(self.ids) - 1)
        arms = self.order[at]
        known = self.ids[arms] == starts
        self.played = np.bincount(self.bins()[arms[known]], minlength=BINS) / max(1, int(known.sum()))
        self.arms.observe(arms[known], success[known].astype(np.float64))

    def bins(self) -> np.ndarray:
        """Which fifth of [0, 1] the predicted success of each arm lies in, int64 [K]."""
        return np.minimum((self.arms.predict() * BINS).astype(np.int64), BINS - 1)

    def metrics(self) -> dict[str, float]:
        """Shares of the pool, and of the last round's episodes in it, by predicted success in fifths; the
        mean prediction."""
        pool = np.bincount(self.bins(), minlength=BINS) / len(self.ids)
        return (
            {f"pool_{i}": float(pool[i]) for i in range(BINS)}
            | {f"played_{i}": float(self.played[i]) for i in range(BINS)}
            | {"predicted": float(self.arms.predict().mean())}
        )

    def state_dict(self) -> dict:
        return {"arms": self.arms.state_dict(), "played": self.played.copy()}

    def load_state_dict(self, state: dict) -> None:
        self.arms.load_state_dict(state["arms"])
        self.played = np.array(state["played"])
