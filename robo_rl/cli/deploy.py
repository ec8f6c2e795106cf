"""`robo_rl deploy RUN --robot sim`: a run's policy on an arm, governed, with everything counted."""

import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from robo_rl.errors import UserError, choose, in_range

WAIT = 5.0  # s for the arm's topics
FILM = 256  # pixels, of a film in one process


@dataclass(frozen=True, kw_only=True)
class Deploy:
    """Run the policy of a run on an arm. It stops the arm when its time is over, at Ctrl-C and when anything is lost."""

    run: tyro.conf.Positional[str]
    """Run folder, or a checkpoint folder inside one."""
    robot: str = "sim"
    """Preset or JSON file."""
    checkpoint: str = "best"
    command: str = ""
    """pose: tool poses, for a Cartesian controller; joint: joint targets, for joint_impedance_controller; "": joint for
    --robot sim, pose for others."""
    dry_run: bool = False
    """Compute everything, command nothing: poses go to preview/target_pose."""
    transport: str = "dds"
    """dds, or inprocess: a simulated arm of its own in lockstep."""
    policy: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = ""
    """A policy that robo_rl serve answers elsewhere; "process": in a process of its own here; "": in this process."""
    token: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """File with the token that robo_rl serve names; "": RUN/serve.token. ROBO_RL_TOKEN goes before it."""
    speed: float = 0.25
    """Limit of the tool [m/s]; below 1.0 a policy of sims/mujoco runs in slow motion."""
    seconds: float = 10.0
    reset: bool = False
    """Take the arm out of STOPPED first: after someone looked why it stopped."""
    start: int = -1
    """Put a simulated arm's scene to this start first, 0 or above; -1: as it is (--transport inprocess: start 0)."""
    namespace: str = ""
    domain: Annotated[int, tyro.conf.arg(metavar="ID")] = -1
    """ROS domain; -1: ROS_DOMAIN_ID, else 0."""
    interface: str = ""
    """Network interface; "": loopback."""
    model: str = ""
    """MJCF or URDF of a robot whose preset ships none."""
    instruction: str = ""
    """What to do, for a policy that hears an instruction."""
    record: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """Append what was seen and done, one episode, to this LeRobot v3 data set."""
    bag: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""
    """Write what the bridge hears and says to a new rosbag2 (MCAP)."""
    video: Annotated[str, tyro.conf.arg(metavar="PATH.mp4")] = ""
    """Film it with the front camera (sim-arm --cameras front)."""
    go_on: bool = False
    """Go on after the task's own rule says success; the policy has never seen what follows."""
    seed: int = 0

    def __post_init__(self) -> None:
        choose("--command", self.command, ("", "pose", "joint"))
        choose("transport", self.transport, ("dds", "inprocess"))
        in_range("--speed", self.speed, 0, 1.5, open_low=True)
        in_range("--seconds", self.seconds, 0, 86400, open_low=True)
        in_range("--start", self.start, -1, 2**33)
        in_range("--domain", self.domain, -1, 232)
        in_range("--seed", self.seed, 0, 2**31)


def thinker(args: Deploy, act, period: float):
    """(where inference runs, the process that it started or None)."""
    from controllers.bridge import PATIENCE, Inline
    from controllers.remote import Remote, read_token
    if not args.policy:
        return Inline(act), None
    if args.policy != "process":
        from robo_rl.cli.serve import TOKEN
        from robo_rl.experiment.evaluation import pick_checkpoint
        where = args.token or pick_checkpoint(Path(args.run), args.checkpoint)[0] / TOKEN
        return Remote(args.policy, read_token(where), PATIENCE * period), None
    token = secrets.token_urlsafe(32)
    child = subprocess.Popen([sys.executable, "-m", "robo_rl", "serve", args.run, "--port", "0", "--seed", str(args.seed),
                              "--checkpoint", args.checkpoint, "--instruction", args.instruction], stdout=subprocess.PIPE,
                             text=True, start_new_session=True, env=os.environ | {"ROBO_RL_TOKEN": token})
    said = child.stdout.readline()
    if " on " not in said:
        child.wait()
        raise UserError("the policy's process did not start; try: robo_rl serve " + args.run)
    return Remote(said.rsplit(" on ", 1)[1].strip(), token.encode(), PATIENCE * period), child


def run(args: Deploy) -> int:
    """0: it ran to the end; 1: the governor or a loss ended it."""
    from pathlib import Path

    from robo_rl.experiment.evaluation import pick_checkpoint
    pick_checkpoint(Path(args.run), args.checkpoint)  # a wrong name is told before torch is loaded
    from controllers.model import arm_model
    from controllers.robot import load_robot
    from robo_rl.cli.serve import actor
    from robo_rl.experiment.arm import expected

    robot = load_robot(args.robot)
    act, config, spec = actor(args.run, args.checkpoint, args.seed, args.instruction)
    task = expected(config, spec)
    if len(robot.joints) != sum(n.endswith("_velocity") for n in task.state_names):
        knows = sum(n.endswith("_velocity") for n in task.state_names)
        raise UserError(f"the run knows {knows} joints, robot {robot.name} has {len(robot.joints)}: "
                        "choose the robot it was trained for")
    model = arm_model(robot, args.model)
    notes = Notes(args, config.task or "pick_cube", task)
    mind, child = thinker(args, act, task.period)
    try:
        go = inprocess if args.transport == "inprocess" else on_the_wire
        return go(args, robot, task, model, mind, notes)
    finally:
        mind.close()
        if child:
            child.terminate()
            child.wait()
        notes.close()


