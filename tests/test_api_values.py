"""What the functions of robo_rl take from a script or a notebook: paths, numbers of NumPy, tensors; and what
they say of the rest."""

from pathlib import Path
from typing import cast

import gymnasium
import numpy as np
import pytest
import torch

import robo_rl
from robo_rl.errors import UserError
from robo_rl.evaluation import decide
from robo_rl.experiment.envs import obs_spec
from robo_rl.policies import make_policy

NO = cast("str", None)


class Reach(gymnasium.Env):
    """A class, where a name is wanted."""


def still(obs) -> np.ndarray:
    return np.zeros((len(obs["state"]), 7))


@pytest.fixture
def env():
    made = robo_rl.make_env(task="reach", num_envs=2, max_steps=4)
    yield made
    made.close()


def test_a_recipe_takes_paths_and_numbers_of_numpy():
    made = robo_rl.recipe(
        task="reach",
        demos=Path("data/mine"),
        out=Path("runs/mine"),
        seed=np.arange(4)[3],
        rl={"lr": np.float64(1e-4)},
    )
    assert made == robo_rl.recipe(task="reach", demos="data/mine", out="runs/mine", seed=3, rl={"lr": 1e-4})
    assert type(made.seed) is int and type(made.rl.lr) is float


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: robo_rl.make_env(Reach), 'sim is a name .*"gym:module:Class".*Reach'),
        (lambda: robo_rl.recipe(Reach), 'sim is a name .*"gym:module:Class".*Reach'),
        (lambda: robo_rl.recipe(algo=still), 'algo is a name .*"module:object"'),
        (lambda: robo_rl.collect("x", Reach), "sim is a name"),
        (lambda: robo_rl.make_env(task="reach", num_env=2), "option of make_env 'num_env'.*Allowed: .*obs"),
        (lambda: robo_rl.make_env(task="reach", num_envs=2.5), "num_envs must be a whole number, got 2.5"),
        (lambda: robo_rl.collect("x", polcy="random"), "option of collect 'polcy'; did you mean 'policy'"),
        (lambda: robo_rl.collect("x", policy=still), "collect: policy must be str"),
        (lambda: robo_rl.collect("x", episodes=2.5), "collect: episodes must be int, got 2.5"),
        (
            lambda: robo_rl.load_policy(torch.nn.Linear(2, 2)),
            "got Linear; .*evaluate takes any function of an",
        ),
        (lambda: robo_rl.compare("a", "b"), r"all runs in one list, compare\(\[RUN, RUN\]\).*got 'b'"),
        (
            lambda: robo_rl.evaluate(still, "gym:mine:Reach"),
            "an env of robo_rl.make_env.*got 'gym:mine:Reach'",
        ),
        (lambda: robo_rl.evaluate(still, Reach()), "an env of robo_rl.make_env.*Reach"),
        (
            lambda: robo_rl.import_data("x", "x.npz", fsp=20),
            "option of import_data 'fsp'; did you mean 'fps'",
        ),
        (lambda: robo_rl.import_data("x", "x.npz", fps="20"), "import_data: fps must be float, got '20'"),
        (lambda: robo_rl.evaluate(None), "a function of an observation, got None"),
        (
            lambda: robo_rl.recipe("none", algo="bc", demos={"actions": []}),
            r"demos is the folder of a data set.*got a dict; of arrays in memory robo_rl.import_data\(FOLDER",
        ),
        (
            lambda: robo_rl.train(robo_rl.TrainConfig(sim="none", algo="bc", demos=cast("str", [1]))),
            "demos is the folder of a data set.*got a list",
        ),
        (lambda: robo_rl.load_dataset(cast("str", {})), "load_dataset takes the folder.*got dict; of arrays"),
        (lambda: robo_rl.load_world_model(NO), "load_world_model takes the folder of a run.*got NoneType"),
        (lambda: robo_rl.resume(NO), "resume takes the folder of a run, got NoneType"),
        (lambda: robo_rl.compare(NO), "compare takes the folder of a run.*got NoneType"),
        (lambda: robo_rl.compare([NO, NO]), "compare takes the folder of a run.*got NoneType"),
        (lambda: robo_rl.collect(NO), "collect takes the folder of a data set, got NoneType"),
        (lambda: robo_rl.import_data(NO, {}), "import_data takes the folder of a data set, got NoneType"),
    ],
)
def test_what_a_function_does_not_take_is_told_in_a_line(call, said):
    with pytest.raises(UserError, match=said):
        call()


@pytest.mark.parametrize("changes", [{"episodes": 4.0}, {"episodes": "4"}, {"seed": "a"}])
def test_an_evaluation_counts_in_whole_numbers(env, changes):
    with pytest.raises(UserError, match=f"{next(iter(changes))} must be a whole number"):
        robo_rl.evaluate(still, env, **changes)
    assert robo_rl.evaluate(still, env, episodes=np.int64(2)).n == 2


def test_a_vector_env_that_is_not_of_the_contract_is_no_env_to_evaluate_in():
    theirs = gymnasium.make_vec("Pendulum-v1", num_envs=1)
    with pytest.raises(UserError, match="an env of robo_rl.make_env"):
        robo_rl.evaluate(still, theirs)
    theirs.close()


def test_a_torch_network_is_evaluated_as_a_function_of_the_observation(env):
    net = torch.nn.Linear(env.single_observation_space["state"].shape[0], 7)  # its output requires a gradient
    got = robo_rl.evaluate(lambda obs: net(torch.as_tensor(obs["state"])), env, episodes=2)
    assert got.n == 2


def test_a_chunk_of_no_actions_is_refused(env):
    with pytest.raises(UserError, match=r"an array of shape \[2, 0, 7\]"):
        robo_rl.evaluate(lambda obs: np.zeros((2, 0, 7)), env, episodes=2)


def test_actions_of_a_policy_that_are_not_finite_are_its_own_and_not_the_simulators(env):
    policy = make_policy(robo_rl.recipe(task="reach").policy, obs_spec(env, False), 0)
    with torch.no_grad():
        for weights in policy.parameters():
            weights.fill_(float("nan"))
    obs, _ = env.reset(seed=0)
    with pytest.raises(UserError, match="the policy gave actions that are not finite"):
        decide(policy, obs, torch.Generator().manual_seed(0))


def test_a_data_set_is_shown_in_a_line(tmp_path):
    robo_rl.collect(tmp_path / "data", task="reach", episodes=2)
    data = robo_rl.load_dataset(tmp_path / "data")
    assert repr(data).startswith(f"Dataset('{tmp_path / 'data'}': 2 episodes, {len(data.state)} steps, ")


@pytest.mark.parametrize("rewards", [False, True])
def test_own_arrays_whose_successes_are_named_are_demonstrations_that_pay_for_success(tmp_path, rewards):
    """What a recipe asks of a data set (`shows_success`), and what critics learn from."""
    last = np.arange(40) % 20 == 19
    paid = {"rewards": last.astype(float)} if rewards else {}
    np.savez(
        tmp_path / "a.npz", observations=np.zeros((40, 3)), actions=np.zeros((40, 1)), terminals=last, **paid
    )
    data = robo_rl.import_data(tmp_path / "a", tmp_path / "a.npz", fps=20, units="1", success="all")
    assert data.success.all() and (data.reward == last).all() and data.terminated.all()
    made = robo_rl.recipe("gym:Pendulum-v1", demos=tmp_path / "a")
    assert made.reward == "sparse" and made.policy.horizon == 8
