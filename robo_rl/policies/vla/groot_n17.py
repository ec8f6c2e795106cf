"""GR00T N1.7: the first layers of Qwen3-VL (Cosmos-Reason2-2B) in the place of N1.5's trunk; mixer and expert
are those of `groot`.

    vision    patches with interpolated learned places and rotary rows and columns -> merge x merge of them
              are one token; so are the outputs of some earlier blocks, which are added after the first layers
              of the language model (DeepStack, arXiv 2406.04334)
    words     a picture of side² tokens is one step in time of the rotary positions, with its rows and columns
              beside; words have the same position in all three. What the mixer reads are the last layer's
              outputs, before the language model's own norm.

Pictures are square, and single (the published vision takes two frames: a picture twice).
Numbers and order of operations follow LeRobot 0.6.1 with transformers 5.5.4, to whose outputs tests compare.
Source: Qwen3-VL (arXiv 2511.21631).
Axes: B rows, V views, n tokens of a picture, P words, L prefix tokens, C their width.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.policies.context import Context
from robo_rl.policies.vla.blocks import (
    ROPE_BASE,
    DecoderBlock,
    DecoderKind,
    Embedding,
    VisionSize,
    mean_token,
    patches_of,
    picture_tokens,
    rotate,
)
from robo_rl.policies.vla.groot import GrootConfig, MixerBlock, in_order, packed, sizes
from robo_rl.policies.vla.xvla import FusedAttention, PlainMlp

TEXT_ROPE_BASE = 5_000_000.0
EMBODIMENTS = {
    "simpler_env_google": 0,
    "simpler_env_widowx": 1,
    "libero_sim": 2,
    "new_embodiment": 10,
    "oxe_droid_relative_eef_relative_joint": 24,
    "real_g1_relative_eef_relative_joints": 25,
    "real_r1_pro_sharpa_relative_eef": 26,
    "xdof_relative_eef_relative_joint": 27,
}
FRAMES = 2  # of the vision's patches


@dataclass(frozen=True, kw_only=True)
class GrootN17Config(GrootConfig):
    """Sizes of a GR00T N1.7; `GROOT_N17_SIZES` has some."""

    family: str = "groot_n17"
    embodiment: int = EMBODIMENTS["new_embodiment"]
    future: int = 0
    alternate: bool = True
    merge: int = 2
    """merge x merge patches become one token."""
    grid: int = 48
    """Rows, and columns, of the learned places, whatever the picture's are."""
    deep: tuple[int, ...] = (5, 11, 17)
    """Blocks of the vision whose outputs are added after the first layers of the language model, one each."""
    sections: tuple[int, int] = (20, 20)
    """How many of the rotary planes are turned by a token's row, and by its column; the others are by its
    time."""
    horizon: int = 40
    action_width: int = 132
    state_width: int = 132

    def __post_init__(self):
        super().__post_init__()
        if (self.vision.image // self.vision.patch) % self.merge:
            raise ValueError(
                f"merge must divide the {self.vision.image // self.vision.patch} patches of a side, got "
                f"{self.merge}"
            )
        if len(self.deep) >= self.trunk.depth:
            raise ValueError(
                f"a trunk of {self.trunk.depth} layers cannot take what {len(self.deep)} blocks of the "
                "vision add"
            )

    @property
    def view_tokens(self) -> int:
        """Tokens of a picture."""
        return self.vision.patches // self.merge**2


class FramePatches(nn.Module):
    """A convolution [W,3,frames,p,p] of patches over frames that are all the same picture."""

    def __init__(self, width: int, patch: int):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.zeros(width, 3, FRAMES, patch, patch)),
            nn.Parameter(torch.zeros(width)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """[B,3,h,h] -> [B,(h/p)²,W]."""
        return patches_of(images, self.weight.sum(2), self.bias)


class TurnedAttention(FusedAttention):
    """Self-attention whose queries and keys are turned."""

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """x [B,L,W], turn as of `rotate` -> [B,L,W]."""
        q, k, v = self.split(x)
        q, k = (rotate(y.transpose(1, 2), turn).transpose(1, 2) for y in (q, k))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TurnedBlock(nn.Module):
    """Pre-norm encoder block of Qwen3-VL's vision."""

    def __init__(self, size: VisionSize):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width, eps=1e-6), nn.LayerNorm(size.width, eps=1e-6)
        self.attn, self.mlp = TurnedAttention(size.width, size.heads), PlainMlp(size.width, size.mlp, "tanh")

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """[B,L,W] -> [B,L,W]."""
        x = x + self.attn(self.norm1(x), turn)
        return x + self.mlp(self.norm2(x))


