"""A checkpoint from one layout of keys to another, by copying bytes: no value changes, and the way back gives
the same tensors.

A policy that was trained here is a source too: what it has beside its model (normalisers, noise) is left out.
Ours (`robo_rl`) carries along what no model of ours reads (output heads, the rest of the last trunk layer,
statistics of older LeRobot files), so that a public layout is whole again. Where ours never had it (a model
of a seed, a trained policy), zeros are written.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from robo_rl.errors import UserError, choose
from robo_rl.files import replacing, write_bytes
from robo_rl.policies.vla.groot import GrootConfig
from robo_rl.policies.vla.groot_n17 import GrootN17Config
from robo_rl.policies.vla.keys import (
    HEAD,
    KEPT,
    OURS,
    WORDS,
    KeyLayout,
    KeyMatch,
    carried,
    layout,
    layouts_of,
    plain,
    recognise,
    spelled,
)
from robo_rl.policies.vla.lerobot_folder import FOLDERS, VLM, facts_of, left_out, lerobot_files, smolvlm_files
from robo_rl.policies.vla.make import CONFIG, METADATA, check_match, model_metadata, read_config
from robo_rl.policies.vla.network import VlaConfig
from robo_rl.policies.vla.processor import NAME, NUMBERS, Processor
from robo_rl.policies.vla.processor_files import OPENPI, as_openpi
from robo_rl.policies.vla.smolvla import SmolVlaConfig
from robo_rl.policies.vla.tokeniser import FILES as TOKENISERS
from robo_rl.policies.vla.weights import (
    INDEX,
    SINGLE,
    TRAINED,
    Checkpoint,
    TensorInfo,
    Zeros,
    as_metadata,
    metadata_json,
    open_checkpoint,
    write_checkpoint,
)

LEROBOT = "lerobot"
SOURCE = "source"  # metadata of ours: where it came from, so that it goes back as it came
STATISTICS = f"assets/robo_rl/{OPENPI}"  # where openpi looks for those of the robot "robo_rl"
BESIDE = 64 << 20  # bytes of a file beside the weights that is copied too, at most


@dataclass(frozen=True)
class Converted:
    """What was written."""

    path: Path
    family: str
    came: str
    """Layout read."""
    to: str
    tensors: int
    zeros: int
    """Of these, how many no model reads and the source did not have."""
    copied: tuple[str, ...]
    """Files beside the weights that were copied."""
    made: tuple[str, ...] = ()
    """Files beside the weights that were made: LeRobot's or openpi's, of a policy that was trained here."""
    notes: tuple[str, ...] = ()
    """What the other program cannot express, a line each."""


def convert(
    source: "str | Path", out: "str | Path", to: str, instructions: Sequence[str] = (), said: str = ""
) -> Converted:
    """Write the checkpoint `source` (file or folder) in layout `to` at `out`: a .safetensors file, or a
    folder with model.safetensors and the small files beside the source (config, processor, tokeniser); of a
    processor of ours and `lerobot` those that LeRobot reads (`lerobot_folder`, which takes `instructions`;
    said: what this policy has behind each if it is told the advantage).

    UserError: keys of no known layout, a layout that the family does not have, `out` is there already, the
    disk is full, LeRobot would do something else with it.
    """
    checkpoint, out = open_checkpoint(source), Path(out)
    read = recognise(checkpoint.tensors)
    config = read_config(checkpoint, read)
    check_match(checkpoint.path, config, read, checkpoint.tensors)
    choose(f"layout of {read.family}", to, layouts_of(read.family))
    target = out if out.suffix == ".safetensors" else out / SINGLE
    if target.exists():
        raise UserError(f"{target} is there already; give another place or move it away")
    made, notes = {}, []
    if to == LEROBOT:
        made, notes = _lerobot_files(checkpoint, read, config, out, instructions, said)
    elif to.startswith("openpi"):
        made, notes = _openpi_files(checkpoint, out)
    came = (
        metadata_json(checkpoint.metadata, SOURCE)
        if read.layout is None
        else {
            "layout": read.name,
            "words": read.layout.words.index(plain(read.found[WORDS])),
            "metadata": checkpoint.metadata,
        }
    )
    kept = [key for key in (*read.spare, *filter(None, [read.tied])) if read.layout or key.startswith(KEPT)]
    named: dict[str, TensorInfo | Zeros] = {carried(key, read): checkpoint.tensors[key] for key in kept}
    named |= {name: _turned(checkpoint.tensors[key], name, read.layout) for name, key in read.found.items()}
    if to == OURS:
        write_checkpoint(
            target, named, {"format": "pt", **as_metadata(**{METADATA: model_metadata(config), SOURCE: came})}
        )
        tensors, zeros = len(named), 0
    else:
        filled = _fill(named, config, whole=bool(came))
        public = _public(filled, read, to, came)
        write_checkpoint(
            target, public, came.get("metadata", {}) if came.get("layout") == to else {"format": "pt"}
        )
        tensors, zeros = len(public), len(filled) - len(named)
    for name, data in made.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(out / name, data)
    copied = () if "config.json" in made or out.suffix == ".safetensors" else _copy_beside(checkpoint, out)
    return Converted(target, read.family, read.name, to, tensors, zeros, copied, tuple(made), tuple(notes))


def _lerobot_files(
    checkpoint: Checkpoint,
    read: KeyMatch,
    config: VlaConfig,
    out: Path,
    instructions: Sequence[str],
    said: str,
) -> tuple[dict[str, bytes], list[str]]:
    """(files that LeRobot reads beside the weights, notes): of a folder whose processor is ours."""
    notes = (
        [f"no part of LeRobot's policy: {parts}"]
        if read.layout is None and (parts := left_out(read.spare))
        else []
    )
    if out.suffix == ".safetensors" or not (checkpoint.path / NAME).is_file():
        return {}, notes
    if read.family not in FOLDERS:
        return {}, [
            *notes,
            f"keys alone: LeRobot's config.json and processors are written for {', '.join(FOLDERS)}",
        ]
    processor, dtype = Processor.load(checkpoint.path), checkpoint.tensors[read.found[WORDS]].dtype
    facts = facts_of(checkpoint.path, config, processor.options.image_size, said)
    files, more = lerobot_files(processor, config, facts, dtype, str((out / VLM).resolve()), instructions)
    return files | (smolvlm_files(config) if isinstance(config, SmolVlaConfig) else {}), notes + more


def _openpi_files(checkpoint: Checkpoint, out: Path) -> tuple[dict[str, bytes], list[str]]:
    """(the statistics that openpi reads, notes), of a folder whose processor is ours."""
    there = any(checkpoint.path.glob(f"assets/**/{OPENPI}"))
    if there or out.suffix == ".safetensors" or not (checkpoint.path / NAME).is_file():
        return {}, []
    processor = Processor.load(checkpoint.path)
    notes = ["pictures, prompt and cameras are those of the train config that openpi's server is given"]
    if processor.is_relative:
        notes.append("actions are relative to the state: give that config openpi's DeltaActions")
    return {STATISTICS: json.dumps(as_openpi(processor), indent=1).encode()}, notes


def _fill(
    named: Mapping[str, "TensorInfo | Zeros"], config: VlaConfig, whole: bool
) -> dict[str, "TensorInfo | Zeros"]:
    """The tensors with those that a public model has and ours has not, as zeros: of the last trunk layer, in
    the shapes of layer 0, and of a GR00T that was not made of a public file (`whole`)."""
    out: dict[str, TensorInfo | Zeros] = dict(named)
    if isinstance(config, GrootConfig) and not whole:
        words = named[WORDS]
        dtype = words.dtype if isinstance(words, TensorInfo) else words[1]
        out |= {KEPT + name: (shape, dtype) for name, shape in unread(config).items()}
    last = f"trunk.layers.{config.trunk.depth - 1}."
    for name, info in named.items():
        if name.startswith("trunk.layers.0.") and config.trunk.depth > 1:
            there = last + name.removeprefix("trunk.layers.0.")
            if there not in named and KEPT + there not in named:
                out[KEPT + there] = (info.shape, info.dtype) if isinstance(info, TensorInfo) else info
    return out


def unread(config: GrootConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of what a public GR00T has and nothing reads: of N1.5 the pooling head of SigLIP, of N1.7 the
    language model's norm."""
    if isinstance(config, GrootN17Config):
        return {"backbone.model.model.language_model.norm.weight": (config.trunk.width,)}
    w, m, front = (
        config.vision.width,
        config.vision.mlp,
        "backbone.eagle_model.vision_model.vision_model.head.",
    )
    shapes = {
        "probe": (1, 1, w),
        "attention.in_proj_weight": (3 * w, w),
        "attention.in_proj_bias": (3 * w,),
        "mlp.fc1.weight": (m, w),
        "attention.out_proj.weight": (w, w),
        "mlp.fc1.bias": (m,),
        "mlp.fc2.weight": (w, m),
        **dict.fromkeys(
            ("attention.out_proj.bias", "layernorm.weight", "layernorm.bias", "mlp.fc2.bias"), (w,)
        ),
    }
    return {front + name: shape for name, shape in shapes.items()}


