"""Off-policy correction: each function against its definition, in its special cases and at its edges."""

import math

import numpy as np
import pytest
import torch

from robo_rl import corrections, losses
from robo_rl.advantages import gae
from robo_rl.corrections import WeightAverage, min_prefix, per_episode, vtrace


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- ratios and weights ------------------------------------------------------------------------------------


def test_a_log_ratio_is_clamped_and_what_is_not_finite_counts_as_no_change():
    new = torch.tensor([1.0, math.nan, math.inf, -math.inf, 500.0, -500.0], dtype=torch.float64)
    got, bad = corrections.log_ratio(new, torch.zeros(6))
    assert got.tolist() == [1.0, 0.0, 0.0, 0.0, 20.0, -20.0] and got.dtype == torch.float32
    assert bad.tolist() == [False, True, True, True, False, False]


def test_the_two_ratios_multiply_to_the_total_one():
    behave, prox, theta = torch.randn(3, 64)
    d, u, total = (
        corrections.log_ratio(a, b)[0] for a, b in ((theta, prox), (prox, behave), (theta, behave))
    )
    assert torch.allclose(d.exp() * corrections.ratio(u), total.exp(), rtol=1e-5)


def test_weights_are_dropped_outside_the_band_or_truncated_at_its_edge():
    log_rho = torch.tensor([0.1, 1.0, 2.0, 4.0]).log().requires_grad_()
    assert torch.allclose(corrections.reject(log_rho, 2.0), torch.tensor([0.1, 1.0, 2.0, 0.0]))
    assert torch.allclose(corrections.reject(log_rho, 2.5, 0.5), torch.tensor([0.0, 1.0, 2.0, 0.0]))
    assert torch.allclose(corrections.truncate(log_rho, 2.0), torch.tensor([0.1, 1.0, 2.0, 2.0]))
    assert torch.allclose(corrections.truncate(log_rho, math.inf), log_rho.exp())  # plain importance sampling
    assert (
        not corrections.truncate(log_rho, 2.0).requires_grad
        and not corrections.reject(log_rho, 2.0).requires_grad
    )


def test_equal_log_probs_weigh_one_and_give_ppo_bit_for_bit():
    logp, adv = torch.randn(64), torch.randn(64)
    old = logp + 0.3 * torch.randn(64)
    u, _ = corrections.log_ratio(old, old)
    plain = losses.ppo(logp, old, adv, 0.2, 0.2, 3.0)[0]
    for weight in (corrections.reject(u, 2.0), corrections.truncate(u, 2.0)):
        assert (weight == 1).all()
        assert torch.equal(losses.ppo(logp, old, adv, 0.2, 0.2, 3.0, weight)[0], plain)


def test_equal_policies_give_the_gradient_of_reinforce():
    logp, adv = torch.randn(16, requires_grad=True), torch.randn(16)
    u, _ = corrections.log_ratio(logp.detach(), logp.detach())
    losses.ppo(logp, logp.detach(), adv, 0.2, 0.2, 0.0, corrections.reject(u, 2.0))[0].backward()
    assert torch.allclose(logp.grad, -adv / 16, atol=1e-7)


def test_a_dropped_sample_adds_nothing_and_stays_in_the_denominator():
    logp, adv = torch.randn(4, requires_grad=True), torch.tensor([1.0, 2.0, 3.0, 4.0])
    weight = torch.tensor([1.0, 0.0, 1.0, 0.5])
    loss, m = losses.ppo(logp, logp.detach(), adv, 0.2, 0.2, 0.0, weight)
    loss.backward()
    assert torch.allclose(logp.grad, -weight * adv / 4) and float(loss.detach()) == -1.5
    assert float(m["active"]) == 0.75


def test_ratios_that_are_not_finite_never_reach_the_loss():
    theta = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    prox, behave = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([math.inf, -math.inf, -200.0])
    u, bad = corrections.log_ratio(prox, behave)
    for weight in (corrections.reject(u, 2.0), corrections.truncate(u, 2.0)):
        loss, _ = losses.ppo(theta, prox, torch.ones(3), 0.2, 0.2, 0.0, weight)
        assert torch.isfinite(loss) and torch.isfinite(weight).all()
    assert bad.tolist() == [True, True, False]
    anchor = torch.tensor([0.0, math.nan, 0.0])  # an anchor that is no number is the learner's own fault
    assert losses.ppo(theta, anchor, torch.ones(3), 0.2, 0.2)[0].isnan()


