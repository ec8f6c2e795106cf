"""A policy of LeRobot's as one of ours: it acts in a process of another Python, where LeRobot is installed
(`lerobot_worker`).

LeRobot's releases and torch's do not go together in one environment. The worker reads of this package what
has no dependencies, through links in a folder of its own, so nothing has to be installed there but LeRobot.
It downloads nothing (HF_HUB_OFFLINE) unless told to.
"""

import contextlib
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from controllers.remote import PIECE, pack, plain_text
from robo_rl.errors import UserError
from robo_rl.experiment.lerobot_worker import FrameSocket
from robo_rl.options.foreign import ActOptions

if TYPE_CHECKING:
    from robo_rl.policies import ObsSpec

PREFIX, VARIABLE = "lerobot:", "ROBO_RL_LEROBOT_PYTHON"
START = 900.0  # s; the first import of LeRobot takes minutes on a busy machine
ANSWER = 600.0  # s
DEADLINE = 10.0  # s for an answer to an arm, or to robots that people watch
LEAVE = 10.0  # s until a worker that does not end is killed
MODULE = "robo_rl.experiment.lerobot_worker"


def find_python(named: str) -> str:
    """The Python of LeRobot's environment: `named`, else of the variable. UserError: nobody named one, or it
    is not there."""
    python = named or os.environ.get(VARIABLE, "")
    if not python:
        raise UserError(
            "--policy lerobot:FOLDER acts in an environment of its own: name its Python by --lerobot-python "
            f"PATH, or {VARIABLE}"
        )
    if (found := shutil.which(python)) is None:
        raise UserError(f"--lerobot-python {python}: there is no such program")
    return found


def parse_cameras(text: str) -> dict[str, str]:
    """{the policy's camera: ours} of NAME=CAMERA,…"""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if wrong := [name for name, sign, camera in pairs if not (name and sign and camera)]:
        raise UserError(
            f"--lerobot-cameras names the policy's cameras and ours, NAME=CAMERA,…, got {wrong[0]!r}"
        )
    return {name: camera for name, _, camera in pairs}


