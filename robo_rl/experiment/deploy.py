"""Run a run's policy on an arm: over a transport in real time, or on a simulated arm in lockstep in this
process."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from robo_rl.child import end, line_with
from robo_rl.errors import UserError, choose, in_range
from robo_rl.experiment import planning
from robo_rl.experiment.deploy_recorder import DeployRecorder
from robo_rl.experiment.policy_device import check_policy_device
from robo_rl.experiment.safety_client import WAIT, SafetyClient
from robo_rl.signals import asked_to_stop

TRAINED = "sim"  # the robot whose joints a run's state has
SIM_TICK = 0.001  # s, of the simulated arm
LEASE_LOST = "the lease on the arm is another's now, or ended"
SERVER_STARTS = 300.0  # s for a policy in a process of its own: a large one is read from disk
BRAKE_PERIODS = 25  # control periods after the end, to brake


@dataclass(frozen=True, kw_only=True)
class DeployOptions(planning.PlanningOptions):
    """Run the policy of a run on an arm. It stops the arm when its time is over, at Ctrl-C and when anything
    is lost."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The policy": (
            "checkpoint",
            "task",
            "policy",
            "lerobot_python",
            "lerobot_cameras",
            "execute",
            "token",
            "instruction",
            "seed",
            "device",
            "chunking",
            "plan_in",
            "plan_candidates",
            "plan_rounds",
            "plan_ahead",
        ),
        "The arm": ("robot", "command", "transport", "model", "start"),
        "Limits": ("speed", "seconds", "dry_run", "reset", "go_on"),
        "ROS 2": ("namespace", "domain", "interface", "security", "name", "lease"),
        "What is recorded": ("record", "bag", "video"),
        "What a data set without a simulator did not say": (
            "rate",
            "columns",
            "state_columns",
            "units",
            "state_units",
            "gripper",
        ),
    }

    run: tyro.conf.Positional[str]
    """Run folder, or a checkpoint folder inside one."""
    robot: str = "sim"
    """Preset or JSON file."""
    checkpoint: str = "best"
    """best, last, sft, or the name of a folder below checkpoints/."""
    command: str = ""
    """pose: tool poses, for a Cartesian controller; joint: joint targets, for joint_impedance_controller;
    forward_position or joint_trajectory: joint positions for ros2_control's controllers of those names; "":
    as the robot's file says, else joint for --robot sim and pose for others."""
    chunking: Literal["naive", "blend", "rtc", "trained"] = "blend"
    """Where two chunks meet while inference takes time: naive takes the new one as it is, blend spreads the
    step, rtc draws the new one to agree with what of the old one will have run (flow policies), trained
    likewise by a policy taught with --policy.commit."""
    dry_run: bool = False
    """Compute everything, command nothing: poses go to preview/target_pose."""
    transport: str = "dds"
    """dds, or inprocess: a simulated arm of its own in lockstep."""
    policy: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = ""
    """A policy that robo_rl serve answers elsewhere; "process": in a process of its own here; lerobot:FOLDER,
    a policy that LeRobot saved, in the place of the run's; "": in this process."""
    lerobot_python: str = ""
    """With --policy lerobot:FOLDER: the Python of an environment that has LeRobot; "":
    ROBO_RL_LEROBOT_PYTHON."""
    lerobot_cameras: str = ""
    """With --policy lerobot:FOLDER: which of its cameras is which of ours, NAME=CAMERA with commas between,
    where names differ."""
    execute: int = 0
    """With --policy lerobot:FOLDER: rows of its chunks that are executed; 0: as many as the run's policy."""
    token: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """File with the token that robo_rl serve names; "": RUN/serve.token. ROBO_RL_TOKEN goes before it."""
    speed: float = 0.25
    """Speed limit of the tool [m/s], up to 1.5; below 1.0 a policy of sims/mujoco runs in slow motion."""
    seconds: float = 10.0
    """Time limit [s], up to 86400."""
    reset: bool = False
    """Reset the arm's governor if it is STOPPED: after someone looked why it stopped."""
    start: int = -1
    """Reset a simulated arm's scene to this start, 0 or above; -1: leave it as it is (--transport inprocess:
    start 0)."""
    namespace: str = ""
    """Prefix of all topics."""
    domain: Annotated[int, tyro.conf.arg(metavar="ID")] = -1
    """ROS domain, 0 to 232; -1: ROS_DOMAIN_ID, else 0."""
    interface: str = ""
    """Network interface; "": loopback. One without multicast, as a tunnel, with the other computers'
    addresses: wg0,10.0.0.2."""
    security: str = ""
    """Folder of this node's keys, made by `robot keys`: DDS Security; "": as ROS's own variables say, else
    none."""
    name: str = ""
    """Name of the lease on the arm, which is taken at the start and given up at the end; the same name takes
    over at once, another waits until it ends. "": one of this process."""
    lease: float = 2.0
    """Seconds after which the arm lets others in when it hears no more of this process, 0.5 to 3600."""
    model: str = ""
    """MJCF or URDF of a robot whose preset ships none."""
    task: str = ""
    """Of a run over several tasks the one to do; "": the run's own."""
    instruction: str = ""
    """Language instruction, for a policy that takes one; "": the task's own, where it has one."""
    record: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """Append the observations and actions, one episode, to this LeRobot v3 data set."""
    bag: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """Write the messages that the bridge receives and sends to a new rosbag2 (MCAP)."""
    video: Annotated[str, tyro.conf.arg(metavar="PATH.mp4")] = ""
    """Film it, also a dry run: the simulated arm's whole workspace, other arms by their front camera."""
    go_on: bool = False
    """Go on after the task's own rule says success; the policy has never seen what follows."""
    seed: int = 0
    """Seed of the policy's sampling, from 0."""
    device: str = "cpu"
    """cpu, cuda or cuda:N: where the policy computes, in this process or with --policy process in its own."""
    rate: Annotated[float, tyro.conf.arg(metavar="HZ")] = 0.0
    """Actions a second, to 1000; 0: as the data set says."""
    columns: str = ""
    """What each number of the action is, in order: a joint's name, gripper, dx dy dz rx ry rz (moves of the
    tool), - (unused); "": by its name."""
    state_columns: str = ""
    """The same of the state: also JOINT_velocity, x y z roll pitch yaw (of the tool), - (always 0)."""
    units: str = ""
    """Of the action, as robo_rl data label takes them."""
    state_units: str = ""
    """Of the state; "": those of the action."""
    gripper: Annotated[str, tyro.conf.arg(metavar="CLOSED,OPEN")] = ""
    """The gripper's number closed and open; "": 0,1 in unit 1 and 0,100 in %."""

    def __post_init__(self) -> None:
        choose("--command", self.command, ("", "pose", "joint", "forward_position", "joint_trajectory"))
        choose("transport", self.transport, ("dds", "inprocess"))
        in_range("--speed", self.speed, 0, 1.5, open_low=True)
        in_range("--rate", self.rate, 0, 1000)
        in_range("--seconds", self.seconds, 0, 86400, open_low=True)
        in_range("--start", self.start, -1, 2**33)
        in_range("--domain", self.domain, -1, 232)
        in_range("--seed", self.seed, 0, 2**31)
        in_range("--lease", self.lease, 0.5, 3600)
        in_range("--execute", self.execute, 0, 1024)
        planning.check(self)
        check_policy_device(self.device)
        if self.device != "cpu" and self.policy not in ("", "process"):
            raise UserError(
                f"--device is of a policy that computes here, and --policy {self.policy} does so elsewhere: "
                "robo_rl serve has a --device too"
            )
        if self.plan_in and (self.policy or self.chunking in ("rtc", "trained")):
            raise UserError(
                "--plan-in tries chunks of the run's policy in this process, and gives no rows that agree "
                "with others: it goes without --policy, and with --chunking blend or naive"
            )
        foreign = self.policy.startswith("lerobot:")
        for name in ("lerobot_python", "lerobot_cameras", "execute"):
            if getattr(self, name) and not foreign:
                raise UserError(f"--{name.replace('_', '-')} goes with --policy lerobot:FOLDER")
        if foreign and self.chunking in ("rtc", "trained"):
            raise UserError(
                f"--chunking {self.chunking} asks for rows that agree with others, which LeRobot's policies "
                "are not asked for: use blend or naive"
            )


