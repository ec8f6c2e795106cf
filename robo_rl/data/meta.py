"""The meta data of a LeRobotDataset v3.0 folder, and its files as bytes that are what was written; damage is
told by file."""

import io
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from robo_rl.data import checksums, layout
from robo_rl.data.checksums import Verifier
from robo_rl.data.episode import Features
from robo_rl.errors import UserError, plural, quoted
from robo_rl.files import FILE, lock, parse_json
from robo_rl.types import ControlSpec

EPISODES = "meta/episodes"
LONGEST = 1e7  # [s] of a video file


class BrokenDataset(UserError):
    """`path` is damaged or missing; the episodes before `episode` are sound (-1: nothing can be said)."""

    def __init__(self, path: Path, what: str, root: Path, episode: int = -1, cure: str = ""):
        self.path, self.what, self.episode = path, what, episode
        first = (
            f"Keep the {plural(episode, 'episode')} before it: robo_rl data repair {quoted(root)}"
            if episode > 0
            else "Restore the folder from a copy, or record it again"
        )
        super().__init__(f"{path}: {what}. {first}{cure and '; ' + cure}")


class ChangedDataset(BrokenDataset):
    """A file does not match its checksum."""

    def __init__(self, path: Path, root: Path, episode: int = -1):
        super().__init__(
            path,
            "it is not what was written (its checksum differs)",
            root,
            episode,
            f"what is sound of it is kept by: robo_rl data repair {quoted(root)}; if another program changed "
            f"it on purpose: robo_rl data repair {quoted(root)} --accept",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Meta:
    """The committed meta data of a data set: one entry per episode in every array."""

    root: Path
    info: dict
    features: Features
    tasks: list[str]
    spec: ControlSpec | None
    sources: tuple[str, ...]
    lengths: np.ndarray  # int64[E] frames
    starts: np.ndarray  # int64[E] first row in the whole data set
    data_file: np.ndarray  # int64[E] running index of the file
    video_file: dict[str, np.ndarray]  # view -> int64[E]
    video_start: dict[str, np.ndarray]  # view -> int64[E] first frame in that file
    meta_file: np.ndarray  # int64[E]
    final: np.ndarray  # float32[E,S] state after the last action, nan where it was not recorded
    final_file: tuple[Path, ...]  # where its pictures are
    # int64[E,2] of the picture: number of the file, row in it; -1 where none was recorded
    final_at: np.ndarray
    verifier: Verifier

    def data_path(self, episode: int) -> Path:
        return layout.data_path(self.root, *self._place(self.data_file[episode]))

    def meta_path(self, episode: int) -> Path:
        return layout.episodes_path(self.root, *self._place(self.meta_file[episode]))

    def video_path(self, view: str, episode: int) -> Path:
        return layout.video_path(self.root, view, *self._place(self.video_file[view][episode]))

    def first_in_video(self, view: str, path: Path) -> int:
        """The first episode in a video file."""
        return next(e for e in range(len(self.lengths)) if self.video_path(view, e) == path)

    def _place(self, index: int) -> tuple[int, int]:
        return layout.place(int(index), self.info["chunks_size"])


def verifier_of(root: Path, trust: Collection[Path] | None = ()) -> Verifier:
    """Verifier of the data set at `root`; BrokenDataset if its list of checksums is damaged."""
    try:
        return Verifier(root, trust)
    except ValueError as e:
        raise BrokenDataset(
            root / checksums.NAME,
            str(e),
            root,
            cure=f"if the data are sound, make it anew: robo_rl data repair {quoted(root)} --accept",
        ) from None


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Nobody else writes into the data set meanwhile: what is read within stays so. UserError: there is none,
    or somebody does."""
    if not (root / layout.INFO).is_file():
        load_meta(root)  # raises: no data set here
    with lock(root):
        yield


def load_meta(root: Path | str, episodes: int = 0, trust: Collection[Path] | None = ()) -> Meta:
    """Everything but the frames, of the first `episodes` (0: all).

    trust: files whose checksums are not looked at; None: all of them. Raises BrokenDataset, or UserError if
    there is no data set of this kind at `root`.
    """
    root = Path(root)
    path = root / layout.INFO
    if root.suffix in (".h5", ".hdf5") and root.is_file():
        raise UserError(
            f"{root} is a file of another program; of one that ManiSkill recorded robo_rl data import "
            f"{quoted(root)} --out DIR makes a data set"
        )
    if root.is_file():
        raise UserError(
            f"{root} is a file; a data set is a folder: give the one that holds meta, data and videos"
        )
    near = () if path.is_file() else (root.parent, *sorted(root.glob("*")))
    if inside := next((p for p in near if os.path.isfile(p / layout.INFO)), None):
        raise UserError(f"no data set at {root}: {path} is missing. There is one at {inside}")
    if not path.is_file():
        begins = "" if root.is_absolute() else f" (a relative path begins in {os.getcwd()})"
        raise UserError(
            f"no data set at {root}: {path} is missing{begins}. Record one: robo_rl collect --out "
            f"{quoted(root)}"
        )
    verifier = verifier_of(root, trust)
    info, features, count, frames, per_chunk = _read_info(verifier)
    if episodes:
        if not 0 < episodes <= count:
            raise UserError(f"episodes must be in [1, {count}] for {root}, got {episodes}")
        count = episodes
    if not features.action:
        raise UserError(f"{path}: the data set has no feature 'action', only {', '.join(info['features'])}")
    spec, sources = _read_spec(verifier, info)
    tasks = _read_tasks(verifier) if count else []

    videos = [key for key, ft in info["features"].items() if ft["dtype"] == "video"]
    columns, meta_file = _read_episodes(verifier, videos, count, per_chunk)

    def running(prefix: str) -> np.ndarray:
        return (columns[f"{prefix}/chunk_index"] * per_chunk + columns[f"{prefix}/file_index"]).astype(int)

    lengths, starts = columns["length"].astype(int), columns["dataset_from_index"].astype(int)
    bad = np.flatnonzero((lengths < 1) | (starts != np.cumsum(lengths) - lengths))
    if len(bad) or (lengths.sum() != frames and not episodes):
        raise BrokenDataset(
            root / EPISODES,
            f"lengths add up to {lengths.sum()} frames, {layout.INFO} says {frames}",
            root,
            int(bad[0]) if len(bad) else -1,
        )
    clips, frames = {}, {}
    for key in videos:
        view = key.removeprefix(layout.IMAGES)
        clips[view] = running(f"videos/{key}")
        frames[view] = np.rint(columns[f"videos/{key}/from_timestamp"] * features.fps).astype(int)
    final, final_file, final_at = _finals(verifier, lengths, len(features.state))
    # not needed to read the data, but others read them
    for path in (root / layout.STATS, root / layout.HISTOGRAMS):
        if not verifier.is_sound(path):
            raise ChangedDataset(path, root)
    return Meta(
        root=root,
        info=info,
        features=features,
        tasks=tasks,
        spec=spec,
        sources=sources,
        lengths=lengths,
        starts=starts,
        data_file=running("data"),
        video_file=clips,
        video_start=frames,
        meta_file=meta_file,
        final=final,
        final_file=final_file,
        final_at=final_at,
        verifier=verifier,
    )


def _read_info(verifier: Verifier) -> tuple[dict, Features, int, int, int]:
    """meta/info.json: (itself, its features, episodes, frames, files of a folder)."""
    root, path = verifier.root, verifier.root / layout.INFO
    text = read_checked(verifier, path)
    try:
        info = parse_json(text, "it", limit=FILE)
        version = str(info["codebase_version"])
    except (ValueError, KeyError, TypeError) as e:
        raise BrokenDataset(
            path,
            f"it is not the JSON of a LeRobot data set ({e if isinstance(e, ValueError) else repr(e)})",
            root,
        ) from None
    if not version.startswith("v3."):
        raise UserError(
            f"{path}: data set version {version}, need v3.x. Write it anew as v3.0 (v2.0, v2.1): "
            f"robo_rl data upgrade {quoted(root)} --out NEW_FOLDER"
        )
    try:
        features = layout.features_of_info(info)
        count, frames, per_chunk = (
            layout.whole(info, key, least)
            for key, least in (("total_episodes", 0), ("total_frames", 0), ("chunks_size", 1))
        )
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise BrokenDataset(path, f"its features are malformed ({e!r})", root) from None
    return info, features, count, frames, per_chunk


def _read_spec(verifier: Verifier, info: dict) -> tuple[ControlSpec | None, tuple[str, ...]]:
    """What the actions mean and the names of sources, where the data set says: ours, in the features or in a
    file."""
    root = verifier.root
    ours, path = info["features"]["action"].get("robo_rl"), root / layout.INFO
    text = (
        read_checked(verifier, path := root / layout.OURS)
        if ours is None and (root / layout.OURS).is_file()
        else b""
    )
    try:
        if text:  # of an old data set
            ours = parse_json(text, "it", limit=FILE)
        if ours is not None:
            return layout.spec_of(ours)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise BrokenDataset(path, f"it is malformed ({e!r}); the data reads without it", root) from None
    return None, ("unknown",)


def _read_tasks(verifier: Verifier) -> list[str]:
    path = verifier.root / layout.TASKS
    data = read_checked(verifier, path)
    try:
        return layout.tasks_of_table(read_table(data))
    except (ValueError, KeyError, StopIteration) as e:
        raise BrokenDataset(path, str(e), verifier.root) from None


def _read_episodes(
    verifier: Verifier, videos: list[str], count: int, per_chunk: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """meta/episodes of the first `count`: (columns [E] of lengths, places and video times, int64[E] running
    index of the file that lists each)."""
    prefixes = ["data", *(f"videos/{key}" for key in videos)]
    wanted = [
        "length",
        "dataset_from_index",
        *(f"videos/{key}/from_timestamp" for key in videos),
        *(f"{p}/{kind}_index" for p in prefixes for kind in ("chunk", "file")),
    ]
    parts: dict[str, list] = {key: [] for key in wanted}
    meta_file: list[np.ndarray] = []
    have = 0
    root, folder = verifier.root, verifier.root / EPISODES
    for path in sorted(folder.glob("chunk-*/file-*.parquet")) if count else ():
        table = read_checked_table(verifier, path, have, wanted)
        try:
            for key in wanted:
                rows = table.num_rows
                is_time = key.endswith("/from_timestamp")
                x = read_numbers(table, key, rows, 1) if is_time else read_whole(table, key, rows)
                if is_time and not ((x >= 0) & (x < LONGEST)).all():
                    raise ValueError(f"column {key!r} holds times that no video has")
                parts[key].append(x)
        except ValueError as e:
            raise BrokenDataset(path, str(e), root, have) from None
        meta_file.append(np.full(table.num_rows, layout.index_of(path, per_chunk)))
        have += table.num_rows
        if have >= count:
            break
    if have < count:
        raise BrokenDataset(folder, f"it lists {have} episodes, {layout.INFO} says {count}", root, have)
    empty = np.zeros(0, np.int64)
    columns = {key: np.concatenate([empty, *x])[:count] for key, x in parts.items()}
    return columns, np.concatenate([empty, *meta_file])[:count].astype(int)


def _finals(
    verifier: Verifier, lengths: np.ndarray, size: int
) -> tuple[np.ndarray, tuple[Path, ...], np.ndarray]:
    """What was observed after the last actions: states float32[E,size] (nan where unknown), and where
    pictures are: files, int64[E,2] (-1 where there are none)."""
    count, root = len(lengths), verifier.root
    out, at = np.full((count, size), np.nan, np.float32), np.full((count, 2), -1)
    path = root / layout.FINAL
    if path.is_file():  # of an old data set
        data = read_checked(verifier, path)
        try:
            rows = np.load(io.BytesIO(data))[:count]
            out[: len(rows)] = rows
        except (ValueError, OSError, EOFError) as e:
            raise BrokenDataset(path, f"it is malformed ({e}); the data reads without it", root) from None
    folder = root / "meta" / "final"
    paths = {*folder.glob("chunk-*/file-*.parquet"), *verifier.listed(folder)}
    for number, path in enumerate(paths := sorted(paths)):
        data = read_checked(verifier, path)
        try:
            table = read_table(data, ["episode_index", "length", "observation.state"])
            episode, length = (read_whole(table, key, table.num_rows) for key in ("episode_index", "length"))
            state = read_numbers(table, "observation.state", table.num_rows, size).reshape(-1, size)
        except ValueError as e:
            raise BrokenDataset(path, f"{e}; the data reads without it", root) from None
        mine = np.flatnonzero((episode >= 0) & (episode < count))
        which = episode[mine]
        if (lengths[which] != length[mine]).any() or not np.isfinite(state[mine]).all():
            raise BrokenDataset(
                path, "it tells of other episodes than the data set has; the data reads without it", root
            )
        out[which], at[which] = state[mine], np.stack([np.full(len(mine), number), mine], 1)
    return out, tuple(paths), at


def committed_files(meta: Meta) -> list[Path]:
    """The files of a data set that hold something, each once."""
    root = meta.root
    some = [
        root / name
        for name in (
            layout.INFO,
            layout.STATS,
            layout.TASKS,
            layout.OURS,
            layout.FINAL,
            layout.HISTOGRAMS,
            layout.LABELS,
        )
    ]
    place = {layout.episodes_path: meta.meta_file, layout.data_path: meta.data_file}
    for path_of, files in place.items():
        some += [path_of(root, *layout.place(int(i), meta.info["chunks_size"])) for i in np.unique(files)]
    for view, files in meta.video_file.items():
        some += [
            layout.video_path(root, view, *layout.place(int(i), meta.info["chunks_size"]))
            for i in np.unique(files)
        ]
    return [path for path in (*some, *meta.final_file) if path.is_file()]


# ---- files -------------------------------------------------------------------------------------------------


def read_table(data: bytes, columns: list[str] | None = None):
    """Arrow table of the bytes of a file; raises ValueError with the reason."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read(columns)
    except (pa.ArrowException, OSError) as e:
        raise ValueError(f"it cannot be read ({str(e).splitlines()[0].rstrip('.')})") from None


def read_checked(verifier: Verifier, path: Path, episode: int = -1) -> bytes:
    """The file at `path`, which begins with `episode`; BrokenDataset if it is missing or not what was
    written."""
    try:
        data, right = verifier.read(path)
    except FileNotFoundError:
        raise BrokenDataset(path, "the file is missing", verifier.root, episode) from None
    except OSError as e:
        raise BrokenDataset(path, f"it cannot be read ({e.strerror})", verifier.root, episode) from None
    if not right:
        raise ChangedDataset(path, verifier.root, episode)
    return data


def read_checked_table(verifier: Verifier, path: Path, episode: int = -1, columns: list[str] | None = None):
    """Arrow table of the file at `path`, which begins with `episode`; BrokenDataset as of `read_checked`, or
    if it is no table."""
    data = read_checked(verifier, path, episode)
    try:
        return read_table(data, columns)
    except ValueError as e:
        raise BrokenDataset(path, str(e), verifier.root, episode) from None


def read_numbers(table, key: str, rows: int, width: int) -> np.ndarray:
    """The first `rows` rows of a column as [rows, width], or [rows] of one number each; raises ValueError
    with the reason, as where they are no numbers."""
    import pyarrow as pa

    if key not in table.column_names:
        raise ValueError(f"it has no column {key!r}")
    column = table[key].slice(0, rows).combine_chunks()
    if column.null_count:
        raise ValueError(f"column {key!r} has empty cells")
    inner = column.type
    while isinstance(inner, (pa.ListType, pa.LargeListType, pa.FixedSizeListType)):
        inner = inner.value_type
    if not any(test(inner) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)):
        raise ValueError(f"column {key!r} holds {inner}, not numbers")
    if not pa.types.is_nested(column.type):
        if width != 1:
            raise ValueError(f"column {key!r} has 1 number a row, {layout.INFO} says {width}")
        return column.to_numpy(zero_copy_only=False)
    while pa.types.is_nested(column.type):
        column = column.flatten()
    if column.null_count or len(column) % max(1, min(rows, table.num_rows)):
        raise ValueError(f"the rows of column {key!r} differ in length")
    out = column.to_numpy(zero_copy_only=False).reshape(min(rows, table.num_rows), -1)
    if out.shape[1] != width:
        raise ValueError(f"column {key!r} has {out.shape[1]} numbers a row, {layout.INFO} says {width}")
    return out if width > 1 else out[:, 0]  # a list of one number is that number


def read_whole(table, key: str, rows: int) -> np.ndarray:
    """`read_numbers` of a column of one whole number a row: int64[rows]."""
    out = read_numbers(table, key, rows, 1)
    if out.dtype.kind == "f" and not (np.abs(out) < 1 << 53).all() or (out % 1).any():
        raise ValueError(f"column {key!r} holds numbers that are not whole")
    return out.astype(np.int64)
