"""The feed of a pool of worker processes: the ledger and the rollout buffer on the learner's side, the pool
on the other.

A thread of the learner's process (the *broker*) calls the pool's `turn` over and over: it hands out leases,
takes finished fragments and restarts workers that died. A learner that dies loses what it learnt since its
checkpoint: the rollout buffer holds the finished fragments, and batches that it had taken are taken again in
their order.
"""

import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from gymnasium.vector import VectorEnv

from robo_rl.errors import LostDaemon, UserError
from robo_rl.files import private_folder, read_json
from robo_rl.plugins import error_words
from robo_rl.rollout import Layout, Rollout
from robo_rl.runtime import ledger as led
from robo_rl.runtime.batches import BatchBuilder
from robo_rl.runtime.feed import WorkIntervals, make_batch, never, restarts
from robo_rl.runtime.ledger import Fragment, Ledger
from robo_rl.runtime.planned import PlannedGroups, make_batch_of
from robo_rl.runtime.recovery import checkpoint_state, recover_fragments
from robo_rl.runtime.rollout_buffer import (
    EMPTY,
    LEASED,
    SEALED,
    TAKEN,
    Lease,
    RolloutBuffer,
    finite,
    slot_bytes,
)
from robo_rl.runtime.staging import Staging

T = TypeVar("T")

# in a row without a finished fragment, or by the same error while fewer than RARE fragments for each are
# finished
DEATHS = 6
RARE = 10
AGAIN = 2  # times that an evaluation, or a round of episodes before RL, begins anew
BACK_OFF = (0.0, 0.1, 0.5, 2.0, 5.0, 10.0)  # seconds before restart i
USELESS = 6  # fragments in a row with numbers that are not finite
# in the folder: the number of workers asked for, which may change while the run goes on
WORKER_COUNT_FILE = "workers.json"
LOOK = 0.3  # seconds between looks at it


# batches that are kept for a learner that dies, beyond the two at work, and their bytes at most
KEPT, KEPT_BYTES = 6, 1 << 28


def slot_count(workers: int, per_batch: int, staleness: int, kept: int) -> int:
    """Slots for what may be in flight under the admission bound, for `kept` batches until a checkpoint, and
    one to begin.

    Fragments are whole without staleness: a batch is made while one is learnt from. With it workers hand over
    early what newer weights overtook, so that there may be one fragment more of each worker for each version.
    """
    flying = 2 * per_batch if staleness == 0 else (staleness + 2) * (per_batch + workers)
    return flying + kept * per_batch + workers + 1


class WorkerFailure(UserError):
    """A worker fails over and over; the message has its last error."""


class WorkerPool(Protocol):
    """Starts, restarts and stops workers. Only the broker's thread calls `turn`, over and over; it waits a
    little itself.

    `check`, from the learner's thread while it waits, raises LostDaemon where workers cannot come back in
    this process.
    """

    @property
    def restarts(self) -> int: ...

    def evict(self, folder: Path) -> None: ...
    def start(self, feed: "WorkerPoolFeed", resumed: bool) -> None: ...
    def turn(self) -> None: ...
    def resize(self, workers: int) -> None: ...
    def publish(self, version: int) -> None: ...
    def wake(self) -> None: ...
    def check(self) -> None: ...
    def end(self) -> None: ...


