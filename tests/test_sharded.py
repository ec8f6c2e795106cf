"""FSDP2 on two gloo ranks: the gradients and the step of one process."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from robo_rl.errors import UserError
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.runtime.sharded import gather, own_rows, shard, whole_gradients

ROWS = 32


def problem():
    policy = make_policy(PolicyOptions(horizon=4, execute=4, hidden=32, layers=2), ObsSpec(state=4, action=2), 0)
    g = torch.Generator().manual_seed(0)
    obs = {"state": torch.randn(ROWS, 4, generator=g)}
    return policy, obs, policy.act(obs, g, True), torch.randn(ROWS, generator=g)


def backward(policy, obs, chunk, adv, rows):
    logp, _ = policy.score(policy.encode({"state": obs["state"][rows]}), {k: v[rows] for k, v in chunk.trace.items()})
    (-((logp.sum(-1) - chunk.logp[rows].sum(-1)).exp() * adv[rows]).mean()).backward()


def optimizer(policy):
    return torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-5)


def rank(index, world, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=index, world_size=world)
    policy, *rest = problem()
    shard(policy)
    backward(policy, *rest, own_rows(torch.arange(ROWS)))
    gradients = whole_gradients(policy)
    optimizer(policy).step()
    weights = gather(policy)
    with pytest.raises(UserError, match="does not divide over 2 ranks"):
        own_rows(torch.arange(ROWS - 1))
    if index == 0:
        torch.save((gradients, weights), f"{folder}/out.pt")
    dist.destroy_process_group()


def test_two_ranks_have_the_gradients_and_take_the_step_of_one_process(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(rank, (2, port, str(tmp_path)), 2)
    gradients, weights = torch.load(tmp_path / "out.pt")
    policy, *rest = problem()
    backward(policy, *rest, torch.arange(ROWS))
    mine = dict(policy.named_parameters())
    assert gradients.keys() == {k for k, p in mine.items() if p.grad is not None}
    for k, g in gradients.items():
        assert torch.allclose(g, mine[k].grad, rtol=1e-4, atol=1e-6 * float(mine[k].grad.abs().max())), k
    optimizer(policy).step()
    for k, v in policy.state_dict().items():
        assert torch.allclose(weights[k], v, atol=2e-5), k


def test_a_learner_alone_is_not_sharded():
    with pytest.raises(UserError, match="torchrun"):
        shard(problem()[0])
