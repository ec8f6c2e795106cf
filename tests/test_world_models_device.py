"""World models that learn and predict on an accelerator, tested without one: see tests/away.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from away import Away, AwayTensor, bring
from test_world_models_encoded import MINE, OPTIONS
from test_world_models_video import SPEC, observations, options, squares

from robo_rl.errors import UserError
from world_models import model as worlds
from world_models.calibrate import open_loop
from world_models.encoded import Encoded
from world_models.encoded_fit import EncodedFitter
from world_models.fit import Fitter
from world_models.latent import Latent
from world_models.learning import train
from world_models.options import (
    EncodedFitOptions,
    FitOptions,
    LatentOptions,
    VideoFitOptions,
    WorldModelConfig,
)
from world_models.text_options import TextConfig
from world_models.video import Video
from world_models.video_fit import VideoFitter

pytestmark = pytest.mark.filterwarnings(
    "ignore:for .* copying from a non-meta"
)  # they are values all the same


def latent(data, device):
    spec = replace(SPEC, kind="latent", control=replace(SPEC.control, views=()))
    net = LatentOptions(members=3, hidden=16, layers=2, refine=1)
    return Fitter(Latent(spec, net), data, FitOptions(updates=4, batch=16, unroll=2), 0, device=device)


def encoded(data, device):
    fit = EncodedFitOptions(pictures=3, batch=8, dynamics=FitOptions(updates=3, batch=16, unroll=2))
    return EncodedFitter(Encoded(MINE, OPTIONS), data, fit, 0, device)


def video(data, device):
    net = options(steps=2, refine=1, sigma=0.2, history=2, memory=1, context_noise=0.1)
    fit = VideoFitOptions(arm=2, updates=4, batch=4, heads=2, imagined=4, own=0.5)
    return VideoFitter(Video(SPEC, net), data, fit, 0, device=device)


def rolled(model):
    """What a model says of two chunks by its protocol, whose tensors are the host's."""
    carry = model.start(observations(), np.arange(3))
    out = []
    for _ in range(2):
        carry, p = model.step(carry, torch.full((3, 4, 2), 0.2))
        out += [*p.obs.values(), p.reward, p.terminal, p.success, p.uncertainty]
    if hasattr(model, "look"):
        out += model.look(carry).values()
    return [*carry.values(), *out]


@pytest.mark.parametrize("made", [latent, encoded, pytest.param(video, marks=pytest.mark.slow)])
def test_a_model_learns_and_predicts_on_a_device_as_on_the_cpu_bit_for_bit(made):
    data = squares(16)

    def learnt(device):
        fitter = made(data, device)
        fitter.fit(lambda n, parts: n != 3)
        again = made(data, device)
        again.load_state_dict(fitter.state_dict())
        assert again.fit()
        model = again.result()
        return model, rolled(model), open_loop(model, data, 4, 6)

    model, said, run = learnt("cpu")
    with Away() as device:
        other, there, run_there = learnt(str(device))
        assert all(isinstance(p.data, AwayTensor) for p in other.parameters()) and Away.products
        weights = {k: bring(v.detach()) for k, v in other.state_dict().items()}
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert not any(isinstance(x, AwayTensor) for x in there)
    assert all(torch.equal(a, b) for a, b in zip(said, there, strict=True))
    assert np.array_equal(run.error, run_there.error, equal_nan=True)


@pytest.mark.slow
def test_a_video_transformer_learns_and_predicts_on_a_device_too():
    pytest.importorskip("diffusers")
    from test_world_models_diffusers import WAN, fitter_of
    from test_world_models_diffusers import options as sizes

    from world_models.wan import WanVideo

    def learnt(device):
        fitter = fitter_of(WanVideo(WAN, sizes()), device, arm=1, vae=1, updates=2, batch=2, heads=1)
        assert fitter.fit()
        return fitter.result(), rolled(fitter.result())

    model, said = learnt("cpu")
    with Away() as device:
        other, there = learnt(str(device))
        weights = {k: bring(v.detach()) for k, v in other.state_dict().items()}
        assert all(isinstance(p.data, AwayTensor) for p in other.parameters())
    for k, v in model.state_dict().items():  # another attention kernel
        torch.testing.assert_close(v, weights[k], atol=1e-5, rtol=0)
    for a, b in zip(said, there, strict=True):
        torch.testing.assert_close(a.float(), b.float(), atol=1 if a.dtype == torch.uint8 else 1e-4, rtol=0)


def test_a_model_that_learnt_on_a_device_is_saved_and_loaded_to_compute_there(tmp_path):
    data = squares(12)
    with Away() as device:
        fitter = encoded(data, str(device))
        assert fitter.fit()
        model = fitter.result()
        model.frames = data.frames()
        want = rolled(model)
        worlds.save(model, tmp_path / "model")
        loaded: Any = worlds.load(tmp_path / "model", str(device))
        assert all(isinstance(p.data, AwayTensor) for p in loaded.parameters())
        got = rolled(loaded)
    here = rolled(worlds.load(tmp_path / "model"))
    for a, b, c in zip(want, got, here, strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)


def test_a_device_that_is_not_there_or_that_a_kind_does_not_know_is_one_line():
    with pytest.raises(UserError, match="--device must be cpu, cuda or cuda:N, got 'tpu'"):
        train(WorldModelConfig(data=("nothing",), device="tpu"))
    with pytest.raises(UserError, match="--kind text learns on the CPU: leave --device cuda out"):
        TextConfig(device="cuda")
