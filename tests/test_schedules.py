"""What moves with `progress`: whatever a log-prob depends on belongs to the version of the weights that
acted."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from test_algos import METHODS, step
from test_corrections import RATIO_METHODS, collect, collector_of, make, weights

from robo_rl import checkpoint
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.sft import first_policy
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy

PROGRESS = (0.0, 0.4, 0.6, 0.8, 1.0)
MOVING = {"anneal_lr": True, "normalise_obs": True, "epochs": 1, "minibatch": 256}
ROUNDING = 2e-5  # of a float32 log-density made in two orders of summation


@pytest.mark.parametrize("name", RATIO_METHODS)
def test_the_ratio_is_one_at_the_first_minibatch_of_every_update_while_progress_moves(name):
    learner = make(name, **MOVING, **{"w2_coef": 0.1} if name == "reinflow" else {})
    collector, before = collector_of(learner), weights(learner)
    for version, progress in enumerate(PROGRESS):
        rollout = collect(collector, learner, version, seed=version)
        metrics = learner.update(rollout, progress, version)
        learner.after_collect(rollout)
        assert metrics["first_log_ratio"] < ROUNDING, (progress, metrics["first_log_ratio"])
        assert progress == 1.0 or not torch.equal(before, weights(learner))
        before = weights(learner)


@pytest.mark.parametrize("name", RATIO_METHODS)
def test_data_of_an_older_version_is_scored_under_the_bounds_of_its_own_version(name):
    learner = make(name, proximal="snapshot", **MOVING)
    collector = collector_of(learner)
    old = copy.deepcopy(collect(collector, learner, 0))
    for version, progress in enumerate(PROGRESS[1:4]):
        rollout = collect(collector, learner, version, seed=version + 1)
        learner.update(copy.deepcopy(rollout), progress, version)
        learner.after_collect(rollout)
    metrics = learner.update(old, PROGRESS[4], 3)
    assert metrics["staleness_max"] == 3 and metrics["is_logratio_absmax"] < 10 * ROUNDING
    assert metrics["ess_frac"] > 0.9999


@pytest.mark.parametrize("name", RATIO_METHODS)
def test_a_batch_that_comes_in_pieces_is_scored_under_the_bound_it_was_acted_with(name):
    learner = make(name, advantage="grpo")
    collector = collector_of(learner)
    for version, progress in enumerate(PROGRESS):
        pieces = [collect(collector, learner, version, seed=2 * version + i) for i in range(2)]
        assert learner.accumulate(pieces, progress)["first_log_ratio"] < ROUNDING


def test_reinflows_bound_moves_after_the_update_and_is_published_and_saved_with_the_weights(tmp_path):
    learner = make("reinflow", **MOVING)
    collector, high = collector_of(learner), learner.policy.noise.high
    assert float(high) == pytest.approx(0.3)
    seen, loss = [], learner.actor_loss
    learner.actor_loss = lambda *a: seen.append(float(high)) or loss(*a)
    learner.update(collect(collector, learner, 0), 1.0, 0)
    assert set(seen) == {float(torch.tensor(0.3))} and float(high) == pytest.approx(0.3 * 0.7)
    checkpoint.save_checkpoint(tmp_path / "c", learner.policy, {}, {"step": 1})
    again, _ = checkpoint.load_policy(tmp_path / "c")
    assert torch.equal(again.noise.high, high) and again.noise_scale == learner.policy.noise_scale


def test_an_update_without_rows_moves_the_bound_too():
    learner = make("reinflow", advantage="grpo")
    rollout = collect(collector_of(learner), learner, 0)
    rollout.outcome[:] = 1.0  # every group is flat
    assert learner.update(rollout, 1.0)["skipped"] == 1.0
    assert float(learner.policy.noise.high) == pytest.approx(0.21)
    learner.policy.noise.high.fill_(0.3)
    assert learner.accumulate([rollout], 1.0)["skipped"] == 1.0
    assert float(learner.policy.noise.high) == pytest.approx(0.21)


def test_an_average_of_weights_carries_the_bound_and_the_statistics_of_its_versions():
    learner = make("reinflow", proximal="ewma", **MOVING)
    collector, stale = collector_of(learner), []
    for version, progress in enumerate(PROGRESS):
        rollout = collect(collector, learner, version, seed=version)
        stale.append(copy.deepcopy(rollout))
        learner.update(stale[max(0, version - 2)], progress, version)
        learner.after_collect(rollout)
    mean = learner.corrector.average.mean
    assert 0.21 < float(mean["noise.high"]) < 0.3
    assert {k for k, v in learner.policy.state_dict().items() if v.is_floating_point()} == {*mean}


def test_reinflow_with_its_distance_to_the_old_policy_resumes_bit_for_bit(tmp_path):
    # at the first minibatch of an update that distance is 0
    small = MOVING | {"w2_coef": 0.5, "minibatch": 64}

    def run(folder):
        learner = make("reinflow", **small)
        collector = collector_of(learner)
        for version, progress in enumerate(PROGRESS):
            if folder and version == 2:
                state = {"learner": learner.state_dict(), "collector": collector.state()}
                checkpoint.save_checkpoint(folder / "c", learner.policy, state, {"step": 2})
                learner = make("reinflow", seed=7, **small)
                collector = collector_of(learner, seed=7)
                learner.policy.load_state_dict(checkpoint.load_policy(folder / "c")[0].state_dict())
                state, _ = checkpoint.load_train(folder / "c")
                learner.load_state_dict(state["learner"])
                collector.set_state(state["collector"])
            rollout = collect(collector, learner, version)
            learner.update(rollout, progress, version)
            learner.after_collect(rollout)
        return weights(learner)

    assert torch.equal(run(None), run(tmp_path))


def test_nft_learns_against_the_very_weights_that_acted_while_they_move():
    policy_options, options = METHODS["nft"]
    from robo_rl.algos import nft

    learner = nft.make(
        make_policy(policy_options, ObsSpec(state=4, action=2), 0), replace(options, critic_warmup=0), 0
    )
    collector, rng, used = collector_of(learner), np.random.default_rng(0), []
    velocity = learner.old.velocity
    learner.old.velocity = lambda *a: used.append(copy.deepcopy(learner.old.state_dict())) or velocity(*a)
    for progress in PROGRESS[:3]:
        acted = copy.deepcopy(learner.sampler.state_dict())
        used.clear()
        step(None, learner, collector, replace(options, epochs=1), rng, progress)
        assert used and all(torch.equal(u[k], acted[k]) for u in used for k in acted)
        assert not torch.equal(acted["head.out.weight"], learner.sampler.head.out.weight)


class PointSpace:
    """What `first_policy` asks of an env."""

    single_observation_space = Dict(state=Box(-1, 1, (4,)))
    single_action_space = Box(-1, 1, (2,))

    class spec:
        views, action_names, task = (), ("x", "y"), "reach"


def begun_with(old, folder, **options):
    """The first policy of a run with --init `old`."""
    checkpoint.save_checkpoint(folder / "c", old, {}, {"step": 1})
    config = TrainConfig(init=str(folder / "c"), policy=replace(old.options, **options))
    return first_policy(config, PointSpace)


def test_a_run_that_begins_with_an_old_policy_explores_within_its_own_bounds(tmp_path):
    options = PolicyOptions(noise="learned", noise_steps="all", noise_max=0.3, hidden=16, layers=2)
    spec = ObsSpec(state=4, action=2, action_names=("x", "y"))
    old = make_policy(options, spec, 0)
    old.noise.high.fill_(0.21)  # the end of a run
    new = begun_with(old, tmp_path, noise_max=0.16)
    assert float(new.noise.high) == pytest.approx(0.16)
    assert torch.equal(new.head.out.weight, old.head.out.weight)


def test_a_diffusion_whose_early_steps_are_frozen_from_now_on_begins_as_the_policy_that_it_is_given(tmp_path):
    """The frozen base of the early steps is the old head: a fresh one would undo the policy."""
    options = PolicyOptions(kind="diffusion", denoise_steps=4, finetune_steps=4, hidden=16, layers=2)
    old = make_policy(options, ObsSpec(state=4, action=2, action_names=("x", "y")), 3)
    new = begun_with(old, tmp_path, finetune_steps=1)
    obs = {"state": torch.randn(3, 4)}
    a, b = (p.act(obs, torch.Generator().manual_seed(0), explore=False).x0 for p in (old, new))
    assert torch.equal(a, b)
