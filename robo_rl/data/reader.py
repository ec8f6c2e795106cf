"""Read a LeRobotDataset v3.0 folder, ours or LeRobot's, and tell exactly which file is broken if one is.

Every file that is read is compared with its checksum (`checksums`), a video when it is first decoded; Parquet
pages with theirs. A data set without checksums is read with a warning; what can be named without them (a
missing row, a number that is not finite) is.
A folder that another process is extending reads as of its last commit. Damage raises `BrokenDataset`, whose
text names the file and the repair command; `repair` keeps the episodes before the damage.
"""

import itertools
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from robo_rl.data import checksums, labels, layout, video
from robo_rl.data.episode import SOURCES, Episode, Features
from robo_rl.data.meta import (
    BrokenDataset,
    ChangedDataset,
    Meta,
    committed_files,
    load_meta,
    read_checked,
    read_numbers,
    read_table,
    read_whole,
)
from robo_rl.errors import UserError, quoted
from robo_rl.types import ControlSpec, Each, silently

# columns of one whole number a row
WHOLE = ("task_index", "index", "complementary_info.source", "complementary_info.start", layout.PHASE)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """All frames F of E episodes in memory but the images, which `frames` decodes per episode.

    state float32[F, S], action float32[F, A], reward float32[F], done bool[F] (last frame of an episode),
    terminated bool[E], success bool[E], source int64[F] (index into `sources`), phase int64[F] (index into
    episode.PHASES; all policy where the data set does not record it), task_index int64[F],
    episode_index int64[F], from_/to int64[E] (rows from_[e] .. to[e] - 1 are episode e), start int64[E].
    is_judged: whether anybody said which episodes succeeded: who recorded it, or a label (`labels`). Where
    rewards were not recorded, a success gives 1 with its last action.
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
    is_judged: bool = True

    def __repr__(self) -> str:
        """What a notebook shows: where it is and its sizes."""
        sizes = f"{self.state.shape[1]} numbers of state, {self.action.shape[1]} axes of action"
        views = f", cameras {', '.join(self.views)}" if self.views else ""
        return (
            f"Dataset({str(self.meta.root)!r}: {len(self)} episodes, {len(self.state)} steps, {sizes}{views})"
        )

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

    @property
    def after(self) -> np.ndarray:
        """float32[F,S]: the state after every action, nan where it was not recorded."""
        out = np.roll(self.state, -1, 0)
        out[self.to - 1] = self.final
        return out

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
            raise UserError(
                f"the data set {self.meta.root} has no camera {view!r}; it has: "
                f"{', '.join(self.views) or 'none'}"
            )
        out = np.empty((int(self.to[episode] - self.from_[episode]), *self.views[view], 3), np.uint8)
        for first, block in self.blocks(view, episode):
            out[first : first + len(block)] = block
        return out

    def blocks(self, view: str, episode: int, size: int = 64) -> Iterator[tuple[int, np.ndarray]]:
        """As `frames`, in pieces that bound the memory: (first frame, uint8[up to `size`, h, w, 3])."""
        T, m = int(self.to[episode] - self.from_[episode]), self.meta
        if view not in m.video_file:
            yield 0, _images_in_parquet(m, view, episode)
            return
        path, start = self.sound_video(view, episode), int(m.video_start[view][episode])
        try:
            yield from video.decode_blocks(path, start, T, self.features.fps, self.views[view], size)
        except video.BrokenVideo as e:
            raise BrokenDataset(path, f"episode {episode}: {e}", m.root, episode) from None

    def sound_video(self, view: str, episode: int) -> Path:
        """The video of an episode; BrokenDataset if it is not what was written."""
        m, path = self.meta, self.meta.video_path(view, episode)
        if not m.verifier.is_sound(path):
            raise ChangedDataset(path, m.root, m.first_in_video(view, path))
        return path

    def images(self, view: str, each: Each = silently) -> np.ndarray:
        """Decode all episodes of one camera: uint8[F, h, w, 3]; F * h * w * 3 bytes of memory."""
        out = np.empty((len(self.action), *self.views.get(view, (0, 0)), 3), np.uint8)
        for e in each(f"decode {view}", range(len(self)), "episodes"):
            for first, block in self.blocks(view, e):
                out[self.from_[e] + first : self.from_[e] + first + len(block)] = block
        return out

    @cached_property
    def _final_cells(self) -> list:
        """The encoded pictures after the last actions: an Arrow table per file."""
        m, out = self.meta, []
        for path in m.final_file:
            data = read_checked(m.verifier, path)
            try:
                out.append(read_table(data))
            except ValueError as e:
                raise BrokenDataset(path, f"{e}; the data reads without it", m.root) from None
        return out

    def final_image(self, view: str, episode: int) -> np.ndarray | None:
        """What a camera saw after the last action of an episode: uint8[h, w, 3]; None where it was not
        recorded."""
        file, row = self.meta.final_at[episode]
        key = layout.picture_key(view)
        if file < 0 or key not in self._final_cells[file].column_names:
            return None
        cell, length = (
            self._final_cells[file][key][int(row)].as_py(),
            int(self.to[episode] - self.from_[episode]),
        )
        try:
            return (
                None
                if cell is None
                else video.decode_final(cell, length, self.features.fps, self.views[view])
            )
        except video.BrokenVideo as e:
            path = self.meta.final_file[file]
            raise BrokenDataset(
                path, f"the last picture of episode {episode}: {e}", self.meta.root, episode
            ) from None

    def final_images(self, view: str) -> tuple[np.ndarray, np.ndarray]:
        """(uint8[E, h, w, 3] what a camera saw after the last actions, bool[E] where it was recorded; 0
        elsewhere)."""
        out, known = np.zeros((len(self), *self.views[view], 3), np.uint8), np.zeros(len(self), bool)
        for e in range(len(self)):
            if (image := self.final_image(view, e)) is not None:
                out[e], known[e] = image, True
        return out, known

    def episode(self, e: int) -> Episode:
        """Episode `e` as it was given to the Writer (images as decoded)."""
        rows, names = slice(self.from_[e], self.to[e]), dict(enumerate(self.sources))
        known = bool(np.isfinite(self.final[e]).all())
        last = {view: x for view in self.views if known and (x := self.final_image(view, e)) is not None}
        return Episode(
            state=self.state[rows],
            action=self.action[rows],
            reward=self.reward[rows],
            task=self.task(e),
            images={view: self.frames(view, e) for view in self.views},
            success=bool(self.success[e]),
            source=[
                who if (who := names.get(c)) in SOURCES else "unknown" for c in self.source[rows].tolist()
            ],
            start=int(self.start[e]),
            terminated=bool(self.terminated[e]),
            phase=self.phase[rows] if self.features.phases else None,
            final=self.final[e] if known else None,
            final_images=last if known and len(last) == len(self.views) else None,
        )


def load(
    root: Path | str,
    episodes: int = 0,
    tolerance: float | None = None,
    trust: Collection[Path] | None = (),
    label: str = "",
) -> Dataset:
    """Read the data set at `root` (its first `episodes` only, if not 0) and check it.

    Checked: every file there, whole and as it was written (videos: length, size and frame count here, their
    checksum when they are first decoded), rows where the meta data say, as wide as they say, indices
    consecutive, numbers finite, timestamps 1/fps apart within `tolerance` [s] (None: that of the data set,
    1e-4 unless it was accepted with another).
    trust: files whose checksums are not looked at (None: all). label: success=all|none|FILE, in place of what
    the data set says. Raises BrokenDataset (file and repair), or UserError.
    """
    meta = load_meta(root, episodes, trust)
    lengths, starts, E = meta.lengths, meta.starts, len(meta.lengths)
    if not E:
        raise UserError(f"data set {meta.root} is empty. Fill it: robo_rl collect --out {quoted(meta.root)}")
    info = meta.info["features"]
    wanted = [
        "observation.state",
        "action",
        *layout.SCALARS,
        layout.PHASE,
        "task_index",
        "index",
        "timestamp",
    ]
    wanted = [key for key in wanted if key in info]
    F, parts = int(lengths.sum()), {key: [] for key in wanted}
    for first in np.flatnonzero(np.diff(meta.data_file, prepend=-1)):
        path = meta.data_path(int(first))
        here = np.flatnonzero(meta.data_file == meta.data_file[first])
        rows, at = int(lengths[here].sum()), int(starts[first])
        data = read_checked(meta.verifier, path, int(first))
        try:
            table = read_table(data, wanted)
            for key in wanted:
                width = int(np.prod(info[key]["shape"]))
                parts[key].append(
                    read_whole(table, key, rows) if key in WHOLE else read_numbers(table, key, rows, width)
                )
        except ValueError as e:
            raise BrokenDataset(path, str(e), meta.root, int(first)) from None
        if table.num_rows < rows:
            sound = int(first + np.searchsorted(np.cumsum(lengths[here]), table.num_rows, side="right"))
            raise BrokenDataset(path, f"it has {table.num_rows} of {rows} rows", meta.root, sound)
        wrong = np.flatnonzero(parts["index"][-1] != np.arange(at, at + rows)) if "index" in parts else []
        if len(wrong):
            e = int(np.searchsorted(np.cumsum(lengths), at + wrong[0], side="right"))
            raise BrokenDataset(
                path,
                f"row {wrong[0]} is frame {parts['index'][-1][wrong[0]]}, expected {at + wrong[0]}",
                meta.root,
                e,
            )
    columns = {key: np.concatenate(x) for key, x in parts.items()}
    to = starts + lengths
    floats = _floats(meta, columns)
    for view in meta.video_file:
        _check_videos(meta, view)
    if "timestamp" in columns:
        _check_times(meta, columns["timestamp"].reshape(F), tolerance)
    _warn_of_missing_checksums(meta)
    labelled = labels.parse_label(label, E) if label else labels.read_success(meta)
    success = np.logical_or.reduceat(columns.get("next.success", np.zeros(F, bool)).astype(bool), starts)
    done = columns.get("next.done", np.ones(F, bool))  # an episode's last frame is its end, said or not
    made = Dataset(
        meta=meta,
        **floats,
        task_index=_task_index(meta, columns.get("task_index"), F),
        from_=starts,
        to=to,
        terminated=(done.astype(bool) & ~columns["next.truncated"].astype(bool))[to - 1]
        if "next.truncated" in columns
        else np.zeros(E, bool),
        success=success,
        is_judged="next.success" in columns,
        source=columns.get("complementary_info.source", np.zeros(F, np.int64)),
        start=columns.get("complementary_info.start", np.full(F, -1))[starts],
        phase=columns.get(layout.PHASE, np.zeros(F, np.int64)).astype(np.int64),
    )
    if labelled is None and made.is_judged and not {"next.reward", "next.truncated"} <= set(columns):
        labelled = success  # what was not recorded follows from the recorded success as from a label
    return made if labelled is None else judged(made, labelled)


def all_but(bad: np.ndarray, episodes: int, root: Path) -> str:
    """The command that keeps all episodes but `bad` (rising); "" where there are no others."""
    edges = [-1, *map(int, bad), episodes]
    kept = [f"{a + 1}:{b}" for a, b in itertools.pairwise(edges) if b > a + 1]
    return f"robo_rl data split {quoted(root)} --out NEW --episodes {','.join(kept)}" if kept else ""


def _others(bad: np.ndarray, meta: Meta) -> str:
    """What keeps the episodes behind damage too; "" where there are none."""
    count = len(meta.lengths)
    behind = int(bad[0]) + len(bad) < count
    return f"keep the others too: {all_but(bad, count, meta.root)}" if behind else ""


def judged(data: Dataset, success: np.ndarray) -> Dataset:
    """The data set with success bool[E] as somebody else judged it; rewards that were not recorded follow
    from it."""
    reward = data.reward
    if "next.reward" not in data.meta.info["features"]:
        reward = np.zeros_like(reward)
        reward[data.to - 1] = success
    terminated = data.terminated if "next.truncated" in data.meta.info["features"] else success
    return replace(data, success=success, reward=reward, terminated=terminated, is_judged=True)


def _floats(meta: Meta, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """state float32[F, S], action float32[F, A] and reward float32[F], 0 where none was recorded;
    BrokenDataset: not finite."""
    F, starts, to = int(meta.lengths.sum()), meta.starts, meta.starts + meta.lengths
    floats = {
        "state": columns.get("observation.state", np.zeros((F, 0))),
        "action": columns["action"],
        "reward": columns.get("next.reward", np.zeros(F)),
    }
    for key, x in floats.items():
        with np.errstate(over="ignore"):  # what float32 does not hold is not finite, which is said below
            floats[key] = np.ascontiguousarray(
                x.reshape(F, -1) if key != "reward" else x.reshape(F), np.float32
            )
        finite = np.isfinite(floats[key].reshape(F, -1)).all(1)
        if not finite.all():
            row = int(np.argmin(finite))
            e = int(np.searchsorted(to, row, side="right"))
            what = f"{key} is not finite in episode {e}, frame {row - starts[e]}"
            bad = np.unique(np.searchsorted(to, np.flatnonzero(~finite), side="right"))
            raise BrokenDataset(meta.data_path(e), what, meta.root, e, _others(bad, meta))
    return floats


def _check_times(meta: Meta, time: np.ndarray, tolerance: float | None) -> None:
    """Raise BrokenDataset unless the timestamps [F] of every episode are 1/fps apart.

    As LeRobot's check_timestamps_sync with its tolerance_s, but for what the type of the column cannot tell
    apart.
    """
    listed = meta.verifier.sums
    tolerance = tolerance if tolerance is not None else listed.tolerance if listed else checksums.TOLERANCE
    step = np.diff(time.astype(np.float64))
    allowed = tolerance + (np.spacing(np.abs(time[1:])) if time.dtype.kind == "f" else 0)
    inside = np.ones(len(step), bool)
    inside[meta.starts[1:] - 1] = False
    off = np.flatnonzero(inside & ~(np.abs(step - 1 / meta.features.fps) <= allowed))
    if len(off):
        row = int(off[0])
        e = int(np.searchsorted(meta.starts, row, side="right")) - 1
        frame, gap = row - int(meta.starts[e]), float(step[row])
        others = _others(np.unique(np.searchsorted(meta.starts, off, side="right") - 1), meta)
        largest = float(np.abs(step[off] - 1 / meta.features.fps).max())
        enough = f" --tolerance {largest * 1.01:.2g}" if np.isfinite(largest) else ""
        raise BrokenDataset(
            meta.data_path(e),
            f"episode {e}: {gap:.4g} s from frame {frame} to frame {frame + 1}, expected "
            f"{1 / meta.features.fps:.4g} s, tolerance {tolerance:g} s",
            meta.root,
            e,
            f"{others}{others and '; '}if the gaps are known and meant: robo_rl data repair "
            f"{quoted(meta.root)} --accept{enough}",
        )


def _task_index(meta: Meta, told: np.ndarray | None, frames: int) -> np.ndarray:
    """int64[frames]: the instruction of each, as `told`; the first where they name none."""
    if told is None and len(meta.tasks) > 1:
        warnings.warn(
            f"data set {meta.root}: its frames do not say which of the {len(meta.tasks)} instructions is "
            f"theirs (they have no task_index): all are taken for {meta.tasks[0]!r}",
            stacklevel=3,
        )
    out = np.zeros(frames, np.int64) if told is None else told
    if len(wrong := out[(out < 0) | (out >= len(meta.tasks))]):
        what = f"it has {len(meta.tasks)} tasks, the frames use number {wrong[0]}"
        raise BrokenDataset(meta.root / layout.TASKS, what, meta.root)
    return out


def _warn_of_missing_checksums(meta: Meta) -> None:
    sums = meta.verifier.sums
    files = committed_files(meta)
    bare = [p for p in files if sums is None or p.relative_to(meta.root).as_posix() not in sums.files]
    if bare and meta.verifier.trust is not None:
        some = "" if len(bare) == len(files) else f"{len(bare)} of {len(files)} files of "
        warnings.warn(
            f"{some}data set {meta.root} without checksums: damage may go unseen. If it is sound, add them: "
            f"robo_rl data repair {quoted(meta.root)} --accept",
            stacklevel=3,
        )


def _check_videos(meta: Meta, view: str) -> None:
    sizes = {v: (h, w) for v, h, w in meta.features.views}
    files, ends = meta.video_file[view], meta.video_start[view] + meta.lengths
    for first in np.flatnonzero(np.diff(files, prepend=-1)):
        path = meta.video_path(view, int(first))
        here = np.flatnonzero(files == files[first])
        try:
            video.check_whole(path, int(ends[here].max()), sizes[view])
        except video.BrokenVideo as e:
            bad = here[ends[here] > e.have]
            raise BrokenDataset(path, str(e), meta.root, int(bad[0]), _others(bad, meta)) from None


def _images_in_parquet(meta: Meta, view: str, episode: int) -> np.ndarray:
    """LeRobot's other way of storing images: encoded pictures in a column. uint8[T, h, w, 3]."""
    import io

    from PIL import Image

    path = meta.data_path(episode)
    key = layout.picture_key(view)
    first = int(np.argmax(meta.data_file == meta.data_file[episode]))
    at = int(meta.starts[episode] - meta.starts[first])
    data = read_checked(meta.verifier, path, first)
    try:
        cells = read_table(data, [key])[key].slice(at, int(meta.lengths[episode])).to_pylist()
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
