"""Building one ManiSkill env and saying what it is: used by the CPU workers and by the GPU env.

The task "[MODULE:]ID[,argument=value…]" was split before (`tasks.split_task`); the module is the user's own,
which registers the id, the arguments are those of `gymnasium.make`.
"""

import importlib
import re
from typing import Any

import numpy as np

from robo_rl.errors import UserError, choose
from robo_rl.plugins import load_module
from sims.maniskill.tasks import EXPERT_TASKS, MAX_STEPS, NEEDS_DOWNLOAD, NEEDS_RENDERER, TASKS

CONTROLS = {"joint_delta": "pd_joint_delta_pos", "ee_delta": "pd_ee_delta_pose"}
DENSE = ("normalized_dense", "dense")
EXPERT_CONTROLS = (*CONTROLS.values(), "pd_joint_pos")
FRAME = 256  # pixels, side of a `render()` frame
NEEDED = (
    "--task {task}: it needs files that are not installed. Download them once with `python -m "
    f"mani_skill.utils.download_asset {{id}}`, or take a task that needs none: {', '.join(TASKS[:8])} ..."
)
VULKAN_REMEDY = (
    "Install Mesa >= 25: on Debian 12 `apt-get install -y libvulkan1` and, with bookworm-backports enabled, "
    "`apt-get install -y -t bookworm-backports mesa-vulkan-drivers`, then `export "
    "VK_ICD_FILENAMES=/usr/share/vulkan/icd.d/lvp_icd.json`; "
)


def without_renderer() -> None:
    """ManiSkill builds a render material for every coloured shape, which starts Vulkan even where nothing is
    drawn. A stand-in that takes any attribute lets state-only envs run on machines without Vulkan."""
    import sapien
    import sapien.render
    from sapien.wrapper import actor_builder, urdf_loader

    class NullMaterial:
        def __init__(self, *args, **kwargs):
            self.__dict__.update(kwargs)

        def __getattr__(self, name):
            if name.startswith("set_"):
                return lambda *args, **kwargs: None
            raise AttributeError(name)

    for module in (sapien.render, sapien.pysapien.render, actor_builder.sapien.render):
        setattr(module, "RenderMaterial", NullMaterial)  # noqa: B010  a module has no such name for type checkers
    urdf_loader.RenderMaterial = NullMaterial


def prepare(config: dict, device: str = "cpu") -> None:
    """Import ManiSkill, and the module that registers the task where it is a user's own; nothing asks for
    downloads from here on. Where nothing is drawn the renderer is a stand-in, beside a GPU only where Vulkan
    does not work."""
    if not config["render_needed"] and (device == "cpu" or not has_renderer()):
        without_renderer()
    importlib.import_module("mani_skill.envs")
    from mani_skill.utils import download_asset
    from mani_skill.utils.logging_utils import logger

    logger.setLevel("ERROR")

    def refuse(message: str) -> bool:
        robot = re.search(r"Robot (\w+) has", message)
        raise UserError(NEEDED.format(task=config["task"], id=robot[1] if robot else config["id"]))

    download_asset.prompt_yes_no = refuse
    if config["module"]:
        load_module(config["module"], config["task"], "--task")


def has_renderer() -> bool:
    """Whether Vulkan works here."""
    try:
        render_backend()
    except UserError:
        return False
    return True


def build(config: dict, device: str = "cpu") -> Any:
    """An unwrapped ManiSkill env: one simulator on the CPU, or config["num_envs"] on a CUDA device."""
    id, control, own = config["id"], config["control"], _spec(config)
    kwargs = config["arguments"] | {
        "obs_mode": config["obs"],
        "sim_backend": "physx_cpu",
        "render_backend": "none",
        "control_mode": CONTROLS.get(control, control) or CONTROLS["joint_delta"],
    }
    if device != "cpu":
        kwargs |= {"sim_backend": device.replace("cuda", "physx_cuda"), "num_envs": config["num_envs"]}
    if config["render_needed"]:
        kwargs["render_backend"] = render_backend(device, id)
        size = {"width": config["image_size"], "height": config["image_size"], "shader_pack": "minimal"}
        frame = {"width": FRAME, "height": FRAME}
        for name, ours in (("sensor_configs", size), ("human_render_camera_configs", frame)):
            kwargs[name] = ours | (kwargs.get(name) or {})
        if config["render"]:
            kwargs["render_mode"] = "rgb_array"
    modes = own.cls.SUPPORTED_REWARD_MODES
    kwargs["reward_mode"] = next((m for m in (*DENSE, "sparse") if m in modes), "none")
    try:
        env = _make(id, kwargs, control)
    except UserError:
        raise
    except (Exception, SystemExit) as e:
        if id in NEEDS_DOWNLOAD and not config["module"]:
            raise UserError(f"{NEEDED.format(task=config['task'], id=id)} (ManiSkill said: {e})") from e
        if not (config["arguments"] or config["module"]):
            raise
        why = str(e).split(" was raised from the environment creator")[0]
        raise UserError(f"--task {config['task']} cannot be made: {type(e).__name__}: {why}") from e
    env._reward_mode = _reward_mode(env, config)
    return env


