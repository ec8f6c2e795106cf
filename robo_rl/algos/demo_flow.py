"""A flow from demonstrations that goes on imitating and climbs its critic.

    y      = r + gamma^n (1 - terminated) min_{j in subset} Q'_j(s', a')         a' ~ flow(s')
    critic = mean_i (Q_i(s, a) - y)^2
    flow   = L(s, a) - eta mean Q(s, a~) / mean |Q(s, a~)|                       a~ ~ flow(s)

L is flow matching on demonstrations, corrections and what of its own succeeded (`imitate="all"`: on all of
replay); the slope of Q reaches the flow's weights through all K steps of its ODE. Q is the mean of the
critics, and nothing is learnt of the denominator. The flow that learns acts; its average over updates
(`average`) is what is judged. With `candidates` > 1 the flow proposes so many chunks, and the averaged
critics choose one.

The loss of the flow is that of Diffusion-QL for a DDPM (Wang et al. 2023, arXiv 2208.06193, eq. 3 and 4), an
offline method, as is the choice among candidates. Ours is a flow, begins as the supervised one, collects, and
does not imitate what failed. There Q is one critic that is drawn, the average acts and makes the targets, and
the candidate is drawn by softmax(Q'), of 50.
"""

import torch
from torch import Tensor

from robo_rl.algos.averaged_weights import AveragedWeights
from robo_rl.algos.credit import descend
from robo_rl.algos.expo import check_guided
from robo_rl.algos.offpolicy import CriticLearner, OffPolicyLearner, Rows, frozen, make_adam, td_target
from robo_rl.errors import UserError
from robo_rl.options import DemoFlowOptions
from robo_rl.policies.offpolicy import GuidedPolicy

TINY = 1e-8  # of values that the slope is divided by


class DemoFlowLearner(OffPolicyLearner):
    """Owns critics and the flow's optimizer; the policy's flow is trained in place."""

    options: DemoFlowOptions
    owns = ("critics", "head_opt")

    def __init__(self, policy: GuidedPolicy, options: DemoFlowOptions, seed: int):
        super().__init__(policy, options, seed)
        self.critics = CriticLearner(policy, policy.size, options, seed, policy.judge)
        self.head_params = list(policy.head.parameters())
        self.head_opt = make_adam(self.head_params, options.lr)
        if options.average:
            self.average = AveragedWeights(self.head_params)

    def critic_step(self, rows: Rows) -> dict[str, Tensor]:
        with torch.no_grad():
            action = self.policy.flow(rows.next_context, 1, self.generator)[:, 0]
        v = self.critics.least(rows.next_context.pooled, action, self.generator)
        return self.critics.step(rows, td_target(rows, v, self.options))

    def actor_step(self, rows: Rows) -> dict[str, Tensor]:
        o, policy = self.options, self.policy
        worth = rows.imitated(o.imitate)
        imitation = policy.imitation(rows.context, rows.actions, worth, self.generator)
        loss = imitation - o.eta * self.value(rows)
        descend(loss, self.head_params, self.head_opt, o.max_grad_norm)
        if self.average is not None:
            self.average.add(o.average)
        return {"flow_loss": imitation.detach(), "actor_loss": loss.detach()}

    def value(self, rows: Rows) -> Tensor:
        """mean Q / mean |Q| of the chunks that the flow makes, differentiable through its steps."""
        action = self.policy.flow(rows.context, 1, self.generator)[:, 0]
        with frozen(self.critics.params):
            q = self.critics.critic(rows.context.pooled, action).mean(0)
        return q.mean() / q.detach().abs().mean().clamp(min=TINY)

    def begin_online(self) -> None:
        self.policy.steered.fill_(True)


def make(policy, options: DemoFlowOptions, seed: int, demos=None) -> DemoFlowLearner:
    """Learner for a guided flow policy that neither edits nor climbs."""
    check_guided("demo_flow", policy, options)
    for name in ("edit_scale", "local_steps"):
        if getattr(policy.options, name):
            raise UserError(
                f"demo_flow teaches the flow itself: --policy.{name.replace('_', '-')} must be 0 "
                f"({'expo edits' if name == 'edit_scale' else 'pa_rl climbs'})"
            )
    options.refuse(("bc_coef",), "its flow always imitates, and --rl.eta weighs the critic beside that")
    return DemoFlowLearner(policy, options, seed)
