"""A learnt gate (`world_models.gate`) beside a threshold on the model's uncertainty, and between model and
memory.

Every episode is asked about with laws and thresholds that other episodes made. A rollout is trusted up to the
greatest value at which, on those, one step in ten is off by more than the tolerance. A second law expects the
error of the memory's own prediction (nearest neighbours of `world_models.baselines`); where it expects less
than of the model's, memory is chosen.

Axes: `B` windows, `T` control steps, `Q` quantities of a step.
"""

import numpy as np
import torch
from torch import Tensor

from robo_rl.stats import bootstrap_mean
from world_models import baselines, trust
from world_models.calibrate import ALLOWED, TOLERANCE, threshold
from world_models.conformal import folds_of
from world_models.gate import QUANTITIES, ErrorLaw, Gate, before_steps

FOLDS = 5
LEAST = 10  # episodes


def compare(
    w,
    predicted: np.ndarray,
    u: np.ndarray,
    errors: np.ndarray,
    remembered: np.ndarray | None,
    reference: baselines.RecordedSteps,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> dict | None:
    """The gate beside the threshold -> document.

    Of windows `w` (`world_models.windows`): predicted states [B,T,S], uncertainty u [B,T], the model's errors
    [B,T], those of the memory's own prediction (None: there is none). None: too few recorded steps or
    episodes to learn from.
    """
    q = along_windows(w, predicted, u, reference, seed)
    if q is None or len(np.unique(w.episode)) < LEAST:
        return None
    fold, seen = folds_of(w.episode, FOLDS, seed), w.seen
    doubt, choice = np.full(u.shape, np.inf), np.zeros(u.shape, bool)
    kept = {"threshold": np.zeros(u.shape, bool), "gate": np.zeros(u.shape, bool)}
    for k in np.unique(fold):
        mine, others = fold == k, (fold != k)[:, None] & seen
        law = ErrorLaw().fit(q[others], torch.from_numpy(errors[others]).float())
        g = np.maximum.accumulate(law(q).numpy(), 1)
        doubt[mine] = g[mine]
        for name, value in (("threshold", u), ("gate", g)):
            most = threshold(value[others], errors[others], tolerance, ALLOWED)
            kept[name][mine] = (value <= most)[mine] & seen[mine]
        if remembered is not None:
            other = ErrorLaw().fit(q[others], torch.from_numpy(remembered[others]).float())
            choice[mine] = (law(q) <= other(q)).numpy()[mine]
    off = errors > tolerance
    out: dict = {
        "tolerance": tolerance,
        "allowed": ALLOWED,
        "off": float(off[seen].mean()),
        **{name: kept_row(rows, off) | {"kept": float(rows[seen].mean())} for name, rows in kept.items()},
    }
    out["threshold"]["auroc"], out["gate"]["auroc"] = (trust.auroc(x[seen], off[seen]) for x in (u, doubt))
    out["more"] = more_kept(kept["gate"], kept["threshold"], w)
    return out | {"memory": choose_row(errors, remembered, choice, w) if remembered is not None else None}


def along_windows(
    w, predicted: np.ndarray, u: np.ndarray, reference: baselines.RecordedSteps, seed: int
) -> Tensor | None:
    """Quantities [B,T,Q]; distances are to recorded steps of the other half of the episodes. None: too few of
    them."""
    s, b = before_steps(w.start["state"], w.start["before"], predicted)
    half, units = folds_of(w.episode, 2, seed), baselines.units_of(reference)
    out = torch.zeros(*u.shape, QUANTITIES)
    for k in np.unique(half):
        mine = half == k
        use = ~np.isin(reference.episode, w.episode[mine])
        if use.sum() < baselines.LEAST:
            return None
        r, flat = reference.of(use), [x[mine].reshape(-1, x.shape[-1]) for x in (s, b, w.actions)]
        gate = Gate(flat[0].shape[1] * 2 + flat[2].shape[1])
        gate.remember(torch.from_numpy(units.features(r.state, r.before, r.action)).float(), seed)
        x = torch.from_numpy(units.features(*flat)).float().view(int(mine.sum()), u.shape[1], -1)
        out[torch.from_numpy(mine)] = gate.along(x, torch.from_numpy(np.ascontiguousarray(u[mine])).float())
    return out


def kept_row(kept: np.ndarray, off: np.ndarray) -> dict:
    """Of steps bool[B,T] that are trusted: the share that is off."""
    return {"off": float(off[kept].mean()) if kept.any() else None}


def more_kept(gate: np.ndarray, plain: np.ndarray, w) -> dict:
    """Share of steps that the gate trusts less that of the threshold, by episode, with its bootstrap
    interval."""
    share = [
        float((gate[m].sum() - plain[m].sum()) / max(w.seen[m].sum(), 1))
        for m in (w.episode == e for e in np.unique(w.episode))
    ]
    return bootstrap_mean(np.array(share))._asdict()


def choose_row(model: np.ndarray, memory: np.ndarray, choice: np.ndarray, w) -> dict:
    """By horizon: the errors [B,T] of the model, of the memory and of which the gate chose, the share of
    windows where it chose the model, and the difference of its error to the model's, paired by window."""
    chosen = np.where(choice, model, memory)
    rows = {
        name: trust.by_horizon(x, w.seen, w.episode)
        for name, x in (("model", model), ("memory", memory), ("chosen", chosen), ("less", chosen - model))
    }
    return {name: {h: i._asdict() for h, i in row.items()} for name, row in rows.items()} | {
        "share": {h: float(choice[w.seen[:, h - 1], h - 1].mean()) for h in rows["model"]}
    }
