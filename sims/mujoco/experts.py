"""Scripted experts: the phase is read off the geometry, so an expert has no memory and may start anywhere.

Each returns actions of the "ee_delta" control, float32 [N, 7]. Speeds are proportional to the distance left and
capped, so demonstrations are smooth; heights follow a funnel: the hand comes down as it gets above its object.
"""

import numpy as np

from sims.mujoco.kinematics import rotation_error, wrap
from sims.mujoco.model import TOOL  # noqa: F401

F = np.float32
GAIN = 0.22  # share of the remaining way per control step
TOP = 0.85  # largest share of full speed


def steer(env, goal: np.ndarray, close: np.ndarray, yaw: "np.ndarray | None" = None) -> np.ndarray:
    """Actions [N, 7] that move the hand's target to `goal` [3, N], its x axis to `yaw` [N], fingers by `close`."""
    from sims.mujoco.env import MOVE, TURN
    n = goal.shape[1]
    now, frame = env.hand_target()
    out = np.zeros((7, n), F)
    move = (goal - now) * F(GAIN / MOVE)
    length = np.sqrt((move * move).sum(0))
    move *= F(TOP) / np.maximum(length, F(TOP))
    out[:3] = move
    want = np.zeros((3, 5, n), F)
    yaw = np.zeros(n, F) if yaw is None else yaw
    want[0, 0], want[0, 1] = np.cos(yaw), np.sin(yaw)
    want[1, 0], want[1, 1] = want[0, 1], -want[0, 0]
    want[2, 2] = -1
    wrap(want)
    out[3:6] = np.clip(rotation_error(frame, want) * F(GAIN / TURN), -TOP, TOP)
    out[6] = np.where(close, -1, 1)
    return np.ascontiguousarray(out.T)


def square_yaw(quat: np.ndarray) -> np.ndarray:
    """Yaw [N] of a box in [-pi/4, pi/4): the front nearest to the hand's home attitude."""
    w, x, y, z = quat
    yaw = np.arctan2(F(2) * (x * y + w * z), F(1) - F(2) * (y * y + z * z))
    return (yaw + F(np.pi / 4)) % F(np.pi / 2) - F(np.pi / 4)


def yaw_of(frame: np.ndarray) -> np.ndarray:
    return np.arctan2(frame[0, 1], frame[0, 0])


def grasp(env, k: int, lift: np.ndarray, low: float = 0.0):
    """(goal [3, N], close [N], yaw [N]) that grasps object k and then carries it to `lift` [3, N]."""
    s = env.scene
    at, yaw = s.pos[k].copy(), square_yaw(s.quat[k])
    at[2] += F(low)
    side = np.hypot(s.tcp[0] - at[0], s.tcp[1] - at[1])
    turned = np.abs(yaw_of(s.frame) - yaw)
    funnel = np.clip((side - F(0.006)) * F(4) + np.maximum(turned - F(0.08), 0) * F(0.3), 0, 0.09)
    there = (side < 0.01) & (np.abs(s.tcp[2] - at[2]) < 0.012) & (turned < 0.15)
    holds = there & (s.opening < 0.58) & (s.opening > 0.3)
    goal = at
    goal[2] += np.where(there, 0, funnel)
    goal = np.where(holds, lift, goal)
    return goal, there, yaw, holds


def pick(env, k: int = 0):
    s = env.scene
    up = s.tcp.copy()
    up[2] = 0.2
    goal, close, yaw, _ = grasp(env, k, up)
    return steer(env, goal, close, yaw)


def reach(env):
    return steer(env, env.scene.goal, np.zeros(env.num_envs, bool))


EXPERTS = {"pick_cube": pick, "reach": reach}


def expert(task: str, env) -> np.ndarray:
    return EXPERTS[task](env)
