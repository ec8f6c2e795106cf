"""Lossless sparse weight updates for thin links: what changed, bit for bit, as index gaps and new values.

A small step moves few bf16 weights into another cell. A tensor is sent as *same* (nothing changed), *sparse*
(gaps between changed elements, and their new bits) or *dense*, whichever arrives first over the link.
Elements are compared as integers, never as floats (-0.0 equals 0.0, NaN differs from itself), and
overwritten, never added or XORed, so that a delta applied twice is applied once. The hash is that of the
whole weights that must come out.

Message, little-endian: header, table (a row per tensor, by name), per tensor [gaps, wide gaps, values], each
padded to 8 bytes, then xxh3 of everything before.
Source: SparseRL-Sync, 2605.07330; its NaN as the mark of "unchanged" is not used, NaN can be a weight.
"""

import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from robo_rl.errors import UserError
from robo_rl.runtime.weights import Layout, Verify, check_verify, content_hash, due, flat_bytes, layout_of

SAME, SPARSE, DENSE = 0, 1, 2
FULL = -1  # base version of a delta that needs none
MAGIC = b"RRLDLT01"
# magic, schema hash, base version, new version, hash of the result, bytes in all
HEADER = struct.Struct("<8sQqqQQ")
ROW = np.dtype([("mode", "<u4"), ("gap", "<u4"), ("changed", "<u8"), ("wide", "<u8"), ("values", "<u8")])
BLOCK = 1 << 18  # words of 8 bytes compared at once: 2 MB of each copy
CHUNK = 1 << 16  # changes written at once
WIDE = {1: 0xFF, 2: 0xFFFF}  # by bytes of a gap: this one or more is in the list of wide gaps
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class BadDelta(ValueError):
    """A message that cannot be used; the receiver asks for the full weights."""


# ---- cost --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one core needs; the defaults are of a server core of 2023. Only ratios of about 2 matter."""

    compare: float = 1.0e-10  # s per byte of a tensor, to compare two copies
    copy: float = 1.2e-10  # s per byte sent dense, into the message and out of it
    change: float = 4.0e-8  # s per changed element, to find, pack, unpack and write it


def gap_bytes(rho: float) -> float:
    """Bytes per index at density `rho`: one or two, and four more for a wide gap."""
    wide = (1 - rho) ** 254
    return 1 + 4 * wide if wide * 64 < 1 else 2 + 4 * (1 - rho) ** 65534


def sparse_pays(
    size: int, itemsize: int, rho: float, link: float, costs: Costs, compared: bool = False
) -> bool:
    """Whether a tensor of `size` bytes arrives sooner sparse than dense, with a share `rho` of elements
    changed.

    sparse: size·compare + n·change + n·(itemsize + gap)/link, n = rho·size/itemsize
    dense:  size·copy + size/link
    link: [B/s]. compared: the comparison is done already and counts no more.
    """
    n = rho * size / itemsize
    sparse = (
        n * costs.change + n * (itemsize + gap_bytes(rho)) / link + (0 if compared else size * costs.compare)
    )
    return sparse < size * costs.copy + size / link


def sampled_density(base: np.ndarray, new: np.ndarray, runs: int = 8, length: int = 256) -> float:
    """Share of changed elements, from `runs` evenly spaced runs of elements."""
    step = len(base) // runs
    if step <= length:
        return float(np.mean(base != new)) if len(base) else 0.0
    a, b = (x[: runs * step].reshape(runs, step)[:, :length] for x in (base, new))
    return np.count_nonzero(a != b) / (runs * length)


# ---- finding changes ---------------------------------------------------------------------------------------


def elements(tensor: Tensor) -> np.ndarray:
    """The bits of a tensor as unsigned integers [numel] (complex128: two each); no copy if contiguous on the
    CPU."""
    return flat_bytes(tensor).view(UNSIGNED[min(tensor.dtype.itemsize, 8)])


