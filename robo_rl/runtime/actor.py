"""Learning from replay with the actor in a process beside the learner: what they hand over is the journal of
replay.

The actor steps the env and writes each change of the stores into their journals, one write each; the learner
reads on in the same files and makes the same changes to its own. There is no queue to fill or to lose: `kill
-9` of either costs no control step that was written, and who comes next goes on from the files. The learner
grants control steps, so the actor is never further ahead than `LEAD` rounds; weights change between control
steps (`robo_rl.runtime.weights`).

`InProcessActor` is the same in one process, which repeats exactly for a seed.
"""

import contextlib
import copy
import mmap
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection as mpc
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from robo_rl.child import HANG
from robo_rl.errors import UserError
from robo_rl.journal import Journal
from robo_rl.lora import moving
from robo_rl.noise import mix
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, Policy
from robo_rl.replay import Replay, ReplayWriter
from robo_rl.replay_collector import SUMS, ReplayCollector
from robo_rl.runtime import snapshot
from robo_rl.runtime.process_pool import START_LIMIT, context, duplex_pair, start_process
from robo_rl.runtime.published import create, follow
from robo_rl.runtime.start_file import StartFile
from robo_rl.runtime.worker_pool import BACK_OFF, DEATHS, ErrorCounts, WorkerFailure
from robo_rl.starts import Ended

if TYPE_CHECKING:
    from robo_rl.rewards import Judge

LEAD = 2  # rounds that the actor may be ahead of what the learner has read
# words they share: control steps allowed, human steps made, time of the last sign of life [ns]
GRANT, HELP, BEAT = range(3)
WAIT = 0.001  # seconds between looks at the grant
TELL = 0.2  # seconds between sums told to the learner


@dataclass(frozen=True, slots=True)
class Stage:
    """What an actor acts in: the env, the judge of success (None: the env), the recorder of episodes with
    help, a function to close it all, and how many of those episodes are recorded already."""

    env: object
    judge: "Judge | None"
    record: "Callable[[object], None] | None"
    close: Callable[[], None]
    recorded: int = 0


@dataclass(frozen=True)
class ActorJob:
    """The arguments of the actor process; they travel by pickle to a child of our own."""

    build: Callable[[], Stage]
    options: PolicyOptions
    spec: ObsSpec
    rows: dict
    seed: int
    capacity: int  # rows of each store
    replay: Path  # journals
    flight: Path  # words, weights, who is at work
    steps: int = 0  # control steps made before
    helped: int = 0  # human steps among them
    incarnation: int = 0  # > 0: another one was at it before
    # an arm or a person does not wait for grants within an episode, see `may_step`
    whole: bool = False
    starts: bool = False  # the learner says where episodes begin (robo_rl.runtime.start_file)
    device: str = "cpu"  # where the policy acts

    @property
    def weights(self) -> Path:
        return self.flight / "weights.bin"

    @property
    def words(self) -> Path:
        return self.flight / "actor.words"


def shared(path: Path) -> np.ndarray:
    """The words int64[3] in a mapped file."""
    with open(path, "r+b") as f:
        return np.frombuffer(mmap.mmap(f.fileno(), 4096), np.int64)[:3]


# ---- the actor's process -----------------------------------------------------------------------------------


