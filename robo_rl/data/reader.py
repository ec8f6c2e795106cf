"""Read a LeRobotDataset v3.0 folder, ours or LeRobot's, and tell exactly which file is broken if one is.

A folder that another process is extending reads as of its last commit. Damage raises `BrokenDataset`, whose
text names the file and the repair command; `repair` keeps the episodes before the damage.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from robo_rl.data import layout, video
from robo_rl.data.episode import SOURCES, Episode, Features
from robo_rl.errors import UserError
from robo_rl.types import ControlSpec


class BrokenDataset(UserError):
    """`path` is damaged or missing; the episodes before `episode` are sound (-1: nothing can be said)."""

    def __init__(self, path: Path, what: str, root: Path, episode: int = -1):
        self.path, self.what, self.episode = path, what, episode
        cure = (f"Keep the {episode} episodes before it: robo_rl collect --repair {root}" if episode > 0
                else "Restore the folder from a copy, or record it again")
        super().__init__(f"{path}: {what}. {cure}")


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

    def data_path(self, episode: int) -> Path:
        return layout.data_path(self.root, *self._place(self.data_file[episode]))

    def video_path(self, view: str, episode: int) -> Path:
        return layout.video_path(self.root, view, *self._place(self.video_file[view][episode]))

    def _place(self, index: int) -> tuple[int, int]:
        return layout.place(int(index), self.info["chunks_size"])


def _parquet(path: Path, columns: list[str] | None = None):
    """Arrow table; raises ValueError with the reason."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    try:  # one open file: the path may be replaced meanwhile, and halves of two files fit badly
        with pa.OSFile(str(path)) as f:
            return pq.ParquetFile(f).read(columns)
    except FileNotFoundError:
        raise ValueError("the file is missing") from None
    except (pa.ArrowException, OSError) as e:
        raise ValueError(f"it cannot be read ({str(e).splitlines()[0].rstrip('.')})") from None


def load_meta(root: Path | str, episodes: int = 0) -> Meta:
    """Everything but the frames, of the first `episodes` (0: all).

    Raises BrokenDataset, or UserError if there is no data set of this kind at `root`.
    """
    root = Path(root)
    path = root / layout.INFO
    if not path.is_file():
        raise UserError(f"no data set at {root}: {path} is missing. Record one: robo_rl collect --out {root}")
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        version = str(info["codebase_version"])
    except (ValueError, KeyError, TypeError) as e:
        raise BrokenDataset(path, f"it is not the JSON of a LeRobot data set ({e!r})", root) from None
    if not version.startswith("v3."):
        raise UserError(f"{path}: data set version {version}, need v3.x. Convert it with LeRobot: "
                        "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=ID")
    try:
        features = layout.features_of_info(info)
        count, frames, per_chunk = info["total_episodes"], info["total_frames"], info["chunks_size"]
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise BrokenDataset(path, f"its features are malformed ({e!r})", root) from None
    if episodes:
        if not 0 < episodes <= count:
            raise UserError(f"episodes must be in [1, {count}] for {root}, got {episodes}")
        count = episodes
    if not features.action:
        raise UserError(f"{path}: the data set has no feature 'action', only {', '.join(info['features'])}")

    path = root / layout.OURS
    spec, sources = None, ("unknown",)
    if path.is_file():
        try:
            spec, sources = layout.spec_from_json(path.read_text(encoding="utf-8"))
        except (ValueError, KeyError, TypeError) as e:
            raise BrokenDataset(path, f"it is malformed ({e!r}); the data reads without it", root) from None
    path = root / layout.TASKS
    try:
        tasks = layout.tasks_of_table(_parquet(path)) if count else []
    except (ValueError, KeyError, StopIteration) as e:
        raise BrokenDataset(path, str(e), root) from None

    videos = [key for key, ft in info["features"].items() if ft["dtype"] == "video"]
    prefixes = ["data", *(f"videos/{key}" for key in videos)]
    wanted = ["length", "dataset_from_index", *(f"videos/{key}/from_timestamp" for key in videos),
              *(f"{p}/{kind}_index" for p in prefixes for kind in ("chunk", "file"))]
    parts: dict[str, list] = {key: [] for key in wanted}
    meta_file: list[np.ndarray] = []
    have = 0
    folder = root / "meta" / "episodes"
    for path in sorted(folder.glob("chunk-*/file-*.parquet")) if count else ():
        try:
            table = _parquet(path, wanted)
        except ValueError as e:
            raise BrokenDataset(path, str(e), root, have) from None
        if absent := set(wanted) - set(table.column_names):
            raise BrokenDataset(path, f"it has no column {min(absent)!r}", root, have)
        for key in wanted:
            parts[key].append(table[key].to_numpy())
        index = int(path.parent.name[6:]) * per_chunk + int(path.stem[5:])
        meta_file.append(np.full(table.num_rows, index))
        have += table.num_rows
        if have >= count:
            break
    if have < count:
        raise BrokenDataset(folder, f"it lists {have} episodes, {layout.INFO} says {count}", root, have)
    empty = np.zeros(0, np.int64)
    columns = {key: np.concatenate([empty, *x])[:count] for key, x in parts.items()}

    def running(prefix: str) -> np.ndarray:
        return (columns[f"{prefix}/chunk_index"] * per_chunk + columns[f"{prefix}/file_index"]).astype(int)

    lengths, starts = columns["length"].astype(int), columns["dataset_from_index"].astype(int)
    bad = np.flatnonzero((lengths < 1) | (starts != np.cumsum(lengths) - lengths))
    if len(bad) or (lengths.sum() != frames and not episodes):
        raise BrokenDataset(folder, f"lengths add up to {lengths.sum()} frames, {layout.INFO} says {frames}",
                            root, int(bad[0]) if len(bad) else -1)
    files, frames = {}, {}
    for key in videos:
        view = key.removeprefix(layout.IMAGES)
        files[view] = running(f"videos/{key}")
        frames[view] = np.rint(columns[f"videos/{key}/from_timestamp"] * features.fps).astype(int)
    return Meta(
        root=root, info=info, features=features, tasks=tasks, spec=spec, sources=sources, lengths=lengths,
        starts=starts, data_file=running("data"), video_file=files, video_start=frames,
        meta_file=np.concatenate([empty, *meta_file])[:count].astype(int),
        final=_finals(root, count, len(features.state)),
    )


