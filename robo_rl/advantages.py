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
    rloo: r_i - mean of the others = G/(G-1) (r - mean) (Ahmadian et al. 2024).  mc_grpo: `median_advantage`.
    """
    g = outcome.shape[1]
    if g < 2:
        raise ValueError(f"a group needs at least 2 members, got {g}")
    if kind == "mc_grpo":
        return median_advantage(outcome)[0]
    centred = outcome - outcome.mean(1, keepdim=True)
    flat = (outcome == outcome[:, :1]).all(1, keepdim=True)
    if kind == "grpo":
        adv = centred / (outcome.std(1, keepdim=True) + eps)
    elif kind == "dr_grpo":
        adv = centred
    elif kind == "rloo":
        adv = centred * (g / (g - 1))
    else:
        raise ValueError(f"group advantage must be one of grpo, dr_grpo, rloo, mc_grpo, got {kind!r}")
    return torch.where(flat, torch.zeros_like(adv), adv)


def ragged_advantage(outcome: Tensor, group: Tensor, kind: str = "grpo", eps: float = 1e-6) -> Tensor:
    """`group_advantage` of groups of any sizes: `outcome[N]` of episodes of the groups `group[N]` (ids, in
    any order) -> [N].

    Exact zeros in a flat group, and where an episode is alone in its group. kind: grpo, dr_grpo or rloo.
    """
    _, at, n = group.unique(return_inverse=True, return_counts=True)

    def total(x: Tensor) -> Tensor:
        return torch.zeros(len(n), dtype=x.dtype, device=x.device).index_add(0, at, x)

    def extreme(how: str) -> Tensor:
        return torch.zeros(len(n), dtype=outcome.dtype, device=outcome.device).scatter_reduce(
            0, at, outcome, how, include_self=False
        )

    flat = (extreme("amin") == extreme("amax"))[at]
    adv = outcome - (total(outcome) / n)[at]
    if kind == "grpo":
        adv = adv / ((total(adv**2) / (n - 1).clamp(min=1)).sqrt()[at] + eps)
    elif kind == "rloo":
        adv = adv * (n / (n - 1).clamp(min=1))[at]
    elif kind != "dr_grpo":
        raise ValueError(
            f"the advantage of groups of different sizes must be one of grpo, dr_grpo, rloo, got {kind!r}"
        )
    return torch.where(flat, torch.zeros_like(adv), adv)


def pool_advantage(outcome: Tensor, group: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Reinforce-Ada: `outcome[N]` of episodes of the pools `group[N]` (ids) -> (outcome less its pool's mean
    [N], picked [N] bool).

    n of a pool are picked, half successes (above 1/2) and half failures as far as there are any; which of
    those that are alike is drawn from the ids. The mean of the picked ones would be near 1/2 by construction.
    The rule that stops a pool looks at outcomes, so the pool's mean is not unbiased either: it lowers the
    bias, it does not remove it. Source: arXiv 2510.04996.
    """
    _, pool, size = group.unique(return_inverse=True, return_counts=True)
    good = outcome > 0.5
    kind = 2 * pool + good
    count = torch.bincount(kind, minlength=2 * len(size))
    won = torch.minimum(count[1::2], (n - count[::2]).clamp(min=n // 2))
    quota = torch.stack([n - won, won], 1).flatten()
    draw = torch.randperm(len(group), generator=torch.Generator().manual_seed(int(group.max()))).to(
        group.device
    )
    order = draw[kind[draw].argsort(stable=True)]
    picked = torch.zeros_like(good)
    picked[order] = (
        torch.arange(len(order), device=group.device) - (count.cumsum(0) - count)[kind[order]]
        < quota[kind[order]]
    )
    mean = (
        torch.zeros(len(size), dtype=outcome.dtype, device=outcome.device).index_add(0, pool, outcome) / size
    )
    return outcome - mean[pool], picked


def median_advantage(outcome: Tensor, most: float = 5.0) -> tuple[Tensor, Tensor]:
    """MC-GRPO's advantage of `outcome[Q,G]`, G odd -> (adv [Q,G], kept [Q,G] bool: every member but the
    median).

    `A = (r - median)/(MAD + 1e-3)`, MAD = median of |r - median|. An outlier of any size changes no other
    member's sign, as it does with a mean. The member that is the median (of equal ones the first) is left out
    of the gradient; the others count in its mean, also where they equal the median. MC-GRPO, arXiv
    2601.22582; code lotusroot-kim/MC-GRPO.
    Where we differ: binary outcomes often have MAD 0 and advantages of 1000; then the standard deviation
    takes its place (the group is flat where that is 0 too), and |A| <= `most`. A flat group is left out
    whole.
    """
    q, g = outcome.shape
    if g % 2 == 0:
        raise ValueError(f"a median needs groups of odd size, got {g}")
    median = outcome.median(1, keepdim=True).values
    mad = (outcome - median).abs().median(1, keepdim=True).values
    flat = (outcome == outcome[:, :1]).all(1, keepdim=True)
    scale = torch.where(mad > 1e-6, mad, outcome.std(1, keepdim=True))
    adv = torch.where(flat, 0.0, ((outcome - median) / (scale + 1e-3)).clamp(-most, most))
    kept = ~flat.expand(q, g).clone()
    kept[torch.arange(q), (outcome == median).int().argmax(1)] = False
    return adv, kept


def gdpo(rewards: Tensor, weights: Tensor, eps: float = 1e-4) -> tuple[Tensor, Tensor]:
    """GDPO: several rewards `[Q,G,R]`, each normalised in its own group, then added with `weights[R]` -> (adv
    [Q,G], kept [Q,G] bool).

        z_k = (r_k - mean_group)/(std_group + eps),   S = sum_k w_k z_k
        A = (S - mean_batch)/(std_batch + eps)

    Rewards that are added first give the groups (1, 0) and (0, 1) one advantage; here they keep theirs. A
    reward that is equal in all of a group adds exactly nothing; a group in which all are has advantage 0 and
    is not kept. GDPO, arXiv 2601.05242; code NVlabs/GDPO. Standard deviations are unbiased.
    """
    if rewards.dim() != 3 or weights.shape != rewards.shape[2:]:
        raise ValueError(
            f"gdpo needs rewards [Q,G,R] and weights [R], got {tuple(rewards.shape)} and "
            f"{tuple(weights.shape)}"
        )
    r = rewards
    flat = (r == r[:, :1]).all(1, keepdim=True) | (weights == 0)
    z = torch.where(flat, 0.0, (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + eps))
    total = (z * weights).sum(-1)
    kept = ~flat.all(2).expand_as(total)
    return torch.where(kept, (total - total.mean()) / (total.std() + eps), 0.0), kept


def flawed_reward(success: Tensor, flawed: Tensor, penalty: float = 1.0) -> Tensor:
    """FAPO's reward of episodes (any shape): +1 for a clean success, 1 - penalty for a flawed one, -1 for a
    failure.

    `flawed` (bool): the goal was reached by something that is not wanted: a limit violated, the object
    thrown. With few clean successes in a group a flawed one still has a positive advantage, with many a
    negative one: no schedule is needed.
    penalty 0: flawed successes are clean ones. FAPO, arXiv 2510.22543; code yyDing1/FAPO (penalty 1).
    """
    good = torch.where(flawed, 1.0 - penalty, 1.0)
    return torch.where(success > 0.5, good, -1.0)


def implicit_rewards(logp: Tensor, logp_ref: Tensor, beta: float = 0.05) -> Tensor:
    """iStar's reward of each decision [T,N]: beta (log pi_phi - log pi_ref), pi_phi trained with
    `losses.preference`.

    They add up to beta times the log ratio of the episode. arXiv 2509.19199; code
    Tongyi-ConvAI/Qwen-Character.
    """
    return beta * (logp - logp_ref)


def step_and_episode(outcome: Tensor, steps: Tensor, mask: Tensor, alpha: float = 1.0) -> Tensor:
    """iStar's advantage of decisions [T,N]: `A = A_episode + alpha A_step`, each centred in its own group.

    outcome[Q,G]; steps[T,Q,G] the rewards of decisions, mask[T,Q,G] True where a decision was made. A_episode
    = outcome less the group's mean (RLOO up to G/(G-1)); A_step = a decision's reward less the mean over all
    decisions of all members of its group. Adding the rewards first and normalising once is worse in the
    paper. -> [T,Q,G], 0 where there is no decision. arXiv 2509.19199. Its code takes the first member's
    decisions alone for the mean of the steps; the text says all.
    """
    episode = outcome - outcome.mean(1, keepdim=True)
    live = mask.float()
    mean = (steps * live).sum((0, 2), keepdim=True) / live.sum((0, 2), keepdim=True).clamp(min=1)
    return (episode[None] + alpha * (steps - mean)) * live


def whiten(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(x - mean)/(std + 1e-8), std unbiased, with the statistics of the entries in `mask` (all without
    one)."""
    chosen = x if mask is None else x[mask]
    spread = chosen.std() if len(chosen) > 1 else 1.0  # of one entry there is no spread
    return (x - chosen.mean()) / (spread + 1e-8)
