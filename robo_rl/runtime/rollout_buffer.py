"""The rollout buffer: fragments in slots of a mapped file, which is the hand-over between processes and the
journal of a run.

A worker writes each decision into its slot, then its checksum, and then counts it; whatever was counted
survives the death of any process, for the pages belong to the kernel. A slot is used again only once a
checkpoint covers its fragment.

After a power cut a page may hold what was written, zeros, or what was there before. Each lease draws a salt,
and the checksum of decision t is seeded with the salt and t, so that what an earlier lease wrote does not
pass either. A learner that resumes compares the checksums of every slot: of a fragment in progress the
decisions before the first that is torn stay, a finished fragment that is torn is collected anew
(`robo_rl.runtime.worker_pool`).

File: one header row of int64 per slot, then the slots, each the columns of `robo_rl.rollout` one after the
other and an int64 checksum for each decision. Space is reserved when the file is made, so that a full disk is
an error there and then.
"""

import errno
import json
import math
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from robo_rl.errors import UserError
from robo_rl.files import private_file, private_folder, read_json
from robo_rl.rollout import FINAL, OBS, Columns, Layout, column_shape

FIELDS = (
    "uid",
    "worker",
    "attempt",
    "granted",
    "made",
    "oldest",
    "state",
    "batch",
    "due",
    "rows",
    "beat",
    "sim_ns",
    "policy_ns",
    "wait_ns",
    "begin",
    "end",
    "salt",
    "since",
    "place",
    "checksum",
    "members",
    "start",
)
# what a seal vouches for
SEALED_FIELDS = ("uid", "worker", "granted", "made", "oldest", "due", "rows", "salt", "members", "start")
EMPTY, LEASED, SEALED, TAKEN = range(4)  # header state
ALIGN, PAGE = 64, 4096
FORMAT = 3


@dataclass(frozen=True, slots=True)
class Lease:
    """What a worker may do next: `rows` decisions at most, of which `made` are done (by one that died)."""

    uid: int
    slot: int
    rows: int
    made: int
    due: int
    salt: int = 0  # of the checksums of its decisions
    members: int = 0  # of a group whose size is decided; 0: as many as every group has
    start: int = 0  # of such a group


