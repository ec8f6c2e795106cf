"""A tree of arrays in one file, whole or not at all; it survives the death of any process.

It begins with its checksum, for it is not waited for that it reaches the disk: a power cut may leave an older
one, a piece or zeros, and a file that is not whole reads as none.

And who is at work in a run folder: a process signs in, so that the next owner can end it before it takes over
its slots.
"""

import contextlib
import faulthandler
import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
import xxhash
from safetensors import SafetensorError
from safetensors import torch as st

from robo_rl.checkpoint import pack, unpack
from robo_rl.errors import LostDaemon, UserError, plain_warning
from robo_rl.files import FILE, full_disk, parse_json, private_file

MARK = 8  # bytes of the checksum


def save(path: Path, tree: dict) -> None:
    """Replace `path` by `tree`."""
    tensors: dict = {}
    text = json.dumps(pack(tree, tensors))
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    blob = st.save(tensors, {"tree": text})
    with open(temp, "wb", opener=private_file) as f:
        f.write(xxhash.xxh3_64_digest(blob))
        f.write(blob)
    os.replace(temp, path)


def load(path: Path) -> dict:
    """The tree at `path`; {} where there is none or it is damaged."""
    try:
        whole = path.read_bytes()
        mark, blob = whole[:MARK], whole[MARK:]
        if mark != xxhash.xxh3_64_digest(blob):
            return {}
        size = int.from_bytes(blob[:8], "little")
        head = parse_json(blob[8 : 8 + size], str(path), limit=FILE)
        tree = parse_json(head["__metadata__"]["tree"], str(path), limit=FILE)
        return unpack(tree, st.load(blob))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return {}


def boot() -> str:
    """Which start of which machine this is: pids of another one say nothing here."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(int(psutil.boot_time()))


def born(pid: int) -> str:
    """When a process began, in ticks since the boot: a date moves when the system's clock is set."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return str(psutil.Process(pid).create_time())


def place(folder: Path) -> str:
    """Device and number of a folder: a copy of it has others, it itself keeps them when it is moved."""
    found = folder.stat()
    return f"{found.st_dev}:{found.st_ino}"


def sign(path: Path) -> None:
    """Write down this process: pid, time of birth (pids come again), boot, and the folder (copies of it are
    not where it works)."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temp, "w", opener=private_file) as f:
        f.write(f"{os.getpid()} {born(os.getpid())} {boot()} {place(path.parent)}")
    os.replace(temp, path)


def signed(path: Path) -> psutil.Process | None:
    """The process that signed in at `path`, if it lives and that is where it did."""
    try:
        pid, began, start, folder = path.read_text().split()
        process = psutil.Process(int(pid))
        here = start == boot() and folder == place(path.parent)
        return process if here and born(process.pid) == began else None
    except (ValueError, OSError, psutil.Error):
        return None


@contextlib.contextmanager
def at_work(folder: Path, name: str, threads: int = 1) -> Iterator[None]:
    """What every process beside a learner begins with: it signs in as `name`, leaves Ctrl-C to the learner
    and its stack to SIGUSR1, and warns a user in plain lines."""
    warnings.formatwarning = plain_warning()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(threads)
    sign(folder / f"{name}.pid")
    with open(folder / f"{name}.stack", "w", opener=private_file) as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        yield


def last_words(e: BaseException) -> tuple[str, str, str]:
    """What a process that `e` ends tells who started it: full (disk), mistake (a UserError, which says all
    that a person needs) or error, what happened, the stack of an error. A daemon that it lost is no
    mistake: a new process starts another."""
    if words := full_disk(e):
        return "full", words, ""
    if isinstance(e, LostDaemon):
        return "error", str(e), ""
    if isinstance(e, UserError):
        return "mistake", str(e), ""
    stack = "".join(traceback.format_exception(e, limit=-6))
    return "error", f"{type(e).__name__}: {e}", stack


def kill(process, folder: Path, name: str, why: str) -> str:
    """Ask a silent process that is `at_work` for its stack, then end it -> why, and where it was."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.1)
    stack = folder / f"{name}.stack"
    process.kill()
    return f"{why}; it was at:\n{stack.read_text()[-1500:] if stack.exists() else '(no stack)'}"


class AwakeClock:
    """Seconds in which this process was at work: a gap of more than `longest` seconds between two looks
    counts as `longest`.

    Who watches others for signs of life must not count the time in which it was stopped itself (Ctrl-Z, a
    suspended machine, SIGSTOP to the whole process group): they were stopped too.
    """

    def __init__(self, longest: float = 1.0, clock: Callable[[], float] = time.monotonic):
        self.longest, self.clock, self.seconds, self.last = longest, clock, 0.0, clock()

    def now(self) -> float:
        """The time; to be called at least every `longest` seconds."""
        now = self.clock()
        self.seconds += min(now - self.last, self.longest)
        self.last = now
        return self.seconds


def evict(folder: Path, name: str = "*", seconds: float = 5.0) -> int:
    """End every process that signed in below `folder` as `name` and still lives, for its learner died, or the
    server that forked it -> how many."""
    found = [p for path in folder.glob(f"{name}.pid") if (p := signed(path)) is not None and not over(p)]
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    limit = time.monotonic() + seconds
    while not all(map(over, found)) and time.monotonic() < limit:
        time.sleep(0.01)
    psutil.wait_procs(found, timeout=0)  # our own children are asked for their exit status
    return len(found)


def over(process: psutil.Process) -> bool:
    """Whether a process has ended, though nobody may have asked for its exit status yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True
