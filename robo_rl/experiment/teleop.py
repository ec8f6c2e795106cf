"""A person drives a governed arm over a transport, or a simulated one in this process, and what they drove
becomes a data set.

With what they drive, and when the arm holds because nobody does: `teleop_devices`.

The person stands where a policy stands in `robo_rl deploy`: lease, limits of the robot's file, governor,
braking and what happens when something is lost are the same. Full deflection is the speed limit. Where the
person lets go, the target becomes where the tool is.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
import tyro

from robo_rl.errors import UserError, choose, in_range, plural
from robo_rl.experiment.operators import check_person
from robo_rl.experiment.pictures import cut_square
from robo_rl.experiment.ros_options import RosOptions, check_dry_run

GROUPS = {
    "The arm": ("file", "model", "command", "transport"),
    "The person": ("operator", "port", "host"),
    "Limits": ("speed", "seconds", "dry_run", "reset"),
    "ROS 2": ("namespace", "domain", "interface", "security", "name", "lease"),
    "What is recorded": ("out", "task", "episodes", "keep", "gripper", "views", "image_size"),
}


@dataclass(frozen=True, kw_only=True)
class TeleopOptions(RosOptions):
    """Drive a governed arm with a device, and record it. It stops the arm at Ctrl-C and when the device or
    anything else is lost."""

    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = GROUPS

    file: tyro.conf.Positional[str]
    """Preset or JSON file of the robot."""
    operator: str = "gamepad"
    """gamepad, spacemouse, keyboard, each with :FILE where it is not the first, and ,mapping=FILE.json;
    console: the page in a browser; leader:NAMESPACE, an arm on the wire that publishes its pose."""
    port: int = 8765
    """With --operator console: TCP port of the page, 0 to 65535; 0: any free one."""
    host: str = "127.0.0.1"
    """Address that the page listens on; anything but loopback lets other machines in (they still need a
    token)."""
    model: str = ""
    """MJCF or URDF of a robot whose file names none."""
    command: str = ""
    """pose, joint, forward_position or joint_trajectory, as in robo_rl deploy; "": as the robot's file
    says."""
    transport: str = "dds"
    """dds, or inprocess: a simulated arm of its own in lockstep."""
    speed: float = 0.1
    """Of the tool at full deflection, and its limit, 0 to 1.5 [m/s]."""
    seconds: float = 600.0
    """Time limit [s]."""
    dry_run: bool = False
    """Compute everything, command nothing: poses go to preview/target_pose."""
    reset: bool = False
    """Reset the arm's governor first, after it stopped."""
    name: str = ""
    """Name of the lease; "": one of this machine and process."""
    lease: float = 2.0
    """Seconds after which the arm is free when this process dies, 0.5 to 3600."""
    out: str = ""
    """Folder of the data set; "": nothing is recorded."""
    task: str = ""
    """Instruction of the recorded episodes."""
    episodes: int = 0
    """End after so many recorded episodes; 0: at the time limit, or when the person presses stop."""
    keep: Literal["success", "all"] = "success"
    """Which episodes are recorded; failures too teach a success classifier."""
    gripper: bool = True
    """The arm has a gripper, which says on gripper/joint_states how far it is open."""
    views: tuple[str, ...] = ()
    """Cameras of the robot that are recorded."""
    image_size: int = 128
    """Pixels of each side of a recorded picture, 16 to 1024."""

    start: ClassVar[int] = -1  # the scene is left as it is
    chunking: ClassVar[str] = "naive"

    @property
    def run(self) -> str:
        return self.operator

    def __post_init__(self) -> None:
        kind = check_person("--operator", self.operator)
        if kind == "leader" and self.operator.partition(":")[2].strip("/") == self.namespace.strip("/"):
            raise UserError(
                f"--operator {self.operator} names the arm that is driven: the leader is another one, with a "
                "namespace of its own (robo_rl robot drive FILE --namespace leader)"
            )
        in_range("--port", self.port, 0, 65535)
        choose("--command", self.command, ("", "pose", "joint", "forward_position", "joint_trajectory"))
        choose("transport", self.transport, ("dds", "inprocess"))
        in_range("--speed", self.speed, 0, 1.5, open_low=True)
        in_range("--seconds", self.seconds, 0, 86400, open_low=True)
        super().__post_init__()
        check_dry_run(self.dry_run, reset=self.reset)
        in_range("--lease", self.lease, 0.5, 3600)
        in_range("--episodes", self.episodes, 0, 10**6)
        in_range("--image-size", self.image_size, 16, 1024)


