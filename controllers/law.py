"""One control law for compliant arms: Cartesian impedance, operational space, joint impedance, gravity
compensation.

In base axes, with e = (p_d - p, log(R_d R^T)), twist v = J dq, reference (p_d, R_d, v_d, a_d) and W = (J M^-1
J^T)^-1:

    F    = K e + D (v_d - v) + F_feed             D = 2 z sqrt(K W_ii), or 2 z sqrt(K) in operational space
    t_0  = clip(K_n (q_d - q) + D_n (dq_d - dq))  posture
    t    = J^T (F + W a_d, or W (F + a_d)) + N t_0 + C dq + g + friction + joint-limit repulsion,  N = I - J^T
         W J M^-1
    t   <- t + s (t_before - t_after)            where the law begins anew: after activation or a rebase; s
        from 1 to 0 in 0.06 s
    t   <- clip to t_prev +- rate dt, then to +- the torque limit

The reference follows the target on the geodesic: first at a limited speed, then through a low pass of time
constant T, keep = exp(-dt/T), so that behaviour does not depend on the rate of the loop. Its velocity and
acceleration are fed forward: damping brakes deviations, not the motion that was asked for. W is regularised,
(J M^-1 J^T + eps I)^-1; impedance's projection corrects that, W (I + eps W + (eps W)^2), so that the posture
pushes the tool nowhere and F = K e at rest. In the damping W_ii is at most 4/A_ii with A = J M^-1 J^T: at a
singularity it would have no bound. In operational space the eigenvalues of A + eps I (a turn counts as motion
at 0.2 m) are at least 1/`mass_limit` and K/(20 kN/m): the arm gives up those directions that a singularity
takes from it, and no other.
Sources: Khatib 1987 (operational space); Albu-Schaffer et al. 2003 (impedance and its damping); the terms are
those of CRISP's Cartesian controller, from which we differ in: reference speed limit, filters in seconds,
feed-forward of the reference's motion, damping from the inertia that follows K, posture torque clipped before
the projection (clipped after it, it moves the tool), and every command but the pose expires.

`tick.py` has the arithmetic, compiled; here are the options, the commands and the rules for both.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from controllers.compliance import Compliance
from controllers.memory import prepare, record
from controllers.model import ArmModel
from controllers.robot import Robot
from controllers.tick import DYNAMIC, FREE, KINEMATIC, tick
from robo_rl.errors import UserError, choose, in_range

MOST_STIFFNESS = (5000.0, 500.0)  # [N/m], [N m/rad]: what `max_stiffness` may be
# [N s/m], [N m s/rad]: some 2 sqrt(K W) of the stiffest spring on the heaviest axis
MOST_DAMPING = (500.0, 50.0)
MOST_CLIP = (0.5, math.pi)  # [m], [rad]
# [1/s^2], stiffness in operational space: beyond it torques of a limited rate are too late at full stretch
MOST_DECOUPLED = 2000.0
RATIO = (0.1, 2.0)  # of damping: below it an arm rings, above it the noise of its speeds is felt
MOST_POSTURE = (10_000.0, 1000.0)  # [N m/rad], [N m s/rad]: a position servo's


@dataclass(frozen=True, slots=True, kw_only=True)
class LawOptions:
    """Axes of six: translation x y z, then rotation about x y z. `None` switches a limit off.

    Every gain is bounded here, so that no file, service or message can bring an unbounded one, to a
    controller that holds the arm or to one that waits.
    """

    task: Literal["impedance", "operational_space"] = "impedance"
    stiffness: tuple[float, ...] = (600.0, 600.0, 600.0, 30.0, 30.0, 30.0)
    """[N/m] and [N m/rad]; in operational space [1/s^2]. All 0: no Cartesian spring, only its damping, also
    0."""
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
    """Seconds in which stiffness grows from 0 to its full value at activation, and the pace of every later
    change."""
    regularisation: float = 0.003
    """eps [1/kg]: W of a direction stays below 1/eps."""
    mass_limit: float = 50.0
    """Largest mass that operational space moves in any direction [kg], and never stiffer than 20 kN/m; a turn
    counts as motion at 0.2 m. Near a singularity W would be beyond it, and the force is that of this mass."""
    command_timeout: float = 0.1
    """Feed-forward wrench, joint velocity reference and commanded stiffness expire after this time [s]."""
    max_stiffness: tuple[float, float] = (3000.0, 300.0)
    """Upper limits of a commanded stiffness [N/m], [N m/rad]; in operational space the first for all, and at
    most 2000 [1/s^2]."""

    def __post_init__(self) -> None:
        choose("task", self.task, ("impedance", "operational_space"))
        choose("frame", self.frame, ("base", "tool"))
        choose("nullspace", self.nullspace, ("dynamic", "kinematic", "none"))
        if len(self.max_stiffness) != 2 or not all(
            0 <= x <= m for x, m in zip(self.max_stiffness, MOST_STIFFNESS, strict=True)
        ):
            raise UserError(
                f"max_stiffness needs 2 numbers from 0 to {MOST_STIFFNESS[0]:g} N/m and "
                f"{MOST_STIFFNESS[1]:g} N m/rad, got {self.max_stiffness}"
            )
        for name, most in (
            ("stiffness", self.most_stiffness),
            ("damping", MOST_DAMPING),
            ("error_clip", MOST_CLIP),
        ):
            row = getattr(self, name)
            if row is not None and (
                len(row) != 6 or not all(0 <= x <= most[i // 3] for i, x in enumerate(row))
            ):
                raise UserError(
                    f"{name} needs 6 numbers from 0 to {most[0]:.4g} along and {most[1]:.4g} about the axes, "
                    f"got {row}"
                )
        in_range("damping_ratio", self.damping_ratio, *RATIO)
        for name in ("filter_time", "limit_torque", "ramp"):
            in_range(name, getattr(self, name), 0, math.inf, open_high=True)
        for name in (
            "target_speed",
            "target_turn",
            "posture_speed",
            "limit_margin",
            "regularisation",
            "mass_limit",
            "command_timeout",
        ):
            in_range(name, getattr(self, name), 0, math.inf, open_low=True, open_high=True)
        in_range("torque_fraction", self.torque_fraction, 0, 1, open_low=True)

    @property
    def most_stiffness(self) -> tuple[float, float]:
        """Of any stiffness, along and about the axes."""
        most = min(self.max_stiffness[0], MOST_DECOUPLED)
        return self.max_stiffness if self.task == "impedance" else (most, most)


def joint_impedance(
    stiffness: float | tuple[float, ...] = 150.0,
    damping: float | tuple[float, ...] | None = None,
    **more: Any,
) -> LawOptions:
    """The same law without the Cartesian spring: only posture, unprojected and unclipped."""
    return LawOptions(
        stiffness=(0.0,) * 6,
        nullspace="none",
        posture_stiffness=stiffness,
        posture_damping=damping,
        **dict[str, Any](posture_torque=None) | more,
    )


def gravity_compensation(**more: Any) -> LawOptions:
    """The same law without any spring: the arm floats, joint limits still push back."""
    return LawOptions(stiffness=(0.0,) * 6, nullspace="none", **dict[str, Any](posture_stiffness=0.0) | more)


def operational_space(stiffness: tuple[float, ...] = (400.0,) * 6, **more: Any) -> LawOptions:
    """The same law with the task's inertia decoupled: each axis is a unit mass on its spring."""
    return LawOptions(task="operational_space", stiffness=stiffness, **more)


