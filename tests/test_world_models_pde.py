"""PDE-Refiner on Kuramoto-Sivashinsky: the equation, the refinement where the truth is known, and the
script."""

import numpy as np
import pytest
import torch
from commands import launch_script

from world_models import pde


def test_solutions_keep_their_mean_stay_bounded_and_are_decided_by_the_seed():
    u = pde.solve(3, 2, 0.8, points=32, settle=40)
    assert (
        u.shape == (3, 2, 32)
        and np.isfinite(u).all()
        and 0.5 < u.std() < 2.5
        and np.abs(u.mean(-1)).max() < 1e-5
    )
    assert np.array_equal(u, pde.solve(3, 2, 0.8, points=32, settle=40))
    assert not np.array_equal(u, pde.solve(3, 2, 0.8, points=32, settle=40, seed=1))


def test_a_solution_satisfies_the_equation():
    u = pde.solve(4, 3, 0.02, points=64, inner=0.01, settle=10).astype(np.float64)
    k = 2 * np.pi / 32 * np.fft.rfftfreq(64, 1 / 64)
    rate = np.fft.rfft(u[:, 2] - u[:, 0])[:, :22] / 0.04  # waves that the products' aliases do not reach
    right = ((k**2 - k**4) * np.fft.rfft(u[:, 1]) - 0.5j * k * np.fft.rfft(u[:, 1] ** 2))[:, :22]
    assert np.abs(rate - right).max() < 1e-3 * np.abs(right).max()


class Exact:
    """Knows the change `y`: the noise of every level, and at level 0 the change off by `error`."""

    def __init__(self, y, levels, error):
        self.y, self.levels, self.error = y, torch.tensor([0.0, *levels]), error

    def __call__(self, shown, u, k):
        s = self.levels[k][:, None]
        return torch.where(k[:, None] == 0, self.y + self.error, (shown - self.y) / s.clamp(min=1e-9))


def test_a_network_that_knows_the_noise_has_no_loss_and_refines_to_the_truth():
    levels, generator = pde.sigmas(3, 1e-3), torch.Generator().manual_seed(0)
    assert levels == pytest.approx([0.1, 0.01, 0.001])
    u, y = torch.randn(8, 16), torch.randn(8, 16)
    assert pde.refiner_loss(Exact(y, levels, 0.0), u, y, levels, generator) < 1e-5
    net = Exact(y, levels, 0.3)
    assert (pde.predict(net, u, [], generator) - y).abs().max() == pytest.approx(0.3, rel=1e-3)
    assert (pde.predict(net, u, levels, generator) - y).abs().max() < 1e-4


def test_without_levels_the_loss_is_the_plain_regression():
    u, y, net = torch.randn(8, 16), torch.randn(8, 16), pde.UNet(8, 0)
    loss = pde.refiner_loss(net, u, y, [], torch.Generator().manual_seed(0))
    assert loss.item() == pytest.approx(
        (net(torch.zeros_like(u), u, torch.zeros(8, dtype=torch.int64)) - y).square().mean().item()
    )


def test_the_network_moves_with_its_input_on_the_circle():
    net, u, k = pde.UNet(8, 2, 1), torch.randn(2, 32), torch.ones(2, dtype=torch.int64)
    for layer in (net.leave, *(b.two for b in net.blocks)):
        torch.nn.init.normal_(layer.weight, std=0.1)
    moved = net(torch.zeros_like(u).roll(4, 1), u.roll(4, 1), k)
    assert torch.allclose(moved, net(torch.zeros_like(u), u, k).roll(4, 1), atol=1e-5)
    other = net(torch.zeros_like(u), u, k + 1)
    assert not torch.allclose(other, net(torch.zeros_like(u), u, k)), "it is told the level"


def test_the_time_of_correlation_and_the_error_by_wave_by_hand():
    x = np.arange(16) / 16 * 2 * np.pi
    true = np.stack([[np.sin(x)] * 3, [np.sin(x)] * 3])
    predicted = true.copy()
    predicted[1, 1:] = np.cos(x)
    assert pde.correlated_time(predicted, true, 0.5).tolist() == [1.5, 0.5]
    mixed = np.sin(x) + 0.1 * np.sin(3 * x)
    shares = pde.error_by_wave(np.stack([np.sin(x)]), np.stack([mixed]))
    assert shares[1] == pytest.approx(0, abs=1e-9) and shares[3] == pytest.approx(1)


def test_it_learns_and_the_script_tells_the_times_and_keeps_them(tmp_path, capsys):
    keep = tmp_path / "found.jsonl"
    given = [
        "--seeds",
        "1",
        "--updates",
        "8",
        "--width",
        "8",
        "--taught",
        "4",
        "--test",
        "2",
        "--steps",
        "6",
        "--settle",
        "5",
        "--keep",
        str(keep),
    ]
    main = launch_script("compare_refiner").main
    main(given)
    first = capsys.readouterr().out
    assert (
        first.count("time to correlation 0.8") == 3 and "refiner less a U-Net of equal cost a step" in first
    )
    kept = keep.read_text()
    main(given)
    assert capsys.readouterr().out == first and keep.read_text() == kept
    assert [line.count('"width": 16') for line in kept.splitlines()] == [0, 0, 1], (
        "twice as wide at three refinements"
    )
