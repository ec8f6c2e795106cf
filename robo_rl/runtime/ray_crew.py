"""Workers as Ray actors, on any machine of a cluster: the same worker, ledger and slots; only the wires differ.

An actor collects a whole fragment for one lease and sends it; the learner's side writes it into its slot, and from then
on it is in the journal. An actor or a node that dies costs the fragment it was making: its successor starts from the
state that came with the one before. Weights travel as deltas, sparse where that is faster over the link, while the actor
collects, and are swapped in between two decisions.
"""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.errors import MissingDependency, UserError
from robo_rl.noise import mix
from robo_rl.rollout import Collector, new_columns
from robo_rl.runtime.crewed import BACK_OFF, DEATHS, Crewed
from robo_rl.runtime.deltas import DeltaReceiver, DeltaSender
from robo_rl.runtime.worker import Job, Lease, Worker

NEWS = 60.0  # seconds an actor waits for the weights it should begin with
LINK = 1.25e9  # B/s between machines unless told otherwise: 10 Gbit/s


class Collecting:
    """The actor: a worker, its columns, and the newest weights that came."""

    def __init__(self, job: Job, message: np.ndarray):
        import torch

        from robo_rl.policies import make_policy
        torch.set_num_threads(job.threads)
        self.job, self.policy = job, make_policy(job.options, job.spec, 0).eval()
        self.standby = {k: v.clone() for k, v in self.policy.state_dict().items()}
        self.lock = threading.Lock()
        self.receiver, self.version = DeltaReceiver(self.standby, "always"), -1
        self.receive(message)
        seed = mix(job.seed, job.incarnation) if job.incarnation else job.seed
        collector = Collector(job.build(job.envs), self.policy, job.gamma, seed, job.index)
        self.worker = Worker(job.index, collector, self.policy, self.refresh, job.staleness, job.explore, job.group)
        self.columns, self.asked = None, time.monotonic_ns()

    def receive(self, message: np.ndarray) -> str:
        """New weights, in a thread beside `collect` -> "applied", "old" or "need_full"."""
        with self.lock:
            return self.receiver.receive(message)

    def refresh(self) -> int:
        """The newest whole set of weights becomes the policy's, unless it is just being written."""
        if self.lock.acquire(blocking=False):
            try:
                if self.receiver.version not in (None, self.version):
                    self.policy.load_state_dict(self.standby)
                    self.version = self.receiver.version
            finally:
                self.lock.release()
        return self.version

    def collect(self, lease: Lease, rows: int, state: dict, least: int) -> dict[str, Any]:
        """One fragment, begun with weights of version `least` or newer -> its columns, rows and times, and the state after
        it. TimeoutError if they do not come within a minute."""
        end = time.monotonic() + NEWS
        while (version := self.receiver.version) is None or version < least:
            if time.monotonic() > end:
                raise TimeoutError(f"weights of version {least} did not come; here is {version} ({self.receiver.why})")
            time.sleep(0.001)
        begin = time.monotonic_ns()
        if self.columns is None or len(self.columns["done"]) < rows:
            self.columns = new_columns(self.worker.collector.layout(self.policy, self.job.explore), rows)
        self.worker.begin(replace(lease, made=0), self.columns, state or None)
        self.worker.collector.timer.take()
        while not self.worker.decide():
            pass
        made, oldest, end = self.worker.made, self.worker.oldest, time.monotonic_ns()
        self.worker.end()
        spent = self.worker.collector.timer.take()
        out = {"columns": {k: v[:made + k.startswith("obs/")] for k, v in self.columns.items()}, "rows": made,
               "oldest": oldest, "state": self.worker.state().get("collector", {}), "took": end - begin,
               "waited": begin - self.asked, "sim": spent.get("sim", 0.0), "policy": spent.get("policy", 0.0)}
        self.asked = end
        return out

    def node(self) -> str:
        """Where this actor runs."""
        import ray
        return ray.get_runtime_context().get_node_id()


@dataclass(slots=True)
class Actor:
    """One actor as the broker sees it."""

    job: Job
    handle: Any = None
    lease: "Lease | None" = None
    result: Any = None  # reference of the fragment to come
    news: Any = None  # reference of the answer to the last weights
    kept: dict | None = None  # the collector's state after its last fragment
    state: dict | None = None  # what a successor must be told
    deaths: int = 0
    restarts: int = 0
    again: float = 0.0
    since: float = 0.0
    leaving: bool = False  # it gets no more


def join(address: str, cpus: int):
    """Ray, joined to the cluster at `address`, or to one of `cpus` CPUs of its own ("") -> the module."""
    try:
        import ray
    except ImportError:
        raise MissingDependency("--backend ray needs Ray: pip install 'robo_rl[ray]'") from None
    if not ray.is_initialized():
        host, _, port = address.rpartition(":")
        try:
            if port.isdigit():  # Ray itself takes a minute to say so
                socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), 3).close()
            ray.init(address=address or None, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                     **({} if address else {"num_cpus": cpus}))
        except (OSError, ValueError, RuntimeError) as e:  # ConnectionError is an OSError
            raise UserError(f"cannot join the Ray cluster at {address or 'this machine'}: {e}; "
                            "start one with: ray start --head") from e
    return ray


