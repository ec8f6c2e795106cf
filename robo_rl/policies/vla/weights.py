"""Safetensors checkpoints of billions of parameters: headers alone, or tensor by tensor straight to a device.

A checkpoint is one file, or a folder with `model.safetensors`, with `model.safetensors.index.json` and its
shards, with `policy.safetensors` (a checkpoint of a run), or with one file of another name. Whatever is wrong
with it is one line (UserError): an absent or truncated shard, an index that disagrees, a key too many or too
few.
"""

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from robo_rl.errors import UserError
from robo_rl.files import parse_json, read_json, replacing, require_free

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TRAINED = "policy.safetensors"  # of a checkpoint of a run
HEADER = 100 << 20  # bytes of a header at most, as safetensors itself allows
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BUFFER = 16 << 20  # bytes copied at a time
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """Of its bytes in the file."""
    turned: bool = False
    """Whether the matrix is to be copied transposed."""

    @property
    def count(self) -> int:
        """Entries."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """As stored."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """Headers of a checkpoint: its tensors by key, and the metadata of its first file."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]

    @property
    def files(self) -> list[Path]:
        """Its safetensors files, in order."""
        return sorted({t.file for t in self.tensors.values()})

    def read(
        self, keys: set[str] | None = None, device: "torch.device | str" = "cpu"
    ) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor on `device`) one after the other, file by file; all of them, or `keys`."""
        for file in self.files:
            with safe_open(file, framework="pt", device=str(device)) as f:
                for key in f.keys():  # noqa: SIM118 - no dictionary
                    if keys is None or key in keys:
                        yield key, f.get_tensor(key)


def _header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Header of one safetensors file, checked against the file's size."""
    broken = f"{file} is no whole safetensors file"
    try:
        size = file.stat().st_size
        with open(file, "rb") as f:
            front = f.read(8)
            if front == b"version ":
                raise UserError(f"{file} is a pointer of Git LFS, not the weights: git lfs pull fetches them")
            length = struct.unpack("<Q", front)[0] if len(front) == 8 else HEADER + 1
            if length > min(HEADER, size - 8):
                raise UserError(f"{broken}: it has {size} bytes, fewer than its header alone; fetch it again")
            text = f.read(length)
    except FileNotFoundError:
        raise UserError(f"{file} does not exist") from None
    header = parse_json(text, f"the header of {file}", limit=HEADER, remedy="fetch the file again")
    metadata = header.pop("__metadata__", {})
    tensors, end = {}, 0
    for key, entry in header.items():
        try:
            shape, (a, b) = tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
            dtype = DTYPES[entry["dtype"]]
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{broken}: what its header says of {key[:80]!r} is not read here ({str(entry)[:80]})"
            ) from None
        if b - a != math.prod(shape) * dtype.itemsize:
            raise UserError(
                f"{broken}: {key[:80]!r} of shape {list(shape)} has {b - a} bytes; fetch it again"
            )
        tensors[key], end = TensorInfo(file, shape, dtype, 8 + length + a), max(end, b)
    if 8 + length + end != size:
        raise UserError(
            f"{broken}: it has {size} bytes and its header speaks of {8 + length + end}; fetch it again"
        )
    return tensors, metadata


def open_checkpoint(path: "str | Path") -> Checkpoint:
    """The headers of a file or folder; no weight is read. UserError: nothing there, or not whole."""
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"{path} does not exist; give a .safetensors file or a folder with {SINGLE} or {INDEX}"
            f"{fetch(path)}"
        )
    if path.is_file():
        return Checkpoint(path, *_header(path))
    if (path / INDEX).exists():
        return _sharded(path)
    for name in (SINGLE, TRAINED):
        if (path / name).exists():
            return Checkpoint(path, *_header(path / name))
    files = sorted(path.glob("*.safetensors"))
    if not files and (below := _saved_by_lerobot(path)):
        raise UserError(f"{path} has no weights itself; LeRobot saved them in {below}: give this folder")
    if (path / "checkpoints").is_dir() and not files:
        raise UserError(f"{path} is a run: name one of its checkpoints, {path}/checkpoints/NAME")
    if len(files) != 1:
        raise UserError(
            f"{path} has neither {SINGLE} nor {INDEX}, and {len(files)} other .safetensors files; name the "
            "file"
        )
    return Checkpoint(path, *_header(files[0]))


