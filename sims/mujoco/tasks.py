"""What each task is: its objects, starts, success, progress and observation, all pure functions of a batch.

Arrays have the batch last (`[3, N]` positions in metres in the base frame). `progress` is in [0, 1] and grows
towards success; the dense reward of a step is its increase, so that waiting near the goal earns nothing.
A task of the user's own is a `Task` too, named `module:object` (docs/tutorials/own_task.md).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

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
    # positions [N] of the task's own joints [m] or [rad]
    joints: list[np.ndarray] = field(default_factory=list)


@dataclass(slots=True)
class Start:
    """How an episode begins: object centres [n, K, 3], their yaw [n, K] (about z), goal [n, 3], asked [n]."""

    centre: np.ndarray
    yaw: np.ndarray
    goal: np.ndarray
    asked: np.ndarray


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `place` maps uniforms [n, 24] to a Start; the other functions map a Scene to [N] arrays.

    The state is proprioception, then six numbers per object, three of the goal (`uses_goal`), the drawer's
    (`uses_slide`), one per entry of `joints`, and the rows that `observe` gives, named by `observed`.
    """

    name: str
    max_steps: int
    xml: str  # MJCF of the task's bodies; classes "solid" (collides) and "drawn" (does not)
    objects: tuple[str, ...]  # free bodies in the model's order
    place: Callable[[np.ndarray], Start]
    success: Callable[[Scene], np.ndarray]
    progress: Callable[[Scene], np.ndarray]
    instructions: tuple[str, ...]  # by `asked`
    uses_goal: bool = False
    uses_slide: bool = False
    failure: Callable[[Scene], np.ndarray] | None = None  # ends the episode without success
    # how many of its sub-tasks are done
    stage: Callable[[Scene], np.ndarray] = lambda s: np.zeros(len(s.opening))
    joints: tuple[str, ...] = ()  # hinges and slides of `xml` that the state tells
    observe: Callable[[Scene], np.ndarray] | None = None  # more of the state: [len(observed), N]
    observed: tuple[str, ...] = ()
    expert: Callable | None = None  # env -> actions [N, 7] of the "ee_delta" control, see sims.mujoco.experts
    jitter: float = 0.08  # start: joints within +- this of HOME [rad]
    assets: str = ""  # MJCF inside <asset>, for example meshes; files by absolute paths


def start_of(n: int, centre=(), yaw=(), goal=None, asked=None) -> Start:
    """The Start of n episodes: `centre` is a list of (x, y, z) and `yaw` a list, one entry per object, `goal`
    (x, y, z); each is a number or [n]."""
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


def between(u: np.ndarray, low: float, high: float) -> np.ndarray:
    return low + (high - low) * u


def distance(a: np.ndarray, b: np.ndarray | np.floating) -> np.ndarray:
    """Euclidean distance [N] of the rows of a and b."""
    d = a - b
    np.multiply(d, d, out=d)
    total = np.add.reduce(d, 0)
    return np.sqrt(total, out=total)


def held(s: Scene, k: int) -> np.ndarray:
    """bool [N]: object k is between the finger tips, which are neither open nor closed."""
    out = distance(s.tcp, s.pos[k]) < 0.025
    out &= s.opening > HELD[0]
    out &= s.opening < HELD[1]
    return out


def near(d: np.ndarray, scale: float) -> np.ndarray:
    """1 at distance 0, falling to 0.5 at `scale`."""
    return F(scale) / (F(scale) + d)


# ---------------------------------------------------------------- reach


def _reach_place(u):
    return start_of(
        len(u),
        goal=(between(u[:, 0], 0.36, 0.62), between(u[:, 1], -0.25, 0.25), between(u[:, 2], 0.06, 0.34)),
    )


REACH = Task(
    "reach",
    50,
    goal_xml("sphere", "0.015"),
    (),
    _reach_place,
    success=lambda s: distance(s.tcp, s.goal) < 0.02,
    progress=lambda s: near(distance(s.tcp, s.goal), 0.1),
    instructions=("reach the green mark",),
    uses_goal=True,
)

# ---------------------------------------------------------------- pick_cube


def _pick_place(u):
    return start_of(
        len(u),
        [(between(u[:, 0], 0.39, 0.64), between(u[:, 1], -0.15, 0.15), CUBE)],
        [between(u[:, 2], -np.pi / 4, np.pi / 4)],
    )


