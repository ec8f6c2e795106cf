"""Pictures of a data set by row, decoded when they are asked for: a bounded cache, and threads that decode
ahead.

A data set of 50 episodes from two cameras of 480 x 640 pixels is 46 GB decoded. Kept are at most `budget`
bytes of pictures, as they leave `change` (made smaller, for example); what does not fit is decoded again.
Memory beyond it: one open video and a few frames per thread, and the batches ahead. What comes out does not
depend on the cache nor on the threads.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from robo_rl.data import video
from robo_rl.data.meta import BrokenDataset
from robo_rl.data.reader import Dataset
from robo_rl.errors import UserError

Pictures = dict[str, np.ndarray]
OpenVideos = OrderedDict[Path, video.VideoReader]
# by thread. Not a threading.local: a forked child empties that, and would wait for ever to close a video that
# another thread had open
Readers = dict[int, OpenVideos]
PIECE = 16  # pictures that are decoded before they are changed
OPEN = 8  # videos that a thread keeps open


class FrameStore:
    """Pictures uint8[B, h, w, 3] of the cameras `views` {name: camera of the data set} for rows of its
    frames.

    change: of uint8[n, h, w, 3] (None: as recorded). budget: bytes of pictures that are kept. threads: that
    decode ahead (0: none).
    """

    def __init__(
        self,
        dataset: Dataset,
        views: Mapping[str, str],
        change: Callable[[np.ndarray], np.ndarray] | None = None,
        budget: int = 1 << 30,
        threads: int = 1,
    ):
        for source in views.values():
            if source not in dataset.views:
                raise UserError(
                    f"the data set {dataset.meta.root} has no camera {source!r}; it has: "
                    f"{', '.join(dataset.views) or 'none'}"
                )
        self.data, self.views, self.threads = dataset, dict(views), threads
        self._change = change or (lambda x: x)
        self.shapes = {
            name: self._change(np.zeros((1, *dataset.views[source], 3), np.uint8)).shape[1:]
            for name, source in views.items()
        }
        self.row_bytes = sum(int(np.prod(shape)) for shape in self.shapes.values())
        rows = len(dataset.action)
        self.fits = self.row_bytes * rows <= budget
        self.slots = slots = min(rows, max(1, budget // max(1, self.row_bytes))) if views else 0
        # touched as it fills
        self._kept = {name: np.empty((slots, *shape), np.uint8) for name, shape in self.shapes.items()}
        self._slot = np.full(rows, -1, np.int64)  # of a row
        self._row = np.full(slots, -1, np.int64)  # of a slot
        self._next, self._lock = 0, threading.Lock()
        self._readers: Readers = {}  # of threads that ask without `ahead`
        self.decoded = 0  # rows, so far

    def all(self, tick: Callable[[int], None] = lambda rows: None) -> Pictures:
        """The pictures of all rows, each video decoded once from its beginning to its end. For a store that
        `fits`."""
        assert self.fits, "ask by rows: the pictures of all do not fit the budget"
        for e in range(len(self.data)):
            for name, source in self.views.items():
                for first, block in self.data.blocks(source, e):
                    at = int(self.data.from_[e]) + first
                    self._kept[name][at : at + len(block)] = self._change(block)
            tick(int(self.data.to[e]))
        return self._kept

    def get(self, rows: np.ndarray, readers: Readers | None = None) -> Pictures:
        """The pictures of `rows` int64[B]. `readers`: where open videos are kept. BrokenDataset: a video is
        damaged."""
        rows = np.asarray(rows, np.int64)
        out = {name: np.empty((len(rows), *shape), np.uint8) for name, shape in self.shapes.items()}
        with self._lock:
            slots = self._slot[rows]
            there = slots >= 0
            for name, kept in self._kept.items():
                out[name][there] = kept[slots[there]]
        missing, back = np.unique(rows[~there], return_inverse=True)
        if not len(missing) or not self.views:
            return out
        readers = self._readers if readers is None else readers
        opened = readers.setdefault(threading.get_ident(), OrderedDict())
        made = {name: self._decode(source, missing, opened) for name, source in self.views.items()}
        for name, x in made.items():
            out[name][~there] = x[back]
        with self._lock:
            self.decoded += len(missing)
            fresh = np.flatnonzero(self._slot[missing] < 0)[: len(self._row)]
            at = (self._next + np.arange(len(fresh))) % len(self._row)
            self._next = (self._next + len(fresh)) % len(self._row)
            self._slot[self._row[at][self._row[at] >= 0]] = -1
            self._slot[missing[fresh]], self._row[at] = at, missing[fresh]
            for name, kept in self._kept.items():
                kept[at] = made[name][fresh]
        return out

    def ahead(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, Pictures]]:
        """(rows, their pictures) of each batch of rows, in order; the next ones are decoded meanwhile by the
        threads."""
        if not self.threads:
            for rows in batches:
                yield rows, self.get(rows)
            return
        waiting: deque[tuple[np.ndarray, Future[Pictures]]] = deque()
        readers: Readers = {}
        pool = ThreadPoolExecutor(self.threads, "decode")
        try:
            for rows in batches:
                waiting.append((rows, pool.submit(self.get, rows, readers)))
                if len(waiting) > self.threads:
                    rows, made = waiting.popleft()
                    yield rows, made.result()
            for rows, made in waiting:
                yield rows, made.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _decode(self, source: str, rows: np.ndarray, opened: OpenVideos) -> np.ndarray:
        """Changed pictures of one camera for rising rows."""
        data, parts = self.data, []
        episodes = np.searchsorted(data.to, rows, side="right")
        for e in np.unique(episodes).tolist():
            inside = rows[episodes == e] - data.from_[e]
            if source not in data.meta.video_file:
                parts.append(self._change(data.frames(source, e)[inside]))
                continue
            path = data.sound_video(source, e)
            numbers = inside + int(data.meta.video_start[source][e])
            reader = self._reader(source, path, opened)
            try:
                parts += [
                    self._change(reader.read(numbers[i : i + PIECE])) for i in range(0, len(numbers), PIECE)
                ]
            except video.BrokenVideo as error:
                raise BrokenDataset(path, f"episode {e}: {error}", data.meta.root, e) from None
        return np.concatenate(parts)

    def _reader(self, source: str, path: Path, opened: OpenVideos) -> video.VideoReader:
        """This thread's open video."""
        if (found := opened.get(path)) is None:
            found = opened[path] = video.VideoReader(path, self.data.features.fps, self.data.views[source])
            if len(opened) > OPEN:
                opened.popitem(last=False)[1].close()
        opened.move_to_end(path)
        return found


def choose_views(text: str, there: Iterable[str]) -> dict[str, str]:
    """{name: camera of the data set} of an option such as `cam_high,wrist=cam_left_wrist`; empty: all, by
    name; none: no camera."""
    there = list(there)
    if text == "none":
        return {}
    if not text:
        return {view: view for view in sorted(there)}
    out: dict[str, str] = {}
    for part in text.split(","):
        name, _, source = part.strip().partition("=")
        source = source or name
        if source not in there:
            raise UserError(
                f"--data.cameras: the data set has no camera {source!r}; it has: "
                f"{', '.join(there) or 'none'}; --data.cameras none takes the state alone"
            )
        if not name or name in out:
            raise UserError(
                f"--data.cameras: {name!r} is named twice; write each camera once, as "
                "front=cam_high,wrist=cam_low"
            )
        out[name] = source
    return out
