"""LeRobotDataset v3.0 as files: names, columns, types, statistics. Pure functions; pyarrow loads on use.

    meta/info.json                                rate, features, counts
    meta/stats.json                               per feature: min max mean std count q01 q10 q50 q90 q99
    meta/tasks.parquet                            instruction -> task_index
    meta/episodes/chunk-000/file-000.parquet      one row per episode: length, files, rows, statistics
    meta/final/chunk-000/file-000.parquet         ours: what was observed after an episode's last action, a
                                                  row each
    meta/checksums.json                           ours: SHA-256 of every file (`checksums`)
    meta/labels.json                              ours: which episodes succeeded, where a person said so
                                                  (`labels`)
    recording.journal                             ours: of a recording of an arm that goes on, or was killed
    data/chunk-000/file-000.parquet               one row per frame, many episodes per file
    videos/observation.images.VIEW/chunk-000/file-000.mp4      many episodes per file, one after the other

LeRobot ignores what is ours. The env's ControlSpec is in info.json under features/action/robo_rl: LeRobot's
tools that delete, split, merge or add write a new info.json and keep features as they are. Data sets of
before have it in meta/robo_rl.json, and final states in meta/final_states.npy; both are still read.
An observation after the last action has no row among the frames: LeRobot would learn from it, and there is no
action. It is none of the video files either, whose frames LeRobot's merge counts. A picture there is a video
of its own of at most two frames, of the codec and settings of the others, so that no judge can tell it by the
way it was compressed.
A file index runs on: index 1234 with 1000 files per chunk is chunk-001/file-234.
Format as LeRobot 0.4.4 reads and writes it: https://github.com/huggingface/lerobot (src/lerobot/datasets).
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from robo_rl.data.episode import SOURCES, Episode, Features
from robo_rl.types import ActionAxis, ControlSpec

VERSION = "v3.0"
INFO, STATS, TASKS, OURS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/robo_rl.json"
# of old data sets: float32[episodes, S], or shorter; nan where nothing is known
FINAL = "meta/final_states.npy"
HISTOGRAMS = "meta/image_histograms.json"
LABELS = "meta/labels.json"
JOURNAL = "recording.journal"
IMAGES = "observation.images."
CHUNK_FILES = 1000
MOST_TASKS = 1 << 20
BOOKKEEPING = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
SCALARS = {
    "next.reward": "float32",
    "next.done": "bool",
    "next.truncated": "bool",
    "next.success": "bool",
    "complementary_info.source": "int64",
    "complementary_info.start": "int64",
}
PHASE = "complementary_info.phase"  # int64, only in data sets recorded with a person in the loop


def place(index: int, chunk_files: int = CHUNK_FILES) -> tuple[int, int]:
    """(chunk, file) of the index-th file."""
    return divmod(index, chunk_files)


def name(chunk: int, file: int, suffix: str) -> str:
    return f"chunk-{chunk:03d}/file-{file:03d}{suffix}"


def data_path(root: Path, chunk: int, file: int) -> Path:
    return root / "data" / name(chunk, file, ".parquet")


def episodes_path(root: Path, chunk: int, file: int) -> Path:
    return root / "meta" / "episodes" / name(chunk, file, ".parquet")


def index_of(path: Path, chunk_files: int) -> int:
    """Inverse of `name`: the running index of a file."""
    return int(path.parent.name[6:]) * chunk_files + int(path.stem[5:])


def final_path(root: Path, chunk: int, file: int) -> Path:
    return root / "meta" / "final" / name(chunk, file, ".parquet")


def picture_key(view: str) -> str:
    """The feature of a camera: LeRobot's data sets with one camera may call it observation.image, which then
    is the view's name too."""
    return view if view.startswith("observation.") else IMAGES + view


def video_path(root: Path, view: str, chunk: int, file: int) -> Path:
    return root / "videos" / picture_key(view) / name(chunk, file, ".mp4")


