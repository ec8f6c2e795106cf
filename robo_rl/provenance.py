"""What made a result: versions of the packages that decide it, and the commit of the source tree."""

import platform
import subprocess
from pathlib import Path


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
