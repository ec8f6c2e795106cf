"""Envs made elsewhere keep our contract: Gymnasium ids, envpool ids, Isaac Gym and Isaac Lab (on fakes)."""

import ast
import importlib.util
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import sims
from robo_rl.demos import check_expert
from robo_rl.errors import MissingDependency, UserError
from robo_rl.evaluation import evaluate
from robo_rl.experiment.check import CheckOptions, check
from robo_rl.film import film
from robo_rl.types import has_success
from sims.check import check_env
from sims.envpool import make_envpool
from sims.gym import make_gym
from sims.isaac import make_isaac
from sims.isaac.protocols import IsaacGymVecTask, IsaacLabEnv

# ---------------------------------------------------------------- gym:<id>


class Goal(gym.Env):
    """Dict observations, 2 x 1 actions in [0, 4], success in info; ends when the goal is reached."""

    observation_space = spaces.Dict(
        {"observation": spaces.Box(-9, 9, (2,)), "desired_goal": spaces.Box(-9, 9, (1,))}
    )
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
gym.register("RoboRlMany-v0", vector_entry_point=lambda num_envs: None)


@pytest.mark.parametrize(
    "id", ["Pendulum-v1", "MountainCarContinuous-v0", "RoboRlGoal-v0", "InvertedPendulum-v5"]
)
def test_a_gymnasium_id_keeps_the_contract(id):
    parts = check_env(lambda n: make_gym(id, num_envs=n, max_steps=25))
    assert "starts" in parts and "snapshot" not in parts


def test_a_gymnasium_env_that_is_closed_says_so():
    env = make_gym("RoboRlGoal-v0", num_envs=2)
    env.reset(seed=0)
    env.close()
    for call in (lambda: env.step(np.zeros((2, 2))), env.reset):
        with pytest.raises(UserError, match="gym:RoboRlGoal-v0: this env is closed"):
            call()


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


def test_an_end_on_the_last_step_is_a_termination():
    env = make_gym("RoboRlGoal-v0", num_envs=8)  # every goal is reached by the second step, which is the last
    env.reset(seed=0)
    for _ in range(2):
        *_, terminated, truncated, _ = env.step(np.full((8, 2), 0.2))
    assert terminated.all() and not truncated.any()


@pytest.mark.parametrize(
    "id, fault",
    [
        ("Pendulm-v1", r"unknown gym id 'Pendulm-v1'. Nearest: Pendulum-v1"),
        ("Pendulum-v99", r"unknown gym id 'Pendulum-v99'. Nearest: Pendulum-v1"),
        ("CartPole-v1", r"Discrete actions; only continuous \(Box\) actions are supported; a gymnasium"),
        (
            "no_such_module:Env-v0",
            "there is no module .no_such_module.*in the folder that holds it.*another Python.*python=PATH",
        ),
        (
            "RoboRlMany-v0",
            "gym:RoboRlMany-v0 is a vector env: make it in a function, and say --sim MODULE:NAME",
        ),
        ("OwnEnv-v0", "an env of your own or of another package is named gym:MODULE:ID"),
        ("", "needs an id after the colon"),
    ],
)
def test_a_gymnasium_id_that_cannot_be_used_says_why(id, fault):
    with pytest.raises(UserError, match=fault):
        make_gym(id)


@pytest.mark.parametrize(
    "options, fault",
    [
        ({"obs": "rgb"}, "no pictures among its observations"),
        ({"control": "x"}, "own control"),
        ({"randomise": "mass"}, "no randomise"),
        ({"device": "cuda"}, "'cpu' only"),
        ({"max_steps": -1}, ">= 0"),
    ],
)
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


class Faulty(gym.Env):
    """Does in its second step what `fault` says; observes float64, says nothing of success."""

    observation_space, action_space = (
        spaces.Dict({"x": spaces.Box(-9, 9, (2,), np.float64)}),
        spaces.Box(-2, 2, (1,), np.float64),
    )

    def __init__(self, fault=""):
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fault == "reset":
            raise OSError("no power")
        self.steps = 0
        return {"x": np.zeros(2)}, {}

    def step(self, action):
        self.steps += 1
        fault = self.fault if self.steps == 2 else ""
        if fault == "raises":
            raise RuntimeError("motor 3 is\nhot")
        x = np.full(3 if fault == "size" else 2, np.nan if fault in ("nan", "fall") else 1.0)
        reward = np.nan if fault in ("reward", "fall") else -1.0
        return (
            {"y" if fault == "key" else "x": x},
            reward,
            fault == "fall",
            False,
            None if fault == "info" else {},
        )


for fault in ("", "reset", "raises", "size", "key", "nan", "reward", "info", "fall"):
    gym.register(f"RoboRlFaulty{fault}-v0", Faulty, max_episode_steps=4, kwargs={"fault": fault})


