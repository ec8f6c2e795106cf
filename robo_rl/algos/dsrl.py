"""DSRL: a flow that stays as it is, steered by the noise that it begins with (Wagenmaker et al. 2025, arXiv
2506.15799, algorithm 1: noise aliasing).

    w ~ pi(s) = reach tanh(Gaussian)         a = flow(s, w), the end of its ODE
    critic:  Q(s, a)   -> r + gamma^n (1 - terminated) [min_{j in subset} Q'_j(s', a') - alpha log pi(w'|s')]
             a' = flow(s', w'),  w' ~ pi(s')
    noise:   Q_w(s, w) -> Q(s, flow(s, w)),  w ~ N(0, 1)                   one critic for each of Q's
    actor:   alpha log pi(w|s) - min_i Q_w,i(s, w)         alpha: entropy of w / reach -> -target_entropy N

Actions of any origin teach Q: demonstrations, corrections, what the plain flow did. With `slope="flow"` there
is no Q_w: the actor's slope is that of min_i Q_i(s, flow(s, w)) through the steps of the ODE.

The paper's choices (its Robomimic runs): reach 1.5, 2 critics, target entropy 0, entropy in the target, no
demonstrations in replay; per decision of 4 envs 20 updates of Q and of the actor, 10 of Q_w. `--preset paper`
has them. Where we differ: a flow and its ODE in place of a diffusion policy and DDIM; chunks that a person
cut.
"""

import torch
from torch import Tensor

from robo_rl.algos.averaged_weights import AveragedWeights
from robo_rl.algos.credit import descend
from robo_rl.algos.offpolicy import (
    CriticLearner,
    OffPolicyLearner,
    Rows,
    Sample,
    Temperature,
    fresh_critics,
    frozen,
    make_adam,
    on_trunk,
    td_target,
    tensors,
)
from robo_rl.devices import device_of
from robo_rl.errors import UserError
from robo_rl.options import DsrlOptions
from robo_rl.policies.steered import SteeredPolicy

STATES, TRIES = 64, 8  # and draws of noise for each, that tell whether it changes anything
LEAST = 0.02  # of what actions differ by from state to state


class DsrlLearner(OffPolicyLearner):
    """Owns the critics of actions and of noise, the optimizer of what chooses the noise, and its
    temperature."""

    options: DsrlOptions
    owns = ("critics", "actor_opt", "alpha")

    def __init__(self, policy: SteeredPolicy, options: DsrlOptions, seed: int):
        super().__init__(policy, options, seed)
        o = options
        self.critics = CriticLearner(policy, policy.size, o, seed)
        self.distilled = o.slope == "distilled"
        if self.distilled:
            self.owns = (*self.owns, "noise", "noise_opt")
            self.noise = fresh_critics(policy, policy.noise_size, o, seed + 3)
            self.noise_params = list(self.noise.parameters())
            self.noise_opt = make_adam(self.noise_params, o.critic_lr)
        self.actor_params = list(policy.steer.parameters())
        self.actor_opt = make_adam(self.actor_params, o.lr)
        least = -o.target_entropy * policy.noise_size
        self.alpha = Temperature(o.alpha, o.alpha_lr, least, device_of(policy))
        if o.average:
            self.average = AveragedWeights(self.actor_params)

    def critic_step(self, rows: Rows) -> dict[str, Tensor]:
        o, policy = self.options, self.policy
        with torch.no_grad():
            noise, logp = policy.steer.sample(rows.next_context.pooled, self.generator)
            action = policy.follow(rows.next_context, noise)
        v = self.critics.least(rows.next_context.pooled, action, self.generator)
        y = td_target(rows, v - self.alpha.value * logp if o.entropy_backup else v, o)
        told = self.critics.step(rows, y)
        return told | self.distil(rows) if self.distilled and self.updates % o.distil_every == 0 else told

    def distil(self, rows: Rows) -> dict[str, Tensor]:
        """One step of the critics of noise towards those of actions, at noise as the flow was taught with."""
        policy, seen = self.policy, rows.context.pooled
        with torch.no_grad():
            noise = policy.plain_noise(len(seen), self.generator)
            goal = self.critics.critic(seen, policy.follow(rows.context, noise))
        loss = (self.noise(seen, noise) - goal).square().mean()
        descend(loss, self.noise_params, self.noise_opt, self.options.max_grad_norm)
        return {"noise_loss": loss.detach(), "noise_spread": goal.mean(0).std()}

    def actor_step(self, rows: Rows) -> dict[str, Tensor]:
        policy, seen = self.policy, rows.context.pooled
        noise, logp = policy.steer.sample(seen, self.generator)
        if self.distilled:
            with frozen(self.noise_params):
                q = self.noise(seen, noise)
        else:
            with frozen([*self.critics.params, *policy.head.parameters()]):
                q = self.critics.critic(seen, policy.follow(rows.context, noise))
        loss = (self.alpha.value * logp - q.min(0).values).mean()
        descend(loss, self.actor_params, self.actor_opt, self.options.max_grad_norm)
        self.alpha.step(logp)
        if self.average is not None:
            self.average.add(self.options.average)
        return {"actor_loss": loss.detach(), "entropy": -logp.detach().mean(), "alpha": self.alpha.value}

    @torch.no_grad()
    def doubt(self, sample: Sample) -> str:
        policy, generator = self.policy, torch.Generator().manual_seed(0)
        rows = tensors(policy, sample(STATES))
        made = torch.stack(
            [policy.follow(rows.context, policy.plain_noise(len(rows.flat), generator)) for _ in range(TRIES)]
        )
        by_noise, by_state = float(made.std(0).mean()), float(made.mean(0).std(0).mean())
        if by_noise >= LEAST * by_state:
            return ""
        return (
            f"whatever its noise the flow does nearly the same (a std of {by_noise:.4f} in actions that "
            f"differ by {by_state:.2f} from state to state): dsrl has little to choose from. Demonstrations "
            "that differ would help, or a method that learns actions (--algo demo_sac)"
        )

    def begin_online(self) -> None:
        self.policy.steered.fill_(True)


def make(policy, options: DsrlOptions, seed: int, demos=None) -> DsrlLearner:
    """Learner for a steered flow policy."""
    p = policy.options
    if p.acts != "steered":
        raise UserError(f"dsrl needs --policy.kind steered{on_trunk(p, 'steered')}, got {p.kind}{p.hint}")
    options.refuse(("bc_coef",), "dsrl's flow stays as it is")
    return DsrlLearner(policy, options, seed)
