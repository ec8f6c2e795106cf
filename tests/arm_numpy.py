"""The arm env's control step in plain NumPy, from which `sims.mujoco.kernel` must not differ by a bit."""

import numpy as np

from sims.mujoco import model as m
from sims.mujoco.env import MujocoArmEnv
from sims.mujoco.kinematics import contract, damped_step, rotation_error, turn, wrap
from sims.mujoco.model import JOINT, MOVE, TURN

F = np.float32
LEAD = 0.06  # how far the target may run ahead of the hand [m]
JOINT_LEAD = 0.25  # and the joint targets ahead of the joints [rad]
REACH_LOW = np.array([[0.2], [-0.5], [0.009]], F)  # targets stay in this box [m]
REACH_HIGH = np.array([[0.8], [0.5], [0.7]], F)
LOW = np.array(m.JOINT_LOW, F)[:, None]
HIGH = np.array(m.JOINT_HIGH, F)[:, None]
SPEED = np.array(m.JOINT_SPEED, F)[:, None] * F(m.DT * m.SUBSTEPS)


class NumpyArmEnv(MujocoArmEnv):
    """MujocoArmEnv whose commands and observations are computed by NumPy."""

    def _command(self, actions: np.ndarray, over: np.ndarray) -> None:
        """Move the targets by actions [N, A] and write the actuators; envs that are `over` keep theirs."""
        s, a, over = self.scene, np.ascontiguousarray(actions.T), over if over.any() else None
        if self.control == "ee_delta":
            jac = self.arm.jacobian()
            target = F(MOVE) * a[:3]
            target += self.target
            _limit(target, s.tcp - F(LEAD), s.tcp + F(LEAD))
            _limit(target, REACH_LOW, REACH_HIGH)
            w = np.empty((5, self.num_envs), F)
            np.multiply(a[3:6], F(TURN), out=w[:3])
            wrap(w)
            attitude = turn(self.attitude, w)
            twist = np.empty((6, self.num_envs), F)
            np.subtract(target, s.tcp, out=twist[:3])
            twist[3:] = rotation_error(s.frame, attitude)
            twist -= contract("ikn,kn->in", jac, self._ahead)  # what the joint targets are ahead already
            joints = damped_step(jac, twist)
            _limit(joints, -SPEED, SPEED)
        else:
            joints = F(JOINT) * a[:7]
        joints += self.joints
        _limit(joints, s.q - F(JOINT_LEAD), s.q + F(JOINT_LEAD))
        _limit(joints, LOW, HIGH)
        grip = a[-1]
        if over is not None:
            joints, grip = np.where(over, self.joints, joints), np.where(over, self.grip, grip)
        self.joints, self.grip = joints, grip
        if self.control == "ee_delta":
            if over is not None:
                target, attitude = (
                    np.where(over, self.target, target),
                    np.where(over, self.attitude, attitude),
                )
            self.target, self.attitude = target, attitude
        self._ctrl[:, :7] = joints.T
        self._ctrl[:, 7:] = (grip * F(m.FINGER_OPEN / 2) + F(m.FINGER_OPEN / 2))[:, None]

    def _observe(self) -> None:
        """Refill the scene, the observation rows and the progress from the physics state."""
        s, rows = self.scene, self._rows
        np.copyto(self._q, self._qpos.T, casting="same_kind")
        np.copyto(self._v, self._qvel.T, casting="same_kind")
        if self.model.nmocap:
            np.copyto(s.goal, self._mocap_pos[:, 0].T, casting="same_kind")
        np.add(self._q[7], self._q[8], out=s.opening)
        s.opening *= F(0.5 / m.FINGER_OPEN)
        self.arm.forward(s.q)
        rows[:7] = s.q
        rows[7:14] = s.qd
        np.subtract(self.joints, s.q, out=self._ahead)
        rows[21], rows[22] = s.opening, self.grip
        rows[23:26] = s.tcp
        rows[26:28] = s.frame[0, :2]
        rows[28:30] = s.frame[2, :2]
        i = 30
        for k in range(len(s.pos)):
            np.subtract(s.pos[k], s.tcp, out=rows[i : i + 3])
            rows[i + 3] = s.pos[k][2]
            _four_yaw(s.quat[k], s.frame, rows[i + 4 : i + 6])
            i += 6
        if self.task.uses_goal:
            np.subtract(s.goal, s.pos[0] if s.pos else s.tcp, out=rows[i : i + 3])
            i += 3
        if self.task.uses_slide:
            rows[i - 3] -= s.slide  # the handle moves with the drawer
            rows[i] = s.slide
        if self.dense:
            self.progress = self.task.progress(s)


def _limit(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Clip x in place (`np.clip` costs five times as much on arrays this small)."""
    np.maximum(x, low, out=x)
    np.minimum(x, high, out=x)


def _four_yaw(quat: np.ndarray, frame: np.ndarray, out: np.ndarray) -> None:
    """out [2, N]: cos and sin of four times the yaw of a box relative to the hand (a square has four
    fronts)."""
    w, x, y, z = quat
    cx, cy = F(1) - F(2) * (y * y + z * z), F(2) * (x * y + w * z)
    hx, hy = frame[0, 0], frame[0, 1]
    c, s = hx * cx + hy * cy, hx * cy - hy * cx
    c, s = c * c - s * s, F(2) * c * s
    np.subtract(c * c, s * s, out=out[0])
    np.multiply(F(2) * c, s, out=out[1])
