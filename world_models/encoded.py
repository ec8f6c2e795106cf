"""`latent` dynamics of encoded pictures: an autoencoder of all cameras at once, and the ensemble on the arm's
state beside its codes, so that pictures are drawn only where somebody looks.

    c = ((points(frames), enc(frames)) - centre) / spread,   frames^ = mean + dec(c)
    loss = |frames^ - frames|^2 / var,     dec sees c + noise eps
    (s, c)' = (s, c) + the ensemble's change;   reward, success and end from (s, c) and (s, c)' (`latent`)

points: where in each picture each of some colours is (`world_models.points`). The error of pictures is mostly
the arm's: codes that are learnt from it alone do not tell where small things are, which success depends on.
The codes have unit variance, and the noise on them makes neighbours look alike: a rollout's small errors stay
small in the picture. In old recordings no picture was kept after an episode's last action: its code is the
one before it there.
Sources: Ha and Schmidhuber 2018 (dynamics of an autoencoder's codes); PETS as in `latent`. Departures from
both: no recurrence, for the arm's state carries velocities; codes are not sampled.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.errors import UserError
from world_models import points
from world_models.latent import Latent, apart, latent_options, together
from world_models.model import Carry, Frames, Prediction, WorldSpec, at_home, on, pictures_of, place_of
from world_models.options import EncodedOptions, encoded_net
from world_models.recorded import PictureRows
from world_models.video import PATCH, patches_of, to_frames, to_patches

# of a pixel's range of 2: decoded pixels that changed by much less look as they did at the start
STILL = 0.07
CODES = {"state": "code", "before": "code_before"}  # of a carry: what stands beside the arm's states


class FrameCodec(nn.Module):
    """Frames as patches [B,V 48,g,g] <-> codes [B,Z]."""

    centre: Tensor  # of the codes
    spread: Tensor
    mean: Tensor  # of the patches
    var: Tensor
    steady: Tensor  # [points] 1 of those that are kept, 0 of others

    def __init__(self, views: int, grid: int, options: EncodedOptions):
        super().__init__()
        w, self.views, self.grid = options.width, views, grid // 4
        self.points = points.count(views) if options.points else 0
        self.size = self.points + options.codes
        self.enter, self.shrink, self.shrink_again = (
            nn.Conv2d(48 * views, w, 1),
            nn.Conv2d(w, 2 * w, 3, 2, 1),
            nn.Conv2d(2 * w, 2 * w, 3, 2, 1),
        )
        self.code = nn.Linear(2 * w * self.grid**2, options.codes)
        self.decode_code = nn.Linear(self.size, 2 * w * self.grid**2)
        self.grow, self.grow_again, self.leave = (
            nn.Conv2d(2 * w, 2 * w, 3, 1, 1),
            nn.Conv2d(2 * w, w, 3, 1, 1),
            nn.Conv2d(w, 48 * views, 1),
        )
        self.register_buffer("centre", torch.zeros(self.size))
        self.register_buffer("spread", torch.ones(self.size))
        self.register_buffer("steady", torch.ones(self.points))
        self.register_load_state_dict_pre_hook(_all_steady)
        self.register_buffer("mean", torch.zeros(48 * views, grid, grid))
        self.register_buffer("var", torch.ones(()))

    def raw(self, patches: Tensor) -> Tensor:
        """Codes before they are normalised."""
        h = F.silu(self.enter((patches - self.mean) / self.var.sqrt()))
        learnt = self.code(F.silu(self.shrink_again(F.silu(self.shrink(h)))).flatten(1))
        if not self.points:
            return learnt
        return torch.cat([self.steady * points.places(patches, self.views), learnt], 1)

    def measured(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and spread [Z] of codes [B,Z]; a point that hardly moves is not blown up."""
        still, learnt = raw.std(0).tensor_split([self.points])
        return raw.mean(0), torch.cat([still.clamp(min=points.STEADY), learnt + 1e-5])

    def encode(self, patches: Tensor) -> Tensor:
        return (self.raw(patches) - self.centre) / self.spread

    def decode(self, codes: Tensor) -> Tensor:
        h = F.silu(self.decode_code(codes)).view(len(codes), -1, self.grid, self.grid)
        h = F.silu(self.grow(F.interpolate(h, scale_factor=2)))
        h = F.silu(self.grow_again(F.interpolate(h, scale_factor=2)))
        return self.mean + self.var.sqrt() * self.leave(h)


