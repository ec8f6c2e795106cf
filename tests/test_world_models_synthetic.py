"""Synthetic experience: EDM where its answer is known, guidance that moves actions the right way, mixes that
are exact."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import launch_script

from robo_rl.errors import UserError
from robo_rl.experiment.synthetic import SOURCE, Synthetic
from robo_rl.options import DemoSacOptions
from robo_rl.replay import Mixture, Replay, counts
from world_models import guided, synther
from world_models.guided import Guided, GuideOptions
from world_models.synther import SynthOptions, Transitions, Upsampler

TINY = SynthOptions(hidden=32, layers=1, updates=5, batch=32, steps=4)
FRESH = SynthOptions(hidden=8, layers=1, updates=0, steps=24)


def nothing(x, noise):
    """F = 0: the exact denoiser of N(0, 1), where D = c_skip x."""
    return torch.zeros_like(x)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def linear(m=600, seed=0) -> Transitions:
    """s' = s + 0.5 a, r = -|s|^2, no end."""
    rng = np.random.default_rng(seed)
    s, a = rng.standard_normal((m, 2)).astype(np.float32), rng.uniform(-1, 1, (m, 2)).astype(np.float32)
    return Transitions(s, a, -np.square(s).sum(1), s + 0.5 * a, np.zeros(m, bool))


# ---- EDM


def test_the_zero_net_is_the_exact_denoiser_of_a_unit_gaussian():
    """E[y | y + sigma n] = x/(1 + sigma^2), and its expected loss is the least: 1 for every sigma after
    weighting."""
    x, sigma = torch.randn(5, 3, generator=generator()), torch.tensor([0.01, 0.1, 1.0, 10.0, 80.0])
    assert torch.allclose(synther.denoise(nothing, x, sigma), x / (1 + sigma.square())[:, None])
    y = torch.randn(20_000, 3, generator=generator())
    best = float(synther.edm_loss(nothing, y, generator(1)))
    worse = float(synther.edm_loss(lambda x, n: 0.2 * x, y, generator(1)))
    assert best == pytest.approx(1, abs=0.03) and worse > best + 0.02


def test_the_noise_levels_run_from_the_most_to_the_least_and_end_at_zero():
    levels = synther.noise_levels(SynthOptions(steps=5))
    assert levels[0] == pytest.approx(80) and levels[-2] == pytest.approx(0.002) and levels[-1] == 0
    root = np.array(levels[:-1]) ** (1 / 7)
    assert np.diff(root) == pytest.approx(np.full(4, root[1] - root[0]))  # even in sigma^(1/rho)


@pytest.mark.parametrize("churn", [0.0, 10.0])
def test_the_sampler_draws_a_unit_gaussian_with_its_exact_denoiser(churn):
    x = synther.heun(nothing, (4000, 2), SynthOptions(steps=32, churn=churn, churn_noise=1.0), generator())
    assert x.mean(0).tolist() == pytest.approx([0, 0], abs=0.05) and x.std(0).tolist() == pytest.approx(
        [1, 1], abs=0.04
    )
    assert abs(float((x[:, 0] * x[:, 1]).mean())) < 0.05


def test_the_sampler_draws_a_correlated_gaussian_with_its_exact_denoiser():
    """Of y ~ N(m, C): D = m + C (C + sigma^2)^-1 (x - m), put through the preconditioning to give F."""
    m, c = torch.tensor([1.0, -0.5]), torch.tensor([[1.0, 0.6], [0.6, 0.5]])

    def net(x, noise):
        s = (4 * noise).exp()[:, None]
        raw = x * (s.square() + 1).sqrt()
        gain = torch.linalg.solve(c + s[..., None].square() * torch.eye(2), (raw - m)[..., None])[..., 0] @ c
        return (m + gain - raw / (s.square() + 1)) * (s.square() + 1).sqrt() / s

    x = synther.heun(net, (4000, 2), SynthOptions(steps=48), generator())
    assert torch.allclose(x.mean(0), m, atol=0.05) and torch.allclose(torch.cov(x.T), c, atol=0.06)


# ---- SynthER


