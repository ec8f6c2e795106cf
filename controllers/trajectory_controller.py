"""`joint_trajectory_controller/follow_joint_trajectory` and `gripper_position_controller/gripper_cmd` of an
arm's node.

A trajectory goes through the governor as joint targets, one a tick, of whoever sent the goal.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from controllers.action_messages import GripperFeedback, TrajectoryFeedback
from controllers.action_types import GRIPPER, TRAJECTORY
from controllers.actions import ABORTED, CANCELED, CANCELING, SUCCEEDED, ActionServer
from controllers.arm import FINGER_TRAVEL
from controllers.governor import ACTIVE, ARMED
from controllers.node import ArmNode
from controllers.trajectory import (
    GOAL_TOLERANCE_VIOLATED,
    INVALID_GOAL,
    PATH_TOLERANCE_VIOLATED,
    check_tool,
    read_trajectory,
)
from controllers.trajectory_follower import REST, TrajectoryFollower
from robo_rl.errors import UserError, in_range

NAME = "joint_trajectory_controller"
REACHED = 0.02  # rad, where a goal names no tolerance
# times the duration, and s more, until a goal that names no time tolerance is given up
PATIENCE = (3.0, 30.0)
FEEDBACK_EVERY = 50  # ticks
GAP = 2 * FINGER_TRAVEL  # of an open gripper [m]
FINGERS_NEAR = 0.002  # m of the commanded gap: reached
FINGERS_STILL = (1e-4, 0.5)  # m in s: stalled
FINGERS_PATIENCE = 5.0  # s


class TrajectoryController:
    """`tick` before the governor's tick. is_active: whether this controller holds the arm."""

    def __init__(self, node: ArmNode, is_active: Callable[[], bool]):
        assert node.governor is not None and node.governed is not None  # without one nobody limits it
        self.node, self.governor, self.meant, self.is_active = (
            node,
            node.governor,
            node.governed.meant,
            is_active,
        )
        self.follower: TrajectoryFollower | None = None
        self.began = 0.0  # when the trajectory begins
        self.server = ActionServer(
            node.transport,
            f"{NAME}/follow_joint_trajectory",
            TRAJECTORY,
            TrajectoryFeedback,
            self.accept,
            node.refuse,
            {"error_code": INVALID_GOAL, "error_string": "another goal took its place"},
        )

    def accept(self, goal: dict[str, Any], source: str) -> None:
        """Take a goal. UserError: it is refused."""
        node, governor = self.node, self.governor
        node.check_asker(source)
        if not self.is_active():
            raise UserError(f"{NAME} does not hold the arm: switch to it first")
        if governor.state not in (ARMED, ACTIVE):
            raise UserError(f"the arm is {governor.state}: claim and arm it first")
        if governor.commander not in (None, source or "action"):
            raise UserError(f"{governor.commander} commands")
        made = read_trajectory(goal, node.arm.robot, np.array(node.arm.model.q), node.stamp(), REACHED)
        check_tool(made, self.meant, governor.limits)
        self.follower, self.began = (
            TrajectoryFollower(governor, self.meant, made, source or "action"),
            node.transport.now() + made.delay,
        )

    def tick(self, now: float) -> None:
        """The next joint target, or the end of the goal."""
        goal, model = self.server.goal, self.node.arm.model
        if goal is None or self.follower is None:
            return
        if (fault := self.fault(now, self.follower)) is not None:
            code, why = fault
            self.governor.finish(now)
            self.server.finish(ABORTED, {"error_code": code, "error_string": why})
        elif goal.status == CANCELING:
            self.governor.finish(now)
            if float(np.abs(model.dq).max()) < REST:
                self.server.finish(CANCELED, {"error_string": "cancelled"})
        elif now >= self.began:
            self.follower.step(now, self.node.arm.dt, model.q)
            if self.follower.is_there(model.q, model.dq):
                self.governor.finish(now)
                self.server.finish(SUCCEEDED, {})
                return
        else:  # its stamp is still to come
            self.governor.finish(now)
        if self.node.count % FEEDBACK_EVERY == 0:
            self.server.feedback.publish(
                TrajectoryFeedback(
                    goal.id,
                    self.node.stamp(),
                    self.follower.passed,
                    model.joints,
                    tuple(self.follower.q.tolist()),
                    tuple(model.q.tolist()),
                )
            )

    def fault(self, now: float, follower: TrajectoryFollower) -> tuple[int, str] | None:
        """(error code, why) of a goal that cannot go on; None: it can."""
        governor, joints, made = self.governor, self.node.arm.robot.joints, follower.made
        if governor.state not in (ARMED, ACTIVE):
            return INVALID_GOAL, f"{governor.state}: {governor.reason}"
        if not self.is_active():
            return INVALID_GOAL, "another controller took the arm"
        error = np.abs(follower.q - self.node.arm.model.q)
        beyond = error > made.tolerance["path"]
        if beyond.any():
            k = int(np.argmax(beyond))
            return PATH_TOLERANCE_VIOLATED, f"{joints[k]} is {error[k]:.3f} rad off its path"
        factor, more = (1.0, made.patience) if made.patience else PATIENCE
        if now - self.began > factor * made.duration + more:
            error = np.abs(made.points[-1] - self.node.arm.model.q)
            k = int(np.argmax(error - made.tolerance["goal"]))
            return (
                GOAL_TOLERANCE_VIOLATED,
                f"{joints[k]} is {error[k]:.3f} rad from its goal after {now - self.began:.1f} s",
            )
        return None


