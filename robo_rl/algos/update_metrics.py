"""What an update of a ratio method tells of its steps."""

import torch
from torch import Tensor

from robo_rl.corrections import ess
from robo_rl.rollout import Rollout

MAXIMA = {"ratio_max", "log_ratio_absmax", "is_logratio_absmax"}


def of_fresh(log_ratio: Tensor, batch: Tensor, rollout: Rollout) -> Tensor:
    """The log ratios [B,F] of those of the rows `batch` [B] that were not learnt from before; a row of zeros
    where there are none."""
    if not rollout.replayed:
        return log_ratio
    fresh = log_ratio[batch % rollout.mask.shape[1] < rollout.fresh.stop]
    return fresh if len(fresh) else torch.zeros_like(log_ratio[:1])


def value_metrics(losses: list[Tensor]) -> dict[str, float]:
    """Mean loss of a critic's steps, and the share of those that were not taken."""
    every = torch.stack(losses)
    return {
        "value_loss": float(every.mean()),
        "skipped_critic": float((~torch.isfinite(every)).float().mean()),
    }


def average(logs: list[dict[str, Tensor]], tails: list[Tensor]) -> dict[str, float]:
    """Metrics of an update from those of its steps, means or maxima, and the tails of the last epoch's log
    ratios [B,F]."""
    every = {k: torch.stack([step[k] for step in logs]) for k in logs[0]}
    out = {k: float(v.max() if k in MAXIMA else v.mean()) for k, v in every.items()}
    out["skipped_updates"] = float((~torch.isfinite(every["grad_norm"])).float().mean())
    out["log_ratio_p01"], out["log_ratio_p99"] = torch.quantile(
        torch.cat(tails).sum(-1)[:1_000_000].cpu(), torch.tensor([0.01, 0.99])
    ).tolist()
    return out


def effective(tails: list[Tensor], joint: bool, scale: float) -> float:
    """Effective sample size per sample of the ratios of densities in `tails` [B,F]: of the chain, or of each
    factor. scale: from a log-prob to that of a density (`credit.density_scale`)."""
    x = torch.cat(tails)
    x = scale * (x.sum(-1) if joint else x.flatten())
    return float(ess(x)) / len(x)
