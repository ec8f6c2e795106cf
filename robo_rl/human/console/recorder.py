"""The console's corrections on the disk: frames in a journal before they count, episodes in a LeRobot v3 data
set.

What cannot be saved is reported (`error`), kept and tried again; the robots go on.
"""

import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

from robo_rl.data.episode import Episode
from robo_rl.data.writer import Writer
from robo_rl.errors import UserError
from robo_rl.human.console.access import DescriptorReserve
from robo_rl.human.correction_journal import CorrectionJournal, scan, unfinished
from robo_rl.human.fleet import EpisodeBuffer
from robo_rl.types import ControlSpec

JOURNAL_SIZE = 20_000_000  # bytes below which the journal is never written anew
RETRY = 3.0  # s until what could not be saved is tried again


def with_help(episode: Episode) -> Episode | None:
    """The episode, if a person helped in it."""
    return episode if "human" in episode.source else None


class CorrectionRecorder:
    """Writes the episodes of `num_robots` robots to the data set `folder` and their frames to the journal at
    `journal`.

    made(episode): what of a finished episode is recorded, None for nothing. Episodes that a session left in
    the journal when it was killed are added to the data set first (`recovered` of them). Frames that no file
    has yet are those of a robot's episode from `written` on. kept: episodes that were added. marks: folder of
    the data set of all episodes that somebody marked; None: they are not kept apart.
    """

    def __init__(
        self,
        folder: Path,
        journal: Path,
        spec: ControlSpec,
        num_robots: int,
        clock: Callable[[], float] = time.monotonic,
        made: Callable[[Episode], Episode | None] = with_help,
        marks: Path | None = None,
    ):
        self.marks_folder, self.marks = marks, None  # its writer, from the first mark on
        self.folder, self.clock, self.made = folder, clock, made
        self.reserve, self.error, self.retry_at = DescriptorReserve(), "", 0.0
        self.writer = Writer(folder, spec=spec)
        self.kept = self.recovered = 0
        for episode in unfinished(scan(journal)[0], self.writer.episodes):
            if (found := made(episode)) is not None:
                self.writer.add(found)
                self.recovered += 1
        self.writer.flush()
        self.journal = CorrectionJournal(journal)
        self.journal.replace()
        self.most = JOURNAL_SIZE  # bytes of the journal after which it is written anew
        self.names = [""] * num_robots  # of the episodes in the journal
        self.written = [0] * num_robots
        for i in range(num_robots):
            self.begin_episode(i)

    @property
    def unsaved(self) -> int:
        """Episodes that are not in the data set's files yet."""
        return len(self.writer) - self.writer.episodes

    def begin_episode(self, i: int) -> None:
        """Name robot i's episode in the journal; none of its frames is written."""
        self.names[i], self.written[i] = secrets.token_hex(6), 0

    def drop_episode(self, i: int) -> None:
        """Discard what the journal has of robot i's episode; it is written anew from its first frame."""
        self.journal.close_episode(self.names[i], -1)
        self.begin_episode(i)

    def end_episode(self, episode, i: int) -> None:
        """Record robot i's finished episode; what is made of it goes to the data set."""
        found = self.made(episode)
        self.journal.close_episode(self.names[i], -1 if found is None else len(self.writer))
        self.begin_episode(i)
        if found is not None:
            self.save(found)
            self.kept += 1

    def save_mark(self, episode: Episode) -> None:
        """Keep an episode that somebody marked, with help or without, for the success classifier."""
        if self.marks_folder is None:
            return
        with self.reserve:
            try:
                self.marks = self.marks or Writer(self.marks_folder, spec=self.writer.spec)
                self.marks.add(episode)
                self.marks.flush()
            except (OSError, UserError) as e:
                self._fail(f"a marked episode is not in {self.marks_folder} ({e})")

    def save(self, *episodes) -> None:
        """Write the journal and finished episodes to the disk; `error` says what failed."""
        with self.reserve:
            try:
                for episode in episodes:
                    self.writer.add(episode)
                self.journal.commit()
                self.writer.flush()
                self.error = ""
            except (OSError, UserError) as e:
                why = (e.strerror or str(e)) if isinstance(e, OSError) else str(e)
                self._fail(f"corrections are not saved yet, trying again ({why})")

    def record_frames(self, episodes: list[EpisodeBuffer]) -> None:
        """Write the robots' new frames to the journal, to the disk at once where a person acted."""
        helped = [self._append(i, episode) for i, episode in enumerate(episodes)]
        if (any(helped) or len(self.journal) > 1000) and not self.error:
            self.save()

    def maintain(self, episodes: list[EpisodeBuffer]) -> None:
        """Retry what failed, and keep the journal small; call it between two steps."""
        if self.error and self.clock() > self.retry_at:
            self.save()
        if self.journal.size > self.most and not self.error:
            self._compact(episodes)

    def close(self) -> None:
        """Save what is left. Where that fails, the journal keeps it for the next console of the run."""
        self.save()
        try:
            if self.error:
                print(
                    f"robo_rl: {self.error}; what people did is in {self.journal.path}, and the next robo_rl "
                    "console of this run puts it into the data set",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                self.writer.close()
                self.journal.replace()
            if self.marks is not None:
                self.marks.close()
        finally:
            self.reserve.close()
            self.journal.abandon()

    def _append(self, i: int, episode: EpisodeBuffer) -> bool:
        """Write the frames that the journal does not have -> whether a person acted in one."""
        helped = False
        for state, action, reward, source, phase, images in episode.frames[self.written[i] :]:
            self.journal.frame(
                self.names[i], episode.start, episode.task, state, action, reward, source, phase, images
            )
            helped |= source == 1
        self.written[i] = len(episode.frames)
        return helped

    def _compact(self, episodes: list[EpisodeBuffer]) -> None:
        """Write the journal anew, with the episodes that are not over."""
        self.save()
        if self.error:
            return
        self.written = [0] * len(episodes)
        for i, episode in enumerate(episodes):
            self._append(i, episode)
        with self.reserve:
            try:
                self.journal.replace()
                self.most = max(
                    JOURNAL_SIZE, 2 * self.journal.size
                )  # so that long episodes are not each step's
            except (OSError, UserError) as e:  # the old one holds all of it
                self._fail(f"the journal is not written anew, trying again ({e})")

    def _fail(self, error: str) -> None:
        self.error, self.retry_at = error, self.clock() + RETRY
