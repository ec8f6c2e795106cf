"""World models: the protocol and its folder, the latent ensemble, the model as an env, and what must equal
what."""

import copy
import importlib
import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import Oracle
from toys import PointReach

import robo_rl
from robo_rl.algos import pi_rl
from robo_rl.cli.wm import OPTIONS, parse, verdict
from robo_rl.data.episode import Episode
from robo_rl.errors import UserError
from robo_rl.experiment.check import CheckOptions
from robo_rl.experiment.check import check as check_named
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.evaluation import EvalConfig, evaluation_env
from robo_rl.experiment.world_model import shortened, simulator_of
from robo_rl.log import Progress
from robo_rl.options import PiRlOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.recording import Recorder, expert_actor, play, random_actor
from robo_rl.rollout import Collector
from robo_rl.runtime.in_process import InProcessFeed
from robo_rl.runtime.worker import Worker
from robo_rl.starts import CHOOSE, REPORT, SPLIT, eval_starts
from sims.check import check_env
from world_models import imagine, learning
from world_models import model as worlds
from world_models.calibrate import calibrate, covering, open_loop, rolled, set_shift, threshold
from world_models.env import WorldEnv, frame_of, held_frames, make_world
from world_models.fit import FitOptions, Fitter
from world_models.latent import Latent, LatentOptions, build, latent_options
from world_models.learning import world_spec
from world_models.model import Frames
from world_models.options import KINDS, EncodedConfig
from world_models.recorded import Recorded, check, check_fits

LIMIT = 20


