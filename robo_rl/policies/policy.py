"""Flow, diffusion and Gaussian chunk policies under one small interface.

A policy samples a chunk by a chain of K Gaussian (or deterministic) steps. `act` keeps, for each random step,
the x before it, the x after it and its index: that is the *trace*, and `score` gives its exact log-density
under any weights. Same weights, same density; ratios therefore start at 1.

Shapes: B batch, H steps in the chunk, E executed, A action, D = H A, F random steps kept.
"""

import copy
from dataclasses import asdict, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.losses import error_weights
from robo_rl.normalise import Normaliser
from robo_rl.options import PolicyOptions
from robo_rl.policies.context import ADVANTAGE, PREFIX, Context
from robo_rl.policies.guidance import GuidedChunkHead, supervised, told_context
from robo_rl.policies.images import Fit, fit_bytes
from robo_rl.policies.nets import (
    ChunkHead,
    NoiseNet,
    StateTrunk,
    VelocityNet,
    VisionLanguageTrunk,
    mlp,
    orthogonal,
    text_tokens,
    tokenize,
)
from robo_rl.policies.protocol import Chunk, Obs, ObsSpec
from robo_rl.policies.protocol import Policy as Policy  # exported
from robo_rl.policies.row_head import RowHead
from robo_rl.sampling import (
    LOG_2PI,
    ChainTable,
    Noise,
    action_table,
    chunk_logp,
    diffusion_table,
    drawn_table,
    flow_table,
    randint,
    randn,
)


def words_of(texts: "list[str] | np.ndarray", spec: ObsSpec) -> np.ndarray:
    """Instructions as the `tokens` of observations: hashed words int64[B,TOKENS], or text uint8[B,N]."""
    return text_tokens(texts, spec.text) if spec.text else tokenize(texts)


def blank_obs(spec: ObsSpec, *rows: int) -> dict[str, np.ndarray]:
    """An observation of zeros [*rows, ...] without an instruction: what a policy tries itself on before
    anything is seen."""
    pictures = {
        f"image/{v}": np.zeros((*rows, spec.image_size, spec.image_size, 3), np.uint8) for v in spec.views
    }
    return {"state": np.zeros((*rows, spec.state), np.float32)} | pictures


def obs_tensors(obs: dict, spec: ObsSpec) -> Obs:
    """Env observation (NumPy or torch, batch first) -> what the policy takes; copies nothing but the tokens,
    and pictures that it makes square (`ObsSpec.fit`; a policy that reads text does so by itself)."""
    out = {"state": torch.as_tensor(obs["state"])}
    if spec.language:
        out["tokens"] = torch.from_numpy(words_of(obs["task"], spec))
    for view in spec.views:
        image = torch.as_tensor(obs[f"image/{view}"])
        out[f"image/{view}"] = (
            fit_bytes(image, spec.image_size, cast(Fit, spec.fit)) if spec.fit and not spec.text else image
        )
    return out


