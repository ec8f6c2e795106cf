"""ALOE: a chunk critic of the present policy over mixed data, and advantage-weighted flow matching (arXiv
2602.12691).

    y = sum_{i<n} gamma^i r_i + gamma^n (1 - terminated) min_k Q'_k(s', A')    A' ~ flow(s'), the PRESENT one
    A = min_k Q_k(s, a) - mean over samples of the flow of min_k Q_k(s, .)
    w = clip(exp(A / beta), 0, max_weight)
    flow: w * flow matching over every chunk of replay: demonstrations, corrections, rollouts old and new

The paper's equation leaves out the terminal mask and counts H steps; here it is the n that ran. Neither beta
nor the bound of w is public: A is divided by its std over the batch, beta 1, w at most 10. An MLP ensemble
stands where the paper has a transformer over image features.
"""

import torch
from torch import Tensor

from robo_rl.algos.credit import descend
from robo_rl.algos.iql import advantage_weight
from robo_rl.algos.offpolicy import CriticLearner, OffPolicyLearner, Rows, make_adam, td_target
from robo_rl.options import AloeOptions
from robo_rl.policies.offpolicy import flow_samples


class AloeLearner(OffPolicyLearner):
    """Owns critics and the flow's optimizer."""

    options: AloeOptions
    offline_actor = True
    owns = ("critics", "head_opt")

    def __init__(self, policy, options: AloeOptions, seed: int):
        super().__init__(policy, options, seed)
        self.critics = CriticLearner(policy, policy.options.execute * policy.spec.action, options, seed)
        self.head_params = [p for p in policy.head.parameters() if p.requires_grad]  # all, or adapters
        self.head_opt = make_adam(self.head_params, options.lr)

    def critic_step(self, rows: Rows) -> dict[str, Tensor]:
        o = self.options
        with torch.no_grad():
            action = flow_samples(self.policy, rows.next_context, 1, self.generator)[:, 0]
            v = self.critics.target(rows.next_context.pooled, action).min(0).values
        return self.critics.step(rows, td_target(rows, v, o))

    @torch.no_grad()
    def advantage(self, rows: Rows) -> Tensor:
        """A of the batch's own chunks [B], in units of its std over the batch."""
        critic = self.critics.target
        mine = flow_samples(self.policy, rows.context, self.options.samples, self.generator)
        v = critic.many(rows.context.pooled, mine).min(0).values.mean(1)
        adv = critic(rows.context.pooled, rows.flat).min(0).values - v
        return adv / adv.std().clamp(min=1e-6)

    def actor_step(self, rows: Rows) -> dict[str, Tensor]:
        o = self.options
        weight = advantage_weight(self.advantage(rows), 1 / o.beta, o.max_weight)
        loss = self.policy.imitation(
            rows.context, rows.actions, rows.own.float(), self.generator, weight=weight
        )
        descend(loss, self.head_params, self.head_opt, o.max_grad_norm)
        return {"flow_loss": loss.detach(), "weight": weight.mean()}


def make(policy, options: AloeOptions, seed: int, demos=None) -> AloeLearner:
    """Learner for a flow policy."""
    policy.options.require_flow("aloe")
    options.refuse(("bc_coef",), "aloe's flow learns by weighted imitation alone")
    return AloeLearner(policy, options, seed)
