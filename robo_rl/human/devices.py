"""What a person holds in their hand: gamepad, SpaceMouse, terminal keyboard, leader arm. Each is a `Device`.

Gamepads and SpaceMice are read from the kernel's own files (joystick API, hidraw), so no library is needed; tests give
them a pipe. A device that is unplugged says so once (`gone`) and never engages again until it is opened anew.
"""

import errno
import math
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from robo_rl.errors import UserError, choose
from robo_rl.geometry import conjugate, exp, from_matrix, log, multiply
from robo_rl.human.intervention import CORRECTION, PAUSE, POLICY, Intervention, OperatorView
from robo_rl.types import ControlSpec

KINDS = ("gamepad", "spacemouse", "leader")
SILENCE = 0.2  # s without a word after which a leader arm counts as gone
REST = 0.08  # share of full deflection that counts as none


@dataclass(frozen=True, slots=True)
class Reading:
    """What a device says now: `twist[6]` in [-1, 1] (translation, rotation), gripper -1 (close) .. 1, engaged: the
    person acts.
    """

    twist: np.ndarray
    grip: float
    engaged: bool


class Device(Protocol):
    gone: bool

    def read(self) -> Reading: ...
    def close(self) -> None: ...


class _File:
    """A kernel device file, read without blocking; `gone` once it is unplugged."""

    def __init__(self, path: str | int):
        try:
            self.fd = path if isinstance(path, int) else os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            near = sorted(str(p) for p in (*Path("/dev/input").glob("js*"), *Path("/dev").glob("hidraw*")))
            raise UserError(f"cannot open {path}: {e.strerror}. Devices here: {', '.join(near) or 'none'}") from e
        os.set_blocking(self.fd, False)
        self.gone = False

    def packets(self, size: int) -> list[bytes]:
        """All whole packets since the last call."""
        out = []
        while not self.gone:
            try:
                data = os.read(self.fd, size)
            except BlockingIOError:
                break
            except OSError as e:
                if e.errno not in (errno.ENODEV, errno.EIO, errno.EBADF):
                    raise
                data = b""
            if not data:
                self.gone = True
                break
            out.append(data)
        return out

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.gone = True


class Gamepad(_File):
    """A joystick of the kernel's API (/dev/input/js0; struct js_event: u32 ms, s16 value, u8 type, u8 number).

    Left stick: x and y; right stick: z and yaw; button 0 opens and closes. Engaged while a stick is off its rest or the
    trigger button 5 is held.
    """

    AXES = ((1, 0, -1.0), (0, 1, -1.0), (4, 2, -1.0), (3, 5, -1.0))  # (axis of the pad, of the twist, sign)

    def __init__(self, path: str | int):
        super().__init__(path)
        self.axes, self.buttons, self.grip = {}, {}, 1.0

    def read(self) -> Reading:
        for packet in self.packets(8):
            if len(packet) < 8:
                continue
            _, value, kind, number = struct.unpack("<IhBB", packet)
            if kind & 0x7F == 2:
                self.axes[number] = value / 32767
            elif kind & 0x7F == 1:
                if number == 0 and value and not self.buttons.get(0) and not kind & 0x80:
                    self.grip = -self.grip
                self.buttons[number] = value
        twist = np.zeros(6, np.float32)
        for a, k, sign in self.AXES:
            x = self.axes.get(a, 0.0)
            twist[k] = sign * x if abs(x) > REST else 0.0
        engaged = not self.gone and (bool(twist.any()) or bool(self.buttons.get(5)))
        return Reading(twist if engaged else np.zeros(6, np.float32), self.grip, engaged)


