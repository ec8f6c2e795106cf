"""Replay: exact transitions, guaranteed shares, corrections in both stores, and nothing lost to a kill."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from toys import PointReach

from robo_rl.errors import UserError
from robo_rl.journal import Journal, frame_at, next_frame
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.replay import EXPERT, HUMAN, Mixture, Replay, add_episodes, counts
from robo_rl.replay_collector import ReplayCollector

F = np.float32
ROWS = {"state": ((2,), F)}


def lane_episode(
    replay: Replay, lane: int, length: int, tag: int, ends: str, close: bool = True, source=0
) -> None:
    """State is [tag, t]; action 10 tag + t; the last step earns 1."""
    for t in range(length):
        last = t == length - 1
        replay.add(
            np.array([lane]),
            {"state": np.array([[tag, t]], F)},
            np.array([[10 * tag + t]], F),
            np.array([float(last)], F),
            np.array([last and ends == "terminated"]),
            source,
        )
    if close:
        replay.close(np.array([lane]), {"state": np.array([[tag, length]], F)})


def small(horizon=3, capacity=60, lanes=2, gamma=0.5, journal=None) -> Replay:
    return Replay(ROWS, 1, horizon, gamma, capacity, lanes, journal)


def everything(replay: Replay) -> dict[tuple[int, int], int]:
    """(tag, t) of every transition that can be drawn -> its serial."""
    drawn = np.unique(replay.draw(4000, np.random.default_rng(0)))
    at = drawn % replay.capacity
    return {tuple(map(int, s)): int(n) for s, n in zip(replay.obs["state"][at], drawn, strict=False)}


def test_a_chunk_is_the_discounted_sum_of_the_steps_that_ran():
    r = small()
    lane_episode(r, 0, 5, 1, "terminated")
    serial = everything(r)
    b = r.gather(np.array([serial[1, t] for t in (0, 1, 2, 3, 4)]))
    assert b.steps.tolist() == [3, 3, 3, 2, 1]
    np.testing.assert_allclose(b.rewards, [0, 0, 0.25, 0.5, 1])
    np.testing.assert_allclose(b.discounts, [0.125, 0.125, 0, 0, 0])  # those that reach the end terminate
    assert b.next_obs["state"].tolist() == [[1, 3], [1, 4], [1, 5], [1, 5], [1, 5]]
    assert b.actions[3, :, 0].tolist() == [13, 14, 14] and b.own[3].tolist() == [True, True, False]
    np.testing.assert_allclose(b.bound, [0.0625, 0.125, 0.25, 0.5, 1])
    assert b.before[:, 0].tolist() == [0, 10, 11, 12, 13]


def test_a_time_limit_bootstraps_from_the_state_it_cut():
    r = small()
    lane_episode(r, 0, 4, 2, "truncated")
    b = r.gather(np.array([everything(r)[2, 3]]))
    assert b.steps[0] == 1 and b.discounts[0] == 0.5 and b.next_obs["state"][0].tolist() == [2, 4]
    assert b.bound[0] == -np.inf  # nobody knows what would have followed


def test_steps_of_interleaved_lanes_never_mix():
    r = small(capacity=200)
    for t in range(6):
        r.add(
            np.array([0, 1]),
            {"state": np.array([[1, t], [2, t]], F)},
            np.array([[t], [100 + t]], F),
            np.zeros(2),
            np.zeros(2, bool),
        )
        if t == 3:
            r.close(np.array([1]), {"state": np.array([[2, 4]], F)})
    b = r.gather(r.draw(500, np.random.default_rng(1)))
    assert (b.next_obs["state"][b.steps == 3] - b.obs["state"][b.steps == 3] == [0, 3]).all()
    assert (np.diff(b.actions[b.steps == 3, :, 0], axis=1) == 1).all()


def test_what_has_no_whole_chunk_yet_is_not_drawn():
    r = small()
    lane_episode(r, 0, 5, 1, "open", close=False)
    assert set(everything(r)) == {(1, 0), (1, 1)} and len(r) == 2
    r.cut()  # whoever acted is gone: the newest observation is where the episode ends
    assert set(everything(r)) == {(1, 0), (1, 1), (1, 2), (1, 3)}
    b = r.gather(np.array([everything(r)[1, 3]]))
    assert b.steps[0] == 1 and b.discounts[0] == 0.5 and b.next_obs["state"][0].tolist() == [1, 4]


def test_a_full_ring_forgets_the_oldest_and_stays_exact():
    r = small(capacity=40)
    for tag in range(1, 30):
        lane_episode(r, tag % 2, 7, tag, "terminated")
    found = everything(r)
    assert len(r) >= 28 and {29, 28} <= {tag for tag, _ in found} and 1 not in {tag for tag, _ in found}
    b = r.gather(np.array(list(found.values())))
    tags = np.array([tag for tag, _ in found])
    assert (b.next_obs["state"][:, 0] == tags).all() and (b.actions[:, :, 0] // 10 >= tags[:, None]).all()


def test_a_step_of_one_and_a_chunk_of_one_are_the_same():
    r = small(horizon=1)
    lane_episode(r, 0, 3, 1, "terminated")
    b = r.gather(np.array([everything(r)[1, t] for t in range(3)]))
    assert b.rewards.tolist() == [0, 0, 1] and b.discounts.tolist() == [0.5, 0.5, 0] and (b.steps == 1).all()


@pytest.mark.parametrize("batch", [1, 2, 7, 256])
@pytest.mark.parametrize(
    ("shares", "sizes"),
    [
        ((0.5, 0.5), (3, 10**6)),
        ((0.5, 0.25, 0.25), (10, 1, 5)),
        ((0.34, 0.33, 0.33), (1, 1, 1)),
        ((0.5, 0.5), (0, 9)),
        ((1, 0), (5, 5)),
    ],
)
def test_shares_of_a_batch_are_exact_whatever_the_sizes(batch, shares, sizes):
    got = counts(batch, shares, sizes)
    live = [s if n else 0 for s, n in zip(shares, sizes, strict=False)]
    assert sum(got) == batch
    assert all(abs(k - batch * s / sum(live)) < 1 for k, s in zip(got, live, strict=False))
    assert all(k == 0 for k, s in zip(got, live, strict=False) if s == 0)


def test_an_empty_source_is_said_once_and_all_empty_is_a_mistake():
    a, b, said = small(), small(), []
    mixture = Mixture({"demonstrations": (a, 0.5), "online": (b, 0.5)}, said.append)
    with pytest.raises(UserError, match="every replay source is empty"):
        mixture.sample(8, np.random.default_rng(0))
    lane_episode(b, 0, 5, 1, "terminated")
    for _ in range(3):
        assert len(mixture.sample(8, np.random.default_rng(0)).rewards) == 8
    assert [w for w in said if "demonstrations" in w] == [
        "replay source 'demonstrations' is empty: its share goes to the others until it has something"
    ]
    lane_episode(a, 0, 5, 7, "terminated", source=EXPERT)
    batch = mixture.sample(9, np.random.default_rng(0))
    assert (batch.source == EXPERT).sum() == 5 and mixture.counts(9) == [5, 4]


def test_recorded_episodes_become_transitions_and_a_failure_bootstraps():
    r = small(capacity=100)
    state = np.stack([np.r_[np.full(4, 1), np.full(4, 2)], np.r_[0:4, 0:4]], 1).astype(F)
    add_episodes(
        r,
        {"state": state},
        np.arange(8, dtype=F)[:, None],
        np.zeros(8, F),
        np.array([0, 4]),
        np.array([4, 8]),
        np.array([True, False]),
    )
    found = everything(r)
    assert set(found) == {(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2)}
    b = r.gather(np.array([found[1, 3], found[2, 2]]))
    assert b.rewards.tolist() == [1, 0] and b.discounts.tolist() == [0, 0.5] and (b.source == EXPERT).all()


def test_the_observation_after_the_last_action_of_a_recording_is_what_a_failure_bootstraps_from():
    state = np.stack([np.r_[np.full(4, 1), np.full(4, 2)], np.r_[0:4, 0:4]], 1).astype(F)
    last, known = {"state": np.array([[1, 4], [2, 4]], F)}, np.array([False, True])
    r = small(capacity=100)
    add_episodes(
        r,
        {"state": state},
        np.arange(8, dtype=F)[:, None],
        np.zeros(8, F),
        np.array([0, 4]),
        np.array([4, 8]),
        np.array([True, False]),
        last=last,
        known=known,
    )
    found = everything(r)
    assert set(found) == {(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)}
    b = r.gather(np.array([found[2, 3]]))
    assert b.discounts.tolist() == [0.5] and b.next_obs["state"].tolist() == [[2, 4]]


# ---- corrections


class Person(PointReach):
    """PointReach in which a person takes some steps over, as an intervention wrapper reports it."""

    def __init__(self, n: int, takes, limit: int = 20):
        super().__init__(n, limit)
        self.takes, self.clock, self.log = takes, 0, []

    def step(self, actions):
        human = np.array([self.takes(i, self.clock) for i in range(self.num_envs)])
        ran = np.where(human[:, None], self.expert_action(), actions).astype(F)
        before = self._obs()["state"].copy()
        obs, reward, terminated, truncated, info = super().step(ran)
        for i in human.nonzero()[0]:
            self.log.append((before[i], ran[i], reward[i]))
        self.clock += 1
        return (
            obs,
            reward,
            terminated,
            truncated,
            info
            | {
                "executed": np.clip(ran, -1, 1),
                "source": human.astype(np.uint8),
                "phase": 3 * human.astype(np.uint8),
            },
        )


@pytest.mark.parametrize("execute", [1, 4])
@pytest.mark.parametrize(
    "takes", [lambda i, t: (t // 7) % 2 == i % 2, lambda i, t: t % 3 == 0, lambda i, t: True]
)
def test_every_human_step_is_in_both_buffers_with_the_action_that_ran(takes, execute):
    """The bug of a public learner was a flag under another name: corrections never reached the
    demonstrations."""
    options = PolicyOptions(kind="squashed", horizon=execute, execute=execute, hidden=16, layers=1)
    policy = make_policy(options, ObsSpec(state=4, action=2), 0)
    # no time limit: help in vain would be dropped
    env, rows = Person(3, takes, limit=200), {"state": ((4,), F)}
    online, demos = (Replay(rows, 2, execute, 0.9, 2000, 3) for _ in range(2))
    collector = ReplayCollector(env, policy, online, demos, 0)
    collector.run(policy, 60)
    assert collector.stats["human_steps"] + collector.human.sum() == len(env.log) > 0
    online.cut()
    demos.cut()
    for store in (online, demos):
        drawn = np.unique(store.draw(20_000, np.random.default_rng(0)))
        at = drawn[store.source[drawn % store.capacity] == HUMAN] % store.capacity
        have = {(*store.obs["state"][i].tolist(), *store.action[i].tolist()) for i in at}
        want = {(*s.tolist(), *a.tolist()) for s, a, _ in env.log}
        lost = want - have
        assert len(lost) <= 3, f"{len(lost)} of {len(want)}"  # at most the step in flight of each env
        if store is demos:
            assert have <= want and len(drawn) == len(at)  # and nothing but human steps begins a chunk there
    b = demos.gather(np.unique(demos.draw(5000, np.random.default_rng(0))))
    assert (b.source == HUMAN).all() and b.own[:, 0].all()
    whole = online.gather(np.unique(online.draw(20_000, np.random.default_rng(0))))
    both = {
        tuple(s): (a.tolist(), r, d)
        for s, a, r, d in zip(
            map(tuple, whole.obs["state"]), whole.actions, whole.rewards, whole.discounts, strict=False
        )
    }
    full = b.steps == execute  # the same chunk from either buffer, past the seam too
    same = [
        both[tuple(s)] == (a.tolist(), r, d)
        for s, a, r, d, f in zip(
            map(tuple, b.obs["state"]), b.actions, b.rewards, b.discounts, full, strict=False
        )
        if f and tuple(s) in both
    ]
    assert len(same) > 5 and all(same)


def test_a_recorder_that_goes_on_from_a_checkpoint_keeps_what_the_env_really_showed():
    policy = make_policy(
        PolicyOptions(kind="squashed", horizon=2, execute=2, hidden=16, layers=1),
        ObsSpec(state=4, action=2),
        0,
    )

    def recorder(kept: list) -> ReplayCollector:
        return ReplayCollector(
            Person(3, lambda i, t: True, limit=9),
            policy,
            *(Replay({"state": ((4,), F)}, 2, 2, 0.9, 500, 3) for _ in range(2)),
            0,
            record=kept.append,
        )

    whole, rest = [], []
    a, b = recorder(whole), recorder(rest)
    a.run(policy, 7)
    b.set_state(a.state())
    whole.clear()
    a.run(policy, 30)
    b.run(policy, 30)
    assert len(whole) == len(rest) > 6
    for x, y in zip(whole, rest, strict=False):
        assert (
            len(y) <= len(x)
            and np.array_equal(x.state[-len(y) :], y.state)
            and np.array_equal(x.action[-len(y) :], y.action)
        )


def test_a_chunk_is_cut_where_somebody_else_decides_and_planned_anew_after():
    options = PolicyOptions(kind="squashed", horizon=5, execute=5, hidden=16, layers=1)
    policy = make_policy(options, ObsSpec(state=4, action=2), 0)
    env = Person(1, lambda i, t: t in (2, 3))
    online = Replay({"state": ((4,), F)}, 2, 5, 0.9, 500, 1)
    collector = ReplayCollector(env, policy, online, None, 0)
    act, plans, made = policy.act, [], []
    policy.act = lambda *a: plans.append(0) or act(*a)
    for _ in range(12):
        before = len(plans)
        collector.run(policy, 1)
        made.append(len(plans) - before)
    # plans at 0; the person decides 2 and 3, after each of which it plans anew; then every five steps
    assert made == [1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0]
    b = online.gather(np.arange(1, 2))
    # what imitates the policy's step stops at the seam
    assert b.own[0].tolist() == [True, False, False, False, False]


# ---- durability


def test_a_journal_replayed_is_the_same_store(tmp_path):
    a = small(capacity=60, journal=Journal(tmp_path / "j", 60))
    rng = np.random.default_rng(0)
    for tag in range(1, 12):
        lane_episode(
            a, tag % 2, int(rng.integers(1, 9)), tag, "terminated" if tag % 3 else "truncated", close=tag < 11
        )
    b = small(capacity=60, journal=Journal(tmp_path / "j", 60))
    assert b.restore() > 0
    for name in ("action", "reward", "terminated", "final", "source", "next", "bound", "before"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert np.array_equal(a.obs["state"], b.obs["state"]) and a.open == b.open and len(a) == len(b)
    assert np.array_equal(a.draw(50, np.random.default_rng(3)), b.draw(50, np.random.default_rng(3)))


def test_help_in_vain_is_drawn_no_more_and_stays_so_after_a_kill(tmp_path):
    a = small(journal=Journal(tmp_path / "j", 60))
    lane_episode(a, 0, 5, 1, "terminated")
    lane_episode(a, 1, 6, 2, "truncated", close=False)
    assert {tag for tag, _ in everything(a)} == {1, 2}
    a.drop(np.array([1]))
    a.close(np.array([1]), {"state": np.array([[2, 6]], F)})
    lane_episode(a, 1, 4, 3, "terminated")
    assert sorted(everything(a)) == [(1, t) for t in range(5)] + [(3, t) for t in range(4)] and len(a) == 9
    b = small(journal=Journal(tmp_path / "j", 60))
    b.restore()
    assert everything(b) == everything(a) and len(b) == 9


def test_a_torn_end_of_a_journal_is_left_out(tmp_path):
    a = small(journal=Journal(tmp_path / "j", 60))
    lane_episode(a, 0, 6, 1, "terminated")
    path = a.journal.path(0)
    blob = path.read_bytes()
    for cut in (1, 7, 30):
        path.write_bytes(blob[:-cut])
        b = small(journal=Journal(tmp_path / "j", 60))
        assert b.restore() == 6 and b.total == 6  # the close was torn, the six steps are whole


def frames(blob: bytes) -> list[int]:
    """Where the frames of a journal begin."""
    out, at = [], 0
    while at >= 0 and frame_at(blob, at):
        out.append(at)
        at = next_frame(blob, at)
    return out


@pytest.mark.parametrize("place", ["magic", "size", "kind", "rows", "steps", "crc", "body", "gone", "zeros"])
def test_damage_in_the_middle_of_a_journal_costs_the_calls_it_hit_and_is_counted(place, tmp_path):
    a = small(journal=Journal(tmp_path / "j", 60))
    for tag in (1, 2, 3):
        lane_episode(a, 0, 6, tag, "terminated")
    path = a.journal.path(0)
    blob = path.read_bytes()
    at = frames(blob)
    assert len(at) == 21  # 18 steps and 3 closes
    hit, after = at[9], at[10]  # the third step of the second episode
    if place == "gone":
        path.write_bytes(blob[:hit] + blob[after:])
    elif place == "zeros":
        path.write_bytes(blob[:hit] + bytes(after - hit) + blob[after:])
    else:
        where = hit + {"magic": 1, "size": 4, "kind": 8, "rows": 9, "steps": 13, "crc": 21, "body": 30}[place]
        path.write_bytes(blob[:where] + bytes([blob[where] ^ 0x40]) + blob[where + 1 :])
    b = small(journal=Journal(tmp_path / "j", 60))
    assert b.restore() == 17 and (b.journal.lost, b.journal.breaks) == (1, 1)
    found = everything(b)
    assert {tag for tag, _ in found} == {1, 2, 3} and (2, 2) not in found
    batch = b.gather(np.array(list(found.values())))
    jump = batch.next_obs["state"][:, 1] - batch.obs["state"][:, 1]
    assert (jump == batch.steps).all()  # no chunk leads over the gap


def test_the_end_of_an_episode_lost_to_damage_joins_it_to_none(tmp_path):
    """No control step is lost then, and yet what follows in the lane is another episode."""
    a = small(journal=Journal(tmp_path / "j", 60))
    for tag in (1, 2):
        lane_episode(a, 0, 6, tag, "truncated")
    path = a.journal.path(0)
    blob, hit = path.read_bytes(), frames(path.read_bytes())[6]  # the first close
    path.write_bytes(blob[: hit + 30] + b"\xee" + blob[hit + 31 :])
    b = small(journal=Journal(tmp_path / "j", 60))
    assert b.restore() == 12 and (b.journal.lost, b.journal.breaks) == (0, 1)
    batch = b.gather(b.draw(500, np.random.default_rng(0)))
    assert (batch.obs["state"][:, 0] == batch.next_obs["state"][:, 0]).all()


def test_a_last_call_that_is_whole_and_damaged_is_counted_and_one_cut_off_is_not(tmp_path):
    a = small(journal=Journal(tmp_path / "j", 60))
    lane_episode(a, 0, 6, 1, "open", close=False)
    path = a.journal.path(0)
    blob = path.read_bytes()
    for data, steps, lost in ((blob[:-1] + bytes([blob[-1] ^ 1]), 5, 1), (blob[:-1], 5, 0)):
        path.write_bytes(data)
        b = small(journal=Journal(tmp_path / "j", 60))
        assert (b.restore(), b.journal.lost, b.journal.breaks) == (steps, lost, lost)


def test_a_file_of_a_journal_that_is_gone_is_counted(tmp_path):
    a = small(capacity=400, journal=Journal(tmp_path / "j", 400, limit=700))
    for tag in range(1, 12):
        lane_episode(a, 0, 6, tag, "terminated")
    a.journal.path(2).unlink()
    b = small(capacity=400, journal=Journal(tmp_path / "j", 400))
    have = b.restore()
    assert b.journal.breaks == 1 and b.journal.lost == 66 - have > 0


def test_steps_are_counted_on_by_whoever_appends_next(tmp_path):
    for tag in (1, 2, 3):  # each time another process
        a = small(journal=Journal(tmp_path / "j", 60))
        lane_episode(a, 0, 5, tag, "terminated")
        a.journal.close()
    b = small(journal=Journal(tmp_path / "j", 60))
    assert b.restore() == 15 and b.journal.steps == 15 and not b.journal.breaks


def test_a_journal_of_the_older_format_is_refused_by_name(tmp_path):
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "steps-000000.log").write_bytes(b"1LPR" + bytes(40))
    with pytest.raises(UserError, match="older robo_rl"):
        small(journal=Journal(tmp_path / "j", 60)).restore()


def test_a_write_that_failed_half_way_leaves_the_journal_as_it_was_and_it_goes_on(tmp_path):
    """The disk is full in the middle of a call (a limit on the size of files stands for it), then there is
    room again."""
    a = small(journal=Journal(tmp_path / "j", 60))
    lane_episode(a, 0, 4, 1, "open", close=False)
    path = a.journal.path(0)
    size, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    step = (
        np.array([0]),
        {"state": np.array([[1, 4]], F)},
        np.array([[14]], F),
        np.zeros(1, F),
        np.zeros(1, bool),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with pytest.raises(UserError, match="No space left on device.*what was recorded before is intact"):
            a.add(*step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size and a.total == 4  # neither here nor there
    a.add(*step)
    a.close(np.array([0]), {"state": np.array([[1, 5]], F)})
    b = small(journal=Journal(tmp_path / "j", 60))
    assert b.restore() == 5 and not b.journal.breaks and everything(b) == everything(a)


def test_a_journal_rewound_to_a_mark_is_as_it_was_there_and_goes_on_as_if_nothing_had_followed(tmp_path):
    def tags(folder, numbers, journal):
        r = small(capacity=400, journal=journal)
        r.restore()
        for tag in numbers:
            lane_episode(r, tag % 2, 6, tag, "terminated")
        journal.close()
        return r

    journal = Journal(tmp_path / "a", 400, limit=700)
    tags(tmp_path / "a", range(1, 5), journal)
    mark, steps = journal.mark(), journal.steps
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    # what a killed process made after its checkpoint
    tags(tmp_path / "a", range(20, 28), Journal(tmp_path / "a", 400, limit=700))
    again = Journal(tmp_path / "a", 400, limit=700)
    assert again.rewind(mark) and not Journal(tmp_path / "b", 400, limit=700).rewind(mark)
    mine, other = tags(tmp_path / "a", range(5, 9), again), None
    straight = Journal(tmp_path / "b", 400, limit=700)
    straight.rewind(mark)
    other = tags(tmp_path / "b", range(5, 9), straight)
    assert again.steps == straight.steps == steps + 24 and everything(mine) == everything(other)
    tags(tmp_path / "c", range(1, 9), Journal(tmp_path / "c", 400, limit=700))  # never interrupted
    for path in (tmp_path / "c").iterdir():
        for folder in "ab":
            assert path.read_bytes() == (tmp_path / folder / path.name).read_bytes()


@pytest.mark.parametrize("capacity", range(60, 71))
def test_files_that_a_checkpoint_may_need_stay_until_another_was_saved(capacity, tmp_path):
    journal = Journal(tmp_path / "j", capacity, limit=500, hold=True)
    a = small(capacity=capacity, journal=journal)
    for tag in range(1, 30):
        lane_episode(a, 0, 6, tag, "terminated")
    many = journal.numbers()
    journal.release()
    assert journal.numbers() == many  # the checkpoint before may need them
    journal.release()
    b = small(capacity=capacity, journal=Journal(tmp_path / "j", capacity))
    b.restore()
    assert len(journal.numbers()) < len(many) and everything(a).keys() == everything(b).keys()
    assert np.array_equal(
        a.draw(200, np.random.default_rng(2)), b.draw(200, np.random.default_rng(2)) + a.total - b.total
    )
    x, y = (
        r.gather(rows[~r.final[rows % r.capacity]])
        for r in (a, b)
        for rows in [np.arange(r.total - r.capacity, r.total)]
    )
    # down to those that began in another file
    assert np.array_equal(x.before, y.before) and np.array_equal(x.actions, y.actions)
    assert not x.before[x.obs["state"][:, 1] == 0].any() and x.before[x.obs["state"][:, 1] > 0].all()


def test_what_was_evicted_is_never_drawn_though_it_lies_between_what_was_not():
    """A lane that waits long to become whole is pushed late: older rows then stand behind younger ones."""
    r = small(capacity=60, lanes=2)
    for t in range(2):
        r.add(
            np.array([1]), {"state": np.array([[7, t]], F)}, np.zeros((1, 1)), np.zeros(1), np.zeros(1, bool)
        )
    lane_episode(r, 0, 30, 1, "open", close=False)
    # now the first rows of lane 1 have their chunk: two of them, older than all that is ready
    for t in range(2, 5):
        r.add(
            np.array([1]), {"state": np.array([[7, t]], F)}, np.zeros((1, 1)), np.zeros(1), np.zeros(1, bool)
        )
    for t in range(30, 57):
        r.add(
            np.array([0]),
            {"state": np.array([[1, t]], F)},
            np.array([[10 + t]], F),
            np.zeros(1),
            np.zeros(1, bool),
        )
    oldest = r.total - r.capacity
    ready = r._ready[np.arange(r._gone, r._made) % r.capacity]
    assert oldest > 1 and (ready[1:] < oldest).any() and ready[0] >= oldest  # evicted ones lie between
    drawn = r.draw(20_000, np.random.default_rng(0))
    assert drawn.min() >= oldest
    names, times = np.unique(drawn, return_counts=True)
    # uniform over the others
    assert len(names) == (ready >= oldest).sum() and times.max() < 1.5 * times.min()


def test_a_journal_keeps_what_the_ring_holds_and_deletes_the_rest(tmp_path):
    journal = Journal(tmp_path / "j", 60, limit=500)
    a = small(capacity=60, journal=journal)
    for tag in range(1, 60):
        lane_episode(a, 0, 6, tag, "terminated")
    assert 2 <= len(journal.numbers()) < 20
    b = small(capacity=60, journal=Journal(tmp_path / "j", 60))
    b.restore()
    assert len(b) >= len(a) - 6 and max(t for t, _ in everything(b)) == 59


KILLED = """
import sys, numpy as np
sys.path[:0] = {path!r}
from test_replay import small, lane_episode
from robo_rl.journal import Journal
from robo_rl.replay import HUMAN
r = small(capacity=4000, journal=Journal({folder!r}, 4000))
tag = 0
while True:
    tag += 1
    for t in range(5):
        r.add(np.array([0]), dict(state=np.array([[tag, t]])), np.array([[t]]), np.zeros(1), np.zeros(1, bool), HUMAN)
        sys.stdout.write(str(tag) + " " + str(t) + chr(10)); sys.stdout.flush()
    r.close(np.array([0]), dict(state=np.array([[tag, 5]])))
