"""Off-policy correction: the functions against their definitions, and every method updated on stale rollouts."""

import copy
import importlib
import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_algos import METHODS, demonstrations
from toys import PointReach

from robo_rl import checkpoint, corrections, losses
from robo_rl.advantages import gae
from robo_rl.algos import bc, onpolicy, stale
from robo_rl.corrections import WeightAverage, min_prefix, per_episode, vtrace
from robo_rl.demos import demo_sampler, fit_normalisers
from robo_rl.errors import UserError
from robo_rl.evaluate import eval_starts, evaluate
from robo_rl.options import CORRECTIONS, PROXIMALS, BcOptions, OnPolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import Collector
from robo_rl.stats import wilson


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


# ---- ratios and weights ----------------------------------------------------------------------------------------------

def test_a_log_ratio_is_clamped_and_what_is_not_finite_counts_as_no_change():
    new = torch.tensor([1.0, math.nan, math.inf, -math.inf, 500.0, -500.0], dtype=torch.float64)
    got, bad = corrections.log_ratio(new, torch.zeros(6))
    assert got.tolist() == [1.0, 0.0, 0.0, 0.0, 20.0, -20.0] and got.dtype == torch.float32
    assert bad.tolist() == [False, True, True, True, False, False]


def test_the_two_ratios_multiply_to_the_total_one():
    behave, prox, theta = torch.randn(3, 64)
    d, u, total = (corrections.log_ratio(a, b)[0] for a, b in ((theta, prox), (prox, behave), (theta, behave)))
    assert torch.allclose(d.exp() * corrections.ratio(u), total.exp(), rtol=1e-5)


def test_weights_are_dropped_outside_the_band_or_truncated_at_its_edge():
    log_rho = torch.tensor([0.1, 1.0, 2.0, 4.0]).log().requires_grad_()
    assert torch.allclose(corrections.reject(log_rho, 2.0), torch.tensor([0.1, 1.0, 2.0, 0.0]))
    assert torch.allclose(corrections.reject(log_rho, 2.5, 0.5), torch.tensor([0.0, 1.0, 2.0, 0.0]))
    assert torch.allclose(corrections.truncate(log_rho, 2.0), torch.tensor([0.1, 1.0, 2.0, 2.0]))
    assert torch.allclose(corrections.truncate(log_rho, math.inf), log_rho.exp())  # plain importance sampling
    assert not corrections.truncate(log_rho, 2.0).requires_grad and not corrections.reject(log_rho, 2.0).requires_grad


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


# ---- episodes --------------------------------------------------------------------------------------------------------

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
    body, done, mask = torch.randn(4, 6), torch.zeros(4, 6, dtype=torch.bool), torch.ones(4, 6, dtype=torch.bool)
    padded = [torch.cat([a, b]) for a, b in ((body, 9 * torch.ones(3, 6)), (done, done[:3]), (mask, ~mask[:3]))]
    assert torch.allclose(per_episode(*padded, "mean")[:4], per_episode(body, done, mask, "mean"))


def test_the_sequence_weight_gives_gspos_gradient_at_the_first_step():
    logp = torch.randn(5, 2, requires_grad=True)
    behave, adv = logp.detach() + 0.2 * torch.randn(5, 2), torch.tensor([1.0, -2.0])
    done = torch.zeros(5, 2, dtype=torch.bool)
    s = per_episode(logp - behave, done, ~done, "mean").exp()
    (gspo,) = torch.autograd.grad(-(s * adv).mean(), logp, retain_graph=True)
    weight = corrections.truncate(per_episode((logp - behave).detach(), done, ~done, "mean"), math.inf)
    (ours,) = torch.autograd.grad(losses.ppo(logp, logp.detach(), adv.expand(5, 2), 0.2, 0.2, 0.0, weight)[0], logp)
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
        assert (min_prefix(lower, done)[t + 1:] <= w[t + 1:]).all()


def test_minpro_gives_its_cards_gradient_at_the_first_step():
    logp = torch.randn(5, 3, requires_grad=True)
    behave, adv, done = logp.detach() + 0.4 * torch.randn(5, 3), torch.randn(5, 3), torch.zeros(5, 3, dtype=torch.bool)
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


