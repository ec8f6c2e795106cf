"""The average of a policy's weights over its updates: its equation, its exchange with what learns, its
weight, what a run keeps."""

import json
from pathlib import Path

import pytest
import torch
from commands import TINY, robo_rl
from torch import nn

from robo_rl import checkpoint
from robo_rl.algos.averaged_weights import AveragedWeights
from robo_rl.algos.trust import near_success
from robo_rl.experiment.onpolicy import newest_weight
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
