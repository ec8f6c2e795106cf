"""RLPD: SAC whose every batch is half demonstrations, with layer norm in an ensemble of critics (Ball et al.
2023, arXiv 2302.02948).

    y = r + gamma^n (1 - terminated) [min_{j in subset} Q'_j(s', a') - alpha log pi(a'|s')]        a' ~ pi
    critic: mean_i (Q_i(s, a) - y)^2
    actor:  alpha log pi(a|s) - mean_i Q_i(s, a)        alpha: entropy -> -D/2

The paper's choices are the defaults of `RlpdOptions`: 10 critics, a subset of 2 drawn anew for every target,
20 critic updates and then one of the actor per decision, half of each batch demonstrations, a fresh actor,
alpha from 1. The entropy of a' is in the target for dense rewards and not for sparse ones (its Adroit and
AntMaze tasks). `--preset paper` is the authors' command for sparse Adroit: one env, one action per decision,
three hidden layers.

Where we differ: over chunks one action is E control steps; the first `warmup` steps are the fresh actor's own
samples, not uniform ones; states are normalised by the demonstrations'. Code of the authors: ikostrikov/rlpd
`rlpd/agents/sac/sac_learner.py`. Nothing is imitated and no return is assumed: what begins from the
supervised actor is `demo_sac`.
"""

import torch
from torch import Tensor

from robo_rl.algos.credit import descend
from robo_rl.algos.offpolicy import (
    CriticLearner,
    OffPolicyLearner,
    Rows,
    Temperature,
    frozen,
    make_adam,
    on_trunk,
    td_target,
)
from robo_rl.devices import device_of
from robo_rl.errors import UserError
from robo_rl.options import SacOptions
from robo_rl.policies.context import Context
from robo_rl.policies.offpolicy import SquashedPolicy


class RlpdLearner(OffPolicyLearner):
    """Owns critics, actor optimizer and temperature. The share of demonstrations is the sampler's affair."""

    options: SacOptions
    owns = ("critics", "actor_opt", "alpha")

    def __init__(self, policy: SquashedPolicy, options: SacOptions, seed: int):
        super().__init__(policy, options, seed)
        self.critics = CriticLearner(
            policy, policy.options.execute * policy.spec.action, options, seed, policy.judge
        )
        self.actor_params = list(policy.actor.parameters())
        self.actor_opt = make_adam(self.actor_params, options.lr)
        least = -options.target_entropy * policy.size
        self.alpha = Temperature(options.alpha, options.alpha_lr, least, device_of(policy))

    def next_action(self, context: Context) -> tuple[Tensor, Tensor]:
        """a' ~ pi [B,E,A] and log pi(a') [B]."""
        with torch.no_grad():
            moves, logp = self.policy.actor.sample(context.pooled, self.generator)
            return self.policy.commands_of(moves, context), logp

    def target(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """y [B], and what is told of it."""
        action, logp = self.next_action(rows.next_context)
        v = self.critics.least(rows.next_context.pooled, action.flatten(1), self.generator)
        return self.backed_up(rows, v, logp), {}

    def backed_up(self, rows: Rows, v: Tensor, logp: Tensor) -> Tensor:
        """y [B] of values v [B] of next actions with log-densities `logp` [B]."""
        return td_target(
            rows, v - self.alpha.value * logp if self.options.entropy_backup else v, self.options
        )

    def critic_step(self, rows: Rows) -> dict[str, Tensor]:
        y, told = self.target(rows)
        return self.critics.step(rows, y) | told

    def imitation(self, rows: Rows) -> "Tensor | float":
        """What is added to the actor's loss."""
        return 0.0

    def actor_step(self, rows: Rows) -> dict[str, Tensor]:
        o, policy = self.options, self.policy
        moves, logp = policy.actor.sample(rows.context.pooled, self.generator)
        with frozen(self.critics.params):
            q = self.critics.critic(
                rows.context.pooled, policy.commands_of(moves, rows.context).flatten(1)
            ).mean(0)
        loss = (self.alpha.value * logp - q).mean() + self.imitation(rows)
        descend(loss, self.actor_params, self.actor_opt, o.max_grad_norm)
        self.alpha.step(logp)
        return {"actor_loss": loss.detach(), "entropy": -logp.detach().mean(), "alpha": self.alpha.value}


def check_squashed(name: str, policy) -> None:
    """Raise UserError unless the policy is one squashed Gaussian over every axis."""
    p = policy.options
    if p.acts != "squashed" or p.gripper != "continuous":
        raise UserError(
            f"{name} needs --policy.kind squashed{on_trunk(p, 'squashed')} with --policy.gripper continuous, "
            f"got {p.kind} with {p.gripper}{p.hint}"
        )


def make(policy, options: SacOptions, seed: int, demos=None) -> RlpdLearner:
    """Learner for a squashed Gaussian policy, by the paper."""
    check_squashed("rlpd", policy)
    if policy.spec.views:
        raise UserError(
            "rlpd learns from states: nothing would train its trunk of pictures; choose --algo demo_sac, "
            "which supervises it"
        )
    if policy.teacher is not None:
        raise UserError("rlpd has no teacher: leave --policy.teacher out, or choose --algo demo_sac")
    for name, value in (
        ("bc-coef", options.bc_coef),
        ("max-target", options.max_target),
        ("floor", options.floor),
    ):
        if value:
            raise UserError(
                f"rlpd neither imitates nor bounds its targets: leave --rl.{name} out, or choose --algo "
                "demo_sac"
            )
    return RlpdLearner(policy, options, seed)
