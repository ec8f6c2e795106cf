"""The actions of the simulated arm: trajectories of joints and the gripper, as `crisp_py.Robot.home` and
MoveIt ask for them."""

import math
from dataclasses import asdict

import numpy as np
import pytest
from test_controllers_arm import Answering, dds_pair, ros_pair
from test_controllers_manager import CARTESIAN, JOINT, There

from controllers.action_messages import (
    GoalStatuses,
    GripperFeedback,
    TrajectoryFeedback,
    seconds_of,
    time_fields,
)
from controllers.action_types import CANCEL, GRIPPER, TRAJECTORY
from controllers.actions import ABORTED, CANCELED, CANCELING, EXECUTING, MOST, SUCCEEDED, ActionServer
from controllers.limits import Limits
from controllers.model import arm_model
from controllers.robot import load_robot
from controllers.trace import Trace
from controllers.trace_replay import replay
from controllers.trajectory import Trajectory, check_tool, read_trajectory, straight
from controllers.transport import LoopbackTransport, PoseStamped, Text
from robo_rl.errors import UserError

SIM = load_robot("sim")
FOLLOW, JTC, GRIP = (
    "joint_trajectory_controller/follow_joint_trajectory",
    "joint_trajectory_controller",
    "gripper_position_controller/gripper_cmd",
)
HOME = np.array(SIM.home)


def id_of(k):
    return {"uuid": [k, *[7] * 15]}


def goal_of(*points, names=SIM.joints, velocities=None, **more):
    """Fields of a FollowJointTrajectory goal: points (seconds, positions)."""
    rows = [{"positions": list(map(float, q)), "time_from_start": time_fields(t)} for t, q in points]
    for row, v in zip(rows, velocities or [], strict=False):
        row["velocities"] = list(v)
    return {"trajectory": {"joint_names": list(names), "points": rows, **more.pop("trajectory", {})}, **more}


def away(by=0.3, joint=0):
    q = HOME.copy()
    q[joint] += by
    return q


class Acting(There):
    """The arm, armed by a client that also sends goals."""

    def __init__(self, armed=True, controller=JTC, **kw):
        super().__init__(**kw)
        self.arm.reset(HOME, {}, opening=1.0)
        if controller != JOINT:
            assert self.switch([controller])["ok"]
        self.number, self.kind = 0, TRAJECTORY
        self.statuses = self.client.subscription(f"{FOLLOW}/_action/status", GoalStatuses, "latched")
        if armed:
            self.order("arm")
        self.run(0.02)

    def send(self, goal, name=FOLLOW, kind=TRAJECTORY, client=None):
        self.number += 1
        return (client or self.client).call(
            f"{name}/_action/send_goal", f"{kind}_SendGoal", {"goal_id": id_of(self.number), "goal": goal}
        )["accepted"]

    def result(self, number=None, name=FOLLOW, kind=TRAJECTORY):
        return self.client.call(
            f"{name}/_action/get_result", f"{kind}_GetResult", {"goal_id": id_of(number or self.number)}
        )

    def refused(self):
        return next(
            (line for line in self.node.refused if line.startswith(FOLLOW) or line.startswith(GRIP)), ""
        )


def test_a_goal_is_followed_to_its_end_at_its_pace_and_the_arm_then_stands_armed():
    there = Acting()
    feedback = there.client.subscription(f"{FOLLOW}/_action/feedback", TrajectoryFeedback, depth=100)
    began, goal = there.arm.t, away(0.1)
    assert there.send(goal_of((1.0, goal)))
    assert there.statuses.latest().message.goals[0][::2] == (bytes([1, *[7] * 15]), EXECUTING)
    with pytest.raises(UserError, match="did not answer at once"):
        there.result()
    there.run(0.5)
    assert 0.03 < there.arm.model.q[0] < 0.055 and there.node.governor.state == "ACTIVE"
    while there.statuses.latest().message.goals[0][2] == EXECUTING and there.arm.t - began < 2:
        there.run(0.02)
    assert 0.9 < there.arm.t - began < 1.4 and np.abs(there.arm.model.q - goal).max() < 0.02
    assert there.result() == {"status": SUCCEEDED, "result": {"error_code": 0, "error_string": ""}}
    rows = [g.message for g in feedback.take()]
    assert (
        len(rows) > 15 and rows[0].names == SIM.joints and rows[-1].desired[0] == pytest.approx(0.1, abs=0.01)
    )
    there.run(0.5)  # nobody commands: it stands, and is not held
    assert there.node.governor.state == "ARMED" and np.abs(there.arm.model.q - goal).max() < 0.02
    assert there.send(goal_of((0.5, HOME)))


