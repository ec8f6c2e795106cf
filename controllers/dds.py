"""The ROS 2 wire without ROS: Cyclone DDS from PyPI with rosbags' message types and codec.

Conventions of rmw_cyclonedds, so that ROS 2 nodes see these topics as their own: topic rt/<name>, type
pkg::msg::dds_::Name_, XCDR1, the type's hash in USER_DATA of readers and writers, the node's endpoints on
ros_discovery_info. The structs that Cyclone wants are made from rosbags' type descriptions; their bytes are
rosbags' CDR, which is 3 to 1000 times faster than Cyclone's own Python codec.

Services are rmw_cyclonedds's: topics rq/<name>Request and rr/<name>Reply, every payload behind 16 bytes
{client, number}, both ends of a server or client named by one id in USER_DATA. Other vendors of DDS carry
that elsewhere (rmw_cyclonedds #184): their services are refused by name, their topics work. A writer whose
type has another hash is refused as well.

Loopback is used unless an interface is named. Messages are stamped when `take` sees them: poll at the
watchdog's pace.
"""

import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from controllers import transport as t
from controllers.codec import Codec
from controllers.dds_config import configuration, why_shut
from controllers.dds_joints import JointForm, JointShape
from controllers.dds_matched import matched, matched_endpoint
from controllers.dds_types import Types, is_framed
from controllers.services import LONGEST_REPLY, REPLY, REQUEST, PendingReply, filled, text_of
from controllers.transport import Handler, Mailbox, Received
from robo_rl.errors import MissingDependency, UserError, in_range

try:
    from cyclonedds import core, qos
    from cyclonedds.builtin import (
        BuiltinDataReader,
        BuiltinTopicDcpsPublication,
        BuiltinTopicDcpsSubscription,
    )
    from cyclonedds.domain import Domain, DomainParticipant
    from cyclonedds.pub import DataWriter
    from cyclonedds.sub import DataReader
    from cyclonedds.topic import Topic
except ImportError as e:
    raise MissingDependency(f"the DDS transport needs {e.name}: pip install 'robo_rl[robot]'") from None

DISCOVERY = "rmw_dds_common/msg/ParticipantEntitiesInfo"
Policy = qos.Policy
VENDORS = {
    b"\x01\x01": "RTI Connext",
    b"\x01\x0f": "Fast DDS",
    b"\x01\x10": "Cyclone DDS",
    b"\x01\x13": "GurumDDS",
}
"""First two bytes of a GUID, as the RTPS specification gives them out."""
PACE = 0.0005  # s between two looks for a reply
PENDING = 64  # requests whose reply comes later; the oldest is given up for one more


def vendor(guid: bytes) -> str:
    """Who made the other side's DDS."""
    return VENDORS.get(guid[:2], f"DDS vendor {guid[:2].hex()}")


def participant_of(guid: bytes) -> str:
    """The name of the participant whose endpoint, or who itself, has this GUID: its first 12 bytes, which no
    other has."""
    return guid[:12].hex()


def user_data(text: bytes, key: str) -> str:
    """The value of key=value; in USER_DATA, or ""."""
    pairs = dict(p.split("=", 1) for p in text.decode("ascii", "replace").split(";") if "=" in p)
    return pairs.get(key, "")


def hash_fault(what: str, name: str, theirs: str, ours: str) -> str:
    """Why the other side's type cannot be read; "" where it can, or does not say."""
    if not theirs or theirs == ours:
        return ""
    return (
        f"{what} is {name} with type hash {theirs[:20]}…, here {ours[:20]}…: another ROS distribution or a "
        "changed message; use the same interface package on both sides"
    )


def service_fault(name: str, kind: str, guid: bytes, theirs: str, ours: str) -> str:
    """Why a service that was found cannot be called; "" where it can."""
    if vendor(guid) != "Cyclone DDS":
        return (
            f"service {name} is offered over {vendor(guid)}: services do not cross vendors of DDS (topics "
            "do); run the robot's nodes with RMW_IMPLEMENTATION=rmw_cyclonedds_cpp, or use the rclpy "
            "transport"
        )
    return hash_fault(f"service {name}", kind, theirs, ours)


