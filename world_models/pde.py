"""PDE-Refiner on the Kuramoto-Sivashinsky equation, as its paper has it: the equation, the networks, the
refinement, the measures.

    u_t = -u u_x - u_xx - u_xxxx,  periodic in x of length L            solved by ETDRK4 in Fourier space
    y = (u(t + dt) - u(t)) / scale                                       what is predicted
    training, k uniform in 0 .. K:   k = 0:  | net(0, u, 0) - y |^2
                                     k > 0:  | net(y + s_k e, u, k) - e |^2,   s_k = s_min^(k/K),  e ~ N(0, 1)
    prediction:  y_0 = net(0, u, 0),   y_k = (y_(k-1) + s_k e) - s_k net(y_(k-1) + s_k e, u, k)

One network does all of it, and K = 0 is the plain one-step regression, the U-Net it is held against. The
refinement of `latent` (`world_models.latent`) is another: it adds no noise. `launch/compare_refiner.py`
measures.

Sources: PDE-Refiner (Lippe et al. 2023, arXiv 2308.05732) section 3, appendix C; ETDRK4: Kassam and Trefethen
2005.

Axes: `B` trajectories, `T` steps of time, `X` points.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.optim import AdamW
from world_models.fit import descend, grown, warm_cosine

Net = Callable[[Tensor, Tensor, Tensor], Tensor]  # (y [B,X], u [B,X], k int64[B]) -> [B,X]


def solve(
    trajectories: int,
    steps: int,
    dt: float,
    length: float = 32.0,
    points: int = 64,
    seed: int = 0,
    inner: float = 0.1,
    settle: float = 150.0,
) -> np.ndarray:
    """float32 [B,T,X]: solutions at every `dt`, which is a whole number of `inner` steps, after a time
    `settle` from random waves."""
    k = 2 * np.pi / length * np.fft.rfftfreq(points, 1 / points)
    linear, h, often = k**2 - k**4, inner, round(dt / inner)
    e, e2 = np.exp(h * linear), np.exp(h * linear / 2)
    # a contour around each, for the limits at 0
    z = h * linear[:, None] + np.exp(1j * np.pi * (np.arange(1, 33) - 0.5) / 32)
    q = h * ((np.exp(z / 2) - 1) / z).mean(1).real
    f1 = h * ((-4 - z + np.exp(z) * (4 - 3 * z + z**2)) / z**3).mean(1).real
    f2 = h * ((2 + z + np.exp(z) * (z - 2)) / z**3).mean(1).real
    f3 = h * ((-4 - 3 * z - z**2 + np.exp(z) * (4 - z)) / z**3).mean(1).real
    kept = np.arange(len(k)) < 2 * len(k) / 3  # products of waves beyond it would come back as long ones

    def nonlinear(v: np.ndarray) -> np.ndarray:
        return -0.5j * k * kept * np.fft.rfft(np.fft.irfft(v, points) ** 2)

    def step(v: np.ndarray) -> np.ndarray:
        n = nonlinear(v)
        a = e2 * v + q * n
        na = nonlinear(a)
        b = e2 * v + q * na
        nb = nonlinear(b)
        c = e2 * a + q * (2 * nb - n)
        return e * v + n * f1 + 2 * (na + nb) * f2 + nonlinear(c) * f3

    x = length * np.arange(points) / points
    rng = np.random.default_rng([seed, 73])
    waves, phases = rng.uniform(-0.5, 0.5, (2, trajectories, 10, 1))
    u = (waves * np.sin(2 * np.pi * (rng.integers(1, 4, waves.shape) * x / length + phases))).sum(1)
    v, out = np.fft.rfft(u), np.zeros((trajectories, steps, points), np.float32)
    for _ in range(round(settle / h)):
        v = step(v)
    for t in range(steps):
        out[:, t] = np.fft.irfft(v, points)
        for _ in range(often):
            v = step(v)
    return out


# ---- the networks ------------------------------------------------------------------------------------------


class WaveBlock(nn.Module):
    """Residual, of circular convolutions, told the level k: [B,C,X] -> [B,C,X]."""

    def __init__(self, width: int):
        super().__init__()
        self.one, self.two = (
            nn.Conv1d(width, width, 5, padding=2, padding_mode="circular") for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))
        self.told = nn.Linear(width, 2 * width)
        nn.init.zeros_(self.two.weight)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        gain, shift = self.told(level)[..., None].chunk(2, 1)
        h = self.one(F.silu(self.norms[0](x)))
        return x + self.two(F.silu(self.norms[1](h) * (1 + gain) + shift))


class UNet(nn.Module):
    """Three resolutions; (y, u) [B,X] and k [B] -> [B,X]."""

    def __init__(self, width: int, levels: int, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.enter, self.leave = (
                nn.Conv1d(2, width, 5, padding=2, padding_mode="circular"),
                nn.Conv1d(width, 1, 1),
            )
            self.level = nn.Embedding(levels + 1, width)
            self.down = nn.ModuleList(nn.Conv1d(width, width, 2, stride=2) for _ in range(2))
            self.up = nn.ModuleList(nn.Conv1d(2 * width, width, 1) for _ in range(2))
            self.blocks = nn.ModuleList(WaveBlock(width) for _ in range(7))
        nn.init.zeros_(self.leave.weight)

    def forward(self, y: Tensor, u: Tensor, k: Tensor) -> Tensor:
        level = self.level(k)
        h = self.blocks[0](self.enter(torch.stack([y, u], 1)), level)
        kept = []
        for i, down in enumerate(self.down):
            kept.append(h)
            h = self.blocks[i + 1](down(h), level)
        h = self.blocks[3](h, level)
        for i, up in enumerate(self.up):
            h = self.blocks[i + 4](up(torch.cat([h.repeat_interleave(2, 2), kept.pop()], 1)), level)
        return self.leave(F.silu(self.blocks[6](h, level)))[:, 0]


def sigmas(steps: int, least: float) -> list[float]:
    """s_1 .. s_K."""
    return [least ** (k / steps) for k in range(1, steps + 1)]


def refiner_loss(net: Net, u: Tensor, y: Tensor, levels: list[float], generator: torch.Generator) -> Tensor:
    """The loss above of changes y [B,X] from u [B,X]; without levels the plain regression."""
    k = torch.randint(0, len(levels) + 1, (len(u),), generator=generator)
    noise, s = torch.randn(u.shape, generator=generator), torch.tensor([0.0, *levels])[k][:, None]
    first = (k == 0)[:, None]
    shown = torch.where(first, torch.zeros(()), y + s * noise)
    return (net(shown, u, k) - torch.where(first, y, noise)).square().mean()


def predict(net: Net, u: Tensor, levels: list[float], generator: torch.Generator) -> Tensor:
    """The change [B,X] from u [B,X], refined."""

    def at(k: int) -> Tensor:
        return torch.full((len(u),), k, dtype=torch.int64)

    y = net(torch.zeros_like(u), u, at(0))
    for k, s in enumerate(levels, 1):
        noised = y + s * torch.randn(u.shape, generator=generator)
        y = noised - s * net(noised, u, at(k))
    return y


def learn(
    net: nn.Module,
    u: np.ndarray,
    scale: float,
    levels: list[float],
    updates: int,
    batch: int = 64,
    lr: float = 1e-3,
    seed: int = 0,
    ema: float = 0.995,
) -> nn.Module:
    """The averaged network after `updates` on trajectories u [B,T,X] (u/std, changes / scale)."""
    generator, average = torch.Generator().manual_seed(seed), copy.deepcopy(net)
    rows, params = torch.from_numpy(u), list(net.parameters())
    pairs = list(zip(average.parameters(), net.parameters(), strict=True))
    opt = AdamW(params, lr=lr, weight_decay=1e-5, fused=False)
    for n in range(updates):
        opt.param_groups[0]["lr"] = warm_cosine(lr, n, updates)
        i = torch.randint(0, len(rows), (batch,), generator=generator)
        t = torch.randint(0, rows.shape[1] - 1, (batch,), generator=generator)
        now = rows[i, t]
        loss = refiner_loss(net, now, (rows[i, t + 1] - now) / scale, levels, generator)
        descend(loss, opt, params, 1.0, pairs, grown(ema, n))
    return average


@torch.no_grad()
def roll(net: Net, u: np.ndarray, steps: int, scale: float, levels: list[float], seed: int = 0) -> np.ndarray:
    """float32 [B,T,X]: `steps` steps from u [B,X]."""
    generator, out, now = torch.Generator().manual_seed(seed), [], torch.from_numpy(u)
    for _ in range(steps):
        now = now + scale * predict(net, now, levels, generator)
        out.append(now)
    return torch.stack(out, 1).numpy()


# ---- the measures ------------------------------------------------------------------------------------------


def correlated_time(predicted: np.ndarray, true: np.ndarray, dt: float, least: float = 0.8) -> np.ndarray:
    """[B]: time until the correlation over X first falls below `least`; the whole time where it never does.
    [B,T,X] both."""
    p, t = (x - x.mean(-1, keepdims=True) for x in (predicted, true))
    correlation = (p * t).sum(-1) / np.maximum(np.linalg.norm(p, axis=-1) * np.linalg.norm(t, axis=-1), 1e-12)
    below = ~(correlation >= least)
    return dt * np.where(below.any(1), below.argmax(1), below.shape[1])


def error_by_wave(predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """[X/2+1]: root mean square of the error's Fourier amplitudes as a share of the truth's, of fields
    [B,X]."""

    def amplitude(x: np.ndarray) -> np.ndarray:
        return np.sqrt(np.square(np.abs(np.fft.rfft(x.astype(np.float64)))).mean(0))

    return amplitude(predicted - true) / np.maximum(amplitude(true), 1e-12)