@pytest.mark.parametrize(
    "fault, words",
    [
        (
            "reset",
            r"^gym:RoboRlFaultyreset-v0: reset of env 0 failed: OSError: no power \(.*test_sims_adapters.py, "
            r"line \d+\)$",
        ),
        (
            "raises",
            r"^gym:RoboRlFaultyraises-v0: step of env 0 failed: RuntimeError: motor 3 is hot "
            r"\(.*test_sims_adapters.py, line \d+\)$",
        ),
        ("size", "the observation of env 0 has 3 numbers, its observation_space Dict.* has 2"),
        ("key", "the observation of env 0 does not fit its observation_space.*KeyError"),
        ("nan", r"the observation of env 0 is not finite \(x0 is nan\)"),
        ("reward", "the reward of env 0 is nan, not finite; correct the env"),
        ("info", r"step of env 0 failed: TypeError.* must return .*truncated, info\)"),
    ],
)
def test_a_fault_in_the_code_of_a_gymnasium_env_is_one_line_that_names_env_and_place(fault, words):
    env = make_gym(f"RoboRlFaulty{fault}-v0", num_envs=2)
    with pytest.raises(UserError, match=words):
        env.reset(seed=0)
        for _ in range(2):
            env.step(np.zeros((2, 1), np.float32))


