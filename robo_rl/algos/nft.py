"""DiffusionNFT for action chunks: RL on the forward process, no likelihood and no stored chain.

Source: DiffusionNFT (arXiv 2509.16117) eq. 8-10 and its code's self-normalised x0 form (`losses.nft`); the
use on chunks follows RLinf's embodied NFT. Chunks are sampled from `v_old`, an exponential average of the
trained policy; their optimality r comes from GAE or a group advantage: r = 1/2 + clip(A)/(2 A_max).

Where we differ: A may come from a critic; entries of the chunk that were not executed are masked out of the
loss. Sampling is the plain ODE, or where the policy has one level of noise (`--policy.noise learned`) its
chain with that noise: a flow that imitated one expert has next to no spread of its own to learn from. The
loss asks nothing of the sampler but that v_old is its mean: what is good or bad of a chunk's noise moves v
alike.
"""

import copy

import torch

from robo_rl import losses
from robo_rl.algos.credit import Credit, descend, flat, make_adam, pick
from robo_rl.algos.onpolicy import (
    Demos,
    anneal,
    check_statistics,
    discounted,
    encoded_once,
    encoded_pictures,
    move_statistics,
    ramped,
    scaled_lr,
)
from robo_rl.devices import device_of, moved
from robo_rl.errors import UserError
from robo_rl.options import NftOptions
from robo_rl.policies.exploration import explores_by_level
from robo_rl.rollout import Rollout

# options that are of a likelihood
RATIO = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "entropy_coef",
    "target_kl",
    "trust_kl",
    "correction",
    "proximal",
    "weight_cap",
    "m2_tau",
    "ess_lr",
)


