"""Advantages of groups of different sizes: each group's is its own, and the estimate has no bias."""

import itertools

import numpy as np
import pytest
import torch

from robo_rl.advantages import group_advantage, pool_advantage, ragged_advantage


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_groups_of_one_size_have_the_advantage_that_they_always_had_in_any_order(kind):
    outcome = (torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) < 0.4).float()
    outcome[2] = 1
    group = torch.arange(6).repeat_interleave(5)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    got = ragged_advantage(outcome.flatten()[order], group[order], kind)
    assert (
        torch.allclose(got, group_advantage(outcome, kind).flatten()[order], atol=1e-6)
        and (got[group[order] == 2] == 0).all()
    )


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_each_of_groups_of_different_sizes_has_the_advantage_that_it_has_alone(kind):
    sizes = [2, 7, 1, 3, 5]
    outcome = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(2))
    got = ragged_advantage(
        outcome, torch.repeat_interleave(torch.tensor([9, 2, 4, 1, 7]), torch.tensor(sizes)), kind
    )
    for mine, whole in zip(got.split(sizes), outcome.split(sizes), strict=True):
        assert torch.allclose(
            mine, group_advantage(whole[None], kind)[0] if len(whole) > 1 else torch.zeros(1), atol=1e-6
        )
    with pytest.raises(ValueError, match="mc_grpo"):
        ragged_advantage(outcome, torch.zeros(sum(sizes), dtype=torch.int64), "mc_grpo")


def test_the_gradient_of_groups_of_different_sizes_is_the_exact_one_by_enumeration():
    """Two starts, an action of two each, success with a probability of (start, action): E over all outcomes
    of rloo's estimate."""
    theta, win, sizes = (
        torch.tensor([0.3, -0.4], dtype=torch.float64),
        torch.tensor([[0.2, 0.7], [0.9, 0.5]]).double(),
        (2, 4),
    )
    p = torch.sigmoid(theta)
    exact = p * (1 - p) * (win[:, 1] - win[:, 0])
    group, total = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes)), torch.zeros(2).double()
    for action in itertools.product((0, 1), repeat=6):
        a = torch.tensor(action)
        acted = torch.where(a == 1, p[group], 1 - p[group]).prod()
        for outcome in itertools.product((0.0, 1.0), repeat=6):
            r = torch.tensor(outcome).double()
            chance = torch.where(r == 1, win[group, a], 1 - win[group, a]).prod()
            score = (a - p[group]) * ragged_advantage(r, group, "rloo")
            total += acted * chance * torch.zeros(2).double().index_add(0, group, score) / torch.tensor(sizes)
    assert torch.allclose(total, exact, atol=1e-12)


def test_reinforce_ada_picks_half_and_half_of_every_pool_and_takes_its_mean_as_baseline():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 33, 40)
    group = rng.permutation(np.repeat(np.arange(40) * 3, sizes))
    outcome = (rng.random(len(group)) < 0.3).astype(float)
    adv, picked = (x.numpy() for x in pool_advantage(torch.from_numpy(outcome), torch.from_numpy(group), 4))
    for g in range(40):
        mine = outcome[group == 3 * g]
        good, one = mine.sum(), picked & (group == 3 * g)
        assert one.sum() == min(4, len(mine))
        assert outcome[one].sum() == min(good, max(2, 4 - (len(mine) - good)))  # half and half if there are
        assert np.allclose(adv[one], outcome[one] - mine.mean())  # of the whole pool
    first = [np.flatnonzero(picked[group == 3 * g])[0] for g in range(40) if sizes[g] > 8]
    assert len(set(first)) > 3  # not always the first