def record(env, episodes=60, noise=0.5, seed=0) -> Recorded:
    """What the expert and random actions did in `env`."""
    kept = []
    recorder = Recorder(env, kept.append, "policy", noise, seed)
    play(recorder, expert_actor(env), episodes // 2, seed)
    play(recorder, random_actor(env, seed), episodes - episodes // 2, seed + 1)
    return of_episodes(kept, env.spec)


def of_episodes(episodes, control) -> Recorded:
    lengths = np.array([len(e) for e in episodes])
    end = np.cumsum(lengths)
    tasks = tuple(dict.fromkeys(e.task for e in episodes))
    return Recorded(
        np.concatenate([e.state for e in episodes]),
        np.concatenate([e.action for e in episodes]),
        np.concatenate([e.reward for e in episodes]),
        end - lengths,
        end,
        np.array([e.success for e in episodes]),
        np.array([e.terminated for e in episodes]),
        np.array([tasks.index(e.task) for e in episodes]),
        tasks,
        control,
        {},
        np.stack([np.full(e.state.shape[1], np.nan) if e.final is None else e.final for e in episodes]),
    )


@pytest.fixture(scope="module")
def data() -> Recorded:
    return record(PointReach(20, LIMIT), 160)


def latent(data, seed=0, **options) -> Latent:
    model = Latent(
        world_spec(data, "latent", "toy"), LatentOptions(hidden=32, layers=2, members=3, **options), seed
    )
    model.frames = data.frames()
    return model


@pytest.fixture(scope="module")
def learnt(data) -> Latent:
    """A model of the toy, fitted for a few seconds and calibrated."""
    model = latent(data)
    fitter = Fitter(model, data, FitOptions(updates=300, batch=64, unroll=3, lr=5e-3, ema=0.98), 0)
    fitter.fit()
    out = fitter.result()
    out.frames = data.frames()
    out.spec = out.spec.calibrated(LIMIT, calibrate(open_loop(out, data, LIMIT - 1))[1])
    return out


# ---- recording ---------------------------------------------------------------------------------------------


def test_every_kind_has_its_options_and_a_module_that_builds_it():
    assert set(OPTIONS) == set(KINDS)
    assert all(callable(importlib.import_module(name).build) for name in KINDS.values())


def test_a_recorder_keeps_failures_too_and_the_actions_that_ran():
    env, kept = PointReach(4, LIMIT), []
    play(Recorder(env, kept.append, "expert", noise=1.0), expert_actor(env), 10, 0)
    assert len(kept) == 10
    for e in kept:  # the toy moves by 0.2 times the executed action
        assert np.allclose(np.diff(e.state[:, :2], axis=0), 0.2 * e.action[:-1], atol=1e-5)
        assert e.success == e.terminated == bool(e.reward[-1]) and (e.success or len(e) == LIMIT)
        assert np.allclose(e.final[:2] - e.state[-1, :2], 0.2 * e.action[-1], atol=1e-5)
    assert {e.start for e in kept} == {1_500_000_000 + i for i in range(10)}


def test_an_episode_that_a_snapshot_began_in_the_middle_of_is_not_recorded():
    env, kept = PointReach(2, LIMIT), []
    recorder = Recorder(env, kept.append)
    recorder.reset(seed=0)
    state = recorder.get_state()
    recorder.step(np.zeros((2, 2)))
    recorder.set_state(state, np.array([True, False]))
    for _ in range(LIMIT):
        recorder.step(np.zeros((2, 2)))
    assert len(kept) == 1 and len(kept[0]) == LIMIT


# ---- the folder --------------------------------------------------------------------------------------------


def test_a_model_comes_back_from_its_folder_as_it_was(tmp_path, learnt):
    worlds.save(learnt, tmp_path / "m")
    again = worlds.load(tmp_path / "m")
    assert again.spec == learnt.spec and again.options == learnt.options
    actions = torch.rand(4, 5, 2) * 2 - 1
    obs, keys = {"state": learnt.frames.obs["state"][:4]}, np.arange(4)
    for a, b in zip(
        _predicted(learnt, obs, keys, actions), _predicted(again, obs, keys, actions), strict=True
    ):
        assert torch.equal(a, b)
    assert all(
        np.array_equal(getattr(again.frames, k), getattr(learnt.frames, k)) for k in ("task", "first", "held")
    )


def _predicted(model, obs, keys, actions):
    p = model.step(model.start(obs, keys), actions)[1]
    return p.obs["state"], p.reward, p.terminal, p.success, p.uncertainty


def test_a_folder_that_is_missing_damaged_or_of_another_version_is_named(tmp_path, learnt):
    with pytest.raises(UserError, match="holds no world model"):
        worlds.load(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"config": {"demos": "", "policy": {"kind": "flow"}}}))
    with pytest.raises(UserError, match="holds no world model"):  # a run of a policy
        worlds.load(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"config": asdict(EncodedConfig(data=("d",)))}))
    for folder in (tmp_path, tmp_path / "model"):  # stopped before its first saved state, too
        with pytest.raises(
            UserError, match=f"not learnt to its end; go on with: robo_rl wm train --resume {tmp_path}$"
        ):
            worlds.load(folder)
    worlds.save(learnt, tmp_path)
    blob = (tmp_path / "weights.safetensors").read_bytes()
    (tmp_path / "weights.safetensors").write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    with pytest.raises(UserError, match=r"weights\.safetensors is damaged"):
        worlds.load(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(blob)
    doc = json.loads((tmp_path / "world.json").read_text())
    for change, words in (
        ({"format": 99}, "format 99"),
        ({"options": doc["options"] | {"hidden": 64}}, "do not fit"),
        ({"spec": {}}, "another version"),
    ):
        (tmp_path / "world.json").write_text(json.dumps(doc | change))
        with pytest.raises(UserError, match=words):
            worlds.load(tmp_path)


def test_a_run_goes_on_as_the_kind_that_it_is(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"config": asdict(EncodedConfig(data=("d",), seed=3))}))
    assert isinstance(parse(["train", "--resume", str(tmp_path)]), EncodedConfig)
    assert isinstance(parse(["train", f"--resume={tmp_path}"]), EncodedConfig)
    assert learning.saved_config(tmp_path, EncodedConfig).seed == 3
    with pytest.raises(
        UserError,
        match=f"run of --kind encoded, got --kind video; leave it out: robo_rl wm train --resume {tmp_path}",
    ):
        learning.train(parse(["train", "--resume", str(tmp_path), "--kind", "video"]))
    (tmp_path / "run.json").write_text(json.dumps({"config": {"demos": ""}}))
    with pytest.raises(UserError, match="is no run of robo_rl wm train; those of robo_rl train go on with"):
        learning.train(parse(["train", "--resume", str(tmp_path)]))


def test_what_was_learnt_is_told_with_what_to_do_next():
    told = {"error": [0.1], "copied": [0.2], "within": 0.3}
    spec = replace(PointReach(1).spec, max_steps=9)
    at = worlds.WorldSpec(kind="latent", control=spec, state=4, horizon=9, threshold=0.5)
    said = verdict(at, told, Path("runs/wm"), 3.0)
    assert (
        "robo_rl wm eval runs/wm DATASET" in said
        and "train in it: robo_rl train --sim wm:runs/wm" in said
        and "cut at once" not in said
    )
    assert "episodes end after" not in said and "robo_rl train --sim wm:runs/wm --demos DATASET" in said
    seen = replace(at, control=replace(spec, views=("front",), max_steps=12), image_size=32)
    said = verdict(seen, told, Path("runs/wm"), 3.0)
    assert "train --sim wm:runs/wm --obs rgb --image-size 32 --demos" in said and "end after 9 steps" in said
    useless = verdict(replace(at, horizon=0), told, Path("runs/wm"), 3.0)
    assert "no better than" in useless and "train in it" not in useless and "nan" not in useless
    assert "cut at once: train it longer" in verdict(at, told | {"within": 0.0}, Path("runs/wm"), 3.0)
    little = verdict(at, told | {"error": [0.19]}, Path("runs/wm"), 3.0)
    assert "hardly learnt: after 1 step its error is 0.95" in little and "hardly" not in said
    assert (
        "train in it" not in (own := verdict(replace(at, own=True), told, Path("runs/wm"), 3.0))
        and "robo_rl eval RUN --sim wm:" in own
    )