def test_rows_and_transitions_are_each_other_s_inverse():
    t = linear(7)
    t.terminated[3] = True
    back = synther.transitions_of(synther.rows_of(t), 2, 2, "real")
    for name in ("obs", "action", "reward", "next_obs", "terminated"):
        assert np.array_equal(getattr(back, name), getattr(t, name).astype(getattr(back, name).dtype))


def test_samples_stay_in_the_data_s_range_are_decided_by_the_seed_and_come_in_any_number():
    t = linear()
    up = Upsampler(t, TINY)
    a, b, c = up.sample(50, 1), up.sample(50, 1), up.sample(50, 2)
    assert np.array_equal(a.obs, b.obs) and not np.array_equal(a.obs, c.obs) and a.source == "synthetic"
    assert (a.obs <= t.obs.max(0)).all() and (a.obs >= t.obs.min(0)).all()
    assert len(up.sample(0, 0)) == 0 and len(up.sample(10, 0, batch=4)) == 10


def test_synthetic_rows_never_train_the_generator():
    with pytest.raises(UserError, match="must not train the generator"):
        Upsampler(Upsampler(linear(), TINY).sample(300, 0), TINY)
    with pytest.raises(UserError, match="at least 256"):
        Upsampler(linear(20), TINY)


@pytest.mark.learning
def test_it_learns_the_dynamics_of_a_linear_system():
    up = Upsampler(linear(4000), SynthOptions(hidden=128, layers=3, updates=3000, steps=32))
    made = up.sample(1000, 0)
    error = np.sqrt(np.square(made.next_obs - made.obs - 0.5 * made.action).mean())
    reward = np.sqrt(np.square(made.reward + np.square(made.obs).sum(1)).mean())
    assert error < 0.1 and reward < 0.5
    assert np.abs(np.cov(made.obs.T) - np.eye(2)).max() < 0.15


@pytest.mark.parametrize(("ratio", "made"), [(0.0, 0), (0.25, 8), (0.5, 16), (1.0, 32)])
def test_a_mix_has_exactly_the_stated_share(ratio, made):
    real, fake = (
        linear(50),
        Transitions(
            *(np.full((9, *s), 7, np.float32) for s in ((2,), (2,), ())),
            np.full((9, 2), 7, np.float32),
            np.zeros(9, bool),
            "synthetic",
        ),
    )
    batch = synther.mixed(real, fake, 32, ratio, np.random.default_rng(0))
    assert len(batch) == 32 and (batch.obs[:, 0] == 7).sum() == made


def test_ratio_zero_draws_what_the_base_agent_draws_to_the_bit():
    real, rng, base = linear(50), np.random.default_rng(5), np.random.default_rng(5)
    none = Transitions(
        *(np.zeros((0, *s), np.float32) for s in ((2,), (2,), ())),
        np.zeros((0, 2), np.float32),
        np.zeros(0, bool),
        "synthetic",
    )
    for _ in range(3):
        batch = synther.mixed(real, none, 16, 0.0, rng)
        assert np.array_equal(batch.obs, real.obs[base.integers(0, 50, 16)]) and batch.source == "real"
    with pytest.raises(UserError, match="needs synthetic transitions"):
        synther.mixed(real, none, 16, 0.5, rng)


def buffer(t: Transitions, source: int = 0) -> Replay:
    replay = Replay({"state": ((2,), np.dtype(np.float32))}, 2, 1, 0.9, 4000, 8)
    synther.fill(replay, t, source)
    return replay


def test_a_replay_that_was_filled_gives_back_each_transition():
    t = linear(30)
    t.terminated[:4] = True
    replay = buffer(t, 2)
    assert len(replay) == 30
    batch = replay.gather(replay.draw(500, np.random.default_rng(0)))
    seen = {tuple(o): i for i, o in enumerate(t.obs)}
    at = [seen[tuple(o)] for o in batch.obs["state"]]
    assert len(set(at)) == 30 and (batch.source == 2).all() and (batch.steps == 1).all()
    assert np.array_equal(batch.next_obs["state"], t.next_obs[at]) and np.array_equal(
        batch.actions[:, 0], t.action[at]
    )
    assert np.array_equal(batch.rewards, t.reward[at]) and batch.discounts == pytest.approx(
        np.where(t.terminated[at], 0, 0.9)
    )


