"""How many episodes and how long: budgets are met, tables of the papers reproduced, optima compared with searches."""

import math

import numpy as np
import pytest

from robo_rl.errors import UserError
from robo_rl.rollout_control import allocation as a
from robo_rl.rollout_control import rollout_gdro as gdro


def test_the_probability_of_a_mixed_group_is_that_of_counting():
    rng = np.random.default_rng(0)
    x = rng.random((200_000, 5)) < 0.2
    assert float(a.mixed(5, 0.2)) == pytest.approx((x.any(1) & ~x.all(1)).mean(), abs=0.005)
    assert a.mixed(1, 0.3) == pytest.approx(0) and a.mixed(8, 0.0) == 0 and a.mixed(8, 1.0) == 0


# ---- DAPO

def test_only_mixed_groups_are_kept_and_as_many_more_are_planned_as_are_missing():
    outcome = np.array([[1, 1], [0, 1], [0, 0], [1, 0], [0, 1]], float)
    keep, more = a.refill(outcome, wanted=2, made=5, most=100)
    assert keep.tolist() == [False, True, False, True, False] and more == 0
    keep, more = a.refill(outcome, wanted=6, made=5, most=100)
    assert keep.sum() == 3 and more == 3
    assert a.refill(outcome, wanted=6, made=99, most=100)[1] == 1
    assert a.refill(outcome, wanted=6, made=200, most=100)[1] == 0


def test_members_that_are_not_valid_do_not_make_a_group_mixed():
    outcome = np.array([[1.0, 1, 0], [1, 0, 0]])
    assert a.flat_groups(outcome, np.array([[True, True, False], [True, True, False]])).tolist() == [True, False]


# ---- Reinforce-Ada

def test_the_two_rules_of_reinforce_ada_end_a_task_where_they_say():
    good, made = np.array([0, 1, 2, 6]), np.array([8, 8, 8, 8])
    assert a.ada_finished(good, made, 4, "positive").tolist() == [False, True, True, True]
    assert a.ada_finished(good, made, 4, "balance").tolist() == [False, False, True, True]
    with pytest.raises(UserError, match="positive or balance"):
        a.ada_finished(good, made, 4, "both")


def test_one_success_of_thirty_two_is_picked_and_the_baseline_is_the_pools():
    outcome = np.zeros(32)
    outcome[7] = 1
    picked = a.ada_pick(outcome, 4, np.random.default_rng(0))
    assert len(set(picked)) == 4 and 7 in picked
    adv = a.ada_advantage(outcome, picked)
    assert adv.max() == pytest.approx(1 - 1 / 32) and adv.min() == pytest.approx(-1 / 32)


@pytest.mark.parametrize("good", [0, 1, 2, 5, 9, 10])
def test_what_is_picked_is_half_and_half_as_far_as_there_are_any(good):
    outcome = np.arange(10) < good
    picked = a.ada_pick(outcome.astype(float), 4, np.random.default_rng(1))
    assert len(set(picked)) == 4 and outcome[picked].sum() == min(max(2, 4 - (10 - good)), good)


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

def test_duet_spends_its_budget_to_within_one_episode():
    rng = np.random.default_rng(0)
    value, length = rng.random(40) + 0.1, rng.integers(5, 60, 40).astype(float)
    for budget in (2500, 5000, 9000):
        plan = a.duet(value, length, budget)
        spent = plan.n @ length
        assert budget - length.max() <= spent <= budget
        assert plan.n.min() >= 1 and plan.n.max() <= 32


def test_the_price_of_a_step_falls_as_the_budget_grows():
    value, length = np.array([1.0, 2.0, 0.5]), np.array([10.0, 20.0, 30.0])
    prices = [a.duet(value, length, b, n_range=(0, 1000)).lam for b in (100, 300, 900)]
    assert prices[0] > prices[1] > prices[2]


def test_number_and_length_of_duet_follow_its_two_roots():
    value, length = np.array([1.0, 2.0]), np.array([10.0, 40.0])
    plan = a.duet(value, length, 1e4, n_range=(0, 10**6), length_range=(0, 1e9))
    assert np.allclose(plan.longest, value * np.sqrt(length / plan.lam))
    assert np.abs(plan.n - value / np.sqrt(plan.lam * length)).max() <= 1


