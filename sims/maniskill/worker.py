"""A worker process of the CPU backend: single-env simulators behind one-byte commands (see `wire`).

Started as a plain child process (no `__main__` of the caller is imported again). The first worker imports
ManiSkill, then forks the others, so that its 430 MB are shared and the import is paid once; nothing has
started threads by then. A worker ends when its socket does, that is, with the process that made the env.
"""

import builtins
import gc
import json
import os
import select
import socket
import sys
import time
import traceback
from contextlib import nullcontext

import numpy as np

from robo_rl.errors import UserError
from robo_rl.plugins import said
from sims.maniskill import wire
from sims.maniskill.build import DENSE, action_map, action_split, build, describe, prepare, split_action
from sims.maniskill.tasks import REBUILD


def main(config: dict, memory: int, sockets: list[int]) -> None:
    """Serve `config["num_envs"]` envs, split over len(sockets) workers."""
    builtins.input = _no_prompt
    try:
        _import(config)
    except BaseException as e:  # noqa: BLE001  (process edge: whatever it was, the env's process must hear of it)
        user = isinstance(e, UserError)
        why = str(e) if user else traceback.format_exc()
        for fd in sockets:
            wire.answer(socket.socket(fileno=fd), wire.USER if user else wire.FAULT, why.encode())
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
        with said(f"--task {config['task']}", (OSError, EOFError)) if config["module"] else nullcontext():
            _serve(sock, memory, config, range(bounds[me], bounds[me + 1]))
    except (EOFError, ConnectionError):
        pass  # the env is gone
    except UserError as e:
        wire.answer(sock, wire.USER, str(e).encode())
    except BaseException:  # noqa: BLE001  (process edge)
        wire.answer(sock, wire.FAULT, traceback.format_exc().encode())
    sys.stdout.flush()
    os._exit(0)


def _no_prompt(prompt: str = "") -> str:
    raise UserError(f"ManiSkill wants to ask {prompt!r} and nobody is there to answer")


def _import(config: dict) -> None:
    """Import ManiSkill and make its primitives cheap."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    prepare(config)
    if not config["raw"]:
        from sims.maniskill import lean

        lean.install()


# ---------------------------------------------------------------- serving


class _Sim:
    """One simulator and its row of the shared memory."""

    def __init__(self, env, config: dict, row: int):
        self.env, self.config, self.row = env, config, row
        self.middle, self.half = action_map(env)
        self.split = action_split(env)
        self.expert = self.drive = None

    def reset(self, out: dict) -> None:
        from sims.maniskill import lean

        rebuild = self.env.reconfiguration_freq != 0 or self.config["id"] in REBUILD
        if not rebuild:
            lean.renew_scene(self.env)
        obs, info = self.env.reset(seed=int(out["starts"][self.row]), options={"reconfigure": rebuild})
        if self.drive is None or rebuild:
            self.drive = lean.driver(self.env) if self.split is None else None
            self.expert = None
        out["reward"][self.row] = 0
        self._put(out, obs, info)

    def step(self, out: dict, action: np.ndarray) -> None:
        import torch

        from sims.maniskill import lean

        act = split_action(torch.from_numpy((self.middle + self.half * action)[None]), self.split)
        obs, reward, info = lean.step(self.env, act, self.drive)
        self._put(out, obs, info)
        out["reward"][self.row] = (
            float(reward[0]) if self.env.reward_mode in DENSE else out["success"][self.row]
        )

    def _put(self, out: dict, obs, info: dict) -> None:
        """obs: the nested dict of `lean.step`, or the flat tensor that a reset gives in state mode."""
        from sims.maniskill import lean

        i = self.row
        if self.config["obs"] == "rgb":
            for view, data in obs["sensor_data"].items():
                if "rgb" in data:
                    out[f"image/{view}"][i] = data["rgb"][0].numpy()
            obs = {k: obs[k] for k in ("agent", "extra")}
        lean.flatten(obs if isinstance(obs, dict) else {"": obs}, out["state"][i])
        out["success"][i] = bool(info["success"]) if "success" in info else 0
        out["fail"][i] = bool(info["fail"]) if "fail" in info else 0

    def act(self, out: dict) -> None:
        from sims.maniskill.expert import EXPERTS, ManiSkillArm

        if self.expert is None:
            self.expert = ManiSkillArm(self.env, self.middle, self.half)
        self.expert.read()
        out["expert"][self.row] = self.expert.action(EXPERTS[self.env.spec.id](self.env, self.expert))

    def draw(self, out: dict) -> None:
        out["frames"][self.row] = self.env.render_rgb_array()[0].numpy()


def _serve(sock: socket.socket, memory: int, config: dict, rows: range) -> None:
    if config["raw"]:
        return _serve_raw(sock, config)
    sims = [_Sim(build(config), config, row) for row in rows]
    info = describe(sims[0].env, config)
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
    """Bench: ManiSkill's own env stepped with random actions, and the PhysX steps of such control steps
    alone."""
    import torch

    env = build(config)
    rng = np.random.default_rng(0)
    actions = torch.from_numpy(rng.uniform(-1, 1, (50, *env.single_action_space.shape)).astype(np.float32))
    wire.answer(sock, wire.OK, b"{}")

    def whole(action: torch.Tensor) -> float:
        began = time.perf_counter()
        env.step(action[None])
        return time.perf_counter() - began

    def physics(action: torch.Tensor) -> float:
        env.agent.set_action(action[None])
        px, spent = env.scene.px, 0.0
        for _ in range(env._sim_steps_per_control):
            env.agent.before_simulation_step()
            began = time.perf_counter()
            px.step()
            spent += time.perf_counter() - began
        return spent

    while True:
        _command(sock)
        steps, spent = 0, {"env": 0.0, "physics": 0.0}
        until = time.perf_counter() + 2 * config["seconds"]
        while not steps or time.perf_counter() < until:
            for name, step in (("env", whole), ("physics", physics)):
                env.reset(seed=steps)
                spent[name] += sum(step(action) for action in actions)
            steps += len(actions)
        wire.answer(sock, wire.OK, json.dumps({k: steps / t for k, t in spent.items()}).encode())
