"""One control law for compliant arms: Cartesian impedance, operational space, joint impedance, gravity compensation.

In base axes, with e = (p_d - p, log(R_d R^T)), twist v = J dq, reference (p_d, R_d, v_d, a_d) and W = (J M^-1 J^T)^-1:

    F    = K e + D (v_d - v) + F_feed             D = 2 z sqrt(K W_ii), or 2 z sqrt(K) in operational space
    t_0  = clip(K_n (q_d - q) + D_n (dq_d - dq))  posture
    t    = J^T (F + W a_d, or W (F + a_d)) + N t_0 + C dq + g + friction + joint-limit repulsion,  N = I - J^T W J M^-1
    t   <- clip to t_prev +- rate dt, then to +- the torque limit

The reference follows the target on the geodesic: first at a limited speed, then through a low pass of time constant T,
keep = exp(-dt/T), so that behaviour does not depend on the rate of the loop. Its velocity and acceleration are fed
forward: damping brakes deviations, not the motion that was asked for. W is regularised, (J M^-1 J^T + eps I)^-1. In the
damping W_ii is at most 4/A_ii with A = J M^-1 J^T: at a singularity it would have no bound.
Sources: Khatib 1987 (operational space); Albu-Schaffer et al. 2003 (impedance and its damping); the terms are those of
CRISP's Cartesian controller, from which we differ in: reference speed limit, filters in seconds, feed-forward of the
reference's motion, damping from the inertia that follows K, posture torque clipped before the projection (clipped after
it, it moves the tool), and every command but the pose expires.

A tick works on Python floats where vectors have 3 to 7 entries: NumPy's price of a call is that of 10 multiplications.
"""

import math
import struct
from dataclasses import dataclass, replace
from typing import Literal

import mujoco
import numpy as np

from controllers.model import ArmModel
from controllers.robot import Robot
from robo_rl.errors import UserError, choose, in_range
from robo_rl.geometry import Floats, rotate1, turn_between, turned, turned_towards, unit

SIX, TWELVE = np.eye(6), struct.Struct("12d").pack_into  # half the time of an assignment
SMALL = 1e-10  # m or rad; nearer than this the reference has arrived
MASS_AGE = 0.02  # s between two looks at W_ii; joints turn 2 degrees in that time


@dataclass(frozen=True, slots=True, kw_only=True)
class LawOptions:
    """Axes of six: translation x y z, then rotation about x y z. `None` switches a limit off."""

    task: Literal["impedance", "operational_space"] = "impedance"
    stiffness: tuple[float, ...] = (600.0, 600.0, 600.0, 30.0, 30.0, 30.0)
    """[N/m] and [N m/rad]; in operational space [1/s^2]. All 0: no Cartesian spring, only its damping, also 0."""
    damping_ratio: float = 1.0
    damping: tuple[float, ...] | None = None
    """[N s/m] and [N m s/rad] instead of the ratio; 0 is no damping."""
    frame: Literal["base", "tool"] = "base"
    """Axes of stiffness, damping and error clip."""
    error_clip: tuple[float, ...] | None = (0.1, 0.1, 0.1, 0.5, 0.5, 0.5)
    """Largest error per axis that the spring sees [m], [rad]: bounds its force to K times it."""
    target_speed: float = 0.25
    """Of the reference [m/s]."""
    target_turn: float = 1.0
    """Of the reference [rad/s]."""
    filter_time: float = 0.02
    """T of the reference's low pass [s]; 0: none."""
    feed_acceleration: tuple[float, float] = (4.0, 16.0)
    """Largest a_d per axis [m/s^2], [rad/s^2]; 0: none."""
    nullspace: Literal["dynamic", "kinematic", "none"] = "dynamic"
    posture_stiffness: float | tuple[float, ...] = 5.0
    """K_n, one or per joint [N m/rad]."""
    posture_damping: float | tuple[float, ...] | None = None
    """D_n [N m s/rad]; None: 2 sqrt(K_n), as for unit inertia."""
    posture_torque: float | None = 5.0
    """Largest posture torque per joint, before the projection [N m]."""
    posture_speed: float = 1.0
    """Of q_d towards its target [rad/s]."""
    limit_margin: float = 0.1
    """Joints are pushed back from this distance to their limits on [rad]."""
    limit_torque: float = 5.0
    """Repulsion at the limit [N m]; it grows linearly over the margin."""
    friction: bool = False
    """Add the robot's identified friction torques."""
    torque_rate: float | None = 500.0
    """[N m/s] per joint; never above the robot's."""
    torque_fraction: float = 0.8
    """Of the robot's torque limits."""
    ramp: float = 0.5
    """Seconds in which stiffness grows from 0 to its full value at activation, and the pace of every later change."""
    regularisation: float = 0.003
    """eps [1/kg]: W of a direction stays below 1/eps."""
    command_timeout: float = 0.1
    """Feed-forward wrench, joint velocity reference and commanded stiffness expire after this time [s]."""
    max_stiffness: tuple[float, float] = (3000.0, 300.0)
    """Upper limits of a commanded stiffness [N/m], [N m/rad]."""

    def __post_init__(self) -> None:
        choose("task", self.task, ("impedance", "operational_space"))
        choose("frame", self.frame, ("base", "tool"))
        choose("nullspace", self.nullspace, ("dynamic", "kinematic", "none"))
        for name in ("stiffness", "damping", "error_clip"):
            row = getattr(self, name)
            if row is not None and (len(row) != 6 or not all(0 <= x < math.inf for x in row)):
                raise UserError(f"{name} needs 6 finite numbers of at least 0, got {row}")
        for name, low in (("damping_ratio", 0.0), ("filter_time", 0.0), ("limit_torque", 0.0), ("ramp", 0.0)):
            in_range(name, getattr(self, name), low, math.inf, open_high=True)
        for name in ("target_speed", "target_turn", "posture_speed", "limit_margin", "regularisation",
                     "command_timeout"):
            in_range(name, getattr(self, name), 0, math.inf, open_low=True)
        in_range("torque_fraction", self.torque_fraction, 0, 1, open_low=True)


