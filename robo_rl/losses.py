"""Losses: pure functions (tensors, numbers) -> (loss, metrics). B batch, F log-prob factors, H, A chunk axes.

A loss that cannot be trusted is nan; `robo_rl.algos.credit.descend` takes no step along one and the learner
counts it.
"""

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: far beyond any clip, and no longer a step of one policy


def ppo(
    logp: Tensor,
    logp_old: Tensor,
    adv: Tensor,
    clip_low: "Tensor | float",
    clip_high: "Tensor | float",
    dual_clip: float = 0.0,
    weight: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate, `-mean min(rho A, clip(rho, 1-lo, 1+hi) A)`; all arguments broadcast to one shape.

    dual_clip c > 1: for A < 0 the objective is bounded below by c A (Ye et al. 2020); 0 turns it off.
    `weight` multiplies each sample's objective and not the number that divides the sum
    (`robo_rl.corrections`). A log ratio that is not finite, or beyond +-20, refuses the whole batch: the loss
    is nan. Both are looked for before the clamp that keeps the metrics finite. Metrics: kl (Schulman's k3),
    clip_fraction, log-ratio tails, the shares `nonfinite_ratio` and `huge_ratio`, `refused` (0 or 1); with a
    weight also `active`, the share of samples that neither clip nor weight put out.
    Source: Schulman et al. 2017 eq. 7.
    """
    log_ratio = logp - logp_old
    largest = log_ratio.detach().abs().max()
    refused = not largest.item() <= MAX_LOG_RATIO  # nan compares as False
    nonfinite = huge = log_ratio.new_zeros(())
    if refused:
        nonfinite = ~torch.isfinite(log_ratio)
        huge = ~nonfinite & (log_ratio.detach().abs() > MAX_LOG_RATIO)
        log_ratio = torch.where(nonfinite, 0.0, log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        largest = log_ratio.detach().abs().max()
    ratio = log_ratio.exp()
    if isinstance(clip_low, Tensor) or isinstance(clip_high, Tensor):
        clipped = torch.maximum(
            torch.minimum(ratio, torch.as_tensor(1 + clip_high)), torch.as_tensor(1 - clip_low)
        )
    else:
        clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * adv, clipped * adv)
    if dual_clip:
        gain = torch.where(adv < 0, torch.maximum(gain, dual_clip * adv), gain)
    if weight is not None:
        gain = weight * gain
    with torch.no_grad():
        metrics = {
            "kl": (ratio - 1 - log_ratio).mean(),
            "clip_fraction": (clipped != ratio).float().mean(),
            "ratio_max": ratio.max(),
            "log_ratio_absmax": largest,
            "nonfinite_ratio": nonfinite.float().mean(),
            "huge_ratio": huge.float().mean(),
            "refused": log_ratio.new_full((), float(refused)),
        }
        if weight is not None:
            metrics["active"] = ((clipped == ratio) & (weight > 0)).float().mean()
    loss = -gain.mean()
    return loss * torch.nan if refused else loss, metrics


def value(
    values: Tensor, returns: Tensor, values_old: Tensor | None = None, clip: float = 0.0, huber: float = 0.0
) -> Tensor:
    """0.5 E (V-R)^2, or Huber of width `huber`; with clip > 0 the worse of V and V_old + clip(V-V_old)
    counts."""

    def err(v: Tensor) -> Tensor:
        if huber:
            return torch.nn.functional.huber_loss(v, returns, reduction="none", delta=huber)
        return 0.5 * (v - returns) ** 2

    loss = err(values)
    if clip and values_old is not None:
        loss = torch.maximum(loss, err(values_old + (values - values_old).clamp(-clip, clip)))
    return loss.mean()


def nft(
    v: Tensor,
    v_old: Tensor,
    x_t: Tensor,
    t: Tensor,
    x0: Tensor,
    r: Tensor,
    mask: Tensor,
    beta: float,
    negative_weight: float = 1.0,
    normalise: bool = True,
) -> Tensor:
    """DiffusionNFT loss for chunks (arXiv 2509.16117 eq. 8-10, x0 form of its code).

    `v+ = beta v + (1-beta) v_old`, `v- = (1+beta) v_old - beta v`, `x0± = x_t - t v±`,
    `l± = |x0± - x0|^2 / sg(mean|x0± - x0|)`,  loss = mean( r l+/beta + w (1-r) l-/beta ).
    v, v_old, x_t, x0: [B,H,A]; t, r: [B]; mask[B,H] keeps executed rows of live decisions. normalise=False is
    the plain squared form: r=1, beta=1 is then t^2 times flow matching.
    """
    tt = t[:, None, None]
    v_old = v_old.detach()

    def branch(vel: Tensor) -> Tensor:
        diff = (x_t - tt * vel - x0) * mask[..., None]
        count = (mask.sum(1) * x0.shape[-1]).clamp(min=1)
        sq = diff.square().sum((1, 2)) / count
        if normalise:
            sq = sq / (diff.detach().abs().sum((1, 2)) / count).clamp(min=1e-5)
        return sq

    plus, minus = branch(beta * v + (1 - beta) * v_old), branch((1 + beta) * v_old - beta * v)
    live = (mask.sum(1) > 0).float()
    return ((r * plus + negative_weight * (1 - r) * minus) / beta * live).sum() / live.sum().clamp(min=1)


def nft_optimality(adv: Tensor, adv_max: float) -> Tensor:
    """r = 1/2 + clip(A, +-A_max)/(2 A_max), in [0, 1]."""
    return 0.5 + adv.clamp(-adv_max, adv_max) / (2 * adv_max)


def denoise_clip(f: int, base: float, coef: float) -> Tensor:
    """DPPO's clip along the chain, `[F]`: eps(u) = base + (coef-base)(e^{3u}-1)/(e^3-1), u = i/(F-1),
    noisiest first."""
    u = torch.linspace(0, 1, f) if f > 1 else torch.ones(1)
    return base + (coef - base) * (torch.exp(3 * u) - 1) / (math.exp(3) - 1)


def preference(better: Tensor, worse: Tensor, beta: float = 0.05) -> Tensor:
    """iStar's loss of pi_phi on pairs of episodes from one start, of which one succeeded: -log sigmoid(beta
    (x+ - x-)).

    `better`, `worse` [P]: log pi_phi - log pi_ref of the whole episode, the sum over its decisions. arXiv
    2509.19199 (the loss of DPO on trajectories). The pairs of a group: `preference_pairs`.
    """
    return torch.nn.functional.softplus(-beta * (better - worse)).mean()


def preference_pairs(outcome: Tensor) -> Tensor:
    """Index pairs [P,2] into the flattened `outcome[Q,G]`: every better member with every worse one of its
    own group."""
    q, g = outcome.shape
    pairs = (outcome[:, :, None] > outcome[:, None]).nonzero()
    return torch.stack([pairs[:, 0] * g + pairs[:, 1], pairs[:, 0] * g + pairs[:, 2]], 1)


def error_weights(err: Tensor, mask: Tensor) -> Tensor:
    """How much each entry of err [B,H,A] counts: clip(|err| / mean |err|, 0.5, 5), the mean over rows of mask
    [B,H].

    Source: Xiaomi-Robotics-0, arXiv 2602.12684.
    """
    size = err.abs()
    mean = (size.mean(-1) * mask).sum() / mask.sum().clamp(min=1)
    return (size / mean.clamp(min=1e-12)).clamp(0.5, 5.0)


def rehearsal(logp: Tensor, logp_first: Tensor, kind: str = "forward_kl", alpha: float = 0.2) -> Tensor:
    """DPH-RL's divergence D_f from the first policy, on samples that it made: mean of f(u), u = pi/pi_first;
    arguments [B].

        forward_kl: f = -log u        js: f = u log u - (u + 1) log((u + 1)/2)
        alpha:      f = (u^(1-alpha) - (1 - alpha) u - alpha) / (alpha (alpha - 1))

    They cover the first policy's mass: what it could do is not forgotten. Only stored log-probs are needed,
    no second policy. Li et al. 2025, arXiv 2509.07430; code seamoke/DPH-RL.
    """
    if kind == "forward_kl":
        return (logp_first - logp).mean()
    log_u = (logp - logp_first).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    u = log_u.exp()
    if kind == "js":
        return (u * log_u - (u + 1) * torch.log((u + 1) / 2)).mean()
    if kind == "alpha":
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must be in (0, 1), got {alpha}")
        return ((((1 - alpha) * log_u).exp() - (1 - alpha) * u - alpha) / (alpha * (alpha - 1))).mean()
    raise ValueError(f"the divergence must be one of forward_kl, js, alpha, got {kind!r}")