def test_joints_in_another_order_and_velocities_between_points_are_followed():
    there = Acting()
    order = tuple(reversed(SIM.joints))
    rows = [(0.3, away(0.03)), (0.6, away(0.09)), (0.9, away(0.12))]
    assert there.send(
        goal_of(
            *((t, q[::-1]) for t, q in rows),
            names=order,
            velocities=[[*[0.0] * 6, v] for v in (0.2, 0.2, 0.0)],
        )
    )
    there.run(0.65)
    assert there.arm.model.q[0] == pytest.approx(0.09, abs=0.015)
    there.run(0.6)
    assert there.result()["status"] == SUCCEEDED


REFUSED = (
    (goal_of((1.0, HOME[:6]), names=SIM.joints[:6]), "joints are joint1"),
    (goal_of((1.0, HOME), names=("a", *SIM.joints[1:])), "joints are a"),
    (goal_of((1.0, HOME), names=(*SIM.joints[:6], "joint1")), "each once"),
    (goal_of(), "1 to 1000 points, got 0"),
    (goal_of((2.0, HOME), (1.0, away())), "times from the start must rise, got 2, 1"),
    (goal_of((1.0, HOME), (1.0, HOME)), "must rise"),
    (goal_of((0.0, away(0.5)), (2.0, HOME)), "begins 0.500 rad from where"),
    (goal_of((700.0, HOME)), "at most 600 s"),
    (goal_of((9.0, away(3.1))), "joint1 goes to"),
    (goal_of((0.1, away(0.9))), "joint1 would turn at 9.00 rad/s, allowed 2.1"),
    (goal_of((1.0, [math.nan] * 7)), "not finite"),
    (goal_of((1.0, HOME), (2.0, [])), "positions of every point need 7"),
    (goal_of((0.1, HOME), velocities=[[2.5] * 7]), "would turn at 2.50"),
    (goal_of((0.0, HOME)), "more than 0 s"),
    (goal_of((8.0, away(1.2, 1))), "outside the workspace"),
    (goal_of((1.0, HOME), path_tolerance=[{"name": "elbow", "position": 0.1}]), "tolerance names 'elbow'"),
    (
        goal_of((1.0, HOME), goal_tolerance=[{"name": "joint1", "position": math.nan}]),
        "tolerance is not a number",
    ),
    (goal_of((1.0, HOME), trajectory={"header": {"stamp": time_fields(500.0)}}), "its stamp is"),
    (goal_of((1.0, HOME), multi_dof_trajectory={"points": [{}]}), "several degrees of freedom"),
)


def test_a_goal_that_makes_no_sense_or_passes_a_limit_is_refused_with_the_reason():
    there = Acting()
    for goal, says in REFUSED:
        assert not there.send(goal) and says in there.refused()
        there.node.refused.clear()
    there.run(0.1)
    assert there.node.governor.state == "ARMED" and not there.statuses.take()


def test_goals_of_an_unarmed_arm_of_another_controller_and_of_strangers_are_refused():
    there = Acting(armed=False)
    assert (
        not there.send(goal_of((2.0, away())))
        and "the arm is DISARMED: claim and arm it first" in there.refused()
    )
    there.order("arm")
    stranger = LoopbackTransport(there.node.transport.bus, "stranger")
    there.node.refused.clear()
    assert (
        not there.send(goal_of((2.0, away())), client=stranger) and "tester holds the arm" in there.refused()
    )
    there.switch([JOINT])
    there.node.refused.clear()
    assert (
        not there.send(goal_of((2.0, away())))
        and "does not hold the arm: switch to it first" in there.refused()
    )


def test_an_arm_that_was_claimed_from_a_shell_is_switched_and_homed_by_whoever_commands():
    there = Acting(armed=False, controller=JOINT)
    shell = LoopbackTransport(there.node.transport.bus, "shell")
    words = shell.publisher("safety_command", Text, "command")
    words.publish(Text("claim alice 60"))
    words.publish(Text("arm alice"))
    there.run(0.01)
    assert there.node.governor.state == "ARMED" and not there.switch([JTC])["ok"]
    shell.close()
    assert there.switch([JTC])["ok"] and there.send(goal_of((2.0, away(0.1))))


