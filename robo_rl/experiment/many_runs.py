"""Several runs of one command: with each of several seeds (`robo_rl train --seeds 0,1,2`), with each of
several values of options (`--vary rl.lr=1e-4,3e-4`), as many side by side as there are cores.

    OUT/runs.json     which runs there are, by their options
    OUT/s0, OUT/lr=1e-4,s0, …       a run folder each, and beside it what it has said: s0.log
    OUT/compare.html  all of them, with intervals over seeds

Every run is a process of its own, which ends with this one. What one of them says has its name in front; of
progress the newest of each is told together. If one fails the others go on; `--resume OUT` goes on with those
that have not ended.
"""

import contextlib
import itertools
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from robo_rl.errors import UserError, quoted
from robo_rl.experiment.config import TrainConfig, is_live
from robo_rl.experiment.supervise import follow_parent
from robo_rl.files import cores, full_disk, lock, private_folder, read_json, write_bytes, write_json
from robo_rl.log import RUNS
from robo_rl.signals import asked_to_stop

STATUS = 10.0  # s between two lines of progress
STOPPING = 300.0  # s that runs have to save a checkpoint once they are asked to stop
MOST = 1000  # runs
LONGEST = 200  # bytes of a run's name, which its folder and its log have
PROGRESS = re.compile(rb"^\[\w+\] +\d+ %")
OWN = ("--seeds", "--vary", "--seed", "--out", "--at-once")  # which the runs are not given as they were typed
CONFIG = "--config"  # which they are given as it was when they were asked for
OUTSIDE = re.compile(r",(?![^\[]*\])")  # a comma that is in no [list]
FIXED = ("seed", "seeds", "vary", "out", "at-once", "resume", "config", "plan", "twin")  # what cannot vary


@dataclass(slots=True)
class Child:
    """The process of one run, and what it has said."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: FileIO
    rest: bytes = b""  # a line that is not whole yet
    now: str = field(default="begins")  # its newest progress
    told: str = field(default="")  # what was told of it last


def read_seeds(text: str) -> list[int]:
    """The seeds of "0,1,2" or "0-4". UserError: another text, one seed twice."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,10})(?:-(\d{1,10}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if last < first or last - first >= MOST:
            raise UserError(f"--seeds takes whole numbers such as 0,1,2 or 0-4, got {text!r}")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds) or len(seeds) > MOST:
        raise UserError(f"--seeds takes each seed once, and at most {MOST} of them, got {text!r}")
    return seeds


def read_values(text: str) -> tuple[str, list[str]]:
    """(option without dashes, its values) of "rl.lr=1e-4,3e-4", of "task=a,b;c" where values hold commas, or
    of "rl.sizes=[64,64],[32]" where they are lists."""
    name, sign, values = text.removeprefix("--").partition("=")
    found = [v.strip() for v in (values.split(";") if ";" in values else OUTSIDE.split(values))]
    if not sign or not name or not all(found) or len({*map(_as_number, found)}) < len(found):
        raise UserError(
            f"--vary takes an option and its values, each once, such as rl.lr=1e-4,3e-4, got {text!r}"
        )
    if name in FIXED:
        raise UserError(f"--vary {text}: --{name} is of one run or of all; seeds vary by --seeds 0,1,2")
    return name, found


def _as_number(value: str) -> "float | str":
    """1e-3 and 0.001 are one value."""
    try:
        return float(value)
    except ValueError:
        return value


def as_typed(name: str, value: str) -> list[str]:
    """An option and its value as they are typed; true and false of a switch: --x, --no-x; [a,b]: a b."""
    if value.lower() == "true":
        return [f"--{name}"]
    if value.lower() == "false":
        place, dot, last = name.rpartition(".")
        return [f"--{place}{dot}no-{last}"]
    if value[0] == "[" and value[-1] == "]":
        return [f"--{name}", *value[1:-1].replace(",", " ").split()]
    return [f"--{name}", value]