def _finals(root: Path, count: int, size: int) -> np.ndarray:
    """float32[count,size] of the file of final states, nan where it says nothing."""
    out, path = np.full((count, size), np.nan, np.float32), root / layout.FINAL
    if path.is_file():
        try:
            rows = np.load(path)[:count]
            out[:len(rows)] = rows
        except (ValueError, OSError, EOFError) as e:
            raise BrokenDataset(path, f"it is malformed ({e}); the data reads without it", root) from None
    return out


@dataclass(frozen=True, eq=False)
class Dataset:
    """All frames F of E episodes in memory but the images, which `frames` decodes per episode.

    state float32[F, S], action float32[F, A], reward float32[F], done bool[F] (last frame of an episode),
    terminated bool[E], success bool[E], source int64[F] (index into `sources`), phase int64[F] (index into
    episode.PHASES; all policy where the data set does not record it), task_index int64[F],
    episode_index int64[F], from_/to int64[E] (rows from_[e] .. to[e] - 1 are episode e), start int64[E].
    """

    meta: Meta
    state: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    success: np.ndarray
    source: np.ndarray
    task_index: np.ndarray
    start: np.ndarray
    from_: np.ndarray
    to: np.ndarray
    phase: np.ndarray

    def __len__(self) -> int:
        """Episodes."""
        return len(self.to)

    @property
    def features(self) -> Features:
        return self.meta.features

    @property
    def spec(self) -> ControlSpec | None:
        return self.meta.spec

    @property
    def tasks(self) -> list[str]:
        return self.meta.tasks

    @property
    def sources(self) -> tuple[str, ...]:
        return self.meta.sources

    @property
    def views(self) -> dict[str, tuple[int, int]]:
        """view -> (height, width)."""
        return {view: (h, w) for view, h, w in self.features.views}

    @property
    def final(self) -> np.ndarray:
        """float32[E,S]: the state after each episode's last action, nan where it was not recorded."""
        return self.meta.final

    @cached_property
    def episode_index(self) -> np.ndarray:
        return np.repeat(np.arange(len(self)), self.to - self.from_)

    @cached_property
    def done(self) -> np.ndarray:
        done = np.zeros(len(self.action), bool)
        done[self.to - 1] = True
        return done

    def task(self, episode: int) -> str:
        return self.tasks[self.task_index[self.from_[episode]]]

    def frames(self, view: str, episode: int) -> np.ndarray:
        """Decode one episode of one camera: uint8[T, h, w, 3]. Raises BrokenDataset if the video is."""
        if view not in self.views:
            raise UserError(f"the data set {self.meta.root} has no camera {view!r}; it has: "
                            f"{', '.join(self.views) or 'none'}")
        T, m = int(self.to[episode] - self.from_[episode]), self.meta
        if view not in m.video_file:
            return _images_in_parquet(m, view, episode)
        path, first = m.video_path(view, episode), int(m.video_start[view][episode])
        try:
            return video.decode(path, first, T, self.features.fps, self.views[view])
        except video.BrokenVideo as e:
            raise BrokenDataset(path, f"episode {episode}: {e}", m.root, episode) from None

    def images(self, view: str) -> np.ndarray:
        """Decode all episodes of one camera: uint8[F, h, w, 3]; F * h * w * 3 bytes of memory."""
        out = np.empty((len(self.action), *self.views.get(view, (0, 0)), 3), np.uint8)
        for e in range(len(self)):
            out[self.from_[e]:self.to[e]] = self.frames(view, e)
        return out

    def episode(self, e: int) -> Episode:
        """Episode `e` as it was given to the Writer (images as decoded)."""
        rows = slice(self.from_[e], self.to[e])
        return Episode(
            state=self.state[rows], action=self.action[rows], reward=self.reward[rows], task=self.task(e),
            images={view: self.frames(view, e) for view in self.views}, success=bool(self.success[e]),
            source=[self.sources[c] if self.sources[c] in SOURCES else "unknown" for c in self.source[rows]],
            start=int(self.start[e]), terminated=bool(self.terminated[e]),
            phase=self.phase[rows] if self.features.phases else None,
            final=self.final[e] if np.isfinite(self.final[e]).all() else None)


