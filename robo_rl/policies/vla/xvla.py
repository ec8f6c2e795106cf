"""X-VLA (arXiv 2510.10274): Florence-2's encoder reads the first view and the prompt; one bidirectional
transformer reads them, the tokens of the other views, soft prompts of the embodiment, and actions with state
and time in every token.

It predicts the clean chunk: v = (x - clean)/t. There are no keys and values to keep: the context is the
tokens that the transformer reads, and it reads all of them at every denoise step. The published model attends
to the padding of its prompts, so prompts are made of one length here, and nothing of them is dropped. Its
dropout in training is left out.
Numbers and order of operations follow LeRobot 0.4.4, to whose outputs tests compare. Sources: DaViT (arXiv
2204.03645), Florence-2 (arXiv 2311.06242).
Axes: B rows, V views, n tokens of a picture, P words, H steps, W action entries, S state.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robo_rl.policies.context import Context
from robo_rl.policies.vla.blocks import DecoderSize, Embedding, VisionAttention, picture_tokens

PATCH, STRIDE, PAD = (7, 3, 3, 3), (4, 2, 2, 2), (3, 1, 1, 1)  # of the convolution before each stage
TIME_PERIOD = 100.0
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours in 0..1


@dataclass(frozen=True, kw_only=True)
class DavitSize:
    """A DaViT: stages of `widths`, each halving the picture, of `depths` pairs of a window block and a
    channel block."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    """In windows; as many groups of channels."""
    window: int
    image: int

    @property
    def depth(self) -> int:
        """Blocks in all."""
        return 2 * sum(self.depths)

    @property
    def patches(self) -> int:
        """Tokens of a picture, and one of their mean."""
        side = self.image
        for patch, stride, pad in zip(PATCH, STRIDE, PAD, strict=True):
            side = (side + 2 * pad - patch) // stride + 1
        return side * side + 1


@dataclass(frozen=True, kw_only=True)
class XVlaConfig:
    """Sizes of an X-VLA; `XVLA_SIZES` has some. `trunk` is the text encoder, `expert` the transformer over
    all tokens."""

    vision: DavitSize
    trunk: DecoderSize
    expert: DecoderSize
    vocab: int
    family: str = "xvla"
    prompt: int = 64
    """P: every prompt is padded to so many tokens, with token `padding`."""
    padding: int = 1
    picture_places: int = 1000
    """Learned places of rows and of columns of a picture."""
    text_places: int = 1024
    places: int = 512
    """Learned places of actions and tokens together."""
    domains: int = 30
    domain: int = 0
    """Which embodiment's projections and soft prompts are used."""
    soft_prompts: int = 32
    time_width: int = 32
    grippers: tuple[int, ...] = (9, 19)
    """Entries of action and state that the network does not see (ee6d)."""
    horizon: int = 32
    action_width: int = 20
    state_width: int = 32
    views: int = 3

    @property
    def view_tokens(self) -> int:
        """Tokens of a picture."""
        return self.vision.patches


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
    """`F.conv2d`, on a GPU by torch's own kernels, which take one picture after the other (see
    `blocks.patches_of`)."""
    if not x.is_cuda:
        return F.conv2d(x, weight, bias, **how)
    with torch.backends.cudnn.flags(enabled=False):
        return F.conv2d(x, weight, bias, **how)


