"""Workers as Ray actors, on any machine of a cluster: the same worker, ledger and rollout buffer with other
transports.

An actor collects a whole fragment for one lease and sends it; the learner's side writes it into its slot, and
from then on it is in the journal. An actor or a node that dies costs the fragment it was making: its
successor starts from the state that came with the one before. It gets its first lease once it has a place in
the cluster; one that waits for a place has no share of the work meanwhile.

Weights travel as deltas, sparse where that is faster over the link, while the actor collects, and are swapped
in between two decisions. They spread as a tree: the learner sends to `FAN` machines, one actor of each passes
them on to `FAN` more and to its neighbours on the machine. What is lost with an actor on the way is noticed
at the next lease and sent whole.
"""

import contextlib
import importlib.util
import os
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.child import HANG
from robo_rl.errors import LostDaemon, MissingDependency, UserError
from robo_rl.noise import mix
from robo_rl.rollout import OBS, Collector, Columns, new_columns
from robo_rl.runtime import snapshot
from robo_rl.runtime.deltas import DeltaReceiver, DeltaSender
from robo_rl.runtime.rollout_buffer import Lease, RowSums, finite
from robo_rl.runtime.worker import Job, Worker
from robo_rl.runtime.worker_pool import BACK_OFF, DEATHS, WorkerPoolFeed

NEWS = 2.0  # seconds an actor waits for the weights it should begin with before it asks for all of them
ASKS = 30  # times in a row that it may ask
PLACE = 10.0  # seconds an actor may wait for a place in the cluster before its share is given to the others
NOBODY = 300.0  # seconds after which a run ends if no actor has a place
FAN = 4  # machines that one machine sends weights to
DAEMONS = ("raylet", "gcs_server")
# times to start a cluster of our own: a raylet gives up where its helpers take more than 15 s, as on a busy
# machine
STARTS = 3
LINK = 1.25e9  # B/s between machines unless told otherwise: 10 Gbit/s


class RayWorker:
    """The actor: a worker, its columns, and the newest weights that came. It has a place as soon as it
    answers; the sim is built with its first lease."""

    def __init__(self, job: Job):
        import torch

        from robo_rl.policies import make_policy

        torch.set_num_threads(job.threads)
        self.job, self.policy = job, make_policy(job.options, job.spec, 0).eval()
        self.standby = {k: v.clone() for k, v in self.policy.state_dict().items()}
        self.lock, self.early = threading.Lock(), []  # early: came before what they build on
        self.receiver, self.version = DeltaReceiver(self.standby, "always"), -1
        self.worker: Worker | None = None
        self.columns: Columns | None = None

    def _build(self) -> Worker:
        job = self.job
        self.refresh()
        seed = mix(job.seed, job.incarnation) if job.incarnation else job.seed
        collector = Collector(job.build(job.envs), self.policy, job.gamma, seed, job.index)
        self.worker = Worker(
            job.index, collector, self.policy, self.refresh, job.staleness, job.explore, job.group
        )
        self.asked = time.monotonic_ns()
        return self.worker

    def receive(self, message: np.ndarray, below: tuple = ()) -> str:
        """New weights, in a thread beside `collect` -> "applied", "old" or "need_full". They are passed on to
        `below`, pairs of an actor and those below it, first."""
        if below:
            import ray

            again = ray.put(message)  # from this machine
            for handle, further in below:
                handle.receive.remote(again, further)
        with self.lock:
            said = self.receiver.receive(message)
            if said == "need_full":
                self.early = [*self.early[-3:], message]
            elif said == "applied":
                early, self.early = self.early, []
                for m in early:
                    self.receiver.receive(m)
            return said

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
        """One fragment, begun with weights of version `least` or newer -> its columns, rows and times, and
        the state after it; {"lacks": why} if they do not come within `NEWS` seconds."""
        clock = snapshot.AwakeClock(NEWS / 4)
        while (version := self.receiver.version) is None or version < least:
            if clock.now() > NEWS:
                return {
                    "lacks": f"weights of version {least} did not come; here is {version} "
                    f"({self.receiver.why})"
                }
            time.sleep(0.001)
        worker = self._build() if self.worker is None else self.worker
        begin, columns = time.monotonic_ns(), self.columns
        if columns is None or len(columns["done"]) < rows:
            columns = self.columns = new_columns(worker.collector.layout(self.policy, self.job.explore), rows)
            self.sums = RowSums(columns)
        worker.begin(replace(lease, made=0), columns, state or None)
        worker.collector.timer.take()
        while not worker.decide():
            pass
        made, oldest, end = worker.made, worker.oldest, time.monotonic_ns()
        worker.end()
        spent = worker.collector.timer.take()
        out = {
            "columns": {k: v[: made + k.startswith(OBS)] for k, v in columns.items()},
            "rows": made,
            "bad": finite(columns, made),
            "sums": [self.sums.of(t, lease.salt) for t in range(made)],
            "oldest": oldest,
            "state": worker.state().get("collector", {}),
            "took": end - begin,
            "waited": begin - self.asked,
            "sim": spent.get("sim", 0.0),
            "policy": spent.get("policy", 0.0),
        }
        self.asked = end
        return out

    def node(self) -> str:
        """Where this actor runs."""
        import ray

        return ray.get_runtime_context().get_node_id()


