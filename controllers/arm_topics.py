"""What the simulated arm publishes of itself and of its scene, with the topics of a CRISP robot."""

from dataclasses import dataclass

import mujoco
import numpy as np

from controllers.arm import SimArm
from controllers.transport import JointState, PoseStamped, Transforms, Transport, TwistStamped, WrenchStamped
from robo_rl.geometry import Floats

GRIPPER_STATE = "gripper/joint_states"
EXTERNAL_WRENCH = "external_wrench"  # estimated, where the arm has an observer
TF_EVERY = 5  # of the publications of poses


class ArmTopics:
    """`publish` once per tick. joints_every, pose_every: ticks between two publications of joint states, and
    of pose, twist, gripper and objects."""

    def __init__(self, arm: SimArm, transport: Transport, stamp: float, joints_every: int, pose_every: int):
        """stamp [s]: of the cameras' places, which are told once."""
        self.arm, self.joints_every, self.pose_every, names = arm, joints_every, pose_every, arm.robot.topics
        self.tf, self.links = transport.publisher("tf", Transforms), links_of(arm)
        if places := tuple(
            (c.frame, f"{view}_camera", c.pos, c.quat) for view, c in arm.robot.cell.cameras.items()
        ):
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
            self.joints.publish(
                JointState(
                    stamp, m.joints, tuple(m.q.tolist()), tuple(m.dq.tolist()), tuple(arm.torque.tolist())
                )
            )
        if count % self.pose_every == 0:
            self.pose.publish(PoseStamped(stamp, frame, tuple(m.pos), tuple(m.quat)))
            self.twist.publish(TwistStamped(stamp, frame, tuple(arm.twist().tolist())))
            if self.felt is not None and arm.observer is not None:
                self.felt.publish(WrenchStamped(stamp, frame, arm.observer.wrench()))
            if self.gripper is not None and (opening := arm.opening) is not None:
                self.gripper.publish(JointState(stamp, ("gripper",), (opening,)))
            for name, sender in self.objects.items():
                body = arm.data.body(name)
                sender.publish(
                    PoseStamped(stamp, frame, tuple(body.xpos.tolist()), tuple(body.xquat.tolist()))
                )
        if count % (TF_EVERY * self.pose_every) == 0:
            bodies = (
                (frame, n, tuple(arm.data.body(n).xpos.tolist()), tuple(arm.data.body(n).xquat.tolist()))
                for n in self.objects
            )
            self.tf.publish(Transforms(stamp, (*(one.transform(arm) for one in self.links), *bodies)))


@dataclass(frozen=True, slots=True)
class Link:
    """A frame of the arm below its parent's, as its URDF has them. body, parent_body: in the simulated model;
    moved, parent_moved [3] [m]: of the link's frame from the body's; fixed: (pos, quat) below the parent
    where it is no body's."""

    parent: str
    name: str
    body: int
    parent_body: int
    moved: np.ndarray
    parent_moved: np.ndarray
    fixed: tuple[Floats, Floats] | None = None

    def transform(self, arm: SimArm) -> tuple[str, str, Floats, Floats]:
        """(parent, name, pos [m], quat) now."""
        if self.fixed is not None:
            return self.parent, self.name, *self.fixed
        d = arm.data
        axes, mine = d.xmat[self.parent_body].reshape(3, 3), d.xmat[self.body].reshape(3, 3)
        pos = axes.T @ (d.xpos[self.body] + mine @ self.moved - d.xpos[self.parent_body]) - self.parent_moved
        quat, inverse = np.zeros(4), np.zeros(4)
        mujoco.mju_negQuat(inverse, d.xquat[self.parent_body])
        mujoco.mju_mulQuat(quat, inverse, d.xquat[self.body])
        return self.parent, self.name, tuple(pos.tolist()), tuple(quat.tolist())


def links_of(arm: SimArm) -> list[Link]:
    """The arm's links from the base on, its tool last; none of a scene with other arms, whose frames are not
    the base's."""
    if arm.share:
        return []
    mj, base = arm.mj, arm.robot.base_frame
    site = mj.site(arm.robot.site)
    root, at = mj.body_rootid[mj.site_bodyid[site.id]], int(mj.site_bodyid[site.id])

    def moved(b: int) -> np.ndarray:
        return np.array(mj.jnt_pos[mj.body_jntadr[b]]) if b and mj.body_jntnum[b] else np.zeros(3)

    def name(b: int) -> str:
        return (mj.body(b).name or f"body{b}") if b else base

    out = [
        Link(
            name(int(mj.body_parentid[b])),
            name(b),
            b,
            int(mj.body_parentid[b]),
            moved(b),
            moved(int(mj.body_parentid[b])),
        )
        for b in range(1, mj.nbody)
        if mj.body_rootid[b] == root and root
    ]
    if arm.robot.site not in {one.name for one in out}:
        place = tuple((mj.site_pos[site.id] - moved(at)).tolist()), tuple(mj.site_quat[site.id].tolist())
        out.append(Link(name(at), arm.robot.site, at, at, moved(at), moved(at), place))
    return out
