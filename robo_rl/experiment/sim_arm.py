"""The simulated arm as a node: the 1 kHz governed arm over MuJoCo with a CRISP robot's topics, in real time
or in lockstep."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar

from robo_rl.child import end
from robo_rl.errors import UserError, in_range
from robo_rl.experiment.ros_options import RosOptions
from robo_rl.signals import asked_to_stop


@dataclass(frozen=True, kw_only=True)
class SimArmOptions(RosOptions):
    """A simulated torque-controlled arm with a CRISP robot's topics, behind a safety governor of its own."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "The arm": ("robot", "scene", "controller", "start", "cameras", "image_size", "quiet"),
        "Time": ("seconds", "lockstep"),
        "Limits": ("speed", "wrench", "armed"),
        "ROS 2": ("namespace", "domain", "interface", "security"),
        "What goes wrong on purpose": (
            "payload",
            "joint_friction",
            "torque_delay",
            "push",
            "message_delay",
            "message_drop",
        ),
    }

    robot: str = "sim"
    """Preset or JSON file, also of two arms (robo_rl sim-arm --robot list names the presets)."""
    scene: str = "pick_cube"
    """Task of the embedded simulator, or of your own (module:object), whose objects stand there; none: the
    robot's model alone. Two arms have the scene of their models, whatever is said here."""
    controller: str = ""
    """joint: stiff joints as in sims/mujoco, for policies trained there; cartesian: an impedance at the tool;
    "": joint for --robot sim and for two arms, cartesian for others."""
    start: int = 0
    """Start of the scene, from 0: where its objects lie."""
    seconds: float = math.inf
    """Time limit [s]; inf: until Ctrl-C."""
    lockstep: bool = False
    """As fast as it goes, on simulated time, with /clock; on the wire only where --domain is given. Needs
    --seconds."""
    speed: float = 0.25
    """Speed limit of the tool [m/s], up to 1.5; below 1.0 a policy of sims/mujoco runs in slow motion."""
    wrench: float = 0.0
    """Largest force at the tool [N], 0 to 1000, estimated from torques and motion, beyond which the arm
    holds, and a third of the number as moment [N m]. 0: nothing is estimated. (Policies that press on the
    table know no such limit.)"""
    armed: bool = False
    """Arm the governor at the start, for whoever commands first; else a client's `claim NAME SECONDS` and
    `arm NAME` on safety_command do."""
    payload: float = 0.0
    """Mass at the tool that the law does not model [kg], 0 to 100."""
    joint_friction: float = 0.0
    """Dry friction in every joint that the law does not model [N m], 0 to 20."""
    torque_delay: int = 0
    """Delay between the law and the motors [ms], 0 to 100."""
    push: float = 0.0
    """Sideways force at the tool [N], -200 to 200, half a second in every two."""
    message_delay: float = 0.0
    """Delay of every command [s], 0 to 10."""
    message_drop: float = 0.0
    """Share of commands that are lost, 0 to 1."""
    cameras: tuple[str, ...] = ()
    """Cameras to publish from a process beside this one: front, wrist. It needs an off-screen OpenGL."""
    image_size: int = 64
    """Pixels of each side of their pictures, 16 to 1024."""
    quiet: bool = False
    """Print no status line, and no line when the governor's state or the lease changes."""

    def __post_init__(self) -> None:
        in_range("--seconds", self.seconds, 0, math.inf, open_low=True)
        in_range("--start", self.start, 0, 2**33)
        in_range("--speed", self.speed, 0, 1.5, open_low=True)
        super().__post_init__()
        in_range("--push", self.push, -200, 200)
        in_range("--wrench", self.wrench, 0, 1000)
        in_range("--message-delay", self.message_delay, 0, 10)
        in_range("--message-drop", self.message_drop, 0, 1)
        in_range("--payload", self.payload, 0, 100)
        in_range("--joint-friction", self.joint_friction, 0, 20)
        in_range("--torque-delay", self.torque_delay, 0, 100)
        in_range("--image-size", self.image_size, 16, 1024)
        if self.cameras and (self.scene == "none" or self.lockstep):
            raise UserError("--cameras need a scene and real time: leave --scene none and --lockstep out")
        if self.lockstep and self.seconds == math.inf:
            raise UserError("--lockstep needs --seconds: it does not wait for the clock")


def make_sim_arm(options: SimArmOptions, transport=None):
    """(arm, node) of the options; the transport is DDS, or an in-process one with --lockstep or where it is
    given."""
    from controllers.arm import SimArm
    from controllers.robot import load_robot
    from controllers.transport import Bus, LoopbackTransport
    from robo_rl.experiment.arm import WIRE_NAMES, law_options, make_controllers, stiff_law, with_stiff_joints
    from robo_rl.experiment.scenes import scene_xml, start_placement
    from robo_rl.experiment.wire import connect

    controller = options.controller or ("joint" if options.robot == "sim" else "cartesian")
    robot = with_stiff_joints(load_robot(options.robot), controller)
    law = stiff_law(robot) if controller == "joint" else law_options(controller, options.speed)
    arm = SimArm(
        robot,
        law,
        path=scene_xml(robot, options.scene),
        servo=controller == "joint",
        disturbance=disturbance_of(options),
    )
    if transport is None:
        transport = (
            LoopbackTransport(Bus(lambda: arm.ticks * arm.dt), "sim_arm")
            if options.lockstep and options.domain < 0
            else connect(
                "sim_arm", options.domain, options.interface, options.namespace, security=options.security
            )
        )
    node = make_node(
        options,
        arm,
        transport,
        make_controllers(load_robot(options.robot), options.speed),
        WIRE_NAMES[controller],
        lambda start: start_placement(robot, options.scene, start),
    )
    return arm, node


