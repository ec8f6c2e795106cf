"""Samplers of starts and tasks: figures and degenerate cases of their papers, what they choose, and that they
go on exactly."""

import numpy as np
import pytest
import torch

from robo_rl import recipe
from robo_rl.errors import UserError
from robo_rl.experiment import starts
from robo_rl.rollout_control import mixtures, predictors, samplers
from robo_rl.rollout_control.check import check_sampler
from robo_rl.rollout_control.v0 import V0, contrast, v0_loss
from robo_rl.starts import StartTable

K = 60
POSITIONS = np.linspace(-2, 2, K)[:, None] * np.ones((1, 3))
MAKE = {
    "uniform": lambda seed=0: samplers.RoundRobin(K, seed),
    "vade": lambda seed=0: samplers.Vade(K, seed),
    "mopps": lambda seed=0: samplers.Mopps(K, seed),
    "dps": lambda seed=0: samplers.Dps(K, seed),
    "sfl": lambda seed=0: samplers.Sfl(K, seed, candidates=40, tries=4, keep=10, period=6),
    "prompt_gdro": lambda seed=0: mixtures.PromptGdro(K, seed),
    "rule_reasoner": lambda seed=0: mixtures.RuleReasoner(K, seed),
    "dots": lambda seed=0: predictors.Dots(POSITIONS, seed, references=20),
    "v0": lambda seed=0: V0(POSITIONS, seed),
}
P = np.clip(np.linspace(-0.5, 1.5, K), 0, 1)  # a quarter of the arms never succeeds, a quarter always does


def rounds(sampler, count, n=16, repeats=4, seed=5, p=P):
    """Play `count` rounds of n arms, each `repeats` times, against Bernoulli arms -> how often each arm was
    proposed."""
    rng, played = np.random.default_rng(seed), np.zeros(K)
    for _ in range(count):
        arms = np.repeat(sampler.propose(n), repeats)
        played += np.bincount(arms, minlength=K)
        sampler.observe(arms, (rng.random(len(arms)) < p[arms]).astype(float))
    return played


@pytest.mark.parametrize("name", MAKE)
def test_a_sampler_proposes_as_many_arms_as_asked_and_predicts_probabilities(name):
    sampler = MAKE[name]()
    for n in (1, 7, K, 2 * K):
        arms = sampler.propose(n)
        assert arms.shape == (n,) and arms.dtype == np.int64 and arms.min() >= 0 and arms.max() < K
    rounds(sampler, 20)
    p = sampler.predict()
    assert p.shape == (K,) and (p >= 0).all() and (p <= 1).all()


@pytest.mark.parametrize("name", MAKE)
def test_a_sampler_that_was_saved_goes_on_as_if_it_had_not_been(name):
    sampler, again = MAKE[name](), MAKE[name]()
    rounds(sampler, 9)
    again.load_state_dict(sampler.state_dict())
    rounds(sampler, 9, seed=6)
    rounds(again, 9, seed=6)
    assert (sampler.propose(16) == again.propose(16)).all()
    assert (sampler.predict() == again.predict()).all()


@pytest.mark.parametrize("name", sorted(set(MAKE) - {"uniform"}))
def test_the_state_that_was_saved_does_not_change_with_the_sampler(name):
    sampler = MAKE[name]()
    rounds(sampler, 3)
    state = sampler.state_dict()
    before = {k: np.copy(v) for k, v in state.items() if isinstance(v, np.ndarray)}
    rounds(sampler, 3, seed=7)
    assert before and all((state[k] == v).all() for k, v in before.items())


@pytest.mark.parametrize("name", MAKE)
def test_another_seed_proposes_other_arms(name):
    assert (MAKE[name](0).propose(16) != MAKE[name](1).propose(16)).any()


@pytest.mark.parametrize("name", ["vade", "mopps", "dps", "sfl"])
def test_arms_that_always_fail_or_always_succeed_are_played_less_than_those_between(name):
    sampler = MAKE[name]()
    rounds(sampler, 60)
    played = rounds(sampler, 60, seed=8)
    between = (P > 0.25) & (P < 0.75)
    constant = (P == 0) | (P == 1)
    assert played[between].mean() > 1.5 * played[constant].mean()


