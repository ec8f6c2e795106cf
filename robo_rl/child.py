"""Child processes: what is waited for of them has a deadline."""

import queue
import subprocess
import threading

GRACE = 5.0  # s between SIGTERM and SIGKILL


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
