"""Credit: pure functions on tensors, time first. Axes T decisions, N envs, Q groups, G members."""

import torch
from torch import Tensor


def gae(rewards: Tensor, discounts: Tensor, done: Tensor, values: Tensor, next_values: Tensor, lam: float):
    """Generalised advantage estimation -> (adv[T,N], returns[T,N]).

    `delta = r + discounts V' - V`,  `adv_t = delta_t + discounts_t lam (1 - done_t) adv_{t+1}`.
    `discounts[T,N]` = gamma^executed, 0 where terminated; `done[T,N]` = terminated or truncated;
    `next_values[T,N]` = V of the true successor observation (the last one of its own episode where done).
    A time limit therefore bootstraps and does not leak into the next episode. Schulman et al. 2016, eq. 16,
    with the semi-MDP discount of a chunk.
    """
    deltas = rewards + discounts * next_values - values
    carry = discounts * lam * (~done)
    adv = torch.empty_like(deltas)
    last = torch.zeros_like(deltas[0])
    for t in range(len(deltas) - 1, -1, -1):
        last = deltas[t] + carry[t] * last
        adv[t] = last
    return adv, adv + values


def group_advantage(outcome: Tensor, kind: str = "grpo", eps: float = 1e-6) -> Tensor:
    """Group-relative advantage of `outcome[Q,G]` -> `[Q,G]`; a flat group gives exact zeros.

    grpo: (r - mean)/(std + eps), std unbiased (Shao et al. 2024).  dr_grpo: r - mean (Liu et al. 2025).
    rloo: r_i - mean of the others = G/(G-1) (r - mean) (Ahmadian et al. 2024).
    """
    g = outcome.shape[1]
    if g < 2:
        raise ValueError(f"a group needs at least 2 members, got {g}")
    centred = outcome - outcome.mean(1, keepdim=True)
    flat = (outcome == outcome[:, :1]).all(1, keepdim=True)
    if kind == "grpo":
        adv = centred / (outcome.std(1, keepdim=True) + eps)
    elif kind == "dr_grpo":
        adv = centred
    elif kind == "rloo":
        adv = centred * (g / (g - 1))
    else:
        raise ValueError(f"group advantage must be one of grpo, dr_grpo, rloo, got {kind!r}")
    return torch.where(flat, torch.zeros_like(adv), adv)


def whiten(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(x - mean)/(std + 1e-8), std unbiased, with the statistics of the entries in `mask` (all without one)."""
    chosen = x if mask is None else x[mask]
    spread = chosen.std() if len(chosen) > 1 else 1.0  # of one entry there is no spread
    return (x - chosen.mean()) / (spread + 1e-8)
