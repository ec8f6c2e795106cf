"""SynthER: a diffusion model of single transitions, from which replay is topped up.

A row is [s, a, r, s', end], every dimension normalised to mean 0 and std 1; the denoiser and its sampler are
those of EDM:

    D(x; sigma) = c_skip x + c_out F(c_in x; ln(sigma)/4)
    c_skip = d^2/(sigma^2 + d^2),  c_out = sigma d/sqrt(sigma^2 + d^2),  c_in = 1/sqrt(sigma^2 + d^2),  d = 1
    loss = E (sigma^2 + d^2)/(sigma d)^2 |D(y + sigma n; sigma) - y|^2,   ln sigma ~ N(-1.2, 1.2^2)

and Heun's method on the Karras grid, with churn. Samples are clipped to the range of the data; the end is
"above 1/2".
Only real rows may train it: `Transitions` keeps a source, and `fit` refuses others.

Sources: SynthER (arXiv 2303.06614); EDM (arXiv 2206.00364) table 1, alg. 2.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.errors import UserError, choose, in_range
from robo_rl.optim import AdamW, kernels

Guide = Callable[[Tensor, float, int, int], Tensor]  # (x [B,..,D], sigma, step, steps) -> what is added to x


@dataclass(frozen=True, slots=True, eq=False)
class Transitions:
    """M control steps: obs, next_obs float32[M,S], action float32[M,A], reward float32[M], terminated
    bool[M].

    `source` is "real" or "synthetic": a generator is learnt from real ones alone.
    """

    obs: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    next_obs: np.ndarray
    terminated: np.ndarray
    source: str = "real"

    def __post_init__(self) -> None:
        choose("source of transitions", self.source, ("real", "synthetic"))
        m = len(self.obs)
        shapes = {
            "action": len(self.action),
            "reward": len(self.reward),
            "next_obs": len(self.next_obs),
            "terminated": len(self.terminated),
        }
        for name, n in shapes.items():
            if n != m:
                raise UserError(f"transitions need one {name} per observation, got {n} for {m}")
        if self.obs.shape != self.next_obs.shape:
            raise UserError(
                f"obs and next_obs must have one shape, got {self.obs.shape} and {self.next_obs.shape}"
            )

    def __len__(self) -> int:
        return len(self.obs)


def rows_of(t: Transitions) -> np.ndarray:
    """float32 [M, 2S+A+2]."""
    return np.concatenate([t.obs, t.action, t.reward[:, None], t.next_obs, t.terminated[:, None]], 1).astype(
        np.float32
    )


def transitions_of(rows: np.ndarray, state: int, action: int, source: str = "synthetic") -> Transitions:
    """The inverse of `rows_of`."""
    s, a, r, after, end = np.split(rows, np.cumsum([state, action, 1, state]), 1)
    return Transitions(s, a, r[:, 0], after, end[:, 0] > 0.5, source)


# ---- EDM ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SynthOptions:
    """Network, training and sampler; the paper's sizes are hidden 1024, layers 6, updates 100000."""

    hidden: int = 256
    layers: int = 4
    updates: int = 3000
    batch: int = 256
    lr: float = 3e-4
    ema: float = 0.995
    steps: int = 32
    """Sampler steps (the paper: 128)."""
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    churn: float = 0.0
    """S_churn (the paper: 80); 0 is the deterministic sampler."""
    churn_noise: float = 1.003

    def __post_init__(self) -> None:
        for name, low, high in (
            ("hidden", 8, 8192),
            ("layers", 1, 32),
            ("updates", 0, 10**8),
            ("batch", 1, 10**6),
            ("steps", 2, 10**4),
            ("rho", 1, 100),
            ("churn", 0, 1e4),
            ("churn_noise", 0.5, 2),
        ):
            in_range(f"synth.{name}", getattr(self, name), low, high)
        in_range("synth.lr", self.lr, 0, 1, open_low=True)
        in_range("synth.ema", self.ema, 0, 1, open_high=True)
        in_range("synth.sigma_min", self.sigma_min, 0, self.sigma_max, open_low=True)


PLAIN = SynthOptions()


class Residual(nn.Module):
    """F: x [B,D] and noise [B] -> [B,D]; the output layer begins at 0."""

    rates: Tensor

    def __init__(self, dim: int, hidden: int, layers: int):
        super().__init__()
        self.enter, self.noise = nn.Linear(dim, hidden), nn.Linear(32, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.leave = nn.Linear(hidden, dim)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)
        self.register_buffer("rates", 2.0 ** torch.linspace(-3, 5, 16), persistent=False)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        angle = noise[:, None] * self.rates
        h = self.enter(x) + self.noise(torch.cat([angle.sin(), angle.cos()], 1))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = h + torch.nn.functional.silu(layer(norm(h)))
        return self.leave(h)


def denoise(net: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigma: Tensor) -> Tensor:
    """D(x; sigma) for x [B,...], sigma [B]."""
    s = sigma.view(-1, *[1] * (x.dim() - 1))
    total = s.square() + 1
    return x / total + s / total.sqrt() * net(x / total.sqrt(), sigma.log() / 4)


