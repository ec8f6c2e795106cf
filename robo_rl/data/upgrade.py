"""A LeRobotDataset v2.0 or v2.1 as a new data set of v3.0: videos are copied as they are, frames go many
episodes to a file.

    v2.x                                            v3.0
    data/chunk-000/episode_000000.parquet           data/chunk-000/file-000.parquet            up to
                                                    `FILE_BYTES` of rows each
    videos/chunk-000/KEY/episode_000000.mp4         videos/KEY/chunk-000/file-000.mp4          one episode
                                                    each
    meta/tasks.jsonl, meta/episodes.jsonl           meta/tasks.parquet, meta/episodes/…

Numbers of rows and episodes are counted anew, and a warning says where the old ones, or timestamps, differ
from the rows; statistics are made of all frames, so quantiles are exact (v2.x has none). The new data set
appears whole or not at all. Format of v2.1: https://github.com/huggingface/lerobot, release 0.3.3.
"""

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.data import layout
from robo_rl.data.assemble import appearing, need_new
from robo_rl.data.checksums import TOLERANCE
from robo_rl.data.meta import BrokenDataset, Meta, load_meta, read_numbers, read_table, read_whole
from robo_rl.data.statistics import NUMBERS
from robo_rl.data.writer import write_table
from robo_rl.errors import UserError, plural
from robo_rl.files import FILE, parse_json, read_bytes, read_json
from robo_rl.types import Each, silently

FILE_BYTES = 64 << 20  # of Arrow rows, before compression
LINE = 16 << 20  # of a line of meta data, at most
VERSIONS = ("v2.0", "v2.1")


def upgrade(root: Path, out: Path, each: Each = silently) -> Meta:
    """Write the data set of v2.x at `root` into the new folder `out` as v3.0; UserError names the file that
    is missing or malformed."""
    info = read_info(root)
    need_new(out)
    try:
        with appearing(out, each) as temp:
            write(root, info, temp)
    except BrokenDataset as e:  # of the new folder, which is gone
        where = "/".join(e.path.relative_to(temp).parts[:2])
        raise UserError(f"{root}: episode {e.episode}, {where}: {e.what}; restore it from a copy") from None
    return load_meta(out)


def read_info(root: Path) -> dict:
    """meta/info.json of v2.x."""
    path = root / layout.INFO
    if not path.is_file():
        raise UserError(f"no data set at {root}: {path} is missing")
    info = read_json(path)
    if (version := str(info.get("codebase_version"))) not in VERSIONS:
        what = "it is v3 already" if version.startswith("v3.") else f"its version is {version}"
        raise UserError(f"{path}: {what}; data upgrade reads {' and '.join(VERSIONS)}")
    try:
        layout.features_of_info(info)
        for key, least in (("total_episodes", 1), ("total_frames", 1), ("chunks_size", 1)):
            layout.whole(info, key, least)
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise UserError(f"{path}: it is malformed ({e if isinstance(e, ValueError) else repr(e)})") from None
    return info


def read_lines(path: Path, key: str) -> list[dict]:
    """The objects of a JSONL file, in the order of their number `key`, which runs from 0."""
    try:
        rows = [
            parse_json(line, f"line {k + 1} of {path}", limit=LINE)
            for k, line in enumerate(read_bytes(path, FILE).splitlines())
            if line.strip()
        ]
        rows.sort(key=lambda row: row[key])
        sound = [row[key] for row in rows] == list(range(len(rows)))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path}: it cannot be read ({e})") from None
    if not sound:
        raise UserError(f"{path}: the numbers {key!r} of its lines do not run from 0 without a gap")
    return rows


