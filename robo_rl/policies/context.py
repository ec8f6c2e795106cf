"""What a policy knows of an observation when it begins to decide: the context.

`encode(obs)` makes it once per decision; every denoise step, every re-scoring and the critics read it. A
small policy's context is a pooled vector alone. A vision-language-action model's has what its action expert
attends to as well: keys and values of every layer of the prefix (images, words, state), which of its tokens
are there, and how many.

Axes: B rows, C pooled width, L prefix tokens, S state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

PREFIX = "context"  # of a context's columns among those of an observation
AFTER_MASK = ("length", "state", "committed", "origin", "given")
# of an observation: how good the action is that follows, 1, -1 or 0 (not told), float [B]
ADVANTAGE = "advantage"
# of an observation: rows of the running chunk [B,c,A], normalised; how many
GIVEN, COUNT = "given", "given_count"
# of them are given, or minus the periods that the robot waits for its first chunk
PLAIN = f"{PREFIX}/plain"  # in its place, of the columns of `Context.plain`


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Rows of encoded observations; what a policy does not use is left out."""

    pooled: Tensor
    """[B,C]: what critics see, and all that a small policy has."""
    kv: tuple[tuple[Tensor, Tensor], ...] = ()
    """Per layer, keys and values of the prefix [B,L,...]."""
    mask: Tensor | None = None
    """bool [B,L]: which tokens of the prefix are there."""
    length: Tensor | None = None
    """int64 [B]: how many those are, the position of the first token after them."""
    state: Tensor | None = None
    """[B,S]: the state, where the action expert reads it by itself."""
    committed: Tensor | None = None
    """float [B,H]: 1 for the first rows of a chunk, where those are given (`ChainPolicy.commit`)."""
    origin: Tensor | None = None
    """[B,A]: what the actions of a chunk are relative to, in their own units: the state that was observed, 0
    for other axes."""
    given: Tensor | None = None
    """[B,c,A]: those rows, normalised, 0 after the last of them (`policies.committed`)."""
    plain: "Context | None" = None
    """The same rows without what guidance leads towards (`policies.guidance.Guidance`)."""

    def __len__(self) -> int:
        """B."""
        return len(self.pooled)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Context":
        """The context with `change` done to each of its tensors."""

        def changed(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        return Context(
            change(self.pooled),
            tuple((change(k), change(v)) for k, v in self.kv),
            changed(self.mask),
            changed(self.length),
            changed(self.state),
            changed(self.committed),
            changed(self.origin),
            changed(self.given),
            None if self.plain is None else self.plain.map(change),
        )

    def repeat(self, n: int) -> "Context":
        """Each row n times, one after the other: [B n] rows. Once is the context itself."""
        return self if n == 1 else self.map(lambda x: x.repeat_interleave(n, 0))

    def pick(self, index: "Tensor | slice") -> "Context":
        """The rows `index`: int64 [b], bool [B] or a slice."""
        return self.map(lambda x: x[index])

    def detach(self) -> "Context":
        """The context without its gradients."""
        return self.map(Tensor.detach)

    def to(self, device: "torch.device | str | None" = None, dtype: torch.dtype | None = None) -> "Context":
        """On another device; `dtype` is for its floating-point tensors alone."""
        return self.map(lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None))

    @staticmethod
    def cat(parts: "Sequence[Context]") -> "Context":
        """The rows of all parts. Shorter prefixes are padded with zeros that the mask leaves out.

        ValueError where the parts are of different kinds of policy: other fields, or another number of
        layers.
        """
        kinds = {(tuple(f.name for f in fields(p) if getattr(p, f.name) is None), len(p.kv)) for p in parts}
        if len(kinds) != 1:
            raise ValueError(
                f"contexts that are joined must have the same fields and layers, got {sorted(kinds)}"
            )

        def joined(name: str) -> Tensor | None:
            xs = [getattr(p, name) for p in parts]
            return None if xs[0] is None else torch.cat(xs)

        longest = max((p.mask.shape[1] for p in parts if p.mask is not None), default=0)
        kv = tuple(
            (
                torch.cat([_padded(p.kv[i][0], longest) for p in parts]),
                torch.cat([_padded(p.kv[i][1], longest) for p in parts]),
            )
            for i in range(len(parts[0].kv))
        )
        mask = (
            None
            if parts[0].mask is None
            else torch.cat([_padded(p.mask, longest) for p in parts if p.mask is not None])
        )
        plain = [p.plain for p in parts if p.plain is not None]
        return Context(
            torch.cat([p.pooled for p in parts]),
            kv,
            mask,
            *(joined(name) for name in AFTER_MASK),
            plain=Context.cat(plain) if plain else None,
        )

    def columns(self) -> dict[str, Tensor]:
        """The context as entries of an observation, a row per decision; `of` reads them. A pooled vector
        alone is one entry, "context"."""
        names = [f.name for f in fields(self) if f.name not in ("kv", "plain")]
        out = {PREFIX if name == "pooled" else f"{PREFIX}/{name}": getattr(self, name) for name in names}
        out |= {
            f"{PREFIX}/{name}{i}": x
            for i, layer in enumerate(self.kv)
            for name, x in zip(("k", "v"), layer, strict=True)
        }
        if self.plain is not None:
            out |= {PLAIN + name.removeprefix(PREFIX): x for name, x in self.plain.columns().items()}
        return {name: x for name, x in out.items() if x is not None}

    @staticmethod
    def of(columns: dict[str, Tensor]) -> "Context":
        """The context in `columns`, among others."""
        layers = sum(name.startswith(f"{PREFIX}/k") for name in columns)
        kv = tuple((columns[f"{PREFIX}/k{i}"], columns[f"{PREFIX}/v{i}"]) for i in range(layers))
        plain = {PREFIX + k.removeprefix(PLAIN): x for k, x in columns.items() if k.startswith(PLAIN)}
        return Context(
            columns[PREFIX],
            kv,
            *(columns.get(f"{PREFIX}/{name}") for name in ("mask", *AFTER_MASK)),
            plain=Context.of(plain) if plain else None,
        )


def _padded(x: Tensor, length: int) -> Tensor:
    """Tokens [B,L,...] -> [B,length,...], with zeros at the end."""
    return x if x.shape[1] == length else pad(x, (*(0, 0) * (x.dim() - 2), 0, length - x.shape[1]))
