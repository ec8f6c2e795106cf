"""Joint states on the DDS wire, 1000 times a second: their CDR by places, without a codec for every
message."""

import struct
from typing import Any

from controllers import transport as t
from controllers.codec import Codec

STAMP = struct.Struct("<iI").unpack_from


class JointForm:
    """CDR of a JointState of given names, with blanks for the time and the numbers: an eighth of the work.

    Body of three sequences of n doubles at the end: each is its length (4 bytes), 4 bytes to the next
    multiple of 8, and the numbers; an empty one is its length alone, and then the padding goes with it, so
    that only full ones are a form.
    """

    def __init__(self, m: t.JointState, codec: Codec, wire: type):
        self.names, self.full = (
            m.names,
            len(m.names) == len(m.position) == len(m.velocity) == len(m.effort) > 0,
        )
        self.plain, self.codec = wire, codec
        if self.full:
            self.raw = bytearray(wire(codec.to_ros(m)).serialize())
            n = self.size = len(m.names)
            self.at = len(self.raw) - 24 * n - 16
            self.pack, self.stamp = (
                struct.Struct(f"<{n}dI4x{n}dI4x{n}d").pack_into,
                struct.Struct("<iI").pack_into,
            )

    def fits(self, m: t.JointState) -> bool:
        full = len(m.names) == len(m.position) == len(m.velocity) == len(m.effort) > 0
        return full and self.full and (m.names is self.names or m.names == self.names)

    def filled(self, m: t.JointState) -> Any:
        """What the writer takes."""
        if not self.full:
            return self.plain(self.codec.to_ros(m))
        whole = int(m.stamp // 1)
        self.stamp(self.raw, 4, whole, min(round((m.stamp - whole) * 1e9), 999_999_999))
        self.pack(self.raw, self.at, *m.position, self.size, *m.velocity, self.size, *m.effort)
        return self.plain(None, bytes(self.raw))


class JointShape:
    """Where the numbers of a JointState lie in its CDR: one of the shape of the last is read by these places
    alone."""

    def __init__(self) -> None:
        self.size, self.parts, self.fixed = -1, (), ()

    def learn(self, raw: bytes, m: t.JointState) -> None:
        """Take the shape of a message, if it is a full one that `read` reads as it was read."""
        self.size, n, end = -1, len(m.names), len(raw)
        if not len(m.position) == len(m.velocity) == len(m.effort) == n > 0:
            return
        a, b, c = self.at = end - 24 * n - 16, end - 16 * n - 8, end - 8 * n
        self.parts = slice(4), slice(12, a), slice(a + 8 * n, b), slice(b + 8 * n, c)
        self.names, self.numbers = m.names, struct.Struct(f"<{n}d").unpack_from
        self.size, self.fixed = end, tuple(raw[p] for p in self.parts)
        if self.read(raw) != m:
            self.size = -1

    def read(self, raw: bytes) -> t.JointState | None:
        """None: its shape is another."""
        if len(raw) != self.size or tuple(raw[p] for p in self.parts) != self.fixed:
            return None
        (seconds, rest), (a, b, c), numbers = STAMP(raw, 4), self.at, self.numbers
        return t.JointState(
            seconds + rest * 1e-9, self.names, numbers(raw, a), numbers(raw, b), numbers(raw, c)
        )
