"""pi0-FAST (arXiv 2501.09747): PaliGemma reads images and prompt, the state among its words, and writes the
actions as tokens.

The prefix (images, prompt) sees itself in both directions; action tokens see the prefix and those before
them. The same layers read and write, so what is encoded once is the embedded prefix: `trunk` makes it, and
`expert`, the language model, reads it again whenever its weights have moved. Words are embedded by the trunk;
an output is scored against the same embeddings. Numbers and order of operations follow LeRobot 0.6.1, to
whose losses tests compare. There the token that begins the actions is causal in training and part of the
prefix in sampling; here it is causal in both, so that what is sampled is what is scored.
Axes: B rows, V views, P words, L prefix tokens, S action tokens, W width.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robo_rl.policies.context import Context
from robo_rl.policies.vla.blocks import (
    GEMMA,
    DecoderBlock,
    DecoderSize,
    Embedding,
    RmsNorm,
    VisionSize,
    VisionTower,
    WriterVlaConfig,
    mean_token,
    pack,
    parts_of,
    picture_tokens,
    rotation,
)

Past = tuple[tuple[Tensor, Tensor], ...]  # per layer, keys and values [B,L,M,d]


@dataclass(frozen=True, kw_only=True)
class PiFastConfig(WriterVlaConfig):
    """Sizes of a pi0-FAST; `PI_FAST_SIZES` has some. `trunk` is the language model, which the model has as
    its `expert`."""

    vision: VisionSize
    trunk: DecoderSize
    vocab: int
    family: str = "pi0_fast"
    actions: int = 2048
    """Words that are kept for action tokens: token a is word vocab - 1 - skip - a."""
    skip: int = 128
    """Words behind them (PaliGemma's segmentation codes)."""
    begin: int = 2
    """Word that begins the actions."""
    tokens: int = 256
    """Most action tokens of a chunk."""
    horizon: int = 50
    action_width: int = 32
    state_width: int = 32
    views: int = 3

    def __post_init__(self):
        if self.actions + self.skip >= self.vocab:
            raise ValueError(
                f"{self.actions} action tokens and {self.skip} words behind them must be fewer than the "
                f"{self.vocab} words"
            )


class EmbeddedPrefix(nn.Module):
    """Pictures and words as the tokens that a language model reads."""

    def __init__(self, config: PiFastConfig):
        super().__init__()
        self.vision = VisionTower(config.vision)
        self.projector = nn.Linear(config.vision.width, config.trunk.width)
        self.words = Embedding(config.vocab, config.trunk.width)

    def embed(self, tokens: Tensor) -> Tensor:
        """Words int64 [...] -> [...,W]."""
        return self.words(tokens) * math.sqrt(self.words.embedding_dim)

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
        """See `VlaModel.prefix`. `kv` has one entry: the tokens [B,L,W] and their mask [B,L,1]."""
        pictures = picture_tokens(self.vision, self.projector, images, image_mask, drop)
        seen = image_mask.repeat_interleave(pictures.shape[2], 1)
        pictures, words = pictures.flatten(1, 2), self.embed(tokens)
        pooled = torch.cat([mean_token(pictures, seen), mean_token(words, token_mask), state.float()], 1)
        x, mask = torch.cat([pictures, words], 1), torch.cat([seen, token_mask], 1)
        if drop or length is not None:
            x, mask, count = pack(x, mask, length)
        else:
            count = mask.sum(1)
        return Context(pooled, ((x, mask[..., None]),), mask, count, state)


class TokenWriter(nn.Module):
    """The language model over an embedded prefix and the tokens after it."""

    def __init__(self, config: PiFastConfig):
        super().__init__()
        self.layers = nn.ModuleList([DecoderBlock(config.trunk, GEMMA) for _ in range(config.trunk.depth)])
        self.norm = RmsNorm(config.trunk.width, GEMMA)
        self.head_dim = config.trunk.head_dim

    def forward(self, context: Context, x: Tensor, past: Past = ()) -> tuple[Tensor, Past]:
        """Embedded tokens x [B,S,W] after the prefix, and after those in `past` -> ([B,S,W], the past of what
        comes next)."""
        assert context.mask is not None and context.length is not None
        there, before = context.mask, past[0][0].shape[1] - context.mask.shape[1] if past else 0
        step = torch.arange(before, before + x.shape[1], device=x.device)
        causal = (torch.arange(before + x.shape[1], device=x.device) <= step[:, None]).expand(len(x), -1, -1)
        sees = torch.cat([there[:, None].expand(-1, x.shape[1], -1), causal], 2)
        turn = rotation(context.length[:, None] + step, self.head_dim)
        prefix, at = context.kv[0][0], turn if past else rotation(there.cumsum(1) - 1, self.head_dim)
        kept = []
        for i, layer in enumerate(self.layers):
            if past:
                own = past[i]
            else:
                prefix, own = layer(prefix, at, there[:, None])
            x, new = layer(x, turn, sees, own)
            kept.append((torch.cat([own[0], new[0]], 1), torch.cat([own[1], new[1]], 1)))
        return self.norm(x)[0], tuple(kept)


def scores(trunk: EmbeddedPrefix, hidden: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Outputs of the language model [...,W] -> logits float32 [...,n] of the words `allowed` int64 [n], or of
    all."""
    return nn.functional.linear(
        hidden, trunk.words.weight if allowed is None else trunk.words(allowed)
    ).float()


def logits(
    trunk: EmbeddedPrefix,
    writer: TokenWriter,
    context: Context,
    tokens: Tensor,
    allowed: Tensor | None = None,
) -> Tensor:
    """Words int64 [B,S] after the prefix -> logits [B,S,n], at s of the word after the first s + 1 of them
    (`scores`)."""
    return scores(trunk, writer(context, trunk.embed(tokens))[0], allowed)


def write(
    trunk: EmbeddedPrefix,
    writer: TokenWriter,
    context: Context,
    begin: Tensor,
    allowed: Tensor,
    most: int,
    draws: Tensor | None = None,
) -> Tensor:
    """Sample words one by one, each seeing those before, until the last of `allowed` int64 [n] ends a row or
    there are `most`.

    begin int64 [k]: words before the first. draws [B,most] in 0..1: uniform numbers that decide, by the
    inverse of the cumulative softmax; None: the likeliest word. Returns indices into `allowed`, int64
    [B,most], -1 behind the end.
    """
    end, out = len(allowed) - 1, torch.full((len(context), most), -1, device=begin.device)
    ended, past = torch.zeros(len(context), dtype=torch.bool, device=begin.device), Past()
    last = begin.expand(len(context), -1)
    for t in range(most):
        hidden, past = writer(context, trunk.embed(last), past)
        likely = scores(trunk, hidden[:, -1], allowed)
        if draws is None:
            index = likely.argmax(1)
        else:
            index = (likely.softmax(1).cumsum(1) < draws[:, t, None]).sum(1).clamp(max=end)
        out[:, t] = index.masked_fill(ended, -1)
        ended = ended | (index == end)
        if bool(ended.all()):
            break
        last = allowed[index][:, None]
    return out


def _size(vision: tuple[int, ...], trunk: tuple[int, ...], **more: Any) -> PiFastConfig:
    tower, decoder, _ = parts_of(vision, trunk, (1, 1))
    return PiFastConfig(vision=tower, trunk=decoder, **more)


PI_FAST_SIZES = {
    "tiny": _size(
        (32, 2, 64, 4, 14, 28), (64, 2, 96, 8, 1, 16), vocab=512, actions=256, skip=16, tokens=128, horizon=10
    ),
    "small": _size(
        (192, 6, 768, 6, 16, 112),
        (256, 6, 1024, 4, 1, 64),
        vocab=4096,
        actions=512,
        skip=16,
        tokens=128,
        horizon=16,
    ),
    "full": _size((1152, 27, 4304, 16, 14, 224), (2048, 18, 16384, 8, 1, 256), vocab=257152),
}
"""tiny: that of the test files; small: to be trained on a CPU; full: the published model."""
