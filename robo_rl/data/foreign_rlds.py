"""RLDS data sets (Open X-Embodiment, what OpenVLA learns from) as `ForeignData`, without TensorFlow.

    NAME/1.0.0/features.json                         the tree of an episode's features
    NAME/1.0.0/NAME-train.tfrecord-00000-of-00032    records: an episode each, a tf.train.Example

    record    uint64 length | uint32 masked CRC-32C of it | data | uint32 masked CRC-32C of the data
    Example   1: Features { 1: map<string, Feature> }
    Feature   1: bytes { 1: … } | 2: floats { 1: packed float32 } | 3: integers { 1: packed varints }

A feature `steps/observation/image` holds all T rows of an episode behind each other. Files are mapped into
memory: an episode is read when it is asked for. Every row is kept, also that of `is_last`, whose action the
format does not define.
Formats: https://github.com/google-research/rlds, https://www.tensorflow.org/tutorials/load_data/tfrecord,
tensorflow/core/example/feature.proto.
"""

import functools
import importlib.util
import math
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.data.foreign import ENCODED, ForeignData, ForeignEpisode, with_steps
from robo_rl.errors import MissingDependency, UserError
from robo_rl.files import read_json

RECORDS = re.compile(r".*\.tfrecord(-\d+-of-\d+)?")
INTEGERS = ("uint8", "int8", "uint16", "int16", "int32", "int64", "uint32", "uint64")
NUMBERS = ("float32", "float64", "bool", *INTEGERS)
INSTRUCTION = ("language_instruction", "observation/natural_language_instruction", "observation/instruction")
STEPS = "steps/"
LARGEST = 1 << 32  # bytes of a record


@dataclass(frozen=True, slots=True)
class Leaf:
    """A feature of every step: shape of a row, type of its numbers; `kind`: numbers, picture or text."""

    shape: tuple[int, ...]
    dtype: str
    kind: str


def is_rlds(path: Path) -> bool:
    if path.is_dir():
        return bool(folders(path))
    return path.is_file() and RECORDS.fullmatch(path.name) is not None


def folders(path: Path) -> list[Path]:
    """The folder itself, or those of its versions, that have features.json."""
    return [p for p in (path, *sorted(path.glob("*/"))) if (p / "features.json").is_file()][:1]


def read_rlds(paths: Sequence[Path]) -> ForeignData:
    """All episodes of the records of folders, or of single files of them."""
    if importlib.util.find_spec("google_crc32c") is None:
        raise MissingDependency("RLDS data sets need a checksum: pip install 'robo_rl[formats]'")
    episodes: list[ForeignEpisode] = []
    for path in paths:
        folder = folders(path)[0] if path.is_dir() else path.parent
        leaves = read_leaves(folder / "features.json")
        files = sorted(p for p in folder.iterdir() if RECORDS.fullmatch(p.name)) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{folder} has features.json and no files of records (*.tfrecord-…)")
        for file in files:
            episodes += episodes_of(file, leaves)
    episodes = with_steps("RLDS", episodes)
    columns = episodes[0].columns
    low = [k for k, shape in columns.items() if k.startswith("observation/") and shape != ENCODED]
    state = [k for k in low if k in ("observation/state", "observation/proprio")][:1] or low
    views = [k for k, shape in columns.items() if k.startswith("observation/") and shape == ENCODED]
    return ForeignData(
        "RLDS",
        episodes,
        tuple(state),
        tuple(k for k in columns if k == "action" or k.startswith("action/")),
        {k.split("/")[-1]: k for k in views},
        reward="reward" if "reward" in columns else "",
        terminal="is_terminal" if "is_terminal" in columns else "",
    )


def read_leaves(path: Path) -> dict[str, Leaf]:
    """The features of a step, by their paths in it."""
    if not path.is_file():
        raise UserError(f"{path} is missing: it says what the records beside it hold")
    out: dict[str, Leaf] = {}

    def walk(node: dict, name: str) -> None:
        if (inner := node.get("featuresDict")) is not None:
            for key, child in inner["features"].items():
                walk(child, f"{name}/{key}" if name else key)
        elif (sequence := node.get("sequence")) is not None and name == "steps":
            walk(sequence["feature"], name)
        elif (leaf := _leaf(node)) is not None and name.startswith(STEPS):
            out[name.removeprefix(STEPS)] = leaf

    try:
        walk(read_json(path), "")
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise UserError(f"{path} does not describe episodes with steps ({e!r})") from None
    if not out:
        raise UserError(f"{path} does not describe episodes with steps, as RLDS has them")
    return out


def _leaf(node: Mapping) -> Leaf | None:
    if "text" in node:
        return Leaf((), "string", "text")
    kind = "picture" if "image" in node else "numbers"
    said = node.get("image") or node.get("tensor")
    if said is None:
        return None
    shape = tuple(int(n) for n in (said.get("shape") or {}).get("dimensions", ()))
    dtype = str(said.get("dtype", ""))
    if kind == "picture":
        return Leaf(shape, dtype, kind) if dtype == "uint8" else None  # others are of depth
    if dtype in ("string", "object"):
        return Leaf(shape, dtype, "text") if not shape else None
    plain = str(said.get("encoding", "none")).lower() in ("none", "")
    return Leaf(shape, dtype, kind) if plain and dtype in NUMBERS and min(shape, default=1) > 0 else None


