"""GR00T N1.5 (arXiv 2503.14734): the first layers of Eagle 2.5 (SigLIP and Qwen3) read pictures and prompt in
one causal sequence, four blocks mix what comes out in both directions, and a diffusion transformer denoises
the chunk. N1.7's trunk is in `groot_n17`.

    trunk     ... <pictures> words ...  -> Qwen3 -> norm -> self-attention over all that is there -> tokens
              [B,L,C]
    expert    [state, learned tokens, actions]: even blocks attend to those tokens (of N1.7 to words and to
              pictures, in turns), odd ones to themselves; the time scales their norms

Noise is at time 0 there and the chunk at 1: t here is 1 less theirs, and the velocity has the other sign. The
network is told the time as int(1000 (1 - t)). Projections of state and actions are of one embodiment of many.
The published model attends to what pads a batch of prompts; here padding and views that are not there are
left out, so a row is what it would be alone. Its dropout in training is left out.
Numbers and order of operations follow LeRobot 0.4.4, to whose outputs tests compare. Sources: DiT (arXiv
2212.09748), Qwen3 (arXiv 2505.09388).
Axes: B rows, V views, n tokens of a picture, P words, L prefix tokens, C their width, H steps, W action
entries, S state.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.errors import in_range
from robo_rl.policies.context import Context
from robo_rl.policies.vla.blocks import (
    DecoderBlock,
    DecoderKind,
    DecoderSize,
    Embedding,
    RmsNorm,
    VisionSize,
    VisionTower,
    even_rows,
    mean_token,
    pack,
    picture_tokens,
    rotation,
)
from robo_rl.policies.vla.xvla import PlainMlp

TICKS = 1000  # of the time that the network is told
TICK_SLACK = 1e-3  # of a tick: 1 - t of a float32 t may lie below the tick that is meant
WAVES = 256  # numbers of a time's waves before its MLP
LONGEST = 10_000.0  # of those waves' periods, in ticks
ROPE_BASE = 1_000_000.0
NORM_EPS, LAST_EPS = 1e-5, 1e-6
EMBODIMENTS = {
    "new_embodiment": 31,
    "oxe_droid": 17,
    "agibot_genie1": 26,
    "gr1": 24,
    "so100": 2,
    "unitree_g1": 3,
}


@dataclass(frozen=True, kw_only=True)
class GrootConfig:
    """Sizes of a GR00T; `GROOT_SIZES` has some of N1.5. `expert` is the diffusion transformer, `mixer` the
    blocks behind the trunk."""

    vision: VisionSize
    trunk: DecoderSize
    mixer: DecoderSize
    expert: DecoderSize
    vocab: int
    picture_word: int
    """The word in whose place the tokens of a picture come, the first for the first view; a view without one
    comes before all words."""
    family: str = "groot"
    embodiments: int = 32
    embodiment: int = EMBODIMENTS["new_embodiment"]
    """Which one's projections are used."""
    hidden: int = 1024
    """Width within those projections, and of what the transformer gives."""
    future: int = 32
    """Learned tokens between state and actions."""
    alternate: bool = False
    """Whether the first, third, … block that attends to the trunk's tokens attends to words alone, the others
    to pictures."""
    places: int = 1024
    """Learned places of actions."""
    eps: float = 1e-6
    """Of the language model's norms."""
    horizon: int = 16
    action_width: int = 32
    state_width: int = 64
    views: int = 4

    def __post_init__(self):
        in_range(f"embodiment of {self.family}", self.embodiment, 0, self.embodiments - 1)
        if self.expert.depth % 2:
            raise ValueError(f"layers of a GR00T's expert come in pairs, got {self.expert.depth}")

    @property
    def view_tokens(self) -> int:
        """Tokens of a picture."""
        return self.vision.patches


class TokenAttention(nn.Module):
    """Multi-head attention with biases, to tokens of the width `source`."""

    def __init__(self, width: int, heads: int, source: int):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (
            nn.Linear(width, width),
            nn.Linear(source, width),
            nn.Linear(source, width),
        )
        self.out, self.heads = nn.Linear(width, width), heads

    def forward(self, x: Tensor, seen: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B,L,W], seen [B,P,source] where `mask` bool [B,P] -> [B,L,W]."""
        q, k, v = (
            f(y).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for f, y in ((self.to_q, x), (self.to_k, seen), (self.to_v, seen))
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None])
        return self.out(y.transpose(1, 2).flatten(2))


class MixerBlock(nn.Module):
    """Pre-norm transformer block over the tokens that are there."""

    def __init__(self, size: DecoderSize):
        super().__init__()
        self.norm1, self.norm3 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention, self.ff = (
            TokenAttention(size.width, size.heads, size.width),
            PlainMlp(size.width, size.mlp, "tanh"),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x [B,L,C], mask bool [B,L] -> [B,L,C]."""
        h = self.norm1(x)
        x = x + self.attention(h, h, mask)
        return x + self.ff(self.norm3(x))


