"""Corrections are durable before they count: an append-only file of frames that a kill -9 cannot take back.

Record: length [4 bytes] CRC-32 [4 bytes] payload; the payload is one line of JSON and then the bytes of the
arrays it names. A torn record at the end is dropped when the file is read; damage before the end raises
UserError. Frames of policy and person are appended as they happen; `commit` syncs them. An episode is closed
by a record that names the episode of the data set it became; the ones never closed are recovered by
`unfinished`.
"""

import contextlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from robo_rl.data.episode import Episode
from robo_rl.errors import UserError, utf8
from robo_rl.files import FILE, parse_json, private_file, private_folder, write_bytes

HEAD = struct.Struct("<II")
FRAME, CLOSE = "frame", "close"


def pack(head: dict, arrays: Mapping[str, np.ndarray]) -> bytes:
    """One record."""
    shapes = {k: [str(v.dtype), list(v.shape)] for k, v in arrays.items()}
    payload = (
        json.dumps(head | {"arrays": shapes}).encode()
        + b"\n"
        + b"".join(np.ascontiguousarray(v).tobytes() for v in arrays.values())
    )
    return HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def unpack(raw: "bytes | mmap.mmap", at: int, end: int) -> dict:
    """Head of the record whose payload is raw[at:end], with its arrays under their names; they are not
    copied."""
    line = raw.find(b"\n", at, end)
    head = parse_json(raw[at:line], "a record of the journal", limit=FILE, remedy="delete the journal")
    at = line + 1
    for name, (dtype, shape) in head.pop("arrays").items():
        x = np.frombuffer(raw, dtype, int(np.prod(shape)), at).reshape(shape)
        head[name], at = x, at + x.nbytes
    return head


def scan(path: Path) -> tuple[list[dict], int]:
    """(whole records of a journal, bytes they take); ([], 0) if there is none. Arrays stay in the file, which
    is mapped to memory."""
    if not path.exists() or not path.stat().st_size:
        return [], 0
    with open(path, "rb") as f:
        raw = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    at, out = 0, []
    while at + HEAD.size <= len(raw):
        length, crc = HEAD.unpack_from(raw, at)
        begin, end = at + HEAD.size, at + HEAD.size + length
        if end > len(raw):
            break  # torn by a kill
        if zlib.crc32(memoryview(raw)[begin:end]) != crc:
            if end == len(raw):
                break
            raise UserError(
                f"{path} is damaged at byte {at}; keep a copy, and delete it to go on without what it has"
            )
        out.append(unpack(raw, begin, end))
        at = end
    return out, at


class CorrectionJournal:
    """Appends to the journal at `path`; one writer."""

    def __init__(self, path: Path):
        private_folder(path.parent)
        self.path = path
        _, self.size = scan(path)
        self._fd = private_file(path)
        os.ftruncate(self._fd, self.size)
        self._waiting: list[bytes] = []

    def __len__(self) -> int:
        """Records that are not on the disk yet."""
        return len(self._waiting)

    def frame(
        self,
        episode: str,
        start: int,
        task: str,
        state: np.ndarray,
        action: np.ndarray,
        reward: float,
        source: int,
        phase: int,
        images: dict[str, np.ndarray],
    ) -> None:
        """A frame of a robot's episode; durable after the next `commit`."""
        utf8("task", task)
        self.record(
            {
                "kind": FRAME,
                "episode": episode,
                "start": start,
                "task": task,
                "reward": reward,
                "source": source,
                "phase": phase,
            },
            {"state": state, "action": action} | {f"image/{k}": v for k, v in images.items()},
        )

    def close_episode(
        self,
        episode: str,
        index: int,
        more: Mapping[str, Any] = MappingProxyType({}),
        arrays: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        """`episode` becomes number `index` of the data set; written before the data set is, so that it is
        never there twice. more, arrays: what else is to be known of it.
        """
        self.record({"kind": CLOSE, "episode": episode, "index": index, **more}, arrays)

    def record(self, head: dict, arrays: Mapping[str, np.ndarray] = MappingProxyType({})) -> None:
        """A record of any kind; durable after the next `commit`."""
        self._waiting.append(pack(head, arrays))

    def forget(self) -> None:
        """Drop what waits for the next `commit`."""
        self._waiting = []

    def commit(self) -> None:
        """Everything so far is on the disk when this returns. OSError: nothing of it is, and it waits for the
        next try.
        """
        if not self._waiting:
            return
        data, at = memoryview(b"".join(self._waiting)), self.size
        try:
            while at - self.size < len(data):
                at += os.pwrite(self._fd, data[at - self.size :], at)
            os.fdatasync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self._waiting, self.size = [], at

    def replace(self) -> None:
        """What was appended since the last `commit` becomes the whole file, atomically."""
        data = b"".join(self._waiting)
        write_bytes(self.path, data)
        old, self._fd = self._fd, private_file(self.path)
        os.close(old)
        self._waiting, self.size = [], len(data)

    def close(self) -> None:
        self.commit()
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is; what was not committed is lost."""
        os.close(self._fd)


def unfinished(records: list[dict], committed: int) -> list[Episode]:
    """Episodes of a journal that are not among the `committed` first of the data set and in which a person
    acted.
    """
    frames: dict[str, list[dict]] = {}
    done = set()
    for r in records:
        if r["kind"] == FRAME:
            frames.setdefault(r["episode"], []).append(r)
        elif r["index"] < committed:
            done.add(r["episode"])
    out = []
    for name, rows in frames.items():
        rows = [r for r in rows if r["phase"] != 1]
        if name in done or not any(r["source"] for r in rows):
            continue
        views = [k[6:] for k in rows[0] if k.startswith("image/")]
        out.append(
            Episode(
                state=np.stack([r["state"] for r in rows]),
                action=np.stack([r["action"] for r in rows]),
                reward=np.array([r["reward"] for r in rows]),
                task=rows[0]["task"],
                success=False,
                terminated=False,
                images={v: np.stack([r[f"image/{v}"] for r in rows]) for v in views},
                start=rows[0]["start"],
                source=["human" if r["source"] else "policy" for r in rows],
                phase=np.array([r["phase"] for r in rows]),
            )
        )
    return out
