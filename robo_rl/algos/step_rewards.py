"""Rewards of decisions from preferences between episodes: a second policy learns which episodes of a start
are better (iStar / OPRL).

    x_i  = sum_t [log pi_phi(a_t|s_t) - log pi_ref(a_t|s_t)]          of episode i
    loss = -mean over pairs of one start, i better than j, of log s(beta (x_i - x_j))
    r_t  = beta [log pi_phi - log pi_ref]                             they add up to beta x_i
    A_t  = (outcome - mean of the group) + alpha (r_t - mean over all decisions of the group)

pi_ref is who acted, by the stored log-probs. pi_phi takes one step of the loss for each update. It begins as
the policy that RL begins with. Starts of which all episodes are alike make no pairs; their decisions have the
second part of the advantage alone. The gradient of the loss is exact for any number of decisions: a pass for
x, one for d loss / d x_i times the gradient of x_i, in pieces. Source: arXiv 2509.19199 (alpha 1, beta 0.05);
code Tongyi-ConvAI/Qwen-Character.
"""

import copy
import math

import torch
from torch import Tensor

from robo_rl import losses
from robo_rl.advantages import implicit_rewards
from robo_rl.algos.credit import density_scale, flat, make_adam, pick, step_along
from robo_rl.options import OnPolicyOptions
from robo_rl.policies.policy import ChainPolicy, GaussianPolicy
from robo_rl.rollout import Rollout

SIZE = 1024  # decisions of a piece
MOST_NORM = 10.0  # of the gradient, as the paper has it


class StepRewards:
    """Owns pi_phi and its optimizer."""

    def __init__(self, policy: "ChainPolicy | GaussianPolicy", options: OnPolicyOptions):
        self.beta, self.phi = options.istar_beta, copy.deepcopy(policy)
        self.params = [p for p in self.phi.parameters() if p.requires_grad]
        self.opt = make_adam(self.params, options.istar_lr)

    def score(self, r: Rollout, rows: Tensor) -> Tensor:
        """log pi_phi [B] of rows of [T*N]."""
        return density_scale(self.phi) * self.phi.score(
            self.phi.encode(pick(flat(r.obs), rows)), pick(flat(r.trace), rows)
        )[0].sum(-1)

    @torch.no_grad()
    def log_ratio(self, r: Rollout) -> Tensor:
        """log pi_phi - log pi_ref [T,N], 0 where no decision was made."""
        out, ref = (
            torch.zeros(r.mask.numel(), device=r.mask.device),
            density_scale(self.phi) * r.logp.flatten(0, 1).sum(-1),
        )
        for rows in r.mask.flatten().nonzero().squeeze(1).split(SIZE):
            out[rows] = self.score(r, rows) - ref[rows]
        return out.view_as(r.mask)

    def learn(self, r: Rollout, pairs: Tensor) -> Tensor:
        """One step along the exact gradient of the loss on `pairs` [P,2] of episodes -> the loss before
        it."""
        x = self.log_ratio(r).sum(0).requires_grad_()
        loss = losses.preference(x[pairs[:, 0]], x[pairs[:, 1]], self.beta)
        weight = torch.autograd.grad(loss, x)[0]
        for p in self.params:
            p.grad = None
        n = r.mask.shape[1]
        for rows in (r.mask & (weight != 0)).flatten().nonzero().squeeze(1).split(SIZE):
            (weight[rows % n] * self.score(r, rows)).sum().backward()
        if any(p.grad is not None for p in self.params):
            step_along(self.params, self.opt, MOST_NORM, sound=math.isfinite(loss.item()))
        return loss.detach()

    def __call__(self, r: Rollout, outcome: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Rewards of decisions [T,N], after a step on the pairs of `outcome` [Q,G], with metrics."""
        pairs, told = losses.preference_pairs(outcome), {}
        if len(pairs):
            told["preference_loss"] = float(self.learn(r, pairs))
        rewards = implicit_rewards(self.log_ratio(r), torch.zeros_like(r.rewards), self.beta)
        return rewards, told | {
            "preference_pairs": float(len(pairs)),
            "step_reward_std": float(rewards[r.mask].std()),
        }

    def state_dict(self) -> dict:
        return {"phi": self.phi.state_dict(), "opt": self.opt.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.phi.load_state_dict(state["phi"])
        self.opt.load_state_dict(state["opt"])
