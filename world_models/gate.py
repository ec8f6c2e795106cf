"""When to trust a rollout, learnt: the error that a model has at each step, from what is known there without
the truth.

    log error_t ~ w . (z, z_i z_j),   z = standardised logs of u_t, u_t - u_(t-1), d_t, mean d_1..t, t
    u: the model's uncertainty since its start        d: distance of (s, s - before, a) to the nearest
                                                      recorded step (the memory)
    gate_t = max_(k <= t) exp(w . ...)                a rollout is trusted while gate_t <= threshold

The ensemble's disagreement alone is one number of these: it is small where all members are wrong alike, which
the distance to what was recorded may tell. `Gate` is the uncertainty of a `latent` model learnt with `robo_rl
wm train --gate`; `world_models.gate_report` holds it beside a threshold on the disagreement.

After PF-OPSD, a learnt choice between a world model and memory. Departure: least squares on errors that were
measured, in place of a policy that is distilled; states in place of words.

Axes: `N` lanes, `B` windows, `T` control steps, `D` inputs of a step, `K` rows of memory, `Q` = 5 quantities.
"""

import numpy as np
import torch
from torch import Tensor, nn

MEMORY = 2000  # recorded steps that distances are measured to
QUANTITIES = 5
TINY = 1e-6  # added to each before its logarithm is taken
PENALTY = 1e-3  # of standardised features, per row


class ErrorLaw(nn.Module):
    """Quantities [...,Q] -> expected error [...], within the range of the errors it was learnt from."""

    mean: Tensor
    std: Tensor
    weight: Tensor
    range: Tensor

    def __init__(self):
        super().__init__()
        features = QUANTITIES + QUANTITIES * (QUANTITIES + 1) // 2
        for name, value in (
            ("mean", torch.zeros(QUANTITIES)),
            ("std", torch.ones(QUANTITIES)),
            ("weight", torch.zeros(features + 1)),
            ("range", torch.zeros(2)),
        ):
            self.register_buffer(name, value)

    def design(self, quantities: Tensor) -> Tensor:
        z = (((quantities + TINY).log() - self.mean) / self.std).clamp(-5, 5)
        i, j = torch.triu_indices(QUANTITIES, QUANTITIES)
        return torch.cat([z, z[..., i] * z[..., j], torch.ones_like(z[..., :1])], -1)

    def fit(self, quantities: Tensor, error: Tensor) -> "ErrorLaw":
        """Least squares of log error [n] on quantities [n,Q], with a small penalty -> itself."""
        logs, y = (quantities + TINY).log(), (error + TINY).log().double()
        self.mean.copy_(logs.mean(0))
        self.std.copy_(logs.std(0).clamp(min=1e-3))
        x = self.design(quantities).double()
        penalties = PENALTY * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
        penalties[-1, -1] = 0
        self.weight.copy_(torch.linalg.solve(x.T @ x + penalties, x.T @ y))
        self.range.copy_(torch.stack([y.min(), y.max()]))
        return self

    def forward(self, quantities: Tensor) -> Tensor:
        return (self.design(quantities) @ self.weight).clamp(self.range[0], self.range[1]).exp()


class Gate(nn.Module):
    """A law of the error and the memory that its distances are to, kept as buffers."""

    memory: Tensor  # [K,D]

    def __init__(self, inputs: int):
        super().__init__()
        self.law = ErrorLaw()
        self.register_buffer("memory", torch.zeros(MEMORY, inputs))

    def remember(self, inputs: Tensor, seed: int) -> "Gate":
        """Keep MEMORY rows of recorded inputs [F,D] (some more than once where there are fewer) -> itself."""
        rows = np.random.default_rng([seed, 71]).permutation(
            np.resize(np.arange(len(inputs)), max(MEMORY, len(inputs)))
        )[:MEMORY]
        self.memory.copy_(inputs[torch.from_numpy(rows)])
        return self

    def distance(self, inputs: Tensor) -> Tensor:
        """[N] of inputs [N,D], root mean square over D."""
        return nearest(inputs, self.memory)

    def quantities(self, u: Tensor, grown: Tensor, far: Tensor, total: Tensor, t: Tensor) -> Tensor:
        """[...,Q] of the uncertainty, its growth in the step, the distance, the sum of distances and the
        number of steps so far."""
        return torch.stack([u, grown.clamp(min=0), far, total / t, t], -1)

    def along(self, inputs: Tensor, u: Tensor) -> Tensor:
        """[B,T,Q] of rollouts with inputs [B,T,D] and uncertainty [B,T]."""
        far = self.distance(inputs.flatten(0, 1)).view_as(u)
        grown = torch.cat([u[:, :1], u[:, 1:] - u[:, :-1]], 1)
        t = torch.arange(1, u.shape[1] + 1, dtype=u.dtype).expand_as(u)
        return self.quantities(u, grown, far, far.cumsum(1), t)


def nearest(x: Tensor, memory: Tensor) -> Tensor:
    """[N] root mean square difference of x [N,D] to the nearest row of memory [K,D]."""
    parts = [torch.cdist(rows, memory).amin(1) for rows in x.split(2048)]
    return torch.cat(parts) / memory.shape[1] ** 0.5


def before_steps(start: np.ndarray, before: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(state, state before it) [B,T,S] that each step of a rollout begins in, of states after the steps
    [B,T,S]."""
    s = np.concatenate([start[:, None], states[:, :-1]], 1)
    return s, np.concatenate([before[:, None], s[:, :-1]], 1)