# ---- the wire ----------------------------------------------------------------------------------------------


_domains: dict[int, tuple[Any, str]] = {}  # Cyclone has one configuration per domain and process


class DdsTransport:
    """A ROS 2 node's worth of DDS: `transport.Transport`."""

    def __init__(
        self,
        name: str,
        *,
        domain: int | None = None,
        interface: str = "",
        namespace: str = "/",
        distribution: str = "jazzy",
        security: str = "",
    ):
        if domain is None:
            text = os.environ.get("ROS_DOMAIN_ID", "0")
            domain = int(text) if text.isdecimal() else -1
        in_range("ROS domain", domain, 0, 232)
        self.types, self.name, self.namespace = Types(distribution), name, namespace
        xml = configuration(domain, interface, security)
        try:
            if domain not in _domains:
                _domains[domain] = Domain(domain, xml), xml
            elif _domains[domain][1] != xml:
                raise UserError(
                    f"domain {domain} is open in this process on another interface or with other keys"
                )
            self.participant = DomainParticipant(domain, qos=qos.Qos(Policy.Userdata(b"enclave=/;")))
        except core.DDSException as e:
            _domains.pop(domain, None)
            raise UserError(f"{why_shut(domain, interface, security)} ({e})") from None
        self.dropped: Counter[str] = Counter()
        self.identity, self.caller = participant_of(self.participant.guid.bytes), ""
        self.closed = False
        self.entities: list[Any] = []
        self.topics: dict[tuple[str, str], Any] = {}
        self.kinds: dict[str, type] = {}
        # key of a writer in the graph -> topic, what is wrong with it
        self.writers: dict[Any, tuple[str, str]] = {}
        self.readers: dict[Any, tuple[str, str]] = {}
        self.graph = BuiltinDataReader(self.participant, BuiltinTopicDcpsPublication)
        self.reads = BuiltinDataReader(self.participant, BuiltinTopicDcpsSubscription)
        self.gids: dict[str, list[bytes]] = {"reader": [], "writer": []}
        self.servers: dict[str, tuple[Any, Any, str, Handler]] = {}
        # service, sample asked by, reply, when it is given up
        self.pending: deque[tuple[str, Any, PendingReply, float]] = deque()
        self.clients: dict[str, ServiceClient] = {}
        self.asked = core.WaitSet(self.participant)  # who is asked something
        self.discovery = DataWriter(
            self.participant, self._topic("ros_discovery_info", DISCOVERY), self._qos("latched", DISCOVERY)
        )
        self._announce()

    def publisher(self, topic: str, kind: type, quality: str = "state") -> "DdsPublisher":
        ros = self._join(topic, kind, quality)
        writer = allowed(
            DataWriter, self.participant, self._topic(f"rt/{topic}", ros), self._qos(quality, ros)
        )
        self._keep("writer", writer)
        return DdsPublisher(writer, kind, self.types.codec, topic)

    def subscription(self, topic: str, kind: type, quality: str = "state", depth: int = 1) -> Mailbox:
        in_range("depth", depth, 1, 10**6)
        ros = self._join(topic, kind, quality)
        reader = allowed(
            DataReader,
            self.participant,
            self._topic(f"rt/{topic}", ros),
            self._qos(quality, ros, depth, reads=True),
        )
        self._keep("reader", reader)
        ours = DdsReader(reader, kind, self.types, depth, self.now, self.dropped, topic)
        return Mailbox(depth, ours.pull, ours.all_sources)

    def publishers(self, topic: str) -> int:
        """Writers in the graph, ours and others'."""
        self._look()
        return sum(name == f"rt/{topic}" for name, _ in self.writers.values())

    def complaints(self) -> list[str]:
        """What other endpoints on this node's topics do that cannot work."""
        self._look()
        return sorted(
            {fault for _, fault in [*self.writers.values(), *self.readers.values()] if fault}
        ) + t.drops(self.dropped)

    def service(self, name: str, kind: str, handler: Handler) -> None:
        if name in self.servers:
            raise UserError(f"service {name} is offered already")
        reader, writer, _ = self._ends(name, kind, "serviceid")
        self.servers[name] = reader, writer, kind, handler
        self.asked.attach(
            core.ReadCondition(reader, core.ViewState.Any | core.InstanceState.Any | core.SampleState.NotRead)
        )

    def serve(self) -> None:
        for _ in range(len(self.pending)):
            name, sample, later, end = self.pending.popleft()
            if later.reply is not None:
                self._reply(name, sample, later.reply)
            elif self.now() < end:
                self.pending.append((name, sample, later, end))
            else:
                self.dropped[name] += 1
        if not self.servers or not self.asked.wait(0):
            return
        for name, (reader, _, kind, handler) in self.servers.items():
            for sample in reader.take(N=8):
                if not sample.sample_info.valid_data:
                    continue
                asker = matched_endpoint(reader, "publication", sample.sample_info.publication_handle)
                self.caller = "" if asker is None else participant_of(asker.key.bytes)  # None: it has left
                try:
                    reply = handler(self.types.codec.plain(text_of(kind, REQUEST), sample.message))
                except Exception:  # somebody's bytes: no reply, the caller's deadline tells it
                    self.dropped[name] += 1
                    continue
                finally:
                    self.caller = ""
                if isinstance(reply, PendingReply):
                    self.pending.append((name, sample, reply, self.now() + LONGEST_REPLY))
                    if len(self.pending) > PENDING:
                        self.dropped[self.pending.popleft()[0]] += 1
                else:
                    self._reply(name, sample, reply)

    def _reply(self, name: str, sample: Any, reply: dict) -> None:
        """Answer the request `sample` of a service."""
        _, writer, kind, _ = self.servers[name]
        try:
            made = self._built(kind, REPLY, filled(text_of(kind, REPLY), reply))
        except Exception:  # what the request led to cannot be said
            self.dropped[name] += 1
            return
        writer.write(writer.data_type(made, sample.client, sample.number))

    def call(self, name: str, kind: str, request: dict, timeout: float = 5.0) -> dict:
        given = filled(text_of(kind, REQUEST), request)
        if name not in self.clients:
            self.clients[name] = ServiceClient(*self._ends(name, kind, "clientid"))
        c, end = self.clients[name], self.now() + timeout
        ours = self.types.hash(kind)
        while not (found := c.server()):
            self.serve()
            if self.now() > end:
                raise UserError(f"nobody answers the service {name} within {timeout:g} s")
            time.sleep(PACE)
        if fault := service_fault(name, kind, found[0], found[1], ours):
            raise UserError(fault)
        number = c.ask(self._built(kind, REQUEST, given))
        while (reply := c.reply(number)) is None:
            self.serve()
            if self.now() > end:
                raise UserError(f"the service {name} did not answer within {timeout:g} s")
            time.sleep(PACE)
        humble = self.types.distribution == "humble" and kind.endswith("SwitchController")
        try:
            return filled(
                text_of(kind, REPLY),
                self.types.codec.plain("bool ok" if humble else text_of(kind, REPLY), reply.message),
            )
        except Exception as e:
            raise UserError(f"the service {name} answered with bytes that cannot be decoded: {e}") from None

    def now(self) -> float:
        return time.monotonic()

    def stamp(self) -> float:
        return time.time()

    def close(self) -> None:
        """Leave the graph in order; without it others notice after Cyclone's lease of 10 s. What was known of
        it stays."""
        self._look()
        self.closed = True
        for entity in [self.asked, *self.entities, self.graph, self.reads, self.discovery]:
            core.Entity.__del__(entity)
        self.entities, self.servers, self.clients = [], {}, {}
        self.pending.clear()
        core.Entity.__del__(self.participant)

    # ---- inside --------------------------------------------------------------------------------------------

    def _built(self, kind: str, part: str, values: dict) -> Any:
        text = text_of(kind, part)
        if self.types.distribution == "humble" and kind.endswith("SwitchController") and part == REPLY:
            text = "bool ok"
        return self.types.codec.build(f"{kind}_{part}", text, values)

    def _ends(self, name: str, kind: str, role: str) -> tuple[Any, Any, int]:
        """(reader, writer, id) of a server (role serviceid) or a client (clientid)."""
        self.types.add_service(kind)
        number = next(_numbers)
        mine = self.participant.guid.bytes[:12] + number.to_bytes(4, "big")
        both = qos.Qos(
            Policy.Reliability.Reliable(100_000_000),
            Policy.Durability.Volatile,
            Policy.History.KeepLast(10),
            Policy.DataRepresentation(use_cdrv0_representation=True, use_xcdrv2_representation=False),
            Policy.Userdata(
                f"{role}={'.'.join(f'{b:x}' for b in mine)};typehash={self.types.hash(kind)};".encode()
            ),
        )
        ends = [
            self._topic(f"rq/{name}Request", f"{kind}_{REQUEST}"),
            self._topic(f"rr/{name}Reply", f"{kind}_{REPLY}"),
        ]
        reads, writes = ends if role == "serviceid" else ends[::-1]
        reader, writer = (
            allowed(DataReader, self.participant, reads, both),
            allowed(DataWriter, self.participant, writes, both),
        )
        self._keep("reader", reader)
        self._keep("writer", writer)
        return reader, writer, int.from_bytes(mine[4:12], "little") ^ number << 32

    def _look(self) -> None:
        """Bring what is known of the graph up to date."""
        if self.closed:
            return
        for reader, known in ((self.graph, self.writers), (self.reads, self.readers)):
            for sample in reader.take(N=1000):
                alive = sample.sample_info.instance_state == core.InstanceState.Alive
                if alive and hasattr(sample, "topic_name"):
                    known[sample.key] = sample.topic_name, self._fault(sample)
                elif not alive:
                    known.pop(sample.key, None)

    def _fault(self, endpoint: Any) -> str:
        topic = endpoint.topic_name.removeprefix("rt/")
        kind = self.kinds.get(topic)
        if kind is None or not endpoint.topic_name.startswith("rt/"):
            return ""
        ros = t.ROS_TYPES[kind]
        package, part, short = ros.split("/")
        if endpoint.type_name != f"{package}::{part}::dds_::{short}_":
            return f"topic {topic} is {endpoint.type_name} elsewhere, here {ros}: they do not meet"
        return hash_fault(
            f"topic {topic}", ros, user_data(userdata_of(endpoint), "typehash"), self.types.hash(ros)
        )

    def _join(self, topic: str, kind: type, quality: str) -> str:
        t.join(self.kinds, topic, kind, quality)
        return t.ROS_TYPES[kind]

    def _topic(self, name: str, ros: str) -> Any:
        if (name, ros) not in self.topics:
            wire = self.types.framed(ros) if is_framed(ros) else self.types.wire(ros)
            self.topics[name, ros] = Topic(self.participant, name, wire)
        return self.topics[name, ros]

    def _qos(self, quality: str, ros: str, depth: int = 1, reads: bool = False) -> Any:
        """Commands and latched topics are reliable both ways; a state is offered reliable and asked for best
        effort."""
        reliable = Policy.Reliability.Reliable(0 if quality == "state" else 100_000_000)
        return qos.Qos(
            Policy.Reliability.BestEffort if reads and quality == "state" else reliable,
            Policy.Durability.TransientLocal if quality == "latched" else Policy.Durability.Volatile,
            Policy.History.KeepLast(depth),
            Policy.DataRepresentation(use_cdrv0_representation=True, use_xcdrv2_representation=False),
            Policy.Userdata(f"typehash={self.types.hash(ros)};".encode()),
        )

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
            node_namespace=self.namespace,
            node_name=self.name,
            reader_gid_seq=[gid(x) for x in self.gids["reader"]],
            writer_gid_seq=[gid(x) for x in self.gids["writer"]],
        )
        info = of[DISCOVERY](gid=gid(self.participant.guid.bytes), node_entities_info_seq=[node])
        self.discovery.write(self.discovery.data_type(info))


