"""Streams of input events for tests: a file that stands for a device, filled before it is read, one step's
events after the other's."""

import fcntl
import os
import struct

from robo_rl.human.device_files import EVENT, EVENTS, MOST

SOUTH, NORTH, WEST, TR, SELECT, START = 0x130, 0x133, 0x134, 0x137, 0x13A, 0x13B


def event(kind, code, value):
    return struct.pack("@llHHi", 0, 0, kind, code, value)


def stick(code, share):
    return event(3, code, round(share * 32767.5 - 0.5))


def key(code, value=1):
    return event(1, code, value)


def press(code):
    return key(code) + key(code, 0)


SYN = event(0, 0, 0)


def padded(steps):
    """Bytes of which each reading sees one step: the rest of what a reading takes is empty reports."""
    whole = MOST * EVENTS * EVENT.size
    return b"".join(step + SYN * ((whole - len(step)) // EVENT.size) for step in steps)


class Feed:
    """An event device at `path` (a FIFO). Each of `steps` is what one reading sees."""

    def __init__(self, path, steps):
        os.mkfifo(path)
        self.path, self.fd = path, os.open(path, os.O_RDWR)
        fcntl.fcntl(self.fd, 1031, 1 << 20)  # F_SETPIPE_SZ
        data = padded(steps)
        assert len(data) <= 1 << 20, "a pipe holds no more steps"
        os.write(self.fd, data)

    def close(self):
        """Unplug it."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
