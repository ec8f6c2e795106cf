"""World models of a data set in its own units, with pictures that are not square."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

import robo_rl
from robo_rl import files
from robo_rl.cli import main
from robo_rl.data import labels
from robo_rl.data.reader import load
from robo_rl.demos import load_demos
from robo_rl.errors import UserError
from robo_rl.experiment.planning import PlanningOptions, load_planned_actor, planned_actor
from robo_rl.experiment.policy_server import run_interface
from robo_rl.experiment.world_model import make_real, play_in_model
from robo_rl.policies import ObsSpec
from world_models import learning, options, own_units, reading, recorded
from world_models import model as worlds
from world_models.env import WorldEnv
from world_models.evaluate import measure
from world_models.own_pictures import as_squares
from world_models.windows import check_dataset

pytestmark = pytest.mark.filterwarnings(
    "ignore:data set .* without checksums", "ignore:data set .* has cameras"
)
SIZE = (24, 32)
UNITS = (("rad",) * 6 + ("1",)) * 2


@pytest.fixture(scope="module")
def aloha(tmp_path_factory):
    return datasets.write(
        tmp_path_factory.mktemp("own") / "aloha", "aloha", episodes=12, length=24, size=SIZE
    )


def test_actions_become_commands_whose_axes_say_what_they_mean_and_a_models_ranges_hold(aloha):
    data = load(aloha)
    [told] = own_units.as_commands([data])
    axis = told.spec.axes[0]
    assert (axis.unit, axis.kind, axis.low, axis.high) == (
        "rad",
        "absolute",
        data.action[:, 0].min(),
        data.action[:, 0].max(),
    )
    assert np.allclose(told.action.min(0), -1, atol=1e-6) and np.allclose(told.action.max(0), 1, atol=1e-6)
    half = own_units.as_commands([load(aloha, episodes=2)], told.spec.axes)[0]
    np.testing.assert_array_equal(half.action, told.action[: len(half.action)])
    assert own_units.as_commands([told]) == [told]


def test_units_that_nobody_stated_are_asked_for(tmp_path):
    folder = datasets.write(tmp_path / "so100", "so100", episodes=2, length=10, views=0)
    with pytest.raises(UserError, match="nobody stated the units.*robo_rl data label"):
        own_units.as_commands([load(folder)])
    labels.state_units(folder, "deg*5,%")
    assert [a.unit for a in own_units.as_commands([load(folder)])[0].spec.axes] == ["deg"] * 5 + ["%"]


def test_degrees_that_are_called_radians_are_refused_by_a_model_of_radians(aloha):
    data = load(aloha)
    axes = own_units.as_commands([data])[0].spec.axes
    degrees = replace(data, action=np.degrees(data.action))
    with pytest.raises(UserError, match="goes from .* rad, in the model's recordings from .*other units"):
        own_units.as_commands([degrees], axes)
    wider = replace(data, action=2 * data.action)
    assert np.abs(own_units.as_commands([wider], axes)[0].action).max() > 1.5, "another motion is none"


def test_radians_that_are_called_degrees_are_refused_by_a_model_of_degrees(tmp_path):
    folder = datasets.write(tmp_path / "so100", "so100", episodes=2, length=30, views=0)
    labels.state_units(folder, "deg")
    data = load(folder)
    axes = own_units.as_commands([data])[0].spec.axes
    radians = replace(data, action=np.radians(data.action))
    with pytest.raises(UserError, match="goes from .* deg, in the model's recordings from .*other units"):
        own_units.as_commands([radians], axes)
    for less in (data.action / 8, np.tile(data.action[:1], (len(data.action), 1)), data.action[:0]):
        own_units.as_commands([replace(data, action=less)], axes)  # a little motion, none, no frame
        if len(less):
            own_units.as_commands([data, replace(data, action=less)])
    with pytest.raises(UserError, match="goes from .* deg, in all data sets together from .*other units"):
        own_units.as_commands([data, radians])


def test_what_a_function_gives_that_is_no_action_of_the_model_is_one_line(aloha, tmp_path):
    model, data = learnt(aloha, tmp_path / "wm"), load(aloha)
    obs = {"state": data.state[:3], "task": np.array([data.task(0)] * 3)}
    for actions, words in (
        (np.zeros((3, 7)), "commands 7 axes, the world model has 14: left_waist"),
        (np.zeros(14), r"gives actions \[N, A\].*N = 3.*shape \[14\]"),
        (np.full((3, 14), np.nan), "not finite"),
    ):
        with pytest.raises(UserError, match=words):
            play_in_model(model, lambda o, a=actions: a, obs, 1, 0)


def test_runs_that_had_no_simulator_are_ranked_against_the_robot_alone(aloha, tmp_path):
    files.write_json(tmp_path / "run.json", {"config": {"sim": "none", "algo": "bc", "demos": str(aloha)}})
    with pytest.raises(UserError, match="without a simulator to compare with.*--real FILE"):
        make_real(spec_of(aloha)[0], [tmp_path], 1)


def test_pictures_are_padded_to_squares_as_they_are_decoded(aloha):
    data = load(aloha)
    square = as_squares(data, 16)
    assert square.frames("cam_high", 1).shape[1:] == (16, 16, 3) and set(square.views.values()) == {(16, 16)}
    assert square.episode(1).images["cam_high"].shape == square.frames("cam_high", 1).shape
    assert not square.frames("cam_high", 1)[:, :2].any()  # 24 x 32: two rows of padding above and below
    assert as_squares(square, 8) is square


def test_square_pictures_become_as_small_as_the_model_is_to_have_them(tmp_path):
    folder = datasets.write(tmp_path / "data", "aloha", episodes=12, length=24, size=(32, 32))
    assert as_squares(load(folder), 16) is not None and as_squares(load(folder), 16).views["cam_high"] == (
        32,
        32,
    )
    config = options.EncodedConfig(
        data=(str(folder),),
        image_size=16,
        out=str(tmp_path / "wm"),
        net=options.EncodedOptions(codes=4, width=8, dynamics=options.LatentOptions(members=2, hidden=16)),
        fit=options.EncodedFitOptions(
            pictures=2, batch=4, dynamics=options.FitOptions(updates=2, batch=8, unroll=2)
        ),
    )
    model = worlds.load(learning.train(config).folder)
    assert model.spec.image_size == 16 and model.spec.resized and set(model.spec.pictures) == {(32, 32)}
    new = datasets.write(tmp_path / "new", "aloha", episodes=4, length=24, size=(32, 32))
    asked = options.WorldEvalConfig(
        model="wm", dataset=str(new), windows=4, horizon=8, inverse=2, video=False
    )
    doc, arrays = measure(model, load(new), asked)
    assert arrays["windows"].images["cam_high"].shape[2:] == (16, 16, 3) and doc
    with pytest.raises(UserError, match="--image-size goes with --kind encoded, video, diffusers"):
        options.WorldModelConfig(data=("d",), image_size=32)


def learnt(aloha, out):
    learned = learning.train(
        options.WorldModelConfig(
            data=(str(aloha),),
            out=str(out),
            net=options.LatentOptions(members=2, hidden=16, layers=1),
            fit=options.FitOptions(updates=10, batch=16, unroll=2),
        )
    )
    return worlds.load(learned.folder)


def test_a_policy_that_learnt_in_the_robots_units_acts_in_a_model_of_its_data(aloha, tmp_path):
    model, data, asked = learnt(aloha, tmp_path / "wm"), load(aloha), []

    class Policy:
        spec = ObsSpec(state=14, action=14, units=UNITS)

        def act(self, obs, generator, explore):
            return SimpleNamespace(actions=torch.from_numpy(data.action[:3])[:, None])

    step = model.step
    model.step = lambda carry, actions: asked.append(actions) or step(carry, actions)
    play_in_model(model, Policy(), {"state": data.state[:3], "task": np.array([data.task(0)] * 3)}, 1, 0)
    np.testing.assert_allclose(asked[0][:, 0].numpy(), own_units.as_commands([data])[0].action[:3], atol=1e-6)
    assert model.spec.control.axes[0].unit == "rad" and model.spec.own


def stub(data, **spec):
    """A policy in the robot's units that does what was recorded first."""

    class Policy:
        options = SimpleNamespace(acts="flow", execute=1)

        def act(self, obs, generator, explore):
            shapes.append({k: tuple(v.shape[1:]) for k, v in obs.items()})
            return SimpleNamespace(actions=torch.from_numpy(data.action[: len(obs["state"])])[:, None])

    shapes, policy = [], Policy()
    policy.spec = ObsSpec(state=14, action=14, units=UNITS, **spec)
    return policy, shapes


