"""Learning a `video` model: first the arm's state (`world_models.fit`), then chunks of frames, then the heads
(`video_heads`)."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robo_rl.errors import UserError
from robo_rl.log import Progress
from robo_rl.optim import AdamW
from robo_rl.types import Each, silently
from world_models.fit import PARTS, Fitter, descend, fit_state, load_fit_state, normal, pace, smooth
from world_models.model import place_of
from world_models.options import FitOptions, VideoFitOptions
from world_models.points import STEADY, in_a_row, steady_points
from world_models.recorded import Recorded
from world_models.video import Video, patches_of
from world_models.video_heads import HeadFitter


def chunk_rows(data: Recorded, last: np.ndarray, held: np.ndarray, chunk: int) -> tuple[Tensor, Tensor]:
    """Rows that a chunk may begin in, and those of them that a second one may follow; `last` [E]: the last
    row that one may end in.

    UserError: no episode that is learnt from is long enough."""
    spans = [(a, b) for a, b, h in zip(data.first, last, held, strict=True) if not h and b - a >= chunk]
    if not spans:
        raise UserError(
            f"no recorded episode is longer than {chunk} steps, the frames a video model makes at once; "
            "record longer ones"
        )
    once, twice = (np.concatenate([np.arange(a, b - n * chunk + 1) for a, b in spans]) for n in (1, 2))
    return torch.from_numpy(once), torch.from_numpy(twice)


def seen_at(model: Video, images: Mapping[str, Any], rows: np.ndarray) -> Tensor:
    """Frames of rows [B] as patches [B,V 48,g,g], where the model is."""
    views = model.spec.control.views
    return patches_of({v: images[v][rows] for v in views}, views).to(place_of(model))


def point_units(model: Video, data: Recorded) -> Tensor:
    """What points [P] are multiplied by: 1 / std, and 0 of those that flicker; 1 where few frames tell it."""
    three = in_a_row(data, lambda rows: seen_at(model, data.images, rows), len(model.spec.control.views))
    if three is None:
        return torch.ones(model.points)
    return steady_points(three) / three[:, 0].std(0).clamp(min=STEADY)


def with_points(model: Video, data: Recorded, each: Each = silently) -> Recorded:
    """The data with where colours are beside the states."""

    def of(images: Mapping[str, Any]) -> np.ndarray:
        count = len(images[model.spec.control.views[0]])
        parts = each("find colours in", np.split(np.arange(count), range(256, count, 256)), "× 256 frames")
        return torch.cat([model.located(seen_at(model, images, r)) for r in parts]).cpu().numpy()

    return data.with_numbers(of)


def drawn_ages(most: Tensor, generator: torch.Generator) -> Tensor:
    """Ages [B] of episodes that are at most `most` [B] steps old: one in four is new, one in two as old as
    can be, the others between."""
    u = torch.rand(len(most), generator=generator)
    return torch.where(
        u < 0.25, 0, torch.where(u < 0.75, most, ((u - 0.75) * 4 * (most + 1)).long().clamp(max=most))
    )


def pixel_spread(frames: Tensor) -> Tensor:
    """Std [V] of a pixel over frames [B,1,V 48,g,g], root mean square over a camera's."""
    return frames.unflatten(2, (-1, 48)).std(0).square().mean((0, 2, 3, 4)).sqrt().clamp(min=1e-2)


def evened(square: Tensor) -> Tensor:
    """W [V,3,3] that makes colours alike: of changes y with the mean products E[y y^T] = `square` [V,3,3],
    the components of W y have one mean square, and over all three it is 1. Those that are weaker than a
    tenth of the strongest (RMS) are raised no further than that one would be: what hardly ever changes is
    noise."""
    value, vector = torch.linalg.eigh(square)
    floor = (0.01 * value[:, -1:]).clamp(min=1e-8)
    scale = value.maximum(floor).rsqrt()
    total = (scale.square() * value.clamp(min=0)).mean(1, keepdim=True).clamp(min=1e-8)
    return torch.einsum("vik,vk,vjk->vij", vector, scale * total.rsqrt(), vector)


