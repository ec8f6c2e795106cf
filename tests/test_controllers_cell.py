"""A robot's file carries its cell; arms of other joints and arms that follow positions, behind the same
governor."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_controllers_bridge import STILL, TASK, drive, moving
from test_controllers_bridge import there as body_at
from test_controllers_manager import CARTESIAN, There
from ur_like import JOINTS, xml

from controllers.cell import NEEDED, Cell, CellCamera, Payload
from controllers.governor import ACTIVE, HOLD
from controllers.law import LawOptions
from controllers.limits import JOINT_SHARE
from controllers.model import ArmModel, arm_model
from controllers.observation import ObservationBuffer
from controllers.output import POSITIONS, Output
from controllers.policy_client import InProcessPolicy
from controllers.readback import STIFFNESS, gain_faults
from controllers.robot import PRESETS, load_robot, presets
from controllers.setpoint import Setpoint
from controllers.transport import Bus, JointTrajectory, LoopbackTransport, Numbers, WrenchStamped
from controllers.twin import Twin, apart, same_joints
from robo_rl.errors import UserError
from robo_rl.experiment.deploy import check_gains, check_speed, limits_of, twin_of

SIM = load_robot("sim")
WHOLE = {"low": [0.2, -0.3, 0.0], "high": [0.6, 0.3, 0.7], "speed": [0.25, 1.0], "force": [40.0, 12.0]}


def write(folder: Path, cell: dict, preset: str = "sim", name: str = "mine", **changed) -> str:
    """A user's file: a preset with a cell of its own."""
    raw = json.loads((PRESETS / f"{preset}.json").read_text()) | {"cell": cell} | changed
    if raw["model"]:
        raw["model"] = str(PRESETS / raw["model"])
    (folder / f"{name}.json").write_text(json.dumps(raw))
    return str(folder / f"{name}.json")


def ur(folder: Path, **cell) -> str:
    (folder / "ur.xml").write_text(xml())
    return write(
        folder,
        {
            "low": [0.1, -0.5, 0.1],
            "high": [0.8, 0.5, 0.8],
            "speed": [0.5, 2.0],
            "without": {"force": "it is simulated"},
            "command": "forward_position",
        }
        | cell,
        "ur5e",
        "ur",
        model=str(folder / "ur.xml"),
        home=[0.0, -1.5708, 1.5708, -1.5708, -1.5708, -1.5708],
    )


# ---- the file ----------------------------------------------------------------------------------------------


def test_every_preset_names_the_source_of_its_numbers_and_only_the_simulated_one_may_be_armed_as_it_is():
    for name in presets():
        robot = load_robot(name)
        assert {"lower", "upper", "velocity", "torque", "torque_rate", "home"} <= set(robot.sources), name
        assert all(len(where) > 5 for where in robot.sources.values())
        if name == "sim":
            robot.need_limits()
        else:
            with pytest.raises(
                UserError, match=f"robot {name} is not armed: its file says no box, speed, force"
            ):
                robot.need_limits()


@pytest.mark.parametrize("left", NEEDED)
def test_an_arm_whose_file_lacks_a_limit_is_not_armed_until_it_says_why(tmp_path, left):
    cell = {k: v for k, v in WHOLE.items() if k != left and not (left == "box" and k in ("low", "high"))}
    with pytest.raises(UserError, match=f"says no {left} in `cell`"):
        load_robot(write(tmp_path, cell)).need_limits()
    load_robot(write(tmp_path, cell | {"without": {left: "a fence stands around it"}})).need_limits()
    with pytest.raises(UserError, match=f"without {left} needs a sentence"):
        load_robot(write(tmp_path, cell | {"without": {left: "none"}}))
    open_box = {"low": [None] * 3, "high": [None] * 3}
    assert Cell(**open_box).lacks() == list(NEEDED)  # a box of no face is none


