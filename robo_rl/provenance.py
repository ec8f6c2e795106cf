"""What made a result: versions of the packages that decide it, and the commit of the source tree."""

import platform
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from robo_rl.files import cores

WRITTEN = tuple(
    f":(top,exclude){path}"  # by `--save` and `results page`
    for path in ("results", "docs/results.md", "docs/results", "README.md")
)


def versions() -> dict[str, str]:
    """Versions of what decides a result."""
    from importlib.metadata import PackageNotFoundError, version

    out = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("robo_rl", "torch", "numpy", "mujoco", "mujoco_warp", "gymnasium", "mani_skill"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def machine_name() -> str:
    """The machine in words: processor, cores that this process may use, whether there is an NVIDIA GPU."""
    cpu = Path("/proc/cpuinfo")
    model = (
        next(
            (
                line.split(":", 1)[1].strip()
                for line in cpu.read_text().splitlines()
                if line.startswith("model name")
            ),
            "",
        )
        if cpu.exists()
        else platform.processor()
    )
    gpu = "an NVIDIA GPU" if Path("/dev/nvidia0").exists() else "no GPU"
    return f"{model or platform.machine()}, {cores()} cores, {gpu}"


def git_hash(here: Path = Path(__file__).parent) -> str:
    """Commit of the source tree that has the folder `here`, with + if it was changed; empty outside a
    repository. Results that were written since do not count."""
    try:
        head = subprocess.run(
            ["git", "-C", here, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10
        )
        dirty = subprocess.run(
            ["git", "-C", here, "status", "--porcelain", "-uno", "--", ":/", *WRITTEN],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "") if head.returncode == 0 else ""


def run_facts(folder: Path, config: Any) -> dict[str, Any]:
    """What `run.json` of a world model in `folder` says: how it was made; config: a dataclass with a seed."""
    return {
        "name": folder.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "version": versions().get("robo_rl", ""),
        "git": git_hash(),
        "seed": config.seed,
        "config": asdict(config),
        "versions": versions(),
    }
