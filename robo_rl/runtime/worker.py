"""The rollout role: one vector env, one decision at a time, into the slot of its present lease.

`Worker` knows no process and no clock; `robo_rl.runtime.in_process` steps it by hand, `main` runs it as a
process of its own. Weights change between decisions only, and each decision carries the version that really
acted.
"""

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from robo_rl.noise import mix
from robo_rl.options import PolicyOptions, RolloutOptions
from robo_rl.policies import ObsSpec, Policy
from robo_rl.rollout import Collector, Columns
from robo_rl.rollout_control.group_plan import GroupShape
from robo_rl.runtime import snapshot
from robo_rl.runtime.branches import make_control
from robo_rl.runtime.candidates import make_cheap
from robo_rl.runtime.episode_slots import EpisodeSlots
from robo_rl.runtime.published import follow
from robo_rl.runtime.rollout_buffer import Lease, RolloutBuffer, finite
from robo_rl.runtime.server import PolicyServerClient
from robo_rl.runtime.start_file import StartFile


class Worker:
    """A collector, the policy that acts in it, and the fragment it is at.

    `refresh()` makes the newest weights the policy's own and returns their version. `group` > 0: fragments
    are whole episodes, `group` of them from each start. With `ask` (slot, worker, row, key -> version)
    another process decides.
    """

    def __init__(
        self,
        index: int,
        collector: Collector,
        policy: Policy,
        refresh: Callable[[], int],
        staleness: int,
        explore: bool = True,
        group: int = 0,
        ask: Callable[[int, int, int, int], int] | None = None,
    ):
        self.index, self.collector, self.policy, self.refresh = index, collector, policy, refresh
        self.staleness, self.explore, self.group, self.ask = staleness, explore, group, ask
        self.lease: Lease | None = None
        self.last, self.rows = -1, 0  # uid of the fragment before, decisions in it

    def begin(self, lease: Lease, columns: Columns, state: dict | None = None) -> None:
        """Take up a lease; `state` is the collector's at its start, if another worker began it."""
        self.lease, self.columns, self.made = lease, columns, 0
        self.version = self.oldest = -1
        if state:
            self.collector.set_state(state)
        if self.group:
            seed, n = self.collector.seed, self.collector.n // self.group
            # not the uid: which of two workers is first with a lease is a matter of pace
            at = self.collector.decision
            chooser = self.collector.chooser
            starts = (
                [mix(seed, 5, self.index, at, i) >> 32 for i in range(n)]
                if chooser is None
                else columns["start"][0, :: self.group]
                if lease.made
                else chooser.draw(mix(seed, 5, self.index, at), n)
            )
            self.collector.begin(np.repeat(starts, self.group))
        # drive the env where the other one was: the same actions from the same state
        for t in range(lease.made):
            known = (
                columns["start"][t + 1] if self.collector.chooser is not None and t + 1 < lease.made else None
            )
            self.collector.act(self._commands(t), columns, t, bool(self.group), known)
        self.made = lease.made
        if self.made:
            self.version = int(columns["version"][self.made - 1].max())
            self.oldest = int(columns["version"][: self.made].min())

    def decide(self) -> bool:
        """One decision in every env -> whether the fragment is finished."""
        lease, c = self.lease, self.collector
        assert lease is not None
        if not self.finished():
            if self.ask is None:
                self.version = self.refresh()
                with c.threads():
                    c.decide(
                        self.policy, self.columns, self.made, self.version, self.explore, bool(self.group)
                    )
            else:
                key = c.observe(self.columns, self.made)
                self.version = self.ask(lease.slot, self.index, self.made, key)
                c.timer.add("policy")
                c.act(self._commands(self.made), self.columns, self.made, bool(self.group))
            self.made += 1
            self.oldest = self.version if self.oldest < 0 else min(self.oldest, self.version)
        overtaken = self.staleness > 0 and lease.due < self.version >= self.oldest + self.staleness
        return self.finished() or (overtaken and not self.group)

    def _commands(self, t: int) -> np.ndarray:
        """Actions [N,E,A] of the chunks in row t."""
        return self.policy.commands(torch.from_numpy(self.columns["x0"][t]).flatten(1)).numpy()

    def finished(self) -> bool:
        assert self.lease is not None
        return self.made >= self.lease.rows or (bool(self.group) and not self.collector.alive.any())

    def end(self) -> None:
        """The fragment is handed over."""
        assert self.lease is not None
        self.last, self.rows, self.lease = self.lease.uid, self.made, None
        self.collector.alive[:] = True

    def state(self) -> dict:
        """What another worker needs to go on: the collector's state between two fragments ({}: no
        snapshots)."""
        state = self.collector.state()
        return {"after": self.last, "rows": self.rows, "collector": state} if state else {}


