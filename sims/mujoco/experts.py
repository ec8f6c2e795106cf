"""Scripted experts: the phase is read off the geometry, so an expert has no memory and may start anywhere.
Where two ways are equal, the episode's start says which one it goes, until it is on one of them.

Each returns actions of the "ee_delta" control, float32 [N, 7]. Speeds are proportional to the distance left
and capped, so demonstrations are smooth; heights follow a funnel: the hand comes down as it gets above its
object.
"""

from collections.abc import Callable

import numpy as np

from robo_rl.starts import uniforms
from sims.mujoco.kinematics import rotation_error, wrap
from sims.mujoco.model import MOVE, TURN
from sims.mujoco.tasks import (
    BEHIND,
    CUBE,
    HANDLE,
    PEG,
    POST,
    SMALL,
    TOUCH,
    Scene,
    Task,
    chosen,
    distance,
    handle,
    post,
)

F = np.float32
GAIN = 0.22  # share of the remaining way per control step
TOP = 0.85  # largest share of full speed
SAFE = 0.16  # height of the hand over all objects [m]
SIDE = 11  # stream of a start's uniforms that says which of two equal ways the expert goes
CALM = 0.03  # a loose load is carried no faster than towards a goal this far away [m]


def steer(env, goal: np.ndarray, close: np.ndarray, yaw: "np.ndarray | None" = None) -> np.ndarray:
    """Actions [N, 7] that move the hand's target to `goal` [3, N], its x axis to `yaw` [N], fingers by
    `close`."""
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


def square_yaw(quat: np.ndarray, near: "np.ndarray | float" = 0.0) -> np.ndarray:
    """Yaw [N] of a box within pi/4 of `near`: the front nearest to the hand's home attitude, or to that
    yaw."""
    w, x, y, z = quat
    yaw = np.arctan2(F(2) * (x * y + w * z), F(1) - F(2) * (y * y + z * z)) - near
    return (yaw + F(np.pi / 4)) % F(np.pi / 2) - F(np.pi / 4) + near


def yaw_of(frame: np.ndarray) -> np.ndarray:
    return np.arctan2(frame[0, 1], frame[0, 0])


def grasp(s: Scene, at: np.ndarray, yaw: np.ndarray, width: float, clear: float = 0.09):
    """How to grasp what is `width` wide at `at` [3, N]: (hand goal [3, N], close [N], holds [N]).

    The hand stays `clear` above until it is over the object and turned to `yaw`, then comes down.
    """
    side = np.hypot(s.tcp[0] - at[0], s.tcp[1] - at[1])
    turned = np.abs(yaw_of(s.frame) - yaw)
    turned = np.minimum(turned, np.abs(turned - F(2 * np.pi)))
    high = np.abs(s.tcp[2] - at[2])
    there = (side < 0.01) & (high < 0.012) & (turned < 0.2)
    fits = np.abs(s.opening - F(width / 0.08)) < 0.08
    holds = fits & (side < 0.02) & (high < 0.022)
    goal = at.copy()
    goal[2] += np.where(
        there, 0, np.clip((side - F(0.006)) * F(4) + np.maximum(turned - F(0.08), 0) * F(0.3), 0, clear)
    )
    return goal, there | holds, holds


def above(env, z: float) -> np.ndarray:
    """The point at height z over the hand's target [3, N]."""
    up = env.hand_target()[0].copy()
    up[2] = z
    return up


def carry(s: Scene, at: np.ndarray, to: np.ndarray, free: float, slack: float, steep: float) -> np.ndarray:
    """Hand goal [3, N] that brings the held object at `at` to `to`: up by `free`, over, then down.

    It is lowered once it is over `to` within `slack` [m], and kept `steep` times the rest higher before that.
    """
    off = to - at
    side = np.hypot(off[0], off[1])
    # height kept above `to` until the object is over it
    over = np.clip((side - F(slack)) * F(steep), 0, free)
    ready = np.clip((at[2] - to[2] - over * F(0.6)) / F(0.02) + 1, 0, 1)  # sideways only once high enough
    return np.stack([s.tcp[0] + off[0] * ready, s.tcp[1] + off[1] * ready, s.tcp[2] + off[2] + over])


