"""An arm's kinematics and dynamics from MJCF or URDF, through MuJoCo, in arrays that are filled in place.

Frames: base, that is the model's world. `jac` maps joint speeds to the tool's twist there: rows are linear
[m/s] then angular [rad/s], at the tool's point and in base axes (LOCAL_WORLD_ALIGNED), so that jac^T [f; m]
is the torque of a force and a moment at the tool.
"""

from pathlib import Path

import mujoco
import numpy as np

from controllers.robot import NO_MODEL, Robot
from robo_rl.errors import UserError, choose

RANGE = 0.05  # rad by which a file's joint limits may leave the model's


class ArmModel:
    """A reduced model of the named joints alone; every other joint is locked where the file has it.

    state [2n] = (q, dq), also apart as q, dq [n]; pos (x, y, z) [m] and quat (w, x, y, z) of the tool as
    floats; jac [6, n]; minv_jt [6, n] = (M^-1 J^T)^T; bias [n] [N m]: C(q, dq) dq + g(q), with only the parts
    that `coriolis` and `gravity` ask for.
    """

    def __init__(
        self,
        source: "str | Path | mujoco.MjSpec",
        joints: tuple[str, ...],
        site: str,
        *,
        gravity: bool = True,
        coriolis: bool = True,
    ):
        spec = self.spec = reduced(read_spec(source), joints)
        add_tool(spec, site)
        try:
            self.mj = spec.compile()
        except ValueError as e:
            raise UserError(f"the model cannot be built: {' '.join(str(e).split())}") from None
        self.data = mujoco.MjData(self.mj)
        order = [self.mj.joint(j).dofadr[0] for j in joints]
        if order != sorted(order):
            raise UserError(f"joints must be named from the base to the tool: {', '.join(joints)}")
        if not gravity:
            self.mj.opt.gravity[:] = 0
        self.joints, self.coriolis, self.n = joints, coriolis, len(joints)
        self.site = self.mj.site(site).id
        self.state = np.zeros(2 * self.n)
        self.q, self.dq = self.state[: self.n], self.state[self.n :]
        self.jac, self.minv_jt, self.bias = (np.zeros(s) for s in ((6, self.n), (6, self.n), self.n))
        self.pos: list[float] = [0.0] * 3
        self.quat: list[float] = [1.0, 0.0, 0.0, 0.0]
        self.minv_j = self.minv_jt.T  # M^-1 J^T [n, 6], a view
        self._linear, self._angular = self.jac[:3], self.jac[3:]
        self.xpos, self.xmat, self.xquat = (
            self.data.site_xpos[self.site],
            self.data.site_xmat[self.site],
            np.zeros(4),
        )
        self.update(self.data.qpos.copy(), self.dq.copy())

    def update(self, q: np.ndarray, dq: np.ndarray) -> None:
        """Fill everything for joint angles q [rad] and speeds dq [rad/s]."""
        m, d = self.mj, self.data
        self.q[:] = q
        self.dq[:] = dq
        d.qpos[:] = q
        if self.coriolis:
            d.qvel[:] = dq
        mujoco.mj_kinematics(m, d)
        mujoco.mj_comPos(m, d)
        mujoco.mj_makeM(m, d)
        mujoco.mj_factorM(m, d)
        mujoco.mj_comVel(m, d)
        mujoco.mj_rne(m, d, 0, self.bias)
        mujoco.mj_jacSite(m, d, self._linear, self._angular, self.site)
        mujoco.mj_solveM(m, d, self.minv_jt, self.jac)
        mujoco.mju_mat2Quat(self.xquat, self.xmat)
        self.pos = self.xpos.tolist()
        self.quat = self.xquat.tolist()

    def place(self, q: np.ndarray) -> None:
        """Fill q, pos, quat and jac alone for joint angles q [rad]: a third of the work."""
        m, d = self.mj, self.data
        self.q[:] = q
        d.qpos[:] = q
        mujoco.mj_kinematics(m, d)
        mujoco.mj_comPos(m, d)
        mujoco.mj_jacSite(m, d, self._linear, self._angular, self.site)
        mujoco.mju_mat2Quat(self.xquat, self.xmat)
        self.pos = self.xpos.tolist()
        self.quat = self.xquat.tolist()

    @property
    def rotation(self) -> np.ndarray:
        """The tool's axes in the base frame [3, 3] (columns)."""
        return self.xmat.reshape(3, 3)

    def inertia(self) -> np.ndarray:
        """Joint-space inertia M [n, n] [kg m^2] at the last update, with the motors' armature."""
        out = np.zeros((self.n, self.n))
        mujoco.mj_fullM(self.mj, self.data, out)
        return out

    def task_mobility(self) -> np.ndarray:
        """J M^-1 J^T [6, 6] at the last update."""
        return self.jac @ self.minv_jt.T


def inertia_fault(model: ArmModel, stiffness: "tuple[float, ...] | np.ndarray", period: float = 0.001) -> str:
    """Why springs at the tool, `stiffness` [6], shake this model where it is: their fastest motion, sqrt(max
    eig(K J M^-1 J^T)), is more than 0.3 of 1 / period. "": they do not. A model without the motors' inertia,
    as a URDF is, does so at its light last joints."""
    rate = float(np.sqrt(np.abs(np.linalg.eigvals(np.diag(stiffness) @ model.task_mobility()))).max())
    if rate * period <= 0.3:
        return ""
    least = model.inertia().diagonal()
    k = int(least.argmin())
    return (
        f"{model.joints[k]} has an inertia of {least[k]:.2g} kg m^2, too little for the stiffness at "
        f"{1 / period:g} Hz: the simulated arm shakes. Give the joints of the model their motors' inertia "
        "(armature in MJCF), or lower `gains`"
    )


