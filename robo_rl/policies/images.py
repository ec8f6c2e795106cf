"""Pictures of any size made the size that a network takes, on the device where they are.

`fit` keeps the whole picture and pads it (pi0, pi0.5, SmolVLA), cuts its middle out, or stretches it.
Interpolation is bilinear without anti-aliasing (torch's), which is what the public PyTorch checkpoints were
made and are evaluated with.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from robo_rl.errors import UserError

Fit = Literal["pad", "pad_top_left", "crop", "stretch"]
FITS: tuple[Fit, ...] = ("pad", "pad_top_left", "crop", "stretch")


def fit(images: Tensor, size: int, how: Fit = "pad") -> Tensor:
    """float [B,3,h,w] in 0..1 -> [B,3,size,size] in 0..1; what is padded is 0.

    pad: the longer side becomes `size`, the shorter one is padded on both sides (one more at the end where it
    does not halve).
    pad_top_left: padded on the top and on the left alone (SmolVLA). crop: the largest square in the middle.
    stretch: sides apart.
    """
    h, w = images.shape[-2:]
    if (h, w) == (size, size):
        return images
    if how == "crop":
        side = min(h, w)
        top, left = (h - side) // 2, (w - side) // 2
        images = images[..., top : top + side, left : left + side]
        return images if side == size else _resized(images, size, size)
    if how == "stretch":
        return _resized(images, size, size)
    ratio = max(h, w) / size
    new_h, new_w = max(1, int(h / ratio)), max(1, int(w / ratio))
    images, top, left = _resized(images, new_h, new_w), size - new_h, size - new_w
    if how == "pad":
        return pad(images, (left // 2, left - left // 2, top // 2, top - top // 2))
    return pad(images, (left, 0, top, 0))


def _resized(images: Tensor, h: int, w: int) -> Tensor:
    return interpolate(images, (h, w), mode="bilinear", align_corners=False).clamp(0, 1)


def fit_bytes(images: Tensor, size: int, how: Fit = "pad") -> Tensor:
    """uint8 [B,h,w,3] -> uint8 [B,size,size,3]; pictures of that size already are given back as they are."""
    if images.shape[1:3] == (size, size):
        return images
    made = fit(images.permute(0, 3, 1, 2).float() / 255, size, how)
    return made.mul(255).round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def check_fit(what: str, how: str) -> None:
    """Raise UserError unless `how` is one of FITS."""
    if how not in FITS:
        raise UserError(f"{what} must be one of {', '.join(FITS)}, got {how!r}")
