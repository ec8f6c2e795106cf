"""`robo_rl robot home FILE`: an arm brought to a pose of its file, in lockstep with the simulated arm."""

from dataclasses import replace

import numpy as np
import pytest
from test_controllers_cell import SIM, WHOLE, write
from test_controllers_manager import CARTESIAN, JOINT, There

from controllers.limits import Limits
from controllers.model import arm_model
from controllers.transport import Bus, JointState, LoopbackTransport, Mailbox, Text
from robo_rl.cli import main, parse_arguments
from robo_rl.errors import UserError
from robo_rl.experiment.robot_home import HomeOptions, home_pose, home_robot, plan

HOME = np.array(SIM.home)


def homed(there, stop=None, wire=None, **options):
    """What was said, and the error or None, of a homing on the arm; time passes while it waits."""
    said = []
    wire = wire or LoopbackTransport(there.node.transport.bus, "home")
    try:
        home_robot(
            HomeOptions(**{"file": "sim", "speed": 0.25} | options),
            said.append,
            said.append,
            [] if stop is None else stop,
            wire,
            lambda seconds: there.run(max(seconds, 0.001)),
        )
    except UserError as e:
        return said, str(e)
    return said, None


def away(by=0.1):
    q = HOME.copy()
    q[0] += by
    return q


def there_at(q, **kw):
    there = There(**kw)
    there.arm.reset(q, {}, opening=1.0)
    there.run(0.01)
    return there


@pytest.mark.parametrize(("by", "controller"), [("goal", "cartesian"), ("positions", "joint")])
def test_the_arm_comes_home_and_is_given_up_as_it_was_found(by, controller):
    there = there_at(away(), controller=controller)
    said, error = homed(there, by=by)
    assert error is None and np.abs(there.arm.model.q - HOME).max() < 0.02, said
    assert (
        "0.100 rad from home" in said[0]
        and f"by {by}" in said[0]
        and said[-1].startswith("sim is at home, 0.0")
    )
    assert there.active() == [CARTESIAN if controller == "cartesian" else JOINT]
    there.run(0.05)
    assert there.node.governor.state == "DISARMED" and not there.node.lease.holder(there.node.transport.now())


def test_a_controller_that_is_not_loaded_is_loaded_and_configured():
    there = there_at(away(0.02))
    assert there.client.call(
        "controller_manager/unload_controller",
        "controller_manager_msgs/srv/UnloadController",
        {"name": "joint_trajectory_controller"},
    )["ok"]
    assert homed(there)[1] is None and there.active() == [JOINT]


def test_a_dry_run_says_how_far_and_how_long_and_a_named_pose_is_the_files(tmp_path):
    there = there_at(away())
    file = write(
        tmp_path,
        WHOLE
        | {
            "low": [0.1, -0.6, 0.0],
            "high": [0.9, 0.6, 0.9],
            "homes": {"left": away(0.3).tolist()},
            "without": {"force": "the arm is simulated here"},
            "force": None,
        },
        name="sim",
    )
    said, error = homed(there, file=file, pose="left", dry_run=True, speed=0.1)
    assert error is None and len(said) == 1 and "0.200 rad from left" in said[0] and "dry run" in said[0]
    assert np.abs(there.arm.model.q - away()).max() < 1e-3 and there.node.governor.state == "DISARMED"
    assert "unknown home pose of robot sim 'right'" in homed(there, file=file, pose="right")[1]


def test_the_plan_keeps_to_the_tools_speed_the_joints_speed_and_the_box():
    model = arm_model(SIM)
    goal, limits = away(0.5), Limits()
    quick = plan(SIM, model, limits, HOME, goal, 1.5, 0.2)
    assert quick.duration == pytest.approx(0.5 / (0.2 * SIM.velocity[0]))
    slow = plan(SIM, model, limits, HOME, goal, 0.05, 0.2)
    model.place(HOME)
    radius = float(np.hypot(*model.pos[:2]))
    assert slow.duration == pytest.approx(0.5 * radius / 0.05, rel=0.02)
    with pytest.raises(UserError, match="outside the workspace"):
        plan(SIM, model, Limits(high=(None, 0.1, None)), HOME, goal, 0.1, 0.2)
    assert home_pose(replace(SIM, home=tuple(goal)), "home")[0] == 0.5