def test_a_cancel_stops_the_arm_at_once_and_anybody_may():
    there = Acting()
    assert there.send(goal_of((1.0, away(0.2))))
    there.run(0.5)
    stranger, at = LoopbackTransport(there.node.transport.bus, "stranger"), there.arm.model.q[0]
    reply = stranger.call(f"{FOLLOW}/_action/cancel_goal", CANCEL, {})
    assert reply["return_code"] == 0 and bytes(reply["goals_canceling"][0]["goal_id"]["uuid"]) == bytes(
        [1, *[7] * 15]
    )
    assert there.statuses.latest().message.goals[0][2] == CANCELING
    there.run(0.3)
    assert (
        there.result()["status"] == CANCELED
        and there.node.governor.state == "ARMED"
        and 0 <= there.arm.model.q[0] - at < 0.03
    )
    assert (
        stranger.call(f"{FOLLOW}/_action/cancel_goal", CANCEL, {"goal_info": {"goal_id": id_of(1)}})[
            "return_code"
        ]
        == 3
    )
    assert (
        stranger.call(f"{FOLLOW}/_action/cancel_goal", CANCEL, {"goal_info": {"goal_id": id_of(9)}})[
            "return_code"
        ]
        == 2
    )


def test_a_goal_by_id_of_another_is_not_cancelled_and_one_accepted_before_a_time_is():
    there = Acting()
    assert there.send(goal_of((3.0, away())))
    there.run(0.11)
    stamp = there.statuses.latest().message.goals[0][1]
    for info, canceling in (
        ({"goal_id": id_of(5), "stamp": time_fields(stamp - 0.1)}, 0),
        ({"stamp": time_fields(stamp - 0.1)}, 0),
        ({"stamp": time_fields(stamp + 0.1)}, 1),
    ):
        assert (
            len(
                there.client.call(f"{FOLLOW}/_action/cancel_goal", CANCEL, {"goal_info": info})[
                    "goals_canceling"
                ]
            )
            == canceling
        )


def test_a_new_goal_takes_the_place_of_the_one_that_runs():
    there = Acting()
    assert there.send(goal_of((1.0, away(0.1))))
    there.run(0.4)
    assert there.send(goal_of((0.4, HOME)))
    assert there.result(1) == {
        "status": ABORTED,
        "result": {"error_code": -1, "error_string": "another goal took its place"},
    }
    there.run(0.9)
    assert there.result(2)["status"] == SUCCEEDED and np.abs(there.arm.model.q - HOME).max() < 0.02


def test_an_arm_that_the_governor_makes_slower_keeps_its_path_and_misses_a_deadline():
    there = Acting(speed=0.05)
    assert there.send(goal_of((0.4, away(0.1)), goal_time_tolerance=time_fields(0.2)))
    there.run(0.55)
    # no command was a step too far
    assert there.node.governor.state == "ACTIVE" and not there.node.governor.counts
    there.run(0.2)
    got = there.result()
    assert (
        got["status"] == ABORTED
        and got["result"]["error_code"] == -5
        and "joint1 is" in got["result"]["error_string"]
    )
    assert there.node.governor.state == "ARMED"
    assert there.send(goal_of((0.2, HOME)))
    there.run(1.5)  # without one it takes its time
    assert there.result()["status"] == SUCCEEDED


def test_a_slow_arm_does_not_cut_the_corners_of_a_trajectory():
    there, farthest = Acting(speed=0.05), 0.0
    assert there.send(goal_of((0.2, away(0.1)), (0.4, HOME)))
    for _ in range(25):
        there.run(0.1)
        farthest = max(farthest, there.arm.model.q[0])
    assert farthest > 0.06 and there.arm.model.q[0] < 0.05  # in 0.2 s it comes 0.02 rad far