def _public(
    named: Mapping[str, "TensorInfo | Zeros"], read: KeyMatch, to: str, came: Mapping
) -> dict[str, "TensorInfo | Zeros"]:
    """Tensors by the keys of a public layout. The word embedding alone is called what the source called it,
    in another layout what is usual there: `lm_head` in openpi's files, `embed_tokens` in others."""
    shape = layout(read.family, to)
    slot = int(came.get("words", 0)) if came.get("layout") == to else int(to.startswith("openpi"))
    out = {
        spelled(name, shape) if name.startswith(KEPT) else shape.theirs(name): _turned(what, name, shape)
        for name, what in named.items()
        if name != WORDS
    }
    out[shape.words[0 if HEAD in named else slot]] = named[WORDS]
    return out


def _turned(what: "TensorInfo | Zeros", name: str, shape: KeyLayout | None) -> "TensorInfo | Zeros":
    """The tensor, to be copied the other way round if one of both layouts has it transposed."""
    if shape is None or name not in shape.turned or not isinstance(what, TensorInfo):
        return what
    return replace(what, turned=not what.turned)


def _copy_beside(checkpoint: Checkpoint, out: Path) -> tuple[str, ...]:
    """Copy the small files beside the weights (and those of assets/, where openpi has its statistics); of a
    checkpoint of a run its processor alone: optimizers and sizes of the policy are of that run."""
    if not checkpoint.path.is_dir():
        return ()
    weights = {INDEX, CONFIG, *(f.name for f in checkpoint.files)}
    found = [
        f
        for f in sorted([*checkpoint.path.glob("*"), *checkpoint.path.glob("assets/**/*")])
        if f.is_file() and f.name not in weights and f.stat().st_size <= BESIDE
    ]
    if TRAINED in weights:
        found = [f for f in found if f.name in (NAME, NUMBERS, *TOKENISERS)]
    for file in found:
        place = out / file.relative_to(checkpoint.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as temp:
            shutil.copyfile(file, temp)
    return tuple(str(f.relative_to(checkpoint.path)) for f in found)