@pytest.mark.parametrize("name", ["dots", "v0"])
def test_success_is_predicted_from_the_first_observation(name):
    sampler = MAKE[name]()
    rounds(sampler, 60)
    seen = sampler.predict()
    assert np.corrcoef(seen, P)[0, 1] > 0.9
    held_out = np.arange(K) % 7 == 3
    rng = np.random.default_rng(0)
    fresh = MAKE[name]()
    for _ in range(60):  # arms of the held-out set are never played
        arms = np.repeat(fresh.propose(16), 4)
        arms = arms[~held_out[arms]]
        fresh.observe(arms, (rng.random(len(arms)) < P[arms]).astype(float))
        if name == "dots":  # references among them would never be complete
            fresh.measured.episodes[held_out] = -1
    assert np.abs(fresh.predict()[held_out] - P[held_out]).mean() < 0.2


# ---- uniform


def test_uniform_plays_every_arm_equally_often():
    assert (np.bincount(samplers.RoundRobin(7).propose(70), minlength=7) == 10).all()


# ---- VADE


def test_vade_reproduces_the_numbers_of_the_papers_figure():
    sampler = samplers.Vade(2)
    sampler.a[:], sampler.b[:] = [0.1, 9.0], [8.4, 9.0]
    sampler.observe(np.zeros(8, np.int64), np.array([1.0] + [0.0] * 7))
    assert sampler.a[0] == pytest.approx(1.02) and sampler.b[0] == pytest.approx(8.68)
    assert sampler.a[1] == pytest.approx(8.991)


def test_vade_prefers_arms_that_succeed_one_time_in_three():
    p = np.linspace(0, 1, 3001)
    assert p[samplers.information_gain(p).argmax()] == pytest.approx(1 / 3, abs=1e-3)


def test_an_arm_that_vade_does_not_play_keeps_its_mean_and_becomes_less_certain():
    sampler = samplers.Vade(2)
    sampler.a[:], sampler.b[:] = 30.0, 10.0

    def variance():
        a, b = sampler.a[1], sampler.b[1]
        return a * b / (a + b) ** 2 / (a + b + 1)

    before = variance()
    for _ in range(50):
        sampler.observe(np.zeros(1, np.int64), np.ones(1))
    assert sampler.a[1] / (sampler.a[1] + sampler.b[1]) == pytest.approx(0.75) and variance() > before


def test_without_memory_vade_knows_the_last_group_only():
    sampler = samplers.Vade(1, l1=0.0)
    for s in (1.0, 0.0):
        sampler.observe(np.zeros(4, np.int64), np.full(4, s))
    assert sampler.a[0] == 0 and sampler.b[0] == 4


def test_arms_that_were_solved_return_to_play_when_they_are_unlearnt():
    sampler = samplers.Vade(20)
    solved = np.ones(K)
    rng = np.random.default_rng(0)
    for step in range(3000):
        arms = sampler.propose(4)
        p = solved[:20] if step < 100 else np.where(np.arange(20) == 3, 0.3, 1.0)
        arms = np.repeat(arms, 4)
        sampler.observe(arms, (rng.random(len(arms)) < p[arms]).astype(float))
    assert sampler.predict()[3] < 0.75


# ---- MoPPS


def test_mopps_without_forgetting_is_the_conjugate_posterior():
    sampler = samplers.Mopps(2, lam=1.0)
    for s in ([1, 1, 0], [0, 0, 1]):
        sampler.observe(np.zeros(3, np.int64), np.array(s, float))
    assert sampler.a[0] == 1 + 3 and sampler.b[0] == 1 + 3 and sampler.a[1] == sampler.b[1] == 1


def test_mopps_with_full_forgetting_keeps_the_prior_and_the_last_outcomes():
    sampler = samplers.Mopps(1, lam=0.0)
    for s in ([1, 1, 1], [0, 0, 1]):
        sampler.observe(np.zeros(3, np.int64), np.array(s, float))
    assert sampler.a[0] == 1 + 1 and sampler.b[0] == 1 + 2


