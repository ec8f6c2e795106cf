"""A small transformer that reads tokens in any order and writes tokens one after the other (prefix language
model).

Axes: `B` texts, `P` places read, `W` tokens of each, `L` tokens written, `V` tokens known, `D` channels. A
token is a sentence, a word of a command or a mark: its embedding is the sum of those of its words and one of
its own, and written tokens are scored by the same embeddings (tied). A place is the sum of its tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# of every block: keys and values [B,heads,P + L,D/heads], filled as far as was read and written
Cache = list[tuple[Tensor, Tensor]]


def bag_of_words(tokens: Sequence[str]) -> Tensor:
    """float32[V,W]: how often each of the W words stands in each token, over the root of the number of its
    words."""
    words = sorted({w for t in tokens for w in t.split()})
    out = torch.zeros(len(tokens), len(words))
    for row, t in zip(out, tokens, strict=True):
        for w in t.split():
            row[words.index(w)] += len(t.split()) ** -0.5
    return out


class SentenceBlock(nn.Module):
    """Attention and a perceptron, each after a LayerNorm and added."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self, x: Tensor, mask: Tensor, past: "tuple[Tensor, Tensor] | None" = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B,n,D], mask bool[B or 1,1,n,m] where True may be looked at -> (x, its keys and values). With a
        cache `past` x is the m-th token, and its key and value are put there."""
        b, n, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            m = mask.shape[-1]
            past[0][:, :, m - 1 : m], past[1][:, :, m - 1 : m] = k, v
            k, v = past[0][:, :, :m], past[1][:, :, :m]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norms[1](x)))), (k, v)


class PrefixTransformer(nn.Module):
    """V tokens with the words `tokens`; `roles` kinds of places to read from, `length` tokens to write at
    most. Token `pad` is none."""

    bag: Tensor

    def __init__(
        self,
        tokens: Sequence[str],
        pad: int,
        roles: int,
        length: int,
        width: int,
        depth: int,
        heads: int,
        seed: int,
    ):
        super().__init__()
        self.pad, self.length = pad, length
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.register_buffer("bag", bag_of_words(tokens), persistent=False)
            self.words = nn.Parameter(0.5 * torch.randn(self.bag.shape[1], width))
            self.own = nn.Parameter(0.5 * torch.randn(len(tokens), width))
            self.role, self.place = (nn.Parameter(0.5 * torch.randn(n, width)) for n in (roles, length))
            self.blocks = nn.ModuleList(SentenceBlock(width, heads) for _ in range(depth))
            self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, width)

    def table(self) -> Tensor:
        """[V,D]; that of no token is 0."""
        known = torch.arange(len(self.own), device=self.own.device)[:, None] != self.pad
        return (self.bag @ self.words + self.own) * known

    def scores(self, x: Tensor, table: Tensor) -> Tensor:
        return self.score(self.norm(x)) @ table.T * x.shape[-1] ** -0.5

    def forward(self, read: Tensor, roles: Tensor, written: Tensor) -> Tensor:
        """Logits [B,L,V] of the token after each of `written` int64[B,L]; read int64[B,P,W], roles
        int64[P]."""
        table, p, n = self.table(), read.shape[1], written.shape[1]
        x = torch.cat(
            [
                F.embedding(read, table).sum(2) + self.role[roles],
                F.embedding(written, table) + self.place[:n],
            ],
            1,
        )
        mask = torch.ones(p + n, p + n, dtype=torch.bool, device=x.device).tril()
        mask[:p, :p] = True
        there = torch.cat([(read != self.pad).any(2), torch.ones_like(written, dtype=torch.bool)], 1)
        for block in self.blocks:
            x, _ = block(x, mask & there[:, None, None])
        return self.scores(x[:, p:], table)

    def read(self, read: Tensor, roles: Tensor, table: Tensor) -> tuple[Cache, Tensor]:
        """(what was read int64[B,P,W] as a cache, bool[B,P + L] which of it is there)."""
        x, there, cache = F.embedding(read, table).sum(2) + self.role[roles], (read != self.pad).any(2), []
        for block in self.blocks:
            x, kept = block(x, there[:, None, None])
            cache.append((F.pad(kept[0], (0, 0, 0, self.length)), F.pad(kept[1], (0, 0, 0, self.length))))
        return cache, F.pad(there, (0, self.length), value=True)

    def write(self, token: Tensor, at: int, cache: Cache, there: Tensor, table: Tensor) -> Tensor:
        """Logits [B,V] of what follows `token` int64[B], the `at`-th that is written; the cache gets longer
        by it."""
        x = (F.embedding(token, table) + self.place[at])[:, None]
        mask = there[:, None, None, : there.shape[1] - self.length + at + 1]
        for block, past in zip(self.blocks, cache, strict=True):
            x, _ = block(x, mask, past)
        return self.scores(x[:, 0], table)
