"""Changed observations of supervision, and key points that point at something from the start."""

import pytest
import torch

from robo_rl.algos.augment import augmented, forgotten, recoloured, shifted
from robo_rl.cli import main
from robo_rl.options import PolicyOptions
from robo_rl.policies.nets import ImageEncoder


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
    encoder = ImageEncoder(96, 64, kind == "standard")
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
