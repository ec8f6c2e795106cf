"""Tiny random checkpoints in LeRobot's keys, with inputs and outputs that LeRobot made of them: 0.6.1 of pi0,
pi0.5 and SmolVLA, 0.4.4 (with transformers 4.57.6) of X-VLA.

GR00T, in NVIDIA's keys: `FlowmatchingActionHead` and `EagleBackbone.forward_eagle` of LeRobot 0.4.4 (N1.5,
transformers 4.57.6), and `GR00TN17ActionHead` and `Qwen3Backbone.forward` of 0.6.1 (N1.7, transformers
5.5.4), with diffusers 0.42.1, sizes of `tiny`, weights normal of one over the root of what a unit sums over
(ends of residual branches half of it, the last layer of the action decoder a tenth and a twentieth),
embodiment 1. Each row went through alone: in a batch these attend to the padding of shorter rows. Word 511 of
`tokens` stands for all tokens of a picture; `features` is what the expert attends to."""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

DATA = Path(__file__).parent / "data" / "vla"
FAMILIES = ("pi0", "pi05", "smolvla")
STEPS = 4  # Euler steps of the golden samples
INPUTS = ("images", "image_mask", "tokens", "token_mask", "state")


def weights(family: str) -> Path:
    return DATA / f"{family}_tiny.safetensors"


def golden_file(family: str) -> Path:
    return DATA / f"{family}_io.safetensors"


@cache
def outputs(family: str) -> dict[str, torch.Tensor]:
    """actions, noise [B,H,32], time, sample, loss over 7 entries of an action, loss_map (not of smolvla)."""
    return {k: v for k, v in load_file(golden_file(family)).items() if k not in INPUTS}


@cache
def inputs(family: str) -> dict[str, torch.Tensor]:
    """What a model's `prefix` takes; pi has a third camera that is masked, prompts are ragged."""
    return {k: v for k, v in load_file(golden_file(family)).items() if k in INPUTS}
