"""Files that survive a crash: whole-or-nothing writes, one writer per run folder, a look at the free space.

And the one place where JSON is read: whatever it holds, it costs bounded memory and stack, and a fault is one
line.
"""

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import gc
import json
import math
import os
import re
import resource
import shutil
import stat
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from robo_rl.errors import UserError, utf8

FILE, MESSAGE = 64 << 20, 64 << 10  # bytes of JSON that is read, at most: of a file, of a message or a line
DEEP = 64  # levels of brackets at most
DIGITS = 40  # digits of an integer at most: the state of a NumPy generator has 39
GO_ON = ", and go on with --resume where it was a run"  # what is told where nobody knows which command it is
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {c: 1 if c in b"[{" else -1 for c in b"[]{}"}
_LONG_NUMBER = re.compile(rb"[eE][+-]?\d{3}|\d{%d}" % (DIGITS + 1))  # one that may overflow
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_held: set[int] = set()  # descriptors of locks this process owns


def folder_of(path: object, taker: str, what: str, more: str = "") -> Path:
    """`path` as a Path. UserError: it is none, and no string either; `taker` takes the folder of `what`."""
    if isinstance(path, str | Path):
        return Path(path)
    raise UserError(f"{taker} takes the folder of {what}, got {type(path).__name__}{more and f'; {more}'}")


def _forget_locks() -> None:
    """In a forked child: drop the inherited descriptors, or an orphaned worker would keep the folder
    locked."""
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


@contextlib.contextmanager
def replacing(path: "str | Path") -> Iterator[Path]:
    """Yield a temporary path in the same folder; when the block ends well it replaces `path`, whole and
    durable.

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
        if full_disk(e):
            raise UserError(
                f"the disk is full: could not write {path} (what was there before is intact); "
                f"free some space in {path.parent}{GO_ON}"
            ) from e
        refuse_unwritable(e, path)
        if e.errno == errno.EISDIR:
            raise UserError(f"{path} is a folder where a file should be; give the name of a file") from e
        raise
    finally:
        with contextlib.suppress(OSError):  # of a disk that is read-only too
            temp.unlink()
    sync_folder(path.parent)


def refuse_unwritable(e: OSError, path: Path) -> None:
    """UserError with the remedy if `e` says that this user may not write `path`."""
    if e.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        raise UserError(f"no permission to write {path}; choose a folder of your own") from e


def full_disk(e: BaseException) -> str:
    """What to say of a write for which the disk had no room; "" where something else failed."""
    if not isinstance(e, OSError) or e.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    where = f", at {e.filename}" if e.filename else ""  # `write` names no file
    return f"the disk is full{where}: free some space{GO_ON}"


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


def plain(x: Any) -> Any:
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
    if not isinstance(x, type) and hasattr(x, "tolist"):  # NumPy and torch, scalars and arrays
        return plain(x.tolist())
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x


def write_json(path: "str | Path", obj: object) -> None:
    """Write `obj` as strict JSON, whole or not at all. Equal objects give equal bytes. UserError: text that
    is no Unicode."""
    text = utf8(
        f"what {path} shall hold", json.dumps(plain(obj), indent=1, allow_nan=False, ensure_ascii=False)
    )
    write_bytes(path, (text + "\n").encode())


def parse_json(
    data: "bytes | bytearray | str",
    what: str,
    kind: "type | tuple[type, ...]" = dict,
    *,
    limit: int = MESSAGE,
    depth: int = DEEP,
    nan: bool = False,
    remedy: str = "",
) -> Any:
    """What JSON text from anywhere says, of the type `kind`.

    Its size, and the depth of its brackets, are looked at before it is parsed. Refused are also: an object
    that says a key twice, numbers out of range (an integer of more than 40 digits, a float above 1.8e308),
    NaN and infinities unless `nan`, and text that is no UTF-8 (half of a surrogate pair too).
    UserError(f"{what} …; {remedy}").
    """
    try:
        data = data.encode() if isinstance(data, str) else bytes(data)
        if len(data) > limit:
            raise ValueError(f"{len(data)} bytes, at most {limit} are read")
        if data.count(b"[") + data.count(b"{") > depth and (levels := _depth(data)) > depth:
            raise ValueError(f"brackets {levels} deep, at most {depth} are read")
        numbers: dict[str, Any] = (
            {"parse_int": _integer, "parse_float": _number} if _LONG_NUMBER.search(data) else {}
        )
        numbers |= {} if nan else {"parse_constant": _refuse}
        out = json.loads(data.decode(), object_pairs_hook=_pairs, **numbers)
        if _SURROGATE.search(data):
            json.dumps(out, ensure_ascii=False).encode()
    except (ValueError, RecursionError, MemoryError) as e:  # ValueError: no JSON, no Unicode, or one of ours
        why = (
            "half of a surrogate pair in its text"
            if isinstance(e, UnicodeEncodeError)
            else str(e) or type(e).__name__
        )
        raise UserError(
            f"{what} is damaged or no JSON that is read here ({why}){remedy and '; ' + remedy}"
        ) from None
    if not isinstance(out, kind):
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise UserError(
            f"{what} is damaged: it holds a JSON {type(out).__name__}, not a "
            f"{kinds}{remedy and '; ' + remedy}"
        )
    return out


def _depth(data: bytes) -> int:
    """Levels of brackets outside strings, right up to where the text stops being JSON."""
    outside = b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    return max(accumulate(map(_STEP.__getitem__, outside.translate(None, _NOT_BRACKETS))), default=0)


def _pairs(pairs: list) -> dict:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise ValueError(f"it says {twice[:60]!r} twice")
    return out


def _integer(text: str) -> int:
    return int(text) if len(text) <= DIGITS else _refuse(f"{text[:20]}…")


def _number(text: str) -> float:
    return x if math.isfinite(x := float(text)) else _refuse(text[:40])


def _refuse(text: str):
    raise ValueError(f"{text} is no number here")


def read_bytes(path: "str | Path", limit: int = FILE) -> bytes:
    """A regular file of at most `limit` bytes; UserError naming it where it is missing, something else or
    larger."""
    try:
        # a pipe would wait for ever
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as f:
            if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
                raise UserError(f"{path} is no regular file; move it out of the way")
            data = f.read(limit + 1)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as e:
        raise UserError(
            f"{path} cannot be read ({e.strerror}); look at its owner and mode with: ls -l {path}"
        ) from None
    if len(data) > limit:
        raise UserError(
            f"{path} has more than {limit} bytes, which no file of its kind has; restore it from a copy"
        )
    return data


def read_json(
    path: "str | Path",
    kind: "type | tuple[type, ...]" = dict,
    *,
    limit: int = FILE,
    remedy: str = "restore it from a copy or delete it",
) -> Any:
    """What a JSON file says (see `parse_json`); UserError naming it, with the remedy, where it is missing or
    damaged."""
    return parse_json(read_bytes(path, limit), str(path), kind, limit=limit, remedy=remedy)


def kept_rows(path: "Path | None") -> list[dict]:
    """The objects of a file of one JSON object a line; [] without a file. UserError: a line that is none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    return [parse_json(line, str(path)) for line in lines]


