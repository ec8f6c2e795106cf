"""From a policy to the arm on one wire: observation, actions, schedule, governors, and what happens when
things are lost."""

import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import dds_domain

import sims
from controllers.bridge import AXES, PolicyInterface, slowness
from controllers.model import arm_model
from controllers.node import ORDERS, SAFETY_STATE
from controllers.observation import ObservationBuffer, objects_of
from controllers.output import Output
from controllers.pace import limits_at
from controllers.policy_client import InProcessPolicy
from controllers.remote import MessageParser, RemotePolicyClient, address, pack
from controllers.robot import load_robot
from controllers.transport import (
    Flag,
    JointState,
    LoopbackTransport,
    NetworkConditions,
    Numbers,
    PoseStamped,
    Text,
)
from robo_rl.errors import UserError
from robo_rl.experiment.arm import make_arm_env, make_lockstep_arm, make_robot
from robo_rl.experiment.scenes import scene_xml, start_placement
from robo_rl.experiment.sim_arm import SimArmOptions, make_sim_arm
from robo_rl.policies import ObsSpec
from sims.check import check_env
from sims.mujoco.env import axes_of, state_names_of
from sims.mujoco.tasks import TASKS

ROOT = Path(__file__).parent.parent
ROBOT = load_robot("sim")
PICK = TASKS["pick_cube"]
TASK = PolicyInterface(
    state_names=state_names_of(PICK),
    action_names=AXES,
    scale=tuple(a.high for a in axes_of("ee_delta")[:6]),
    period=0.02,
)
STILL = np.array([[0, 0, 0, 0, 0, 0, 1.0]] * 8)


def there(speed=1.5, **kw):
    """An arm with the bridge on its wire, ready."""
    body = make_lockstep_arm(ROBOT, TASK, speed, **kw)
    body.begin(*start_placement(ROBOT, "pick_cube", 3))
    return body


def moving(y=1.0):
    rows = STILL.copy()
    rows[:, 1] = y
    return lambda state: rows


def drive(body, mind, seconds):
    for _ in range(round(seconds / TASK.period)):
        body.tick(mind)


# ---- observation and actions -------------------------------------------------------------------------------


class Config:
    sim, task, control, max_steps = "mujoco", "pick_cube", "", 0


def arm_env(n=1, **kw):
    return make_arm_env(Config, ObsSpec(state=36, action=7), n, **kw)


def test_the_arm_shows_what_the_simulator_shows_at_every_start():
    arm, direct = arm_env(), sims.make("mujoco", "pick_cube")
    for start in (0, 7, 1 << 31):
        options = {"starts": np.array([start])}
        a, b = (e.reset(options=options)[0]["state"][0] for e in (arm, direct))
        for name, x, y in zip(arm.spec.state_names, a, b, strict=True):
            assert x == pytest.approx(y, abs=3e-3), f"{name} at start {start}"
        assert arm.spec.state_names == direct.spec.state_names and arm.spec.axes == direct.spec.axes


def test_the_tool_goes_where_the_simulators_goes():
    arm, direct = arm_env(), sims.make("mujoco", "pick_cube")
    for env in (arm, direct):
        env.reset(options={"starts": np.array([5])})
    action, at = np.zeros((1, 7), np.float32), slice(23, 26)
    action[0, [1, 2, 6]] = 0.4, -0.3, 1
    for k in range(40):
        if k == 12:
            action[0, :3] = 0
        a, b = (env.step(action)[0]["state"][0] for env in (arm, direct))
        assert np.abs(a[at] - b[at]).max() < 0.012, k
    assert np.abs(a[at] - b[at]).max() < 0.003


