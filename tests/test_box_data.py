"""Demonstrations that others recorded in the units of the Box of a Gymnasium env."""

import json

import datasets
import numpy as np
import pytest
from commands import robo_rl

from robo_rl import checkpoint
from robo_rl.data.reader import load
from robo_rl.demos import load_demos
from robo_rl.errors import UserError
from robo_rl.experiment.policy_server import load_actor
from sims import make

JOINTS = """
import gymnasium as gym
import numpy as np

class Six(gym.Env):
    control_hz = 30
    dt = 0.001
    observation_space = gym.spaces.Box(-180, 180, (6,))

    def __init__(self, most=90):
        self.action_space = gym.spaces.Box(-most, most, (6,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.q = np.zeros(6, np.float32)
        return self.q, {}

    def step(self, action):
        self.q = action.astype(np.float32)
        return self.q, 0.0, False, False, {"is_success": False}
"""


@pytest.fixture
def so100(tmp_path, monkeypatch):
    """A data set of six joints in degrees, in a folder with an env of six joints, `gym:six:Six`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "six.py").write_text(JOINTS)
    monkeypatch.syspath_prepend(tmp_path)
    return datasets.write(tmp_path / "so100", "so100", episodes=3, length=20, size=(32, 32), views=0)


def test_numbers_of_the_box_become_commands_and_a_warning_says_which_is_which(so100):
    env = make("gym:six:Six", num_envs=1, max_steps=20)
    assert env.spec.period == pytest.approx(1 / 30)  # of control, not of physics
    one = "its 2 instructions are learnt as one, 'six:Six'.* task_description"
    with (
        pytest.warns(UserWarning, match=r"actions \(shoulder_pan.pos, .* in this order .*-90 to 90, "),
        pytest.warns(UserWarning, match=one),
    ):
        told = load_demos(so100, env)
    recorded = load(so100)
    np.testing.assert_allclose(told.action, recorded.action / 90, atol=1e-6)
    assert told.tasks == [env.reset(seed=0)[0]["task"][0]] and told.task_index.max() == 0
    assert np.abs(recorded.action).max() > 70 and told.features.action == env.spec.action_names


@pytest.mark.filterwarnings("ignore:data set")
def test_an_env_that_describes_its_task_keeps_the_instructions_of_the_data(so100):
    told = JOINTS.replace("self.q = np.zeros", "self.task_description = f'pick {seed}'; self.q = np.zeros")
    told = told.replace("self.action_space =", "self.task_description = ''; self.action_space =")
    (so100.parent / "told_six.py").write_text(told)
    env = make("gym:told_six:Six", num_envs=2, max_steps=20)
    obs, _ = env.reset(options={"reset_mask": np.ones(2, bool), "starts": np.array([3, 1234567])})
    assert obs["task"].tolist() == ["pick 3", "pick 1234567"]
    obs, _ = env.reset(options={"reset_mask": np.array([True, False]), "starts": np.array([5, 0])})
    assert obs["task"].tolist() == ["pick 5", "pick 1234567"]
    assert load_demos(so100, env).tasks == ["pick the lego brick", "put it into the bin"]


@pytest.mark.filterwarnings("ignore:data set")
def test_numbers_beyond_the_box_are_refused_but_for_a_few_which_are_cut(so100):
    with pytest.raises(
        UserError, match=r"'\w+.pos' goes from -?\d.* the action \d of the env from -20 to 20"
    ):
        load_demos(so100, make("gym:six:Six,most=20", num_envs=1))
    most = float(np.sort(np.abs(load(so100).action), 0)[-1].max()) - 0.001  # one number lies beyond
    told = load_demos(so100, make(f"gym:six:Six,most={most}", num_envs=1))
    assert np.abs(told.action).max() == 1


def test_a_run_of_them_is_scored_and_served_in_their_units(so100):
    tiny = "--policy.horizon 4 --policy.execute 2 --policy.hidden 32 --bc.updates 3 --workers 0 --no-video"
    train = "train --sim gym:six:Six --max-steps 20 --algo bc --demos so100 --eval-episodes 2 --out run"
    done = robo_rl(so100.parent, *train.split(), *tiny.split())
    assert "in this order and in its units (-90 to 90," in done.err
    facts = json.loads((so100.parent / "run" / "dataset.json").read_text())
    assert facts["command_high"] == [90] * 6 and facts["action"][5] == "gripper.pos"
    act, _, spec = load_actor("run", "best", seed=0, robot=True)
    commands, _, _ = load_actor("run", "best", seed=0)
    obs = {"state": np.zeros(6, np.float32), "task": "pick the lego brick"}
    in_degrees = 90 * np.clip(commands.many([obs])[0], -1, 1)
    np.testing.assert_allclose(act.many([obs])[0], in_degrees, atol=1e-4)
    assert spec.action_names[0] == "shoulder_pan.pos"
    scored = robo_rl(so100.parent, "eval", "run", "--demos", "so100")
    assert not scored.code, scored.err
    told = json.loads(next((so100.parent / "run").glob("eval-*so100*.json")).read_text())
    policy, _ = checkpoint.load_policy(so100.parent / "run" / "checkpoints" / told["checkpoint"])
    assert policy.spec.action_names == tuple(f"action{i}" for i in range(6))
    # a policy that learnt little errs about as much as the mean action; its commands are 90 times as small
    assert 0.8 < told["error"] < 3 and told["axes"][0]["error"] > 5
