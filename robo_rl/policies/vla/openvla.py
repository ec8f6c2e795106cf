"""OpenVLA-OFT (arXiv 2502.19645): Llama reads pictures through two vision transformers, state and prompt, and
fills in all actions at once.

    begin, pictures, state, prompt, H A empty tokens, stop:    everything sees everything, one pass
    the output before each empty token -> 256 bins of -1..1 (`tokens`), or of a step's A outputs together ->
    its A numbers (`l1`)

Pictures go through DINOv2 (with registers) and SigLIP, whose last blocks are not used, and a projector. The
prefix sees the empty tokens, so there are no keys and values to keep: the context is the embedded prefix, as
of pi0-FAST. Numbers and order of operations follow the public code (prismatic; timm 0.9.16; transformers), to
which tests compare. FiLM, the diffusion head and the centre crop of 0.9 of the area at evaluation are left
out.
Axes: B rows, V views, n tokens of a picture, P words, L prefix tokens, H steps, A numbers of a step, W width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.errors import choose
from robo_rl.policies.context import Context
from robo_rl.policies.vla.blocks import (
    DecoderBlock,
    DecoderKind,
    DecoderSize,
    Embedding,
    PatchConv,
    RmsNorm,
    VisionSize,
    WriterVlaConfig,
    even_rows,
    mean_token,
    pack,
    parts_of,
    picture_tokens,
    rotation,
)
from robo_rl.policies.vla.xvla import MEAN, STD, FusedAttention, PlainMlp

HEADS = ("tokens", "l1")
EVEN = 16  # rows from which a product's bits do not depend on how many they are


@dataclass(frozen=True, kw_only=True)
class OpenVlaConfig(WriterVlaConfig):
    """Sizes of an OpenVLA-OFT; `OPENVLA_SIZES` has some. `trunk` is the language model, which the model has
    as its `expert`."""

    vision: VisionSize
    """DINOv2; `depth` counts the blocks that are used."""
    second: VisionSize
    """SigLIP."""
    trunk: DecoderSize
    vocab: int
    words: int
    """Words before the vocabulary was padded: bin d of an action, 1 .. 256, is word words - d."""
    family: str = "openvla_oft"
    head: str = "tokens"
    hidden: int = 4096
    """Width of the l1 head."""
    has_state: bool = True
    registers: int = 4
    bins: int = 256
    empty: int = 29871
    """Word after the prompt."""
    stop: int = 2
    eps: float = 1e-6
    """Of the language model's norms."""
    horizon: int = 8
    action_width: int = 7
    state_width: int = 8
    views: int = 2

    def __post_init__(self):
        choose("head of openvla_oft", self.head, HEADS)

    @property
    def more_tokens(self) -> int:
        """Of the prefix beside pictures and prompt: the state and the word after the prompt."""
        return 1 + self.has_state


