"""Tiny random checkpoints in LeRobot's keys, with inputs and outputs that LeRobot made of them: 0.6.1 of pi0, pi0.5 and SmolVLA, 0.4.4
(with transformers 4.57.6) of X-VLA."""

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
