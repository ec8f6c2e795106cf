"""A policy of LeRobot's as one of ours: it acts in a process of another Python, where LeRobot is installed (`lerobot_worker`).

LeRobot's releases and torch's do not go together in one environment. The worker reads of this package what has no dependencies, through
links in a folder of its own, so nothing has to be installed there but LeRobot. It downloads nothing (HF_HUB_OFFLINE) unless told to.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from controllers.remote import plain_text
from robo_rl.errors import UserError
from robo_rl.experiment.lerobot_worker import FrameSocket

PREFIX, VARIABLE = "lerobot:", "ROBO_RL_LEROBOT_PYTHON"
START = 900.0  # s; the first import of LeRobot takes minutes on a busy machine
ANSWER = 600.0  # s
LEAVE = 10.0  # s until a worker that does not end is killed
MODULE = "robo_rl.experiment.lerobot_worker"


def find_python(named: str) -> str:
    """The Python of LeRobot's environment: `named`, else of the variable. UserError: nobody named one, or it is not there."""
    python = named or os.environ.get(VARIABLE, "")
    if not python:
        raise UserError("--policy lerobot:FOLDER acts in an environment of its own: name its Python by --lerobot-python PATH, or "
                        f"{VARIABLE}")
    if (found := shutil.which(python)) is None:
        raise UserError(f"--lerobot-python {python}: there is no such program")
    return found


def parse_cameras(text: str) -> dict[str, str]:
    """{the policy's camera: ours} of NAME=CAMERA,…"""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if wrong := [name for name, sign, camera in pairs if not (name and sign and camera)]:
        raise UserError(f"--lerobot-cameras names the policy's cameras and ours, NAME=CAMERA,…, got {wrong[0]!r}")
    return {name: camera for name, _, camera in pairs}


class LeRobotPolicy:
    """Actions [N, E, A] of a policy folder of LeRobot's for the observations of N envs, made by a worker that this owns.

    execute: rows of a chunk that are executed; cameras: {its camera: ours}, where the names differ.
    UserError: the worker does not start, the policy has other sizes or cameras, or what it answers is none.
    """

    def __init__(self, folder: str, python: str, spec, execute: int, seed: int = 0, cameras: Mapping[str, str] | None = None):
        if not (Path(folder) / "config.json").is_file():
            raise UserError(f"--policy {PREFIX}{folder}: no policy folder of LeRobot (it has no config.json)")
        self.folder, self.python, self.spec, self.execute, self.asked = folder, python, spec, execute, 0
        self.seed = seed
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
        """Start the worker, which sees this package and `controllers` and nothing else of this environment."""
        root = Path(__file__).resolve().parents[2]
        for name in ("robo_rl", "controllers"):
            (self.place / name).symlink_to(root / name, target_is_directory=True)
        ours, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")}
        env = {"HF_HUB_OFFLINE": "1", **env, "PYTHONPATH": str(self.place), "PYTHONDONTWRITEBYTECODE": "1"}
        with (self.place / "stderr").open("wb") as log, theirs:
            self.process = subprocess.Popen([self.python, "-m", MODULE, str(Path(self.folder).resolve()), str(theirs.fileno())],
                                            env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs.fileno(),))
        return FrameSocket(ours)

    def _said(self, patience: float) -> tuple[dict, dict[str, np.ndarray]]:
        """The worker's next message. UserError: it says what went wrong, ends or says nothing."""
        self.wire.wire.settimeout(patience)
        try:
            message = self.wire.receive()
        except TimeoutError:
            raise UserError(f"the LeRobot policy {self.folder} says nothing for {patience:.0f} s") from None
        except OSError:
            message = None
        if message is None:
            raise UserError(f"the LeRobot policy {self.folder} ended ({self._last_words()})")
        if "error" in message[0]:
            raise UserError(f"the LeRobot policy {self.folder} in {self.python}: {plain_text(message[0]['error'])}")
        return message

    def _last_words(self) -> str:
        text = (self.place / "stderr").read_text(encoding="utf-8", errors="replace").strip()
        return plain_text(text.splitlines()[-1]) if text else "without a word"

    def _fitting(self, cameras: Mapping[str, str]) -> dict[str, str]:
        """{its camera: ours}; UserError naming what does not fit."""
        about, spec = self.about, self.spec
        if (about["state"], about["action"]) != (spec.state, spec.action):
            raise UserError(f"the LeRobot policy {self.folder} takes a state of {about['state']} numbers and gives {about['action']}, the "
                            f"env has {spec.state} and {spec.action}")
        found = {name: cameras.get(name, name) for name in about["views"]}
        if missing := [f"{name} (our {ours})" if name != ours else name for name, ours in found.items() if ours not in spec.views]:
            raise UserError(f"the LeRobot policy {self.folder} looks through {', '.join(missing)}, the env has "
                            f"{', '.join(spec.views) or 'no camera'}; say which is which: --lerobot-cameras NAME=CAMERA,…")
        if self.execute > about["horizon"]:
            why = "looks back, so it decides every step" if about["history"] else f"gives chunks of {about['horizon']} steps"
            raise UserError(f"the LeRobot policy {self.folder} {why}, the run executes {self.execute}: --execute {about['horizon']}")
        return found

    def reset(self) -> None:
        """Episodes begin."""
        self.wire.send({}, reset=True)

    def chunks(self, obs: Mapping, noise: np.ndarray | None = None) -> np.ndarray:
        """Whole chunks float32 [N,H,A], finite; noise [N,H,W]: what they grow from, for policies that can be given it."""
        tasks = [str(t) for t in obs["task"]]
        texts = sorted(set(tasks))
        arrays = {"state": np.asarray(obs["state"], np.float32)}
        arrays |= {f"image/{name}": np.asarray(obs[f"image/{ours}"], np.uint8) for name, ours in self.cameras.items()}
        arrays |= {} if noise is None else {"noise": np.asarray(noise, np.float32)}
        self.asked += 1
        with contextlib.suppress(OSError):  # it has gone: `_said` tells why
            self.wire.send(arrays, texts=texts, tasks=[texts.index(t) for t in tasks], seed=(self.seed * 1_000_003 + self.asked) % 2**31)
        actions = self._said(ANSWER)[1].get("actions")
        if actions is None or actions.ndim != 3 or (len(actions), actions.shape[2]) != (len(tasks), self.spec.action):
            raise UserError(f"the LeRobot policy {self.folder} gives no actions [{len(tasks)}, H, {self.spec.action}], got "
                            f"{'none' if actions is None else actions.shape}")
        if not np.isfinite(actions).all():
            raise UserError(f"the LeRobot policy {self.folder} gives actions that are not finite")
        return actions

    def __call__(self, obs: Mapping) -> np.ndarray:
        actions = self.chunks(obs)
        if actions.shape[1] < self.execute:
            raise UserError(f"the LeRobot policy {self.folder} gives chunks of {actions.shape[1]} steps, the run executes {self.execute}: "
                            f"--execute {actions.shape[1]}")
        return actions[:, :self.execute]

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