class LayerScale(nn.Module):
    """x times a number of each channel."""

    def __init__(self, width: int):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[B,L,W] -> [B,L,W]."""
        return x * self.scale_factor


class ScaledBlock(nn.Module):
    """Pre-norm encoder block, its two branches scaled by channel or not."""

    def __init__(self, size: VisionSize, scaled: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width, eps=1e-6), nn.LayerNorm(size.width, eps=1e-6)
        self.attn, self.mlp = FusedAttention(size.width, size.heads), PlainMlp(size.width, size.mlp)
        self.ls1, self.ls2 = (LayerScale(size.width) if scaled else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[B,L,W] -> [B,L,W]."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchTower(nn.Module):
    """A vision transformer up to its last block but one: images [B,3,h,w], normalised -> patches [B,n,W]."""

    def __init__(self, size: VisionSize, registers: int):
        super().__init__()
        self.patch = PatchConv(3, size.width, size.patch, size.patch)
        self.pos_embed = nn.Parameter(torch.zeros(1, size.patches, size.width))
        self.registers = registers
        if registers:  # and a class token before them; none of these has a place
            self.cls_token, self.reg_token = (
                nn.Parameter(torch.zeros(1, k, size.width)) for k in (1, registers)
            )
        self.blocks = nn.ModuleList([ScaledBlock(size, registers > 0) for _ in range(size.depth)])

    def forward(self, images: Tensor) -> Tensor:
        """[B,3,h,w] -> [B,n,W]."""
        x = self.patch(images) + self.pos_embed
        if self.registers:
            x = torch.cat(
                [self.cls_token.expand(len(x), -1, -1), self.reg_token.expand(len(x), -1, -1), x], 1
            )
        for block in self.blocks:
            x = block(x)
        return x[:, 1 + self.registers :] if self.registers else x


class FusedVision(nn.Module):
    """Images [B,3,h,h] in -1..1 -> tokens of both towers side by side [B,n,W1 + W2]; for DINOv2 normalised as
    ImageNet's."""

    def __init__(self, config: OpenVlaConfig):
        super().__init__()
        self.first, self.second = PatchTower(config.vision, config.registers), PatchTower(config.second, 0)
        self.patches = config.second.patches

    def forward(self, images: Tensor) -> Tensor:
        """[B,3,h,h] -> [B,n,W1 + W2]; never of fewer than 16 tokens, see `blocks.even_rows`."""
        rows, least = len(images), -(-EVEN // self.patches)
        if 0 < rows < least:
            images = images[torch.arange(least, device=images.device) % rows]
        mean, std = (images.new_tensor(x)[:, None, None] for x in (MEAN, STD))
        return torch.cat([self.first(((images + 1) / 2 - mean) / std), self.second(images)], 2)[:rows]


class Projector(nn.Module):
    """Linear layers with the exact gelu between them."""

    def __init__(self, *widths: int):
        super().__init__()
        self.count = len(widths) - 1
        for i in range(self.count):
            self.add_module(f"fc{i + 1}", nn.Linear(widths[i], widths[i + 1]))

    def forward(self, x: Tensor) -> Tensor:
        """[B,L,widths[0]] -> [B,L,widths[-1]]."""
        rows, x = x.shape[:2], even_rows(x.flatten(0, 1))
        for i in range(self.count):
            x = self.get_submodule(f"fc{i + 1}")(F.gelu(x) if i else x)
        return x[: rows.numel()].unflatten(0, rows)


class OpenVlaTrunk(nn.Module):
    """Begin, pictures, state and prompt as the tokens that the language model reads."""

    def __init__(self, config: OpenVlaConfig):
        super().__init__()
        width, seen = config.trunk.width, config.vision.width + config.second.width
        self.vision, self.projector = FusedVision(config), Projector(seen, 4 * seen, width, width)
        self.words = Embedding(config.vocab, width)
        self.state = Projector(config.state_width, width, width) if config.has_state else None
        self.empty, self.stop, self.state_width = config.empty, config.stop, config.state_width

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
        """See `VlaModel.prefix`; the first word is the one that begins a text. `kv` has one entry: the tokens
        [B,L,W] and their mask [B,L,1]. What is masked is dropped always: attention in both directions has no
        other way to leave a place out."""
        pictures = picture_tokens(self.vision, self.projector, images, image_mask, drop)
        seen = image_mask.repeat_interleave(pictures.shape[2], 1)
        ends = torch.full_like(tokens[:, :1], self.empty)
        words, there = self.words(torch.cat([tokens, ends], 1)), F.pad(token_mask, (0, 1), value=True)
        pictures = pictures.flatten(1, 2)
        pooled = torch.cat(
            [
                mean_token(pictures, seen),
                mean_token(words[:, :-1], token_mask),
                state[:, : self.state_width].float(),
            ],
            1,
        )
        parts, masks = [words[:, :1], pictures, words[:, 1:]], [there[:, :1], seen, there[:, 1:]]
        if self.state is not None:
            parts.insert(2, self.state(state[:, None, : self.state_width].to(words.dtype)))
            masks.insert(2, there[:, -1:])
        x, mask, count = pack(torch.cat(parts, 1), torch.cat(masks, 1), length)
        return Context(pooled, ((x, mask[..., None]),), mask, count, state)


class StepBlock(nn.Module):
    """x + relu(linear(norm(x)))."""

    def __init__(self, width: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """[...,W] -> [...,W]."""
        return x + self.ffn(x)


class StepHead(nn.Module):
    """The A outputs of a step side by side -> its A numbers."""

    def __init__(self, width: int, hidden: int, action: int):
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(width * action), nn.Linear(width * action, hidden)
        self.mlp_resnet_blocks = nn.ModuleList([StepBlock(hidden) for _ in range(2)])
        self.layer_norm2, self.fc2 = nn.LayerNorm(hidden), nn.Linear(hidden, action)

    def forward(self, x: Tensor) -> Tensor:
        """[...,A W] -> [...,A]."""
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class Filler(nn.Module):
    """The language model over an embedded prefix and empty tokens, and the head of the actions."""

    def __init__(self, config: OpenVlaConfig):
        super().__init__()
        kind, width = DecoderKind(activation="silu", eps=config.eps, offset=0.0), config.trunk.width
        self.layers = nn.ModuleList([DecoderBlock(config.trunk, kind) for _ in range(config.trunk.depth)])
        self.norm = RmsNorm(width, kind)
        if config.head == "tokens":
            self.lm_head = nn.Linear(width, config.vocab, bias=False)
        else:
            self.action_head = StepHead(width, config.hidden, config.action_width)
        self.config = config

    def forward(self, context: Context, stop: Tensor, horizon: int) -> Tensor:
        """The embedded word `stop` [W] ends the sequence -> logits of the bins float32 [B,H,A,256], the least
        action first, or actions float32 [B,H,A]."""
        assert context.mask is not None and context.length is not None
        c, prefix = self.config, context.kv[0][0]
        rows, width, count = len(prefix), prefix.shape[2], horizon * c.action_width
        x = torch.cat(
            [prefix, prefix.new_zeros(rows, count, width), stop.to(prefix.dtype).expand(rows, 1, -1)], 1
        )
        sees = F.pad(context.mask, (0, count + 1), value=True)
        turn = rotation(sees.cumsum(1) - 1, c.trunk.head_dim)
        for layer in self.layers:
            x, _ = layer(x, turn, sees[:, None])
        x = self.norm(x)[0]
        last = x.gather(1, (context.length - 1)[:, None, None].expand(-1, 1, width))
        x = torch.cat([last, x[:, prefix.shape[1] :][:, : count - 1]], 1).unflatten(
            1, (horizon, c.action_width)
        )
        if c.head == "l1":
            steps = x.flatten(2).flatten(0, 1)
            return self.action_head(even_rows(steps))[: len(steps)].view(rows, horizon, -1).float()
        table = self.lm_head.weight[c.words - c.bins : c.words].flip(0)  # bin 1 is the last word
        return F.linear(x, table).float()


def filled(trunk: OpenVlaTrunk, filler: Filler, context: Context, horizon: int) -> Tensor:
    """`Filler` on the context that the trunk made."""
    return filler(
        context, trunk.words(torch.full((1,), trunk.stop, device=context.pooled.device))[0], horizon
    )


def _size(
    vision: tuple[int, ...], second: tuple[int, ...], trunk: tuple[int, ...], **more: Any
) -> OpenVlaConfig:
    (tower, decoder, _), (other, _, _) = parts_of(vision, trunk, (1, 1)), parts_of(second, trunk, (1, 1))
    return OpenVlaConfig(vision=tower, second=other, trunk=decoder, **more)


OPENVLA_SIZES = {
    "tiny": _size(
        (32, 2, 128, 4, 14, 28),
        (24, 2, 89, 3, 14, 28),
        (64, 2, 96, 4, 4, 16),
        vocab=512,
        words=448,
        hidden=48,
        empty=29,
        horizon=4,
        state_width=32,
    ),
    "small": _size(
        (128, 4, 512, 4, 16, 112),
        (128, 4, 512, 4, 16, 112),
        (256, 6, 768, 4, 4, 64),
        vocab=4096,
        words=4032,
        hidden=256,
        empty=29,
        state_width=32,
    ),
    "full": _size(
        (1024, 23, 4096, 16, 14, 224),
        (1152, 26, 4304, 16, 14, 224),
        (4096, 32, 11008, 32, 32, 128),
        vocab=32064,
        words=32000,
    ),
}
"""tiny: that of the test files; small: to be trained on a CPU; full: the published model."""