def joint_impedance(stiffness: float | tuple[float, ...] = 150.0, damping: float | tuple[float, ...] | None = None,
                    **more) -> LawOptions:
    """The same law without the Cartesian spring: only posture, unprojected and unclipped."""
    return LawOptions(stiffness=(0.0,) * 6, nullspace="none", posture_stiffness=stiffness, posture_damping=damping,
                      **{"posture_torque": None} | more)


def gravity_compensation(**more) -> LawOptions:
    """The same law without any spring: the arm floats, joint limits still push back."""
    return LawOptions(stiffness=(0.0,) * 6, nullspace="none", **{"posture_stiffness": 0.0} | more)


def operational_space(stiffness: tuple[float, ...] = (400.0,) * 6, **more) -> LawOptions:
    """The same law with the task's inertia decoupled: each axis is a unit mass on its spring."""
    return LawOptions(task="operational_space", stiffness=stiffness, **more)


def friction_torque(dq: list[float], phi1: list[float], phi2: list[float], phi3: list[float]) -> list[float]:
    """phi1/(1 + exp(-phi2 (dq + phi3))) - phi1/(1 + exp(-phi2 phi3)) per joint [N m]: smooth, and 0 at rest.

    Source: Gaz et al. 2019, "Dynamic identification of the Franka Emika Panda", eq. 22.
    """
    return [a / (1 + math.exp(min(-b * (v + c), 500.0))) - a / (1 + math.exp(-b * c))
            for v, a, b, c in zip(dq, phi1, phi2, phi3, strict=True)]


def limit_torque(q: float, lower: float, upper: float, margin: float, most: float) -> float:
    """Repulsion of one joint from its limits [N m]: `most` at the limit and beyond, 0 from `margin` [rad] inside."""
    return most * (min(max((lower + margin - q) / margin, 0.0), 1.0) - min(max((q - upper + margin) / margin, 0.0), 1.0))


def toward(now: Floats, target: Floats, most: float) -> Floats:
    """The point at distance `most` from `now` on the way to `target`; `target` itself when that is nearer."""
    x, y, z = target[0] - now[0], target[1] - now[1], target[2] - now[2]
    far = math.sqrt(x * x + y * y + z * z)
    if far <= most:
        return target
    s = most / far
    return now[0] + s * x, now[1] + s * y, now[2] + s * z


