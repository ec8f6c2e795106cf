"""Starts along demonstrations: states of the simulator from playing a data set again, and the curriculum over
them."""

import numpy as np
import pytest
from commands import TINY, TINY_REPLAY, robo_rl
from toys import PointReach

from robo_rl.data.episode import Episode
from robo_rl.data.reader import load
from robo_rl.data.writer import Writer
from robo_rl.demos import record
from robo_rl.rollout_control.reverse import AHEAD, COMMON, ENOUGH, LEAST, LOST, MOST, Reverse, demo_states
from robo_rl.starts import EVERY_START

LEFT = np.array([9, 7, 5, 3, 1, 8, 6, 4, 2])  # two demonstrations, a state before every other action
WIDTH = 2


@pytest.fixture
def demos(tmp_path):
    env = PointReach(4, limit=30)
    with Writer(tmp_path / "demos", spec=env.spec) as w:
        record(env, 5, 0, w.add)
        obs, _ = env.reset(options={"starts": np.arange(4)})
        lost = Episode(
            state=np.repeat(obs["state"][:1], 6, 0),
            action=np.zeros((6, 2), np.float32),
            success=True,
            start=0,
        )
        w.add(lost)  # does not succeed again
    return load(tmp_path / "demos")


def observe(sampler, rates, own=(0, 10), times=40):
    """Episodes of every bin with these success rates, `times` of each."""
    starts, success = [], []
    for b, rate in enumerate(rates):
        rows = np.flatnonzero(sampler.bin == b)
        starts += [-1 - rows[i % len(rows)] for i in range(times)]
        success += [i < rate * times for i in range(times)]
    starts += [7] * own[1]
    success += [i < own[0] for i in range(own[1])]
    n = len(starts)
    sampler.observe(np.array(starts), np.zeros(n, int), np.array(success), np.zeros(n), np.ones(n, int))


