"""Whole `robo_rl` commands in processes of their own, forked from a warm one so that each starts at once."""

import fcntl
import functools
import importlib.abc
import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

TESTS = Path(__file__).parent
HANGS = 280.0  # s: a bound on hanging, not on slowness, below the 300 of a test
TINY = (
    "--task",
    "reach",
    "--envs",
    "16",
    "--steps",
    "2500",
    "--rl.decisions",
    "4",
    "--rl.minibatch",
    "64",
    "--rl.epochs",
    "2",
    "--rl.critic-warmup",
    "1",
    "--policy.hidden",
    "32",
    "--bc.updates",
    "30",
    "--bc.batch",
    "32",
    "--eval-episodes",
    "8",
    "--eval-every",
    "700",
    "--demos",
    "2",
    "--threads",
    "1",
    "--workers",
    "0",
    "--no-video",
)


TINY_REPLAY = (
    "--task",
    "reach",
    "--envs",
    "4",
    "--steps",
    "512",
    "--rl.batch",
    "16",
    "--rl.warmup",
    "128",
    "--rl.pretrain",
    "10",
    "--rl.utd",
    "0.5",
    "--policy.hidden",
    "16",
    "--bc.updates",
    "20",
    "--bc.batch",
    "32",
    "--eval-episodes",
    "4",
    "--eval-every",
    "256",
    "--demos",
    "2",
    "--threads",
    "1",
    "--workers",
    "0",
    "--no-video",
)
# a classifier pays the reward; the policy whose episodes are marked for it succeeds in some, fails in others
CLASSIFIER = (
    "--algo",
    "demo_sac",
    "--demos",
    "20",
    "--bc.updates",
    "550",
    "--bc.batch",
    "128",
    "--policy.hidden",
    "64",
    "--policy.no-residual",
    "--rl.judge",
    "classifier",
    "--rl.judge-episodes",
    "60",
    "--rl.judge-rate",
    "0.2",
)


_domains = []  # this process's DDS domains, open as long as it lives


def dds_domain() -> int:
    """A DDS domain that no other test has, in this process or another. Below 102: the ports of higher ones
    (7400 + 250 of each) are among those that the system gives to any program."""
    for n in range(1, 102):
        claim = open(Path(tempfile.gettempdir()) / f"robo_rl_domain_{n}.lock", "a")  # noqa: SIM115
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            claim.close()
            continue
        _domains.append(claim)
        return n
    raise AssertionError("every DDS domain is taken")


@functools.cache
def _server() -> forkserver.ForkServer:
    """The process that commands are forked from. multiprocessing has one for all, with what its first user
    preloads, and worker pools of a test may be the first."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["warm"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [before])])
    try:
        server.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return server


def forked(function: Callable, *args: object) -> "multiprocessing.process.BaseProcess":
    """A process, started, that calls `function`. It is forked from the warm one and not from this one, whose
    threads a forked child would not have."""
    process = multiprocessing.get_context("forkserver").Process(target=function, args=args)
    with patch.object(forkserver, "connect_to_new_process", _server().connect_to_new_process):
        process.start()
    return process


@dataclass(frozen=True)
class Result:
    """Exit status (-9: killed), standard output and error."""

    code: int
    out: str
    err: str

    @property
    def mistake(self) -> str:
        """The one line that a user's mistake is; asserts that it is one, with exit status 2."""
        lines = without_progress(self.err).splitlines()
        assert self.code == 2 and len(lines) == 1 and lines[0].startswith("robo_rl: ") and not self.out, self
        return lines[0]


def without_progress(err: str) -> str:
    """What was said on stderr, without the lines of what a command is waiting for."""
    said = r"^(compiling .*, once on this machine: some 10 s|loading the policy of .*|waiting up to .*)\n"
    return re.sub(said, "", err, flags=re.MULTILINE)


class Command:
    """A command that runs; `wait` for it, or kill it. `guarded`: as from a shell, `train` in a process of its
    own below this one."""

    def __init__(
        self,
        cwd: Path,
        argv: Sequence[str],
        absent: Sequence[str] = (),
        env: "dict[str, str] | None" = None,
        first: "Callable[[], None] | None" = None,
        guarded: bool = False,
    ):
        self.out, self.err = (cwd / f".{kind}{time.monotonic_ns()}" for kind in ("out", "err"))
        for path in (self.out, self.err):
            path.touch()  # a command may be killed before it opens them
        words = [str(a) for a in argv]
        self.process = forked(
            _child, cwd, words, tuple(absent), env or {}, first, guarded, self.out, self.err
        )

    def wait(self, timeout: float = HANGS) -> Result:
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            raise TimeoutError(self.said())
        result = Result(self.process.exitcode, self.out.read_text(), self.err.read_text())
        self.out.unlink()
        self.err.unlink()
        return result

    def said(self) -> str:
        return self.err.read_text() if self.err.exists() else ""

    def until(self, condition: Callable[[], bool], timeout: float = 300) -> None:
        """Wait until `condition()`; the command must be running then."""
        end = time.monotonic() + timeout
        while not condition():
            assert self.process.is_alive() and time.monotonic() < end, self.said()
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


def launch_script(name: str):
    """The module of a script in launch/."""
    spec = importlib.util.spec_from_file_location(name, TESTS.parent / f"launch/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def robo_rl(
    cwd: Path,
    *argv: object,
    absent: Sequence[str] = (),
    env: "dict[str, str] | None" = None,
    first: "Callable[[], None] | None" = None,
    timeout: float = HANGS,
) -> Result:
    """Run `robo_rl *argv` in the folder `cwd`, as if the packages `absent` were not installed; `first()` runs
    before."""
    return Command(cwd, argv, absent, env, first).wait(timeout)


def last_weights(folder: Path) -> bytes:
    """The weights of a run's newest checkpoint."""
    from robo_rl import checkpoint  # here: it imports torch

    return (checkpoint.checkpoints(folder)[-1] / "policy.safetensors").read_bytes()


def kill_after_a_checkpoint(cwd: Path, *argv: object) -> None:
    """Begin the run in the folder `killed`, and kill it when its second checkpoint is written."""
    from robo_rl import checkpoint

    command, run = Command(cwd, (*argv, "--out", "killed")), cwd / "killed"
    command.until(lambda: (run / "checkpoints").exists() and len(checkpoint.checkpoints(run)) > 1)
    command.signal(signal.SIGKILL)
    command.wait()


class _Without(importlib.abc.MetaPathFinder):
    """A finder that does not find some packages."""

    def __init__(self, finder, names: tuple[str, ...]):
        self.finder, self.names = finder, names

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in self.names else self.finder.find_spec(name, path, target)


def _child(cwd, argv, absent, env, first, guarded, out, err) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    for fd, path in ((1, out), (2, err)):
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(new, fd)
        os.close(new)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code = 1
    try:
        assert "warm" in sys.modules, "tests/warm.py cannot be imported, which multiprocessing does not say"
        os.chdir(cwd)
        os.environ.update(env)
        if absent:
            sys.meta_path[:] = [_Without(f, absent) for f in sys.meta_path]
            for name in [m for m in sys.modules if m.split(".")[0] in absent]:
                del sys.modules[name]
        if first is not None:
            first()
        from robo_rl.cli import main

        sys.argv = ["robo_rl", *argv]
        main(None if guarded else argv)
    except SystemExit as e:
        code = e.code or 0
    except BaseException:  # noqa: BLE001 (as the interpreter would)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
