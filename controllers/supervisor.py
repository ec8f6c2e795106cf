"""The last line, below the law: what the arm does and is told to do is measured in every state, armed or not.

A joint, the tool, a torque or its change beyond its limit ends in a stop by torques alone, whatever the law
says:

    t = clip(bias - D dq, t_prev +- rate dt),  within the joints' torque limits

bias is what holds the arm (gravity and Coriolis), D damps each joint, so the arm comes to rest and floats. It
latches; `release` is for a person who resets the arm. Its limits lie above the governor's, which should have
held the arm before.
"""

import math
from dataclasses import dataclass

import numpy as np

from controllers.limits import Limits
from controllers.model import ArmModel
from controllers.robot import Robot
from robo_rl.errors import in_range


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLimits:
    """Beyond any of these the arm is stopped by torques."""

    joint_speed: float = 1.3
    """Of the joints' speed limits."""
    tool_speed: tuple[float, float] = (1.0, 6.0)
    """Of the measured tool [m/s], [rad/s]."""
    torque: float = 1.0
    """Of the joints' torque limits; what is asked beyond it is cut as well."""
    torque_rate: float = 1.0
    """Of the robot's, over a tick; what is asked beyond it is cut as well."""
    damping: float = 0.5
    """D of the stop: at a joint's speed limit it takes this share of its torque limit."""

    def __post_init__(self) -> None:
        for name in ("joint_speed", "torque", "torque_rate", "damping"):
            in_range(name, getattr(self, name), 0, 100, open_low=True)
        for x in self.tool_speed:
            in_range("tool_speed", x, 0, 100, open_low=True)


def supervised(limits: Limits) -> SupervisorLimits:
    """Above what the governor of these limits holds the arm for."""
    o = SupervisorLimits()
    return SupervisorLimits(
        joint_speed=max(o.joint_speed, 1.2 * limits.joint_speed),
        tool_speed=(
            max(o.tool_speed[0], 1.2 * limits.measured_speed[0]),
            max(o.tool_speed[1], 1.2 * limits.measured_speed[1]),
        ),
    )


class Supervisor:
    """`allowed` once per tick, between the law and the motors. reason: why it stopped the arm, "" while it
    did not."""

    def __init__(self, robot: Robot, limits: SupervisorLimits | None = None):
        o = self.limits = limits or SupervisorLimits()
        self.fastest = o.joint_speed * np.array(robot.velocity)
        self.most = o.torque * np.array(robot.torque)
        self.rate = o.torque_rate * robot.torque_rate
        self.damping = o.damping * np.array(robot.torque) / robot.velocity
        self.joints, self.reason = robot.joints, ""

    def release(self) -> None:
        """Let the law have the arm again."""
        self.reason = ""

    def fault(self, model: ArmModel, torque: np.ndarray, before: np.ndarray, dt: float) -> str:
        """Why the arm must stop; "" where nothing is beyond its limit. torque, before [n] [N m]: of this tick
        and the last."""
        speed = np.abs(model.dq)
        if not (speed <= self.fastest).all():  # NaN too
            return self.worst("turns at", speed, self.fastest, "rad/s")
        v = model.jac @ model.dq
        linear, angular = (
            math.sqrt(v[0] ** 2 + v[1] ** 2 + v[2] ** 2),
            math.sqrt(v[3] ** 2 + v[4] ** 2 + v[5] ** 2),
        )
        if not (linear <= self.limits.tool_speed[0] and angular <= self.limits.tool_speed[1]):
            return (
                f"the tool moves at {linear:.2f} m/s and {angular:.2f} rad/s, beyond {self.limits.tool_speed}"
            )
        size = np.abs(torque)
        if not (size <= self.most * (1 + 1e-9)).all():
            return self.worst("is asked for", size, self.most, "N m")
        change = np.abs(torque - before)
        if not (change <= self.rate * dt * (1 + 1e-9)).all():
            return self.worst(
                "is asked for a change of", change / dt, np.full(len(change), self.rate), "N m/s"
            )
        return ""

    def worst(self, what: str, x: np.ndarray, most: np.ndarray, unit: str) -> str:
        k = int(np.argmax(np.nan_to_num(x / most, nan=np.inf)))
        return f"{self.joints[k]} {what} {x[k]:.4g} {unit}, beyond {most[k]:.4g}"

    def allowed(self, model: ArmModel, torque: np.ndarray, before: np.ndarray, dt: float) -> np.ndarray:
        """Torques [n] [N m] for the motors: those asked for, or those of the stop."""
        if not self.reason:
            self.reason = self.fault(model, torque, before, dt)
            if not self.reason:
                return torque
        step = self.rate * dt
        wanted = model.bias - self.damping * model.dq
        if not np.isfinite(wanted).all():
            return before
        return np.clip(np.clip(wanted, before - step, before + step), -self.most, self.most)
