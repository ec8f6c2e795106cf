"""A leader arm: a second arm that the person moves, read from its topics or from any function that tells its
pose."""

import math
from collections.abc import Callable

import numpy as np

from robo_rl.errors import UserError
from robo_rl.geometry import conjugate, exp, from_matrix, log, multiply
from robo_rl.human.reading import Reading

SILENCE = 0.2  # s without a word after which a leader arm counts as gone


class LeaderArm:
    """A second arm that the person moves; `pose()` gives its tool (position [3], quaternion wxyz [4], gripper
    -1 .. 1) or None.

    The robot is to move as the leader does: twist = (the leader's motion that the robot has not made) / (full
    command of the axis), so that a fast one is caught up with. It engages only once the leader is within
    `near` [m] and `turned` [rad] of the robot's own tool, `align()`: taking over from another pose would make
    the robot jump. `full`: metres and radians of a full command. After a silence it must be aligned anew.
    away: how far off it was when last asked, [m] and [rad].
    """

    def __init__(
        self,
        pose: Callable[[], tuple | None],
        full: tuple[float, float],
        near: float = 0.02,
        turned: float = 0.2,
    ):
        self.pose, self.full, self.near, self.turned = pose, full, near, turned
        self.last, self.aligned, self.gone, self.away = None, False, False, (math.inf, math.inf)

    def align(self, position: np.ndarray, quat: np.ndarray) -> bool:
        """Whether the leader is where the robot's tool is; only then it engages."""
        now = self.pose()
        self.away = (
            (math.inf, math.inf)
            if now is None
            else (
                float(np.linalg.norm(np.asarray(now[0]) - position)),
                float(np.linalg.norm(log(multiply(np.asarray(now[1]), conjugate(quat))))),
            )
        )
        self.aligned = self.away[0] <= self.near and self.away[1] <= self.turned
        self.last = None if now is None else (np.asarray(now[0]), np.asarray(now[1]))
        return self.aligned

    def hint(self) -> str:
        """What the person is to do so that it leads."""
        return (
            "the leader arm is silent"
            if self.away[0] == math.inf
            else (
                f"bring the leader arm to the robot's tool: {self.away[0] * 100:.0f} cm and "
                f"{self.away[1] * 57.3:.0f} degrees away"
            )
        )

    def read(self) -> Reading:
        now = self.pose()
        if now is None:
            self.aligned, self.last, self.away = False, None, (math.inf, math.inf)
            return Reading(np.zeros(6, np.float32), 0.0, False)
        twist = np.zeros(6, np.float32)
        if self.aligned and self.last is not None:
            at, turn = self.last
            twist[:3] = (np.asarray(now[0]) - at) / self.full[0]
            twist[3:] = log(multiply(np.asarray(now[1]), conjugate(turn))) / self.full[1]
            twist = twist.clip(-1, 1)
            self.last = at + twist[:3] * self.full[0], multiply(exp(twist[3:] * self.full[1]), turn)
        return Reading(twist, float(now[2]), self.aligned)

    def close(self) -> None:
        self.gone = True


TOOL_STATE = ("ee_x", "ee_y", "ee_z", "ee_axis_x", "ee_axis_y", "ee_tilt_x", "ee_tilt_y")


def check_tool_state(names: tuple[str, ...]) -> None:
    """UserError unless a state of these entries has the tool's pose."""
    if missing := [n for n in TOOL_STATE if n not in names]:
        raise UserError(
            f"a leader arm needs a state that tells where the robot's tool is, this one has no {missing[0]}; "
            "use --sim mujoco"
        )


def tool_of(state: np.ndarray, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(position [3], quaternion wxyz [4]) of the tool in a state that has `ee_x ee_y ee_z`, two entries of
    the hand's first axis (`ee_axis_x ee_axis_y`) and two of its third, which points down (`ee_tilt_x
    ee_tilt_y`). UserError: it does not."""
    check_tool_state(names)
    at = {n: float(state[names.index(n)]) for n in TOOL_STATE}
    z = np.array([at["ee_tilt_x"], at["ee_tilt_y"], 0.0])
    z[2] = -math.sqrt(max(0.0, 1 - z @ z))
    x = np.array([at["ee_axis_x"], at["ee_axis_y"], 0.0])
    x[2] = -(x @ z) / z[2]
    x /= np.linalg.norm(x)
    return np.array([at["ee_x"], at["ee_y"], at["ee_z"]]), from_matrix(np.stack([x, np.cross(z, x), z], 1))
