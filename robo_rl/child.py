"""Child processes: what is waited for of them has a deadline, and their threads sleep where they wait."""

import multiprocessing
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from robo_rl.errors import UserError

HANG = 60.0  # s without progress after which a process counts as one that hangs, where no option says it
GRACE = 5.0  # s between SIGTERM and SIGKILL
UNGUARDED = 78  # exit status of a worker in which the user's script would train as well
UNGUARDED_WORDS = (
    "a worker imports the script that trains, which would train there too: put what the script does below "
    'the line if __name__ == "__main__":, or train with workers=0'
)


def line_with(process: subprocess.Popen, word: str, seconds: float) -> str:
    """The first line of the process's output (a text pipe) that holds `word`; "" where it ended or said none
    within `seconds`. What it says later is read and dropped, so that it never waits for a full pipe."""
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stdout is not None
    lines = process.stdout

    def read() -> None:
        for line in lines:
            if word in line:
                found.put(line)
        found.put("")

    threading.Thread(target=read, name="child's output", daemon=True).start()
    try:
        return found.get(timeout=seconds)
    except queue.Empty:
        return ""


def end(process: subprocess.Popen, grace: float = GRACE) -> int:
    """SIGTERM, after `grace` [s] SIGKILL -> its exit status."""
    process.terminate()
    try:
        return process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def end_if_imported() -> None:
    """End this process, with the status UNGUARDED, where it is a worker that only imports the script of the
    process that trains."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


def check_script() -> None:
    """UserError where the lines of a script that run now have no `__name__` to tell them that a worker
    imports them."""
    main, frame = vars(sys.modules["__main__"]), sys._getframe()
    if getattr(main.get("__spec__"), "name", "").split(".")[-1] == "__main__":
        return  # of a package (python -m robo_rl), which multiprocessing imports in no worker
    while frame.f_back is not None and not (frame.f_globals is main and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    file = frame.f_code.co_filename
    if frame.f_globals is main and file == main.get("__file__") and os.path.isfile(file):
        with open(file, errors="replace") as script:
            if "__name__" not in script.read():
                raise UserError(UNGUARDED_WORDS)


@contextmanager
def without_absent_main() -> Iterator[None]:
    """While a process starts: it does not look for a `__main__` that is in no file, such as of `python -`
    (multiprocessing would look for a file `<stdin>`, and the process would end)."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or os.path.exists(file):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def set_openmp(threads: int = 0) -> None:
    """Before torch is loaded, for this process and its children: so many threads (0: as it is), which soon
    sleep where they wait for each other (libgomp).

    By itself libgomp spins 300,000 times first. Beside another busy process, a second run say, threads of
    two then wait for one that has no core: an inference that takes 10 ms took 0.2 to 1 s.
    """
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # libgomp's own where threads outnumber cores
