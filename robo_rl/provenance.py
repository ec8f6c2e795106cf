"""What every long command shares: how a signal stops it, what made its result, which run was the last."""

import gc
import platform
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from robo_rl.errors import UserError


def versions() -> dict[str, str]:
    """Versions of what decides a result."""
    from importlib.metadata import PackageNotFoundError, version
    out = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("robo_rl", "torch", "numpy", "mujoco", "gymnasium", "mani_skill"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def git_hash() -> str:
    """Commit of the source tree, with + if it was changed; empty outside a repository."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "-C", here, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True,
                              timeout=10)
        dirty = subprocess.run(["git", "-C", here, "status", "--porcelain", "-uno"], capture_output=True, text=True,
                               timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "") if head.returncode == 0 else ""


@contextmanager
def importing():
    """Without collections of garbage, which take an eighth of the time of importing torch; what was made then counts as lasting."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def newest_run(root: Path) -> Path:
    """The run below `root` that was written last."""
    found = [p.parent for p in root.glob("*/run.json")]
    if not found:
        raise UserError(f"no run to resume below {root}/; start one with: robo_rl train")
    return max(found, key=lambda r: max((p.stat().st_mtime for p in r.glob("*.json*")), default=0.0))


class Stop:
    """While open: turns the first SIGINT or SIGTERM into a flag; a second one ends the process at once.

    The same signal again within a second is the same press: terminals and service managers tell whole process groups, and
    the guard passes on what it is told.
    """

    asked = 0  # number of the signal
    at = 0.0

    @property
    def code(self) -> int:
        """Exit status of a process that a signal ended."""
        return 128 + self.asked

    def __enter__(self) -> Self:
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def _ask(self, number: int, frame) -> None:
        if self.asked:
            if number != self.asked or time.monotonic() - self.at > 1.0:
                raise KeyboardInterrupt
            return
        self.asked, self.at = number, time.monotonic()
        print("\nstopping: saving a checkpoint (press again to stop without)", file=sys.stderr)
