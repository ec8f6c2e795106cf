"""Low-rank adapters: the same bits at the start, merged equals unmerged, saved alone, and all that is
sent."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from toys import PointReach

from robo_rl import checkpoint, lora
from robo_rl.algos import pi_rl
from robo_rl.cli import main
from robo_rl.errors import UserError
from robo_rl.experiment.folder import pick_checkpoint
from robo_rl.options import LoraOptions, PiRlOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.numpy_actor import NumpyActor
from robo_rl.policies.policy import GaussianPolicy
from robo_rl.rollout import Collector
from robo_rl.runtime import published
from robo_rl.runtime.deltas import DeltaReceiver, DeltaSender

PLAIN = PolicyOptions(horizon=4, execute=4, hidden=32, layers=3, denoise_steps=3)
SPEC = ObsSpec(state=4, action=2)
SEEN = ObsSpec(state=4, action=2, views=("front",), image_size=32, language=True)
HEAD = LoraOptions(rank=2, alpha=4.0, targets=("head",), full=("none",))
CASES = [
    (PLAIN, SPEC, HEAD),
    (replace(PLAIN, noise="learned", noise_steps="all"), SPEC, replace(HEAD, full=("noise",))),
    (replace(PLAIN, kind="gaussian"), SPEC, replace(HEAD, targets=("net.*",), full=("log_std",))),
    (replace(PLAIN, kind="diffusion", denoise_steps=5, finetune_steps=3), SPEC, HEAD),
    (replace(PLAIN, width=32), SEEN, LoraOptions(rank=4)),
]
IDS = ["flow", "flow-noise", "gaussian", "diffusion", "pictures"]


def observations(spec: ObsSpec, n: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    obs = {"state": torch.randn(n, spec.state, generator=g)}
    if spec.views:
        obs["tokens"] = torch.randint(1, 40, (n, 16), generator=g)
        obs["image/front"] = torch.randint(0, 255, (n, 32, 32, 3), generator=g, dtype=torch.uint8)
    return obs


def drawn(policy, seed: int = 5):
    """The policy with adapters that do something."""
    g = torch.Generator().manual_seed(seed)
    for layer in lora.adapted(policy).values():
        layer.lora_B.weight.data.copy_(torch.randn(layer.lora_B.weight.shape, generator=g) * 0.1)
    return policy


def acted(policy, spec: ObsSpec):
    return policy.act(observations(spec, 6), torch.Generator().manual_seed(2), True)


@pytest.mark.parametrize(("options", "spec", "how"), CASES, ids=IDS)
def test_a_fresh_adapter_changes_no_bit_of_actions_and_densities(options, spec, how):
    plain = make_policy(options, spec, 3)
    chunk, policy = acted(plain, spec), lora.attach(copy.deepcopy(plain), how, 7)
    mine = acted(policy, spec)
    assert torch.equal(mine.actions, chunk.actions) and torch.equal(mine.logp, chunk.logp)
    obs = observations(spec, 6)
    assert torch.equal(
        policy.score(policy.encode(obs), chunk.trace)[0], plain.score(plain.encode(obs), chunk.trace)[0]
    )


@pytest.mark.parametrize(("options", "spec", "how"), CASES, ids=IDS)
def test_a_merged_policy_is_the_unmerged_one(options, spec, how):
    plain = make_policy(options, spec, 3)
    policy = drawn(lora.attach(copy.deepcopy(plain), how, 7))
    chunk, merged = acted(policy, spec), lora.merge(copy.deepcopy(policy))
    assert not torch.allclose(chunk.logp, acted(plain, spec).logp, atol=1e-3) or options.noise_steps == "one"
    assert not torch.allclose(chunk.actions, acted(plain, spec).actions, atol=1e-3)
    torch.testing.assert_close(acted(merged, spec).actions, chunk.actions, atol=2e-6, rtol=1e-6)
    assert merged.state_dict().keys() == plain.state_dict().keys() and merged.options.lora == LoraOptions()
    assert all(type(m) is not lora.LoraLinear for m in merged.modules())


def test_a_layer_that_is_called_and_one_whose_weight_is_read_are_the_same():
    layer = nn.Sequential(nn.Linear(5, 3))
    layer.options = PLAIN
    drawn(lora.attach(layer, LoraOptions(rank=2, targets=("0",), full=("none",)), 0))
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        layer(x), nn.functional.linear(x, layer[0].weight, layer[0].bias), atol=1e-6, rtol=1e-6
    )
    for out in (layer(x), layer[0].weight):
        grads = torch.autograd.grad(out.square().sum(), [layer[0].lora_A.weight, layer[0].lora_B.weight])
        assert all(g.abs().max() > 0 for g in grads)


def test_only_adapters_and_what_is_named_learn():
    policy = make_policy(
        replace(PLAIN, width=32, lora=LoraOptions(rank=2, targets=("trunk.blocks",))), SEEN, 0
    )
    learns = {k for k, p in policy.named_parameters() if p.requires_grad}
    assert "trunk.blocks.0.qkv.lora_A.weight" in learns and "head.out.weight" in learns
    assert not learns & {
        "trunk.blocks.0.qkv.weight",
        "trunk.blocks.0.qkv.bias",
        "trunk.images.0.stem.weight",
        "trunk.words.weight",
    }
    assert set(lora.moving(policy)) >= learns and not set(lora.moving(policy)) & lora.frozen_names(policy)
    alone = make_policy(replace(PLAIN, lora=HEAD), SPEC, 0)
    assert all(".lora_" in k for k, p in alone.named_parameters() if p.requires_grad)


def test_an_update_with_adapters_starts_at_ratio_one_and_leaves_the_frozen_weights():
    policy = make_policy(replace(PLAIN, lora=replace(HEAD, full=("none",))), SPEC, 0)
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    learner = pi_rl.make(policy, PiRlOptions(decisions=4, minibatch=8, epochs=2, critic_warmup=0, lr=1e-2), 0)
    rollout = Collector(PointReach(8), policy, 0.99, 0).collect(policy, 4)
    metrics = learner.update(rollout, 0.0)
    assert metrics["first_log_ratio"] <= 2e-5  # as without adapters: of score against act
    changed = {k for k, v in policy.state_dict().items() if not torch.equal(v, before[k])}
    assert changed and all(k.endswith((lora.A, lora.B)) for k in changed)


def test_a_checkpoint_with_adapters_comes_back_and_a_robot_reads_it(tmp_path):
    policy = drawn(make_policy(replace(PLAIN, lora=HEAD), SPEC, 0))
    checkpoint.save_checkpoint(tmp_path / "c", policy, {}, {})
    again, _ = checkpoint.load_policy(tmp_path / "c")
    assert again.options.lora == HEAD and torch.equal(acted(again, SPEC).actions, acted(policy, SPEC).actions)
    noise, state = np.random.default_rng(0).standard_normal(8).astype(np.float32), np.ones(4, np.float32)
    merged = make_policy(PLAIN, SPEC, 0)
    merged.load_state_dict(HEAD.merged(policy.state_dict()))
    checkpoint.save_checkpoint(tmp_path / "m", merged, {}, {})
    mine, its = (NumpyActor.load(tmp_path / k).act(state, noise=noise) for k in "cm")
    np.testing.assert_allclose(mine, its, atol=1e-6)
    plain = make_policy(PLAIN, SPEC, 0)
    checkpoint.save_checkpoint(tmp_path / "p", plain, {}, {})
    assert np.abs(NumpyActor.load(tmp_path / "p").act(state, noise=noise) - mine).max() > 1e-3


def test_an_adapter_saved_alone_has_pefts_names_and_fits_the_same_base_again(tmp_path):
    plain = make_policy(replace(PLAIN, width=32), SEEN, 3)
    policy = drawn(
        lora.attach(copy.deepcopy(plain), LoraOptions(rank=2, alpha=6.0, targets=("qkv",), full=("head",)), 0)
    )
    policy.head.out.weight.data += 1
    lora.save_adapter(policy, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 6.0)
    assert config["target_modules"] == ["trunk.blocks.0.qkv", "trunk.blocks.1.qkv"] and config[
        "modules_to_save"
    ] == ["head"]
    from safetensors.torch import load_file

    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert {"base_model.model.trunk.blocks.0.qkv.lora_A.weight", "base_model.model.head.out.weight"} <= names
    assert "base_model.model.trunk.blocks.0.qkv.weight" not in names
    again = lora.load_adapter(copy.deepcopy(plain), tmp_path)
    assert torch.equal(acted(again, SEEN).actions, acted(policy, SEEN).actions)
    with pytest.raises(UserError, match="has adapters already"):
        lora.load_adapter(again, tmp_path)
    with pytest.raises(UserError, match="there is no linear layer of that name"):
        lora.load_adapter(make_policy(PLAIN, SPEC, 0), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(UserError, match="no adapter that can be read"):
        lora.load_adapter(copy.deepcopy(plain), tmp_path)


def test_an_adapter_of_a_run_that_explored_fits_the_policy_that_it_began_with(tmp_path):
    plain = make_policy(PLAIN, SPEC, 3)
    explores = make_policy(replace(PLAIN, noise="learned", noise_steps="all"), SPEC, 4)
    explores.load_state_dict(plain.state_dict(), strict=False)
    policy = drawn(lora.attach(explores, replace(HEAD, full=("noise",)), 0))
    lora.save_adapter(policy, tmp_path)
    again = lora.load_adapter(plain, tmp_path)
    states, g = observations(SPEC, 6), torch.Generator()
    mine, its = (p.act(states, g.manual_seed(2), False).actions for p in (policy, again))
    assert torch.equal(mine, its)


def test_what_workers_are_sent_is_the_adapters_and_comes_out_bit_for_bit(tmp_path):
    options = replace(PLAIN, hidden=256, lora=LoraOptions(rank=1, targets=("head.body",), full=("none",)))
    policy = make_policy(options, SPEC, 3)
    policy.head.out.weight.data += 0.5  # frozen, and not as drawn from the seed
    writer = published.create(tmp_path / "weights.bin", policy)
    writer.publish(0, lora.moving(policy))
    reader, mine = published.follow(tmp_path / "weights.bin", policy.options, SPEC)
    for version in (1, 2):
        drawn(policy, version)
        writer.publish(version, lora.moving(policy))
        assert reader.fetch() == version and reader.swap(mine) == version
        assert all(torch.equal(v, policy.state_dict()[k]) for k, v in mine.state_dict().items())
    whole = sum(v.nbytes for v in policy.state_dict().values())
    # head.body is 2 of 256 x 256 and its adapters are of rank 1, beside normalisers
    assert reader.layout.size <= 0.08 * whole
    writer.close()


def test_a_delta_of_adapters_alone_is_lossless_and_within_two_percent():
    wide = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    wide.options = PLAIN
    policy = lora.attach(wide, LoraOptions(rank=2, targets=("*",), full=("none",)), 0)
    whole = sum(v.nbytes for v in policy.state_dict().values())
    sender = DeltaSender(lora.moving(policy), 0, link=1e9)
    receiver = DeltaReceiver({k: torch.zeros_like(v) for k, v in lora.moving(policy).items()})
    assert receiver.receive(sender.full()) == "applied"
    drawn(policy)
    message = sender.send(1, lora.moving(policy))
    assert message.nbytes <= 0.02 * whole and receiver.receive(message) == "applied"
    assert all(torch.equal(receiver.tensors[k], v) for k, v in lora.moving(policy).items())


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match="no linear layer of that name; the policy's are head.from_context"):
        make_policy(replace(PLAIN, lora=LoraOptions(rank=2)), SPEC, 0)
    model = make_policy(PolicyOptions(kind="pi05"), replace(SEEN, text=64), 0)
    with pytest.raises(
        UserError, match=r"lie below trunk, .*head, head.expert and end with q_proj, .*time_in"
    ):
        lora.chosen(model, LoraOptions(targets=("expert",)))
    with pytest.raises(UserError, match="targets q_proj,v_proj: .*; several have spaces between them"):
        lora.chosen(model, LoraOptions(targets=("q_proj,v_proj",)))
    with pytest.raises(UserError, match="policy.lora goes with"):
        PolicyOptions(kind="squashed", lora=LoraOptions(rank=2))
    with pytest.raises(UserError, match=r"policy.lora.rank must be in \[0, 4096\]"):
        LoraOptions(rank=-1)
    with pytest.raises(UserError, match="has no adapters"):
        lora.save_adapter(make_policy(PLAIN, SPEC, 0), None)
    assert isinstance(
        make_policy(replace(PLAIN, kind="gaussian", lora=replace(HEAD, targets=("net",))), SPEC, 0),
        GaussianPolicy,
    )


def test_a_run_with_adapters_trains_resumes_and_is_merged(tmp_path, capsys):
    run = str(tmp_path / "r")
    common = [
        "--envs",
        "8",
        "--demos",
        "2",
        "--bc.updates",
        "20",
        "--steps",
        "512",
        "--eval-episodes",
        "4",
        "--no-video",
        "--workers",
        "0",
        "--threads",
        "1",
        "--policy.hidden",
        "32",
        "--rl.decisions",
        "4",
        "--target",
        "0",
        "--out",
        run,
    ]
    with pytest.raises(SystemExit) as e:
        main(["train", *common, "--policy.lora.rank", "2", "--policy.lora.targets", "head"])
    assert not e.value.code
    with pytest.raises(SystemExit) as e:
        main(["lora", run, "--checkpoint", "last"])
    assert not e.value.code and "% of the policy's" in capsys.readouterr().out
    with pytest.raises(SystemExit) as e:
        main(["lora", run, "--checkpoint", "last", "--merge"])
    assert not e.value.code
    assert pick_checkpoint(tmp_path / "r", "merged")[1] == tmp_path / "r" / "checkpoints" / "merged"
    merged, _ = checkpoint.load_policy(tmp_path / "r" / "checkpoints" / "merged")
    last, _ = checkpoint.load_policy(checkpoint.checkpoints(tmp_path / "r")[-1])
    assert last.options.lora.rank == 2 and not lora.adapted(merged)
    torch.testing.assert_close(
        acted(merged, last.spec).actions, acted(last, last.spec).actions, atol=2e-6, rtol=1e-5
    )
