"""A person drives a governed arm: in lockstep in this process, and over DDS."""

import json
import os
import signal

import numpy as np
import pytest
from commands import Command, robo_rl
from streams import NORTH, SOUTH, START, TR, WEST, Feed, key, padded, press, stick
from ur_like import JOINTS, xml

from robo_rl.data.labels import need_units
from robo_rl.data.reader import load
from robo_rl.errors import UserError
from robo_rl.experiment.teleop import TeleopOptions, cut_square, teleop

GO = [b"", b"", key(TR) + stick(1, -1), *[b""] * 24]
STAND = [key(TR, 0) + stick(1, 0), *[b""] * 12]


def own_arm(folder):
    """The file of an arm with a UR5e's joints, by those fields alone that a file must have, and a cell that may be armed."""
    (folder / "arm.xml").write_text(xml())
    raw = {"model": "arm.xml", "joints": JOINTS, "site": "tool0", "base_frame": "base", "gravity": True, "lower": [-6.2] * 6,
           "upper": [6.2] * 6, "velocity": [3.1] * 6, "torque": [150, 150, 150, 28, 28, 28], "torque_rate": 500,
           "home": [0.3, -1.2, 1.8, -0.6, 1.2, 0.2], "cell": {"without": dict.fromkeys(("box", "speed", "force"), "a simulated arm")}}
    (folder / "own.json").write_text(json.dumps(raw))
    return str(folder / "own.json")


def drive(tmp_path, steps, file="sim", **more):
    feed = Feed(tmp_path / "pad", steps)
    lines = []
    try:
        return teleop(TeleopOptions(file=file, operator=f"gamepad:{feed.path}", transport="inprocess", out=str(tmp_path / "data"),
                                    seconds=5, **more), lines.append, lines.append)
    finally:
        feed.close()


def column(data, name):
    return data.state[:, data.features.state.index(name)]


def test_full_deflection_is_the_speed_limit_and_what_was_driven_is_recorded(tmp_path):
    got = drive(tmp_path, [*GO, *STAND, press(NORTH), press(START)], speed=0.2, task="go on")
    assert (got.kept, got.tried, got.held) == (1, 1, False)
    data = load(tmp_path / "data")
    x = column(data, "ee_x")
    assert len(x) == 25 and data.success.all() and set(data.episode(0).source) == {"human"} and data.tasks == ["go on"]
    assert 0.5 < (x[-1] - x[-6]) / (5 * 0.02) / 0.2 <= 1.05  # near the end the tool has that speed
    assert np.allclose(data.action[:, 0] * 0.02, 0.2 * 0.02, rtol=1e-3) and not data.action[:, 1:6].any()


def test_a_tool_that_was_let_go_of_stands_within_a_stopping_distance(tmp_path):
    again = [key(TR), b"", key(TR, 0), press(NORTH), press(START)]  # two frames later tell where the tool stands
    drive(tmp_path, [*GO, *STAND, *again], speed=0.2)
    x = column(load(tmp_path / "data"), "ee_x")
    assert 0 <= x[25] - x[24] < 0.03


def test_failures_are_recorded_if_asked_and_the_gripper_closes(tmp_path):
    got = drive(tmp_path, [b"", key(TR), press(SOUTH), b"", b"", press(WEST), press(START)], keep="all")
    assert (got.kept, got.tried) == (1, 1)
    data = load(tmp_path / "data")
    assert not data.success.any() and data.action[:, 6].tolist()[:3] == [1, -1, -1]


def test_an_arm_of_its_own_joints_without_a_gripper_is_recorded_as_it_is(tmp_path):
    """Its own joints and moves of the tool in m and rad: what `train --sim none` learns from and `deploy` commands."""
    got = drive(tmp_path, [*GO, *STAND, press(NORTH), press(START)], speed=0.2, file=own_arm(tmp_path), gripper=False)
    assert (got.kept, got.held) == (1, False)
    data = load(tmp_path / "data")
    assert data.features.state == (*JOINTS, "x", "y", "z") and data.features.action == ("dx", "dy", "dz", "rx", "ry", "rz")
    units = need_units(data.meta)
    assert units.unit == ("m",) * 3 + ("rad",) * 3 and set(units.kind) == {"delta"}
    x = column(data, "x")
    assert 0.5 < (x[-1] - x[-6]) / (5 * 0.02) / 0.2 <= 1.05
    assert np.allclose(data.action[:, 0], 0.2 * 0.02, rtol=1e-3) and not data.action[:, 1:].any()


def test_a_picture_is_cut_to_its_middle():
    image = np.zeros((20, 40, 3), np.uint8)
    image[:, 10:30] = 200
    assert cut_square(image, 10).shape == (10, 10, 3) and (cut_square(image, 10) == 200).all()


def test_a_device_that_is_lost_brakes_the_arm_and_ends_in_one_line(tmp_path):
    (tmp_path / "pad").write_bytes(padded(GO))  # and then the file ends
    with pytest.raises(UserError, match="the device is gone; the arm was braked and holds"):
        teleop(TeleopOptions(file="sim", operator=f"gamepad:{tmp_path / 'pad'}", transport="inprocess"), print, print)


@pytest.mark.parametrize("more, words", [({"operator": "console"}, "not for robot teleop"), ({"operator": "mouse"}, "Allowed"),
                                         ({"speed": 0}, "--speed must be in"), ({"transport": "tcp"}, "inprocess")])
def test_what_cannot_be_is_one_line(more, words):
    with pytest.raises(UserError, match=words):
        TeleopOptions(file="sim", **more)


@pytest.mark.slow
def test_an_arm_on_the_wire_is_driven_with_the_lease_and_the_governor_in_between(tmp_path):
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    domain = 103 + (os.getpid() + 17) % 100
    arm = Command(tmp_path, ["sim-arm", "--domain", domain, "--seconds", "120", "--speed", "0.5"])
    arm.until(lambda: arm.out.exists() and "on the wire" in arm.out.read_text())
    feed = Feed(tmp_path / "pad", [*GO, *STAND, press(NORTH), press(START)])
    done = robo_rl(tmp_path, "robot", "teleop", "sim", "--operator", f"gamepad:{feed.path}", "--domain", domain, "--speed", "0.2",
                   "--out", "data", "--seconds", "20", "--lease", "30")
    feed.close()
    feed = Feed(tmp_path / "second", [*GO, press(NORTH), press(START)])
    other = robo_rl(tmp_path, "collect", "--sim", f"dds:domain={domain}", "--operator", f"gamepad:{feed.path}", "--out", "env",
                    "--episodes", 1)
    feed.close()
    arm.signal(signal.SIGINT)
    assert arm.wait().code == 0
    assert other.code == 0 and len(load(tmp_path / "env")) == 1, other  # and as an env
    assert done.code == 0 and "episode 1: success" in done.out, done
    data = load(tmp_path / "data")
    x = column(data, "ee_x")
    assert data.success.all() and len(x) > 5 and x[-1] - x[0] > 0.01
