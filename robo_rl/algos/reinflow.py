"""ReinFlow: PPO on a flow whose every step carries learned Gaussian noise (arXiv 2505.22094, eq. 8-12).

The joint chain's ratio, an entropy bonus on the noise, and an upper noise bound that holds for `noise_hold`
of training and then falls linearly to `noise_end` of its start. The bound is a buffer of the policy and moves
at the end of an update: it belongs to the version that acts under it, and re-scoring uses the bound of the
weights that it scores by. Optional |x_theta(z) - x_old(z)|^2 with a shared z.

Where we differ: one time grid for sampling and re-scoring (the public snapshot uses two), the constant
density of the initial noise is left out, intermediate x are not clipped to +-1 and the joint log-prob is not
clamped.
"""

import copy

import torch
from torch import Tensor

from robo_rl.algos.onpolicy import Demos, OnPolicyLearner, Rules
from robo_rl.errors import UserError
from robo_rl.options import ReinFlowOptions
from robo_rl.policies.context import Context


def noise_bound(start: float, progress: float, hold: float, end: float) -> float:
    """Upper bound of the learned std at `progress` in [0, 1]."""
    fall = max(0.0, progress - hold) / max(1e-9, 1 - hold)
    return start * (1 - (1 - end) * min(1.0, fall))


def make(policy, options: ReinFlowOptions, seed: int, demos: Demos | None = None) -> OnPolicyLearner:
    """Learner for a flow policy with learned noise at all steps."""
    p = policy.options
    if not p.is_flow or p.noise != "learned" or p.noise_steps != "all":
        raise UserError(
            "reinflow needs --policy.kind flow --policy.noise learned --policy.noise-steps all, got "
            f"{p.kind}, {p.noise}, {p.noise_steps}{p.hint}"
        )
    old = copy.deepcopy(policy.head).requires_grad_(False)

    def w2(context: Context, generator: torch.Generator) -> Tensor:
        z = torch.randn(len(context), policy.chunk, generator=generator).to(policy.times.device)
        x_new, x_old = z, z
        times, old_times = policy.head.steps(policy.features), old.steps(policy.features)
        for k in range(p.denoise_steps):
            x_new = policy._mean(x_new, policy.head(policy.head.embed(context), x_new, times[k]), k, "quiet")
            with torch.no_grad():
                x_old = policy._mean(x_old, old(old.embed(context), x_old, old_times[k]), k, "quiet")
        return options.w2_coef * (x_new - x_old).square().sum(-1).mean()

    def settle(progress: float) -> None:
        policy.noise.high.fill_(
            max(p.noise_min, noise_bound(p.noise_max, progress, options.noise_hold, options.noise_end))
        )

    def rules(progress: float) -> Rules:
        if options.w2_coef:
            old.load_state_dict(policy.head.state_dict())
        return Rules(True, options.clip_low, options.clip_high, extra=w2 if options.w2_coef else None)

    return OnPolicyLearner(policy, options, rules, seed, demos, settle)