# ---- episodes ----------------------------------------------------------------------------------------------


def episodes(done):
    """[(first, one past the last decision)] of one env, the unfinished last one included."""
    out, start = [], 0
    for t, d in enumerate(done.tolist()):
        if d or t == len(done) - 1:
            out.append((start, t + 1))
            start = t + 1
    return out


def test_an_episodes_sum_and_mean_are_those_of_its_own_live_chunks():
    t, n = 11, 5
    x, done, mask = torch.randn(t, n), torch.rand(t, n) < 0.3, torch.rand(t, n) < 0.8
    total, mean = (per_episode(x, done, mask, k) for k in ("sum", "mean"))
    for env in range(n):
        for a, b in episodes(done[:, env]):
            own = x[a:b, env][mask[a:b, env]]
            assert torch.allclose(total[a:b, env], own.sum(), atol=1e-5)
            assert torch.allclose(mean[a:b, env], own.sum() / max(1, len(own)), atol=1e-5)
    length = per_episode(torch.ones(t, n), done, mask, "sum").clamp(min=1)
    assert torch.allclose(mean.exp(), total.exp() ** (1 / length), rtol=1e-4)  # the geometric mean


def test_a_sequence_of_one_chunk_has_its_ratio_and_padding_changes_nothing():
    x = torch.randn(1, 6)
    one = torch.ones(1, 6, dtype=torch.bool)
    assert torch.equal(per_episode(x, one, one, "mean"), x)
    body, done, mask = (
        torch.randn(4, 6),
        torch.zeros(4, 6, dtype=torch.bool),
        torch.ones(4, 6, dtype=torch.bool),
    )
    padded = [
        torch.cat([a, b]) for a, b in ((body, 9 * torch.ones(3, 6)), (done, done[:3]), (mask, ~mask[:3]))
    ]
    assert torch.allclose(per_episode(*padded, "mean")[:4], per_episode(body, done, mask, "mean"))


def test_the_sequence_weight_gives_gspos_gradient_at_the_first_step():
    logp = torch.randn(5, 2, requires_grad=True)
    behave, adv = logp.detach() + 0.2 * torch.randn(5, 2), torch.tensor([1.0, -2.0])
    done = torch.zeros(5, 2, dtype=torch.bool)
    s = per_episode(logp - behave, done, ~done, "mean").exp()
    (gspo,) = torch.autograd.grad(-(s * adv).mean(), logp, retain_graph=True)
    weight = corrections.truncate(per_episode((logp - behave).detach(), done, ~done, "mean"), math.inf)
    (ours,) = torch.autograd.grad(
        losses.ppo(logp, logp.detach(), adv.expand(5, 2), 0.2, 0.2, 0.0, weight)[0], logp
    )
    assert torch.allclose(ours, gspo, atol=1e-6)


def test_minpro_is_the_ratio_times_the_least_one_before_it_in_the_episode():
    t, n = 12, 6
    x, done = torch.randn(t, n), torch.rand(t, n) < 0.25
    w = min_prefix(x, done)
    for env in range(n):
        for a, b in episodes(done[:, env]):
            for i in range(a, b):
                least = x[a:i, env].min() if i > a else torch.tensor(0.0)
                assert torch.isclose(w[i, env], x[i, env] + least)
                assert all(w[i, env] <= x[i, env] + x[j, env] for j in range(a, i))


def test_minpro_starts_at_the_ratio_is_one_on_policy_and_is_monotone_in_the_past():
    x, done = torch.randn(8, 4), torch.zeros(8, 4, dtype=torch.bool)
    w = min_prefix(x, done)
    assert torch.equal(w[0], x[0])
    assert not min_prefix(torch.zeros(8, 4), done).any()
    for t in range(7):
        lower = x.clone()
        lower[t] -= 2.0
        assert (min_prefix(lower, done)[t + 1 :] <= w[t + 1 :]).all()


