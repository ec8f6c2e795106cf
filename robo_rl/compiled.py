"""Functions that numba compiles: kept on disk, and announced when they really are compiled."""

import sys
from collections.abc import Callable
from typing import Any


def kept(*signatures: str, **options) -> Callable[[Callable], Callable]:
    """`numba.njit` with NumPy's rules for division, for these types alone where any are named; the machine
    code is kept on disk where there is a place that can be written."""
    import numba

    njit: Any = numba.njit  # its overloads know no list of signatures

    def compiled(f: Callable) -> Callable:
        try:
            return njit(*signatures, cache=True, error_model="numpy", **options)(f)
        except RuntimeError:  # no place to keep it
            return njit(*signatures, error_model="numpy", **options)(f)

    return compiled


class Announcement:
    """Until `close`: says on stderr, once, that `what` is being compiled; nothing if all of it is loaded from
    disk."""

    def __init__(self, what: str):
        from numba.core import event

        announcement = self

        class Listener(event.Listener):
            def on_start(self, details) -> None:
                if not announcement.told:
                    announcement.told = True
                    print(f"compiling {what}, once on this machine: some 10 s", file=sys.stderr, flush=True)

            def on_end(self, details) -> None:
                pass

        self.told, self._event, self._listener = False, event, Listener()
        event.register("numba:compile", self._listener)

    def close(self) -> None:
        self._event.unregister("numba:compile", self._listener)
