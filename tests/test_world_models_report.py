"""The trust report keeps its word: bounds, baselines, units, probe, table of real results and verdict against
known truth."""

from dataclasses import replace

import numpy as np
import pytest
from test_world_models_eval import ARGS, Cheat, PointModel, Walker, record
from toys import PointReach

from robo_rl.errors import UserError
from robo_rl.experiment import world_model as experiment
from robo_rl.experiment.world_model import compare_to_table, match_real, probe_model, read_real
from world_models import baselines, calibrate, conformal, probe
from world_models.env import held_frames
from world_models.evaluate import measure
from world_models.model import Frames
from world_models.units import errors_in_units
from world_models.verdict import verdict
from world_models.windows import read_windows


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return record(tmp_path_factory.mktemp("points") / "data")


# ---- bounds ------------------------------------------------------------------------------------------------


def test_the_factor_is_the_split_conformal_quantile_and_an_episode_counts_once():
    """Nine scores at 90 %: the ceil(0.9 x 10) = 9th; eight promise nothing. Repeating a window changes
    nothing."""
    scores = np.array([5.0, 1, 9, 2, 8, 3, 7, 4, 6])
    assert conformal.weighted_quantile(scores, np.arange(9)) == 9
    assert conformal.weighted_quantile(scores[:8], np.arange(8)) == np.inf
    assert conformal.weighted_quantile(np.arange(1.0, 20), np.arange(19)) == 18  # the ceil(0.9 x 20)th
    one, group = np.arange(1.0, 20), np.arange(19)
    assert (
        conformal.weighted_quantile(np.concatenate([one, [1.0] * 100]), np.concatenate([group, [0] * 100]))
        == 18
    )
    assert conformal.weighted_quantile(np.zeros(0), np.zeros(0)) == np.inf


def rollouts(episodes: int, seed: int, steps: int = 32, windows: int = 3):
    """Errors and uncertainties [B,T] whose ratio changes along a rollout, shares a factor per episode and has
    heavy tails; truth: q_t of one window is that of exp(0.4 z) |student-t_3|, times a curve in t."""
    rng = np.random.default_rng(seed)
    episode = np.repeat(np.arange(episodes), rng.integers(1, 2 * windows, episodes))
    hard = np.exp(0.4 * rng.standard_normal(episodes))[episode]
    curve = np.linspace(3.0, 0.5, steps) ** 2
    uncertainty = np.cumsum(rng.uniform(0.5, 1.5, (len(episode), steps)), 1)
    error = uncertainty * curve * hard[:, None] * np.abs(rng.standard_t(3, (len(episode), steps)))
    length = np.where(rng.random(episodes) < 0.5, steps, rng.integers(min(4, steps), steps + 1, episodes))
    seen = np.arange(steps) < length[episode][:, None]
    return error, uncertainty, seen, episode


def test_a_bound_holds_at_every_horizon_for_new_episodes_of_a_known_law():
    error, uncertainty, seen, episode = rollouts(3000, 0)
    q = conformal.factors(conformal.scores_of(error, uncertainty), seen, episode)
    error, uncertainty, seen, episode = rollouts(6000, 1)
    score = conformal.scores_of(error, uncertainty)
    found = conformal.coverage(score, seen, episode, q, (1, 2, 4, 8, 16, 32))
    assert all(0.87 <= i.value <= 0.93 for i in found.values()), found
    rng = np.random.default_rng(2)
    tail = np.abs(rng.standard_t(3, 400_000)) * np.exp(0.4 * rng.standard_normal(400_000))
    assert q / np.linspace(3.0, 0.5, 32) ** 2 == pytest.approx(np.full(32, np.quantile(tail, 0.9)), rel=0.15)
    pooled = conformal.weighted_quantile(score[seen], np.repeat(episode, seen.sum(1)))
    bad = conformal.coverage(score, seen, episode, np.full(32, pooled), (1, 2, 4))
    assert bad[1].high < 0.8, "one factor for all horizons breaks its promise in the first steps"


def test_a_bound_from_few_episodes_holds_on_average_over_recordings():
    inside = []
    for k in range(150):
        error, uncertainty, seen, episode = rollouts(15, 2 * k, 2, 2)
        q = conformal.factors(conformal.scores_of(error, uncertainty), seen, episode)
        error, uncertainty, _, _ = rollouts(15, 2 * k + 1, 2, 2)
        inside.append((conformal.scores_of(error, uncertainty) <= q).mean())
    assert 0.88 < np.mean(inside) < 0.97


