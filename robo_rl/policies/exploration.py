"""How much a policy explores, as one number: the std of what it draws around its action."""

import copy
from dataclasses import replace
from typing import Any

import torch

from robo_rl.errors import UserError

BAND = 1.1  # a learned std stays within this factor of the level


def explores_by_level(options) -> bool:
    """Whether `with_level` takes a policy of these options: a Gaussian, a flow whose std is learned, or a
    diffusion policy whose last step alone learns and whose noise is its floor."""
    if options.kind == "diffusion":
        return options.finetune_steps == 1 and not options.std_scale
    return options.kind == "gaussian" or options.is_flow and options.noise == "learned"


def explores(algo: str, options) -> bool:
    """Whether rollouts of a method are sampled with noise. nft, which needs none, takes it where it has one
    level."""
    return algo != "nft" or explores_by_level(options)


def level_of(options) -> float:
    """The level that `with_level` gave a policy of these options."""
    if options.kind == "diffusion":
        return options.std_floor
    return options.init_std if options.kind == "gaussian" else options.noise_max / BAND


def with_level(policy: Any, level: float) -> Any:
    """The same policy with exploration noise of std `level` [normalised action units]: of a flow with a
    learned std within `BAND` of it, of others exactly. UserError: a policy that explores otherwise."""
    if not explores_by_level(policy.options):
        raise UserError(
            "exploration noise has one level where --policy.kind is gaussian, a flow with --policy.noise "
            "learned, or diffusion with --policy.finetune-steps 1 and --policy.std-scale 0; got "
            f"{policy.options.kind} and {policy.options.noise}"
        )
    made = copy.deepcopy(policy)
    if policy.options.kind == "gaussian":
        made.options = replace(policy.options, init_std=level)
        with torch.no_grad():
            made.log_std.fill_(level).log_()
        return made
    if policy.options.kind == "diffusion":
        made.options = replace(policy.options, std_floor=level)
        made.make_tables()
        return made.to(policy.times.device)
    made.options = replace(policy.options, noise_min=level / BAND, noise_max=level * BAND)
    made.noise.low = made.options.noise_min
    made.noise.high.fill_(made.options.noise_max)
    return made
