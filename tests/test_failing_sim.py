"""A simulator of a user that raises now and then costs its open episodes, not the run; one that always does
ends it with its words."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from commands import robo_rl
from toys import PointReach

from robo_rl.experiment import evaluation
from robo_rl.experiment.config import TrainConfig
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.starts import CHOOSE

ENV = '''
import os
import gymnasium as gym
import numpy as np

from robo_rl.starts import EVAL_START


class Fails(gym.Env):
    """A point that is to come to 0. The step FAILS of each env fails; below 0: one step of an evaluation."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self):
        self.made, self.fails = 0, int(os.environ["FAILS"])

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.judged = seed is not None and seed >= EVAL_START
        self.x, self.t = self.np_random.uniform(-1, 1, 2).astype(np.float32), 0
        return self.x.copy(), {}

    def step(self, action):
        self.made, self.t = self.made + 1, self.t + 1
        if self.made == self.fails or self.fails < 0 and self.judged and not os.path.exists("failed"):
            open("failed", "w").close()
            raise RuntimeError("the solver diverged")
        self.x = np.clip(self.x + 0.3 * action, -9, 9).astype(np.float32)
        near = bool(np.abs(self.x).max() < 0.3)
        return self.x.copy(), -float(np.abs(self.x).sum()), near, self.t >= 12, {"is_success": near}


gym.register("Fails-v0", Fails, max_episode_steps=12)
'''
RUN = ["train", "--sim", "gym:failing:Fails-v0", "--envs", 2, "--workers", 0, "--no-video", "--out", "run"]
SMALL = [
    "--policy.hidden",
    8,
    "--policy.layers",
    1,
    "--eval-episodes",
    2,
    "--steps",
    256,
    "--eval-every",
    256,
]
ON = [*RUN, *SMALL, "--algo", "ppo", "--rl.decisions", 16, "--rl.minibatch", 16]
OFF = [*RUN, *SMALL, "--algo", "rlpd", "--rl.warmup", 64, "--rl.utd", 1, "--policy.critic-hidden", 8]


def run(place, command, fails):
    (place / "failing.py").write_text(ENV)
    done = robo_rl(place, *command, env={"FAILS": fails})
    log = place / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return done, rows


@pytest.mark.parametrize("command", [ON, OFF], ids=["on-policy", "from replay"])
def test_a_run_in_one_process_goes_on_where_its_simulator_failed(tmp_path, command):
    done, rows = run(tmp_path, command, "53")  # of each life
    assert done.code == 0, done
    assert done.err.count("the simulator ended and is started anew") == 1, "said once"
    assert "step of env 0 failed: RuntimeError: the solver diverged" in done.err
    assert rows[-1]["step"] >= 240 and "nothing was learnt" not in done.err


@pytest.mark.parametrize("command", [ON, OFF], ids=["on-policy", "from replay"])
def test_a_simulator_that_fails_before_its_first_decision_ends_the_run_at_once(tmp_path, command):
    done, rows = run(tmp_path, command, "1")
    assert done.code == 2 and "step of env 0 failed: RuntimeError: the solver diverged" in done.err
    assert "started anew" not in done.err


@pytest.mark.parametrize("command", [ON, OFF], ids=["on-policy", "from replay"])
def test_one_that_fails_all_the_time_ends_the_run_with_its_words_and_the_run_is_kept(tmp_path, command):
    done, rows = run(tmp_path, [*command, "--steps", "100000"], "9")
    assert done.code == 2 and "6 times by the same error" in done.err
    assert "the solver diverged" in done.err and "robo_rl train --resume run" in done.err


def test_an_evaluation_begins_anew_where_the_simulator_failed(tmp_path):
    whole, rows = run(tmp_path, ON, "0")
    assert whole.code == 0, whole
    (tmp_path / "run").rename(tmp_path / "whole")
    done, again = run(tmp_path, ON, "-1")
    assert done.code == 0 and "the evaluation begins anew" in done.err
    evals = [
        {p.name: json.loads(p.read_text())["return"] for p in (tmp_path / name / "evals").iterdir()}
        for name in ("whole", "run")
    ]
    assert evals[0] == evals[1]


class Diverges(PointReach):
    """Fails in its first life."""

    lives = 0

    def __init__(self):
        super().__init__(4)
        type(self).lives += 1
        self.fails = self.lives == 1

    def step(self, actions):
        if self.fails:
            raise RuntimeError("the solver diverged")
        return super().step(actions)

    def render(self):
        return np.zeros((self.num_envs, 8, 8, 3), np.uint8)


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """(an evaluator whose simulator fails in its first life, what it said)."""
    said = []
    report = SimpleNamespace(say=lambda text, *more: said.append(text), start=lambda *a: None, advance=print)
    monkeypatch.setattr(evaluation, "make_env", lambda config, n, render=False: Diverges())
    monkeypatch.setattr(Diverges, "lives", 0)
    return evaluation.Evaluator(TrainConfig(eval_episodes=4), tmp_path, report), said


def policy():
    small = PolicyOptions(horizon=2, execute=2, hidden=8, layers=1)
    return make_policy(small, ObsSpec(state=4, action=2, action_names=("x", "y")), 0)


def test_the_choice_of_noise_begins_anew_where_the_simulator_failed(judged):
    evaluator, said = judged
    assert 0 <= evaluator.success_under_noise(policy(), CHOOSE, lambda n: None) <= 1
    assert Diverges.lives == 2 and "the evaluation begins anew: the solver diverged" in said[0]


def test_a_simulator_that_fails_costs_the_video_and_not_the_run(judged, monkeypatch):
    evaluator, said = judged
    evaluator.film("sft", policy())
    assert said == ["no video: the solver diverged"]

    def mistake(*args):
        raise RuntimeError("of ours")

    monkeypatch.setattr(evaluation, "film", mistake)
    with pytest.raises(RuntimeError, match="of ours"):
        evaluator.film("sft", policy())