def episodes_of(path: Path, leaves: Mapping[str, Leaf]) -> list[ForeignEpisode]:
    """The episodes of a file of records; UserError where it is damaged."""
    if not path.stat().st_size:
        return []
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    found = []
    for k, (start, end) in enumerate(record_bounds(view, path)):
        name = f"{path}: record {k}"
        try:
            found.append(_episode(name, view, start, end, leaves))
        except (IndexError, ValueError) as e:
            raise UserError(f"{name} is damaged ({e})") from None
    return found


def record_bounds(data: memoryview, path: Path) -> Iterator[tuple[int, int]]:
    """Where the data of every record begin and end."""
    at = 0
    while at < len(data):
        head = data[at : at + 12]
        n = int.from_bytes(head[:8], "little") if len(head) == 12 else LARGEST
        sound = n < LARGEST and masked_crc(head[:8]) == int.from_bytes(head[8:], "little")
        if not sound or at + n + 16 > len(data):
            raise UserError(f"{path} is cut or damaged at byte {at}; records are whole before it")
        yield at + 12, at + 12 + n
        at += n + 16


def masked_crc(data: memoryview) -> int:
    import google_crc32c

    crc = google_crc32c.value(bytes(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _episode(name: str, data: memoryview, start: int, end: int, leaves: Mapping[str, Leaf]) -> ForeignEpisode:
    told = features_of(data[start:end])
    features = {key.removeprefix(STEPS): value for key, value in told if key.startswith(STEPS)}
    there = {key: leaf for key, leaf in leaves.items() if key in features}
    counted = next((k for k in ("is_first", "is_last", "action") if k in there), next(iter(there), ""))
    if not counted:
        raise ValueError("it has no steps")
    steps = len(values(features[counted], there[counted]))
    task = ""
    for key in INSTRUCTION:
        if key in there and there[key].kind == "text" and not task:
            words = next(iter(bytes_of(features[key])), b"")
            task = bytes(words).decode("utf-8", "replace").strip()
    columns = {
        key: ENCODED if leaf.kind == "picture" else leaf.shape
        for key, leaf in there.items()
        if leaf.kind != "text"
    }

    @functools.cache
    def is_sound() -> bool:
        return masked_crc(data[start:end]) == int.from_bytes(data[end : end + 4], "little")

    def read(key: str) -> np.ndarray:
        if not is_sound():
            raise UserError(f"{name} is damaged: its checksum is another")
        return values(features[key], there[key])

    return ForeignEpisode(name, steps, columns, read, task)


def values(feature: memoryview, leaf: Leaf) -> np.ndarray:
    """All rows: numbers [T, ...], or bytes [T] of pictures."""
    if leaf.kind != "numbers":
        rows = list(bytes_of(feature))
        out = np.empty(len(rows), object)
        out[:] = [bytes(row) for row in rows]
        return out
    flat = numbers_of(feature)
    size = math.prod(leaf.shape)
    if len(flat) % size:
        raise ValueError(f"{len(flat)} numbers are no rows of {list(leaf.shape)}")
    return flat.reshape(-1, *leaf.shape)


def fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Field number, wire type and value of a protobuf message; ValueError where it is malformed."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        kind = tag & 7
        if kind == 2:
            n, at = varint(data, at)
            end = at + n
        elif kind == 5 or kind == 1:
            end = at + (4 if kind == 5 else 8)
        elif kind == 0:
            value, at = varint(data, at)
            yield tag >> 3, kind, value
            continue
        else:
            raise ValueError(f"wire type {kind}")
        if end > len(data):
            raise ValueError("a field ends behind its message")
        yield tag >> 3, kind, data[at:end]
        at = end


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """An integer of seven bits a byte -> it, and where the next field begins."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("an integer of more than ten bytes")


def features_of(example: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Name and Feature of each of a tf.train.Example."""
    for number, _, features in fields(example):
        if number != 1:
            continue
        for _, _, entry in fields(features):
            parts = {k: value for k, _, value in fields(entry)}
            if 1 in parts and 2 in parts:
                yield bytes(parts[1]).decode("utf-8", "replace"), parts[2]


def bytes_of(feature: memoryview) -> Iterator[memoryview]:
    """The values of a Feature of bytes."""
    for number, _, held in fields(feature):
        if number == 1:
            for _, _, value in fields(held):
                yield value


def numbers_of(feature: memoryview) -> np.ndarray:
    """The values of a Feature of floats or of integers, packed or one by one."""
    parts: list[np.ndarray] = []
    for number, _, held in fields(feature):
        if number not in (2, 3):
            raise ValueError("bytes where numbers should be")
        for _, kind, value in fields(held):
            if number == 2:
                parts.append(np.frombuffer(value, "<f4"))
            else:
                parts.append(varints(value) if kind == 2 else np.array([value], np.uint64).astype(np.int64))
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def varints(data: memoryview) -> np.ndarray:
    """int64[n] of packed integers."""
    x = np.frombuffer(data, np.uint8)
    if not len(x):
        return np.zeros(0, np.int64)
    last = x < 128
    if not last[-1]:
        raise ValueError("an integer is cut")
    ends = np.flatnonzero(last)
    starts = np.append(0, ends[:-1] + 1)
    place = np.arange(len(x)) - np.repeat(starts, ends - starts + 1)
    if place.max() > 9:
        raise ValueError("an integer of more than ten bytes")
    terms = (x & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(terms, starts).astype(np.int64)
