"""What tests of worker processes begin with."""

from pathlib import Path

import torch

from robo_rl.rollout import Collector, Rollout
from robo_rl.runtime.worker import Job


def jobs_of(folder: Path, policy, build, sizes, staleness=0, group=0, gamma=0.99, **more) -> list[Job]:
    """A job per worker, of as many envs as `sizes` says."""
    where = folder, folder / "weights.bin"
    return [
        Job(i, build, n, policy.options, policy.spec, gamma, 0, staleness, True, group, *where, **more)
        for i, n in enumerate(sizes)
    ]


def rows_of(policy, envs, **more):
    """What a fragment of these envs has in the buffer."""
    return Collector(envs, policy, 0.99, 0, **more).layout(policy)


def same_rollouts(a: Rollout, b: Rollout) -> None:
    single = "x0 logp rewards discounts done executed mask version gains outcome"
    for name in single.split():
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for name in ("obs", "trace", "final_obs", "last_obs"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x), name
