"""pi0 and pi0.5: PaliGemma reads images and prompt, a Gemma expert of the same depth reads its keys and
values and the noised actions.

pi0 (arXiv 2410.24164): the state is the first token of the suffix, time enters by an MLP on (action, time).
Blocks of attention: prefix, state, actions; each sees those before it and itself.
pi0.5 (arXiv 2504.16054): the state is text of the prompt, time enters by adaptive norms in every layer of the
expert. Numbers and order of operations follow openpi's PyTorch models and LeRobot 0.6.1, to whose outputs
tests compare.
Axes: B rows, V views, P words, L prefix tokens, H steps, W action entries, S state.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from robo_rl.errors import choose
from robo_rl.policies.context import Context
from robo_rl.policies.vla.blocks import (
    GEMMA,
    AdaRmsNorm,
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
    time_embedding,
)


@dataclass(frozen=True, kw_only=True)
class PiConfig(DecoderVlaConfig):
    """Sizes of a pi0 or a pi0.5, its `family`; `PI_SIZES` has some."""

    def __post_init__(self):
        choose("family", self.family, ("pi0", "pi05"))
        super().__post_init__()

    @property
    def adaptive(self) -> bool:
        """Time by adaptive norms, and no token of the state."""
        return self.family == "pi05"


class PiTrunk(nn.Module):
    """PaliGemma up to the keys and values of its last layer."""

    def __init__(self, config: PiConfig):
        super().__init__()
        size = config.trunk
        self.vision = VisionTower(config.vision)
        self.projector = nn.Linear(config.vision.width, size.width)
        self.words = Embedding(config.vocab, size.width)
        self.layers = nn.ModuleList(
            [DecoderBlock(size, GEMMA, last=i == size.depth - 1) for i in range(size.depth)]
        )
        self.norm = RmsNorm(size.width, GEMMA)
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
        """See `VlaModel.prefix`; images are not divided by the root of the width, words are multiplied by
        it."""
        pictures = picture_tokens(self.vision, self.projector, images, image_mask, drop)
        words = self.words(tokens) * math.sqrt(self.words.embedding_dim)
        mask = torch.cat([image_mask.repeat_interleave(pictures.shape[2], 1), token_mask], 1)
        x = torch.cat([pictures.flatten(1, 2), words], 1)
        if drop or length is not None:
            x, mask, count = pack(x, mask, length)
        else:
            count = mask.sum(1)
        turn = rotation(mask.cumsum(1) - 1, self.head_dim)
        return read_prefix(self.layers, self.norm, x, turn, mask[:, None], mask, count, state)


class PiExpert(nn.Module):
    """A small Gemma between projections of actions: the velocity of a noised chunk.

    Rows that are given (`Context.committed`) are at flow time 0 (training-time real-time chunking, arXiv
    2512.05964).
    """

    window = 0  # w of a Λ-shaped mask among the actions; 0: every one sees all

    def __init__(self, config: PiConfig):
        super().__init__()
        size, cond = config.expert, config.expert.width if config.adaptive else 0
        self.layers = nn.ModuleList([DecoderBlock(size, GEMMA, cond) for _ in range(size.depth)])
        self.norm = AdaRmsNorm(size.width, cond, GEMMA) if cond else RmsNorm(size.width, GEMMA)
        self.action_in, self.action_out = (
            nn.Linear(config.action_width, size.width),
            nn.Linear(size.width, config.action_width),
        )
        self.time_in = nn.Linear(size.width if cond else 2 * size.width, size.width)
        self.time_out = nn.Linear(size.width, size.width)
        self.state = None if cond else nn.Linear(config.state_width, size.width)
        self.width, self.head_dim = size.width, size.head_dim

    def forward(self, context: Context, x: Tensor, t: Tensor) -> Tensor:
        """See `VlaModel.velocity`."""
        assert context.mask is not None and context.length is not None and context.state is not None
        steps, dtype = x.shape[1], self.action_in.weight.dtype
        given, cond = context.committed, None
        h, place = (
            self.action_in(x.to(dtype)),
            row_places(context.length + (self.state is not None), given, steps, self.window),
        )
        if self.state is not None:
            h = self.time_out(
                silu(self.time_in(torch.cat([h, row_times(t, given, steps, self.width).to(dtype)], -1)))
            )
            h = torch.cat([self.state(even_rows(context.state.to(dtype)))[: len(h), None], h], 1)
            place = torch.cat([context.length[:, None], place], 1)
        elif given is None:
            cond = silu(self.time_out(silu(self.time_in(even_rows(time_embedding(t, self.width).to(dtype))))))
        else:
            times = row_times(t, given, steps, self.width).to(dtype)
            cond = silu(self.time_out(silu(self.time_in(even_rows(times.flatten(0, 1))))))[
                : times[..., 0].numel()
            ].view_as(times)
        mask = self._mask(context.mask, h.shape[1])
        turn = rotation(place, self.head_dim)
        for layer, past in zip(self.layers, context.kv, strict=True):
            h, _ = layer(h, turn, mask, past, cond)
        return self.action_out(self.norm(h, cond)[0][:, -steps:]).float()

    def _mask(self, prefix: Tensor, length: int) -> Tensor:
        """bool [B,1 or L,P + L]: the whole prefix and the own tokens, but that the state does not see the
        actions, and each of these with a window the state and the last ones."""
        if self.window:
            own = lambda_mask(length - (self.state is not None), self.window, sink=self.state is not None).to(
                prefix.device
            )
        else:
            own = torch.ones(
                1 if self.state is None else length, length, dtype=torch.bool, device=prefix.device
            )
            if self.state is not None:
                own[0, 1:] = False
        rows = len(own)
        return torch.cat([prefix[:, None].expand(-1, rows, -1), own.expand(len(prefix), -1, -1)], 2)


def _size(
    family: str,
    vision: tuple[int, ...],
    trunk: tuple[int, ...],
    expert: tuple[int, int],
    vocab: int,
    horizon: int,
) -> PiConfig:
    tower, decoder, smaller = parts_of(vision, trunk, expert)
    return PiConfig(family=family, vocab=vocab, horizon=horizon, vision=tower, trunk=decoder, expert=smaller)


PI_SIZES = {
    family: {
        "tiny": _size(family, (32, 2, 64, 4, 8, 64), (64, 2, 96, 4, 1, 16), (48, 96), 512, 10),
        "small": _size(family, (192, 6, 768, 6, 16, 112), (256, 6, 1024, 4, 1, 64), (192, 768), 4096, 16),
        "full": _size(
            family, (1152, 27, 4304, 16, 14, 224), (2048, 18, 16384, 8, 1, 256), (1024, 4096), 257152, 50
        ),
    }
    for family in ("pi0", "pi05")
}
"""tiny: as wide as the test files, for cameras of 64 pixels; small: to be trained on a CPU; full: the
published model."""
