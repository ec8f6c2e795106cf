"""What a policy that learnt from a data set of one arm sees and commands, in the data set's own units.

A row of its chunk is joint angles, their increments or speeds, or increments of the tool's pose, and the
gripper. It runs for one period of the data, which `Bridge` cuts into control periods: absolute angles are
approached in equal parts, increments are divided. Joint targets go as fast as the joints' limits let them,
never more than JOINT_LEAD before the measured joint, and never a step of the tool that the governor would
cut. Absolute angles that are faster are followed late; increments that are faster are cut.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from controllers.bridge import JOINT_LEAD, GripperCommand
from controllers.chunking import Prefix
from controllers.data_columns import GRIPPER, MOVES, SPEED, TOOL, UNUSED, Column
from controllers.limits import Limits
from controllers.model import ArmModel
from controllers.observation import ObservationBuffer
from controllers.robot import Robot
from robo_rl.errors import UserError, in_range

TURNS = 4 * math.pi  # rad: range of a joint that turns without end
STEP_SHARE = 0.9  # of the governor's largest step, for the tool
BLEND = 4  # rows over which two chunks of absolute angles are joined
FAR = 0.5  # of a column's range in the data beyond it
BEYOND = 2.0  # of half a joint's range from its middle, from which on an absolute target is no target
DEGREES = 180 / math.pi
# s: the longest control period; commands that are rarer would be late for the governor of a slow data set
CONTROL = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DataInterface:
    """state, action: the columns of a policy's state and of its rows; row [s]: how long a row runs; slow:
    control periods of it;
    views: cameras; fit(picture uint8 [h, w, 3]): as the policy takes it; reach: limit of the tool [m/s],
    [rad/s], for its increments."""

    robot: Robot
    state: tuple[Column, ...]
    action: tuple[Column, ...]
    row: float
    reach: tuple[float, float]
    views: tuple[str, ...] = ()
    fit: Callable[[np.ndarray], np.ndarray] = np.asarray
    image_size: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """[S] within which the data's states are; (): nobody knows."""
    cut = 0  # pictures come as they are to `fit`

    def __post_init__(self) -> None:
        in_range("period of the data", self.row, 0.001, 1.0)

    @property
    def slow(self) -> int:
        return max(1, math.ceil(self.row / CONTROL - 1e-6))

    @property
    def period(self) -> float:
        """Of control [s]."""
        return self.row / self.slow

    @property
    def moves_tool(self) -> bool:
        return any(c.what in MOVES for c in self.action)

    @property
    def has_gripper(self) -> bool:
        return any(c.what == GRIPPER for c in self.action)

    @property
    def state_names(self) -> tuple[str, ...]:
        """What `ObservationBuffer` is to wait for."""
        return ("gripper",) if any(c.what == GRIPPER for c in self.state) else ("joint1",)

    def periods(self, limits: Limits) -> int:
        """Control periods of a row."""
        return self.slow

    @property
    def increments(self) -> np.ndarray:
        """bool [A], which columns add up."""
        return np.array([c.kind != "absolute" for c in self.action])

    def ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """(middle, half) [A] of each column in rad, m and openings: of an absolute one its range, of an
        increment the most in a row."""
        robot, out = self.robot, []
        for c in self.action:
            if c.what in MOVES:
                out.append((0.0, self.row * self.reach[MOVES.index(c.what) // 3]))
            elif c.what == GRIPPER:
                out.append((0.5, 0.5))
            elif c.what == UNUSED:
                out.append((0.0, 1e6))
            else:
                k = robot.joints.index(c.what)
                low, high = max(robot.lower[k], -TURNS), min(robot.upper[k], TURNS)
                out.append(
                    ((low + high) / 2, (high - low) / 2)
                    if c.kind == "absolute"
                    else (0.0, self.row * robot.velocity[k])
                )
        middle, half = np.array(out).T
        return middle, half

    @property
    def scale(self) -> np.ndarray:
        """[A] of an action of 1, for `ChunkRunner`."""
        return np.where(self.increments, self.ranges()[1], 1.0)

    @property
    def blend(self) -> int:
        return 0 if self.increments.any() else BLEND

    def _lines(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([c.factor for c in self.action]), np.array([c.offset for c in self.action])

    def shares(self, rows: np.ndarray) -> np.ndarray:
        """Rows [E, A] of the policy as shares of the columns' ranges, beyond -1 .. 1 where they ask for
        more. UserError: an absolute one is far beyond it."""
        if rows.ndim != 2 or rows.shape[1] != len(self.action):
            return rows  # `ChunkRunner` says what is wrong with them
        (middle, half), (factor, offset) = self.ranges(), self._lines()
        shares = ((rows - offset) / factor - middle) / half
        far = (np.abs(shares) > BEYOND).any(0) & ~self.increments
        for k in np.flatnonzero(far & np.array([c.what != UNUSED for c in self.action])).tolist():
            low, high = (middle[k] + np.array((-1, 1)) * half[k]) * factor[k] + offset[k]
            raise UserError(
                f"the policy asks for {self.action[k].name} at {rows[np.abs(shares[:, k]).argmax(), k]:.4g}, "
                f"which goes from {low:.4g} to {high:.4g}: is its unit another (--units)?"
            )
        return shares

    def numbers(self, shares: np.ndarray) -> np.ndarray:
        """The inverse of `shares`."""
        (middle, half), (factor, offset) = self.ranges(), self._lines()
        return (middle + half * shares) * factor + offset

    def prefix(self, prefix: Prefix | None) -> Prefix | None:
        """What the next chunk must agree with, in the policy's numbers."""
        return None if prefix is None else replace(prefix, rows=self.numbers(prefix.rows))

    def observe(self, buffer: ObservationBuffer, model: ArmModel, command, slow: int) -> np.ndarray:
        """float32 [S] measured, in the policy's numbers."""
        r = model.rotation
        at = {GRIPPER: buffer.opening, UNUSED: 0.0} | dict(
            zip(self.robot.joints, model.q.tolist(), strict=True)
        )
        at |= dict(zip((j + SPEED for j in self.robot.joints), model.dq.tolist(), strict=True))
        turn = (
            math.atan2(r[2, 1], r[2, 2]),
            math.asin(min(max(-r[2, 0], -1.0), 1.0)),
            math.atan2(r[1, 0], r[0, 0]),
        )
        at |= dict(zip(TOOL, (*model.pos, *turn), strict=True))
        return np.array([c.offset + c.factor * at[c.what] for c in self.state], np.float32)

    def strange(self, state: np.ndarray) -> list[str]:
        """Where a state [S] is far from all states of the data, one line each: a wrong unit or column looks
        like that."""
        out = []
        if len(self.low) == len(self.high) == len(self.state):
            for c, x, low, high in zip(self.state, state.tolist(), self.low, self.high, strict=True):
                room = FAR * max(high - low, abs(0.2 * c.factor))  # 0.2 rad, m or openings
                if not low - room <= x <= high + room:
                    out.append(
                        f"{c.name} is {x:.4g}, in the run's data {low:.4g} to {high:.4g}: is its unit or its "
                        "column another?"
                    )
        return out

    def check_angles(self, state: np.ndarray) -> None:
        """UserError: the angles of a state [S] that are far from the data are 57.3 times the data's, or one
        57.3th: degrees and radians are confused, and the arm would go anywhere."""
        if not len(self.low) == len(self.high) == len(self.state) or not self.strange(state):
            return
        ratios = [
            abs(2 * x / (low + high))
            for c, x, low, high in zip(self.state, state.tolist(), self.low, self.high, strict=True)
            if c.what in self.robot.joints and abs(low + high) / 2 > high - low  # it stays away from 0
        ]
        if len(ratios) > 1 and any(all(0.7 < r / f < 1.4 for r in ratios) for f in (DEGREES, 1 / DEGREES)):
            raise UserError(
                f"the measured angles are {np.median(ratios):.3g} times those of the run's data: degrees and "
                "radians are confused; say which they are with --units and --state-units, or data label"
            )

    def command(self, model: ArmModel, limits: Limits) -> "JointTargets | ToolTargets":
        """What the rows of one deployment are told to."""
        return (ToolTargets if self.moves_tool else JointTargets)(self, model, limits)

    def summary(self) -> str:
        """One line: what is commanded and seen, at which rate."""
        kinds = sorted({c.kind for c in self.action if c.what not in (GRIPPER, UNUSED)})
        words = [
            "moves of the tool" if self.moves_tool else f"{len(self.robot.joints)} joints",
            f"({', '.join(kinds)})",
        ]
        words += [
            f"and the gripper ({c.name}: {c.offset:g} closed, {c.offset + c.factor:g} open)"
            for c in self.action
            if c.what == GRIPPER
        ]
        return (
            f"{' '.join(words)}, {1 / self.row:.4g} actions a second in {self.slow} control periods each; "
            f"sees {', '.join([*(c.what for c in self.state), *self.views])}"
        )


def next_joints(
    now: np.ndarray,
    wanted: np.ndarray,
    measured: np.ndarray,
    most: np.ndarray,
    spare: ArmModel,
    step: tuple[float, float],
) -> np.ndarray:
    """Joint targets [n] of this period on the way to the wanted ones, which the governor lets pass whole.
    most [n]: in a period;
    step: of the tool [m], [rad]; spare: a model to compute with."""
    to = np.clip(wanted, measured - JOINT_LEAD, measured + JOINT_LEAD) - now
    to = to / max(1.0, float((np.abs(to) / most).max()))
    spare.place(now)
    turn = np.linalg.norm((spare.jac @ to).reshape(2, 3), axis=1)  # of the tool [m], [rad], near enough
    return now + to / max(1.0, float((turn / (STEP_SHARE * np.array(step))).max()))


class JointTargets:
    """Targets of joints, for `Bridge` in place of its `GripperCommand`: `joints` [n] [rad], `grip` -1 closed
    .. 1 open."""

    def __init__(self, task: DataInterface, model: ArmModel, limits: Limits):
        self.task, self.step = task, limits.step
        self.joints, self.aim, self.grip = model.q.copy(), model.q.copy(), 1.0
        self.spare = ArmModel(model.spec, task.robot.joints, task.robot.site, gravity=False, coriolis=False)
        self.middle, self.half = task.ranges()
        what = [c.what for c in task.action]
        self.columns = [what.index(j) for j in task.robot.joints]
        self.added = task.increments[self.columns]
        self.gripper = what.index(GRIPPER) if task.has_gripper else None
        self.low, self.high = np.array(task.robot.lower), np.array(task.robot.upper)

    def move(
        self, action: np.ndarray, model: ArmModel, speed: np.ndarray, period: float, left: int = 1
    ) -> None:
        """One control period of a row [A] of shares, of which `left` are to come with this one; its
        increments are divided."""
        value = self.middle + self.half * action
        row, q = value[self.columns], model.q
        # a target that nothing follows does not run away
        further = np.clip(self.aim + row, q - JOINT_LEAD, q + JOINT_LEAD)
        self.aim = np.clip(
            np.where(self.added, further, self.aim + (row - self.aim) / left), self.low, self.high
        )
        self.joints = next_joints(self.joints, self.aim, q, speed * period, self.spare, self.step)
        if self.gripper is not None:
            self.grip = 2 * float(value[self.gripper]) - 1


class ToolTargets:
    """Targets of the tool that increments of its pose move, and the joints that follow them: `joints`, `grip`
    as `JointTargets`."""

    def __init__(self, task: DataInterface, model: ArmModel, limits: Limits):
        box = [
            [sign * math.inf if x is None else x for x in row]
            for sign, row in ((-1, limits.low), (1, limits.high))
        ]
        what = [c.what for c in task.action]
        self.columns = [what.index(m) if m in what else -1 for m in MOVES]
        self.gripper = what.index(GRIPPER) if task.has_gripper else None
        half = task.ranges()[1]
        self.target = GripperCommand(
            model, tuple(half[k] if k >= 0 else 0.0 for k in self.columns), np.array(box[0]), np.array(box[1])
        )
        self.joints, self.grip = self.target.joints, 1.0

    def move(
        self, action: np.ndarray, model: ArmModel, speed: np.ndarray, period: float, left: int = 1
    ) -> None:
        """One control period of a row [A] of shares, divided already."""
        seven = [action[k] if k >= 0 else 0.0 for k in self.columns]
        self.target.move(
            np.array([*seven, self.grip if self.gripper is None else action[self.gripper]]),
            model,
            speed,
            period,
        )
        self.joints, self.grip = self.target.joints, self.target.grip


def check_command(command: str, task: DataInterface) -> None:
    """UserError: joints are not commanded by poses."""
    if command == "pose" and not task.moves_tool:
        raise UserError(
            f"a policy of joint angles commands joints, and robot {task.robot.name} is commanded by poses: "
            "--command joint, forward_position or joint_trajectory, or `command` in the cell of its file"
        )
