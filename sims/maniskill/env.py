"""The CPU vector env: worker processes that each hold some single-env ManiSkill simulators, one round trip
per step.

The same start gives the same episode bit for bit in any worker (ManiSkill's seeded reset is exact). A
snapshot is therefore the start and the actions since: `set_state` plays them again, which is exact where
ManiSkill's own `set_state_dict` is not (contacts restart from cold, 1e-5 after a step), and costs the steps
it replays.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar, NoReturn

import numpy as np
from gymnasium.vector import AutoresetMode

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_actions, read_reset
from robo_rl.errors import LostDaemon, UserError
from robo_rl.files import parse_json
from robo_rl.starts import StartStream
from sims.maniskill import wire
from sims.maniskill.tasks import EXPERT_REMEDY, control_spec, instruction

# s, importing ManiSkill and building the envs; a software renderer compiles for a minute
START_DEADLINE = 600.0
STEP_DEADLINE = 120.0  # s, one round trip
_SNAPSHOT = ("starts", "steps", "history")


class Workers:
    """The worker processes: started here, spoken to in lockstep, ended here. Every wait has a deadline."""

    def __init__(self, config: dict, count: int):
        self.count, self.broken = count, ""
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the workers)
        self.memory = os.memfd_create("robo_rl_maniskill") if hasattr(os, "memfd_create") else _file()
        pairs = [socket.socketpair() for _ in range(count)]
        self.sockets = [mine for mine, _ in pairs]
        theirs = [other.fileno() for _, other in pairs]
        root = str(Path(__file__).resolve().parents[2])
        code = (
            "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); from sims.maniskill.worker import "
            "main; main(*json.loads(sys.argv[2]))"
        )
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                code,
                json.dumps([root, *sys.path]),
                json.dumps([config, self.memory, theirs]),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            pass_fds=[self.memory, *theirs],
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        for _, other in pairs:
            other.close()
        self.poll = select.poll()
        for s in self.sockets:
            self.poll.register(s, select.POLLIN)
        self.index = {s.fileno(): i for i, s in enumerate(self.sockets)}

    def ask(self, command: bytes, deadline: float = STEP_DEADLINE) -> list[bytes]:
        """Send one command to all, wait for all: their payloads. UserError if one says a mistake, LostDaemon
        if one is gone or silent, RuntimeError with its traceback if one raises."""
        if self.broken:
            raise RuntimeError(self.broken)
        try:
            for i, s in enumerate(self.sockets):
                try:
                    s.send(command)
                except OSError:
                    self._fail(i, "")
            return self.gather(deadline)
        except KeyboardInterrupt:
            self.broken = (
                "interrupted in the middle of a step: make a new env and give it this one's get_state()"
            )
            self.close(patience=0)
            raise

    def gather(self, deadline: float) -> list[bytes]:
        out: list = [None] * self.count
        left, end = self.count, time.monotonic() + deadline
        while left:
            ready = self.poll.poll(max(0.0, end - time.monotonic()) * 1000)
            ready = ready or self.poll.poll(min(5.0, deadline) * 1000)  # all of us may have been suspended
            if not ready:
                late = [i for i, x in enumerate(out) if x is None]
                self._fail(late[0], f"gave no answer within {deadline:g} s")
            for fd, _ in ready:
                i = self.index[fd]
                try:
                    status, out[i] = wire.read_answer(self.sockets[i])
                except EOFError:
                    self._fail(i, "")
                if status != wire.OK:
                    kind = UserError if status == wire.USER else RuntimeError
                    self._fail(i, out[i].decode(errors="replace"), kind)
                left -= 1
        return out

    def _fail(self, i: int, why: str, kind: type[Exception] = LostDaemon) -> NoReturn:
        """End all workers and raise: the user's mistake, or which worker went and how."""
        why = why or self._death(i)
        self.close(patience=0)
        if kind is UserError:
            raise UserError(why)
        self.broken = f"ManiSkill worker {i + 1} of {self.count}: {why}"
        raise kind(self.broken)

    def _death(self, i: int) -> str:
        """How worker `i` ended: as the system says of the first, which is our child."""
        try:
            code = self.process.wait(1) if i == 0 else None
        except subprocess.TimeoutExpired:
            code = None
        if code == -signal.SIGKILL:
            return "was killed (SIGKILL); where memory is short, fewer --threads need less"
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else "killed, or in native code"
        return f"died ({how}). It last printed:\n{self._tail() or '(nothing)'}"

    def _tail(self, size: int = 2000) -> str:
        end = os.lseek(self.log.fileno(), 0, os.SEEK_END)
        return os.pread(self.log.fileno(), size, max(0, end - size)).decode(errors="replace").strip()

    def close(self, patience: float = 3.0) -> None:
        """End the workers: they leave when their socket does, and are killed if they do not within `patience`
        s."""
        if self.process.returncode is not None and not self.sockets:
            return
        for s in self.sockets:
            s.close()
        self.sockets = []
        self.broken = self.broken or "this env is closed"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            # the whole group: workers forked by the first one too
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        os.close(self.memory)
        self.log.close()


def _file() -> int:
    """Where there is no memfd (not Linux): an unlinked file."""
    with tempfile.TemporaryFile() as f:
        return os.dup(f.fileno())


