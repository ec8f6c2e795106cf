"""IQL: values of the data's own actions by expectile regression, then weighted imitation (Kostrikov et al.
2021).

    V: E |tau - 1[u < 0]| u^2, u = min_i Q'_i(s, a) - V(s)         Q_i: y = r + gamma^n (1 - terminated) V(s')
    flow: w times flow matching on the batch's action, A = min_i Q'_i - V
          w = exp(beta A), or A+ / mean A+ (A-LoL); at most max_weight

No action outside the data is ever judged, so it serves as an offline stage on demonstrations (`pretrain`) and
goes on online unchanged. Over chunks, for a flow policy, which acts as it is. Source: arXiv 2110.06169, eq. 5
to 7.

Weights in proportion to the positive part of A are A-LoL's, which draws rows with that probability and leaves
out those that are worse than what the data does on average (Baheti et al. 2024, arXiv 2305.14718). It has A
of the behaviour policy: expectile 0.5. Its ratio to a reference policy is left out (the paper's
reference-free form), for a flow has no density to take it of.
"""

import torch
from torch import Tensor

from robo_rl.algos.credit import descend
from robo_rl.algos.offpolicy import CriticLearner, OffPolicyLearner, Rows, make_adam, td_target
from robo_rl.devices import device_of
from robo_rl.options import IqlOptions
from robo_rl.policies.nets import Critic


def expectile_loss(u: Tensor, tau: float) -> Tensor:
    """mean |tau - 1[u < 0]| u^2; tau = 1/2 is half the mean squared error."""
    return (torch.where(u < 0, 1 - tau, tau) * u.square()).mean()


def advantage_weight(adv: Tensor, beta: float, most: float) -> Tensor:
    """min(exp(beta A), most), detached."""
    return torch.exp((beta * adv.detach()).clamp(max=30)).clamp(max=most)


def positive_weight(adv: Tensor, most: float) -> Tensor:
    """min(A+ / mean A+, most), detached: 0 where A <= 0, and everywhere where no A is positive."""
    good = adv.detach().clamp(min=0)
    return (good / good.mean().clamp(min=1e-8)).clamp(max=most)


class IqlLearner(OffPolicyLearner):
    """Owns critics, V and the flow's optimizer."""

    options: IqlOptions
    offline_actor = True
    owns = ("critics", "value", "value_opt", "head_opt")

    def __init__(self, policy, options: IqlOptions, seed: int):
        super().__init__(policy, options, seed)
        self.critics = CriticLearner(policy, policy.options.execute * policy.spec.action, options, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 3)
            self.value = Critic(policy.context_size, options.critic_hidden, options.critic_layers, "relu")
        self.value.to(device_of(policy))
        self.value_params = list(self.value.parameters())
        self.value_opt = make_adam(self.value_params, options.critic_lr)
        self.head_params = [p for p in policy.head.parameters() if p.requires_grad]  # all, or adapters
        self.head_opt = make_adam(self.head_params, options.lr)

    @torch.no_grad()
    def judged(self, rows: Rows) -> Tensor:
        """min_i Q'_i of the batch's own actions [B]."""
        return self.critics.target(rows.context.pooled, rows.flat).min(0).values

    def critic_step(self, rows: Rows) -> dict[str, Tensor]:
        o = self.options
        loss = expectile_loss(self.judged(rows) - self.value(rows.context.pooled), o.expectile)
        descend(loss, self.value_params, self.value_opt, o.max_grad_norm)
        with torch.no_grad():
            v = self.value(rows.next_context.pooled)
        return self.critics.step(rows, td_target(rows, v, o)) | {"value_loss": loss.detach()}

    def actor_step(self, rows: Rows) -> dict[str, Tensor]:
        o = self.options
        with torch.no_grad():
            adv = self.judged(rows) - self.value(rows.context.pooled)
            weight = (
                advantage_weight(adv, o.beta, o.max_weight)
                if o.weighting == "exp"
                else positive_weight(adv, o.max_weight)
            )
        loss = self.policy.imitation(
            rows.context, rows.actions, rows.own.float(), self.generator, weight=weight
        )
        descend(loss, self.head_params, self.head_opt, o.max_grad_norm)
        return {"flow_loss": loss.detach(), "weight": weight.mean()}


def make(policy, options: IqlOptions, seed: int, demos=None) -> IqlLearner:
    """Learner for a flow policy."""
    policy.options.require_flow("iql")
    options.refuse(("bc_coef",), "iql's flow learns by weighted imitation alone")
    return IqlLearner(policy, options, seed)
