"""LeRobotDataset v3.0 as files: names, columns, types, statistics. Pure functions; pyarrow loads on use.

    meta/info.json                                rate, features, counts
    meta/stats.json                               per feature: min max mean std count q01 q10 q50 q90 q99
    meta/tasks.parquet                            instruction -> task_index
    meta/episodes/chunk-000/file-000.parquet      one row per episode: length, files, rows, statistics
    meta/robo_rl.json                             ours: the env's ControlSpec (LeRobot ignores it)
    meta/final_states.npy                         ours: the state after each episode's last action, nan where unknown
    data/chunk-000/file-000.parquet               one row per frame, many episodes per file
    videos/observation.images.VIEW/chunk-000/file-000.mp4      many episodes per file, one after the other

A file index runs on: index 1234 with 1000 files per chunk is chunk-001/file-234.
Format as LeRobot 0.4.4 reads and writes it: https://github.com/huggingface/lerobot (src/lerobot/datasets).
"""

import io
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from robo_rl.data.episode import SOURCES, Episode, Features
from robo_rl.types import ActionAxis, ControlSpec

VERSION = "v3.0"
INFO, STATS, TASKS, OURS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/robo_rl.json"
FINAL = "meta/final_states.npy"  # float32[episodes, S]; absent, or shorter than the data set, where nothing is known
IMAGES = "observation.images."
CHUNK_FILES = 1000
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STAT_NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)
BOOKKEEPING = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64",
               "task_index": "int64"}
SCALARS = {"next.reward": "float32", "next.done": "bool", "next.truncated": "bool", "next.success": "bool",
           "complementary_info.source": "int64", "complementary_info.start": "int64"}
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


def video_path(root: Path, view: str, chunk: int, file: int) -> Path:
    return root / "videos" / (IMAGES + view) / name(chunk, file, ".mp4")


def info_features(f: Features, codec: str = "") -> dict:
    """The `features` entry of info.json, in column order."""
    def scalar(dtype: str) -> dict:
        return {"dtype": dtype, "shape": [1], "names": None}
    out = {
        "observation.state": {"dtype": "float32", "shape": [len(f.state)], "names": list(f.state)},
        "action": {"dtype": "float32", "shape": [len(f.action)], "names": list(f.action)},
    }
    out |= {key: scalar(dtype) for key, dtype in SCALARS.items()}
    if f.phases:
        out[PHASE] = scalar("int64")
    for view, h, w in f.views:
        out[IMAGES + view] = {
            "dtype": "video", "shape": [h, w, 3], "names": ["height", "width", "channels"],
            "info": {"video.height": h + h % 2, "video.width": w + w % 2, "video.codec": codec,
                     "video.pix_fmt": "yuv420p", "video.is_depth_map": False, "video.fps": _plain(f.fps),
                     "video.channels": 3, "has_audio": False},
        }
    return out | {key: scalar(dtype) for key, dtype in BOOKKEEPING.items()}


def _plain(x: float) -> int | float:
    return int(x) if float(x).is_integer() else float(x)


def new_info(f: Features, codec: str) -> dict:
    return {
        "codebase_version": VERSION, "robot_type": f.robot or None, "total_episodes": 0, "total_frames": 0,
        "total_tasks": 0, "chunks_size": CHUNK_FILES, "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200, "fps": _plain(f.fps), "splits": {},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": info_features(f, codec),
    }


def features_of_info(info: dict) -> Features:
    """Inverse of `info_features`, for any writer's data; KeyError, TypeError or ValueError if malformed."""
    def names(key: str) -> tuple[str, ...]:
        ft = info["features"].get(key)
        if ft is None:
            return ()
        n, given = int(np.prod(ft["shape"])), ft.get("names")
        if isinstance(given, dict):  # {"motors": [...]}
            given = [x for v in given.values() for x in (v if isinstance(v, list) else [v])]
        ok = isinstance(given, list) and len(given) == n
        return tuple(map(str, given)) if ok else tuple(f"{key.split('.')[-1]}_{i}" for i in range(n))

    views = []
    for key, ft in info["features"].items():
        if ft["dtype"] in ("video", "image"):
            shape = list(ft["shape"])
            first = (ft.get("names") or ["height"])[0] in ("channel", "channels") or shape[0] == 3 != shape[2]
            h, w = shape[1:] if first else shape[:2]
            views.append((key.removeprefix(IMAGES), int(h), int(w)))
    return Features(fps=float(info["fps"]), state=names("observation.state"), action=names("action"),
                    views=tuple(sorted(views)), robot=str(info.get("robot_type") or ""),
                    phases=PHASE in info["features"])