def test_a_joint_off_its_path_beyond_its_tolerance_aborts_the_goal():
    there = Acting()
    # it lags by more
    assert there.send(goal_of((0.5, away(0.1)), path_tolerance=[{"name": "joint1", "position": 0.002}]))
    there.run(0.3)
    got = there.result()
    assert (
        got["status"] == ABORTED
        and got["result"]["error_code"] == -4
        and "joint1 is 0.002 rad off" in got["result"]["error_string"]
    )
    assert there.node.governor.state == "ARMED"


@pytest.mark.parametrize("what", ["stop", "lease", "disarm"])
def test_a_stop_the_end_of_the_lease_and_a_disarm_abort_the_goal(what):
    there = Acting()
    assert there.send(goal_of((1.0, away(0.1))))
    there.run(0.3)
    if what == "lease":
        there.client.publisher("safety_command", Text, "command").publish(Text("release tester"))
    else:
        there.client.call(f"safety/{what}", "std_srvs/srv/Trigger", {})
    there.run(0.2)
    got = there.result()
    assert got["status"] == ABORTED and there.node.governor.state in got["result"]["error_string"]
    at = there.arm.model.q.copy()
    there.run(0.2)
    assert np.abs(there.arm.model.q - at).max() < 2e-3


def test_a_trajectory_begins_at_its_stamp():
    there = Acting()
    stamp = there.node.stamp() + 0.3
    assert there.send(goal_of((0.5, away(0.1)), trajectory={"header": {"stamp": time_fields(stamp)}}))
    there.run(0.28)
    assert np.abs(there.arm.model.q - HOME).max() < 2e-3 and there.node.governor.state == "ARMED"
    there.run(0.3)
    assert there.arm.model.q[0] > 0.02


def test_a_client_as_crisp_py_homes_the_arm_and_goes_back_to_poses():
    """What crisp_py's Robot does: it streams its target pose all the time, lists, switches, sends a goal,
    waits for its result."""
    there = Acting(controller=CARTESIAN)
    target = there.client.publisher("target_pose", PoseStamped, "command")
    pose = [tuple(x.tolist()) for x in there.arm.pose()]

    def stream(seconds):
        for _ in range(round(seconds / 0.02)):
            target.publish(PoseStamped(there.node.transport.now(), "base", *pose))
            there.run(0.02)

    stream(0.1)
    assert there.node.governor.state == "ACTIVE"
    listed = there.client.call(
        "controller_manager/list_controllers", "controller_manager_msgs/srv/ListControllers", {}
    )["controller"]
    states = {r["name"]: r["state"] for r in listed}
    assert states[JTC] == "inactive"
    off = [n for n, s in states.items() if s == "active" and not n.endswith("broadcaster")]
    assert off == [CARTESIAN] and there.switch([JTC], off, strictness=1)["ok"]
    assert there.send(goal_of((0.6, away(0.1, 3))))
    stream(1.0)
    assert there.result()["status"] == SUCCEEDED and np.abs(there.arm.model.q - away(0.1, 3)).max() < 0.02
    pose = [tuple(x.tolist()) for x in there.arm.pose()]
    assert there.switch([CARTESIAN], [JTC], strictness=1)["ok"]
    stream(0.3)
    assert (
        there.node.governor.state == "ACTIVE"
        and np.abs(there.arm.model.q - away(0.1, 3)).max() < 0.03
        and not there.node.refused
    )


def test_ended_goals_are_remembered_for_a_time_and_never_more_than_so_many():
    there = Acting()
    for _ in range(MOST + 10):
        assert there.send(goal_of((0.1, HOME)))
    assert len(there.statuses.latest().message.goals) == MOST
    there.run(0.2)
    assert there.result()["status"] == SUCCEEDED and there.result(1)["status"] == 0
    there.number -= 1
    assert not there.send(goal_of((2.0, HOME))) and "accepted before" in there.refused()


# ---- the gripper -------------------------------------------------------------------------------------------


