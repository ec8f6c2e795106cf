"""What pushes at the tool, estimated from motor torques and joint motion: no sensor.

The momentum observer of De Luca and Mattone 2003, in its discrete form at constant inertia over a tick,

    r <- r + k [M (dq - dq_before) - dt (t - b + d dq_before + r)] / (1 + k dt),   b = C dq + g,  d = joints'
                                                            damping

is a low pass of the torques t_ext that no model explains, with time constant 1/k; the force and moment at the
tool that mean them are (J J^T + eps I)^-1 J r. Payload the model does not know counts as a push; so does dry
friction.
"""

import mujoco
import numpy as np

from controllers.model import ArmModel
from robo_rl.errors import in_range

EPS = 1e-4  # keeps the wrench finite at a singularity


class Observer:
    """One arm's observer. `tick` with the state after the torques of the last tick have acted."""

    def __init__(self, model: ArmModel, gain: float = 50.0):
        """gain k [1/s]."""
        in_range("gain", gain, 0, 1000, open_low=True)
        self.gain, self.model = gain, model
        self.damping = model.mj.dof_damping.copy()
        self._a, self._x, self._p = np.zeros((6, 6)), np.zeros(6), np.zeros(model.n)
        self._diagonal = self._a.reshape(-1)[::7]
        self.rest()

    def rest(self) -> None:
        """Begin anew: nothing pushes."""
        self.torque = np.zeros(self.model.n)  # t_ext [n] [N m]
        self.before: np.ndarray | None = None

    def tick(self, applied: np.ndarray, dt: float) -> None:
        """applied [n] [N m]: what the motors did since the last tick, dt [s] ago; `model` holds the state
        now."""
        m = self.model
        if self.before is not None:
            mujoco.mj_mulM(m.mj, m.data, self._p, m.dq - self.before)
            self.torque += (
                self.gain
                * (self._p - dt * (applied - self.bias - self.damping * self.before + self.torque))
                / (1 + self.gain * dt)
            )
        self.before, self.bias = m.dq.copy(), m.bias.copy()

    def wrench(self) -> tuple[float, ...]:
        """Force [N] and moment [N m] [6] at the tool in base axes, from outside onto the arm."""
        jac = self.model.jac
        jac.dot(jac.T, self._a)
        self._diagonal += EPS
        mujoco.mju_cholFactor(self._a, 1e-12)
        mujoco.mju_cholSolve(self._x, self._a, jac.dot(self.torque))
        return tuple(self._x.tolist())