class DepthwiseConv(nn.Module):
    """x + a 3 x 3 convolution of every channel by itself."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(width, 1, 3, 3)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, side: int) -> Tensor:
        """[B,side²,W] -> [B,side²,W]."""
        y = convolved(
            x.transpose(1, 2).unflatten(2, (side, side)), self.weight, self.bias, padding=1, groups=x.shape[2]
        )
        return x + y.flatten(2).transpose(1, 2)


class FusedAttention(nn.Module):
    """Self-attention with one matrix for queries, keys and values: over tokens, in windows, or over
    channels."""

    def __init__(self, width: int, heads: int, window: int = 0):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.window = heads, window

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B,L,W] -> queries, keys, values [B,heads,L,W/heads]."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor, side: int = 0) -> Tensor:
        """[B,L,W] -> [B,L,W]; in windows of a picture of side² tokens, which are padded with zeros, if they
        are set."""
        if not self.window:
            return self._over_tokens(x)
        w, rows = self.window, len(x)
        more = -side % w
        count = (side + more) // w
        x = F.pad(x.unflatten(1, (side, side)), (0, 0, 0, more, 0, more))
        x = x.view(rows, count, w, count, w, -1).transpose(2, 3).reshape(rows * count * count, w * w, -1)
        x = self._over_tokens(x).view(rows, count, count, w, w, -1).transpose(2, 3)
        return x.reshape(rows, count * w, count * w, -1)[:, :side, :side].flatten(1, 2)

    def _over_tokens(self, x: Tensor) -> Tensor:
        return self.proj(F.scaled_dot_product_attention(*self.split(x)).transpose(1, 2).flatten(2))


class ChannelAttention(FusedAttention):
    """Attention among the channels of a group; the scale is of the number of tokens."""

    def forward(self, x: Tensor, side: int = 0) -> Tensor:
        """[B,L,W] -> [B,L,W]."""
        q, k, v = (y.transpose(2, 3) for y in self.split(x))
        y = F.scaled_dot_product_attention(q, k, v, scale=x.shape[1] ** -0.5)
        return self.proj(y.permute(0, 3, 1, 2).flatten(2))


class PlainMlp(nn.Module):
    """fc2(gelu(fc1(x))), with the exact gelu or its tanh form."""

    def __init__(self, width: int, mlp: int, approximate: str = "none"):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, mlp), nn.Linear(mlp, width)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """[B,L,W] -> [B,L,W]."""
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class DavitBlock(nn.Module):
    """Convolution, attention, convolution, MLP, each added to what it got."""

    def __init__(self, width: int, heads: int, window: int):
        super().__init__()
        self.conv1, self.conv2 = DepthwiseConv(width), DepthwiseConv(width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = FusedAttention(width, heads, window) if window else ChannelAttention(width, heads)
        self.ffn = PlainMlp(width, 4 * width)

    def forward(self, x: Tensor, side: int) -> Tensor:
        """[B,side²,W] -> [B,side²,W]."""
        x = self.conv1(x, side)
        x = x + self.attention(self.norm1(x), side)
        x = self.conv2(x, side)
        return x + self.ffn(self.norm2(x))


class PictureStage(nn.Module):
    """A convolution that makes the picture smaller; the first stage normalises after it, the others
    before."""

    def __init__(self, stage: int, before: int, width: int):
        super().__init__()
        self.conv = nn.Conv2d(before, width, PATCH[stage], STRIDE[stage], PAD[stage])
        self.norm = nn.LayerNorm(before if stage else width)
        self.first = not stage

    def forward(self, x: Tensor) -> Tensor:
        """[B,c,h,h] -> [B,W,h',h']."""
        if self.first:
            return self.norm(self._smaller(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self._smaller(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    def _smaller(self, x: Tensor) -> Tensor:
        conv = self.conv
        return convolved(x, conv.weight, conv.bias, stride=conv.stride, padding=conv.padding)


class Davit(nn.Module):
    """Pictures [B,3,h,h] in -1..1, which are normalised as ImageNet's, -> [B,n,W]."""

    convs: Any  # nn.ModuleList of PictureStage
    blocks: Any  # nn.ModuleList of nn.ModuleList of nn.ModuleDict of DavitBlock

    def __init__(self, size: DavitSize):
        super().__init__()
        before = (3, *size.widths[:-1])
        self.convs = nn.ModuleList(
            [PictureStage(i, a, b) for i, (a, b) in enumerate(zip(before, size.widths, strict=True))]
        )
        self.blocks = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        nn.ModuleDict(
                            {
                                "spatial_block": DavitBlock(width, heads, size.window),
                                "channel_block": DavitBlock(width, heads, 0),
                            }
                        )
                        for _ in range(depth)
                    ]
                )
                for width, depth, heads in zip(size.widths, size.depths, size.heads, strict=True)
            ]
        )

    def forward(self, images: Tensor) -> Tensor:
        """[B,3,h,h] -> [B,n,W]."""
        mean, std = (images.new_tensor(x)[:, None, None] for x in (MEAN, STD))
        x = (((images + 1) / 2 - mean) / std).to(self.convs[0].conv.weight.dtype)
        for conv, stage in zip(self.convs, self.blocks, strict=True):
            x = conv(x)
            side = x.shape[2]
            x = x.flatten(2).transpose(1, 2)
            for pair in stage:
                x = pair["channel_block"](pair["spatial_block"](x, side), side)
            x = x.transpose(1, 2).unflatten(2, (side, side))
        return x.flatten(2).transpose(1, 2)


