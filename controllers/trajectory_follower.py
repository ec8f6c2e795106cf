"""A trajectory as joint targets for a governor, one a period.

Where the governor makes the arm slower than the trajectory, time of the trajectory waits for the arm, so that
the path stays the same.
"""

import numpy as np

from controllers.contracts import Command
from controllers.governor import Governor
from controllers.model import ArmModel
from controllers.trajectory import Trajectory

BEHIND = 0.03  # rad that the governor's joints may lag before time of the trajectory waits
THERE = 1e-3  # rad between the governor's joints and the last point
REST = 0.02  # rad/s; slower, the arm has stopped


class TrajectoryFollower:
    """`step` before the governor's tick. meant: a spare model; source: who commands.

    passed: seconds of the trajectory; q [n] [rad]: its joints then."""

    def __init__(self, governor: Governor, meant: ArmModel, made: Trajectory, source: str):
        self.governor, self.meant, self.made, self.source, self.passed = governor, meant, made, source, 0.0
        self.q = made.at(0.0)

    def step(self, now: float, dt: float, q: np.ndarray) -> None:
        """Command the joints of the period of dt [s] that begins now. q [n] [rad]: measured."""
        at = self.governor.motion.joints if self.governor.motion.joints is not None else q
        if float(np.abs(self.q - at).max()) < BEHIND:
            self.passed = min(self.passed + dt, self.made.duration)
            self.q = self.made.at(self.passed)
        self.meant.place(self.q)
        self.governor.command(
            Command(
                self.source,
                now,
                self.governor.limits.frame,
                tuple(self.meant.pos),
                tuple(self.meant.quat),
                tuple(self.q.tolist()),
                "trajectory",
            ),
            now,
        )

    def is_there(self, q: np.ndarray, dq: np.ndarray) -> bool:
        """Whether the governor's joints are at the last point, and the measured ones [rad], [rad/s] rest near
        it."""
        last, at = self.made.points[-1], self.governor.motion.joints
        return (
            self.passed >= self.made.duration
            and at is not None
            and float(np.abs(last - at).max()) < THERE
            and bool((np.abs(last - q) <= self.made.tolerance["goal"]).all())
            and float(np.abs(dq).max()) < REST
        )
