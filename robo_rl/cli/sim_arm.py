"""`robo_rl sim-arm`: the 1 kHz governed arm over MuJoCo on the ROS 2 wire."""

import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from robo_rl.errors import UserError, in_range


@dataclass(frozen=True, kw_only=True)
class SimArm:
    """A simulated torque-controlled arm with a CRISP robot's topics, behind a safety governor of its own."""

    robot: str = "sim"
    """Preset or JSON file (robo_rl sim-arm --robot list names them)."""
    scene: str = "pick_cube"
    """pick_cube, or none: the robot's model alone."""
    controller: str = ""
    """joint: stiff joints as in sims/mujoco, for policies trained there; cartesian: an impedance at the tool; "": joint for
    --robot sim, cartesian for others."""
    start: int = 0
    """Which start of the scene: where the cube lies."""
    seconds: float = math.inf
    lockstep: bool = False
    """As fast as it goes, on simulated time, with /clock; on the wire only where --domain is given. Needs --seconds."""
    speed: float = 0.25
    """Limit of the tool [m/s]; below 1.0 a policy of sims/mujoco runs in slow motion."""
    wrench: float = 0.0
    """Largest force at the tool [N], estimated from torques and motion, beyond which the arm holds, and a third of
    the number as moment [N m]. 0: nothing is estimated. (Policies that press on the table know no such limit.)"""
    armed: bool = False
    """Arm the governor at the start; else a client's `arm` on safety_command does."""
    namespace: str = ""
    """Prefix of all topics."""
    domain: Annotated[int, tyro.conf.arg(metavar="ID")] = -1
    """ROS domain; -1: ROS_DOMAIN_ID, else 0."""
    interface: str = ""
    """Network interface; "": loopback."""
    payload: float = 0.0
    """kg at the tool that the law does not know."""
    joint_friction: float = 0.0
    """N m of dry friction in every joint that the law does not know."""
    torque_delay: int = 0
    """Ticks [ms] between the law and the motors."""
    push: float = 0.0
    """N, sideways at the tool, half a second in every two."""
    message_delay: float = 0.0
    """s that every command is late."""
    message_drop: float = 0.0
    """Share of commands that are lost."""
    cameras: tuple[str, ...] = ()
    """Cameras to publish from a process beside this one: front, wrist. It needs an off-screen OpenGL."""
    image_size: int = 64
    """Pixels of each side of their pictures."""
    quiet: bool = False
    """No status line."""

    def __post_init__(self) -> None:
        in_range("--seconds", self.seconds, 0, math.inf, open_low=True)
        in_range("--start", self.start, 0, 2**33)
        in_range("--speed", self.speed, 0, 1.5, open_low=True)
        in_range("--domain", self.domain, -1, 232)
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


def build(args: SimArm, transport=None):
    """(arm, node) of the arguments; the transport is DDS, or an in-process one with --lockstep or where it is given."""
    from controllers.arm import Disturbance
    from controllers.arm import SimArm as Arm
    from controllers.governor import Governor
    from controllers.manager import Manager
    from controllers.manager import placed as from_row
    from controllers.node import ArmNode
    from controllers.pace import limits_at
    from controllers.robot import load_robot
    from controllers.transport import Bus, Loop, Weather
    from controllers.wrench import Observer
    from robo_rl.experiment.arm import BOX, STEP, WIRE_NAMES, controllers_of, law, placed, scene, sprung
    from robo_rl.experiment.wire import connect, worse

    controller = args.controller or ("joint" if args.robot == "sim" else "cartesian")
    robot = sprung(load_robot(args.robot), controller)
    arm = Arm(robot, law(controller, args.speed), path=scene(robot, args.scene), servo=controller == "joint",
              disturbance=Disturbance(payload=args.payload, torque_delay=args.torque_delay,
                                      joint_friction=args.joint_friction))
    joints, objects = placed(robot, args.scene, args.start)
    arm.reset(joints, objects, opening=1.0)
    box = BOX if args.robot == "sim" else {}
    if args.wrench:
        arm.observer, box = Observer(arm.model), box | {"wrench": (args.wrench, args.wrench / 3)}
    governor = Governor(limits_at(args.speed, STEP, frame=robot.base_frame, **box), robot)
    weather = Weather(delay=args.message_delay, drop=args.message_drop)
    if transport is None:
        transport = Loop(Bus(lambda: arm.ticks * arm.dt), "sim_arm") if args.lockstep and args.domain < 0 else \
            connect("sim_arm", args.domain, args.interface, args.namespace)
    node = ArmNode(arm, worse(transport, weather), governor, clock=args.lockstep)

    def place(row: tuple[float, ...]) -> None:
        arm.reset(*from_row(row, len(robot.joints), arm.objects()), opening=1.0)
    Manager(node, controllers_of(load_robot(args.robot), args.speed), WIRE_NAMES[controller], place,
            lambda k: arm.reset(*placed(robot, args.scene, k), opening=1.0))
    return arm, node


def status(arm, node, timing: str = "") -> str:
    """One line: the governor, the tool, what lies around."""
    g = node.governor
    tool = ", ".join(f"{x:.3f}" for x in arm.model.pos)
    bodies = "".join(f" · {n} {arm.data.body(n).xpos[2]:.3f} m high" for n in arm.objects())
    return f"{g.state}{f' ({g.reason})' if g.reason else ''} · tool {tool} m{bodies}{timing}"


def looking(args: SimArm) -> "subprocess.Popen | None":
    """The process of the cameras, or None."""
    if not args.cameras:
        return None
    command = [sys.executable, "-m", "robo_rl", "cameras", "--views", *args.cameras, "--size", str(args.image_size), "--scene",
               args.scene, "--robot", args.robot, "--domain", str(args.domain), "--parent", str(os.getpid())]
    for name in ("namespace", "interface"):
        command += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def run(args: SimArm) -> int:
    """Until --seconds or Ctrl-C."""
    from controllers.loop import real_time, undisturbed

    arm, node = build(args)
    eyes = looking(args)
    stop = []
    before = {s: signal.signal(s, lambda number, _: stop.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    live = sys.stderr.isatty() and not args.quiet

    def tick() -> None:
        if args.push and node.count % 2000 == 0:
            arm.push([0, args.push, 0, 0, 0, 0], 0.5)
        node.tick()
        if args.armed and node.count == 20:
            node.governor.arm(node.transport.now())
        if live and node.count % 250 == 0:
            sys.stderr.write(f"\r\x1b[2K{status(arm, node)}")
    try:
        if args.lockstep:
            while arm.ticks * arm.dt < args.seconds - 1e-9 and not stop:
                tick()
            timing = f" · {arm.t:.1f} s simulated"
        else:
            if not args.quiet:
                topic = "/".join(filter(None, [args.namespace, "safety_command"]))
                print(f"{args.robot} is on the wire; commands wait for 'arm' on {topic}", flush=True)
            with undisturbed():
                timing = f" · {real_time(tick, arm.dt, args.seconds, going=lambda: not stop).text()}"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        node.transport.close()
        if eyes is not None:
            eyes.terminate()
            eyes.wait()
    if live:
        sys.stderr.write("\r\x1b[2K")
    print(status(arm, node, timing))
    for reason, count in node.refused.most_common(5):
        print(f"refused {count} times: {reason}", file=sys.stderr)
    return 0
