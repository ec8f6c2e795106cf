"""Fragments in a mapped file: the hand-over between processes and the journal of a run are the same bytes.

A worker writes each decision into its slot and then counts it; whatever was counted survives the death of any process,
for the pages belong to the kernel. A slot is used again only once a checkpoint covers its fragment. (Against a power
cut only checkpoints are durable; a slot torn by one fails its checksum and is collected anew.)

File: one header row of int64 per slot, then the slots, each the columns of `robo_rl.rollout` one after the other.
Space is reserved when the file is made, so that a full disk is an error there and then.
"""

import errno
import json
import math
import mmap
import os
from pathlib import Path

import numpy as np
import xxhash

from robo_rl.errors import UserError
from robo_rl.rollout import Columns, Layout, column_shape

FIELDS = ("uid", "worker", "attempt", "granted", "made", "oldest", "state", "batch", "due", "rows", "beat", "sim_ns",
          "policy_ns", "wait_ns", "begin", "end", "checksum")
EMPTY, LEASED, SEALED, TAKEN = range(4)  # header state
ALIGN, PAGE = 64, 4096
FORMAT = 1


def slot_bytes(rows: Layout, decisions: int) -> int:
    """Bytes of one slot."""
    return sum(_size(k, row, dtype, decisions) for k, (row, dtype) in rows.items())


def _size(name: str, row: tuple[int, ...], dtype: np.dtype, decisions: int) -> int:
    return -(-math.prod(column_shape(name, row, decisions)) * dtype.itemsize // ALIGN) * ALIGN


def _geometry(layouts: list[Layout], decisions: int, count: int) -> tuple[int, int]:
    """(where the slots begin, bytes from one to the next): whole pages, room for any worker's layout."""
    start = -(-count * len(FIELDS) * 8 // PAGE) * PAGE
    return start, -(-max(slot_bytes(rows, decisions) for rows in layouts) // PAGE) * PAGE


def schema(layouts: list[Layout], decisions: int, count: int) -> dict:
    """What readers and writers must agree on, as plain JSON."""
    return {"format": FORMAT, "decisions": decisions, "count": count,
            "layouts": [[[k, list(row), np.dtype(dtype).str] for k, (row, dtype) in rows.items()] for rows in layouts]}


class Slots:
    """`count` slots, each large enough for `decisions` decisions of any worker's layout."""

    def __init__(self, path: Path, described: dict):
        self.path = path
        self.layouts = [{k: (tuple(row), np.dtype(d)) for k, row, d in rows} for rows in described["layouts"]]
        self.decisions, self.count = described["decisions"], described["count"]
        self.start, self.stride = _geometry(self.layouts, self.decisions, self.count)
        with open(path, "r+b") as f:  # a plain array: np.memmap makes every view of it ten times dearer
            self.bytes = np.frombuffer(mmap.mmap(f.fileno(), self.start + self.count * self.stride), np.uint8)
        self._views: dict[tuple[int, int], Columns] = {}
        head = self.bytes[:self.count * len(FIELDS) * 8].view(np.int64).reshape(self.count, len(FIELDS))
        self.head = {name: head[:, i] for i, name in enumerate(FIELDS)}

    @classmethod
    def create(cls, path: Path, layouts: list[Layout], decisions: int, count: int) -> "Slots":
        """Make the file, or open one of the same shape and keep what is in it."""
        want = schema(layouts, decisions, count)
        beside = path.with_suffix(".json")
        try:
            if path.exists() and beside.exists() and json.loads(beside.read_text()) == want:
                return cls(path, want)
        except ValueError:
            pass  # a torn description: the file is made anew
        path.parent.mkdir(parents=True, exist_ok=True)
        start, stride = _geometry(layouts, decisions, count)
        size = start + count * stride
        beside.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as e:
            path.unlink()
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise UserError(f"rollouts in flight need {size / 1e6:.0f} MB in {path.parent}, and the disk is full; "
                                "free some space, or use fewer --envs") from e
            raise
        finally:
            os.close(fd)
        beside.write_text(json.dumps(want))
        return cls(path, want)

    @classmethod
    def open(cls, path: Path) -> "Slots":
        return cls(path, json.loads(path.with_suffix(".json").read_text()))

    def columns(self, slot: int, worker: int) -> Columns:
        """Views [decisions,...] into a slot, laid out for a worker."""
        if (slot, worker) in self._views:
            return self._views[slot, worker]
        at, out = self.start + slot * self.stride, {}
        for k, (row, dtype) in self.layouts[min(worker, len(self.layouts) - 1)].items():  # who joins is like the last
            shape = column_shape(k, row, self.decisions)
            out[k] = self.bytes[at:at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            at += _size(k, row, dtype, self.decisions)
        self._views[slot, worker] = out
        return out

    def checksum(self, slot: int, worker: int, rows: int) -> int:
        """Hash of the first `rows` decisions of a slot."""
        h = xxhash.xxh3_64()
        for k, v in self.columns(slot, worker).items():
            if not k.startswith("final/"):  # mostly unwritten
                h.update(np.ascontiguousarray(v[:rows]))
        return h.intdigest() >> 1

    def close(self) -> None:
        """Let go of the mapping (views of it stay valid as long as they live)."""
        del self.bytes, self.head, self._views


def finite(columns: Columns, rows: int) -> str:
    """Name of the first column among the first `rows` decisions that holds a NaN or an infinity, or ""."""
    for k, v in columns.items():
        if k.startswith("final/") or v.dtype.kind != "f":
            continue
        part = v[:rows + k.startswith("obs/")]
        if not np.isfinite(np.sum(part, dtype=np.float64)):
            return k
    return ""