class Pictures(gym.Env):
    """Two cameras of other sizes and forms and a height map beside numbers; `only`: one camera."""

    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, only="", high=1.0):
        cameras = {
            "top": spaces.Box(0, 255, (20, 40, 3), np.uint8),
            "hand": spaces.Dict({"left": spaces.Box(0.0, high, (1, 16, 16), np.float32)}),
        }
        self.only = only
        self.observation_space = (
            cameras[only]
            if only
            else spaces.Dict(cameras | {"x": spaces.Box(-1, 1, (2,)), "mode": spaces.Discrete(3)})
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self._obs(), {}

    def step(self, action):
        self.x = np.clip(self.x + action, -1, 1).astype(np.float32)
        return self._obs(), 0.0, False, False, {}

    def _obs(self):
        top = np.full((20, 40, 3), [200, 0, 50], np.uint8)
        top[:, :20] = int(100 * (self.x[0] + 1))
        left = np.full((1, 16, 16), 0.5, np.float32)
        cameras = {"top": top, "hand": {"left": left}}
        return cameras[self.only] if self.only else cameras | {"x": self.x, "mode": 1}


gym.register("RoboRlPictures-v0", Pictures, max_episode_steps=5)


def test_pictures_of_any_size_and_form_are_views_and_the_rest_is_the_state():
    def make(n):
        return make_gym("RoboRlPictures-v0", num_envs=n, obs="rgb", image_size=16)

    assert "frozen" in check_env(make)
    env = make(2)
    obs, _ = env.reset(seed=0)
    assert env.spec.views == ("hand_left", "top") and env.spec.state_names == (
        "mode0",
        "mode1",
        "mode2",
        "x0",
        "x1",
    )
    assert obs["state"][:, :3].tolist() == [[0, 1, 0]] * 2
    assert obs["image/top"].shape == obs["image/hand_left"].shape == (2, 16, 16, 3)
    assert obs["image/top"][0, 8, 15].tolist() == [200, 0, 50] and (obs["image/hand_left"] == 128).all()
    assert (obs["image/top"][1, 8, 0] == int(100 * (obs["state"][1, 3] + 1))).all()


def test_without_obs_rgb_pictures_are_left_out_with_a_word():
    with pytest.warns(UserWarning, match="obs state leaves its pictures out .hand_left, top.; rgb has them"):
        env = make_gym("RoboRlPictures-v0")
    assert env.reset(seed=0)[0].keys() == {"state", "task"} and env.spec.views == ()


def test_an_env_that_is_one_picture_has_a_state_of_nothing():
    assert check_env(lambda n: make_gym("RoboRlPictures-v0,only=top", num_envs=n, max_steps=9, obs="rgb"))
    env = make_gym("RoboRlPictures-v0,only=top", obs="rgb")
    assert env.spec.views == ("pixels",) and env.reset(seed=0)[0]["state"].tolist() == [[0]]


@pytest.mark.parametrize(
    "id, obs, fault",
    [
        ("RoboRlPictures-v0,only=top", "state", "observes pictures alone .pixels.: they need --obs rgb"),
        ("RoboRlFaulty-v0", "rgb", "no pictures among its observations, so obs 'state' only; .*AddRender"),
        ("RoboRlPictures-v0,high=9", "rgb", "observes hand.left as Box.*neither numbers of a state nor a"),
    ],
)
def test_pictures_that_cannot_be_seen_say_why(id, obs, fault):
    with pytest.raises(UserError, match=fault):
        make_gym(id, obs=obs)


class Undrawn(Faulty):
    """Cannot draw: there is no display, or what it gives is no picture."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}

    def __init__(self, gives=None, render_mode=None):
        super().__init__()
        self.gives, self.render_mode = gives, render_mode

    def render(self):
        if self.gives is None:
            raise RuntimeError("no display :0")
        return np.zeros(self.gives)


@pytest.mark.parametrize(
    "gives, fault",
    [
        ("none", r"Undrawn,gives=none cannot draw: RuntimeError: no display :0 \(.*adapters.py, line \d+\)"),
        ("[4,4,3]", r"must give a picture uint8 \[h, w, 3\], got float64 \[4, 4, 3\]"),
    ],
)
def test_an_env_that_cannot_draw_costs_the_film_alone(gives, fault, tmp_path):
    env = make_gym(f"{__name__}:Undrawn,gives={gives}", num_envs=4, max_steps=3, render=True)
    with pytest.raises(UserError, match=fault):  # of which a run says "no video"
        film(env, lambda obs: np.zeros((4, 1), np.float32), np.arange(4), 1, tmp_path / "film.mp4")


class TwoCameras(Faulty):
    """Says in its constructor alone that it draws, and draws what two cameras see."""

    def __init__(self, render_mode=None):
        super().__init__()
        self.metadata, self.render_mode = {"render_modes": ["rgb_array"]}, render_mode

    def render(self):
        return [np.full((4, 6, 3), k, np.uint8) for k in (7, 9)]


def test_pictures_of_several_cameras_are_filmed_side_by_side():
    env = make_gym(f"{__name__}:TwoCameras", num_envs=2, render=True)
    env.reset(seed=0)
    pictures = env.render()
    assert pictures.shape == (2, 4, 12, 3)
    assert (pictures[:, :, :6] == 7).all() and (pictures[:, :, 6:] == 9).all()


def test_envs_that_are_slow_one_after_the_other_say_once_what_steps_them_beside_each_other(monkeypatch):
    monkeypatch.setattr("sims.gym.SLOW", 0.0)
    env = make_gym("Pendulum-v1", num_envs=3)
    env.reset(seed=0)
    with pytest.warns(UserWarning, match=r"a step of 3 envs, .* s; with --workers N --envs N they") as told:
        for _ in range(4):
            env.step(np.zeros((3, 1)))
    assert len(told) == 1


# what gymnasium.make is told, and envs that nobody registered


class Told(Goal):
    """Needs to be told how far to go."""

    def __init__(self, far, words=(), tool="hand", render_mode=None):
        super().__init__()
        self.told = (far, words, tool)


gym.register("RoboRlTold-v0", Told, max_episode_steps=3)


def test_arguments_of_gymnasium_make_follow_the_id():
    name = "RoboRlTold-v0,far=-0.5,words=[1,(2,'a')],tool=gripper v2"
    env = make_gym(name)
    assert vars(env._envs[0].unwrapped)["told"] == (-0.5, [1, (2, "a")], "gripper v2")
    assert env.spec.task == env.reset(seed=0)[0]["task"][0] == name


def test_a_class_of_a_module_needs_no_id():
    env = make_gym(f"{__name__}:Told,far=2", max_steps=4)
    assert vars(env._envs[0].unwrapped)["told"][0] == 2 and env.spec.max_steps == 4
    assert make_gym(f"{__name__}:Reach").spec.max_steps == 1000


@pytest.mark.parametrize(
    "id, fault",
    [
        ("RoboRlTold-v0", "cannot be made: TypeError: .*'far'.*arguments of gymnasium.make follow the id"),
        ("RoboRlTold-v0,far=1,colour=2", "cannot be made: TypeError: .*'colour'"),
        ("RoboRlTold-v0,far=1,render_mode=human", "render_mode is set by --video"),
        ("RoboRlTold-v0,far=1,max_episode_steps=9", "max_episode_steps is set by --max-steps"),
        (f"{__name__}:Tolt", f"registers no 'Tolt' and has no class of it.* Nearest: gym:{__name__}:Told,"),
        ("json:Env-v0", "json registers no 'Env-v0' .* It has no env at all"),
    ],
)
def test_what_cannot_be_made_of_a_name_and_arguments_says_why(id, fault):
    with pytest.raises(UserError, match=fault):
        make_gym(id)


class Before(Faulty):
    """The interface of Gym before 0.26."""

    def step(self, action):
        return {"x": np.zeros(2)}, -1.0, False, {}


class Unseedable(Faulty):
    def reset(self):
        return {"x": np.zeros(2)}, {}


class Arrays(Faulty):
    """Gives arrays of one number where one number is asked for; ends by itself."""

    def step(self, action):
        self.steps += 1
        over = np.array([self.steps == 3])
        return {"x": np.ones(2)}, np.array([-2.0]), np.array([False]), over, {"success": over}


def test_an_env_of_the_older_gym_is_told_what_the_interface_is():
    for cls in (Before, Unseedable):
        env = make_gym(f"{__name__}:{cls.__name__}")
        with pytest.raises(
            UserError, match=r"\(obs, reward, terminated, truncated, info\): envs of Gym before"
        ):
            env.reset(seed=0)
            env.step(np.zeros((1, 1), np.float32))


class Shown(Faulty):
    """Has an expert that goes to its bound; what it says may be no action."""

    says = (np.array([2.0]), np.array([-1.0]))

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, self.steps > 1, False, info

    def expert_action(self):
        return self.says[self.steps]


def test_the_expert_of_an_env_of_ones_own_speaks_in_its_units_and_is_silent_where_it_is_over(monkeypatch):
    gym.register("RoboRlShown-v0", Shown)
    env = make_gym("RoboRlShown-v0", num_envs=2)
    with pytest.raises(UserError, match="no scripted expert; give the env a method expert_action.., which"):
        check_expert(make_gym("Pendulum-v1"))
    env.reset(seed=0)
    assert env.expert_action().tolist() == [[1.0], [1.0]] and env.expert_action().dtype == np.float32
    env.step(np.zeros((2, 1), np.float32))
    assert env.expert_action().tolist() == [[-0.5], [-0.5]]
    env.step(np.zeros((2, 1), np.float32))
    assert env.expert_action().tolist() == [[0.0], [0.0]]
    env.reset(seed=0)
    for wrong in (np.zeros(2), np.array([np.nan]), None):
        monkeypatch.setattr(Shown, "says", (wrong,))
        with pytest.raises(UserError, match=r"expert_action of env 0 failed: .*must return 1 finite numbers"):
            env.expert_action()


def test_arrays_of_one_number_are_numbers_and_an_env_may_cut_its_episodes_itself():
    env = make_gym(f"{__name__}:Arrays", num_envs=2)
    env.reset(seed=0)
    for _ in range(3):
        _, reward, terminated, truncated, info = env.step(np.zeros((2, 1), np.float32))
    assert reward.tolist() == [-2, -2] and truncated.all() and not terminated.any() and info["success"].all()
    assert check_env(lambda n: make_gym(f"{__name__}:Arrays", num_envs=n, max_steps=9), random_starts=False)


class Unseeded(Faulty):
    """Begins anywhere, whatever the seed."""

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return {"x": np.random.default_rng().normal(size=2)}, {}


gym.register("RoboRlUnseeded-v0", Unseeded, max_episode_steps=4)


def stacked(**more):
    return gym.wrappers.FrameStackObservation(gym.make("Pendulum-v1", **more), 4)


def test_a_memory_is_part_of_the_observation():
    env = make_gym(f"{__name__}:stacked", num_envs=2)
    states = [env.reset(seed=0)[0]["state"]]
    states += [env.step(np.ones((2, 1)))[0]["state"] for _ in range(4)]
    assert states[0].shape == (2, 12) and np.array_equal(states[4][:, :3], states[1][:, 9:])


def test_an_env_that_takes_no_seed_is_told_so_and_nothing_else():
    with pytest.raises(AssertionError, match="the same seed must give the same episode"):
        check_env(lambda n: make_gym("RoboRlUnseeded-v0", num_envs=n))
    with pytest.raises(
        UserError, match=r"the same episode .*; draw all that is random from self.np_random.*wrapper"
    ):
        check(CheckOptions(sim="gym:RoboRlUnseeded-v0"))


class Carrying(Faulty):
    """Takes over what the step before its reset left; begins always alike where nothing is left."""

    left = 0.0

    def reset(self, *, seed=None, options=None):
        seen, info = super().reset(seed=seed)
        return {"x": seen["x"] + self.left}, info

    def step(self, action):
        self.left = 0.001 * float(action[0])
        return super().step(action)


class Alike(Faulty):
    """Has one first state, and nothing is drawn."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"x": np.zeros(2)}, {}

    def step(self, action):
        _, *rest = super().step(action)
        return {"x": np.full(2, action[0])}, *rest


gym.register("RoboRlCarrying-v0", Carrying, max_episode_steps=4)
gym.register("RoboRlAlike-v0", Alike, max_episode_steps=4)


@pytest.mark.parametrize(
    "id, fault",
    [
        (
            "RoboRlCarrying-v0",
            r"differs by up to 0\.00\d+\).*keeps something of the episode before: it trains",
        ),
        ("RoboRlAlike-v0", "another seed must.*an argument that draws its start"),
    ],
)
def test_an_env_that_does_not_follow_its_seed_hears_by_how_much_and_what_that_costs(id, fault):
    with pytest.raises(UserError, match=fault):
        check(CheckOptions(sim=f"gym:{id}"))


def test_an_evaluation_of_one_start_many_times_is_no_evaluation_of_many(recwarn):
    def still(obs):
        return np.zeros((len(obs["state"]), 1), np.float32)

    evaluate(make_gym("RoboRlGoal-v0", num_envs=2), lambda obs: np.zeros((2, 2), np.float32), np.arange(3))
    evaluate(make_gym("RoboRlAlike-v0", num_envs=2), still, np.arange(1))
    assert not recwarn.list
    with pytest.warns(UserWarning, match="the 3 starts of the evaluation begin with one and the same"):
        evaluate(make_gym("RoboRlAlike-v0", num_envs=1), still, np.arange(3))


def test_an_episode_that_ends_because_its_state_is_not_finite_is_over():
    env = make_gym("RoboRlFaultyfall-v0", num_envs=1)
    env.reset(seed=0)
    env.step(np.zeros((1, 1), np.float32))
    assert env.step(np.zeros((1, 1), np.float32))[2].all()


def test_a_gymnasium_env_knows_whether_its_steps_say_success():
    for id, says in (("RoboRlFaulty-v0", False), ("RoboRlGoal-v0", True)):
        env = make_gym(id)
        env.reset(seed=0)
        assert has_success(env)  # until an episode ends without a word
        while not (ended := env.step(np.zeros((1, len(env.spec.axes)), np.float32)))[2] | ended[3]:
            pass
        assert has_success(env) == says


class Reach(Goal):
    """Says from the first step beyond 1 on that it succeeded, pays as it likes, and goes on to its time
    limit."""

    def step(self, action):
        self.x = self.x + action[:, 0]
        return self._obs(), 7.0, False, False, {"success": self.x.sum() > 1}


class Late(Reach):
    """Says whether it succeeded at the end of an episode alone."""

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        self.t = getattr(self, "t", 0) + 1
        return obs, reward, self.t == 3, False, info if self.t == 3 else {}


gym.register("RoboRlReach-v0", Reach, max_episode_steps=3)
gym.register("RoboRlLate-v0", Late, max_episode_steps=9)


def test_a_sparse_reward_pays_the_first_success_alone_and_ends_the_episode_with_it():
    env = make_gym("RoboRlReach-v0", num_envs=2, reward="sparse")
    env.reset(seed=0)
    paid, over = [], []
    for _ in range(3):
        # 1 and 0 of a step
        _, reward, terminated, truncated, info = env.step(np.array([[-0.75, -0.75], [-1, -1]], np.float32))
        paid, over = [*paid, reward.tolist()], [*over, terminated.tolist()]
        assert (terminated == info["success"]).all()
    assert paid == [[0, 0], [1, 0], [0, 0]] and over == [[False, False], [True, False], [True, False]]
    assert truncated.tolist() == [False, True]
    env.reset(seed=0)
    for _ in range(3):
        # success with the last step
        _, reward, terminated, truncated, _ = env.step(np.array([[-0.9, -0.9], [-1, -1]], np.float32))
    assert (
        reward.tolist() == [1, 0]
        and terminated.tolist() == [True, False]
        and truncated.tolist() == [False, True]
    )
    late = make_gym("RoboRlLate-v0", reward="sparse")
    late.reset(seed=0)
    assert [late.step(np.ones((1, 2), np.float32))[1].item() for _ in range(3)] == [0, 0, 1]
    silent = make_gym("Pendulum-v1", reward="sparse", max_steps=2)
    silent.reset(seed=0)
    silent.step(np.zeros((1, 1), np.float32))
    with pytest.raises(UserError, match="says nothing of success.*--reward dense.*collect --policy RUN"):
        silent.step(np.zeros((1, 1), np.float32))


# ---------------------------------------------------------------- envpool:<id>


needs_envpool = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="needs pip install 'robo_rl[envpool]'"
)