def edm_loss(net: Callable[[Tensor, Tensor], Tensor], y: Tensor, generator: torch.Generator) -> Tensor:
    """The loss above on clean normalised y [B,...]."""
    sigma = (torch.randn(len(y), generator=generator) * 1.2 - 1.2).exp()
    s = sigma.view(-1, *[1] * (y.dim() - 1))
    noise = torch.randn(y.shape, generator=generator)
    return ((s.square() + 1) / s.square() * (denoise(net, y + s * noise, sigma) - y).square()).mean()


def noise_levels(o: SynthOptions) -> list[float]:
    """Karras grid: steps levels from sigma_max to sigma_min, then 0."""
    i = torch.linspace(0, 1, o.steps, dtype=torch.float64)
    a, b = o.sigma_max ** (1 / o.rho), o.sigma_min ** (1 / o.rho)
    return [*((a + i * (b - a)) ** o.rho).tolist(), 0.0]


@torch.no_grad()
def heun(
    net: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, ...],
    o: SynthOptions,
    generator: torch.Generator,
    guide: "Guide | None" = None,
) -> Tensor:
    """EDM's alg. 2; `guide` may add to x after every step but the last."""
    levels = noise_levels(o)
    x = levels[0] * torch.randn(shape, generator=generator)
    gamma = min(o.churn / o.steps, math.sqrt(2) - 1)

    def slope(x: Tensor, sigma: float) -> Tensor:
        return (x - denoise(net, x, torch.full((len(x),), sigma))) / sigma

    for i, (sigma, after) in enumerate(pairwise(levels)):
        if gamma and 0.05 <= sigma <= 50:
            raised = sigma * (1 + gamma)
            x = x + math.sqrt(raised**2 - sigma**2) * o.churn_noise * torch.randn(shape, generator=generator)
            sigma = raised
        d = slope(x, sigma)
        moved = x + (after - sigma) * d
        if after > 0:
            moved = x + (after - sigma) * 0.5 * (d + slope(moved, after))
            if guide is not None:
                moved = moved + guide(moved, after, i, o.steps)
        x = moved
    return x


class Generator:
    """A learnt distribution of rows [.., D]: the net, the rows' statistics and range."""

    def __init__(
        self, net: nn.Module, mean: Tensor, std: Tensor, low: Tensor, high: Tensor, options: SynthOptions
    ):
        self.net, self.mean, self.std, self.low, self.high, self.options = net, mean, std, low, high, options

    def rows(self, shape: tuple[int, ...], seed: int, guide: "Guide | None" = None) -> np.ndarray:
        """Samples of the given shape, denormalised and clipped to the data's range. The seed decides them."""
        x = heun(self.net, shape, self.options, torch.Generator().manual_seed(seed), guide)
        return torch.minimum(torch.maximum(x * self.std + self.mean, self.low), self.high).numpy()


def learn(
    net: nn.Module,
    rows: Tensor,
    options: SynthOptions,
    seed: int = 0,
    tick: Callable[[int, float], None] = lambda update, loss: None,
) -> Generator:
    """Fit `net` to rows [M,...,D] and keep the running average of its weights."""
    flat = rows.flatten(0, -2)
    mean, std = flat.mean(0), flat.std(0)
    std = torch.where(std > 1e-5, std, torch.ones(()))  # a constant passes through
    y, generator = (rows - mean) / std, torch.Generator().manual_seed(seed)
    average = copy.deepcopy(net).requires_grad_(False)
    opt = AdamW(net.parameters(), options.lr, fused=False)
    for n in range(options.updates):
        opt.param_groups[0]["lr"] = options.lr * 0.5 * (1 + math.cos(math.pi * n / options.updates))
        value = edm_loss(net, y[torch.randint(0, len(y), (options.batch,), generator=generator)], generator)
        opt.zero_grad()
        value.backward()
        opt.step()
        decay = min(options.ema, (1 + n) / (10 + n))
        with torch.no_grad():
            kernels._foreach_lerp_(
                list(average.parameters()), [p.detach() for p in net.parameters()], 1 - decay
            )
        tick(n + 1, float(value.detach()))
    return Generator(average, mean, std, flat.amin(0), flat.amax(0), options)


# ---- SynthER -----------------------------------------------------------------------------------------------


class Upsampler:
    """SynthER on real transitions: `sample(n, seed)` gives as many as wanted."""

    def __init__(
        self,
        real: Transitions,
        options: SynthOptions = PLAIN,
        seed: int = 0,
        tick: Callable[[int, float], None] = lambda update, loss: None,
    ):
        if real.source != "real":
            raise UserError(
                "synthetic transitions must not train the generator that made them: give the real ones"
            )
        if len(real) < 256:
            raise UserError(f"SynthER needs at least 256 real transitions, got {len(real)}")
        rows = torch.from_numpy(rows_of(real))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = Residual(rows.shape[1], options.hidden, options.layers)
        self.state, self.action = real.obs.shape[1], real.action.shape[1]
        self.generator = learn(net, rows, options, seed, tick)

    def sample(self, n: int, seed: int, batch: int = 4096) -> Transitions:
        """n synthetic transitions, decided by the seed (and the batch)."""
        dim = 2 * self.state + self.action + 2
        parts = [
            self.generator.rows((min(batch, n - k), dim), seed * 1_000_003 + k) for k in range(0, n, batch)
        ]
        return transitions_of(
            np.concatenate([np.zeros((0, dim), np.float32), *parts]), self.state, self.action
        )