def test_a_policy_that_learnt_in_the_robots_units_plans_on_the_robot_in_these(aloha, tmp_path):
    model, data = learnt(aloha, tmp_path / "wm"), load(aloha)
    model.spec = model.spec.calibrated(8, 100.0)
    worlds.save(model, tmp_path / "calibrated")
    options = PlanningOptions(plan_in=str(tmp_path / "calibrated"), plan_candidates=2, plan_ahead=1)
    act = planned_actor(stub(data)[0], options, data.task(0), seed=0)
    [rows] = act.many([{"state": data.state[0]}])
    np.testing.assert_allclose(rows, data.action[:1], atol=1e-5)


# ---- what a policy is shown, and what its actions are ------------------------------------------------------


def seen_by(fit="crop", **change):
    """A policy that learnt in radians from pictures, as far as `translate` asks."""
    known = {
        "state": 14,
        "action": 14,
        "views": ("cam_left_wrist",),
        "image_size": 96,
        "fit": fit,
        "units": UNITS,
    }
    return SimpleNamespace(spec=ObsSpec(**known | change), act=None)


def spec_of(aloha, **change):
    data = reading.read([str(aloha)], images=True)
    return replace(learning.world_spec(data, "video", ""), **change), data


def test_a_policy_is_shown_the_pictures_in_the_shape_that_was_recorded_and_acts_in_its_units(aloha):
    spec, data = spec_of(aloha)
    assert (
        spec.pictures == (SIZE, SIZE)
        and spec.image_size == 64
        and spec.own
        and data.control.axes[0].unit == "rad"
    )
    observe, command = own_units.translate(seen_by(), spec)
    obs = {f"image/{v}": x[:3] for v, x in data.images.items()} | {"state": data.state[:3]}
    shown = observe(obs)
    np.testing.assert_array_equal(shown["image/cam_left_wrist"], data.images["cam_left_wrist"][:3, 8:56])
    assert shown["image/cam_high"].shape == (3, 64, 64, 3), "it does not look through that one"
    np.testing.assert_allclose(command(load(aloha).action[:3]), data.action[:3], atol=1e-6)
    observe, command = own_units.translate(lambda obs: obs, spec)
    assert observe(obs) is obs and command(data.action) is data.action


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"views": ("front",)}, "nothing shows it front; learn both from the same cameras"),
        ({"state": 7}, "state size is 7, the world model's 14"),
        ({"units": ("deg",) * 14}, "left_waist is in deg, the world model's rad"),
        ({"action": 7, "units": ()}, "action size is 7"),
        ({"action_names": tuple("abcdefghijklmn")}, "action axes are a, b"),
        ({"fit": ""}, "image size is 96, the world model's 64"),
    ],
)
def test_a_policy_that_a_model_does_not_fit_is_one_line(aloha, change, words):
    spec, _ = spec_of(aloha)
    with pytest.raises(UserError, match=words):
        own_units.translate(seen_by(**change), spec)