def planned(seeds: Sequence[int], vary: Sequence[str]) -> dict[str, list[str]]:
    """{name of a run: the options that are its own}: all combinations of the values, of each all seeds."""
    options = [read_values(text) for text in vary]
    names = [name for name, _ in options]
    if len(set(names)) < len(names):
        raise UserError(f"--vary names an option once, got {', '.join(names)}")
    short = [name.rpartition(".")[2] for name in names]
    short = [s if short.count(s) == 1 else name for s, name in zip(short, names, strict=True)]
    runs: dict[str, list[str]] = {}
    for values in itertools.product(*(found for _, found in options)):
        told = [f"{s}={v.strip('[]')}" for s, v in zip(short, values, strict=True)]
        own = [word for name, v in zip(names, values, strict=True) for word in as_typed(name, v)]
        for seed in seeds or [None]:
            parts = [*told, *([] if seed is None else [f"s{seed}"])]
            name = re.sub(r"[^\w.=+,-]", "-", ",".join(parts))
            if len(name.encode()) > LONGEST:
                name = f"{name[: LONGEST // 5]}-{len(runs)}"
            runs[name] = [*own, *([] if seed is None else ["--seed", str(seed)])]
    if len(runs) != len(seeds or [0]) * math.prod(len(found) for _, found in options):
        raise UserError(f"--vary {' '.join(vary)}: two of these runs would have one folder")
    if len(runs) > MOST:
        raise UserError(f"--seeds and --vary make {len(runs):,} runs; at most {MOST:,}")
    return runs


def option_of(arg: str) -> str:
    """The option that a word of the command line gives, as `--at-once` where it is `--at_once=2`."""
    return arg.partition("=")[0].replace("_", "-")


def values_of(argv: Sequence[str], option: str) -> list[str]:
    """All that an option of the command line is given."""
    pairs = itertools.pairwise([*argv, ""])
    return [a.partition("=")[2] if "=" in a else after for a, after in pairs if option_of(a) == option]


def varied(argv: Sequence[str]) -> list[str]:
    """What --vary is given. UserError: an option that is given by itself too."""
    found = values_of(argv, "--vary")
    typed = {option_of(arg) for arg in argv}
    for name in (text.removeprefix("--").partition("=")[0] for text in found):
        if not typed.isdisjoint(option_of(as_typed(name, value)[0]) for value in ("true", "false")):
            raise UserError(f"--vary {name}=… gives its values, --{name} one of all runs: give one of them")
    return found


def without(argv: Sequence[str], options: Sequence[str]) -> list[str]:
    """argv without these options and their values."""
    out, skip = [], False
    for arg in argv:
        of_these = option_of(arg) in options
        if not skip and not of_these:
            out.append(arg)
        skip = not skip and of_these and "=" not in arg
    return out