def test_the_arm_is_an_env_of_the_contract():
    check_env(lambda n: arm_env(n), num_envs=3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"state_names": ("joint1", "torque3")}, "does not fit the robot's topics: torque3"),
        ({"state_names": ()}, "it is empty"),
        ({"scale": (0.1,) * 5}, "scale needs 6 numbers"),
        ({"action_names": ("joint1",)}, "do not fit the robot, which is commanded by dx"),
        ({"period": 0.0}, "control period"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_in_one_line(change, says):
    with pytest.raises(UserError, match=says) as e:
        replace(TASK, **change)
    assert "\n" not in str(e.value)


def test_the_objects_of_a_state_are_known_by_name():
    assert objects_of(TASK.state_names) == ("cube",)


# ---- schedule ----------------------------------------------------------------------------------------------


def test_immediate_inference_is_the_same_as_acting_row_by_row():
    a, b = there(), there()
    drive(a, InProcessPolicy(moving(0.5)), 0.32)
    for _ in range(16):
        b.act(moving(0.5)(None)[0])
    assert np.allclose(a.arm.model.q, b.arm.model.q, atol=1e-6)
    assert a.bridge.schedule.counts["executed"] == 16 and not a.bridge.schedule.counts["late"]


@pytest.mark.parametrize(("delay", "early"), [(None, False), (lambda k: 0.0, True)])
def test_a_policy_the_loop_waits_for_is_asked_when_its_rows_are_used_up_however_long_it_once_took(
    delay, early
):
    body = there()
    body.bridge.latency.add(0.05)  # its first answer
    drive(body, InProcessPolicy(moving(0.1), delay), 0.64)
    counts = body.bridge.schedule.counts
    assert counts["executed"] == 32 and (counts["superseded"] > 0) == early
    assert body.bridge.latency.total - 1 == (7 if early else 4)


@pytest.mark.parametrize("delay", [0.03, 0.1])
def test_late_inference_loses_no_way_and_runs_no_row_twice(delay):
    body, wait = there(), InProcessPolicy(moving(0.3), lambda k: delay)
    before = body.arm.pose()[0][1]
    drive(body, wait, 1.0)
    counts, steps = body.bridge.schedule.counts, math.ceil(delay / 0.02)
    assert counts["late"] >= steps and counts["executed"] <= 50
    # one chunk at a time: what inference takes is more than its rows cover
    per_chunk = max(steps - (8 - steps), 0)
    # before the first, once to learn the delay, then
    assert counts["starved"] <= 2 * steps + 1 + per_chunk * 50 / steps
    gone = body.arm.pose()[0][1] - before
    # rows are places in time: what was late is caught up, not lost
    assert 0.006 * counts["executed"] - 0.02 < gone < 0.3
    assert body.bridge.governor.state == "ACTIVE" and not body.bridge.lost


def test_dry_run_commands_nothing_and_previews_everything():
    body = there(dry_run=True)
    seen = body.bridge.transport.subscription("preview/target_pose", PoseStamped)
    before = body.arm.pose()[0]
    drive(body, InProcessPolicy(moving()), 1.0)
    assert np.abs(body.arm.pose()[0] - before).max() < 1e-3 and body.governor.state == "DISARMED"
    assert seen.latest() is not None and body.bridge.commands > 40
    assert body.bridge.transport.publishers("target_pose") == 0


# ---- what may be lost --------------------------------------------------------------------------------------


def braked(body, seconds=0.5):
    """The way [m] that the tool goes on after now, and how fast it is in the end."""
    from_here = body.arm.pose()[0]
    for _ in range(round(seconds / 0.02)):
        body.run()
    return float(np.linalg.norm(body.arm.pose()[0] - from_here)), float(np.linalg.norm(body.arm.twist()[:3]))


def test_a_dead_bridge_leaves_the_arm_braking_and_holding():
    body = there(0.25)
    drive(body, InProcessPolicy(moving(-1)), 0.7)
    assert np.linalg.norm(body.arm.twist()[:3]) > 0.2
    way, speed = braked(body)  # nobody commands any more
    assert (
        way < 0.07 and speed < 0.01 and body.governor.state == "HOLD" and "no command" in body.governor.reason
    )


@pytest.mark.parametrize(
    ("controller", "speed"), [("joint", 1.5), ("joint", 0.25), ("cartesian", 1.0), ("cartesian", 0.25)]
)
def test_holding_from_full_pace_does_not_swing(controller, speed):
    """Stiff joints with a real arm's torque rate would: they swing up to 9 rad/s."""
    body = there(speed, controller=controller)
    drive(body, InProcessPolicy(moving(-0.9)), 0.5)
    assert np.linalg.norm(body.arm.twist()[:3]) > 0.2
    body.governor.stop(body.arm.t)
    fastest, at = 0.0, body.arm.pose()[0]
    for k in range(60):
        body.run()
        fastest = max(fastest, float(np.abs(body.arm.model.dq).max()) if k > 45 else 0.0)
    assert fastest < 0.05 and np.linalg.norm(body.arm.pose()[0] - at) < 0.15 * max(1.0, speed)


@pytest.mark.parametrize(("speed", "slow"), [(1.5, 1), (1.0, 1), (0.5, 2), (0.25, 4), (0.3, 4), (0.05, 20)])
def test_a_slow_arm_runs_the_policy_in_slow_motion(speed, slow):
    """Every action is done whole, none is cut to the limit, and the policy sees the speed that it asked
    for."""
    body, seen = there(speed), []
    bridge = body.bridge
    assert bridge.slow == slowness(TASK, bridge.governor.limits) == slow
    at = TASK.state_names.index("joint1_velocity")
    rows = STILL.copy()
    rows[:, 1] = 0.5

    def act(observation):
        seen.append((observation["state"][at], bridge.model.dq[0]))
        return rows

    began = bridge.gripper_command.pos.copy()
    drive(body, InProcessPolicy(act), 2 * len(rows) * slow * TASK.period)
    c = bridge.schedule.counts
    assert (c["executed"], c["late"], c["cut"], c["superseded"]) == (2 * len(rows), 0, 0, 0) and len(
        seen
    ) == 2
    assert bridge.gripper_command.pos - began == pytest.approx(
        [0, 2 * len(rows) * 0.5 * TASK.scale[1], 0], abs=1e-6
    )
    assert seen[1][0] == pytest.approx(slow * seen[1][1], rel=1e-5) and abs(seen[1][0]) > 0.4
    assert not bridge.governor.counts and body.governor.state == "ACTIVE"


def test_one_action_of_the_env_takes_as_long_as_the_arm_needs():
    body = there(0.25)
    began, pos = body.arm.t, body.bridge.gripper_command.pos.copy()
    body.act(np.array([0, 1.0, 0, 0, 0, 0, 1.0]))
    assert body.arm.t - began == pytest.approx(4 * TASK.period)
    assert body.bridge.gripper_command.pos - pos == pytest.approx([0, TASK.scale[1], 0], abs=1e-9)


def test_joints_stay_below_their_speed_whatever_is_commanded():
    body = there(1.5)
    rng = np.random.default_rng(0)
    for _ in range(60):
        body.act(rng.choice([-1.0, 1.0], 7))
        assert (np.abs(body.arm.model.dq) <= np.array(ROBOT.velocity)).all()
    assert not body.governor.counts["joint_speed"]


def test_stiff_joints_need_a_model_and_a_controller_has_a_known_name():
    with pytest.raises(UserError, match="robot fr3 ships no model"):
        make_sim_arm(SimArmOptions(lockstep=True, seconds=1, robot="fr3", controller="joint", scene="none"))
    with pytest.raises(UserError, match="unknown controller 'carthesian'"):
        make_sim_arm(SimArmOptions(lockstep=True, seconds=1, controller="carthesian"))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (None, "objects/cube is silent: the last is "),
        (PoseStamped(0.0, "camera", (0.5, 0, 0), (1, 0, 0, 0)), "objects/cube is in frame 'camera'"),
        (PoseStamped(0.0, "base", (math.nan, 0, 0), (1, 0, 0, 0)), "a number that is not finite"),
    ],
)
def test_a_policy_is_not_shown_an_objects_pose_that_is_old_or_of_another_frame_or_no_number(message, says):
    body = there(0.25)
    sender = LoopbackTransport(body.bus, "camera").publisher("objects/cube", PoseStamped)
    drive(body, InProcessPolicy(moving(-0.5)), 0.2)
    body.node.published.objects.clear()  # what told it is dead
    for _ in range(80):
        if message:
            sender.publish(message)
        drive(body, InProcessPolicy(moving(-0.5)), 0.02)
    assert says in body.bridge.lost
    assert braked(body)[1] < 0.01
    body.bridge.lost = ""
    body.bridge.governor.disarm(body.arm.t)
    with pytest.raises(UserError, match="objects/cube"):
        body.bridge.begin(body.arm.t, leased=True)


