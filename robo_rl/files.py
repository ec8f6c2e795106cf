"""Files that survive a crash: whole-or-nothing writes, one writer per run folder, a look at the free space."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from robo_rl.errors import UserError

_held: set[int] = set()  # descriptors of locks this process owns


def _forget_locks() -> None:
    """In a forked child: drop the inherited descriptors, or an orphaned worker would keep the folder locked."""
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


@contextlib.contextmanager
def replacing(path: "str | Path") -> Iterator[Path]:
    """Yield a temporary path in the same folder; when the block ends well it replaces `path`, whole and durable.

    Order: file written, fsync(file), rename, fsync(folder). If the block fails, or the process dies, the old
    file is untouched. A full disk raises UserError and leaves the old file and no temporary one.
    """
    path = Path(path)
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temp
        fd = os.open(temp, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temp, path)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk is full: could not write {path} (what was there before is intact); "
                            f"free some space in {path.parent} and go on with --resume auto") from e
        if e.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise UserError(f"no permission to write {path}; choose a folder of your own") from e
        raise
    finally:
        temp.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: "str | Path") -> None:
    """Make renames in this folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: "str | Path", data: "bytes | bytearray | memoryview") -> None:
    """Write `data` to `path`, all of it or nothing (see `replacing`)."""
    with replacing(path) as temp, open(temp, "wb") as f:
        f.write(data)


def plain(x: object) -> object:
    """`x` as JSON can say it: dataclasses, arrays, NumPy scalars, paths, sets and tuples become plain values;
    numbers that are not finite become null, so that every reader takes the file."""
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: plain(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, (set, frozenset)):
        return [plain(v) for v in sorted(x)]
    if isinstance(x, (list, tuple)):
        return [plain(v) for v in x]
    if isinstance(x, Path):
        return str(x)
    if hasattr(x, "tolist"):  # NumPy and torch, scalars and arrays
        return plain(x.tolist())
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x


def write_json(path: "str | Path", obj: object) -> None:
    """Write `obj` as strict JSON, whole or not at all. Equal objects give equal bytes."""
    text = json.dumps(plain(obj), indent=1, allow_nan=False, ensure_ascii=False)
    write_bytes(path, (text + "\n").encode())


def read_json(path: "str | Path") -> object:
    """Parse a JSON file; a file that is missing or no JSON raises UserError naming it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is damaged (not JSON: {e}); restore it from a copy or delete it") from None


@contextlib.contextmanager
def lock(folder: "str | Path") -> Iterator[None]:
    """Own `folder` for writing until the block ends or the process dies, by flock on `<folder>/.lock`.

    Raises UserError naming the owner if another process (or another block of this one) holds it.
    Children made by fork do not inherit it. Readers need no lock. Temporary files that a killed writer
    left in the folder are swept away.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if not isinstance(e, BlockingIOError):
            raise UserError(f"cannot lock {folder} ({e.strerror}); put run folders on a local disk") from e
        raise UserError(f"another process (pid {pid}) is writing in this run folder ({folder}); "
                        f"wait for it, stop it with: kill {pid}, or choose another folder") from None
    _held.add(fd)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        _sweep(folder)
        yield
    finally:
        if fd in _held:  # in a forked child it is closed already
            _held.discard(fd)
            os.close(fd)


def _sweep(folder: Path) -> None:
    """Delete temporary files of `replacing` whose process is gone."""
    for temp in folder.rglob(".*.tmp"):
        pid = temp.name.split(".")[-2]
        if not pid.isdigit():
            continue
        try:
            os.kill(int(pid), 0)  # signal 0 only asks whether it lives
        except ProcessLookupError:
            temp.unlink(missing_ok=True)
        except PermissionError:  # alive, of another user
            pass


def free_bytes(path: "str | Path") -> int:
    """Bytes this user may still write on the disk of `path` (or of its nearest parent that exists)."""
    p = Path(path).absolute()
    while not p.exists():
        p = p.parent
    return shutil.disk_usage(p).free


def require_free(path: "str | Path", need: int) -> None:
    """Raise UserError unless `need` bytes are free where `path` is or will be."""
    free = free_bytes(path)
    if free < need:
        raise UserError(f"{path} needs about {need / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free; "
                        f"free some space or choose a folder on another disk")
