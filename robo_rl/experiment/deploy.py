"""Run a run's policy on an arm: over a transport in real time, or on a simulated arm in lockstep in this
process."""

import functools
import os
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from robo_rl.child import end
from robo_rl.errors import UserError
from robo_rl.experiment.deploy_options import DeployOptions, refuse_stated
from robo_rl.experiment.deploy_policy import choose_actor, instruction_of, open_policy, report_motion
from robo_rl.experiment.deploy_recorder import DeployRecorder
from robo_rl.experiment.robot_names import check_arms_run
from robo_rl.experiment.safety_client import WAIT, SafetyClient
from robo_rl.signals import asked_to_stop

TRAINED = "sim"  # the robot whose joints a run's state has
SIM_TICK = 0.001  # s, of the simulated arm
LEASE_LOST = "the lease on the arm is another's now, or ended"
BRAKE_PERIODS = 25  # control periods after the end, to brake


class ArmRecorder(Protocol):
    """What follows an arm that a policy or a person drives. name: its task, "" for none; scene: where a
    simulated arm stands."""

    name: str
    scene: str

    def wrap_transport(self, wire: Any) -> Any:
        """The wire, whose messages may be kept."""

    def watch(self, bridge: Any, wire: Any) -> None:
        """Follow this bridge from now on."""

    def after_tick(self, now: float) -> bool:
        """Whether the motion ends."""
        ...

    def look(self) -> None:
        """Keep what is seen in the end."""


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


