"""The ensemble of MBPO, to hold a `latent` model against: M probabilistic networks that are learnt one step
at a time.

    mu, log var = net(s, s - s_before, a)         s' = s + scale * mu
    loss = mean_k (mu_k - y_k)^2 exp(-log var_k) + log var_k,     y = (s' - s)/scale
    log var is kept within learnt bounds softly, which the loss draws together with a weight of 0.01

Of M networks those with the least error on held-out episodes are the elites; a rollout follows the mean of
their means, which errs less than a sample of one of them (`sampled`: MBPO's own, a new elite at every step
and its noise).

Sources: MBPO (Janner et al. 2019, arXiv 1906.08253) and PETS (Chua et al. 2018, arXiv 1805.12114, appendix
A.1).
Departures, all in its favour: it sees the last change of the state beside the state, its range is clipped as
`latent`'s, and optimizer, schedule, number of updates and the average of the weights are those of
`world_models.fit`.
"""

import copy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.optim import AdamW
from world_models.baselines import StepUnits
from world_models.fit import descend, grown, warm_cosine
from world_models.latent import MlpEnsemble
from world_models.options import FitOptions

MEMBERS, ELITES, LAYERS = 7, 5, 4
BOUNDS = 0.01  # weight of the bounds' distance


class Mbpo(nn.Module):
    """The networks, in the units of `u`; `elites` int64[ELITES] once it is learnt."""

    elites: Tensor

    def __init__(self, state: int, action: int, hidden: int, u: StepUnits, seed: int = 0):
        super().__init__()
        self.u, self.state = u, state
        self.net = MlpEnsemble(
            MEMBERS, 2 * state + action, hidden, LAYERS, 2 * state, torch.Generator().manual_seed(seed)
        )
        self.most, self.least = (nn.Parameter(torch.full((state,), v)) for v in (0.5, -10.0))
        self.register_buffer("elites", torch.arange(ELITES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log variances [M,B,S] of inputs [B,.] or [M,B,.]."""
        mean, log_var = self.net(x).split(self.state, -1)
        log_var = self.most - F.softplus(self.most - log_var)
        return mean, self.least + F.softplus(log_var - self.least)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Of inputs [M,B,.] and changes y [M,B,S]."""
        mean, log_var = self(x)
        fit = ((mean - y).square() * (-log_var).exp() + log_var).mean((1, 2)).sum()
        return fit + BOUNDS * (self.most - self.least).sum()

    @torch.no_grad()
    def step(self, s: np.ndarray, before: np.ndarray, a: np.ndarray) -> np.ndarray:
        """States [B,S] after a step: the mean of the elites' means."""
        mean, _ = self(self.inputs(s, before, a))
        return s + mean[self.elites].mean(0).numpy() * self.u.moved

    @torch.no_grad()
    def sampled(
        self, s: np.ndarray, before: np.ndarray, a: np.ndarray, generator: torch.Generator
    ) -> np.ndarray:
        """The same of one elite per row, drawn anew, with its noise."""
        mean, log_var = self(self.inputs(s, before, a))
        who = self.elites[torch.randint(0, ELITES, (len(s),), generator=generator)]
        rows = torch.arange(len(s))
        drawn = mean[who, rows] + (0.5 * log_var[who, rows]).exp() * torch.randn(
            len(s), self.state, generator=generator
        )
        return s + drawn.numpy() * self.u.moved

    def inputs(self, s: np.ndarray, before: np.ndarray, a: np.ndarray) -> Tensor:
        return torch.from_numpy(self.u.features(s, before, a)).float()


def width_of_size(parameters: int, state: int, action: int) -> int:
    """The hidden width at which an `Mbpo` has about as many parameters."""

    def size(h: int) -> int:
        return MEMBERS * ((2 * state + action + 1) * h + (LAYERS - 1) * (h + 1) * h + (h + 1) * 2 * state)

    return min(range(8, 2049), key=lambda h: abs(size(h) - parameters))


def learn(
    model: Mbpo, x: np.ndarray, y: np.ndarray, held: np.ndarray, options: FitOptions, seed: int = 0
) -> Mbpo:
    """The averaged model after `options.updates` of `options.batch` rows per network, its elites chosen on
    the rows `held` bool[F].

    x [F,.] as `Mbpo.inputs` gives them, y [F,S] changes / u.moved.
    """
    generator, average = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    inputs, want = (torch.from_numpy(np.asarray(v, np.float32)) for v in (x, y))
    rows = torch.from_numpy(np.flatnonzero(~held))
    params, pairs = list(model.parameters()), list(zip(average.parameters(), model.parameters(), strict=True))
    opt = AdamW(params, lr=options.lr, weight_decay=options.weight_decay, fused=False)
    for n in range(options.updates):
        opt.param_groups[0]["lr"] = warm_cosine(options.lr, n, options.updates)
        at = rows[torch.randint(0, len(rows), (MEMBERS, options.batch), generator=generator)]
        descend(model.loss(inputs[at], want[at]), opt, params, 10.0, pairs, grown(options.ema, n))
    with torch.no_grad():
        tested = torch.from_numpy(held) if held.any() else ~torch.from_numpy(held)
        error = (average(inputs[tested])[0] - want[tested]).square().mean((1, 2))
        average.elites.copy_(error.argsort()[:ELITES])
    return average