def test_the_rest_of_a_demonstration_played_from_a_stored_state_succeeds_in_the_steps_that_were_left(demos):
    states, kept = demo_states(PointReach(3, limit=30), demos, 2)
    assert kept == 5 and len(states.left) == sum(-(-int(n) // 2) for n in (demos.to - demos.from_)[:5])
    env = PointReach(1, limit=30)
    for k, left in enumerate(states.left.tolist()):
        env.reset(seed=0)
        env.set_state({name: rows[[k]] for name, rows in states.stored.rows.items()})
        at = env.get_state()["pos"][0].astype(np.float32)
        e = next(e for e in range(5) if (demos.state[demos.from_[e] : demos.to[e], :2] == at).all(1).any())
        for t in range(left):
            assert not env.over.any()
            env.step(demos.action[[demos.to[e] - left + t]])
        assert env.over[0, 0]


def test_the_first_states_are_those_next_to_success_and_the_frontier_moves_back_as_they_are_solved():
    sampler, generator = Reverse(LEFT, WIDTH), np.random.default_rng(0)
    first = sampler.propose(generator)
    assert {int(LEFT[-1 - i]) for i, w in zip(first.ids, first.weights, strict=True) if w} == set(
        range(1, WIDTH * (1 + AHEAD) + 1)
    )
    seen = []
    for solved in range(sampler.bins + 1):
        for _ in range(8):
            observe(sampler, [0.9] * solved + [0.1] * (sampler.bins - solved))
        seen.append(sampler.frontier)
    assert seen == list(range(sampler.bins + 1))
    assert (sampler.propose(generator).weights > 0).all()


def test_the_frontier_stays_at_a_bin_without_evidence_and_moves_forth_where_success_is_lost():
    sampler = Reverse(LEFT, WIDTH)
    for _ in range(8):
        observe(sampler, [1.0, ENOUGH - 0.05, 1.0, 0.5, 0.0], times=200)
    assert sampler.frontier == 1
    for _ in range(8):
        observe(sampler, [1.0, 1.0, 1.0, 0.5, 0.0])
    assert sampler.frontier == 3
    for _ in range(30):
        observe(sampler, [], own=(1, 10))  # no evidence is left of any bin
    assert sampler.frontier == 3
    for _ in range(8):
        observe(sampler, [1.0, LOST + 0.1, LOST - 0.1, 1.0, 1.0])
    assert sampler.frontier == 2


def test_behind_the_frontier_starts_of_uncertain_success_come_most():
    sampler = Reverse(LEFT, WIDTH)
    for _ in range(8):
        observe(sampler, [1.0, 0.7, 0.3, 0.0, 0.0], times=100)
    w = sampler.propose(np.random.default_rng(0)).weights
    per_bin = np.bincount(sampler.bin, w)
    assert (
        per_bin[1] == pytest.approx(0.21, abs=0.01)
        and per_bin[1] > 3 * per_bin[0]
        and per_bin[2] > 3 * per_bin[3]
    )


def test_the_share_of_the_tasks_own_starts_follows_their_success_and_supervision_ends_where_it_is_common():
    sampler, generator = Reverse(LEFT, WIDTH), np.random.default_rng(0)
    shares, kept = [], []
    for wins in (0, 10, 20, 30, 100):
        for _ in range(30):
            observe(sampler, [0.5] * sampler.bins, own=(wins, 100))
        shares.append(sampler.propose(generator).uniform)
        kept.append(sampler.supervision())
    assert (
        shares == sorted(shares) and shares[0] == LEAST and shares[2] == pytest.approx(0.2 / COMMON, abs=0.01)
    )
    assert (
        sampler.propose(generator) is EVERY_START
        and kept[0] == 1
        and kept[-1] == 0
        and kept == sorted(kept, reverse=True)
    )


def test_once_demonstrations_are_solved_from_their_beginning_most_starts_are_the_tasks_own():
    sampler = Reverse(LEFT, WIDTH)
    for _ in range(8):
        observe(sampler, [1.0] * sampler.bins, own=(0, 10))
    table = sampler.propose(np.random.default_rng(0))
    assert sampler.own_success == 0 and table.uniform == MOST and table.weights.all()


def test_rounds_in_which_only_successes_can_have_ended_are_not_counted_of_the_tasks_own_starts():
    sampler = Reverse(LEFT, WIDTH, skip=2)
    for _ in range(2):
        observe(sampler, [0.5] * sampler.bins, own=(10, 10))
    assert sampler.own_success == 0
    observe(sampler, [0.5] * sampler.bins, own=(10, 10))
    assert sampler.own_success == 1


def test_its_state_is_all_that_it_knows():
    a, b = Reverse(LEFT, WIDTH, 3), Reverse(LEFT, WIDTH)
    for _ in range(4):
        observe(a, [0.9, 0.5, 0.2, 0.1, 0.0], own=(3, 10))
    b.load_state_dict(a.state_dict())
    x, y = (s.propose(np.random.default_rng(0)) for s in (a, b))
    assert (
        np.array_equal(x.weights, y.weights)
        and x.uniform == y.uniform
        and a.metrics() == b.metrics()
        and a.frontier == 1
    )


# ---- runs --------------------------------------------------------------------------------------------------

SHORT = ("--task", "peg_insert", "--eval-episodes", 4, "--eval-envs", 4)


@pytest.mark.parametrize(
    "argv", [(*TINY, *SHORT, "--steps", 1100), (*TINY_REPLAY, *SHORT, "--steps", 256, "--algo", "demo_sac")]
)
def test_a_run_whose_supervision_left_nothing_begins_along_its_demonstrations_and_says_so(argv, tmp_path):
    done = robo_rl(tmp_path, "train", *argv, "--out", "run")
    assert (
        done.code == 0
        and "along 2 demonstrations" in done.err
        and "What else helps: more demonstrations" in done.err
    )
    written = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"starts/frontier"' in written and ('"train/stored"' in written or "demo_sac" in argv)


def test_uniform_starts_stay_uniform_where_supervision_left_nothing(tmp_path):
    done = robo_rl(tmp_path, "train", *TINY, *SHORT, "--steps", 600, "--starts", "uniform", "--out", "run")
    assert done.code == 0 and "along" not in done.err
    assert '"starts/' not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_run_that_cannot_begin_along_demonstrations_says_why(tmp_path):
    done = robo_rl(
        tmp_path, "train", *TINY, *SHORT, "--steps", 600, "--starts", "reverse", "--demos", 0, "--out", "run"
    )
    assert done.code == 0 and "there are none (--demos 0)" in done.err