@dataclass(slots=True)
class RayWorkerHandle:
    """One actor as the broker knows it."""

    job: Job
    handle: Any = None
    lease: "Lease | None" = None
    placed: Any = None  # reference of its machine, then the machine: it may have work
    here: bool = False  # it has a place in the cluster
    away: bool = False  # it waits so long for one that its share is the others'
    result: Any = None  # reference of the fragment to come
    asks: int = 0  # times in a row that weights did not come
    kept: dict | None = None  # the collector's state after its last fragment
    state: dict | None = None  # what a successor must be told
    deaths: int = 0
    restarts: int = 0
    again: float = 0.0
    since: float = 0.0
    leaving: bool = False  # it gets no more


def check(address: str) -> None:
    """Raise UserError where Ray is missing, an address is none, nobody listens at host:port, or no cluster
    runs on this machine ("auto"). Ray itself takes a minute to say so, and the process that joins must be
    the learner: Ray ends it if the daemon of this machine dies, not the guard that starts it again."""
    if importlib.util.find_spec("ray") is None:
        raise MissingDependency("--backend ray needs Ray: pip install 'robo_rl[ray]'")
    if address == "auto" and "raylet" not in {process_state(pid)[0] for pid in processes()}:
        address = os.environ.get("RAY_ADDRESS", "")
        if not address:
            raise UserError(
                "--ray-address auto finds no Ray cluster on this machine: start one with: ray start --head, "
                "or join this machine to one with: ray start --address HOST:PORT"
            )
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--ray-address must be auto or HOST:PORT, of ray start --head, got {address!r}")
    try:
        socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), 3).close()
    except OSError as e:
        raise UserError(
            f"cannot join the Ray cluster at {address}: {e}; start one with: ray start --head"
        ) from e