def reach(env) -> np.ndarray:
    return steer(env, env.scene.goal, np.zeros(env.num_envs, bool))


def pick_cube(env) -> np.ndarray:
    return _pick(env, env.scene.pos[0], env.scene.quat[0])


def pick_by_name(env) -> np.ndarray:
    s = env.scene
    return _pick(env, chosen(s, s.pos), chosen(s, s.quat))


def _pick(env, at: np.ndarray, quat: np.ndarray) -> np.ndarray:
    s, yaw = env.scene, square_yaw(quat)
    goal, close, holds = grasp(s, at, yaw, 2 * CUBE)
    return steer(env, np.where(holds, above(env, 0.2), goal), close, yaw)


def push_cube(env) -> np.ndarray:
    """Go behind the cube as seen from the mark, then push it along the line to it."""
    s = env.scene
    at, way = s.pos[0], s.goal[:2] - s.pos[0][:2]
    way = way / np.maximum(np.hypot(way[0], way[1]), F(1e-3))
    off = s.tcp[:2] - at[:2]
    along, aside = off[0] * way[0] + off[1] * way[1], off[1] * way[0] - off[0] * way[1]
    pushing = (s.tcp[2] < 0.04) & (along < -0.015) & (np.abs(aside) < 0.015)
    behind = at[:2] - way * F(0.06)
    side = np.hypot(s.tcp[0] - behind[0], s.tcp[1] - behind[1])
    flat = np.where(pushing, at[:2] + way * np.minimum(along + F(0.03), F(0.01)), behind)
    height = F(0.02) + np.where(pushing, 0, np.clip((side - F(0.012)) * F(4), 0, 0.08))
    return steer(
        env, np.concatenate([flat, height[None]]), np.ones(env.num_envs, bool), np.arctan2(way[1], way[0])
    )


def stack_cube(env) -> np.ndarray:
    """Grasp the red cube, carry it above the green one, let go where it stands still on it."""
    s, yaw = env.scene, square_yaw(env.scene.quat[0])
    goal, close, holds = grasp(s, s.pos[0], yaw, 2 * CUBE)
    top = s.pos[1].copy()
    top[2] += F(2 * CUBE + 0.001)
    goal = np.where(holds, carry(s, s.pos[0], top, 0.06, 0.006, 5), goal)
    done = (np.hypot(*(s.pos[0] - s.pos[1])[:2]) < 0.01) & (np.abs(s.pos[0][2] - top[2]) < 0.005)
    return steer(env, np.where(done, s.tcp, goal), close & ~done, yaw)


def stack_place(env) -> np.ndarray:
    s = env.scene
    red, green = s.pos
    here = F(0.5) * yaw_of(s.frame)  # which of two fronts is not decided anew on the way
    base, turned = square_yaw(s.quat[1], here), square_yaw(s.quat[0], here)
    top = green.copy()
    top[2] += F(CUBE + SMALL + 0.001)
    # first the small cube onto the other, its sides along the other's
    goal, close, holds = grasp(s, red, turned, 2 * SMALL)
    goal, yaw = np.where(holds, carry(s, red, top, 0.06, 0.005, 5), goal), np.where(holds, base, turned)
    on = (np.hypot(*(red - green)[:2]) < 0.015) & (np.abs(red[2] - top[2]) < 0.006)
    # then both: let go, down to the lower one, and over to the mark
    low, grip, has = grasp(s, green, base, 2 * CUBE)
    mark = s.goal.copy()
    mark[2] = F(CUBE + 0.001)
    way = carry(s, green, mark, 0.03, 0.006, 4) - s.tcp
    low = np.where(has, s.tcp + way * np.minimum(F(CALM) / np.maximum(distance(way, F(0)), F(CALM)), 1), low)
    there = (np.hypot(*(green - mark)[:2]) < 0.012) & (green[2] < CUBE + 0.004)
    wait = there | ~grip & (s.opening < 0.7)  # until the fingers are open
    goal = np.where(on, np.where(wait, s.tcp, low), goal)
    return steer(env, goal, np.where(on, grip & ~there, close), np.where(on, base, yaw))


