"""Learning a `video` model: first the arm's state (`world_models.fit`), then chunks of frames, and the heads beside them."""

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from robo_rl.errors import UserError
from robo_rl.optim import AdamW
from world_models.fit import Fitter, descend, pace, smooth
from world_models.options import FitOptions, VideoFitOptions
from world_models.recorded import Recorded
from world_models.video import Video, patches_of


class VideoFitter:
    """A model being learnt: owns the optimizer, the averaged weights, the generator and the count of updates.

    `fresh` False: it goes on from the model's weights, in the units they were learnt in, and leaves the arm as it is.
    `more`: a further term of the loss of frames, () -> (value, parts).
    """

    def __init__(self, model: Video, data: Recorded, options: VideoFitOptions, seed: int, fresh: bool = True):
        self.model, self.options, after = model, options, model.options.after
        self.data, steps = data.extended()  # rows from here on are those of it
        self.more: Callable[[], tuple[Tensor, dict[str, Tensor]]] | None = None
        self.arm = Fitter(model.proprio, data, FitOptions(updates=options.arm, batch=128), seed, fresh)
        if not fresh:
            self.arm.update = options.arm
            model.proprio.requires_grad_(False)
        self.generator = torch.Generator().manual_seed(seed)
        self.update, c = 0, model.options.chunk
        last = self.data.end - 1 - ~(data.known & after)  # the last row that a chunk may end in
        rows = np.concatenate([np.arange(a, b - c + 1) for a, b, h in zip(self.data.first, last, data.held, strict=True)
                               if not h and b - a >= c] or [np.zeros(0, np.int64)])
        if not len(rows):
            raise UserError(f"no recorded episode is longer than {c} steps, the frames a video model makes at once; record longer ones")
        self.rows = torch.from_numpy(rows)
        self.any = torch.from_numpy(steps[~np.repeat(data.held, data.lengths)])
        ends = steps[data.end - 1]
        self.events = torch.from_numpy(ends[~data.held & (data.success | data.terminated)])
        heads = torch.zeros(len(self.data.state), 3)
        heads[:, 0] = torch.from_numpy(self.data.reward) / model.proprio.gain
        heads[torch.from_numpy(ends[data.success]), 1] = 1
        heads[torch.from_numpy(ends[data.terminated]), 2] = 1
        self.heads, self.state, self.action = heads, torch.from_numpy(self.data.state), torch.from_numpy(self.data.action)
        episode = np.repeat(np.arange(len(self.data)), self.data.lengths)
        self.told = model.proprio.commanded(self.action, torch.from_numpy(self.data.task[episode]))
        rare = heads[self.any, 1:].mean(0).clamp(1e-6, 1 - 1e-6)
        often = (2 * rare + (heads[self.events, 1:].mean(0) if len(self.events) else rare)) / 3
        model.shift.copy_(torch.logit(often.clamp(max=1 - 1e-6)) - torch.logit(rare))
        if fresh:
            self.measure(self.rows[torch.randint(0, len(self.rows), (min(512, len(self.rows)),), generator=self.generator)])
        self.average = copy.deepcopy(model)
        self.mine = [*model.net.parameters(), *model.heads.parameters()]
        self.opt = AdamW(self.mine, lr=options.lr, weight_decay=1e-4, fused=False)

    def measure(self, rows: Tensor) -> None:
        """The model's unit: the mean square change of each frame of the chunks that begin in rows [B], by view, as a sum of
        nonnegative parts of the arm's squared motion: each by its own measure, as Itakura and Saito have it, whose
        multiplicative updates (Fevotte and Idier 2011, exponent 1/2) need no step size."""
        m, k = self.model, torch.arange(1, self.model.options.chunk + 1)
        views = m.rest.shape[1]
        square = torch.cat([(self.patches(r[:, None] + k) - self.patches(r[:, None])).unflatten(2, (views, 48)).square().mean((3, 4, 5))
                            for r in rows.split(64)])
        motion = m.motion(self.state[rows], self.state[rows[:, None] + k]).square()
        x = torch.cat([motion, torch.ones_like(motion[..., :1])], 2)
        w = square.mean(0)[..., None] / x.mean(0).sum(-1)[:, None, None].expand(-1, views, x.shape[2])
        for _ in range(300):
            told = torch.einsum("bcs,cvs->bcv", x, w).clamp(min=1e-6)
            more, less = torch.einsum("bcv,bcs->cvs", square / told.square(), x), torch.einsum("bcv,bcs->cvs", 1 / told, x)
            w = w * (more / less.clamp(min=1e-12)).sqrt()
        m.moving.copy_(w[..., :-1])
        m.rest.copy_(w[..., -1].clamp(min=1e-4))

    def patches(self, rows: Tensor) -> Tensor:
        """Frames of rows [B,T] as patches [B,T,V 48,g,g]."""
        at = rows.numpy()
        views = self.model.spec.control.views
        return patches_of({v: self.data.images[v][at] for v in views}, views)

    def part(self, rows: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chunks that begin in rows [B] of which e [B] steps are commanded: states after, actions [B,C,.] as
        `video.padded` makes them, and which of their frames count, bool[B,C]."""
        k = torch.arange(self.model.options.chunk)
        steps = rows[:, None] + torch.minimum(k, e[:, None] - 1)
        return self.state[steps + 1], self.action[steps], k < e[:, None]

    def loss(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(1) on chunks that begin in rows [B], and the heads on the steps of them and on as many other steps."""
        m, o, b, c = self.model, self.options, len(rows), self.model.options.chunk
        clip = self.patches(rows[:, None] + torch.arange(c + 1))
        e = torch.randint(1, 2 * c + 1, (b,), generator=self.generator).clamp(max=c)  # every other chunk is whole
        states, actions, counts = self.part(rows, e)
        last, y = clip[:, 0], ((clip[:, 1:] - clip[:, :1]) / m.unit(self.state[rows], states)).flatten(1, 2)
        t = torch.rand(b, generator=self.generator)
        t[:round(o.plain * b)] = 1
        eps = torch.randn(y.shape, generator=self.generator)
        wide = t[:, None, None, None]
        guess = m.clean((1 - wide) * y + wide * eps, t, last, self.state[rows], states, actions)
        error = (guess - y).square().view(b, c, -1).mean(-1)
        frames = (error * counts).sum() / counts.sum()
        # heads: one imagined frame of each chunk, random steps, and every event as often as all those
        k = (torch.rand(b, generator=self.generator) * e).long()
        seen = (last[:, None] + m.changes(guess.detach(), self.state[rows], states)).clamp(-1, 1)[torch.arange(b), k]
        some = self.any[torch.randint(0, len(self.any), (b,), generator=self.generator)]
        if len(self.events):
            some = torch.cat([some, self.events[torch.randint(0, len(self.events), (b,), generator=self.generator)]])
        after = int(m.options.after)  # the frame and state that tell of step `at` are in row at + after
        at = torch.cat([rows + k + 1 - after, some])
        shown = torch.cat([seen, self.patches(some[:, None] + after)[:, 0]])
        out, want = m.judged(shown, self.state[at + after], self.told[at]), self.heads[at]
        reward = (out[:, 0] - want[:, 0]).square().mean()
        events = F.binary_cross_entropy_with_logits(out[:, 1:], want[:, 1:])
        return frames + 0.1 * reward + 0.5 * events, {"frames": frames.detach(), "reward": reward.detach(), "success": events.detach()}

    def fit(self, tick: Callable[[int, dict[str, float]], bool] = lambda update, parts: True) -> bool:
        """Go on to the end -> True, or until `tick(updates made, running means)` says False; the arm's updates count."""
        o, recent = self.options, {}
        if self.arm.update < o.arm:
            if not self.arm.fit(lambda n, parts: tick(n, {"state": parts["state"], "success": parts["success"], "frames": math.nan})):
                return False
            self.take_arm()
        pairs = [(a, b) for a, b in zip(self.average.parameters(), self.model.parameters(), strict=True) if b.requires_grad]
        while self.update < o.updates:
            rows = self.rows[torch.randint(0, len(self.rows), (o.batch,), generator=self.generator)]
            value, parts = self.loss(rows)
            if self.more is not None:
                extra, told = self.more()
                value, parts = value + extra, parts | told
            if not math.isfinite(float(value.detach())):
                raise UserError(f"the loss of the video model is no longer finite after {self.update} updates; start again with a "
                                "smaller learning rate")
            self.opt.param_groups[0]["lr"] = pace(o.lr, self.update, o.updates)
            descend(value, self.opt, self.mine, 1.0, pairs, min(o.ema, (1 + self.update) / (10 + self.update)))
            self.update += 1
            smooth(recent, parts)
            if not tick(o.arm + self.update, {"state": math.nan} | recent):
                return False
        return True

    def take_arm(self) -> None:
        """The arm's averaged weights become the model's and stay."""
        for target in (self.model, self.average):
            target.proprio.load_state_dict(self.arm.result().state_dict())
            target.proprio.requires_grad_(False)

    def result(self) -> Video:
        return copy.deepcopy(self.average)

    def state_dict(self) -> dict:
        """Everything to go on exactly (with the same data)."""
        return {"arm": self.arm.state_dict(), "model": self.model.state_dict(), "average": self.average.state_dict(),
                "opt": self.opt.state_dict(), "generator": self.generator.get_state(), "update": self.update}

    def load_state_dict(self, state: dict) -> None:
        self.arm.load_state_dict(state["arm"])
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.opt.load_state_dict(state["opt"])
        self.generator.set_state(state["generator"])
        self.update = state["update"]
        if self.arm.update >= self.options.arm:
            self.take_arm()