class Reference:
    """What the springs pull to: follows the target at a limited speed through a low pass, on the geodesic."""

    def __init__(self, pos: Floats, quat: Floats):
        self.target_pos = self.limited_pos = self.pos = pos
        self.target_quat = self.limited_quat = self.quat = quat
        self.velocity = (0.0,) * 6  # [m/s], [rad/s], base axes
        self.acceleration = (0.0,) * 6
        self.settled = True
        self._axis: Floats | None = None  # of the turn that limited_quat has yet to make,
        self._left = 0.0  # and its angle [rad]

    def aim(self, pos: Floats, quat: Floats) -> None:
        self.target_pos, self.target_quat, self.settled, self._axis = pos, quat, False, None

    def tick(self, dt: float, o: LawOptions, keep: float) -> None:
        """Advance by dt; keep = exp(-dt/T)."""
        go, rate = 1 - keep, 1 / dt
        if self.limited_pos is not self.target_pos:
            self.limited_pos = toward(self.limited_pos, self.target_pos, o.target_speed * dt)
        (ax, ay, az), (bx, by, bz) = self.limited_pos, self.pos
        x, y, z = go * (ax - bx), go * (ay - by), go * (az - bz)
        self.pos = (bx + x, by + y, bz + z)
        if self.limited_quat is not self.target_quat:
            self._turn(o.target_turn * dt)
        a = b = c = 0.0
        if self.quat is not self.target_quat:
            self.quat, a, b, c = turned_towards(self.quat, self.limited_quat, go)
            if a * a + b * b + c * c < SMALL * SMALL * go * go and self.limited_quat is self.target_quat:
                self.quat = self.target_quat
        x, y, z, a, b, c = rate * x, rate * y, rate * z, rate * a, rate * b, rate * c
        u, v, w, p, q, r = self.velocity
        self.velocity = (x, y, z, a, b, c)
        self.acceleration = (rate * (x - u), rate * (y - v), rate * (z - w), rate * (a - p), rate * (b - q), rate * (c - r))
        if self.quat is self.target_quat and self.limited_pos is self.target_pos and \
                x * x + y * y + z * z < SMALL * SMALL / (dt * dt):
            self.pos, self.velocity, self.acceleration = self.target_pos, (0.0,) * 6, (0.0,) * 6
            self.settled = True

    def _turn(self, most: float) -> None:
        """Turn limited_quat by at most `most` [rad] on the geodesic to the target: all the way about one axis."""
        if self._axis is None:
            x, y, z = turn_between(self.target_quat, self.limited_quat)
            self._left = math.sqrt(x * x + y * y + z * z)
            if self._left > most:
                self._axis = x / self._left, y / self._left, z / self._left
        if self._left <= most:
            self.limited_quat = self.target_quat
            return
        self._left -= most
        x, y, z = self._axis
        self.limited_quat = turned(self.limited_quat, most * x, most * y, most * z)


