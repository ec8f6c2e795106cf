"""What an arm does becomes episodes of a data set, and the arm's loop never waits for the disk.

A thread appends every row to a journal in the data set's folder; an episode that ends is read back from there
into the data set. So memory does not grow with the length, and after `kill -9` the next recording into the
folder, or `robo_rl data repair`, adds what the journal has (`recover`).

Journal: records of `human.correction_journal`. The first says what the data set is; then come frames, and for
each episode that ended a record that closes it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from robo_rl.data import layout
from robo_rl.data.episode import Episode, Features
from robo_rl.data.labels import state_units
from robo_rl.data.writer import Writer
from robo_rl.errors import UserError, plural, quoted
from robo_rl.files import lock
from robo_rl.human.correction_journal import CLOSE, FRAME, CorrectionJournal, scan
from robo_rl.types import ControlSpec

WAITING = 128 << 20  # bytes of rows that wait for the disk, at most
BATCH = 50  # rows that are written at once, at most


class ArmRecording:
    """Appends episodes to the data set `folder`, which has these `features` and this `spec` (as of `Writer`).

    source: who acts; unfinished: an episode that was killed before it ended is one too; units: of the action,
    as `data label` takes them; sized: makes a camera's picture the data set's; tell: receives a line where
    the recording ends before its episode does (`failed` says why); log: one where episodes of a killed
    recording were added. given: rows so far. UserError: the folder cannot be written, or is no such data set.
    """

    def __init__(
        self,
        folder: Path | str,
        features: Features,
        spec: ControlSpec | None = None,
        *,
        source: str = "policy",
        unfinished: bool = True,
        units: str = "",
        sized: Callable[[np.ndarray], np.ndarray] = np.asarray,
        log: Callable[[str], None] = print,
        tell: Callable[[str], None] = lambda line: None,
    ):
        self.folder, self.features, self.spec, self.units = Path(folder), features, spec, units
        self.source, self.unfinished, self.sized, self.tell = source, unfinished, sized, tell
        self.task, self.failed = "", ""
        if added := recover(self.folder):
            log(recovered(self.folder, added))
        self.writer = Writer(folder, features, spec)
        self.journal = CorrectionJournal(self.folder / layout.JOURNAL)
        self.name, self.most = token_hex(6), 0
        self._head()
        self.given = self.packed = self.written = 0  # rows: taken, in the journal's memory, in its file
        self.thread = ThreadPoolExecutor(1, "recorder")
        self.thread.submit(int)  # begins it here: not in the loop, whose real-time priority it would have
        self.is_blocked = False  # no more is written before the end
        self.ended: list[Future] = []
        self.errors: list[BaseException] = []

    def append(self, state: np.ndarray, pictures: dict[str, np.ndarray], action: np.ndarray) -> None:
        """One row: what was observed (pictures by image/<view>) and the action then taken. Does not wait."""
        if self.failed:
            return
        if not self.most:
            size = 1000 + sum(x.nbytes for x in (state, action, *pictures.values()))
            self.most = max(2 * BATCH, WAITING // size)
        if self.given - self.written >= self.most:
            self.failed = "the disk is too slow"
            self.thread.submit(self._fail, self.failed)
            return
        self.given += 1
        self.thread.submit(self._append, state, pictures, action, self.task)

    def end_episode(
        self,
        *,
        success: bool = False,
        terminated: bool = False,
        reward: float = 0.0,
        final: "tuple[np.ndarray, dict] | None" = None,
    ) -> Future[int]:
        """The rows since the last end are an episode -> its frames, once it is in the data set. reward: of
        the last row; final: state and pictures after it."""
        end = {"success": success, "terminated": terminated, "reward": reward}
        self.ended.append(self.thread.submit(self._end, end, final))
        return self.ended[-1]

    def drop_episode(self) -> None:
        """The rows since the last end are no episode."""
        self.ended.append(self.thread.submit(self._clear))

    def finish(self, **end: Any) -> int:
        """All rows are one episode, if there are any, which ends as `end_episode` takes it; then `close` ->
        its frames."""
        written = self.end_episode(**end) if self.given else None
        self.close()
        return 0 if written is None else written.result()

    def close(self) -> None:
        """Wait for what is being written, and end. UserError: something could not be written; the journal has
        it for the next recording."""
        self.thread.shutdown()
        self.journal.abandon()
        errors = self.errors + [e for future in self.ended if (e := future.exception())]
        if not errors:
            self.journal.path.unlink(missing_ok=True)
        try:
            self.writer.close()
            if self.units and self.writer.episodes:
                state_units(self.folder, self.units)
        except (OSError, UserError) as e:
            errors.append(e)
        for error in errors:
            if not isinstance(error, (OSError, UserError)):
                raise error
            raise UserError(
                f"{told(error)}; what was recorded is in {self.journal.path}: the next recording there, or "
                f"robo_rl data repair {quoted(self.folder)}, adds it"
            ) from error

    # ---- in the thread

    def _append(self, state: np.ndarray, pictures: dict, action: np.ndarray, task: str) -> None:
        try:
            images = {k.removeprefix("image/"): self.sized(x) for k, x in pictures.items()}
            row = np.asarray(state, np.float32), np.asarray(action, np.float32)
            self.journal.frame(self.name, -1, task, *row, 0.0, 0, 0, images)
            self.packed += 1
            if not self.is_blocked and (self.packed == self.given or len(self.journal) >= BATCH):
                self._commit()
        except UserError as e:
            self.is_blocked = True
            self._fail(str(e))
        except Exception as e:  # of a thread, told by `close`
            self.errors.append(e)
            self._fail(str(e))

    def _commit(self) -> None:
        try:
            self.journal.commit()
        except OSError as e:
            raise UserError(f"cannot write {self.journal.path}: {e.strerror}") from e
        self.written = self.packed

    def _fail(self, why: str) -> None:
        """No more rows are taken, those before are kept."""
        self.failed = why
        self.tell(f"the recording ends after {self.given} frames: {why}")

    def _head(self) -> None:
        info = layout.new_info(self.features, "", self.spec)
        head = {"source": self.source, "unfinished": self.unfinished, "units": self.units}
        self.journal.record({"kind": "begin", "info": info} | head)

    def _end(self, end: dict, final: "tuple[np.ndarray, dict] | None") -> int:
        arrays = {}
        if final is not None:
            arrays = {k: self.sized(x) for k, x in final[1].items()}
            arrays["final"] = np.asarray(final[0], np.float32)
        self.journal.close_episode(self.name, len(self.writer), end, arrays)
        self.name = token_hex(6)  # also where the rest fails
        self._commit()
        frames = 0
        for _, episode in episodes_of(scan(self.journal.path)[0], self.writer.episodes):
            self.writer.add(episode)
            frames = len(episode)
        self.writer.flush()
        self._clear()
        return frames

    def _clear(self) -> None:
        """The journal has no episode, and what comes is another."""
        self.journal.forget()
        self._head()
        self.journal.close_episode(self.name, -1)
        with suppress(OSError, UserError):  # a longer one does: its episodes are closed
            self.journal.replace()
        self.name = token_hex(6)


def features_of(spec: ControlSpec, size: int) -> Features:
    """Features of what an arm of this spec does, with pictures of size x size."""
    return Features(
        fps=round(1 / spec.period, 6),
        state=spec.state_names,
        action=spec.action_names,
        views=tuple((v, size, size) for v in sorted(spec.views)),
        robot=spec.id,
    )


def episodes_of(records: list[dict], committed: int) -> Iterator[tuple[str, Episode]]:
    """Names and episodes of a journal that are not among the `committed` first of the data set. Their
    pictures stay in the journal's file."""
    frames: dict[str, list[dict]] = {}
    ends: dict[str, dict] = {}
    for r in records:
        if r["kind"] == FRAME:
            frames.setdefault(r["episode"], []).append(r)
        elif r["kind"] == CLOSE:
            ends[r["episode"]] = ends.get(r["episode"], {}) | r
    for name, rows in frames.items():
        end = ends.get(name)
        if end["index"] < committed if end else not records[0]["unfinished"]:
            continue
        end = end or {}
        views, final = [k for k in rows[0] if k.startswith("image/")], end.get("final")
        yield (
            name,
            Episode(
                np.stack([r["state"] for r in rows]),
                np.stack([r["action"] for r in rows]),
                {v.removeprefix("image/"): stacked([r[v] for r in rows]) for v in views},
                rows[0]["task"],
                end.get("success", False),
                np.eye(1, len(rows), len(rows) - 1)[0] * end.get("reward", 0.0),
                source=records[0]["source"],
                terminated=end.get("terminated", False),
                final=final,
                final_images=None if final is None else {v.removeprefix("image/"): end[v] for v in views},
            ),
        )