class PictureProjector(nn.Module):
    """Places of rows and columns, the place of the first picture in time, and the mean of all tokens before
    them; then projected."""

    def __init__(self, width: int, out: int, places: int):
        super().__init__()
        self.rows, self.columns = Embedding(places, width // 2), Embedding(places, width - width // 2)
        self.weight = nn.Parameter(torch.zeros(width, out))
        self.norm = nn.LayerNorm(out)

    def forward(self, x: Tensor) -> Tensor:
        """[B,n,W] -> [B,1 + n,out]."""
        side = math.isqrt(x.shape[1])
        at = torch.arange(side, device=x.device)
        across, down = self.columns(at).expand(side, -1, -1), self.rows(at)[:, None].expand(-1, side, -1)
        first = torch.arange(x.shape[2], device=x.device) % 2  # sines of 0 and cosines of 0
        x = x + torch.cat([across, down], -1).flatten(0, 1) + first
        return self.norm(torch.cat([x.mean(1, keepdim=True), x], 1) @ self.weight)


class TextBlock(nn.Module):
    """Post-norm encoder block of BART."""

    def __init__(self, size: DecoderSize):
        super().__init__()
        self.self_attn = VisionAttention(size.width, size.heads)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.fc1, self.fc2 = nn.Linear(size.width, size.mlp), nn.Linear(size.mlp, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B,L,W] -> [B,L,W]."""
        x = self.self_attn_layer_norm(x + self.self_attn(x))
        return self.final_layer_norm(x + self.fc2(F.gelu(self.fc1(x))))


class XVlaTrunk(nn.Module):
    """Florence-2's encoder on the first view and the prompt; tokens of the other views follow as they are."""

    OFFSET = 2  # of the learned places of BART

    def __init__(self, config: XVlaConfig):
        super().__init__()
        width = config.trunk.width
        self.vision = Davit(config.vision)
        self.projector = PictureProjector(config.vision.widths[-1], width, config.picture_places)
        self.words = Embedding(config.vocab, width)
        self.places = Embedding(config.text_places + self.OFFSET, width)
        self.norm = nn.LayerNorm(width)
        self.encoder = nn.ModuleList([TextBlock(config.trunk) for _ in range(config.trunk.depth)])
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
        """See `VlaModel.prefix`. `kv` has one entry: all tokens [B,L,C], and which are of views beyond the
        first [B,L,1].

        Views that a row lacks are zeros, and cost nothing with `drop`; so are those that nobody has, up to
        `views`. `length` has nothing to set. ValueError: more views, a longer prompt.
        """
        c, more = self.config, self.config.views - images.shape[1]
        if more < 0 or tokens.shape[1] > c.prompt:
            raise ValueError(
                f"X-VLA takes {c.views} views and {c.prompt} words at most, got {images.shape[1]} and "
                f"{tokens.shape[1]}"
            )
        images, image_mask = F.pad(images, (0, 0, 0, 0, 0, 0, 0, more)), F.pad(image_mask, (0, more))
        pictures = picture_tokens(self.vision, self.projector, images, image_mask, drop)
        if not drop:
            pictures = pictures * image_mask[:, :, None, None]
        tokens = F.pad(
            tokens.masked_fill(~token_mask, c.padding), (0, c.prompt - tokens.shape[1]), value=c.padding
        )
        x = torch.cat([pictures[:, 0], self.words(tokens)], 1)
        x = self.norm(x + self.places(torch.arange(x.shape[1], device=x.device) + self.OFFSET))
        for block in self.encoder:
            x = block(x)
        others = pictures[:, 1:].flatten(1, 2)
        both = torch.cat([x, others], 1)
        beyond = (torch.arange(both.shape[1], device=x.device) >= x.shape[1])[:, None].expand(len(x), -1, 1)
        mask = torch.ones(both.shape[:2], dtype=torch.bool, device=x.device)
        return Context(x.float().mean(1), ((both, beyond),), mask, mask.sum(1), state[:, : c.state_width])


class DomainLinear(nn.Module):
    """A linear layer with weights and bias of each embodiment."""

    def __init__(self, inputs: int, out: int, domains: int):
        super().__init__()
        self.fc, self.bias = Embedding(domains, inputs * out), Embedding(domains, out)
        self.inputs = inputs

    def forward(self, x: Tensor, domain: Tensor) -> Tensor:
        """x [B,L,inputs] of the embodiment `domain` int64 [1] -> [B,L,out]."""
        return x @ self.fc(domain).view(self.inputs, -1) + self.bias(domain)


class SoftBlock(nn.Module):
    """Pre-norm transformer block over actions, tokens and soft prompts."""

    def __init__(self, size: DecoderSize):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attn, self.mlp = FusedAttention(size.width, size.heads), PlainMlp(size.width, size.mlp, "tanh")

    def forward(self, x: Tensor) -> Tensor:
        """[B,L,W] -> [B,L,W]."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class XVlaExpert(nn.Module):
    """The soft-prompted transformer: the clean chunk of a noised one."""

    def __init__(self, config: XVlaConfig):
        super().__init__()
        width, tokens = config.expert.width, config.trunk.width
        self.encoder = DomainLinear(
            config.action_width + config.time_width + config.state_width, width, config.domains
        )
        self.decoder = DomainLinear(width, config.action_width, config.domains)
        self.seen, self.others = nn.Linear(tokens, width), nn.Linear(tokens, width)
        self.places = nn.Parameter(torch.zeros(1, config.places, width))
        self.soft_prompts = Embedding(config.domains, config.soft_prompts * width)
        self.layers = nn.ModuleList([SoftBlock(config.expert) for _ in range(config.expert.depth)])
        self.norm = nn.LayerNorm(width)
        self.config = config

    def forward(self, context: Context, x: Tensor, t: Tensor) -> Tensor:
        """See `VlaModel.velocity`: (x - clean)/t."""
        return (x.float() - self.clean(context, x, t)) / t[:, None, None].float()

    def clean(self, context: Context, x: Tensor, t: Tensor) -> Tensor:
        """x [B,H,W] at times t [B] -> the clean chunk float32 [B,H,W]; of grippers, what a sigmoid makes
        their opening."""
        c, steps, dtype = self.config, x.shape[1], self.norm.weight.dtype
        assert context.state is not None
        domain = torch.full((1,), c.domain, device=x.device)
        both, beyond = context.kv[0]
        x, state = self._hidden(x), self._hidden(context.state)[:, None].expand(-1, steps, -1)
        time = self._time(t)[:, None].expand(-1, steps, -1)
        h = self.encoder(torch.cat([x, state, time], -1).to(dtype), domain)
        h = torch.cat([h, torch.where(beyond, self.others(both), self.seen(both))], 1)
        if h.shape[1] > c.places:
            raise ValueError(f"{h.shape[1]} tokens of actions, words and pictures, places for {c.places}")
        h = h + self.places[:, : h.shape[1]]
        h = torch.cat([h, self.soft_prompts(domain).view(1, c.soft_prompts, -1).expand(len(h), -1, -1)], 1)
        for layer in self.layers:
            h = layer(h)
        return self.decoder(self.norm(h[:, :steps]), domain).float()

    def _hidden(self, x: Tensor) -> Tensor:
        """x with its grippers 0."""
        x, at = x.float(), torch.arange(x.shape[-1], device=x.device)
        for gripper in self.config.grippers:
            x = x.masked_fill(at == gripper, 0)
        return x

    def _time(self, t: Tensor) -> Tensor:
        half = self.config.time_width // 2
        angle = t[:, None].float() * torch.exp(
            -math.log(TIME_PERIOD) * torch.arange(half, device=t.device) / half
        )
        return torch.cat([angle.cos(), angle.sin()], 1)


def _same(width: int, depth: int, mlp: int, heads: int) -> DecoderSize:
    return DecoderSize(
        width=width, depth=depth, mlp=mlp, heads=heads, kv_heads=heads, head_dim=width // heads
    )


# weight and entries of each term
LOSSES = {"ee6d": ((500.0, (0, 1, 2, 10, 11, 12)), (10.0, (3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 17, 18)))}


def clean_loss(clean: Tensor, want: Tensor, grippers: tuple[int, ...], action: int) -> Tensor:
    """The supervised loss of a clean chunk, by step: clean and want [B,H,W], of which the robot has the first
    `action` -> [B,H].

    ee6d (grippers 9 and 19): 500 times the squared error of positions, each arm's mean by itself, 10 times
    that of rotations, and the cross-entropy of the grippers' openings. Others: the mean squared error, and
    0.1 times that cross-entropy (joint).
    """
    openings = [g for g in grippers if g < action]
    entropy = [
        F.binary_cross_entropy_with_logits(clean[..., g], want[..., g].clamp(0, 1), reduction="none")
        for g in openings
    ]
    error = (clean - want).square()
    if grippers == (9, 19) and action == 20:
        terms = [
            weight * error[..., half].mean(-1)
            for weight, at in LOSSES["ee6d"]
            for half in (at[: len(at) // 2], at[len(at) // 2 :])
        ]
        return sum(terms[1:], terms[0]) + (entropy[0] + entropy[1]) / 2
    rest = error[..., [i for i in range(action) if i not in openings]].mean(-1)
    return rest + 0.1 * sum(entropy[1:], entropy[0]) / len(entropy) if entropy else rest


XVLA_SIZES = {
    "tiny": XVlaConfig(
        vision=DavitSize(
            widths=(16, 16, 32, 32), depths=(1, 1, 1, 1), heads=(2, 2, 4, 4), window=3, image=72
        ),
        trunk=_same(48, 2, 64, 4),
        expert=_same(64, 2, 256, 4),
        vocab=512,
        prompt=9,
        picture_places=50,
        text_places=256,
        places=256,
        domains=3,
        domain=1,
        soft_prompts=4,
        horizon=8,
        state_width=20,
    ),
    "small": XVlaConfig(
        vision=DavitSize(
            widths=(32, 64, 128, 256), depths=(1, 1, 2, 1), heads=(2, 4, 8, 16), window=7, image=112
        ),
        trunk=_same(256, 4, 768, 4),
        expert=_same(256, 6, 768, 4),
        vocab=4096,
        prompt=24,
        picture_places=50,
        text_places=256,
        places=256,
        domains=3,
        soft_prompts=8,
        horizon=16,
        state_width=32,
    ),
    "full": XVlaConfig(
        vision=DavitSize(
            widths=(256, 512, 1024, 2048), depths=(1, 1, 9, 1), heads=(8, 16, 32, 64), window=12, image=224
        ),
        trunk=_same(1024, 12, 4096, 16),
        expert=_same(1024, 24, 4096, 16),
        vocab=51289,
    ),
}
"""tiny: that of the test files; small: to be trained on a CPU; full: the published model
(Florence-2-large)."""
