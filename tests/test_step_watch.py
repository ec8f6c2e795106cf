"""A simulator whose step never returns, in the process that trains: that is told, and the wait ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STUCK = """
import ctypes, time
import gymnasium as gym
import numpy as np

class Stuck(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.n += 1
        while self.n == 9:
            WAIT
        return np.zeros(3, np.float32), 0.0, False, False, {}

gym.register("Stuck-v0", entry_point=Stuck, max_episode_steps=50)
"""
IN_PYTHON, IN_C = "time.sleep(1000)", "ctypes.CDLL(None).sleep(1000)"  # C code that no signal handler reaches


def training(folder: Path, wait: str, hang: float) -> subprocess.Popen:
    """`robo_rl train` in an env whose ninth step waits."""
    (folder / "stuck.py").write_text(STUCK.replace("WAIT", wait))
    words = f"train --sim gym:stuck:Stuck-v0 --algo ppo --envs 2 --workers 0 --hang {hang} --rl.decisions 32"
    return subprocess.Popen(
        [sys.executable, "-m", "robo_rl", *words.split(), "--steps", "1000", "--no-video", "--out", "run"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_step_that_never_returns_is_told_and_the_run_ends_with_a_line(tmp_path):
    out, err = training(tmp_path, IN_PYTHON, 1.0).communicate(timeout=120)
    told = [line for line in err.splitlines() if "takes long" in line]
    assert len(told) == 1 and "warning: step of gym:stuck:Stuck-v0 takes long, 1 s so far, in" in told[0], err
    assert "stuck.py, line 16; Ctrl-C ends the wait" in told[0], err
    last = err.splitlines()[-1]
    assert last.startswith("robo_rl: step of gym:stuck:Stuck-v0 has not returned for 1"), err
    assert last.endswith("go on with: robo_rl train --resume run") and "Traceback" not in err and not out


@pytest.mark.parametrize("wait", [IN_PYTHON, IN_C])
def test_ctrl_c_ends_a_run_whose_simulator_hangs(wait, tmp_path):
    process = training(tmp_path, wait, 1.0)
    deadline, err = time.monotonic() + 100, ""
    while "takes long" not in err and time.monotonic() < deadline:
        err += process.stderr.readline()
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=100)[1]  # the step waits for ten times as long
    assert process.returncode == 130, rest
    assert "robo_rl: interrupted; step of gym:stuck:Stuck-v0 had not returned" in rest, rest
    assert "Traceback" not in rest
