"""Action chunks on a clock: which row runs now, how a new chunk joins the last command, how late inference
was.

Row i of a chunk with observation time t0 [s] is meant for the control period [t0 + i dt, t0 + (i+1) dt). It
runs in that period or never: rows that are late are dropped and counted, and none runs twice. Axes as
everywhere: H rows in a chunk, A numbers in a row.

At a join the running chunk and the new one disagree by s. `Schedule` spreads it: row k after the join gets
s (1 - (k+1)/(B+1)) added, with B so large that this adds at most half of `max_step` per row; a step that is
still above `max_step` is cut and caught up later. Real-time chunking avoids the step where it arises, in
inference: the rows that will have run before the chunk arrives are known, and the chunk is drawn to agree
with them, by guiding any flow policy (`inpainting_weights`, `guided_velocity`). Flow convention: noise at
t=1, action at t=0, x0 = x - t v.
Source: Black et al. 2025, "Real-time execution of action chunking flow policies" (arXiv 2506.07339).
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from robo_rl.errors import UserError, choose, in_range

EPS = 1e-9  # of a control period; rounding of times


@dataclass(frozen=True, slots=True)
class ActionChunk:
    """rows [H, A] for the periods from t0 [s], the receiver's monotonic time of the observation they
    answer."""

    rows: np.ndarray
    t0: float
    version: int = 0

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or 0 in self.rows.shape:
            raise UserError(f"a chunk's rows must be [H, A], got shape {self.rows.shape}")
        if not np.isfinite(self.rows).all() or not math.isfinite(self.t0):
            raise UserError("a chunk must be finite")


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One row to run now; chunk and index say where it came from."""

    values: np.ndarray  # [A] as commanded, after the join was smoothed
    chunk: int
    index: int


class Schedule:
    """Chunks in, one row per control period out.

    counts: "executed", "late" (dropped because their period had passed), "superseded" (a newer chunk came
    first), "starved" (periods without a row), "stale_chunks" (every row late), "cut" (rows held back by
    `max_step`).
    """

    def __init__(self, dt: float, width: int, *, max_step: "float | np.ndarray" = math.inf, blend: int = 0):
        """dt [s] per row; max_step: largest change per row and axis of the command, one number or [A]; blend:
        rows over which a join is spread at least (0: as many as `max_step` asks for)."""
        in_range("dt", dt, 0, 10, open_low=True)
        self.dt, self.width, self.blend = dt, width, blend
        self.max_step = np.broadcast_to(np.asarray(max_step, float), (width,))
        if not (self.max_step > 0).all():
            raise UserError(f"max_step must be above 0, got {max_step}")
        self.counts: Counter[str] = Counter()
        self.chunk: ActionChunk | None = None
        self.number = -1  # of the chunk that runs
        self.last: np.ndarray | None = None  # the last command [A]
        self._next = 0  # first row that has not run
        self._offset = np.zeros(width)  # to add at the join
        self._fade = self._faded = 0
        self._period = -math.inf
        self._now = -math.inf

    def add(self, chunk: ActionChunk, now: float) -> int:
        """Take a chunk that arrived now. -> rows of it that are still in time.

        An older observation than the running chunk's is refused (counted as a stale chunk).
        """
        self._clock(now)
        if chunk.rows.shape[1] != self.width:
            raise UserError(f"rows must have {self.width} numbers, got {chunk.rows.shape[1]}")
        h = len(chunk.rows)
        first = max(0, self._index(chunk, now))
        if self.chunk is not None and self._period >= self._start(chunk, first) - EPS * self.dt:
            first += 1  # this period has had its row
        self.counts["late"] += min(first, h)
        if first >= h or (self.chunk is not None and chunk.t0 < self.chunk.t0):
            self.counts["stale_chunks"] += 1
            return 0
        if self.chunk is not None:
            self.counts["superseded"] += max(0, len(self.chunk.rows) - self._next)
        if self.last is not None:
            self._offset = self._planned(self._start(chunk, first), self.last) - chunk.rows[first]
            worst = float((np.abs(self._offset) / self.max_step).max())
            self._fade = min(max(self.blend, math.ceil(2 * worst) - 1), h - first)
        else:
            self._fade = 0
        self.chunk, self._next, self._faded, self.number = chunk, first, 0, self.number + 1
        return h - first

    def row(self, now: float) -> ScheduledRow | None:
        """The row for the period that holds now, once; None when there is none (the caller holds the last
        command)."""
        self._clock(now)
        c = self.chunk
        if c is None:
            self.counts["starved"] += 1
            return None
        i = self._index(c, now)
        if i < self._next:
            if i >= 0 and self._start(c, i) <= self._period + EPS * self.dt:
                return None  # its row ran already
            self.counts["starved"] += 1  # the chunk begins later
            return None
        if i >= len(c.rows):
            self.counts["late"] += len(c.rows) - self._next
            self._next = len(c.rows)
            self.counts["starved"] += 1
            return None
        self.counts["late"] += i - self._next
        values = self._blended(c, i)
        if self.last is not None:
            step = np.clip(values - self.last, -self.max_step, self.max_step)
            if (np.abs(values - self.last) > self.max_step * (1 + 1e-9)).any():
                self.counts["cut"] += 1
                values = self.last + step
        self._faded += i - self._next + 1
        self._next, self._period, self.last = i + 1, self._start(c, i), values
        self.counts["executed"] += 1
        return ScheduledRow(values, self.number, i)

    def leftover(self, now: float, horizon: int) -> tuple[np.ndarray, int]:
        """What is still to run from now on, for an inference that starts now -> (rows [horizon, A], how many
        are real).

        Rows past the end repeat the last one; their weight is 0 in `inpainting_weights`.
        """
        out = np.zeros((horizon, self.width))
        c = self.chunk
        if c is None:
            return out, 0
        i = max(self._next, self._index(c, now), 0)
        rows = c.rows[i : i + horizon]
        real = len(rows)
        out[:real] = rows
        out[real:] = rows[-1] if real else c.rows[-1]
        return out, real

    def _blended(self, c: ActionChunk, i: int) -> np.ndarray:
        k = self._faded + i - self._next
        if k >= self._fade:
            return c.rows[i].astype(float)
        return c.rows[i] + self._offset * (1 - (k + 1) / (self._fade + 1))

    def _planned(self, start: float, last: np.ndarray) -> np.ndarray:
        """What the running chunk would command in the period from `start`; `last` where it has no row."""
        if (c := self.chunk) is None:
            return last
        i = self._index(c, start)
        return self._blended(c, i) if self._next <= i < len(c.rows) else last

    def _index(self, c: ActionChunk, now: float) -> int:
        return math.floor((now - c.t0) / self.dt + EPS)

    def _start(self, c: ActionChunk, i: int) -> float:
        return c.t0 + i * self.dt

    def _clock(self, now: float) -> None:
        if not now >= self._now:
            raise UserError(f"time went backwards, from {self._now:.4f} s to {now:.4f} s")
        self._now = now


