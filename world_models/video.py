"""Camera frames as a flow over short chunks: all views of the next C frames at once, from frames before them,
the arm's motion, the actions and the words of the instruction.

The arm's own state, and where in each picture each of some colours is (`world_models.points`), are rolled out
by a small ensemble (`world_models.latent`): a few numbers drift less than frames that are made of frames, and
agree between the cameras. The frames are a flow over the change of every pixel to the last frame, y
[V C 3, h, w], in patches of 4 x 4 pixels, divided by what the motion of these makes of it:

    (1)  x_t = (1-t) y + t eps,   f(x_t, t; frames before, states, actions) -> y^,   loss = |W (y^ - y)|^2
    (2)  x <- y^ + (t'/t) (x - y^),   t = 1 .. 0 in K Euler steps (that of `robo_rl.sampling`, v = (x - y^)/t)
    (3)  then, k = 1 .. R:   z = (1-s_k) y + s_k eps,   y = f(z, s_k),   s_k = sigma^(k/R)

W makes the colours of changes alike (`video_fit.evened`), so that a small coloured thing counts beside a
large grey arm.

The net moves and paints: y^ = warped + share (seen - warped) - last frame, warped being the last frame along
a displacement of every 2 x 2 pixels, share and what is seen there per pixel (masks and motion as in Finn et
al. 2016, arXiv 1605.07157), so that it need not paint what only moves. A dense net of its whole coarse
picture relates the views to each other (`Dense`). It is given (1-t) x_t: at t = 1 that is nothing at all, so
K = 1, R = 0 is the one-step regression model, without any randomness. (3) is PDE-Refiner (arXiv 2308.05732,
eq. 5-8) on this model's own noise levels, with y^ predicted, not eps.
Fewer than C actions are made a chunk by repeating the last, in learning too (`video_fit`), so an env may step
one by one. The frames before are the last `history` ones and `memory` ones of longer ago, one in `stride`
steps; where an episode is younger than that, its first. In learning they carry noise, whose level the net is
told (GameNGen, arXiv 2408.14837), and a share of them are the model's own. Reward, success and end are told
from the frame and state after a step and its action (`after` False, as in models of before: from those before
it), by heads learnt on frames of the model's own (`video_heads`). Uncertainty is that of the ensemble, and
the greatest error of a frame, in std of its pixels, that a network expects so far.

Departures: own convolutional net instead of parts of `diffusers` (the same blocks, a fifth of the import,
runs without it).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.errors import UserError
from robo_rl.noise import seed_noise
from robo_rl.sampling import time_grid
from robo_rl.starts import hashed
from world_models import points
from world_models.latent import Latent, apart, latent_options, together
from world_models.model import Carry, Frames, Prediction, WorldSpec, at_home, pictures_of, products
from world_models.options import VideoOptions, video_net
from world_models.points import PATCH


def to_patches(frames: Tensor) -> Tensor:
    """uint8 [...,h,w,3] -> float [...,48,h/4,w/4] in -1 .. 1."""
    x = frames.unflatten(-2, (-1, PATCH)).unflatten(-4, (-1, PATCH))  # [...,g,4,g,4,3]
    x = x.movedim((-1, -4, -2), (-5, -4, -3)).flatten(-5, -3)  # as bytes, which is a quarter of the work
    return x.to(torch.float32).div_(127.5).sub_(1)


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


class Dense(nn.Module):
    """x + a dense net of the whole coarse picture and the condition: convolutions see a few patches around
    them, and where a thing is in one view says where it is in another, given where the arm is."""

    def __init__(self, width: int, condition: int, places: int, hidden: int):
        super().__init__()
        thin = width // 8
        self.norm = nn.GroupNorm(8, width)
        self.narrow, self.widen = nn.Conv2d(width, thin, 1), nn.Conv2d(thin, width, 1)
        self.enter = nn.Linear(thin * places + condition, hidden)
        self.film = nn.Linear(condition, 2 * hidden)
        self.inner, self.leave = nn.Linear(hidden, hidden), nn.Linear(hidden, thin * places)
        nn.init.zeros_(self.widen.weight)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b = self.film(c).chunk(2, 1)
        thin = self.narrow(F.silu(self.norm(x)))
        h = F.silu(self.enter(torch.cat([thin.flatten(1), c], 1)) * (1 + a) + b)
        h = h + self.inner(F.silu(h))
        return x + self.widen(F.silu(self.leave(h).view(thin.shape)))


class Net(nn.Module):
    """Of f in (1): noisy change [B,V C 48,g,g], frames before [B,F V 48,g,g], condition [B,c] -> what is to
    be seen [B,C,V,3,16,g,g], how much of it [B,C,V,1,16,g,g]: a hand that leaves is painted over by what lies
    behind it, and how far away what is there now was [B,C,V,8,g,g], x and y of four quarters of a patch (None
    without `warp`)."""

    def __init__(self, views: int, grid: int, options: VideoOptions, inputs: int):
        super().__init__()
        w, frames, before = options.width, 48 * views * options.chunk, 48 * views * options.shown
        self.condition = nn.Sequential(
            nn.Linear(inputs, 2 * w), nn.SiLU(), nn.Linear(2 * w, 2 * w), nn.SiLU()
        )
        self.enter = nn.Conv2d(frames + before, w, 1)
        self.place = nn.Parameter(0.02 * torch.randn(w, grid, grid))
        self.down, self.up = nn.Conv2d(w, 2 * w, 3, 2, 1), nn.Conv2d(2 * w, w, 1)
        self.fine, self.back = (
            nn.ModuleList(ConvBlock(w, 2 * w) for _ in range(options.blocks)) for _ in range(2)
        )
        self.coarse = nn.ModuleList(ConvBlock(2 * w, 2 * w) for _ in range(options.blocks + 1))
        places = (grid // 2) ** 2
        self.dense = Dense(2 * w, 2 * w, places, options.dense) if options.dense else None
        self.leave = nn.Conv2d(w, frames // 3 * 4, 1)
        self.shape = (options.chunk, views, 4, PATCH * PATCH)
        self.moved = nn.Conv2d(w, options.chunk * views * 8, 1) if options.warp else None
        for p in self.moved.parameters() if self.moved is not None else ():
            nn.init.zeros_(p)
        nn.init.zeros_(self.leave.weight)
        assert self.leave.bias is not None
        nn.init.zeros_(self.leave.bias)

    def forward(self, x: Tensor, before: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        c = self.condition(c)
        h = self.enter(torch.cat([x, before], 1)) + self.place
        for block in self.fine:
            h = block(h, c)
        d = self.down(h)
        for i, block in enumerate(self.coarse):
            d = block(d, c)
            if self.dense is not None and not i:
                d = self.dense(d, c)
        h = h + F.interpolate(self.up(d), scale_factor=2, mode="nearest")
        for block in self.back:
            h = block(h, c)
        h = F.silu(h)
        out = self.leave(h).unflatten(1, self.shape)
        moved = None if self.moved is None else self.moved(h).unflatten(1, (*self.shape[:2], 8))
        return out[:, :, :, :3], out[:, :, :, 3:], moved


def displaced(last: Tensor, moved: Tensor) -> Tensor:
    """The last frames [B,V,48,g,g] as they look after displacements [B,C,V,8,g,g], in tenths of half a
    picture: [B,C,V,3,16,g,g]."""
    (b, v, _, g, _), c = last.shape, moved.shape[1]
    size = g * PATCH
    flow = F.pixel_shuffle(moved.transpose(1, 2).flatten(0, 2), 2)  # [B V C,2,2g,2g]
    flow = F.interpolate(0.1 * flow, size=(size, size), mode="bilinear", align_corners=False)
    at = (torch.arange(size, device=last.device) * 2 + 1) / size - 1
    place = torch.stack([at.expand(size, size), at[:, None].expand(size, size)])
    # what is looked up comes in the order of patches
    where = F.pixel_unshuffle(place + flow, PATCH).view(b * v, c, 2, PATCH * PATCH, g * g)
    seen = F.grid_sample(
        F.pixel_shuffle(last.flatten(0, 1), PATCH),
        where.movedim(2, -1).flatten(1, 2),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    return seen.view(b, v, 3, c, PATCH * PATCH, g, g).permute(0, 3, 1, 2, 4, 5, 6)


class Heads(nn.Module):
    """Frame and state after (or before) a step, and its action -> reward (in units of its std), logits of
    success and end: [B,3] (or `outputs` other numbers)."""

    def __init__(self, views: int, grid: int, state: int, action: int, width: int = 32, outputs: int = 3):
        super().__init__()
        size = -(-grid // 4)
        self.look = nn.Sequential(
            nn.Conv2d(48 * views, width, 1),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, 2, 1),
            nn.SiLU(),
            nn.Flatten(),
        )
        self.tell = nn.Sequential(
            nn.Linear(width * size * size + state + action, 128), nn.SiLU(), nn.Linear(128, outputs)
        )

    def forward(self, frame: Tensor, state: Tensor, action: Tensor) -> Tensor:
        return self.tell(torch.cat([self.look(frame), state, action], -1))


def padded(x: Tensor, chunk: int) -> Tensor:
    """[B,E,D] with its last row repeated -> [B,C,D]."""
    return torch.cat([x, x[:, -1:].expand(-1, chunk - x.shape[1], -1)], 1)


def lane_noise(carry: Carry, k: int, shape: tuple[int, ...]) -> Tensor:
    """The k-th draw [N,*shape] of a step: of each lane's key and age alone, drawn on the host."""
    key, age = carry["key"].cpu().numpy(), carry["t"].cpu().numpy()
    seeds = (hashed(key, age, k, 71) >> np.uint64(1)).astype(np.int64)
    drawn = [torch.randn(shape, generator=seed_noise(torch.Generator(), int(s))) for s in seeds]
    return torch.stack(drawn).to(carry["t"].device)


