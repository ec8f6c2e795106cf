"""The average of a policy's weights over its updates: its equation, its exchange with what learns, its
weight, what a run keeps."""

import json
from pathlib import Path

import pytest
import torch
from commands import TINY, TINY_REPLAY, robo_rl
from torch import nn

from robo_rl import checkpoint
from robo_rl.algos import bc
from robo_rl.algos.averaged_weights import AveragedWeights
from robo_rl.algos.trust import near_success
from robo_rl.experiment.onpolicy import newest_weight
from robo_rl.optim import AdamW
from robo_rl.options import BcOptions
from robo_rl.policies.policy import Policy


def net_and_average():
    net = nn.Linear(3, 2)
    return net, AveragedWeights(list(net.parameters()))


def learn(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p))
    return net.weight.detach().clone()


def test_the_average_is_the_sum_of_all_updates_by_their_weights():
    net, average = net_and_average()
    first = net.weight.detach().clone()
    second, third = learn(net), None
    average.add(0.5)
    third = learn(net)
    average.add(0.2)
    assert torch.allclose(average.mean[0], 0.8 * (0.5 * first + 0.5 * second) + 0.2 * third)
    average.add(1.0)
    assert torch.equal(average.mean[0], third)


def test_what_learns_comes_back_bit_for_bit_after_the_average_was_shown_also_when_that_failed():
    net, average = net_and_average()
    mean, learns = average.mean[0].clone(), learn(net)
    with pytest.raises(RuntimeError, match="an evaluation"), average.shown():
        assert torch.equal(net.weight, mean) and torch.equal(average.mean[0], learns)
        raise RuntimeError("an evaluation")
    assert torch.equal(net.weight, learns) and torch.equal(average.mean[0], mean)


def test_an_average_goes_on_from_a_checkpoint_that_holds_it_as_the_policy():
    net, average = net_and_average()
    learn(net)
    average.add(0.3)
    with average.shown():
        policy, learns = {k: v.clone() for k, v in net.state_dict().items()}, average.state_dict()
    other, resumed = net_and_average()
    other.load_state_dict(policy)
    resumed = AveragedWeights(list(other.parameters()))
    resumed.load_state_dict(learns)
    resumed.swap()
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), net.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(resumed.mean, average.mean, strict=True))


def test_the_average_of_weights_in_16_bits_moves_by_steps_that_they_cannot_hold():
    """bf16 has 8 bits: 0.005 of a difference of a tenth is rounded away, at every update anew."""
    net = nn.Linear(3, 2).to(torch.bfloat16)
    average, wide = AveragedWeights(list(net.parameters())), net.weight.detach().float().clone()
    for _ in range(500):
        with torch.no_grad():
            net.weight.add_(0.1 * torch.randn_like(net.weight))
        average.add(0.005)
        wide.lerp_(net.weight.detach().float(), 0.005)
    learns = net.weight.detach().clone()
    assert torch.equal(average.mean[0], wide)
    with average.shown():
        assert torch.equal(net.weight, wide.bfloat16())
        policy, saved = {k: v.clone() for k, v in net.state_dict().items()}, average.state_dict()
    assert torch.equal(net.weight, learns) and torch.equal(average.mean[0], wide)
    tensors: dict[str, torch.Tensor] = {}  # as a checkpoint holds it
    saved = checkpoint.unpack(checkpoint.pack(saved, tensors), tensors)
    other = nn.Linear(3, 2).to(torch.bfloat16)
    other.load_state_dict(policy)
    resumed = AveragedWeights(list(other.parameters()))
    resumed.load_state_dict(saved)
    resumed.swap()
    assert torch.equal(other.weight, learns) and torch.equal(resumed.mean[0], wide)


def test_an_average_of_16_bits_is_read_from_a_checkpoint_that_has_what_learns_alone():
    net = nn.Linear(3, 2).to(torch.bfloat16)
    average, shown = AveragedWeights(list(net.parameters())), net.weight.detach().clone()
    average.load_state_dict([p.detach() + 1 for p in net.parameters()])
    average.swap()
    assert torch.equal(net.weight, shown + 1) and torch.equal(average.mean[0], shown.float())


def test_supervised_weights_in_16_bits_end_where_those_in_32_do():
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(torch.ones(4, dtype=dtype))
        bc.fit([p], lambda g, p=p: (p.float() - 1.5).square().sum(), BcOptions(updates=1500), 0)
        ends.append(float(p.detach().float().mean()))
    assert ends[1] == pytest.approx(ends[0], abs=5e-3)


def test_what_steps_follows_weights_in_16_bits_that_somebody_else_set():
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    opt = AdamW([p], lr=1e-3)
    p.grad = torch.ones_like(p)
    opt.step()
    with torch.no_grad():
        p.fill_(3.0)
    opt.follow()
    opt.param_groups[0]["lr"] = 0.0
    opt.step()
    assert (p == 3).all()


def test_the_newest_update_weighs_less_the_fewer_episodes_fail_and_never_less_than_asked_for():
    assert newest_weight(0.05, {}) == newest_weight(0.05, {"episodes": 0.0, "success": 0.0}) == 1
    assert newest_weight(0.05, {"episodes": 50.0, "success": 0.5}) == 1
    assert newest_weight(0.05, {"episodes": 98.0, "success": 0.8}) == pytest.approx(
        near_success(0.8 * 98, 98) ** 2
    )
    assert newest_weight(0.05, {"episodes": 998.0, "success": 1.0}) == 0.05


def weights(policy: Policy) -> list[torch.Tensor]:
    assert isinstance(policy, nn.Module)
    return [p.detach() for p in policy.parameters()]


def test_a_run_keeps_the_average_as_its_policy_and_beside_it_what_learns(tmp_path: Path):
    argv = (
        "--task",
        "reach",
        "--demos",
        20,
        "--bc.updates",
        500,
        "--policy.hidden",
        64,
        "--bc.batch",
        256,
        "--bc.lr",
        0.001,
        "--rl.average",
        0.3,
        "--rl.explore",
        0.6,
        "--eval-episodes",
        40,
        "--target",
        0,
    )
    assert (end := robo_rl(tmp_path, "train", *TINY, *argv, "--out", "run")).code == 0, end
    told = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    used = [row["train/average_weight"] for row in told if "train/average_weight" in row]
    assert min(used) < 1 and all(0.3 <= w <= 1 for w in used)
    differ = []
    for path in checkpoint.checkpoints(tmp_path / "run")[1:]:  # the first is of the supervised policy
        kept, learns = weights(checkpoint.load_policy(path)[0]), checkpoint.load_train(path)[0]["learns"]
        differ.append(any(not torch.equal(a, b) for a, b in zip(kept, learns, strict=True)))
    assert any(differ)  # where a run fell below its start and ends with its best checkpoint they are the same


def test_a_run_from_replay_keeps_the_average_of_its_actor_and_beside_it_what_learns(tmp_path: Path):
    argv = ("--algo", "demo_sac", "--rl.lr", 0.01, "--rl.average", 0.1)
    assert (end := robo_rl(tmp_path, "train", *TINY_REPLAY, *argv, "--out", "run")).code == 0, end
    supervised, *later = checkpoint.checkpoints(tmp_path / "run")
    assert later and "learns" not in checkpoint.load_train(supervised)[0]
    for path in later:
        policy, learns = checkpoint.load_policy(path)[0], checkpoint.load_train(path)[0]["learns"]
        kept = [p.detach() for name, p in policy.named_parameters() if name.startswith("actor.")]
        assert len(kept) == len(learns)
        assert any(not torch.equal(a, b) for a, b in zip(kept, learns, strict=True))