@needs_envpool
@pytest.mark.parametrize(
    "id",
    [
        "Hopper-v5",
        "Pendulum-v1",
        pytest.param("FetchReach-v4", marks=pytest.mark.slow),
        pytest.param("MetaWorld/Reach-v3", marks=pytest.mark.slow),
    ],
)
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
def test_of_envpool_too_a_sparse_reward_ends_the_episode_with_success():
    env = make_envpool("FetchReach-v4", num_envs=8, threads=1, reward="sparse")
    obs, _ = env.reset(options={"starts": np.arange(8)})
    total = np.zeros(8)
    for _ in range(50):
        to_goal = 10 * (obs["state"][:, -3:] - obs["state"][:, -6:-3]) * (np.arange(8) < 4)[:, None]
        obs, reward, terminated, truncated, info = env.step(np.pad(to_goal, ((0, 0), (0, 1))))
        total += reward
        assert (terminated == info["success"]).all() and not (terminated & truncated).any()
    assert env.reports_success and total.tolist() == terminated.tolist() and terminated[:4].all()
    assert truncated.any() and (truncated == ~terminated).all()
    env.reset(options={"reset_mask": terminated})
    assert not (env.step(np.zeros((8, 4)))[2] & terminated).all()
    with pytest.raises(UserError, match="Hopper-v5 says nothing of success"):
        make_envpool("Hopper-v5", reward="sparse")


