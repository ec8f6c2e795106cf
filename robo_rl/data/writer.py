"""Append episodes to a data set on disk such that every moment leaves a valid one.

A flush writes all its files under temporary names and syncs them, then the checksums of both the old and the
new ones, and only then gives them their names, in this order: videos, frames, last observations, tasks,
statistics, episodes, and last `meta/info.json`. Its episode count is the commit: readers ignore whatever lies
beyond it, so a process killed anywhere leaves what the last finished flush had. Files only ever grow at their
end (a small last file is replaced by one with more rows), so a reader with older meta data finds its rows.

`close` adds the quantiles of all frames to the statistics (`statistics`): between flushes there are none, for
an approximation is not what LeRobot's normalisation means by them.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from robo_rl.data import checksums, layout, statistics, video
from robo_rl.data.checksums import Checksums, Staged, settled
from robo_rl.data.episode import Episode, Features
from robo_rl.data.meta import BrokenDataset, Meta, load_meta, read_checked, read_table
from robo_rl.errors import UserError
from robo_rl.files import lock
from robo_rl.types import ControlSpec

MB = 1 << 20


def claim(root: Path) -> ExitStack:
    """Lock the folder of a data set, present or future, until the stack is closed or the process dies."""
    if root.exists() and not root.is_dir():
        raise UserError(f"{root} is a file; a data set is a folder")
    if root.is_dir() and not (root / layout.INFO).exists():
        strange = sorted(set(os.listdir(root)) - {"data", "meta", "videos", ".lock", layout.JOURNAL})
        if strange:
            raise UserError(f"{root} holds other things ({', '.join(strange[:3])}); choose an empty folder")
    held = ExitStack()
    try:
        held.enter_context(lock(root))
    except OSError as e:
        raise UserError(f"cannot write to {root}: {e.strerror}. Choose another folder") from e
    for temporary in root.rglob(".*.tmp"):  # of a killed writer: there is no other one now
        temporary.unlink()
    return held


def write_table(path: Path, table: Any) -> int:
    """Write a parquet file; -> its size [bytes]."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    varied = pa.types.is_floating, pa.types.is_nested
    repetitive = [c.name for c in table.schema if not any(test(c.type) for test in varied)]
    # a dictionary of floats costs seven times the rest and saves nothing
    columns: Any = repetitive  # pyarrow's default hides that names may be given
    pq.write_table(table, path, compression="snappy", use_dictionary=columns, write_page_checksum=True)
    return path.stat().st_size