class ManiSkillEnv(ControlEnv):
    """ManiSkill 3 on CPU under the contract of `sims`; built by `sims.maniskill.make_maniskill`."""

    metadata: ClassVar[dict] = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": ["rgb_array"]}
    expert_remedy = EXPERT_REMEDY

    def __init__(self, config: dict, workers: int):
        self.num_envs = n = config["num_envs"]
        self.workers = Workers(config, workers)
        try:
            info = parse_json(self.workers.gather(START_DEADLINE)[0], "a worker's answer", limit=1 << 20)
            self.shared = wire.map_memory(self.workers.memory, wire.arrays(info, n), create=True)
            self.workers.ask(wire.MAP)
        except BaseException:
            self.workers.close(patience=0)
            raise
        self.render_mode = "rgb_array" if config["render"] else None
        self.spec = control_spec(config["task"], info)
        self.single_observation_space, self.observation_space = observation_spaces(
            len(info["state_names"]), n, self.spec.views, info["image_size"]
        )
        self.single_action_space, self.action_space = action_spaces(len(self.spec.axes), n)
        self.task = np.full(n, instruction(config["task"]))
        self.stream = StartStream(n)
        self.terminated, self.truncated, self.success = np.zeros((3, n), bool)
        self.ready = np.zeros(n, bool)  # was reset
        self.reports_success = info["reports_success"]
        if info["expert"]:
            self.expert_action = self._expert_action

    def _obs(self) -> dict:
        keys = ["state", *(f"image/{v}" for v in self.spec.views)]
        return {k: self.shared[k].copy() for k in keys} | {"task": self.task.copy()}

    def reset(self, *, seed=None, options=None):
        mask, starts = read_reset(seed, options, self.num_envs)
        if starts is not None and starts[mask].max(initial=0) >= 2**32:
            raise UserError(f"starts must be < 2^32 (ManiSkill's seeds), got {starts[mask].max()}")
        ids, starts = self.stream.due(seed, mask, starts)
        self.shared["starts"][ids] = starts
        self.shared["steps"][ids] = 0
        self._run(wire.RESET, mask)
        for flag in (self.terminated, self.truncated, self.success):
            flag[ids] = False
        self.ready |= mask
        return self._obs(), {}

    def step(self, actions):
        a = read_actions(actions, self.num_envs, self.single_action_space.shape[0])
        if not self.ready.all():
            raise UserError(f"reset env {np.argmin(self.ready)} before the first step")
        live = ~(self.terminated | self.truncated)
        ids = np.flatnonzero(live)
        steps, shared = self.shared["steps"], self.shared
        shared["history"][ids, steps[ids]] = a[ids]
        reward = np.zeros(self.num_envs, np.float32)
        if len(ids):
            self._run(wire.STEP, live)
            steps[ids] += 1
            self._flags(ids)
            reward[ids] = shared["reward"][ids]
        return (
            self._obs(),
            reward,
            self.terminated.copy(),
            self.truncated.copy(),
            {"success": self.success.copy()},
        )

    def _run(self, command: bytes, mask: np.ndarray) -> None:
        self.shared["mask"][:] = mask
        self.workers.ask(command, STEP_DEADLINE if command == wire.STEP else START_DEADLINE)

    def _flags(self, ids: np.ndarray) -> None:
        """End of episode of the rows `ids`, whose last step is in the shared arrays."""
        s = self.shared
        self.success[ids] = s["success"][ids]
        self.terminated[ids] = (s["success"][ids] | s["fail"][ids]) > 0
        self.truncated[ids] = ~self.terminated[ids] & (s["steps"][ids] >= self.spec.max_steps)

    def get_state(self) -> dict[str, np.ndarray]:
        """starts int64[N], steps int64[N], history float32[N, max_steps, A] (zero from `steps` on), and the
        stream."""
        if not self.ready.all():
            raise UserError(f"reset env {np.argmin(self.ready)} before get_state")
        out = {k: self.shared[k].copy() for k in _SNAPSHOT}
        out["history"][np.arange(self.spec.max_steps) >= out["steps"][:, None]] = 0
        return out | {"seeds": self.stream.seeds.copy(), "episodes": self.stream.episodes.copy()}

    def set_state(self, state: dict[str, np.ndarray], mask=None) -> None:
        """Go (back) to `get_state`'s state where mask [N]; exact; replays the episodes so far."""
        mask, _ = read_reset(None, {"reset_mask": mask}, self.num_envs)
        for k in ("seeds", "episodes"):
            shape = np.shape(state[k]) if k in state else ()
            if shape != (self.num_envs,):
                raise UserError(f"state[{k!r}] must have shape ({self.num_envs},), got {shape}")
        for k in _SNAPSHOT:
            if k not in state or np.shape(state[k]) != self.shared[k].shape:
                raise UserError(
                    f"state[{k!r}] must have shape {self.shared[k].shape}, "
                    f"got {np.shape(state[k]) if k in state else 'nothing'}"
                )
            self.shared[k][mask] = np.asarray(state[k])[mask]
        self.stream.seeds[mask] = np.asarray(state["seeds"])[mask]
        self.stream.episodes[mask] = np.asarray(state["episodes"])[mask]
        self._run(wire.REPLAY, mask)
        ids = np.flatnonzero(mask)
        self._flags(ids)
        # before the first step nothing is over, even in a start that succeeds
        begun = self.shared["steps"] > 0
        for flag in (self.terminated, self.truncated, self.success):
            flag[mask & ~begun] = False
        self.ready |= mask

    def _expert_action(self) -> np.ndarray:
        """float32[N, A]: the scripted expert for the present states, in this env's control mode."""
        self._run(wire.EXPERT, np.ones(self.num_envs, bool))
        return self.shared["expert"].copy()

    def render(self):
        """uint8[N, 256, 256, 3] of the task's human camera, with goal markers; None unless made with
        render=True."""
        if self.render_mode is None:
            return None
        self._run(wire.RENDER, np.ones(self.num_envs, bool))
        return self.shared["frames"].copy()

    def close_extras(self, **kwargs) -> None:
        self.workers.close()