def test_the_bridge_refuses_to_arm_such_a_robot_and_still_runs_dry():
    for dry in (False, True):
        body = body_at(0.25)
        body.robot = replace(SIM, cell=Cell())
        body.dry_run = dry
        if dry:
            body.begin(np.array(SIM.home), {})
            continue
        with pytest.raises(UserError, match="robot sim is not armed"):
            body.begin(np.array(SIM.home), {})


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ({"low": [0, 0, 0]}, "low and high"),
        ({"low": [0, 0], "high": [1, 1]}, "low has 3"),
        ({"low": 0.1, "high": [1, 1, 1]}, "low has 3 numbers or nulls, got 0.1"),
        ({"low": [0, 0, 0], "high": [85, 60, 90]}, "high .*20"),
        ({"box": 1}, "got box"),
        ({"tilt": 2.0}, "tilt"),
        ({"speed": [0.25]}, "speed needs 2"),
        ({"speed": [9.0, 1.0]}, "speed"),
        ({"force": [0, 1]}, "force"),
        ({"force": [True, 1.0]}, "force"),
        ({"without": {"boxes": "a long story"}}, "without"),
        ({"command": "velocity"}, "command"),
        ({"controller": 3}, "controller is a text"),
        ({"homes": {"up": [0.0]}}, "home up needs 7 angles"),
        ({"homes": {"up": [9.0] * 7}}, "home up needs 7 angles within"),
        ({"homes": []}, "homes is an object"),
        ({"homes": {"up": 5}}, "home up needs .* numbers .* got 5"),
        ({"payload": {"mass": -1}}, "mass"),
        ({"payload": {"centre": [0, 0]}}, "centre needs 3"),
        ({"payload": {"weight": 1}}, "got weight"),
        ({"cameras": {"front": {"frame": "base", "pos": [0, 0, 0]}}}, "camera front lacks quat"),
        ({"cameras": {"front": {"frame": "base", "pos": [0, 0, 0], "quat": [2, 0, 0, 0]}}}, "quat"),
        ({"cameras": {"front": {"frame": "base", "pos": [0, 0, 0], "quat": [1, 1, 0, 0]}}}, "length 1"),
        ({"cameras": {"front": {"frame": "worl", "pos": [0, 0, 0], "quat": [1, 0, 0, 0]}}}, "front 'worl'"),
        (
            {"cameras": {"front": {"frame": "base", "pos": [0, 0, 0], "quat": [1, 0, 0, 0], "topic": "a b"}}},
            "camera: topic needs a name of ROS 2",
        ),
        ({"cameras": []}, "cameras is an object"),
        ([], "cell is an object"),
        ({"low": [1, 0, 0], "high": [0, 1, 1]}, "low < high"),
    ],
)
def test_a_cell_that_makes_no_sense_is_one_clear_line(tmp_path, cell, says):
    with pytest.raises(UserError, match=says) as e:
        robot = load_robot(write(tmp_path, cell))
        limits_of(robot, 0.25)
    assert "\n" not in str(e.value)


def test_a_whole_cell_reaches_the_governor_the_cameras_and_the_speed(tmp_path):
    robot = load_robot(
        write(
            tmp_path,
            WHOLE
            | {
                "tilt": 0.4,
                "homes": {"up": list(SIM.home)},
                "payload": {"mass": 0.7, "centre": [0, 0, 0.05], "inertia": [0.001] * 3},
                "cameras": {
                    "front": {
                        "frame": "base",
                        "pos": [1, 0, 0.5],
                        "quat": [1, 0, 0, 0],
                        "topic": "cam0/compressed",
                    }
                },
            },
        )
    )
    limits = limits_of(robot, 0.2)
    assert (limits.low, limits.high, limits.tilt, limits.wrench) == (
        (0.2, -0.3, 0.0),
        (0.6, 0.3, 0.7),
        0.4,
        (40.0, 12.0),
    )
    slow = replace(robot, cell=replace(robot.cell, speed=(0.25, 0.3)))
    assert limits.speed == (0.2, 0.8) and limits_of(slow, 0.25).speed == (0.25, 0.3)
    assert robot.cell.payload == Payload(mass=0.7, centre=(0, 0, 0.05), inertia=(0.001,) * 3)
    wire = LoopbackTransport(Bus(lambda: 0.0), "a")
    buffer = ObservationBuffer(robot, wire, ("ee_x",), ("front", "wrist"))
    assert buffer.camera_topics == {"front": "cam0/compressed", "wrist": "wrist/image_raw/compressed"}
    assert "external_wrench" in buffer.missing()
    check_speed(0.25, robot)
    with pytest.raises(
        UserError, match="--speed 0.3 is above the 0.25 m/s that the file of robot mine allows"
    ):
        check_speed(0.3, robot)


