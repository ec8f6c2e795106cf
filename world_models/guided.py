"""Policy-guided diffusion: whole trajectories of the data's behaviour, pushed towards a policy of today.

A diffusion model of windows [T, S+A+2] (state, action, reward, end of each step) is sampled by EDM; after
every step but the last, the ACTIONS of x are moved along the policy's score,

    a <- a + lambda_i g
    g        = grad_a log pi(a|s), in normalised units: by the chain rule std_a * grad of the raw one
    lambda_i = c [1 - i/n + 0.3 sin(pi (i+1)/n)]

at the denoised estimate of s and a. The target is p_data(tau) prod pi(a|s)^lambda; c = 0 samples the data's
model exactly. A deterministic policy is taken as a Gaussian of unit variance around pi(s), in normalised
units of the action.

Source: Policy-Guided Diffusion (arXiv 2404.06356) eq. 9 and alg. 1. Departure: a residual perceptron over the
flattened window with the step's place, not a U-Net, as windows are short here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.errors import UserError, in_range
from world_models.synther import PLAIN, Generator, Residual, SynthOptions, Transitions, denoise, learn

Mean = Callable[[Tensor], Tensor]  # states [B,S] in env units -> the policy's mean actions [B,A] in env units


@dataclass(frozen=True, kw_only=True)
class GuideOptions:
    """How strongly, and how long the windows are."""

    window: int = 16
    """T: steps of a trajectory (the paper: 32)."""
    strength: float = 1.0
    """c; 0 is the unguided sampler."""
    unit: bool = True
    """Each step's g made a unit vector."""
    denoised: bool = True
    """Take the score at the denoised estimate, not at the noisy x."""

    def __post_init__(self) -> None:
        in_range("guide.window", self.window, 2, 1024)
        in_range("guide.strength", self.strength, 0, 1e6)


PLAIN_GUIDE = GuideOptions()


class Flat(nn.Module):
    """A `Residual` over windows [B,T,D]."""

    def __init__(self, window: int, dim: int, hidden: int, layers: int):
        super().__init__()
        self.net = Residual(window * dim, hidden, layers)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return self.net(x.flatten(1), noise).view_as(x)


def schedule(i: int, n: int, strength: float) -> float:
    """lambda_i of step i = 0 .. n-1."""
    return strength * (1 - i / n + 0.3 * math.sin(math.pi * (i + 1) / n))


def windows_of(
    state: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    terminated: np.ndarray,
    first: np.ndarray,
    end: np.ndarray,
    length: int,
) -> np.ndarray:
    """Every stretch of `length` recorded steps inside one episode: float32 [M,T,S+A+2]. Episodes own rows
    first[e] .. end[e]-1; terminated bool[E] says whether the last step of each ended it."""
    starts = [np.arange(a, b - length + 1) for a, b in zip(first, end, strict=True) if b - a >= length]
    if not starts:
        raise UserError(f"no recorded episode has {length} steps: choose a shorter window")
    rows = np.concatenate(starts)[:, None] + np.arange(length)
    over = np.zeros(len(state), np.float32)
    over[np.asarray(end)[np.asarray(terminated, bool)] - 1] = 1
    every = np.concatenate([state, action, reward[:, None], over[:, None]], 1).astype(np.float32)
    return every[rows]


class Guided:
    """Trajectories of recorded behaviour, and of those a policy would rather have."""

    def __init__(
        self,
        windows: np.ndarray,
        state: int,
        action: int,
        options: GuideOptions = PLAIN_GUIDE,
        synth: SynthOptions = PLAIN,
        seed: int = 0,
        tick: Callable[[int, float], None] = lambda update, loss: None,
    ):
        if windows.ndim != 3 or windows.shape[2] != state + action + 2 or windows.shape[1] != options.window:
            raise UserError(
                f"windows must have shape [M, {options.window}, {state + action + 2}], got "
                f"{list(windows.shape)}"
            )
        self.state, self.action, self.options = state, action, options
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = Flat(options.window, windows.shape[2], synth.hidden, synth.layers)
        self.generator: Generator = learn(net, torch.from_numpy(windows), synth, seed, tick)

    def guide(self, mean: Mean):
        """What `synther.heun` adds to x after a step."""
        g, s, a, o = self.generator, self.state, self.action, self.options
        std_a = g.std[s : s + a]

        def push(x: Tensor, sigma: float, i: int, n: int) -> Tensor:
            at = denoise(g.net, x, torch.full((len(x),), sigma)) if o.denoised else x
            raw = at * g.std + g.mean
            want = mean(raw[..., :s].reshape(-1, s)).view(*raw.shape[:-1], a)
            # pi is N(mean, (std_a)^2), so d log pi / d a = (mean - a) / std_a^2 and, times std_a, the
            # normalised gradient
            score = (want - raw[..., s : s + a]) / std_a
            if o.unit:
                score = score / (score.norm(dim=-1, keepdim=True) + 1e-8)
            out = torch.zeros_like(x)
            out[..., s : s + a] = schedule(i, n, o.strength) * score
            return out

        return push

    def sample(self, n: int, seed: int, mean: "Mean | None" = None) -> np.ndarray:
        """n windows [n,T,S+A+2]; guided by a policy's mean action if it is given and the strength is not
        0."""
        guide = self.guide(mean) if mean is not None and self.options.strength > 0 else None
        shape = (n, self.options.window, self.state + self.action + 2)
        return self.generator.rows(shape, seed, guide)

    def transitions(self, windows: np.ndarray) -> Transitions:
        """Steps of sampled windows that have a successor in them, up to the first end: a replay source."""
        s, a = self.state, self.action
        over = windows[..., -1] > 0.5
        alive = np.cumsum(over, 1) - over == 0
        keep = alive[:, :-1]
        now, after = windows[:, :-1][keep], windows[:, 1:][keep]
        return Transitions(
            now[:, :s], now[:, s : s + a], now[:, s + a], after[:, :s], now[:, -1] > 0.5, "synthetic"
        )
