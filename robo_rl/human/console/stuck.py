"""Which robots under their policy need help: those over their time, and those that stand still."""

from collections.abc import Iterator

import numpy as np

STILL = 0.02  # change of the normalised state over a second (RMS) below which a robot stands still


class StuckDetector:
    """limit: control steps of an episode after which a robot asks for help, and again after as many; period:
    of control [s];
    std: standard deviation of each state entry [S], or 1."""

    def __init__(self, num_robots: int, limit: int, period: float, std):
        self.limit, self.period, self.std = limit, period, std
        self._before: list[tuple | None] = [None] * num_robots  # (steps, state) a second ago
        self._due = [limit] * num_robots

    def begin_episode(self, i: int) -> None:
        self._before[i], self._due[i] = None, self.limit

    def pause(self, i: int) -> None:
        """Robot i is not under its policy: what it did before says nothing."""
        self._before[i] = None

    def check(self, i: int, steps: int, state: np.ndarray) -> Iterator[str]:
        """Reasons why robot i needs help after `steps` control steps of its episode, with `state` [S]."""
        if steps >= self._due[i]:
            self._due[i] = steps + self.limit
            yield f"not done after {steps * self.period:.1f} s"
        before = self._before[i]
        if before is None or steps - before[0] >= round(1 / self.period):
            if before is not None:
                change = (state - before[1]) / np.maximum(self.std, 1e-3)
                if float(np.sqrt(np.mean(change**2))) < STILL:
                    yield "it stands still"
            self._before[i] = (steps, state.copy())
