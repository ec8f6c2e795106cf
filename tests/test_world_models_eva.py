"""EVA's score against its definition; the inverse-dynamics model against commands that are known."""

import math

import numpy as np
import pytest
import torch

from robo_rl.errors import UserError
from robo_rl.types import ActionAxis, ControlSpec
from world_models import eva

LIMITS = eva.MotionLimits(
    speed=(*(0.85 * v for v in (3.1416, 3.4034, 3.1416, 3.927, 3.927, 3.927)), 2.0),  # the paper's arm
    acceleration=(5.0,) * 6 + (10.0,),
    weight=(1.0,) * 6 + (0.2,),
)
DT = 1 / 30


def ramp(speed=0.5, steps=30):
    """Constant velocity [rad/s] on every dimension, in float64 (a third difference eats digits)."""
    return (torch.arange(steps, dtype=torch.float64) * DT * speed)[None, :, None].expand(1, steps, 7)


def test_constant_velocity_within_the_limits_scores_exactly_ten():
    terms = eva.penalty_terms(ramp(), DT, LIMITS)
    assert all(float(t) < 1e-12 for t in terms.values())
    assert float(eva.score(ramp(), DT, LIMITS)) == pytest.approx(10, abs=1e-9)
    assert float(eva.score(torch.zeros(1, 8, 7), DT, LIMITS)) == 10


def test_a_penalty_of_three_scales_halves_the_score():
    """(1 + 6000/2000)^(-1/2) = 1/2: one dimension at constant velocity beyond its limit by sqrt(3000)."""
    limits = eva.MotionLimits(speed=(1.0,), acceleration=(5.0,), weight=(1.0,))
    fast = (torch.arange(10, dtype=torch.float64) * DT * (1 + math.sqrt(3000)))[None, :, None]
    assert float(eva.score(fast, DT, limits)) == pytest.approx(5)


def test_velocity_acceleration_and_jerk_of_a_cubic():
    t = torch.arange(12, dtype=torch.float64) * DT
    v, acc, jerk = eva.differences((t**3)[None, :, None], DT)
    assert jerk[0, :, 0].tolist() == pytest.approx([6.0] * 9)
    assert acc[0, :, 0].diff().tolist() == pytest.approx([6 * DT] * 9) and v.shape == (1, 11, 1)


def test_halving_dt_makes_the_jerk_eight_times_greater():
    a = torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(0))
    one, two = eva.differences(a, DT), eva.differences(a, DT / 2)
    for x, y, factor in zip(one, two, (2, 4, 8), strict=False):
        assert torch.allclose(y, factor * x, rtol=1e-4)


def test_huber_by_hand():
    got = eva.huber(torch.tensor([0.5, -1.0, 3.0]), torch.tensor(1.0))
    assert got.tolist() == [0.125, 0.5, 2.5]


def test_every_penalty_by_hand():
    """Positions 0 0 1 1 at dt 1: v = 0 1 0, acc = 1 -1, jerk = -2; limits v 0.5, a 0.4."""
    limits = eva.MotionLimits(speed=(0.5,), acceleration=(0.4,), weight=(3.0,))
    terms = eva.penalty_terms(torch.tensor([[[0.0], [0], [1], [1]]]), 1.0, limits)
    assert float(terms["jerk"]) == pytest.approx(0.2 * (2 - 0.1))
    assert float(terms["acceleration"]) == pytest.approx(0.2 * (1 - 0.1))
    assert float(terms["speed_limit"]) == pytest.approx(0.25 / 3)
    assert float(terms["acceleration_limit"]) == pytest.approx(0.36)
    p = 0.5 * 0.38 + 0.25 * 0.18 + 2 * 0.25 / 3 + 0.36
    got = eva.score(torch.tensor([[[0.0], [0], [1], [1]]]), 1.0, limits, eva.Penalties(scale=1.0))
    assert float(got) == pytest.approx(10 / math.sqrt(1 + p))


def test_shares_beyond_each_limit_by_hand():
    """Positions 0 0 1 1 at dt 1: v = 0 1 0, acc = 1 -1, jerk = -2, whose limit is a_max/dt."""
    a = torch.tensor([[[0.0], [0], [1], [1]]])
    for v_max, a_max, want in ((0.5, 0.4, (1 / 3, 1, 1)), (1.0, 1.5, (0, 0, 1)), (2.0, 2.0, (0, 0, 0))):
        got = eva.beyond(a, 1.0, eva.MotionLimits(speed=(v_max,), acceleration=(a_max,), weight=(1.0,)))
        assert [float(got[k]) for k in ("speed", "acceleration", "jerk")] == pytest.approx(want)


