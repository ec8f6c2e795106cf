"""How fast a simulated arm may follow: limits and law for one tool speed. 0.25 m/s is the governor's own pace.

A policy trained in sims/mujoco sends its hand target ahead at up to 1 m/s and met an arm that lags by 0.07 s; at the
same speed and lag the governed arm looks to it like the one it knows.
"""

import math

from controllers.governor import Limits
from controllers.law import LawOptions
from robo_rl.errors import in_range

LAG = 0.05  # s, of the law's reference; the governors' ramps are the rest
STIFFNESS = (4000.0,) * 3 + (300.0,) * 3  # [N/m], [N m/rad]


def law_at(speed: float, ramp: float = 0.5) -> LawOptions:
    """Stiff enough to carry a tool's load without sag, reference at `speed` [m/s]; ramp: as in the law [s]."""
    return LawOptions(stiffness=STIFFNESS, filter_time=LAG, ramp=ramp, torque_rate=None,
                      nullspace="kinematic", posture_stiffness=0.5, posture_damping=5.0, target_speed=1.5 * speed,
                      target_turn=6 * speed, feed_acceleration=(16 * speed, 64 * speed))


def limits_at(speed: float, step: tuple[float, float] = (0.02, 0.105), frame: str = "base", **more) -> Limits:
    """The governor's limits scaled to a setpoint speed [m/s] in (0, 1.5]; step: of one command [m], [rad]."""
    in_range("speed", speed, 0, 1.5, open_low=True)
    scale = speed / 0.25
    base = Limits(frame=frame, step=step, **more)
    if scale <= 1:
        return Limits(frame=frame, step=step, speed=(speed, 4 * speed), **more)
    return Limits(frame=frame, step=step, speed=(speed, 4 * speed), accel=tuple(3 * scale * a for a in base.accel),
                  brake=tuple(2 * scale * a for a in base.brake),
                  measured_speed=(2.5 * speed, 10 * speed), tracking=(0.05 * max(1.0, math.sqrt(scale) * 1.5), 0.2), **more)
