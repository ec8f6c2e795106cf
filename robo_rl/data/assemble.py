"""New data sets out of the episodes of others: merged, or split. Videos are copied as they are, never encoded
again.

A video file of which some episodes are left out is copied whole: the rows say where an episode begins in it.
The new data set appears whole or not at all.
"""

import glob
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.data import labels, layout, statistics
from robo_rl.data.meta import BrokenDataset, Meta, load_meta, read_checked_table, read_numbers, read_whole
from robo_rl.data.reader import load
from robo_rl.data.repair import decode_all, seal
from robo_rl.data.writer import write_table
from robo_rl.errors import UserError, quoted
from robo_rl.files import full_disk, refuse_unwritable
from robo_rl.types import Each, silently


def merge(roots: Sequence[Path], out: Path, each: Each = silently) -> Meta:
    """The episodes of several data sets one after the other in the new folder `out`; UserError names what
    differs, a warning how many are there twice."""
    if len(roots) < 2:
        raise UserError("merge needs two data sets or more")
    return assemble(out, [(meta, np.arange(len(meta.lengths))) for meta in map(load_meta, roots)], each)


def split(
    root: Path, out: Path, episodes: str, rest: "Path | None" = None, each: Each = silently
) -> tuple[Meta, "Meta | None"]:
    """The chosen `episodes` of a data set in the new folder `out`, and the others in `rest`: both or
    neither."""
    meta = load_meta(root)
    chosen = parse_episodes(episodes, len(meta.lengths))
    others = np.setdiff1d(np.arange(len(meta.lengths)), chosen)
    if rest is not None and not len(others):
        raise UserError(f"--episodes {episodes} are all of {root}; nothing is left for {rest}")
    for folder in filter(None, (out, rest)):
        need_new(folder)
    if rest is not None and rest.resolve() == out.resolve():
        raise UserError(f"--out and --rest are both {out}; give two folders")
    made = assemble(out, [(meta, chosen)], each)
    if rest is None:
        return made, None
    try:
        return made, assemble(rest, [(meta, others)], each)
    except BaseException:  # as `appearing`: also of Ctrl-C
        shutil.rmtree(out)
        raise


def parse_episodes(text: str, count: int) -> np.ndarray:
    """Rising numbers of `0:40,45,50:`; the end of a range is not in it, as in Python."""
    out: set[int] = set()
    for part in text.split(","):
        first, colon, last = part.strip().partition(":")
        try:
            a = int(first or "0" if colon else first)  # nothing at all is no number: 5:10, has a comma more
            b = (int(last) if last else count) if colon else a + 1
        except ValueError:
            raise UserError(
                f"--episodes must be numbers and ranges, as 0:40,45, got {part.strip()!r}"
            ) from None
        if not 0 <= a < b <= count:
            raise UserError(
                f"--episodes {part.strip()!r} is outside of 0 to {count - 1}, the episodes that there are"
            )
        out |= {*range(a, b)}
    return np.array(sorted(out))


def assemble(out: Path, parts: Sequence[tuple[Meta, np.ndarray]], each: Each = silently) -> Meta:
    """A new data set of these episodes int64[n] of each part, in this order."""
    first = parts[0][0]
    need_new(out)
    for meta, _ in parts[1:]:
        _check_same(first, meta)
    tasks = list(dict.fromkeys(task for meta, _ in parts for task in meta.tasks))
    success = [labels.read_success(meta) for meta, _ in parts]
    bare = [str(meta.root) for s, (meta, _) in zip(success, parts, strict=True) if s is None]
    if 0 < len(bare) < len(parts):
        warnings.warn(
            f"nobody labelled the episodes of {', '.join(bare)}, so {out} has none of the others' labels of "
            f"success either; label it: robo_rl data label {quoted(out)} --success …",
            stacklevel=2,
        )
    try:
        return _assembled(out, parts, tasks, success, each)
    except BrokenDataset:
        for meta, _ in parts:
            decode_all(load(meta.root))  # names the file that is damaged, and not its copy
        raise


def _assembled(
    out: Path,
    parts: Sequence[tuple[Meta, np.ndarray]],
    tasks: list[str],
    success: Sequence["np.ndarray | None"],
    each: Each,
) -> Meta:
    """`assemble` of parts that fit, labelled `success` bool[E]."""
    with appearing(out, each) as temp:
        builder = _Builder(temp, next((m for m, _ in parts if has_phases(m)), parts[0][0]), tasks)
        twice = [
            f"{n} of {len(e)} episodes of {meta.root}" for meta, e in parts if (n := builder.add(meta, e))
        ]
        builder.close()
        if all(s is not None for s in success):
            kept = np.concatenate(
                [np.asarray(s)[episodes] for s, (_, episodes) in zip(success, parts, strict=True)]
            )
            document = {"frames": builder.frames, "success": kept.tolist()}
            (temp / layout.LABELS).write_text(json.dumps(document) + "\n", encoding="utf-8")
    if twice and len(parts) > 1:
        warnings.warn(
            f"{', '.join(twice)} were there before, with the same states and actions: {out} has them twice. "
            "Learning counts them twice, and a copy among the held-out episodes makes their error too small; "
            "leave such a data set out, or part it with robo_rl data split",
            stacklevel=4,
        )
    return load_meta(out)