def test_a_gripper_that_publishes_its_joints_beside_the_arms_is_passed_over():
    body = there(0.25)
    other = LoopbackTransport(body.bus, "gripper").publisher("joint_states", JointState)
    plain = body.run

    def run():
        plain()
        other.publish(JointState(body.arm.t, ("finger",), (0.02,), (0.0,)))

    body.run = run
    drive(body, InProcessPolicy(moving(-0.5)), 1.0)
    assert not body.bridge.lost and body.bridge.governor.state == "ACTIVE", body.bridge.governor.reason
    assert np.linalg.norm(body.arm.twist()[:3]) > 0.05


def test_an_arm_whose_joints_have_other_names_than_its_file_is_named_with_both():
    body, names = there(0.25), tuple(f"j{k}" for k in range(7))
    wire = LoopbackTransport(body.bus, "mine")
    robot = replace(ROBOT, name="mine", joints=names, topics=ROBOT.topics | {"joint_states": "js"})
    buffer = ObservationBuffer(robot, wire, ("ee_x",))
    wire.publisher("js", JointState).publish(JointState(0.0, ROBOT.joints, (0.0,) * 7, (0.0,) * 7))
    says = "js lacks the joints j0, .* of the file of robot mine; named there are joint1, "
    with pytest.raises(UserError, match=says):
        buffer.update(arm_model(ROBOT))
    for topic in ("forward_position", "joint_trajectory"):
        bare = replace(robot, topics={k: t for k, t in robot.topics.items() if k != topic})
        with pytest.raises(UserError, match=f'names no controller {topic}: say "topics": .*_controller/'):
            Output(topic, bare, wire, arm_model(ROBOT), 0.02)