# ---- the data ----------------------------------------------------------------------------------------------


def test_data_that_is_too_little_or_out_of_range_is_refused(data):
    few = of_episodes([_episode(5)] * 9, data.control)
    with pytest.raises(UserError, match="9 episodes and 45 frames"):
        check(few, "here")
    with pytest.raises(
        UserError, match="Record more, and give them beside these: robo_rl wm train here MORE"
    ):
        check(replace(few, own=True), "here")  # robo_rl collect records no robot
    with pytest.raises(UserError, match="data set one two there has 9 .* wm train one 'two there' MORE"):
        check(replace(few, own=True), "one", "two there")
    with pytest.raises(UserError, match="actions up to 3"):
        check(replace(data, action=data.action * 0 + 3), "here")
    check(data, "here")


def _episode(t: int):
    return Episode(np.zeros((t, 4)), np.zeros((t, 2)))


def test_data_of_another_env_is_named_by_what_differs(data):
    spec = world_spec(data, "latent", "toy")
    check_fits(spec, data, "here")
    c = data.control
    other = (
        replace(c, axes=c.axes[::-1]),
        replace(c, period=0.05),
        replace(c, axes=(replace(c.axes[0], high=0.5), c.axes[1])),
    )
    for control, words in zip(
        other, ("action axes x, y", "10 steps per second in the model, 20", "'x' means"), strict=True
    ):
        with pytest.raises(UserError, match=words):
            check_fits(spec, replace(data, control=control), "here")
    with pytest.raises(UserError, match="4 state numbers in the model, 3"):
        check_fits(spec, replace(data, state=data.state[:, :3]), "here")


def test_rewards_that_are_success_alone_are_seen_as_sparse(data):
    assert data.sparse
    assert not replace(data, reward=data.reward + 0.1).sparse


# ---- the ensemble ------------------------------------------------------------------------------------------


