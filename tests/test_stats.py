import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robo_rl.errors import UserError
from robo_rl.stats import bootstrap_mean, match, paired_difference, per_task, unpaired_difference, wilson


def vectors(both, only_after, only_before, neither):
    """0/1 vectors (after, before) with the given counts of pairs."""
    after = [1] * both + [1] * only_after + [0] * only_before + [0] * neither
    before = [1] * both + [0] * only_after + [1] * only_before + [0] * neither
    return np.array(after), np.array(before)


# Newcombe 1998, Stat. Med. 17, 857-872, table I, method 3.
@pytest.mark.parametrize(
    "x, n, low, high",
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(x, n, low, high):
    assert wilson(x, n)[1:] == pytest.approx((low, high), abs=5e-5)


def test_wilson_solves_its_defining_equation():
    """The ends are the rates p0 whose score test of x/n just rejects: |p - p0| = z sqrt(p0 (1-p0) / n)."""
    for x, n, level, z in [(3, 17, 0.95, 1.959964), (180, 200, 0.99, 2.575829), (1, 5, 0.8, 1.281552)]:
        p, low, high = wilson(x, n, level)
        for p0 in (low, high):
            assert abs(p - p0) == pytest.approx(z * np.sqrt(p0 * (1 - p0) / n), rel=1e-5)


# Newcombe 1998, Stat. Med. 17, 873-890, table II, method 10.
@pytest.mark.parametrize(
    "x1, n1, x2, n2, low, high",
    [
        (56, 70, 48, 80, 0.0524, 0.3339),
        (9, 10, 3, 10, 0.1705, 0.8090),
        (6, 7, 2, 7, 0.0582, 0.8062),
        (5, 56, 0, 29, -0.0381, 0.1926),
        (0, 10, 0, 20, -0.1611, 0.2775),
        (10, 10, 0, 20, 0.6791, 1.0),
    ],
)
def test_the_unpaired_difference_gives_the_published_intervals(x1, n1, x2, n2, low, high):
    assert unpaired_difference(x1, n1, x2, n2)[1:] == pytest.approx((low, high), abs=5e-5)


# Newcombe 1998, Stat. Med. 17, 2635-2650, table III, method 10; the last row (Cavo et al. 2012) is from
# Fagerland, Lydersen, Laake 2017, Statistical Analysis of Contingency Tables, ch. 8.
@pytest.mark.parametrize(
    "cells, low, high",
    [
        ((36, 12, 2, 0), 0.0569, 0.3404),
        ((20, 12, 2, 16), 0.0562, 0.3292),
        ((18, 12, 2, 18), 0.0562, 0.3290),
        ((35, 14, 0, 1), 0.1461, 0.4175),
        ((2, 97, 1, 0), 0.8721, 0.9854),
        ((0, 30, 0, 0), 0.8395, 1.0),
        ((54, 0, 0, 0), -0.0664, 0.0664),
        ((27, 0, 0, 27), -0.0351, 0.0351),
        ((59, 6, 16, 80), -0.1186, -0.0046),
    ],
)
def test_the_paired_difference_gives_the_published_intervals(cells, low, high):
    assert paired_difference(*vectors(*cells))[1:] == pytest.approx((low, high), abs=6e-5)


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(0, 40)] * 4).filter(sum))
def test_swapping_the_two_policies_flips_the_difference(cells):
    after, before = vectors(*cells)
    d, low, high = paired_difference(after, before)
    e, low2, high2 = paired_difference(before, after)
    assert (d, low, high) == pytest.approx((-e, -high2, -low2))
    assert -1 <= low <= d <= high <= 1 and d == pytest.approx(after.mean() - before.mean())


def test_pairing_narrows_the_interval_when_the_starts_decide_together():
    after, before = vectors(90, 40, 5, 65)
    paired = paired_difference(after, before)
    loose = unpaired_difference(after.sum(), 200, before.sum(), 200)
    assert paired.value == pytest.approx(loose.value)
    assert paired.high - paired.low < 0.75 * (loose.high - loose.low)


def coverage(truth, intervals):
    low, high = np.array([i[1:] for i in intervals]).T
    return np.mean((low <= truth) & (truth <= high))


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.99])
def test_wilson_covers_the_true_rate_as_often_as_it_says(p):
    draws = np.random.default_rng(1).binomial(200, p, size=3000)
    table = {int(x): wilson(int(x), 200) for x in set(draws)}
    assert 0.925 < coverage(p, [table[int(x)] for x in draws]) < 0.985