@dataclass(frozen=True, slots=True)
class DeployResult:
    """How a deployment ended. success_at: when the task was done [s], None if it was not; state, reason: of
    the governor."""

    seconds: float
    success_at: float | None
    state: str
    reason: str

    @property
    def held(self) -> bool:
        """Whether the governor ended it."""
        return self.state in ("HOLD", "STOPPED")


def choose_actor(options: DeployOptions):
    """(who acts, the run's config, ObsSpec): the run's policy, or a LeRobot one in its place. UserError: it
    does not act so."""
    if options.policy.startswith("lerobot:"):
        from robo_rl.experiment.lerobot_policy import lerobot_actor

        return lerobot_actor(
            options.run, options.checkpoint, options.task, options.instruction, options.execute
        )
    if options.plan_in:
        return planning.load_planned_actor(
            options,
            options.run,
            options.checkpoint,
            options.task,
            options.instruction,
            options.seed,
            options.device,
        )
    from robo_rl.experiment.policy_server import load_actor, remote_actor

    if options.policy:
        act, config, spec = remote_actor(options.run, options.checkpoint, options.instruction, options.task)
    else:
        act, config, spec = load_actor(
            options.run,
            options.checkpoint,
            options.seed,
            options.instruction,
            options.task,
            device=options.device,
            most=1,
        )
    return act.choose(options.chunking), config, spec