def join(address: str, cpus: int):
    """Ray, joined to the cluster at `address`, or to one of `cpus` CPUs of its own ("") -> the module."""
    # twenty lines of log; the guard says it in one
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^Raylet is terminated")
    try:
        import ray
    except ImportError:
        raise MissingDependency("--backend ray needs Ray: pip install 'robo_rl[ray]'") from None
    if ray.is_initialized():
        return ray
    check(address)
    for left in reversed(range(1 if address else STARTS)):
        try:
            # Ray's own workers would run at niceness 15: on a busy machine they starve where the process
            # pool's do not.
            options: dict[str, Any] = (
                {"address": address}
                if address
                else {"address": "local", "num_cpus": cpus, "_system_config": {"worker_niceness": 0}}
            )
            options["logging_level"] = "ERROR"
            ray.init(include_dashboard=False, log_to_driver=False, **options)
            break
        except Exception as e:  # noqa: BLE001 (Ray raises whatever there is, also bare Exception, where a daemon does not start)
            said = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)[
                :300
            ].strip()
            ray.shutdown()
            if left:
                continue
            if not address:
                raise UserError(
                    f"cannot start Ray on this machine: {said}; look at its logs in "
                    "/tmp/ray/session_latest/logs, or leave --backend ray out"
                ) from e
            # Ray hides why
            token = (
                "" if "RAY_AUTH_MODE" in os.environ else "; if it asks for a token, set RAY_AUTH_MODE=token"
            )
            raise UserError(
                f"cannot join the Ray cluster at {address}: {said}; start one with: ray start --head, or "
                f"join this machine to one with: ray start --address HOST:PORT{token}"
            ) from e
    return ray


def own_daemons() -> dict[int, str]:
    """{process id: name} of the Ray daemons that this process started: with one of them dead its cluster
    answers no more, and Ray does not always end the process that waits for it."""
    found = {}
    for pid in processes():
        name, state, parent = process_state(pid)
        if parent == os.getpid() and name in DAEMONS and state != "Z":
            found[pid] = name
    return found


def processes() -> list[int]:
    """Ids of the processes of this machine, on Linux."""
    return [int(p.name) for p in Path("/proc").glob("[0-9]*")]


