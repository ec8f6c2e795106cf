"""Episode slots that fork: the branches of a group, what waits for an env, and the columns that say how they
hang together.

A branch is a member of its group. Where one forks, it goes on as one child itself; each other child is a new
member with a snapshot of its env, which begins as soon as an env is idle. Columns, from a member's first
decision on:

    tree/parent, tree/row   the member and its decision before which this one begins; -1, 0 for a root
    tree/weight             weight of the decision: 1 at a root, over the children at each fork, over `keep`
                            at each gate passed
    tree/keep, tree/guess   the gate behind the decision (`robo_rl.tree_credit`); keep 1: none
"""

from dataclasses import dataclass, field

import numpy as np

from robo_rl.noise import mix
from robo_rl.options import RolloutOptions
from robo_rl.rollout import TREE, Collector, Columns, Layout
from robo_rl.rollout_control.trees import TreeControl, check_snapshots


def tree_layout(n: int) -> Layout:
    """Rows of the columns of n branches."""
    return {
        TREE + k: ((n,), np.dtype(d))
        for k, d in (
            ("parent", np.int64),
            ("row", np.int64),
            ("weight", np.float64),
            ("keep", np.float64),
            ("guess", np.float64),
        )
    }


def make_control(options: RolloutOptions | None, collector: Collector) -> TreeControl | None:
    """What forks and stops the episodes of a collector; None: nothing does."""
    if options is None:
        return None
    if options.tree_forks:
        check_snapshots(collector.env)
    return TreeControl(
        options,
        collector.longest(),
        collector.obs["state"].shape[1],
        mix(collector.seed, collector.lane, 8) >> 32,
    )


@dataclass(slots=True)
class Branch:
    """One member: where it begins, the decisions before that, the weight of its next decision, 1 over the
    chance of its gates."""

    parent: int = -1
    row: int = 0
    depth: int = 0
    weight: float = 1.0
    odds: float = 1.0
    forked: int = 0  # its own decision before which it forked last


@dataclass(slots=True)
class GroupTree:
    """The branches of one group, and the snapshots of those that have had no env yet, by member."""

    branches: list[Branch] = field(default_factory=list)
    waiting: dict[int, dict] = field(default_factory=dict)

    def state(self) -> dict:
        return {
            "branches": [[getattr(b, k) for k in Branch.__slots__] for b in self.branches],
            "waiting": [[m, snapshot] for m, snapshot in self.waiting.items()],
        }


def tree_of(state: dict) -> GroupTree:
    """The tree that `GroupTree.state` gave."""
    return GroupTree([Branch(*row) for row in state["branches"]], dict(state["waiting"]))


def write_branches(tree: GroupTree, columns: Columns, rows: np.ndarray, members: np.ndarray) -> None:
    """The tree's columns of one decision of each of `members`, in their rows."""
    own = [tree.branches[m] for m in members.tolist()]
    for k in ("parent", "row", "weight"):
        columns[TREE + k][rows, members] = [getattr(b, k) for b in own]
    columns[TREE + "keep"][rows, members], columns[TREE + "guess"][rows, members] = 1.0, 0.0


def grow(
    control: TreeControl,
    collector: Collector,
    tree: GroupTree,
    columns: Columns,
    lanes: np.ndarray,
    members: np.ndarray,
    made: np.ndarray,
    most: int,
    key: int,
) -> list[int]:
    """Gates and forks of `members`, which play in `lanes` and have made `made` decisions each -> the members
    that were stopped.

    `most` branches fit the group; `key` names it for the draws.
    """
    own = [tree.branches[m] for m in members.tolist()]
    depth = np.array([b.depth for b in own]) + made
    verdict = control.look(collector.obs["state"][lanes], depth, made - np.array([b.forked for b in own]))
    stopped, snapshot = [], None
    for i, (lane, m, b) in enumerate(zip(lanes.tolist(), members.tolist(), own, strict=True)):
        keep, row = float(verdict.keep[i]), int(made[i])
        if keep < 1:
            columns[TREE + "keep"][row - 1, m], columns[TREE + "guess"][row - 1, m] = keep, verdict.guess[i]
            if mix(key, m, row, 9) / 2**63 >= keep:
                stopped.append(m)
                continue
            b.weight, b.odds = b.weight / keep, b.odds / keep
        children = min(int(verdict.children[i]), 1 + most - len(tree.branches))
        if children < 2:
            continue
        snapshot = snapshot or collector.state()
        b.weight, b.forked = b.weight / children, row
        for _ in range(children - 1):
            tree.waiting[len(tree.branches)] = lane_of(snapshot, lane)
            tree.branches.append(Branch(m, row, int(depth[i]), b.weight, b.odds))
    return stopped


def lane_of(snapshot: dict, lane: int) -> dict:
    """Of a collector's state what belongs to one lane."""
    return {
        "env": {k: np.array(v[lane]) for k, v in snapshot["env"].items()},
        "obs": {k: np.array(v[lane]) for k, v in snapshot["obs"].items()},
        "begun": []
        if snapshot["starts"] is None
        else [snapshot["starts"][k][lane].item() for k in ("starts", "tasks")],
        **{k: snapshot[k][lane].item() for k in ("returns", "lengths", "gains")},
    }


def put(collector: Collector, lanes: list[int], snapshots: list[dict]) -> None:
    """Make `lanes` of a collector go on from snapshots that `lane_of` made."""
    state, mask = collector.env.get_state(), np.zeros(collector.n, bool)
    obs = {k: np.array(v) for k, v in collector.obs.items()}
    for lane, saved in zip(lanes, snapshots, strict=True):
        for k, v in saved["env"].items():
            state[k][lane] = v
        for k, v in saved["obs"].items():
            obs[k][lane] = v
        collector.returns[lane], collector.lengths[lane], collector.gains[lane] = (
            saved["returns"],
            saved["lengths"],
            saved["gains"],
        )
        if collector.chooser is not None:
            collector.chooser.starts[lane], collector.chooser.tasks[lane] = saved["begun"]
        mask[lane] = True
    collector.env.set_state(state, mask)
    collector.obs, collector.alive = obs, collector.alive | mask
