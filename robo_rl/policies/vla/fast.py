"""FAST: chunks of actions as few tokens, and back (Pertsch et al. 2025, arXiv 2501.09747, section V).

    coefficients = round(scale DCT(chunk)),    over time, orthonormal, an axis at a time
    tokens       = byte-pair encoding of the coefficients, time by time, all axes of a frequency side by side

A tokeniser is a folder with `processor_config.json` (scale, min_token) and `tokenizer.json` (the byte-pair
encoding, where a coefficient c is the character c - min_token), as the public one
(physical-intelligence/fast), or `dct:N`: no byte pairs, the 2N + 1 coefficients -N .. N are tokens
themselves. Chunks are normalised; nothing is downloaded.
Axes: B rows, H steps, A action.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.errors import MissingDependency, UserError
from robo_rl.files import read_json, write_bytes

SCALE = 10.0
CONFIG, PAIRS = "processor_config.json", "tokenizer.json"
UNKNOWN = 0xFFFD  # what a decoder writes for bytes that are no character


@cache
def dct_matrix(n: int) -> np.ndarray:
    """Orthonormal DCT-II, float64 [n,n]: its transpose is its inverse."""
    k, i = np.arange(n)[:, None], np.arange(n)
    out = np.sqrt(2 / n) * np.cos(np.pi * (2 * i + 1) * k / (2 * n))
    out[0] /= np.sqrt(2)
    return out


class FastTokeniser:
    """`encode` chunks to tokens 0 .. size - 1, `decode` tokens to chunks. `name` is that of its folder, or
    dct:N; `digest` its SHA-256."""

    def __init__(
        self,
        name: str,
        size: int,
        low: int,
        high: int | None,
        scale: float,
        files: dict[str, bytes],
        pairs: "tuple[Callable[[str], list[int]], Callable[[list[int]], str]] | None" = None,
    ):
        self.name, self.size, self.low, self.high, self.scale, self.files, self.pairs = (
            name,
            size,
            low,
            high,
            scale,
            files,
            pairs,
        )
        self.digest = hashlib.sha256(b"".join(files[k] for k in sorted(files)) or name.encode()).hexdigest()

    def encode(self, chunks: np.ndarray) -> list[list[int]]:
        """Normalised chunks [B,H,A] -> the tokens of each; coefficients beyond what the tokeniser has become
        the nearest it has."""
        c = np.rint(
            self.scale * np.einsum("kh,bha->bka", dct_matrix(chunks.shape[1]), chunks.astype(np.float64))
        )
        index = np.clip(c, self.low, self.high).astype(np.int64).reshape(len(c), -1) - self.low
        if self.pairs is None:
            return index.tolist()
        return [self.pairs[0]("".join(map(chr, row))) for row in index]

    def decode(self, tokens: Sequence[Sequence[int]], horizon: int, action: int) -> np.ndarray:
        """Tokens of B chunks -> chunks float32 [B,H,A]; coefficients that are too many are left out, those
        that lack are 0."""
        c = np.zeros((len(tokens), horizon * action))
        for row, ids in zip(c, tokens, strict=True):
            ids = [i for i in ids if 0 <= i < self.size]
            found = np.asarray(ids if self.pairs is None else [ord(x) for x in self.pairs[1](ids)], np.int64)[
                : len(row)
            ]
            row[: len(found)] = np.where(found == UNKNOWN, 0, found + self.low)
        c = c.reshape(len(tokens), horizon, action) / self.scale
        return np.einsum("kh,bka->bha", dct_matrix(horizon), c).astype(np.float32)

    def save(self, folder: Path) -> None:
        """Write its files, where it has any, into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            write_bytes(folder / name, data)


def load(where: "str | Path") -> FastTokeniser:
    """The tokeniser in a folder, or dct:N. UserError: there is none, or it cannot be read."""
    text = str(where)
    if text.startswith("dct:"):
        if not text[4:].isdecimal() or not 0 < int(text[4:]) <= 1 << 15:
            raise UserError(f"dct:N needs N in 1 .. {1 << 15}, the largest coefficient, got {text!r}")
        n = int(text[4:])
        return FastTokeniser(text, 2 * n + 1, -n, n, SCALE, {})
    folder = Path(where)
    if absent := [name for name in (CONFIG, PAIRS) if not (folder / name).is_file()]:
        raise UserError(
            f"{folder} is no action tokeniser: it has no {' and no '.join(absent)}; give the folder of one "
            "(FAST), or dct:N"
        )
    try:
        c: dict[str, Any] = read_json(folder / CONFIG)
        low, scale, high = int(c["min_token"]), float(c["scale"]), c.get("max_token")
        if scale <= 0:
            raise ValueError(f"scale {scale}")
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(
            f"{folder / CONFIG} is not that of an action tokeniser: it needs min_token and scale > 0 ({e})"
        ) from None
    data = (folder / PAIRS).read_bytes()
    return _of_pairs(
        folder.name, data, low, None if high is None else int(high), scale, (folder / CONFIG).read_bytes()
    )


def _of_pairs(
    name: str, data: bytes, low: int, high: int | None, scale: float, config: bytes
) -> FastTokeniser:
    pairs = _library().Tokenizer
    try:
        made = pairs.from_buffer(data)
    except Exception as e:  # the library raises a bare Exception
        raise UserError(
            f"{name}/{PAIRS} is no tokenizer.json ({str(e).splitlines()[0][:120]}); copy it again, and not a "
            "Git LFS pointer"
        ) from None
    return FastTokeniser(
        name,
        made.get_vocab_size(),
        low,
        high,
        scale,
        {CONFIG: config, PAIRS: data},
        (lambda text: made.encode(text).ids, lambda ids: made.decode(ids, skip_special_tokens=False)),
    )


def train(chunks: Iterable[np.ndarray], size: int, scale: float = SCALE) -> FastTokeniser:
    """A tokeniser of at most `size` tokens for chunks like these, normalised [B,H,A] each; its pairs never
    split a coefficient.

    UserError: `size` has no room for the coefficients alone.
    """
    rows = [
        np.rint(scale * np.einsum("kh,bha->bka", dct_matrix(x.shape[1]), x.astype(np.float64))).astype(int)
        for x in chunks
    ]
    low, high = min(int(c.min()) for c in rows), max(int(c.max()) for c in rows)
    if high - low + 1 > size:
        raise UserError(
            f"the chunks have coefficients {low} .. {high}: more than {size} tokens; ask for more, or a "
            "smaller scale"
        )
    t = _library()
    made = t.Tokenizer(t.models.BPE())
    made.decoder = t.decoders.Fuse()
    trainer = t.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        max_token_length=10_000,
        initial_alphabet=[chr(i) for i in range(high - low + 1)],
    )
    made.train_from_iterator(
        ("".join(map(chr, row)) for c in rows for row in c.reshape(len(c), -1) - low), trainer
    )
    config = {"min_token": low, "max_token": high, "scale": scale, "vocab_size": made.get_vocab_size()}
    return _of_pairs("fast", made.to_str().encode(), low, high, scale, json.dumps(config).encode())


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MissingDependency(
            "an action tokeniser with byte pairs needs tokenizers: pip install 'robo_rl[vla]'; dct:N needs "
            "nothing"
        ) from None
    return tokenizers
