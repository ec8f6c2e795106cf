"""SAC from demonstrations: RLPD's learner that begins from the supervised actor and does not lose it.

    y = r + gamma^n (1 - terminated) [min_{j in subset} Q'_j(s', a') - alpha log pi(a'|s')]        a' ~ pi
    critic: mean_i (Q_i(s, a) - y)^2
    actor:  alpha log pi(a|s) - mean_i Q_i(s, a) + bc_coef imitation
    alpha:  entropy -> -target_entropy D

A fresh critic undoes an actor that knows more. So the actor waits until the critics have learnt what it is
worth (`warmup`, `pretrain`), begins slowly (`ramp`) and may be held near demonstrations, corrections and its
own successes (`bc_coef`, `imitate`; self-imitation, Oh et al. 2018, arXiv 1806.05635, with successes in place
of (R - V)+); targets may be clamped to the known range of returns and be no lower than what did follow
(`max_target`, `floor`). With `--policy.teacher` (the preset) the supervised actor stays, and the critics
choose who acts:

    a' = argmax_{a in {a_teacher, a_pi}} min_j Q'_j(s', a)

(IBRL, Hu et al. 2023, arXiv 2311.02198, eq. 3 and 4).
Half of every batch is demonstrations and the critics have layer norm, as in RLPD (`robo_rl/algos/rlpd.py`,
the method of that paper as it is); there are few critics and few updates, so that one core suffices.
"""

import torch
from torch import Tensor

from robo_rl.algos.averaged_weights import AveragedWeights
from robo_rl.algos.offpolicy import Rows, check_judge
from robo_rl.algos.rlpd import RlpdLearner, check_squashed
from robo_rl.options import DemoSacOptions
from robo_rl.policies.offpolicy import SquashedPolicy
from robo_rl.replay import POLICY


class DemoSacLearner(RlpdLearner):
    """RLPD's learner with a teacher, imitation and a slow beginning of the actor."""

    options: DemoSacOptions

    def __init__(self, policy: SquashedPolicy, options: DemoSacOptions, seed: int):
        super().__init__(policy, options, seed)
        if policy.teacher is not None and not policy.taught:
            policy.remember()
        if options.average:
            self.average = AveragedWeights(self.actor_params)

    def target(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """y [B], and with a teacher how often the learning actor's action was the better one."""
        policy = self.policy
        if policy.teacher is None:
            return super().target(rows)
        action, logp = self.next_action(rows.next_context)
        with torch.no_grad():
            _, v, mine = policy.better(rows.next_context, action, self.critics.subset(self.generator))
        return self.backed_up(rows, v, logp * mine), {"learner_share": mine.float().mean()}

    def imitation(self, rows: Rows) -> "Tensor | float":
        """bc_coef times the squared distance of the actor's mean from the chunks that are worth it."""
        o, policy = self.options, self.policy
        if not o.bc_coef:
            return 0.0
        worth = rows.worthy if o.imitate == "success" else rows.source > POLICY
        mask = (rows.own & worth[:, None]).float()
        mean = torch.tanh(policy.actor(rows.context.pooled)[0]).view(len(mask), mask.shape[1], -1)
        err = (mean - policy.moves(rows.actions).view_as(mean)).square().mean(-1) * mask
        return o.bc_coef * err.sum() / mask.sum().clamp(min=1)

    def actor_step(self, rows: Rows) -> dict[str, Tensor]:
        o = self.options
        if o.ramp:
            made = self.actor_opt.state.get(self.actor_params[0], {}).get("step", 0)
            self.actor_opt.param_groups[0]["lr"] = o.lr * min(1.0, (int(made) + 1) / o.ramp)
        told = super().actor_step(rows)
        if self.average is not None:
            self.average.add(o.average)
        return told


def make(policy, options: DemoSacOptions, seed: int, demos=None) -> DemoSacLearner:
    """Learner for a squashed Gaussian policy."""
    check_squashed("demo_sac", policy)
    check_judge("demo_sac", policy, options)
    return DemoSacLearner(policy, options, seed)
