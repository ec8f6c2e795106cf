"""Learning the heads of a `video` or `diffusers` model: reward, success and end as told from a frame, and the
error expected of a frame.

    heads: recorded frames, and frames of the model's own rollouts along recorded actions, labelled with what
    then happened doubt: log |frame^ - frame| (RMS, in std of the pixels) of such rollouts

Half of a batch are successes and ends, which are rare. So that a logit of 0 does not mean that share,
thresholds are set on rollouts that cover held-out episodes once: as many of them are said to succeed as did.
Where fewer than LEAST did, the log-odds are those of the training data.

Axes: `W` rollouts, `T` steps of each, `V` views, `S` state.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from robo_rl.optim import AdamW
from world_models.calibrate import covering, middle_of
from world_models.fit import normal, pace, smooth
from world_models.model import place_of
from world_models.options import VideoFitOptions
from world_models.recorded import Recorded
from world_models.video import Video, expected, to_patches

if TYPE_CHECKING:
    from world_models.wan import WanVideo
    from world_models.wan_options import DiffusersFitOptions

CHUNKS = 4  # of a rollout
BATCH = 16  # of each of: recorded steps, recorded events, steps of rollouts, events of rollouts
ROLLED = 16  # rollouts at once


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The model along recorded actions: frames uint8[W,T,V,h,w,3] and states [W,T,S] that heads look at, the
    rows int64[W,T] of the steps they tell of, made bool[W,T] (an episode has that step), error [W,T] of the
    frame after it and spread [W,T] of the arm's ensemble; age [W,T]: steps since a recorded frame."""

    frames: Tensor
    state: Tensor
    rows: Tensor
    made: Tensor
    error: Tensor
    spread: Tensor
    age: Tensor


