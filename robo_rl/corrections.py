"""Off-policy correction: pure functions on tensors, time first. Axes T decisions, N envs, F log-prob factors.

Three policies share a stale chunk: `behave` sampled it (`rollout.logp`), `prox` anchors the trust region,
`theta` is optimised. With u = log prox - log behave and d = log theta - log prox,

    L = -mean w min(rho A, clip(rho, 1-lo, 1+hi) A),   rho = e^d,
    w = e^u detached, dropped or capped beyond a bound,

so that rho w = theta/behave (decoupled PPO: Hilton et al. 2022, arXiv 2110.00641; AReaL, arXiv 2505.24298,
eq. 5). The mean is over all samples that were there before any was dropped: dropping lowers the gradient, it
does not rescale it. Every ratio is `exp(clamp(float32 difference, -20, 20))`; a difference that is not finite
counts as 0.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def log_ratio(logp: Tensor, logp_old: Tensor) -> tuple[Tensor, Tensor]:
    """log pi/pi_old in float32, clamped to +-20 and 0 where it is not finite -> (log ratio, where it was not
    finite)."""
    raw = logp.float() - logp_old.float()
    bad = ~torch.isfinite(raw)
    return torch.where(bad, 0.0, raw).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), bad


def ratio(log_rho: Tensor) -> Tensor:
    """rho = exp(clamp(log rho, -20, 20)), detached: a weight is a number."""
    return log_rho.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# ---- weights of samples: behave -> prox --------------------------------------------------------------------


def reject(log_rho: Tensor, high: float, low: float = 0.0) -> Tensor:
    """w = rho inside [low, high], 0 outside (AReaL's cap, `actor.behav_imp_weight_cap`)."""
    w = ratio(log_rho)
    return torch.where((w >= low) & (w <= high), w, 0.0)


def truncate(log_rho: Tensor, cap: float) -> Tensor:
    """w = min(rho, cap): truncated importance sampling (Ionides 2008); an infinite cap is plain importance
    sampling."""
    return ratio(log_rho).clamp(max=cap)


def per_episode(log_rho: Tensor, done: Tensor, mask: Tensor, reduction: str) -> Tensor:
    """Every chunk's episode sum or mean of log_rho over its chunks in `mask`, each `[T,N]` -> `[T,N]`.

    An episode ends with `done`; what lies before the first or after the last end of a rollout is one of its
    own. exp of the sum is the joint weight of a sequence, exp of the mean its geometric mean, the ratio of
    GSPO (arXiv 2507.18071, eq. 7; |y| counts chunks, not the entries of one).
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be sum or mean, got {reduction!r}")
    t, n = done.shape
    ends = done.long().cumsum(0) - done.long()  # in this env, before this chunk
    ids = (ends * n + torch.arange(n, device=ends.device)).flatten()
    total = log_rho.new_zeros((t + 1) * n).index_add(0, ids, torch.where(mask, log_rho, 0.0).flatten())
    if reduction == "mean":
        total = total / torch.zeros_like(total).index_add(0, ids, mask.float().flatten()).clamp(min=1)
    return total[ids].view(t, n)


def min_prefix(log_rho: Tensor, done: Tensor) -> Tensor:
    """MinPRO's weight of chunks `[T,N]`: log W_t = log rho_t + min over the episode's earlier chunks of log
    rho.

    W = rho at an episode's first chunk, and at a rollout's, whose past is not there. A chunk that does not
    count has log rho inf. It stands in for the product of the prefix, whose variance explodes with t; an
    early chunk that the policy now shuns damps all later ones.
    Source: arXiv 2601.22718; the use as a detached weight is ours.
    """
    out, nothing = torch.empty_like(log_rho), torch.full_like(log_rho[0], torch.inf)
    lowest = nothing
    for t in range(len(log_rho)):
        out[t] = log_rho[t] + torch.where(torch.isinf(lowest), 0.0, lowest)
        lowest = torch.where(done[t], nothing, torch.minimum(lowest, log_rho[t]))
    return out


def m2_mask(log_rho: Tensor, tau: float = 0.04) -> Tensor:
    """M2PO: drop the largest (log rho)^2 until the mean of the kept ones is below tau -> bool, True where
    kept.

    Keeps the longest ascending prefix whose running mean is below tau. Source: arXiv 2510.01161, as used by
    AReaL.
    """
    squares = log_rho.detach().flatten().square()
    ordered, order = squares.sort(stable=True)
    running = ordered.double().cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = torch.zeros_like(ordered, dtype=torch.bool)
    kept[order] = (running < tau).long().cumprod(0).bool()
    return kept.view(log_rho.shape)


# ---- the anchor --------------------------------------------------------------------------------------------


def age_weight(version_behave: Tensor, version: int) -> Tensor:
    """alpha = clamp((v_prox - v_behave)/(v_theta - v_behave), 0, 1), v_prox = `version`, v_theta = version +
    1, float32.

    Chunks of the learner's own weights have alpha 0, those d versions behind d/(d+1), those of no policy (-1)
    0.
    """
    behind = (version - version_behave).clamp(min=0).float()
    return torch.where(version_behave >= 0, behind / (behind + 1), 0.0)


def interpolate(logp_behave: Tensor, logp_theta: Tensor, alpha: Tensor) -> Tensor:
    """log prox ~ log behave + alpha (log theta - log behave), detached: an anchor without a forward pass.

    alpha broadcasts. Source: AReaL, `actor.prox_logp_method: loglinear`.
    """
    return (logp_behave + alpha * (logp_theta - logp_behave)).detach()


def ewma_decay(window: float) -> float:
    """beta = W/(W+2): the average then lags half of `window` [versions]."""
    return window / (window + 2)


class WeightAverage:
    """PPO-EWMA's anchor: W_t = beta W_{t-1} + 1,  mean <- (beta W_{t-1}/W_t) mean + (1/W_t) weights.

    W starts at 0, so the first `update`, and the first after `reset`, takes the weights as they are; beta = 0
    always does. Source: Hilton et al. 2022 (arXiv 2110.00641, section 4) and its code.
    """

    def __init__(self):
        self.total = 0.0
        self.mean: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, weights: dict[str, Tensor], beta: float) -> None:
        self.total = beta * self.total + 1
        if self.total == 1 or self.mean.keys() != weights.keys():
            self.mean = {k: v.detach().clone() for k, v in weights.items()}
            return
        for name, value in weights.items():
            # a checkpoint's are on the CPU
            self.mean[name] = self.mean[name].to(value.device).lerp_(value, 1 / self.total)

    def reset(self) -> None:
        """The next `update` starts anew: for when too few samples survive band and clip (< 0.9)."""
        self.total = 0.0

    def state_dict(self) -> dict:
        return {"total": self.total, "mean": {k: v.clone() for k, v in self.mean.items()}}

    def load_state_dict(self, state: dict) -> None:
        self.total, self.mean = state["total"], {k: v.clone() for k, v in state["mean"].items()}


# ---- credit ------------------------------------------------------------------------------------------------


def vtrace(
    rewards: Tensor,
    discounts: Tensor,
    done: Tensor,
    values: Tensor,
    next_values: Tensor,
    lam: float,
    log_rho: Tensor,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """V-trace of chunks -> (adv, returns, weight), each `[T,N]`; arguments as `advantages.gae`, which rho = 1
    gives.

    `delta = r + discounts V' - V`,  `carry_t = discounts_t lam (1 - done_t)`,  `weight = min(rho_bar, rho)`,
    `e_t = weight_t delta_t + carry_t min(c_bar, rho_t) e_{t+1}`,  `returns = V + e`,
    `adv_t = delta_t + carry_t e_{t+1}`.
    The policy gradient is of `weight adv`: kept apart, so that whitening adv adds no constant to the weighted
    product.
    Source: Espeholt et al. 2018 (arXiv 1802.01561), eq. 1, with rlax's lambda in the policy's target.
    """
    rho = ratio(log_rho)
    weight, trace = rho.clamp(max=rho_bar), rho.clamp(max=c_bar)
    deltas = rewards + discounts * next_values - values
    carry = discounts * lam * (~done)
    adv, excess = torch.empty_like(deltas), torch.empty_like(deltas)
    last = torch.zeros_like(deltas[0])
    for t in range(len(deltas) - 1, -1, -1):
        adv[t] = deltas[t] + carry[t] * last
        last = weight[t] * deltas[t] + trace[t] * (carry[t] * last)
        excess[t] = last
    return adv, excess + values, weight


def opob(log_w: Tensor, returns: Tensor, h: Tensor) -> Tensor:
    """Minimum-variance off-policy baseline over the last axis: b = sum w^2 h R / sum w^2 h, h_i = |grad log
    pi_i|^2 > 0.

    It minimises E |w grad log pi (R - b)|^2. In log space. Source: VCPO (arXiv 2602.17616).
    """
    share = torch.softmax(2 * log_w.double() + h.double().log(), -1)
    return (share * returns).sum(-1).to(returns.dtype)


# ---- how far off -------------------------------------------------------------------------------------------


def ess(log_w: Tensor) -> Tensor:
    """Effective sample size (sum w)^2 / sum w^2 of all entries, in [1, n], float64; in log space: any log w
    will do."""
    x = log_w.detach().flatten().double()
    return (2 * torch.logsumexp(x, 0) - torch.logsumexp(2 * x, 0)).exp()


def lr_scale(ess_frac: float, base: float = 1.0) -> float:
    """sqrt(min(1, (ESS/n) / base)), VCPO's factor on the learning rate (arXiv 2602.17616); base is ESS/n
    on-policy."""
    return min(1.0, ess_frac / base) ** 0.5


def k3(log_rho: Tensor) -> Tensor:
    """Schulman's estimate rho - 1 - log rho of KL(behave || prox), elementwise, never negative."""
    x = log_rho.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (x.expm1() - x).clamp(min=0)


def diagnostics(log_rho: Tensor, log_w: Tensor, cap: float) -> dict[str, Tensor]:
    """Scalars on chunks `log_rho[B]` and on the uncapped weights `log_w[...]` that are used for them.

    Mean and largest |log rho|, k3, chi^2 = E rho^2 - 1, share of weights above `cap` (dropped or truncated),
    ESS/n.
    """
    x = log_rho.detach()
    return {
        "is_logratio_mean": x.mean(),
        "is_logratio_absmax": x.abs().max(),
        "is_k3": k3(x).mean(),
        "is_chi2": ratio(2 * x).mean() - 1,
        "is_rejected": (ratio(log_w) > cap).float().mean(),
        "ess_frac": (ess(log_w) / log_w.numel()).float(),
    }
