"""What a person holds in their hand: gamepad, SpaceMouse, keyboard, leader arm; and the Operator who holds it
beside a robot.

A device is one text: `gamepad`, `keyboard:/dev/input/event3`, `spacemouse:/dev/hidraw0,mapping=mine.json`,
`leader:left`. It moves the robot while its dead-man button is held, or, where the mapping names none, while
an axis is off its rest. One that is unplugged says so once (`gone`) and never engages again until it is
opened anew.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from robo_rl.errors import UserError
from robo_rl.human.device_files import RESET, EventFile, HidSpaceMouse, InputSource, TerminalKeys, find_device
from robo_rl.human.device_mapping import (
    DEFAULTS,
    SAID,
    TWIST,
    DeviceMapping,
    for_vendor,
    load_mapping,
    parse_device,
)
from robo_rl.human.intervention import CORRECTION, MARKS, NO_MARK, PAUSE, POLICY, Intervention, OperatorView
from robo_rl.human.leader_arm import LeaderArm
from robo_rl.human.pace import Pace
from robo_rl.human.reading import GRIP_TIME, Device, Reading, command, drive_of
from robo_rl.types import ControlSpec

RETRY = 1.0  # s between two tries to open a device that is gone


class MappedDevice:
    """Inputs of a source through a mapping. Beyond the dead zone an axis begins at 0 again, so that it does
    not jump.

    The gripper turns while the dead-man button is held. Where there is none, turning it engages the device
    for `GRIP_TIME` s, so that it closes while the hand stands still.
    """

    def __init__(
        self, source: InputSource, mapping: DeviceMapping, clock: Callable[[], float] = time.monotonic
    ):
        self.source, self.mapping, self.clock = source, mapping, clock
        self.values: dict[str, float] = {}
        self.grip, self.turned = 1.0, -math.inf  # the gripper's command, and when it was turned

    @property
    def gone(self) -> bool:
        return self.source.gone

    def read(self) -> Reading:
        m, marks = self.mapping, []
        for name, value in self.source.events():
            if name == RESET[0]:
                self.values.clear()
                continue
            pressed = value > 0 and not self.values.get(name)
            self.values[name] = value
            word = m.buttons.get(name) if pressed else None
            if word in SAID:
                marks.append(word)
            elif word and (not m.dead_man or self.values.get(m.dead_man)):
                self.grip = {"open": 1.0, "close": -1.0}.get(word, -self.grip)
                self.turned = self.clock()
        twist = np.zeros(6, np.float32)
        for name, (axis, factor) in m.axes.items():
            x = self.values.get(name, 0.0)
            far = max(0.0, abs(x) - m.dead_zone) / (1 - m.dead_zone)
            twist[TWIST.index(axis)] += m.scale * factor * math.copysign(far, x)
        held = (
            bool(self.values.get(m.dead_man))
            if m.dead_man
            else bool(twist.any()) or self.clock() - self.turned < GRIP_TIME
        )
        engaged = held and not self.gone
        return Reading(
            twist.clip(-1, 1) if engaged else np.zeros(6, np.float32), self.grip, engaged, tuple(marks)
        )

    def close(self) -> None:
        self.source.close()


def open_device(text: str, leader: "Callable[[str], LeaderArm] | None" = None) -> Device:
    """The device of such a text; `leader` opens a leader arm by its namespace. UserError with what there
    is."""
    kind, path, told = parse_device(text)
    if kind == "leader":
        if leader is None:
            raise UserError("a leader arm is no device of this command")
        return leader(path)
    mapping = load_mapping(told, kind) if told else DEFAULTS[kind]
    if kind == "keyboard":
        return MappedDevice(EventFile(path) if path else TerminalKeys(), mapping)
    path = path or find_device(kind)
    hid = kind == "spacemouse" and not Path(path).name.startswith("event")
    if hid:
        return MappedDevice(HidSpaceMouse(path), mapping)
    file = EventFile(path)
    return MappedDevice(file, for_vendor(mapping, file.vendor) if kind == "gamepad" else mapping)


class DeviceOperator:
    """The Operator who holds a device beside robot `robot`: helps while the device is engaged and `rest` s
    longer.

    alone: what the robot does while nobody engages: its policy acts, or it stands still (PAUSE). A device
    that goes away while the person helps pauses the robot, until `reopen` has it again (None: for good);
    after `patience` s without one: UserError. is_stopped: the person asked for the end. pace: waits before
    each step until it is due.
    """

    def __init__(
        self,
        device: Device,
        spec: ControlSpec,
        num_envs: int,
        robot: int = 0,
        speed: float = 0.5,
        rest: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        alone: int = POLICY,
        reopen: Callable[[], Device] | None = None,
        patience: float = 30.0,
        pace: Pace | None = None,
    ):
        self.reopen, self.patience, self.pace = reopen, patience, pace
        self.gone_at = self.tried_at = -math.inf  # since when the device is gone; when it was looked for last
        self.device, self.spec, self.n, self.robot, self.alone = device, spec, num_envs, robot, alone
        self.speed, self.rest, self.clock = speed, rest, clock
        self.acted, self.helping, self.is_stopped = -math.inf, False, False
        # of the robot, which a leader arm is aligned with
        self.tool: Callable[[], tuple[np.ndarray, np.ndarray]] | None = None

    def begin(self, mask, obs):
        if mask[self.robot]:
            self.helping, self.acted = False, -math.inf

    def intervene(self, view: OperatorView) -> Intervention:
        actions, phase = np.zeros((self.n, len(self.spec.axes)), np.float32), np.zeros(self.n, np.uint8)
        if self.pace is not None:
            self.pace.wait()
        if self.device.gone and self.reopen is not None:
            self._look_for_device()
        leader = self.device if isinstance(self.device, LeaderArm) else None
        if leader is not None and not leader.aligned and self.tool is not None:
            leader.align(*self.tool())
        if isinstance(self.device, MappedDevice) and not self.helping:
            self._keep_gripper(self.device, view)
        reading, now = self.device.read(), self.clock()
        self.is_stopped |= "stop" in reading.marks
        if reading.engaged:
            self.acted, self.helping = now, True
        if self.device.gone and self.helping:
            phase[self.robot] = PAUSE
        elif now - self.acted <= self.rest:
            actions[self.robot], phase[self.robot] = (
                command(reading, self.spec, self.speed if leader is None else 1.0, view.executed[self.robot]),
                CORRECTION,
            )
        else:
            self.helping, phase[self.robot] = False, self.alone
        marks, attended = np.zeros(self.n, np.uint8), np.zeros(self.n, bool)
        marks[self.robot] = next((MARKS[word] for word in reading.marks if word in MARKS), NO_MARK)
        attended[self.robot] = self.helping
        return Intervention(actions, phase, marks, attended)

    def _look_for_device(self) -> None:
        """Open the device anew, once a second. UserError: it has been gone for too long."""
        assert self.reopen is not None
        now = self.clock()
        if self.gone_at == -math.inf:
            self.gone_at = now
        if now - self.tried_at < RETRY:
            return
        self.tried_at = now
        try:
            self.device = self.reopen()
        except UserError as e:
            if now - self.gone_at >= self.patience and (self.helping or self.alone != POLICY):
                raise UserError(
                    f"the device is gone for {self.patience:g} s, and the robot stands still ({e})"
                ) from None
            return
        self.gone_at, self.helping, self.acted = -math.inf, False, -math.inf

    def _keep_gripper(self, device: MappedDevice, view: OperatorView) -> None:
        """The device goes on from how the gripper was commanded last: taking over drops nothing."""
        for j, axis in enumerate(self.spec.axes):
            if drive_of(axis) == "grip":
                device.grip = -1.0 if view.executed[self.robot, j] < 0 else 1.0

    def get_state(self):
        return {}

    def set_state(self, state, mask):
        pass