def test_a_policy_of_pictures_is_told_that_a_model_of_states_shows_none(aloha):
    spec, _ = spec_of(aloha)
    with pytest.raises(
        UserError,
        match="a latent model predicts states alone; learn one of pictures: .*--kind encoded, video or.*"
        "--data.cameras none",
    ):
        own_units.translate(seen_by(), replace(spec, kind="latent", control=replace(spec.control, views=())))


def test_a_model_of_states_says_what_it_does_not_learn(aloha):
    with pytest.warns(
        UserWarning,
        match="has cameras, cam_high, cam_left_wrist, and a model of this kind learns its 14 state numbers",
    ):
        reading.read([str(aloha)])


def test_data_sets_whose_cameras_differ_teach_a_model_of_states_and_none_of_pictures(aloha, tmp_path):
    larger = datasets.write(tmp_path / "larger", "aloha", episodes=2, length=24, size=(30, 40))
    data = reading.read([str(aloha), str(larger)])
    assert len(data) == 14 and not data.images and not data.control.views
    with pytest.raises(UserError, match="camera 'cam_high' is 30x40 here, 24x32 there"):
        reading.read([str(aloha), str(larger)], images=True)


def test_a_model_of_some_cameras_reads_those_alone_in_their_order(aloha):
    both = reading.read([str(aloha)], images=True)
    one = reading.read([str(aloha)], images=True, cameras="cam_left_wrist")
    assert list(one.images) == list(one.final_images) == ["cam_left_wrist"]
    assert one.control.views == ("cam_left_wrist",)
    np.testing.assert_array_equal(one.images["cam_left_wrist"], both.images["cam_left_wrist"])
    np.testing.assert_array_equal(one.final_images["cam_left_wrist"], both.final_images["cam_left_wrist"])
    turned = reading.read([str(aloha)], images=True, cameras="cam_left_wrist, cam_high")
    assert turned.control.views == tuple(turned.images) == ("cam_left_wrist", "cam_high")
    spec = learning.world_spec(one, "video", "")
    again = reading.read([str(aloha)], images=True, model=spec)  # a model is shown its own cameras
    assert tuple(again.images) == spec.control.views and recorded.differences(spec, again) == []
    recorded.check_fits(spec, both, "aloha")  # more cameras than it has do not disturb it
    with pytest.raises(UserError, match="no camera 'top'; it has: cam_high, cam_left_wrist"):
        reading.read([str(aloha)], images=True, cameras="cam_high,top")
    with pytest.raises(UserError, match="names a camera twice"):
        reading.read([str(aloha)], images=True, cameras="cam_high,cam_high")


