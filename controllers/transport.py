"""How messages travel: one contract for every wire, and the wire inside one process that tests use.

A message is one of the frozen dataclasses here; a wire translates it to its own (ROS_TYPES names the ROS 2
type). Quaternions are w first here and x first in ROS: a wire turns them. Nothing here interprets a message.

Qualities of service: "command" is reliable and keeps the last message, "state" keeps the last and may lose
some, "latched" also reaches those who subscribe later. A message comes with the receiver's monotonic time and
with the participant that sent it, under a name that all its publishers and clients share: ages and the rule
of one commander rest on these, never on what the message says.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from controllers.action_messages import GoalStatuses, GripperFeedback, TrajectoryFeedback
from controllers.action_types import GRIPPER, TRAJECTORY
from controllers.services import REPLY, REQUEST, PendingReply, filled, text_of
from robo_rl.errors import UserError, choose, in_range

QUALITIES = ("command", "state", "latched")


@dataclass(frozen=True, slots=True)
class PoseStamped:
    """Tool pose; stamp [s] of the sender's clock, pos [m], quat (w, x, y, z)."""

    stamp: float
    frame: str
    pos: tuple[float, ...]
    quat: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TwistStamped:
    """Linear [m/s] then angular [rad/s] velocity in axes of `frame`."""

    stamp: float
    frame: str
    twist: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WrenchStamped:
    """Force [N] then moment [N m] in axes of `frame`."""

    stamp: float
    frame: str
    wrench: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class JointState:
    """Per named joint; empty tuples where there is nothing to say. [rad], [rad/s], [N m]."""

    stamp: float
    names: tuple[str, ...]
    position: tuple[float, ...] = ()
    velocity: tuple[float, ...] = ()
    effort: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class JointTrajectory:
    """points: (seconds from the stamp on, positions [rad] in the order of names); stamp 0: from when it
    comes."""

    stamp: float
    names: tuple[str, ...]
    points: tuple[tuple[float, tuple[float, ...]], ...]


