"""How far a model is from a golden file: its outputs and the output of every layer on stored inputs, or its
weights layer by layer.

A golden file (safetensors) holds inputs `images image_mask tokens token_mask state noise time actions`,
outputs `loss_map sample loss` as far as they are known, and `layer/<name>`, what each layer gave. Its
metadata says `steps` of the sample, and over how many entries of an action the loss is a mean
(`loss_entries`). Of a model that writes tokens the inputs `noise time actions` are `action_tokens
action_mask`, and the outputs `token_losses`, `logits` (of every 16th word, 0 where the mask is) and `loss`. A
model of one pass (OpenVLA-OFT) has no inputs beside the prefix', and gives `logits` of the bins or `actions`.
`record` writes one, so that two machines, dtypes or programs can be compared.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from robo_rl.errors import UserError
from robo_rl.policies.context import Context
from robo_rl.policies.vla.blocks import DecoderBlock, VisionBlock
from robo_rl.policies.vla.groot import MixerBlock, TimedBlock
from robo_rl.policies.vla.groot_n17 import TurnedBlock
from robo_rl.policies.vla.keys import KeyMatch, recognise
from robo_rl.policies.vla.make import known, load_model
from robo_rl.policies.vla.network import OneStepVlaModel, TokenVlaModel, VlaModel
from robo_rl.policies.vla.openvla import ScaledBlock
from robo_rl.policies.vla.weights import Checkpoint, open_checkpoint
from robo_rl.policies.vla.xvla import DavitBlock, SoftBlock, TextBlock

PREFIX = ("images", "image_mask", "tokens", "token_mask", "state")
INPUTS = (*PREFIX, "noise", "time")
WRITTEN = (*PREFIX, "action_tokens", "action_mask")
SOME = 16  # one of so many words has its logits in a golden file
LAYER = "layer/"
LAYERS = (
    DecoderBlock,
    VisionBlock,
    DavitBlock,
    TextBlock,
    SoftBlock,
    ScaledBlock,
    MixerBlock,
    TimedBlock,
    TurnedBlock,
)
STEPS = 4


@dataclass(frozen=True)
class OutputDifference:
    """Of one output, layer or group of weights."""

    name: str
    largest: float
    """Absolute difference."""
    relative: float
    """Norm of the difference over the norm of the golden one."""
    note: str = ""


def compare(
    path: "str | Path", golden: "str | Path", device: str = "cpu", dtype: torch.dtype | None = None
) -> list[OutputDifference]:
    """Differences between the checkpoint `path` and a golden file of inputs and outputs, or another
    checkpoint.

    UserError: the golden file holds neither, or inputs of another size.
    """
    other = open_checkpoint(golden)
    if INPUTS[0] in other.tensors:
        want = dict(other.read())
        got = outputs(load_model(path, device, dtype), want, *_settings(other))
        rows = [_difference(name, got[name], want[name]) for name in got if name in want]
        if not rows:
            raise UserError(
                f"{golden} has inputs and none of the outputs {', '.join(got)[:120]} …; write one with "
                "--record"
            )
        return rows
    ours, theirs = open_checkpoint(path), recognise(other.tensors)
    here = known(ours, recognise(ours.tensors))
    if not theirs.found:
        raise UserError(
            f"{golden} is neither a checkpoint nor a golden file: it lacks {INPUTS[0]} and weights"
        )
    return list(_weights(ours, here, other, theirs))


def record(
    path: "str | Path",
    golden: "str | Path | None",
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a new golden file: the inputs of `golden`, or random ones of `seed`, and what
    this model makes of them."""
    model = load_model(path, device, dtype)
    steps, entries = STEPS, model.action_width
    if golden is None:
        given = random_inputs(model, seed)
    else:
        other = open_checkpoint(golden)
        given = {k: x for k, x in other.read() if k in (*INPUTS, *WRITTEN, "actions")}
        steps, entries = _settings(other)
    made = {
        k: x.float().cpu().contiguous() if x.is_floating_point() else x.cpu()
        for k, x in outputs(model, given, steps, entries).items()
    }
    return {**given, **made}, {"steps": str(steps), "loss_entries": str(entries)}


def random_inputs(model: VlaModel, seed: int, rows: int = 2, words: int = 7) -> dict[str, Tensor]:
    """Inputs of a golden file; the last view of row 1 and the last words of row 0 are masked."""
    g = torch.Generator().manual_seed(seed)
    image_mask, token_mask = (
        torch.ones(rows, model.views, dtype=torch.bool),
        torch.ones(rows, words, dtype=torch.bool),
    )
    image_mask[1, -1] = False
    token_mask[0, -2:] = False
    chunk = (rows, model.horizon, model.action_width)
    given = {
        "images": torch.rand(rows, model.views, 3, model.image_size, model.image_size, generator=g) * 2 - 1,
        "image_mask": image_mask,
        "tokens": torch.randint(0, model.config.vocab, (rows, words), generator=g),
        "token_mask": token_mask,
        "state": torch.randn(rows, model.state_width, generator=g),
    }
    if isinstance(model, OneStepVlaModel):
        return given
    if isinstance(model, TokenVlaModel):
        there = torch.ones(rows, 2 * words, dtype=torch.bool)
        there[0, -words:] = False
        return {
            **given,
            "action_tokens": torch.randint(0, model.config.vocab, there.shape, generator=g),
            "action_mask": there,
        }
    return {
        **given,
        "noise": torch.randn(chunk, generator=g),
        "time": torch.rand(rows, generator=g),
        "actions": torch.randn(chunk, generator=g),
    }


