"""rclpy and message packages as far as controllers/ros.py uses them: they check every call and carry messages
in memory.

Names, arguments and types are those of rclpy in ROS 2 Jazzy; a call with anything else fails. Message classes
come from rosbags' definitions and take what rclpy's generated classes take: keyword arguments of the right
Python types alone.
"""

import array
import itertools
import queue
import sys
import threading
import time
import types
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum

from rosbags.interfaces import Nodetype
from rosbags.typesys import Stores, get_typestore

from controllers.services import MESSAGES, SERVICES, fields

STORE = get_typestore(Stores.ROS2_JAZZY)
PYTHON = {"string": str, "bool": bool, "byte": bytes, "float64": float, "float32": float}
IMPL = {"SendGoal": "SendGoalService", "GetResult": "GetResultService", "FeedbackMessage": "FeedbackMessage"}
CODES = {
    "float64": "d",
    "float32": "f",
    "uint8": "B",
    "char": "B",
    "int64": "q",
    "uint64": "Q",
    "int32": "i",
    "uint32": "I",
}


Reliability = Enum("ReliabilityPolicy", "RELIABLE BEST_EFFORT")
Durability = Enum("DurabilityPolicy", "TRANSIENT_LOCAL VOLATILE")
History = Enum("HistoryPolicy", "KEEP_LAST KEEP_ALL")


@dataclass
class Qos:
    depth: int
    history: History
    reliability: Reliability
    durability: Durability


@dataclass
class Info:
    topic_type: str
    endpoint_gid: list


def described(name: str) -> list[tuple[str, str, bool]]:
    """(field, base type or message, is a sequence: -1, or an array of so many) of a message."""
    if name in MESSAGES:
        return fields(MESSAGES[name])
    out = []
    for field, (node, detail) in STORE.fielddefs[name][1]:
        many = detail[1] if node == Nodetype.ARRAY else -1 if node == Nodetype.SEQUENCE else 0
        _, inner = detail[0] if many else (node, detail)
        out.append((field, inner if isinstance(inner, str) else inner[0], many))
    return out


def check(name: str, field: str, kind: str, many: bool, value) -> None:
    where = f"{name}.{field}"
    if many:
        assert many < 0 or (isinstance(value, list) and len(value) == many), (
            f"{where} has {many} values in a list, got {value!r}"
        )
        if kind in CODES and isinstance(value, array.array):
            assert value.typecode == CODES[kind], f"{where}: typecode {value.typecode}"
            return
        assert isinstance(value, (list, tuple)), f"{where}: rclpy takes no {type(value).__name__}"
        for v in value:
            check(name, field, kind, False, v)
    elif "/" in kind:
        assert getattr(value, "ros", "") == kind, f"{where}: {value!r} is no {kind}"
    else:
        assert type(value) is PYTHON.get(kind, int), f"{where}: {value!r} is no {kind}"


def message_class(name: str, rows: list[tuple[str, str, bool]]) -> type:
    def build(self, **given):
        assert not set(given) - {r[0] for r in rows}, f"{name} has no {set(given) - {r[0] for r in rows}}"
        for field, kind, many in rows:
            zero = (
                [0] * many
                if many > 0
                else (array.array(CODES[kind]) if kind in CODES else [])
                if many
                else CLASSES[kind]()
                if "/" in kind
                else PYTHON.get(kind, int)()
            )
            value = given.get(field, zero)
            check(name, field, kind, many, value)
            if many < 0 and kind in CODES and not isinstance(value, array.array):
                value = array.array(CODES[kind], value)  # as rclpy's setters do
            setattr(self, field, value)

    return type(name.split("/")[-1], (), {"__init__": build, "ros": name})


CLASSES: dict[str, type] = {}


def packages() -> dict[str, types.ModuleType]:
    """geometry_msgs.msg and so on."""
    out: dict[str, types.ModuleType] = {}

    def put(name: str, made: type) -> None:
        package, kind, short = name.split("/")
        for dotted in (package, f"{package}.{kind}"):
            out.setdefault(dotted, types.ModuleType(dotted))
        module = out[f"{package}.{kind}"]
        if kind == "action":  # as rosidl_generator_py has them: what carries the action is in its Impl
            base, part = short.split("_")
            action = module.__dict__.setdefault(base, type(base, (), {"Impl": type("Impl", (), {})}))
            setattr(action.Impl if part in IMPL else action, IMPL.get(part, part), made)
        else:
            setattr(module, short, made)

    for name in {**STORE.types, **MESSAGES}:
        CLASSES[name] = message_class(name, described(name))
        put(name, CLASSES[name])
    for name, texts in SERVICES.items():
        parts = {
            p: message_class(f"{name}_{p}", fields(text))
            for p, text in zip(("Request", "Response"), texts, strict=True)
        }
        put(name, type(name.split("/")[-1], (), parts | {"ros": name}))
    return out


class Graph:
    """What all nodes of a test share."""

    def __init__(self):
        self.publishers, self.subscriptions = defaultdict(list), defaultdict(list)
        self.services: dict[str, Service] = {}
        self.calls: list[tuple] = []  # (what, name), in order


GRAPH = Graph()


class Publisher:
    number = itertools.count(1)

    def __init__(self, node, kind, topic, qos):
        self.node, self.kind, self.topic, self.qos, self.last = node, kind, topic, qos, None
        self.gid = node.number << 32 | next(self.number)  # of the participant, then of the endpoint

    def publish(self, message):
        assert type(message) is self.kind, (
            f"{self.topic}: {type(message).__name__} is no {self.kind.__name__}"
        )
        self.last = message
        for s in GRAPH.subscriptions[self.topic]:
            s.offer(message, self)


