"""Chunks of a vision-language-action model on a GPU as one CUDA graph: for acting, where nothing is scored.

A chunk of a full pi0.5 is some 14,000 launches, and the host takes several times as long to make them as the
device to compute them. Here all that follows the processor, the trunk and the K denoise steps, is recorded
once for a number of observations and started by one launch; blocks are compiled by `torch.compile`. Of
pi0.5's expert, which is small and is asked K times, what all steps share is computed once per chunk: the
modulations of its norms, whose condition is the time alone, and its matrices side by side.

The numbers are those of `policy.act(explore=False)` but for rounding. Weights are read where they are: a step
of an optimizer, or a state that is loaded, is seen by the next chunk.
Axes: n observations, H steps, W action entries, D = H W, L tokens of the expert, P of the prefix, M key/value
heads of width d.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.policies.blocks import blocks_of
from robo_rl.policies.context import Context
from robo_rl.policies.guided import plain_chunks
from robo_rl.policies.nets import text_of
from robo_rl.policies.protocol import Obs
from robo_rl.policies.vla.blocks import (
    AdaRmsNorm,
    DecoderBlock,
    VisionBlock,
    attend,
    even_rows,
    rotate,
    rotation,
    row_places,
    time_embedding,
)
from robo_rl.policies.vla.pi import PiExpert
from robo_rl.policies.vla.policy import VlaPolicy, XVlaPolicy

# observations up to which attention is two products: its kernel has too few parts to fill a GPU
FEW = 8
ALIGNED = 16  # keys in multiples of this take the fast products


class QuickSampler:
    """The trunk and the deterministic steps of a chain as one launch per number of observations.

    head: of the policy; plain: (a, b) of each step x <- a x + b head(x); times [K] of the steps. compiled:
    blocks by torch.compile, some ten seconds per number of observations. On a CPU nothing is recorded.
    """

    def __init__(
        self,
        trunk: nn.Module,
        head: nn.Module,
        plain: Sequence[tuple[float, float]],
        times: Tensor,
        compiled: bool = True,
    ):
        self.trunk, self.head = shared(trunk), shared(head)
        self.embed: Callable[[Context], Context] = self.head.embed  # pyright: ignore[reportAttributeAccessIssue]
        self.plain, self.times = list(plain), times
        self.layer: Callable[..., Tensor] = pi_layer
        if compiled:
            for block in (*blocks_of(self.trunk).values(), *blocks_of(self.head).values()):
                if isinstance(block, DecoderBlock | VisionBlock):
                    block.compile(dynamic=False)
            self.layer = torch.compile(pi_layer, dynamic=False)
        expert = getattr(self.head, "expert", None)
        self.pi = expert if isinstance(expert, PiExpert) and adaptive(expert) and not expert.window else None
        self.recorded: dict[int, tuple[Any, dict[str, Tensor], Tensor]] = {}
        self.pool: Any = None

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Tensor], noise: Tensor) -> Tensor:
        """The model's inputs of n observations (`VlaModel.prefix`) and noise [n,D] -> x0 [n,D], which the
        next call overwrites. The first call for an n records it."""
        if not noise.is_cuda:
            return self._chunk(inputs, noise)
        n = len(noise)
        if n not in self.recorded:
            self.recorded[n] = self._record(inputs | {"noise": noise})
        graph, kept, out = self.recorded[n]
        for name, x in (inputs | {"noise": noise}).items():
            kept[name].copy_(x, non_blocking=True)
        graph.replay()
        return out

    def _chunk(self, inputs: dict[str, Tensor], noise: Tensor) -> Tensor:
        context = self.trunk(**inputs, drop=False)
        if self.pi is not None:
            return pi_chain(self.pi, self.layer, context, noise, self.plain, self.times)
        x, embedded = noise, self.embed(context)
        for (keep, step), time in zip(self.plain, self.times.unbind(), strict=True):
            x = keep * x + step * self.head(embedded, x, time)
        return x

    def _record(self, inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor], Tensor]:
        """(graph, the tensors that it reads, the one that it writes)"""
        kept = {name: x.clone() for name, x in inputs.items()}
        noise = kept["noise"]
        seen = {name: x for name, x in kept.items() if name != "noise"}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and lets libraries take their memory
            for _ in range(3):
                self._chunk(seen, noise)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            out = self._chunk(seen, noise)
        self.pool = self.pool or graph.pool()
        return graph, kept, out


class QuickChunks:
    """Whole chunks [B,H,A] of a policy in the env's units, without exploration, as `guided.plain_chunks`
    gives them: `chunks(obs, generator)`.

    `sizes` up to `most` observations at once are recorded, and a batch between two of them is filled up to
    the larger one; a batch above `most` acts plainly.
    """

    def __init__(self, policy: VlaPolicy, most: int = 1, compiled: bool = True):
        self.policy = policy
        self.sizes = sorted({min(4**k, most) for k in range(8)})
        self.sample = QuickSampler(policy.trunk, policy.head, policy.plain, policy.times, compiled)

    def warm_up(self, obs: Obs, log: Callable[[str], None]) -> None:
        """Record every size, with the first row of `obs`."""
        for n in self.sizes:
            log(f"preparing the policy for {n} observation{'s' * (n > 1)} at once")
            self({k: v[:1].repeat(n, *(1,) * (v.dim() - 1)) for k, v in obs.items()}, torch.Generator())

    @torch.no_grad()
    def __call__(self, obs: Obs, generator: torch.Generator) -> Tensor:
        policy, b = self.policy, len(obs["state"])
        if b > self.sizes[-1]:
            return plain_chunks(policy, obs, generator)
        noise = torch.randn(b, policy.chunk, generator=generator).to(policy.times.device)
        inputs, n = model_inputs(policy, obs), next(size for size in self.sizes if size >= b)
        rows = torch.arange(n, device=noise.device).clamp(max=b - 1)
        x0 = self.sample({k: v[rows] for k, v in inputs.items()}, noise[rows])[:b].clone()
        return policy.whole_chunk(x0.view(b, policy.options.horizon, policy.width), obs)


def chunks_of(policy: Any, blank: Obs, most: int, log: Callable[[str], None]) -> QuickChunks | None:
    """`QuickChunks` of a policy, ready for up to `most` observations like `blank` at once; None where it does
    not fit. `log` hears what is done, and why not more."""
    for compiled in (True, False) if fits(policy) else ():
        try:
            quick = QuickChunks(policy, most, compiled)
            quick.warm_up(blank, log)
            return quick
        except (RuntimeError, OSError, ImportError) as e:  # no compiler, no memory for a graph
            what = "compiled blocks" if compiled else "one launch per chunk"
            log(f"without {what}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
    return None


def fits(policy: Any) -> bool:
    """Whether `QuickChunks` acts for this policy: a flow on a GPU, without guidance."""
    return (
        isinstance(policy, VlaPolicy)
        and not isinstance(policy, XVlaPolicy)
        and not policy.options.advantage
        and policy.times.is_cuda
    )


def model_inputs(policy: VlaPolicy, obs: Obs) -> dict[str, Tensor]:
    """What the trunk takes of observations, prompts padded to the processor's length."""
    processor, tensors = policy.processor, {k: v for k, v in obs.items() if k != "tokens"}
    tensors["state"] = tensors["state"].float()
    tensors["tokens"], tensors["token_mask"] = processor.prompts(text_of(obs["tokens"]), tensors["state"])
    x = processor.model_inputs(tensors)
    more = processor.options.prompt - x.tokens.shape[1]
    return {
        "images": x.images,
        "image_mask": x.image_mask,
        "tokens": F.pad(x.tokens, (0, more)),
        "token_mask": F.pad(x.token_mask, (0, more)),
        "state": x.state,
    }


