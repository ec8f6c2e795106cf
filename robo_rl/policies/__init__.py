"""Policies: observation -> chunk of actions, with the exact log-probability of the chain that made it."""

from robo_rl.policies.policy import Chunk, ObsSpec, Policy, make_policy, obs_tensors

__all__ = ["Chunk", "ObsSpec", "Policy", "make_policy", "obs_tensors"]
