"""Which start comes next: tables of starts, draws from them, and how the episodes come back to the
sampler."""

import functools
from collections import Counter

import numpy as np
import pytest
import torch
from commands import TINY, robo_rl
from feeds import jobs_of
from toys import Failures, PointReach

from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import Collector
from robo_rl.rollout_control import StartControl, Uniform
from robo_rl.runtime.actor import ActorJob, SeparateProcessActor, Stage
from robo_rl.runtime.episode_slots import EpisodeSlots
from robo_rl.runtime.in_process import InProcessFeed
from robo_rl.runtime.process_pool import ProcessPool
from robo_rl.runtime.start_file import StartFile, publish_states, publish_table
from robo_rl.runtime.worker import Worker
from robo_rl.runtime.worker_pool import WorkerPoolFeed
from robo_rl.starts import (
    EVERY_START,
    StartChooser,
    StartStream,
    StartTable,
    StoredStates,
    draw_starts,
    hashed,
)

N, T = 8, 6
SPEC = ObsSpec(state=4, action=2)


def build(n):
    return PointReach(n, limit=5)


def small_policy(**more):
    return make_policy(
        PolicyOptions(**{"horizon": 2, "execute": 2, "hidden": 16, "layers": 1} | more), SPEC, 0
    )


class Fixed:
    """A source with one table, which a test may replace."""

    def __init__(self, table, stored=None):
        self.table, self.stored = table, stored

    def newest(self):
        return self.table


# ---- tables ------------------------------------------------------------------------------------------------


def test_starts_come_as_often_as_the_table_says_and_uniform_draws_are_the_envs_own():
    table, keys = (
        StartTable(np.array([7, -1, 9]), np.array([1.0, 0.0, 3.0]), 0.2),
        hashed(3, np.arange(100_000)),
    )
    drawn = draw_starts(table, keys)
    own = (keys >> np.uint64(33)).astype(np.int64)
    from_table = np.isin(drawn, [7, 9])
    assert (drawn[~from_table] == own[~from_table]).all() and not (drawn == -1).any()
    shares = [float((drawn == 7).mean()), float((drawn == 9).mean()), float((~from_table).mean())]
    assert np.allclose(shares, [0.2, 0.6, 0.2], atol=0.01)


def test_a_draw_depends_on_its_key_and_the_table_alone():
    table, keys = StartTable(np.arange(5), np.ones(5), 0.5), hashed(1, np.arange(64))
    assert np.array_equal(draw_starts(table, keys)[10:20], draw_starts(table, keys[10:20]))


def test_a_table_that_draws_everything_uniformly_gives_the_starts_of_the_stream_alone():
    env, stream = build(N), StartStream(N)
    stream.seed(5, np.ones(N, bool))
    env.reset(seed=0)
    chooser = StartChooser(env, Fixed(EVERY_START), 5)
    chooser.next(np.ones(N, bool))
    assert np.array_equal(chooser.starts, stream.draw(np.arange(N)))


@pytest.mark.parametrize(
    ("ids", "weights", "uniform", "why"),
    [
        ([1, 2], [1.0], 0.0, "R <= 65536"),
        ([1], [0.0], 0.5, "one of them above 0"),
        ([1], [np.nan], 0.5, "finite"),
        ([1], [1.0], 1.5, r"in \[0, 1\]"),
        (np.zeros(70_000, int), np.ones(70_000), 0.0, "65536"),
    ],
)
def test_a_table_that_cannot_be_drawn_from_is_refused(ids, weights, uniform, why):
    with pytest.raises(ValueError, match=why):
        StartTable(np.array(ids), np.array(weights), uniform)


# ---- collectors --------------------------------------------------------------------------------------------


