"""What `robo_rl bench` holds our policies against: bare matrix products, and the same policies in plain
modules.

The plain policy is what one writes first from the papers: `nn.Sequential` on `torch.cat([state, x, time])`,
made anew at every denoise step, `torch.distributions.Normal` for densities, one denoise step after the other
where all are scored. Its weights are ours, so its samples and densities are too; the tests hold it to that.
"""

import copy
import io
import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.bench.rows import lacking, versioned
from robo_rl.policies.nets import ChunkHead, mlp, time_features
from robo_rl.policies.policy import ChainPolicy

PEAK = 512  # side of the product whose rate stands for the processor's


class PlainChain(nn.Module):
    """The same function as a `ChainPolicy` on states: Flow-SDE with one random step or all, learned noise,
    diffusion."""

    t: Tensor
    bars: Tensor
    bars_prev: Tensor
    loud_a: Tensor
    loud_b: Tensor
    loud_s: Tensor

    def __init__(self, policy: ChainPolicy):
        super().__init__()
        o = policy.options
        self.steps, self.level, self.one, self.first = (
            o.denoise_steps,
            o.noise_level,
            policy.one,
            policy.first,
        )
        self.chunk, self.mean = policy.chunk, o.logp_reduction == "mean"
        head, base = policy.head, policy.base
        assert isinstance(head, ChunkHead)
        self.net, self.time = _as_one(policy, head), _time_net(head)
        self.base: nn.Module | None = None
        self.base_time: nn.Module | None = None
        if isinstance(base, ChunkHead):
            self.base, self.base_time = _as_one(policy, base), _time_net(base)
        self.noise = copy.deepcopy(policy.noise)
        if self.noise is not None:
            self.embed, self.time_out = (copy.deepcopy(head.from_context), copy.deepcopy(head.from_time[2]))
        self.register_buffer("t", policy.times.clone())
        self.diffusion = policy.diffusion
        for name in ("bars", "bars_prev", "loud_a", "loud_b", "loud_s") if policy.diffusion else ():
            self.register_buffer(name, getattr(policy, name).clone())

    def forward(self, state: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """What the network says: state [B,S], x [B,D], t [B] -> [B,D]."""
        return self.net(torch.cat([state, x, self.time(time_features(t))], -1))

    def step(self, state: Tensor, x: Tensor, out: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std of the random steps k int64[B]."""
        t, d = self.t[k][:, None], 1 / self.steps
        if self.noise is not None:
            time = self.time_out(self.time(time_features(self.t[k])))
            return x - d * out, self.noise(self.embed(state), time)
        if not self.diffusion:
            sigma = self.level * torch.sqrt(t / (1 - torch.where(t == 1, 1 - d, t)))
            x0, x1 = x - t * out, x + (1 - t) * out
            return (1 - t + d) * x0 + (t - d - sigma**2 * d / (2 * t)) * x1, sigma * math.sqrt(d)
        bar, prev = self.bars[k][:, None], self.bars_prev[k][:, None]
        x0 = ((x - (1 - bar).sqrt() * out) / bar.sqrt()).clamp(-3, 3)
        eps = (x - bar.sqrt() * x0) / (1 - bar).sqrt()
        direction = self.loud_b[k][:, None] + self.loud_a[k][:, None] * (1 - bar).sqrt()
        return prev.sqrt() * x0 + direction * eps, self.loud_s[k][:, None]

    def logp(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        each = torch.distributions.Normal(mean, std.expand_as(mean)).log_prob(x)
        return each.mean(-1) if self.mean else each.sum(-1)

    @torch.no_grad()
    def act(
        self,
        state: Tensor,
        generator: torch.Generator,
        velocity: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Exploring: chunk [B,D], then what `score` takes: x [B,F,D], x after it [B,F,D], step [B,F]; and
        logp [B,F].

        velocity: a compiled form of the network to take instead.
        """
        # what torch compiled has a length that raises
        b, velocity = len(state), self if velocity is None else velocity
        x = torch.randn(b, self.chunk, generator=generator)
        draw = torch.randint(0, self.steps, (b,), generator=generator) if self.one else None
        noise = torch.randn(x.shape, generator=generator) if self.one else None
        kept: list[tuple[Tensor, ...]] = []
        before, after, logp = torch.empty_like(x), torch.empty_like(x), torch.zeros(b)
        for i in range(self.steps):
            k = torch.full((b,), i)
            if self.base is None or self.base_time is None or i >= self.first:
                out = velocity(state, x, self.t[k])
            else:
                out = self.base(torch.cat([state, x, self.base_time(time_features(self.t[k]))], -1))
            mean, std = self.step(state, x, out, k)
            x_next = mean + std * (noise if noise is not None else torch.randn(x.shape, generator=generator))
            if self.one:
                mine = draw == i
                x_next = torch.where(mine[:, None], x_next, x - out / self.steps)
                before, after = (
                    torch.where(mine[:, None], x, before),
                    torch.where(mine[:, None], x_next, after),
                )
                logp = torch.where(mine, self.logp(x_next, mean, std), logp)
            elif i >= self.first:
                kept.append((x, x_next, k, self.logp(x_next, mean, std)))
            x = x_next
        if draw is not None:
            return x, before[:, None], after[:, None], draw[:, None], logp[:, None]
        return x, *(torch.stack(column, 1) for column in zip(*kept, strict=True))

    def score(self, state: Tensor, before: Tensor, after: Tensor, steps: Tensor) -> Tensor:
        """Log-density of the random steps, [B,F], one after the other."""
        out = []
        for f in range(steps.shape[1]):
            x, k = before[:, f], steps[:, f]
            out.append(self.logp(after[:, f], *self.step(state, x, self(state, x, self.t[k]), k)))
        return torch.stack(out, 1)


class PlainChunk(nn.Module):
    """A flow policy's chunk from its initial noise: state [B,S], x [B,D] -> [B,D]. The whole chain, to be
    compiled."""

    def __init__(self, plain: PlainChain):
        super().__init__()
        self.plain = plain

    def forward(self, state: Tensor, x: Tensor) -> Tensor:
        for k in range(self.plain.steps):
            x = x - self.plain(state, x, self.plain.t[k].expand(len(state))) / self.plain.steps
        return x


def _time_net(head: ChunkHead) -> nn.Module:
    return copy.deepcopy(head.from_time[:2])


def _as_one(policy: ChainPolicy, head: ChunkHead) -> nn.Sequential:
    """A head whose first layer is one matrix on [state, x, time]."""
    o = policy.options
    net = mlp([policy.spec.state + policy.chunk + 64] + [o.hidden] * o.layers + [policy.chunk], o.activation)
    linears = [m for m in net if isinstance(m, nn.Linear)]
    with torch.no_grad():
        linears[0].weight.copy_(
            torch.cat([head.from_context.weight, head.from_x.weight, head.from_time[2].weight], 1)
        )
        linears[0].bias.copy_(head.from_context.bias)
        for mine, theirs in zip(linears[1:], [*head.body, head.out], strict=True):
            mine.load_state_dict(theirs.state_dict())
    return net


# ---- compiled forms ----------------------------------------------------------------------------------------


def compiled_forms(
    module: nn.Module, example: tuple[Tensor, ...], quick: bool, onnx: bool = True
) -> tuple[dict[str, Callable], dict[str, str]]:
    """({name and version: the module's forward, compiled}, {what is not here: why}); each gives the
    module's own output."""
    torch_is, forms, missing = versioned("torch"), {}, {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.freeze(torch.jit.trace(copy.deepcopy(module).eval(), example))
        forms[f"{torch_is} torch.jit"] = traced
        if quick:
            missing["torch.compile"] = "left out by --quick (it compiles for a minute)"
        else:
            forms[f"{torch_is} torch.compile"] = torch.compile(copy.deepcopy(module).eval(), dynamic=False)
        why = next(filter(None, (lacking(m, m) for m in ("onnxruntime", "onnx", "onnxscript"))), "")
        why = why if onnx else "left out by --quick (it exports for seconds)"
        if why:
            missing["onnxruntime"] = why
        else:
            forms[versioned("onnxruntime")] = OnnxForm(module, example)
        right = module(*example)
        for name, form in forms.items():
            for _ in range(3):  # torch.jit looks at its first calls, torch.compile compiles
                got = form(*example)
            assert torch.allclose(got, right, atol=1e-4), f"{name} gives something else"
    return forms, missing


class OnnxForm:
    """A module exported by torch and run by onnxruntime on one thread: arrays in, an array out."""

    def __init__(self, module: nn.Module, example: tuple[Tensor, ...]):
        import onnxruntime

        program: Any = torch.onnx.export(copy.deepcopy(module).eval(), example, dynamo=True, verbose=False)
        file = io.BytesIO()
        program.save(file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            file.getvalue(), options, providers=["CPUExecutionProvider"]
        )
        self.names = [i.name for i in self.session.get_inputs()]

    def run(self, *rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.session.run(None, dict(zip(self.names, rows, strict=True)))[0])

    def __call__(self, *tensors: Tensor) -> Tensor:
        return torch.from_numpy(self.run(*(t.numpy() for t in tensors)))


# ---- limits ------------------------------------------------------------------------------------------------


def product_chain(
    rows: int, context: int, chunk: int, hidden: int, layers: int, steps: int
) -> Callable[[], None]:
    """The matrix products of a chain of `steps`: the context's once, then x, body and out at every step."""
    body = [torch.randn(hidden, hidden) for _ in range(layers - 1)]
    weights, x = [torch.randn(chunk, hidden), *body, torch.randn(hidden, chunk)], torch.randn(rows, chunk)
    state, first = torch.randn(rows, context), torch.randn(context, hidden)
    buffers = [torch.empty(rows, w.shape[1]) for w in weights]

    def call() -> None:
        torch.mm(state, first, out=buffers[0])
        for _ in range(steps):
            h = x
            for w, out in zip(weights, buffers, strict=True):
                h = torch.mm(h, w, out=out)

    return call


def chain_flops(rows: int, context: int, chunk: int, hidden: int, layers: int, steps: int) -> float:
    """Floating-point operations of `product_chain`."""
    per_step = 2 * chunk * hidden + (layers - 1) * hidden**2
    return 2.0 * rows * (context * hidden + steps * per_step)


def product_update(rows: int, sizes: list[int]) -> Callable[[], None]:
    """The matrix products of one forward and backward pass through an MLP of `sizes`."""
    weights = [torch.randn(a, b) for a, b in pairwise(sizes)]
    acts = [torch.randn(rows, s) for s in sizes]
    slopes, grads = [torch.empty(rows, s) for s in sizes], [torch.empty_like(w) for w in weights]

    def call() -> None:
        for i, w in enumerate(weights):
            torch.mm(acts[i], w, out=slopes[i + 1])
        for i in range(len(weights) - 1, -1, -1):
            torch.mm(acts[i].t(), acts[i + 1], out=grads[i])
            if i:
                torch.mm(acts[i + 1], weights[i].t(), out=slopes[i])

    return call


def update_flops(rows: int, sizes: list[int]) -> float:
    """Floating-point operations of `product_update`."""
    forward = sum(a * b for a, b in pairwise(sizes))
    return 2.0 * rows * (3 * forward - sizes[0] * sizes[1])


def at_peak(flops: float) -> tuple[Callable[[], object], float]:
    """(a square product, how many jobs of `flops` are as many operations): the processor's rate on such a
    job."""
    a, b, out = torch.randn(PEAK, PEAK), torch.randn(PEAK, PEAK), torch.empty(PEAK, PEAK)
    return lambda: torch.mm(a, b, out=out), 2.0 * PEAK**3 / flops
