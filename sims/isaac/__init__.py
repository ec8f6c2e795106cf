"""Isaac Gym and Isaac Lab as contract envs: `sims.make("isaaclab", "Isaac-Cartpole-Direct-v0",
device="cuda")`.

No real Isaac has run behind these adapters. They were written against the sources of IsaacGymEnvs and Isaac
Lab 2.3, typed stubs of the parts used (`sims/isaac/typings`), and tested on the CPU with torch fakes that
follow the same order of events. The launch lines in `_make_gym` and `_make_lab` are untested.

Both need an NVIDIA GPU. Isaac Lab comes from NVIDIA's package index. Isaac Gym comes from NVIDIA's website,
its last release is for Python 3.8 at most, and it wants to be imported before torch: it can share an
interpreter with robo_rl only where someone has rebuilt it for a newer Python.
"""

import importlib.util
import sys
from typing import Any

from robo_rl.errors import MissingDependency, UserError, choose

KINDS = ("isaacgym", "isaaclab")


def make_isaac(
    kind: str,
    task: str,
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
    device: str = "cuda:0",
    env: "object | None" = None,
):
    """The vector env of an Isaac task; the options are those of `sims.make`, of which most do not apply.

    device: "cpu", the default of `sims.make`, means cuda:0 here, as Isaac is of no use without a GPU.
    env: a task (isaacgym) or env (isaaclab) made by the caller; then `num_envs` and `device` are its own.
    max_steps can only shorten Isaac's episodes.
    """
    choose("isaac simulator", kind, KINDS)
    name = f"{kind}:{task}"
    if obs != "state":
        raise UserError(f"{name} has obs 'state' only here, got {obs!r}")
    if reward not in ("", "dense") or control or randomise or render:
        raise UserError(
            f"{name} has its own reward, control and randomisation and no render(); leave them out"
        )
    if max_steps < 0:
        raise UserError(f"max_steps must be >= 0, got {max_steps}")
    if env is None:
        if not task:
            example = "Cartpole" if kind == "isaacgym" else "Isaac-Cartpole-Direct-v0"
            raise UserError(f"{kind} needs a task, for example {example}")
        env = (_make_gym if kind == "isaacgym" else _make_lab)(
            task, num_envs, "cuda:0" if device == "cpu" else device
        )
    from sims.isaac.env import IsaacEnv
    from sims.isaac.ports import GymPort, LabPort

    port: Any = GymPort if kind == "isaacgym" else LabPort
    return IsaacEnv(port(env), kind, task, max_steps)


def _make_gym(task: str, num_envs: int, device: str):
    for package in ("isaacgym", "isaacgymenvs"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"isaacgym:{task} needs {package}: it needs an NVIDIA GPU, is not on PyPI (download Isaac "
                "Gym from NVIDIA's website and IsaacGymEnvs from its repository, pip install -e each) and "
                "its last release is for Python 3.8 at most; use isaaclab or mujoco instead"
            )
    if "torch" in sys.modules and "isaacgym" not in sys.modules:
        raise UserError("isaacgym must be imported before torch: start your script with `import isaacgym`")
    import isaacgym  # noqa: F401
    import isaacgymenvs

    return isaacgymenvs.make(
        seed=0,
        task=task,
        num_envs=num_envs,
        sim_device=device,
        rl_device=device,
        graphics_device_id=-1,
        headless=True,
    )


def _make_lab(task: str, num_envs: int, device: str):
    for package in ("isaaclab", "isaacsim", "isaaclab_tasks"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"isaaclab:{task} needs {package}, an NVIDIA GPU and NVIDIA's package index (its "
                "installation page names it): pip install 'isaaclab[isaacsim,all]' --extra-index-url INDEX"
            )
    from isaaclab.app import AppLauncher  # must precede every other import of isaaclab

    app = AppLauncher(headless=True, device=device).app
    import gymnasium
    import isaaclab_tasks  # noqa: F401  registers the ids
    from isaaclab_tasks.utils import parse_env_cfg

    try:
        env: Any = gymnasium.make(task, cfg=parse_env_cfg(task, device=device, num_envs=num_envs)).unwrapped
    except gymnasium.error.Error as e:
        raise UserError(f"isaaclab:{task} cannot be made: {e}") from None
    env._robo_rl_app = app  # lives as long as the env
    return env