def test_mopps_takes_the_arms_nearest_to_its_target_where_it_is_certain():
    sampler = samplers.Mopps(K, lam=1.0, pool=K)
    sampler.a, sampler.b = 1e7 * np.clip(P, 0.01, 0.99), 1e7 * np.clip(1 - P, 0.01, 0.99)
    assert set(sampler.propose(8)) == set(np.argsort(np.abs(P - 0.5))[:8])


# ---- DPS


def test_columns_of_the_transitions_sum_to_one():
    sampler = MAKE["dps"]()
    rounds(sampler, 20)
    assert np.allclose(sampler.transitions().sum(1), 1)


def test_what_is_seen_decides_the_belief_and_what_is_not_seen_follows_the_model():
    sampler = samplers.Dps(4)
    expected = sampler.predicted()[3]
    sampler.observe(np.array([0, 0, 1, 1, 2, 2]), np.array([0.0, 0, 1, 0, 1, 1]))
    assert (sampler.belief[:3] == np.eye(3)).all() and np.allclose(sampler.belief[3], expected)
    assert sampler.a[3].sum() == pytest.approx(9) and sampler.a[0].sum() == pytest.approx(10)


def test_dps_learns_that_arms_go_from_failure_over_partial_success_to_solved():
    sampler = samplers.Dps(1, lam=1.0)
    for _ in range(30):
        for s in ([0.0, 0], [0.0, 1], [1.0, 1]):
            sampler.observe(np.zeros(2, np.int64), np.array(s))
    p = sampler.transitions()[0]
    assert p[samplers.PARTIAL, samplers.FAIL] > 0.8 and p[samplers.SOLVED, samplers.PARTIAL] > 0.8


# ---- SFL


def test_learnability_is_greatest_where_every_second_episode_succeeds():
    p = np.linspace(0, 1, 101)
    assert p[samplers.learnability(p).argmax()] == 0.5


def test_the_buffer_of_sfl_holds_arms_around_one_half_and_none_that_is_constant():
    sampler = samplers.Sfl(K, candidates=K, tries=16, keep=10, period=50)
    rounds(sampler, 100, n=K, repeats=1)
    assert len(sampler.buffer) == 10
    assert np.abs(P[sampler.buffer] - 0.5).max() < 0.35
    assert not {*np.flatnonzero(P == 0), *np.flatnonzero(P == 1)} & {*sampler.buffer}


def test_sfl_plays_its_buffer_in_its_share_of_the_episodes():
    sampler = samplers.Sfl(K, candidates=K, tries=16, keep=10, period=10**6, rho=0.5)
    rounds(sampler, 60, n=K, repeats=1)
    share = np.isin(sampler.propose(20_000), sampler.buffer).mean()
    assert share == pytest.approx(0.5 + 0.5 * 10 / K, abs=0.02)


# ---- Prompt-GDRO


def test_shares_of_bins_sum_to_one_and_none_falls_below_its_floor():
    sampler = MAKE["prompt_gdro"]()
    rounds(sampler, 50)
    q = sampler.q()
    assert q.sum() == pytest.approx(1) and q.min() >= sampler.gamma / len(q)


def test_a_bin_with_a_greater_mean_loss_is_played_more_whatever_its_size():
    sampler = mixtures.PromptGdro(K, edges=(0.5,), eta=2.0)
    rounds(sampler, 80, p=np.where(np.arange(K) < 6, 0.1, 0.9))  # six hard arms, fifty-four easy ones
    assert sampler.q()[0] > sampler.q()[1]
    played = rounds(sampler, 40, n=6, p=np.where(np.arange(K) < 6, 0.1, 0.9), seed=9)
    assert played[:6].mean() > 2 * played[6:].mean()