def _lifted(s: Scene, k: int):
    up = s.pos[k][2] > CUBE + LIFT
    return up & held(s, k) if np.count_nonzero(up) else up


def _pick_progress(s: Scene, k: int = 0):
    height = np.clip((s.pos[k][2] - F(CUBE)) / F(LIFT), 0, 1)
    return F(0.3) * near(distance(s.tcp, s.pos[k]), 0.08) + held(s, k) * (F(0.2) + F(0.5) * height)


PICK = Task(
    "pick_cube",
    100,
    block_xml("cube", (CUBE, CUBE, CUBE), "red", 0.08),
    ("cube",),
    _pick_place,
    success=lambda s: _lifted(s, 0),
    progress=_pick_progress,
    instructions=("pick up the cube",),
    stage=lambda s: held(s, 0),
)

# ---------------------------------------------------------------- push_cube

PUSHED = 0.025  # the cube is there when its centre is this close to the mark [m]


def _push_place(u):
    x, y = between(u[:, 0], 0.40, 0.50), between(u[:, 1], -0.12, 0.12)
    way, turn = between(u[:, 2], 0.10, 0.16), between(u[:, 3], -0.8, 0.8)
    return start_of(
        len(u),
        [(x, y, CUBE)],
        [between(u[:, 4], -np.pi / 4, np.pi / 4)],
        goal=(x + way * np.cos(turn), y + way * np.sin(turn), 0.001),
    )


PUSH = Task(
    "push_cube",
    120,
    block_xml("cube", (CUBE, CUBE, CUBE), "blue", 0.08) + goal_xml("cylinder", "0.03 0.001"),
    ("cube",),
    _push_place,
    success=lambda s: (distance(s.pos[0][:2], s.goal[:2]) < PUSHED) & (s.pos[0][2] < CUBE + 0.01),
    progress=lambda s: (
        F(0.3) * near(distance(s.tcp, s.pos[0]), 0.08)
        + F(0.7) * near(distance(s.pos[0][:2], s.goal[:2]), 0.06)
    ),
    instructions=("push the cube onto the green mark",),
    uses_goal=True,
)

# ---------------------------------------------------------------- stack_cube


def _stack_place(u):
    side = np.where(u[:, 0] < 0.5, -1.0, 1.0)
    return start_of(
        len(u),
        [
            (between(u[:, 1], 0.41, 0.60), side * between(u[:, 2], 0.045, 0.15), CUBE),
            (between(u[:, 3], 0.41, 0.60), -side * between(u[:, 4], 0.045, 0.15), CUBE),
        ],
        [between(u[:, 5], -np.pi / 4, np.pi / 4), between(u[:, 6], -np.pi / 4, np.pi / 4)],
    )


def stacked(s: Scene, up: float = 2 * CUBE):
    """bool [N]: the first object lies on the second, its centre `up` above that one's, wherever the gripper
    is."""
    return (distance(s.pos[0][:2], s.pos[1][:2]) < 0.018) & (
        np.abs(s.pos[0][2] - s.pos[1][2] - F(up)) < 0.004
    )


def _stack_success(s: Scene):
    return stacked(s) & (s.opening > 0.65) & (distance(s.vel[0], F(0)) < 0.05)


def _stack_progress(s: Scene):
    has, on = held(s, 0), stacked(s)
    top = np.stack([s.pos[1][0], s.pos[1][1], s.pos[1][2] + F(2 * CUBE)])
    carried = F(0.2) + F(0.4) * near(distance(s.pos[0], top), 0.08)
    return F(0.2) * near(distance(s.tcp, s.pos[0]), 0.08) + np.where(
        on, F(0.6) + F(0.2) * s.opening, has * carried
    )


def _stack_stage(s: Scene):
    return np.where(stacked(s), 2, held(s, 0))


STACK = Task(
    "stack_cube",
    150,
    block_xml("red", (CUBE, CUBE, CUBE), "red", 0.08) + block_xml("green", (CUBE, CUBE, CUBE), "green", 0.08),
    ("red", "green"),
    _stack_place,
    success=_stack_success,
    progress=_stack_progress,
    instructions=("stack the red cube on the green cube",),
    stage=_stack_stage,
)

# ---------------------------------------------------------------- stack_place

