"""The ledger: every count and the bound, whatever the workers and the learner do. No process, no clock."""

import random

import pytest

from robo_rl.errors import UserError
from robo_rl.runtime import ledger as led
from robo_rl.runtime.ledger import Ledger


def test_a_thousand_random_schedules_keep_every_count_and_the_bound():
    """Workers of any speed with one lease or many that die, come back, leave for good, join or hand over
    rubbish, and a learner that dies."""
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
                    assert all(book.version - f.oldest >= 0 for f in chosen)
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
            again.recover(
                [
                    led.Fragment(*(getattr(f, k) for k in led.Fragment.__slots__))
                    for f in book.fragments.values()
                ],
                *point[:4],
            )
            for uids in order[point[4] :]:
                assert [f.uid for f in again.take()] == uids
                again.publish(again.version + 1)
                again.check()
            assert (again.version, again.next_batch, again.taken) == (
                book.version,
                book.next_batch,
                book.taken,
            )


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
    for _i in range(3):
        book.seal(book.lease(0).uid, 2, 0)
    assert book.lease(0, more=True) is None and book.admitted == 18
    book.take()
    assert book.lease(0) is None
    book.publish(1)
    assert book.lease(0) is not None


def test_after_a_learner_died_each_worker_still_has_its_share_of_the_batch_and_no_more():
    book = Ledger(12, 0, 8, {0: (2, 3), 1: (2, 3)})
    done = led.Fragment(5, 0, 0, 2, 3, 0, led.READY, made=2, rows=2)
    book.recover([done], version=4, next_batch=4, taken=48, next_uid=5)
    assert book.lease(0) is None and book.lease(1).uid == 6


def test_after_a_learner_died_what_a_worker_is_still_at_counts_whole_to_its_share():
    book = Ledger(12, 0, 8, {0: (2, 3), 1: (2, 3)})
    book.recover([led.Fragment(5, 0, 0, 2, 3, 0, led.LEASED)], version=4, next_batch=4, taken=48, next_uid=6)
    assert book.used == {0: 6} and book.lease(0).uid == 5 and book.lease(0, more=True) is None
    book.seal(5, 1, 4)  # half of it: the other half is open again
    assert book.used == {0: 3} and book.lease(0).decisions == 1


def test_what_a_checkpoint_covers_does_not_come_again_and_its_slot_is_free():
    book = Ledger(6, 1, 4, {0: (2, 3)})
    spent, live = (led.Fragment(u, u, 0, 2, 3, 0, led.TAKEN, made=2, rows=2, batch=u) for u in (0, 1))
    free = book.recover([spent, live], version=1, next_batch=1, taken=6, next_uid=2)
    assert 0 in free and 1 not in free and [f.uid for f in book.take()] == [1] and book.take() is None