def test_a_mean_over_survivors_is_that_over_all_episodes():
    rng = np.random.default_rng(0)
    n = 400_000
    stopped = rng.random(n) < 0.4
    reward = np.where(stopped, 0.1, 0.7) + 0.1 * rng.normal(size=n)
    w = a.survivor_weights(stopped, rng.random(n) < 0.05, 0.05)
    assert w.mean() == pytest.approx(1) and (w * reward).mean() == pytest.approx(reward.mean(), abs=0.01)
    assert (a.survivor_weights(stopped, np.ones(n, bool), 1.0) == 1).all()
    with pytest.raises(UserError, match="keep"):
        a.survivor_weights(stopped, stopped, 0.0)


# ---- TRACE

def test_trace_gives_nothing_to_certain_anchors_and_begins_at_one_half():
    n = a.trace_allocate(np.array([0.0, 0.5, 0.9, 1.0]), np.ones(4), 2)
    assert n.tolist() == [0, 2, 0, 0]
    n = a.trace_allocate(np.array([0.0, 0.5, 0.9, 1.0]), np.ones(4), 24)
    assert n.sum() == 24 and n[0] == n[3] == 0 and n[2] > n[1] >= 2


def test_the_greedy_plan_of_trace_is_the_best_of_all_plans():
    rng = np.random.default_rng(0)
    for _ in range(20):
        p, budget = rng.uniform(0.05, 0.95, 3), 9
        got = a.trace_allocate(p, np.ones(3), budget)
        plans = [(i, j, budget - i - j) for i in range(budget + 1) for j in range(budget + 1 - i)]
        best = max(sum(float(a.mixed(n, q)) for n, q in zip(plan, p, strict=True) if n) for plan in plans)
        value = sum(float(a.mixed(int(n), q)) for n, q in zip(got, p, strict=True) if n)
        assert value == pytest.approx(best, abs=0.02)  # pairs are bought at once: an odd episode may end elsewhere


def test_dear_anchors_get_less_of_trace():
    n = a.trace_allocate(np.array([0.5, 0.5]), np.array([1.0, 4.0]), 20)
    assert n[0] > n[1] and n @ np.array([1, 4]) <= 20


# ---- BroRL

def test_the_mass_that_samples_miss_is_that_of_counting():
    p, rng = np.array([0.5, 0.3, 0.15, 0.05]), np.random.default_rng(0)
    seen = rng.multinomial(6, p, 100_000) > 0
    assert a.unsampled_mass(p, 6) == pytest.approx((~seen * p**2).sum(1).mean(), rel=0.02)
    assert a.unsampled_mass(p, 512) < 1e-6 < a.unsampled_mass(p, 16)


def test_statistics_of_a_large_group_need_not_keep_it():
    x, moments = np.random.default_rng(0).normal(3, 2, 1000), a.GroupMoments()
    for part in np.split(x, [1, 7, 400, 400]):
        moments.add(part)
    assert moments.n == 1000 and moments.mean == pytest.approx(x.mean()) and moments.std == pytest.approx(x.std(ddof=1))


def test_groups_become_broad_on_a_plateau_below_one():
    assert a.broad_group(np.full(20, 0.4), 8, 128) == 128
    assert a.broad_group(np.linspace(0.2, 0.6, 20), 8, 128) == 8
    assert a.broad_group(np.full(20, 1.0), 8, 128) == 8 and a.broad_group(np.full(5, 0.4), 8, 128) == 8


# ---- Rollout-GDRO

def test_the_square_root_law_beats_two_thousand_other_plans_of_its_budget():
    rng = np.random.default_rng(0)
    share, v = rng.dirichlet(np.ones(5)), rng.uniform(0.01, 0.25, 5)
    n = gdro.square_root_law(v, share, 16)
    assert share @ n == pytest.approx(16)
    for _ in range(2000):
        other = n * np.exp(0.3 * rng.normal(size=5))
        other *= 16 / (share @ other)
        assert (share * v / n).sum() <= (share * v / other).sum() + 1e-12


def test_the_plan_spends_exactly_its_budget_and_is_the_best_of_all():
    rng = np.random.default_rng(0)
    for _ in range(10):
        worth, groups, low = rng.random((3, 5)), np.array([2, 1, 3]), 2
        budget = 4 * int(groups.sum())
        plan = gdro.best_plan(worth, groups, budget, low)
        assert groups @ plan == budget
        every = [(i, j, k) for i in range(5) for j in range(5) for k in range(5)
                 if groups @ (np.array([i, j, k]) + low) == budget]
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
        player.observe(plan, np.array([a.mixed(int(plan[0]), 0.15), 0.0]), groups)
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
