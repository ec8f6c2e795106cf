"""Envs made elsewhere keep our contract: Gymnasium ids, envpool ids, Isaac Gym and Isaac Lab (on fakes)."""

import importlib.util
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import sims
from robo_rl.errors import MissingDependency, UserError
from sims.check import check_env
from sims.envpool import make_envpool
from sims.gym import make_gym

# ---------------------------------------------------------------- gym:<id>


class Goal(gym.Env):
    """Dict observations, 2 x 1 actions in [0, 4], success in info; ends when the goal is reached."""

    observation_space = spaces.Dict({"observation": spaces.Box(-9, 9, (2,)), "desired_goal": spaces.Box(-9, 9, (1,))})
    action_space = spaces.Box(0, 4, (2, 1))
    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.goal = np.zeros(2), self.np_random.uniform(5, 9)
        return self._obs(), {}

    def step(self, action):
        assert action.shape == (2, 1) and self.action_space.contains(action)
        self.x = self.x + action[:, 0]
        done = self.x.sum() > self.goal
        return self._obs(), -float(done), done, False, {"is_success": float(done)}

    def render(self):
        return np.full((8, 9, 3), int(self.x.sum()), np.uint8)

    def _obs(self):
        return {"observation": self.x.astype(np.float32), "desired_goal": np.array([self.goal], np.float32)}


gym.register("RoboRlGoal-v0", Goal, max_episode_steps=2)


@pytest.mark.parametrize("id", ["Pendulum-v1", "MountainCarContinuous-v0", "RoboRlGoal-v0", "InvertedPendulum-v5"])
def test_a_gymnasium_id_keeps_the_contract(id):
    parts = check_env(lambda n: make_gym(id, num_envs=n, max_steps=25))
    assert "starts" in parts and "snapshot" not in parts


def test_a_gymnasium_env_renders():
    assert "render" in check_env(lambda n: make_gym("RoboRlGoal-v0", num_envs=n, max_steps=5, render=True))
    with pytest.raises(UserError, match="render=True"):
        make_gym("RoboRlGoal-v0").render()


def test_an_episode_is_gymnasiums_own():
    env, ref = sims.make("gym:Pendulum-v1", num_envs=2), gym.make("Pendulum-v1")
    obs, _ = env.reset(options={"starts": np.array([3, 4])})
    x, _ = ref.reset(seed=4)
    np.testing.assert_array_equal(obs["state"][1], x)
    for t in range(200):
        a = np.float32(np.sin(t))
        obs, reward, _, truncated, _ = env.step(np.full((2, 1), a))
        x, r, _, cut, _ = ref.step(np.array([2 * a], np.float32))  # the Box is [-2, 2]
        np.testing.assert_allclose(obs["state"][1], x, rtol=1e-5, atol=1e-5)
        assert reward[1] == pytest.approx(r, rel=1e-4, abs=1e-5) and truncated[1] == cut
    assert truncated.all() and env.spec.period == 0.05 and env.spec.max_steps == 200


def test_dict_observations_are_flattened_and_success_is_the_envs():
    env = make_gym("RoboRlGoal-v0", num_envs=3, max_steps=9)
    obs, _ = env.reset(seed=0)
    assert env.spec.state_names == ("desired_goal0", "observation0", "observation1")
    assert (obs["state"][:, 0] > 4).all() and (obs["state"][:, 1:] == 0).all()
    obs, *_, info = env.step(np.array([[-1, 1], [0, 0], [-1, -1]], np.float32))
    assert obs["state"][:, 1:].tolist() == [[0, 4], [2, 2], [0, 0]] and not info["success"].any()
    for _ in range(4):
        *_, terminated, truncated, info = env.step(np.array([[1, 1], [1, 1], [-1, -1]], np.float32))
    assert info["success"].tolist() == terminated.tolist() == [True, True, False] and not truncated.any()


