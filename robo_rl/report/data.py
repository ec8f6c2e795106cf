"""What `robo_rl report` tells of: a run folder as arrays, with what is damaged in it as notes."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from robo_rl import health, old_names
from robo_rl.errors import UserError
from robo_rl.files import read_json
from robo_rl.log import read_metrics
from robo_rl.starts import CHOOSE
from robo_rl.stats import (
    Interval,
    bootstrap_mean,
    counts,
    match,
    paired_difference,
    success_rate,
    unpaired_difference,
)

NAMES = {"sft": "before RL (SFT)", "final": "after RL", "best": "best checkpoint"}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One file of RUN/evals: n episodes from n starts with one policy."""

    label: str
    step: int
    success: np.ndarray  # [n] bool
    starts: list
    task: list[str]
    returns: np.ndarray  # [n], empty if not stored
    which: int = CHOOSE  # the list of starts
    origins: "list | None" = None  # [n], of a world model: the recorded frame that each start begins from
    judged: bool = True  # whether the task knows success

    @property
    def rate(self) -> Interval:
        """Success, of a task that knows none the mean return, with its 95 % interval."""
        if self.judged:
            return success_rate(self.success, self.origins)
        return bootstrap_mean(self.returns, groups=self.origins)

    @property
    def episodes(self) -> str:
        """How many there are, and in a world model from how many recorded starts."""
        n = len(self.success)
        return f"{n}" if self.origins is None else f"{n} from {len(set(self.origins))} recorded starts"

    @property
    def name(self) -> str:
        return NAMES.get(self.label, self.label.replace("_", " "))


@dataclass(frozen=True, slots=True)
class Difference:
    """Success, or mean return, of `after` minus `before`: on `n` shared starts if `paired`, else as two
    samples."""

    change: Interval
    paired: bool
    n: int

    @property
    def verdict(self) -> str:
        return "improved" if self.change.low > 0 else "worse" if self.change.high < 0 else "no clear change"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything the page is made from."""

    folder: Path
    info: dict
    metrics: dict[str, np.ndarray]
    evals: list[Evaluation]  # in the order of their steps
    videos: list[tuple[str, Path]]  # (label, file), whole files only, start and end first
    notes: list[str]
    findings: list[health.Finding]  # numbers that left their healthy range
    ranges: list[dict]  # those that were watched: metric, title, healthy
    held_out: "dict | None" = None  # heldout.json, of a run without a simulator that was judged

    @property
    def config(self) -> dict:
        """The run's options; {} where run.json does not say them."""
        return self.info.get("config") or {}

    @property
    def judged(self) -> bool:
        """Whether the task knows success."""
        return all(e.judged for e in self.evals)

    @property
    def start(self) -> "Evaluation | None":
        """The policy RL began with: label "sft", else the first evaluation, if others were later in
        training."""
        sft = next((e for e in self.evals if e.label == "sft"), None)
        later = bool(self.evals) and self.evals[0].step < self.evals[-1].step
        return sft or (self.evals[0] if later else None)

    @property
    def end(self) -> "Evaluation | None":
        """What came out: label "final", else the latest that is neither the start nor picked as the best."""
        supervised = self.start is not None and self.start.label == "sft"
        late = [
            e for e in self.evals if e is not self.start and e.label != "best" and (e.step or not supervised)
        ]
        return next((e for e in late if e.label == "final"), late[-1] if late else None)

    @property
    def best(self) -> "Evaluation | None":
        """The checkpoint that was best on the starts that choose: label "best", else the last policy, if it
        was that."""
        return next(
            (e for e in self.evals if e.label == "best"),
            next((e for e in self.evals if e.label == "final"), None),
        )


def load_evaluation(path: Path) -> Evaluation:
    """Read and check one evaluation; UserError says what is wrong with the file."""
    d = read_json(path)
    try:
        success = np.asarray(d["success"], dtype=float)
        n = len(success)
        starts, task, returns, origins = (
            list(d.get(k) or []) for k in ("starts", "task", "return", "origin")
        )
        ok = np.isin(success, (0.0, 1.0)).all() and {len(x) for x in (starts, task, returns, origins)} <= {
            0,
            n,
        }
        if not ok or not n:
            raise ValueError("no episodes, lengths differ, or success is not 0 and 1")
        return Evaluation(
            str(d.get("label") or path.stem),
            int(d.get("step") or 0),
            success.astype(bool),
            starts,
            [str(t) for t in task],
            np.asarray(returns, dtype=float),
            int(d.get("list") or CHOOSE),
            origins or None,
            not d.get("no_success") or not returns,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path} is damaged ({e}); delete it, or evaluate again") from None


