"""Batches that are put together while they are made are those that are put together at once."""

import numpy as np
import pytest
from feeds import same_rollouts
from test_runtime import T, build, make_learner

from robo_rl.rollout import Collector, new_columns, rollout_of
from robo_rl.runtime.feed import make_batch
from robo_rl.runtime.rollout_buffer import SEALED, TAKEN
from robo_rl.runtime.staging import Staging
from robo_rl.runtime.worker_pool import WorkerPoolFeed, slot_count

ENVS = 4


class Idle:
    """A pool without workers: the test seals."""

    restarts = 0

    def evict(self, folder): ...
    def start(self, feed, resumed): ...
    def turn(self): ...
    def resize(self, workers): ...
    def publish(self, version): ...
    def wake(self): ...

    def check(self): ...
    def end(self): ...


@pytest.fixture(scope="module")
def fragments():
    """Columns of six fragments, and their layout."""
    learner = make_learner()
    collectors = [Collector(build(ENVS), learner.policy, 0.99, s) for s in range(6)]
    out = []
    for c in collectors:
        columns = new_columns(c.layout(learner.policy), T)
        for v in columns.values():
            v[:] = 0  # what was never written
        for t in range(T):
            c.decide(learner.policy, columns, t, version=t)
        out.append(columns)
    return collectors[0].layout(learner.policy), out


def equal(a, b):
    same_rollouts(a, b)
    assert a.stats == b.stats


@pytest.mark.parametrize("rows", [(T, T, T), (T, 3, 5), (2, 3, 1)])
@pytest.mark.parametrize("early", [(0, 1, 2), (2, 0), (1,), (), (3, 0), (3, 4, 1)])
def test_a_batch_that_was_staged_is_the_one_that_is_put_together_at_once(fragments, rows, early):
    _, columns = fragments
    staging = Staging(columns[0], T, 3 * ENVS)
    chosen = [(i, columns[i], rows[i], None) for i in range(3)]
    for _ in range(3):  # both buffers, with something else in them before
        for uid in early:
            staging.stage((uid, columns[uid], rows[uid % 3], None))
        got, made, order = staging.take(chosen)
        want = rollout_of([(columns[i], rows[i]) for i in order])
        equal(rollout_of([(got, made)]), want)
        assert all(v.flags["C_CONTIGUOUS"] for v in got.values())  # the learner flattens them without a copy


def test_fixed_places_keep_their_order_whoever_is_first(fragments):
    _, columns = fragments
    staging = Staging(columns[0], T, 3 * ENVS)
    chosen = [(i, columns[i], T, i * ENVS) for i in range(3)]
    for i in (2, 0):
        staging.stage(chosen[i])
    assert staging.take(chosen)[2] == [0, 1, 2] and staging.late == 1


def test_what_does_not_fit_together_is_refused_and_the_next_batch_begins_anew(fragments):
    _, columns = fragments
    staging = Staging(columns[0], T, 3 * ENVS)
    for wrong in ([0, 1], [0, 1, 2, 3]):  # too few, too many envs
        for i in wrong:
            staging.stage((i, columns[i], T, None))
        assert staging.take([(i, columns[i], T, None) for i in wrong]) is None
    # one over another
    assert staging.take([(0, columns[0], T, 0), (1, columns[1], T, 0), (2, columns[2], T, ENVS)]) is None
    assert staging.take([(i, columns[i], T, None) for i in range(3)])[2] == [0, 1, 2]


def test_what_is_not_good_any_more_is_not_put_in_place(fragments):
    _, columns = fragments
    staging = Staging(columns[0], T, 3 * ENVS)
    staging.stage((5, columns[5], T, None), lambda: False)
    assert not staging.at


def feed_of(tmp_path, fragments, workers, staleness, batch=None, resume=None):
    layout, _ = fragments
    return WorkerPoolFeed(
        tmp_path, Idle(), [ENVS] * workers, [layout], batch or workers * ENVS * T, T, staleness, resume
    )


def finish(feed, worker, columns):
    lease = feed.lease(worker)
    for k, v in columns.items():
        feed.buffer.columns(lease.slot, worker)[k][:] = v
    feed.buffer.head["rows"][lease.slot] = T
    feed.buffer.sign(lease.slot, worker, 0, T)
    assert feed.sealed(worker, f"worker{worker}", lease.uid, T, 0, False, "")
    return lease


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_synchronous_batch_is_in_the_order_of_workers_and_the_learner_copies_at_most_the_last(
    tmp_path, fragments, rounds
):
    _, columns = fragments
    feed, order = feed_of(tmp_path, fragments, 3, 0, rounds * 3 * ENVS * T), (2, 0, 1)
    try:
        for _again in range(3):
            for i, w in enumerate(order * rounds):
                finish(feed, w, columns[w + 3 * (i >= 3)])
                while len(feed.staging.at) < i + 1 and i + 1 < 3 * rounds:
                    pass  # the thread of the feed puts it in place
            got = feed.next()
            equal(
                got,
                make_batch(
                    [(columns[w + 3 * r], T) for w in range(3) for r in range(rounds)], feed.version, 0
                ),
            )
            feed.publish()
            feed.commit()
        assert feed.staging.late <= 3 and feed.staging.taken == 9 * rounds
    finally:
        feed.close()


def test_a_batch_that_comes_again_after_a_learner_died_is_in_the_same_order(tmp_path, fragments):
    _, columns = fragments
    feed = feed_of(tmp_path, fragments, 3, 2)
    saved = feed.state()
    for w in (2, 0, 1):
        finish(feed, w, columns[w])
        while len(feed.staging.at) < 1:
            pass
    first = feed.next()
    assert (feed.buffer.head["state"] == TAKEN).sum() == 3
    feed.close()
    again = feed_of(tmp_path, fragments, 3, 2, resume=saved)
    try:
        equal(again.next(), first)
        assert not (again.buffer.head["state"] == SEALED).any()
    finally:
        again.close()


def test_slots_are_for_what_is_in_flight(tmp_path, fragments):
    layout, _ = fragments
    feed = feed_of(tmp_path, fragments, 3, 0)
    feed.close()
    assert feed.buffer.count == slot_count(3, 3, 0, feed.kept) == 2 * 3 + 6 * 3 + 4
    assert slot_count(3000, 3000, 0, 0) == 9001  # three batches: made, learnt from, spare


@pytest.mark.parametrize(("workers", "staleness", "kept"), [(3, 0, 0), (3, 0, 2), (5, 1, 0), (4, 3, 1)])
def test_a_learner_that_makes_a_checkpoint_when_it_is_told_never_runs_out_of_slots(
    tmp_path, fragments, monkeypatch, workers, staleness, kept
):
    _, columns = fragments
    monkeypatch.setattr("robo_rl.runtime.worker_pool.KEPT", kept)
    feed, batches = feed_of(tmp_path, fragments, workers, staleness), []
    try:
        for i in range(12):
            for _ in range(2):
                for w in range(workers):
                    if feed.held(w) or feed.lease(w) is None:
                        continue
                    feed.ledger.lost(w)  # it is at it
                    finish(feed, w, columns[(w + i) % 6])
            feed.next()
            feed.publish()
            feed.ledger.check()
            batches.append(feed.crowded())
            if batches[-1]:
                feed.commit()
    finally:
        feed.close()
    assert batches.count(True) <= 12 / (1 + kept) and np.any(batches)
