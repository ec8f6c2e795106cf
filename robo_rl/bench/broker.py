"""What the runtime itself costs per fragment, batch and version: service times, measured, for thousands of
workers on paper.

The broker and the ledger are the real ones, with the slots of the real task; workers are played by this
process, which writes what one worker collected into every slot.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robo_rl.rollout import Collector, Columns, new_columns
from robo_rl.runtime.process_pool import duplex_pair
from robo_rl.runtime.virtual import Broker
from robo_rl.runtime.weights import WeightReader, WeightWriter
from robo_rl.runtime.worker_pool import WorkerPoolFeed


class Nobody:
    """A worker pool without workers: the benchmark leases and seals itself."""

    restarts = 0

    def evict(self, folder: Path) -> None: ...
    def start(self, feed: WorkerPoolFeed, resumed: bool) -> None: ...
    def turn(self) -> None:
        time.sleep(0.01)

    def resize(self, workers: int) -> None: ...
    def publish(self, version: int) -> None: ...
    def wake(self) -> None: ...
    def check(self) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Service:
    """Best of several: seconds of the broker per lease and per finished fragment with their messages, of the
    learner per batch of all workers and per version; the bytes of a batch and of the slots; seconds to copy a
    batch into warm memory."""

    broker: Broker
    pipe: float  # a message there and one back, bare
    batch_bytes: int
    slot_bytes: int
    copy: float
    late: float  # share of the fragments that the learner copies itself
    fetch: float  # a worker's copy of the weights


def collected(collector: Collector, policy, decisions: int) -> tuple[Columns, float]:
    """Columns of one fragment -> them, seconds per decision (the median)."""
    columns, took = new_columns(collector.layout(policy), decisions), []
    for v in columns.values():
        v[:] = 0
    for t in range(decisions):
        begin = time.perf_counter()
        collector.decide(policy, columns, t)
        took.append(time.perf_counter() - begin)
    return columns, float(np.median(took))


def measure(policy, layout: dict, columns: Columns, workers: int, rounds: int = 4) -> Service:
    """Service times with `workers` workers of whom each has handed over one fragment like `columns` per
    batch."""
    decisions, envs = columns["done"].shape
    ours, theirs = duplex_pair()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        feed = WorkerPoolFeed(
            Path(folder), Nobody(), [envs] * workers, [layout], workers * envs * decisions, decisions, 0
        )
        best = {}

        def timed(name: str, work: Callable[[], Any], units: int) -> Any:
            begin = time.perf_counter()
            out = work()
            best[name] = min(best.get(name, 1e9), (time.perf_counter() - begin) / units)
            return out

        try:
            for _ in range(rounds):
                leases = timed(
                    "lease", lambda: [_leased(feed, w, ours, theirs) for w in range(workers)], workers
                )
                for w, lease in enumerate(leases):
                    for k, v in columns.items():
                        feed.buffer.columns(lease.slot, w)[k][:] = v
                    feed.buffer.head["rows"][lease.slot] = decisions
                    feed.buffer.sign(lease.slot, w, 0, decisions)
                timed(
                    "seal",
                    lambda ls=leases: [_sealed(feed, w, lease, ours, theirs) for w, lease in enumerate(ls)],
                    workers,
                )
                end = time.monotonic() + 60
                while feed.batches.fresh and time.monotonic() < end:
                    time.sleep(0.001)  # the feed's own thread, while workers would be at work
                assert feed.staging is not None
                late, taken = feed.staging.late, feed.staging.taken
                timed("take", feed.next, 1)
                late = (feed.staging.late - late) / (feed.staging.taken - taken)
                feed.publish()
                feed.commit()
            timed("pipe", lambda: [_bare(ours, theirs) for _ in range(workers)], workers)
            weights = dict(policy.state_dict())
            writer = WeightWriter.create(Path(folder) / "weights", weights)
            writer.publish(0, weights)
            reader = WeightReader.open(Path(folder) / "weights")
            for v in range(1, 8):
                timed("publish", lambda v=v: writer.publish(v, weights), 1)
                assert timed("fetch", reader.fetch, 1) == v
            writer.close()
            size = workers * sum(v.nbytes for k, v in columns.items() if not k.startswith("final/"))
            _copy(best, size)
            slots = feed.buffer.count * feed.buffer.stride
        finally:
            feed.close()
    return Service(
        Broker(best["lease"], best["seal"], best["take"], best["publish"]),
        best["pipe"],
        size,
        slots,
        best["copy"],
        late,
        best["fetch"],
    )


def _leased(feed: WorkerPoolFeed, worker: int, ours, theirs):
    theirs.send(("wants", 1))
    ours.recv()
    lease = feed.lease(worker)
    ours.send([lease])
    theirs.recv()
    return lease


def _sealed(feed: WorkerPoolFeed, worker: int, lease, ours, theirs) -> None:
    theirs.send(("sealed", lease.uid, lease.rows, 0, False, ""))
    feed.sealed(worker, "worker", *ours.recv()[1:])


def _bare(ours, theirs) -> None:
    theirs.send(("wants", 1))
    ours.recv()
    ours.send([0])
    theirs.recv()


def _copy(best: dict, size: int) -> None:
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    for _ in range(3):
        begin = time.perf_counter()
        target.copy_(source)
        best["copy"] = min(best.get("copy", 1e9), time.perf_counter() - begin)
