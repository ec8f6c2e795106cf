"""When to trust a rollout: the learnt gate where the truth is known, in a model, in its folder, and in the
trust report."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_world_models import LIMIT, latent, record
from test_world_models_report import linear, windows_of
from toys import PointReach

from robo_rl.cli.wm_eval import gate_lines
from robo_rl.errors import UserError
from robo_rl.report.world_model import gate_section
from sims.check import check_env
from world_models import calibrate, gate_fit, gate_report
from world_models import model as worlds
from world_models.env import WorldEnv
from world_models.gate import ErrorLaw, Gate, before_steps, nearest
from world_models.learning import calibrated
from world_models.options import VideoConfig
from world_models.trust import state_error


@pytest.fixture(scope="module")
def data():
    return record(PointReach(20, LIMIT), 160)


def quantities(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.exp(np.random.default_rng(seed).normal(0, 1, (n, 5)))).float()


def test_the_law_finds_an_error_that_is_a_product_of_powers():
    q = quantities(400)
    error = 0.3 * q[:, 0] ** 0.5 * q[:, 2] ** 1.5
    law, new = ErrorLaw().fit(q, error), quantities(200, 1)
    inside = (new.log().abs() < 2).all(1)
    assert (law(new) / (0.3 * new[:, 0] ** 0.5 * new[:, 2] ** 1.5)).log().abs()[inside].max() < 0.1


def test_the_distance_is_to_the_nearest_row_and_few_rows_are_kept_more_than_once():
    memory = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    x = torch.tensor([[0.0, 2.0], [3.0, 5.0]])
    assert nearest(x, memory).tolist() == pytest.approx([2 / 2**0.5, 1 / 2**0.5])
    gate = Gate(2).remember(memory, 0)
    assert gate.distance(x).tolist() == pytest.approx([2 / 2**0.5, 1 / 2**0.5])


def test_each_step_of_a_rollout_begins_where_the_last_one_led():
    s, b = before_steps(np.array([[1.0]]), np.array([[0.0]]), np.array([[[2.0], [3.0], [4.0]]]))
    assert s[0, :, 0].tolist() == [1, 2, 3] and b[0, :, 0].tolist() == [0, 1, 2]


def far_and_near(episodes=80, steps=16, seed=0):
    """A world recorded near 0 alone; windows from near and from afar, where a model is right near 0 and wrong
    far away, and its uncertainty says nothing of it."""
    rng = np.random.default_rng(seed)
    t = linear(episodes, steps + 6, seed)
    w = windows_of(t, range(episodes), steps)
    away = rng.random(episodes) < 0.5
    w.start = {k: np.where(away[:, None], 5.0, v).astype(np.float32) for k, v in w.start.items()}
    predicted = np.where(away[:, None, None], 5.0, w.state).astype(np.float32)
    w.state = predicted + np.where(away, 2.0, 0.05)[:, None, None] * rng.standard_normal(predicted.shape)
    w.seen = np.ones((episodes, steps), bool)
    u = np.cumsum(rng.random((episodes, steps)), 1)
    return t, w, predicted, u, state_error(predicted, w.state, np.ones(3))


def test_a_gate_knows_by_the_distance_to_memory_what_the_uncertainty_does_not_tell():
    t, w, predicted, u, error = far_and_near()
    found = gate_report.compare(w, predicted, u, error, None, t)
    assert found["gate"]["auroc"] > 0.95 and abs(found["threshold"]["auroc"] - 0.5) < 0.15
    assert found["more"]["low"] > 0.2 and found["gate"]["off"] < 0.15 and found["memory"] is None
    assert "AUROC" in gate_lines(found)[0] and "learnt gate" in gate_section(found)


def test_where_the_uncertainty_is_the_error_the_gate_trusts_what_the_threshold_trusts():
    t, w, predicted, _, error = far_and_near()
    error = np.maximum.accumulate(error, 1)
    found = gate_report.compare(w, predicted, error, error, None, t)
    assert found["threshold"]["auroc"] == 1 and found["gate"]["auroc"] > 0.99
    assert abs(found["more"]["value"]) < 0.05


def test_the_gate_chooses_memory_where_memory_errs_less():
    t, w, predicted, u, error = far_and_near()
    memory = np.where(error > 0.5, 0.1, 1.0) + 0 * error
    found = gate_report.compare(w, predicted, u, error, memory, t)["memory"]
    for h in (1, 8, 16):
        assert found["chosen"][h]["value"] < 0.5 * min(
            found["model"][h]["value"], found["memory"][h]["value"]
        )
        assert found["less"][h]["high"] < 0 and 0.2 < found["share"][h] < 0.8


def test_from_too_few_episodes_no_rule_is_made():
    t, w, predicted, u, error = far_and_near()
    assert (
        gate_report.compare(replace_windows(w, np.arange(80) < 9), predicted[:9], u[:9], error[:9], None, t)
        is None
    )


def replace_windows(w, rows):
    out = type("W", (), {})()
    out.start = {k: v[rows] for k, v in w.start.items()}
    for name in ("actions", "state", "seen", "episode"):
        setattr(out, name, getattr(w, name)[rows])
    return out


# ---- in a model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gated(data):
    model = latent(data)
    model.fit(
        torch.from_numpy(data.state),
        torch.from_numpy(np.nan_to_num(data.after - data.state)),
        torch.from_numpy(data.reward),
        torch.zeros(len(data.state), 2),
    )
    return calibrated(model, data, LIMIT - 1, 0.75, gate=True)[0]


def test_the_uncertainty_of_a_model_with_a_gate_is_the_error_expected_and_does_not_shrink(gated):
    obs, keys = {"state": gated.frames.obs["state"][:6]}, np.arange(6)
    actions = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (6, 5, 2)).astype(np.float32))
    plain = copy.deepcopy(gated)
    plain.gate = None
    with torch.no_grad():
        _, p = gated.step(gated.start(obs, keys), actions)
        _, q = plain.step(plain.start(obs, keys), actions)
    assert torch.equal(p.obs["state"], q.obs["state"]) and not torch.equal(p.uncertainty, q.uncertainty)
    s, b = before_steps(obs["state"], obs["state"], q.obs["state"].numpy())
    inputs = gated.inputs(torch.from_numpy(s), torch.from_numpy(b), actions)
    expected = gated.gate.law(gated.gate.along(inputs, q.uncertainty)).numpy()
    assert p.uncertainty.numpy() == pytest.approx(np.maximum.accumulate(expected, 1), rel=1e-4)


def test_steps_one_by_one_are_a_chunk_and_the_contract_holds(gated):
    obs, keys = {"state": gated.frames.obs["state"][:4]}, np.arange(4)
    actions = torch.full((4, 6, 2), 0.5)
    _, whole = gated.step(gated.start(obs, keys), actions)
    carry, parts = gated.start(obs, keys), []
    for a in actions.split(2, 1):
        carry, p = gated.step(carry, a)
        parts.append(p.uncertainty)
    assert torch.allclose(torch.cat(parts, 1), whole.uncertainty)
    open_gate = copy.deepcopy(gated)
    open_gate.spec = open_gate.spec.calibrated(LIMIT, 1e6)
    check_env(lambda n: WorldEnv(open_gate, n))


def test_a_model_with_a_gate_survives_its_folder(gated, tmp_path):
    worlds.save(gated, tmp_path / "m")
    again = worlds.load(tmp_path / "m")
    obs, actions = {"state": gated.frames.obs["state"][:4]}, torch.full((4, 5, 2), 0.5)
    one, two = (m.step(m.start(obs, np.arange(4)), actions)[1].uncertainty for m in (gated, again))
    assert torch.equal(one, two) and again.spec.gate and again.spec.threshold == gated.spec.threshold


def test_no_gate_is_calibrated_on_episodes_that_it_learnt_from(data, gated):
    halves = np.flatnonzero(data.held)[::2], np.flatnonzero(data.held)[1::2]
    plain = copy.deepcopy(gated)
    plain.gate = None
    two = [(gate_fit.gated(plain, data, mine, LIMIT - 1), other) for mine, other in (halves, halves[::-1])]
    run = calibrate.joined([calibrate.open_loop(m, data, LIMIT - 1, 200, episodes=e) for m, e in two])
    bounds = calibrate.factors_of([calibrate.scores_on(m, data, LIMIT - 1, e) for m, e in two])
    assert gated.spec.threshold == calibrate.calibrate(run)[1] and gated.spec.bounds[:5] == bounds[:5]
    assert not torch.equal(two[0][0].gate.law.weight, two[1][0].gate.law.weight)
    whole = gate_fit.gated(plain, data, np.flatnonzero(data.held), LIMIT - 1)
    assert torch.equal(whole.gate.law.weight, gated.gate.law.weight) and torch.equal(
        whole.gate.memory, gated.gate.memory
    )


def test_a_gate_is_refused_where_it_cannot_be_learnt(data):
    few = replace(
        data, **{k: getattr(data, k)[:30] for k in ("first", "end", "success", "terminated", "task", "final")}
    )
    few = replace(few, **{k: getattr(data, k)[: few.end[-1]] for k in ("state", "action", "reward")})
    with pytest.raises(UserError, match="record at least 40, got 30"):
        calibrated(latent(few), few, 8, 0.75, gate=True)
    with pytest.raises(UserError, match="--gate goes with --kind latent, got --kind video"):
        VideoConfig(gate=True)
