"""A task that knows no success, as locomotion: whatever would tell success tells the return in its place."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from commands import robo_rl

from robo_rl.evaluation import evaluate
from robo_rl.experiment.api import EvalResult, TrainResult, resume
from robo_rl.experiment.api import evaluate as evaluate_policy
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.reporting import Reporter
from robo_rl.experiment.run import Run
from robo_rl.film import LONGEST, FilmedEnv, filmed_steps
from robo_rl.log import read_metrics
from robo_rl.results import run_rows
from robo_rl.stats import bootstrap_mean
from sims import make
from sims.mujoco.locomotion import LocomotionEnv

SIZES = ("--envs", 8, "--rl.decisions", 30, "--max-steps", 20, "--threads", 1, "--eval-episodes", 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder of a finished run of HalfCheetah, what its training said)"""
    folder = tmp_path_factory.mktemp("locomotion")
    words = ("train", "--task", "HalfCheetah-v5", "--algo", "ppo", "--steps", 480, *SIZES, "--out", "run")
    said = robo_rl(folder, *words, "--eval-every", 240, "--workers", 0, "--no-video")
    assert said.code == 0, said
    return folder, said.err


def test_training_says_the_return_on_every_line_and_no_success(run):
    folder, said = run
    lines = [line for line in said.splitlines() if "95 % interval" in line]
    assert len(lines) >= 3 and all("return" in line and "success" not in line for line in lines), said
    assert said.count("gives no success") == 1, said
    (progress,) = (line for line in said.splitlines() if line.startswith("[rl] 100 % · 480/480 steps in"))
    assert "return" in progress and "success" not in progress
    assert not [name for name in read_metrics(folder / "run") if "success" in name]


def test_an_evaluation_its_comparison_and_the_page_tell_the_return(run):
    folder, _ = run
    said = robo_rl(folder, "eval", "run", "--episodes", 6, "--against", "run")
    assert said.code == 0 and "mean return" in said.out and "  success " not in said.out, said
    assert "difference to run" in said.out and "+0.00  95 % interval [+0.00, +0.00]" in said.out
    document = json.loads(robo_rl(folder, "eval", "run", "--episodes", 6, "--json").out)
    assert document["success_rate"] is None and document["no_success"]
    assert document["return_low"] <= document["return_mean"] <= document["return_high"]
    said = robo_rl(folder, "report", "run")
    assert said.code == 0 and said.out.startswith("mean return"), said
    page = (folder / "run" / "report.html").read_text()
    assert "mean return" in page and "<h2>Return</h2>" in page
    assert "% success" not in page and "<h2>Success" not in page


def test_from_python_and_in_the_results_it_is_the_return(run):
    folder, _ = run
    final = json.loads((folder / "run" / "evals" / "final.json").read_text())
    value, *ends = bootstrap_mean(final["return"])
    row = run_rows(folder / "run")[0]
    assert row.what == "ppo, mujoco HalfCheetah-v5: return after online RL"
    assert (row.value, row.unit) == (value, "")
    assert row.interval == tuple(ends) and "bootstrap" in row.interval_is
    result = resume(folder / "run", quiet=True)
    assert isinstance(result, TrainResult) and (result.success, result.mean_return) == (None, value)
    env = make("mujoco", "HalfCheetah-v5", 4, max_steps=20)

    def still(obs):
        return np.zeros((4, 6), np.float32)

    got = evaluate_policy(still, env, 4)
    assert isinstance(got, EvalResult) and np.isnan(got.success_rate) and str(got).startswith("mean return")
    assert got.minus(got) == (0.0, 0.0, 0.0)


LAP = """
import gymnasium as gym
import numpy as np


class Lap(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), -abs(action[0]), False, self.t == 10, {}
"""


def test_beside_workers_no_success_is_told_of_an_env_of_ones_own_before_its_first_evaluation(tmp_path):
    (tmp_path / "mine.py").write_text(LAP)
    words = ("train", "--sim", "gym:mine:Lap", "--algo", "ppo", "--steps", 480, *SIZES, "--out", "run")
    said = robo_rl(tmp_path, *words, "--workers", 1, "--eval-every", 480, "--no-video")
    assert said.code == 0, said
    first, *progress = [line for line in said.err.splitlines() if line.startswith("[rl]")]
    assert "learns after each 240 steps" in first and "success" not in first
    assert "return" in progress[-1] and not any("success" in line for line in progress), said.err
    assert not [name for name in read_metrics(tmp_path / "run") if "success" in name]


