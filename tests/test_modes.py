"""What a run leaves on disk and in shared memory while it goes on is for its user alone."""

import os
import stat
from pathlib import Path

import pytest
from commands import TINY, TINY_REPLAY, Command


def modes(*roots: Path) -> dict[str, str]:
    """Mode of every file, socket and folder below `roots` that others may touch."""
    out = {}
    for root in roots:
        for path in (root, *root.rglob("*")):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue  # it was temporary
            if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) & 0o077:
                out[str(path)] = oct(mode)
    return out


def loose() -> None:
    os.umask(0)


@pytest.mark.parametrize(
    ("options", "beside"),
    [
        (
            (*TINY[:-3], "--workers", "2", "--server", "--no-video"),
            ("flight/slots.bin", "flight/weights.bin", "flight/worker1.state"),
        ),
        (
            (*TINY_REPLAY[:-3], "--workers", "1", "--algo", "demo_sac", "--no-video"),
            ("replay/online", "flight/actor.words"),
        ),
    ],
    ids=["workers", "actor"],
)
def test_every_file_of_a_run_is_its_user_s_alone_while_it_goes_on_and_after(tmp_path, options, beside):
    shm, run = Path("/dev/shm"), tmp_path / "run"
    before = set(shm.iterdir()) if shm.is_dir() else set()
    command, seen = Command(tmp_path, ("train", *options, "--out", "run"), first=loose), {}

    def there() -> bool:
        seen.update(modes(run) if run.exists() else {})
        return all((run / name).exists() for name in beside) and any((run / "checkpoints").glob("step_*"))

    command.until(there, 200)
    new = {
        p
        for p in (set(shm.iterdir()) if shm.is_dir() else set()) - before
        if p.lstat().st_uid == os.geteuid()
    }
    seen |= modes(run, *(p for p in new if "robo_rl" in p.name))
    assert command.wait(200).code == 0
    seen |= modes(run)
    assert not seen
