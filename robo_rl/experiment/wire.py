"""Make transports: DDS or rclpy, with a prefix of all topics, and with delayed or lost commands."""

import os
import random
import sys
from collections.abc import Callable
from typing import Any

from controllers.transport import Handler, Mailbox, NetworkConditions, Publisher, Received, Transport
from robo_rl.errors import MissingDependency, UserError, choose
from robo_rl.experiment.ros_options import RosOptions


def connect(
    name: str,
    domain: int = -1,
    interface: str = "",
    namespace: str = "",
    warn: Callable[[str], None] = lambda line: print(f"robo_rl: {line}", file=sys.stderr, flush=True),
    security: str = "",
) -> Transport:
    """Open a node with the transport that ROBO_RL_TRANSPORT names: dds, or rclpy. In a sourced workspace
    rclpy is tried first, and DDS taken where it does not load; warn is told so. security: folder of the
    node's keys; "": those of ROS's own variables, or none.
    MissingDependency: its message says how to install what is missing."""
    if namespace and not namespace.strip("/").replace("/", "_").isidentifier():
        raise UserError(f"a namespace is made of letters, digits and _, like left_arm, got {namespace!r}")
    ros = ros_transport(warn)
    if ros is not None:
        if interface:
            raise UserError(
                "--interface is for DDS without ROS: in a ROS workspace name the interface in CYCLONEDDS_URI"
            )
        if security:
            raise UserError(
                "--security is for DDS without ROS: in a ROS workspace set ROS_SECURITY_ENABLE=true, "
                "ROS_SECURITY_STRATEGY=Enforce, ROS_SECURITY_KEYSTORE and ROS_SECURITY_ENCLAVE_OVERRIDE, "
                "which rclpy reads"
            )
        node: Transport = ros(
            name, domain=None if domain < 0 else domain, namespace=f"/{namespace.strip('/')}"
        )
    else:
        from controllers.dds import DdsTransport
        from controllers.loop import prompt
        from controllers.security import keys_of

        with prompt():
            node = DdsTransport(
                name,
                domain=None if domain < 0 else domain,
                interface=interface,
                namespace=f"/{namespace.strip('/')}",
                security=keys_of(security),
            )
    return NamespacedTransport(node, namespace.strip("/")) if namespace else node


def place_of(options: RosOptions) -> str:
    """The network of a node with these options, in words."""
    domain = options.domain if options.domain >= 0 else os.environ.get("ROS_DOMAIN_ID", "0")
    words = [f"domain {domain}"]
    if ros_transport(lambda line: None) is None:
        words.append(f"interface {options.interface or 'lo'}")
    if options.namespace:
        words.append(f"namespace {options.namespace}")
    return ", ".join(words)


def ros_transport(warn: Callable[[str], None]) -> Any:
    """The class of the rclpy transport; None: DDS without ROS is to be used."""
    wanted = choose("ROBO_RL_TRANSPORT", os.environ.get("ROBO_RL_TRANSPORT", ""), ("", "dds", "rclpy"))
    distribution = os.environ.get("ROS_DISTRO")
    if wanted == "dds" or not (wanted or distribution):
        return None
    try:
        from controllers.ros import RosTransport
    except Exception as e:
        # a ROS of another Python: its extension modules, its syntax, its libraries, whatever fails first
        why = str(e.__cause__ or e.__context__ or e) or type(e).__name__
        if wanted:
            raise MissingDependency(
                f"ROBO_RL_TRANSPORT=rclpy, but rclpy does not load in this Python ({why}): source a ROS 2 "
                "workspace and use its Python, or leave ROBO_RL_TRANSPORT unset for DDS without ROS"
            ) from e
        warn(
            f"ROS {distribution} is sourced, but its rclpy does not load in Python "
            f"{sys.version_info[0]}.{sys.version_info[1]} ({why.splitlines()[0][:120]}): DDS without ROS is "
            "used"
        )
        return None
    return RosTransport


class NamespacedTransport:
    """A transport whose topics begin with a namespace."""

    def __init__(self, wire: Transport, prefix: str):
        self.wire, self.prefix = wire, prefix

    @property
    def identity(self) -> str:
        return self.wire.identity

    @property
    def caller(self) -> str:
        return self.wire.caller

    def publisher(self, topic: str, kind: type, quality: str = "state"):
        return self.wire.publisher(f"{self.prefix}/{topic}", kind, quality)

    def subscription(self, topic: str, kind: type, quality: str = "state", depth: int = 1):
        return self.wire.subscription(f"{self.prefix}/{topic}", kind, quality, depth)

    def publishers(self, topic: str) -> int:
        return self.wire.publishers(f"{self.prefix}/{topic}")

    def complaints(self) -> list[str]:
        return self.wire.complaints()

    def service(self, name: str, kind: str, handler: Handler) -> None:
        self.wire.service(f"{self.prefix}/{name}", kind, handler)

    def serve(self) -> None:
        self.wire.serve()

    def call(self, name: str, kind: str, request: dict, timeout: float = 5.0) -> dict:
        return self.wire.call(f"{self.prefix}/{name}", kind, request, timeout)

    def now(self) -> float:
        return self.wire.now()

    def stamp(self) -> float:
        return self.wire.stamp()

    def close(self) -> None:
        self.wire.close()


def degrade(wire: Transport, conditions: NetworkConditions) -> Transport:
    """The transport, with delay and loss of the messages that it receives on command topics; itself without
    either."""
    return DegradedTransport(wire, conditions) if conditions.delay or conditions.drop else wire


class DegradedTransport(NamespacedTransport):
    """A transport whose commands come late or are lost."""

    def __init__(self, wire: Transport, conditions: NetworkConditions):
        self.wire, self.conditions = wire, conditions
        self.random = random.Random(conditions.seed)

    def publisher(self, topic: str, kind: type, quality: str = "state") -> Publisher:
        return self.wire.publisher(topic, kind, quality)

    def publishers(self, topic: str) -> int:
        return self.wire.publishers(topic)

    def complaints(self) -> list[str]:
        return self.wire.complaints()

    def service(self, name: str, kind: str, handler: Handler) -> None:
        self.wire.service(name, kind, handler)

    def serve(self) -> None:
        self.wire.serve()

    def call(self, name: str, kind: str, request: dict, timeout: float = 5.0) -> dict:
        return self.wire.call(name, kind, request, timeout)

    def subscription(self, topic: str, kind: type, quality: str = "state", depth: int = 1):
        box = self.wire.subscription(topic, kind, quality, depth)
        return Mailbox(depth, DelayedMessages(box, self).pull, box.sources) if quality == "command" else box


class DelayedMessages:
    """Delays and drops the messages of a mailbox."""

    def __init__(self, box: Mailbox, wire: DegradedTransport):
        self.box, self.wire = box, wire
        self.coming: list[Received] = []

    def pull(self) -> list[Received]:
        w, now = self.wire.conditions, self.wire.now()
        self.coming += [
            Received(g.message, g.at + w.delay, g.source)
            for g in self.box.take()
            if self.wire.random.random() >= w.drop
        ]
        here, self.coming = [g for g in self.coming if g.at <= now], [g for g in self.coming if g.at > now]
        return here
