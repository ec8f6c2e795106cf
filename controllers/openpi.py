"""The wire of openpi's policy servers: websocket messages of msgpack, arrays as maps with their bytes, type and shape.

The server first says what it is, a map. A client then sends an observation, a map of arrays, numbers and text, and gets a map with
"actions" [H, A]; a text in place of bytes is an error. PyPI's `openpi-client` is such a client. What comes decides nothing but its own
answer: messages are bounded in bytes, depth and entries, arrays are numbers alone, and there is no pickle.

Sources: msgpack specification (github.com/msgpack/msgpack, spec.md); openpi_client 0.1.2, msgpack_numpy.py and websocket_client_policy.py.
"""

import math
import struct
from typing import Any

import numpy as np

from robo_rl.errors import UserError

DEPTH, ENTRIES, RANK = 6, 4096, 6  # maps within maps, entries of a message, dimensions of an array, at most
SIDE = 1 << 28  # a dimension is below it
KINDS = "biuf"  # bool, integers, floats
NO_MESSAGE = "this is no message of openpi"
ARRAY, NUMBER = b"__ndarray__", b"__npgeneric__"
FIXED = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
LENGTHS = {0xC4: (">B", "bin"), 0xC5: (">H", "bin"), 0xC6: (">I", "bin"), 0xD9: (">B", "str"), 0xDA: (">H", "str"), 0xDB: (">I", "str"),
           0xDC: (">H", "list"), 0xDD: (">I", "list"), 0xDE: (">H", "map"), 0xDF: (">I", "map")}


def packb(x: Any) -> bytes:
    """The bytes of None, numbers, text, bytes, lists, maps and arrays. TypeError: anything else."""
    out = bytearray()
    _pack(x, out)
    return bytes(out)


def _pack(x: Any, out: bytearray) -> None:
    if isinstance(x, np.ndarray):
        if x.dtype.kind not in KINDS:
            raise TypeError(f"an array of {x.dtype} does not travel")
        return _pack({ARRAY: True, b"data": x.tobytes(), b"dtype": x.dtype.str, b"shape": list(x.shape)}, out)
    if isinstance(x, np.generic):
        return _pack(x.item(), out)
    if x is None or isinstance(x, bool):
        out.append(0xC0 if x is None else 0xC3 if x else 0xC2)
    elif isinstance(x, int):
        out += struct.pack(">Bq", 0xD3, x) if x < 2**63 else struct.pack(">BQ", 0xCF, x)
    elif isinstance(x, float):
        out += struct.pack(">Bd", 0xCB, x)
    elif isinstance(x, str):
        data = x.encode()
        out += struct.pack(">BI", 0xDB, len(data)) + data
    elif isinstance(x, (bytes, bytearray)):
        out += struct.pack(">BI", 0xC6, len(x)) + x
    elif isinstance(x, (list, tuple)):
        out += struct.pack(">BI", 0xDD, len(x))
        for v in x:
            _pack(v, out)
    elif isinstance(x, dict):
        out += struct.pack(">BI", 0xDF, len(x))
        for k, v in x.items():
            _pack(k, out)
            _pack(v, out)
    else:
        raise TypeError(f"{type(x).__name__} does not travel")


def unpackb(data: bytes) -> Any:
    """What a message says; arrays are copies of their own. UserError: it is none, or above the bounds."""
    reader = Reader(data)
    try:
        out = reader.read(0)
    except UserError:
        raise
    except (struct.error, UnicodeDecodeError, TypeError, ValueError, OverflowError) as e:
        raise UserError(f"{NO_MESSAGE} ({type(e).__name__})") from None
    if reader.at != len(data):
        raise UserError(f"{NO_MESSAGE}: {len(data) - reader.at} bytes behind its end")
    return out


class Reader:
    """A message that is read from its beginning; `at`: the next byte."""

    def __init__(self, data: bytes):
        self.data, self.at, self.entries = data, 0, 0

    def read(self, depth: int) -> Any:
        """The next value."""
        if depth > DEPTH:
            raise UserError(f"{NO_MESSAGE}: more than {DEPTH} levels")
        (tag,) = self._fixed(">B")
        if tag < 0x80 or tag >= 0xE0:
            return tag if tag < 0x80 else tag - 0x100
        if tag < 0xC0:
            kind, n = ("map", tag & 15) if tag < 0x90 else ("list", tag & 15) if tag < 0xA0 else ("str", tag & 31)
            return self._sized(kind, n, depth)
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        if tag in FIXED:
            return self._fixed(FIXED[tag])[0]
        if tag not in LENGTHS:
            raise UserError(f"{NO_MESSAGE}: a value of kind {tag:#x}")
        form, kind = LENGTHS[tag]
        return self._sized(kind, self._fixed(form)[0], depth)

    def _fixed(self, form: str) -> tuple:
        out = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return out

    def _sized(self, kind: str, n: int, depth: int) -> Any:
        if kind in ("bin", "str"):
            if n > len(self.data) - self.at:
                raise UserError(f"{NO_MESSAGE}: it is cut")
            piece = self.data[self.at:self.at + n]
            self.at += n
            return piece if kind == "bin" else piece.decode()
        self.entries += n
        if self.entries > ENTRIES:
            raise UserError(f"{NO_MESSAGE}: more than {ENTRIES} entries")
        if kind == "list":
            return [self.read(depth + 1) for _ in range(n)]
        out = {}
        for _ in range(n):
            key = self.read(depth + 1)
            if not isinstance(key, (str, bytes)) or len(key) > 200:
                raise UserError(f"{NO_MESSAGE}: a name is text")
            out[key] = self.read(depth + 1)
        return _array(out) if ARRAY in out else np.dtype(out[b"dtype"]).type(out[b"data"]) if out.get(NUMBER) is True and \
            _kind(out.get(b"dtype")) and isinstance(out.get(b"data"), (bool, int, float)) else out


def _kind(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= 8 and np.dtype(name).kind in KINDS


def _array(x: dict) -> np.ndarray:
    """The array that a map describes."""
    data, name, shape = x.get(b"data"), x.get(b"dtype"), x.get(b"shape")
    if not isinstance(data, bytes) or not _kind(name) or not isinstance(shape, list) or len(shape) > RANK or \
            not all(type(n) is int and 0 <= n < SIDE for n in shape) or math.prod(shape) * np.dtype(name).itemsize != len(data):
        raise UserError(f"{NO_MESSAGE}: an array is numbers, with as many bytes as its type and shape say")
    return np.ndarray(shape, np.dtype(name), data).copy()
