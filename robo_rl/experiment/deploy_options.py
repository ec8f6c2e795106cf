"""Options of `robo_rl deploy`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from robo_rl.device_names import check_device
from robo_rl.errors import UserError, choose, in_range
from robo_rl.experiment import planning
from robo_rl.experiment.ros_options import RosOptions, check_dry_run
from robo_rl.options.foreign import FOREIGN, check_foreign

ON_WIRE = ("namespace", "domain", "interface", "security", "name", "lease", "reset")  # of --transport dds
STATED = ("rate", "columns", "state_columns", "units", "state_units", "gripper")


@dataclass(frozen=True, kw_only=True)
class DeployOptions(planning.PlanningOptions, RosOptions):
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
    """dds, or inprocess: a simulated arm of its own in lockstep, which stands still while its policy
    decides."""
    policy: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = ""
    """A policy that robo_rl serve answers elsewhere; "process": in a process of its own here; ws://HOST:PORT
    of a server on openpi's wire, or lerobot:FOLDER, a policy that LeRobot saved, in the place of the run's;
    "": in this process."""
    lerobot_python: str = ""
    """With --policy lerobot:FOLDER: the Python of an environment that has LeRobot; "":
    ROBO_RL_LEROBOT_PYTHON."""
    lerobot_cameras: str = ""
    """With --policy lerobot:FOLDER: which of its cameras is which of ours, NAME=CAMERA with commas between,
    where names differ."""
    execute: int = 0
    """With --policy ws:// or lerobot:: rows of its chunks that are executed; 0: as many as the run's
    policy."""
    token: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """File with the token that robo_rl serve names; "": RUN/serve.token, with --policy ws:// none.
    ROBO_RL_TOKEN goes before it."""
    speed: float = 0.25
    """Speed limit of the tool [m/s], up to 1.5; below 1.0 a policy of sims/mujoco runs in slow motion."""
    seconds: float = 10.0
    """Time limit [s], up to 86400."""
    reset: bool = False
    """Reset the arm's governor if it is STOPPED: after someone looked why it stopped."""
    start: int = -1
    """Reset a simulated arm's scene to this start, 0 or above; -1: leave it as it is (--transport inprocess:
    start 0)."""
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
    """Language instruction, for a policy that takes one; "": the task's own, where it has one, or that of
    the server at --policy HOST:PORT."""
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
        super().__post_init__()
        on_wire = self.transport == "dds"
        given = [n for n in ON_WIRE if getattr(self, n) != getattr(type(self), n)]
        if given and not on_wire:
            raise UserError(
                f"--transport inprocess has an arm of its own and no network: leave --{given[0]} out, or use "
                "--transport dds"
            )
        check_dry_run(self.dry_run and on_wire, start=self.start >= 0, reset=self.reset)
        in_range("--seed", self.seed, 0, 2**31)
        in_range("--lease", self.lease, 0.5, 3600)
        in_range("--execute", self.execute, 0, 1024)
        planning.check(self)
        check_device(self.device)
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
        check_foreign(self)
        if self.policy and self.policy != "process" and not self.policy.startswith(FOREIGN):
            from controllers.remote import address

            address(self.policy)
        if self.policy.startswith(FOREIGN) and self.chunking in ("rtc", "trained"):
            raise UserError(
                f"--chunking {self.chunking} asks for rows that agree with others, which a policy of "
                f"{self.policy} is not asked for: use blend or naive"
            )


def refuse_stated(options: DeployOptions) -> None:
    """UserError: what only a data set's columns need was given for a run of a simulator."""
    for name in STATED:
        if getattr(options, name):
            raise UserError(
                f"--{name.replace('_', '-')} is for a run that learnt from a data set without a simulator "
                "(--sim none)"
            )