@needs_envpool
@pytest.mark.slow
def test_envs_that_are_made_again_for_other_starts_do_not_add_up_in_memory():
    env, used = make_envpool("FetchReach-v4", num_envs=16, threads=1), []
    for k in range(5):
        env.reset(options={"starts": np.arange(16) + 100 * k})
        env.step(np.zeros((16, 4)))
        used.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6)
    assert used[-1] < used[0] + 150, used


@needs_envpool
def test_an_id_whose_own_reward_is_sparse_has_its_dense_one_too():
    env = make_envpool("FetchReach-v4", threads=1, reward="dense")
    env.reset(seed=0)
    assert -1 < env.step(np.zeros((1, 4)))[1][0] < 0


@needs_envpool
def test_a_goal_that_an_id_hides_unless_asked_is_shown():
    obs, _ = make_envpool("MetaWorld/Reach-v3", threads=1).reset(seed=0)
    assert obs["state"][0, -3:].all()


@needs_envpool
@pytest.mark.parametrize(
    "id, fault",
    [
        ("Hoper-v5", "unknown envpool id 'Hoper-v5'. Nearest: Hopper-v5"),
        ("CartPole-v1", r"Discrete actions; only continuous \(Box\) actions are supported$"),
        ("", "needs an id after the colon"),
    ],
)
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


# ---------------------------------------------------------------- Isaac Gym and Isaac Lab, on fakes