def stacked(rows: list[np.ndarray]) -> np.ndarray:
    """`np.stack` of arrays of one file in memory; a view of it where they lie at equal distances."""
    gaps = np.unique(np.diff([x.ctypes.data for x in rows]))
    if len(gaps) != 1:
        return np.stack(rows)
    return as_strided(rows[0], (len(rows), *rows[0].shape), (int(gaps[0]), *rows[0].strides), writeable=False)


def recover(folder: Path) -> list[int]:
    """Add to the data set `folder` what a recording that was killed left in its journal -> frames of each
    episode. UserError: it is being written, or what the journal has does not fit it."""
    path = folder / layout.JOURNAL
    if not path.exists():
        return []
    with lock(folder):  # nobody writes it now
        records, _ = scan(path)
    if not records:
        return []
    info, added = records[0]["info"], []
    spec, _ = layout.spec_of(info["features"]["action"]["robo_rl"])
    try:
        with (
            Writer(folder, layout.features_of_info(info), spec) as writer,
            closing(CorrectionJournal(path)) as j,
        ):
            for name, episode in episodes_of(records, writer.episodes):
                j.close_episode(name, len(writer))
                j.commit()
                writer.add(episode)
                added.append(len(episode))
        if writer.episodes and records[0]["units"]:
            state_units(folder, records[0]["units"])
    except (OSError, UserError) as e:
        raise UserError(
            f"{told(e)}; {path} has what an earlier recording left: move it away to go on without"
        ) from e
    path.unlink()
    return added


def told(e: OSError | UserError) -> str:
    return (e.strerror or str(e)) if isinstance(e, OSError) else str(e)


def recovered(folder: Path | str, added: list[int]) -> str:
    """What is told of `recover`."""
    frames = plural(sum(added), "frame")
    return f"{folder}: added {plural(len(added), 'episode')} ({frames}) that an earlier recording left"