# ---- anchors ---------------------------------------------------------------------------------------------------------

def test_interpolation_runs_from_behave_at_age_one_towards_theta():
    alpha = corrections.age_weight(torch.tensor([7, 6, 4, -1, 9]), 7)
    assert torch.allclose(alpha, torch.tensor([0.0, 1 / 2, 3 / 4, 0.0, 0.0]))  # ages 1, 2, 4 of weights being made: 8
    behave, theta = torch.randn(5), torch.randn(5, requires_grad=True)
    prox = corrections.interpolate(behave, theta, alpha)
    assert torch.equal(prox[0], behave[0]) and not prox.requires_grad
    assert torch.isclose(prox[2], 0.25 * behave[2] + 0.75 * theta[2].detach())
    assert torch.allclose(corrections.interpolate(behave, theta, torch.ones(5)), theta.detach())


def test_the_weight_average_is_the_explicit_weighted_mean():
    xs, betas, average = torch.randn(9, 4), [0.8, 0.5, 0.9, 0.0, 0.7, 0.8, 0.8, 1.0, 0.6], WeightAverage()
    weights = torch.zeros(0)
    for i, (x, beta) in enumerate(zip(xs, betas)):
        average.update({"w": x}, beta)
        weights = torch.cat([weights * beta, torch.ones(1)])
        assert math.isclose(average.total, float(weights.sum()), rel_tol=1e-6)
        expected = (weights[:, None] * xs[:i + 1]).sum(0) / weights.sum()
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


# ---- V-trace ---------------------------------------------------------------------------------------------------------

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
                assert torch.isclose(weight[s, env] * adv[s, env], min(rho_bar, rho[s, env]) * (target - v[s, env]),
                                     atol=1e-4)


def test_vtrace_of_ratios_near_zero_returns_the_values():
    r, gamma, done, v, nv = transitions()
    _, returns, weight = vtrace(r, gamma, done, v, nv, 1.0, torch.full((9, 8), -20.0))
    assert torch.allclose(returns, v, atol=1e-6) and weight.max() < 1e-8


def test_vtrace_on_policy_with_lambda_one_is_the_n_step_return():
    r, v = torch.randn(6, 2), torch.randn(7, 2)
    _, returns, _ = vtrace(r, torch.full((6, 2), 0.9), torch.zeros(6, 2, dtype=torch.bool), v[:-1], v[1:], 1.0,
                           torch.zeros(6, 2))
    expected = sum(0.9**i * r[i] for i in range(6)) + 0.9**6 * v[6]
    assert torch.allclose(returns[0], expected, atol=1e-5)


def test_vtrace_bootstraps_at_a_time_limit_and_not_at_the_end_and_nothing_leaks_over_either():
    r, v = torch.tensor([[0.0], [1.0], [0.0], [0.0], [5.0]]), torch.arange(5.0)[:, None]
    nv = torch.tensor([[1.0], [9.0], [3.0], [4.0], [7.0]])
    discounts = torch.tensor([[0.99], [0.99], [0.99], [0.99], [0.0]])
    done = torch.tensor([[False], [True], [False], [False], [True]])
    rho = torch.full((5, 1), math.log(0.5))
    adv, returns, _ = vtrace(r, discounts, done, v, nv, 0.95, rho)
    assert torch.isclose(adv[1, 0], torch.tensor(1 + 0.99 * 9 - 1.0)) and torch.isclose(adv[4, 0], torch.tensor(1.0))
    moved = vtrace(r + torch.tensor([[0.0], [0.0], [9.0], [9.0], [9.0]]), discounts, done, v, nv, 0.95, rho)
    assert torch.equal(moved[0][:2], adv[:2]) and torch.equal(moved[1][:2], returns[:2])


