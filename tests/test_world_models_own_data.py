"""World models of a data set in its own units, with pictures that are not square."""

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

from robo_rl.data import labels
from robo_rl.data.reader import load
from robo_rl.errors import UserError
from robo_rl.experiment.world_model import play_in_model
from robo_rl.policies import ObsSpec
from world_models import learning, options, own_units
from world_models import model as worlds
from world_models.evaluate import measure
from world_models.own_pictures import as_squares

pytestmark = pytest.mark.filterwarnings("ignore:data set .* without checksums")
SIZE = (24, 32)


@pytest.fixture(scope="module")
def aloha(tmp_path_factory):
    return datasets.write(tmp_path_factory.mktemp("own") / "aloha", "aloha", episodes=12, length=24, size=SIZE)


def test_actions_become_commands_whose_axes_say_what_they_mean_and_a_models_ranges_hold(aloha):
    data = load(aloha)
    [told] = own_units.as_commands([data])
    axis = told.spec.axes[0]
    assert (axis.unit, axis.kind, axis.low, axis.high) == ("rad", "absolute", data.action[:, 0].min(), data.action[:, 0].max())
    assert np.allclose(told.action.min(0), -1, atol=1e-6) and np.allclose(told.action.max(0), 1, atol=1e-6)
    half = own_units.as_commands([load(aloha, episodes=2)], told.spec.axes)[0]
    np.testing.assert_array_equal(half.action, told.action[:len(half.action)])
    assert own_units.as_commands([told]) == [told]


def test_units_that_nobody_stated_are_asked_for(tmp_path):
    folder = datasets.write(tmp_path / "so100", "so100", episodes=2, length=10, views=0)
    with pytest.raises(UserError, match="nobody stated the units.*robo_rl data label"):
        own_units.as_commands([load(folder)])
    labels.state_units(folder, "deg*5,%")
    assert [a.unit for a in own_units.as_commands([load(folder)])[0].spec.axes] == ["deg"] * 5 + ["%"]


def test_pictures_are_padded_to_squares_as_they_are_decoded(aloha):
    data = load(aloha)
    square = as_squares(data, 16)
    assert square.frames("cam_high", 1).shape[1:] == (16, 16, 3) and set(square.views.values()) == {(16, 16)}
    assert square.episode(1).images["cam_high"].shape == square.frames("cam_high", 1).shape
    assert not square.frames("cam_high", 1)[:, :2].any()  # 24 x 32: two rows of padding above and below
    assert as_squares(square, 8) is square


def learnt(aloha, out):
    learned = learning.train(options.WorldModelConfig(
        data=(str(aloha),), out=str(out), net=options.LatentOptions(members=2, hidden=16, layers=1),
        fit=options.FitOptions(updates=10, batch=16, unroll=2)))
    return worlds.load(learned.folder)


def test_a_policy_that_learnt_in_the_robots_units_acts_in_a_model_of_its_data(aloha, tmp_path):
    model, data, asked = learnt(aloha, tmp_path / "wm"), load(aloha), []

    class Policy:
        spec = ObsSpec(state=14, action=14, units=("rad",) * 14)

        def act(self, obs, generator, explore):
            return SimpleNamespace(actions=torch.from_numpy(data.action[:3])[:, None])
    step = model.step
    model.step = lambda carry, actions: asked.append(actions) or step(carry, actions)
    play_in_model(model, Policy(), {"state": data.state[:3], "task": np.array([data.task(0)] * 3)}, 1, 0)
    np.testing.assert_allclose(asked[0][:, 0].numpy(), own_units.as_commands([data])[0].action[:3], atol=1e-6)
    assert model.spec.control.axes[0].unit == "rad"


@pytest.mark.slow
def test_the_report_of_a_model_of_it_says_that_nobody_told_success(aloha, tmp_path):
    model = learnt(aloha, tmp_path / "wm")
    doc, _ = measure(model, load(aloha), options.WorldEvalConfig(model=str(tmp_path / "wm"), dataset=str(aloha), windows=8, horizon=4))
    assert np.isfinite([i["value"] for i in doc["open_loop"]["state"]["model"].values()]).all()
    assert "Nobody said which episodes succeeded" in doc["notes"][0]