def test_the_gripper_closes_to_a_gap_stalls_on_what_it_holds_and_refuses_what_it_cannot_do():
    there = Acting(controller=JOINT)
    box = there.client.subscription(f"{GRIP}/_action/feedback", GripperFeedback, depth=100)
    assert there.send({"command": {"position": 0.03, "max_effort": 0.0}}, GRIP, GRIPPER)
    there.run(0.8)
    got = there.result(name=GRIP, kind=GRIPPER)
    assert (
        got["status"] == SUCCEEDED
        and got["result"]["reached_goal"]
        and got["result"]["position"] == pytest.approx(0.03, abs=0.003)
    )
    assert there.arm.opening == pytest.approx(0.375, abs=0.05) and box.take()
    assert there.send({"command": {"position": 0.0}}, GRIP, GRIPPER)
    for _ in range(750):  # something is between the fingers
        there.arm.data.qpos[there.arm._finger_q] = np.maximum(there.arm.data.qpos[there.arm._finger_q], 0.012)
        there.node.tick()
    got = there.result(name=GRIP, kind=GRIPPER)
    assert got["status"] == SUCCEEDED and got["result"]["stalled"] and not got["result"]["reached_goal"]
    for position in (-0.01, 0.2, math.nan):
        assert not there.send({"command": {"position": position}}, GRIP, GRIPPER)
        assert "gripper position must be in [0, 0.08]" in there.refused()
    there.client.call("safety/disarm", "std_srvs/srv/Trigger", {})
    there.node.refused.clear()
    assert (
        not there.send({"command": {"position": 0.08}}, GRIP, GRIPPER)
        and "the arm is DISARMED" in there.refused()
    )


# ---- pure --------------------------------------------------------------------------------------------------


def test_a_cubic_has_the_points_and_their_velocities_and_a_straight_one_the_speed():
    made = Trajectory(
        np.array([0.0, 1.0, 3.0]), np.array([[0.0], [1.0], [0.5]]), np.array([[0.0], [0.5], [0.0]])
    )
    assert [made.at(t)[0] for t in (0.0, 1.0, 3.0, 9.0)] == pytest.approx([0.0, 1.0, 0.5, 0.5])
    for t, v in ((1e-6, 0.0), (1.0 - 1e-6, 0.5), (1.0 + 1e-6, 0.5), (3.0 - 1e-6, 0.0)):
        assert (made.at(t + 1e-7)[0] - made.at(t - 1e-7)[0]) / 2e-7 == pytest.approx(v, abs=1e-3)
    line = straight(np.zeros(2), np.array([1.0, -0.2]), np.array([0.5, 0.5]))
    assert (
        line.duration == 2.0
        and line.at(1.0) == pytest.approx([0.5, -0.1])
        and seconds_of(time_fields(-0.25)) == -0.25
    )


def test_a_cubic_that_leaves_a_joints_range_between_its_points_is_refused():
    start, low = HOME.copy(), SIM.lower[3]
    q = HOME.copy()
    q[3] = low + 0.01
    goal = goal_of((1.0, q), (2.0, q), velocities=[[0, 0, 0, -0.8, 0, 0, 0], [0.0] * 7])
    from controllers.services import SERVICES
    from controllers.services import filled as fill

    whole = fill(SERVICES[f"{TRAJECTORY}_SendGoal"][0], {"goal": goal})["goal"]
    with pytest.raises(UserError, match="joint4 goes to"):
        read_trajectory(whole, SIM, start, 0.0, 0.02)


def test_a_tool_is_looked_at_all_the_way_not_at_the_points_alone():
    model = arm_model(SIM)
    model.place(HOME)
    x, y, z = model.pos
    made = Trajectory(np.array([0.0, 2.0]), np.stack([away(-0.8), away(0.8)]))
    with pytest.raises(UserError, match="outside the workspace"):
        check_tool(made, model, Limits(high=(x - 0.02, None, None)))
    check_tool(made, model, Limits(high=(x + 0.02, None, None)))
    with pytest.raises(UserError, match="tilted beyond"):
        check_tool(
            Trajectory(np.array([0.0, 2.0]), np.stack([HOME, away(0.7, 5)])),
            model,
            Limits(tilt=0.3, low=(None, None, None)),
        )


def test_a_trace_with_a_finished_motion_and_a_change_of_law_is_replayed():
    there, trace = Acting(armed=False), Trace()
    governor = there.node.governor
    governor.trace = trace
    trace.add("config", 0.0, {"limits": asdict(governor.limits), "robot": "sim"})
    there.order("arm")
    assert there.send(goal_of((0.1, away(0.01))))
    there.run(0.6)
    assert there.result()["status"] == SUCCEEDED and there.switch([JOINT])["ok"]
    there.run(0.01)
    kinds = {e["kind"] for e in trace.events}
    assert {"finish", "rebase", "command"} <= kinds
    events = list(trace.events)
    assert events[0]["kind"] == "config" and replay(events, SIM) is None


