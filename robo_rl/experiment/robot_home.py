"""Bring an arm to a home pose of its file: by its own joint_trajectory_controller, watched, or by positions
through a governor here."""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import tyro

from robo_rl.errors import UserError, choose, in_range
from robo_rl.experiment.ros_options import RosOptions, check_dry_run

CONTROLLER = "joint_trajectory_controller"
PERIOD = 0.02  # s
WAIT = 5.0  # s for the arm's topics and services
LOST = 0.2  # s without joint states: the goal is cancelled
LATE = (1.5, 10.0)  # times the planned duration, and s more, until homing is given up
STEPS = 64  # of the way, at which the tool's speed is looked at
STILL = 0.005  # rad/s: at rest
BRAKE = 25  # periods after the end, to brake


@dataclass(frozen=True, kw_only=True)
class HomeOptions(RosOptions):
    """Bring an arm to a home pose of its file, slowly, within its box, speeds and forces. Ctrl-C stops it."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The robot": ("file", "model"),
        "The motion": ("pose", "by", "speed", "joint_speed", "dry_run", "reset"),
        "ROS 2": ("namespace", "domain", "interface", "security", "name", "lease"),
    }

    file: tyro.conf.Positional[str]
    """Preset or JSON file."""
    pose: str = "home"
    """home, or a name of the file's `cell.homes`."""
    by: Literal["", "goal", "positions"] = ""
    """goal: a trajectory for the robot's joint_trajectory_controller, watched from here; positions: joint
    positions, one a period, through a governor here; "": positions where the file's command is joint,
    forward_position or joint_trajectory, else goal."""
    speed: float = 0.1
    """Speed limit of the tool [m/s], up to 1.5 and to the file's own."""
    joint_speed: float = 0.2
    """Of the joints' speed limits, up to 1."""
    dry_run: bool = False
    """Say how far it is and how long it takes; command nothing."""
    reset: bool = False
    """Reset the arm's governor if it is STOPPED: after someone looked why it stopped."""
    model: str = ""
    """MJCF or URDF of a robot whose file names none."""
    name: str = ""
    """Name of the lease on the arm; "": one of this process."""
    lease: float = 2.0
    """Seconds after which the arm lets others in when it hears no more of this process, 0.5 to 3600."""

    def __post_init__(self) -> None:
        in_range("--speed", self.speed, 0, 1.5, open_low=True)
        in_range("--joint-speed", self.joint_speed, 0, 1, open_low=True)
        super().__post_init__()
        check_dry_run(self.dry_run, reset=self.reset)
        in_range("--lease", self.lease, 0.5, 3600)


def home_pose(robot, name: str) -> np.ndarray:
    """Joint angles [n] [rad] of a home pose by name."""
    homes = robot.cell.homes | {"home": robot.home}
    return np.array(homes[choose(f"home pose of robot {robot.name}", name, homes)])


def plan(robot, model, limits, start: np.ndarray, goal: np.ndarray, speed: float, share: float):
    """The straight way in joints from start to goal [n] [rad], no joint faster than `share` of its limit, the
    tool no faster than `speed` [m/s]. model: a spare one. UserError: the tool would leave the workspace on
    the way."""
    from controllers.trajectory import check_joints, check_tool, straight
    from controllers.trajectory_controller import REACHED

    made = straight(start, goal, share * np.array(robot.velocity))
    places = []
    for t in np.linspace(0.0, made.duration, STEPS):
        model.place(made.at(float(t)))
        places.append(np.array(model.pos))
    fastest = float(np.linalg.norm(np.diff(places, axis=0), axis=1).max()) * (STEPS - 1) / made.duration
    made = replace(
        made,
        times=made.times * max(1.0, fastest / speed),
        tolerance={"path": np.full(len(goal), np.inf), "goal": np.full(len(goal), REACHED)},
    )
    check_joints(made, robot)
    check_tool(made, model, limits)
    return made