class HeadFitter:
    """Heads being learnt: owns their optimizer, the generator, the count of updates and the rollouts.

    `data` is the recording, `longer` the same with the rows after last actions, in which `steps` are the rows
    of `data`.
    """

    def __init__(
        self,
        model: "Video | WanVideo",
        data: Recorded,
        longer: Recorded,
        steps: np.ndarray,
        options: "VideoFitOptions | DiffusersFitOptions",
        seed: int,
    ):
        self.model, self.data, self.options, self.seed = model, longer, options, seed
        self.generator, self.update = torch.Generator().manual_seed(seed + 1), 0
        self.opt: AdamW | None = None
        self.any = torch.from_numpy(steps[~np.repeat(data.held, data.lengths)])
        ends = steps[data.end - 1]
        self.events = torch.from_numpy(ends[~data.held & (data.success | data.terminated)])
        self.labels = torch.zeros(len(longer.state), 3)
        self.labels[torch.from_numpy(ends[data.success]), 1] = 1
        self.labels[torch.from_numpy(ends[data.terminated]), 2] = 1
        self.state, self.action = torch.from_numpy(longer.state), torch.from_numpy(longer.action)
        self.task = torch.from_numpy(np.repeat(longer.task, longer.lengths))
        self.device = place_of(model)  # rows are chosen on the host
        self.told = model.proprio.commanded(self.action.to(self.device), self.task.to(self.device)).cpu()
        # of each row's
        self.first, self.last = (
            torch.from_numpy(np.repeat(x, longer.lengths)) for x in (longer.first, longer.end - 2)
        )

    def begin(self, model: "Video | WanVideo") -> None:
        """Learn the heads of `model`, whose arm and frames stay as they are."""
        self.model = model
        mine = [*model.heads.parameters(), *(model.doubt.parameters() if model.doubt is not None else ())]
        self.opt = AdamW(mine, lr=self.options.lr, weight_decay=1e-2, fused=False)

    # ---- rollouts

    def roll(self, rows: Tensor, steps: int) -> Rollouts:
        """The model from recorded frames at rows [W], `steps` of its own along what was done."""
        m, views, parts = self.model, self.model.spec.control.views, []
        at = torch.minimum(rows[:, None] + torch.arange(steps), self.last[rows][:, None])
        made = rows[:, None] + torch.arange(steps) <= self.last[rows][:, None]
        for mine in torch.arange(len(rows)).split(ROLLED):
            r, k = rows[mine], at[mine]
            obs = {f"image/{v}": self.data.images[v][r.numpy()] for v in views}
            whole = self.data.state[r.numpy()]  # of what the ensemble knows
            obs |= {"state": whole[:, : m.spec.state], "task": np.array(m.spec.tasks)[self.task[r].numpy()]}
            _, p = m.step(m.start(obs, self.seed + r.numpy()), self.action[k])
            began = m.proprio.start(obs | {"state": whole}, self.seed + r.numpy())
            _, arm = m.proprio.step(began, self.action[k])
            frames, state = torch.stack([p.obs[f"image/{v}"] for v in views], 2), arm.obs["state"]
            true = torch.stack([torch.from_numpy(self.data.images[v][(k + 1).numpy()]) for v in views], 2)
            error = (frames.float() - true.float()).div(127.5).square().mean((3, 4, 5)).sqrt()
            if not m.options.after:
                first = torch.stack([torch.from_numpy(obs[f"image/{v}"]) for v in views], 1)[:, None]
                frames, state = (
                    torch.cat([first, frames[:, :-1]], 1),
                    torch.cat([self.state[r][:, None], state[:, :-1]], 1),
                )
            parts.append(
                (
                    frames,
                    state,
                    arm.uncertainty,
                    (error / m.pixel.cpu()).mean(2) if m.doubt is not None else error.mean(2),
                )
            )
        frames, state, spread, error = (torch.cat(x) for x in zip(*parts, strict=True))
        return Rollouts(frames, state, at, made, error, spread, torch.arange(1, steps + 1).expand(at.shape))

    def imagined(self) -> Rollouts:
        """Rollouts of training episodes: half begin anywhere, half a little before the end of one that
        succeeds or ends."""
        n, steps = self.options.imagined, CHUNKS * self.model.options.chunk
        generator = torch.Generator().manual_seed(self.seed + 2)
        rows = self.any[torch.randint(0, len(self.any), (n,), generator=generator)]
        if len(self.events):
            end = self.events[torch.randint(0, len(self.events), (n // 2,), generator=generator)]
            rows[: n // 2] = end - torch.randint(0, steps, (n // 2,), generator=generator)
            rows[: n // 2] = torch.maximum(rows[: n // 2], self.first[end])
        return self.roll(rows, steps)

    # ---- learning

    def varied(self, frames: Tensor) -> Tensor:
        """Frames uint8 [B,V,h,w,3] a little moved, brighter or darker and noisy, as patches [B,V 48,g,g]."""
        b, size = len(frames), frames.shape[2]
        most = size // 32
        moved = torch.randint(-most, most + 1, (2, b, 1), generator=self.generator) + torch.arange(size)
        y, x = moved.clamp(0, size - 1)
        frames = frames[torch.arange(b)[:, None, None], :, y[:, :, None], x[:, None]].movedim(3, 1)
        patches = to_patches(frames).flatten(1, 2)
        light = 1 + 0.1 * torch.randn(b, 1, 1, 1, generator=self.generator)
        return patches * light + 0.03 * torch.randn(patches.shape, generator=self.generator)

    def recorded(self, rows: Tensor) -> Tensor:
        """Frames uint8 [B,V,h,w,3] that tell of the steps `rows`."""
        at = (rows + self.model.options.after).numpy()
        return torch.stack(
            [torch.from_numpy(self.data.images[v][at]) for v in self.model.spec.control.views], 1
        )

    def loss(self, own: Rollouts, steps: Tensor, events: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Of one batch; of the rollouts' entries (flat) `steps` were made and `events` succeeded or ended."""
        m, after = self.model, int(self.model.options.after)

        def drawn(pool: Tensor) -> Tensor:
            if not len(pool):  # of events, where no episode succeeded or ended by itself
                return pool
            return pool[torch.randint(0, len(pool), (BATCH,), generator=self.generator)]

        rows = torch.cat([drawn(self.any), drawn(self.events)])
        mine = torch.cat([drawn(steps), drawn(events)])
        frames = self.varied(torch.cat([self.recorded(rows), own.frames.flatten(0, 1)[mine]]))
        state = torch.cat([self.state[rows + after], own.state.flatten(0, 1)[mine]])
        at = torch.cat([rows, own.rows.flatten()[mine]])
        noise = normal(state.shape, self.generator, self.device)
        state = state.to(self.device) + 0.1 * m.proprio.std * noise
        out = m.judged(frames.to(self.device), state, self.told[at].to(self.device))
        want = self.labels[at].to(self.device)
        reward = (out[:, 0] - want[:, 0]).square().mean()
        told = F.binary_cross_entropy_with_logits(out[:, 1:], want[:, 1:])
        total, parts = told + 0.1 * reward, {"reward": reward.detach(), "success": told.detach()}
        if m.doubt is not None:
            some = drawn(steps)
            seen, stood = (
                to_patches(own.frames.flatten(0, 1)[some]).flatten(1, 2),
                own.state.flatten(0, 1)[some],
            )
            age, spread = own.age.flatten()[some], own.spread.flatten()[some]
            told_of, true = self.told[own.rows.flatten()[some]], own.error.flatten()[some].clamp(min=1e-3)
            seen, stood, told_of, age, spread, true = (
                x.to(self.device) for x in (seen, stood, told_of, age, spread, true)
            )
            error = expected(m.doubt, m.proprio, seen, stood, told_of, age, spread)
            doubt = (error.log() - true.log()).square().mean()
            total, parts = total + doubt, parts | {"doubt": doubt.detach()}
        return total, parts

    def fit(self, tick: Callable[[int, dict[str, float]], bool] = lambda update, parts: True) -> bool:
        """Go on to the end -> True, or until `tick(updates made, running means)` says False."""
        o, recent = self.options, {}
        assert self.opt is not None  # `begin` was called
        if self.update == o.heads:
            return True
        self.labels[:, 0] = torch.from_numpy(self.data.reward) / self.model.proprio.gain.cpu()
        own = self.imagined()
        steps = own.made.flatten().nonzero()[:, 0]
        events = (own.made & (self.labels[own.rows, 1:].amax(-1) > 0)).flatten().nonzero()[:, 0]
        while self.update < o.heads:
            value, parts = self.loss(own, steps, events)
            self.opt.param_groups[0]["lr"] = pace(o.lr, self.update, o.heads)
            self.opt.zero_grad()
            value.backward()
            self.opt.step()
            self.update += 1
            smooth(recent, parts)
            if self.update == o.heads:
                self.set_thresholds(float((self.labels[self.any, 1:].amax(-1) > 0).float().mean()))
            if not tick(self.update, recent):
                return False
        return True

    # ---- thresholds

    def set_thresholds(self, rare: float) -> None:
        """The logits of success and end that mean 1/2; `rare`: how many steps of the training data are
        events."""
        m, often = self.model, 0.5 * (1 + rare)
        m.shift.fill_(
            math.log(often / (1 - often)) - math.log(max(rare, 1e-6) / (1 - min(rare, 1 - 1e-6)))
            if 0 < rare < 1
            else 0.0
        )
        steps = CHUNKS * m.options.chunk
        rows, _ = covering(self.data, np.flatnonzero(self.data.held), steps)
        if not len(rows):
            return
        rolled = self.roll(torch.from_numpy(rows), steps)
        each = [x.flatten(0, 1).split(256) for x in (rolled.frames, rolled.state, rolled.rows)]
        with torch.no_grad():
            parts = [
                m.judged(*(x.to(self.device) for x in (to_patches(f).flatten(1, 2), s, self.told[r]))).cpu()
                for f, s, r in zip(*each, strict=True)
            ]
        logits = (
            torch.cat(parts)
            .view(*rolled.rows.shape, 3)[..., 1:]
            .masked_fill(~rolled.made[..., None], -math.inf)
        )
        truth = (self.labels[rolled.rows, 1:] > 0) & rolled.made[..., None]
        for i in range(2):
            middle = middle_of(logits[..., i].amax(1).numpy(), truth[..., i].any(1).numpy())
            if middle is not None:
                m.shift[i] = middle

    # ---- what a stop leaves

    def state_dict(self) -> dict:
        return {
            "opt": self.opt.state_dict() if self.opt is not None else {},
            "generator": self.generator.get_state(),
            "update": self.update,
        }

    def load_state_dict(self, state: dict) -> None:
        """After `begin`, of a model with its weights."""
        self.generator.set_state(state["generator"])
        self.update = state["update"]
        if self.update:
            assert self.opt is not None
            self.opt.load_state_dict(state["opt"])
