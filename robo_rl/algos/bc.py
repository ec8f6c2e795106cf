"""Behaviour cloning of action chunks: supervised flow matching (or noise prediction), the SFT stage.

Source: flow matching (Lipman et al. 2023, eq. 9) in openpi's time convention; AdamW, cosine decay, EMA of the
weights.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from robo_rl.algos.averaged_weights import AveragedWeights
from robo_rl.algos.credit import descend, make_adam
from robo_rl.algos.onpolicy import Demos
from robo_rl.optim import Optimizer
from robo_rl.options import BcOptions
from robo_rl.policies.blocks import compiled_blocks
from robo_rl.policies.policy import Obs


def demos_sampler(
    obs: Obs, chunks: Tensor, mask: Tensor, weight: "Callable[[Tensor], Tensor] | None" = None
) -> Demos:
    """Uniform sampling of demonstration decisions: obs [M,...], chunks [M,H,A] in env units, mask [M,H],
    times the `weight` of its row."""

    def sample(size: int, generator: torch.Generator):
        rows = torch.randint(0, len(chunks), (size,), generator=generator)
        told = mask[rows] if weight is None else mask[rows] * weight(rows)[:, None]
        return {k: v[rows] for k, v in obs.items()}, chunks[rows], told

    return sample


@dataclass
class Fit:
    """What descends a loss, beside the parameters: after `update` updates, whose loss was `recent` (a running
    mean)."""

    opt: Optimizer
    average: AveragedWeights
    generator: torch.Generator
    update: int = 0
    recent: float = 0.0

    def state_dict(self) -> dict:
        """All but the average, which a checkpoint has as its policy."""
        return {
            "opt": self.opt.state_dict(),
            "generator": self.generator.get_state(),
            "update": self.update,
            "recent": self.recent,
        }

    def load_state_dict(self, state: dict) -> None:
        self.opt.load_state_dict(state["opt"])
        self.generator.set_state(state["generator"])
        self.update, self.recent = state["update"], state["recent"]


def train(
    policy,
    sample: Demos,
    options: BcOptions,
    seed: int,
    tick: Callable[[int, float], None] = lambda update, loss: None,
    begin: Callable[[Fit], None] = lambda fit: None,
) -> dict[str, float]:
    """Fit `policy` in place to the demonstrations; it ends with its averaged weights. begin: as `fit` has
    it."""
    params = [p for p in policy.parameters() if p.requires_grad]
    with compiled_blocks(policy) if options.compile else nullcontext():
        loss = fit(
            params,
            lambda g: policy.bc_loss(*sample(options.batch, g), g, options.noises),
            options,
            seed,
            tick,
            begin=begin,
        )
    policy.freeze_base()
    return {"loss": loss}


def fit(
    params: list[Tensor],
    loss_of: Callable[[torch.Generator], Tensor],
    options: BcOptions,
    seed: int,
    tick: Callable[[int, float], None] = lambda update, loss: None,
    enough: Callable[[int, float, AveragedWeights], bool] = lambda update, loss, average: False,
    begin: Callable[[Fit], None] = lambda fit: None,
) -> float:
    """Descend `loss_of` a batch drawn by a generator for `options.updates`, or until after one of them it is
    `enough`, by its number, a running mean of the loss and the averages of `params` -> that mean; `params`
    end as their averages. begin(fit): before the first update, to go on from another one's state."""
    opt = make_adam(params, options.lr, options.weight_decay)
    f = Fit(opt, AveragedWeights(params), torch.Generator().manual_seed(seed))
    begin(f)
    for update in range(f.update, options.updates):
        warm = min(1.0, (update + 1) / 100)
        opt.param_groups[0]["lr"] = (
            options.lr * warm * 0.5 * (1 + math.cos(math.pi * update / options.updates))
        )
        loss = loss_of(f.generator)
        descend(loss, params, opt, 1.0)
        decay = min(options.ema, (1 + update) / (10 + update))
        f.average.add(1 - decay)
        value = float(loss.detach())
        f.recent = value if update == 0 else 0.98 * f.recent + 0.02 * value
        f.update = update + 1
        tick(f.update, f.recent)
        if enough(f.update, f.recent, f.average):
            break
    if options.updates:
        f.average.swap()
    return f.recent


@torch.no_grad()
def mean_loss(policy, sample: Demos, options: BcOptions, seed: int, batches: int = 16) -> float:
    """Supervised loss over some batches of `sample`, with nothing learnt."""
    generator = torch.Generator().manual_seed(seed)
    return (
        sum(
            float(policy.bc_loss(*sample(options.batch, generator), generator, options.noises))
            for _ in range(batches)
        )
        / batches
    )


EXCHANGED = 16  # batches of `exchanged_loss`


@torch.no_grad()
def exchanged_loss(
    policy,
    sample: Demos,
    options: BcOptions,
    seed: int,
    batches: int = EXCHANGED,
    tick: Callable[[int], None] = lambda batch: None,
) -> float:
    """Loss of rows of `sample` that are given the instruction of the row before them in their batch, over
    their loss with their own.

    Both see the same noise. 1: what the policy does is not decided by what it is told. Rows whose
    instructions are alike are left out; nan where all are, or where the policy is told nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    own, other = 0.0, 0.0
    for batch in range(batches):
        obs, chunk, mask = sample(options.batch, generator)
        if "tokens" not in obs:
            return math.nan
        told = obs["tokens"].roll(1, 0)
        mask = mask * (told != obs["tokens"]).any(1, keepdim=True)
        if not mask.any():
            continue
        losses = [
            float(policy.bc_loss(x, chunk, mask, torch.Generator().manual_seed(seed + batch), options.noises))
            for x in (obs, obs | {"tokens": told})
        ]
        own, other = own + losses[0], other + losses[1]
        tick(batch + 1)
    return other / own if own > 0 else math.nan
