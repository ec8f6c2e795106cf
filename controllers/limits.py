"""What an arm may do, and the nearest place, orientation, pose and velocity that is within it."""

import math
from dataclasses import dataclass

from robo_rl.errors import UserError, in_range
from robo_rl.geometry import Floats, rotate1, turn_between, turned

JOINT_SHARE = 0.97  # of the joints' speeds, for joint targets: joints that lag behind them stay below


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the arm may do. Places and speeds are the tool's, in the base frame."""

    frame: str = "base"
    """frame_id that a command must carry."""
    low: tuple[float | None, ...] = (None, None, 0.0)
    """Workspace box [m]; None: open. 0.0 is a limit."""
    high: tuple[float | None, ...] = (None, None, None)
    tilt: float | None = None
    """Largest angle between the tool's axis z and `tilt_axis` [rad]; below pi/2."""
    tilt_axis: tuple[float, float, float] = (0.0, 0.0, -1.0)
    step: tuple[float, float] = (0.02, 0.105)
    """Of a command from the last accepted one [m], [rad]."""
    speed: tuple[float, float] = (0.25, 1.0)
    """Of the setpoint [m/s], [rad/s]."""
    accel: tuple[float, float] = (2.5, 10.0)
    """Of the setpoint [m/s^2], [rad/s^2]."""
    brake: tuple[float, float] = (4.0, 16.0)
    """Deceleration in HOLD and STOPPED."""
    brake_jerk: tuple[float, float] = (200.0, 800.0)
    """How fast that deceleration comes and goes [m/s^3], [rad/s^3]."""
    measured_speed: tuple[float, float] = (0.5, 2.5)
    """Of the measured tool; beyond it the arm holds."""
    measured_margin: float = 0.03
    """How far the measured tool may be outside the box before the arm holds [m]."""
    joint_speed: float = 1.0
    """Of the joints' speed limits; a measured joint faster than this holds the arm."""
    joint_margin: float = 0.02
    """A joint nearer to its limit than this and moving towards it holds the arm [rad]."""
    wrench: tuple[float, float] = (60.0, 20.0)
    """External force [N] and moment [N m], where the state carries them."""
    max_stiffness: tuple[float, float] = (3000.0, 300.0)
    """Of a commanded stiffness [N/m], [N m/rad]; the law's own bound holds too."""
    tracking: tuple[float, float] = (0.05, 0.2)
    """Setpoint and measured tool farther apart than this [m] for this time [s] hold the arm."""
    command_timeout: float = 0.1
    """[s] without an accepted command: HOLD."""
    give_up: float = 1.0
    """[s] in HOLD without a person arming it: STOPPED. inf: never."""
    state_timeout: float = 0.05
    """[s] without a measured state: STOPPED."""
    stale: float = 0.2
    """Delay of a command beyond the least one seen of its sender [s]."""
    violations: int = 20
    """Commands rewritten or blocked within `window`: HOLD."""
    window: float = 1.0

    def __post_init__(self) -> None:
        if len(self.low) != 3 or len(self.high) != 3:
            raise UserError("low and high need 3 numbers or None each")
        for axis, a, b in zip("xyz", self.low, self.high, strict=True):
            if a is not None and b is not None and not a < b:
                raise UserError(f"workspace needs low < high on {axis}, got {a:g} and {b:g}")
        if self.tilt is not None:
            in_range("tilt", self.tilt, 0, math.pi / 2, open_high=True)
            if abs(math.dist(self.tilt_axis, (0, 0, 0)) - 1) > 1e-3:
                raise UserError(f"tilt_axis must have length 1, got {self.tilt_axis}")
        for name in (
            "step",
            "speed",
            "accel",
            "brake",
            "brake_jerk",
            "measured_speed",
            "wrench",
            "max_stiffness",
            "tracking",
        ):
            for x in getattr(self, name):
                in_range(name, x, 0, math.inf, open_low=True)
        for name in ("command_timeout", "give_up", "state_timeout", "stale", "window", "joint_speed"):
            in_range(name, getattr(self, name), 0, math.inf, open_low=True)
        in_range("violations", self.violations, 1, 10**6)


def box(pos: Floats, limits: Limits) -> Floats:
    """The nearest point of the workspace; `pos` itself where that is inside."""
    (x, y, z), (a, b, c), (d, e, f) = pos, limits.low, limits.high
    if (
        (a is None or x >= a)
        and (b is None or y >= b)
        and (c is None or z >= c)
        and (d is None or x <= d)
        and (e is None or y <= e)
        and (f is None or z <= f)
    ):
        return pos
    return tuple(
        min(max(x, -math.inf if a is None else a), math.inf if b is None else b)
        for x, a, b in zip(pos, limits.low, limits.high, strict=True)
    )


def upright(quat: Floats, limits: Limits) -> Floats:
    """The nearest orientation whose tool axis z is within `tilt` of `tilt_axis`."""
    if limits.tilt is None:
        return quat
    ax, ay, az = limits.tilt_axis
    x, y, z = rotate1(quat, (0.0, 0.0, 1.0))
    cx, cy, cz = y * az - z * ay, z * ax - x * az, x * ay - y * ax  # turns the tool's axis towards tilt_axis
    sine = math.sqrt(cx * cx + cy * cy + cz * cz)
    excess = math.atan2(sine, x * ax + y * ay + z * az) - limits.tilt
    if excess <= 1e-12:
        return quat
    if sine < 1e-9:  # opposite: any axis across it
        cx, cy, cz = (0.0, -az, ay) if abs(ax) < 0.9 else (az, 0.0, -ax)
        sine = math.sqrt(cx * cx + cy * cy + cz * cz)
    s = excess / sine
    return turned(quat, s * cx, s * cy, s * cz)