class VideoFitter:
    """A model being learnt: owns the optimizer, the averaged weights, the generator and the count of updates.

    `fresh` False: it goes on from the model's weights, in the units they were learnt in. `frames_only`: it
    leaves arm and heads as they are.
    `more`: a further term of the loss of frames, () -> (value, parts). device: where it learns; the model
    goes there, rows of the data are chosen on the host.
    """

    def __init__(
        self,
        model: Video,
        data: Recorded,
        options: VideoFitOptions,
        seed: int,
        fresh: bool = True,
        device: str = "cpu",
        frames_only: bool = False,
    ):
        self.model, self.options, after = model, options, model.options.after
        self.frames_only = frames_only
        self.device = device
        model.to(device)
        if model.points:
            if fresh:
                model.weight.copy_(point_units(model, data))
            with Progress(patience=2) as progress:
                data = with_points(model, data, progress.each)
        self.recorded = data  # with what the ensemble knows of each step as its state
        self.data, steps = data.extended()  # rows from here on are those of it
        self.more: Callable[[], tuple[Tensor, dict[str, Tensor]]] | None = None
        arm = FitOptions(updates=options.arm)
        self.arm = Fitter(model.proprio, data, arm, seed, fresh, device)
        if frames_only:
            self.arm.update = options.arm
            model.proprio.requires_grad_(False)
        self.generator = torch.Generator().manual_seed(seed)
        self.update, c = 0, model.options.chunk
        last = self.data.end - 1 - ~(data.known & after)  # the last row that a chunk may end in
        self.rows, self.twice = chunk_rows(self.data, last, data.held, c)
        self.state, self.action = (
            torch.from_numpy(x).to(device) for x in (self.data.state, self.data.action)
        )
        self.begins = torch.from_numpy(np.repeat(self.data.first, self.data.lengths))
        self.task = torch.from_numpy(np.repeat(self.data.task, self.data.lengths)).to(device)
        self.heads = HeadFitter(model, data, self.data, steps, options, seed)
        if fresh:
            self.measure(
                self.rows[
                    torch.randint(0, len(self.rows), (min(512, len(self.rows)),), generator=self.generator)
                ]
            )
        self.evened = evened(self.squared_changes()).to(device)
        self.average = copy.deepcopy(model)
        self.mine = [*model.net.parameters()]
        self.opt = AdamW(self.mine, lr=options.lr, weight_decay=1e-4, fused=False)

    def measure(self, rows: Tensor) -> None:
        """The model's unit: the mean square change of each frame of the chunks that begin in rows [B], by
        view, as a sum of nonnegative parts of the arm's squared motion: each by its own measure, as Itakura
        and Saito have it, whose multiplicative updates (Fevotte and Idier 2011, exponent 1/2) need no step
        size."""
        m, k = self.model, torch.arange(1, self.model.options.chunk + 1)
        views = m.rest.shape[1]
        square = torch.cat(
            [
                (self.patches(r[:, None] + k) - self.patches(r[:, None]))
                .unflatten(2, (views, 48))
                .square()
                .mean((3, 4, 5))
                for r in rows.split(64)
            ]
        )
        motion = m.motion(self.state[rows], self.state[rows[:, None] + k]).square()
        x = torch.cat([motion, torch.ones_like(motion[..., :1])], 2)
        w = square.mean(0)[..., None] / x.mean(0).sum(-1)[:, None, None].expand(-1, views, x.shape[2])
        for _ in range(300):
            told = torch.einsum("bcs,cvs->bcv", x, w).clamp(min=1e-6)
            more, less = (
                torch.einsum("bcv,bcs->cvs", square / told.square(), x),
                torch.einsum("bcv,bcs->cvs", 1 / told, x),
            )
            w = w * (more / less.clamp(min=1e-12)).sqrt()
        if m.options.doubt:
            m.pixel.copy_(pixel_spread(self.patches(rows[:, None])))
        m.moving.copy_(w[..., :-1])
        m.rest.copy_(w[..., -1].clamp(min=1e-4))

    def squared_changes(self) -> Tensor:
        """Mean products [V,3,3] of the colours of changes, in units of `Video.unit`, over chunks that begin
        all over the data."""
        m, k = self.model, torch.arange(1, self.model.options.chunk + 1)
        rows = self.rows[:: max(1, len(self.rows) // 256)]
        parts = []
        for r in rows.split(32):
            change = self.patches(r[:, None] + k) - self.patches(r[:, None])
            y = (change / m.unit(self.state[r], self.state[r[:, None] + k])).unflatten(2, (-1, 3, 16))
            parts.append(torch.einsum("bcvipxy,bcvjpxy->vij", y, y) / (y.numel() // len(r) // y.shape[2] / 3))
        return torch.stack(parts).sum(0).cpu() / len(rows)

    def patches(self, rows: Tensor) -> Tensor:
        """Frames of rows [B,T] as patches [B,T,V 48,g,g]."""
        at = rows.numpy()
        views = self.model.spec.control.views
        return patches_of({v: self.data.images[v][at] for v in views}, views).to(self.device)

    def part(self, rows: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chunks that begin in rows [B] of which e [B] steps are commanded: states after [B,C,S], what the
        net is told of the actions [B,C,.] as `video.padded` makes them, and which of their frames count,
        bool[B,C]."""
        k = torch.arange(self.model.options.chunk)
        steps = rows[:, None] + torch.minimum(k, e[:, None] - 1)
        told = self.model.told(self.action[steps], self.task[rows])
        return self.state[steps + 1], told, (k < e[:, None]).to(self.device)

    def recalled(self, rows: Tensor, age: Tensor) -> dict[str, Tensor]:
        """What a model keeps of frames at rows [B] that began `age` [B] steps before them."""
        o, began = self.model.options, rows - age
        past = (age[:, None] - torch.arange(1, o.history)).clamp(min=0)
        memory = ((age[:, None] // o.stride - torch.arange(o.memory)) * o.stride).clamp(min=0)
        every = self.patches(began[:, None] + torch.cat([age[:, None], past, memory], 1)).split(
            [1, o.history - 1, o.memory], 1
        )
        return {"last": every[0][:, 0]} | {
            k: v for k, v in zip(("past", "memory"), every[1:], strict=True) if v.shape[1]
        }

    def ages(self, rows: Tensor) -> Tensor:
        """How long ago each of the rows [B] began: one in four just now, one in two with its episode, the
        others in between."""
        return drawn_ages(rows - self.begins[rows], self.generator)

    @torch.no_grad()
    def led(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(rows a chunk later, frames before them [B,F,V 48,g,g]) where the model made that chunk, from
        recorded frames at rows [B]."""
        m, age = self.model, self.ages(rows)
        kept = self.recalled(rows, age)
        states, actions, _ = self.part(rows, torch.full((len(rows),), m.options.chunk))
        state, shape = (
            self.state[rows],
            (len(rows), m.options.chunk * kept["last"].shape[1], *kept["last"].shape[2:]),
        )
        y = m.sample(
            m.before(kept), state, states, actions, lambda k: normal(shape, self.generator, self.device)
        )
        frames = (kept["last"][:, None] + m.changes(y, state, states)).clamp(-1, 1)
        return rows + m.options.chunk, m.before(m.remember(kept, frames, age.to(self.device)))

    def contexts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, frames before them): recorded ones, and in the second half of training a share of the
        model's own."""
        own = (
            round(self.options.own * len(rows))
            if self.update >= self.options.updates // 2 and len(self.twice)
            else 0
        )
        plain = rows[own:]
        before = self.model.before(self.recalled(plain, self.ages(plain)))
        if not own:
            return plain, before
        later, led = self.led(self.twice[torch.randint(0, len(self.twice), (own,), generator=self.generator)])
        return torch.cat([later, plain]), torch.cat([led, before])

    def loss(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(1) on chunks that begin in rows [B], some of which are replaced by such as follow the model's own
        frames. Errors are those of evened colours: a grey arm changes most pixels, all colours of them
        together, and what is small and coloured would hardly count beside it."""
        m, o, b, c = self.model, self.options, len(rows), self.model.options.chunk
        rows, before = self.contexts(rows)
        # every other chunk is whole
        e = torch.randint(1, 2 * c + 1, (b,), generator=self.generator).clamp(max=c)
        states, actions, counts = self.part(rows, e)
        clip = self.patches(rows[:, None] + torch.arange(1, c + 1))
        unit = m.unit(self.state[rows], states)
        y = ((clip - before[:, :1]) / unit).flatten(1, 2)
        t = torch.rand(b, generator=self.generator)
        t[b - round(o.plain * b) :] = 1
        t, eps = t.to(self.device), normal(y.shape, self.generator, self.device)
        noise: Any = None
        if m.options.context_noise:
            # one in three has none
            drawn = (1.5 * torch.rand(b, generator=self.generator) - 0.5).clamp(min=0)
            level = m.options.context_noise * drawn.to(self.device)
            noise = (
                level[:, None, None, None, None] * normal(before.shape, self.generator, self.device),
                level,
            )
        wide = t[:, None, None, None]
        guess = m.seen((1 - wide) * y + wide * eps, t, before, self.state[rows], states, actions, noise)
        wrong = (guess - clip.view_as(guess)).flatten(4)  # [B,C,V,3,.]
        # |W wrong|^2 of their mean products: W is small and the frames are large
        products = wrong @ wrong.transpose(-1, -2) / wrong[0, 0, 0].numel()
        square = (products * (self.evened.transpose(-1, -2) @ self.evened)).sum((3, 4))
        error = (square / unit[:, :, ::48, 0, 0].square()).mean(2)
        frames = (error * counts).sum() / counts.sum()
        return frames, {"frames": frames.detach()}

    def fit(self, tick: Callable[[int, dict[str, float]], bool] = lambda update, parts: True) -> bool:
        """Go on to the end -> True, or until `tick(updates made, running means)` says False; those of arm and
        heads count."""
        o, recent, none = self.options, {}, {"state": math.nan, "frames": math.nan, "success": math.nan}
        if self.arm.update < o.arm:
            if not self.arm.fit(
                lambda n, parts: tick(n, none | {"state": parts["state"], "success": parts["success"]})
            ):
                return False
            take_arm(self)
        pairs = [
            (a, b)
            for a, b in zip(self.average.net.parameters(), self.model.net.parameters(), strict=True)
            if b.requires_grad
        ]
        while self.update < o.updates:
            rows = self.rows[torch.randint(0, len(self.rows), (o.batch,), generator=self.generator)]
            value, parts = self.loss(rows)
            if self.more is not None:
                extra, told = self.more()
                value, parts = value + extra, parts | told
            if not math.isfinite(float(value.detach())):
                raise UserError(
                    f"the loss of the video model is no longer finite after {self.update} updates; start "
                    "again with a smaller learning rate"
                )
            self.opt.param_groups[0]["lr"] = pace(o.lr, self.update, o.updates)
            descend(
                value, self.opt, self.mine, 1.0, pairs, min(o.ema, (1 + self.update) / (10 + self.update))
            )
            self.update += 1
            smooth(recent, parts)
            if not tick(o.arm + self.update, none | recent):
                return False
        if self.frames_only:
            return True
        if not self.heads.update:
            self.heads.begin(self.average)
        return self.heads.fit(lambda n, parts: tick(o.arm + o.updates + n, none | parts))

    @property
    def made(self) -> int:
        """Updates of all parts."""
        return self.arm.update + self.update + self.heads.update

    def result(self) -> Video:
        return copy.deepcopy(self.average)

    def state_dict(self) -> dict:
        """Everything to go on exactly (with the same data)."""
        return fit_state(self, ("arm", *PARTS)) | {"heads": self.heads.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        load_video_fit(self, state, ("arm", *PARTS))


def take_arm(fitter: Any) -> None:
    """The arm's averaged weights become the model's and stay."""
    for target in (fitter.model, fitter.average):
        target.proprio.load_state_dict(fitter.arm.result().state_dict())
        target.proprio.requires_grad_(False)


def load_video_fit(fitter: Any, state: dict, parts: tuple[str, ...]) -> None:
    """A fit with its arm and heads as `state` has it."""
    load_fit_state(fitter, state, parts)
    fitter.heads.begin(fitter.average)
    fitter.heads.load_state_dict(state["heads"])
    if fitter.arm.update >= fitter.options.arm:
        take_arm(fitter)