class PolicyBase(nn.Module):
    """What all policies share: normalisers, the trunk that encodes observations, and actions in the env's
    units.

    `self.context_size` is C, the width of what a trunk pools, and `self.chunk` D = H W: W numbers of a step
    (`self.width`), of which the first A are the env's. W is A but for models whose width is their own.
    """

    trunk: nn.Module

    def __init__(self, options: PolicyOptions, spec: ObsSpec):
        super().__init__()
        self.options, self.spec = options, spec
        self.width = spec.action
        self.make_normalisers()
        self.trunk, self.context_size = self.make_trunk()
        if options.advantage and not options.text:
            self.context_size = 2 * self.context_size + 1  # and what the policy is told
        self.chunk = options.horizon * self.width

    def make_normalisers(self) -> None:
        """`obs_norm` of the state and `action_norm` of actions, to be fitted to demonstrations."""
        self.obs_norm, self.action_norm = Normaliser(self.spec.state), Normaliser(self.spec.action, clip=1e9)

    def make_trunk(self) -> tuple[nn.Module, int]:
        """The trunk, and C."""
        o, spec = self.options, self.spec
        trunk = (
            VisionLanguageTrunk(spec.state, spec.views, spec.image_size, o.width, o.depth, o.keypoints)
            if spec.views
            else StateTrunk(spec.state, spec.language)
        )
        return trunk, trunk.size

    def encode(self, obs: Obs) -> Context:
        """Observation -> context; one that was encoded already is among `obs` as its columns. A policy of
        `advantage` is told what `obs` says of it, and where it says nothing that its action is good."""
        if PREFIX in obs:
            return Context.of(obs)
        images = {v: obs[f"image/{v}"] for v in self.spec.views}
        pooled = self.trunk(self.obs_norm(obs["state"]), obs.get("tokens"), images)
        return (
            told_context(pooled, obs.get(ADVANTAGE), self.options.guidance)
            if self.options.advantage
            else Context(pooled)
        )

    def commands(self, x: Tensor) -> Tensor:
        """Normalised chunk [B,D] or [B,H,A] -> executed actions [B,E,A] in the env's -1..1 units."""
        return self.action_norm.inverse(
            x.view(len(x), self.options.horizon, self.spec.action)[:, : self.options.execute]
        )

    def whole_chunk(self, x: Tensor, obs: Obs) -> Tensor:
        """Clean chunk [B,H,W] of these observations -> all of its actions [B,H,A] in the env's units."""
        return self.action_norm.inverse(x[..., : self.spec.action])

    def freeze_base(self) -> None:
        """Nothing is frozen unless a policy says so."""

    def _entries(self) -> tuple[int, float]:
        """Executed entries of a chunk, which come first, and the weight of each in its log-density."""
        return (
            count := self.options.execute * self.spec.action
        ), 1.0 if self.options.logp_reduction == "sum" else 1 / count

    def _executed(self, x: Tensor) -> Tensor:
        """Chunks [B,D] -> the entries that the env executes, [B,E*A]."""
        e, a = self.options.execute, self.spec.action
        return x[:, : e * a] if a == self.width else x.unflatten(1, (-1, self.width))[:, :e, :a].flatten(1)

    def clean_chunk(self, chunk: Tensor) -> Tensor:
        """Actions [B,H,A] in the env's units -> x0 of the chain, [B,D]."""
        return self.action_norm(chunk).flatten(1)


