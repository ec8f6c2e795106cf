"""Training partly in a model: two rollouts are one, the share is exact, and without a share nothing
changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from feeds import same_rollouts
from test_world_models import SPEC, trained
from toys import PointReach

from robo_rl.cli.train import parse
from robo_rl.data.episode import Episode
from robo_rl.errors import UserError
from robo_rl.experiment import dream
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.folder import worlds_of
from robo_rl.options import PolicyOptions
from robo_rl.policies import make_policy
from robo_rl.rollout import Collector, new_columns, rollout_of
from world_models.model import WorldSpec
from world_models.tasks import Difficulty


def test_two_rollouts_side_by_side_are_the_rollout_of_all_their_lanes():
    policy = make_policy(PolicyOptions(horizon=4, execute=4, hidden=16, layers=1), SPEC, 0)
    parts = []
    for lane, n in ((0, 6), (1, 3)):
        collector = Collector(PointReach(n, 8), policy, 0.99, 0, lane)
        columns = new_columns(collector.layout(policy), 7)
        for t in range(7):
            collector.decide(policy, columns, t)
        parts.append((columns, 7))
    whole = rollout_of(parts)
    both = dream.joined(rollout_of(parts[:1]), rollout_of(parts[1:]))
    assert whole.done.sum() > 5
    same_rollouts(whole, both)


def test_episodes_pass_through_the_spool_whole_and_once(tmp_path):
    e = Episode(
        np.arange(8.0).reshape(4, 2),
        np.ones((4, 1)) / 2,
        task="do",
        success=True,
        reward=np.arange(4.0),
        terminated=True,
        final=np.array([7.0, 8.0]),
    )
    dream.spool(tmp_path, e)
    dream.spool(tmp_path, Episode(e.state + 1, e.action))
    (tmp_path / ".half.tmp").write_bytes(b"x")
    a, b = dream.spooled(tmp_path)
    for k in ("state", "action", "reward", "task", "success", "terminated", "final"):
        assert np.array_equal(getattr(a, k), getattr(e, k))
    assert (
        np.array_equal(b.state, e.state + 1)
        and not b.success
        and b.final is None
        and dream.spooled(tmp_path) == []
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--dream", "0.5", "--sim", "wm:x"], "all of it is in a model already"),
        (["--dream", "0.001"], "leaves 128"),
        (["--dream", "0.5", "--obs", "rgb"], "obs state"),
        (["--dream", "0.5", "--rl.advantage", "grpo"], "advantage gae"),
        (["--dream", "0.5", "--algo", "bc"], "on-policy methods"),
        (["--dream-model", "runs/wm"], "goes with --dream RATIO"),
        (["--dream-hard", "0.5"], "goes with --dream RATIO or --sim wm:PATH"),
    ],
)
def test_a_share_that_cannot_be_kept_is_refused(argv, words):
    with pytest.raises(UserError, match=words):
        dream.check(parse([*argv, "--workers", "0"]))


def test_the_worlds_of_a_run_are_that_of_its_sim_and_that_of_its_dreams():
    assert worlds_of(TrainConfig()) == []
    assert worlds_of(TrainConfig(sim="wm:runs/a")) == ["runs/a"]
    assert worlds_of(TrainConfig(dream=0.5, dream_model="runs/b")) == ["runs/b"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"views": ("front",)}, "predicts pictures"),
        ({"state_names": ("a", "b", "c")}, "its 3 state numbers are not the 2 here"),
        ({"axes": PointReach(1).spec.axes[:1]}, "its action axes are"),
        ({"period": 0.5}, "control period is 0.5 s"),
        ({}, "not calibrated"),
    ],
)
def test_a_dream_model_of_something_else_is_refused_with_what_differs(change, words):
    here = replace(PointReach(1).spec, state_names=("a", "b"))
    made = WorldSpec(kind="latent", control=replace(here, **change), state=2, horizon=9 if change else 0)
    with pytest.raises(UserError, match=f"{words}.*Give a model of states"):
        dream.check_model(TrainConfig(dream=0.5, dream_model="m"), made, here)
    dream.check_model(TrainConfig(dream=0.5, dream_model="m"), replace(made, control=here, horizon=9), here)


def test_a_feed_that_cannot_dream_leaves_no_workers_behind(tmp_path, monkeypatch):
    class Inner:
        closed = False

        def close(self):
            self.closed = True

    inner, env = Inner(), PointReach(4)
    monkeypatch.setattr(dream.feeds, "make_feed", lambda *args: (inner, True))
    config = TrainConfig(dream=0.5, envs=4, workers=0, dream_model=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="holds no world model"):
        dream.make_feed(config, tmp_path, env, None, None, print)
    assert inner.closed


def test_a_share_is_so_many_lanes():
    assert [dream.lanes(TrainConfig(dream=r, envs=256)) for r in (0, 0.25, 0.5)] == [0, 64, 128]


def test_a_ratio_of_nothing_is_the_base_run_exactly():
    """Without --dream no part of it is in the loop; with the oracle in all lanes the run is the
    simulator's."""
    a, b = trained(PointReach(6, 20)), trained(PointReach(6, 20))
    assert all(torch.equal(a[0][k], b[0][k]) for k in a[0])


def test_the_value_of_a_start_is_the_variance_of_its_outcomes():
    d = Difficulty(3, 1.0)
    assert d.value().tolist() == [0.25] * 3  # nothing is known
    d.update(np.array([0] * 4 + [1] * 4), np.array([True] * 4 + [True, False] * 2))
    p = (d.wins + 1) / (d.tries + 2)
    assert np.allclose(d.value(), p * (1 - p)) and d.value()[0] < d.value()[1] <= 0.25


def test_starts_are_drawn_in_proportion_to_their_value_and_a_share_of_0_changes_nothing():
    d, starts, pool = Difficulty(4, 1.0), np.arange(20_000), np.array([0, 1, 3])
    d.update(np.zeros(200, int), np.ones(200, bool))
    drawn = d.pick(np.full(len(starts), 2), starts, pool)
    want = d.value()[pool] / d.value()[pool].sum()
    assert (
        np.allclose(np.bincount(drawn, minlength=4)[pool] / len(starts), want, atol=0.01) and 2 not in drawn
    )
    d.share = 0.0
    assert (d.pick(starts % 4, starts, pool) == starts % 4).all()
    d.share = 0.25
    assert abs((d.pick(np.full(len(starts), 2), starts, pool) == 2).mean() - 0.75) < 0.01


def test_frames_that_come_later_are_added_behind_those_that_are_known():
    d = Difficulty(2, 0.5)
    d.update(np.array([1]), np.array([True]))
    d.grow(4)
    assert d.wins.tolist() == [0, 1, 0, 0] and len(d.tries) == 4