class ErrorCounts:
    """How often workers ended by errors that differ in numbers alone, while one came at each tenth fragment
    or oftener: what is finished between would be the episodes that are too short or too lucky for the
    error. who: those workers; what: what they finish. alone: there is one, whose deaths in a row are counted
    here too."""

    def __init__(self, who: str = "workers", what: str = "fragments", alone: bool = False) -> None:
        self.who, self.what, self.alone = who, what, alone
        self.finished = 0  # useful ones
        self.seen: dict[str, tuple[int, int]] = {}  # kind -> (times, fragments finished when it came first)

    def add(self, name: str, error: str) -> str:
        """The worker `name` ended by it; says so when it is new -> why to end the run, or "".

        It is counted anew after RARE fragments for each time."""
        kind = re.sub(r"0x[0-9a-f]+|\d+", "N", error)  # an address in memory is a number too
        finished, new = self.finished, kind not in self.seen
        times, since = self.seen.get(kind, (0, finished))
        if finished - since >= RARE * max(1, times):
            times, since = 0, finished
        self.seen[kind] = times + 1, since
        if new:
            print(f"\nwarning: {name} ended and is started anew: {error}", file=sys.stderr, flush=True)
        # where nothing is finished, each worker counts its own deaths in a row
        if times + 1 < DEATHS or finished == since and not self.alone:
            return ""
        return (
            f"{self.who} ended {times + 1} times by the same error (finished in between: {self.what}, "
            f"{finished - since}): {error}"
        )

    def failed(self, e: Exception, begun: bool) -> None:
        """The simulator in this process raised `e`; says so when it is new, and raises what should end the
        run: an error of something else, of a simulator that has not begun to work, or one too many."""
        if not raised_by_env(e) or not (begun or self.finished) and isinstance(e, UserError):
            raise e
        words = env_words(e)
        if why := self.add(self.who, words) if begun or self.finished else f"{self.who} failed: {words}":
            raise WorkerFailure(why) from e


def raised_by_env(e: BaseException) -> bool:
    """Whether `e` came out of a vector env's step or reset, and one that is made anew in this process may do
    better."""
    at = None if isinstance(e, LostDaemon) else e.__traceback__
    while at is not None:
        frame, at = at.tb_frame, at.tb_next
        if frame.f_code.co_name in ("step", "reset") and isinstance(frame.f_locals.get("self"), VectorEnv):
            return True
    return False


def env_words(e: Exception) -> str:
    """What a simulator raised, in a line."""
    return str(e) if isinstance(e, UserError) else error_words(e)


def tried_again(play: Callable[[], T], failed: Callable[[str], None]) -> T:
    """What `play()` gives, whose env is made anew at each call; where its simulator raised it is called again
    after `failed(words)`, AGAIN times at most. WorkerFailure: it raised each time."""
    for again in range(AGAIN + 1):
        try:
            return play()
        except Exception as e:  # noqa: BLE001 (of a user's simulator)
            if not raised_by_env(e):
                raise
            if again == AGAIN:
                raise WorkerFailure(f"the simulator failed {AGAIN + 1} times in a row: {env_words(e)}") from e
            failed(env_words(e))
    raise AssertionError("the last try returns or raises")