@pytest.mark.parametrize("by", ["goal", "positions"])
@pytest.mark.parametrize("what", ["ctrl-c", "e-stop", "another"])
def test_what_ends_it_on_the_way_stops_the_arm_and_is_said(by, what):
    there, stop = there_at(away(0.2)), []
    wire, plain = LoopbackTransport(there.node.transport.bus, "home"), there.run

    def run(seconds):
        plain(seconds)
        if there.node.governor.state == "ACTIVE" and there.arm.model.q[0] < 0.18 and not stop:
            stop.append(0) if what == "ctrl-c" else None
            if what == "e-stop":
                there.client.call("estop", "std_srvs/srv/SetBool", {"data": True})
            elif what == "another":
                there.node.lease.revoke()
                there.client.publisher("safety_command", Text, "command").publish(Text("claim bob 60"))
            there.run = plain

    there.run = run
    error = homed(there, stop, wire, by=by)[1]
    there.run(0.2)
    assert error and {"ctrl-c": "you asked for the end", "another": "lease"}.get(what, "") in error
    at = there.arm.model.q.copy()
    there.run(0.1)
    assert (
        np.abs(there.arm.model.q - at).max() < 2e-3 and at[0] > 0.1 and there.node.governor.state != "ACTIVE"
    )


class LosesJoints(LoopbackTransport):
    """A wire on which no joint states come any more once `lost`."""

    lost = False

    def subscription(self, topic, kind, quality="state", depth=1):
        box = super().subscription(topic, kind, quality, depth)
        return Mailbox(depth, lambda: [] if self.lost and kind is JointState else box.take(), box.sources)


def test_a_goal_is_cancelled_when_the_arm_can_no_longer_be_watched():
    there = there_at(away(0.2))
    wire, plain = LosesJoints(there.node.transport.bus, "home"), there.run

    def run(seconds):
        plain(seconds)
        wire.lost = there.arm.model.q[0] < 0.18

    there.run = run
    assert "no joint states for 0.2" in homed(there, wire=wire, by="goal", speed=0.1)[1]
    at = there.arm.model.q[0]
    there.run(0.2)
    assert at > 0.05 and abs(there.arm.model.q[0] - at) < 2e-3


def test_a_refused_goal_says_why_and_a_robot_that_is_not_there_is_one_line():
    there = there_at(away())
    there.node.governor.stop(there.node.transport.now())
    said, error = homed(there)
    assert "STOPPED" in error and "--reset" in error and not said[1:]
    assert homed(there, reset=True)[1] is None
    clock = [0.0]
    with pytest.raises(UserError, match="nothing came on joint_states: is the arm there"):
        home_robot(
            HomeOptions(file="sim"),
            print,
            print,
            [],
            LoopbackTransport(Bus(lambda: clock[0]), "home"),
            lambda seconds: clock.__setitem__(0, clock[0] + max(seconds, 0.01)),
        )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["home", "sim", "--speed", "2"], "--speed must be in (0, 1.5]"),
        (["home", "sim", "--joint-speed", "0"], "--joint-speed must be"),
        (["home", "nobody"], "unknown robot 'nobody'"),
        (["home", "fr3", "--model", "no.urdf"], "robot fr3 is not armed"),
        (["hom"], "unknown robot command"),
        (["home", "sim", "--pose", "up"], "unknown home pose"),
        (["home", "ur5e", "--dry-run"], "ships no model"),
    ],
)
def test_wrong_use_of_the_command_is_one_line(argv, says, capsys):
    with pytest.raises(SystemExit) as e:
        main(["robot", *argv])
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count("\n") == 1
    assert parse_arguments(["robot", "home", "sim"])[1].pose == "home"
