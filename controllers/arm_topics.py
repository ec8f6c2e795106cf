"""What the simulated arm publishes of itself and of its scene, with the topics of a CRISP robot."""

from controllers.arm import SimArm
from controllers.transport import JointState, PoseStamped, Transforms, Transport, TwistStamped, WrenchStamped

GRIPPER_STATE = "gripper/joint_states"
EXTERNAL_WRENCH = "external_wrench"  # estimated, where the arm has an observer
TF_EVERY = 5  # of the publications of poses


class ArmTopics:
    """`publish` once per tick. joints_every, pose_every: ticks between two publications of joint states, and of pose, twist, gripper and
    objects."""

    def __init__(self, arm: SimArm, transport: Transport, stamp: float, joints_every: int, pose_every: int):
        """stamp [s]: of the cameras' places, which are told once."""
        self.arm, self.joints_every, self.pose_every, names = arm, joints_every, pose_every, arm.robot.topics
        self.tf = transport.publisher("tf", Transforms)
        if places := tuple((c.frame, f"{view}_camera", c.pos, c.quat) for view, c in arm.robot.cell.cameras.items()):
            transport.publisher("tf_static", Transforms, "latched").publish(Transforms(stamp, places))
        self.joints = transport.publisher(names["joint_states"], JointState)
        self.pose = transport.publisher(names["current_pose"], PoseStamped)
        self.twist = transport.publisher(names["current_twist"], TwistStamped)
        self.felt = transport.publisher(EXTERNAL_WRENCH, WrenchStamped) if arm.observer else None
        self.gripper = transport.publisher(GRIPPER_STATE, JointState) if arm.opening is not None else None
        self.objects = {n: transport.publisher(f"objects/{n}", PoseStamped) for n in arm.objects()}

    def publish(self, stamp: float, count: int) -> None:
        """The state at `stamp` [s], tick number `count`: the topics whose turn it is."""
        arm = self.arm
        m, frame = arm.model, arm.robot.base_frame
        if count % self.joints_every == 0:
            self.joints.publish(JointState(stamp, m.joints, tuple(m.q.tolist()), tuple(m.dq.tolist()), tuple(arm.torque.tolist())))
        if count % self.pose_every == 0:
            self.pose.publish(PoseStamped(stamp, frame, tuple(m.pos), tuple(m.quat)))
            self.twist.publish(TwistStamped(stamp, frame, tuple(arm.twist().tolist())))
            if self.felt is not None and arm.observer is not None:
                self.felt.publish(WrenchStamped(stamp, frame, arm.observer.wrench()))
            if self.gripper is not None and (opening := arm.opening) is not None:
                self.gripper.publish(JointState(stamp, ("gripper",), (opening,)))
            for name, sender in self.objects.items():
                body = arm.data.body(name)
                sender.publish(PoseStamped(stamp, frame, tuple(body.xpos.tolist()), tuple(body.xquat.tolist())))
        if count % (TF_EVERY * self.pose_every) == 0:
            bodies = ((frame, n, tuple(arm.data.body(n).xpos.tolist()), tuple(arm.data.body(n).xquat.tolist())) for n in self.objects)
            self.tf.publish(Transforms(stamp, ((frame, arm.robot.site, tuple(m.pos), tuple(m.quat)), *bodies)))
