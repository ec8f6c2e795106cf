"""Versioned weights between a learner and the rollout processes of one host: one mapped file, two halves.

File, little-endian words of 8 bytes: magic, schema hash, schema length, start of the halves, size of a half;
then, each on a cache line of its own, the version register (2 · version + half, or EMPTY) and the sequence
lock of each half; at 4096 the schema as JSON, then the halves. A half is [version, combined hash, hash per
tensor, tensors]: one copy takes the weights together with the version they are.

publish: lock of the free half odd -> tensors, hashes, version -> lock even -> register (one store, last).
fetch:   register -> lock -> copy -> lock unchanged? -> hashes. A copy that was overtaken is made again.

The stores must become visible in program order, as they do on x86; where they may not, `verify="always"`
tells.
Source: publication protocol of SparseRL-Sync (2605.07330), AstraFlow and RLinf; the sequence lock is Linux's.
"""

import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from robo_rl.errors import UserError
from robo_rl.files import FILE, parse_json
from robo_rl.lora import moving

if TYPE_CHECKING:
    from robo_rl.policies import Policy

Verify = Literal["always", "never"] | int

MAGIC = int.from_bytes(b"RRLWTS01", "little")
PAGE, LINE = 4096, 64  # bytes
REGISTER, LOCKS = 8, (16, 24)  # words
# bytes at once: from some 100 MB up memcpy may take a path that is 2.5 x slower on pages of 4 KB
COPY = 1 << 24
EMPTY = 2**64 - 1
LAST = 2**62  # versions are below it


# ---- what a set of weights is ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """Names in order, with dtype, shape and offset [B] of each tensor in a blob of `size` bytes."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int
    schema: bytes  # JSON of names, dtypes and shapes
    hash: int  # xxh3 of the schema


def layout_of(tensors: dict[str, Tensor]) -> Layout:
    """The layout of these tensors, by name: the order of the dict does not matter."""
    return _layout([(n, tensors[n].dtype, tuple(tensors[n].shape)) for n in sorted(tensors)])


