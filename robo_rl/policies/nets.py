"""Networks: a chunk head whose chain is cheap, a state trunk, a small vision-language trunk, a critic.

The head is an MLP on [context, x, time features]. Its first layer is kept as three matrices, so over a chain
the context product is made once instead of K times and the time product is one of K rows of a table. That is
the same function as one matrix on the concatenation.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from robo_rl.colours import uncorrelated
from robo_rl.errors import UserError
from robo_rl.policies.context import Context

TOKENS = 16  # longest instruction [words]
VOCAB = 4096  # word ids by hash; 0 is padding


ACTIVATIONS = {"relu": torch.relu_, "silu": nn.functional.silu, "tanh": torch.tanh}


def activation(name: str) -> nn.Module:
    return {"relu": nn.ReLU(inplace=True), "silu": nn.SiLU(), "tanh": nn.Tanh()}[name]


def tokenize(texts: "list[str] | np.ndarray") -> np.ndarray:
    """Instructions -> int64[B, TOKENS]: each word hashed (CRC-32) into 1 .. VOCAB-1, zero padded, rest cut
    off."""
    out = np.zeros((len(texts), TOKENS), np.int64)
    known: dict[str, np.ndarray] = {}
    for i, text in enumerate(texts):
        if text not in known:
            words = str(text).lower().split()[:TOKENS]
            known[text] = np.array([zlib.crc32(w.encode()) % (VOCAB - 1) + 1 for w in words], np.int64)
        row = known[text]
        out[i, : len(row)] = row
    return out


def text_tokens(texts: "list[str] | np.ndarray", length: int) -> np.ndarray:
    """Instructions -> uint8[B, length]: their UTF-8, zero padded, for policies with a tokeniser of their own.
    UserError: a longer one."""
    out = np.zeros((len(texts), length), np.uint8)
    for i, text in enumerate(texts):
        data = str(text).encode()
        if len(data) > length:
            raise UserError(
                f"an instruction has {len(data)} bytes, policies read {length} at most: {str(text)[:60]!r}…; "
                "shorten it"
            )
        out[i, : len(data)] = np.frombuffer(data, np.uint8)
    return out


def text_of(tokens: Tensor) -> list[str]:
    """The instructions of `text_tokens` [B,N]."""
    return [bytes(row).rstrip(b"\0").decode() for row in tokens.cpu().numpy()]


def time_features(t: Tensor) -> Tensor:
    """`[...]` times in [0,1] -> `[..., 32]` sines and cosines of geometric frequencies 2 pi .. 200 pi."""
    freq = torch.exp(torch.linspace(0, math.log(100.0), 16, device=t.device)) * math.pi
    angle = t[..., None] * freq
    return torch.cat([angle.sin(), angle.cos()], -1)


def mlp(sizes: list[int], act: str, residual: bool = False) -> nn.Sequential:
    """Linear layers of these sizes with an activation between them; residual: `residual_mlp`."""
    if residual:
        return residual_mlp(sizes, act)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=False)):
        layers.append(nn.Linear(a, b))
        if i < len(sizes) - 2:
            layers.append(activation(act))
    return nn.Sequential(*layers)


def residual(h: Tensor, layer: nn.Linear, act: Callable[[Tensor], Tensor]) -> Tensor:
    """h + act(norm(h) W + b), without weights in the normalisation (pre-norm, Xiong et al. 2020, arXiv
    2002.04745)."""
    return h + act(linear(layer_norm(h, h.shape[-1:]), layer.weight, layer.bias))


class ResidualLayer(nn.Module):
    """`residual` of a linear layer [width, width]."""

    def __init__(self, width: int, act: str):
        super().__init__()
        self.linear, self.act = nn.Linear(width, width), ACTIVATIONS[act]

    def forward(self, h: Tensor) -> Tensor:
        return residual(h, self.linear, self.act)


def residual_mlp(sizes: list[int], act: str) -> nn.Sequential:
    """As `mlp`, hidden layers of one width: the first a linear map, the others residual."""
    first, *hidden, last = zip(sizes[:-1], sizes[1:], strict=True)
    return nn.Sequential(nn.Linear(*first), *(ResidualLayer(w, act) for w, _ in hidden), nn.Linear(*last))


def orthogonal(net: nn.Sequential, last: float) -> None:
    """Orthogonal weights of gain sqrt 2, `last` in the last layer, and biases of 0: how PPO's networks begin
    (Andrychowicz et al. 2021; the defaults of CleanRL and Stable-Baselines3)."""
    linears = [m for m in net.modules() if isinstance(m, nn.Linear)]
    for layer in linears:
        nn.init.orthogonal_(layer.weight, last if layer is linears[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)


class VelocityNet(nn.Module):
    """What a chain asks of the network of a policy: v(context, x, t) for chunks x [B,D].

    What the steps of a chain share is made once: `embed` of a context, `features` of the chain's K times.
    Noised chunks at any other time go through `time` and `forward`.
    """

    beta: float = 1.0  # of `policies.guidance.Guidance`

    def embed(self, context: Context, repeats: int = 1) -> Any:
        """What every step needs of the context; each row stands `repeats` times beside itself."""
        raise NotImplementedError

    def features(self, times: Tensor) -> Tensor:
        """What a chain keeps of its times [K], float [K,...]."""
        raise NotImplementedError

    def steps(self, features: Tensor) -> tuple[Tensor, ...]:
        """The `time` of each step of a chain."""
        raise NotImplementedError

    def time(self, t: Tensor) -> Tensor:
        """What `forward` takes of times t [B]."""
        raise NotImplementedError

    def forward(self, embedded: Any, x: Tensor, time: Tensor) -> Tensor:
        """v [B,D] for x [B,D] and the `time` of one step, or of a row each."""
        raise NotImplementedError

    def at_steps(self, embedded: Any, features: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """v [B,D] for rows x [B,D] at the steps k int64[B] of a chain, and the `time` of all its steps
        [K,...]."""
        raise NotImplementedError


class ChunkHead(VelocityNet):
    """v(context, x, t): context of width C, x [B,D], t -> [B,D]; `layers` hidden layers of `hidden` units.

    residual: the first is a linear map, each other is added as `residual` does.
    """

    from_time: Any  # nn.Sequential of nn.Linear, an activation, nn.Linear
    from_committed: nn.Linear | None
    body: Any  # nn.ModuleList of nn.Linear

    def __init__(
        self,
        context: int,
        chunk: int,
        hidden: int,
        layers: int,
        act: str,
        rows: int = 0,
        residual: bool = False,
    ):
        """rows: H, where first rows of a chunk may be given (`Context.committed`)."""
        super().__init__()
        self.adds = residual
        self.from_context = nn.Linear(context, hidden)
        self.from_x = nn.Linear(chunk, hidden, bias=False)
        self.from_time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, hidden, bias=False))
        self.body = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(layers - 1)])
        self.out = nn.Linear(hidden, chunk)
        self.act = ACTIVATIONS[act]
        bound = 1 / math.sqrt(context + chunk)  # as one matrix on the concatenation would start
        for p in (self.from_context.weight, self.from_context.bias, self.from_x.weight):
            nn.init.uniform_(p, -bound, bound)
        with torch.no_grad():
            self.out.weight.mul_(0.1)
            self.out.bias.zero_()
        self.from_committed = nn.Linear(rows, hidden, bias=False) if rows else None

    def embed(self, context: Context, repeats: int = 1) -> Tensor:
        """Context product `[B * repeats, hidden]`."""
        embedded = linear(context.pooled, self.from_context.weight, self.from_context.bias)
        if self.from_committed is not None and context.committed is not None:
            embedded = embedded + linear(context.committed, self.from_committed.weight)
        return embedded if repeats == 1 else embedded.repeat_interleave(repeats, 0)

    def features(self, times: Tensor) -> Tensor:
        return time_features(times)

    def steps(self, features: Tensor) -> tuple[Tensor, ...]:
        return self.time_product(features).unbind()

    def time(self, t: Tensor) -> Tensor:
        """Time product `[..., hidden]` of times `[...]`."""
        return self.time_product(time_features(t))

    def time_product(self, features: Tensor) -> Tensor:
        """Time product of `time_features`; functions, as a module's call costs as much as a small kernel."""
        first, _, second = self.from_time
        return linear(nn.functional.silu(linear(features, first.weight, first.bias)), second.weight)

    def table(self, features: Tensor) -> Tensor:
        """First-layer matrix `[D + K, hidden]` for x beside a one-hot of which of K times (their features) it
        is at."""
        return torch.cat([self.from_x.weight.t(), self.time_product(features)])

    def at_steps(self, embedded: Tensor, features: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """One product for x and time together."""
        table = self.table(features)
        step = nn.functional.one_hot(k, len(features)).to(x.dtype)
        return self._rest(torch.addmm(embedded, torch.cat([x, step], 1), table)), table[x.shape[1] :]

    def forward(self, embedded: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """v for x [B,D] and the time product of any times."""
        return self._rest((embedded + time).addmm_(x, self.from_x.weight.t()))

    def _rest(self, h: Tensor) -> Tensor:
        if self.adds:
            for layer in self.body:
                h = residual(h, layer, self.act)
            return linear(h, self.out.weight, self.out.bias)
        h = self.act(h)
        for layer in self.body:
            h = self.act(linear(h, layer.weight, layer.bias))
        return linear(h, self.out.weight, self.out.bias)


class Trunk(nn.Module):
    """(normalised state [B,S], tokens, images by view) -> context [B,size]."""

    size: int


class StateTrunk(Trunk):
    """Context of a state policy: the normalised state; if asked beside it each of its entries times a factor
    that the instruction decides, and the mean word embedding. "Red" is then a choice among entries, which
    from words and state side by side would have to be learnt at every place of the cubes anew (FiLM, Perez et
    al. 2018, arXiv 1709.07871)."""

    def __init__(self, state: int, language: bool):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCAB, 32, mode="mean", padding_idx=0) if language else None
        self.gate = nn.Linear(32, state) if language else None
        self.size = 2 * state + 32 if language else state

    def forward(self, state: Tensor, tokens: Tensor | None, images: dict[str, Tensor]) -> Tensor:
        if self.words is None or self.gate is None or tokens is None:
            return state
        mean = self.words(tokens)
        # of the sum: one word of five must count
        factor = self.gate(mean * (tokens != 0).sum(1, keepdim=True))
        return torch.cat([state, state * factor, mean], -1)


class BlockLayers(nn.Module):
    """The layers of a pre-norm transformer block, and its second half."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def widened(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu_(self.up(self.norm2(x))))


class Block(BlockLayers):
    """Pre-norm transformer block with torch's fused attention; `bias[B,1,1,L]` hides padding."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.widened(x + self.proj(y.transpose(1, 2).reshape(b, n, w)))


class StandardPoints(torch.autograd.Function):
    """Mean places [B,P,2] in `grid` [n,2] under softmaxes of 4 (m - mean) / (std + 0.001), the maps m [B,P,n]
    with mean 0 and std 1 over the picture.

    The gradient in closed form, for what autograd keeps and passes over takes a fifth of an update on a CPU:
        z = a (m - mean), a = 4 / (std + c), w = softmax(z), p = w grid;  from g = dL/dp
        dz = w (grid g - p g), which sums to 0
        dm = a dz - z (z . dz) / (4 (n - 1) std)
    """

    @staticmethod
    def forward(ctx, maps: Tensor, grid: Tensor) -> Tensor:
        std, mean = torch.std_mean(maps, -1, keepdim=True)
        a = 4 / (std + 1e-3)
        z = (maps - mean).mul_(a)
        w = torch.softmax(z, -1)
        p = w @ grid
        ctx.save_for_backward(z, w, p, a, std, grid)
        return p

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        z, w, p, a, std, grid = ctx.saved_tensors
        g = grads[0]
        dz = (g @ grid.T).sub_((g * p).sum(-1, keepdim=True)).mul_(w)
        # a flat map's std is 0, and so are its z
        back = (z * dz).sum(-1, keepdim=True) / (4 * (z.shape[-1] - 1) * std.clamp(min=1e-12))
        return dz.mul_(a).addcmul_(z, back, value=-1), None


class ImageEncoder(nn.Module):
    """uint8[B,h,w,3] and an instruction [B,width] -> tokens [B, n, width] (one per 16 x 16 pixels) and key
    points.

    The instruction scales and shifts the first features (FiLM, Perez et al. 2018), so that "red" can mean a
    place; key points are the expected pixel coordinates under spatial softmaxes (Finn et al. 2016), in
    -1..1: what grasping needs and what patch tokens tell only roughly. Activations stay channels-last, as
    images come.

    keypoints "standard": 32 of them instead of 16, each softmax of a map with mean 0 and std 1 over the
    picture. Fresh weights then point at what differs from the rest; with "plain" maps are flat, and all
    points stand in the middle. "white": these, of a picture whose pixels are `uncorrelated`; fresh weights
    then point at small things too.
    """

    grid: Tensor

    def __init__(self, width: int, size: int, keypoints: str):
        super().__init__()
        self.standard, self.white = keypoints != "plain", keypoints == "white"
        half, points = size // 2, 32 if self.standard else 16
        self.stem = nn.Conv2d(3, 32, 4, 2, 1)
        self.film = nn.Linear(width, 64)
        self.mix = nn.Conv2d(32, 32, 1)
        self.maps = nn.Conv2d(32, points, 1)
        self.net = nn.Sequential(
            nn.Conv2d(32, 48, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(48, 64, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(64, width, 3, 2, 1),
        )
        side = math.ceil(math.ceil(math.ceil(half / 2) / 2) / 2)
        self.place = nn.Parameter(torch.randn(1, side * side, width) * 0.02)
        line = torch.linspace(-1, 1, half)
        rows, cols = torch.meshgrid(line, line, indexing="ij")
        self.register_buffer("grid", torch.stack([cols.flatten(), rows.flatten()], 1), persistent=False)
        self.points = points

    def forward(self, image: Tensor, instruction: Tensor) -> tuple[Tensor, Tensor]:
        pixels = image.float().div_(127.5).sub_(1)
        if self.white:
            pixels = uncorrelated(pixels.flatten(1, 2)).view_as(pixels)
        x = self.stem(pixels.permute(0, 3, 1, 2).to(self.place.dtype))
        scale, shift = self.film(instruction)[..., None, None].chunk(2, 1)
        x = torch.relu(self.mix(torch.relu(x * (1 + scale) + shift)))
        maps = self.maps(x).flatten(2).float()
        if self.standard:
            where = StandardPoints.apply(maps, self.grid)
        else:
            where = torch.softmax(4 * maps, -1) @ self.grid  # [B, points, 2]
        return self.net(x).flatten(2).transpose(1, 2) + self.place, where.flatten(1)


class VisionLanguageTrunk(Trunk):
    """Images, instruction and proprioception -> context, the shape of pi0 at about a million parameters.

    Tokens: patches of every view, words, one of the normalised state, one read-out; transformer. Context: the
    read-out and state tokens, with the key points of every view and the normalised state passed on as they
    are.
    """

    def __init__(self, state: int, views: tuple[str, ...], size: int, width: int, depth: int, keypoints: str):
        super().__init__()
        self.views = views
        encoders = [ImageEncoder(width, size, keypoints) for _ in views]
        self.images = nn.ModuleList(encoders)
        self.words = nn.Embedding(VOCAB, width, padding_idx=0)
        self.place = nn.Parameter(torch.randn(1, TOKENS, width) * 0.02)
        self.state = nn.Linear(state, width)
        self.read = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width, max(1, width // 32)) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.size = 2 * width + sum(2 * e.points for e in encoders) + state

    def forward(self, state: Tensor, tokens: Tensor, images: dict[str, Tensor]) -> Tensor:
        """Context [B,size] of state [B,S], tokens int64 [B,L] (0: padding) and images by view [B,3,h,w]."""
        b = len(state)
        length = max(1, int((tokens != 0).sum(1).max()))  # drop columns that are padding for the whole batch
        tokens = tokens[:, :length]
        words = self.words(tokens)
        heard = (tokens != 0).sum(1, keepdim=True).clamp(min=1).to(words.dtype)
        instruction = words.sum(1) / heard  # padding embeds as zero
        patches, points = zip(
            *[encode(images[v], instruction) for v, encode in zip(self.views, self.images, strict=False)],
            strict=False,
        )
        x = torch.cat(
            [
                self.read.expand(b, -1, -1),
                self.state(state.to(words.dtype))[:, None],
                *patches,
                words + self.place[:, :length],
            ],
            1,
        )
        bias = torch.zeros(b, 1, 1, x.shape[1], dtype=x.dtype, device=x.device)
        bias[:, 0, 0, -length:].masked_fill_(tokens == 0, -torch.inf)
        for block in self.blocks:
            x = block(x, bias)
        return torch.cat([self.norm(x[:, :2]).flatten(1).float(), *points, state], 1)


class NoiseNet(nn.Module):
    """Learned std of a chain step: (context product, time product), both detached -> [B, D] in [low, high].

    logvar = lv_min + (lv_max - lv_min)(tanh(h) + 1)/2 (pi_RL Flow-Noise; ReinFlow bounds its net likewise).
    """

    high: Tensor

    def __init__(self, hidden: int, chunk: int, low: float, high: float):
        super().__init__()
        self.net = mlp([hidden, 64, 64, chunk], "tanh")
        self.low = low
        self.register_buffer("high", torch.tensor(high))  # annealed by ReinFlow's schedule

    def forward(self, embedded: Any, time: Tensor) -> Tensor:
        return self.bounded(self.net(torch.tanh(embedded.detach() + time.detach())))

    def bounded(self, h: Tensor) -> Tensor:
        """Std in [low, high] of the network's numbers, of any size."""
        low = 2 * math.log(self.low)
        logvar = low + (2 * torch.log(self.high) - low) * (torch.tanh(h) + 1) / 2
        return torch.exp(0.5 * logvar)


class Critic(nn.Module):
    """V(context) -> [B]; its own MLP on the (detached) context of the policy's trunk."""

    def __init__(self, context: int, hidden: int, layers: int, act: str, orthogonal_start: bool = False):
        super().__init__()
        self.net = mlp([context] + [hidden] * layers + [1], act)
        if orthogonal_start:
            orthogonal(self.net, 1.0)

    def forward(self, context: Tensor) -> Tensor:
        return self.net(context).squeeze(-1)
