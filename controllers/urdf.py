"""A robot's URDF for ROS: the given one, or one made from its MJCF, with links, joints, inertias and simple
shapes.

A link is in its joint's frame: the MJCF body's, moved to where the joint turns. Capsules become cylinders;
planes and meshes are left out.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import quoteattr

import mujoco
import numpy as np

from controllers.model import add_tool, read_spec
from controllers.robot import NO_MODEL, Robot
from robo_rl.errors import UserError

KINDS = {int(mujoco.mjtJoint.mjJNT_HINGE): "revolute", int(mujoco.mjtJoint.mjJNT_SLIDE): "prismatic"}


def robot_description(robot: Robot, path: str = "") -> str:
    """URDF text; path: of the model, "" for the robot's own. UserError: there is no model, or URDF cannot say
    it."""
    source = path or robot.model
    if not source:
        raise UserError(f"robot {robot.name} ships no model: {NO_MODEL}")
    text = source if source.lstrip().startswith("<") else Path(source).read_text(encoding="utf-8")
    if "<robot" in text:
        return text
    spec = read_spec(source)
    add_tool(spec, robot.site)
    return made_urdf(spec.compile(), robot)


def made_urdf(mj: mujoco.MjModel, robot: Robot) -> str:
    """URDF of the bodies of a compiled MJCF. UserError: a body has several joints, or one that URDF has
    not."""
    names = {0: robot.base_frame} | {b: mj.body(b).name or f"body{b}" for b in range(1, mj.nbody)}
    moved = {0: np.zeros(3)}  # of a link's frame from its body's, in the body's axes [m]
    parts = [link(mj, 0, names[0], moved[0])]
    for b in range(1, mj.nbody):
        name, parent, joints = (
            names[b],
            int(mj.body_parentid[b]),
            range(mj.body_jntadr[b], mj.body_jntadr[b] + mj.body_jntnum[b]),
        )
        if len(joints) > 1 or any(int(mj.jnt_type[j]) not in KINDS for j in joints):
            raise UserError(f"URDF has no joint for the body {name}")
        moved[b] = np.array(mj.jnt_pos[joints[0]]) if joints else np.zeros(3)
        pos = mj.body_pos[b] + rotation(mj.body_quat[b]) @ moved[b] - moved[parent]
        kind, more = "fixed", ""
        if joints:
            j, joint = joints[0], mj.joint(joints[0]).name
            low, high = mj.jnt_range[j]
            effort, speed = limits_of(robot, joint)
            kind = KINDS[int(mj.jnt_type[j])] if mj.jnt_limited[j] else "continuous"
            more = (
                f'<axis xyz="{row(mj.jnt_axis[j])}"/><limit lower="{low:.9g}" upper="{high:.9g}" '
                f'effort="{effort:.9g}" velocity="{speed:.9g}"/>'
            )
        parts += [
            link(mj, b, name, moved[b]),
            joint_tag(
                mj.joint(joints[0]).name if joints else f"{name}_fixed",
                kind,
                names[parent],
                name,
                pos,
                mj.body_quat[b],
                more,
            ),
        ]
    site = mj.site(robot.site)
    b = int(mj.site_bodyid[site.id])
    if robot.site not in names.values():
        parts += [
            f"<link name={quoteattr(robot.site)}/>",
            joint_tag(
                f"{robot.site}_fixed",
                "fixed",
                names[b],
                robot.site,
                mj.site_pos[site.id] - moved[b],
                mj.site_quat[site.id],
                "",
            ),
        ]
    return "\n".join([f"<robot name={quoteattr(robot.name)}>", *parts, "</robot>"])


def limits_of(robot: Robot, joint: str) -> tuple[float, float]:
    """(effort [N m], speed [rad/s]) of a joint; (20, 1) of one that is not the arm's."""
    if joint not in robot.joints:
        return 20.0, 1.0
    k = robot.joints.index(joint)
    return robot.torque[k], robot.velocity[k]


def link(mj: mujoco.MjModel, b: int, name: str, moved: np.ndarray) -> str:
    """A body's link with its inertia and shapes."""
    rows = [f"<link name={quoteattr(name)}>"]
    if b and mj.body_mass[b] > 0:
        x, y, z = mj.body_inertia[b]
        rows.append(
            f"<inertial>{origin(mj.body_ipos[b] - moved, mj.body_iquat[b])}<mass "
            f'value="{mj.body_mass[b]:.9g}"/><inertia ixx="{x:.9g}" iyy="{y:.9g}" izz="{z:.9g}" ixy="0" '
            'ixz="0" iyz="0"/></inertial>'
        )
    for g in np.flatnonzero(mj.geom_bodyid == b):
        if shape := shape_of(int(mj.geom_type[g]), mj.geom_size[g]):
            inside = f"{origin(mj.geom_pos[g] - moved, mj.geom_quat[g])}<geometry>{shape}</geometry>"
            rows.append(
                f'<visual>{inside}<material name="m{g}"><color '
                f'rgba="{row(mj.geom_rgba[g])}"/></material></visual>'
            )
            if mj.geom_contype[g] or mj.geom_conaffinity[g]:
                rows.append(f"<collision>{inside}</collision>")
    return "".join([*rows, "</link>"])


def shape_of(kind: int, size: np.ndarray) -> str:
    """URDF's shape; "" where it has none."""
    geom = mujoco.mjtGeom
    if kind == geom.mjGEOM_BOX:
        return f'<box size="{row(2 * size)}"/>'
    if kind == geom.mjGEOM_SPHERE:
        return f'<sphere radius="{size[0]:.9g}"/>'
    if kind in (geom.mjGEOM_CAPSULE, geom.mjGEOM_CYLINDER):
        return f'<cylinder radius="{size[0]:.9g}" length="{2 * size[1]:.9g}"/>'
    return ""


def joint_tag(
    name: str, kind: str, parent: str, child: str, pos: np.ndarray, quat: np.ndarray, more: str
) -> str:
    return (
        f'<joint name={quoteattr(name)} type="{kind}"><parent link={quoteattr(parent)}/><child '
        f"link={quoteattr(child)}/>"
        f"{origin(pos, quat)}{more}</joint>"
    )


def origin(pos: np.ndarray, quat: np.ndarray) -> str:
    r = rotation(quat)
    pitch = math.asin(min(max(-r[2, 0], -1.0), 1.0))
    if abs(r[2, 0]) < 1 - 1e-12:
        roll, yaw = math.atan2(r[2, 1], r[2, 2]), math.atan2(r[1, 0], r[0, 0])
    else:  # roll and yaw turn about one axis: yaw alone
        roll, yaw = 0.0, math.atan2(-r[0, 1], r[1, 1])
    return f'<origin xyz="{row(pos)}" rpy="{row((roll, pitch, yaw))}"/>'


def rotation(quat: np.ndarray) -> np.ndarray:
    """[3, 3] of a quaternion (w, x, y, z)."""
    out = np.zeros(9)
    mujoco.mju_quat2Mat(out, np.asarray(quat, float))
    return out.reshape(3, 3)


def row(numbers: Iterable[float]) -> str:
    return " ".join(f"{x:.9g}" for x in numbers)
