"""Samples that no longer count make a run collect less ahead, with a word, and a resumed run remembers."""

import math

from test_runtime import local, make_learner, train

from robo_rl.experiment.staleness_guard import EssGuard, StalenessGuard


def test_a_run_whose_samples_stop_counting_steps_down_says_so_and_goes_on_under_the_smaller_bound():
    learner, said = make_learner(), []
    feed = local(learner, workers=2, staleness=3)
    guard = StalenessGuard(lambda *words: said.append(words), EssGuard(patience=2))
    seen = []
    for ess in (0.5, 0.01, 0.01, None, 0.02, 0.02, 0.02, 0.02):
        seen += train(learner, feed, 2)
        guard.after(feed, {} if ess is None else {"ess_frac": ess})
    assert feed.ledger.staleness == guard.bound == 1 and len(said) == 2 and said[0][1] == "warning"
    assert "2 versions old" in said[0][0] and "--max-staleness 1" in said[1][0]
    seen = train(learner, feed, 6)  # the ledger's own check runs in it
    assert max(s["staleness/max"] for s in seen) <= 1


def test_the_bound_that_was_reached_is_that_of_a_resumed_run_and_an_old_checkpoint_has_none():
    guard = StalenessGuard(print, EssGuard(patience=1))
    feed = local(make_learner(), workers=2, staleness=3)
    guard.after(feed, {"ess_frac": 0.0})
    again = StalenessGuard(print)
    again.load_state_dict(guard.state_dict())
    other = local(make_learner(), workers=2, staleness=3)
    again.begin(other)
    assert other.ledger.staleness == 2
    plain = StalenessGuard(print)
    plain.load_state_dict(None)
    plain.begin(other)
    assert other.ledger.staleness == 2 and plain.bound == -1


def test_the_bound_on_staleness_steps_down_once_the_samples_stop_counting_and_never_below_its_floor():
    guard, bound, seen = EssGuard(patience=3), 3, []
    for ess in (0.05, 0.05, 0.2, 0.05, 0.05, 0.05, 0.05, math.nan, 0.0, 0.0, 0.0, 0.0):
        bound = guard.observe(ess, bound)
        seen.append(bound)
    assert seen == [3, 3, 3, 3, 3, 2, 2, 2, 1, 1, 1, 1]
    assert guard.observe(None, 1) == 1 and guard.low == 0
    other = EssGuard(patience=3)
    other.observe(0.01, 2)
    other.observe(0.01, 2)
    copy = EssGuard(patience=3)
    copy.load_state_dict(other.state_dict())
    assert copy.observe(0.01, 2) == 1
