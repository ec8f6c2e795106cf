"""Changed observations of supervision, and key points that point at something from the start."""

import numpy as np
import pytest
import torch

from robo_rl.algos.augment import augmented, forgotten, recoloured, shifted
from robo_rl.cli import main
from robo_rl.colours import COLOURS, colour_points, uncorrelated
from robo_rl.options import PolicyOptions
from robo_rl.policies.nets import ImageEncoder, StandardPoints


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_picture_is_moved_by_whole_pixels_and_its_border_repeated():
    images = torch.randint(0, 256, (64, 12, 12, 3), dtype=torch.uint8, generator=gen())
    moved = shifted(images, 2, gen(1))
    assert moved.dtype == torch.uint8
    seen = set()
    for before, after in zip(images, moved, strict=True):
        framed = torch.nn.functional.pad(before.permute(2, 0, 1).float(), (2, 2, 2, 2), mode="replicate")
        framed = framed.permute(1, 2, 0).to(torch.uint8)
        found = [
            (y, x) for y in range(5) for x in range(5) if torch.equal(framed[y : y + 12, x : x + 12], after)
        ]
        assert len(found) == 1
        seen |= set(found)
    assert len(seen) > 15  # of 25 moves


def test_colours_change_within_their_share_and_keep_their_type():
    images = torch.randint(60, 180, (200, 4, 4, 3), dtype=torch.uint8, generator=gen())
    assert torch.equal(recoloured(images, 0.0, gen()), images)
    changed = recoloured(images, 0.2, gen(1))
    assert changed.dtype == torch.uint8
    factor = changed.float().mean((1, 2, 3)) / images.float().mean(
        (1, 2, 3)
    )  # brightness alone moves the mean
    assert 0.79 < float(factor.min()) < 0.83 and 1.17 < float(factor.max()) < 1.21


def test_a_share_of_the_states_is_not_told():
    state = torch.randn(4000, 3, generator=gen())
    told = forgotten(state, 0.3, gen(1))
    gone = (told == state.mean(0)).all(1)
    assert 0.27 < float(gone.float().mean()) < 0.33
    assert torch.equal(told[~gone], state[~gone])


def test_the_sampler_changes_pictures_and_states_and_nothing_that_is_told_of_actions():
    obs = {
        "state": torch.randn(8, 3, generator=gen()),
        "image/front": torch.randint(0, 256, (8, 16, 16, 3), dtype=torch.uint8, generator=gen()),
        "tokens": torch.ones(8, 2, dtype=torch.int64),
    }
    chunk, mask = torch.randn(8, 4, 2, generator=gen()), torch.ones(8, 4)

    def sample(size, generator):
        return obs, chunk, mask

    assert augmented(sample, 0, 0, 0) is sample
    first, again, next_ = (augmented(sample, 0.25, 0.3, 0.5)(8, g) for g in (gen(3), gen(3), gen(4)))
    assert all(torch.equal(first[0][k], again[0][k]) for k in obs)
    for other in (first[0], next_[0]):
        assert not torch.equal(other["image/front"], obs["image/front"])
        assert other["tokens"] is obs["tokens"]
    assert not torch.equal(first[0]["image/front"], next_[0]["image/front"])
    assert first[1] is chunk and first[2] is mask


def key_points(kind, column):
    """[2 x points] of a picture with a green mark in this column, from fresh weights."""
    torch.manual_seed(0)
    encoder = ImageEncoder(96, 64, kind)
    image = torch.full((1, 64, 64, 3), 128, dtype=torch.uint8)
    image[:, 30:34, column : column + 4] = torch.tensor([20, 220, 60], dtype=torch.uint8)
    with torch.no_grad():
        return encoder(image, torch.zeros(1, 96))[1][0]


def test_standard_key_points_of_fresh_weights_follow_a_mark():
    moved = {kind: (key_points(kind, 44) - key_points(kind, 10))[::2].abs() for kind in ("plain", "standard")}
    true = 2 * 34 / 63  # of the mark, in -1 .. 1
    assert float(moved["plain"].max()) < 0.2 * true
    assert float((moved["standard"] > 0.5 * true).float().mean()) > 0.25


def test_a_policy_of_before_key_points_had_kinds_keeps_its_sixteen():
    assert PolicyOptions().keypoints == "plain"
    assert key_points("plain", 10).shape == (32,) and key_points("standard", 10).shape == (64,)