class BlockMerger(nn.Module):
    """merge x merge patches, row by row, side by side in one vector, projected. `wide`: normalised there,
    else each by itself."""

    def __init__(self, width: int, out: int, merge: int, wide: bool):
        super().__init__()
        all_of_it = width * merge * merge
        self.norm = nn.LayerNorm(all_of_it if wide else width, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(all_of_it, all_of_it), nn.Linear(all_of_it, out)
        self.merge, self.wide = merge, wide

    def forward(self, x: Tensor) -> Tensor:
        """[B,side²,W] -> [B,(side/merge)²,out]."""
        side = math.isqrt(x.shape[1]) // self.merge
        x = x if self.wide else self.norm(x)
        x = x.unflatten(1, (side, self.merge, side, self.merge)).transpose(2, 3).flatten(3).flatten(1, 2)
        return self.fc2(F.gelu(self.fc1(self.norm(x) if self.wide else x)))


class MergedVision(nn.Module):
    """Images [B,3,h,h] in -1..1 -> [B,n,(1 + deep) C]: the tokens, and beside them what is added to them
    later."""

    def __init__(self, config: GrootN17Config):
        super().__init__()
        size, out = config.vision, config.trunk.width
        self.patch, self.place = (FramePatches(size.width, size.patch), Embedding(config.grid**2, size.width))
        self.blocks = nn.ModuleList([TurnedBlock(size) for _ in range(size.depth)])
        self.merger = BlockMerger(size.width, out, config.merge, wide=False)
        self.deep_mergers = nn.ModuleList(
            [BlockMerger(size.width, out, config.merge, wide=True) for _ in config.deep]
        )
        self.deep, self.grid, self.head_dim = config.deep, config.grid, size.width // size.heads

    def forward(self, images: Tensor) -> Tensor:
        """[B,3,h,h] -> [B,n,(1 + deep) C]."""
        x = self.patch(images)
        side = images.shape[2] // self.patch.weight.shape[-1]
        table = self.place.weight.unflatten(0, (self.grid, self.grid)).permute(2, 0, 1)[None]
        places = F.interpolate(table, (side, side), mode="bilinear", align_corners=True)
        x = x + places.flatten(2).transpose(1, 2)
        turn, kept = self._turn(side, x.device), []
        for i, block in enumerate(self.blocks):
            x = block(x, turn)
            if i in self.deep:
                kept.append(self.deep_mergers[self.deep.index(i)](x))
        return torch.cat([self.merger(x), *kept], 2)

    def _turn(self, side: int, device: torch.device) -> Tensor:
        """[2,1,side²,1,d/2]: half of a head's planes are turned by the row, half by the column."""
        quarter = self.head_dim // 4
        rate = ROPE_BASE ** -(torch.arange(quarter, device=device, dtype=torch.float32) / quarter)
        at = torch.arange(side * side, device=device)
        angle = torch.cat([(at // side)[:, None] * rate, (at % side)[:, None] * rate], 1)[None, :, None]
        return torch.stack([angle.cos(), angle.sin()])


class GrootN17Trunk(nn.Module):
    """Qwen3-VL up to the layer that the action head reads, and the blocks that mix its tokens."""

    def __init__(self, config: GrootN17Config):
        super().__init__()
        size, kind = config.trunk, DecoderKind(activation="silu", eps=config.eps, offset=0.0, head_norms=True)
        self.vision, self.words = MergedVision(config), Embedding(config.vocab, size.width)
        self.decoder = nn.ModuleList([DecoderBlock(size, kind) for _ in range(size.depth)])
        self.seen_norm = nn.LayerNorm(size.width)
        self.mixer = nn.ModuleList([MixerBlock(config.mixer) for _ in range(config.mixer.depth)])
        self.config = config

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
        pictures, deep = (
            picture_tokens(self.vision, nn.Identity(), images, image_mask, drop),
            len(self.config.deep),
        )
        words = self.words(tokens)
        words = F.pad(words, (0, deep * words.shape[2]))
        tokens_in_order = in_order(
            pictures, image_mask, words, tokens == self.config.picture_word, token_mask
        )
        x, mask, seen, count, sees = packed(*tokens_in_order, drop, length)
        turn = self._turn(mask, seen[..., 0] & mask)
        x, *added = x.chunk(1 + deep, 2)
        for i, block in enumerate(self.decoder):
            x, _ = block(x, turn, sees)
            x = x + added[i] if i < deep else x
        x = self.seen_norm(x)
        for block in self.mixer:
            x = block(x, mask)
        return Context(mean_token(x, mask), ((x, seen),), mask, count, state)

    def _turn(self, mask: Tensor, seen: Tensor) -> Tensor:
        """Which tokens are there, and are of pictures, bool [B,L] -> [2,B,L,1,d/2] of `rotate`."""
        c, count = self.config, self.config.view_tokens
        side, before, words = (
            math.isqrt(count),
            seen.cumsum(1) - seen.long(),
            (mask & ~seen).cumsum(1) - (mask & ~seen).long(),
        )
        time = words + before // count * side  # a picture is as long as a side of it
        row, column = (torch.where(seen, at, 0) for at in (before % count // side, before % side))
        half = c.trunk.head_dim // 2
        rate = TEXT_ROPE_BASE ** -(torch.arange(half, device=mask.device, dtype=torch.float32) / half)
        axis, plane = (
            torch.zeros(half, dtype=torch.long, device=mask.device),
            torch.arange(half, device=mask.device),
        )
        for i, planes in enumerate(c.sections, 1):  # 1, 4, 7, … are of rows, 2, 5, 8, … of columns
            axis[(plane % 3 == i) & (plane < 3 * planes)] = i
        angle = (torch.stack([time, time + row, time + column], 2)[..., axis].float() * rate)[:, :, None]
        return torch.stack([angle.cos(), angle.sin()])


_size = partial(sizes, GrootN17Config)
GROOT_N17_SIZES = {
    "tiny": _size(
        (24, 3, 64, 2, 8, 64),
        (64, 3, 96, 4, 2, 16),
        (1, 4),
        (48, 4, 4),
        vocab=512,
        picture_word=511,
        embodiments=3,
        embodiment=1,
        hidden=32,
        places=256,
        grid=6,
        deep=(0, 1),
        sections=(2, 2),
        horizon=8,
        action_width=32,
        state_width=32,
    ),
    "small": _size(
        (128, 6, 512, 4, 16, 128),
        (256, 4, 768, 4, 2, 64),
        (1, 4),
        (256, 6, 4),
        vocab=4096,
        picture_word=4095,
        embodiments=1,
        embodiment=0,
        hidden=256,
        places=256,
        grid=12,
        deep=(1, 3),
        sections=(10, 10),
        horizon=16,
        action_width=32,
        state_width=32,
    ),
    "full": _size(
        (1024, 24, 4096, 16, 16, 256),
        (2048, 16, 6144, 16, 8, 128),
        (4, 32),
        (1536, 32, 32),
        vocab=151936,
        picture_word=151655,
    ),
}
"""tiny: that of the test files; small: to be trained on a CPU; full: the published model
(Cosmos-Reason2-2B)."""
