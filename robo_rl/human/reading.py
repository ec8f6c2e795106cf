"""What a person's device says at one time, and what that commands on an env's axes."""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from robo_rl.types import ActionAxis, ControlSpec

GRIP_TIME = 0.5  # s that a gripper takes to open or close
TARGET_RATE = 1.0  # of a position's range of -1 .. 1, in a second at full deflection


@dataclass(frozen=True, slots=True)
class Reading:
    """What a device says now: `twist[6]` in [-1, 1] (translation, rotation), gripper -1 (close) .. 1,
    engaged: the person acts; marks: success, failure, discard, stop, as they were pressed since the last
    reading.
    """

    twist: np.ndarray
    grip: float
    engaged: bool
    marks: tuple[str, ...] = ()


class Device(Protocol):
    """gone: it was unplugged, or does not answer; it never engages again until it is opened anew."""

    @property
    def gone(self) -> bool: ...
    def read(self) -> Reading: ...
    def close(self) -> None: ...


def drive_of(axis: ActionAxis) -> Literal["grip", "stick", "target"]:
    """How a person commands an axis: grip opens and closes in turn; stick is the deflection itself; target
    moves by it (a position)."""
    if axis.kind == "absolute" and any(word in axis.name for word in ("grip", "finger")):
        return "grip"
    return "target" if axis.kind == "absolute" and axis.unit in ("m", "rad", "deg") else "stick"


def stands(axis: ActionAxis) -> bool:
    """Whether a robot without deflection stands still on an axis; a torque of 0 is a command like others."""
    return drive_of(axis) != "stick" or axis.kind in ("delta", "rate")


def command(
    reading: Reading, spec: ControlSpec, speed: float = 1.0, last: np.ndarray | None = None
) -> np.ndarray:
    """float32[A] of a reading: the gripper on its axis, the twist on the others in turn. last [A]: executed
    before, from which positions go on, by half their range a second at most."""
    out, k = np.zeros(len(spec.axes), np.float32), 0
    for j, axis in enumerate(spec.axes):
        how = drive_of(axis)
        if how == "grip":
            out[j] = reading.grip
            continue
        share, k = speed * reading.twist[k] if k < 6 else 0.0, k + 1
        out[j] = (
            share
            if how == "stick"
            else (0.0 if last is None else last[j]) + TARGET_RATE * spec.period * share
        )
    return out.clip(-1, 1)
