"""RLPD: SAC whose every batch is half demonstrations, with layer norm in the critics (Ball et al. 2023, arXiv 2302.02948).

    y = r + gamma^n (1 - terminated) [min_{j in subset} Q'_j(s', a') - alpha log pi(a'|s')]        a' ~ pi
    critic: (Q_i - y)^2        actor: alpha log pi(a|s) - mean_i Q_i(s, a)        alpha: entropy -> -D/2

Over chunks: one action is E control steps. The paper's choices: 10 critics, subset 2, UTD 20, one actor update per
`utd` critic updates, alpha from 1; its sparse tasks leave the entropy out of the target, as here by default.

Where we differ: the actor may start from the supervised stage (`--bc.updates 0` starts from scratch, as the paper does);
it then waits until the critics have learnt what it is worth (`warmup`, `pretrain`), begins slowly (`ramp`) and may be held
near demonstrations, corrections and its own successes (`bc_coef`, `imitate`; self-imitation, Oh et al. 2018, arXiv 1806.05635,
with successes in place of (R - V)+), for a fresh critic undoes an actor that knows more; targets may be clamped to the known
range of returns. With `--policy.teacher` (the preset) the supervised actor stays, and the critics choose who acts:

    a' = argmax_{a in {a_teacher, a_pi}} min_j Q'_j(s', a)        IBRL (Hu et al. 2023, arXiv 2311.02198, eq. 3 and 4)
"""

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
    td_target,
)
from robo_rl.errors import UserError
from robo_rl.options import RlpdOptions
from robo_rl.policies.offpolicy import SquashedPolicy
from robo_rl.replay import POLICY


class RlpdLearner(OffPolicyLearner):
    """Owns critics, actor optimizer and temperature. The share of demonstrations is the sampler's affair."""

    options: RlpdOptions
    owns = ("critics", "actor_opt", "alpha")

    def __init__(self, policy: SquashedPolicy, options: RlpdOptions, seed: int):
        super().__init__(policy, options, seed)
        self.critics = CriticLearner(policy.trunk.size, policy.options.execute * policy.spec.action, options, seed, policy.judge)
        if policy.teacher is not None and not policy.taught:
            policy.remember()
        self.actor_params = list(policy.actor.parameters())
        self.actor_opt = make_adam(self.actor_params, options.lr)
        self.alpha = Temperature(options.alpha, options.alpha_lr, -options.target_entropy * policy.size)

    def next_action(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """a' ~ pi [B,E,A] and log pi(a') [B]."""
        with torch.no_grad():
            moves, logp = self.policy.actor.sample(context, self.generator)
            return self.policy.commands_of(moves, context), logp

    def target(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """y [B], and what is told of it: `own`, how often the learning actor's action was the better one."""
        o, policy, told = self.options, self.policy, {}
        action, logp = self.next_action(rows.next_context)
        if policy.teacher is None:
            v = self.critics.least(rows.next_context, action.flatten(1), self.generator)
        else:
            with torch.no_grad():
                _, v, mine = policy.better(rows.next_context, action, self.critics.subset(self.generator))
            logp, told = logp * mine, {"learner_share": mine.float().mean()}
        if o.entropy_backup:
            v = v - self.alpha.value * logp
        return td_target(rows, v, o), told

    def critic_step(self, rows: Rows) -> dict[str, Tensor]:
        y, told = self.target(rows)
        return self.critics.step(rows, y) | told

    def actor_step(self, rows: Rows) -> dict[str, Tensor]:
        o, policy = self.options, self.policy
        moves, logp = policy.actor.sample(rows.context, self.generator)
        with frozen(self.critics.params):
            q = self.critics.critic(rows.context, policy.commands_of(moves, rows.context).flatten(1)).mean(0)
        loss = (self.alpha.value * logp - q).mean()
        if o.bc_coef:
            worth = rows.worthy if o.imitate == "success" else rows.source > POLICY
            mask = (rows.own & worth[:, None]).float()
            mean = torch.tanh(policy.actor(rows.context)[0]).view(len(mask), mask.shape[1], -1)
            err = (mean - policy.moves(rows.actions).view_as(mean)).square().mean(-1) * mask
            loss = loss + o.bc_coef * err.sum() / mask.sum().clamp(min=1)
        if o.ramp:
            made = self.actor_opt.state.get(self.actor_params[0], {}).get("step", 0)
            self.actor_opt.param_groups[0]["lr"] = o.lr * min(1.0, (int(made) + 1) / o.ramp)
        descend(loss, self.actor_params, self.actor_opt, o.max_grad_norm)
        self.alpha.step(logp)
        return {"actor_loss": loss.detach(), "entropy": -logp.detach().mean(), "alpha": self.alpha.value}


def check_squashed(name: str, policy) -> None:
    """Raise UserError unless the policy is one squashed Gaussian over every axis."""
    if policy.options.kind != "squashed" or policy.options.gripper != "continuous":
        raise UserError(f"{name} needs --policy.kind squashed with --policy.gripper continuous, got "
                        f"{policy.options.kind} with {policy.options.gripper}")


def make(policy, options: RlpdOptions, seed: int, demos=None) -> RlpdLearner:
    """Learner for a squashed Gaussian policy."""
    check_squashed("rlpd", policy)
    check_judge("rlpd", policy, options)
    return RlpdLearner(policy, options, seed)