def test_without_a_source_a_rollout_has_no_column_of_starts_and_with_one_every_decision_names_its_start():
    policy = small_policy()
    assert Collector(build(N), policy, 0.9, 0).collect(policy, T).start is None
    source = Fixed(StartTable(np.array([3, 4]), np.ones(2)))
    r = Collector(build(N), policy, 0.9, 0, starts=source).collect(policy, T)
    assert r.start.shape == (T, N) and set(r.start.unique().tolist()) == {3, 4}
    env, first = build(2), r.obs["state"][0]
    obs, _ = env.reset(options={"starts": np.array([3, 4])})
    for n in range(N):  # the state that an episode begins in is that of its start
        assert np.array_equal(first[n], obs["state"][int(r.start[0, n]) - 3])
    after = r.done[:-1].nonzero()
    assert len(after)
    for t, n in after.tolist():
        assert np.array_equal(r.obs["state"][t + 1, n], obs["state"][int(r.start[t + 1, n]) - 3])


def test_an_episode_that_ended_is_reported_with_the_start_it_began_from():
    policy = small_policy()
    r = Collector(build(N), policy, 0.9, 0, starts=Fixed(EVERY_START)).collect(policy, 12)
    assert len(r.ended) == int(r.done.sum()) > 0
    assert np.array_equal(
        r.ended.starts, r.start[r.done].numpy()
    ) and r.ended.success.mean() == pytest.approx(r.stats["success"])
    assert (r.ended.lengths <= 6).all() and not r.ended.tasks.any()


def test_an_episode_may_begin_in_a_stored_state_of_the_simulator():
    env, policy = build(N), small_policy()
    env.reset(options={"starts": np.arange(N)})
    for _ in range(3):
        obs = env.step(env.expert_action())[0]
    stored = StoredStates({k: v[[2, 5]] for k, v in env.get_state().items()})
    source = Fixed(StartTable(np.array([-1, -2, 8]), np.ones(3)), stored)
    c = Collector(build(N), policy, 0.9, 1, starts=source)
    assert set(c.chooser.starts.tolist()) == {-1, -2, 8}
    for n, start in enumerate(c.chooser.starts):
        assert start == 8 or np.array_equal(c.obs["state"][n], obs["state"][2 if start == -1 else 5])
        assert c.env.t[n] == (0 if start == 8 else 3)  # and has as much time left as it had


def test_a_collector_with_starts_restored_from_its_state_goes_on_identically():
    policy, source = small_policy(), Fixed(StartTable(np.arange(20), np.ones(20), 0.5))
    first = Collector(build(N), policy, 0.9, 0, starts=source)
    first.collect(policy, 3)
    state = first.state()
    a = first.collect(policy, 8)
    second = Collector(build(N), policy, 0.9, 7, starts=source)
    second.set_state(state)
    b = second.collect(policy, 8)
    assert torch.equal(a.start, b.start) and torch.equal(a.obs["state"], b.obs["state"])


# ---- feeds -------------------------------------------------------------------------------------------------


def local(control, group=0, slots=False):
    policy = small_policy()

    def make(i, refresh):
        collector = Collector(build(N), policy, 0.9, 0, i, control)
        return (
            EpisodeSlots(i, collector, policy, refresh, group)
            if slots
            else Worker(i, collector, policy, refresh, 0, True, group)
        )

    return InProcessFeed(1, make, N if group else N * T, 1 if slots else 0, T, 0)


def rounds(feed, control, count):
    out = []
    for _ in range(count):
        r = feed.next()
        out.append((r.start.clone(), r.ended))
        control.observe(r.ended)
        control.renew()
        feed.publish()
        feed.commit()
    return out


def test_a_new_table_rules_the_episodes_that_begin_after_it():
    control = StartControl(Uniform(), 0)
    feed = local(control)
    before = feed.next().start.clone()
    control.table = StartTable(np.array([5]), np.ones(1))
    feed.publish()
    after = feed.next().start
    assert not (before == 5).any() and (after[-1] == 5).all()