class ChainPolicy(PolicyBase):
    """Flow matching, or DDPM, over action chunks.

    With `predict` action the network gives the clean chunk D in place of the velocity v = (x - D)/t or of the
    noise; it learns by the error of D over t, at the K times of the chain, which are all that it is ever
    asked at (Salimans and Ho 2022, arXiv 2202.00512, section 4; Li and He 2025, arXiv 2511.13720).

    Without exploration a flow is its ODE, and every step of a diffusion chain is its mean: that of the chain
    that RL trains, whose noise is then `std_scale` of DDPM's, at least `std_floor`. DDIM's means are other
    ones. (DPPO evaluates with DDPM's own noise at every step but the last.)
    """

    bars: Tensor  # diffusion only, as the next
    bars_prev: Tensor
    times: Tensor
    features: Tensor
    loud_s: Tensor
    draws: Tensor
    drawn: Tensor  # where one step is drawn
    base: VelocityNet | None
    head: VelocityNet
    noise: NoiseNet | None
    # bool [D]: entries that exploration moves, the others follow the plain ODE; None: all
    noisy: Tensor | None

    def __init__(self, options: PolicyOptions, spec: ObsSpec):
        super().__init__(options, spec)
        o = options
        self.head, self.noise = self.make_head()
        self.head.beta = o.guidance
        self.diffusion, self.clean = o.kind == "diffusion", o.predict == "action"
        self.base = (
            copy.deepcopy(self.head).requires_grad_(False)
            if self.diffusion and o.finetune_steps < o.denoise_steps
            else None
        )
        self.make_tables()
        self.register_buffer("noisy", None, persistent=False)

    def make_tables(self) -> None:
        """What follows from the options of the chain: its times, its steps' tables, which of them are
        drawn."""
        o, k = self.options, self.options.denoise_steps
        self.first = max(0, k - o.finetune_steps) if self.diffusion else 0
        if self.diffusion:
            table, bars, bars_prev = diffusion_table(o.train_steps, k, 1.0)
            # evaluation: the means that RL moves
            quiet = ChainTable(table.a, table.b, torch.zeros(k), table.t)
            loud = ChainTable(table.a, table.b, (o.std_scale * table.s).clamp(min=o.std_floor), table.t)
            self.register_buffer("bars", bars, persistent=False)
            self.register_buffer("bars_prev", bars_prev, persistent=False)
        else:
            quiet = flow_table(k, "ode")
            loud = flow_table(k, "ode" if o.noise == "learned" else o.noise, o.noise_level)
            quiet, loud = (action_table(quiet), action_table(loud)) if self.clean else (quiet, loud)
        for name, table in (("quiet", quiet), ("loud", loud)):
            for field in ("a", "b", "s"):
                self.register_buffer(f"{name}_{field}", getattr(table, field), persistent=False)
        self.register_buffer("times", quiet.t, persistent=False)
        self.register_buffer("features", self.head.features(quiet.t), persistent=False)
        # a plain flow step is a x + b out
        self.plain = list(zip(quiet.a.tolist(), quiet.b.tolist(), strict=True))
        self.one = o.noise_steps != "all" and not self.diffusion
        self.factors = 1 if self.one else k - self.first
        noisy = torch.ones(k, dtype=torch.bool) if self.noise is not None else loud.s > 0
        # some step is deterministic: CPS's last, all of them without noise
        self.still = not bool(noisy.all())
        draws = noisy.nonzero().squeeze(1) if noisy.any() else torch.arange(k)
        draws = draws[-1:] if o.noise_steps == "last" else draws
        self.register_buffer("draws", draws, persistent=False)  # the steps of which one is drawn
        if self.one:
            self.register_buffer(
                "drawn", drawn_table(quiet, loud, self.noise is not None, self._entries()), persistent=False
            )

    def make_head(self) -> "tuple[VelocityNet, NoiseNet | None]":
        """The network of the chain, and that of its std where it is learned."""
        o = self.options
        if o.window:
            return RowHead(self.context_size, o.horizon, self.width, o.hidden, o.layers, o.window), None
        kind, rows = GuidedChunkHead if o.advantage else ChunkHead, o.horizon if o.commit else 0
        head = kind(self.context_size, self.chunk, o.hidden, o.layers, o.activation, rows, o.residual)
        return head, NoiseNet(
            o.hidden, self.chunk, o.noise_min, o.noise_max
        ) if o.kind == "flow" and o.noise == "learned" else None

    @property
    def noise_scale(self) -> float:
        """Exploration: the upper bound of a learned std, the level of Flow-SDE or CPS, or diffusion's std
        floor."""
        if self.noise is not None:
            return float(self.noise.high)
        return self.options.std_floor if self.diffusion else self.options.noise_level

    def freeze_base(self) -> None:
        """DPPO: the present head becomes the frozen base of the early denoise steps."""
        if self.base is not None:
            self.base.load_state_dict(self.options.lora.merged(self.head.state_dict()))
            self.base.requires_grad_(False)

    def _mean(self, x: Tensor, out: Tensor, k: "int | Tensor", table: str) -> Tensor:
        """Mean of step k; k is an int, or int64[B] for a row each."""
        col = (lambda v: v[k]) if isinstance(k, int) else (lambda v: v[k][:, None])
        a, b = col(getattr(self, f"{table}_a")), col(getattr(self, f"{table}_b"))
        if not self.diffusion:
            return a * x + b * out
        bar, prev = col(self.bars), col(self.bars_prev)
        # normalised actions live within +-3
        x0 = (out if self.clean else (x - (1 - bar).sqrt() * out) / bar.sqrt()).clamp(-3, 3)
        eps = (x - bar.sqrt() * x0) / (1 - bar).sqrt()
        direction = b + a * (1 - bar).sqrt()  # sqrt(1 - bar' - sigma^2) of the table
        return prev.sqrt() * x0 + direction * eps

    def _std(self, k: "int | Tensor", embedded: Tensor, time: Tensor) -> Tensor:
        """Std of random step k: [1,1] or [B,1] from the table, or [B,D] learned."""
        if self.noise is not None:
            return self.noise(embedded, time)
        return self.loud_s[k].reshape(-1, 1)

    def _logp(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        shape, a = (*x.shape[:-1], self.options.horizon, self.width), self.spec.action
        std = std.view(shape)[..., :a] if std.shape == x.shape else std.reshape(*std.shape[:-1], 1, 1)
        x, mean = x.view(shape), mean.view(shape)
        if a < self.width:
            x, mean = x[..., :a], mean[..., :a]
        return chunk_logp(x, mean, std, self.options.execute, self.options.logp_reduction)

    @torch.no_grad()
    def act(self, obs: Obs, generator: Noise, explore: bool = True) -> Chunk:
        """Sample a chunk for each observation [B,...] -> its actions [B,H,A] and the trace that `logp` scores
        again exactly. explore: with the noise of the chain; else its deterministic steps."""
        context = self.encode(obs)
        b, d, steps, one = len(context), self.chunk, self.options.denoise_steps, self.one and explore
        embedded, times = self.head.embed(context), self.head.steps(self.features)
        early, early_times = (
            (None, ()) if self.base is None else (self.base.embed(context), self.base.steps(self.features))
        )
        chain = torch.empty(steps + 1, b, d, device=self.times.device)
        xs, outs, stds = chain.unbind(), [], []
        randn(generator, b, d, out=xs[0])
        if one:  # the noise of the drawn step is laid down first; the chain is then added to it
            draw = self.draws[randint(generator, len(self.draws), b).to(chain.device)]
            noise = randn(generator, b, d).to(chain.device)
            columns = self.drawn.index_select(0, draw).t().unsqueeze(-1)  # [3K+3,B,1]
            spread = columns[2 * steps : 3 * steps]
            if self.noise is not None:
                learned = torch.stack([self.noise(embedded, time) for time in times])
                spread = spread * learned
            torch.mul(noise, spread, out=chain[1:])
            columns = columns.unbind()
            a, c, (constant, factor) = columns[:steps], columns[steps : 2 * steps], columns[3 * steps :]
        for k in range(steps):
            x, after = xs[k], xs[k + 1]
            out = (
                self.base(early, x, early_times[k])
                if self.base is not None and k < self.first
                else self.head(embedded, x, times[k])
            )
            if one:
                after.addcmul_(x, a[k]).addcmul_(out, c[k])
            elif explore:
                stds.append(self._std(k, embedded, times[k]))
                noise = randn(generator, b, d).to(chain.device)
                torch.addcmul(self._mean(x, out, k, "loud"), stds[k].expand(b, d), noise, out=after)
            elif self.diffusion:
                after.copy_(self._mean(x, out, k, "quiet"))
            else:
                a, b_out = self.plain[k]
                torch.mul(x, a, out=after).add_(out, alpha=b_out)
            if explore and self.noisy is not None:
                after.copy_(torch.where(self.noisy, after, self._mean(x, out, k, "quiet")))
            if stds or one and self.noisy is not None:
                outs.append(out)
        x0 = xs[steps].view(b, self.options.horizon, -1)
        if not explore:
            return Chunk(self.commands(xs[steps]), x0, x0.new_empty(b, 0), {})
        if one:
            # of [K*B, D]; far cheaper than a pair of indices
            rows = torch.arange(b, device=draw.device).add_(draw, alpha=b)
            states = chain.view(-1, d)
            x, x_next = states.index_select(0, rows), states[b:].index_select(0, rows)
            count, scale = self._entries()
            if self.noisy is not None:  # as `score` has it: a trace and its log-prob agree to the last bit
                std = self._std(draw, embedded, torch.stack(times)[draw])
                logp = self._logp(
                    x_next, self._mean(x, torch.cat(outs).index_select(0, rows), draw, "loud"), std
                )[:, None]
            else:
                if self.noise is not None:
                    own = learned.view(-1, d).index_select(0, rows)[:, :count]
                    constant = constant - scale * own.log().sum(1, keepdim=True)
                # the drawn step is mean + std * noise, so (x_next - mean) / std is the noise itself
                logp = torch.addcmul(constant, factor, noise[:, :count].square().sum(1, keepdim=True))
            index, x, x_next = draw[:, None], x[:, None], x_next[:, None]
        else:
            index = torch.arange(self.first, steps, device=chain.device).expand(b, -1)
            x, x_next = chain[self.first : -1].transpose(0, 1), chain[self.first + 1 :].transpose(0, 1)
            logp = torch.stack(
                [
                    self._logp(xs[k + 1], self._mean(xs[k], outs[k], k, "loud"), stds[k])
                    for k in range(self.first, steps)
                ],
                1,
            )
        return Chunk(self.commands(xs[steps]), x0, logp, {"x": x, "x_next": x_next, "k": index})

    def score(self, context: Context, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Context of B rows, trace [B,F,..] -> logp [B,F] and the mean entropy per executed entry of
        random steps, a scalar."""
        b, f, d = trace["x"].shape
        mean, std = self._steps(context, trace)
        own = self._executed(std) if std.shape == mean.shape else std
        return self._logp(trace["x_next"].reshape(b * f, d), mean, std).view(b, f), _entropy(
            own[own > 0] if self.still else own
        )

    def moments(self, context: Context, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and std of the executed entries n after each random step, given the x before it, [B,F,n]
        both."""
        b, f, _ = trace["x"].shape
        mean, std = self._steps(context, trace)
        return self._executed(mean).unflatten(0, (b, f)), self._executed(std.expand_as(mean)).unflatten(
            0, (b, f)
        )

    def _steps(self, context: Context, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean [B*F,D] of the random steps of a trace and their std, [B*F,1] or [B*F,D]."""
        b, f, d = trace["x"].shape
        k = trace["k"].reshape(-1)
        embedded, x = self.head.embed(context, f), trace["x"].reshape(b * f, d)
        out, times = self.head.at_steps(embedded, self.features, x, k)
        return self._mean(x, out, k, "loud"), self._std(
            k, embedded, times[k] if self.noise is not None else times
        )

    def bc_loss(
        self, obs: Obs, chunk: Tensor, mask: Tensor, generator: torch.Generator, noises: int = 1
    ) -> Tensor:
        """Flow matching `E |v(x_t, t) - (eps - x0)|^2` with t ~ Beta(1.5, 1) as in pi0, or noise prediction
        on the K chain steps (DDPM), or with `predict` action `E |D(x_t, t) - x0|^2 / t` (diffusion: without /
        t) on the K steps, over `noises` draws of time and noise per row. chunk[B,H,A] in env units,
        mask[B,H]."""
        context = self.encode(supervised(obs, self)).repeat(noises)
        chunk, mask = (x if noises == 1 else x.repeat_interleave(noises, 0) for x in (chunk, mask))
        return self.imitation(context, chunk, mask, generator)

    def imitation(
        self,
        context: Context,
        chunk: Tensor,
        mask: Tensor,
        generator: torch.Generator,
        head=None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """`bc_loss` on a context of B rows; `head` may stand in for the policy's own, weight[B] scales
        samples."""
        head = head or self.head
        x0 = self.clean_chunk(chunk)
        eps = torch.randn(x0.shape, generator=generator).to(x0.device)
        given = None
        # every second chunk has none: the first of an episode, and a robot that waits
        if c := self.options.commit:
            count = torch.randint(1 - c, c + 1, (len(x0),), generator=generator).clamp(min=0).to(x0.device)
            context, given = self.commit(context, count)
            mask = mask * ~given[:, :: self.width]  # their error says nothing
        embedded = head.embed(context)
        if self.diffusion:
            k = torch.randint(0, self.options.denoise_steps, (len(x0),), generator=generator).to(x0.device)
            bar = self.bars[k][:, None]
            out = head(embedded, bar.sqrt() * x0 + (1 - bar).sqrt() * eps, head.time(self.times[k]))
            target = eps
        else:
            t = self.draw_times(len(x0), generator)
            x_t = (1 - t[:, None]) * x0 + t[:, None] * eps
            out = head(embedded, x_t if given is None else torch.where(given, x0, x_t), head.time(t))
            target = eps - x0
        target = x0 if self.clean else target
        # between errors of the chunk, and those of its velocity, which weigh 1/t^2
        if self.clean and not self.diffusion:
            weight = torch.as_tensor(1 / t) if weight is None else weight / t
        err = (out - target).view(len(x0), self.options.horizon, self.width)[..., : self.spec.action]
        err = ((error_weights(err.detach(), mask) if self.options.weigh_errors else 1.0) * err.square()).mean(
            -1
        ) * mask
        if weight is not None:
            err = err * weight[:, None]
        return err.sum() / mask.sum().clamp(min=1)

    def commit(self, context: Context, count: Tensor) -> tuple[Context, Tensor]:
        """The context of chunks whose first `count` [B] rows are given, and which entries those are, bool
        [B,D]."""
        rows = torch.arange(self.options.horizon, device=count.device) < count[:, None]
        return replace(context, committed=rows.float()), rows.repeat_interleave(self.width, 1)

    def velocity(self, context: Context, x: Tensor, t: Tensor) -> Tensor:
        """v(x_t, t) for chunks x [B,H,W], t [B] (flow only; predicting actions, t of `draw_times`)."""
        out = self.head(self.head.embed(context), x.flatten(1), self.head.time(t)).view_as(x)
        return (x - out) / t[:, None, None] if self.clean else out

    def draw_times(self, n: int, generator: torch.Generator) -> Tensor:
        """Times [n] that a flow learns at: Beta(1.5, 1), tilted to noise, or where it predicts actions those
        of its chain."""
        if self.clean:
            return self.times[
                torch.randint(0, len(self.times), (n,), generator=generator).to(self.times.device)
            ]
        return torch.rand(n, generator=generator).to(self.times.device) ** (1 / 1.5)


def _entropy(std: Tensor) -> Tensor:
    """Mean entropy per entry of the steps that are random; 0 where none is, for then there is no density."""
    return (torch.log(std) + 0.5 * (LOG_2PI + 1)).mean() if len(std) else std.new_zeros(())


class GaussianPolicy(PolicyBase):
    """N(mean(context), std^2) over the chunk; a chain of one step whose `x_next` is the chunk."""

    factors = 1

    def __init__(self, options: PolicyOptions, spec: ObsSpec):
        super().__init__(options, spec)
        sizes = [self.context_size] + [options.hidden] * options.layers + [self.chunk]
        self.net = mlp(sizes, options.activation, options.residual)
        orthogonal(self.net, 0.01)
        self.log_std = nn.Parameter(torch.full((self.chunk,), float(np.log(options.init_std))))

    @property
    def noise_scale(self) -> float:
        """Mean std of the executed entries (normalised action units)."""
        return float(self.log_std.detach()[: self._entries()[0]].exp().mean())

    @torch.no_grad()
    def act(self, obs: Obs, generator: Noise, explore: bool = True) -> Chunk:
        mean = self.net(self.encode(obs).pooled)
        shape = (len(mean), self.options.horizon, -1)
        if not explore:
            return Chunk(self.commands(mean), mean.view(shape), mean.new_empty(len(mean), 0), {})
        x = torch.addcmul(mean, self.log_std.exp(), randn(generator, *mean.shape).to(mean.device))
        return Chunk(self.commands(x), x.view(shape), self._density(x, mean)[:, None], {"x_next": x[:, None]})

    def score(self, context: Context, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        entropy = (self.log_std[: self._entries()[0]] + 0.5 * (LOG_2PI + 1)).mean()
        return self._density(trace["x_next"][:, 0], self.net(context.pooled))[:, None], entropy

    def moments(self, context: Context, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and std of the executed entries n, [B,1,n] both."""
        d = self.options.execute * self.spec.action
        mean = self.net(context.pooled)[:, None, :d]
        return mean, self.log_std[:d].exp().expand_as(mean)

    def _density(self, x: Tensor, mean: Tensor) -> Tensor:
        """`chunk_logp` of x[B,D], in fewer operations: no std is 0, and all rows share theirs."""
        d, log_std = self.options.execute * self.spec.action, self.log_std
        if d < self.chunk:
            x, mean, log_std = x[:, :d], mean[:, :d], log_std[:d]
        z = (x - mean) * torch.exp(-log_std)
        logp = torch.add(-log_std.sum() - 0.5 * LOG_2PI * d, z.square().sum(-1), alpha=-0.5)
        return logp / d if self.options.logp_reduction == "mean" else logp

    def bc_loss(
        self, obs: Obs, chunk: Tensor, mask: Tensor, generator: torch.Generator, noises: int = 1
    ) -> Tensor:
        """Squared error of the mean, which draws no noise; the std is left to RL."""
        err = (self.net(self.encode(obs).pooled) - self.action_norm(chunk).flatten(1)).view(chunk.shape)
        return (err.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)


def describe(policy: "ChainPolicy | GaussianPolicy") -> dict:
    """What `make_policy` needs again, as plain JSON."""
    return {"options": asdict(policy.options), "spec": asdict(policy.spec)}
