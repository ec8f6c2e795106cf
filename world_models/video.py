"""Camera frames as a flow over short chunks: all views of the next C frames at once, from the last frame, the arm's motion
and the actions.

The arm's own state is rolled out by a small ensemble (`world_models.latent`); the frames are a flow over the change of
every pixel to the last frame, y [V C 3, h, w], in patches of 4 x 4 pixels, divided by what the arm's motion makes of it:

    x_t = (1-t) y + t eps,   f(x_t, t; last frame, states, actions) -> y^,   loss = |y^ - y|^2                      (1)
    x <- y^ + (t'/t) (x - y^),   t = 1 .. 0 in K Euler steps (the step of `robo_rl.sampling`, v = (x - y^)/t)        (2)
    then, k = 1 .. R:   z = (1-s_k) y + s_k eps,   y = f(z, s_k),   s_k = sigma^(k/R)                               (3)

The net paints: y^ = share (seen - last frame), share and what is seen there per pixel (masks as in Finn et al. 2016,
arXiv 1605.07157), so that it need not copy what it takes away. It is given (1-t) x_t: at t = 1 that is nothing at all, so
K = 1, R = 0 is the one-step regression model, without any randomness. (3) is PDE-Refiner (arXiv 2308.05732, eq. 5-8)
on this model's own noise levels, with y^ predicted, not eps.
Fewer than C actions are made a chunk by repeating the last, in learning too (`video_fit`), so an env may step one by one.
Reward, success and end are told from the frame and state after a step and its action (`after` False, as in models of
before: from those before it). Uncertainty is that of the ensemble.

Departures: own convolutional net instead of parts of `diffusers` (the same blocks, a fifth of the import, runs without it).
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.errors import UserError
from robo_rl.noise import seed_noise
from robo_rl.sampling import time_grid
from robo_rl.starts import hashed
from world_models.latent import Latent, latent_options
from world_models.model import Carry, Frames, Prediction, WorldSpec
from world_models.options import VideoOptions

PATCH = 4


def to_patches(frames: Tensor) -> Tensor:
    """uint8 [...,h,w,3] -> float [...,48,h/4,w/4] in -1 .. 1."""
    x = frames.movedim(-1, -3).to(torch.float32) / 127.5 - 1
    return F.pixel_unshuffle(x, PATCH)


def patches_of(images: Mapping[str, np.ndarray], views: tuple[str, ...]) -> Tensor:
    """Frames {view: uint8[...,h,w,3]} as patches [...,V 48,g,g]."""
    return torch.cat([to_patches(torch.from_numpy(np.ascontiguousarray(images[v]))) for v in views], -3)


def to_frames(patches: Tensor) -> Tensor:
    """The inverse of `to_patches`, rounded and clipped."""
    x = F.pixel_shuffle(patches, PATCH)
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).contiguous()


class ConvBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm x))) * (1 + a) + b)), a and b from the condition."""

    def __init__(self, width: int, condition: int):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm, self.after = (nn.GroupNorm(8, width) for _ in range(2))
        self.film = nn.Linear(condition, 2 * width)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b = self.film(c)[..., None, None].chunk(2, 1)
        h = self.after(self.first(F.silu(self.norm(x))))
        return x + self.second(F.silu(h * (1 + a) + b))