def near(
    pos: Floats, quat: Floats, from_pos: Floats, from_quat: Floats, step: tuple[float, float]
) -> tuple[Floats, Floats]:
    """The pose on the way to (pos, quat) that is at most `step` [m], [rad] away from the other one."""
    far = math.dist(pos, from_pos)
    if far > step[0]:
        s = step[0] / far
        pos = tuple(b + s * (a - b) for a, b in zip(pos, from_pos, strict=True))
    turn = turn_between(quat, from_quat)
    far = math.hypot(*turn)
    if far > step[1]:
        s = step[1] / far
        quat = turned(from_quat, *(s * x for x in turn))
    return pos, quat


def pace(far: float, speed: float, accel: float, dt: float) -> float:
    """Share of the way `far` to go in a second [1/s]: at `speed` at most, and slow enough to stop there.

    With steps of b = 0.8 accel dt a speed v = b k needs the way v dt (k + 1)/2: v = b (sqrt(1/4 + 2 d/(b dt))
    - 1/2).
    """
    b = 0.8 * accel * dt
    return min(speed, b * (math.sqrt(0.25 + 2 * far / (b * dt)) - 0.5), far / dt) / far if far > 0 else 0.0


def pursue(error: Floats, velocity: Floats, speed: float, accel: float, dt: float) -> Floats:
    """Next velocity on the way to a goal at `error`: |v| <= speed, |dv| <= accel dt, and slow enough to stop
    there."""
    (x, y, z), (u, v, w) = error, velocity
    go = pace(math.sqrt(x * x + y * y + z * z), speed, accel, dt)
    x, y, z = go * x - u, go * y - v, go * z - w
    size = math.sqrt(x * x + y * y + z * z)
    s = min(1.0, accel * dt / size) if size > 0 else 0.0
    return u + s * x, v + s * y, w + s * z


def slower(velocity: Floats, braking: float, decel: float, jerk: float, dt: float) -> tuple[Floats, float]:
    """Velocity after braking for dt, 0 when that suffices, and the deceleration then; `braking`: the one
    before.

    It comes at `jerk`, is `decel` at most, and goes at `jerk`, so that it is 0 when the velocity is: at speed
    v, sqrt(2 jerk v) at most.
    """
    size = math.hypot(*velocity)
    braking = min(decel, braking + jerk * dt, math.sqrt(2 * jerk * size))
    s = 1 - braking * dt / size if size > braking * dt else 0.0
    return tuple(s * v for v in velocity), braking


def at_most(velocity: Floats, top: float) -> Floats:
    """The velocity, no faster than `top`."""
    size = math.hypot(*velocity)
    return tuple(top / size * x for x in velocity) if size > top else velocity


def moved_within(pos: Floats, velocity: Floats, dt: float, limits: Limits) -> tuple[Floats, Floats]:
    """The place after dt, inside the workspace, and the velocity: at a face of it what points out stops."""
    (a, b, c), (x, y, z) = pos, velocity
    moved = (a + x * dt, b + y * dt, c + z * dt)
    inside = box(moved, limits)
    if inside != moved:
        velocity = tuple(v if a == b else 0.0 for v, a, b in zip(velocity, inside, moved, strict=True))
    return inside, velocity


def joint_step(
    at: tuple[Floats, Floats, Floats],
    goal: tuple[Floats, Floats, Floats],
    motion: tuple[Floats, Floats, Floats],
    fastest: Floats,
    limits: Limits,
    dt: float,
) -> tuple[Floats, tuple[Floats, Floats, Floats]]:
    """One period of dt [s] from `at` to `goal`, (tool position [m], its quaternion, joints [rad]) both, with
    `motion` before it: the tool's velocity [m/s], its rate of turn [rad/s], the joints' speeds [rad/s] -> the
    joints and the motion after it.

    As `pursue`, for tool and joints together, so that they arrive together. A turn counts as the way that the
    tool goes meanwhile at its speed, and so does what a joint turns at its own: none of the three is beyond
    its speed or, in proportion, its acceleration. (Along so short a way the tool moves in a straight line,
    near enough.)"""
    (pos, quat, joints), (to, facing, joint_goal), (speed, turning), accel = (
        at,
        goal,
        limits.speed,
        limits.accel[0],
    )
    scales = [speed / (JOINT_SHARE * most) for most in fastest]

    def size(linear: Floats, angular: Floats, turns: Floats) -> float:
        return max(
            math.hypot(*linear),
            speed / turning * math.hypot(*angular),
            *(s * abs(x) for s, x in zip(scales, turns, strict=True)),
        )

    error = (
        tuple(a - b for a, b in zip(to, pos, strict=True)),
        turn_between(facing, quat),
        tuple(a - b for a, b in zip(joint_goal, joints, strict=True)),
    )
    go = pace(size(*error), speed, accel, dt)
    change = tuple(
        tuple(go * e - m for e, m in zip(*rows, strict=True)) for rows in zip(error, motion, strict=True)
    )
    most = size(*change)
    s = min(1.0, accel * dt / most) if most > 0 else 0.0
    v, w, u = (
        tuple(m + s * c for m, c in zip(*rows, strict=True)) for rows in zip(motion, change, strict=True)
    )
    return tuple(q + x * dt for q, x in zip(joints, u, strict=True)), (v, w, u)
