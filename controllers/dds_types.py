"""ROS 2 types as Cyclone DDS wants them, with rosbags' bytes; the frame of a service's messages; type
hashes."""

from typing import Any

import numpy as np

from controllers import services as srv
from controllers.codec import Codec
from controllers.services import REPLY, REQUEST, text_of
from robo_rl.errors import MissingDependency, choose

try:
    from cyclonedds.idl import annotations, make_idl_struct
    from cyclonedds.idl import types as idl
    from rosbags.interfaces import Nodetype
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore
except ImportError as e:
    raise MissingDependency(
        f"the DDS transport needs {(e.name or '').split('.')[0]}: pip install 'robo_rl[robot]'"
    ) from None

STORES = {"humble": Stores.ROS2_HUMBLE, "jazzy": Stores.ROS2_JAZZY}
BASES = {
    "bool": bool,
    "byte": idl.uint8,
    "char": idl.uint8,
    "string": str,
    "float32": idl.float32,
    "float64": idl.float64,
    **{f"{s}int{n}": getattr(idl, f"{s}int{n}") for s in ("", "u") for n in (8, 16, 32, 64)},
}
EMPTY = "structure_needs_at_least_one_member", (Nodetype.BASE, ("uint8", 0))


class Types:
    """Cyclone structs for ROS types, made when asked for, and the codec."""

    def __init__(self, distribution: str = "jazzy"):
        self.store = get_typestore(STORES[choose("ROS distribution", distribution, STORES)])
        self.distribution = distribution
        self.structs: dict[str, type] = {}
        self.hashes: dict[str, str] = {}
        self.messages = srv.MESSAGES | (srv.HUMBLE if distribution == "humble" else {})
        self.codec = Codec(
            self.store.types.__getitem__,
            lambda v, kind, many=-1: np.array(v, "uint8" if kind == "byte" else kind),
            self.messages,
        )
        self._hash_as_idl()

    def _hash_as_idl(self) -> None:
        """ServiceEventInfo's `char` is an uint8 in IDL, which is what ROS hashes."""
        defs, event = self.store.fielddefs, "service_msgs/msg/ServiceEventInfo"
        if event in defs:
            constants, rows = defs[event]
            as_idl: list[tuple[str, Any]] = [
                (n, (d[0], ((d[1][0][0], ("uint8", 0)), d[1][1])) if n == "client_gid" else d)
                for n, d in rows
            ]
            defs[event] = constants, as_idl

    def _parsed(self, name: str, text: str) -> Any:
        """The fields of a message, or part of a service or action, in the store's form."""
        [fields] = get_types_from_msg(text, "/msg/".join(name.split("/")[::2])).values()
        return fields

    def add_messages(self) -> None:
        """Make the messages of services and actions known that the store lacks."""
        self.store.register(
            {n: self._parsed(n, text) for n, text in self.messages.items() if n not in self.store.types}
        )

    def add_service(self, kind: str) -> None:
        """Make pkg/srv/Name_Request and _Response known, and pkg/srv/Name for its hash."""
        if f"{kind}_{REQUEST}" in self.store.types:
            return
        self.add_messages()
        made: dict[str, Any] = {}
        parts = {part: f"{kind}_{part}" for part in (REQUEST, REPLY, "Event")}
        for part in (REQUEST, REPLY):
            text = text_of(kind, part)
            if self.distribution == "humble" and kind.endswith("SwitchController") and part == REPLY:
                text = "bool ok"
            made[parts[part]] = self._parsed(parts[part], text)
        self.store.register(made)

        def name_of(name: str) -> Any:
            return Nodetype.NAME, name

        one: dict[str, Any] = {
            part: (Nodetype.SEQUENCE, (name_of(parts[part]), 1)) for part in (REQUEST, REPLY)
        }
        info = name_of("service_msgs/msg/ServiceEventInfo")
        self.store.fielddefs[parts["Event"]] = (
            [],
            [("info", info), ("request", one[REQUEST]), ("response", one[REPLY])],
        )
        self.store.fielddefs[kind] = (
            [],
            [
                (f"{w}_message", name_of(parts[p]))
                for w, p in (("request", REQUEST), ("response", REPLY), ("event", "Event"))
            ],
        )

    def struct(self, name: str) -> type:
        """IdlStruct of pkg/msg/Name, fields in order, typename pkg::msg::dds_::Name_."""
        if name not in self.structs:
            package, kind, short = name.split("/")
            if name not in self.store.fielddefs:
                self.add_messages()
            # Cyclone checks bytes against fields
            fields = {"client": idl.uint64, "number": idl.int64} if is_framed(name) else {}
            fields |= {k: self.field(d) for k, d in self.store.fielddefs[name][1] or [EMPTY]}
            made = make_idl_struct(short, f"{package}.{kind}.dds_.{short}_", fields)
            self.structs[name] = annotations.final(made)
        return self.structs[name]

    def field(self, description: tuple) -> Any:
        node, detail = description
        if node == Nodetype.BASE:
            return BASES[detail[0]]
        if node == Nodetype.NAME:
            return self.struct(detail)
        inner, length = detail
        if node == Nodetype.ARRAY:
            return idl.array[self.field(inner), length]
        return idl.sequence[self.field(inner), length] if length else idl.sequence[self.field(inner)]

    def wire(self, name: str) -> type:
        """What Cyclone takes for the struct, with rosbags' bytes: an instance carries `message`, a
        rosbags dataclass, or its bytes."""
        store = self.store

        class Wire:
            __idl__ = self.struct(name).__idl__

            def __init__(self, message: Any, raw: bytes = b""):
                self.given, self.raw = message, raw

            @property
            def message(self) -> Any:
                return store.deserialize_cdr(self.raw, name) if self.raw else self.given

            def serialize(self, *_, **__) -> bytes:
                return self.raw or bytes(store.serialize_cdr(self.given, name))

            @classmethod
            def deserialize(cls, data: bytes, *_, **__) -> "Wire":
                return cls(None, bytes(data))  # `DdsReader` knows a shorter way for some

            @classmethod
            def deserialize_key(cls, data: bytes, *_, **__) -> "Wire":
                return cls(None)  # ROS types have no key; this sample says that a writer left

        return Wire

    def framed(self, name: str) -> type:
        """The same for a part of a service: `client` and `number` go before the message's bytes."""
        wire: Any = self.wire(name)

        class Framed(wire):
            def __init__(self, message: Any, client: int = 0, number: int = 0, raw: bytes = b""):
                super().__init__(message, raw)
                self.client, self.number = client, number

            def serialize(self, *_, **__) -> bytes:
                return frame(super().serialize(), self.client, self.number)

            @classmethod
            def deserialize(cls, data: bytes, *_, **__) -> "Framed":
                """Decoded when `message` is read: an error here would take the samples beside it along."""
                raw, client, number = unframe(data)
                return cls(None, client, number, raw)

        return Framed

    def hash(self, name: str) -> str:
        """RIHS01 of a message pkg/msg/Name, or of a service pkg/srv/Name that was added."""
        if name not in self.hashes:
            if name not in self.store.fielddefs:
                self.add_messages()
            self.hashes[name] = self.store.hash_rihs01(name)
        return self.hashes[name]


def is_framed(name: str) -> bool:
    """Whether it is the request or the reply of a service."""
    return "/msg/" not in name and name.endswith((f"_{REQUEST}", f"_{REPLY}"))


def frame(cdr: bytes, client: int, number: int) -> bytes:
    """A message's CDR with {uint64 client, int64 number} between its header and its body."""
    return cdr[:4] + client.to_bytes(8, "little") + number.to_bytes(8, "little", signed=True) + cdr[4:]


def unframe(data: bytes) -> tuple[bytes, int, int]:
    """(CDR, client, number); of fewer than 20 bytes, which no rmw_cyclonedds service sends, all as CDR that
    cannot be decoded."""
    if len(data) < 20:
        return data or b"\0", 0, 0
    return (
        data[:4] + data[20:],
        int.from_bytes(data[4:12], "little"),
        int.from_bytes(data[12:20], "little", signed=True),
    )
