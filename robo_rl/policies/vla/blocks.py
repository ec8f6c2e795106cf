"""Blocks that the vision-language-action models share: a vision transformer, decoder blocks with a prefix
cache, time features.

A block is called through `forward` alone, so that hooks (FSDP2, checkpointing) see every use of its weights.
Names of layers below a block (`self_attn.q_proj`, `mlp.gate_proj`, …) are those of the public checkpoints.
Axes: B rows, L tokens, P tokens of the prefix, N query heads, M key/value heads, d width of a head.
Sources: SigLIP (arXiv 2303.15343), Gemma (arXiv 2403.08295), RoPE (arXiv 2104.09864), adaptive norms with a
gate: DiT (arXiv 2212.09748) and pi0.5 (arXiv 2504.16054); the numbers of each model are in its own file.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.policies.context import Context

ACTIVATION = {"gelu": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}
ROPE_BASE = 10_000.0
OFFSET = 10  # places between rows of a chunk that are given and all others, behind a Λ-shaped mask
MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0  # of time features, in units of flow time


@dataclass(frozen=True, kw_only=True)
class VisionSize:
    """A vision transformer: square images of `image` pixels in patches of `patch` pixels."""

    width: int
    depth: int
    mlp: int
    heads: int
    patch: int
    image: int

    @property
    def patches(self) -> int:
        """Tokens of an image before any merging."""
        return (self.image // self.patch) ** 2


@dataclass(frozen=True, kw_only=True)
class DecoderSize:
    """A stack of decoder blocks: `heads` query heads and `kv_heads` key/value heads of `head_dim`."""

    width: int
    depth: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class DecoderVlaConfig:
    """Sizes that every model has whose trunk is a decoder and whose expert, of as many layers, reads the
    trunk's keys and values."""

    family: str
    vision: VisionSize
    trunk: DecoderSize
    expert: DecoderSize
    vocab: int
    horizon: int = 50
    action_width: int = 32
    state_width: int = 32
    views: int = 3

    def __post_init__(self):
        if self.trunk.depth != self.expert.depth:
            raise ValueError(
                f"trunk and expert must have as many layers, got {self.trunk.depth} and {self.expert.depth}"
            )

    @property
    def view_tokens(self) -> int:
        """Tokens of a picture in the prefix."""
        return self.vision.patches


class WriterVlaConfig:
    """What a configuration says of a model whose language model reads the prefix and writes or fills in the
    actions as well."""

    vision: VisionSize
    trunk: DecoderSize
    state_width: int

    @property
    def expert(self) -> DecoderSize:
        """What makes the actions: the language model."""
        return self.trunk

    @property
    def view_tokens(self) -> int:
        """Tokens of a picture in the prefix."""
        return self.vision.patches

    @property
    def context_size(self) -> int:
        """Of the pooled vector: mean picture token, mean word and state."""
        return 2 * self.trunk.width + self.state_width


