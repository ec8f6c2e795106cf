"""How messages travel: one contract for every wire, and the wire inside one process that tests use.

A message is one of the frozen dataclasses here; a wire translates it to its own (ROS_TYPES names the ROS 2 type).
Quaternions are w first here and x first in ROS: a wire turns them. Nothing here interprets a message.

Qualities of service: "command" is reliable and keeps the last message, "state" keeps the last and may lose some,
"latched" also reaches those who subscribe later. A message comes with the receiver's monotonic time and with the
publisher that sent it: ages and the rule of one commander rest on these, never on what the message says.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

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
class Numbers:
    data: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Flag:
    data: bool


@dataclass(frozen=True, slots=True)
class Text:
    data: str


ROS_TYPES = {PoseStamped: "geometry_msgs/msg/PoseStamped", TwistStamped: "geometry_msgs/msg/TwistStamped",
             WrenchStamped: "geometry_msgs/msg/WrenchStamped", JointState: "sensor_msgs/msg/JointState",
             Numbers: "std_msgs/msg/Float64MultiArray", Flag: "std_msgs/msg/Bool", Text: "std_msgs/msg/String"}


@dataclass(frozen=True, slots=True)
class Received:
    """A message with the receiver's monotonic time [s] and a name of its publisher that no other has."""

    message: Any
    at: float
    source: str


class Publisher(Protocol):
    def publish(self, message: Any) -> None: ...


class Subscription(Protocol):
    def take(self) -> list[Received]:
        """What came since the last call, oldest first; at most the last one unless a depth was asked for."""

    def latest(self) -> Received | None:
        """The newest message ever received."""


class Transport(Protocol):
    """What every wire does. Methods may be called from one thread at a time."""

    def publisher(self, topic: str, kind: type, quality: str = "state") -> Publisher: ...

    def subscription(self, topic: str, kind: type, quality: str = "state", depth: int = 1) -> Subscription: ...

    def publishers(self, topic: str) -> int:
        """How many publish there now."""

    def service(self, name: str, handler: Callable[[dict], dict]) -> None: ...

    def call(self, name: str, request: dict, timeout: float = 1.0) -> dict:
        """UserError when nobody answers in time."""

    def now(self) -> float:
        """Monotonic seconds."""

    def close(self) -> None: ...


# ---- inside one process ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How bad the wire is."""

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


class Bus:
    """What the in-process transports of one test share. `clock` gives monotonic seconds, simulated ones too."""

    def __init__(self, clock: Callable[[], float], weather: Weather | None = None):
        self.clock, self.weather = clock, weather or Weather()
        self.rng = np.random.default_rng(self.weather.seed)
        self.kinds: dict[str, type] = {}
        self.boxes: dict[str, list[Box]] = {}
        self.senders: dict[str, list[str]] = {}
        self.kept: dict[str, tuple[Any, str]] = {}
        self.services: dict[str, Callable[[dict], dict]] = {}
        self.nodes = 0

    def join(self, topic: str, kind: type, quality: str) -> None:
        choose("quality of service", quality, QUALITIES)
        if kind not in ROS_TYPES:
            raise UserError(f"{getattr(kind, '__name__', kind)} is no message; messages are "
                            f"{', '.join(k.__name__ for k in ROS_TYPES)}")
        known = self.kinds.setdefault(topic, kind)
        if known is not kind:
            raise UserError(f"topic {topic} carries {known.__name__}, not {kind.__name__}")

    def send(self, topic: str, message: Any, source: str, quality: str) -> None:
        if type(message) is not self.kinds[topic]:
            raise UserError(f"topic {topic} carries {self.kinds[topic].__name__}, not {type(message).__name__}")
        if quality == "latched":
            self.kept[topic] = message, source
        w = self.weather
        for box in self.boxes.get(topic, []):
            for _ in range(1 + int(w.repeat > 0 and self.rng.random() < w.repeat)):
                if not (w.drop and self.rng.random() < w.drop):
                    late = w.delay + (w.jitter * self.rng.random() if w.jitter else 0.0)
                    box.coming.append((self.clock() + late, message, source))


@dataclass(slots=True)
class Box:
    """A subscription's messages: under way, and the newest that arrived."""

    bus: Bus
    depth: int
    coming: list[tuple[float, Any, str]] = field(default_factory=list)
    newest: Received | None = None
    waiting: deque[Received] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = deque(maxlen=self.depth)

    def arrive(self) -> None:
        if not self.coming:
            return
        now = self.bus.clock()
        here = sorted((c for c in self.coming if c[0] <= now), key=lambda c: c[0])
        if here:
            self.coming = [c for c in self.coming if c[0] > now]
            for due, message, source in here:
                self.newest = Received(message, due, source)
                self.waiting.append(self.newest)

    def take(self) -> list[Received]:
        self.arrive()
        out = list(self.waiting)
        self.waiting.clear()
        return out

    def latest(self) -> Received | None:
        self.arrive()
        return self.newest


@dataclass(frozen=True, slots=True)
class Sender:
    bus: Bus
    topic: str
    source: str
    quality: str

    def publish(self, message: Any) -> None:
        self.bus.send(self.topic, message, self.source, self.quality)


class Loop:
    """A node on a `Bus`."""

    def __init__(self, bus: Bus, name: str):
        self.bus, self.name = bus, f"{name}#{bus.nodes}"
        bus.nodes += 1
        self.boxes: list[tuple[str, Box]] = []
        self.served: list[str] = []

    def publisher(self, topic: str, kind: type, quality: str = "state") -> Sender:
        self.bus.join(topic, kind, quality)
        self.bus.senders.setdefault(topic, []).append(self.name)
        return Sender(self.bus, topic, self.name, quality)

    def subscription(self, topic: str, kind: type, quality: str = "state", depth: int = 1) -> Box:
        self.bus.join(topic, kind, quality)
        in_range("depth", depth, 1, 10**6)
        box = Box(self.bus, depth)
        self.bus.boxes.setdefault(topic, []).append(box)
        self.boxes.append((topic, box))
        if quality == "latched" and topic in self.bus.kept:
            box.coming.append((self.bus.clock(), *self.bus.kept[topic]))
        return box

    def publishers(self, topic: str) -> int:
        return len(self.bus.senders.get(topic, []))

    def service(self, name: str, handler: Callable[[dict], dict]) -> None:
        if name in self.bus.services:
            raise UserError(f"service {name} is offered already")
        self.bus.services[name] = handler
        self.served.append(name)

    def call(self, name: str, request: dict, timeout: float = 1.0) -> dict:
        if name not in self.bus.services:
            raise UserError(f"nobody answers the service {name} within {timeout:g} s")
        return self.bus.services[name](request)

    def now(self) -> float:
        return self.bus.clock()

    def close(self) -> None:
        """Leave: subscriptions end, publishers and services are gone."""
        for topic, box in self.boxes:
            self.bus.boxes[topic].remove(box)
        for topic, names in self.bus.senders.items():
            self.bus.senders[topic] = [n for n in names if n != self.name]
        for name in self.served:
            del self.bus.services[name]
        self.boxes, self.served = [], []