class Law:
    """The law's memory between ticks. `activate` first; `tick` once per period; setters whenever a message comes."""

    def __init__(self, options: LawOptions, robot: Robot):
        self.options, self.robot, n = options, robot, len(robot.joints)
        self.kn = per_joint("posture_stiffness", options.posture_stiffness, n)
        damping = options.posture_damping
        self.dn = 2 * np.sqrt(self.kn) if damping is None else per_joint("posture_damping", damping, n)
        self._posture = np.concatenate([np.diag(self.kn), np.diag(self.dn)], 1)  # [n, 2n], times (q, dq)
        if options.friction and robot.friction is None:
            raise UserError(f"robot {robot.name} has no identified friction: switch friction off")
        rate = options.torque_rate
        self.rate = robot.torque_rate if rate is None else min(rate, robot.torque_rate)
        self.most = [t * options.torque_fraction for t in robot.torque]
        margin = options.limit_margin
        self.low, self.high = [x + margin for x in robot.lower], [x - margin for x in robot.upper]
        self.faults = 0  # ticks without a finite result; the last torques are held
        self._cap = math.inf if options.posture_torque is None else options.posture_torque
        self._keep, self._keep_dt = 0.0, -1.0
        self._a, self._x = np.zeros((6, 6)), np.zeros(6)
        self._twelve = np.zeros(12)  # a wrench and an acceleration
        self._wrench, self._move = self._twelve[:6], self._twelve[6:]
        self._twist, self._none = np.zeros(6), [0.0] * n
        self._epsilon = options.regularisation * np.eye(6)
        self._rigid = any(options.stiffness) or options.nullspace == "dynamic"  # W is needed
        self._holds = self._rigid or options.nullspace == "kinematic"  # there is a wrench at the tool, always
        self._weighs = options.damping is None and options.task == "impedance"  # damping goes by W_ii
        self._lowest, self._highest = np.array(robot.lower), np.array(robot.upper)
        self.activated = False

    # ---- commands -------------------------------------------------------------------------------------------------

    def activate(self, model: ArmModel, torque: np.ndarray | None = None) -> None:
        """Start from the measured state without a jump: targets are where the arm is, references are at rest.

        torque [n] [N m]: what the joints carry now; None: what `model.bias` says holds the arm.
        """
        n = model.n
        if n != len(self.robot.joints):
            raise UserError(f"robot {self.robot.name} has {len(self.robot.joints)} joints, the model {n}")
        self.reference = Reference(tuple(model.pos), tuple(model.quat))
        self.q_target = self.q_ref = model.q.tolist()
        self.dq_ref = [0.0] * n
        start = (model.bias if torque is None else vector("torque", torque, n)).tolist()
        self.tau = [min(max(t, -m), m) for t, m in zip(start, self.most, strict=True)]
        self.k, self.k_target = [0.0] * 6, list(self.options.stiffness)
        self.gain = 0.0 if self.options.ramp else 1.0  # of the posture's spring
        self._gain, self._k = -1.0, self.kn  # what `_posture` was made for
        self.feed: list[float] | None = None
        self.feed_frame = "base"
        self.d = [0.0] * 6
        self._feed_age = self._dq_age = self._k_age = math.inf
        self._mass_age, self._masses = math.inf, [1.0] * 6
        self._k_moves, self._q_moves = True, False
        self._pull()
        self.activated = True

    def stand(self) -> None:
        """Springs at full stiffness at once: for an arm that was put at its targets, at rest."""
        self.gain, self.k = 1.0, list(self.k_target)
        self._pull()

    def set_target(self, pos: np.ndarray, quat: np.ndarray) -> None:
        """Tool pose in the base frame: pos [m], quat (w, x, y, z) of length 1."""
        p, q = vector("target position", pos, 3), vector("target quaternion", quat, 4)
        length = math.sqrt(float(q @ q))
        if abs(length - 1) > 1e-2:
            raise UserError(f"target quaternion must have length 1 within 0.01, got {length:.4g}")
        self.reference.aim(tuple(p.tolist()), unit(tuple(q.tolist())))

    def rebase(self, model: ArmModel) -> None:
        """Let the reference go on from the measured pose: the springs lose their tension, damping stays."""
        self.reference = Reference(tuple(model.pos), tuple(model.quat))
        self.reference.velocity = tuple(model.jac.dot(model.dq).tolist())
        self.reference.settled = False

    def set_joints(self, q: np.ndarray, dq: np.ndarray | None = None) -> None:
        """Posture target [rad]; `dq` [rad/s] is a velocity reference that expires."""
        n = len(self.q_ref)
        self.q_target = np.clip(vector("joint target", q, n), self.robot.lower, self.robot.upper).tolist()
        self._q_moves = True
        if dq is not None:
            v = vector("joint velocity reference", dq, n)
            self.dq_ref, self._dq_age = np.clip(v, np.negative(self.robot.velocity), self.robot.velocity).tolist(), 0.0
            self._pull()

    def aim_joints(self, q: np.ndarray) -> None:
        """Posture target [rad] from this process, every tick: not checked, clipped to the joints' limits."""
        self.q_target, self._q_moves = np.minimum(np.maximum(q, self._lowest), self._highest).tolist(), True

    def set_wrench(self, wrench: np.ndarray, frame: str = "base") -> None:
        """Feed-forward force [N] and moment [N m] [6] at the tool, in axes of `frame`; expires."""
        self.feed_frame = choose("frame", frame, ("base", "tool"))
        self.feed, self._feed_age = vector("wrench", wrench, 6).tolist(), 0.0

    def set_stiffness(self, stiffness: np.ndarray) -> None:
        """Stiffness [6] to go to at the ramp's pace, damping with it; expires, back to the configured one."""
        k = vector("stiffness", stiffness, 6).tolist()
        if min(k) < 0:
            raise UserError(f"stiffness must be at least 0, got {k}")
        linear, angular = self.options.max_stiffness
        self.k_target = [min(x, linear) for x in k[:3]] + [min(x, angular) for x in k[3:]]
        self._k_age, self._k_moves = 0.0, True

    def set_options(self, options: LawOptions) -> None:
        """Go on with another stiffness, damping ratio, error clip or reference speed; stiffness ramps as always.

        UserError for a stiffness above `max_stiffness`, and for anything that only `activate` can change.
        """
        free = {f: getattr(options, f) for f in ("stiffness", "damping_ratio", "error_clip", "target_speed", "target_turn",
                                                 "filter_time")}
        if replace(self.options, **free) != options:
            raise UserError(f"while the law runs it can change {', '.join(free)} alone")
        most = [self.options.max_stiffness[0]] * 3 + [self.options.max_stiffness[1]] * 3
        if any(k > m for k, m in zip(options.stiffness, most, strict=True)):
            raise UserError(f"stiffness must be at most {most[0]:g} N/m and {most[3]:g} N m/rad, got {options.stiffness}")
        if any(options.stiffness) and not self._rigid:
            raise UserError("this law has no Cartesian spring: switch to one that has")
        self.options, self.k_target = options, list(options.stiffness)
        self._k_age, self._k_moves, self._keep_dt = math.inf, True, -1.0

    # ---- one tick -------------------------------------------------------------------------------------------------

    def tick(self, model: ArmModel, dt: float) -> np.ndarray:
        """Torques [n] [N m] for the state in `model`; dt [s] since the last tick.

        If the result is not finite the last torques are returned and `faults` counts: the caller must stop.
        """
        o, jac, a = self.options, model.jac, self._a
        if dt != self._keep_dt:
            self._keep_dt, self._keep = dt, math.exp(-dt / o.filter_time) if o.filter_time else 0.0
        self._age(dt)
        if not self.reference.settled:
            self.reference.tick(dt, o, self._keep)
        self._mass_age += dt
        if self._mass_age >= MASS_AGE and self._weighs and any(self.k):
            self._weigh(model)
        wrench, move, pulled = self._wrench, self._move, self._holds or self.feed is not None or any(self.k) or any(self.d)
        if pulled:
            TWELVE(self._twelve, 0, *self._force(model, jac.dot(model.dq, self._twist).tolist()), *self._acceleration())

        # t = J^T (F + W (a_d - J M^-1 t_0)) + t_0: acceleration and projection share one solve
        posture = self._posture.dot(model.state)
        np.subtract(self._pull_to, posture, posture)
        small = posture.tolist()
        if max(small) > self._cap or min(small) < -self._cap:
            posture = posture.clip(-self._cap, self._cap)
            small = posture.tolist()
        if self._rigid:
            jac.dot(model.minv_j, a)
            np.add(a, self._epsilon, a)
            mujoco.mju_cholFactor(a, 1e-12)
            if o.nullspace == "dynamic":
                move -= model.minv_jt.dot(posture)
            if o.task == "impedance":
                mujoco.mju_cholSolve(self._x, a, move)
                wrench += self._x
            else:
                move += wrench
                mujoco.mju_cholSolve(wrench, a, move)
        if o.nullspace == "kinematic":
            wrench -= through(jac, posture)

        q = model.q.tolist()
        if o.friction:
            small = [p + f for p, f in zip(small, friction_torque(model.dq.tolist(), **self.robot.friction), strict=True)]
        step, out = self.rate * dt, []
        pull = wrench.dot(jac).tolist() if pulled else self._none
        for t, p, b, x, low, high, last, most in zip(pull, small, model.bias.tolist(), q, self.low,
                                                     self.high, self.tau, self.most, strict=True):
            t += p + b
            if x < low or x > high:
                t += limit_torque(x, low - o.limit_margin, high + o.limit_margin, o.limit_margin, o.limit_torque)
            if t > last + step:
                t = last + step
            elif t < last - step:
                t = last - step
            out.append(most if t > most else -most if t < -most else t)  # noqa: FURB136, min and max cost 10 times more
        total = sum(out)
        if total - total == 0:
            self.tau = out
        else:
            self.faults += 1
        return np.array(self.tau)

    def _age(self, dt: float) -> None:
        """What expires, expires; what ramps, ramps."""
        o, pulls = self.options, False
        if self.feed is not None:
            self._feed_age += dt
            if self._feed_age > o.command_timeout:
                self.feed = None
        if self._dq_age < math.inf:
            self._dq_age += dt
            if self._dq_age > o.command_timeout:
                self._dq_age, self.dq_ref, pulls = math.inf, [0.0] * len(self.dq_ref), True
        if self._k_age < math.inf:
            self._k_age += dt
            if self._k_age > o.command_timeout:
                self._k_age, self.k_target, self._k_moves = math.inf, list(o.stiffness), True
        if self.gain < 1:
            self.gain, pulls = min(self.gain + dt / o.ramp, 1.0), True
        if self._k_moves:
            paces = [max(c, t) * dt / o.ramp if o.ramp else math.inf
                     for c, t in zip(o.stiffness, self.k_target, strict=True)]
            self.k = [k + min(max(t - k, -p), p) for k, t, p in zip(self.k, self.k_target, paces, strict=True)]
            self.d = self._damping()
            self._k_moves = self.k != self.k_target
        if self._q_moves:
            most = o.posture_speed * dt
            self.q_ref = [r + min(max(t - r, -most), most) for r, t in zip(self.q_ref, self.q_target, strict=True)]
            self._q_moves, pulls = self.q_ref != self.q_target, True
        if pulls:
            self._pull()

    def _pull(self) -> None:
        """Prepare t_0 = _pull_to - _posture (q, dq), which is gain (K_n (q_d - q) + D_n dq_d) - D_n dq at full gain.

        Springs ramp, damping does not.
        """
        if self.gain != self._gain:
            self._gain, self._k = self.gain, self.gain * self.kn
            self._posture[:, :len(self._k)] = np.diag(self._k)
        self._pull_to = self._k * np.array(self.q_ref)
        if self._dq_age < math.inf:
            self._pull_to += self.dn * self.dq_ref

    def _force(self, model: ArmModel, twist: list[float]) -> Floats:
        """F [6] in base axes."""
        o, r = self.options, self.reference
        px, py, pz = model.pos
        rx, ry, rz = r.pos
        a, b, c, d, e, f = rx - px, ry - py, rz - pz, *turn_between(r.quat, model.quat)
        p, q, s, t, u, v = r.velocity
        g, h, i, j, k, m = twist
        p, q, s, t, u, v = p - g, q - h, s - i, t - j, u - k, v - m
        if o.frame == "tool":
            w, x, y, z = quat = model.quat
            (a, b, c), (d, e, f) = rotate1((w, -x, -y, -z), (a, b, c)), rotate1((w, -x, -y, -z), (d, e, f))
            (p, q, s), (t, u, v) = rotate1((w, -x, -y, -z), (p, q, s)), rotate1((w, -x, -y, -z), (t, u, v))
        if o.error_clip is not None:
            g, h, i, j, k, m = o.error_clip
            if not (-g <= a <= g and -h <= b <= h and -i <= c <= i and -j <= d <= j and -k <= e <= k and -m <= f <= m):
                a, b, c, d, e, f = (min(max(x, -y), y) for x, y in zip((a, b, c, d, e, f), o.error_clip, strict=True))
        g, h, i, j, k, m = self.k
        ga, ha, ia, ja, ka, ma = self.d
        force = (g * a + ga * p, h * b + ha * q, i * c + ia * s, j * d + ja * t, k * e + ka * u, m * f + ma * v)
        if o.frame == "tool":
            force = (*rotate1(quat, force[:3]), *rotate1(quat, force[3:]))
        if self.feed is not None:
            feed = self.feed
            if self.feed_frame == "tool":
                feed = [*rotate1(model.quat, feed[:3]), *rotate1(model.quat, feed[3:])]
            force = tuple(f + x for f, x in zip(force, feed, strict=True))
        return force

    def _acceleration(self) -> Floats:
        """a_d [6], bounded."""
        linear, angular = self.options.feed_acceleration
        a, b, c, d, e, f = now = self.reference.acceleration
        if -linear <= a <= linear and -linear <= b <= linear and -linear <= c <= linear and \
                -angular <= d <= angular and -angular <= e <= angular and -angular <= f <= angular:
            return now
        return (*(min(max(x, -linear), linear) for x in (a, b, c)), *(min(max(x, -angular), angular) for x in (d, e, f)))

    def _damping(self) -> list[float]:
        """D's diagonal for the stiffness of this moment."""
        o, z = self.options, 2 * self.options.damping_ratio
        if o.damping is not None:
            return list(o.damping)
        if o.task == "operational_space":
            return [z * math.sqrt(k) for k in self.k]
        return [z * math.sqrt(k * m) for k, m in zip(self.k, self._masses, strict=True)]

    def _weigh(self, model: ArmModel) -> None:
        """Look at W_ii [kg], [kg m^2] in the axes of the stiffness, at most 4/A_ii, and set the damping."""
        a = model.jac.dot(model.minv_j)
        if self.options.frame == "tool":
            turn = np.zeros((6, 6))
            turn[:3, :3] = turn[3:, 3:] = model.rotation
            a = turn.T @ a @ turn
        diagonal = a.diagonal().tolist()
        if math.isfinite(sum(diagonal)):
            a += self._epsilon
            mujoco.mju_cholFactor(a, 1e-12)
            for i, row in enumerate(SIX):
                mujoco.mju_cholSolve(self._x, a, row)
                self._masses[i] = min(float(self._x[i]), 4 / max(diagonal[i], 1e-6))
            self._mass_age, self.d = 0.0, self._damping()


