"""Group estimators and offline weights: definitions, degenerate cases, unbiasedness on a bandit, gradients by
differences."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toys import PointReach

from robo_rl import losses
from robo_rl.advantages import (
    flawed_reward,
    gdpo,
    group_advantage,
    implicit_rewards,
    median_advantage,
    step_and_episode,
    whiten,
)
from robo_rl.algos import pi_rl
from robo_rl.algos.poise import CrossedBaseline, episode_features, mean_of_others
from robo_rl.errors import UserError
from robo_rl.options import PiRlOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import Collector

# ---- MC-GRPO


def test_among_distinct_outcomes_one_member_has_advantage_zero_and_it_is_left_out():
    torch.manual_seed(0)
    x = torch.randn(50, 5)
    adv, kept = median_advantage(x)
    assert ((adv == 0).sum(1) == 1).all() and ((~kept).sum(1) == 1).all() and (adv[~kept] == 0).all()
    median = x.median(1, keepdim=True).values
    mad = (x - median).abs().median(1, keepdim=True).values
    assert torch.allclose(adv, ((x - median) / (mad + 1e-3)).clamp(-5, 5))


def test_one_outlier_of_any_size_changes_no_sign_among_the_others():
    torch.manual_seed(0)
    x = torch.randn(20, 7)
    wild = x.clone()
    worst = x.argmax(1)
    wild[torch.arange(20), worst] = 1e6
    same = torch.ones_like(x, dtype=torch.bool)
    same[torch.arange(20), worst] = False
    assert (median_advantage(x)[0].sign() == median_advantage(wild)[0].sign())[same].all()
    assert (group_advantage(x, "dr_grpo").sign() != group_advantage(wild, "dr_grpo").sign())[same].any()


def test_binary_outcomes_do_not_explode_and_ties_with_the_median_are_trained_on():
    x = torch.tensor([[1.0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 0]])
    adv, kept = median_advantage(x)
    assert adv[0, 4] == pytest.approx(-1 / (x[0].std() + 1e-3)) and adv.abs().max() <= 5
    assert kept[0].tolist() == [False, True, True, True, True]
    assert not adv[1].any() and not kept[1].any()
    assert kept[2].tolist() == [True, False, True, True, True]


def test_groups_of_even_size_have_no_median_member():
    with pytest.raises(ValueError, match="odd"):
        median_advantage(torch.zeros(2, 4))
    with pytest.raises(UserError, match="must be odd, got 8; use 7 or 9"):
        PiRlOptions(advantage="mc_grpo", decisions=0, group=8)
    assert PiRlOptions(advantage="mc_grpo", decisions=0, group=9).group == 9


# ---- GDPO


def test_one_reward_of_gdpo_is_grpo_and_then_whitening_of_the_batch():
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    assert torch.allclose(
        gdpo(x[..., None], torch.ones(1))[0], whiten(group_advantage(x, "grpo", 1e-4)), atol=1e-3
    )


def test_rewards_that_add_up_alike_are_told_apart():
    r = torch.tensor([[[1.0, 0], [0, 1], [0, 0], [0, 0], [0, 1]]])  # two columns of different deviation
    summed = group_advantage(r.sum(-1), "grpo")
    apart = gdpo(r, torch.ones(2))[0]
    assert summed[0, 0] == summed[0, 1] and apart[0, 0] != apart[0, 1]


def test_a_constant_reward_adds_nothing_and_a_weight_of_zero_removes_a_reward_bit_for_bit():
    torch.manual_seed(0)
    r = torch.randn(4, 6, 2)
    one = gdpo(r[..., :1], torch.ones(1))[0]
    assert torch.equal(gdpo(torch.cat([r[..., :1], torch.full((4, 6, 1), 7.0)], -1), torch.ones(2))[0], one)
    assert torch.equal(gdpo(r, torch.tensor([1.0, 0.0]))[0], one)
    r[1], r[2, :, 0] = 1.0, 3.0  # one group is flat in both rewards, one in the first
    adv, kept = gdpo(r, torch.ones(2))
    assert not adv[1].any() and kept.all(1).tolist() == [True, False, True, True] and adv[2].any()
    assert not gdpo(torch.ones(3, 4, 2), torch.ones(2))[0].any()
    with pytest.raises(ValueError, match=r"weights \[R\]"):
        gdpo(r, torch.ones(3))


# ---- FAPO


def test_without_a_penalty_flawed_successes_are_clean_ones():
    success, flawed = torch.tensor([1.0, 1, 0, 0]), torch.tensor([False, True, False, True])
    assert flawed_reward(success, flawed, 0.0).tolist() == [1, 1, -1, -1]
    assert flawed_reward(success, flawed).tolist() == [1, 0, -1, -1]


def test_a_flawed_success_is_good_among_failures_and_bad_among_clean_successes():
    few = flawed_reward(torch.tensor([1.0, 0, 0, 0]), torch.tensor([True, False, False, False]))
    many = flawed_reward(torch.tensor([1.0, 1, 1, 0]), torch.tensor([True, False, False, False]))
    assert group_advantage(few[None])[0, 0] > 0 > group_advantage(many[None])[0, 0]


# ---- iStar


def test_rewards_of_decisions_add_up_to_the_log_ratio_of_the_episode():
    torch.manual_seed(0)
    logp, ref = torch.randn(7, 3), torch.randn(7, 3)
    # the paper's beta
    assert torch.allclose(implicit_rewards(logp, ref).sum(0), 0.05 * (logp.sum(0) - ref.sum(0)), atol=1e-6)
    assert torch.allclose(implicit_rewards(logp, ref, 2.0).sum(0), 2 * (logp.sum(0) - ref.sum(0)), atol=1e-6)
    assert not implicit_rewards(ref, ref).any()


def test_where_the_two_policies_are_equal_the_advantage_is_that_of_the_episode():
    torch.manual_seed(0)
    outcome, mask = torch.tensor([[1.0, 0, 0]]), torch.ones(4, 1, 3, dtype=torch.bool)
    mask[2:, 0, 1] = False
    adv = step_and_episode(outcome, torch.zeros(4, 1, 3), mask)
    assert torch.allclose(adv, group_advantage(outcome, "dr_grpo")[None] * mask)


def test_steps_are_centred_over_all_decisions_of_the_group_and_not_over_the_first_members_alone():
    steps, mask = torch.tensor([[[1.0, 4.0]], [[2.0, 9.0]]]), torch.tensor([[[True, True]], [[True, False]]])
    adv = step_and_episode(torch.zeros(1, 2), steps, mask)
    assert torch.allclose(
        adv[:, 0], torch.tensor([[1.0, 4.0], [2.0, 0.0]]) - torch.tensor([[7 / 3, 7 / 3], [7 / 3, 0.0]])
    )
    assert adv[mask].sum().abs() < 1e-5 and adv[1, 0, 1] == 0


def test_every_group_has_a_mean_of_its_own_and_one_decision_is_its_own_mean():
    torch.manual_seed(1)
    steps, outcome, mask = torch.randn(4, 3, 2), torch.randn(3, 2), torch.rand(4, 3, 2) < 0.6
    mask[:, 1] = False
    mask[2, 1, 0] = True  # one decision in all of the group
    mask[:, 2, 1] = False
    adv = step_and_episode(outcome, steps, mask, alpha=0.5)
    for t in range(4):
        for q in range(3):
            for i in range(2):
                live = steps[:, q][mask[:, q]]
                want = (
                    float(outcome[q, i] - outcome[q].mean() + 0.5 * (steps[t, q, i] - live.mean()))
                    if mask[t, q, i]
                    else 0.0
                )
                assert float(adv[t, q, i]) == pytest.approx(want, abs=1e-6)


def test_the_preference_of_pairs_is_its_formula_with_the_papers_beta():
    better, worse = torch.tensor([10.0, -4.0]), torch.tensor([2.0, 6.0])
    want = sum(np.log(1 + np.exp(-0.05 * d)) for d in (8.0, -10.0)) / 2
    assert float(losses.preference(better, worse)) == pytest.approx(want, rel=1e-6)


def test_only_starts_with_both_outcomes_make_pairs_and_learning_from_them_finds_the_preference():
    outcome = torch.tensor([[1.0, 0, 1], [1, 1, 1], [0, 0, 0]])
    pairs = losses.preference_pairs(outcome)
    assert pairs.tolist() == [[0, 1], [2, 1]]
    theta = torch.zeros(3, requires_grad=True)  # log ratios of three kinds of episode
    before = losses.preference(theta[pairs[:, 0]], theta[pairs[:, 1]], 1.0)
    for _ in range(50):
        loss = losses.preference(theta[pairs[:, 0]], theta[pairs[:, 1]], 1.0)
        theta = (theta - torch.autograd.grad(loss, theta)[0]).detach().requires_grad_()
    assert float(loss.detach()) < float(before.detach()) and float(before.detach()) == pytest.approx(
        np.log(2)
    )
    assert theta[0] > theta[1] < theta[2]


# ---- DPH-RL


@pytest.mark.parametrize("kind", ["forward_kl", "js", "alpha"])
def test_a_policy_that_did_not_change_has_no_divergence_and_no_gradient_in_expectation(kind):
    probs = torch.tensor([0.6, 0.3, 0.1])
    logits = probs.log().requires_grad_()
    samples = torch.repeat_interleave(torch.arange(3), (probs * 1000).round().int())
    value = losses.rehearsal(logits.log_softmax(0)[samples], probs.log()[samples], kind)
    assert value.abs() < 1e-6
    assert torch.autograd.grad(value, logits)[0].abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["forward_kl", "js", "alpha"])
def test_a_divergence_is_what_its_sum_over_outcomes_says_and_grows_with_the_distance(kind):
    p0, values = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), []
    samples = torch.repeat_interleave(torch.arange(3), (p0 * 1000).round().int())
    for shift in (0.0, 0.5, 1.0, 2.0):
        p = (p0.log() + shift * torch.tensor([1.0, 0, -1])).softmax(0)
        value = float(losses.rehearsal(p.log()[samples], p0.log()[samples], kind))
        m, a = (p + p0) / 2, 0.2
        want = {
            "forward_kl": (p0 * (p0 / p).log()).sum(),
            "js": (p * (p / m).log() + p0 * (p0 / m).log()).sum(),
            "alpha": ((p0**a * p ** (1 - a)).sum() - 1) / (a * (a - 1)),
        }[kind]
        assert value == pytest.approx(float(want), abs=1e-6)
        values.append(value)
    assert values == sorted(values) and values[0] == pytest.approx(0, abs=1e-9)


def test_unknown_divergences_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="forward_kl, js, alpha"):
        losses.rehearsal(torch.zeros(1), torch.zeros(1), "kl")
    with pytest.raises(ValueError, match="alpha must be"):
        losses.rehearsal(torch.zeros(1), torch.zeros(1), "alpha", 1.0)


# ---- POISE


def test_the_baseline_of_an_episode_does_not_depend_on_what_the_episode_did():
    torch.manual_seed(0)
    features, outcome = torch.randn(12, 4), torch.rand(6, 2)
    probe = CrossedBaseline()
    probe.advantage(features, outcome)
    state = probe.state_dict()
    first = outcome - probe.advantage(features, outcome)
    other = features.clone()
    other[::2] += torch.randn(6, 4)  # the first member of every group acts otherwise
    again = CrossedBaseline()
    again.load_state_dict(state)
    second = outcome - again.advantage(other, outcome)
    assert torch.allclose(first[:, 0], second[:, 0], atol=1e-6) and not torch.allclose(
        first[:, 1], second[:, 1], atol=1e-3
    )


def test_a_group_is_judged_by_a_probe_that_has_not_seen_it():
    features, outcome = torch.randn(8, 3), torch.rand(4, 2)
    assert torch.equal(CrossedBaseline().advantage(features, outcome), outcome)


def test_a_probe_without_information_is_reinforce_with_a_constant_baseline():
    probe = CrossedBaseline()
    probe.advantage(torch.ones(8, 3), torch.tensor([[1.0, 0.0]] * 4))
    outcome = torch.rand(4, 2)
    assert torch.allclose(probe.advantage(torch.ones(8, 3), outcome), outcome - 0.5)


def test_the_probe_lowers_the_variance_where_starts_differ_and_the_gradient_stays_unbiased():
    """A bandit: start s has success sigmoid(s) for action 1 and less for action 0; features show s with
    noise."""
    torch.manual_seed(0)
    probe, q = CrossedBaseline(), 4000
    theta, grads, plain = 0.3, [], []
    for _ in range(12):
        s = torch.randn(q, 1).expand(q, 2)
        p1 = torch.sigmoid(torch.tensor(theta))
        action = (torch.rand(q, 2) < p1).float()
        chance = torch.sigmoid(3 * s) * (0.5 + 0.5 * action)
        outcome = (torch.rand(q, 2) < chance).float()
        features = torch.stack([s + 0.1 * torch.randn(q, 2), action], -1).flatten(0, 1)
        adv = probe.advantage(features, outcome)
        score = action - p1
        grads.append(adv * score)
        plain.append((outcome - outcome.mean()) * score)
    true = float((torch.sigmoid(3 * torch.randn(400_000)) * 0.5).mean() * p1 * (1 - p1))
    g, h = torch.cat(grads[1:]), torch.cat(plain[1:])
    assert g.mean() == pytest.approx(true, abs=4 * float(g.std()) / g.numel() ** 0.5)
    assert g.var() < 0.75 * h.var()


def test_features_are_the_contexts_of_the_first_and_the_last_decision():
    context = torch.arange(24.0).view(4, 3, 2)
    mask = torch.tensor(
        [[True, True, True], [True, True, False], [True, False, False], [False, False, False]]
    )
    got = episode_features(context, mask)
    assert torch.equal(
        got, torch.cat([context[0], torch.stack([context[2, 0], context[1, 1], context[0, 2]])], 1)
    )
    assert mean_of_others(torch.tensor([[1.0, 2.0, 6.0]])).tolist() == [[4.0, 3.5, 1.5]]


# ---- in a learner


def learner_of(advantage, group, n):
    env = PointReach(n, limit=12)
    policy = make_policy(
        PolicyOptions(hidden=32, layers=2, horizon=4, execute=4), ObsSpec(state=4, action=2), 0
    )
    options = PiRlOptions(decisions=0, epochs=1, minibatch=256, gamma=0.95, advantage=advantage, group=group)
    return pi_rl.make(policy, options, 0), Collector(env, policy, 0.95, 0)


def some_rollout(learner, collector, group, success=0.5):
    starts = np.repeat(np.arange(collector.n // group), group)
    r = collector.episodes(learner.sampler, starts)
    outcome = (torch.rand(collector.n, generator=torch.Generator().manual_seed(1)) < success).float()
    return replace(r, outcome=outcome)


def test_the_median_member_and_flat_groups_are_left_out_of_an_update_and_ties_are_not():
    learner, collector = learner_of("mc_grpo", 5, 20)
    r = some_rollout(learner, collector, 5)
    r.outcome[:5] = 1.0
    adv, _, _, rows, metrics = learner.credit.assign(r, learner.policy)
    want, kept = median_advantage(r.outcome.view(-1, 5))
    trained = torch.zeros_like(r.mask).flatten()
    trained[rows] = True
    assert torch.equal(trained.view_as(r.mask), r.mask & kept.flatten()) and metrics["flat_groups"] == 0.25
    assert torch.equal(adv.view_as(r.mask)[0], want.flatten())
    assert learner.update(r, 0.0)["first_log_ratio"] < 1e-4


def test_poise_trains_on_flat_groups_too_and_its_probe_is_in_the_checkpoint():
    learner, collector = learner_of("poise", 2, 16)
    r = some_rollout(learner, collector, 2)
    r.outcome[:2] = 1.0
    learner.update(r, 0.0)
    again, _ = learner_of("poise", 2, 16)
    again.load_state_dict(learner.state_dict())
    again.policy.load_state_dict(learner.policy.state_dict())
    first, _, _, rows, _ = learner.credit.assign(r, learner.policy)
    second = again.credit.assign(r, again.policy)[0]
    assert torch.equal(first, second) and first.abs().max() > 0
    assert {0, 1} <= {int(x) for x in rows}  # the flat group's first decisions
