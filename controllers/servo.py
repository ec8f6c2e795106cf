"""Joint targets that follow the governor's setpoint, for arms that are held by their joints: a stiff law's,
or the vendor's own."""

import mujoco
import numpy as np

from controllers.limits import JOINT_SHARE
from controllers.model import ArmModel
from controllers.robot import Robot
from controllers.setpoint import Setpoint
from robo_rl.geometry import turn_between

# s in which what was asked for before goes to where it is asked for anew: as long as braking from 0.25 m/s
# takes
FADE = 0.06


class JointServo:
    """Lets joints follow tool poses: q <- q + J^T (J J^T + 0.01^2 I)^-1 (pose - FK(q)), once per period of dt
    [s], within the joints' speeds. With a stiff law the damping then works against all motion, as in a
    simulator's position servo."""

    def __init__(self, robot: Robot, model: ArmModel, dt: float):
        self.goal = ArmModel(model.spec, robot.joints, robot.site, gravity=False, coriolis=False)
        self.dt = dt
        self.fastest = JOINT_SHARE * dt * np.array(robot.velocity)  # [rad] per period
        self.low, self.high = np.array(robot.lower), np.array(robot.upper)
        self._a, self._x = np.zeros((6, 6)), np.zeros(6)
        self._diagonal = self._a.ravel()[::7]
        self.rest(model)

    def rest(self, model: ArmModel) -> None:
        """Go on from the measured joints."""
        self.goal.place(model.q)
        self.direct: np.ndarray | None = None  # joint targets that were followed last
        # what was asked for last; by how much it led
        self.asked, self.ahead, self.fade = np.array(model.q), np.zeros(model.n), 0.0

    def step(self, model: ArmModel, out: Setpoint) -> np.ndarray | None:
        """Joint targets [n] [rad] for this period; None: nothing is asked. model: the measured arm.

        Where the governor begins anew from the measured pose, the targets still lead the joints by what these
        lag behind; that lead goes evenly in FADE. (Joints that follow as tau dq = target - q then slow down
        as the governor's setpoint does.)
        """
        anew = out.rebased or (out.joints is not None and self.direct is None)
        if out.rebased:
            self.goal.place(model.q)
            self.direct = None
        q = self._next(out)
        if q is None:
            return None
        if anew:
            self.ahead, self.fade = self.asked - q, 1.0
        self.asked = np.minimum(np.maximum(q + self.fade * self.ahead, self.low), self.high)
        self.fade = max(self.fade - self.dt / FADE, 0.0)
        return self.asked

    def _next(self, out: Setpoint) -> np.ndarray | None:
        """What the setpoint means for the joints."""
        if out.joints is not None:  # the governor has limited them already
            self.direct = np.array(out.joints)
            return self.direct
        if out.pos is None:
            return None
        if self.direct is not None:
            self.goal.place(self.direct)
            self.direct = None
        g = self.goal
        x, y, z = g.pos
        error = np.array(
            (out.pos[0] - x, out.pos[1] - y, out.pos[2] - z, *turn_between(out.quat, tuple(g.quat)))
        )
        g.jac.dot(g.jac.T, self._a)
        self._diagonal += 1e-4
        mujoco.mju_cholFactor(self._a, 1e-12)
        mujoco.mju_cholSolve(self._x, self._a, error)
        step = self._x.dot(g.jac)
        q = g.q + step / max(1.0, float((np.abs(step) / self.fastest).max()))
        g.place(np.minimum(np.maximum(q, self.low), self.high))
        return g.q
