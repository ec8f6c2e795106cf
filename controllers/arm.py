"""A torque-controlled arm in MuJoCo under the control law. `run` is lockstep on simulated time; for real time
give `tick` to `loop.real_time`.

The arm's own model (what the law thinks) and the simulated one (what happens) are two: a payload, a push,
joint friction or a late torque are in the second only.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import ArrayLike

from controllers.contracts import State
from controllers.governor import STOPPED, Governor
from controllers.law import Law, LawOptions, vector
from controllers.model import ArmModel, add_payload, add_tool, arm_model, read_spec
from controllers.robot import NO_MODEL, Robot
from controllers.servo import JointServo
from controllers.setpoint import Setpoint
from controllers.supervisor import Supervisor
from controllers.wrench import Observer
from robo_rl.errors import UserError, choose, in_range

DT = 0.001  # control period and physics step [s]
FINGERS = ("left", "right")  # actuators of a parallel gripper's fingers, where the model has them
FINGER_TRAVEL = 0.04  # of each [m]
JAW = "gripper"  # else the joint of a jaw, closed at one end of its range and open at the other
JAW_GAIN, JAW_MOST = 10.0, 3.0  # [N m / rad], [N m] of the motor that a jaw without one gets


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What the arm's model does not know."""

    payload: float = 0.0  # kg at the tool
    torque_delay: int = 0  # ticks between the law and the motors
    joint_friction: float = 0.0  # N m of dry friction in every joint

    def __post_init__(self) -> None:
        in_range("payload", self.payload, 0, 100)
        in_range("torque_delay", self.torque_delay, 0, 100)
        in_range("joint_friction", self.joint_friction, 0, 20)


@dataclass(frozen=True, slots=True)
class SceneShare:
    """An arm's part of a scene that is another's to step: its names there begin with `prefix`, its base is
    turned by `turn` [3, 3]."""

    mj: mujoco.MjModel
    data: mujoco.MjData
    prefix: str
    turn: np.ndarray


