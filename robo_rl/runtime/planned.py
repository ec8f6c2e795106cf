"""Groups whose sizes are decided (`--rl.allocate`), as a feed sees them: the planner behind a lock, and the
episodes of groups that were played and are not learnt from.

A slot has room for the greatest group. Column `group` is 1 + the group's uid where a member was played, 0
where none was.
"""

import threading

import numpy as np

from robo_rl.rollout import OBS, Columns, Layout, Rollout, rollout_of
from robo_rl.rollout_control.group_plan import GroupPlanner, GroupShape
from robo_rl.runtime.candidates import NUMBER, tell_candidates
from robo_rl.runtime.feed import make_batch, merge_batch_stats
from robo_rl.runtime.ledger import Fragment, Ledger
from robo_rl.starts import Ended

GROUP = "group"


def group_layout(n: int) -> Layout:
    """Rows of the column of n members."""
    return {GROUP: ((n,), np.dtype(np.int64))}


def played(columns: Columns, rows: int) -> tuple[Columns, int]:
    """A finished group without the members that had no episode."""
    n = int((columns[GROUP][0] > 0).sum())
    return {k: v[:, :n] for k, v in columns.items()}, rows


def make_batch_of(
    planned: "PlannedGroups | None",
    parts: list[tuple[Columns, int]],
    version: int,
    staleness: int,
    group: int,
) -> Rollout:
    """`make_batch` of finished fragments; of planned groups, or chosen candidates, with what else was played
    for them."""
    if planned is None:
        rollout = make_batch(parts, version, staleness)
        if NUMBER in parts[0][0]:
            tell_candidates(rollout, parts, group)
        return rollout
    return planned.complete(make_batch([played(*part) for part in parts], version, staleness))


class PlannedGroups:
    """The planner of a feed. Who leases may be another thread than who learns."""

    def __init__(self, planner: GroupPlanner):
        self.planner, self.lock = planner, threading.Lock()
        # of groups that were replaced since the last batch
        self.aside: list[tuple[dict[str, float], Ended | None]] = []

    @property
    def shape(self) -> GroupShape:
        return self.planner.shape

    def lease(self, ledger: Ledger, worker: int, more: bool) -> Fragment | None:
        """`ledger.lease` of the planner's next group; without staleness a plan has what is missing of the
        batch."""

        def group(room: int) -> tuple[int, int]:
            with self.lock:
                return self.planner.next(room if ledger.staleness == 0 else ledger.batch)

        return ledger.lease(worker, more, group)

    def keeps(self, columns: Columns, rows: int) -> bool:
        """Whether a finished group is learnt from; of one that is not, its episodes are counted with the next
        batch."""
        columns, rows = played(columns, rows)
        with self.lock:
            if self.planner.keeps(columns["returns"][rows - 1].astype(np.float64)):
                return True
            used = {k: v[: rows + k.startswith(OBS)].copy() for k, v in columns.items()}
            rollout = rollout_of([(used, rows)])
            self.aside.append((rollout.stats, rollout.ended))
            return False

    def complete(self, rollout: Rollout) -> Rollout:
        """A batch with the counts of the episodes that were played for it and are not in it."""
        with self.lock:
            aside, self.aside = self.aside, []
            self.planner.batch_taken()
        if aside:
            rollout.stats = merge_batch_stats([rollout.stats, *(stats for stats, _ in aside)])
            parts = [rollout.ended, *(ended for _, ended in aside)]
            rollout.ended = Ended.joined([part for part in parts if part is not None])
        return rollout

    def observe(self, ended: "list[Ended | None]") -> None:
        """The episodes of an update."""
        with self.lock:
            self.planner.observe(Ended.joined([part for part in ended if part is not None]))

    def metrics(self) -> dict[str, float]:
        """For the log, since the last call."""
        with self.lock:
            return self.planner.metrics()

    def state_dict(self) -> dict:
        """The planner's state and what was played for a batch that is not complete."""
        with self.lock:
            return {
                "planner": self.planner.state_dict(),
                "aside": [
                    [stats, None if ended is None else {k: getattr(ended, k) for k in Ended.__slots__}]
                    for stats, ended in self.aside
                ],
            }

    def load_state_dict(self, state: dict) -> None:
        with self.lock:
            self.planner.load_state_dict(state["planner"])
            self.aside = [
                (stats, None if ended is None else Ended(**ended)) for stats, ended in state["aside"]
            ]
