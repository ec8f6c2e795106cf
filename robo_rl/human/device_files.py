"""The kernel's files of input devices, read without a library: evdev (/dev/input/event*), hidraw, and a
terminal.

Each is an `InputSource`: `events()` gives (name, value) of all that happened since the last call, names as in
`device_mapping`, axes in [-1, 1], keys and buttons 0 or 1. Reads never wait, and one call reads at most
`MOST` packets, so a device that floods cannot hold up a control loop. A device that is unplugged is `gone`
from then on.
"""

import array
import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from robo_rl.errors import UserError
from robo_rl.human.device_mapping import EV_ABS, EV_KEY, NAMES

MOST = 32  # packets of one call
EVENTS = 16  # of a packet
EVENT = struct.Struct("@llHHi")  # struct input_event: seconds, microseconds, type, code, value
SYN, SYN_REPORT, SYN_DROPPED = 0, 0, 3
STICK, HAT = (-32768, 32767), (-1, 1)  # ranges of axes where the file tells none
RESET = ("", 0.0)  # what was pressed or deflected before is not known any more: everything is at rest
FULL = 350.0  # largest value of a SpaceMouse's axes
VENDORS = ("046D", "256F")  # Logitech, which sold the first SpaceMice, and 3Dconnexion
KEY_HOLD = 0.15  # s that a typed key counts for: a terminal tells no key-up


class InputSource(Protocol):
    gone: bool

    def events(self) -> list[tuple[str, float]]: ...
    def close(self) -> None: ...


class DeviceFile:
    """A file of the kernel, read without waiting; `gone` once it is unplugged. path: or a descriptor that is
    open."""

    def __init__(self, path: str | int):
        try:
            self.fd = (
                path if isinstance(path, int) else os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            )
        except OSError as e:
            near = sorted(str(p) for p in (*Path("/dev/input").glob("event*"), *Path("/dev").glob("hidraw*")))
            how = (
                "; add yourself to the group that owns it (ls -l), often `input`"
                if e.errno == errno.EACCES
                else ""
            )
            raise UserError(
                f"cannot open {path}: {e.strerror}{how}. Devices here: {', '.join(near) or 'none'}"
            ) from e
        os.set_blocking(self.fd, False)
        self.gone = False

    def packets(self, size: int) -> list[bytes]:
        """What came since the last call, in reads of at most `size` bytes, at most `MOST` of them."""
        out = []
        while not self.gone and len(out) < MOST:
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


