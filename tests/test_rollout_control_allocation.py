"""How many episodes and how long: budgets are met, tables of the papers reproduced, optima compared with
searches."""

import math

import numpy as np
import pytest

from robo_rl.errors import UserError
from robo_rl.rollout_control import allocation as a
from robo_rl.rollout_control import rollout_gdro as gdro

# ---- DAPO


def test_members_that_are_not_valid_do_not_make_a_group_mixed():
    outcome = np.array([[1.0, 1, 0], [1, 0, 0]])
    assert a.flat_groups(outcome, np.array([[True, True, False], [True, True, False]])).tolist() == [
        True,
        False,
    ]


# ---- Reinforce-Ada


def test_the_two_rules_of_reinforce_ada_end_a_task_where_they_say():
    good, made = np.array([0, 1, 2, 6]), np.array([8, 8, 8, 8])
    assert a.ada_finished(good, made, 4, "positive").tolist() == [False, True, True, True]
    assert a.ada_finished(good, made, 4, "balance").tolist() == [False, False, True, True]
    with pytest.raises(UserError, match="positive or balance"):
        a.ada_finished(good, made, 4, "both")


# ---- XRPO


def test_quantiles_of_students_t_are_those_of_the_tables():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042, 1000: 1.962}
    got = a.t_quantile(np.array(list(table), float))
    assert np.allclose(got, list(table.values()), rtol=5e-3)


def test_xrpo_gives_more_to_uncertain_tasks_and_to_rarely_played_ones():
    more = a.xrpo_allocate(np.array([0.5, 0.1, 0.0]), np.array([4, 4, 4]), 20, lam=0.0)
    assert more.sum() == 20 and more[0] > more[1] > more[2] == 0
    explored = a.xrpo_allocate(np.zeros(3), np.array([2, 4, 8]), 10, lam=1.0)
    assert explored.sum() == 10 and explored[0] > explored[1] > explored[2]


# ---- DARS


def test_dars_reproduces_its_table_for_eight_first_episodes():
    rate = np.arange(5) / 8
    assert a.dars_extra(rate, 8).tolist() == [24, 10, 3, 1, 0]
    assert a.dars_extra(rate, 8, "hardness").tolist() == [56, 24, 8, 3, 0]
    assert a.dars_extra(np.array([0.6, 1.0]), 8).tolist() == [0, 0]


def test_equal_treatment_gives_every_task_the_same_sum_of_advantages_where_no_cap_binds():
    rate = np.array([2, 3, 4, 5, 6, 7, 8]) / 16
    n = 16 + a.dars_extra(rate, 16, most=10_000)
    total = n * 2 * rate * (1 - rate)
    assert np.allclose(total, total[-1], rtol=0.04)  # whole episodes


def test_harder_tasks_get_more_of_dars():
    extra = a.dars_extra(np.linspace(0.1, 0.5, 9), 32, "hardness", most=10_000)
    assert (np.diff(extra) <= 0).all() and extra[0] > extra[-1]


# ---- DUET


def test_duet_spends_its_steps_within_its_bounds_at_one_price():
    rng = np.random.default_rng(0)
    value, length = rng.random(40) + 0.1, rng.integers(5, 60, 40).astype(float)
    prices = []
    for budget in (1500, 5000, 9000):
        n = a.duet(value, length, budget, 1, 12)
        assert n @ length == pytest.approx(budget) and n.min() >= 1 and n.max() <= 12
        free = (n > 1 + 1e-9) & (n < 12 - 1e-9)
        price = (value / n)[free] ** 2 / length[free]
        assert free.sum() > 2 and np.allclose(price, price[0])
        prices.append(price[0])
    assert prices[0] > prices[1] > prices[2]  # of a step: the less there is, the dearer


def test_no_other_plan_of_as_many_steps_has_less_variance_than_duets():
    rng = np.random.default_rng(0)
    value, length = rng.random(5) + 0.1, rng.integers(5, 60, 5).astype(float)
    n = a.duet(value, length, 900, 0, 1e9)
    for _ in range(2000):
        other = n * np.exp(0.3 * rng.normal(size=5))
        other *= 900 / (other @ length)
        assert (value**2 / n).sum() <= (value**2 / other).sum() + 1e-12


# ---- TRACE


def test_the_probability_of_a_mixed_group_is_that_of_counting():
    x = np.random.default_rng(0).random((200_000, 5)) < 0.2
    assert float(a.mixed(5, 0.2)) == pytest.approx((x.any(1) & ~x.all(1)).mean(), abs=0.005)
    assert (
        float(a.mixed(1, 0.3)) == pytest.approx(0)
        and float(a.mixed(8, 0.0)) == 0
        and float(a.mixed(8, 1.0)) == 0
    )


