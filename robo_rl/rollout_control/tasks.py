"""Which task comes next in a run over several: the weights of tasks of a `StartTable`.

    weights = (1 - LEAST) share of each task among DRAWS draws of the arm sampler + LEAST / M          arms
                                                            are tasks

The table is that of an inner sampler (any start alike, a pool, starts along demonstrations): the weights say
of which task a start is where any start comes next. LEAST keeps every task in play, so that what is forgotten
is seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from robo_rl.errors import UserError
from robo_rl.rollout_control.mixtures import PromptGdro, RuleReasoner
from robo_rl.rollout_control.sampler import Sampler
from robo_rl.rollout_control.samplers import Arms, Floats
from robo_rl.starts import StartTable

if TYPE_CHECKING:
    from robo_rl.rollout_control.pool import ArmSampler  # torch comes with its network

LEAST = 0.1  # share of episodes that is spread evenly over the tasks
DRAWS = 1000

TASK_SAMPLERS: dict[str, Callable[[int, int], "ArmSampler"]] = {  # name -> sampler of M tasks and a seed
    "rulereasoner": lambda k, seed: RuleReasoner(k, seed),
    "prompt_gdro": lambda k, seed: PromptGdro(k, seed),
}


class FixedMixture:
    """Tasks in fixed proportions `weights` [M]: an arm sampler that learns nothing but their success, an
    average over some 50 episodes."""

    def __init__(self, weights: Sequence[float]):
        w = np.asarray(weights, np.float64)
        if not (np.isfinite(w).all() and (w >= 0).all() and w.sum() > 0):
            raise UserError(
                "--tasks: weights must be at least 0 and one of them above, got "
                f"{', '.join(map(str, weights))}"
            )
        self.weights, self.rate = w / w.sum(), np.full(len(w), 0.5)

    def propose(self, n: int) -> Arms:
        return np.searchsorted(np.cumsum(self.weights), (np.arange(n) + 0.5) / n).astype(np.int64)

    def observe(self, arms: Arms, success: Floats, age: "Floats | int" = 0) -> None:
        n = np.bincount(arms, minlength=len(self.rate))
        mean = np.bincount(arms, success, len(self.rate)) / np.maximum(n, 1)
        self.rate += (1 - 0.98**n) * (mean - self.rate)

    def predict(self) -> Floats:
        return self.rate.copy()

    def state_dict(self) -> dict:
        return {"rate": self.rate.copy()}

    def load_state_dict(self, state: dict) -> None:
        self.rate = np.array(state["rate"])


class TaskSampler:
    """The `Sampler` of a run over the tasks `names`: `arms` says of which task any start is, `inner` all
    else."""

    def __init__(self, names: Sequence[str], arms: "ArmSampler", inner: Sampler):
        self.names, self.arms, self.inner = tuple(names), arms, inner
        self.weights = np.full(len(self.names), 1 / len(self.names))

    def propose(self, generator: np.random.Generator) -> StartTable:
        drawn = np.bincount(self.arms.propose(DRAWS), minlength=len(self.names)) / DRAWS
        self.weights = (1 - LEAST) * drawn + LEAST / len(self.names)
        return replace(self.inner.propose(generator), tasks=self.weights)

    def observe(
        self,
        starts: np.ndarray,
        tasks: np.ndarray,
        success: np.ndarray,
        returns: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        self.inner.observe(starts, tasks, success, returns, lengths)
        own = starts >= 0
        self.arms.observe(tasks[own], success[own].astype(np.float64))

    def metrics(self) -> dict[str, float]:
        """The inner sampler's; the weight of each task and the success that is expected of it."""
        told = self.inner.metrics()
        for name, weight, rate in zip(self.names, self.weights, self.arms.predict(), strict=True):
            told |= {f"weight/{name}": float(weight), f"expected/{name}": float(rate)}
        return told

    def state_dict(self) -> dict:
        return {"arms": self.arms.state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.arms.load_state_dict(state["arms"])
        self.inner.load_state_dict(state["inner"])
