"""A rosbag2 (MCAP) of what a node hears and says, written without ROS by rosbags. `ros2 bag play` and
Foxglove read it.

Times are the wall clock's at the receiver. Each topic carries the QoS profile that a node of ours offers it
with, so that `ros2 bag play` offers it so too: reliable, and a latched one transient local. The bag takes its
place when it is closed and whole; until then it lies in .<name>.tmp beside it, and what a killed process left
there stays, as <name>.unfinished. A disk that is full ends the bag, not the motion that it records.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from controllers.codec import Codec
from controllers.transport import ROS_TYPES, Mailbox, Publisher, Received, Transport
from robo_rl.errors import MissingDependency, UserError


class BagWriter:
    """One bag at `path`, a folder that must not exist. now(): monotonic seconds, of the times that `add`
    gets."""

    def __init__(self, path: "str | Path", now: Callable[[], float] = time.monotonic):
        try:
            from rosbags.rosbag2 import StoragePlugin, Writer
            from rosbags.typesys import Stores, get_typestore
        except ImportError as e:
            raise MissingDependency(f"a bag needs {e.name}: pip install 'robo_rl[robot]'") from None
        self.path = Path(path)
        self.draft = self.path.parent / f".{self.path.name}.tmp"
        if self.path.exists():
            raise UserError(f"{self.path} exists: a bag is written once, name another folder")
        try:
            if self.draft.exists():  # of one that was killed
                keep(self.draft, self.path)
            self.draft.mkdir(parents=True)
            self.writer = Writer(self.draft / self.path.name, version=9, storage_plugin=StoragePlugin.MCAP)
            self.writer.open()
        except OSError as e:
            raise UserError(f"cannot write the bag {self.path}: {e.strerror}") from None
        self.store = get_typestore(Stores.ROS2_JAZZY)
        self.codec = Codec(self.store.types.__getitem__, np.array)
        self.topics: dict[str, Any] = {}
        self.qualities: dict[str, str] = {}  # of `Transport.publisher`; of a topic that is not here: state
        self.counts: dict[str, int] = {}
        self.began = time.time() - now()
        self.fault = ""  # why it ended early

    def add(self, topic: str, message: Any, at: float) -> None:
        """One message of time `at`. One that cannot be written ends the bag: `close` tells it."""
        if not self.fault:
            try:
                self._add(topic, message, at)
            except OSError as e:
                self.fault = e.strerror or str(e)

    def _add(self, topic: str, message: Any, at: float) -> None:
        ros = ROS_TYPES[type(message)]
        if topic not in self.topics:
            profile = offered(self.qualities.get(topic, "state"))
            self.topics[topic] = self.writer.add_connection(
                f"/{topic}", ros, typestore=self.store, offered_qos_profiles=[profile]
            )
        self.counts[topic] = self.counts.get(topic, 0) + 1
        raw = self.store.serialize_cdr(self.codec.to_ros(message), ros)
        self.writer.write(self.topics[topic], round((self.began + at) * 1e9), raw)

    def text(self) -> str:
        """How much is in it, in words."""
        return f"bag with {sum(self.counts.values())} messages on {len(self.counts)} topics in {self.path}"

    def close(self) -> None:
        """Make it whole, durable and known by its name; one without a message goes. UserError: it cannot be
        written."""
        try:
            self.writer.close()
        except OSError as e:
            self.fault = self.fault or e.strerror or str(e)
        if self.fault:
            raise UserError(
                f"the bag {self.path} is not whole: {self.fault}; what was written lies in {self.draft}, and "
                "`mcap recover` reads it"
            )
        if not self.counts:
            shutil.rmtree(self.draft)
            return
        made = self.draft / self.path.name
        for file in (*made.iterdir(), made):
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        made.rename(self.path)
        self.draft.rmdir()


def keep(draft: Path, path: Path) -> None:
    """Move what a killed process wrote of a bag to a free name beside it; one of no bytes goes."""
    if not any(file.stat().st_size for file in draft.rglob("*.mcap")):
        shutil.rmtree(draft)
        return
    names = (path.with_name(f"{path.name}.unfinished{k or ''}") for k in range(10**6))
    draft.rename(next(name for name in names if not name.exists()))


def offered(quality: str) -> Any:
    """The QoS profile of a topic of this quality, as `controllers.dds` and `controllers.ros` offer it."""
    from rosbags.interfaces import Qos, QosDurability, QosHistory, QosLiveliness, QosReliability, QosTime

    ever = QosTime(9223372036, 854775807)  # rmw's infinity
    durability = QosDurability.TRANSIENT_LOCAL if quality == "latched" else QosDurability.VOLATILE
    return Qos(
        QosHistory.KEEP_LAST,
        1,
        QosReliability.RELIABLE,
        durability,
        ever,
        ever,
        QosLiveliness.AUTOMATIC,
        ever,
        False,
    )


def recorded(wire: Transport, bag: "BagWriter | None") -> Transport:
    """The transport, with its messages written to the bag where there is one."""
    if bag is None:
        return wire
    bag.began = time.time() - wire.now()
    return RecordedTransport(wire, bag)


class RecordedTransport:
    """A transport whose messages, both ways, go into a bag as well."""

    def __init__(self, wire: Transport, bag: BagWriter):
        self.wire, self.bag = wire, bag
        self.publishers, self.complaints, self.now, self.stamp = (
            wire.publishers,
            wire.complaints,
            wire.now,
            wire.stamp,
        )
        self.service, self.serve, self.call, self.close = wire.service, wire.serve, wire.call, wire.close

    @property
    def identity(self) -> str:
        return self.wire.identity

    @property
    def caller(self) -> str:
        return self.wire.caller

    def publisher(self, topic: str, kind: type, quality: str = "state") -> "RecordedPublisher":
        self.bag.qualities[topic] = quality
        return RecordedPublisher(self.wire.publisher(topic, kind, quality), topic, self.bag, self.now)

    def subscription(self, topic: str, kind: type, quality: str = "state", depth: int = 1) -> Mailbox:
        box = self.wire.subscription(topic, kind, quality, depth)
        self.bag.qualities[topic] = quality

        def heard() -> Iterable[Received]:
            for got in box.take():
                self.bag.add(topic, got.message, got.at)
                yield got

        return Mailbox(depth, heard, box.sources)


class RecordedPublisher:
    """A publisher that is recorded."""

    def __init__(self, publisher: Publisher, topic: str, bag: BagWriter, now: Callable[[], float]):
        self.publisher, self.topic, self.bag, self.now = publisher, topic, bag, now

    def publish(self, message: Any) -> None:
        self.bag.add(self.topic, message, self.now())
        self.publisher.publish(message)