def _make(id: str, kwargs: dict, control: str) -> Any:
    """UserError: the robot has no such control; its own default where none was asked for and it has not
    ours."""
    import gymnasium

    try:
        return gymnasium.make(id, disable_env_checker=True, **kwargs).unwrapped
    except AssertionError as e:
        if "not in supported modes" not in str(e):
            raise
        if not control:
            return _make(id, kwargs | {"control_mode": None}, "its own")
        has = re.findall(r"'(\w+)'", str(e).split("modes:")[1])
        has = [*(ours for ours, theirs in CONTROLS.items() if theirs in has), *has]
        choose(f"control of {id}", control, has)
        raise


def _spec(config: dict):
    """What ManiSkill has registered as the task."""
    from mani_skill.utils.registration import REGISTERED_ENVS

    module, id = config["module"], config["id"]
    if id in REGISTERED_ENVS:
        return REGISTERED_ENVS[id]
    if not module:
        import mani_skill

        raise UserError(f"the installed ManiSkill {mani_skill.__version__} has no task {id!r}")
    own = [name for name, spec in REGISTERED_ENVS.items() if spec.cls.__module__.startswith(module)]
    raise UserError(
        f"--task {config['task']}: {module} registers no {id!r} with mani_skill's register_env. It registers "
        f"{', '.join(own) or 'none'}"
    )


def _reward_mode(env, config: dict) -> str:
    """sparse: 1 on success, taken from `info`; dense: ManiSkill's dense reward scaled to at most 1, or
    as it is where a user's own task does not scale it. By default dense of a task that knows no success."""
    task, asked, modes, info = config["task"], config["reward"], env.SUPPORTED_REWARD_MODES, env.get_info()
    if asked == "sparse" and "success" not in info:
        raise UserError(
            f"task {task!r} says nothing of success (its evaluate() returns none), so it has no sparse "
            "reward: leave --reward out"
        )
    if asked == "dense" or (not asked and "success" not in info):
        for mode in DENSE:
            if mode in modes and (not config["module"] or _pays(env, mode, info)):
                return mode
        if asked:
            raise UserError(f"task {task!r} has no dense reward. Allowed: sparse")
    return "sparse" if "sparse" in modes else "none"


def _pays(env, mode: str, info: dict) -> bool:
    """Whether the class of a task has the reward `mode`, which ManiSkill's own base class says of any."""
    from mani_skill.utils import common

    env._reward_mode = mode
    obs = env.get_obs(info, unflattened=True)
    action = common.to_tensor(common.batch(env.single_action_space.sample()), device=env.device)
    try:
        env.get_reward(obs=obs, action=action, info=info)
    except NotImplementedError:
        return False
    return True


def render_backend(device: str = "cpu", task: str = "") -> str:
    """ManiSkill's name of the renderer that a task uses; UserError where there is none."""
    import sapien
    import sapien.render

    try:
        sapien.render.RenderMaterial()
    except RuntimeError as e:
        other = f"{task} draws even for a state" if task in NEEDS_RENDERER else "obs='state' needs no Vulkan"
        raise UserError(f"no usable Vulkan to draw with ({e}). {VULKAN_REMEDY}{other}") from None
    if device != "cpu":
        return device.replace("cuda", "sapien_cuda")
    try:
        return "gpu" if sapien.Device("cuda").can_render() else "cpu"
    except RuntimeError:
        return "cpu"


def describe(env, config: dict) -> dict:
    """What the vector env has to know of the task (JSON)."""
    from mani_skill.utils.registration import REGISTERED_ENVS

    task = config["id"]
    own = MAX_STEPS.get(task) or REGISTERED_ENVS[task].max_episode_steps or 200
    action_map(env)  # finite limits, or UserError
    obs = env.get_obs(unflattened=True)
    views = _views(obs, config) if config["obs"] == "rgb" else []
    frame = []
    if config["render"]:
        frame = list(env.render_rgb_array().shape[1:3])
    return {
        "axes": axes(env),
        "period": 1.0 / env.control_freq,
        "max_steps": config["max_steps"] or own,
        "limit": own,
        "state_names": state_names(
            obs if config["obs"] == "state" else {k: obs[k] for k in ("agent", "extra")}
        ),
        "views": views,
        "image_size": config["image_size"],
        "frame": frame,
        "expert": task in EXPERT_TASKS and _driven_by_expert(env),
        "reports_success": "success" in env.get_info(),
    }


