"""The ledger under a virtual clock, against what can be worked out by hand."""

import pytest

from robo_rl.runtime.virtual import Broker, constant, lognormal, simulate


def test_synchronous_work_takes_the_sum_of_collecting_and_learning():
    out = simulate(1, 256, 16, 4096, 0, constant(0.05), constant(0.4), 12)
    assert out.rate == pytest.approx(4096 / (16 * 0.05 + 0.4))
    assert out.worker_wait == pytest.approx(0.4 / 1.2) and out.learner_wait == pytest.approx(0.8 / 1.2)
    assert out.stale_max == 0 and out.masked == 0


def test_two_cores_that_three_roles_share_are_never_idle():
    out = simulate(2, 128, 16, 4096, 1, constant(0.05), constant(0.4), 30, cores=2)
    assert out.rate == pytest.approx(4096 / ((2 * 0.8 + 0.4) / 2), rel=0.01) and out.stale_max == 1


def test_with_hardware_of_its_own_the_slower_side_sets_the_pace():
    slow_sims = simulate(2, 128, 16, 4096, 1, constant(0.05), constant(0.4), 30)
    slow_learner = simulate(2, 128, 16, 4096, 1, constant(0.01), constant(0.4), 30)
    assert slow_sims.rate == pytest.approx(4096 / 0.8, rel=0.01) and slow_sims.worker_wait == pytest.approx(
        0, abs=0.01
    )
    assert slow_learner.rate == pytest.approx(
        4096 / 0.4, rel=0.01
    ) and slow_learner.learner_wait == pytest.approx(0, abs=0.01)


def test_heavy_tails_cost_synchronous_work_the_slowest_and_asynchronous_work_the_mean():
    sync, free = (simulate(16, 1, 8, 128, eta, lognormal(0.02, 1.0), constant(0.001), 150) for eta in (0, 8))
    assert free.rate > 1.3 * sync.rate
    assert free.rate == pytest.approx(16 / 0.02, rel=0.1)
    assert free.stale_max <= 8


def test_the_same_seed_gives_the_same_numbers():
    a, b = (simulate(4, 8, 4, 128, 2, lognormal(0.1, 0.5), constant(0.3), 20, seed=3) for _ in range(2))
    assert a == b


def test_a_learner_waits_for_a_broker_that_serves_one_worker_after_another():
    """10 workers finish together: the batch is there after 10 leases, 10 seals and the taking, by hand."""
    broker = Broker(lease=0.01, seal=0.02, take=0.3, publish=0.1)
    out = simulate(10, 8, 4, 320, 0, constant(0.05), constant(1.0), 12, broker=broker)
    # leases one by one: worker i begins at 0.01 (i + 1) and ends 0.2 later; the last is sealed when all 10
    # seals are done
    sealed = max(0.01 * (i + 1) + 0.2 + 0.02 * (10 - i) for i in range(10))
    cycle = sealed + 0.3 + 1.0 + 0.1
    assert out.rate == pytest.approx(320 / cycle) and out.learner_wait == pytest.approx(
        (sealed + 0.3) / cycle
    )
    # the last worker was done at 0.1 + 0.2
    assert out.broker_wait == pytest.approx((sealed + 0.3 - (0.1 + 0.2)) / cycle)


def test_a_broker_without_service_times_costs_nothing():
    assert simulate(10, 8, 4, 320, 0, constant(0.05), constant(1.0), 12).broker_wait == 0
    assert simulate(4, 8, 4, 128, 2, lognormal(0.1, 0.5), constant(0.3), 20, seed=3).broker_wait == 0


def test_with_staleness_the_broker_serves_while_the_learner_learns():
    broker = Broker(lease=0.001, seal=0.001, take=0.01, publish=0.01)
    out = simulate(100, 8, 4, 3200, 1, lognormal(0.05, 0.3), constant(2.0), 12, broker=broker)
    assert out.broker_wait == pytest.approx(0.01 / 2.02, abs=0.002) and out.learner_wait == pytest.approx(
        out.broker_wait, abs=0.01
    )
