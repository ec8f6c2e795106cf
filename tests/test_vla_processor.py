"""Prompts, pictures and statistics on their way into a vision-language-action model, and its actions on their
way out."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from robo_rl.errors import UserError
from robo_rl.normalise import AxisNormaliser
from robo_rl.policies import images
from robo_rl.policies.vla import processor_files, tokeniser
from robo_rl.policies.vla.processor import Processor, of_family

TASK = "put the red_cube\ninto the box "
CLEAN = "put the red cube into the box"
CAMERAS = ("cam_high", "cam_low", "empty_camera_0")


def statistics(state: int = 3, action: int = 2, **more) -> dict:
    def of(n: int) -> dict:
        x = np.arange(1, n + 1, dtype=float)
        return {"mean": x, "std": x / 2, "min": -x, "max": 4 * x, "q01": -x / 2, "q99": 3 * x}

    return {"state": of(state), "action": of(action), **more}


def processor(options, words, numbers: dict) -> Processor:
    out = Processor(options, tokeniser.load(words))
    out.take(numbers)
    return out


def made(family: str = "pi0", words: str = "words:512", **changes) -> Processor:
    options = of_family(
        family,
        **{
            "state": 3,
            "action": 2,
            "views": ("front", "side"),
            "image_size": 8,
            "vocabulary": 512,
            **changes,
        },
    )
    return processor(options, words, statistics(options.state, options.action))


def observation(n: int = 2) -> dict:
    rng = np.random.default_rng(0)
    return {
        "state": rng.normal(size=(n, 3)).astype(np.float32),
        "task": [TASK] * n,
        "image/front": rng.integers(0, 256, (n, 6, 12, 3), dtype=np.uint8),
        "image/side": rng.integers(0, 256, (n, 8, 8, 3), dtype=np.uint8),
    }


# ---- tokenisers


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with two tokenisers of a few words: tokenizer.model, as PaliGemma's begins prompts, and
    a/tokenizer.json."""
    spm, tokenizers = pytest.importorskip("sentencepiece"), pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("words")
    texts = [CLEAN, "Task: , State: 0 1 2 3 4 5 6 7 8 9;\nAction: ", "pick up the blue ball"] * 8
    (folder / "texts").write_text("\n".join(t.replace("\n", " ") for t in texts))
    spm.SentencePieceTrainer.Train(
        input=str(folder / "texts"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["\n"],
        minloglevel=2,
    )
    (folder / "a").mkdir()
    words = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["?"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    words.save(str(folder / "a" / "tokenizer.json"))
    return folder


def test_a_sentencepiece_file_begins_the_prompt_with_its_begin_token(files):
    import sentencepiece

    ids = tokeniser.load(files / "tokenizer.model").encode(CLEAN + "\n")
    pieces = sentencepiece.SentencePieceProcessor(str(files / "tokenizer.model"))
    assert ids[0] == 2 and pieces.DecodeIds(ids[1:]) == CLEAN + "\n"


def test_a_tokenizer_json_is_read_as_it_says(files):
    import tokenizers

    words = tokeniser.load(files / "a")
    assert (
        words.encode(CLEAN)
        == tokenizers.Tokenizer.from_file(str(files / "a" / "tokenizer.json")).encode(CLEAN).ids
    )
    assert words.size == 320 or words.size > max(words.encode(CLEAN))


def test_words_without_a_file_are_hashed_and_stay_below_their_number():
    words = tokeniser.load("words:64")
    ids = words.encode("Task: lift, State: 128 3;\nAction: ")
    assert len(ids) == 12 and min(ids) >= tokeniser.RESERVED and max(ids) < 64
    assert words.encode("lift") != words.encode("drop")


def test_what_is_no_tokeniser_is_refused_with_its_path(tmp_path, files):
    (tmp_path / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1")
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in tokeniser.FILES:
        with pytest.raises(UserError, match=f"{name}.*LFS"):
            tokeniser.load(tmp_path / name)
    with pytest.raises(UserError, match="no tokeniser"):
        tokeniser.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"words:N"):
        tokeniser.load("words:x")


# ---- pictures


def test_a_picture_is_resized_to_its_longer_side_and_padded_on_both_others():
    image = torch.rand(1, 3, 20, 40)
    out = images.fit(image, 10, "pad")  # 5 rows, two and a half pixels of padding: 2 above, 3 below
    assert (
        out.shape == (1, 3, 10, 10) and bool((out[:, :, :2] == 0).all()) and bool((out[:, :, 7:] == 0).all())
    )
    # a pixel of a bilinear picture four times as small is the mean of the middle two by two
    torch.testing.assert_close(out[0, :, 2, 0], image[0, :, 1:3, 1:3].mean((1, 2)))
    last = images.fit(image, 10, "pad_top_left")
    assert bool((last[:, :, :5] == 0).all())
    torch.testing.assert_close(last[:, :, 5:], out[:, :, 2:7])


def test_a_picture_is_cropped_to_its_middle_or_stretched():
    image = torch.rand(1, 3, 4, 8)
    torch.testing.assert_close(images.fit(image, 4, "crop"), image[..., 2:6])
    assert images.fit(image, 4, "stretch").shape == (1, 3, 4, 4)
    same = torch.rand(1, 3, 4, 4)
    assert all(images.fit(same, 4, how) is same for how in images.FITS)


def test_bytes_and_floats_are_resized_alike():
    image = torch.randint(0, 256, (2, 12, 20, 3), dtype=torch.uint8)
    floats = images.fit(image.permute(0, 3, 1, 2).float() / 255, 8, "pad")
    torch.testing.assert_close(
        images.fit_bytes(image, 8, "pad").permute(0, 3, 1, 2).float() / 255,
        floats,
        atol=0.5 / 255 + 1e-6,
        rtol=0,
    )


def test_the_models_views_come_in_order_and_those_that_nobody_has_are_masked():
    got = made(views=("side", "front")).observation(observation())
    assert got.images.shape == (2, 3, 3, 8, 8) and got.image_mask.tolist() == [[True, True, False]] * 2
    # padding and what is absent
    assert bool((got.images[:, 2] == -1).all()) and bool((got.images[:, 1, :, :2] == -1).all())
    want = torch.from_numpy(observation()["image/side"]).permute(0, 3, 1, 2) / 127.5 - 1
    torch.testing.assert_close(got.images[:, 0], want)


# ---- prompts


def test_pi0_is_asked_by_the_instruction_and_a_line_end():
    words = tokeniser.load("words:512")
    got = made().observation(observation())
    assert got.tokens[0, got.token_mask[0]].tolist() == words.encode(CLEAN + "\n")


def test_pi05_is_told_the_state_in_256_steps_between_its_quantiles(files):
    p = made("pi05", str(files / "tokenizer.model"))
    state = torch.tensor([[-0.5, -1.0, 9.0], [1.25, 6.0, 9.0]])  # ends and middle of q01 .. q99
    tokens, mask = p.prompts([TASK] * 2, state)
    words = tokeniser.load(files / "tokenizer.model")
    assert tokens[0, mask[0]].tolist() == words.encode(f"Task: {CLEAN}, State: 0 0 255;\nAction: ")
    assert tokens[1, mask[1]].tolist() == words.encode(f"Task: {CLEAN}, State: 128 255 255;\nAction: ")


def test_lerobot_tells_the_padding_of_the_state_too():
    p = made("pi05", width=6, padded_state_text=True)
    tokens, mask = p.prompts(["go"], torch.tensor([[-0.5, -1.0, 9.0]]))
    assert tokens[0, mask[0]].tolist() == p.words.encode("Task: go, State: 0 0 255 128 128 128;\nAction: ")


def test_tokens_are_as_long_as_the_longest_prompt_of_the_batch():
    p = made()
    kept = p.tensors(observation() | {"task": ["go", "go to the box"]})
    assert kept["tokens"].shape == (2, 48)
    assert p.model_inputs(kept).tokens.shape == (2, 5)


# ---- numbers


def test_statistics_of_every_kind_go_in_and_out_as_lerobot_and_openpi_define_them():
    x, first, second = torch.tensor([[0.3, -2.0]]), torch.tensor([1.0, 0.5]), torch.tensor([2.0, 0.5])
    norm = AxisNormaliser(2, "mean_std")
    norm.take(first, second, 1e-8)
    torch.testing.assert_close(norm(x), (x - first) / (second + 1e-8))
    norm = AxisNormaliser(2, "quantiles")
    norm.take(first, second, 1e-8)  # the second axis has no range
    torch.testing.assert_close(norm(x), torch.tensor([[2 * (0.3 - 1) / 1 - 1, 2 * -2.5 / 1e-8 - 1]]))
    torch.testing.assert_close(norm.inverse(torch.full((1, 2), -1.0)), first[None])
    norm.take(first, second, 1e-6, plus=True)
    torch.testing.assert_close(norm(x)[:, :1], torch.tensor([[-0.7 / (1 + 1e-6) * 2 - 1]]))
    norm.take(first, second)  # ours: an axis that never moves is shifted alone
    torch.testing.assert_close(norm(x)[:, 1], torch.tensor([-3.5]))


def test_the_state_is_normalised_and_padded():
    p = made()
    got = p.observation(observation()).state
    want = (torch.from_numpy(observation()["state"]) - torch.tensor([1.0, 2, 3])) / torch.tensor(
        [0.5, 1, 1.5]
    )
    assert got.shape == (2, 32) and not bool(got[:, 3:].any())
    torch.testing.assert_close(got[:, :3], want)


# ---- files


def test_a_processor_comes_back_from_its_folder(tmp_path, files):
    p = made(
        "pi05", str(files / "tokenizer.model"), delta=(True,), state_names=("a", "b", "c"), units=("rad", "m")
    )
    p.save(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "processor.json",
        "processor.safetensors",
        "tokenizer.model",
    ]
    q = Processor.load(tmp_path)
    q.check_same(p, "here")
    a, b = p.observation(observation()), q.observation(observation())
    assert all(
        torch.equal(getattr(a, k), getattr(b, k))
        for k in ("images", "image_mask", "tokens", "token_mask", "state")
    )


def test_another_processor_is_refused_by_what_differs(tmp_path):
    p, q = made(), made(fit="crop")
    with pytest.raises(UserError, match="its fit is 'crop', here 'pad'"):
        p.check_same(q, "the server")
    q = made()
    q.action_norm.scale[0] += 1
    with pytest.raises(UserError, match="action_norm.scale differs"):
        p.check_same(q, "the server")


def lerobot_folder(folder: Path, kind: str = "pi05", mode: str = "QUANTILES") -> Path:
    """A policy's folder as LeRobot 0.4 and later write it, without the weights."""
    features = {
        "observation.state": {"type": "STATE", "shape": [3]},
        **{f"observation.images.{c}": {"type": "VISUAL", "shape": [3, 480, 640]} for c in CAMERAS},
    }
    modes = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    config = {
        "type": kind,
        "chunk_size": 50,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "tokenizer_max_length": 200,
        "empty_cameras": 1,
        "input_features": features,
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
        "normalization_mapping": modes,
    }
    steps = [
        {
            "registry_name": "rename_observations_processor",
            "config": {"rename_map": {"observation.images.top": "observation.images.cam_high"}},
        },
        {
            "registry_name": "relative_actions_processor",
            "config": {
                "enabled": True,
                "exclude_joints": ["gripper"],
                "action_names": ["shoulder.pos", "gripper.pos"],
            },
        },
        {
            "registry_name": "normalizer_processor",
            "config": {"eps": 1e-8, "norm_map": modes, "features": {}},
            "state_file": "policy_preprocessor_step_2_normalizer_processor.safetensors",
        },
        {
            "registry_name": "tokenizer_processor",
            "config": {"max_length": 120, "tokenizer_name": "google/paligemma-3b-pt-224"},
        },
    ]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "policy_preprocessor.json").write_text(
        json.dumps({"name": "policy_preprocessor", "steps": steps})
    )
    own = statistics()
    save_file(
        {
            f"{key}.{s}": np.asarray(x, np.float32)
            for key, per in (("observation.state", own["state"]), ("action", own["action"]))
            for s, x in per.items()
        },
        folder / steps[2]["state_file"],
    )
    return folder


def test_a_folder_of_lerobot_says_cameras_prompt_statistics_and_relative_axes(tmp_path):
    p = processor_files.from_folder(lerobot_folder(tmp_path / "policy"), "words:512")
    o = p.options
    assert (o.family, o.views, o.slots, o.state, o.action, o.prompt) == (
        "pi05",
        ("top", "cam_low"),
        3,
        3,
        2,
        120,
    )
    assert o.delta == (True, False) and o.padded_state_text and o.state_kind == o.action_kind == "quantiles"
    torch.testing.assert_close(p.action_norm(torch.tensor([[-0.5, 6.0]])), torch.tensor([[-1.0, 1.0]]))


def test_statistics_among_the_weights_of_an_older_folder_are_read(tmp_path):
    folder = lerobot_folder(tmp_path / "policy", "smolvla", "MEAN_STD")
    (folder / "policy_preprocessor.json").unlink()
    own = statistics()
    save_file(
        {
            f"{part}.buffer_{key}.{s}": np.asarray(own[which][s], np.float32)
            for part, key, which in (
                ("normalize_inputs", "observation_state", "state"),
                ("normalize_targets", "action", "action"),
            )
            for s in ("mean", "std")
        },
        folder / "model.safetensors",
    )
    p = processor_files.from_folder(folder, "words:512")
    assert p.options.fit == "pad_top_left" and p.options.views == ("cam_high", "cam_low")
    torch.testing.assert_close(p.state_norm(torch.tensor([[1.5, 2.0, 3.0]])), torch.tensor([[1.0, 0, 0]]))


def test_a_base_model_without_statistics_says_the_rest_and_takes_them_from_a_run(tmp_path):
    folder = lerobot_folder(tmp_path / "policy")
    steps = json.loads((folder / processor_files.PRE).read_text())
    for step in steps["steps"]:
        if name := step.pop("state_file", ""):
            (folder / name).unlink()
    (folder / processor_files.PRE).write_text(json.dumps(steps))
    save_file({"no.statistics": np.zeros(1, np.float32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="q01 and q99 of the state are absent.*--policy.statistics demos"):
        processor_files.from_folder(folder, "words:512")
    made = processor_files.from_folder(folder, "words:512", need_statistics=False)
    assert (
        made.options.views
        and made.options.state_kind == "quantiles"
        and float(made.state_norm.scale.max()) == 1
    )


def test_openpis_statistics_are_found_below_assets(tmp_path):
    place = tmp_path / "assets" / "droid"
    place.mkdir(parents=True)
    own = statistics()
    (place / "norm_stats.json").write_text(
        json.dumps(
            {
                "norm_stats": {
                    "state": {k: own["state"][k].tolist() for k in ("mean", "std", "q01", "q99")},
                    "actions": {k: own["action"][k].tolist() for k in ("mean", "std", "q01", "q99")},
                }
            }
        )
    )
    p = processor_files.from_folder(tmp_path, "words:512", family="pi05", views=("base",))
    assert (p.options.state, p.options.action, p.options.padded_state_text) == (3, 2, False)
    torch.testing.assert_close(p.action_norm(torch.tensor([[3.0, 6.0]])), torch.tensor([[1.0, 1.0]]))


# ---- what is refused, each in one line


def refused(call, *words: str) -> None:
    with pytest.raises(UserError) as e:
        call()
    text = str(e.value)
    assert "\n" not in text and all(w in text for w in words), text


def test_a_wrong_tokeniser_is_refused(tmp_path):
    p = made()
    p.save(tmp_path)
    refused(lambda: Processor.load(tmp_path, tokeniser.load("words:500")), "wrong tokeniser", "words:512")
    refused(lambda: made(vocabulary=100), "wrong tokeniser", "512 tokens", "100")


def test_state_or_action_of_another_width_is_refused():
    p = made(state_names=("x", "y", "z"))
    refused(
        lambda: p.observation(observation() | {"state": np.zeros((2, 4), np.float32)}),
        "state of [4]",
        "trained on 3",
        "x, y, z",
    )
    refused(lambda: p.take(statistics(4)), "4 numbers", "has 3")


def test_absent_quantiles_are_refused_with_the_command_that_makes_them():
    own = statistics(action=2) | {"action": {"mean": [0, 0], "std": [1, 1]}}
    options = of_family("pi05", state=3, action=2)
    refused(
        lambda: processor(options, "words:512", own),
        "q01 and q99 of the action",
        "mean, std",
        "robo_rl data stats",
    )


def test_other_cameras_and_pictures_are_refused():
    p, obs = made(), observation()
    refused(
        lambda: p.observation({k: v for k, v in obs.items() if k != "image/side"}),
        "lacks 'side'",
        "has front",
    )
    refused(
        lambda: p.observation(obs | {"image/side": np.zeros((2, 8, 8, 3), np.float32)}),
        "'side'",
        "uint8 [2, h, w, 3]",
        "float32",
    )
    refused(lambda: made(slots=1), "takes 1 view", "front, side")


def test_a_prompt_longer_than_allowed_is_refused_and_not_cut():
    refused(lambda: made(prompt=4).observation(observation()), "8 tokens", "takes 4", "shorten")


def test_a_folder_that_says_nothing_or_half_is_refused(tmp_path):
    refused(lambda: processor_files.from_folder(tmp_path, "words:512"), "does not say", "norm_stats.json")
    folder = lerobot_folder(tmp_path / "policy")
    next(folder.glob("*.safetensors")).unlink()
    refused(
        lambda: processor_files.from_folder(folder, "words:512"), "cannot be read", "copy the whole folder"
    )
    refused(
        lambda: processor_files.from_folder(lerobot_folder(tmp_path / "other", "act"), "words:512"),
        "type 'act'",
        "pi05",
    )


def test_the_bins_of_a_state_are_words_of_their_own_where_there_is_room():
    ids = [tokeniser.load("words:512").encode(str(i)) for i in range(256)]
    assert sorted(ids) == [[3 + i] for i in range(256)] and tokeniser.load("words:512").encode("256") > [258]
    assert all(n < 64 for word in ("7", "255", "cube") for n in tokeniser.load("words:64").encode(word))
