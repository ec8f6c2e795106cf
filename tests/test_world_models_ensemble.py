"""MBPO's ensemble, which world models are held against, and the script that compares them."""

import numpy as np
import pytest
import torch
from commands import launch_script
from test_world_models_report import linear, windows_of

from world_models import baselines, mbpo
from world_models.options import FitOptions


def learnt(t, updates=250, seed=0):
    held = t.episode % 5 == 4
    u = baselines.units_of(t.of(~held))
    model = mbpo.Mbpo(t.state.shape[1], t.action.shape[1], 24, u, seed)
    y = (t.after - t.state) / u.moved
    options = FitOptions(updates=updates, batch=64, lr=3e-3, ema=0.97)
    return mbpo.learn(model, u.features(t.state, t.before, t.action), y, held, options, seed)


def test_the_loss_is_the_negative_log_likelihood_beside_the_bounds():
    t = linear(4)
    model = mbpo.Mbpo(3, 2, 8, baselines.units_of(t))
    x, y = torch.randn(7, 5, 8), torch.randn(7, 5, 3)
    mean, log_var = model(x)
    normal = torch.distributions.Normal(mean, (0.5 * log_var).exp())
    want = (-2 * normal.log_prob(y) - np.log(2 * np.pi)).mean((1, 2)).sum() + 0.01 * (
        model.most - model.least
    ).sum()
    assert model.loss(x, y).item() == pytest.approx(want.item(), rel=1e-4)
    assert (log_var < model.most).all() and (log_var > model.least).all()


def test_it_learns_a_linear_world_and_a_rollout_is_that_of_the_elites_mean():
    t = linear(60)
    model = learnt(t)
    w = windows_of(linear(20, seed=1), range(20), 8)
    start, before = w.start["state"], w.start["before"]
    states = baselines.roll(model.step, start, before, w.actions, model.u.low, model.u.high)
    still, spread = np.abs(start[:, None] - w.state).mean(), np.abs(states - w.state).mean()
    assert spread < 0.4 * still
    mean, _ = model(model.inputs(start, before, w.actions[:, 0]))
    by_hand = start + mean[model.elites].mean(0).detach().numpy() * model.u.moved
    assert model.step(start, before, w.actions[:, 0]) == pytest.approx(by_hand)
    one, two = (
        model.sampled(start, before, w.actions[:, 0], torch.Generator().manual_seed(s)) for s in (0, 1)
    )
    assert not np.array_equal(one, two) and np.abs(one - by_hand).mean() < still


def test_the_elites_are_those_with_the_least_error_on_held_out_episodes():
    t = linear(30)
    model = learnt(t, updates=20)
    rows = t.episode % 5 == 4
    with torch.no_grad():
        mean, _ = model(model.inputs(t.state[rows], t.before[rows], t.action[rows]))
    y = torch.from_numpy(((t.after - t.state) / model.u.moved)[rows])
    error = (mean - y).square().mean((1, 2))
    worst = sorted(set(range(mbpo.MEMBERS)) - set(model.elites.tolist()))
    assert len(worst) == 2 and error[worst].min() >= error[model.elites].max()


def test_its_size_is_that_of_the_model_it_is_held_against():
    width = mbpo.width_of_size(300_000, 20, 7)
    model = mbpo.Mbpo(20, 7, width, baselines.units_of(linear(4)))
    assert sum(p.numel() for p in model.net.parameters()) == pytest.approx(300_000, rel=0.02)


@pytest.mark.slow
def test_the_script_compares_models_of_a_task_and_keeps_what_it_found(tmp_path, capsys):
    keep = tmp_path / "found.jsonl"
    given = [
        "--tasks",
        "reach",
        "--seeds",
        "1",
        "--episodes",
        "40",
        "--new",
        "20",
        "--windows",
        "40",
        "--updates",
        "6",
        "--hidden",
        "16",
        "--keep",
        str(keep),
    ]
    main = launch_script("compare_world_models").main
    main(given)
    first = capsys.readouterr().out
    assert (
        "less the error of MBPO's ensemble" in first
        and "steps trusted" in first
        and "the gate that comes with the model" in first
    )
    kept = keep.read_text()
    main(given)
    assert capsys.readouterr().out == first and keep.read_text() == kept, "what is kept is not run again"