def test_cross_fitted_factors_never_come_from_the_windows_own_episode():
    error, uncertainty, seen, episode = rollouts(40, 0, 4)
    score = conformal.scores_of(error, uncertainty)
    q = conformal.cross_factors(score, seen, episode)
    mine = episode == 7
    changed = score.copy()
    changed[mine] *= 1000
    assert np.array_equal(conformal.cross_factors(changed, seen, episode)[mine], q[mine])
    assert not np.array_equal(conformal.cross_factors(changed, seen, episode), q)


def test_the_report_checks_the_promise_of_training_only_on_episodes_that_did_not_make_it(data):
    model = PointModel(drift=0.01)
    model.spec = replace(model.spec, bounds=(1e-3,) * 16)  # a promise that cannot be kept
    bound = measure(model, data, ARGS)[0]["uncertainty"]["bound"]
    assert bound["made"] == "in training" and bound["broken"] and bound["covered"][1]["value"] < 0.5
    model.frames = frames_of(data, held=True)
    bound = measure(model, data, ARGS)[0]["uncertainty"]["bound"]
    assert bound["made"].startswith("from other") and not bound["broken"]


def frames_of(data, held: bool) -> Frames:
    rows = data.from_
    return Frames(
        {"state": data.state[rows]},
        np.zeros(len(rows), np.int64),
        np.ones(len(rows), bool),
        np.full(len(rows), held),
    )


def test_the_promise_of_training_is_made_in_the_units_that_it_is_checked_in(data):
    from world_models.reading import read

    recorded = read([str(data.meta.root)])
    model = PointModel(drift=0.01)
    model.spec = replace(
        model.spec, bounds=calibrate.promised(model, recorded, 16), scale=calibrate.spread(recorded)
    )
    assert len(model.spec.bounds) == 16
    held = np.flatnonzero(recorded.held)
    assert len(held) == 4 and not np.isfinite(model.spec.bounds).any(), "four episodes promise nothing"


# ---- baselines ---------------------------------------------------------------------------------------------


def linear(episodes=60, steps=30, seed=0, curve=0.0):
    """RecordedSteps of s' = 0.95 s + 0.9 (s - before) + B a, or, bent by `curve` sin 5s, of one dimension
    without the velocity."""
    rng = np.random.default_rng(seed)
    state, before, action, after, episode = [], [], [], [], []
    push = np.array([[0.3], [0.0]]) if curve else np.array([[0.3, 0.0, 0.1], [0.0, -0.2, 0.1]])
    for e in range(episodes):
        s = b = rng.uniform(-1, 1, push.shape[1])
        for _ in range(steps):
            a = rng.uniform(-1, 1, 2)
            new = 0.95 * s + (0.0 if curve else 0.9) * (s - b) + a @ push + curve * np.sin(5 * s)
            for rows, x in zip((state, before, action, after, episode), (s, b, a, new, e), strict=True):
                rows.append(x)
            s, b = new, s
    return baselines.RecordedSteps(
        *(np.array(x, np.float32) for x in (state, before, action, after)), np.array(episode)
    )


def windows_of(t, episodes, steps=16):
    rows = np.array([np.flatnonzero(t.episode == e)[5] for e in episodes])
    at = rows[:, None] + np.arange(steps)
    w = type("W", (), {})()
    w.start, w.actions, w.state = (
        {"state": t.state[rows], "before": t.before[rows]},
        t.action[at],
        t.after[at],
    )
    w.episode = np.array(episodes)
    return w


def test_ridge_rolls_a_linear_world_out_exactly_and_neighbours_correct_it_in_a_bent_one():
    t = linear()
    w = windows_of(t, range(20))
    found, settings = baselines.predict(t, w)
    assert set(found) == {"constant velocity", "ridge", "neighbours"} and settings["ridge"] == "penalty 1e-06"
    assert np.abs(found["ridge"] - w.state).max() < 0.02 < np.abs(found["constant velocity"] - w.state).mean()
    bent = linear(curve=0.2)
    w = windows_of(bent, range(20))
    found, _ = baselines.predict(bent, w)
    error = {n: np.abs(x - w.state)[:, :2].mean() for n, x in found.items()}
    assert error["neighbours"] < 0.8 * error["ridge"] < error["constant velocity"]


def test_a_baseline_never_learns_from_the_episode_it_predicts():
    t = linear(episodes=30)
    w = windows_of(t, range(30))
    whole, _ = baselines.predict(t, w)
    marked = replace(t, after=np.where(t.episode[:, None] == 3, t.after + 100, t.after))
    again, _ = baselines.predict(marked, w)
    assert np.abs(again["ridge"][3]).max() < 20, "not those of its own episode"
    assert not np.allclose(whole["ridge"], again["ridge"])


