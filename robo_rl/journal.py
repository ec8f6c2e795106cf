"""The journal of a replay store: its calls, appended to files, found again after a kill, a full disk or
damage.

    frame: magic [4], bytes of the body [4], kind [1], rows [4], steps [8], CRC-32 of all of this and the body
    [4], body

`steps` counts the control steps of the frames before, so a reader that finds its way again behind damage
knows how many are lost. A frame is one write. Integers are little-endian and unsigned.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from robo_rl.errors import UserError
from robo_rl.files import GO_ON, private_folder

MAGIC, OLD = b"RPL2", b"1LPR"  # frames of this format, and of one without `steps`
HEAD = struct.Struct("<4sIBIQ")
SUM = struct.Struct("<I")
SIZE = HEAD.size + SUM.size
ADD, CLOSE, CUT, DROP = 0, 1, 2, 3  # kinds of calls


def frame(kind: int, n: int, steps: int, body: bytes) -> bytes:
    """One call as it stands in the file."""
    head = HEAD.pack(MAGIC, len(body), kind, n, steps)
    return head + SUM.pack(zlib.crc32(body, zlib.crc32(head))) + body


def frame_at(blob: bytes, at: int) -> tuple[int, int, int, bytes] | None:
    """(kind, rows, steps, body) of the sound frame that begins at byte `at`; None: there is none."""
    if at + SIZE > len(blob):
        return None
    magic, size, kind, n, steps = HEAD.unpack_from(blob, at)
    body = blob[at + SIZE : at + SIZE + size]
    if magic != MAGIC or len(body) != size:
        return None
    (crc,) = SUM.unpack_from(blob, at + HEAD.size)
    return (kind, n, steps, body) if zlib.crc32(body, zlib.crc32(blob[at : at + HEAD.size])) == crc else None


def next_frame(blob: bytes, at: int) -> int:
    """Where the first sound frame behind byte `at` begins; -1: nowhere."""
    while (at := blob.find(MAGIC, at + 1)) >= 0:
        if frame_at(blob, at) is not None:
            return at
    return -1


def whole_but_damaged(blob: bytes, at: int) -> bool:
    """Whether the last frame of a file is all there and yet not sound: no write that a kill cut off."""
    return (
        at + SIZE <= len(blob)
        and blob[at : at + 4] == MAGIC
        and len(blob) == at + SIZE + HEAD.unpack_from(blob, at)[1]
    )


class Journal:
    """Calls of one store, appended to `folder`/steps-<n>.log, each in one write, so a killed process loses
    none.

    `sync` makes them durable against a power cut. A file goes once it and the one after it hold no row that a
    ring of `capacity` rows still has; with `hold` only when `release` says so, for a checkpoint may need it.
    After `read`, `lost` is the number of control steps that damage cost, in `breaks` places.
    """

    def __init__(self, folder: Path, capacity: int, limit: int = 64 << 20, hold: bool = False):
        self.folder, self.capacity, self.limit, self.hold = Path(folder), capacity, limit, hold
        private_folder(self.folder)
        self.rows: dict[int, int] = {}  # file -> rows in it
        self.file: int | None = None  # descriptor of the open file
        self.size, self.number, self.reopen = 0, 0, False
        self.read_to = (-1, 0)  # file and byte up to which `read` has come
        # control steps up to there, and whether that is known (the first files may be gone)
        self.steps, self.known = 0, True
        self.lost = self.breaks = 0
        self.leaving: list[int] = []  # files that the last checkpoint did not need

    def path(self, number: int) -> Path:
        return self.folder / f"steps-{number:06d}.log"

    def numbers(self) -> list[int]:
        """Files there are, oldest first."""
        return sorted(int(p.stem[6:]) for p in self.folder.glob("steps-*.log"))

    # ---- writing

    def write(self, kind: int, n: int, arrays) -> None:
        """Append one call. Raises UserError when the disk is full; what was written before is intact."""
        body = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
        try:
            if self.file is None:
                self._begin()
            if self.size > self.limit:
                self._begin()
            assert self.file is not None
            data = frame(kind, n, self.steps, body)
            if os.write(self.file, data) != len(data):
                raise OSError(28, "No space left on device")
        except OSError as e:
            if self.file is not None:
                os.ftruncate(self.file, self.size)
            raise UserError(
                f"cannot write {self.folder}: {e.strerror} (what was recorded before is intact); free some "
                f"space{GO_ON}"
            ) from e
        self.size += len(data)
        self.steps += n * (kind == ADD)
        self.rows[self.number] += n * (kind in (ADD, CLOSE))  # the others write none

    def _begin(self) -> None:
        number = 0
        if self.file is not None:
            number = self.number + 1
        elif have := self.numbers():
            for _ in self.read():  # so that `steps` and `rows` go on
                pass
            number = have[-1] + (not self.reopen)
        new = os.open(self.path(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.close()
        self.file, self.number, self.size = new, number, os.fstat(new).st_size
        self.rows.setdefault(number, 0)
        if not self.hold:
            self._delete(self._spent())

    def rewind(self, mark: list[int]) -> bool:
        """Forget what was written after `mark`, and go on writing there; before anything is read. -> whether
        there was any."""
        number, size = mark
        later = [n for n in self.numbers() if n > number]
        for n in later:
            self.path(n).unlink()
        longer = self.path(number).exists() and self.path(number).stat().st_size > size
        if longer:
            os.truncate(self.path(number), size)
        self.reopen = True
        return bool(later) or longer

    def release(self) -> None:
        """A checkpoint was saved: what neither it nor the one before needs goes."""
        if self.hold:
            self._delete(self.leaving)
            self.leaving = self._spent()

    def _spent(self) -> list[int]:
        """Files that the ring needs no more. The one after them is whole: it knows what their open episodes
        became."""
        files = sorted(self.rows)
        return [
            old for i, old in enumerate(files) if sum(self.rows[k] for k in files[i + 2 :]) >= self.capacity
        ]

    def _delete(self, files: list[int]) -> None:
        for old in files:
            self.path(old).unlink(missing_ok=True)
            self.rows.pop(old, None)

    # ---- reading

    def read(self) -> Iterator[tuple[int, int, bytes]]:
        """(kind, rows, body) of every sound call since the last `read`, oldest first.

        A torn end is left out. While another process writes, it is a call that is being written: it comes
        next time, unless a later file shows that who wrote it died. Where calls are missing before a sound
        one, `lost` and `breaks` count it and a CUT comes in their place: what follows continues no episode.
        Raises UserError for files of an older format.
        """
        for number in [n for n in self.numbers() if n >= self.read_to[0]]:
            if number > self.read_to[0]:
                self.known = self.known and (number == 0 or self.read_to[0] >= 0)
                self.read_to = (number, 0)
            self.rows.setdefault(number, 0)
            with open(self.path(number), "rb") as f:
                f.seek(self.read_to[1])
                blob, at, base = f.read(), 0, self.read_to[1]
            if not base and blob[:4] == OLD:
                raise UserError(
                    f"{self.path(number)} was written by an older robo_rl, whose steps this one cannot "
                    "check; start a new run"
                )
            while at < len(blob):
                found = frame_at(blob, at)
                skipped = found is None
                if skipped:
                    if (at := next_frame(blob, at)) < 0:
                        break
                    found = frame_at(blob, at)
                assert found is not None  # `next_frame` looked at it
                kind, n, steps, body = found
                at += SIZE + len(body)
                missed = max(0, steps - self.steps) if self.known else 0
                if skipped or missed:
                    self.breaks, self.lost = self.breaks + 1, self.lost + missed
                    yield CUT, 0, b""
                self.known, self.steps = True, steps + n * (kind == ADD)
                self.rows[number] += n * (kind in (ADD, CLOSE))
                self.read_to = (number, base + at)
                yield kind, n, body
            self._check_end(number, blob, self.read_to[1] - base)

    def _check_end(self, number: int, blob: bytes, at: int) -> None:
        """Count a last call that is damaged and not cut off."""
        if whole_but_damaged(blob, at):
            _, size, kind, n, _ = HEAD.unpack_from(blob, at)
            self.breaks, self.lost = self.breaks + 1, self.lost + n * (kind == ADD)
            self.steps += n * (kind == ADD)
            self.read_to = (number, self.read_to[1] + SIZE + size)

    def mark(self) -> list[int]:
        """Where the journal ends: the last file that holds something and its size."""
        sizes = [(n, self.path(n).stat().st_size) for n in self.numbers()]
        return list(max(((n, s) for n, s in sizes if s), default=(0, 0)))

    def sync(self) -> None:
        """Durable against a power cut from here on, whoever writes."""
        if self.file is not None:
            os.fsync(self.file)
        elif have := self.numbers():
            with open(self.path(have[-1]), "rb") as f:
                os.fsync(f.fileno())

    def close(self) -> None:
        if self.file is not None:
            self.sync()
            os.close(self.file)
            self.file = None
