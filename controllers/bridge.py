"""From a policy to an arm on the wire: topics -> observation -> chunk of actions -> tool poses, the governor
last.

The bridge commands what sims/mujoco's `ee_delta` does: per control period an increment of the hand's target
in the base frame [m], [rad], and the gripper absolutely. The target may lead the measured tool by LEAD at
most. Joint targets, which the observation contains, are followed as that sim has them: q + J^+ (target -
tool), J^+ = J^T (J J^T + 0.03^2 I)^-1.

Where the arm may not move as fast as whole actions ask for, the policy acts in slow motion: each action takes
`slow` control periods, and the joints' speeds are told `slow` times as large, so that the policy sees the
motion it knows. (Cutting commands to the limit instead leaves the arm ever farther behind them, which no
policy has learnt.)

`Bridge.tick` once per control period, at any clock: rows come from `schedule`, chunks from a `PolicyClient`
that may take longer than a period. If the state or the policy is lost, the governor's watchdogs go to HOLD
and nothing is commanded.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from controllers.arm_topics import GRIPPER_STATE
from controllers.chunking import ChunkRunner, Prefix
from controllers.contracts import Command, State
from controllers.estop import EmergencyStop
from controllers.governor import ACTIVE, ARMED, Governor
from controllers.limits import Limits
from controllers.model import ArmModel
from controllers.observation import ObservationBuffer, objects_of
from controllers.output import Output
from controllers.policy_client import PolicyClient
from controllers.robot import Robot
from controllers.schedule import Latency
from controllers.transport import Flag, Numbers, Transport
from controllers.twin import Twin
from robo_rl.errors import UserError, in_range, plural
from robo_rl.geometry import turn_between, turned

AXES = ("dx", "dy", "dz", "rx", "ry", "rz", "gripper")
# of the hand's target before the tool [m], of joint targets before the joints [rad]
LEAD, JOINT_LEAD = 0.06, 0.25
LOW, HIGH = np.array((0.2, -0.5, 0.009)), np.array((0.8, 0.5, 0.7))  # of the hand's target [m]
DAMPING = 0.03**2 * np.eye(6)
SHARE = 1.0  # of the joints' speed limits, for the joint targets


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInterface:
    """Observations and actions of a run's policy. scale [6]: metres and radians of an action of 1; period
    [s]; views: cameras whose pictures, cut to image_size x image_size pixels, it observes. UserError: they do
    not fit the bridge."""

    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    scale: tuple[float, ...]
    period: float
    views: tuple[str, ...] = ()
    image_size: int = 0

    def __post_init__(self) -> None:
        in_range("control period", self.period, 0.001, 1.0)
        if self.action_names != AXES:
            raise UserError(
                f"the run's actions ({', '.join(self.action_names)}) do not fit the robot, which is "
                f"commanded by {', '.join(AXES)}: train with --control ee_delta"
            )
        if len(self.scale) != 6 or not all(0 < s < 1 for s in self.scale):
            raise UserError(f"an action's scale needs 6 numbers in (0, 1) [m], [rad], got {self.scale}")
        if self.views:
            in_range("image size", self.image_size, 16, 1024)
        objects_of(self.state_names)

    @property
    def increments(self) -> np.ndarray:
        """bool [7], which columns of an action add up; the others are absolute."""
        return np.arange(7) < 6

    @property
    def cut(self) -> int:
        """Pixels of each side that pictures are cut to."""
        return self.image_size

    blend = 0  # rows over which two chunks are joined at least
    has_gripper = True
    fit = None  # what else is done to pictures

    def periods(self, limits: Limits) -> int:
        """Control periods of an action."""
        return slowness(self, limits)

    def observe(self, buffer: "ObservationBuffer", model: ArmModel, command, slow: int) -> np.ndarray:
        """float32 [S]."""
        return buffer.observation(model, command, slow)

    def command(self, model: ArmModel, limits: Limits) -> "GripperCommand":
        """What the actions of one deployment are told to. UserError: the tool is where they never were, from
        where the target would jump."""
        pos = np.array(model.pos)
        if np.abs(pos - within(pos, LOW, HIGH)).max() > LEAD:
            box = ", ".join(f"{axis} {a:g} to {b:g}" for axis, a, b in zip("xyz", LOW, HIGH, strict=True))
            raise UserError(
                f"the tool is at {[round(x, 3) for x in pos.tolist()]} m in its base frame; this policy "
                f"moves it within {box} m alone: bring it there (robo_rl robot home), or is the base turned?"
            )
        return GripperCommand(model, self.scale)

    def shares(self, rows: np.ndarray) -> np.ndarray:
        """Rows [E, 7] of the policy as shares of the columns' ranges: they are that."""
        return rows

    def numbers(self, shares: np.ndarray) -> np.ndarray:
        """The inverse of `shares`."""
        return shares

    def prefix(self, prefix: Prefix | None) -> Prefix | None:
        """What the next chunk must agree with, in the policy's numbers."""
        return prefix


