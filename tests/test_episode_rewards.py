"""Rewards and flaws of episodes: what is measured, what a group is compared by, and who is told what cannot
be."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import TINY, robo_rl
from toys import PointReach

from robo_rl.advantages import flawed_reward, gdpo, group_advantage
from robo_rl.algos import nft, pi_rl, ppo
from robo_rl.algos.episode_rewards import EpisodeRewards, change
from robo_rl.algos.foreign import side_by_side
from robo_rl.algos.rollout_replay import columns_of
from robo_rl.errors import UserError
from robo_rl.experiment import parallel
from robo_rl.experiment.config import TrainConfig
from robo_rl.options import NftOptions, PiRlOptions, PolicyOptions, PpoOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import Collector

GROUP = {"advantage": "grpo", "group": 4, "decisions": 0, "gamma": 0.95}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Slow(PointReach):
    """PointReach whose commands are written down."""

    def step(self, actions):
        self.commands.append((np.array(actions), ~self.over.copy() if hasattr(self, "over") else None))
        return super().step(actions)


def played(seed=0, n=16, kind="gaussian", limit=12, radius=0.6, execute=3, horizon=4):
    policy = make_policy(
        PolicyOptions(kind=kind, hidden=16, layers=2, horizon=horizon, execute=execute),
        ObsSpec(state=4, action=2),
        seed,
    )
    env = Slow(n, limit=limit, radius=radius)
    env.commands = []
    collector = Collector(env, policy, 0.95, seed)
    env.commands.clear()
    return policy, collector.episodes(policy, np.repeat(np.arange(n // 4), 4)), env


def test_steps_success_and_the_change_of_commands_are_those_of_the_episodes_that_were_played():
    policy, r, env = played()
    assert r.success.any() and not r.success.all() and len(set(r.lengths.tolist())) > 1
    assert torch.equal(r.success.float(), (r.outcome > 0).float()) and torch.equal(
        r.lengths, (r.executed * r.mask).sum(0)
    )
    got, commands = change(r, policy), np.stack([a for a, _ in env.commands]).clip(-1, 1)
    for i, length in enumerate(r.lengths.tolist()):
        want = np.abs(np.diff(commands[:length, i], axis=0)).mean() if length > 1 else 0.0
        assert float(got[i]) == pytest.approx(want, abs=1e-5)


def test_speed_and_smoothness_are_of_successes_alone_and_in_their_range():
    policy, r, _ = played()
    graded = EpisodeRewards(
        PpoOptions(**GROUP | {"advantage": "gdpo"}, rewards="success=1,speed=2,smooth=0.5,return=0.1"), policy
    )
    x, weights, told = graded.rewards(r, policy)
    assert weights.tolist() == pytest.approx([1.0, 2.0, 0.5, 0.1]) and x.shape == (16, 4)
    assert not x[~r.success, :3].any() and (x[:, :3] >= 0).all() and (x[:, :3] <= 1).all()
    assert torch.allclose(x[r.success, 1], 0.95 ** r.lengths[r.success].float()) and torch.equal(
        x[:, 3], r.outcome
    )
    assert told["reward_success"] == pytest.approx(float(r.success.float().mean())) and set(told) == {
        f"reward_{name}" for name in ("success", "speed", "smooth", "return")
    }


def learner_of(options, policy):
    return (
        ppo.make(policy, options, 0) if policy.options.kind == "gaussian" else pi_rl.make(policy, options, 0)
    )


@pytest.mark.parametrize("kind", ["gaussian", "flow"])
def test_gdpo_trains_on_groups_that_differ_in_any_reward_and_on_no_other(kind):
    policy, r, _ = played(kind=kind)
    options = (PpoOptions if kind == "gaussian" else PiRlOptions)(
        **GROUP | {"advantage": "gdpo"}, rewards="success=1,smooth=0.5"
    )
    r.success[:4], r.success[4:8] = True, False  # a group alike in success alone, and one alike in all
    learner = learner_of(options, policy)
    adv, _, _, rows, told = learner.credit.assign(r, policy)
    x, weights, _ = learner.credit.rewards.rewards(r, policy)
    want, kept = gdpo(x.view(4, 4, 2), weights)
    assert torch.equal(adv.view_as(r.mask)[0], want.flatten()) and kept.any(1).tolist() == [
        True,
        False,
        True,
        True,
    ]
    trained = torch.zeros_like(r.mask).flatten()
    trained[rows] = True
    assert torch.equal(trained.view_as(r.mask), r.mask & kept.flatten())
    assert learner.update(r, 0.0)["first_log_ratio"] < 2e-5 and "reward_smooth" in told


def test_a_method_without_a_ratio_learns_from_several_rewards_too():
    policy, r, _ = played(kind="flow")
    learner = nft.make(policy, NftOptions(**GROUP | {"advantage": "gdpo"}), 0)
    told = learner.update(replace(r), 0.5)
    assert np.isfinite(list(told.values())).all() and told["policy_loss"] != 0 and "reward_speed" in told


def test_one_reward_of_gdpo_is_grpo_up_to_the_scale_of_the_batch():
    policy, r, _ = played()
    one = learner_of(PpoOptions(**GROUP | {"advantage": "gdpo"}, rewards="return=3"), policy).credit.assign(
        r, policy
    )[0]
    plain = learner_of(PpoOptions(**GROUP), policy).credit.assign(r, policy)[0]
    live = plain != 0
    scale = one[live] / plain[live]
    assert live.any() and not one[~live].any() and torch.allclose(scale, scale[0].expand_as(scale), rtol=1e-2)


def test_successes_beyond_a_bound_are_flawed_and_count_less_and_without_a_penalty_as_clean_ones():
    policy, r, _ = played()
    bound = int(r.lengths[r.success].float().median())
    flawed = r.success & (r.lengths > bound)
    assert flawed.any()
    for penalty in (1.0, 0.0):
        learner = learner_of(PpoOptions(**GROUP, flawed=f"steps={bound}", flaw_penalty=penalty), policy)
        adv, *_, told = learner.credit.assign(r, policy)
        want = group_advantage(flawed_reward(r.success.float(), flawed, penalty).view(4, 4))
        assert torch.equal(adv.view_as(r.mask)[0], want.flatten())
        assert told["flawed"] == pytest.approx(float(flawed.sum() / r.success.sum()))
    clean = learner_of(PpoOptions(**GROUP), policy).credit.assign(
        replace(r, outcome=r.success.float() * 2 - 1), policy
    )[0]
    assert torch.equal(adv, clean)  # penalty 0 is plain


def far(rollout, policy):
    """Largest distance of the first state."""
    return rollout.obs["state"][0].abs().max(-1).values


def test_a_function_of_the_users_own_is_a_reward_or_a_measure(monkeypatch):
    policy, r, _ = played()
    graded = EpisodeRewards(PpoOptions(**GROUP | {"advantage": "gdpo"}, rewards=f"{__name__}:far=2"), policy)
    assert torch.equal(graded.rewards(r, policy)[0][:, 0], far(r, policy))
    bounded = EpisodeRewards(PpoOptions(**GROUP, flawed=f"{__name__}:far=0.5,steps=1000"), policy)
    want = flawed_reward(r.success.float(), r.success & (far(r, policy) > 0.5))
    assert torch.equal(bounded.outcome(r, policy)[0], want)


def wrong(rollout, policy):
    return WRONG[0](rollout)


WRONG = []


@pytest.mark.parametrize(
    ("gives", "got"),
    [
        (lambda r: 1.0, "got float"),
        (lambda r: r.outcome[:3], r"shape \(3,\)"),
        (lambda r: r.mask.float(), "shape"),
        (lambda r: r.outcome / 0, "finite numbers"),
    ],
    ids=["a number", "too few", "of decisions", "not finite"],
)
def test_a_function_of_the_users_own_that_gives_no_number_for_each_episode_is_one_line(gives, got):
    policy, r, _ = played()
    WRONG[:] = [gives]
    graded = EpisodeRewards(
        PpoOptions(**GROUP | {"advantage": "gdpo"}, rewards=f"{__name__}:wrong=1"), policy
    )
    with pytest.raises(UserError, match=rf"wrong must give a tensor.*{got}"):
        graded.rewards(r, policy)


def test_success_and_length_go_with_the_columns_that_are_replayed():
    _, r, _ = played()
    both = side_by_side(r, columns_of(r, torch.tensor([7, 2])))
    assert (
        both.success[-2:].tolist() == r.success[[7, 2]].tolist()
        and both.lengths[-2:].tolist() == r.lengths[[7, 2]].tolist()
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rewards": "sucess=1", "advantage": "gdpo"}, "did you mean 'success'"),
        ({"rewards": "success"}, "NAME=NUMBER"),
        ({"rewards": ""}, "must name a reward"),
        ({"rewards": "success=0"}, "must name a reward"),
        ({"flawed": "steps=soon"}, "NAME=NUMBER"),
        ({"flawed": "steps=nan"}, "NAME=NUMBER"),
        ({"flawed": "steps=9", "advantage": "gae", "decisions": 8}, "goes with rl.advantage grpo"),
        ({"flawed": "steps=9", "allocate": "refill"}, "without rl.allocate"),
        ({"flawed": "speed=9"}, "unknown name in rl.flawed"),
        ({"flawed": "steps=9", "flaw_penalty": 3.0}, "flaw_penalty"),
    ],
    ids=str,
)
def test_rewards_that_make_no_sense_are_refused_with_the_remedy(options, words):
    with pytest.raises(UserError, match=words):
        PpoOptions(**GROUP | options)


def test_runs_that_cannot_know_the_rewards_are_told(tmp_path):
    for options, run in (
        ({"flawed": "steps=9"}, {"share": "x"}),
        ({"advantage": "gdpo"}, {"share": "x"}),
        ({"advantage": "gdpo", "epochs": 1}, {"periodic": 2}),
    ):
        with pytest.raises(UserError, match="--rl.advantage gdpo goes without --periodic"):
            parallel.check(
                TrainConfig(
                    task="reach",
                    algo="ppo",
                    rl=PpoOptions(**GROUP | options),
                    workers=0,
                    max_staleness=0,
                    **run,
                )
            )
    late = make_policy(
        PolicyOptions(hidden=16, layers=2, horizon=8, execute=4, commit=2, commit_least=1),
        ObsSpec(state=4, action=2),
        0,
    )
    with pytest.raises(UserError, match="without --latency"):
        EpisodeRewards(PpoOptions(**GROUP, flawed="change=0.3"), late)
    argv = (
        *TINY,
        "--algo",
        "ppo",
        "--rl.advantage",
        "gdpo",
        "--rl.decisions",
        "0",
        "--rl.rewards",
        "nowhere:energy=1",
    )
    assert "there is no module 'nowhere'" in robo_rl(tmp_path, "train", *argv).mistake
