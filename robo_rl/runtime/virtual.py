"""The same ledger under a virtual clock: what N workers and a learner would do, from the times of their stages.

Roles are the real ones' rules (lease, seal, take, publish) with work replaced by drawn durations. With `cores` they share
that many equally (the operating system's fair share); without, each has hardware of its own, as in a cluster.
"""

import bisect
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from robo_rl.runtime.ledger import Ledger

Draw = Callable[[np.random.Generator], float]


@dataclass(frozen=True)
class Outcome:
    """Of a simulated run: samples per second, shares of their time that workers and learner wait, staleness [versions]
    of what is trained on (mean, 99th percentile, greatest) and the share that is too old."""

    rate: float
    worker_wait: float
    learner_wait: float
    stale_mean: float
    stale_p99: float
    stale_max: int
    masked: float
    seconds: float


def simulate(workers: int, envs: int, decisions: int, batch: int, staleness: int, decide: Draw, learn: Draw,
             updates: int, cores: float = math.inf, warm: int = 3, seed: int = 0) -> Outcome:
    """Run until `updates` updates are made; the first `warm` are not counted.

    decide draws the seconds that one decision of all envs of a worker takes alone, learn those of an update (with
    publishing). The first order of workers is drawn, later ones follow from the clock.
    """
    rng = np.random.default_rng(seed)
    slots = workers * (staleness + 2) + -(-batch // (decisions * envs)) * (staleness + 8)
    book = Ledger(batch, staleness, slots, {i: (decisions, envs) for i in range(workers)})
    now, turns = 0.0, 0  # `turns`: seconds of service each active role has had (virtual time of fair sharing)
    heap: list[tuple[float, int, object]] = []  # (service at which it is done, tie, what)
    tie = 0
    published = [0.0]  # when version i was out
    waits, began = [0.0] * workers, [0.0] * workers
    idle = set(range(workers))
    spans: dict[int, tuple[float, float]] = {}  # uid -> begin, end
    learning, since, learner_wait, samples, made = False, 0.0, 0.0, 0, 0
    ages: list[np.ndarray] = []
    masked = total = 0
    start = 0.0

    def speed() -> float:
        return min(1.0, cores / len(heap)) if heap else 1.0

    def push(work: float, what: object) -> None:
        nonlocal tie
        tie += 1
        heapq.heappush(heap, (turns + work, tie, what))

    while made < updates:
        for w in sorted(idle, key=lambda w: (began[w], w)) if idle else ():
            f = book.lease(w)
            if f is None:
                if staleness:
                    break  # nobody else may begin either
                continue
            idle.discard(w)
            waits[w] += now - began[w]
            spans[f.uid] = (now, 0.0)
            push(sum(decide(rng) for _ in range(f.decisions)), f)
        if not learning and (chosen := book.take()) is not None:
            learning = True
            learner_wait += now - since
            for f in chosen:
                a, b = spans.pop(f.uid)
                at = np.linspace(a, b, f.made, endpoint=False)
                version = np.array([bisect.bisect_right(published, t) - 1 for t in at])
                age = book.version - version
                masked += int((age > staleness).sum()) * f.envs
                total += f.made * f.envs
                ages.append(np.repeat(age[age <= staleness], f.envs))
            push(learn(rng), None)
        assert heap, "everybody waits"
        done, _, what = heap[0]
        now += (done - turns) / speed()
        turns = done
        heapq.heappop(heap)
        if what is None:
            samples += sum(f.made * f.envs for f in book.fragments.values() if f.state == "taken")
            book.commit()
            book.publish(book.version + 1)
            published.append(now)
            learning, since, made = False, now, made + 1
            if made == warm:
                start, samples, learner_wait, masked, total = now, 0, 0.0, 0, 0
                ages, waits, began = [], [0.0] * workers, [max(t, now) if i in idle else t for i, t in enumerate(began)]
        else:
            spans[what.uid] = (spans[what.uid][0], now)
            oldest = bisect.bisect_right(published, spans[what.uid][0]) - 1
            book.seal(what.uid, what.decisions, oldest)
            idle.add(what.worker)
            began[what.worker] = now
    seconds = now - start
    age = np.concatenate(ages)
    waited = sum(waits) + sum(now - began[w] for w in idle)
    return Outcome(samples / seconds, waited / (workers * seconds), learner_wait / seconds, float(age.mean()),
                   float(np.percentile(age, 99)), int(age.max()), masked / max(total, 1), seconds)


def constant(seconds: float) -> Draw:
    return lambda rng: seconds


def lognormal(mean: float, sigma: float) -> Draw:
    """Heavy-tailed times of this mean."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng: float(rng.lognormal(mu, sigma))