def fetch(path: "str | Path") -> str:
    """What to add where `path` is not there and may be a model's name on the Hugging Face hub."""
    name = re.fullmatch(r"([\w.-]+)/([\w.-]+)", str(path))
    if not name or Path(name[1]).exists():
        return ""
    return f". Nothing is downloaded: hf download {path} --local-dir {name[2]}, then give {name[2]}"


def _saved_by_lerobot(path: Path) -> Path | None:
    """The newest folder of weights below an output folder of LeRobot's training, or one of its
    checkpoints."""
    for pattern in (".", "checkpoints/last", "last", "checkpoints/*", "*"):
        found = sorted(p.parent for p in path.glob(f"{pattern}/pretrained_model/*.safetensors"))
        if found:
            return found[-1]
    return None


def _sharded(path: Path) -> Checkpoint:
    where = read_json(path / INDEX, remedy="fetch it again").get("weight_map")
    if not isinstance(where, dict) or not all(
        isinstance(f, str) and Path(f).name == f for f in where.values()
    ):
        raise UserError(f"{path / INDEX} has no weight_map from keys to files of its folder; fetch it again")
    names = sorted(set(where.values()))
    absent = [n for n in names if not (path / n).is_file()]
    if absent:
        raise UserError(
            f"{path / INDEX} names {len(absent)} of {len(names)} shards that are not there: "
            f"{', '.join(absent[:4])}{' …' if len(absent) > 4 else ''}; fetch them"
        )
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for name in names:
        inside, more = _header(path / name)
        metadata |= more
        wrong = [k for k in inside if where.get(k) != name] + [
            k for k, f in where.items() if f == name and k not in inside
        ]
        if wrong:
            raise UserError(
                f"{path / name} and {INDEX} disagree on {len(wrong)} keys, the first {wrong[0][:80]!r}; "
                "fetch both again"
            )
        tensors |= inside
    return Checkpoint(path, tensors, metadata)


Zeros = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor of zeros


def write_checkpoint(
    path: Path, tensors: Mapping[str, "TensorInfo | Zeros"], metadata: Mapping[str, str]
) -> None:
    """Write one safetensors file, whole or not at all, by copying bytes: of a tensor of another file, or
    zeros of (shape, dtype).

    The memory it takes is a copy buffer. UserError: the disk is full, or no place to write.
    """
    order = sorted(tensors, key=lambda k: (-_kind(tensors[k])[1].itemsize, k))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key in order:
        shape, dtype = _kind(tensors[key])
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    require_free(path, 8 + len(text) + end)
    with replacing(path) as temp, open(temp, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for key in order:
            _copy(tensors[key], out)


def _kind(what: "TensorInfo | Zeros") -> Zeros:
    return (
        (what.shape[::-1] if what.turned else what.shape, what.dtype)
        if isinstance(what, TensorInfo)
        else what
    )


def _copy(what: "TensorInfo | Zeros", out: BinaryIO) -> None:
    if not isinstance(what, TensorInfo):
        out.write(bytes(math.prod(what[0]) * what[1].itemsize))
        return
    with open(what.file, "rb") as f:
        f.seek(what.start)
        if what.turned:
            matrix = np.frombuffer(f.read(what.bytes), np.dtype(f"V{what.dtype.itemsize}")).reshape(
                what.shape
            )
            out.write(np.ascontiguousarray(matrix.T).tobytes())
            return
        left = what.bytes
        while left:
            part = f.read(min(left, BUFFER))
            if not part:
                raise UserError(f"{what.file} became shorter while it was read; fetch it again")
            out.write(part)
            left -= len(part)


def metadata_json(metadata: dict[str, str], name: str) -> dict:
    """What is said as JSON under `name` in a file's metadata; {} where nothing is."""
    text = metadata.get(name, "")
    return parse_json(text, f"{name} of the metadata") if text else {}


def as_metadata(**entries: object) -> dict[str, str]:
    """Metadata of a safetensors file: each entry as JSON."""
    return {name: json.dumps(value) for name, value in entries.items()}
