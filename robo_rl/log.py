"""What a run writes down while it runs: metrics.jsonl (the truth), TensorBoard and wandb (views of it),
progress.

A line of `metrics.jsonl`: {"step": env steps, "time": seconds of running so far, "stage": "sft" | "rl", and
numbers named "group/name"}. `time/<part>` are the seconds that part took since the line before; a number that
is not finite is stored as null and read back as nan.
"""

import contextlib
import ctypes
import json
import math
import netrc
import os
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO
from urllib.parse import urlsplit

import numpy as np

from robo_rl import old_names
from robo_rl.errors import MissingDependency, UserError, choose, quoted
from robo_rl.files import GO_ON, parse_json, private_folder, read_json, replacing, write_bytes

STAGES = ("sft", "rl")  # in the order a run goes through them
RUNS = "runs.json"  # which runs there are in a folder of runs
BACKENDS = ("tensorboard", "wandb")
# where a key of wandb login may be for; its versions differ
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
_OWN = ("step", "time", "stage")
_LINE = {int, float, bool, str, type(None)}  # what the values of a line may be


# ------------------------------------------------------------------------------------------------- reading


def _lines(path: Path) -> list[tuple[bytes, dict]]:
    """(raw line, parsed) of every whole line; a torn last line (no newline, or no JSON) is left out."""
    raw = path.read_bytes().split(b"\n") if path.exists() else [b""]
    rows = []
    for number, line in enumerate(raw[:-1], 1):  # what follows the last newline is torn or empty
        try:
            row = parse_json(line, f"{path}, line {number}", remedy="delete that line to go on")
            if type(row.get("step")) is not int or not _LINE.issuperset(map(type, row.values())):
                raise UserError(
                    f"{path}, line {number} is damaged (no step, or no numbers); delete that line to go on"
                )
        except UserError:
            if number == len(raw) - 1:
                break
            raise
        rows.append((line + b"\n", row))
    return rows


def read_metrics(folder: "str | Path") -> dict[str, np.ndarray]:
    """Columns [lines] of RUN/metrics.jsonl: `step` int64, `stage` str, the rest float64, nan where not
    logged.

    No file gives {}. A torn last line (kill -9) is left out; damage anywhere else raises UserError.
    """
    rows = [old_names.metrics(row) for _, row in _lines(Path(folder) / "metrics.jsonl")]
    if not rows:
        return {}
    names = dict.fromkeys(k for row in rows for k in row if k not in _OWN)

    def column(name: str) -> np.ndarray:
        return np.array([math.nan if row.get(name) is None else row[name] for row in rows], dtype=np.float64)

    return {
        "step": np.array([int(row["step"]) for row in rows], dtype=np.int64),
        "time": column("time"),
        "stage": np.array([str(row.get("stage", STAGES[-1])) for row in rows]),
        **{name: column(name) for name in names},
    }


def runs_near(path: "str | Path") -> list[Path]:
    """Run folders (they hold run.json) in or beside `path`, here and in ./runs, newest first."""
    places = [Path(path), Path(path).parent, Path("."), Path("runs")]
    found = {
        p.parent.resolve(): p.stat().st_mtime
        for place in places
        if place.is_dir()
        for p in place.glob("*/run.json")
    }
    return sorted(found, key=lambda p: (-found[p], p.name))