def load(root: Path | str, episodes: int = 0) -> Dataset:
    """Read the data set at `root` (its first `episodes` only, if not 0) and check it.

    Checked: every file there and whole (videos: length and frame count, not each picture), rows where the
    meta data say, indices consecutive, numbers finite. Raises BrokenDataset (file and repair), or UserError.
    """
    meta = load_meta(root, episodes)
    lengths, starts, E = meta.lengths, meta.starts, len(meta.lengths)
    if not E:
        raise UserError(f"data set {meta.root} is empty. Fill it: robo_rl collect --out {meta.root}")
    info = meta.info["features"]
    wanted = ["observation.state", "action", *layout.SCALARS, layout.PHASE, "task_index", "index"]
    wanted = [key for key in wanted if key in info]
    F, parts = int(lengths.sum()), {key: [] for key in wanted}
    for first in np.flatnonzero(np.diff(meta.data_file, prepend=-1)):
        path = meta.data_path(first)
        here = np.flatnonzero(meta.data_file == meta.data_file[first])
        rows, at = int(lengths[here].sum()), int(starts[first])
        try:
            table = _parquet(path, wanted)
            for key in wanted:
                parts[key].append(_numbers(table, key, rows))
        except ValueError as e:
            raise BrokenDataset(path, str(e), meta.root, int(first)) from None
        if table.num_rows < rows:
            sound = int(first + np.searchsorted(np.cumsum(lengths[here]), table.num_rows, side="right"))
            raise BrokenDataset(path, f"it has {table.num_rows} of {rows} rows", meta.root, sound)
        wrong = np.flatnonzero(parts["index"][-1] != np.arange(at, at + rows)) if "index" in parts else []
        if len(wrong):
            e = int(np.searchsorted(np.cumsum(lengths), at + wrong[0], side="right"))
            raise BrokenDataset(path, f"row {wrong[0]} is frame {parts['index'][-1][wrong[0]]}, expected "
                                f"{at + wrong[0]}", meta.root, e)
    columns = {key: np.concatenate(x) for key, x in parts.items()}
    to = starts + lengths
    floats = {"state": columns.get("observation.state", np.zeros((F, 0))), "action": columns["action"],
              "reward": columns.get("next.reward", np.zeros(F))}
    for key, x in floats.items():
        floats[key] = np.ascontiguousarray(x.reshape(F, -1) if key != "reward" else x.reshape(F), np.float32)
        finite = np.isfinite(floats[key].reshape(F, -1)).all(1)
        if not finite.all():
            row = int(np.argmin(finite))
            e = int(np.searchsorted(to, row, side="right"))
            what = f"{key} is not finite in episode {e}, frame {row - starts[e]}"
            raise BrokenDataset(meta.data_path(e), what, meta.root, e)
    task_index = columns.get("task_index", np.zeros(F, np.int64)).astype(np.int64)
    if task_index.min() < 0 or task_index.max() >= len(meta.tasks):
        what = f"it has {len(meta.tasks)} tasks, the frames use number {task_index.max()}"
        raise BrokenDataset(meta.root / layout.TASKS, what, meta.root)
    for view in meta.video_file:
        _check_videos(meta, view)
    nothing = np.zeros(F, bool)
    return Dataset(
        meta=meta, **floats, task_index=task_index, from_=starts, to=to,
        terminated=(columns["next.done"] & ~columns["next.truncated"])[to - 1] if "next.truncated" in columns
        else np.zeros(E, bool),
        success=np.logical_or.reduceat(columns.get("next.success", nothing).astype(bool), starts),
        source=columns.get("complementary_info.source", np.zeros(F, np.int64)),
        start=columns.get("complementary_info.start", np.full(F, -1))[starts],
        phase=columns.get(layout.PHASE, np.zeros(F, np.int64)).astype(np.int64),
    )


