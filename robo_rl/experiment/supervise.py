"""A small parent that outlives the learner: when a signal kills it, the run goes on from its last checkpoint.

A library may also end the process on its own, past every handler (Ray does when a daemon of its cluster on
this machine dies): a learner that ends by itself says so to its parent, one that does not was ended. The next
one starts a cluster anew.
"""

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from robo_rl.errors import LostDaemon, quoted

RESTARTS = 20  # in a row without a new checkpoint
DEADLY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
PR_SET_PDEATHSIG = 1
STOPS = (signal.SIGINT, signal.SIGTERM)
BY_ITSELF, LOST = b"\0", b"\0\0"  # the learner's last word to its parent: it ended, it lost a daemon


def guarded(first: Callable[[Callable[[Path], None]], int], again: Callable[[Path], int]) -> int:
    """Run `first(tell)` in a child of its own -> its exit status; after a deadly signal, `again(folder)`.

    `tell(folder)` says that the run now has a folder to go on from. SIGINT and SIGTERM are passed on, for the
    child to handle (it takes two within a second for one, as from a terminal's Ctrl-C); if this process dies,
    the child saves and ends. KeyboardInterrupt of a run with a folder says how it goes on.
    """
    folders: list[Path] = []
    try:
        return _guarded(first, again, folders)
    except KeyboardInterrupt:
        if not folders:
            raise
        raise KeyboardInterrupt(f"; go on with: robo_rl train --resume {quoted(folders[-1])}") from None


def _guarded(
    first: Callable[[Callable[[Path], None]], int], again: Callable[[Path], int], folders: list[Path]
) -> int:
    """As `guarded`; what the run's folder is known to be is added to `folders`."""
    folder, restarts, futile, saved = None, 0, 0, None
    while True:
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until there is somebody to pass them on to
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(reader)
            follow_parent()
            own, last = os.getpid(), BY_ITSELF
            try:
                return first(functools.partial(_tell, writer, folders)) if folder is None else again(folder)
            except LostDaemon as e:  # as where the library that lost it ends the process
                last = LOST
                print(f"robo_rl: {' '.join(str(e).split())}", file=sys.stderr)
                return 1
            finally:
                if os.getpid() == own:  # not what it forked
                    with contextlib.suppress(OSError):
                        os.write(writer, last)
        os.close(writer)
        before = {s: signal.signal(s, functools.partial(_pass_on, child)) for s in STOPS}
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            told = b""
            while part := os.read(reader, 4096):
                told += part
            status = os.waitpid(child, 0)[1]
        finally:
            os.close(reader)
            for s, handler in before.items():
                signal.signal(s, handler)
        lost = told.endswith(LOST)
        by_itself = told.endswith(BY_ITSELF) and not lost
        told = told.rstrip(BY_ITSELF)
        if told:
            folder = Path(os.fsdecode(told))
            folders.append(folder)
        code = os.waitstatus_to_exitcode(status)
        if code == 0 or by_itself and code > 0 or code < 0 and -code not in DEADLY:
            if restarts and code == 2:  # it has said what it lacks, such as the cluster that it had joined
                print(f"robo_rl: then go on with: robo_rl train --resume {quoted(folder)}", file=sys.stderr)
            return code if code >= 0 else 128 - code
        name = (
            signal.Signals(-code).name
            if code < 0
            else "the loss of that process"
            if lost
            else f"a library with exit status {code} (with --backend ray: a daemon "
            "of the cluster on this machine, raylet or GCS, died)"
        )
        newest = folder and max(
            (p.stat().st_mtime_ns for p in (folder / "checkpoints").glob("step_*")), default=0
        )
        futile, saved = (futile + 1 if newest == saved else 0), newest
        if folder is None or futile >= RESTARTS:
            print(
                f"\nrobo_rl: the learner was ended by {name}"
                + (f"; go on with: robo_rl train --resume {quoted(folder)}" if folder else ""),
                file=sys.stderr,
            )
            return 128 - code if code < 0 else code
        restarts += 1
        print(
            f"\nthe learner was ended by {name}; going on from the last checkpoint (restart {restarts})",
            file=sys.stderr,
        )
        time.sleep(min(0.1 * (futile + 1), 2.0))


def _tell(writer: int, folders: list[Path], folder: Path) -> None:
    folders.append(folder)
    os.write(writer, os.fsencode(folder.resolve()))


def _pass_on(child: int, number: int, frame) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def follow_parent() -> None:
    """End with the parent: SIGTERM when it dies, so that the run is saved."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    except (OSError, AttributeError):
        return  # no Linux
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