def deploy(
    options: DeployOptions,
    log: Callable[[str], None] = print,
    warn: Callable[[str], None] = print,
    tell: Callable[[str], None] = print,
) -> DeployResult:
    """Run the policy until it succeeds, its time is over or something is lost. log, warn, tell: receive one
    line each: results, warnings, what is waited for.

    UserError: the policy does not fit the robot, or the robot or the policy was lost (the arm then brakes and
    holds).
    """
    from controllers.robot import load_robot
    from robo_rl.experiment.config import load_config
    from robo_rl.experiment.folder import half_taught, pick_checkpoint, pick_run

    robot = load_robot(options.robot)
    check_speed(options.speed, robot)
    folder = pick_run(Path(options.run))
    trained_in = load_config(folder)
    if trained_in.sim != "none" and not trained_in.sim.startswith("wm:"):  # these may be of an arm's own data
        check_arms_run(trained_in)
        refuse_stated(options)
    tell(f"loading the policy of {options.run}")
    if said := half_taught(*pick_checkpoint(Path(options.run), options.checkpoint)):
        warn(said)
    from controllers.model import arm_model, range_fault
    from robo_rl.experiment.arm import policy_interface
    from robo_rl.experiment.deploy_data import data_interface

    act, config, spec = choose_actor(options, warn)
    of_data = config.sim == "none" or bool(spec.units)  # else of a simulator's arm
    if of_data:
        task = data_interface(
            options, folder, config, spec, robot, limits_of(robot, options.speed).speed, warn
        )
    else:
        refuse_stated(options)
        task = policy_interface(config, spec)
    model = arm_model(robot, options.model)
    if fault := range_fault(model, robot):
        warn(fault)
    name = "" if of_data else config.task or "pick_cube"
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
    with closing(recorder):
        client, server = open_policy(options, act, task.period)
        try:
            recorder.instruction = instruction_of(options, spec, client)
            run = (
                deploy_in_process
                if options.transport == "inprocess"
                else functools.partial(deploy_on_wire, tell=tell)
            )
            bridge, seconds = run(options, robot, task, model, act, client, recorder, log, warn)
            report_motion(bridge, client, log, warn, bool(options.plan_in))
            return _report(options, bridge, recorder, seconds, log)
        finally:
            client.close()
            if server:
                end(server)


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
    options: DeployOptions, robot, task, model, act, client, recorder: ArmRecorder, log, warn
):
    """(bridge, simulated seconds) of a simulated arm in this process, in lockstep on simulated time."""
    from controllers.data_interface import DataInterface
    from controllers.transport import LoopbackTransport
    from robo_rl.experiment.arm import make_lockstep_arm
    from robo_rl.experiment.cameras import SceneCameras
    from robo_rl.experiment.deploy_data import announce, check_views, whole_periods
    from robo_rl.experiment.scenes import start_placement

    scene = recorder.scene
    if isinstance(task, DataInterface):
        task, scene = whole_periods(task, SIM_TICK), "pick_cube" if robot.name == TRAINED else "none"
        check_views(task)
    body = make_lockstep_arm(
        robot, task, options.speed, scene, dry_run=options.dry_run, wrap_transport=recorder.wrap_transport
    )
    if task.views:
        body.make_cameras = lambda bus: SceneCameras(
            LoopbackTransport(bus, "cameras"), recorder.scene, task.views, task.image_size
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
    recorder.look()
    return body.bridge, body.arm.t


def deploy_on_wire(
    options: DeployOptions, robot, task, model, act, client, recorder: ArmRecorder, log, warn, tell=print
):
    """(bridge, seconds) of an arm over DDS, in real time."""
    from controllers.bridge import Bridge
    from controllers.lease import LeaseClient
    from controllers.node import SAFETY_STATE
    from controllers.transport import Text
    from robo_rl.experiment.deploy_data import announce, command_of
    from robo_rl.experiment.wire import connect, place_of

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
        wait_for_topics(bridge, safety, place_of(options), tell)
        # a CRISP robot has no governor of its own: ours is the only one
        governed = safety.is_governed()
        check_gains(wire, robot, options.dry_run, warn)
        held = governed and not options.dry_run
        try:
            if held:
                safety.arm(options.reset, options.start, tell)
            bridge.begin(wire.now(), leased=held)
            announce(task, bridge, log, warn)
            said = wire.complaints()
            for complaint in said:
                warn(complaint)
            if not governed:
                warn(
                    "this arm has no governor of its own: kill -9 of the bridge leaves it at the last target"
                )
            log(f"{options.run} on {robot.name} {pace_of(options, bridge, bool(recorder.name))}")
            safety.state.take()  # what was said until now is not about this
            given, said_by = (lease if governed else None), (safety.state if held else None)
            try:
                seconds, timing = real_time_loop(
                    options, task.period, bridge, wire, client, recorder, stop, given, warn, said_by
                )
            finally:
                recorder.look()
        finally:
            if held:
                safety.give_up()
        for complaint in wire.complaints():
            if complaint not in said:
                warn(complaint)
        warn(timing)
        return bridge, seconds


def wait_for_topics(bridge, safety: SafetyClient, place: str, tell: Callable[[str], None]) -> None:
    """Wait until something came on each topic that the policy needs. UserError: nothing did.
    KeyboardInterrupt: the user asks for the end meanwhile."""
    if missing := bridge.missing():
        tell(f"waiting up to {WAIT:g} s in {place} for {', '.join(missing)}")
        safety.wait_until(lambda: not bridge.missing(), WAIT)
    if safety.stop:
        raise KeyboardInterrupt
    bridge.need_topics(place)


def pace_of(options: DeployOptions, bridge, scaled: bool) -> str:
    """At which rate, for how long and whether in earnest. scaled: the policy acts in slow motion where its
    arm is slow."""
    mode = "dry run: nothing is commanded" if options.dry_run else "commanding"
    slow = (
        f", {bridge.slow} periods an action: slow motion for {options.speed:g} m/s"
        if bridge.slow > 1 and scaled
        else ""
    )
    return (
        f"at {1 / bridge.task.period:.0f} Hz{slow}, {mode}, for {options.seconds:g} s at most; Ctrl-C ends it"
    )


def real_time_loop(
    options: DeployOptions,
    period: float,
    bridge,
    wire,
    client,
    recorder,
    stop: list[int],
    lease,
    warn,
    state=None,
) -> tuple[float, str]:
    """Tick the bridge at its period, then brake -> (seconds since the first tick, the loop's timing in
    words). lease: on the arm, None where it has none to give; state: subscription of what the arm's own
    governor says, which ends the motion where that no longer follows, None for no such."""
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
        for got in state.take() if state is not None else ():
            follows = not got.message.data.startswith(("HOLD", "STOPPED", "DISARMED"))
            if not follows and not braking and bridge.governor.state in ("ARMED", "ACTIVE"):
                bridge.governor.hold(wire.now(), "arm", f"the arm says {got.message.data}")
        if braking and bridge.governor.state in ("ARMED", "ACTIVE"):
            bridge.governor.disarm(wire.now())
        if not began:
            began.append(wire.now())
        if braking:
            with suppress(UserError):  # it brakes without a state too
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
    for name, pose in recorder.poses.items():
        log(f"{name} is {pose.pos[2]:.3f} m high")
    known = recorder.name and len(recorder.bodies) == len(recorder.poses) > 0
    if known and not options.dry_run:
        log(
            f"{recorder.name}: success after {recorder.success_at:.1f} s"
            if recorder.success_at is not None
            else f"{recorder.name}: no success in {seconds:.1f} s"
        )
    if bridge.lost:
        raise UserError(bridge.lost + ("" if options.dry_run else "; the arm was braked and holds"))
    return DeployResult(seconds, recorder.success_at, bridge.governor.state, bridge.governor.reason)
