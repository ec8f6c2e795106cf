"""The model of encoded pictures: its codec, its carry, what it learns of a world of one moving square, and
its env."""

import copy
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from commands import robo_rl
from test_world_models_video import SPEC, observations, squares

from robo_rl.errors import UserError
from sims.check import check_env
from world_models import learning
from world_models import model as worlds
from world_models.calibrate import TOLD_CODED, set_shift
from world_models.encoded import Encoded, build
from world_models.encoded_fit import EncodedFitter
from world_models.env import WorldEnv
from world_models.imagine import play
from world_models.learning import saved_config
from world_models.options import EncodedConfig, EncodedFitOptions, EncodedOptions, FitOptions, LatentOptions
from world_models.plan import Planner, PlanOptions
from world_models.points import FEW, steady_points
from world_models.recorded import check_fits

MINE = replace(SPEC, kind="encoded")
OPTIONS = EncodedOptions(codes=4, width=16, dynamics=LatentOptions(members=3, hidden=64, layers=2))
FIT = EncodedFitOptions(pictures=400, batch=32, lr=3e-3, dynamics=FitOptions(updates=400, batch=64, unroll=4))


@pytest.fixture(scope="module")
def learnt():
    """(the data, its fitter, the learnt model)."""
    data = squares(60)
    fitter = EncodedFitter(
        Encoded(replace(MINE, sparse=data.sparse, ends_on_success=True), OPTIONS), data, FIT, 0
    )
    assert fitter.fit()
    model = fitter.result()
    model.frames, model.spec = data.frames(), model.spec.calibrated(16, 100.0)
    return data, fitter, model


def square(picture: np.ndarray) -> np.ndarray:
    """Where the square is (x, y), as the state tells it."""
    weight = picture[..., 0].astype(float).clip(60, None) - 60
    rows = (np.arange(16) - 7.5)[:, None]
    total = weight.sum((-1, -2)).clip(min=1e-6)
    return (
        np.stack([(weight * rows.T).sum((-1, -2)), (weight * rows).sum((-1, -2))], -1) / total[..., None] / 8
    )


def test_codes_have_unit_variance_and_pictures_come_back(learnt):
    data, _, model = learnt
    codes = model.codes(data.images)
    assert codes.mean(0).abs().max() < 0.15 and codes.std(0).max() < 1.15
    assert codes.std(0)[model.codec.points :].min() > 0.85  # a point that hardly moves stays small
    carry = model.start({"state": data.state, "image/top": data.images["top"]}, np.arange(len(data.state)))
    error = (model.look(carry)["image/top"].numpy().astype(float) - data.images["top"]) ** 2
    assert (
        error.mean()
        < 0.25 * (data.images["top"].astype(float) - data.images["top"].mean(0)).__pow__(2).mean()
    )


def test_the_square_goes_where_it_is_commanded(learnt):
    """Held-out episodes, open loop: picture and state, nearer than a world that stands still."""
    data, _, model = learnt
    first = data.first[data.held & (data.lengths > 8)]
    obs = {"state": data.state[first], "image/top": data.images["top"][first]}
    actions = torch.from_numpy(data.action[first[:, None] + np.arange(8)])
    _, p = model.step(model.start(obs, first), actions)
    truth = data.state[first[:, None] + np.arange(1, 9)]
    shown, stood = square(p.obs["image/top"].numpy()), square(obs["image/top"])[:, None]
    assert np.abs(p.obs["state"].numpy() - truth).mean() < 0.05
    assert np.abs(shown - truth)[:, -1].mean() < 0.6 * np.abs(stood - truth)[:, -1].mean()