@pytest.mark.parametrize("option", ["shift", "colour", "forget"])
def test_a_change_of_pictures_is_refused_where_there_are_none(tmp_path, option, capsys):
    with pytest.raises(SystemExit) as e:
        main(
            [
                "train",
                "--task",
                "reach",
                f"--bc.{option}",
                "0.1",
                "--workers",
                "0",
                "--out",
                str(tmp_path / "r"),
            ]
        )
    assert e.value.code == 2 and not (tmp_path / "r").exists()
    assert f"--bc.{option} changes what supervision sees" in capsys.readouterr().err


def coloured(at, background=(120, 110, 100), colour=(30, 60, 220)):
    """A picture [1,3,64,64] of -1..1: a square of 5 x 5 pixels whose corner is at (row, column)."""
    picture = np.full((64, 64, 3), background, np.float32)
    picture += np.random.default_rng(0).normal(size=picture.shape) * 2
    picture[at[0] : at[0] + 5, at[1] : at[1] + 5] = colour
    return torch.from_numpy(picture).permute(2, 0, 1)[None] / 127.5 - 1


def test_a_point_follows_the_thing_of_its_colour_though_nothing_was_learnt():
    places = [(10, 12), (10, 40), (45, 12), (30, 33)]
    points = torch.cat([colour_points(coloured(at)) for at in places]).unflatten(1, (COLOURS, 2))
    truth = torch.tensor([[(c + 2) / 31.5 - 1, (r + 2) / 31.5 - 1] for r, c in places])
    off = (points - truth[:, None]).abs().amax((0, 2))
    assert off.min() < 0.02, off  # of a half width: less than a pixel


def test_points_of_colours_do_not_move_with_brightness_and_contrast():
    picture = coloured((20, 30))
    gain, offset = (
        torch.tensor([0.5, 0.8, 1.1])[:, None, None],
        torch.tensor([0.1, -0.2, 0.05])[:, None, None],
    )
    assert (colour_points(picture) - colour_points(picture * gain + offset)).abs().max() < 0.02


def test_a_picture_of_one_colour_has_its_points_in_the_middle():
    assert colour_points(torch.full((2, 3, 32, 32), 0.3)).abs().max() < 1e-3


def test_white_pictures_have_uncorrelated_pixels_and_fresh_weights_point_at_small_things():
    q = uncorrelated(coloured((20, 30)).flatten(2).transpose(1, 2))
    assert q.mean(1).abs().max() < 1e-4 and (q.transpose(1, 2) @ q / 4096 - torch.eye(3)).abs().max() < 0.03
    torch.manual_seed(0)
    rng, told = np.random.default_rng(0), {}
    arms, places = rng.integers(0, 40, (120, 2)), rng.integers(2, 56, (120, 2))
    images = torch.full((120, 64, 64, 3), 110.0) + torch.randn(120, 64, 64, 3)
    for image, (i, j), (r, c) in zip(images, arms, places, strict=True):
        image[i : i + 24, j : j + 12], image[i : i + 12, j + 12 : j + 24] = 230, 20  # large, bright and dark
        image[r : r + 5, c : c + 5] = torch.tensor([30.0, 60.0, 220.0])
    for kind in ("standard", "white"):
        torch.manual_seed(0)
        with torch.no_grad():
            points = ImageEncoder(96, 64, kind)(images.byte(), torch.zeros(120, 96))[1].numpy()
        x = np.concatenate([points, np.ones((120, 1))], 1)
        w = np.linalg.solve(x[:90].T @ x[:90] + 0.1 * np.eye(65), x[:90].T @ places[:90])
        told[kind] = np.abs(x[90:] @ w - places[90:]).mean()
    assert told["white"] < 0.5 * told["standard"] and told["white"] < 0.5, told  # pixels


def test_the_gradient_of_standard_points_is_that_of_their_formula():
    torch.manual_seed(0)
    maps, grid, g = torch.randn(3, 5, 64).double(), torch.rand(64, 2).double(), torch.randn(3, 5, 2).double()
    maps.requires_grad_()
    std, mean = torch.std_mean(maps, -1, keepdim=True)
    plain = torch.softmax(4 * (maps - mean) / (std + 1e-3), -1) @ grid
    closed = StandardPoints.apply(maps, grid)
    assert torch.allclose(plain, closed, atol=1e-14)
    a, b = (torch.autograd.grad((p * g).sum(), maps)[0] for p in (plain, closed))
    assert (a - b).abs().max() < 1e-13
    flat = torch.zeros(1, 1, 64, requires_grad=True)
    StandardPoints.apply(flat, grid.float()).sum().backward()
    assert flat.grad is not None and flat.grad.isfinite().all()
