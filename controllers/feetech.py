"""The serial bus of Feetech's STS servos (STS3215): packets, registers, and transactions that end in time.

    packet = FF FF, id, count + 2, instruction or error bits, parameters, checksum;  checksum = ~(id + count +
                                                            2 + ... + parameters) & FF

Numbers are little-endian. One master asks, servos answer one after the other; a broadcast (254) has no answer
but to a synchronous read. Whatever else is on the wire is dropped and counted. Sources: Feetech's
"communication protocol" and "SMS/STS memory table" manuals.
"""

import os
import select
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from controllers.servo_file import BAUDS
from robo_rl.errors import UserError

PING, READ, WRITE, SYNC_READ, SYNC_WRITE = 0x01, 0x02, 0x03, 0x82, 0x83
BROADCAST = 0xFE
MODEL = 777  # of an STS3215
ERRORS = ("voltage", "sensor", "temperature", "current", "", "overload")  # bits of a status packet
MODEL_NUMBER, HOMING_OFFSET, OPERATING_MODE = (3, 2), (31, 2), (33, 1)  # registers: (address, bytes)
TORQUE_ENABLE, ACCELERATION, GOAL_POSITION, TORQUE_LIMIT = (40, 1), (41, 1), (42, 2), (48, 2)
PRESENT_POSITION, PRESENT_VELOCITY, PRESENT_LOAD, PRESENT_VOLTAGE, PRESENT_TEMPERATURE = (
    (56, 2),
    (58, 2),
    (60, 2),
    (62, 1),
    (63, 1),
)
PRESENT = (56, 8)  # the five above in one read
LONGEST = 64  # bytes of a packet's parameters that are believed


def packet(id: int, instruction: int, parameters: bytes = b"") -> bytes:
    """One packet; of a status packet, `instruction` is the error bits."""
    body = bytes((id, len(parameters) + 2, instruction)) + parameters
    return b"\xff\xff" + body + bytes((~sum(body) & 0xFF,))


def signed(value: int, bit: int) -> int:
    """A register whose sign is its bit `bit`."""
    return -(value & (1 << bit) - 1) if value >> bit & 1 else value


def with_sign(value: int, bit: int) -> int:
    return abs(value) | (value < 0) << bit


def error_text(bits: int) -> str:
    """What a servo complains of; "" for nothing."""
    return ", ".join(name for k, name in enumerate(ERRORS) if bits >> k & 1 and name)


class Packets:
    """Takes packets out of a stream of bytes; `faults` counts what is none."""

    def __init__(self, faults: "Counter[str]"):
        self.waiting, self.faults = bytearray(), faults

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """(id, error bits, parameters) of each whole packet; the rest waits."""
        buffer, out = self.waiting, []
        buffer += data
        while True:
            at = buffer.find(b"\xff\xff")
            if at < 0:
                junk = len(buffer) - (buffer[-1:] == b"\xff")
                self.faults["noise"] += junk > 0
                del buffer[:junk]
                return out
            if at:
                self.faults["noise"] += 1
                del buffer[:at]
            if len(buffer) < 4:
                return out
            count = buffer[3]
            if buffer[2] == 0xFF or not 2 <= count <= LONGEST + 2:  # FF FF FF: a packet begins later
                self.faults["noise"] += buffer[2] != 0xFF
                del buffer[:1]
                continue
            if len(buffer) < count + 4:
                return out
            body, check = bytes(buffer[2 : count + 3]), buffer[count + 3]
            if ~sum(body) & 0xFF == check:
                out.append((body[0], body[2], body[3:]))
                del buffer[: count + 4]
            else:
                self.faults["checksum"] += 1
                del buffer[:2]


class Port(Protocol):
    """A serial line. UserError: it is gone."""

    def write(self, data: bytes) -> None: ...

    def read(self, timeout: float) -> bytes:
        """What has come, after at most `timeout` [s]; b"" for nothing."""
        ...

    def flush(self) -> None:
        """Drop what has come."""
        ...

    def close(self) -> None: ...


