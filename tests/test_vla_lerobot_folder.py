"""The folder that LeRobot's evaluation loads: what lies in it, and that our own reader acts by it as by the
checkpoint it was made of."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import test_vla_processor
import torch
from safetensors.torch import load_file
from test_vla_cli import said
from vla_goldens import weights

from robo_rl.checkpoint import save_checkpoint
from robo_rl.errors import UserError
from robo_rl.experiment.sft import report_cameras
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy, obs_tensors
from robo_rl.policies.vla.convert import convert
from robo_rl.policies.vla.lerobot_folder import PolicyFacts, lerobot_files
from robo_rl.policies.vla.processor import Processor, of_family
from robo_rl.policies.vla.processor_files import from_folder
from robo_rl.policies.vla.weights import open_checkpoint

word_files = test_vla_processor.files  # a fixture
SPEC = ObsSpec(state=5, action=3, views=("front", "wrist"), image_size=32, language=True, text=64)
TASKS = ["pick up the cube", "push it", "push it"]
KINDS = {
    "pi0": ("mean_std", "MEAN_STD", ("mean", "std")),
    "pi05": ("quantiles", "QUANTILES", ("q01", "q99")),
    "smolvla": ("mean_std", "MEAN_STD", ("mean", "std")),
}
STEPS = {
    "pi0": [
        "rename_observations_processor",
        "to_batch_processor",
        "pi0_new_line_processor",
        "tokenizer_processor",
        "device_processor",
        "normalizer_processor",
    ],
    "pi05": [
        "rename_observations_processor",
        "to_batch_processor",
        "normalizer_processor",
        "pi05_prepare_state_tokenizer_processor_step",
        "tokenizer_processor",
        "device_processor",
    ],
    "smolvla": [
        "rename_observations_processor",
        "to_batch_processor",
        "smolvla_new_line_processor",
        "tokenizer_processor",
        "device_processor",
        "normalizer_processor",
    ],
}
COMMON = {
    "type",
    "n_obs_steps",
    "device",
    "use_amp",
    "chunk_size",
    "n_action_steps",
    "max_state_dim",
    "max_action_dim",
    "empty_cameras",
    "tokenizer_max_length",
    "min_period",
    "max_period",
    "input_features",
    "output_features",
    "normalization_mapping",
}
PI = COMMON | {
    "paligemma_variant",
    "action_expert_variant",
    "num_inference_steps",
    "dtype",
    "image_resolution",
}
SMOL = COMMON | {
    "num_steps",
    "resize_imgs_with_padding",
    "adapt_to_pi_aloha",
    "use_cache",
    "vlm_model_name",
    "load_vlm_weights",
    "add_image_special_tokens",
    "attention_mode",
    "prefix_length",
    "pad_language_to",
    "num_expert_layers",
    "num_vlm_layers",
    "self_attn_every_n_layers",
    "expert_width_multiplier",
}
KEYS = {"pi0": PI, "pi05": PI, "smolvla": SMOL}


def trained(place, family, words="words:512", **options):
    """A policy with statistics of its own, and its checkpoint."""
    policy = make_policy(
        PolicyOptions(
            kind=family,
            folder=str(weights(family)),
            words=str(words),
            horizon=6,
            execute=4,
            denoise_steps=3,
            hidden=8,
            layers=1,
            **options,
        ),
        SPEC,
        0,
    ).eval()
    g = torch.Generator().manual_seed(1)
    policy.obs_norm.fit(torch.randn(50, 5, generator=g) * torch.arange(1, 6) + 1)
    policy.action_norm.fit(torch.rand(50, 3, generator=g) * torch.tensor([0.3, 1, 4]) - 0.5)
    save_checkpoint(place, policy, {}, {"step": 0})
    return policy


def observation(n=3):
    rng = np.random.default_rng(0)
    return {"state": (rng.normal(size=(n, 5)) * 2).astype(np.float32), "task": np.array(TASKS[:n])} | {
        f"image/{v}": rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for v in SPEC.views
    }


@pytest.mark.parametrize("family", KEYS)
def test_the_folder_is_as_lerobot_writes_it_and_our_reader_acts_by_it_as_by_the_checkpoint(family, tmp_path):
    policy, out = trained(tmp_path / "c", family), tmp_path / "out"
    done = convert(tmp_path / "c", out, "lerobot", TASKS)
    kind, mode, (first, second) = KINDS[family]
    config = json.loads((out / "config.json").read_text())
    assert set(config) == KEYS[family] and (
        config["type"],
        config["chunk_size"],
        config["n_action_steps"],
    ) == (family, 6, 4)
    assert config["num_steps" if family == "smolvla" else "num_inference_steps"] == 3
    picture = {"type": "VISUAL", "shape": [3, 32, 32]}
    assert config["input_features"] == {
        "observation.state": {"type": "STATE", "shape": [5]},
        "observation.images.front": picture,
        "observation.images.wrist": picture,
    }
    assert config["output_features"] == {"action": {"type": "ACTION", "shape": [3]}}
    assert config["normalization_mapping"] == {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    before, after = (json.loads((out / f"policy_{x}processor.json").read_text()) for x in ("pre", "post"))
    assert [s["registry_name"] for s in before["steps"]] == STEPS[family] and before[
        "name"
    ] == "policy_preprocessor"
    assert [s["registry_name"] for s in after["steps"]] == ["unnormalizer_processor", "device_processor"]
    at = STEPS[family].index("normalizer_processor")
    names = (
        f"policy_preprocessor_step_{at}_normalizer_processor",
        "policy_postprocessor_step_0_unnormalizer_processor",
    )
    assert (before["steps"][at]["state_file"], after["steps"][0]["state_file"]) == tuple(
        f"{n}.safetensors" for n in names
    )
    for name in names:
        numbers = load_file(out / f"{name}.safetensors")
        assert set(numbers) == {
            f"{key}.{s}" for key in ("observation.state", "action") for s in (first, second)
        }
        torch.testing.assert_close(numbers[f"action.{first}"], policy.action_norm.shift)
        ends = policy.action_norm.inverse(torch.ones(3)) if kind == "quantiles" else policy.action_norm.scale
        torch.testing.assert_close(numbers[f"action.{second}"], ends)
    tensors, golden = open_checkpoint(out).tensors, open_checkpoint(weights(family)).tensors
    assert {k: t.shape for k, t in tensors.items()} == {
        k: t.shape for k, t in golden.items() if "lm_head" not in k
    }
    assert (out / "vlm" / "tokenizer_config.json").is_file() and set(done.made) >= {
        "config.json",
        "tokenizer.json",
    }
    assert not (out / "processor.json").exists(), "what LeRobot does not read says nothing here either"
    again = make_policy(replace(policy.options, folder=str(out), words=""), SPEC, 0).eval()
    obs = obs_tensors(observation(), SPEC)
    mine, read = (
        p.act(obs, torch.Generator().manual_seed(2), explore=False).actions for p in (policy, again)
    )
    np.testing.assert_allclose(mine, read, atol=2e-6)
    assert mine.std() > 0.05


@torch.no_grad()
@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_openpi_normalises_by_what_is_written_for_it_as_the_policy_does(family, tmp_path):
    policy, out = trained(tmp_path / "c", family), tmp_path / "out"
    done = convert(tmp_path / "c", out, "openpi")
    assert done.made == ("assets/robo_rl/norm_stats.json",) and "processor.json" in done.copied
    said = json.loads((out / done.made[0]).read_text())["norm_stats"]
    for key, norm, n in (("state", policy.obs_norm, 5), ("actions", policy.action_norm, 3)):
        mean, std, low, high = (torch.tensor(said[key][k]).double() for k in ("mean", "std", "q01", "q99"))
        x = torch.linspace(-3, 3, n).double()
        want = norm(x.float()).double()
        # transforms.Normalize of openpi, without and with quantiles
        for made in ((x - mean) / (std + 1e-6), (x - low) / (high - low + 1e-6) * 2 - 1):
            torch.testing.assert_close(made, want, atol=1e-5, rtol=1e-5)
    assert "train config" in done.notes[0]
    assert not convert(tmp_path / "c", tmp_path / "alone.safetensors", "openpi").made


@torch.no_grad()
def test_an_env_that_names_its_cameras_in_another_order_shows_a_folder_each_where_it_was(tmp_path):
    trained(tmp_path / "c", "pi05")
    convert(tmp_path / "c", tmp_path / "out", "lerobot", TASKS)
    o = PolicyOptions(
        kind="pi05", folder=str(tmp_path / "out"), statistics="folder", horizon=6, execute=4, denoise_steps=3
    )
    raw = observation()
    turned = raw | {"image/front": raw["image/wrist"], "image/wrist": raw["image/front"]}

    def acted(raw, views):
        spec = replace(SPEC, views=views)
        g = torch.Generator().manual_seed(0)
        return make_policy(o, spec, 0).eval().act(obs_tensors(raw, spec), g, False).actions

    assert torch.equal(acted(raw, ("front", "wrist")), acted(raw, ("wrist", "front")))
    assert not torch.equal(acted(raw, ("front", "wrist")), acted(turned, ("front", "wrist")))
    named = make_policy(o, replace(SPEC, views=("wrist", "front")), 0)
    assert named.processor.guessed == {}
    other = make_policy(o, replace(SPEC, views=("side", "wrist")), 0)
    assert other.processor.guessed == {"side": "front"} and other.processor.options.views == ("side", "wrist")
    lines: list[tuple[str, str]] = []
    report = SimpleNamespace(say=lambda *line: lines.append(line))
    for sim in ("none", "mujoco", "gym:Pour-v0"):
        config = SimpleNamespace(policy=o, sim=sim)
        report_cameras(SimpleNamespace(policy=other, config=config, report=report))
    assert all("does not know side: it stands where front was learnt" in line for line, _ in lines)
    assert [kind for _, kind in lines] == ["warning"] * 3
    remedies = ("--data.cameras NAME=CAMERA", "--cameras wrist,side", "the model's names, in the env")
    assert all(remedy in line for (line, _), remedy in zip(lines, remedies, strict=True))


def test_the_command_says_what_lerobot_cannot_express_a_line_each(tmp_path, capsys):
    trained(tmp_path / "c", "pi0", noise="learned")
    code, out, err = said(capsys, "vla", "convert", tmp_path / "c", tmp_path / "out", "--to", "lerobot")
    assert (
        code == 2
        and "no tokeniser of hashed words (words:512): say which instructions" in err
        and not (tmp_path / "out").exists()
    )
    code, out, err = said(
        capsys,
        "vla",
        "convert",
        tmp_path / "c",
        tmp_path / "out",
        "--to",
        "lerobot",
        "--instructions",
        "push it",
    )
    assert code == 0 and not err and "made beside it: config.json, policy_preprocessor" in out
    notes = [line.removeprefix("note: ") for line in out.splitlines() if line.startswith("note: ")]
    assert notes[0].startswith("no part of LeRobot's policy: ") and "noise" in notes[0]
    assert (
        "LeRobot has pi0 in its published size alone" in notes[1]
        and "words of 1 instructions alone" in notes[2]
    )
    assert f"named by its place, {tmp_path / 'out' / 'vlm'}" in notes[3] and len(notes) == 4


def test_a_tokeniser_that_is_a_file_goes_along_with_what_its_special_words_are_called(tmp_path, word_files):
    pieces = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    for family, words, special in (
        ("pi05", word_files / "tokenizer.model", pieces),
        ("smolvla", word_files / "a" / "tokenizer.json", {"processor_class": "SmolVLMProcessor"}),
    ):
        trained(tmp_path / family, family, words)
        convert(tmp_path / family, tmp_path / "out" / family, "lerobot")
        for folder in (tmp_path / "out" / family, tmp_path / "out" / family / "vlm"):
            assert (folder / words.name).read_bytes() == words.read_bytes()
        about = json.loads((tmp_path / "out" / family / "vlm" / "tokenizer_config.json").read_text())
        assert about.items() >= special.items()


def test_words_that_say_how_good_the_policy_is_are_told(tmp_path):
    trained(tmp_path / "c", "smolvla", advantage=True, guidance=2.0)
    done = convert(tmp_path / "c", tmp_path / "out", "lerobot", TASKS, ". Advantage: positive")
    assert any("end LeRobot's instructions with '. Advantage: positive'" in n for n in done.notes)
    assert any("no classifier-free guidance: it acts without, here it acts with 2" in n for n in done.notes)
    assert from_folder(tmp_path / "out").words.encode("positive") == Processor.load(
        tmp_path / "c"
    ).words.encode("positive")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"delta": (True, False)}, "no actions relative to the state"),
        ({"fit": "stretch"}, "pictures fit by pad for pi0, this .* by stretch"),
        ({"template": "Task: {task}, State: {state};\nAction: "}, "another prompt for pi0"),
        ({"lower": True}, "another prompt for pi0"),
    ],
)
def test_what_lerobot_would_do_otherwise_is_refused_in_one_line(changes, line):
    statistics = {key: {"mean": np.zeros(3), "std": np.ones(3)} for key in ("state", "action")}
    made = test_vla_processor.processor(
        of_family("pi0", views=("front",), slots=1, state=3, action=3, **changes), "words:512", statistics
    )
    policy = make_policy(PolicyOptions(kind="pi0", horizon=6, execute=4), SPEC, 0)
    with pytest.raises(UserError, match=line):
        lerobot_files(made, policy.config, PolicyFacts(6, 4, 10, 32), torch.float32, "/x", TASKS)
