"""rosbag2 recordings (MCAP or SQLite) and ROS 1 bags as `ForeignData`: a bag is an episode, its topics are
the keys.

Messages come at their own times. The episode has a step every 1 / fps seconds, from when every chosen topic
has spoken until the first of them falls silent. State and pictures of a step are the last messages until
then; its action is the last command before the next step, for that was decided on what was seen:

    state_k  = last message with t <= t_k          t_k = t_0 + k / fps
    action_k = last message with t <  t_k + 1 / fps

Times are those at which the recorder received the messages.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.data.foreign import ENCODED, ForeignData, ForeignEpisode, ImportChoice, choose_keys
from robo_rl.errors import MissingDependency, UserError

SUFFIXES = (".mcap", ".db3", ".bag")
SILENCE = 0.5  # s between two messages of a chosen topic, or five steps, that a warning tells


def is_bag(path: Path) -> bool:
    if path.is_dir():
        return (path / "metadata.yaml").is_file()
    return path.suffix in SUFFIXES


def _vector(x: Any) -> list[float]:
    return [x.x, x.y, x.z]


def _pose(x: Any) -> list[float]:
    return [*_vector(x.position), *_vector(x.orientation), x.orientation.w]


def _twist(x: Any) -> list[float]:
    return [*_vector(x.linear), *_vector(x.angular)]


def _wrench(x: Any) -> list[float]:
    return [*_vector(x.force), *_vector(x.torque)]


XYZ = ("x", "y", "z")
POSE = (*XYZ, "qx", "qy", "qz", "qw")
TWIST = (*XYZ, "rx", "ry", "rz")
# type -> numbers of a message, their names, units of an absolute command
NUMBERS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...], str]] = {
    "geometry_msgs/PoseStamped": (lambda m: _pose(m.pose), POSE, "m*3,1*4"),
    "geometry_msgs/Pose": (_pose, POSE, "m*3,1*4"),
    "geometry_msgs/TwistStamped": (lambda m: _twist(m.twist), TWIST, "m/s rate*3,rad/s rate*3"),
    "geometry_msgs/Twist": (_twist, TWIST, "m/s rate*3,rad/s rate*3"),
    "geometry_msgs/WrenchStamped": (lambda m: _wrench(m.wrench), TWIST, "N effort*3,N m effort*3"),
    "geometry_msgs/Wrench": (_wrench, TWIST, "N effort*3,N m effort*3"),
    "geometry_msgs/PointStamped": (lambda m: _vector(m.point), XYZ, "m*3"),
    "std_msgs/Float64": (lambda m: [m.data], (), ""),
    "std_msgs/Float32": (lambda m: [m.data], (), ""),
    "std_msgs/Bool": (lambda m: [m.data], (), "1"),
    "std_msgs/Float64MultiArray": (lambda m: m.data, (), ""),
    "std_msgs/Float32MultiArray": (lambda m: m.data, (), ""),
    "trajectory_msgs/JointTrajectory": (lambda m: m.points[-1].positions, (), ""),
}
JOINTS = {"position": "rad", "velocity": "rad/s rate", "effort": "N m effort"}
IMAGE, COMPRESSED, JOINT_STATE = "sensor_msgs/Image", "sensor_msgs/CompressedImage", "sensor_msgs/JointState"
CHANNELS = {
    "rgb8": (3, False),
    "bgr8": (3, True),
    "rgba8": (4, False),
    "bgra8": (4, True),
    "mono8": (1, False),
}


@dataclass(frozen=True, slots=True)
class Topic:
    """Of a bag: type, times of its messages [ns], one of them."""

    name: str
    kind: str
    times: np.ndarray
    first: Any


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """rosbags' reader of a bag; UserError where it cannot read on."""
    if importlib.util.find_spec("rosbags") is None:
        raise MissingDependency("bags need rosbags: pip install 'robo_rl[formats]'")
    from rosbags.highlevel import AnyReader, AnyReaderError
    from rosbags.rosbag1.reader import ReaderError as Reader1Error
    from rosbags.rosbag2 import ReaderError
    from rosbags.typesys import Stores, get_typestore

    try:
        with AnyReader([path], default_typestore=get_typestore(Stores.LATEST)) as reader:
            yield reader
    except (AnyReaderError, ReaderError, Reader1Error, OSError, KeyError, AssertionError, ValueError) as e:
        raise UserError(f"{path} cannot be read as a bag: {e or type(e).__name__}") from None


