"""From one policy to two arms: both arms' topics -> one observation -> one chunk of joint angles -> each
arm's targets, governed together.

State and action are one row: of each arm its joints and its gripper's opening (0 closed .. 1 open), by the
names `<arm>_<joint>` and `<arm>_gripper` in the order that the policy has them. Actions are absolute. There
is one schedule; each arm is a `Bridge` of its own, with its governor, and what holds one holds both
(`pair_governor`). Targets go to the arms' joints: as fast as their limits let them, never more than LEAD
before the measured joint, and never a step of the tool that a governor would cut.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from controllers.bridge import AXES, Bridge, PolicyInterface, report_of
from controllers.chunking import ChunkRunner, Prefix
from controllers.data_interface import BLEND, TURNS, next_joints
from controllers.governor import ACTIVE, ARMED
from controllers.limits import Limits
from controllers.model import ArmModel
from controllers.node import SAFETY_STATE
from controllers.observation import STALE_PICTURE, camera_topic, picture
from controllers.pair import GRIPPER, ArmPair
from controllers.pair_governor import PairGovernor, Separation
from controllers.policy_client import PolicyClient
from controllers.schedule import Latency
from controllers.transport import CompressedImage, Text, Transport
from robo_rl.errors import UserError, in_range

UNITS = {"rad": 1.0, "deg": math.pi / 180, "1": 1.0, "%": 0.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInterface:
    """What a policy for two arms sees and commands. names: of the state's and the action's numbers, units: of
    each; period [s];
    views: cameras, whose pictures are cut to image_size x image_size pixels. UserError: names that the pair
    has not."""

    pair: ArmPair
    names: tuple[str, ...]
    units: tuple[str, ...]
    period: float
    views: tuple[str, ...] = ()
    image_size: int = 0

    def __post_init__(self) -> None:
        in_range("control period", self.period, 0.001, 1.0)
        axes, plain = self.pair.axes, self.plain
        optional = {a for a in axes if a.endswith(f"_{GRIPPER}")}
        if len(set(plain)) < len(plain) or set(plain) - set(axes) or set(axes) - optional - set(plain):
            wrong = [n for n in plain if n not in axes] + [
                f"no {n}" for n in axes if n not in optional and n not in plain
            ]
            raise UserError(
                f"the policy's axes do not fit pair {self.pair.name}: "
                f"{', '.join(wrong[:6]) or 'one is named twice'}; needed, in any order: {', '.join(axes)}"
            )
        for name, unit in zip(plain, self.units, strict=True):
            if unit not in (("1", "%") if name in optional else ("rad", "deg")):
                raise UserError(
                    f"{name} is in {unit!r}: joints are commanded in rad or deg, grippers' openings in 1 or %"
                )

    @property
    def plain(self) -> tuple[str, ...]:
        """Names without LeRobot's ending `.pos`."""
        return tuple(n.removesuffix(".pos") for n in self.names)

    def has_gripper(self, arm: str) -> bool:
        return f"{arm}_{GRIPPER}" in self.plain

    def columns(self, arm: str) -> list[int]:
        """Where an arm's joints are in the row, then its gripper where it has one."""
        axes = [*self.pair.arms[arm].joints, *([GRIPPER] if self.has_gripper(arm) else [])]
        return [self.plain.index(f"{arm}_{axis}") for axis in axes]

    @property
    def factors(self) -> np.ndarray:
        """[A] to rad and openings."""
        return np.array([UNITS[u] for u in self.units])

    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        """(middle, half) [A] of each axis' range, rad and openings."""
        middle, half = np.full(len(self.names), 0.5), np.full(len(self.names), 0.5)
        for arm, robot in self.pair.arms.items():
            for k, low, high in zip(self.columns(arm), robot.lower, robot.upper, strict=False):
                low, high = max(low, -TURNS), min(high, TURNS)
                middle[k], half[k] = (low + high) / 2, (high - low) / 2
        return middle, half