def through(jac: np.ndarray, torque: np.ndarray) -> np.ndarray:
    """(J J^T + 1e-6 I)^-1 J t: what of a torque t the tool would feel, by kinematics alone."""
    square = jac.dot(jac.T)
    square.reshape(-1)[::7] += 1e-6
    return np.linalg.solve(square, jac.dot(torque))


def vector(name: str, x: np.ndarray, n: int) -> np.ndarray:
    """x as float [n], or UserError that says what is wrong with it."""
    try:
        v = np.asarray(x, float)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be {n} numbers, got {x!r}") from None
    if v.shape != (n,):
        raise UserError(f"{name} must have {n} numbers, got shape {v.shape}")
    if not np.isfinite(v).all():
        raise UserError(f"{name} must be finite, got {v.tolist()}")
    return v


def per_joint(name: str, x: float | tuple[float, ...], n: int) -> np.ndarray:
    """One number for all joints, or n of them, none negative."""
    row = [float(x)] * n if isinstance(x, (int, float)) else [float(v) for v in x]
    if len(row) != n or not all(0 <= v < math.inf for v in row):
        raise UserError(f"{name} needs one number or {n}, at least 0, got {x}")
    return np.array(row)


# ---- admittance -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittanceOptions:
    """A virtual mass on a spring and damper between the target and what the law tracks."""

    mass: tuple[float, float] = (1.0, 0.1)  # [kg], [kg m^2]
    stiffness: tuple[float, float] = (200.0, 10.0)  # [N/m], [N m/rad]
    damping: tuple[float, float] | None = None  # [N s/m], [N m s/rad]; None: critical, 2 sqrt(m K)

    def __post_init__(self) -> None:
        if min(self.mass) <= 0 or min(self.stiffness) < 0 or (self.damping is not None and min(self.damping) < 0):
            raise UserError(f"admittance needs mass above 0, stiffness and damping at least 0, got {self}")