def test_a_replay_source_with_share_zero_changes_nothing():
    real, fake = buffer(linear(30)), buffer(linear(30, seed=1))
    rng, base = np.random.default_rng(0), np.random.default_rng(0)
    n, k = counts(16, (1.0, 0.0), (len(real), len(fake)))
    assert (n, k) == (16, 0) and counts(16, (0.5, 0.5), (30, 30)) == [8, 8]
    assert np.array_equal(real.draw(n, rng), real.draw(16, base))


def source(ratio=0.5, **more) -> Synthetic:
    options = DemoSacOptions(synthetic=ratio, synthetic_rows=40, synthetic_updates=3, gamma=0.9, **more)
    return Synthetic(options, 1, 2, 0, lambda words: None)


def test_the_synthetic_source_is_learnt_from_replay_and_takes_its_exact_share_of_a_mixture():
    real, made = buffer(linear(300)), source()
    made.renew(0, Mixture({"online": (real, 1.0)}))
    mixture = Mixture({"online": (real, 0.5), "synthetic": (made, 0.5)})
    batch = mixture.sample(32, np.random.default_rng(0))
    fake = batch.source == SOURCE
    assert fake.sum() == 16 and not batch.own[fake].any() and len(made) == 40
    assert batch.actions.shape == (32, 1, 2) and set(np.unique(batch.discounts[fake])) <= {
        np.float32(0.9),
        np.float32(0),
    }
    assert batch.discounts.dtype == batch.rewards.dtype == np.float32


def test_the_synthetic_source_is_renewed_on_time_and_goes_on_from_its_state():
    real, made = buffer(linear(300)), source(synthetic_every=100)
    made.renew(0, Mixture({"online": (buffer(linear(100)), 1.0)}))
    assert not len(made)  # too few to learn from
    made.renew(0, Mixture({"online": (real, 1.0)}))
    first = made.rows["obs"]
    made.renew(99, Mixture({"online": (real, 1.0)}))
    assert made.rows["obs"] is first
    again = source(synthetic_every=100)
    again.set_state(made.state())
    for s in (made, again):
        s.renew(100, Mixture({"online": (real, 1.0)}))
    assert np.array_equal(made.rows["obs"], again.rows["obs"]) and not np.array_equal(made.rows["obs"], first)


def test_an_empty_synthetic_source_leaves_its_share_to_the_others():
    real = buffer(linear(30))
    batch = Mixture({"online": (real, 0.5), "synthetic": (source(), 0.5)}).sample(8, np.random.default_rng(0))
    assert (batch.source != SOURCE).all() and len(batch.rewards) == 8


def walks(episodes: int, seed: int = 0) -> Replay:
    """Chunks of 2 steps: the state moves by 0.1 of the action, some 9 steps long, half of them end in
    success."""
    rng, r = (
        np.random.default_rng(seed),
        Replay({"state": ((2,), np.dtype(np.float32))}, 2, 2, 0.9, 20_000, 1),
    )
    lane = np.zeros(1, np.int64)
    for e in range(episodes):
        s, n = rng.normal(size=2).astype(np.float32), int(rng.integers(7, 12))
        for t in range(n):
            a = rng.uniform(-1, 1, 2).astype(np.float32)
            won = np.array([t == n - 1 and e % 2 == 0])
            r.add(lane, {"state": s[None]}, a[None], won.astype(np.float32), won)
            s = s + np.float32(0.1) * a
        r.close(lane, {"state": s[None]})
    return r