def disturbance_of(options: SimArmOptions):
    """What the options let go wrong in the arm itself."""
    from controllers.arm import Disturbance

    return Disturbance(
        payload=options.payload, torque_delay=options.torque_delay, joint_friction=options.joint_friction
    )


def make_node(options: SimArmOptions, arm, transport, controllers: dict, active: str, place_at):
    """The node of a simulated arm with its governor, supervisor and services, at the start of the options.
    controllers, active: of the manager; place_at(start): (joint angles, bodies' poses)."""
    from controllers.governor import Governor
    from controllers.manager import Manager
    from controllers.manager import placed as from_row
    from controllers.node import ArmNode
    from controllers.pace import limits_at
    from controllers.supervisor import Supervisor, supervised
    from controllers.transport import NetworkConditions
    from controllers.urdf import robot_description
    from controllers.wrench import Observer
    from robo_rl.experiment.arm import ACTION_SCALE
    from robo_rl.experiment.wire import degrade

    robot = arm.robot
    arm.reset(*place_at(options.start), opening=1.0)
    box = robot.cell.limits()
    if options.wrench:
        box |= {"wrench": (options.wrench, options.wrench / 3)}
    if "wrench" in box:
        arm.observer = Observer(arm.model)
    governor = Governor(limits_at(options.speed, ACTION_SCALE, frame=robot.base_frame, **box), robot)
    arm.supervisor = Supervisor(robot, supervised(governor.limits))
    conditions = NetworkConditions(delay=options.message_delay, drop=options.message_drop)
    node = ArmNode(arm, degrade(transport, conditions), governor, clock=options.lockstep)

    def place(row: tuple[float, ...]) -> None:
        arm.reset(*from_row(row, len(robot.joints), arm.objects()), opening=1.0)

    described = ""
    with suppress(UserError):  # a model that URDF cannot say has no description
        described = robot_description(robot)
    Manager(node, controllers, active, place, lambda k: arm.reset(*place_at(k), opening=1.0), described)
    return node


def status_line(arm, node, timing: str = "") -> str:
    """One line: the governor's state, the tool's position, the objects' heights."""
    g = node.governor
    tool = ", ".join(f"{x:.3f}" for x in arm.model.pos)
    bodies = "".join(f" · {n} {arm.data.body(n).xpos[2]:.3f} m high" for n in arm.objects())
    return f"{g.state}{f' ({g.reason})' if g.reason else ''} · tool {tool} m{bodies}{timing}"


@contextmanager
def cameras_beside(options: SimArmOptions) -> Iterator[None]:
    """With the process that publishes the pictures, where --cameras asks for it."""
    if not options.cameras:
        yield
        return
    command = [
        sys.executable,
        "-m",
        "robo_rl",
        "cameras",
        "--views",
        *options.cameras,
        "--size",
        str(options.image_size),
        "--scene",
        options.scene,
        "--robot",
        options.robot,
        "--domain",
        str(options.domain),
        "--parent",
        str(os.getpid()),
    ]
    for name in ("namespace", "interface", "security"):
        command += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
    cameras = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        end(cameras)


def run_sim_arm(
    options: SimArmOptions,
    on_start: Callable[[], None] = lambda: None,
    on_tick: "Callable[[object, object], None]" = lambda arm, node: None,
    on_refusal: Callable[[str], None] = lambda line: None,
    make=make_sim_arm,
    on_change: Callable[[str], None] = lambda line: None,
):
    """Run the arm until its time is over or the user asks for the end -> (arm, node, the loop's timing in
    words).

    make(options): (arm, node), or what does as both.
    on_start() is called before the first tick in real time, on_tick(arm, node) every quarter of a second of
    the arm's time, on_refusal(line) at the first refusal of each kind, on_change(line) at each change of the
    governor's state and of the lease.
    """
    from controllers.loop import real_time, undisturbed

    arm, node = make(options)
    node.on_refusal, node.on_change = on_refusal, on_change

    def tick() -> None:
        if options.push and node.count % 2000 == 0:
            arm.push([0, options.push, 0, 0, 0, 0], 0.5)
        node.tick()
        if options.armed and node.count == 20:
            assert node.governor is not None
            node.governor.arm(node.transport.now())
        if node.count % 250 == 0:
            on_tick(arm, node)

    with cameras_beside(options), closing(node.transport), asked_to_stop() as stop:
        if options.lockstep:
            while arm.ticks * arm.dt < options.seconds - 1e-9 and not stop:
                tick()
            return arm, node, f"{arm.t:.1f} s simulated"
        on_start()
        with undisturbed():
            return arm, node, real_time(tick, arm.dt, options.seconds, going=lambda: not stop).text()