# ---- effective sample size, baseline, diagnostics --------------------------------------------------------------------

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
        log_w, reward, h = torch.randn(16, generator=g), torch.rand(16, generator=g), torch.rand(16, generator=g) + 0.1
        best = corrections.opob(log_w, reward, h)
        grid = torch.linspace(-2, 3, 501)
        moment = ((2 * log_w).exp() * h * (reward - torch.cat([grid, best[None]])[:, None]).square()).sum(1)
        assert moment[-1] <= moment[:-1].min() + 1e-6
    assert torch.isclose(corrections.opob(torch.zeros(4), torch.arange(4.0), torch.ones(4)), torch.tensor(1.5))
    assert torch.isfinite(corrections.opob(torch.tensor([1e3, -1e3]), torch.ones(2), torch.ones(2)))


def test_two_gradient_buffers_give_the_gradient_with_the_baseline():
    theta, x, reward = torch.randn(3, requires_grad=True), torch.randn(8, 3), torch.rand(8)
    w = (0.3 * torch.randn(8)).exp()
    grads = torch.stack([torch.autograd.grad(torch.tanh(theta @ row), theta, retain_graph=True)[0] for row in x])
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
    assert d["ess_frac"] == pytest.approx(np.exp(log_w).sum().item() ** 2 / np.exp(2 * log_w).sum().item() / 4, rel=1e-5)


# ---- options ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kw,words", [
    (dict(correction="decopled"), "did you mean 'decoupled'.*none, .*sequence|sequence"),
    (dict(proximal="newest"), "recompute, snapshot|interpolate"),
    (dict(weight_cap=0.5), r"weight_cap must be in \[1"),
    (dict(correction="vtrace", advantage="grpo"), "needs rl.advantage gae.*decoupled, tis, minpro, sequence or m2po"),
    (dict(proximal="interpolate", correction="minpro"), "decoupled or tis"),
    (dict(proximal="interpolate", ess_lr=True), "without rl.ess_lr"),
    (dict(proximal="interpolate", advantage="opob"), "and rl.advantage opob"),
    (dict(correction="m2po", m2_tau=0.0), r"m2_tau must be in \(0"),
], ids=str)
def test_options_that_cannot_work_are_refused_with_what_can(kw, words):
    with pytest.raises(UserError, match=words):
        OnPolicyOptions(**kw)


# ---- learners --------------------------------------------------------------------------------------------------------

RATIO_METHODS = [m for m in METHODS if m != "nft"]
PAIRS = [(c, p) for c in CORRECTIONS if c != "none" for p in PROXIMALS
         if p != "interpolate" or c in ("decoupled", "tis")]
FEW = [(c, p) for c, p in PAIRS if c == "decoupled" or p == "recompute"]


def refuse(name, correction):
    return correction == "vtrace" and METHODS[name][1].advantage != "gae"


def make(name, seed=0, demos=None, **kw):
    policy_options, options = METHODS[name]
    policy = make_policy(policy_options, ObsSpec(state=4, action=2), seed)
    options = replace(options, **dict(critic_warmup=0, epochs=2, minibatch=64) | kw)
    return importlib.import_module(f"robo_rl.algos.{name.split()[0]}").make(policy, options, seed, demos)


def collector_of(learner, seed=0, n=16):
    return Collector(PointReach(n, limit=12), learner.policy, learner.options.gamma, seed)


