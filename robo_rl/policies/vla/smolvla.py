"""SmolVLA (arXiv 2506.01844): the first layers of SmolVLM2-500M read images, prompt and state; an expert
reads them and the actions.

The state is the last token of the prefix: it sees images and words, which do not see it. Even layers of the
expert attend to the prefix' keys and values and to the actions before and including their own; odd layers
attend to the prefix alone, through own projections of its (rotated) keys and its values, with the actions'
positions counted from 0. Numbers and order of operations follow LeRobot 0.6.1, to whose outputs tests
compare.
Axes: B rows, V views, P words, L prefix tokens, H steps, W action entries, S state.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from robo_rl.policies.context import Context
from robo_rl.policies.vla.blocks import (
    LLAMA,
    DecoderBlock,
    DecoderVlaConfig,
    Embedding,
    RmsNorm,
    VisionTower,
    even_rows,
    lambda_mask,
    pack,
    parts_of,
    picture_tokens,
    read_prefix,
    rotation,
    row_places,
    row_times,
)


@dataclass(frozen=True, kw_only=True)
class SmolVlaConfig(DecoderVlaConfig):
    """Sizes of a SmolVLA; `SMOLVLA_SIZES` has some."""

    family: str = "smolvla"
    merge: int = 4
    """merge x merge patches become one token."""
    self_every: int = 2
    """One of so many layers of the expert attends to the actions; the others to the prefix alone."""
    eps: float = 1e-5
    """Of the norms; SmolVLM2-500M has 1e-5."""

    def __post_init__(self):
        super().__post_init__()
        if (self.vision.image // self.vision.patch) % self.merge:
            raise ValueError(
                f"merge must divide the {self.vision.image // self.vision.patch} patches of a side, got "
                f"{self.merge}"
            )

    @property
    def view_tokens(self) -> int:
        return self.vision.patches // self.merge**2


class PatchMerger(nn.Module):
    """merge x merge patches, row by row, side by side in one vector, projected to the trunk's width."""

    def __init__(self, width: int, out: int, merge: int):
        super().__init__()
        self.proj = nn.Linear(width * merge * merge, out, bias=False)
        self.merge = merge

    def forward(self, x: Tensor) -> Tensor:
        """[B,n²,W] -> [B,(n/merge)²,out], times the root of `out`."""
        rows, count, width = x.shape
        side = math.isqrt(count) // self.merge
        x = (
            x.view(rows, side, self.merge, side, self.merge, width)
            .transpose(2, 3)
            .reshape(rows, side * side, self.proj.in_features)
        )
        return self.proj(x) * math.sqrt(self.proj.out_features)


class SmolVlaTrunk(nn.Module):
    """SmolVLM2 up to the keys and values of its last layer that is used."""

    def __init__(self, config: SmolVlaConfig):
        super().__init__()
        size, kind = config.trunk, replace(LLAMA, eps=config.eps)
        self.vision = VisionTower(config.vision)
        self.projector = PatchMerger(config.vision.width, size.width, config.merge)
        self.words = Embedding(config.vocab, size.width)
        self.state = nn.Linear(config.state_width, size.width)
        self.layers = nn.ModuleList(
            [DecoderBlock(size, kind, last=i == size.depth - 1) for i in range(size.depth)]
        )
        self.norm = RmsNorm(size.width, kind)
        self.head_dim = size.head_dim

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
        """See `VlaModel.prefix`."""
        pictures = picture_tokens(self.vision, self.projector, images, image_mask, drop)
        words = self.words(tokens) * math.sqrt(self.words.embedding_dim)
        told = self.state(even_rows(state.to(self.state.weight.dtype)))[: len(state), None]
        mask = torch.cat(
            [
                image_mask.repeat_interleave(pictures.shape[2], 1),
                token_mask,
                torch.ones_like(token_mask[:, :1]),
            ],
            1,
        )
        x = torch.cat([pictures.flatten(1, 2), words, told], 1)
        if drop or length is not None:
            x, mask, count = pack(x, mask, length)
            is_state = torch.arange(x.shape[1], device=x.device) == count[:, None] - 1
        else:
            count = mask.sum(1)
            is_state = (torch.arange(x.shape[1], device=x.device) == x.shape[1] - 1).expand_as(mask)
        turn = rotation(mask.cumsum(1) - 1, self.head_dim)
        sees = mask[:, None] & (is_state[:, :, None] | ~is_state[:, None])
        return read_prefix(self.layers, self.norm, x, turn, sees, mask, count, state)