def peg_insert(env) -> np.ndarray:
    s, yaw = env.scene, square_yaw(env.scene.quat[0])
    grip = s.pos[0].copy()
    grip[2] += F(0.03)
    goal, close, holds = grasp(s, grip, yaw, 2 * PEG[0])
    to = s.goal.copy()
    to[2] += F(PEG[2] + 0.003)
    goal = np.where(holds, carry(s, s.pos[0], to, 0.065, 0.0015, 40), goal)
    return steer(env, goal, close, np.where(holds, F(0), yaw))


def open_drawer(env) -> np.ndarray:
    s = env.scene
    at = handle(s)
    goal, close, holds = grasp(s, at, np.zeros(env.num_envs, F), 2 * HANDLE[1])
    pull = at.copy()
    pull[0] -= F(0.06)
    return steer(env, np.where(holds, pull, goal), close)


def either(env) -> np.ndarray:
    """bool [N]: which of two equal ways the expert goes in the episode of each env's start; nothing in the
    state tells it."""
    return uniforms(env.starts, 1, SIDE)[:, 0] < 0.5


def reach_around(env) -> np.ndarray:
    """Straight past the post's near corner at full speed, then behind it: half of the demonstrations go each
    way from one state, and their mean goes straight into the post, within a chunk or two."""
    s, off = env.scene, post(env.scene)
    corner = F(POST[0] + TOUCH + 0.03)
    begun = np.abs(off[0]) > corner - F(0.01)  # whoever is already aside of the post stays on that side
    side = np.where(begun, np.sign(off[0]), np.where(either(env), F(1), F(-1)))
    along = s.tcp.copy()
    along[0] += F(3) * side * (corner - side * off[0])
    along[1] += F(3) * np.maximum(-F(POST[1] + TOUCH + 0.01) - off[1], 0)
    along[2] = s.goal[2]
    beside = s.goal.copy()
    beside[0] += side * (corner + F(0.02))
    beside[1] += F(POST[1] + 0.08 - BEHIND)
    past = off[1] > POST[1] + F(0.03)
    return steer(env, np.where(past, s.goal, np.where(begun, beside, along)), np.zeros(env.num_envs, bool))


def pick_either(env) -> np.ndarray:
    s = env.scene
    far = [np.hypot(*(s.tcp - at)[:2]) for at in s.pos]
    begun = np.minimum(*far) < F(0.04)
    first = np.where(begun, far[0] < far[1], either(env))
    return _pick(env, np.where(first, s.pos[0], s.pos[1]), np.where(first, s.quat[0], s.quat[1]))


def back_out(env) -> np.ndarray:
    """What somebody does whose attempt failed: straight up to where attempts begin, the fingers as the expert
    has them."""
    close = expert_of(env.task)(env)[:, 6] < 0
    return steer(env, above(env, SAFE), close, yaw_of(env.scene.frame))


EXPERTS = {
    f.__name__: f
    for f in (
        pick_cube,
        reach,
        push_cube,
        stack_cube,
        peg_insert,
        open_drawer,
        pick_by_name,
        stack_place,
        reach_around,
        pick_either,
    )
}


def expert_of(task: Task) -> Callable:
    """The task's expert: its own, or ours of that name. AttributeError: there is none."""
    if task.expert is None and task.name not in EXPERTS:
        raise AttributeError(f"the task {task.name} has no expert")
    return task.expert or EXPERTS[task.name]