class RayCrew:
    """One actor per job, each with a CPU of its own. `hang` [s] without a finished fragment, at least ten of them, ends one."""

    def __init__(self, jobs: list[Job], policy, address: str = "", hang: float = 60.0, link: float = LINK):
        self.ray, self.policy, self.hang, self.link = join(address, len(jobs) + 1), policy, hang, link
        self.actors, self.left = {j.index: Actor(j) for j in jobs}, {}
        self.kind = self.ray.remote(Collecting).options(num_cpus=1, max_restarts=0, max_task_retries=0, max_concurrency=2)

    @property
    def restarts(self) -> int:
        """Actors started again so far."""
        return sum(a.restarts for a in self.actors.values())

    def evict(self, folder: Path) -> None:
        """Actors end with the process that made them."""

    def start(self, feed: Crewed, resumed: bool) -> None:
        """Remember what is sent; `turn` starts the actors."""
        self.feed = feed
        self.sender = DeltaSender(self.tensors(), feed.version, link=self.link)
        self.message = self.whole = self.ray.put(self.sender.full())
        if resumed:
            for a in self.actors.values():
                a.job = replace(a.job, incarnation=int(time.time()) % 10**9)
        self.resize(feed.workers)

    def tensors(self) -> dict:
        return dict(self.policy.state_dict())

    def publish(self, version: int) -> None:
        """Send what changed to every actor; one that missed something gets everything."""
        self.message = self.ray.put(self.sender.send(version, self.tensors()))
        self.whole = None
        for a in self.actors.values():
            if a.handle is not None:
                a.news = a.handle.receive.remote(self.message)

    def full(self):
        """The newest weights, whole."""
        if self.whole is None:
            self.whole = self.ray.put(self.sender.full())
        return self.whole

    def wake(self) -> None:
        """Turns are short."""

    def resize(self, workers: int) -> None:
        """Actors 0 … `workers` - 1 from now on: others finish what they are at and leave, new ones join."""
        for i, a in self.actors.items():
            a.leaving = i >= workers
        for i in range(workers):
            if i not in self.actors:
                incarnation, kept = self.left.get(i, (self.actors[0].job.incarnation, None))
                job = replace(self.actors[0].job, index=i, envs=self.feed.envs[-1], incarnation=incarnation)
                self.actors[i] = Actor(job, kept=kept, state=kept)
                self.feed.join(i)

    def turn(self) -> None:
        """Start actors, hand out leases, take what comes back, bury the dead."""
        now = time.monotonic()
        for i, a in list(self.actors.items()):
            if a.leaving and a.lease is None:
                if a.handle is not None:
                    self.ray.kill(a.handle)
                self.feed.leave(i)
                self.left[i] = a.job.incarnation + 1, a.kept
                del self.actors[i]
                continue
            if a.handle is None and now >= a.again:
                a.handle, a.lease, a.since = self.kind.remote(a.job, self.full()), None, now
            if a.handle is not None and a.lease is None and not a.leaving and (lease := self.feed.lease(i)) is not None:
                a.lease, a.since = lease, now
                rows = self.feed.rows if self.feed.whole else a.lease.rows
                a.result = a.handle.collect.remote(a.lease, rows, a.state or {}, self.feed.version)
                a.state = None  # it knows from now on
        waiting = {a.result: a for a in self.actors.values() if a.lease is not None}
        news = {a.news: a for a in self.actors.values() if a.news is not None}
        refs = [*waiting, *news]
        if not refs:
            time.sleep(0.02)
            return
        ready, _ = self.ray.wait(refs, num_returns=1, timeout=0.2)
        for ref in ready:
            a = waiting.get(ref) or news[ref]
            try:
                got = self.ray.get(ref)
            except self.ray.exceptions.RayError as e:
                self._died(a, e)
                continue
            if ref in news:
                a.news = a.handle.receive.remote(self.full()) if got == "need_full" else None
            else:
                self._finished(a, got)
        for a in self.actors.values():
            if a.lease is not None and now - a.since > 10 * self.hang:
                self._died(a, TimeoutError(f"no fragment for {10 * self.hang:.0f} s"))

    def end(self) -> None:
        """Let go of the actors (and of a cluster of our own)."""
        for a in self.actors.values():
            if a.handle is not None:
                with contextlib.suppress(Exception):
                    self.ray.kill(a.handle)

    def _finished(self, a: Actor, got: dict) -> None:
        lease, head = a.lease, self.feed.slots.head
        columns = self.feed.slots.columns(lease.slot, a.job.index)
        for k, v in got["columns"].items():
            columns[k][:len(v)] = v
        end = time.monotonic_ns()
        for name, value in (("rows", got["rows"]), ("oldest", got["oldest"]), ("begin", end - got["took"]), ("end", end),
                            ("sim_ns", int(got["sim"] * 1e9)), ("policy_ns", int(got["policy"] * 1e9)),
                            ("wait_ns", got["waited"])):
            head[name][lease.slot] = value
        a.kept, a.lease, a.result = got["state"], None, None
        if self.feed.sealed(a.job.index, f"worker{a.job.index}", lease.uid, got["rows"], got["oldest"], False):
            a.deaths = 0

    def _died(self, a: Actor, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self.ray.kill(a.handle)
        a.deaths, a.restarts = a.deaths + 1, a.restarts + 1
        a.handle = a.lease = a.result = a.news = None
        a.state, a.again = a.kept, time.monotonic() + BACK_OFF[min(a.deaths - 1, len(BACK_OFF) - 1)]
        a.job = replace(a.job, incarnation=a.job.incarnation + 1)
        self.feed.lost(a.job.index)
        if a.deaths >= DEATHS:
            self.feed.give_up(f"worker{a.job.index} ended {a.deaths} times in a row. Its last words: "
                              f"{str(error).strip()[-2000:]}")