class WorkerPoolFeed:
    """`envs` of each worker, their `layouts`; `group` > 0: fragments are whole episodes; `streams`: batches
    come by `stream`;
    `planned`: fragments are groups whose sizes are decided, `envs` on average."""

    def __init__(
        self,
        folder: Path,
        pool: WorkerPool,
        envs: list[int],
        layouts: list[Layout],
        batch: int,
        decisions: int,
        staleness: int,
        resume: "dict | None" = None,
        group: int = 0,
        streams: bool = False,
        planned: PlannedGroups | None = None,
    ):
        self.folder, self.pool, self.group, self.whole, self.rows, self.envs = (
            folder,
            pool,
            group,
            bool(group),
            decisions,
            envs,
        )
        private_folder(folder)
        if not resume:
            (folder / WORKER_COUNT_FILE).unlink(missing_ok=True)
        self.workers, self.looked = requested_workers(folder) or len(envs), time.monotonic()
        shares = {i: self.share(i) for i in range(len(envs))}
        self.per_batch = -(-batch // min(d * n for d, n in shares.values()))
        size = max(slot_bytes(rows, decisions) for rows in layouts)
        self.kept = min(KEPT, KEPT_BYTES // (self.per_batch * size))
        self.buffer = RolloutBuffer.create(
            folder / "slots.bin",
            layouts,
            decisions,
            count := slot_count(len(envs), self.per_batch, staleness, self.kept),
        )
        self.ledger = Ledger(batch, staleness, count, {i: self.share(i) for i in range(self.workers)})
        lock = threading.RLock()
        self.condition = threading.Condition(lock)  # for the learner
        self.busy, self.sums, self.failure, self.stopping = WorkIntervals(), {}, "", False
        self.useless, self.stale, self.staging, self.planned, self.errors, self.streams = (
            0,
            0.0,
            None,
            planned,
            ErrorCounts(),
            streams,
        )
        self.room = 0  # counts whenever somebody who was refused a lease may ask again
        # a single fragment is a batch as it lies in its slot
        if self.per_batch > 1 and not streams and not planned:
            width = self.per_batch * envs[0] if len(set(envs)) == 1 else -(-batch // shares[0][0])
            self.staging = Staging(self.buffer.columns(0, 0), decisions, width)
        self.batches = BatchBuilder(
            self.ledger, self.buffer, lambda worker: self.share(worker)[1], self.staging, lock
        )
        pool.evict(folder)  # who is still at work for a learner that died would write into these slots
        if resume:
            recover_fragments(self.buffer, self.ledger, resume, lambda worker: self.share(worker)[1], streams)
        else:
            self.buffer.head["state"][:] = EMPTY
        pool.start(self, bool(resume))
        self.thread = threading.Thread(target=self._broker, name="broker", daemon=True)
        self.thread.start()
        self.batches.start()

    @property
    def version(self) -> int:
        """Updates published so far."""
        return self.ledger.version

    def share(self, worker: int) -> tuple[int, int]:
        """(decisions, envs) of a worker's fragments; who joins later is like the last of those that began."""
        return 1 if self.whole else self.rows, self.envs[min(worker, len(self.envs) - 1)]

    # ---- the learner's side

    def next(self, stop: Callable[[], bool] = never) -> Rollout | None:
        """Wait for the next batch. None: `stop()` said so; what was made stays in the rollout buffer."""
        begin = time.perf_counter()
        with self.condition:
            while (chosen := self.ledger.take()) is None:
                if stop():
                    return None
                if self.failure:
                    raise WorkerFailure(self.failure)
                if not self.ledger.free and all(f.state == led.TAKEN for f in self.ledger.fragments.values()):
                    raise RuntimeError("every slot waits for a checkpoint")
                self.pool.check()
                self.condition.wait(1.0)
            choices = self.batches.choices(chosen, chosen) if self.staging else []
        chosen, parts = self.batches.put_together(chosen, choices)
        with self.condition:
            self.batches.begin_next()
            head = self.buffer.head
            for i, f in enumerate(chosen):
                # the state last
                head["batch"][f.slot], head["place"][f.slot], head["state"][f.slot] = f.batch, i, TAKEN
        self.count("time/rollouts", time.perf_counter() - begin)
        rollout = make_batch_of(self.planned, parts, self.version, self.ledger.staleness, self.group)
        self.stale = 0.8 * self.stale + 0.2 * rollout.stats["staleness/mean"]
        return rollout

    def gathered(self) -> int:
        """Decisions of the next batch that are made; of whole episodes, those that have ended."""
        rows = self.buffer.head["rows"]
        with self.condition:
            return self.ledger.gathered(lambda f: 0 if self.whole else int(rows[f.slot]))

    def stream(self, waiting: Callable[[], object] = never) -> Iterator[Rollout]:
        """The next synchronous batch, fragment by fragment as they are finished: in turn one of each
        worker. `waiting()` is called while one is waited for."""
        rounds, order = self.ledger.rounds(), sorted(self.ledger.shares)
        assert rounds and self.ledger.staleness == 0, "a stream is synchronous"
        for i in range(rounds):
            for worker in order:
                begin = time.perf_counter()
                with self.condition:
                    while (
                        f := self.ledger.take_from(worker, i == rounds - 1 and worker == order[-1])
                    ) is None:
                        waiting()
                        if self.failure:
                            raise WorkerFailure(self.failure)
                        self.pool.check()
                        self.condition.wait(1.0)
                    self.buffer.head["batch"][f.slot] = f.batch
                    self.buffer.head["state"][f.slot] = TAKEN
                self.count("time/rollouts", time.perf_counter() - begin)
                yield make_batch([(self.buffer.columns(f.slot, f.worker), f.rows)], self.version, 0)

    def publish(self) -> None:
        """Publish the policy's weights as the next version; where the workers are gone it counts alone: a run
        that was told to stop saves what it learnt, one that goes on hears of it when it takes the next."""
        begin = time.perf_counter()
        if not self.failure:
            self.pool.publish(self.version + 1)
        with self.condition:
            self.ledger.publish(self.version + 1)
            self.room += 1
        self.count("time/publish", time.perf_counter() - begin)
        self.pool.wake()

    def state(self) -> dict:
        """The part of a checkpoint that is not in the rollout buffer."""
        with self.condition:
            return checkpoint_state(self.ledger)

    def commit(self) -> None:
        """Free the slots whose fragments a checkpoint covers."""
        with self.condition:
            for slot in self.ledger.commit():
                self.buffer.head["state"][slot] = EMPTY
            self.room += 1
        self.pool.wake()

    def crowded(self) -> bool:
        """Whether few slots are left: time for a checkpoint."""
        with self.condition:
            taken = sum(f.state == led.TAKEN for f in self.ledger.fragments.values())
            return len(self.ledger.free) < len(self.ledger.shares) + 1 and taken > 0

    def stats(self) -> dict[str, float]:
        """Since the last call: seconds of the learner by stage, shares of the workers' time; depths of the
        queues now."""
        with self.condition:
            out, self.sums = self.sums, {}
            spent = sum(out.get(f"workers/{k}", 0.0) for k in ("sim", "policy", "wait"))
            out |= {k: v / spent for k, v in out.items() if k.startswith("workers/") and spent}
            out |= depths(self.ledger) | {
                "health/restarts": self.pool.restarts,
                "health/refused": self.ledger.refused,
            }
        return {k: float(v) for k, v in out.items()}

    def spans(self) -> list[tuple[str, int, int]]:
        """(role, begin, end) of intervals of work [monotonic ns] since the last call."""
        with self.condition:
            return self.busy.take()

    def note(self) -> str:
        """A few words for the progress line: how old the data are, restarts."""
        words = (
            f"data {self.stale:.1f} updates old" * bool(self.ledger.staleness),
            f"{self.workers} workers" * (self.workers != len(self.envs)),
            restarts(self.pool.restarts),
        )
        return " · ".join(filter(None, words))

    def close(self) -> None:
        """Stop the workers; their decisions stay in the rollout buffer."""
        self.stopping = self.batches.stopping = True
        self.pool.wake()
        self.thread.join(15)

    # ---- the pool's side

    def lease(self, worker: int, more: bool = False) -> Lease | None:
        """Lease a fragment to a worker, perhaps one that its predecessor began; None: it must wait. `more`:
        beside those it has."""
        with self.condition:
            f = (
                self.planned.lease(self.ledger, worker, more)
                if self.planned
                else self.ledger.lease(worker, more)
            )
            return f and self._lease(f)

    def held(self, worker: int) -> list[Lease]:
        """Leases that a worker has not finished."""
        with self.condition:
            return [self._lease(f) for f in self.ledger.held(worker)]

    def _lease(self, f: Fragment) -> Lease:
        head, s = self.buffer.head, f.slot
        again = int(head["state"][s]) == LEASED and int(head["uid"][s]) == f.uid
        if not again:
            self.buffer.begin(s, f.uid, f.worker, f.decisions, f.due, f.envs if self.planned else 0, f.start)
        head["attempt"][s], head["beat"][s] = f.attempt, time.monotonic_ns()
        made = int(head["rows"][s]) if again else 0
        return Lease(
            f.uid,
            s,
            self.rows if self.whole else f.decisions,
            made,
            f.due,
            int(head["salt"][s]),
            int(head["members"][s]),
            int(head["start"][s]),
        )

    def sealed(self, worker: int, name: str, uid: int, rows: int, oldest: int, cut: bool, bad: str) -> bool:
        """A fragment is finished (`cut`: not whole, its sim was lost; `bad`: a column that is not finite, or
        "") -> whether it is of use. Who made it has looked at the numbers and written the checksums, so that
        this takes the same time for any size."""
        with self.condition:
            f = self.ledger.fragments.get(uid)
            if f is None or f.worker != worker or f.state != led.LEASED:
                return True  # told twice
            head, f.rows, admitted = self.buffer.head, rows, self.ledger.admitted
            self.ledger.seal(uid, (0 if cut else 1) if self.whole else rows, oldest)
            if bad and uid in self.ledger.fragments:
                self.ledger.refuse(uid)
                self.useless += 1
                if self.useless >= USELESS:
                    self.give_up(
                        f"{name} keeps giving numbers that are not finite (column {bad}): lower --rl.lr, or "
                        "look at the sim"
                    )
            useful = good = uid in self.ledger.fragments
            if (
                good
                and self.planned
                and not (good := self.planned.keeps(self.buffer.columns(f.slot, worker), rows))
            ):
                self.ledger.refuse(uid, broken=False)
            self.room += self.ledger.admitted < admitted  # something was given back
            if good:
                head["rows"][f.slot], head["oldest"][f.slot], head["made"][f.slot] = rows, oldest, f.made
                head["checksum"][f.slot] = self.buffer.checksum(f.slot, worker)
                self.useless, self.errors.finished = 0, self.errors.finished + 1
            head["state"][f.slot] = SEALED if good else EMPTY
            for stage in ("sim", "policy", "wait"):
                self.count(f"workers/{stage}", float(head[f"{stage}_ns"][f.slot]) / 1e9)
            if head["begin"][f.slot]:
                self.busy.add(name, int(head["begin"][f.slot]), int(head["end"][f.slot]))
            if good:
                self.batches.finished(f)
            if self.streams or self.failure or self.ledger.samples >= self.ledger.batch:
                self.condition.notify_all()
            return useful

    def lost(self, worker: int) -> None:
        """Record that a worker died; its successor gets the same lease."""
        with self.condition:
            self.ledger.lost(worker)

    def join(self, worker: int) -> None:
        """Admit a new worker."""
        with self.condition:
            self.ledger.join(worker, self.share(worker))
            self.batches.order, self.room = None, self.room + 1

    def leave(self, worker: int) -> None:
        """Remove a worker; the decisions of its unfinished fragment stay, if a batch can use them."""
        with self.condition:
            held = self.ledger.held(worker)
        for f in held:
            rows = int(self.buffer.head["rows"][f.slot])
            oldest = int(self.buffer.columns(f.slot, worker)["version"][:rows].min()) if rows else 0
            bad = finite(self.buffer.columns(f.slot, worker), rows)
            self.sealed(worker, f"worker{worker}", f.uid, rows, oldest, True, bad)
        with self.condition:
            self.ledger.leave(worker, 0, 0)
            self.batches.order, self.room = None, self.room + 1
            self.condition.notify_all()

    def give_up(self, words: str) -> None:
        """End the run with this error."""
        with self.condition:
            self.failure = words
            self.condition.notify_all()

    def count(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def _broker(self) -> None:
        try:
            while not self.stopping:
                now = time.monotonic()
                if now - self.looked > LOOK:
                    self.looked, n = now, requested_workers(self.folder)
                    if n and n != self.workers:
                        self.workers = n
                        self.pool.resize(n)
                self.pool.turn()
        except Exception as e:  # noqa: BLE001 (a thread's last words)
            self.give_up(f"the broker failed: {e!r}\n{traceback.format_exc(limit=-4)}")
        finally:
            self.pool.end()


def depths(ledger: Ledger) -> dict[str, float]:
    """Fragments by state, free slots and workers, for the log."""
    kinds = [f.state for f in ledger.fragments.values()]
    return {
        "queue/leased": kinds.count(led.LEASED),
        "queue/ready": kinds.count(led.READY),
        "queue/taken": kinds.count(led.TAKEN),
        "queue/free": len(ledger.free),
        "queue/workers": len(ledger.shares),
    }


def requested_workers(folder: Path) -> int:
    """Number of workers that `folder` asks for; 0: it asks for none."""
    try:
        return max(0, int(read_json(folder / WORKER_COUNT_FILE)["workers"]))
    except (ValueError, KeyError, TypeError):
        return 0
