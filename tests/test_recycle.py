"""Failures used again: the prefix stays bit for bit, the latest state that a teacher makes good is found, its
steps alone are taught."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import TINY, kill_after_a_checkpoint, last_weights, robo_rl
from test_algos import METHODS
from test_corrections import make
from toys import PointReach

from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.recycle import CUTS, Recycler, check, recycles
from robo_rl.options import NftOptions, PolicyOptions, PpoOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import Collector
from robo_rl.rollout_control import StartControl, Uniform
from robo_rl.rollout_control import recycle as rc

LIMIT, E = 16, 2


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def failures(n=6):
    """Episodes that go the right way for 6 steps and then away: the later, the farther from a goal that must
    be reached by the limit."""
    env, seen, did = PointReach(n, LIMIT), [], []
    obs, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": np.arange(100, 100 + n)})
    for t in range(LIMIT):
        if t % E == 0:
            seen.append(np.array(obs["state"], np.float32))
        did.append(np.asarray(env.expert_action() * 0.05 if t < 6 else -env.expert_action(), np.float32))
        obs, _, terminated, _, _ = env.step(did[-1])
        assert not terminated.any()
    return [
        rc.Failure(100 + i, np.stack([a[i] for a in did]), np.stack([s[i] for s in seen])) for i in range(n)
    ]


def test_cuts_are_whole_chunks_in_equal_parts():
    assert (
        rc.cuts_of(16, 2, 3) == [4, 8, 12]
        and rc.cuts_of(15, 4, 3) == [0, 4, 8]
        and rc.cuts_of(3, 2, 3) == [0, 2]
    )


def test_the_prefix_is_played_bit_for_bit_and_the_teacher_goes_on_to_success_or_runs_out_of_time():
    old = failures()
    env = PointReach(len(old) + 2, LIMIT)
    for cut in (0, 4, 8, 14):
        for f, c in zip(old, rc.complete(env, old, [cut] * len(old), rc.expert_teacher(env), E), strict=True):
            assert c.same and c.steps == cut + len(c.action) <= LIMIT
            assert np.array_equal(np.asarray(c.obs[0]["state"], np.float32), f.state[cut // E])
            assert not (c.success and cut == 14)  # two steps are too few to come back
        assert any(c.success for c in rc.complete(env, old, [cut] * len(old), rc.expert_teacher(env), E)) == (
            cut < 14
        )
    late = rc.complete(env, old[:1], [LIMIT], rc.expert_teacher(env), E)[0]
    assert len(late.action) == 0 and not late.success and late.same


def test_an_episode_that_does_not_show_its_states_again_is_given_back_as_such():
    f, env = failures(1)[0], PointReach(1, LIMIT)
    bent = replace(
        f, state=f.state + np.where(np.arange(len(f.state)) == 2, 1e-6, 0)[:, None].astype(np.float32)
    )
    # the state at the cut counts, what lies behind it does not
    for cut, same in ((8, False), (4, False), (2, True)):
        assert rc.complete(env, [bent], [cut], rc.expert_teacher(env), E)[0].same == same
    with pytest.raises(UserError, match="as many envs"):
        rc.complete(env, [f, f], [2, 2], rc.expert_teacher(env), E)


def test_lessons_are_the_steps_of_the_teacher_and_end_with_the_episode():
    done = rc.Completed(
        tuple({"state": np.full(2, t)} for t in range(3)), np.arange(3.0)[:, None], True, 9, True
    )
    obs, chunk, mask = rc.lessons(done, 2)
    assert [o["state"][0] for o in obs] == [0, 1, 2] and chunk[..., 0].tolist() == [[0, 1], [1, 2], [2, 2]]
    assert mask.tolist() == [[1, 1], [1, 1], [1, 0]]


GROUP = {"advantage": "grpo", "group": 4, "decisions": 0, "recycle": 3}


def recycler(**options):
    config = TrainConfig(
        task="reach",
        algo="ppo",
        policy=PolicyOptions(kind="gaussian", horizon=4, execute=E, hidden=16, layers=2),
        rl=PpoOptions(**GROUP | options),
        workers=0,
    )
    said = []
    return Recycler(
        config, ObsSpec(state=4, action=2), lambda *words: said.append(words), PointReach(3 * CUTS, LIMIT)
    ), said


def played(seed=0, n=16):
    policy = make_policy(
        PolicyOptions(kind="gaussian", horizon=4, execute=E, hidden=16, layers=2),
        ObsSpec(state=4, action=2),
        seed,
    )
    collector = Collector(PointReach(n, LIMIT), policy, 0.95, seed, starts=StartControl(Uniform(), 0))
    return policy, collector.episodes(policy, np.repeat(np.arange(n // 4) + 7, 4))


def test_failures_of_a_rollout_become_lessons_from_the_latest_state_that_the_teacher_makes_good():
    policy, r = played()
    own, said = recycler()
    steps = own.look(r, policy)
    told = own.metrics()
    assert (
        told["recycle/failures"] == 3
        and told["recycle/completed"] >= 1
        and told["recycle/refused"] == 0
        and not said
    )
    assert steps == told["recycle/steps"] > 0 and len(own) == told["recycle/lessons"] > 0
    obs, chunk, mask = own(64, torch.Generator().manual_seed(0))
    assert obs["state"].shape == (64, 4) and chunk.shape == (64, 4, 2) and mask.shape == (64, 4)
    want = np.clip(obs["state"][:, 2:] / 0.2 * 0.7, -1, 1)
    assert torch.allclose(chunk[:, 0], torch.as_tensor(want), atol=1e-5)  # what the expert does there
    for f in own.failures(r, policy):  # the latest of the cuts that succeed
        cuts = rc.cuts_of(len(f.action), E, CUTS)
        done = rc.complete(own.env, [f] * len(cuts), cuts, own.teacher, E)
        assert all(c.same for c in done)


def test_the_same_failures_are_chosen_again_from_a_state_and_the_newest_lessons_stay(monkeypatch):
    policy, r = played()
    a, _ = recycler()
    a.look(r, policy)
    b, _ = recycler()
    b.load_state_dict(a.state_dict())
    assert a.look(r, policy) == b.look(r, policy) and all(
        torch.equal(v, b.rows[k]) for k, v in a.rows.items()
    )
    monkeypatch.setattr("robo_rl.experiment.recycle.KEPT", 10)
    last = a.rows["chunk"]
    a.look(r, policy)
    assert len(a) == 10 and not torch.equal(a.rows["chunk"], last[:10])


def test_episodes_that_begin_in_a_stored_state_are_left_out():
    policy, r = played()
    own, _ = recycler()
    assert own.failures(r, policy)
    r.start[:] = -1
    assert not own.failures(r, policy) and own.look(r, policy) == 0


def test_a_simulator_that_plays_other_states_is_told_of_once_and_teaches_nothing():
    policy, r = played()
    own, said = recycler()
    r.obs["state"][1:] += 1e-3
    own.look(r, policy)
    own.look(r, policy)
    assert (
        len(own) == 0 and len(said) == 1 and said[0][1] == "warning" and own.metrics()["recycle/refused"] > 0
    )


@pytest.mark.parametrize("name", [m for m in METHODS if not m.startswith("nft")])
def test_an_update_learns_beside_rl_what_the_teacher_did_and_no_ratio_has_it(name):
    options = GROUP | {"recycle_coef": 0.5}
    learner, plain = make(name, **options), make(name, **options | {"recycle": 0})
    collector = Collector(PointReach(16, LIMIT), learner.policy, 0.95, 0, starts=StartControl(Uniform(), 0))
    r = collector.episodes(learner.policy, np.repeat(np.arange(4), 4))
    r = replace(r, outcome=torch.rand(16, generator=torch.Generator().manual_seed(0)))
    h, calls = learner.policy.options.horizon, []

    def sample(size, generator):
        calls.append(size)
        return {"state": torch.ones(128, 4)}, torch.full((128, h, 2), 0.5), torch.ones(128, h)

    learner.lessons = sample
    told = learner.update(r, 0.5)
    assert calls and told["first_log_ratio"] < 2e-5 and told["recycle_loss"] > 0
    assert "recycle_loss" not in plain.update(r, 0.5)
    # RL has nothing to learn from, the lessons are there all the same
    flat = replace(r, outcome=torch.zeros(16))
    told = [learner.update(flat, 0.5) for _ in range(30)]
    fell = np.array([x["recycle_loss"] for x in told])
    assert (
        told[0]["skipped"]
        and fell[-5:].mean() < 0.9 * fell[:5].mean()
        and "recycle_loss" not in plain.update(flat, 0.5)
    )


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"obs": "rgb"}, "--obs rgb"),
        ({"dream": 0.5}, "--dream"),
        ({"learners": 2}, "--learners"),
        ({"latency": 0.1}, "--latency"),
        ({"backend": "ray"}, "--backend ray"),
    ],
    ids=str,
)
def test_a_run_that_cannot_recycle_is_told_why(run, words):
    config = TrainConfig(task="reach", algo="ppo", rl=PpoOptions(**GROUP), workers=0, **run)
    assert recycles(config)
    with pytest.raises(UserError, match=words):
        check(config, PointReach(1))


def test_recycling_that_makes_no_sense_is_one_line(tmp_path):
    for bad in ({"advantage": "gae", "decisions": 8}, {"advantage": "tree"}):
        with pytest.raises(UserError, match="group advantage"):
            PpoOptions(**GROUP | bad)
    with pytest.raises(UserError, match="not with nft"):
        NftOptions(**GROUP)
    argv = (
        "train",
        *TINY,
        "--algo",
        "ppo",
        "--rl.advantage",
        "grpo",
        "--rl.decisions",
        "0",
        "--rl.recycle",
        "2",
    )
    assert "nowhere" in robo_rl(tmp_path, *argv, "--rl.recycle-teacher", "nowhere").mistake


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit_with_the_lessons_it_had(tmp_path):
    argv = (
        "train",
        *TINY,
        "--algo",
        "ppo",
        "--policy.kind",
        "gaussian",
        "--rl.advantage",
        "grpo",
        "--rl.decisions",
        "0",
        "--rl.group",
        "4",
        "--rl.recycle",
        "2",
        "--steps",
        "4000",
        "--starts",
        "uniform",
    )
    assert (end := robo_rl(tmp_path, *argv, "--out", "whole")).code == 0, end
    rows = [json.loads(x) for x in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert any(row.get("recycle/completed") for row in rows) and any(
        "train/recycle_loss" in row for row in rows
    )
    kill_after_a_checkpoint(tmp_path, *argv)
    assert (end := robo_rl(tmp_path, "train", "--resume", "killed")).code == 0, end
    assert last_weights(tmp_path / "whole") == last_weights(tmp_path / "killed")
