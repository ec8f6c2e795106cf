"""Cal-QL: SAC with a conservative critic that is calibrated by the data's returns (Nakamoto et al. 2023,
arXiv 2303.05479).

    loss = TD + cql_alpha [ T log mean_i exp(q_i / T) - Q(s, a_data) ]
    q_i = max(Q(s, a_i), G) - T log pi(a_i)      a_i ~ pi(s), pi(s')
    q_i = Q(s, u_i) + T D log 2                  u_i uniform

G is the discounted return that followed in the data: values of the policy's actions are pushed down no
further than what is known to be reachable, so that learning online does not begin by unlearning. The offline
stage (`pretrain`) trains the actor too; online it goes on with half demonstrations. Eq. 5, the logsumexp by
importance sampling (CQL, Kumar et al. 2020, appendix F), half of the policy's actions from the successor
state, as in the authors' code.

Their alpha 5 and T 1 are for returns of -500 to 0 (10 r - 5 at gamma 0.99). Returns here lie in [0, 1]:
values smaller by a factor c make the squared TD error smaller by c^2 and the penalty by c, so alpha is
divided by 500 and T by 100. With T = 1 the densities alone decide: over 16 entries of a chunk the gradient
on the policy's actions is 2e-5 of that on uniform ones.
"""

import torch
from torch import Tensor

from robo_rl.algos.demo_sac import DemoSacLearner
from robo_rl.algos.offpolicy import Rows, cql_penalty
from robo_rl.algos.rlpd import check_squashed
from robo_rl.errors import UserError
from robo_rl.options import CalQlOptions


class CalQlLearner(DemoSacLearner):
    """The learner of demo_sac with the penalty on its critics."""

    options: CalQlOptions
    offline_actor = True
    conservative = True

    def penalty(self, rows: Rows, q_data: Tensor) -> Tensor:
        """cql_alpha times the regulariser, on `cql_actions` fresh actions of the actor at s, at s', and
        uniform ones."""
        o, m, d = self.options, self.options.cql_actions, rows.flat.shape[1]
        with torch.no_grad():
            wide = torch.cat([rows.context.pooled, rows.next_context.pooled]).repeat_interleave(m, 0)
            mine, logp = self.policy.actor.sample(wide, self.generator)
            mine = torch.cat(mine.view(2, -1, m, d).unbind(), 1)
            logp = torch.cat(logp.view(2, -1, m).unbind(), 1)
            box = torch.rand(len(mine), m, d, generator=self.generator).to(mine.device) * 2 - 1
        q = self.critics.critic.many(rows.context.pooled, torch.cat([mine, box], 1))
        return o.cql_alpha * cql_penalty(
            q[..., : 2 * m], logp, q[..., 2 * m :], q_data, rows.bound, d, o.cql_temperature
        )

    def critic_step(self, rows: Rows) -> dict[str, Tensor]:
        o = self.options
        if not (self.conservative and o.cql_alpha):
            return super().critic_step(rows)
        y, _ = self.target(rows)
        return self.critics.step(rows, y, lambda q: self.penalty(rows, q))


def check_offline(name: str, policy) -> None:
    """Raise UserError unless the policy is one squashed Gaussian over every axis, without a teacher."""
    check_squashed(name, policy)
    if policy.teacher is not None:
        raise UserError(
            f"{name} starts from an offline stage, not from a teacher: leave --policy.teacher out"
        )


def make(policy, options: CalQlOptions, seed: int, demos=None) -> CalQlLearner:
    """Learner for a squashed Gaussian policy."""
    check_offline("calql", policy)
    return CalQlLearner(policy, options, seed)