def spec_to_json(spec: ControlSpec | None) -> str:
    return json.dumps({"spec": spec and asdict(spec), "sources": list(SOURCES)}, indent=2) + "\n"


def spec_from_json(text: str) -> tuple[ControlSpec | None, tuple[str, ...]]:
    """-> (ControlSpec or None, names of the `complementary_info.source` codes)."""
    d = json.loads(text)
    s = d.get("spec")
    if s is not None:
        s = ControlSpec(**{**s, "axes": tuple(ActionAxis(**a) for a in s["axes"]),
                           "state_names": tuple(s["state_names"]), "views": tuple(s["views"])})
    return s, tuple(d["sources"])


def array_bytes(x: np.ndarray) -> bytes:
    """The .npy file of x."""
    out = io.BytesIO()
    np.save(out, x)
    return out.getvalue()


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
        "next.reward": np.concatenate([e.reward for e in episodes]),
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
        columns[PHASE] = np.concatenate([np.zeros(len(e), np.int64) if e.phase is None else e.phase for e in episodes])
    return pa.table({key: _column(x) for key, x in columns.items()}), columns


def _column(x: np.ndarray):
    """[n] or [n, 1] -> scalars, [n, k] -> fixed-size lists."""
    import pyarrow as pa
    flat = pa.array(x.reshape(-1))
    return flat if x.ndim == 1 or x.shape[1] == 1 else pa.FixedSizeListArray.from_arrays(flat, x.shape[1])


def _nested(x: np.ndarray):
    """[n, k] -> n lists; [n, 3, 1, 1] -> n lists of lists of lists."""
    import pyarrow as pa
    out = pa.array(np.ascontiguousarray(x).reshape(-1))
    for k in x.shape[:0:-1]:
        offsets = np.arange(0, len(out) + 1, k, dtype=np.int32)
        out = pa.ListArray.from_arrays(pa.array(offsets), out)
    return out