@pytest.mark.parametrize(
    ("size", "after", "state"), [(30.0, 0.05, "ACTIVE"), (45.0, 0.1, "HOLD"), (None, 0.4, "STOPPED")]
)
def test_a_force_beyond_the_files_holds_the_bridges_governor_and_a_dead_sensor_stops_it(
    tmp_path, size, after, state
):
    body = body_at(0.25)
    body.robot = load_robot(
        write(tmp_path, WHOLE | {"low": [0.15, -0.6, 0.0], "high": [0.85, 0.6, 0.8]}, name="sim")
    )
    body.limits = limits_of(body.robot, 0.25)
    now, plain, sensors = [0.0], body.run, []

    def run():
        plain()
        if not sensors:
            sensors.append(LoopbackTransport(body.bus, "sensor").publisher("external_wrench", WrenchStamped))
        if now[0] is not None:
            sensors[0].publish(WrenchStamped(0.0, "tool", (now[0], 0.0, 0.0, 0.0, 0.0, 0.0)))

    body.run = run
    body.begin(np.array(SIM.home), {})
    drive(body, InProcessPolicy(lambda obs: STILL), 0.3)
    assert body.bridge.governor.state == "ACTIVE"
    now[0] = size
    drive(body, InProcessPolicy(lambda obs: STILL), after)
    assert body.bridge.governor.state == state, body.bridge.governor.reason
    assert state != HOLD or "external force 45 N" in body.bridge.governor.reason


# ---- gains -------------------------------------------------------------------------------------------------


def test_gains_are_read_back_and_nothing_moves_while_they_differ():
    there = There(controller="cartesian")
    stiff = (1500.0,) * 3 + (60.0,) * 3  # what the simulated arm's law has
    robot = replace(SIM, cell=replace(SIM.cell, controller=CARTESIAN), gains={"stiffness": stiff})
    assert gain_faults(there.client, robot) == [] and gain_faults(there.client, SIM) == []
    other = replace(
        robot, gains={"stiffness": (1500.0,) * 2 + (900.0,) + (60.0,) * 3, "error_clip": (0.1,) * 6}
    )
    said = gain_faults(there.client, other)
    assert said[0] == f"{CARTESIAN} has {STIFFNESS[2]} = 1500.0, the robot's file 900" and any(
        "error_clip.rx" in line for line in said
    )
    absent = gain_faults(
        there.client, replace(robot, cell=replace(robot.cell, controller="cartesian_controller"))
    )
    assert absent == [f"active is {CARTESIAN}, the robot's file wants cartesian_controller alone"]
    heard = []
    check_gains(there.client, robot, False, heard.append)
    check_gains(there.client, other, True, heard.append)
    assert heard == said
    with pytest.raises(UserError, match="nothing moves until the file and the arm agree"):
        check_gains(there.client, other, False, heard.append)
    there.node.transport.close()
    with pytest.raises(UserError, match="cannot be read back"):
        check_gains(there.client, robot, False, heard.append)
    check_gains(there.client, SIM, False, heard.append)  # its file names no controller


# ---- other joints ------------------------------------------------------------------------------------------


