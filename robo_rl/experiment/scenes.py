"""The scene that the simulated arm stands in: that of a task of sims/mujoco, or of the user's own."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from controllers.robot import Robot
from robo_rl.errors import UserError, choose

if TYPE_CHECKING:
    from sims.mujoco.tasks import Task


OTHERWISE = "use --robot sim (sim-arm takes --scene none too)"


def untold(task: "Task") -> str:
    """What of a task's state the topics of an arm do not tell; "" for one that its scene can hold."""
    from sims.mujoco.model import GOAL

    if task.uses_slide or task.joints or task.observed:
        return ", ".join((*(("drawer",) if task.uses_slide else ()), *task.joints, *task.observed))
    named = re.search(rf"""<body\b[^>]*\bname=["']{GOAL}["']""", task.xml)
    return "" if not task.uses_goal or named else f"one of another name than {GOAL}"


def scene_task(name: str, option: str = "--scene") -> "Task":
    """The task, given with `option`, whose scene the simulated arm stands in. UserError: there is none, or
    its topics do not tell the task's state."""
    from robo_rl.plugins import is_object
    from sims.mujoco.own import find_task
    from sims.mujoco.tasks import TASKS

    held = [n for n, task in TASKS.items() if not untold(task)]
    if not is_object(name) and name not in TASKS:
        none = ["none"] if option == "--scene" else []
        choose(option.removeprefix("--"), name, [*held, *none, "module:object"])
    task = find_task(name, option)
    if what := untold(task):
        raise UserError(
            f"the topics of an arm tell its joints, free objects and a mark, not {what}, which the state of "
            f"{name} has. Allowed: {', '.join(held)}, and tasks of your own like them"
        )
    return task


def scene_xml(robot: Robot, name: str) -> str:
    """MJCF text of the robot's own model with the scene's objects; "" for its model alone."""
    if name == "none":
        return ""
    task = scene_task(name)
    text = Path(robot.model).read_text(encoding="utf-8") if robot.model and Path(robot.model).exists() else ""
    if "<mujoco" not in text:
        raise UserError(f"robot {robot.name} ships no MJCF to put a scene around: {OTHERWISE}")
    if 'class="solid"' not in text or 'class="drawn"' not in text:
        raise UserError(
            f"the scene {name} goes around a model like that of --robot sim, with its table and the classes "
            f"solid and drawn, and that of robot {robot.name} has none: {OTHERWISE}"
        )
    more = f"<asset>{task.assets}</asset>" if task.assets else ""
    return text.replace("</worldbody>", f"{task.xml}</worldbody>{more}")


def start_placement(robot: Robot, name: str, start: int) -> tuple[np.ndarray, dict]:
    """(joint angles, bodies' poses) of a start of a scene; the robot's home alone where there is none."""
    if name == "none" or robot.name != "sim":
        return np.array(robot.home), {}
    from robo_rl.starts import uniforms
    from sims.arm import poses_of
    from sims.mujoco.env import HOME

    task, u = scene_task(name), uniforms(np.array([start]), 31)
    return HOME + task.jitter * (2 * u[0, :7] - 1), poses_of(task, task.place(u[:, 7:]), 0)
