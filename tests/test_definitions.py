"""Losses, advantages, sampling and corrections against the same formulas written out number by number, and at
their edges."""

import math

import pytest
import torch

from robo_rl import corrections, losses
from robo_rl.advantages import gae, group_advantage, whiten
from robo_rl.corrections import WeightAverage, min_prefix, vtrace
from robo_rl.sampling import (
    chunk_logp,
    cosine_alphas,
    diffusion_table,
    flow_step,
    flow_table,
    gaussian_logp,
    randint,
    randn,
    time_grid,
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def generators(*seeds):
    return [torch.Generator().manual_seed(s) for s in seeds]


# ---- losses


def test_entries_count_by_their_error_over_the_mean_one():
    weights = losses.error_weights
    err, mask = torch.tensor([[[1.0, -3.0], [0.2, 20.0], [7.0, 7.0]]]), torch.tensor([[1.0, 1.0, 0.0]])
    mean = (1 + 3 + 0.2 + 20) / 4
    assert torch.allclose(weights(err, mask)[0, :2], torch.tensor([[0.5, 0.5], [0.5, 20 / mean]]))
    assert torch.allclose(weights(err, mask)[0, 2], torch.tensor(7 / mean))
    assert weights(torch.tensor([[[1.0] * 19 + [100.0]]]), torch.ones(1, 1))[0, 0, -1] == 5.0
    assert torch.allclose(weights(1e-6 * err, mask), weights(err, mask))  # whatever the unit


def ppo_number_by_number(logp, old, adv, low, high, dual, weight):
    gains, clipped, kl = [], [], []
    for x, y, a, lo, hi, w in zip(
        *(t.flatten().tolist() for t in (logp, old, adv, low, high, weight)), strict=False
    ):
        rho = math.exp(x - y)
        bound = min(max(rho, 1 - lo), 1 + hi)
        gain = min(rho * a, bound * a)
        gains.append(w * (max(gain, dual * a) if dual and a < 0 else gain))
        clipped.append(bound != rho)
        kl.append(rho - 1 - (x - y))
    return -sum(gains) / len(gains), clipped, sum(kl) / len(kl)


@pytest.mark.parametrize("dual", [0.0, 1.5, 3.0])
@pytest.mark.parametrize("tensors", [True, False])
def test_ppo_is_its_formula_number_by_number(dual, tensors):
    logp, old, adv = 0.6 * random(9, 4), 0.6 * random(9, 4, seed=1), random(9, 4, seed=2)
    weight = random(9, 4, seed=3).abs() * (random(9, 4, seed=4) > -0.5)
    low, high = (torch.full((9, 4), x) for x in (0.1, 0.3))
    want, clipped, kl = ppo_number_by_number(logp, old, adv, low, high, dual, weight)
    loss, m = losses.ppo(logp, old, adv, *((low, high) if tensors else (0.1, 0.3)), dual, weight)
    assert float(loss) == pytest.approx(want, rel=1e-5) and float(m["kl"]) == pytest.approx(kl, rel=1e-4)
    kept = [not c and w > 0 for c, w in zip(clipped, weight.flatten().tolist(), strict=False)]
    assert float(m["clip_fraction"]) == pytest.approx(sum(clipped) / 36) and float(
        m["active"]
    ) == pytest.approx(sum(kept) / 36)
    ratio = (logp - old).exp()
    assert float(m["ratio_max"]) == pytest.approx(float(ratio.max()))
    assert float(m["log_ratio_absmax"]) == pytest.approx(float((logp - old).abs().max()))
    assert "active" not in losses.ppo(logp, old, adv, 0.1, 0.3, dual)[1]


def test_without_a_word_ppo_has_no_dual_clip():
    assert float(
        losses.ppo(torch.tensor([5.0]), torch.zeros(1), torch.tensor([-1.0]), 0.2, 0.2)[0]
    ) == pytest.approx(math.exp(5))


def test_a_log_ratio_that_is_not_finite_counts_as_none_in_the_metrics_and_a_huge_one_as_the_largest():
    metrics = losses.ppo(torch.tensor([math.nan, 0.0]), torch.zeros(2), torch.ones(2), 0.2, 0.2)[1]
    assert metrics["kl"] == 0 and metrics["ratio_max"] == 1 and metrics["log_ratio_absmax"] == 0
    metrics = losses.ppo(torch.tensor([-50.0, 0.0]), torch.zeros(2), torch.ones(2), 0.2, 0.2)[1]
    assert metrics["log_ratio_absmax"] == 20 and float(metrics["kl"]) == pytest.approx(
        (math.exp(-20) - 1 + 20) / 2
    )
    metrics = losses.ppo(torch.tensor([math.nan, 20.0, -20.5, 0.0]), torch.zeros(4), torch.ones(4), 0.2, 0.2)[
        1
    ]
    assert metrics["huge_ratio"] == 0.25 and metrics["nonfinite_ratio"] == 0.25  # 20 itself is within


@pytest.mark.parametrize(("huber", "clip"), [(0.0, 0.0), (0.7, 0.0), (0.0, 0.3), (0.7, 0.3)])
def test_the_value_loss_is_its_formula_number_by_number(huber, clip):
    v, target, old = random(40), random(40, seed=1), random(40, seed=2)

    def err(x, y):
        e = abs(x - y)
        return huber * (e - 0.5 * huber) if huber and e > huber else 0.5 * e * e

    want = []
    for x, y, o in zip(v.tolist(), target.tolist(), old.tolist(), strict=False):
        near = o + min(max(x - o, -clip), clip)
        want.append(max(err(x, y), err(near, y)) if clip else err(x, y))
    assert float(losses.value(v, target, old, clip, huber)) == pytest.approx(sum(want) / 40, rel=1e-5)
    plain = sum(err(x, y) for x, y in zip(v.tolist(), target.tolist(), strict=False)) / 40
    assert float(losses.value(v, target, None, clip, huber)) == pytest.approx(plain, rel=1e-5)
    assert float(losses.value(v, target, old)) == pytest.approx(0.5 * float((v - target).square().mean()))


@pytest.mark.parametrize(("actions", "normalise"), [(2, True), (2, False), (1, True), (1, False)])
def test_nft_is_its_formula_number_by_number(actions, normalise):
    """Chunks of which all, one and no step ran; the last kind counts in neither sum."""
    v, old, x_t, x0 = (random(6, 3, actions, seed=k) for k in range(4))
    t, r = torch.rand(6, generator=generators(5)[0]), torch.rand(6, generator=generators(6)[0])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1], [0, 0, 0]]).float()
    x0[4] = x_t[4] - t[4] * old[4] + 1e-7  # nearly without an error: what it is divided by has a floor
    v[4] = old[4]
    beta, negative, total = 0.6, 0.8, 0.0
    for b in range(6):
        count = max(1.0, float(mask[b].sum()) * actions)
        parts = []
        for vel in (beta * v[b] + (1 - beta) * old[b], (1 + beta) * old[b] - beta * v[b]):
            diff = (x_t[b] - t[b] * vel - x0[b]) * mask[b][:, None]
            size = float(diff.abs().sum()) / count
            parts.append(float(diff.square().sum()) / count / (max(size, 1e-5) if normalise else 1.0))
        total += (
            (float(r[b]) * parts[0] + negative * (1 - float(r[b])) * parts[1]) / beta * bool(mask[b].any())
        )
    got = losses.nft(v, old, x_t, t, x0, r, mask, beta, negative, normalise)
    assert float(got) == pytest.approx(total / 4, rel=1e-5)
    if normalise:
        one = losses.nft(v, old, x_t, t, x0, r, mask, beta)
        assert float(one) == pytest.approx(float(losses.nft(v, old, x_t, t, x0, r, mask, beta, 1.0, True)))
    assert losses.nft(v, old, x_t, t, x0, r, 0 * mask, beta) == 0