def time_code(t: Tensor) -> Tensor:
    """t [B] in 0 .. 1 -> [B,8]."""
    angle = t[:, None] * (torch.pi * 2.0 ** torch.arange(4, device=t.device))
    return torch.cat([angle.sin(), angle.cos()], 1)


def standard(arm: Latent, state: Tensor) -> Tensor:
    """States in units of the data."""
    return ((state - arm.mean) / arm.std).clamp(-10, 10)


def expected(
    doubt: Heads, arm: Latent, frame: Tensor, state: Tensor, action: Tensor, age: Tensor, spread: Tensor
) -> Tensor:
    """Error [B] that `doubt` expects of frames, in std of their pixels, `age` [B] steps after a recorded one;
    `spread` [B] is the ensemble's disagreement there."""
    told = torch.cat([action, torch.stack([age.to(torch.float32).log1p(), spread.clamp(0, 10)], 1)], 1)
    return doubt(frame, standard(arm, state), told)[:, 0].clamp(-8, 3).exp()


def outcomes(
    model, carry: Carry, actions: Tensor, shown: Tensor, stood: Tensor, spread: Tensor
) -> tuple[Tensor, Tensor, Carry]:
    """What a model of frames tells of steps by actions [N,E,A] from the frames [N,E,V 48,g,g] and states
    [N,E,S] they are told from, and the ensemble's `spread` [N,E] -> (heads [N,E,3], uncertainty [N,E], what
    of it is carried on)."""
    n, e = actions.shape[:2]
    task = carry["task"][:, None].expand(n, e) if "task" in carry else None
    frame, state, told = (x.flatten(0, 1) for x in (shown, stood, model.proprio.commanded(actions, task)))
    out = model.judged(frame, state, told).view(n, e, 3)
    if model.doubt is None:
        return out, spread, {}
    age = (carry["t"][:, None] + torch.arange(1, e + 1, device=carry["t"].device)).flatten()
    error = expected(model.doubt, model.proprio, frame, state, told, age, spread.flatten()).view(n, e)
    most = torch.cat([carry["doubt"][:, None], error], 1).cummax(1).values[:, 1:]
    return out, spread + most, {"doubt": most[:, -1]}


