"""SHA-256 of every file of a data set, kept in `meta/checksums.json`, which LeRobot ignores. Standard library
only.

    {"sha256": of the rest of this object, "files": {"data/chunk-000/file-000.parquet": [digests]},
    "tolerance_s": 1e-4}

A file may have two digests while a flush is under way: of what is committed, then of what replaces it (`""`:
the file is absent). They are written before the first file is replaced, so a process killed anywhere leaves
files that match. The last digest is that of the last finished flush.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from robo_rl.errors import UserError
from robo_rl.files import parse_json, refuse_unwritable, write_bytes

NAME = "meta/checksums.json"
TOLERANCE = 1e-4  # [s] by which a timestamp may be off, as LeRobot's tolerance_s
ABSENT = ""


@dataclass(frozen=True, slots=True)
class Checksums:
    """files: path relative to the data set -> SHA-256 digests, each of which is right; tolerance: of
    timestamps [s]."""

    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tolerance: float = TOLERANCE


def file_digest(path: Path) -> str:
    """SHA-256 of a file, ABSENT if there is none."""
    try:
        with open(path, "rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except FileNotFoundError:
        return ABSENT


def to_text(sums: Checksums) -> str:
    body = {"files": {k: list(v) for k, v in sorted(sums.files.items())}, "tolerance_s": sums.tolerance}
    return json.dumps({"sha256": _seal(body)} | body, indent=1) + "\n"


def from_text(text: str) -> Checksums:
    """Inverse of `to_text`; raises ValueError for text that is not what `to_text` wrote."""
    try:
        body = parse_json(text, "it", limit=1 << 28)
        if body.pop("sha256") != _seal(body):
            raise ValueError("its own SHA-256 is wrong")
        return Checksums({k: tuple(v) for k, v in body["files"].items()}, float(body["tolerance_s"]))
    except (KeyError, TypeError, AttributeError, UserError) as e:
        raise ValueError(f"it is not a list of checksums ({e})") from None


def _seal(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write(root: Path, sums: Checksums) -> None:
    write_bytes(root / NAME, to_text(sums).encode())


class Verifier:
    """Compares the files of the data set at `root` with their checksums, but for those of `trust` (None:
    all).

    Where the data set is being extended, a file may be newer than the checksums read before: then both are
    read again. Raises ValueError if `meta/checksums.json` is damaged. Without it, nothing is verified.
    """

    def __init__(self, root: Path, trust: Collection[Path] | None = ()):
        self.root, self.trust, self.sums = root, trust, None
        self._sound: dict[Path, tuple] = {}
        try:
            self._reload()
        except ValueError:
            if trust is not None:
                raise

    def _reload(self) -> bool:
        """Whether the checksums changed."""
        try:
            text = (self.root / NAME).read_text(encoding="utf-8")
        except FileNotFoundError:
            new = None
        else:
            new = from_text(text)
        changed, self.sums = new != self.sums, new
        return changed

    def _listed(self, path: Path) -> tuple[str, ...] | None:
        if self.sums is None or self.trust is None or path in self.trust:
            return None
        return self.sums.files.get(path.relative_to(self.root).as_posix())

    def listed(self, folder: Path) -> list[Path]:
        """The files below `folder` that have to be there."""
        names = {} if self.sums is None or self.trust is None else self.sums.files
        return [
            p
            for n, digests in names.items()
            if ABSENT not in digests and folder in (p := self.root / n).parents
        ]

    def read(self, path: Path) -> tuple[bytes, bool]:
        """(bytes of a file, whether they are what was written). FileNotFoundError if it is missing."""
        data = path.read_bytes()
        while self._listed(path) is not None:
            digest = hashlib.sha256(data).hexdigest()
            if self._right(path, digest):
                return data, True
            again, changed = path.read_bytes(), self._reload()
            if again == data and not changed:
                return data, False
            data = again
        return data, True

    def is_sound(self, path: Path) -> bool:
        """Whether a file is what was written; one that has not changed since the last call is not read
        again."""
        while True:
            try:
                stat = os.stat(path)
            except FileNotFoundError:
                return ABSENT in (self._listed(path) or (ABSENT,))
            mark = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if self._sound.get(path) == mark or self._listed(path) is None:
                return True
            digest = file_digest(path)
            if self._right(path, digest):
                self._sound[path] = mark
                return True
            if file_digest(path) == digest and not self._reload():
                return False

    def _right(self, path: Path, digest: str) -> bool:
        listed = self._listed(path)
        return listed is None or digest in listed


class Staged:
    """Files of the data set at `root` written under temporary names, which take their places together by
    `commit`.

    `sums` are the checksums on the disk: those given until the commit, both old and new while it is under
    way.
    """

    def __init__(self, root: Path, sums: Checksums):
        self.root, self.sums = root, sums
        self._temps: dict[Path, Path] = {}

    def path(self, path: Path) -> Path:
        """Where to write what is to become `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        return self._temps.setdefault(path, path.with_name(f".{path.name}.{os.getpid()}.tmp"))

    def text(self, path: Path, text: str) -> None:
        try:
            self.path(path).write_bytes(text.encode())
        except OSError as e:
            refuse_unwritable(e, path)
            raise

    @property
    def used(self) -> bool:
        return bool(self._temps)

    def drop(self, path: Path) -> None:
        """Do not write `path` after all."""
        self._temps.pop(path).unlink(missing_ok=True)

    def commit(self) -> None:
        """Make all durable, then put them in place in the order in which they were staged; the last one is
        the commit."""
        digests = {}
        for path, temp in self._temps.items():
            _sync(temp)
            digests[path.relative_to(self.root).as_posix()] = file_digest(temp)
        old = {k: v[-1] for k, v in self.sums.files.items() if v[-1] != ABSENT}
        both = {k: (old.get(k, ABSENT), d) for k, d in digests.items()}
        for k, pair in both.items():  # a file that was there without a checksum: what replaces it gets one
            if pair[0] == ABSENT and (there := file_digest(self.root / k)) != ABSENT:
                both[k] = (there, pair[1])
        self.sums = Checksums({k: (d,) for k, d in old.items()} | both, self.sums.tolerance)
        write(self.root, self.sums)
        *first, last = self._temps
        for path in first:
            self._put(path)
        for folder in {path.parent for path in first}:
            _sync(folder)
        self._put(last)
        _sync(last.parent)

    def _put(self, path: Path) -> None:
        os.replace(self._temps[path], path)
        del self._temps[path]

    def abandon(self) -> None:
        """Delete what was not put in place."""
        for temp in self._temps.values():
            temp.unlink(missing_ok=True)
        self._temps.clear()


def put_text(root: Path, sums: Checksums | None, path: Path, text: str) -> None:
    """Write a file of a data set, and its checksum where the data set has checksums."""
    if sums is None:
        write_bytes(path, text.encode())
        return
    staged = Staged(root, settled(root, sums))
    try:
        staged.text(path, text)
        staged.commit()
    finally:
        staged.abandon()
    write(root, settled(root, staged.sums))


def settled(root: Path, sums: Checksums) -> Checksums:
    """The checksums without those that no file has (any more), after a flush that may have been cut short."""
    out = {}
    for name, digests in sums.files.items():
        if len(digests) > 1:
            there = file_digest(root / name)
            digests = (there,) if there in digests else digests
        if digests != (ABSENT,):
            out[name] = digests
    return Checksums(out, sums.tolerance)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
