"""The loop every ratio method shares: re-score the trace, clip, step. The methods differ in `Rules` alone.

    adv, returns = credit(rollout)                     GAE on the critic, or group advantage of whole episodes
    for epoch, for minibatch:
        logp = policy.score(encode(obs), trace)        [B,F]; the same weights give the stored logp exactly
        loss = ppo(logp, logp_old, adv) + critic + rules.extra + bc_coef * supervised
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from robo_rl import losses
from robo_rl.algos.credit import Credit, descend, flat, make_adam, pick
from robo_rl.options import OnPolicyOptions
from robo_rl.policies.policy import ChainPolicy, GaussianPolicy, Obs
from robo_rl.rollout import Rollout

Demos = Callable[[int, torch.Generator], tuple[Obs, Tensor, Tensor]]  # batch size -> obs, chunk[B,H,A], mask[B,H]


class Learner(Protocol):
    """What learns: one rollout in, metrics out, with everything it owns in `state_dict`."""

    policy: "ChainPolicy | GaussianPolicy"

    @property
    def sampler(self) -> "ChainPolicy | GaussianPolicy": ...
    def update(self, rollout: Rollout, progress: float) -> dict[str, float]: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> None: ...


@dataclass(frozen=True)
class Rules:
    """What makes a method: joint ratio of the whole chain or one per factor, its clips and weights [F]."""

    joint: bool = True
    clip_low: "Tensor | float" = 0.2
    clip_high: "Tensor | float" = 0.2
    weight: Tensor | None = None  # multiplies the advantage of each factor
    extra: "Callable[[Tensor], Tensor] | None" = None  # context -> loss


class OnPolicyLearner:
    """Owns critic, optimizers, reward scale and its generator; `rules(progress)` says which method it is."""

    def __init__(self, policy: "ChainPolicy | GaussianPolicy", options: OnPolicyOptions,
                 rules: Callable[[float], Rules], seed: int, demos: Demos | None = None):
        self.policy, self.options, self.rules, self.demos = policy, options, rules, demos
        self.credit = Credit(policy, options, seed)
        self.actor_params = [p for p in policy.parameters() if p.requires_grad]
        self.actor_opt = make_adam(self.actor_params, options.lr)
        self.generator = torch.Generator().manual_seed(seed + 2)
        self.iteration = 0

    @property
    def sampler(self):
        """The policy that acts: the one that learns."""
        return self.policy

    # ---- one update ------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout, progress: float) -> dict[str, float]:
        """Several epochs over one rollout; progress in [0, 1] drives schedules."""
        o, policy = self.options, self.policy
        rules = self.rules(progress)
        if o.anneal_lr:
            self.actor_opt.param_groups[0]["lr"] = o.lr * (1 - progress)
            self.credit.opt.param_groups[0]["lr"] = o.critic_lr * (1 - progress)
        adv, returns, values, rows, metrics = self.credit.assign(rollout, policy)
        if len(rows) == 0:
            self.iteration += 1
            return metrics | {"skipped": 1.0}
        obs = flat(rollout.obs)
        trace, logp_old = flat(rollout.trace), rollout.logp.flatten(0, 1)
        actor_on = self.iteration >= o.critic_warmup or o.advantage != "gae"
        sums: dict[str, Tensor] = {}
        count, first, stop, tails = 0, None, False, []
        for epoch in range(o.epochs):
            order = rows[torch.randperm(len(rows), generator=self.generator)]
            for batch in order.split(o.minibatch):
                if len(batch) < min(o.minibatch, len(rows)) // 2:
                    continue  # a small remainder would step on noise
                context = policy.encode(pick(obs, batch)) if actor_on else None
                step, new = {}, None
                if actor_on:
                    new, entropy = policy.score(context, pick(trace, batch))
                    loss, step = surrogate(new, logp_old[batch], adv[batch], rules, o.dual_clip)
                    step["policy_loss"], step["entropy"] = loss.detach(), entropy.detach()
                    if first is None:
                        first = float((new.detach() - logp_old[batch]).abs().max())
                    if o.entropy_coef:
                        loss = loss - o.entropy_coef * entropy
                    if rules.extra is not None:
                        loss = loss + rules.extra(context)
                    if o.bc_coef and self.demos is not None:
                        loss = loss + o.bc_coef * policy.bc_loss(*self.demos(len(batch), self.generator),
                                                                 self.generator)
                    step["grad_norm"] = descend(loss, self.actor_params, self.actor_opt, o.max_grad_norm)
                    if not torch.isfinite(step["grad_norm"]):
                        step["skipped_updates"] = torch.ones(())
                    if epoch == o.epochs - 1:
                        tails.append((new.detach() - logp_old[batch]).sum(-1))
                if o.advantage == "gae":
                    with torch.no_grad():
                        state = policy.encode(pick(obs, batch)) if context is None else context.detach()
                    step["value_loss"] = self.credit.step(state, returns[batch], values[batch])
                for key, val in step.items():
                    sums[key] = torch.maximum(sums[key], val) if key in sums and key in MAXIMA else \
                        sums.get(key, 0) + val
                count += 1
                if o.target_kl and float(step.get("kl", 0.0)) > o.target_kl:
                    stop = True
                    break
            if stop:
                break
        self.iteration += 1
        metrics |= {k: float(v) / (1 if k in MAXIMA else count) for k, v in sums.items()}
        metrics |= {"epochs": float(epoch + 1), "first_log_ratio": first or 0.0}
        if tails:
            every = torch.cat(tails)
            metrics["log_ratio_p01"], metrics["log_ratio_p99"] = torch.quantile(
                every[:1_000_000], torch.tensor([0.01, 0.99])).tolist()
        return metrics

    def after_collect(self, rollout: Rollout) -> None:
        """Move running observation statistics; only between rollouts."""
        if self.options.normalise_obs:
            self.policy.obs_norm.update(rollout.obs["state"].flatten(0, 1))

    def state_dict(self) -> dict:
        return {"credit": self.credit.state_dict(), "actor_opt": self.actor_opt.state_dict(),
                "generator": self.generator.get_state(), "iteration": self.iteration}

    def load_state_dict(self, state: dict) -> None:
        self.credit.load_state_dict(state["credit"])
        self.actor_opt.load_state_dict(state["actor_opt"])
        self.generator.set_state(state["generator"])
        self.iteration = state["iteration"]


MAXIMA = {"ratio_max", "log_ratio_absmax"}


def surrogate(logp: Tensor, logp_old: Tensor, adv: Tensor, rules: Rules, dual_clip: float):
    """logp[B,F], adv[B] -> loss: one ratio for the joint density, or one per factor with weight and clip [F]."""
    if rules.joint:
        return losses.ppo(logp.sum(-1), logp_old.sum(-1), adv, rules.clip_low, rules.clip_high, dual_clip)
    weighted = adv[:, None] if rules.weight is None else adv[:, None] * rules.weight
    return losses.ppo(logp, logp_old, weighted.expand_as(logp), rules.clip_low, rules.clip_high, dual_clip)