class EventFile(DeviceFile):
    """An event device. After an overflow (SYN_DROPPED) keys and axes are asked for anew; where they cannot
    be, all are at rest."""

    def __init__(self, path: str | int):
        super().__init__(path)
        self.rest, self.dropped = b"", False
        self.vendor = self._ask_vendor()
        if isinstance(path, str) and Path(path).name.startswith("js"):
            self.close()
            raise UserError(
                f"{path} is of the old joystick interface; take its event device (ls -l "
                "/dev/input/by-id/*-event-joystick)"
            )
        self.ranges = {
            name: self._ask_axis(code)[1] for (kind, code), name in NAMES.items() if kind == EV_ABS
        }

    def events(self) -> list[tuple[str, float]]:
        out = []
        for data in self.packets(EVENTS * EVENT.size):
            data = self.rest + data
            whole = len(data) // EVENT.size * EVENT.size
            self.rest = data[whole:]
            for _, _, kind, code, value in EVENT.iter_unpack(data[:whole]):
                if kind == SYN and code == SYN_DROPPED:
                    self.dropped = True
                    out.append(RESET)
                elif self.dropped:
                    if kind == SYN and code == SYN_REPORT:
                        self.dropped = False
                        out += self._now()
                elif name := NAMES.get((kind, code)):
                    out.append((name, self._axis(name, value) if kind == EV_ABS else float(bool(value))))
        return out

    def _axis(self, name: str, value: int) -> float:
        low, high = self.ranges[name]
        return max(-1.0, min(1.0, 2 * (value - low) / (high - low) - 1))

    def _ask_vendor(self) -> int:
        """Who made the device (USB's number), by the ioctl EVIOCGID; 0: this file does not say."""
        ids = array.array("H", [0] * 4)  # bus, vendor, product, version
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.fd, 0x80084502, ids)
        return ids[1]

    def _ask_axis(self, code: int) -> tuple[int | None, tuple[int, int]]:
        """(value, range) of an axis by the ioctl EVIOCGABS; None: this file answers none."""
        info = array.array("i", [0] * 6)
        try:
            fcntl.ioctl(self.fd, 0x80184540 + code, info)
        except OSError:
            return None, HAT if 0x10 <= code < 0x18 else STICK
        return (info[0], (info[1], info[2])) if info[2] > info[1] else (None, STICK)

    def _now(self) -> list[tuple[str, float]]:
        """Axes off their rest and keys that are down, by EVIOCGABS and EVIOCGKEY."""
        axes = [(name, self._ask_axis(code)[0]) for (kind, code), name in NAMES.items() if kind == EV_ABS]
        out = [(name, self._axis(name, value)) for name, value in axes if value is not None]
        bits = bytearray(96)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.fd, 0x80004518 + (len(bits) << 16), bits)
        return out + [
            (name, 1.0)
            for (kind, code), name in NAMES.items()
            if kind == EV_KEY and bits[code // 8] >> code % 8 & 1
        ]


class HidSpaceMouse(DeviceFile):
    """A 3Dconnexion SpaceMouse by hidraw: report 1 translation, 2 rotation (three s16, +-350), 3 buttons, one
    bit each.

    Models that send both in report 1 (twelve bytes) are read too.
    """

    def events(self) -> list[tuple[str, float]]:
        out = []
        for packet in self.packets(64):
            report, body = packet[0], packet[1:]
            values = [x / FULL for x in struct.unpack(f"<{len(body) // 2}h", body[: len(body) // 2 * 2])]
            if report == 1 and len(values) >= 6:
                out += zip(AXES, values, strict=False)
            elif report in (1, 2) and len(values) >= 3:
                out += zip(AXES[3 * (report - 1) :], values[:3], strict=False)
            elif report == 3 and body:
                out += [(f"BTN_{k}", float(int.from_bytes(body[:2], "little") >> k & 1)) for k in range(10)]
        return [(name, max(-1.0, min(1.0, value))) for name, value in out]


AXES = ("ABS_X", "ABS_Y", "ABS_Z", "ABS_RX", "ABS_RY", "ABS_RZ")
ESCAPES = {"\x1b[A": "KEY_UP", "\x1b[B": "KEY_DOWN", "\x1b[C": "KEY_RIGHT", "\x1b[D": "KEY_LEFT"}
TYPED = {
    " ": "KEY_SPACE",
    "\x1b": "KEY_ESC",
    "\x7f": "KEY_BACKSPACE",
    "\n": "KEY_ENTER",
    "\t": "KEY_TAB",
    "-": "KEY_MINUS",
    "=": "KEY_EQUAL",
    ",": "KEY_COMMA",
    ".": "KEY_DOT",
    "/": "KEY_SLASH",
}


class TerminalKeys(DeviceFile):
    """Keys typed in a terminal, which tells no key-up: a key is down for `KEY_HOLD` s. Without a path: this
    process's terminal, which shows nothing of what is typed until `close`."""

    def __init__(self, path: int | None = None, clock: Callable[[], float] = time.monotonic):
        try:
            super().__init__("/dev/tty" if path is None else path)
        except UserError:
            raise UserError(
                "keyboard reads the keys of a terminal, and this process has none: start it in one, or name "
                "the keyboard's file, for example keyboard:/dev/input/event3"
            ) from None
        self.clock, self.until, self.before = clock, {}, None
        if os.isatty(self.fd):
            import termios
            import tty

            self.before = termios.tcgetattr(self.fd)
            tty.setcbreak(self.fd)

    def events(self) -> list[tuple[str, float]]:
        out, now = [], self.clock()
        for data in self.packets(64):
            text = data.decode(errors="replace")
            for escape, name in ESCAPES.items():
                if escape in text:
                    text = text.replace(escape, "")
                    out += self._press(name, now)
            for key in text.lower():
                if name := TYPED.get(key) or (
                    f"KEY_{key.upper()}" if key.isalnum() and key.isascii() else ""
                ):
                    out += self._press(name, now)
        over = [name for name, at in self.until.items() if at <= now]
        for name in over:
            del self.until[name]
        return out + [(name, 0.0) for name in over]

    def _press(self, name: str, now: float) -> list[tuple[str, float]]:
        held = name in self.until
        self.until[name] = now + KEY_HOLD
        return [] if held else [(name, 1.0)]

    def close(self) -> None:
        if self.before is not None and self.fd >= 0:
            import termios

            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.fd, termios.TCSADRAIN, self.before)
        super().close()


def find_device(kind: str) -> str:
    """Path of the first gamepad (an event device) or SpaceMouse (hidraw) of this machine. UserError: there is
    none."""
    if kind == "gamepad":
        found = sorted(str(p) for p in Path("/dev/input/by-id").glob("*-event-joystick"))
    else:
        found = sorted(
            f"/dev/{p.parent.parent.name}"
            for p in Path("/sys/class/hidraw").glob("*/device/uevent")
            if any(
                f"HID_ID=0003:0000{v}" in (text := p.read_text().upper()) and ("SPACE" in text or v == "256F")
                for v in VENDORS
            )
        )
    if not found:
        where = "/dev/input/by-id/*-event-joystick" if kind == "gamepad" else "/sys/class/hidraw"
        raise UserError(
            f"no {kind} is plugged in ({where}); name its file, for example {kind}:/dev/"
            + ("input/event5" if kind == "gamepad" else "hidraw0")
        )
    return found[0]