@pytest.mark.parametrize("velocity", [(math.nan,) * 7, ()])
def test_joint_states_of_no_use_in_motion_brake_the_arm_in_order(velocity):
    body = there(0.25)
    other = LoopbackTransport(body.bus, "driver").publisher("joint_states", JointState)
    drive(body, InProcessPolicy(moving(-0.5)), 0.3)
    other.publish(JointState(body.arm.t, ROBOT.joints, tuple(body.arm.model.q.tolist()), velocity))
    body.bridge.tick(InProcessPolicy(moving(-0.5)), body.arm.t)
    assert "not finite" in body.bridge.lost or "velocity has 0 values" in body.bridge.lost
    assert braked(body)[1] < 0.01


@pytest.mark.parametrize("topic", ["joint_states", "objects/cube"])
def test_a_second_node_that_tells_what_is_measured_brakes_the_arm_and_is_named(topic):
    body = there(0.25)
    other, policy = LoopbackTransport(body.bus, "second"), InProcessPolicy(moving(-0.5))
    drive(body, policy, 0.3)
    q = tuple(body.arm.model.q.tolist())
    message = (
        JointState(body.arm.t, ROBOT.joints, q, (0.0,) * 7)
        if topic == "joint_states"
        else PoseStamped(body.arm.t, ROBOT.base_frame, (0.5, 0.0, 0.02), (1.0, 0.0, 0.0, 0.0))
    )
    sender = other.publisher(topic, type(message))
    for _ in range(20):
        sender.publish(message)
        body.bridge.tick(policy, body.arm.t)
        if body.bridge.lost:
            break
        body.run()
    assert f"two nodes publish on {topic}" in body.bridge.lost and "second" in body.bridge.lost
    assert braked(body)[1] < 0.01