def open_policy(options: DeployOptions, act, period: float):
    """(policy client, the server process that it started or None); act: the policy in this process, period:
    of control [s]."""
    from controllers.chunking import PATIENCE
    from controllers.policy_client import InProcessPolicy
    from controllers.remote import RemotePolicyClient, read_token

    if not options.policy:
        return InProcessPolicy(act), None
    if options.policy.startswith("lerobot:"):
        from robo_rl.experiment.lerobot_policy import LeRobotClient, start_policy

        policy = start_policy(
            options.policy,
            options.lerobot_python,
            options.lerobot_cameras,
            act.spec,
            act.execute,
            options.seed,
        )
        return LeRobotClient(policy, act.instruction, PATIENCE * period), None
    if options.policy != "process":
        from robo_rl.experiment.folder import pick_checkpoint
        from robo_rl.experiment.policy_server import TOKEN_FILE

        token_file = options.token or pick_checkpoint(Path(options.run), options.checkpoint)[0] / TOKEN_FILE
        return RemotePolicyClient(options.policy, read_token(token_file), PATIENCE * period), None
    token = secrets.token_urlsafe(32)
    server = subprocess.Popen(
        [sys.executable, "-m", "robo_rl", *serve_words(options)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"ROBO_RL_TOKEN": token},
    )
    line = line_with(server, " on ", SERVER_STARTS)
    if not line:
        end(server)
        raise UserError("the policy's process did not start; try: robo_rl serve " + options.run)
    return RemotePolicyClient(line.rsplit(" on ", 1)[1].strip(), token.encode(), PATIENCE * period), server


def serve_words(options: DeployOptions) -> list[str]:
    """The command line of the server of `--policy process`."""
    told = {
        name: str(getattr(options, name)) for name in ("seed", "checkpoint", "instruction", "task", "device")
    }
    words = [word for name, value in told.items() for word in (f"--{name}", value)]
    return ["serve", options.run, "--port", "0", *words]


def deploy(
    options: DeployOptions, log: Callable[[str], None] = print, warn: Callable[[str], None] = print
) -> DeployResult:
    """Run the policy until it succeeds, its time is over or something is lost. log, warn: receive one line
    each.

    UserError: the policy does not fit the robot, or the robot or the policy was lost (the arm then brakes and
    holds).
    """
    from robo_rl.experiment.folder import pick_checkpoint

    # reports a wrong name before torch is loaded
    folder, _ = pick_checkpoint(Path(options.run), options.checkpoint)
    from controllers.model import arm_model
    from controllers.robot import load_robot
    from robo_rl.experiment.arm import policy_interface
    from robo_rl.experiment.deploy_data import data_interface, refuse_stated

    robot = load_robot(options.robot)
    check_speed(options.speed, robot)
    act, config, spec = choose_actor(options)
    if config.sim == "none":
        task = data_interface(
            options, folder, config, spec, robot, limits_of(robot, options.speed).speed, not options.policy
        )
    else:
        refuse_stated(options)
        task = policy_interface(config, spec)
    model = arm_model(robot, options.model)
    name = "" if config.sim == "none" else config.task or "pick_cube"
    recorder = DeployRecorder(
        name,
        robot,
        task,
        record=options.record,
        bag=options.bag,
        video=options.video,
        instruction=options.instruction,
        go_on=options.go_on,
        dry_run=options.dry_run,
        log=log,
        warn=warn,
    )
    client, server = open_policy(options, act, task.period)
    try:
        run = deploy_in_process if options.transport == "inprocess" else deploy_on_wire
        bridge, seconds = run(options, robot, task, model, act, client, recorder, log, warn)
        return _report(options, bridge, recorder, seconds, log)
    finally:
        client.close()
        if server:
            end(server)
        recorder.close()


