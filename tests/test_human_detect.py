import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from robo_rl.errors import UserError
from robo_rl.human import detect as d


def walk(seed, length=30, f=12, noise=0.02, speed=1.0):
    """A noisy track through embedding space that all experts share."""
    t = np.arange(length)[:, None] * speed / 30
    base = np.concatenate([np.sin(2 * t * (k + 1) + k) for k in range(f)], 1)
    return base + noise * np.random.default_rng(seed).normal(size=base.shape)


def plain(cost):
    p, q = cost.shape
    return d.sinkhorn(
        cost[None],
        np.ones((1, p, q), bool),
        np.full((1, p), 1 / p),
        np.full((1, q), 1 / q),
        eps=0.005,
        tol=1e-6,
        most=20_000,
    )


def test_transport_marginals_are_right_to_a_thousandth():
    rng = np.random.default_rng(0)
    cost, q = rng.uniform(0, 2, (3, 20, 15)), np.array([15, 12, 9])
    b = np.where(np.arange(15) < q[:, None], 1 / q[:, None], 0)
    plan, value = d.sinkhorn(cost, d.band_mask(20, q, 15), np.full((3, 20), 0.05), b, most=5000)
    assert np.abs(plan.sum(2) - 0.05).sum(1).max() < 1e-3 and np.abs(plan.sum(1) - b).sum(1).max() < 1e-3
    assert np.allclose(value, (plan * cost).sum((1, 2))) and not plan[~d.band_mask(20, q, 15)].any()


def test_transport_is_the_best_assignment_where_the_sizes_are_equal():
    optimize = pytest.importorskip("scipy.optimize")
    cost = np.random.default_rng(1).uniform(0, 1, (12, 12))
    rows, columns = optimize.linear_sum_assignment(cost)
    assert plain(cost)[1][0] == pytest.approx(cost[rows, columns].mean(), abs=2e-3)


def test_without_a_band_time_does_not_matter_and_with_it_it_does():
    x = walk(0)
    cost = d.cosine_cost(x, x[::-1])
    assert plain(cost)[1][0] < 0.01  # the public definition: a reversed rollout costs nothing
    ref = d.demo_embeddings([walk(s) for s in range(1, 6)])
    assert d.float_index(x[::-1], ref).index > 10 * d.float_index(x, ref).index


def test_a_demonstration_costs_nothing_against_itself_and_a_random_walk_much():
    ref = d.demo_embeddings([walk(s) for s in range(5)])
    wander = np.cumsum(np.random.default_rng(0).normal(size=(30, 12)), 0)
    assert d.float_index(walk(2), ref).index < 0.01 and d.float_index(walk(2), ref).demo == 2
    assert d.float_index(wander, ref).index > 0.3


def test_leaving_demonstrations_out_by_their_bound_changes_nothing():
    demos = [walk(s, length=20 + s, noise=0.3) for s in range(12)]
    ref, x = d.demo_embeddings(demos), walk(99, 25, noise=0.3)
    assert d.float_index(x, ref, at_once=2).index == pytest.approx(
        d.float_index(x, ref, at_once=12).index, abs=1e-3
    )


def test_the_index_compares_with_the_same_elapsed_time_alone():
    ref = d.demo_embeddings([walk(s) for s in range(5)])
    assert d.float_index(walk(9)[:6], ref).index < 0.02
    # stuck
    assert (
        d.float_index(np.repeat(walk(9)[:1], 12, 0), ref).index > 5 * d.float_index(walk(9)[:12], ref).index
    )


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_the_false_alarm_rate_is_kept_on_new_successes(alpha):
    rng = np.random.default_rng(3)

    def score():
        return np.cumsum(rng.normal(size=rng.integers(20, 40))) + 5 * rng.normal()

    rates = []
    for _ in range(60):
        t = d.calibrate([score() for _ in range(160)], alpha)
        rates.append(np.mean([d.first_alarm(score(), t) >= 0 for _ in range(50)]))
    assert 0.4 * alpha < np.mean(rates) < 1.1 * alpha + 0.01


def test_too_few_successes_for_a_rate_is_one_clear_line():
    with pytest.raises(
        UserError,
        match="a false-alarm rate of 0.05 needs 78 successful rollouts to calibrate on, there are 7",
    ):
        d.calibrate([np.zeros(3)] * 7, 0.05)
    with pytest.raises(UserError, match="needs at least one demonstration"):
        d.demo_embeddings([])


def test_rollouts_that_fail_are_caught_before_they_end():
    ref = d.demo_embeddings([walk(s) for s in range(8)])

    def series(x):
        return np.array([d.float_index(x[:k], ref).index for k in range(1, len(x) + 1)])

    def failing(s):
        x = walk(s)
        # stands still from step 12 on
        x[12:] = x[12] + 0.02 * np.random.default_rng(s).normal(size=x[12:].shape)
        return x

    t = d.calibrate([series(walk(100 + s)) for s in range(40)], 0.1)
    caught = [d.first_alarm(series(failing(200 + s)), t) for s in range(10)]
    assert np.mean([0 <= c < 29 for c in caught]) == 1 and np.mean([c >= 12 for c in caught]) >= 0.8
    assert np.mean([d.first_alarm(series(walk(300 + s)), t) >= 0 for s in range(20)]) <= 0.25


