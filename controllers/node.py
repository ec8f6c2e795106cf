"""The simulated arm on a wire, with the topics of a CRISP robot: it publishes its state and follows what is commanded.

A message that makes no sense is counted with the reason and has no effect: it must not take the arm's loop down.
"""

from collections import Counter

import numpy as np

from controllers.arm import SimArm
from controllers.robot import by_name
from controllers.transport import (
    JointState,
    Numbers,
    PoseStamped,
    Received,
    Transport,
    TwistStamped,
    WrenchStamped,
)
from robo_rl.errors import UserError


class ArmNode:
    """`tick` once per control period: take commands, one tick of the arm, publish. refused: bad messages by reason.

    Two publishers on a command topic: neither is followed, as CRISP's controller does.
    """

    def __init__(self, arm: SimArm, transport: Transport, *, pose_every: int = 10):
        """pose_every: ticks between two publications of pose and twist; joint states go out every tick."""
        self.arm, self.transport, self.pose_every, self.count = arm, transport, pose_every, 0
        names = arm.robot.topics
        self.refused: Counter[str] = Counter()
        self.joints = transport.publisher(names["joint_states"], JointState)
        self.pose = transport.publisher(names["current_pose"], PoseStamped)
        self.twist = transport.publisher(names["current_twist"], TwistStamped)
        followed = (("target_pose", PoseStamped, self._pose), ("target_joint", JointState, self._joint),
                    ("target_wrench", WrenchStamped, self._wrench), ("target_stiffness", Numbers, self._stiffness))
        self.commands = [(transport.subscription(names[key], kind, "command"), names[key], follow)
                         for key, kind, follow in followed]

    def tick(self) -> None:
        for box, topic, follow in self.commands:
            for got in box.take():
                try:
                    if self.transport.publishers(topic) > 1:
                        raise UserError(f"{topic} has more than one publisher")
                    follow(got)
                except UserError as e:
                    self.refused[f"{topic}: {e}"] += 1
        arm = self.arm
        arm.tick()
        m, stamp = arm.model, self.transport.now()
        self.joints.publish(JointState(stamp, m.joints, tuple(m.q.tolist()), tuple(m.dq.tolist()),
                                       tuple(arm.torque.tolist())))
        if self.count % self.pose_every == 0:
            frame = arm.robot.base_frame
            self.pose.publish(PoseStamped(stamp, frame, tuple(m.pos), tuple(m.quat)))
            self.twist.publish(TwistStamped(stamp, frame, tuple(arm.twist().tolist())))
        self.count += 1

    def _frame(self, frame: str, allowed: tuple[str, ...]) -> str:
        if frame not in allowed:
            raise UserError(f"frame must be {' or '.join(map(repr, allowed))}, got {frame!r}")
        return frame

    def _pose(self, got: Received) -> None:
        m = got.message
        self._frame(m.frame, (self.arm.robot.base_frame,))
        self.arm.law.set_target(np.array(m.pos), np.array(m.quat))

    def _joint(self, got: Received) -> None:
        m, joints = got.message, self.arm.robot.joints
        velocity = by_name(joints, m.names, m.velocity, "velocity") if m.velocity else None
        self.arm.law.set_joints(by_name(joints, m.names, m.position), velocity)

    def _wrench(self, got: Received) -> None:
        m, robot = got.message, self.arm.robot
        frame = self._frame(m.frame, (robot.base_frame, robot.site))
        self.arm.law.set_wrench(np.array(m.wrench), "base" if frame == robot.base_frame else "tool")

    def _stiffness(self, got: Received) -> None:
        self.arm.law.set_stiffness(np.array(got.message.data))