def test_windows_of_replay_follow_their_episode_and_stay_where_it_ended():
    r = walks(40)
    w = r.windows(500, 4, np.random.default_rng(0))
    obs, action, over = w["obs"], w["action"].reshape(-1, 4, 2, 2), w["over"]
    went = obs[:, 1:] - obs[:, :-1]
    told = np.float32(0.1) * action[:, :-1].sum(2)
    whole = ~over[:, :-1]
    np.testing.assert_allclose(went[whole], told[whole], atol=1e-5)
    late = over[:, :-1] & np.roll(over, 1, 1)[:, :-1]  # the end is behind them
    late[:, 0] = False
    assert late.any() and (went[late] == 0).all() and (w["reward"][:, 1:][over[:, :-1]] == 0).all()
    first = over & ~np.concatenate([np.zeros((len(over), 1), bool), over[:, :-1]], 1)
    assert (w["reward"][first] > 0.8).all() and 100 < len(obs) < 500 and (w["reward"][~over] == 0).all()
    assert all((~np.diff(o.astype(int)) <= 0).all() for o in over)  # nothing begins again


def test_guided_transitions_are_nearer_to_the_policy_and_at_strength_zero_they_are_the_data_s():
    class Right(torch.nn.Module):
        """Always (1, 1) in every step of a chunk."""

        def act(self, obs, generator, explore):
            return SimpleNamespace(actions=torch.ones(len(obs["state"]), 2, 2))

    real, far = Mixture({"online": (walks(200), 1.0)}), []
    for strength in (0.0, 3.0):
        made = Synthetic(
            DemoSacOptions(
                synthetic=0.5,
                synthetic_kind="guided",
                synthetic_rows=1500,
                synthetic_updates=150,
                gamma=0.9,
                synthetic_strength=strength,
            ),
            2,
            2,
            0,
            lambda words: None,
        )
        made.renew(0, real, Right())
        batch = made.sample(1500, np.random.default_rng(0))
        far.append(float(np.abs(batch.actions - 1).mean()))
        assert (
            len(made) == 1500
            and (batch.source == SOURCE).all()
            and 0.02 < (batch.discounts == 0).mean() < 0.4
        )
    assert 0.85 < far[0] < 1.15 and far[1] < far[0] - 0.2


# ---- guidance


def test_windows_stay_inside_their_episode_and_know_how_it_ended():
    state = np.arange(7, dtype=np.float32)[:, None]
    w = guided.windows_of(
        state, state, state[:, 0], np.array([True, False]), np.array([0, 4]), np.array([4, 7]), 3
    )
    assert w[:, :, 0].tolist() == [[0, 1, 2], [1, 2, 3], [4, 5, 6]] and w[:, :, -1].tolist() == [
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 0],
    ]
    with pytest.raises(UserError, match="no recorded episode has 9 steps"):
        guided.windows_of(state, state, state[:, 0], np.ones(2, bool), np.array([0, 4]), np.array([4, 7]), 9)


def test_the_schedule_by_hand():
    assert guided.schedule(0, 4, 2.0) == pytest.approx(2 * (1 + 0.3 * math.sin(math.pi / 4)))
    assert guided.schedule(3, 4, 2.0) == pytest.approx(2 * 0.25, abs=1e-12)


def trajectories(**more) -> Guided:
    """Unit-Gaussian data in 4 steps of 2 state and 1 action, with the untrained net: the exact denoiser of
    N(0, 1)."""
    rows = np.random.default_rng(0).standard_normal((4000, 4, 5)).astype(np.float32)
    return Guided(rows, 2, 1, GuideOptions(window=4, **more), FRESH)


def towards(value):
    return lambda s: torch.full((len(s), 1), value)


def test_strength_zero_or_no_policy_is_the_plain_sampler_to_the_bit():
    plain = trajectories(strength=0.0)
    a = plain.sample(20, 3)
    assert np.array_equal(a, plain.sample(20, 3, towards(2.0))) and np.array_equal(
        a, trajectories(strength=0.5).sample(20, 3)
    )
    assert not np.array_equal(a, trajectories(strength=0.5).sample(20, 3, towards(2.0)))


@pytest.mark.parametrize("unit", [True, False])
def test_actions_move_towards_the_policy_more_with_more_strength_and_the_rest_stays(unit):
    means = []
    for c in (0.0, 0.02, 0.05, 0.1):
        w = trajectories(strength=c, unit=unit).sample(600, 0, towards(2.0))
        means.append(w[..., 2].mean())
        assert np.abs(w[..., [0, 1, 3, 4]].mean((0, 1))).max() < 0.12
    assert means == sorted(means) and means[-1] > means[0] + 0.1 and abs(means[0]) < 0.08
    assert trajectories(strength=0.1, unit=unit).sample(600, 0, towards(-2.0))[..., 2].mean() < -0.1