def test_a_rollout_that_outlasts_the_successes_is_an_alarm():
    t = d.calibrate([np.zeros(20 + e % 5) for e in range(40)], 0.1)
    assert d.first_alarm(np.zeros(24), t) == -1 and d.first_alarm(np.zeros(40), t) == 24


def test_the_rewind_point_is_the_last_one_that_was_still_fine():
    matched, limit = np.array([0.1, 0.1, 0.2, 0.1, 0.6, 0.7, 0.9]), np.full(4, 0.3)
    assert d.rewind_point(matched, limit) == 3 and d.rewind_point(matched, limit, least=4) == 2
    assert d.rewind_point(np.full(5, 0.9), limit) == 0


def test_the_cheap_alarms_say_what_they_are_named_after():
    x = np.concatenate([np.arange(10.0), np.full(10, 9.0)])[:, None]
    stuck = d.stuck_score(x, 4)
    assert stuck[-1] == 0 and stuck[8] == -4 and stuck.argmax() >= 13
    limits = d.limit_score(np.array([[0.5, 1.0]] * 3 + [[1.0, -1.0]] * 5), 2)
    assert limits[2] == 0.5 and limits[-1] == 1 and limits[3] == 0.75
    assert d.drop_score(np.array([0, 1.0, 3, 2, 2.5])).tolist() == [0, 0, 0, 1, 0.5]
    assert d.spread_score(np.stack([np.zeros((4, 2)), np.tile([[1.0], [-1.0]], (2, 2))])).tolist() == [0, 1]


def test_a_score_is_judged_among_rollouts_that_run_at_the_same_time_where_the_clock_knows_nothing():
    lengths, failed = [3, 5, 9, 9], [False, False, True, True]
    assert d.auroc_while_running([d.late_score(n) for n in lengths], failed) == 0.5
    assert (
        d.auroc_while_running([np.full(n, float(f)) for n, f in zip(lengths, failed, strict=True)], failed)
        == 1.0
    )
    assert (
        d.auroc_while_running([np.full(n, -float(f)) for n, f in zip(lengths, failed, strict=True)], failed)
        == 0.0
    )
    assert np.isnan(d.auroc_while_running([np.zeros(3)], [True]))


def test_the_largest_of_normalised_scores_alarms_where_one_of_them_is_strange():
    rng = np.random.default_rng(0)
    a, b = rng.normal(5, 0.1, (40, 10)), rng.normal(-2, 30, (40, 10))  # of two sizes
    scales = [d.by_time(list(x[:20])) for x in (a, b)]
    good = [
        d.largest(*(d.normalised(x[i], *s) for x, s in zip((a, b), scales, strict=True)))
        for i in range(20, 40)
    ]
    threshold = d.calibrate(good, 0.2, outlast=False)
    strange = a[0].copy()
    strange[4] = 7.0  # 20 of its own deviations, and far inside the other's
    alarm = d.first_alarm(
        d.largest(d.normalised(strange, *scales[0]), d.normalised(b[0], *scales[1])), threshold
    )
    assert alarm == 4


def test_a_state_of_no_demonstration_is_far_at_whatever_time():
    rng = np.random.default_rng(1)
    demos = [rng.normal(size=(n, 4)) for n in (7, 12)]
    assert d.far_score(demos[1][::-1], demos).max() < 1e-5
    away = d.far_score(demos[0] + np.array([0, 0, 0, 9.0]), demos)
    assert np.allclose(
        away,
        [
            min(np.linalg.norm(p - q) for one in demos for q in one)
            for p in demos[0] + np.array([0, 0, 0, 9.0])
        ],
    )


def test_the_monitor_alarms_above_its_threshold_and_after_the_last_success_and_never_below():
    ref, point = d.demo_embeddings([walk(s) for s in range(3)]), walk(9)
    far = 9 * np.ones(12)
    monitor = d.FailureMonitor(
        ref, d.Threshold(np.full(1, 0.1), np.full(1, 0.01), 1.0, 5), np.full(30, 0.1), 2
    )
    assert [monitor.check(0, x) > 1 for x in point[:8]] == [False] * 6 + [True] * 2
    monitor.begin(0)
    assert [monitor.check(0, x) > 1 for x in point[:3]] == [False] * 3 and monitor.check(0, far) > 1
    assert monitor.rewind_to(0) == 2 and monitor.rewind_to(1) == 0
    # time alone
    unsure = d.FailureMonitor(ref, d.Threshold(np.zeros(1), np.ones(1), np.inf, 5), np.full(30, 0.1), 1)
    assert [unsure.check(0, far) > 1 for _ in range(8)] == [False] * 6 + [True] * 2


@pytest.mark.slow
def test_the_comparison_of_detectors_runs_on_a_run_of_today(tmp_path):
    root = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for command in (
        [
            "-m",
            "robo_rl",
            "train",
            "--task",
            "reach",
            "--algo",
            "bc",
            "--preset",
            "quick",
            "--demos",
            "20",
            "--workers",
            "0",
            "--no-video",
            "--out",
            "run",
        ],
        [
            root / "launch/compare_detectors.py",
            "run",
            "--rollouts",
            "60",
            "--alpha",
            "0.5",
            "--out",
            "table.json",
        ],
    ):
        subprocess.run([sys.executable, *command], cwd=tmp_path, env=env, check=True)
    table = {row["detector"]: row for row in json.loads((tmp_path / "table.json").read_text())}
    assert {"FLOAT", "far", "largest", "largest + time"} <= set(table) and table["largest"]["successes"] > 0
