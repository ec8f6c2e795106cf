"""The video model: its flow against cases with a known answer, its carry, its learning on a world of one
moving square."""

import copy
import io
import json
import signal
import warnings
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.vector import VectorWrapper

import robo_rl
from robo_rl.device_names import slow_bf16, with_dtype
from robo_rl.errors import UserError
from robo_rl.files import cores
from robo_rl.log import Progress
from robo_rl.types import ActionAxis, ControlSpec
from world_models import model as worlds
from world_models.calibrate import along_recorded, covering, rolled
from world_models.learning import calibrated, saved_config, world_spec
from world_models.model import WorldSpec
from world_models.options import LatentOptions, VideoConfig, VideoOptions, threads
from world_models.reading import read
from world_models.recorded import Recorded, one_outcome
from world_models.video import PATCH, Dense, Video, build, padded, to_frames, to_patches
from world_models.video_fit import VideoFitOptions, VideoFitter, evened, with_points

AXES = tuple(ActionAxis(n, "m", -0.1, 0.1, "delta", "base") for n in "xy")
CONTROL = ControlSpec("toy", "square", AXES, 0.1, 20, ("x", "y"), ("top",))
SPEC = WorldSpec(kind="video", control=CONTROL, state=2, image_size=16)
SMALL = {
    "chunk": 4,
    "width": 16,
    "blocks": 1,
    "steps": 1,
    "stride": 4,
    "head_width": 16,
    "points": False,
    "proprio": LatentOptions(members=3, hidden=32, layers=2),
}


def options(**more) -> VideoOptions:
    return VideoOptions(**(SMALL | more))


def squares(episodes=24, steps=16, seed=0) -> Recorded:
    """A 6-pixel square that goes where it is commanded; success ends an episode at the right edge."""
    rng = np.random.default_rng(seed)
    rows, ends = [], []
    for _ in range(episodes):
        at, held = rng.uniform(-0.5, 0.5, 2), rng.uniform(-1, 1, 2)
        for t in range(steps):
            if t % 4 == 0:
                held = rng.uniform(-1, 1, 2)
            after = (at + 0.1 * held).clip(-0.6, 0.6)
            won = after[0] >= 0.6
            rows.append((at.copy(), held.copy(), float(won)))
            at = after
            if won:
                break
        ends.append(len(rows))
    state, action, reward = (np.array([r[k] for r in rows], np.float32) for k in range(3))
    picture = np.full((len(rows), 16, 16, 3), 30, np.uint8)
    for i, (x, y) in enumerate(state):
        px, py = round((x + 1) * 8) - 3, round((y + 1) * 8) - 3
        picture[i, py : py + 6, px : px + 6] = (220, 60, 40)
    end = np.array(ends)
    won = reward[end - 1] > 0
    return Recorded(
        state,
        action,
        reward,
        np.concatenate([[0], end[:-1]]),
        end,
        won,
        won,
        np.zeros(episodes, np.int64),
        ("",),
        CONTROL,
        {"top": picture},
        np.full((episodes, 2), np.nan, np.float32),
    )


def observations(n=3, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "state": rng.standard_normal((n, 2)).astype(np.float32),
        "image/top": rng.integers(0, 256, (n, 16, 16, 3), np.uint8),
    }


def stirred(**more) -> Video:
    """A model whose weights are not those of "nothing changes"."""
    model = Video(SPEC, options(**more))
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    return model