def test_an_arm_changes_its_bin_only_beyond_the_hysteresis():
    edges, now = np.array([0.4, 0.75]), np.array([0, 0, 1, 1, 2])
    rates = np.array([0.41, 0.44, 0.39, 0.36, 0.1])
    assert mixtures.rebinned(rates, now, edges, 0.03).tolist() == [0, 1, 1, 0, 0]
    assert mixtures.rebinned(rates, now, edges, 0.0).tolist() == [1, 1, 0, 0, 0]


def test_edges_that_do_not_rise_are_refused():
    with pytest.raises(UserError, match="must rise"):
        mixtures.PromptGdro(3, edges=(0.5, 0.2))


# ---- mixtures of tasks


def test_rule_reasoner_gives_the_tasks_the_weights_of_its_equation():
    sampler = mixtures.RuleReasoner(3, period=1)
    sampler.observe(np.array([0, 0, 1]), np.array([1.0, 1.0, 0.0]))
    sampler.observe(np.array([0, 0, 1]), np.array([0.0, 1.0, 0.0]))
    assert sampler.rate.tolist() == [0.75, 0.0, 0.0]  # (1 + 0.5) / 2; the third was never played
    v = np.exp((np.array([0.25, 1.0, 1.0]) + 0.1) / 0.8)
    assert np.allclose(sampler.weights, v / v.sum())


def test_weights_of_rule_reasoner_stay_for_a_period():
    sampler = mixtures.RuleReasoner(2, period=4)
    for _ in range(3):
        sampler.observe(np.array([0]), np.ones(1))
    assert (sampler.weights == 0.5).all()
    sampler.observe(np.array([0]), np.ones(1))
    assert sampler.weights[1] > sampler.weights[0]


def test_the_surrogate_of_mixtures_is_recovered_from_runs_and_its_best_mixture_found():
    rng = np.random.default_rng(0)
    # 3 linear, then pairs 00 01 02 11 12 22
    true = np.array([1.0, 0.8, 0.2, -1.0, 0.9, 0.0, -0.9, 0.1, -0.3])
    mix = rng.dirichlet(np.ones(3), 60)
    found = mixtures.fit_mixtures(mix, mixtures.quadratic_terms(mix) @ true, ridge=1e-9)
    fresh = rng.dirichlet(np.ones(3), 20)
    assert np.allclose(
        mixtures.quadratic_terms(fresh) @ found, mixtures.quadratic_terms(fresh) @ true, atol=1e-5
    )
    best = mixtures.best_mixture(true, 3)
    grid = rng.dirichlet(np.ones(3), 20_000)
    score = mixtures.quadratic_terms(grid) @ true
    assert best.min() >= -1e-9 and best.sum() == pytest.approx(1)
    assert float((mixtures.quadratic_terms(best[None]) @ true)[0]) >= score.max() - 1e-6


def test_a_surrogate_that_bends_upwards_has_its_best_mixture_at_a_corner():
    convex = np.array([0.0, 0.1, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    assert np.allclose(mixtures.best_mixture(convex, 3), [0, 1, 0], atol=1e-3)


# ---- predictors


def test_attention_returns_the_reference_that_a_query_equals():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 8)), rng.random(30)
    x /= np.linalg.norm(x, axis=1, keepdims=True)  # else a longer reference may have the greater product
    assert np.allclose(predictors.attend(x, x, y, sharpness=1e4), y, atol=1e-6)


def test_attention_to_equal_references_is_their_mean():
    y = np.array([0.0, 1.0, 1.0])
    assert np.allclose(predictors.attend(np.ones((2, 4)), np.ones((3, 4)), y), 2 / 3)


def test_calibration_finds_the_line_that_made_the_outcomes():
    p = np.linspace(0.05, 0.95, 400)
    z = np.log(p / (1 - p))
    a, b = predictors.fit_platt(p, 1 / (1 + np.exp(-(2.0 * z - 1.0))))
    assert a == pytest.approx(2, abs=0.1) and b == pytest.approx(-1, abs=0.1)


def test_calibration_on_references_that_are_all_solved_stays_finite():
    a, b = predictors.fit_platt(np.full(20, 1.0), np.ones(20))
    assert np.isfinite([a, b]).all() and a > 0