def info_features(f: Features, codec: str = "", spec: ControlSpec | None = None) -> dict:
    """The `features` entry of info.json, in column order; `spec` travels in that of the action."""

    def scalar(dtype: str) -> dict:
        return {"dtype": dtype, "shape": [1], "names": None}

    out = {
        "observation.state": {"dtype": "float32", "shape": [len(f.state)], "names": list(f.state)},
        "action": {
            "dtype": "float32",
            "shape": [len(f.action)],
            "names": list(f.action),
            "robo_rl": spec_to_dict(spec),
        },
    }
    out |= {key: scalar(dtype) for key, dtype in SCALARS.items() if key not in _absent(f)}
    if f.phases:
        out[PHASE] = scalar("int64")
    for view, h, w in f.views:
        out[picture_key(view)] = {
            "dtype": "video",
            "shape": [h, w, 3],
            "names": ["height", "width", "channels"],
            "info": {
                "video.height": h + h % 2,
                "video.width": w + w % 2,
                "video.codec": codec,
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "video.fps": _plain(f.fps),
                "video.channels": 3,
                "has_audio": False,
            },
        }
    return out | {key: scalar(dtype) for key, dtype in BOOKKEEPING.items()}


def _absent(f: Features) -> set[str]:
    return {f"next.{name}" for name in f.absent}


def _plain(x: float) -> int | float:
    return int(x) if float(x).is_integer() else float(x)


def new_info(f: Features, codec: str, spec: ControlSpec | None = None) -> dict:
    return {
        "codebase_version": VERSION,
        "robot_type": f.robot or None,
        "total_episodes": 0,
        "total_frames": 0,
        "total_tasks": 0,
        "chunks_size": CHUNK_FILES,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": _plain(f.fps),
        "splits": {},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": info_features(f, codec, spec),
    }


def whole(info: dict, key: str, least: int) -> int:
    """A count of info.json; ValueError unless it is a whole number of at least `least`."""
    if type(info[key]) is not int or info[key] < least:
        raise ValueError(f"{key} must be a whole number >= {least}, got {info[key]!r}")
    return info[key]


WIDE, PIXELS = 1 << 16, 1 << 14  # numbers of a feature, pixels of a picture's side, at most


def _shape(key: str, ft: dict) -> list[int]:
    """The shape of a feature; ValueError for one that no file has."""
    shape, picture = ft["shape"], ft["dtype"] in ("video", "image")
    most = PIXELS if picture else WIDE
    if (
        not isinstance(shape, (list, tuple))
        or not 0 < len(shape) <= 4
        or any(type(k) is not int or k < 1 for k in shape)
    ):
        raise ValueError(f"the shape of {key!r} must be whole numbers >= 1, got {str(shape)[:60]}")
    if max(shape) > most or not picture and np.prod(shape, dtype=float) > most or picture and len(shape) != 3:
        raise ValueError(
            f"the shape of {key!r} must be {'three sizes' if picture else 'numbers'} up to {most}, got "
            f"{shape}"
        )
    return list(shape)


def features_of_info(info: dict) -> Features:
    """Inverse of `info_features`, for any writer's data; KeyError, TypeError or ValueError if malformed."""
    if not isinstance(info["features"], dict) or not all(
        isinstance(ft, dict) for ft in info["features"].values()
    ):
        raise ValueError("features must say what each column is")
    if type(info["fps"]) not in (int, float) or not 0 < info["fps"] <= 10_000:
        raise ValueError(f"fps must be in (0, 10000], got {info['fps']!r}")
    shapes = {key: _shape(key, ft) for key, ft in info["features"].items()}

    def names(key: str) -> tuple[str, ...]:
        ft = info["features"].get(key)
        if ft is None:
            return ()
        n, given = int(np.prod(shapes[key])), ft.get("names")
        if isinstance(given, dict):  # {"motors": [...]}
            given = [x for v in given.values() for x in (v if isinstance(v, list) else [v])]
        ok = isinstance(given, list) and len(given) == n
        return tuple(map(str, given)) if ok else tuple(f"{key.split('.')[-1]}_{i}" for i in range(n))

    views = []
    for key, ft in info["features"].items():
        if ft["dtype"] in ("video", "image"):
            shape = shapes[key]
            first = (ft.get("names") or ["height"])[0] in ("channel", "channels") or shape[0] == 3 != shape[2]
            h, w = shape[1:] if first else shape[:2]
            views.append((key.removeprefix(IMAGES), int(h), int(w)))
    return Features(
        fps=float(info["fps"]),
        state=names("observation.state"),
        action=names("action"),
        views=tuple(sorted(views)),
        robot=str(info.get("robot_type") or ""),
        phases=PHASE in info["features"],
        absent=tuple(x for x in ("reward", "success", "truncated") if f"next.{x}" not in info["features"]),
    )