class Admittance:
    """m a = F_ext - D v + K (target - pose), semi-implicit Euler; F_ext measured at the tool, in base axes."""

    def __init__(self, options: AdmittanceOptions, pos: Floats, quat: Floats):
        self.options, self.pos, self.quat, self.twist = options, pos, quat, (0.0,) * 6
        self.damping = options.damping or tuple(2 * math.sqrt(m * k) for m, k in
                                                zip(options.mass, options.stiffness, strict=True))

    def tick(self, pos: Floats, quat: Floats, wrench: Floats, dt: float) -> tuple[Floats, Floats]:
        """Compliant pose for target (pos, quat) and wrench [6] [N], [N m]. A wrench that is not finite counts as 0."""
        if not all(math.isfinite(w) for w in wrench):
            wrench = (0.0,) * 6
        error = (*(a - b for a, b in zip(pos, self.pos, strict=True)), *turn_between(quat, self.quat))
        m, k, d = ([x] * 3 + [y] * 3 for x, y in (self.options.mass, self.options.stiffness, self.damping))
        self.twist = tuple(v + dt / mi * (f - di * v + ki * e) for v, mi, f, di, ki, e in
                           zip(self.twist, m, wrench, d, k, error, strict=True))
        vx, vy, vz, wx, wy, wz = (dt * v for v in self.twist)
        self.pos = (self.pos[0] + vx, self.pos[1] + vy, self.pos[2] + vz)
        self.quat = turned(self.quat, wx, wy, wz)
        return self.pos, self.quat