def range_fault(model: ArmModel, robot: Robot) -> str:
    """Which joint of the robot's file leaves the range that its model has (by more than RANGE); "": none. A
    model that is read in degrees where radians are meant has ranges that are far too small."""
    for k, name in enumerate(robot.joints):
        joint = model.mj.joint(name)
        low, high = joint.range
        if not model.mj.jnt_limited[joint.id]:
            continue
        if robot.lower[k] < low - RANGE or robot.upper[k] > high + RANGE:
            return (
                f"{name} goes from {robot.lower[k]:g} to {robot.upper[k]:g} rad in the file of robot "
                f"{robot.name} and from {low:.3g} to {high:.3g} rad in its model: correct one of them (an "
                'MJCF is read in degrees without <compiler angle="radian"/>)'
            )
    return ""


def arm_model(robot: Robot, path: str = "", **parts: bool) -> ArmModel:
    """The model of a robot with the payload of its cell; `path` replaces the preset's MJCF or URDF."""
    if not (path or robot.model):
        raise UserError(f"robot {robot.name} ships no model: {NO_MODEL}")
    spec = read_spec(path or robot.model)
    if left := left_out(spec, robot.joints, robot.site):
        raise UserError(
            f"the joints of robot {robot.name} lack {', '.join(left)}, which the model has between "
            f"{robot.joints[0]} and the tool {robot.site}: name it in the file, or make it fixed in the model"
        )
    add_payload(spec, robot)
    return ArmModel(spec, robot.joints, robot.site, **{"gravity": robot.gravity} | parts)


def read_spec(source: "str | Path | mujoco.MjSpec") -> mujoco.MjSpec:
    """MJCF or URDF, as a path or as text (it starts with <), ready to be changed. Meshes that are not there
    go."""
    if isinstance(source, mujoco.MjSpec):
        return source.copy()
    text = str(source)
    try:
        if text.lstrip().startswith("<"):
            spec = mujoco.MjSpec.from_string(text)
        else:
            if not Path(text).exists():
                raise UserError(f"no model file {text}")
            spec = mujoco.MjSpec.from_file(text)
            text = Path(text).read_text(encoding="utf-8")
    except ValueError as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"the model cannot be read: {' '.join(str(e).split())}") from None
    # URDF: masses are given, shapes are not needed, and links joined by fixed joints keep names
    if "<robot" in text:
        spec.compiler.fusestatic = False
        for geom in list(spec.geoms):
            spec.delete(geom)
        for mesh in list(spec.meshes):
            spec.delete(mesh)
    return spec


def reduced(spec: mujoco.MjSpec, joints: tuple[str, ...]) -> mujoco.MjSpec:
    """The spec with the named joints only and no actuators: the bare arm. (Gravity compensation is no part of
    bias.)"""
    there = [j.name for j in spec.joints]
    for name in joints:
        choose("joint", name, there)
        kind = spec.joint(name).type
        if kind not in (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE):
            raise UserError(f"joint {name} must be a hinge or a slide")
    for group in (
        "actuators",
        "sensors",
        "tendons",
        "equalities",
        "keys",
        "excludes",
        "pairs",
        "cameras",
        "lights",
    ):
        for element in list(getattr(spec, group)):
            spec.delete(element)
    for joint in list(spec.joints):
        if joint.name not in joints:
            spec.delete(joint)
    return spec


def left_out(spec: mujoco.MjSpec, joints: tuple[str, ...], site: str) -> list[str]:
    """Hinges and slides on the way from the first of the named joints to the tool that are not named: they
    turn, and nobody looks. Those below the first, as of a torso or a rail, stay where the model has them."""
    found = next((s.parent for s in spec.sites if s.name == site), spec.body(site))
    left: list[str] = []
    while found is not None:
        for joint in reversed(list(found.joints)):
            if joint.name in joints:
                if joint.name == joints[0]:
                    return left[::-1]
            elif joint.type in (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE):
                left.append(joint.name)
        found = found.parent
    return []


def add_payload(spec: mujoco.MjSpec, robot: Robot) -> None:
    """Let the tool carry what the robot's file says; its centre and inertia are in the tool's frame."""
    load = robot.cell.payload
    if not load.mass:
        return
    add_tool(spec, robot.site)
    compiled = spec.compile()
    site = compiled.site(robot.site)
    body = spec.body(compiled.body(site.bodyid[0]).name).add_body(
        name="payload of the cell", pos=site.pos, quat=site.quat
    )
    body.mass, body.ipos, body.explicitinertial = load.mass, load.centre, True
    body.inertia = load.inertia if all(load.inertia) else (1e-4,) * 3  # a point has none, and no body may


def add_tool(spec: mujoco.MjSpec, site: str) -> None:
    """See that there is a site called `site`; where that is a body (a URDF's link), put it in its frame."""
    bodies, sites = {b.name: b for b in spec.bodies}, [s.name for s in spec.sites]
    choose("site or link", site, [*sites, *bodies])
    if site not in sites:
        bodies[site].add_site(name=site)
