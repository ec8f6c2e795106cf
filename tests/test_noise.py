"""Noise from keys: every bit counts, the same key draws the same, and what is drawn is normal."""

import numpy as np
import pytest
import torch
from test_runtime import build, make_learner

from robo_rl.noise import mix, seed_noise
from robo_rl.rollout import Collector, new_columns
from robo_rl.starts import hashed


def draw(key, n=20):
    return torch.randn(n, generator=seed_noise(torch.Generator(), key))


@pytest.mark.parametrize("n", [3, 20])
def test_every_one_of_the_63_bits_of_a_key_changes_the_noise(n):
    seen = {tuple(draw(key, n).tolist()) for key in [5, *(5 ^ 1 << bit for bit in range(63))]}
    assert len(seen) == 64


def test_the_same_key_draws_the_same_whatever_the_generator_drew_before():
    g = torch.Generator()
    want = torch.randn(7, generator=seed_noise(g, 12345))
    torch.randn(3, generator=g)  # an odd number: one normal is kept for the next call
    assert torch.equal(torch.randn(7, generator=seed_noise(g, 12345)), want) and g.initial_seed() == 12345
    g.manual_seed(2)
    assert torch.equal(
        torch.randn(3, generator=g), torch.randn(3, generator=torch.Generator().manual_seed(2))
    )


def test_the_words_of_the_state_are_splitmix64_from_the_key():
    key = mix(1, 2, 3)
    state = seed_noise(torch.Generator(), key).get_state().numpy()[24 : 24 + 8 * 624].view(np.uint64)
    h, want = key, []
    for _ in range(312):
        out = int(hashed(h))  # one step of SplitMix64 is the hash of its counter
        want += [out & 0xFFFFFFFF, out >> 32]
        h = (h + 0x9E3779B97F4A7C15) % 2**64 - (2**64 if (h + 0x9E3779B97F4A7C15) % 2**64 >= 2**63 else 0)
    assert state.tolist() == want


def test_noise_of_neighbouring_keys_is_normal_and_independent():
    x = torch.stack([draw(mix(7, i), 64) for i in range(4000)]).double()
    n = x.numel()
    assert abs(float(x.mean())) < 4 / n**0.5 and abs(float(x.var()) - 1) < 4 * (2 / n) ** 0.5
    for y in (x[1:], torch.stack([draw(i, 64) for i in range(1, 4000)]).double()):
        assert abs(float((x[:-1] * y).mean())) < 4 / n**0.5  # with the next key, and with raw counters
    assert abs(float((x[:, 1:] * x[:, :-1]).mean())) < 4 / n**0.5
    assert abs(float(x.pow(4).mean()) - 3) < 4 * (96 / n) ** 0.5


def test_decisions_of_seeds_that_differ_above_the_32nd_bit_differ():
    learner, out = make_learner(), []
    for decision in (0, 1):
        c = Collector(build(4), learner.policy, 0.99, 0)
        c.observe = lambda columns, t, c=c, d=decision: (Collector.observe(c, columns, t), 99 + (d << 40))[1]
        columns = new_columns(c.layout(learner.policy), 1)
        c.decide(learner.policy, columns, 0)
        out.append(columns["x0"])
    assert not np.array_equal(*out)
