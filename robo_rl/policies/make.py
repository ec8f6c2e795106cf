"""A fresh policy of any kind, ours or the user's own."""

from functools import cache
from typing import Any

import torch

from robo_rl.errors import UserError
from robo_rl.lora import attach
from robo_rl.options import FROM_REPLAY, VLAS, PolicyOptions
from robo_rl.plugins import check_call, is_object, load_object
from robo_rl.policies.blocks import recompute
from robo_rl.policies.committed import CommittedPolicy
from robo_rl.policies.offpolicy import GuidedPolicy, SquashedPolicy
from robo_rl.policies.policy import ChainPolicy, GaussianPolicy, ObsSpec, Policy
from robo_rl.policies.steered import SteeredPolicy

KINDS: dict[str, type[ChainPolicy] | type[GaussianPolicy] | type[SquashedPolicy]] = {
    # every other one is a chain
    "squashed": SquashedPolicy,
    "guided": GuidedPolicy,
    "steered": SteeredPolicy,
    "gaussian": GaussianPolicy,
}
WHAT = "--policy.kind"


def make_policy(options: PolicyOptions, spec: ObsSpec, seed: int) -> Policy:
    """Fresh policy with weights drawn from `seed` alone (the global generator is left as it was).

    kind "module:function": function(options, spec, seed) makes it; the first one in a process is checked
    (`policies.check`).
    """
    if is_object(options.kind):
        _look(options, spec)
        return attach(slimmed(_own(options, spec, seed)), options.lora, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind: Any = CommittedPolicy if options.commit_least else KINDS.get(options.kind, ChainPolicy)
        if options.kind in VLAS:  # its modules, and safetensors, are read where one is asked for
            from robo_rl.policies.vla.offpolicy import replay_policy
            from robo_rl.policies.vla.one_step_policy import OneStepPolicy
            from robo_rl.policies.vla.policy import VlaPolicy, XVlaPolicy
            from robo_rl.policies.vla.token_policy import TokenPolicy

            own = {"xvla": XVlaPolicy, "pi0_fast": TokenPolicy, "openvla_oft": OneStepPolicy}
            kind = replay_policy(options) if options.acts in FROM_REPLAY else own.get(options.kind, VlaPolicy)
        return attach(slimmed(kind(options, spec)), options.lora, seed)


def slimmed(policy):
    """Do what the options ask for the sake of memory, in place -> the policy: blocks that keep no
    activations; the weights of the modules that `policy.low` names in bf16. Buffers (statistics, grids,
    tables), heads, traces and log-probs stay float32."""
    if policy.options.recompute:
        recompute(policy)
    if policy.options.dtype == "bf16":
        for name in getattr(policy, "low", ("trunk",)):
            for p in getattr(policy, name).parameters():
                p.data = p.data.to(torch.bfloat16)
    return policy


def _own(options: PolicyOptions, spec: ObsSpec, seed: int) -> Policy:
    make = load_object(options.kind, WHAT)
    check_call(make, options.kind, WHAT, ("options", "spec", "seed"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(options, spec, seed)


@cache
def _look(options: PolicyOptions, spec: ObsSpec) -> None:
    """UserError unless the user's policy keeps the contract; once per process."""
    from robo_rl.policies.check import check_policy

    try:
        check_policy(lambda seed: _own(options, spec, seed), options, spec)
    except AssertionError as e:
        raise UserError(f"{WHAT} {options.kind}: {e}") from None
