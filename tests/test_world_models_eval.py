"""`wm eval`: what it says of models whose faults are known."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import PointReach

import robo_rl
from robo_rl.cli.wm_eval import baseline_lines, table
from robo_rl.data.episode import Episode
from robo_rl.data.reader import load
from robo_rl.data.writer import Writer
from robo_rl.errors import UserError
from robo_rl.experiment.world_model import compare_policies, obs_spec_of, random_actions
from robo_rl.files import plain
from robo_rl.log import Progress
from robo_rl.report import world_model as wm_page
from world_models import imagine, learning
from world_models.evaluate import compare_models, measure
from world_models.latent import Latent, LatentOptions
from world_models.model import Frames, Prediction, WorldSpec, save
from world_models.model import load as load_model
from world_models.options import FitOptions, VideoConfig, WorldEvalConfig, WorldModelConfig
from world_models.verdict import NO_USE, ends_early, objections, verdict
from world_models.windows import read_windows

ROOT = Path(__file__).parent.parent

ARGS = WorldEvalConfig(model="m", dataset="d", windows=60, horizon=16, episodes=200, inverse=60, json=True)


class PointModel:
    """The dynamics of PointReach, exact; `gain` scales what an action does, `drift` errs at every step,
    `generous` is the distance at which it grants success, `doubt` how its uncertainty grows."""

    options = None

    def __init__(self, gain: float = 1.0, drift: float = 0.0, generous: float = 0.1, broken: bool = False):
        env = PointReach(1)
        self.spec = WorldSpec(kind="latent", control=env.spec, state=4, horizon=20)
        none = np.zeros(0, np.int64)
        self.frames = Frames({}, none, none.astype(bool), none.astype(bool))
        self.gain, self.drift, self.generous, self.broken = gain, drift, generous, broken

    def start(self, obs, keys):
        return {"state": torch.from_numpy(np.array(obs["state"], np.float32)), "t": torch.zeros(len(keys))}

    def step(self, carry, actions):
        state, t, rows = carry["state"].clone(), carry["t"].clone(), []
        for e in range(actions.shape[1]):
            move = 0.2 * self.gain * actions[:, e] + self.drift
            state = torch.cat([state[:, :2] + move, state[:, 2:] - move], 1)
            t = t + 1
            won = (state[:, 2:].norm(dim=1) < self.generous).float()
            rows.append((state, won, won, won, t * (abs(self.drift) + 0.01)))
        s, r, end, won, doubt = (torch.stack(x, 1) for x in zip(*rows, strict=False))
        if self.broken:
            r = r * float("nan")
        return {"state": state, "t": t}, Prediction({"state": s}, r, end, won, doubt)


class Walker:
    """A policy for PointReach: goes to the goal with probability `skill` per episode (decided by where it
    starts), else away."""

    def __init__(self, skill: float):
        from robo_rl.policies import ObsSpec

        self.skill, self.spec = skill, ObsSpec(state=4, action=2)

    def act(self, obs, generator, explore):
        from robo_rl.policies import Chunk

        s = obs["state"]
        target = s[:, :2] + s[:, 2:]  # the goal: it stays
        luck = (target * 1000).frac().abs().sum(1) / 2
        go = (s[:, 2:] / 0.2 * 0.7).clamp(-1, 1)
        actions = torch.where(luck[:, None] < self.skill, go, -go)[:, None]
        return Chunk(actions, actions, actions.new_empty(len(s), 0), {})


def record(folder, episodes=40, seed=0):
    """Noisy walks to the goal and random ones."""
    env, rng = PointReach(episodes), np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    rows, over, length = [], np.zeros(episodes, bool), np.zeros(episodes, int)
    while not over.all():
        act = np.where(np.arange(episodes)[:, None] % 2, env.expert_action(), 0) + rng.uniform(
            -0.7, 0.7, (episodes, 2)
        )
        act = act.clip(-1, 1).astype(np.float32)
        state = obs["state"].copy()
        obs, reward, terminated, truncated, info = env.step(act)
        rows.append((state, act, reward.copy()))
        length += ~over
        over = terminated | truncated
    with Writer(folder, spec=env.spec) as writer:
        for i in range(episodes):
            cut = [np.stack([r[k][i] for r in rows[: length[i]]]) for k in range(3)]
            writer.add(
                Episode(
                    state=cut[0],
                    action=cut[1],
                    reward=cut[2],
                    task="reach the goal",
                    success=bool(info["success"][i]),
                    terminated=bool(terminated[i]),
                )
            )
    return load(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return record(tmp_path_factory.mktemp("points") / "data")


def test_windows_pair_every_action_with_what_was_seen_after_it(data):
    w = read_windows(data, (), np.arange(len(data)), 30, 8, 0)
    before = np.concatenate([w.start["state"][:, None], w.state[:, :-1]], 1)
    moved = w.state[..., :2] - before[..., :2]
    assert np.abs(moved - 0.2 * w.actions)[w.seen].max() < 1e-5
    assert (w.seen <= w.made).all() and w.made[:, 0].all() and (~w.seen).any()
    assert (w.success <= w.made).all() and w.success.any() and (w.reward[w.made] == w.success[w.made]).all()


class Told(Progress):
    """Keeps the numbers of units that were told, by stage."""

    def __init__(self):
        super().__init__(io.StringIO())
        self.told = {}

    def update(self, done, *rest):
        self.told.setdefault((self._stage, self._total), []).append(done)


def test_the_stages_of_an_evaluation_tell_how_far_they_are_within_a_policy_and_a_batch(data):
    progress = Told()
    measure(PointModel(), data, replace(ARGS, windows=40, horizon=24, inverse=30), progress)
    compare_policies(PointModel(), PointReach(20), walkers()[:2], replace(ARGS, episodes=40), progress)
    told = progress.told
    assert told["predict", 40][:2] == [0, 13] and told["predict", 40][-1] == 40
    assert told["actions", 30] == list(range(31))
    rank = told["rank", 160]
    assert rank == sorted(rank) and rank[-1] == 160 and len(rank) > 12


def test_the_exact_model_has_no_error_obeys_and_tells_success_without_a_mistake(data):
    doc, _ = measure(PointModel(), data, ARGS)
    rows = doc["open_loop"]["state"]
    assert all(i["value"] < 1e-5 for i in rows["model"].values()) and all(rows["apart"].values())
    assert doc["following"]["correlation"] == pytest.approx(1, abs=1e-4) and doc["following"][
        "gain"
    ] == pytest.approx(1, abs=1e-4)
    assert doc["success"]["fp"] == doc["success"]["fn"] == 0 < doc["success"]["tp"]
    assert doc["reward"]["rmse"] == 0 and doc["finite"] and not doc["notes"]


def test_a_frozen_model_is_copy_last_and_follows_nothing(data):
    doc, _ = measure(PointModel(gain=0.0), data, ARGS)
    rows = doc["open_loop"]["state"]
    assert rows["model"] == rows["hold_last"] and not any(rows["apart"].values())
    assert all(set(i.values()) == {0.0} for i in rows["difference"].values())
    assert doc["following"]["correlation"] == pytest.approx(0, abs=1e-6)


def test_a_lazy_model_follows_with_its_gain_and_errs_more_with_the_horizon(data):
    doc, _ = measure(PointModel(gain=0.5), data, ARGS)
    assert doc["following"]["gain"] == pytest.approx(0.5, abs=0.02)
    # later ones are of fewer windows
    values = [i["value"] for i in doc["open_loop"]["state"]["model"].values()][:3]
    assert values == sorted(values)


def test_an_uncertainty_that_grows_with_the_error_tells_where_the_model_errs(data):
    doc, _ = measure(PointModel(drift=0.03), data, ARGS)
    assert doc["uncertainty"]["auroc_worst_tenth"] > 0.9 and doc["uncertainty"]["spearman"] > 0.9
    assert all(i["value"] > 0.8 for i in doc["uncertainty"]["bound"]["covered"].values())


def test_a_model_that_grants_success_too_easily_is_told_by_its_false_alarms(data):
    doc, _ = measure(PointModel(generous=0.5), data, ARGS)
    assert doc["success"]["fp"] > 0 == doc["success"]["fn"]


def test_numbers_that_are_not_finite_are_named(data):
    doc, _ = measure(PointModel(broken=True), data, ARGS)
    assert not doc["finite"] and "not finite" in doc["notes"][-1]
    json.dumps(plain(doc), allow_nan=False)


def walkers():
    return [(f"run/{i}", Walker(s)) for i, s in enumerate(np.linspace(0.05, 0.95, 8))]


def test_the_exact_model_ranks_eight_policies_as_the_simulator_does_and_raises_no_alarm():
    doc = compare_policies(PointModel(), PointReach(200), walkers(), ARGS)
    assert doc["ranking"]["spearman"]["value"] > 0.99 and doc["ranking"]["worst_regret"] < 0.02
    assert doc["alarm"]["over"] == doc["alarm"]["under"] == []
    assert [p["model"] for p in doc["policies"]] == pytest.approx(
        [p["real"] for p in doc["policies"]], abs=0.03
    )
    assert doc["policies"][0]["real"] < 0.4 < doc["policies"][-1]["real"]


def test_a_planted_reward_bug_rings_the_alarm():
    doc = compare_policies(PointModel(generous=2.0), PointReach(200), walkers(), ARGS)
    assert "run/0" in doc["alarm"]["over"]


def begins_as(model, data):
    """`model` with the first frames of the recorded episodes."""
    model.spec = replace(model.spec, tasks=("reach the goal",))
    rows, n = data.from_, len(data)
    model.frames = Frames(
        {"state": data.state[rows]}, np.zeros(n, np.int64), np.ones(n, bool), np.arange(n) < 7
    )
    return model


def test_a_model_in_which_random_actions_succeed_more_often_than_the_recordings_is_of_no_use(data):
    for model, trusted in ((PointModel(), True), (PointModel(generous=2.0), False)):
        model.spec = replace(model.spec, threshold=1e9)
        doc, _ = measure(model, data, ARGS)
        doc["random"] = random_actions(begins_as(model, data), data, 0)
        assert doc["random"]["recorded"] == pytest.approx(data.success.mean())
        told = f"random actions succeed in {100 * doc['random']['model']:.0f} % of episodes in it"
        assert (told in verdict(doc)) != trusted and any(told in o for o in objections(doc)[0]) != trusted
        assert verdict(doc).startswith(NO_USE) != trusted
        assert "  random actions: succeed in" in table(doc)
    model.generous, found = 0.5, []
    for threshold in (0.0, 1e9):  # below it all but the first step is beyond the doubt
        model.spec = replace(model.spec, threshold=threshold)
        found.append(random_actions(model, data, 0)["model"])
    assert found[0] < 0.5 * found[1]


def test_episodes_that_end_before_recorded_ones_are_told_with_the_remedy(tmp_path):
    spec = PointModel().spec
    for horizon, said in ((6, True), (spec.control.max_steps, False), (0, False)):
        model = Latent(replace(spec, horizon=horizon), LatentOptions(members=1, hidden=8, head_width=8))
        none = np.zeros(0, np.int64)
        model.frames = Frames({"state": np.zeros((0, 4), np.float32)}, none, none > 0, none > 0)
        save(model, tmp_path / "m")
        told = ends_early(str(tmp_path / "m"))
        assert bool(told) == said
        if said:
            assert (
                f"after 6 steps, to which it is calibrated, recorded ones after {spec.control.max_steps}"
                in told
            )
            assert "what takes longer fails in it" in told and "more episodes" in told


class Cheat(PointModel):
    """Grants success to whoever leaves the field to the right: a bug that only a policy trained in the model
    would find."""

    def step(self, carry, actions):
        carry, p = super().step(carry, actions)
        found = (p.obs["state"][..., 0] > 2).float()
        return carry, replace(
            p, success=torch.maximum(p.success, found), terminal=torch.maximum(p.terminal, found)
        )


class Learner(Walker):
    """A policy after some training in `Cheat`: with probability `lured` per episode it goes right, whatever
    the goal."""

    def __init__(self, lured: float):
        super().__init__(0.8)
        self.lured = lured

    def act(self, obs, generator, explore):
        chunk = super().act(obs, generator, explore)
        goal = obs["state"][:, :2] + obs["state"][:, 2:]
        lured = ((goal[:, 0] * 777).frac().abs() < self.lured)[:, None, None]
        actions = torch.where(lured, torch.tensor([1.0, 0.0]), chunk.actions)
        return replace(chunk, actions=actions)


def test_the_alarm_fires_on_an_over_trained_policy_only_once_it_exploits_the_model():
    training = [(f"run/{i}", Learner(x)) for i, x in enumerate((0.0, 0.05, 0.4, 0.9))]
    doc = compare_policies(Cheat(), PointReach(200), training, ARGS)
    assert doc["alarm"]["over"] == ["run/2", "run/3"]
    assert not compare_policies(PointModel(), PointReach(200), training, ARGS)["alarm"]["over"]


def test_batches_of_another_size_meet_the_same_starts():
    a, b = (
        compare_policies(PointModel(), PointReach(n), walkers()[3:5], replace(ARGS, episodes=30))
        for n in (30, 16)
    )
    assert [p["real"] for p in a["policies"]] == [p["real"] for p in b["policies"]]
    assert [p["model"] for p in a["policies"]] == [p["model"] for p in b["policies"]]


def test_a_data_set_with_other_axes_or_another_rate_is_named(data):
    model = PointModel()
    for change, said in (
        ({"period": 0.05}, "control rate"),
        ({"axes": model.spec.control.axes[:1]}, "action axes"),
        ({"views": ("front",)}, "camera front"),
        (
            {"axes": tuple(replace(a, unit="rad") for a in model.spec.control.axes)},
            r"'x' is in rad \(delta\) in the model, in m \(delta\) in",
        ),
    ):
        model.spec = replace(PointModel().spec, control=replace(model.spec.control, **change))
        with pytest.raises(UserError, match=said):
            measure(model, data, ARGS)
        model = PointModel()


def test_episodes_that_the_model_learnt_from_are_left_out(data):
    model = PointModel()
    first = np.zeros(len(data.state), bool)
    first[data.from_] = True
    held = np.zeros(len(data.state), bool)
    held[data.from_[:5]] = True
    model.frames = Frames({"state": data.state}, np.zeros(len(first), np.int64), first, held)
    doc, _ = measure(model, data, ARGS)
    assert doc["episodes"] == 5 and "These 60 windows are of 5 episodes alone" in doc["notes"][0]
    assert len(doc["notes"]) == 1
    model.frames = Frames({"state": data.state}, np.zeros(len(first), np.int64), first, held & False)
    doc, _ = measure(model, data, ARGS)
    assert doc["episodes"] == len(data) and "bright side" in doc["notes"][0] and doc["all_learnt"]


def test_the_interval_of_told_successes_counts_episodes_not_their_windows(data):
    """With a tenth of the windows the interval is as wide: they are of the same episodes."""
    model = PointModel(drift=0.03)
    few, many = (measure(model, data, replace(ARGS, windows=n))[0]["success"]["accuracy"] for n in (40, 400))
    assert 0.1 < few["value"] < 0.95
    assert many["high"] - many["low"] > 0.8 * (few["high"] - few["low"])


def test_recordings_too_short_for_an_inverse_model_are_measured_without_it(tmp_path):
    short = record(tmp_path / "short", episodes=2)
    assert len(short.state) < 64
    doc, _ = measure(PointModel(), short, replace(ARGS, windows=8, horizon=4))
    assert doc["eva"]["model"] is None and "executability" not in table(doc)


def test_play_ends_an_episode_at_its_success_and_counts_a_nan_as_lost():
    obs = {"state": np.array([[0, 0, 0.4, 0], [0, 0, 9, 0]], np.float32)}

    def right(o):
        return np.tile(np.array([1, 0], np.float32), (2, 1, 1))

    got = imagine.play(PointModel(), right, obs, 10)
    assert (
        got.success.tolist() == [True, False]
        and got.length.tolist() == [2, 10]
        and got.gain.tolist() == [1, 0]
    )
    assert not imagine.play(PointModel(broken=True), right, obs, 10).success.any()


def test_the_page_holds_every_number_and_needs_no_network(data, tmp_path):
    doc, arrays = measure(PointModel(drift=0.01), data, ARGS)
    doc |= compare_policies(PointModel(generous=2.0), PointReach(50), walkers(), replace(ARGS, episodes=50))
    doc |= {
        "verdict": "Of use, but it is the first; record.",
        "objections": ["it is the first", "it is the second"],
    }
    html = wm_page.page(plain(doc), wm_page.side_by_side(tmp_path, arrays))
    assert "Open-loop error, state" in html and "run/7" in html and "alarm" in html and "{{" not in html
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html
    assert (
        "Of use, but" in html
        and "Against it too: it is the second." in html
        and "too: it is the first" not in html
    )
    assert table(doc).endswith("against it: it is the second\nOf use, but it is the first; record.")
    useless = plain(doc) | {"verdict": "Of no use."}
    assert "Against it too: it is the first." in wm_page.page(useless, [])
    assert "Spearman" in table(doc) and "ALARM" in table(doc)
    alike = doc["ranking"] | {"spearman": dict.fromkeys(("value", "low", "high"), np.nan)}
    said = table(doc | {"ranking": alike})
    assert "Spearman unknown, for all of them succeed alike" in said and "nan" not in said
    did = doc["success"]["tp"] + doc["success"]["fn"]
    assert f"{doc['success']['tp']} of {did}</b><small>" in html
    none = doc["success"] | {"tp": 0, "fn": 0, "fp": 2}
    said = wm_page.tiles_of(plain(doc) | {"success": none})
    assert "<b>–</b><small>2 false alarms; no window here has a success" in said
    untold = plain(doc) | {"success": none | {"known": False}}
    assert "<b>–</b><small>nobody said which episodes succeeded" in wm_page.tiles_of(untold)
    assert "Success probability" not in wm_page.page(untold, []) and "Success probability" in html
    said = table(doc | {"success": none | {"known": False}})
    assert "success: not measured, for nobody said" in said and "false alarms" not in said


def test_ratios_of_many_thousands_keep_their_columns():
    rows = {"ridge": {"error": {"1": 0, "2": 0}, "ratio": {"1": 2995.0543, "2": None}}}
    head, row = baseline_lines({"rows": rows, "settings": {}})
    assert row.split() == ["ridge", "2995", "–"] and head.index("1") == row.index("5")


@pytest.mark.slow
def test_the_plain_script_evaluates_any_function_in_a_model(data, tmp_path):
    model = Latent(
        replace(PointModel().spec, tasks=("reach the goal",)), LatentOptions(members=2, hidden=8, layers=1)
    )
    model.frames = Frames(
        {"state": data.state[data.from_]}, *(np.full(len(data), x) for x in (0, True, True))
    )
    save(model, tmp_path / "model")
    (tmp_path / "mine.py").write_text("def right(obs):\n    return [[1.0, 0.0]] * len(obs['state'])\n")
    done = subprocess.run(
        [sys.executable, ROOT / "launch/evaluate_world_model.py", "model", "mine:right", "--episodes", "6"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "mine:right\n  in the model      success" in done.stdout
        and "n = 6 from 6 recorded starts, mean return" in done.stdout
        and "to 20 steps, 0 % beyond" in done.stdout
    )
    assert "simulator" not in done.stdout, "there is none called toy"
    for names, words in (
        (["nowhere", "mine:right"], "nowhere holds no world model"),
        (["model", "ws://127.0.0.1:9"], "no policy answers at"),
        (["model", "mine:right", "nothing"], "nothing does not exist"),
    ):
        done = subprocess.run(
            [sys.executable, ROOT / "launch/evaluate_world_model.py", *names],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr
        assert not done.stdout, "nothing is evaluated before all names are known"


def test_a_policy_that_acts_elsewhere_is_shown_a_model_as_it_is_and_commands_in_the_units_of_its_recordings():
    spec = PointModel().spec
    asked = obs_spec_of(spec)
    assert (asked.state, asked.action, asked.views, asked.units) == (
        4,
        2,
        (),
        (),
    ) and asked.action_names == spec.control.action_names
    assert obs_spec_of(replace(spec, own=True)).units == tuple(a.unit for a in spec.control.axes)


def test_a_policy_hears_that_episodes_begin_in_a_model_too():
    heard = []

    class Policy:
        def reset(self):
            heard.append("begin")

        def __call__(self, obs):
            heard.append(len(obs["state"]))
            return np.ones((len(obs["state"]), 2))

    robo_rl.evaluate(Policy(), PointModel(), episodes=12, simulator=PointReach(8))
    assert heard.count("begin") == 2 and heard[0] == "begin"


def test_evaluation_in_a_model_pairs_with_the_simulator_it_begins_in():
    env, model = PointReach(50), PointModel()
    for policy in (Walker(0.6), lambda obs: np.clip(obs["state"][:, 2:] / 0.2 * 0.7, -1, 1)):
        inside, real = (
            robo_rl.evaluate(policy, e, episodes=80, **more)
            for e, more in ((model, {"simulator": env}), (env, {}))
        )
        assert (
            np.array_equal(inside.success, real.success)
            and inside.minus(real)[0] == 0
            and real.success_rate > 0
        )
        assert inside.lengths.tolist() == real.lengths.tolist() and inside.tasks == real.tasks
    assert real.doubted is None and not inside.doubted.any()
    with pytest.raises(UserError, match="simulator and judge are for an evaluation in a world model"):
        robo_rl.evaluate(policy, env, simulator=env)
    with pytest.raises(UserError, match="the model's action axes are"):
        robo_rl.evaluate(policy, model, simulator=replaced_axes(env))


def replaced_axes(env):
    other = PointReach(2)
    other.spec = replace(env.spec, axes=env.spec.axes[::-1])
    return other


def test_without_a_simulator_episodes_begin_from_held_out_frames_as_in_the_models_env(data):
    model, seen = begins_as(PointModel(), data), []

    def still(obs):
        seen.append(obs["state"].copy())
        return np.zeros((len(obs["state"]), 2))

    got = robo_rl.evaluate(still, model, episodes=20)
    held = {s.tobytes() for s in data.state[data.from_[:7]]}
    assert {s.tobytes() for s in seen[0]} <= held and set(got.tasks) == {"reach the goal"} and got.n == 20
    model.spec = replace(model.spec, horizon=0)
    with pytest.raises(UserError, match="not calibrated"):
        robo_rl.evaluate(still, model, episodes=2)


def test_a_model_is_measured_to_the_length_of_a_recorded_episode(data, tmp_path):
    tiny = {"net": LatentOptions(members=1, hidden=8, layers=1), "fit": FitOptions(updates=2, batch=8)}
    for horizon, measured in ((0, data.spec.max_steps), (5, 5)):
        out = str(tmp_path / str(horizon))
        config = WorldModelConfig(data=(str(data.meta.root),), out=out, horizon=horizon, **tiny)
        learned = learning.train(config, Progress(io.StringIO()))
        assert learning.saved_config(learned.folder).horizon == measured
        model, unless_told = load_model(learned.folder), replace(ARGS, windows=8, horizon=0, inverse=5)
        steps = min(measured, int((data.to - data.from_).max()))
        assert model.spec.measured == steps == measure(model, data, unless_told)[0]["horizon"]
    with pytest.raises(UserError, match="--horizon must be in"):
        WorldModelConfig(horizon=1)


def test_a_notebook_learns_a_model_loads_it_and_measures_it(data, tmp_path, capsys):
    said = io.StringIO()
    config = WorldModelConfig(
        data=(str(data.meta.root),),
        out=str(tmp_path / "run"),
        horizon=8,
        seed=3,
        net=LatentOptions(members=2, hidden=8, layers=1),
        fit=FitOptions(updates=5, batch=16, unroll=2),
    )
    learned = learning.train(config, Progress(said))
    assert (learned.folder, learned.update, learned.code) == (tmp_path / "run", 5, 0)
    assert "5/5 updates" in said.getvalue() and capsys.readouterr() == ("", "")
    assert learned.spec.horizon == learned.report["horizon"] > 0
    assert learning.saved_config(learned.folder) == replace(config, torch_threads=1)  # what 0 stands for
    model = load_model(learned.folder)
    assert model.spec == learned.spec
    doc, _ = measure(model, data, replace(ARGS, windows=8, horizon=4, inverse=5))
    assert doc["episodes"] == model.frames.held[model.frames.first].sum() and not doc["all_learnt"]
    with pytest.raises(UserError, match="already holds a run"):
        learning.train(config)
    again = learning.train(replace(config, out="", resume=str(learned.folder)), Progress(said))
    assert again.report == learned.report


def test_a_kind_with_cameras_has_options_of_its_own():
    with pytest.raises(UserError, match="VideoConfig, not WorldModelConfig"):
        WorldModelConfig(kind="video")
    assert VideoConfig().kind == "video" and VideoConfig().net.chunk == 8


# ---- two models on the same windows ------------------------------------------------------------------------


def test_two_models_are_compared_window_by_window():
    """Windows differ more from each other than the models do: told apart by pairs, not by their own
    intervals."""
    rng = np.random.default_rng(0)
    hard, seen = np.exp(rng.normal(size=(60, 1))) * np.arange(1, 5), np.ones((60, 4), bool)
    seen[1:, 3] = False  # one window alone reaches the fourth step
    w = SimpleNamespace(seen=seen, episode=np.arange(60))
    mine, theirs = (
        {"state": (hard, None), "image/a": (hard, None)},
        {"state": (hard + 0.1 + 0.01 * rng.normal(size=hard.shape), None)},
    )
    doc = compare_models(mine, theirs, w, "other")
    assert doc["model"] == "other" and list(doc["open_loop"]) == ["state"]
    got = doc["open_loop"]["state"]
    assert set(got["difference"]) == {1, 2} and not any(got["apart"].values())
    assert all(d["low"] < -0.1 < d["high"] < -0.09 for d in got["difference"].values())
    same = compare_models(mine, mine, w, "itself")["open_loop"]["state"]["difference"]
    assert all(d["value"] == d["low"] == d["high"] == 0 for d in same.values())


def test_what_acts_elsewhere_is_sent_to_the_script_that_evaluates_it():
    from robo_rl.experiment.world_model import find_policies

    for name in ("ws://127.0.0.1:9", "lerobot:somewhere"):
        with pytest.raises(UserError, match=f"launch/evaluate_world_model.py MODEL {name}"):
            find_policies((name,))