def test_a_policy_of_the_simulator_does_not_begin_where_its_target_would_jump():
    model = arm_model(ROBOT)
    q = np.array(ROBOT.home)
    model.update(q, np.zeros(7))
    assert TASK.command(model, limits_at(0.25, (0.036, 0.18)))
    q[0] += 2.5  # the base of this arm is turned
    model.update(q, np.zeros(7))
    with pytest.raises(UserError, match="within x 0.2 to 0.8, y -0.5 to 0.5, z 0.009 to 0.7 m alone"):
        TASK.command(model, limits_at(0.25, (0.036, 0.18)))


def test_a_policy_that_stops_answering_holds_the_arm_by_the_bridge():
    body = there(0.25)
    drive(body, InProcessPolicy(moving(-1), lambda k: 0.0 if k < 2 else math.inf), 2.4)
    assert body.bridge.governor.state == "HOLD" and "no command" in body.bridge.governor.reason
    assert np.linalg.norm(body.arm.twist()[:3]) < 0.01


def test_a_policy_that_dies_or_answers_nonsense_is_said_in_the_end():
    body, mind = there(0.25), InProcessPolicy(lambda state: np.full((8, 7), np.nan))
    drive(body, mind, 0.3)
    assert "not finite" in body.bridge.lost and body.governor.state == "ARMED"


def test_a_lost_state_stream_stops_the_bridge():
    body = there(0.25)
    drive(body, InProcessPolicy(moving(-1)), 0.5)
    for k in range(1, 6):  # the arm is silent
        body.bridge.tick(InProcessPolicy(moving()), body.arm.t + 0.02 * k)
    assert body.bridge.governor.state == "STOPPED" and "no measured state" in body.bridge.governor.reason


@pytest.mark.parametrize("side", ["arm", "both"])
def test_an_estop_reaches_both_governors(side):
    body = there(0.25)
    drive(body, InProcessPolicy(moving(-1)), 0.5)
    body.bridge.transport.publisher("estop", Flag, "latched").publish(Flag(True))
    drive(body, InProcessPolicy(moving(-1)), 0.5)
    assert body.governor.state == "STOPPED" and body.bridge.governor.state == "STOPPED"
    assert np.linalg.norm(body.arm.twist()[:3]) < 0.01


def test_a_second_commander_is_refused():
    body = there(0.25)
    body.bridge.transport.publisher("target_pose", PoseStamped, "command")
    with pytest.raises(
        UserError, match="other publisher on target_pose or target_joint: one commander at a time"
    ):
        body.bridge.begin(body.arm.t)


def test_a_bad_wire_slows_the_arm_down_but_breaks_no_contract():
    body = there(0.25, conditions=NetworkConditions(delay=0.005, drop=0.1, seed=3))
    drive(body, InProcessPolicy(moving(-0.2)), 2.0)
    assert body.governor.state in ("ACTIVE", "HOLD") and not body.governor.counts["workspace"]


# ---- the arm's node ----------------------------------------------------------------------------------------