class Subscription:
    def __init__(self, node, kind, topic, callback, qos):
        self.node, self.kind, self.topic, self.callback, self.qos = node, kind, topic, callback, qos
        for p in GRAPH.publishers[topic]:
            if p.last is not None and Durability.TRANSIENT_LOCAL is p.qos.durability is qos.durability:
                self.offer(p.last, p)

    def offer(self, message, publisher):
        strict = (
            self.qos.reliability is Reliability.RELIABLE
            and publisher.qos.reliability is Reliability.BEST_EFFORT
        )
        if publisher.kind is self.kind and not strict:
            self.node.work.put((self.callback, message))


class Service:
    def __init__(self, node, kind, name, callback):
        self.node, self.kind, self.callback = node, kind, callback


class Future:
    def __init__(self):
        self.value, self.over = None, threading.Event()

    def done(self):
        return self.over.is_set()

    def result(self):
        return self.value

    def cancel(self):
        self.over.set()


class Client:
    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def wait_for_service(self, timeout_sec=None):
        end = time.monotonic() + timeout_sec
        while self.name not in GRAPH.services and time.monotonic() < end:
            time.sleep(0.001)
        return self.name in GRAPH.services

    def call_async(self, request):
        assert type(request) is self.kind.Request
        service, future = GRAPH.services[self.name], Future()
        assert service.kind is self.kind

        def answer(_):
            future.value = service.callback(request, self.kind.Response())
            assert type(future.value) is self.kind.Response
            future.over.set()

        service.node.work.put((answer, None))
        return future


class Clock:
    """As rclpy's, of the system's time."""

    def now(self):
        return types.SimpleNamespace(nanoseconds=time.time_ns())


class Node:
    numbers = itertools.count(1)

    def __init__(self, name, namespace):
        self.number = next(self.numbers)
        self.name, self.namespace, self.work = name, namespace, queue.Queue()
        self.publishers, self.subscriptions, self.served = [], [], []

    def create_publisher(self, msg_type, topic, qos_profile):
        assert isinstance(qos_profile, Qos)
        GRAPH.calls.append(("publisher", topic, qos_profile))
        self.publishers.append(Publisher(self, msg_type, topic, qos_profile))
        GRAPH.publishers[topic].append(self.publishers[-1])
        return self.publishers[-1]

    def create_subscription(self, msg_type, topic, callback, qos_profile, *, callback_group=None):
        assert isinstance(qos_profile, Qos) and isinstance(callback_group, Group)
        GRAPH.calls.append(("subscription", topic, qos_profile))
        self.subscriptions.append(Subscription(self, msg_type, topic, callback, qos_profile))
        GRAPH.subscriptions[topic].append(self.subscriptions[-1])
        return self.subscriptions[-1]

    def create_service(self, srv_type, srv_name, callback, *, callback_group=None):
        assert isinstance(callback_group, Group)
        GRAPH.services[srv_name] = Service(self, srv_type, srv_name, callback)
        self.served.append(srv_name)

    def create_client(self, srv_type, srv_name, *, callback_group=None):
        assert isinstance(callback_group, Group)
        return Client(srv_type, srv_name)

    def get_clock(self):
        return Clock()

    def count_publishers(self, topic_name):
        return len(GRAPH.publishers[topic_name])

    def get_publishers_info_by_topic(self, topic_name):
        return [Info(p.kind.ros, list(p.gid.to_bytes(16, "big"))) for p in GRAPH.publishers[topic_name]]

    def destroy_node(self):
        for p in self.publishers:
            GRAPH.publishers[p.topic].remove(p)
        for s in self.subscriptions:
            GRAPH.subscriptions[s.topic].remove(s)
        for name in self.served:
            GRAPH.services.pop(name, None)


class Executor:
    def __init__(self, num_threads=None, *, context=None):
        assert isinstance(context, Context)
        self.pool, self.nodes, self.over = ThreadPoolExecutor(num_threads), [], threading.Event()

    def add_node(self, node):
        self.nodes.append(node)

    def spin(self):
        while not self.over.is_set():
            for node in self.nodes:
                try:
                    callback, argument = node.work.get(timeout=0.002)
                except queue.Empty:
                    continue
                if argument is None:  # a service, in its reentrant group
                    self.pool.submit(callback, argument)
                else:
                    callback(argument)

    def shutdown(self, timeout_sec=None):
        self.over.set()
        self.pool.shutdown(wait=False)
        return True


class Context:
    def __init__(self):
        self.ok = False


class Group:
    pass


def init(*, args=None, context=None, domain_id=None):
    assert isinstance(context, Context) and not context.ok and (domain_id is None or 0 <= domain_id <= 232)
    context.ok = True
    GRAPH.calls.append(("init", domain_id))


def create_node(node_name, *, namespace=None, context=None):
    assert context.ok
    return Node(node_name, namespace)


def shutdown(*, context=None):
    assert context.ok
    context.ok = False


def install(modules=sys.modules) -> None:
    """Be rclpy and the message packages for this process."""
    rclpy = types.ModuleType("rclpy")
    rclpy.Context, rclpy.init, rclpy.create_node, rclpy.shutdown = Context, init, create_node, shutdown
    parts = {
        "rclpy.qos": {
            "QoSProfile": Qos,
            "ReliabilityPolicy": Reliability,
            "DurabilityPolicy": Durability,
            "HistoryPolicy": History,
        },
        "rclpy.executors": {"MultiThreadedExecutor": Executor},
        "rclpy.callback_groups": {"ReentrantCallbackGroup": Group},
    }
    modules["rclpy"] = rclpy
    for name, members in parts.items():
        modules[name] = types.ModuleType(name)
        for k, v in members.items():
            setattr(modules[name], k, v)
    modules.update(packages())
