"""A fresh policy of any kind."""

import torch

from robo_rl.options import PolicyOptions
from robo_rl.policies.offpolicy import GuidedPolicy, SquashedPolicy
from robo_rl.policies.policy import ChainPolicy, GaussianPolicy, ObsSpec, Policy

KINDS = {"squashed": SquashedPolicy, "guided": GuidedPolicy, "gaussian": GaussianPolicy}  # every other one is a chain


def make_policy(options: PolicyOptions, spec: ObsSpec, seed: int) -> Policy:
    """Fresh policy with weights drawn from `seed` alone (the global generator is left as it was)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return KINDS.get(options.kind, ChainPolicy)(options, spec)
