"""Whole episodes that somebody else acted, as a rollout to learn from: their trace, their anchor, their place
beside our own.

A foreign chunk has no log-prob of ours to compare with. It gets one: the log-prob under the weights that are
about to learn is its anchor, so that its first ratio is 1 and the update is imitation weighted by the group's
advantage, within the clip (SAPO, arXiv 2509.08721). It counts as data of the present version: there is
nothing to correct.

A Gaussian policy scores the chunk itself. A chain scores its random denoise steps, and nobody knows those of
a foreign chunk x0; so they are drawn from the chains that end there (ours, derived):

    flow:       x = (1 - t) x0 + t e,               out = e - x0   (predicting actions: x0)
    diffusion:  x = sqrt(b) x0 + sqrt(1 - b) e,     out = e        (predicting actions: x0)
    x' = mean of the step at (x, out) + its std n                  e, n ~ N(0, 1)

The gradient of log N(x'; mean_theta(x), std) is that of flow matching (or denoising) towards x0, as the
method's own std weighs it.
"""

import zlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robo_rl.algos.stale import scores
from robo_rl.devices import device_of, moved
from robo_rl.errors import UserError
from robo_rl.policies.context import Context
from robo_rl.policies.policy import ChainPolicy, GaussianPolicy
from robo_rl.rollout import FINAL, OBS, TRACE, Columns, Rollout, rollout_of
from robo_rl.sampling import randint, randn

# options
CHAIN = (
    "kind",
    "denoise_steps",
    "train_steps",
    "finetune_steps",
    "noise",
    "noise_steps",
    "predict",
    "logp_reduction",
)


def check_policy(policy) -> "ChainPolicy | GaussianPolicy":
    """The policy itself. UserError: chunks of others have no log-prob under it."""
    if type(policy) not in (ChainPolicy, GaussianPolicy):
        raise UserError(
            "--share: episodes of other runs are learnt from by --policy.kind gaussian, flow or diffusion, "
            f"which score any chunk, got {policy.options.kind}"
        )
    return policy


