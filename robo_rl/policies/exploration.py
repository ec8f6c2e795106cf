"""How much a policy explores, as one number: the std of what it draws around its action."""

from dataclasses import replace
from typing import Any

import torch

from robo_rl.errors import UserError

BAND = 1.1  # a learned std stays within this factor of the level


def explores_by_level(options) -> bool:
    """Whether `with_level` takes a policy of these options: a Gaussian, or a small flow whose std is learned."""
    return options.kind == "gaussian" or options.kind == "flow" and options.noise == "learned"


def level_of(options) -> float:
    """The level that `with_level` gave a policy of these options."""
    return options.init_std if options.kind == "gaussian" else options.noise_max / BAND


def with_level(policy: Any, level: float) -> Any:
    """The same policy with exploration noise of std `level` [normalised action units]: of a Gaussian exactly, of a flow with a learned
    std within `BAND` of it. UserError: a policy that explores otherwise."""
    from robo_rl.policies.make import make_policy

    if not explores_by_level(policy.options):
        raise UserError(f"exploration noise has one level where --policy.kind is gaussian, or flow with --policy.noise learned; got "
                        f"{policy.options.kind} and {policy.options.noise}")
    changes: dict[str, Any] = {"init_std": level} if policy.options.kind == "gaussian" else {
        "noise_min": level / BAND, "noise_max": level * BAND}
    made: Any = make_policy(replace(policy.options, **changes), policy.spec, 0).to(next(policy.parameters()).device)
    made.load_state_dict(policy.state_dict())
    with torch.no_grad():
        if policy.options.kind == "gaussian":
            made.log_std.fill_(level).log_()
        else:
            made.noise.high.fill_(level * BAND)
    return made.train(policy.training)