class FakeVecTask:
    """A point mass in the order of events of IsaacGymEnvs: an env that ended is reset in the next step."""

    num_obs, num_actions, rl_device, clip_obs, control_freq_inv, dt = 3, 2, "cpu", 50.0, 2, 0.01
    same_step = False  # the rarer habit: reset at the end of the step that ended

    def __init__(self, num_envs: int, length: int = 16):
        self.num_envs, self.max_episode_length = num_envs, length
        self.obs_buf = torch.zeros(num_envs, 3)
        self.reset_buf = torch.ones(num_envs, dtype=torch.long)
        self.progress_buf = torch.zeros(num_envs, dtype=torch.long)
        self.pos = torch.zeros(num_envs, 2)
        self.simulated = 0

    def reset_idx(self, ids):
        assert len(ids) and self.reset_buf[ids].all()  # domain randomisation looks at reset_buf
        self.pos[ids] = 0.4 * torch.rand(len(ids), 2) - 0.2
        self.progress_buf[ids] = 0
        self.reset_buf[ids] = 0

    def compute_observations(self):
        self.obs_buf[:, :2], self.obs_buf[:, 2] = self.pos, self.progress_buf

    def step(self, actions):
        assert actions.device == self.pos.device and actions.dtype == torch.float32
        self.pos += 0.1 * actions
        self.simulated, self.actions = self.simulated + 1, actions
        self.progress_buf += 1
        if not self.same_step and self.reset_buf.any():
            self.reset_idx(self.reset_buf.nonzero().flatten())
        self.compute_observations()
        rewards = 1 - self.pos.norm(dim=1)
        fell = self.pos.norm(dim=1) > 0.45
        timed_out = self.progress_buf >= self.max_episode_length - 1
        self.reset_buf[:] = (fell | timed_out).long()
        ended = self.reset_buf.clone()
        if self.same_step and ended.any():
            self.reset_idx(ended.nonzero().flatten())
            self.compute_observations()
        return (
            {"obs": self.obs_buf.clamp(-50, 50)},
            rewards,
            ended,
            {"time_outs": timed_out, "success": self.pos[:, 0] > 0.3},
        )


class FakeSameStepTask(FakeVecTask):
    same_step = True


class FakeDirectRLEnv:
    """A point mass in the order of events of Isaac Lab: dones, rewards, resets, then observations."""

    device, step_dt = "cpu", 0.02

    class Part:
        """The scene and the simulator: what is written reaches the physics with `forward`."""

        def __init__(self, env):
            self.env, self.num_envs, self.written = env, env.num_envs, False

        def write_data_to_sim(self):
            self.written = True

        def forward(self):
            assert self.env.scene.written
            self.env.pos[:] = self.env.target

    def __init__(self, num_envs: int, length: int = 16):
        self.num_envs, self.max_episode_length = num_envs, length
        self.single_action_space = spaces.Box(-np.inf, np.inf, (2,))
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        self.pos, self.target = torch.zeros(num_envs, 2), torch.zeros(num_envs, 2)
        self.obs_buf = torch.zeros(num_envs, 3)
        self.generator = torch.Generator()
        self.scene = self.sim = self.Part(self)
        self.closed = self.simulated = 0

    def _reset_idx(self, ids):
        self.target[:] = self.pos
        self.target[ids] = 0.4 * torch.rand(len(ids), 2, generator=self.generator) - 0.2
        self.episode_length_buf[ids] = 0
        self.scene.written = False

    def _get_observations(self):
        self.obs_buf[:] = torch.cat([self.pos, self.episode_length_buf[:, None]], 1)
        return {"policy": self.obs_buf, "critic": torch.zeros(1)}

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.generator.manual_seed(seed)
        self._reset_idx(torch.arange(self.num_envs))
        self.scene.write_data_to_sim()
        self.sim.forward()
        return self._get_observations(), {}

    def step(self, action):
        self.simulated += 1
        self.pos += 0.1 * action
        self.episode_length_buf += 1
        terminated = self.pos.norm(dim=1) > 0.45
        time_outs = self.episode_length_buf >= self.max_episode_length - 1
        reward = 1 - self.pos.norm(dim=1)
        ids = (terminated | time_outs).nonzero().flatten()
        if len(ids):
            self._reset_idx(ids)
            self.pos[:] = self.target
        return self._get_observations(), reward, terminated, time_outs, {}

    def close(self):
        self.closed += 1


class FakeManagerBasedRLEnv(FakeDirectRLEnv):
    """Reset of some envs is public here, and the policy group may be a dict of terms."""

    observation_manager = object()

    def _get_observations(self):
        return {"policy": {"pos": self.pos.clone(), "age": self.episode_length_buf.clone()}}

    def step(self, action):
        self.simulated += 1
        self.pos += 0.1 * action
        self.episode_length_buf += 1
        terminated = self.pos.norm(dim=1) > 0.45
        time_outs = self.episode_length_buf >= self.max_episode_length  # one later than the direct one
        ids = (terminated | time_outs).nonzero().flatten()
        if len(ids):
            self._reset_idx(ids)
            self.pos[:] = self.target
        return self._get_observations(), torch.ones(self.num_envs), terminated, time_outs, {}

    def reset(self, seed=None, env_ids=None, options=None):
        if env_ids is None:
            return super().reset(seed, options)
        self._reset_idx(env_ids)
        self.pos[:] = self.target
        return self._get_observations(), {}


ISAAC = [
    ("isaacgym", FakeVecTask),
    ("isaacgym", FakeSameStepTask),
    ("isaaclab", FakeDirectRLEnv),
    ("isaaclab", FakeManagerBasedRLEnv),
]


@pytest.mark.parametrize("kind, fake", ISAAC, ids=lambda x: getattr(x, "__name__", x))
def test_an_isaac_env_keeps_the_contract(kind, fake):
    parts = check_env(lambda n: make_isaac(kind, "Point", env=fake(n)), starts=False, seed_lists=False)
    assert "frozen" in parts and "starts" not in parts


