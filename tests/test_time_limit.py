"""What a time limit and the discount are to a learner: `--rl.timeout`, `--rl.anneal-gamma`, and what the
recipes ask for."""

from dataclasses import replace

import pytest
import torch
from test_algos import setup

from robo_rl.algos.onpolicy import discounted
from robo_rl.algos.trust import near_success
from robo_rl.errors import UserError
from robo_rl.experiment import recipes
from robo_rl.options import OnPolicyOptions, PpoOptions

FAILURE = OnPolicyOptions(timeout="failure")


def a_rollout():
    """A rollout of the toy in which some episodes were cut by their time limit and none was solved."""
    _, learner, collector, _ = setup("ppo")
    r = collector.collect(learner.policy, 24)
    assert (r.done & (r.discounts > 0)).any()
    return learner, r


def test_nothing_is_paid_after_a_time_limit_that_is_a_failure_and_a_value_after_one_that_is_a_cut():
    _, r = a_rollout()
    assert torch.equal(discounted(r, OnPolicyOptions()).discounts, r.discounts)
    failed = discounted(r, FAILURE).discounts
    assert (failed[r.done] == 0).all() and torch.equal(failed[~r.done], r.discounts[~r.done])


def test_where_a_person_took_over_is_no_time_limit():
    _, r = a_rollout()
    at = r.done.nonzero()[0]
    cut = torch.zeros_like(r.done)
    cut[at[0], at[1]] = True
    left = discounted(replace(r, cut=cut), FAILURE).discounts
    assert left[at[0], at[1]] == r.discounts[at[0], at[1]] and (left[r.done & ~cut] == 0).all()


@pytest.mark.parametrize("success", [0.3, 0.8, 0.99])
def test_the_discount_goes_to_one_as_success_does(success):
    _, r = a_rollout()
    r = replace(r, stats=r.stats | {"episodes": 198.0, "success": success})
    power = near_success(198 * success, 198)
    assert torch.equal(discounted(r, OnPolicyOptions(anneal_gamma=True)).discounts, r.discounts**power)
    assert power == 1 if success <= 0.5 else power < 1
    after = discounted(r, OnPolicyOptions(timeout="anneal")).discounts
    assert torch.equal(after[r.done], r.discounts[r.done] * power) and torch.equal(
        after[~r.done], r.discounts[~r.done]
    )


def test_an_update_learns_from_what_the_time_limit_is_said_to_be():
    told = {}
    for timeout in ("bootstrap", "failure"):
        learner, r = a_rollout()
        learner.options = replace(learner.options, timeout=timeout)
        with torch.no_grad():
            learner.credit.params[-1].fill_(5.0)  # a critic that promises much
        returns = learner.credit.assign(discounted(r, learner.options), learner.policy)[1].view(r.done.shape)
        late = r.done & (r.discounts > 0)
        told[timeout] = returns[late]
    assert (
        torch.allclose(told["failure"], r.rewards[late], atol=1e-5)
        and (told["bootstrap"] > told["failure"] + 1).all()
    )


def test_a_run_on_success_takes_its_limit_for_a_failure_the_more_the_better_it_is():
    for algo in ("pi_rl", "ppo", "reinflow", "dppo", "nft"):
        sparse, dense = (
            recipes.recipe("mujoco", "pick_cube", algo, "state", "full", reward).rl
            for reward in ("", "dense")
        )
        assert isinstance(sparse, OnPolicyOptions) and isinstance(dense, OnPolicyOptions)
        assert (sparse.timeout, sparse.anneal_gamma) == ("anneal", True)
        assert (dense.timeout, dense.anneal_gamma) == ("bootstrap", False)
    assert recipes.recipe("gym:HalfCheetah-v5", "", "ppo", "state", "full").rl == replace(
        recipes.recipe("gym:HalfCheetah-v5", "", "ppo", "state", "full").rl,
        timeout="bootstrap",
        anneal_gamma=False,
    )


def test_a_time_limit_is_nothing_else():
    with pytest.raises(UserError, match="failure, "):
        PpoOptions(timeout="end")  # pyright: ignore[reportArgumentType]
