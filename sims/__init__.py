"""Simulators, each a `gymnasium.vector.VectorEnv` under one contract (see `sims.check`).

Contract. `autoreset_mode = DISABLED`.
* Observation: dict(state=float32[N, S], `image/<view>`=uint8[N, h, w, 3] ..., task=str[N]).
  Action: float32[N, A] in [-1, 1]; `env.spec` (`robo_rl.types.ControlSpec`) says what each axis means.
* `reset(seed=int | list[N], options={"reset_mask": bool[N], "starts": int[N]})`; the same seed or start
  gives the same episode, whatever the env index or the number of envs.
* `step(actions)` -> obs, rewards float32[N], terminated bool[N], truncated bool[N], info with
  `success` bool[N]. An env that is over stays frozen (same obs, reward 0, flags kept) until it is reset.
* With obs "rgb" the state is proprioception alone; where the env has an attribute `images`, steps taken while
  it is False may leave the images old, and the next step taken while it is True renews them (for chunks of
  actions).
* With `env.task_names`, of several tasks, start s is of task s mod M, `env.task_ids` int64[N] says which one
  each env plays, and `env.observed` bool[M, S] which entries of the state each task has (the others are 0).
  Each task has its own limit of steps, of which `spec.max_steps` is the greatest.
* Optional: `get_state() -> dict of arrays [N, ...]`, `set_state(state, mask=None)` (fork, rewind),
  `expert_action() -> float32[N, A]` (scripted expert for the present states),
  `recovery_action() -> float32[N, A]` (how to leave a failed attempt), `subtask() -> int64[N]` (how many
  sub-tasks are done), `render() -> uint8[N, h, w, 3]`.
Wrong input raises `robo_rl.errors.UserError`.
"""

from robo_rl.errors import UserError, choose
from robo_rl.plugins import OWN, is_object, split_arguments

SIMS = ("mujoco", "mujoco_warp", "maniskill", "isaacgym", "isaaclab")
PREFIXES = ("gym:", "envpool:")


def check_names(
    name: str, task: str = "", *, obs: str = "state", reward: str = "", control: str = "", randomise: str = ""
) -> None:
    """Raise UserError for a name of `make` that no sim knows; loads neither torch nor a simulator.

    Ids of Gymnasium and envpool, and what else only a simulator itself can tell, are left to `make`.
    """
    choose("obs", obs, ("state", "rgb"))
    choose("reward", reward, ("", "sparse", "dense"))
    check_several(name, task)
    if name.startswith(PREFIXES):
        return
    if is_object(name):
        from sims.own import find_sim

        find_sim(name)
        return
    if name not in (*SIMS, *PREFIXES):
        from sims.elsewhere import check_elsewhere

        check_elsewhere("sim", name)
    choose("sim", name, (*SIMS, *PREFIXES, OWN))
    if name == "mujoco":
        from sims.mujoco import check_names as check_mujoco

        if task and "," not in task and not is_object(task) and task not in tasks(name):
            from sims.elsewhere import check_elsewhere

            check_elsewhere("task", task)
        check_mujoco(task, control, randomise)
    elif name == "mujoco_warp":
        from sims.mujoco.names import find_locomotion

        find_locomotion(task)
    elif name == "maniskill":
        from sims.maniskill.tasks import TASKS, split_task

        split_task(task or TASKS[0])


def check_several(name: str, task: str) -> None:
    """Raise UserError for several tasks of a simulator that plays one at a time, and for one beside an id,
    which is the task; what a user's own makes of commas is its own affair, and arguments may follow a task of
    ManiSkill."""
    tasks = split_arguments(task)[0] if name == "maniskill" else task
    if "," in tasks and name != "mujoco" and not is_object(name):
        raise UserError(
            f"--task {task}: only --sim mujoco plays several tasks in one run, --sim {name} takes one"
        )
    if task and name.startswith(PREFIXES):
        raise UserError(
            f"--task {task}: the id of --sim {name} is the task, leave --task out; arguments of the env "
            f"follow the id: {name.split(',')[0]},radius=0.3"
        )


def own_task(name: str, task: str) -> str:
    """`--task` of `name` for what was recorded of `task`: none beside an id, or of a function that takes
    none."""
    if name.startswith(PREFIXES):
        return ""
    if is_object(name):
        from sims.own import takes_task

        return task if takes_task(name) else ""
    return task


def preload(name: str, task: str = "") -> tuple[str, ...]:
    """Modules that envs of `name` need, that take long to import and that a fork may copy: no thread, no GL
    context."""
    from sims.mujoco import LOCOMOTION

    return (
        ("gymnasium.vector", "sims.mujoco.kernel")
        if name == "mujoco" and task not in LOCOMOTION
        else ("gymnasium.vector",)
    )


def make(
    name: str,
    task: str = "",
    num_envs: int = 1,
    *,
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
    """Build the vector env `name` (one of SIMS, `gym:<id>`, `envpool:<id>`, or `module:function` of the
    user's own; arguments of what makes the last three may follow: `gym:<id>,radius=0.3`; those of a task of
    ManiSkill follow the task).

    obs "state" or "rgb" (state and images); reward "sparse" or "dense"; control is the sim's action mode;
    threads 0 = all cores; max_steps 0 = the task's own limit; randomise is a comma list such as
    "mass,friction,camera,latency:2"; render=True readies `render()`; cameras: of mujoco,
    those that are looked through, with commas between. "" takes the sim's default.
    """
    if num_envs < 1:
        raise UserError(f"num_envs must be >= 1, got {num_envs}")
    choose("obs", obs, ("state", "rgb"))
    choose("reward", reward, ("", "sparse", "dense"))
    if not 16 <= image_size <= 1024:
        raise UserError(f"image_size must be in [16, 1024], got {image_size}")
    check_several(name, task)
    if cameras and name != "mujoco":
        raise UserError(f"cameras {cameras}: only --sim mujoco lets them be chosen, --sim {name} has its own")
    common = {
        "num_envs": num_envs,
        "obs": obs,
        "reward": reward,
        "control": control,
        "image_size": image_size,
        "threads": threads,
        "max_steps": max_steps,
        "randomise": randomise,
        "render": render,
        "device": device,
    }
    if name.startswith("gym:"):
        from sims.gym import make_gym

        return make_gym(name[4:], **common)
    if name.startswith("envpool:"):
        from sims.envpool import make_envpool

        return make_envpool(name[8:], **common)
    if is_object(name):
        from sims.own import make_own

        return make_own(name, task, **common)
    choose("sim", name, (*SIMS, *PREFIXES, OWN))
    if name == "mujoco":
        from sims.mujoco import make_mujoco

        return make_mujoco(task, cameras=cameras, **common)
    if name == "mujoco_warp":
        from sims.mjwarp import make_mujoco_warp

        return make_mujoco_warp(task, **common)
    if name == "maniskill":
        from sims.maniskill import make_maniskill

        return make_maniskill(task, **common)
    if name in ("isaacgym", "isaaclab"):
        from sims.isaac import make_isaac

        return make_isaac(name, task, **common)
    raise UserError(f"{name!r} needs an id after the colon, for example gym:Pendulum-v1")


def tasks(name: str) -> list[str]:
    """Task names of a sim with a fixed list, default task first; [] where any id goes."""
    if name == "mujoco":
        from sims.mujoco import TASKS

        return list(TASKS)
    if name == "mujoco_warp":
        from sims.mujoco.names import LOCOMOTION

        return list(reversed(LOCOMOTION))
    if name == "maniskill":
        from sims.maniskill import TASKS

        return list(TASKS)
    return []
