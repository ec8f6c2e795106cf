"""The same ledger under a virtual clock: what N workers and a learner would do, from the times of their
stages.

Roles are the real ones' rules (lease, seal, take, publish) with work replaced by drawn durations. With
`cores` they share that many equally (the operating system's fair share); without, each has hardware of its
own, as in a cluster.
"""

import bisect
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from robo_rl.runtime.ledger import Ledger

Draw = Callable[[np.random.Generator], float]


@dataclass(frozen=True)
class Outcome:
    """Of a simulated run: samples per second, shares of their time that workers and learner wait, staleness
    [versions] of what is trained on (mean, 99th percentile, greatest) and the share that is too old."""

    rate: float
    worker_wait: float
    learner_wait: float
    stale_mean: float
    stale_p99: float
    stale_max: int
    masked: float
    seconds: float
    # share of its time that the learner waits though workers have finished enough for a batch
    broker_wait: float = 0.0


@dataclass(frozen=True)
class Broker:
    """Seconds of service: a lease with its message, a finished fragment with its message (the broker does one
    after another), and what the learner itself does to take a batch and to publish."""

    lease: float = 0.0
    seal: float = 0.0
    take: float = 0.0
    publish: float = 0.0


def simulate(
    workers: int,
    envs: int,
    decisions: int,
    batch: int,
    staleness: int,
    decide: Draw,
    learn: Draw,
    updates: int,
    cores: float = math.inf,
    warm: int = 3,
    seed: int = 0,
    broker: Broker = Broker(),
) -> Outcome:
    """Run until `updates` updates are made; the first `warm` are not counted.

    decide draws the seconds that one decision of all envs of a worker takes alone, learn those of an update
    (with publishing). The first order of workers is drawn, later ones follow from the clock. The broker has a
    core of its own.
    """
    slots = workers * (staleness + 2) + -(-batch // (decisions * envs)) * (staleness + 8)
    book = Ledger(batch, staleness, slots, dict.fromkeys(range(workers), (decisions, envs)))
    run = _Simulation(book, workers, decide, learn, cores, seed, broker)
    while run.made < updates:
        run.lease()
        run.take()
        run.finish_next(warm)
    return run.outcome()


class _Simulation:
    """The state of `simulate`: the clock, who is at work until when, and what was counted."""

    def __init__(
        self, book: Ledger, workers: int, decide: Draw, learn: Draw, cores: float, seed: int, broker: Broker
    ):
        self.book, self.workers, self.decide, self.learn, self.cores, self.broker = (
            book,
            workers,
            decide,
            learn,
            cores,
            broker,
        )
        self.rng = np.random.default_rng(seed)
        # `turns`: seconds of service each active role has had (virtual time of fair sharing)
        self.now, self.turns = 0.0, 0.0
        self.heap: list[tuple[float, int, Any]] = []  # (service at which it is done, tie, what)
        self.tie = 0
        self.published = [0.0]  # when version i was out
        self.waits, self.began = [0.0] * workers, [0.0] * workers
        # refused: who need not ask before something changes
        self.idle, self.refused = set(range(workers)), set()
        self.spans: dict[int, tuple[float, float]] = {}  # uid -> begin, end
        self.learning, self.since, self.made = False, 0.0, 0
        self.busy = 0.0  # until when the broker is at work
        # samples finished and not taken; since when they are enough for a batch
        self.there, self.enough = 0, math.inf
        self.count_from(0.0)

    def count_from(self, now: float) -> None:
        """What is counted begins here."""
        self.start, self.samples, self.learner_wait, self.broker_wait, self.masked, self.total = (
            now,
            0,
            0.0,
            0.0,
            0,
            0,
        )
        self.ages: list[np.ndarray] = []
        self.waits = [0.0] * self.workers
        self.began = [max(t, now) if i in self.idle else t for i, t in enumerate(self.began)]

    def push(self, work: float, what: object) -> None:
        """`what` is done after `work` seconds of service."""
        self.tie += 1
        heapq.heappush(self.heap, (self.turns + work, self.tie, what))

    def lease(self) -> None:
        """Idle workers ask for work, those that wait longest first."""
        for w in sorted(self.idle - self.refused, key=lambda w: (self.began[w], w)):
            f = self.book.lease(w)
            if f is None:
                self.refused |= {w} if self.book.staleness == 0 else self.idle
                if self.book.staleness:
                    break  # nobody else may begin either
                continue
            self.idle.discard(w)
            self.busy = max(self.busy, self.now) + self.broker.lease
            self.waits[w] += self.busy - self.began[w]
            self.spans[f.uid] = (self.busy, 0.0)
            self.push(self.busy - self.now + sum(self.decide(self.rng) for _ in range(f.decisions)), f)

    def take(self) -> None:
        """The learner takes a batch, if it has none and there is one."""
        if self.learning or (chosen := self.book.take()) is None:
            return
        self.learning = True
        self.learner_wait += self.now + self.broker.take - self.since
        self.broker_wait += self.now + self.broker.take - max(self.since, min(self.enough, self.now))
        for f in chosen:
            a, b = self.spans.pop(f.uid)
            at = np.linspace(a, b, f.made, endpoint=False)
            version = np.array([bisect.bisect_right(self.published, t) - 1 for t in at])
            age = self.book.version - version
            self.masked += int((age > self.book.staleness).sum()) * f.envs
            self.total += f.made * f.envs
            self.ages.append(np.repeat(age[age <= self.book.staleness], f.envs))
            self.there -= f.made * f.envs
        self.enough = self.now if self.there >= self.book.batch else math.inf
        self.push(self.broker.take + self.learn(self.rng) + self.broker.publish, None)

    def finish_next(self, warm: int) -> None:
        """The clock goes on to what is done first: an update, a fragment, or the broker with a fragment."""
        assert self.heap, "everybody waits"
        done, _, what = self.heap[0]
        self.now += (done - self.turns) / min(1.0, self.cores / len(self.heap))
        self.turns = done
        heapq.heappop(self.heap)
        if what is None:
            self.updated(warm)
        elif isinstance(what, tuple):  # the broker is done with it
            f, ended = what
            self.book.seal(f.uid, f.decisions, bisect.bisect_right(self.published, self.spans[f.uid][0]) - 1)
            self.idle.add(f.worker)
            self.began[f.worker] = ended
        else:
            self.spans[what.uid] = (self.spans[what.uid][0], self.now)
            self.there += what.decisions * what.envs
            self.enough = (
                self.now if self.there >= self.book.batch and self.enough == math.inf else self.enough
            )
            self.busy = max(self.busy, self.now) + self.broker.seal
            self.push(self.busy - self.now, (what, self.now))

    def updated(self, warm: int) -> None:
        """The learner has made an update and published it."""
        self.samples += sum(f.made * f.envs for f in self.book.fragments.values() if f.state == "taken")
        self.book.commit()
        self.book.publish(self.book.version + 1)
        self.published.append(self.now)
        self.refused.clear()
        self.learning, self.since, self.made = False, self.now, self.made + 1
        if self.made == warm:
            self.count_from(self.now)

    def outcome(self) -> Outcome:
        seconds = self.now - self.start
        age = np.concatenate(self.ages)
        waited = sum(self.waits) + sum(self.now - self.began[w] for w in self.idle)
        return Outcome(
            self.samples / seconds,
            waited / (self.workers * seconds),
            self.learner_wait / seconds,
            float(age.mean()),
            float(np.percentile(age, 99)),
            int(age.max()),
            self.masked / max(self.total, 1),
            seconds,
            self.broker_wait / seconds,
        )


def constant(seconds: float) -> Draw:
    return lambda rng: seconds


def lognormal(mean: float, sigma: float) -> Draw:
    """Heavy-tailed times of this mean."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng: float(rng.lognormal(mu, sigma))