class Net(nn.Module):
    """Of f in (1): noisy change [B,V C 48,g,g], last frame [B,V 48,g,g], condition [B,c] -> what is to be seen
    [B,C,V,3,16,g,g], and how much of it [B,C,V,1,16,g,g]: a hand that leaves is painted over by what lies behind it."""

    def __init__(self, views: int, grid: int, options: VideoOptions, inputs: int):
        super().__init__()
        w, frames, last = options.width, 48 * views * options.chunk, 48 * views
        self.condition = nn.Sequential(nn.Linear(inputs, 2 * w), nn.SiLU(), nn.Linear(2 * w, 2 * w), nn.SiLU())
        self.enter = nn.Conv2d(frames + last, w, 1)
        self.place = nn.Parameter(0.02 * torch.randn(w, grid, grid))
        self.down, self.up = nn.Conv2d(w, 2 * w, 3, 2, 1), nn.Conv2d(2 * w, w, 1)
        self.fine, self.back = (nn.ModuleList(ConvBlock(w, 2 * w) for _ in range(options.blocks)) for _ in range(2))
        self.coarse = nn.ModuleList(ConvBlock(2 * w, 2 * w) for _ in range(options.blocks + 1))
        self.leave = nn.Conv2d(w, frames // 3 * 4, 1)
        self.shape = (options.chunk, views, 4, PATCH * PATCH)
        nn.init.zeros_(self.leave.weight)
        assert self.leave.bias is not None
        nn.init.zeros_(self.leave.bias)

    def forward(self, x: Tensor, last: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        c = self.condition(c)
        h = self.enter(torch.cat([x, last], 1)) + self.place
        for block in self.fine:
            h = block(h, c)
        d = self.down(h)
        for block in self.coarse:
            d = block(d, c)
        h = h + F.interpolate(self.up(d), scale_factor=2, mode="nearest")
        for block in self.back:
            h = block(h, c)
        out = self.leave(F.silu(h)).unflatten(1, self.shape)
        return out[:, :, :, :3], out[:, :, :, 3:]


class Heads(nn.Module):
    """Frame and state after (or before) a step, and its action -> reward (in units of its std), logits of success and end: [B,3]."""

    def __init__(self, views: int, grid: int, state: int, action: int, width: int = 32):
        super().__init__()
        size = -(-grid // 4)
        self.look = nn.Sequential(nn.Conv2d(48 * views, width, 1), nn.SiLU(), nn.Conv2d(width, width, 3, 2, 1), nn.SiLU(),
                                  nn.Conv2d(width, width, 3, 2, 1), nn.SiLU(), nn.Flatten())
        self.tell = nn.Sequential(nn.Linear(width * size * size + state + action, 128), nn.SiLU(), nn.Linear(128, 3))

    def forward(self, frame: Tensor, state: Tensor, action: Tensor) -> Tensor:
        return self.tell(torch.cat([self.look(frame), state, action], -1))


def padded(x: Tensor, chunk: int) -> Tensor:
    """[B,E,D] with its last row repeated -> [B,C,D]."""
    return torch.cat([x, x[:, -1:].expand(-1, chunk - x.shape[1], -1)], 1)


def time_code(t: Tensor) -> Tensor:
    """t [B] in 0 .. 1 -> [B,8]."""
    angle = t[:, None] * (torch.pi * 2.0 ** torch.arange(4))
    return torch.cat([angle.sin(), angle.cos()], 1)


class Video(nn.Module):
    """The model; see the module."""

    frames: Frames
    rest: Tensor
    moving: Tensor
    shift: Tensor

    def __init__(self, spec: WorldSpec, options: VideoOptions, seed: int = 0):
        super().__init__()
        if not spec.control.views or spec.image_size % (2 * PATCH):
            raise UserError(f"a video model needs cameras of a multiple of {2 * PATCH} pixels, the data has "
                            f"{', '.join(spec.control.views) or 'none'} of {spec.image_size}; record with robo_rl collect --obs rgb")
        self.spec, self.options = spec, options
        self.proprio = Latent(spec, options.proprio, seed)
        views, grid, s, a = len(spec.control.views), spec.image_size // PATCH, spec.state, spec.action
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = Net(views, grid, options, s + options.chunk * (s + a) + 8)
            self.heads = Heads(views, grid, s, a + self.proprio.words.shape[1])
        self.register_buffer("rest", torch.ones(options.chunk, views))  # a pixel's mean square change, by frame of the chunk and
        self.register_buffer("moving", torch.zeros(options.chunk, views, s))  # view: at rest, and by the arm's squared motion
        self.register_buffer("shift", torch.zeros(2))  # log-odds by which events are commoner in training than in the data

    # ---- pieces

    def condition(self, state: Tensor, states: Tensor, actions: Tensor, t: Tensor) -> Tensor:
        """State before the chunk [B,S], those after each step [B,C,S], actions [B,C,A], flow time [B] -> [B,c]."""
        p = self.proprio
        z = ((state - p.mean) / p.std).clamp(-10, 10)
        return torch.cat([z, self.motion(state, states).flatten(1), actions.flatten(1), time_code(t)], 1)

    def motion(self, state: Tensor, states: Tensor) -> Tensor:
        """From state [B,S] before a chunk to those after each step [B,C,S], in units of the data."""
        return ((states - state[:, None]) / self.proprio.std).clamp(-10, 10)

    def unit(self, state: Tensor, states: Tensor) -> Tensor:
        """The change that this motion of the arm brings, RMS of a pixel [B,C,V 48,1,1]: a slow step is to be told as well,
        by its own measure, as a fast one."""
        square = self.rest + torch.einsum("bcs,cvs->bcv", self.motion(state, states).square(), self.moving)
        return square.sqrt().repeat_interleave(48, 2)[..., None, None]

    def changes(self, y: Tensor, state: Tensor, states: Tensor) -> Tensor:
        """Changes y [B,V C 48,g,g] in units of `unit` -> in those of patches [B,C,V 48,g,g]."""
        return y.view(len(y), self.options.chunk, -1, *y.shape[2:]) * self.unit(state, states)

    def clean(self, x: Tensor, t: Tensor, last: Tensor, state: Tensor, states: Tensor, actions: Tensor) -> Tensor:
        """f(x_t, t): change y^ [B,V C 48,g,g] in units of `unit`."""
        seen, share = self.net((1 - t)[:, None, None, None] * x, last, self.condition(state, states, actions, t))
        before = last.unflatten(1, (1, seen.shape[2], 3, PATCH * PATCH))  # channels of a patch: colour, then pixel
        return ((share * (seen - before)).flatten(2, 4) / self.unit(state, states)).flatten(1, 2)

    def sample(self, last: Tensor, state: Tensor, states: Tensor, actions: Tensor, noise) -> Tensor:
        """(2) and (3); `noise(i)` gives the i-th draw [B,V C 48,g,g]."""
        o, b = self.options, len(last)

        def f(x: Tensor, t: float) -> Tensor:
            return self.clean(x, torch.full((b,), t), last, state, states, actions)
        grid = time_grid(o.steps).tolist()
        shape = (b, 48 * len(self.spec.control.views) * o.chunk, *last.shape[2:])
        x = noise(0) if o.steps > 1 else torch.zeros(shape)
        for t, after in pairwise(grid):
            y = f(x, t)
            x = y + after / t * (x - y)
        for k in range(1, o.refine + 1):
            s = o.sigma ** (k / o.refine)
            x = f((1 - s) * x + s * noise(k), s)
        return x

    def judged(self, last: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """Heads [B,3] of one step each; `action` as `Latent.commanded` gives it."""
        p = self.proprio
        return self.heads(last, ((state - p.mean) / p.std).clamp(-10, 10), action)

    # ---- the protocol

    def start(self, obs: Mapping[str, np.ndarray], keys: np.ndarray) -> Carry:
        """Carry of lanes that begin at rest with the frames obs["image/<view>"] uint8 [N,h,w,3] and obs["state"] [N,S]."""
        views = self.spec.control.views
        return self.proprio.start(obs, keys) | {"last": patches_of({v: obs[f"image/{v}"] for v in views}, views)}

    @torch.no_grad()
    def step(self, carry: Carry, actions: Tensor) -> tuple[Carry, Prediction]:
        parts = []
        for part in actions.to(torch.float32).split(self.options.chunk, 1):
            carry, p = self._chunk(carry, part)
            parts.append(p)
        obs = {k: torch.cat([p.obs[k] for p in parts], 1) for k in parts[0].obs}
        return carry, Prediction(obs, *(torch.cat([getattr(p, k) for p in parts], 1)
                                        for k in ("reward", "terminal", "success", "uncertainty")))

    def _chunk(self, carry: Carry, actions: Tensor) -> tuple[Carry, Prediction]:
        n, e, c, views = len(actions), actions.shape[1], self.options.chunk, self.spec.control.views
        before, last = carry["state"], carry["last"]
        arm = {k: v for k, v in carry.items() if k != "last"}
        after, p = self.proprio.step(arm, actions)
        states = p.obs["state"]
        keys, t = carry["key"].numpy(), carry["t"].numpy()

        def noise(k: int) -> Tensor:
            seeds = (hashed(keys, t, k, 71) >> np.uint64(1)).astype(np.int64)
            shape = (48 * len(views) * c, *last.shape[2:])
            return torch.stack([torch.randn(shape, generator=seed_noise(torch.Generator(), int(s))) for s in seeds])
        whole = padded(states, c)
        y = self.sample(last, before, whole, padded(actions, c), noise)
        frames = (last[:, None] + self.changes(y, before, whole))[:, :e].clamp(-1, 1)
        shown, stood = frames, states
        if not self.options.after:
            shown = torch.cat([last[:, None], frames[:, :-1]], 1)
            stood = torch.cat([before[:, None], states[:, :-1]], 1)
        told = self.proprio.commanded(actions, carry["task"][:, None].expand(n, e) if "task" in carry else None)
        out = self.judged(shown.flatten(0, 1), stood.flatten(0, 1), told.flatten(0, 1)).view(n, e, 3)
        chance = (out[..., 1:] - self.shift).sigmoid()
        obs = {"state": states} | {f"image/{v}": to_frames(x) for v, x in zip(views, frames.split(48, 2), strict=True)}
        return after | {"last": frames[:, -1]}, Prediction(obs, out[..., 0] * self.proprio.gain, chance[..., 1], chance[..., 0],
                                                           p.uncertainty)


def build(spec: WorldSpec, options: dict) -> Video:
    """The untrained model of a folder's JSON."""
    return Video(spec, VideoOptions(**dict[str, Any]({"after": False} | options, proprio=latent_options(options["proprio"]))))
