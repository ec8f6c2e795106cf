"""The network of a small flow whose tokens are the rows of a chunk, behind a Λ-shaped mask
(`--policy.window`).

The observation is a token of its own, the sink, which sees itself alone. Row h sees the sink and rows h - w +
1 .. h, so that only the first rows after those that are given go on from them; the others must look at the
observation (through L layers a row is reached by L (w - 1) before it). Given rows are clean, at flow time 0;
all other rows stand 10 places further back (`blocks.OFFSET`), which tells the two apart.

Source: Xiaomi-Robotics-0, arXiv 2602.12684 (mask, places); training-time real-time chunking, arXiv 2512.05964
(time of given rows).

Axes: B observations, H rows, A action, C context, N heads, d width of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from robo_rl.policies.context import Context
from robo_rl.policies.nets import BlockLayers, VelocityNet, time_features
from robo_rl.policies.vla.blocks import OFFSET, attend, lambda_mask, rotate, rotation


class RowContext(NamedTuple):
    """What every step needs of B observations: the sink's token [B,hidden], `rotation` of all places, which
    rows are given, bool [B,H]."""

    sink: Tensor
    turn: Tensor
    given: Tensor | None


class RowBlock(BlockLayers):
    """Pre-norm transformer block with rotary places."""

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor) -> Tensor:
        """x [B,1+H,width], mask bool [B,1+H,1+H]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        return self.widened(x + self.proj(attend(rotate(q, turn), rotate(k, turn), v, mask)))


class RowHead(VelocityNet):
    """v(context, x, t) by a transformer over rows: `layers` blocks of width `hidden`; window: w of the
    mask."""

    mask: Tensor

    def __init__(self, context: int, horizon: int, action: int, hidden: int, layers: int, window: int):
        super().__init__()
        heads = next(n for n in range(max(1, hidden // 32), 0, -1) if hidden % (2 * n) == 0)
        self.horizon, self.head_dim = horizon, hidden // heads
        self.from_context, self.from_x = nn.Linear(context, hidden), nn.Linear(action, hidden, bias=False)
        self.from_time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, hidden, bias=False))
        self.blocks = nn.ModuleList([RowBlock(hidden, heads) for _ in range(layers)])
        self.norm, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, action)
        with torch.no_grad():
            self.out.weight.mul_(0.1)
            self.out.bias.zero_()
        self.register_buffer("mask", lambda_mask(horizon, window, sink=True), persistent=False)

    def embed(self, context: Context, repeats: int = 1) -> RowContext:
        context = context.repeat(repeats)
        given = None if context.committed is None else context.committed > 0
        place = torch.arange(1, self.horizon + 1, device=context.pooled.device).expand(len(context), -1)
        place = place + (OFFSET if given is None else OFFSET * ~given)
        place = torch.cat([torch.zeros_like(place[:, :1]), place], 1)
        return RowContext(self.from_context(context.pooled), rotation(place, self.head_dim), given)

    def features(self, times: Tensor) -> Tensor:
        return time_features(times)

    def steps(self, features: Tensor) -> tuple[Tensor, ...]:
        return self.from_time(features).unbind()

    def time(self, t: Tensor) -> Tensor:
        return self.from_time(time_features(t))

    def at_steps(self, embedded: Any, features: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        times = self.from_time(features)
        return self(embedded, x, times[k]), times

    def forward(self, embedded: Any, x: Tensor, time: Tensor) -> Tensor:
        """v [B,H A]."""
        time = time.expand_as(embedded.sink)[:, None]
        if embedded.given is not None:
            time = torch.where(embedded.given[..., None], self.time(time.new_zeros(1)), time)
        sink = embedded.sink[:, None]
        rows = torch.cat([sink, self.from_x(x.unflatten(1, (self.horizon, -1))) + sink + time], 1)
        mask = self.mask.expand(len(x), -1, -1)
        for block in self.blocks:
            rows = block(rows, embedded.turn, mask)
        return self.out(self.norm(rows[:, 1:])).flatten(1)