class SerialPort:
    """A serial device of Linux, 8 data bits, no parity, 1 stop bit."""

    def __init__(self, path: str, baud: int = 1_000_000):
        speed = getattr(termios, f"B{baud}", None)
        if baud not in BAUDS or speed is None:
            raise UserError(f"baud must be one of {', '.join(map(str, BAUDS))}, got {baud}")
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError as e:
            raise UserError(
                f"serial port {path}: {e.strerror}; is the arm plugged in, and may you use the port (group "
                "dialout)?"
            ) from None
        try:
            tty.setraw(self.fd)
            settings = termios.tcgetattr(self.fd)
            settings[2] = (
                settings[2] & ~(termios.CSTOPB | termios.PARENB | termios.CRTSCTS)
                | termios.CLOCAL
                | termios.CREAD
            )
            settings[4] = settings[5] = speed
            termios.tcsetattr(self.fd, termios.TCSANOW, settings)
        except termios.error as e:
            os.close(self.fd)
            raise UserError(f"{path} is no serial port: {e.args[-1]}") from None
        self.flush()

    def write(self, data: bytes) -> None:
        try:
            while data:
                if not select.select([], [self.fd], [], 0.1)[1]:
                    raise UserError(f"serial port {self.path} takes no bytes")
                data = data[os.write(self.fd, data) :]
        except OSError as e:
            raise UserError(f"serial port {self.path} is gone: {e.strerror}") from None

    def read(self, timeout: float) -> bytes:
        try:
            if not select.select([self.fd], [], [], max(timeout, 0.0))[0]:
                return b""
            if got := os.read(self.fd, 4096):
                return got
        except BlockingIOError:
            return b""
        except OSError as e:
            raise UserError(f"serial port {self.path} is gone: {e.strerror}") from None
        raise UserError(f"serial port {self.path} is gone")

    def flush(self) -> None:
        try:
            termios.tcflush(self.fd, termios.TCIFLUSH)
        except termios.error as e:
            raise UserError(f"serial port {self.path} is gone: {e.args[-1]}") from None

    def close(self) -> None:
        os.close(self.fd)


class ServoBus:
    """Transactions with the servos of one line. faults: what went wrong, by kind; errors: id -> error bits of
    its last answer.

    timeout [s]: from the last byte sent, for all answers of a transaction."""

    def __init__(self, port: Port, timeout: float = 0.02, clock: Callable[[], float] = time.monotonic):
        self.port, self.timeout, self.clock = port, timeout, clock
        self.faults: Counter[str] = Counter()
        self.errors: dict[int, int] = {}

    def ping(self, id: int) -> bool:
        """Whether a servo answers."""
        return id in self._ask(packet(id, PING), {id}, 0)

    def read(self, id: int, register: tuple[int, int]) -> int | None:
        """An unsigned number; None: no answer."""
        got = self._ask(packet(id, READ, bytes(register)), {id}, register[1])
        return int.from_bytes(got[id], "little") if id in got else None

    def write(self, id: int, register: tuple[int, int], value: int) -> bool:
        """Whether the servo confirms it."""
        data = bytes((register[0],)) + value.to_bytes(register[1], "little")
        return id in self._ask(packet(id, WRITE, data), {id}, 0)

    def sync_read(self, ids: Iterable[int], register: tuple[int, int]) -> dict[int, bytes]:
        """Bytes by id, of those that answered in time."""
        wanted = list(ids)
        return self._ask(packet(BROADCAST, SYNC_READ, bytes((*register, *wanted))), set(wanted), register[1])

    def sync_write(self, register: tuple[int, int], values: dict[int, int]) -> None:
        """Unsigned numbers by id; nobody answers."""
        address, size = register
        rows = b"".join(bytes((id,)) + value.to_bytes(size, "little") for id, value in values.items())
        self.port.write(packet(BROADCAST, SYNC_WRITE, bytes((address, size)) + rows))

    def _ask(self, request: bytes, ids: set[int], size: int) -> dict[int, bytes]:
        """Send and collect one answer of `size` bytes from each id. What came late from before is dropped."""
        self.port.flush()
        packets, out = Packets(self.faults), {}
        self.port.write(request)
        end = self.clock() + self.timeout
        while len(out) < len(ids) and (left := end - self.clock()) > 0:
            for id, bits, data in packets.feed(self.port.read(left)):
                if id not in ids or id in out or len(data) != size:
                    self.faults["foreign"] += 1
                    continue
                out[id], self.errors[id] = data, bits
        for id in ids - set(out):
            self.faults[f"no answer of servo {id}"] += 1
        return out