def slot_bytes(rows: Layout, decisions: int) -> int:
    """Bytes of one slot: its columns and the checksums of its decisions."""
    return _columns_bytes(rows, decisions) + -(-8 * decisions // ALIGN) * ALIGN


def _columns_bytes(rows: Layout, decisions: int) -> int:
    return sum(_size(k, row, dtype, decisions) for k, (row, dtype) in rows.items())


def _size(name: str, row: tuple[int, ...], dtype: np.dtype, decisions: int) -> int:
    return -(-math.prod(column_shape(name, row, decisions)) * dtype.itemsize // ALIGN) * ALIGN


def _geometry(layouts: list[Layout], decisions: int, count: int) -> tuple[int, int]:
    """(where the slots begin, bytes from one to the next): whole pages, room for any worker's layout."""
    start = -(-count * len(FIELDS) * 8 // PAGE) * PAGE
    return start, -(-max(slot_bytes(rows, decisions) for rows in layouts) // PAGE) * PAGE


def schema(layouts: list[Layout], decisions: int, count: int) -> dict:
    """What readers and writers must agree on, as plain JSON."""
    return {
        "format": FORMAT,
        "decisions": decisions,
        "count": count,
        "layouts": [
            [[k, list(row), np.dtype(dtype).str] for k, (row, dtype) in rows.items()] for rows in layouts
        ],
    }


class RowSums:
    """Checksums of single decisions, of contiguous columns that stay where they are in memory.

    Decision t covers row t of every column, the observation after it (row 0 also the first), and the last
    observations of the envs whose episodes ended in it.
    """

    def __init__(self, columns: Columns):
        flat = {k: v.reshape(len(v), -1).view(np.uint8) for k, v in columns.items() if v[0].size}
        self.rows = [v for k, v in flat.items() if not k.startswith((OBS, FINAL))]
        self.obs = [v for k, v in flat.items() if k.startswith(OBS)]
        self.final, self.done = (
            [v for k, v in columns.items() if k.startswith(FINAL)],
            columns["done"].view(np.uint8),
        )

    def of(self, t: int, salt: int) -> int:
        """63 bits of decision t, xxh3 seeded with (salt, t)."""
        h = xxhash.xxh3_64(seed=(salt + t) & 2**64 - 1)
        for v in self.rows:
            h.update(v[t])
        for v in self.obs:
            h.update(v[t + 1])
            if t == 0:
                h.update(v[0])
        ended = self.done[t] != 0  # a torn byte is any number
        if self.final and ended.any():
            for v in self.final:
                h.update(np.ascontiguousarray(v[t][ended]).data)
        return h.intdigest() >> 1


class RolloutBuffer:
    """`count` slots, each large enough for `decisions` decisions of any worker's layout."""

    def __init__(self, path: Path, described: dict):
        self.path = path
        self.layouts = [{k: (tuple(row), np.dtype(d)) for k, row, d in rows} for rows in described["layouts"]]
        self.decisions, self.count = described["decisions"], described["count"]
        self.start, self.stride = _geometry(self.layouts, self.decisions, self.count)
        with open(path, "r+b") as f:  # a plain array: np.memmap makes every view of it ten times dearer
            self.bytes = np.frombuffer(mmap.mmap(f.fileno(), self.start + self.count * self.stride), np.uint8)
        self._views: dict[tuple[int, int], tuple[Columns, RowSums, np.ndarray]] = {}
        head = self.bytes[: self.count * len(FIELDS) * 8].view(np.int64).reshape(self.count, len(FIELDS))
        self.head = {name: head[:, i] for i, name in enumerate(FIELDS)}

    @classmethod
    def create(cls, path: Path, layouts: list[Layout], decisions: int, count: int) -> "RolloutBuffer":
        """Make the file, or open one of the same shape and keep what is in it."""
        want = schema(layouts, decisions, count)
        beside = path.with_suffix(".json")
        try:
            if path.exists() and beside.exists() and read_json(beside) == want:
                return cls(path, want)
        except ValueError:
            pass  # a torn description: the file is made anew
        private_folder(path.parent)
        start, stride = _geometry(layouts, decisions, count)
        size = start + count * stride
        beside.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        fd = private_file(path)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as e:
            path.unlink()
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise UserError(
                    f"rollouts in flight need {size / 1e6:.0f} MB in {path.parent}, and the disk is full; "
                    "free some space, or use fewer --envs"
                ) from e
            raise
        finally:
            os.close(fd)
        with open(beside, "w", opener=private_file) as f:
            f.write(json.dumps(want))
        return cls(path, want)

    @classmethod
    def open(cls, path: Path) -> "RolloutBuffer":
        return cls(path, read_json(path.with_suffix(".json")))

    def columns(self, slot: int, worker: int) -> Columns:
        """Views [decisions,...] into a slot, laid out for a worker."""
        return self._view(slot, worker)[0]

    def _view(self, slot: int, worker: int) -> tuple[Columns, RowSums, np.ndarray]:
        if (slot, worker) in self._views:
            return self._views[slot, worker]
        at, out = self.start + slot * self.stride, {}
        # who joins is like the last
        for k, (row, dtype) in self.layouts[min(worker, len(self.layouts) - 1)].items():
            shape = column_shape(k, row, self.decisions)
            out[k] = self.bytes[at : at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            at += _size(k, row, dtype, self.decisions)
        self._views[slot, worker] = out, RowSums(out), self.bytes[at : at + 8 * self.decisions].view(np.int64)
        return self._views[slot, worker]

    def begin(
        self, slot: int, uid: int, worker: int, granted: int, due: int, members: int = 0, start: int = 0
    ) -> None:
        """The header of a new lease, with a salt of its own."""
        for name, value in (
            ("rows", 0),
            ("oldest", -1),
            ("made", 0),
            ("uid", uid),
            ("worker", worker),
            ("granted", granted),
            ("due", due),
            ("batch", -1),
            ("sim_ns", 0),
            ("policy_ns", 0),
            ("wait_ns", 0),
            ("begin", 0),
            ("salt", secrets.randbits(62)),
            ("since", -1),
            ("members", members),
            ("start", start),
            ("state", LEASED),
        ):
            self.head[name][slot] = value  # the state last

    def sums(self, slot: int, worker: int) -> np.ndarray:
        """The checksums [decisions] of a slot, as they were written."""
        return self._view(slot, worker)[2]

    def sign(self, slot: int, worker: int, t: int, rows: int = 1) -> None:
        """Write the checksums of decisions t … t + `rows` - 1, which are whole."""
        _, of, sums = self._view(slot, worker)
        salt = int(self.head["salt"][slot])
        for i in range(t, t + rows):
            sums[i] = of.of(i, salt)

    def sound(self, slot: int, worker: int, rows: int) -> int:
        """How many of the first `rows` decisions come before the first whose checksum differs."""
        _, of, sums = self._view(slot, worker)
        salt = int(self.head["salt"][slot])
        return next((t for t in range(rows) if of.of(t, salt) != sums[t]), rows)

    def checksum(self, slot: int, worker: int) -> int:
        """Hash of what a seal vouches for: the fields of the header that describe a fragment and its
        decisions' checksums."""
        h = xxhash.xxh3_64(np.array([self.head[k][slot] for k in SEALED_FIELDS]).tobytes())
        h.update(self.sums(slot, worker)[: int(self.head["rows"][slot])].data)
        return h.intdigest() >> 1

    def is_sealed_whole(self, slot: int, worker: int) -> bool:
        """Whether a finished fragment is as it was when it was sealed."""
        rows = int(self.head["rows"][slot])
        return (
            0 <= rows <= self.decisions
            and self.checksum(slot, worker) == int(self.head["checksum"][slot])
            and self.sound(slot, worker, rows) == rows
        )

    def close(self) -> None:
        """Let go of the mapping (views of it stay valid as long as they live)."""
        del self.bytes, self.head, self._views


def finite(columns: Columns, rows: int) -> str:
    """Name of the first column that holds a NaN or an infinity in the first `rows` decisions, or "".

    The observation after the last decision counts, and of the last observations those of episodes that ended.
    """
    for k, v in columns.items():
        if v.dtype.kind != "f":
            continue
        part = v[:rows][columns["done"][:rows]] if k.startswith(FINAL) else v[: rows + k.startswith(OBS)]
        if not np.isfinite(np.sum(part, dtype=np.float64)):
            return k
    return ""