@torch.no_grad()
def drawn_trace(
    policy: "ChainPolicy | GaussianPolicy", context: Context, x0: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """A trace {name: [B,F,...]} of the policy whose chunk is x0 [B,D], normalised."""
    if isinstance(policy, GaussianPolicy):
        return {"x_next": x0[:, None]}
    (b, d), steps = x0.shape, policy.options.denoise_steps
    k = (
        policy.draws[randint(generator, len(policy.draws), b).to(x0.device)][:, None]
        if policy.one
        else torch.arange(policy.first, steps, device=x0.device).expand(b, -1)
    )
    f = k.shape[1]
    e, n = (randn(generator, b * f, d).to(x0.device) for _ in range(2))
    step, clean = k.reshape(-1), x0[:, None].expand(b, f, d).reshape(b * f, d)
    if policy.diffusion:
        bar = policy.bars[step][:, None]
        x, out = bar.sqrt() * clean + (1 - bar).sqrt() * e, e
    else:
        t = policy.times[step][:, None]
        x, out = (1 - t) * clean + t * e, e - clean
    trace = {"x": x.view(b, f, d), "k": k.contiguous()}
    std = policy._steps(context, trace)[1]
    mean = policy._mean(x, clean if policy.clean else out, step, "loud")
    return trace | {"x_next": (mean + std * n).view(b, f, d)}


def actor_of(policy: "ChainPolicy | GaussianPolicy") -> dict[str, Any]:
    """What two policies must have in common for the trace of one to be a trace of the other: their chain and
    the units of a chunk."""
    norm = policy.action_norm
    units = zlib.crc32(torch.cat([norm.mean, norm.std]).cpu().numpy().tobytes())
    return {name: getattr(policy.options, name) for name in CHAIN} | {"units": units}


def is_trace(
    policy: "ChainPolicy | GaussianPolicy",
    told: dict[str, np.ndarray],
    like: dict[str, Tensor],
    t: int,
    n: int,
) -> bool:
    """Whether `told` {logp, trace/<name>} [T,N,...] has names, shapes and types of `like` {name: [T*N,...]},
    and steps that there are."""
    trace = {k[6:]: v for k, v in told.items() if k.startswith("trace/")}
    wanted = {k: (tuple(v.shape[1:]), v.cpu().numpy().dtype) for k, v in like.items()}
    if {k: (v.shape[2:], v.dtype) for k, v in trace.items()} != wanted:
        return False
    if "k" in trace and not 0 <= trace["k"].min() <= trace["k"].max() < policy.options.denoise_steps:
        return False
    return (
        "logp" in told and told["logp"].shape == (t, n, policy.factors) and told["logp"].dtype == np.float32
    )


@torch.no_grad()
def foreign_columns(
    policy: "ChainPolicy | GaussianPolicy",
    obs: dict[str, np.ndarray],
    actions: np.ndarray,
    executed: np.ndarray,
    outcome: np.ndarray,
    version: int,
    generator: torch.Generator,
    behaviour: "dict[str, np.ndarray] | None" = None,
) -> Columns:
    """Columns (`robo_rl.rollout`) of one group, its log-probs those of the policy now; `obs` [T+1,G,...],
    actions [T,G,H,A], executed [T,G] and outcome [G] as `robo_rl.runtime.share.SharedGroup` has them.

    behaviour: log-probs and trace of who acted, of `actor_of` this policy: they are kept, as data that is one
    version old, for the correction of stale data to weigh. What does not fit is left alone.
    """
    t, n = executed.shape
    made = executed > 0
    done = made & ~np.concatenate([made[1:], np.zeros((1, n), bool)])
    device = device_of(policy)
    seen = {k: torch.from_numpy(v[:t].reshape(t * n, *v.shape[2:]).copy()).to(device) for k, v in obs.items()}
    x0 = policy.clean_chunk(
        torch.from_numpy(actions.reshape(t * n, *actions.shape[2:]).copy()).to(device)
    ).flatten(1)
    trace = drawn_trace(policy, policy.encode(seen), x0, generator)
    logp = scores(policy, seen, trace, torch.arange(t * n, device=device))

    known = behaviour is not None and is_trace(policy, behaviour, trace, t, n)
    if behaviour is not None and known:
        trace = {
            k: torch.from_numpy(behaviour[f"trace/{k}"].reshape(t * n, *v.shape[1:]).copy())
            for k, v in trace.items()
        }
        logp, version = torch.from_numpy(behaviour["logp"].reshape(t * n, -1).copy()), version - 1

    def rows(x: Tensor) -> np.ndarray:
        return x.cpu().numpy().reshape(t, n, *x.shape[1:])

    zero, whole = np.zeros((t, n), np.float32), np.broadcast_to(outcome.astype(np.float64), (t, n))
    columns = {OBS + k: v for k, v in obs.items()} | {FINAL + k: v[1:] for k, v in obs.items()}
    columns |= {TRACE + k: rows(v) for k, v in trace.items()}
    return columns | {
        "x0": rows(x0.view(t * n, actions.shape[2], -1)),
        "logp": rows(logp),
        "done": done,
        "mask": made,
        "executed": executed,
        "rewards": zero,
        "discounts": np.where(done, zero, np.float32(1)),
        "gains": zero,
        "success": np.zeros((t, n), bool),
        "returns": whole,
        "lengths": np.cumsum(executed, 0),
        "version": np.full((t, n), version, np.int64),
    }


def foreign_rollout(parts: Sequence[Columns]) -> Rollout:
    """One rollout of groups that `foreign_columns` made."""
    return rollout_of([({k: np.array(v) for k, v in c.items()}, len(c["done"])) for c in parts])


def is_sound(columns: Columns) -> bool:
    """Whether the log-probs of a group are numbers."""
    return bool(np.isfinite(columns["logp"][columns["mask"]]).all())


def side_by_side(own: Rollout, foreign: Rollout) -> Rollout:
    """One rollout of both, `foreign` behind `own` along N; decisions that the shorter lacks are masked out
    and earn nothing.

    Statistics, starts and ended episodes are those of `own`. Whole episodes alone: a rollout that goes on has
    another last observation.
    """
    foreign = moved(foreign, own.rewards.device)
    t, n = max(len(own.mask), len(foreign.mask)), own.mask.shape[1]

    def longer(x: Tensor, fill: "float | None" = 0) -> Tensor:
        if len(x) == t:
            return x
        tail = (
            x[-1:].expand(t - len(x), *x.shape[1:])
            if fill is None
            else x.new_full((t - len(x), *x.shape[1:]), fill)
        )
        return torch.cat([x, tail])

    def both(name: str, fill: "float | None" = 0) -> Tensor:
        return torch.cat([longer(getattr(own, name), fill), longer(getattr(foreign, name), fill)], 1)

    # of a short one: what it saw last, as `rollout._trimmed` has it
    def seen(name: str, r: Rollout) -> dict[str, Tensor]:
        return {
            k: v if len(v) == t else torch.cat([v, r.last_obs[k][None].expand(t - len(v), *v.shape[1:])])
            for k, v in getattr(r, name).items()
        }

    obs_own, obs_foreign = seen("obs", own), seen("obs", foreign)
    rows = torch.cat(
        [own.done.nonzero(), foreign.done.nonzero() + torch.tensor([0, n], device=own.done.device)]
    )
    order = (rows[:, 0] * (n + foreign.mask.shape[1]) + rows[:, 1]).argsort()
    new = {f.name: getattr(own, f.name) for f in fields(Rollout)}
    new |= {
        name: both(name, fill)
        for name, fill in (
            ("x0", 0),
            ("logp", 0),
            ("rewards", 0),
            ("discounts", 1),
            ("done", 0),
            ("executed", 0),
            ("mask", 0),
            ("version", None),
            ("gains", 0),
        )
    }
    new |= {
        "obs": {k: torch.cat([v, obs_foreign[k]], 1) for k, v in obs_own.items()},
        "trace": {k: torch.cat([longer(v), longer(foreign.trace[k])], 1) for k, v in own.trace.items()},
        "final_obs": {k: torch.cat([v, foreign.final_obs[k]])[order] for k, v in own.final_obs.items()},
        "last_obs": {k: torch.cat([v, foreign.last_obs[k]]) for k, v in own.last_obs.items()},
        "outcome": torch.cat([own.outcome, foreign.outcome]),
    }
    if (
        own.success is not None
        and foreign.success is not None
        and own.lengths is not None
        and foreign.lengths is not None
    ):
        new |= {
            "success": torch.cat([own.success, foreign.success]),
            "lengths": torch.cat([own.lengths, foreign.lengths]),
        }
    return Rollout(**new)


def decisions_with_advantage(r: Rollout, group: int) -> np.ndarray:
    """Of each group, how many of its decisions teach: all that are in the mask, none of a group whose
    outcomes are equal; int64 [Q]."""
    outcome = r.outcome.view(-1, group)
    live = r.mask.sum(0).view(-1, group).sum(1)
    return torch.where((outcome != outcome[:, :1]).any(1), live, 0).cpu().numpy()