def spec_to_dict(spec: ControlSpec | None) -> dict:
    return {"spec": spec and asdict(spec), "sources": list(SOURCES)}


def spec_of(d: dict) -> tuple[ControlSpec | None, tuple[str, ...]]:
    """-> (ControlSpec or None, names of the `complementary_info.source` codes) of features/action/robo_rl, or
    of an old meta/robo_rl.json; KeyError, TypeError or ValueError if malformed."""
    s = d.get("spec")
    if s is not None:
        s = ControlSpec(
            **{
                **s,
                "axes": tuple(ActionAxis(**a) for a in s["axes"]),
                "state_names": tuple(s["state_names"]),
                "views": tuple(s["views"]),
            }
        )
    return s, tuple(d["sources"])


def frame_table(episodes: list[Episode], tasks: list[int], f: Features, first_episode: int, first_frame: int):
    """One row per frame of `episodes`, the first of which is `first_episode`: Arrow table, dict of arrays."""
    import pyarrow as pa

    lengths = np.array([len(e) for e in episodes])
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    in_episode = np.arange(total) - np.repeat(ends - lengths, lengths)

    def per_episode(values, dtype) -> np.ndarray:
        return np.repeat(np.asarray(values, dtype), lengths)

    last = np.zeros(total, bool)
    last[ends - 1] = True
    columns = {
        "observation.state": np.concatenate([e.state for e in episodes]),
        "action": np.concatenate([e.action for e in episodes]),
        "next.reward": np.concatenate([np.asarray(e.reward) for e in episodes]),
        "next.done": last,
        "next.truncated": last & ~per_episode([e.terminated for e in episodes], bool),
        "next.success": last & per_episode([e.success for e in episodes], bool),
        "complementary_info.source": np.concatenate([e.source_codes for e in episodes]),
        "complementary_info.start": per_episode([e.start for e in episodes], np.int64),
        "timestamp": (in_episode / f.fps).astype(np.float32),
        "frame_index": in_episode.astype(np.int64),
        "episode_index": per_episode(first_episode + np.arange(len(episodes)), np.int64),
        "index": np.arange(first_frame, first_frame + total, dtype=np.int64),
        "task_index": per_episode(tasks, np.int64),
    }
    if f.phases:
        columns[PHASE] = np.concatenate(
            [np.zeros(len(e), np.int64) if e.phase is None else e.phase for e in episodes]
        )
    columns = {key: x for key, x in columns.items() if key not in _absent(f)}
    return pa.table({key: _column(x) for key, x in columns.items()}), columns


def _column(x: np.ndarray):
    """[n] or [n, 1] -> scalars, [n, k] -> fixed-size lists."""
    import pyarrow as pa

    flat = pa.array(x.reshape(-1))
    return flat if x.ndim == 1 or x.shape[1] == 1 else pa.FixedSizeListArray.from_arrays(flat, x.shape[1])


def final_table(episodes: list[Episode], f: Features, first_episode: int):
    """Arrow table, one row per episode whose last observation is known: state, a video (bytes) per view."""
    import pyarrow as pa

    from robo_rl.data import video

    known = [(first_episode + i, e) for i, e in enumerate(episodes) if e.final is not None]
    state = (
        np.stack([np.asarray(e.final) for _, e in known])
        if known
        else np.zeros((0, len(f.state)), np.float32)
    )
    columns = {
        "episode_index": pa.array([i for i, _ in known], pa.int64()),
        "length": pa.array([len(e) for _, e in known], pa.int64()),
        "observation.state": _column(state),
    }
    for view, _, _ in f.views:
        cells = [
            None
            if e.final_images is None
            else video.encode_final(e.images[view], e.final_images[view], f.fps)
            for _, e in known
        ]
        columns[picture_key(view)] = pa.array(cells, pa.binary())
    return pa.table(columns)