def test_the_floor_of_what_an_nft_error_is_divided_by_is_1e_minus_5():
    x0, none, one = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), torch.ones(1)
    for error in (2e-6, 2e-5):
        loss = losses.nft(none, none, none + error, one, x0, one, torch.ones(1, 1), 1.0)
        assert float(loss) == pytest.approx(error**2 / max(error, 1e-5), rel=1e-4)


@pytest.mark.parametrize("f", [1, 2, 7])
def test_dppos_clip_is_its_formula_and_of_a_single_step_its_end(f):
    want = [
        0.01 + 0.2 * (math.exp(3 * u) - 1) / (math.exp(3) - 1)
        for u in ([1.0] if f == 1 else [i / (f - 1) for i in range(f)])
    ]
    assert losses.denoise_clip(f, 0.01, 0.21).tolist() == pytest.approx(want, rel=1e-5)


def test_optimality_is_linear_between_its_bounds_of_any_size():
    assert losses.nft_optimality(torch.tensor([-9.0, -1.0, 0.5, 9.0]), 4.0).tolist() == [
        0.0,
        0.375,
        0.5625,
        1.0,
    ]


# ---- advantages


@pytest.mark.parametrize("function", [gae, lambda *a: vtrace(*a, torch.zeros_like(a[0]))])
def test_a_rollout_of_one_decision_is_its_one_step_error(function):
    r, v, nv = random(1, 5), random(1, 5, seed=1), random(1, 5, seed=2)
    adv, returns = function(r, torch.full((1, 5), 0.9), torch.zeros(1, 5, dtype=torch.bool), v, nv, 0.95)[:2]
    assert torch.allclose(adv, r + 0.9 * nv - v) and torch.allclose(returns, r + 0.9 * nv)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_group_advantages_are_their_formulas_number_by_number(members):
    x = random(3, members)
    for q, row in enumerate(x.tolist()):
        mean = sum(row) / members
        std = math.sqrt(sum((y - mean) ** 2 for y in row) / (members - 1))
        for kind, want in (
            ("dr_grpo", [y - mean for y in row]),
            ("grpo", [(y - mean) / (std + 0.1) for y in row]),
            ("rloo", [y - (sum(row) - y) / (members - 1) for y in row]),
        ):
            assert group_advantage(x, kind, 0.1)[q].tolist() == pytest.approx(want, rel=1e-4)
    with pytest.raises(ValueError, match="at least 2 members, got 1"):
        group_advantage(x[:, :1])