def _changes(base: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices and new values of the elements that differ, of one block.

    The search narrows from groups of 32 bytes to words of 8 to elements: at each level about a tenth or more
    of the candidates are hits, where `flatnonzero` runs without mispredicted branches.
    """
    per, shift = 8 // base.itemsize, 3 - base.itemsize.bit_length() + 1
    whole = len(base) // (4 * per) * (4 * per)
    a, b = base[:whole].view(np.uint64), new[:whole].view(np.uint64)
    groups = (a != b).view(np.uint32)
    group = np.flatnonzero(groups != 0)
    k = np.flatnonzero(_take(groups, group).view(bool))
    word = _join(_take(group, k >> 2), k, 2)
    after = _take(b, word)
    k = np.flatnonzero(_take(a, word).view(base.dtype) != after.view(base.dtype))
    values = _take(after.view(base.dtype), k)
    index = _join(_take(word, k >> shift), k, shift)
    if whole < len(base):
        rest = whole + np.flatnonzero(base[whole:] != new[whole:])
        index, values = np.concatenate([index, rest]), np.concatenate([values, new[rest]])
    return index, values


def _take(a: np.ndarray, at: np.ndarray) -> np.ndarray:
    """a[at] for indices known to be inside: without the check of each."""
    return a.take(at, mode="clip")


def _join(high: np.ndarray, low: np.ndarray, bits: int) -> np.ndarray:
    """high · 2^bits + the last bits of `low`; both are written over."""
    high <<= bits
    low &= (1 << bits) - 1
    high |= low
    return high


def _block(base: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Changes of one block -> (gaps uint32, the first one from the block's start; values; first and last
    index)."""
    index, values = _changes(base, new)
    if not len(index):
        return np.empty(0, np.uint32), values, 0, 0
    gaps = np.empty(len(index), np.uint32)
    gaps[0] = index[0]
    np.subtract(index[1:], index[:-1], out=gaps[1:], casting="unsafe")
    return gaps, values, int(index[0]), int(index[-1])


@dataclass(frozen=True, slots=True)
class Part:
    """What is sent of one tensor. index of change i = gap 0 + … + gap i; a gap of all ones is the next of
    `wide`. Dense: no gaps, `values` are all elements (a view of the tensor: send it before it changes)."""

    mode: int
    gaps: np.ndarray  # uint8 or uint16 [changed]
    wide: np.ndarray  # uint32
    values: np.ndarray  # unsigned [changed]


def _dense(new: np.ndarray) -> Part:
    return Part(DENSE, np.empty(0, np.uint8), np.empty(0, np.uint32), new)


def _sparse(found: list[tuple[np.ndarray, np.ndarray, int, int]], starts: list[int]) -> Part:
    """Join the blocks of a tensor; gaps become uint8 where fewer than 1 in 64 is wide, else uint16."""
    last = 0
    for (gaps, _, first, final), start in zip(found, starts, strict=True):
        if len(gaps):
            gaps[0] = start + first - last
            last = start + final
    gaps, values, *_ = (
        found[0]
        if len(found) == 1
        else (np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found]))
    )
    narrow = np.count_nonzero(gaps >= WIDE[1]) * 64 < len(gaps)
    dtype = np.uint8 if narrow else np.uint16
    escape = WIDE[np.dtype(dtype).itemsize]
    wide = gaps[gaps >= escape]
    return Part(SPARSE, (np.minimum(gaps, escape) if len(wide) else gaps).astype(dtype), wide, values)


# ---- a delta -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delta:
    """From `base_version` (FULL: from nothing) to `new_version`; parts in the order of names."""

    schema: int
    base_version: int
    new_version: int
    result: int  # content hash of the whole weights that come out
    parts: tuple[Part, ...]

    @property
    def modes(self) -> list[str]:
        return [("same", "sparse", "dense")[p.mode] for p in self.parts]


def diff(
    base: dict[str, Tensor],
    new: dict[str, Tensor],
    base_version: int,
    new_version: int,
    *,
    link: float,
    costs: Costs = Costs(),
    result: int | None = None,
) -> Delta:
    """What turns `base` into `new`, each tensor in the mode that arrives first over a link of `link` [B/s].

    The density is sampled first, so that a tensor that will go dense is not compared in full; inf: all dense.
    result: the content hash of `new` if it is known (`WeightWriter.publish` returns it). Only sparse values
    are copied: use or pack the delta before `new` changes. One thread: NumPy holds the interpreter's lock in
    the searches that take the time, and a second thread only waited for it.
    """
    layout = layout_of(new)
    if layout_of(base).hash != layout.hash:
        raise UserError("a delta needs the same tensors in base and new; send the full weights")
    olds, news = ([elements(t[n]) for n in layout.names] for t in (base, new))
    tried = [
        sparse_pays(n.nbytes, n.itemsize, sampled_density(o, n), link, costs) and n.size < 2**32
        for o, n in zip(olds, news, strict=True)
    ]
    found: dict[int, list] = {}
    for i, n in enumerate(news):
        size = BLOCK * 8 // n.itemsize
        found[i] = [
            (s, _block(olds[i][s : s + size], n[s : s + size]))
            for s in range(0, len(n) if tried[i] else 0, size)
        ]
    parts = []
    for i, n in enumerate(news):
        changed = sum(len(b[0]) for _, b in found[i])
        rho = changed / max(n.size, 1)
        if not n.size or tried[i] and not changed:
            parts.append(Part(SAME, np.empty(0, np.uint8), np.empty(0, np.uint32), n[:0]))
        elif tried[i] and sparse_pays(n.nbytes, n.itemsize, rho, link, costs, compared=True):
            parts.append(_sparse([b for _, b in found[i]], [s for s, _ in found[i]]))
        else:
            parts.append(_dense(n))
    return Delta(
        layout.hash, base_version, new_version, content_hash(new) if result is None else result, tuple(parts)
    )