def topics_of(path: Path) -> dict[str, Topic]:
    """What a bag holds that becomes numbers or pictures."""
    times: dict[str, list[int]] = {}
    first: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    with reading(path) as reader:
        wanted = []
        for connection in reader.connections:
            kind = connection.msgtype.replace("/msg/", "/")
            if kind in NUMBERS or kind in (IMAGE, COMPRESSED, JOINT_STATE):
                wanted.append(connection)
                kinds[connection.topic] = kind
        for connection, stamp, raw in reader.messages(connections=wanted) if wanted else ():
            if connection.topic not in first:
                first[connection.topic] = reader.deserialize(raw, connection.msgtype)
            times.setdefault(connection.topic, []).append(stamp)
    return {name: Topic(name, kinds[name], np.array(t, np.int64), first[name]) for name, t in times.items()}


def columns_of(topic: Topic) -> dict[str, tuple[tuple[int, ...], tuple[str, ...], str]]:
    """key -> (shape of a row, names, units): a topic, and of joints TOPIC:velocity and TOPIC:effort too."""
    message = topic.first
    if topic.kind == COMPRESSED:
        return {topic.name: (ENCODED, (), "")}
    if topic.kind == IMAGE:
        return {topic.name: ((message.height, message.width, 3), (), "")}
    if topic.kind == JOINT_STATE:
        names = tuple(map(str, message.name))
        out = {}
        for part, unit in JOINTS.items():
            if n := len(getattr(message, part)):
                key = topic.name if part == "position" else f"{topic.name}:{part}"
                told = names if part == "position" else tuple(f"{name}_{part}" for name in names)
                out[key] = ((n,), told if len(told) == n else (), ",".join([unit] * n))
        return out
    numbers, names, units = NUMBERS[topic.kind]
    n = len(numbers(message))
    tail = topic.name.strip("/").replace("/", "_")
    return {topic.name: ((n,), tuple(f"{tail}_{x}" for x in names) if len(names) == n else (), units)}


def read_bags(paths: Sequence[Path], choice: ImportChoice, opened: ExitStack) -> ForeignData:
    """Bags of the same topics, an episode each, at `choice.fps`. Without keys or a rate they are described
    alone."""
    held = [topics_of(path) for path in paths]
    if not held[0]:
        raise UserError(f"{paths[0]} has no messages of joints, poses, numbers or pictures")
    columns, names, units = {}, {}, {}
    for topic in held[0].values():
        for key, (shape, told, unit) in columns_of(topic).items():
            columns[key], names[key], units[key] = shape, told, unit
    joints = [k for k, topic in held[0].items() if topic.kind == JOINT_STATE]
    pictures = {
        _view(name): name for name, topic in sorted(held[0].items()) if topic.kind in (IMAGE, COMPRESSED)
    }
    stand_in = ForeignEpisode(str(paths[0]), max(len(t.times) for t in held[0].values()), columns, _unread)
    state = tuple(k for k in joints if k.endswith("joint_states"))[:1]
    got = ForeignData("rosbag", [stand_in], state, (), pictures, names={k: x for k, x in names.items() if x})
    got = choose_keys(got, choice)
    if not (got.action and got.fps):
        return got
    keys = [*got.state, *got.action, *got.cameras.values()]
    episodes = [
        sampled(path, topics, {key: columns[key] for key in keys}, got, names)
        for path, topics in zip(paths, held, strict=True)
    ]
    known = [units[key] for key in got.action]
    return replace(got, episodes=episodes, units=got.units or (",".join(known) if all(known) else ""))


def _view(topic: str) -> str:
    """camera of /camera/image_raw/compressed"""
    words = [w for w in topic.strip("/").split("/") if w not in ("image_raw", "image", "compressed", "color")]
    return "_".join(words) or "camera"