def test_a_member_alone_predicts_what_it_predicts_in_the_ensemble(data, learnt):
    x, net = torch.randn(6, 10), learnt.net
    for m, seen in enumerate(net(x)):
        h = x @ net.first[m] + net.first_bias[m]
        assert len(net.gates) == 1
        u = (h - h.mean(1, keepdim=True)) / (h.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        g, v = (u @ net.gates[0][m] + net.gate_biases[0][m]).split(32, 1)
        h = h + (g * g.sigmoid() * v) @ net.back[0][m]
        assert torch.allclose(seen, h @ net.last[m] + net.last_bias[m], atol=1e-5)

    plain = latent(data, gated=False).net
    for m, seen in enumerate(plain(x)):
        h = x
        for i, (w, b) in enumerate(zip(plain.weights, plain.biases, strict=True)):
            y = h @ w[m] + b[m]
            h = y if i == len(plain.weights) - 1 else (h if i else 0) + torch.nn.functional.silu(y)
        assert torch.allclose(seen, h, atol=1e-5)


def test_a_model_of_before_gated_layers_is_loaded_with_its_own(data):
    old = latent(data, gated=False)
    saved = {k: v for k, v in asdict(old.options).items() if k != "gated"}
    again = build(old.spec, saved)
    again.load_state_dict(old.state_dict())
    x = torch.randn(3, 10)
    assert torch.equal(again.net(x), old.net(x))


def test_a_lane_follows_its_own_member_or_the_mean_of_all(data):
    for follow in ("member", "mean"):
        model = latent(data, follow=follow)
        state = torch.from_numpy(data.state)
        model.fit(state, state[1:] - state[:-1], torch.from_numpy(data.reward), torch.zeros(len(state), 2))
        carry = model.start({"state": data.state[:8]}, np.arange(8))
        after, _ = model.step(carry, torch.zeros(8, 1, 2))
        deltas = model.net(model.inputs(carry["state"], carry["before"], torch.zeros(8, 2)))
        want = deltas.mean(0) if follow == "mean" else deltas[carry["member"], torch.arange(8)]
        assert torch.equal(after["state"], model.clip(carry["state"] + want * model.scale))
    assert len(set(carry["member"].tolist())) > 1


def test_one_call_with_a_chunk_is_as_many_calls_with_a_step(learnt):
    actions = torch.rand(5, 6, 2) * 2 - 1
    carry = learnt.start({"state": learnt.frames.obs["state"][:5]}, np.arange(5))
    _, whole = learnt.step(carry, actions)
    for t in range(6):
        carry, p = learnt.step(carry, actions[:, t : t + 1])
        assert torch.equal(p.obs["state"][:, 0], whole.obs["state"][:, t])
        assert torch.equal(p.uncertainty[:, 0], whole.uncertainty[:, t])


def test_uncertainty_never_shrinks_and_is_larger_away_from_the_data(learnt):
    state, actions = learnt.frames.obs["state"][:20], torch.zeros(20, 10, 2)
    near = _predicted(learnt, {"state": state}, np.arange(20), actions)[4]
    far = _predicted(learnt, {"state": state + 20}, np.arange(20), actions)[4]
    assert (near.diff(dim=1) >= 0).all() and far[:, -1].mean() > 2 * near[:, -1].mean()


# ---- refinement --------------------------------------------------------------------------------------------


def test_refiner_steps_0_is_the_one_step_model_exactly(data, learnt):
    with_refiner = Latent(learnt.spec, replace(learnt.options, refine=2), 0)
    with_refiner.load_state_dict(learnt.state_dict(), strict=False)
    obs, actions = {"state": learnt.frames.obs["state"][:4]}, torch.rand(4, 5, 2)
    plain = _predicted(learnt, obs, np.arange(4), actions)
    refined = _predicted(with_refiner, obs, np.arange(4), actions)
    assert not torch.equal(plain[0], refined[0])
    with_refiner.refiner = None  # K = 0
    for a, b in zip(plain, _predicted(with_refiner, obs, np.arange(4), actions), strict=True):
        assert torch.equal(a, b)


def test_a_refiner_that_knows_the_error_gives_the_true_change(data):
    model = latent(data, refine=3, sigma=0.01)
    truth, sigmas = torch.randn(7, 4), model.sigmas()
    assert np.allclose(sigmas, [0.01 ** (1 / 3), 0.01 ** (2 / 3), 0.01])
    inputs, seen = torch.zeros(7, 10), []

    def knows(x):  # (inputs, z, level) -> (z - truth) / sigma
        z, level = x[..., 10:14], x[..., 14:].argmax(-1)
        seen.append(z)
        return (z - truth) / torch.tensor(sigmas)[level][..., None]

    model.refiner = type("Knows", (torch.nn.Module,), {"forward": lambda self, x: knows(x)})()
    first = truth + torch.randn(model.options.members, 7, 4)
    out = model.refined(inputs, first)
    assert out[0] is first and len(out) == 4 and torch.equal(seen[0], first)
    assert all(torch.allclose(y, truth.expand_as(y), atol=1e-5) for y in out[1:])


def test_the_rollout_follows_the_last_refinement_and_every_one_is_learnt(data):
    from world_models.fit import loss, windows

    plain, model = latent(data), latent(data, refine=2)
    model.load_state_dict(plain.state_dict(), strict=False)
    for m in (model, plain):
        w = windows(data, m)
    rows = w.rows[torch.arange(4 * model.options.members)].view(model.options.members, 4)
    loss(model, w, rows, 3)[0].backward()
    assert all(p.grad.abs().sum() > 0 for p in [*model.refiner.parameters(), *model.net.parameters()])
    with torch.no_grad():  # refiners that take nothing off: three times the plain model's error
        model.refiner.last.zero_(), model.refiner.last_bias.zero_()
        got, want = (loss(m, w, rows, 3)[1]["state"] for m in (model, plain))
    assert torch.allclose(got, 3 * want, rtol=1e-5)


# ---- learning and calibration ------------------------------------------------------------------------------


def test_no_error_is_told_of_steps_that_no_held_out_episode_reaches(data, learnt):
    cut = replace(data, end=np.where(data.held, data.first + 5, data.end))
    report = learning.calibrated(copy.deepcopy(learnt), cut, LIMIT - 1, 0.75)[1]
    assert 3 < len(report["error"]) == len(report["copied"]) == len(report["windows"]) <= 5
    assert min(report["error"]) > 0


def test_it_learns_the_toy_and_stays_below_a_world_that_stands_still(data, learnt):
    run = open_loop(learnt, data, LIMIT - 1)
    error, copied = np.nanmean(run.error, 0), np.nanmean(run.copied, 0)
    assert (error < 0.5 * copied).all(), (error, copied)
    n, rows = len(data.state), np.repeat(data.held, data.lengths)
    won = np.isin(np.arange(n), data.end[data.success] - 1)
    chance = (
        learnt.step(
            learnt.start({"state": data.state}, np.arange(n)), torch.from_numpy(data.action)[:, None]
        )[1]
        .success[:, 0]
        .numpy()
    )
    yes, no = chance[rows & won], chance[rows & ~won]
    assert (yes[:, None] > no).mean() > 0.85  # AUROC


def test_the_chance_of_success_is_not_bent_by_the_weight_of_the_rare():
    """A head that can only say one number says the share of successes, however much the rare ones weigh in
    the loss."""
    data = record(PointReach(20, LIMIT), 40)
    model = latent(data)
    for w in model.heads.weights:
        torch.nn.init.zeros_(w)
    fitter = Fitter(
        model, data, FitOptions(updates=120, batch=128, unroll=1, lr=0.1, weight_decay=0, ema=0), 0
    )
    for w in model.heads.weights:
        w.requires_grad_(False)
    fitter.fit()
    train = ~data.held
    want = data.success[train].sum() / data.lengths[train].sum()
    got = model.step(model.start({"state": data.state[:1]}, np.zeros(1)), torch.zeros(1, 1, 2))[1].success
    assert model.balance[0] > 3 and abs(float(got) - want) < 0.3 * want


def test_along_held_out_episodes_as_many_successes_and_ends_are_told_as_happened(data):
    model = latent(data, seed=2)  # its heads have learnt nothing: their order alone is used
    set_shift(model, data, 8)
    rows, episode = covering(data, np.flatnonzero(data.held), 8)
    p, at, made = rolled(model, data, episode, rows, 8)
    last = at[:, -1] == data.end[episode] - 1
    for said, happened in ((p.success, data.success), (p.terminal, data.terminated)):
        did = (happened[episode] & last).sum()
        assert did >= 3 and ((said.numpy() > 0.5) & made).any(1).sum() == did
    few = replace(data, success=data.success & ~data.held)
    set_shift(model, few, 8)  # no held-out success: all episodes are asked
    assert model.shift.abs().min() > 0
    set_shift(model, replace(data, success=np.zeros(len(data), bool)), 8)
    assert model.shift[0] == 0 != model.shift[1]


def test_the_heads_have_a_width_of_their_own_and_models_of_before_keep_theirs(learnt, tmp_path):
    shapes = [tuple(w.shape) for w in latent_of(head_width=24).heads.weights]
    assert {s[2] for s in shapes[:-1]} == {24}
    assert latent_options({"hidden": 64}).head_width == 32 and latent_options({"hidden": 8}).head_width == 8
    old = {k: v for k, v in learnt.state_dict().items() if k != "shift"}
    again = copy.deepcopy(learnt)
    again.load_state_dict(old)
    assert not again.shift.any() and "shift" in again.state_dict()


def latent_of(**options) -> Latent:
    return latent(record(PointReach(10, LIMIT), 10), **options)


def test_a_fit_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(data):
    options = FitOptions(updates=12, batch=16, unroll=2)
    whole, first, second = (Fitter(latent(data, refine=1), data, options, 3) for _ in range(3))
    whole.fit()
    assert not first.fit(lambda update, parts: update < 7)
    second.load_state_dict(first.state_dict())
    second.fit()
    for a, b in zip(whole.result().state_dict().values(), second.result().state_dict().values(), strict=True):
        assert torch.equal(a, b)


class Killed(Progress):
    """Ends the process, so to say, after `lives` updates."""

    lives = 12

    def update(self, done, success=None, note=None, gain=None):
        self.lives -= 1
        if self.lives < 0:
            raise KeyboardInterrupt


def test_a_fit_that_is_killed_soon_again_and_again_gets_on(data, tmp_path):
    got = []
    for _ in range(3):
        fitter = Fitter(latent(data), data, FitOptions(updates=40, batch=16, unroll=2), 3)

        def done(of=fitter):
            return of.update

        job = learning.FitJob(fitter=fitter, updates=40, done=done, finish=lambda progress: (), every=10)
        with pytest.raises(KeyboardInterrupt):
            learning.fit_in(tmp_path, "latent", data, job, Killed(io.StringIO()))
        got.append(fitter.update)
    assert got == [13, 23, 33]


def test_the_loss_looks_at_no_state_beyond_an_episodes_end(data):
    from world_models.fit import loss, windows

    data, model = replace(data, state=data.state.copy()), latent(data)
    w = windows(data, model)
    ends = data.end[~data.held & (data.lengths > 3) & (np.roll(data.lengths, -1) > 3)][:9]
    rows = torch.from_numpy(ends.reshape(3, 3) - 2)  # two actions left, one state recorded after
    want, _ = loss(model, w, rows, 4)
    w.state[torch.from_numpy(ends)] += 100  # first of the episodes after them
    got, _ = loss(model, w, rows, 4)
    assert torch.equal(want, got)


@pytest.mark.parametrize("told", [True, False])
def test_the_heads_learn_from_where_a_success_led_if_that_was_recorded(data, told):
    from world_models.fit import loss, windows

    data = (
        data if told else replace(data, final=np.where(np.arange(len(data))[:, None] % 2, data.final, np.nan))
    )
    model = latent(data)
    w = windows(data, model)
    assert w.told == told and bool(w.seen.all()) == told
    rows = torch.from_numpy(data.end[~data.held & data.success] - 1).expand(3, -1)
    parts = loss(model, w, rows, 1)[1]
    with torch.no_grad():
        model.net.last.add_(1.0)  # other predictions
    moved = loss(model, w, rows, 1)[1]
    assert (
        not torch.equal(parts["state"], moved["state"])
        and torch.equal(parts["success"], moved["success"]) == told
    )


def test_the_heads_see_one_step_near_zero_as_large_as_the_spread_of_the_data(data):
    model = latent(data)
    model.std.fill_(1.0)
    model.scale.fill_(0.01)
    model.heads = torch.nn.Identity()
    state, zeros = torch.tensor([0.0, 0.01, 1.0, 2.0, 2.01])[:, None].expand(5, 4), torch.zeros(5, 2)
    seen = model.outcome(state, state, zeros)
    steps = (seen[1:] - seen[:-1]).abs().amax(1)
    # one step at the goal; one spread anywhere
    assert torch.allclose(steps[0], torch.tensor(1.0)) and steps[2] > 0.9
    assert steps[3] < 0.1  # one step far from zero is nothing


def test_the_threshold_is_the_greatest_uncertainty_with_few_enough_mistakes():
    u, e = np.array([0.1, 0.2, 0.3, 0.4, 0.5]), np.array([0.0, 1.0, 0.0, 0.0, 1.0])
    assert threshold(u, e, 0.5, 0.25) == 0.4  # 1 of 4
    assert threshold(u, e, 0.5, 0.3) == 0.4 and threshold(u, e, 0.5, 0.4) == 0.5
    assert threshold(u, e, 0.5, 0.0) == 0.1 and threshold(u, e + 1, 0.5, 0.3) == 0.0


def test_a_model_that_knows_nothing_is_calibrated_to_no_horizon_and_refused_as_an_env(data):
    model = latent(data)
    for w in model.net.parameters():
        torch.nn.init.normal_(w, std=1.0)
    state = torch.from_numpy(data.state)
    model.fit(state, state[1:] - state[:-1], torch.from_numpy(data.reward), torch.zeros(len(state), 2))
    horizon, limit = calibrate(open_loop(model, data, 10))
    assert (horizon, limit) == (0, 0.0)
    model.spec = model.spec.calibrated(horizon, limit)
    with pytest.raises(UserError, match="not calibrated"):
        WorldEnv(model, 2)


# ---- as an env ---------------------------------------------------------------------------------------------


def test_the_model_keeps_the_contract_of_a_simulator(learnt):
    parts = check_env(lambda n: WorldEnv(learnt, n), cuts=True, atol=1e-5)
    assert {"starts", "reset_mask", "frozen", "snapshot"} <= set(parts)


def test_robo_rl_check_leaves_a_model_its_rounding_and_its_early_ends(learnt, tmp_path):
    model = copy.copy(learnt)
    model.spec = learnt.spec.calibrated(LIMIT, learnt.spec.threshold / 4)
    worlds.save(model, tmp_path / "model")
    assert "snapshot" in check_named(CheckOptions(sim=f"wm:{tmp_path}"))[f"wm:{tmp_path}"]


def test_evaluation_begins_from_held_out_episodes_and_training_from_the_others(learnt):
    f = learnt.frames
    assert (
        f.held[frame_of(f, np.arange(50) + (1 << 31))].all() and not f.held[frame_of(f, np.arange(50))].any()
    )


def test_a_list_of_evaluation_starts_has_every_held_out_frame_as_often_as_the_others(learnt):
    f = learnt.frames
    count = int((f.first & f.held).sum())
    each = np.unique(frame_of(f, eval_starts(3 * count, 1)), return_counts=True)[1]
    assert len(each) == count < SPLIT and (each == 3).all()


def test_with_enough_held_out_frames_the_best_checkpoint_is_chosen_on_one_half_and_reported_on_the_other():
    held, first = np.arange(100) < 2 * SPLIT + 1, np.ones(100, bool)
    task = (np.arange(100) % 3 == 0).astype(np.int64)
    task[7] = 2  # an instruction with a single frame is in both halves
    f = Frames({"state": np.zeros((100, 1), np.float32)}, task, first, held)
    chosen, told, other = (set(frame_of(f, eval_starts(200, k)).tolist()) for k in (CHOOSE, REPORT, 5))
    assert chosen & told == {7} and chosen | told == set(range(2 * SPLIT + 1)) and told == other
    for t in (0, 1):
        assert abs(sum(task[list(chosen)] == t) - sum(task[list(told)] == t)) <= 1
    assert set(held_frames(f).tolist()) == told
    few = replace(f, held=np.arange(100) < SPLIT - 1)
    assert all(len(np.unique(frame_of(few, eval_starts(200, k)))) == SPLIT - 1 for k in (CHOOSE, REPORT))


def test_episodes_from_one_recorded_frame_count_as_one_in_the_interval_of_a_success_rate(learnt):
    count = int((learnt.frames.first & learnt.frames.held).sum())

    def halting(obs):  # it succeeds from about half of the frames
        return np.clip(obs["state"][:, 2:] / 0.2, -1, 1) * (obs["state"][:, :1] > 0)

    def still(obs):
        return np.zeros((len(obs["state"]), 2))

    once, often = (robo_rl.evaluate(halting, learnt, episodes=n * count, seed=0) for n in (1, 4))
    assert often.n == 4 * count and len(set(often.origins)) == count and "recorded starts" in str(often)
    assert 0 < often.success_rate < 1 and often.high - often.low > 0.9 * (once.high - once.low)
    less = [a.minus(robo_rl.evaluate(still, learnt, episodes=a.n, seed=0)) for a in (once, often)]
    assert less[1][2] - less[1][1] > 0.9 * (less[0][2] - less[0][1])
    with pytest.raises(UserError, match="do not pair"):
        once.minus(robo_rl.evaluate(still, PointReach(8, LIMIT), episodes=once.n, seed=0))
    env = robo_rl.evaluate(halting, WorldEnv(learnt, 8), episodes=4 * count, seed=0)
    assert (env.origins == often.origins).all() and env.high - env.low > 0.9 * (once.high - once.low)


class Ending(Oracle):
    """PointReach with an own end: its probability, and that of a success, from the third step on."""

    ends, wins = 0.55, 0.4

    def step(self, carry, actions):
        carry, p = super().step(carry, actions)
        late = (torch.arange(p.success.shape[1]) + self.made >= 2).float().expand_as(p.success)
        self.made += p.success.shape[1]
        return carry, replace(p, terminal=late * self.ends, success=late * self.wins)

    made = 0


def test_an_episode_in_a_model_ends_by_the_same_rule_with_and_without_an_env():
    """Where every recorded success is an end, an end that may be a success is no loss."""
    for ends, wins, length in ((0.55, 0.4, 6), (0.95, 0.4, 3), (0.9, 0.6, 3)):
        lengths = []
        for own in (False, True):
            model = Ending(PointReach(4, 6))
            model.ends, model.wins = ends, wins
            if own:
                env = WorldEnv(model, 4)
                env.reset(seed=0)
                over, n = np.zeros(4, bool), 0
                while not over.all():
                    _, _, terminated, truncated, _ = env.step(np.zeros((4, 2)))
                    over, n = terminated | truncated, n + 1
                lengths.append(n)
            else:
                obs, _ = model.first(np.arange(4))
                got = imagine.play(
                    model, lambda o: np.zeros((4, 1, 2)), obs | {"task": np.array(["reach the goal"] * 4)}, 6
                )
                lengths.append(int(got.length[0]))
        assert lengths == [length, length], (ends, wins)


def test_an_episode_lasts_as_long_in_an_evaluation_as_in_an_env_of_the_model(learnt):
    """Up to the calibrated horizon; and those that pass the threshold are the ones that the env ends."""

    def late(obs):  # it reaches the goal only after some steps, from some frames
        return np.clip(obs["state"][:, 2:] / 0.2, -1, 1) * (obs["state"][:, :1] > 0) * 0.2

    spec, ends = learnt.spec, {}
    try:
        for horizon in (LIMIT, 7):
            learnt.spec = spec.calibrated(horizon, spec.threshold / 3)
            model = robo_rl.evaluate(late, learnt, episodes=24, seed=0)
            env = robo_rl.evaluate(late, WorldEnv(learnt, 24), episodes=24, seed=0)
            assert model.max_steps == env.max_steps == learnt.spec.steps() == horizon
            same = ~model.doubted
            assert learnt.spec.sparse and np.array_equal(model.returns[same], env.returns[same])
            assert model.lengths.max() == horizon and 0 < model.doubted.sum() < 24
            assert np.array_equal(model.success & ~model.doubted, env.success)
            assert np.array_equal(model.doubted, env.doubted) and f"to {horizon} steps" in str(model)
            ends[horizon] = model
    finally:
        learnt.spec = spec
    assert ends[7].success_rate < ends[LIMIT].success_rate
    with pytest.raises(UserError, match="of 20 and of 7 steps do not pair.*max_steps=7"):
        ends[LIMIT].minus(ends[7])


def test_a_simulator_beside_a_model_has_episodes_as_long_as_those_in_it():
    made = robo_rl.make_env(task="reach", num_envs=1)
    width = made.single_observation_space["state"].shape[0]
    spec = worlds.WorldSpec(kind="latent", control=made.spec, state=width, horizon=9)
    assert simulator_of(spec, 1).spec.max_steps == 9 and spec.steps() == 9 and spec.steps(4) == 4
    assert simulator_of(replace(spec, horizon=0), 1).spec.max_steps == made.spec.max_steps == 50
    assert "in the simulator as well" in shortened(spec, "simulator") and "sim" not in shortened(spec, "")
    assert "after 9 steps" in shortened(spec, "") and not shortened(replace(spec, horizon=50), "")


def test_a_judge_that_is_asked_now_and_then_is_asked_where_the_model_ends_an_episode():
    class Rare:
        every, frames, skip, asked = 4, 1, 1, 0

        def __call__(self, seen):
            self.asked += 1
            return np.ones(len(seen.chance))

    model, judge = Ending(PointReach(4, 20)), Rare()
    model.ends = 0.95
    obs, _ = model.first(np.arange(4))
    got = imagine.play(
        model,
        lambda o: np.zeros((4, 1, 2)),
        obs | {"task": np.array(["reach the goal"] * 4)},
        20,
        judge=judge,
    )
    assert got.success.all() and (got.length == 3).all() and judge.asked == 1
    model, judge = Ending(PointReach(4, 20)), Rare()
    model.ends = 0.95
    env = WorldEnv(model, 4, judge=judge)
    env.reset(seed=0)
    for _ in range(3):
        *_, info = env.step(np.zeros((4, 2)))
    assert info["success"].all() and judge.asked == 1


def test_an_episode_is_cut_where_the_model_no_longer_knows(learnt):
    learnt_spec = learnt.spec
    try:
        learnt.spec = replace(learnt_spec, threshold=1e-9)
        env = WorldEnv(learnt, 3)
        env.reset(seed=0)
        _, _, terminated, truncated, info = env.step(np.zeros((3, 2)))
        assert (
            (truncated | terminated).all()
            and (info["cut"] == ~terminated).all()
            and not (terminated & truncated).any()
        )
    finally:
        learnt.spec = learnt_spec


def test_a_number_that_is_not_finite_ends_the_episode_in_its_last_sound_state(learnt):
    env = WorldEnv(learnt, 3)
    before, _ = env.reset(seed=0)
    env.carry["before"][1] = float("nan")
    obs, reward, terminated, truncated, info = env.step(np.zeros((3, 2)))
    assert truncated.tolist()[1] and info["cut"][1] and not terminated[1] and reward[1] == 0
    assert np.array_equal(obs["state"][1], before["state"][1]) and np.isfinite(obs["state"]).all()


def test_observations_that_the_model_does_not_predict_are_refused_with_what_would_do(learnt, tmp_path):
    worlds.save(learnt, tmp_path / "model")
    with pytest.raises(
        UserError, match="what acts in it has --obs state; .* --kind encoded, video or diffusers"
    ):
        make_world(str(tmp_path), "", 1, obs="rgb")
    words = "is of the task point, not of reach: in it acts what learnt in it .*; a model of reach learns"
    with pytest.raises(UserError, match=words):
        make_world(str(tmp_path), "reach", 1)


def test_a_policy_of_another_run_is_compared_with_the_model_not_the_options_of_that_run(learnt, tmp_path):
    worlds.save(learnt, tmp_path / "model")
    options = EvalConfig(sim=f"wm:{tmp_path}", episodes=3)
    run = TrainConfig(sim=options.sim, obs="rgb", reward="dense", randomise="light", max_steps=999)
    env, close = evaluation_env(run, SPEC, options)
    assert env.num_envs == 3 and env.spec.max_steps == LIMIT and not close()


def test_more_steps_than_the_model_is_calibrated_to_are_refused(learnt):
    with pytest.raises(UserError, match=f"at most {LIMIT}, the calibrated horizon"):
        WorldEnv(learnt, 2, max_steps=LIMIT + 1)


# ---- a model that is the simulator -------------------------------------------------------------------------

SPEC = ObsSpec(state=4, action=2)


def trained(env, updates=4):
    """Weights of a small policy after online RL in `env`, and the rollouts' statistics."""
    policy = make_policy(PolicyOptions(horizon=4, execute=4, hidden=32, layers=2), SPEC, 0)
    o = PiRlOptions(decisions=6, epochs=2, minibatch=64, critic_warmup=0)
    learner, stats = pi_rl.make(policy, o, 0), []

    def make(i, refresh):
        return Worker(i, Collector(env, policy, o.gamma, 1, i), policy, refresh, 0)

    feed = InProcessFeed(1, make, env.num_envs * o.decisions, 0, o.decisions, 1)
    for i in range(updates):
        rollout = feed.next()
        learner.update(rollout, i / updates, feed.version)
        feed.publish()
        stats.append(rollout.stats)
    return policy.state_dict(), stats


def test_training_in_a_model_that_is_the_simulator_is_training_in_the_simulator():
    weights, stats = trained(PointReach(8, LIMIT))
    dreamt, told = trained(WorldEnv(Oracle(PointReach(8, LIMIT)), 8))
    assert stats == told and sum(s["episodes"] for s in stats) > 0
    for k, v in weights.items():
        assert torch.equal(v, dreamt[k]), k


def test_the_oracle_forks_and_rewinds_like_any_model():
    check_env(lambda n: WorldEnv(Oracle(PointReach(n, LIMIT)), n))
