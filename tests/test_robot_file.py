"""A robot's JSON file: what it must say, what it may leave out, and that every wrong field is one line."""

import json

import numpy as np
import pytest
from ur_like import JOINTS, xml

from controllers.model import ArmModel, arm_model, inertia_fault
from controllers.robot import NEEDED, PRESETS, load_robot
from robo_rl.errors import UserError

LEAST = {
    "joints": list(JOINTS),
    "site": "tool0",
    "base_frame": "base",
    "gravity": True,
    "lower": [-6.2] * 6,
    "upper": [None] * 6,
    "velocity": [3.1] * 6,
    "torque": [150.0] * 6,
    "torque_rate": 500,
    "home": [0.0] * 6,
}
WRONG = (
    [],
    {},
    "x",
    3,
    -1,
    None,
    True,
    [None] * 6,
    ["x"] * 6,
    [1] * 5,
    [[1]] * 6,
    {"x": 1},
    [float("nan")] * 6,
    {"joints": 1},
)


def write(folder, **changed):
    path = folder / "mine.json"
    path.write_text(json.dumps({k: v for k, v in (LEAST | changed).items() if v is not ...}))
    return str(path)


def test_a_file_says_what_only_its_owner_knows_and_the_rest_has_defaults(tmp_path):
    robot = load_robot(write(tmp_path))
    assert (
        robot.topics["target_pose"] == "target_pose"
        and "forward_position" not in robot.topics
        and robot.friction is None
    )
    assert robot.upper == (np.inf,) * 6 and robot.about == "" and robot.gains == {}
    named = load_robot(
        write(tmp_path, topics={"joint_states": "arm/joints"}, cell={"command": "forward_position"})
    )
    assert named.topics["joint_states"] == "arm/joints" and named.topics["estop"] == "estop"
    assert named.topics["forward_position"] == "forward_position_controller/commands"


@pytest.mark.parametrize("name", NEEDED)
def test_what_a_file_lacks_is_named_with_what_it_is_and_where_an_example_is(tmp_path, name):
    with pytest.raises(UserError) as e:
        load_robot(write(tmp_path, **{name: ...}))
    assert f"lacks {name} ({NEEDED[name]})" in str(e.value) and str(PRESETS / "sim.json") in str(e.value)


def test_a_file_that_is_not_there_is_told_with_those_that_are_and_the_way_to_make_one(tmp_path):
    write(tmp_path)
    (tmp_path / "arms.json").write_text("{}")
    with pytest.raises(
        UserError,
        match=r"no robot file .*amr.json; in .* there is arms?.json, .*json. .*fr3.*robot check FILE",
    ) as e:
        load_robot(str(tmp_path / "amr.json"))
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="there is no JSON file"):
        load_robot(str(tmp_path / "nowhere" / "arm.json"))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"veloctiy": [1] * 6}, "did you mean 'velocity'"),
        ({"topics": {"joint_sates": "x"}}, "did you mean 'joint_states'"),
        ({"topics": {"joint_states": "joint states"}}, "topic joint_states needs a name of ROS 2"),
        ({"topics": {"joint_states": "/joint_states"}}, "--namespace goes before it"),
        ({"lower": [-360] * 6}, "lower is in rad, and 360 rad is no arm's: in degrees"),
        ({"velocity": [180] * 6}, "velocity is in rad/s, and 180 rad/s .* are 3.142 rad"),
        ({"torque_rate": 1e9}, r"torque_rate \[N m/s\] must be in \(0, 100000\], got 1000000000.0"),
        ({"torque": [1e9] * 6}, r"torque \[N m\] must be in \(0, 10000\], got 1000000000.0"),
        ({"gravity": "false"}, "gravity is true or false"),
        ({"friction": {"phi1": [0] * 6}}, "phi1 .* phi2 .* phi3"),
        ({"velocity": [True] * 6}, "velocity is a list of numbers"),
        ({"home": [0] * 5}, "home needs 6 numbers"),
    ],
)
def test_a_wrong_field_says_what_it_should_be(tmp_path, changed, says):
    with pytest.raises(UserError, match=says):
        load_robot(write(tmp_path, **changed))


def test_no_value_of_any_field_is_more_than_one_line(tmp_path):
    for name in [
        *LEAST,
        "about",
        "model",
        "gains",
        "friction",
        "topics",
        "sources",
        "cell",
        "driver",
        "data",
    ]:
        for value in WRONG:
            try:
                load_robot(write(tmp_path, **{name: value}))
            except UserError as e:
                assert "\n" not in str(e)


def test_a_joint_between_the_first_and_the_tool_that_the_file_leaves_out_is_named(tmp_path):
    (tmp_path / "arm.xml").write_text(xml())
    rows = ("joints", "lower", "upper", "velocity", "torque", "home")
    for k, says in ((2, JOINTS[2]), (5, JOINTS[5]), (0, "")):
        less = {row: LEAST[row][:k] + LEAST[row][k + 1 :] for row in rows}
        robot = load_robot(write(tmp_path, **less, model="arm.xml"))
        if not says:  # below the first: where the model has it
            assert arm_model(robot).n == 5
            continue
        with pytest.raises(
            UserError, match=f"lack {says}, which the model has between .* and the tool tool0"
        ):
            arm_model(robot)


def test_a_model_without_the_inertia_of_its_motors_is_told_before_the_simulated_arm_shakes(tmp_path):
    stiffness = (600.0, 600.0, 600.0, 30.0, 30.0, 30.0)
    light = (
        xml()
        .replace('armature="0.1"', 'armature="0"')
        .replace('diaginertia="0.02 0.02 0.02"', 'diaginertia="2e-5 2e-5 2e-5"')
    )
    for text, fine in ((xml(), True), (light, False)):
        (tmp_path / "arm.xml").write_text(text)
        model = ArmModel(str(tmp_path / "arm.xml"), JOINTS, "tool0")
        model.update(np.array([0.3, -1.2, 1.8, -0.6, 1.2, 0.2]), np.zeros(6))
        said = inertia_fault(model, stiffness)
        assert (said == "") is fine
    assert said.startswith(
        "wrist_3_joint has an inertia of 2e-05 kg m^2, too little for the stiffness at 1000 Hz"
    )