# ---- as a process ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a worker process is told once; it travels by pickle to a child of our own."""

    index: int
    build: Callable[[int], object]  # number of envs -> vector env
    envs: int
    options: PolicyOptions
    spec: ObsSpec
    gamma: float
    seed: int
    staleness: int
    explore: bool
    group: int
    folder: Path  # slots.bin, worker<i>.state, worker<i>.stack
    weights: Path
    incarnation: int = 0
    threads: int = 1
    episode_slots: bool = False  # groups whose episodes wait for no other (robo_rl.runtime.episode_slots)
    tree: RolloutOptions | None = None  # groups are trees (robo_rl.runtime.branches)
    shape: GroupShape | None = None  # the sizes of groups are decided (robo_rl.runtime.planned)
    choose: RolloutOptions | None = None  # groups are chosen among candidates (robo_rl.runtime.candidates)
    served: bool = False  # a policy server decides
    starts: bool = False  # the learner says where episodes begin (robo_rl.runtime.start_file)


def main(job: Job, connection) -> None:
    """Collect until told to stop or orphaned. What else ends the process is sent (`snapshot.last_words`)."""
    if job.index:
        warnings.simplefilter("ignore", UserWarning)  # worker 0 says it for all
    try:
        with snapshot.at_work(job.folder, f"worker{job.index}", job.threads):
            _loop(job, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the learner is gone; what was made is in the slot
    except BaseException as e:  # noqa: BLE001 (the process ends; its last words go to the supervisor)
        connection.send(snapshot.last_words(e))


def _following(job: Job) -> tuple[Policy, Callable[[], int]]:
    """The policy with the newest weights, and `refresh()`, which swaps newer ones in -> the version it has
    now."""
    reader, policy = follow(job.weights, job.options, job.spec)
    version = reader.current

    def refresh() -> int:
        nonlocal version
        if reader.version() != version:
            new = reader.fetch()
            if new is not None:
                reader.swap(policy)
                version = new
        return version

    return policy, refresh


def _loop(job: Job, connection) -> None:
    parent, where = os.getppid(), job.folder / f"worker{job.index}.state"
    policy, refresh = _following(job)

    def orphaned() -> bool:
        return os.getppid() != parent

    remote = PolicyServerClient(job.folder, orphaned) if job.served else None
    env = job.build(job.envs)
    saved = snapshot.load(where) if job.incarnation else {}
    seed = job.seed if saved or not job.incarnation else mix(job.seed, job.incarnation)
    collector = Collector(
        env, policy, job.gamma, seed, job.index, StartFile(job.folder) if job.starts else None
    )
    buffer = RolloutBuffer.open(job.folder / "slots.bin")
    if job.episode_slots:
        slots = EpisodeSlots(
            job.index,
            collector,
            policy,
            refresh,
            job.group,
            job.explore,
            make_control(job.tree, collector),
            job.shape,
            *make_cheap(job.choose, policy),
        )
        return _play(slots, connection, buffer, where, saved, orphaned)
    worker = Worker(
        job.index, collector, policy, refresh, job.staleness, job.explore, job.group, remote and remote.ask
    )
    if not saved:
        _save(where, worker)
    connection.send(("ready", job.index, os.getpid()))
    asked = time.monotonic_ns()
    leases = _told(connection, orphaned)
    while leases is not None:
        if not leases:
            connection.send(("wants", 1))
            leases = _told(connection, orphaned)
            continue
        lease = leases.pop(0)
        head, columns = buffer.head, buffer.columns(lease.slot, job.index)
        state = None
        if saved:  # the successor of a worker that died, at its first lease
            if saved["after"] == lease.uid:  # it died between the last decision and the hand-over
                worker.collector.set_state(saved["collector"])
                worker.last = lease.uid
                connection.send(_handed_over(lease, columns, lease.made < saved["rows"]))
                saved = {}
                continue
            if -1 != int(head["since"][lease.slot]) != saved["collector"]["decision"]:
                saved = {}  # a power cut brought back an older file
                worker.collector.seed = mix(job.seed, job.incarnation)
        if lease.made and not saved:  # no snapshots: what was made stays, the episodes in it are cut
            connection.send(_handed_over(lease, columns, True))
            continue
        if saved:
            state, saved = saved["collector"], {}
        begin = time.monotonic_ns()
        head["wait_ns"][lease.slot], head["begin"][lease.slot] = begin - asked, begin
        worker.begin(lease, columns, state)
        head["since"][lease.slot] = worker.collector.decision - worker.made
        buffer.sign(lease.slot, job.index, 0, worker.made)  # what was driven through was written again
        worker.collector.timer.take()
        over = lease.made >= lease.rows
        while not over:
            over = worker.decide()
            if worker.made > head["rows"][lease.slot]:
                buffer.sign(lease.slot, job.index, worker.made - 1)
            head["oldest"][lease.slot] = worker.oldest
            head["rows"][lease.slot] = worker.made  # counted once it is written
            head["beat"][lease.slot] = time.monotonic_ns()
            if orphaned():
                return
        spent = worker.collector.timer.take()
        for stage in ("sim", "policy"):
            head[f"{stage}_ns"][lease.slot] = int(spent.get(stage, 0) * 1e9)
        asked = head["end"][lease.slot] = time.monotonic_ns()
        made, oldest = worker.made, worker.oldest
        worker.end()
        _save(where, worker)
        connection.send(("sealed", lease.uid, made, oldest, False, finite(columns, made)))


def _handed_over(lease: Lease, columns: Columns, cut: bool) -> tuple:
    """What a successor says of a fragment that its predecessor left; `cut`: it is not whole."""
    oldest = int(columns["version"][: lease.made].min()) if lease.made else 0
    return "sealed", lease.uid, lease.made, oldest, cut, finite(columns, lease.made)


def _told(connection, orphaned: Callable[[], bool]) -> list[Lease] | None:
    """The next message of the broker: more leases, or None for the end."""
    while not connection.poll(1.0):
        if orphaned():
            return None
    return connection.recv()


def _play(
    episode_slots: EpisodeSlots,
    connection,
    buffer: RolloutBuffer,
    where: Path,
    saved: dict,
    orphaned: Callable[[], bool],
) -> None:
    """Run episodes of groups until told to end: ask for a group where an env is idle, hand over groups that
    are whole."""

    def columns(lease: Lease) -> Columns:
        return buffer.columns(lease.slot, episode_slots.index)

    connection.send(("ready", episode_slots.index, os.getpid()))
    leases = _told(connection, orphaned)
    if leases is None:
        return
    episode_slots.resume(saved, [(lease, columns(lease)) for lease in leases])
    head, asked, idle, began = buffer.head, 0, 0, time.monotonic_ns()
    saved_at = took = 0.0
    episode_slots.collector.timer.take()
    while not orphaned():
        if (wants := episode_slots.wants()) > asked:
            connection.send(("wants", wants - asked))
            asked = wants
        now = time.monotonic_ns()
        while connection.poll(0 if episode_slots.busy() else 1.0):
            leases = connection.recv()
            if leases is None:
                return
            for lease in leases:
                episode_slots.begin(lease, columns(lease))
            asked -= len(leases)
        idle += time.monotonic_ns() - now
        if not episode_slots.busy():
            continue
        held = {uid: g.lease.slot for uid, g in episode_slots.groups.items()}
        whole = episode_slots.decide()
        head["beat"][list(held.values())] = time.monotonic_ns()
        if time.monotonic() - saved_at > 20 * took:  # a kill costs what was done since
            saved_at = time.monotonic()
            _save(where, episode_slots)
            took, saved_at = time.monotonic() - saved_at, time.monotonic()
        spent = episode_slots.collector.timer.take() if whole else {}
        for uid, rows, oldest in whole:
            acting = spent.get("policy", 0) + spent.get("candidates", 0)
            times = (int(spent.get("sim", 0) * 1e9), int(acting * 1e9), idle, began, time.monotonic_ns())
            for name, value in zip(("sim_ns", "policy_ns", "wait_ns", "begin", "end"), times, strict=False):
                head[name][held[uid]] = value
            buffer.sign(held[uid], episode_slots.index, 0, rows)
            connection.send(
                (
                    "sealed",
                    uid,
                    rows,
                    oldest,
                    False,
                    finite(buffer.columns(held[uid], episode_slots.index), rows),
                )
            )
            spent, idle, began = {}, 0, times[-1]


def _save(where: Path, worker: Worker | EpisodeSlots) -> None:
    state = worker.state()
    if state:
        snapshot.save(where, state)
