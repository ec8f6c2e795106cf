"""`gym:ID,python=PATH`: Gymnasium envs that another Python steps."""

import ast
import json
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import robo_rl
from hypothesis import given
from hypothesis import strategies as st

from robo_rl.errors import LostDaemon, UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.envs import with_whole_path
from robo_rl.experiment.train import checked
from sims import gym_remote, gym_worker, make

ENV = """
import gymnasium as gym
import numpy as np

class Push(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    observation_space = gym.spaces.Dict([
        ("eye", gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)),
        ("button", gym.spaces.MultiBinary(2)),
        ("arm", gym.spaces.Dict({"q": gym.spaces.Box(-9, 9, (2,), float), "held": gym.spaces.Discrete(3)})),
    ])
    action_space = gym.spaces.Box(-2, 2, (2,))

    def __init__(self, far=3.0, fault="", render_mode=None):
        self.far, self.fault, self.render_mode, self.task_description = far, fault, render_mode, ""
        assert fault != "bare"
        if fault == "slow":
            import time; time.sleep(1.5)
        self.scene = np.ones(20_000_000, np.uint8) if fault == "large" else None

    def _seen(self):
        eye = np.full((8, 8, 3), int(20 * abs(self.q[0])) % 256, np.uint8)
        return {"eye": eye, "arm": {"q": self.q, "held": 1}, "button": np.array([1, 0], np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.q = self.np_random.uniform(-1, 1, 2)
        self.task_description = "push it " + ("left" if self.q[0] < 0 else "right")
        return self._seen(), {}

    def step(self, action):
        self.q = self.q + 0.3 * action
        if self.fault == "raise" and self.q[0] > 1:
            raise OSError("no license")
        if self.fault == "hang":
            import time; time.sleep(60)
        done = bool(abs(self.q[0]) > self.far)
        info = {"is_success": done, "won": float(done), "note": "text"}
        return self._seen(), -abs(self.q[0]), done, False, info

    def render(self):
        return np.full((6, 4, 3), 7, np.uint8)

    def expert_action(self):
        return np.array([2.0, -1.0])

class Blind(Push):
    metadata = {}

class Wrapped(gym.Wrapper):
    def __init__(self, render_mode=None):
        super().__init__(gym.make("push_here/Push-v0", render_mode=render_mode))
        self.control_hz = 25

gym.register("push_here/Push-v0", Push, max_episode_steps=9)
gym.register("push_here/Blind-v0", Blind, max_episode_steps=9)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module of envs, `push_here`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "push_here.py").write_text(ENV)
    yield tmp_path
    sys.modules.pop("push_here", None)


def remote(arguments="", id="push_here/Push-v0", **options) -> Any:
    return make(f"gym:{id}{arguments},python={sys.executable}", **options)


def test_they_are_the_envs_that_this_python_steps_bit_for_bit(here):
    options = {"num_envs": 3, "obs": "rgb", "image_size": 16, "render": True}
    ours: Any = make("gym:push_here/Push-v0,far=2.5", **options)
    theirs = remote(",far=2.5", **options)
    assert theirs.spec == ours.spec and theirs.spec.max_steps == 9 and theirs.spec.period == 0.05
    rng, over = np.random.default_rng(0), 0
    for env in (theirs, ours):
        env.reset(seed=5)
    for _ in range(14):
        actions = rng.uniform(-1, 1, (3, 2)).astype(np.float32)
        a, b = theirs.step(actions), ours.step(actions)
        for x, y in zip(a[:4], b[:4], strict=True):
            np.testing.assert_equal(x, y)
        np.testing.assert_array_equal(a[4]["success"], b[4]["success"])
        np.testing.assert_array_equal(theirs.expert_action(), ours.expert_action())
        if (done := a[2] | a[3]).any():
            over += int(done.sum())
            again = {"reset_mask": done, "starts": np.arange(3) + over}
            np.testing.assert_equal(theirs.reset(options=again), ours.reset(options=again))
    assert over > 2 and {"push it left", "push it right"} >= set(a[0]["task"])
    np.testing.assert_array_equal(theirs.render(), ours.render())
    theirs.close()


def test_a_class_ends_with_the_limit_of_steps_that_is_asked_for(here):
    env = remote(id="push_here:Push,far=99", num_envs=1, max_steps=4)
    env.reset(seed=0)
    assert [bool(env.step(np.zeros((1, 2)))[3][0]) for _ in range(4)] == [False, False, False, True]
    env.close()


@pytest.mark.parametrize(
    "id, fault",
    [
        (
            "push_here/Push-v0,far=1,python=no_such_python",
            "python=no_such_python: there is no such program; a",
        ),
        (f"push_here/Push-v0,colour=1,python={sys.executable}", "cannot be made in .*TypeError.*'colour'"),
        (
            f"push_here/Pull-v0,python={sys.executable}",
            "unknown id 'push_here/Pull-v0'. Nearest: push_here/P",
        ),
        (f"push_here:Pusch,python={sys.executable}", "Nearest: Push.*named gym:MODULE:ID, after the module"),
        (f"push_here:Push,fault=bare,python={sys.executable}", r'AssertionError: assert fault != "bare" \('),
        (f"no_such_module:Push-v0,python={sys.executable}", "cannot be made in .*ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_made_there_says_why(here, id, fault):
    with pytest.raises(UserError, match=fault):
        make(f"gym:{id}")


@pytest.mark.parametrize("python", ["", f",python={sys.executable}"])
def test_success_is_what_the_user_says_that_the_info_calls_so(here, python):
    won = {}
    for name in ("", ",success=won"):
        env = make(f"gym:push_here:Push,far=1.0{name}{python}", num_envs=4)
        env.reset(seed=0)
        won[name] = [env.step(np.full((4, 2), 0.5))[4]["success"] for _ in range(4)]
        env.close()
    assert np.array_equal(*won.values()) and np.any(won[""]) and not np.all(won[""])


@pytest.mark.parametrize("python", ["", f",python={sys.executable}"])
@pytest.mark.parametrize("id", ["push_here/Blind-v0", "push_here:Blind"])
def test_an_env_that_does_not_draw_says_so_before_it_is_made(here, id, python):
    with pytest.raises(UserError, match="it draws no pictures: 'rgb_array' is not among"):
        make(f"gym:{id}{python}", render=True)


@pytest.mark.parametrize("python", ["", f",python={sys.executable}"])
def test_a_class_of_wrappers_draws_what_its_env_draws_and_tells_its_period(here, python):
    env = make(f"gym:push_here:Wrapped{python}", render=True)
    assert env.spec.period == 1 / 25
    env.reset(seed=0)
    assert env.render()[0].tolist() == np.full((6, 4, 3), 7).tolist()
    env.close()


@pytest.mark.parametrize("python", ["", f",python={sys.executable}"])
def test_envs_that_memory_does_not_hold_are_refused_before_it_is_full(here, python):
    """Unlike the kernel, which would kill whoever asks for the next page."""
    with pytest.raises(
        UserError, match=r"cannot be made.*each env takes \d+ MB, and \d+ of 1000000 would fit: "
    ):
        make(f"gym:push_here/Push-v0,fault=large{python}", num_envs=1_000_000)


def test_envs_that_take_long_to_make_are_announced_once(here, monkeypatch):
    monkeypatch.setattr(gym_remote, "SLOW", 0.5)
    with pytest.warns(UserWarning) as said:
        remote(",fault=slow", num_envs=2).close()
    words = [str(w.message) for w in said if "being made" in str(w.message)]
    assert len(words) == 1 and "2 envs are being made, for more than 0.5 s" in words[0]


def test_what_the_first_reset_takes_counts_too(here, monkeypatch):
    monkeypatch.setattr(
        gym_worker,
        "memory",
        iter([(0, 900), (0, 900), (0, 900), (1000, 900), (2000, 800), (2500, 800)]).__next__,
    )
    env: Any = make("gym:push_here/Push-v0", num_envs=3)
    with pytest.raises(UserError, match="reset of env 1 failed: MemoryError: each env takes"):
        env.reset(seed=0)
    env.close()


def test_what_an_env_raises_there_names_it_and_its_line(here):
    env = remote(",fault=raise", num_envs=2)
    env.reset(seed=0)
    with pytest.raises(UserError, match=r"env \d failed: OSError: no license \(.*push_here.py, line 3\d\)"):
        for _ in range(9):
            env.step(np.ones((2, 2)))
    env.close()


def test_a_process_that_dies_or_hangs_is_a_lost_one(here, monkeypatch):
    env = remote(num_envs=1)
    env.reset(seed=0)
    os.kill(env._remote.process.pid, signal.SIGKILL)
    for _ in range(2):  # once more: it stays lost
        with pytest.raises(LostDaemon, match="its Python ended; it last printed"):
            env.step(np.zeros((1, 2)))
    env = remote(",fault=hang", num_envs=1)
    env.reset(seed=0)
    monkeypatch.setattr(gym_remote, "ANSWER", 1.5)
    monkeypatch.setattr(gym_remote, "LEAVE", 0.1)
    with pytest.raises(LostDaemon, match=r"gave no answer within 1.5 s"):
        env.step(np.zeros((1, 2)))
    assert env._remote.process.returncode is not None


def test_it_ends_with_us(here):
    """Also where we are killed, and where a process forked from us still has the socket."""
    code = f"""
