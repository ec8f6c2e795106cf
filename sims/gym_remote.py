"""Gymnasium envs that another Python steps (`gym_worker`), for simulators that cannot be installed beside
ours: Meta-World, robosuite, LIBERO and gym-aloha want a MuJoCo of before 4.0.

One process holds all envs of a vector env; a step of all is one question. It ends with the vector env, and
with us if we are killed. Every wait has a deadline.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from robo_rl.errors import LostDaemon, UserError
from robo_rl.files import parse_json
from sims import gym_worker
from sims.mujoco.gl import set_mujoco_gl

START, ANSWER = 600.0, 120.0  # s, until the envs are made, and for one answer
SLOW = 10.0  # s of making envs after which that is told
LEAVE = 3.0  # s until a process that does not end is killed
WORDS = 200  # letters of what it last printed that are told
# a file with the current folder on its path, and not its own, which has a `mujoco` of ours
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
# of ours, which another Python must not see: PYTHONPATH may name packages of this one
HIDDEN = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")


class RemoteEnvs:
    """`count` envs of "[MODULE:]ID" in a process of `python`. `envs`: each as a Gymnasium env, whose `reset`
    and `step` hand out what `ahead` was answered; `limit`: steps of an episode.

    limit: 0 for the env's own, else `most`. UserError: there is no such Python, or it cannot make the envs.
    """

    def __init__(
        self,
        name: str,
        python: str,
        id: str,
        count: int,
        limit: int,
        most: int,
        render: bool,
        told_by: tuple[str, ...],
        arguments: dict[str, Any],
    ):
        self.name, self.broken, self.answers = name, "", {}
        if (found := shutil.which(os.path.expanduser(python))) is None:
            raise UserError(
                f"{name}: python={python}: there is no such program; a relative path begins in the folder in "
                f"which the command runs, {os.getcwd()}"
            )
        set_mujoco_gl()
        config = {"id": id, "count": count, "limit": limit, "most": most, "render": render}
        config |= {"told_by": told_by, "arguments": arguments}
        env = {k: v for k, v in os.environ.items() if k not in HIDDEN} | {"OMP_NUM_THREADS": "1"}
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self.wire, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [found, "-c", RUN, gym_worker.__file__, str(theirs.fileno()), json.dumps(config)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.wire.settimeout(1.0)
        try:
            about = self._answer(
                START,
                f"{name}: {count} envs are being made, for more than {SLOW:g} s so far; --envs N and "
                "--eval-envs N make fewer",
            )
            if "error" in about:
                raise UserError(f"{name} cannot be made in {python}: {about['error']}")
            self.limit = int(about["limit"])
            self.envs = [RemoteEnv(self, i, about, render) for i in range(count)]
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, *rest: Any) -> list[Any]:
        """The answer to a question. LostDaemon: the process is gone or says nothing."""
        if self.broken:
            raise LostDaemon(self.broken)
        try:
            self.wire.settimeout(ANSWER)
            with contextlib.suppress(OSError):  # it has gone: `_answer` tells how
                self.wire.sendall(gym_worker.pack([what, *rest]))
            self.wire.settimeout(1.0)
            return self._answer(ANSWER)
        except BaseException:
            self.broken = self.broken or f"{self.name}: an answer was interrupted; make the env anew"
            self.close()
            raise

    def ahead(self, what: str, ids: np.ndarray, rest: np.ndarray) -> None:
        """Ask `what` ("reset", with seeds, or "step", with actions) of the envs `ids` at once; each of these
        hands out its part of the answer when it is asked."""
        told = self.ask(what, ids.tolist(), rest)
        self.answers = dict(zip(ids.tolist(), told, strict=True))

    def part(self, i: int) -> Any:
        """What env `i` answered to `ahead`."""
        return self._sound(self.answers.pop(i), i)

    def of(self, what: str, i: int) -> Any:
        """The answer of one env."""
        return self._sound(self.ask(what, [i])[0], i)

    def _sound(self, answer: Any, i: int) -> Any:
        if isinstance(answer, dict) and "error" in answer:
            raise UserError(f"{self.name}: env {i} failed: {answer['error']}")
        return answer

    def _answer(self, patience: float, slow: str = "") -> Any:
        """The next message within `patience` [s]; `slow`: what is told once if it takes more than SLOW."""
        begin = time.monotonic()

        def wait():
            nonlocal slow
            if slow and time.monotonic() > begin + SLOW:
                warnings.warn(slow, stacklevel=2)
                slow = ""
            if time.monotonic() > begin + patience:
                self._lost(f"gave no answer within {patience:g} s")

        try:
            told = gym_worker.receive(self.wire, wait, parsed)
        except LostDaemon:
            raise
        except (ValueError, UserError) as e:
            self._lost(f"speaks no robo_rl: {e}")
        if told is None:
            self._lost("ended")
        return told

    def _lost(self, how: str):
        """Raise LostDaemon with the last words of the process."""
        end = os.lseek(self.log.fileno(), 0, os.SEEK_END)
        text = os.pread(self.log.fileno(), 2000, max(0, end - 2000)).decode(errors="replace").strip()
        words = text.splitlines()[-1][:WORDS] if text else "nothing"
        self.broken = f"{self.name}: its Python {how}; it last printed: {words}"
        raise LostDaemon(self.broken)

    def close(self) -> None:
        """End the process."""
        if self.wire.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self.wire.shutdown(socket.SHUT_RDWR)  # also where a process forked from us has the socket
        self.wire.close()
        self.broken = self.broken or f"{self.name}: this env is closed"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it started too
        self.process.wait(10)
        self.log.close()


def parsed(text: str) -> Any:
    """The tree of a message. UserError: it is none."""
    return parse_json(text, "a message", list, limit=gym_worker.LIMIT, depth=4 * gym_worker.DEPTH, nan=True)


class RemoteEnv(gym.Env):
    """Env `i` of `owner`, as `about` (`gym_worker.Envs.describe`) says it is."""

    def __init__(self, owner: RemoteEnvs, i: int, about: dict[str, Any], render: bool):
        self.owner, self.i = owner, i
        self.observation_space = space_of(about["observation"], owner.name)
        self.action_space = space_of(about["action"], owner.name)
        self.metadata = {"render_modes": about["render_modes"], "render_fps": about["fps"] or None}
        self.render_mode = "rgb_array" if render else None
        for name, value in about["facts"].items():
            setattr(self, name, value)
        if about["task"]:
            self.task_description = ""
        if about["expert"]:
            self.expert_action = lambda: owner.of("expert", i)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """What `RemoteEnvs.ahead` was answered."""
        seen, task = self.owner.part(self.i)
        if task is not None:
            self.task_description = task
        return seen, {}

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """What `RemoteEnvs.ahead` was answered."""
        return self.owner.part(self.i)

    def render(self) -> Any:
        """uint8 [h, w, 3]."""
        return self.owner.of("render", self.i)

    def close(self) -> None:
        """End the process, for all of its envs."""
        self.owner.close()


def space_of(tree: dict[str, Any], name: str) -> spaces.Space:
    """The space that `gym_worker.described` told of. UserError: of no kind that is known here."""
    kind = str(tree["kind"])
    parts: Sequence[Any] = tree.get("of", ())
    if kind == "Box":
        return spaces.Box(tree["low"], tree["high"], dtype=np.dtype(tree["dtype"]).type)
    if kind == "Dict":
        return spaces.Dict([(k, space_of(s, name)) for k, s in parts])  # of a dict it would sort the keys
    if kind == "Tuple":
        return spaces.Tuple([space_of(s, name) for s in parts])
    if kind == "Discrete":
        return spaces.Discrete(tree["n"], start=tree["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(tree["n"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(tree["n"].tolist())
    raise UserError(f"{name}: its spaces hold a {kind}, which is not supported")