class Notes:
    """What is kept of a deployment: the data set's episode, the bag, the film; and whether the task was fulfilled."""

    def __init__(self, args: Deploy, name: str, task):
        from sims.mujoco.tasks import TASKS
        self.args, self.name, self.expects, self.rule = args, name, task, TASKS[name]
        self.rows: list[tuple] = []
        self.last: tuple | None = None  # state and pictures in which the task was fulfilled
        self.frames: list = []
        self.success_at = None
        self.bag = self.writer = self.bridge = None
        self.poses: dict = {}  # of the scene's objects, where somebody tells them: a policy of pictures is not shown them
        if args.video and Path(args.video).suffix != ".mp4":
            raise UserError(f"--video writes an mp4, got {args.video}")
        if args.record:
            from robo_rl.data.writer import Writer
            self.writer = Writer(args.record, spec=self.spec())
        if args.bag:
            from controllers.bag import Bag
            self.bag = Bag(args.bag)

    def spec(self):
        """What the recorded numbers mean."""
        from robo_rl.types import ControlSpec
        from sims.mujoco.env import axes_of
        t = self.expects
        return ControlSpec("arm", self.name, axes_of("ee_delta"), t.period, self.rule.max_steps, t.state_names, t.views)

    def wired(self, wire):
        """The transport, taped where a bag was asked for."""
        if self.bag is None:
            return wire
        from controllers.bag import Taped
        self.bag.began = time.time() - wire.now()
        return Taped(wire, self.bag)

    def watch(self, bridge, wire) -> None:
        """Look at this bridge from now on."""
        from controllers.bridge import camera_topic
        from controllers.transport import CompressedImage, PoseStamped
        self.bridge, have = bridge, bridge.senses.bodies
        self.bodies = {n: have[n] if n in have else wire.subscription(f"objects/{n}", PoseStamped) for n in self.rule.objects}
        if self.writer is not None:
            bridge.tell = lambda *row: self.rows.append(row)
        self.front = wire.subscription(camera_topic("front"), CompressedImage) if self.args.video else None

    def after_tick(self, now: float) -> bool:
        """Note what there is to note -> whether the task is fulfilled and nothing is left to do."""
        from controllers.bridge import picture
        from sims.arm import succeeded
        if self.front is not None and (got := self.front.latest()) is not None:
            self.frames.append(picture(got.message))
        self.poses = {n: got.message for n, box in self.bodies.items() if (got := box.latest()) is not None}
        known = len(self.poses) == len(self.bodies) and not self.rule.uses_goal
        if self.success_at is None and known and self.bridge.commands and succeeded(self.rule, self):
            self.success_at = now
            self.last = self.bridge.observation(), self.bridge.senses.pictures()
        return self.success_at is not None and not self.args.go_on

    def tool(self):
        return self.bridge.model.pos

    def opening(self) -> float:
        return self.bridge.senses.opening

    def object(self, name: str):
        return self.poses[name].pos

    def close(self) -> None:
        """Write what was noted."""
        import numpy as np
        if self.writer is not None:
            with self.writer:
                if self.rows:
                    from robo_rl.data.episode import Episode
                    states, pictures, actions = zip(*self.rows, strict=True)
                    images = {k.removeprefix("image/"): np.stack([p[k] for p in pictures]) for k in pictures[0]}
                    over = self.last is not None and not self.args.go_on
                    state, seen = self.last if over else (self.bridge.observation(), self.bridge.senses.pictures())
                    self.writer.add(Episode(
                        np.stack(states), np.stack(actions), images, self.args.instruction or self.rule.instructions[0],
                        self.success_at is not None, source="policy", terminated=self.success_at is not None, final=state,
                        final_images={k.removeprefix("image/"): np.array(x) for k, x in seen.items()}))
            print(f"recorded {len(self.rows)} frames in {self.args.record}")
        if self.bag is not None:
            self.bag.close()
            print(f"bag with {sum(self.bag.counts.values())} messages on {len(self.bag.counts)} topics in {self.args.bag}")
        if self.args.video:
            if self.frames:
                from robo_rl.data.video import write_video
                write_video(Path(self.args.video), np.stack(self.frames), round(1 / self.expects.period))
                print(f"film of {len(self.frames)} pictures in {self.args.video}")
            else:
                print("robo_rl: no picture came on front/image_raw/compressed; start the arm with --cameras front",
                      file=sys.stderr)


