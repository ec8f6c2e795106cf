"""A policy's chunks while the robot goes on: when to ask, what the next chunk must agree with, which action
runs now.

A chunk of increments is anchored to where the target was when its observation was made, so that rows which
never ran are made up and nothing is added twice. `chunking` says what happens where two chunks meet:

    naive   the new one is taken as it is, at once
    blend   the step is spread over rows (`schedule`)
    rtc     the new one is drawn to agree with the rows of the old one that will have run (`Prefix`), and
            blended
    trained as rtc, by a policy that was taught to go on from rows that are given, in place of guiding one
    that was not
"""

import math
from dataclasses import dataclass

import numpy as np

from controllers.schedule import ActionChunk, Latency, Schedule, inpainting_weights
from robo_rl.errors import UserError, choose, in_range

CHUNKING = ("naive", "blend", "rtc", "trained")
AGREEING = ("rtc", "trained")
PATIENCE = 0.25  # of a period; inference within it counts as immediate


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is left of the running chunk, for the inference of the next: rows [H, A] in the policy's units
    from the observation on, of which `delay` will have run when it comes and `end` are there."""

    rows: np.ndarray
    delay: int
    end: int

    def __post_init__(self) -> None:
        if (
            self.rows.ndim != 2
            or not 0 <= self.delay <= self.end <= len(self.rows)
            or not np.isfinite(self.rows).all()
        ):
            raise UserError(
                f"a prefix has finite rows [H, A] and 0 <= delay <= end <= H, got {self.rows.shape}, "
                f"{self.delay}, {self.end}"
            )

    @property
    def weights(self) -> np.ndarray:
        """[H], how far each row of the next chunk is bound to these."""
        return inpainting_weights(len(self.rows), self.delay, self.end)


class ChunkRunner:
    """Chunks of one policy on one robot. Times in seconds of any clock; `slot`: when the control period
    began.

    increments [A]: which axes are increments, of `scale` [A] for an action of 1; the others are absolute.
    every: rows after which the next chunk is to be there, 0: when they are all used. period: of a row. blend:
    rows over which a join is spread at least.
    """

    def __init__(
        self,
        period: float,
        increments: np.ndarray,
        scale: np.ndarray,
        chunking: str = "blend",
        every: int = 0,
        blend: int = 0,
    ):
        self.chunking, self.every, self.period = choose("--chunking", chunking, CHUNKING), every, period
        self.increments, self.scale = np.asarray(increments, bool), np.asarray(scale, float)
        in_range("every", every, 0, 10**6)
        # room for a whole action and what was lost
        step = np.where(self.increments, 2.1 * self.scale, math.inf) if chunking != "naive" else math.inf
        blend = 0 if chunking == "naive" else blend
        self.schedule, self.latency = (
            Schedule(period, len(self.scale), max_step=step, blend=blend),
            Latency(256),
        )
        self.sum = np.zeros(len(self.scale))  # of all increments that ran
        self.asked: np.ndarray | None = None  # that sum when the chunk being thought about was asked for
        self.asked_at = -math.inf
        self.rows = 0  # that ran since then

    def due(self, slot: float, blocks: bool = False) -> bool:
        """Whether to ask now: the rows that are left only just cover what inference has been taking, if the
        loop goes on meanwhile, or enough of them ran. blocks: the answer comes at once."""
        if self.asked is not None:
            return False
        chunk, delay = self.schedule.chunk, self.delay(blocks)
        if chunk is None:
            return True
        left = self.schedule.leftover(slot, len(chunk.rows))[1]
        used = len(chunk.rows) - left
        return left <= delay or 0 < self.every <= used + delay

    def delay(self, blocks: bool = False) -> int:
        """Periods that inference is expected to take."""
        worst = max(self.latency.seen, default=0.0)
        return 0 if blocks or worst <= PATIENCE * self.period else self.latency.steps(self.period)

    def ask(self, slot: float, now: float, blocks: bool = False) -> Prefix | None:
        """Note that a chunk is asked for -> what it must agree with; None: nothing. now [s]: the receiver's
        clock."""
        self.asked, self.asked_at, self.rows = self.sum.copy(), now, 0
        if self.chunking not in AGREEING or self.schedule.chunk is None:
            return None
        horizon = len(self.schedule.chunk.rows)
        rows, real = self.schedule.leftover(slot, horizon)
        if not real:
            return None
        steps = np.diff(rows, axis=0, prepend=self.sum[None])
        steps[real:] = 0.0
        rows = np.where(self.increments, steps / self.scale, rows)
        return Prefix(np.clip(rows, -1.0, 1.0), min(self.delay(blocks), real), real)

    def take(self, rows: np.ndarray, t0: float, slot: float, now: float) -> None:
        """A chunk that has come, of the observation of time t0. UserError: it is none.

        It begins as many rows in as ran since it was asked for: while none ran the target stood still, and
        nothing of it is missed."""
        width = len(self.scale)
        if rows.ndim != 2 or rows.shape[1] != width or not len(rows) or not np.isfinite(rows).all():
            raise UserError(
                f"the policy answered rows of shape {rows.shape}, or not finite ones; needed [E, {width}] (a "
                "server must be of this run: robo_rl serve RUN there)"
            )
        assert self.asked is not None  # an answer is to a question
        self.latency.add(max(now - self.asked_at, 0.0))
        rows = np.clip(rows, -1, 1).astype(float)
        rows = np.where(self.increments, self.asked + np.cumsum(rows * self.scale, 0), rows)
        self.asked = None
        self.schedule.add(ActionChunk(rows, max(t0, slot - self.rows * self.period)), slot)

    def row(self, slot: float) -> np.ndarray | None:
        """The action [A] in the policy's units for the period that begins; None: there is none. It counts as
        run by `ran`."""
        row = self.schedule.row(slot)
        self.rows += row is not None
        return (
            None
            if row is None
            else np.where(self.increments, (row.values - self.sum) / self.scale, row.values)
        )

    def ran(self, action: np.ndarray) -> None:
        """An action, or a part of one, ran."""
        self.sum += np.where(self.increments, np.asarray(action, float) * self.scale, 0.0)
