"""pi0, pi0.5 and SmolVLA of our own equal LeRobot's, drop what is masked, and can be frozen, sharded and made
of a seed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from vla_goldens import FAMILIES, STEPS, inputs, outputs, weights

from robo_rl.errors import UserError
from robo_rl.policies.context import Context
from robo_rl.policies.vla.blocks import DecoderBlock, VisionBlock, pack
from robo_rl.policies.vla.make import empty_model, load_model, make_model, vla_config

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request):
    """(family, its model in float32)"""
    return request.param, load_model(weights(request.param))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@torch.no_grad()
def test_loss_and_sample_equal_those_of_lerobot(golden):
    family, model = golden
    io = outputs(family)
    context = model.prefix(**inputs(family))
    losses = model.loss_map(context, io["actions"], io["noise"], io["time"])
    assert abs(losses[..., :7].mean() - io["loss"]) < 1e-5
    if "loss_map" in io:
        assert (losses - io["loss_map"]).abs().max() < 1e-5
    assert (model.sample(context, io["noise"], STEPS) - io["sample"]).abs().max() < 1e-5


@torch.no_grad()
def test_in_bf16_loss_and_sample_are_within_two_percent(golden):
    family, _ = golden
    model, io = load_model(weights(family), dtype=torch.bfloat16), outputs(family)
    context = model.prefix(**inputs(family))
    v = model.velocity(context, io["noise"], io["time"])
    assert v.dtype == torch.float32 and context.kv[0][0].dtype == torch.bfloat16
    assert relative(model.sample(context, io["noise"], STEPS), io["sample"]) < 0.02
    losses = model.loss_map(context, io["actions"], io["noise"], io["time"])
    assert relative(losses[..., :7].mean(), io["loss"]) < 0.02
    if "loss_map" in io:
        assert relative(losses, io["loss_map"]) < 0.02


@torch.no_grad()
def test_a_masked_camera_and_padding_cost_nothing_and_change_nothing(golden):
    family, model = golden
    obs, io = dict(inputs(family)), outputs(family)
    obs["image_mask"] = obs["image_mask"].clone()
    obs["image_mask"][:, 1] = False
    obs["image_mask"][1, 0] = False  # a camera that other rows have
    full, packed = model.prefix(**obs, drop=False), model.prefix(**obs)
    assert packed.mask.shape[1] == packed.length.max() < full.mask.shape[1]
    assert torch.equal(full.length, packed.length)
    assert (full.pooled - packed.pooled).abs().max() < 1e-5
    a, b = (model.velocity(c, io["noise"], io["time"]) for c in (full, packed))
    assert (a - b).abs().max() < 1e-5
    obs["images"] = obs["images"].clone()
    obs["images"][~obs["image_mask"]] = 7.0
    assert torch.equal(model.prefix(**obs).pooled, packed.pooled)  # nobody looks at it
    seen = []
    hook = model.trunk.vision.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    model.prefix(**obs)
    hook.remove()
    assert seen == [int(obs["image_mask"].sum())]


@torch.no_grad()
def test_with_a_set_length_a_row_has_the_same_bits_in_any_minibatch(golden):
    """So that the ratio of what acted in one batch and is scored in another is exactly 1."""
    family, model = golden
    rows = torch.arange(12) % len(outputs(family)["noise"])
    obs, io = (
        {k: x[rows] for k, x in inputs(family).items()},
        {k: outputs(family)[k][rows] for k in ("noise", "time")},
    )
    length = int(model.prefix(**obs).length.max()) + 3
    together = model.prefix(**obs, length=length)
    assert together.mask.shape[1] == length
    v = model.velocity(together, io["noise"], io["time"])
    for some in ([3, 1], [5], [0, 7, 2], [11, 4, 9, 1, 0], [8, 6, 4, 2, 0, 1, 3]):
        if family == "smolvla" and len(some) == 1:
            continue  # 10 rows of actions in all: so few are multiplied by another routine
        again = model.prefix(**{k: x[some] for k, x in obs.items()}, length=length)
        assert torch.equal(model.velocity(again, io["noise"][some], io["time"][some]), v[some]), some
        assert torch.equal(
            model.velocity(together.pick(torch.tensor(some)), io["noise"][some], io["time"][some]), v[some]
        )
    with pytest.raises(ValueError, match="does not fit into the 4"):
        model.prefix(**obs, length=4)


@torch.no_grad()
def test_a_context_is_picked_repeated_and_joined_with_shorter_ones(golden):
    family, model = golden
    obs, io = inputs(family), outputs(family)
    v = model.velocity(model.prefix(**obs), io["noise"], io["time"])
    rows = [model.prefix(**{k: x[i : i + 1] for k, x in obs.items()}) for i in range(len(v))]
    assert len({r.mask.shape[1] for r in rows}) > 1
    joined = Context.cat(rows)
    assert (model.velocity(joined, io["noise"], io["time"]) - v).abs().max() < 1e-5
    twice = model.velocity(
        joined.repeat(2), io["noise"].repeat_interleave(2, 0), io["time"].repeat_interleave(2, 0)
    )
    assert (twice[1::2] - v).abs().max() < 1e-5
    last = model.velocity(joined.pick(slice(1, 2)), io["noise"][1:2], io["time"][1:2])
    assert (last - v[1:2]).abs().max() < 1e-5


def test_a_row_without_image_and_word_is_refused():
    with pytest.raises(ValueError, match="neither an image nor a word"):
        pack(torch.zeros(2, 3, 4), torch.tensor([[True, False, False], [False, False, False]]), None)


def test_packing_keeps_the_order_of_real_tokens():
    x = torch.arange(5.0).view(1, 5, 1).repeat(2, 1, 1)
    mask = torch.tensor([[False, True, False, True, True], [True, False, False, False, False]])
    packed, there, length = pack(x, mask, None)
    assert packed[0, :, 0].tolist() == [1, 3, 4] and packed[1, 0, 0] == 0
    assert there.tolist() == [[True] * 3, [True, False, False]] and length.tolist() == [3, 1]


def test_every_weight_gets_a_gradient(golden):
    """No part is computed for nothing: the last trunk layer ends with its keys and values."""
    family, model = golden
    io = outputs(family)
    context = model.prefix(**inputs(family))
    loss = (
        model.loss_map(context, io["actions"], io["noise"], io["time"]).mean()
        + context.pooled.square().mean()
    )
    loss.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    model.zero_grad()
    assert not without
    assert not any(hasattr(model.trunk.layers[-1], x) for x in ("mlp", "post_attention_layernorm"))
    assert {n for n, _ in model.trunk.layers[-1].self_attn.named_children()} == {"k_proj", "v_proj"}


@torch.no_grad()
def test_blocks_are_called_through_forward_alone(golden):
    """FSDP2, LoRA and checkpointing hook into forward."""
    family, model = golden
    calls: dict[str, int] = {}

    def count(name):
        def hook(*_):
            calls[name] = calls.get(name, 0) + 1

        return hook

    leaves = {
        n: m
        for n, m in model.named_modules()
        if list(m.parameters(recurse=False)) or isinstance(m, DecoderBlock | VisionBlock)
    }
    hooks = [m.register_forward_hook(count(n)) for n, m in leaves.items()]
    model.sample(model.prefix(**inputs(family)), outputs(family)["noise"], STEPS)
    for hook in hooks:
        hook.remove()
    assert calls.pop("trunk.vision.place", 1) == 1
    assert {n for n in leaves if n not in calls} <= {"trunk.vision.place"}
    assert {calls[n] for n in calls if n.startswith("trunk.")} == {1}
    assert {calls[n] for n in calls if n.startswith("expert.layers.")} == {STEPS}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_from_the_seed_alone(family):
    config = vla_config(family, "tiny")
    a, b, other = (make_model(config, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[n], b[n]) for n in a)
    drawn = [n for n in a if a[n].dim() > 1]
    assert len(drawn) > 20 and not any(torch.equal(a[n], other[n]) for n in drawn)
    half = make_model(config, 0, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(half[n], a[n].bfloat16()) or (half[n] - a[n]).abs().max() < 0.05 for n in a)


def test_the_gates_of_a_model_of_a_seed_are_open():
    """Closed ones (openpi, whose trunk is trained already) leave a fresh expert deaf at first."""
    block = make_model(vla_config("pi05", "tiny"), 0).expert.layers[0]
    scale, shift, gate = block.input_layernorm.dense.bias.chunk(3)
    assert not scale.any() and not shift.any() and (gate == 1).all()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_a_seed_listens_to_images_words_state_and_time(family):
    model = make_model(load_model(weights(family)).config, 0)
    obs, io = inputs(family), outputs(family)
    v = model.velocity(model.prefix(**obs), io["noise"], io["time"])
    assert 0.3 < v.std() < 3
    for name, x in obs.items():
        if name in ("images", "tokens") or (name == "state" and family != "pi05"):
            assert (
                model.velocity(model.prefix(**{**obs, name: x.flip(0)}), io["noise"], io["time"]) - v
            ).abs().max() > 0.01, name
    assert (model.velocity(model.prefix(**obs), io["noise"], 1 - io["time"]) - v).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_without_any_camera_a_model_reads_words_and_state(family):
    model = make_model(vla_config(family, "tiny"), 0)
    words, state = (
        torch.ones(2, 3, dtype=torch.int64),
        torch.randn(2, model.state_width, generator=torch.Generator().manual_seed(0)),
    )
    empty = torch.zeros(2, 1, 3, model.image_size, model.image_size)
    context = model.prefix(
        empty, torch.zeros(2, 1, dtype=torch.bool), words, torch.ones_like(words, dtype=torch.bool), state
    )
    assert model.velocity(context, torch.zeros(2, 4, model.action_width), torch.ones(2)).isfinite().all()


@pytest.mark.parametrize(("family", "millions"), [("pi0", 3129), ("pi05", 3244), ("smolvla", 394)])
def test_the_full_size_has_as_many_parameters_as_published_less_what_is_not_needed(family, millions):
    """pi0: 1,982 M of the trunk less 109 M of its last layer, 527 M words, 412 M + 2.4 M vision, 315 M
    expert."""
    model = empty_model(vla_config(family, "full"))
    assert all(p.is_meta for p in model.parameters())
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_a_configuration_that_cannot_be_is_refused():
    config = vla_config("pi0", "tiny")
    with pytest.raises(ValueError, match="as many layers"):
        replace(config, expert=replace(config.expert, depth=3))
    with pytest.raises(UserError, match="pi05"):
        replace(config, family="pi5")
    with pytest.raises(ValueError, match="merge must divide"):
        replace(vla_config("smolvla", "tiny"), merge=3)
    with pytest.raises(UserError, match="tiny"):
        vla_config("pi0", "huge")


def test_no_package_of_other_peoples_models_is_imported_anywhere():
    name = r"(transformers|lerobot|peft)\b"
    pattern = re.compile(rf"^\s*(import|from)\s+{name}|import_module\(\s*[\"']{name}", re.MULTILINE)
    assert pattern.search("def f():\n    from transformers.models import x") and pattern.search(
        "import_module('peft')"
    )
    for package in ("robo_rl", "sims", "controllers", "world_models"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name == "lerobot_worker.py":
                continue  # its policy is made in LeRobot's environment, by LeRobot's Python, alone
            assert not pattern.search(path.read_text(encoding="utf-8")), path


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "words", "tokens", "prefix", "step"),
    [("pi0", 48, 816, 3.81, 38.6), ("pi05", 200, 968, 4.42, 42.4), ("smolvla", 48, 241, 0.72, 11.4)],
)
def test_the_full_size_costs_what_is_published_less_the_last_trunk_layer(family, words, tokens, prefix, step):
    """3.96 and 4.6 TFLOP for three views and a padded prompt, 38 GFLOP a denoise step of pi0; counted on the
    meta device."""
    config = vla_config(family, "full")
    model, side = empty_model(config), config.vision.image
    with torch.device("meta"):
        obs = {
            "images": torch.empty(1, 3, 3, side, side),
            "image_mask": torch.empty(1, 3, dtype=torch.bool),
            "tokens": torch.empty(1, words, dtype=torch.int64),
            "token_mask": torch.empty(1, words, dtype=torch.bool),
            "state": torch.empty(1, 32),
        }
        with FlopCounterMode(display=False) as first:
            context = model.prefix(**obs, drop=False)
        with FlopCounterMode(display=False) as second:
            assert model.velocity(context, torch.empty(1, 50, 32), torch.empty(1)).shape == (1, 50, 32)
    assert context.mask.shape == (1, tokens) and len(context.kv) == config.trunk.depth
    assert first.get_total_flops() / 1e12 == pytest.approx(prefix, rel=0.01)
    assert second.get_total_flops() / 1e9 == pytest.approx(step, rel=0.01)
