"""A worker process of the CPU backend: single-env simulators behind one-byte commands (see `wire`).

Started as a plain child process (no `__main__` of the caller is imported again). The first worker imports ManiSkill,
then forks the others, so that its 430 MB are shared and the import is paid once; nothing has started threads by then.
A worker ends when its socket does, that is, with the process that made the env.
"""

import builtins
import gc
import importlib
import json
import os
import select
import socket
import sys
import time
import traceback

import numpy as np

from sims.maniskill import wire
from sims.maniskill.tasks import MAX_STEPS

CONTROLS = {"joint_delta": "pd_joint_delta_pos", "ee_delta": "pd_ee_delta_pose"}
FRAME = 256  # pixels, side of a `render()` frame


class BadRequest(Exception):
    """The user asked for something this task cannot do; the text is the message."""


def main(config: dict, memory: int, sockets: list[int]) -> None:
    """Serve `config["num_envs"]` envs, split over len(sockets) workers."""
    builtins.input = _no_prompt
    try:
        _import(config)
    except BaseException:
        for fd in sockets:
            wire.answer(socket.socket(fileno=fd), wire.FAULT, traceback.format_exc().encode())
        return
    gc.collect()
    gc.freeze()  # the imported modules are never garbage: every later collection is 10 times cheaper
    me = next((i for i in range(1, len(sockets)) if os.fork() == 0), 0)
    for i, fd in enumerate(sockets):
        if i != me:
            os.close(fd)
    sock = socket.socket(fileno=sockets[me])
    bounds = np.linspace(0, config["num_envs"], len(sockets) + 1).round().astype(int)
    try:
        _serve(sock, memory, config, range(bounds[me], bounds[me + 1]))
    except (EOFError, ConnectionError):
        pass  # the env is gone
    except BadRequest as e:
        wire.answer(sock, wire.USER, str(e).encode())
    except BaseException:
        wire.answer(sock, wire.FAULT, traceback.format_exc().encode())
    sys.stdout.flush()
    os._exit(0)


def _no_prompt(prompt: str = "") -> str:
    raise BadRequest(f"it asks {prompt!r}")


def _import(config: dict) -> None:
    """Import ManiSkill, before that without a renderer if none is needed, after that with the cheap primitives."""
    if not config["render_needed"]:
        _without_renderer()
    import torch
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    importlib.import_module("mani_skill.envs")
    from mani_skill.utils.logging_utils import logger
    logger.setLevel("ERROR")
    if not config["raw"]:
        from sims.maniskill import lean
        lean.install()


def _without_renderer() -> None:
    """ManiSkill builds a render material for every coloured shape, which starts Vulkan even where nothing is drawn.
    A stand-in that takes any attribute lets state-only envs run on machines without Vulkan."""
    import sapien
    import sapien.render
    import sapien.wrapper.actor_builder as actor_builder
    import sapien.wrapper.urdf_loader as urdf_loader

    class NullMaterial:
        def __init__(self, *args, **kwargs):
            self.__dict__.update(kwargs)

        def __getattr__(self, name):
            if name.startswith("set_"):
                return lambda *args, **kwargs: None
            raise AttributeError(name)

    for module in (sapien.render, sapien.pysapien.render, actor_builder.sapien.render):
        module.RenderMaterial = NullMaterial
    urdf_loader.RenderMaterial = NullMaterial


# ---------------------------------------------------------------- building one simulator


def _build(config: dict):
    """(env, control): an unwrapped ManiSkill env and the name of its control mode."""
    import gymnasium
    task, reward = config["task"], config["reward"]
    kwargs = {"obs_mode": config["obs"], "sim_backend": "physx_cpu", "render_backend": "none"}
    if config["render_needed"]:
        kwargs["render_backend"] = _render_backend()
        size = {"width": config["image_size"], "height": config["image_size"], "shader_pack": "minimal"}
        kwargs |= {"sensor_configs": size, "human_render_camera_configs": {"width": FRAME, "height": FRAME}}
        if config["render"]:
            kwargs["render_mode"] = "rgb_array"
    control = config["control"] or "joint_delta"
    try:
        cls = _task_class(task)
        kwargs["reward_mode"] = _reward_mode(task, reward, cls.SUPPORTED_REWARD_MODES)
        env = gymnasium.make(task, control_mode=CONTROLS[control], disable_env_checker=True, **kwargs).unwrapped
    except (BadRequest, SystemExit, FileNotFoundError) as e:
        if config["needs_download"]:
            raise BadRequest(config["needs_download"]) from e
        raise
    except AssertionError as e:
        if "supported modes" not in str(e):
            raise
        raise BadRequest(f"task {task!r} has no {control!r} control. Allowed here: joint_delta") from None
    return env, control


