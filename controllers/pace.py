"""How fast a simulated arm may follow: limits and law for one tool speed. 0.25 m/s is the governor's own
pace.

A policy trained in sims/mujoco saw stiff joints that lag by 0.07 s and a tool at up to 1.1 m/s. With
`joints_at` and limits at 1.5 m/s, which that tool does not meet, the governed arm is the one it knows.
"""

import math
from typing import Any

from controllers.law import LawOptions, joint_impedance
from controllers.limits import Limits
from robo_rl.errors import in_range

# s, of the law's reference: with the governors' ramps the lag of stiff joints, which the policies have learnt
LAG = 0.08
# of the joints' speeds: targets keep to 0.97 of them, stiff joints pass that when others pull at them
OVERSHOOT = 1.1
STIFFNESS = (1500.0,) * 3 + (60.0,) * 3  # [N/m], [N m/rad]


def law_at(speed: float) -> LawOptions:
    """Stiff enough to carry a tool's load without sag, reference at `speed` [m/s].

    Above 0.25 m/s torques change as fast as the robot's own limit lets them: at half of it the arm swings by
    3 cm.
    """
    more: dict[str, Any] = {} if speed <= 0.25 else {"damping_ratio": 1.5, "torque_rate": None}
    return LawOptions(
        stiffness=STIFFNESS,
        filter_time=LAG,
        target_speed=1.5 * speed,
        target_turn=6 * speed,
        feed_acceleration=(16 * speed, 64 * speed),
        **more,
    )


def joints_at(stiffness: tuple[float, ...], damping: tuple[float, ...]) -> LawOptions:
    """Joints as stiff and as damped as a simulator's position servos [N m/rad], [N m s/rad], for
    `arm.JointServo`.

    Only for an arm whose `torque_rate` lets them: with 1000 N m/s, a real arm's, such gains swing in HOLD.
    """
    return joint_impedance(stiffness, damping, posture_speed=100.0, torque_rate=None, torque_fraction=1.0)


def limits_at(
    speed: float, step: tuple[float, float] = (0.02, 0.105), frame: str = "base", **more: Any
) -> Limits:
    """The governor's limits scaled to a setpoint speed [m/s] in (0, 1.5]; step: of one command [m], [rad]."""
    in_range("speed", speed, 0, 1.5, open_low=True)
    more = dict[str, Any](joint_speed=1.0 if speed <= 0.25 else OVERSHOOT) | more
    scale = speed / 0.25
    base = Limits(frame=frame, step=step, **more)
    if scale <= 1:
        return Limits(frame=frame, step=step, speed=(speed, 4 * speed), **more)
    (al, aa), (bl, ba), (jl, ja) = base.accel, base.brake, base.brake_jerk
    return Limits(
        frame=frame,
        step=step,
        speed=(speed, 4 * speed),
        accel=((12 * scale - 11) * al, (12 * scale - 11) * aa),
        brake=(2 * scale * bl, 2 * scale * ba),
        brake_jerk=(2 * scale * jl, 2 * scale * ja),
        measured_speed=(2.5 * speed, 10 * speed),
        tracking=(0.05 * max(1.0, math.sqrt(scale) * 1.5), 0.2),
        **more,
    )