class SmolVlaExpert(nn.Module):
    """A Llama of three quarters of the trunk's width: the velocity of a noised chunk.

    Rows that are given (`Context.committed`) are at flow time 0 (training-time real-time chunking, arXiv
    2512.05964).
    """

    window = 0  # w of a Λ-shaped mask among the actions; 0: each sees all before it

    def __init__(self, config: SmolVlaConfig):
        super().__init__()
        size, source = config.expert, config.trunk.kv_heads * config.trunk.head_dim
        kind = replace(LLAMA, eps=config.eps)
        self.layers = nn.ModuleList(
            [
                DecoderBlock(size, kind, source=source if i % config.self_every else 0)
                for i in range(size.depth)
            ]
        )
        self.norm = RmsNorm(size.width, kind)
        self.action_in, self.action_out = (
            nn.Linear(config.action_width, size.width),
            nn.Linear(size.width, config.action_width),
        )
        self.time_in, self.time_out = nn.Linear(2 * size.width, size.width), nn.Linear(size.width, size.width)
        self.width, self.head_dim = size.width, size.head_dim

    def forward(self, context: Context, x: Tensor, t: Tensor) -> Tensor:
        """See `VlaModel.velocity`."""
        assert context.mask is not None and context.length is not None
        steps, dtype = x.shape[1], self.action_in.weight.dtype
        h, given = self.action_in(x.to(dtype)), context.committed
        h = self.time_out(
            silu(self.time_in(torch.cat([h, row_times(t, given, steps, self.width).to(dtype)], -1)))
        )
        step = torch.arange(steps, device=x.device)
        there = context.mask[:, None]
        causal = lambda_mask(steps, self.window or steps).to(x.device).expand(len(x), -1, -1)
        seen = torch.cat([there.expand(-1, steps, -1), causal], 2)
        after = rotation(row_places(context.length, given, steps, self.window), self.head_dim)
        alone = rotation(step.expand(len(x), -1), self.head_dim)
        for layer, past in zip(self.layers, context.kv, strict=True):
            h, _ = layer(h, alone, there, past) if layer.crosses else layer(h, after, seen, past)
        return self.action_out(self.norm(h)[0]).float()


def _size(
    vision: tuple[int, ...],
    trunk: tuple[int, ...],
    expert: tuple[int, int],
    vocab: int,
    merge: int,
    horizon: int,
    eps: float = 1e-5,
) -> SmolVlaConfig:
    tower, decoder, smaller = parts_of(vision, trunk, expert)
    return SmolVlaConfig(
        vocab=vocab, merge=merge, horizon=horizon, eps=eps, vision=tower, trunk=decoder, expert=smaller
    )


SMOLVLA_SIZES = {
    "tiny": _size((32, 2, 64, 4, 8, 64), (64, 4, 128, 4, 2, 16), (48, 256), 512, 2, 10, 1e-6),
    "small": _size((192, 6, 768, 6, 8, 64), (256, 6, 768, 4, 2, 64), (192, 512), 4096, 2, 16),
    "full": _size((768, 12, 3072, 12, 16, 512), (960, 16, 2560, 15, 5, 64), (720, 2048), 49280, 4, 50),
}
"""tiny: that of the test files; small: to be trained on a CPU; full: the published model."""
