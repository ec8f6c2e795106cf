"""Rollouts of earlier updates in an update of an on-policy method: fresh episodes and a share of old ones,
drawn evenly.

    batch  = fresh [T,N] and R old columns behind it
    R      = min(what is kept, round(N s / (1 - s))),  s = rl.replay
    kept   = the columns of the last rl.replay_age updates
    column = T decisions of one env; with a group advantage those of a group

A column comes back as it was played: observations, trace, rewards, log-probs and versions of who acted, bit
for bit. Its ratio to who acted is therefore exact, and `robo_rl.algos.stale` corrects it as it corrects any
data of older weights: clipped around who acted (rl.correction none, DOTS+RR's own), or around the present
weights with a capped weight (decoupled, tis, m2po, sequence, minpro; vtrace for a critic's targets; remix).
Advantages are computed anew. Groups whose outcomes are all alike are not kept: they teach nothing. Which
columns come back follows from the seed and the number of the update alone. Source: DOTS+RR, arXiv 2506.05316
(a fresh share of one half, the rest evenly from a queue of 512 groups). Where we differ: the queue is bounded
by updates, which bounds age too.
"""

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robo_rl.algos.foreign import side_by_side
from robo_rl.noise import mix
from robo_rl.rollout import Rollout


def columns_of(r: Rollout, chosen: Tensor) -> Rollout:
    """The env columns `chosen` (int64 [M], in this order) of a rollout, copied; nothing of its statistics."""
    chosen = chosen.to(r.mask.device)
    place = torch.full((r.mask.shape[1],), -1, device=r.mask.device)
    place[chosen] = torch.arange(len(chosen), device=r.mask.device)
    ended = r.done.nonzero()
    rows = (place[ended[:, 1]] >= 0).nonzero().squeeze(1)
    final = rows[(ended[rows, 0] * len(chosen) + place[ended[rows, 1]]).argsort()]

    def picked(x: Any, along: int) -> Any:
        if isinstance(x, dict):
            return {k: picked(v, along) for k, v in x.items()}
        return x if x is None else x.index_select(along, chosen)

    whole = {name: picked(getattr(r, name), 1) for name in OVER_TIME}
    return Rollout(
        **whole,
        **{name: picked(getattr(r, name), 0) for name in PER_ENV},
        stats={},
        source=r.source,
        final_obs={k: v[final] for k, v in r.final_obs.items()},
    )


# [T,N,...]
OVER_TIME = (
    "obs",
    "trace",
    "x0",
    "logp",
    "rewards",
    "discounts",
    "done",
    "executed",
    "mask",
    "version",
    "gains",
)
PER_ENV = ("outcome", "success", "lengths", "last_obs")  # [N,...]


class RolloutReplay:
    """Owns the columns of the last `age` updates; `share` of a batch is replayed, in groups of `group`
    columns.

    by_return: a group whose returns are all alike teaches nothing, and is not kept; stop: from this update on
    nothing is (0: never).
    """

    def __init__(self, share: float, age: int, group: int, seed: int, by_return: bool = True, stop: int = 0):
        self.share, self.group, self.seed, self.by_return, self.stop = share, group, seed, by_return, stop
        self.kept: deque[Rollout] = deque(maxlen=age)

    def compose(self, fresh: Rollout, update: int) -> Rollout:
        """`fresh` with columns of earlier updates behind it, as many as `replayed` says; then the fresh ones
        are kept."""
        if not self.share or 0 < self.stop <= update:
            self.kept.clear()
            return fresh
        sizes = [r.mask.shape[1] // self.group for r in self.kept]
        wanted = round(fresh.mask.shape[1] // self.group * self.share / (1 - self.share))
        drawn = np.sort(np.random.default_rng(mix(self.seed, 31, update)).permutation(sum(sizes))[:wanted])
        old, first = None, 0
        for r, size in zip(self.kept, sizes, strict=True):
            groups = torch.from_numpy(drawn[(drawn >= first) & (drawn < first + size)] - first)
            first += size
            if len(groups):
                columns = (groups[:, None] * self.group + torch.arange(self.group)).flatten()
                part = columns_of(r, columns)
                old = part if old is None else side_by_side(old, part)
        self.keep(fresh)
        return fresh if old is None else replace(side_by_side(fresh, old), replayed=old.mask.shape[1])

    def keep(self, fresh: Rollout) -> None:
        """Copy what may teach again of a rollout; it takes the place of the oldest."""
        n = fresh.mask.shape[1]
        if self.group > 1 and self.by_return:
            outcome = fresh.outcome.view(-1, self.group)
            teaches = (outcome != outcome[:, :1]).any(1).repeat_interleave(self.group)
        else:
            teaches = fresh.mask.any(0)
        self.kept.append(columns_of(fresh, torch.arange(n, device=teaches.device)[teaches]))

    def state_dict(self) -> dict:
        return {
            "kept": [
                {name: getattr(r, name) for name in (*OVER_TIME, *PER_ENV, "final_obs", "source")}
                for r in self.kept
            ]
        }

    def load_state_dict(self, state: dict) -> None:
        self.kept.clear()
        self.kept.extend(Rollout(**r, stats={}) for r in state["kept"])