"""  # noqa: E501


def test_a_killed_process_loses_no_correction_that_it_counted(tmp_path):
    code = KILLED.format(
        path=[str(Path(__file__).parent), str(Path(__file__).parent.parent)], folder=str(tmp_path / "j")
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(137)]
    os.kill(process.pid, signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait(20)
    said = {tuple(map(int, line.split())) for line in lines if line.endswith("\n")}
    r = small(capacity=4000, journal=Journal(tmp_path / "j", 4000))
    assert r.restore() >= len(said) >= 137
    r.cut()
    have = min(r.total, r.capacity)
    assert said <= {tuple(map(int, s)) for s in r.obs["state"][:have]}
    lost = said - set(everything(r))
    # the step whose outcome nobody saw begins no transition; it is the state another ends in
    assert len(lost) <= 1, lost


def test_with_the_projects_own_intervention_the_corrections_are_the_persons_steps_alone():
    """Brake and blend are recorded as human, for the policy did not choose them; nobody should imitate
    them."""
    from robo_rl.human.intervention import Intervention, InterventionEnv

    class Turns:
        """Policy, pause, correction, policy: 3, 2, 4 steps of each."""

        def __init__(self, env):
            self.env, self.t = env, 0

        def begin(self, mask, obs):
            pass

        def intervene(self, look):
            phase = np.repeat([0, 1, 3, 0], [3, 2, 4, 3])[self.t % 12]
            self.t += 1
            return Intervention(self.env.expert_action(), np.full(len(look.over), phase, np.uint8))

        def get_state(self):
            return {}

        def set_state(self, state, mask):
            pass

    base = PointReach(4, 1000, radius=0)  # no episode ends within a correction
    env = InterventionEnv(base, Turns(base), blend=0.3)
    policy = make_policy(
        PolicyOptions(kind="squashed", horizon=3, execute=3, hidden=16, layers=1),
        ObsSpec(state=4, action=2),
        0,
    )
    online, demos = (Replay({"state": ((4,), F)}, 2, 3, 0.9, 3000, 4) for _ in range(2))
    collector = ReplayCollector(env, policy, online, demos, 0)
    collector.run(policy, 120)
    told = collector.help_steps
    have = np.arange(online.total)
    have = have[~online.final[have]]
    own = ((online.source[have] == HUMAN) & (online.phase[have] == 3)).sum()
    assert told == 2 * own > 100  # of four steps at the controls two are blended
    assert ((online.source[have] == HUMAN) & (online.phase[have] == 0)).any()  # the blend back
    rows = np.unique(demos.draw(20_000, np.random.default_rng(0)))
    assert (demos.phase[rows] == 3).all() and abs(len(rows) - own) <= 4 * 3
    b = demos.gather(rows)
    assert not b.own.all() and (b.own[:, 0]).all()
    whole = online.gather(np.unique(online.draw(20_000, np.random.default_rng(0))))
    blended = (whole.source == HUMAN) & ~whole.own[:, 0]
    assert blended.any()
