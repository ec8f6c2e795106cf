"""Hand-eye calibration against poses that are known, with and without noise."""

import json
import math
import shutil

import numpy as np
import pytest

from controllers.hand_eye import compose, difference, inverse, solve_hand_eye
from controllers.robot import PRESETS, load_robot
from robo_rl.cli import main
from robo_rl.errors import UserError
from robo_rl.experiment.calibrate import CalibrateOptions, calibrate
from robo_rl.geometry import exp

MOUNTED = np.array([0.05, -0.02, 0.08]), exp(np.array([0.3, -2.0, 0.4]))
TARGET = np.array([0.6, 0.1, 0.05]), exp(np.array([0.1, 0.2, 1.0]))


def poses(n, rng, in_hand=True, mm=0.0, degrees=0.0, turn=0.6):
    """(tool, target) of n poses within 0.2 m and about `turn` rad, what the camera saw with errors of this
    standard deviation."""
    tool = (
        np.array([0.5, 0, 0.4]) + rng.uniform(-0.2, 0.2, (n, 3)),
        exp(rng.normal(0, turn, (n, 3)) + np.array([math.pi, 0, 0])),
    )
    moved = tool if in_hand else inverse(tool)
    x, y = (tuple(np.broadcast_to(p, (n, len(p))) for p in pose) for pose in (MOUNTED, TARGET))
    seen = compose(inverse(compose(moved, x)), y)
    noise = rng.normal(0, mm / 1000, (n, 3)), exp(rng.normal(0, math.radians(degrees), (n, 3)))
    return tool, compose(seen, noise)


@pytest.mark.parametrize("in_hand", [True, False])
def test_poses_without_noise_give_the_camera_exactly(in_hand):
    got = solve_hand_eye(*poses(6, np.random.default_rng(0), in_hand), in_hand)
    assert max(difference(got, *MOUNTED)) < 1e-6


@pytest.mark.parametrize("in_hand", [True, False])
def test_with_noise_the_error_is_small_and_the_stated_bound_holds(in_hand):
    rng, errors, bounds = np.random.default_rng(1), [], []
    for _ in range(12):
        got = solve_hand_eye(*poses(15, rng, in_hand, mm=1.0, degrees=0.3), in_hand)
        errors.append(difference(got, *MOUNTED))
        bounds.append((got.pos_bound, got.angle_bound))
    errors, bounds = np.array(errors), np.array(bounds)
    assert np.median(errors[:, 0]) < 0.0025 and np.median(errors[:, 1]) < math.radians(0.3)
    # 95 % are stated; 12 trials
    assert (errors < bounds).mean(0).min() >= 0.75 and np.median(bounds[:, 0]) < 0.006


def test_refining_on_all_poses_is_better_than_the_closed_form():
    from controllers.hand_eye import closed_form

    rng, better = np.random.default_rng(2), 0
    for _ in range(6):
        tool, target = poses(12, rng, mm=3.0, degrees=0.5)
        rough, fine = closed_form(tool, target), solve_hand_eye(tool, target)
        better += difference(fine, *MOUNTED)[0] < np.linalg.norm(rough[0] - MOUNTED[0])
    assert better >= 4


def test_poses_that_cannot_tell_are_refused():
    rng = np.random.default_rng(3)
    with pytest.raises(UserError, match="at least 4 poses"):
        solve_hand_eye(*poses(3, rng))
    tool, _ = poses(8, rng)
    turned = tool[0], exp(np.outer(rng.normal(0, 0.6, 8), [0, 0, 1.0]))
    seen = compose(
        inverse(compose(turned, tuple(np.broadcast_to(p, (8, len(p))) for p in MOUNTED))),
        tuple(np.broadcast_to(p, (8, len(p))) for p in TARGET),
    )
    with pytest.raises(UserError, match="about one axis alone"):
        solve_hand_eye(turned, seen)


def write(folder, tool, target):
    rows = [
        {"tool": [*a, *b], "target": [*c, *d]}
        for a, b, c, d in zip(*(x.tolist() for x in (*tool, *target)), strict=True)
    ]
    (folder / "poses.json").write_text(json.dumps({"poses": rows}))
    shutil.copy(PRESETS / "fr3.json", folder / "arm.json")
    return str(folder / "arm.json"), str(folder / "poses.json")


@pytest.mark.parametrize("mount", ["hand", "base"])
def test_the_command_writes_the_camera_into_the_robots_file(tmp_path, capsys, mount):
    arm, found = write(tmp_path, *poses(15, np.random.default_rng(4), mount == "hand", 0.5, 0.1))
    with pytest.raises(SystemExit) as end:
        main(["robot", "calibrate", arm, "--poses", found, "--camera", "wrist", "--mount", mount])
    assert end.value.code == 0 and "95 %" in capsys.readouterr().out
    robot = load_robot(arm)
    camera = robot.cell.cameras["wrist"]
    assert camera.frame == (robot.site if mount == "hand" else robot.base_frame)
    assert np.linalg.norm(np.array(camera.pos) - MOUNTED[0]) < 0.003


def test_a_calibration_that_is_not_good_enough_or_a_file_that_is_wrong_changes_nothing(tmp_path):
    arm, found = write(tmp_path, *poses(6, np.random.default_rng(5), mm=20, degrees=5))
    before = (tmp_path / "arm.json").read_text()
    with pytest.raises(UserError, match="which is not enough"):
        calibrate(CalibrateOptions(file=arm, poses=found))
    (tmp_path / "poses.json").write_text(
        '{"poses": [{"tool": [0, 0, 0, 1, 0, 0, 0], "target": [0, 0, 0, 2, 0, 0, 0]}]}'
    )
    with pytest.raises(UserError, match="pose 0: target: the quaternion"):
        calibrate(CalibrateOptions(file=arm, poses=found))
    with pytest.raises(UserError, match="is a preset"):
        calibrate(CalibrateOptions(file="fr3", poses=found))
    assert (tmp_path / "arm.json").read_text() == before
