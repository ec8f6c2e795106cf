"""Learning a `latent` model: windows of recorded episodes, a loss along the model's own rollout, an average
of the weights."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from robo_rl.optim import AdamW, kernels
from world_models.latent import Latent
from world_models.options import FitOptions
from world_models.recorded import Recorded


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Rows to train on as tensors: `ends[r]` is the end of row r's episode; steps run from row r to ends[r] -
    1."""

    state: Tensor
    action: Tensor  # and the words of the instruction, as `Latent.commanded` gives them
    heads: Tensor  # [F,3] reward / gain, success, end
    before: Tensor  # [F,S] the state before, or itself where the episode begins
    after: Tensor  # [F,S] the state after the action
    seen: Tensor  # bool[F] whether that was recorded
    ends: Tensor  # int64[F]
    rows: Tensor  # int64[R] rows of the training episodes
    # the state that every success and end led to was recorded: the heads learn from states, not from
    # predictions
    told: bool


def windows(data: Recorded, model: Latent, statistics: bool = True) -> TrainingRows:
    """The training part of the data; fits the model's statistics to it first, or (`statistics` False) keeps
    its units and lets its states go as far as these too."""
    state, reward = torch.from_numpy(data.state), torch.from_numpy(data.reward)
    episode = np.repeat(np.arange(len(data)), data.lengths)
    train = ~data.held[episode]
    seen = np.asarray(np.isfinite(data.after).all(1))
    after, at = torch.from_numpy(data.after).nan_to_num(), torch.from_numpy(np.flatnonzero(train & seen))
    heads = torch.cat([torch.zeros(len(state), 1), torch.from_numpy(data.events)], 1)
    mine = torch.from_numpy(train)
    if statistics:
        model.fit(state[mine], after[at] - state[at], reward[mine], heads[mine, 1:])
    else:
        model.widen(state[mine], heads[mine, 1:])
    heads[:, 0] = reward / model.gain
    before = state.roll(1, 0)
    before[torch.from_numpy(data.first)] = state[torch.from_numpy(data.first)]
    action = model.commanded(torch.from_numpy(data.action), torch.from_numpy(data.task[episode]))
    return TrainingRows(
        state,
        action,
        heads,
        before,
        after,
        torch.from_numpy(seen),
        torch.from_numpy(data.end[episode]),
        torch.from_numpy(np.flatnonzero(train)),
        bool(seen[data.end[data.success | data.terminated] - 1].all()),
    )


def moved_rows(rows: TrainingRows, device: str) -> TrainingRows:
    """The same on `device`."""
    named = ((f.name, getattr(rows, f.name)) for f in fields(rows))
    return replace(rows, **{k: v.to(device) for k, v in named if isinstance(v, Tensor)})


def missed(deltas: list[Tensor], want: Tensor) -> Tensor:
    """Squared error [M,B] of predicted changes, those of every refinement added up."""
    errors: Any = sum((y - want).square().mean(-1) for y in deltas)
    return errors


def loss(model: Latent, w: TrainingRows, rows: Tensor, unroll: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Of windows that begin in rows int64[M,B]; what lies beyond an episode's end counts for nothing."""
    s, before, last = w.state[rows], w.before[rows], w.ends[rows] - 1
    parts = {k: s.new_zeros(()) for k in ("state", "reward", "success", "end")}
    weight = s.new_zeros(())
    for k in range(unroll):
        at = rows + k
        live = (at <= last).float()
        at = torch.minimum(at, last)
        moves = (live > 0) & w.seen[at]
        a, target = w.action[at], w.after[at]
        inputs = model.inputs(s, before, a)
        deltas = model.refined(inputs, model.net(inputs))
        after = s + deltas[-1] * model.scale
        known = moves.float() if w.told else live
        heads = (
            model.outcome(target, w.state[at], a) if w.told else model.outcome(after.detach(), s.detach(), a)
        )
        parts["state"] = parts["state"] + (missed(deltas, (target - s) / model.scale) * moves).sum() / (k + 1)
        if k:  # beside it one step from what was recorded, or the rollout costs the first steps
            inputs = model.inputs(w.state[at], w.before[at], a)
            step = missed(model.refined(inputs, model.net(inputs)), (target - w.state[at]) / model.scale)
            parts["state"] = parts["state"] + (step * moves).sum()
        weight = weight + moves.sum()
        want = w.heads[at]
        parts["reward"] = parts["reward"] + ((heads[..., 0] - want[..., 0]).square() * known).sum()
        bce = (
            F.binary_cross_entropy_with_logits(
                heads[..., 1:], want[..., 1:], reduction="none", pos_weight=model.balance
            )
            * known[..., None]
        )
        parts["success"], parts["end"] = (
            parts["success"] + bce[..., 0].sum(),
            parts["end"] + bce[..., 1].sum(),
        )
        s, before = model.clip(after), s
    count = rows.numel() * unroll
    parts = {k: v / (weight.clamp(min=1) if k == "state" else count) for k, v in parts.items()}
    total = parts["state"] + 0.1 * parts["reward"] + parts["success"] + parts["end"]
    return total, {k: v.detach() for k, v in parts.items()}


def descend(
    value: Tensor, opt: AdamW, params, most: float, pairs: Sequence[tuple[Tensor, Tensor]], decay: float
) -> None:
    """One step of `opt` down `value`, gradient norm of `params` at most `most`; of `pairs` (average, weight)
    the average follows."""
    opt.zero_grad()
    value.backward()
    grads: list[Any] = [p.grad for p in params if p.grad is not None]
    # the arithmetic of `clip_grad_norm_`, wherever they are
    norm = torch.linalg.vector_norm(torch.stack(kernels._foreach_norm(grads)))
    kernels._foreach_mul_(grads, (most / (norm + 1e-6)).clamp(max=1.0))
    opt.step()
    with torch.no_grad():
        kernels._foreach_lerp_([a for a, _ in pairs], [p for _, p in pairs], 1 - decay)


def warm_cosine(lr: float, update: int, updates: int) -> float:
    """The learning rate of an update of states: 100 to warm up, then a cosine down to 0."""
    return lr * min(1.0, (update + 1) / 100) * 0.5 * (1 + math.cos(math.pi * update / updates))


def grown(ema: float, update: int) -> float:
    """The decay of an average of weights, which starts short and grows to `ema`."""
    return min(ema, (1 + update) / (10 + update))


def pace(lr: float, update: int, updates: int) -> float:
    """The learning rate of an update of frames: 50 to warm up, then a cosine down to a fiftieth."""
    return lr * min(1.0, (update + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * update / updates)))


