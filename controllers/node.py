"""The simulated arm on a wire, with the topics of a CRISP robot: it publishes its state and follows what is commanded.

Beside CRISP's topics: the gripper, the free bodies of the scene as `objects/<name>` (what a camera would tell), and with
a governor `safety_command` (arm, disarm, reset, stop), `safety_state` (latched, on change) and `estop`. A message that
makes no sense is counted with the reason and has no effect: it must not take the arm's loop down. What it serves is in
`manager`.
"""

from collections import Counter

import numpy as np

from controllers.arm import SimArm, govern
from controllers.contracts import Command
from controllers.governor import ACTIVE, ARMED, Governor, Setpoint
from controllers.law import vector
from controllers.model import ArmModel
from controllers.robot import by_name
from controllers.transport import (
    Clock,
    Flag,
    JointState,
    Numbers,
    PoseStamped,
    Received,
    Text,
    Transport,
    TwistStamped,
    WrenchStamped,
)
from robo_rl.errors import UserError, choose

GRIPPER_STATE = "gripper/joint_states"
EXTERNAL_WRENCH = "external_wrench"  # estimated, where the arm has an observer
SAFETY_COMMAND, SAFETY_STATE = "safety_command", "safety_state"
SERVE_EVERY = 10  # ticks between two looks for calls of services
ORDERS = ("arm", "disarm", "reset", "stop")


