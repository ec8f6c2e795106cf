"""Every role in this process, in an order drawn from a seed: for proofs, for debugging, and for one core.

With staleness 0 and one worker this is the plain loop: collect, update, collect. With more it is as
asynchronous as processes are, and repeats exactly: which role moves next is drawn from (seed, move).
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from robo_rl.errors import UserError
from robo_rl.noise import mix
from robo_rl.rollout import Collector, Columns, Layout, Rollout, new_columns
from robo_rl.runtime.episode_slots import EpisodeSlots
from robo_rl.runtime.feed import make_batch, never, restarts
from robo_rl.runtime.ledger import Fragment, Ledger
from robo_rl.runtime.planned import PlannedGroups, make_batch_of
from robo_rl.runtime.rollout_buffer import Lease, finite
from robo_rl.runtime.worker import Worker
from robo_rl.runtime.worker_pool import ErrorCounts


class InProcessFeed:
    """A feed of workers that are stepped in turn. `make(index, refresh)` builds one, or one's `EpisodeSlots`;
    weights are the learner's own, so they are always new.

    `batch` samples an update, `decisions` a fragment; slots live in memory, and a checkpoint carries those in
    flight. `planned`: the groups of episode slots have sizes that are decided. `again(index, key)`: the
    collector of a worker in a simulator that is made anew after one that failed, its draws by `key`; None: a
    failure ends the run.
    """

    def __init__(
        self,
        workers: int,
        make: "Callable[[int, Callable[[], int]], Worker | EpisodeSlots]",
        batch: int,
        staleness: int,
        decisions: int,
        seed: int,
        planned: PlannedGroups | None = None,
        again: Callable[[int, int], Collector] | None = None,
    ):
        self.seed, self.moves, self.planned, self.again = seed, 0, planned, again
        self.errors, self.restarts = ErrorCounts("the simulator", alone=True), 0
        self.workers = [make(i, lambda: self.version) for i in range(workers)]
        self.whole = bool(self.workers[0].group)
        self.rows = self.workers[0].collector.longest() if self.whole else decisions
        shares = {
            w.index: (
                1 if self.whole else decisions,
                w.size if isinstance(w, EpisodeSlots) else w.collector.n,
            )
            for w in self.workers
        }
        # a simulator that fails over and over cuts fragments of whole batches down to a decision each
        per_batch = max(workers, -(-batch // min(n for _, n in shares.values())))
        self.ledger = Ledger(batch, staleness, 2 * per_batch * (staleness + 2), shares)
        self.columns: dict[int, Columns] = {}  # by slot
        self.ahead: int | None = None  # decisions that workers go on for with a batch ready; None: not drawn

    @property
    def version(self) -> int:
        """Updates made so far."""
        return self.ledger.version

    def _draw(self, n: int) -> int:
        self.moves += 1
        return mix(self.seed, 77, self.moves) % n

    def _move(self, worker: Worker | EpisodeSlots) -> bool:
        """One decision of a worker, or the end of a simulator that failed -> False where it must wait."""
        try:
            return self._decide(worker)
        except Exception as e:  # noqa: BLE001 (of a user's simulator)
            self._anew(worker, e)
            return True

    def _decide(self, worker: Worker | EpisodeSlots) -> bool:
        """One decision of a worker -> False where it must wait."""
        if isinstance(worker, EpisodeSlots):
            for _ in range(worker.wants()):
                f = (
                    self.planned.lease(self.ledger, worker.index, True)
                    if self.planned
                    else self.ledger.lease(worker.index, more=True)
                )
                if f is None:
                    break
                worker.begin(*self._work(f, worker.layout()))
            if not worker.busy():
                return False
            for whole in worker.decide():
                self._seal(*whole)
            return True
        if worker.lease is None:
            f = self.ledger.lease(worker.index)
            if f is None:
                return False
            worker.begin(*self._work(f, worker.collector.layout(worker.policy, worker.explore)))
        if worker.decide():
            assert worker.lease is not None
            self._seal(worker.lease.uid, worker.made, worker.oldest)
            worker.end()
        return True

    def _anew(self, worker: Worker | EpisodeSlots, e: Exception) -> None:
        """Go on in a simulator that is made anew after one that raised `e`."""
        if self.again is None:
            raise e
        self.errors.failed(e, worker.collector.decision > 0)
        self.restarts += 1
        with contextlib.suppress(Exception):
            worker.collector.env.close()
        # a resumed run counts its leases on: it makes no simulator twice
        worker.collector = self.again(worker.index, self.ledger.next_uid)
        self._cut(worker)

    def _cut(self, worker: Worker | EpisodeSlots) -> None:
        """Cut the episodes of a worker whose simulator is lost. Decisions that a critic judges stay up to
        the cut. A group is judged by whole episodes: one that is open is given back with all it has, for its
        episodes that had ended would be the shorter ones."""
        for f in self.ledger.held(worker.index):
            rows, oldest = (worker.made, worker.oldest) if isinstance(worker, Worker) else (0, 0)
            self._seal(f.uid, 0 if self.whole else rows, oldest)
        worker.end()

    def _work(self, f: Fragment, rows: Layout) -> tuple[Lease, Columns]:
        """A new lease and the columns to write to."""
        if f.slot not in self.columns or self.columns[f.slot]["done"].shape[1:] != rows["done"][0]:
            self.columns[f.slot] = new_columns(rows, self.rows)
        for column in self.columns[f.slot].values():
            column.fill(0)  # what a checkpoint has of it depends on nothing that was here before
        return self._lease(f), self.columns[f.slot]

    def _lease(self, f: Fragment) -> Lease:
        return Lease(
            f.uid,
            f.slot,
            self.rows if self.whole else f.decisions,
            0,
            f.due,
            members=f.envs if self.planned else 0,
            start=f.start,
        )

    def _seal(self, uid: int, rows: int, oldest: int) -> None:
        f = self.ledger.fragments[uid]
        f.rows = rows
        self.errors.finished += rows >= f.decisions  # of whole episodes 1
        self.ledger.seal(uid, min(1, rows) if self.whole else rows, oldest)
        if rows and finite(self.columns[f.slot], rows):
            self.ledger.refuse(uid)
        elif rows and self.planned and not self.planned.keeps(self.columns[f.slot], rows):
            self.ledger.refuse(uid, broken=False)

    def next(self, stop: Callable[[], bool] = never) -> Rollout | None:
        """The next batch; with staleness, workers have by then run ahead by a number of decisions that is
        drawn. None: `stop()` said so, and what was made so far is in `state()`."""
        if self.ahead is None:
            self.ahead = self._draw(1 + 2 * self.rows * len(self.workers)) if self.ledger.staleness else 0
        waiting: set[int] = set()
        refused = self.ledger.refused
        while True:
            enough = self.ledger.ready() >= self.ledger.batch
            if enough and (self.ahead <= 0 or len(waiting) == len(self.workers)):
                break
            if stop():
                return None
            assert len(waiting) < len(self.workers), "every worker waits and no batch is ready"
            if self.ledger.refused - refused > 10 * self.ledger.batch:
                raise UserError(
                    "the sim or the policy keeps giving numbers that are not finite; "
                    "lower --rl.lr, or look at the sim"
                )
            i = self._draw(len(self.workers)) if len(self.workers) > 1 else 0
            if self._move(self.workers[i]):
                waiting.clear()
                self.ahead -= enough
            else:
                waiting.add(i)
        chosen, self.ahead = self.ledger.take(), None
        assert chosen is not None  # there is enough
        parts = [(self.columns[f.slot], f.rows) for f in chosen]
        return make_batch_of(self.planned, parts, self.version, self.ledger.staleness, self.workers[0].group)

    def gathered(self) -> int:
        """Decisions of the next batch that are made; of whole episodes, those that have ended."""
        made = {w.lease.uid: w.made for w in self.workers if isinstance(w, Worker) and w.lease is not None}
        return self.ledger.gathered(lambda f: 0 if self.whole else made.get(f.uid, 0))

    def stream(self, waiting: Callable[[], object] = never) -> Iterator[Rollout]:
        """The next synchronous batch, fragment by fragment; `waiting()` is called before each decision."""
        rounds = self.ledger.rounds()
        assert rounds and self.ledger.staleness == 0, "a stream is synchronous"
        for i in range(rounds):
            for w in self.workers:
                while (
                    f := self.ledger.take_from(w.index, i == rounds - 1 and w is self.workers[-1])
                ) is None:
                    waiting()
                    assert self._move(w), "a worker waits and its fragment is not there"
                yield make_batch([(self.columns[f.slot], f.rows)], self.version, 0)

    def publish(self) -> None:
        """The learner has made an update: the rollout it came from is spent."""
        self.ledger.commit()
        self.ledger.publish(self.version + 1)

    def commit(self) -> None:
        """Nothing to do: what is in flight is in the checkpoint itself."""

    def crowded(self) -> bool:
        """Whether slots wait for a checkpoint: never, here."""
        return False

    def stats(self) -> dict[str, float]:
        """Seconds per stage since the last call, and samples refused so far."""
        out = {"health/refused": float(self.ledger.refused), "health/restarts": float(self.restarts)}
        for w in self.workers:
            for k, v in w.collector.timer.take().items():
                out[f"time/{k}"] = out.get(f"time/{k}", 0.0) + v
        return out

    def spans(self) -> list[tuple[str, int, int]]:
        """One process has no timeline."""
        return []

    def note(self) -> str:
        """A few words for the progress line: restarts of the simulator."""
        return restarts(self.restarts)

    def state(self) -> dict:
        """Everything in flight; where the sim has no snapshots, the unfinished fragments are cut when it is
        loaded."""
        slots = {f.slot for f in self.ledger.fragments.values()}
        return {
            "ledger": self.ledger.state_dict(),
            "moves": self.moves,
            "ahead": self.ahead,
            "columns": {s: self.columns[s] for s in sorted(slots)},
            "workers": [
                w.state()
                if isinstance(w, EpisodeSlots)
                else {
                    "collector": w.collector.state(),
                    "last": w.last,
                    "lease": w.lease
                    and [w.lease.uid, w.lease.slot, w.lease.rows, w.made, w.lease.due, w.oldest],
                }
                for w in self.workers
            ],
        }

    def load_state(self, state: dict) -> bool:
        """Go on from `state()` -> whether exactly (False: the sim has no snapshots)."""
        self.ledger.load_state_dict(state["ledger"])
        self.moves, self.ahead, exact = state["moves"], state.get("ahead"), True  # of before it there is none
        self.columns = {s: {k: np.array(v) for k, v in c.items()} for s, c in state["columns"].items()}
        for w, saved in zip(self.workers, state["workers"], strict=True):
            if isinstance(w, EpisodeSlots):
                w.resume(saved, [(self._lease(f), self.columns[f.slot]) for f in self.ledger.held(w.index)])
                exact = exact and bool(saved)
                continue
            w.last = saved["last"]
            if saved["collector"]:
                w.collector.set_state(saved["collector"])
            else:
                exact = False
            if saved["lease"]:
                uid, slot, rows = saved["lease"][:3]
                w.lease, w.columns = Lease(uid, slot, rows, 0, saved["lease"][4]), self.columns[slot]
                w.made, w.oldest = saved["lease"][3], saved["lease"][5]
                if not saved["collector"]:
                    self._cut(w)
        return exact

    def close(self) -> None:
        """Close the envs."""
        for w in self.workers:
            w.collector.env.close()
