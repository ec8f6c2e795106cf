"""The ROS 2 wire through rclpy, inside a sourced workspace: any vendor of DDS, services included.

rclpy spins in threads of its own; messages wait there until `take`, calls of services until `serve`, so that
everything of ours runs in the caller's thread. rclpy does not say on every distribution who sent a message:
the source is the set of all publishers of the topic at that moment, so a second commander changes it and is
refused.

Written against rclpy of Jazzy and tested on a stand-in that records its calls; no ROS ran while it was
written.
"""

import array
import importlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from controllers import transport as t
from controllers.codec import Codec
from controllers.services import LONGEST_REPLY, REPLY, REQUEST, PendingReply, filled, text_of
from controllers.transport import Handler, Mailbox, Received
from robo_rl.errors import MissingDependency, UserError, in_range

try:
    import rclpy
    from rclpy.callback_groups import ReentrantCallbackGroup
    from rclpy.executors import MultiThreadedExecutor
    from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
except ImportError as e:
    raise MissingDependency(
        f"the ROS transport needs {e.name}: source a ROS 2 workspace (source /opt/ros/jazzy/setup.bash) "
        "and use its Python, or leave ROBO_RL_TRANSPORT unset for DDS without ROS"
    ) from None

CODES = {
    "float64": "d",
    "float32": "f",
    "uint8": "B",
    "int64": "q",
    "uint64": "Q",
    "int32": "i",
    "uint32": "I",
}
PATIENCE = 5.0  # s that a caller of our service waits for `serve`
THREADS = 8
WAITING = 4  # of them may wait for replies that come later


def ros_class(name: str) -> Any:
    """pkg/msg/Name, pkg/srv/Name, pkg/action/Name_Goal, pkg/action/Name_SendGoal, or a part of a service such
    as pkg/srv/Name_Request.
    UserError: it is not in the workspace."""
    package, kind, short = name.split("/")
    try:
        module = importlib.import_module(f"{package}.{kind}")
        if kind == "msg":
            return getattr(module, short)
        base, *parts = short.split("_")
        found = getattr(module, base)
        for part in parts:  # rclpy keeps what carries an action in its Impl
            found = (
                getattr(found.Impl, IMPL[part]) if kind == "action" and part in IMPL else getattr(found, part)
            )
        return found
    except (ImportError, AttributeError):
        raise UserError(
            f"the ROS workspace has no {name}: install ros-$ROS_DISTRO-{package.replace('_', '-')}"
        ) from None


IMPL = {"SendGoal": "SendGoalService", "GetResult": "GetResultService", "FeedbackMessage": "FeedbackMessage"}


def numbers(values: Any, kind: str, many: int = -1) -> Any:
    """A sequence as rclpy takes it: arrays of numbers, single bytes in a list; many > 0: an array of so many,
    which it takes as a list."""
    if many > 0:
        return list(values)
    if kind == "byte":
        return [bytes([x]) for x in values]
    return (
        array.array(
            CODES[kind], values.tobytes() if kind == "uint8" and hasattr(values, "tobytes") else values
        )
        if kind in CODES
        else list(values)
    )