def test_the_guide_is_the_gradient_of_the_log_density_through_the_normaliser():
    g = trajectories(unit=False, denoised=False)
    x = torch.randn(3, 4, 5, generator=generator(), dtype=torch.float32).requires_grad_()
    mean, s = 0.7, g.generator
    raw = x * s.std + s.mean
    logp = -0.5 * ((raw[..., 2] - mean) / s.std[2]).square().sum()
    (grad,) = torch.autograd.grad(logp, x)
    pushed = g.guide(towards(mean))(x.detach(), 1.0, 1, 4)
    assert torch.allclose(pushed, guided.schedule(1, 4, 1.0) * grad, atol=1e-5)


def test_sampled_windows_give_transitions_up_to_their_first_end():
    g = trajectories()
    w = np.zeros((2, 4, 5), np.float32)
    w[..., 0] = np.arange(4)
    w[1, 1, -1] = 1  # the second ends with its second step
    t = g.transitions(w)
    assert t.obs[:, 0].tolist() == [0, 1, 2, 0, 1] and t.next_obs[:, 0].tolist() == [1, 2, 3, 1, 2]
    assert t.terminated.tolist() == [False, False, False, False, True] and t.source == "synthetic"
    with pytest.raises(UserError, match="windows must have shape"):
        Guided(w, 3, 1, GuideOptions(window=4), FRESH)


# ---- offline -----------------------------------------------------------------------------------------------


def test_transitions_of_one_law_are_alike_and_shuffled_ones_are_told_by_correlations_and_dynamics():
    a, b = linear(3000), linear(3000, seed=1)
    same = synther.quality(b, a)
    assert same["marginals"] < 0.1 and same["correlations"] < 0.05 and abs(same["dynamics"]) < 0.3
    order = np.random.default_rng(0).permutation(3000)
    torn = synther.quality(synther.Transitions(b.obs, b.action, b.reward, b.next_obs[order], b.terminated), a)
    assert (
        torn["marginals"] == pytest.approx(same["marginals"])
        and torn["correlations"] > 3 * same["correlations"]
    )
    assert torn["dynamics"] > 2
    moved = synther.quality(
        synther.Transitions(b.obs + 1, b.action, b.reward, b.next_obs + 1, b.terminated), a
    )
    assert moved["marginals"] > 0.3 and moved["correlations"] == pytest.approx(same["correlations"], abs=1e-3)


@pytest.mark.slow
def test_the_script_learns_offline_from_few_topped_up_and_many(tmp_path, capsys):
    keep = tmp_path / "found.jsonl"
    given = [
        "--task",
        "reach",
        "--few",
        "300",
        "--many",
        "500",
        "--episodes",
        "30",
        "--seeds",
        "1",
        "--updates",
        "4",
        "--upsample",
        "3",
        "--starts",
        "10",
        "--keep",
        str(keep),
    ]
    main = launch_script("compare_synthetic").main
    main(given)
    said = capsys.readouterr().out
    assert (
        all(f"reach, {name}" in said for name in ("few", "topped up", "many"))
        and "less few" in said
        and "marginals" in said
    )
    kept = keep.read_text()
    main(given)
    assert keep.read_text() == kept, "what is kept is not run again"
    main(
        [
            "--task",
            "HalfCheetah-v5",
            "--policy",
            "random",
            "--few",
            "300",
            "--many",
            "500",
            "--episodes",
            "2",
            "--seeds",
            "1",
            "--updates",
            "2",
            "--upsample",
            "2",
            "--starts",
            "2",
            "--keep",
            str(keep),
        ]
    )
    assert "HalfCheetah-v5, topped up" in capsys.readouterr().out and '"return": {"few"' in keep.read_text()
    with pytest.raises(SystemExit, match="fewer than 50000: give --episodes"):
        main(["--task", "reach", "--few", "300", "--many", "50000", "--episodes", "10", "--seeds", "1"])