def test_minpro_gives_its_cards_gradient_at_the_first_step():
    logp = torch.randn(5, 3, requires_grad=True)
    behave, adv, done = (
        logp.detach() + 0.4 * torch.randn(5, 3),
        torch.randn(5, 3),
        torch.zeros(5, 3, dtype=torch.bool),
    )
    weight = corrections.truncate(min_prefix(logp.detach() - behave, done), 2.0)
    (card,) = torch.autograd.grad(-(weight * adv * logp).mean(), logp, retain_graph=True)
    (ours,) = torch.autograd.grad(losses.ppo(logp, logp.detach(), adv, 0.2, 0.2, 0.0, weight)[0], logp)
    assert torch.allclose(ours, card, atol=1e-7) and (weight < 2).any() and (weight == 2).any()


@pytest.mark.parametrize("tau", [0.01, 0.04, 0.1])
def test_m2po_keeps_the_most_elements_whose_mean_square_is_below_tau(tau):
    x = 0.5 * torch.randn(7, 9)
    kept = corrections.m2_mask(x, tau)
    inside, outside = x[kept].square(), x[~kept].square()
    assert kept.any() and (~kept).any() and inside.mean() < tau and inside.max() <= outside.min()
    assert torch.cat([inside, outside.min()[None]]).mean() >= tau
    assert corrections.m2_mask(torch.zeros(5), tau).all()


# ---- anchors -----------------------------------------------------------------------------------------------


def test_interpolation_runs_from_behave_at_age_one_towards_theta():
    alpha = corrections.age_weight(torch.tensor([7, 6, 4, -1, 9]), 7)
    # ages 1, 2, 4 of weights being made: 8
    assert torch.allclose(alpha, torch.tensor([0.0, 1 / 2, 3 / 4, 0.0, 0.0]))
    behave, theta = torch.randn(5), torch.randn(5, requires_grad=True)
    prox = corrections.interpolate(behave, theta, alpha)
    assert torch.equal(prox[0], behave[0]) and not prox.requires_grad
    assert torch.isclose(prox[2], 0.25 * behave[2] + 0.75 * theta[2].detach())
    assert torch.allclose(corrections.interpolate(behave, theta, torch.ones(5)), theta.detach())


def test_the_weight_average_is_the_explicit_weighted_mean():
    xs, betas, average = torch.randn(9, 4), [0.8, 0.5, 0.9, 0.0, 0.7, 0.8, 0.8, 1.0, 0.6], WeightAverage()
    weights = torch.zeros(0)
    for i, (x, beta) in enumerate(zip(xs, betas, strict=False)):
        average.update({"w": x}, beta)
        weights = torch.cat([weights * beta, torch.ones(1)])
        assert math.isclose(average.total, float(weights.sum()), rel_tol=1e-6)
        expected = (weights[:, None] * xs[: i + 1]).sum(0) / weights.sum()
        assert torch.allclose(average.mean["w"], expected, atol=1e-6)
        if beta == 0:
            assert torch.equal(average.mean["w"], x)


def test_the_weight_average_starts_at_the_weights_and_anew_after_a_reset():
    average = WeightAverage()
    x = torch.randn(3)
    average.update({"w": x}, 0.8)
    first = x.clone()
    x += 1  # it keeps its own copy
    assert torch.equal(average.mean["w"], first)
    average.update({"w": x}, 0.8)
    again = WeightAverage()
    again.load_state_dict(average.state_dict())
    for a in (average, again):
        a.update({"w": x}, 0.8)
    assert torch.equal(average.mean["w"], again.mean["w"]) and not torch.equal(average.mean["w"], x)
    average.reset()
    average.update({"w": x}, 0.8)
    assert torch.equal(average.mean["w"], x)
    assert corrections.ewma_decay(0) == 0 and corrections.ewma_decay(8) == 0.8


# ---- V-trace -----------------------------------------------------------------------------------------------


def transitions(t=9, n=8, seed=0):
    """rewards, discounts, done, values, next_values with all mixes of going on, terminated, truncated."""
    g = torch.Generator().manual_seed(seed)
    r, v, nv = torch.randn(3, t, n, generator=g)
    done = torch.rand(t, n, generator=g) < 0.3
    terminated = done & (torch.rand(t, n, generator=g) < 0.5)
    discounts = torch.where(terminated, 0.0, 0.9 ** torch.randint(1, 5, (t, n), generator=g).float())
    assert terminated.any() and (done & ~terminated).any()
    return r, discounts, done, v, nv