PARTS = ("model", "average", "opt")  # of a fitter, each with a state of its own


def fit_state(fitter: Any, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """What a fitter goes on from exactly, with the same data: its `parts`, its generator and its count of
    updates."""
    return {name: getattr(fitter, name).state_dict() for name in parts} | {
        "generator": fitter.generator.get_state(),
        "update": fitter.update,
    }


def load_fit_state(fitter: Any, state: dict[str, Any], parts: Sequence[str] = PARTS) -> None:
    """Put back what `fit_state` took."""
    for name in parts:
        getattr(fitter, name).load_state_dict(state[name])
    fitter.generator.set_state(state["generator"])
    fitter.update = state["update"]


def smooth(recent: dict[str, float], parts: dict[str, Tensor]) -> None:
    """Let the running means `recent` follow `parts`."""
    for k, v in parts.items():
        recent[k] = float(v) if k not in recent else 0.98 * recent[k] + 0.02 * float(v)


def normal(shape: Sequence[int], generator: torch.Generator, device: str | torch.device) -> Tensor:
    """Standard normal numbers on `device`, of a generator that is on the host."""
    return torch.randn(shape, generator=generator).to(device)


class Fitter:
    """A model being learnt: owns the optimizer, the averaged weights, the generator and the count of updates.

    `fresh` False: it goes on from the model's weights, in the units they were learnt in. device: where it
    learns; the model goes there.
    """

    def __init__(
        self,
        model: Latent,
        data: Recorded,
        options: FitOptions,
        seed: int,
        fresh: bool = True,
        device: str = "cpu",
    ):
        self.model, self.options = model, options
        self.windows = moved_rows(windows(data, model.cpu(), fresh), device)
        model.to(device)
        self.opt = AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay, fused=False)
        self.average = copy.deepcopy(model)
        self.generator = torch.Generator().manual_seed(seed)
        self.update = 0

    def fit(self, tick: Callable[[int, dict[str, float]], bool] = lambda update, parts: True) -> bool:
        """Go on to the end -> True, or until `tick(updates made, running means of the losses)` says False."""
        o, m = self.options, self.model.options.members
        recent: dict[str, float] = {}
        pairs = list(zip(self.average.parameters(), self.model.parameters(), strict=True))
        for b, a in zip(self.average.buffers(), self.model.buffers(), strict=True):
            b.copy_(a)
        while self.update < o.updates:
            late = self.update >= o.updates // 2 and o.unroll > 1
            batch = max(16, o.batch // o.unroll * 2) if late else o.batch
            rows = self.windows.rows[
                torch.randint(0, len(self.windows.rows), (m, batch), generator=self.generator)
            ]
            value, parts = loss(self.model, self.windows, rows, o.unroll if late else 1)
            self.opt.param_groups[0]["lr"] = warm_cosine(o.lr, self.update, o.updates)
            descend(value, self.opt, self.model.parameters(), 10.0, pairs, grown(o.ema, self.update))
            self.update += 1
            smooth(recent, parts)
            if not tick(self.update, recent):
                return False
        return True

    def result(self) -> Latent:
        """The model with its averaged weights."""
        return copy.deepcopy(self.average)

    def state_dict(self) -> dict:
        """Everything to go on exactly (with the same data)."""
        return fit_state(self)

    def load_state_dict(self, state: dict) -> None:
        load_fit_state(self, state)
