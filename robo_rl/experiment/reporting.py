"""What a run tells while it works: one stream of events, for the terminal, the run's log and the user's own
callback."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from robo_rl.errors import choose

KINDS = ("stage", "progress", "metrics", "evaluation", "warning", "message", "checkpoint", "finished")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a run, as a callback of `train` gets it.

    * kind: `stage` (a part of the work begins), `progress` (`step` of `total` units are done), `metrics` (a
      row of metrics.jsonl), `evaluation` (`metrics` has return and n and, where the task knows success,
      success, low and high; `text` names it: step_… while training, sft, final and best on the starts that
      are reported), `warning` (a metric left its healthy range), `message`, `checkpoint` (saved), `finished`.
    * stage: demo, sft, critic, rl, …
    * step, total: units of the stage: episodes, updates or control steps.
    * metrics: {name: number}; names are those of metrics.jsonl, of an evaluation without their group.
    * text: a sentence, or a name.
    """

    kind: str
    stage: str = ""  # demo, sft, critic, rl, …
    step: int = 0  # units of the stage: episodes, updates, control steps
    total: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    text: str = ""

    def __post_init__(self) -> None:
        choose("kind of event", self.kind, KINDS)


class Reporter:
    """Passes on what a run does: to the progress line on stderr, to RUN/metrics.jsonl and its views, to
    `callback`.

    `callback(event)` is called in the process and thread that train, after the event was written; what it
    raises ends the run, with the last checkpoint kept. `quiet`: no progress line.
    """

    def __init__(self, callback: Callable[[Event], None] | None = None, quiet: bool = False):
        from robo_rl.log import Progress, RunLog

        self._callback = callback or (lambda event: None)
        self._progress = None if quiet else Progress()
        self._log: RunLog | None = None
        self._stage, self._total = "", 0

    def open_log(self, folder: Path, **options) -> None:
        """Write metrics from now on; options of `robo_rl.log.RunLog`."""
        from robo_rl.log import RunLog

        self._log = RunLog(folder, **options)

    def say(self, text: str, kind: str = "message") -> None:
        """A line of its own; kind warning: it begins with that word."""
        if self._progress:
            self._progress.say(f"warning: {text}" if kind == "warning" else text)
        self._callback(Event(kind, self._stage, text=text))

    def start(self, stage: str, total: int, unit: str = "steps", done: int = 0) -> None:
        """A stage of `total` units begins, `done` of them were done before."""
        self._stage, self._total = stage, total
        if self._progress:
            self._progress.start(stage, total, unit, done)
        self._callback(Event("stage", stage, done, total, text=unit))

    def advance(
        self, done: int, success: float | None = None, note: str | None = None, gain: float | None = None
    ) -> None:
        """`done` units of the stage are done; `success`, `gain`: rate and mean return of the newest episodes;
        `note`: a few words. Return and note stay on the line until others take their place."""
        if self._progress:
            self._progress.update(done, success, note, gain)
        self._callback(
            Event(
                "progress",
                self._stage,
                done,
                self._total,
                {k: v for k, v in (("success", success), ("return", gain)) if v is not None},
                note or "",
            )
        )

    def log(self, step: int, metrics: Mapping[str, float], stage: str = "rl") -> None:
        """A row of metrics: numbers by group/name."""
        assert self._log is not None
        self._log.log(step, metrics, stage)
        self._callback(Event("metrics", stage, step, metrics=metrics))

    def tell(self, kind: str, step: int, metrics: Mapping[str, float] | None = None, text: str = "") -> None:
        """An event for the callback alone."""
        self._callback(Event(kind, self._stage, step, self._total, metrics or {}, text))

    @property
    def lines(self) -> int:
        """Rows in metrics.jsonl."""
        assert self._log is not None
        return self._log.lines

    @property
    def elapsed(self) -> float:
        """Seconds of running so far, those before a resume included."""
        assert self._log is not None
        return self._log.elapsed

    def end_stage(self) -> None:
        """Leave the last progress line standing; what is said then comes below it."""
        if self._progress:
            self._progress.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._log is not None:
            self._log.close(failed=kind is not None)
        if self._progress:
            self._progress.close()