SMALL = 0.015  # half size of the upper cube [m]: between fingers that hold the lower one it is free
PLACED = 0.025  # the lower cube is there when its centre is this close to the mark [m]


def _stack_place_place(u):
    start, side = _stack_place(u), np.where(u[:, 0] < 0.5, -1.0, 1.0)
    start.centre[:, 0, 2] = SMALL
    start.goal[:, 0], start.goal[:, 1], start.goal[:, 2] = (
        between(u[:, 7], 0.41, 0.60),
        side * between(u[:, 8], 0.05, 0.15),
        0.001,
    )
    return start


def pair(s: Scene):
    """bool [N]: the small cube lies on the other."""
    return stacked(s, CUBE + SMALL)


def placed(s: Scene):
    """bool [N]: the lower cube lies on the mark."""
    return (distance(s.pos[1][:2], s.goal[:2]) < PLACED) & (s.pos[1][2] < CUBE + 0.004)


def _pair_success(s: Scene):
    still = (distance(s.vel[0], F(0)) < 0.05) & (distance(s.vel[1], F(0)) < 0.05)
    return pair(s) & placed(s) & still & (s.opening > 0.65)


def _pair_progress(s: Scene):
    top = np.stack([s.pos[1][0], s.pos[1][1], s.pos[1][2] + F(CUBE + SMALL)])
    first = F(0.1) * near(distance(s.tcp, s.pos[0]), 0.08) + held(s, 0) * (
        F(0.1) + F(0.2) * near(distance(s.pos[0], top), 0.08)
    )
    then = (
        F(0.5)
        + F(0.1) * near(distance(s.tcp, s.pos[1]), 0.08)
        + F(0.25) * near(distance(s.pos[1][:2], s.goal[:2]), 0.08)
    )
    return np.where(pair(s), then + placed(s) * F(0.1) * s.opening, first)


def _pair_stage(s: Scene):
    """1 the small cube is held, 2 it lies on the other, let go, 3 the other is held below it, 4 that lies on
    the mark."""
    carried = np.where(placed(s), 4, np.where(held(s, 1), 3, np.where(s.opening > 0.65, 2, 1)))
    return np.where(pair(s), carried, held(s, 0))


STACK_PLACE = Task(
    "stack_place",
    300,
    block_xml("red", (SMALL, SMALL, SMALL), "red", 0.04)
    + block_xml("green", (CUBE, CUBE, CUBE), "green", 0.08)
    + goal_xml("cylinder", "0.03 0.001"),
    ("red", "green"),
    _stack_place_place,
    success=_pair_success,
    progress=_pair_progress,
    instructions=("stack the red cube on the green cube and carry both to the green mark",),
    uses_goal=True,
    stage=_pair_stage,
)

# ---------------------------------------------------------------- peg_insert

PEG = (0.012, 0.012, 0.06)  # half sizes of the peg [m]
HOLE = 0.0155  # half width of the hole [m]
WALL, RIM = 0.01, 0.025  # half thickness and half height of its walls [m]


def _hole_xml() -> str:
    far, wide = HOLE + WALL, HOLE + 2 * WALL
    walls = "".join(
        f'<geom type="box" size="{a} {b} {RIM}" pos="{x} {y} {RIM}" rgba="0.3 0.33 0.45 1" class="solid"/>'
        for a, b, x, y in (
            (WALL, wide, far, 0),
            (WALL, wide, -far, 0),
            (HOLE, WALL, 0, far),
            (HOLE, WALL, 0, -far),
        )
    )
    return f'<body name="goal" mocap="true" pos="0.5 0 0">{walls}</body>'


def _peg_place(u):
    side = np.where(u[:, 0] < 0.5, -1.0, 1.0)
    return start_of(
        len(u),
        [(between(u[:, 1], 0.42, 0.58), side * between(u[:, 2], 0.06, 0.15), PEG[2])],
        [between(u[:, 3], -0.5, 0.5)],
        goal=(between(u[:, 4], 0.42, 0.58), -side * between(u[:, 5], 0.06, 0.15), 0.0),
    )


def _in_hole(s: Scene):
    return (distance(s.pos[0][:2], s.goal[:2]) < 0.006) & (s.pos[0][2] < PEG[2] + 0.015)


