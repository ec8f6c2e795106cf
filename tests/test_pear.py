"""PEAR (`--bc.pear`): weights of demonstrated chunks by how the policy would go on."""

import json

import numpy as np
import torch
from commands import TINY, robo_rl

from robo_rl.algos import bc
from robo_rl.algos.pear import DOWN, GAMMA, LEAST, MOST, UP, suffix_weights
from robo_rl.options import BcOptions, PolicyOptions
from robo_rl.policies import make_policy
from robo_rl.policies.policy import ObsSpec


def by_definition(d, last, block, gamma):
    out = []
    for i in range(len(d)):
        after = range(i + block, last[i] + 1, block)
        out.append(np.prod([gamma * np.exp(np.clip(d[j], DOWN, UP)) for j in after]))
    return np.clip(out, LEAST, MOST)


def test_a_weight_is_the_product_over_the_chunks_that_follow_in_its_episode():
    rng, lengths = np.random.default_rng(0), (7, 1, 30, 12)
    last = np.repeat(np.cumsum(lengths) - 1, lengths)
    for block in (1, 3, 8):
        d = rng.normal(0, 0.2, len(last))
        assert np.allclose(suffix_weights(d, last, block), by_definition(d, last, block, GAMMA))
    assert suffix_weights(d, last, 8)[7] == 1  # an episode of one chunk: nothing follows


def test_the_demonstrators_own_policy_learns_as_without_weights_and_weights_have_bounds():
    last = np.full(400, 399)
    assert (suffix_weights(np.zeros(400), last, 4, gamma=1.0) == 1).all()
    assert (suffix_weights(np.zeros(400), last, 4) > 0.9).all()
    far = [suffix_weights(np.full(400, x), last, 4) for x in (-5.0, 5.0)]
    assert (
        far[0].min() == LEAST
        and far[1].max() == MOST
        and (np.diff(far[0]) >= 0).all()
        and (np.diff(far[1]) <= 0).all()
    )


def learnt(weight):
    spec = ObsSpec(state=3, action=2)
    policy = make_policy(PolicyOptions(horizon=2, execute=2, hidden=16, layers=2), spec, 0)
    g = torch.Generator().manual_seed(0)
    sample = bc.demos_sampler(
        {"state": torch.randn(50, 3, generator=g)},
        torch.rand(50, 2, 2, generator=g),
        torch.ones(50, 2),
        weight,
    )
    bc.train(policy, sample, BcOptions(updates=20, batch=16), 0)
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def test_equal_weights_change_nothing_and_others_do():
    plain = learnt(None)
    assert torch.equal(learnt(lambda rows: torch.ones(len(rows))), plain)
    assert torch.allclose(learnt(lambda rows: torch.full((len(rows),), 2.0)), plain, atol=1e-5)
    assert not torch.allclose(learnt(lambda rows: 0.1 + rows / 5), plain, atol=1e-4)


def test_a_run_weighs_its_demonstrations_by_another_runs_policy(tmp_path):
    small = (
        "--algo",
        "bc",
        "--task",
        "reach",
        "--demos",
        "4",
        "--bc.batch",
        "32",
        "--policy.hidden",
        "32",
        "--eval-episodes",
        "8",
        "--no-video",
        "--threads",
        "1",
        "--demos-most",
        "0",
    )
    assert robo_rl(tmp_path, "train", *small, "--bc.updates", "40", "--out", "shown").code == 0
    for name, more in (("plain", ()), ("pear", ("--bc.pear", "shown"))):
        result = robo_rl(
            tmp_path, "train", *small, "--demos", "shown/demos", "--bc.updates", "100", *more, "--out", name
        )
        assert result.code == 0, result.err
    rows = [json.loads(x) for x in (tmp_path / "pear" / "metrics.jsonl").read_text().splitlines()]
    told = [r for r in rows if "sft/pear_mean" in r]
    assert len(told) == 10 and all(
        LEAST <= r["sft/pear_least"] <= r["sft/pear_mean"] <= r["sft/pear_most"] <= MOST + 1e-5 for r in told
    )
    assert told[0]["sft/pear_mean"] < 1  # at first it goes on worse than who showed it
    losses = [
        [
            r["sft/loss"]
            for r in map(json.loads, (tmp_path / n / "metrics.jsonl").read_text().splitlines())
            if "sft/loss" in r
        ][-1]
        for n in ("plain", "pear")
    ]
    assert losses[0] != losses[1]


def test_a_run_that_is_not_there_is_said(tmp_path):
    assert "nowhere" in robo_rl(tmp_path, "train", *TINY, "--bc.pear", "nowhere").mistake
