"""Workers as processes of this machine: leases over one pipe each, decisions through the rollout buffer,
weights through a mapped file.

A worker that dies costs the decision it was making: its successor drives the env from the last snapshot
through the actions in the slot and goes on. One that makes no decision for `hang` seconds is asked for its
stack and killed.
"""

import contextlib
import multiprocessing
import pickle
import selectors
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import connection as mpc
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from robo_rl.child import HANG, UNGUARDED, UNGUARDED_WORDS, without_absent_main
from robo_rl.lora import moving
from robo_rl.runtime import server, snapshot
from robo_rl.runtime.published import create
from robo_rl.runtime.server import ServerJob
from robo_rl.runtime.worker import Job, main
from robo_rl.runtime.worker_pool import BACK_OFF, DEATHS, WorkerPoolFeed

START_LIMIT = 300.0  # seconds a worker may take to build its sim
STARTS = 5  # times that a process is tried to be started
LOOK = 0.05  # seconds between looks at everybody while somebody is to be started
SERVER = -1  # index of the policy server among the processes


def context():
    """Processes come from a server that has imported torch once, so that one starts in a fraction of a
    second."""
    ctx = multiprocessing.get_context("forkserver")
    ctx.set_forkserver_preload(["robo_rl.runtime.worker"])
    return ctx