import os, time
from sims import make
env = make('gym:push_here:Push,python={sys.executable}')
child = os.fork()
if child == 0:
    os.close(1), os.close(2), time.sleep(60), os._exit(0)
print(env._remote.process.pid, child, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": root()}
    )
    pid, child = map(int, done.stdout.split())
    end = time.monotonic() + 60
    while running(pid) and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    assert not running(pid)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def root() -> str:
    return str(Path(gym_worker.__file__).resolve().parents[1])


def test_a_run_learns_and_its_task_names_no_python(here):
    tiny = "--steps 200 --eval-episodes 2 --no-video --envs 4 --workers 0 --rl.decisions 4 --policy.hidden 16"
    sim = f"gym:push_here/Push-v0,python={sys.executable}"
    done = robo_rl(here, "train", "--sim", sim, *tiny.split(), "--out", "run")
    assert not done.code, done.err
    assert json.loads((here / "run" / "run.json").read_text())["config"]["sim"] == sim
    done = robo_rl(here, "eval", "run", "--episodes", "2")
    assert not done.code and "push it right" in done.out and sys.executable not in done.out
    facts = json.loads(next((here / "run").glob("eval-step*.json")).read_text())
    assert sys.executable not in json.dumps(facts)


def test_a_plan_counts_the_envs_of_the_other_python(here):
    sim = f"gym:push_here:Push,fault=large,python={sys.executable}"  # 20 MB each
    options = (
        "--plan --policy.hidden 16 --rl.decisions 4 --workers 0 --envs 8 --eval-envs 4 --eval-episodes 4"
    )
    done = robo_rl(here, "train", "--sim", sim, *options.split())
    assert not done.code, done.err
    rows = [line for line in done.out.splitlines() if "outside" in line]
    sizes = [float(row.split()[-2].replace(",", "")) for row in rows]
    assert [row.split(",")[0].strip() for row in rows] == ["4 envs of evaluations", "8 envs of rollouts"]
    assert 75 < sizes[1] - sizes[0] < 110  # four more of them