def main(job: ActorJob, pipe) -> None:
    """Act until told to stop or orphaned. What else ends the process is sent (`snapshot.last_words`)."""
    try:
        with snapshot.at_work(job.flight, "actor"):
            _act(job, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the learner is gone; what was made is in the journals
    except BaseException as e:  # noqa: BLE001 (the process ends; its last words go to the learner)
        pipe.send(snapshot.last_words(e))


def _act(job: ActorJob, pipe) -> None:
    parent, words = os.getppid(), shared(job.words)
    reader, read = follow(job.weights, job.options, job.spec)
    policy, version = acting_on(job.device, read), reader.current
    stage = job.build()
    journals = [Journal(job.replay / name, job.capacity) for name in ("online", "corrections")]
    online, corrections = (ReplayWriter(job.rows, journal) for journal in journals)
    for tape in (online, corrections):
        tape.cut()  # episodes of who was at it before
    seed = mix(job.seed, job.incarnation) >> 33 if job.incarnation else job.seed
    g = ReplayCollector(
        stage.env,
        policy,
        online,
        corrections,
        seed,
        stage.judge,
        stage.record,
        starts=StartFile(job.flight) if job.starts else None,
    )
    g.steps, g.help_steps, told = job.steps, job.helped, time.monotonic()
    pipe.send(("ready",))
    try:
        while os.getppid() == parent:
            words[BEAT] = time.monotonic_ns()
            free = may_step(int(words[GRANT]), g, job.whole)
            if pipe.poll(0 if free else WAIT) and pipe.recv() is None:
                return
            if free:
                if reader.version() != version and (new := reader.fetch()) is not None:
                    reader.swap(read)
                    renew(policy, read)
                    version = new
                g.step(policy)
                words[HELP] = g.help_steps
            if g.stats["episodes"] and (not free or time.monotonic() - told > TELL):
                if job.starts:
                    pipe.send(("ended", g.take_ended()))
                pipe.send(("sums", g.take()))
                told = time.monotonic()
    finally:
        for journal in journals:
            journal.close()
        stage.close()


def acting_on(device: str, read: Policy) -> Policy:
    """The policy that acts on `device` with the weights of `read`, which is on the host: itself there."""
    return read if torch.device(device).type == "cpu" else copy.deepcopy(read).to(device)


def renew(policy: Policy, read: Policy) -> None:
    """Bring the weights of `read` that learning moves to `policy`, which acts elsewhere, or is the same."""
    if policy is read:
        return
    here, there = moving(read), moving(policy)
    with torch.no_grad():
        for name, tensor in there.items():
            tensor.copy_(here[name])


def may_step(grant: int, g: ReplayCollector, whole: bool) -> bool:
    """Whether the actor makes a control step now: it was granted; or, if `whole`, one robot is within an
    episode, for an arm cannot stand still in time; or of several somebody helps one. Where all episodes of
    several robots counted, one would always be going on, and the actor would never wait for the learner.
    """
    if grant >= g.steps + g.n:
        return True
    called = getattr(getattr(g.env, "operator", None), "is_called", lambda: False)
    return whole and bool(g.lengths.any() if g.n == 1 else g.attended.any() or called())


# ---- the learner's side ------------------------------------------------------------------------------------


class InProcessActor:
    """The actor in the learner's own process; a round is `round_` control steps of every env. `again(key)`: a
    collector in a simulator that is made anew, its draws by `key`; None: a failure ends the run."""

    def __init__(
        self,
        collector: ReplayCollector,
        round_: int,
        close: Callable[[], None] = lambda: None,
        again: Callable[[int], ReplayCollector] | None = None,
    ):
        self.collector, self.round, self.close, self.again = collector, round_, close, again
        self.errors, self.restarts = ErrorCounts("the simulator", "rounds", alone=True), 0

    @property
    def steps(self) -> int:
        """Control steps so far."""
        return self.collector.steps

    @property
    def help_steps(self) -> int:
        """Human ones among them."""
        return self.collector.help_steps

    def collect(self, policy: Policy, stop: Callable[[], bool]) -> None:
        """One round of control steps; less where the simulator failed, which is then made anew."""
        try:
            self.collector.run(policy, self.round)
        except Exception as e:  # noqa: BLE001 (of a user's simulator)
            if self.again is None:
                raise
            self.errors.failed(e, self.collector.steps > 0)
            self.restarts += 1
            with contextlib.suppress(Exception):
                self.collector.env.close()
            old = self.collector
            # a resumed run counts its steps on: it makes no simulator twice
            self.collector = self.again(old.steps + self.restarts)
            self.collector.take_over(old)
        else:
            self.errors.finished += 1

    def take(self) -> dict[str, float]:
        """Sums over the episodes that ended since the last call."""
        return self.collector.take()

    def take_ended(self) -> Ended:
        """The episodes that ended since the last call, for a sampler of starts."""
        return self.collector.take_ended()

    def state(self) -> dict:
        """The state from which a run continues exactly."""
        return self.collector.state()

    def end(self) -> None:
        """Close what the actor acts in."""
        self.close()
        if self.restarts:
            self.collector.env.close()


class SeparateProcessActor:
    """The actor in a process of its own, restarted when it dies or makes no progress for `hang` seconds.

    `stores` are online and corrections, with the journals they are read from; a round is `round_` control
    steps, of all envs together.
    """

    def __init__(
        self,
        job: ActorJob,
        policy: Policy,
        stores: tuple[Replay, Replay],
        round_: int,
        hang: float = HANG,
        back_off: tuple[float, ...] = BACK_OFF,
    ):
        self.job, self.stores, self.round, self.hang, self.back_off = job, stores, round_, hang, back_off
        self.steps, self.restarts, self.deaths, self.again = job.steps, 0, 0, 0.0
        self.clock, self.beat, self.heard = snapshot.AwakeClock(min(1.0, hang / 4)), 0, 0.0
        self.sums: dict[str, Any] = dict.fromkeys(SUMS, 0)
        self.ended: list[Ended] = []
        self.errors = ErrorCounts("the actor", "rounds")
        job.flight.mkdir(parents=True, exist_ok=True)
        snapshot.evict(job.flight)  # who still acts for a learner that died
        for path in (job.weights, job.words):
            path.unlink(missing_ok=True)
        job.words.write_bytes(bytes(4096))
        self.words = shared(job.words)
        self.words[HELP] = job.helped
        self.writer, self.version = create(job.weights, policy), 0
        self.writer.publish(0, moving(policy))
        self.process: BaseProcess | None = None
        self.context = context()
        self._start()

    @property
    def help_steps(self) -> int:
        """Human control steps so far."""
        return int(self.words[HELP])

    def collect(self, policy: Policy, stop: Callable[[], bool]) -> None:
        """Publish the weights, let the actor go on, and return with at least one round more than before."""
        self.version += 1
        self.writer.publish(self.version, moving(policy))
        goal = self.steps + self.round
        self.words[GRANT] = self.steps + LEAD * self.round
        while self.steps < goal and not stop():
            if not self._follow():
                self._supervise()
        self.deaths, self.errors.finished = 0, self.errors.finished + 1

    def _follow(self) -> int:
        """Read the journals on -> control steps read."""
        online, corrections = self.stores
        assert online.journal is not None and corrections.journal is not None
        new = online.follow(online.journal)
        corrections.follow(corrections.journal)
        self.steps += new
        return new

    def take(self) -> dict[str, float]:
        """Sums over the episodes that the actor reported since the last call."""
        self._hear()
        sums = self.sums
        self.sums = dict.fromkeys(SUMS, 0)
        return sums

    def take_ended(self) -> Ended:
        """The episodes that the actor reported since the last call, for a sampler of starts."""
        self._hear()
        ended, self.ended = self.ended, []
        return Ended.joined(ended)

    def state(self) -> dict:
        """{}: the state of the actor is not known in this process."""
        return {}

    def end(self) -> None:
        """Tell the actor to stop; kill it if it does not."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.pipe.send(None)
            self.process.join(5)
            if self.process.is_alive():
                self.process.kill()
                self.process.join(5)
        self._follow()
        self.writer.close()
        shutil.rmtree(self.job.flight, ignore_errors=True)

    def _start(self) -> None:
        self.pipe, theirs = duplex_pair()
        self.ready, self.started, self.last = False, self.clock.now(), ""
        self.words[BEAT] = time.monotonic_ns()
        self.process = self.context.Process(target=main, args=(self.job, theirs), name="actor")
        start_process(self.process)
        theirs.close()

    def _hear(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self.process is not None and self.pipe.poll():
                kind, *said = self.pipe.recv()
                if kind == "ready":
                    self.ready = True
                elif kind == "sums":
                    self.sums = {k: self.sums[k] + v for k, v in said[0].items()}
                elif kind == "ended":
                    self.ended.append(said[0])
                elif kind == "full" or kind == "mistake" and (self.job.whole or not self.ready):
                    raise UserError(said[0])
                else:  # a simulator that fails now and then among them; an arm waits for a person
                    self.last = "\n".join(said)
                    if why := self.errors.add("the actor", said[0]):
                        raise WorkerFailure(why)

    def _supervise(self) -> None:
        """Wait a moment for messages; restart an actor that died or hangs."""
        now = time.monotonic()
        if self.process is None:
            if now < self.again:
                time.sleep(min(0.05, self.again - now))
                return
            self._start()
        assert self.process is not None
        awaited: list[Any] = [self.pipe, self.process.sentinel]
        mpc.wait(awaited, 0.01)
        self._hear()
        if not self.process.is_alive():
            return self._died()
        awake, beat = self.clock.now(), int(self.words[BEAT])
        if beat != self.beat:
            self.beat, self.heard = beat, awake
        if not self.ready and awake - self.started > START_LIMIT:
            self._kill(f"did not start within {START_LIMIT:.0f} s")
        elif self.ready and awake - self.heard > self.hang:
            self._kill(f"made no control step for {awake - self.heard:.0f} s")

    def _kill(self, why: str) -> None:
        """Ask an actor that hangs for its stack, then kill it."""
        self.last = snapshot.kill(self.process, self.job.flight, "actor", why)

    def _died(self) -> None:
        assert self.process is not None
        code = self.process.exitcode
        self.process.join()
        self._hear()
        self.pipe.close()
        self.process = None
        snapshot.evict(self.job.flight, "actor")  # it lives where the server that forked it died
        while self._follow():
            pass
        self.restarts += 1
        self.deaths += 1
        if self.deaths >= DEATHS:
            raise WorkerFailure(
                f"the actor ended {self.deaths} times in a row (last exit status {code}). Its last words: "
                f"{self.last.strip() or 'none'}"
            )
        self.again = time.monotonic() + self.back_off[min(self.deaths - 1, len(self.back_off) - 1)]
        self.job = replace(
            self.job, steps=self.steps, helped=self.help_steps, incarnation=self.job.incarnation + 1
        )