def test_whitening_is_its_formula_also_for_two_entries_one_and_hardly_any_spread():
    assert torch.allclose(whiten(torch.tensor([1.0, 3.0])), torch.tensor([-1.0, 1.0]) / math.sqrt(2))
    assert whiten(torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([False, False, True, False])).tolist() == [
        -2.0,
        -1.0,
        0.0,
        3.0,
    ]
    tiny = 1e-8 / (math.sqrt(2) * 1e-8 + 1e-8)
    assert whiten(torch.tensor([0.0, 2e-8], dtype=torch.float64)).tolist() == pytest.approx([-tiny, tiny])


# ---- sampling


def test_rows_with_a_generator_of_their_own_get_the_same_numbers_in_any_batch():
    a, b = generators(1, 2)
    both, whole = randn([(a, 2), (b, 3)], 5, 4), generators(1, 2)
    assert torch.equal(
        both, torch.cat([torch.randn(2, 4, generator=whole[0]), torch.randn(3, 4, generator=whole[1])])
    )
    assert torch.equal(randn(generators(7)[0], 3, 2), torch.randn(3, 2, generator=generators(7)[0]))
    numbers, (a, b) = randint([(x, 30) for x in generators(1, 2)], 3, 60), generators(1, 2)
    assert torch.equal(numbers, torch.cat([torch.randint(0, 3, (30,), generator=g) for g in (a, b)]))
    assert (
        sorted(set(numbers.tolist())) == sorted(set(randint(generators(3)[0], 3, 60).tolist())) == [0, 1, 2]
    )
    assert randint(generators(3)[0], 1, 4).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("level", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("kind", ["ode", "sde", "cps"])
def test_flow_tables_are_their_formulas_step_by_step(kind, level, k):
    table = flow_table(k, kind, level)
    for i in range(k):
        t, after = 1 - i / k, 1 - (i + 1) / k
        first = 1 - 1 / k if t == 1 else t
        sigma = level * math.sqrt(t / (1 - first)) if kind == "sde" and k > 1 else 0.0
        w0, w1, std = 1 - after, after - sigma**2 * (t - after) / (2 * t), sigma * math.sqrt(t - after)
        if kind == "cps":
            w1, std = after * math.cos(math.pi * level / 2), after * math.sin(math.pi * level / 2)
        x, v = 0.3, -0.7
        mean = w0 * (x - t * v) + w1 * (x + (1 - t) * v)
        assert float(table.a[i]) * x + float(table.b[i]) * v == pytest.approx(mean, abs=1e-6)
        assert float(table.s[i]) == pytest.approx(std, abs=1e-6) and float(table.t[i]) == pytest.approx(t)
        grid = time_grid(k)
        xs, vs = (torch.tensor([y, y], dtype=torch.float64) for y in (x, v))
        got = flow_step(xs, grid[i], grid[i + 1], vs, kind, level, float(grid[1]))
        assert got[0].tolist() == pytest.approx([mean, mean], abs=1e-6) and float(got[1]) == pytest.approx(
            std, abs=1e-9
        )
    assert flow_table(k, kind).s.tolist() == [0.0] * k
    with pytest.raises(ValueError, match="one of .*, got 'sed'"):
        flow_table(k, "sed", level)


@pytest.mark.parametrize(
    ("train_steps", "k", "eta"), [(12, 3, 0.0), (12, 12, 1.0), (10, 5, 0.6), (6, 1, 1.0)]
)
def test_diffusion_tables_are_their_formulas_step_by_step(train_steps, k, eta):
    def f(i):
        return math.cos((i / train_steps + 0.008) / 1.008 * math.pi / 2) ** 2

    bars, bar = [], 1.0
    for i in range(train_steps):
        bar *= 1 - min(1 - f(i + 1) / f(i), 0.999)
        bars.append(bar)
    assert cosine_alphas(train_steps).tolist() == pytest.approx(bars, rel=1e-9)
    table, ab, before = diffusion_table(train_steps, k, eta)
    stride = train_steps // k
    for i in range(k):
        step = train_steps - 1 - i * stride
        now, prev = bars[step], bars[step - stride] if i < k - 1 else 1.0
        sigma = eta * math.sqrt((1 - prev) / (1 - now)) * math.sqrt(1 - now / prev)
        x, eps = 0.4, -0.9
        mean = (
            math.sqrt(prev) * (x - math.sqrt(1 - now) * eps) / math.sqrt(now)
            + math.sqrt(max(0.0, 1 - prev - sigma**2)) * eps
        )
        assert float(table.a[i]) * x + float(table.b[i]) * eps == pytest.approx(mean, rel=1e-4, abs=1e-5)
        assert float(table.s[i]) == pytest.approx(sigma, rel=1e-5) and float(table.t[i]) == pytest.approx(
            (step + 1) / train_steps
        )
        assert float(ab[i]) == pytest.approx(now, rel=1e-5) and float(before[i]) == pytest.approx(
            prev, rel=1e-5
        )
    with pytest.raises(ValueError, match=f"must divide the {train_steps} training steps, got 7"):
        diffusion_table(train_steps, 7, eta)


@pytest.mark.parametrize("shape", [(), (2,), (5, 2), (4, 5, 2), (4, 1, 1)])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_log_density_of_a_chunk_is_the_sum_or_mean_over_what_was_executed(shape, reduction):
    x, mean, std = (
        random(4, 5, 2),
        random(4, 5, 2, seed=1),
        random(*shape, seed=2).abs() + 0.2 if shape else torch.tensor(0.7),
    )
    if shape == (4, 5, 2):
        std[..., :1] = 0  # certain entries have no density
    wide, want = std.expand(4, 5, 2), []
    for b in range(4):
        terms = []
        for h in range(3):
            for a in range(2):
                s = float(wide[b, h, a])
                z = float(x[b, h, a] - mean[b, h, a])
                terms.append(-0.5 * (z / s) ** 2 - math.log(s * math.sqrt(2 * math.pi)) if s else 0.0)
        want.append(sum(terms) / (6 if reduction == "mean" else 1))
    assert chunk_logp(x, mean, std, 3, reduction).tolist() == pytest.approx(want, rel=1e-4)
    with pytest.raises(ValueError, match="must be 'sum' or 'mean', got 'max'"):
        chunk_logp(x, mean, std, 3, "max")


def test_a_std_far_below_one_is_still_random():
    got = gaussian_logp(torch.tensor(0.0), torch.tensor(0.0), torch.tensor(1e-3))
    assert float(got) == pytest.approx(-math.log(1e-3 * math.sqrt(2 * math.pi)))


# ---- corrections


def test_the_edges_of_the_band_of_weights_are_inside():
    one = torch.zeros(1)
    assert corrections.reject(one, 1.0).tolist() == corrections.reject(one, 2.0, 1.0).tolist() == [1.0]
    assert corrections.reject(one - 9, 1.0)[0] > 0  # without a lower edge


def test_a_weight_at_the_cap_is_not_told_as_rejected():
    rows = corrections.diagnostics(torch.zeros(3), torch.tensor([0.0, 0.0, 1.0]), 1.0)
    assert float(rows["is_rejected"]) == pytest.approx(1 / 3)


def test_one_decision_starts_its_own_prefix():
    x = random(1, 4)
    assert torch.equal(min_prefix(x, torch.zeros(1, 4, dtype=torch.bool)), x)


def test_m2po_keeps_what_is_below_four_hundredths_and_not_what_is_at_the_bound():
    assert corrections.m2_mask(torch.tensor([0.5]), 0.25).tolist() == [False]
    assert corrections.m2_mask(torch.tensor([0.5, 0.0]), 0.25).tolist() == [True, True]
    assert corrections.m2_mask(torch.tensor([0.19, 0.0, 0.5, 1.0])).tolist() == [True, True, False, False]


def test_chunks_of_the_first_weights_have_an_age_too():
    assert corrections.age_weight(torch.tensor([0, -1]), 1).tolist() == [0.5, 0.0]


def test_the_weight_average_without_decay_is_the_mean_of_all_and_other_names_begin_anew():
    average, xs = WeightAverage(), random(5, 3)
    for i, x in enumerate(xs):
        average.update({"w": x}, 1.0)
        assert torch.allclose(average.mean["w"], xs[: i + 1].mean(0))
    average.update({"v": xs[0]}, 1.0)
    assert {k: v.tolist() for k, v in average.mean.items()} == {"v": xs[0].tolist()}


def test_after_a_reset_nothing_of_an_average_that_is_no_number_stays():
    average = WeightAverage()
    average.update({"w": torch.tensor([math.nan])}, 0.9)
    average.reset()
    average.update({"w": torch.ones(1)}, 0.9)
    assert average.mean["w"].tolist() == [1.0]


def test_without_a_word_vtrace_truncates_at_one_and_counts_no_credit_twice():
    r, v, nv, log_rho = random(4, 3), random(4, 3, seed=1), random(4, 3, seed=2), random(4, 3, seed=3)
    args = r, torch.full((4, 3), 0.9), torch.zeros(4, 3, dtype=torch.bool), v, nv, 0.8, log_rho
    for got, want in zip(vtrace(*args), vtrace(*args, 1.0, 1.0), strict=False):
        assert torch.equal(got, want)
    assert torch.allclose(vtrace(*args)[2], log_rho.exp().clamp(max=1))
    assert not torch.allclose(vtrace(*args, 1.0, 0.1)[1], vtrace(*args)[1])


def test_the_baseline_weighs_by_the_square_of_the_weight_and_works_on_the_last_axis():
    log_w, reward, h = random(3, 4), random(3, 4, seed=1), random(3, 4, seed=2).abs() + 0.1
    square = (2 * log_w).exp() * h
    assert torch.allclose(
        corrections.opob(log_w, reward, h), (square * reward).sum(1) / square.sum(1), atol=1e-6
    )


def test_k3_is_its_formula_within_the_clamp():
    x = torch.tensor([-30.0, -1.0, 0.0, 0.5, 19.0])
    want = [math.exp(y) - 1 - y for y in (-20.0, -1.0, 0.0, 0.5, 19.0)]
    assert corrections.k3(x).tolist() == pytest.approx(want, rel=1e-5)


def test_an_unknown_reduction_is_refused():
    one = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="sum or mean, got 'max'"):
        corrections.per_episode(torch.zeros(1, 1), one, one, "max")