class GripperController:
    """`tick` once per tick. Positions are the gap between the fingers, 0 to GAP [m]."""

    def __init__(self, node: ArmNode):
        assert node.governor is not None
        self.node, self.governor = node, node.governor
        self.wanted = self.moved_from = GAP
        self.moved_at = 0.0
        name = node.arm.robot.topics["gripper"].rsplit("/", 1)[0]
        self.server = ActionServer(
            node.transport, f"{name}/gripper_cmd", GRIPPER, GripperFeedback, self.accept, node.refuse, {}
        )

    @property
    def gap(self) -> float:
        """Measured [m]."""
        opening = self.node.arm.opening
        return GAP * (opening if opening is not None else 0.0)

    def accept(self, goal: dict[str, Any], source: str) -> None:
        """Send the fingers there. UserError: it is refused."""
        command = goal["command"]
        self.node.check_asker(source)
        if self.governor.state not in (ARMED, ACTIVE) or self.governor.commander not in (
            None,
            source or "action",
        ):
            raise UserError(
                f"the arm is {self.governor.state}, commanded by {self.governor.commander or 'nobody'}: "
                "claim and arm it first"
            )
        in_range("gripper position", command["position"], 0, GAP)
        # the fingers' own limit holds; 0: not said
        in_range("gripper max_effort", command["max_effort"], 0, math.inf)
        self.wanted, self.moved_from, self.moved_at = (
            float(command["position"]),
            self.gap,
            self.node.transport.now(),
        )
        self.node.arm.grip(self.wanted / GAP)

    def tick(self, now: float) -> None:
        goal = self.server.goal
        if goal is None:
            return
        gap = self.gap
        if abs(gap - self.moved_from) > FINGERS_STILL[0]:
            self.moved_from, self.moved_at = gap, now
        reached, stalled = abs(gap - self.wanted) < FINGERS_NEAR, now - self.moved_at > FINGERS_STILL[1]
        said = {"position": gap, "effort": 0.0, "stalled": stalled and not reached, "reached_goal": reached}
        if goal.status == CANCELING:
            self.node.arm.grip(gap / GAP)
            self.server.finish(CANCELED, said)
        elif self.governor.state not in (ARMED, ACTIVE):
            self.server.finish(ABORTED, said)
        elif reached or stalled:  # fingers that stand on something hold it: that is what was wanted
            self.server.finish(SUCCEEDED, said)
        elif now - goal.at > FINGERS_PATIENCE:
            self.server.finish(ABORTED, said)
        elif self.node.count % FEEDBACK_EVERY == 0:
            self.server.feedback.publish(GripperFeedback(goal.id, **said))
