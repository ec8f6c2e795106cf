"""Many who ask, one policy that decides for all of them in batches, each answer within a deadline."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from robo_rl.errors import UserError

KEPT = 32  # durations that are remembered of each size of batch
MARGIN, LEAST = 1.1, 0.003  # an answer is expected after so many times its batch's duration, plus [s]
COMPANY = 0.125  # of the duration of one question: waited for others where there were others the last time


@dataclass(slots=True, eq=False)
class BatchRequest:
    """An observation that waits. until: monotonic time [s] after which nobody wants the answer; patience [s]:
    what it began with."""

    obs: Any
    until: float
    patience: float
    done: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: str = ""


def by_size(act: Callable[[Sequence[dict]], list[Any]], batch: Sequence[dict]) -> list[Any]:
    """`act` of observations whose arrays are of one shape, for a batch whose pictures may have several; the
    answers in the order of the batch."""
    alike: dict[tuple, list[int]] = {}
    for i, obs in enumerate(batch):
        shapes = tuple(getattr(obs[name], "shape", ()) for name in sorted(obs))
        alike.setdefault(shapes, []).append(i)
    if len(alike) == 1:
        return act(batch)
    found = {
        i: x for which in alike.values() for i, x in zip(which, act([batch[i] for i in which]), strict=True)
    }
    return [found[i] for i in range(len(batch))]


class Batcher:
    """`act(observations) -> answers`, a list of at most `most` at once, in a thread of its own; `ask` from
    any thread.

    A batch is of what waits when the policy is free: alone nobody waits for others, and under load batches
    grow. Of the sizes 1, 2, 4, … the one that answers most questions per second, each within its deadline by
    the longest recent duration of such a batch; those whose deadline is next go first. A question that no
    batch would answer in time is refused at once and costs nothing.
    """

    def __init__(
        self,
        act: Callable[[Sequence[Any]], Sequence[Any]],
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.act, self.most, self.clock = act, most, clock
        self.waiting: list[BatchRequest] = []
        self.more = threading.Condition()
        self.durations: dict[int, deque[float]] = {}  # by the power of two that a size is at most
        self.batches, self.answered, self.late, self.last, self.ended = 0, 0, 0, 0, False

    def start(self) -> "Batcher":
        """Answer from now on."""
        threading.Thread(target=self._run, name="batcher", daemon=True).start()
        return self

    def ask(self, obs: Any, patience: float) -> Any:
        """The answer to `obs`. UserError: it was not there within `patience` [s], or the policy refuses
        it."""
        q = BatchRequest(obs, self.clock() + patience, patience)
        with self.more:
            if self.ended:
                raise UserError("the server ends")
            self.waiting.append(q)
            self.more.notify()
        if not q.done.wait(patience):
            raise UserError(f"no answer within {patience:g} s")
        if q.error:
            raise UserError(q.error)
        return q.answer

    def expected(self, n: int) -> float:
        """Seconds until a batch of n that begins now is answered; 0.0 where nothing is known."""
        power = (n - 1).bit_length()
        known = [max(x) * max(1.0, n / (1 << k)) for k, x in self.durations.items()] if self.durations else []
        known = [max(self.durations[power])] if power in self.durations else known
        return MARGIN * min(known) + LEAST if known else 0.0

    def choose(self, ready: list[BatchRequest], now: float) -> list[BatchRequest]:
        """The batch of those that wait, most urgent first."""
        top = min(self.most, len(ready))
        sizes = [n for k in range(top.bit_length()) if (n := 1 << k) < top] + [top]

        def in_time(n: int) -> list[BatchRequest]:
            end = now + self.expected(n)
            return [q for q in ready if q.until >= end][:n]

        return max(
            (in_time(n) for n in sizes),
            key=lambda batch: len(batch) / max(1e-9, self.expected(max(1, len(batch)))),
        )

    def turn(self) -> int:
        """Answer one batch of those that wait -> how many."""
        with self.more:
            now = self.clock()
            soonest = now + self.expected(1)
            gone = [q for q in self.waiting if q.until < soonest]
            ready = sorted((q for q in self.waiting if q.until >= soonest), key=lambda q: q.until)
            batch = self.choose(ready, now) if ready else []
            taken = {id(q) for q in batch}
            self.waiting = [q for q in ready if id(q) not in taken]
            if any(q.patience < soonest - now for q in gone):
                self.durations.clear()  # none would ever be asked again, and it may have been a hiccup
        for q in gone:
            self._end(
                q,
                error=f"too late: the policy had {len(ready)} others to answer; fewer clients, or a longer "
                "--deadline",
            )
        self.late += len(gone)
        if not batch:
            return 0
        self._answer(batch)
        self.durations.setdefault((len(batch) - 1).bit_length(), deque(maxlen=KEPT)).append(
            self.clock() - now
        )
        self.batches, self.answered, self.last = self.batches + 1, self.answered + len(batch), len(batch)
        return len(batch)

    def close(self) -> None:
        """Refuse whoever waits, and everybody from now on."""
        with self.more:
            self.ended, rest, self.waiting = True, self.waiting, []
            self.more.notify()
        for q in rest:
            self._end(q, error="the server ends")

    def _answer(self, batch: list[BatchRequest]) -> None:
        """One call; where the policy cannot take the batch, halves, so that a question it refuses is answered
        alone."""
        try:
            answers = list(self.act([q.obs for q in batch]))
        except Exception as e:  # a policy is anybody's code, and the server outlives any question
            if len(batch) > 1:
                self._answer(batch[: len(batch) // 2])
                self._answer(batch[len(batch) // 2 :])
            else:
                self._end(
                    batch[0],
                    error=str(e)
                    if isinstance(e, UserError)
                    else f"the policy fails at it ({type(e).__name__}: {e})",
                )
            return
        for q, answer in zip(batch, answers, strict=True):
            self._end(q, answer)

    @staticmethod
    def _end(q: BatchRequest, answer: Any = None, error: str = "") -> None:
        q.answer, q.error = answer, error
        q.done.set()

    def _run(self) -> None:
        while not self.ended:
            with self.more:
                while not self.waiting and not self.ended:
                    self.more.wait(1.0)
                # those of the batch before ask again within a moment of each other
                end = self.clock() + COMPANY * self.expected(1)
                while len(self.waiting) < self.last and not self.ended and (left := end - self.clock()) > 0:
                    self.more.wait(left)
            self.turn()
