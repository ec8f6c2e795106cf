"""The ROS 2 wire without ROS: Cyclone DDS from PyPI with rosbags' message types and codec.

Conventions of rmw_cyclonedds, so that ROS 2 nodes see these topics as their own: topic rt/<name>, type
pkg::msg::dds_::Name_, XCDR1, the type's hash in USER_DATA of readers and writers, the node's endpoints on
ros_discovery_info. The structs that Cyclone wants are made from rosbags' type descriptions; their bytes are rosbags'
CDR, which is 3 to 1000 times faster than Cyclone's own Python codec.

Loopback is used unless an interface is named. Messages are stamped when `take` sees them: poll at the watchdog's pace.
"""

import os
import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from controllers import transport as t
from controllers.transport import QUALITIES, Received
from robo_rl.errors import MissingDependency, UserError, choose, in_range
from robo_rl.geometry import from_xyzw, to_xyzw

try:
    from cyclonedds import core, qos
    from cyclonedds.builtin import BuiltinDataReader, BuiltinTopicDcpsPublication
    from cyclonedds.domain import Domain, DomainParticipant
    from cyclonedds.idl import annotations, make_idl_struct
    from cyclonedds.idl import types as idl
    from cyclonedds.pub import DataWriter
    from cyclonedds.sub import DataReader
    from cyclonedds.topic import Topic
    from rosbags.interfaces import Nodetype
    from rosbags.typesys import Stores, get_typestore
except ImportError as e:
    raise MissingDependency(f"the DDS transport needs {e.name}: pip install 'robo_rl[robot]'") from None

STORES = {"humble": Stores.ROS2_HUMBLE, "jazzy": Stores.ROS2_JAZZY}
BASES = {"bool": bool, "byte": idl.uint8, "char": idl.uint8, "string": str, "float32": idl.float32,
         "float64": idl.float64, **{f"{s}int{n}": getattr(idl, f"{s}int{n}") for s in ("", "u") for n in (8, 16, 32, 64)}}
DISCOVERY = "rmw_dds_common/msg/ParticipantEntitiesInfo"
Policy = qos.Policy


class Types:
    """Cyclone structs for ROS message types, made when asked for, and the codec."""

    def __init__(self, distribution: str = "jazzy"):
        self.store = get_typestore(STORES[choose("ROS distribution", distribution, STORES)])
        self.distribution = distribution
        self.structs: dict[str, type] = {}

    def struct(self, name: str) -> type:
        """IdlStruct of pkg/msg/Name, fields in order, typename pkg::msg::dds_::Name_."""
        if name not in self.structs:
            fields = {k: self.field(d) for k, d in self.store.fielddefs[name][1]}
            package, kind, short = name.split("/")
            made = make_idl_struct(short, f"{package}.{kind}.dds_.{short}_", fields or {
                "structure_needs_at_least_one_member": idl.uint8})
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
        """What Cyclone takes for the struct, with rosbags' bytes: an instance carries `message`, a rosbags dataclass."""
        store = self.store

        class Wire:
            __idl__ = self.struct(name).__idl__

            def __init__(self, message: Any):
                self.message = message

            def serialize(self, *_, **__) -> bytes:
                return bytes(store.serialize_cdr(self.message, name))

            @classmethod
            def deserialize(cls, data: bytes, *_, **__) -> "Wire":
                return cls(store.deserialize_cdr(data, name))

            @classmethod
            def deserialize_key(cls, data: bytes, *_, **__) -> "Wire":
                return cls(None)  # ROS types have no key; this sample says that a writer left
        return Wire

    def hash(self, name: str) -> str:
        return self.store.hash_rihs01(name)


# ---- messages --------------------------------------------------------------------------------------------------------