class ArmNode:
    """`tick` once per control period: take commands, one tick of the arm, publish. refused: bad messages by reason.

    Two publishers on a command topic: neither is followed, as CRISP's controller does.
    """

    def __init__(self, arm: SimArm, transport: Transport, governor: Governor | None = None, *, pose_every: int = 10,
                 joints_every: int = 1, clock: bool = False):
        """clock: publish simulated time on `clock`, every millisecond of it. governor: the arm's own, between the
        wire and the law; it gets poses and joint targets alone, so that
        nothing passes it.
        pose_every: ticks between two publications of pose, twist, gripper and objects; joints_every: of joint states."""
        self.arm, self.transport, self.governor, self.count = arm, transport, governor, 0
        self.pose_every, self.joints_every, self.said = pose_every, joints_every, ""
        self.clock = transport.publisher("clock", Clock) if clock else None
        names = arm.robot.topics
        self.refused: Counter[str] = Counter()
        self.joints = transport.publisher(names["joint_states"], JointState)
        self.pose = transport.publisher(names["current_pose"], PoseStamped)
        self.twist = transport.publisher(names["current_twist"], TwistStamped)
        self.felt = transport.publisher(EXTERNAL_WRENCH, WrenchStamped) if arm.observer else None
        self.gripper = transport.publisher(GRIPPER_STATE, JointState) if arm.opening is not None else None
        self.objects = {n: transport.publisher(f"objects/{n}", PoseStamped) for n in arm.objects()}
        followed = [(names["target_pose"], PoseStamped, self._pose), (names["gripper"], Numbers, self._grip)]
        if governor is None:
            followed += [(names["target_joint"], JointState, self._joint),
                         (names["target_wrench"], WrenchStamped, self._wrench),
                         (names["target_stiffness"], Numbers, self._stiffness)]
        else:
            self.safety = transport.publisher(SAFETY_STATE, Text, "latched")
            followed += [(names["target_joint"], JointState, self._governed_joint), (SAFETY_COMMAND, Text, self._order)]
            self.meant = ArmModel(arm.model.spec, arm.robot.joints, arm.robot.site)  # what joint targets mean
        self.commands = [(transport.subscription(topic, kind, "command"), topic, follow)
                         for topic, kind, follow in followed]
        if governor is not None:
            self.commands += [(transport.subscription(names["estop"], Flag, "latched"), "", self._estop)]

    def tick(self) -> None:
        """Commands, one tick of the arm, publications."""
        for box, topic, follow in self.commands:
            for got in box.take():
                try:
                    if topic not in ("", SAFETY_COMMAND) and self.transport.publishers(topic) > 1:
                        raise UserError(f"{topic} has more than one publisher")
                    follow(got)
                except UserError as e:
                    self.refused[f"{topic}: {e}"] += 1
        arm = self.arm
        if self.governor is None:
            arm.tick()
        else:
            self.setpoint: Setpoint = govern(arm, self.governor, self.transport.now())
            if self.governor.state != self.said.split(":")[0]:
                self.said = f"{self.governor.state}: {self.governor.reason}"
                self.safety.publish(Text(self.said))
        self.count += 1
        if self.count % SERVE_EVERY == 0:
            self.transport.serve()
        if self.clock is not None:
            self.clock.publish(Clock(arm.t))
        m, stamp, frame = arm.model, self.transport.now(), arm.robot.base_frame
        if self.count % self.joints_every == 0:
            self.joints.publish(JointState(stamp, m.joints, tuple(m.q.tolist()), tuple(m.dq.tolist()),
                                           tuple(arm.torque.tolist())))
        if self.count % self.pose_every == 0:
            self.pose.publish(PoseStamped(stamp, frame, tuple(m.pos), tuple(m.quat)))
            self.twist.publish(TwistStamped(stamp, frame, tuple(arm.twist().tolist())))
            if self.felt is not None and arm.observer is not None:
                self.felt.publish(WrenchStamped(stamp, frame, arm.observer.wrench()))
            if self.gripper is not None and (opening := arm.opening) is not None:
                self.gripper.publish(JointState(stamp, ("gripper",), (opening,)))
            for name, sender in self.objects.items():
                body = arm.data.body(name)
                sender.publish(PoseStamped(stamp, frame, tuple(body.xpos.tolist()), tuple(body.xquat.tolist())))

    def _frame(self, frame: str, allowed: tuple[str, ...]) -> str:
        if frame not in allowed:
            raise UserError(f"frame must be {' or '.join(map(repr, allowed))}, got {frame!r}")
        return frame

    def _pose(self, got: Received) -> None:
        m = got.message
        if self.governor is not None:
            self.governor.command(Command(got.source, m.stamp, m.frame, m.pos, m.quat), self.transport.now())
            return
        self._frame(m.frame, (self.arm.robot.base_frame,))
        self.arm.law.set_target(np.array(m.pos), np.array(m.quat))

    def _joint(self, got: Received) -> None:
        m, joints = got.message, self.arm.robot.joints
        velocity = by_name(joints, m.names, m.velocity, "velocity") if m.velocity else None
        self.arm.law.set_joints(by_name(joints, m.names, m.position), velocity)

    def _governed_joint(self, got: Received) -> None:
        """Joint targets, judged with the pose that they mean; for the law that follows joints."""
        assert self.governor is not None  # else nobody subscribed
        m, joints = got.message, self.arm.robot.joints
        if self.arm.servo is None:
            raise UserError("joint targets need joint_impedance_controller: switch to it, or command target_pose")
        q = by_name(joints, m.names, m.position)
        if np.isfinite(q).all():
            self.meant.place(q)
        self.governor.command(Command(got.source, m.stamp, self.governor.limits.frame, tuple(self.meant.pos),
                                      tuple(self.meant.quat), tuple(q.tolist())), self.transport.now())

    def _wrench(self, got: Received) -> None:
        m, robot = got.message, self.arm.robot
        frame = self._frame(m.frame, (robot.base_frame, robot.site))
        self.arm.law.set_wrench(np.array(m.wrench), "base" if frame == robot.base_frame else "tool")

    def _stiffness(self, got: Received) -> None:
        self.arm.law.set_stiffness(np.array(got.message.data))

    def _grip(self, got: Received) -> None:
        opening = vector("gripper opening", got.message.data, 1)
        if self.governor is None or self.governor.state in (ARMED, ACTIVE):
            self.arm.grip(float(opening[0]))

    def order(self, order: str) -> None:
        """What a person wants of the governor. UserError: it refuses."""
        getattr(self.governor, choose("safety command", order, ORDERS))(self.transport.now())
        self.said = ""  # it is told again, also where nothing changed

    def _order(self, got: Received) -> None:
        assert self.governor is not None
        order = choose("safety command", got.message.data, ORDERS)
        try:
            self.order(order)
        except UserError as e:
            self.safety.publish(Text(f"{self.governor.state}: refused to {order}: {e}"))

    def _estop(self, got: Received) -> None:
        assert self.governor is not None
        if got.message.data:
            self.governor.stop(self.transport.now(), "e-stop topic")
