"""Periodic asynchrony: gradients summed while fresh groups stream in are those of the whole batch."""

import contextlib
import copy
import os
import signal
import time

import pytest
import torch
from feeds import jobs_of, rows_of
from test_corrections import RATIO_METHODS
from test_corrections import make as make_method
from test_corrections import weights as weights_of
from test_runtime import N, build, make_learner, weights

from robo_rl.rollout import Collector
from robo_rl.runtime.feed import merge_batch_stats
from robo_rl.runtime.in_process import InProcessFeed
from robo_rl.runtime.ledger import Ledger
from robo_rl.runtime.process_pool import ProcessPool
from robo_rl.runtime.worker import Worker
from robo_rl.runtime.worker_pool import WorkerPoolFeed

G, ROUNDS = 4, 3


def local(learner, workers=2, seed=0):
    def make(i, refresh):
        return Worker(
            i,
            Collector(build(N // workers), learner.policy, 0.99, seed, i),
            learner.policy,
            refresh,
            0,
            True,
            G,
        )

    return InProcessFeed(workers, make, ROUNDS * N, 0, 3, seed)


def processes(folder, learner, workers=2, resume=None):
    n = N // workers
    jobs = jobs_of(folder, learner.policy, build, [n] * workers, 0, G)
    rows = rows_of(learner.policy, build(n))
    return WorkerPoolFeed(
        folder,
        ProcessPool(jobs, learner.policy),
        [n] * workers,
        [rows] * workers,
        ROUNDS * N,
        3,
        0,
        resume,
        G,
        streams=True,
    )


def train(learner, feed, updates, each=lambda i, feed: None):
    for i in range(updates):
        each(i, feed)
        pieces = list(feed.stream())
        assert len(pieces) == 2 * ROUNDS and all((p.version[p.mask] == feed.version).all() for p in pieces)
        metrics = learner.accumulate(pieces, i / 100)
        assert metrics["first_log_ratio"] < 1e-4  # on-policy
        feed.publish()
        feed.commit()
        with getattr(feed, "condition", contextlib.nullcontext()):
            feed.ledger.check()


@pytest.mark.parametrize("name", [n for n in RATIO_METHODS if "grpo" in n])
def test_gradients_summed_piece_by_piece_make_the_step_of_the_whole_batch(name):
    whole = make_method(name, epochs=1, minibatch=10**6)
    streamed = make_method(name, epochs=1, minibatch=7)
    g, n = whole.options.group, 8 * whole.options.group
    for update in range(3):
        line = Collector(build(n), whole.policy, 0.99, update)
        starts = torch.arange(8).repeat_interleave(g).numpy() + 100 * update
        r = line.episodes(whole.policy, starts)
        r.outcome = torch.rand(n, generator=torch.Generator().manual_seed(update))
        pieces = []
        for i in range(0, n, 2 * g):
            p = copy.copy(r)
            cut = slice(i, i + 2 * g)
            for k in ("obs", "trace"):
                setattr(p, k, {key: v[:, cut] for key, v in getattr(r, k).items()})
            for k in ("x0", "logp", "rewards", "discounts", "done", "executed", "mask", "version", "gains"):
                setattr(p, k, getattr(r, k)[:, cut])
            p.outcome = r.outcome[cut]
            pieces.append(p)
        whole.update(r, 0.1, 0)
        streamed.accumulate(pieces, 0.1)
        a, b = weights_of(whole), weights_of(streamed)
        assert torch.allclose(a, b, atol=2e-5), float((a - b).abs().max())


def test_each_worker_makes_its_rounds_of_a_batch_and_no_more():
    book = Ledger(12, 0, 8, {0: (1, 2), 1: (1, 2)})
    assert book.rounds() == 3
    for _ in range(3):
        book.seal(book.lease(0).uid, 1, 0)
    assert book.lease(0) is None and book.take_from(1, False) is None  # the rest is the other's
    assert [book.take_from(0, False).uid for _ in range(3)] == [0, 1, 2]
    for i in range(3):
        book.seal(book.lease(1).uid, 1, 0)
        assert book.take_from(1, i == 2).batch == 0
    assert book.next_batch == 1 and book.lease(0) is None
    book.publish(1)
    book.check()
    assert book.lease(0) is not None


@pytest.mark.slow
def test_a_stream_of_processes_gives_the_run_of_one_process_even_if_they_are_killed(tmp_path):
    one = make_learner(G, epochs=1)
    train(one, local(one), 4)
    other = make_learner(G, epochs=1)
    feed = processes(tmp_path, other)

    def kill(i, feed):
        process = feed.pool.processes[i % 2].process
        if i and process is not None:
            os.kill(process.pid, signal.SIGKILL)

    try:
        train(other, feed, 4, kill)
    finally:
        feed.close()
    assert torch.equal(weights(one), weights(other))


def test_a_learner_that_dies_in_the_middle_of_a_stream_takes_the_same_batch_again(tmp_path):
    whole = make_learner(G, epochs=1)
    train(whole, local(whole), 3)
    learner = make_learner(G, epochs=1)
    feed = processes(tmp_path, learner)
    train(learner, feed, 1)
    saved, state = feed.state(), copy.deepcopy((learner.policy.state_dict(), learner.state_dict()))
    stream = feed.stream()
    next(stream), next(stream), next(stream)  # and then it dies
    time.sleep(0.2)
    feed.close()
    again = make_learner(G, epochs=1)
    again.policy.load_state_dict(state[0])
    again.load_state_dict(state[1])
    feed = processes(tmp_path, again, resume=saved)
    try:
        train(again, feed, 2)
    finally:
        feed.close()
    assert torch.equal(weights(whole), weights(again))


def test_the_statistics_of_pieces_add_up():
    rows = [
        {"episodes": 2.0, "env_steps": 10.0, "success": 1.0, "staleness/max": 0.0, "staleness/mean": 0.0},
        {"episodes": 6.0, "env_steps": 30.0, "success": 0.5, "staleness/max": 1.0, "staleness/mean": 0.5},
    ]
    assert merge_batch_stats(rows) == {
        "episodes": 8.0,
        "env_steps": 40.0,
        "success": 0.625,
        "staleness/max": 1.0,
        "staleness/mean": 0.25,
    }
    assert merge_batch_stats(rows[:1]) is rows[0]