class Latency:
    """Delays of inference [s], the last `window` of them."""

    def __init__(self, window: int = 64):
        self.seen: deque[float] = deque(maxlen=window)
        self.total = 0

    def add(self, seconds: float) -> None:
        if not seconds >= 0:
            raise UserError(f"a delay must be at least 0 s, got {seconds}")
        self.seen.append(seconds)
        self.total += 1

    def steps(self, dt: float) -> int:
        """Control periods to expect: ceil of the largest recent delay over dt; 0 before the first."""
        return math.ceil(max(self.seen, default=0.0) / dt - EPS)

    def summary(self) -> dict[str, float]:
        """count, median, p90, p99 and max [s]."""
        if not self.seen:
            return {"count": 0}
        x = np.array(self.seen)
        return {
            "count": self.total,
            "median": float(np.median(x)),
            "p90": float(np.percentile(x, 90)),
            "p99": float(np.percentile(x, 99)),
            "max": float(x.max()),
        }


def anchored(
    rows: np.ndarray, anchor: np.ndarray, kind: Literal["absolute", "relative", "delta"]
) -> np.ndarray:
    """rows [H, A] as absolute commands. relative: each to `anchor`, the state in the observation that
    produced them;
    delta: each to the row before, the first to the anchor. (Anchoring to where the arm is now instead would
    add the motion during inference once more.)"""
    choose("kind of rows", kind, ("absolute", "relative", "delta"))
    if kind == "absolute":
        return rows
    return anchor + (np.cumsum(rows, 0) if kind == "delta" else rows)


# ---- real-time chunking ------------------------------------------------------------------------------------


def inpainting_weights(
    horizon: int, delay: int, end: int, shape: Literal["exp", "linear", "ones", "zeros"] = "exp"
) -> np.ndarray:
    """W [horizon], how far each row is bound to the previous chunk: 1 for i < delay (they will have run),
    then falling to 0 at `end` = rows of the previous chunk that are left; c = (end - i)/(end - delay + 1), W
    = c (e^c - 1)/(e - 1)."""
    if not 0 <= delay <= end <= horizon:
        raise UserError(f"needs 0 <= delay <= end <= horizon, got {delay}, {end}, {horizon}")
    choose("weights", shape, ("exp", "linear", "ones", "zeros"))
    i = np.arange(horizon)
    if shape == "zeros":
        return (i < delay).astype(float)
    if shape == "ones":
        return (i < end).astype(float)
    c = np.clip((end - i) / (end - delay + 1), 0, 1)
    w = c if shape == "linear" else c * np.expm1(c) / (math.e - 1)
    return np.where(i < delay, 1.0, np.where(i < end, w, 0.0))


def guidance_gain(t: float, most: float = 5.0) -> float:
    """min(most, t/(1-t) (t^2 + (1-t)^2)/t^2) at flow time t (1 noise, 0 action)."""
    if t <= 0 or t >= 1:
        return most
    return min(most, (t * t + (1 - t) ** 2) / (t * (1 - t)))


def guided_velocity(
    v: np.ndarray,
    x: np.ndarray,
    t: float,
    previous: np.ndarray,
    weights: np.ndarray,
    *,
    most: float = 5.0,
    vjp: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Velocity that pulls the chunk towards `previous` where weights [H] say so: v - g(t) J^T [W (Y - x0)],
    x0 = x - t v.

    v, x, previous [..., H, A]. vjp: J^T of x -> x0 from the policy's side; None takes J = 1, as LeRobot does.
    (In their convention of time the sign is +.)
    """
    if not weights.any():
        return v
    pull = weights[:, None] * (previous - (x - t * v))
    return v - guidance_gain(t, most) * (pull if vjp is None else vjp(pull))