def share(total: int, ratio: float) -> int:
    """How many of a batch of `total` are synthetic: ratio * total, rounded; 0 at ratio 0, all at 1,
    exactly."""
    in_range("synthetic ratio", ratio, 0, 1)
    return round(ratio * total)


def mixed(
    real: Transitions, synthetic: Transitions, batch: int, ratio: float, rng: np.random.Generator
) -> Transitions:
    """A batch with exactly `share(batch, ratio)` synthetic rows after the real ones.

    At ratio 0 it draws from `rng` what sampling the real ones alone draws, so the run is the base agent's
    exactly.
    """
    k = share(batch, ratio)
    parts = [(real, rng.integers(0, len(real), batch - k))] if k < batch else []
    if k:
        if not len(synthetic):
            raise UserError(f"a synthetic ratio of {ratio:g} needs synthetic transitions: sample some first")
        parts.append((synthetic, rng.integers(0, len(synthetic), k)))

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(t, name)[i] for t, i in parts])

    return Transitions(
        *(joined(n) for n in ("obs", "action", "reward", "next_obs", "terminated")),
        source="synthetic" if k else "real",
    )


def quality(made: Transitions, real: Transitions, most: int = 4000, seed: int = 0) -> dict[str, float]:
    """How like real transitions made ones are, as three figures that are 0 where they are the same
    distribution's.

    marginals: mean over [s, a, r, s'] of Wasserstein's distance in units of the real std; correlations: mean
    absolute difference of their off-diagonal entries; dynamics: root mean square of s' less what ridge
    regression on (s, a) with squares and products of the real ones says, over that of the real ones, less 1
    (s' - s in units of its std).
    """
    rng = np.random.default_rng([seed, 79])
    a, b = (rows_of(t)[rng.permutation(len(t))[:most], :-1] for t in (made, real))
    std = b.std(0)
    moves = std > 1e-6
    q = np.linspace(0.005, 0.995, 100)
    far = np.abs(np.quantile(a, q, axis=0) - np.quantile(b, q, axis=0)).mean(0)
    both = moves & (a.std(0) > 1e-6)
    off = ~np.eye(int(both.sum()), dtype=bool)
    differ = np.abs(np.corrcoef(a[:, both].T) - np.corrcoef(b[:, both].T))[off]
    held, taught = np.split(rng.permutation(len(real)), [len(real) // 5])
    law = dynamics_law(real, taught)
    return {
        "marginals": float((far / np.where(moves, std, 1))[moves].mean()),
        "correlations": float(differ.mean()),
        "dynamics": law(made, rng.permutation(len(made))[:most]) / max(law(real, held[:most]), 1e-9) - 1,
    }


def dynamics_law(t: Transitions, rows: np.ndarray) -> Callable[[Transitions, np.ndarray], float]:
    """Learn s' - s from `rows` of t by ridge regression on (s, a) with squares and products -> (transitions,
    rows) to its error."""
    x = np.concatenate([t.obs, t.action], 1)[rows].astype(np.float64)
    change = (t.next_obs - t.obs)[rows].astype(np.float64)
    mean, std = x.mean(0), np.maximum(x.std(0), 1e-6)
    scale = change.std(0)
    used = scale > 1e-6

    def design(x: np.ndarray) -> np.ndarray:
        z = ((x - mean) / std).clip(-5, 5)
        i, j = np.triu_indices(z.shape[1])
        return np.concatenate([z, z[:, i] * z[:, j], np.ones((len(z), 1))], 1)

    d = design(x)
    weight = np.linalg.solve(
        d.T @ d + 1e-3 * len(d) * np.eye(d.shape[1]), d.T @ (change[:, used] / scale[used])
    )

    def error(other: Transitions, rows: np.ndarray) -> float:
        x = np.concatenate([other.obs, other.action], 1)[rows].astype(np.float64)
        y = (other.next_obs - other.obs)[rows][:, used] / scale[used]
        return float(np.sqrt(np.square(design(x) @ weight - y).mean()))

    return error


def fill(replay, t: Transitions, source: int = 0) -> None:
    """Put transitions into a `robo_rl.replay.Replay` of states as episodes of one step each, `replay.lanes`
    at a time.

    Where t is not terminal the step's value goes on from next_obs, as after a time limit.
    """
    for k in range(0, len(t), replay.lanes):
        rows = slice(k, min(k + replay.lanes, len(t)))
        lanes = np.arange(rows.stop - rows.start)
        replay.add(lanes, {"state": t.obs[rows]}, t.action[rows], t.reward[rows], t.terminated[rows], source)
        replay.close(lanes, {"state": t.next_obs[rows]})
