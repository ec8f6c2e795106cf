"""What the messages of a commander mean to the simulated arm: straight to its law, or through a governor.

Each function takes a message as received. UserError: it makes no sense, or is not the sender's to give; it
has had no effect.
"""

import math
from dataclasses import replace

import numpy as np

from controllers.arm import SimArm
from controllers.compliance import ComplianceCommand
from controllers.contracts import Command
from controllers.governor import ACTIVE, Governor
from controllers.law import vector
from controllers.model import ArmModel
from controllers.robot import by_name
from controllers.transport import (
    JointState,
    JointTrajectory,
    Numbers,
    PoseStamped,
    Received,
    Transport,
    WrenchStamped,
)
from robo_rl.errors import UserError

FRESH = 0.1  # s since joint targets of a commander, in which its poses are another stream of the same motion


def in_frame(frame: str, allowed: tuple[str, ...]) -> str:
    """The frame of a message. UserError: it is none of these."""
    if frame not in allowed:
        raise UserError(f"frame must be {' or '.join(map(repr, allowed))}, got {frame!r}")
    return frame


class LawCommands:
    """Without a governor: targets straight to the arm's law."""

    def __init__(self, arm: SimArm):
        self.arm = arm

    def topics(self) -> list:
        """(topic, type, what takes its messages)."""
        names = self.arm.robot.topics
        return [
            (names["target_pose"], PoseStamped, self.pose),
            (names["target_joint"], JointState, self.joint),
            (names["target_wrench"], WrenchStamped, self.wrench),
            (names["target_stiffness"], Numbers, self.stiffness),
        ]

    def pose(self, got: Received) -> None:
        m = got.message
        in_frame(m.frame, (self.arm.robot.base_frame,))
        self.arm.law.set_target(np.array(m.pos), np.array(m.quat))

    def joint(self, got: Received) -> None:
        m, joints = got.message, self.arm.robot.joints
        velocity = by_name(joints, m.names, m.velocity, "velocity") if m.velocity else None
        self.arm.law.set_joints(by_name(joints, m.names, m.position), velocity)

    def wrench(self, got: Received) -> None:
        m, robot = got.message, self.arm.robot
        frame = in_frame(m.frame, (robot.base_frame, robot.site))
        self.arm.law.set_wrench(np.array(m.wrench), "base" if frame == robot.base_frame else "tool")

    def stiffness(self, got: Received) -> None:
        self.arm.law.set_stiffness(np.array(got.message.data))


class GovernedCommands:
    """With a governor: everything is a command to it, so that nothing passes it.

    meant: a model that says which tool pose joint targets mean. streamed: whether the law that holds the arm
    follows streams of targets.
    """

    def __init__(self, arm: SimArm, governor: Governor, transport: Transport):
        self.arm, self.governor, self.transport = arm, governor, transport
        self.meant = ArmModel(arm.model.spec, arm.robot.joints, arm.robot.site)
        self.streamed = True
        self.joints_at = -math.inf  # when joint targets were last followed

    def topics(self) -> list:
        """(topic, type, what takes its messages)."""
        names = self.arm.robot.topics
        kinds = {
            "target_pose": (PoseStamped, self.pose),
            "target_joint": (JointState, self.joint),
            "target_wrench": (WrenchStamped, self.wrench),
            "target_stiffness": (Numbers, self.stiffness),
            "forward_position": (Numbers, self.positions),
            "joint_trajectory": (JointTrajectory, self.trajectory),
        }
        return [(names[name], kind, follow) for name, (kind, follow) in kinds.items() if name in names]

    def pose(self, got: Received) -> None:
        m, now = got.message, self.transport.now()
        if not self.streamed:
            return  # a client that streams goes on while its trajectory runs
        if now - self.joints_at < FRESH and got.source == self.governor.commander:
            return  # CRISP's client streams both; the law that follows joints takes those
        self.govern(Command(got.source, m.stamp, m.frame, m.pos, m.quat, stream="pose"), now)

    def joint(self, got: Received) -> None:
        """Joint targets, judged with the pose that they mean; for the law that follows joints."""
        m, joints = got.message, self.arm.robot.joints
        if not self.streamed:
            return
        if self.arm.servo is None:
            if got.source == self.governor.commander and self.governor.state == ACTIVE:
                return  # the other stream of the client whose poses are followed
            raise UserError(
                "joint targets need joint_impedance_controller: switch to it, or command target_pose"
            )
        q = by_name(joints, m.names, m.position)
        if np.isfinite(q).all():
            self.meant.place(q)
        now = self.transport.now()
        self.govern(
            Command(
                got.source,
                m.stamp,
                self.governor.limits.frame,
                tuple(self.meant.pos),
                tuple(self.meant.quat),
                tuple(q.tolist()),
                "joints",
            ),
            now,
        )
        if got.source == self.governor.commander:
            self.joints_at = now

    def positions(self, got: Received) -> None:
        """What ros2_control's forward_position_controller takes: angles in the order of the joints, no
        stamp."""
        joints = self.arm.robot.joints
        q = tuple(vector("joint positions", got.message.data, len(joints)).tolist())
        self.joint(replace(got, message=JointState(got.at, joints, q)))

    def trajectory(self, got: Received) -> None:
        """What joint_trajectory_controller takes on its topic, streamed: one point in a message, from when it
        comes."""
        if len(got.message.points) != 1:
            raise UserError(f"a streamed trajectory has one point, got {len(got.message.points)}")
        [(_, position)] = got.message.points
        self.joint(replace(got, message=JointState(got.at, got.message.names, position)))

    def wrench(self, got: Received) -> None:
        """A force and a moment at the tool, as one stream of the commander."""
        m = got.message
        self.comply(ComplianceCommand(got.source, "wrench", tuple(m.wrench), m.frame, m.stamp))

    def stiffness(self, got: Received) -> None:
        """Sent once, it holds while its sender commands."""
        self.comply(ComplianceCommand(got.source, "stiffness", tuple(got.message.data)))

    def comply(self, command: ComplianceCommand) -> None:
        """UserError: it has no effect. (A wrench to an arm that is not armed is silent, as a pose is: whoever
        streams goes on.)"""
        if (
            self.arm.servo is not None
            or self.arm.law.options.task != "impedance"
            or not any(self.arm.law.options.stiffness)
        ):
            raise UserError(
                f"a {command.stream} needs a controller of Cartesian impedance: switch to "
                "cartesian_impedance_controller"
            )
        verdict = self.governor.comply(command, self.transport.now())
        if verdict.action == "block" and (verdict.contract != "state" or command.stream == "stiffness"):
            raise UserError(verdict.text)

    def govern(self, command: Command, now: float) -> None:
        """UserError: another's command. All else that the governor refuses it counts."""
        verdict = self.governor.command(command, now)
        if verdict.contract == "commander":
            raise UserError(verdict.text)
