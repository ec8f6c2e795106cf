"""The arm that a policy was trained on, with its tool where another arm's tool is: what the policy sees as
joints.

A policy that moves the tool drives any arm, but its state has the joints of the arm that it knows. The twin
is that arm: every period its joints go to the measured tool pose,

    q <- q + J^T (J J^T + 0.01^2 I)^-1 (pose - FK(q)),    dq = J^T (J J^T + 0.01^2 I)^-1 twist

from its own home on, so that it takes the way that it would have taken.
"""

import math

import numpy as np

from controllers.model import ArmModel, arm_model
from controllers.robot import Robot
from robo_rl.errors import UserError
from robo_rl.geometry import Floats, turn_between

DAMPING = 1e-4 * np.eye(6)
NEAR = (0.01, 0.05)  # [m], [rad] of the tool: the twin is there
ALIKE = (0.05, 0.15)  # [m], [rad] between the tools of two arms of the same joints


class Twin:
    """robot: the arm of the policy's training. model: where its joints are."""

    def __init__(self, robot: Robot):
        self.robot, self.model = robot, arm_model(robot)
        self.low, self.high = np.array(robot.lower), np.array(robot.upper)
        self.home = np.array(robot.home)

    def begin(self, real: ArmModel) -> None:
        """From its home to the pose of the real arm's tool. UserError: it cannot hold its tool there."""
        self.model.update(self.home, np.zeros(self.model.n))
        for _ in range(200):
            self.follow(real)
        far, turn = apart(self.model, real.pos, real.quat)
        if far > NEAR[0] or turn > NEAR[1]:
            raise UserError(
                f"the run's arm ({self.robot.name}) cannot hold its tool where this one does, at "
                f"{[round(x, 3) for x in real.pos]} m: {far:.3f} m and {turn:.2f} rad off; begin elsewhere, "
                "or give the tool the axes that the run's arm has (z out of the gripper)"
            )

    def follow(self, real: ArmModel) -> None:
        """Be where the real arm's tool is, moving as it does."""
        m, twist = self.model, real.jac @ real.dq
        error = np.array((*np.subtract(real.pos, m.pos), *turn_between(tuple(real.quat), tuple(m.quat))))
        a = m.jac @ m.jac.T + DAMPING
        step, dq = (m.jac.T @ np.linalg.solve(a, x) for x in (error, twist))
        q = m.q + step / max(1.0, float(np.abs(step).max()) / 0.2)
        m.update(np.minimum(np.maximum(q, self.low), self.high), dq)


def apart(model: ArmModel, pos: "list[float] | Floats", quat: "list[float] | Floats") -> tuple[float, float]:
    """[m], [rad] between a model's tool and a pose."""
    return math.dist(model.pos, pos), math.hypot(*turn_between(tuple(model.quat), tuple(quat)))


def same_joints(real: ArmModel, robot: Robot, trained: Robot) -> bool:
    """Whether two arms have the same joints: as many, and at the same angles their tools are where the
    other's are."""
    if len(robot.joints) != len(trained.joints):
        return False
    other, q, dq = arm_model(trained), real.q.copy(), real.dq.copy()
    rng, low, high = (
        np.random.default_rng(0),
        np.maximum(trained.lower, robot.lower),
        np.minimum(trained.upper, robot.upper),
    )
    home, same = np.array(trained.home), True
    if (home < low).any() or (home > high).any():
        return False
    for k in range(6):
        at = home if k == 0 else np.clip(home + rng.uniform(-0.4, 0.4, len(home)), low, high)
        real.place(at)
        other.place(at)
        far, turn = apart(other, real.pos, real.quat)
        same &= far <= ALIKE[0] and turn <= ALIKE[1]
    real.update(q, dq)
    return same