class Reference:
    """What the springs pull to: follows the target at a limited speed through a low pass, on the geodesic.

    Views of the law's memory: target_pos, pos [3] [m], target_quat, quat [4]; velocity [6] [m/s], [rad/s] and
    acceleration [6], base axes; left < 0: the turn to the target has yet to be looked at.
    """

    target_pos: np.ndarray
    target_quat: np.ndarray
    limited_pos: np.ndarray
    limited_quat: np.ndarray
    pos: np.ndarray
    quat: np.ndarray
    velocity: np.ndarray
    acceleration: np.ndarray

    def __init__(self, memory: np.void):
        self._m = memory
        for name in (
            "target_pos",
            "target_quat",
            "limited_pos",
            "limited_quat",
            "pos",
            "quat",
            "velocity",
            "acceleration",
        ):
            setattr(self, name, memory[name])

    @property
    def settled(self) -> bool:
        """At the target and at rest."""
        return bool(self._m["settled"])

    def start(self, pos: ArrayLike, quat: ArrayLike, velocity: np.ndarray | float = 0.0) -> None:
        """Be at a pose, which is the target too, moving with `velocity` [6]."""
        self.target_pos[:] = self.limited_pos[:] = self.pos[:] = pos
        self.target_quat[:] = self.limited_quat[:] = self.quat[:] = quat
        self.velocity[:], self.acceleration[:] = velocity, 0.0
        self._m["left"], self._m["settled"] = 0.0, not np.any(velocity)

    def aim(self, pos: ArrayLike, quat: ArrayLike) -> None:
        """Go to another pose; quat of length 1."""
        self.target_pos[:], self.target_quat[:] = pos, quat
        self._m["left"], self._m["settled"] = -1.0, 0