def has_phases(meta: Meta) -> bool:
    """Whether a data set says of every frame whether a person helped."""
    return layout.PHASE in meta.info["features"]


@contextmanager
def appearing(out: Path, each: Each = silently) -> Iterator[Path]:
    """The folder of a data set that becomes `out` at the end of the block, with statistics of all frames and
    checksums, or is gone."""
    temp = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temp, ignore_errors=True)
    for other in sorted(out.parent.glob(f".{glob.escape(out.name)}.*.tmp")):
        warnings.warn(
            f"{other} is what another writer of {out} makes, or left when it was killed", stacklevel=3
        )
    try:
        yield temp
        statistics.renew(load_meta(temp), each)
        seal(load_meta(temp))
        out.parent.mkdir(parents=True, exist_ok=True)
        os.rename(temp, out)
    except OSError as e:  # `temp` is no name that the user knows
        if full_disk(e):
            raise UserError(
                f"the disk is full: could not write {out}; free some space in {out.parent}"
            ) from e
        at = Path(e.filename or "")
        if e.filename and (at == temp or at in temp.parents or temp in at.parents):
            refuse_unwritable(e, out)
        raise
    finally:
        shutil.rmtree(temp, ignore_errors=True)


class _Builder:
    """Copies episodes into a new folder: a file of rows and one of episodes per part, videos under new
    numbers."""

    def __init__(self, root: Path, like: Meta, tasks: list[str]):
        self.root, self.like, self.tasks = root, like, tasks
        self.per_chunk = like.info["chunks_size"]
        self.parts = self.episodes = self.frames = 0
        self.videos = dict.fromkeys(like.video_file, 0)
        self.seen: set[bytes] = set()  # digests of the episodes

    def path(self, path_of, index: int, *view: str) -> Path:
        path = path_of(self.root, *view, *layout.place(index, self.per_chunk))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def add(self, meta: Meta, episodes: np.ndarray) -> int:
        """Append `episodes`, rising, of a data set -> how many of them were there before."""
        import pyarrow as pa

        lengths, part = meta.lengths[episodes], self.parts
        rows = pa.concat_tables(
            [_rows_of(meta, int(first), episodes) for first in np.unique(meta.data_file[episodes])]
        ).combine_chunks()
        number = np.array([self.tasks.index(t) for t in meta.tasks] or [0])
        fresh = {
            "episode_index": np.repeat(self.episodes + np.arange(len(episodes)), lengths),
            "index": self.frames + np.arange(int(lengths.sum())),
            "task_index": number[_tasks_of(rows, meta)] if "task_index" in rows.column_names else None,
        }
        for key, x in fresh.items():
            if key in rows.column_names and x is not None:
                rows = rows.set_column(rows.column_names.index(key), key, pa.array(x))
        if has_phases(self.like) and not has_phases(meta):  # nobody helped
            fresh[layout.PHASE] = np.zeros(len(rows), np.int64)
            rows = rows.append_column(layout.PHASE, pa.array(fresh[layout.PHASE]))
        write_table(self.path(layout.data_path, part), rows)
        write_table(self.path(layout.episodes_path, part), self._episode_rows(meta, episodes, fresh))
        self._finals(meta, episodes)
        self.parts, self.episodes, self.frames = (
            part + 1,
            self.episodes + len(episodes),
            self.frames + int(lengths.sum()),
        )
        digests = _digests(rows, lengths, meta)
        known = len(self.seen)
        self.seen.update(digests)
        return known + len(digests) - len(self.seen)

    def _episode_rows(self, meta: Meta, episodes: np.ndarray, fresh: dict) -> Any:
        """The rows of meta/episodes with their new numbers and files; videos are copied."""
        import pyarrow as pa

        tables = [
            read_checked_table(meta.verifier, meta.meta_path(int(np.flatnonzero(meta.meta_file == f)[0])))
            for f in np.unique(meta.meta_file)
        ]
        rows = pa.concat_tables(tables, promote_options="default").take(pa.array(episodes)).combine_chunks()
        lengths, n = meta.lengths[episodes], len(episodes)
        ends = self.frames + np.cumsum(lengths)
        changed: dict[str, np.ndarray] = {
            "episode_index": self.episodes + np.arange(n),
            "dataset_from_index": ends - lengths,
            "dataset_to_index": ends,
        }
        files = {"data": np.full(n, self.parts), "meta/episodes": np.full(n, self.parts)}
        for view, of in meta.video_file.items():
            here, where = np.unique(of[episodes], return_inverse=True)
            for k, index in enumerate(here):
                source = meta.video_path(view, int(np.flatnonzero(of == index)[0]))
                if not meta.verifier.is_sound(source):
                    raise UserError(
                        f"{source} is not what was written; repair it first: robo_rl data repair "
                        f"{quoted(meta.root)}"
                    )
                shutil.copyfile(source, self.path(layout.video_path, self.videos[view] + k, view))
            files[f"videos/{layout.picture_key(view)}"] = self.videos[view] + where
            self.videos[view] += len(here)
        for key, index in files.items():
            changed[f"{key}/chunk_index"], changed[f"{key}/file_index"] = np.divmod(index, self.per_chunk)
        like = {layout.PHASE: "action"}  # a new column has statistics where the others have
        numbers = {
            k: x
            for k, x in fresh.items()
            if x is not None and f"stats/{like.get(k, k)}/mean" in rows.column_names
        }
        for key, per in statistics.number_stats(numbers, lengths).items() if numbers else ():
            for s, x in per.items():
                if (name := f"stats/{key}/{s}") in rows.column_names:
                    rows = rows.set_column(rows.column_names.index(name), name, layout.nested(x))
                elif key == layout.PHASE:
                    rows = rows.append_column(name, layout.nested(x))
        for key, x in changed.items():
            if key in rows.column_names:
                rows = rows.set_column(rows.column_names.index(key), key, pa.array(x))
        return rows

    def _finals(self, meta: Meta, episodes: np.ndarray) -> None:
        """What was observed after the last actions."""
        import pyarrow as pa

        new = {int(e): self.episodes + i for i, e in enumerate(episodes)}
        tables = []
        for path in meta.final_file:
            table = read_checked_table(meta.verifier, path)
            numbers = table["episode_index"].to_pylist()
            table = table.filter(pa.array([e in new for e in numbers]))
            kept = pa.array([new[e] for e in numbers if e in new], pa.int64())
            tables.append(table.set_column(table.column_names.index("episode_index"), "episode_index", kept))
        if tables and len(rows := pa.concat_tables(tables)):
            write_table(self.path(layout.final_path, self.parts), rows)

    def close(self) -> None:
        """Write what says how many there are."""
        (self.root / "meta").mkdir(parents=True, exist_ok=True)
        write_table(self.root / layout.TASKS, layout.task_table(self.tasks))
        text = layout.info_to_json(self.like.info, self.episodes, self.frames, len(self.tasks))
        (self.root / layout.INFO).write_text(text, encoding="utf-8")


