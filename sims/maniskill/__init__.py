"""ManiSkill 3 as a vector env: worker processes on the CPU, torch tensors on the device with the GPU backend.

A task is "[MODULE:]ID[,argument=value…]": arguments of `gymnasium.make`, such as robot_uids, and the module
that registers a task of a user's own. State needs no renderer. Images need Vulkan (see VULKAN_REMEDY).
Actions: any control mode of the robot, by ManiSkill's name; "joint_delta" is its pd_joint_delta_pos (of a
Panda 0.1 rad per joint and step, and the gripper) and the default where the robot has it, "ee_delta" its
pd_ee_delta_pose (0.1 m and 0.1 rad of the hand; inverse kinematics halves the step rate). Reward "sparse" is
1 on success; "dense" is ManiSkill's normalized_dense, and the default of tasks that know no success. Success
(or failure, where a task has one) terminates; `max_steps` truncates, by default the task's own limit
(LiftPegUpright 150, StackCube 100). With obs="rgb" the state holds what a robot knows of itself and the goal,
not where the objects are.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from robo_rl.device_names import check_device
from robo_rl.errors import MissingDependency, UserError, choose
from robo_rl.files import cores, parse_json
from sims.maniskill.build import VULKAN_REMEDY
from sims.maniskill.tasks import EXPERT_TASKS, NEEDS_RENDERER, TASKS, split_task

__all__ = ["EXPERT_TASKS", "TASKS", "VULKAN_REMEDY", "bare_rates", "make_maniskill", "vulkan_problem"]


def make_maniskill(
    task: str = "",
    *,
    num_envs: int = 1,
    obs: str = "state",
    reward: str = "",
    control: str = "",
    image_size: int = 64,
    threads: int = 0,
    max_steps: int = 0,
    randomise: str = "",
    render: bool = False,
    device: str = "cpu",
):
    """The vector env of a ManiSkill task (default PickCube-v1); arguments as in `sims.make`.

    threads: worker processes on the CPU, 0 = one per core and at most one per env. device "cuda" takes the
    GPU backend. Raises UserError or MissingDependency before anything is started where it can tell.
    """
    task = task or TASKS[0]
    split_task(task)
    if randomise:
        raise UserError(
            f"the maniskill sim has no randomise options, got {randomise!r}. Use the mujoco sim for those"
        )
    if threads < 0:
        raise UserError(f"threads must be >= 0 (0: all cores), got {threads}")
    if max_steps < 0:
        raise UserError(f"max_steps must be >= 0 (0: the task's own), got {max_steps}")
    check_device(device, "device")
    _require()
    config = _config(task, num_envs, obs, reward, control, image_size, max_steps, render)
    if device != "cpu":
        from sims.maniskill.gpu import ManiSkillGpuEnv

        return ManiSkillGpuEnv(config, device)
    from sims.maniskill.env import ManiSkillEnv

    return ManiSkillEnv(config, min(num_envs, threads or cores()))


def _require() -> None:
    if importlib.util.find_spec("mani_skill") is None:
        raise MissingDependency("the maniskill sim needs ManiSkill 3: pip install 'robo_rl[maniskill]'")


def _config(
    task: str,
    num_envs: int,
    obs: str,
    reward: str,
    control: str,
    image_size: int,
    max_steps: int,
    render: bool,
    raw: bool = False,
) -> dict:
    """What the workers are told (JSON)."""
    module, id, arguments = split_task(task)
    return {
        "task": task,
        "module": module,
        "id": id,
        "arguments": arguments,
        "num_envs": num_envs,
        "obs": obs,
        "reward": reward,
        "control": control,
        "image_size": image_size,
        "max_steps": max_steps,
        "render": render,
        "raw": raw,
        "render_needed": obs == "rgb" or render or id in NEEDS_RENDERER,
    }


def vulkan_problem() -> str:
    """Why ManiSkill cannot draw on this machine, "" if it can. Takes a second: it asks in a process of its
    own."""
    _require()
    code = "import sapien, sapien.render; sapien.render.RenderMaterial()"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    lines = done.stderr.strip().splitlines()
    return (
        "" if done.returncode == 0 else (lines[-1] if lines else f"the renderer crashed ({done.returncode})")
    )


@contextmanager
def bare_rates(
    task: str = "PickCube-v1", workers: int = 2, seconds: float = 5.0, control: str = ""
) -> Iterator[Callable[[], dict[str, float]]]:
    """A function that measures, for about `seconds` of each: control steps/s of `workers` processes, random
    actions.

    `env`: of ManiSkill's own env, its resets not counted; `physics`: of the PhysX steps of such a control
    step alone.
    """
    from sims.maniskill.env import START_DEADLINE, Workers
    from sims.maniskill.wire import RAW

    choose("maniskill task", task, TASKS)
    _require()
    group = Workers(
        _config(task, workers, "state", "", control, 64, 0, False, raw=True) | {"seconds": seconds}, workers
    )

    def measure() -> dict[str, float]:
        answers = [parse_json(x, "a worker's answer") for x in group.ask(RAW, START_DEADLINE + 4 * seconds)]
        return {k: sum(a[k] for a in answers) for k in answers[0]}

    try:
        group.gather(START_DEADLINE)
        yield measure
    finally:
        group.close()
