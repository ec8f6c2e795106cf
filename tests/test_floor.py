"""A run does not end below the policy that RL began with: it says so, goes back, and takes smaller steps."""

import json
import re

import numpy as np
import pytest
import torch
from commands import robo_rl
from test_selection import Told

from robo_rl import checkpoint, files
from robo_rl.algos import nft, pi_rl
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.onpolicy import RETURNS, go_back
from robo_rl.experiment.run import Run
from robo_rl.options import NftOptions, PiRlOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.starts import REPORT

N = 100
SMALL = PolicyOptions(horizon=4, execute=4, hidden=16, layers=2)


class Scripted(Run):
    """A Run whose evaluations find as many successes of N as `finds` says, by step; the first starts are the
    easy ones."""

    finds: dict[int, int] = {}

    def evaluate(self, label, which=REPORT, policy=None, step=None):
        result = {"success": [int(i < self.finds[self.step]) for i in range(N)], "return": [0.0] * N, "n": N}
        (self.folder / "evals").mkdir(exist_ok=True)
        files.write_json(self.folder / "evals" / f"{label}.json", result | {"step": self.step})
        return result


def run_of(folder, algo="pi_rl", **finds):
    """(run after its supervised stage, learner)"""
    module, options = {"pi_rl": (pi_rl, PiRlOptions()), "nft": (nft, NftOptions())}[algo]
    run = Scripted(TrainConfig(algo=algo, rl=options, policy=SMALL, video=False), folder, None, Told())
    run.finds = {int(k[1:]): v for k, v in finds.items()}
    run.policy = make_policy(SMALL, ObsSpec(state=4, action=2), 0)
    run.look()
    run.save({}, False)
    return run, module.make(run.policy, options, 0)


def moved(run, learner, step):
    """As if RL had moved the weights to those of `step`, looked, and saved."""
    run.step = step
    for p in run.policy.parameters():
        p.data.fill_(step / 1000)
    run.look()
    back = go_back(run, learner)
    run.save({"learner": learner.state_dict()}, False)
    return back


def weights(policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


@pytest.mark.parametrize("algo", ["pi_rl", "nft"])
def test_a_run_that_fell_goes_back_to_its_best_checkpoint_with_steps_of_half_the_size(algo, tmp_path):
    run, learner = run_of(tmp_path, algo, s0=60, s1=70, s2=30, s3=75)
    assert not moved(run, learner, 1)
    assert moved(run, learner, 2)
    assert weights(run.policy).unique().tolist() == pytest.approx([0.001])  # those of step 1, the best so far
    assert learner.step_scale == 0.5 and run.returns == [(2, 1)]
    assert "-0.300" in run.report.said[-1] and "of step 1" in run.report.said[-1]
    assert not moved(run, learner, 3) and learner.step_scale == 0.5


def test_a_run_without_a_better_checkpoint_goes_back_to_its_supervised_policy_and_a_fresh_learner(tmp_path):
    run, learner = run_of(tmp_path, s0=60, s1=20)
    start = weights(run.policy)
    learner.iteration = 7
    assert moved(run, learner, 1)
    assert torch.equal(weights(run.policy), start)
    assert learner.iteration == 0 and learner.step_scale == 0.5


def test_rl_after_rounds_of_own_successes_is_measured_against_what_they_made(tmp_path):
    run, learner = run_of(tmp_path, s0=30, s1=80, s2=50, s3=50)
    moved(run, learner, 1)
    run.rl_from = 1
    assert not run.fallen()  # nothing of RL has been looked at
    assert moved(run, learner, 2) and run.returns == [(2, 1)]  # better than supervision, worse than its start
    assert weights(run.policy).unique().tolist() == pytest.approx([0.001])
    assert checkpoint.load_train(checkpoint.checkpoints(tmp_path)[-1])[1]["rl_from"] == 1
    run.rl_from = 0
    assert not moved(run, learner, 3)


def test_a_difference_that_chance_may_have_made_changes_nothing(tmp_path):
    run, learner = run_of(tmp_path, s0=60, s1=58)
    assert not moved(run, learner, 1) and run.returns == [] and learner.step_scale == 1.0


def test_a_run_goes_back_so_often_and_no_more_and_still_ends_with_the_best(tmp_path):
    run, learner = run_of(tmp_path, s0=60, **{f"s{i}": 20 for i in range(1, RETURNS + 3)})
    start = weights(run.policy)
    assert [moved(run, learner, i) for i in range(1, RETURNS + 2)] == [True] * RETURNS + [False]
    assert learner.step_scale == 0.5**RETURNS
    run.step = RETURNS + 2
    run.judge_final()
    assert torch.equal(weights(run.policy), start)
    assert "the run ends with" in run.report.said[-1]


def test_a_resumed_run_knows_its_returns_and_does_not_repeat_them(tmp_path):
    run, learner = run_of(tmp_path, s0=60, s1=20)
    moved(run, learner, 1)
    state, meta = checkpoint.load_train(checkpoint.checkpoints(tmp_path)[-1])
    assert meta["returns"] == [[1, 0]] and state["learner"]["step_scale"] == 0.5
    run.returns = [tuple(x) for x in meta["returns"]]
    assert run.fallen() is None


def test_a_learner_that_cannot_take_smaller_steps_is_not_set_back_but_the_run_ends_with_the_best(tmp_path):
    class Own:
        def state_dict(self):
            return {}

    run, _ = run_of(tmp_path, s0=60, s1=20)
    start = weights(run.policy)
    run.step = 1
    for p in run.policy.parameters():
        p.data.fill_(1.0)
    run.look()
    assert not go_back(run, Own())
    run.judge_final()
    assert torch.equal(weights(run.policy), start)


def test_a_method_that_is_made_to_fail_ends_no_worse_than_it_began_and_the_report_says_so(tmp_path):
    done = robo_rl(
        tmp_path,
        "train",
        "--task",
        "reach",
        "--envs",
        32,
        "--steps",
        9000,
        "--eval-every",
        2000,
        "--eval-episodes",
        40,
        "--demos",
        20,
        "--bc.updates",
        500,
        "--policy.hidden",
        64,
        "--rl.lr",
        0.3,
        "--rl.trust-kl",
        0,
        "--rl.critic-warmup",
        0,
        "--rl.decisions",
        8,
        "--rl.minibatch",
        64,
        "--threads",
        1,
        "--workers",
        0,
        "--no-video",
        "--out",
        "run",
    )
    assert done.code == 0, done.err
    run = tmp_path / "run"
    said = re.findall(r"success fell below that of the policy that RL began with.*", done.err)
    assert said and "of step" in said[0]
    first, last = (json.loads((run / "evals" / f"{x}.json").read_text())["success"] for x in ("sft", "final"))
    assert np.mean(first) > 0.3  # there was something to lose
    assert np.mean(last) >= np.mean(first) - 0.15
    found = json.loads((run / "health.json").read_text())["findings"]
    assert any(f["metric"] == "returns" for f in found)
    assert robo_rl(tmp_path, "report", "run").code == 0
    assert "returns to the best checkpoint" in (run / "report.html").read_text()