def allowed(end: Any, participant: Any, topic: Any, quality: Any) -> Any:
    """A reader or writer. UserError: this node's keys do not permit it."""
    try:
        return end(participant, topic, quality)
    except core.DDSException as e:
        if "NOT_ALLOWED_BY_SECURITY" not in str(e):
            raise
        raise UserError(
            f"the keys of this node do not let it {'write' if end is DataWriter else 'read'} {topic.name}"
        ) from None


def userdata_of(endpoint: Any) -> bytes:
    """USER_DATA of an endpoint in the graph."""
    return next((p.data for p in endpoint.qos or () if isinstance(p, Policy.Userdata)), b"")


class DdsPublisher:
    def __init__(self, writer: Any, kind: type, codec: Codec, topic: str):
        self.writer, self.kind, self.codec, self.topic = writer, kind, codec, topic
        self.wire, self.form = writer.data_type, None

    def publish(self, message: Any) -> None:
        if type(message) is not self.kind:
            raise UserError(f"topic {self.topic} carries {self.kind.__name__}, not {type(message).__name__}")
        if self.kind is t.JointState:  # 1000 times a second
            if self.form is None or not self.form.fits(message):
                self.form = JointForm(message, self.codec, self.wire)
            self.writer.write(self.form.filled(message))
            return
        self.writer.write(self.wire(self.codec.to_ros(message)))


