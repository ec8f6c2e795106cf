"""What a slot vouches for: numbers that are finite, decisions that are as they were written, whatever a power
cut left."""

import functools
import os
import signal
import time

import numpy as np
import pytest
import torch
from test_runtime import T, build, local, make_learner, plain, processes, train, weights
from toys import PointReach

from robo_rl.checkpoint import pack, unpack
from robo_rl.rollout import Collector, new_columns
from robo_rl.runtime import ledger as led
from robo_rl.runtime import snapshot
from robo_rl.runtime.episode_slots import digest
from robo_rl.runtime.ledger import Fragment, Ledger
from robo_rl.runtime.rollout_buffer import LEASED, SEALED, TAKEN, RolloutBuffer, finite

WORKERS = 4


def collected(rows=T):
    """Columns of a few short episodes: some end in the fragment."""
    learner = make_learner()
    c = Collector(build(WORKERS), learner.policy, 0.99, 0)
    columns = new_columns(c.layout(learner.policy), T)
    for v in columns.values():
        v[:] = np.nan if v.dtype.kind == "f" else 0  # what was never written
    with c.threads():
        for t in range(rows):
            c.decide(learner.policy, columns, t)
    assert columns["done"][:rows].any() and not columns["done"][:rows].all()
    return c.layout(learner.policy), columns


NAMES = sorted(collected()[1])
FLOATS = [k for k, v in collected()[1].items() if v.dtype.kind == "f"]


def written(name, columns, rows):
    """Every place of a column that the first `rows` decisions wrote, as (row, env)."""
    if name.startswith("final/"):
        return np.argwhere(columns["done"][:rows])
    return np.argwhere(np.ones((rows + name.startswith("obs/"), columns["done"].shape[1]), bool))


@pytest.mark.parametrize("rows", [T, 5])
@pytest.mark.parametrize("name", FLOATS)
def test_a_number_that_is_not_finite_is_found_in_every_column_wherever_it_was_written(name, rows):
    _, columns = collected(rows)
    assert finite(columns, rows) == ""
    for bad in (np.nan, np.inf, -np.inf):
        for row, env in written(name, columns, rows):
            here = columns[name][row, env : env + 1].reshape(-1)[-1:]
            before = here.copy()
            here[:] = bad
            assert finite(columns, rows) == name, (row, env)
            here[:] = before


@pytest.fixture
def buffer(tmp_path):
    layout, columns = collected()
    buffer = RolloutBuffer.create(tmp_path / "s.bin", [layout], T, 3)
    for k, v in columns.items():
        buffer.columns(1, 0)[k][:] = v
    buffer.head["salt"][1] = 1234
    buffer.head["rows"][1] = T
    buffer.sign(1, 0, 0, T)
    buffer.head["checksum"][1] = buffer.checksum(1, 0)
    return buffer


@pytest.mark.parametrize("name", NAMES)
def test_a_bit_that_flips_is_found_in_every_column_wherever_it_was_written(buffer, name):
    columns = buffer.columns(1, 0)
    assert buffer.is_sealed_whole(1, 0) and buffer.sound(1, 0, T) == T
    for row, env in written(name, columns, T):
        here = columns[name][row, env : env + 1].view(np.uint8).reshape(-1)[-1:]
        here ^= 1
        first = row - (name.startswith("obs/") and row > 0)
        assert buffer.sound(1, 0, T) == first and not buffer.is_sealed_whole(1, 0), (row, env)
        here ^= 1
    assert buffer.is_sealed_whole(1, 0)


def test_a_header_that_says_something_else_than_was_sealed_is_found(buffer):
    for name in ("uid", "worker", "granted", "made", "oldest", "due", "rows", "salt"):
        buffer.head[name][1] += 1
        assert not buffer.is_sealed_whole(1, 0), name
        buffer.head[name][1] -= 1
    assert buffer.is_sealed_whole(1, 0)


def test_zeros_and_what_an_earlier_lease_wrote_are_not_taken_for_decisions(buffer):
    buffer.head["salt"][1] = 99
    assert buffer.sound(1, 0, T) == 0  # whole rows with whole checksums, of another lease
    buffer.sign(1, 0, 0, T)
    at = buffer.start + buffer.stride
    page = buffer.bytes[at : at + buffer.stride]
    page[:] = 0
    assert buffer.sound(1, 0, T) == 0


def test_the_last_observations_of_episodes_that_did_not_end_there_are_not_vouched_for(buffer):
    final, done = buffer.columns(1, 0)["final/state"], buffer.columns(1, 0)["done"]
    final[~done] = 7
    assert buffer.is_sealed_whole(1, 0) and finite(buffer.columns(1, 0), T) == ""