def nested(x: np.ndarray):
    """[n, k] -> n lists; [n, 3, 1, 1] -> n lists of lists of lists."""
    import pyarrow as pa

    out = pa.array(np.ascontiguousarray(x).reshape(-1))
    for k in x.shape[:0:-1]:
        offsets = np.arange(0, len(out) + 1, k, dtype=np.int32)
        out = pa.ListArray.from_arrays(pa.array(offsets), out)
    return out


def info_to_json(info: dict, episodes: int, frames: int, tasks: int) -> str:
    """Text of info.json with these counts."""
    counts = {
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "splits": {"train": f"0:{episodes}"},
    }
    return json.dumps(info | counts, indent=4, ensure_ascii=False) + "\n"


def episode_table(
    f: Features,
    first_episode: int,
    first_frame: int,
    lengths: np.ndarray,
    tasks: list[str],
    data_file: int,
    videos: dict[str, tuple[int, int]],
    stats: dict,
    meta_file: int,
    per_chunk: int = CHUNK_FILES,
):
    """Arrow table, one row per episode. videos: view -> (file index, frames already in that file)."""
    import pyarrow as pa

    n = len(lengths)
    ends = np.cumsum(lengths)

    def same(x: int):
        return pa.array(np.full(n, x, np.int64))

    def both(prefix: str, index: int) -> dict:
        chunk, file = place(index, per_chunk)
        return {f"{prefix}/chunk_index": same(chunk), f"{prefix}/file_index": same(file)}

    columns = {
        "episode_index": pa.array(first_episode + np.arange(n)),
        "tasks": pa.array([[t] for t in tasks], pa.list_(pa.string())),
        "length": pa.array(lengths.astype(np.int64)),
        **both("data", data_file),
        "dataset_from_index": pa.array(first_frame + ends - lengths),
        "dataset_to_index": pa.array(first_frame + ends),
    }
    for view, (index, frames) in videos.items():
        key = f"videos/{picture_key(view)}"
        columns |= both(key, index)
        columns[f"{key}/from_timestamp"] = pa.array((frames + ends - lengths) / f.fps)
        columns[f"{key}/to_timestamp"] = pa.array((frames + ends) / f.fps)
    columns |= {f"stats/{key}/{s}": nested(x) for key, per in stats.items() for s, x in per.items()}
    return pa.table(columns | both("meta/episodes", meta_file))


def task_table(tasks: list[str]):
    """tasks.parquet as pandas would write a frame indexed by the instruction."""
    import pyarrow as pa

    index = "__index_level_0__"
    pandas = {
        "index_columns": [index],
        "column_indexes": [
            {
                "name": None,
                "field_name": None,
                "pandas_type": "unicode",
                "numpy_type": "object",
                "metadata": {"encoding": "UTF-8"},
            }
        ],
        "columns": [
            {
                "name": "task_index",
                "field_name": "task_index",
                "pandas_type": "int64",
                "numpy_type": "int64",
                "metadata": None,
            },
            {
                "name": None,
                "field_name": index,
                "pandas_type": "unicode",
                "numpy_type": "object",
                "metadata": None,
            },
        ],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    table = pa.table({"task_index": pa.array(np.arange(len(tasks))), index: pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def tasks_of_table(table) -> list[str]:
    """Instructions by task_index, "" for a number that none has; the text column is whichever holds strings.
    ValueError: the numbers are not those of tasks, or a text is missing."""
    texts = next(c for c in table.columns if "string" in str(c.type)).to_pylist()
    numbers = table["task_index"].to_pylist()
    if not all(type(i) is int and 0 <= i < MOST_TASKS for i in numbers) or len({*numbers}) < len(numbers):
        raise ValueError(f"task_index must be different whole numbers from 0 to {MOST_TASKS - 1}")
    if None in texts:
        raise ValueError(f"the text of task {numbers[texts.index(None)]} is missing")
    out = [""] * (max(numbers) + 1 if numbers else 0)
    for i, text in zip(numbers, texts, strict=True):
        out[i] = text
    return out