def warm(modules: tuple[str, ...] = ()) -> None:
    """Let that server import torch, and `modules` that every worker needs, while this process does something
    else."""
    from multiprocessing import forkserver

    context().set_forkserver_preload(["robo_rl.runtime.worker", *modules])
    with without_interrupts():
        forkserver.ensure_running()


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that begin meanwhile leave Ctrl-C to the learner from their first instruction on, while they
    import torch too."""
    resource_tracker.ensure_running()  # the start of it lets SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_process(process: BaseProcess) -> None:
    """Start a process of `context`. Where the server that forks is dying, its pipes are closed before it
    counts as dead: another one then starts it."""
    for left in reversed(range(STARTS)):
        try:
            with without_absent_main(), without_interrupts():
                return process.start()
        except (EOFError, OSError):
            if not left:
                raise
            time.sleep(0.1)


class DuplexPipe:
    """One end of two one-way pipes. (A socket pair wakes who waits on another core in two to three times the
    time.)"""

    def __init__(self, ours: mpc.Connection, theirs: mpc.Connection):
        self.ours, self.theirs = ours, theirs  # what we read, what they read

    def fileno(self) -> int:
        return self.ours.fileno()

    def poll(self, timeout: "float | None" = 0.0) -> bool:
        return self.ours.poll(timeout)

    def recv(self):
        return pickle.loads(self.ours.recv_bytes())

    def send(self, message: object) -> None:
        self.theirs.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


def duplex_pair() -> tuple[DuplexPipe, DuplexPipe]:
    """The two ends of a pair of pipes."""
    (a, to_a), (b, to_b) = multiprocessing.Pipe(duplex=False), multiprocessing.Pipe(duplex=False)
    return DuplexPipe(a, to_b), DuplexPipe(b, to_a)


@dataclass(slots=True)
class WorkerProcess:
    """One process as the broker knows it."""

    name: str
    job: "Job | ServerJob"
    process: "BaseProcess | None" = None
    pipe: "DuplexPipe | None" = None
    ready: bool = False
    leases: dict[int, int] = field(default_factory=dict)  # uid -> slot of what it is at
    wants: int = 0  # leases it waits for
    leaving: bool = False  # it gets no more
    told: float = 0.0  # when it was told to end
    deaths: int = 0  # since it last finished something
    restarts: int = 0
    started: float = 0.0
    again: float = 0.0  # when to start it
    beat: int = 0  # its last sign of life [ns]
    heard: float = 0.0  # when that came, in seconds of the broker's `AwakeClock`
    words: str = ""

    @property
    def decides(self) -> bool:
        return isinstance(self.job, ServerJob)

    @property
    def work(self) -> Job:
        """The job of a worker."""
        assert isinstance(self.job, Job)
        return self.job


class ProcessPool:
    """One process per job, and a policy server for jobs that are `served`. `policy`: whose weights are
    published."""

    def __init__(self, jobs: list[Job], policy, hang: float = HANG, back_off: tuple[float, ...] = BACK_OFF):
        self.jobs, self.policy, self.hang, self.back_off = jobs, policy, hang, back_off
        self.processes: dict[int, WorkerProcess] = {}
        self.clock = snapshot.AwakeClock(min(1.0, hang / 4))
        self.wake_r, self.wake_w = multiprocessing.Pipe(duplex=False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.wake_r, selectors.EVENT_READ)
        self.pause, self.looked, self.turned, self.down = min(0.5, hang / 8), 0.0, True, 0
        self.asking: set[int] = set()  # who asked for work since the last turn
        self.tried = -1  # `feed.room` when everybody who waits was refused

    @property
    def restarts(self) -> int:
        """Processes restarted so far."""
        return sum(m.restarts for m in self.processes.values())

    def evict(self, folder: Path) -> None:
        """Kill the workers of a learner that died."""
        snapshot.evict(folder)

    def start(self, feed: WorkerPoolFeed, resumed: bool) -> None:
        """Publish the weights; `turn` starts the processes."""
        self.feed, first = feed, self.jobs[0]
        if not resumed:
            for path in feed.folder.glob("worker*.state"):
                path.unlink()
        first.weights.unlink(missing_ok=True)
        self.writer = create(first.weights, self.policy)
        self.publish(feed.version)
        incarnation = int(time.time()) % 10**9 if resumed else 0
        self.processes = {
            j.index: WorkerProcess(f"worker{j.index}", replace(j, incarnation=incarnation)) for j in self.jobs
        }
        if first.served:
            self.processes[SERVER] = WorkerProcess(
                "server",
                ServerJob(
                    first.options, first.spec, first.explore, feed.folder, first.weights, len(self.jobs)
                ),
            )
        self.context, self.left = context(), {}
        self.resize(feed.workers)

    def resize(self, workers: int) -> None:
        """Run workers 0 … `workers` - 1 from now on: others hand over their fragments and leave, new ones
        join."""
        for i, m in self.processes.items():
            m.leaving = i >= workers
        for i in range(workers):
            if i not in self.processes:  # one that was here before goes on where it was, or with another seed
                self.processes[i] = WorkerProcess(
                    f"worker{i}",
                    replace(
                        self.jobs[-1],
                        index=i,
                        incarnation=self.left.get(i, self.processes[0].work.incarnation),
                    ),
                )
                self.feed.join(i)

    def publish(self, version: int) -> None:
        """Publish the policy's weights as version `version`."""
        self.writer.publish(version, moving(self.policy))

    def wake(self) -> None:
        """End the wait of `turn`: there may be work."""
        self.wake_w.send(0)

    def check(self) -> None:
        """Workers are children of this process: they can always be started anew."""

    def turn(self) -> None:
        """Start processes, read their messages, restart those that died, hand out leases. It looks at those
        that sent something, and at all of them only now and then: a turn takes the same time for any number
        of workers."""
        now, pause = self.clock.now(), LOOK if self.down else self.pause
        if now - self.looked >= pause or self.turned:
            self.looked, self.turned = now, False
            self._look_after_all()
            self._watch(now)
        for key, _ in self.selector.select(pause):
            m = key.data
            if m is None:
                self.wake_r.recv()
                self.turned = True  # work, or other numbers of workers
                continue
            if m.process is None or m.pipe is None:
                continue
            with contextlib.suppress(EOFError, OSError):
                while m.pipe.poll():
                    self._hear(m, m.pipe.recv())
            if not m.process.is_alive():
                self._died(m)
                self.turned = True
        room = self.feed.room
        for i in list(self.asking if room == self.tried else self.processes):
            m = self.processes.get(i)
            while (
                m is not None
                and m.wants
                and not m.leaving
                and (lease := self.feed.lease(i, m.work.episode_slots)) is not None
            ):
                m.wants -= 1
                m.leases[lease.uid] = lease.slot
                self._send(m, [lease])
        self.asking.clear()
        self.tried = room

    def _look_after_all(self) -> None:
        """Start processes that should run, drop those that left, tell others to leave."""
        now = time.monotonic()
        for i, m in list(self.processes.items()):
            if m.process is None and m.leaving:
                self.feed.leave(i)
                self.left[i] = m.work.incarnation
                del self.processes[i]
            elif m.process is None and now >= m.again:
                self._start(m)
            elif m.leaving and m.process is not None and not m.leases and not m.told:
                m.told = self.clock.now()
                self._send(m, None)
        self.down = sum(m.process is None for m in self.processes.values())

    def _send(self, m: WorkerProcess, message: object) -> None:
        assert m.pipe is not None
        with contextlib.suppress(OSError):  # it died: the sentinel tells
            m.pipe.send(message)

    def end(self) -> None:
        """Stop all processes; kill those that do not stop."""
        for m in self.processes.values():
            if m.pipe is not None:
                with contextlib.suppress(OSError):
                    m.pipe.send(None)
        limit = time.monotonic() + 5
        for m in self.processes.values():
            if m.process is not None:
                m.process.join(max(0.1, limit - time.monotonic()))
                if m.process.is_alive():
                    m.process.kill()
                    m.process.join(5)
        self.writer.close()

    def _start(self, m: WorkerProcess) -> None:
        m.pipe, theirs = ours, _ = duplex_pair()
        process = self.context.Process(
            target=server.main if m.decides else main, args=(m.job, theirs), name=m.name
        )
        start_process(process)
        m.process = process
        theirs.close()
        for thing in (ours, process.sentinel):
            self.selector.register(thing, selectors.EVENT_READ, m)
        m.ready, m.leases, m.wants, m.started, m.words = False, {}, 0, self.clock.now(), ""

    def _hear(self, m: WorkerProcess, message: tuple) -> None:
        if message[0] == "ready":
            m.ready = True
            if not m.decides:
                held = self.feed.held(m.work.index)
                m.leases = {lease.uid: lease.slot for lease in held}
                self._send(m, held)
        elif message[0] == "wants":
            m.wants += message[1]
            self.asking.add(m.work.index)
        elif message[0] in ("mistake", "error"):
            m.words = f"{message[1]}\n{message[2]}"
            if words := self.feed.errors.add(m.name, message[1]):
                self.feed.give_up(words)
        elif message[0] == "full":  # who comes after it would find no more room
            self.feed.give_up(message[1])
        elif message[0] == "sealed":
            m.leases.pop(message[1], None)
            if self.feed.sealed(m.work.index, m.name, *message[1:]):
                m.deaths = 0
                if SERVER in self.processes:
                    self.processes[SERVER].deaths = 0

    def _watch(self, now: float) -> None:
        """Kill processes that make no progress for `hang` seconds; `now`: seconds that the broker was at
        work."""
        for m in self.processes.values():
            if m.process is None or not m.process.is_alive():
                continue
            if not m.ready and now - m.started > START_LIMIT:
                self._kill(m, f"did not start within {START_LIMIT:.0f} s")
            elif m.told and now - m.told > self.hang:
                self._kill(m, "was told to leave")
            elif m.leases:
                beat = int(self.feed.buffer.head["beat"][list(m.leases.values())].max())
                if beat != m.beat:
                    m.beat, m.heard = beat, now
                elif now - m.heard > self.hang:
                    self._kill(m, f"made no decision for {now - m.heard:.0f} s")

    def _kill(self, m: WorkerProcess, why: str) -> None:
        """Ask a process that hangs for its stack, then kill it."""
        m.words = snapshot.kill(m.process, self.feed.folder, m.name, why)

    def _died(self, m: WorkerProcess) -> None:
        assert m.process is not None and m.pipe is not None
        code = m.process.exitcode
        m.process.join()
        for thing in (m.pipe, m.process.sentinel):
            self.selector.unregister(thing)
        m.pipe.close()
        snapshot.evict(self.feed.folder, m.name)  # it lives where the server that forked it died
        m.process, m.pipe, m.ready, m.leases, m.wants = None, None, False, {}, 0
        if m.told:  # it left
            m.job, m.told = replace(m.work, incarnation=m.work.incarnation + 1), 0.0
            return
        if code == UNGUARDED:
            self.feed.give_up(UNGUARDED_WORDS)
        m.restarts += 1
        m.deaths += 1
        m.again = time.monotonic() + self.back_off[min(m.deaths - 1, len(self.back_off) - 1)]
        if not m.decides:
            m.job = replace(m.work, incarnation=m.work.incarnation + 1)
            self.feed.lost(m.work.index)
        if m.deaths >= DEATHS:
            self.feed.give_up(
                f"{m.name} ended {m.deaths} times in a row (last exit status {code}). "
                f"Its last words: {m.words.strip() or 'none'}"
            )
