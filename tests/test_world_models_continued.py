"""`wm train --init`: a model that is gone on with keeps its units, its held-out episodes and its weights."""

import copy
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_world_models_video import SPEC, options, squares

from robo_rl.cli.wm import parse
from robo_rl.errors import UserError
from world_models.continued import continued, init_of, known_to
from world_models.latent import Latent, LatentOptions
from world_models.learning import latent_job, video_job, world_spec
from world_models.model import save
from world_models.options import FitOptions, VideoConfig, VideoFitOptions, VideoOptions, WorldModelConfig
from world_models.reading import joined
from world_models.video import Video

NET = LatentOptions(hidden=32, layers=2, members=3)
FIT = VideoFitOptions(arm=6, updates=4, batch=2, heads=3, imagined=8)


def states(seed: int, episodes=24):
    return replace(squares(episodes, seed=seed), images={}, control=replace(squares(1).control, views=()))


def learnt(data) -> Latent:
    """A model of `data`, learnt for a moment."""
    config = WorldModelConfig(data=("old",), net=NET, fit=FitOptions(updates=30, batch=32, unroll=2))
    job = latent_job(config, data)
    assert job.fitter.fit()
    model = job.fitter.result()
    model.frames = data.frames()
    return model


def test_what_a_model_learnt_from_is_never_held_out_later_and_what_it_held_out_never_learnt():
    old, new = states(0), states(1, 35)
    model = learnt(old)
    both = known_to(model, joined([new, old]), "wm")  # in the other order: counting alone would mix them
    assert np.array_equal(both.held[len(new) :], old.held) and not np.array_equal(
        joined([new, old]).held[len(new) :], old.held
    )
    assert np.array_equal(np.flatnonzero(both.held[: len(new)]), [9, 19, 29])
    longer, _ = both.extended()
    assert np.array_equal(longer.held, both.held)


def test_it_begins_with_the_weights_and_the_units_and_reaches_as_far_as_either_recording():
    old, new = states(0), states(1)
    new = replace(new, state=new.state + np.float32(0.5))
    model = learnt(old)
    before = copy.deepcopy(model.state_dict())
    config = WorldModelConfig(data=("old", "new"), net=NET, fit=FitOptions(updates=1, batch=32, unroll=2))
    data = known_to(model, joined([old, new]), "wm")
    fitter = latent_job(
        config, data, continued(copy.deepcopy(model), data, world_spec(data, "latent", "old new"))
    ).fitter
    moved = ("low", "high", "balance")
    for k, v in fitter.model.state_dict().items():
        assert torch.equal(v, before[k]) or k in moved, k
    assert (fitter.model.low <= before["low"]).all() and (fitter.model.high > before["high"]).all()
    fresh = latent_job(config, data).fitter
    assert not torch.equal(fresh.model.mean, before["mean"])  # a new model has units of its own data
    assert fitter.model.spec.data.startswith("old new: 48 episodes") and fitter.model.spec.horizon == 0


@pytest.mark.parametrize("points", [False, True])
def test_arm_frames_and_heads_of_a_video_model_all_go_on(points):
    data, longer = (replace(squares(n), tasks=("push",)) for n in (24, 36))
    model = Video(replace(SPEC, tasks=("push",)), options(steps=2, points=points))
    first = video_job(VideoConfig(data=("old",), net=model.options, fit=FIT), data, None).fitter
    assert first.fit()
    model = first.result()
    model.frames = data.frames()
    more = known_to(model, longer, "wm")
    config = VideoConfig(data=("old", "new"), net=model.options, fit=FIT)
    fitter = video_job(
        config, more, continued(copy.deepcopy(model), more, world_spec(more, "video", "old new"))
    ).fitter
    begun = {k: v.clone() for k, v in fitter.model.state_dict().items()}
    assert begun["proprio.low"].shape == (2 + 32 * points,) == (fitter.recorded.state.shape[1],)
    assert all(
        torch.equal(v, begun[k])
        for k, v in model.state_dict().items()
        if k.split(".")[-1] not in ("low", "high", "balance")
    )
    assert fitter.fit() and fitter.made == FIT.arm + FIT.updates + FIT.heads
    made = fitter.result().state_dict()
    for part in ("proprio.net", "net", "heads"):
        assert any(not torch.equal(v, begun[k]) for k, v in made.items() if k.startswith(part + ".")), part
    assert torch.equal(made["moving"], begun["moving"]) and torch.equal(made["rest"], begun["rest"])


def test_what_does_not_go_with_the_model_is_one_line(tmp_path):
    data = states(0)
    model = learnt(data)
    save(model, tmp_path / "wm")
    where = str(tmp_path / "wm")
    config, again = init_of(WorldModelConfig(data=("d",), init=where))
    assert config.net == NET and config.init == where
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert init_of(replace(config, net=NET))[0].net == NET  # as a run that is gone on with has them
    with pytest.raises(UserError, match=r"keeps its networks: leave --net… out"):
        init_of(replace(config, net=replace(NET, hidden=8)))
    with pytest.raises(UserError, match="is a model of kind latent, got --kind video; leave --kind out"):
        init_of(VideoConfig(data=("d",), init=where))
    with pytest.raises(UserError, match="--init goes with --kind latent and video, got --kind encoded"):
        parse(["train", "d", "--kind", "encoded", "--init", where])
    assert type(parse(["train", "d", "--init", where])) is WorldModelConfig
    with pytest.raises(UserError, match="2 state numbers in the model, 1"):
        known_to(model, replace(data, state=data.state[:, :1], final=data.final[:, :1]), where)


def test_the_precision_of_a_model_that_is_gone_on_with_may_change(tmp_path):
    net = options(dtype="bf16")
    model = Video(SPEC, net)
    model.frames = squares().frames()
    save(model, tmp_path)
    asked = VideoConfig(data=("d",), init=str(tmp_path))
    assert init_of(asked)[0].net == net
    config, again = init_of(replace(asked, net=VideoOptions(dtype="fp32")))
    assert config.net == again.options == replace(net, dtype="fp32")
    with pytest.raises(UserError, match=r"leave --net… out \(but --net.dtype\)"):
        init_of(replace(asked, net=VideoOptions(dtype="fp32", width=24)))
    views = ",".join(SPEC.control.views)
    assert init_of(replace(asked, cameras=views))[0].cameras == views
    with pytest.raises(UserError, match=f"has the cameras {views}, got --cameras hand; leave --cameras out"):
        init_of(replace(asked, cameras="hand"))


def test_a_model_that_is_not_shown_its_own_episodes_again_is_told_to_forget_them():
    old, new = states(0), states(1)
    model = learnt(old)
    with pytest.warns(UserWarning, match="what only those showed will be forgotten"):
        known_to(model, new, "wm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known_to(model, joined([old, new]), "wm")


def test_instructions_keep_the_numbers_that_the_model_gave_them():
    old = states(0)
    old = replace(old, tasks=("red", "blue"), task=np.arange(len(old)) % 2)
    model = Latent(world_spec(old, "latent", "old"), NET, 0)
    model.frames = old.frames()
    turned = replace(old, tasks=("blue", "red"), task=1 - old.task)
    data = known_to(model, turned, "wm")
    assert data.tasks == ("red", "blue") and np.array_equal(data.task, old.task)
    with pytest.raises(UserError, match="the instruction 'green' was never taught"):
        known_to(model, replace(old, tasks=("red", "green")), "wm")
