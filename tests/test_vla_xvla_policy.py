"""X-VLA as a policy: its loss, its grippers, the embodiment that its folder names, and the methods for
flows."""

import importlib
import json
import shutil

import pytest
import torch
from torch.nn import functional as F
from vla_checks import check_copied, check_supervision
from vla_goldens import weights

from robo_rl.algos.check import check_method
from robo_rl.errors import UserError
from robo_rl.options import RL_OPTIONS, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import check_policy, observations
from robo_rl.policies.vla import processor_files
from robo_rl.policies.vla.make import load_model, settings_of
from robo_rl.policies.vla.xvla import clean_loss

SPEC = ObsSpec(state=7, action=4, views=("front", "wrist"), image_size=32, language=True, text=64)
WIDE = ObsSpec(state=20, action=20, views=("front",), image_size=32, language=True, text=64)
H, E = 4, 2


def build(spec=SPEC, seed=0, **options):
    return make_policy(
        PolicyOptions(**({"kind": "xvla", "horizon": H, "execute": E, "hidden": 16, "layers": 1} | options)),
        spec,
        seed,
    )


def test_it_keeps_the_contract_of_every_policy():
    options = PolicyOptions(kind="xvla", horizon=H, execute=E)
    assert "ratio" in check_policy(lambda seed: make_policy(options, SPEC, seed), options, SPEC, atol=0.0)


@torch.no_grad()
def test_the_first_ratio_is_one_to_the_last_bit_in_a_minibatch_of_any_size():
    policy, obs = build(), observations(SPEC, 12)
    chunk = policy.act(obs, torch.Generator().manual_seed(1), True)
    for rows in (1, 2, 5, 12):
        some = torch.randperm(12, generator=torch.Generator().manual_seed(rows))[:rows]
        logp, _ = policy.score(
            policy.encode({k: v[some] for k, v in obs.items()}), {k: v[some] for k, v in chunk.trace.items()}
        )
        assert torch.equal(logp, chunk.logp[some]), rows


def test_the_loss_of_end_effector_actions_is_that_of_the_published_model():
    """500 per position, 10 per rotation, each arm's mean by itself, and the cross-entropy of two grippers."""
    g = torch.Generator().manual_seed(0)
    clean, want = torch.randn(3, H, 20, generator=g), torch.rand(3, H, 20, generator=g).round()
    mse = F.mse_loss
    positions = mse(clean[..., :3], want[..., :3]) + mse(clean[..., 10:13], want[..., 10:13])
    rotations = mse(clean[..., 3:9], want[..., 3:9]) + mse(clean[..., 13:19], want[..., 13:19])
    grippers = sum(F.binary_cross_entropy_with_logits(clean[..., i], want[..., i]) for i in (9, 19)) / 2
    assert torch.allclose(
        clean_loss(clean, want, (9, 19), 20).mean(), 500 * positions + 10 * rotations + grippers, rtol=1e-5
    )
    joints = mse(clean[..., [*range(6), *range(7, 13)]], want[..., [*range(6), *range(7, 13)]])
    grippers = sum(F.binary_cross_entropy_with_logits(clean[..., i], want[..., i]) for i in (6, 13)) / 2
    assert torch.allclose(
        clean_loss(clean[..., :14], want[..., :14], (6, 13), 14).mean(), joints + 0.1 * grippers, rtol=1e-5
    )
    assert torch.allclose(
        clean_loss(clean, want, (), 5).mean(), mse(clean[..., :5], want[..., :5]), rtol=1e-5
    )


@torch.no_grad()
def test_a_gripper_of_public_weights_is_an_opening_and_the_chain_ends_with_the_clean_chunk():
    policy = build(WIDE, folder=str(weights("xvla")), words="words:512", denoise_steps=1)
    assert policy.grippers == [9, 19]
    obs = observations(WIDE, 3)
    chunk = policy.act(obs, torch.Generator().manual_seed(0), explore=False)
    noise = torch.randn(3, policy.chunk, generator=torch.Generator().manual_seed(0)).view(3, H, -1)
    clean = policy.head.expert.clean(policy.encode(obs), noise, torch.ones(3))
    assert torch.allclose(chunk.x0, clean, atol=1e-4)
    opening = chunk.actions[..., 9]
    assert torch.allclose(opening, clean[:, :E, 9].sigmoid(), atol=1e-4)
    assert torch.allclose(chunk.actions[..., 0], clean[:, :E, 0], atol=1e-4)


def test_fresh_weights_have_room_for_the_states_of_the_embedded_arm():
    assert build(ObsSpec(state=30, action=4, language=True, text=64)).config.state_width == 32


def test_times_are_one_in_each_part_of_the_range():
    t = build().draw_times(50, torch.Generator().manual_seed(0)).sort().values
    assert float(t.min()) >= 0.001 and float(t.max()) <= 1 and float((t[1:] - t[:-1]).max()) < 0.021


def test_supervision_brings_the_loss_down():
    check_supervision(build(), observations(SPEC, 8), torch.rand(8, H, 4) * 2 - 1, 40)


def test_rl_for_flows_trains_it_and_resumes_bit_for_bit():
    policy = build()
    policy.trunk.requires_grad_(False)
    options = RL_OPTIONS["pi_rl"](decisions=2, minibatch=4, epochs=1, critic_warmup=0)
    check_method(importlib.import_module("robo_rl.algos.pi_rl").make, options, policy)


def test_a_checkpoint_has_all_that_acting_needs(tmp_path):
    policy = build(WIDE, folder=str(weights("xvla")), words="words:512")
    assert check_copied(policy, observations(WIDE, 2), tmp_path).grippers == [9, 19]


def test_a_folder_of_lerobot_says_its_embodiment_and_its_inputs(tmp_path):
    folder = tmp_path / "policy"
    folder.mkdir()
    modes = {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": "IDENTITY"}
    (folder / "config.json").write_text(
        json.dumps(
            {
                "type": "xvla",
                "chunk_size": 8,
                "max_state_dim": 20,
                "max_action_dim": 20,
                "tokenizer_max_length": 9,
                "normalization_mapping": modes,
                "input_features": {
                    "observation.state": {"type": "STATE", "shape": [20]},
                    "observation.images.image": {"type": "VISUAL", "shape": [3, 256, 256]},
                },
                "output_features": {"action": {"type": "ACTION", "shape": [20]}},
            }
        )
    )

    def steps(domain: int) -> None:
        (folder / "policy_preprocessor.json").write_text(
            json.dumps(
                {
                    "steps": [
                        {"registry_name": "xvla_add_domain_id", "config": {"domain_id": domain}},
                        {"registry_name": "normalizer_processor", "config": {"norm_map": modes}},
                    ]
                }
            )
        )

    steps(2)
    shutil.copy(weights("xvla"), folder / "model.safetensors")
    assert load_model(folder).config.domain == 2 and settings_of(weights("xvla")) == {}
    o = processor_files.from_folder(folder, "words:512").options
    assert (o.family, o.views, o.state, o.action, o.width, o.prompt, o.fit) == (
        "xvla",
        ("image",),
        20,
        20,
        20,
        9,
        "stretch",
    )
    steps(30)
    with pytest.raises(UserError, match=r"domain_id .* must be in \[0, 2\]"):
        load_model(folder)