def test_the_report_says_of_a_lazy_model_which_predictor_beats_it(data):
    doc, _ = measure(PointModel(gain=0.5), data, ARGS)
    best = doc["baselines"]["best"]
    assert (
        best[8]["name"] in ("ridge", "neighbours")
        and best[8]["worse"]
        and doc["baselines"]["rows"]["ridge"]["ratio"][8] > 3
    )
    doc, _ = measure(PointModel(), data, ARGS)
    assert all(not b["worse"] for b in doc["baselines"]["best"].values())
    assert doc["baselines"]["transitions"] == len(data.state) - len(data), "the toy keeps no last state"


# ---- units -------------------------------------------------------------------------------------------------


def test_errors_are_told_in_millimetres_and_degrees_where_the_layout_is_known():
    names = (
        "joint1",
        "joint2",
        "ee_x",
        "ee_y",
        "ee_z",
        "cube_dx",
        "cube_dy",
        "cube_dz",
        "cube_z",
        "cube_cos4yaw",
        "cube_sin4yaw",
        "drawer",
    )
    true, predicted = np.zeros((1, 1, 12)), np.zeros((1, 1, 12))
    true[..., 9] = 1
    turn = np.deg2rad(4 * 10)
    predicted[0, 0] = [
        np.pi / 180,
        -3 * np.pi / 180,
        0.003,
        0.004,
        0,
        0,
        0,
        0.02,
        9,
        np.cos(turn),
        np.sin(turn),
        0.05,
    ]
    found = {n: (u, e.item()) for n, (u, e) in errors_in_units("mujoco", names, predicted, true).items()}
    assert found == {
        "hand": ("mm", pytest.approx(5)),
        "cube from the hand": ("mm", pytest.approx(20)),
        "cube, yaw": ("degrees", pytest.approx(10)),
        "joints, mean of all": ("degrees", pytest.approx(2)),
        "drawer": ("mm", pytest.approx(50)),
    }
    predicted[0, 0, 9:11] = -1, 0  # 45 degrees off: as far as a square can be
    assert errors_in_units("mujoco", names, predicted, true)["cube, yaw"][1] == pytest.approx(45)
    assert errors_in_units("lerobot", names, predicted, true) == {}


# ---- the probe ---------------------------------------------------------------------------------------------


PROBE = replace(ARGS, probe=4, episodes=60, horizon=8)


def test_a_search_finds_a_planted_bug_and_none_where_the_model_is_exact(data):
    found = probe_model(Cheat(), PointReach(60), data, PROBE)["searches"]
    assert [s["side"] for s in found][0] == "" and max(s["model"] - s["real"] for s in found) > 0.5
    assert "over" in [s["side"] for s in found]
    fair = probe_model(PointModel(), PointReach(60), data, PROBE)
    assert all(not s["alarm"] and s["model"] == pytest.approx(s["real"], abs=0.05) for s in fair["searches"])
    assert [p["side"] for p in fair["policies"]] == [""] * 4 and len(
        {p["name"] for p in fair["policies"]}
    ) == 4
    assert fair["unlike"]["model"][8]["value"] < 1e-4 < fair["unlike"]["hold_last"][8]["value"]


def test_the_probe_without_a_simulator_says_what_the_model_believes(data):
    model = PointModel()
    model.frames = frames_of(data, held=True)
    found = probe_model(model, None, data, PROBE)
    assert (
        all("real" not in s for s in found["searches"])
        and len(found["policies"]) == 4
        and "unlike" not in found
    )


def test_the_clone_of_the_successes_is_the_affine_policy_nearest_to_them(data):
    base = probe.cloned_successes(data)
    got = base({"state": data.state[:50]})
    assert got.shape == (50, 1, 2) and np.abs(got).max() <= 1
    goal = np.array([[0, 0, 0.3, -0.3]], np.float32)
    assert (np.sign(base({"state": goal})[0, 0]) == [1, -1]).all(), "towards the goal"


# ---- a table of real results -------------------------------------------------------------------------------