def _task_class(task: str):
    from mani_skill.utils.registration import REGISTERED_ENVS
    if task not in REGISTERED_ENVS:
        import mani_skill
        raise BadRequest(f"the installed ManiSkill {mani_skill.__version__} has no task {task!r}")
    return REGISTERED_ENVS[task].cls


def _reward_mode(task: str, reward: str, supported) -> str:
    """sparse: 1 on success, which we take from `info`; dense: ManiSkill's dense reward scaled to at most 1."""
    if reward == "dense":
        if "normalized_dense" not in supported:
            raise BadRequest(f"task {task!r} has no dense reward. Allowed: sparse")
        return "normalized_dense"
    return "sparse" if "sparse" in supported else "none"


def _render_backend() -> str:
    import sapien
    import sapien.render
    try:
        sapien.render.RenderMaterial()
    except RuntimeError as e:
        from sims.maniskill import VULKAN_REMEDY
        raise BadRequest(f"no usable Vulkan ({e}). {VULKAN_REMEDY}") from None
    try:
        return "gpu" if sapien.Device("cuda").can_render() else "cpu"
    except RuntimeError:
        return "cpu"


def _describe(env, control: str, config: dict) -> dict:
    """What the parent has to know of the task (JSON)."""
    from mani_skill.utils.registration import REGISTERED_ENVS
    task = config["task"]
    own = MAX_STEPS.get(task) or REGISTERED_ENVS[task].max_episode_steps or 200
    obs, info = env.get_obs(unflattened=True), env.get_info()
    views = sorted(obs["sensor_data"]) if config["obs"] == "rgb" else []
    frame = []
    if config["render"]:
        frame = list(env.render_rgb_array().shape[1:3])
    from sims.maniskill.expert import EXPERTS
    return {
        "axes": axes(env), "period": 1.0 / env.control_freq, "max_steps": config["max_steps"] or own,
        "state_names": state_names(obs if config["obs"] == "state" else {k: obs[k] for k in ("agent", "extra")}),
        "views": views, "image_size": config["image_size"], "frame": frame, "control": control,
        "expert": task in EXPERTS, "success": "success" in info, "pid": os.getpid(),
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
        return [[f"{c.joints[0].name}/{k}", "1", lo, hi, "rate", "base"]
                for k, (lo, hi) in enumerate(zip(low, high, strict=True))]
    units = ["m" if "prismatic" in str(j._objs[0].type) else "rad" for j in joints]
    return [[j.name, u, lo, hi, kind, "joint"] for j, u, lo, hi in zip(joints, units, low, high, strict=True)]


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


# ---------------------------------------------------------------- serving


class _Sim:
    """One simulator and its row of the shared memory."""

    def __init__(self, env, control: str, config: dict, row: int):
        self.env, self.row, self.rgb, self.dense = env, row, config["obs"] == "rgb", config["reward"] == "dense"
        self.expert, self.drive, self.control = None, None, control
        self.low_high = self._unscaled()
        agents = getattr(env.agent, "agents_dict", None)
        self.split = None if agents is None else [(u, a.single_action_space.shape[0]) for u, a in agents.items()]

    def _unscaled(self) -> "tuple[np.ndarray, np.ndarray] | None":
        """Limits of an action space that ManiSkill does not normalise to -1 .. 1."""
        space = self.env.single_action_space
        if not hasattr(space, "low") or ((space.low == -1).all() and (space.high == 1).all()):
            return None
        return space.low, space.high

    def reset(self, out: dict) -> None:
        from sims.maniskill import lean
        self.env.reset(seed=int(out["starts"][self.row]))
        if self.drive is None or self.env.reconfiguration_freq:  # a task may have rebuilt its scene
            self.drive = lean.driver(self.env) if self.split is None else None
            self.expert = None
        out["reward"][self.row] = 0
        info = self.env.get_info()
        self._put(out, self.env.get_obs(info, unflattened=True), info)

    def step(self, out: dict, action: np.ndarray) -> None:
        import torch
        from sims.maniskill import lean
        if self.low_high is not None:
            low, high = self.low_high
            action = low + 0.5 * (action + 1) * (high - low)
        act = torch.from_numpy(action[None].copy())
        if self.split is not None:
            act = dict(zip([u for u, _ in self.split], act.split([n for _, n in self.split], 1), strict=True))
        obs, reward, info = lean.step(self.env, act, self.drive)
        self._put(out, obs, info)
        out["reward"][self.row] = float(reward[0]) if self.dense else float(out["success"][self.row])

    def _put(self, out: dict, obs: dict, info: dict) -> None:
        from sims.maniskill import lean
        i = self.row
        if self.rgb:
            for view, data in obs["sensor_data"].items():
                out[f"image/{view}"][i] = data["rgb"][0].numpy()
            obs = {k: obs[k] for k in ("agent", "extra")}
        lean.flatten(obs, out["state"][i])
        out["success"][i] = bool(info["success"]) if "success" in info else 0
        out["fail"][i] = bool(info["fail"]) if "fail" in info else 0

    def act(self, out: dict) -> None:
        from sims.maniskill.expert import EXPERTS, Arm
        if self.expert is None:
            self.expert = Arm(self.env, self.control)
        self.expert.read()
        out["expert"][self.row] = self.expert.action(EXPERTS[self.env.spec.id](self.env, self.expert))

    def draw(self, out: dict) -> None:
        out["frames"][self.row] = self.env.render_rgb_array()[0].numpy()


def _serve(sock: socket.socket, memory: int, config: dict, rows: range) -> None:
    if config["raw"]:
        return _serve_raw(sock, config)
    sims = []
    for row in rows:
        env, control = _build(config)
        sims.append(_Sim(env, control, config, row))
    info = _describe(sims[0].env, sims[0].control, config)
    wire.answer(sock, wire.OK, json.dumps(info).encode())
    out = {}
    while True:
        command = _command(sock)
        if command == wire.MAP:
            out = wire.map_memory(memory, wire.arrays(info, config["num_envs"]))
        elif command == wire.EXPERT:
            for sim in sims:
                sim.act(out)
        elif command == wire.RENDER:
            for sim in sims:
                sim.draw(out)
        else:
            for sim in sims:
                if out["mask"][sim.row]:
                    _move(command, sim, out)
        wire.answer(sock, wire.OK)


def _move(command: bytes, sim: _Sim, out: dict) -> None:
    history, steps = out["history"][sim.row], int(out["steps"][sim.row])
    if command == wire.STEP:
        sim.step(out, history[steps])
        return
    sim.reset(out)
    if command == wire.REPLAY:
        for action in history[:steps]:
            sim.step(out, action)


def _command(sock: socket.socket) -> bytes:
    """The next command; EOFError when the parent is gone, even if a fork of it holds the socket open."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    parent = os.getppid()
    while not poll.poll(5000):
        if os.getppid() != parent:
            raise EOFError
    command = sock.recv(1)
    if not command:
        raise EOFError
    return command


def _serve_raw(sock: socket.socket, config: dict) -> None:
    """Bench: one bare env stepped with random actions, as fast as ManiSkill goes."""
    import torch
    env, _ = _build(config)
    rng = np.random.default_rng(0)
    actions = torch.from_numpy(rng.uniform(-1, 1, (500, *env.single_action_space.shape)).astype(np.float32))
    limit = 50
    wire.answer(sock, wire.OK, b"{}")
    while True:
        _command(sock)
        steps, spent = 0, 0.0
        while spent < config["seconds"]:
            env.reset(seed=steps)
            begin = time.perf_counter()
            for action in actions[:limit]:
                env.step(action[None])
            spent += time.perf_counter() - begin
            steps += limit
        wire.answer(sock, wire.OK, json.dumps(steps / spent).encode())