@pytest.mark.parametrize("slots", [False, True])
def test_all_members_of_a_group_begin_in_the_same_start_of_the_table(slots):
    control = StartControl(Failures(), 0)
    for start, _ in rounds(local(control, 4, slots), control, 3):
        for members in start[0].view(-1, 4):
            assert (members == members[0]).all()


def test_a_sampler_in_worker_processes_sees_every_episode_and_its_tables_rule_there(tmp_path):
    control, policy = StartControl(Failures(), 0), small_policy()
    publish_states(tmp_path, None)
    control.publish = functools.partial(publish_table, tmp_path)
    control.renew()
    jobs = jobs_of(tmp_path, policy, build, [N], gamma=0.9, starts=True)
    layout = Collector(build(N), policy, 0.9, 0, starts=control).layout(policy)
    feed = WorkerPoolFeed(tmp_path, ProcessPool(jobs, policy), [N], [layout], N * T, T, 0)
    try:
        beside = rounds(feed, control, 4)
    finally:
        feed.close()
    assert control.sampler.seen == sum(len(ended) for _, ended in beside) > 0
    again = StartControl(Failures(), 0)
    again.renew()  # as often as the other
    in_process = rounds(local(again), again, 4)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(beside, in_process, strict=True))


def test_a_table_and_stored_states_come_out_of_their_files_as_they_went_in(tmp_path):
    publish_states(tmp_path, StoredStates({"physics": np.arange(6.0).reshape(2, 3)}))
    publish_table(tmp_path, StartTable(np.array([1, -2]), np.array([0.5, 2.0]), 0.1))
    source = StartFile(tmp_path)
    assert np.array_equal(source.stored.rows["physics"], np.arange(6.0).reshape(2, 3))
    assert source.newest().ids.tolist() == [1, -2] and source.newest().uniform == 0.1
    publish_table(tmp_path, EVERY_START)
    assert source.newest().uniform == 1
    (tmp_path / "starts.table").write_bytes(b"torn")
    assert source.newest().uniform == 1  # the last sound one stays in force


def reach_stage() -> Stage:
    return Stage(PointReach(3, limit=6), None, None, lambda: None)


def test_the_actor_of_replay_draws_from_the_table_and_reports_its_episodes(tmp_path):
    from robo_rl.journal import Journal
    from robo_rl.replay import Replay

    rows, flight = {"state": ((4,), np.dtype(np.float32))}, tmp_path / "flight"
    flight.mkdir()
    publish_table(flight, StartTable(np.array([21, 22]), np.ones(2)))
    policy = small_policy(kind="squashed").eval()
    stores = tuple(
        Replay(rows, 2, 2, 0.9, 5000, 3, Journal(tmp_path / "replay" / n, 5000))
        for n in ("online", "corrections")
    )
    job = ActorJob(reach_stage, policy.options, SPEC, rows, 7, 5000, tmp_path / "replay", flight, starts=True)
    actor, seen = SeparateProcessActor(job, policy, stores, 36), Counter()
    try:
        for _ in range(4):
            actor.collect(policy, lambda: False)
        while not seen:
            seen.update(actor.take_ended().starts.tolist())
    finally:
        actor.end()
    assert set(seen) == {21, 22}


def test_a_sampler_of_ones_own_is_told_to_a_run_and_one_that_is_not_there_is_refused_in_one_line(tmp_path):
    assert robo_rl(tmp_path, "train", *TINY, "--starts", "toys:failures", "--out", "run").code == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert any('"starts/seen"' in line for line in lines) and any(
        '"starts/rows": 4' in line for line in lines
    )
    assert "toys has no 'failure'" in robo_rl(tmp_path, "train", *TINY, "--starts", "toys:failure").mistake
    assert "starts" in robo_rl(tmp_path, "train", *TINY, "--starts", "easy").mistake
    ray = robo_rl(
        tmp_path, "train", *TINY, "--starts", "toys:failures", "--backend", "ray", "--workers", 1
    ).mistake
    assert "--starts uniform" in ray
