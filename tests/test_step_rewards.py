"""Rewards of decisions from preferences: nothing where nothing was learnt, the exact gradient in pieces, and
a state that goes on."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_algos import METHODS
from test_corrections import make, weights
from toys import PointReach

from robo_rl import checkpoint, losses
from robo_rl.advantages import group_advantage
from robo_rl.algos import step_rewards
from robo_rl.algos.step_rewards import StepRewards
from robo_rl.errors import UserError
from robo_rl.experiment import parallel
from robo_rl.experiment.config import TrainConfig
from robo_rl.options import NftOptions, PpoOptions
from robo_rl.rollout import Collector

NAMES = [m for m in METHODS if not m.startswith("nft")]
ISTAR = {"advantage": "istar", "decisions": 0, "group": 4, "istar_lr": 1e-3}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def rollout(learner, version=0, n=16):
    collector = Collector(PointReach(n, limit=12, radius=0.6), learner.policy, 0.95, version)
    r = collector.episodes(learner.policy, np.repeat(np.arange(n // 4), 4), version=version)
    return replace(r, outcome=(torch.rand(n, generator=torch.Generator().manual_seed(version)) < 0.5).float())


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_that_has_learnt_nothing_gives_no_rewards_and_leaves_the_advantage_of_the_episode(name):
    learner = make(name, **ISTAR)
    r = rollout(learner)
    assert learner.step_rewards.log_ratio(r).abs().max() < 1e-4
    flat = replace(r, outcome=torch.ones(16))
    adv, _, _, rows, told = learner.credit.assign(flat, learner.policy)
    assert told["preference_pairs"] == 0 and adv.abs().max() < 1e-5
    learner.step_rewards.learn = lambda r, pairs: torch.zeros(())
    adv = learner.credit.assign(r, learner.policy)[0].view_as(r.mask)
    assert torch.allclose(
        adv, group_advantage(r.outcome.view(-1, 4), "dr_grpo").flatten() * r.mask, atol=1e-4
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_in_pieces_is_that_of_the_whole_loss(name, monkeypatch):
    learner = make(name, **ISTAR)
    r, own = rollout(learner), learner.step_rewards
    with torch.no_grad():
        for p in own.params:
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    pairs = losses.preference_pairs(r.outcome.view(-1, 4))
    whole = copy.deepcopy(own)
    rows = r.mask.flatten().nonzero().squeeze(1)
    log_ratio = torch.zeros(r.mask.numel()).index_put(
        (rows,),
        whole.score(r, rows) - step_rewards.density_scale(own.phi) * r.logp.flatten(0, 1).sum(-1)[rows],
    )
    x = log_ratio.view_as(r.mask).sum(0)
    want = torch.autograd.grad(
        losses.preference(x[pairs[:, 0]], x[pairs[:, 1]], own.beta), whole.params, allow_unused=True
    )
    monkeypatch.setattr(step_rewards, "SIZE", 7)
    monkeypatch.setattr(step_rewards, "step_along", lambda *_, **__: None)
    own.learn(r, pairs)
    for p, g in zip(own.params, want, strict=True):
        assert (p.grad is None and g is None) or torch.allclose(p.grad, g, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_the_advantage_of_decisions_counts_as_much_as_alpha_says(alpha):
    learner = make("ppo", **ISTAR | {"istar_alpha": alpha})
    r, own = rollout(learner), learner.step_rewards
    with torch.no_grad():
        own.params[0].mul_(1.1)
    own.learn = lambda r, pairs: torch.zeros(())
    adv = learner.credit.assign(r, learner.policy)[0].view_as(r.mask)
    rewards = (own.beta * own.log_ratio(r)).view(-1, 4, 4)
    live = r.mask.view(-1, 4, 4)
    step = rewards - torch.stack([rewards[:, q][live[:, q]].mean() for q in range(4)])[None, :, None]
    episode = group_advantage(r.outcome.view(-1, 4), "dr_grpo")
    assert step[live].std() > 1e-3 and torch.allclose(
        adv.view_as(rewards), (episode + alpha * step) * live, atol=1e-5
    )


def test_what_better_episodes_did_earns_more_once_it_was_learnt_and_the_rewards_add_up_to_the_log_ratio():
    learner = make("ppo", **ISTAR | {"istar_beta": 1.0})
    r, own = rollout(learner), learner.step_rewards
    outcome = r.outcome.view(-1, 4)
    first = own(r, outcome)[1]["preference_loss"]
    for _ in range(30):
        rewards, told = own(r, outcome)
    assert first == pytest.approx(np.log(2), abs=1e-4) and told["preference_loss"] < 0.8 * first
    assert torch.allclose(rewards.sum(0), own.log_ratio(r).sum(0), atol=1e-4) and not rewards[~r.mask].any()
    mixed = (outcome != outcome[:, :1]).any(1).repeat_interleave(4)
    assert rewards.sum(0)[mixed & (r.outcome > 0)].mean() > rewards.sum(0)[mixed & (r.outcome == 0)].mean()


@pytest.mark.parametrize("name", NAMES)
def test_an_update_has_ratio_one_and_goes_on_bit_for_bit_from_a_checkpoint(name, tmp_path):
    def run(folder):
        learner = make(name, **ISTAR)
        for v in range(3):
            if folder and v == 2:
                checkpoint.save_checkpoint(
                    folder / "c", learner.policy, {"learner": learner.state_dict()}, {"step": v}
                )
                learner = make(name, seed=5, **ISTAR)
                learner.policy.load_state_dict(checkpoint.load_policy(folder / "c")[0].state_dict())
                learner.load_state_dict(checkpoint.load_train(folder / "c")[0]["learner"])
            told = learner.update(rollout(learner, v), 0.5, version=v)
            assert told["first_log_ratio"] < 2e-5
        return torch.cat([weights(learner), *(p.detach().flatten() for p in learner.step_rewards.params)])

    assert torch.equal(run(None), run(tmp_path))


def test_the_second_policy_learns_what_the_first_may_learn():
    learner = make("ppo", **ISTAR, freeze_trunk=True)
    assert isinstance(learner.step_rewards, StepRewards) and len(learner.step_rewards.params) == len(
        learner.actor_params
    )


def test_runs_that_cannot_have_it_are_told_why():
    with pytest.raises(UserError, match="likelihood"):
        NftOptions(**ISTAR)
    with pytest.raises(UserError, match="goes with rl.advantage"):
        PpoOptions(**ISTAR, allocate="refill")
    for run in ({"periodic": 2}, {"learners": 2}, {"share": "x"}):
        with pytest.raises(UserError, match="a second policy"):
            parallel.check(
                TrainConfig(
                    task="reach",
                    algo="ppo",
                    rl=PpoOptions(**ISTAR, epochs=1),
                    workers=0,
                    max_staleness=0,
                    **run,
                )
            )