def test_the_reference_scale_is_the_penalty_of_full_acceleration_on_and_off_at_every_step():
    """acc alternates 0, 2 (a_max 2, dt 0.5): jerk +-4; the mean of the acceleration penalty is half that of
    always on."""
    limits = eva.MotionLimits(speed=(1e6, 1e6), acceleration=(2.0, 2.0), weight=(1.0, 3.0))
    p = eva.reference(limits, 0.5)
    assert p.scale == pytest.approx(0.375 * 4 * (0.5 / 0.25 + 0.25))
    acc = torch.tensor([0.0, 2.0] * 6, dtype=torch.float64)
    a = torch.cat([torch.zeros(2, dtype=torch.float64), (acc.cumsum(0) * 0.5).cumsum(0) * 0.5])[
        None, :, None
    ].expand(1, 14, 2)
    expected = 0.5 * 0.375 * 16 + 0.25 * 0.375 * 4 / 2
    assert float(eva.score(a, 0.5, limits, p)) == pytest.approx(10 / math.sqrt(1 + expected / p.scale))


def test_only_the_ratio_of_weights_counts():
    a = torch.randn(3, 20, 7, generator=torch.Generator().manual_seed(0))
    double = eva.MotionLimits(
        speed=LIMITS.speed, acceleration=LIMITS.acceleration, weight=tuple(2 * w for w in LIMITS.weight)
    )
    assert torch.allclose(eva.score(a, DT, LIMITS), eva.score(a, DT, double))


def test_the_score_falls_as_noise_is_added():
    noise = torch.randn(8, 30, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = [
        float(eva.score(ramp() + s * noise, DT, LIMITS).mean()) for s in (0, 1e-3, 3e-3, 0.01, 0.03, 0.1)
    ]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 6 and 0 < scores[-1] < scores[0]


def test_fewer_than_four_steps_score_nothing_and_a_motionless_clip_scores_best():
    assert eva.score(torch.zeros(2, 3, 7), DT, LIMITS).tolist() == [0, 0]
    assert eva.score(torch.zeros(2, 4, 7), DT, LIMITS).tolist() == [10, 10]


def test_the_gradient_of_the_score_agrees_with_differences():
    a = 0.01 * torch.randn(1, 8, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: eva.score(x, 1.0, LIMITS, eva.Penalties(scale=1.0)), a.requires_grad_()
    )


def test_wrong_limits_or_times_are_named():
    with pytest.raises(UserError, match="limits are for 7 dimensions, the motion has 3"):
        eva.score(torch.zeros(1, 8, 3), DT, LIMITS)
    with pytest.raises(UserError, match="dt must be"):
        eva.score(torch.zeros(1, 8, 7), 0.0, LIMITS)
    with pytest.raises(UserError, match="one speed, acceleration and weight"):
        eva.MotionLimits(speed=(1.0,), acceleration=(1.0, 2.0), weight=(1.0,))


CONTROL = ControlSpec(
    "toy",
    "t",
    (
        ActionAxis("dx", "m", -0.02, 0.02, "delta", "base"),
        ActionAxis("wz", "rad/s", -2.0, 2.0, "rate", "base"),
        ActionAxis("gripper", "m", 0.0, 0.08, "absolute"),
    ),
    0.1,
    50,
)


def test_deltas_and_rates_add_up_to_positions_and_an_absolute_command_is_one():
    got = eva.positions(torch.tensor([[[1.0, 0.5, 1.0], [1.0, -1.0, -1.0], [0.0, 0.0, 0.0]]]), CONTROL)
    assert got[0, :, 0].tolist() == pytest.approx([0.02, 0.04, 0.04])
    assert got[0, :, 1].tolist() == pytest.approx([0.1, -0.1, -0.1])
    assert got[0, :, 2].tolist() == pytest.approx([0.08, 0.0, 0.04])


def test_full_commands_held_break_no_limit_and_reversing_them_at_once_does():
    limits = eva.limits_of(CONTROL)
    held = eva.positions(torch.ones(1, 10, 3), CONTROL)
    flips = eva.positions((torch.arange(10) % 2 * 2 - 1.0)[None, :, None].expand(1, 10, 3), CONTROL)
    assert float(eva.violations(held, 0.1, limits)) == 0 < float(eva.violations(flips, 0.1, limits))
    assert float(eva.score(held, 0.1, limits)) > float(eva.score(flips, 0.1, limits))


def test_the_inverse_model_recovers_commands_of_a_linear_arm_and_its_score_tells_a_shaking_motion():
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (3000, 3)).astype(np.float32)
    x = rng.standard_normal((3000, 3)).astype(np.float32)
    after = x + actions * np.array([0.02, 0.2, 0.04], np.float32)
    model, errors = eva.fit_inverse(x, after, actions, updates=600)
    assert errors["r2"] > 0.98 and errors["held"] == 300
    assert not any(p.requires_grad for p in model.parameters())
    smooth = torch.cat(
        [torch.zeros(1, 1, 3), torch.full((1, 20, 3), 0.5).cumsum(1) * torch.tensor([0.02, 0.2, 0.04])], 1
    )
    shaking = smooth + torch.tensor([0.01, 0.1, 0.02]) * torch.randn(
        smooth.shape, generator=torch.Generator().manual_seed(0)
    )
    decoded = (eva.positions(eva.decode(model, c), CONTROL) for c in (smooth, shaking))
    a, b = (float(eva.score(x, CONTROL.period, eva.limits_of(CONTROL))) for x in decoded)
    assert a > b
    with pytest.raises(UserError, match="at least 64"):
        eva.fit_inverse(x[:10], after[:10], actions[:10])
