"""Cal-QL: SAC with a conservative critic that is calibrated by the data's returns (Nakamoto et al. 2023, arXiv 2303.05479).

    loss = TD + cql_alpha [ logsumexp_a ( max(Q(s, a_pi), G), Q(s, a_uniform) + D log 2 ) - Q(s, a_data) ]

G is the discounted return that followed in the data: values of the policy's actions are pushed down no further than what
is known to be reachable, so that learning online does not begin by unlearning. The offline stage (`pretrain`) trains the
actor too; online it goes on with half demonstrations. Eq. 5; the mean of the logsumexp is over its sampled actions.
"""

import torch
from torch import Tensor

from robo_rl.algos.offpolicy import Rows, cql_penalty
from robo_rl.algos.rlpd import RlpdLearner, check_squashed
from robo_rl.errors import UserError
from robo_rl.options import CalQlOptions


class CalQlLearner(RlpdLearner):
    """RLPD's learner with the penalty on its critics."""

    offline_actor = True
    conservative = True

    def penalty(self, rows: Rows, q_data: Tensor) -> Tensor:
        """cql_alpha times the regulariser, on fresh actions of the actor and uniform ones."""
        o, m, d = self.options, self.options.cql_actions, rows.flat.shape[1]
        with torch.no_grad():
            wide = rows.context.repeat_interleave(m, 0)
            mine = self.policy.actor.sample(wide, self.generator)[0].view(len(rows.context), m, d)
            box = torch.rand(mine.shape, generator=self.generator) * 2 - 1
        q = self.critics.critic.many(rows.context, torch.cat([mine, box], 1))
        return o.cql_alpha * cql_penalty(q[..., :m], q[..., m:], q_data, rows.bound, d)

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
        raise UserError(f"{name} starts from an offline stage, not from a teacher: leave --policy.teacher out")


def make(policy, options: CalQlOptions, seed: int, demos=None) -> CalQlLearner:
    """Learner for a squashed Gaussian policy."""
    check_offline("calql", policy)
    return CalQlLearner(policy, options, seed)