def trim(meta: Meta, staged: Staged, put_away: Callable[[Path, bool], None]) -> None:
    """Make the files hold the episodes of `meta` and no more, whatever a killed flush or damage left behind.

    put_away(path, copy) is called for each file before it goes; copy: only its end goes, and the rest of it
    is staged. BrokenDataset: a table that stays cannot be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    E = len(meta.lengths)
    kinds = [
        (meta.root / "data", ".parquet", meta.data_file, meta.lengths),
        (meta.root / "meta" / "episodes", ".parquet", meta.meta_file, np.ones(E, int)),
    ]
    for view, files in meta.video_file.items():
        kinds.append((meta.root / "videos" / layout.picture_key(view), ".mp4", files, None))
    for folder, suffix, files, rows in kinds:
        last = int(files[-1]) if E else -1
        for path in folder.glob("chunk-*/file-*"):
            if path.suffix == suffix:
                index = layout.index_of(path, meta.info["chunks_size"])
                if index > last:
                    put_away(path, False)
                elif index == last and rows is not None:
                    wanted = int(rows[files == last].sum())
                    try:
                        there = pq.read_metadata(path).num_rows
                    except (pa.ArrowException, OSError) as e:
                        raise BrokenDataset(path, f"it cannot be read ({e})", meta.root) from None
                    if there > wanted:
                        table = pq.read_table(path, partitioning=None).slice(0, wanted)  # pyright: ignore[reportArgumentType]  # pyarrow takes None
                        put_away(path, True)
                        write_table(staged.path(path), table)
    for path in meta.final_file:
        table = pq.read_table(path, partitioning=None)  # pyright: ignore[reportArgumentType]  # pyarrow takes None
        kept = table.filter(pc.less(table["episode_index"], E))  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        if not len(kept):
            put_away(path, False)
        elif len(kept) < len(table):
            put_away(path, True)
            write_table(staged.path(path), kept)


@dataclass(frozen=True, slots=True)
class _Tail:
    """The last file of a kind: running index; of our own also rows or frames, size [bytes], Arrow table."""

    index: int = -1
    rows: int = 0
    size: int = 0
    table: Any = None
    open: bool = False  # False: the next flush starts a new file

    def next(self, limit: int, schema: Any = None) -> "_Tail":
        """Itself, or the file after it where it is full or its table is of another schema."""
        fits = schema is None or self.table is None or self.table.schema.equals(schema)
        return self if self.open and self.size < limit and fits else _Tail(self.index + 1)


@dataclass(frozen=True, slots=True)
class _State:
    """What is committed, and how to go on from there. A failed flush leaves it as it was."""

    episodes: int = 0
    frames: int = 0
    tasks: tuple[str, ...] = ()
    totals: dict = field(default_factory=dict)
    data: _Tail = _Tail()
    meta: _Tail = _Tail()
    videos: dict[str, _Tail] = field(default_factory=dict)
    final: _Tail = _Tail()
    histograms: dict = field(default_factory=dict)  # view -> int64[3,256]
    sums: Checksums = field(default_factory=Checksums)
    complete: bool = True  # the statistics on the disk have their quantiles


class Writer:
    """Writes the data set at `root`; an existing one is continued.

    features: None takes those of the first episode (`Features.of`). spec: stored beside the data, so that
    training can tell what an action meant. file_mb: start another file beyond this size (0: with every
    flush). The buffer goes out every `flush_every` episodes or 32 MB, by `flush()` and by `close()`; use
    `with Writer(...)`.
    Raises UserError: other features or actions than the data set has, folder in use or not a data set.
    """

    def __init__(
        self,
        root: Path | str,
        features: Features | None = None,
        spec: ControlSpec | None = None,
        *,
        file_mb: int = 8,
        flush_every: int = 64,
    ):
        if file_mb < 0 or flush_every < 1:
            raise UserError(f"file_mb must be >= 0 and flush_every >= 1, got {file_mb} and {flush_every}")
        self.root, self.features, self.spec = Path(root), features, spec
        self._limit, self._flush_every = file_mb * MB, flush_every
        self._buffer: list[Episode] = []
        self._state = _State()
        self._info: dict = {}
        self._made = not self.root.exists()
        self._held: ExitStack | None = claim(self.root)
        try:
            if (self.root / layout.INFO).exists():
                self._resume()
            elif features is not None:
                self._begin(features)
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    @property
    def episodes(self) -> int:
        """Committed episodes."""
        return self._state.episodes

    @property
    def frames(self) -> int:
        """Committed frames."""
        return self._state.frames

    def __len__(self) -> int:
        """Episodes, committed and buffered."""
        return self.episodes + len(self._buffer)

    def add(self, episode: Episode) -> None:
        """Append one episode; UserError if it does not fit the data set, which then stays as it was."""
        self._need_open()
        if self.features is None:
            if self.spec is None:
                raise UserError("Writer needs features=Features(...) or spec=env.spec to begin a data set")
            self._begin(Features.of(episode, self.spec))
        assert self.features is not None
        if bad := self.features.misfits(episode):
            raise UserError(
                f"the episode does not fit the data set {self.root}: {'; '.join(bad)}. "
                "Write it to another folder"
            )
        self._buffer.append(episode)
        if len(self._buffer) >= self._flush_every or sum(e.nbytes for e in self._buffer) > 32 * MB:
            self.flush()

    def flush(self) -> None:
        """Commit the buffered episodes. On UserError (disk full) data set and buffer are as before."""
        self._need_open()
        if not self._buffer:
            return
        staged = Staged(self.root, self._state.sums)
        try:
            self._state = self._commit(self._buffer, self._state, staged)
        except (OSError, UserError) as e:
            state, cause = self._state, e if isinstance(e, OSError) else e.__cause__
            self._state = replace(
                state,
                sums=settled(self.root, staged.sums),
                videos={v: replace(t, open=False) for v, t in state.videos.items()},
            )
            if not isinstance(cause, OSError):
                raise
            raise UserError(
                f"cannot write the data set {self.root}: {cause.strerror or cause}. "
                f"The {self.episodes} episodes saved before are intact; free disk space and run "
                "again to continue"
            ) from e
        finally:
            staged.abandon()
        self._buffer = []

    def close(self) -> None:
        """Flush and release the folder; one that was made here for no episode goes. Closing twice is
        harmless."""
        if self._held is None:
            return
        try:
            self.flush()
            if not self._state.complete:
                statistics.complete(
                    load_meta(self.root), self._state.totals, self._state.histograms, self._state.sums
                )
        finally:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        assert held is not None  # called once
        if self._made and os.listdir(self.root) == [".lock"]:
            (self.root / ".lock").unlink()
            self.root.rmdir()
        held.close()

    def _need_open(self) -> None:
        if self._held is None:
            raise UserError(f"the writer of {self.root} is closed; open a new one to continue")

    def _begin(self, features: Features) -> None:
        self.features = features
        for kind in ("data", "meta", "videos"):  # a writer killed before its first commit
            for path in (self.root / kind).rglob("file-*"):
                if path.suffix in (".parquet", ".mp4"):
                    path.rename(path.with_name(path.name + ".orphan"))
        self._info = layout.new_info(features, video.codec_name() if features.views else "", self.spec)
        self._state = _State(videos={view: _Tail() for view, _, _ in features.views})

    def _resume(self) -> None:
        meta = load_meta(self.root)
        there = meta.info["features"]
        bad = [] if self.features is None else self.features.differences(meta.features)
        wanted = layout.info_features(meta.features)
        bad += [
            f"column {key!r} is {ft['dtype']} here, {there.get(key, {}).get('dtype', 'absent')} there"
            for key, ft in wanted.items()
            if there.get(key, {}).get("dtype") != ft["dtype"]
        ]
        bad += [f"column {key!r} is only there" for key in there if key not in wanted]
        if self.spec is not None and meta.spec is not None:
            bad += self.spec_differences(self.spec, meta.spec)
        if bad:
            raise UserError(
                f"the data set {self.root} was made otherwise: {'; '.join(bad)}. Choose another folder"
            )
        self.features, self.spec, self._info = meta.features, self.spec or meta.spec, meta.info
        if "robo_rl" not in self._info["features"]["action"]:  # of an old data set
            self._info["features"]["action"] |= {"robo_rl": layout.spec_to_dict(self.spec)}
        listed = meta.verifier.sums or Checksums()
        staged = Staged(self.root, settled(self.root, listed))
        trim(meta, staged, lambda path, copy: None if copy else path.unlink())
        if staged.used:
            staged.commit()
        sums = settled(
            self.root,
            Checksums(
                {k: v for k, v in staged.sums.files.items() if (self.root / k).is_file()}, listed.tolerance
            ),
        )
        if sums != listed:
            checksums.write(self.root, sums)

        def last(index: int, path_of: Callable[..., Path], rows: int = -1) -> _Tail:
            """The last file of a kind, open where it is small and sound (rows: it has so many). Sessions of
            an episode each would leave as many files, and the statistics are of all of them."""
            path = path_of(self.root, *layout.place(max(index, 0), meta.info["chunks_size"]))
            if path.relative_to(self.root).as_posix() not in sums.files or not path.is_file():
                return _Tail(index)
            if (size := path.stat().st_size) >= self._limit:
                return _Tail(index)
            try:
                table = read_table(read_checked(meta.verifier, path))
            except (BrokenDataset, ValueError):
                return _Tail(index)
            sound = rows in (-1, table.num_rows)
            return _Tail(index, table.num_rows, size, table, True) if sound else _Tail(index)

        data, listing = (int(files[-1]) if len(files) else -1 for files in (meta.data_file, meta.meta_file))
        self._state = _State(
            episodes=len(meta.lengths),
            frames=int(meta.lengths.sum()),
            tasks=tuple(meta.tasks),
            totals=statistics.read_totals(meta) if len(meta.lengths) else {},
            data=last(data, layout.data_path, int(meta.lengths[meta.data_file == data].sum())),
            meta=last(listing, layout.episodes_path, int((meta.meta_file == listing).sum())),
            videos={view: _Tail(*files[-1:].tolist()) for view, files in meta.video_file.items()},
            final=last(
                max((layout.index_of(p, meta.info["chunks_size"]) for p in meta.final_file), default=-1),
                layout.final_path,
            ),
            histograms=statistics.read_histograms(self.root),
            sums=sums,
        )

    @staticmethod
    def spec_differences(here: ControlSpec, there: ControlSpec) -> list[str]:
        """Action axes that mean something else, as words."""
        if len(here.axes) != len(there.axes):
            return [f"actions have {len(here.axes)} numbers here, {len(there.axes)} there"]
        return [
            f"action {a.name!r} means {a.low:g} .. {a.high:g} {a.unit} ({a.kind} {a.frame}) here, "
            f"{b.name!r} {b.low:g} .. {b.high:g} {b.unit} ({b.kind} {b.frame}) there"
            for a, b in zip(here.axes, there.axes, strict=True)
            if a != b
        ]

    def _commit(self, episodes: list[Episode], old: _State, staged: Staged) -> _State:
        """Write `episodes` behind the committed ones; -> the new state."""
        root, f, per_chunk = self.root, self.features, self._info["chunks_size"]
        assert f is not None  # episodes have come
        lengths = np.array([len(e) for e in episodes])
        tasks = list(old.tasks) + [t for t in dict.fromkeys(e.task for e in episodes) if t not in old.tasks]
        numbers = [tasks.index(e.task) for e in episodes]
        rows, columns = layout.frame_table(episodes, numbers, f, old.episodes, old.frames)
        stats = statistics.number_stats(columns, lengths)

        videos, clips_at, histograms = {}, {}, {}
        for view, _, _ in f.views:
            clips = [e.images[view] for e in episodes]
            tail = old.videos[view].next(2 * self._limit)
            path = layout.video_path(root, view, *layout.place(tail.index, per_chunk))
            held = video.append(path, clips, f.fps, tail.rows, staged.path(path))
            if held < 0:  # other codec settings than the file so far: leave it, begin the next
                staged.drop(path)
                tail = _Tail(tail.index + 1)
                path = layout.video_path(root, view, *layout.place(tail.index, per_chunk))
                held = video.append(path, clips, f.fps, 0, staged.path(path))
            clips_at[view] = (tail.index, tail.rows)
            videos[view] = _Tail(tail.index, held, staged.path(path).stat().st_size, None, True)
            counted = statistics.pixel_histograms(clips)
            stats[layout.picture_key(view)] = statistics.image_stats(*counted)
            histograms[view] = old.histograms.get(view, 0) + counted[0].sum(0)

        data = self._grow(staged, layout.data_path, old.data.next(self._limit, rows.schema), rows)
        known = layout.final_table(episodes, f, old.episodes)
        final = (
            self._grow(staged, layout.final_path, old.final.next(self._limit, known.schema), known)
            if len(known)
            else old.final
        )

        totals = statistics.total_stats(statistics.merge_stats(old.totals, stats))
        words = [e.task for e in episodes]
        told = f, old.episodes, old.frames, lengths, words, data.index, clips_at, stats
        meta = old.meta.next(self._limit)
        rows = layout.episode_table(*told, meta.index, per_chunk)
        if (other := old.meta.next(self._limit, rows.schema)).index != meta.index:
            meta, rows = other, layout.episode_table(*told, other.index, per_chunk)
        if len(tasks) > len(old.tasks):
            write_table(staged.path(root / layout.TASKS), layout.task_table(tasks))
        staged.text(root / layout.STATS, statistics.stats_to_json(totals))
        if histograms:
            staged.text(root / layout.HISTOGRAMS, statistics.histograms_to_json(histograms))
        meta = self._grow(staged, layout.episodes_path, meta, rows)
        new = _State(
            old.episodes + len(episodes),
            old.frames + int(lengths.sum()),
            tuple(tasks),
            totals,
            data,
            meta,
            videos,
            final,
            histograms,
            complete=False,
        )
        staged.text(root / layout.INFO, layout.info_to_json(self._info, new.episodes, new.frames, len(tasks)))
        staged.commit()
        return replace(new, sums=staged.sums)

    def _grow(self, staged: Staged, path_of: Callable[..., Path], tail: _Tail, rows: Any) -> _Tail:
        """Stage the file of `tail` with `rows` at its end -> the new tail."""
        import pyarrow as pa

        path = staged.path(path_of(self.root, *layout.place(tail.index, self._info["chunks_size"])))
        table = rows if tail.table is None else pa.concat_tables([tail.table, rows]).combine_chunks()
        return _Tail(tail.index, table.num_rows, write_table(path, table), table, True)
