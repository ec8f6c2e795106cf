"""What on-policy methods use again: each in its special case and at its bounds."""

import math

import pytest
import torch

from robo_rl import losses
from robo_rl.rollout_control import onpolicy_replay as rep


def test_a_batch_has_the_fresh_groups_and_distinct_old_ones_as_they_were_and_none_too_old():
    replay, groups = rep.RolloutReplay(capacity=12, fresh=0.5, most_age=3, seed=1), {}
    for version in range(8):
        fresh = [{"id": 4 * version + i, "logp": torch.randn(3)} for i in range(replay.fresh_of(8))]
        groups |= {g["id"]: g["logp"].clone() for g in fresh}
        batch = replay.compose(fresh, version, 8)
        assert batch[:4] == fresh and len({g["id"] for g in batch}) == len(batch) == (4 if version == 0 else 8)
        assert all(torch.equal(g["logp"], groups[g["id"]]) for g in batch)
        assert all(version - g["id"] // 4 <= 3 for g in batch) and len(replay.groups) <= 12


def test_replay_goes_on_exactly_from_its_state_and_with_all_fresh_it_replays_nothing():
    a, b = rep.RolloutReplay(fresh=0.25, seed=3), rep.RolloutReplay(fresh=0.25, seed=3)
    for v in range(3):
        a.compose([10 * v, 10 * v + 1], v, 8)
    b.load_state_dict(a.state_dict())
    assert a.compose([90, 91], 3, 8) == b.compose([90, 91], 3, 8)
    whole = rep.RolloutReplay(fresh=1.0)
    whole.compose([1, 2], 0, 2)
    assert whole.fresh_of(2) == 2 and whole.compose([3, 4], 1, 2) == [3, 4]


def test_every_old_group_is_as_likely_to_come_back():
    replay, seen = rep.RolloutReplay(seed=0), torch.zeros(20)
    replay.compose(list(range(20)), 0, 20)
    for _ in range(400):
        for g in replay.compose([], 1, 5):
            seen[g] += 1
    assert seen.sum() == 2000 and seen.min() > 60 and seen.max() < 145


def test_remix_without_lag_is_ppo_and_its_band_follows_the_policy_before():
    torch.manual_seed(0)
    behave, adv = torch.randn(64), torch.randn(64)
    logp = (behave + 0.3 * torch.randn(64)).requires_grad_()
    ours, ppo = rep.remix_loss(logp, behave, behave, adv), losses.ppo(logp, behave, adv, 0.2, 0.2)[0]
    assert torch.allclose(ours, ppo)
    assert torch.allclose(torch.autograd.grad(ours, logp)[0], torch.autograd.grad(ppo, logp)[0])
    before = behave + 0.5  # the policy that begins the update is no longer the one that acted: its ratio is 1.65
    at = before.clone().requires_grad_()
    rep.remix_loss(at, behave, before, torch.ones(64)).backward()
    assert (at.grad != 0).all()  # nothing is clipped where the update begins, though the ratio is beyond 1.2
    far = (before + 0.2).clone().requires_grad_()  # ratio 2.01, the band ends at 1.85
    rep.remix_loss(far, behave, before, torch.ones(64)).backward()
    assert not far.grad.any()


def test_remixs_share_of_the_base_policys_kl_falls_as_stated():
    assert [rep.remix_share(s) for s in (0, 50, 51, 60, 61, 90, 100, 999)] == pytest.approx([1, 1, 0.9, 0.9, 0.8, 0.6, 0.5, 0.5])
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    assert torch.equal(rep.remix_kl(a, b, 0), a) and torch.allclose(rep.remix_kl(a, b, 999), (a + b) / 2)


def test_remix_mixes_old_batches_with_its_probability_until_it_is_reincarnated_once():
    mixed = rep.ReMix(until=2000, seed=5)
    lags = torch.tensor([mixed.lag(s) for s in range(2000)])
    assert abs((lags > 0).float().mean() - 0.4) < 0.04 and abs((lags == 1).float().mean() - (lags == 2).float().mean()) < 0.04
    assert set(lags.tolist()) == {0, 1, 2} and mixed.updates(1999) == 2
    assert not any(mixed.lag(s) for s in range(2000, 2200)) and mixed.updates(2000) == 1
    assert [mixed.reincarnate(s) for s in (1999, 2000, 2001)] == [False, True, False]
    assert not any(rep.ReMix(p=0.0).lag(s) for s in range(50))


def test_pears_weights_are_one_where_the_policies_agree_and_the_loss_is_then_the_plain_one():
    torch.manual_seed(0)
    logp, mask = torch.randn(7, 3), torch.arange(7)[:, None] < torch.tensor([7, 4, 1])
    for kind in ("suffix", "sequence"):
        w = rep.pear_weights(logp, logp, mask, kind, gamma=1.0)
        assert torch.equal(w, mask.float())
        loss = torch.rand(7, 3)
        assert torch.allclose(rep.pear_loss(loss, w, mask), loss[mask].mean())
    assert torch.allclose(rep.pear_weights(logp, logp, mask)[:4, 1], 0.999 ** torch.tensor([3.0, 2.0, 1.0, 0.0]))


def test_pears_weights_are_the_product_of_what_follows_clipped_and_carry_no_gradient():
    torch.manual_seed(1)
    logp, demo = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    mask = torch.arange(6)[:, None] < torch.tensor([6, 3, 5, 1])
    w = rep.pear_weights(logp, demo, mask)
    d = (logp - demo).detach().clamp(-0.08, 0.3)
    for n, last in enumerate((6, 3, 5, 1)):
        for t in range(last):
            want = 0.999 ** (last - 1 - t) * math.exp(float(d[t + 1:last, n].sum()))
            assert float(w[t, n]) == pytest.approx(min(max(want, 0.1), 10), rel=1e-5)
    assert not w.requires_grad and not w[~mask].any()
    long = rep.pear_weights(torch.full((60, 1), 9.0), torch.zeros(60, 1), torch.ones(60, 1, dtype=torch.bool), "sequence")
    assert (long == 10).all() and (rep.pear_weights(torch.full((60, 1), -9.0), torch.zeros(60, 1), torch.ones(60, 1, dtype=torch.bool),
                                                    "sequence") == 0.1).all()
    with pytest.raises(ValueError, match="suffix or sequence"):
        rep.pear_weights(logp, demo, mask, "token")


def test_spark_ranks_within_a_group_alone_and_its_gradient_raises_winners_over_losers():
    success, group = torch.tensor([True, False, False, True]), torch.tensor([0, 0, 0, 1])
    assert rep.spark_pairs(success, group).tolist() == [[0, 1], [0, 2]]
    z = torch.zeros(4, requires_grad=True)
    loss, told = rep.spark_loss(z, success, group)
    assert float(told["judge_point"]) == pytest.approx(math.log(2)) == pytest.approx(float(told["judge_rank"]))
    loss.backward()
    assert (z.grad[success] < 0).all() and (z.grad[~success] > 0).all() and z.grad[0] < z.grad[3]
    plain = torch.nn.functional.binary_cross_entropy_with_logits(z.detach(), success.float())
    assert torch.equal(rep.spark_loss(z.detach(), success, group, 0.0)[0], plain)
    alone = torch.zeros(2, requires_grad=True)
    rep.spark_loss(alone, torch.tensor([True, True]), torch.tensor([0, 0]))[0].backward()
    assert alone.grad.isfinite().all()


def test_the_bound_on_staleness_steps_down_once_the_samples_stop_counting_and_never_below_its_floor():
    guard, bound, seen = rep.EssGuard(patience=3), 3, []
    for ess in (0.05, 0.05, 0.2, 0.05, 0.05, 0.05, 0.05, math.nan, 0.0, 0.0, 0.0, 0.0):
        bound = guard.observe(ess, bound)
        seen.append(bound)
    assert seen == [3, 3, 3, 3, 3, 2, 2, 2, 1, 1, 1, 1]
    assert guard.observe(None, 1) == 1 and guard.low == 0
    other = rep.EssGuard(patience=3)
    other.observe(0.01, 2)
    other.observe(0.01, 2)
    copy = rep.EssGuard(patience=3)
    copy.load_state_dict(other.state_dict())
    assert copy.observe(0.01, 2) == 1
