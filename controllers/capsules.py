"""An arm's links as capsules, and how near those of two arms are and come: simple geometry that encloses the
models' shapes.

A capsule is a segment with a radius. Each shape of a link has one that holds all of it; a link of more than
FEW shapes has one for all of them. Where a model has no shapes (URDF), the capsules go along the lines
between the joints. Fingers count with all of their travel.
"""

import math
from itertools import pairwise

import mujoco
import numpy as np

from controllers.model import ArmModel, read_spec
from robo_rl.compiled import Announcement, kept
from robo_rl.errors import UserError

FEW = 3  # shapes of a link that have a capsule each
GEOM = mujoco.mjtGeom
MOVING = 1e-3  # m/s; slower is at rest


def enclosing(points: np.ndarray, radii: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """(end [3], end [3], radius) of a capsule that holds spheres of `radii` [k] at `points` [k, 3], along
    their longest direction."""
    middle = points.mean(0)
    axis = np.linalg.svd(points - middle)[2][0] if len(points) > 1 else np.array([0.0, 0.0, 1.0])
    along = (points - middle) @ axis
    across = np.linalg.norm(points - middle - along[:, None] * axis, axis=1)
    radius = float((across + radii).max())
    # how far each may be beyond the segment's end
    over = np.sqrt(np.maximum((radius - radii) ** 2 - across**2, 0.0))
    low, high = float((along + over).min()), float((along - over).max())
    if low > high:
        low = high = (low + high) / 2
    return middle + low * axis, middle + high * axis, radius


def shape_points(mj: mujoco.MjModel, geom: int) -> tuple[np.ndarray, np.ndarray]:
    """(points [k, 3] in the body's frame, radii [k]) of spheres whose hull holds a geom."""
    kind, size = GEOM(mj.geom_type[geom]), mj.geom_size[geom]
    if kind == GEOM.mjGEOM_SPHERE:
        local, radius = np.zeros((1, 3)), size[0]
    elif kind in (GEOM.mjGEOM_CAPSULE, GEOM.mjGEOM_CYLINDER):
        local, radius = np.array([[0, 0, -size[1]], [0, 0, size[1]]]), size[0]
    elif kind == GEOM.mjGEOM_MESH:
        mesh = mj.geom_dataid[geom]
        first = mj.mesh_vertadr[mesh]
        local, radius = mj.mesh_vert[first : first + mj.mesh_vertnum[mesh]].astype(float), 0.0
    else:  # a box, and the box around everything else
        local, radius = np.array(np.meshgrid(*[(-1, 1)] * 3)).reshape(3, -1).T * size, 0.0
    turn = np.zeros(9)
    mujoco.mju_quat2Mat(turn, mj.geom_quat[geom])
    return local @ turn.reshape(3, 3).T + mj.geom_pos[geom], np.full(len(local), radius)


def travels(source: "str | mujoco.MjSpec", joints: tuple[str, ...]) -> dict[str, float]:
    """How far a body of the arm's file goes by joints that are not the arm's [m], by name: its fingers."""
    mj = read_spec(source).compile()
    out: dict[str, float] = {}
    for j in range(mj.njnt):
        if mj.joint(j).name in joints or mj.jnt_type[j] == mujoco.mjtJoint.mjJNT_FREE:
            continue
        body = int(mj.jnt_bodyid[j])
        if mj.jnt_type[j] == mujoco.mjtJoint.mjJNT_SLIDE:
            far = float(np.abs(mj.jnt_range[j]).max())
        else:
            geoms = [g for g in range(mj.ngeom) if mj.geom_bodyid[g] == body]
            far = 2 * max(
                (float(np.linalg.norm(mj.geom_pos[g] - mj.jnt_pos[j])) + mj.geom_rbound[g] for g in geoms),
                default=0.0,
            )
        out[mj.body(body).name] = out.get(mj.body(body).name, 0.0) + far
    return out


class LinkCapsules:
    """The capsules of one arm: `place` fills where they are and how they move, in the frame that the pair
    shares.

    ends [k, 6] [m]: both ends of each; speeds [k, 6] [m/s] of these; radii [k] [m]. UserError: the model has
    no shapes and no radius is given."""

    def __init__(
        self,
        model: ArmModel,
        source: "str | mujoco.MjSpec",
        radius: float,
        pos: tuple[float, ...],
        quat: tuple[float, ...],
    ):
        """model: the arm's; source: its file, with the fingers' joints; radius [m]: least of all capsules;
        pos [m], quat: of the base."""
        self.model, mj = model, model.mj
        self.pos, turn = np.array(pos), np.zeros(9)
        mujoco.mju_quat2Mat(turn, np.array(quat) / math.hypot(*quat))
        self.turn = turn.reshape(3, 3)
        rows: list[tuple[int, np.ndarray, np.ndarray, float]] = []
        far = travels(source, model.joints)
        chain = chain_of(model)
        for body in range(1, mj.nbody):
            if mj.body_rootid[body] != mj.body_rootid[chain[-1]]:
                continue  # of the scene
            geoms = [
                g
                for g in range(mj.ngeom)
                if mj.geom_bodyid[g] == body and GEOM(mj.geom_type[g]) != GEOM.mjGEOM_PLANE
            ]
            shapes = [shape_points(mj, g) for g in geoms]
            if len(shapes) > FEW:
                shapes = [(np.concatenate([p for p, _ in shapes]), np.concatenate([r for _, r in shapes]))]
            for points, radii in shapes:
                a, b, r = enclosing(points, radii)
                rows.append((body, a, b, max(r + far.get(mj.body(body).name, 0.0), radius)))
        if not rows and not radius:
            raise UserError(
                "the arm's model has no shapes to keep apart: say the `radius` of its links [m] in the "
                "pair's file"
            )
        thick = max((r for body, _, _, r in rows if body in chain[:2]), default=radius)
        # the base, from its frame to the first link
        rows.append((0, np.zeros(3), np.array(mj.body_pos[chain[0]]), thick))
        if radius:
            for body, child in pairwise(chain):
                rows.append((body, np.zeros(3), np.array(mj.body_pos[child]), radius))
            rows.append((chain[-1], np.zeros(3), np.array(mj.site_pos[model.site]), radius))
        self.bodies = np.array([r[0] for r in rows])
        self.local = np.array([[r[1], r[2]] for r in rows])  # [k, 2, 3] in the bodies' frames
        self.radii = np.array([r[3] for r in rows])
        self.ends, self.speeds = np.zeros((len(rows), 6)), np.zeros((len(rows), 6))

    def place(self) -> None:
        """Where the capsules are, at the state of the model's last `update`."""
        d, b = self.model.data, self.bodies
        axes = d.xmat[b].reshape(-1, 1, 3, 3)
        points = (axes @ self.local[..., None])[..., 0] + d.xpos[b][:, None]
        # of the point that is at the tree's centre of mass
        turning, moving = d.cvel[b, :3][:, None], d.cvel[b, 3:][:, None]
        speeds = moving + np.cross(turning, points - d.subtree_com[self.model.mj.body_rootid[b]][:, None])
        self.ends[:] = (points @ self.turn.T + self.pos).reshape(-1, 6)
        self.speeds[:] = (speeds @ self.turn.T).reshape(-1, 6)


def chain_of(model: ArmModel) -> list[int]:
    """Bodies from the base's first to the tool's."""
    out = [int(model.mj.site_bodyid[model.site])]
    while model.mj.body_parentid[out[0]]:
        out.insert(0, int(model.mj.body_parentid[out[0]]))
    return out


@kept()
def closest(a, b):
    """(s, t): where on segments a [6] and b [6] (two ends each) the nearest points are, 0 .. 1 from their
    first ends on.

    Source: Ericson 2005, "Real-Time Collision Detection", 5.1.9."""
    aa = bb = ab = ar = br = 0.0
    for i in range(3):
        u, v, r = a[3 + i] - a[i], b[3 + i] - b[i], a[i] - b[i]
        aa += u * u
        bb += v * v
        ab += u * v
        ar += u * r
        br += v * r
    if aa < 1e-12 and bb < 1e-12:
        return 0.0, 0.0
    if aa < 1e-12:
        return 0.0, min(max(br / bb, 0.0), 1.0)
    if bb < 1e-12:
        return min(max(-ar / aa, 0.0), 1.0), 0.0
    below = aa * bb - ab * ab
    s = min(max((ab * br - ar * bb) / below, 0.0), 1.0) if below > 1e-12 * aa * bb else 0.0
    t = (ab * s + br) / bb
    if t < 0.0:
        return min(max(-ar / aa, 0.0), 1.0), 0.0
    if t > 1.0:
        return min(max((ab - ar) / aa, 0.0), 1.0), 1.0
    return s, t


@kept()
def least_room(a, va, ra, b, vb, rb, brake_a, brake_b, reaction, grace):
    """(room, distance, i, j) [m] of the capsules of two arms with the least room: their distance less what it
    takes to stop.

    a, b [k, 6] ends, va, vb [k, 6] their speeds, ra, rb [k] radii; brakes [m/s^2]; reaction [s]. An arm that
    goes towards the other at v needs v reaction + v^2 / (2 brake); one that goes away needs nothing, and
    gives nothing. Where neither goes towards the other `grace` [m] is added: what stands a little too near
    may stay. distance is of the nearest pair."""
    least, nearest, first, second = np.inf, np.inf, 0, 0
    for i in range(len(a)):
        for j in range(len(b)):
            s, t = closest(a[i], b[j])
            far = towards_a = towards_b = 0.0
            for k in range(3):
                x = b[j, k] + t * (b[j, 3 + k] - b[j, k]) - a[i, k] - s * (a[i, 3 + k] - a[i, k])
                far += x * x
                towards_a += x * (va[i, k] + s * (va[i, 3 + k] - va[i, k]))
                towards_b -= x * (vb[j, k] + t * (vb[j, 3 + k] - vb[j, k]))
            far = math.sqrt(far)
            scale = 1.0 / far if far > 1e-9 else 0.0
            x, y = max(towards_a * scale, 0.0), max(towards_b * scale, 0.0)
            distance = far - ra[i] - rb[j]
            room = distance + grace
            if x + y > MOVING:
                room = distance - x * x / (2 * brake_a) - y * y / (2 * brake_b) - reaction * (x + y)
            nearest = min(nearest, distance)
            if room < least:
                least, first, second = room, i, j
    return least, nearest, first, second


def prepare() -> None:
    """Compile, or load, `least_room`: seconds that a loop in real time does not have."""
    announcement = Announcement("the distance between two arms")
    try:
        row, one = np.zeros((1, 6)), np.zeros(1)
        least_room(row, row, one, row, row, one, 1.0, 1.0, 0.0, 0.0)
    finally:
        announcement.close()
