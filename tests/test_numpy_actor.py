import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from robo_rl.checkpoint import save_checkpoint
from robo_rl.errors import UserError
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.numpy_actor import NumpyActor


def trained(**kw):
    """A policy whose weights and statistics are as far from their start as training moves them."""
    options = {"horizon": 16, "execute": 8, "hidden": 64, "layers": 3, "denoise_steps": 4} | kw
    policy = make_policy(PolicyOptions(**options), ObsSpec(state=9, action=7), 0)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=g))
        policy.head.out.weight.mul_(5)
    policy.obs_norm.fit(torch.randn(500, 9, generator=g) * 3 + 2)
    policy.action_norm.fit(torch.randn(500, 7, generator=g) * 0.3 + 0.1)
    return policy


def saved(tmp_path, policy):
    save_checkpoint(tmp_path / "c", policy, {}, {"step": 0})
    return tmp_path / "c"


def same_noise(policy, state, seed):
    """The torch policy's actions, and the noise its chain began with."""
    actions = policy.act(
        {"state": torch.from_numpy(state[None])}, torch.Generator().manual_seed(seed), False
    ).actions[0]
    noise = torch.empty(1, policy.chunk).normal_(generator=torch.Generator().manual_seed(seed))
    return actions.numpy(), noise[0].numpy()


@pytest.mark.parametrize(
    "kw",
    [
        {},
        {"activation": "silu"},
        {"activation": "tanh"},
        {"layers": 1},
        {"layers": 5},
        {"denoise_steps": 1},
        {"denoise_steps": 10},
        {"horizon": 1, "execute": 1},
        {"noise": "learned", "noise_steps": "all"},
        {"predict": "action"},
        {"predict": "action", "denoise_steps": 7},
        {"residual": True, "predict": "action"},
        {"residual": True, "activation": "silu", "layers": 5},
        {"residual": True, "activation": "tanh", "layers": 1},
    ],
    ids=str,
)
def test_it_acts_as_the_torch_policy_from_the_same_noise(tmp_path, kw):
    policy = trained(**kw)
    actor = NumpyActor.load(saved(tmp_path, policy))
    rng = np.random.default_rng(0)
    for seed in range(5):
        state = (rng.standard_normal(9) * 3 + 2).astype(np.float32)
        expected, noise = same_noise(policy, state, seed)
        actions = actor.act(state, noise)
        assert actions.dtype == np.float32 and actions.shape == (policy.options.execute, 7)
        assert np.abs(actions - expected).max() < 1e-5


def test_a_state_beyond_ten_deviations_is_clipped_as_the_normaliser_does(tmp_path):
    policy = trained()
    state = np.array([1e4, -1e4, 0, 500, 2, 2, 2, 2, -77], np.float32)
    expected, noise = same_noise(policy, state, 3)
    assert np.abs(NumpyActor.load(saved(tmp_path, policy)).act(state, noise) - expected).max() < 1e-5


def test_a_call_leaves_nothing_behind_for_the_next(tmp_path):
    actor = NumpyActor.load(saved(tmp_path, trained()))
    rng = np.random.default_rng(0)
    states, noises = (
        rng.standard_normal((3, 9)).astype(np.float32),
        rng.standard_normal((3, 112)).astype(np.float32),
    )
    first = [actor.act(s, n) for s, n in zip(states, noises, strict=True)]
    kept = [a.copy() for a in first]
    again = [actor.act(s, n) for s, n in zip(states[::-1], noises[::-1], strict=True)][::-1]
    for a, b, c in zip(first, kept, again, strict=False):
        assert np.array_equal(a, b) and np.array_equal(a, c)


def test_the_generator_decides_the_noise(tmp_path):
    actor = NumpyActor.load(saved(tmp_path, trained()))
    state = np.zeros(9, np.float32)
    a, b, c = (actor.act(state, rng=np.random.default_rng(s)) for s in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    noise = np.random.default_rng(1).standard_normal(112, dtype=np.float32)
    assert np.array_equal(a, actor.act(state, noise)) and np.array_equal(
        a, actor.act(state, noise.reshape(16, 7))
    )


def test_it_runs_where_there_is_no_torch(tmp_path):
    path = saved(tmp_path, trained())
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np; from robo_rl.policies.numpy_actor import NumpyActor\n"
        f"a = NumpyActor.load({str(path)!r}).act(np.zeros(9, np.float32), rng=np.random.default_rng(0))\n"
        "assert a.shape == (8, 7) and not [m for m in sys.modules if m.startswith('torch.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bad_input_is_told_in_one_line(tmp_path):
    path = saved(tmp_path, trained())
    actor = NumpyActor.load(path)
    with pytest.raises(UserError, match=r"\(9,\)"):
        actor.act(np.zeros(8, np.float32), np.zeros(112, np.float32))
    with pytest.raises(UserError, match="noise or a generator"):
        actor.act(np.zeros(9, np.float32))
    blob = (path / "policy.safetensors").read_bytes()
    (path / "policy.safetensors").write_bytes(blob[:-1] + b"x")
    with pytest.raises(UserError, match="damaged"):
        NumpyActor.load(path)
    with pytest.raises(UserError, match="not a checkpoint"):
        NumpyActor.load(tmp_path)
    (path / "meta.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="format 99"):
        NumpyActor.load(path)


@pytest.mark.parametrize(
    "kw, spec, text",
    [
        ({"kind": "gaussian"}, {}, "gaussian"),
        ({"kind": "diffusion", "denoise_steps": 5}, {}, "diffusion"),
        ({}, {"language": True}, "an instruction"),
        ({}, {"views": ("front",), "image_size": 32, "language": True}, "images"),
    ],
)
def test_policies_it_cannot_carry_are_refused(tmp_path, kw, spec, text):
    policy = make_policy(
        PolicyOptions(hidden=16, layers=2, width=32, depth=1, **kw), ObsSpec(state=9, action=7, **spec), 0
    )
    with pytest.raises(UserError, match=text):
        NumpyActor.load(saved(tmp_path, policy))
