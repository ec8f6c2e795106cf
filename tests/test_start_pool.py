"""`robo_rl train --starts NAME`: samplers over a pool of starts, from the table that they propose to a run
that resumes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from commands import TINY, robo_rl

import robo_rl as package
from robo_rl.errors import UserError
from robo_rl.experiment import start_pool
from robo_rl.experiment.config import POOL_STARTS
from robo_rl.rollout_control.pool import ARM_SAMPLERS, PoolSampler, pool_ids
from robo_rl.starts import own_starts

K = 40
FEATURES = np.random.default_rng(0).normal(size=(K, 3))


def make(name, rows=8, uniform=0.25):
    return PoolSampler(pool_ids(K, 3), ARM_SAMPLERS[name](K, 3, FEATURES), rows, uniform)


def played(sampler, episodes=64, rate=0.5, seed=0):
    """Starts drawn from the sampler's next table, and whether their episodes succeeded."""
    rng, table = np.random.default_rng(seed), sampler.propose(None)
    starts = rng.choice(table.ids, episodes, p=table.weights / table.weights.sum())
    return starts, rng.random(episodes) < rate


def observe(sampler, starts, success):
    n = len(starts)
    sampler.observe(starts, np.zeros(n, np.int64), success, success.astype(float), np.ones(n, np.int64))


def test_every_name_of_the_command_has_a_sampler():
    assert tuple(ARM_SAMPLERS) == POOL_STARTS


def test_a_pool_has_as_many_different_starts_as_asked_and_they_are_starts_of_the_task():
    ids = pool_ids(1000, 5)
    assert len(set(ids.tolist())) == 1000 and ids.min() >= 0 and ids.max() < 2**31
    assert (pool_ids(1000, 5) == ids).all() and not set(pool_ids(1000, 6)) & set(ids)
    assert own_starts(np.array([2**64 - 1], np.uint64)) >= ids.max()


@pytest.mark.parametrize("name", POOL_STARTS)
def test_a_table_has_starts_of_the_pool_and_outcomes_find_their_arms(name):
    sampler = make(name)
    for i in range(6):
        starts, success = played(sampler, seed=i)
        assert set(starts) <= set(sampler.ids.tolist())
        observe(sampler, starts, success)
    told = sampler.metrics()
    assert sum(told[f"pool_{i}"] for i in range(5)) == pytest.approx(1)
    assert sum(told[f"played_{i}"] for i in range(5)) == pytest.approx(1)
    assert 0 <= told["predicted"] <= 1


def test_success_is_counted_for_the_start_it_came_from_and_starts_outside_the_pool_are_not_counted():
    sampler = make("pool")
    inside, outside = sampler.ids[[7, 7, 3]], np.setdiff1d(np.arange(100), sampler.ids)[:5]
    observe(sampler, np.concatenate([inside, outside]), np.array([True, True, False] + [True] * 5))
    p = sampler.arms.predict()
    assert p[7] == 3 / 4 and p[3] == 1 / 3 and (np.delete(p, [3, 7]) == 0.5).all()


@pytest.mark.parametrize("name", POOL_STARTS)
def test_a_pool_that_was_saved_proposes_what_it_would_have_proposed(name):
    sampler, again = make(name), make(name)
    for i in range(4):
        observe(sampler, *played(sampler, seed=i))
    again.load_state_dict(sampler.state_dict())
    a, b = sampler.propose(None), again.propose(None)
    assert (a.ids == b.ids).all() and (a.weights == b.weights).all() and a.uniform == b.uniform == 0.25
    assert sampler.metrics() == again.metrics()


def test_the_first_observations_are_those_of_the_starts():
    config = package.recipe(task="reach")
    ids = pool_ids(70, 0)  # more than the envs that show them
    seen = start_pool.first_observations(config, ids)
    again = start_pool.first_observations(config, ids[[69, 3]])
    assert seen.shape[0] == 70 and (again == seen[[69, 3]]).all() and len(np.unique(seen, axis=0)) == 70


@pytest.mark.parametrize(
    "options, says",
    [
        ({"starts": "vade", "start_rows": 65, "start_pool": 64}, "at most --start-pool 64, got 65"),
        (
            {"starts": "v0", "obs": "rgb"},
            "v0 predicts success from state observations; with --obs rgb use pool, vade",
        ),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_what_can(options, says):
    with pytest.raises(UserError, match=says):
        start_pool.check(replace(package.recipe(task="reach"), **options))


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--starts", "vde"], "vade"),
        (["--starts", "vade", "--start-rows", "0"], "--start-rows must be in [1, 65536]"),
        (["--starts", "dots", "--start-uniform", "1"], "--start-uniform must be in [0, 0.99]"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_clear_line(argv, says, tmp_path):
    assert says in robo_rl(tmp_path, "train", "--task", "reach", *argv).mistake


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["vade", "v0"])
def test_a_run_says_where_its_episodes_went(name, tmp_path):
    pool = ("--starts", name, "--start-pool", "32", "--start-rows", "16")
    assert robo_rl(tmp_path, "train", *TINY, *pool, "--out", "run").code == 0
    rows = [r for r in logged(tmp_path / "run") if "starts/rows" in r]
    assert rows and all(r["starts/rows"] <= 16 and r["starts/uniform"] == 0.25 for r in rows)
    assert sum(rows[-1][f"starts/pool_{i}"] for i in range(5)) == pytest.approx(1)
    assert any(r["starts/predicted"] != 0.5 for r in rows)
    from robo_rl.report.data import load
    from robo_rl.report.page import page

    shown = page(load(tmp_path / "run"))
    assert "Where rollouts went" in shown and "Starts by success" in shown and "Episodes by success" in shown


def test_a_run_without_a_pool_has_no_map_of_starts(tmp_path):
    from robo_rl.report.data import load
    from robo_rl.report.starts import start_map

    assert robo_rl(tmp_path, "train", *TINY, "--out", "run").code == 0
    assert start_map(load(tmp_path / "run")) == ""