def side_by_side(config: TrainConfig, at_once: int) -> tuple[int, list[str]]:
    """(how many runs at once, options that each is given beside its own)."""
    if config.device != "cpu":
        return at_once or 1, []
    each = config.workers
    if each is None and (config.server or config.max_staleness or config.backend != "processes"):
        each = cores()  # what is for processes beside the learner keeps them
    n = at_once or max(1, cores() // max(1, each or 1))
    # a core each, and the same run every time
    return n, ["--workers", "0"] if n > 1 and each is None and config.algo != "bc" else []


def check_all(settings: dict[str, TrainConfig]) -> None:
    """Raise UserError, before any run begins, for what one of several settings would be refused for: all that
    a run checks, in a process of its own, whose memory goes back."""
    if len(settings) < 2:
        return  # the first run tells it
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    told = time.monotonic()
    with ProcessPoolExecutor(1, get_context("fork"), follow_parent) as pool:
        for k, (name, config) in enumerate(settings.items()):
            if time.monotonic() - told > STATUS:
                told = time.monotonic()
                tell(f"{k} of {len(settings)} settings checked")
            if why := pool.submit(refused, config).result():
                raise UserError(f"--vary {name}: {why}")


def refused(config: TrainConfig) -> str:
    """Why a run of these options would be refused; "" where it would not, or only its robot knows."""
    from robo_rl.experiment.train import checked

    try:
        if not is_live(config):
            checked(config)
    except UserError as e:
        return str(e)
    return ""


def begin(
    argv: Sequence[str], config: TrainConfig, runs: dict[str, list[str]], at_once: int
) -> tuple[Path, int]:
    """Train the `planned` runs in a new folder -> (the folder, the exit status)."""
    at_once, more = side_by_side(config, at_once)
    what = config.task or ("" if config.demos.isdecimal() else Path(config.demos).name)
    words = filter(None, (config.sim.partition(":")[0], what, config.algo, time.strftime("%m%d-%H%M%S")))
    name = re.sub(r"[:/,]", "-", "-".join(words))
    folder = Path(config.out or Path("runs") / name)
    if (folder / RUNS).exists() or (folder / "run.json").exists():
        raise UserError(
            f"{folder} already holds runs; go on with them: robo_rl train --resume {quoted(folder)}, or "
            "choose another --out"
        )
    private_folder(folder)
    words = [*without(argv, (*OWN, CONFIG)), *more]
    asked = {"runs": {name: [*words, *own] for name, own in runs.items()}, "at_once": at_once}
    if given := values_of(argv, CONFIG):  # a run that begins later shall have what it was asked for
        asked["config"] = f"config{Path(given[-1]).suffix}"
        write_bytes(folder / asked["config"], Path(given[-1]).read_bytes())
    write_json(folder / RUNS, asked)
    return folder, train_all(folder, new=True)


def train_all(folder: Path, new: bool = False) -> int:
    """Train what the folder's runs.json asks for and has not ended -> the exit status: 0, 128 + the number
    of the signal that stopped it, 2 where the first run refused its options, 1 where one failed."""
    asked = read_json(folder / RUNS, dict)
    try:
        config = [CONFIG, str(folder / asked["config"])] if "config" in asked else []
        runs = {str(name): [*config, *map(str, argv)] for name, argv in asked["runs"].items()}
        if not all(isinstance(argv, list) for argv in asked["runs"].values()):
            raise TypeError("the options of a run are a list")
        at_once = max(1, int(asked["at_once"]))
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(f"{folder / RUNS} is damaged ({e}); begin anew with another --out") from None
    waiting = {name: argv for name, argv in runs.items() if not has_ended(folder / name)}
    with lock(folder), asked_to_stop() as came:
        codes = Runs(folder, dict(waiting), at_once, came).work()
    if new and codes and set(codes.values()) == {2} and not any(folder.glob("*/run.json")):
        clear(folder)
        return 2
    failed = [f"{name} ({code})" for name, code in codes.items() if code]
    if came or failed or len(codes) < len(waiting):
        why = "stopped" if came else f"failed, with its exit status: {', '.join(failed)}"
        print(
            f"{why}; go on with what has not ended: robo_rl train --resume {quoted(folder)}", file=sys.stderr
        )
    return 128 + came[0] if came else int(bool(failed))


def has_ended(run: Path) -> bool:
    """Whether nothing is left to train of a run: its last checkpoint says so."""
    saved = sorted(run.glob("checkpoints/*/meta.json"))
    with contextlib.suppress(UserError):
        return bool(saved) and (run / "run.json").exists() and bool(read_json(saved[-1]).get("finished"))
    return False


def clear(folder: Path) -> None:
    """Leave no folder behind of runs that were refused."""
    for path in (folder / RUNS, *folder.glob("*.log"), *folder.glob("config.*"), folder / ".lock"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it was there before, and holds other things
        folder.rmdir()


class Runs:
    """The processes of the runs of one folder: one thread, which reads what they say."""

    def __init__(self, folder: Path, waiting: dict[str, list[str]], at_once: int, came: list[int]):
        self.folder, self.waiting, self.at_once, self.came = folder, waiting, at_once, came
        self.selector = selectors.DefaultSelector()
        self.codes: dict[str, int] = {}  # exit status of the runs that ended
        self.full = False  # whether the disk had no room for a log
        self.told, self.asked, self.deadline = time.monotonic(), 0, float("inf")

    def work(self) -> dict[str, int]:
        """Until all have ended, or a signal came and those that run have saved -> {run: exit status}."""
        try:
            while self.waiting or self.children:
                self.start()
                for key, _ in self.selector.select(0.2):
                    self.read(key.data)
                self.pass_on()
                self.status()
        finally:
            for child in self.children:
                child.process.terminate()  # it saves its run
                child.log.close()
            self.selector.close()
        return self.codes

    @property
    def children(self) -> list[Child]:
        return [key.data for key in self.selector.get_map().values()]

    def start(self) -> None:
        """Start what there is room for; the second not before the first has its folder, so that what is
        refused is refused once."""
        if self.came or 2 in self.codes.values() and not any(self.folder.glob("*/run.json")):
            self.waiting.clear()
        while self.waiting and len(self.children) < self.at_once:
            first = self.children or self.codes
            if first and not any(self.folder.glob("*/run.json")):
                return
            name = next(iter(self.waiting))
            argv, out = self.waiting.pop(name), self.folder / name
            more = ["--resume", str(out)] if (out / "run.json").exists() else [*argv, "--out", str(out)]
            process = subprocess.Popen(
                [sys.executable, "-m", "robo_rl", "train", *more],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # a terminal's Ctrl-C reaches it through this process alone: twice means at once, unsaved
                start_new_session=True,
                preexec_fn=follow_parent,  # noqa: PLW1509 (this process has one thread)
            )
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            child = Child(name, process, open(f"{out}.log", "ab", buffering=0))  # noqa: SIM115
            self.selector.register(process.stdout, selectors.EVENT_READ, child)

    def read(self, child: Child) -> None:
        """What a run has said since; its end, where that is the pipe's."""
        assert child.process.stdout is not None
        data = child.process.stdout.read(65536)
        if data is None:
            return
        *whole, child.rest = (child.rest + data).split(b"\n")
        if not data and child.rest:
            whole, child.rest = [*whole, child.rest], b""
        self.keep(child, data)
        for line in whole:
            self.say(child, line)
        if not data:
            self.selector.unregister(child.process.stdout)
            child.process.stdout.close()
            child.log.close()
            code = self.codes[child.name] = status_of(child.process)
            if code > 128 and not self.came:
                tell(f"{child.name}: killed by signal {code - 128}")

    def keep(self, child: Child, data: bytes) -> None:
        """Add to what a run has said. Where the disk has no room for that the runs go on, or say so."""
        try:
            child.log.write(data)
        except OSError as e:
            if not full_disk(e):
                raise
            if not self.full:
                tell(f"the disk is full: what runs say is missing in {child.log.name}")
            self.full = True

    def say(self, child: Child, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if PROGRESS.match(line):
            child.now = text
        elif text:
            tell(f"{child.name}: {text}")

    def pass_on(self) -> None:
        """The signals that came; a process that has not saved in time is killed, and resumes."""
        for number in self.came[self.asked :]:
            for child in self.children:
                child.process.send_signal(number)
        if self.came and self.deadline == float("inf"):
            self.deadline = time.monotonic() + STOPPING
        self.asked = len(self.came)
        if time.monotonic() > self.deadline:
            for child in self.children:
                child.process.send_signal(signal.SIGKILL)

    def status(self) -> None:
        """Every STATUS seconds the newest progress."""
        if time.monotonic() - self.told < STATUS:
            return
        self.told = time.monotonic()
        if words := self.news():
            tell(words)

    def news(self) -> str:
        """The newest progress of each run that made some since the last call; "" where none did."""
        moved = [c for c in self.children if c.now != c.told]
        for c in moved:
            c.told = c.now
        more = f" | {len(self.waiting)} wait" if self.waiting and moved else ""
        return " | ".join(f"{c.name} {c.now}" for c in moved) + more


def status_of(process: "subprocess.Popen[bytes]") -> int:
    """Exit status of a process that has closed its output, as a shell tells it."""
    try:
        code = process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return code if code >= 0 else 128 - code


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
