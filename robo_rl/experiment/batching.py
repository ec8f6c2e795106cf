"""Many who ask, one policy that decides for all of them in batches, each answer within a deadline."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from robo_rl.errors import UserError


@dataclass(slots=True, eq=False)
class BatchRequest:
    """An observation that waits. until: monotonic time [s] after which nobody wants the answer."""

    obs: Any
    until: float
    done: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: str = ""


class Batcher:
    """`act(observations) -> answers`, a list of at most `most` at once, in a thread of its own; `ask` from any thread.

    A batch is whatever waits when the policy is free: alone nobody waits for others, and under load batches grow. The one whose
    deadline is next goes first; a question past its deadline is refused and costs nothing.
    """

    def __init__(self, act: Callable[[Sequence[Any]], Sequence[Any]], most: int, clock: Callable[[], float] = time.monotonic):
        self.act, self.most, self.clock = act, most, clock
        self.waiting: list[BatchRequest] = []
        self.more = threading.Condition()
        self.batches, self.answered, self.late, self.ended = 0, 0, 0, False

    def start(self) -> "Batcher":
        """Answer from now on."""
        threading.Thread(target=self._run, name="batcher", daemon=True).start()
        return self

    def ask(self, obs: Any, patience: float) -> Any:
        """The answer to `obs`. UserError: it was not there within `patience` [s], or the policy refuses it."""
        q = BatchRequest(obs, self.clock() + patience)
        with self.more:
            if self.ended:
                raise UserError("the server ends")
            self.waiting.append(q)
            self.more.notify()
        if not q.done.wait(patience + 0.5):
            q.error = f"no answer within {patience:g} s"
        if q.error:
            raise UserError(q.error)
        return q.answer

    def turn(self) -> int:
        """Answer one batch of those that wait -> how many."""
        with self.more:
            now = self.clock()
            gone = [q for q in self.waiting if q.until < now]
            ready = sorted((q for q in self.waiting if q.until >= now), key=lambda q: q.until)
            batch, self.waiting = ready[:self.most], ready[self.most:]
        for q in gone:
            self._end(q, error=f"too late: the policy had {len(ready)} others to answer; fewer clients, or a longer --deadline")
        self.late += len(gone)
        if not batch:
            return 0
        try:
            for q, answer in zip(batch, self.act([q.obs for q in batch]), strict=True):
                self._end(q, answer)
        except UserError as e:
            for q in batch:
                self._end(q, error=str(e))
        self.batches, self.answered = self.batches + 1, self.answered + len(batch)
        return len(batch)

    def close(self) -> None:
        """Refuse whoever waits, and everybody from now on."""
        with self.more:
            self.ended, rest, self.waiting = True, self.waiting, []
            self.more.notify()
        for q in rest:
            self._end(q, error="the server ends")

    @staticmethod
    def _end(q: BatchRequest, answer: Any = None, error: str = "") -> None:
        q.answer, q.error = answer, error
        q.done.set()

    def _run(self) -> None:
        while not self.ended:
            with self.more:
                while not self.waiting and not self.ended:
                    self.more.wait(1.0)
            self.turn()