def _unread(key: str) -> np.ndarray:
    raise UserError("a bag is read once its keys and its rate are chosen")


def sampled(
    path: Path, topics: Mapping[str, Topic], columns: Mapping, got: ForeignData, names: Mapping
) -> ForeignEpisode:
    """The bag as an episode of `got.fps` steps a second."""
    used = {key.partition(":")[0] for key in columns}
    if lacking := sorted(used - {*topics}):
        raise UserError(f"{path} has no messages of {lacking[0]}; it has {', '.join(sorted(topics))}")
    step = 1e9 / got.fps
    start = max(int(topics[name].times[0]) for name in used)
    end = min(int(topics[name].times[-1]) for name in used)
    steps = int((end - start) / step) + 1 if end >= start else 0
    ticks = start + np.arange(steps) * step
    for name in sorted(used):
        inside = np.concatenate([[start], topics[name].times, [end]]).clip(start, end)
        gap = float(np.diff(np.sort(inside)).max()) / 1e9
        if gap > max(SILENCE, 5 / got.fps):
            warnings.warn(
                f"{path}: {name} is silent for {gap:.1f} s; its last message stands for them", stacklevel=2
            )
    at = {
        key: np.searchsorted(topics[key.partition(":")[0]].times, ticks + step, side="left") - 1
        if key in got.action
        else np.searchsorted(topics[key.partition(":")[0]].times, ticks, side="right") - 1
        for key in columns
    }

    def read(key: str) -> np.ndarray:
        name, _, part = key.partition(":")
        wanted, rows = np.unique(at[key], return_inverse=True)
        taken, kind = [], topics[name].kind
        with reading(path) as reader:
            connections = [c for c in reader.connections if c.topic == name]
            sought = iter(wanted.tolist())
            due = next(sought, -1)
            for k, (connection, _, raw) in enumerate(reader.messages(connections=connections)):
                if k == due:
                    message = reader.deserialize(raw, connection.msgtype)
                    taken.append(_value(message, kind, part or "position", names.get(key, ())))
                    due = next(sought, -1)
        if len({np.shape(x) for x in taken if not isinstance(x, bytes)}) > 1:
            raise UserError(f"{path}: messages of {key} have different sizes")
        if kind == COMPRESSED:
            values = np.empty(len(taken), object)
            values[:] = taken
        else:
            values = np.stack(taken)
        return values[rows]

    return ForeignEpisode(str(path), steps, columns, read)


def _value(message: Any, kind: str, part: str, names: tuple[str, ...]) -> Any:
    """Numbers float64[n], or a picture."""
    if kind == COMPRESSED:
        return bytes(message.data)
    if kind == IMAGE:
        return _picture(message)
    if kind != JOINT_STATE:
        return np.asarray(NUMBERS[kind][0](message), np.float64)
    numbers = np.asarray(getattr(message, part), np.float64)
    order = [n if part == "position" else n.removesuffix(f"_{part}") for n in names]
    there = list(map(str, message.name))
    if order and there != order:  # a publisher may name its joints in another order each time
        if not {*order} <= {*there}:
            raise UserError(f"a message has joints {', '.join(there)}, the first one {', '.join(order)}")
        numbers = numbers[[there.index(name) for name in order]]
    return numbers


def _picture(message: Any) -> np.ndarray:
    """uint8[h, w, 3] of sensor_msgs/Image."""
    if message.encoding not in CHANNELS:
        raise UserError(f"pictures of encoding {message.encoding!r} are not read; {', '.join(CHANNELS)} are")
    channels, swapped = CHANNELS[message.encoding]
    rows = np.frombuffer(bytes(message.data), np.uint8)
    if message.step < message.width * channels or rows.size < message.height * message.step:
        raise UserError(f"a picture of {message.height} x {message.width} has {rows.size} bytes")
    rows = rows[: message.height * message.step].reshape(message.height, message.step)
    x = rows[:, : message.width * channels].reshape(message.height, message.width, channels)
    x = np.broadcast_to(x, (*x.shape[:2], 3)) if channels == 1 else x[..., :3]
    return x[..., ::-1] if swapped else x