def open_run(path: "str | Path") -> Path:
    """The run folder at `path` (the folder or a file directly in it); UserError lists the runs nearby, or the
    checkpoints where it is the path of one."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if str(path) and (folder / "run.json").is_file() and Path(path).exists():
        return folder
    if (beside := Path(path).parent).name == "checkpoints" and (beside.parent / "run.json").is_file():
        kept = sorted(p.name for p in beside.iterdir() if (p / "meta.json").exists())
        raise no_checkpoint(beside.parent, Path(path).name, kept)
    if Path(path).is_dir() and list(Path(path).glob("model*.safetensors*")):
        raise UserError(
            f"{path} has weights and is no run; one begins with them: robo_rl train --policy {quoted(path)} "
            "--demos DATA, as they are with --bc.updates 0"
        )
    near = [os.path.relpath(p) for p in runs_near(path)]
    what = (
        f"{path} does not exist"
        if not Path(path).exists()
        else f"{path} is no run folder (it has no run.json)"
    )
    if not near:
        raise UserError(f"{what}; no runs nearby: make one with robo_rl train")
    more = f" and {len(near) - 8} more" if len(near) > 8 else ""
    raise UserError(f"{what}. Runs nearby, newest first: {', '.join(near[:8])}{more}")


def no_checkpoint(run: Path, name: str, allowed: Sequence[str]) -> UserError:
    """What is told of a checkpoint that a run does not have."""
    return UserError(f"{run} has no checkpoint {name!r}. Allowed: {', '.join(allowed)}")


# ------------------------------------------------------------------------------------------------- writing


class _TensorBoard:
    """Scalars into RUN/tensorboard, one event per line."""

    name = "TensorBoard"

    def __init__(self, folder: Path):
        try:
            from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] (made by protobuf at import)
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingDependency("TensorBoard is not installed: pip install tensorboard") from None
        self._event, self._summary = Event, Summary
        for old in (folder / "tensorboard").glob("events.*"):
            old.unlink()  # rebuilt from metrics.jsonl
        self._writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=10)

    def write(self, step: int, wall: float, metrics: Mapping[str, float]) -> None:
        value = self._summary.Value
        self._writer.add_event(
            self._event(
                wall_time=wall,
                step=step,
                summary=self._summary(value=[value(tag=k, simple_value=v) for k, v in metrics.items()]),
            )
        )

    def close(self, failed: bool) -> None:
        self._writer.close()


def wandb_mode() -> str:
    """As WANDB_MODE says, else online with a key (WANDB_API_KEY, or of `wandb login`), offline without."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    base = os.environ.get("WANDB_BASE_URL")
    hosts = (urlsplit(base).hostname or "",) if base else WANDB_HOSTS
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        known = netrc.netrc(os.environ.get("NETRC")).hosts
        return "online" if not known.keys().isdisjoint(hosts) else "offline"
    return "offline"


