"""Beside a run with stale data: an alarm and a smaller bound on staleness once the samples of its updates
stop counting."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from robo_rl.runtime.ledger import Ledger


@dataclass(slots=True)
class EssGuard:
    """Steps the bound on staleness down by one once the effective sample size per sample stays below `least`
    for `patience` updates.

    Never below `floor`; after a step it counts anew. An update without stale data has nothing to say and ends
    the count.
    """

    least: float = 0.1
    patience: int = 10
    floor: int = 1
    low: int = 0  # updates in a row

    def observe(self, ess_frac: float | None, staleness: int) -> int:
        """The bound that holds from now on; `ess_frac` of the last update's weights, None where none was
        stale."""
        self.low = self.low + 1 if ess_frac is not None and not ess_frac >= self.least else 0
        if self.low < self.patience:
            return staleness
        self.low = 0
        return max(self.floor, staleness - 1) if staleness > self.floor else staleness

    def state_dict(self) -> dict:
        return {"low": self.low}

    def load_state_dict(self, state: dict) -> None:
        self.low = int(state["low"])


class Bounded(Protocol):
    """A feed whose ledger has a bound on staleness; None: its data are never stale."""

    @property
    def ledger(self) -> Ledger | None: ...


class StalenessGuard:
    """Steps a feed's bound down by `EssGuard`'s rule; the bound it came to goes into the checkpoint."""

    def __init__(self, say: Callable[..., None], rule: EssGuard | None = None):
        self.say, self.rule, self.bound = say, rule or EssGuard(), -1  # -1: the run's own

    def begin(self, feed: Bounded) -> None:
        """Bring the bound that was reached before a resume to a new feed."""
        if feed.ledger is not None and 0 <= self.bound < feed.ledger.staleness:
            feed.ledger.bound(self.bound)

    def after(self, feed: Bounded, metrics: dict[str, float]) -> None:
        """An update with these metrics is published."""
        if feed.ledger is None:
            return
        bound = self.rule.observe(metrics.get("ess_frac"), feed.ledger.staleness)
        if bound < feed.ledger.staleness:
            self.say(
                f"the effective sample size of stale data was below {self.rule.least:g} of the samples for "
                f"{self.rule.patience} updates: data may be {bound} versions old from now on, not "
                f"{feed.ledger.staleness}; --max-staleness {bound} begins so",
                "warning",
            )
            feed.ledger.bound(bound)
            self.bound = bound

    def state_dict(self) -> dict:
        return {"bound": self.bound, "rule": self.rule.state_dict()}

    def load_state_dict(self, state: dict | None) -> None:
        """Of a checkpoint from before it: nothing."""
        if state:
            self.bound = int(state["bound"])
            self.rule.load_state_dict(state["rule"])
