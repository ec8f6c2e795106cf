"""What decides which starts come next, and the learner's side of it.

A sampler sees every episode that a batch brings, with the start it began from, and proposes a table of starts
after every update. Whoever collects draws from the newest table. Episodes are seen late and out of order
where workers collect: a sampler's estimates must not depend on which table an episode was drawn from.
"""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from robo_rl.starts import EVERY_START, Ended, StartTable, StoredStates


class Sampler(Protocol):
    """Which starts come next. All of its state is in `state_dict`: plain values, lists and arrays."""

    def propose(self, generator: np.random.Generator) -> StartTable: ...
    def observe(
        self,
        starts: np.ndarray,
        tasks: np.ndarray,
        success: np.ndarray,
        returns: np.ndarray,
        lengths: np.ndarray,
    ) -> None: ...
    def metrics(self) -> dict[str, float]: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> None: ...


class Uniform:
    """Every start alike: what a run without a sampler does, with the episodes seen."""

    def propose(self, generator: np.random.Generator) -> StartTable:
        return EVERY_START

    def observe(self, starts, tasks, success, returns, lengths) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class StartControl:
    """Owns the sampler, its generator and the table in force; itself the source of collectors in this
    process.

    `publish(table)`, if set, hands every new table to other processes.
    """

    def __init__(self, sampler: Sampler, seed: int, stored: "StoredStates | None" = None):
        self.sampler, self.stored = sampler, stored
        self.generator = np.random.default_rng([seed, 13])
        self.publish: Callable[[StartTable], None] = lambda table: None
        self.seconds = 0.0
        self.table = sampler.propose(self.generator)

    def newest(self) -> StartTable:
        """The table in force."""
        return self.table

    def observe(self, ended: "Ended | None") -> None:
        """Tell the sampler what became of episodes."""
        begin = time.perf_counter()
        if ended is not None and len(ended):
            self.sampler.observe(ended.starts, ended.tasks, ended.success, ended.returns, ended.lengths)
        self.seconds += time.perf_counter() - begin

    def renew(self) -> None:
        """The sampler's next table comes into force."""
        begin = time.perf_counter()
        self.table = self.sampler.propose(self.generator)
        self.publish(self.table)
        self.seconds += time.perf_counter() - begin

    def take_seconds(self) -> float:
        """Seconds that it took to decide, since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def metrics(self) -> dict[str, float]:
        """The sampler's own figures, and the table's: rows, share of uniform draws, effective number of rows
        (of the others)."""
        w = self.table.weights
        return self.sampler.metrics() | {
            "rows": float(len(w)),
            "uniform": self.table.uniform,
            "rows_effective": float(w.sum() ** 2 / (w**2).sum()) if w.any() else 0.0,
        }

    def state_dict(self) -> dict:
        return {
            "sampler": self.sampler.state_dict(),
            "generator": self.generator.bit_generator.state,
            **self.table.columns(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.generator.bit_generator.state = state["generator"]
        # earlier versions had no tasks
        self.table = StartTable(**{k: state[k] for k in self.table.columns() if k in state})
        self.publish(self.table)
