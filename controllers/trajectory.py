"""Joint trajectories: read from a goal, checked before anything moves, and sampled while it is followed.

Between two points a joint goes straight, or on the cubic that has the points' velocities where they are
given.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controllers.action_messages import seconds_of
from controllers.limits import Limits, box, upright
from controllers.model import ArmModel
from controllers.robot import Robot
from robo_rl.errors import UserError

INVALID_GOAL, INVALID_JOINTS, OLD_HEADER_TIMESTAMP, PATH_TOLERANCE_VIOLATED, GOAL_TOLERANCE_VIOLATED = (
    -1,
    -2,
    -3,
    -4,
    -5,
)
MOST_POINTS, LONGEST = 1000, 600.0  # of a goal; [s]
AHEAD = 60.0  # s that a trajectory may begin in the future
BEGIN = 0.1  # rad between the measured joint and a first point of time 0
SAMPLES = 64  # poses of the tool that are looked at before a goal is accepted
FASTER = 1.001  # of a joint's speed limit, for what rounding does


@dataclass(frozen=True, slots=True)
class Trajectory:
    """times [k] [s] from its start, the first 0; points [k, n] [rad]; velocities [k, n] [rad/s] or None."""

    times: np.ndarray
    points: np.ndarray
    velocities: np.ndarray | None = None
    tolerance: dict[str, np.ndarray] = field(default_factory=dict)
    """path, goal: largest error of each joint [n] [rad]; inf where any is allowed."""
    patience: float = 0.0
    """s after its end in which the goal must be reached; 0: not said."""
    delay: float = 0.0
    """s from its acceptance to its start."""

    @property
    def duration(self) -> float:
        return float(self.times[-1])

    def at(self, t: float) -> np.ndarray:
        """Positions [n] [rad] at t [s]; the last point's after the end."""
        t = min(max(t, 0.0), self.duration)
        k = min(int(np.searchsorted(self.times, t, "right")), len(self.times) - 1)
        a, b, h = self.points[k - 1], self.points[k], float(self.times[k] - self.times[k - 1])
        s = (t - float(self.times[k - 1])) / h
        if self.velocities is None:
            return a + s * (b - a)
        u, v = h * self.velocities[k - 1], h * self.velocities[k]
        return a + s * (u + s * (3 * (b - a) - 2 * u - v + s * (u + v - 2 * (b - a))))


def straight(start: np.ndarray, goal: np.ndarray, speed: np.ndarray) -> Trajectory:
    """From joints to joints [n] [rad], no joint faster than `speed` [n] [rad/s]."""
    seconds = max(float((np.abs(goal - start) / speed).max()), 0.1)
    return Trajectory(np.array([0.0, seconds]), np.stack([start, goal]))


def read_trajectory(
    goal: dict[str, Any], robot: Robot, q: np.ndarray, stamp: float, tolerance: float
) -> Trajectory:
    """The trajectory of the fields of a FollowJointTrajectory goal, from the measured joints q [n] [rad] on;
    stamp [s]: the time that headers name; tolerance [rad]: of the goal where it names none. UserError: it
    makes no sense, or passes a joint's limits."""
    m = goal["trajectory"]
    names, points = m["joint_names"], m["points"]
    if sorted(names) != sorted(robot.joints):
        raise UserError(
            f"joints are {', '.join(names[:20]) or 'none'}; this arm's are {', '.join(robot.joints)}, each "
            "once"
        )
    if goal["multi_dof_trajectory"]["points"]:
        raise UserError("joints of several degrees of freedom are none of this arm's")
    if not 1 <= len(points) <= MOST_POINTS:
        raise UserError(f"a trajectory has 1 to {MOST_POINTS} points, got {len(points)}")
    order = [names.index(j) for j in robot.joints]
    times = np.array([seconds_of(p["time_from_start"]) for p in points])
    rows = {key: _rows([p[key] for p in points], key, len(names)) for key in ("positions", "velocities")}
    positions, velocities = rows["positions"], rows["velocities"]
    if positions is None:
        raise UserError("every point needs positions")
    if not (times[0] >= 0 and (np.diff(times) > 0).all()):
        raise UserError(f"times from the start must rise, got {', '.join(f'{t:g}' for t in times[:10])} s")
    if times[-1] > LONGEST or times[-1] == 0:
        raise UserError(f"a trajectory takes more than 0 s and at most {LONGEST:g} s, got {times[-1]:g}")
    positions, velocities = positions[:, order], None if velocities is None else velocities[:, order]
    if times[0] > 0:  # from where the arm is, at rest
        times, positions = np.append(0.0, times), np.vstack([q, positions])
        velocities = None if velocities is None else np.vstack([np.zeros_like(q), velocities])
    elif (far := float(np.abs(positions[0] - q).max())) > BEGIN:
        raise UserError(f"it begins {far:.3f} rad from where the joints are")
    begins = seconds_of(m["header"]["stamp"])
    if begins and not -times[-1] < begins - stamp <= AHEAD:
        raise UserError(f"its stamp is {begins - stamp:.1f} s from now; 0 begins at once")
    allowed = {
        "path": _tolerances(goal["path_tolerance"], robot, math.inf),
        "goal": _tolerances(goal["goal_tolerance"], robot, tolerance),
    }
    made = Trajectory(
        times,
        positions,
        velocities,
        allowed,
        max(seconds_of(goal["goal_time_tolerance"]), 0.0),
        max(begins - stamp, 0.0) if begins else 0.0,
    )
    check_joints(made, robot)
    return made