def check_gains(wire, robot, dry_run: bool, warn) -> None:
    """UserError: the arm's controller is not the one of the robot's file, or has other gains; a dry run says
    so alone."""
    from controllers.readback import gain_faults

    try:
        faults = gain_faults(wire, robot, WAIT)
    except UserError as e:
        faults = [f"the gains cannot be read back: {e}"]
    if faults and not dry_run:
        raise UserError("; ".join(faults) + ": nothing moves until the file and the arm agree")
    for fault in faults:
        warn(fault)


def check_speed(speed: float, robot) -> None:
    """UserError: --speed is above what the robot's cell allows."""
    if robot.cell.speed is not None and speed > robot.cell.speed[0]:
        raise UserError(
            f"--speed {speed:g} is above the {robot.cell.speed[0]:g} m/s that the file of robot {robot.name} "
            "allows"
        )


def limits_of(robot, speed: float):
    """Limits of the bridge's governor: the robot's cell, at a tool speed [m/s]."""
    from controllers.pace import limits_at
    from robo_rl.experiment.arm import ACTION_SCALE

    limits = limits_at(speed, ACTION_SCALE, frame=robot.base_frame, **robot.cell.limits())
    turn = limits.speed[1] if robot.cell.speed is None else min(limits.speed[1], robot.cell.speed[1])
    return replace(limits, speed=(limits.speed[0], turn))


def twin_of(robot, model, task, log):
    """The arm that the run was trained on, where the robot's joints are not its; None where they are, or the
    state has none."""
    from controllers.data_interface import DataInterface
    from controllers.robot import load_robot
    from controllers.twin import Twin, same_joints

    trained = load_robot(TRAINED)
    if robot.name == TRAINED or isinstance(task, DataInterface):
        return None
    if not any(n.startswith("joint") for n in task.state_names) or same_joints(model, robot, trained):
        return None
    log(
        f"{robot.name} has other joints than the arm of the run: the policy sees that arm's, with its tool "
        "where this one's is"
    )
    return Twin(trained)


def deploy_in_process(
    options: DeployOptions, robot, task, model, act, client, recorder: DeployRecorder, log, warn
):
    """(bridge, simulated seconds) of a simulated arm in this process, in lockstep on simulated time."""
    from controllers.data_interface import DataInterface
    from controllers.transport import LoopbackTransport
    from robo_rl.experiment.arm import make_lockstep_arm, start_placement
    from robo_rl.experiment.cameras import SceneCameras
    from robo_rl.experiment.deploy_data import announce, check_views, whole_periods

    scene = "pick_cube"
    if isinstance(task, DataInterface):
        task, scene = whole_periods(task, SIM_TICK), "pick_cube" if robot.name == TRAINED else "none"
        check_views(task)
    body = make_lockstep_arm(
        robot, task, options.speed, scene, dry_run=options.dry_run, wrap_transport=recorder.wrap_transport
    )
    if task.views:
        body.make_cameras = lambda bus: SceneCameras(
            LoopbackTransport(bus, "cameras"), "pick_cube", task.views, task.image_size
        )
    body.chunking, body.every = options.chunking, act.execute
    body.begin(*start_placement(robot, scene, max(options.start, 0)))
    announce(task, body.bridge, log, warn)
    recorder.watch(body.bridge, body.wire)
    while (
        body.arm.t < options.seconds
        and not body.bridge.lost
        and body.bridge.governor.state in ("ARMED", "ACTIVE")
    ):
        body.publish_images()
        body.tick(client)
        if recorder.after_tick(body.arm.t):
            break
    return body.bridge, body.arm.t