def test_orders_lead_through_the_governors_states_and_refusals_are_told():
    body = there(0.25)
    wire = body.bridge.transport
    said, order = wire.subscription(SAFETY_STATE, Text, "latched", depth=9), body.order
    for word, now in (
        ("stop", "STOPPED"),
        ("arm", "STOPPED: refused"),
        ("claim a 9", "STOPPED"),
        ("reset", "DISARMED"),
        ("arm", "ARMED"),
        ("disarm", "DISARMED"),
    ):
        order.publish(Text(word))
        body.run()
        assert said.latest().message.data.startswith(now), word
    order.publish(Text("fly"))
    body.run()
    assert any("unknown safety command 'fly'" in r and all(o in r for o in ORDERS) for r in body.node.refused)


def test_the_gripper_follows_only_an_armed_commander():
    body = there(0.25)
    grip = body.bridge.gripper
    grip.publish(Numbers((0.0,)))
    for _ in range(20):
        body.run()
    assert body.arm.opening < 0.05
    body.governor.stop(body.arm.t)
    grip.publish(Numbers((1.0,)))
    for _ in range(20):
        body.run()
    assert body.arm.opening < 0.05


def test_the_scene_has_the_cube_and_the_tool_where_the_simulator_has_them():
    assert 'name="cube"' in scene_xml(ROBOT, "pick_cube") and scene_xml(ROBOT, "none") == ""
    with pytest.raises(UserError, match="unknown scene 'pick_cub'"):
        scene_xml(ROBOT, "pick_cub")
    with pytest.raises(UserError, match="ships no MJCF"):
        scene_xml(load_robot("fr3"), "pick_cube")


@pytest.mark.parametrize("kind", ["arm", "dds"])
def test_a_task_that_an_arm_cannot_hold_is_named_by_the_option_that_gave_it(kind):
    with pytest.raises(UserError, match=r"^--task math:pi must be a sims.mujoco.tasks.Task, got float"):
        make_robot(kind, "math:pi", 1)
    for name in ("pick_cub", "./own:task"):  # the second names a file, which is no module
        with pytest.raises(UserError, match=rf"unknown task '{name}'.* Allowed: pick_cube, (?!.*none)"):
            make_robot(kind, name, 1)


# ---- commands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kw", "says"),
    [
        ({"seconds": 0.0}, "--seconds"),
        ({"speed": 9.0}, "--speed"),
        ({"payload": -1.0}, "--payload"),
        ({"domain": 999}, "--domain"),
        ({"lockstep": True}, "--lockstep needs --seconds"),
        ({"message_drop": 2.0}, "--message-drop"),
        ({"torque_delay": -1}, "--torque-delay"),
        ({"push": math.nan}, "--push"),
        ({"start": -1}, "--start"),
        ({"message_delay": -1.0}, "--message-delay"),
        ({"joint_friction": -1.0}, "--joint-friction"),
    ],
)
def test_wrong_options_of_sim_arm_are_one_clear_line(kw, says):
    with pytest.raises(UserError, match=says):
        SimArmOptions(**kw)


def test_sim_arm_under_disturbances_holds_its_place():
    arm, node = make_sim_arm(
        SimArmOptions(
            lockstep=True,
            seconds=1,
            payload=1.0,
            joint_friction=0.5,
            torque_delay=2,
            message_drop=0.5,
            message_delay=0.05,
        )
    )
    before = arm.pose()[0]
    for _ in range(1500):
        node.tick()
    assert np.linalg.norm(arm.pose()[0] - before) < 0.02 and node.governor.state == "DISARMED"


def test_the_pace_is_the_governors_own_at_a_quarter_metre_per_second():
    from controllers.limits import Limits

    assert limits_at(0.25) == Limits() and limits_at(0.1).speed == (0.1, 0.4)
    with pytest.raises(UserError, match="speed must be"):
        limits_at(2.0)


# ---- the policy elsewhere ----------------------------------------------------------------------------------