def test_a_table_of_real_results_is_read_and_matched(tmp_path):
    path = tmp_path / "real.csv"
    path.write_text("policy,successes,episodes\na/10,3,10\nb,7,10\n")
    table = read_real(path)
    found = [("a/5", path, path), ("a/10", path, path), ("b/20", path, path)]
    assert match_real(found, table) == [1, 2] and (table[1].successes, table[1].episodes) == (7, 10)
    (tmp_path / "real.json").write_text(
        '[{"policy": "a/10", "successes": 3, "episodes": 10}, {"policy": "b", "successes": 7, "episodes": '
        "10}]"
    )
    assert read_real(tmp_path / "real.json") == table
    with pytest.raises(UserError, match=r"'a' fits 2 of the policies: a/5, a/10, b/20"):
        match_real(found, [replace(table[0], policy="a")])
    for text, said in (
        ("policy,won\na,1\n", "policy, successes and episodes"),
        ("policy,successes,episodes\na,11,10\nb,1,2\n", "11 successes"),
        ("policy,successes,episodes\na,1,10\n", "at least two"),
        ("[1", "JSON"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            read_real(path)
    with pytest.raises(UserError, match="must be CSV"):
        read_real(tmp_path / "none.csv")


def test_policies_are_ranked_against_a_table_without_any_simulator(data):
    model = PointModel()
    model.frames = frames_of(data, held=True)
    policies = [(f"run/{i}", Walker(s)) for i, s in enumerate((0.1, 0.5, 0.9))]
    rows = [experiment.RealRow(n, k, 40) for (n, _), k in zip(policies, (4, 20, 5), strict=True)]
    doc = compare_to_table(model, policies, rows, ARGS)
    assert (
        doc["alarm"]["over"] == ["run/2"]
        and doc["alarm"]["under"] == []
        and doc["ranking"]["real"] == "robot"
    )
    assert doc["ranking"]["starts"] == len(held_frames(model.frames)), "every held-out start for reports"
    assert doc["ranking"]["choice_regret"] == pytest.approx(0.375)


# ---- the verdict -------------------------------------------------------------------------------------------

GOOD = {
    "finite": True,
    "all_learnt": False,
    "baselines": {
        "best": {
            1: {"name": "ridge", "better": True},
            8: {"name": "ridge", "better": True},
            16: {"name": "ridge", "better": False},
        }
    },
    "success": {"tp": 9, "fp": 1, "fn": 1, "recall": 0.9, "precision": 0.9},
    "following": {"correlation": 0.95},
    "uncertainty": {"bound": {"broken": []}},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "after 1 and 8 steps; nothing measured speaks against"),
        ({"finite": False}, "Do not use this model: it predicts numbers that are not finite"),
        ({"all_learnt": True}, "but it learnt from all these episodes; record episodes that it does not"),
        (
            {"baselines": {"best": {1: {"name": "ridge", "better": False}}}},
            "at no horizon is it surely better than ridge",
        ),
        (
            {"alarm": {"over": ["a/1", "b/2"], "under": ["c/3"]}},
            r"overrates a/1 and b/2 \(1 more below\); record episodes of a/1 with little noise next",
        ),
        (
            {"alarm": {"over": [], "under": ["c/3"]}},
            "underrates c/3; record episodes of c/3, the successful ones",
        ),
        (
            {"probe": {"searches": [{"side": "over", "model": 0.9, "real": 0.1, "gap": {"value": 0.8}}]}},
            "succeeds in 90 % of episodes in it and in 10 % for real",
        ),
        (
            {"probe": {"alarm": {"over": [], "under": ["clone"]}}},
            r"underrates policies unlike the data \(clone\); record successes of",
        ),
        (
            {"uncertainty": {"bound": {"broken": [1, 2, 4]}}},
            "covers less than it promises after 1, 2 and 4 steps",
        ),
        (
            {"success": GOOD["success"] | {"recall": 0.5, "fn": 9}},
            "misses 9 of 18 successes; record more successful",
        ),
        (
            {"success": GOOD["success"] | {"precision": 0.5, "fp": 9}},
            "9 of its 18 successes are none; record failures",
        ),
        (
            {"success": {"tp": 0, "fp": 9, "fn": 0, "recall": 0, "precision": 0, "known": False}},
            "nothing measured speaks against",
        ),
        ({"following": {"correlation": 0.3}}, "correlation of 0.30"),
        (
            {"ranking": {"policies": 8, "real": "robot", "spearman": {"low": 0.9}}},
            "ranks 8 policies as the robot does; nothing",
        ),
        (
            {"ranking": {"policies": 8, "real": "robot", "spearman": {"low": None}}},
            "ranking of policies is not certain; record",
        ),
    ],
)
def test_the_verdict_is_one_sentence_that_says_what_to_record_next(change, words):
    import re

    said = verdict(GOOD | change)
    assert re.search(words, said) and "\n" not in said and said.count(". ") == 0 and said.endswith(".")


def test_windows_know_their_episode(data):
    w = read_windows(data, (), np.array([3, 7]), 6, 4, 0)
    rows = [
        data.from_[e] <= np.flatnonzero((data.state == s).all(1))[0] < data.to[e]
        for e, s in zip(w.episode, w.start["state"], strict=True)
    ]
    assert all(rows) and set(w.episode) == {3, 7}