def test_sets_that_share_the_chosen_cameras_teach_one_model_of_pictures(aloha, tmp_path):
    high = datasets.write(tmp_path / "high", "aloha", episodes=2, length=24, size=SIZE, views=1)
    with pytest.raises(UserError, match="'cam_left_wrist'"):
        reading.read([str(aloha), str(high)], images=True)
    data = reading.read([str(aloha), str(high)], images=True, cameras="cam_high")
    assert len(data) == 14 and data.control.views == tuple(data.images) == ("cam_high",)
    spec = learning.world_spec(data, "video", "")
    with pytest.raises(UserError, match="cameras cam_left_wrist in the model, cam_high in the data"):
        recorded.check_fits(
            replace(spec, control=replace(spec.control, views=("cam_left_wrist",))), data, "d"
        )
    with pytest.raises(UserError, match=f"data set {high} has no camera 'cam_left_wrist'; it has: cam_high"):
        reading.read([str(aloha), str(high)], images=True, cameras="cam_left_wrist")
    with pytest.raises(
        UserError, match="--cameras goes with --kind encoded, video, diffusers, got --kind latent"
    ):
        options.WorldModelConfig(data=("d",), cameras="front")


def test_episodes_that_nobody_judged_beside_judged_ones_are_told(aloha, tmp_path):
    other = Path(shutil.copytree(aloha, tmp_path / "judged"))
    labels.label_success(other, "all")
    with pytest.warns(UserWarning, match="aloha: nobody said which of its .*robo_rl data label .*--success"):
        data = reading.read([str(aloha), str(other)])
    assert data.success.sum() == len(load(other))


def test_units_that_differ_are_named_with_their_remedy(aloha, tmp_path):
    other = Path(shutil.copytree(aloha, tmp_path / "deg"))
    labels.state_units(other, "deg")
    with pytest.raises(
        UserError,
        match=r"'left_waist' is in rad \(absolute\) there, in deg \(absolute\) here.*robo_rl data label",
    ):
        reading.read([str(aloha), str(other)])
    spec, _ = spec_of(aloha)
    axes = own_units.as_commands([load(other)], spec.control.axes)[0].spec.axes
    with pytest.raises(
        UserError,
        match=r"'left_waist' is in rad \(absolute\) in the model, in deg \(absolute\) in the data.*"
        "robo_rl data label .*deg --u",
    ):
        check_dataset(
            replace(spec, control=replace(spec.control, views=())), load(other).meta, str(other), axes
        )