def deploy_on_wire(
    options: DeployOptions, robot, task, model, act, client, recorder: DeployRecorder, log, warn
):
    """(bridge, seconds) of an arm over DDS, in real time."""
    from controllers.bridge import Bridge
    from controllers.lease import LeaseClient
    from controllers.node import SAFETY_STATE
    from controllers.transport import Text
    from robo_rl.experiment.deploy_data import announce, command_of
    from robo_rl.experiment.wire import connect

    opened = connect(
        "robo_rl_bridge", options.domain, options.interface, options.namespace, security=options.security
    )
    with closing(recorder.wrap_transport(opened)) as wire, asked_to_stop() as stop:
        command = command_of(options, robot, task)
        bridge = Bridge(
            robot,
            task,
            wire,
            model,
            limits_of(robot, options.speed),
            dry_run=options.dry_run,
            command=command,
            twin=twin_of(robot, model, task, log),
        )
        bridge.chunking, bridge.every = options.chunking, act.execute
        if not options.dry_run:
            robot.need_limits()
        recorder.watch(bridge, wire)
        lease = LeaseClient(
            wire, options.name or f"deploy-{socket.gethostname()}-{os.getpid()}", options.lease
        )
        safety = SafetyClient(wire, wire.subscription(SAFETY_STATE, Text, "latched", depth=8), lease, stop)
        safety.wait_until(lambda: not bridge.observation_buffer.missing(), WAIT)
        if not bridge.observation_buffer.missing():
            safety.wait_until(lambda: safety.state.latest() is not None, 1.0)
        check_gains(wire, robot, options.dry_run, warn)
        # a CRISP robot has no governor of its own: ours is the only one
        governed = safety.state.latest() is not None
        if governed and not options.dry_run:
            safety.arm(options.reset, options.start)
        bridge.begin(wire.now(), leased=governed and not options.dry_run)
        announce(task, bridge, log, warn)
        said = wire.complaints()
        for complaint in said:
            warn(complaint)
        if not governed:
            warn("this arm has no governor of its own: kill -9 of the bridge leaves it at the last target")
        mode = "dry run: nothing is commanded" if options.dry_run else "commanding"
        pace = (
            f", {bridge.slow} periods an action: slow motion for {options.speed:g} m/s"
            if bridge.slow > 1 and recorder.name
            else ""
        )
        log(f"{options.run} on {robot.name} at {1 / task.period:.0f} Hz{pace}, {mode}")
        seconds, timing = real_time_loop(
            options, task.period, bridge, wire, client, recorder, stop, lease if governed else None, warn
        )
        if governed and not options.dry_run:
            lease.orders.publish(Text("disarm"))
            lease.release()
            time.sleep(0.1)
        for complaint in wire.complaints():
            if complaint not in said:
                warn(complaint)
        warn(timing)
        return bridge, seconds


def real_time_loop(
    options: DeployOptions, period: float, bridge, wire, client, recorder, stop: list[int], lease, warn
) -> tuple[float, str]:
    """Tick the bridge at its period, then brake -> (seconds since the first tick, the loop's timing in
    words). lease: on the arm, None where it has none to give."""
    from controllers.loop import real_time, undisturbed

    braking, done, began = [], [], []

    def going() -> bool:
        if stop or bridge.lost or done or bridge.governor.state not in ("ARMED", "ACTIVE"):
            braking.append(1)
        return len(braking) < BRAKE_PERIODS

    def tick() -> None:
        if lease is not None:
            if not options.dry_run:
                lease.renew(wire.now())
                if (
                    not braking
                    and not bridge.lost
                    and bridge.governor.state in ("ARMED", "ACTIVE")
                    and not lease.ours()
                ):
                    bridge.lost = LEASE_LOST
            for refusal in lease.refusals():
                warn(f"the arm refused {refusal}")
        if braking and bridge.governor.state in ("ARMED", "ACTIVE"):
            bridge.governor.disarm(wire.now())
        if not began:
            began.append(wire.now())
        if braking:
            bridge.measure(wire.now())
            bridge.publish(wire.now())
        else:
            bridge.tick(client, wire.now())
        if recorder.after_tick(wire.now() - began[0]):
            done.append(1)

    with undisturbed():
        timing = real_time(tick, period, options.seconds, going=going)
    # an e-stop ends the lease; that was heard first
    if bridge.lost == LEASE_LOST and bridge.governor.stopped_by:
        bridge.lost = f"the e-stop says stop ({', '.join(sorted(bridge.governor.stopped_by))})"
    return wire.now() - began[0] if began else 0.0, timing.text()


def _report(options: DeployOptions, bridge, recorder: DeployRecorder, seconds: float, log) -> DeployResult:
    log(bridge.report())
    for name, pose in recorder.poses.items():
        log(f"{name} is {pose.pos[2]:.3f} m high")
    known = recorder.name and recorder.rule.objects and len(recorder.rule.objects) == len(recorder.poses)
    if known and not options.dry_run:
        log(
            f"{recorder.name}: success after {recorder.success_at:.1f} s"
            if recorder.success_at is not None
            else f"{recorder.name}: no success in {seconds:.1f} s"
        )
    if bridge.lost:
        raise UserError(f"{bridge.lost}; the arm was braked and holds")
    return DeployResult(seconds, recorder.success_at, bridge.governor.state, bridge.governor.reason)