def full(new: dict[str, Tensor], new_version: int, result: int | None = None) -> Delta:
    """All of `new`, for a receiver that has nothing or missed something."""
    layout = layout_of(new)
    parts = tuple(_dense(elements(new[n])) for n in layout.names)
    return Delta(layout.hash, FULL, new_version, content_hash(new) if result is None else result, parts)


def _indices(part: Part, start: int, stop: int, wide: int, last: int) -> tuple[np.ndarray, int]:
    """Indices of changes start…stop -> (them, wide gaps used so far); `last` is the index before."""
    code = part.gaps[start:stop]
    gaps = code.astype(np.int64)
    if wide < len(part.wide):
        escaped = np.flatnonzero(code == WIDE[code.itemsize])
        gaps[escaped] = part.wide[wide : wide + len(escaped)]
        wide += len(escaped)
    gaps[0] += last
    return gaps.cumsum(out=gaps), wide


def apply(tensors: dict[str, Tensor], delta: Delta) -> None:
    """Overwrite what changed, in place (contiguous CPU tensors).

    BadDelta if it does not fit; where an index is out of range (a sender's defect: `from_bytes` has checked
    the bytes) some tensors are written by then.
    """
    layout = layout_of(tensors)
    if layout.hash != delta.schema:
        raise BadDelta("the delta is for other tensors")
    mine = [tensors[n] for n in layout.names]
    if any(t.device.type != "cpu" or not t.is_contiguous() for t in mine):
        raise UserError("a delta is applied to contiguous tensors on the CPU")
    for name, t, p in zip(layout.names, map(elements, mine), delta.parts, strict=True):
        counts = {SAME: (0, 0), SPARSE: (len(p.gaps), len(p.gaps)), DENSE: (0, t.size)}.get(p.mode)
        if counts != (len(p.gaps), len(p.values)) or p.values.dtype != t.dtype:
            raise BadDelta(f"tensor {name!r} of the delta does not fit")
        if p.mode == DENSE:
            t[:] = p.values
        wide, last = 0, 0
        try:
            for s in range(0, len(p.gaps), CHUNK):
                index, wide = _indices(p, s, s + CHUNK, wide, last)
                t[index] = p.values[s : s + CHUNK]
                last = index[-1]
        except (IndexError, ValueError):
            raise BadDelta(f"tensor {name!r} of the delta has an index out of range") from None


# ---- bytes -------------------------------------------------------------------------------------------------


def to_bytes(delta: Delta) -> np.ndarray:
    """The message of a delta, uint8 [B]."""
    table = np.zeros(len(delta.parts), ROW)
    sections: list[np.ndarray] = []
    for row, p in zip(table, delta.parts, strict=True):
        row["mode"], row["gap"] = p.mode | p.values.itemsize << 8, p.gaps.itemsize
        row["changed"], row["wide"], row["values"] = len(p.gaps), len(p.wide), len(p.values)
        sections += [p.gaps, p.wide, p.values]
    total = HEADER.size + table.nbytes + sum(_padded(s.nbytes) for s in sections) + 8
    out = np.empty(total, np.uint8)
    head = HEADER.pack(MAGIC, delta.schema, delta.base_version, delta.new_version, delta.result, total)
    at = HEADER.size
    out[:at] = np.frombuffer(head, np.uint8)
    for section in (table, *sections):
        n = section.nbytes
        out[at : at + n] = section.view(np.uint8)
        out[at + n : at + _padded(n)] = 0
        at += _padded(n)
    out[at:] = np.array([xxhash.xxh3_64_intdigest(out[:at].data)], "<u8").view(np.uint8)
    return out


