"""One time grid, one step kernel and one Gaussian log-density for every chain method.

Convention (openpi, LeRobot, RLinf): noise at t=1, action at t=0, `x_t = (1-t) x0 + t eps`, velocity target
`eps - x0`, Euler step `x <- x - (t - t') v`. Every step of every sampler here has the form

    mean = a_k x + b_k out,     std = s_k                                                        (*)

with `out` the network output (velocity, or predicted noise for DDPM), so a chain is three tables of K
numbers.
Sources: Flow-SDE, Flow-CPS, Flow-Noise: pi_RL (arXiv 2510.25889) eq. 6-13; ReinFlow (arXiv 2505.22094) eq. 8;
DDPM (arXiv 2006.11239) eq. 6-7; DDIM (arXiv 2010.02502) eq. 12.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# one for a batch, or one for each so many rows of it
Noise = torch.Generator | list[tuple[torch.Generator, int]]
LOG_2PI = math.log(2 * math.pi)
FLOW_KINDS = ("ode", "sde", "cps")


def randn(noise: Noise, b: int, d: int, out: Tensor | None = None) -> Tensor:
    """Standard normal [b,d]; rows that have a generator of their own get the same numbers in any batch. `out`
    may be anywhere."""
    if out is not None and out.device.type != "cpu":
        return out.copy_(randn(noise, b, d), non_blocking=True)
    if isinstance(noise, torch.Generator):
        return torch.randn(b, d, generator=noise, out=out)
    return torch.cat([torch.randn(n, d, generator=g) for g, n in noise], out=out)


def randint(noise: Noise, high: int, b: int) -> Tensor:
    """Integers int64 [b] below `high`."""
    if isinstance(noise, torch.Generator):
        return torch.randint(0, high, (b,), generator=noise)
    return torch.cat([torch.randint(0, high, (n,), generator=g) for g, n in noise])


def time_grid(k: int) -> Tensor:
    """The only time grid: `[K+1]` float64 from 1 (noise) down to 0 (action), uniform."""
    if k < 1:
        raise ValueError(f"denoise steps K must be >= 1, got {k}")
    return torch.linspace(1.0, 0.0, k + 1, dtype=torch.float64)


@dataclass(frozen=True)
class ChainTable:
    """Tables of (*): `a, b, s` float32[K]; `t` float32[K] is the time the network sees at each step."""

    a: Tensor
    b: Tensor
    s: Tensor
    t: Tensor


def flow_step(x: Tensor, t: Tensor, t_next: Tensor, v: Tensor, kind: str, level: float, t_first: float):
    """Mean and std of one flow step t -> t_next; the definition the tables are tested against.

    With x0 = x - t v, x1 = x + (1-t) v and d = t - t_next:  mean = w0 x0 + w1 x1.
    ode: w0=1-t', w1=t', std=0.  sde: sigma = level sqrt(t/(1-t)), w1 = t' - sigma^2 d/(2t), std = sigma
    sqrt(d).
    cps: w1 = t' cos(pi level/2), std = t' sin(pi level/2).
    At t=1 the sde's 1-t is replaced by 1-t_first, t_first being the second grid point (sigma diverges there).
    """
    x0, x1 = x - t * v, x + (1 - t) * v
    w0, w1, std = _flow_weights(float(t), float(t_next), kind, level, t_first)
    return w0 * x0 + w1 * x1, torch.as_tensor(std, dtype=torch.float64)


def _flow_weights(
    t: float, t_next: float, kind: str, level: float, t_first: float
) -> tuple[float, float, float]:
    d = t - t_next
    if kind == "ode":
        return 1 - t_next, t_next, 0.0
    if kind == "sde":
        sigma = level * math.sqrt(t / (1 - (t_first if t == 1.0 else t))) if t_first > 0 or t < 1 else 0.0
        return 1 - t_next, t_next - sigma**2 * d / (2 * t), sigma * math.sqrt(d)
    if kind == "cps":
        return 1 - t_next, t_next * math.cos(math.pi * level / 2), t_next * math.sin(math.pi * level / 2)
    raise ValueError(f"step kind must be one of {FLOW_KINDS}, got {kind!r}")


def flow_table(k: int, kind: str, level: float = 0.0) -> ChainTable:
    """Tables of a K-step flow chain. K=1 has no second grid point before t=0, so its sde step is the ode
    step."""
    ts = time_grid(k).tolist()
    rows = []
    for t, t_next in zip(ts[:-1], ts[1:], strict=False):
        w0, w1, std = _flow_weights(t, t_next, kind, level, ts[1])
        rows.append((w0 + w1, w1 * (1 - t) - w0 * t, std, t))
    return ChainTable(*torch.tensor(rows, dtype=torch.float32).T.contiguous().unbind(0))


def action_table(table: ChainTable) -> ChainTable:
    """The same flow chain for a network whose `out` is the clean chunk D: with v = (x - D)/t,

    a x + b v = (a + b/t) x - (b/t) D.
    """
    return ChainTable(table.a + table.b / table.t, -table.b / table.t, table.s, table.t)


def cosine_alphas(k: int) -> Tensor:
    """`[K]` float64 cumulative alphas of the cosine schedule (Nichol & Dhariwal 2021, eq. 17), least noisy
    first."""
    s = 0.008
    f = torch.cos((torch.arange(k + 1, dtype=torch.float64) / k + s) / (1 + s) * math.pi / 2) ** 2
    betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
    return torch.cumprod(1 - betas, 0)


def diffusion_table(train_steps: int, k: int, eta: float) -> tuple[ChainTable, Tensor, Tensor]:
    """Tables of a K-step DDIM chain over a `train_steps` cosine schedule that predicts the noise.

    Returns the table (noisiest step first; eta=1 with k=train_steps is DDPM, eta=0 deterministic DDIM), the
    cumulative alphas [K] of its steps and those of the steps before [K] (1 at the last).
    x0 = (x - sqrt(1-ab) eps)/sqrt(ab); sigma = eta sqrt((1-ab')/(1-ab)) sqrt(1-ab/ab');
    mean = sqrt(ab') x0 + sqrt(1-ab'-sigma^2) eps.
    """
    if train_steps % k:
        raise ValueError(f"denoise steps K must divide the {train_steps} training steps, got {k}")
    bars = cosine_alphas(train_steps)
    steps = torch.arange(k, dtype=torch.long) * (train_steps // k) + (train_steps // k - 1)
    ab = bars[steps].flip(0)
    ab_prev = torch.cat([ab[1:], torch.ones(1, dtype=torch.float64)])
    sigma = eta * torch.sqrt((1 - ab_prev) / (1 - ab) * (1 - ab / ab_prev))
    direction = torch.sqrt((1 - ab_prev - sigma**2).clamp(min=0))
    a = torch.sqrt(ab_prev / ab)
    b = direction - a * torch.sqrt(1 - ab)
    t = (steps.flip(0).double() + 1) / train_steps
    return ChainTable(a.float(), b.float(), sigma.float(), t.float()), ab.float(), ab_prev.float()


def gaussian_logp(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Elementwise log N(x; mean, std^2); exactly 0 where std == 0 (a deterministic step has no density
    factor)."""
    random = std > 0
    safe = torch.where(random, std, 1.0)
    logp = torch.add(-0.5 * LOG_2PI - torch.log(safe), ((x - mean) / safe).square(), alpha=-0.5)
    return torch.where(random, logp, 0.0)


def gaussian_kl(mean: Tensor, std: Tensor, mean2: Tensor, std2: Tensor) -> Tensor:
    """Elementwise KL(N(mean, std^2) || N(mean2, std2^2)) [nats]; 0 where std == 0, as `gaussian_logp`.

    log(std2/std) + (std^2 + (mean - mean2)^2) / (2 std2^2) - 1/2
    """
    random = std > 0
    a, b = torch.where(random, std, 1.0), torch.where(random, std2, 1.0)
    kl = torch.log(b / a) + (a.square() + (mean - mean2).square()) / (2 * b.square()) - 0.5
    return torch.where(random, kl, 0.0)


def chunk_logp(x: Tensor, mean: Tensor, std: Tensor, executed: int, reduction: str) -> Tensor:
    """Log-density of a step of chunks `[..., H, A]` over the executed E x A slice alone -> `[...]`.

    `std` broadcasts against x. reduction "sum" is the joint density; "mean" divides it by E*A, so its ratio
    is the (E*A)-th root of the other and clip ranges do not carry over between the two.
    """
    logp = gaussian_logp(
        x[..., :executed, :], mean[..., :executed, :], std if std.dim() < 2 else std[..., :executed, :]
    )
    if reduction == "sum":
        return logp.sum((-2, -1))
    if reduction == "mean":
        return logp.mean((-2, -1))
    raise ValueError(f"logp_reduction must be 'sum' or 'mean', got {reduction!r}")


def drawn_table(quiet: ChainTable, loud: ChainTable, learned: bool, entries: tuple[int, float]) -> Tensor:
    """`[K, 3K+2]`: row j holds a, b and std of every step of a chain whose random step is j, then two numbers
    of step j: its log-density is the first plus the second times the sum of the squared noise.

    With a learned std the std columns are 1 (the step is random) or 0, and the first number leaves out log
    std.
    """
    random, (count, scale) = torch.eye(len(quiet.a), dtype=torch.bool), entries
    std = torch.ones_like(loud.s) if learned else loud.s
    a, b = torch.where(random, loud.a, quiet.a), torch.where(random, loud.b, quiet.b)
    zero = torch.zeros(1, count)
    constant = [float(chunk_logp(zero[None], zero[None], s, 1, "sum")) * scale for s in std]
    factor = -0.5 * scale * (std > 0)
    return torch.cat([a, b, random * std, torch.stack([torch.tensor(constant), factor], 1)], 1)