def test_messages_survive_the_wire_in_pieces_and_nonsense_is_refused():
    array, image = (
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(12, dtype=np.uint8).reshape(2, 2, 3),
    )
    raw = pack({"state": array, "image/front": image}, t0=1.5) + pack({}, error="no")
    incoming, seen = MessageParser(), []
    for byte in raw:
        incoming.feed(bytes([byte]))
        if (message := incoming.take()) is not None:
            seen.append(message)
    (head, got), (error, none) = seen
    assert (
        head == {"t0": 1.5}
        and np.array_equal(got["state"], array)
        and np.array_equal(got["image/front"], image)
    )
    assert (
        got["image/front"].dtype == np.uint8 and error == {"error": "no"} and not none and not incoming.data
    )
    for bad in (b"GET / HTTP/1.1\r\n", b"\x02\x00\x00\x00{]", b"\x02\x00\x00\x00{}"):
        incoming = MessageParser()
        incoming.feed(bad)
        with pytest.raises(UserError):
            incoming.take()
    for bad in ("here", "host:", "host:0", ":1", "host:port"):
        with pytest.raises(UserError, match="host:port, for example"):
            address(bad)


def test_no_policy_at_an_address_says_how_to_start_one():
    with pytest.raises(UserError, match="no policy answers at 127.0.0.1:9.*robo_rl serve RUN"):
        RemotePolicyClient("127.0.0.1:9", b"x" * 32)


# ---- two processes -----------------------------------------------------------------------------------------


def test_kill_9_of_the_bridge_in_motion_leaves_the_arm_braking_and_holding(tmp_path):
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    from controllers.loop import real_time, undisturbed
    from robo_rl.experiment.wire import connect

    domain = dds_domain()
    try:
        wire = connect("arm", domain)
    except UserError as e:
        pytest.skip(f"no loopback for DDS here: {e}")
    arm, node = make_sim_arm(SimArmOptions(armed=True), wire)
    code = f"""
import time
from controllers.loop import undisturbed
from controllers.transport import PoseStamped
from robo_rl.experiment.wire import connect
wire = connect("commander", {domain})
undisturbed().__enter__()
pose, target = wire.subscription("current_pose", PoseStamped), wire.publisher("target_pose", PoseStamped, "command")
while pose.latest() is None: time.sleep(0.01)
at = pose.latest().message
time.sleep(0.3)
began = wire.now()
while True:
    target.publish(PoseStamped(wire.now(), "base", (at.pos[0], at.pos[1] - 0.26 * (wire.now() - began), at.pos[2]), at.quat))
    time.sleep(0.015)
"""  # noqa: E501
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    killed, at, speeds = [], [], []

    def tick():
        if node.count == 20:
            node.governor.arm(wire.now())
        node.tick()
        speeds.append(float(np.linalg.norm(arm.twist()[:3])))
        at.append(arm.pose()[0])
        if not killed and speeds[-1] > 0.22 and node.governor.state == "ACTIVE":
            child.send_signal(signal.SIGKILL)
            killed.append(len(at))

    try:
        patience = time.monotonic() + 200  # on a busy machine the child begins late
        while not wire.publishers("target_pose"):
            assert child.poll() is None and time.monotonic() < patience, "the commander did not come"
            time.sleep(0.05)
        with undisturbed():
            real_time(tick, arm.dt, 25.0, going=lambda: not killed or len(at) < killed[0] + 800)
    finally:
        child.kill()
        child.wait()
        wire.close()
    assert killed, (
        f"the commander never moved the arm: {node.governor.state} {node.governor.reason}, {max(speeds):.3f} "
        "m/s"
    )
    assert child.returncode == -9 and node.governor.state in ("HOLD", "STOPPED")
    moving = np.flatnonzero(np.array(speeds) > 0.01)[-1] + 1 - killed[0]  # ticks of a millisecond
    way = float(np.linalg.norm(at[-1] - at[killed[0] - 1]))
    print(f"killed at {speeds[killed[0] - 1]:.3f} m/s: stopped after {moving} ms and {1e3 * way:.0f} mm")
    assert moving <= 250 and way <= 0.04
