"""Tensors that stay in their safetensors files until somebody asks for rows of them, in one file or split by
rows over several."""

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from robo_rl.errors import UserError

PIECE = 1 << 24  # bytes read at once
TYPES = {  # as safetensors names them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> int:
    """Write safetensors of tensors on any device, fsynced -> the file's CRC-32. One tensor after another is
    written from where it lies: a state of gigabytes is not copied in memory."""
    at, head = 0, {}
    for name, x in tensors.items():
        head[name] = {"dtype": TYPES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    crc = 0
    with open(file, "wb") as f:

        def put(piece: bytes | memoryview) -> None:
            nonlocal crc
            f.write(piece)
            crc = zlib.crc32(piece, crc)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for x in tensors.values():
            flat = x.detach().cpu().reshape(-1)
            if flat.stride() != (1,):  # of one number, any stride is contiguous
                flat = flat.clone(memory_format=torch.contiguous_format)
            put(flat.view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())
    return crc


def file_crc(file: Path) -> int:
    """CRC-32 of a file, read piece by piece."""
    crc = 0
    with open(file, "rb") as f:
        while piece := f.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return crc
