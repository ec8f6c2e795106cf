"""What each task is: its objects, starts, success, progress and observation, all pure functions of a batch.

Arrays have the batch last (`[3, N]` positions in metres in the base frame). `progress` is in [0, 1] and grows
towards success; the dense reward of a step is its increase, so that waiting near the goal earns nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sims.mujoco.model import block_xml, goal_xml

F = np.float32
CUBE = 0.02  # half size of a cube [m]
HELD = (0.25, 0.75)  # opening of the gripper (0 closed, 1 open) while it holds a cube
LIFT = 0.10  # a lifted cube's bottom is this far above the table [m]


@dataclass(slots=True)
class Scene:
    """The batch as tasks and experts see it: views into the env's buffers, float32."""

    q: np.ndarray  # joint angles [7, N]
    qd: np.ndarray  # joint velocities [7, N]
    opening: np.ndarray  # gripper, 0 closed .. 1 open [N]
    tcp: np.ndarray  # point between the finger tips [3, N]
    frame: np.ndarray  # the hand's axes [3, 5, N] (see kinematics)
    pos: list[np.ndarray]  # each free object's centre [3, N]
    quat: list[np.ndarray]  # and attitude wxyz [4, N]
    vel: list[np.ndarray]  # and velocity [3, N]
    goal: np.ndarray  # the goal mark [3, N]
    slide: np.ndarray  # drawer opening [N]
    asked: np.ndarray  # int [N], the object the instruction names


@dataclass(slots=True)
class Start:
    """How an episode begins: object centres [n, K, 3], their yaw [n, K] (about z), goal [n, 3], asked [n]."""

    centre: np.ndarray
    yaw: np.ndarray
    goal: np.ndarray
    asked: np.ndarray


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `place` maps uniforms [n, 24] to a Start; the other functions map a Scene to [N] arrays."""

    name: str
    max_steps: int
    xml: str
    objects: tuple[str, ...]  # free bodies in the model's order
    place: Callable[[np.ndarray], Start]
    success: Callable[[Scene], np.ndarray]
    progress: Callable[[Scene], np.ndarray]
    instructions: tuple[str, ...]  # by `asked`
    uses_goal: bool = False
    uses_slide: bool = False
    failure: Callable[[Scene], np.ndarray] | None = None  # ends the episode without success


def _start(n: int, centre=(), yaw=(), goal=None, asked=None) -> Start:
    """Stack columns: centre is a list of (x [n], y [n], z), yaw a list of [n]."""
    at = np.zeros((n, len(centre), 3))
    for k, xyz in enumerate(centre):
        for j, v in enumerate(xyz):
            at[:, k, j] = v
    turn = np.zeros((n, len(centre)))
    for k, v in enumerate(yaw):
        turn[:, k] = v
    mark = np.zeros((n, 3))
    if goal is not None:
        for j, v in enumerate(goal):
            mark[:, j] = v
    return Start(at, turn, mark, np.zeros(n, np.int64) if asked is None else asked)


def _between(u: np.ndarray, low: float, high: float) -> np.ndarray:
    return low + (high - low) * u


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Euclidean distance [N] of the rows of a and b."""
    d = a - b
    d *= d
    return np.sqrt(d.sum(0))


def held(s: Scene, k: int) -> np.ndarray:
    """bool [N]: object k is between the finger tips, which are neither open nor closed."""
    return (distance(s.tcp, s.pos[k]) < 0.025) & (s.opening > HELD[0]) & (s.opening < HELD[1])


def near(d: np.ndarray, scale: float) -> np.ndarray:
    """1 at distance 0, falling to 0.5 at `scale`."""
    return F(scale) / (F(scale) + d)


# ---------------------------------------------------------------- reach


def _reach_place(u):
    return _start(len(u), goal=(_between(u[:, 0], 0.36, 0.62), _between(u[:, 1], -0.25, 0.25),
                                _between(u[:, 2], 0.06, 0.40)))


REACH = Task(
    "reach", 60, goal_xml("sphere", "0.015"), (), _reach_place,
    success=lambda s: distance(s.tcp, s.goal) < 0.02,
    progress=lambda s: near(distance(s.tcp, s.goal), 0.1),
    instructions=("reach the green mark",), uses_goal=True)

# ---------------------------------------------------------------- pick_cube


def _pick_place(u):
    return _start(len(u), [(_between(u[:, 0], 0.39, 0.64), _between(u[:, 1], -0.15, 0.15), CUBE)],
                  [_between(u[:, 2], -np.pi / 4, np.pi / 4)])


def _lifted(s: Scene, k: int):
    return (s.pos[k][2] > CUBE + LIFT) & held(s, k)


def _pick_progress(s: Scene, k: int = 0):
    height = np.clip((s.pos[k][2] - F(CUBE)) / F(LIFT), 0, 1)
    return F(0.3) * near(distance(s.tcp, s.pos[k]), 0.08) + held(s, k) * (F(0.2) + F(0.5) * height)


PICK = Task(
    "pick_cube", 100, block_xml("cube", (CUBE,) * 3, "red", 0.08), ("cube",), _pick_place,
    success=lambda s: _lifted(s, 0), progress=_pick_progress, instructions=("pick up the cube",))

TASKS = {t.name: t for t in (PICK, REACH)}
