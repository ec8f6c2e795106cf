"""The same feed with a pool of Ray actors: equality, killed actors, killed nodes."""

import os
import socket
import time
from pathlib import Path

import psutil
import pytest
import torch
from commands import TINY, Command, robo_rl
from feeds import jobs_of, rows_of
from test_runtime import N, T, build, make_learner, plain, train, want, weights

from robo_rl.runtime.ray_pool import process_state, processes
from robo_rl.runtime.worker_pool import WorkerPoolFeed

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'robo_rl[ray]'")
pytestmark = pytest.mark.slow
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def cluster():
    """A head with two CPUs, that this process is attached to, and another node with two, both on this
    machine."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        )
        # as in a cluster of our own: else a busy machine starves them
        patch.setenv("RAY_worker_niceness", "0")
        c = Cluster(
            initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "no_monitor": True}
        )
        try:
            node = c.add_node(**NODE)
            ray.init(address=c.address, log_to_driver=False, logging_level="ERROR")
            yield c, node
        finally:
            ray.shutdown()
            c.shutdown()


def feed_of(folder, learner, workers, staleness, **options):
    from robo_rl.runtime.ray_pool import RayPool

    sizes = [N // workers] * workers
    jobs = jobs_of(folder, learner.policy, build, sizes, staleness)
    layouts = [rows_of(learner.policy, build(n)) for n in sizes]
    return WorkerPoolFeed(
        folder, RayPool(jobs, learner.policy, **options), sizes, layouts, N * T, T, staleness
    )


def train_until(condition, learner, feed, seconds=150):
    """Updates until `condition()` -> their statistics. How many it takes is not known: they are made in a
    tenth of the time in which Ray notices a death or starts an actor."""
    seen, end = [], time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, (list(feed.pool.actors.values()), feed.ledger.shares)
        seen += train(learner, feed, 1)
    return seen


def taken_workers(feed):
    """A list to which (fragment, its worker) is added for each that is taken from now on."""
    out, take = [], feed.ledger.take

    def remember():
        chosen = take()
        out.extend((f.uid, f.worker) for f in chosen or ())
        return chosen

    feed.ledger.take = remember
    return out


def all_at_work(feed):
    """Whether every actor has a place, and has finished a fragment since it last died."""
    return all(a.here and a.deaths == 0 for a in list(feed.pool.actors.values()))


def test_one_actor_without_staleness_gives_the_parameters_of_the_plain_loop_though_it_is_killed_twice(
    cluster, tmp_path
):
    learner = make_learner()
    feed = feed_of(tmp_path, learner, 1, 0)

    def each(i, feed):
        if i in (2, 4):
            ray.kill(feed.pool.actors[0].handle)

    try:
        train(learner, feed, 6, each)
        assert feed.pool.restarts == 2
    finally:
        feed.close()
    assert torch.equal(weights(learner), plain(6))


def test_the_run_goes_on_when_a_node_is_killed(cluster, tmp_path):
    c, node = cluster
    learner = make_learner(epochs=1)
    feed = feed_of(tmp_path, learner, 3, 1)
    actors = feed.pool.actors
    try:
        train_until(lambda: all_at_work(feed), learner, feed)
        lost = [i for i, a in actors.items() if a.placed == node.node_id]
        assert 0 < len(lost) < 3 and ray.get_runtime_context().get_node_id() != node.node_id
        c.remove_node(node, allow_graceful=False)
        c.add_node(**NODE)
        seen = train_until(lambda: all(actors[i].restarts for i in lost) and all_at_work(feed), learner, feed)
        assert max(s["staleness/max"] for s in seen) <= 1
    finally:
        feed.close()


def test_actors_join_and_leave_while_the_run_goes_on(cluster, tmp_path):
    learner = make_learner(epochs=1)
    feed = feed_of(tmp_path, learner, 2, 1)
    taken = taken_workers(feed)
    try:
        seen = train(learner, feed, 2)
        for n in (3, 1, 2):
            before = len(taken)
            want(tmp_path, n)
            seen += train_until(
                lambda n=n, before=before: (
                    sorted(feed.ledger.shares) == sorted(feed.pool.actors) == list(range(n))
                    and {w for _, w in taken[before:]} >= set(range(n))
                ),
                learner,
                feed,
            )
    finally:
        feed.close()
    uids = [uid for uid, _ in taken]
    assert max(s["staleness/max"] for s in seen) <= 1 and len(set(uids)) == len(uids)


def test_an_actor_for_whom_there_is_no_place_holds_no_lease_until_there_is_one(cluster, tmp_path):
    others = ray.util.placement_group([{"CPU": 1}] * 3)
    assert others.wait(60)
    learner = make_learner(epochs=1)
    feed = feed_of(tmp_path, learner, 2, 0, place=1.0)
    try:
        train(learner, feed, 3)
        with feed.condition:
            (away,) = [i for i, a in feed.pool.actors.items() if not a.here]
            assert not feed.ledger.held(away) and sorted(feed.ledger.shares) == [1 - away]
        ray.util.remove_placement_group(others)
        taken = taken_workers(feed)
        train_until(lambda: {w for _, w in taken} == {0, 1}, learner, feed)
    finally:
        ray.util.remove_placement_group(others)
        feed.close()


def test_weights_pass_from_machine_to_machine_and_a_dead_one_on_the_way_costs_no_run(cluster, tmp_path):
    learner = make_learner(epochs=1)
    feed = feed_of(tmp_path, learner, 4, 0, fan=1)
    try:
        train_until(lambda: all_at_work(feed), learner, feed)
        assert len({a.placed for a in feed.pool.actors.values()}) == 2
        lacked = feed.pool.lacked
        train(learner, feed, 5)
        # without the tree each of three actors asks for the weights of each update
        assert feed.pool.lacked - lacked <= 5
        ray.kill(feed.pool.actors[0].handle)  # the first of its machine passes weights on
        train_until(lambda: feed.pool.restarts and all_at_work(feed), learner, feed)
        assert feed.pool.restarts == 1
    finally:
        feed.close()


def test_a_run_whose_raylet_is_killed_says_so_and_goes_on_with_a_cluster_started_anew(tmp_path):
    run = Command(
        tmp_path,
        (
            "train",
            *TINY[:-3],
            "--backend",
            "ray",
            "--workers",
            1,
            "--out",
            "run",
            "--no-video",
            "--steps",
            6000,
            "--eval-every",
            1000,
        ),
        guarded=True,
    )

    def daemons(name):
        return [p for p in psutil.Process(run.process.pid).children(recursive=True) if name in p.name()]

    run.until(lambda: len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) > 1)
    (raylet,) = daemons("raylet")
    actors = [p for p in raylet.children() if "RayWorker" in p.name()]
    # as the process pool's, not at Ray's 15
    assert actors and all(p.nice() == psutil.Process().nice() for p in actors)
    raylet.kill()
    run.until(lambda: "going on from the last checkpoint (restart 1)" in run.said())
    assert not psutil.wait_procs(actors, 30)[1]
    done = run.wait(900)
    assert done.code == 0 and "raylet" in done.err and "Raylet is terminated" not in done.out


def test_an_address_at_which_no_cluster_listens_is_said_before_anything_is_trained(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    done = robo_rl(
        tmp_path,
        "train",
        *TINY[:-3],
        "--backend",
        "ray",
        "--workers",
        1,
        "--ray-address",
        f"127.0.0.1:{free}",
    )
    assert (
        f"cannot join the Ray cluster at 127.0.0.1:{free}" in done.mistake
        and "ray start --head" in done.mistake
    )
    if "raylet" in {process_state(pid)[0] for pid in processes()}:
        pytest.skip("a Ray cluster runs on this machine")
    argv = ["train", *TINY[:-3], "--backend", "ray", "--workers", 1, "--ray-address", "auto", "--out", "run"]
    said = robo_rl(tmp_path, *argv, env={"RAY_ADDRESS": ""}).mistake
    assert (
        "--ray-address auto finds no Ray cluster on this machine" in said and not (tmp_path / "run").exists()
    )