def _tasks_of(rows: Any, meta: Meta) -> np.ndarray:
    """int64[F]: which of the instructions of a data set each of its rows has."""
    try:
        out = read_whole(rows, "task_index", len(rows))
    except ValueError as e:
        raise BrokenDataset(meta.root / "data", str(e), meta.root) from None
    if len(wrong := out[(out < 0) | (out >= max(1, len(meta.tasks)))]):
        what = f"it has {len(meta.tasks)} tasks, the frames use number {wrong[0]}"
        raise BrokenDataset(meta.root / layout.TASKS, what, meta.root)
    return out


def _digests(rows: Any, lengths: np.ndarray, meta: Meta) -> list[bytes]:
    """Of every episode one of its states and actions; rows: those of the episodes, one behind the other."""
    features = meta.info["features"]
    try:
        columns = [
            read_numbers(rows, key, len(rows), int(np.prod(features[key]["shape"])))
            for key in ("observation.state", "action")
            if key in features
        ]
    except ValueError as e:
        raise BrokenDataset(meta.root / "data", str(e), meta.root) from None
    ends = np.cumsum(lengths)
    return [
        hashlib.sha256(b"".join(x[a:b].tobytes() for x in columns)).digest()
        for a, b in zip(ends - lengths, ends, strict=True)
    ]


def _rows_of(meta: Meta, file: int, episodes: np.ndarray) -> Any:
    """The frames of those of `episodes` that are in one data file."""
    import pyarrow as pa

    inside = np.flatnonzero(meta.data_file == file)
    table = read_checked_table(meta.verifier, meta.data_path(int(inside[0])), int(inside[0]))
    starts = np.cumsum(meta.lengths[inside]) - meta.lengths[inside]
    kept = np.isin(inside, episodes)
    rows = [np.arange(s, s + n) for s, n in zip(starts[kept], meta.lengths[inside][kept], strict=True)]
    return table.take(pa.array(np.concatenate(rows)))


def _check_same(one: Meta, other: Meta) -> None:
    """Raise UserError unless frames of both mean the same."""
    bad = one.features.differences(other.features)
    here, there = ({k: ft["dtype"] for k, ft in m.info["features"].items()} for m in (one, other))
    bad += [
        f"column {k!r} is {here.get(k, 'absent')} here, {there.get(k, 'absent')} there"
        for k in sorted({*here, *there} - {layout.PHASE})
        if here.get(k) != there.get(k)
    ]
    if labels.units_of(one) != labels.units_of(other):
        bad.append(
            f"actions are {labels.units_of(one) or 'in units that nobody stated'} here, "
            f"{labels.units_of(other) or 'in units that nobody stated'} there"
        )
    if one.spec is not None and other.spec is not None and one.spec.axes != other.spec.axes:
        bad.append("a command of -1 to 1 means something else")
    if bad:
        raise UserError(f"{one.root} and {other.root} do not go together: {'; '.join(dict.fromkeys(bad))}")


def need_new(out: Path) -> None:
    """UserError where `out` is there already."""
    if out.exists():
        raise UserError(f"{out} exists; name a new folder with --out")