def test_an_arm_of_six_joints_is_seen_by_a_policy_as_the_arm_that_it_knows(tmp_path):
    robot = load_robot(ur(tmp_path))
    model, lines = arm_model(robot), []
    twin = twin_of(robot, model, TASK, lines.append)
    assert isinstance(twin, Twin) and "has other joints" in lines[0]
    q = np.array(robot.home)
    for k in range(60):  # the tool goes along; so does the twin's
        q[0] += 0.004
        q[2] -= 0.002
        model.update(q, np.array([0.2, 0, -0.1, 0, 0, 0]))
        if k == 0:
            twin.begin(model)
        twin.follow(model)
    far, turn = apart(twin.model, model.pos, model.quat)
    assert far < 2e-3 and turn < 5e-3 and twin.model.n == 7
    assert np.allclose(twin.model.jac @ twin.model.dq, model.jac @ model.dq, atol=5e-3)
    low, high = np.array(SIM.lower), np.array(SIM.upper)
    assert (twin.model.q >= low).all() and (twin.model.q <= high).all()
    wire = LoopbackTransport(Bus(lambda: 0.0), "a")
    with pytest.raises(UserError, match="7 joints, robot ur has 6"):
        ObservationBuffer(robot, wire, TASK.state_names)
    assert ObservationBuffer(robot, wire, TASK.state_names, joints=7) and ObservationBuffer(
        robot, wire, ("ee_x", "gripper")
    )


def test_a_tool_that_the_runs_arm_cannot_reach_is_refused(tmp_path):
    robot = load_robot(ur(tmp_path))
    model = arm_model(robot)
    model.update(np.zeros(6), np.zeros(6))  # stretched along the table, sideways
    with pytest.raises(UserError, match="cannot hold its tool where this one does"):
        Twin(SIM).begin(model)


def test_joints_are_the_runs_where_the_tools_agree_and_only_there(tmp_path):
    model = arm_model(SIM)
    model.update(np.array(SIM.home), np.full(7, 0.1))
    assert same_joints(model, SIM, SIM) and model.q.tolist() == list(SIM.home) and model.dq[0] == 0.1
    text = (
        Path(SIM.model)
        .read_text()
        .replace('<joint name="joint2" axis="0 0 1"', '<joint name="joint2" axis="0 0 -1"')
    )
    assert text.count('axis="0 0 -1"') == 1
    turned = ArmModel(text, SIM.joints, SIM.site)  # seven joints too, of which one turns the other way
    assert not same_joints(turned, SIM, SIM)
    robot = replace(SIM, name="mine")
    assert twin_of(robot, turned, TASK, print) is not None and twin_of(robot, model, TASK, print) is None
    # a state without joints fits any arm
    assert twin_of(robot, turned, replace(TASK, state_names=("ee_x", "gripper")), print) is None
    assert twin_of(SIM, turned, TASK, print) is None


# ---- positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", POSITIONS)
def test_a_setpoint_becomes_positions_within_the_joints_speed_and_braking_too(tmp_path, command):
    robot = load_robot(ur(tmp_path))
    clock = [0.0]
    bus = Bus(lambda: clock[0])
    wire = LoopbackTransport(bus, "bridge")
    model = arm_model(robot)
    model.update(np.array(robot.home), np.zeros(6))
    output = Output(command, robot, wire, model, 0.02)
    kind = Numbers if command == "forward_position" else JointTrajectory
    box = LoopbackTransport(bus, "arm").subscription(robot.topics[command], kind, "command")
    assert (
        not output.send(0.0, Setpoint("ARMED", tuple(model.pos), tuple(model.quat)), model) and output.joints
    )
    x, y, z = model.pos
    got, way = [], []
    for k in range(100):
        state = ACTIVE if k < 50 else HOLD
        goal = (x, y + 0.1 * min(k, 50) / 50, z)
        if k == 75:
            goal = (x, y + 0.9, z)  # far beyond what joints can do in a period
        assert output.send(k * 0.02, Setpoint(state, goal, tuple(model.quat), rebased=k == 0), model)
        message = box.latest().message
        if command == "joint_trajectory":
            [(after, q)] = message.points
            assert message.names == JOINTS and after == 0.04 and message.stamp == 0.0
        else:
            q = message.data
        got.append(q)
        meant = ArmModel(model.spec, JOINTS, "tool0")
        meant.place(np.array(q))
        way.append(math.dist(meant.pos, goal) if k < 75 else 0.0)
    steps = np.abs(np.diff(got, axis=0))
    assert (
        steps.max() <= JOINT_SHARE * 0.02 * np.array(robot.velocity).max() + 1e-9 and steps[74:].max() > 0.05
    )
    assert max(way[1:]) < 6e-3 and way[74] < 1e-4
    exact = Setpoint(ACTIVE, (x, y, z), tuple(model.quat), joints=tuple(np.array(robot.home) + 0.01))
    for k in range(4):
        assert output.send(2.0 + 0.02 * k, exact, model)
    last = box.latest().message
    assert (last.data if command == "forward_position" else last.points[0][1]) == exact.joints


