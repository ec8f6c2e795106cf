"""Statistics of a data set, as LeRobot normalises by them: per episode, and over all frames in stats.json.

Everything over all frames is exact. min, max, mean and std follow from the episodes'. Quantiles do not:
`complete` reads one feature at a time from the files (memory: 4 bytes times frames times the width of the
widest), and is np.quantile (linear) of the whole. Pictures are looked at in up to 32 frames of an episode,
thinned out to about 64 pixels a side; of those pixels the histograms are kept in meta/image_histograms.json,
and their quantiles are exact too. NumPy; pyarrow loads on use.
"""

import json
from functools import reduce
from pathlib import Path

import numpy as np

from robo_rl.data import layout
from robo_rl.data.checksums import Checksums, Staged, put_text, settled, write
from robo_rl.data.meta import (
    BrokenDataset,
    ChangedDataset,
    Meta,
    load_meta,
    locked,
    read_checked_table,
    read_numbers,
)
from robo_rl.data.reader import load
from robo_rl.data.video import VideoReader
from robo_rl.files import FILE, parse_json, read_json
from robo_rl.types import Each, silently

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STAT_NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)


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
        x = np.sort(table[start : start + n], axis=0)
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


def pixel_histograms(clips: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(int64[clips, 3, 256] pixels of each value, int64[clips] frames looked at): up to 32 of each clip,
    thinned out."""
    out, counts = np.empty((len(clips), 3, 256), np.int64), np.empty(len(clips), np.int64)
    for i, clip in enumerate(clips):
        pick = np.unique(np.linspace(0, len(clip) - 1, 32).round().astype(int))
        small = clip[pick, :: stride(clip.shape[1:3]), :: stride(clip.shape[1:3])].reshape(-1, 3)
        counts[i] = len(pick)
        for c in range(3):
            out[i, c] = np.bincount(small[:, c], minlength=256)
    return out, counts


def stride(size: tuple[int, int]) -> int:
    """Every so many pixels of a picture of `size` (h, w) is looked at, in each direction."""
    return max(1, min(size) // 64)


def image_stats(histograms: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Per statistic: array [clips, 3, 1, 1] of pixel values in [0, 1], of `pixel_histograms`."""
    out = {s: np.empty((len(counts), 3, 1, 1)) for s in STAT_NAMES if s != "count"}
    levels = np.arange(256) / 255
    for i, c in np.ndindex(len(counts), 3):
        hist = histograms[i, c]
        n, seen = hist.sum(), np.flatnonzero(hist)
        mean = hist @ levels / n
        values = {
            "min": levels[seen[0]],
            "max": levels[seen[-1]],
            "mean": mean,
            "std": np.sqrt(hist @ (levels - mean) ** 2 / n),
        } | histogram_quantiles(hist)
        for s, v in values.items():
            out[s][i, c] = v
    return out | {"count": counts[:, None]}


def histogram_quantiles(hist: np.ndarray) -> dict[str, float]:
    """Quantiles of pixels in [0, 1], int64[256] of each value: exactly np.quantile (linear) of all of
    them."""
    ends = np.cumsum(hist)
    at = np.array(list(QUANTILES.values())) * (ends[-1] - 1)
    low, high = (np.searchsorted(ends, k, side="right") / 255 for k in (np.floor(at), np.ceil(at)))
    return dict(zip(QUANTILES, low + (at - np.floor(at)) * (high - low), strict=True))


def total_stats(stats: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
    """Over all episodes, one row. Quantiles do not follow from those of the episodes: `complete` adds
    them."""
    out = {}
    for key, s in stats.items():
        n = s["count"][:, 0].astype(np.float64)
        w = (n / n.sum()).reshape(-1, *[1] * (s["mean"].ndim - 1))
        mean = (w * s["mean"]).sum(0)
        var = (w * (s["std"] ** 2 + (s["mean"] - mean) ** 2)).sum(0)
        total = {
            "min": s["min"].min(0),
            "max": s["max"].max(0),
            "mean": mean,
            "std": np.sqrt(var),
            "count": s["count"].sum(0),
        }
        out[key] = {k: v[None] for k, v in total.items()}
    return out


def merge_stats(a: dict, b: dict) -> dict:
    """Statistics rows of `a` followed by those of `b`."""
    if not a:
        return b
    return {key: {s: np.concatenate([a[key][s], b[key][s]]) for s in a[key] if s in b[key]} for key in b}


def stats_to_json(totals: dict[str, dict[str, np.ndarray]]) -> str:
    """Text of stats.json, from one row per statistic."""
    lists = {key: {s: x[0].tolist() for s, x in per.items()} for key, per in totals.items()}
    return json.dumps(lists, indent=4) + "\n"


def stats_from_json(text: str) -> dict[str, dict[str, np.ndarray]]:
    """Inverse of `stats_to_json`; ValueError: other text."""
    told = parse_json(text, "it", limit=FILE, nan=True)
    if not all(isinstance(per, dict) for per in told.values()):
        raise ValueError("it does not say the statistics of each feature")
    out = {key: {s: np.array(x)[None] for s, x in per.items()} for key, per in told.items()}
    if any(x.dtype.kind not in "biuf" for per in out.values() for x in per.values()):
        raise ValueError("a statistic is no number")
    return out


def stats_of_table(table) -> dict[str, dict[str, np.ndarray]]:
    """Per-episode statistics back from the `stats/` columns of an episode table."""
    out: dict = {}
    for column in table.column_names:
        if column.startswith("stats/"):
            _, key, s = column.split("/")
            out.setdefault(key, {})[s] = np.array(table[column].to_pylist())
    return out


def _has_all(meta: Meta, totals: dict[str, dict[str, np.ndarray]]) -> bool:
    """Whether these are statistics of every column and camera, of as many axes as it has."""
    sizes = {
        key: 3 if ft["dtype"] in ("video", "image") else int(np.prod(ft["shape"]))
        for key, ft in meta.info["features"].items()
        if ft["dtype"] in (*NUMBERS, "video", "image")
    }
    return totals.keys() == sizes.keys() and all(
        s in totals[key] and totals[key][s].size == size
        for key, size in sizes.items()
        for s in ("min", "max", "mean", "std")
    )


def read_totals(meta: Meta) -> dict[str, dict[str, np.ndarray]]:
    """Statistics of all frames, one row per array: from stats.json, or the episodes' if it lags or does not
    have them all."""
    try:
        totals = stats_from_json((meta.root / layout.STATS).read_text(encoding="utf-8"))
        if totals["action"]["count"].item() == meta.lengths.sum() and _has_all(meta, totals):
            return totals
    except (OSError, ValueError, KeyError, TypeError):
        pass
    rows: dict = {}
    for index in np.unique(meta.meta_file):
        first, count = int(np.argmax(meta.meta_file == index)), int((meta.meta_file == index).sum())
        table = read_checked_table(meta.verifier, meta.meta_path(first), first)
        rows = merge_stats(rows, stats_of_table(table.slice(0, count)))
    return total_stats(rows)


def histograms_to_json(histograms: dict[str, np.ndarray]) -> str:
    return json.dumps({view: x.tolist() for view, x in histograms.items()}) + "\n"


def read_histograms(root: Path) -> dict[str, np.ndarray]:
    """view -> int64[3,256] pixels of each value; {} if they were not kept."""
    try:
        return {
            view: np.array(x, np.int64).reshape(3, 256)
            for view, x in read_json(root / layout.HISTOGRAMS).items()
        }
    except (ValueError, TypeError):
        return {}


def complete(meta: Meta, totals: dict, histograms: dict[str, np.ndarray], sums: Checksums) -> Checksums:
    """Write stats.json with `totals` and the quantiles of all frames; -> checksums, on the disk too.

    Histograms that do not tell of the frames that `totals` do (of an old data set, or a repaired one) are
    made anew.
    """
    out = {}
    for key, per in totals.items():
        view = key.removeprefix(layout.IMAGES)
        if view in meta.video_file:
            h, w = next((h, w) for v, h, w in meta.features.views if v == view)
            k = stride((h, w))
            seen = int(per["count"].sum()) * len(range(0, h, k)) * len(range(0, w, k))
            if view not in histograms or histograms[view].sum(1).tolist() != [seen] * 3:
                data = load(meta.root, len(meta.lengths), tolerance=np.inf, trust=None)
                clips = (some_frames(data, view, e) for e in range(len(data)))
                histograms = histograms | {
                    view: reduce(np.add, (pixel_histograms([clip])[0][0] for clip in clips))
                }
            rows = [histogram_quantiles(hist) for hist in histograms[view]]
            quantiles = {q: np.array([r[q] for r in rows]).reshape(1, 3, 1, 1) for q in QUANTILES}
        elif meta.info["features"].get(key, {}).get("dtype") in NUMBERS:
            quantiles = column_quantiles(meta, key)
        else:
            quantiles = {}
        out[key] = per | quantiles
    staged = Staged(meta.root, sums)
    try:
        if histograms:
            staged.text(meta.root / layout.HISTOGRAMS, histograms_to_json(histograms))
        staged.text(meta.root / layout.STATS, stats_to_json(out))
        staged.commit()
    finally:
        staged.abandon()
    sums = settled(meta.root, staged.sums)
    write(meta.root, sums)
    return sums


def renew(meta: Meta, each: Each = silently) -> dict[str, dict[str, np.ndarray]]:
    """Make stats.json anew from all frames, exactly; pictures as `pixel_histograms` looks at them. -> what
    was written.

    The checksums of a data set that has some are kept right.
    """
    trust = None if meta.verifier.sums is None else ()
    data = load(meta.root, len(meta.lengths), tolerance=np.inf, trust=trust)  # names what is damaged
    out: dict[str, dict[str, np.ndarray]] = {}
    for key, ft in meta.info["features"].items():
        view = key.removeprefix(layout.IMAGES)
        if view in data.views:
            per = [
                pixel_histograms([some_frames(data, view, e)])
                for e in each(f"statistics of {view}", range(len(data)), "episodes")
            ]
            hist, counts = np.sum([h for h, _ in per], 0), np.sum([c for _, c in per], 0)
            out[key] = image_stats(hist, counts)
        elif ft["dtype"] in NUMBERS:
            x = read_column(meta, key)
            wide = x.astype(np.float64)
            out[key] = {
                "min": x.min(0)[None],
                "max": x.max(0)[None],
                "mean": wide.mean(0)[None],
                "std": wide.std(0)[None],
                "count": np.array([[len(x)]]),
            } | quantiles_of(x)
    put_text(meta.root, meta.verifier.sums, meta.root / layout.STATS, stats_to_json(out))
    return out


def renew_folder(root: Path, each: Each = silently) -> dict[str, dict[str, np.ndarray]]:
    """`renew` of a data set that somebody may be recording: UserError while it is being written."""
    with locked(root):
        return renew(load_meta(root), each)


def some_frames(data, view: str, episode: int, count: int = 32) -> np.ndarray:
    """Up to `count` frames of an episode, evenly spread: uint8[n, h, w, 3]."""
    length = int(data.to[episode] - data.from_[episode])
    pick = np.unique(np.linspace(0, length - 1, count).round().astype(int))
    if view not in data.meta.video_file:
        return data.frames(view, episode)[pick]
    first = int(data.meta.video_start[view][episode])
    with VideoReader(data.sound_video(view, episode), data.features.fps, data.views[view]) as video:
        return video.read(first + pick)


NUMBERS = ("float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")


def column_quantiles(meta: Meta, key: str) -> dict[str, np.ndarray]:
    """Quantiles [1,k] of a column over all frames of a data set: np.quantile (linear) of the whole."""
    return quantiles_of(read_column(meta, key))


def read_column(meta: Meta, key: str) -> np.ndarray:
    """[F,k]: a column over all frames of a data set; BrokenDataset names the file that does not have it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts, width = [], int(np.prod(meta.info["features"][key]["shape"]))
    for index in np.unique(meta.data_file):
        first = int(np.argmax(meta.data_file == index))
        path, rows = meta.data_path(first), int(meta.lengths[meta.data_file == index].sum())
        if not meta.verifier.is_sound(path):
            raise ChangedDataset(path, meta.root, first)
        try:  # of the file this column alone: pictures may be in others
            table = pq.read_table(path, columns=[key], partitioning=None, page_checksum_verification=True)  # pyright: ignore[reportArgumentType]  # pyarrow takes None
            parts.append(read_numbers(table, key, rows, width).reshape(rows, width))
        except (pa.ArrowException, OSError, ValueError) as e:
            raise BrokenDataset(path, str(e).splitlines()[0], meta.root, first) from None
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def quantiles_of(x: np.ndarray) -> dict[str, np.ndarray]:
    """Quantiles [1,k] of [F,k]."""
    levels = list(QUANTILES.values())
    of = np.stack([np.quantile(x[:, j].astype(np.float64), levels) for j in range(x.shape[1])], 1)
    return {q: row[None] for q, row in zip(QUANTILES, of, strict=True)}