class SpaceMouse(_File):
    """A 3Dconnexion SpaceMouse by hidraw: report 1 translation, 2 rotation (three s16, +-350), 3 buttons.

    Models that send both in report 1 (twelve bytes) are read too. Button 0 opens and closes.
    """

    FULL = 350.0

    def __init__(self, path: str | int):
        super().__init__(path)
        self.twist, self.button, self.grip = np.zeros(6, np.float32), 0, 1.0

    def read(self) -> Reading:
        for packet in self.packets(64):
            report, values = packet[0], np.frombuffer(packet[1:1 + 2 * ((len(packet) - 1) // 2)], "<i2") / self.FULL
            if report == 1 and len(values) >= 6:
                self.twist[:] = values[:6]
            elif report in (1, 2) and len(values) >= 3:
                self.twist[3 * (report - 1):3 * report] = values[:3]
            elif report == 3 and len(packet) > 1:
                if packet[1] & 1 and not self.button & 1:
                    self.grip = -self.grip
                self.button = packet[1]
        x, y, z, rx, ry, rz = self.twist.clip(-1, 1)
        twist = np.array([-y, -x, -z, -ry, -rx, -rz], np.float32)  # the puck's axes as the robot's base has them
        twist = np.where(np.abs(twist) > REST, twist, 0).astype(np.float32)
        engaged = bool(twist.any()) and not self.gone
        return Reading(twist if engaged else np.zeros(6, np.float32), self.grip, engaged)


class Keyboard(_File):
    """Keys typed in a terminal (give it a descriptor in cbreak mode); a terminal has no key-up, so a key counts for
    `HOLD` s.
    """

    HOLD = 0.15
    KEYS = {"w": (0, 1), "s": (0, -1), "a": (1, 1), "d": (1, -1), "q": (2, 1), "e": (2, -1), "i": (3, 1), "k": (3, -1),
            "j": (4, 1), "l": (4, -1), "u": (5, 1), "o": (5, -1)}

    def __init__(self, path: int, clock: Callable[[], float] = time.monotonic):
        super().__init__(path)
        self.clock, self.pressed, self.grip = clock, {}, 1.0

    def read(self) -> Reading:
        now = self.clock()
        for packet in self.packets(64):
            for key in packet.decode(errors="replace").lower():
                if key == "g":
                    self.grip = -self.grip
                elif key in self.KEYS:
                    self.pressed[key] = now
        twist = np.zeros(6, np.float32)
        for key, when in self.pressed.items():
            if now - when < self.HOLD:
                axis, sign = self.KEYS[key]
                twist[axis] += sign
        return Reading(twist, self.grip, bool(twist.any()) and not self.gone)


class LeaderArm:
    """A second arm that the person moves; `pose()` gives its tool (position [3], quaternion wxyz [4], gripper -1 .. 1)
    or None.

    The robot is to move as the leader does: twist = (the leader's motion that the robot has not made) / (full command of the
    axis), so that a fast one is caught up with. It engages only once the leader is within `near` [m] and `turned` [rad] of the
    robot's own tool, `align()`: taking over from another pose would make the robot jump. `full`: metres and radians of a full
    command. After a silence it must be aligned anew. away: how far off it was when last asked, [m] and [rad].
    """

    def __init__(self, pose: Callable[[], tuple | None], full: tuple[float, float], near: float = 0.02,
                 turned: float = 0.2):
        self.pose, self.full, self.near, self.turned = pose, full, near, turned
        self.last, self.aligned, self.gone, self.away = None, False, False, (math.inf, math.inf)

    def align(self, position: np.ndarray, quat: np.ndarray) -> bool:
        """Whether the leader is where the robot's tool is; only then it engages."""
        now = self.pose()
        self.away = (math.inf, math.inf) if now is None else (
            float(np.linalg.norm(np.asarray(now[0]) - position)),
            float(np.linalg.norm(log(multiply(np.asarray(now[1]), conjugate(quat))))))
        self.aligned = self.away[0] <= self.near and self.away[1] <= self.turned
        self.last = None if now is None else (np.asarray(now[0]), np.asarray(now[1]))
        return self.aligned

    def read(self) -> Reading:
        now = self.pose()
        if now is None:
            self.aligned, self.last = False, None
            return Reading(np.zeros(6, np.float32), 0.0, False)
        twist = np.zeros(6, np.float32)
        if self.aligned and self.last is not None:
            at, turn = self.last
            twist[:3] = (np.asarray(now[0]) - at) / self.full[0]
            twist[3:] = log(multiply(np.asarray(now[1]), conjugate(turn))) / self.full[1]
            twist = twist.clip(-1, 1)
            self.last = at + twist[:3] * self.full[0], multiply(exp(twist[3:] * self.full[1]), turn)
        return Reading(twist, float(now[2]), self.aligned)

    def close(self) -> None:
        self.gone = True


TOOL_STATE = ("ee_x", "ee_y", "ee_z", "ee_axis_x", "ee_axis_y", "ee_tilt_x", "ee_tilt_y")


def check_tool_state(names: tuple[str, ...]) -> None:
    """UserError unless a state of these entries has the tool's pose."""
    if missing := [n for n in TOOL_STATE if n not in names]:
        raise UserError(f"a leader arm needs a state that tells where the robot's tool is, this one has no {missing[0]}; use --sim mujoco")


def tool_of(state: np.ndarray, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(position [3], quaternion wxyz [4]) of the tool in a state that has `ee_x ee_y ee_z`, two entries of the hand's first
    axis (`ee_axis_x ee_axis_y`) and two of its third, which points down (`ee_tilt_x ee_tilt_y`). UserError: it does not."""
    check_tool_state(names)
    at = {n: float(state[names.index(n)]) for n in TOOL_STATE}
    z = np.array([at["ee_tilt_x"], at["ee_tilt_y"], 0.0])
    z[2] = -math.sqrt(max(0.0, 1 - z @ z))
    x = np.array([at["ee_axis_x"], at["ee_axis_y"], 0.0])
    x[2] = -(x @ z) / z[2]
    x /= np.linalg.norm(x)
    return np.array([at["ee_x"], at["ee_y"], at["ee_z"]]), from_matrix(np.stack([x, np.cross(z, x), z], 1))


def command(reading: Reading, spec: ControlSpec, speed: float = 1.0) -> np.ndarray:
    """float32[A] of a reading: the twist on the first axes that are not absolute, the gripper on the absolute one."""
    out, k = np.zeros(len(spec.axes), np.float32), 0
    for j, axis in enumerate(spec.axes):
        if axis.kind == "absolute":
            out[j] = reading.grip
        elif k < 6:
            out[j], k = speed * reading.twist[k], k + 1
    return out.clip(-1, 1)


def open_device(text: str, leader: "Callable[[str], LeaderArm] | None" = None) -> Device:
    """`gamepad:/dev/input/js0`, `spacemouse:/dev/hidraw0`, or `leader:NAMESPACE`, which `leader` opens; UserError with what there is."""
    kind, colon, path = text.partition(":")
    choose("device", kind, KINDS)
    if not colon:
        raise UserError(f"a device is kind:file, for example gamepad:/dev/input/js0, got {text!r}")
    if kind == "leader":
        if leader is None:
            raise UserError("a leader arm is heard by robo_rl console alone")
        return leader(path)
    return Gamepad(path) if kind == "gamepad" else SpaceMouse(path)


class DeviceOperator:
    """The Operator who holds a device beside robot `robot`: helps while the device is engaged and `rest` s longer.

    A device that goes away while the person helps pauses the robot, and it stays paused.
    """

    def __init__(self, device: Device, spec: ControlSpec, num_envs: int, robot: int = 0, speed: float = 0.5,
                 rest: float = 0.5,
                 clock: Callable[[], float] = time.monotonic):
        self.device, self.spec, self.n, self.robot = device, spec, num_envs, robot
        self.speed, self.rest, self.clock = speed, rest, clock
        self.acted, self.helping = -math.inf, False

    def begin(self, mask, obs):
        if mask[self.robot]:
            self.helping, self.acted = False, -math.inf

    def intervene(self, view: OperatorView) -> Intervention:
        actions, phase = np.zeros((self.n, len(self.spec.axes)), np.float32), np.zeros(self.n, np.uint8)
        reading, now = self.device.read(), self.clock()
        if reading.engaged:
            self.acted, self.helping = now, True
        if self.device.gone and self.helping:
            phase[self.robot] = PAUSE
        elif now - self.acted <= self.rest:
            actions[self.robot], phase[self.robot] = command(reading, self.spec, self.speed), CORRECTION
        else:
            self.helping, phase[self.robot] = False, POLICY
        return Intervention(actions, phase)

    def get_state(self):
        return {}

    def set_state(self, state, mask):
        pass
