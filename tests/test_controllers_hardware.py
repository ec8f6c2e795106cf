"""The arm's hardware and its description as ROS's tools look for them."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from test_controllers_cell import write
from test_controllers_manager import JOINT, There

from controllers.model import ArmModel, arm_model
from controllers.robot import load_robot
from controllers.services import value_of
from controllers.transport import LoopbackTransport, Text
from controllers.urdf import robot_description
from robo_rl.errors import UserError

SIM = load_robot("sim")
SET = (
    "controller_manager/set_hardware_component_state",
    "controller_manager_msgs/srv/SetHardwareComponentState",
)


def test_the_hardware_is_one_active_system_whose_interfaces_the_active_controller_claims():
    there = There()
    ask = "controller_manager/list_hardware_components", "controller_manager_msgs/srv/ListHardwareComponents"
    [c] = there.client.call(*ask, {})["component"]
    assert (c["name"], c["type"], c["rw_rate"], c["is_async"]) == ("sim_hardware", "system", 1000, False)
    assert c["state"] == {"id": 3, "label": "active"}
    found = there.client.call(
        "controller_manager/list_hardware_interfaces",
        "controller_manager_msgs/srv/ListHardwareInterfaces",
        {},
    )
    assert c["command_interfaces"] == found["command_interfaces"] and len(found["state_interfaces"]) == 21
    assert found["command_interfaces"][0] == {
        "name": "joint1/effort",
        "data_type": "double",
        "is_available": True,
        "is_claimed": True,
    }
    assert not any(i["is_claimed"] for i in found["state_interfaces"])
    rows = there.client.call(
        "controller_manager/list_controllers", "controller_manager_msgs/srv/ListControllers", {}
    )["controller"]
    [active] = [r for r in rows if r["name"] == JOINT]
    assert active["claimed_interfaces"] == [i["name"] for i in found["command_interfaces"]]


def test_inactive_hardware_is_not_armed_and_an_armed_arm_stays_active():
    there = There()

    def put(name="sim_hardware", client=there.client, **state):
        got = client.call(*SET, {"name": name, "target_state": state})
        return got["ok"], got["state"]["label"]

    assert put(label="inactive") == (True, "inactive")
    assert "the hardware is inactive: activate it first" in there.order("arm")["message"]
    assert put(client=LoopbackTransport(there.node.transport.bus, "stranger"), label="active") == (
        False,
        "inactive",
    )
    assert put(id=3) == (True, "active") and there.order("arm")["success"]
    for state, says in (
        ({"label": "inactive"}, "the arm is ARMED: disarm it first"),
        ({"id": 4}, "unknown state of this hardware 'finalized'"),
        ({"id": 77}, "unknown state of this hardware ''"),
    ):
        there.node.refused.clear()
        assert put(**state) == (False, "active") and says in next(iter(there.node.refused))
    assert put("ur_hardware", label="inactive") == (False, "active")


def test_a_urdf_made_from_an_mjcf_has_its_kinematics_masses_and_limits():
    text = robot_description(SIM)
    made, real = ArmModel(text, SIM.joints, "tcp"), arm_model(SIM)
    rng = np.random.default_rng(0)
    for q in rng.uniform(SIM.lower, SIM.upper, (6, 7)):
        made.update(q, np.zeros(7))
        real.update(q, np.zeros(7))
        assert (
            np.allclose(made.pos, real.pos, atol=1e-6) and abs(abs(np.dot(made.quat, real.quat)) - 1) < 1e-9
        )
        assert np.allclose(made.jac, real.jac, atol=1e-6) and np.allclose(made.bias, real.bias, atol=1e-4)
    root = ET.fromstring(text)
    limit = root.find("joint[@name='joint4']/limit").attrib
    assert [float(limit[k]) for k in ("lower", "upper", "effort", "velocity")] == pytest.approx(
        [-3.0718, -0.0698, 87.0, 2.175]
    )
    children = [j.find("child").get("link") for j in root.iter("joint")]
    # a tree below the base
    assert sorted([*children, "base"]) == sorted(x.get("name") for x in root.iter("link"))


MOVED = """<mujoco><worldbody><body name="a" pos="0 0 0.2" quat="0.92 0.1 0.3 0.2"><joint name="j1" pos="0.05 -0.02 0.1" axis="0 1 0"/>
<geom type="capsule" size="0.02 0.1" pos="0.1 0 0"/><body name="b" pos="0.3 0 0"><joint name="j2" type="slide" pos="0 0.04 0" axis="1 0 1"
range="-0.1 0.2"/><geom type="box" size="0.1 0.02 0.03" quat="0.7 0.7 0 0"/><body name="c" pos="0 0.1 0"><geom size="0.03"/><site name="tcp"
pos="0 0 0.07"/></body></body></body></worldbody></mujoco>"""  # noqa: E501


def test_joints_beside_their_bodies_origin_slides_and_fixed_bodies_keep_their_place():
    robot = replace(
        SIM,
        joints=("j1", "j2"),
        model="x",
        **{k: getattr(SIM, k)[:2] for k in ("velocity", "torque")},
        lower=(-3.0, -0.1),
        upper=(3.0, 0.2),
        home=(0.0, 0.0),
    )
    made, real = (
        ArmModel(robot_description(robot, MOVED), robot.joints, "tcp"),
        ArmModel(MOVED, robot.joints, "tcp"),
    )
    for q in np.random.default_rng(1).uniform(-0.1, 0.2, (5, 2)):
        made.update(q, np.zeros(2))
        real.update(q, np.zeros(2))
        assert np.allclose(made.pos, real.pos, atol=1e-6) and np.allclose(made.bias, real.bias, atol=1e-5)


def test_a_given_urdf_is_published_as_it_is_and_a_ball_joint_has_none(tmp_path):
    (tmp_path / "given.urdf").write_text("<!-- mine -->" + robot_description(SIM))
    assert robot_description(SIM, str(tmp_path / "given.urdf")).startswith("<!-- mine --><robot")
    with pytest.raises(UserError, match="no joint for the body a"):
        robot_description(
            SIM, MOVED.replace('name="j1" pos="0.05 -0.02 0.1" axis="0 1 0"', 'name="j1" type="ball"')
        )
    with pytest.raises(UserError, match="ships no model"):
        robot_description(load_robot(write(tmp_path, {}, model="")))


def test_the_description_is_on_its_topic_for_those_who_come_later_and_a_parameter_of_robot_state_publisher():
    there = There()
    late = there.client.subscription("robot_description", Text, "latched")
    assert late.latest().message.data == robot_description(SIM)
    ask = "robot_state_publisher/get_parameters", "rcl_interfaces/srv/GetParameters"
    [value] = there.client.call(*ask, {"names": ["robot_description"]})["values"]
    assert value_of(value) == robot_description(SIM)
