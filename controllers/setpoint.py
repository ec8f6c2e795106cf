"""The governor's setpoint: where it is, where it goes, and how it gets there within the limits of speed and
acceleration, or brakes."""

import math
from dataclasses import asdict, dataclass

from controllers.compliance import Compliance
from controllers.contracts import State
from controllers.limits import Limits, at_most, box, joint_step, moved_within, pursue, slower, upright
from controllers.robot import Robot
from robo_rl.geometry import Floats, turn_between, turned, unit


@dataclass(frozen=True, slots=True)
class Setpoint:
    """What may go onto the wire. pos is None while nothing is asked of the arm: it stays where its law holds
    it.
    `rebased`: the setpoint starts anew from the measured pose, springs must let go."""

    state: str
    pos: Floats | None
    quat: Floats
    rebased: bool = False
    joints: Floats | None = None  # where joint targets are commanded
    compliance: Compliance | None = None  # where a wrench or a stiffness is commanded


def traced(out: Setpoint, reason: str) -> list:
    """As it stands in a trace."""
    return [
        out.state,
        reason,
        out.pos,
        out.quat,
        out.rebased,
        out.joints,
        *([asdict(out.compliance)] if out.compliance else []),
    ]


class SetpointMotion:
    """`pursue` or `brake`, then `advance`, once per period of dt [s]. It knows no state machine: the governor
    says which."""

    def __init__(self, limits: Limits, robot: Robot):
        self.limits, self.robot = limits, robot
        self.pos: Floats | None = None
        self.quat: Floats = (1.0, 0.0, 0.0, 0.0)
        self.v = self.w = (0.0, 0.0, 0.0)  # [m/s], [rad/s]
        self.target: tuple[Floats, Floats] = (0.0, 0.0, 0.0), self.quat
        self.joints: Floats | None = None  # the setpoint and
        self.joint_target: Floats | None = None  # its goal, while joints are commanded
        self.u: Floats = ()  # of the joints' setpoint [rad/s]
        self.braking = 0.0, 0.0  # [m/s^2], [rad/s^2]
        self.apart_since = math.inf  # when the measured tool went too far from the setpoint

    def stand(self, measured: State) -> None:
        """Be at the measured pose, or the nearest allowed one, at rest; that is the target too."""
        self._place(measured)
        self.stay()
        self.joints, self.joint_target, self.apart_since = None, None, math.inf

    def brake_from(self, measured: State) -> None:
        """Go on from the measured pose at the measured velocity, within the limits, braking."""
        self._place(measured)
        self.drop_joints()
        self.v, self.w = (
            at_most(measured.twist[:3], self.limits.speed[0]),
            at_most(measured.twist[3:], self.limits.speed[1]),
        )

    def _place(self, measured: State) -> None:
        self.pos, self.quat = box(measured.pos, self.limits), upright(unit(measured.quat), self.limits)

    def stay(self) -> None:
        """Stop at once, with the target here."""
        assert self.pos is not None  # since `arm`
        self.target = self.pos, self.quat
        self.v = self.w = (0.0, 0.0, 0.0)

    def forget(self) -> None:
        """Nothing is asked of the arm."""
        self.pos, self.v, self.w = None, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)

    def drop_joints(self) -> None:
        """No joint targets any more; braking begins anew."""
        self.joints, self.joint_target, self.braking, self.apart_since = None, None, (0.0, 0.0), math.inf

    def aim(self, target: tuple[Floats, Floats]) -> None:
        """Go to a tool pose."""
        self.target, self.joints, self.joint_target = target, None, None

    def aim_joints(self, target: tuple[Floats, Floats], joints: Floats, measured: Floats) -> None:
        """Go to joints [rad] whose tool pose the target is, the first time from the measured ones."""
        if self.joints is None:
            self.joints, self.u = measured, (0.0,) * len(self.robot.joints)
        self.target, self.joint_target = target, joints

    def pursue(self, dt: float) -> None:
        """Velocity on the way to the target; joints move too."""
        o = self.limits
        assert self.pos is not None  # since `arm`
        if self.joints is not None and self.joint_target is not None:
            self.joints, (self.v, self.w, self.u) = joint_step(
                (self.pos, self.quat, self.joints),
                (*self.target, self.joint_target),
                (self.v, self.w, self.u),
                self.robot.velocity,
                o,
                dt,
            )
        else:
            goal, facing = self.target
            (a, b, c), (x, y, z) = goal, self.pos
            self.v = pursue((a - x, b - y, c - z), self.v, o.speed[0], o.accel[0], dt)
            self.w = pursue(turn_between(facing, self.quat), self.w, o.speed[1], o.accel[1], dt)

    def brake(self, dt: float, *, ends: bool, aims: bool) -> None:
        """Velocity on the way to rest. ends: at rest nothing is asked of the arm any more; aims: the target
        is where the setpoint is."""
        o, (linear, angular) = self.limits, self.braking
        self.v, linear = slower(self.v, linear, o.brake[0], o.brake_jerk[0], dt)
        self.w, angular = slower(self.w, angular, o.brake[1], o.brake_jerk[1], dt)
        self.braking = linear, angular
        if ends and not any((*self.v, *self.w)):
            self.pos = None
        elif aims and self.pos is not None:
            self.target = self.pos, self.quat

    def advance(self, dt: float) -> None:
        """Move by the velocity, inside the workspace."""
        if self.pos is not None and any(self.v):
            self.pos, self.v = moved_within(self.pos, self.v, dt, self.limits)
        if any(self.w):
            self.quat = upright(turned(self.quat, *(x * dt for x in self.w)), self.limits)

    def tracking_fault(self, measured: State, now: float) -> str:
        """A sentence when the measured tool has been too far from the setpoint for too long; "" while it has
        not."""
        assert self.pos is not None  # since `arm`
        far, (most, patience) = math.dist(self.pos, measured.pos), self.limits.tracking
        self.apart_since = min(self.apart_since, now) if far > most else math.inf
        return f"the tool is {far:.3f} m off" if now - self.apart_since > patience else ""