def peg_held(s: Scene):
    """bool [N]: the peg's upper half is between the finger tips."""
    over = s.tcp[2] - s.pos[0][2]
    return (
        (distance(s.tcp[:2], s.pos[0][:2]) < 0.02)
        & (over > -0.01)
        & (over < PEG[2])
        & (s.opening > 0.15)
        & (s.opening < 0.5)
    )


def _peg_progress(s: Scene):
    above = s.pos[0][2] - s.goal[2] - F(PEG[2])
    to_go = distance(s.pos[0][:2], s.goal[:2]) + np.maximum(above, 0)
    return F(0.2) * near(distance(s.tcp[:2], s.pos[0][:2]), 0.08) + peg_held(s) * (
        F(0.2) + F(0.6) * near(to_go, 0.08)
    )


PEG_INSERT = Task(
    "peg_insert",
    140,
    block_xml("peg", PEG, "yellow", 0.06) + _hole_xml(),
    ("peg",),
    _peg_place,
    success=_in_hole,
    progress=_peg_progress,
    instructions=("put the peg into the hole",),
    uses_goal=True,
)

# ---------------------------------------------------------------- open_drawer

OPENED = 0.12  # [m]
HANDLE = (0.006, 0.01, 0.035)  # half sizes of the upright handle [m]


def _drawer_xml() -> str:
    wood, front = "0.55 0.4 0.26 1", "0.75 0.58 0.38 1"
    return f"""<body name="goal" mocap="true" pos="0.65 0 0.12">
  <geom type="box" size="0.09 0.11 0.004" pos="0.145 0 0.045" rgba="{wood}" class="drawn"/>
  <geom type="box" size="0.09 0.004 0.085" pos="0.145 0.11 -0.04" rgba="{wood}" class="drawn"/>
  <geom type="box" size="0.09 0.004 0.085" pos="0.145 -0.11 -0.04" rgba="{wood}" class="drawn"/>
  <body name="drawer">
    <inertial pos="0.1 0 -0.02" mass="0.6" diaginertia="0.003 0.003 0.003"/>
    <joint name="drawer" type="slide" axis="-1 0 0" range="-0.002 0.22" damping="15"/>
    <geom type="box" size="0.006 0.1 0.075" pos="0.05 0 -0.035" rgba="{front}" class="drawn"/>
    <geom type="box" size="0.08 0.095 0.004" pos="0.135 0 -0.1" rgba="{front}" class="drawn"/>
    <geom type="box" size="0.022 0.005 0.005" pos="0.024 0 -0.02" rgba="0.2 0.2 0.22 1" class="drawn"/>
    <geom name="handle" type="box" size="{HANDLE[0]} {HANDLE[1]} {HANDLE[2]}" rgba="0.85 0.12 0.1 1" class="solid"/>
  </body>
</body>"""  # noqa: E501


def handle(s: Scene) -> np.ndarray:
    """The handle's centre [3, N]; `goal` is where it is when the drawer is shut."""
    at = s.goal.copy()
    at[0] -= s.slide
    return at


def _drawer_progress(s: Scene):
    return F(0.3) * near(distance(s.tcp, handle(s)), 0.08) + F(0.7) * np.clip(s.slide / F(OPENED), 0, 1)


DRAWER = Task(
    "open_drawer",
    120,
    _drawer_xml(),
    (),
    lambda u: start_of(len(u), goal=(between(u[:, 0], 0.57, 0.67), between(u[:, 1], -0.15, 0.15), 0.12)),
    success=lambda s: s.slide > OPENED,
    progress=_drawer_progress,
    instructions=("open the drawer",),
    uses_goal=True,
    uses_slide=True,
)

# ---------------------------------------------------------------- pick_by_name

NAMES = ("red", "green", "blue")
CELLS = np.array([(x, y) for x in (0.445, 0.58) for y in (-0.11, 0.0, 0.11)])  # [m], three of six are taken


def _named_place(u):
    cells = CELLS[np.argsort(u[:, :6], axis=1, kind="stable")[:, :3]]  # [n, 3, 2]
    asked = np.minimum((u[:, 6] * 3).astype(np.int64), 2)
    centre = [
        (
            cells[:, k, 0] + between(u[:, 7 + 3 * k], -0.02, 0.02),
            cells[:, k, 1] + between(u[:, 8 + 3 * k], -0.012, 0.012),
            CUBE,
        )
        for k in range(3)
    ]
    return start_of(
        len(u), centre, [between(u[:, 9 + 3 * k], -np.pi / 4, np.pi / 4) for k in range(3)], asked=asked
    )


