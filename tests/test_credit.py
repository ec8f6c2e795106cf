import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robo_rl import losses
from robo_rl.advantages import gae, group_advantage, whiten
from robo_rl.normalise import Normaliser


def test_gae_is_its_own_sum():
    torch.manual_seed(0)
    t, n, lam = 9, 3, 0.9
    r, v, nv = torch.randn(t, n), torch.randn(t, n), torch.randn(t, n)
    done = torch.rand(t, n) < 0.3
    discounts = torch.full((t, n), 0.97)
    adv, returns = gae(r, discounts, done, v, nv, lam)
    delta = r + discounts * nv - v
    for env in range(n):
        for i in range(t):
            total, weight = 0.0, 1.0
            for j in range(i, t):
                total += weight * delta[j, env]
                if done[j, env]:
                    break
                weight *= 0.97 * lam
            assert torch.allclose(adv[i, env], torch.as_tensor(total), atol=1e-5)
    assert torch.equal(returns, adv + v)


def test_a_time_limit_bootstraps_from_the_state_it_cut_and_termination_does_not():
    r, v = torch.tensor([[0.0], [1.0], [0.0], [0.0], [5.0]]), torch.arange(5.0)[:, None]
    nv = torch.tensor([[1.0], [9.0], [3.0], [4.0], [7.0]])
    discounts = torch.tensor([[0.99], [0.99], [0.99], [0.99], [0.0]])
    done = torch.tensor([[False], [True], [False], [False], [True]])
    adv, _ = gae(r, discounts, done, v, nv, 0.95)
    assert torch.isclose(adv[1, 0], torch.tensor(1 + 0.99 * 9 - 1.0))
    assert torch.isclose(adv[4, 0], torch.tensor(5 - 4.0))


def test_lambda_one_without_critic_is_the_discounted_return():
    r = torch.randn(6, 2)
    zeros = torch.zeros(6, 2)
    adv, _ = gae(r, torch.full((6, 2), 0.9), torch.zeros(6, 2, dtype=torch.bool), zeros, zeros, 1.0)
    expected = sum(0.9**i * r[i] for i in range(6))
    assert torch.allclose(adv[0], expected, atol=1e-5)


def test_group_advantages_are_centred_and_flat_groups_are_exactly_zero():
    x = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    for kind in ("grpo", "dr_grpo", "rloo"):
        a = group_advantage(x, kind)
        assert torch.allclose(a.sum(1), torch.zeros(2), atol=1e-6) and not a[1].any()
        assert torch.allclose(group_advantage(x + 3, kind), a, atol=1e-5)
    assert torch.allclose(group_advantage(10 * x, "grpo"), group_advantage(x, "grpo"), atol=1e-4)
    others = torch.tensor([1 - 1 / 3, 0 - 2 / 3, 0 - 2 / 3, 1 - 1 / 3])
    assert torch.allclose(group_advantage(x, "rloo")[0], others)
    with pytest.raises(ValueError, match="grpo, dr_grpo, rloo"):
        group_advantage(x, "best")


def test_grpo_divides_by_the_unbiased_standard_deviation_of_the_group():
    # of two members it is |a - b| / sqrt 2, the biased one |a - b| / 2
    x = torch.tensor([[1.0, 0.0], [3.0, 1.0]])
    want = torch.tensor([[1.0, -1.0], [1.0, -1.0]]) / 2**0.5
    assert torch.allclose(group_advantage(x, "grpo"), want, atol=1e-5)
    y = torch.tensor([[0.0, 1.0, 2.0, 5.0]])  # mean 2, sum of squares 14, over 3
    assert torch.allclose(group_advantage(y, "grpo"), (y - 2) / (14 / 3) ** 0.5, atol=1e-5)
    assert float(group_advantage(y, "grpo", eps=1.0)[0, 3]) == pytest.approx(
        3 / ((14 / 3) ** 0.5 + 1), rel=1e-5
    )


def test_whitening_divides_by_the_unbiased_standard_deviation_and_leaves_a_lone_entry_at_zero():
    x = torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert torch.allclose(whiten(x), (x - 2) / (14 / 3) ** 0.5, atol=1e-6)
    assert whiten(x, torch.tensor([False, False, True, False]))[2] == 0