def test_a_batch_takes_what_the_oldest_weights_made_first():
    book = Ledger(2, 2, 8, dict.fromkeys(range(3), (1, 2)))
    leases = [book.lease(i) for i in range(3)]
    for f, oldest in zip(leases, (2, 0, 1), strict=False):
        book.seal(f.uid, 1, oldest)
    assert [book.take()[0].oldest for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_fragments_that_do_not_add_up_to_a_batch_never_stop_the_work(staleness):
    book = Ledger(256, staleness, 60, dict.fromkeys(range(3), (8, 10)))
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


def test_a_synchronous_batch_of_several_rounds_gives_each_worker_as_many_fragments():
    book = Ledger(24, 0, 8, {0: (2, 3), 1: (2, 3)})
    assert (
        book.rounds() == 2
        and Ledger(25, 0, 8, {0: (2, 3)}).rounds() == 0
        and Ledger(4, 0, 8, {0: (2, 3)}).rounds() == 1
    )
    first, second = book.lease(0), book.lease(0, more=True)
    assert second.uid != first.uid and book.lease(0, more=True) is None  # its two shares
    book.seal(first.uid, 1, 0)  # half of the first is given back: as much is left to lease
    third = book.lease(0, more=True)
    assert third.decisions == 1 and book.lease(0, more=True) is None and book.used[0] == 12


def test_fragments_taken_one_by_one_count_as_those_of_a_whole_batch_do():
    book = Ledger(12, 0, 8, {0: (2, 3), 1: (2, 3)})
    leases = [book.lease(i) for i in (0, 1)]
    assert book.take_from(0, last=False) is None
    for f in leases:
        book.seal(f.uid, 2, 0)
    assert book.ready() == 12
    assert book.take_from(0, last=False) is leases[0] and (book.taken, book.next_batch, book.ready()) == (
        6,
        0,
        6,
    )
    assert book.take_from(1, last=True) is leases[1] and (book.taken, book.next_batch, book.ready()) == (
        12,
        1,
        0,
    )
    book.publish(1)
    assert sorted(book.commit()) == [leases[0].slot, leases[1].slot] and book.committed == 12
    book.check()


def test_a_worker_that_nobody_knows_may_leave_and_one_that_joins_counts_from_then_on():
    book = Ledger(12, 0, 8, {0: (2, 3)})
    book.leave(7, 0, 0)
    assert book.round_samples == 6 and book.rounds() == 2
    book.join(1, (2, 3))
    assert book.round_samples == 12 and book.rounds() == 1
    book.join(1, (4, 3))  # the same one, with another share
    assert book.round_samples == 18 and book.widest == 3
    book.leave(1, 0, 0)
    assert book.round_samples == 6 and 1 not in book.shares


def test_after_a_crash_what_was_ready_is_ready_and_what_was_taken_comes_again_whole():
    book = Ledger(6, 1, 6, {0: (2, 3)})
    ready = led.Fragment(3, 0, 0, 2, 3, 0, led.READY, made=2, rows=2)
    again = led.Fragment(2, 1, 0, 2, 3, 0, led.TAKEN, made=2, rows=2, batch=1)
    torn = led.Fragment(1, 2, 0, 1, 3, 0, led.TAKEN, made=1, rows=1, batch=2)  # the rest of its batch is lost
    assert book.recover([ready, again, torn], version=1, next_batch=1, taken=6, next_uid=4) == [5, 4, 3]
    assert (book.samples, book.admitted, book.next_uid, book.recovered) == (9, 21, 4, True)
    assert ready.batch == torn.batch == -1 and again.batch == 10**18
    assert book.commit() == []  # nothing of it is covered by the checkpoint
    assert [f.uid for f in book.take()] == [2] and again.batch == 1


def test_a_ledger_goes_on_from_what_it_said_of_itself():
    book = Ledger(12, 2, 8, {0: (2, 3), 1: (2, 5)})
    book.next_uid = 5  # of leases long gone
    leases = [book.lease(i) for i in (0, 1)]
    assert [(f.batch, f.state, f.attempt) for f in leases] == [(-1, led.LEASED, 0)] * 2
    book.seal(leases[0].uid, 2, 0)
    other = Ledger(12, 2, 8, {0: (1, 1)})
    other.load_state_dict(book.state_dict())
    assert other.state_dict() == book.state_dict() and other.round_samples == 16 and other.widest == 5
    assert other.ready() == 6 and [f.uid for f in other.held(1)] == [leases[1].uid]
    assert {uid: f.slot for uid, f in other.fragments.items()} == {f.uid: f.slot for f in leases}
    other.check()


def test_what_a_worker_that_leaves_has_made_stays_and_the_rest_is_given_back():
    book = Ledger(12, 1, 4, {0: (2, 3), 1: (2, 3)})
    f, g = book.lease(0), book.lease(1)
    book.leave(0, 1, 7)
    assert (f.state, f.made, f.decisions, f.oldest) == (led.READY, 1, 1, 7)
    assert book.ready() == 3 and book.admitted == 9 and book.held(0) == [] and 0 not in book.leased
    book.leave(1, 0, 0)  # it made nothing: its slot is free again
    assert g.uid not in book.fragments and book.admitted == 3 and len(book.free) == 3
    book.check()


def test_a_refused_fragment_is_counted_and_collected_anew():
    book = Ledger(12, 1, 4, {0: (2, 3)})
    f = book.lease(0)
    book.seal(f.uid, 2, 0)
    free = len(book.free)
    book.refuse(f.uid)
    assert book.refused == 6 and book.admitted == 0 and book.ready() == 0 and len(book.free) == free + 1
    book.check()


def test_a_worker_with_more_envs_widens_the_ledger_and_one_share_is_one_round():
    book = Ledger(6, 0, 4, {0: (2, 3)})
    assert book.rounds() == 1  # together as many as the batch
    book.join(1, (1, 9))
    assert book.widest == 9


def test_of_the_next_batch_what_is_finished_and_what_is_under_way_is_gathered():
    book = Ledger(12, 0, 4, {0: (2, 3), 1: (2, 3)})
    first, second = book.lease(0), book.lease(1)
    assert book.gathered(lambda f: {first.uid: 1, second.uid: 2}[f.uid]) == 9
    book.seal(first.uid, 2, 0)
    assert book.gathered(lambda f: 1) == 9 and book.gathered(lambda f: 0) == 6
    assert book.gathered(lambda f: 100) == 12  # no more than the batch


def test_leases_are_numbered_and_say_which_batch_they_would_be_in():
    book = Ledger(6, 3, 8, {0: (1, 3)})
    leases = [book.lease(0, more=True) for _ in range(8)]
    assert [f.uid for f in leases] == list(range(8)) and [f.due for f in leases] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert book.lease(0, more=True) is None and not book.recovered  # the bound: 4 batches of 2
    assert {(f.attempt, f.made, f.rows, f.oldest) for f in leases} == {(0, 0, 0, 0)}
    for f in leases[:2]:
        book.seal(f.uid, 1, 0)
    book.take()
    book.publish(1)
    assert book.commit() and book.lease(0, more=True).due == 4  # version 1, 18 more samples admitted


def test_of_a_workers_finished_fragments_the_oldest_is_taken_first():
    book = Ledger(6, 3, 8, {0: (1, 3)})
    leases = [book.lease(0, more=True) for _ in range(3)]
    for f in reversed(leases):
        book.seal(f.uid, 1, 0)
    assert [book.take_from(0, last=False).uid for _ in range(3)] == [0, 1, 2] and book.take_from(
        0, last=True
    ) is None


def test_what_was_admitted_under_a_wider_bound_stays_when_it_is_lowered():
    book = Ledger(6, 2, 20, {0: (2, 3)})
    while book.lease(0, more=True):
        pass
    assert book.admitted == 18
    book.check()
    book.bound(0)
    book.check()
    assert book.lease(0, more=True) is None and book.admitted == 18


def test_the_bound_may_be_a_million_and_no_more_and_without_workers_there_is_no_round():
    assert Ledger(6, 10**6, 1, {0: (2, 3)}).staleness == 10**6
    with pytest.raises(UserError, match="max-staleness"):
        Ledger(6, 10**6 + 1, 1, {0: (2, 3)})
    book = Ledger(6, 0, 2, {0: (2, 3)})
    book.leave(0, 0, 0)
    assert book.rounds() == 0