@pytest.mark.parametrize("kind, fake", ISAAC, ids=lambda x: getattr(x, "__name__", x))
def test_some_isaac_envs_may_be_reset_before_the_first_step(kind, fake):
    env = make_isaac(kind, "Point", env=fake(3))
    first, _ = env.reset(seed=0)
    again, _ = env.reset(options={"reset_mask": np.array([True, False, False])})
    assert torch.equal(again["state"][1:], first["state"][1:]) and torch.isfinite(again["state"]).all()


@pytest.mark.parametrize("kind, fake", ISAAC, ids=lambda x: getattr(x, "__name__", x))
def test_isaacs_tensors_stay_torch_on_its_device(kind, fake):
    env = make_isaac(kind, "Point", env=fake(3))
    obs, _ = env.reset(seed=0)
    out = env.step(torch.zeros(3, 2))
    tensors = [obs["state"], out[0]["state"], *out[1:4], out[4]["success"], out[4]["has_final_obs"]]
    assert all(isinstance(x, torch.Tensor) and x.device == env.device for x in tensors)
    assert obs["task"].tolist() == ["Point"] * 3


def drive(env, push: torch.Tensor, steps: int):
    """Step with a constant push [N, 2] and reset what is over; the rows (obs before, obs, reward, flags,
    info)."""
    obs, rows = env.reset(seed=0)[0]["state"], []
    for _ in range(steps):
        after, reward, terminated, truncated, info = env.step(push)
        rows.append((obs, after["state"], reward, terminated, truncated, info))
        over = terminated | truncated
        obs = env.reset(options={"reset_mask": over.numpy()})[0]["state"] if over.any() else after["state"]
    return rows


@pytest.mark.parametrize("kind, fake", ISAAC, ids=lambda x: getattr(x, "__name__", x))
def test_a_time_limit_leaves_the_true_last_observation(kind, fake):
    if fake is FakeSameStepTask:
        pytest.skip("the task resets before anyone can look, and says so: has_final_obs is False")
    env = make_isaac(kind, "Point", env=fake(2))
    cut = [r for r in drive(env, torch.zeros(2, 2), 40) if r[4].any()]
    assert len(cut) >= 2
    for _, after, _, terminated, truncated, info in cut:
        assert truncated.all() and not terminated.any() and info["has_final_obs"].all()
        assert (after[:, 2] == env.spec.max_steps).all(), "the age in the observation is that of the end"


@pytest.mark.parametrize("kind, fake", ISAAC, ids=lambda x: getattr(x, "__name__", x))
def test_the_first_observation_after_an_end_is_that_of_the_new_episode(kind, fake):
    env = make_isaac(kind, "Point", env=fake(2))
    rows = drive(env, torch.tensor([[1.0, 0.0], [0.0, 0.0]]), 30)  # env 0 falls, env 1 runs to its limit
    falls = [i for i, r in enumerate(rows) if r[3][0]]
    assert len(falls) >= 3
    for i in falls[:-1]:
        first = rows[i + 1][0][0]
        assert first[2] == 0 and first[:2].norm() < 0.3, "age 0, near the middle"
        assert rows[i + 1][1][0, 2] == 1, "and the next step is the first of the episode"
    ages = torch.stack([r[1][1, 2] for r in rows[:13]])
    assert ages.tolist() == list(range(1, 14)), "the other env never noticed"


def test_isaac_gym_shows_the_fall_itself_and_isaac_lab_the_step_before():
    push = torch.tensor([[1.0, 0.0]])
    fell = next(r for r in drive(make_isaac("isaacgym", "P", env=FakeVecTask(1)), push, 9) if r[3].any())
    assert fell[1][0, :2].norm() > 0.45 and fell[5]["has_final_obs"].all()
    fell = next(r for r in drive(make_isaac("isaaclab", "P", env=FakeDirectRLEnv(1)), push, 9) if r[3].any())
    assert torch.equal(fell[1], fell[0]) and not fell[5]["has_final_obs"].any()


def test_isaac_gets_zero_actions_for_an_env_that_is_over():
    task = FakeVecTask(2)
    env = make_isaac("isaacgym", "Point", env=task)
    env.reset(seed=0)
    for _ in range(9):
        *_, terminated, _, info = env.step(torch.tensor([[1.0, 0.0], [0.1, 0.0]]))
    assert terminated.tolist() == [True, False] and info["has_final_obs"].all()
    assert torch.equal(task.actions, torch.tensor([[0.0, 0.0], [0.1, 0.0]]))


