"""The bound on an update's step: its measure, its rule, and what it leaves alone."""

import copy
import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_algos import METHODS, SMALL, setup, step

from robo_rl.algos import nft
from robo_rl.algos.onpolicy import minibatches, steps_of
from robo_rl.algos.trust import BEFORE, PROBES, RECENT, Outcomes, TrustRegion, near_success
from robo_rl.errors import UserError
from robo_rl.optim import AdamW
from robo_rl.options import NftOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import Collector
from robo_rl.sampling import gaussian_kl, gaussian_logp

RATIO = [m for m in METHODS if not m.startswith("nft")]


def test_the_bound_shrinks_with_the_variance_of_outcomes_once_most_episodes_succeed():
    assert near_success(0, 98) == near_success(48, 98) == near_success(0, 0) == 1
    assert near_success(89, 98) == pytest.approx(4 * 0.9 * 0.1)  # p = 90/100
    assert 0 < near_success(98, 98) < near_success(89, 98)


def test_the_target_of_an_update_is_that_of_its_rollout():
    _, learner, collector, _ = learner_of("ppo", 0.01)
    rollout = collector.collect(learner.policy, 8)
    for success, want in ((0.5, 1.0), (0.9, near_success(90, 100) ** 2)):
        told = learner.update(
            replace(rollout, stats=rollout.stats | {"episodes": 100.0, "success": success}), 0.0
        )
        assert told["kl_target"] == pytest.approx(0.01 * want) and told["kl"] <= told["kl_target"] * 1.0001


def ended(n, success, **more):
    return {"episodes": float(n), "success": success} | more


def test_episodes_that_end_before_one_can_fail_are_not_counted():
    outcomes = Outcomes(0.9, early=2)
    looked = near_success(0.9 * BEFORE, BEFORE)
    assert [outcomes.observe(s) for s in ({"episodes": 0.0}, ended(40, 1.0))] == [looked] * 2
    assert outcomes.observe(ended(40, 0.2)) == 1  # 32 of 67


