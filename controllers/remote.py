"""A policy in another process or on another machine, over TCP: JSON and raw float32, no pickle.

One message: 4 bytes length of a JSON header (little endian), the header, then the arrays it lists as [name, type, shape].
Request: an observation ("state" [S], "image/<view>" [h, w, 3]) and "t0"; answer: "rows" [E, A] and "t0", or {"error"}. A
header is at most 64 KiB, the arrays 8 MiB: what comes over the wire decides nothing else.
"""

import json
import math
import select
import socket
import struct
import time

import numpy as np

from robo_rl.errors import UserError

HEADER, ARRAY = 1 << 16, 8 << 20  # bytes at most


def pack(arrays: dict[str, np.ndarray], **fields: object) -> bytes:
    """One message: float32 numbers, or uint8 pictures as they are."""
    made = {n: np.ascontiguousarray(x, "|u1" if x.dtype == np.uint8 else "<f4") for n, x in arrays.items()}
    head = json.dumps(fields | {"arrays": [[n, x.dtype.str[1:], list(x.shape)] for n, x in made.items()]}).encode()
    return struct.pack("<I", len(head)) + head + b"".join(x.tobytes() for x in made.values())


def unpack(data: bytes | bytearray) -> tuple[dict, dict[str, np.ndarray], int] | None:
    """(header, arrays, bytes used) of the first message in data; None while it is incomplete. UserError: it is none."""
    if len(data) < 4:
        return None
    size = struct.unpack_from("<I", data)[0]
    if size > HEADER:
        raise UserError(f"the other side speaks no robo_rl: a header of {size} bytes")
    if len(data) < 4 + size:
        return None
    try:
        head = json.loads(bytes(data[4:4 + size]))
        told = [(str(n), {"f4": "<f4", "u1": "|u1"}[kind], [int(k) for k in shape]) for n, kind, shape in head.pop("arrays")]
        sizes = [math.prod(k if 0 <= k <= ARRAY else ARRAY for k in shape) * int(kind[-1]) for _, kind, shape in told]
    except (ValueError, TypeError, AttributeError, KeyError):
        raise UserError("the other side speaks no robo_rl: its header does not say which arrays follow") from None
    if sum(sizes) > ARRAY:
        raise UserError(f"arrays of {sum(sizes)} bytes are above {ARRAY}")
    if len(data) < 4 + size + sum(sizes):
        return None
    arrays, at = {}, 4 + size
    for (name, kind, shape), count in zip(told, sizes, strict=True):
        arrays[name] = np.frombuffer(bytes(data[at:at + count]), kind).reshape(shape)
        at += count
    return head, arrays, at


def address(text: str) -> tuple[str, int]:
    """host:port"""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"a policy's address is host:port, for example 127.0.0.1:7447, got {text!r}")
    return host, int(port)


class Remote:
    """`bridge.Thinker` over a connection. ask() waits up to `patience` [s] for an answer that comes at once."""

    blocks = False

    def __init__(self, where: str, patience: float = 0.005, timeout: float = 5.0):
        self.where, self.patience, self.data = where, patience, bytearray()
        self.answer: tuple[np.ndarray, float] | None = None
        try:
            self.wire = socket.create_connection(address(where), timeout)
        except OSError as e:
            raise UserError(f"no policy answers at {where} ({e.strerror or e}); start one with: robo_rl serve RUN") from None
        self.wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, obs: dict[str, np.ndarray], t0: float) -> None:
        try:
            self.wire.sendall(pack(obs, t0=t0))
        except OSError as e:
            raise UserError(f"the policy at {self.where} is lost ({e.strerror or e})") from None
        end = time.monotonic() + self.patience
        while self.answer is None and (left := end - time.monotonic()) > 0:
            self._read(left)

    def poll(self, now: float) -> tuple[np.ndarray, float] | None:
        if self.answer is None:
            self._read(0.0)
        out, self.answer = self.answer, None
        return out

    def _read(self, wait: float) -> None:
        if not select.select([self.wire], [], [], wait)[0]:
            return
        try:
            got = self.wire.recv(1 << 16)
        except OSError:
            got = b""
        if not got:
            raise UserError(f"the policy at {self.where} is lost: it closed the connection")
        self.data += got
        if (message := unpack(self.data)) is None:
            return
        head, arrays, used = message
        del self.data[:used]
        if "error" in head:
            raise UserError(f"the policy at {self.where}: {str(head['error'])[:300]}")
        t0, array = head.get("t0"), arrays.get("rows")
        if array is None or array.ndim != 2 or not isinstance(t0, (int, float)):
            raise UserError(f"the policy at {self.where} answered no chunk")
        self.answer = array, float(t0)

    def close(self) -> None:
        self.wire.close()