@pytest.mark.parametrize("id, fault", [
    ("Pendulm-v1", r"unknown gym id 'Pendulm-v1'. Nearest: Pendulum-v1"),
    ("Pendulum-v99", r"unknown gym id 'Pendulum-v99'. Nearest: Pendulum-v1"),
    ("CartPole-v1", r"Discrete actions; only continuous \(Box\) actions"),
    ("no_such_module:Env-v0", "needs the module 'no_such_module'"),
    ("", "needs an id after the colon"),
])
def test_a_gymnasium_id_that_cannot_be_used_says_why(id, fault):
    with pytest.raises(UserError, match=fault):
        make_gym(id)


@pytest.mark.parametrize("options, fault", [
    ({"obs": "rgb"}, "obs 'state' only"), ({"reward": "sparse"}, "own reward"), ({"control": "x"}, "own control"),
    ({"randomise": "mass"}, "no randomise"), ({"device": "cuda"}, "'cpu' only"), ({"max_steps": -1}, ">= 0"),
])
def test_options_a_gymnasium_env_has_not_are_refused(options, fault):
    with pytest.raises(UserError, match=fault):
        make_gym("Pendulum-v1", **options)


def test_an_absent_dependency_of_a_gymnasium_env_is_named():
    try:
        import Box2D  # noqa: F401
        pytest.skip("Box2D is installed")
    except ImportError:
        pass
    with pytest.raises(MissingDependency, match="pip install"):
        make_gym("BipedalWalker-v3")


# ---------------------------------------------------------------- envpool:<id>


needs_envpool = pytest.mark.skipif(importlib.util.find_spec("envpool") is None,
                                   reason="needs pip install 'robo_rl[envpool]'")


@needs_envpool
@pytest.mark.parametrize("id", ["Hopper-v5", "Pendulum-v1", pytest.param("FetchReach-v4", marks=pytest.mark.slow),
                                pytest.param("MetaWorld/Reach-v3", marks=pytest.mark.slow)])
def test_an_envpool_id_keeps_the_contract(id):
    parts = check_env(lambda n: make_envpool(id, num_envs=n, max_steps=12, threads=1))
    assert "starts" in parts and "snapshot" not in parts


@needs_envpool
def test_envs_reset_by_start_join_the_others_again():
    env = make_envpool("Pendulum-v1", num_envs=3, threads=1)
    env.reset(seed=0)
    for i in range(3):  # each env ends up in a pool of its own
        env.reset(options={"starts": np.full(3, 10 + i), "reset_mask": np.arange(3) == i})
    assert len(env._pools) == 3
    a = env.step(np.ones((3, 1)))[0]["state"]
    env.reset(options={"starts": np.array([10, 11, 12])})
    assert len(env._pools) == 1
    np.testing.assert_array_equal(env.step(np.ones((3, 1)))[0]["state"], a)


@needs_envpool
def test_actions_are_stretched_to_envpools_box():
    env = make_envpool("Pendulum-v1", num_envs=2, threads=1)
    env.reset(options={"starts": np.array([1, 1])})
    import envpool
    raw = envpool.make("Pendulum-v1", "gymnasium", num_envs=1, env_seed=[1])
    raw.reset()
    obs, reward, *_ = env.step(np.array([[0.5], [1.0]]))
    x, r, *_ = raw.step(np.array([[1.0]]))
    np.testing.assert_array_equal(obs["state"][0], x[0].astype(np.float32))
    assert reward[0] == np.float32(r[0]) and not np.array_equal(obs["state"][0], obs["state"][1])


@needs_envpool
@pytest.mark.parametrize("id, fault", [
    ("Hoper-v5", "unknown envpool id 'Hoper-v5'. Nearest: Hopper-v5"),
    ("CartPole-v1", r"Discrete actions; only continuous \(Box\) actions"),
    ("", "needs an id after the colon"),
])
def test_an_envpool_id_that_cannot_be_used_says_why(id, fault):
    with pytest.raises(UserError, match=fault):
        make_envpool(id)


def test_an_absent_envpool_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'robo_rl\[envpool\]'"):
        sims.make("envpool:Hopper-v5")


def test_envpool_does_not_render():
    with pytest.raises(UserError, match="cannot render"):
        make_envpool("Hopper-v5", render=True)