def test_the_utility_of_v0_counts_failures_that_have_a_success_to_compare_with():
    rng = np.random.default_rng(0)
    for n, p in ((4, 0.3), (8, 0.1), (2, 0.5)):
        x = rng.random((200_000, n)) < p
        count = np.where(x.any(1), (~x).sum(1), 0).mean()
        assert float(contrast(np.array(p), n)) == pytest.approx(count, rel=0.02)


def test_the_loss_of_v0_is_that_of_its_definition():
    z, y = torch.tensor([0.3, -1.0, 2.0]), torch.tensor([1.0, 0.0, 0.0])
    p = torch.sigmoid(z)
    entropy = -(torch.log(p[0]) + torch.log(1 - p[1]) + torch.log(1 - p[2])) / 3
    ranking = -(torch.log(torch.sigmoid(z[0] - z[1])) + torch.log(torch.sigmoid(z[0] - z[2]))) / 2
    assert torch.allclose(v0_loss(z, y), 0.25 * ranking + 0.75 * entropy)
    assert torch.allclose(v0_loss(z, torch.ones(3)), -0.75 * torch.log(p).mean())  # no pair to rank


# ---- late evidence


@pytest.mark.parametrize("make, decay", [(lambda: samplers.Vade(1), 0.2), (lambda: samplers.Mopps(1), 0.5)])
def test_evidence_of_older_weights_counts_less_by_the_decay_for_each_version(make, decay):
    fresh, late = make(), make()
    fresh.observe(np.zeros(4, np.int64), np.ones(4))
    late.observe(np.zeros(4, np.int64), np.ones(4), age=np.full(4, 2))
    prior = make()
    prior.observe(np.zeros(0, np.int64), np.zeros(0))
    assert late.a[0] - prior.a[0] == pytest.approx((fresh.a[0] - prior.a[0]) * decay**2)


class Seen:
    """Starts 0 to 9, those that were seen least first."""

    def __init__(self, broken):
        self.seen, self.broken = np.zeros(10), broken
        if broken == "method":
            self.propose = None
        if broken == "arguments":
            self.observe = lambda starts: None

    def propose(self, generator):
        return "table" if self.broken == "table" else StartTable(np.arange(10), 1 / (1 + self.seen), 0.2)

    def observe(self, starts, tasks, success, returns, lengths):
        np.add.at(self.seen, starts % 10, 1)

    def metrics(self):
        return {"none": None, "vector": {"seen": self.seen}}.get(self.broken, {"seen": self.seen.sum()})

    def state_dict(self):
        return {"state": None, "odd": {"seen": {1, 2}}}.get(self.broken, {"seen": self.seen})

    def load_state_dict(self, state):
        if self.broken != "load":
            self.seen = state["seen"]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("method", r"must have the method propose\(generator\), Seen has none"),
        ("arguments", r"must have the method observe\(starts, tasks, success, returns, lengths\): too many"),
        ("table", "propose must return a robo_rl.starts.StartTable, got str"),
        ("none", "metrics must return a dict of numbers, got NoneType"),
        ("vector", "metrics must return numbers by name, got 'seen': ndarray"),
        ("state", "state_dict must return a dict, got NoneType"),
        ("odd", "state_dict must be a dict of arrays, numbers.*cannot save set at /seen"),
        ("load", "must propose the same table: a run would not resume exactly"),
    ],
)
def test_an_own_sampler_that_breaks_the_contract_is_told_in_one_sentence(broken, says):
    check_sampler(lambda seed, tasks: Seen(""))
    with pytest.raises(AssertionError, match=says):
        check_sampler(lambda seed, tasks: Seen(broken))


def test_an_own_sampler_is_checked_before_the_run_begins(tmp_path, monkeypatch):
    (tmp_path / "nothing_of_starts.py").write_text("def make(seed, tasks): ...\n")
    monkeypatch.chdir(tmp_path)
    config = recipe(task="reach", preset="quick", starts="nothing_of_starts:make")
    with pytest.raises(
        UserError, match=r"--starts nothing_of_starts:make: .*propose\(generator\), NoneType has"
    ):
        starts.check(config)
