"""Policies of off-policy methods on the trunk of a vision-language-action model: what they are on a small
trunk, `policies.offpolicy`.

The trunk is not trained by those methods. Critics, edits and the tanh-Gaussian read the pooled vector of a
context; samples of the flow are the expert's, which reads all of it. Replay keeps the whole context or,
without `keep_prefix`, the observation.
"""

from robo_rl.options import PolicyOptions
from robo_rl.policies.offpolicy import GuidedPolicy, SquashedPolicy
from robo_rl.policies.protocol import ObsSpec
from robo_rl.policies.steered import SteeredPolicy
from robo_rl.policies.vla.policy import VlaBase, VlaPolicy, XVlaPolicy


class GuidedVlaPolicy(GuidedPolicy, VlaPolicy):
    """A critic chooses among samples of the expert (EXPO, PA-RL)."""


class GuidedXVlaPolicy(GuidedPolicy, XVlaPolicy):
    """The same of X-VLA."""


class SteeredVlaPolicy(SteeredPolicy, VlaPolicy):
    """A network on the pooled vector chooses the expert's noise (DSRL)."""


class SteeredXVlaPolicy(SteeredPolicy, XVlaPolicy):
    """The same of X-VLA."""


class SquashedVlaPolicy(SquashedPolicy, VlaBase):
    """A tanh-Gaussian on the pooled vector (HIL-SERL, SAC); there is no expert."""

    low = ("trunk",)  # what `--policy.dtype` is of

    def __init__(self, options: PolicyOptions, spec: ObsSpec):
        super().__init__(options, spec)
        del self.expert


def replay_policy(options: PolicyOptions) -> type[VlaBase]:
    """The class of a policy whose `actor` is not the model's own."""
    if options.actor == "squashed":
        return SquashedVlaPolicy
    if options.actor == "steered":
        return SteeredXVlaPolicy if options.kind == "xvla" else SteeredVlaPolicy
    return GuidedXVlaPolicy if options.kind == "xvla" else GuidedVlaPolicy
