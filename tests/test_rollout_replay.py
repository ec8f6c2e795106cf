"""Rollouts of earlier updates in an update: they come back bit for bit, in their share, no older than they
may be, and are told apart."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import TINY, robo_rl
from test_algos import METHODS, demonstrations
from test_corrections import collector_of, learn, make, weights

from robo_rl import checkpoint
from robo_rl.algos.foreign import side_by_side
from robo_rl.algos.rollout_replay import OVER_TIME, RolloutReplay, columns_of
from robo_rl.errors import UserError
from robo_rl.experiment import parallel
from robo_rl.experiment.config import TrainConfig
from robo_rl.options import CORRECTIONS, PpoOptions

NAMES = ["ppo", "pi_rl sde grpo", "pi_rl noise", "dppo", "reinflow"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def collect(collector, learner, version, seed=0):
    """A rollout whose groups, of an untrained policy, are not flat."""
    o, n = learner.options, collector.n
    if o.advantage == "gae":
        return collector.collect(learner.sampler, o.decisions, version=version)
    rng = np.random.default_rng(seed)
    r = collector.episodes(
        learner.sampler, np.repeat(rng.integers(0, 2**31, n // o.group), o.group), version=version
    )
    return replace(r, outcome=torch.from_numpy(rng.random(n).astype(np.float32)))


def rollouts(name, count, **kw):
    """So many rollouts of a learner that does not move, each of a version of its own."""
    learner = make(name, **kw)
    collector = collector_of(learner)
    return learner, [
        columns_of(collect(collector, learner, v, seed=v), torch.arange(16)) for v in range(count)
    ]


def same(a, b, at):
    """Whether the last columns of rollout a are the columns `at` of b, which may be shorter."""
    t, n = len(b.mask), len(at)
    for field in OVER_TIME:
        x, y = getattr(a, field), getattr(b, field)
        pairs = [(x[k], y[k]) for k in y] if isinstance(y, dict) else [(x, y)]
        assert all(torch.equal(p[:t, -n:], q[:, at]) for p, q in pairs), field
    ended_a, ended_b = a.done.nonzero(), b.done.nonzero()
    for k in b.final_obs:
        first = {tuple(e): v for e, v in zip(ended_a.tolist(), a.final_obs[k], strict=True)}
        for (s, i), v in zip(ended_b.tolist(), b.final_obs[k], strict=True):
            if i in at:
                assert torch.equal(first[s, a.mask.shape[1] - n + at.index(i)], v)
        assert torch.equal(a.last_obs[k][-n:], b.last_obs[k][at])
    assert torch.equal(a.outcome[-n:], b.outcome[at]) and not a.mask[t:, -n:].any()


@pytest.mark.parametrize("name", ["ppo", "pi_rl sde grpo"])
def test_what_is_replayed_is_bit_for_bit_what_was_played(name):
    _, (old, new) = rollouts(name, 2)
    at = [9, 2, 3, 15]
    picked = columns_of(old, torch.tensor(at))
    same(picked, old, at)
    longer = replace(
        new,
        **{k: getattr(new, k)[:2] for k in OVER_TIME if not isinstance(getattr(new, k), dict)},
        obs={k: v[:2] for k, v in new.obs.items()},
        trace={k: v[:2] for k, v in new.trace.items()},
        final_obs={k: v[: len(new.done[:2].nonzero())] for k, v in new.final_obs.items()},
    )
    # groups are whole episodes of any length
    both = side_by_side(longer, picked) if name != "ppo" else side_by_side(new, picked)
    same(both, old, at)


def test_a_batch_has_all_that_is_fresh_and_its_share_of_distinct_old_groups_none_too_old():
    _, made = rollouts("pi_rl sde grpo", 7)
    replay = RolloutReplay(0.6, 2, 8, seed=1)
    for v, r in enumerate(made):
        batch = replay.compose(r, v)
        assert torch.equal(batch.logp[: len(r.logp), batch.fresh], r.logp)
        want = min(3, 2 * min(v, 2))  # 2 fresh groups, 3 of 5 replayed, 4 are kept
        assert batch.replayed == 8 * want and (v == 0 or batch.version[0, 16:].min() >= v - 2)
        keys = batch.outcome.view(-1, 8)[:, 0].tolist()
        assert len(set(keys)) == len(keys)
    assert made[0].replayed == 0


def test_after_its_end_nothing_is_replayed_and_nothing_is_kept():
    learner, made = rollouts("ppo", 4, replay=0.5, replay_stop=2, correction="remix")
    replayed = [learner.replay.compose(r, v).replayed for v, r in enumerate(made)]
    assert replayed[1] > 0 == replayed[0] == replayed[2] == replayed[3] and not learner.replay.kept


def test_every_old_column_is_as_likely_to_come_back_and_the_draw_follows_from_seed_and_update():
    _, made = rollouts("ppo", 1)
    replay, count = RolloutReplay(0.5, 4, 1, seed=0), torch.zeros(4)
    few = columns_of(made[0], torch.arange(4))
    few.outcome = torch.arange(4.0)
    for _ in range(4):
        replay.keep(few)
    for update in range(300):
        batch = replay.compose(few, update)
        assert batch.replayed == 4
        count += torch.bincount(batch.outcome[4:].long(), minlength=4)
    assert count.sum() == 1200 and count.min() > 250 and count.max() < 350
    again = RolloutReplay(0.5, 4, 1, seed=0)
    again.load_state_dict(replay.state_dict())
    assert torch.equal(again.compose(few, 7).logp, replay.compose(few, 7).logp)


def test_groups_whose_outcomes_are_alike_are_not_kept():
    _, (r, other) = rollouts("pi_rl sde grpo", 2)
    r.outcome[:8] = 1.0
    replay = RolloutReplay(0.5, 4, 8, seed=0)
    assert replay.compose(r, 0) is r
    assert replay.compose(other, 1).replayed == 8


@pytest.mark.parametrize(
    "options",
    [{"advantage": "gdpo"}, {"advantage": "grpo", "flawed": "steps=9"}, {"advantage": "grpo"}],
    ids=str,
)
def test_groups_alike_in_their_return_are_kept_where_another_reward_may_tell_them_apart(options):
    learner, (r,) = rollouts("pi_rl sde grpo", 1, **options)
    r.outcome[:] = 1.0
    learner.replay.group, learner.replay.share = 8, 0.5
    learner.replay.compose(r, 0)
    assert learner.replay.kept[0].mask.shape[1] == (0 if options == {"advantage": "grpo"} else 16)


@pytest.mark.parametrize("correction", [c for c in CORRECTIONS if c not in ("none", "vtrace")])
@pytest.mark.parametrize("name", NAMES)
def test_fresh_rows_have_ratio_one_and_replayed_ones_are_told_apart(name, correction):
    clip = {} if name == "dppo" else {"clip_low": 0.5, "clip_high": 0.5}
    learner = make(name, correction=correction, replay=0.5, replay_age=3, minibatch=10_000, **clip)
    collector = collector_of(learner)
    for v in range(3):
        told = learner.update(collect(collector, learner, v, seed=v), 0.5, version=v)
        assert told["first_log_ratio"] < 2e-5
        # nothing fresh is stale: no bound steps down
        assert "ess_frac" not in told and "staleness_max" not in told
    assert 1 <= told["replayed_staleness_max"] <= 2 and 0 < told["replayed_ess_frac"] <= 1.0


def test_without_correction_the_ratio_of_a_replayed_row_is_that_to_who_acted():
    """DOTS+RR: the clip is around the weights that acted, from the log-probs that they stored."""
    learner = make("ppo", correction="none", replay=0.5, minibatch=10_000, epochs=1)
    collector = collector_of(learner)
    learner.update(collect(collector, learner, 0), 0.5, version=0)
    seen = []
    plain = learner.actor_loss
    learner.actor_loss = lambda context, row, rules: (seen.append(row), plain(context, row, rules))[1]
    fresh = collect(collector, learner, 1)
    logp, old = fresh.logp.clone(), learner.replay.kept[0].logp.clone()
    learner.update(fresh, 0.5, version=1)
    assert sorted(seen[0]["logp_old"].flatten().tolist()) == sorted(torch.cat([logp, old]).flatten().tolist())
    assert "weight" not in seen[0]


def test_a_replayed_column_has_the_advantage_it_would_have_alone():
    learner, (old, new) = rollouts("ppo", 2)
    both = replace(side_by_side(new, old), replayed=16)
    alone = learner.credit.assign(old, learner.policy)[1].view(-1, 16)
    returns = learner.credit.assign(both, learner.policy)[1].view(-1, 32)
    assert torch.allclose(returns[:, 16:], alone, atol=1e-6)


def test_running_statistics_and_the_critics_test_are_of_fresh_data_alone():
    learner, (old, new) = rollouts("ppo", 2, scale_reward=True)
    both, plain = make("ppo", scale_reward=True), make("ppo", scale_reward=True)
    told = both.credit.assign(replace(side_by_side(new, old), replayed=16), learner.policy)[4]
    want = plain.credit.assign(new, learner.policy)[4]
    assert torch.equal(both.credit.scale, plain.credit.scale)
    assert told["explained_variance"] == pytest.approx(want["explained_variance"], abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_learner_with_replay_goes_on_bit_for_bit_from_a_checkpoint(name, tmp_path):
    def run(folder):
        learner = make(name, replay=0.5, replay_age=2)
        collector = collector_of(learner)
        for v in range(4):
            if folder and v == 2:
                state = {"learner": learner.state_dict(), "c": collector.state()}
                checkpoint.save_checkpoint(folder / "c", learner.policy, state, {"step": v})
                learner = make(name, seed=5, replay=0.5, replay_age=2)
                learner.replay.seed = 0
                learner.policy.load_state_dict(checkpoint.load_policy(folder / "c")[0].state_dict())
                state = checkpoint.load_train(folder / "c")[0]
                learner.load_state_dict(state["learner"])
                collector = collector_of(learner)
                collector.set_state(state["c"])
            learner.update(collect(collector, learner, v, seed=v), 0.5, version=v)
        return weights(learner)

    assert torch.equal(run(None), run(tmp_path))


def test_no_replay_is_bit_for_bit_the_plain_update():
    learner, (r, *_) = rollouts("ppo", 1)
    assert (
        RolloutReplay(0.0, 4, 1, 0).compose(r, 0) is r
        and not learner.replay.kept
        and "replay" not in learner.state_dict()
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"advantage": "poise"}, "probe"),
        ({"advantage": "tree"}, "tree"),
        ({"proximal": "ewma"}, "recompute or snapshot"),
        ({"advantage": "grpo", "allocate": "refill"}, "rl.allocate"),
        ({"replay_age": 0}, "replay_age"),
        ({"replay": 0.95}, r"\[0, 0.9\]"),
    ],
    ids=str,
)
def test_replay_that_makes_no_sense_is_refused_with_the_remedy(options, words):
    with pytest.raises(UserError, match=words):
        PpoOptions(**{"replay": 0.5} | options)


@pytest.mark.parametrize(
    "options", [{"share": "x"}, {"learners": 2}, {"dream": 0.5}, {"periodic": 2}], ids=str
)
def test_a_run_that_cannot_replay_says_so(options):
    rl = PpoOptions(
        replay=0.5,
        epochs=1,
        **{} if options in ({"dream": 0.5}, {"learners": 2}) else {"advantage": "grpo", "decisions": 0},
    )
    with pytest.raises(UserError, match="--rl.replay goes without"):
        parallel.check(TrainConfig(task="reach", algo="ppo", rl=rl, workers=0, **options))


def test_a_command_that_cannot_replay_says_so_in_one_line(tmp_path):
    assert "likelihood" in robo_rl(tmp_path, "train", *TINY, "--algo", "nft", "--rl.replay", "0.5").mistake


def test_methods_with_a_ratio_learn_with_replay_in_every_batch():
    for name in METHODS:
        if name.startswith("nft"):
            continue
        learner = make(name, replay=0.5)
        collector, before = collector_of(learner), weights(make(name, replay=0.5))
        for v in range(2):
            told = learner.update(collect(collector, learner, v, seed=v), 0.5, version=v)
        assert np.isfinite(list(told.values())).all() and not torch.equal(weights(learner), before)


@pytest.mark.learning
@pytest.mark.timeout(3600)  # twenty runs
def test_replayed_rollouts_teach_sooner_where_they_are_corrected_and_hinder_where_they_are_not(tmp_path):
    data, seeds = demonstrations(tmp_path, 6), range(5)
    cases = {
        "none": {},
        "none, twice the epochs": {"epochs": 2 * METHODS["ppo"][1].epochs},
        "decoupled": {"replay": 0.5},
        "as they were": {"replay": 0.5, "correction": "none"},
    }
    won = {name: [int(learn(data, seed, 0, rounds=6, **kw)) for seed in seeds] for name, kw in cases.items()}
    print("\n" + "\n".join(f"{name}: {wins} of 200 after 6 updates" for name, wins in won.items()))
    assert sum(won["decoupled"]) > sum(won["none"]) + 40, won  # measured 445 against 337 of 1000
    assert sum(won["as they were"]) < sum(won["decoupled"]) - 40, won  # measured 304
