"""Messages on the topics of an action: which goals there are, and feedback of a trajectory and of a gripper.

`fields` gives what differs from zero of the ROS message as plain data, `read` makes one of it.
"""

from dataclasses import dataclass
from typing import Any, Self


def time_fields(seconds: float) -> dict[str, int]:
    """A ROS time or duration."""
    whole = int(seconds // 1)
    return {"sec": whole, "nanosec": min(round((seconds - whole) * 1e9), 999_999_999)}


def seconds_of(time: dict[str, int]) -> float:
    return time["sec"] + time["nanosec"] * 1e-9


def id_fields(goal: bytes) -> dict[str, list[int]]:
    """A UUID of 16 bytes."""
    return {"uuid": list(goal)}


@dataclass(frozen=True, slots=True)
class GoalStatuses:
    """(id of 16 bytes, time of acceptance [s], status of `actions`) of each goal."""

    goals: tuple[tuple[bytes, float, int], ...]

    def fields(self) -> dict[str, Any]:
        return {
            "status_list": [
                {"goal_info": {"goal_id": id_fields(goal), "stamp": time_fields(stamp)}, "status": status}
                for goal, stamp, status in self.goals
            ]
        }

    @classmethod
    def read(cls, m: dict[str, Any]) -> Self:
        return cls(
            tuple(
                (bytes(s["goal_info"]["goal_id"]["uuid"]), seconds_of(s["goal_info"]["stamp"]), s["status"])
                for s in m["status_list"]
            )
        )


@dataclass(frozen=True, slots=True)
class TrajectoryFeedback:
    """Where the joints should be and are [rad] `after` seconds of a goal."""

    goal: bytes
    stamp: float
    after: float
    names: tuple[str, ...]
    desired: tuple[float, ...]
    actual: tuple[float, ...]

    def fields(self) -> dict[str, Any]:
        rows = {
            "desired": self.desired,
            "actual": self.actual,
            "error": tuple(a - b for a, b in zip(self.desired, self.actual, strict=True)),
        }
        after = time_fields(self.after)
        return {
            "goal_id": id_fields(self.goal),
            "feedback": {
                "header": {"stamp": time_fields(self.stamp)},
                "joint_names": list(self.names),
                **{k: {"positions": list(row), "time_from_start": after} for k, row in rows.items()},
            },
        }

    @classmethod
    def read(cls, m: dict[str, Any]) -> Self:
        f = m["feedback"]
        return cls(
            bytes(m["goal_id"]["uuid"]),
            seconds_of(f["header"]["stamp"]),
            seconds_of(f["desired"]["time_from_start"]),
            tuple(f["joint_names"]),
            tuple(f["desired"]["positions"]),
            tuple(f["actual"]["positions"]),
        )


@dataclass(frozen=True, slots=True)
class GripperFeedback:
    """position: gap between the fingers [m]; effort [N]."""

    goal: bytes
    position: float
    effort: float
    stalled: bool
    reached_goal: bool

    def fields(self) -> dict[str, Any]:
        return {
            "goal_id": id_fields(self.goal),
            "feedback": {
                "position": self.position,
                "effort": self.effort,
                "stalled": self.stalled,
                "reached_goal": self.reached_goal,
            },
        }

    @classmethod
    def read(cls, m: dict[str, Any]) -> Self:
        f = m["feedback"]
        return cls(bytes(m["goal_id"]["uuid"]), f["position"], f["effort"], f["stalled"], f["reached_goal"])


ACTION_MESSAGES = (GoalStatuses, TrajectoryFeedback, GripperFeedback)