class SimArm:
    """The simulated arm; one `tick` is one control period. `t` is simulated time [s]
    since the last reset, `ticks` counts them all.

    path: MJCF with the robot's joints and site, and whatever else there is in the scene; "" is the preset's.
    """

    def __init__(
        self,
        robot: Robot,
        options: LawOptions | None = None,
        *,
        path: str = "",
        dt: float = DT,
        q: np.ndarray | None = None,
        disturbance: Disturbance | None = None,
        servo: bool = False,
        share: SceneShare | None = None,
    ):
        """servo: the law holds joints alone, and a governed arm follows tool poses by a `JointServo`. share:
        of a scene with other arms, which `tick` then does not step."""
        disturbance = disturbance or Disturbance()
        if not (path or robot.model):
            raise UserError(f"robot {robot.name} ships no model: {NO_MODEL}")
        in_range("dt", dt, 1e-4, 0.01)
        self.robot, self.dt, self.t, self.ticks = robot, dt, 0.0, 0
        self.mj = share.mj if share else simulated(path or robot.model, robot, dt, disturbance)
        self.data = share.data if share else mujoco.MjData(self.mj)
        self.share, prefix = share, share.prefix if share else ""
        self.model = arm_model(robot, path, gravity=True)
        self.law = Law(options or LawOptions(), robot)
        joints = [self.mj.joint(prefix + j) for j in robot.joints]
        self._qpos = np.array([j.qposadr[0] for j in joints])
        self._dof = np.array([j.dofadr[0] for j in joints])
        self._ctrl = np.array([self.mj.actuator(f"{prefix}torque {j}").id for j in robot.joints])
        self._site = self.mj.site(prefix + robot.site).id
        self._body = self.mj.site_bodyid[self._site]
        self.servo = JointServo(robot, self.model, dt) if servo else None
        self.observer: Observer | None = None  # where the arm is to feel what pushes it
        self.supervisor: Supervisor | None = None  # between the law and the motors
        self._fingers = self._gripper_motors(prefix)
        at = self.mj.actuator_trnid[self._fingers, 0]
        self._finger_q, jaw = self.mj.jnt_qposadr[at], [self.mj.joint(j).name == prefix + JAW for j in at]
        low, high = self.mj.jnt_range[at].T
        self._closed = np.where(jaw, low, 0.0)
        self._travel = np.where(jaw, high - low, FINGER_TRAVEL)
        self._push, self._push_until = np.zeros(6), -math.inf
        # `reset` fills it
        self._late: deque[np.ndarray] = deque([np.zeros(len(joints))] * disturbance.torque_delay)
        self.torque = np.zeros(len(joints))  # [n] [N m] at the motors in the last tick
        self.reset(np.array(robot.home) if q is None else q)

    def reset(
        self,
        q: ArrayLike,
        objects: "dict[str, tuple[np.ndarray, np.ndarray]] | None" = None,
        opening: float = 0.0,
    ) -> None:
        """Put the arm at rest at joint angles q [n] [rad], with the gripper at `opening` (0 closed, 1 open)
        and free bodies and marks at (pos [3] [m], quat [4]), under the law at full stiffness: nothing pulls
        there, so nothing jumps."""
        if self.share:
            self.data.qvel[self._dof] = 0.0
        else:
            mujoco.mj_resetData(self.mj, self.data)
        self.data.qpos[self._qpos] = vector("joint angles", q, len(self._qpos))
        self.data.qpos[self._finger_q] = self._closed + opening * self._travel
        self.grip(opening)
        for name, (pos, quat) in (objects or {}).items():
            body = self.mj.body(choose("object", name, self.objects()))
            if (mark := body.mocapid[0]) >= 0:
                self.data.mocap_pos[mark], self.data.mocap_quat[mark] = pos, quat
                continue
            at = self.mj.jnt_qposadr[self.mj.body_jntadr[body.id]]
            self.data.qpos[at : at + 7] = *pos, *quat
        mujoco.mj_forward(self.mj, self.data)
        self.t = 0.0
        self.sense()
        self.law.activate(self.model)
        self.law.stand()
        if self.servo:
            self.servo.rest(self.model)
        self.asked = np.array(self.law.tau)  # [n] [N m] of the motors in the last tick, before what delays it
        self._late = deque([self.model.bias.copy()] * len(self._late))
        if self.observer:
            self.observer.rest()

    def _gripper_motors(self, prefix: str) -> np.ndarray:
        """int [k]: the actuators of the fingers, else of the jaw; none where the model has neither."""
        actuators = [self.mj.actuator(i) for i in range(self.mj.nu)]
        fingers = [a.id for a in actuators if a.name in [prefix + name for name in FINGERS]]
        at_joints = [a for a in actuators if a.trntype == mujoco.mjtTrn.mjTRN_JOINT]
        jaw = [a.id for a in at_joints if self.mj.joint(a.trnid[0]).name == prefix + JAW]
        return np.array(fingers or jaw, int)

    def use(self, law: Law, servo: bool) -> None:
        """Let another law go on from what the joints carry now: no jump in torque."""
        law.activate(self.model, np.array(self.law.tau))
        self.law, self.servo = law, JointServo(self.robot, self.model, self.dt) if servo else None

    def rest(self, torque: np.ndarray) -> None:
        """Let the law begin anew from the measured state and these torques [n] [N m]."""
        self.law.activate(self.model, torque)
        if self.servo:
            self.servo.rest(self.model)

    def objects(self) -> list[str]:
        """Names of the bodies that move freely, and of marks (mocap bodies); of a scene with other arms
        none."""
        if self.share:
            return []
        free = self.mj.jnt_bodyid[self.mj.jnt_type == mujoco.mjtJoint.mjJNT_FREE]
        marks = np.flatnonzero(self.mj.body_mocapid >= 0)
        return [self.mj.body(b).name for b in (*free, *marks)]

    def grip(self, opening: float) -> None:
        """Send the fingers to an opening, 0 closed .. 1 open; nothing where the model has none."""
        self.data.ctrl[self._fingers] = self._closed + min(max(opening, 0.0), 1.0) * self._travel

    @property
    def opening(self) -> float | None:
        """Measured, 0 closed .. 1 open; None without fingers."""
        if not len(self._finger_q):
            return None
        return float(((self.data.qpos[self._finger_q] - self._closed) / self._travel).mean())

    def sense(self) -> None:
        """Measure: fill `model` from the simulated joints."""
        self.model.update(self.data.qpos[self._qpos], self.data.qvel[self._dof])

    def felt(self) -> tuple[float, ...] | None:
        """What the observer makes of the last tick [N], [N m]; None where the arm has none. Once per tick."""
        if self.observer is None:
            return None
        self.observer.tick(self.torque, self.dt)
        return self.observer.wrench()

    def push(self, wrench: ArrayLike, seconds: float = math.inf) -> None:
        """A force [N] and moment [N m] [6] from outside at the tool, in base axes, for a time."""
        self._push, self._push_until = vector("push", wrench, 6), self.t + seconds
        if self.share:
            self._push = (self._push.reshape(2, 3) @ self.share.turn.T).reshape(6)

    def tick(self) -> None:
        """Sense, compute torques, step the physics by dt."""
        self.sense()
        self.act()

    def act(self) -> None:
        """The tick without `sense`; of a scene with other arms without the physics."""
        d, law = self.data, self.law
        torque = law.tick(self.model, self.dt)
        if self.supervisor:
            torque = self.supervisor.allowed(self.model, torque, self.asked, self.dt)
            if self.supervisor.reason:  # the law goes on from here, without tension, when it may
                self.rest(torque)
        self.asked = torque
        if self._late:
            self._late.append(torque)
            torque = self._late.popleft()
        self.torque = torque
        d.ctrl[self._ctrl] = torque
        if self.t < self._push_until:
            arm = d.site_xpos[self._site] - d.xipos[self._body]
            d.xfrc_applied[self._body, :3] = self._push[:3]
            d.xfrc_applied[self._body, 3:] = self._push[3:] + np.cross(arm, self._push[:3])
        elif self._push_until > -math.inf:
            d.xfrc_applied[self._body] = 0
            self._push_until = -math.inf
        if not self.share:
            mujoco.mj_step(self.mj, d)
        self.t += self.dt
        self.ticks += 1

    def run(self, seconds: float, every: Callable[[], None] = lambda: None) -> None:
        """Lockstep: ticks for a span of simulated time, calling `every` before each."""
        for _ in range(round(seconds / self.dt)):
            every()
            self.tick()

    def pose(self) -> tuple[np.ndarray, np.ndarray]:
        """Measured tool pose now: pos [3] [m], quat [4]."""
        self.sense()
        return np.array(self.model.pos), np.array(self.model.quat)

    def twist(self) -> np.ndarray:
        """Measured tool twist [6] in base axes [m/s], [rad/s] at the last `sense`."""
        return self.model.jac @ self.model.dq