def whole_mp4(path: Path) -> bool:
    """True if the file is a chain of complete MP4 boxes with an index (`moov`): not cut off while written."""
    size, at, kinds = path.stat().st_size, 0, set()
    with open(path, "rb") as f:
        while at < size:
            f.seek(at)
            head = f.read(16)
            if len(head) < 8:
                return False
            length = int.from_bytes(head[:4], "big")
            if length == 1:
                length = int.from_bytes(head[8:16], "big")
            length = length or size - at
            if length < 8 or at + length > size or (at == 0 and head[4:8] != b"ftyp"):
                return False
            kinds.add(head[4:8])
            at += length
    return b"moov" in kinds


def load(folder: Path) -> RunRecord:
    """Read a run folder; damaged evaluations and videos become notes."""
    info = read_json(folder / "run.json")
    if isinstance(info.get("config"), dict):
        info["config"] = old_names.options(info["config"])
    notes, evals, videos = [], [], []
    for path in sorted((folder / "evals").glob("*.json")):
        try:
            evals.append(load_evaluation(path))
        except UserError as e:
            notes.append(str(e))
    order = {"sft": -1, "best": 1, "final": 2}
    evals.sort(key=lambda e: (e.label != "sft", e.step, order.get(e.label, 0), e.label))
    for path in sorted((folder / "videos").glob("*.mp4")):
        if whole_mp4(path):
            videos.append((path.stem, path))
        else:
            notes.append(
                f"The video {path.name} is no whole MP4 file (cut off while written?) and was left out."
            )
    rank = {"sft": 0, "final": 1, "best": 2}
    videos.sort(key=lambda v: (rank.get(v[0], 9), v[0]))
    try:
        ranges, findings = health.read(folder)
    except UserError as e:
        ranges, findings = [], []
        notes.append(str(e))
    held_out, path = None, folder / "heldout.json"
    if path.exists():
        try:
            held_out = read_json(path, dict)
        except UserError as e:
            notes.append(str(e))
    return RunRecord(folder, info, read_metrics(folder), evals, videos, notes, findings, ranges, held_out)


def difference(before: Evaluation, after: Evaluation) -> Difference:
    """Paired on the shared starts where those are all of the smaller evaluation, else unpaired."""
    keys = [list(zip(e.starts, e.task or [""] * len(e.starts), strict=False)) for e in (after, before)]
    i, j = match(*keys)
    if len(i) and len(i) == min(len(before.success), len(after.success)):
        groups = None if after.origins is None else np.array(after.origins)[i]
        if not after.judged:
            change = bootstrap_mean(after.returns[i] - before.returns[j], groups=groups)
            return Difference(change, True, len(i))
        return Difference(paired_difference(after.success[i], before.success[j], groups=groups), True, len(i))
    if not after.judged:
        mine, theirs = after.rate, before.rate
        half = np.hypot(mine.high - mine.low, theirs.high - theirs.low) / 2
        change = mine.value - theirs.value
        return Difference(Interval(change, change - half, change + half), False, 0)
    mine, theirs = (counts(e.success, e.origins) for e in (after, before))
    return Difference(unpaired_difference(*mine, *theirs), False, 0)


def totals(run: RunRecord) -> dict[str, float]:
    """time_s and env_steps of the whole run, time by stage, steps_per_s over the RL stage (nan if
    unknown)."""
    m = run.metrics
    if not m:
        return dict.fromkeys(("time_s", "env_steps", "sft_s", "rl_s", "steps_per_s"), math.nan)
    rl = m["stage"] == "rl"
    end = float(np.nanmax(m["time"]))
    before = m["time"][: rl.argmax()] if rl.any() else m["time"]  # RECAP goes on by supervision in RL
    sft_end = float(np.nanmax(before)) if len(before) else 0.0
    steps, t = m["step"][rl], m["time"][rl]
    rate = math.nan
    if len(steps) > 1 and t[-1] > t[0] and steps[-1] > steps[0]:
        rate = float((steps[-1] - steps[0]) / (t[-1] - t[0]))
    elif np.isfinite(m.get("rate/steps_per_s", np.array([math.nan]))).any():
        rate = float(np.nanmedian(m["rate/steps_per_s"]))
    return {
        "time_s": end,
        "env_steps": float(steps[-1]) if len(steps) else 0.0,
        "sft_s": sft_end,
        "rl_s": end - sft_end if rl.any() else 0.0,
        "steps_per_s": rate,
    }
