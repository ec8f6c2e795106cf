"""Our messages <-> ROS's classes, whoever made those: rosbags' dataclasses on DDS, rclpy's in a sourced
workspace."""

from collections.abc import Callable
from typing import Any

import numpy as np

from controllers import services as s
from controllers import transport as t
from controllers.action_messages import ACTION_MESSAGES
from robo_rl.geometry import from_xyzw, to_xyzw


def seconds(stamp: Any) -> float:
    """Of a ROS time."""
    return stamp.sec + stamp.nanosec * 1e-9


class Codec:
    """of: ROS name such as geometry_msgs/msg/Pose -> class with keyword arguments; array: what a sequence of
    numbers of a NumPy type becomes (rosbags wants arrays, rclpy lists or array.array), `many` > 0: an array
    of so many; messages: fields of messages in services."""

    def __init__(
        self, of: Callable[[str], Any], array: Callable[..., Any], messages: dict[str, str] = s.MESSAGES
    ):
        self.of, self.array, self.messages = of, array, messages

    def stamp(self, seconds: float) -> Any:
        whole = int(seconds // 1)
        return self.of("builtin_interfaces/msg/Time")(
            sec=whole, nanosec=min(round((seconds - whole) * 1e9), 999_999_999)
        )

    def header(self, m: Any) -> Any:
        return self.of("std_msgs/msg/Header")(stamp=self.stamp(m.stamp), frame_id=getattr(m, "frame", ""))

    def vector(self, x: tuple[float, ...], kind: str = "Vector3") -> Any:
        return self.of(f"geometry_msgs/msg/{kind}")(x=float(x[0]), y=float(x[1]), z=float(x[2]))

    def point(self, after_s: float, position: tuple[float, ...]) -> Any:
        after = self.stamp(after_s)
        return self.of("trajectory_msgs/msg/JointTrajectoryPoint")(
            positions=self.array(position, "float64"),
            velocities=self.array((), "float64"),
            accelerations=self.array((), "float64"),
            effort=self.array((), "float64"),
            time_from_start=self.of("builtin_interfaces/msg/Duration")(sec=after.sec, nanosec=after.nanosec),
        )

    def transform(
        self, stamp: float, parent: str, child: str, pos: tuple[float, ...], quat: tuple[float, ...]
    ) -> Any:
        g, (x, y, z, w) = "geometry_msgs/msg/", to_xyzw(np.asarray(quat, float)).tolist()
        return self.of(g + "TransformStamped")(
            header=self.of("std_msgs/msg/Header")(stamp=self.stamp(stamp), frame_id=parent),
            child_frame_id=child,
            transform=self.of(g + "Transform")(
                translation=self.vector(pos), rotation=self.of(g + "Quaternion")(x=x, y=y, z=z, w=w)
            ),
        )

    def status(self, level: int, name: str, message: str, values: tuple[tuple[str, str], ...]) -> Any:
        pairs = [self.of("diagnostic_msgs/msg/KeyValue")(key=k, value=v) for k, v in values]
        return self.of("diagnostic_msgs/msg/DiagnosticStatus")(
            level=self.array([level], "byte")[0], name=name, message=message, hardware_id="", values=pairs
        )

    def to_ros(self, m: Any) -> Any:
        """Our message as ROS's; quaternions become x first."""
        g, make = "geometry_msgs/msg/", self.of(t.ROS_TYPES[type(m)])
        if isinstance(m, t.PoseStamped):
            x, y, z, w = to_xyzw(np.asarray(m.quat, float)).tolist()
            pose = self.of(g + "Pose")(
                position=self.vector(m.pos, "Point"),
                orientation=self.of(g + "Quaternion")(x=x, y=y, z=z, w=w),
            )
            return make(header=self.header(m), pose=pose)
        if isinstance(m, t.TwistStamped):
            twist = self.of(g + "Twist")(linear=self.vector(m.twist[:3]), angular=self.vector(m.twist[3:]))
            return make(header=self.header(m), twist=twist)
        if isinstance(m, t.WrenchStamped):
            wrench = self.of(g + "Wrench")(force=self.vector(m.wrench[:3]), torque=self.vector(m.wrench[3:]))
            return make(header=self.header(m), wrench=wrench)
        if isinstance(m, t.JointState):
            return make(
                header=self.header(m),
                name=list(m.names),
                **{k: self.array(getattr(m, k), "float64") for k in ("position", "velocity", "effort")},
            )
        if isinstance(m, t.JointTrajectory):
            return make(
                header=self.header(m), joint_names=list(m.names), points=[self.point(*p) for p in m.points]
            )
        if isinstance(m, t.Transforms):
            return make(transforms=[self.transform(m.stamp, *one) for one in m.transforms])
        if isinstance(m, t.Diagnostics):
            return make(header=self.header(m), status=[self.status(*one) for one in m.status])
        if isinstance(m, t.CompressedImage):
            return make(
                header=self.header(m),
                format=m.format,
                data=self.array(np.frombuffer(m.data, np.uint8), "uint8"),
            )
        if isinstance(m, t.Clock):
            return make(clock=self.stamp(m.stamp))
        if isinstance(m, t.Numbers):
            layout = self.of("std_msgs/msg/MultiArrayLayout")(dim=[], data_offset=0)
            return make(layout=layout, data=self.array(m.data, "float64"))
        if isinstance(m, ACTION_MESSAGES):
            name = t.ROS_TYPES[type(m)]
            return self.build(name, self.messages[name], s.filled(self.messages[name], m.fields()))
        return make(data=m.data)

    def from_ros(self, kind: type, r: Any) -> Any:
        """ROS's message as ours."""
        if kind in (t.Flag, t.Text):
            return kind(r.data)
        if kind in ACTION_MESSAGES:
            return kind.read(self.plain(self.messages[t.ROS_TYPES[kind]], r))
        if kind is t.Numbers:
            return t.Numbers(tuple(r.data.tolist()))
        if kind is t.Clock:
            return t.Clock(seconds(r.clock))
        if kind is t.Transforms:
            return t.Transforms(
                seconds(r.transforms[0].header.stamp) if r.transforms else 0.0,
                tuple(
                    (
                        x.header.frame_id,
                        x.child_frame_id,
                        (p.x, p.y, p.z),
                        tuple(from_xyzw(np.array([q.x, q.y, q.z, q.w])).tolist()),
                    )
                    for x in r.transforms
                    for p, q in [(x.transform.translation, x.transform.rotation)]
                ),
            )
        stamp = seconds(r.header.stamp)
        if kind is t.JointState:
            return t.JointState(
                stamp,
                tuple(r.name),
                *(tuple(getattr(r, k).tolist()) for k in ("position", "velocity", "effort")),
            )
        if kind is t.JointTrajectory:
            return t.JointTrajectory(
                stamp,
                tuple(r.joint_names),
                tuple((seconds(p.time_from_start), tuple(p.positions.tolist())) for p in r.points),
            )
        if kind is t.Diagnostics:
            return t.Diagnostics(
                stamp,
                tuple(
                    (
                        x.level[0] if isinstance(x.level, bytes) else int(x.level),
                        x.name,
                        x.message,
                        tuple((v.key, v.value) for v in x.values),
                    )
                    for x in r.status
                ),
            )
        frame = r.header.frame_id
        if kind is t.CompressedImage:
            return t.CompressedImage(stamp, frame, r.format, bytes(r.data))
        if kind is t.PoseStamped:
            p, q = r.pose.position, r.pose.orientation
            return t.PoseStamped(
                stamp, frame, (p.x, p.y, p.z), tuple(from_xyzw(np.array([q.x, q.y, q.z, q.w])).tolist())
            )
        a, b = (
            (r.twist.linear, r.twist.angular) if kind is t.TwistStamped else (r.wrench.force, r.wrench.torque)
        )
        return kind(stamp, frame, (a.x, a.y, a.z, b.x, b.y, b.z))

    # ---- services ------------------------------------------------------------------------------------------

    def build(self, name: str, text: str, values: dict[str, Any]) -> Any:
        """An instance of ROS's class `name` with the fields of `text` from filled values."""
        made: dict[str, Any] = {}
        for field, kind, many in s.fields(text):
            v = values[field]
            if "/" in kind:
                v = (
                    [self.build(kind, self.messages[kind], x) for x in v]
                    if many
                    else self.build(kind, self.messages[kind], v)
                )
            elif many and kind != "string":
                v = self.array(v, kind, many)
            made[field] = v
        return self.of(name)(**made)

    def plain(self, text: str, message: Any) -> dict[str, Any]:
        """The fields of `text` of a ROS message as plain values."""
        out = {}
        for field, kind, many in s.fields(text):
            v = getattr(message, field)
            if "/" in kind:
                v = (
                    [self.plain(self.messages[kind], x) for x in v]
                    if many
                    else self.plain(self.messages[kind], v)
                )
            elif many:
                v = v.tolist() if hasattr(v, "tolist") else list(v)
            out[field] = v
        return out
