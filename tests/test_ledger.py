"""The ledger: every count and the bound, whatever the workers and the learner do. No process, no clock."""

import random

import pytest

from robo_rl.errors import UserError
from robo_rl.runtime import ledger as led
from robo_rl.runtime.ledger import Ledger


def test_a_thousand_random_schedules_keep_every_count_and_the_bound():
    """Workers of any speed with one lease or many that die, come back, leave for good, join or hand over rubbish, and a
    learner that dies."""
    for seed in range(1000):
        rng = random.Random(seed)
        workers, eta, decisions = rng.randint(1, 5), rng.randint(0, 4), rng.randint(1, 6)
        envs = [rng.randint(1, 4) for _ in range(workers)]
        batch = decisions * sum(envs) if eta == 0 else rng.randint(1, 3 * decisions * sum(envs))
        shares = {i: (decisions, n) for i, n in enumerate(envs)}
        slots = 8 + 2 * workers + (eta + 3) * (batch // min(envs) + workers)
        book, point, order = Ledger(batch, eta, slots, shares), None, []
        made, oldest, trained = {}, {}, 0
        for _ in range(120):
            move, w = rng.random(), rng.randrange(workers)
            if w in book.shares and move < 0.7:
                f = book.lease(w, more=eta > 0 and rng.random() < 0.2)
                if f is not None:
                    made[f.uid] = made.get(f.uid, 0) + 1
                    oldest.setdefault(f.uid, book.version)
                    early = rng.random() < 0.1 and eta > 0
                    if made[f.uid] >= f.decisions or early:
                        book.seal(f.uid, made[f.uid], oldest[f.uid])
                        if f.uid in book.fragments and rng.random() < 0.03:
                            book.refuse(f.uid)
            elif move < 0.75:
                book.lost(w)
            elif move < 0.76 and len(book.shares) > 1 and eta > 0:
                for f in book.held(w):
                    book.seal(f.uid, made.get(f.uid, 0), oldest.get(f.uid, 0))
                book.leave(w, 0, 0)
            elif move < 0.77 and eta > 0 and w not in book.shares:
                book.join(w, shares[w])
            elif move < 0.95:
                chosen = book.take()
                if chosen is not None:
                    assert sum(f.made * f.envs for f in chosen) >= batch
                    assert all(0 <= book.version - f.oldest for f in chosen)
                    order.append([f.uid for f in chosen])
                    trained += 1
                    book.publish(book.version + 1)
            else:
                book.commit()
                point = (book.version, book.next_batch, book.taken, book.next_uid, len(order))
            book.check()
        assert len({u for uids in order for u in uids}) == sum(map(len, order))  # nothing twice
        if point:  # the learner dies: what it took since comes again in the same order
            again = Ledger(batch, eta, slots, book.shares)
            again.recover([led.Fragment(*(getattr(f, k) for k in led.Fragment.__slots__))
                           for f in book.fragments.values()], *point[:4])
            for uids in order[point[4]:]:
                assert [f.uid for f in again.take()] == uids
                again.publish(again.version + 1)
                again.check()
            assert (again.version, again.next_batch, again.taken) == (book.version, book.next_batch, book.taken)


def test_synchronous_work_is_one_fixed_share_of_each_worker():
    book = Ledger(12, 0, 8, {0: (2, 3), 1: (2, 3)})
    a, b = book.lease(0), book.lease(1)
    book.seal(a.uid, 2, 0)
    assert book.lease(0) is None  # it may not do the other's work
    assert book.take() is None
    book.seal(b.uid, 2, 0)
    assert [f.uid for f in book.take()] == [a.uid, b.uid] and book.lease(0) is None
    book.publish(1)
    assert book.lease(0) is not None


def test_asynchronous_work_stops_at_the_admission_bound():
    book = Ledger(6, 2, 20, {0: (2, 3)})
    for i in range(3):
        book.seal(book.lease(0).uid, 2, 0)
    assert book.lease(0) is None and book.admitted == 18
    book.take()
    assert book.lease(0) is None
    book.publish(1)
    assert book.lease(0) is not None


def test_after_a_learner_died_each_worker_still_has_its_share_of_the_batch_and_no_more():
    book = Ledger(12, 0, 8, {0: (2, 3), 1: (2, 3)})
    done = led.Fragment(5, 0, 0, 2, 3, 0, led.READY, made=2, rows=2)
    book.recover([done], version=4, next_batch=4, taken=48, next_uid=5)
    assert book.lease(0) is None and book.lease(1).uid == 6


def test_what_a_checkpoint_covers_does_not_come_again_and_its_slot_is_free():
    book = Ledger(6, 1, 4, {0: (2, 3)})
    spent, live = (led.Fragment(u, u, 0, 2, 3, 0, led.TAKEN, made=2, rows=2, batch=u) for u in (0, 1))
    free = book.recover([spent, live], version=1, next_batch=1, taken=6, next_uid=2)
    assert 0 in free and 1 not in free and [f.uid for f in book.take()] == [1] and book.take() is None


def test_a_batch_takes_what_the_oldest_weights_made_first():
    book = Ledger(2, 2, 8, {i: (1, 2) for i in range(3)})
    leases = [book.lease(i) for i in range(3)]
    for f, oldest in zip(leases, (2, 0, 1)):
        book.seal(f.uid, 1, oldest)
    assert [book.take()[0].oldest for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_fragments_that_do_not_add_up_to_a_batch_never_stop_the_work(staleness):
    book = Ledger(256, staleness, 60, {i: (8, 10) for i in range(3)})
    for _ in range(200):
        while (chosen := book.take()) is None:
            leases = [f for i in range(3) if (f := book.lease(i)) is not None]
            assert leases, "everybody waits"
            for f in leases:
                book.seal(f.uid, f.decisions, book.version)
        assert sum(f.made * f.envs for f in chosen) < 256 + 80
        book.publish(book.version + 1)
        book.commit()
        book.check()


def test_a_negative_staleness_is_refused():
    with pytest.raises(UserError, match="max-staleness"):
        Ledger(6, -1, 20, {0: (2, 3)})


def test_a_dead_worker_s_fragment_goes_to_its_successor_as_another_attempt():
    book = Ledger(12, 1, 8, {0: (4, 3)})
    f = book.lease(0)
    book.lost(0)
    again = book.lease(0)
    assert again is f and again.attempt == 1