def shared(module: nn.Module) -> nn.Module:
    """A copy of a module with the same parameters and buffers: what is done to its forward stays its own."""
    kept = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(x): x for x in kept})


# ---- pi0.5's expert ----------------------------------------------------------------------------------------


def adaptive(expert: PiExpert) -> bool:
    """Whether time enters by the norms alone."""
    return expert.state is None and isinstance(expert.norm, AdaRmsNorm)


def pi_chain(
    expert: PiExpert,
    layer: Callable[..., Tensor],
    context: Context,
    noise: Tensor,
    plain: Sequence[tuple[float, float]],
    times: Tensor,
) -> Tensor:
    """noise [n,D] -> x0 [n,D], as K calls of an adaptive expert give it; `layer`: `pi_layer`."""
    assert context.mask is not None and context.length is not None
    dtype, layers = expert.action_in.weight.dtype, list(expert.layers)
    cond = F.silu(expert.time_in(even_rows(time_embedding(times, expert.width).to(dtype))))
    cond = F.silu(expert.time_out(cond))
    norms: list[Any] = [
        n for block in layers for n in (block.input_layernorm, block.post_attention_layernorm)
    ]
    norms.append(expert.norm)
    bias = torch.stack([norm.dense.bias for norm in norms])[:, None]
    weight = torch.stack([norm.dense.weight for norm in norms]).transpose(1, 2)
    told = torch.baddbmm(bias, cond.expand(len(norms), -1, -1), weight)  # [norms, K or more, 3 width]
    x = noise.view(len(noise), -1, expert.action_in.in_features)
    turn = rotation(row_places(context.length, None, x.shape[1], 0), expert.head_dim)
    more = -(context.mask.shape[1] + x.shape[1]) % ALIGNED
    own = torch.ones(len(x), x.shape[1], dtype=torch.bool, device=x.device)
    mask = F.pad(torch.cat([context.mask, own], 1), (0, more))[:, None]
    weights, eps = [layer_weights(block) for block in layers], expert.norm.eps
    start = context.mask.shape[1]
    room = (0, 0, 0, 0, 0, mask.shape[2] - start)
    kept = [(F.pad(keys, room), F.pad(values, room)) for keys, values in context.kv]
    for k, (keep, step) in enumerate(plain):
        h = expert.action_in(x.to(dtype))
        for j, seen in enumerate(kept):
            h = layer(h, told[2 * j, k], told[2 * j + 1, k], weights[j], seen, start, turn, mask, eps)
        h = modulated(h, told[-1, k], eps)[0]
        x = keep * x + step * expert.action_out(h).float()
    return x.flatten(1)


