"""Policies: observation -> chunk of actions, with the exact log-probability of the chain that made it.

The names below are fetched on first use, so that `robo_rl.policies.numpy_actor` runs on a robot without
torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from robo_rl.policies.make import make_policy
    from robo_rl.policies.policy import Chunk, ObsSpec, Policy, blank_obs, obs_tensors

__all__ = ["Chunk", "ObsSpec", "Policy", "blank_obs", "make_policy", "obs_tensors"]


def __getattr__(name: str):
    if name == "make_policy":
        from robo_rl.policies.make import make_policy

        return make_policy
    if name in __all__:
        from robo_rl.policies import policy

        return getattr(policy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