class IllAtTheEnd(PointReach):
    """A last observation of env 0 that is no number, as long as there is a file `ill`, which it deletes
    then."""

    def __init__(self, ill, n):
        super().__init__(n, limit=12)
        self.ill = ill

    def step(self, actions):
        obs, *rest = super().step(actions)
        if self.ill.exists() and self.over[:, 0].any():
            self.ill.unlink()
            obs["state"][0] = np.nan
        return obs, *rest


@pytest.mark.parametrize("where", ["one process", "worker process"])
def test_a_last_observation_that_is_not_finite_refuses_its_fragment_and_is_counted(tmp_path, where):
    learner, ill = make_learner(), tmp_path / "ill"
    env = functools.partial(IllAtTheEnd, ill)
    feed = (
        local(learner, env=env) if where == "one process" else processes(tmp_path / "run", learner, env=env)
    )
    try:
        train(learner, feed, 1)
        ill.touch()
        before = weights(learner)
        train(learner, feed, 2)
        assert not ill.exists() and feed.stats()["health/refused"] > 0
    finally:
        feed.close()
    assert torch.isfinite(weights(learner)).all() and not torch.equal(weights(learner), before)


# ---- power cuts --------------------------------------------------------------------------------------------


class Slow(PointReach):
    """Slow enough that a fragment can be stopped in the middle."""

    def step(self, actions):
        time.sleep(0.004)
        return super().step(actions)


def slow(n):
    return Slow(n, limit=12)


def cut_the_power(feed):
    """End the worker in the middle of a fragment of which some decisions are made, and the broker before it
    notices."""
    head, end = feed.buffer.head, time.monotonic() + 60
    while not ((head["state"] == LEASED) & (head["rows"] >= 3) & (head["rows"] < T - 1)).any():
        assert time.monotonic() < end
    pid = feed.pool.processes[0].process.pid
    os.kill(pid, signal.SIGSTOP)
    feed.pool.end, feed.stopping = lambda: None, True
    feed.pool.wake()
    feed.thread.join(20)
    os.kill(pid, signal.SIGKILL)
    feed.pool.writer.close()
    (slot,) = np.flatnonzero(head["state"] == LEASED)
    return int(slot)


def zero(buffer, slot, row):
    for k, v in buffer.columns(slot, 0).items():
        v[row + k.startswith("obs/") :] = 0


def stale(buffer, slot, row):
    """The pages of the slot are those of an earlier lease."""
    other = next(s for s in range(buffer.count) if buffer.head["state"][s] == TAKEN)
    a, b = (buffer.start + s * buffer.stride for s in (slot, other))
    buffer.bytes[a : a + buffer.stride] = buffer.bytes[b : b + buffer.stride]


def one_byte(buffer, slot, row):
    buffer.columns(slot, 0)["x0"][row].view(np.uint8).reshape(-1)[0] ^= 1


def no_sums(buffer, slot, row):
    buffer.sums(slot, 0)[row:] = 0


@pytest.mark.parametrize(("tear", "row"), [(zero, 0), (zero, 2), (stale, 0), (one_byte, 1), (no_sums, 2)])
def test_torn_decisions_of_a_fragment_in_progress_are_made_anew_and_the_run_ends_in_the_same_weights(
    tmp_path, tear, row
):
    learner = make_learner()
    feed = processes(tmp_path, learner, env=slow)
    train(learner, feed, 2)
    tensors = {}
    tree = pack({"learner": learner.state_dict(), "feed": feed.state()}, tensors)
    policy = {k: v.clone() for k, v in learner.policy.state_dict().items()}
    slot = cut_the_power(feed)
    made = int(feed.buffer.head["rows"][slot])
    tear(feed.buffer, slot, row)
    assert feed.buffer.sound(slot, 0, made) == row
    saved = unpack(tree, tensors)
    again = make_learner()
    again.policy.load_state_dict(policy)
    again.load_state_dict(saved["learner"])
    feed = processes(tmp_path, again, resume=saved["feed"])
    try:
        train(again, feed, 2)
    finally:
        feed.close()
    assert torch.equal(weights(again), plain(4))