def govern(arm: SimArm, governor: Governor, now: float | None = None) -> Setpoint:
    """One governed tick: measure, ask the governor, let the law follow, step the physics. now [s]: None is
    arm.t."""
    now = arm.t if now is None else now
    arm.sense()
    m, supervisor = arm.model, arm.supervisor
    if supervisor and supervisor.reason and governor.state != STOPPED:  # a person has reset it
        supervisor.release()
    governor.measure(
        State(
            tuple(m.q.tolist()),
            tuple(m.dq.tolist()),
            tuple(m.pos),
            tuple(m.quat),
            tuple(arm.twist().tolist()),
            arm.felt(),
        ),
        now,
    )
    out = governor.tick(now, arm.dt)
    if arm.servo:
        if (q := arm.servo.step(m, out)) is not None:
            arm.law.aim_joints(q)
    else:
        follow(arm.law, m, out)
    arm.act()
    if supervisor and supervisor.reason and governor.state != STOPPED:
        governor.stop(now, supervisor.reason)
    return out


def follow(law: Law, model: ArmModel, out: Setpoint) -> None:
    """Give the law the governor's setpoint."""
    if out.rebased:
        law.rebase(model)
    if out.pos is not None:
        law.reference.aim(out.pos, out.quat)
    if out.compliance is not None:
        law.comply(out.compliance)
    elif law.complies:
        law.stop_complying()


def add_jaw_motor(spec: mujoco.MjSpec, robot: Robot) -> None:
    """A position servo for a jaw that nothing moves: `JAW`, a hinge with a range, none of the robot's own
    joints."""
    jaw = spec.joint(JAW)
    if jaw is None or JAW in robot.joints or any(a.target == JAW for a in spec.actuators):
        return
    if jaw.type != mujoco.mjtJoint.mjJNT_HINGE or jaw.range[0] >= jaw.range[1]:
        return
    servo = spec.add_actuator(
        name=JAW, target=JAW, trntype=mujoco.mjtTrn.mjTRN_JOINT, ctrlrange=jaw.range, ctrllimited=True
    )
    servo.set_to_position(JAW_GAIN)
    servo.forcelimited, servo.forcerange = True, (-JAW_MOST, JAW_MOST)


def simulated(source: "str | Path", robot: Robot, dt: float, disturbance: Disturbance) -> mujoco.MjModel:
    """`simulated_spec`, compiled. UserError: it cannot be."""
    try:
        return simulated_spec(source, robot, dt, disturbance).compile()
    except ValueError as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"the model cannot be simulated: {' '.join(str(e).split())}") from None


def simulated_spec(source: "str | Path", robot: Robot, dt: float, disturbance: Disturbance) -> mujoco.MjSpec:
    """The scene with a motor at each of the robot's joints, where it had other actuators before, and no
    gravity compensation. The tool carries the payload of the robot's file; the disturbance's is added at the
    tool's point."""
    spec = read_spec(source)
    names = {j.name for j in spec.joints}
    missing = [j for j in robot.joints if j not in names]
    if missing:
        raise UserError(f"the model has no joints {', '.join(missing)}; it has {', '.join(sorted(names))}")
    for actuator in list(spec.actuators):
        if actuator.target in robot.joints:
            spec.delete(actuator)
    for joint, most in zip(robot.joints, robot.torque, strict=True):
        motor = spec.add_actuator(
            name=f"torque {joint}",
            target=joint,
            trntype=mujoco.mjtTrn.mjTRN_JOINT,
            ctrlrange=(-most, most),
            ctrllimited=True,
        )
        motor.set_to_motor()
        if disturbance.joint_friction:
            spec.joint(joint).frictionloss = disturbance.joint_friction
    add_jaw_motor(spec, robot)
    for body in spec.bodies:
        body.gravcomp = 0
    add_tool(spec, robot.site)
    add_payload(spec, robot)
    spec.option.timestep = dt
    if disturbance.payload:
        model = spec.compile()
        site = model.site(robot.site)
        load = spec.body(model.body(site.bodyid[0]).name).add_body(name="payload", pos=site.pos)
        load.mass, load.inertia, load.explicitinertial = disturbance.payload, (1e-4, 1e-4, 1e-4), True
    return spec