def keep_row(path: "Path | None", row: dict) -> None:
    """Add a line of JSON to the file, where there is one."""
    if path is not None:
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")


def private_folder(path: "str | Path") -> Path:
    """Make a folder that only this user may enter (0700), parents as usual; one that exists stays as it
    is. UserError: it cannot be made."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as e:
        refuse_unwritable(e, path)
        raise
    if not path.is_dir():
        raise UserError(f"{path} is a file where a folder should be; move it out of the way")
    return path


def private_file(path: "str | Path", flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Descriptor of a file that only this user may read and write (0600), also where it existed with another
    mode."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(PermissionError):  # another's file, shared with us on purpose
        os.fchmod(fd, 0o600)
    return fd


@contextlib.contextmanager
def lock(folder: "str | Path") -> Iterator[None]:
    """Own `folder` for writing until the block ends or the process dies, by flock on `<folder>/.lock`.

    Raises UserError naming the owner if another process (or another block of this one) holds it.
    Children made by fork do not inherit it. Readers need no lock. Temporary files that a killed writer
    left in the folder are swept away. A folder that is made here is private (0700).
    """
    folder = private_folder(folder)
    try:
        fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        refuse_unwritable(e, folder)
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if not isinstance(e, BlockingIOError):
            raise UserError(f"cannot lock {folder} ({e.strerror}); put run folders on a local disk") from e
        raise UserError(
            f"another process (pid {pid}) is writing in this run folder ({folder}); "
            f"wait for it, stop it with: kill {pid}, or choose another folder"
        ) from None
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
        if not pid.isdecimal():
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
        raise UserError(
            f"{path} needs about {need / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free; "
            f"free some space or choose a folder on another disk"
        )


def give_back_freed() -> None:
    """What glibc keeps of memory that was freed goes back to the system. Phases of other sizes than the last
    one would not fit into its pieces and take more beside them; new pages cost some milliseconds."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int:
    """Bytes of memory that this process may still take: of the machine, its control group and its own
    limit."""

    def number(path: str) -> int:
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):  # no such limit
            return 1 << 62

    machine = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    group = number("/sys/fs/cgroup/memory.max") - min(number("/sys/fs/cgroup/memory.current"), 1 << 61)
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return min(
        int(machine[1]) << 10 if machine else 1 << 62,
        group,
        own - used if own != resource.RLIM_INFINITY else 1 << 62,
    )


def require_memory(what: str, need: int, remedy: str) -> None:
    """Raise UserError unless `need` bytes of memory are free: the kernel would kill whoever takes them
    later."""
    if need > (free := free_memory()):
        raise UserError(
            f"{what} needs about {need / 1e9:.1f} GB of memory and {max(free, 0) / 1e9:.1f} GB are free; "
            f"{remedy}"
        )