def home_robot(
    options: HomeOptions,
    log: Callable[[str], None],
    warn: Callable[[str], None],
    stop: list[int],
    wire=None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Do it. stop: not empty once the user asked for the end; wire, sleep: for an arm that is not on DDS in
    real time.

    UserError: what is missing, why it was refused, or why it ended before the arm was there."""
    from controllers.model import arm_model
    from controllers.robot import load_robot
    from robo_rl.experiment.deploy import check_speed, limits_of
    from robo_rl.experiment.wire import connect

    robot = load_robot(options.file)
    goal = home_pose(robot, options.pose)
    check_speed(options.speed, robot)
    if not options.dry_run:
        robot.need_limits()
    model = arm_model(robot, options.model)
    made_here = wire is None
    wire = wire or connect(
        "robo_rl_home", options.domain, options.interface, options.namespace, security=options.security
    )
    try:
        homing = Homing(options, robot, model, limits_of(robot, options.speed), wire, sleep, stop, log, warn)
        homing.run(goal)
    finally:
        if made_here:
            wire.close()


class Homing:
    """One way home. `run` is all of it."""

    def __init__(self, options: HomeOptions, robot, model, limits, wire, sleep, stop: list[int], log, warn):
        from controllers.lease import LeaseClient
        from controllers.model import ArmModel
        from controllers.node import SAFETY_STATE
        from controllers.observation import ObservationBuffer
        from controllers.transport import Text
        from robo_rl.experiment.safety_client import SafetyClient

        self.options, self.robot, self.model, self.limits, self.wire = options, robot, model, limits, wire
        self.sleep, self.stop, self.log, self.warn = sleep, stop, log, warn
        self.spare = ArmModel(model.spec, robot.joints, robot.site)
        self.buffer = ObservationBuffer(robot, wire, ("ee_x",))
        self.lease = LeaseClient(
            wire, options.name or f"home-{socket.gethostname()}-{os.getpid()}", options.lease
        )
        self.safety = SafetyClient(
            wire, wire.subscription(SAFETY_STATE, Text, "latched", depth=8), self.lease, stop, sleep
        )
        self.governed = False
        streamed = robot.cell.command in ("joint", "forward_position", "joint_trajectory")
        self.by = options.by or ("positions" if streamed else "goal")

    def run(self, goal: np.ndarray) -> None:
        """Measure, plan, take the lease, move, give it up."""
        buffer, safety = self.buffer, self.safety
        safety.wait_until(lambda: not buffer.missing(), WAIT)
        if missing := buffer.missing():
            raise UserError(
                f"nothing came on {', '.join(missing)}: is the arm there, in this domain?"
                + "".join(f" {c}" for c in self.wire.complaints())
            )
        self.governed = safety.is_governed()
        buffer.update(self.model)
        made = plan(
            self.robot,
            self.spare,
            self.limits,
            self.model.q.copy(),
            goal,
            self.options.speed,
            self.options.joint_speed,
        )
        far = float(np.abs(goal - self.model.q).max())
        self.log(
            f"{self.robot.name}: {far:.3f} rad from {self.options.pose}, {made.duration:.1f} s by {self.by}"
            + (", dry run: nothing is commanded" if self.options.dry_run else "")
        )
        if self.options.dry_run:
            return
        try:
            if self.governed:
                safety.arm(self.options.reset, -1, self.log)
            if self.by == "goal":
                self.by_goal(made)
            else:
                self.by_positions(made)
        finally:
            if self.governed:
                safety.give_up()
        self.log(
            f"{self.robot.name} is at {self.options.pose}, {float(np.abs(goal - self.model.q).max()):.4f} "
            "rad off"
        )

    # ---- by the robot's own controller ---------------------------------------------------------------------

    def by_goal(self, made) -> None:
        """Send a goal and watch the arm; a fault here cancels it. UserError: it ended before the arm was
        there."""
        from controllers.action_client import ActionClient
        from controllers.action_messages import time_fields
        from controllers.action_types import TRAJECTORY
        from controllers.actions import SUCCEEDED

        before = self.activate()
        client = ActionClient(self.wire, f"{CONTROLLER}/follow_joint_trajectory", TRAJECTORY)
        point = {"positions": made.points[-1].tolist(), "time_from_start": time_fields(made.duration)}
        if not client.send({"trajectory": {"joint_names": list(self.robot.joints), "points": [point]}}, WAIT):
            self.sleep(0.05)
            raise UserError("; ".join(["the goal was refused", *self.lease.refusals()]))
        end, fault = self.wire.now() + LATE[0] * made.duration + LATE[1], ""
        while client.is_running and not fault:
            self.sleep(PERIOD)
            fault = self.watch(end)
        if fault:
            client.cancel()
            self.safety.wait_until(lambda: not client.is_running, 2.0)
            raise UserError(f"{fault}; the goal was cancelled")
        status, result = client.result()
        self.buffer.update(self.model)
        if status != SUCCEEDED:
            raise UserError(f"the arm did not come home: {result['error_string'] or result['error_code']}")
        if before:
            self.safety.wait_until(self.rests, 2.0)
            self.switch(before, [CONTROLLER])

    def rests(self) -> bool:
        """Whether no joint moves."""
        self.buffer.update(self.model)
        return float(np.abs(self.model.dq).max()) < STILL

    def watch(self, end: float) -> str:
        """Why the motion must end; "" where it may go on."""
        from controllers.contracts import State, measured_fault, state_fault

        now, m = self.wire.now(), self.model
        if self.governed:
            self.lease.renew(now)
            if not self.lease.ours():
                return "the lease on the arm is another's now, or ended"
        try:
            self.buffer.update(m)
        except UserError as e:  # the motion ends in order
            return str(e)
        state = State(
            tuple(m.q.tolist()),
            tuple(m.dq.tolist()),
            tuple(m.pos),
            tuple(m.quat),
            tuple((m.jac @ m.dq).tolist()),
            self.buffer.felt(),
        )
        if self.stop:
            return "you asked for the end"
        if now - self.buffer.seen > LOST:
            return f"no joint states for {now - self.buffer.seen:.2f} s"
        if now > end:
            return "it takes longer than planned"
        fault = state_fault(state, len(self.robot.joints)) or measured_fault(state, self.limits, self.robot)
        return fault[1] if fault else ""

    def activate(self) -> list[str]:
        """See that the trajectory controller holds the arm -> the controllers that held it before. UserError:
        it cannot."""
        ask = "controller_manager/{}_controller", "controller_manager_msgs/srv/{}Controller"
        rows = self.wire.call(
            "controller_manager/list_controllers", "controller_manager_msgs/srv/ListControllers", {}, WAIT
        )["controller"]
        states = {r["name"]: r["state"] for r in rows}
        if states.get(CONTROLLER) == "active":
            return []
        for verb, unless in (
            ("load", CONTROLLER in states),
            ("configure", states.get(CONTROLLER) == "inactive"),
        ):
            if (
                not unless
                and not self.wire.call(
                    ask[0].format(verb), ask[1].format(verb.title()), {"name": CONTROLLER}, WAIT
                )["ok"]
            ):
                raise UserError(
                    f"the robot cannot {verb} {CONTROLLER}: see that its launch file has it, or home it --by "
                    "positions"
                )
        wanted = {f"{j}/" for j in self.robot.joints}
        holding = [
            r["name"]
            for r in rows
            if r["state"] == "active" and any(c.startswith(tuple(wanted)) for c in r["claimed_interfaces"])
        ]
        self.switch([CONTROLLER], holding)
        return holding

    def switch(self, on: list[str], off: list[str]) -> None:
        from controllers.services import STRICT

        request: dict[str, Any] = {
            "activate_controllers": on,
            "deactivate_controllers": off,
            "strictness": STRICT,
        }
        got = self.wire.call(
            "controller_manager/switch_controller",
            "controller_manager_msgs/srv/SwitchController",
            request,
            WAIT,
        )
        if not got["ok"]:
            raise UserError(
                f"the robot does not switch to {', '.join(on)}: {got['message'] or 'it says not why'}"
            )

    # ---- by positions --------------------------------------------------------------------------------------

    def by_positions(self, made) -> None:
        """Joint positions through a governor of this side. UserError: the governor held the arm, or it was
        not there in time."""
        from controllers.contracts import State
        from controllers.governor import ACTIVE, ARMED, Governor
        from controllers.output import Output
        from controllers.trajectory_follower import TrajectoryFollower

        m, governor = self.model, Governor(self.limits, self.robot)
        command = self.robot.cell.command if self.robot.cell.command not in ("", "pose") else "joint"
        output = Output(command, self.robot, self.wire, m, PERIOD)
        follower = TrajectoryFollower(governor, self.spare, made, "home")

        def measure() -> None:
            fresh = False
            with suppress(UserError):  # a state of no use: without one the governor stops
                fresh = self.buffer.update(m)
            if fresh:
                governor.measure(
                    State(
                        tuple(m.q.tolist()),
                        tuple(m.dq.tolist()),
                        tuple(m.pos),
                        tuple(m.quat),
                        tuple((m.jac @ m.dq).tolist()),
                        self.buffer.felt(),
                    ),
                    self.wire.now(),
                )

        self.safety.wait_until(lambda: measure() or governor.measured is not None, 1.0)
        governor.arm(self.wire.now())
        end, fault, braking = self.wire.now() + LATE[0] * made.duration + LATE[1], "", 0
        is_home, due = False, self.wire.now()
        while braking < BRAKE:
            measure()
            now = self.wire.now()
            if not braking and governor.state in (ARMED, ACTIVE):
                fault = self.watch(end)
                is_home = follower.is_there(m.q, m.dq)
                if not fault and not is_home:
                    follower.step(now, PERIOD, m.q)
                else:
                    governor.hold(now, "command_age", fault or "home")
            braking += governor.state not in (ARMED, ACTIVE)
            output.send(self.wire.stamp(), governor.tick(now, PERIOD), m)
            due += PERIOD
            self.sleep(max(due - self.wire.now(), 0.0))
        if not is_home:
            raise UserError(f"the arm did not come home: {fault or governor.reason}")