class Law:
    """The law's memory between ticks. `activate` first; `tick` once per period; setters whenever a message
    comes.

    Views of it: k, d [6] stiffness and damping now, k_target [6]; q_ref, q_target, dq_ref [n]; feed [6]; tau
    [n] [N m].
    """

    k: np.ndarray
    k_target: np.ndarray
    d: np.ndarray
    q_ref: np.ndarray
    q_target: np.ndarray
    dq_ref: np.ndarray
    feed: np.ndarray
    tau: np.ndarray

    def __init__(self, options: LawOptions, robot: Robot):
        n = len(robot.joints)
        if options.friction and robot.friction is None:
            raise UserError(f"robot {robot.name} has no identified friction: switch friction off")
        self.options, self.robot = options, robot
        self._record = record(n)
        m = self._m = self._record[0]
        for name in ("k", "k_target", "d", "q_ref", "q_target", "dq_ref", "feed", "tau"):
            setattr(self, name, m[name])
        self.reference = Reference(m)
        kn = m["kn"][:] = per_joint("posture_stiffness", options.posture_stiffness, n, MOST_POSTURE[0])
        damping = options.posture_damping
        m["dn"][:] = (
            2 * np.sqrt(kn) if damping is None else per_joint("posture_damping", damping, n, MOST_POSTURE[1])
        )
        rate = options.torque_rate
        m["torque_rate"] = robot.torque_rate if rate is None else min(rate, robot.torque_rate)
        m["most"][:] = np.multiply(robot.torque, options.torque_fraction)
        m["low"][:], m["high"][:] = (
            np.add(robot.lower, options.limit_margin),
            np.subtract(robot.upper, options.limit_margin),
        )
        m["posture_cap"] = math.inf if options.posture_torque is None else options.posture_torque
        m["feed_linear"], m["feed_angular"] = options.feed_acceleration
        for name in (
            "posture_speed",
            "limit_margin",
            "limit_torque",
            "ramp",
            "regularisation",
            "command_timeout",
            "friction",
        ):
            m[name] = getattr(options, name)
        for name, row in (robot.friction or {}).items():
            m[name][:] = row
        m["operational"], m["tool_axes"] = options.task == "operational_space", options.frame == "tool"
        m["least"], m["axes"][:] = 1 / options.mass_limit, np.eye(6)
        m["nullspace"] = {"none": FREE, "kinematic": KINEMATIC, "dynamic": DYNAMIC}[options.nullspace]
        m["rigid"] = any(options.stiffness) or options.nullspace == "dynamic"  # W is needed
        m["damping_given"], m["fixed_damping"][:] = options.damping is not None, options.damping or 0.0
        self._change()
        self._arrive()
        self._lowest, self._highest = np.array(robot.lower), np.array(robot.upper)
        # complies: with what a governor allows of a commanded wrench or stiffness
        self.activated = self.complies = False
        prepare(n)

    def _change(self) -> None:
        """Bring the options that may change to the memory; damping ratio and error clip are gone to as the
        stiffness is."""
        m, o = self._m, self.options
        clip = math.inf if o.error_clip is None else o.error_clip
        m["stiffness"][:], m["clip_target"][:], m["ratio_target"] = o.stiffness, clip, o.damping_ratio
        for name in ("target_speed", "target_turn", "filter_time"):
            m[name] = getattr(o, name)

    def _arrive(self) -> None:
        """Be at the damping ratio and error clip that are gone to."""
        m = self._m
        m["error_clip"][:], m["damping_ratio"] = m["clip_target"], m["ratio_target"]

    def _aim_stiffness(self, k: np.ndarray) -> None:
        """Let the stiffness go to k [6] within the ramp's time."""
        m = self._m
        m["k_target"][:], m["k_pace"][:] = k, np.maximum(np.maximum(m["stiffness"], k), m["k"])

    @property
    def faults(self) -> int:
        """Ticks without a finite result; the last torques were held."""
        return int(self._m["faults"])

    @property
    def fed(self) -> bool:
        """A feed-forward wrench is in force."""
        return bool(self._m["feed_age"] <= self.options.command_timeout)

    @property
    def gain(self) -> float:
        """Of the posture's spring: it ramps from 0 to 1, its damping does not."""
        return float(self._m["gain"])

    # ---- commands ------------------------------------------------------------------------------------------

    def activate(self, model: ArmModel, torque: np.ndarray | None = None) -> None:
        """Start from the measured state without a jump: targets are where the arm is, references are at rest.

        torque [n] [N m]: what the joints carry now; None: what `model.bias` says holds the arm.
        """
        m, n = self._m, model.n
        if n != len(self.robot.joints):
            raise UserError(f"robot {self.robot.name} has {len(self.robot.joints)} joints, the model {n}")
        self.reference.start(model.pos, model.quat)
        self.q_target[:] = self.q_ref[:] = model.q
        self.dq_ref[:] = self.k[:] = self.d[:] = 0.0
        self.tau[:] = np.clip(
            model.bias if torque is None else vector("torque", torque, n), -m["most"], m["most"]
        )
        self._aim_stiffness(m["stiffness"])
        self._arrive()
        m["masses"][:], m["gain"], m["stale"] = 1.0, 0.0 if self.options.ramp else 1.0, 1
        m["lag"], m["carry"], m["fade"], m["residual"][:] = m["filter_time"], torque is not None, 0.0, 0.0
        m["feed_age"] = m["dq_age"] = m["k_age"] = m["mass_age"] = math.inf
        m["pull"][:], m["opens"], self.complies = math.inf, 0, False
        self.activated = True

    def stand(self) -> None:
        """Springs and damping at their full values at once: for an arm that was put at its targets, at
        rest."""
        m = self._m
        m["gain"], self.k[:], m["stale"], m["carry"], m["fade"] = 1.0, self.k_target, 1, 0, 0.0
        self._arrive()

    def set_target(self, pos: np.ndarray, quat: np.ndarray) -> None:
        """Tool pose in the base frame: pos [m], quat (w, x, y, z) of length 1."""
        p, q = vector("target position", pos, 3), vector("target quaternion", quat, 4)
        length = math.sqrt(float(q @ q))
        if abs(length - 1) > 1e-2:
            raise UserError(f"target quaternion must have length 1 within 0.01, got {length:.4g}")
        self.reference.aim(p, q / length)

    def rebase(self, model: ArmModel) -> None:
        """Let the reference go on from the measured pose and motion, without lag: the springs lose their
        tension, smoothly, damping stays."""
        self.reference.start(model.pos, model.quat, model.jac.dot(model.dq))
        self._m["lag"], self._m["carry"] = 0.0, 1

    def set_joints(self, q: np.ndarray, dq: np.ndarray | None = None) -> None:
        """Posture target [rad]; `dq` [rad/s] is a velocity reference that expires."""
        n = len(self.q_ref)
        self.q_target[:] = np.clip(vector("joint target", q, n), self._lowest, self._highest)
        if dq is not None:
            v = vector("joint velocity reference", dq, n)
            self.dq_ref[:] = np.clip(v, np.negative(self.robot.velocity), self.robot.velocity)
            self._m["dq_age"] = 0.0

    def aim_joints(self, q: np.ndarray) -> None:
        """Posture target [rad] from this process, every tick: not checked, clipped to the joints' limits."""
        np.minimum(np.maximum(q, self._lowest), self._highest, self.q_target)

    def set_wrench(self, wrench: np.ndarray, frame: str = "base") -> None:
        """Feed-forward force [N] and moment [N m] [6] at the tool, in axes of `frame`; expires."""
        self._m["feed_tool_axes"] = choose("frame", frame, ("base", "tool")) == "tool"
        self.feed[:], self._m["feed_age"] = vector("wrench", wrench, 6), 0.0

    def set_stiffness(self, stiffness: np.ndarray) -> None:
        """Stiffness [6] to go to at the ramp's pace, damping with it; expires, back to the configured one."""
        k = vector("stiffness", stiffness, 6)
        if k.min() < 0:
            raise UserError(f"stiffness must be at least 0, got {k.tolist()}")
        self._aim_stiffness(np.minimum(k, np.repeat(self.options.most_stiffness, 3)))
        self._m["k_age"] = 0.0

    def comply(self, asked: Compliance) -> None:
        """For a tick: wrench, stiffness and the largest static pull of the springs; again every tick, until
        `stop_complying`."""
        self.set_wrench(np.array(asked.wrench))
        if asked.stiffness is not None:
            self.set_stiffness(np.array(asked.stiffness))
        self._m["pull"][:], self._m["opens"], self.complies = asked.spring, 0, True

    def stop_complying(self) -> None:
        """No wrench from now on; the stiffness goes back to the configured one at the ramp's pace, and the
        springs' pull becomes free."""
        m = self._m
        self._aim_stiffness(m["stiffness"])
        m["feed_age"] = m["k_age"] = math.inf
        m["opens"], self.complies = 1, False

    def set_options(self, options: LawOptions) -> None:
        """Go on with another stiffness, damping ratio, error clip or reference speed; the first three ramp.

        UserError for anything that only `activate` can change.
        """
        free = {
            f: getattr(options, f)
            for f in (
                "stiffness",
                "damping_ratio",
                "error_clip",
                "target_speed",
                "target_turn",
                "filter_time",
            )
        }
        if replace(self.options, **free) != options:
            raise UserError(f"while the law runs it can change {', '.join(free)} alone")
        if any(options.stiffness) and not self._m["rigid"]:
            raise UserError("this law has no Cartesian spring: switch to one that has")
        self.options = options
        self._change()
        self._aim_stiffness(self._m["stiffness"])
        self._m["k_age"], self._m["stale"] = math.inf, 1

    def tick(self, model: ArmModel, dt: float) -> np.ndarray:
        """Torques [n] [N m] for the state in `model`; dt [s] since the last tick.

        If the result is not finite the last torques are returned and `faults` counts: the caller must stop.
        """
        tick(self._record, dt, model.state, model.jac, model.minv_jt, model.bias, model.xpos, model.xquat)
        return self.tau.copy()


def vector(name: str, x: ArrayLike, n: int) -> np.ndarray:
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


def per_joint(name: str, x: float | tuple[float, ...], n: int, most: float) -> np.ndarray:
    """One number for all joints, or n of them, each from 0 to `most`."""
    row = [float(x)] * n if isinstance(x, (int, float)) else [float(v) for v in x]
    if len(row) != n or not all(0 <= v <= most for v in row):
        raise UserError(f"{name} needs one number or {n}, from 0 to {most:g}, got {x}")
    return np.array(row)