def test_success_is_that_of_many_rollouts_and_forgets():
    outcomes = Outcomes(None, early=0)
    swings = [outcomes.observe(ended(32, success)) for success in (1.0, 0.5) * 40]
    assert max(swings[-2:]) - min(swings[-2:]) < 0.1 * (1 - near_success(32, 32))
    for _ in range(40):
        last = outcomes.observe(ended(RECENT // 4, 0.99))
    assert last == pytest.approx(near_success(0.99 * RECENT, RECENT), rel=1e-3)
    # a rollout of more counts whole
    assert outcomes.observe(ended(10 * RECENT, 0.95)) == near_success(9.5 * RECENT, 10 * RECENT)


def test_success_from_the_middle_of_a_task_counts_for_nothing():
    outcomes = Outcomes(None, early=0)
    before = outcomes.observe(ended(98, 1.0))
    assert outcomes.observe(ended(98, 1.0, stored=0.1)) == 1 and outcomes.observe({}) == before < 1


def test_what_is_counted_goes_on_after_a_checkpoint():
    a, b = Outcomes(0.9, 3), Outcomes(None, 0)
    for success in (1.0, 1.0, 1.0, 0.8):
        a.observe(ended(50, success))
    b.load_state_dict(a.state_dict())
    assert a.observe(ended(50, 0.7)) == b.observe(ended(50, 0.7))


def learner_of(name, target, **kw):
    """(env, learner with a trust region, collector, options) of a toy."""
    env, _, _, options = setup(name)
    policy = make_policy(METHODS[name][0], ObsSpec(state=4, action=2), 0)
    options = replace(options, trust_kl=target, critic_warmup=0, **kw)
    learner = importlib.import_module(f"robo_rl.algos.{name.split()[0]}").make(policy, options, 0)
    return env, learner, Collector(env, policy, options.gamma, 0), options


@torch.no_grad()
def moments(policy, state, trace):
    return policy.moments(policy.encode({"state": state}), trace)


def test_the_divergence_of_two_normals_is_the_mean_log_ratio_of_their_densities():
    a, s, b, r = (torch.tensor(x, dtype=torch.float64) for x in (0.3, 0.5, -0.2, 0.8))
    x = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    p = gaussian_logp(x, a, s)
    integral = torch.trapezoid(p.exp() * (p - gaussian_logp(x, b, r)), x)
    assert float(gaussian_kl(a, s, b, r)) == pytest.approx(float(integral), abs=1e-6)
    assert float(gaussian_kl(a, s, a, s)) == 0
    assert float(gaussian_kl(a, 0 * s, b, 0 * s)) == 0  # a step without noise has no density


@pytest.mark.parametrize("name", RATIO)
def test_moments_are_those_whose_density_score_gives(name):
    env, learner, collector, _ = setup(name)
    policy = learner.policy
    chunk = policy.act({"state": torch.randn(7, 4)}, torch.Generator().manual_seed(0), True)
    obs = {"state": torch.randn(7, 4)}
    with torch.no_grad():
        mean, std = policy.moments(policy.encode(obs), chunk.trace)
        logp, _ = policy.score(policy.encode(obs), chunk.trace)
    n = policy.options.execute * 2
    own = gaussian_logp(chunk.trace["x_next"][..., :n], mean, std).sum(-1)
    assert mean.shape == std.shape == (7, policy.factors, n)
    assert torch.allclose(own / (n if policy.options.logp_reduction == "mean" else 1), logp, atol=1e-4)


def test_the_measure_does_not_grow_with_the_chunk_nor_with_the_axes():
    told = []
    for horizon, action in ((1, 2), (8, 2), (8, 7)):
        policy = make_policy(
            PolicyOptions(kind="gaussian", **SMALL | {"horizon": horizon, "execute": horizon}),
            ObsSpec(state=4, action=action),
            0,
        )
        state = torch.randn(5, 4)
        before = moments(policy, state, {})
        policy.net[-1].bias.data += 0.1 * policy.options.init_std  # every entry by a tenth of its std
        told.append(float(gaussian_kl(*before, *moments(policy, state, {})).mean()))
    assert told == pytest.approx([0.005] * 3, rel=1e-4)


@pytest.mark.parametrize("lr", [1e-3, 0.03])
@pytest.mark.parametrize("name", RATIO)
def test_an_update_stays_within_its_target_and_comes_near_it_whatever_the_learning_rate(name, lr):
    env, learner, collector, options = learner_of(name, 0.002, lr=lr)
    rng = np.random.default_rng(0)
    told = [m for m, _ in (step(env, learner, collector, options, rng) for _ in range(8)) if "kl" in m]
    kl = [m["kl"] / m["kl_target"] for m in told]
    assert max(kl) < 1.0001  # from the first update on
    assert min(kl[1:]) > 0.5 and kl[0] > 0.2, kl
    assert all(m["skipped_updates"] == 0 for m in told)


def test_a_policy_that_tells_no_moments_is_held_by_an_estimate_from_its_log_probs():
    env, learner, collector, options = learner_of("ppo", 0.002, lr=0.03)
    policy, kl = learner.policy, []
    learner.trust.scored = lambda: (
        policy.score(policy.encode(learner.trust.obs), learner.trust.trace)[0].detach(),
    )
    for _ in range(4):
        r = collector.collect(learner.sampler, options.decisions)
        obs, trace = {"state": r.obs["state"].flatten(0, 1)}, {k: v.flatten(0, 1) for k, v in r.trace.items()}
        before = moments(policy, obs["state"], trace)
        learner.update(r, 0.0)
        kl.append(float(gaussian_kl(*before, *moments(policy, obs["state"], trace)).mean()))
    assert all(0.0008 < x < 0.004 for x in kl), kl


def test_a_learning_rate_that_is_far_too_small_grows_until_updates_reach_the_target():
    env, learner, collector, options = learner_of("ppo", 0.002, lr=1e-5)
    rng = np.random.default_rng(0)
    told = [step(env, learner, collector, options, rng)[0] for _ in range(6)]
    assert told[0]["kl"] < 1e-4 and told[-1]["kl"] > 0.001


def test_without_the_option_an_update_moves_as_far_as_its_learning_rate_takes_it():
    env, learner, collector, options = setup("pi_rl sde")
    learner.options = replace(options, lr=0.03)
    learner.actor_opt.param_groups[0]["lr"] = 0.03
    rng = np.random.default_rng(0)
    metrics = [step(env, learner, collector, options, rng)[0] for _ in range(3)][-1]
    assert metrics["kl"] > 0.1 and "kl_target" not in metrics


def test_the_measure_is_of_what_the_update_did():
    env, learner, collector, options = learner_of("pi_rl sde", 0.002)
    r = collector.collect(learner.sampler, options.decisions)
    rows = r.mask.flatten()
    obs, trace = r.obs["state"].flatten(0, 1)[rows], {k: v.flatten(0, 1)[rows] for k, v in r.trace.items()}
    assert len(obs) <= PROBES
    policy = learner.policy
    before = moments(policy, obs, trace)
    kl = learner.update(r, 0.0)["kl"]
    assert kl == pytest.approx(float(gaussian_kl(*before, *moments(policy, obs, trace)).mean()), rel=1e-4)


def test_an_update_goes_on_from_a_checkpoint_as_if_there_had_been_none():
    env, learner, collector, options = learner_of("pi_rl sde", 0.002, lr=0.01)
    rng = np.random.default_rng(0)
    step(env, learner, collector, options, rng)
    fresh = learner_of("pi_rl sde", 0.002, lr=0.01)[1]
    fresh.policy.load_state_dict(learner.policy.state_dict())
    fresh.load_state_dict(copy.deepcopy(learner.state_dict()))
    r = collector.collect(learner.sampler, options.decisions)
    assert learner.trust.lr != 0.01
    assert fresh.update(r, 0.5) == learner.update(r, 0.5)


def test_nft_refuses_it():
    policy = make_policy(PolicyOptions(**SMALL), ObsSpec(state=4, action=2), 0)
    with pytest.raises(UserError, match="--rl.trust-kl"):
        nft.make(policy, NftOptions(trust_kl=0.01), 0)


@pytest.mark.parametrize("rows", [1, 7, 64, 95, 96, 97, 100, 128, 150, 192])
def test_the_steps_of_an_update_are_counted_as_they_are_made(rows):
    columns = {"adv": torch.zeros(rows)}
    assert steps_of(rows, 64) == sum(1 for _ in minibatches(columns, torch.arange(rows), 64))


def test_the_critic_is_ready_once_it_explained_enough_or_was_given_enough_updates():
    _, learner, _, options = learner_of("pi_rl sde", 0.0)
    credit, o = learner.credit, replace(options, critic_warmup=5, critic_ready=0.3)
    asked = [credit.is_ready(o, i, {"explained_variance": ev}) for i, ev in enumerate((0.0, 0.2, 0.31, 0.1))]
    assert asked == [False, False, True, True]  # once is enough
    credit.ready = False
    assert [credit.is_ready(o, i, {"explained_variance": 0.0}) for i in (4, 5)] == [False, True]
    credit.ready = False
    assert [
        credit.is_ready(replace(o, critic_ready=0.0), i, {"explained_variance": 0.9}) for i in (4, 5)
    ] == [False, True]
    again = learner_of("pi_rl sde", 0.0)[1].credit
    again.load_state_dict(credit.state_dict())
    assert again.ready


def test_what_is_taken_back_of_weights_in_16_bits_stays_back():
    """What steps of them is a copy in float32: a cut of the parameters alone would be undone by the next
    step."""
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    opt = AdamW([p], lr=0.5)
    region = TrustRegion([p], opt, 0.5, 0.01)
    for update in range(2):  # the copy is made in the first
        region.start = [x.detach().clone() for _, x in region.stepping()]
        first = p.detach().clone()
        p.grad = torch.ones_like(p)
        opt.step()
        moved = p.detach() - first
        region.shrink(0.25)
        assert torch.allclose(p.detach() - first, 0.25 * moved, atol=2e-3), update
        opt.param_groups[0]["lr"] = 0.0
        opt.step()
        assert torch.allclose(p.detach() - first, 0.25 * moved, atol=2e-3), update
        opt.param_groups[0]["lr"] = 0.5