# ---- messages


leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.text(),
    st.sampled_from(
        [np.arange(6, dtype=np.int8).reshape(2, 3), np.zeros((0, 2)), np.float32(2.5), np.ones(2, bool)]
    ),
)
values = st.recursive(
    leaf, lambda v: st.one_of(st.lists(v), st.tuples(v, v), st.dictionaries(st.text(), v)), max_leaves=12
)


@given(values)
def test_a_message_is_what_was_packed(value):
    tree, body = split(gym_worker.pack(value))
    np.testing.assert_equal(gym_worker.unpack(tree, body), value)


def split(message: bytes) -> tuple[bytes, bytes]:
    n, m = struct.unpack("<II", message[:8])
    assert len(message) == 8 + n + m
    return message[8 : 8 + n], message[8 + n :]


@given(
    st.recursive(
        st.one_of(leaf.filter(lambda x: not hasattr(x, "dtype")), st.sampled_from("adlts")), st.lists
    ),
    st.binary(),
)
def test_what_is_no_message_is_a_value_error(tree, body):
    try:
        gym_worker.unpack(json.dumps(tree).encode(), body)
    except ValueError:
        pass
    else:
        assert tree[0] in "adlts"


@pytest.mark.parametrize(
    "tree",
    [b"\xff", b"[" * 100_000, b'["a", ["<f8", [2, -1]]]', b'["a", ["<f8", [1e400]]]', b'["a", ["O", [1]]]'],
)
def test_a_tree_of_nothing_is_a_value_error(tree):
    with pytest.raises(ValueError):
        gym_worker.unpack(tree, b"\0" * 8)


def test_the_other_side_is_python_3_8():
    ast.parse(Path(gym_worker.__file__).read_text(), feature_version=(3, 8))
    tree = ast.parse(Path(gym_worker.__file__).read_text())
    names = {
        n.module if isinstance(n, ast.ImportFrom) else n.names[0].name
        for n in ast.walk(tree)
        if isinstance(n, (ast.Import, ast.ImportFrom))
    }
    assert names <= set(sys.stdlib_module_names) | {"importlib.util", "numpy", "gymnasium"}


def test_a_run_keeps_the_program_from_the_root_on_so_that_it_resumes_from_any_folder(here):
    config = TrainConfig(sim=f"gym:push_here/Push-v0,far=1,python={os.path.relpath(sys.executable)}", task="")
    kept, env = checked(replace(config, demos="0", envs=2, workers=0))
    env.close()
    assert kept.sim == f"gym:push_here/Push-v0,far=1,python={sys.executable}"
    for sim in ("gym:a/B-v0,python=python3", "gym:B,python=~/env/bin/python,far=1", "mujoco"):
        assert with_whole_path(sim) == sim
    assert with_whole_path("gym:B,python=bin/py,far=1") == f"gym:B,python={here}/bin/py,far=1"