def collect(collector, learner, version, seed=0):
    o = learner.options
    if o.advantage == "gae":
        return collector.collect(learner.sampler, o.decisions, version=version)
    rng = np.random.default_rng(seed)
    starts = np.repeat(rng.integers(0, 2**31, collector.n // o.group), o.group)
    rollout = collector.episodes(learner.sampler, starts, version=version)
    rollout.outcome = torch.from_numpy(rng.random(collector.n).astype(np.float32))  # an untrained group is flat else
    rollout.mask[1:, ::3], rollout.done[0, ::3] = False, True  # some end early
    return rollout


def weights(learner):
    return torch.cat([p.detach().flatten() for m in (learner.policy, learner.credit.critic) for p in m.parameters()])


def stale_case(name):
    """(rollout of version 0, states of policy and learner after two updates on other rollouts of their own)."""
    if name not in stale_case.known:
        learner = make(name, proximal="snapshot")
        collector = collector_of(learner)
        old = copy.deepcopy(collect(collector, learner, 0))
        for v in range(2):
            learner.update(copy.deepcopy(collect(collector, learner, v, seed=v + 1)), 0.5, version=v)
        stale_case.known[name] = old, copy.deepcopy(learner.policy.state_dict()), copy.deepcopy(learner.state_dict())
    return stale_case.known[name]


stale_case.known = {}


def at_version_two(name, **kw):
    """A learner with options `kw` at the state of `stale_case`, and the rollout of version 0."""
    old, policy, state = stale_case(name)
    learner = make(name, seed=3, **kw)
    learner.policy.load_state_dict(policy)
    learner.load_state_dict(copy.deepcopy(state))
    return learner, copy.deepcopy(old)


@pytest.mark.parametrize("name", RATIO_METHODS)
def test_fresh_data_is_trained_on_alike_under_every_correction(name):
    learner = make(name)
    collector, rollouts = collector_of(learner), []
    for v in range(2):  # the second is made by weights that the first moved
        rollouts.append(copy.deepcopy(collect(collector, learner, 5 + v, seed=v)))
        learner.update(copy.deepcopy(rollouts[v]), 0.5)

    def run(version, **kw):
        learner = make(name, **kw)
        metrics = [learner.update(copy.deepcopy(r), 0.5, 5 + v if version else None) for v, r in enumerate(rollouts)]
        return weights(learner), metrics
    plain, told = run(False)
    assert not any("staleness_max" in m or "ess_frac" in m for m in told)
    for correction, proximal in FEW + [("none", "recompute")]:
        if not refuse(name, correction):
            got, metrics = run(True, correction=correction, proximal=proximal,
                               ess_lr=proximal != "interpolate")
            assert torch.equal(got, plain) and metrics == told, (correction, proximal)


@pytest.mark.parametrize("correction,proximal", PAIRS, ids=str)
@pytest.mark.parametrize("name", RATIO_METHODS)
def test_every_method_takes_a_finite_step_on_stale_data(name, correction, proximal):
    if refuse(name, correction):
        with pytest.raises(UserError):
            make(name, correction=correction)
        return
    learner, old = at_version_two(name, correction=correction, proximal=proximal)
    before = weights(learner)
    seen = []
    step = learner.actor_step
    learner.actor_step = lambda context, row, rules: seen.append(row) or step(context, row, rules)
    metrics = learner.update(old, 0.5, version=2)
    after = weights(learner)
    assert torch.isfinite(after).all() and not torch.equal(before, after)
    assert all(math.isfinite(v) for v in metrics.values())
    assert {"ess_frac", "is_logratio_mean", "is_logratio_absmax", "is_rejected", "is_k3", "lr_scale"} <= {*metrics}
    assert metrics["staleness_mean"] == metrics["staleness_max"] == 2 and metrics["lr_scale"] == 1
    assert 0 < metrics["ess_frac"] <= 1 + 1e-6 and metrics["is_nonfinite"] == 0
    if proximal == "interpolate":
        assert "weight" not in seen[0] and metrics["is_logratio_absmax"] > 1e-3
    elif proximal == "snapshot":  # the weights that acted, in the numerics they acted in
        assert torch.allclose(seen[0]["weight"], torch.ones(()), atol=1e-3)
    else:
        weight = seen[0]["weight"]
        assert (weight - 1).abs().max() > 1e-3 and 0 <= weight.min() and weight.max() <= learner.corrector.cap
        assert metrics["first_log_ratio"] < 5e-5  # the anchor is where the step starts


@pytest.mark.parametrize("name", RATIO_METHODS)
def test_without_correction_stale_data_is_trained_on_as_if_it_were_fresh(name):
    results = []
    for version in (None, 2):
        learner, old = at_version_two(name, correction="none", ess_lr=True)
        metrics = learner.update(old, 0.5, version)
        results.append((weights(learner), {k: v for k, v in metrics.items() if "staleness" not in k}))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert metrics["staleness_max"] == 2


@pytest.mark.parametrize("name", RATIO_METHODS)
def test_the_learner_scores_a_chunk_of_unmoved_weights_as_the_actor_did(name):
    """Versions apart, weights the same: what stays is the disagreement of the two about a log-prob."""
    learner = make(name)
    metrics = learner.update(collect(collector_of(learner), learner, 0), 0.0, version=3)
    assert abs(metrics["is_logratio_mean"]) < 1e-5 and metrics["is_logratio_absmax"] < 1e-3
    assert metrics["ess_frac"] > 0.9999 and metrics["is_rejected"] == 0


@pytest.mark.parametrize("proximal", ["recompute", "snapshot", "interpolate"])
def test_the_fresh_chunks_of_a_mixed_rollout_keep_their_log_probs_and_weigh_one(proximal):
    learner, old = at_version_two("ppo", proximal=proximal)
    old.version[6:, :8] = 2
    got = learner.corrector.correct(old, learner.policy, 2, True)
    fresh, logp = (old.version == 2).flatten(), old.logp.flatten(0, 1)
    assert torch.equal(got.columns["logp_old"][fresh], logp[fresh])
    if proximal == "interpolate":
        assert not got.columns["alpha"][fresh].any() and (got.columns["alpha"][~fresh] == 2 / 3).all()
    else:
        assert (got.columns["weight"][fresh] == 1).all()
    assert got.metrics["staleness_mean"] == 1.5


def test_factors_with_ratios_of_their_own_have_weights_of_their_own():
    learner, old = at_version_two("dppo")
    weight = learner.corrector.correct(old, learner.policy, 2, False).columns["weight"]
    assert weight.shape == (12 * 16, 5)
    learner, old = at_version_two("pi_rl noise")
    assert learner.corrector.correct(old, learner.policy, 2, True).columns["weight"].shape == (12 * 16,)


@pytest.mark.parametrize("name,shape", [("ppo", (32,)), ("dppo", (32,)), ("dppo", (32, 5))], ids=str)
def test_the_weight_scales_the_step_of_its_own_samples(name, shape):
    learner, old = at_version_two(name, entropy_coef=0.0)
    learner.actor_opt.param_groups[0]["lr"] = 0.0
    rows = torch.arange(32)
    obs, trace = (onpolicy.pick(onpolicy.flat(x), rows) for x in (old.obs, old.trace))
    row = trace | {"logp_old": old.logp.flatten(0, 1)[rows], "adv": torch.randn(32)}
    norms = [float(learner.actor_step(learner.policy.encode(obs), row | {"weight": torch.full(shape, w)},
                                      learner.rules(0.5))[0]["grad_norm"]) for w in (1.0, 0.5, 0.0)]
    assert norms[0] > 0 and norms[1] == pytest.approx(norms[0] / 2, rel=1e-3) and norms[2] == 0


@pytest.mark.parametrize("name,factors", [("ppo", ()), ("dppo", (5,))], ids=str)
def test_m2po_drops_the_most_extreme_live_samples_until_the_rest_is_near(name, factors):
    learner, old = at_version_two(name, correction="m2po", m2_tau=1e-4)
    old.mask[-2:] = False
    got = learner.corrector.correct(old, learner.policy, 2, not factors)
    prox, behave = got.columns["logp_old"], old.logp.flatten(0, 1)
    log_rho, live = prox - behave if factors else (prox - behave).sum(-1), old.mask.flatten()
    weight = got.columns["weight"]
    assert weight.shape == (12 * 16, *factors)
    kept = weight[live] > 0
    inside, outside = log_rho[live][kept].square(), log_rho[live][~kept].square()
    assert kept.any() and (~kept).any() and inside.mean() < 1e-4 and inside.max() <= outside.min()
    assert torch.cat([inside, outside.min()[None]]).mean() >= 1e-4
    assert torch.allclose(weight[live][kept], log_rho[live][kept].exp().clamp(max=2.0), rtol=1e-4)
    assert got.metrics["is_rejected"] == pytest.approx(float((~kept).float().mean()))


def test_opob_is_the_mean_on_fresh_episodes_of_one_length_and_weighs_stale_and_long_ones_else():
    learner, old = at_version_two("pi_rl sde grpo", advantage="opob")
    same = copy.deepcopy(old)
    same.mask[:] = True
    fresh = learner.credit.assign(same, learner.policy)[0]
    dr = replace(learner.options, advantage="dr_grpo")
    learner.credit.options = dr
    assert torch.allclose(fresh, learner.credit.assign(same, learner.policy)[0], atol=1e-6)
    learner.credit.options = learner.options
    log_rho = 0.3 * torch.randn(old.mask.shape)
    adv = learner.credit.assign(old, learner.policy, log_rho)[0].view(old.mask.shape)[0]
    w, h, r = (torch.where(old.mask, log_rho, 0.0).sum(0).exp(), old.mask.sum(0).float(), old.outcome)
    g = learner.options.group
    for q in range(0, len(r), g):
        one = slice(q, q + g)
        base = (w[one] ** 2 * h[one] * r[one]).sum() / (w[one] ** 2 * h[one]).sum()
        assert torch.allclose(adv[one], r[one] - base, atol=1e-5)
    seen, assign = [], learner.credit.assign
    learner.credit.assign = lambda *a: seen.append(a[2]) or assign(*a)
    learner.update(old, 0.5, version=2)
    assert seen[0] is not None and seen[0].abs().max() > 1e-3  # the ratios of stale data reach it
    old.outcome[:] = 1.0
    assert not assign(old, learner.policy, log_rho)[0].any()


def test_vtrace_takes_the_place_of_gae_and_is_it_at_ratios_of_one():
    learner, old = at_version_two("ppo", correction="vtrace")
    plain = learner.credit.assign(old, learner.policy)
    one = learner.credit.assign(old, learner.policy, torch.zeros(12, 16))
    assert all(torch.equal(a, b) for a, b in zip(plain[:4], one[:4]))
    got = learner.corrector.correct(old, learner.policy, 2, True)
    moved = learner.credit.assign(old, learner.policy, got.log_rho)
    assert not torch.allclose(moved[1], plain[1], atol=1e-4) and got.columns["weight"].max() == 1.0
    seen, assign = [], learner.credit.assign
    learner.credit.assign = lambda *a: seen.append(a[2]) or assign(*a)
    learner.update(old, 0.5, version=2)
    assert torch.equal(seen[0], got.log_rho)


@pytest.mark.parametrize("correction,proximal", FEW, ids=str)
def test_chunks_outside_the_mask_change_nothing(correction, proximal):
    name = "pi_rl sde" if correction == "vtrace" else "pi_rl sde grpo"
    results = []
    for poison in (False, True):
        learner, old = at_version_two(name, correction=correction, proximal=proximal)
        if correction == "vtrace":
            old.mask[-3:], old.rewards[-3:], old.discounts[-3:], old.done[-3:] = False, 0.0, 1.0, False
            old.final_obs = {k: v[:int(old.done.sum())] for k, v in old.final_obs.items()}
        assert (~old.mask).any()
        if poison:
            old.logp[~old.mask] = math.nan
            old.version[~old.mask] = -7
            for key in ("x", "x_next"):
                old.trace[key][~old.mask] = math.nan
        metrics = learner.update(old, 0.5, version=2)
        results.append((weights(learner), metrics))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


def test_versions_outside_the_mask_make_no_rollout_stale():
    learner, old = at_version_two("pi_rl sde grpo")
    old.version[old.mask] = 2
    assert (old.version != 2).any()
    got = learner.corrector.correct(old, learner.policy, 2, True)
    assert got.columns == {} and got.metrics == {} and got.lr_scale == 1


def test_a_log_prob_that_is_not_finite_is_counted_and_weighs_one():
    learner, old = at_version_two("ppo")
    old.logp[0, :16] = math.nan
    metrics = learner.update(old, 0.5, version=2)
    assert metrics["is_nonfinite"] == 16 / old.mask.sum() and torch.isfinite(weights(learner)).all()


def test_nft_needs_no_likelihood_and_takes_chunks_of_any_version():
    results = []
    for version in (None, 9):
        learner = make("nft")
        rollout = collector_of(learner).collect(learner.sampler, 12, version=0, explore=False)
        results.append((learner.update(rollout, 0.5, version), weights(learner)))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


# ---- the learning rate -----------------------------------------------------------------------------------------------

def test_the_learning_rate_is_scaled_for_the_update_and_is_as_before_after_it():
    learner, old = at_version_two("ppo", ess_lr=True)
    rate, seen = learner.actor_opt.param_groups[0]["lr"], []
    step = learner.actor_step
    learner.actor_step = lambda *a: seen.append(learner.actor_opt.param_groups[0]["lr"]) or step(*a)
    metrics = learner.update(old, 0.5, version=2)
    assert 0 < metrics["lr_scale"] < 0.99 and metrics["lr_scale"] == pytest.approx(metrics["ess_frac"] ** 0.5)
    assert {*seen} == {rate * metrics["lr_scale"]} and learner.actor_opt.param_groups[0]["lr"] == rate


def test_the_learning_rate_is_as_before_after_a_step_that_raises():
    learner, old = at_version_two("ppo", ess_lr=True)
    rate = learner.actor_opt.param_groups[0]["lr"]

    def fails(*_):
        raise RuntimeError("lost")
    learner.actor_step = fails
    with pytest.raises(RuntimeError, match="lost"):
        learner.update(old, 0.5, version=2)
    assert learner.actor_opt.param_groups[0]["lr"] == rate
    with onpolicy.scaled_lr(learner.actor_opt, 0.5):
        assert learner.actor_opt.param_groups[0]["lr"] == rate / 2
    assert learner.actor_opt.param_groups[0]["lr"] == rate


# ---- anchors that have a past ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", RATIO_METHODS)
def test_snapshots_give_the_log_probs_of_the_versions_that_acted(name):
    learner, old = at_version_two(name, proximal="snapshot")
    learner.corrector.keep(learner.policy, 2)
    assert sorted(learner.corrector.snapshots) == [0, 1, 2]
    prox = learner.corrector.anchored(old, learner.policy, 2 - old.version).view_as(old.logp)
    assert torch.allclose(prox[old.mask], old.logp[old.mask], atol=1e-3)
    now = stale.scores(learner.policy, onpolicy.flat(old.obs), onpolicy.flat(old.trace),
                       old.mask.flatten().nonzero().squeeze(1))
    assert not torch.allclose(now, old.logp[old.mask], atol=1e-2)


def test_each_chunk_of_a_rollout_is_scored_by_the_snapshot_of_its_own_version():
    learner, old = at_version_two("ppo", proximal="snapshot")
    old.version[:, 8:] = 1  # a label: the learner shall believe it
    prox = learner.corrector.anchored(old, learner.policy, 2 - old.version).view_as(old.logp)
    assert torch.allclose(prox[:, :8], old.logp[:, :8], atol=1e-3)
    by = learner.corrector.carry(learner.policy, learner.corrector.snapshots[1])
    one = stale.scores(by, onpolicy.flat(old.obs), onpolicy.flat(old.trace), torch.arange(12 * 16)).view_as(old.logp)
    assert torch.allclose(prox[:, 8:], one[:, 8:], atol=1e-5)
    assert not torch.allclose(one[:, 8:], old.logp[:, 8:], atol=1e-2)


def test_a_bounded_number_of_snapshots_is_kept_and_the_nearest_stands_in_for_one_that_is_gone():
    learner, old = at_version_two("ppo", proximal="snapshot")
    for version in range(2, 30):
        learner.corrector.keep(learner.policy, version)
    assert sorted(learner.corrector.snapshots) == list(range(14, 30))
    prox = learner.corrector.anchored(old, learner.policy, 29 - old.version)
    rows = old.mask.flatten().nonzero().squeeze(1)
    now = stale.scores(learner.policy, onpolicy.flat(old.obs), onpolicy.flat(old.trace), rows)
    assert torch.equal(prox, now)  # all that is kept are the present weights


def test_the_average_is_the_present_weights_when_fresh_lags_when_stale_and_drops_what_fits_no_more():
    learner, old = at_version_two("ppo", proximal="ewma")
    average, policy = learner.corrector.average, learner.policy
    drift = []
    for version in range(2, 6):
        average_before = average.total
        learner.corrector.correct(old, policy, version, True)
        beta = corrections.ewma_decay(version)
        assert average.total == pytest.approx(beta * average_before + 1)
        drift.append(max(float((average.mean[k] - p.detach()).abs().max()) for k, p in policy.named_parameters()))
        with torch.no_grad():
            for p in policy.parameters():
                p += 0.01
    assert drift[0] == 0 and 0 < drift[1] < drift[2] < drift[3]
    old.version[:] = 6
    learner.corrector.correct(old, policy, 6, True)  # nothing is stale: the window is 0
    assert all(torch.equal(average.mean[k], p.detach()) for k, p in policy.named_parameters())
    old.version[:] = 0
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.1
    learner.update(old, 0.5, version=6)  # many chunks are out of the band by now
    assert average.total == 0
    learner.corrector.updated(0.95)
    learner.corrector.correct(old, policy, 7, True)
    assert average.total == 1


@pytest.mark.parametrize("proximal", ["snapshot", "ewma"])
def test_a_learner_restored_with_its_anchors_makes_the_identical_next_stale_update(proximal, tmp_path):
    learner, old = at_version_two("pi_rl noise", proximal=proximal)
    for version in (2, 3):
        learner.update(old, 0.5, version)
        learner.corrector.average.total = max(1.0, learner.corrector.average.total)  # as if no reset was due
    checkpoint.save_checkpoint(tmp_path / "c", learner.policy, {"learner": learner.state_dict()}, {"step": 0})
    again = make("pi_rl noise", seed=8, proximal=proximal)
    policy, _ = checkpoint.load_policy(tmp_path / "c")
    again.policy.load_state_dict(policy.state_dict())
    again.load_state_dict(checkpoint.load_train(tmp_path / "c")[0]["learner"])
    a, b = (x.update(old, 0.5, 4) for x in (learner, again))
    assert a == b and torch.equal(weights(learner), weights(again))
    assert a["first_log_ratio"] > 1e-4  # the anchor is not the present weights


# ---- learning --------------------------------------------------------------------------------------------------------

def learn(data, seed, lag, rounds=20, **kw):
    """Success of 200 episodes after `rounds` updates on rollouts of the weights `lag` updates ago."""
    policy_options, options = METHODS["ppo"]
    policy = make_policy(policy_options, ObsSpec(state=4, action=2), seed)
    fit_normalisers(policy, data)
    bc.train(policy, demo_sampler(data, policy.spec, 4), BcOptions(updates=150), seed)
    learner = importlib.import_module("robo_rl.algos.ppo").make(policy, replace(options, **kw), seed)
    collector, actor = Collector(PointReach(64, limit=12), policy, options.gamma, seed), copy.deepcopy(policy)
    past = deque(maxlen=lag + 1)
    for version in range(rounds):
        past.append((version, copy.deepcopy(policy.state_dict())))
        acted, state = past[0]
        actor.load_state_dict(state)
        learner.update(collector.collect(actor, options.decisions, version=acted), version / rounds, version)
    return sum(evaluate(PointReach(200, 12), policy, eval_starts(200))["success"])


@pytest.mark.learning
@pytest.mark.timeout(3600)  # twenty-one runs
def test_rollouts_of_eight_updates_ago_teach_as_much_as_fresh_ones_only_if_corrected(tmp_path):
    data = demonstrations(tmp_path, 6)
    cases = {"fresh": (0, {}), "none": (8, dict(correction="none")),
             **{c: (8, dict(correction=c)) for c in ("decoupled", "tis", "vtrace", "minpro", "sequence")}}
    got = {name: [learn(data, seed, lag, **kw) for seed in range(3)] for name, (lag, kw) in cases.items()}
    print("\n" + "\n".join(f"{name}: {wins} of 200" for name, wins in got.items()))
    fresh = wilson(sum(got["fresh"]), 600)
    for name, wins in got.items():
        if name == "none":
            assert max(wins) < 100  # measured 45 to 52
        else:
            assert wilson(sum(wins), 600).high >= fresh.low and min(wins) > 180, name