def _rows(rows: list[list[float]], what: str, n: int) -> np.ndarray | None:
    """[k, n]; None where no point has any. UserError: of another length, or not finite."""
    if not any(rows):
        return None
    if any(len(row) != n for row in rows):
        raise UserError(f"{what} of every point need {n} numbers, or of none any")
    out = np.array(rows, float)
    if not np.isfinite(out).all():
        raise UserError(f"{what} have a number that is not finite")
    return out


def _tolerances(given: list[dict], robot: Robot, default: float) -> np.ndarray:
    """[n] [rad]: 0 is not said, below 0 is none."""
    out = np.full(len(robot.joints), default)
    for one in given:
        if one["name"] not in robot.joints:
            raise UserError(f"a tolerance names {one['name'][:40]!r}, no joint of this arm")
        if one["position"] != one["position"]:
            raise UserError("a tolerance is not a number")
        if one["position"]:
            out[robot.joints.index(one["name"])] = one["position"] if one["position"] > 0 else math.inf
    return out


def check_joints(made: Trajectory, robot: Robot) -> None:
    """UserError: a joint leaves its range, or must be faster than its limit."""
    ends = (
        np.concatenate(
            [made.times, *(np.linspace(a, b, 8) for a, b in zip(made.times, made.times[1:], strict=False))]
        )
        if made.velocities is not None
        else made.times
    )
    ts = np.unique(ends)
    rows = np.array([made.at(float(t)) for t in ts])
    speeds = np.abs(np.diff(rows, axis=0)) / np.diff(ts)[:, None]
    if made.velocities is not None:
        speeds = np.vstack([speeds, np.abs(made.velocities)])
    for i, joint in enumerate(robot.joints):
        low, high, most = robot.lower[i], robot.upper[i], robot.velocity[i]
        if rows[1:, i].min() < low or rows[1:, i].max() > high:
            raise UserError(
                f"{joint} goes to {rows[1:, i].min():.3f} .. {rows[1:, i].max():.3f} rad, allowed {low:.3f} "
                f"to {high:.3f}"
            )
        if speeds[:, i].max() > FASTER * most:
            raise UserError(
                f"{joint} would turn at {speeds[:, i].max():.2f} rad/s, allowed {most:.2f}: give it more time"
            )


def check_tool(made: Trajectory, model: ArmModel, limits: Limits) -> None:
    """UserError: the tool leaves the workspace or tilts too far on the way. model: a spare one; it ends where
    the trajectory does."""
    count = min(
        SAMPLES,
        max(
            len(made.times), math.ceil(float(np.abs(np.diff(made.points, axis=0)).sum(0).max()) / 0.05) + 1, 2
        ),
    )
    for t in np.linspace(0.0, made.duration, count)[1:]:
        model.place(made.at(float(t)))
        pos, quat = tuple(model.pos), tuple(model.quat)
        if box(pos, limits) is not pos:
            raise UserError(
                f"after {t:.2f} s the tool is at {[round(x, 3) for x in pos]} m, outside the workspace"
            )
        if upright(quat, limits) is not quat:
            raise UserError(f"after {t:.2f} s the tool is tilted beyond {limits.tilt:g} rad")
