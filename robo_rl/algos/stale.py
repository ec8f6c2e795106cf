"""What an update does about chunks that older weights acted: an anchor for the clip, a weight per sample.

    lag = version - rollout.version                  0 everywhere: nothing is done
    prox = log-prob under the anchor [T*N,F]         rl.proximal
    w = weight of prox/behave                        rl.correction; of the chain, or of each factor (DPPO)
    loss = -mean w min(rho A, clip(rho) A),  rho = theta/prox

Chunks of the present weights keep their log-prob as the anchor's (not with `ewma`, whose anchor is older).
With `recompute` the gradients of MinPRO and GSPO are theirs at the first step, rho being 1; PPO's clip bounds
later ones. `snapshot` scores a chunk by the weights that acted: w is then what the acting engine's numerics
add, staleness is left to the clip, and where both have the same numerics it is `correction none`. `ewma`
averages once per update, over a window as long as the rollout's largest lag: with no lag it is the present
weights. V-trace's rho is of the whole chain.
"""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robo_rl import corrections
from robo_rl.algos.credit import flat, pick
from robo_rl.options import OnPolicyOptions
from robo_rl.policies.policy import ChainPolicy, GaussianPolicy, Obs
from robo_rl.rollout import Rollout

KEPT = 16  # snapshots
ACTIVE = 0.9  # an average is dropped below this share of samples that still count


@dataclass(frozen=True, slots=True)
class Corrected:
    """What changes in an update: columns [T*N,...] of its rows (`logp_old`; `weight`, or `alpha` of an
    interpolation), the log ratios [T,N] for V-trace or opob, a factor on the learning rate, metrics."""

    columns: dict[str, Tensor] = field(default_factory=dict)
    log_rho: Tensor | None = None
    lr_scale: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)


