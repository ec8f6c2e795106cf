"""Parts of the pool of Ray actors that need no cluster: the tree of weights, messages out of order, start-up
failures in one line."""

import sys
import types

import numpy as np
import pytest
import torch
from test_runtime import SPEC, build, make_learner

from robo_rl.errors import UserError
from robo_rl.runtime import ray_pool
from robo_rl.runtime.deltas import DeltaSender
from robo_rl.runtime.ray_pool import RayWorker, join, tree
from robo_rl.runtime.rollout_buffer import Lease
from robo_rl.runtime.worker import Job


def reached(pairs) -> list[tuple[object, int]]:
    """Every actor that a message reaches, and how many hops from the learner."""
    out = []
    for handle, below in pairs:
        out += [(handle, 1), *((h, d + 1) for h, d in reached(below))]
    return out


@pytest.mark.parametrize(("machines", "each"), [(1, 1), (1, 7), (3, 2), (4, 1), (5, 3), (40, 2), (200, 1)])
def test_weights_reach_every_actor_once_and_the_learner_sends_to_four_machines_at_most(machines, each):
    nodes = {f"m{i}": [(i, k) for k in range(each)] for i in range(machines)}
    roots = tree(nodes)
    got = reached(roots)
    assert sorted(h for h, _ in got) == sorted(h for hs in nodes.values() for h in hs) and len(roots) <= 4
    depth, reach = 1, 4  # machines that are reached in `depth` hops: 4 + 16 + …
    while reach < machines:
        depth, reach = depth + 1, reach + 4 ** (depth + 1)
    # the first actor of each machine; its others one hop later
    assert max(d for (_, k), d in got if k == 0) == depth
    assert max((d for (_, k), d in got if k), default=0) <= depth + 1
    assert max(sum(1 for (i, _), _ in below if i != h[0]) for h, below in every(roots)) <= 4


def every(pairs):
    for handle, below in pairs:
        yield handle, below
        yield from every(below)


def actor():
    learner = make_learner()
    job = Job(0, build, 4, learner.policy.options, SPEC, 0.99, 0, 0, True, 0, None, None)
    sender = DeltaSender(dict(learner.policy.state_dict()), 0, link=1e9)
    messages = [sender.full()]
    for version in range(1, 4):
        with torch.no_grad():
            next(learner.policy.parameters()).add_(1.0)
        messages.append(sender.send(version, dict(learner.policy.state_dict())))
    return RayWorker(job), messages, learner


def test_weights_that_overtake_each_other_in_the_tree_all_arrive():
    a, (full, one, two, three), learner = actor()
    assert [a.receive(m) for m in (full, two, three)] == ["applied", "need_full", "need_full"]
    assert a.receive(one) == "applied"
    assert a.refresh() == 3 and all(
        torch.equal(v, learner.policy.state_dict()[k]) for k, v in a.policy.state_dict().items()
    )


def test_an_actor_that_lacks_weights_says_so_soon_and_goes_on_once_it_has_them(monkeypatch):
    monkeypatch.setattr(ray_pool, "NEWS", 0.05)
    a, (full, one, *_), _ = actor()
    lease = Lease(0, 0, 3, 0, 0, salt=77)
    assert "version 1 did not come" in a.collect(lease, 3, {}, 1)["lacks"]
    a.receive(full)
    assert "here is 0" in a.collect(lease, 3, {}, 1)["lacks"]
    a.receive(one)
    got = a.collect(lease, 3, {}, 1)
    assert got["rows"] == 3 and got["oldest"] == 1 and got["bad"] == "" and len(set(got["sums"])) == 3
    assert np.isfinite(got["columns"]["x0"]).all()


def test_whatever_ray_raises_at_start_up_is_one_line(monkeypatch):
    class Ray(types.ModuleType):
        said, starts = None, 0

        def is_initialized(self):
            return False

        def shutdown(self):
            pass

        def init(self, **options):
            self.starts += 1
            raise self.said

    ray = Ray("ray")
    monkeypatch.setitem(sys.modules, "ray", ray)
    ray.__spec__ = object()
    monkeypatch.setattr(ray_pool, "processes", lambda: [1])
    monkeypatch.setattr(ray_pool, "process_state", lambda pid: ("raylet", "S", 0))  # of another's cluster
    for ray.said in (
        Exception("The current node timed out during startup.\nThis can happen if …"),
        RuntimeError(""),
        ConnectionError("no"),
        ValueError("object_store_memory is too small"),
        AssertionError(),
    ):
        for address in ("", "auto"):
            with pytest.raises(UserError) as e:
                join(address, 2)
            assert "\n" not in str(e.value) and ("ray start --head" if address else "on this machine") in str(
                e.value
            )
            # a cluster of our own may only have been slow to start
            assert ray.starts == (1 if address else ray_pool.STARTS)
            ray.starts = 0


@pytest.mark.parametrize("address", ["cluster", "127.0.0.1:", "127.0.0.1:99999", ":0"])
def test_an_address_that_is_none_is_said_at_once(address):
    """Not by Ray, after demonstrations and supervision."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'robo_rl[ray]'")
    with pytest.raises(UserError, match=f"--ray-address must be auto or HOST:PORT, .*, got '{address}'"):
        ray_pool.check(address)


def test_a_cluster_of_our_own_that_does_not_start_at_once_is_started_again(monkeypatch):
    class Ray(types.ModuleType):
        calls = ()

        def is_initialized(self):
            return False

        def shutdown(self):
            self.calls += ("shutdown",)

        def init(self, **options):
            self.calls += ("init",)
            if len(self.calls) == 1:
                raise RuntimeError("The current node timed out during startup.")

    ray = Ray("ray")
    ray.__spec__ = object()
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert join("", 2) is ray and ray.calls == ("init", "shutdown", "init")
