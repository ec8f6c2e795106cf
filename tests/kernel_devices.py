"""Input devices that the kernel makes of what a test writes: by uinput an event device, by uhid a HID device
with its hidraw file."""

import fcntl
import os
import struct
import time
from contextlib import suppress
from pathlib import Path

UI_CREATE, UI_DESTROY, UI_SETUP, UI_ABS_SETUP, UI_SYSNAME = 0x5501, 0x5502, 0x405C5503, 0x401C5504, 0x8040552C
UI_BITS = {0: 0x40045564, 1: 0x40045565, 3: 0x40045567}  # UI_SET_EVBIT, KEYBIT, ABSBIT
UHID_DESTROY, UHID_CREATE2, UHID_INPUT2 = 1, 11, 12
PATIENCE = 10.0  # s that a device file may take to appear


def wait_for(look):
    """What `look` finds first. TimeoutError: nothing."""
    end = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError("the kernel made no device file")
        time.sleep(0.01)
    return found


class UinputDevice:
    """keys: codes that it has. axes: code -> (rest, lowest, highest)."""

    def __init__(self, name, keys=(), axes=None, repeats=False, vendor=1):
        self.fd = os.open("/dev/uinput", os.O_WRONLY | os.O_NONBLOCK)
        # EV_KEY, EV_ABS, EV_REP
        for kind in {1 for _ in keys} | {3 for _ in axes or ()} | ({0x14} if repeats else set()):
            fcntl.ioctl(self.fd, UI_BITS[0], kind)
        for code in keys:
            fcntl.ioctl(self.fd, UI_BITS[1], code)
        for code, (rest, low, high) in (axes or {}).items():
            fcntl.ioctl(self.fd, UI_BITS[3], code)
            fcntl.ioctl(self.fd, UI_ABS_SETUP, struct.pack("Hxxiiiiii", code, rest, low, high, 0, 0, 0))
        fcntl.ioctl(self.fd, UI_SETUP, struct.pack("HHHH80sI", 3, vendor, 1, 1, name.encode(), 0))
        fcntl.ioctl(self.fd, UI_CREATE)
        text = bytearray(64)
        fcntl.ioctl(self.fd, UI_SYSNAME, text)
        folder = Path("/sys/devices/virtual/input", text.split(b"\0")[0].decode())
        event = wait_for(lambda: next(folder.glob("event*"), None))
        self.path = f"/dev/input/{event.name}"
        wait_for(lambda: os.access(self.path, os.R_OK))

    def write(self, events):
        os.write(self.fd, events)

    def close(self):
        with suppress(OSError):
            fcntl.ioctl(self.fd, UI_DESTROY)
        os.close(self.fd)

    __enter__ = lambda self: self  # noqa: E731
    __exit__ = lambda self, *_: self.close()  # noqa: E731


class UhidDevice:
    """A USB HID device by its report descriptor."""

    def __init__(self, name, vendor, product, descriptor):
        self.fd = os.open("/dev/uhid", os.O_RDWR)
        before = set(Path("/sys/class/hidraw").glob("*"))
        os.write(
            self.fd,
            struct.pack(
                "<I128s64s64sHHIIII4096s",
                UHID_CREATE2,
                name.encode(),
                b"",
                b"",
                len(descriptor),
                3,
                vendor,
                product,
                0,
                0,
                descriptor,
            ),
        )
        made = wait_for(lambda: set(Path("/sys/class/hidraw").glob("*")) - before)
        self.path = f"/dev/{made.pop().name}"
        wait_for(lambda: os.access(self.path, os.R_OK))

    def write(self, report):
        os.write(self.fd, struct.pack("<IH4096s", UHID_INPUT2, len(report), report))

    def close(self):
        with suppress(OSError):
            os.write(self.fd, struct.pack("<I", UHID_DESTROY))
        os.close(self.fd)

    __enter__ = lambda self: self  # noqa: E731
    __exit__ = lambda self, *_: self.close()  # noqa: E731


def _axes(report, first):
    """A report of three axes from usage `first` on, signed 16 bit, +-350."""
    return (
        bytes([0xA1, 0x00, 0x85, report, 0x16, 0xA2, 0xFE, 0x26, 0x5E, 0x01])
        + b"".join(bytes([0x09, first + i]) for i in range(3))
        + bytes([0x75, 16, 0x95, 3, 0x81, 0x06, 0xC0])
    )


# multi-axis controller: X Y Z, RX RY RZ
SPACE_MOUSE = (
    bytes([0x05, 0x01, 0x09, 0x08, 0xA1, 0x01])
    + _axes(1, 0x30)
    + _axes(2, 0x33)
    + bytes(
        [
            0xA1,
            0x02,
            0x85,
            3,
            0x05,
            0x09,
            0x19,
            1,
            0x29,
            16,
            0x15,
            0,
            0x25,
            1,
            0x75,
            1,
            0x95,
            16,
            0x81,
            0x02,
            0xC0,
            0xC0,
        ]
    )
)
"""A report descriptor of the shape that 3Dconnexion's devices have; written from their reports, not read off
a device."""