class LeRobotPolicy:
    """Actions [N, E, A] of a policy folder of LeRobot's for the observations of N envs, made by a worker that
    this owns.

    execute: rows of a chunk that are executed; cameras: {its camera: ours}, where the names differ; `answer`
    [s]: how long it may think.
    UserError: the worker does not start, the policy has other sizes or cameras, or what it answers is none.
    """

    def __init__(
        self,
        folder: str,
        python: str,
        spec,
        execute: int,
        seed: int = 0,
        cameras: Mapping[str, str] | None = None,
    ):
        if not (Path(folder) / "config.json").is_file():
            raise UserError(f"--policy {PREFIX}{folder}: no policy folder of LeRobot (it has no config.json)")
        self.folder, self.python, self.spec, self.execute, self.asked = folder, python, spec, execute, 0
        self.seed, self.options, self.answer = seed, ActOptions(execute), ANSWER
        self.place = Path(tempfile.mkdtemp(prefix="robo_rl_lerobot_"))
        self.process: subprocess.Popen | None = None
        try:
            self.wire = self._start()
            self.about = self._said(START)[0]
            self.cameras = self._fitting(cameras or {})
        except BaseException:
            self.close()
            raise

    def _start(self) -> FrameSocket:
        """Start the worker, which sees this package and `controllers` and nothing else of this
        environment."""
        root = Path(__file__).resolve().parents[2]
        for name in ("robo_rl", "controllers"):
            (self.place / name).symlink_to(root / name, target_is_directory=True)
        ours, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")}
        env = {"HF_HUB_OFFLINE": "1", **env, "PYTHONPATH": str(self.place), "PYTHONDONTWRITEBYTECODE": "1"}
        with (self.place / "stderr").open("wb") as log, theirs:
            self.process = subprocess.Popen(
                [self.python, "-m", MODULE, str(Path(self.folder).resolve()), str(theirs.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
            )
        return FrameSocket(ours)

    def _said(self, patience: float) -> tuple[dict, dict[str, np.ndarray]]:
        """The worker's next message. UserError: it says what went wrong, ends or says nothing."""
        self.wire.wire.settimeout(patience)
        try:
            message = self.wire.receive()
        except TimeoutError:
            raise self.silent(patience) from None
        except OSError:
            message = None
        if message is None:
            raise self.gone()
        return self.refused(message)

    def silent(self, seconds: float) -> UserError:
        """Of a worker that says nothing."""
        return UserError(f"the LeRobot policy {self.folder} says nothing for {seconds:.0f} s")

    def gone(self) -> UserError:
        """Of a worker that has ended, with its last words."""
        text = (self.place / "stderr").read_text(encoding="utf-8", errors="replace").strip()
        words = plain_text(text.splitlines()[-1]) if text else "without a word"
        return UserError(f"the LeRobot policy {self.folder} ended ({words})")

    def refused(self, message: tuple[dict, dict[str, np.ndarray]]) -> tuple[dict, dict[str, np.ndarray]]:
        """The message; UserError: it says what went wrong."""
        if "error" in message[0]:
            raise UserError(
                f"the LeRobot policy {self.folder} in {self.python}: {plain_text(message[0]['error'])}"
            )
        return message

    def _fitting(self, cameras: Mapping[str, str]) -> dict[str, str]:
        """{its camera: ours}; UserError naming what does not fit."""
        about, spec = self.about, self.spec
        if (about["state"], about["action"]) != (spec.state, spec.action):
            raise UserError(
                f"the LeRobot policy {self.folder} takes a state of {about['state']} numbers and gives "
                f"{about['action']}, the env has {spec.state} and {spec.action}"
            )
        found = {name: cameras.get(name, name) for name in about["views"]}
        if missing := [
            f"{name} (our {ours})" if name != ours else name
            for name, ours in found.items()
            if ours not in spec.views
        ]:
            raise UserError(
                f"the LeRobot policy {self.folder} looks through {', '.join(missing)}, the env has "
                f"{', '.join(spec.views) or 'no camera'}; say which is which: --lerobot-cameras NAME=CAMERA,…"
            )
        if self.execute > about["horizon"]:
            why = (
                "looks back, so it decides every step"
                if about["history"]
                else f"gives chunks of {about['horizon']} steps"
            )
            raise UserError(
                f"the LeRobot policy {self.folder} {why}, the run executes {self.execute}: --execute "
                f"{about['horizon']}"
            )
        return found

    def reset(self) -> None:
        """Episodes begin."""
        self.wire.send({}, reset=True)

    def question(self, obs: Mapping, noise: np.ndarray | None = None) -> bytes:
        """The message that asks for chunks of N observations; noise [N,H,W]: what they grow from, for
        policies that can be given it."""
        tasks = [str(t) for t in obs["task"]]
        texts = sorted(set(tasks))
        arrays = {"state": np.asarray(obs["state"], np.float32)}
        arrays |= {
            f"image/{name}": np.asarray(obs[f"image/{ours}"], np.uint8) for name, ours in self.cameras.items()
        }
        arrays |= {} if noise is None else {"noise": np.asarray(noise, np.float32)}
        self.asked += 1
        return pack(
            arrays,
            texts=texts,
            tasks=[texts.index(t) for t in tasks],
            seed=(self.seed * 1_000_003 + self.asked) % 2**31,
        )

    def answered(self, message: tuple[dict, dict[str, np.ndarray]], count: int) -> np.ndarray:
        """Whole chunks float32 [N,H,A], finite, of the answer to a question of `count` observations.
        UserError: it is none."""
        actions = self.refused(message)[1].get("actions")
        if (
            actions is None
            or actions.ndim != 3
            or (len(actions), actions.shape[2]) != (count, self.spec.action)
        ):
            raise UserError(
                f"the LeRobot policy {self.folder} gives no actions [{count}, H, {self.spec.action}], got "
                f"{'none' if actions is None else actions.shape}"
            )
        if not np.isfinite(actions).all():
            raise UserError(f"the LeRobot policy {self.folder} gives actions that are not finite")
        if actions.shape[1] < self.execute:
            raise UserError(
                f"the LeRobot policy {self.folder} gives chunks of {actions.shape[1]} steps, the run "
                f"executes {self.execute}: --execute {actions.shape[1]}"
            )
        return actions

    def chunks(self, obs: Mapping, noise: np.ndarray | None = None) -> np.ndarray:
        """Whole chunks float32 [N,H,A], finite; noise as for `question`."""
        with contextlib.suppress(OSError):  # it has gone: `_said` tells why
            self.wire.wire.sendall(self.question(obs, noise))
        return self.answered(self._said(self.answer), len(obs["task"]))

    def warm_up(self, instruction: str) -> None:
        """Let it act once, on nothing: the first time takes the longest."""
        from robo_rl.policies import blank_obs

        self.chunks(blank_obs(self.spec, 1) | {"task": [instruction]})
        self.reset()

    def __call__(self, obs: Mapping) -> np.ndarray:
        return self.chunks(obs)[:, : self.execute]

    def close(self) -> None:
        """End the worker and remove its folder."""
        if hasattr(self, "wire"):
            self.wire.wire.close()
        if self.process is not None:
            try:
                self.process.wait(LEAVE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.place, ignore_errors=True)


class LeRobotClient:
    """A `PolicyClient` of a LeRobot policy, which it owns: ask() waits up to `patience` [s] for an answer
    that comes at once, and nothing that the worker does or leaves undone holds the caller longer. It is lost
    when an answer takes more than `deadline` [s] by `clock`. blocks: the arm stands still meanwhile, and
    `patience` is above `deadline`."""

    def __init__(
        self,
        policy: LeRobotPolicy,
        instruction: str,
        patience: float,
        deadline: float = DEADLINE,
        clock: Callable[[], float] = time.monotonic,
        blocks: bool = False,
    ):
        self.policy, self.instruction, self.patience, self.deadline, self.clock, self.blocks = (
            policy,
            instruction,
            patience,
            deadline,
            clock,
            blocks,
        )
        self.out, self.since = bytearray(), 0.0
        self.asked: float | None = None  # t0 of the question that is open
        self.answer: tuple[np.ndarray, float] | None = None
        try:
            policy.warm_up(instruction)
            policy.wire.wire.setblocking(False)
        except BaseException:
            policy.close()
            raise

    def ask(self, obs: Mapping[str, np.ndarray], t0: float, prefix=None) -> None:
        if prefix is not None:
            raise UserError("a LeRobot policy takes no rows to agree with: use --chunking blend or naive")
        self.out += self.policy.question(
            {k: np.asarray(v)[None] for k, v in obs.items()} | {"task": [self.instruction]}
        )
        self.asked, self.since = t0, self.clock()
        end = self.since + self.patience
        while self.answer is None and (left := end - self.clock()) > 0:
            self._exchange(left)

    def poll(self, now: float) -> tuple[np.ndarray, float] | None:
        if self.answer is None and self.asked is not None:
            self._exchange(0.0)
        out, self.answer = self.answer, None
        return out

    def _exchange(self, wait: float) -> None:
        """Send and receive what the socket takes and has within `wait` [s]."""
        wire, got = self.policy.wire, None
        ready = select.poll()
        ready.register(wire.wire, select.POLLIN | (select.POLLOUT if self.out else 0))
        ready.poll(1e3 * wait)
        try:
            with contextlib.suppress(BlockingIOError):
                while self.out:
                    del self.out[: wire.wire.send(self.out[:PIECE])]
            with contextlib.suppress(BlockingIOError):
                got = wire.wire.recv(PIECE)
        except OSError:
            got = b""
        if got == b"":
            raise self.policy.gone()
        wire.parser.feed(got or b"")
        if (message := wire.parser.take()) is not None:
            if self.asked is None:
                raise UserError(f"the LeRobot policy {self.policy.folder} answers what it was not asked")
            self.answer, self.asked = (self.policy.answered(message, 1)[0], self.asked), None
        elif self.asked is not None and self.clock() - self.since > self.deadline:
            raise self.policy.silent(self.deadline)

    def close(self) -> None:
        self.policy.close()


def start_policy(
    name: str, python: str, cameras: str, spec: "ObsSpec", execute: int, seed: int
) -> LeRobotPolicy:
    """The policy of --policy `name`, --lerobot-python and --lerobot-cameras. UserError: it does not start, or
    does not fit."""
    return LeRobotPolicy(
        name.removeprefix(PREFIX), find_python(python), spec, execute, seed, parse_cameras(cameras)
    )


def for_console(policy: LeRobotPolicy) -> LeRobotPolicy:
    """The policy, warmed up, for robots that people watch, whose episodes begin at different times.
    UserError, and it is closed: it looks back, so it would mix them."""
    try:
        if policy.about["history"]:
            raise UserError(
                f"the LeRobot policy {policy.folder} looks back, and the console's robots begin their "
                "episodes apart"
            )
        policy.warm_up("")
    except BaseException:
        policy.close()
        raise
    policy.answer = DEADLINE
    return policy
