"""The runtime: its counts, its equality with the plain loop, and what it survives."""

import contextlib
import dataclasses
import errno
import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from feeds import jobs_of, rows_of
from toys import PointReach

from robo_rl.algos import pi_rl
from robo_rl.errors import UserError
from robo_rl.experiment.onpolicy import Gathering
from robo_rl.options import PiRlOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import Collector, layout, new_columns, rollout_of
from robo_rl.runtime import snapshot
from robo_rl.runtime.feed import make_batch
from robo_rl.runtime.in_process import InProcessFeed
from robo_rl.runtime.process_pool import SERVER, ProcessPool, WorkerProcess, start_process
from robo_rl.runtime.rollout_buffer import RolloutBuffer
from robo_rl.runtime.worker import Worker
from robo_rl.runtime.worker_pool import BACK_OFF, ErrorCounts, WorkerFailure, WorkerPoolFeed

SPEC, T, N = ObsSpec(state=4, action=2), 8, 32


def make_learner(group=0, **kw):
    policy = make_policy(PolicyOptions(horizon=4, execute=4, hidden=32, layers=2), SPEC, 0)
    options = {"decisions": T, "epochs": 2, "minibatch": 64, "critic_warmup": 0} | kw
    if group:
        options |= {"decisions": 0, "advantage": "grpo", "group": group}
    return pi_rl.make(policy, PiRlOptions(**options), 0)


def build(n):
    return PointReach(n, limit=12)


def local(learner, workers=1, staleness=0, seed=0, group=0, env=build):
    def make(i, refresh):
        n = N // workers + (i < N % workers)
        return Worker(
            i,
            Collector(env(n), learner.policy, 0.99, seed, i),
            learner.policy,
            refresh,
            staleness,
            True,
            group,
        )

    return InProcessFeed(workers, make, N if group else N * T, staleness, T, seed)


