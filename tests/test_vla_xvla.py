"""X-VLA of our own equals LeRobot's, in both layouts of its keys."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vla_goldens import STEPS, golden_file, inputs, outputs, weights

from robo_rl.errors import UserError
from robo_rl.files import write_json
from robo_rl.policies.context import Context
from robo_rl.policies.vla.compare import compare, record
from robo_rl.policies.vla.convert import convert
from robo_rl.policies.vla.examine import examine
from robo_rl.policies.vla.keys import OURS, recognise
from robo_rl.policies.vla.make import empty_model, load_model, make_model, vla_config
from robo_rl.policies.vla.weights import open_checkpoint


@pytest.fixture(scope="module")
def model():
    return load_model(weights("xvla"))


def noised() -> torch.Tensor:
    io = outputs("xvla")
    at = io["time"][:, None, None]
    return at * io["noise"] + (1 - at) * io["actions"]


@torch.no_grad()
def test_features_clean_chunk_and_sample_equal_those_of_lerobot(model):
    io = outputs("xvla")
    context = model.prefix(**inputs("xvla"))
    seen = io["features"].shape[1]
    assert (context.kv[0][0][:, :seen] - io["features"]).abs().max() < 1e-5
    clean = model.expert.clean(context, noised(), io["time"])
    assert (clean - io["clean"]).abs().max() < 1e-5
    assert (model.sample(context, io["noise"], STEPS) - io["sample"]).abs().max() < 1e-5
    v = model.velocity(context, noised(), io["time"])
    assert (noised() - io["time"][:, None, None] * v - io["clean"]).abs().max() < 1e-5


@torch.no_grad()
def test_in_bf16_clean_chunk_and_sample_are_within_two_percent():
    model, io = load_model(weights("xvla"), dtype=torch.bfloat16), outputs("xvla")
    context = model.prefix(**inputs("xvla"))
    made = {
        "clean": model.expert.clean(context, noised(), io["time"]),
        "sample": model.sample(context, io["noise"], STEPS),
    }
    for got, want in ((made[name], io[name]) for name in made):
        assert got.dtype == torch.float32 and (got - want).norm() / want.norm() < 0.02


@torch.no_grad()
def test_views_that_are_not_there_cost_nothing_and_words_that_are_masked_are_padding(model):
    obs, io = dict(inputs("xvla")), outputs("xvla")
    want = model.velocity(model.prefix(**obs), io["noise"], io["time"])
    seen = []
    hook = model.trunk.vision.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    full = model.prefix(**obs, drop=False)
    obs["images"] = torch.where(obs["image_mask"][:, :, None, None, None], obs["images"], 7.0)
    obs["tokens"] = torch.where(obs["token_mask"], obs["tokens"], 99)
    again = model.prefix(**obs)
    hook.remove()
    assert seen == [9, int(obs["image_mask"].sum())]
    assert (model.velocity(full, io["noise"], io["time"]) - want).abs().max() < 1e-5
    assert torch.equal(model.velocity(again, io["noise"], io["time"]), want)
    short = {**obs, "tokens": obs["tokens"][2:, :3], "token_mask": obs["token_mask"][2:, :3]}
    one = model.prefix(**{k: x[2:] if len(x) == 3 else x for k, x in short.items()})
    assert (model.velocity(one, io["noise"][2:], io["time"][2:]) - want[2:]).abs().max() < 1e-5
    joined = Context.cat([again.pick(slice(0, 1)), again.pick(slice(1, 3))])
    assert (model.velocity(joined, io["noise"], io["time"]) - want).abs().max() < 1e-5


@torch.no_grad()
def test_views_that_nobody_has_need_not_be_given(model):
    obs, io = dict(inputs("xvla")), outputs("xvla")
    obs["image_mask"] = obs["image_mask"] & torch.tensor([True, True, False])
    want = model.velocity(model.prefix(**obs), io["noise"], io["time"])
    two = {**obs, "images": obs["images"][:, :2], "image_mask": obs["image_mask"][:, :2]}
    assert torch.equal(model.velocity(model.prefix(**two), io["noise"], io["time"]), want)


def test_more_views_or_a_longer_prompt_are_refused(model):
    obs = inputs("xvla")
    with pytest.raises(ValueError, match="takes 3 views and 9 words at most, got 6 and 9"):
        model.prefix(
            **{
                **obs,
                "images": obs["images"].repeat(1, 2, 1, 1, 1),
                "image_mask": obs["image_mask"].repeat(1, 2),
            }
        )
    with pytest.raises(ValueError, match="got 3 and 18"):
        model.prefix(
            **{**obs, "tokens": obs["tokens"].repeat(1, 2), "token_mask": obs["token_mask"].repeat(1, 2)}
        )


def test_every_weight_gets_a_gradient(model):
    io = outputs("xvla")
    model.loss_map(model.prefix(**inputs("xvla")), io["actions"], io["noise"], io["time"]).mean().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    model.zero_grad()
    assert without in ([], ["trunk.encoder.0.self_attn.k_proj.bias"])  # a bias of keys moves all scores alike


def renamed(tensors: dict) -> dict:
    """Keys of LeRobot 0.4.4 as 0.6.1 has them, written down here once more; the picture's projection is
    transposed there."""
    out = {}
    for key, x in tensors.items():
        key = key.replace("language_model.model.", "language_model.")
        key = key.replace("image_pos_embed", "multi_modal_projector.image_position_embed")
        key = key.replace("vlm.image_proj_norm", "vlm.multi_modal_projector.image_proj_norm")
        key = key.replace("vlm.visual_temporal", "vlm.multi_modal_projector.visual_temporal")
        if key == "model.vlm.image_projection":
            key, x = "model.vlm.multi_modal_projector.image_projection.weight", x.T.contiguous()
        if "vision_tower.convs" in key:
            key = key.replace(".proj.", ".conv.")
        for old, new in (
            (".conv1.fn.dw.", ".conv1."),
            (".conv2.fn.dw.", ".conv2."),
            ("_attn.fn.", "_attn."),
            ("window_attn.norm", "norm1"),
            ("channel_attn.norm", "norm1"),
            (".ffn.norm.", ".norm2."),
            (".ffn.fn.net.", ".ffn."),
        ):
            key = key.replace(old, new) if "vision_tower.blocks" in key else key
        out[key] = x
    return out


@torch.no_grad()
def test_both_layouts_load_and_go_to_ours_and_back_bit_for_bit(model, tmp_path):
    old = load_file(weights("xvla"))
    new = {k: x for k, x in renamed(old).items() if "final_logits_bias" not in k}
    save_file(new, tmp_path / "new.safetensors")
    assert (recognise(old).name, recognise(new).name) == ("lerobot-old", "lerobot")
    assert not recognise(old).unknown and not recognise(new).unknown
    a, b = model.state_dict(), load_model(tmp_path / "new.safetensors").state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    for name, first in (("lerobot-old", weights("xvla")), ("lerobot", tmp_path / "new.safetensors")):
        convert(first, tmp_path / f"{name}-ours.safetensors", OURS)
        convert(tmp_path / f"{name}-ours.safetensors", tmp_path / f"{name}-back.safetensors", name)
        got, want = load_file(tmp_path / f"{name}-back.safetensors"), load_file(first)
        assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    convert(weights("xvla"), tmp_path / "across.safetensors", "lerobot")
    across = load_file(tmp_path / "across.safetensors")
    assert all(torch.equal(across[k], x) for k, x in new.items())
    ours = load_model(tmp_path / "lerobot-ours.safetensors")
    assert ours.config == vla_config("xvla", "tiny") and all(
        torch.equal(a[n], x) for n, x in ours.state_dict().items()
    )


def test_sizes_come_from_shapes_and_settings(tmp_path):
    shutil.copy(weights("xvla"), tmp_path / "model.safetensors")
    write_json(
        tmp_path / "config.json",
        {
            "type": "xvla",
            "action_mode": "auto",
            "chunk_size": 12,
            "num_image_views": 2,
            "tokenizer_max_length": 20,
        },
    )
    config = load_model(tmp_path).config
    assert config == replace(vla_config("xvla", "tiny"), grippers=(), horizon=12, views=2, prompt=20)
    facts = dict(examine(tmp_path).facts)
    assert facts["model"].startswith("xvla, keys in layout lerobot-old")
    assert facts["images"] == "72 x 72 pixels, up to 2 views, 10 tokens each"
    tensors = {k: x for k, x in load_file(weights("xvla")).items() if "transformer.pos_emb" not in k}
    save_file(tensors, tmp_path / "less.safetensors")
    with pytest.raises(UserError, match=r"1 kinds of weights missing \(expert.places\)"):
        load_model(tmp_path / "less.safetensors")


def test_the_full_size_is_that_of_florence_2_large_and_24_layers():
    model = empty_model(vla_config("xvla", "full"))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 879  # 0.9 B


@torch.no_grad()
def test_a_model_of_a_seed_listens_to_all_it_is_given():
    model, io = make_model(vla_config("xvla", "tiny"), 0), outputs("xvla")
    obs = inputs("xvla")
    v = model.velocity(model.prefix(**obs), io["noise"], io["time"])
    assert v.isfinite().all() and 0.3 < v.std() < 5
    for name in ("images", "tokens", "state"):
        assert (
            model.velocity(model.prefix(**{**obs, name: obs[name].flip(0)}), io["noise"], io["time"]) - v
        ).abs().max() > 0.01, name
    other = make_model(replace(model.config, domain=2), 0)
    assert (other.velocity(other.prefix(**obs), io["noise"], io["time"]) - v).abs().max() > 0.01


def test_compare_tells_its_outputs_and_layers(tmp_path):
    assert {r.name: r.largest < 1e-5 for r in compare(weights("xvla"), golden_file("xvla"))} == {
        "sample": True
    }
    tensors, metadata = record(weights("xvla"), golden_file("xvla"))
    save_file(tensors, tmp_path / "golden.safetensors", metadata)
    rows = compare(weights("xvla"), tmp_path / "golden.safetensors")
    assert len(rows) == 8 + 2 + 2 + 3 and all(r.largest == 0 for r in rows)
    assert len(open_checkpoint(tmp_path / "golden.safetensors").tensors) == 8 + len(rows)
