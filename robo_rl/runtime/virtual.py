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
    broker_wait: float = 0.0  # share of its time that the learner waits though workers have finished enough for a batch


@dataclass(frozen=True)
class Broker:
    """Seconds of service: a lease with its message, a finished fragment with its message (the broker does one after
    another), and what the learner itself does to take a batch and to publish."""

    lease: float = 0.0
    seal: float = 0.0
    take: float = 0.0
    publish: float = 0.0


def simulate(workers: int, envs: int, decisions: int, batch: int, staleness: int, decide: Draw, learn: Draw,
             updates: int, cores: float = math.inf, warm: int = 3, seed: int = 0, broker: Broker = Broker()) -> Outcome:
    """Run until `updates` updates are made; the first `warm` are not counted.

    decide draws the seconds that one decision of all envs of a worker takes alone, learn those of an update (with
    publishing). The first order of workers is drawn, later ones follow from the clock. The broker has a core of its own.
    """
    rng = np.random.default_rng(seed)
    slots = workers * (staleness + 2) + -(-batch // (decisions * envs)) * (staleness + 8)
    book = Ledger(batch, staleness, slots, {i: (decisions, envs) for i in range(workers)})
    now, turns = 0.0, 0  # `turns`: seconds of service each active role has had (virtual time of fair sharing)
    heap: list[tuple[float, int, object]] = []  # (service at which it is done, tie, what)
    tie = 0
    published = [0.0]  # when version i was out
    waits, began = [0.0] * workers, [0.0] * workers
    idle, refused = set(range(workers)), set()  # refused: who need not ask before something changes
    spans: dict[int, tuple[float, float]] = {}  # uid -> begin, end
    learning, since, learner_wait, broker_wait, samples, made = False, 0.0, 0.0, 0.0, 0, 0
    busy = 0.0  # until when the broker is at work
    there, enough = 0, math.inf  # samples that workers have finished and the learner has not taken; since when a batch of them
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
        for w in sorted(idle - refused, key=lambda w: (began[w], w)):
            f = book.lease(w)
            if f is None:
                refused |= {w} if staleness == 0 else idle
                if staleness:
                    break  # nobody else may begin either
                continue
            idle.discard(w)
            busy = max(busy, now) + broker.lease
            waits[w] += busy - began[w]
            spans[f.uid] = (busy, 0.0)
            push(busy - now + sum(decide(rng) for _ in range(f.decisions)), f)
        if not learning and (chosen := book.take()) is not None:
            learning = True
            learner_wait += now + broker.take - since
            broker_wait += now + broker.take - max(since, min(enough, now))
            for f in chosen:
                a, b = spans.pop(f.uid)
                at = np.linspace(a, b, f.made, endpoint=False)
                version = np.array([bisect.bisect_right(published, t) - 1 for t in at])
                age = book.version - version
                masked += int((age > staleness).sum()) * f.envs
                total += f.made * f.envs
                ages.append(np.repeat(age[age <= staleness], f.envs))
                there -= f.made * f.envs
            enough = now if there >= batch else math.inf
            push(broker.take + learn(rng) + broker.publish, None)
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
            refused.clear()
            learning, since, made = False, now, made + 1
            if made == warm:
                start, samples, learner_wait, broker_wait, masked, total = now, 0, 0.0, 0.0, 0, 0
                ages, waits, began = [], [0.0] * workers, [max(t, now) if i in idle else t for i, t in enumerate(began)]
        elif isinstance(what, tuple):  # the broker is done with it
            f, ended = what
            book.seal(f.uid, f.decisions, bisect.bisect_right(published, spans[f.uid][0]) - 1)
            idle.add(f.worker)
            began[f.worker] = ended
        else:
            spans[what.uid] = (spans[what.uid][0], now)
            there += what.decisions * what.envs
            enough = now if there >= batch and enough == math.inf else enough
            busy = max(busy, now) + broker.seal
            push(busy - now, (what, now))
    seconds = now - start
    age = np.concatenate(ages)
    waited = sum(waits) + sum(now - began[w] for w in idle)
    return Outcome(samples / seconds, waited / (workers * seconds), learner_wait / seconds, float(age.mean()),
                   float(np.percentile(age, 99)), int(age.max()), masked / max(total, 1), seconds, broker_wait / seconds)


def constant(seconds: float) -> Draw:
    return lambda rng: seconds


def lognormal(mean: float, sigma: float) -> Draw:
    """Heavy-tailed times of this mean."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng: float(rng.lognormal(mu, sigma))
