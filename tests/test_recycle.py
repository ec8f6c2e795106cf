"""Failures used again: the prefix stays bit for bit, who acted is told apart, and what a teacher did enters supervision alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toys import PointReach

from robo_rl.data.episode import Episode
from robo_rl.errors import UserError
from robo_rl.recording import Recorder
from robo_rl.rollout_control import recycle as rc

LIMIT = 15


def failures(n=6):
    """Episodes that go the right way for 4 steps and then away."""
    env, out = PointReach(n, LIMIT), []
    recorder = Recorder(env, out.append)
    recorder.reset(options={"starts": np.arange(100, 100 + n)})
    for t in range(LIMIT):
        recorder.step(env.expert_action() * 0.3 if t < 4 else -env.expert_action())
    return [e for e in out if not e.success]


def distance(e):
    return -np.linalg.norm(e.state[:, 2:], axis=1)


def test_the_first_bad_step_is_the_first_after_which_the_value_never_comes_back():
    rng = np.random.default_rng(0)
    for _ in range(300):
        value, drop = rng.integers(0, 6, rng.integers(1, 9)).astype(float), 1.5
        want = next((t for t in range(len(value)) if all(value[u] < value[:u + 1].max() - drop for u in range(t, len(value)))), len(value))
        assert rc.first_bad_step(value, drop) == want
    assert rc.first_bad_step(np.arange(5.0), 0.1) == 5 and rc.cut_of(np.arange(5.0), 0.1) == 5


def test_a_failure_is_cut_before_the_action_that_led_to_it_at_a_whole_chunk():
    e = failures()[0]
    bad = rc.first_bad_step(distance(e), 0.0)
    assert bad == 5 and rc.cut_of(distance(e), 0.0) == 4 and rc.cut_of(distance(e), 0.0, chunk=3) == 3  # state 5 is the first worse one


def test_the_prefix_is_bit_for_bit_the_recorded_one_and_a_teacher_brings_it_to_success():
    old = failures()
    env = PointReach(len(old) + 2, LIMIT)
    cuts = [rc.cut_of(distance(e), 0.0) for e in old]
    for e, r, cut in zip(old, rc.recycle(env, old, cuts, rc.expert_teacher(env)), cuts, strict=True):
        assert np.array_equal(r.episode.state[:cut + 1], e.state[:cut + 1]) and np.array_equal(r.episode.action[:cut], e.action[:cut])
        assert not r.taught[:cut].any() and r.taught[cut:].all() and r.cut == cut
        assert r.episode.success and r.episode.terminated and r.episode.start == e.start and not e.success
        again = rc.recycle(PointReach(1, LIMIT), [r.episode], [len(r.episode)], lambda obs, mask: None)[0]
        assert np.array_equal(again.episode.final, r.episode.final)  # what was made is itself an episode that can be played again


def test_a_cut_at_the_end_gives_the_episode_itself_and_one_at_zero_the_teachers_own():
    e = failures()[0]
    env = PointReach(1, LIMIT)
    whole = rc.recycle(env, [e], [len(e)], rc.expert_teacher(env))[0]
    assert np.array_equal(whole.episode.action, e.action) and np.array_equal(whole.episode.final, e.final) and not whole.taught.any()
    assert rc.recycle(env, [e], [0], rc.expert_teacher(env))[0].taught.all()


def test_an_intervention_is_the_teachers_for_its_steps_and_then_the_policys():
    e = failures()[0]
    env = PointReach(1, LIMIT)
    slow = lambda obs, mask: rc.expert_teacher(env)(obs, mask) * 0.5  # noqa: E731
    r = rc.recycle(env, [e], [4], rc.expert_teacher(env), slow, steps=2)[0]
    assert r.taught.tolist() == [False] * 4 + [True] * 2 + [False] * (len(r.episode) - 6)
    assert np.allclose(r.episode.action[4], np.clip((e.state[4, 2:]) / 0.2 * 0.7, -1, 1), atol=1e-6)
    assert rc.intervention_pays(np.array([True, False]), 0.25) and not rc.intervention_pays(np.array([True, False]), 0.5)
    assert not rc.intervention_pays(np.zeros(0, bool), 0.0)


def test_lessons_are_the_taught_steps_of_successes_and_end_where_the_policy_goes_on():
    state, action = np.arange(10.0).reshape(5, 2), np.arange(5.0)[:, None] / 5
    episode = Episode(state=state, action=action, success=True, source=["policy", "teacher", "teacher", "policy", "teacher"])
    s, chunk, mask = rc.lessons([rc.Recycled(episode, 1), rc.Recycled(replace(episode, success=False), 1)], 3)
    assert np.array_equal(s, state[[1, 2, 4]]) and mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert np.allclose(chunk[0, :2, 0], [0.2, 0.4]) and np.allclose(chunk[2, :, 0], 0.8)
    assert len(rc.lessons([], 3)[0]) == 0


def test_taught_samples_are_at_most_their_share():
    for own in (1, 7, 100):
        for share in (0.0, 0.1, 0.5, 0.9):
            n = rc.capped(10**6, own, share)
            assert n <= share * (n + own) + 1e-6 and n + 1 > share * (n + 1 + own) - 1e-6
    assert rc.capped(3, 100, 0.5) == 3


def test_an_episode_that_cannot_be_played_again_is_refused():
    e, env = failures()[0], PointReach(1, LIMIT)
    bent = replace(e, action=np.concatenate([e.action[:2], -e.action[2:]]))
    with pytest.raises(UserError, match="step 3 differs"):
        rc.recycle(env, [bent], [8], rc.expert_teacher(env))
    with pytest.raises(UserError, match="without a start"):
        rc.recycle(env, [replace(e, start=-1)], [2], rc.expert_teacher(env))
    with pytest.raises(UserError, match="as many envs"):
        rc.recycle(env, [e, e], [2, 2], rc.expert_teacher(env))
    with pytest.raises(UserError, match="pass the policy"):
        rc.recycle(env, [e], [2], rc.expert_teacher(env), steps=1)


def test_errors_become_groups_once_enough_wait_the_newest_first_and_none_too_old():
    queue = rc.FissionQueue(trigger=2, size=4, most_age=3)
    queue.add(0, 0)
    assert queue.take(0) == []
    queue.add(1, 2)
    queue.add(2, 3)
    copy = rc.FissionQueue(trigger=2, size=4, most_age=3)
    copy.load_state_dict(queue.state_dict())
    assert [(g.row, g.size, g.version) for g in queue.take(4)] == [(2, 4, 3), (1, 4, 2)]  # error 0 is 4 versions old
    assert queue.take(4) == [] and [g.row for g in copy.take(3)] == [2, 1] and copy.take(3) == []
    outcome = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    adv = rc.fission_advantage(outcome)
    assert torch.allclose(adv.sum(1), torch.zeros(2)) and not adv[1].any() and adv[0, 0] > 0