def _views(obs: dict, config: dict) -> list[str]:
    """Cameras among the sensors; UserError for pictures of another size than --image-size, or none."""
    shapes = {k: tuple(x["rgb"].shape[1:3]) for k, x in obs["sensor_data"].items() if "rgb" in x}
    size = config["image_size"]
    for view, shape in shapes.items():
        if shape != (size, size):
            raise UserError(
                f"--task {config['task']}: camera {view!r} gives pictures of {shape[0]} x {shape[1]}; leave "
                f"width and height out of sensor_configs, --image-size makes them {size} x {size}"
            )
    if not shapes:
        raise UserError(f"--task {config['task']} has no camera, so obs 'state' only")
    return sorted(shapes)


def _driven_by_expert(env) -> bool:
    """Whether the scripted experts know the robot and its control: a Panda with its gripper."""
    from mani_skill.agents.robots.panda.panda import Panda

    return isinstance(env.agent, Panda) and env.control_mode in EXPERT_CONTROLS


def axes(env) -> list[list]:
    """[name, unit, low, high, kind, frame] of every action dimension, in the order of the action."""
    agents = {"": env.agent}
    if hasattr(env.agent, "agents_dict"):
        agents = {f"{uid}/": agent for uid, agent in env.agent.agents_dict.items()}
    out = []
    for prefix, agent in agents.items():
        parts = getattr(agent.controller, "controllers", None) or {"": agent.controller}
        for part in parts.values():
            out += [[prefix + row[0], *row[1:]] for row in _controller_axes(part)]
    return out


def _controller_axes(c) -> list[list]:
    space = getattr(c, "_original_single_action_space", c.single_action_space)
    low, high = space.low.tolist(), space.high.tolist()
    if hasattr(c, "ee_link"):
        kind, frame = ("delta", "base") if c.config.use_delta else ("absolute", "base")
        names = [("x", "m"), ("y", "m"), ("z", "m"), ("rx", "rad"), ("ry", "rad"), ("rz", "rad")]
        return [[n, u, lo, hi, kind, frame] for (n, u), lo, hi in zip(names, low, high, strict=False)]
    ids = getattr(c, "control_joint_indices", None)
    joints = c.joints if ids is None else [c.joints[int(i)] for i in ids]
    rate = "" if c.sets_target_qpos else "/s"
    kind = "rate" if rate else "delta" if getattr(c.config, "use_delta", False) else "absolute"
    if len(joints) != len(low):  # a controller of another shape, such as a mobile base
        return [
            [f"{c.joints[0].name}/{k}", "1", lo, hi, "rate", "base"]
            for k, (lo, hi) in enumerate(zip(low, high, strict=True))
        ]
    units = [("m" if "prismatic" in str(j._objs[0].type) else "rad") + rate for j in joints]
    return [[j.name, u, lo, hi, kind, "joint"] for j, u, lo, hi in zip(joints, units, low, high, strict=True)]


def action_map(env) -> tuple[np.ndarray, np.ndarray]:
    """(middle [A], half [A]): what ManiSkill's action space takes is middle + half * ours, ours in [-1, 1].

    ManiSkill multiplies hand rotations by their *lower* limit (-0.1 rad), so that its +1 turns by -0.1 rad:
    half is -1 there, and ours turns by +0.1 rad, as the spec says. Spaces that it does not normalise are
    scaled.
    """
    middle, half = [], []
    for agent in getattr(env.agent, "agents_dict", {"": env.agent}).values():
        for part in (getattr(agent.controller, "controllers", None) or {"": agent.controller}).values():
            space = part.single_action_space
            low, high = space.low.astype(float), space.high.astype(float)
            turns = (
                len(low) == 6
                and hasattr(part, "ee_link")
                and part._normalize_action
                and part.config.rot_lower < 0
            )
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                raise UserError(
                    f"control {env.control_mode} has no finite limits ({space}); take another --control"
                )
            middle += (0.5 * (low + high)).tolist()
            half += (0.5 * (high - low) * ([1] * 3 + [-1] * 3 if turns else 1)).tolist()
    return np.array(middle, np.float32), np.array(half, np.float32)


def action_split(env) -> "list[tuple[str, int]] | None":
    """(agent, number of its action dimensions) of a task with several robots, whose action is a dict; else
    None."""
    agents = getattr(env.agent, "agents_dict", None)
    return None if agents is None else [(u, a.single_action_space.shape[0]) for u, a in agents.items()]


def split_action(action, split: "list[tuple[str, int]] | None"):
    """A torch action [N, A] as the task takes it."""
    if split is None:
        return action
    return dict(zip([u for u, _ in split], action.split([n for _, n in split], 1), strict=True))


def state_names(obs: dict, prefix: str = "") -> list[str]:
    """One name per dimension of ManiSkill's flattened observation dict, in its order."""
    out = []
    for key, value in obs.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            out += state_names(value, f"{name}.")
        else:
            size = int(np.prod(value.shape[1:])) if value.ndim > 1 else 1
            out += [name] if size == 1 else [f"{name}[{i}]" for i in range(size)]
    return [n.removeprefix("agent.").removeprefix("extra.") for n in out] if not prefix else out