class Corrector:
    """Owns what anchors need beyond the policy: an average of weights, snapshots of recent ones."""

    def __init__(self, options: OnPolicyOptions):
        self.options = options
        if options.correction == "none":
            options.refuse(
                ("ess_lr",), "--rl.correction none has no weights whose sample size could be taken"
            )
        self.average = corrections.WeightAverage()
        self.snapshots: dict[int, dict[str, Tensor]] = {}
        self.anchor: ChainPolicy | GaussianPolicy | None = None  # what carries either

    def keep(self, policy: "ChainPolicy | GaussianPolicy", version: int | None) -> None:
        """Before anything moves: a snapshot of the weights `version`, where the anchor is made of them."""
        o = self.options
        if version is None or o.correction == "none" or o.proximal != "snapshot":
            return
        self.snapshots[version] = {k: v.detach().clone() for k, v in policy.state_dict().items()}
        for old in sorted(self.snapshots)[:-KEPT]:
            del self.snapshots[old]

    def correct(
        self, r: Rollout, policy: "ChainPolicy | GaussianPolicy", version: int | None, joint: bool
    ) -> Corrected:
        """What `r` asks of an update of `policy`, whose weights are `version` (None: those that acted).

        `joint` as in Rules: one weight for the chain, or one per factor.
        """
        o = self.options
        if version is None:
            return Corrected()
        lag = torch.where(r.mask, version - r.version, 0)
        if o.correction != "none" and o.proximal == "ewma" and r.mask.any():
            window = max(0.0, float(lag.max()))
            self.average.update(moving(policy), corrections.ewma_decay(window))
        if not lag.any():
            return Corrected()
        metrics = ages(lag, r)
        if o.correction == "none":
            return Corrected(metrics=metrics)
        behave = r.logp.flatten(0, 1)
        if o.proximal == "interpolate":
            alpha = corrections.age_weight(r.version, version).flatten()
            return Corrected({"logp_old": behave, "alpha": alpha}, metrics=metrics | {"lr_scale": 1.0})
        prox = self.anchored(r, policy, lag)
        log_rho, _ = corrections.log_ratio(prox.sum(-1), behave.sum(-1))
        log_rho = log_rho.view(lag.shape)  # 0 outside the mask, which no anchor scores
        log_w, bad = self.log_weights(r, log_rho, prox, behave, joint)
        live = r.mask.flatten()
        weight = torch.ones_like(log_w)
        weight[live] = self.weights(log_w[live])
        for prefix, rows in parts_of(r, lag):
            told = corrections.diagnostics(log_rho.flatten()[rows], log_w[rows], self.cap)
            if o.correction == "m2po":
                told["is_rejected"] = (weight[rows] == 0).float().mean()
            metrics |= {f"{prefix}{k}": float(v) for k, v in told.items()} | {
                f"{prefix}is_nonfinite": float(bad[rows].float().mean())
            }
        every = (
            metrics["ess_frac"]
            if not r.replayed
            else float(corrections.ess(log_w[live]) / log_w[live].numel())
        )
        metrics["lr_scale"] = corrections.lr_scale(every) if o.ess_lr else 1.0
        used = o.correction == "vtrace" or o.advantage == "opob"
        return Corrected(
            {"logp_old": prox, "weight": weight}, log_rho if used else None, metrics["lr_scale"], metrics
        )

    # ---- the anchor ----------------------------------------------------------------------------------------

    def anchored(self, r: Rollout, policy: "ChainPolicy | GaussianPolicy", lag: Tensor) -> Tensor:
        """log prox [T*N,F]: rows that the anchor scores, and the log-probs of the others as they are."""
        prox, obs, trace = r.logp.flatten(0, 1).clone(), flat(r.obs), flat(r.trace)
        live, stale = r.mask.flatten(), (lag != 0).flatten()

        def put(by: "ChainPolicy | GaussianPolicy", rows: Tensor) -> None:
            rows = rows.nonzero().squeeze(1)
            prox[rows] = scores(by, obs, trace, rows)

        if self.options.proximal == "recompute":
            put(policy, stale)
        elif self.options.proximal == "ewma":
            put(self.carry(policy, policy.state_dict() | self.average.mean), live)
        else:  # its own version, or the nearest one that is kept
            kept = torch.tensor(sorted(self.snapshots)).to(stale.device)
            versions = r.version.flatten()
            nearest = kept[(versions[:, None] - kept).abs().argmin(1)]
            for version in nearest[stale].unique().tolist():
                put(self.carry(policy, self.snapshots[version]), stale & (nearest == version))
        return prox

    def carry(
        self, policy: "ChainPolicy | GaussianPolicy", weights: dict[str, Tensor]
    ) -> "ChainPolicy | GaussianPolicy":
        """A copy of `policy` with other weights."""
        if self.anchor is None:
            self.anchor = copy.deepcopy(policy).requires_grad_(False)
        self.anchor.load_state_dict(weights)
        return self.anchor

    # ---- the weight ----------------------------------------------------------------------------------------

    @property
    def cap(self) -> float:
        """Most a sample may weigh."""
        return 1.0 if self.options.correction == "vtrace" else self.options.weight_cap

    def log_weights(
        self, r: Rollout, log_rho: Tensor, prox: Tensor, behave: Tensor, joint: bool
    ) -> tuple[Tensor, Tensor]:
        """Log of the uncapped weights -> ([T*N] or, of DPPO's factors, [T*N,F]; where a log-prob was not
        finite)."""
        kind = self.options.correction
        if kind == "minpro":
            # what was not the policy's, or is too old, has no ratio to be the least
            log_w = corrections.min_prefix(log_rho.where(r.mask, torch.inf), r.done)
        elif kind == "sequence":
            log_w = corrections.per_episode(log_rho, r.done, r.mask, "mean")
        else:
            log_w = log_rho
        factors, bad = corrections.log_ratio(prox, behave)
        return factors if kind in (
            "decoupled",
            "tis",
            "m2po",
            "remix",
        ) and not joint else log_w.flatten(), bad

    def weights(self, log_w: Tensor) -> Tensor:
        """Weights of samples from their logs."""
        if self.options.correction == "decoupled":
            return corrections.reject(log_w, self.cap)
        if self.options.correction == "m2po":
            return corrections.truncate(log_w, self.cap) * corrections.m2_mask(log_w, self.options.m2_tau)
        return corrections.truncate(log_w, self.cap)

    def between(
        self, logp: Tensor, row: dict[str, Tensor], joint: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """An interpolated anchor for `logp[B,F]` of the weights being trained -> (log prox, weight,
        metrics)."""
        behave = row["logp_old"]
        prox = corrections.interpolate(behave, logp, row["alpha"][:, None])
        log_rho, _ = corrections.log_ratio(prox.sum(-1), behave.sum(-1))
        factors, bad = corrections.log_ratio(prox, behave)
        log_w = log_rho if joint else factors
        metrics = corrections.diagnostics(log_rho, log_w, self.cap) | {"is_nonfinite": bad.float().mean()}
        return prox, self.weights(log_w), metrics

    # ---- state ---------------------------------------------------------------------------------------------

    def updated(self, active: float) -> None:
        """After an update: an average that put too many samples out of play at the first step starts anew.

        Of the first step, as later ones leave the clip range of any anchor.
        """
        if active < ACTIVE:
            self.average.reset()

    def state_dict(self) -> dict:
        return {
            "average": self.average.state_dict(),
            "snapshots": {
                v: {k: w.clone() for k, w in weights.items()} for v, weights in self.snapshots.items()
            },
        }

    def load_state_dict(self, state: dict) -> None:
        self.average.load_state_dict(state["average"])
        self.snapshots = {
            v: {k: w.clone() for k, w in weights.items()} for v, weights in state["snapshots"].items()
        }


def ages(lag: Tensor, r: Rollout) -> dict[str, float]:
    """Metrics of the ages `lag` [T,N] of fresh data, where any is stale, and of what is replayed."""
    out: dict[str, float] = {}
    for prefix, rows in parts_of(r, lag):
        age = lag.flatten()[rows].float()
        out |= {f"{prefix}staleness_mean": float(age.mean()), f"{prefix}staleness_max": float(age.max())}
    return out


def parts_of(r: Rollout, lag: Tensor) -> list[tuple[str, Tensor]]:
    """(prefix of its metrics, rows of [T*N]) of what is fresh, where any of it is stale, and of what is
    replayed."""
    fresh = r.mask.clone()
    fresh[:, r.fresh.stop :] = False
    parts = [("", fresh)] if lag[fresh].any() else []
    if r.replayed:
        parts.append(("replayed_", r.mask & ~fresh))
    return [(prefix, part.flatten().nonzero().squeeze(1)) for prefix, part in parts if part.any()]


def moving(policy: "ChainPolicy | GaussianPolicy") -> dict[str, Tensor]:
    """Everything of a version that a log-prob may depend on: parameters, noise bounds, statistics of
    observations."""
    return {k: v for k, v in policy.state_dict().items() if v.is_floating_point()}


@torch.no_grad()
def scores(
    policy: "ChainPolicy | GaussianPolicy", obs: Obs, trace: dict[str, Tensor], rows: Tensor, size: int = 4096
) -> Tensor:
    """log-prob [len(rows),F] of rows of observations and trace [B,...] under `policy`, in pieces that fit the
    cache."""
    return torch.cat(
        [policy.score(policy.encode(pick(obs, part)), pick(trace, part))[0] for part in rows.split(size)]
    )
