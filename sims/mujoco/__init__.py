"""The embedded default simulator: a Panda-like arm on MuJoCo's batch, and Gymnasium's locomotion tasks."""

from robo_rl.errors import UserError, choose, in_range
from robo_rl.files import require_memory
from robo_rl.plugins import OWN, is_object
from sims.mujoco.names import (
    CONTROLS,
    LOCOMOTION,
    RANDOMISE,
    TASKS,
    VIEWS,
    check_names,
    parse_randomise,
    split_tasks,
)

__all__ = [
    "CONTROLS",
    "LOCOMOTION",
    "RANDOMISE",
    "TASKS",
    "check_names",
    "make_mujoco",
    "parse_randomise",
    "rates",
]

ENV, PICTURES = 5000, 4  # bytes of an env, measured with 50,000; pictures of one: two views, drawn and given


def make_mujoco(
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
    cameras: str = "",
):
    """Build N envs of `task` ("": pick_cube; "pick_cube,push_cube": of several); the arguments are those of
    `sims.make`.

    reward "": sparse; control "" or "ee_delta": hand pose increments and gripper, "joint_delta": joint
    increments and gripper; randomise: comma list of mass, friction (+-30 % each), camera, latency:<control
    steps>; cameras: the views of obs "rgb", with commas between ("": all).
    """
    several = split_tasks(task) if "," in task else []
    task = task if is_object(task) or several else choose("mujoco task", task or TASKS[0], (*TASKS, OWN))
    if device != "cpu":
        raise UserError(f"the mujoco simulator runs on device 'cpu', got {device!r}")
    if max_steps < 0:
        raise UserError(f"max_steps must be >= 0 (0: the task's own limit), got {max_steps}")
    in_range("threads", threads, 0, 1024)
    require_memory(
        f"{num_envs} envs",
        num_envs * max(1, len(several)) * (ENV + (PICTURES * image_size**2 * 3 if obs == "rgb" else 0)),
        "use fewer envs or smaller images",
    )
    chosen = choose_cameras(cameras, obs, task)
    if task in LOCOMOTION:
        from sims.mujoco.locomotion import make_locomotion

        return make_locomotion(
            task,
            num_envs=num_envs,
            obs=obs,
            reward=reward,
            control=control,
            image_size=image_size,
            threads=threads,
            max_steps=max_steps,
            randomise=randomise,
            render=render,
            device=device,
        )
    from sims.mujoco.env import MujocoArmEnv
    from sims.mujoco.own import find_task

    control = choose("control", control or CONTROLS[0], CONTROLS)
    kinds, latency = parse_randomise(randomise)
    dense = choose("reward", reward or "sparse", ("sparse", "dense")) == "dense"

    def make(name: str) -> MujocoArmEnv:
        return MujocoArmEnv(
            find_task(name),
            num_envs,
            obs == "rgb",
            dense,
            control,
            image_size,
            threads,
            max_steps,
            kinds,
            latency,
            render,
            chosen,
        )

    if not several:
        return make(task)
    from sims.mujoco.several import SeveralTasksEnv

    return SeveralTasksEnv(several, make)


def choose_cameras(names: str, obs: str, task: str) -> tuple[str, ...]:
    """The views of an env that is asked for these, with commas between; UserError: there is no such view,
    or the env has none."""
    if names and (obs != "rgb" or task in LOCOMOTION):
        raise UserError(f"cameras {names}: an env has them with obs rgb alone, and not the locomotion tasks")
    chosen = tuple(choose("camera", name, VIEWS) for name in names.split(",")) if names else VIEWS
    if len(set(chosen)) < len(chosen):
        raise UserError(f"cameras {names}: each is named once")
    return chosen


def rates(task: str = "", num_envs: int = 256, threads: int = 0, seconds: float = 1.0) -> dict[str, float]:
    """Control steps/s of `task`, random actions: `env`, and `raw`, the bare physics batch on the same
    states."""
    task = choose("mujoco task", task or TASKS[0], TASKS)
    if task in LOCOMOTION:
        from sims.mujoco.locomotion import rates as measure
    else:
        from sims.mujoco.env import rates as measure
    return measure(task, num_envs, threads, seconds)
