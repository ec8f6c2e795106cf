"""The success classifier: its guard keeps the promised rate, its marks are checked, and it can pay the
reward."""

import numpy as np
import pytest
from toys import PointReach

from robo_rl.errors import UserError
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec
from robo_rl.replay import Replay
from robo_rl.replay_collector import ReplayCollector, marked_episodes
from robo_rl.rewards import Judge, Marked, SuccessClassifier, episode_scores, fit, guard, train


@pytest.mark.parametrize(("n", "rate"), [(19, 0.05), (50, 0.1), (200, 0.02)])
def test_a_new_failure_exceeds_the_guard_no_more_often_than_promised(n, rate):
    rng = np.random.default_rng(0)
    alarms = [rng.lognormal(size=50) > guard(rng.lognormal(size=n), rate) for _ in range(2000)]
    assert rate * 0.5 <= np.mean(alarms) <= rate * 1.1  # and it is not empty caution either


def test_too_few_failures_cannot_promise_a_rate():
    with pytest.raises(
        UserError, match=r"a false-alarm rate of 0.05 needs at least 19 held-out failures, got 18"
    ):
        guard(np.zeros(18), 0.05)
    assert guard(np.arange(19.0), 0.05) == 18


def test_an_episode_counts_by_the_best_run_of_states_that_agree():
    p = np.array([0.9, 0.1, 0.8, 0.7, 0.2, 0.95])
    names, scores = episode_scores(p, np.array([0, 0, 0, 0, 0, 3]), 2)
    assert names.tolist() == [0, 3] and scores.tolist() == [0.7, 0.0]
    assert episode_scores(p, np.array([0, 0, 0, 0, 0, 3]), 1)[1].tolist() == [0.9, 0.95]


def marks(episodes=120, seed=0):
    """A walk along a line; success above 1, which some reach. The last numbers are noise."""
    rng, state, won, names = np.random.default_rng(seed), [], [], []
    for e in range(episodes):
        x = np.cumsum(rng.normal(0.06 if e % 2 else -0.02, 0.05, 30))
        x = x[: max(2, int((x > 1).argmax()) + 1)] if (x > 1).any() else x
        state += [np.r_[v, rng.normal(size=3)] for v in x]
        won += (x > 1).tolist()
        names += [e] * len(x)
    return Marked(np.array(state, np.float32), np.array(won), np.array(names))


def test_the_classifier_finds_successes_within_its_guarded_rate_on_fresh_episodes():
    model, said = train(marks(), rate=0.05, hold=1)
    fresh = marks(400, seed=1)
    p = model.probability(fresh.state)
    won = np.unique(fresh.episode[fresh.success])
    names, scores = episode_scores(p[~fresh.success], fresh.episode[~fresh.success], 1)
    caught = np.mean([p[fresh.episode == e].max() > said["threshold"] for e in won])
    assert (scores > said["threshold"]).mean() <= 0.1 and caught >= 0.5 and said["failures"] >= 50, (
        scores.mean(),
        caught,
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"success": np.zeros(4, bool)}, "needs marks of both kinds, got 0 successes and 4 failures"),
        ({"state": np.full((4, 2), np.nan, np.float32)}, "not finite"),
        ({"state": np.zeros((4, 2), np.float32)}, "marked a success and a failure"),
        ({"episode": np.zeros(3, int)}, r"marks must be state \[M,S\]"),
    ],
)
def test_marks_that_make_no_sense_are_one_line(change, says):
    good = {
        "state": np.arange(8, dtype=np.float32).reshape(4, 2),
        "success": np.array([0, 0, 1, 1], bool),
        "episode": np.zeros(4, int),
    }
    with pytest.raises(UserError, match=says):
        fit(Marked(**good | change))


class Expert:
    """Acts as PointReach's expert, from the state alone, with a tremor; it gives up on goals to the left."""

    spec, options = ObsSpec(state=4, action=2), PolicyOptions(kind="squashed", horizon=2, execute=2)

    def act(self, obs, generator, explore):
        import torch

        from robo_rl.policies import Chunk

        way = obs["state"][:, 2:]
        a = (way * 3.5).clamp(-1, 1) * (way[:, :1] > -0.8)
        a = (a + 0.3 * torch.randn(a.shape, generator=generator))[:, None].expand(-1, 2, -1).clamp(-1, 1)
        return Chunk(a, a, a[:, :0, 0], {})


def test_marked_episodes_are_whole_in_order_and_marked_by_the_env():
    got = marked_episodes(PointReach(8, 10), Expert(), 30, 0)
    count = np.bincount(got.episode)
    assert len(count) >= 30 and 1 <= count.min() <= count.max() <= 10
    assert (np.diff(got.episode) != 0).sum() == len(count) - 1  # the states of an episode lie together
    for e in range(len(count)):
        mine = got.episode == e
        assert not got.success[mine][:-1].any()
        moved = np.abs(np.diff(got.state[mine][:, :2], axis=0))
        assert moved.max(initial=0) <= 0.2 + 1e-5  # steps of one episode follow each other
        assert got.success[mine][-1] == (np.linalg.norm(got.state[mine][-1, 2:]) < 0.1)


def test_a_classifier_pays_the_reward_and_what_it_misses_bootstraps():
    model, n = SuccessClassifier(4), 6
    env, expert = PointReach(n, 10), Expert()

    class Sees(Judge):
        """Sees the successes of even envs only."""

        def __call__(self, state, stopped):
            return stopped & (np.arange(n) % 2 == 0)

    online = Replay({"state": ((4,), np.float32)}, 2, 2, 0.9, 4000, n)
    collector = ReplayCollector(env, expert, online, None, 0, Sees(model, n))
    collector.run(expert, 120)
    rows = np.arange(min(online.total, online.capacity))
    rows = rows[~online.final[rows]]
    told = collector.take()
    assert online.terminated[rows].sum() == online.reward[rows].sum() > 5
    assert told["judge/missed"] > 0 and told["judge/false"] == 0
    ends = rows[
        (online.next[rows] >= 0)
        & online.final[online.next[rows] % online.capacity]
        & ~online.terminated[rows]
    ]
    b = online.gather(ends[:20])
    assert (b.discounts > 0).all() and (b.rewards == 0).all()


def test_a_judge_waits_for_as_many_states_as_it_holds_unless_the_env_has_stopped():
    class Says(SuccessClassifier):
        def probability(self, state):
            return state[:, 0]

    model = Says(1)
    model.hold.fill_(2)
    judge, no = Judge(model, 3), np.zeros(3, bool)
    assert judge(np.array([[0.9], [0.9], [0.1]]), no).tolist() == [False, False, False]
    assert judge(np.array([[0.9], [0.1], [0.9]]), no).tolist() == [True, False, False]
    judge.reset(np.array([True, False, False]))
    assert judge(np.array([[0.9], [0.9], [0.1]]), np.array([False, True, True])).tolist() == [
        False,
        True,
        False,
    ]
