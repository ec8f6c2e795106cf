"""Workers as processes on this machine: leases over one pipe each, decisions through mapped slots, weights likewise.

A thread of the learner's process (the *broker*) owns the ledger: it leases, seals, restarts what died or hangs, and
gives up with the last words of whoever failed. A worker that dies costs the decision it was making: its successor
drives the env from the last snapshot through the actions in the slot and goes on. A learner that dies costs what it
learnt since its checkpoint: the slots hold every finished decision, and batches it had taken come again in their order.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection as mpc
from pathlib import Path

from robo_rl.errors import UserError
from robo_rl.rollout import Layout, Rollout
from robo_rl.runtime import ledger as led
from robo_rl.runtime.feed import Busy, batch_of
from robo_rl.runtime.ledger import Fragment, Ledger
from robo_rl.runtime import server
from robo_rl.runtime.slots import EMPTY, LEASED, SEALED, TAKEN, Slots, finite
from robo_rl.runtime.weights import WeightWriter
from robo_rl.runtime.worker import Job, Lease, main

SERVER = -1  # index of the policy server among the members
START_LIMIT = 300.0  # seconds a worker may take to build its sim
DEATHS = 6  # in a row without a finished fragment
BACK_OFF = (0.0, 0.1, 0.5, 2.0, 5.0, 10.0)  # seconds before restart i


class WorkerFailure(UserError):
    """A worker fails over and over; the message has its last words."""


@dataclass(slots=True)
class Member:
    """One worker process as the broker sees it."""

    job: "Job | server.ServerJob"
    name: str
    process: "multiprocessing.process.BaseProcess | None" = None
    pipe: "mpc.Connection | None" = None
    ready: bool = False
    idle: bool = True  # it waits for a lease
    deaths: int = 0
    restarts: int = 0
    started: float = 0.0
    again: float = 0.0  # when to start it (again)
    words: str = ""
    slot: int = -1


def context():
    """Processes come from a server that has imported torch once, so that one starts in a fraction of a second."""
    ctx = multiprocessing.get_context("forkserver")
    ctx.set_forkserver_preload(["robo_rl.runtime.worker"])
    return ctx


def warm() -> None:
    """Let the server of processes import torch while this one does something else."""
    from multiprocessing import forkserver
    context()
    forkserver.ensure_running()


class Processes:
    """`jobs` with their layouts; `whole`: fragments are whole episodes. `hang` [s]: silence after which a worker is killed."""

    def __init__(self, folder: Path, jobs: list[Job], layouts: list[Layout], policy, batch: int, decisions: int,
                 staleness: int, resume: "dict | None" = None, hang: float = 60.0, group: int = 0):
        self.folder, self.staleness, self.hang, self.whole = folder, staleness, hang, bool(group)
        self.policy, self.rows = policy, decisions
        folder.mkdir(parents=True, exist_ok=True)
        shares = {j.index: (1 if group else decisions, j.envs) for j in jobs}
        per_batch = -(-batch // min(d * n for d, n in shares.values()))
        count = len(jobs) * (staleness + 2) + per_batch * (staleness + 8)
        self.slots = Slots.create(folder / "slots.bin", layouts, decisions, count)
        self.ledger = Ledger(batch, staleness, count, shares)
        found = self._recover(resume) if resume else self._wipe()
        jobs[0].weights.unlink(missing_ok=True)
        self.writer = WeightWriter.create(jobs[0].weights, dict(policy.state_dict()))
        self.writer.publish(self.version, dict(policy.state_dict()))
        self.condition = threading.Condition()
        self.busy, self.sums, self.failure = Busy(), {}, ""
        self.stopping = False
        incarnation = int(time.time()) % 10**9 if found else 0
        self.members = {j.index: Member(replace(j, incarnation=incarnation), f"worker{j.index}") for j in jobs}
        if jobs[0].served:
            j = jobs[0]
            self.members[SERVER] = Member(server.ServerJob(j.options, j.spec, j.explore, folder, j.weights, len(jobs)),
                                          "server")
        self.wake_r, self.wake_w = multiprocessing.Pipe(duplex=False)
        self.context = context()
        self.thread = threading.Thread(target=self._broker, name="broker", daemon=True)
        self.thread.start()

    @property
    def version(self) -> int:
        """Updates published so far."""
        return self.ledger.version

    # ---- recovery

    def _wipe(self) -> bool:
        self.slots.head["state"][:] = EMPTY
        for path in self.folder.glob("worker*.state"):
            path.unlink()
        return False

    def _recover(self, state: dict) -> bool:
        head, found = self.slots.head, []
        for slot in range(self.slots.count):
            kind, uid = int(head["state"][slot]), int(head["uid"][slot])
            worker, rows = int(head["worker"][slot]), int(head["rows"][slot])
            if kind == EMPTY or worker not in self.ledger.shares:
                continue
            decisions, envs = self.ledger.shares[worker]
            if kind in (SEALED, TAKEN) and self.slots.checksum(slot, worker, rows) != int(head["checksum"][slot]):
                continue  # torn by a power cut
            f = Fragment(uid, slot, worker, int(head["granted"][slot]), envs, int(head["due"][slot]),
                         {LEASED: led.LEASED, SEALED: led.READY, TAKEN: led.TAKEN}[kind], int(head["attempt"][slot]),
                         int(head["made"][slot]), rows, int(head["oldest"][slot]), int(head["batch"][slot]))
            found.append(f)
        for slot in self.ledger.recover(found, state["version"], state["next_batch"], state["taken"], state["next_uid"]):
            head["state"][slot] = EMPTY
        return True

    def note(self) -> str:
        """A few words for the progress line."""
        restarts = sum(m.restarts for m in self.members.values())
        return f"{restarts} restarts" if restarts else ""

    def state(self) -> dict:
        """What a checkpoint must know; the rest is in the slots."""
        with self.condition:
            ledger = self.ledger
            return {"version": ledger.version, "next_batch": ledger.next_batch, "taken": ledger.taken,
                    "next_uid": ledger.next_uid}

    # ---- the learner's side

    def next(self) -> Rollout:
        """Wait for the next batch."""
        begin = time.monotonic_ns()
        with self.condition:
            while (chosen := self.ledger.take()) is None:
                if self.failure:
                    raise WorkerFailure(self.failure)
                if not self.thread.is_alive():
                    raise WorkerFailure("the broker thread ended")
                if not self.ledger.free and not any(f.state != led.TAKEN for f in self.ledger.fragments.values()):
                    raise RuntimeError("every slot waits for a checkpoint")
                self.condition.wait(1.0)
            for f in chosen:
                self.slots.head["batch"][f.slot] = f.batch
                self.slots.head["state"][f.slot] = TAKEN
        now = time.monotonic_ns()
        self._count("time/rollouts", (now - begin) / 1e9)
        return batch_of([(self.slots.columns(f.slot, f.worker), f.rows) for f in chosen], self.version, self.staleness)

    def publish(self) -> None:
        """Out with the policy's weights, as the next version."""
        begin = time.perf_counter()
        self.writer.publish(self.version + 1, dict(self.policy.state_dict()))
        with self.condition:
            self.ledger.publish(self.version + 1)
        self._count("time/publish", time.perf_counter() - begin)
        self.wake_w.send(0)

    def commit(self) -> None:
        """A checkpoint holds everything learnt so far."""
        with self.condition:
            for slot in self.ledger.commit():
                self.slots.head["state"][slot] = EMPTY
        self.wake_w.send(0)

    def crowded(self) -> bool:
        """Whether few slots are left: time for a checkpoint."""
        with self.condition:
            taken = sum(f.state == led.TAKEN for f in self.ledger.fragments.values())
            return len(self.ledger.free) < len(self.members) + 1 and taken > 0

    def stats(self) -> dict[str, float]:
        """Since the last call: seconds of the learner by stage, shares of the workers' time; depths of the queues now."""
        with self.condition:
            out, self.sums = self.sums, {}
            spent = sum(out.get(f"workers/{k}", 0.0) for k in ("sim", "policy", "wait"))
            out |= {k: v / spent for k, v in out.items() if k.startswith("workers/") and spent}
            kinds = [f.state for f in self.ledger.fragments.values()]
            out |= {"queue/leased": kinds.count(led.LEASED), "queue/ready": kinds.count(led.READY),
                    "queue/taken": kinds.count(led.TAKEN), "queue/free": len(self.ledger.free),
                    "health/restarts": sum(m.restarts for m in self.members.values()),
                    "health/refused": self.ledger.refused}
        return {k: float(v) for k, v in out.items()}

    def spans(self) -> list[tuple[str, int, int]]:
        """Who worked from when to when [monotonic ns] since the last call."""
        with self.condition:
            return self.busy.take()

    def _count(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def close(self) -> None:
        """End the workers; what they made stays in the slots."""
        self.stopping = True
        self.wake_w.send(0)
        self.thread.join(15)

    # ---- the broker

    def _broker(self) -> None:
        try:
            while not self.stopping:
                self._turn()
        except Exception as e:  # noqa: BLE001 (a thread's last words)
            import traceback
            with self.condition:
                self.failure = f"the broker failed: {e!r}\n{traceback.format_exc(limit=-4)}"
                self.condition.notify_all()
        finally:
            self._end_all()

    def _turn(self) -> None:
        now = time.monotonic()
        for m in self.members.values():
            if m.process is None and now >= m.again:
                self._start(m)
        watched = {m.pipe: m for m in self.members.values() if m.pipe is not None}
        ends = {m.process.sentinel: m for m in self.members.values() if m.process is not None}
        pause = 0.5 if all(m.process for m in self.members.values()) else 0.05
        for thing in mpc.wait([*watched, *ends, self.wake_r], pause):
            if thing is self.wake_r:
                self.wake_r.recv()
            elif thing in watched:
                m = watched[thing]
                with contextlib.suppress(EOFError, OSError):
                    while m.pipe is not None and m.pipe.poll():
                        self._hear(m, m.pipe.recv())
            elif ends[thing].process is not None and not ends[thing].process.is_alive():
                m = ends[thing]
                with contextlib.suppress(EOFError, OSError):
                    while m.pipe.poll():
                        self._hear(m, m.pipe.recv())
                self._died(m)
        self._watch(time.monotonic())
        for m in self.members.values():
            if m.ready and m.idle and m.name != "server":
                self._lease(m)

    def _start(self, m: Member) -> None:
        m.pipe, theirs = multiprocessing.Pipe()
        target = server.main if m.name == "server" else main
        m.process = self.context.Process(target=target, args=(m.job, theirs), name=m.name)
        m.process.start()
        theirs.close()
        m.ready, m.idle, m.started, m.words, m.slot = False, True, time.monotonic(), "", -1

    def _hear(self, m: Member, message: tuple) -> None:
        kind = message[0]
        if kind == "ready":
            m.ready = True
        elif kind == "error":
            m.words = f"{message[1]}\n{message[2]}"
        elif kind == "sealed":
            self._sealed(m, *message[1:])

    def _sealed(self, m: Member, uid: int, rows: int, oldest: int, cut: bool) -> None:
        with self.condition:
            f = self.ledger.fragments.get(uid)
            if f is None or f.worker != m.job.index or f.state != led.LEASED:
                return  # told twice
            head, columns = self.slots.head, self.slots.columns(f.slot, f.worker)
            bad = finite(columns, rows)
            whole = self.whole and not cut
            f.rows = rows
            self.ledger.seal(uid, (1 if whole else 0) if self.whole else rows, oldest)
            if bad and uid in self.ledger.fragments:
                self.ledger.refuse(uid)
                m.words = f"column {bad} holds numbers that are not finite"
            if uid in self.ledger.fragments:
                head["rows"][f.slot], head["oldest"][f.slot], head["made"][f.slot] = rows, oldest, f.made
                head["checksum"][f.slot] = self.slots.checksum(f.slot, f.worker, rows)
                head["state"][f.slot] = SEALED
                m.deaths = 0
                if SERVER in self.members:
                    self.members[SERVER].deaths = 0
            else:
                head["state"][f.slot] = EMPTY
                m.deaths += 1
                if m.deaths >= DEATHS:
                    self._give_up(m, "makes nothing usable")
            for name in ("sim", "policy", "wait"):
                self._count(f"workers/{name}", float(head[f"{name}_ns"][f.slot]) / 1e9)
            self.busy.add(m.name, int(head["begin"][f.slot]), int(head["end"][f.slot]))
            m.idle, m.slot = True, -1
            self.condition.notify_all()

    def _lease(self, m: Member) -> None:
        with self.condition:
            f = self.ledger.lease(m.job.index)
            if f is None:
                return
            head, s = self.slots.head, f.slot
            again = int(head["state"][s]) == LEASED and int(head["uid"][s]) == f.uid
            made = int(head["rows"][s]) if again else 0
            if not again:
                head["rows"][s], head["oldest"][s], head["made"][s] = 0, -1, 0
                head["uid"][s], head["worker"][s], head["granted"][s], head["due"][s] = f.uid, f.worker, f.decisions, f.due
                head["batch"][s] = -1
                head["state"][s] = LEASED
            head["attempt"][s], head["beat"][s] = f.attempt, time.monotonic_ns()
            rows = self.rows if self.whole else f.decisions
            m.idle, m.slot = False, s
        with contextlib.suppress(OSError):  # it died: the sentinel tells
            m.pipe.send(Lease(f.uid, s, rows, made, f.due))

    def _watch(self, now: float) -> None:
        for m in self.members.values():
            if m.process is None or not m.process.is_alive():
                continue
            if not m.ready and now - m.started > START_LIMIT:
                self._kill(m, f"did not start within {START_LIMIT:.0f} s")
            elif m.slot >= 0:
                silent = (time.monotonic_ns() - int(self.slots.head["beat"][m.slot])) / 1e9
                if silent > self.hang:
                    self._kill(m, f"made no decision for {silent:.0f} s")

    def _kill(self, m: Member, why: str) -> None:
        """Ask a silent worker for its stack, then end it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(m.process.pid, signal.SIGUSR1)
            time.sleep(0.1)
        stack = self.folder / f"{m.name}.stack"
        m.words = f"{why}; it was at:\n{stack.read_text()[-1500:] if stack.exists() else '(no stack)'}"
        m.process.kill()

    def _died(self, m: Member) -> None:
        code = m.process.exitcode
        m.process.join()
        m.pipe.close()
        m.process, m.pipe, m.ready, m.idle, m.slot = None, None, False, True, -1
        m.restarts += 1
        m.deaths += 1
        m.again = time.monotonic() + BACK_OFF[min(m.deaths - 1, len(BACK_OFF) - 1)]
        with self.condition:
            if m.name != "server":
                m.job = replace(m.job, incarnation=m.job.incarnation + 1)
                self.ledger.lost(m.job.index)
            if m.deaths >= DEATHS:
                self._give_up(m, f"ended {m.deaths} times in a row (last exit status {code})")

    def _give_up(self, m: Member, why: str) -> None:
        self.failure = f"{m.name} {why}. Its last words: {m.words.strip() or 'none'}"
        self.condition.notify_all()

    def _end_all(self) -> None:
        for m in self.members.values():
            if m.pipe is not None:
                with contextlib.suppress(OSError):
                    m.pipe.send(None)
        end = time.monotonic() + 5
        for m in self.members.values():
            if m.process is not None:
                m.process.join(max(0.1, end - time.monotonic()))
                if m.process.is_alive():
                    m.process.kill()
                    m.process.join(5)
