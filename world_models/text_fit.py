"""Learning a `text` model: recorded steps as what is read and written, cross-entropy of what is written, an
average of the weights."""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from robo_rl.errors import UserError
from robo_rl.optim import AdamW
from world_models.fit import descend, fit_state, grown, load_fit_state, smooth, warm_cosine
from world_models.recorded import Recorded
from world_models.text import CHANGES, REASONS, TextModel, lists
from world_models.text_options import TextFitOptions


def check_text_data(data: Recorded, where: str) -> None:
    """Raise UserError for recorded episodes that are no text."""
    if not np.isin(data.state, (0, 1)).all():
        raise UserError(
            f"data set {where} has states other than 0 and 1: no sentences that hold or do not. Train --kind "
            "latent"
        )
    if not data.sparse or not np.array_equal(data.success, data.terminated):
        raise UserError(
            f"data set {where}: a text model knows one outcome, success, which ends an episode and is its "
            "only reward"
        )
    known = np.isfinite(data.after).all(1)
    if (most := int((data.state != data.after)[known].sum(1).max(initial=0))) > CHANGES:
        raise UserError(
            f"data set {where}: a step changes {most} sentences, and a text model writes at most {CHANGES}; "
            "give the simulator sentences of which a command changes fewer, or train --kind latent"
        )


class TextFitter:
    """A text model being learnt: owns the optimizer, the averaged weights, the generator and the count of
    updates."""

    def __init__(self, model: TextModel, data: Recorded, options: TextFitOptions, seed: int):
        self.model, self.options = model, options
        state = torch.from_numpy(data.state > 0.5)
        episode = np.repeat(np.arange(len(data)), data.lengths)
        known = np.asarray(np.isfinite(data.after).all(1))
        rows = np.flatnonzero(~data.held[episode] & known)
        won = np.zeros(len(state), bool)
        won[data.end[data.success] - 1] = True
        self.state, self.won = state[rows], torch.from_numpy(won[rows])
        self.command = model.command(torch.from_numpy(data.action[rows]))
        self.changes = self.state ^ torch.from_numpy(np.nan_to_num(data.after[rows]) > 0.5)
        self.episode = torch.from_numpy(episode[rows])
        model.remember(self.state, self.command, self.changes, self.won)
        starts = state[torch.from_numpy(data.first[~data.held])]
        model.fixed.copy_(~self.changes.any(0) & starts.any(0) & ~starts.all(0))
        self.rooms = starts
        self.near = (
            torch.cat(
                [
                    model.like(self.state[i], self.command[i], self.episode[i, None] == self.episode)
                    for i in torch.arange(len(rows)).split(512)
                ]
            )
            if model.options.retrieve
            else None
        )
        self.opt = AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay, fused=False)
        self.average = copy.deepcopy(model)
        self.generator = torch.Generator().manual_seed(seed)
        self.update = 0

    def batch(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """(read, roles, to be written int64[n,L]) of random recorded steps."""
        m, i = self.model, torch.randint(0, len(self.state), (n,), generator=self.generator)
        state, command = self.state[i], self.command[i]
        reasons = (
            [lists(m.deciding(state, command), REASONS, m.none), torch.full((n, 1), m.then)]
            if m.options.reason
            else []
        )
        outcome = torch.where(self.won[i], m.done, m.on)[:, None]
        return (
            *m.shown(state, command, None if self.near is None else self.near[i]),
            gathered([*reasons, lists(self.changes[i], CHANGES, m.none), outcome], m.none),
        )

    def tasks(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same of what was wanted in random recorded rooms."""
        m, rooms = self.model, self.rooms[torch.randint(0, len(self.rooms), (n,), generator=self.generator)]
        return (
            *m.asked(rooms & ~m.fixed),
            gathered([lists(rooms & m.fixed, CHANGES, m.none), torch.full((n, 1), m.on)], m.none),
        )

    def loss(self, read: Tensor, roles: Tensor, write: Tensor) -> Tensor:
        """Mean cross-entropy of what is written."""
        m = self.model
        before = torch.cat([torch.full((len(write), 1), m.so), write[:, :-1]], 1)
        return F.cross_entropy(m.net(read, roles, before).flatten(0, 1), write.flatten(), ignore_index=m.none)

    def fit(self, tick: Callable[[int, dict[str, float]], bool] = lambda update, parts: True) -> bool:
        """Go on to the end -> True, or until `tick(updates made, running means of the losses)` says False."""
        o, recent = self.options, {}
        pairs = list(zip(self.average.parameters(), self.model.parameters(), strict=True))
        # one recorded step at least
        asks = min(round(o.tasks * o.batch), o.batch - 1) if self.model.fixed.any() else 0
        while self.update < o.updates:
            text = self.loss(*self.batch(o.batch - asks))
            task = self.loss(*self.tasks(asks)) if asks else text.new_zeros(())
            self.opt.param_groups[0]["lr"] = warm_cosine(o.lr, self.update, o.updates)
            descend(
                text + o.tasks * task, self.opt, self.model.parameters(), 1.0, pairs, grown(0.99, self.update)
            )
            self.update += 1
            smooth(recent, {"text": text.detach(), "tasks": task.detach()})
            if not tick(self.update, recent):
                return False
        return True

    def result(self) -> TextModel:
        """The model with its averaged weights."""
        return copy.deepcopy(self.average)

    def state_dict(self) -> dict:
        """Everything to go on exactly (with the same data)."""
        return fit_state(self)

    def load_state_dict(self, state: dict) -> None:
        load_fit_state(self, state)


def gathered(parts: list[Tensor], none: int) -> Tensor:
    """int64[B,L]: parts int64[B,·] one after the other without the tokens `none`, which fill up the end."""
    x = torch.cat(parts, 1)
    return x.gather(1, (x == none).long().argsort(dim=1, stable=True))