class DdsReader:
    """Samples of a topic as `Received`; those of a writer with another type hash are left out."""

    def __init__(
        self,
        reader: Any,
        kind: type,
        types: Types,
        depth: int,
        now: Callable[[], float],
        dropped: Counter[str],
        topic: str,
    ):
        self.reader, self.kind, self.codec, self.depth, self.now = reader, kind, types.codec, depth, now
        self.dropped, self.topic = dropped, topic
        self.shape = JointShape() if kind is t.JointState else None
        self.hash = types.hash(t.ROS_TYPES[kind])
        self.sources: dict[int, str] = {}  # handle of a writer -> its name, "" where it is refused

    def pull(self) -> list[Received]:
        out = []
        for sample in self.reader.take(N=self.depth):
            info = sample.sample_info
            # not valid: a writer left
            if info.valid_data and (source := self.source(info.publication_handle)):
                try:
                    out.append(Received(self.read(sample), self.now(), source))
                except Exception:  # somebody's bytes; DDS checks lengths, not what a text or a number is
                    self.dropped[self.topic] += 1
        return out

    def read(self, sample: Any) -> Any:
        """Our message."""
        if self.shape is not None and (got := self.shape.read(sample.raw)) is not None:
            return got
        got = self.codec.from_ros(self.kind, sample.message)
        if self.shape is not None:
            self.shape.learn(sample.raw, got)
        return got

    def source(self, handle: int) -> str:
        if handle not in self.sources:
            writer = matched_endpoint(self.reader, "publication", handle)  # None: it has left
            theirs = "" if writer is None else user_data(userdata_of(writer), "typehash")
            name = f"{handle:x}" if writer is None else participant_of(writer.key.bytes)
            self.sources[handle] = "" if hash_fault("", "", theirs, self.hash) else name
        return self.sources[handle]

    def all_sources(self) -> set[str]:
        """Of all writers that are matched now."""
        return {name for handle in matched(self.reader, "publication") if (name := self.source(handle))}


_numbers = itertools.count(1)


class ServiceClient:
    """One service as its caller sees it."""

    def __init__(self, reader: Any, writer: Any, number: int):
        self.reader, self.writer, self.id, self.count = reader, writer, number & 2**63 - 1, 0

    def server(self) -> tuple[bytes, str] | None:
        """(GUID, type hash) of a server that has both its ends here; None: there is none yet."""
        answers = [
            matched_endpoint(self.reader, "publication", h) for h in matched(self.reader, "publication")
        ]
        ids = {user_data(userdata_of(a), "serviceid") for a in answers if a is not None}
        for handle in matched(self.writer, "subscription"):
            found = matched_endpoint(self.writer, "subscription", handle)
            if found is not None and user_data(userdata_of(found), "serviceid") in ids:
                return found.key.bytes, user_data(userdata_of(found), "typehash")
        return None

    def ask(self, message: Any) -> int:
        self.count += 1
        self.writer.write(self.writer.data_type(message, self.id, self.count))
        return self.count

    def reply(self, number: int) -> Any | None:
        """The sample of the reply; reading its `message` decodes it."""
        for sample in self.reader.take(N=8):
            if sample.sample_info.valid_data and (sample.client, sample.number) == (self.id, number):
                return sample
        return None