def write(root: Path, info: dict, out: Path) -> None:
    """Frames, videos and meta data but the statistics."""
    per_chunk = info["chunks_size"]
    tasks = [str(row["task"]) for row in read_lines(root / "meta" / "tasks.jsonl", "task_index")]
    listed = read_lines(root / "meta" / "episodes.jsonl", "episode_index")
    if len(listed) != info["total_episodes"]:
        raise UserError(
            f"{root / 'meta' / 'episodes.jsonl'} lists {len(listed)} episodes, {layout.INFO} says "
            f"{info['total_episodes']}"
        )
    views = [key for key, ft in info["features"].items() if ft["dtype"] == "video"]
    waiting: list[Any] = []
    lengths, files, file = np.zeros(len(listed), np.int64), np.zeros(len(listed), np.int64), 0
    untimely = []
    for e in range(len(listed)):
        if waiting and sum(table.nbytes for table in waiting) > FILE_BYTES:
            write_rows(out, file, per_chunk, waiting)
            waiting, file = [], file + 1
        like = waiting[0].schema if waiting else None
        table = episode_rows(root, info, e, int(lengths.sum()), len(tasks), like)
        lengths[e], files[e] = table.num_rows, file
        if "timestamp" in table.column_names and not is_timely(table["timestamp"].to_numpy(), info["fps"]):
            untimely.append(e)
        waiting.append(table)
        for key in views:
            old = root / "videos" / f"chunk-{e // per_chunk:03d}" / key / f"episode_{e:06d}.mp4"
            if not old.is_file():
                raise UserError(f"{old}: the file is missing")
            shutil.copyfile(old, place(out, f"videos/{key}", e, per_chunk).with_suffix(".mp4"))
    write_rows(out, file, per_chunk, waiting)
    write_meta(out, info, tasks, listed, lengths, files, views)
    if told := differences(info, listed, lengths, untimely):
        warnings.warn(f"{root} does not say what its rows are, which count: {'; '.join(told)}", stacklevel=2)


def is_timely(time: np.ndarray, fps: float) -> bool:
    """Whether timestamps [s] of an episode run from 0 on, 1/fps apart, as the reader of data sets wants
    them; of another type than numbers they are the reader's to refuse."""
    if time.dtype.kind not in "iuf":
        return True
    allowed = TOLERANCE + (np.spacing(np.abs(time)) if time.dtype.kind == "f" else 0)
    return bool((np.abs(np.diff(time.astype(np.float64), prepend=-1 / fps) - 1 / fps) <= allowed).all())


def differences(info: dict, listed: list[dict], lengths: np.ndarray, untimely: list[int]) -> list[str]:
    """What the meta data of v2.x say of the episodes that their rows, `lengths` int64[E] of them, do not:
    `untimely` are episodes whose timestamps do not fit."""
    out, total = [], int(lengths.sum())
    if info["total_frames"] != total:
        out.append(f"{layout.INFO} has {plural(info['total_frames'], 'frame')}, there are {total}")
    wrong = [e for e, row in enumerate(listed) if row.get("length", lengths[e]) != lengths[e]]
    if wrong:
        e = wrong[0]
        out.append(
            f"meta/episodes.jsonl has {listed[e]['length']} frames of episode {e}{_more(wrong)}, there are "
            f"{lengths[e]}"
        )
    if untimely:
        out.append(
            f"timestamps of episode {untimely[0]}{_more(untimely)} do not run from 0 in steps of "
            f"{1 / info['fps']:.4g} s"
        )
    return out


def _more(episodes: list[int]) -> str:
    """How many episodes there are beside the first, as a part of a sentence."""
    return f" (and so of {len(episodes) - 1} more)" if len(episodes) > 1 else ""


