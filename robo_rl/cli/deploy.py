"""`robo_rl deploy RUN --robot sim`: a run's policy on an arm, governed, with everything counted."""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import tyro

from robo_rl.errors import UserError, choose, in_range

WAIT = 5.0  # s for the arm's topics


@dataclass(frozen=True, kw_only=True)
class Deploy:
    """Run the policy of a run on an arm. It stops the arm when its time is over, at Ctrl-C and when anything is lost."""

    run: tyro.conf.Positional[str]
    """Run folder, or a checkpoint folder inside one."""
    robot: str = "sim"
    """Preset or JSON file."""
    checkpoint: str = "best"
    dry_run: bool = False
    """Compute everything, command nothing: poses go to preview/target_pose."""
    transport: str = "dds"
    """dds, or inprocess: a simulated arm of its own in lockstep."""
    policy: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = ""
    """A policy that robo_rl serve answers elsewhere; "process": in a process of its own here; "": in this process."""
    speed: float = 0.25
    """Limit of the tool [m/s]."""
    seconds: float = 10.0
    reset: bool = False
    """Take the arm out of STOPPED first: after someone looked why it stopped."""
    start: int = 0
    """With --transport inprocess: which start of the scene."""
    namespace: str = ""
    domain: Annotated[int, tyro.conf.arg(metavar="ID")] = -1
    """ROS domain; -1: ROS_DOMAIN_ID, else 0."""
    interface: str = ""
    """Network interface; "": loopback."""
    model: str = ""
    """MJCF or URDF of a robot whose preset ships none."""
    seed: int = 0

    def __post_init__(self) -> None:
        choose("transport", self.transport, ("dds", "inprocess"))
        in_range("--speed", self.speed, 0, 1.5, open_low=True)
        in_range("--seconds", self.seconds, 0, 86400, open_low=True)
        in_range("--start", self.start, 0, 2**33)
        in_range("--domain", self.domain, -1, 232)
        in_range("--seed", self.seed, 0, 2**31)


def thinker(args: Deploy, act, period: float):
    """(where inference runs, the process that it started or None)."""
    from controllers.bridge import PATIENCE, Inline
    from controllers.remote import Remote
    if not args.policy:
        return Inline(act), None
    if args.policy != "process":
        return Remote(args.policy, PATIENCE * period), None
    child = subprocess.Popen([sys.executable, "-m", "robo_rl", "serve", args.run, "--port", "0", "--seed", str(args.seed),
                              "--checkpoint", args.checkpoint], stdout=subprocess.PIPE, text=True, start_new_session=True)
    said = child.stdout.readline()
    if " on " not in said:
        child.wait()
        raise UserError("the policy's process did not start; try: robo_rl serve " + args.run)
    return Remote(said.rsplit(" on ", 1)[1].strip(), PATIENCE * period), child


def run(args: Deploy) -> int:
    """0: it ran to the end; 1: the governor or a loss ended it."""
    from controllers.model import arm_model
    from controllers.robot import load_robot
    from robo_rl.cli.robots import expected
    from robo_rl.cli.serve import actor

    robot = load_robot(args.robot)
    act, config, spec = actor(args.run, args.checkpoint, args.seed)
    task = expected(config, spec)
    if len(robot.joints) != sum(n.endswith("_velocity") for n in task.state_names):
        knows = sum(n.endswith("_velocity") for n in task.state_names)
        raise UserError(f"the run knows {knows} joints, robot {robot.name} has {len(robot.joints)}: "
                        "choose the robot it was trained for")
    model = arm_model(robot, args.model)
    mind, child = thinker(args, act, task.period)
    try:
        go = inprocess if args.transport == "inprocess" else on_the_wire
        return go(args, robot, task, model, mind)
    finally:
        mind.close()
        if child:
            child.terminate()
            child.wait()