def test_demonstrations_in_the_models_units_are_told_in_its_commands(aloha, tmp_path):
    spec, data = spec_of(aloha)
    env = object.__new__(WorldEnv)
    env.model = SimpleNamespace(spec=spec)
    np.testing.assert_allclose(load_demos(aloha, env).action, data.action, atol=1e-6)
    other = Path(shutil.copytree(aloha, tmp_path / "deg"))
    labels.state_units(other, "deg")
    with pytest.raises(
        UserError,
        match=r"rad \(absolute\) in the model, in deg \(absolute\) in the data; give demonstrations in the",
    ):
        load_demos(other, env)
    env.model = SimpleNamespace(spec=replace(spec, tasks=("fold the shirt",)))
    with pytest.raises(UserError, match="'transfer the cube', which the world model was never taught; it kn"):
        load_demos(aloha, env)
    arm = SimpleNamespace(spec=spec.control)
    np.testing.assert_array_equal(load_demos(aloha, arm).action, load(aloha).action)


@pytest.mark.slow
def test_a_run_of_the_folder_is_evaluated_in_a_model_of_it_by_the_command_and_in_python(
    aloha, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)

    def told(*argv, code=0):
        with pytest.raises(SystemExit) as e:
            main([*argv])
        said = capsys.readouterr()
        assert (e.value.code or 0) == code, said
        return said.err if code else said.out

    tiny = ("--policy.horizon", "4", "--policy.execute", "2", "--bc.updates", "2", "--bc.batch", "4")
    told(
        "train",
        "--sim",
        "none",
        "--algo",
        "bc",
        "--demos",
        str(aloha),
        "--data.cameras",
        "cam_high",
        "--out",
        "bc",
        *tiny,
    )
    told(
        "wm",
        "train",
        str(aloha),
        "--kind",
        "encoded",
        "--out",
        "wm",
        "--horizon",
        "8",
        "--tolerance",
        "50",
        "--fit.pictures",
        "2",
        "--fit.dynamics.updates",
        "300",
        "--fit.dynamics.batch",
        "32",
        "--net.width",
        "8",
        "--net.codes",
        "4",
        "--net.dynamics.hidden",
        "32",
        "--net.dynamics.members",
        "2",
    )
    assert worlds.load("wm").spec.horizon
    said = told("eval", "bc", "--sim", "wm:wm", "--episodes", "3")
    assert "transfer the cube" in said and " 3" in said
    assert "leave it out" in told("eval", "bc", "--sim", "wm:wm", "--chunking", "blend", code=2)
    told(
        "train",
        "--sim",
        "wm:wm",
        "--obs",
        "rgb",
        "--data.fit",
        "pad",
        "--demos",
        str(aloha),
        "--algo",
        "bc",
        "--out",
        "inside",
        *tiny,
        "--eval-episodes",
        "2",
        "--no-video",
    )
    ours = robo_rl.evaluate(robo_rl.load_policy("bc"), robo_rl.load_world_model("wm"), episodes=3)
    assert ours.n == 3 and set(ours.tasks) == {"transfer the cube"}

    options = PlanningOptions(plan_in="wm", plan_candidates=2, plan_ahead=2)
    with pytest.raises(UserError, match="the world model has the cameras cam_high.*an observation lacks"):
        load_planned_actor(options, run_interface("bc", "last", ""), "", 0)
    data, views = load(aloha), worlds.load("wm").spec.control.views
    policy, shapes = stub(data, views=views, fit="pad", image_size=16, language=True)
    act = planned_actor(policy, options, data.task(0), seed=0)
    [rows] = act.many(
        [{"state": data.state[0]} | {f"image/{v}": next(iter(data.blocks(v, 0)))[1][0] for v in views}]
    )
    np.testing.assert_allclose(rows, data.action[:1], atol=1e-5)
    assert shapes[-1][f"image/{views[0]}"] == (16, 16, 3)  # as the policy takes them


@pytest.mark.slow
def test_the_report_of_a_model_of_it_says_that_nobody_told_success(aloha, tmp_path):
    model = learnt(aloha, tmp_path / "wm")
    doc, _ = measure(
        model,
        load(aloha),
        options.WorldEvalConfig(model=str(tmp_path / "wm"), dataset=str(aloha), windows=8, horizon=4),
    )
    assert np.isfinite([i["value"] for i in doc["open_loop"]["state"]["model"].values()]).all()
    assert "Nobody said which episodes succeeded" in doc["notes"][0] and not doc["success"]["known"]
    assert "These 8 windows are of 1 episode alone" in doc["notes"][1]