@pytest.mark.parametrize("lam", [0.0, 0.7, 0.95, 1.0])
def test_vtrace_with_ratios_of_one_is_gae_bit_for_bit(lam):
    for seed in range(5):
        args = transitions(seed=seed)
        adv, returns, weight = vtrace(*args, lam, torch.zeros(9, 8))
        expected = gae(*args, lam)
        assert torch.equal(adv, expected[0]) and torch.equal(returns, expected[1]) and (weight == 1).all()


@pytest.mark.parametrize("lam,rho_bar,c_bar", [(1.0, 1.0, 1.0), (0.9, 1.0, 1.0), (0.9, 2.0, 0.5)])
def test_vtrace_is_its_own_sum(lam, rho_bar, c_bar):
    r, gamma, done, v, nv = transitions()
    log_rho = torch.randn(9, 8)
    adv, returns, weight = vtrace(r, gamma, done, v, nv, lam, log_rho, rho_bar, c_bar)
    rho = log_rho.exp()
    for env in range(8):
        for a, b in episodes(done[:, env]):
            for s in range(a, b):
                total, trace = 0.0, 1.0
                for t in range(s, b):
                    total += trace * min(rho_bar, rho[t, env]) * (r + gamma * nv - v)[t, env]
                    trace *= gamma[t, env] * lam * min(c_bar, rho[t, env])
                assert torch.isclose(returns[s, env], v[s, env] + total, atol=1e-4)
                ahead = nv[s, env]  # lambda vs' + (1 - lambda) V'
                if s + 1 < b:  # vs' - V' of the same state
                    ahead = ahead + lam * (returns - v)[s + 1, env]
                target = r[s, env] + gamma[s, env] * ahead
                assert torch.isclose(
                    weight[s, env] * adv[s, env], min(rho_bar, rho[s, env]) * (target - v[s, env]), atol=1e-4
                )


def test_vtrace_of_ratios_near_zero_returns_the_values():
    r, gamma, done, v, nv = transitions()
    _, returns, weight = vtrace(r, gamma, done, v, nv, 1.0, torch.full((9, 8), -20.0))
    assert torch.allclose(returns, v, atol=1e-6) and weight.max() < 1e-8


def test_vtrace_on_policy_with_lambda_one_is_the_n_step_return():
    r, v = torch.randn(6, 2), torch.randn(7, 2)
    _, returns, _ = vtrace(
        r, torch.full((6, 2), 0.9), torch.zeros(6, 2, dtype=torch.bool), v[:-1], v[1:], 1.0, torch.zeros(6, 2)
    )
    expected = sum(0.9**i * r[i] for i in range(6)) + 0.9**6 * v[6]
    assert torch.allclose(returns[0], expected, atol=1e-5)


def test_vtrace_bootstraps_at_a_time_limit_and_not_at_the_end_and_nothing_leaks_over_either():
    r, v = torch.tensor([[0.0], [1.0], [0.0], [0.0], [5.0]]), torch.arange(5.0)[:, None]
    nv = torch.tensor([[1.0], [9.0], [3.0], [4.0], [7.0]])
    discounts = torch.tensor([[0.99], [0.99], [0.99], [0.99], [0.0]])
    done = torch.tensor([[False], [True], [False], [False], [True]])
    rho = torch.full((5, 1), math.log(0.5))
    adv, returns, _ = vtrace(r, discounts, done, v, nv, 0.95, rho)
    assert torch.isclose(adv[1, 0], torch.tensor(1 + 0.99 * 9 - 1.0)) and torch.isclose(
        adv[4, 0], torch.tensor(1.0)
    )
    moved = vtrace(r + torch.tensor([[0.0], [0.0], [9.0], [9.0], [9.0]]), discounts, done, v, nv, 0.95, rho)
    assert torch.equal(moved[0][:2], adv[:2]) and torch.equal(moved[1][:2], returns[:2])


# ---- effective sample size, baseline, diagnostics ----------------------------------------------------------