def processes(
    folder,
    learner,
    workers=1,
    staleness=0,
    resume=None,
    env=build,
    hang=60.0,
    served=False,
    back_off=BACK_OFF,
):
    sizes = [N // workers + (i < N % workers) for i in range(workers)]
    jobs = jobs_of(folder, learner.policy, env, sizes, staleness, served=served)
    layouts = [rows_of(learner.policy, build(n)) for n in sizes]
    return WorkerPoolFeed(
        folder, ProcessPool(jobs, learner.policy, hang, back_off), sizes, layouts, N * T, T, staleness, resume
    )


def train(learner, feed, updates, each=lambda i, feed: None):
    """A few updates; the ledger is checked after each."""
    seen = []
    for i in range(updates):
        each(i, feed)
        rollout = feed.next()
        seen.append(rollout.stats)
        learner.update(rollout, i / 100, feed.version)
        learner.after_collect(rollout)
        feed.publish()
        with getattr(feed, "condition", contextlib.nullcontext()):
            feed.ledger.check()
        if feed.crowded():
            feed.commit()
    return seen


@pytest.mark.parametrize("made", [local, processes])
def test_what_is_gathered_of_the_next_batch_is_told_while_it_is_waited_for(made, tmp_path):
    learner, seen = make_learner(), []
    feed = local(learner, workers=2) if made is local else processes(tmp_path, learner, workers=2)
    try:
        feed.next(lambda: bool(seen.append(feed.gathered())))
        assert seen == sorted(seen) and seen[0] < N * T >= seen[-1] and all(n % (N // 2) == 0 for n in seen)
        if made is local:
            assert set(seen) == {k * N // 2 for k in range(2 * T)}  # a decision of a worker at a time
    finally:
        feed.close()


@pytest.mark.parametrize("made", [local, processes])
def test_what_is_gathered_is_told_while_a_stream_is_waited_for_and_counts_what_it_gave(made, tmp_path):
    learner, seen, given = make_learner(), [], []
    feed = local(learner, workers=2) if made is local else processes(tmp_path, learner, workers=2)
    try:
        pieces = feed.stream(lambda: seen.append((len(given), feed.gathered())))
        while (piece := next(pieces, None)) is not None:
            given.append(piece)
        assert seen and [n for _, n in seen] == sorted(n for _, n in seen) and seen[-1][1] < N * T
        assert all(n >= k * N * T // len(given) for k, n in seen), (seen, len(given))
    finally:
        feed.close()


def test_the_progress_line_moves_while_a_batch_is_gathered():
    told, config = [], SimpleNamespace(policy=SimpleNamespace(execute=4))
    config.rl, config.envs, config.algo = PiRlOptions(decisions=T), N, "pi_rl"
    config.periodic, config.over_provision = 0, 1.0
    report = SimpleNamespace(advance=lambda step, note: told.append((step, note)))
    run = SimpleNamespace(config=config, report=report, step=1000, stop=SimpleNamespace(asked=0))
    gathering = Gathering(run, SimpleNamespace(gathered=lambda: 96))
    assert not gathering.asked() and not told  # a quick batch says nothing
    gathering.told -= 100.0
    assert not gathering.asked() and told == [(1384, "384 of 1.02k gathered")]
    config.rl = PiRlOptions(decisions=0, advantage="grpo", group=8)
    gathering.told -= 100.0
    run.stop.asked = 1
    assert gathering.asked() and told[1] == (1000, "96 of 32 episodes gathered")


class Waits(PointReach):
    """Its steps wait for a file."""

    def __init__(self, file, n):
        super().__init__(n, limit=12)
        self.file = file

    def step(self, actions):
        while not self.file.exists():
            time.sleep(0.01)
        return super().step(actions)


def test_a_learner_that_is_asked_to_stop_waits_for_no_batch_and_the_next_one_is_whole_all_the_same(tmp_path):
    learner = make_learner()
    feed = processes(tmp_path / "run", learner, 2, env=functools.partial(Waits, tmp_path / "go"))
    try:
        assert feed.next(lambda: True) is None
        (tmp_path / "go").touch()
        train(learner, feed, 1)
    finally:
        feed.close()


def taken_uids(feed):
    """A list to which every fragment that is taken from now on is added."""
    uids, take = [], feed.ledger.take

    def remember():
        chosen = take()
        uids.extend(f.uid for f in chosen or ())
        return chosen

    feed.ledger.take = remember
    return uids


def weights(learner):
    return torch.cat(
        [p.detach().flatten() for m in (learner.policy, learner.credit.critic) for p in m.parameters()]
    )


def plain(updates, **kw):
    """The loop everyone knows: collect, update, collect."""
    learner = make_learner(**kw)
    collector = Collector(build(N), learner.policy, 0.99, 0)
    for i in range(updates):
        rollout = collector.collect(learner.sampler, T, i)
        learner.update(rollout, i / 100)
        learner.after_collect(rollout)
    return weights(learner)


# ---- batches -----------------------------------------------------------------------------------------------


def columns_of(decisions, seed, version=0):
    learner = make_learner()
    c = Collector(build(4), learner.policy, 0.99, seed)
    columns = new_columns(c.layout(learner.policy), decisions)
    for t in range(decisions):
        c.decide(learner.policy, columns, t, version + t)
    return learner, columns


def test_a_process_that_cannot_be_started_does_not_keep_the_others_from_ending(tmp_path):
    class Refused:
        def start(self):
            raise ConnectionRefusedError("the process that forks is gone")

        def join(self, timeout):
            raise AssertionError("can only join a started process")

    pool = processes(tmp_path, make_learner()).pool
    worker = WorkerProcess("worker0", pool.jobs[0])
    pool.processes, closed = {0: worker}, []
    pool.context = SimpleNamespace(Process=lambda **kw: Refused())
    pool.writer = SimpleNamespace(close=lambda: closed.append(True))
    with pytest.raises(ConnectionRefusedError):
        pool._start(worker)
    pool.end()
    assert closed


def test_a_short_fragment_beside_a_long_one_has_the_advantages_it_has_alone():
    from robo_rl.advantages import gae

    learner, short = columns_of(3, 1)
    _, long = columns_of(7, 2)
    alone, both = rollout_of([(short, 3)]), rollout_of([(short, 3), (long, 7)])

    def advantages(r):
        t, n = r.rewards.shape
        values = learner.credit.values(learner.policy, {k: v.flatten(0, 1) for k, v in r.obs.items()}).view(
            t, n
        )
        nxt = torch.cat([values[1:], learner.credit.values(learner.policy, r.last_obs)[None]])
        nxt[r.done] = learner.credit.values(learner.policy, r.final_obs)
        return gae(r.rewards, r.discounts, r.done, values, nxt, 0.95)[0]

    assert torch.allclose(advantages(both)[:3, :4], advantages(alone), atol=1e-6)
    assert not both.mask[3:, :4].any() and both.mask[:3, :4].all() and both.mask[:, 4:].all()
    assert torch.equal(advantages(both)[3:, :4], torch.zeros(4, 4))
    assert both.stats["env_steps"] == alone.stats["env_steps"] + rollout_of([(long, 7)]).stats["env_steps"]


def test_what_is_older_than_the_bound_is_masked_and_counted():
    _, c = columns_of(5, 0, version=3)  # versions 3 .. 7
    r = make_batch([(c, 5)], version=7, staleness=2)
    assert r.mask[:, 0].tolist() == [False, False, True, True, True]
    assert r.stats["staleness/masked"] == pytest.approx(0.4) and r.stats["staleness/max"] == 2
    assert r.stats["staleness/mean"] == pytest.approx(1.0)
    assert sum(v for k, v in r.stats.items() if k.startswith("staleness/hist")) == pytest.approx(0.6)


# ---- one process -------------------------------------------------------------------------------------------


def test_without_staleness_the_parameters_are_those_of_the_plain_loop_bit_for_bit():
    learner = make_learner()
    train(learner, local(learner), 6)
    assert torch.equal(weights(learner), plain(6))


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_an_asynchronous_run_in_one_process_repeats_exactly_and_keeps_its_bound(staleness):
    ends, seen = [], []
    for _ in range(2):
        learner = make_learner()
        seen = train(learner, local(learner, 3, staleness), 12)
        ends.append(weights(learner))
    assert torch.equal(*ends)
    assert 0 < max(s["staleness/max"] for s in seen) <= staleness


@pytest.mark.parametrize("group", [0, 4])
@pytest.mark.parametrize(("workers", "staleness"), [(1, 0), (2, 3)])
def test_a_resumed_run_in_one_process_is_bit_identical(workers, staleness, group, tmp_path):
    def save(learner, feed):
        from robo_rl.checkpoint import pack, unpack

        tensors = {}
        tree = pack({"learner": learner.state_dict(), "feed": feed.state()}, tensors)
        return unpack(tree, tensors)

    whole = make_learner(group)
    feed = local(whole, workers, staleness, group=group)
    train(whole, feed, 4)
    saved, policy = save(whole, feed), {k: v.clone() for k, v in whole.policy.state_dict().items()}
    train(whole, feed, 4)
    resumed = make_learner(group)
    resumed.policy.load_state_dict(policy)
    resumed.load_state_dict(saved["learner"])
    feed = local(resumed, workers, staleness, group=group)
    assert feed.load_state(saved["feed"])
    train(resumed, feed, 4)
    assert torch.equal(weights(whole), weights(resumed))


class Blind(PointReach):
    """A sim without snapshots."""

    def __getattribute__(self, name):
        if name in ("get_state", "set_state"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_without_snapshots_a_resumed_run_keeps_what_was_finished_and_starts_new_episodes():
    learner = make_learner()
    feed = local(learner, 2, 2, env=functools.partial(Blind, limit=12))
    train(learner, feed, 3)
    saved = feed.state()
    again = local(learner, 2, 2, env=functools.partial(Blind, limit=12))
    assert not again.load_state(saved)
    train(learner, again, 3)


def test_numbers_that_are_not_finite_never_reach_the_learner():
    class Broken(PointReach):
        def step(self, actions):
            obs, reward, *rest = super().step(actions)
            return obs, reward + (np.nan if self.t[0] == 5 else 0), *rest

    learner = make_learner()
    feed = local(learner, 2, 1, env=lambda n: (Broken if n else PointReach)(n, limit=12))
    with pytest.raises(UserError, match="not finite"):
        train(learner, feed, 20)
    assert torch.isfinite(weights(learner)).all() and feed.ledger.refused > 0


# ---- processes ---------------------------------------------------------------------------------------------


def test_a_worker_process_without_staleness_gives_the_plain_loops_parameters_even_if_it_is_killed(tmp_path):
    for kills in (False, True):
        learner = make_learner()
        feed = processes(tmp_path / str(kills), learner)
        rng, killed = random.Random(1), set()

        def kill(i, feed, rng=rng, killed=killed):
            process = feed.pool.processes[0].process
            if i and process is not None:
                time.sleep(rng.random() * 0.1)  # anywhere in a fragment
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                    killed.add(
                        process.pid
                    )  # the next signal may find the same process, dead and not yet collected

        try:
            train(learner, feed, 6, kill if kills else lambda i, feed: None)
            assert feed.stats()["health/restarts"] >= len(killed) - 1
        finally:
            feed.close()
        assert torch.equal(weights(learner), plain(6)), kills
    assert len(killed) >= 2


def test_a_server_that_forks_and_is_killed_costs_no_sample_and_its_workers_end_with_it(tmp_path):
    learner = make_learner()
    feed, first = processes(tmp_path, learner), []

    def kill(i, feed):
        process = feed.pool.processes[0].process
        if i == 2 and process is not None:
            first.append(psutil.Process(process.pid))
            os.kill(first[0].ppid(), signal.SIGKILL)

    try:
        train(learner, feed, 6, kill)
        assert snapshot.over(first[0]) and feed.stats()["health/restarts"] == 1
    finally:
        feed.close()
    assert torch.equal(weights(learner), plain(6))


def test_a_process_is_started_again_where_the_server_that_forks_dies_meanwhile():
    class Started:
        fails = 2

        def start(self):
            self.fails -= 1
            if self.fails >= 0:
                raise EOFError("unexpected EOF")

    start_process(process := Started())
    assert process.fails == -1
    process.fails = 99
    with pytest.raises(EOFError):
        start_process(process)


@pytest.mark.slow
def test_two_synchronous_workers_give_the_same_run_whatever_their_pace(tmp_path):
    ends = []
    for kills in (False, True):
        learner = make_learner()
        feed = processes(tmp_path / str(kills), learner, 2)

        def kill(i, feed):
            process = feed.pool.processes[i % 2].process
            if i in (2, 3) and process is not None:
                os.kill(process.pid, signal.SIGKILL)

        try:
            train(learner, feed, 5, kill if kills else lambda i, feed: None)
        finally:
            feed.close()
        ends.append(weights(learner))
    assert torch.equal(*ends)


@pytest.mark.slow
def test_workers_that_are_killed_again_and_again_lose_no_sample_and_count_none_twice(tmp_path):
    learner, feed, rng = make_learner(), None, random.Random(0)
    feed = processes(tmp_path, learner, 2, 1)
    uids, killed = taken_uids(feed), 0

    def kill(i, feed):
        nonlocal killed
        process = feed.pool.processes[rng.randrange(2)].process
        if i % 2 and process is not None and process.pid:  # one that is being started has none yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                killed += 1

    try:
        seen = train(learner, feed, 24, kill)
        assert feed.ledger.taken == feed.ledger.version * N * T or feed.ledger.taken > 24 * N * T
    finally:
        feed.close()
    assert killed >= 8 and len(set(uids)) == len(uids) and max(s["staleness/max"] for s in seen) <= 1


@pytest.mark.slow
def test_two_hundred_kills_of_workers_and_server_lose_nothing_and_recover_within_seconds(tmp_path):
    learner, rng, recoveries = make_learner(epochs=1), random.Random(3), []
    feed = processes(tmp_path, learner, 2, 1, served=True)
    uids = taken_uids(feed)
    try:
        train(learner, feed, 2)
        while len(recoveries) < 200:
            member = feed.pool.processes[rng.choice((-1, 0, 1))]
            process, restarts = member.process, member.restarts
            pid = None if process is None else process.pid
            if pid is None:  # just being replaced
                train(learner, feed, 1)
                continue
            time.sleep(rng.random() * 0.05)
            began = time.monotonic()
            with contextlib.suppress(ProcessLookupError):  # replaced meanwhile
                os.kill(pid, signal.SIGKILL)
            while member.restarts == restarts:
                time.sleep(0.002)
            train(learner, feed, 1)
            # until its successor has finished a fragment: one that never does ends the run
            while member.deaths:
                train(learner, feed, 1)
            recoveries.append(time.monotonic() - began)
    finally:
        feed.close()
    print(
        f"\n{len(recoveries)} kills, {feed.pool.restarts} restarts, recovery {np.mean(recoveries):.2f} s on "
        f"average, {max(recoveries):.2f} s at most"
    )
    assert np.mean(recoveries) < 30 and len(set(uids)) == len(uids)
    assert max(uids) - len(uids) < 12  # every fragment was trained on or is still there


def test_a_learner_that_dies_takes_the_same_batches_again_and_ends_in_the_same_weights(tmp_path):
    from robo_rl.checkpoint import pack, unpack

    learner = make_learner()
    feed = processes(tmp_path, learner)
    train(learner, feed, 3)
    tensors = {}
    tree = pack({"learner": learner.state_dict(), "feed": feed.state()}, tensors)
    policy = {k: v.clone() for k, v in learner.policy.state_dict().items()}
    feed.commit()
    train(learner, feed, 3)
    orphan = feed.pool.processes[0].process
    feed.pool.end, feed.stopping = lambda: None, True  # dies here: nothing is saved, the worker works on
    feed.pool.wake()
    feed.thread.join(20)
    assert orphan.is_alive()
    feed.pool.writer.close()
    saved = unpack(tree, tensors)
    again = make_learner()
    again.policy.load_state_dict(policy)
    again.load_state_dict(saved["learner"])
    feed = processes(tmp_path, again, resume=saved["feed"])
    try:
        assert not orphan.is_alive() and feed.version == 3
        train(again, feed, 5)
    finally:
        feed.close()
    assert torch.equal(weights(again), plain(8))


@pytest.mark.slow
def test_a_policy_server_decides_for_all_workers_as_they_would_themselves_and_survives_being_killed(tmp_path):
    learner = make_learner()
    feed = processes(tmp_path / "one", learner, served=True)  # one worker: the same batches, so the same bits

    def kill(i, feed):
        if i == 3:
            os.kill(feed.pool.processes[-1].process.pid, signal.SIGKILL)

    try:
        train(learner, feed, 6, kill)
        assert feed.pool.processes[-1].restarts == 1
    finally:
        feed.close()
    assert torch.equal(weights(learner), plain(6))
    learner = make_learner()
    feed = processes(tmp_path / "three", learner, 3, 1, served=True)
    try:
        train(learner, feed, 10, kill)
    finally:
        feed.close()


def hanging(n):
    env = build(n)
    step = env.step

    def slow(actions):
        if os.path.exists("hang"):
            time.sleep(60)
        return step(actions)

    env.step = slow
    return env


class Feverish(PointReach):
    """A reward that is no number in the fifth step of env 0, as long as there is a file `ill`; with `once` in
    it, once."""

    def __init__(self, ill, n):
        super().__init__(n, limit=12)
        self.ill = ill

    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        if self.t[0] == 5 and self.ill.exists():
            if self.ill.read_text() == "once":
                self.ill.unlink()
            reward = reward + np.where(np.arange(self.num_envs) == 0, np.nan, 0)
        return obs, reward, *rest


@pytest.mark.slow
def test_numbers_of_a_worker_process_that_are_not_finite_are_made_anew_and_end_the_run_if_they_go_on(
    tmp_path,
):
    learner, ill = make_learner(), tmp_path / "ill"
    feed = processes(tmp_path / "run", learner, env=functools.partial(Feverish, ill))
    try:
        train(learner, feed, 1)
        ill.write_text("once")
        train(learner, feed, 3)
        assert feed.stats()["health/refused"] > 0 and torch.isfinite(weights(learner)).all()
        ill.write_text("always")
        with pytest.raises(WorkerFailure, match="worker0 keeps giving numbers that are not finite"):
            train(learner, feed, 20)
    finally:
        feed.close()
    assert torch.isfinite(weights(learner)).all()


def dying(marker, n):
    """An env whose worker dies once, after it saved its state and before it handed over what it made."""
    from robo_rl.runtime import worker

    save = worker._save

    def last(where, w):
        save(where, w)
        if w.last >= 0 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    worker._save = last
    return build(n)


@pytest.mark.slow
def test_a_worker_that_dies_between_its_last_decision_and_the_hand_over_hands_over_what_it_made(tmp_path):
    learner = make_learner()
    feed = processes(tmp_path / "run", learner, env=functools.partial(dying, tmp_path / "died"))
    try:
        train(learner, feed, 3)
        assert (tmp_path / "died").exists() and feed.stats()["health/restarts"] == 1
    finally:
        feed.close()
    assert torch.equal(weights(learner), plain(3))


def failing(n):
    raise ValueError("the gripper is on fire")


def brittle(n):
    """An env that fails in every process, after some fragments."""
    env, calls = build(n), iter(range(1_000_000))
    step = env.step

    def breaks(actions):
        if next(calls) >= 100:
            raise RuntimeError(f"joint 3 lost its encoder in process {os.getpid()}")
        return step(actions)

    env.step = breaks
    return env


@pytest.mark.slow
def test_an_error_that_comes_back_after_every_few_fragments_is_told_and_ends_the_run(tmp_path, capfd):
    learner = make_learner()
    feed = processes(tmp_path, learner, env=brittle, back_off=(0.0, 0.1))
    try:
        with pytest.raises(
            WorkerFailure,
            match=r"ended 6 times by the same error \(finished in between: fragments, \d+\): Runt.*joint 3",
        ):
            train(learner, feed, 1000)
    finally:
        feed.close()
    assert (
        capfd.readouterr().err.count(
            "warning: worker0 ended and is started anew: RuntimeError: joint 3 lost its encoder"
        )
        == 1
    )


def silent_judge(n):
    raise UserError("the judge does not answer; start it")


def test_what_a_worker_cannot_go_on_for_and_a_person_can_mend_is_told_without_a_traceback(tmp_path, capfd):
    feed = processes(tmp_path, make_learner(), env=silent_judge, back_off=(0.0, 0.1))
    try:
        with pytest.raises(
            WorkerFailure, match=r"times in a row .*words: the judge does not answer; start it$"
        ):
            train(make_learner(), feed, 1000)
    finally:
        feed.close()
    assert "started anew: the judge does not answer; start it\n" in capfd.readouterr().err


def full(n):
    raise OSError(errno.ENOSPC, "No space left on device", "slots.bin")


def test_a_worker_that_finds_the_disk_full_ends_the_run_at_once_and_in_one_line(tmp_path, capfd):
    learner = make_learner()
    feed = processes(tmp_path, learner, env=full, back_off=(60.0,))
    try:
        with pytest.raises(WorkerFailure, match="^the disk is full, at slots.bin: free some space"):
            train(learner, feed, 1)
    finally:
        feed.close()
    assert "Traceback" not in capfd.readouterr().err


class FullPath(os.PathLike):
    """A file on a disk that is full."""

    def __fspath__(self):
        return full(1)


@pytest.mark.slow
def test_a_policy_server_that_finds_the_disk_full_ends_the_run_at_once_and_in_one_line(tmp_path, capfd):
    learner = make_learner()
    feed = processes(tmp_path, learner, served=True)
    try:
        train(learner, feed, 1)
        member = feed.pool.processes[SERVER]
        member.job = dataclasses.replace(member.job, weights=FullPath())  # of the one that comes after it
        os.kill(member.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailure, match="^the disk is full, at slots.bin: free some space"):
            train(learner, feed, 100)
    finally:
        feed.close()
    assert "Traceback" not in capfd.readouterr().err


def test_an_error_that_is_rare_among_fragments_is_told_once_and_never_ends_the_run(capfd):
    errors = ErrorCounts()
    for i in range(20):
        errors.finished += 11
        assert not errors.add("worker0", f"RuntimeError: cable {i}")
    for i in range(4):
        errors.finished += 9
        assert not errors.add("worker0", f"RuntimeError: cable {i}")
    errors.finished += 9
    assert errors.add("worker0", "RuntimeError: cable 7").startswith(
        "workers ended 6 times by the same error (finished in between: fragments, 45): RuntimeError"
    )
    assert capfd.readouterr().err.count("warning: worker0 ended") == 1


def test_errors_that_name_another_address_in_memory_are_the_same_error():
    errors, said = ErrorCounts(), ""
    for digit in "abcdef":
        assert not said
        errors.finished += 1
        said = errors.add("worker0", f"ValueError: <Scene at 0x7f{digit}0>")
    assert said.startswith("workers ended 6 times by the same error")


@pytest.mark.slow
def test_a_worker_that_hangs_is_restarted_and_one_that_never_works_ends_the_run_with_its_last_words(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    learner = make_learner()
    feed = processes(tmp_path / "a", learner, env=hanging, hang=1.0)
    try:
        train(learner, feed, 2)
        Path("hang").touch()
        end = time.monotonic() + 30
        while not feed.pool.processes[0].restarts and time.monotonic() < end:
            feed.stats()
            if feed.ledger.ready() >= N * T:
                train(learner, feed, 1)
            time.sleep(0.05)
        assert feed.pool.processes[0].restarts
        assert (
            "slow" in (tmp_path / "a" / "worker0.stack").read_text() or "slow" in feed.pool.processes[0].words
        )
        Path("hang").unlink()
        train(learner, feed, 2)
    finally:
        feed.close()
    feed = processes(tmp_path / "b", learner, env=failing, back_off=(0.0, 0.1))
    try:
        with pytest.raises(WorkerFailure, match="worker0 ended 6 times in a row.*the gripper is on fire"):
            feed.next()
    finally:
        feed.close()


def test_a_run_whose_workers_are_gone_saves_what_it_learnt_if_it_stops_and_says_it_if_it_goes_on(tmp_path):
    learner = make_learner()
    feed = processes(tmp_path, learner)
    try:
        train(learner, feed, 1)
        version, rollout = feed.version, feed.next()
        # as where one signal to a whole group ends the process that workers come from
        feed.give_up("the broker failed: EOFError()")
        feed.stopping = True
        feed.thread.join(30)
        assert not feed.thread.is_alive()
        learner.update(rollout, 0.0, feed.version)
        feed.publish()
        assert feed.version == version + 1 and feed.state()
        with pytest.raises(WorkerFailure, match="the broker failed"):
            feed.next()
    finally:
        feed.close()


# ---- slots and snapshots -----------------------------------------------------------------------------------


def test_slots_keep_what_was_written_and_refuse_a_full_disk(tmp_path, monkeypatch):
    learner = make_learner()
    c = Collector(build(4), learner.policy, 0.99, 0)
    rows = layout(learner.policy, {k: torch.from_numpy(v) for k, v in c.obs.items()})
    buffer = RolloutBuffer.create(tmp_path / "s.bin", [rows], T, 3)
    with c.threads():
        for t in range(T):
            c.decide(learner.policy, buffer.columns(1, 0), t)
            buffer.sign(1, 0, t)
    buffer.head["rows"][1] = T
    before, mark = rollout_of([(buffer.columns(1, 0), T)]), buffer.checksum(1, 0)
    again = RolloutBuffer.create(tmp_path / "s.bin", [rows], T, 3)
    assert again.checksum(1, 0) == mark and again.sound(1, 0, T) == T
    assert torch.equal(rollout_of([(again.columns(1, 0), T)]).x0, before.x0)
    # another shape: made anew
    assert RolloutBuffer.create(tmp_path / "s.bin", [rows], T, 4).checksum(1, 0) != mark

    def full(fd, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="the disk is full"):
        RolloutBuffer.create(tmp_path / "t.bin", [rows], T, 3)
    assert not (tmp_path / "t.bin").exists()


def test_a_damaged_snapshot_reads_as_none(tmp_path):
    tree = {"after": 3, "collector": {"a": np.arange(5.0), "words": np.array(["x", "yy"])}}
    snapshot.save(tmp_path / "s", tree)
    back = snapshot.load(tmp_path / "s")
    assert back["after"] == 3 and np.array_equal(back["collector"]["a"], np.arange(5.0))
    assert back["collector"]["words"].tolist() == ["x", "yy"]
    (tmp_path / "s").write_bytes((tmp_path / "s").read_bytes()[:100])
    assert snapshot.load(tmp_path / "s") == {} == snapshot.load(tmp_path / "none")


# ---- workers that join and leave ---------------------------------------------------------------------------


def want(folder, n):
    (folder / "workers.json").write_text(f'{{"workers": {n}}}')


def until_workers(feed, learner, n, seconds=60):
    """Train on until n workers are at work."""
    end, seen = time.monotonic() + seconds, []
    while True:
        pool = feed.pool
        there = [m for i, m in list(pool.processes.items()) if i >= 0 and m.process is not None and m.ready]
        if len(there) == n == len(feed.ledger.shares) and len(pool.processes) == n:
            return seen
        assert time.monotonic() < end, (pool.processes.keys(), feed.ledger.shares)
        seen += train(learner, feed, 1)


@pytest.mark.slow
def test_workers_join_and_leave_while_it_runs_and_a_kill_in_between_loses_nothing(tmp_path):
    learner = make_learner(epochs=1)
    feed = processes(tmp_path, learner, 1, 1)
    uids = taken_uids(feed)
    try:
        train(learner, feed, 2)
        want(tmp_path, 3)
        seen = until_workers(feed, learner, 3)
        want(tmp_path, 1)
        while not any(m.leaving for m in feed.pool.processes.values()):
            time.sleep(0.01)
        for m in [m for m in feed.pool.processes.values() if m.leaving and m.process is not None]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(m.process.pid, signal.SIGKILL)  # while it finishes what it is at
        seen += until_workers(feed, learner, 1)
        want(tmp_path, 2)
        while not (new := getattr(feed.pool.processes.get(1), "process", None)) or new.pid is None:
            time.sleep(0.01)
        os.kill(new.pid, signal.SIGKILL)  # while it starts
        seen += until_workers(feed, learner, 2)
        want(tmp_path, 1)
        seen += until_workers(feed, learner, 1) + train(learner, feed, 2)
        with feed.condition:
            left = [f.uid for f in feed.ledger.fragments.values() if f.uid not in uids]
            missing = set(range(feed.ledger.next_uid)) - {*uids, *left}
    finally:
        feed.close()
    assert len(set(uids)) == len(uids) and max(s["staleness/max"] for s in seen) <= 1
    assert len(missing) <= 3  # leases of those that left before they had made anything


@pytest.mark.slow
def test_a_run_whose_learner_died_begins_again_with_the_workers_it_was_last_told(tmp_path):
    learner = make_learner(epochs=1)
    feed = processes(tmp_path, learner, 1, 1)
    want(tmp_path, 2)
    until_workers(feed, learner, 2)
    train(learner, feed, 4)
    saved = feed.state()
    feed.commit()
    train(learner, feed, 2)
    feed.close()
    feed = processes(tmp_path, learner, 1, 1, resume=saved)
    try:
        uids = taken_uids(feed)
        assert feed.workers == 2 and feed.version == saved["version"]
        train(learner, feed, 6)
        assert len(set(uids)) == len(uids)
    finally:
        feed.close()


WARNS = """
import sys, warnings
from pathlib import Path
from robo_rl.runtime import snapshot

with snapshot.at_work(Path(sys.argv[1]), "worker0"):
    for _ in range(2):
        warnings.warn("a step of 20 envs\\ntook 1.0 s")
"""


def test_a_worker_warns_in_plain_lines(tmp_path):
    done = subprocess.run([sys.executable, "-c", WARNS, tmp_path], capture_output=True, text=True, check=True)
    assert done.stderr == "warning: a step of 20 envs took 1.0 s\n"