class NftLearner:
    """Owns the sampling copy v_old, the reference v_ref, critic and optimizer."""

    def __init__(self, policy, options: NftOptions, seed: int, demos: Demos | None = None):
        self.policy, self.options, self.demos = policy, options, demos
        check_statistics(policy, options)
        if options.freeze_trunk:
            policy.trunk.requires_grad_(False)
        self.old = copy.deepcopy(policy).requires_grad_(False)
        self.reference = copy.deepcopy(policy).requires_grad_(False)
        self.credit = Credit(policy, options, seed)
        self.params = [p for p in policy.parameters() if p.requires_grad]
        self.actor_opt = make_adam(self.params, options.lr)
        self.generator = torch.Generator().manual_seed(seed + 2)
        self.iteration = 0
        self.step_scale = 1.0  # of the learning rate; smaller after a return to an earlier checkpoint

    @property
    def sampler(self):
        """v_old: the loss is only right for chunks that it sampled."""
        return self.old

    def update(self, rollout: Rollout, progress: float, version: int | None = None) -> dict[str, float]:
        """Epochs of the contrastive forward-process loss, then v_old moves.

        The loss has no likelihood ratio: chunks of any `version` enter it alike.
        """
        o, policy = self.options, self.policy
        device = device_of(policy)
        rollout = encoded_pictures(policy, moved(discounted(rollout, o), device))
        anneal(o, progress, self.actor_opt, self.credit.opt)
        adv, returns, values, rows, metrics = self.credit.assign(rollout, self.old)
        obs, x0_all = encoded_once(policy, flat(rollout.obs)), rollout.x0.flatten(0, 1)
        executed = rollout.executed.flatten()
        steps, ready = (
            torch.arange(policy.options.horizon, device=device),
            self.credit.is_ready(o, self.iteration, metrics),
        )
        r_all = losses.nft_optimality(adv, o.adv_max)
        sums: dict[str, torch.Tensor] = {}
        count = 0
        for _ in range(o.epochs):
            for batch in rows[torch.randperm(len(rows), generator=self.generator).to(device)].split(
                o.minibatch
            ):
                chosen = pick(obs, batch)
                step = {}
                if ready:
                    x0, r = x0_all[batch], r_all[batch]
                    mask = (steps < executed[batch, None]).float()
                    t = (
                        policy.draw_times(len(batch), self.generator)
                        if policy.clean
                        else torch.rand(len(batch), generator=self.generator).clamp(min=1e-3).to(device)
                    )
                    eps = torch.randn(x0.shape, generator=self.generator).to(device)
                    x_t = (1 - t[:, None, None]) * x0 + t[:, None, None] * eps
                    v = policy.velocity(policy.encode(chosen), x_t, t)
                    with torch.no_grad():
                        v_old = self.old.velocity(self.old.encode(chosen), x_t, t)
                        v_ref = self.reference.velocity(self.reference.encode(chosen), x_t, t)
                    # the rest is padding
                    v, v_old, v_ref, x_t, x0 = (
                        x[..., : policy.spec.action] for x in (v, v_old, v_ref, x_t, x0)
                    )
                    loss = losses.nft(v, v_old, x_t, t, x0, r, mask, o.beta, o.negative_weight)
                    step["policy_loss"] = loss.detach()
                    drift = (v - v_ref).square().mean()
                    step["drift"] = drift.detach()
                    loss = loss + o.kl_coef * drift
                    if o.bc_coef and self.demos is not None:
                        loss = loss + o.bc_coef * policy.bc_loss(
                            *self.demos(len(batch), self.generator), self.generator
                        )
                    with scaled_lr(self.actor_opt, ramped(self.actor_opt, o.ramp) * self.step_scale):
                        step["grad_norm"] = descend(loss, self.params, self.actor_opt, o.max_grad_norm)
                if o.advantage == "gae":
                    with torch.no_grad():
                        context = self.old.encode(chosen)
                    step["value_loss"] = self.credit.step(context.pooled, returns[batch], values[batch])
                if "grad_norm" in step:
                    step["skipped_updates"] = (~torch.isfinite(step["grad_norm"])).float()
                for key, val in step.items():
                    sums[key] = sums.get(key, 0) + val
                count += 1
        self.iteration += 1
        decay = min(0.001 * self.iteration, o.old_decay)
        with torch.no_grad():
            for new, old in zip(policy.parameters(), self.old.parameters(), strict=True):
                old.lerp_(new, 1 - decay)
        return metrics | {k: float(v) / count for k, v in sums.items()} | {"old_decay": decay}

    def after_collect(self, rollout: Rollout) -> None:
        """Move running observation statistics, of all three velocities alike; only between rollouts."""
        move_statistics(self.policy, self.options, rollout)
        if self.options.normalise_obs:
            for other in (self.old, self.reference):
                other.obs_norm.load_state_dict(self.policy.obs_norm.state_dict())

    def state_dict(self) -> dict:
        return {
            "credit": self.credit.state_dict(),
            "actor_opt": self.actor_opt.state_dict(),
            "old": self.old.state_dict(),
            "reference": self.reference.state_dict(),
            "generator": self.generator.get_state(),
            "iteration": self.iteration,
            "step_scale": self.step_scale,
        }

    def load_state_dict(self, state: dict) -> None:
        self.credit.load_state_dict(state["credit"])
        self.actor_opt.load_state_dict(state["actor_opt"])
        self.old.load_state_dict(state["old"])
        self.reference.load_state_dict(state["reference"])
        self.generator.set_state(state["generator"])
        self.iteration, self.step_scale = state["iteration"], state.get("step_scale", 1.0)


def make(policy, options: NftOptions, seed: int, demos: Demos | None = None) -> NftLearner:
    """Learner for a flow policy; it samples with exploration noise where that is learned."""
    policy.options.require_flow("nft")
    if policy.options.commit_least:
        raise UserError(
            "nft has no log-prob to leave given rows out of: with --latency use pi_rl or reinflow"
        )
    options.refuse(RATIO, "nft has no likelihood, so no ratio, no KL and no entropy")
    if not explores_by_level(policy.options):
        options.refuse(("explore",), "nft samples without noise unless --policy.noise is learned")
    options.refuse(("whiten",), "nft brings advantages to a std of 1 over the rollout")
    return NftLearner(policy, options, seed, demos)
