"""The same feed with Ray actors as its crew: equality, killed actors, killed nodes."""

import socket
import time
from pathlib import Path

import psutil
import pytest
import torch
from commands import TINY, Command, robo_rl
from test_runtime import SPEC, N, T, build, make_learner, plain, taken_uids, train, want, weights

from robo_rl.rollout import Collector
from robo_rl.runtime.crewed import Crewed
from robo_rl.runtime.worker import Job

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'robo_rl[ray]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs for actors and two nodes, all on this machine."""
    from ray.cluster_utils import Cluster
    c = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000, "include_dashboard": False})
    nodes = [c.add_node(num_cpus=2, object_store_memory=80_000_000) for _ in range(2)]
    ray.init(address=c.address, log_to_driver=False, logging_level="ERROR",
             runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}})
    yield c, nodes
    ray.shutdown()
    c.shutdown()


def feed_of(folder, learner, workers, staleness):
    from robo_rl.runtime.ray_crew import RayCrew
    jobs, layouts = [], []
    for i in range(workers):
        jobs.append(Job(i, build, N // workers, learner.policy.options, SPEC, 0.99, 0, staleness, True, 0, folder, folder / "w"))
        layouts.append(Collector(build(N // workers), learner.policy, 0.99, 0).layout(learner.policy))
    return Crewed(folder, RayCrew(jobs, learner.policy), [N // workers] * workers, layouts, N * T, T, staleness)


def test_one_actor_without_staleness_gives_the_parameters_of_the_plain_loop_even_if_it_is_killed(cluster, tmp_path):
    for kill in (False, True):
        learner = make_learner()
        feed = feed_of(tmp_path / str(kill), learner, 1, 0)

        def each(i, feed, kill=kill):
            if kill and i in (2, 4):
                ray.kill(feed.crew.actors[0].handle)
        try:
            train(learner, feed, 6, each)
            assert feed.crew.restarts == 2 * kill
        finally:
            feed.close()
        assert torch.equal(weights(learner), plain(6))


def test_the_run_goes_on_when_a_node_is_killed(cluster, tmp_path):
    c, nodes = cluster
    learner = make_learner()
    feed = feed_of(tmp_path, learner, 3, 1)
    try:
        train(learner, feed, 4)
        where = {i: ray.get(a.handle.node.remote()) for i, a in feed.crew.actors.items()}
        assert len(set(where.values())) == 2
        mine = ray.get_runtime_context().get_node_id()  # one that this process is not attached to
        c.remove_node(next(n for n in nodes if n.node_id != mine and n.node_id in where.values()), allow_graceful=False)
        c.add_node(num_cpus=2, object_store_memory=80_000_000)
        began = time.monotonic()
        seen = train(learner, feed, 8)
        assert feed.crew.restarts >= 1 and max(s["stal/max"] for s in seen) <= 1
        assert time.monotonic() - began < 200
    finally:
        feed.close()


def test_actors_join_and_leave_while_the_run_goes_on(cluster, tmp_path):
    learner = make_learner(epochs=1)
    feed = feed_of(tmp_path, learner, 2, 1)
    uids, end = taken_uids(feed), time.monotonic() + 200
    try:
        seen = train(learner, feed, 2)
        for n in (3, 1, 2):
            want(tmp_path, n)
            while len(feed.ledger.shares) != n or len(feed.crew.actors) != n or not all(
                    a.here for a in list(feed.crew.actors.values())):
                assert time.monotonic() < end, (n, feed.crew.actors.keys(), feed.ledger.shares)
                seen += train(learner, feed, 1)
            assert sorted(feed.crew.actors) == list(range(n))
            seen += train(learner, feed, 3)
        workers = {int(w) for w in feed.slots.head["worker"]}
    finally:
        feed.close()
    assert max(s["stal/max"] for s in seen) <= 1
    assert len(set(uids)) == len(uids) and workers >= {0, 1, 2}


def test_actors_for_whom_there_is_no_place_hold_no_lease_and_the_others_do_their_share(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("robo_rl.runtime.ray_crew.PLACE", 1.0)
    learner = make_learner(epochs=1)
    feed, began = feed_of(tmp_path, learner, 8, 0), time.monotonic()
    try:
        train(learner, feed, 3)
        with feed.condition:
            away = [i for i, a in feed.crew.actors.items() if not a.here]
            assert away and not any(feed.ledger.held(i) for i in away) and not set(away) & feed.ledger.shares.keys()
    finally:
        feed.close()
    assert time.monotonic() - began < 200


def test_weights_pass_from_machine_to_machine_and_a_dead_one_on_the_way_costs_no_run(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("robo_rl.runtime.ray_crew.FAN", 1)
    learner = make_learner(epochs=1)
    feed = feed_of(tmp_path, learner, 4, 1)
    try:
        train(learner, feed, 3)
        ray.kill(feed.crew.actors[0].handle)  # the first of its machine passes weights on
        seen = train(learner, feed, 6)
        assert feed.crew.restarts == 1 and max(s["stal/max"] for s in seen) <= 1
    finally:
        feed.close()


@pytest.mark.xfail(reason="open: the run still ends with exit code 1 and no word; robo_rl train --resume goes on", strict=True)
def test_a_run_whose_raylet_is_killed_says_so_and_goes_on_with_a_cluster_started_anew(tmp_path):
    run = Command(tmp_path, ("train", *TINY[:-3], "--backend", "ray", "--workers", 1, "--out", "run", "--no-video",
                             "--steps", 40000, "--eval-every", 2000))

    def raylets():
        return [p for p in psutil.Process(run.process.pid).children(recursive=True) if "raylet" in p.name()]
    run.until(lambda: len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) > 1 and raylets(), 200)
    raylets()[0].kill()
    done = run.wait(300)
    assert done.code == 0 and "raylet" in done.err and "going on from the last checkpoint (restart 1)" in done.err


def test_an_address_at_which_no_cluster_listens_is_said_before_anything_is_trained(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    done = robo_rl(tmp_path, "train", *TINY[:-3], "--backend", "ray", "--workers", 1, "--ray-address", f"127.0.0.1:{free}")
    assert f"cannot join the Ray cluster at 127.0.0.1:{free}" in done.mistake and "ray start --head" in done.mistake