class _Wandb:
    """Scalars into wandb, by `wandb_mode`; offline in RUN/wandb. Runs of one folder of runs are a group."""

    name = "wandb"

    def __init__(self, folder: Path, project: str):
        try:
            import wandb
        except ImportError:
            raise MissingDependency("wandb is not installed: pip install 'robo_rl[wandb]'") from None
        mode = wandb_mode()
        known = folder / "wandb_id"
        resumed = known.exists()
        if not resumed:
            write_bytes(known, secrets.token_hex(4).encode())
        above = folder.resolve().parent
        config = read_json(folder / "run.json") if (folder / "run.json").exists() else {}
        try:
            self._run = wandb.init(
                project=project or "robo_rl",
                name=os.environ.get("WANDB_NAME") or folder.resolve().name,
                group=os.environ.get("WANDB_RUN_GROUP") or (above.name if (above / RUNS).exists() else None),
                id=known.read_text().strip(),
                mode=mode,
                dir=str(folder),
                config=config,
                settings=wandb.Settings(console="off"),
                resume="allow" if resumed and mode == "online" else None,
            )
        except Exception as e:  # an account, a network or a mode that wandb refuses
            raise UserError(
                f"wandb cannot begin ({' '.join(str(e).split())[:200]}); WANDB_MODE=offline writes into the "
                "run folder, and wandb sync sends it later"
            ) from e
        self._run.define_metric("env_step")
        self._run.define_metric("*", step_metric="env_step")  # so a resumed run overlays what it repeats

    def write(self, step: int, wall: float, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "env_step": step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def tried(view: _TensorBoard | _Wandb, call: Callable[..., None], *given: Any) -> bool:
    """Whether a call of a view went well; the run, whose numbers are in metrics.jsonl, does not end with
    it."""
    try:
        call(*given)
    except Exception as e:  # another program's: its service died, its disk is full
        why = " ".join(str(e).split())[:200]
        warnings.warn(
            f"{view.name} fails and gets no more of this run ({type(e).__name__}{why and f': {why}'}); "
            "metrics.jsonl has all numbers",
            stacklevel=3,
        )
        return False
    return True


class RunLog:
    """Appends metrics to RUN/metrics.jsonl and to the chosen views. Use it as a context manager.

    `backends`: any of "tensorboard" and "wandb" (or none); a `wandb_project` asks for wandb too. One that
    fails later is left with a warning.
    `resume_step`, `resume_stage`: the step and stage of the checkpoint the run goes on from; lines after it
    are dropped in one atomic rewrite, so no step appears twice. -1 with "sft" drops all. `resume_lines`: how
    many lines there were then, where that is known, for a step may have lines from before and after its
    checkpoint. `time` goes on from the last line kept. Holds one file open; a line is on its way to the disk
    when `log` returns, so a killed process loses at most the line it was writing.
    """

    def __init__(
        self,
        folder: "str | Path",
        backends: Sequence[str] = ("tensorboard",),
        wandb_project: str = "",
        *,
        resume_step: "int | None" = None,
        resume_stage: str = "rl",
        resume_lines: "int | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        folder = Path(folder)
        for name in backends:
            choose("log backend", name, BACKENDS)
        choose("stage", resume_stage, STAGES)
        private_folder(folder)
        self._path = folder / "metrics.jsonl"
        rows = _lines(self._path)
        if resume_step is None and rows:
            raise UserError(
                f"{folder} already holds the metrics of a run; go on with it by --resume, "
                "or choose another folder"
            )
        last = (STAGES.index(resume_stage), -1 if resume_step is None else resume_step)
        kept = [
            (raw, row)
            for raw, row in rows[:resume_lines]
            if (STAGES.index(row.get("stage", STAGES[-1])), row["step"]) <= last
        ]
        with replacing(self._path) as temp:
            temp.write_bytes(b"".join(raw for raw, _ in kept))
        self.lines = len(kept)
        self._clock = clock
        self._start = clock() - (kept[-1][1].get("time") or 0.0 if kept else 0.0)
        self._views: list[_TensorBoard | _Wandb] = []
        if "tensorboard" in backends:
            self._views.append(_TensorBoard(folder))
            now = time.time() - self.elapsed
            for _, row in kept:
                self._views[0].write(
                    row["step"],
                    now + (row.get("time") or 0.0),
                    {k: v for k, v in row.items() if k not in _OWN and v is not None},
                )
        if "wandb" in backends or wandb_project:
            self._views.append(_Wandb(folder, wandb_project))
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (open as long as the run)

    @property
    def elapsed(self) -> float:
        """Seconds of running so far, those before a resume included, those between not."""
        return self._clock() - self._start

    def log(self, step: int, metrics: Mapping[str, float], stage: str = "rl") -> None:
        """Append one line. `metrics` are plain numbers (or arrays and tensors of one element)."""
        if self._file.closed:
            raise UserError("this run log is closed")
        if stage not in STAGES:
            choose("stage", stage, STAGES)
        if not set(_OWN).isdisjoint(metrics):
            raise UserError(f"{', '.join(_OWN)} are names of the log's own; log them under group/name")
        numbers = {k: float(v) for k, v in metrics.items()}
        finite = {k: v for k, v in numbers.items() if math.isfinite(v)}
        row = {"step": int(step), "time": round(self.elapsed, 4), "stage": stage}
        row.update({k: finite.get(k) for k in numbers})
        try:
            self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        except OSError as e:
            raise UserError(f"cannot write {self._path} ({e.strerror}); free some space{GO_ON}") from e
        self.lines += 1
        wall = time.time()
        self._views = [view for view in self._views if tried(view, view.write, int(step), wall, finite)]

    def close(self, failed: bool = False) -> None:
        """Flush everything; calling it again does nothing."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()
            for view in self._views:
                tried(view, view.close, failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(failed=kind is not None)


# ------------------------------------------------------------------------------------------------ progress


def si(x: float) -> str:
    """A number in at most three digits and a letter: 0.5, 512, 4.10k, 1.25M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size * 0.9995:
            v = x / size
            return f"{v:.{2 if abs(v) < 9.995 else 1 if abs(v) < 99.95 else 0}f}{letter}"
    return f"{x:.0f}" if abs(x) >= 99.95 else f"{x:.3g}"


def clock_text(seconds: float) -> str:
    """0:48, 12:05, 1:02:09; "–" for what is not known."""
    if not math.isfinite(seconds):
        return "–"
    s = int(seconds + 0.5)
    return f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"


class Progress:
    """One progress line on stderr: stage, done of total, rate, time left, success so far. Never uses stdout.

    On a terminal it is live; elsewhere a plain line comes every `every` seconds. The rate forgets with a
    half-life of `half_life` seconds; success is a running mean that halves its memory every 7 updates.
    No thread: it draws inside `update`, at most ten times a second. A stage that ends within `patience`
    seconds says nothing.
    """

    def __init__(
        self,
        stream: "TextIO | None" = None,
        *,
        every: float = 5.0,
        half_life: float = 10.0,
        patience: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stream = sys.stderr if stream is None else stream
        self._clock, self._half_life, self._patience = clock, half_life, patience
        self._live = self._task = None
        tty = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._every = 0.1 if tty else every
        if tty:
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TextColumn
            from rich.progress import Progress as Bars

            self._live = Bars(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.description:4}"),
                BarColumn(24),
                TextColumn("{task.fields[text]}"),
                auto_refresh=False,
                console=Console(file=self._stream),
                redirect_stdout=False,
                redirect_stderr=True,
            )
            self._live.start()
        self._stage = ""

    def start(self, stage: str, total: int, unit: str = "steps", done: int = 0) -> None:
        """Begin a stage of `total` units, `done` of them done before (a resume); ends the stage before."""
        self._end()
        self._stage, self._total, self._unit = stage, max(int(total), 1), unit
        self._done = self._first = done
        self._began = self._seen = self._clock()
        self._drawn = -math.inf
        self._moved = self._took = self._hits = self._weight = 0.0
        self._note, self._return, self._updated = "", math.nan, False
        if self._live:
            self._task = self._live.add_task(stage, total=self._total, completed=done, text="")

    def update(
        self,
        done: int,
        success: "float | None" = None,
        note: "str | None" = None,
        gain: "float | None" = None,
    ) -> None:
        """`done` units are done by now; `success` and `gain` are success rate and mean return of the newest
        batch of episodes (nan, None: there were none); `note` is short. Return and note stay until others
        take their place ("": none)."""
        now = self._clock()
        keep = 0.5 ** ((now - self._seen) / self._half_life)
        self._moved = keep * self._moved + done - self._done
        self._took = keep * self._took + now - self._seen
        self._done, self._seen, self._updated = done, now, True
        self._note = self._note if note is None else note
        if gain is not None and math.isfinite(gain):
            self._return = gain
        if success is not None and math.isfinite(success):
            self._hits, self._weight = 0.9 * self._hits + success, 0.9 * self._weight + 1.0
        if now - self._began >= self._patience and now - self._drawn >= self._every:
            self._drawn = now
            self._draw(self.text())

    @property
    def rate(self) -> float:
        """Units per second, recent ones counting more; nan before the first update."""
        return self._moved / self._took if self._took > 0 else math.nan

    @property
    def success(self) -> float:
        """Running mean of the success given to `update`; nan before the first."""
        return self._hits / self._weight if self._weight else math.nan

    def text(self) -> str:
        """The line without its bar."""
        rate = self.rate
        left = (self._total - self._done) / rate if rate > 0 else math.nan
        parts = [
            f"{si(self._done)}/{si(self._total)} {self._unit}",
            f"{si(rate)}/s" if rate > 0 else "–/s",
            f"ETA {clock_text(max(left, 0.0))}",
        ]
        return " · ".join(parts + self._tail())

    def _tail(self) -> list[str]:
        success = [f"success {100 * self.success:.1f} %"] if self._weight else []
        gain = [f"return {self._return:.4g}"] if math.isfinite(self._return) else []
        return success + gain + ([self._note] if self._note else [])

    def each(self, stage: str, items: Sequence, unit: str) -> Iterator:
        """`items` one after the other, as a stage of so many units."""
        if not items:
            return
        self.start(stage, len(items), unit)
        self.update(0)
        for done, item in enumerate(items, 1):
            yield item
            self.update(done)

    def say(self, text: str) -> None:
        """Print a line of its own above the progress line."""
        if self._live:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def _draw(self, text: str) -> None:
        if self._live and self._task is not None:
            self._live.update(self._task, completed=self._done, text=text)
            self._live.refresh()
        else:
            print(
                f"[{self._stage}] {min(100 * self._done // self._total, 100):3d} % · {text}",
                file=self._stream,
                flush=True,
            )

    def _end(self) -> None:
        """Leave the stage's last line standing; of a stage that was refused before it moved none."""
        if not self._stage:
            return
        if not self._updated and self._live and self._task is not None:
            self._live.remove_task(self._task)
        last = self._seen if self._done > self._first else self._clock()
        took = last - self._began  # evaluations that follow are not of the stage
        if took < self._patience or not self._updated:
            self._stage = ""
            return
        moved = self._done - self._first
        rate = [f"{si(moved / took)}/s"] if took > 0 and moved > 0 else []
        self._draw(
            " · ".join(
                [f"{si(self._done)}/{si(self._total)} {self._unit} in {clock_text(took)}"]
                + rate
                + self._tail()
            )
        )
        self._stage = ""

    def close(self) -> None:
        """End the stage and give the terminal back; calling it again does nothing."""
        self._end()
        if self._live:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


@contextlib.contextmanager
def quiet_stdout() -> Iterator[TextIO]:
    """Send what libraries and child processes print to standard output to standard error; yields the real
    one."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(saved, "w", closefd=False) as out, contextlib.redirect_stdout(sys.stderr):
            yield out
    finally:
        ctypes.CDLL(None).fflush(None)  # what C code printed and still holds
        os.dup2(saved, 1)
        os.close(saved)


def begun(progress: Progress | None, stage: str, total: int, unit: str) -> Callable[[int], None]:
    """Begin a stage of `progress` -> what to call with the units that are done."""
    if progress is None:
        return lambda done: None
    progress.start(stage, total, unit)
    progress.update(0)
    return progress.update
