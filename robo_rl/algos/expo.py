"""EXPO: an expressive base trained by imitation, small edits, and the best of both by value (arXiv
2507.07986).

    candidates = a_1..a_N ~ flow(s)  and  clip(a_i + beta_e â_i), â ~ tanh-Gaussian(s, a_i)
    pi(s) = argmax over candidates of min_j Q'_j(s, a)                             acts, and makes the target
    flow:   flow matching on the actions of replay and demonstrations; Q is never differentiated through it
    edits:  alpha (log pi_e(â|s,a) - D log beta_e) - mean_i Q_i(s, clip(a + beta_e â))      a: the batch's
            actions

The flow that acts is a slow average of the one that learns and that the target samples. The paper's choices:
10 critics, UTD 20, half demonstrations. Where we differ: a flow instead of a DDPM; chunks; of its own
episodes the flow imitates those that succeeded (`imitate="all"`: the paper). No entropy in the target, as in
the paper.
"""

import copy
import math

import torch
from torch import Tensor

from robo_rl.algos.credit import descend
from robo_rl.algos.offpolicy import (
    CriticLearner,
    OffPolicyLearner,
    Rows,
    Temperature,
    check_judge,
    frozen,
    make_adam,
    on_trunk,
    polyak,
    td_target,
)
from robo_rl.devices import device_of
from robo_rl.errors import UserError
from robo_rl.options import ExpoOptions
from robo_rl.policies.offpolicy import GuidedPolicy


class ExpoLearner(OffPolicyLearner):
    """Owns the flow that learns, the critics and the edits' temperature; the policy's own flow follows
    slowly."""

    options: ExpoOptions
    owns = ("critics", "head", "head_opt")

    def __init__(self, policy: GuidedPolicy, options: ExpoOptions, seed: int):
        super().__init__(policy, options, seed)
        self.critics = CriticLearner(policy, policy.size, options, seed, policy.judge)
        self.head = copy.deepcopy(policy.head)
        self.head_params = list(self.head.parameters())
        self.head_opt = make_adam(self.head_params, options.lr)
        self.edits = policy.edit is not None
        if policy.edit is not None:
            self.owns = (*self.owns, "edit_opt", "alpha")
            self.edit_params = list(policy.edit.parameters())
            self.edit_opt = make_adam(self.edit_params, options.lr)
            reach = policy.size * math.log(policy.options.edit_scale)
            self.alpha = Temperature(options.alpha, options.alpha_lr, -policy.size / 2, device_of(policy))
            self.log_reach = reach

    def critic_step(self, rows: Rows) -> dict[str, Tensor]:
        o = self.options
        _, v = self.policy.choose(
            rows.next_context, self.generator, self.head, self.critics.subset(self.generator)
        )
        return self.critics.step(rows, td_target(rows, v, o))

    def actor_step(self, rows: Rows) -> dict[str, Tensor]:
        o, policy = self.options, self.policy
        worth = rows.imitated(o.imitate)
        loss = policy.imitation(rows.context, rows.actions, worth, self.generator, self.head)
        descend(loss, self.head_params, self.head_opt, o.max_grad_norm)
        polyak(policy.head, self.head, o.slow)
        out = {"flow_loss": loss.detach()}
        if self.edits:
            loss, logp = self.edit_loss(rows)
            descend(loss, self.edit_params, self.edit_opt, o.max_grad_norm)
            self.alpha.step(logp)
            out |= {
                "edit_loss": loss.detach(),
                "edit_entropy": -logp.detach().mean(),
                "alpha": self.alpha.value,
            }
        return out

    def edit_loss(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The edits' loss on the batch's actions, and the log-density [B] of the edits drawn."""
        edited, logp = self.policy.edited(rows.context, rows.flat[:, None], self.generator)
        with frozen(self.critics.params):
            q = self.critics.critic(rows.context.pooled, edited[:, 0]).mean(0)
        logp = logp[:, 0]
        return (self.alpha.value * (logp - self.log_reach) - q).mean(), logp

    def begin_online(self) -> None:
        self.policy.steered.fill_(True)


def make(policy, options: ExpoOptions, seed: int, demos=None) -> ExpoLearner:
    """Learner for a guided flow policy that does not climb."""
    check_guided("expo", policy, options)
    if policy.options.local_steps:
        raise UserError("expo edits actions with a network: --policy.local-steps must be 0 (pa_rl climbs)")
    if any(p.dtype != torch.float32 for p in policy.head.parameters()):
        raise UserError(
            "the flow of expo follows in steps of --rl.slow, which 16 bits round away: --policy.dtype fp32"
        )
    options.refuse(("bc_coef",), "expo's flow learns by imitation alone, its edits by value alone")
    return ExpoLearner(policy, options, seed)


def check_guided(name: str, policy, options) -> None:
    """Raise UserError unless the policy is a guided flow with the critics of `options`."""
    p = policy.options
    if p.acts != "guided":
        raise UserError(f"{name} needs --policy.kind guided{on_trunk(p, 'guided')}, got {p.kind}{p.hint}")
    check_judge(name, policy, options)
