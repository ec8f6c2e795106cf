"""Every env by its name on the command line: the simulators, and learned ones as `wm:PATH`."""

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from robo_rl.errors import UserError, no_expert
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.parallel import workers
from robo_rl.experiment.robot_names import ROBOTS, twin
from robo_rl.types import task_names

if TYPE_CHECKING:
    from robo_rl.contract import ControlEnv

ON_DEVICE = ("mujoco_warp", "maniskill", "isaacgym", "isaaclab")  # they compute where the policy does
OPTIONS = (  # of `make`
    *("obs", "reward", "control", "image_size", "threads", "max_steps", "randomise", "cameras", "render"),
    *("device", "judge", "hard"),
)
NONE = "none"  # no simulator: a data set alone


def check_names(name: str, task: str = "", **options) -> None:
    """Raise UserError for a simulator, task, observation, reward, control or randomisation that does not
    exist; before torch is loaded, which takes seconds."""
    import sims

    if name == NONE:
        return
    sims.check_several(name, task)  # an arm and a world model, too, play one
    if not name.startswith("wm:"):
        sims.check_names(twin(name), task, **options)


def check_env_options(options) -> None:
    """`check_names` of the env that a run (TrainConfig) or a recording (CollectOptions) asks for."""
    names = {k: getattr(options, k) for k in ("obs", "reward", "control", "randomise")}
    check_names(options.sim, options.task, **names)


def check_shown(name: str, task: str) -> None:
    """Raise UserError for a task of ManiSkill without a scripted expert; before its processes are started,
    which takes a quarter of a minute."""
    if name != "maniskill":
        return
    from sims.maniskill.tasks import EXPERT_REMEDY, EXPERT_TASKS, NEEDS_DOWNLOAD, split_task

    if task and split_task(task)[1] not in (*EXPERT_TASKS, *NEEDS_DOWNLOAD):  # to download comes first
        raise no_expert(f"{name}:{task}", EXPERT_REMEDY)


def make(name: str, task: str = "", num_envs: int = 1, *, judge: str = "", **options) -> "ControlEnv":
    """`sims.make`, or the world model in the folder after `wm:`; `judge` (of a world model alone) says who
    decides on success, see `world_models.judge.make`."""
    if options.get("cameras") and (name.startswith("wm:") or name.split(":")[0] in ROBOTS):
        raise UserError(f"--cameras is for --sim mujoco, got --sim {name}")
    if name.startswith("wm:"):
        from world_models.env import make_world

        return make_world(name[3:], task, num_envs, judge=judge, **options)
    if name == NONE:
        raise UserError(
            "--sim none is no env. Of a run that learnt from a data set alone robo_rl report shows the "
            "errors on held-out episodes, robo_rl eval RUN --demos FOLDER those on other ones, and robo_rl "
            "deploy and serve take it. An env of the same robot, cameras and units is given by --sim: "
            "a simulator, or wm:RUN, a world model of the data set (robo_rl wm train DATASET)"
        )
    if judge:
        raise UserError(f"--judge is for a world model (--sim wm:PATH), got --sim {name}")
    if name.split(":")[0] in ROBOTS:
        from robo_rl.experiment.arm import make_robot

        return make_robot(name, task, num_envs, **options)
    import sims

    return sims.make(name, task, num_envs, **options)


def with_whole_path(sim: str) -> str:
    """`sim` with the program of another Python (gym:ID,python=PATH) named from the root on, so that a run can
    be resumed from any folder; links stay, by which an environment is known."""
    return re.sub(r"(?<=,python=)(?![/~])[^,]*/[^,]*", lambda path: os.path.abspath(path[0]), sim)


def make_env(config: TrainConfig, num_envs: int, render: bool = False) -> "ControlEnv":
    """The env of these options."""
    return make(
        config.sim,
        config.task,
        num_envs,
        obs=config.obs,
        reward=config.reward,
        control=config.control,
        image_size=config.image_size,
        threads=config.threads,
        max_steps=config.max_steps,
        randomise=config.randomise,
        render=render,
        judge=config.judge,
        **({"cameras": config.cameras} if config.cameras else {}),
        **({"device": config.device} if config.sim in ON_DEVICE or config.sim.startswith("wm:") else {}),
        **({"hard": config.dream_hard} if config.sim.startswith("wm:") and config.dream_hard else {}),
    )


def task_count(config: TrainConfig) -> int:
    """How many tasks a run is over."""
    return config.task.count(",") + 1 if config.sim == "mujoco" else 1


def obs_spec(env, language: bool, text: int = 0):
    """What a policy for this env sees and commands; where it plays several tasks the instruction too. `text`:
    bytes of the instruction where it is read as text (`ObsSpec`)."""
    from robo_rl.policies import ObsSpec

    views = tuple(env.spec.views)
    size = env.single_observation_space[f"image/{views[0]}"].shape[0] if views else 0
    return ObsSpec(
        state=env.single_observation_space["state"].shape[0],
        action=env.single_action_space.shape[0],
        views=views,
        image_size=size,
        language=language or bool(views or text) or len(task_names(env)) > 1,
        text=text,
        action_names=env.spec.action_names,
    )


def probe_env(config: TrainConfig):
    """The env this process collects in, or, beside workers, a small one that says what they will see."""
    import sims

    few = workers(config) > 0 and config.algo != "bc"
    if few:
        from robo_rl.runtime.process_pool import warm

        warm(sims.preload(twin(config.sim), config.task))
        if twin(config.sim) != config.sim:
            make_env(config, config.envs).close()  # whether there is one
        config = replace(config, sim=twin(config.sim))  # a robot has one commander
    return make_env(config, min(config.envs, 16) if few else config.envs)