def episode_rows(root: Path, info: dict, episode: int, first: int, tasks: int, like: Any = None) -> Any:
    """The rows of an episode, with the numbers that they have in the new data set, of which `first` rows are
    before; columns of the types of `like`, the rows that are in the same file."""
    import pyarrow as pa

    path = root / "data" / f"chunk-{episode // info['chunks_size']:03d}" / f"episode_{episode:06d}.parquet"
    try:
        table = read_table(path.read_bytes())
        if absent := {key for key, ft in info["features"].items() if ft["dtype"] != "video"} - set(
            table.column_names
        ):
            raise ValueError(f"it has no column {min(absent)!r}")
        number = read_whole(table, "task_index", table.num_rows)
        if not table.num_rows or number.min() < 0 or number.max() >= tasks:
            raise ValueError("it has no rows, or rows of a task that there is not")
        for key, ft in info["features"].items():
            if ft["dtype"] in NUMBERS:
                read_numbers(table, key, table.num_rows, int(np.prod(ft["shape"])))
        like = like if like is not None else table.schema
        for key in set(table.column_names) & set(like.names):
            column = table[key].cast(like.field(key).type)
            table = table.set_column(table.column_names.index(key), like.field(key), column)
    except (OSError, ValueError, KeyError, pa.ArrowException) as e:
        raise UserError(f"{path}: {e.strerror if isinstance(e, OSError) and e.strerror else e}") from None
    fresh = {
        "episode_index": np.full(table.num_rows, episode),
        "frame_index": np.arange(table.num_rows),
        "index": first + np.arange(table.num_rows),
    }
    for key, numbers in fresh.items():
        column = pa.array(numbers.astype(np.int64))
        table = (
            table.set_column(table.column_names.index(key), key, column)
            if key in table.column_names
            else table.append_column(key, column)
        )
    return table


def place(out: Path, kind: str, index: int, per_chunk: int) -> Path:
    """Path of the index-th file of a kind, without its suffix; its folder is there."""
    path = out / kind / layout.name(*layout.place(index, per_chunk), "")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_rows(out: Path, file: int, per_chunk: int, tables: list) -> None:
    import pyarrow as pa

    write_table(
        place(out, "data", file, per_chunk).with_suffix(".parquet"),
        pa.concat_tables(tables, promote_options="default"),
    )


def _texts(told: Any) -> list[str]:
    """The instructions of an episode, as its line has them: several, or one alone."""
    return list(map(str, told if isinstance(told, list) else [told]))


def write_meta(
    out: Path,
    info: dict,
    tasks: list[str],
    listed: list[dict],
    lengths: np.ndarray,
    files: np.ndarray,
    views: list[str],
) -> None:
    """meta/: episodes, tasks, info."""
    import pyarrow as pa

    per_chunk, ends, number = info["chunks_size"], np.cumsum(lengths), np.arange(len(listed))
    columns: dict[str, Any] = {
        "episode_index": number,
        "tasks": pa.array([_texts(row.get("tasks", [])) for row in listed], pa.list_(pa.string())),
        "length": lengths,
        "dataset_from_index": ends - lengths,
        "dataset_to_index": ends,
    }
    places = {"data": files, "meta/episodes": np.zeros_like(number)} | {
        f"videos/{key}": number for key in views
    }
    for key, index in places.items():
        columns[f"{key}/chunk_index"], columns[f"{key}/file_index"] = np.divmod(index, per_chunk)
    for key in views:
        columns[f"videos/{key}/from_timestamp"] = np.zeros(len(listed))
        columns[f"videos/{key}/to_timestamp"] = lengths / info["fps"]
    write_table(place(out, "meta/episodes", 0, per_chunk).with_suffix(".parquet"), pa.table(columns))
    write_table(out / layout.TASKS, layout.task_table(tasks))
    kept = {k: v for k, v in info.items() if k not in ("total_chunks", "total_videos")}
    fresh = layout.new_info(layout.features_of_info(info), "")
    kept |= {
        k: fresh[k]
        for k in (
            "codebase_version",
            "data_path",
            "video_path",
            "data_files_size_in_mb",
            "video_files_size_in_mb",
        )
    }
    text = layout.info_to_json(kept, len(listed), int(lengths.sum()), len(tasks))
    (out / layout.INFO).write_text(text, encoding="utf-8")
