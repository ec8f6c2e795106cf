"""Groups without a barrier: every episode whole, every group once, nobody waits, whoever is killed."""

import contextlib
import os
import random
import signal

import numpy as np
import pytest
import torch
from feeds import jobs_of, rows_of
from test_runtime import SPEC, taken_uids, train, weights
from toys import PointReach

from robo_rl.algos import pi_rl
from robo_rl.noise import mix
from robo_rl.options import PiRlOptions, PolicyOptions
from robo_rl.policies import make_policy
from robo_rl.rollout import Collector
from robo_rl.runtime.episode_slots import EpisodeSlots
from robo_rl.runtime.in_process import InProcessFeed
from robo_rl.runtime.process_pool import ProcessPool
from robo_rl.runtime.worker import Worker
from robo_rl.runtime.worker_pool import WorkerPoolFeed

G, N, E = 4, 16, 2  # group, lanes of all workers, executed steps


def build(n):
    """Episodes of 1 to 12 decisions: a wide goal and an untrained policy."""
    return PointReach(n, limit=24, radius=0.4)


def make_learner():
    policy = make_policy(PolicyOptions(horizon=E, execute=E, hidden=32, layers=2), SPEC, 0)
    return pi_rl.make(policy, PiRlOptions(decisions=0, advantage="grpo", group=G, epochs=1, minibatch=64), 0)


