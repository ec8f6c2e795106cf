"""A periodic loop in real time: a clock that does not drift, deadlines that are counted, periods that are
measured."""

import gc
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from robo_rl.errors import in_range

# PM QoS: while it is open with 0 in it, cores do not go to sleep deeper than polling
AWAKE = "/dev/cpu_dma_latency"
NEWEST = 100_000  # periods whose median and p99 are told; a loop may go on for days
SKIP = 0.02  # s; a loop that is later than this gives the missed periods up instead of catching up in a burst


@dataclass(frozen=True, slots=True)
class Timing:
    """What a loop did. Times in seconds."""

    ticks: int
    late: int  # ticks that began after their period had ended
    skipped: int  # periods given up
    period_median: float
    period_p99: float
    period_max: float
    core_share: float  # CPU time of this thread over wall time

    def text(self) -> str:
        return (
            f"{self.ticks} ticks, period median {1e3 * self.period_median:.3f} ms, p99 "
            f"{1e3 * self.period_p99:.3f} ms, max {1e3 * self.period_max:.2f} ms, {self.late} late, "
            f"{self.skipped} skipped, {100 * self.core_share:.0f} % of a core"
        )


def real_time(
    tick: Callable[[], object],
    dt: float,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    cpu: Callable[[], float] = time.thread_time,
    going: Callable[[], bool] = lambda: True,
) -> Timing:
    """Call `tick` every dt [s] for a time, or while `going`. Period k begins at start + k dt: lateness does
    not add up.

    A tick that comes late is followed at once by the next, until the loop is back in time; from SKIP on the
    missed periods are skipped.
    """
    in_range("dt", dt, 0, 10, open_low=True)
    in_range("seconds", seconds, 0, math.inf)
    periods: deque[float] = deque(maxlen=NEWEST)
    start, busy, k, late, skipped = clock(), cpu(), 0, 0, 0
    ticks, before, longest = 0, math.nan, 0.0
    while k * dt < seconds - 1e-12 and going():
        due = start + k * dt
        now = clock()
        if now < due:
            sleep(due - now)
            now = clock()
        if now - due > SKIP:
            missed = int((now - due) / dt)
            skipped += missed
            k += missed
        elif now - due > dt:
            late += 1
        if ticks:
            periods.append(now - before)
            longest = max(longest, now - before)
        before = now
        tick()
        ticks += 1
        k += 1
    wall = max(clock() - start, 1e-9)
    told = np.array(periods or [dt])
    return Timing(
        ticks,
        late,
        skipped,
        float(np.median(told)),
        float(np.percentile(told, 99)),
        longest if periods else dt,
        (cpu() - busy) / wall,
    )


@contextmanager
def prompt() -> Iterator[bool]:
    """Real-time priority where the system permits, for this thread and for those it starts meanwhile (yields
    whether).

    DDS's threads need it as much as the loop does: on a busy machine messages otherwise wait for seconds. On
    an idle one cores sleep, and waking them costs more than a tick: where the system permits they are kept
    awake.
    """
    before, awake = None, None
    if hasattr(os, "sched_setscheduler"):
        with suppress(OSError):
            policy = os.sched_getscheduler(0), os.sched_getparam(0)
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
            before = policy
    with suppress(OSError):
        awake = os.open(AWAKE, os.O_WRONLY)
        os.write(awake, bytes(4))
    try:
        yield before is not None
    finally:
        if awake is not None:
            os.close(awake)
        if before is not None:
            os.sched_setscheduler(0, *before)


@contextmanager
def undisturbed() -> Iterator[bool]:
    """No garbage collection, quick thread switches and, where the system permits, real-time priority (yields
    whether)."""
    interval, collecting = sys.getswitchinterval(), gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(1e-4)
    try:
        with prompt() as real:
            yield real
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
        if collecting:
            gc.enable()
