"""Normalisation that travels in the checkpoint: fixed statistics of demonstrations, or running ones."""

import numpy as np
import torch
from torch import Tensor, nn


class Normaliser(nn.Module):
    """(x - mean)/std per dimension, clipped to +-clip. Statistics are buffers, so they are saved with the
    weights."""

    mean: Tensor
    std: Tensor
    count: Tensor

    def __init__(self, dim: int, clip: float = 10.0):
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("std", torch.ones(dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @property
    def device(self) -> torch.device:
        """Where its statistics are."""
        return self.mean.device

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.std).clamp_(-self.clip, self.clip)

    def inverse(self, x: Tensor) -> Tensor:
        return x * self.std + self.mean

    @torch.no_grad()
    def fit(self, x: Tensor, floor: float = 1e-2) -> None:
        """Take mean and std of `x[B, dim]`; std is at least `floor`, so a constant axis passes through."""
        x = x.double()
        self.mean.copy_(x.mean(0))
        self.std.copy_(x.std(0, unbiased=False).clamp(min=floor))
        self.count.fill_(len(x))

    @torch.no_grad()
    def take(self, mean: Tensor, std: Tensor, count: int) -> None:
        """Take these statistics [dim] as they are, of `count` rows."""
        self.mean.copy_(mean)
        self.std.copy_(std)
        self.count.fill_(count)

    @torch.no_grad()
    def update(self, x: Tensor, floor: float = 1e-4) -> None:
        """Merge the batch `x[B, dim]` into running statistics (Chan et al. 1979, eq. 2.1).

        Call it between rollouts only: inside one the statistics must not move, or ratios leave 1.
        """
        x = x.double()
        n, b = float(self.count), len(x)
        mean, var = x.mean(0), x.var(0, unbiased=False)
        if n == 0:
            new_mean, new_var = mean, var
        else:
            delta = mean - self.mean.double()
            new_mean = self.mean.double() + delta * (b / (n + b))
            new_var = (self.std.double() ** 2 * n + var * b + delta**2 * (n * b / (n + b))) / (n + b)
        self.mean.copy_(new_mean)
        self.std.copy_(new_var.sqrt().clamp(min=floor))
        self.count.fill_(n + b)


# what each needs
KINDS = {"mean_std": ("mean", "std"), "quantiles": ("q01", "q99"), "min_max": ("min", "max"), "identity": ()}


class AxisNormaliser(nn.Module):
    """y = (x - shift) / scale - offset per axis, by fixed statistics of any kind; nothing is clipped.

    mean_std: (x - mean) / (std + eps). quantiles, min_max: 2 (x - low) / (high - low) - 1, with eps in place
    of a range of 0 (LeRobot), or added to every range (`plus`: openpi). eps None: an axis that never moves
    passes through, shifted.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, dim: int, kind: str = "identity"):
        super().__init__()
        self.kind, self.offset = kind, float(kind in ("quantiles", "min_max"))
        self.register_buffer("shift", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))

    @property
    def device(self) -> torch.device:
        """Where its statistics are."""
        return self.shift.device

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.shift) / self.scale - self.offset

    def inverse(self, y: Tensor) -> Tensor:
        return (y + self.offset) * self.scale + self.shift

    @torch.no_grad()
    def fit(self, x: Tensor, floor: float = 1e-2) -> None:
        """Take what this kind needs of `x[B, dim]`; a std, or half of a range, is at least `floor`."""
        x = x.double()
        if self.kind == "mean_std":
            self.take(x.mean(0), x.std(0, unbiased=False).clamp(min=floor))
        elif self.offset:
            ends = (0.01, 0.99) if self.kind == "quantiles" else (0.0, 1.0)
            low, high = torch.from_numpy(np.quantile(x.cpu().numpy(), ends, axis=0)).to(x.device)
            middle, half = (low + high) / 2, ((high - low) / 2).clamp(min=floor)
            self.take(middle - half, middle + half)

    @torch.no_grad()
    def take(self, first: Tensor, second: Tensor, eps: float | None = None, plus: bool = False) -> None:
        """Of mean and std, or of the ends of a range, float [dim] each."""
        first, second = first.double(), second.double()
        ranged = bool(self.offset)
        spread = second - first if ranged else second
        if eps is None:
            spread = torch.where(spread > 1e-9 * first.abs().clamp(min=1e-3), spread, 2.0 if ranged else 1.0)
        elif plus or not ranged:
            spread = spread + eps
        else:
            spread = torch.where(spread == 0, eps, spread)
        self.shift.copy_(first)
        self.scale.copy_(spread / 2 if ranged else spread)