def inprocess(args: Deploy, robot, task, model, mind, notes: Notes) -> int:
    """A simulated arm in this process, in lockstep on simulated time."""
    from controllers.transport import Loop
    from robo_rl.experiment.arm import lockstep, placed
    from robo_rl.experiment.cameras import Eyes
    body = lockstep(robot, task, args.speed, dry_run=args.dry_run, wired=notes.wired)
    views = tuple(dict.fromkeys((*task.views, *(("front",) if args.video else ()))))
    if views:
        size = task.image_size or FILM
        body.eyes = lambda bus: Eyes(Loop(bus, "cameras"), "pick_cube", views, size)
    body.begin(*placed(robot, "pick_cube", max(args.start, 0)))
    notes.watch(body.bridge, body.wire)
    while body.arm.t < args.seconds and not body.bridge.lost and body.bridge.governor.state in ("ARMED", "ACTIVE"):
        body.look()
        body.tick(mind)
        if notes.after_tick(body.arm.t):
            break
    return finished(args, body.bridge, notes, body.arm.t)


def on_the_wire(args: Deploy, robot, task, model, mind, notes: Notes) -> int:
    """An arm over DDS, in real time."""
    from controllers.bridge import Bridge
    from controllers.loop import real_time, undisturbed
    from controllers.node import SAFETY_COMMAND, SAFETY_STATE
    from controllers.pace import limits_at
    from controllers.transport import Text
    from robo_rl.experiment.arm import BOX, STEP
    from robo_rl.experiment.wire import connect

    wire = notes.wired(connect("robo_rl_bridge", args.domain, args.interface, args.namespace))
    stop = []
    before = {s: signal.signal(s, lambda number, _: stop.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        limits = limits_at(args.speed, STEP, frame=robot.base_frame, **(BOX if robot.name == "sim" else {}))
        bridge = Bridge(robot, task, wire, model, limits, dry_run=args.dry_run,
                        joints=(args.command or ("joint" if robot.name == "sim" else "pose")) == "joint")
        notes.watch(bridge, wire)
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
            if args.start >= 0:
                put(wire, args.start)
            if not state.latest().message.data.startswith(("ARMED", "ACTIVE")):
                order("arm", "ARMED")
        bridge.begin(wire.now())
        for complaint in wire.complaints():
            print(f"robo_rl: {complaint}", file=sys.stderr)
        if not governed:
            print("this arm has no governor of its own: kill -9 of the bridge leaves it at the last target", file=sys.stderr)
        mode = "dry run: nothing is commanded" if args.dry_run else "commanding"
        pace = f", {bridge.slow} periods an action: slow motion for {args.speed:g} m/s" if bridge.slow > 1 else ""
        print(f"{args.run} on {robot.name} at {1 / task.period:.0f} Hz{pace}, {mode}", flush=True)
        settle, began = [], []

        def going() -> bool:
            over = bool(stop) or bool(bridge.lost) or bridge.governor.state not in ("ARMED", "ACTIVE")
            if over or done:
                settle.append(1)
            return len(settle) < 25  # half a second more, to brake
        done = []

        def tick() -> None:
            if settle and bridge.governor.state in ("ARMED", "ACTIVE"):
                bridge.governor.disarm(wire.now())
            if not began:
                began.append(wire.now())
            if settle:
                bridge.measure(wire.now())
                bridge.publish(wire.now())
            else:
                bridge.tick(mind, wire.now())
            if notes.after_tick(wire.now() - began[0]):
                done.append(1)
        with undisturbed():
            timing = real_time(tick, task.period, args.seconds, going=going)
        if governed and not args.dry_run:
            orders.publish(Text("disarm"))
            time.sleep(0.1)
        print(timing.text(), file=sys.stderr)
        return finished(args, bridge, notes, wire.now() - began[0] if began else 0.0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        wire.close()


def put(wire, start: int) -> None:
    """Put the scene of a simulated arm to a start. UserError: it is none, or it is commanded."""
    from controllers.services import parameter
    [said] = wire.call("sim_arm/set_parameters", "rcl_interfaces/srv/SetParameters", {
        "parameters": [{"name": "start", "value": parameter(start)}]}, WAIT)["results"]
    if not said["successful"]:
        raise UserError(f"--start {start}: {said['reason']}")
    time.sleep(0.1)  # the arm's new state is on its way


def finished(args: Deploy, bridge, notes: Notes, seconds: float) -> int:
    """Say what happened."""
    print(bridge.report())
    for name, pose in notes.poses.items():
        print(f"{name} is {pose.pos[2]:.3f} m high")
    known = notes.rule.objects and len(notes.rule.objects) == len(notes.poses)
    if known and not args.dry_run:
        print(f"{notes.name}: success after {notes.success_at:.1f} s" if notes.success_at is not None else
              f"{notes.name}: no success in {seconds:.1f} s")
    if bridge.lost:
        raise UserError(f"{bridge.lost}; the arm was braked and holds")
    if bridge.governor.state in ("HOLD", "STOPPED"):
        print(f"robo_rl: {bridge.governor.state}: {bridge.governor.reason}", file=sys.stderr)
        return 1
    return 0