class RosTransport:
    """One rclpy node: `transport.Transport`."""

    def __init__(self, name: str, *, domain: int | None = None, namespace: str = "/"):
        if domain is not None:
            in_range("ROS domain", domain, 0, 232)
        self.context = rclpy.Context()
        rclpy.init(args=[], context=self.context, domain_id=domain)
        self.node = rclpy.create_node(name, namespace=namespace, context=self.context)
        self.codec = Codec(ros_class, numbers)
        self.group = ReentrantCallbackGroup()
        self.kinds: dict[str, type] = {}
        self.dropped: Counter[str] = Counter()
        self.identity = self.caller = ""  # rclpy tells neither
        self.asked: deque[tuple[str, PendingRequest]] = deque()
        self.served: set[str] = set()
        self.clients: dict[str, Any] = {}
        self.executor = MultiThreadedExecutor(num_threads=THREADS, context=self.context)
        self.executor.add_node(self.node)
        self.closed, self.waiting = threading.Event(), threading.BoundedSemaphore(WAITING)
        self.thread = threading.Thread(target=self._spin, daemon=True)
        self.thread.start()

    def publisher(self, topic: str, kind: type, quality: str = "state") -> "RosPublisher":
        made = self._join(topic, kind, quality)
        return RosPublisher(
            self.node.create_publisher(made, f"/{topic}", self._qos(quality)), kind, self.codec, topic
        )

    def subscription(self, topic: str, kind: type, quality: str = "state", depth: int = 1) -> Mailbox:
        in_range("depth", depth, 1, 10**6)
        made, inbox = self._join(topic, kind, quality), deque(maxlen=depth)
        named = quality != "state"

        def came(message: Any) -> None:
            inbox.append((message, time.monotonic(), self._source(topic) if named else topic))

        self.node.create_subscription(
            made, f"/{topic}", came, self._qos(quality, depth, reads=True), callback_group=self.group
        )

        def pull() -> list[Received]:
            out = []
            while inbox:
                message, at, source = inbox.popleft()
                try:
                    out.append(Received(self.codec.from_ros(kind, message), at, source))
                except Exception:  # somebody's message, whatever is wrong with it
                    self.dropped[topic] += 1
            return out

        return Mailbox(depth, pull, lambda: set(self._source(topic).split("+")))

    def publishers(self, topic: str) -> int:
        return self.node.count_publishers(f"/{topic}")

    def complaints(self) -> list[str]:
        """Types do not meet; hashes are rmw's to compare."""
        out = []
        for topic, kind in self.kinds.items():
            ours = t.ROS_TYPES[kind]
            out += [
                f"topic {topic} is {info.topic_type} elsewhere, here {ours}: they do not meet"
                for info in self.node.get_publishers_info_by_topic(f"/{topic}")
                if info.topic_type != ours
            ]
        return sorted(set(out)) + t.drops(self.dropped)

    def service(self, name: str, kind: str, handler: Handler) -> None:
        if name in self.served:
            raise UserError(f"service {name} is offered already")
        text_of(kind, REQUEST)
        self.served.add(name)

        def came(request: Any, response: Any) -> Any:
            asked = PendingRequest(request, lambda r: handler(self.codec.plain(text_of(kind, REQUEST), r)))
            self.asked.append((name, asked))
            if not asked.done.wait(PATIENCE) or (reply := self._later(asked.reply)) is None:
                return response  # ROS has no way to say no: zeros
            try:
                return self.codec.build(
                    f"{kind}_{REPLY}", text_of(kind, REPLY), filled(text_of(kind, REPLY), reply)
                )
            except Exception:  # what the request led to cannot be said
                self.dropped[name] += 1
                return response

        self.node.create_service(ros_class(kind), f"/{name}", came, callback_group=self.group)

    def _later(self, reply: "dict | PendingReply | None") -> dict | None:
        """The reply, waited for in a thread of rclpy's where it comes later; None: it does not, or too many
        wait."""
        if not isinstance(reply, PendingReply):
            return reply
        if reply.reply is None and self.waiting.acquire(blocking=False):
            end = self.now() + LONGEST_REPLY
            while reply.reply is None and self.now() < end and not self.closed.wait(0.005):
                pass
            self.waiting.release()
        return reply.reply

    def serve(self) -> None:
        while self.asked:
            name, asked = self.asked.popleft()
            try:
                asked.reply = asked.handler(asked.request)
            except Exception:  # somebody's request, whatever is wrong with it
                self.dropped[name] += 1
            finally:
                asked.done.set()

    def call(self, name: str, kind: str, request: dict, timeout: float = 5.0) -> dict:
        given, end = filled(text_of(kind, REQUEST), request), self.now() + timeout
        if name not in self.clients:
            self.clients[name] = self.node.create_client(
                ros_class(kind), f"/{name}", callback_group=self.group
            )
        client = self.clients[name]
        while not client.wait_for_service(timeout_sec=min(0.05, timeout)):
            self.serve()
            if self.now() > end:
                raise UserError(f"nobody answers the service {name} within {timeout:g} s")
        future = client.call_async(self.codec.build(f"{kind}_{REQUEST}", text_of(kind, REQUEST), given))
        while not future.done():
            self.serve()
            if self.now() > end:
                future.cancel()
                raise UserError(f"the service {name} did not answer within {timeout:g} s")
            time.sleep(0.0005)
        return filled(text_of(kind, REPLY), self.codec.plain(text_of(kind, REPLY), future.result()))

    def now(self) -> float:
        return time.monotonic()

    def stamp(self) -> float:
        return self.node.get_clock().now().nanoseconds * 1e-9

    def close(self) -> None:
        """Leave the graph."""
        self.closed.set()
        self.executor.shutdown(timeout_sec=1.0)
        self.thread.join(2.0)
        self.node.destroy_node()
        rclpy.shutdown(context=self.context)

    # ---- inside --------------------------------------------------------------------------------------------

    def _spin(self) -> None:
        """Until the node is closed: rclpy decodes in here, and what it cannot decode ends its `spin`."""
        while not self.closed.is_set():
            try:
                self.executor.spin()
            except Exception:
                if not self.closed.is_set():
                    self.dropped["rclpy"] += 1
            self.closed.wait(0.001)

    def _source(self, topic: str) -> str:
        """All participants that publish on the topic, as one name."""
        found = self.node.get_publishers_info_by_topic(f"/{topic}")
        return "+".join(sorted({bytes(i.endpoint_gid).hex()[:24] for i in found})) or "nobody"

    def _join(self, topic: str, kind: type, quality: str) -> Any:
        t.join(self.kinds, topic, kind, quality)
        return ros_class(t.ROS_TYPES[kind])

    def _qos(self, quality: str, depth: int = 1, reads: bool = False) -> Any:
        """As on DDS: a state is offered reliable and asked for best effort."""
        best_effort = reads and quality == "state"
        return QoSProfile(
            depth=depth,
            history=HistoryPolicy.KEEP_LAST,
            reliability=ReliabilityPolicy.BEST_EFFORT if best_effort else ReliabilityPolicy.RELIABLE,
            durability=DurabilityPolicy.TRANSIENT_LOCAL
            if quality == "latched"
            else DurabilityPolicy.VOLATILE,
        )


class PendingRequest:
    """A call of our service that waits for `serve`."""

    def __init__(self, request: Any, handler: "Callable[[Any], dict | PendingReply]"):
        self.request, self.handler, self.done = request, handler, threading.Event()
        self.reply: dict | PendingReply | None = None


class RosPublisher:
    def __init__(self, publisher: Any, kind: type, codec: Codec, topic: str):
        self.publisher, self.kind, self.codec, self.topic = publisher, kind, codec, topic

    def publish(self, message: Any) -> None:
        if type(message) is not self.kind:
            raise UserError(f"topic {self.topic} carries {self.kind.__name__}, not {type(message).__name__}")
        self.publisher.publish(self.codec.to_ros(message))
