"""Checkpoints of vision-language-action models: every public layout of keys is read strictly and written back
bit for bit; what is not whole is refused in one line."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vla_processor import lerobot_folder
from vla_goldens import FAMILIES, golden_file, inputs, outputs, weights

from robo_rl.errors import UserError
from robo_rl.files import write_json
from robo_rl.policies.vla.compare import compare, record
from robo_rl.policies.vla.convert import convert
from robo_rl.policies.vla.examine import examine
from robo_rl.policies.vla.keys import FAMILIES as FAMILIES_OF_KEYS
from robo_rl.policies.vla.keys import HEAD, LAYOUTS, OURS, WORDS, layouts_of, recognise
from robo_rl.policies.vla.make import config_of, empty_model, family_of, load_model, make_model, vla_config
from robo_rl.policies.vla.weights import INDEX, SINGLE, open_checkpoint

EVERY = [(x.family, x.name) for x in LAYOUTS if x.family in FAMILIES]
OLD = (
    ("paligemma.model.vision_tower", "paligemma.vision_tower"),
    ("paligemma.model.multi_modal", "paligemma.multi_modal"),
    ("paligemma.model.language_model.", "paligemma.language_model.model."),
    ("paligemma.lm_head", "paligemma.language_model.lm_head"),
)


@torch.no_grad()
def velocity(model, family: str) -> torch.Tensor:
    return model.velocity(model.prefix(**inputs(family)), outputs(family)["noise"], outputs(family)["time"])


def refused(call, *words: str) -> str:
    with pytest.raises(UserError) as e:
        call()
    for word in words:
        assert word in str(e.value), str(e.value)
    return str(e.value)


# ---- layouts


def spelling(key: str, layout: str) -> str:
    """A key of LeRobot as another public layout has it, written down here once more."""
    for new, old in OLD if "old" in layout else ():
        key = key.replace(new, old)
    return key.removeprefix("model.") if layout.startswith("openpi") else key


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_every_public_layout_is_recognised_and_loads_strictly(family, name, tmp_path):
    tensors = {spelling(k, name): x for k, x in load_file(weights(family)).items()}
    save_file(tensors, tmp_path / "x.safetensors")
    read = recognise(tensors)
    assert (read.family, read.name, read.unknown) == (family, name, ())
    assert torch.equal(
        velocity(load_model(tmp_path / "x.safetensors"), family),
        velocity(load_model(weights(family)), family),
    )


@pytest.mark.parametrize("shape", LAYOUTS, ids=lambda x: f"{x.family}-{x.name}")
def test_every_name_of_ours_has_one_public_key_and_that_key_leads_back(shape):
    names = list(empty_model(vla_config(shape.family, "tiny")).state_dict())
    keys = [shape.theirs(name) for name in names]
    assert len(set(keys)) == len(keys) and [shape.ours(key) for key in keys] == names
    assert shape.theirs(WORDS).endswith(
        "language_model.shared.weight"
        if shape.family == "xvla" and shape.name == "lerobot"
        else "model.shared.weight"
        if shape.family == "xvla"
        else "embed_tokens.weight"
    )


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_a_checkpoint_goes_to_ours_and_back_bit_for_bit(family, name, tmp_path):
    first, ours, back = (tmp_path / n for n in ("first.safetensors", "ours.safetensors", "back.safetensors"))
    save_file(
        {spelling(k, name): x for k, x in load_file(weights(family)).items()},
        first,
        metadata={"format": "pt", "by": "someone"},
    )
    done = convert(first, ours, OURS)
    assert (done.came, done.to, done.zeros) == (name, OURS, 0)
    assert convert(ours, back, name).zeros == 0
    assert back.read_bytes() == first.read_bytes()
    assert recognise(open_checkpoint(ours).tensors).layout is None


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_one_public_layout_becomes_any_other(family, tmp_path):
    names = [n for n in layouts_of(family) if n != OURS]
    want = load_file(weights(family))
    for name in names:
        convert(weights(family), tmp_path / f"{name}.safetensors", name)
        got = load_file(tmp_path / f"{name}.safetensors")
        assert set(got) == {spelling(k, name) for k in want}
        assert all(torch.equal(got[spelling(k, name)], x) for k, x in want.items())


def test_a_file_with_the_output_head_alone_has_its_words_there_and_keeps_them_there(tmp_path):
    """openpi's files: `lm_head` and no `embed_tokens`."""
    tensors = {k.removeprefix("model."): x for k, x in load_file(weights("pi05")).items()}
    words = tensors.pop("paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight")
    tensors["paligemma_with_expert.paligemma.lm_head.weight"] = words
    first, ours, back, other = (tmp_path / f"{n}.safetensors" for n in ("first", "ours", "back", "other"))
    save_file(tensors, first)
    assert torch.equal(velocity(load_model(first), "pi05"), velocity(load_model(weights("pi05")), "pi05"))
    convert(first, ours, OURS)
    assert HEAD not in open_checkpoint(ours).tensors
    convert(ours, back, "openpi")
    assert set(load_file(back)) == set(tensors)
    convert(ours, other, "lerobot")
    assert "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight" in load_file(
        other
    )
    assert "model.paligemma_with_expert.paligemma.lm_head.weight" not in load_file(other)


