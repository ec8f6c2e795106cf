"""The record of a governor's verdicts: how often each contract was violated, what came first, and whether it is too often."""

from collections import Counter, deque

from controllers.contracts import Verdict
from controllers.limits import Limits


class Violations:
    """counts: by contract. first: the first of all, with its time [s]."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.counts: Counter[str] = Counter()
        self.first: tuple[float, Verdict] | None = None
        self._recent: deque[float] = deque()  # times of those that count towards the limit

    def add(self, verdict: Verdict, now: float, counted: bool) -> bool:
        """Keep one; counted: it counts towards the limit -> whether more than `violations` of those came within `window`."""
        self.counts[verdict.contract] += 1
        if self.first is None:
            self.first = now, verdict
        if not counted:
            return False
        recent = self._recent
        recent.append(now)
        while recent[0] < now - self.limits.window:
            recent.popleft()
        if len(recent) <= self.limits.violations:
            return False
        recent.clear()
        return True

    def forgive(self) -> None:
        """Count towards the limit from now on."""
        self._recent.clear()