def process_state(pid: int) -> tuple[str, str, int]:
    """(name, state, parent) of a process by Linux's /proc; ("", "Z", 0) where there is none."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return "", "Z", 0
    state, parent = rest.split()[:2]
    return head.partition("(")[2], state, int(parent)


def tree(nodes: dict[str, list], fan: int = FAN) -> list[tuple]:
    """Who passes weights on to whom: machine i to machines fan·(i+1) … fan·(i+1) + fan - 1 and to the rest of
    its own actors.

    `nodes` maps machines to their actors -> (actor, those below it) of the machines 0 … fan - 1, that the
    learner sends to.
    """
    groups = list(nodes.values())

    def below(i: int) -> tuple:
        first = fan * (i + 1)
        further = tuple((groups[j][0], below(j)) for j in range(first, min(first + fan, len(groups))))
        return further + tuple((other, ()) for other in groups[i][1:])

    return [(groups[i][0], below(i)) for i in range(min(fan, len(groups)))]


class RayPool:
    """One actor per job, each with a CPU of its own. `hang` [s] without a finished fragment, at least ten of
    them, ends one."""

    def __init__(
        self,
        jobs: list[Job],
        policy,
        address: str = "",
        hang: float = HANG,
        link: float = LINK,
        *,
        fan: int = FAN,
        place: float = PLACE,
    ):
        before = own_daemons()
        self.ray, self.policy, self.hang, self.link = join(address, len(jobs) + 1), policy, hang, link
        self.fan, self.place = fan, place
        # none where it joined
        self.daemons = {pid: name for pid, name in own_daemons().items() if pid not in before}
        self.actors, self.left = {j.index: RayWorkerHandle(j) for j in jobs}, {}
        self.kind = self.ray.remote(RayWorker).options(
            num_cpus=1, max_restarts=0, max_task_retries=0, max_concurrency=2
        )
        self.lock = threading.Lock()  # the learner's thread publishes, the broker's asks for the whole
        self.clock = snapshot.AwakeClock(min(1.0, hang / 4))
        self.lonely = 0.0  # when somebody last had a place
        self.lacked = 0  # times that an actor asked for the whole weights

    @property
    def restarts(self) -> int:
        """Actors restarted so far."""
        return sum(a.restarts for a in list(self.actors.values()))

    def evict(self, folder: Path) -> None:
        """Actors end with the process that made them."""

    def start(self, feed: WorkerPoolFeed, resumed: bool) -> None:
        """Remember what is sent; `turn` starts the actors."""
        self.feed = feed
        self.sender = DeltaSender(self.tensors(), feed.version, link=self.link)
        self.whole = self.ray.put(self.sender.full())
        if resumed:
            for a in self.actors.values():
                a.job = replace(a.job, incarnation=int(time.time()) % 10**9)
        self.resize(feed.workers)

    def tensors(self) -> dict:
        return dict(self.policy.state_dict())

    def publish(self, version: int) -> None:
        """Send what changed down the tree."""
        with self.lock:
            message, self.whole = self.ray.put(self.sender.send(version, self.tensors())), None
        nodes: dict[str, list] = {}
        for a in list(self.actors.values()):
            if a.here and a.handle is not None:
                nodes.setdefault(a.placed, []).append(a.handle)
        for handle, below in tree(nodes, self.fan):
            handle.receive.remote(message, below)

    def full(self):
        """The newest weights, whole."""
        with self.lock:
            if self.whole is None:
                self.whole = self.ray.put(self.sender.full())
            return self.whole

    def wake(self) -> None:
        """Turns are short."""

    def resize(self, workers: int) -> None:
        """Run actors 0 … `workers` - 1 from now on: others finish their fragments and leave, new ones
        join."""
        for i, a in self.actors.items():
            a.leaving = i >= workers
        for i in range(workers):
            if i not in self.actors:
                incarnation, kept = self.left.get(i, (self.actors[0].job.incarnation, None))
                job = replace(self.actors[0].job, index=i, envs=self.feed.envs[-1], incarnation=incarnation)
                self.actors[i] = RayWorkerHandle(job, kept=kept, state=kept)
                self.feed.join(i)

    def check(self) -> None:
        for pid, name in self.daemons.items():
            if process_state(pid)[1] in "ZX":
                raise LostDaemon(
                    f"Ray's {name} on this machine died, and its cluster with it; go on with --resume"
                )

    def turn(self) -> None:
        """Start actors, hand out leases, store finished fragments, restart actors that died."""
        for i, a in list(self.actors.items()):
            self._look_after(i, a)
        waiting = {a.result: a for a in self.actors.values() if a.lease is not None}
        waiting |= {a.placed: a for a in self.actors.values() if a.handle is not None and not a.here}
        if not waiting:
            time.sleep(0.02)
            return
        some, rest = self.ray.wait(list(waiting), num_returns=1, timeout=0.2)
        more = self.ray.wait(rest, num_returns=len(rest), timeout=0)[0] if some and rest else []
        for ref in (*some, *more):
            a = waiting[ref]
            try:
                got = self.ray.get(ref, timeout=self.hang)  # it is here, unless its machine died in between
            except self.ray.exceptions.RayError as e:
                self._died(a, e)
                continue
            if ref == a.placed:
                self._placed(a, got)
            elif "lacks" in got:
                self._lacks(a, got["lacks"])
            else:
                self._finished(a, got)
        self._watch()

    def _look_after(self, i: int, a: RayWorkerHandle) -> None:
        """Let an actor leave, start, or have work."""
        if a.leaving and a.lease is None:
            if a.handle is not None:
                self.ray.kill(a.handle)
            self.feed.leave(i)
            self.left[i] = a.job.incarnation + 1, a.kept
            del self.actors[i]
            return
        if a.handle is None and time.monotonic() >= a.again:
            a.handle, a.lease, a.since, a.here = self.kind.remote(a.job), None, self.clock.now(), False
            a.placed = a.handle.node.remote()
        if a.here and a.lease is None and not a.leaving and (lease := self.feed.lease(i)) is not None:
            a.lease, a.since = lease, self.clock.now()
            self._ask(a)

    def _ask(self, a: RayWorkerHandle) -> None:
        assert a.lease is not None
        rows = self.feed.rows if self.feed.whole else a.lease.rows
        a.result = a.handle.collect.remote(a.lease, rows, a.state or {}, self.feed.version)

    def _placed(self, a: RayWorkerHandle, node: str) -> None:
        """An actor has a place."""
        a.placed, a.here = node, True
        a.handle.receive.remote(self.full())
        if a.away:
            a.away = False
            self.feed.join(a.job.index)

    def _lacks(self, a: RayWorkerHandle, why: str) -> None:
        """An actor waits for weights: it gets them whole."""
        a.asks, self.lacked = a.asks + 1, self.lacked + 1
        if a.asks > ASKS:
            return self._died(a, TimeoutError(why))
        a.handle.receive.remote(self.full())
        self._ask(a)

    def _watch(self) -> None:
        """End actors that finish nothing for too long; give the share of those without a place to the
        others."""
        now = self.clock.now()
        for a in self.actors.values():
            if a.lease is not None and now - a.since > 10 * self.hang:
                self._died(a, TimeoutError(f"no fragment for {10 * self.hang:.0f} s"))
            elif (
                a.handle is not None
                and not a.here
                and not a.away
                and now - a.since > self.place
                and any(other.here for other in self.actors.values())
            ):
                a.away = True
                self.feed.leave(a.job.index)
        if any(a.here for a in self.actors.values()):
            self.lonely = now
        elif now - self.lonely > NOBODY:
            have = self.ray.cluster_resources().get("CPU", 0)
            self.feed.give_up(
                f"no actor found a place in the Ray cluster within {NOBODY:.0f} s: each needs a CPU, and the "
                f"cluster has {have:.0f}; add machines with ray start --address …, or use fewer --workers"
            )

    def end(self) -> None:
        """End the actors (and a cluster of our own)."""
        for a in self.actors.values():
            if a.handle is not None:
                with contextlib.suppress(Exception):
                    self.ray.kill(a.handle)

    def _finished(self, a: RayWorkerHandle, got: dict) -> None:
        lease, buffer = a.lease, self.feed.buffer
        assert lease is not None
        columns, head = buffer.columns(lease.slot, a.job.index), buffer.head
        for k, v in got["columns"].items():
            columns[k][: len(v)] = v
        buffer.sums(lease.slot, a.job.index)[: got["rows"]] = got["sums"]
        end = time.monotonic_ns()
        for name, value in (
            ("rows", got["rows"]),
            ("oldest", got["oldest"]),
            ("begin", end - got["took"]),
            ("end", end),
            ("sim_ns", int(got["sim"] * 1e9)),
            ("policy_ns", int(got["policy"] * 1e9)),
            ("wait_ns", got["waited"]),
        ):
            head[name][lease.slot] = value
        # it knows its state from now on
        a.kept, a.state, a.lease, a.result, a.asks = got["state"], None, None, None, 0
        if self.feed.sealed(
            a.job.index, f"worker{a.job.index}", lease.uid, got["rows"], got["oldest"], False, got["bad"]
        ):
            a.deaths = 0

    def _died(self, a: RayWorkerHandle, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self.ray.kill(a.handle)
        a.deaths, a.restarts = a.deaths + 1, a.restarts + 1
        a.handle = a.lease = a.result = a.placed = None
        a.here, a.asks = False, 0
        a.state, a.again = a.kept, time.monotonic() + BACK_OFF[min(a.deaths - 1, len(BACK_OFF) - 1)]
        a.job = replace(a.job, incarnation=a.job.incarnation + 1)
        self.feed.lost(a.job.index)
        own = isinstance(error, self.ray.exceptions.RayTaskError)  # not that of its machine
        if own and (
            words := self.feed.errors.add(f"worker{a.job.index}", str(error).strip().rpartition("\n")[2])
        ):
            self.feed.give_up(words)
        if a.deaths >= DEATHS:
            self.feed.give_up(
                f"worker{a.job.index} ended {a.deaths} times in a row. Its last words: "
                f"{str(error).strip()[-2000:]}"
            )