@given(st.permutations(range(6)))
def test_group_advantage_follows_a_permutation_of_its_members(order):
    x = torch.tensor([[0.1, 0.9, 0.3, 0.3, 0.0, 1.0]])
    assert torch.allclose(group_advantage(x)[:, order], group_advantage(x[:, order]), atol=1e-6)


def test_whitening_uses_the_masked_entries_alone():
    x, mask = torch.tensor([1.0, 2.0, 3.0, 100.0]), torch.tensor([True, True, True, False])
    assert torch.allclose(whiten(x, mask)[:3], torch.tensor([-1.0, 0.0, 1.0]), atol=1e-5)


def test_ppo_at_equal_log_probs_is_minus_the_mean_advantage_with_the_policy_gradient():
    logp = torch.randn(8, requires_grad=True)
    adv = torch.randn(8)
    loss, m = losses.ppo(logp, logp.detach(), adv, 0.2, 0.2)
    loss.backward()
    assert torch.isclose(loss.detach(), -adv.mean(), atol=1e-6) and torch.allclose(
        logp.grad, -adv / 8, atol=1e-6
    )
    assert float(m["kl"]) == 0 and float(m["clip_fraction"]) == 0


def test_ppo_stops_the_gradient_only_where_the_clip_binds():
    logp = torch.tensor([1.0, 1.0, -1.0, -1.0], requires_grad=True)
    losses.ppo(logp, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2, 0.2)[0].backward()
    assert logp.grad[0] == 0 and logp.grad[1] != 0 and logp.grad[2] != 0 and logp.grad[3] == 0


def test_dual_clip_bounds_what_a_bad_action_can_cost():
    logp = torch.tensor([5.0], requires_grad=True)
    loss, _ = losses.ppo(logp, torch.zeros(1), torch.tensor([-1.0]), 0.2, 0.2, dual_clip=3.0)
    assert float(loss.detach()) == 3.0
    loss.backward()
    assert logp.grad[0] == 0


@pytest.mark.parametrize(
    "value,kind",
    [
        (math.nan, "nonfinite"),
        (math.inf, "nonfinite"),
        (-math.inf, "nonfinite"),
        (20.5, "huge"),
        (-20.5, "huge"),
        (1e30, "huge"),
    ],
    ids=str,
)
def test_a_log_ratio_that_is_infinite_or_beyond_any_clip_is_seen_before_the_clamp_and_refuses_the_batch(
    value, kind
):
    other = {"nonfinite": "huge", "huge": "nonfinite"}[kind]
    for adv in (1.0, -1.0):
        loss, m = losses.ppo(torch.tensor([value, 0.0]), torch.zeros(2), torch.full((2,), adv), 0.2, 0.2, 3.0)
        assert loss.isnan() and m["refused"] == 1 and m[f"{kind}_ratio"] == 0.5 and m[f"{other}_ratio"] == 0
        assert all(torch.isfinite(x) for x in m.values())


def test_a_log_ratio_of_twenty_is_the_largest_that_is_learnt_from():
    loss, m = losses.ppo(torch.tensor([20.0, -20.0]), torch.zeros(2), torch.ones(2), 0.2, 0.2)
    assert m["refused"] == 0 and float(loss) == pytest.approx(-(1.2 + math.exp(-20)) / 2)


def test_per_factor_clips_apply_to_their_own_factor():
    logp = torch.full((1, 2), 0.05, requires_grad=True)
    clip = torch.tensor([0.01, 0.2])
    losses.ppo(logp, torch.zeros(1, 2), torch.ones(1, 2), clip, clip)[0].backward()
    assert logp.grad[0, 0] == 0 and logp.grad[0, 1] != 0


def test_dppos_clip_grows_from_base_to_its_end():
    clip = losses.denoise_clip(10, 0.001, 0.01)
    assert torch.isclose(clip[0], torch.tensor(0.001)) and torch.isclose(clip[-1], torch.tensor(0.01))
    assert (clip.diff() > 0).all()
    assert torch.allclose(losses.denoise_clip(5, 0.1, 0.1), torch.full((5,), 0.1))


def _nft_batch():
    torch.manual_seed(1)
    x0, eps, t = torch.randn(64, 4, 2), torch.randn(64, 4, 2), torch.rand(64) * 0.9 + 0.05
    x_t = (1 - t[:, None, None]) * x0 + t[:, None, None] * eps
    return x0, eps, t, x_t, torch.ones(64, 4)


