"""Learning an `encoded` model: first the autoencoder of its pictures, then the dynamics (`world_models.fit`)
on their codes."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from robo_rl.errors import UserError
from robo_rl.optim import AdamW
from world_models import points
from world_models.encoded import Encoded
from world_models.fit import Fitter, normal, pace, smooth
from world_models.options import EncodedFitOptions
from world_models.recorded import Recorded
from world_models.video import patches_of


class EncodedFitter:
    """A model being learnt on `device`: owns the optimizer, the generator and the count of updates;
    `dynamics`, and `coded`, the data as they see it, are there once pictures are done."""

    def __init__(
        self, model: Encoded, data: Recorded, options: EncodedFitOptions, seed: int, device: str = "cpu"
    ):
        self.model, self.data, self.options, self.seed, self.device = model, data, options, seed, device
        model.to(device)
        self.train = np.flatnonzero(~np.repeat(data.held, data.lengths))
        self.generator = torch.Generator().manual_seed(seed)
        self.opt = AdamW(model.codec.parameters(), lr=options.lr, weight_decay=1e-4, fused=False)
        self.update = 0
        self.dynamics: Fitter | None = None
        self.coded: Recorded | None = None
        some = self.patches(data.spaced())
        model.codec.mean.copy_(some.mean(0))
        model.codec.var.copy_((some - some.mean(0)).square().mean().clamp(min=1e-6))
        if model.codec.points:
            three = points.in_a_row(data, self.patches, model.codec.views)
            if three is not None:
                model.codec.steady.copy_(points.steady_points(three))

    def patches(self, rows: np.ndarray) -> Tensor:
        """Frames of rows [B] as patches [B,V 48,g,g]."""
        views = self.model.spec.control.views
        return patches_of({v: self.data.images[v][rows] for v in views}, views).to(self.device)

    def loss(self, rows: np.ndarray) -> Tensor:
        """Squared error of the decoded frames of rows [B], in units of the frames' variance; codes normalised
        within the batch."""
        codec, x = self.model.codec, self.patches(rows)
        raw = codec.raw(x)
        centre, spread = codec.measured(raw)
        code = (raw - centre) / spread
        noise = normal(code.shape, self.generator, self.device)
        code = code + self.model.options.noise * noise
        return (codec.decode(code) - x).square().mean() / codec.var

    def fit(self, tick: Callable[[int, dict[str, float]], bool] = lambda update, parts: True) -> bool:
        """Go on to the end -> True, or until `tick(updates made, running means)` says False; updates of both
        parts count."""
        o, recent = self.options, {}
        while self.update < o.pictures:
            rows = self.train[
                torch.randint(
                    0, len(self.train), (min(o.batch, len(self.train)),), generator=self.generator
                ).numpy()
            ]
            value = self.loss(rows)
            if not math.isfinite(float(value.detach())):
                raise UserError(
                    f"the loss of the autoencoder is no longer finite after {self.update} updates; start "
                    "again with a smaller --fit.lr"
                )
            self.opt.param_groups[0]["lr"] = pace(o.lr, self.update, o.pictures)
            self.opt.zero_grad()
            value.backward()
            self.opt.step()
            self.update += 1
            smooth(recent, {"frames": value.detach()})
            if not tick(self.update, {"state": math.nan, "success": math.nan} | recent):
                return False
        dynamics = self.begin_dynamics() if self.dynamics is None else self.dynamics
        return dynamics.fit(lambda n, parts: tick(o.pictures + n, {"frames": math.nan} | parts))

    def begin_dynamics(self) -> Fitter:
        """The autoencoder stays as it is from now on; recorded episodes become states and codes."""
        codec = self.model.codec
        with torch.no_grad():
            raw = torch.cat([codec.raw(self.patches(rows)) for rows in np.array_split(self.data.spaced(), 8)])
            centre, spread = codec.measured(raw)
            codec.centre.copy_(centre)
            codec.spread.copy_(spread)
        codec.requires_grad_(False)
        self.coded = self.with_codes()
        self.dynamics = Fitter(
            self.model.dynamics, self.coded, self.options.dynamics, self.seed, device=self.device
        )
        return self.dynamics

    def with_codes(self) -> Recorded:
        """The data with codes beside the states, without pictures."""
        data = self.data.with_numbers(lambda images: self.model.codes(images).numpy())
        names = tuple(f"code{i}" for i in range(self.model.codec.size))
        control = replace(data.control, views=(), state_names=(*data.control.state_names, *names))
        return replace(data, images={}, control=control, final_images={}, pictured=None)

    def result(self) -> Encoded:
        """The model with the dynamics' averaged weights."""
        out = copy.deepcopy(self.model)
        if self.dynamics is not None:
            out.dynamics.load_state_dict(self.dynamics.result().state_dict())
        return out

    def state_dict(self) -> dict:
        """Everything to go on exactly (with the same data)."""
        return {
            "codec": self.model.codec.state_dict(),
            "opt": self.opt.state_dict(),
            "generator": self.generator.get_state(),
            "update": self.update,
            "dynamics": self.dynamics.state_dict() if self.dynamics else {},
        }

    def load_state_dict(self, state: dict) -> None:
        self.model.codec.load_state_dict(state["codec"])
        self.opt.load_state_dict(state["opt"])
        self.generator.set_state(state["generator"])
        self.update = state["update"]
        if state["dynamics"]:
            self.begin_dynamics().load_state_dict(state["dynamics"])