def test_patches_and_frames_are_each_other_s_inverse():
    x = torch.from_numpy(observations()["image/top"])
    patches = to_patches(x)
    assert patches.shape == (3, 3 * PATCH**2, 16 // PATCH, 16 // PATCH) and patches.abs().max() <= 1
    assert torch.equal(to_frames(patches), x)


def test_an_untrained_model_says_that_nothing_moves():
    model, obs = Video(SPEC, options()), observations()
    _, p = model.step(model.start(obs, np.arange(3)), torch.zeros(3, 4, 2))
    assert (p.obs["image/top"].numpy() == obs["image/top"][:, None]).all()
    assert p.obs["image/top"].shape == (3, 4, 16, 16, 3) and p.obs["image/top"].dtype == torch.uint8
    assert p.reward.shape == p.success.shape == p.terminal.shape == p.uncertainty.shape == (3, 4)


@pytest.mark.parametrize(("steps", "refine"), [(1, 0), (1, 3), (4, 0), (4, 2)])
def test_with_the_exact_net_every_sampler_gives_the_truth(steps, refine):
    """f(x, t) = y whatever the noise: (2) and (3) must end there."""
    model = Video(SPEC, options(steps=steps, refine=refine))
    truth = torch.randn(2, 48 * 4, 4, 4, generator=torch.Generator().manual_seed(0))
    model.clean = lambda x, t, before, state, states, actions: truth
    zeros = [torch.zeros(2, *shape) for shape in ((4, 48, 4, 4), (2,), (4, 2), (4, 2))]
    got = model.sample(*zeros, lambda k: torch.randn(truth.shape))
    assert torch.allclose(got, truth, atol=1e-6)


def test_the_flow_carries_noise_to_a_gaussian_of_the_right_spread():
    """Of y ~ N(0, s^2) the clean estimate is x (1-t) s^2 / ((1-t)^2 s^2 + t^2); 100 steps must give std s."""
    model, s = Video(SPEC, options(steps=100)), 0.5
    model.clean = lambda x, t, *_: x * ((1 - t) * s**2 / ((1 - t) ** 2 * s**2 + t**2))[:, None, None, None]
    zeros = [torch.zeros(60, *shape) for shape in ((4, 48, 4, 4), (2,), (4, 2), (4, 2))]
    y = model.sample(*zeros, lambda k: torch.randn(60, 192, 4, 4, generator=torch.Generator().manual_seed(k)))
    assert float(y.std()) == pytest.approx(s, rel=0.03)


def test_without_refinement_one_step_is_the_plain_regression_and_draws_nothing():
    model, obs = stirred(), observations()
    actions = torch.full((3, 4, 2), 0.3)
    a, b = (
        model.step(model.start(obs, keys), actions)[1].obs["image/top"]
        for keys in (np.arange(3), np.arange(3) + 9)
    )
    assert torch.equal(a, b)
    last = to_patches(torch.from_numpy(obs["image/top"]))
    states = model.proprio.step(model.proprio.start(obs, np.arange(3)), actions)[1].obs["state"]
    before = last[:, None].expand(3, 4, 48, 4, 4)
    y = model.clean(
        torch.zeros(3, 192, 4, 4), torch.ones(3), before, torch.from_numpy(obs["state"]), states, actions
    )
    frames = (last[:, None] + model.changes(y, torch.from_numpy(obs["state"]), states)).clamp(-1, 1)
    assert torch.equal(to_frames(frames), a)


@pytest.mark.parametrize("more", [{}, {"steps": 2, "refine": 1}, {"steps": 2, "points": True}])
def test_a_lane_depends_on_its_own_key_alone_and_a_forked_carry_goes_on_alike(more):
    model, obs = stirred(**more), observations()
    actions = torch.rand(3, 8, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    carry, whole = model.step(model.start(obs, np.array([5, 6, 7])), actions)
    _, alone = model.step(model.start({k: v[1:2] for k, v in obs.items()}, np.array([6])), actions[1:2])
    near = (alone.obs["image/top"].int() - whole.obs["image/top"][1:2].int()).abs()
    assert whole.obs["state"].shape == (3, 8, 2)
    assert int(near.max()) <= 1 and torch.allclose(alone.obs["state"], whole.obs["state"][1:2], atol=1e-5)
    fork = {k: v[[1, 1]] for k, v in carry.items()}
    _, p = model.step(fork, actions[[1, 1]])
    assert torch.equal(p.obs["image/top"][0], p.obs["image/top"][1])
    if more:
        other = model.step(model.start(obs, np.array([8, 9, 10])), actions)[1]
        assert not torch.equal(other.obs["image/top"], whole.obs["image/top"])


def test_part_of_a_chunk_is_the_beginning_of_the_whole_up_to_what_the_net_sees_of_the_rest():
    model, obs = stirred(), observations()
    _, p = model.step(model.start(obs, np.arange(3)), torch.zeros(3, 6, 2))
    assert p.obs["image/top"].shape[1] == 6 and p.reward.shape == (3, 6)
    short = model.step(model.start(obs, np.arange(3)), torch.zeros(3, 2, 2))[1]
    assert torch.equal(short.obs["state"], p.obs["state"][:, :2])


def test_cameras_are_needed_and_of_a_size_that_patches_fill():
    from dataclasses import replace

    with pytest.raises(UserError, match="needs cameras"):
        Video(replace(SPEC, control=replace(CONTROL, views=())), options())
    with pytest.raises(UserError, match="multiple of 8"):
        Video(replace(SPEC, image_size=20), options())


def test_a_model_survives_its_folder(tmp_path):
    model = stirred(steps=2)
    model.frames = squares().frames()
    worlds.save(model, tmp_path / "m")
    again, obs = worlds.load(tmp_path / "m"), observations()
    assert again.options == model.options and isinstance(again, Video)
    a, b = (m.step(m.start(obs, np.arange(3)), torch.ones(3, 4, 2))[1] for m in (model, again))
    assert torch.equal(a.obs["image/top"], b.obs["image/top"]) and torch.equal(a.success, b.success)
    assert build(model.spec, {"chunk": 2, "proprio": {"members": 2}}).options.chunk == 2


@pytest.mark.parametrize("points", [False, True])
def test_a_fit_that_is_stopped_in_any_part_goes_on_exactly(points):
    data, o = squares(), VideoFitOptions(arm=12, updates=12, batch=2, heads=6, imagined=8)
    for stop in (5, 18, 27):
        fitter, again = (
            VideoFitter(Video(SPEC, options(steps=2, points=points)), data, o, 0) for _ in range(2)
        )
        assert not fitter.fit(lambda n, parts, stop=stop: n != stop) and fitter.made == stop
        saved = copy.deepcopy(fitter.state_dict())
        assert fitter.fit()
        again.load_state_dict(saved)
        assert again.fit()
        for a, b in zip(
            fitter.result().state_dict().values(), again.result().state_dict().values(), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.learning
def test_it_learns_where_the_square_goes():
    data = squares(60)
    fitter = VideoFitter(
        Video(SPEC, options()), data, VideoFitOptions(arm=400, updates=500, batch=16, lr=3e-3, heads=20), 0
    )
    assert fitter.fit()
    model, held = fitter.result(), np.flatnonzero(data.held & (data.lengths > 4))
    rows = data.first[held]
    start = {"state": data.state[rows], "image/top": data.images["top"][rows]}
    at = rows[:, None] + np.arange(4)
    _, p = model.step(model.start(start, rows), torch.from_numpy(data.action[at]))
    truth = data.images["top"][at + 1].astype(float)
    mine, still = (
        np.sqrt(np.square(x.astype(float) - truth).mean((0, 2, 3, 4)))
        for x in (p.obs["image/top"].numpy(), data.images["top"][rows][:, None])
    )
    assert (mine[1:] < 0.8 * still[1:]).all(), (mine, still)


def test_the_ensemble_is_told_where_colours_are_and_frames_are_drawn_by_it():
    data = finished(squares())
    fitter = VideoFitter(Video(SPEC, options(points=True)), data, VideoFitOptions(arm=1), 0)
    model, there = fitter.model, fitter.recorded.state[:, 2:]
    assert there.shape == (len(data.state), 32) and np.array_equal(fitter.recorded.state[:, :2], data.state)
    inputs = np.concatenate([there, np.ones((len(there), 1))], 1)  # the only thing there is, the square
    left = data.state - inputs @ np.linalg.lstsq(inputs, data.state, rcond=None)[0]
    assert (left.std(0) < 0.12 * data.state.std(0)).all()  # it is drawn in whole pixels
    last = model.located(to_patches(torch.from_numpy(data.final_images["top"])))
    assert np.array_equal(fitter.recorded.final, np.concatenate([data.final, last.numpy()], 1))
    unseen = with_points(model, squares()).final[:, 2:]  # no picture of what came of the last action
    assert np.array_equal(unseen, there[data.end - 1])
    rows = data.first[:3]
    begun = model.start({"state": data.state[rows], "image/top": data.images["top"][rows]}, rows)
    assert np.allclose(model.known(begun)["state"].numpy(), fitter.recorded.state[rows], atol=1e-5)
    model, obs = stirred(points=True), observations()
    carry = model.start(obs, np.arange(3))
    elsewhere = carry | {k: carry[k] + 1 for k in ("state_points", "before_points")}
    with torch.no_grad():  # the ensemble apart, which would move the arm too
        model.proprio.net.last.zero_()
    a, b = (model.step(c, torch.zeros(3, 4, 2))[1] for c in (carry, elsewhere))
    assert torch.equal(a.obs["state"], b.obs["state"])
    assert not torch.equal(a.obs["image/top"], b.obs["image/top"]) and not torch.equal(a.success, b.success)


def test_its_unit_is_the_change_that_the_motion_brings():
    """Frames whose change is known by hand: a quarter of the pixels change by the arm's motion along one
    axis."""
    fitter = VideoFitter(Video(SPEC, options()), squares(60), VideoFitOptions(), 0)
    model, rows = fitter.model, fitter.rows[:200]
    state, states = fitter.state[rows], fitter.state[rows[:, None] + torch.arange(1, 5)]
    clip = fitter.patches(rows[:, None] + torch.arange(5))
    true = (clip[:, 1:] - clip[:, :1]).square().mean((2, 3, 4)).sqrt()
    told = model.unit(state, states)[:, :, 0, 0, 0]
    assert (model.moving >= 0).all() and (model.rest >= 1e-4).all()
    assert float(torch.corrcoef(torch.stack([true.flatten(), told.flatten()]))[0, 1]) > 0.6
    assert 0.8 < float((true.square() / told.square()).mean()) < 1.3
    fitter.state[:, 1] = 0.5  # what never moves brings nothing
    fitter.measure(rows)
    assert (
        torch.isfinite(model.moving).all()
        and not model.moving[..., 1].any()
        and torch.isfinite(model.rest).all()
    )
    still = model.unit(state, state[:, None].expand_as(states))
    assert torch.allclose(still[..., 0, 0], model.rest.sqrt().repeat_interleave(48, 1).expand(200, 4, 48))


def test_colours_of_changes_are_made_alike_down_to_a_tenth_of_the_strongest():
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))[0]
    for scale, want in (
        ((4.0, 1.0, 0.05), (1.0, 1.0, 1.0)),
        ((4.0, 1.0, 0.01), (1.0, 1.0, 0.25)),
        ((4.0, 0.0, 0.0), (1.0, 0.0, 0.0)),
    ):
        square, want = turn @ torch.tensor(scale).diag() @ turn.T, torch.tensor(want)
        [w] = evened(square[None])
        assert torch.allclose(w @ square @ w.T, turn @ (3 * want / want.sum()).diag() @ turn.T, atol=1e-4)
    assert torch.isfinite(evened(torch.zeros(2, 3, 3))).all()


def test_what_is_small_and_coloured_counts_as_much_as_what_is_large_and_grey():
    """A grey square, and in one corner blue that comes and goes, a hundredth of the change of pixels."""
    data = squares(60)
    frames = data.images["top"] = data.images["top"][..., :1].repeat(3, -1)
    frames[::2, 0, 0, 2] = 160
    fitter = VideoFitter(Video(SPEC, options(context_noise=0.0)), data, VideoFitOptions(own=0.0), 0)
    square = fitter.squared_changes()
    grey, blue = torch.full((3,), 3**-0.5), torch.tensor([-1.0, -1.0, 2.0]) / 6**0.5
    before = [float(v @ square[0] @ v) for v in (grey, blue)]
    after = [float(v @ fitter.evened[0] @ square[0] @ fitter.evened[0].T @ v) for v in (grey, blue)]
    assert before[1] < 0.05 * before[0] and after[1] > 0.5 * after[0], (before, after)
    # an untrained net says that nothing moves, so its errors are the changes; of blue ones alone:
    fitter.evened = torch.outer(blue, blue)[None]
    told = float(fitter.loss(fitter.rows[::3])[1]["frames"])
    assert told == pytest.approx(before[1] / 3, rel=0.3)


def test_a_part_of_a_chunk_is_learnt_as_it_is_stepped():
    fitter = VideoFitter(Video(SPEC, options()), squares(), VideoFitOptions(), 0)
    rows, e = fitter.rows[:3], torch.tensor([1, 3, 4])
    states, actions, counts = fitter.part(rows, e)
    assert counts.sum(1).tolist() == [1, 3, 4]
    for i, (row, n) in enumerate(zip(rows.tolist(), e.tolist(), strict=True)):
        assert torch.equal(actions[i], padded(fitter.action[None, row : row + n], 4)[0])
        assert torch.equal(states[i], padded(fitter.state[None, row + 1 : row + n + 1], 4)[0])


@pytest.mark.parametrize("points", [False, True])
def test_episodes_shorter_than_a_chunk_are_named(points):
    with pytest.raises(UserError, match="longer than 4 steps"):
        VideoFitter(Video(SPEC, options(points=points)), squares(steps=3), VideoFitOptions(), 0)
    with pytest.raises(UserError, match="longer than 4 steps"):
        VideoFitter(Video(SPEC, options(points=points)), squares(steps=2), VideoFitOptions(), 0)


# ---- tuning with EVA ---------------------------------------------------------------------------------------


def inverse_of(data, updates=150):
    from world_models.video_tune import fit_inverse

    return fit_inverse(data, updates, seed=0, width=16)


@pytest.fixture(scope="module")
def tuning():
    """(data, a model that moves its square at random, an inverse model of the data's frames and its
    errors)."""
    data = squares()
    model = stirred()
    VideoFitter(model, data, VideoFitOptions(arm=1, updates=1), 0)  # statistics
    return data, model, *inverse_of(data)


def test_the_inverse_model_of_frames_tells_commands_of_new_episodes(tuning):
    *_, inverse, errors = tuning
    assert errors["r2"] > 0.3 and not any(p.requires_grad for p in inverse.parameters())


def test_a_few_updates_take_penalty_off_imagined_motion_and_leave_the_arm_alone(tuning):
    from world_models.video_tune import Reward, TuneOptions, tune

    data, model, inverse, _ = tuning
    tuned = tune(model, data, inverse, TuneOptions(weight=1000, updates=24, batch=8, lr=3e-3, goal="most"))

    def score(m):
        reward = Reward(
            VideoFitter(copy.deepcopy(m), data, VideoFitOptions(batch=64), 0, fresh=False, frames_only=True),
            inverse,
            1.0,
            7,
        )
        return float(reward()[1]["eva"])

    assert 10 - score(tuned) < 0.6 * (10 - score(model))
    for a, b in zip(model.proprio.state_dict().values(), tuned.proprio.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    obs, actions = observations(), torch.rand(3, 8, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    a, b = (m.step(m.start(obs, np.arange(3)), actions)[1] for m in (model, tuned))
    assert torch.equal(a.obs["state"], b.obs["state"]) and not torch.equal(
        a.obs["image/top"], b.obs["image/top"]
    )


@pytest.mark.parametrize("more", [{}, {"steps": 2, "refine": 1}, {"points": True}])
def test_the_chunk_that_is_tuned_is_the_one_that_is_shown(tuning, more):
    from world_models.video_tune import imagined

    model, obs = stirred(**more), observations()
    actions = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    last = to_patches(torch.from_numpy(obs["image/top"]))
    state = model.known(model.start(obs, np.arange(3)))["state"]
    clip = imagined(model, last, state, state, actions, torch.Generator().manual_seed(0))
    assert clip.requires_grad and torch.equal(clip[:, 0], last)
    if "steps" not in more:  # without noise: the same frames
        shown = model.step(model.start(obs, np.arange(3)), actions)[1].obs["image/top"]
        assert torch.equal(to_frames(clip[:, 1:].detach()), shown)


def test_at_weight_0_tuning_is_plain_training_and_at_0_updates_the_model(tuning):
    from world_models.video_tune import TuneOptions, tune

    data, model, inverse, _ = tuning
    o = TuneOptions(weight=0, updates=4, batch=2, lr=1e-3)
    plain = VideoFitter(
        copy.deepcopy(model),
        data,
        VideoFitOptions(arm=1, updates=4, batch=2, lr=1e-3),
        0,
        fresh=False,
        frames_only=True,
    )
    assert plain.fit()
    for got, want in (
        (tune(model, data, inverse, o), plain.result()),
        (tune(model, data, inverse, TuneOptions(updates=0)), model),
    ):
        for a, b in zip(got.state_dict().values(), want.state_dict().values(), strict=True):
            assert torch.equal(a, b)


def test_motion_as_smooth_as_the_recordings_is_left_as_it_is(tuning):
    """The goal is what the recorded frames decode to, here of random commands: only what lacks to it is
    penalised."""
    from world_models.video_tune import Reward

    data, model, inverse, _ = tuning

    class AsRecorded(Reward):
        def clip(self, rows):
            return self.recorded(rows)

    for kind, goal, left in (
        (AsRecorded, "recorded", True),
        (AsRecorded, "most", False),
        (Reward, "recorded", True),
        (Reward, "most", False),
    ):
        fitter = VideoFitter(
            copy.deepcopy(model), data, VideoFitOptions(batch=16), 0, fresh=False, frames_only=True
        )
        value, parts = kind(fitter, inverse, 1.0, 7, goal)()
        assert (float(value.detach()) == 0) == left
        assert float(value.detach()) == pytest.approx(
            max(0.0, float(parts["goal"] - parts["eva"])) / 10, abs=1e-6
        )


def test_the_term_of_eva_does_not_change_what_the_own_loss_draws(tuning):
    from world_models.video_tune import Reward

    data, model, inverse, _ = tuning
    draws = []
    for more in (False, True):
        fitter = VideoFitter(
            copy.deepcopy(model),
            data,
            VideoFitOptions(arm=1, updates=2, batch=2),
            0,
            fresh=False,
            frames_only=True,
        )
        fitter.more = Reward(fitter, inverse, 1.0, 1) if more else None
        assert fitter.fit()
        draws.append(fitter.generator.get_state())
    assert torch.equal(*draws)


def test_tuning_can_be_stopped_and_a_loss_that_is_not_finite_ends_it(tuning):
    from world_models.video_tune import TuneOptions, tune

    data, model, inverse, _ = tuning
    assert tune(model, data, inverse, TuneOptions(updates=9, batch=2), tick=lambda n, parts: n != 2) is None
    broken = copy.deepcopy(inverse)
    broken.spread.fill_(float("nan"))
    with pytest.raises(UserError, match="no longer finite after 0 updates"):
        tune(model, data, broken, TuneOptions(updates=2, batch=2))


def test_ctrl_c_ends_tuning_at_once_for_nothing_of_it_would_be_saved(tmp_path):
    """It said that a checkpoint would be saved, and then that nothing was written."""
    from world_models.options import TuneConfig
    from world_models.video_tune import TuneOptions, tune_model

    class Interrupted(Progress):
        def update(self, done, **more):
            if self._stage == "eva":
                signal.raise_signal(signal.SIGINT)

    recorded = str(tmp_path / "data")
    robo_rl.collect(recorded, task="reach", episodes=24, policy="random", obs="rgb", image_size=32)
    data = read((recorded,), images=True)
    model = Video(world_spec(data, "video", recorded), options(), 0)
    VideoFitter(model, data, VideoFitOptions(arm=1, updates=1), 0)  # statistics
    model.frames = data.frames()
    worlds.save(model, tmp_path / "model")
    few = TuneOptions(inverse=2, updates=4, batch=2)
    config = TuneConfig(
        model=str(tmp_path / "model"), dataset=recorded, out=str(tmp_path / "out"), windows=4, fit=few
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            tune_model(config, Interrupted())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "out" / "model").exists()


def test_tuning_names_what_it_cannot_do(tuning):
    from world_models.video_tune import TuneOptions, tune

    data, _, inverse, _ = tuning
    with pytest.raises(UserError, match="EVA judges motion over 4 steps or more, this model makes 2"):
        tune(stirred(chunk=2), data, inverse, TuneOptions())
    for wrong in (
        {"weight": -1.0},
        {"weight": float("nan")},
        {"lr": 0.0},
        {"batch": 0},
        {"updates": -1},
        {"inverse": 0},
    ):
        with pytest.raises(UserError, match=f"fit.{next(iter(wrong))} must be in"):
            TuneOptions(**wrong)


def test_decoded_commands_are_judged_by_hand():
    """Full commands held break nothing, flipping ones break acceleration and jerk; they are 2 off where they
    differ."""
    from world_models.video_tune import judged

    held, flips = (
        np.ones((1, 8, 2), np.float32),
        np.tile(np.array([1, -1], np.float32), (1, 4))[..., None].repeat(2, 2),
    )
    a, b = (judged(torch.from_numpy(x), held, CONTROL) for x in (held, flips))
    assert a["any"] == a["speed"] == a["jerk"] == a["command_error"] == 0
    assert b["any"] == b["acceleration"] == b["jerk"] == 1 and b["speed"] == 0
    assert b["command_error"] == pytest.approx(2**0.5) and a["score"] > b["score"]


@pytest.mark.parametrize("more", [{}, {"steps": 2, "refine": 1}, {"points": True}])
def test_as_an_env_it_keeps_the_contract(more):
    from sims.check import check_env
    from world_models.env import WorldEnv

    data, model = squares(), stirred(**more)
    state = with_points(model, data).state if model.points else data.state
    model.proprio.fit(
        *(torch.from_numpy(x) for x in (state, np.diff(state, axis=0), data.reward)),
        torch.zeros(len(data.state), 2),
    )
    model.frames, model.spec = data.frames(), SPEC.calibrated(12, 1e6)
    check_env(lambda n: WorldEnv(model, n), num_envs=3, cuts=True, atol=1e-4)


def envs_of(model, count: int, n=3) -> list:
    """As many envs of `model`, at the beginning of the same episodes."""
    from world_models.env import WorldEnv

    data = squares()
    model.proprio.fit(
        *(torch.from_numpy(x) for x in (data.state, np.diff(data.state, axis=0), data.reward)),
        torch.zeros(len(data.state), 2),
    )
    model.frames, model.spec = data.frames(), SPEC.calibrated(10, 1e6)
    envs = [WorldEnv(model, n) for _ in range(count)]
    for env in envs:
        env.reset(options={"reset_mask": np.ones(n, bool), "starts": (1 << 31) + np.arange(n)})
    return envs


def test_a_policy_of_chunks_meets_the_same_frames_in_an_env_as_in_an_evaluation():
    """Those of chunks as they are calibrated: the env hears of a chunk before its first step."""
    import robo_rl

    model, seen = stirred(steps=2), []
    env = envs_of(model, 1)[0]
    model.shift.fill_(50)  # nobody succeeds, for an episode that is over goes on in one of them

    def act(obs):
        seen.append(obs["image/top"].copy())
        far = obs["image/top"].reshape(len(obs["state"]), -1)[:, :6] / 128 - 1
        return far.reshape(-1, 3, 2).astype(np.float32)

    found = [robo_rl.evaluate(act, where, episodes=3, seed=0) for where in (model, env)]
    half = len(seen) // 2
    assert half == 4 and all(np.array_equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True))
    assert found[0].lengths.tolist() == found[1].lengths.tolist() == [10] * 3


class Watched(VectorWrapper):
    """Keeps of every episode that ends (start, state it began in, frames, actions)."""

    def __init__(self, env):
        super().__init__(env)
        self.episodes, self._now = [], {}

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        for i in np.flatnonzero((options or {}).get("reset_mask", np.ones(self.num_envs, bool))):
            self._now[i] = int(self.env.starts[i]), obs["state"][i], [obs["image/top"][i]], []
        return obs, info

    def step(self, actions):
        out = self.env.step(actions)
        for i, (_, _, shown, done) in self._now.items():
            shown.append(out[0]["image/top"][i])
            done.append(actions[i].clip(-1, 1))
        for i in np.flatnonzero(out[2] | out[3]):
            self.episodes.append(self._now.pop(i))
        return out


def is_made_in_chunks(model, episode, chunk=3) -> bool:
    """Whether the frames of an episode are those that the model makes of `chunk` actions at once."""
    start, state, shown, actions = episode
    carry = model.start({"state": state[None], "image/top": shown[0][None]}, np.array([start]))
    for k in range(0, len(actions) - chunk + 1, chunk):
        carry, p = model.step(carry, torch.from_numpy(np.stack(actions[k : k + chunk]))[None])
        made, seen = p.obs["image/top"][0].numpy().astype(int), np.stack(shown[k + 1 : k + 1 + chunk])
        if np.abs(made - seen).max() > 1:  # another batch rounds otherwise
            return False
    return len(actions) >= chunk


def chunk_of(obs, decision=0):
    far = obs["image/top"].reshape(len(obs["state"]), -1)[:, :6] / 128 - 1
    return far.reshape(-1, 3, 2).astype(np.float32)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_what_is_collected_in_a_model_has_the_frames_of_an_evaluation(noise):
    """Those of a chunk at once, with the noise on its actions; of a policy that demonstrates too."""
    from robo_rl.demos import DEMO_START, PolicyExpert, record
    from robo_rl.evaluation import evaluate
    from robo_rl.recording import Recorder, play

    model, episodes, seen = stirred(steps=2), [], []
    env, other, shows = envs_of(model, 3)
    model.shift.fill_(50)  # nobody succeeds
    watched = Watched(env)
    play(Recorder(watched, episodes.append, noise=noise), chunk_of, 3, 0)
    assert [is_made_in_chunks(model, e) for e in watched.episodes] == [True] * 3
    evaluate(other, lambda obs: seen.append(obs["image/top"]) or chunk_of(obs), DEMO_START + np.arange(3))
    same = [
        np.array_equal(x[i], e.images["top"][3 * k])
        for k, x in enumerate(seen)
        for i, e in enumerate(episodes)
    ]
    assert len(same) == 12 and all(same) == (not noise)
    model.spec = replace(model.spec, ends_on_success=False)
    model.shift.copy_(torch.tensor([-50.0, 50.0]))  # every step succeeds, none ends an episode
    watched = Watched(shows)
    record(PolicyExpert(watched, chunk_of), 3, 0, episodes.append, noise)
    assert [is_made_in_chunks(model, e) for e in watched.episodes] == [True] * 3


def test_replay_meets_the_frames_of_chunks_where_envs_decide_at_different_times_and_after_a_snapshot():
    from robo_rl.options import PolicyOptions
    from robo_rl.policies import ObsSpec, make_policy
    from robo_rl.replay_collector import ReplayCollector

    model, store = stirred(steps=2), SimpleNamespace(add=lambda *given: None, close=lambda *given: None)
    env, again = envs_of(model, 2)
    model.shift.fill_(50)
    spec = ObsSpec(state=2, action=2, views=("top",), image_size=16, language=True)
    policy = make_policy(PolicyOptions(horizon=3, execute=3, hidden=16, layers=1), spec, 0)
    watched = Watched(env)
    collector = ReplayCollector(watched, policy, store, None, 0)
    env.steps[:] = 0, 4, 5  # the second and the third end after 6 and 5 steps
    collector.run(policy, 17)
    state, other = collector.state(), ReplayCollector(again, policy, store, None, 0)
    assert len(set(env.announced.done)) > 1
    assert [len(e[3]) for e in watched.episodes] == [5, 6, 10, 10, 10]
    assert all(is_made_in_chunks(model, e) for e in watched.episodes)
    other.set_state(state)
    collector.run(policy, 4)
    other.run(policy, 4)
    assert np.abs(env.seen["image/top"].astype(int) - again.seen["image/top"]).max() <= 1


def test_actions_that_were_announced_and_did_not_come_change_nothing():
    env, plain, whole = envs_of(stirred(steps=2), 3)
    rng = np.random.default_rng(0)
    planned, others = (rng.uniform(-1, 1, (3, 3, 2)).astype(np.float32) for _ in range(2))
    env.announce(planned)
    for k in range(3):  # none of them
        a, b = (e.step(others[:, k])[0] for e in (env, plain))
        assert np.array_equal(a["image/top"], b["image/top"])
    whole.announce(others)
    env.set_state(whole.get_state())
    env.announce(planned)
    whole.announce(planned)
    for k in range(2):
        a, b = (e.step(planned[:, k])[0] for e in (env, whole))
        assert np.array_equal(a["image/top"], b["image/top"])
    state = env.get_state()  # in the middle of a chunk
    after = env.step(others[:, 0])[0]
    env.set_state(state)
    assert np.array_equal(after["image/top"], env.step(others[:, 0])[0]["image/top"])
    assert np.array_equal(after["image/top"], whole.step(others[:, 0])[0]["image/top"])


# ---- the moment of success


def finished(data: Recorded) -> Recorded:
    """`squares` with the picture after every last action, one of which each episode has alone."""
    last = (
        np.arange(len(data), dtype=np.uint8)[:, None, None, None] + 100 + np.zeros((1, 16, 16, 3), np.uint8)
    )
    return replace(
        data,
        final=data.state[data.end - 1] + 0.1,
        final_images={"top": last},
        pictured=np.ones(len(data), bool),
    )


@pytest.mark.parametrize("after", [True, False])
def test_the_heads_see_the_frame_and_state_after_the_step_they_tell_of(after):
    model, obs, shown = stirred(after=after), observations(), []
    model.judged = lambda last, state, action: shown.append((last, state)) or torch.zeros(len(last), 3)
    _, p = model.step(model.start(obs, np.arange(3)), torch.full((3, 4, 2), 0.3))
    ((frame, state),) = shown
    frames, states = (
        torch.cat([torch.as_tensor(obs[k])[:, None], p.obs[k]], 1)[:, after : 4 + after]
        for k in ("image/top", "state")
    )
    assert torch.equal(state.view(3, 4, 2), states) and torch.equal(to_frames(frame), frames.flatten(0, 1))


def test_a_video_model_of_before_stays_what_it_was():
    doc = asdict(options())
    assert build(SPEC, doc).options == options()
    old = {k: doc[k] for k in ("chunk", "width", "blocks", "steps", "refine", "sigma", "proprio")}
    model = build(SPEC, old)
    assert not model.options.after and model.options.shown == 1 and model.doubt is None
    assert not model.points and build(SPEC, old | {"points": True}).points == 32
    assert set(model.start(observations(), np.arange(3))) - set(
        model.proprio.start(observations(), np.arange(3))
    ) == {"last"}


def test_calibration_tells_how_far_it_is_and_draws_a_few_windows_at_once():
    model, data, told = stirred(steps=4), squares(episodes=40), []
    episode = np.arange(30)
    rows = data.first[episode]
    got = along_recorded(model, data, episode, rows, 6, told.append)
    p, at, made = rolled(model, data, episode, rows, 6)
    assert told == [16, 14] and np.allclose(got[0], p.obs["state"], atol=1e-5)
    assert np.array_equal(got[1], data.after[at], equal_nan=True) and np.array_equal(
        got[2], made & ~np.isnan(got[1][..., 0])
    )
    assert np.allclose(got[3][got[2]], p.uncertainty.numpy()[got[2]], rtol=1e-3)
    said = io.StringIO()
    with Progress(said, every=0) as progress:
        calibrated(model, data, 8, 0.75, most=20, per_episode=2, progress=progress)
    assert "[held out] 100 %" in said.getvalue() and "28/28 windows" in said.getvalue()


@pytest.mark.parametrize("after", [True, False])
def test_successes_are_learnt_from_the_frame_after_them(after):
    data = finished(squares())
    fitter = VideoFitter(
        Video(SPEC, options(after=after)), data, VideoFitOptions(arm=1, updates=1, batch=4), 0
    )
    heads, whole = fitter.heads, fitter.data
    own = np.flatnonzero(heads.labels[:, 1] > 0)
    assert len(own) == data.success.sum() and set(heads.events.tolist()) <= set(own.tolist())
    values = set(heads.recorded(heads.events)[:, 0, 0, 0, 0].tolist())
    assert values <= set(range(100, 100 + len(data))) if after else values == {30}
    assert fitter.rows.tolist() == [
        r
        for a, b, h in zip(whole.first, whole.end, data.held, strict=False)
        if not h
        for r in range(a, b - 4 - (not after))
    ]


# ---- frames before


def numbered(count=9):
    """Frames [2,count,48,4,4], each of its own number."""
    return (
        torch.arange(count, dtype=torch.float32)[None, :, None, None, None].expand(2, count, 48, 4, 4) / 100
    )


@pytest.mark.parametrize("parts", [(1,) * 8, (4, 4), (3, 1, 4)])
def test_what_is_kept_of_the_past_is_the_same_however_the_steps_are_grouped(parts):
    model, frames = Video(SPEC, options(history=3, memory=2)), numbered()
    carry, t = model.begin(frames[:, 0]), torch.tensor([0, 0])
    for n in parts:
        carry = model.remember(carry, frames[:, 1 + int(t[0]) : 1 + int(t[0]) + n], t)
        t = t + n
    assert (model.before(carry)[0, :, 0, 0, 0] * 100).round().tolist() == [8, 7, 6, 8, 4], (
        "the last three; those of steps 8 and 4"
    )


def test_lanes_of_different_ages_keep_their_own_past():
    model, frames = Video(SPEC, options(memory=1, history=1)), numbered(5)
    carry = model.remember(model.begin(frames[:, 0]), frames[:, 1:3], torch.tensor([2, 0]))
    assert (carry["memory"][:, 0, 0, 0, 0] * 100).round().tolist() == [2, 0], (
        "step 4 of the first lane is its second frame"
    )


def test_in_learning_the_model_remembers_what_it_would_have_kept_in_use():
    fitter = VideoFitter(
        Video(SPEC, options(history=3, memory=2)), squares(), VideoFitOptions(arm=1, updates=1), 0
    )
    model, row, age = fitter.model, fitter.rows[7:8], 7
    carry = model.begin(fitter.patches(row[:, None] - age)[:, 0])
    for t in range(age):
        carry = model.remember(carry, fitter.patches(row[:, None] - age + t + 1), torch.tensor([t]))
    assert torch.equal(model.before(fitter.recalled(row, torch.tensor([age]))), model.before(carry))


def test_the_next_frames_depend_on_the_frames_before_the_last():
    model, obs = stirred(history=2, memory=1), observations()
    carry = model.start(obs, np.arange(3))
    a = model.step(carry, torch.zeros(3, 4, 2))[1].obs["image/top"]
    for k in ("past", "memory"):
        b = model.step(carry | {k: carry[k].flip(-1)}, torch.zeros(3, 4, 2))[1].obs["image/top"]
        assert not torch.equal(a, b), k


def test_a_share_of_what_is_learnt_follows_the_model_s_own_frames_in_the_second_half():
    fitter = VideoFitter(Video(SPEC, options()), squares(), VideoFitOptions(arm=1, updates=10, own=0.5), 0)
    # frames that no recording has
    fitter.model.sample = lambda before, *rest: torch.full((len(before), 192, 4, 4), 9.0)
    rows = fitter.rows[:8]
    assert torch.equal(fitter.contexts(rows)[0], rows)
    fitter.update = 5
    later, before = fitter.contexts(rows)
    assert torch.equal(later[4:], rows[4:]) and (before[:4, 0] == 1).any() and not (before[4:, 0] == 1).any()
    real = fitter.begins[later[:4]] <= later[:4] - 4
    assert real.all(), "a whole chunk lies before them in their episode"


def test_noise_on_the_frames_before_is_seen_by_the_net_and_not_painted():
    model, obs = stirred(context_noise=0.5), observations()
    last = to_patches(torch.from_numpy(obs["image/top"]))
    before, state = last[:, None].expand(3, 4, 48, 4, 4), torch.from_numpy(obs["state"])
    args = (
        torch.zeros(3, 192, 4, 4),
        torch.ones(3),
        before,
        state,
        state[:, None].expand(3, 4, 2),
        torch.zeros(3, 4, 2),
    )
    noise = torch.randn(before.shape, generator=torch.Generator().manual_seed(0))
    plain, level, noisy = (
        model.seen(*args, n)
        for n in (None, (0 * noise, torch.full((3,), 0.5)), (noise, torch.full((3,), 0.5)))
    )
    assert not torch.equal(plain, level) and not torch.equal(level, noisy)
    for p in (*model.net.leave.parameters(), *model.net.moved.parameters()):
        p.data.zero_()
    assert torch.equal(model.seen(*args, (noise, torch.ones(3))).flatten(3, 4)[:, 1], before[:, :1]), (
        "a net that says 'nothing changes' leaves the last frame as it was"
    )


def test_a_frame_is_moved_as_far_as_it_is_told():
    from world_models.video import displaced

    frame = torch.rand(1, 1, 16, 16, 3)
    last = torch.nn.functional.pixel_unshuffle(frame.movedim(-1, -3), PATCH)
    still = displaced(last, torch.zeros(1, 2, 1, 8, 4, 4)).flatten(3, 4)
    assert torch.allclose(still[:, 1], last, atol=1e-5)
    two = torch.zeros(1, 1, 1, 8, 4, 4)
    two[:, :, :, :4] = 10 * 2 * 2 / 16  # what is there now was two pixels to the right; halves of 8 pixels
    moved = torch.nn.functional.pixel_shuffle(displaced(last, two).flatten(3, 4)[0, 0], PATCH)[0].movedim(
        0, -1
    )
    assert torch.allclose(moved[:, :14], frame[0, 0, :, 2:], atol=1e-5)


def test_what_is_seen_in_one_place_is_drawn_in_another_that_the_condition_tells():
    """New pictures are to be drawn in a mirror, or upside down, as the condition says: convolutions of three
    by three cells do not reach that far."""
    torch.manual_seed(0)
    net, told = Dense(16, 2, 64, 256), torch.eye(2).repeat_interleave(32, 0)
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(200):
        x = torch.randn(64, 1, 8, 8)
        want = torch.cat([x[:32].flip(3), x[32:].flip(2)])
        missed = ((net(x.repeat(1, 16, 1, 1), told) - x)[:, :1] - want).square().mean()
        opt.zero_grad()
        missed.backward()
        opt.step()
    assert float(missed.detach()) < 0.2


# ---- precision


def test_products_in_bf16_are_near_those_in_fp32():
    """bf16 has eight bits: frames differ by a few grey levels of 255, and the gradient hardly turns."""
    exact, near = stirred(), stirred(dtype="bf16")
    carry, actions = exact.start(observations(), np.arange(3)), torch.zeros(3, 4, 2)
    a, b = (m.step(carry, actions)[1].obs["image/top"].float() for m in (exact, near))
    assert 0 < (a - b).abs().mean() < 2 and (a - b).abs().max() < 24

    def gradient(model):
        fitter = VideoFitter(model, squares(), VideoFitOptions(), 0)
        fitter.loss(fitter.rows[::9])[0].backward()
        return torch.cat([p.grad.flatten() for p in model.net.parameters() if p.grad is not None])

    assert torch.cosine_similarity(*map(gradient, (exact, near)), dim=0) > 0.995


def test_a_run_computes_in_bf16_where_that_is_fast_and_says_so_in_its_folder():
    for wish, want in (("auto", "fp32" if slow_bf16() else "bf16"), ("fp32", "fp32")):
        assert with_dtype(VideoOptions(dtype=wish), "cpu") == VideoOptions(dtype=want)
    assert with_dtype(LatentOptions(), "cpu") == LatentOptions()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert with_dtype(VideoOptions(dtype="bf16"), "cpu").dtype == "bf16"
    assert [str(w.message) for w in told] == ([f"--net.dtype bf16: {slow_bf16()}"] if slow_bf16() else [])
    assert build(SPEC, asdict(options()) | {"dtype": "fp32"}).options.dtype == "fp32"


def test_frames_are_learnt_on_all_cores_and_states_on_one(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads("video", 0) == threads("encoded", 0) == min(cores(), 8)
    assert threads("latent", 0) == 1 and threads("latent", 2) == threads("video", 2) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads("video", 0) == 3 and threads("latent", 0) == 1


# ---- heads and doubt


def test_success_is_said_as_often_on_held_out_rollouts_as_it_happened():
    data = squares(240)
    fitter = VideoFitter(
        Video(SPEC, options()), data, VideoFitOptions(arm=2, updates=2, batch=2, heads=1, imagined=4), 0
    )
    assert fitter.fit()
    model, heads = fitter.result(), fitter.heads
    rows, _ = covering(heads.data, np.flatnonzero(heads.data.held), 16)
    rolled = heads.roll(torch.from_numpy(rows), 16)
    out = model.judged(
        to_patches(rolled.frames.flatten(0, 1)).flatten(1, 2),
        rolled.state.flatten(0, 1),
        heads.told[rolled.rows.flatten()],
    )
    said = ((out[:, 1].view(rolled.rows.shape) > model.shift[0]) & rolled.made).any(1)
    won = ((heads.labels[rolled.rows, 1] > 0) & rolled.made).any(1)
    assert won.sum() >= 3 and said.sum() == won.sum()


def test_data_without_a_success_teaches_a_model_that_nothing_succeeds():
    data = squares()
    none = np.zeros(len(data), bool)
    data = replace(data, success=none, terminated=none, reward=0 * data.reward)
    fitter = VideoFitter(
        Video(SPEC, options()), data, VideoFitOptions(arm=2, updates=2, batch=2, heads=3, imagined=4), 0
    )
    assert fitter.fit() and fitter.made == 7
    assert one_outcome(data).startswith("no episode succeeded, so success means nothing")
    assert one_outcome(replace(data, success=~none)).startswith("every episode succeeded")
    assert not one_outcome(squares())


def test_rollouts_for_the_heads_never_leave_their_episode_and_are_labelled_by_what_happened():
    data = finished(squares())
    heads = VideoFitter(Video(SPEC, options()), data, VideoFitOptions(arm=1, updates=1, imagined=12), 0).heads
    own = heads.imagined()
    first = np.repeat(heads.data.first, heads.data.lengths)
    for rows, made in zip(own.rows, own.made, strict=True):
        assert (
            len(set(first[rows].tolist())) == 1
            and (rows.diff()[made[1:]] == 1).all()
            and (rows <= heads.last[rows]).all()
        )
    held = np.repeat(heads.data.held, heads.data.lengths)
    assert not held[own.rows].any() and (heads.labels[own.rows, 1] > 0).any()


def test_the_uncertainty_has_a_part_of_the_pictures_that_does_not_shrink():
    model, obs = stirred(), observations()
    plain = stirred(doubt=False)
    args = torch.rand(3, 12, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    both = model.step(model.start(obs, np.arange(3)), args)[1].uncertainty
    arm = plain.proprio.step(plain.proprio.start(obs, np.arange(3)), args)[1].uncertainty
    pictures = both - model.proprio.step(model.proprio.start(obs, np.arange(3)), args)[1].uncertainty
    assert (pictures > 0).all() and (pictures.diff(dim=1) >= -1e-6).all()
    assert torch.equal(plain.step(plain.start(obs, np.arange(3)), args)[1].uncertainty, arm)


def test_frames_are_conditioned_on_the_instruction():
    model = Video(replace(SPEC, tasks=("go left", "go right")), options())
    for p in model.net.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    obs, actions = observations(), torch.zeros(3, 4, 2)
    a, b = (
        model.step(model.start(obs | {"task": np.full(3, w)}, np.arange(3)), actions)[1].obs["image/top"]
        for w in model.spec.tasks
    )
    assert not torch.equal(a, b)


def test_an_observation_names_its_cameras_in_any_order_and_one_that_lacks_a_camera_is_refused_in_one_line():
    two = Video(replace(SPEC, control=replace(CONTROL, views=("left", "right"))), options())
    state, left, right = (
        observations()["state"],
        observations(seed=1)["image/top"],
        observations(seed=2)["image/top"],
    )
    whole = {"state": state, "image/left": left, "image/right": right}
    a, b = (two.start(obs, np.arange(3))["last"] for obs in (whole, dict(reversed(whole.items()))))
    assert torch.equal(a, b)
    for obs, says in (
        ({"state": state, "image/left": left}, "an observation lacks right, it has left: give it obs"),
        ({"state": state}, "an observation lacks left, right, it has none"),
        (whole | {"image/right": right[:, :8]}, "of 16 x 16 x 3, camera right gave uint8 of 8 x 16 x 3"),
        (whole | {"image/left": left / 255}, "camera left gave float64"),
    ):
        with pytest.raises(UserError, match=says) as e:
            two.start(obs, np.arange(3))
        assert "\n" not in str(e.value)


# ---- rows


def test_what_was_seen_after_the_last_action_stands_beside_the_frames_without_a_copy_of_them():
    data = finished(squares())
    whole, steps = data.extended()
    shown, last = whole.images["top"], whole.end - 1
    assert shown.frames is data.images["top"] and shown.shape == (len(whole.state), 16, 16, 3)
    assert np.array_equal(shown[steps], data.images["top"])
    assert np.array_equal(shown[last], data.final_images["top"])
    both = np.stack([last, last - 1], 1)
    assert np.array_equal(shown[both][:, 0], data.final_images["top"])
    assert np.array_equal(shown[both][:, 1], data.images["top"][data.end - 1])
    assert np.array_equal(shown[2:40], shown[np.arange(2, 40)])


def test_without_last_pictures_the_rows_are_those_of_the_frames():
    fitter = VideoFitter(
        Video(SPEC, options()), data := squares(), VideoFitOptions(arm=1, updates=1, batch=4), 0
    )
    steps = data.extended()[1]
    want = [
        r for a, b, h in zip(data.first, data.end, data.held, strict=False) if not h for r in range(a, b - 4)
    ]
    assert fitter.rows.tolist() == steps[want].tolist()


def test_the_options_of_a_run_are_read_with_the_nested_ones_and_without_those_that_came_later(tmp_path):
    config = VideoConfig(data=("d",), net=VideoOptions(chunk=4, proprio=LatentOptions(hidden=64)))
    document = {"config": json.loads(json.dumps(asdict(config)))}
    (tmp_path / "run.json").write_text(json.dumps(document))
    assert saved_config(tmp_path, VideoConfig) == config
    for later in ("after", "dense", "points", "proprio"):
        del document["config"]["net"][later]
    (tmp_path / "run.json").write_text(json.dumps(document))
    # it goes on with the networks that it has
    assert saved_config(tmp_path, VideoConfig).net == VideoOptions(
        chunk=4, after=False, dense=0, points=False
    )
