"""A task whose failures cannot be undone, and whose successes take any time: push a cube on a ledge to a mark
near its edge.

    robo_rl train --task launch.ledge:PushOnLedge --preset quick --algo bc --demos 20      # in the
                                                            repository's folder

A cube that is pushed over the edge lies on the table, from where no push brings it back; the episode goes on
to its limit, so nothing but what is seen tells that it is lost. The way to the mark is 4 to 19 cm long, so
successes end at very different times. `launch/compare_detectors.py` measures on it, for which elapsed time is
little help.
"""

import numpy as np

from sims.mujoco.experts import steer
from sims.mujoco.model import COLOURS, block_xml, goal_xml
from sims.mujoco.tasks import CUBE, PUSHED, Task, between, distance, near, start_of

F = np.float32
LEDGE = (0.10, 0.13, 0.03)  # half sizes of the ledge [m]
AT = (0.50, 0.0)  # its centre [m]
ON_TOP = 2 * LEDGE[2] + CUBE  # height of a cube that lies on it [m]
MARGIN = 0.022  # a mark is at least so far from the edge [m]
WAY = (0.04, 0.19)  # from cube to mark [m]

XML = (
    f'<geom name="ledge" type="box" size="{LEDGE[0]} {LEDGE[1]} {LEDGE[2]}" pos="{AT[0]} {AT[1]} {LEDGE[2]}" '
    f'rgba="{COLOURS["wood"]}" class="solid"/>'
    + block_xml("cube", (CUBE, CUBE, CUBE), "blue", 0.08)
    + goal_xml("cylinder", "0.03 0.001")
)


def place(u):
    """The cube away from the edges, and the mark in a random direction, as far as the drawn way or the margin
    at the edge allow."""
    x, y = between(u[:, 0], AT[0] - 0.05, AT[0] + 0.03), between(u[:, 1], -0.08, 0.08)
    turn = between(u[:, 2], -1.9, 1.9)
    dx, dy = np.cos(turn), np.sin(turn)
    room_x = (LEDGE[0] - MARGIN - np.sign(dx) * (x - AT[0])) / np.maximum(np.abs(dx), 1e-3)
    room_y = (LEDGE[1] - MARGIN - np.sign(dy) * (y - AT[1])) / np.maximum(np.abs(dy), 1e-3)
    way = np.minimum(between(u[:, 3], *WAY), np.minimum(room_x, room_y))
    return start_of(
        len(u),
        [(x, y, ON_TOP)],
        [between(u[:, 4], -np.pi / 4, np.pi / 4)],
        goal=(x + way * dx, y + way * dy, 2 * LEDGE[2] + 0.001),
    )


def success(s):
    return (distance(s.pos[0][:2], s.goal[:2]) < PUSHED) & (np.abs(s.pos[0][2] - F(ON_TOP)) < 0.01)


def progress(s):
    on = s.pos[0][2] > F(ON_TOP - 0.01)
    return on * (
        F(0.3) * near(distance(s.tcp, s.pos[0]), 0.08)
        + F(0.7) * near(distance(s.pos[0][:2], s.goal[:2]), 0.06)
    )


def expert(env):
    """As for push_cube: over the cube to behind it, down, and along; the hand stays above the ledge."""
    s = env.scene
    at, way = s.pos[0], s.goal[:2] - s.pos[0][:2]
    way = way / np.maximum(np.hypot(way[0], way[1]), F(1e-3))
    off, low = s.tcp[:2] - at[:2], F(ON_TOP)
    along, aside = off[0] * way[0] + off[1] * way[1], off[1] * way[0] - off[0] * way[1]
    pushing = (s.tcp[2] < low + F(0.02)) & (along < -0.015) & (np.abs(aside) < 0.015)
    behind = at[:2] - way * F(0.06)
    side = np.hypot(s.tcp[0] - behind[0], s.tcp[1] - behind[1])
    flat = np.where(pushing, at[:2] + way * np.minimum(along + F(0.03), F(0.01)), behind)
    height = low + np.where(pushing, 0, np.clip((side - F(0.012)) * F(4), 0, 0.08)).astype(F)
    return steer(
        env, np.concatenate([flat, height[None]]), np.ones(env.num_envs, bool), np.arctan2(way[1], way[0])
    )


PushOnLedge = Task(
    "push_on_ledge",
    160,
    XML,
    ("cube",),
    place,
    success,
    progress,
    ("push the cube onto the green mark",),
    uses_goal=True,
    expert=expert,
)
