"""Tasks by their names: ours, and the user's own `module:object`, checked before an env of it is made."""

from dataclasses import replace

import mujoco
import numpy as np

from robo_rl.errors import UserError
from robo_rl.plugins import is_object, load_object
from robo_rl.starts import uniforms
from sims.mujoco import model as m
from sims.mujoco.env import scene_of, state_names_of
from sims.mujoco.kinematics import Arm
from sims.mujoco.tasks import TASKS, Start, Task

WHAT, N = "--task", 3  # envs that it is checked with


def find_task(name: str, option: str = WHAT) -> Task:
    """The task `name` of TASKS, or the user's own, which `option` names. UserError: it is no task, or what is
    wrong with it, in one sentence."""
    if not is_object(name):
        return TASKS[name]
    task = load_object(name, option)
    if not isinstance(task, Task):
        raise UserError(f"{option} {name} must be a sims.mujoco.tasks.Task, got {type(task).__name__}")
    try:
        check_task(task)
    except AssertionError as e:
        raise UserError(f"{option} {name}: {e}") from None
    return replace(task, name=name)


def check_task(task: Task) -> None:
    """AssertionError: what of the task does not fit its model or the form of its functions."""
    try:
        model = mujoco.MjModel.from_xml_string(m.scene_xml(task.xml, task.assets))
    except ValueError as e:
        raise AssertionError(f"its MJCF is refused: {' '.join(str(e).split())}") from None
    there = {model.joint(j).name: int(model.joint(j).type[0]) for j in range(model.njnt)}
    free, scalar = (
        int(mujoco.mjtJoint.mjJNT_FREE),
        {int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)},
    )
    for o in task.objects:
        assert there.get(o) == free, f'objects names {o!r}, but its xml has no <freejoint name="{o}"/>'
    for j in task.joints:
        assert there.get(j) in scalar, f"joints names {j!r}, but its xml has no hinge or slide of this name"
    assert not task.uses_goal or model.nmocap, (
        'uses_goal needs a body with mocap="true" in its xml, the first one is the goal'
    )
    assert not task.uses_slide or there.get("drawer") in scalar, (
        "uses_slide needs a joint named drawer, the last one of its xml"
    )
    assert task.max_steps >= 1 and task.instructions, "it needs max_steps of at least 1 and one instruction"
    assert not isinstance(task.instructions, str), (
        f"instructions must be a tuple of sentences, got the text {task.instructions!r}: add a comma"
    )
    assert (task.observe is None) == (not task.observed), (
        "observe gives the rows that observed names: one is missing"
    )
    names = state_names_of(task)
    assert len(set(names)) == len(names), (
        f"entries of the state need different names, {max(names, key=names.count)!r} is there twice"
    )
    place = task.place(uniforms(np.arange(N), 24))
    assert isinstance(place, Start), (
        f"place must return a Start (start_of makes one), got {type(place).__name__}"
    )
    k = len(task.objects)
    for name, want in (("centre", (N, k, 3)), ("yaw", (N, k)), ("goal", (N, 3)), ("asked", (N,))):
        got = np.shape(getattr(place, name))
        assert want == got, f"place of {N} starts must give {name} of shape {want}, got {got}"
        again = getattr(task.place(uniforms(np.arange(N), 24)), name)
        assert np.array_equal(getattr(place, name), again), (
            f"place must follow from its uniforms alone: the same ones gave another {name}"
        )
    assert np.min(place.asked) >= 0 and np.max(place.asked) < len(task.instructions), (
        "asked must be an index of instructions"
    )
    q = np.repeat(model.qpos0.astype(np.float32)[:, None], N, 1)
    scene = scene_of(task, model, q, np.zeros((model.nv, N), np.float32), Arm(N))
    for name in ("success", "progress", "failure", "stage"):
        call = getattr(task, name)
        if call is not None:
            got = np.asarray(call(scene))
            assert got.shape == (N,), f"{name} of {N} envs must have shape ({N},), got {got.shape}"
            assert name not in ("success", "failure") or got.dtype == bool, (
                f"{name} must be bool, got {got.dtype}"
            )
            assert np.isfinite(got).all(), f"{name} must be finite, got {got.tolist()}"
    if task.observe is not None:
        got = np.shape(task.observe(scene))
        assert got == (len(task.observed), N), (
            f"observe of {N} envs must have shape {(len(task.observed), N)}, got {got}"
        )