def chosen(s: Scene, per_object: list[np.ndarray]) -> np.ndarray:
    """Of one array per object, each env's entry of the object it is asked for."""
    out = per_object[0]
    for k in range(1, len(per_object)):
        out = np.where(s.asked == k, per_object[k], out)
    return out


def _named_progress(s: Scene):
    return chosen(s, [_pick_progress(s, k) for k in range(3)])


def _wrong_one(s: Scene):
    lifted = [_lifted(s, k) for k in range(3)]
    return (lifted[0] | lifted[1] | lifted[2]) & ~chosen(s, lifted)


PICK_BY_NAME = Task(
    "pick_by_name",
    100,
    "".join(block_xml(c, (CUBE, CUBE, CUBE), c, 0.08) for c in NAMES),
    NAMES,
    _named_place,
    success=lambda s: chosen(s, [_lifted(s, k) for k in range(3)]),
    progress=_named_progress,
    failure=_wrong_one,
    instructions=tuple(f"pick up the {c} cube" for c in NAMES),
)

# ---------------------------------------------------------------- reach_around

POST = (0.035, 0.015)  # half width across the way and half depth of the post [m]
BEHIND = 0.10  # the mark is this far behind the post's middle [m]
TOUCH = 0.01  # a hand this close to the post touches it [m]


def _post_xml() -> str:
    return (
        '<body name="goal" mocap="true" pos="0.5 0.2 0.12"><geom type="sphere" size="0.015" rgba="0.1 0.8 '
        f'0.3 0.5" class="drawn"/><geom type="box" size="{POST[0]} {POST[1]} 0.2" pos="0 {-BEHIND} 0.05" '
        'rgba="0.85 0.12 0.1 1" class="drawn"/></body>'
    )


def post(s: Scene) -> np.ndarray:
    """Horizontal offset [2, N] of the hand from the post's middle."""
    off = s.tcp[:2] - s.goal[:2]
    off[1] += F(BEHIND)
    return off


def _touched(s: Scene):
    off = np.abs(post(s))
    return (off[0] < POST[0] + TOUCH) & (off[1] < POST[1] + TOUCH)


def _around_progress(s: Scene):
    """Nearer to the mark, by way of the nearer end of the post."""
    off = post(s)
    way = np.maximum(POST[0] + F(0.03) - np.abs(off[0]), 0) * (off[1] < 0)
    return near(distance(s.tcp, s.goal) + way, 0.1)


REACH_AROUND = Task(
    "reach_around",
    70,
    _post_xml(),
    (),
    lambda u: start_of(len(u), goal=(0.495, 0.215, between(u[:, 0], 0.16, 0.26))),
    success=lambda s: distance(s.tcp, s.goal) < 0.02,
    progress=_around_progress,
    failure=_touched,
    instructions=("reach the green mark behind the post",),
    uses_goal=True,
    jitter=0.002,
)

# ---------------------------------------------------------------- pick_either


def _either_place(u):
    x, aside = between(u[:, 0], 0.46, 0.56), between(u[:, 1], 0.07, 0.11)
    return start_of(
        len(u),
        [(x, aside, CUBE), (x, -aside, CUBE)],
        [between(u[:, 2], -np.pi / 4, np.pi / 4), between(u[:, 3], -np.pi / 4, np.pi / 4)],
    )


PICK_EITHER = Task(
    "pick_either",
    100,
    block_xml("left", (CUBE, CUBE, CUBE), "red", 0.08) + block_xml("right", (CUBE, CUBE, CUBE), "red", 0.08),
    ("left", "right"),
    _either_place,
    success=lambda s: _lifted(s, 0) | _lifted(s, 1),
    progress=lambda s: np.maximum(_pick_progress(s, 0), _pick_progress(s, 1)),
    instructions=("pick up one of the cubes",),
    stage=lambda s: held(s, 0) | held(s, 1),
)

TASKS = {
    t.name: t
    for t in (
        PICK,
        REACH,
        PUSH,
        STACK,
        PEG_INSERT,
        DRAWER,
        PICK_BY_NAME,
        STACK_PLACE,
        REACH_AROUND,
        PICK_EITHER,
    )
}