class PairBridge:
    """One policy on two arms. `begin` when the topics of both are there, then `tick` every control period.

    transports: by the arms' names, on which their topics have no prefix; transport: on which the cameras'
    have none."""

    def __init__(
        self,
        task: PairInterface,
        transport: Transport,
        transports: Mapping[str, Transport],
        models: Mapping[str, ArmModel],
        limits: Mapping[str, Limits],
        commands: Mapping[str, str],
        separation: Separation | None,
        *,
        dry_run: bool = False,
    ):
        """models: of both arms; separation: of these models; commands: how each arm is commanded, but by
        poses."""
        self.task, self.transport, self.dry_run, self.pair = task, transport, dry_run, task.pair
        self.bridges: dict[str, Bridge] = {}
        for name, robot in task.pair.arms.items():
            if commands[name] == "pose":
                raise UserError(
                    f"{name} arm: a policy of joint angles commands joints: joint, forward_position or "
                    "joint_trajectory"
                )
            alone = PolicyInterface(
                state_names=("gripper",) if task.has_gripper(name) else ("joint1",),
                action_names=AXES,
                scale=(0.01,) * 6,
                period=task.period,
            )
            self.bridges[name] = Bridge(
                robot,
                alone,
                transports[name],
                models[name],
                limits[name],
                dry_run=dry_run,
                command=commands[name],
            )
        self.governor = PairGovernor({name: b.governor for name, b in self.bridges.items()}, separation)
        self.safety = {
            name: t.subscription(SAFETY_STATE, Text, "latched", depth=8) for name, t in transports.items()
        }
        self.cameras = {
            view: transport.subscription(camera_topic(view), CompressedImage) for view in task.views
        }
        self.spare = {
            name: ArmModel(models[name].spec, robot.joints, robot.site, gravity=False, coriolis=False)
            for name, robot in task.pair.arms.items()
        }
        self.middle, self.half = task.spans()
        self.factors, self.columns = task.factors, {name: task.columns(name) for name in task.pair.arms}
        # state, pictures, action: each that runs
        self.on_action: Callable[[np.ndarray, dict, np.ndarray], None] | None = None
        # of `chunking.ChunkRunner`; to be set before `begin`
        self.chunking, self.every, self.lost = "blend", 0, ""
        self.slow = 1

    @property
    def commands(self) -> int:
        return sum(b.commands for b in self.bridges.values())

    def missing(self) -> list[str]:
        """Topics on which no message has come."""
        out = [
            f"{name}/{topic}" for name, b in self.bridges.items() for topic in b.observation_buffer.missing()
        ]
        return out + [camera_topic(view) for view, box in self.cameras.items() if box.latest() is None]

    def need_topics(self, place: str = "this domain") -> None:
        """UserError: nothing came on a topic of an arm; place: the network that was listened on."""
        if missing := self.missing():
            raise UserError(
                f"nothing came on {', '.join(missing)}: are both arms there (robo_rl sim-arm), in "
                f"{place}?" + "".join(f" {c}." for c in self.transport.complaints())
            )

    def measure(self, now: float) -> None:
        """Read both arms' messages, and hold both where one of them is held."""
        for name, bridge in self.bridges.items():
            try:
                bridge.measure(now)
            except UserError as e:  # a state of no use: both arms brake in order
                self.lost = self.lost or f"{name} arm: {e}"
        for name, box in self.safety.items():
            held = [
                got.message.data for got in box.take() if got.message.data.startswith(("HOLD", "STOPPED"))
            ]
            if held and not self.dry_run and (g := self.bridges[name].governor).state in (ARMED, ACTIVE):
                g.hold(now, "pair", f"it says {held[-1]}")
        self.governor.couple(now)

    def begin(self, now: float, leased: bool = False) -> None:
        """Arm this side's governors, or neither. UserError says what is missing."""
        self.need_topics()
        if not self.dry_run:
            self.pair.need_limits()
        for name, bridge in self.bridges.items():
            self.safety[name].take()  # what was said until now is not about this
            try:
                bridge.begin(now, leased)
            except UserError as e:
                self.governor.disarm(now)
                raise UserError(f"{name} arm: {e}") from None
        self.governor.couple(now)
        if self.governor.state not in (ARMED, ACTIVE):
            raise UserError(self.governor.reason)
        self.chunks = ChunkRunner(
            self.task.period,
            np.zeros(len(self.task.names), bool),
            np.ones(len(self.task.names)),
            self.chunking,
            self.every,
            BLEND,
        )
        self.schedule, self.latency = self.chunks.schedule, self.chunks.latency
        self.target = self.row()
        self._ran, self._began = -math.inf, now

    def row(self) -> np.ndarray:
        """[A] measured joints [rad] and openings, in the policy's order."""
        out = np.zeros(len(self.task.names))
        for name, bridge in self.bridges.items():
            measured = [*bridge.model.q.tolist(), bridge.observation_buffer.opening]
            for k, x in zip(self.columns[name], measured, strict=False):
                out[k] = x
        return out

    def observation(self) -> np.ndarray:
        """float32 [A] in the policy's units."""
        return (self.row() / self.factors).astype(np.float32)

    def pictures(self) -> dict[str, np.ndarray]:
        """The newest picture of each camera: image/<view> uint8 [h, w, 3]. UserError: one is missing or too
        old."""
        out, now = {}, self.transport.now()
        for view, box in self.cameras.items():
            got = box.latest()
            if got is None or now - got.at > STALE_PICTURE:
                raise UserError(f"no picture on {camera_topic(view)} within {STALE_PICTURE:g} s")
            out[f"image/{view}"] = picture(got.message, self.task.image_size)
        return out

    def act(self, action: np.ndarray, now: float) -> None:
        """One action [A] in -1 .. 1 of the axes' ranges, for the period that begins now."""
        self.target = self.middle + self.half * np.clip(action, -1, 1)
        if self.on_action:
            try:
                pictures, row = self.pictures(), (self.target / self.factors).astype(np.float32)
                self.on_action(self.observation(), pictures, row)
            except UserError as e:  # a camera is lost: both arms brake in order
                self.lost = self.lost or str(e)
        self.command(now)

    def command(self, now: float) -> None:
        """Bring both arms nearer to the target. What one governor does about it the other's arm knows before
        it is commanded."""
        for name, bridge in self.bridges.items():
            columns, hand = self.columns[name], bridge.gripper_command
            hand.joints = self._next(name, bridge, self.target[columns])
            if len(columns) > bridge.model.n:
                hand.grip = 2 * float(self.target[columns[-1]]) - 1
            bridge.command(now)
            self.governor.couple(now)

    def _next(self, name: str, bridge: Bridge, target: np.ndarray) -> np.ndarray:
        """Joint targets [n] of this period on the way to those of the policy, which the governor lets pass
        whole."""
        m = bridge.model
        return next_joints(
            bridge.gripper_command.joints,
            target[: m.n],
            m.q,
            bridge.speed * self.task.period,
            self.spare[name],
            bridge.governor.limits.step,
        )

    def publish(self, now: float) -> None:
        """Publish both governors' set points."""
        for bridge in self.bridges.values():
            bridge.publish(now)
            self.governor.couple(now)

    def tick(self, policy: PolicyClient, now: float) -> None:
        """Measure, take and request chunks, execute the row of this period."""
        self.measure(now)
        # a tick may come early or late
        slot = self._began + self.task.period * round((now - self._began) / self.task.period)
        if not self.lost and self.governor.state in (ARMED, ACTIVE):
            try:
                self._take(policy, slot)
                if self.chunks.due(slot, policy.blocks):
                    prefix = self._units(self.chunks.ask(slot, now, policy.blocks))
                    policy.ask({"state": self.observation()} | self.pictures(), slot, prefix)
                    self._take(policy, slot)
            except UserError as e:
                self.lost = str(e)
        row = self.chunks.row(slot)
        if row is not None and not self.lost:
            self.act(row, now)
            self._ran = now
        elif now - self._ran <= min(b.governor.limits.command_timeout for b in self.bridges.values()):
            self.command(now)  # a short gap: the target stays where it is
        else:
            self.publish(now)

    def _take(self, policy: PolicyClient, slot: float) -> None:
        """A chunk that has come goes into the schedule, as shares of the axes' ranges."""
        if (got := policy.poll(slot)) is not None:
            rows, t0 = got
            if rows.ndim == 2 and rows.shape[1] == len(self.middle):
                rows = (rows * self.factors - self.middle) / self.half
            self.chunks.take(rows, t0, slot, self.transport.now())

    def _units(self, prefix: Prefix | None) -> Prefix | None:
        """What the next chunk must agree with, in the policy's units."""
        return (
            None
            if prefix is None
            else replace(prefix, rows=(self.middle + self.half * prefix.rows) / self.factors)
        )

    def report(self, latency: Latency | None = None) -> str:
        """One line: rows executed, times of inference, contracts that the governors enforced, how near the
        arms were. latency: as `Bridge.report`'s."""
        s = self.governor.separation
        apart = "" if s is None or s.least == math.inf else f"; least distance {1000 * s.least:.0f} mm"
        said = report_of(latency or self.latency, self.schedule.counts, self.commands, self.governor.counts)
        return said + apart