def local(learner, workers=2, staleness=2, batch=8, seed=0, episode_slots=True):
    def make(i, refresh):
        c = Collector(build(N // workers), learner.policy, 0.99, seed, i)
        return (
            EpisodeSlots(i, c, learner.policy, refresh, G)
            if episode_slots
            else Worker(i, c, learner.policy, refresh, staleness, True, G)
        )

    return InProcessFeed(workers, make, batch, staleness, 12, seed)


def processes(folder, learner, workers=2, staleness=2, batch=8, env=build):
    n = N // workers
    jobs = jobs_of(folder, learner.policy, env, [n] * workers, staleness, G, episode_slots=True)
    rows = rows_of(learner.policy, build(G))
    return WorkerPoolFeed(
        folder,
        ProcessPool(jobs, learner.policy),
        [G] * workers,
        [rows] * workers,
        batch,
        12,
        staleness,
        group=G,
    )


def batches(feed, learner, count, update=True):
    """(fragments, rollout) of each batch; columns are kept."""
    out, take = [], feed.ledger.take

    def remember():
        chosen = take()
        if chosen:
            out.append(
                [
                    (f.uid, f.worker, f.rows, {k: v.copy() for k, v in feed.columns[f.slot].items()})
                    for f in chosen
                ]
            )
        return chosen

    feed.ledger.take = remember
    stats = train(learner, feed, count) if update else [feed.next().stats]
    return out, stats


def test_every_episode_is_whole_and_is_what_its_actions_do_from_its_groups_start():
    learner = make_learner()
    got, stats = batches(local(learner), learner, 5)
    across = 0
    for uid, worker, rows, c in (g for batch in got for g in batch):
        start = mix(0, 5, worker, uid, 0) >> 32
        for m in range(G):
            env = build(1)
            obs, _ = env.reset(options={"starts": np.array([start])})
            last, total = int(c["mask"][:rows, m].sum()), 0.0
            assert c["mask"][:last, m].all() and not c["mask"][last:rows, m].any()
            assert c["done"][:rows, m].nonzero()[0].tolist() == [last - 1]
            for t in range(last):
                assert np.array_equal(c["obs/state"][t, m], obs["state"][0])
                action = learner.policy.commands(torch.from_numpy(c["x0"][t, m : m + 1]).flatten(1)).numpy()
                for j in range(E):
                    obs, reward, over, cut, _ = env.step(action[:, j])
                    total += float(reward[0])
            assert over[0] or cut[0]
            assert np.array_equal(c["obs/state"][last, m], obs["state"][0])
            assert np.array_equal(c["final/state"][last - 1, m], obs["state"][0])
            assert c["returns"][rows - 1, m] == total and bool(c["success"][rows - 1, m]) == bool(over[0])
            version = c["version"][:last, m]
            assert (np.diff(version) >= 0).all()
            across += version[-1] > version[0]
    # episodes that went on under newer weights
    assert across > 3 and max(s["staleness/max"] for s in stats) == 2


def test_every_group_is_trained_on_once_or_is_still_there():
    learner = make_learner()
    feed = local(learner)
    got, _ = batches(feed, learner, 12)
    uids = [uid for batch in got for uid, *_ in batch]
    left = [f.uid for f in feed.ledger.fragments.values() if f.uid not in uids]
    assert len(set(uids)) == len(uids) and sorted(uids + left) == list(range(feed.ledger.next_uid))
    assert all(sum(len(c["done"][0]) for *_, c in batch) == 8 for batch in got)


def test_lanes_are_busy_where_lockstep_waits_for_the_slowest():
    shares = []
    for lanes in (False, True):
        learner, acted, lived = make_learner(), 0, 0
        # a bound that never binds
        feed = local(learner, workers=1, staleness=50, batch=N, episode_slots=lanes)
        line = feed.workers[0].collector
        act = line.act

        def count(actions, columns, t, whole=False, act=act, line=line):
            nonlocal acted, lived
            acted, lived = acted + line.n, lived + int(line.alive.sum())
            act(actions, columns, t, whole)

        line.act = count
        train(learner, feed, 10)
        shares.append(lived / acted)
    assert shares[0] < 0.85 and shares[1] > 0.97, shares


def test_a_members_noise_depends_on_its_group_and_decision_alone():
    chunks = []
    for n in (8, 16):
        learner = make_learner()
        lanes = EpisodeSlots(0, Collector(build(n), learner.policy, 0.99, 0), learner.policy, lambda: 0, G)
        feed = InProcessFeed(1, lambda i, refresh, episode_slots=lanes: episode_slots, 8, 1, 12, 0)
        got, _ = batches(feed, learner, 1, update=False)
        chunks.append({uid: c["trace/x"][0] for uid, _, _, c in got[0]})
    both = set(chunks[0]) & set(chunks[1])
    assert both and all(np.allclose(chunks[0][u], chunks[1][u], atol=1e-5) for u in both)


def gone_on(learner, feed, make_learner, make_feed) -> tuple:
    """What goes on from the packed states of `learner` and `feed`, made anew -> (learner, feed)."""
    from robo_rl.checkpoint import pack, unpack

    tensors = {}
    saved = unpack(pack({"learner": learner.state_dict(), "feed": feed.state()}, tensors), tensors)
    policy, learner = learner.policy.state_dict(), make_learner()
    learner.policy.load_state_dict(policy)
    learner.load_state_dict(saved["learner"])
    feed = make_feed(learner)
    assert feed.load_state(saved["feed"])
    return learner, feed


def test_a_run_repeats_exactly_and_goes_on_exactly_from_what_was_saved():
    ends = []
    for cut in (False, False, True):
        learner = make_learner()
        feed = local(learner)
        train(learner, feed, 4)
        if cut:
            learner, feed = gone_on(learner, feed, make_learner, local)
        train(learner, feed, 4)
        ends.append(weights(learner))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


class Blind(PointReach):
    """A sim without snapshots."""

    def __getattribute__(self, name):
        if name in ("get_state", "set_state"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def blind(n):
    return Blind(n, limit=24, radius=0.4)


def train_under_kills(learner, feed, updates: int) -> list:
    """Train while every third update a worker is killed; nothing is lost or handed over twice -> the
    statistics of the batches."""
    rng, killed, uids = random.Random(0), 0, taken_uids(feed)

    def kill(i, feed):
        nonlocal killed
        process = feed.pool.processes[rng.randrange(2)].process
        if i % 3 == 2 and process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                killed += 1

    try:
        seen = train(learner, feed, updates, kill)
        with feed.condition:
            left = [f.uid for f in feed.ledger.fragments.values() if f.uid not in uids]
            assert sorted(uids + left) == list(range(feed.ledger.next_uid))
    finally:
        feed.close()
    assert killed >= 2 and len(set(uids)) == len(uids)
    return seen


@pytest.mark.parametrize("env", [build, pytest.param(blind, marks=pytest.mark.slow)])
def test_killed_workers_lose_no_group_and_hand_none_over_twice(tmp_path, env):
    learner = make_learner()
    seen = train_under_kills(learner, processes(tmp_path, learner, env=env), 10)
    assert max(s["staleness/max"] for s in seen) <= 2
    assert all(s["episodes"] >= 8 for s in seen)
