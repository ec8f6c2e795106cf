"""Tensors that stay in their safetensors files until somebody asks for rows of them, in one file or split by
rows over several."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from robo_rl.errors import UserError

PIECE = 1 << 24  # bytes read at once


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose rows lie in files, in order. pieces: (file, its name there, how many rows); of a scalar
    one piece of 0 rows."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[Path, str, int], ...]

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows begin to end, all that is read. UserError: a file is not there or another one."""
        out, at = [], 0
        for file, name, count in self.pieces:
            low, high = max(begin, at) - at, min(end, at + count) - at
            if low < high or not out and at + count >= end:  # no rows have a type and a width too
                out.append(_read(file, name, slice(low, max(low, high))))
            at += count
        return torch.cat(out) if len(out) > 1 else out[0]

    def whole(self) -> Tensor:
        """All of it."""
        return (
            self.rows(0, self.shape[0]) if self.shape else _read(self.pieces[0][0], self.pieces[0][1], None)
        )


def _read(file: Path, name: str, rows: slice | None) -> Tensor:
    try:
        with safe_open(file, framework="pt") as f:
            return (f.get_tensor(name) if rows is None else f.get_slice(name)[rows]).clone()
    except (OSError, SafetensorError) as e:
        raise UserError(f"{file} cannot be read ({e})") from e


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, none of them read. UserError: it is none."""
    try:
        with safe_open(file, framework="pt") as f:
            shapes = {k: tuple(f.get_slice(k).get_shape()) for k in f.keys()}  # noqa: SIM118 - no dictionary
    except (OSError, SafetensorError) as e:
        raise UserError(f"{file} cannot be read ({e})") from e
    return {k: StoredTensor(shape, ((file, k, shape[0] if shape else 0),)) for k, shape in shapes.items()}


def resolved(tree: Any) -> Any:
    """A tree of dicts and lists with whole tensors in place of stored ones."""
    if isinstance(tree, StoredTensor):
        return tree.whole()
    if isinstance(tree, dict):
        return {k: resolved(v) for k, v in tree.items()}
    return [resolved(v) for v in tree] if isinstance(tree, list) else tree


def split_rows(n: int, world: int) -> list[tuple[int, int]]:
    """(first row, last + 1) of each of `world` ranks, as `torch.chunk` and FSDP2 split n rows."""
    size = -(-n // world) if n else 0
    return [(min(n, k * size), min(n, (k + 1) * size)) for k in range(world)]


def file_crc(file: Path) -> int:
    """CRC-32 of a file, read piece by piece."""
    crc = 0
    with open(file, "rb") as f:
        while piece := f.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return crc
