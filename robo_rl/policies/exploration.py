"""How much a policy explores, as one number: the std of what it draws around its action."""

import copy
from dataclasses import replace
from typing import Any

import torch

from robo_rl.errors import UserError

BAND = 1.1  # a learned std stays within this factor of the level


def explores_by_level(options) -> bool:
    """Whether `with_level` takes a policy of these options: a Gaussian, or a flow whose std is learned."""
    return options.kind == "gaussian" or options.is_flow and options.noise == "learned"


def level_of(options) -> float:
    """The level that `with_level` gave a policy of these options."""
    return options.init_std if options.kind == "gaussian" else options.noise_max / BAND


def with_level(policy: Any, level: float) -> Any:
    """The same policy with exploration noise of std `level` [normalised action units]: of a Gaussian exactly,
    of a flow with a learned std within `BAND` of it. UserError: a policy that explores otherwise."""
    if not explores_by_level(policy.options):
        raise UserError(
            "exploration noise has one level where --policy.kind is gaussian, or a flow with --policy.noise "
            f"learned; got {policy.options.kind} and {policy.options.noise}"
        )
    made = copy.deepcopy(policy)
    if policy.options.kind == "gaussian":
        made.options = replace(policy.options, init_std=level)
        with torch.no_grad():
            made.log_std.fill_(level).log_()
        return made
    made.options = replace(policy.options, noise_min=level / BAND, noise_max=level * BAND)
    made.noise.low = made.options.noise_min
    made.noise.high.fill_(made.options.noise_max)
    return made
