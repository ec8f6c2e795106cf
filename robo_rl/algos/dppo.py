"""DPPO: PPO over the last K' denoise steps of a diffusion policy (Ren et al. 2024, arXiv 2409.00588, eq.
6-8).

A two-layer MDP: every (decision, denoise step) is a sample with its own ratio. Its advantage is the
decision's GAE times gamma_denoise^(K'-1-i), i = 0 the noisiest; its clip grows along the chain
(`losses.denoise_clip`). Earlier steps run on a frozen copy of the supervised head. The std floor is one
number for sampling and for log-probs.

Where we differ: time limits bootstrap from their own last state (the public agent takes the next episode's);
the per-entry log-prob is not clamped to [-5, 2]; its mean over H x A is `policy.logp_reduction="mean"`, the
preset's choice. Evaluation takes every step's mean (the public agent keeps DDPM's noise at all but the last),
so `policy.std_scale` below 1 lets exploration stay near what is evaluated.
"""

import torch

from robo_rl import losses
from robo_rl.algos.onpolicy import Demos, OnPolicyLearner, Rules
from robo_rl.devices import device_of
from robo_rl.errors import UserError
from robo_rl.options import DppoOptions


def rules(options: DppoOptions, factors: int, device: "torch.device | None" = None) -> Rules:
    """Per-factor weights and clips of a chain with `factors` = K' random steps."""
    power = torch.arange(factors - 1, -1, -1, device=device)
    clip = losses.denoise_clip(factors, options.clip_base, options.clip_coef).to(device)
    return Rules(False, clip, clip, options.gamma_denoise**power)


def make(policy, options: DppoOptions, seed: int, demos: Demos | None = None) -> OnPolicyLearner:
    """Learner for a diffusion policy."""
    if policy.options.kind != "diffusion":
        raise UserError(f"dppo needs --policy.kind diffusion, got {policy.options.kind}{policy.options.hint}")
    options.refuse(("clip_low", "clip_high"), "dppo clips by --rl.clip-base and --rl.clip-coef")
    options.refuse(
        ("entropy_coef",), "the noise of a diffusion chain is no network's, so its entropy is fixed"
    )
    fixed = rules(options, policy.factors, device_of(policy))
    return OnPolicyLearner(policy, options, lambda progress: fixed, seed, demos)