@torch.no_grad()
def outputs(model: VlaModel, given: dict[str, Tensor], steps: int, entries: int) -> dict[str, Tensor]:
    """loss_map, loss, sample and layer/<name> of a model on the inputs of a golden file. UserError: they are
    of another size."""
    flows = not isinstance(model, TokenVlaModel | OneStepVlaModel)
    absent = [
        k
        for k in (INPUTS if flows else WRITTEN if isinstance(model, TokenVlaModel) else PREFIX)
        if k not in given
    ]
    if absent:
        raise UserError(f"the golden file lacks {', '.join(absent)}")
    want = {"images": (model.image_size,) * 2, "state": (model.state_width,)}
    want |= {"noise": (model.horizon, model.action_width)} if flows else {}
    for name, shape in want.items():
        if tuple(given[name].shape[-len(shape) :]) != shape:
            raise UserError(
                f"the golden file's {name} ends in {list(given[name].shape[-len(shape) :])}, this model "
                f"takes {list(shape)}"
            )
    device = next(model.parameters()).device
    x = {k: v.to(device) for k, v in given.items()}
    if isinstance(model, TokenVlaModel):
        return _written(model, x)
    if isinstance(model, OneStepVlaModel):
        with layer_outputs(model) as layers:
            made = model.actions(model.prefix(*(x[k] for k in PREFIX)))
        return {LAYER + name: y for name, y in layers.items()} | {
            "logits" if made.dim() == 4 else "actions": made
        }
    with layer_outputs(model) as layers:
        context: Context = model.prefix(*(x[k] for k in PREFIX), drop=False)
        model.velocity(context, x["noise"], x["time"])
    out = {LAYER + name: y for name, y in layers.items()}
    if "actions" in x:
        out["loss_map"] = model.loss_map(context, x["actions"], x["noise"], x["time"])
        out["loss"] = out["loss_map"][..., :entries].mean()[None]
    out["sample"] = model.sample(context, x["noise"], steps)
    return out


def _written(model: TokenVlaModel, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """`outputs` of a model that writes tokens."""
    tokens, mask = x["action_tokens"], x["action_mask"]
    with layer_outputs(model) as layers:
        context = model.prefix(*(x[k] for k in PREFIX), drop=False)
        logits = model.logits(context, tokens[:, :-1])[..., ::SOME] * mask[:, 1:, None]
    losses = model.token_losses(context, tokens, mask)
    return {LAYER + name: y for name, y in layers.items()} | {
        "logits": logits.contiguous(),
        "token_losses": losses,
        "loss": (losses.sum() / mask[:, 1:].sum())[None],
    }


@contextmanager
def layer_outputs(model: VlaModel) -> Iterator[dict[str, Tensor]]:
    """What each layer gives meanwhile, by its name; of the last one of a trunk its keys."""
    seen: dict[str, Tensor] = {}

    def keep(name: str):
        def hook(module, _args, y) -> None:
            seen[name] = y if isinstance(y, Tensor) else y[1][0] if module.last else y[0]

        return hook

    hooks = [m.register_forward_hook(keep(n)) for n, m in model.named_modules() if isinstance(m, LAYERS)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _settings(golden: Checkpoint) -> tuple[int, int]:
    try:
        return int(golden.metadata.get("steps", STEPS)), int(golden.metadata.get("loss_entries", 1 << 20))
    except ValueError:
        raise UserError(
            f"{golden.path}: steps and loss_entries of its metadata must be whole numbers"
        ) from None


def _difference(name: str, got: Tensor, want: Tensor, note: str = "") -> OutputDifference:
    if got.shape != want.shape:
        return OutputDifference(name, math.inf, math.inf, f"{list(got.shape)} here, {list(want.shape)} there")
    a, b = got.double().cpu(), want.double().cpu()
    return OutputDifference(
        name, (a - b).abs().max().item(), ((a - b).norm() / b.norm().clamp(min=1e-30)).item(), note
    )


def _weights(
    ours: Checkpoint, here: KeyMatch, other: Checkpoint, there: KeyMatch
) -> Iterator[OutputDifference]:
    """Per layer, the weight that differs most; names that one of them lacks."""
    groups: dict[str, list[str]] = {}
    for name in sorted({*here.found, *there.found}, key=_in_order):
        groups.setdefault(
            re.sub(r"((?:layers|decoder|mixer)\.\d+|norm|vision\.\w+)\..*|\.(weight|bias)$", r"\1", name), []
        ).append(name)
    for group, names in groups.items():
        absent = [n for n in names if n not in here.found or n not in there.found]
        both = [n for n in names if n not in absent]
        a, b = (
            dict(ours.read({here.found[n] for n in both})),
            dict(other.read({there.found[n] for n in both})),
        )
        rows = [_difference(n, a[here.found[n]], b[there.found[n]]) for n in both]
        worst = max(rows, key=lambda r: r.largest, default=OutputDifference(group, math.inf, math.inf))
        note = f"{worst.name.removeprefix(group).strip('.')} {worst.note}".strip() if worst.largest else ""
        if absent:
            where = "here" if absent[0] not in here.found else "there"
            note = f"{len(absent)} only on one side: no {absent[0]} {where}; {note}".rstrip("; ")
        relative = math.inf if absent else max(r.relative for r in rows)
        yield OutputDifference(group, math.inf if absent else worst.largest, relative, note)


def _in_order(name: str) -> list:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