# ---- on the wires ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pair", [pytest.param(dds_pair, id="dds"), pytest.param(ros_pair, id="rclpy stand-in")]
)
def test_an_action_goes_over_a_wire_and_a_result_is_answered_when_the_goal_ends(pair):
    with pair() as (a, b, wait):
        taken, refused = [], []

        def accept(goal, source):
            if goal["command"]["position"] > 0.08:
                raise UserError("too wide")
            taken.append((goal["command"], source))

        server = ActionServer(
            a, GRIP, GRIPPER, GripperFeedback, accept, lambda name, why: refused.append((name, why)), {}
        )
        status = b.subscription(f"{GRIP}/_action/status", GoalStatuses, "latched")
        feedback = b.subscription(f"{GRIP}/_action/feedback", GripperFeedback)
        wait()
        send, said = (
            f"{GRIP}/_action/send_goal",
            {"position": 0.25, "effort": 1.0, "stalled": False, "reached_goal": True},
        )
        with Answering(a):
            assert not b.call(
                send, f"{GRIPPER}_SendGoal", {"goal_id": id_of(1), "goal": {"command": {"position": 0.2}}}
            )["accepted"]
            reply = b.call(
                send,
                f"{GRIPPER}_SendGoal",
                {"goal_id": id_of(2), "goal": {"command": {"position": 0.05, "max_effort": 3.0}}},
            )
            assert (
                reply["accepted"]
                and taken == [({"position": 0.05, "max_effort": 3.0}, b.identity)]
                and refused == [(GRIP, "too wide")]
            )
            server.feedback.publish(GripperFeedback(bytes(id_of(2)["uuid"]), 0.06, 0.5, False, True))
            wait()
            assert feedback.latest().message == GripperFeedback(
                bytes(id_of(2)["uuid"]), 0.06, 0.5, False, True
            )
            [(goal, _, state)] = status.latest().message.goals
            assert goal == bytes(id_of(2)["uuid"]) and state == EXECUTING
            with pytest.raises(UserError, match=r"did not answer within 0\.1 s"):
                b.call(
                    f"{GRIP}/_action/get_result", f"{GRIPPER}_GetResult", {"goal_id": id_of(2)}, timeout=0.1
                )
            server.finish(SUCCEEDED, said)
            got = b.call(f"{GRIP}/_action/get_result", f"{GRIPPER}_GetResult", {"goal_id": id_of(2)})
            assert got == {"status": SUCCEEDED, "result": said}
            assert (
                b.call(f"{GRIP}/_action/cancel_goal", CANCEL, {"goal_info": {"goal_id": id_of(2)}})[
                    "return_code"
                ]
                == 3
            )


def test_a_result_that_is_waited_for_comes_over_dds_when_the_goal_ends_and_waiting_is_bounded():
    with dds_pair() as (a, b, wait):
        from controllers.dds import PENDING

        server = ActionServer(a, GRIP, GRIPPER, GripperFeedback, lambda goal, source: None, print, {})
        wait()
        send, ask = f"{GRIP}/_action/send_goal", f"{GRIP}/_action/get_result"
        with Answering(a):
            assert b.call(send, f"{GRIPPER}_SendGoal", {"goal_id": id_of(1)})["accepted"]
            with pytest.raises(UserError, match="did not answer"):
                b.call(ask, f"{GRIPPER}_GetResult", {"goal_id": id_of(1)}, timeout=0.05)
        client = b.clients[ask]
        made = b._built(f"{GRIPPER}_GetResult", "Request", {"goal_id": id_of(1)})
        for _ in range(PENDING + 6):
            number = client.ask(made)
            wait_until(lambda: a.serve() or len(server.goals[bytes(id_of(1)["uuid"])].waiting) > 0)
            for _ in range(20):
                a.serve()
        assert len(a.pending) <= PENDING and len(server.goals[bytes(id_of(1)["uuid"])].waiting) <= 4
        assert client.reply(number) is None
        server.finish(SUCCEEDED, {"position": 0.5})
        assert wait_until(lambda: a.serve() or (client.reply(number)) is not None)


def wait_until(condition):
    import time

    end = time.monotonic() + 3.0
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.001)
    return true
