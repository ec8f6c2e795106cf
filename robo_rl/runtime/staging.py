"""The next batch, put together while it is being made: when its last fragment is finished, a learner finds
the rest in place.

Two buffers take turns: the learner learns from one batch while a thread of its process copies finished
fragments into the memory of the next, each into the columns of its envs. The memory is allocated once (fresh
pages are what makes a copy slow). The slots stay the journal; nothing is decided here, the ledger chooses.
What it chooses against expectation is copied when it is taken.

A rollout is good until the batch after the next is taken.
"""

import threading
from collections.abc import Callable

import numpy as np

from robo_rl.rollout import FINAL, OBS, REPEATED, Columns, column_shape

# uid, columns, rows of a finished fragment; its first env in the batch, if fixed
Choice = tuple[int, Columns, int, "int | None"]


class Staging:
    """Memory for batches of `width` envs and up to `rows` decisions, laid out like `like`, the columns of a
    fragment."""

    def __init__(self, like: Columns, rows: int, width: int):
        self.rows, self.width, self.lock = rows, width, threading.Lock()
        self.layout = {k: ((*v.shape[2:],), v.dtype) for k, v in like.items()}
        self.buffers: list[Columns | None] = [None, None]
        self.at: dict[int, tuple[int, int, int]] = {}  # uid -> first env, envs, rows of what is in place
        self.used = 0  # envs, up to the last that is in place
        self.late = self.taken = 0  # fragments that were copied while the learner waited, of how many

    def stage(self, choice: Choice, is_good: Callable[[], bool] = lambda: True) -> None:
        """Put a fragment in place, if it is not, there is room, and it still is good."""
        with self.lock:
            if is_good():
                self._put(choice)

    def take(self, chosen: list[Choice]) -> tuple[Columns, int, list[int]] | None:
        """The batch of exactly these fragments -> its columns, their rows, the uids in their order; None if
        they do not fit together or are not `width` envs. Staging begins again in the other buffer."""
        with self.lock:
            uids = {uid for uid, *_ in chosen}
            holes = sorted(self.at.pop(uid)[:2] for uid in list(self.at) if uid not in uids)
            late = [c for c in chosen if c[0] not in self.at]
            for uid, columns, rows, first in late:
                if first is None:
                    first = next((at for at, n in holes if n == columns["done"].shape[1]), None)
                    holes = [h for h in holes if h[0] != first]
                self._put((uid, columns, rows, first))
            self.late, self.taken = self.late + len(late), self.taken + len(chosen)
            order = sorted(self.at, key=lambda uid: self.at[uid][0])
            ends = [0, *(sum(self.at[uid][:2]) for uid in order)]
            fits = (
                uids == self.at.keys()
                and ends[-1] == self.width
                and all(self.at[uid][0] == end for uid, end in zip(order, ends, strict=False))
            )
            rows, buffer = max((r for _, _, r in self.at.values()), default=0), self.buffers[0]
            self.at, self.used = {}, 0
            if not fits or buffer is None:
                return None
            self.buffers.reverse()
            return {k: v[: rows + k.startswith(OBS)] for k, v in buffer.items()}, rows, order

    def _put(self, choice: Choice) -> None:
        uid, columns, rows, first = choice
        n = columns["done"].shape[1]
        first = self.used if first is None else first
        if uid in self.at or first + n > self.width:
            return
        if self.buffers[0] is None:
            self.buffers[0] = {
                k: np.empty(column_shape(k, (self.width, *row), self.rows), dtype)
                for k, (row, dtype) in self.layout.items()
            }
        self.used = max(self.used, first + n)
        self.at[uid] = first, n, rows
        place(self.buffers[0], first, columns, rows)


def place(target: Columns, first: int, columns: Columns, rows: int) -> None:
    """Copy `rows` decisions of a fragment [.., n, ..] to the envs `first` … of a batch; what was not made is
    masked out and earns an advantage of 0, as in `robo_rl.rollout.rollout_of`. Last observations only where
    an episode ended."""
    n = columns["done"].shape[1]
    ended = columns["done"][:rows]
    for k, v in columns.items():
        to = target[k][:, first : first + n]
        if k.startswith(FINAL):
            if ended.any():
                to[:rows][ended] = v[:rows][ended]
            continue
        made = rows + k.startswith(OBS)
        to[:made] = v[:made]
        if made < len(to):
            to[made:] = v[made - 1] if k in REPEATED or k.startswith(OBS) else k == "discounts"