def test_nft_with_optimality_one_and_beta_one_is_flow_matching():
    x0, eps, t, x_t, mask = _nft_batch()
    v = torch.randn_like(x0, requires_grad=True)
    losses.nft(v, torch.randn_like(x0), x_t, t, x0, torch.ones(64), mask, 1.0, normalise=False).backward()
    w = v.detach().clone().requires_grad_(True)
    ((w - (eps - x0)).square().mean((1, 2)) * t**2).mean().backward()
    assert torch.allclose(v.grad, w.grad, atol=1e-6)


def test_nft_with_optimality_one_half_has_no_gradient_at_the_old_policy():
    x0, _, t, x_t, mask = _nft_batch()
    v = torch.randn_like(x0, requires_grad=True)
    for normalise in (True, False):
        v.grad = None
        losses.nft(
            v, v.detach(), x_t, t, x0, torch.full((64,), 0.5), mask, 0.3, normalise=normalise
        ).backward()
        assert v.grad.abs().max() < 1e-7


def test_swapping_good_and_bad_flips_the_nft_update():
    x0, _, t, x_t, mask = _nft_batch()
    v, r = torch.randn_like(x0, requires_grad=True), torch.rand(64)
    grads = []
    for optimality in (r, 1 - r):
        v.grad = None
        losses.nft(v, v.detach(), x_t, t, x0, optimality, mask, 0.3).backward()
        grads.append(v.grad.clone())
    assert torch.allclose(grads[0], -grads[1], atol=1e-7)


def test_steps_that_did_not_run_do_not_enter_the_nft_loss():
    x0, _, t, x_t, mask = _nft_batch()
    mask[:, 2:] = 0
    v = torch.randn_like(x0, requires_grad=True)
    losses.nft(v, torch.randn_like(x0), x_t, t, x0, torch.rand(64), mask, 1.0).backward()
    assert v.grad[:, :2].any() and not v.grad[:, 2:].any()


def test_the_value_loss_is_half_the_squared_error_huber_beyond_its_width_and_the_worse_of_two_where_clipped():
    v, target = torch.tensor([1.0, -1.0]), torch.tensor([4.0, -1.5])  # errors -3 and 0.5
    assert float(losses.value(v, target)) == pytest.approx((0.5 * 9 + 0.5 * 0.25) / 2)
    assert float(losses.value(v, target, huber=2.0)) == pytest.approx((2 * (3 - 1) + 0.5 * 0.25) / 2)
    old = torch.tensor([0.0, -1.0])  # V may move 0.2 from it: 0.2 is further from 4 than 1 is
    assert float(losses.value(v, target, old, clip=0.2)) == pytest.approx((0.5 * 3.8**2 + 0.5 * 0.25) / 2)
    assert float(losses.value(v, target, torch.tensor([3.0, -1.0]), clip=0.2)) == pytest.approx(
        (0.5 * 9 + 0.125) / 2
    )


def test_nfts_negative_branch_has_its_own_weight_and_each_branch_is_divided_by_its_error():
    x0, _, t, x_t, mask = _nft_batch()
    v, old, bad = torch.randn_like(x0), torch.randn_like(x0), torch.zeros(64)
    whole, fifth = (losses.nft(v, old, x_t, t, x0, bad, mask, 1.0, negative_weight=w) for w in (1.0, 0.2))
    assert torch.allclose(fifth, 0.2 * whole)
    near = (x_t - x0) / t[:, None, None] + 1e-3 / t[:, None, None]  # an error of 1e-3 in x0 everywhere
    assert float(losses.nft(near, near, x_t, t, x0, torch.ones(64), mask, 1.0)) == pytest.approx(
        1e-3, rel=0.05
    )


def test_optimality_maps_advantages_onto_zero_to_one():
    r = losses.nft_optimality(torch.tensor([-9.0, -0.5, 0.0, 0.5, 9.0]), 1.0)
    assert r.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_running_statistics_are_those_of_all_data_seen():
    x, norm = torch.randn(1000, 3) * 2 + 5, Normaliser(3)
    for part in x.split(170):
        norm.update(part)
    assert torch.allclose(norm.mean, x.mean(0), atol=1e-4)
    assert torch.allclose(norm.std, x.std(0, unbiased=False), atol=1e-4)
    assert torch.allclose(norm.inverse(norm(x)), x, atol=1e-4)