@pytest.mark.parametrize("command", ["joint", *POSITIONS])
def test_the_simulated_arm_follows_streamed_positions_as_it_does_joint_targets(command):
    body = body_at(0.25)
    body.command = command
    body.begin(np.array(SIM.home), {})
    at = body.tool()
    drive(body, InProcessPolicy(moving(-1)), 1.0)
    assert body.governor.state == body.bridge.governor.state == "ACTIVE" and not body.node.refused
    assert at[1] - body.tool()[1] > 0.1
    joints, poses = (body.bus.senders.get(n, []) for n in ("target_joint", "target_pose"))
    assert bool(joints) == (command == "joint") and not poses


def test_a_trajectory_of_several_points_is_no_stream():
    there = There(controller="joint")
    there.order("arm")
    sender = there.client.publisher(
        "joint_trajectory_controller/joint_trajectory", JointTrajectory, "command"
    )
    sender.publish(JointTrajectory(0.0, SIM.joints, ((0.1, tuple(SIM.home)), (0.2, tuple(SIM.home)))))
    there.run(0.01)
    assert "a streamed trajectory has one point, got 2" in next(iter(there.node.refused))


def test_positions_begin_where_the_arm_is_and_end_without_a_jump():
    model = arm_model(SIM)
    wire = LoopbackTransport(Bus(lambda: 0.0), "bridge")
    output, q = Output("forward_position", SIM, wire, model, 0.02), np.array(SIM.home)
    box = wire.subscription(SIM.topics["forward_position"], Numbers, "command")
    model.update(q + 0.1, np.zeros(7))  # somebody moves it
    assert not output.send(0.0, Setpoint("ARMED", tuple(model.pos), tuple(model.quat), rebased=True), model)
    sent = []
    for k in range(30):
        if k == 10:  # it lags behind what it was asked for, and the governor goes on from there
            model.update(q + 0.1 - 0.01 * np.eye(7)[1], np.zeros(7))
        assert output.send(
            0.02 * k,
            Setpoint(ACTIVE if k < 10 else HOLD, tuple(model.pos), tuple(model.quat), rebased=k == 10),
            model,
        )
        sent.append(np.array(box.latest().message.data))
    assert np.allclose(sent[:11], q + 0.1, atol=1e-6) and np.allclose(sent[-1], model.q, atol=1e-6)
    assert 0.003 < np.abs(np.diff(sent, axis=0)).max() < 0.004  # a third of it in each of three periods


def test_a_robot_without_the_topic_of_a_command_says_which_it_has():
    with pytest.raises(UserError, match="forward_position"):
        Output(
            "forward_position",
            load_robot("iiwa"),
            LoopbackTransport(Bus(lambda: 0.0), "a"),
            arm_model(SIM),
            0.02,
        )


def test_a_camera_has_a_place():
    assert CellCamera(frame="base", pos=(0, 0, 1), quat=(1, 0, 0, 0)).topic == ""
    assert LawOptions(**{k: tuple(v) if isinstance(v, list) else v for k, v in SIM.gains.items()})
