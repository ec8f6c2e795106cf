"""Who deserves what: the critic, its optimizer, the reward scale, and the advantages of a rollout."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robo_rl import losses
from robo_rl.advantages import (
    gae,
    gdpo,
    group_advantage,
    median_advantage,
    pool_advantage,
    ragged_advantage,
    step_and_episode,
    whiten,
)
from robo_rl.algos.episode_rewards import EpisodeRewards
from robo_rl.algos.poise import CrossedBaseline, episode_features
from robo_rl.corrections import opob, vtrace
from robo_rl.devices import device_of
from robo_rl.optim import AdamW, Optimizer, kernels
from robo_rl.options import OnPolicyOptions
from robo_rl.policies.committed import seen, seen_size
from robo_rl.policies.context import PREFIX, Context
from robo_rl.policies.nets import Critic
from robo_rl.policies.policy import ChainPolicy, GaussianPolicy, Obs
from robo_rl.rollout import Rollout
from robo_rl.tree_credit import Branches, credit


def flat(obs: Obs) -> Obs:
    """[T,N,...] -> [T*N,...], a view."""
    return {k: v.flatten(0, 1) for k, v in obs.items()}


def pick(obs: Obs, rows: Tensor) -> Obs:
    """The rows `rows` of every entry."""
    return {k: v[rows] for k, v in obs.items()}


def make_adam(params: Sequence[Tensor], lr: float, weight_decay: float = 0.0, eps: float = 1e-5) -> Optimizer:
    """AdamW in its fused form (one kernel for all tensors; eps 1e-5 as in CleanRL and SB3, 1e-8 in methods of
    replay). Of sharded parameters (`robo_rl.runtime.sharded`) torch's own."""
    sharded = any(hasattr(p, "to_local") for p in params)
    return (torch.optim.AdamW if sharded else AdamW)(
        params, lr=lr, eps=eps, weight_decay=weight_decay, fused=True
    )


def descend(
    loss: Tensor,
    params: Sequence[Tensor],
    opt: Optimizer,
    max_norm: float,
    total: "Callable[[Tensor], Tensor] | None" = None,
) -> Tensor:
    """One step of `opt` along the gradient of `loss`, scaled to a norm of at most max_norm -> the norm
    before.

    `total`: from the norm of this process's shards to that of all. Where the loss or the gradient is not
    finite no step is taken, in no process, and the norm is nan or inf. The arithmetic of `clip_grad_norm_`
    and `zero_grad`, at a quarter of their fixed cost.
    """
    for p in params:
        p.grad = None
    loss.backward()
    return step_along(params, opt, max_norm, total, math.isfinite(loss.item()))


def step_along(
    params: Sequence[Tensor],
    opt: Optimizer,
    max_norm: float,
    total: "Callable[[Tensor], Tensor] | None" = None,
    sound: bool = True,
) -> Tensor:
    """The step of `descend` along gradients that are there already -> their norm; nan where not `sound`."""
    grads: list[Any] = [p.grad for p in params if p.grad is not None]
    if total is not None:
        grads = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
    norm = torch.linalg.vector_norm(torch.stack(kernels._foreach_norm(grads)))
    norm = norm if sound else torch.full_like(norm, torch.nan)
    norm = norm if total is None else total(norm)
    if math.isfinite(norm.item()):
        scale = max_norm / (norm + 1e-6)
        if scale.item() < 1:
            kernels._foreach_mul_(grads, scale)
        opt.step()
    return norm


def density_scale(policy: "ChainPolicy | GaussianPolicy") -> int:
    """Factor from a log-prob to that of a density: the executed entries where it is their mean."""
    return policy.options.execute * policy.spec.action if policy.options.logp_reduction == "mean" else 1


def columns_seen(obs: Obs) -> Obs:
    """Of encoded observations what critics see: a part of their columns."""
    return {k: obs[k] for k in (PREFIX, f"{PREFIX}/given", f"{PREFIX}/committed") if k in obs}


