"""The wire of openpi's policy servers: websocket messages of msgpack, arrays as maps with their bytes, type
and shape.

The server first says what it is, a map. A client then sends an observation, a map of arrays, numbers and
text, and gets a map with "actions" [H, A]; a text in place of bytes is an error. PyPI's `openpi-client` is
such a client. What comes decides nothing but its own answer: messages are bounded in bytes and entries,
arrays are numbers of a few types alone, and there is no pickle.

Source: openpi_client 0.1.2, msgpack_numpy.py and websocket_client_policy.py.
"""

import math
from typing import Any

import numpy as np

from robo_rl.errors import MissingDependency, UserError

try:
    import msgpack
except ImportError:
    raise MissingDependency("openpi's wire needs msgpack: pip install 'robo_rl[console]'") from None

ENTRIES, RANK = 4096, 6  # entries of a message, dimensions of an array, at most
SIDE = 1 << 28  # a dimension is below it
KINDS = ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
# NumPy parses other names, some as Python
TYPES = {order + kind: np.dtype(order + kind) for order in "<>|=" for kind in KINDS}
NO_MESSAGE = "this is no message of openpi"
ARRAY, NUMBER, DATA, DTYPE, SHAPE = b"__ndarray__", b"__npgeneric__", b"data", b"dtype", b"shape"


def packb(x: Any) -> bytes:
    """The bytes of None, numbers, text, bytes, lists, maps and arrays. TypeError: anything else."""
    return bytes(msgpack.packb(x, default=_packable) or b"")


def _packable(x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.dtype.str in TYPES:
        return {ARRAY: True, DATA: x.tobytes(), DTYPE: x.dtype.str, SHAPE: x.shape}
    if isinstance(x, np.generic) and not isinstance(x, np.void):
        return x.item()
    raise TypeError(f"{x.dtype if isinstance(x, np.ndarray) else type(x).__name__} does not travel")


def unpackb(data: bytes) -> Any:
    """What a message says; arrays are copies of their own. UserError: it is none, or above the bounds."""
    try:
        return _Bounded().unpack(data)
    except UserError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as e:
        raise UserError(f"{NO_MESSAGE} ({type(e).__name__})") from None


class _Bounded:
    """Counts the entries of one message while it is read."""

    def __init__(self) -> None:
        self.entries = 0

    def unpack(self, data: bytes) -> Any:
        return msgpack.unpackb(
            data,
            object_pairs_hook=self.read_map,
            list_hook=self.read_list,
            ext_hook=self.refuse,
            max_array_len=ENTRIES,
            max_map_len=ENTRIES,
            max_ext_len=0,
        )

    def count(self, more: int) -> None:
        self.entries += more + 1  # itself: an empty one is not for nothing
        if self.entries > ENTRIES:
            raise UserError(f"{NO_MESSAGE}: more than {ENTRIES} entries")

    def read_list(self, items: list) -> list:
        self.count(len(items))
        return items

    def read_map(self, items: list[tuple[Any, Any]]) -> Any:
        self.count(len(items))
        out = dict(items)
        if ARRAY in out:
            return _array(out)
        kind = TYPES.get(out[DTYPE]) if out.get(NUMBER) is True and isinstance(out.get(DTYPE), str) else None
        return (
            kind.type(out[DATA])
            if kind is not None and isinstance(out.get(DATA), (bool, int, float))
            else out
        )

    def refuse(self, code: int, data: bytes) -> Any:
        raise UserError(f"{NO_MESSAGE}: a value of kind {code}")


def _array(x: dict) -> np.ndarray:
    """The array that a map describes."""
    data, name, shape = x.get(DATA), x.get(DTYPE), x.get(SHAPE)
    kind = TYPES.get(name) if isinstance(name, str) else None
    if (
        not isinstance(data, bytes)
        or kind is None
        or not isinstance(shape, list)
        or len(shape) > RANK
        or not all(type(n) is int and 0 <= n < SIDE for n in shape)
        or math.prod(shape) * kind.itemsize != len(data)
    ):
        raise UserError(f"{NO_MESSAGE}: an array is numbers, with as many bytes as its type and shape say")
    return np.ndarray(shape, kind, data).copy()
