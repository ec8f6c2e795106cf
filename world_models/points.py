"""Where in each picture each of some colours is (`robo_rl.colours.colour_points`): numbers, not learnt, that
an ensemble predicts beside the arm's state.

A small thing of a colour of its own is what success often depends on, and errors of pixels are mostly the
arm's. A point that flickers, as two things of one colour pull at it, cannot be predicted and would be most of
the loss: it is left out (`steady_points`).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from robo_rl.colours import COLOURS, colour_points
from world_models.recorded import Recorded

PATCH = 4
STEADY = 0.02  # of a picture's half width: least std of a point
FLICKER = 0.15  # of a point's std: most noise of one that is kept
FEW = 100  # least frames that tell which points flicker


def count(views: int) -> int:
    """Numbers that the points of so many cameras are: x and y of each."""
    return 2 * COLOURS * views


def places(patches: Tensor, views: int) -> Tensor:
    """Of all points [B,P], kept or not, in frames as patches [B,V 48,g,g]."""
    pixels = F.pixel_shuffle(patches.unflatten(1, (views, -1)).flatten(0, 1), PATCH)
    return colour_points(pixels).view(len(patches), -1)


def in_a_row(data: Recorded, patches: Callable[[np.ndarray], Tensor], views: int) -> Tensor | None:
    """Places [B,3,P] in three frames in a row, evenly spaced over what is learnt from; None: they are too few
    to tell anything. `patches`: rows [B] -> their frames."""
    at = data.spaced()
    at = at[at + 2 < np.repeat(data.end, data.lengths)[at]]
    if len(at) < FEW:
        return None
    parts = np.split(at, range(256, len(at), 256))
    return torch.stack([torch.cat([places(patches(r + k), views) for r in parts]) for k in range(3)], 1)


def steady_points(three: Tensor) -> Tensor:
    """Which points [P], x and y of each in turn, do not flicker, of their places [B,3,P] in three frames in a
    row. float32[P] of 0 and 1; one whose x or y flickers is 0 in both.

    Noise that is new in every frame makes successive changes go against each other: its variance is
    -mean((p_1 - p_0) (p_2 - p_1)).
    """
    changes = three.diff(dim=1)
    noise = -(changes[:, 0] * changes[:, 1]).mean(0)
    steady = noise < (FLICKER * three.flatten(0, 1).std(0).clamp(min=STEADY)).square()
    return steady.view(-1, 2).all(1).float().repeat_interleave(2)
