"""A simulator that hangs in this process, where nothing can kill it alone: the user is told what is waited
for, Ctrl-C ends the command even inside code that no signal reaches, and the wait has an end.

Workers are processes of their own, which their pool kills and starts anew (`robo_rl.runtime.process_pool`).
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import Self

from gymnasium.vector import VectorEnv

PATIENCE = 10  # times `hang` until the command ends
LOOK = 1.0  # s between two looks
CALLS = ("step", "reset")
STOPS = (signal.SIGINT, signal.SIGTERM)


def env_call(frame: "FrameType | None") -> "FrameType | None":
    """The outermost call of an env's step or reset in the stack of `frame`."""
    found = None
    while frame is not None:
        if frame.f_code.co_name in CALLS and isinstance(frame.f_locals.get("self"), VectorEnv):
            found = frame
        frame = frame.f_back
    return found


class StepWatch:
    """While open, in the main thread: a call of an env's step or reset that takes longer than `hang` [s] is
    told in one line, and ends the process: after PATIENCE times that with exit status 2, on SIGINT or SIGTERM
    at once; `remedy` is the end of the last line. Time in which the process was stopped (Ctrl-Z) does not
    count."""

    def __init__(self, hang: float, remedy: str = ""):
        self.hang, self.remedy = hang, remedy

    def __enter__(self) -> Self:
        self.thread = None
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are not ours
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.before = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        if self.before != -1:  # a notebook's loop has it
            signal.set_wakeup_fd(self.before)
        self.main = threading.get_ident()
        self.thread = threading.Thread(target=self._look, daemon=True, name="step watch")
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.thread is None:
            return
        if self.before == -1:
            signal.set_wakeup_fd(-1)
        os.write(self.writer, b"\0")  # no signal has this number
        self.thread.join()
        os.close(self.reader)
        os.close(self.writer)

    def _look(self) -> None:
        call, waited, told, stop, last = None, 0.0, False, 0, time.monotonic()
        while True:
            came = b""
            if select.select([self.reader], [], [], LOOK)[0]:
                came = os.read(self.reader, 64)
            if 0 in came:
                return
            stop = next((number for number in came if number in STOPS), stop)
            now, frame = time.monotonic(), sys._current_frames().get(self.main)
            waited, last = waited + min(now - last, 2 * LOOK), now
            if (current := env_call(frame)) is not call or call is None:
                call, waited, told, stop = current, 0.0, False, stop * bool(came)
            elif waited > self.hang:
                assert frame is not None
                self._tell(call, frame, waited, told, stop)
                told = True
            frame = current = None  # frames keep what is in them alive

    def _tell(self, call: FrameType, frame: FrameType, waited: float, told: bool, stop: int) -> None:
        env = call.f_locals["self"]
        name = getattr(getattr(env, "spec", None), "id", type(env).__name__)
        at = f"{call.f_code.co_name} of {name}"
        where = f"in {frame.f_code.co_filename}, line {frame.f_lineno}"
        most = PATIENCE * self.hang
        if stop:
            _end(f"interrupted; {at} had not returned for {waited:.0f} s, {where}{self.remedy}", 128 + stop)
        if waited > most:
            _end(f"{at} has not returned for {waited:.0f} s: the simulator hangs, {where}{self.remedy}", 2)
        if not told:
            print(
                f"\nwarning: {at} takes long, {waited:.0f} s so far, {where}; Ctrl-C ends the wait, "
                f"which ends by itself after {most:.0f} s (ten times --hang)",
                file=sys.stderr,
                flush=True,
            )


def _end(words: str, code: int) -> None:
    """End the process from this thread: the main one does not come back."""
    with contextlib.suppress(OSError, ValueError):
        print(f"\nrobo_rl: {words}", file=sys.stderr, flush=True)
    os._exit(code)