def test_a_hidden_last_observation_stays_named_until_the_reset():
    env = make_isaac("isaaclab", "P", env=FakeDirectRLEnv(2))
    env.reset(seed=0)
    for _ in range(9):
        *_, terminated, _, info = env.step(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert terminated.tolist() == [True, False] and info["has_final_obs"].tolist() == [False, True]


def test_a_reset_of_some_isaac_envs_runs_no_physics():
    for kind, fake in ISAAC:
        sim = fake(3)
        env = make_isaac(kind, "Point", env=sim)
        env.reset(seed=0)
        env.step(torch.zeros(3, 2))
        env.reset(options={"reset_mask": np.array([False, True, False])})
        assert sim.simulated == 1


def test_a_time_out_is_not_a_termination_in_isaac_gym():
    task = FakeVecTask(2)
    env = make_isaac("isaacgym", "Point", env=task)
    env.reset(seed=0)
    for _ in range(15):
        *_, terminated, truncated, _ = env.step(torch.zeros(2, 2))
    assert env.spec.max_steps == 15 and truncated.all() and not terminated.any()
    assert env.spec.period == pytest.approx(0.02)


def test_success_is_what_the_isaac_task_reports_and_stays():
    env = make_isaac("isaacgym", "Point", env=FakeVecTask(1))
    env.reset(seed=0)
    seen = [bool(env.step(torch.tensor([[1.0, 0.0]]))[4]["success"]) for _ in range(6)]
    assert seen == sorted(seen) and seen[-1] and not seen[0]


def test_max_steps_shortens_an_isaac_episode_and_never_stretches_it():
    assert make_isaac("isaaclab", "P", env=FakeDirectRLEnv(1), max_steps=5).spec.max_steps == 5
    assert make_isaac("isaaclab", "P", env=FakeDirectRLEnv(1), max_steps=500).spec.max_steps == 14


def test_closing_closes_isaac_lab_once():
    sim = FakeDirectRLEnv(1)
    env = make_isaac("isaaclab", "P", env=sim)
    env.close()
    env.close()
    assert sim.closed == 1


@pytest.mark.parametrize(
    "call, fault",
    [
        (lambda: make_isaac("isaaclab", "P", env=object()), "object is no Isaac Lab env: it lacks num_envs"),
        (
            lambda: make_isaac("isaacgym", "P", env=FakeDirectRLEnv(1)),
            "no IsaacGymEnvs VecTask: it lacks .*num_obs",
        ),
        (lambda: make_isaac("isaacsim", "P"), "unknown isaac simulator 'isaacsim'"),
        (lambda: make_isaac("isaaclab", "P", obs="rgb"), "obs 'state' only"),
        (lambda: make_isaac("isaaclab", "P", reward="sparse"), "own reward"),
        (lambda: make_isaac("isaaclab", ""), "for example Isaac-Cartpole-Direct-v0"),
        (
            lambda: make_isaac("isaaclab", "P", env=FakeDirectRLEnv(2)).step(torch.zeros(2, 2)),
            r"call reset\(\)",
        ),
        (
            lambda: make_isaac("isaaclab", "P", env=FakeDirectRLEnv(2)).reset(
                seed=1, options={"reset_mask": np.array([True, False])}
            ),
            "one seed for all envs",
        ),
        (
            lambda: make_isaac("isaaclab", "P", env=FakeDirectRLEnv(2)).reset(
                options={"reset_mask": np.array([True, False])}
            ),
            "first reset must reset every env",
        ),
    ],
)
def test_isaac_input_that_cannot_be_used_says_why(call, fault):
    with pytest.raises(UserError, match=fault):
        call()


@pytest.mark.parametrize("kind, words", [("isaacgym", "not on PyPI"), ("isaaclab", "pip install 'isaaclab")])
def test_an_absent_isaac_says_that_it_needs_an_nvidia_gpu(kind, words):
    if importlib.util.find_spec("isaacsim") or importlib.util.find_spec("isaacgym"):
        pytest.skip("an Isaac is installed")
    with pytest.raises(MissingDependency, match="NVIDIA GPU.*" + words):
        sims.make(kind, "Cartpole")


def stub_members(path: str, cls: str) -> set[str]:
    """Names a class of a stub file declares, its bases included."""
    tree = ast.parse((Path(sims.__file__).parent / "isaac" / "typings" / path).read_text())
    classes = {c.name: c for c in tree.body if isinstance(c, ast.ClassDef)}
    body, names = [cls, *(b.id for b in classes[cls].bases)], set()
    for c in body:
        for node in classes[c].body:
            names |= {node.target.id} if isinstance(node, ast.AnnAssign) else {getattr(node, "name", "")}
    return names


@pytest.mark.parametrize(
    "protocol, path, classes",
    [
        (IsaacGymVecTask, "isaacgymenvs/tasks/base/vec_task.pyi", ["VecTask"]),
        (IsaacLabEnv, "isaaclab/envs.pyi", ["DirectRLEnv", "ManagerBasedRLEnv"]),
    ],
)
def test_the_stubs_declare_what_the_adapter_asks_for(protocol, path, classes):
    asked = {*protocol.__annotations__, *(k for k in vars(protocol) if k[0] != "_")}
    for cls in classes:
        assert asked <= stub_members(path, cls)


def test_every_stub_parses():
    files = list((Path(sims.__file__).parent / "isaac" / "typings").rglob("*.pyi"))
    assert len(files) >= 8
    for f in files:
        ast.parse(f.read_text())


@needs_envpool
def test_arguments_of_envpool_follow_the_id():
    env = make_envpool("Hopper-v5,frame_skip=2", num_envs=1)
    assert env._options["frame_skip"] == 2 and env.spec.task == "Hopper-v5,frame_skip=2"
    env.reset(seed=0)
    for arguments, fault in (
        ("colour=2", "unknown Hopper-v5 argument 'colour'.*frame_skip"),
        ("env_seed=2", "unknown Hopper-v5 argument 'env_seed'"),
        ("frame_skip=x", "cannot be made: TypeError"),
    ):
        with pytest.raises(UserError, match=fault):
            make_envpool(f"Hopper-v5,{arguments}")