def test_the_effective_sample_size_lies_between_one_and_n_and_has_no_scale():
    for x in torch.randn(20, 50) * torch.logspace(-2, 2, 20)[:, None]:
        size = corrections.ess(x)
        assert 1 - 1e-9 <= size <= 50 + 1e-9 and torch.isclose(corrections.ess(x + 700), size, rtol=1e-4)
    x = torch.randn(50).double()
    assert torch.isclose(corrections.ess(x), x.exp().sum() ** 2 / x.exp().square().sum())
    assert float(corrections.ess(torch.full((50,), 3.0))) == pytest.approx(50)
    assert float(corrections.ess(torch.tensor([0.0, 0.0, 100.0]))) == pytest.approx(1)
    assert torch.isfinite(corrections.ess(torch.tensor([1e3, -1e3, 999.0])))


def test_the_learning_rate_falls_with_the_root_of_the_effective_share():
    assert corrections.lr_scale(1.0) == 1.0 and corrections.lr_scale(0.25) == 0.5
    assert corrections.lr_scale(0.9, base=0.8) == 1.0 and corrections.lr_scale(0.2, base=0.8) == 0.5


def test_the_off_policy_baseline_has_the_least_second_moment_of_all():
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        log_w, reward, h = (
            torch.randn(16, generator=g),
            torch.rand(16, generator=g),
            torch.rand(16, generator=g) + 0.1,
        )
        best = corrections.opob(log_w, reward, h)
        grid = torch.linspace(-2, 3, 501)
        moment = ((2 * log_w).exp() * h * (reward - torch.cat([grid, best[None]])[:, None]).square()).sum(1)
        assert moment[-1] <= moment[:-1].min() + 1e-6
    assert torch.isclose(
        corrections.opob(torch.zeros(4), torch.arange(4.0), torch.ones(4)), torch.tensor(1.5)
    )
    assert torch.isfinite(corrections.opob(torch.tensor([1e3, -1e3]), torch.ones(2), torch.ones(2)))


def test_two_gradient_buffers_give_the_gradient_with_the_baseline():
    theta, x, reward = torch.randn(3, requires_grad=True), torch.randn(8, 3), torch.rand(8)
    w = (0.3 * torch.randn(8)).exp()
    grads = torch.stack(
        [torch.autograd.grad(torch.tanh(theta @ row), theta, retain_graph=True)[0] for row in x]
    )
    base = corrections.opob(w.log(), reward, grads.square().sum(1))
    (direct,) = torch.autograd.grad((w * (reward - base) * torch.tanh(x @ theta)).sum(), theta)
    both = ((w * reward)[:, None] * grads).sum(0) - base * (w[:, None] * grads).sum(0)
    assert torch.allclose(direct, both, atol=1e-5)


def test_k3_is_never_negative_and_estimates_the_divergence_without_bias():
    assert (corrections.k3(torch.randn(1000) * 5) >= 0).all() and corrections.k3(torch.zeros(3)).eq(0).all()
    x = torch.randn(400_000)  # behave N(0, 1), prox N(0.3, 1): KL = 0.045
    assert float(corrections.k3(0.3 * x - 0.045).mean()) == pytest.approx(0.045, abs=1e-3)


def test_diagnostics_tell_the_moments_of_the_log_ratios_and_of_the_weights():
    log_rho, log_w = torch.tensor([0.0, 1.0, -2.0, 0.5]), torch.tensor([0.0, 1.0, -2.0, 0.0])
    d = {k: float(v) for k, v in corrections.diagnostics(log_rho, log_w, 2.0).items()}
    rho = np.exp(log_rho.numpy())
    assert d["is_logratio_mean"] == -0.125 and d["is_logratio_absmax"] == 2.0 and d["is_rejected"] == 0.25
    assert d["is_k3"] == pytest.approx((rho - 1 - log_rho.numpy()).mean(), rel=1e-5)
    assert d["is_chi2"] == pytest.approx((rho**2).mean() - 1, rel=1e-5)
    assert d["ess_frac"] == pytest.approx(
        np.exp(log_w).sum().item() ** 2 / np.exp(2 * log_w).sum().item() / 4, rel=1e-5
    )