def inprocess(args: Deploy, robot, task, model, mind) -> int:
    """A simulated arm in this process, in lockstep on simulated time."""
    from robo_rl.cli.robots import lockstep, placed
    body = lockstep(robot, task, args.speed, dry_run=args.dry_run)
    body.begin(*placed(robot, "pick_cube", args.start))
    while body.arm.t < args.seconds and not body.bridge.lost and body.bridge.governor.state in ("ARMED", "ACTIVE"):
        body.tick(mind)
    return finished(args, body.bridge)


def on_the_wire(args: Deploy, robot, task, model, mind) -> int:
    """An arm over DDS, in real time."""
    from controllers.bridge import Bridge
    from controllers.loop import real_time
    from controllers.node import SAFETY_COMMAND, SAFETY_STATE
    from controllers.pace import limits_at
    from controllers.transport import Text
    from robo_rl.cli.robots import BOX, STEP
    from robo_rl.cli.wire import connect

    wire = connect("robo_rl_bridge", args.domain, args.interface, args.namespace)
    stop = []
    before = {s: signal.signal(s, lambda number, _: stop.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        limits = limits_at(args.speed, STEP, frame=robot.base_frame, **(BOX if robot.name == "sim" else {}))
        bridge = Bridge(robot, task, wire, model, limits, dry_run=args.dry_run)
        state = wire.subscription(SAFETY_STATE, Text, "latched", depth=8)
        orders = wire.publisher(SAFETY_COMMAND, Text, "command")

        def until(condition, seconds: float) -> bool:
            end = time.monotonic() + seconds
            while not (done := condition()) and time.monotonic() < end and not stop:
                time.sleep(0.01)
            return done
        until(lambda: not bridge.senses.missing(), WAIT)
        if not bridge.senses.missing():
            until(lambda: state.latest() is not None, 1.0)

        def order(word: str, becomes: str) -> None:
            """Send an order until the arm's governor is there; UserError with what it says instead."""
            for _ in range(10):
                orders.publish(Text(word))
                if until(lambda: state.latest().message.data.startswith(becomes), 0.2):
                    return
            raise UserError(f"the arm does not {word}: it says {state.latest().message.data!r}. "
                            "STOPPED needs --reset, after a look at why")
        governed = state.latest() is not None  # a CRISP robot has no governor of its own: ours is the only one
        if governed and not args.dry_run:
            if args.reset and state.latest().message.data.startswith("STOPPED"):
                order("reset", "DISARMED")
            if not state.latest().message.data.startswith(("ARMED", "ACTIVE")):
                order("arm", "ARMED")
        bridge.begin(wire.now())
        if not governed:
            print("this arm has no governor of its own: kill -9 of the bridge leaves it at the last target", file=sys.stderr)
        mode = "dry run: nothing is commanded" if args.dry_run else "commanding"
        print(f"{args.run} on {robot.name} at {1 / task.period:.0f} Hz, {mode}", flush=True)
        settle = []

        def going() -> bool:
            over = bool(stop) or bool(bridge.lost) or bridge.governor.state not in ("ARMED", "ACTIVE")
            if over:
                settle.append(1)
            return len(settle) < 25  # half a second more, to brake
        def tick() -> None:
            if settle and bridge.governor.state in ("ARMED", "ACTIVE"):
                bridge.governor.disarm(wire.now())
            bridge.tick(mind, wire.now())
        timing = real_time(tick, task.period, args.seconds, going=going)
        if governed and not args.dry_run:
            orders.publish(Text("disarm"))
            time.sleep(0.1)
        print(timing.text(), file=sys.stderr)
        return finished(args, bridge)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        wire.close()


def finished(args: Deploy, bridge) -> int:
    """Say what happened."""
    print(bridge.report())
    for name, pose in bridge.senses.poses.items():
        print(f"{name} is {pose.pos[2]:.3f} m high")
    if bridge.lost:
        raise UserError(f"{bridge.lost}; the arm was braked and holds")
    if bridge.governor.state in ("HOLD", "STOPPED"):
        print(f"robo_rl: {bridge.governor.state}: {bridge.governor.reason}", file=sys.stderr)
        return 1
    return 0
