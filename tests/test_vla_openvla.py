"""OpenVLA-OFT: its network against timm's vision transformers and transformers' Llama, and its two heads
under supervision and PPO."""

import importlib
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vla_checks import check_copied, check_first_ratio, moved_by_ppo
from vla_goldens import golden_file, weights

from robo_rl.algos import bc
from robo_rl.algos.check import check_method
from robo_rl.errors import UserError
from robo_rl.options import BcOptions, PolicyOptions, PpoOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import check_policy, observations
from robo_rl.policies.vla import processor_files
from robo_rl.policies.vla.compare import compare, record
from robo_rl.policies.vla.convert import convert
from robo_rl.policies.vla.examine import examine
from robo_rl.policies.vla.keys import OURS, recognise
from robo_rl.policies.vla.make import load_model

SPEC = ObsSpec(state=7, action=4, views=("front", "wrist"), image_size=32, language=True, text=64)
H, E, A = 3, 2, 4
HEADS = ("tokens", "l1")
RL = {"decisions": 3, "minibatch": 4, "epochs": 2, "critic_warmup": 0}
PREFIX = ("images", "image_mask", "tokens", "token_mask", "state")


def build(head="tokens", spec=SPEC, seed=0, **options):
    return make_policy(
        PolicyOptions(
            **(
                {
                    "kind": "openvla_oft",
                    "action_head": head,
                    "horizon": H,
                    "execute": E,
                    "hidden": 16,
                    "layers": 1,
                }
                | options
            )
        ),
        spec,
        seed,
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{head: file}: the golden one has an action head; without it the words are the head."""
    bare = tmp_path_factory.mktemp("oft") / "tokens.safetensors"
    rest = {k: v for k, v in load_file(weights("openvla_oft")).items() if not k.startswith("action_head.")}
    save_file(rest, bare, metadata={"format": "pt"})
    return {"tokens": bare, "l1": weights("openvla_oft")}


@pytest.mark.parametrize("head", HEADS)
def test_bins_and_actions_equal_those_of_timm_and_transformers(head, files):
    rows = {r.name: r for r in compare(files[head], golden_file("openvla_oft"))}
    assert (
        list(rows) == ["logits" if head == "tokens" else "actions"]
        and max(r.largest for r in rows.values()) < 1e-5
    )
    half = compare(files[head], golden_file("openvla_oft"), dtype=torch.bfloat16)
    # tokens: below 0.02 or 0.0208, by the processor; actions: five norms follow one another before them
    assert max(r.relative for r in half) < (0.022 if head == "tokens" else 0.03)


@torch.no_grad()
def test_a_masked_camera_costs_nothing_and_nobody_looks_at_it(files):
    model, io = load_model(files["l1"]), load_file(golden_file("openvla_oft"))
    want, seen = model.actions(model.prefix(*(io[k] for k in PREFIX))), []
    hook = model.trunk.vision.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    io["images"][~io["image_mask"]] = 7.0
    io["tokens"][~io["token_mask"]] = 99
    assert torch.equal(model.actions(model.prefix(*(io[k] for k in PREFIX))), want) and seen == [
        int(io["image_mask"].sum())
    ]
    hook.remove()


@pytest.mark.parametrize("head", HEADS)
def test_every_weight_gets_a_gradient(head, files):
    model, io = load_model(files[head]), load_file(golden_file("openvla_oft"))
    model.actions(model.prefix(*(io[k] for k in PREFIX))).square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("head", HEADS)
def test_its_keys_are_recognised_and_go_to_ours_and_back(head, files, tmp_path):
    convert(files[head], tmp_path / "ours.safetensors", OURS)
    convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", "openvla")
    assert (tmp_path / "back.safetensors").read_bytes() == files[head].read_bytes()
    read = recognise(load_file(tmp_path / "ours.safetensors"))
    assert (read.family, read.layout) == ("openvla_oft", None)
    assert all(r.largest == 0 for r in compare(tmp_path / "ours.safetensors", files[head]))
    tensors, _ = record(files[head], None)
    save_file(tensors, tmp_path / "golden.safetensors")
    assert all(
        r.largest == 0 for r in compare(tmp_path / "ours.safetensors", tmp_path / "golden.safetensors")
    )


def test_it_is_examined(files):
    told = {head: dict(examine(files[head]).facts) for head in HEADS}
    assert (
        told["l1"]["model"].startswith("openvla_oft, keys in layout openvla")
        and "l1 head" in told["l1"]["actions"]
    )
    assert "256 bins" in told["tokens"]["actions"]


# ---- the policy


@pytest.mark.parametrize("head", HEADS)
def test_it_keeps_the_contract_of_every_policy(head):
    options = PolicyOptions(kind="openvla_oft", horizon=H, execute=E, action_head=head)
    assert "ratio" in check_policy(lambda seed: make_policy(options, SPEC, seed), options, SPEC, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_the_first_ratio_is_one_to_the_last_bit_in_a_minibatch_of_any_size(head, dtype):
    policy = build(head)
    policy.trunk.to(dtype)
    policy.head.to(dtype)
    obs = observations(SPEC, 20)
    chunk = policy.act(obs, torch.Generator().manual_seed(1), True)
    assert chunk.logp.dtype == torch.float32 and chunk.logp.shape == (20, E * A if head == "tokens" else 1)
    check_first_ratio(policy, obs, chunk)


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_samples_follow_their_density(head):
    policy = build(
        head, ObsSpec(state=2, action=1, language=True, text=64), init_std=0.3, horizon=1, execute=1
    )
    obs = {k: v[:1].expand(600, *v.shape[1:]) for k, v in observations(policy.spec, 1).items()}
    chunk, out = (
        policy.act(obs, torch.Generator().manual_seed(0), True),
        policy._out(policy.encode(obs))[0, 0, 0],
    )
    x = chunk.x0[:, 0, 0]
    if head == "tokens":
        p = out.softmax(-1)
        mean, std = (
            float((p * policy.centres).sum()),
            float((p * policy.centres.square()).sum() - (p * policy.centres).sum() ** 2) ** 0.5,
        )
        assert torch.allclose(chunk.logp[:, 0].exp(), p[chunk.trace["tokens"][:, 0, 0]])
    else:
        mean, std = float(out), 0.3
        want = torch.distributions.Laplace(out, 0.3 / math.sqrt(2)).log_prob(x)
        assert torch.allclose(chunk.logp[:, 0], want, atol=1e-4)
        # axes that the env has not
        assert torch.equal(chunk.x0[:, 0, 1:], policy._out(policy.encode(obs))[:, 0, 1:])
    assert abs(float(x.mean()) - mean) < 4 * std / 600**0.5 and abs(float(x.std()) / std - 1) < 0.15


def test_bins_are_those_of_openvla():
    """prismatic: np.digitize over 256 edges; the centres of 255 bins, and the last one twice."""
    policy, edges = build(), np.linspace(-1, 1, 256)
    x = torch.tensor([-1.0, -0.999, -0.3, 0.0, 0.5, 0.999, 1.0])
    index = torch.bucketize(x, torch.linspace(-1, 1, 256), right=True) - 1
    np.testing.assert_array_equal(index.numpy() + 1, np.digitize(x.numpy(), edges))
    centres = (edges[:-1] + edges[1:]) / 2
    np.testing.assert_allclose(
        policy.centres[index].numpy(), centres[np.clip(np.digitize(x.numpy(), edges) - 1, 0, 254)], atol=1e-6
    )


@pytest.mark.parametrize(
    ("head", "ratio", "advantage"),
    [("tokens", "token", "gae"), ("tokens", "chunk", "grpo"), ("l1", "chunk", "gae")],
)
def test_ppo_and_groups_train_it_and_resume_bit_for_bit(head, ratio, advantage):
    options = PpoOptions(
        **RL, ratio=ratio, advantage=advantage, **({"group": 2} if advantage == "grpo" else {})
    )
    policy = build(head)
    policy.trunk.requires_grad_(False)
    check_method(importlib.import_module("robo_rl.algos.ppo").make, options, policy)


def test_a_frozen_trunk_is_encoded_once_and_the_language_model_learns():
    assert moved_by_ppo(build("l1"), PpoOptions(**RL, freeze_trunk=True)) == {"head", "log_scale"}


@pytest.mark.parametrize("head", HEADS)
def test_supervision_teaches_the_demonstrated_chunks(head):
    policy, obs = build(head), observations(SPEC, 8)
    obs["state"] = torch.randn(8, 7, generator=torch.Generator().manual_seed(0)) * 3
    chunk, mask = torch.rand(8, H, A, generator=torch.Generator().manual_seed(1)) * 2 - 1, torch.ones(8, H)
    policy.obs_norm.fit(obs["state"])
    policy.action_norm.fit(chunk.flatten(0, 1))

    before = (policy.act(obs, torch.Generator(), explore=False).actions - chunk[:, :E]).abs().mean()
    bc.train(policy, bc.demos_sampler(obs, chunk, mask), BcOptions(updates=100, batch=8, lr=3e-3, ema=0.5), 0)
    after = (policy.act(obs, torch.Generator(), explore=False).actions - chunk[:, :E]).abs().mean()
    assert after < 0.5 * before


@pytest.mark.parametrize("head", HEADS)
def test_a_checkpoint_has_all_that_acting_needs(head, files, tmp_path):
    policy = build(head, folder=str(files[head]), words="words:192")
    assert policy.config.head == head and policy.config.horizon == 4
    check_copied(policy, observations(SPEC, 3), tmp_path)


def statistics_file(folder, **changes):
    folder.mkdir(exist_ok=True)
    per = {
        "action": {"q01": [-0.5, 0.0, 0.0], "q99": [0.5, 2.0, 1.0], "mask": [True, True, False]},
        "proprio": {"q01": [0.0], "q99": [4.0]},
    }
    (folder / "dataset_statistics.json").write_text(json.dumps({"libero": per} | changes))
    (folder / "config.json").write_text(json.dumps({"model_type": "openvla"}))
    return folder


def test_statistics_of_its_folder_are_read_and_a_masked_axis_passes_through(tmp_path):
    p = processor_files.from_folder(statistics_file(tmp_path / "a"), "words:192")
    o = p.options
    assert (o.family, o.state, o.action, o.fit, o.lower) == ("openvla_oft", 1, 3, "stretch", True)
    torch.testing.assert_close(
        p.action_norm(torch.tensor([[0.5, 1.0, 0.25]])), torch.tensor([[1.0, 0.0, 0.25]]), atol=1e-5, rtol=0
    )
    tokens, mask = p.prompts(["Pick_UP the cube"], torch.zeros(1, 1))
    same, _ = p.prompts(["pick up the cube"], torch.zeros(1, 1))
    assert torch.equal(tokens, same) and mask.sum() == 17
    with pytest.raises(UserError, match="statistics of 2 data sets"):
        processor_files.from_folder(statistics_file(tmp_path / "b", other={}), "words:192")


@pytest.mark.parametrize(
    ("spec", "options", "line"),
    [
        ({"action": 8}, {}, "the env's action has 8 numbers, this openvla_oft takes 7 at most"),
        ({"views": ("a", "b", "c")}, {}, "the env has 3 cameras .* takes 2 at most"),
        ({}, {"action_head": "l2"}, "l2"),
        ({}, {"logp_reduction": "mean"}, "has the log-prob of every token"),
    ],
)
def test_what_does_not_fit_is_one_line(spec, options, line):
    spec = {
        k: getattr(SPEC, k) for k in ("state", "action", "views", "image_size", "language", "text")
    } | spec
    with pytest.raises(UserError, match=line):
        build(spec=ObsSpec(**spec), **options) if "action_head" not in options else build(
            options["action_head"]
        )
