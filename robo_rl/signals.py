"""How a signal stops long work: as a flag that the work looks at."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """The numbers of the SIGINT and SIGTERM that came; empty until one does. In the main thread alone."""
    came: list[int] = []
    before = {
        s: signal.signal(s, lambda number, _: came.append(number)) for s in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignal:
    """While open: turns the first SIGINT or SIGTERM into a flag; a second one ends the process at once.

    The same signal again within a second is the same press: terminals and service managers tell whole process
    groups, and the guard passes on what it is told.
    """

    asked = 0  # number of the signal
    at = 0.0

    @property
    def code(self) -> int:
        """Exit status of a process that a signal ended."""
        return 128 + self.asked

    def __enter__(self) -> Self:
        self._before = {}
        # handlers belong to it; elsewhere the flag is set by hand
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def _ask(self, number: int, frame) -> None:
        if self.asked:
            if number != self.asked or time.monotonic() - self.at > 1.0:
                raise KeyboardInterrupt
            return
        self.asked, self.at = number, time.monotonic()
        tell(
            "\nstopping: after the decision, update or evaluation that is under way (with --periodic, or a "
            "simulator on a device, the rollout) a checkpoint is saved; press again to end at once, without"
        )


def tell(words: str) -> None:
    """Print a line on stderr from a handler, which may have come in the middle of another line."""
    try:
        try:
            print(words, file=sys.stderr, flush=True)
        except RuntimeError:  # a stream takes nothing more while it writes
            os.write(2, f"{words}\n".encode())
    except OSError:
        # whoever read it is gone, as where the parent was killed: the work is saved all the same
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        os.close(nowhere)