def explained(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R - V)/Var(R); 0 where the returns are constant."""
    var = returns.var() if len(returns) > 1 else torch.zeros(())
    return float(1 - (returns - values).var() / var) if var > 1e-12 else 0.0


class Credit:
    """GAE on a critic of its own, or group advantages of whole episodes."""

    def __init__(
        self,
        policy: "ChainPolicy | GaussianPolicy",
        options: OnPolicyOptions,
        seed: int,
        step_rewards: "Callable[[Rollout, Tensor], tuple[Tensor, dict[str, float]]] | None" = None,
    ):
        self.step_rewards = step_rewards  # of rl.advantage istar
        self.options = options
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            p = policy.options
            self.critic = Critic(seen_size(policy), p.hidden, p.layers, p.activation, p.kind == "gaussian")
        self.critic.to(device_of(policy))
        self.params = list(self.critic.parameters())
        self.opt = make_adam(self.params, options.critic_lr)
        self.scale = torch.zeros(3, dtype=torch.float64)  # running count, mean, M2 of discounted returns
        self.rewards = EpisodeRewards(options, policy)
        self.baseline = CrossedBaseline()  # of rl.advantage poise
        self.ready = options.advantage != "gae"  # whether a policy may learn from it

    def is_ready(self, o: OnPolicyOptions, iteration: int, told: dict[str, float]) -> bool:
        """Whether the policy learns in update `iteration`, whose `assign` told the metrics: once the critic
        explained enough of a rollout that it had not learnt from, or after `critic_warmup` updates."""
        explained_enough = o.critic_ready > 0 and told.get("explained_variance", 0.0) >= o.critic_ready
        self.ready = self.ready or iteration >= o.critic_warmup or explained_enough
        return self.ready

    @torch.no_grad()
    def values(self, policy, obs: Obs, size: int = 4096) -> Tensor:
        """V of observations [B,...] -> [B], in pieces that fit the cache."""
        n = len(next(iter(obs.values())))
        return (
            torch.cat(
                [
                    self.critic(seen(policy.encode({k: v[i : i + size] for k, v in obs.items()})))
                    for i in range(0, n, size)
                ]
            )
            if n
            else torch.zeros(0, device=device_of(policy))
        )

    def assign(
        self, r: Rollout, policy, log_rho: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, float]]:
        """Whitened adv, returns, values (each [T*N]), the rows worth training on, and metrics.

        Rows leave out decisions of envs that were over and, with a group advantage, of flat groups. With the
        log ratios `log_rho[T,N]` of stale data V-trace takes the place of GAE, and its weight is left to the
        loss; opob weighs by them.
        """
        o, (t, n) = self.options, r.rewards.shape
        live = r.mask.flatten()
        if o.advantage == "tree":
            return self.over_trees(r)
        if self.step_rewards is not None:
            return self.over_steps(r, policy)
        if o.advantage != "gae" and o.allocate not in ("fixed", "refill"):
            return self.over_groups(r)
        if o.advantage != "gae":
            outcome, told = self.rewards.outcome(r, policy)
            outcome = outcome.view(-1, o.group)
            relative, kept, more = self.relative(r, policy, outcome, log_rho)
            adv = relative.reshape(1, n).expand(t, n).flatten()
            zero = torch.zeros_like(adv)
            flat_groups = (outcome == outcome[:, :1])[: (n - r.replayed) // o.group].all(1).float().mean()
            rows = live & kept.reshape(1, n).expand(t, n).flatten()
            return (
                adv,
                zero,
                zero,
                rows.nonzero().squeeze(1),
                {"flat_groups": float(flat_groups)} | told | more,
            )
        values = self.values(policy, flat(r.obs)).view(t, n)
        next_values = torch.cat([values[1:], self.values(policy, r.last_obs)[None]])
        if r.done.any():
            # of states that no other row teaches, where an episode was cut
            next_values[r.done] = self.values(policy, r.final_obs)
        if o.max_return:
            values, next_values = values.clamp(0, o.max_return), next_values.clamp(0, o.max_return)
        rewards = self.scaled(r) if o.scale_reward else r.rewards
        if log_rho is None:
            adv, returns = gae(rewards, r.discounts, r.done, values, next_values, o.lam)
        else:
            adv, returns, _ = vtrace(rewards, r.discounts, r.done, values, next_values, o.lam, log_rho)
        new = r.fresh
        seen = r.mask[:, new]
        metrics = {
            "adv_std": float(adv[:, new].std()),
            "value": float(values[:, new].mean()),
            "explained_variance": explained(values[:, new][seen], returns[:, new][seen]),
        }
        return (
            whiten(adv, r.mask).flatten(),
            returns.flatten(),
            values.flatten(),
            live.nonzero().squeeze(1),
            metrics,
        )

    def over_steps(self, r: Rollout, policy) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, float]]:
        """`assign` of episodes and of their decisions, each within its group."""
        assert self.step_rewards is not None
        o, (t, n) = self.options, r.rewards.shape
        outcome, told = self.rewards.outcome(r, policy)
        outcome = outcome.view(-1, o.group)
        rewards, more = self.step_rewards(r, outcome)
        adv = step_and_episode(
            outcome, rewards.view(t, -1, o.group), r.mask.view(t, -1, o.group), o.istar_alpha
        ).flatten()
        flat_groups = (outcome == outcome[:, :1])[: (n - r.replayed) // o.group].all(1).float().mean()
        zero = torch.zeros_like(adv)
        return (
            adv,
            zero,
            zero,
            (adv != 0).nonzero().squeeze(1),
            {"flat_groups": float(flat_groups)} | told | more,
        )

    def over_groups(self, r: Rollout) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, float]]:
        """`assign` of groups of different sizes."""
        o, (t, n) = self.options, r.rewards.shape
        assert r.group is not None, "the feed plans no groups"
        group = r.group[0]
        if o.allocate == "ada":
            adv, picked = pool_advantage(r.outcome, group, o.group)
            adv = adv * picked
        else:
            adv = ragged_advantage(r.outcome, group, o.advantage)
        live = r.mask & (adv != 0)
        taught = len(group[adv != 0].unique()) / len(group.unique())
        zero = torch.zeros(t * n, device=adv.device)
        return (
            adv.expand(t, n).flatten(),
            zero,
            zero,
            live.flatten().nonzero().squeeze(1),
            {"flat_groups": 1 - taught},
        )

    def over_trees(self, r: Rollout) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, float]]:
        """`assign` of groups that are trees: each decision's advantage times its weight, over the mean
        weight."""
        (t, n), g = r.rewards.shape, self.options.group
        assert r.tree, "the feed makes no trees"
        column = {k: v.cpu().numpy() for k, v in r.tree.items()}
        there = column["weight"] > 0  # what is too old to be trained on is a part of its tree all the same
        made, ended, adv, weight = (
            there.sum(0),
            r.done.any(0).cpu().numpy(),
            np.zeros((t, n)),
            np.zeros((t, n)),
        )
        for i in range(0, n, g):
            q = slice(i, i + g)
            tree = Branches(
                column["parent"][0, q],
                column["row"][0, q],
                made[q],
                ended[q],
                r.outcome[q].cpu().numpy(),
                column["keep"][:, q],
                column["guess"][:, q],
            )
            adv[:, q], weight[:, q] = credit(tree, self.options.tree_prior)
        x = torch.from_numpy(adv * weight / weight[there].mean()).float().to(r.mask.device)
        used, flat = made > 0, (adv.reshape(t, -1, g) == 0).all((0, 2))
        metrics = {
            "flat_groups": float(flat.mean()),
            "branches": float(used.sum() / len(flat)),
            "stopped": float((used & ~ended).sum() / used.sum()),
        }
        rows, zero = (r.mask & (x != 0)).flatten().nonzero().squeeze(1), torch.zeros_like(x).flatten()
        return x.flatten(), zero, zero, rows, metrics

    def relative(
        self, r: Rollout, policy, outcome: Tensor, log_rho: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Group advantage of `outcome[Q,G]` -> (adv [Q,G], which episodes are trained on [Q,G], metrics)."""
        kind = self.options.advantage
        if kind == "mc_grpo":
            return *median_advantage(outcome), {}
        if kind == "gdpo":
            rewards, weights, told = self.rewards.rewards(r, policy)
            return *gdpo(rewards.view(*outcome.shape, -1), weights), told
        if kind == "opob":
            adv = self.over_baseline(r, outcome, log_rho)
        elif kind == "poise":
            with torch.no_grad():
                context = policy.encode(flat(r.obs)).pooled.view(*r.mask.shape, -1)
            adv = self.baseline.advantage(episode_features(context, r.mask), outcome)
        else:
            adv = group_advantage(outcome, kind)
        return adv, adv != 0, {}

    def over_baseline(self, r: Rollout, outcome: Tensor, log_rho: Tensor | None) -> Tensor:
        """`outcome[Q,G]` less its group's baseline of least variance (`corrections.opob`), 0 in a flat group.

        An episode's weight is the product of its decisions' ratios. Its h = |grad log pi(episode)|^2 is taken
        to be proportional to its decisions: gradients of different decisions are uncorrelated, and they are
        taken to be alike.
        Equal lengths on fresh data: R - mean, Dr.GRPO.
        """
        made = r.mask.sum(0)
        log_w = (
            torch.zeros_like(r.rewards[0]) if log_rho is None else torch.where(r.mask, log_rho, 0.0).sum(0)
        )
        baseline = opob(log_w.view_as(outcome), outcome, made.clamp(min=1e-6).view_as(outcome))
        flat_group = (outcome == outcome[:, :1]).all(1, keepdim=True)
        return torch.where(flat_group, 0.0, outcome - baseline[:, None])

    def scaled(self, r: Rollout) -> Tensor:
        """Rewards over the running std of the discounted return (Engstrom et al. 2020), updated first."""
        x = r.gains[:, r.fresh][r.mask[:, r.fresh]].double()
        count, mean, m2 = self.scale.tolist()
        if len(x):  # of a rollout that is all too old, or a person's, nothing counts
            delta, total = x.mean().item() - mean, count + len(x)
            self.scale = torch.tensor(
                [
                    total,
                    mean + delta * len(x) / total,
                    m2 + x.var(unbiased=False).item() * len(x) + delta**2 * count * len(x) / total,
                ],
                dtype=torch.float64,
            )
        return r.rewards / max(float((self.scale[2] / self.scale[0].clamp(min=1)).sqrt()), 1e-4)

    def step(self, context: "Context | Tensor", returns: Tensor, values_old: Tensor) -> Tensor:
        """One critic step on a context, which it leaves as it is, or a detached pooled one [B,C] -> the
        loss."""
        o = self.options
        context = seen(context).detach() if isinstance(context, Context) else context
        loss = losses.value(self.critic(context), returns, values_old, o.value_clip, o.huber)
        descend(o.value_coef * loss, self.params, self.opt, o.max_grad_norm)
        return loss.detach()

    def state_dict(self) -> dict:
        return {
            "critic": self.critic.state_dict(),
            "opt": self.opt.state_dict(),
            "scale": self.scale,
            "ready": self.ready,
        } | ({"baseline": self.baseline.state_dict()} if self.baseline.buffer else {})

    def load_state_dict(self, state: dict) -> None:
        self.critic.load_state_dict(state["critic"])
        self.opt.load_state_dict(state["opt"])
        self.scale = state["scale"]
        if "baseline" in state:
            self.baseline.load_state_dict(state["baseline"])
        self.ready = state.get("ready", self.ready)  # not in checkpoints of before it
