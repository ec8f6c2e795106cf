"""Tiny random checkpoints of pi0, pi0.5 and SmolVLA in LeRobot's keys, with inputs and outputs that LeRobot 0.6.1 made of them."""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import pad

DATA = Path(__file__).parent / "data" / "vla"
FAMILIES = ("pi0", "pi05", "smolvla")
STEPS = 4  # Euler steps of the golden samples


def weights(family: str) -> Path:
    return DATA / f"{family}_tiny.safetensors"


@cache
def outputs(family: str) -> dict[str, torch.Tensor]:
    """action, noise [B,H,32], time, sample, loss, loss_map (not of smolvla); actions beyond 7 are padding."""
    io = load_file(DATA / f"{family}_io.safetensors")
    return {**io, "action": pad(io["action"], (0, 32 - 7))}


@cache
def inputs(family: str) -> dict[str, torch.Tensor]:
    """What a model's `prefix` takes; pi has a third camera that is masked, prompts are ragged."""
    io = outputs(family)
    if family == "smolvla":
        images = torch.stack([io["observation.images.a"], io["observation.images.b"]], 1) * 2 - 1
        return {"images": images, "image_mask": torch.ones(2, 2, dtype=torch.bool), "tokens": io["observation.language.tokens"],
                "token_mask": io["observation.language.attention_mask"], "state": pad(io["observation.state"], (0, 24))}
    images = torch.stack([io["pix_a"], io["img_b"] * 2 - 1, io["pix_c"]], 1)
    return {"images": images, "image_mask": torch.tensor([[True, True, False]] * 3), "tokens": io["tokens"],
            "token_mask": io["tmask"], "state": pad(io["state"], (0, 24))}
