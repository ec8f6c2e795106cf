"""The replay ring against a plain list of all steps: random calls, every transition that can be drawn, every
window."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from robo_rl.errors import UserError
from robo_rl.journal import Journal
from robo_rl.replay import Mixture, Replay, ReplayWriter, add_episodes, counts, join

F = np.float32
POLICY, HUMAN, PAUSE = 0, 1, 1  # sources, and the phase in which nobody acts
ROWS = {"state": ((2,), F), "picture": ((2, 3), np.uint8)}


@dataclass
class Row:
    obs: dict
    action: np.ndarray
    before: np.ndarray
    reward: float = 0.0
    terminated: bool = False
    final: bool = False
    source: int = POLICY
    phase: int = 0
    startable: bool = True
    next: int = -1
    bound: float = -np.inf


@dataclass
class PlainReplay:
    """What `Replay` says in its docstring, with no ring: rows stay, and what is too old is left out when
    asked."""

    horizon: int
    gamma: float
    capacity: int
    lanes: int
    rows: list[Row] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)  # in the order in which they became whole

    def __post_init__(self):
        self.trails = [[] for _ in range(self.lanes)]

    @property
    def oldest(self) -> int:
        return len(self.rows) - self.capacity

    def push(self, serials):
        self.ready += [s for s in serials if s >= self.oldest and self.rows[s].startable]

    def add(self, lanes, obs, action, reward, terminated, source, phase, startable):
        begun = []
        for i, lane in enumerate(lanes.tolist()):
            trail = self.trails[lane]
            before = self.rows[trail[-1]].action if trail else np.zeros_like(action[i])
            if trail:
                self.rows[trail[-1]].next = len(self.rows)
            trail.append(len(self.rows))
            self.rows.append(
                Row(
                    {k: v[i] for k, v in obs.items()},
                    action[i],
                    before,
                    float(reward[i]),
                    bool(terminated[i]),
                    False,
                    int(source[i]),
                    int(phase[i]),
                    bool(startable[i]),
                )
            )
            begun += trail[: -self.horizon][-1:]
        self.push(begun)

    def close(self, lanes, obs):
        for i, lane in enumerate(lanes.tolist()):
            if trail := self.trails[lane]:
                last, n = self.rows[trail[-1]], len(self.rows)
                last.next = n
                self.rows.append(
                    Row(
                        {k: v[i] for k, v in obs.items()},
                        last.action,
                        np.zeros_like(last.action),
                        final=True,
                        source=last.source,
                        phase=last.phase,
                        startable=False,
                        next=n,
                    )
                )
                for k, serial in enumerate(trail):
                    if last.terminated:
                        self.rows[serial].bound = sum(
                            self.gamma**j * self.rows[s].reward for j, s in enumerate(trail[k:])
                        )
                self.push(s for s in trail if s not in self.ready)
                self.trails[lane] = []

    def drop(self, lanes):
        gone = {s for lane in lanes.tolist() for s in self.trails[lane]}
        for s in gone:
            self.rows[s].startable = False
        self.ready = [s for s in self.ready if s not in gone]

    def cut(self):
        for lane, trail in enumerate(self.trails):
            if trail:
                last = self.rows[trail[-1]]
                last.final, last.next, last.reward, last.terminated, last.startable = (
                    True,
                    trail[-1],
                    0.0,
                    False,
                    False,
                )
                self.push(s for s in trail[:-1] if s not in self.ready)
                self.trails[lane] = []

    def drawable(self) -> list[int]:
        return sorted(s for s in self.ready if s >= self.oldest)

    def length(self) -> int:
        """Evicted ones count while an older entry than they is not evicted."""
        young = [i for i, s in enumerate(self.ready) if s >= self.oldest]
        return len(self.ready) - young[0] if young else 0

    def transition(self, serial: int) -> dict:
        start, chain, at = self.rows[serial], [], serial
        while len(chain) < self.horizon and not self.rows[at].final:
            chain.append(self.rows[at])
            at = self.rows[at].next
        n, by_person = len(chain), start.source == HUMAN
        own = [
            r.source == start.source and (r.phase > PAUSE or r.phase < PAUSE and not by_person) for r in chain
        ]
        over = any(r.terminated for r in chain)
        return {
            "actions": np.stack([r.action for r in chain] + [self.rows[at].action] * (self.horizon - n)),
            "rewards": sum(self.gamma**k * r.reward for k, r in enumerate(chain)),
            "discounts": 0.0 if over else self.gamma**n,
            "steps": n,
            "source": start.source,
            "bound": start.bound,
            "own": [all(own[: k + 1]) and k < n for k in range(self.horizon)],
            "before": start.before,
            "obs": start.obs,
            "next_obs": self.rows[at].obs,
            "at": at,
        }

    def window(self, serial: int, length: int) -> "dict | None":
        """`length` decisions from `serial` on; None where they are not all known or a time limit cuts
        them."""
        out, ended = {"obs": [], "action": [], "reward": [], "over": []}, False
        for _ in range(length):
            t, at = self.transition(serial) if self.reaches(serial) else None, serial
            if (
                t is None
                or not ended
                and (self.rows[at].final or t["steps"] < self.horizon and t["discounts"] != 0)
            ):
                return None
            ended = ended or t["discounts"] == 0
            row = {
                "obs": t["obs"]["state"],
                "action": t["actions"].ravel(),
                "reward": t["rewards"],
                "over": ended,
            }
            for key, value in row.items():
                out[key].append(value)
            serial = t["at"]
        return out

    def reaches(self, serial: int) -> bool:
        """Whether what followed `serial` is known for a whole decision."""
        for _ in range(self.horizon):
            serial = self.rows[serial].next
            if serial < 0:
                return False
        return True


def observe(rng, n: int) -> dict:
    return {
        "state": rng.normal(size=(n, 2)).astype(F),
        "picture": rng.integers(0, 255, (n, 2, 3), dtype=np.uint8),
    }


def same(replay: Replay, plain: PlainReplay) -> None:
    assert len(replay) == plain.length()
    want = plain.drawable()
    have = min(plain.capacity, len(plain.rows))
    rows = plain.rows[len(plain.rows) - have :]
    if not rows:
        return
    at = np.arange(len(plain.rows) - have, len(plain.rows)) % plain.capacity
    for name in ("action", "reward", "terminated", "final", "source", "phase", "startable", "next", "bound"):
        np.testing.assert_allclose(
            getattr(replay, name)[at], [getattr(r, name) for r in rows], rtol=1e-5, atol=1e-6, err_msg=name
        )
    told = [r.source for r in rows if not r.final]
    assert replay.counts() == {s: told.count(s) for s in sorted(set(told))}
    if not want:
        return
    assert np.unique(replay.draw(3000, np.random.default_rng(0))).tolist() == want
    b, told = replay.gather(np.array(want)), [plain.transition(s) for s in want]
    for name in ("actions", "rewards", "discounts", "steps", "source", "bound", "own", "before"):
        np.testing.assert_allclose(
            getattr(b, name), np.stack([t[name] for t in told]), rtol=1e-5, atol=1e-6, err_msg=name
        )
    for name in ROWS:
        assert np.array_equal(b.obs[name], np.stack([t["obs"][name] for t in told]))
        assert np.array_equal(b.next_obs[name], np.stack([t["next_obs"][name] for t in told]))
    for length in (1, 2, 4):
        drawn = replay.draw(40, np.random.default_rng(length))
        got = replay.windows(40, length, np.random.default_rng(length))
        windows = [w for s in drawn if (w := plain.window(int(s), length))]
        assert len(got["over"]) == len(windows)
        for name in got if windows else ():
            np.testing.assert_allclose(
                got[name], np.stack([w[name] for w in windows]), rtol=1e-5, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize(
    ("horizon", "lanes", "capacity", "ends"),
    [
        (1, 1, 6, 0.1),
        (1, 3, 23, 0.2),
        (3, 1, 12, 0.02),
        (3, 2, 40, 0.1),
        (4, 3, 36, 0.05),
        (2, 4, 120, 0.15),
        (5, 2, 28, 0.02),
    ],
)
def test_random_calls_leave_what_a_plain_list_of_steps_holds(horizon, lanes, capacity, ends, tmp_path):
    """Interleaved lanes, ends of both kinds, drops, cuts, closes of nothing, episodes longer than the ring;
    and a store that follows the journal is the same at any time."""
    rng = np.random.default_rng(horizon + 10 * lanes)
    replay = Replay(ROWS, 2, horizon, 0.9, capacity, lanes, Journal(tmp_path / "j", 10**6))
    other, reader = Replay(ROWS, 2, horizon, 0.9, capacity, lanes), Journal(tmp_path / "j", 10**6)
    plain, told, said = PlainReplay(horizon, 0.9, capacity, lanes), 0, 0
    for call in range(260):
        chosen = np.flatnonzero(rng.random(lanes) < 0.8)
        n = len(chosen)
        over = rng.random(n) < ends
        won = over & (rng.random(n) < 0.6)
        source = np.repeat(rng.integers(0, 2), n) if rng.random() < 0.7 else rng.integers(0, 3, n)
        args = (
            chosen,
            observe(rng, n),
            rng.normal(size=(n, 2)).astype(F),
            rng.normal(size=n).astype(F),
            won,
            source,
            rng.choice([0, 0, 1, 2, 3], n),
            rng.random(n) < 0.9,
        )
        told += n
        for store in (replay, plain):
            store.add(*args)
        if rng.random() < 0.03:
            for store in (replay, plain):
                store.drop(chosen[:1])
        nothing = [lane for lane in range(lanes) if not plain.trails[lane] and rng.random() < 0.3]
        closing = np.concatenate([chosen[over | (rng.random(n) < 0.01)], np.array(nothing, int)])
        args = closing, observe(rng, len(closing))
        for store in (replay, plain):
            store.close(*args)
        if rng.random() < 0.01:
            replay.cut()
            plain.cut()
        if call % 13 == 0 or call < 20:
            same(replay, plain)
            said += other.follow(reader)
            same(other, plain)
    assert said + other.follow(reader) == told and len(plain.rows) > 2 * capacity
    same(other, plain)
    assert other.open == replay.open == plain.trails


def test_a_store_that_only_acts_counts_its_steps_and_writes_what_one_that_keeps_them_reads(tmp_path):
    tape, rng = ReplayWriter(ROWS, Journal(tmp_path / "j", 100)), np.random.default_rng(0)
    tape.add(np.array([0, 1]), observe(rng, 2), np.ones((2, 2)), np.ones(2), np.zeros(2, bool))
    tape.add(np.array([1]), observe(rng, 1), np.ones((1, 2)), np.ones(1), np.zeros(1, bool), HUMAN, 2, False)
    tape.cut()
    replay = Replay(ROWS, 2, 1, 0.9, 50, 2, Journal(tmp_path / "j", 100))
    assert len(tape) == replay.restore() == 3
    assert replay.source[:3].tolist() == [0, 0, 1] and replay.phase[:3].tolist() == [0, 0, 2]
    assert replay.startable[:3].tolist() == [False, True, False] and replay.final[:3].tolist() == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "rows", [{"state": ((3,), F), "picture": ((2, 3), np.uint8)}, {"state": ((1,), F)}, {"state": ((40,), F)}]
)
def test_a_journal_of_other_observations_is_refused_by_name(tmp_path, rows):
    one = Replay(ROWS, 2, 1, 0.9, 50, 1, Journal(tmp_path / "j", 100))
    one.add(
        np.array([0]), observe(np.random.default_rng(0), 1), np.ones((1, 2)), np.ones(1), np.zeros(1, bool)
    )
    with pytest.raises(UserError, match="holds steps of another env or horizon; start a new run"):
        Replay(rows, 2, 1, 0.9, 50, 1, Journal(tmp_path / "j", 100)).restore()


@pytest.mark.parametrize(("horizon", "lanes", "least"), [(1, 1, 6), (4, 3, 36)])
def test_a_ring_holds_two_chunks_of_every_lane_or_is_refused(horizon, lanes, least):
    assert Replay(ROWS, 2, horizon, 0.9, least, lanes).capacity == least
    with pytest.raises(
        UserError,
        match=f"at least {least} control steps for {lanes} envs and chunks of {horizon}, got {least - 1}",
    ):
        Replay(ROWS, 2, horizon, 0.9, least - 1, lanes)


def test_nothing_can_be_drawn_from_a_store_without_a_whole_transition():
    replay = Replay(ROWS, 2, 1, 0.9, 50, 1)
    replay.add(
        np.array([0]), observe(np.random.default_rng(0), 1), np.ones((1, 2)), np.ones(1), np.zeros(1, bool)
    )
    with pytest.raises(UserError, match="the replay source is empty"):
        replay.draw(1, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("batch", "shares", "sizes", "want"),
    [
        (10, (0.25, 0.75), (1, 1), [3, 7]),
        (10, (0.35, 0.65), (1, 1), [4, 6]),
        (3, (1, 1, 1), (1, 1, 1), [1, 1, 1]),
        (4, (1, 1, 1), (1, 1, 1), [2, 1, 1]),
        (7, (0.5, 0.3, 0.2), (1, 1, 1), [4, 2, 1]),
        (8, (0.5, 0.25, 0.25), (0, 1, 1), [0, 4, 4]),
        (30, (0.1, 0.2, 0.7), (1, 1, 1), [3, 6, 21]),
        (9, (0.0, 1.0), (1, 1), [0, 9]),
    ],
)
def test_the_largest_remainders_get_what_is_left_and_the_first_of_equal_ones(batch, shares, sizes, want):
    assert counts(batch, shares, sizes) == want


@pytest.mark.parametrize(
    ("shares", "sizes", "says"),
    [
        ((-0.1, 1.0), (1, 1), "must be >= 0 and not all 0"),
        ((0.0, 0.0), (1, 1), "not all 0"),
        ((1.0, 0.0), (0, 5), "every replay source is empty"),
    ],
)
def test_shares_that_give_nothing_are_refused(shares, sizes, says):
    with pytest.raises(UserError, match=says):
        counts(4, shares, sizes)


def test_a_mixture_is_its_sources_batches_one_after_the_other():
    rng = np.random.default_rng(0)
    stores = [Replay(ROWS, 2, 1, 0.9, 50, 1) for _ in range(2)]
    for k, store in enumerate(stores):
        for _ in range(6 + k):
            store.add(
                np.array([0]),
                observe(rng, 1),
                rng.normal(size=(1, 2)),
                rng.normal(size=1),
                np.zeros(1, bool),
                k,
            )
    got = Mixture({"a": (stores[0], 0.25), "b": (stores[1], 0.75)}).sample(8, np.random.default_rng(5))
    again = np.random.default_rng(5)
    parts = [stores[0].sample(2, again), stores[1].sample(6, again)]
    for batch in (got, join(parts)):
        for name in ("actions", "rewards", "discounts", "steps", "own", "source", "bound", "before"):
            assert np.array_equal(getattr(batch, name), np.concatenate([getattr(p, name) for p in parts])), (
                name
            )
        for side in ("obs", "next_obs"):
            assert {*getattr(batch, side)} == {*ROWS}
            for name in ROWS:
                assert np.array_equal(
                    getattr(batch, side)[name], np.concatenate([getattr(p, side)[name] for p in parts])
                )
    assert join(parts[:1]) is parts[0] and got.source.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("known", [None, (False, True, False, True)])
def test_recorded_episodes_are_the_calls_of_their_steps(known):
    """Won without a reward, lost, won with one, of a single frame; rows between two episodes belong to
    none."""
    rng = np.random.default_rng(1)
    first, to, success = (
        np.array([0, 5, 9, 14]),
        np.array([4, 8, 14, 15]),
        np.array([True, False, True, False]),
    )
    obs, last = observe(rng, 16), observe(rng, 4)
    action, reward = rng.normal(size=(16, 2)).astype(F), np.zeros(16, F)
    reward[6:13], reward[13] = 0.5, 0.25
    source, phase = rng.integers(0, 3, 16), rng.integers(0, 4, 16)
    replay, plain = Replay(ROWS, 2, 2, 0.9, 60, 1), PlainReplay(2, 0.9, 60, 1)
    add_episodes(
        replay,
        obs,
        action,
        reward,
        first,
        to,
        success,
        source,
        phase,
        **({} if known is None else {"last": last, "known": np.array(known)}),
    )
    known, lane = known or (False,) * 4, np.zeros(1, int)
    for e, (a, b) in enumerate(zip(first.tolist(), to.tolist(), strict=False)):
        for row in range(a, b if success[e] or known[e] else b - 1):
            end = success[e] and row == b - 1
            one = slice(row, row + 1)
            earned = np.ones(1) if end and e == 0 else reward[one]  # the third has a reward of its own
            plain.add(
                lane,
                {k: v[one] for k, v in obs.items()},
                action[one],
                earned,
                np.array([end]),
                source[one],
                phase[one],
                [True],
            )
        plain.close(
            lane,
            {k: v[e : e + 1] for k, v in last.items()}
            if known[e]
            else {k: v[b - 1 : b] for k, v in obs.items()},
        )
    same(replay, plain)
    assert replay.total == len(plain.rows)