@pytest.mark.parametrize("what", ["zeros", "older"])
def test_a_torn_or_older_snapshot_of_a_worker_costs_its_episodes_and_no_decision_is_made_up(tmp_path, what):
    learner = make_learner()
    feed = processes(tmp_path, learner, env=slow)
    train(learner, feed, 1)
    older = (tmp_path / "worker0.state").read_bytes()
    train(learner, feed, 1)
    saved = feed.state()
    slot = cut_the_power(feed)
    made, columns = int(feed.buffer.head["rows"][slot]), feed.buffer.columns(slot, 0)
    path = tmp_path / "worker0.state"
    path.write_bytes(older if what == "older" else bytes(len(path.read_bytes())))
    first, uid = columns["x0"][:made].copy(), int(feed.buffer.head["uid"][slot])
    feed = processes(tmp_path, learner, resume=saved)
    taken, take = {}, feed.ledger.take

    def keep():
        chosen = take()
        taken.update(
            {f.uid: (f.rows, feed.buffer.columns(f.slot, 0)["x0"][: f.rows].copy()) for f in chosen or ()}
        )
        return chosen

    feed.ledger.take = keep
    try:
        train(learner, feed, 2)
    finally:
        feed.close()
    assert taken[uid][0] == made and np.array_equal(taken[uid][1], first)  # as far as it had come, no further


def test_a_finished_fragment_that_is_torn_is_collected_anew(tmp_path):
    learner = make_learner()
    feed = processes(tmp_path, learner, 2, 2)
    train(learner, feed, 2)
    saved, end = feed.state(), time.monotonic() + 60
    while feed.ledger.ready() < T * 32 and time.monotonic() < end:
        time.sleep(0.01)
    feed.close()
    ready = [f for f in feed.ledger.fragments.values() if f.state == led.READY]
    torn = ready[0]
    zero(feed.buffer, torn.slot, 3)
    feed = processes(tmp_path, learner, 2, 2, resume=saved)
    try:
        assert (
            torn.uid not in feed.ledger.fragments
            and {f.uid for f in ready[1:]} <= feed.ledger.fragments.keys()
        )
        train(learner, feed, 3)
    finally:
        feed.close()


def test_what_a_checkpoint_covers_is_not_learnt_from_again_though_its_header_came_back_older(tmp_path):
    learner = make_learner()
    feed = processes(tmp_path, learner)
    train(learner, feed, 2)
    saved = feed.state()
    feed.close()
    head = feed.buffer.head
    spent = [int(u) for u, s in zip(head["uid"], head["state"], strict=False) if s == TAKEN]
    head["state"][head["state"] == TAKEN] = SEALED
    head["batch"][:] = -1
    feed = processes(tmp_path, learner, resume=saved)
    try:
        assert spent and not set(spent) & feed.ledger.fragments.keys()
    finally:
        feed.close()


def test_what_is_left_of_a_torn_batch_is_finished_work_and_later_batches_come_again_whole():
    book = Ledger(12, 1, 8, {0: (2, 3), 1: (2, 3)})
    left = Fragment(4, 0, 0, 2, 3, 0, led.TAKEN, made=2, rows=2, batch=3)
    whole = [Fragment(6 + i, 1 + i, i, 2, 3, 0, led.TAKEN, made=2, rows=2, batch=4) for i in range(2)]
    book.recover([left, *whole], version=3, next_batch=3, taken=36, next_uid=4)
    book.check()
    assert book.ready() == 6 and [f.uid for f in book.take()] == [6, 7]
    assert book.take() is None
    f = book.lease(1)
    book.seal(f.uid, 2, 3)
    assert {f.uid for f in book.take()} == {4, f.uid}


@pytest.mark.parametrize("k", NAMES)
def test_groups_in_lanes_are_vouched_for_as_far_as_each_member_has_come(k):
    _, columns = collected()
    made = np.array([3, 0, T, 5])
    for m, last in enumerate(made):
        columns["done"][last:, m] = False
    if last := k.startswith("final/"):
        columns["done"][1, 0] = True
    mark = digest(columns, made)
    for t in range(len(columns[k])):
        for m in range(len(made)):
            here = columns[k][t, m : m + 1].view(np.uint8).reshape(-1)[-1:]
            here ^= 1
            inside = (
                t < made[m] and columns["done"][t, m]
                if last
                else t < made[m] + (k.startswith("obs/") and made[m] > 0)
            )
            assert (digest(columns, made) != mark) == bool(inside), (t, m)
            here ^= 1


def test_a_snapshot_that_is_not_whole_reads_as_none_wherever_it_is_torn(tmp_path):
    snapshot.save(tmp_path / "s", {"after": 3, "a": np.arange(50.0)})
    whole = (tmp_path / "s").read_bytes()
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    for at in range(0, len(whole), 37):
        torn = bytearray(whole)
        torn[at] ^= 1
        (tmp_path / "s").write_bytes(torn)
        assert snapshot.load(tmp_path / "s") == {}, at
    (tmp_path / "s").write_bytes(bytes(len(whole)))
    assert snapshot.load(tmp_path / "s") == {}
