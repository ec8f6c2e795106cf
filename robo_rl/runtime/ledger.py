"""Who may collect, what is finished, what is trained on: counts and states, no clock, no files, no processes.

Work comes in *fragments*: up to T decisions of the n envs of one worker, in a slot of its own. Everything is
counted in *samples* (decisions times envs).

    lease -> LEASED --seal--> READY --take--> TAKEN --commit--> (slot free again)
               |  worker dies: attempt + 1, the same worker goes on at its last decision
               +-- nothing usable --> refused, its samples are given back

Admission (AReaL's arithmetic): with a batch of B samples and staleness bound eta,

    admitted <= learnt + (eta + 1) B,        learnt = samples of the batches behind the present version (v B,
                                             or more where fragments do not add up to B)

so at most eta batches wait or are being made beyond the one the learner needs. eta = 0 is synchronous: every
worker then has a fixed share of every batch. Fragments are taken oldest first as they are finished
(completion order); the bound itself is kept by the learner, which trains on no decision more than eta
versions old (`robo_rl.runtime.feed`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from robo_rl.errors import in_range

LEASED, READY, TAKEN = "leased", "ready", "taken"


@dataclass(slots=True)
class Fragment:
    """One lease. `due` is the batch it would be in if work finished in the order it began."""

    uid: int
    slot: int
    worker: int
    decisions: int  # granted
    envs: int
    due: int
    state: str = LEASED
    attempt: int = 0
    made: int = 0  # decisions finished
    rows: int = 0  # rows of its slot that are filled (whole episodes count as one decision of many rows)
    oldest: int = 0  # least version in it
    batch: int = -1
    start: int = 0  # of a group whose size is decided (`robo_rl.runtime.planned`)

    @property
    def samples(self) -> int:
        """What it counts: granted, or made once it is finished."""
        return (self.decisions if self.state == LEASED else self.made) * self.envs


class Ledger:
    """The one owner of work. `shares` maps each worker to (decisions, envs) of its fragment."""

    def __init__(self, batch: int, staleness: int, slots: int, shares: dict[int, tuple[int, int]]):
        in_range("--max-staleness", staleness, 0, 10**6)
        self.batch, self.staleness, self.shares = batch, staleness, dict(shares)
        self.widest = max(envs for _, envs in shares.values())  # a lease is rounded up to one decision
        self.round_samples = sum(d * n for d, n in shares.values())  # samples of one fragment of each worker
        self.free = list(range(slots))[::-1]
        self.fragments: dict[int, Fragment] = {}
        self._index()
        self.version = self.admitted = self.next_uid = self.next_batch = 0
        self.used: dict[int, int] = {}  # samples leased per worker since the last version (staleness 0)
        self.replay: list[list[int]] = []  # uids of batches that a learner took and then died over, in order
        self.taken = self.learnt = self.committed = self.refused = 0  # samples
        # after a crash, or under a bound that was lowered, more may be admitted than the version allows
        self.recovered = False

    # ---- collecting

    def held(self, worker: int) -> list[Fragment]:
        """What the worker has not finished."""
        return list(self.leased.get(worker, {}).values())

    def lease(
        self, worker: int, more: bool = False, group: "Callable[[int], tuple[int, int]] | None" = None
    ) -> Fragment | None:
        """The worker's unfinished fragment, else a new one, else None: it must wait. `more`: one beside those
        it has. `group(room)` says where a group begins and of how many episodes it is; such fragments are
        nobody's fixed share."""
        if not more and (held := self.held(worker)):
            return held[0]
        decisions, envs = self.shares[worker]
        room = self.learnt + (self.staleness + 1) * self.batch - self.admitted
        if self.staleness == 0 and group is None and (rounds := self.rounds()):
            room = min(room, rounds * decisions * envs - self.used.get(worker, 0))
        if room <= 0 or not self.free:
            return None
        start, envs = (0, envs) if group is None else group(room)
        self.widest = max(self.widest, envs)
        decisions = min(decisions, -(-room // envs))
        due = self.version + (self.admitted - self.learnt) // self.batch
        f = Fragment(self.next_uid, self.free.pop(), worker, decisions, envs, due, start=start)
        self.next_uid += 1
        self.admitted += decisions * envs
        self.used[worker] = self.used.get(worker, 0) + decisions * envs
        self.fragments[f.uid] = f
        self.leased.setdefault(worker, {})[f.uid] = f
        return f

    def seal(self, uid: int, made: int, oldest: int) -> None:
        """A fragment is finished, perhaps early; what was granted and not made is given back."""
        f = self.fragments[uid]
        assert f.state == LEASED and 0 <= made <= f.decisions, f
        self._give_back(f, f.decisions - made)
        f.decisions, f.made, f.oldest, f.state = made, made, oldest, READY
        del self.leased[f.worker][uid]
        self.finished[uid] = f
        self.samples += made * f.envs
        if made == 0:
            self._drop(f)

    def lost(self, worker: int) -> None:
        """A worker died: it may go on with the same fragment, as another attempt."""
        for f in self.held(worker):
            f.attempt += 1

    def leave(self, worker: int, made: int, oldest: int) -> None:
        """A worker is gone for good: what it made stays, the rest is given back."""
        for f in self.held(worker):
            self.seal(f.uid, made, oldest)
        decisions, envs = self.shares.pop(worker, (0, 0))
        self.round_samples -= decisions * envs
        self.leased.pop(worker, None)

    def join(self, worker: int, share: tuple[int, int]) -> None:
        """A worker is new: it may lease from now on."""
        before = self.shares.get(worker, (0, 0))
        self.shares[worker] = share
        self.round_samples += share[0] * share[1] - before[0] * before[1]
        self.widest = max(self.widest, share[1])

    def refuse(self, uid: int, broken: bool = True) -> None:
        """A finished fragment is unusable (not finite, wrong shape), or teaches nothing (not `broken`): its
        samples are collected anew."""
        f = self.fragments[uid]
        assert f.state == READY, f
        self.refused += f.made * f.envs * broken
        self._give_back(f, f.made)
        self._drop(f)

    def bound(self, staleness: int) -> None:
        """Admit and train by another bound from now on; what was admitted by a wider one stays, and is masked
        where it is too old."""
        self.recovered = self.recovered or staleness < self.staleness
        self.staleness = staleness

    # ---- learning

    def ready(self) -> int:
        """Samples that are finished and not taken."""
        return self.samples

    def gathered(self, rows: Callable[[Fragment], int]) -> int:
        """Samples of the next batch that are there: finished ones, those of it that a stream gave already
        and, of leases, the decisions that `rows` says."""
        under_way = sum(rows(f) * f.envs for f in self.fragments.values() if f.state == LEASED)
        return min(self.samples + self.taken - self.learnt + under_way, self.batch)

    def rounds(self) -> int:
        """Fragments of each worker in a synchronous batch; 0: they do not add up to one."""
        if not self.round_samples or self.round_samples >= self.batch:
            return int(self.round_samples > 0)
        return 0 if self.batch % self.round_samples else self.batch // self.round_samples

    def take_from(self, worker: int, last: bool) -> Fragment | None:
        """The worker's oldest finished fragment becomes a part of the next batch, perhaps its `last`; None:
        wait."""
        ready = [f for f in self.finished.values() if f.worker == worker]
        if not ready:
            return None
        f = min(ready, key=lambda f: f.uid)
        self._taken(f)
        self.taken += f.made * f.envs
        self.next_batch += last
        return f

    def oldest(self) -> tuple[list[Fragment], int]:
        """The finished fragments that the next batch would be of if no other came, oldest first, and their
        samples."""
        ready = self.finished.values()
        if self.samples <= self.batch:
            return list(ready), self.samples
        chosen, total = [], 0
        for f in sorted(ready, key=lambda f: (f.oldest, f.uid)):
            if total >= self.batch:
                break
            chosen.append(f)
            total += f.made * f.envs
        return chosen, total

    def take(self) -> list[Fragment] | None:
        """Fragments of the next batch, oldest first chosen, in an order that depends on no timing; None:
        wait."""
        if self.replay:
            chosen = [self.fragments[uid] for uid in self.replay.pop(0)]
            for f in chosen:
                f.batch = self.next_batch
            self.next_batch += 1
            self.taken += sum(f.made * f.envs for f in chosen)
            return chosen
        if self.samples < self.batch:
            return None
        chosen, total = self.oldest()
        for f in chosen:
            self._taken(f)
        self.next_batch += 1
        self.taken += total
        return sorted(chosen, key=lambda f: (f.worker, f.uid))

    def publish(self, version: int) -> None:
        """New weights are out."""
        assert version > self.version, (version, self.version)
        self.version, self.learnt = version, self.taken
        self._reckon()

    def commit(self) -> list[int]:
        """A checkpoint covers every batch taken so far -> slots that are free again."""
        gone = [f for f in self.fragments.values() if f.state == TAKEN and f.batch < self.next_batch]
        for f in gone:
            self.committed += f.made * f.envs
            self._drop(f)
        return [f.slot for f in gone]

    # ---- a learner that died

    def recover(
        self, found: "list[Fragment]", version: int, next_batch: int, taken: int, next_uid: int
    ) -> list[int]:
        """Go on from a checkpoint (its version, next batch, samples taken) with the fragments found in the
        slots.

        Batches taken after the checkpoint come again, in the same order; a fragment of an earlier one is
        spent. What is left of a batch that is not whole any more (a power cut tore a part) is finished work
        like any other. Returns the slots that are free.
        """
        self.version, self.next_batch, self.taken, self.learnt, self.committed = (
            version,
            next_batch,
            taken,
            taken,
            taken,
        )
        live = [f for f in found if not (f.state == TAKEN and f.batch < next_batch)]
        self.fragments = {f.uid: f for f in live}
        self.next_uid = max([next_uid, *(f.uid + 1 for f in live)])
        self.replay = taken_again(live, self.batch)
        for f in live:
            f.batch = 10**18 if f.state == TAKEN else -1  # none of them counts as taken yet
        self._index()
        self.admitted = taken + sum(f.samples for f in live)
        self._reckon()
        used = {f.slot for f in live}
        self.free = [s for s in self.free if s not in used]
        self.recovered = bool(live)
        return list(self.free)

    # ---- inside

    def _index(self) -> None:
        """By worker what is leased, and what is finished: no question to the ledger looks at every
        fragment."""
        self.leased: dict[int, dict[int, Fragment]] = {}
        self.finished: dict[int, Fragment] = {}
        for f in self.fragments.values():
            if f.state == LEASED:
                self.leased.setdefault(f.worker, {})[f.uid] = f
            elif f.state == READY:
                self.finished[f.uid] = f
        self.samples = sum(f.made * f.envs for f in self.finished.values())  # finished and not taken

    def _taken(self, f: Fragment) -> None:
        f.state, f.batch = TAKEN, self.next_batch
        del self.finished[f.uid]
        self.samples -= f.made * f.envs

    def _give_back(self, f: Fragment, decisions: int) -> None:
        self.admitted -= decisions * f.envs
        if f.worker in self.used:
            self.used[f.worker] = max(0, self.used[f.worker] - decisions * f.envs)

    def _reckon(self) -> None:
        """What of the next batch each worker has leased already: something only where its learner died."""
        self.used.clear()
        for f in self.fragments.values():
            if f.state != TAKEN:
                self.used[f.worker] = self.used.get(f.worker, 0) + f.samples

    def _drop(self, f: Fragment) -> None:
        del self.fragments[f.uid]
        if self.finished.pop(f.uid, None):
            self.samples -= f.made * f.envs
        self.free.append(f.slot)

    def check(self) -> None:
        """Assert what must always hold: every sample in one state, every slot free or in use, the admission
        bound."""
        live = {
            s: sum(f.samples for f in self.fragments.values() if f.state == s) for s in (LEASED, READY, TAKEN)
        }
        assert live[READY] == self.samples == sum(f.made * f.envs for f in self.finished.values())
        assert {u for held in self.leased.values() for u in held} == {
            u for u, f in self.fragments.items() if f.state == LEASED
        }
        assert self.round_samples == sum(d * n for d, n in self.shares.values())
        assert self.admitted == sum(live.values()) + self.committed, (self.admitted, live, self.committed)
        again = sum(
            self.fragments[uid].made * self.fragments[uid].envs for uids in self.replay for uid in uids
        )
        assert self.taken == live[TAKEN] - again + self.committed
        slots = [f.slot for f in self.fragments.values()] + self.free
        assert len(set(slots)) == len(slots)
        if not self.recovered:
            assert self.admitted < self.learnt + (self.staleness + 1) * self.batch + self.widest

    def state_dict(self) -> dict:
        """Everything, as plain JSON."""
        return {
            "fragments": [[getattr(f, k) for k in Fragment.__slots__] for f in self.fragments.values()],
            "free": list(self.free),
            "used": sorted(self.used.items()),
            "shares": sorted([w, *s] for w, s in self.shares.items()),
            **{k: getattr(self, k) for k in COUNTERS},
        }

    def load_state_dict(self, state: dict) -> None:
        self.fragments = {row[0]: Fragment(*row) for row in state["fragments"]}
        self.free, self.used = list(state["free"]), dict(state["used"])
        self.shares = {w: (d, n) for w, d, n in state["shares"]}
        for k in COUNTERS:
            setattr(self, k, state[k])
        self.round_samples = sum(d * n for d, n in self.shares.values())
        self.widest = max((n for _, n in self.shares.values()), default=self.widest)
        self._index()


COUNTERS = ("version", "admitted", "next_uid", "next_batch", "taken", "learnt", "committed", "refused")


def taken_again(live: list[Fragment], batch: int) -> list[list[int]]:
    """Uids of the batches of `batch` samples that had been taken, in order; what is left of one that is not
    whole becomes READY."""
    again: dict[int, list[Fragment]] = {}
    for f in sorted(live, key=lambda f: (f.worker, f.uid)):
        if f.state == TAKEN:
            again.setdefault(f.batch, []).append(f)
    for b, rest in list(again.items()):
        if sum(f.made * f.envs for f in rest) < batch:
            for f in again.pop(b):
                f.state = READY
    return [[f.uid for f in again[b]] for b in sorted(again)]