def _numbers(table, key: str, rows: int) -> np.ndarray:
    """The first `rows` rows of a column as [rows] or [rows, k]; raises ValueError with the reason."""
    import pyarrow as pa
    if key not in table.column_names:
        raise ValueError(f"it has no column {key!r}")
    column = table[key].slice(0, rows).combine_chunks()
    if column.null_count:
        raise ValueError(f"column {key!r} has empty cells")
    if not pa.types.is_nested(column.type):
        return column.to_numpy(zero_copy_only=False)
    while pa.types.is_nested(column.type):
        column = column.flatten()
    if column.null_count or len(column) % max(1, min(rows, table.num_rows)):
        raise ValueError(f"the rows of column {key!r} differ in length")
    return column.to_numpy(zero_copy_only=False).reshape(min(rows, table.num_rows), -1)


def _check_videos(meta: Meta, view: str) -> None:
    files, ends = meta.video_file[view], meta.video_start[view] + meta.lengths
    for first in np.flatnonzero(np.diff(files, prepend=-1)):
        path = meta.video_path(view, first)
        here = np.flatnonzero(files == files[first])
        try:
            video.check_whole(path, int(ends[here].max()))
        except video.BrokenVideo as e:
            raise BrokenDataset(path, str(e), meta.root, int(first)) from None


def _images_in_parquet(meta: Meta, view: str, episode: int) -> np.ndarray:
    """LeRobot's other way of storing images: encoded pictures in a column. uint8[T, h, w, 3]."""
    import io

    from PIL import Image
    path = meta.data_path(episode)
    key = view if view in meta.info["features"] else layout.IMAGES + view
    first = int(np.argmax(meta.data_file == meta.data_file[episode]))
    at = int(meta.starts[episode] - meta.starts[first])
    try:
        cells = _parquet(path, [key])[key].slice(at, int(meta.lengths[episode])).to_pylist()
        return np.stack([np.asarray(Image.open(io.BytesIO(cell["bytes"])).convert("RGB")) for cell in cells])
    except (ValueError, KeyError, TypeError, OSError) as e:
        what = f"the pictures of episode {episode} cannot be read ({e})"
        raise BrokenDataset(path, what, meta.root, episode) from None


def chunks(dataset: Dataset, horizon: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples for behaviour cloning: one per frame. -> (state [F, S], chunk [F, H, A], pad_mask bool[F, H]).

    chunk[i, h] is the action h steps after frame i. Past the end of the episode it repeats the last action
    and pad_mask is True.
    """
    if horizon < 1:
        raise UserError(f"horizon must be >= 1, got {horizon}")
    rows = np.arange(len(dataset.action))[:, None] + np.arange(horizon)
    last = np.repeat(dataset.to - 1, dataset.to - dataset.from_)[:, None]
    return dataset.state, dataset.action[np.minimum(rows, last)], rows > last