class Codec:
    """Our messages <-> rosbags' dataclasses."""

    def __init__(self, types: Types):
        self.of = types.store.types

    def stamp(self, seconds: float) -> Any:
        whole = int(seconds // 1)
        return self.of["builtin_interfaces/msg/Time"](sec=whole, nanosec=min(round((seconds - whole) * 1e9), 999_999_999))

    def header(self, m: Any) -> Any:
        return self.of["std_msgs/msg/Header"](stamp=self.stamp(m.stamp), frame_id=getattr(m, "frame", ""))

    def vector(self, x: tuple[float, ...], kind: str = "Vector3") -> Any:
        return self.of[f"geometry_msgs/msg/{kind}"](x=float(x[0]), y=float(x[1]), z=float(x[2]))

    def to_ros(self, m: Any) -> Any:
        """Our message as ROS's; quaternions become x first."""
        g, make = "geometry_msgs/msg/", self.of[t.ROS_TYPES[type(m)]]
        if isinstance(m, t.PoseStamped):
            x, y, z, w = to_xyzw(np.asarray(m.quat, float)).tolist()
            pose = self.of[g + "Pose"](position=self.vector(m.pos, "Point"),
                                       orientation=self.of[g + "Quaternion"](x=x, y=y, z=z, w=w))
            return make(header=self.header(m), pose=pose)
        if isinstance(m, t.TwistStamped):
            twist = self.of[g + "Twist"](linear=self.vector(m.twist[:3]), angular=self.vector(m.twist[3:]))
            return make(header=self.header(m), twist=twist)
        if isinstance(m, t.WrenchStamped):
            wrench = self.of[g + "Wrench"](force=self.vector(m.wrench[:3]), torque=self.vector(m.wrench[3:]))
            return make(header=self.header(m), wrench=wrench)
        if isinstance(m, t.JointState):
            return make(header=self.header(m), name=list(m.names), **{k: np.array(getattr(m, k), float) for k in
                                                                      ("position", "velocity", "effort")})
        if isinstance(m, t.Numbers):
            layout = self.of["std_msgs/msg/MultiArrayLayout"](dim=[], data_offset=0)
            return make(layout=layout, data=np.array(m.data, float))
        return make(data=m.data)

    def from_ros(self, kind: type, r: Any) -> Any:
        """ROS's message as ours."""
        if kind in (t.Flag, t.Text):
            return kind(r.data)
        if kind is t.Numbers:
            return t.Numbers(tuple(r.data.tolist()))
        stamp = r.header.stamp.sec + r.header.stamp.nanosec * 1e-9
        if kind is t.JointState:
            return t.JointState(stamp, tuple(r.name), *(tuple(getattr(r, k).tolist()) for k in
                                                        ("position", "velocity", "effort")))
        frame = r.header.frame_id
        if kind is t.PoseStamped:
            p, q = r.pose.position, r.pose.orientation
            return t.PoseStamped(stamp, frame, (p.x, p.y, p.z), tuple(from_xyzw(np.array([q.x, q.y, q.z, q.w])).tolist()))
        a, b = (r.twist.linear, r.twist.angular) if kind is t.TwistStamped else (r.wrench.force, r.wrench.torque)
        return kind(stamp, frame, (a.x, a.y, a.z, b.x, b.y, b.z))


# ---- the wire --------------------------------------------------------------------------------------------------------


def configuration(domain: int, interface: str = "") -> str:
    """Cyclone's XML: one interface, loopback by default. (Without any it takes the first network card it finds.)"""
    name = interface or "lo"
    if not re.fullmatch(r"[\w.:-]+", name):
        raise UserError(f"{name!r} is no name of a network interface")
    multicast = ' multicast="true"' if name == "lo" else ""
    return (f'<CycloneDDS><Domain Id="{domain}"><General><Interfaces><NetworkInterface name="{name}"{multicast}/>'
            f"</Interfaces></General></Domain></CycloneDDS>")


_domains: dict[int, tuple[Any, str]] = {}  # Cyclone has one configuration per domain and process


class Dds:
    """A ROS 2 node's worth of DDS: `transport.Transport` but for services."""

    def __init__(self, name: str, *, domain: int | None = None, interface: str = "", namespace: str = "/",
                 distribution: str = "jazzy"):
        if domain is None:
            text = os.environ.get("ROS_DOMAIN_ID", "0")
            domain = int(text) if text.isdecimal() else -1
        in_range("ROS domain", domain, 0, 232)
        self.types, self.name, self.namespace = Types(distribution), name, namespace
        self.codec = Codec(self.types)
        xml = configuration(domain, interface)
        try:
            if domain not in _domains:
                _domains[domain] = Domain(domain, xml), xml
            elif _domains[domain][1] != xml:
                raise UserError(f"domain {domain} is open in this process on another interface")
            self.participant = DomainParticipant(domain, qos=qos.Qos(Policy.Userdata(b"enclave=/;")))
        except core.DDSException as e:
            _domains.pop(domain, None)
            raise UserError(f"DDS cannot use the network interface {interface or 'lo'}: is it up? ({e})") from None
        self.entities: list[Any] = []
        self.topics: dict[tuple[str, str], Any] = {}
        self.kinds: dict[str, type] = {}
        self.writers: dict[str, Any] = {}  # key of a writer in the graph -> topic
        self.graph = BuiltinDataReader(self.participant, BuiltinTopicDcpsPublication)
        self.gids: dict[str, list[bytes]] = {"reader": [], "writer": []}
        self.discovery = DataWriter(self.participant, self._topic("ros_discovery_info", DISCOVERY),
                                    self._qos("latched", DISCOVERY))
        self._announce()

    def publisher(self, topic: str, kind: type, quality: str = "state") -> "Writer":
        ros = self._join(topic, kind, quality)
        writer = DataWriter(self.participant, self._topic(f"rt/{topic}", ros), self._qos(quality, ros))
        self._keep("writer", writer)
        return Writer(writer, kind, self.codec, topic)

    def subscription(self, topic: str, kind: type, quality: str = "state", depth: int = 1) -> "Reader":
        in_range("depth", depth, 1, 10**6)
        ros = self._join(topic, kind, quality)
        reader = DataReader(self.participant, self._topic(f"rt/{topic}", ros), self._qos(quality, ros, depth, reads=True))
        self._keep("reader", reader)
        return Reader(reader, kind, self.codec, depth, self.now)

    def publishers(self, topic: str) -> int:
        """Writers in the graph, ours and others'."""
        for sample in self.graph.take(N=1000):
            alive = sample.sample_info.instance_state == core.InstanceState.Alive
            if alive and hasattr(sample, "topic_name"):
                self.writers[sample.key] = sample.topic_name
            elif not alive:
                self.writers.pop(sample.key, None)
        return sum(name == f"rt/{topic}" for name in self.writers.values())

    def service(self, name: str, handler: Callable[[dict], dict]) -> None:
        raise UserError("the DDS transport has no services yet: use topics")

    def call(self, name: str, request: dict, timeout: float = 1.0) -> dict:
        raise UserError("the DDS transport has no services yet: use topics")

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Leave the graph in order; without it others notice after Cyclone's lease of 10 s."""
        for entity in [*self.entities, self.graph, self.discovery]:
            core.Entity.__del__(entity)
        self.entities = []
        core.Entity.__del__(self.participant)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _join(self, topic: str, kind: type, quality: str) -> str:
        choose("quality of service", quality, QUALITIES)
        if kind not in t.ROS_TYPES:
            raise UserError(f"{getattr(kind, '__name__', kind)} is no message; messages are "
                            f"{', '.join(k.__name__ for k in t.ROS_TYPES)}")
        known = self.kinds.setdefault(topic, kind)
        if known is not kind:
            raise UserError(f"topic {topic} carries {known.__name__}, not {kind.__name__}")
        return t.ROS_TYPES[kind]

    def _topic(self, name: str, ros: str) -> Any:
        if (name, ros) not in self.topics:
            self.topics[name, ros] = Topic(self.participant, name, self.types.wire(ros))
        return self.topics[name, ros]

    def _qos(self, quality: str, ros: str, depth: int = 1, reads: bool = False) -> Any:
        """Commands and latched topics are reliable both ways; a state is offered reliable and asked for best effort."""
        reliable = Policy.Reliability.Reliable(0 if quality == "state" else 100_000_000)
        return qos.Qos(Policy.Reliability.BestEffort if reads and quality == "state" else reliable,
                       Policy.Durability.TransientLocal if quality == "latched" else Policy.Durability.Volatile,
                       Policy.History.KeepLast(depth),
                       Policy.DataRepresentation(use_cdrv0_representation=True, use_xcdrv2_representation=False),
                       Policy.Userdata(f"typehash={self.types.hash(ros)};".encode()))

    def _keep(self, what: str, entity: Any) -> None:
        self.entities.append(entity)
        self.gids[what].append(entity.guid.bytes)
        self._announce()

    def _announce(self) -> None:
        """Tell the graph which endpoints are this node's; else `ros2 node list` does not show it."""
        of, size = self.types.store.types, 24 if self.types.distribution == "humble" else 16

        def gid(raw: bytes) -> Any:
            return of["rmw_dds_common/msg/Gid"](data=np.frombuffer(raw.ljust(size, b"\0"), np.uint8))
        node = of["rmw_dds_common/msg/NodeEntitiesInfo"](
            node_namespace=self.namespace, node_name=self.name, reader_gid_seq=[gid(x) for x in self.gids["reader"]],
            writer_gid_seq=[gid(x) for x in self.gids["writer"]])
        info = of[DISCOVERY](gid=gid(self.participant.guid.bytes), node_entities_info_seq=[node])
        self.discovery.write(self.discovery.data_type(info))


class Writer:
    def __init__(self, writer: Any, kind: type, codec: Codec, topic: str):
        self.writer, self.kind, self.codec, self.topic = writer, kind, codec, topic
        self.wire = writer.data_type

    def publish(self, message: Any) -> None:
        if type(message) is not self.kind:
            raise UserError(f"topic {self.topic} carries {self.kind.__name__}, not {type(message).__name__}")
        self.writer.write(self.wire(self.codec.to_ros(message)))


class Reader:
    def __init__(self, reader: Any, kind: type, codec: Codec, depth: int, now: Callable[[], float]):
        self.reader, self.kind, self.codec, self.depth, self.now = reader, kind, codec, depth, now
        self.waiting: deque[Received] = deque(maxlen=depth)
        self.newest: Received | None = None

    def arrive(self) -> None:
        for sample in self.reader.take(N=self.depth):
            info = sample.sample_info
            if info.valid_data:  # else: a writer left
                self.newest = Received(self.codec.from_ros(self.kind, sample.message), self.now(),
                                       f"{info.publication_handle:x}")
                self.waiting.append(self.newest)

    def take(self) -> list[Received]:
        self.arrive()
        out = list(self.waiting)
        self.waiting.clear()
        return out

    def latest(self) -> Received | None:
        self.arrive()
        return self.newest