class PersonClient:
    """The device as a `PolicyClient`: one row per control period. engaged: the person drives in this period;
    marks: what they said."""

    blocks = True

    def __init__(self, device, spec):
        self.device, self.spec, self.engaged = device, spec, False
        self.bridge: Any = None  # until `TeleopRecorder.watch`
        self.marks: list[str] = []
        self.answer: tuple[np.ndarray, float] | None = None

    def ask(self, obs, t0: float, prefix=None) -> None:
        from robo_rl.human.reading import command

        reading = self.device.read()
        if self.device.gone:
            raise UserError("the device is gone")
        if self.engaged and not reading.engaged:
            self.let_go()
        self.engaged = reading.engaged
        self.marks += reading.marks
        task = self.bridge.task
        self.answer = task.numbers(command(reading, self.spec)[None, : len(task.increments)]), t0

    def let_go(self) -> None:
        """The arm's target becomes where its tool is: it does not go on to what was ahead of it."""
        bridge = self.bridge
        target = bridge.task.command(bridge.model, bridge.governor.limits)
        target.grip = bridge.gripper_command.grip
        bridge.gripper_command = target

    def poll(self, now: float) -> tuple[np.ndarray, float] | None:
        got, self.answer = self.answer, None
        return got

    def close(self) -> None:
        self.device.close()


class TeleopRecorder:
    """Rows that the person drove, as episodes that their marks end. spec: of the recorded numbers; share [7]:
    of a recorded action of 1 that the arm's action of 1 is. own: what the bridge sees and commands, where
    that is recorded as it is.

    A thread of its own writes them (`ArmRecording`): the arm holds where no command comes for 0.1 s, and
    pictures take longer.
    """

    def __init__(
        self,
        options: TeleopOptions,
        client: PersonClient,
        spec,
        share: np.ndarray,
        say: Callable[[str], None],
        own: Any = None,
    ):
        from robo_rl.experiment.arm_recording import ArmRecording, features_of
        from robo_rl.experiment.deploy_data import own_features, own_units

        self.options, self.client, self.share, self.say, self.own = options, client, share, say, own
        self.recording = None
        if options.out:
            self.recording = ArmRecording(
                options.out,
                features_of(spec, options.image_size) if own is None else own_features(own, own.image_size),
                spec if own is None else None,
                source="human",
                unfinished=False,
                units="" if own is None else own_units(own),
                log=say,
            )
            self.recording.task = options.task
        self.driven = 0  # rows since the last mark
        self.saving: list[tuple[Future, str]] = []  # episodes that are being written, and what is said then
        self.kept = self.tried = 0
        self.name = ""  # of no task of ours
        self.scene = "pick_cube"  # where a simulated arm stands

    def wrap_transport(self, wire):
        return wire

    def watch(self, bridge, wire) -> None:
        """Record this bridge from now on."""
        self.bridge = self.client.bridge = bridge
        if hasattr(self.client.device, "begin"):
            self.client.device.begin(bridge)
        self.client.device.grip = 1.0 if bridge.observation_buffer.opening > 0.5 else -1.0
        bridge.on_action = self.act

    def act(self, state: np.ndarray, pictures: dict, action: np.ndarray) -> None:
        if self.client.engaged:
            self.driven += 1
            if self.recording is not None:
                self.recording.append(state, pictures, action * (1.0 if self.own is not None else self.share))

    def look(self) -> None:
        """What is seen in the end is kept where a mark ends an episode; one that none ended is not kept."""

    def after_tick(self, now: float) -> bool:
        """End episodes that were marked -> whether the session ends. UserError: one could not be written."""
        while self.saving and self.saving[0][0].done():
            self.tell_saved()
        if self.recording is not None and self.recording.failed:
            raise UserError(f"{self.recording.failed}: the episode that was going on is not recorded")
        marks, self.client.marks = self.client.marks, []
        for word in marks:
            if word in ("success", "failure", "discard") and self.driven:
                self.end_episode(word)
        return "stop" in marks or bool(self.options.episodes) and self.kept >= self.options.episodes

    def end_episode(self, word: str) -> None:
        steps, self.driven = self.driven, 0
        self.tried += word != "discard"
        if (
            word == "discard"
            or self.recording is None
            or (word == "failure" and self.options.keep == "success")
        ):
            if self.recording is not None:
                self.recording.drop_episode()
            self.say(f"episode of {plural(steps, 'step')}: {word}, not recorded")
            return
        self.kept += 1
        success = word == "success"
        last = self.bridge.observation(), self.bridge.observation_buffer.pictures()
        written = self.recording.end_episode(success=success, terminated=True, reward=success, final=last)
        self.saving.append((written, f"episode {self.kept}: {word}, {plural(steps, 'step')}"))
        self.client.device.kept = self.kept  # which a page shows

    def tell_saved(self) -> None:
        """Say that the first of those that are being written is there. UserError: it could not be written."""
        future, words = self.saving.pop(0)
        future.result()
        self.say(words)

    def close(self) -> None:
        if self.recording is None:
            return
        try:
            self.recording.close()
        finally:
            for written, words in self.saving:
                if not written.exception():
                    self.say(words)


