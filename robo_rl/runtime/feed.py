"""What a learner sees of the collecting side: the next batch, new weights out, a checkpoint made.

while training:                              (periodic: learner.accumulate(feed.stream(waiting), progress) in
                                             their place; `waiting()` is called while it waits)
    rollout = feed.next(stop)                fresh enough: no decision in it is more than `staleness` versions
                                             old; None: `stop()`, which is asked while it waits, said so
    learner.update(rollout, progress, feed.version)
    feed.publish()                           version + 1
    save(..., feed.state()); feed.commit()   what was learnt from is durable, its slots are free
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from robo_rl.rollout import Columns, Rollout, rollout_of
from robo_rl.runtime.ledger import Ledger


def never() -> bool:
    """Nobody asks to stop."""
    return False


class Feed(Protocol):
    """Where rollouts come from."""

    version: int
    ledger: Ledger

    def next(self, stop: Callable[[], bool] = never) -> Rollout | None: ...
    def stream(self, waiting: Callable[[], object] = never) -> Iterator[Rollout]: ...
    def gathered(self) -> int: ...
    def publish(self) -> None: ...
    def commit(self) -> None: ...
    def crowded(self) -> bool: ...
    def stats(self) -> dict[str, float]: ...
    def note(self) -> str: ...
    def spans(self) -> list[tuple[str, int, int]]: ...
    def state(self) -> dict: ...
    def close(self) -> None: ...


def make_batch(parts: list[tuple[Columns, int]], version: int, staleness: int) -> Rollout:
    """One rollout of finished fragments; decisions more than `staleness` versions old are masked out and
    counted.

    Statistics: staleness/mean, staleness/max (of what is trained on), staleness/masked (fraction),
    staleness/hist_<i> (fraction of decisions i versions old, the last bin and beyond together).
    """
    r = rollout_of(parts)
    age = version - r.version
    live, old = r.mask, age > staleness
    if old.any():
        r.mask = live & ~old
    made = max(int(live.sum()), 1)
    kept = age[r.mask]
    r.stats |= {
        "staleness/mean": float(kept.float().mean()) if len(kept) else 0.0,
        "staleness/max": float(kept.max()) if len(kept) else 0.0,
        "staleness/masked": float((live & old).sum()) / made,
    }
    for i in range(min(staleness, 8) + 1):
        here = age == i if i < 8 else age >= 8
        r.stats[f"staleness/hist_{i}"] = float((live & here).sum()) / made
    assert not len(kept) or 0 <= int(kept.max()) <= staleness, "a decision is older than --max-staleness"
    return r


def merge_batch_stats(stats: list[dict[str, float]]) -> dict[str, float]:
    """Statistics of one batch from those of its pieces: sums of counts, greatest ages, means over episodes of
    the rest."""
    if len(stats) == 1:
        return stats[0]
    out: dict[str, float] = {}
    for k in dict.fromkeys(k for s in stats for k in s):
        rows = [
            (s[k], s["episodes"] if k in ("success", "return", "length", "stored") else 1.0)
            for s in stats
            if k in s
        ]
        if k in ("episodes", "env_steps"):
            out[k] = sum(v for v, _ in rows)
        elif k == "staleness/max":
            out[k] = max(v for v, _ in rows)
        else:
            out[k] = sum(v * w for v, w in rows) / sum(w for _, w in rows)
    return out


def restarts(count: int) -> str:
    """So many, for the progress line; "" for none."""
    return f"{count} restart{'s' * (count > 1)}" * bool(count)


@dataclass(slots=True)
class WorkIntervals:
    """Intervals of work per role since the last `take`, in monotonic nanoseconds, for the timeline."""

    spans: list[tuple[str, int, int]] = field(default_factory=list)

    def add(self, who: str, begin: int, end: int) -> None:
        if len(self.spans) < 10_000:
            self.spans.append((who, begin, end))

    def take(self) -> list[tuple[str, int, int]]:
        out, self.spans = self.spans, []
        return out
