"""Replay: every control step once, in one ring; transitions of one step or of a chunk are read off it
exactly.

A row is what was seen, the action that really ran, the reward after it, who chose it and in which phase. Rows
point to their successor, so episodes of many lanes (envs) interleave freely, and a successor is always
younger than its row: what is evicted is never pointed to. An episode closes with a row of its last
observation; nothing bootstraps beyond it.

    rewards = sum_k gamma^k r_k over the n steps that ran      n <= E: fewer where the episode ended inside
    discounts = gamma^n, 0 where it terminated (a time limit bootstraps from the observation it cut)

`add`, `close`, `drop` and `cut` are the only changes, and a `Journal` (`robo_rl/journal.py`) keeps exactly
those calls: replaying them gives the same arrays, so what was added survives the death of the process. NumPy
alone. Axes: B batch, E executed steps, A action.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from robo_rl.errors import UserError
from robo_rl.journal import ADD, CLOSE, CUT, DROP, Journal

POLICY, HUMAN = 0, 1  # sources of a live step, as an intervention wrapper reports them
EXPERT = 2  # recorded demonstrations
# phases up to this one are no person's doing: a human step in them is the brake, or blends back to the policy
PAUSE = 1


@dataclass(slots=True)
class Batch:
    """B transitions: obs and next_obs {name: [B, ...]}, actions[B,E,A] (past the end the last one repeats),
    rewards and discounts [B], steps int[B] that ran, own bool[B,E]: ran, chosen by who chose the first one,
    not braked or blended, source uint8[B], bound float32[B]: the discounted return that followed, -inf while
    unknown, before[B,A]: the action of the step before, 0 where there was none."""

    obs: dict[str, np.ndarray]
    actions: np.ndarray
    rewards: np.ndarray
    discounts: np.ndarray
    next_obs: dict[str, np.ndarray]
    steps: np.ndarray
    own: np.ndarray
    source: np.ndarray
    bound: np.ndarray
    before: np.ndarray


def join(parts: Sequence[Batch]) -> Batch:
    """Batches one after the other."""

    def cat(name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in parts])

    if len(parts) == 1:
        return parts[0]
    obs, after = (
        {k: np.concatenate([getattr(p, side)[k] for p in parts]) for k in parts[0].obs}
        for side in ("obs", "next_obs")
    )
    return Batch(
        obs,
        cat("actions"),
        cat("rewards"),
        cat("discounts"),
        after,
        cat("steps"),
        cat("own"),
        cat("source"),
        cat("bound"),
        cat("before"),
    )


def counts(batch: int, shares: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """How many of `batch` come from each source: exact shares by largest remainder; an empty source's share
    is spread over the others in proportion. Raises UserError if all that have a share are empty."""
    live = [s if n else 0.0 for s, n in zip(shares, sizes, strict=True)]
    if min(shares) < 0 or sum(shares) <= 0:
        raise UserError(f"replay shares must be >= 0 and not all 0, got {list(shares)}")
    if sum(live) <= 0:
        raise UserError("every replay source is empty: collect first, or give demonstrations with --demos")
    exact = [batch * s / sum(live) for s in live]
    out = [int(x + 1e-9) for x in exact]
    rest = sorted(range(len(out)), key=lambda i: (out[i] - exact[i], i))
    for i in rest[: batch - sum(out)]:
        out[i] += 1
    return out


class ReplayWriter:
    """Checks the four changes of a replay and writes them to its journal; keeps nothing in memory, for
    processes that only act.

    `rows` gives shape and dtype of each observation entry. Every change is written to `journal`, if given,
    before it is made.
    """

    def __init__(self, rows: dict[str, tuple[tuple[int, ...], np.dtype]], journal: "Journal | None" = None):
        self.rows, self.journal = {k: (tuple(shape), np.dtype(d)) for k, (shape, d) in rows.items()}, journal
        self.steps = 0  # control steps added

    def __len__(self) -> int:
        return self.steps

    # ---- the four changes

    def add(
        self,
        lanes: np.ndarray,
        obs: dict[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        source: "np.ndarray | int" = POLICY,
        phase: "np.ndarray | int" = 0,
        startable: "np.ndarray | bool" = True,
    ) -> None:
        """One control step of each of the different `lanes` [n]: obs before it, action[n,A] that ran, what
        followed.

        A lane whose episode is over with this step must be closed next."""
        n = len(lanes)
        block = {
            "lanes": np.asarray(lanes, np.int64),
            **{f"obs/{k}": np.asarray(obs[k], d) for k, (_, d) in self.rows.items()},
            "action": np.asarray(action, np.float32),
            "reward": np.asarray(reward, np.float32),
            "terminated": np.asarray(terminated, bool),
        }
        for name, value, dtype in (
            ("source", source, np.uint8),
            ("phase", phase, np.uint8),
            ("startable", startable, bool),
        ):
            block[name] = np.broadcast_to(np.asarray(value, dtype), (n,))
        if self.journal:
            self.journal.write(ADD, n, block.values())
        self._add(block)

    def close(self, lanes: np.ndarray, final_obs: dict[str, np.ndarray]) -> None:
        """End the episodes of `lanes`; final_obs [n, ...]: their last observations."""
        block = {
            "lanes": np.asarray(lanes, np.int64),
            **{f"obs/{k}": np.asarray(final_obs[k], d) for k, (_, d) in self.rows.items()},
        }
        if self.journal:
            self.journal.write(CLOSE, len(lanes), block.values())
        self._close(block)

    def drop(self, lanes: np.ndarray) -> None:
        """Never sample a transition that begins in the open episodes of `lanes` so far."""
        block = {"lanes": np.asarray(lanes, np.int64)}
        if self.journal:
            self.journal.write(DROP, len(lanes), block.values())
        self._drop(block)

    def cut(self) -> None:
        """End the open episodes, whose process is gone: the newest row of each serves as the observation it
        ends in."""
        if self.journal:
            self.journal.write(CUT, 0, ())
        self._cut()

    def _add(self, b: dict[str, np.ndarray]) -> None:
        self.steps += len(b["lanes"])

    def _close(self, b: dict[str, np.ndarray]) -> None: ...
    def _drop(self, b: dict[str, np.ndarray]) -> None: ...
    def _cut(self) -> None: ...


class Replay(ReplayWriter):
    """A ring of `capacity` control steps of several lanes. `horizon` is E, `gamma` the discount of one
    control step."""

    def __init__(
        self,
        rows: dict[str, tuple[tuple[int, ...], np.dtype]],
        action: int,
        horizon: int,
        gamma: float,
        capacity: int,
        lanes: int,
        journal: "Journal | None" = None,
    ):
        if capacity < 2 * lanes * (horizon + 2):
            raise UserError(
                f"replay capacity must be at least {2 * lanes * (horizon + 2)} control steps for {lanes} "
                f"envs and chunks of {horizon}, got {capacity}"
            )
        super().__init__(rows, journal)
        self.horizon, self.gamma, self.capacity, self.lanes = horizon, gamma, capacity, lanes
        self.obs = {k: np.zeros((capacity, *shape), d) for k, (shape, d) in self.rows.items()}
        self.action = np.zeros((capacity, action), np.float32)
        self.reward = np.zeros(capacity, np.float32)
        self.terminated, self.final = np.zeros(capacity, bool), np.zeros(capacity, bool)
        self.source, self.phase = np.zeros(capacity, np.uint8), np.zeros(capacity, np.uint8)
        self.startable = np.zeros(capacity, bool)
        self.next = np.full(capacity, -1, np.int64)  # serial number of the successor
        self.bound = np.full(capacity, -np.inf, np.float32)
        self.before = np.zeros((capacity, action), np.float32)
        self.total = 0  # rows ever written; the serial number of the next one
        self.open: list[list[int]] = [[] for _ in range(lanes)]  # serials of each lane's unfinished episode
        self._ready = np.zeros(capacity, np.int64)  # ring of serials that may begin a transition
        self._made, self._gone = 0, 0  # entries ever written to it, and evicted from it

    def __len__(self) -> int:
        """Transitions that can be sampled."""
        self._forget()
        return self._made - self._gone

    def _add(self, b: dict[str, np.ndarray]) -> None:
        lanes, n = b["lanes"], len(b["lanes"])
        serials = self.total + np.arange(n)
        at = serials % self.capacity
        for k in self.rows:
            self.obs[k][at] = b[f"obs/{k}"]
        for name in ("action", "reward", "terminated", "source", "phase", "startable"):
            getattr(self, name)[at] = b[name]
        self.next[at], self.final[at], self.bound[at], self.before[at] = -1, False, -np.inf, 0
        self.total += n
        ready = []
        for lane, serial in zip(lanes.tolist(), serials.tolist(), strict=False):
            trail = self.open[lane]
            if trail:
                self.next[trail[-1] % self.capacity] = serial
                self.before[serial % self.capacity] = self.action[trail[-1] % self.capacity]
            trail.append(serial)
            if len(trail) > self.horizon:
                ready.append(trail[-1 - self.horizon])
        self._push(ready)

    def _close(self, b: dict[str, np.ndarray]) -> None:
        for i, lane in enumerate(b["lanes"].tolist()):
            trail, serial = self.open[lane], self.total
            if not trail:
                continue
            at, last = serial % self.capacity, trail[-1] % self.capacity
            for k in self.rows:
                self.obs[k][at] = b[f"obs/{k}"][i]
            self.action[at], self.source[at], self.phase[at] = (
                self.action[last],
                self.source[last],
                self.phase[last],
            )
            self.reward[at], self.terminated[at], self.final[at], self.startable[at] = 0, False, True, False
            self.next[at], self.next[last], self.bound[at] = serial, serial, -np.inf
            self.total += 1
            self._finish(lane, trail)

    def _drop(self, b: dict[str, np.ndarray]) -> None:
        serials = np.array([s for lane in b["lanes"].tolist() for s in self.open[lane]], np.int64)
        self.startable[serials[serials >= self.total - self.capacity] % self.capacity] = False
        self._forget()
        ready = self._ready[np.arange(self._gone, self._made) % self.capacity]
        keep = ready[~np.isin(ready, serials)]
        self._made = self._gone + len(keep)
        self._ready[np.arange(self._gone, self._made) % self.capacity] = keep

    def _cut(self) -> None:
        for lane, trail in enumerate(self.open):
            if trail:
                at = trail[-1] % self.capacity
                self.final[at], self.next[at], self.reward[at] = True, trail[-1], 0
                self.startable[at] = self.terminated[at] = False
                self._push(trail[-self.horizon : -1])
                self.open[lane] = []

    def _finish(self, lane: int, trail: list[int]) -> None:
        rows = np.array([s for s in trail if s >= self.total - self.capacity], np.int64) % self.capacity
        if len(rows) and self.terminated[rows[-1]]:  # otherwise more would have followed
            back = 0.0
            for at in rows[::-1].tolist():
                back = float(self.reward[at]) + self.gamma * back
                self.bound[at] = back
        self._push(trail[-self.horizon :])
        self.open[lane] = []

    def _push(self, serials: list[int]) -> None:
        keep = np.array(
            [s for s in serials if s >= self.total - self.capacity and self.startable[s % self.capacity]],
            np.int64,
        )
        self._ready[(self._made + np.arange(len(keep))) % self.capacity] = keep
        self._made += len(keep)

    def _forget(self) -> None:
        oldest = self.total - self.capacity
        self._gone = max(self._gone, self._made - self.capacity)
        while self._gone < self._made and self._ready[self._gone % self.capacity] < oldest:
            self._gone += 1

    # ---- reading

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Serials of `n` transitions, uniform with replacement. Raises UserError if there is none."""
        if not len(self):
            raise UserError("the replay source is empty: collect first, or give demonstrations with --demos")
        oldest = self.total - self.capacity
        out = self._ready[rng.integers(self._gone, self._made, n) % self.capacity]
        while (late := out < oldest).any():  # lanes fill unevenly, so a few evicted ones lie between
            out[late] = self._ready[rng.integers(self._gone, self._made, int(late.sum())) % self.capacity]
        return out

    def gather(self, serials: np.ndarray) -> Batch:
        """The transitions that begin at `serials` [B]."""
        b, cap = len(serials), self.capacity
        at = serials % cap
        obs = {k: v[at] for k, v in self.obs.items()}
        first = self.source[at]
        actions = np.empty((b, self.horizon, self.action.shape[1]), np.float32)
        own = np.empty((b, self.horizon), bool)
        rewards, discount, terminated = np.zeros(b, np.float32), np.ones(b, np.float32), np.zeros(b, bool)
        steps, same = np.zeros(b, np.int64), np.ones(b, bool)
        start = at
        for k in range(self.horizon):
            actions[:, k] = self.action[at]
            ran = ~self.final[at]
            meant = (self.phase[at] != PAUSE) & ((first != HUMAN) | (self.phase[at] > PAUSE))
            same = same & ran & meant & (self.source[at] == first)
            own[:, k] = same
            rewards += discount * self.reward[at] * ran
            terminated |= self.terminated[at] & ran
            discount = np.where(ran, discount * np.float32(self.gamma), discount)
            steps += ran
            at = self.next[at] % cap
        return Batch(
            obs,
            actions,
            rewards,
            np.where(terminated, np.float32(0), discount),
            {k: v[at] for k, v in self.obs.items()},
            steps,
            own,
            first,
            self.bound[start],
            self.before[start],
        )

    def sample(self, n: int, rng: np.random.Generator) -> Batch:
        """`n` transitions, uniform with replacement."""
        return self.gather(self.draw(n, rng))

    def windows(self, n: int, length: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Up to `n` stretches of `length` decisions, each E control steps after the one before: obs [n,T,S],
        action [n,T,E*A], reward [n,T] discounted inside the chunk, over bool[n,T].

        What terminated stays where it ended, `over`, with nothing more to earn; stretches that a time limit
        or the end of what is known cuts are left out.
        """
        serial = self.draw(n, rng)
        fits, ended, rows = np.ones(n, bool), np.zeros(n, bool), []
        for _ in range(length):
            b = self.gather(np.where(fits, serial, self.total - 1))
            here = serial % self.capacity
            fits &= ended | ~self.final[here] & ((b.steps == self.horizon) | (b.discounts == 0))
            ended |= b.discounts == 0
            rows.append((b.obs["state"], b.actions.reshape(n, -1), b.rewards, ended.copy()))
            for _ in range(self.horizon):
                serial = np.where(fits, self.next[serial % self.capacity], serial)
                fits &= serial >= 0
                serial = np.maximum(serial, 0)
        return {
            k: np.stack(v, 1)[fits]
            for k, v in zip(("obs", "action", "reward", "over"), zip(*rows, strict=True), strict=True)
        }

    def counts(self) -> dict[int, int]:
        """Rows in the ring (final observations left out) by source."""
        have = min(self.total, self.capacity)
        return dict(
            zip(
                *(x.tolist() for x in np.unique(self.source[:have][~self.final[:have]], return_counts=True)),
                strict=False,
            )
        )

    # ---- journal

    def restore(self) -> int:
        """Replay the journal from the disk into this (empty) store -> control steps that came back."""
        assert self.journal is not None
        return self.follow(self.journal)

    def follow(self, journal: "Journal") -> int:
        """Make the changes that another process wrote since the last call -> control steps among them."""
        lanes = {"lanes": ((), np.dtype(np.int64))}
        shapes = lanes | {f"obs/{k}": v for k, v in self.rows.items()}
        full = shapes | {
            "action": ((self.action.shape[1],), np.dtype(np.float32)),
            "reward": ((), np.dtype(np.float32)),
            "terminated": ((), np.dtype(bool)),
            "source": ((), np.dtype(np.uint8)),
            "phase": ((), np.dtype(np.uint8)),
            "startable": ((), np.dtype(bool)),
        }
        calls = {ADD: (full, self._add), CLOSE: (shapes, self._close), DROP: (lanes, self._drop)}
        steps = 0
        for kind, n, body in journal.read():
            if kind == CUT:
                self._cut()
                continue
            (parts, change), block, at = calls[kind], {}, 0
            sizes = [
                int(np.prod(shape, dtype=np.int64)) * n * dtype.itemsize for shape, dtype in parts.values()
            ]
            if sum(sizes) != len(body):
                raise UserError(f"{journal.folder} holds steps of another env or horizon; start a new run")
            for (name, (shape, dtype)), size in zip(parts.items(), sizes, strict=True):
                block[name] = np.frombuffer(body[at : at + size], dtype).reshape(n, *shape)
                at += size
            change(block)
            steps += n * (kind == ADD)
        return steps


class Mixture:
    """Batches with a guaranteed share of each named source; says once when one is empty."""

    def __init__(
        self, sources: dict[str, tuple[Replay, float]], say: Callable[[str], None] = lambda words: None
    ):
        self.sources, self.say, self._told = sources, say, set()

    def counts(self, n: int) -> list[int]:
        """Transitions from each source in a batch of `n`."""
        sizes = [len(r) for r, _ in self.sources.values()]
        for name, size in zip(self.sources, sizes, strict=False):
            if not size and name not in self._told:
                self._told.add(name)
                self.say(
                    f"replay source {name!r} is empty: its share goes to the others until it has something"
                )
        return counts(n, [s for _, s in self.sources.values()], sizes)

    def sample(self, n: int, rng: np.random.Generator) -> Batch:
        """`n` transitions, sources one after the other in their order."""
        parts = [
            r.sample(k, rng) for (r, _), k in zip(self.sources.values(), self.counts(n), strict=False) if k
        ]
        return join(parts)


def add_episodes(
    replay: Replay,
    obs: dict[str, np.ndarray],
    action: np.ndarray,
    reward: np.ndarray,
    from_: np.ndarray,
    to: np.ndarray,
    success: np.ndarray,
    source: "np.ndarray | int" = EXPERT,
    phase: "np.ndarray | int" = 0,
    last: "dict[str, np.ndarray] | None" = None,
    known: "np.ndarray | None" = None,
) -> None:
    """Recorded episodes (rows from_[e] .. to[e] - 1 of flat arrays) into lane 0.

    last: row e is what was observed after the last action of episode e, where known[e]. Where it was not
    recorded, a success needs none, for it is terminal; of any other episode the last frame serves as that
    observation, and its action is left out. A success without a reward of its own earns 1 at its last step.
    """
    known = np.zeros(len(to), bool) if last is None or known is None else known
    lane = np.zeros(1, np.int64)
    source, phase = (np.broadcast_to(np.asarray(x, np.uint8), (len(action),)) for x in (source, phase))
    for e, (first, end, won) in enumerate(zip(from_.tolist(), to.tolist(), success.tolist(), strict=False)):
        stop = end if won or known[e] else end - 1
        for row in range(first, stop):
            over = won and row == end - 1
            r = reward[row : row + 1]
            replay.add(
                lane,
                {k: v[row : row + 1] for k, v in obs.items()},
                action[row : row + 1],
                np.maximum(r, 1) if over and not r.any() else r,
                np.array([over]),
                source[row : row + 1],
                phase[row : row + 1],
            )
        after = (
            {k: v[e : e + 1] for k, v in last.items()}
            if last is not None and known[e]
            else {k: v[end - 1 : end] for k, v in obs.items()}
        )
        replay.close(lane, after)