def layer_weights(block: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Matrices of queries, keys and values side by side, of the way out, of gate and up side by side, and of
    the way down."""
    a, m = block.self_attn, block.mlp
    return (
        torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]),
        a.o_proj.weight,
        torch.cat([m.gate_proj.weight, m.up_proj.weight]),
        m.down_proj.weight,
    )


def modulated(h: Tensor, told: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`AdaRmsNorm` of h [n,L,W] with its scale, shift and gate in told [3 W] -> (the norm, the gate)."""
    scale, shift, gate = told.chunk(3, -1)
    x = h.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * (1 + scale.float()) + shift.float()).to(h.dtype), gate


def pi_layer(
    h: Tensor,
    first: Tensor,
    second: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    start: int,
    turn: Tensor,
    mask: Tensor,
    eps: float,
) -> Tensor:
    """`DecoderBlock` of an adaptive expert: h [n,L,W], modulations of its two norms, keys and values of the
    prefix with room [n,P + L, padded,M,d], mask bool [n,1,P + L, padded] -> [n,L,W].

    Rows of the keys and values from `start` = P on are overwritten with those of h.
    """
    into, out, wide, down = weights
    keys, values = kept
    y, gate = modulated(h, first, eps)
    heads, d = keys.shape[2:]
    own = F.linear(y, into).unflatten(-1, (-1, d))
    q, k, v = own.split([own.shape[2] - 2 * heads, heads, heads], 2)
    # in place, as only the own rows differ from step to step: the prefix is not copied K times
    keys[:, start : start + h.shape[1]] = rotate(k, turn)
    values[:, start : start + h.shape[1]] = v
    seen = (attend_few if len(h) <= FEW else attend)(rotate(q, turn), keys, values, mask)
    h = h + F.linear(seen, out) * gate
    y, gate = modulated(h, second, eps)
    a, b = F.linear(y, wide).chunk(2, -1)
    return h + F.linear(F.gelu(a, approximate="tanh") * b, down) * gate


def attend_few(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`blocks.attend` as two products and a softmax: many small parts where one kernel has few large ones."""
    n, length, heads, d = q.shape
    kept = k.shape[2]
    # steps before heads: with one key head, as in pi0.5, no query is copied, nor what comes back
    rows = q.view(n, length, kept, heads // kept, d).transpose(1, 2).flatten(2, 3)
    scores = (rows @ k.permute(0, 2, 3, 1)).float() * d**-0.5
    shares = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1).to(v.dtype)
    y = shares @ v.transpose(1, 2)
    return y.view(n, kept, length, heads // kept, d).transpose(1, 2).flatten(2)