def _padded(n: int) -> int:
    return -(-n // 8) * 8


def from_bytes(data: "bytes | bytearray | memoryview | np.ndarray", layout: Layout) -> Delta:
    """The delta of a message, as views of `data`. Raises BadDelta if it is cut, damaged or of other
    tensors."""
    raw = np.frombuffer(data, np.uint8)
    if len(raw) < HEADER.size + 8:
        raise BadDelta(f"the message is cut: {len(raw)} bytes")
    magic, schema, base, new, result, total = HEADER.unpack_from(raw.data)
    if magic != MAGIC:
        raise BadDelta("no weight delta, or one of another version of robo_rl")
    if total != len(raw):
        raise BadDelta(f"the message is cut: {len(raw)} of {total} bytes")
    if xxhash.xxh3_64_intdigest(raw[:-8].data) != int.from_bytes(raw[-8:].tobytes(), "little"):
        raise BadDelta("the message is damaged (its checksum differs)")
    if schema != layout.hash:
        raise BadDelta("the delta is for other tensors")
    at = HEADER.size + ROW.itemsize * len(layout.names)
    table, parts = raw[HEADER.size : at].view(ROW), []
    try:
        for row in table.tolist():
            mode, gap, *counts = row
            dtypes = (UNSIGNED[gap], np.uint32, UNSIGNED[mode >> 8])
            arrays = []
            for n, dtype in zip(counts, dtypes, strict=True):
                arrays.append(np.frombuffer(raw, dtype, n, at))
                at += _padded(arrays[-1].nbytes)
            parts.append(Part(mode & 255, *arrays))
    except (KeyError, ValueError):
        raise BadDelta("the table of the message does not fit its length") from None
    return Delta(schema, base, new, result, tuple(parts))


# ---- the two ends of a link --------------------------------------------------------------------------------


class DeltaSender:
    """The publisher's end: remembers what it sent last. A slow link skips versions: send only the newest."""

    def __init__(self, tensors: dict[str, Tensor], version: int, *, link: float, costs: Costs = Costs()):
        """link: [B/s]. The first message to a receiver is `full()`."""
        if not link > 0:
            raise UserError(f"link must be above 0 B/s, got {link}")
        self.version, self._link, self._costs = version, link, costs
        self._last = {
            n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()
        }

    def send(self, version: int, tensors: dict[str, Tensor], result: int | None = None) -> np.ndarray:
        """The message from the last version to this one, uint8 [B]. result: content hash of `tensors` if
        known."""
        if version <= self.version:
            raise UserError(f"version {version} cannot follow {self.version}: versions only grow")
        delta = diff(
            self._last, tensors, self.version, version, link=self._link, costs=self._costs, result=result
        )
        message = to_bytes(delta)
        apply(self._last, delta)
        self.version = version
        return message

    def full(self) -> np.ndarray:
        """The message with all of the last version, for a receiver that asked for it."""
        return to_bytes(full(self._last, self.version))


class DeltaReceiver:
    """A worker's end: `tensors` follow the messages in place.

    The tensors must not be acted with meanwhile. On a host of several workers one process receives and gives
    each version on by `WeightWriter.publish`: a receiver that dies half-way through a delta then harms
    nobody.
    """

    def __init__(self, tensors: dict[str, Tensor], verify: Verify = "always"):
        """verify: check the content hash after every message, after none, or after every n-th."""
        check_verify(verify)
        self.tensors, self.version, self.why = tensors, None, "nothing received yet"
        self._verify: Verify = verify
        self._layout, self._count = layout_of(tensors), 0

    def receive(
        self, data: "bytes | bytearray | memoryview | np.ndarray"
    ) -> Literal["applied", "old", "need_full"]:
        """Take one message.

        applied: `tensors` are whole and of `version` now. old: a repeated or late message, nothing was done.
        need_full: it could not be used, `why` says why; ask the sender for `full()`. `version` is None while
        the tensors are unusable.
        """
        try:
            delta = from_bytes(data, self._layout)
            if self.version is not None and delta.new_version <= self.version:
                return "old"
            if delta.base_version not in (FULL, self.version):
                raise BadDelta(f"the delta is from version {delta.base_version}, here is {self.version}")
            self.version = None  # whatever interrupts: half-written tensors have no version
            apply(self.tensors, delta)
            self._count += 1
            if due(self._verify, self._count - 1) and content_hash(self.tensors) != delta.result:
                raise BadDelta(f"version {delta.new_version} came out with another hash")
        except BadDelta as e:
            self.why = str(e)
            return "need_full"
        self.version = delta.new_version
        return "applied"
