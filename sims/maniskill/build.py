"""Building one ManiSkill env and saying what it is: used by the CPU workers and by the GPU env."""

from typing import Any

import numpy as np

from robo_rl.errors import UserError
from sims.maniskill.tasks import EXPERT_TASKS, MAX_STEPS

CONTROLS = {"joint_delta": "pd_joint_delta_pos", "ee_delta": "pd_ee_delta_pose"}
FRAME = 256  # pixels, side of a `render()` frame
VULKAN_REMEDY = (
    "Install Mesa >= 25: on Debian 12 `apt-get install -y libvulkan1` and, with bookworm-backports enabled, "
    "`apt-get install -y -t bookworm-backports mesa-vulkan-drivers`, then `export "
    "VK_ICD_FILENAMES=/usr/share/vulkan/icd.d/lvp_icd.json`; or use obs='state', which needs no Vulkan"
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


def build(config: dict, device: str = "cpu") -> Any:
    """An unwrapped ManiSkill env: one simulator on the CPU, or config["num_envs"] on a CUDA device."""
    import gymnasium

    task, control = config["task"], config["control"]
    kwargs = {
        "obs_mode": config["obs"],
        "sim_backend": "physx_cpu",
        "render_backend": "none",
        "control_mode": CONTROLS[control],
    }
    if device != "cpu":
        kwargs |= {"sim_backend": device.replace("cuda", "physx_cuda"), "num_envs": config["num_envs"]}
    if config["render_needed"]:
        kwargs["render_backend"] = render_backend(device)
        size = {"width": config["image_size"], "height": config["image_size"], "shader_pack": "minimal"}
        kwargs |= {"sensor_configs": size, "human_render_camera_configs": {"width": FRAME, "height": FRAME}}
        if config["render"]:
            kwargs["render_mode"] = "rgb_array"
    try:
        cls = _task_class(task)
        kwargs["reward_mode"] = _reward_mode(task, config["reward"], cls.SUPPORTED_REWARD_MODES)
        return gymnasium.make(task, disable_env_checker=True, **kwargs).unwrapped
    except AssertionError as e:
        if "supported modes" not in str(e):
            raise
        raise UserError(f"task {task!r} has no {control!r} control. Allowed: joint_delta") from None
    except (Exception, SystemExit) as e:
        if not config["needs_download"]:
            raise
        raise UserError(f"{config['needs_download']} (ManiSkill said: {e})") from e


def _task_class(task: str):
    from mani_skill.utils.registration import REGISTERED_ENVS

    if task not in REGISTERED_ENVS:
        import mani_skill

        raise UserError(f"the installed ManiSkill {mani_skill.__version__} has no task {task!r}")
    return REGISTERED_ENVS[task].cls


def _reward_mode(task: str, reward: str, supported) -> str:
    """sparse: 1 on success, which we take from `info`; dense: ManiSkill's dense reward scaled to at most
    1."""
    if reward == "dense":
        if "normalized_dense" not in supported:
            raise UserError(f"task {task!r} has no dense reward. Allowed: sparse")
        return "normalized_dense"
    return "sparse" if "sparse" in supported else "none"


def render_backend(device: str = "cpu") -> str:
    """ManiSkill's name of the renderer to use; UserError where there is none."""
    import sapien
    import sapien.render

    try:
        sapien.render.RenderMaterial()
    except RuntimeError as e:
        raise UserError(f"no usable Vulkan to draw with ({e}). {VULKAN_REMEDY}") from None
    if device != "cpu":
        return device.replace("cuda", "sapien_cuda")
    try:
        return "gpu" if sapien.Device("cuda").can_render() else "cpu"
    except RuntimeError:
        return "cpu"


def describe(env, config: dict) -> dict:
    """What the vector env has to know of the task (JSON)."""
    from mani_skill.utils.registration import REGISTERED_ENVS

    task = config["task"]
    own = MAX_STEPS.get(task) or REGISTERED_ENVS[task].max_episode_steps or 200
    obs = env.get_obs(unflattened=True)
    views = sorted(obs["sensor_data"]) if config["obs"] == "rgb" else []
    frame = []
    if config["render"]:
        frame = list(env.render_rgb_array().shape[1:3])
    return {
        "axes": axes(env),
        "period": 1.0 / env.control_freq,
        "max_steps": config["max_steps"] or own,
        "state_names": state_names(
            obs if config["obs"] == "state" else {k: obs[k] for k in ("agent", "extra")}
        ),
        "views": views,
        "image_size": config["image_size"],
        "frame": frame,
        "expert": task in EXPERT_TASKS,
    }


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
    kind = "delta" if getattr(c.config, "use_delta", False) else "absolute"
    if len(joints) != len(low):  # a controller of another shape, such as a mobile base
        return [
            [f"{c.joints[0].name}/{k}", "1", lo, hi, "rate", "base"]
            for k, (lo, hi) in enumerate(zip(low, high, strict=True))
        ]
    units = ["m" if "prismatic" in str(j._objs[0].type) else "rad" for j in joints]
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