def own_interface(options: TeleopOptions, robot, reach: tuple[float, float], period: float):
    """What the bridge of an arm of its own joints observes and is commanded by, and what is recorded of it:
    joints, gripper and tool; moves of the tool in a control period. reach: limit of the tool [m/s],
    [rad/s]."""
    from controllers.data_columns import GRIPPER, MOVES, TOOL, Column
    from controllers.data_interface import DataInterface

    grip = (Column(GRIPPER, GRIPPER, unit="1"),) if options.gripper else ()
    moves = tuple(Column(m, m, kind="delta", unit="m" if m in MOVES[:3] else "rad") for m in MOVES)
    # no angles of the tool: they jump where they go round
    seen = tuple(Column(name, name) for name in (*robot.joints, *TOOL[:3]))
    return DataInterface(
        robot=robot,
        state=seen + grip,
        action=moves + grip,
        row=period,
        reach=reach,
        views=options.views,
        image_size=options.image_size,
        fit=lambda image: cut_square(image, options.image_size),
    )


def interface(options: TeleopOptions, robot):
    """(what the bridge observes and is commanded by, ControlSpec of what is recorded, share [7] of its
    actions that a full one is)."""
    from controllers.bridge import AXES, PolicyInterface
    from robo_rl.experiment.arm import observed_names
    from robo_rl.experiment.deploy import limits_of
    from robo_rl.types import ControlSpec
    from sims.mujoco import model
    from sims.mujoco.env import axes_of

    period, axes, most = model.DT * model.SUBSTEPS, axes_of("ee_delta"), limits_of(robot, options.speed).speed
    scale = tuple(
        min(a.high, s * period) for a, s in zip(axes[:6], (most[0],) * 3 + (most[1],) * 3, strict=True)
    )
    names = observed_names("pick_cube", ("camera",))  # what the arm itself measures
    task = PolicyInterface(
        state_names=names,
        action_names=AXES,
        scale=scale,
        period=period,
        views=options.views,
        image_size=options.image_size if options.views else 0,
    )
    spec = ControlSpec("arm", options.task or robot.name, axes, period, 10**6, names, options.views)
    return task, spec, np.array([*(s / a.high for s, a in zip(scale, axes[:6], strict=True)), 1.0])


@dataclass(frozen=True, slots=True)
class TeleopResult:
    """Episodes recorded and those that were marked; state, reason: of the bridge's governor at the end."""

    kept: int
    tried: int
    state: str
    reason: str

    @property
    def held(self) -> bool:
        return self.state in ("HOLD", "STOPPED")


def teleop(
    options: TeleopOptions, log: Callable[[str], None] = print, warn: Callable[[str], None] = print
) -> TeleopResult:
    """Drive until the person presses stop, the time is over or something is lost. UserError: the robot does
    not fit, nothing answers, the device is not there or was lost (the arm then brakes and holds)."""
    from controllers.model import arm_model
    from controllers.robot import load_robot
    from controllers.twin import same_joints
    from robo_rl.experiment.deploy import TRAINED, check_speed, deploy_in_process, deploy_on_wire, limits_of
    from robo_rl.experiment.teleop_devices import open_teleop_device

    robot = load_robot(options.file)
    check_speed(options.speed, robot)
    task, spec, share = interface(options, robot)
    model, own = arm_model(robot, options.model), None
    if not (options.gripper and same_joints(model, robot, load_robot(TRAINED))):
        task = own = own_interface(options, robot, limits_of(robot, options.speed).speed, spec.period)
    shown = spec if options.gripper else replace(spec, axes=spec.axes[:6])
    client = PersonClient(open_teleop_device(options, shown, task, log), replace(spec, max_steps=1))
    run = deploy_in_process if options.transport == "inprocess" else deploy_on_wire
    try:
        recorder = TeleopRecorder(options, client, spec, share, log, own)
        try:
            driven: Any = options  # has what they read of a policy's options
            bridge, _ = run(
                driven, robot, task, model, SimpleNamespace(execute=1), client, recorder, log, warn
            )
        finally:
            recorder.close()
    finally:
        client.close()
    log(bridge.report())
    if bridge.lost:
        raise UserError(f"{bridge.lost}; the arm was braked and holds")
    return TeleopResult(recorder.kept, recorder.tried, bridge.governor.state, bridge.governor.reason)
