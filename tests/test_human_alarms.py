"""One alarm out of several scores, live."""

import functools

import numpy as np
import pytest

from robo_rl.errors import UserError
from robo_rl.human import alarms, detect


def walk(seed, length=12, f=6, noise=0.02):
    """A way through embedding space, as successes go, each a little differently."""
    rng, t = np.random.default_rng(seed), np.linspace(0, 1, length)[:, None]
    return np.concatenate(
        [np.sin(2 * t + np.arange(f // 2)), np.cos(3 * t + np.arange(f // 2))], 1
    ) + noise * rng.normal(size=(length, f))


DEMOS = [walk(s) for s in range(5)]
REF = detect.demo_embeddings(DEMOS)
ALPHA = 0.3


@functools.cache
def calibrated():
    return alarms.largest_threshold(
        [alarms.scores_by_check(walk(100 + s), REF, DEMOS) for s in range(120)], ALPHA
    )


def monitor(n=1):
    return alarms.LargestMonitor(REF, DEMOS, *calibrated(), np.full(20, 9.0), n)


def test_what_is_known_at_a_check_does_not_depend_on_what_comes_after_it():
    whole = alarms.scores_by_check(walk(7), REF, DEMOS)
    assert np.allclose(alarms.scores_by_check(walk(7)[:9], REF, DEMOS), whole[:9])
    assert np.allclose(whole[-1, 1], detect.stuck_score(walk(7), alarms.STUCK)[-1])
    assert np.allclose(whole[:, 2], detect.far_score(walk(7), DEMOS))


def test_the_live_alarm_is_that_of_the_threshold_and_new_successes_rarely_raise_it():
    live = monitor()
    false = 0
    for s in range(60):
        live.begin(0)
        rollout = walk(300 + s)
        said = [live.check(0, x) > 1 for x in rollout]
        scores = alarms.largest_of(alarms.scores_by_check(rollout, REF, DEMOS), live.scales)
        first = detect.first_alarm(scores, live.threshold)
        assert said.index(True) == first if first >= 0 else not any(said)
        false += any(said)
    assert false / 60 <= ALPHA + 0.15


@pytest.mark.parametrize("wrong", ["stands still", "goes astray"])
def test_one_strange_score_is_enough(wrong):
    live, rollout = monitor(2), walk(9)
    rollout[6:] = rollout[6] if wrong == "stands still" else rollout[6:] + np.linspace(0.2, 2, 6)[:, None]
    alarm = [live.check(1, x) > 1 for x in rollout].index(True)
    assert 6 <= alarm < 12 and not live.points[0]
    live.begin(1, keep=4)
    assert len(live.points[1]) == len(live.scores[1]) == 4 and live.rewind_to(1) == 0


def test_too_few_successes_for_two_halves_is_one_line():
    few = [alarms.scores_by_check(walk(s), REF, DEMOS) for s in range(8)]
    with pytest.raises(UserError, match="needs .* successful rollouts"):
        alarms.largest_threshold(few, 0.1)
    with pytest.raises(UserError, match="there are 0"):
        alarms.largest_threshold([], 0.1)