def test_compiled_names_and_statistics_among_the_weights_are_known(tmp_path):
    tensors = {
        k.replace("model.", "model._orig_mod.", 1): x for k, x in load_file(weights("smolvla")).items()
    }
    tensors["normalize_inputs.buffer_observation_state.mean"] = torch.zeros(3)
    first, ours, back = (tmp_path / f"{n}.safetensors" for n in ("first", "ours", "back"))
    save_file(tensors, first)
    assert torch.equal(
        velocity(load_model(first), "smolvla"), velocity(load_model(weights("smolvla")), "smolvla")
    )
    convert(first, ours, OURS)
    convert(ours, back, "lerobot")
    assert set(load_file(back)) == {
        *load_file(weights("smolvla")),
        "normalize_inputs.buffer_observation_state.mean",
    }


def test_what_ours_never_had_is_zeros_in_a_public_layout(tmp_path):
    model = make_model(load_model(weights("pi0")).config, 0)
    save_file(
        model.state_dict(), tmp_path / "seed.safetensors", metadata={"vla": json.dumps(asdict(model.config))}
    )
    done = convert(tmp_path / "seed.safetensors", tmp_path / "public.safetensors", "lerobot")
    assert done.zeros == 6 and "6" not in OURS
    golden, got = load_file(weights("pi0")), load_file(tmp_path / "public.safetensors")
    heads = {k for k in golden if "lm_head" in k}
    assert {k: x.shape for k, x in got.items()} == {k: x.shape for k, x in golden.items() if k not in heads}
    assert torch.equal(velocity(load_model(tmp_path / "public.safetensors"), "pi0"), velocity(model, "pi0"))
    convert(tmp_path / "seed.safetensors", tmp_path / "openpi.safetensors", "openpi")
    words = {k for k in load_file(tmp_path / "openpi.safetensors") if "embed_tokens" in k or "lm_head" in k}
    assert words == {"paligemma_with_expert.paligemma.lm_head.weight"}  # where openpi's own files have them