def within(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """np.clip for a few numbers, in a third of its time."""
    return np.minimum(np.maximum(x, low), high)


class GripperCommand:
    """The commanded pose of the gripper, its opening, and the joint targets that follow from them. scale [6]:
    metres and radians of an action of 1; low, high [3]: where the target may be [m]."""

    def __init__(
        self, model: ArmModel, scale: tuple[float, ...], low: np.ndarray = LOW, high: np.ndarray = HIGH
    ):
        self.scale, self.grip, self.low, self.high = np.array(scale), 1.0, low, high
        self.pos, self.quat, self.joints = np.array(model.pos), tuple(model.quat), model.q.copy()

    def move(
        self, action: np.ndarray, model: ArmModel, speed: np.ndarray, period: float, left: int = 1
    ) -> None:
        """Apply one action [7] at the measured state in `model`. left: periods of it, this one too, of which
        each has its part."""
        tool = np.array(model.pos)
        self.pos = within(
            within(self.pos + self.scale[:3] * action[:3], tool - LEAD, tool + LEAD), self.low, self.high
        )
        self.quat = turned(self.quat, *(self.scale[3:] * action[3:6]).tolist())
        self.grip = float(action[6])
        jac, turn = model.jac, turn_between(self.quat, tuple(model.quat))
        angle = math.hypot(*turn)
        sine = math.sin(angle) / angle if angle > 1e-9 else 1.0
        twist = np.array((*(self.pos - tool).tolist(), *(sine * x for x in turn))) - jac.dot(
            self.joints - model.q
        )
        step = jac.T.dot(np.linalg.solve(jac.dot(jac.T) + DAMPING, twist))
        most = speed * period
        self.joints = within(
            self.joints + within(step, -most, most), model.q - JOINT_LEAD, model.q + JOINT_LEAD
        )


def slowness(task: PolicyInterface, limits: Limits) -> int:
    """Control periods for one action, so that a whole one along an axis keeps to the limits' speed."""
    full = task.scale[0] / task.period
    return max(1, math.ceil(full / limits.speed[0] - 1e-6))


class Bridge:
    """One policy on one arm. `begin` when the arm's topics are there, then `tick` every control period."""

    def __init__(
        self,
        robot: Robot,
        task: Any,
        transport: Transport,
        model: ArmModel,
        limits: Limits,
        *,
        dry_run: bool = False,
        command: str = "pose",
        twin: Twin | None = None,
    ):
        """task: a PolicyInterface, or a `data_interface.DataInterface`, whose file imports this one. command:
        one of `cell.COMMANDS`; joint targets are followed by an arm of stiff joints as sims/mujoco's does.
        twin: the arm whose joints the run's state has, where that is another."""
        self.robot, self.task, self.transport, self.model, self.dry_run = (
            robot,
            task,
            transport,
            model,
            dry_run,
        )
        self.topics = robot.topics
        self.goal = ArmModel(model.spec, robot.joints, robot.site)
        self.twin, self.known = twin, twin.model if twin else model  # known: the arm that the policy sees
        self.observation_buffer = ObservationBuffer(
            robot, transport, task.state_names, task.views, task.cut, self.known.n, task.fit
        )
        # state, pictures, action: each that runs
        self.on_action: Callable[[np.ndarray, dict, np.ndarray], None] | None = None
        if dry_run:  # the arm does not follow, and need not
            limits = replace(limits, tracking=(math.inf, math.inf))
        self.governor = Governor(limits, robot)
        self.estop = EmergencyStop(transport.subscription(self.topics["estop"], Flag, "latched", depth=64))
        self.slow = task.periods(limits)
        self.output = Output(command, robot, transport, model, task.period, dry_run)
        self.gripper = (
            None
            if dry_run or not task.has_gripper
            else transport.publisher(self.topics["gripper"], Numbers, "command")
        )
        self.speed = SHARE * np.array(robot.velocity)
        # of `chunking.ChunkRunner`; to be set before `begin`
        self.chunking, self.every, self.lost = "blend", 0, ""
        self.commands = self.cut = 0  # cut: rows that asked for more than the columns' ranges

    def measure(self, now: float) -> bool:
        """Read new messages and give the state to the governor -> whether a new one came."""
        self.estop.read(self.governor, now)
        m = self.model
        fresh = self.observation_buffer.update(m)
        if fresh:
            self.governor.measure(
                State(
                    tuple(m.q.tolist()),
                    tuple(m.dq.tolist()),
                    tuple(m.pos),
                    tuple(m.quat),
                    tuple((m.jac @ m.dq).tolist()),
                    self.observation_buffer.felt(),
                ),
                now,
            )
            if self.twin is not None:
                self.twin.follow(m)
        return fresh

    def missing(self) -> list[str]:
        """Topics on which no message has come."""
        return self.observation_buffer.missing()

    def need_topics(self, place: str = "this domain") -> None:
        """UserError: nothing came on a topic of the arm; place: the network that was listened on."""
        if missing := self.missing():
            wrong = "".join(f". {c}" for c in self.transport.complaints())
            alone = (
                " An arm without a gripper is driven with robot teleop --no-gripper"
                if missing == [GRIPPER_STATE]
                else ""
            )
            raise UserError(
                f"nothing came on {', '.join(missing)}: is the arm there (robo_rl sim-arm), in "
                f"{place}?{alone}{wrong}"
            )

    def begin(self, now: float, leased: bool = False) -> None:
        """Arm this side's governor at the measured pose. leased: we hold the arm's lease, so it follows
        nobody else. UserError says what is missing."""
        self.need_topics()
        if not self.dry_run:
            self.robot.need_limits()
        self.measure(now)
        self.observation_buffer.check()
        topics = dict.fromkeys((self.topics["target_pose"], self.topics["target_joint"], self.output.topic))
        others = {t: self.transport.publishers(t) for t in topics}
        if not self.dry_run and not leased and (n := sum(others.values())) > 1:
            where = " or ".join(topics)
            raise UserError(f"{n - 1} other publisher on {where}: one commander at a time, stop the other")
        self.governor.arm(now)
        if self.twin is not None:
            self.twin.begin(self.model)
        task, limits = self.task, self.governor.limits
        self.gripper_command = task.command(self.model, limits)
        self.twin_command = None if self.twin is None else task.command(self.twin.model, limits)
        scale = np.where(task.increments, np.resize(task.scale, len(task.increments)), 1.0)
        self.chunks = ChunkRunner(
            self.slow * task.period, task.increments, scale, self.chunking, self.every, task.blend
        )
        self.schedule, self.latency = self.chunks.schedule, self.chunks.latency
        # what one period of the row that runs does, and periods it has left
        self._action, self._left = np.zeros(len(scale)), 0
        self._ran, self._began = -math.inf, now

    def observation(self) -> np.ndarray:
        return self.task.observe(
            self.observation_buffer, self.known, self.twin_command or self.gripper_command, self.slow
        )

    def act(self, action: np.ndarray, now: float) -> None:
        """One action [A] in [-1, 1] for the `slow` periods that begin now; `go_on` in those after the
        first."""
        action = np.clip(action, -1, 1)
        if self.on_action:
            try:
                pictures = self.observation_buffer.pictures()
                self.on_action(self.observation(), pictures, self.task.numbers(action))
            except UserError as e:  # a camera is lost: the arm brakes in order
                self.lost = self.lost or str(e)
        self._action, self._left = np.where(self.task.increments, action / self.slow, action), self.slow
        self.go_on(now)

    def go_on(self, now: float) -> None:
        """The next period of the action: move the target, ask the governor, publish."""
        left, self._left = self._left, self._left - 1
        self.chunks.ran(self._action)
        self.gripper_command.move(self._action, self.model, self.speed, self.task.period, left)
        if self.twin is not None and self.twin_command is not None:
            self.twin_command.move(
                self._action, self.twin.model, np.array(self.twin.robot.velocity), self.task.period, left
            )
        self.command(now)

    def command(self, now: float) -> None:
        """Where the joint targets bring the tool, through the governor onto the wire."""
        self.goal.place(self.gripper_command.joints)
        self.governor.command(
            Command(
                "bridge",
                now,
                self.governor.limits.frame,
                tuple(self.goal.pos),
                tuple(self.goal.quat),
                tuple(self.gripper_command.joints.tolist()) if self.output.joints else (),
            ),
            now,
        )
        self.publish(now)

    def publish(self, now: float) -> None:
        """Publish the governor's setpoint: the way to the target, or braking and standing in HOLD."""
        g = self.governor
        out = g.tick(now, self.task.period)
        if not self.output.send(self.transport.stamp(), out, self.model):
            return
        self.commands += 1
        if self.gripper is not None and g.state == ACTIVE:
            self.gripper.publish(Numbers((min(max((self.gripper_command.grip + 1) / 2, 0.0), 1.0),)))

    def tick(self, policy: PolicyClient, now: float) -> None:
        """Measure, take and request chunks, execute the row of this period."""
        try:
            self.measure(now)
        except UserError as e:  # a state of no use: the arm brakes in order
            self.lost = self.lost or str(e)
        period = self.task.period
        slot = self._began + period * round((now - self._began) / period)  # a tick may come early or late
        if not self.lost and self.governor.state in (ARMED, ACTIVE):
            try:
                self._take(policy, slot)
                if not self._left and self.chunks.due(slot, policy.blocks):
                    self.observation_buffer.check()
                    prefix = self.task.prefix(self.chunks.ask(slot, now, policy.blocks))
                    policy.ask(
                        {"state": self.observation()} | self.observation_buffer.pictures(), slot, prefix
                    )
                    self._take(policy, slot)
            except UserError as e:
                self.lost = str(e)
        row = self.chunks.row(slot)
        if row is not None:
            self.act(row, now)
            self._ran = now
        elif self._left:
            self.go_on(now)
            self._ran = now
        elif now - self._ran <= self.governor.limits.command_timeout:
            self.command(now)  # a short gap: the target stays where it is
        else:
            self.publish(now)

    def _take(self, policy: PolicyClient, slot: float) -> None:
        """A chunk that has come goes into the schedule."""
        if (got := policy.poll(slot)) is not None:
            rows, t0 = self.task.shares(got[0]), got[1]
            self.cut += int((np.abs(rows) > 1 + 1e-6).any(-1).sum())
            self.chunks.take(rows, t0, slot, self.transport.now())

    def report(self, latency: Latency | None = None) -> str:
        """One line: rows executed, times of inference, contracts that the governor enforced. latency: of the
        policy, where this clock stands still while it decides."""
        beyond = f", {self.cut} beyond the axes' ranges" if self.cut else ""
        return report_of(
            latency or self.latency, self.schedule.counts, self.commands, self.governor.counts, beyond
        )


def report_of(
    latency: Latency, c: Mapping[str, int], sent: int, violated: Mapping[str, int], beyond: str = ""
) -> str:
    """`Bridge.report` of counts: of rows (`beyond` is added to them), commands and violated contracts."""
    seen = latency.summary()
    times = (
        f"inference median {1e3 * seen['median']:.1f} ms, p99 {1e3 * seen['p99']:.1f} ms"
        if seen["count"]
        else "no inference"
    )
    rows = ", ".join(f"{c[k]} {k}" for k in ("executed", "late", "superseded", "starved", "cut"))
    chunks, commands = plural(int(seen["count"]), "chunk"), plural(sent, "command")
    broken = ", ".join(f"{n} {k}" for k, n in sorted(violated.items())) or "none"
    return f"{chunks}, {times}; rows {rows}{beyond}; {commands}; contracts violated: {broken}"