@dataclass(frozen=True, slots=True)
class Transforms:
    """For tf: (parent frame, child frame, pos [m], quat (w, x, y, z)) each."""

    stamp: float
    transforms: tuple[tuple[str, str, tuple[float, ...], tuple[float, ...]], ...]


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """For /diagnostics: (level 0 ok, 1 warning, 2 error; name; message; pairs of key and value) each."""

    stamp: float
    status: tuple[tuple[int, str, str, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True, slots=True)
class Numbers:
    data: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CompressedImage:
    """A picture as a file: format "jpeg" or "png", data its bytes."""

    stamp: float
    frame: str
    format: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Clock:
    """Simulated time [s]."""

    stamp: float


@dataclass(frozen=True, slots=True)
class Flag:
    data: bool


@dataclass(frozen=True, slots=True)
class Text:
    data: str


ROS_TYPES = {
    PoseStamped: "geometry_msgs/msg/PoseStamped",
    TwistStamped: "geometry_msgs/msg/TwistStamped",
    WrenchStamped: "geometry_msgs/msg/WrenchStamped",
    JointState: "sensor_msgs/msg/JointState",
    JointTrajectory: "trajectory_msgs/msg/JointTrajectory",
    Transforms: "tf2_msgs/msg/TFMessage",
    Diagnostics: "diagnostic_msgs/msg/DiagnosticArray",
    CompressedImage: "sensor_msgs/msg/CompressedImage",
    Clock: "rosgraph_msgs/msg/Clock",
    GoalStatuses: "action_msgs/msg/GoalStatusArray",
    TrajectoryFeedback: f"{TRAJECTORY}_FeedbackMessage",
    GripperFeedback: f"{GRIPPER}_FeedbackMessage",
    Numbers: "std_msgs/msg/Float64MultiArray",
    Flag: "std_msgs/msg/Bool",
    Text: "std_msgs/msg/String",
}


@dataclass(frozen=True, slots=True)
class Received:
    """A message with the receiver's monotonic time [s] and a name of the participant that sent it, which no
    other has."""

    message: Any
    at: float
    source: str


Handler = Callable[[dict], "dict | PendingReply"]  # of a service


class Publisher(Protocol):
    def publish(self, message: Any) -> None: ...


class Mailbox:
    """Holds the messages of a subscription. pull() gives those that came since the last call, oldest first;
    sources(): the names of all who publish on its topic now, None where nobody knows."""

    def __init__(
        self,
        depth: int,
        pull: Callable[[], Iterable[Received]],
        sources: Callable[[], "set[str] | None"] = lambda: None,
    ):
        in_range("depth", depth, 1, 10**6)
        self.pull, self.newest, self.sources = pull, None, sources
        self.waiting: deque[Received] = deque(maxlen=depth)

    def _arrive(self) -> None:
        for got in self.pull():
            self.newest = got
            self.waiting.append(got)

    def take(self) -> list[Received]:
        """Messages since the last call, oldest first; at most the newest `depth`."""
        self._arrive()
        if not self.waiting:
            return []
        out = list(self.waiting)
        self.waiting.clear()
        return out

    def latest(self) -> Received | None:
        """The newest message ever received."""
        self._arrive()
        return self.newest


class Transport(Protocol):
    """What every transport does. Methods may be called from one thread at a time. Nobody's bytes end one:
    what cannot be decoded or answered is dropped, counted and named by `complaints`.

    identity: the name under which others receive from this one, "" where it cannot know; caller: who asked
    for the service whose handler runs, "" where it cannot know."""

    @property
    def identity(self) -> str: ...

    @property
    def caller(self) -> str: ...

    def publisher(self, topic: str, kind: type, quality: str = "state") -> Publisher: ...

    def subscription(self, topic: str, kind: type, quality: str = "state", depth: int = 1) -> Mailbox: ...

    def publishers(self, topic: str) -> int:
        """Number of publishers of a topic now."""
        ...

    def complaints(self) -> list[str]:
        """Faults of other nodes on this node's topics and services: another message type, samples that were
        dropped; one line each."""
        ...

    def service(self, name: str, kind: str, handler: "Handler") -> None:
        """Offer a service: the handler takes the request's fields and returns the reply's, both of
        `controllers.services`, or a `PendingReply`."""

    def serve(self) -> None:
        """Answer the requests that have come; a server calls it often."""

    def call(self, name: str, kind: str, request: dict, timeout: float = 5.0) -> dict:
        """Call a service -> fields of its reply. UserError: no reply within `timeout` [s], or an error."""
        ...

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def stamp(self) -> float:
        """Seconds for the stamps of messages: the system's clock, or the simulated one. Ages are never told
        by it."""
        ...

    def close(self) -> None: ...


# ---- inside one process ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConditions:
    """Network conditions of messages on a `Bus`."""

    delay: float = 0.0  # s
    jitter: float = 0.0  # s, uniform on top; messages may overtake each other
    drop: float = 0.0  # probability
    repeat: float = 0.0  # probability that a message comes twice
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("delay", "jitter"):
            in_range(name, getattr(self, name), 0, 3600)
        for name in ("drop", "repeat"):
            in_range(name, getattr(self, name), 0, 1)


def join(kinds: dict[str, type], topic: str, kind: type, quality: str) -> None:
    """Note in `kinds` that `topic` carries messages of `kind`; UserError for no message, another kind or
    quality."""
    choose("quality of service", quality, QUALITIES)
    if kind not in ROS_TYPES:
        raise UserError(
            f"{getattr(kind, '__name__', kind)} is no message; messages are "
            f"{', '.join(k.__name__ for k in ROS_TYPES)}"
        )
    known = kinds.setdefault(topic, kind)
    if known is not kind:
        raise UserError(f"topic {topic} carries {known.__name__}, not {kind.__name__}")


def drops(counts: Counter[str]) -> list[str]:
    """One line for each topic or service of which samples were dropped."""
    return [
        f"{name}: {n} samples could not be decoded or answered and were dropped"
        for name, n in sorted(counts.items())
    ]


class Bus:
    """Connects in-process transports. `clock` gives monotonic seconds, real or simulated."""

    def __init__(self, clock: Callable[[], float], conditions: NetworkConditions | None = None):
        self.clock, self.conditions = clock, conditions or NetworkConditions()
        self.rng = np.random.default_rng(self.conditions.seed)
        self.kinds: dict[str, type] = {}
        self.queues: dict[str, list[MessageQueue]] = {}
        self.senders: dict[str, list[str]] = {}
        self.kept: dict[str, tuple[Any, str]] = {}
        self.services: dict[str, tuple[str, Handler]] = {}
        self.nodes, self.caller = 0, ""

    def join(self, topic: str, kind: type, quality: str) -> None:
        join(self.kinds, topic, kind, quality)

    def send(self, topic: str, message: Any, source: str, quality: str) -> None:
        if type(message) is not self.kinds[topic]:
            raise UserError(
                f"topic {topic} carries {self.kinds[topic].__name__}, not {type(message).__name__}"
            )
        if quality == "latched":
            self.kept[topic] = message, source
        w = self.conditions
        for mail in self.queues.get(topic, []):
            for _ in range(1 + int(w.repeat > 0 and self.rng.random() < w.repeat)):
                if not (w.drop and self.rng.random() < w.drop):
                    late = w.delay + (w.jitter * self.rng.random() if w.jitter else 0.0)
                    mail.coming.append((self.clock() + late, message, source))


class MessageQueue:
    """Messages on their way to one subscription."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.coming: list[tuple[float, Any, str]] = []

    def pull(self) -> list[Received]:
        """Messages that have arrived by now, by their time of arrival."""
        if not self.coming:
            return []
        now = self.clock()
        here = sorted((c for c in self.coming if c[0] <= now), key=lambda c: c[0])
        if here:
            self.coming = [c for c in self.coming if c[0] > now]
        return [Received(message, due, source) for due, message, source in here]


@dataclass(frozen=True, slots=True)
class LoopbackPublisher:
    bus: Bus
    topic: str
    source: str
    quality: str

    def publish(self, message: Any) -> None:
        self.bus.send(self.topic, message, self.source, self.quality)


class LoopbackTransport:
    """The transport of a node on a `Bus`."""

    def __init__(self, bus: Bus, name: str):
        self.bus, self.name = bus, f"{name}#{bus.nodes}"
        bus.nodes += 1
        self.queues: list[tuple[str, MessageQueue]] = []
        self.served: list[str] = []

    @property
    def identity(self) -> str:
        return self.name

    @property
    def caller(self) -> str:
        return self.bus.caller

    def publisher(self, topic: str, kind: type, quality: str = "state") -> LoopbackPublisher:
        self.bus.join(topic, kind, quality)
        self.bus.senders.setdefault(topic, []).append(self.name)
        return LoopbackPublisher(self.bus, topic, self.name, quality)

    def subscription(self, topic: str, kind: type, quality: str = "state", depth: int = 1) -> Mailbox:
        self.bus.join(topic, kind, quality)
        mail = MessageQueue(self.bus.clock)
        box = Mailbox(depth, mail.pull, lambda: set(self.bus.senders.get(topic, [])))
        self.bus.queues.setdefault(topic, []).append(mail)
        self.queues.append((topic, mail))
        if quality == "latched" and topic in self.bus.kept:
            mail.coming.append((self.bus.clock(), *self.bus.kept[topic]))
        return box

    def publishers(self, topic: str) -> int:
        return len(self.bus.senders.get(topic, []))

    def complaints(self) -> list[str]:
        return []

    def service(self, name: str, kind: str, handler: Handler) -> None:
        text_of(kind, REQUEST)
        if name in self.bus.services:
            raise UserError(f"service {name} is offered already")
        self.bus.services[name] = kind, handler
        self.served.append(name)

    def serve(self) -> None:
        """Nothing to do: `call` runs the handler."""

    def call(self, name: str, kind: str, request: dict, timeout: float = 5.0) -> dict:
        given = filled(text_of(kind, REQUEST), request)
        there, handler = self.bus.services.get(name, ("", None))
        if handler is None:
            raise UserError(f"nobody answers the service {name} within {timeout:g} s")
        if there != kind:
            raise UserError(f"service {name} is of type {there}, not {kind}")
        self.bus.caller = self.name
        try:
            reply = handler(given)
            if isinstance(reply, PendingReply):
                if reply.reply is None:
                    raise UserError(
                        f"the service {name} did not answer at once: time passes between two calls alone here"
                    )
                reply = reply.reply
            return filled(text_of(kind, REPLY), reply)
        finally:
            self.bus.caller = ""

    def now(self) -> float:
        return self.bus.clock()

    def stamp(self) -> float:
        return self.bus.clock()

    def close(self) -> None:
        """Leave: subscriptions end, publishers and services are gone."""
        for topic, mail in self.queues:
            self.bus.queues[topic].remove(mail)
        for topic, names in self.bus.senders.items():
            self.bus.senders[topic] = [n for n in names if n != self.name]
        for name in self.served:
            del self.bus.services[name]
        self.queues, self.served = [], []