def test_trace_gives_nothing_to_certain_starts_and_begins_at_one_half():
    p, one = np.array([0.0, 0.5, 0.9, 1.0]), np.ones(4, np.int64)
    assert a.trace_allocate(p, np.ones(4), one, 1, 100).tolist() == [0, 1, 0, 0]
    n = a.trace_allocate(p, np.ones(4), one, 24, 100)
    assert n.sum() == 24 and n[0] == n[3] == 0 and n[2] > n[1] >= 1
    assert (a.trace_allocate(p, np.ones(4), one, 24, 5) + one <= 5).all()


def test_the_greedy_plan_of_trace_is_the_best_of_all_plans():
    rng = np.random.default_rng(0)
    for _ in range(20):
        p, budget = rng.uniform(0.05, 0.95, 3), 9
        got = 1 + a.trace_allocate(p, np.ones(3), np.ones(3, np.int64), budget, 100)
        plans = [
            np.array([1 + i, 1 + j, 1 + budget - i - j])
            for i in range(budget + 1)
            for j in range(budget + 1 - i)
        ]
        assert a.mixed(got, p).sum() == pytest.approx(max(a.mixed(n, p).sum() for n in plans), abs=1e-12)


def test_dear_starts_get_less_of_trace_and_its_steps_last():
    n = a.trace_allocate(np.array([0.5, 0.5]), np.array([1.0, 4.0]), np.ones(2, np.int64), 20, 100)
    assert n[0] > n[1] > 0 and n @ np.array([1, 4]) <= 20


# ---- BroRL


def test_groups_become_broad_on_a_plateau_below_one():
    assert a.broad_group(np.full(20, 0.4), 8, 128) == 128
    assert a.broad_group(np.linspace(0.2, 0.6, 20), 8, 128) == 8
    assert a.broad_group(np.full(20, 1.0), 8, 128) == 8 and a.broad_group(np.full(5, 0.4), 8, 128) == 8


# ---- Rollout-GDRO


def test_the_plan_spends_exactly_its_budget_and_is_the_best_of_all():
    rng = np.random.default_rng(0)
    for _ in range(10):
        worth, groups, low = rng.random((3, 5)), np.array([2, 1, 3]), 2
        budget = 4 * int(groups.sum())
        plan = gdro.best_plan(worth, groups, budget, low)
        assert groups @ plan == budget
        every = [
            (i, j, k)
            for i in range(5)
            for j in range(5)
            for k in range(5)
            if groups @ (np.array([i, j, k]) + low) == budget
        ]
        best = max(sum(groups[b] * worth[b, c] for b, c in enumerate(cs)) for cs in every)
        assert sum(groups[b] * worth[b, plan[b] - low] for b in range(3)) == pytest.approx(best)


def test_a_budget_that_is_less_than_the_least_is_refused():
    with pytest.raises(UserError, match="fewer than 4"):
        gdro.best_plan(np.ones((2, 3)), np.array([2, 2]), 10, 4)


def test_episodes_flow_to_the_bin_where_they_are_worth_something_and_the_budget_is_met_in_every_round():
    player, groups = gdro.RolloutGdro(bins=2, mean=4, eta=0.3), np.array([8, 8])
    n = np.zeros(2)
    for t in range(600):
        plan = player.propose(groups)
        assert groups @ plan == 64
        player.observe(plan, np.array([1 - 0.15 ** plan[0] - 0.85 ** plan[0], 0.0]), groups)
        n += plan if t >= 400 else 0
    assert n[0] > 1.2 * n[1]


def test_the_price_of_an_episode_rises_only_when_more_was_spent_than_meant():
    player = gdro.RolloutGdro(bins=2, mean=4)
    for _ in range(10):
        player.observe(np.array([8, 8]), np.ones(2), np.array([4, 4]))
    assert player.mu > 0
    high = player.mu
    for _ in range(200):
        player.observe(np.array([2, 2]), np.ones(2), np.array([4, 4]))
    assert player.mu < high and player.mu >= 0


def test_a_bandit_that_was_saved_goes_on_as_if_it_had_not_been():
    first, groups = gdro.RolloutGdro(bins=2, mean=4), np.array([3, 5])
    for _ in range(5):
        first.observe(first.propose(groups), np.array([0.5, 0.1]), groups)
    again = gdro.RolloutGdro(bins=2, mean=4)
    again.load_state_dict(first.state_dict())
    assert (first.propose(groups) == again.propose(groups)).all() and again.mu == first.mu
    assert math.isclose(float(first.chances().sum()), 2)
