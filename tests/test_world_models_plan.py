"""Planning in a model: what is chosen, when the policy's own chunk stays, and that it pays in the real
world."""

from dataclasses import replace

import numpy as np
import pytest
from test_world_models_eval import PointModel
from toys import PointReach

import robo_rl
from robo_rl.errors import UserError
from world_models.plan import Planner, PlanOptions


def wander(seed):
    """A policy that walks straight for four steps, whatever the goal: a new direction at every call, or the
    same one with seed None."""
    rng = np.random.default_rng(seed)

    def act(obs):
        n = len(obs["state"])
        angle = np.full(n, 0.3) if seed is None else rng.uniform(0, 2 * np.pi, n)
        return np.repeat(np.stack([np.cos(angle), np.sin(angle)], 1)[:, None], 4, 1).astype(np.float32)

    return act


def plans(model=None, **options):
    return Planner(
        model or PointModel(generous=0.1),
        wander(1),
        wander(None),
        PlanOptions(**{"candidates": 64, "ahead": 0} | options),
    )


def near():
    """Two starts: a goal four steps away upwards, and one out of reach of a chunk."""
    return {"state": np.array([[0, 0, 0, 0.75], [0, 0, 5, 5]], np.float32)}


def test_the_best_of_the_proposals_is_executed_and_the_policys_own_where_none_is_better():
    planner = plans()
    chunk = planner(near())
    assert (
        chunk.shape == (2, 4, 2) and chunk[0, 0, 1] > 0.95 and np.allclose(chunk[1], wander(None)(near())[1])
    )
    assert (planner.changed, planner.planned) == (1, 2)


def test_the_cross_entropy_method_improves_on_few_proposals():
    got = {}
    for rounds in (0, 5):
        planner = plans(Distance(), candidates=12, rounds=rounds, kept=4)
        state = near()["state"][:1]
        end = state[0, :2] + 0.2 * planner({"state": state})[0].sum(0)
        got[rounds] = np.linalg.norm(end - [0, 0.75])
    assert got[5] < 0.5 * got[0] and got[5] < 0.15


class Distance(PointModel):
    """Success is the likelier the nearer the goal."""

    def step(self, carry, actions):
        carry, p = super().step(carry, actions)
        return carry, replace(p, success=(-3 * p.obs["state"][..., 2:].norm(dim=-1)).exp())


def test_success_beyond_the_models_threshold_counts_for_nothing():
    model = PointModel(generous=0.1)
    model.spec = replace(model.spec, threshold=1e-9)
    planner = plans(model)
    planner(near())
    assert planner.changed == 0


def test_what_the_policy_does_after_the_chunk_is_looked_at():
    """The goal is two chunks away on the policy's own way after one chunk upwards."""
    way = wander(None)({"state": np.zeros((1, 4))})[0].sum(0) * 0.2
    state = np.array([[0, 0, way[0], way[1] + 0.8]], np.float32)
    blind, seeing = plans(), plans(ahead=4)
    blind({"state": state}), seeing({"state": state})
    assert (blind.changed, seeing.changed) == (0, 1)


def test_the_policy_is_looked_at_to_the_length_of_an_episode_of_the_recordings_unless_said():
    model = Counting(generous=0.1)
    plans(model, ahead=None)(near())
    steps = model.spec.control.max_steps
    assert model.steps == -(-steps // 4) * 4 and steps > 8
    model.steps = 0
    plans(model, ahead=3)(near())
    assert model.steps == 8


class Counting(PointModel):
    """Knows how many control steps were asked of it, and of how many lanes each time."""

    steps, lanes = 0, ()

    def step(self, carry, actions):
        self.steps += actions.shape[1]
        self.lanes += (len(actions),)
        return super().step(carry, actions)


def test_an_env_with_a_sure_success_and_a_lane_in_doubt_are_looked_at_no_further():
    """Of 64 candidates of two envs some reach the first's goal in their first chunk: then the other's alone
    go on. Where all doubt, none does."""
    model = Counting(generous=0.1)
    plans(model, ahead=8)(near())
    assert model.lanes == (128, 64, 64)
    model = Counting(generous=0.1)
    model.spec = replace(model.spec, threshold=1e-9)
    plans(model, ahead=8)(near())
    assert model.lanes == (128,)


def test_lanes_that_go_on_alone_score_as_they_do_beside_all_others():
    """What is left out of a batch changes nothing of the rest: the same scores as with a margin of 0, where
    only a probability of exactly one ends the look ahead."""
    state = np.random.default_rng(0).uniform(-1, 1, (6, 4)).astype(np.float32) * [1, 1, 0.4, 0.4]
    state = {"state": state.astype(np.float32)}
    chunks = np.random.default_rng(1).uniform(-1, 1, (6, 32, 4, 2)).astype(np.float32)
    whole, early = (plans(Distance(), ahead=12, margin=m).score(state, chunks) for m in (0.0, 0.4))
    ended = early.max(1) >= 0.6
    assert 0 < ended.sum() < 6
    assert np.array_equal(whole[~ended], early[~ended])
    assert (early.max(1)[ended] >= whole.max(1)[ended] - 0.4).all()


def test_planning_in_an_exact_model_reaches_what_the_policy_alone_does_not():
    env = PointReach(60)
    alone = robo_rl.evaluate(wander(2), env, episodes=60)
    planned = robo_rl.evaluate(plans(ahead=4), env, episodes=60)
    value, low, _ = planned.minus(alone)
    assert value > 0.3 and low > 0.15


def test_options_out_of_range_are_named():
    with pytest.raises(UserError, match=r"plan.kept must be in \[2, 4\], got 5"):
        PlanOptions(candidates=4, kept=5)
