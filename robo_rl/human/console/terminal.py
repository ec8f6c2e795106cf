"""Signals and the Enter key, as requests to the console."""

import os
import select
import signal
import sys


class TerminalRequests:
    """While open: SIGINT and SIGTERM ask for the end, SIGUSR1 and Enter in the terminal for new addresses."""

    stop = renew = False

    def __enter__(self):
        flags = {signal.SIGINT: "stop", signal.SIGTERM: "stop", signal.SIGUSR1: "renew"}
        self._before = {
            s: signal.signal(s, lambda *_, flag=flag: setattr(self, flag, True)) for s, flag in flags.items()
        }
        return self

    def __exit__(self, *error) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def wants_new_addresses(self) -> bool:
        """Whether somebody asked since the last call."""
        asked, self.renew = self.renew, False
        return asked or enter_pressed()


def enter_pressed() -> bool:
    """Whether a line waits in the terminal (which is read); False without one, or if it is another job's."""
    try:
        here = sys.stdin.isatty() and os.tcgetpgrp(0) == os.getpgrp()
        return here and bool(select.select([0], [], [], 0)[0]) and os.read(0, 4096) != b""
    except (OSError, ValueError, AttributeError):
        return False