class Encoded(nn.Module):
    """The model; see the module. obs: the arm's state [N,S] and frames; the dynamics' state is both,
    [N,S+Z]."""

    frames: Frames

    def __init__(self, spec: WorldSpec, options: EncodedOptions, seed: int = 0):
        super().__init__()
        if not spec.control.views or spec.image_size % (4 * PATCH):
            raise UserError(
                f"an encoded model needs cameras of a multiple of {4 * PATCH} pixels, the data has "
                f"{', '.join(spec.control.views) or 'none'} of {spec.image_size}; record with robo_rl "
                f"collect --obs rgb --image-size {max(16, spec.image_size + -spec.image_size % (4 * PATCH))}"
            )
        self.spec, self.options = spec, options
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.codec = FrameCodec(len(spec.control.views), spec.image_size // PATCH, options)
        self.dynamics = Latent(
            replace(spec, kind="latent", state=spec.state + self.codec.size), options.dynamics, seed
        )

    @torch.no_grad()
    def codes(self, images: Mapping[str, np.ndarray | PictureRows]) -> Tensor:
        """float32[N,Z] of frames {view: uint8[N,h,w,3]}, on the host."""
        views, n, there = self.spec.control.views, len(images[self.spec.control.views[0]]), place_of(self)
        parts = [
            self.codec.encode(patches_of({v: images[v][i : i + 256] for v in views}, views).to(there)).cpu()
            for i in range(0, n, 256)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, self.codec.size)

    # ---- the protocol

    def start(self, obs: Mapping[str, np.ndarray], keys: np.ndarray) -> Carry:
        """Carry of lanes that begin at rest."""
        seen = pictures_of(obs, self.spec)
        code = self.codes(seen)
        whole = np.concatenate([np.asarray(obs["state"], np.float32), code.numpy()], 1)
        first = {f"first/{v}": torch.as_tensor(np.array(x)) for v, x in seen.items()}
        return self._split(self.dynamics.start({**obs, "state": whole}, keys)) | first | {"code_first": code}

    @at_home
    @torch.no_grad()
    def step(self, carry: Carry, actions: Tensor, draw: bool = True) -> tuple[Carry, Prediction]:
        """`draw` False: no pictures, which `look` makes of any carry."""
        stays = {k: v for k, v in carry.items() if k.startswith(("first", "code_first"))}
        whole = together({k: v for k, v in carry.items() if k not in stays}, CODES)
        whole, p = self.dynamics.step(whole, actions)
        state, code = p.obs["state"].split([self.spec.state, self.codec.size], 2)
        obs = {"state": state.contiguous()} | (self._pictures(code, carry) if draw else {})
        return self._split(whole) | stays, replace(p, obs=obs)

    def look(self, carry: Carry) -> dict[str, Tensor]:
        """{image/<view>: uint8[N,h,w,3]} of lanes."""
        home, carry = carry["t"].device, on(place_of(self), carry)
        return on(home, {k: v[:, 0] for k, v in self._pictures(carry["code"][:, None], carry).items()})

    def _split(self, whole: Carry) -> Carry:
        """The dynamics' carry with the codes apart, as observations have it."""
        return apart(whole, CODES, self.spec.state)

    @torch.no_grad()
    def _pictures(self, code: Tensor, carry: Carry) -> dict[str, Tensor]:
        """Of codes [N,E,Z] of the lanes of `carry`; rows are decoded 256 at a time."""
        e, views, decode = code.shape[1], self.spec.control.views, self.codec.decode
        parts = []
        for i in range(0, len(code), max(1, 256 // e)):
            rows = slice(i, i + max(1, 256 // e))
            first = torch.cat([to_patches(carry[f"first/{v}"][rows]) for v in views], -3)[:, None]
            before = decode(carry["code_first"][rows])[:, None]
            now = decode(code[rows].flatten(0, 1)).unflatten(0, (-1, e))
            parts.append(now + torch.exp(-((now - before) / STILL).square()) * (first - before))
        patches = torch.cat(parts).clamp(-1, 1)
        return {f"image/{v}": to_frames(x) for v, x in zip(views, patches.split(48, 2), strict=True)}


def build(spec: WorldSpec, options: dict) -> Encoded:
    """The untrained model of a folder's JSON."""
    saved = encoded_net(options | {"dynamics": latent_options(options["dynamics"])})
    return Encoded(spec, EncodedOptions(**saved))


def _all_steady(codec: FrameCodec, state: dict, prefix: str, *rest: Any) -> None:
    """Weights of before kept every point."""
    state.setdefault(prefix + "steady", torch.ones(codec.points))
