"""ManiSkill's step on one CPU env without the waste: the same numbers, several times faster.

ManiSkill's structs are batched torch tensors. On the CPU backend the batch is always 1, and some 80 % of a
step goes into building one-row tensors: the same pose is read five to ten times per step (40 us each), joint
targets are set one by one through tensors, a grasp test computes rotation matrices although nothing touches.
`install()` replaces those primitives in the running process (never on disk); every task's own `evaluate`,
observation and reward code runs unchanged on top. `tests/test_sims_maniskill.py` holds `step` equal to
`BaseEnv.step`, bit for bit.

Call `install()` once, after `import mani_skill.envs`, in a process that uses the CPU backend only.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import sapien
import sapien.physx
import torch
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.controllers.base_controller import CombinedController
from mani_skill.agents.controllers.pd_joint_pos import PDJointPosController, PDJointPosMimicController
from mani_skill.agents.robots.panda.panda import Panda
from mani_skill.utils.geometry import rotation_conversions as rotations
from mani_skill.utils.structs import Actor, Articulation, Link
from mani_skill.utils.structs.pose import Pose


class _Window:
    """While open, nothing moves: what was read once is reused. Any write of a pose or joint position empties
    it."""

    open = False
    poses: ClassVar[dict] = {}
    contacts = None

    @classmethod
    def clear(cls) -> None:
        cls.poses = {}
        cls.contacts = None


def step(env, action: Any, drive: "Callable | None" = None) -> tuple:
    """One control step of an unwrapped CPU `BaseEnv`; action float32[1, A] or, per agent, a dict of them,
    finite;
    drive: what `driver(env)` gave (for one agent).

    Returns (obs as a dict, reward, info) as `BaseEnv.step` has them; success and failure are in `info`.
    """
    agent, px = env.agent, env.scene.px
    if drive is None:
        agent.set_action(action)
    else:
        drive(action[0].numpy())
    env._before_control_step()
    for _ in range(env._sim_steps_per_control):
        if drive is None:
            agent.before_simulation_step()
        env._before_simulation_step()
        px.step()
        env._after_simulation_step()
    env._after_control_step()
    env._elapsed_steps += 1
    _Window.clear()
    _Window.open = True
    try:
        info = env.get_info()
        obs = env.get_obs(info, unflattened=True)
        return obs, env.get_reward(obs=obs, action=action, info=info), info
    finally:
        _Window.open = False


def renew_scene(env) -> None:
    """Move every entity of a CPU env into a new physics scene (0.2 ms), so that the next reset is exact.

    PhysX keeps the order in which contacts were ever made, and solves them in it: after a reset in the old
    scene an episode with contacts depends on the episodes before it. A rebuilt env does not, but takes 30 ms.
    """
    old = env.scene.sub_scenes[0]
    env._set_scene_config()
    px = sapien.physx.PhysxCpuSystem()
    px.timestep = env.scene.px.timestep
    new = sapien.Scene([px, old.render_system] if env.scene.can_render() else [px])
    for actor in env.scene.actors.values():
        if actor.px_body_type == "dynamic":
            actor._bodies[0].wake_up()  # the countdown to sleep outlives the scene
    for articulation in env.scene.articulations.values():
        articulation._objs[0].links[0].wake_up()
    entities = list(old.entities)
    for entity in entities:
        entity.remove_from_scene()
    for entity in entities:
        new.add_entity(entity)
    env.scene.sub_scenes = [new]
    env.scene.px = px


def flatten(obs: dict, out: np.ndarray) -> None:
    """Write ManiSkill's nested observation of one env into `out` float32[S], in the order of its own
    flattening."""
    at = 0
    for leaf in leaves(obs):
        row = leaf[0].numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
        out[at : at + row.size] = row.ravel()
        at += row.size
    assert at == len(out), f"observation has {at} numbers, not {len(out)}"


def leaves(obs: dict) -> list:
    out = []
    for value in obs.values():
        if isinstance(value, dict):
            out += leaves(value)
        else:
            out.append(value)
    return out


def driver(env) -> "Callable[[np.ndarray], None] | None":
    """A function action[A] -> None that sets the joint targets as `agent.set_action` does, if every part of
    the controller is a plain joint-position one without memory or interpolation; else None. Valid until a
    reconfigure."""
    controller = getattr(env.agent, "controller", None)
    parts = {"": controller}
    if type(controller) is CombinedController:
        parts = controller.controllers
    drives, at = [], 0
    for part in parts.values():
        size = getattr(getattr(part, "single_action_space", None), "shape", [0])[0]
        drive = _part_driver(part)
        if drive is None:
            return None
        drives.append((at, at + size, drive))
        at += size
    robot = env.agent.robot._objs[0]

    def act(action: np.ndarray) -> None:
        qpos = robot.qpos
        for start, stop, drive in drives:
            drive(qpos, action[start:stop])

    return act


def _part_driver(part: Any) -> "Callable[[np.ndarray, np.ndarray], None] | None":
    kind = type(part)
    mimic = kind is PDJointPosMimicController
    if not mimic and kind is not PDJointPosController:
        return None
    config = part.config
    if config.use_target or config.interpolate or not part._normalize_action or (mimic and config.use_delta):
        return None
    low, high = part.action_space_low.numpy(), part.action_space_high.numpy()
    half = np.float32(0.5)
    middle, reach = half * (high + low), half * (high - low)
    ids = part.active_joint_indices.numpy()
    joints = [j._objs[0] for j in part.joints]
    if mimic:
        control, source = part.control_joint_indices.numpy(), part.mimic_control_joint_indices.numpy()
        copies, factor, offset = (
            part.mimic_joint_indices.numpy(),
            part._multiplier.numpy(),
            part._offset.numpy(),
        )

    def drive(qpos: np.ndarray, action: np.ndarray) -> None:
        start = qpos[ids]
        target = middle + reach * np.clip(action, -1, 1)
        if mimic:
            full = np.zeros(len(ids), np.float32)
            full[control] = target
            full[copies] = full[source] * factor + offset
            target = full
        elif config.use_delta:
            target = start + target
        part._start_qpos = torch.from_numpy(start[None])  # some tasks read them
        part._target_qpos = torch.from_numpy(target[None])
        for i, joint in enumerate(joints):
            joint.drive_target = target[i : i + 1]

    return drive


# ---------------------------------------------------------------- cheaper primitives


def install() -> None:
    """Replace the slow one-row primitives of mani_skill 3.0.x in this process. Idempotent."""
    if getattr(Actor, "_robo_rl_lean", False):
        return
    setattr(Actor, "_robo_rl_lean", True)  # noqa: B010  our mark on a class of theirs
    _cached_pose(Actor, lambda obj: obj.pose)
    _cached_pose(Link, lambda obj: obj.entity_pose)
    for name in ("qpos", "root_pose"):
        _clearing_setter(Articulation, name)
    Articulation.set_joint_drive_targets = _set_joint_drive_targets
    # NaN is checked by the vector env
    BaseAgent.set_action = lambda self, action: self.controller.set_action(action)
    Panda.is_grasping = _is_grasping
    Panda.is_static = _is_static
    rotations.quaternion_raw_multiply = _quaternion_product(rotations.quaternion_raw_multiply)
    torch.manual_seed = _manual_seed


def _cached_pose(cls: type, read: Callable) -> None:
    full = cls.pose

    def get(self) -> Pose:
        if len(self._objs) != 1:
            return full.fget(self)
        row = _Window.poses.get(id(self)) if _Window.open else None
        if row is None:
            pose = read(self._objs[0])
            row = torch.from_numpy(np.concatenate((pose.p, pose.q))[None])
            if _Window.open:
                _Window.poses[id(self)] = row
        return Pose(raw_pose=row.clone())  # a task may write into what it was given

    cls.pose = property(get, full.fset)
    _clearing_setter(cls, "pose")


def _clearing_setter(cls: type, name: str) -> None:
    prop = getattr(cls, name)

    def put(self, value) -> None:
        _Window.clear()
        prop.fset(self, value)

    setattr(cls, name, property(prop.fget, put))


def _set_joint_drive_targets(self, targets, joints=(), joint_indices=None) -> None:
    row = np.ascontiguousarray(targets[0], np.float32)
    for i, joint in enumerate(joints):
        joint._objs[0].drive_target = row[i : i + 1]


def _is_static(self, threshold: float = 0.2) -> torch.Tensor:
    qvel = self.robot._objs[0].qvel[:-2]
    return torch.from_numpy(np.abs(qvel).max(keepdims=True) <= np.float32(threshold))


def _is_grasping(self, object, min_force: float = 0.5, max_angle: float = 85) -> torch.Tensor:
    """Both fingers push the object with at least min_force [N], at most max_angle [deg] off their closing
    axes."""
    contacts = _Window.contacts if _Window.open else None
    if contacts is None:
        contacts = self.scene.px.get_contacts()
        if _Window.open:
            _Window.contacts = contacts
    body = object._bodies[0].entity
    fingers = (self.finger1_link._bodies[0].entity, self.finger2_link._bodies[0].entity)
    impulses: list[np.ndarray | None] = [None, None]
    for contact in contacts:
        a, b = (part.entity for part in contact.bodies)
        for k, finger in enumerate(fingers):
            sign = 1 if (a == finger and b == body) else -1 if (a == body and b == finger) else 0
            if sign:
                total = np.sum([point.impulse for point in contact.points], axis=0) * sign
                impulses[k] = total if impulses[k] is None else impulses[k] + total
    grasped = all(
        impulse is not None
        and _pushes(
            np.asarray(impulse, np.float32) / np.float32(self.scene.px.timestep),
            finger.pose.q,
            side,
            min_force,
            max_angle,
        )
        for impulse, finger, side in zip(impulses, fingers, (1, -1), strict=True)
    )
    return torch.tensor([grasped])


def _pushes(force: np.ndarray, q: np.ndarray, side: int, min_force: float, max_angle: float) -> bool:
    """Whether a force [3] is strong enough and along +-y (side) of a body turned by q (wxyz)."""
    size = np.linalg.norm(force)
    if size < min_force:
        return False
    w, x, y, z = q
    two = np.float32(2) / (q * q).sum()
    axis = side * np.array([two * (x * y - z * w), 1 - two * (x * x + z * z), two * (y * z + x * w)])
    cosine = np.clip(force / size @ (axis / np.linalg.norm(axis)), -1, 1)
    return bool(np.rad2deg(np.arccos(cosine)) <= max_angle)


_TIMES = (
    (1, [1, 0, 3, 2], [-1, 1, -1, 1]),
    (2, [2, 3, 0, 1], [-1, 1, 1, -1]),
    (3, [3, 2, 1, 0], [-1, -1, 1, 1]),
)
_TIMES = tuple((i, np.array(order), np.array(signs, np.float32)) for i, order, signs in _TIMES)


def _quaternion_product(full: Callable) -> Callable:
    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.shape != (1, 4) or b.shape != (1, 4) or a.dtype != torch.float32 or b.dtype != torch.float32:
            return full(a, b)
        p, q = a[0].numpy(), b[0].numpy()
        out = p[0] * q
        for i, order, signs in _TIMES:  # the terms are added in the order of the original: the same bits
            out += p[i] * (q[order] * signs)
        return torch.from_numpy(out[None])

    return multiply


def _manual_seed(seed) -> torch.Generator:
    """Seed the CPU generator only: the original also queues GPU seeds, with a stack trace each, on every
    reset."""
    return torch.default_generator.manual_seed(int(seed))
