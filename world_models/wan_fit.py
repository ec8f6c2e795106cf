"""Learning a `diffusers` model: the arm's state (`world_models.fit`), the autoencoder where its weights are
fresh, the transformer, and the heads (`world_models.video_heads`)."""

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from robo_rl.errors import UserError
from robo_rl.optim import AdamW
from world_models.fit import PARTS, Fitter, descend, fit_state, normal, pace, smooth
from world_models.options import FitOptions
from world_models.recorded import Recorded
from world_models.video import patches_of
from world_models.video_fit import chunk_rows, drawn_ages, load_video_fit, pixel_spread, take_arm
from world_models.video_heads import HeadFitter
from world_models.wan import FACTOR, WanVideo, pictures
from world_models.wan_options import DiffusersFitOptions

KL = 1e-6  # weight of the autoencoder's divergence from a unit Gaussian


class WanFitter:
    """A model being learnt on `device`: owns the optimizers, the averaged weights, the generator and the
    counts of updates. Rows of the data are chosen on the host."""

    def __init__(
        self, model: WanVideo, data: Recorded, options: DiffusersFitOptions, seed: int, device: str = "cpu"
    ):
        self.model, self.options, self.device = model, options, device
        self.data, steps = data.extended()
        arm = FitOptions(updates=options.arm)
        self.arm = Fitter(model.proprio, data, arm, seed, device=device)
        model.to(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.pictures, self.update, c = 0, 0, model.options.chunk
        self.vae_updates = 0 if model.options.folder else options.vae
        last = self.data.end - 1 - ~data.known
        self.rows, self.twice = chunk_rows(self.data, last, data.held, c)
        self.state, self.action = (
            torch.from_numpy(x).to(device) for x in (self.data.state, self.data.action)
        )
        self.begins = torch.from_numpy(np.repeat(self.data.first, self.data.lengths))
        self.task = torch.from_numpy(np.repeat(self.data.task, self.data.lengths)).to(device)
        frames = self.patches(
            self.rows[
                torch.randint(0, len(self.rows), (min(256, len(self.rows)),), generator=self.generator), None
            ]
        )
        model.pixel.copy_(pixel_spread(frames))
        self.heads = HeadFitter(model, data, self.data, steps, options, seed)
        self.average = copy.deepcopy(model)
        self.mine = [p for m in (model.trunk, model.tokens) for p in m.parameters() if p.requires_grad]
        self.opt = AdamW(self.mine, lr=options.lr, weight_decay=1e-4, fused=False)
        self.vae_opt = AdamW(model.vae.parameters(), lr=options.lr, weight_decay=1e-4, fused=False)

    def patches(self, rows: Tensor) -> Tensor:
        """Frames of rows [B,T] as patches [B,T,V 48,g,g]."""
        at, views = rows.numpy(), self.model.spec.control.views
        return patches_of({v: self.data.images[v][at] for v in views}, views).to(self.device)

    def drawn(self, pool: Tensor, count: int) -> Tensor:
        return pool[torch.randint(0, len(pool), (count,), generator=self.generator)]

    # ---- the autoencoder

    def vae_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Of a clip's pictures: error of what is decoded, and a little of the divergence."""
        vae, rows = self.model.vae, self.drawn(self.rows, self.options.batch)
        x = pictures(self.patches(rows[:, None] + torch.arange(FACTOR + 1)))
        latents = vae.encode(x).latent_dist
        z = latents.mean + latents.std * normal(latents.mean.shape, self.generator, self.device)
        error = (vae.decode(z).sample - x).abs().mean()
        return error + KL * latents.kl().mean(), {"pictures": error.detach()}

    @torch.no_grad()
    def measure(self) -> None:
        """The autoencoder's averaged weights become its own; mean and std of its latents, by channel."""
        self.model.vae.load_state_dict(self.average.vae.state_dict())
        rows = self.drawn(self.rows, min(128, len(self.rows)))
        z = torch.cat(
            [
                self.model.vae.encode(
                    pictures(self.patches(r[:, None] + torch.arange(FACTOR + 1)))
                ).latent_dist.mode()
                for r in rows.split(16)
            ]
        )
        mean, std = z.mean((0, 2, 3, 4)), z.std((0, 2, 3, 4)).clamp(min=1e-3)
        for m in (self.model, self.average):
            m.mean.copy_(mean.view(-1, 1, 1, 1))
            m.std.copy_(std.view(-1, 1, 1, 1))

    # ---- the transformer

    def recalled(self, rows: Tensor) -> dict[str, Tensor]:
        """What a model keeps of frames at rows [B]: of episodes that began at a row drawn between their own
        first and these."""
        most, back = rows - self.begins[rows], torch.arange(self.model.options.past - 1, -1, -1)
        age = drawn_ages(most, self.generator)
        every = self.patches(
            torch.cat([(rows - age)[:, None], rows[:, None] - torch.minimum(back, age[:, None])], 1)
        )
        return {"first": every[:, 0], "past": every[:, 1:]}

    def told(self, rows: Tensor, e: Tensor) -> Tensor:
        """Tokens of chunks that begin in rows [B] of which e [B] steps are commanded."""
        steps = rows[:, None] + torch.minimum(torch.arange(self.model.options.chunk), e[:, None] - 1)
        return self.model.told(self.state[rows], self.state[steps + 1], self.action[steps], self.task[rows])

    @torch.no_grad()
    def led(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(rows a chunk later, what is kept there) where the model made that chunk, from recorded frames at
        rows [B]."""
        m, c, kept = self.model, self.model.options.chunk, self.recalled(rows)
        known = m.known(kept)
        shape = (len(rows), known.shape[1], c // FACTOR, *known.shape[3:])
        z = m.sample(
            known,
            self.told(rows, torch.full((len(rows),), c)),
            lambda k: normal(shape, self.generator, self.device),
        )
        frames = m.decode(torch.cat([known[:, :, 1:], z], 2))[:, -c:].clamp(-1, 1)
        return rows + c, kept | {"past": torch.cat([kept["past"], frames], 1)[:, -m.options.past :]}

    def loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        """(1), a share of it on chunks that follow the model's own frames."""
        m, o, c = self.model, self.options, self.model.options.chunk
        own = round(o.own * o.batch) if self.update >= o.updates // 2 and len(self.twice) else 0
        rows = self.drawn(self.rows, o.batch - own)
        kept = self.recalled(rows)
        if own:
            later, led = self.led(self.drawn(self.twice, own))
            rows, kept = torch.cat([later, rows]), {k: torch.cat([led[k], kept[k]]) for k in kept}
        b, e = len(rows), torch.randint(1, 2 * c + 1, (len(rows),), generator=self.generator).clamp(max=c)
        with torch.no_grad():
            known = m.known(kept)
            future = self.patches(rows[:, None] + torch.arange(1, c + 1))
            z = m.encode(torch.cat([kept["past"], future], 1))[:, :, -(c // FACTOR) :]
        eps, old = (normal(x.shape, self.generator, self.device) for x in (z, known))
        t, s = (torch.rand(b, generator=self.generator).to(self.device) for _ in range(2))
        s = m.options.context_noise * (1.5 * s - 0.5).clamp(min=0)  # one in three has none
        wide, blur = (x.view(-1, 1, 1, 1, 1) for x in (t, s))
        x = torch.cat([(1 - blur) * known + blur * old, (1 - wide) * z + wide * eps], 2)
        times = torch.cat([s[:, None].expand(-1, known.shape[2]), t[:, None].expand(-1, z.shape[2])], 1)
        v = m.velocity(x, times, self.told(rows, e))[:, :, known.shape[2] :]
        # a latent frame some of whose steps are commanded
        counts = (torch.arange(z.shape[2]) * FACTOR < e[:, None]).to(self.device)
        error = ((v - (eps - z)).square().mean((1, 3, 4)) * counts).sum() / counts.sum()
        return error, {"frames": error.detach()}

    # ---- all of it

    def fit(self, tick: Callable[[int, dict[str, float]], bool] = lambda update, parts: True) -> bool:
        """Go on to the end -> True, or until `tick(updates made, running means)` says False."""
        o, recent, none = self.options, {}, {"state": math.nan, "frames": math.nan, "success": math.nan}
        if self.arm.update < o.arm:
            if not self.arm.fit(
                lambda n, parts: tick(
                    self.made, none | {"state": parts["state"], "success": parts["success"]}
                )
            ):
                return False
            take_arm(self)
        while self.pictures < self.vae_updates:
            value, parts = self.vae_loss()
            self.vae_opt.param_groups[0]["lr"] = pace(o.lr, self.pictures, self.vae_updates)
            pairs = list(zip(self.average.vae.parameters(), self.model.vae.parameters(), strict=True))
            descend(
                value,
                self.vae_opt,
                self.model.vae.parameters(),
                1.0,
                pairs,
                min(o.ema, (1 + self.pictures) / (10 + self.pictures)),
            )
            self.pictures += 1
            smooth(recent, parts)
            if self.pictures == self.vae_updates:
                self.measure()
            if not tick(self.made, none | {"pictures": recent["pictures"]}):
                return False
        self.model.vae.requires_grad_(False)
        pairs = [
            (a, b)
            for n in ("trunk", "tokens")
            for a, b in zip(
                getattr(self.average, n).parameters(), getattr(self.model, n).parameters(), strict=True
            )
            if b.requires_grad
        ]
        while self.update < o.updates:
            value, parts = self.loss()
            if not math.isfinite(float(value.detach())):
                raise UserError(
                    f"the loss of the model is no longer finite after {self.update} updates; start again "
                    "with a smaller --fit.lr"
                )
            self.opt.param_groups[0]["lr"] = pace(o.lr, self.update, o.updates)
            descend(
                value, self.opt, self.mine, 1.0, pairs, min(o.ema, (1 + self.update) / (10 + self.update))
            )
            self.update += 1
            smooth(recent, parts)
            if not tick(self.made, none | recent):
                return False
        if not self.heads.update:
            self.heads.begin(self.average)
        return self.heads.fit(lambda n, parts: tick(self.made, none | parts))

    @property
    def made(self) -> int:
        """Updates of all parts."""
        return self.arm.update + self.pictures + self.update + self.heads.update

    def result(self) -> WanVideo:
        return copy.deepcopy(self.average)

    def state_dict(self) -> dict:
        """Everything to go on exactly (with the same data)."""
        return fit_state(self, ("arm", *PARTS, "vae_opt")) | {
            "pictures": self.pictures,
            "heads": self.heads.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        load_video_fit(self, state, ("arm", *PARTS, "vae_opt"))
        self.pictures = state["pictures"]
