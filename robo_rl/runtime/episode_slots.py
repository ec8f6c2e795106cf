"""Groups of episodes without a barrier: the rollout role with a group advantage, where data may be stale.

A lease is a *group*: `group` whole episodes from one start, in a slot [decisions, group]. Each env (an
*episode slot*) plays one episode after another, of whichever group is next in line, so that no env waits for
the slowest of its group, its worker or its batch. More episodes are in flight than a batch needs; a batch
closes when enough groups are whole, and what is unfinished then simply goes on under newer weights: every
chunk carries the version that acted.

The noise of decision t of member m of group u is drawn from (seed, worker, u, m, t) alone: it depends on no
other env.

With `control` a group is a tree: only its roots begin at the start, the other members where one forks
(`robo_rl.runtime.branches`). With `shape` the size of a group comes with its lease, and may grow by rounds
(`robo_rl.rollout_control.group_plan`).
With `cheap` a group is played twice: first as `candidates` by the cheaper policy, then those of them that are
kept, with the same noise, by the policy itself; the slot has these alone (`robo_rl.runtime.candidates`).

Source: APRIL (arXiv 2509.18521), over-provisioned groups and recycled partial episodes. Where we differ: a
simulator need not be interrupted to change its weights, so nothing is cut and put back; groups finished
beyond a batch are in the next.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from robo_rl.noise import mix, seed_noise
from robo_rl.policies import Policy
from robo_rl.policies.cheap import CheapPolicy
from robo_rl.rollout import FINAL, OBS, REPEATED, Collector, Columns, new_columns, think, to_policy
from robo_rl.rollout_control.group_plan import GroupShape
from robo_rl.rollout_control.trees import TreeControl
from robo_rl.runtime.branches import Branch, GroupTree, grow, put, tree_layout, tree_of, write_branches
from robo_rl.runtime.candidates import Candidates, candidate_layout
from robo_rl.runtime.planned import GROUP, group_layout
from robo_rl.runtime.rollout_buffer import Lease


@dataclass(slots=True)
class Group:
    """One lease that is being played: `begun` of `roots` members that begin at the start have had an env,
    member m has made `made[m]` decisions."""

    lease: Lease
    columns: Columns
    start: int
    begun: int
    made: np.ndarray
    over: np.ndarray
    roots: int
    tree: GroupTree | None = None
    candidates: Candidates | None = None

    def to_begin(self) -> int:
        """Members, or candidates, that begin at the start and have had no env yet."""
        c = self.candidates
        return len(c.over) - c.begun if c and c.kept is None else self.roots - self.begun

    def waiting(self) -> int:
        """Members that have had no env yet."""
        return self.to_begin() + (len(self.tree.waiting) if self.tree else 0)

    def begin_next(self) -> tuple[int, int]:
        """The next member, or candidate, begins at the start -> it, and the number that its noise follows
        from."""
        c = self.candidates
        if c and c.kept is None:
            c.begun += 1
            return c.begun - 1, c.begun - 1
        member, self.begun = self.begun, self.begun + 1
        return member, member if c is None or c.kept is None else int(c.kept[member])

    def chooses(self) -> bool:
        """Whether its candidates are being played."""
        return self.candidates is not None and self.candidates.kept is None

    def members(self) -> int:
        """How many there are so far."""
        return len(self.tree.branches) if self.tree else self.roots


class EpisodeSlots:
    """The envs of one collector, each on its own. `refresh()` makes the newest weights the policy's -> their
    version.

    `group` members fit a slot; `shape`: how many of them a group has is said by its lease; `cheap`: plays so
    many `candidates` first."""

    def __init__(
        self,
        index: int,
        collector: Collector,
        policy: Policy,
        refresh: Callable[[], int],
        group: int,
        explore: bool = True,
        control: TreeControl | None = None,
        shape: GroupShape | None = None,
        cheap: CheapPolicy | None = None,
        candidates: int = 0,
    ):
        self.control, self.shape, self.cheap, self.candidates = control, shape, cheap, candidates
        self.renewed = -1  # version of the weights that `cheap` has
        self.size = shape.group if shape else group  # samples of a batch that a group is, on average
        self.roots = control.roots if control else self.size
        self.index, self.collector, self.policy, self.refresh = index, collector, policy, refresh
        self.group, self.explore = group, explore
        self.groups: dict[int, Group] = {}
        self.uid = np.full(collector.n, -1, np.int64)  # of the group that an env plays; -1: none
        self.member, self.row = np.zeros(collector.n, np.int64), np.zeros(collector.n, np.int64)
        self.number = np.zeros(collector.n, np.int64)  # that the noise of a member follows from
        self.generators = [torch.Generator() for _ in range(collector.n)]
        self.line = new_columns(collector.layout(policy, explore), 1)  # one decision of every env
        collector.alive[:] = False

    def layout(self) -> dict:
        """Rows of one group's columns."""
        rows = self.collector.layout(self.policy, self.explore)
        return {k: ((self.group, *row[1:]), dtype) for k, (row, dtype) in rows.items()} | (
            tree_layout(self.group)
            if self.control
            else group_layout(self.group)
            if self.shape
            else candidate_layout(self.group, self.candidates)
            if self.candidates
            else {}
        )

    @property
    def waiting(self) -> int:
        """Members of open groups that have had no env yet."""
        return sum(g.waiting() for g in self.groups.values())

    def wants(self) -> int:
        """Groups that would give every idle env an episode."""
        return max(0, -(-(int((self.uid < 0).sum()) - self.waiting) // (self.candidates or self.roots)))

    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.groups)

    def begin(self, lease: Lease, columns: Columns) -> None:
        """Take up a group; its members start as envs become idle."""
        key, chooser = mix(self.collector.seed, 5, self.index, lease.uid, 0), self.collector.chooser
        start = lease.start if self.shape else key >> 32 if chooser is None else int(chooser.draw(key, 1)[0])
        tree = GroupTree([Branch() for _ in range(self.roots)]) if self.control else None
        self.groups[lease.uid] = Group(
            lease,
            columns,
            start,
            0,
            np.zeros(self.group, np.int64),
            np.zeros(self.group, bool),
            lease.members or self.roots,
            tree,
            Candidates.of(self.candidates) if self.candidates else None,
        )

    def decide(self) -> list[tuple[int, int, int]]:
        """One decision in every env that plays -> the groups that are whole now: (uid, rows, oldest
        version)."""
        self._assign()
        c = self.collector
        c.observe(self.line, 0)
        with c.threads():
            c.act(self._think(), self.line, 0, whole=True)
        whole = []
        for uid, g in list(self.groups.items()):
            envs = np.flatnonzero(self.uid == uid)
            if g.chooses():
                self._judge(g, envs)
                continue
            if len(envs):
                self._keep(g, envs)
                if self.control:
                    self._grow(uid, g, envs)
            if g.over[: g.members()].all() and not self._another_round(g):
                rows = int(g.made.max())
                fill(g.columns, g.made, rows)
                whole.append((uid, rows, int(g.columns["version"][:rows, g.made > 0].min())))
                del self.groups[uid]
                if self.control:
                    self.control.whole()
        return whole

    def _assign(self) -> None:
        idle = list(np.flatnonzero(self.uid < 0))
        starts, mask = np.zeros(self.collector.n, np.int64), np.zeros(self.collector.n, bool)
        lanes, snapshots = [], []
        for uid, g in sorted(self.groups.items()):
            while idle and g.tree and g.tree.waiting:
                member, env = min(g.tree.waiting), idle.pop(0)
                self.uid[env], self.member[env], self.number[env], self.row[env] = uid, member, member, 0
                lanes.append(env)
                snapshots.append(g.tree.waiting.pop(member))
            while idle and g.to_begin():
                env = idle.pop(0)
                self.uid[env], self.row[env], starts[env], mask[env] = uid, 0, g.start, True
                self.member[env], self.number[env] = g.begin_next()
        if mask.any():
            self.collector.begin(starts, mask)
        if lanes:
            put(self.collector, lanes, snapshots)

    def _another_round(self, g: Group) -> bool:
        """Whether a start whose episodes are over is to be played again; then its group grows."""
        if self.shape is None or self.shape.rounds is None:
            return False
        last = g.made[: g.roots] - 1
        more = self.shape.rounds.more(g.columns["returns"][last, np.arange(g.roots)])
        g.roots += more
        return more > 0

    def _grow(self, uid: int, g: Group, envs: np.ndarray) -> None:
        """Tell the control which of the branches that `envs` played ended, and let it stop and fork the
        others."""
        control, tree, ended = self.control, g.tree, self.line["done"][0, envs]
        assert control is not None and tree is not None
        for env in envs[ended].tolist():
            m = int(self.member[env])
            branch = tree.branches[m]
            control.over(
                g.columns[OBS + "state"][: g.made[m], m],
                branch.depth,
                bool(self.line["success"][0, env]),
                float(self.line["returns"][0, env]),
                branch.odds,
            )
        envs = envs[~ended]
        if len(envs):
            members, key = self.member[envs], mix(self.collector.seed, self.index, uid)
            stopped = grow(
                control, self.collector, tree, g.columns, envs, members, g.made[members], self.group, key
            )
            gone = envs[np.isin(members, stopped)]
            g.over[stopped] = True
            self.uid[gone], self.collector.alive[gone] = -1, False

    def _think(self) -> np.ndarray:
        """Decide -> actions [N,E,A]. Where there are candidates each policy acts in the envs that are its
        own; of a candidate nothing but its actions is kept."""
        c, noise, version = self.collector, self._noise(), self.refresh()
        if self.cheap is None:
            (actions,) = think(self.policy, [(self.line, 0)], noise, version, self.explore)
            c.timer.add("policy")
            return actions
        if version != self.renewed:
            self.cheap.renew()
            self.renewed = version
        actions = np.zeros((c.n, c.execute, c.spec.action), np.float32)
        choosing = np.isin(self.uid, [uid for uid, g in self.groups.items() if g.chooses()])
        if len(envs := np.flatnonzero((self.uid >= 0) & ~choosing)):
            part = {k: v[:, envs] for k, v in self.line.items()}
            (actions[envs],) = think(
                self.policy, [(part, 0)], [noise[i] for i in envs], version, self.explore
            )
            for k, v in part.items():
                if not k.startswith((OBS, FINAL)):
                    self.line[k][:, envs] = v
            c.timer.add("policy")
        if len(envs := np.flatnonzero(choosing)):
            obs = {
                k[len(OBS) :]: torch.from_numpy(v[0, envs]) for k, v in self.line.items() if k.startswith(OBS)
            }
            chunk = self.cheap.act(to_policy(obs, self.policy), [noise[i] for i in envs], self.explore)
            actions[envs] = chunk.actions.cpu().numpy()
            c.timer.add("candidates")
        return actions

    def _judge(self, g: Group, envs: np.ndarray) -> None:
        """Take up which of the candidates that `envs` play ended; where all have, choose those that are
        played again."""
        assert g.candidates is not None
        ended = envs[self.line["done"][0, envs]]
        g.candidates.ended(self.member[ended], self.line, ended)
        self.row[envs] += 1
        self.uid[ended] = -1
        if g.candidates.over.all():
            g.candidates.choose(self.group)
            g.candidates.write(g.columns)

    def _noise(self) -> list[tuple[torch.Generator, int]]:
        seed = mix(self.collector.seed, self.index)
        keys = zip(self.uid.tolist(), self.number.tolist(), self.row.tolist(), strict=False)
        return [(seed_noise(g, mix(seed, *key)), 1) for g, key in zip(self.generators, keys, strict=False)]

    def _keep(self, g: Group, envs: np.ndarray) -> None:
        """Move the decisions of these envs from the line to the rows of their group."""
        rows, members, done = self.row[envs], self.member[envs], self.line["done"][0, envs]
        for k, v in self.line.items():
            if k.startswith(FINAL):
                g.columns[k][rows[done], members[done]] = v[0, envs[done]]
                continue
            g.columns[k][rows, members] = v[0, envs]
            if k.startswith(OBS):
                g.columns[k][rows + 1, members] = v[1, envs]
        if g.tree:
            write_branches(g.tree, g.columns, rows, members)
        if self.shape:
            g.columns[GROUP][rows, members] = g.lease.uid + 1
        self.row[envs] += 1
        g.made[members] += 1
        g.over[members[done]] = True
        self.uid[envs[done]] = -1

    def end(self) -> None:
        """The groups that are open are given back."""
        self.groups.clear()
        self.uid[:], self.collector.alive[:] = -1, False

    # ---- state

    def state(self) -> dict:
        """Everything but the rows, which are in the slots, and their checksums; {} where the sim has no
        snapshots."""
        state = self.collector.state()
        return (
            {
                "collector": state,
                "uid": self.uid.copy(),
                "member": self.member.copy(),
                "row": self.row.copy(),
                "number": self.number.copy(),
                "groups": [
                    [
                        uid,
                        g.start,
                        g.begun,
                        g.made.tolist(),
                        g.over.tolist(),
                        digest(g.columns, g.made),
                        g.tree and g.tree.state(),
                        g.roots,
                        g.candidates and g.candidates.state(),
                    ]
                    for uid, g in self.groups.items()
                ],
                "control": self.control and self.control.state(),
            }
            if state
            else {}
        )

    def resume(self, state: dict, leases: list[tuple[Lease, Columns]]) -> None:
        """Go on with `leases`, all that this worker holds: those in `state` where they were, others from
        their start.

        A group whose rows are not those that the state was saved with (torn by a power cut) begins anew.
        """
        known = {row[0]: row[1:] for row in state["groups"]} if state else {}
        whole = [
            lease.uid
            for lease, columns in leases
            if lease.uid in known
            and digest(columns, np.array(known[lease.uid][2], np.int64)) == known[lease.uid][4]
        ]
        if state:
            self.collector.set_state(state["collector"])
            self.uid, self.member, self.row = (np.array(state[k]) for k in ("uid", "member", "row"))
            self.number = np.array(state.get("number", self.member))  # not in states of before it
            if self.control:
                self.control.set_state(state["control"])
        for lease, columns in leases:
            self.begin(lease, columns)
            if lease.uid in whole:
                g = self.groups[lease.uid]
                g.start, g.begun, made, over, _, *tree = known[lease.uid]
                g.tree = tree_of(tree[0]) if self.control else None
                g.roots = tree[1] if len(tree) > 1 else g.roots  # not in states of before it
                if g.candidates:
                    g.candidates = Candidates.again(tree[2])
                    g.candidates.write(g.columns)
                g.made, g.over = np.array(made, np.int64), np.array(over, bool)
        gone = ~np.isin(self.uid, whole)  # handed over since, or never, or torn
        self.uid[gone], self.collector.alive[gone] = -1, False


def digest(columns: Columns, made: np.ndarray) -> int:
    """63 bits of what members wrote: rows before `made[m]` of member m, the observation after, last ones of
    its episode."""
    h, rows = xxhash.xxh3_64(), np.arange(int(made.max(initial=0)) + 1)[:, None]
    before, upto = (rows < made)[:-1], rows <= made
    ended = before & (columns["done"].view(np.uint8)[: len(before)] != 0)
    for k, v in columns.items():
        mask = upto & (made > 0) if k.startswith(OBS) else ended if k.startswith(FINAL) else before
        h.update(np.ascontiguousarray(v[: len(mask)][mask]).data)
    return h.intdigest() >> 1


def fill(columns: Columns, made: np.ndarray, rows: int) -> None:
    """Make what follows a member's last decision, up to `rows`, what it is in an env that is over: masked,
    reward 0."""
    for m, last in enumerate(made.tolist()):
        for k, v in columns.items():
            if not last and not k.startswith(FINAL):  # a member that a tree had no need of
                v[: rows + k.startswith(OBS), m] = k == "discounts"
            elif k.startswith(OBS):
                v[last + 1 : rows + 1, m] = v[last, m]
            elif k in REPEATED:
                v[last:rows, m] = v[last - 1, m]
            elif not k.startswith(FINAL):
                v[last:rows, m] = 1 if k == "discounts" else 0