@torch.no_grad()
def in_chunks(
    chunk: Callable[[Carry, Tensor], tuple[Carry, Prediction]], most: int, carry: Carry, actions: Tensor
) -> tuple[Carry, Prediction]:
    """`WorldModel.step` by actions [N,E,A] of a model that makes up to `most` frames at once: `chunk` after
    `chunk`."""
    parts = []
    for part in actions.to(torch.float32).split(most, 1):
        carry, p = chunk(carry, part)
        parts.append(p)
    obs = {k: torch.cat([p.obs[k] for p in parts], 1) for k in parts[0].obs}
    return carry, Prediction(
        obs,
        *(
            torch.cat([getattr(p, k) for p in parts], 1)
            for k in ("reward", "terminal", "success", "uncertainty")
        ),
    )


class Video(nn.Module):
    """The model; see the module."""

    frames: Frames
    rest: Tensor
    moving: Tensor
    shift: Tensor
    pixel: Tensor
    weight: Tensor

    def __init__(self, spec: WorldSpec, options: VideoOptions, seed: int = 0):
        super().__init__()
        if not spec.control.views or spec.image_size % (2 * PATCH):
            raise UserError(
                f"a video model needs cameras of a multiple of {2 * PATCH} pixels, the data has "
                f"{', '.join(spec.control.views) or 'none'} of {spec.image_size}; record with robo_rl "
                f"collect --obs rgb --image-size {max(16, spec.image_size + -spec.image_size % (2 * PATCH))}"
            )
        self.spec, self.options = spec, options
        views, grid, a = len(spec.control.views), spec.image_size // PATCH, spec.action
        self.points = points.count(views) if options.points else 0
        s = spec.state + self.points  # what the ensemble knows: the arm's state and where colours are
        self.proprio = Latent(replace(spec, state=s), options.proprio, seed)
        words = self.proprio.words.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs = s + options.chunk * (s + a + words * options.told) + 8 + (options.context_noise > 0)
            self.net = Net(views, grid, options, inputs)
            self.heads = Heads(views, grid, s, a + words, options.head_width)
            self.doubt = Heads(views, grid, s, a + words + 2, 16, 1) if options.doubt else None
        # a pixel's mean square change, by frame of the chunk and
        self.register_buffer("rest", torch.ones(options.chunk, views))
        # view: at rest, and by the arm's squared motion
        self.register_buffer("moving", torch.zeros(options.chunk, views, s))
        self.register_buffer("shift", torch.zeros(2))  # logits of success and end that mean 1/2
        if options.doubt:
            self.register_buffer("pixel", torch.ones(views))  # std of a pixel over the data
        if self.points:
            self.register_buffer("weight", torch.ones(self.points))  # 1 / std of a point, 0: it flickers

    # ---- pieces

    def condition(
        self, state: Tensor, states: Tensor, actions: Tensor, t: Tensor, level: Tensor | None = None
    ) -> Tensor:
        """State before the chunk [B,S], those after each step [B,C,S], actions as `told` gives them [B,C,.],
        flow time [B], noise on the frames before [B] (None: none) -> [B,c]."""
        parts = [
            standard(self.proprio, state),
            self.motion(state, states).flatten(1),
            actions.flatten(1),
            time_code(t),
        ]
        if self.options.context_noise > 0:
            none = torch.zeros(len(t), 1, device=t.device)
            parts.append(none if level is None else level[:, None] / self.options.context_noise)
        return torch.cat(parts, 1)

    def told(self, actions: Tensor, task: Tensor | None) -> Tensor:
        """What the net is told of actions [B,E,A]: themselves, and the words of the instructions int64[B]
        beside them."""
        told = self.options.told and task is not None
        return (
            self.proprio.commanded(actions, task[:, None].expand(actions.shape[:2]))
            if told and task is not None
            else actions
        )

    def motion(self, state: Tensor, states: Tensor) -> Tensor:
        """From state [B,S] before a chunk to those after each step [B,C,S], in units of the data."""
        return ((states - state[:, None]) / self.proprio.std).clamp(-10, 10)

    def unit(self, state: Tensor, states: Tensor) -> Tensor:
        """The change that this motion of the arm brings, RMS of a pixel [B,C,V 48,1,1]: a slow step is to be
        told as well, by its own measure, as a fast one."""
        square = self.rest + torch.einsum("bcs,cvs->bcv", self.motion(state, states).square(), self.moving)
        return square.sqrt().repeat_interleave(48, 2)[..., None, None]

    def changes(self, y: Tensor, state: Tensor, states: Tensor) -> Tensor:
        """Changes y [B,V C 48,g,g] in units of `unit` -> in those of patches [B,C,V 48,g,g]."""
        return y.view(len(y), self.options.chunk, -1, *y.shape[2:]) * self.unit(state, states)

    def painted(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the net gives, its products in the precision `dtype` says."""
        with products(self.options.dtype, inputs[0].device):
            seen, share, moved = self.net(*inputs)
        return seen.float(), share.float(), None if moved is None else moved.float()

    def seen(
        self,
        x: Tensor,
        t: Tensor,
        before: Tensor,
        state: Tensor,
        states: Tensor,
        actions: Tensor,
        noise: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The frames [B,C,V,3,16,g,g] that x_t [B,V C 48,g,g], a noisy change in units of `unit`, is of: from
        the frames `before` [B,F,V 48,g,g], the last one first.
        `noise`: on what the net sees of them, and its level [B]."""
        blurred, level = (before, None) if noise is None else (before + noise[0], noise[1])
        painted, share, moved = self.painted(
            (1 - t)[:, None, None, None] * x,
            blurred.flatten(1, 2),
            self.condition(state, states, actions, t, level),
        )
        # channels of a patch: colour, then pixel
        last = before[:, 0].unflatten(1, (painted.shape[2], 3 * PATCH * PATCH))
        there = last.unflatten(2, (3, -1))[:, None] if moved is None else displaced(last, moved)
        return there.expand_as(painted).lerp(painted, share.expand_as(painted))

    def clean(
        self, x: Tensor, t: Tensor, before: Tensor, state: Tensor, states: Tensor, actions: Tensor
    ) -> Tensor:
        """f(x_t, t): change y^ [B,V C 48,g,g] in units of `unit`, of the frames that `seen` gives."""
        frames = self.seen(x, t, before, state, states, actions).flatten(2, 4)
        return ((frames - before[:, :1]) / self.unit(state, states)).flatten(1, 2)

    def sample(self, before: Tensor, state: Tensor, states: Tensor, actions: Tensor, noise) -> Tensor:
        """(2) and (3); `noise(i)` gives the i-th draw [B,V C 48,g,g]."""
        o, b = self.options, len(before)

        def f(x: Tensor, t: float) -> Tensor:
            return self.clean(x, torch.full((b,), t, device=x.device), before, state, states, actions)

        grid = time_grid(o.steps).tolist()
        shape = (b, 48 * len(self.spec.control.views) * o.chunk, *before.shape[3:])
        x = noise(0) if o.steps > 1 else torch.zeros(shape, device=before.device)
        for t, after in pairwise(grid):
            y = f(x, t)
            x = y + after / t * (x - y)
        for k in range(1, o.refine + 1):
            s = o.sigma ** (k / o.refine)
            x = f((1 - s) * x + s * noise(k), s)
        return x

    def judged(self, frame: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """Heads [B,3] of one step each; `action` as `Latent.commanded` gives it."""
        return self.heads(frame, standard(self.proprio, state), action)

    # ---- frames before

    def begin(self, last: Tensor) -> Carry:
        """What is kept of frames [B,V 48,g,g] that episodes begin with."""
        o, kept = self.options, {"last": last}
        if o.history > 1:
            kept["past"] = last[:, None].repeat(1, o.history - 1, 1, 1, 1)
        if o.memory:
            kept["memory"] = last[:, None].repeat(1, o.memory, 1, 1, 1)
        return kept

    def before(self, carry: Carry) -> Tensor:
        """Frames [B,F,V 48,g,g] that the next ones are made from, the last one first."""
        return torch.cat([carry["last"][:, None], *(carry[k] for k in ("past", "memory") if k in carry)], 1)

    def remember(self, carry: Carry, frames: Tensor, t: Tensor) -> Carry:
        """What is kept [B] after frames [B,E,V 48,g,g], E <= chunk, that follow step t int64[B]."""
        o, e, kept = self.options, frames.shape[1], {"last": frames[:, -1]}
        if "past" in carry:
            every = torch.cat([carry["past"].flip(1), carry["last"][:, None], frames], 1)
            kept["past"] = every[:, :-1].flip(1)[:, : o.history - 1]
        if "memory" in carry:
            at = (t + e) // o.stride * o.stride - t - 1  # the frame that is due, if it is among these
            due = frames[torch.arange(len(frames), device=at.device), at.clamp(min=0)][:, None]
            pushed = torch.cat([due, carry["memory"][:, :-1]], 1)
            kept["memory"] = torch.where((at >= 0)[:, None, None, None, None], pushed, carry["memory"])
        return kept

    # ---- what the ensemble knows

    def located(self, patches: Tensor) -> Tensor:
        """Where colours are in frames [B,V 48,g,g], in units of the data: [B,P]."""
        return self.weight.to(patches.device) * points.places(patches, len(self.spec.control.views))

    def known(self, carry: Carry) -> Carry:
        """The ensemble's carry, of a model's."""
        arm = {k: v for k, v in carry.items() if k not in OF_FRAMES}
        return together(arm, POINTS) if self.points else arm

    def split(self, arm: Carry) -> Carry:
        """The ensemble's carry with the points apart, as observations have it."""
        return apart(arm, POINTS, self.spec.state) if self.points else arm

    # ---- the protocol

    def start(self, obs: Mapping[str, np.ndarray], keys: np.ndarray) -> Carry:
        """Carry of lanes that begin at rest with the frames obs["image/<view>"] uint8 [N,h,w,3] and
        obs["state"] [N,S]."""
        frames = patches_of(pictures_of(obs, self.spec), self.spec.control.views)
        state = np.asarray(obs["state"], np.float32)
        if self.points:
            state = np.concatenate([state, self.located(frames).numpy()], 1)
        carry = self.split(self.proprio.start({**obs, "state": state}, keys)) | self.begin(frames)
        return carry | ({"doubt": torch.zeros(len(keys))} if self.doubt is not None else {})

    @at_home
    def step(self, carry: Carry, actions: Tensor) -> tuple[Carry, Prediction]:
        return in_chunks(self.chunk, self.options.chunk, carry, actions)

    def chunk(self, carry: Carry, actions: Tensor) -> tuple[Carry, Prediction]:
        e, c, views = actions.shape[1], self.options.chunk, self.spec.control.views
        arm, last = self.known(carry), carry["last"]
        before = arm["state"]
        after, p = self.proprio.step(arm, actions)
        states = p.obs["state"]
        shape, whole = (48 * len(views) * c, *last.shape[2:]), padded(states, c)

        def noise(k: int) -> Tensor:
            return lane_noise(carry, k, shape)

        y = self.sample(
            self.before(carry), before, whole, padded(self.told(actions, carry.get("task")), c), noise
        )
        frames = (last[:, None] + self.changes(y, before, whole))[:, :e].clamp(-1, 1)
        shown, stood = frames, states
        if not self.options.after:
            shown = torch.cat([last[:, None], frames[:, :-1]], 1)
            stood = torch.cat([before[:, None], states[:, :-1]], 1)
        out, unsure, kept = outcomes(self, carry, actions, shown, stood, p.uncertainty)
        chance, kept = (out[..., 1:] - self.shift).sigmoid(), kept | self.remember(carry, frames, carry["t"])
        obs = {"state": states[..., : self.spec.state].contiguous()} | {
            f"image/{v}": to_frames(x) for v, x in zip(views, frames.split(48, 2), strict=True)
        }
        return self.split(after) | kept, Prediction(
            obs, out[..., 0] * self.proprio.gain, chance[..., 1], chance[..., 0], unsure
        )


OF_FRAMES = ("last", "past", "memory", "doubt")  # of the carry; the rest is the ensemble's
POINTS = {"state": "state_points", "before": "before_points"}  # what stands beside its states


def build(spec: WorldSpec, options: dict) -> Video:
    """The untrained model of a folder's JSON; what one of before does not name it did not have."""
    net = video_net(options)
    net["proprio"] = latent_options(net["proprio"])
    return Video(spec, VideoOptions(**net))