class TimedBlock(nn.Module):
    """Transformer block whose first norm the time scales and shifts. `source`: width of the tokens that it
    attends to, 0: its own."""

    def __init__(self, size: DecoderSize, source: int):
        super().__init__()
        self.time = nn.Linear(size.width, 2 * size.width)
        self.attention = TokenAttention(size.width, size.heads, source or size.width)
        self.ff, self.crosses = PlainMlp(size.width, size.mlp, "tanh"), source > 0

    def forward(self, x: Tensor, time: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
        """x [B,L,W], time [B or more,W], seen [B,P,source] where `mask` bool [B,P] -> [B,L,W]."""
        scale, shift = self.time(time)[: len(x), None].chunk(2, 2)
        h = F.layer_norm(x, x.shape[2:], eps=NORM_EPS) * (1 + scale) + shift
        x = x + (self.attention(h, seen, mask) if self.crosses else self.attention(h, h))
        return x + self.ff(F.layer_norm(x, x.shape[2:], eps=NORM_EPS))


class EmbodiedLinear(nn.Module):
    """A linear layer with weights [E,in,out] and biases [E,out] of each embodiment."""

    def __init__(self, inputs: int, out: int, embodiments: int):
        super().__init__()
        self.W, self.b = (
            nn.Parameter(torch.zeros(embodiments, inputs, out)),
            nn.Parameter(torch.zeros(embodiments, out)),
        )

    def forward(self, x: Tensor, which: int) -> Tensor:
        """x [...,in] -> [...,out]."""
        return x @ self.W[which] + self.b[which]


class EmbodiedMlp(nn.Module):
    """layer2(relu(layer1(x))) of an embodiment."""

    def __init__(self, inputs: int, hidden: int, out: int, embodiments: int):
        super().__init__()
        self.layer1, self.layer2 = (
            EmbodiedLinear(inputs, hidden, embodiments),
            EmbodiedLinear(hidden, out, embodiments),
        )

    def forward(self, x: Tensor, which: int) -> Tensor:
        """x [...,in] -> [...,out]."""
        return self.layer2(F.relu(self.layer1(x, which)), which)


class ActionEncoder(nn.Module):
    """Actions and their time as tokens: W3(silu(W2(W1(action), waves of the time)))."""

    def __init__(self, action: int, width: int, embodiments: int):
        super().__init__()
        self.W1, self.W2 = (
            EmbodiedLinear(action, width, embodiments),
            EmbodiedLinear(2 * width, width, embodiments),
        )
        self.W3 = EmbodiedLinear(width, width, embodiments)

    def forward(self, x: Tensor, tick: Tensor, which: int) -> Tensor:
        """x [B,H,W] at ticks float32 [B] -> [B,H,width]."""
        h = self.W1(x, which)
        half = h.shape[2] // 2
        # in float32, as published: an angle is up to TICKS times as wrong
        rate = torch.log(torch.tensor(LONGEST, device=x.device)) / half
        angle = tick[:, None] * torch.exp(-torch.arange(half, device=x.device) * rate)
        time = torch.cat([angle.sin(), angle.cos()], 1).to(h.dtype)[:, None].expand_as(h)
        return self.W3(F.silu(self.W2(torch.cat([h, time], 2), which)), which)


def ticks(t: Tensor) -> Tensor:
    """Times [B] of ours -> whole ticks float32 [B] of GR00T's."""
    return ((1 - t.double()) * TICKS + TICK_SLACK).floor().clamp(0, TICKS - 1).float()


def in_order(
    pictures: Tensor, image_mask: Tensor, words: Tensor, marks: Tensor, token_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of pictures [B,V,n,C] among those of words [B,P,C], each view in the place of its word of
    `marks` bool [B,P], or before all -> x [B,V n + P,C], which are there and which are of pictures, bool [B,V
    n + P]. A mark itself is not there."""
    rows, views, count, _ = pictures.shape
    device, marks = words.device, marks & token_mask
    view, word = torch.arange(views, device=device), torch.arange(words.shape[1], device=device)
    its = marks[:, None] & (marks.cumsum(1)[:, None] == view[:, None] + 1)
    start = torch.where(its.any(2), its.int().argmax(2), view - views)  # [B,V]
    span = count + 1
    places = torch.cat(
        [
            (start[..., None] * span + 1 + torch.arange(count, device=device)).flatten(1),
            (word * span).expand(rows, -1),
        ],
        1,
    )
    order = places.argsort(1)
    x = torch.cat([pictures.flatten(1, 2), words], 1).gather(
        1, order[..., None].expand(-1, -1, words.shape[2])
    )
    there = torch.cat([image_mask.repeat_interleave(count, 1), token_mask & ~marks], 1).gather(1, order)
    return x, there, order < views * count


def packed(
    x: Tensor, mask: Tensor, seen: Tensor, drop: bool, length: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens `in_order`, packed as `VlaModel.prefix` asks -> x, mask, seen [B,L,1], how many are there [B],
    who attends to whom [B,L,L]: to what is there before it, and to itself, for where nobody is seen there is
    no softmax."""
    seen, count = seen[..., None], mask.sum(1)
    if drop or length is not None:
        seen, _, _ = pack(seen, mask, length)
        x, mask, count = pack(x, mask, length)
    step = torch.arange(x.shape[1], device=x.device)
    return x, mask, seen, count, (step <= step[:, None]) & mask[:, None] | (step == step[:, None])


class GrootTrunk(nn.Module):
    """Eagle 2.5 up to the layer that the action head reads, and the blocks that mix its tokens."""

    def __init__(self, config: GrootConfig):
        super().__init__()
        size, kind = config.trunk, DecoderKind(activation="silu", eps=config.eps, offset=0.0, head_norms=True)
        self.vision, self.projector = VisionTower(config.vision), nn.Linear(config.vision.width, size.width)
        self.words = Embedding(config.vocab, size.width)
        self.decoder = nn.ModuleList([DecoderBlock(size, kind) for _ in range(size.depth)])
        self.norm = RmsNorm(size.width, kind)
        self.seen_norm = nn.LayerNorm(size.width)
        self.mixer = nn.ModuleList([MixerBlock(config.mixer) for _ in range(config.mixer.depth)])
        self.picture_word, self.head_dim = config.picture_word, size.head_dim

    def forward(
        self,
        images: Tensor,
        image_mask: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        state: Tensor,
        *,
        drop: bool = True,
        length: int | None = None,
    ) -> Context:
        """See `VlaModel.prefix`. `kv` has one entry: the tokens [B,L,C], and which are of pictures
        [B,L,1]."""
        pictures = picture_tokens(self.vision, self.projector, images, image_mask, drop)
        tokens_in_order = in_order(
            pictures, image_mask, self.words(tokens), tokens == self.picture_word, token_mask
        )
        x, mask, seen, count, sees = packed(*tokens_in_order, drop, length)
        turn = rotation(mask.cumsum(1) - 1, self.head_dim, ROPE_BASE)
        for block in self.decoder:
            x, _ = block(x, turn, sees)
        x = self.seen_norm(self.norm(x)[0])
        for block in self.mixer:
            x = block(x, mask)
        return Context(mean_token(x, mask), ((x, seen),), mask, count, state)


class GrootExpert(nn.Module):
    """The diffusion transformer between the projections of an embodiment: the velocity of a noised chunk."""

    def __init__(self, config: GrootConfig):
        super().__init__()
        size, width, count = config.expert, config.expert.width, config.embodiments
        self.state_encoder = EmbodiedMlp(config.state_width, config.hidden, width, count)
        self.action_encoder = ActionEncoder(config.action_width, width, count)
        self.action_decoder = EmbodiedMlp(config.hidden, config.hidden, config.action_width, count)
        self.future = Embedding(config.future, width) if config.future else None
        self.places = Embedding(config.places, width)
        self.time_in, self.time_out = nn.Linear(WAVES, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(
            [TimedBlock(size, 0 if i % 2 else config.trunk.width) for i in range(size.depth)]
        )
        self.last_time, self.out = nn.Linear(width, 2 * width), nn.Linear(width, config.hidden)
        self.config = config

    def forward(self, context: Context, x: Tensor, t: Tensor) -> Tensor:
        """See `VlaModel.velocity`. ValueError: more steps than there are places."""
        assert context.state is not None
        c, rows, steps, dtype = self.config, len(x), x.shape[1], self.out.weight.dtype
        if steps > c.places:
            raise ValueError(f"a chunk of {steps} steps, places for {c.places}")
        tick, which = ticks(t), c.embodiment
        time = self._time(tick).to(dtype)
        state = self.state_encoder(even_rows(context.state[:, : c.state_width].to(dtype)), which)[:rows, None]
        parts = [
            state,
            self.action_encoder(x.to(dtype), tick, which) + self.places(torch.arange(steps, device=x.device)),
        ]
        if self.future is not None:
            parts.insert(1, self.future(torch.arange(c.future, device=x.device)).expand(rows, -1, -1))
        h, masks = torch.cat(parts, 1), self._masks(context)
        for i, layer in enumerate(self.layers):
            h = layer(h, time, context.kv[0][0], masks[i // 2 % 2])
        shift, scale = self.last_time(time)[:rows, None].chunk(2, 2)
        h = F.layer_norm(h[:, -steps:], h.shape[2:], eps=LAST_EPS) * (1 + scale) + shift
        return -self.action_decoder(self.out(h), which).float()

    def _masks(self, context: Context) -> tuple[Tensor, Tensor]:
        """bool [B,L]: which tokens every other block attends to, and which the blocks between; all of them
        where it would be none."""
        assert context.mask is not None
        there = context.mask
        if not self.config.alternate:
            return there, there
        seen = context.kv[0][1][..., 0] & there
        return there & ~seen, torch.where(seen.any(1, keepdim=True), seen, there)

    def _time(self, tick: Tensor) -> Tensor:
        """Ticks [B] -> [B or more,W], what all layers are told of the time."""
        half = WAVES // 2
        angle = tick[:, None] * torch.exp(
            -math.log(LONGEST) * torch.arange(half, device=tick.device) / (half - 1)
        )
        waves = even_rows(torch.cat([angle.cos(), angle.sin()], 1)).to(self.time_in.weight.dtype)
        return F.silu(self.time_out(F.silu(self.time_in(waves))))


def dit_size(width: int, depth: int, heads: int) -> DecoderSize:
    """A stack of blocks with an MLP of four times their width."""
    return DecoderSize(
        width=width, depth=depth, mlp=4 * width, heads=heads, kv_heads=heads, head_dim=width // heads
    )


C = TypeVar("C", bound=GrootConfig)


def sizes(
    config: type[C],
    vision: tuple[int, ...],
    trunk: tuple[int, ...],
    mixer: tuple[int, int],
    expert: tuple[int, int, int],
    **more: Any,
) -> C:
    """vision: width, depth, mlp, heads, patch, image; trunk: width, depth, mlp, heads, kv_heads, head_dim;
    mixer: depth, heads; expert: width, depth, heads."""
    names = ("width", "depth", "mlp", "heads")
    return config(
        vision=VisionSize(**dict(zip((*names, "patch", "image"), vision, strict=True))),
        trunk=DecoderSize(**dict(zip((*names, "kv_heads", "head_dim"), trunk, strict=True))),
        mixer=dit_size(trunk[0], *mixer),
        expert=dit_size(*expert),
        **more,
    )


_size = partial(sizes, GrootConfig)
GROOT_SIZES = {
    "tiny": _size(
        (32, 2, 64, 4, 14, 56),
        (64, 2, 96, 4, 2, 16),
        (1, 4),
        (48, 4, 4),
        vocab=512,
        picture_word=511,
        embodiments=3,
        embodiment=1,
        hidden=32,
        future=4,
        places=256,
        horizon=8,
        state_width=32,
    ),
    "small": _size(
        (192, 6, 768, 6, 16, 112),
        (256, 4, 768, 4, 2, 64),
        (1, 4),
        (256, 6, 4),
        vocab=4096,
        picture_word=4095,
        embodiments=1,
        embodiment=0,
        hidden=256,
        places=256,
    ),
    "full": _size(
        (1152, 27, 4304, 16, 14, 224),
        (2048, 12, 6144, 16, 8, 128),
        (4, 32),
        (1536, 16, 32),
        vocab=151680,
        picture_word=151669,
    ),
}
"""tiny: that of the test files; small: to be trained on a CPU; full: the published model (Eagle 2.5 of
Qwen3-1.7B)."""
