"""Finished fragments become batches; what the next one will be of is copied to its place as it is
finished."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable

from robo_rl.rollout import Columns
from robo_rl.runtime import ledger as led
from robo_rl.runtime.ledger import Fragment, Ledger
from robo_rl.runtime.rollout_buffer import TAKEN, RolloutBuffer
from robo_rl.runtime.staging import Choice, Staging


class BatchBuilder:
    """`envs_of`: worker -> envs of its fragments; `staging`: memory of the next batch (None: a batch is its
    fragments as they lie in their slots); `lock`: that of the ledger and the slots, held by whoever calls,
    but for `put_together`."""

    def __init__(
        self,
        ledger: Ledger,
        buffer: RolloutBuffer,
        envs_of: Callable[[int], int],
        staging: Staging | None,
        lock: threading.RLock,
    ):
        self.ledger, self.buffer, self.envs_of, self.staging = ledger, buffer, envs_of, staging
        self.more = threading.Condition(lock)  # for `_stage`
        self.fresh: deque[Fragment] = deque()  # finished, not in place
        self.order: dict[int, int] | None = None  # first env of each worker in a synchronous batch
        self.stopping = False

    def start(self) -> None:
        """Let a thread put in place what is finished."""
        if self.staging:
            threading.Thread(target=self._stage, name="staging", daemon=True).start()

    def finished(self, f: Fragment) -> None:
        """A fragment is finished, perhaps for the next batch."""
        if (
            self.staging
            and self.ledger.samples < self.ledger.batch + self.ledger.widest * self.buffer.decisions
        ):
            self.fresh.append(f)
            self.more.notify()

    def begin_next(self) -> None:
        """A batch was taken: the next one is of what is finished already."""
        self.fresh.clear()
        if self.staging and self.ledger.samples:
            self.fresh.extend(self.ledger.oldest()[0])
            self.more.notify()

    def choices(self, fragments: Iterable[Fragment], among: Iterable[Fragment]) -> list[Choice]:
        """Finished fragments, each with the place of its worker's share in a synchronous batch, of those in
        `among`."""
        rounds, out = self.ledger.rounds() if self.ledger.staleness == 0 else 0, []
        if rounds and self.order is None:
            workers = sorted(self.ledger.shares)
            self.order = dict(
                zip(
                    workers,
                    itertools.accumulate((self.envs_of(w) * rounds for w in workers), initial=0),
                    strict=False,
                )
            )
        ranks: dict[int, list[int]] = {}
        for f in sorted(among, key=lambda f: f.uid) if rounds > 1 else ():
            ranks.setdefault(f.worker, []).append(f.uid)
        for f in fragments:
            first = self.order.get(f.worker) if rounds and self.order is not None else None
            if first is not None and rounds > 1:
                first += ranks[f.worker].index(f.uid) * f.envs
            out.append((f.uid, self.buffer.columns(f.slot, f.worker), f.rows, first))
        return out

    def put_together(
        self, chosen: list[Fragment], choices: list[Choice]
    ) -> tuple[list[Fragment], list[tuple[Columns, int]]]:
        """Fragments in the order in which they are in a batch, and the parts of it: one, if they are in place
        already."""
        head = self.buffer.head
        if all(head["state"][f.slot] == TAKEN for f in chosen):
            chosen = sorted(chosen, key=lambda f: head["place"][f.slot])  # as it was before a learner died
        elif self.staging and (got := self.staging.take(choices)):
            columns, rows, order = got
            by = {f.uid: f for f in chosen}
            return [by[uid] for uid in order], [(columns, rows)]
        return chosen, [(self.buffer.columns(f.slot, f.worker), f.rows) for f in chosen]

    def _stage(self) -> None:
        while not self.stopping:
            with self.more:
                f = self.fresh.popleft() if self.fresh else None
                if f is None:
                    self.more.wait(1.0)
                    continue
                if f.state != led.READY:
                    continue
                (choice,) = self.choices([f], self.ledger.finished.values())
            assert self.staging is not None  # it has a thread of its own
            self.staging.stage(choice, lambda f=f: f.state == led.READY)
