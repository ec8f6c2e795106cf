"""Steps at their times, for a person in the loop."""

import time
from collections.abc import Callable


class Pace:
    """One step per `period` s; 0: at once. Who is late by more than five periods begins anew instead of
    hurrying."""

    def __init__(
        self,
        period: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.period, self.clock, self.sleep, self.due = period, clock, sleep, clock()

    def wait(self) -> None:
        """Sleep until the next step is due."""
        now = self.clock()
        self.due = max(self.due + self.period, now - 5 * self.period)
        if self.due > now:
            self.sleep(self.due - now)
