"""The folder that LeRobot's own evaluation loads, of a pi0, pi0.5 or SmolVLA of ours: what lies in it beside
the weights.

    config.json                                   type, features, normalisers' kinds, chunk, sizes
    policy_preprocessor.json, policy_postprocessor.json, and a .safetensors file of statistics for each
    (`action.mean`, …)
    tokenizer.model or tokenizer.json             for the readers of this package
    vlm/                                          the tokeniser as transformers reads it; of a SmolVLA also
                                                  its language model's sizes

Keys and steps are those of LeRobot 0.4.4 (`constraints-lerobot.txt`):
src/lerobot/policies/*/{configuration,processor}_*.py and src/lerobot/processor/pipeline.py of
https://github.com/huggingface/lerobot. Settings of its training are left to its defaults.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robo_rl.errors import UserError
from robo_rl.files import parse_json, read_json
from robo_rl.normalise import KINDS, AxisNormaliser
from robo_rl.policies.vla.network import VlaConfig
from robo_rl.policies.vla.pi import PI_SIZES
from robo_rl.policies.vla.processor import FAMILIES, STATE_TEXT, Processor
from robo_rl.policies.vla.processor_files import CONFIG, KIND, LEROBOT_EPS, PRE
from robo_rl.policies.vla.smolvla import SmolVlaConfig
from robo_rl.policies.vla.tokeniser import Tokeniser, pieces_of

FOLDERS = ("pi0", "pi05", "smolvla")  # families whose whole folder is written
POST, META, VLM = "policy_postprocessor.json", "meta.json", "vlm"
NORMALISES, UNDOES = "normalizer_processor", "unnormalizer_processor"
MODES = {kind: mode for mode, kind in KIND.items()}
PAD, UNKNOWN = "<pad>", "<unk>"
PICTURE_WORDS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    # that SmolVLM's processor asks its tokeniser for
    "end_of_utterance_token": "<end_of_utterance>",
}
PADS = (PAD, "<|im_end|>", "<|endoftext|>", "[PAD]", "</s>")  # what tokenisers call a word that means nothing


@dataclass(frozen=True)
class PolicyFacts:
    """How a policy acts, of its checkpoint's meta.json: steps of a chunk and how many are executed, denoise
    steps, pixels of the pictures, what is written behind an instruction (`VlaBase.encode`), and how many
    times the guidance is."""

    horizon: int
    execute: int
    steps: int
    image_size: int
    said: str = ""
    guidance: float = 1.0
    pictures: Mapping[str, list[int]] = field(default_factory=dict)  # [h, w] of a camera, where it is another


def facts_of(folder: Path, config: VlaConfig, image_size: int, said: str) -> PolicyFacts:
    """Of a checkpoint's folder; of one without meta.json those of the published models."""
    if not (folder / META).is_file():
        return PolicyFacts(config.horizon, config.horizon, 10, image_size)
    try:
        policy = read_json(folder / META)["policy"]
        o = policy["options"]
        told = bool(o.get("advantage"))
        return PolicyFacts(
            int(o["horizon"]),
            int(o["execute"]),
            int(o["denoise_steps"]),
            image_size if policy["spec"].get("fit") else int(policy["spec"]["image_size"]) or image_size,
            said if told else "",
            float(o.get("guidance", 1)) if told else 1.0,
            _recorded(folder.parent.parent / "dataset.json"),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(
            f"{folder / META} says no policy of this version of robo_rl ({e!r}); copy the whole checkpoint"
        ) from None


def _recorded(path: Path) -> dict[str, list[int]]:
    """{camera: [h, w] of its pictures in the data set} of a run that learnt from one, whose policy is shown
    them as they are: LeRobot's server makes pictures as large as config.json says before the policy does."""
    said = read_json(path).get("pictures", []) if path.is_file() else []
    return {name: [int(n) for n in size.split("x")] for name, _, size in (x.partition("=") for x in said)}


def lerobot_files(
    processor: Processor,
    config: VlaConfig,
    facts: PolicyFacts,
    dtype: torch.dtype,
    place: str,
    instructions: Sequence[str] = (),
) -> tuple[dict[str, bytes], list[str]]:
    """({name: content} of all files but the weights, what LeRobot cannot express, a line each).

    place: by which LeRobot finds the folder `vlm`, whose name stands in two of the files; instructions: those
    whose words a tokeniser of hashed words is asked for. UserError: LeRobot would do something else with this
    model.
    """
    from safetensors.torch import save

    o = processor.options
    _refuse(processor, facts)
    notes = []
    full = PI_SIZES.get(o.family, {}).get("full")
    if full and (full.vision, full.trunk, full.expert) != (config.vision, config.trunk, config.expert):
        notes.append(
            f"LeRobot has {o.family} in its published size alone: of this one the processors load there, the "
            "model does not"
        )
    if facts.said:
        notes.append(
            f"the policy is told how good it is to be: end LeRobot's instructions with {facts.said!r}"
        )
    if facts.guidance != 1:
        notes.append(
            f"LeRobot has no classifier-free guidance: it acts without, here it acts with {facts.guidance:g}"
        )
    words, more = _tokeniser_files(processor, place, instructions, facts.said)
    notes += more
    features = {"observation.state": {"type": "STATE", "shape": [o.state]}}
    features |= {
        f"observation.images.{v}": {
            "type": "VISUAL",
            "shape": [3, *facts.pictures.get(v, [facts.image_size] * 2)],
        }
        for v in o.views
    }
    acts = {"action": {"type": "ACTION", "shape": [o.action]}}
    modes = {"VISUAL": "IDENTITY", "STATE": MODES[o.state_kind], "ACTION": MODES[o.action_kind]}
    settings = _config(processor, config, facts, dtype, place) | {
        "input_features": features,
        "output_features": acts,
        "normalization_mapping": modes,
    }
    numbers = statistics_of(processor)
    ranged = any(norm.offset for norm in (processor.state_norm, processor.action_norm))
    # what is stored has it in the std already
    norm = {"eps": LEROBOT_EPS if ranged else 0.0, "norm_map": modes}
    before = _before(processor, place, norm | {"features": features | acts})
    after = [
        (UNDOES, norm | {"features": acts}),
        ("device_processor", {"device": "cpu", "float_dtype": None}),
    ]
    files = {CONFIG: _text(settings)}
    for name, steps in ((PRE, before), (POST, after)):
        stem, entries = name.removesuffix(".json"), []
        for i, (registered, said) in enumerate(steps):
            entry: dict[str, Any] = {"registry_name": registered, "config": said}
            if registered in (NORMALISES, UNDOES) and numbers:
                entry["state_file"] = f"{stem}_step_{i}_{registered}.safetensors"
                files[entry["state_file"]] = save(numbers)
            entries.append(entry)
        files[name] = _text({"name": stem, "steps": entries})
    return files | words, notes


def _refuse(processor: Processor, facts: PolicyFacts) -> None:
    """UserError: with LeRobot's processors the model would see, read or do something else."""
    o, usual = processor.options, FAMILIES[processor.options.family]
    whole = "; name a .safetensors file in place of the folder to write the weights alone"
    if processor.is_relative:
        raise UserError(f"LeRobot 0.4 has no actions relative to the state, and these are{whole}")
    if o.lower or o.template != usual.get("template", type(o).template):
        raise UserError(
            f"LeRobot writes another prompt for {o.family} than this policy's {o.template!r}{whole}"
        )
    if o.fit != usual.get("fit", "pad"):
        raise UserError(
            f"LeRobot makes pictures fit by {usual.get('fit', 'pad')} for {o.family}, this policy by "
            f"{o.fit}{whole}"
        )
    if facts.execute > facts.horizon:
        raise UserError(f"a policy that executes {facts.execute} of {facts.horizon} steps is none")


def _config(
    processor: Processor, config: VlaConfig, facts: PolicyFacts, dtype: torch.dtype, place: str
) -> dict[str, Any]:
    """config.json but for features and kinds."""
    o = processor.options
    out: dict[str, Any] = {
        "type": o.family,
        "n_obs_steps": 1,
        "device": "cpu",
        "use_amp": False,
        "chunk_size": facts.horizon,
        "n_action_steps": facts.execute,
        "max_state_dim": o.width,
        "max_action_dim": o.width,
        "empty_cameras": o.slots - len(o.views),
        "tokenizer_max_length": o.prompt,
        "min_period": 4e-3,
        "max_period": 4.0,
    }
    if not isinstance(config, SmolVlaConfig):
        return out | {
            "paligemma_variant": "gemma_2b",
            "action_expert_variant": "gemma_300m",
            "num_inference_steps": facts.steps,
            "dtype": "bfloat16" if dtype == torch.bfloat16 else "float32",
            "image_resolution": [o.image_size, o.image_size],
        }
    return out | {
        "num_steps": facts.steps,
        "resize_imgs_with_padding": [o.image_size, o.image_size],
        "adapt_to_pi_aloha": False,
        "use_cache": True,
        "vlm_model_name": place,
        "load_vlm_weights": False,
        "add_image_special_tokens": False,
        "attention_mode": "cross_attn",
        "prefix_length": -1,
        "pad_language_to": "longest",
        "num_expert_layers": -1,
        "num_vlm_layers": config.trunk.depth,
        "self_attn_every_n_layers": config.self_every,
        "expert_width_multiplier": config.expert.width / config.trunk.width,
    }


def _before(processor: Processor, place: str, norm: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Steps of the preprocessor, (name in LeRobot's registry, settings)."""
    o = processor.options
    begin: list[tuple[str, dict[str, Any]]] = [
        ("rename_observations_processor", {"rename_map": {}}),
        ("to_batch_processor", {}),
    ]
    words = (
        "tokenizer_processor",
        {
            "max_length": o.prompt,
            "task_key": "task",
            "padding_side": "right",
            "truncation": True,
            "padding": "longest" if o.family == "smolvla" else "max_length",
            "tokenizer_name": place,
        },
    )
    device = ("device_processor", {"device": "cpu", "float_dtype": None})
    if o.family == "pi05":  # the prompt tells the normalised state
        told = {"max_state_dim": o.width if o.padded_state_text else o.state, "task_key": "task"}
        return [
            *begin,
            (NORMALISES, norm),
            ("pi05_prepare_state_tokenizer_processor_step", told),
            words,
            device,
        ]
    return [*begin, (f"{o.family}_new_line_processor", {}), words, device, (NORMALISES, norm)]


def statistics_of(processor: Processor) -> dict[str, Tensor]:
    """{"action.mean": [A], …} in float32, what both normalisers were given; nothing of one that is the
    identity."""
    out: dict[str, Tensor] = {}
    pairs: tuple[tuple[str, AxisNormaliser], ...] = (
        ("observation.state", processor.state_norm),
        ("action", processor.action_norm),
    )
    for key, norm in pairs:
        if norm.kind != "identity":
            first, second = KINDS[norm.kind]
            low, scale = norm.shift.detach().cpu().double(), norm.scale.detach().cpu().double()
            out |= {
                f"{key}.{first}": low.float(),
                f"{key}.{second}": (low + 2 * scale if norm.offset else scale).float(),
            }
    return out


def _tokeniser_files(
    processor: Processor, place: str, instructions: Sequence[str], said: str
) -> tuple[dict[str, bytes], list[str]]:
    """The tokeniser's files and those of SmolVLM's processor; and what is to be known of them."""
    o, words, notes = processor.options, processor.words, []
    name, data = words.name, words.data
    if not data:
        if not instructions:
            raise UserError(
                f"LeRobot has no tokeniser of hashed words ({words.name}): say which instructions it will be "
                "given, --instructions 'pick up the cube,push it', whose words then get a tokenizer.json"
            )
        name, data = "tokenizer.json", word_table(words, o.template, [text + said for text in instructions])
        notes.append(
            f"LeRobot knows the words of {len(instructions)} instructions alone, here every word has a "
            f"number ({words.name})"
        )
    notes.append(f"the tokeniser is named by its place, {place}: convert again where the folder moves")
    files = {name: data, f"{VLM}/{name}": data}
    picture_words = PICTURE_WORDS if o.family == "smolvla" else {}
    if name.endswith(".model"):
        about: dict[str, Any] = {"tokenizer_class": "GemmaTokenizer", **_special_pieces(data)}
    else:
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": _pad(data)}
    about |= {"padding_side": "right", "model_max_length": 1 << 20}
    if picture_words:
        about |= {"processor_class": "SmolVLMProcessor", "extra_special_tokens": picture_words}
    files[f"{VLM}/tokenizer_config.json"] = _text(about)
    return files, notes


def _special_pieces(data: bytes) -> dict[str, Any]:
    """What a sentencepiece model calls its begin, end, padding and unknown pieces."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor()
    pieces.LoadFromSerializedProto(data)
    at = {
        "bos_token": pieces.bos_id(),
        "eos_token": pieces.eos_id(),
        "pad_token": pieces.pad_id(),
        "unk_token": pieces.unk_id(),
    }
    named = {name: pieces.IdToPiece(i) for name, i in at.items() if i >= 0}
    return {
        "add_bos_token": "bos_token" in named,
        "add_eos_token": False,
        "pad_token": named.get("unk_token", UNKNOWN),
        **named,
    }


def _pad(data: bytes) -> str:
    """The word of a tokenizer.json that fills up prompts: one of the usual names, else that of the smallest
    number."""
    try:
        document = parse_json(data, "the tokeniser")
        vocabulary = document["model"]["vocab"]
        known = set(vocabulary if isinstance(vocabulary, Mapping) else (w[0] for w in vocabulary))
        known |= {t["content"] for t in document.get("added_tokens") or ()}
        return next((p for p in PADS if p in known), min(known))
    except (KeyError, TypeError, ValueError, IndexError):
        return PAD


def word_table(words: Tokeniser, template: str, instructions: Sequence[str]) -> bytes:
    """A tokenizer.json that gives prompts of these instructions the numbers that hashed words give them;
    other words are unknown."""
    state = " ".join(map(str, range(-1, len(STATE_TEXT)))) if "{state}" in template else ""
    known = {
        piece: words.encode(piece)[0]
        for text in instructions
        for piece in pieces_of(template.format(task=text, state=state))
    }
    special = {PAD: 0, UNKNOWN: 1, **dict.fromkeys(PICTURE_WORDS.values(), 2)}
    added = [
        {
            "id": i,
            "content": w,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for w, i in special.items()
        if w in (PAD, UNKNOWN)
    ]
    return _text(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "Lowercase"},
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"\w+|[^\w\s]|\n"},
                "behavior": "Removed",
                "invert": True,
            },
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": dict(sorted({**special, **known}.items(), key=lambda x: (x[1], x[0]))),
                "unk_token": UNKNOWN,
            },
        }
    )


def smolvlm_files(config: SmolVlaConfig) -> dict[str, bytes]:
    """What LeRobot builds a SmolVLA's language model of: its sizes, and the processor that it has beside."""
    v, t = config.vision, config.trunk
    vision = {
        "model_type": "smolvlm_vision",
        "hidden_size": v.width,
        "num_hidden_layers": v.depth,
        "intermediate_size": v.mlp,
        "num_attention_heads": v.heads,
        "patch_size": v.patch,
        "image_size": v.image,
    }
    text = {
        "model_type": "llama",
        "hidden_size": t.width,
        "num_hidden_layers": t.depth,
        "intermediate_size": t.mlp,
        "num_attention_heads": t.heads,
        "num_key_value_heads": t.kv_heads,
        "head_dim": t.head_dim,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.eps,
        "pad_token_id": 0,
    }
    whole = {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "scale_factor": config.merge,
        "image_token_id": 2,
        "pad_token_id": 0,
        "vision_config": vision,
        "text_config": text,
    }
    part = {"processor_class": "SmolVLMProcessor"}
    return {
        f"{VLM}/config.json": _text(whole),
        f"{VLM}/processor_config.json": _text(part),
        f"{VLM}/preprocessor_config.json": _text(part | {"image_processor_type": "SmolVLMImageProcessor"}),
        f"{VLM}/video_preprocessor_config.json": _text(
            part | {"video_processor_type": "SmolVLMVideoProcessor"}
        ),
    }


def left_out(spare: Sequence[str]) -> str:
    """The parts of a policy that are no part of its model and not of its processor, by name: an RL method's
    heads and noise."""
    parts = {
        re.sub(r"\.(net|layers?|\d+|weight|bias)(\..*)?$", "", key)
        for key in spare
        if not key.startswith(("processor.", "kept."))
    }
    return ", ".join(sorted(parts)[:6]) + (" …" if len(parts) > 6 else "")


def _text(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