def test_success_of_workers_envs_is_told_from_the_first_one_on(tmp_path):
    env = SimpleNamespace(reports_success=None)  # no one has stepped it
    run = Run(TrainConfig(), tmp_path, env, Reporter(quiet=True))
    told = []
    for rate in (0.0, 0.5, 0.0):
        run.drop_unknown_success(stats := {"success": rate})
        told.append(stats)
    assert told == [{}, {"success": 0.5}, {"success": 0.0}]


OUT_OF_REACH = """
import ctypes

import gymnasium as gym
import numpy as np


class Far(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, key="is_success"):
        self.key = key

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        print("what an env says of itself")
        ctypes.CDLL(None).puts(b"what its library says")
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self.t += 1
        seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return seen, 0.0, False, self.t == 4, {self.key: False, "n": self.t}


class Shown(Far):
    def expert_action(self):
        return np.zeros(1)
"""


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """(folder of a finished run in which nothing ever succeeds, what its training said)"""
    folder = tmp_path_factory.mktemp("far")
    (folder / "far.py").write_text(OUT_OF_REACH)
    words = ("train", "--sim", "gym:far:Shown", "--algo", "ppo", "--steps", 1200, *SIZES, "--out", "run")
    said = robo_rl(folder, *words, "--workers", 0, "--no-video")
    assert said.code == 0, said
    return folder, said.err


def test_a_run_in_which_nothing_succeeds_says_what_helps(far):
    said = far[1]
    assert said.count("the env has an expert: --demos 20 learns from its successes first") == 1, said
    assert "warning: episodes from the first on with one return" in said, said
    assert "no episode of an evaluation succeeded. What helps: --demos 20" in said, said


def test_json_is_one_document_whatever_an_env_prints(far):
    said = robo_rl(far[0], "eval", "run", "--episodes", 2, "--json")
    assert json.loads(said.out)["success_rate"] == 0 and "of itself" in said.err
    assert "its library says" in said.err


def test_a_check_says_that_an_env_gives_no_success_and_what_its_info_has_in_its_place(far):
    said = robo_rl(far[0], "check", "--sim", "gym:far:Far,key=solved")
    assert said.code == 0 and "gives no success" in said.err, said
    assert (
        "Its info has 'solved': is one of them success, end the name of the sim with ,success=NAME"
        in said.err
    )
    assert "gives no success" not in robo_rl(far[0], "check", "--sim", "gym:far:Far").err


def test_success_may_have_another_name(far):
    said = robo_rl(far[0], "check", "--sim", "gym:far:Far,key=solved,success=solved")
    assert said.code == 0 and "gives no success" not in said.err, said
    said = robo_rl(far[0], "check", "--sim", "gym:far:Far,key=solved,success=solvd")
    assert said.code == 2 and "success=solvd: the info of no step of an episode has it" in said.err, said
    assert "true or false in the last one: solved" in said.err


def test_a_recording_says_that_its_env_gives_no_success(far):
    words = ("collect", "--policy", "random", "--episodes", 1, "--sim")
    said = robo_rl(far[0], *words, "gym:far:Far,key=solved", "--out", "solved")
    assert (
        said.code == 0 and "in the data set all its episodes are failures. Its info has 'solved'" in said.err
    )
    assert "gives no success" not in robo_rl(far[0], *words, "gym:far:Far", "--out", "plain").err


class Grey(LocomotionEnv):
    """Locomotion with a grey picture, which costs nothing."""

    drawn = 0

    def studio(self, ids=None):
        self.drawn += 1
        return np.full((len(ids), 480, 640, 3), 120, np.uint8)


def test_a_long_episode_is_filmed_for_its_first_seconds_and_not_judged():
    env, steps = Grey("HalfCheetah-v5", 1), []
    assert filmed_steps(env.spec) == LONGEST / env.spec.period < env.spec.max_steps
    filmed = FilmedEnv(env, 1, steps.append)
    evaluate(filmed, lambda obs: np.zeros((1, 6), np.float32), np.arange(1))
    assert steps[-1] == filmed_steps(env.spec) == len(steps) and not filmed.takes[0].judged
    assert env.drawn == len(filmed.takes[0].pictures) == 1 + len(steps) // filmed.every
