import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robo_rl.sampling import (
    action_table,
    chunk_logp,
    cosine_alphas,
    diffusion_table,
    flow_step,
    flow_table,
    gaussian_logp,
    time_grid,
)


def test_the_time_grid_falls_evenly_from_noise_to_action():
    assert time_grid(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    with pytest.raises(ValueError, match="K must be >= 1"):
        time_grid(0)


@given(st.integers(2, 12), st.sampled_from(["ode", "sde", "cps"]), st.floats(0, 1))
def test_the_step_tables_are_the_step_kernel(k, kind, level):
    x, v, ts, table = torch.randn(5), torch.randn(5), time_grid(k), flow_table(k, kind, level)
    for i in range(k):
        mean, std = flow_step(x.double(), ts[i], ts[i + 1], v.double(), kind, level, float(ts[1]))
        assert torch.allclose(mean, (table.a[i] * x + table.b[i] * v).double(), atol=1e-5)
        assert math.isclose(float(std), float(table.s[i]), abs_tol=1e-6)


def test_the_ode_step_is_an_euler_step():
    table, x, v = flow_table(5, "ode"), torch.randn(7), torch.randn(7)
    assert torch.allclose(table.a * 0 + 1, table.a)
    assert torch.allclose(table.a[2] * x + table.b[2] * v, x - 0.2 * v)


@pytest.mark.parametrize("kind", ["ode", "sde", "cps"])
def test_a_chain_that_is_given_the_clean_chunk_is_the_chain_of_its_velocity(kind):
    table, clean, t = (
        flow_table(6, kind, 0.4),
        action_table(flow_table(6, kind, 0.4)),
        flow_table(6, kind, 0.4).t,
    )
    x, x0 = torch.randn(6), torch.randn(6)
    assert torch.allclose(clean.a * x + clean.b * x0, table.a * x + table.b * (x - x0) / t, atol=1e-5)
    assert torch.equal(clean.s, table.s) and torch.equal(clean.t, t)


def test_flow_sde_equals_its_published_drift_form():
    """mean = x - v d - sigma^2 d/(2t) (x + (1-t) v), away from t=1."""
    level, ts = 0.7, time_grid(8)
    for i in range(1, 8):
        t, d = float(ts[i]), 1 / 8
        x, v = torch.randn(9).double(), torch.randn(9).double()
        sigma2 = level**2 * t / (1 - t)
        mean, std = flow_step(x, ts[i], ts[i + 1], v, "sde", level, float(ts[1]))
        assert torch.allclose(mean, x - v * d - sigma2 * d / (2 * t) * (x + (1 - t) * v))
        assert math.isclose(float(std), math.sqrt(sigma2 * d))


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_no_noise_level_is_the_ode_bit_for_bit(kind):
    quiet, loud = flow_table(6, "ode"), flow_table(6, kind, 0.0)
    assert torch.equal(quiet.a, loud.a) and torch.equal(quiet.b, loud.b) and not loud.s.any()


def _gaussian_chain(k, level, n=200_000):
    """K-step chain over data N(.7, .4^2) with the exact velocity, convention noise at t=1."""
    rng, ts, table = np.random.default_rng(0), time_grid(k).numpy(), flow_table(k, "sde", level)
    x = rng.standard_normal(n)
    for i in range(k):
        t = ts[i]
        var = (1 - t) ** 2 * 0.16 + t**2
        r = x - (1 - t) * 0.7
        v = t * r / var - (0.7 + (1 - t) * 0.16 * r / var)
        x = float(table.a[i]) * x + float(table.b[i]) * v + float(table.s[i]) * rng.standard_normal(n)
    return x.mean(), x.std()


def test_flow_sde_keeps_the_marginals_for_many_steps_but_not_for_four():
    mean, std = _gaussian_chain(400, 0.5)
    assert abs(mean - 0.7) < 0.01 and abs(std - 0.4) < 0.01
    assert abs(_gaussian_chain(4, 0.0)[1] - 0.260) < 0.01 and abs(_gaussian_chain(4, 0.5)[1] - 0.326) < 0.01


def test_ddim_with_full_noise_over_all_steps_is_the_ddpm_posterior():
    table, bars, prev = diffusion_table(20, 20, 1.0)
    full = cosine_alphas(20).flip(0)
    alpha = full / torch.cat([full[1:], torch.ones(1, dtype=torch.float64)])
    before = torch.cat([full[1:], torch.ones(1, dtype=torch.float64)])
    posterior = (1 - before) / (1 - full) * (1 - alpha)
    assert torch.allclose(table.s.double() ** 2, posterior, atol=1e-6)
    x, eps = torch.randn(3).double(), torch.randn(3).double()
    for i in range(19):
        ddpm = (x - (1 - alpha[i]) / (1 - full[i]).sqrt() * eps) / alpha[i].sqrt()
        assert torch.allclose(table.a[i] * x + table.b[i] * eps, ddpm, atol=1e-4)
    assert torch.equal(bars, full.float()) and torch.equal(prev, before.float())


@pytest.mark.parametrize("train_steps,k", [(20, 20), (20, 5), (12, 3), (6, 1)])
def test_the_diffusion_network_sees_the_time_of_the_step_it_is_asked_about(train_steps, k):
    """Step i of n has noise level alpha-bar(i) and time (i + 1)/n: 1 at the noisiest, and never 0."""
    table, bars, prev = diffusion_table(train_steps, k, 1.0)
    assert torch.allclose(table.t, 1 - torch.arange(k) / k) and float(table.t[0]) == 1.0

    def bar(t):  # the cosine schedule as a function of that time
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2 / math.cos(0.008 / 1.008 * math.pi / 2) ** 2

    want = torch.tensor([bar(float(t)) for t in table.t])
    assert torch.allclose(bars[1:], want[1:], atol=1e-5) and (k == train_steps or k == 1 or bars[0] < 0.01)
    assert torch.allclose(prev, torch.tensor([bar(float(t) - 1 / k) for t in table.t]), atol=1e-5)


def test_ddim_with_the_true_noise_returns_the_data():
    table, bars, _ = diffusion_table(20, 5, 0.0)
    x0, eps = torch.randn(4).double(), torch.randn(4).double()
    x = bars[0].double().sqrt() * x0 + (1 - bars[0].double()).sqrt() * eps
    for i in range(5):
        x = table.a[i] * x + table.b[i] * eps
    assert torch.allclose(x, x0, atol=1e-3)


def test_a_deterministic_step_has_log_density_zero_and_a_finite_gradient():
    x = torch.randn(4, requires_grad=True)
    logp = gaussian_logp(x, torch.zeros(4), torch.zeros(4))
    logp.sum().backward()
    assert not logp.any() and torch.isfinite(x.grad).all()


def test_the_log_density_is_torch_distributions_one():
    x, mean, std = torch.randn(5), torch.randn(5), torch.rand(5) + 0.1
    assert torch.allclose(
        gaussian_logp(x, mean, std), torch.distributions.Normal(mean, std).log_prob(x), atol=1e-5
    )


def test_steps_that_are_not_executed_do_not_move_the_log_density():
    x, mean, std = torch.randn(3, 6, 2), torch.randn(3, 6, 2), torch.full((3, 1, 1), 0.3)
    other = x.clone()
    other[:, 4:] += 5
    assert torch.equal(chunk_logp(x, mean, std, 4, "sum"), chunk_logp(other, mean, std, 4, "sum"))


def test_the_mean_reduction_is_the_root_of_the_sums_ratio():
    x, a, b, std = (
        torch.randn(3, 6, 2),
        torch.randn(3, 6, 2),
        torch.randn(3, 6, 2),
        torch.full((3, 1, 1), 0.5),
    )
    total = chunk_logp(x, a, std, 4, "sum") - chunk_logp(x, b, std, 4, "sum")
    mean = chunk_logp(x, a, std, 4, "mean") - chunk_logp(x, b, std, 4, "mean")
    assert torch.allclose(total / 8, mean, atol=1e-5)