def number_stats(columns: dict[str, np.ndarray], lengths: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Per feature and statistic: array [episodes, k], from frame columns of consecutive episodes.

    Sort-based, all features of an episode at once; quantiles interpolate linearly (NumPy's default).
    """
    keys = [key for key, x in columns.items()]
    wide = [columns[key].reshape(len(columns[key]), -1) for key in keys]
    sizes = [x.shape[1] for x in wide]
    table = np.concatenate(wide, axis=1, dtype=np.float64)
    out = {s: np.empty((len(lengths), table.shape[1])) for s in STAT_NAMES if s != "count"}
    levels = np.array(list(QUANTILES.values()))
    start = 0
    for i, n in enumerate(lengths):
        x = np.sort(table[start:start + n], axis=0)
        start += n
        out["min"][i], out["max"][i], out["mean"][i] = x[0], x[-1], x.mean(0)
        out["std"][i] = x.std(0)
        at = levels * (n - 1)
        low = at.astype(int)
        q = x[low] + (at - low)[:, None] * (x[np.minimum(low + 1, n - 1)] - x[low])
        for s, row in zip(QUANTILES, q, strict=True):
            out[s][i] = row
    stats = {}
    edges = np.cumsum([0, *sizes])
    for key, a, b in zip(keys, edges[:-1], edges[1:], strict=True):
        stats[key] = {s: x[:, a:b] for s, x in out.items()}
        for s in ("min", "max"):  # as LeRobot: in the type of the feature
            dtype = columns[key].dtype
            stats[key][s] = stats[key][s].astype(dtype if dtype.kind in "bi" else np.float64)
        stats[key]["count"] = lengths.astype(np.int64)[:, None]
    return stats


def image_stats(clips: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Per statistic: array [clips, 3, 1, 1] of pixel values in [0, 1], from up to 32 frames of each clip."""
    out = {s: np.empty((len(clips), 3, 1, 1)) for s in STAT_NAMES if s != "count"}
    counts = np.empty((len(clips), 1), np.int64)
    for i, clip in enumerate(clips):
        pick = np.unique(np.linspace(0, len(clip) - 1, 32).round().astype(int))
        stride = max(1, min(clip.shape[1:3]) // 64)
        small = clip[pick, ::stride, ::stride].reshape(-1, 3)
        counts[i] = len(pick)
        for c in range(3):  # 256 levels: everything follows from the histogram
            hist = np.bincount(small[:, c], minlength=256)
            cum, levels = np.cumsum(hist), np.arange(256) / 255
            mean = hist @ levels / cum[-1]
            seen = np.flatnonzero(hist)
            values = {"min": levels[seen[0]], "max": levels[seen[-1]], "mean": mean,
                      "std": np.sqrt(hist @ (levels - mean) ** 2 / cum[-1])}
            values |= {q: levels[np.searchsorted(cum, level * cum[-1])] for q, level in QUANTILES.items()}
            for s, v in values.items():
                out[s][i, c] = v
    return out | {"count": counts}


def total_stats(stats: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
    """Over all episodes, one row; exact but for quantiles: means of the episodes' (as LeRobot's)."""
    out = {}
    for key, s in stats.items():
        n = s["count"][:, 0].astype(np.float64)
        w = (n / n.sum()).reshape(-1, *[1] * (s["mean"].ndim - 1))
        mean = (w * s["mean"]).sum(0)
        var = (w * (s["std"] ** 2 + (s["mean"] - mean) ** 2)).sum(0)
        total = {"min": s["min"].min(0), "max": s["max"].max(0), "mean": mean, "std": np.sqrt(var),
                 "count": s["count"].sum(0)} | {q: (w * s[q]).sum(0) for q in QUANTILES if q in s}
        out[key] = {k: v[None] for k, v in total.items()}
    return out


def merge_stats(a: dict, b: dict) -> dict:
    """Statistics rows of `a` followed by those of `b`."""
    if not a:
        return b
    return {key: {s: np.concatenate([a[key][s], b[key][s]]) for s in a[key]} for key in b}


def stats_to_json(totals: dict[str, dict[str, np.ndarray]]) -> str:
    """Text of stats.json, from one row per statistic."""
    lists = {key: {s: x[0].tolist() for s, x in per.items()} for key, per in totals.items()}
    return json.dumps(lists, indent=4) + "\n"


def stats_from_json(text: str) -> dict[str, dict[str, np.ndarray]]:
    return {key: {s: np.array(x)[None] for s, x in per.items()} for key, per in json.loads(text).items()}


def info_to_json(info: dict, episodes: int, frames: int, tasks: int) -> str:
    """Text of info.json with these counts."""
    counts = {"total_episodes": episodes, "total_frames": frames, "total_tasks": tasks,
              "splits": {"train": f"0:{episodes}"}}
    return json.dumps(info | counts, indent=4, ensure_ascii=False) + "\n"


def episode_table(f: Features, first_episode: int, first_frame: int, lengths: np.ndarray, tasks: list[str],
                  data_file: int, videos: dict[str, tuple[int, int]], stats: dict, meta_file: int,
                  per_chunk: int = CHUNK_FILES):
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
        key = f"videos/{IMAGES}{view}"
        columns |= both(key, index)
        columns[f"{key}/from_timestamp"] = pa.array((frames + ends - lengths) / f.fps)
        columns[f"{key}/to_timestamp"] = pa.array((frames + ends) / f.fps)
    columns |= {f"stats/{key}/{s}": _nested(x) for key, per in stats.items() for s, x in per.items()}
    return pa.table(columns | both("meta/episodes", meta_file))


def stats_of_table(table) -> dict[str, dict[str, np.ndarray]]:
    """Per-episode statistics back from the `stats/` columns of an episode table."""
    out: dict = {}
    for column in table.column_names:
        if column.startswith("stats/"):
            _, key, s = column.split("/")
            out.setdefault(key, {})[s] = np.array(table[column].to_pylist())
    return out


def task_table(tasks: list[str]):
    """tasks.parquet as pandas would write a frame indexed by the instruction."""
    import pyarrow as pa
    index = "__index_level_0__"
    pandas = {
        "index_columns": [index], "column_indexes": [
            {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object",
             "metadata": {"encoding": "UTF-8"}}],
        "columns": [
            {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64",
             "metadata": None},
            {"name": None, "field_name": index, "pandas_type": "unicode", "numpy_type": "object",
             "metadata": None}],
        "creator": {"library": "pyarrow", "version": pa.__version__}, "pandas_version": "2.2.0",
    }
    table = pa.table({"task_index": pa.array(np.arange(len(tasks))), index: pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def tasks_of_table(table) -> list[str]:
    """Instructions by task_index; the text column is whichever holds strings."""
    texts = next(c for c in table.columns if "string" in str(c.type)).to_pylist()
    numbers = table["task_index"].to_pylist()
    out = [""] * (max(numbers) + 1 if numbers else 0)
    for i, text in zip(numbers, texts, strict=True):
        out[i] = text
    return out
