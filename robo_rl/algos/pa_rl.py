"""PA-RL: optimise actions against the critic, then imitate them, whatever the policy (Mark et al. 2024, arXiv
2412.06685).

    N samples of the flow -> the `keep` best by mean Q -> `local_steps` of a <- clip(a + rate dQ/da), the best
                             point of each
    pi_opt: softmax(mean Q) over what is kept (acting, imitation), or its argmax (target, evaluation)
    critic: y = r + gamma^n (1 - terminated) min_subset Q'(s', argmax pi_opt(s')); Cal-QL's penalty, cql_alpha
    flow:   flow matching on draws of pi_opt; the batch's own action takes the place of the worst kept one

The paper's choices: N 32, keep 10, 10 steps of 3e-4, 10 critics with a categorical loss, cql_alpha 0.005
offline, half demonstrations. Where we differ: squared TD error; a judge that is the Polyak average of the
critics; softmax(Q / softness), for returns here lie in [0, 1] and not in [-100, 0]; with `floor` the batch's
own action counts no less than the return that followed it.
"""

import torch
from torch import Tensor

from robo_rl.algos.credit import descend
from robo_rl.algos.expo import check_guided
from robo_rl.algos.offpolicy import CriticLearner, OffPolicyLearner, Rows, cql_penalty, make_adam, td_target
from robo_rl.errors import UserError
from robo_rl.options import PaRlOptions
from robo_rl.policies.offpolicy import GuidedPolicy, gumbel


class PaRlLearner(OffPolicyLearner):
    """Owns critics and the flow's optimizer; the policy's flow is trained in place."""

    options: PaRlOptions
    owns = ("critics", "head_opt")

    def __init__(self, policy: GuidedPolicy, options: PaRlOptions, seed: int):
        super().__init__(policy, options, seed)
        self.critics = CriticLearner(policy, policy.size, options, seed, policy.judge)
        self.head_params = list(policy.head.parameters())
        self.head_opt = make_adam(self.head_params, options.lr)

    def critic_step(self, rows: Rows) -> dict[str, Tensor]:
        o = self.options
        action, _ = self.policy.choose(rows.next_context, self.generator)
        v = self.critics.least(rows.next_context.pooled, action, self.generator)
        y = td_target(rows, v, o)
        return self.critics.step(rows, y, (lambda q: self.penalty(rows, q)) if o.cql_alpha else None)

    def penalty(self, rows: Rows, q_data: Tensor) -> Tensor:
        """Cal-QL's, on the optimised actions, whose density nobody knows, and as many uniform ones."""
        actions = self.policy.candidates(rows.context, self.generator)
        box = torch.rand(actions.shape, generator=self.generator).to(actions.device) * 2 - 1
        q = self.critics.critic.many(rows.context.pooled, torch.cat([actions, box], 1))
        m = actions.shape[1]
        o = self.options
        return o.cql_alpha * cql_penalty(
            q[..., :m], None, q[..., m:], q_data, rows.bound, self.policy.size, o.cql_temperature
        )

    def actor_step(self, rows: Rows) -> dict[str, Tensor]:
        o, policy = self.options, self.policy
        target, whole = self.optimised(rows)
        loss = policy.imitation(rows.context, target.view_as(rows.actions), whole, self.generator)
        descend(loss, self.head_params, self.head_opt, o.max_grad_norm)
        return {"flow_loss": loss.detach()}

    @torch.no_grad()
    def optimised(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """One draw of pi_opt per state [B,D], and which steps of it may be imitated [B,E]."""
        policy = self.policy
        with torch.enable_grad():
            found = policy.candidates(rows.context, self.generator)
        found = torch.cat([found, rows.flat[:, None]], 1)
        q = policy.judge.many(rows.context.pooled, found).mean(0)
        own, each = found.shape[1] - 1, torch.arange(len(found), device=found.device)
        if self.options.floor:  # as in the target: what the data's own action led to, it is worth
            q[:, own] = torch.maximum(q[:, own], rows.bound)
        # with one sample and no steps there is nothing worse than it
        if own > 1 or policy.options.local_steps:
            q[each, q[:, :own].argmin(1)] = -torch.inf
        pick = (q / policy.options.softness + gumbel(q, self.generator)).argmax(1)
        whole = torch.where(
            (pick == own)[:, None], rows.own.float(), torch.ones_like(rows.own, dtype=torch.float)
        )
        return found[each, pick], whole

    def begin_online(self) -> None:
        self.policy.steered.fill_(True)


def make(policy, options: PaRlOptions, seed: int, demos=None) -> PaRlLearner:
    """Learner for a guided flow policy without edits."""
    check_guided("pa_rl", policy, options)
    if policy.edit is not None:
        raise UserError("pa_rl climbs the critic's slope: --policy.edit-scale must be 0 (expo edits)")
    options.refuse(("bc_coef",), "pa_rl's flow learns by imitation alone")
    return PaRlLearner(policy, options, seed)