def parts_of(
    vision: tuple[int, ...], trunk: tuple[int, ...], expert: tuple[int, int]
) -> tuple[VisionSize, DecoderSize, DecoderSize]:
    """Vision, trunk and expert of a configuration from (width, depth, mlp, heads, patch, image), (width,
    depth, mlp, heads, kv_heads, head_dim) and (width, mlp) of an expert that is else as the trunk."""
    v_width, v_depth, v_mlp, v_heads, patch, image = vision
    width, depth, mlp, heads, kv_heads, head_dim = trunk
    size = DecoderSize(width=width, depth=depth, mlp=mlp, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    return (
        VisionSize(width=v_width, depth=v_depth, mlp=v_mlp, heads=v_heads, patch=patch, image=image),
        size,
        replace(size, width=expert[0], mlp=expert[1]),
    )


@dataclass(frozen=True, kw_only=True)
class DecoderKind:
    """What Gemma, Llama and Qwen3 do differently: the activation of the gate, a norm's weight as an offset to
    1 or as it is, and whether the queries and keys of a head are normalised."""

    activation: str
    eps: float
    offset: float
    head_norms: bool = False


GEMMA = DecoderKind(activation="gelu", eps=1e-6, offset=1.0)
LLAMA = DecoderKind(activation="silu", eps=1e-5, offset=0.0)


class RmsNorm(nn.Module):
    """x / rms(x) · (offset + weight), computed in float32 -> (the dtype of x, no gate)."""

    def __init__(self, width: int, kind: DecoderKind):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - kind.offset))
        self.eps, self.offset = kind.eps, kind.offset

    def forward(self, x: Tensor, cond: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x [B,L,W] -> ([B,L,W], None); `cond` is for `AdaRmsNorm`."""
        return (_rms(x, self.eps) * (self.offset + self.weight.float())).to(x.dtype), None


class AdaRmsNorm(nn.Module):
    """x / rms(x) · (1 + scale) + shift, with scale, shift and the gate of the residual linear in a
    condition."""

    def __init__(self, width: int, cond: int, kind: DecoderKind):
        super().__init__()
        self.dense = nn.Linear(cond, 3 * width)
        self.eps = kind.eps

    def forward(self, x: Tensor, cond: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x [B,L,W], cond [B or more,C] (`even_rows`), or [B,L,C] of every token -> ([B,L,W], gate [B,1 or
        L,W])."""
        assert cond is not None
        made = (
            self.dense(cond)[: len(x), None]
            if cond.dim() == 2
            else self.dense(even_rows(cond.flatten(0, 1)))[: x[..., 0].numel()].view(*x.shape[:2], -1)
        )
        scale, shift, gate = made.chunk(3, -1)
        return (_rms(x, self.eps) * (1 + scale.float()) + shift.float()).to(x.dtype), gate


def _rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotation(position: Tensor, head_dim: int, base: float = ROPE_BASE) -> Tensor:
    """Positions int64 [B,L] -> cosines and sines float32 [2,B,L,1,d/2] of `rotate`; made once for all
    layers."""
    half = head_dim // 2
    rate = base ** (torch.arange(half, device=position.device, dtype=torch.float32) / half)
    angle = (position[..., None].float() / rate)[:, :, None]
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding of x [B,L,N,d]: entries i and i + d/2 are a plane (not neighbours)."""
    cos, sin = turn
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot-product attention of q [B,L,N,d] to k, v [B,P,M,d] where `mask` bool [B,1 or L,P] -> [B,L,N
    d].

    The N/M query heads of a key/value head are rows of one product, so keys and values are never repeated.
    """
    rows, length, heads, size = q.shape
    groups = heads // k.shape[2]
    q = q.view(rows, length, k.shape[2], groups, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if mask.shape[1] > 1:
        mask = mask.repeat(1, groups, 1)
    y = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask[:, None])
    return y.view(rows, -1, groups, length, size).permute(0, 3, 1, 2, 4).flatten(2)


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions to a prefix (if any) and to its own tokens."""

    def __init__(
        self, size: DecoderSize, source: int = 0, last: bool = False, norm: "DecoderKind | None" = None
    ):
        """`source`: width of the prefix' flattened keys that `CrossBlock` projects, 0: keys are made of the
        own tokens. `norm`: of the queries and keys of each head."""
        super().__init__()
        self.head_dim = size.head_dim
        self.q_norm, self.k_norm = (RmsNorm(size.head_dim, norm) if norm else None for _ in range(2))
        if not last:
            self.q_proj = nn.Linear(size.width, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(source or size.width, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(source or size.width, size.kv_heads * size.head_dim, bias=False)
        if not last:
            self.o_proj = nn.Linear(size.heads * size.head_dim, size.width, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def keys(self, h: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """h [B,L,W] -> keys, rotated, and values [B,L,M,d]."""
        k = self._heads(self.k_proj(h))
        return rotate(k if self.k_norm is None else self.k_norm(k)[0], turn), self._heads(self.v_proj(h))

    def forward(
        self, h: Tensor, turn: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """h [B,L,W] -> ([B,L,W], keys and values of its own tokens)."""
        own = k, v = self.keys(h, turn)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        q = self._heads(self.q_proj(h))
        q = rotate(q if self.q_norm is None else self.q_norm(q)[0], turn)
        return self.o_proj(attend(q, k, v, mask)), own

    def across(self, h: Tensor, turn: Tensor, mask: Tensor, past: tuple[Tensor, Tensor]) -> Tensor:
        """h [B,L,W] to projections of the prefix' keys and values alone -> [B,L,W]."""
        k, v = self._heads(self.k_proj(past[0].flatten(2))), self._heads(self.v_proj(past[1].flatten(2)))
        return self.o_proj(attend(rotate(self._heads(self.q_proj(h)), turn), k, v, mask))


class GatedMlp(nn.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, size: DecoderSize, kind: DecoderKind):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(size.width, size.mlp, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size.mlp, size.width, bias=False)
        self.activation = ACTIVATION[kind.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[B,L,W] -> [B,L,W]."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DecoderBlock(nn.Module):
    """Pre-norm decoder block: attention to a prefix and to its own tokens, then a gated MLP.

    `cond`: width of the condition of adaptive norms, 0: plain norms. `source`: as in `SelfAttention`, the
    block then attends to the prefix alone. `last`: the last block of a trunk, whose keys and values are all
    that anyone reads; it has no other weights.
    """

    def __init__(
        self, size: DecoderSize, kind: DecoderKind, cond: int = 0, source: int = 0, last: bool = False
    ):
        super().__init__()

        def norm() -> nn.Module:
            return AdaRmsNorm(size.width, cond, kind) if cond else RmsNorm(size.width, kind)

        self.input_layernorm = norm()
        self.self_attn = SelfAttention(size, source, last, kind if kind.head_norms else None)
        if not last:
            self.post_attention_layernorm = norm()
            self.mlp = GatedMlp(size, kind)
        self.last, self.crosses = last, source > 0

    def forward(
        self,
        x: Tensor,
        turn: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        cond: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """x [B,L,W], `rotation` of its positions, mask bool [B,1 or L,P (+ L)] -> (x [B,L,W], keys and values
        of its own tokens)."""
        h, gate = self.input_layernorm(x, cond)
        if self.last:
            return x, self.self_attn.keys(h, turn)
        own = None
        if self.crosses:
            assert past is not None
            y = self.self_attn.across(h, turn, mask, past)
        else:
            y, own = self.self_attn(h, turn, mask, past)
        x = x + (y if gate is None else y * gate)
        h, gate = self.post_attention_layernorm(x, cond)
        y = self.mlp(h)
        return x + (y if gate is None else y * gate), own


class VisionAttention(nn.Module):
    """Multi-head self-attention with biases, every patch to every patch."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """[B,L,W] -> [B,L,W]."""
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VisionMlp(nn.Module):
    """fc2(gelu(fc1(x)))."""

    def __init__(self, width: int, mlp: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, mlp), nn.Linear(mlp, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B,L,W] -> [B,L,W]."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """Pre-norm encoder block of SigLIP."""

    def __init__(self, size: VisionSize):
        super().__init__()
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(size.width, eps=1e-6) for _ in range(2))
        self.self_attn, self.mlp = VisionAttention(size.width, size.heads), VisionMlp(size.width, size.mlp)

    def forward(self, x: Tensor) -> Tensor:
        """[B,L,W] -> [B,L,W]."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Embedding(nn.Embedding):
    """Rows that `initialise` draws, or that a file has. torch's own draw on the meta device imports
    torch._dynamo, which takes longer than torch itself."""

    def reset_parameters(self) -> None:
        """Nothing is drawn."""


def patches_of(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The convolution of images [B,3,h,w] by filters [W,3,p,p] with stride p -> tokens [B,n,W], row by row.

    On a GPU it is one product: cuDNN takes another algorithm for another batch, and TF32 in float32, so a
    sample's bits would depend on its company.
    """
    p, images = weight.shape[-1], images.to(weight.dtype)
    if not images.is_cuda:
        return F.conv2d(images, weight, bias, stride=p).flatten(2).transpose(1, 2)
    cut = images.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # [B,3,rows,p,columns,p]
    return F.linear(cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2), weight.flatten(1), bias)


class PatchConv(nn.Conv2d):
    """`patches_of` with its filters."""

    def forward(self, input: Tensor) -> Tensor:
        """Images [B,3,h,w] -> tokens [B,n,W]."""
        assert self.bias is not None
        return patches_of(input, self.weight, self.bias)


class VisionTower(nn.Module):
    """SigLIP's vision transformer: images [B,3,h,w] in -1..1 -> patches [B,(h/patch)²,W], row by row."""

    def __init__(self, size: VisionSize):
        super().__init__()
        self.patch = PatchConv(3, size.width, size.patch, size.patch)
        self.place = Embedding(size.patches, size.width)
        self.layers = nn.ModuleList([VisionBlock(size) for _ in range(size.depth)])
        self.norm = nn.LayerNorm(size.width, eps=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        """[B,3,h,w] -> [B,L,W]."""
        x = self.patch(images) + self.place.weight
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def time_embedding(t: Tensor, width: int) -> Tensor:
    """Flow times [B] -> float64 [B,width]: sines then cosines of 2 pi t / period, periods geometric in
    MIN_PERIOD .. MAX_PERIOD."""
    fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=t.device)
    angle = 2 * math.pi / (MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** fraction) * t[:, None].double()
    return torch.cat([angle.sin(), angle.cos()], 1)


def row_times(t: Tensor, given: Tensor | None, rows: int, width: int) -> Tensor:
    """`time_embedding` of every row of a chunk, float64 [B,rows,width]; rows that are given, [B,rows] above
    0, are clean: at time 0."""
    times = time_embedding(t, width)[:, None].expand(-1, rows, -1)
    return (
        times
        if given is None
        else torch.where(given[..., None] > 0, time_embedding(torch.zeros_like(t), width)[:, None], times)
    )


def row_places(start: Tensor, given: Tensor | None, rows: int, window: int) -> Tensor:
    """Places int64 [B,rows] of a chunk's rows from `start` [B] on; with a `window` those that are not given
    stand OFFSET further back."""
    places = start[:, None] + torch.arange(rows, device=start.device)
    return places if not window else places + (OFFSET if given is None else OFFSET * (given <= 0))


def lambda_mask(rows: int, window: int, sink: bool = False) -> Tensor:
    """bool [rows,rows]: row h sees rows h - window + 1 .. h. With a sink [1+rows,1+rows]: every row sees
    token 0 too, which sees itself.

    Source: Xiaomi-Robotics-0, arXiv 2602.12684."""
    back = torch.arange(rows)[:, None] - torch.arange(rows)
    mask = (back >= 0) & (back < window)
    if sink:
        mask = F.pad(mask, (1, 0, 1, 0), value=False)
        mask[:, 0] = True
    return mask


def even_rows(x: Tensor) -> Tensor:
    """x [B,W] with zero rows up to a multiple of 16.

    Products of fewer rows take other routines, which round differently. With these rows a sample's bits do
    not depend on how many others are in its batch, which a ratio of exactly 1 asks for.
    """
    return F.pad(x, (0, 0, 0, -len(x) % 16))


def picture_tokens(
    encode: nn.Module, project: nn.Module, images: Tensor, image_mask: Tensor, drop: bool
) -> Tensor:
    """images [B,V,3,h,w] -> projected tokens [B,V,n,W]; with `drop`, views that a row does not have are zeros
    and cost nothing."""
    if not drop:
        return project(encode(images.flatten(0, 1))).unflatten(0, images.shape[:2])
    there = image_mask.flatten().nonzero().squeeze(1)
    seen = project(encode(images.flatten(0, 1)[there]))
    out = seen.new_zeros(image_mask.numel(), *seen.shape[1:]).index_copy(0, there, seen)
    return out.unflatten(0, images.shape[:2])


def pack(x: Tensor, mask: Tensor, length: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Real tokens of x [B,L,W] to the front in their order, the rest cut off: x [B,P,W], mask bool [B,P],
    length int64 [B].

    P is the longest row, or `length` (padding is added, for one shape whatever the rows are). ValueError: a
    row longer than that, or one without any token. Positions are counted over real tokens, so packing changes
    no result but by rounding.
    """
    count = mask.sum(1)
    longest, shortest = torch.stack([count.max(), count.min()]).tolist()
    if not shortest:
        raise ValueError("a row has neither an image nor a word: image_mask and token_mask are all False")
    if length is not None and longest > length:
        raise ValueError(f"a prefix of {longest} tokens does not fit into the {length} that were set for it")
    keep = min(length or longest, x.shape[1])
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :keep]
    x = x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
    if length is not None and length > keep:
        x = F.pad(x, (0, 0, 0, length - keep))
    return x, torch.arange(x.shape[1], device=x.device) < count[:, None], count


def mean_token(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of the tokens [B,L,W] that are there, float32 [B,W]."""
    return (x.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def read_prefix(
    layers: nn.ModuleList,
    norm: nn.Module,
    x: Tensor,
    turn: Tensor,
    sees: Tensor,
    mask: Tensor,
    count: Tensor,
    state: Tensor,
) -> Context:
    """Tokens x [B,L,W] through the trunk's layers -> the context; sees: bool, who attends to whom; count [B]:
    tokens that are there."""
    kv = []
    for layer in layers:
        x, own = layer(x, turn, sees)
        kv.append(own)
    h = norm(x)[0].float()
    return Context((h * mask[..., None]).sum(1) / count[:, None], tuple(kv), mask, count, state)