def test_a_policy_that_was_trained_here_is_checked_and_goes_to_a_public_layout(tmp_path):
    """Its checkpoint: policy.safetensors with the model as trunk and head, vla.json, a processor."""
    model = load_model(weights("pi05"))
    names = {
        n: n.replace("expert.", "head.expert.", 1) if n.startswith("expert.") else n
        for n in model.state_dict()
    }
    policy = {names[n]: x for n, x in model.state_dict().items()} | {
        "noisy": torch.zeros(3),
        "processor.state_norm.shift": torch.zeros(2),
    }
    save_file(policy, tmp_path / "policy.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "processor.safetensors")
    config = replace(model.config, horizon=7)
    write_json(tmp_path / "vla.json", asdict(config))
    facts = dict(examine(tmp_path).facts)
    assert facts["model"] == "pi05, keys in layout robo_rl" and "chunks of 7 steps" in facts["expert"]
    assert facts["not needed"].startswith("2 tensors of") and load_model(tmp_path).config == config
    done = convert(tmp_path, tmp_path / "public.safetensors", "lerobot")
    assert (done.came, done.zeros) == (OURS, 6)
    assert torch.equal(velocity(load_model(tmp_path / "public.safetensors"), "pi05"), velocity(model, "pi05"))
    for name in ("processor.json", "tokenizer.json", "meta.json", "train.safetensors"):
        (tmp_path / name).write_text("{}")
    assert convert(tmp_path, tmp_path / "ours", OURS).copied == (
        "processor.json",
        "processor.safetensors",
        "tokenizer.json",
    )
    assert (
        set(load_file(tmp_path / "ours" / SINGLE)) == set(model.state_dict())
        and load_model(tmp_path / "ours").config == config
    )


def test_an_unknown_layout_names_the_nearest_and_counts_what_differs(tmp_path):
    tensors = {
        k: x
        for k, x in load_file(weights("pi05")).items()
        if "vision_tower.vision_model.encoder.layers.1." not in k
    }
    tensors |= {"model.value_head.weight": torch.zeros(1), "model.action_in_proj.bias": torch.zeros(5)}
    save_file(tensors, tmp_path / "x.safetensors")
    config = load_model(weights("pi05")).config
    said = refused(
        lambda: load_model(tmp_path / "x.safetensors", config=config),
        "nearest is pi05 in layout lerobot",
        "16 missing",
        "1 of another shape (expert.action_in.bias [5] instead of [48])",
        "1 unexpected (model.value_head.weight)",
    )
    assert said.count("\n") == 0
    found = examine(tmp_path / "x.safetensors")  # its shapes say one layer less
    assert any("1 weights unexpected: model.value_head.weight" in text for text in found.missing)


def test_weights_of_something_else_are_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    for call in (load_model, examine, family_of, lambda x: compare(x, weights("pi0"))):
        refused(lambda: call(tmp_path / "a.safetensors"), f"no key of {', '.join(FAMILIES_OF_KEYS)}", "'a'")  # noqa: B023 - called at once
    tensors = load_file(weights("pi0"))
    tensors[next(k for k in tensors if k.endswith("patch_embedding.weight"))] = torch.zeros(40, 3, 14, 14)
    save_file(tensors, tmp_path / "b.safetensors")
    refused(
        lambda: load_model(tmp_path / "b.safetensors"), "vision of 40 and a trunk of 64", "tiny 32 and 64"
    )


def test_keys_below_a_known_prefix_that_are_no_weights_are_counted(tmp_path):
    tensors = {k.replace("self_attn", "attention"): x for k, x in load_file(weights("pi05")).items()}
    save_file(tensors, tmp_path / "x.safetensors")
    refused(
        lambda: examine(tmp_path / "x.safetensors"),
        "nearest is pi05 in layout lerobot: 28 keys unexpected",
        "16 kinds of weights missing (expert.layers.N.self_attn.k_proj.weight",
    )


def test_one_shard_alone_is_no_checkpoint(shards):
    refused(
        lambda: load_model(shards / "model-00001-of-00003.safetensors"), "then name its folder", "missing"
    )


def test_a_pointer_of_git_lfs_is_told(tmp_path):
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused(lambda: load_model(tmp_path), "pointer of Git LFS", "git lfs pull")


def test_a_run_folder_is_told_from_its_checkpoints(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    refused(lambda: open_checkpoint(tmp_path), "is a run", f"{tmp_path}/checkpoints/NAME")


@pytest.mark.parametrize("given", ["out", "out/checkpoints", "out/checkpoints/000200"])
def test_an_output_folder_of_lerobot_is_told_where_its_weights_lie(given, tmp_path):
    for name in ("000100", "000200"):
        at = tmp_path / "out" / "checkpoints" / name / "pretrained_model"
        at.mkdir(parents=True)
        shutil.copy(weights("pi05"), at / SINGLE)
    refused(lambda: open_checkpoint(tmp_path / given), f"saved them in {at}: give this folder")


def test_a_name_of_the_hub_is_told_that_nothing_is_downloaded(tmp_path):
    refused(
        lambda: open_checkpoint("lerobot/pi05_base"), "hf download lerobot/pi05_base --local-dir pi05_base"
    )
    with pytest.raises(UserError) as e:
        open_checkpoint(tmp_path / "nothing")  # a path, no name
    assert "download" not in str(e.value)


def test_weights_with_adapters_are_to_be_merged_first(tmp_path):
    tensors = load_file(weights("pi0")) | {"model.action_in_proj.lora_A.weight": torch.zeros(1, 32)}
    save_file(tensors, tmp_path / "x.safetensors")
    refused(lambda: convert(tmp_path / "x.safetensors", tmp_path / "out", OURS), "robo_rl lora", "--merge")
    assert "--merge" in examine(tmp_path / "x.safetensors").missing[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", ["tiny", "full"])
def test_sizes_are_told_from_shapes_alone(family, size, tmp_path):
    """At full size too: the file is a hole of gigabytes, of which only the header is read."""
    config = vla_config(family, size)
    header, end = {}, 0
    for name, p in empty_model(config, torch.bfloat16).state_dict().items():
        key = next(x for x in LAYOUTS if x.family == family).theirs(name)
        header[key] = {"dtype": "BF16", "shape": list(p.shape), "data_offsets": [end, end + 2 * p.numel()]}
        end += 2 * p.numel()
    text = json.dumps(header).encode()
    with open(tmp_path / SINGLE, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + end)
    write_json(tmp_path / "config.json", {"chunk_size": 7})
    found = dict(examine(tmp_path).facts)
    assert found["model"].startswith(f"{family}, keys in layout lerobot")
    assert f"chunks of 7 steps, {config.action_width} numbers" in found["expert"]
    v, t = config.vision, config.trunk
    assert f"{v.image} x {v.image} pixels" in found["images"]
    assert (
        f"{t.depth} layers of {t.width}, {t.heads} heads over {t.kv_heads} of {t.head_dim}; {config.vocab} "
        "words" in found["trunk"]
    )
    assert config_of(asdict(config)) == config


# ---- files that are not whole


@pytest.fixture
def shards(tmp_path):
    """The tiny pi0 in three shards."""
    tensors = load_file(weights("pi0"))
    where = {k: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, k in enumerate(sorted(tensors))}
    for name in set(where.values()):
        save_file({k: x for k, x in tensors.items() if where[k] == name}, tmp_path / name)
    write_json(tmp_path / INDEX, {"metadata": {}, "weight_map": where})
    return tmp_path


def test_shards_are_read_one_by_one_to_the_same_model(shards):
    assert torch.equal(velocity(load_model(shards), "pi0"), velocity(load_model(weights("pi0")), "pi0"))
    assert load_model(shards, dtype=torch.bfloat16).expert.action_in.weight.dtype == torch.bfloat16


def test_a_loaded_model_no_longer_needs_its_file(tmp_path):
    """On a CPU safetensors gives the pages of the file: who wrote into it would change the weights."""
    file = tmp_path / "x.safetensors"
    shutil.copy(weights("pi0"), file)
    model = load_model(file)
    before = velocity(model, "pi0")
    with open(file, "r+b") as f:
        f.seek(-100_000, 2)
        f.write(bytes(100_000))
    assert torch.equal(velocity(model, "pi0"), before)


def test_an_absent_shard_is_told(shards):
    (shards / "model-00002-of-00003.safetensors").unlink()
    refused(
        lambda: load_model(shards), "names 1 of 3 shards that are not there: model-00002-of-00003.safetensors"
    )


def test_a_truncated_shard_is_told(shards):
    shard = shards / "model-00003-of-00003.safetensors"
    whole = shard.read_bytes()
    for length in (len(whole) - 1, 100, 4, 0):
        shard.write_bytes(whole[:length])
        refused(
            lambda: load_model(shards),
            "model-00003-of-00003.safetensors is no whole safetensors file",
            f"it has {length} bytes",
        )
    shard.write_bytes(whole + b"x")
    refused(
        lambda: load_model(shards), f"it has {len(whole) + 1} bytes and its header speaks of {len(whole)}"
    )


def test_an_index_that_disagrees_with_its_shards_is_told(shards):
    index = json.loads((shards / INDEX).read_text())
    key = next(k for k, f in index["weight_map"].items() if f.startswith("model-00001"))
    index["weight_map"][key] = "model-00002-of-00003.safetensors"
    write_json(shards / INDEX, index)
    refused(lambda: load_model(shards), "disagree on 1 keys", key)
    write_json(shards / INDEX, {"weight_map": {"a": "../../etc/passwd"}})
    refused(lambda: load_model(shards), "has no weight_map")


def test_a_header_of_nonsense_is_told(tmp_path):
    entry = '{"a": {"dtype": "%s", "shape": [%s], "data_offsets": [0, 4]}}'
    for text in (
        b"{]",
        b'{"a": 3}',
        *((entry % x).encode() for x in (("F33", "1"), ("F32", "2"), ("F32", '"x"'), ("F32", "-1"))),
    ):
        (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        refused(lambda: open_checkpoint(tmp_path / "x.safetensors"), "x.safetensors")
    refused(lambda: open_checkpoint(tmp_path / "none"), "does not exist")
    (tmp_path / "y.safetensors").write_bytes(b"")
    refused(lambda: open_checkpoint(tmp_path), "2 other .safetensors files")


def test_a_conversion_that_fails_leaves_nothing(shards, tmp_path):
    out = tmp_path / "out"
    refused(lambda: convert(shards, out, "openpy"), "did you mean 'openpi'")
    refused(lambda: convert(weights("smolvla"), out, "openpi"), "unknown layout of smolvla 'openpi'")
    (shards / "model-00002-of-00003.safetensors").unlink()
    refused(lambda: convert(shards, out, OURS), "not there")
    assert not out.exists()
    convert(weights("pi0"), out, OURS)
    refused(lambda: convert(weights("pi0"), out, OURS), "is there already")


# ---- check


def tokenizers(size: int) -> bytes:
    """A tokenizer.json of `size` words."""
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer(library.models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    return words.to_str().encode()


def folder_of_lerobot(place, family: str = "pi05"):
    folder = lerobot_folder(place, family, "QUANTILES" if family == "pi05" else "MEAN_STD")
    shutil.copy(weights(family), folder / SINGLE)
    return folder


def test_check_says_cameras_prompt_and_statistics_and_what_is_missing(tmp_path):
    folder = folder_of_lerobot(tmp_path / "policy")
    found = examine(folder)
    facts = dict(found.facts)
    assert facts["cameras"].startswith("top, cam_low and 1 empty; pictures made 224 wide by pad")
    assert facts["prompt"] == "'Task: {task}, State: {state};\\nAction: ', at most 120 tokens"
    assert (
        facts["robot"]
        == "state of 3, normalised by quantiles; action of 2, by quantiles, 1 axes relative to the state"
    )
    assert facts["not needed"].startswith("8 tensors of ") and facts["files"].startswith(
        "1 of 1.20 MB, 93 tensors: 93 F32"
    )
    assert found.missing == [
        "the processor makes pictures of 224 pixels, the model takes 28",
        f"{folder} has no tokeniser (tokenizer.model or tokenizer.json); copy that of "
        "google/paligemma-3b-pt-224, which its preprocessor names, into it, or name it by "
        "--policy.words FILE",
    ]
    (folder / "policy_preprocessor_step_2_normalizer_processor.safetensors").unlink()
    assert "cannot be read" in examine(folder).missing[0]
    alone = examine(weights("pi0")).missing
    assert "does not say what its model expects" in alone[0] and len(alone) == 2


def test_check_tells_too_many_cameras_and_tokens_and_steps_that_are_none(tmp_path):
    folder = folder_of_lerobot(tmp_path / "policy")
    config = json.loads((folder / "config.json").read_text())
    more = {f"observation.images.c{i}": {"type": "VISUAL", "shape": [3, 8, 8]} for i in range(3)}
    config["input_features"] |= more
    write_json(folder / "config.json", config)
    words = tokenizers(600)
    (folder / "tokenizer.json").write_bytes(words)
    missing = examine(folder).missing
    assert "the folder names 5 cameras, pi05 takes 3 at most" in missing
    assert any("wrong tokeniser" in text and "600 tokens" in text and "512" in text for text in missing)
    (folder / "tokenizer.json").write_bytes(tokenizers(300))
    assert dict(examine(folder).facts)["tokeniser"].endswith("trained with?")
    (folder / "tokenizer.json").write_bytes(tokenizers(500))
    assert dict(examine(folder).facts)["tokeniser"] == "tokenizer.json, 500 tokens"
    write_json(folder / "policy_preprocessor.json", {"steps": 3})
    refused(lambda: examine(folder), "policy_preprocessor.json has no list of steps")


def test_check_reads_no_weight(tmp_path):
    """A whole header before numbers that are none."""
    folder = folder_of_lerobot(tmp_path / "policy")
    data = bytearray((folder / SINGLE).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    before = examine(folder)
    data[start:] = b"\xff" * (len(data) - start)
    (folder / SINGLE).write_bytes(data)
    assert examine(folder) == before


def test_a_folder_takes_its_small_files_along(tmp_path):
    folder = folder_of_lerobot(tmp_path / "policy")
    (folder / "assets" / "arm").mkdir(parents=True)
    (folder / "assets" / "arm" / "norm_stats.json").write_text("{}")
    done = convert(folder, tmp_path / "ours", OURS)
    assert set(done.copied) == {
        "config.json",
        "policy_preprocessor.json",
        "assets/arm/norm_stats.json",
        "policy_preprocessor_step_2_normalizer_processor.safetensors",
    }
    assert (tmp_path / "ours" / "assets" / "arm" / "norm_stats.json").read_text() == "{}"
    assert load_model(tmp_path / "ours").horizon == 50  # of config.json, kept in the file


# ---- compare


def test_compare_with_a_golden_file_tells_each_output(tmp_path):
    rows = {r.name: r for r in compare(weights("pi0"), golden_file("pi0"))}
    assert set(rows) == {"loss_map", "loss", "sample"} and all(r.largest < 1e-5 for r in rows.values())
    tensors = load_file(weights("pi0"))
    tensors["model.action_out_proj.bias"] = tensors["model.action_out_proj.bias"] + 0.5
    save_file(tensors, tmp_path / "x.safetensors")
    rows = {r.name: r for r in compare(tmp_path / "x.safetensors", golden_file("pi0"))}
    assert rows["sample"].largest == pytest.approx(0.5, abs=0.2)  # four steps of a quarter


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_recorded_has_every_layer_and_tells_where_a_difference_begins(family, tmp_path):
    tensors, metadata = record(weights(family), None)
    save_file(tensors, tmp_path / "golden.safetensors", metadata)
    rows = compare(weights(family), tmp_path / "golden.safetensors")
    config = vla_config(family, "tiny")
    assert len(rows) == config.vision.depth + config.trunk.depth + config.expert.depth + 3
    assert all(r.largest == 0 for r in rows)
    changed = load_file(weights(family))
    key = next(
        k for k in changed if "layers.1.self_attn.q_proj" in k and ("gemma_expert" in k or "lm_expert" in k)
    )
    changed[key] = changed[key] * 1.5
    save_file(changed, tmp_path / "x.safetensors")
    differ = [
        r.name for r in compare(tmp_path / "x.safetensors", tmp_path / "golden.safetensors") if r.largest
    ]
    assert (
        differ[0] == "layer/expert.layers.1" and not any("trunk" in n for n in differ) and "sample" in differ
    )


def test_two_checkpoints_are_compared_whatever_their_layouts(tmp_path):
    tensors = {k.removeprefix("model."): x for k, x in load_file(weights("pi0")).items()}
    tensors["paligemma_with_expert.paligemma.model.language_model.layers.1.self_attn.k_proj.weight"][
        0, 0
    ] += 0.25
    tensors["action_in_proj.bias"] = torch.zeros(5)
    del tensors["state_proj.bias"]
    save_file(tensors, tmp_path / "x.safetensors")
    rows = {r.name: r for r in compare(weights("pi0"), tmp_path / "x.safetensors")}
    assert {n for n, r in rows.items() if r.largest} == {"trunk.layers.1", "expert.action_in", "expert.state"}
    assert (
        rows["trunk.layers.1"].largest == pytest.approx(0.25)
        and rows["trunk.layers.1"].note == "self_attn.k_proj.weight"
    )
    assert "[48] here, [5] there" in rows["expert.action_in"].note
    assert rows["expert.state"].note == "1 only on one side: no expert.state.bias there"


def test_a_golden_file_of_another_size_or_kind_is_refused(tmp_path):
    refused(
        lambda: compare(weights("smolvla"), golden_file("pi0")),
        "images ends in [28, 28], this model takes [64, 64]",
    )
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    refused(
        lambda: compare(weights("pi0"), tmp_path / "a.safetensors"), "neither a checkpoint nor a golden file"
    )
    save_file({"images": torch.zeros(1)}, tmp_path / "b.safetensors")
    refused(lambda: compare(weights("pi0"), tmp_path / "b.safetensors"), "lacks image_mask")


def test_keys_that_tell_no_sizes_are_counted_beside_the_nearest_layout(tmp_path):
    own = load_file(weights("pi05"))
    turned = {k if "position_embedding" not in k else f"other.{k}": x.clone() for k, x in own.items()}
    save_file(turned, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError,
        match=r"unknown layout of keys.* nearest is pi05 in layout lerobot: 1 keys unexpected \(other\..*; "
        r"1 kinds of weights missing \(trunk.vision.place.weight\)",
    ):
        examine(tmp_path)