def test_a_step_that_draws_nothing_is_the_same_step_and_look_draws_it(learnt):
    data, _, model = learnt
    obs = {"state": data.state[:3], "image/top": data.images["top"][:3]}
    actions = torch.rand(3, 5, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    a, whole = model.step(model.start(obs, np.arange(3)), actions)
    b, bare = model.step(model.start(obs, np.arange(3)), actions, draw=False)
    assert list(bare.obs) == ["state"] and torch.equal(bare.obs["state"], whole.obs["state"])
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert torch.equal(model.look(b)["image/top"], whole.obs["image/top"][:, -1])


def test_chunks_may_be_split_and_a_lane_depends_on_its_own_rows_alone(learnt):
    model, obs = learnt[2], observations()
    actions = torch.rand(3, 6, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    _, whole = model.step(model.start(obs, np.arange(3)), actions)
    carry, first = model.step(model.start(obs, np.arange(3)), actions[:, :2])
    _, second = model.step(carry, actions[:, 2:])
    assert torch.equal(torch.cat([first.obs["state"], second.obs["state"]], 1), whole.obs["state"])
    _, alone = model.step(model.start({k: v[1:2] for k, v in obs.items()}, np.array([1])), actions[1:2])
    assert torch.allclose(alone.obs["state"], whole.obs["state"][1:2], atol=1e-5)


def test_it_keeps_the_contract_and_draws_only_where_somebody_looks(learnt):
    model = learnt[2]
    check_env(lambda n: WorldEnv(model, n), num_envs=3, cuts=True, atol=1e-4)
    env = WorldEnv(model, 4)
    before = env.reset(seed=0)[0]["image/top"]
    env.images, drawn = False, []
    look = model.look
    model.look = lambda carry: drawn.append(len(carry["code"])) or look(carry)
    try:
        for _ in range(3):
            obs = env.step(np.ones((4, 2), np.float32))[0]
            assert np.array_equal(obs["image/top"], before)
        assert not drawn
        env.images = True
        obs = env.step(np.ones((4, 2), np.float32))[0]
        assert drawn == [4] and not np.array_equal(obs["image/top"], before)
    finally:
        del model.look


def test_whoever_acts_is_shown_the_last_picture_of_a_chunk_and_no_other_is_drawn(learnt, monkeypatch):
    """As a model that draws every step, in an evaluation and in a plan."""
    _, _, model = learnt
    obs, drawn, seen = observations(), [], []
    pictures = type(model)._pictures
    monkeypatch.setattr(
        type(model), "_pictures", lambda m, code, c: drawn.append(code.shape[1]) or pictures(m, code, c)
    )

    def act(obs):
        seen.append(obs["image/top"].copy())
        right = obs["image/top"].reshape(len(obs["state"]), -1).mean(1) / 255
        return np.repeat(np.stack([right, -right], 1)[:, None], 3, 1).astype(np.float32)

    def found():
        seen.clear()
        drawn.clear()
        played = play(model, act, obs, 9)
        scores = Planner(model, act, act, PlanOptions(candidates=2, kept=2, margin=0)).score(
            obs, np.stack([act(obs), -act(obs)], 1)
        )
        return (*(getattr(played, k) for k in ("success", "gain", "uncertainty")), scores, *seen), drawn[:]

    lazy, of_lazy = found()
    monkeypatch.delattr(type(model), "look")
    whole, of_whole = found()
    assert set(of_lazy) == {1} and set(of_whole) == {3}
    assert all(np.array_equal(a, b) for a, b in zip(lazy, whole, strict=True))


def test_a_linear_function_of_the_codes_tells_where_the_square_is(learnt):
    data, _, model = learnt
    told = []
    for codes in (model.codes(data.images), model.codes(data.images)[:, model.codec.points :]):
        x = np.concatenate([codes.numpy(), np.ones((len(codes), 1))], 1)
        place = square(data.images["top"])
        told.append(np.abs(x @ np.linalg.lstsq(x, place, rcond=None)[0] - place).mean())
    assert told[0] < 0.02 < told[1]  # of a half width; what was learnt alone is further off


def test_a_model_of_before_there_were_points_has_none(learnt):
    spec = learnt[2].spec
    old = {k: v for k, v in asdict(OPTIONS).items() if k != "points"}
    assert build(spec, old).codec.points == 0 and build(spec, asdict(OPTIONS)).codec.points == 32
    plain = Encoded(spec, replace(OPTIONS, points=False))
    assert plain.codec.size == OPTIONS.codes
    plain.load_state_dict(build(spec, old).state_dict())


def test_an_unfinished_fit_of_before_there_were_points_goes_on_without(tmp_path):
    net = {k: v for k, v in asdict(OPTIONS).items() if k != "points"}
    for have, points in ((net, False), (net | {"points": True}, True)):
        config = asdict(EncodedConfig(data=("d",))) | {"kind": "encoded", "net": have}
        (tmp_path / "run.json").write_text(json.dumps({"config": config}, default=str))
        assert saved_config(tmp_path, EncodedConfig).net.points is points


def test_a_folder_gives_the_model_back(learnt, tmp_path):
    model = learnt[2]
    worlds.save(model, tmp_path / "m")
    again, obs = worlds.load(tmp_path / "m"), observations()
    a, b = (m.step(m.start(obs, np.arange(3)), torch.ones(3, 2, 2))[1] for m in (model, again))
    assert again.spec == model.spec and again.options == model.options
    assert all(torch.equal(a.obs[k], b.obs[k]) for k in a.obs)


@pytest.mark.parametrize("stop", [5, 14])
def test_a_fit_goes_on_exactly_in_either_part(stop):
    data = squares(24)
    fit = EncodedFitOptions(pictures=9, batch=8, dynamics=FitOptions(updates=9, batch=16, unroll=2))
    whole, first, second = (EncodedFitter(Encoded(MINE, OPTIONS), data, fit, 3) for _ in range(3))
    assert whole.fit()
    assert not first.fit(lambda update, parts: update < stop)
    second.load_state_dict(first.state_dict())
    assert second.fit()
    for a, b in zip(whole.result().state_dict().values(), second.result().state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_what_it_cannot_learn_from_is_one_line():
    with pytest.raises(UserError, match="multiple of 16 pixels, .* top of 24; .*--image-size 32"):
        Encoded(replace(MINE, image_size=24), OPTIONS)
    for wrong in ({"codes": 0}, {"width": 1}, {"noise": -1.0}):
        with pytest.raises(UserError, match=f"net.{next(iter(wrong))} must be in"):
            EncodedOptions(**wrong)


@pytest.mark.slow
def test_from_recordings_to_an_env_on_the_command_line(tmp_path):
    assert (
        robo_rl(
            tmp_path,
            "collect",
            "--task",
            "reach",
            "--obs",
            "rgb",
            "--image-size",
            32,
            "--policy",
            "expert,random",
            "--episodes",
            12,
            "--out",
            "data",
        ).code
        == 0
    )
    little = [
        "--net.codes",
        4,
        "--net.width",
        16,
        "--net.dynamics.hidden",
        16,
        "--fit.pictures",
        4,
        "--fit.dynamics.updates",
        60,
    ]
    done = robo_rl(tmp_path, "wm", "train", "data", "--kind", "encoded", *little, "--out", "m")
    assert done.code == 0 and " frames" in done.out + done.err and "encoding " in done.out + done.err, done
    assert robo_rl(tmp_path, "wm", "train", "--kind", "encoded", "--resume", "m").code == 0
    done = robo_rl(tmp_path, "wm", "eval", "m", "data", "--windows", 8, "--horizon", 8, "--inverse", 5)
    assert done.code == 0, done
    done = robo_rl(tmp_path, "wm", "train", "data", "--kind", "encodes")
    assert "did you mean 'encoded'? Allowed: encoded, latent" in done.mistake


def test_cameras_are_known_by_name_in_whatever_order_they_were_recorded():
    """A model of (left, right) reads a recording of (right, left) as the same pictures; one that lacks a
    camera is refused."""
    data = squares(4)
    two = {"left": data.images["top"], "right": 255 - data.images["top"]}
    data = replace(data, images=two, control=replace(data.control, views=("left", "right")))
    model = Encoded(replace(MINE, control=data.control, tasks=data.tasks), OPTIONS)
    turned = dict(reversed(two.items()))
    check_fits(
        model.spec,
        replace(data, images=turned, control=replace(data.control, views=("right", "left"))),
        "here",
    )
    assert torch.equal(model.codes(two), model.codes(turned))
    with pytest.raises(UserError, match="cameras left, right in the model, left in the data"):
        check_fits(model.spec, replace(data, images={"left": two["left"]}), "here")


def test_which_probability_is_a_success_is_told_by_short_rollouts(learnt, monkeypatch):
    _, fitter, model = learnt
    for told in (1, TOLD_CODED, 0):
        made, report = learning.calibrated(copy.deepcopy(model.dynamics), fitter.coded, 12, 0.75, told=told)
        other = copy.deepcopy(model.dynamics)
        set_shift(other, fitter.coded, told or 12)
        assert torch.equal(made.shift, other.shift) and report["shift"] == other.shift.tolist()
    asked = {}

    def calibrated(dynamics, data, horizon, tolerance, **more):
        asked.update(more)
        return dynamics, {}

    monkeypatch.setattr(learning, "calibrated", calibrated)
    monkeypatch.setattr(learning, "world_spec", lambda *a: replace(MINE, ends_on_success=True))
    job = learning.encoded_job(EncodedConfig(data=("d",), net=OPTIONS, fit=FIT), squares(8))
    job.fitter.begin_dynamics()
    job.finish(None)
    assert asked == {"told": TOLD_CODED, "progress": None}


def test_a_point_that_flickers_is_left_out():
    """Of two points that move alike, one is told a little wrong in every frame."""
    draw = torch.Generator().manual_seed(0)
    moves = torch.rand(400, 1, generator=draw) + 0.02 * torch.arange(3.0)
    noise = 0.1 * torch.randn(400, 3, generator=draw)
    still = torch.zeros(400, 3)
    three = torch.stack([moves, moves, moves, moves + noise, still, still + 0.01 * noise], 2)
    assert steady_points(three).tolist() == [1, 1, 0, 0, 1, 1]


def test_points_that_flicker_are_no_part_of_the_state(learnt):
    data, fitter, model = learnt
    patches = fitter.patches(np.arange(8))
    codec = copy.deepcopy(model.codec)
    codec.steady[2:4] = 0
    assert not codec.raw(patches)[:, 2:4].any() and codec.raw(patches)[:, :2].any()
    centre, spread = codec.measured(codec.raw(patches))
    assert ((codec.raw(patches) - centre) / spread)[:, 2:4].abs().max() == 0
    saved = {k: v for k, v in codec.state_dict().items() if k != "steady"}
    codec.load_state_dict(saved)  # weights of before: they know every point
    assert codec.steady.all()


def test_a_few_frames_leave_every_point(learnt):
    data, _, model = learnt
    one = squares(3)
    fitter = EncodedFitter(Encoded(model.spec, OPTIONS), one, FIT, 0)
    assert len(fitter.train) < FEW and fitter.model.codec.steady.all()