def _layout(rows: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> Layout:
    offsets, at = [], _up(8 * (2 + len(rows)), LINE)
    for _, dtype, shape in rows:
        offsets.append(at)
        at = _up(at + dtype.itemsize * math.prod(shape), LINE)
    names, dtypes, shapes = (
        tuple(n for n, *_ in rows),
        tuple(d for _, d, _ in rows),
        tuple(s for *_, s in rows),
    )
    schema = json.dumps([[n, str(d).removeprefix("torch."), list(s)] for n, d, s in rows]).encode()
    return Layout(names, dtypes, shapes, tuple(offsets), at, schema, xxhash.xxh3_64_intdigest(schema))


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def views(blob: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Tensors by name that lie in a blob, uint8 [layout.size]."""
    out = {}
    for name, dtype, shape, at in zip(
        layout.names, layout.dtypes, layout.shapes, layout.offsets, strict=True
    ):
        out[name] = blob[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return out


def flat_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor, uint8 [B]: a view of its memory if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy()  # one element may have any stride


def digests(flats: list[np.ndarray], seed: int) -> tuple[list[int], int]:
    """xxh3 of each tensor's bytes, and of all these hashes together, seeded with the schema hash."""
    each = [xxhash.xxh3_64_intdigest(x.data) for x in flats]
    return each, xxhash.xxh3_64_intdigest(np.array(each, np.uint64).tobytes(), seed)


def content_hash(tensors: dict[str, Tensor]) -> int:
    """The combined hash of a set of weights: equal exactly if names, dtypes, shapes and bits are."""
    return digests([flat_bytes(tensors[n]) for n in sorted(tensors)], layout_of(tensors).hash)[1]


def check_layout(tensors: dict[str, Tensor], layout: Layout, who: str) -> None:
    """Raise UserError naming the first tensor that is missing, superfluous, or of another dtype or shape."""
    if len(tensors) == len(layout.names) and all(
        (t := tensors.get(n)) is not None and t.dtype == d and t.shape == s
        for n, d, s in zip(layout.names, layout.dtypes, layout.shapes, strict=True)
    ):
        return
    want = {n: (d, s) for n, d, s in zip(layout.names, layout.dtypes, layout.shapes, strict=True)}
    have = {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    name = min(n for n in want.keys() | have.keys() if want.get(n) != have.get(n))
    say = [" ".join(map(str, x[name])) if name in x else "none" for x in (have, want)]
    raise UserError(
        f"{who}: tensor {name!r} is {say[0]}, the published weights have {say[1]}; "
        f"build the policy with the options of the run"
    )


def due(verify: Verify, count: int) -> bool:
    """Whether the `count`-th (from 0) is to be checked."""
    return verify == "always" or verify != "never" and count % int(verify) == 0


def check_verify(verify: Verify) -> None:
    if verify not in ("always", "never") and not (isinstance(verify, int) and verify > 0):
        raise UserError(f"verify must be 'always', 'never' or a number n > 0 (every n-th), got {verify!r}")


# ---- the file ----------------------------------------------------------------------------------------------


def _map(fd: int, path: Path, prot: int) -> tuple[mmap.mmap, memoryview, Layout, list[int]]:
    """Map a store -> (map, its header as words, layout, start of each half [B]); UserError if it is no sound
    store."""
    size = os.fstat(fd).st_size
    damaged = UserError(f"{path} is no sound store of weights; delete it and start the run again")
    if size < PAGE:
        raise damaged
    whole = mmap.mmap(fd, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), prot)
    words = memoryview(whole)[:PAGE].cast("Q")
    magic, schema_hash, length, start, half = words[:5]
    if magic != MAGIC or PAGE + length > start or start + 2 * half != size:
        raise damaged
    schema = whole[PAGE : PAGE + length]
    if xxhash.xxh3_64_intdigest(schema) != schema_hash:
        raise damaged
    layout = _layout(
        [(n, getattr(torch, d), tuple(s)) for n, d, s in parse_json(schema, str(path), list, limit=FILE)]
    )
    if layout.size > half:
        raise damaged
    return whole, words, layout, [start, start + half]


_writers: "weakref.WeakSet[WeightWriter]" = weakref.WeakSet()


def _forget_writers() -> None:
    """In a forked child: let go of the inherited locks, or an orphan would keep the store locked."""
    for writer in list(_writers):
        writer.close()


os.register_at_fork(after_in_child=_forget_writers)


class WeightWriter:
    """The learner's end: the one process that publishes. Make it with `create` or `open`."""

    def __init__(self, fd: int, path: Path):
        # the descriptor that holds the lock; a map would keep the one it is made of
        self._fd, self._path = fd, path
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            whole, self._words, self.layout, starts = _map(other, path, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(other)
        memory = np.frombuffer(whole, np.uint8)
        self._halves = [memory[s : s + self.layout.size] for s in starts]
        self._heads = [h[: 8 * (2 + len(self.layout.names))].view(np.uint64) for h in self._halves]
        self._tensors = [list(views(torch.from_numpy(h), self.layout).values()) for h in self._halves]
        self._flats = [[flat_bytes(t) for t in ts] for ts in self._tensors]
        self._word = self._words[REGISTER]
        _writers.add(self)

    @classmethod
    def create(cls, path: "str | Path", tensors: dict[str, Tensor]) -> "WeightWriter":
        """A new store for weights like these, with nothing published yet.

        All the memory is claimed here, so that a full disk or a small /dev/shm is an error and no later
        crash. Raises UserError if the file exists (`open` goes on with it) or does not fit.
        """
        path, layout = Path(path), layout_of(tensors)
        temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        schema, half = layout.schema, _up(layout.size, PAGE)
        start = PAGE + _up(len(schema), PAGE)
        words = np.zeros(PAGE // 8, np.uint64)
        words[:5], words[REGISTER] = [MAGIC, layout.hash, len(schema), start, half], EMPTY
        temp.unlink(missing_ok=True)
        fd = -1
        try:
            fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, start + 2 * half)
            os.pwrite(fd, words.tobytes() + schema, 0)
            os.link(temp, path)  # unlike a rename it never replaces what another process made meanwhile
        except OSError as e:
            if fd >= 0:
                os.close(fd)
            if isinstance(e, FileExistsError):
                raise UserError(f"{path} exists; open it to go on, or delete it to start anew") from None
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise UserError(
                    f"no room for {(start + 2 * half) / 1e6:.0f} MB of weights in {path.parent}; "
                    f"enlarge it (docker run --shm-size=…) or use another folder"
                ) from e
            raise UserError(
                f"cannot make {path}: {e.strerror}; use a folder of your own on a local disk"
            ) from e
        finally:
            with contextlib.suppress(FileNotFoundError):
                temp.unlink()
        return cls(fd, path)

    @classmethod
    def open(cls, path: "str | Path", tensors: dict[str, Tensor]) -> "WeightWriter":
        """Go on with a store after a crash; what was published last is still there.

        Raises UserError if another process writes it, if these weights are of another kind, or if it is
        damaged.
        """
        path = Path(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise UserError(f"{path} does not exist; create it") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            writer = cls(fd, path)
            check_layout(tensors, writer.layout, str(path))
        except BlockingIOError:
            os.close(fd)
            raise UserError(f"another process publishes to {path}; one learner per store") from None
        except UserError:
            os.close(fd)
            raise
        if writer._word != EMPTY:
            half = writer._word & 1
            head, (each, all_) = writer._heads[half], digests(writer._flats[half], writer.layout.hash)
            if [*head] != [writer._word >> 1, all_, *each]:
                writer.close()
                raise UserError(f"{path} is damaged (its hash differs); delete it and start the run again")
        return writer

    @property
    def version(self) -> int:
        """The version published last; -1 before the first."""
        return -1 if self._word == EMPTY else self._word >> 1

    def publish(
        self, version: int, tensors: dict[str, Tensor], at: Callable[[str], None] = lambda point: None
    ) -> int:
        """Make these weights version `version` for all readers -> their combined hash.

        Whatever happens before the register moves, the previous version stays whole and readable. Publishing
        the current version once more does nothing if the weights are the same bits. `at` is called at the
        points "open", "copied", "hashed", "closed", "moved", for tests that die there.
        Raises UserError if the version goes backwards, is taken by other weights, or another writer was here.
        """
        check_layout(tensors, self.layout, "publish")
        current = self.version
        if not max(current, 0) <= version < LAST:
            raise UserError(f"version {version} cannot follow {current}: versions only grow")
        if self._words[REGISTER] != self._word:
            raise UserError(f"another process publishes to {self._path}; one learner per store")
        free = 0 if self._word == EMPTY else 1 - (self._word & 1)
        lock, head = LOCKS[free], self._heads[free]
        # odd, and new to a reader even after a crash left it odd
        self._words[lock] += 1 + self._words[lock] % 2
        at("open")
        with torch.no_grad():
            for mine, name in zip(self._tensors[free], self.layout.names, strict=True):
                mine.copy_(tensors[name])
        at("copied")
        each, all_ = digests(self._flats[free], self.layout.hash)
        head[:] = [version, all_, *each]
        at("hashed")
        self._words[lock] += 1
        at("closed")
        if version == current:
            if all_ != int(self._heads[1 - free][1]):
                raise UserError(
                    f"version {version} is published already with other weights; publish {version + 1}"
                )
            return all_
        self._words[REGISTER] = self._word = 2 * version + free
        at("moved")
        return all_

    def close(self) -> None:
        """Let another writer have the store. The file stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            gone: Any = None
            self._words = self._halves = self._heads = self._tensors = self._flats = gone  # unmaps
        _writers.discard(self)


class WeightReader:
    """A rollout process's end: two warm copies, *current*, that the policy's tensors lie in, and *standby*.

    fetch fills standby, at leisure or in a thread; swap, between two chunks, makes it current. The copy that
    was current is the next standby: nothing else may keep the policy's old tensors.
    """

    def __init__(self, path: "str | Path", verify: Verify = "always"):
        """verify: check the content hash of every copy, of none, or of every n-th."""
        check_verify(verify)
        path = Path(path)
        try:
            with open(path, "rb") as f:
                whole, self._words, self.layout, starts = _map(f.fileno(), path, mmap.PROT_READ)
        except FileNotFoundError:
            raise UserError(f"{path} does not exist; start the learner first") from None
        memory, size = np.frombuffer(whole, np.uint8), self.layout.size
        self._halves = [memory[s : s + size] for s in starts]
        self._blobs = [np.full(size, 0, np.uint8) for _ in range(2)]  # touched: no page faults later
        self._heads = [b[: 8 * (2 + len(self.layout.names))].view(np.uint64) for b in self._blobs]
        self._views = [views(torch.from_numpy(b), self.layout) for b in self._blobs]
        self._flats = [[flat_bytes(t) for t in v.values()] for v in self._views]
        self._verify: Verify = verify
        self._fetches = 0
        self._mine, self._ready = 0, False  # which blob is current; whether standby holds something newer
        self._target, self._slots = None, []
        self.current = -1  # version of the current copy, from its own head
        self.torn = 0  # copies that were overtaken or did not match their hash

    @classmethod
    def open(cls, path: "str | Path", verify: Verify = "always") -> "WeightReader":
        return cls(path, verify)

    def version(self) -> int:
        """The version published last, -1 before the first: one load, cheap enough to ask at every chunk."""
        word = self._words[REGISTER]
        return -1 if word == EMPTY else word >> 1

    @property
    def standby(self) -> int:
        """The version that the next swap brings."""
        return int(self._heads[1 - self._mine][0]) if self._ready else self.current

    @property
    def weights(self) -> dict[str, Tensor]:
        """The current copy by name; valid until the swap after the next fetch."""
        return self._views[self._mine]

    def first(self, limit: float = 60.0) -> int:
        """`fetch`, again until a whole copy came -> its version. UserError after `limit` [s]."""
        end = time.monotonic() + limit
        while (version := self.fetch()) is None:
            if time.monotonic() > end:
                raise UserError(f"no whole weights came within {limit:g} s: start the learner first")
            time.sleep(0.001)
        return version

    def fetch(self, attempts: int = 8) -> int | None:
        """Copy the newest version into standby -> it, or None if there is none newer than what is here.

        None also if `attempts` copies were all overtaken by the writer (`torn` counts them): ask again at the
        next chunk. Standby holds nothing then, and the current copy is as it was.
        """
        for _ in range(attempts):
            word = self._words[REGISTER]
            if word == EMPTY or word >> 1 <= self.standby:
                return None
            half, into = word & 1, 1 - self._mine
            self._ready = False
            before = self._words[LOCKS[half]]
            for s in range(0, self.layout.size, COPY):
                np.copyto(self._blobs[into][s : s + COPY], self._halves[half][s : s + COPY])
            head = self._heads[into]
            if before % 2 or self._words[LOCKS[half]] != before or int(head[0]) != word >> 1:
                self.torn += 1
                continue
            if due(self._verify, self._fetches):
                each, all_ = digests(self._flats[into], self.layout.hash)
                if [*head[1:]] != [all_, *each]:
                    self.torn += 1
                    continue
            self._fetches += 1
            self._ready = True
            return word >> 1
        return None

    def swap(self, target: "nn.Module | Policy | dict[str, Tensor]") -> int:
        """Make standby current and point the tensors of `target` at it -> the version it now acts with.

        A module keeps its parameters and buffers as objects, only their data move (with adapters, those that
        are no frozen weights); a dict gets new tensors. One
        reader serves one target. Without a fetch before, nothing changes. Raises UserError if it does not
        fit.
        """
        if self._target is None:
            self._slots = self._bind(target)
            self._target = target
        elif target is not self._target:
            raise UserError("this reader moves the weights of another policy; open a reader for each")
        if not self._ready:
            return self.current
        self._mine, self._ready = 1 - self._mine, False
        mine = self._views[self._mine]
        if isinstance(target, dict):
            target.update(mine)
        else:
            for slot, tensor in zip(self._slots, mine.values(), strict=True):
                slot.data = tensor
        self.current = int(self._heads[self._mine][0])
        return self.current

    def _bind(self, target: "nn.Module | Policy | dict[str, Tensor]") -> list[Tensor]:
        """The tensors of the target in the layout's order."""
        have = target if isinstance(target, dict) else moving(target, target.state_dict(keep_vars=True))
        have = {n: t for n, t in have.items() if isinstance(t, Tensor)}
        if isinstance(target, dict) and not have:
            return []
        check_layout(have, self.layout, "swap")
        if other := {str(t.device) for t in have.values()} - {"cpu"}:
            raise UserError(f"weights are swapped on the CPU, the policy is on {', '.join(sorted(other))}")
        return [have[n] for n in self.layout.names]