@pytest.mark.parametrize("cells", [(0.5, 0.3, 0.02, 0.18), (0.9, 0.05, 0.04, 0.01), (0.25, 0.25, 0.25, 0.25)])
def test_the_paired_interval_covers_the_true_difference_as_often_as_it_says(cells):
    counts = np.random.default_rng(2).multinomial(100, cells, size=1500)
    seen = coverage(cells[1] - cells[2], [paired_difference(*vectors(*c)) for c in counts])
    assert 0.93 < seen < 0.985


def test_the_unpaired_interval_covers_the_true_difference_as_often_as_it_says():
    rng = np.random.default_rng(3)
    draws = zip(rng.binomial(80, 0.9, 2000), rng.binomial(120, 0.6, 2000), strict=False)
    assert 0.93 < coverage(0.3, [unpaired_difference(a, 80, b, 120) for a, b in draws]) < 0.975


def test_the_bootstrap_interval_covers_the_mean_and_agrees_with_the_normal_one():
    rng = np.random.default_rng(4)
    x = rng.gamma(2.0, 3.0, size=(300, 100))  # skewed, mean 6
    assert 0.90 < coverage(6.0, [bootstrap_mean(row, resamples=500) for row in x]) < 0.98
    big = rng.normal(2.0, 5.0, size=4000)
    half = 1.959964 * big.std() / np.sqrt(4000)
    assert bootstrap_mean(big)[1:] == pytest.approx((big.mean() - half, big.mean() + half), abs=0.1 * half)


def test_groups_are_drawn_whole():
    x = np.random.default_rng(0).normal(size=40)
    assert bootstrap_mean(x, groups=np.arange(40)[::-1]) == pytest.approx(bootstrap_mean(x[::-1]))
    twice = bootstrap_mean(np.repeat(x, 3), groups=np.repeat(np.arange(40), 3))
    assert twice == pytest.approx(bootstrap_mean(x))  # copies of a value are no news
    uneven = bootstrap_mean([0.0, 1.0, 1.0, 1.0], groups=np.array([5, 9, 9, 9]))
    assert uneven == pytest.approx((0.75, 0.0, 1.0))
    assert np.isnan(bootstrap_mean([1.0, 2.0], groups=np.array([1, 1])).low)


def test_the_bootstrap_depends_on_its_seed_alone_and_knows_its_limits():
    x = np.arange(30.0)
    assert bootstrap_mean(x, seed=5) == bootstrap_mean(list(x), seed=5)
    assert bootstrap_mean(x, seed=5) != bootstrap_mean(x, seed=6)
    assert np.isnan(bootstrap_mean([3.0])[1:]).all() and bootstrap_mean([3.0]).value == 3.0
    assert np.isnan(bootstrap_mean([])).all()
    assert bootstrap_mean([7.0] * 9) == (7.0, 7.0, 7.0)


def test_match_pairs_equal_keys_and_counts_repeats():
    i, j = match([3, 1, 1, 9], [1, 3, 4, 1, 1])
    assert list(i) == [0, 1, 2] and list(j) == [1, 0, 3]
    assert [len(k) for k in match([1], [2])] == [0, 0]


def test_per_task_counts_every_episode_once():
    rows = per_task(["b", "a", "b", "b"], [1, 0, 0, 1])
    assert [(r.task, r.n, r.successes) for r in rows] == [("a", 1, 0), ("b", 3, 2)]
    assert rows[1].rate == wilson(2, 3)
    assert per_task([], []) == []
    alike = per_task(["a"] * 4 + ["b"], [1, 1, 0, 0, 1], groups=[3, 3, 8, 8, 9])
    assert [(r.n, r.successes, r.rate) for r in alike] == [(4, 2, wilson(1, 2)), (1, 1, wilson(1, 1))]


def test_nothing_seen_says_nothing():
    assert wilson(0, 0)[1:] == (0.0, 1.0)
    assert unpaired_difference(1, 2, 0, 0)[1:] == (-1.0, 1.0)
    assert paired_difference([], [])[1:] == (-1.0, 1.0)


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: wilson(5, 4), "0, n"),
        (lambda: wilson(1, 2, level=95), "level"),
        (lambda: wilson(-1, 4), "0, n"),
        (lambda: paired_difference([1, 0], [1]), "2 and 1"),
        (lambda: paired_difference([0.5], [1]), "0 and 1"),
        (lambda: bootstrap_mean([1, 2], resamples=3), "resamples"),
        (lambda: per_task(["a"], [1, 0]), "1 tasks"),
    ],
)
def test_wrong_input_is_refused_with_the_reason(call, word):
    with pytest.raises(UserError, match=word):
        call()
