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
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from robo_rl.data.foreign import ALL, ENCODED, ForeignData, ForeignEpisode, ImportChoice, choose_keys
from robo_rl.errors import MissingDependency, UserError, plural

SUFFIXES = (".mcap", ".db3", ".bag")
SILENCE = 0.5  # s between two messages of a chosen topic, or five steps, that a warning tells
JUMP = 600  # s between two messages of a chosen topic beyond which no one recording has them
NEXT = " (next)"  # behind the key of an action that is of the state too
RECENT = 64  # messages before a chosen one, among which joints that it has not are sought


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
SPEED = ("vx", "vy", "vz", "wx", "wy", "wz")
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
    "std_msgs/Int32": (lambda m: [m.data], (), ""),
    "geometry_msgs/Vector3Stamped": (lambda m: _vector(m.vector), XYZ, ""),
    "nav_msgs/Odometry": (lambda m: [*_pose(m.pose.pose), *_twist(m.twist.twist)], (*POSE, *SPEED), ""),
    "sensor_msgs/Joy": (lambda m: [*m.axes, *m.buttons], (), ""),
}
JOINTS = {"position": "rad", "velocity": "rad/s rate", "effort": "N m effort"}
IMAGE, COMPRESSED = "sensor_msgs/Image", "sensor_msgs/CompressedImage"
JOINT_STATE, TRAJECTORY = "sensor_msgs/JointState", "trajectory_msgs/JointTrajectory"
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
    except UserError:
        raise
    except (AnyReaderError, ReaderError, Reader1Error, OSError, LookupError, AssertionError, ValueError) as e:
        whole = "; mcap recover makes a whole one of a recording that was cut" if "magic" in str(e) else ""
        raise UserError(f"{path} cannot be read as a bag: {e or type(e).__name__}{whole}") from None


def topics_of(path: Path) -> dict[str, Topic]:
    """What a bag holds that becomes numbers or pictures."""
    times: dict[str, list[int]] = {}
    first: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    with reading(path) as reader:
        wanted = []
        for connection in reader.connections:
            kind = connection.msgtype.replace("/msg/", "/")
            if kind in NUMBERS or kind in (IMAGE, COMPRESSED, JOINT_STATE, TRAJECTORY):
                wanted.append(connection)
                kinds[connection.topic] = kind
        for connection, stamp, raw in reader.messages(connections=wanted) if wanted else ():
            if connection.topic not in first:
                message = reader.deserialize(raw, connection.msgtype)
                if kinds[connection.topic] != TRAJECTORY or message.points:  # of no points: stop
                    first[connection.topic] = message
            times.setdefault(connection.topic, []).append(stamp)
    return {
        name: Topic(name, kinds[name], np.array(times[name], np.int64), message)
        for name, message in first.items()
    }


def columns_of(topic: Topic) -> dict[str, tuple[tuple[int, ...], tuple[str, ...], str]]:
    """key -> (shape of a row, names, units): a topic, and of joints TOPIC:velocity and TOPIC:effort too."""
    message = topic.first
    if topic.kind == COMPRESSED:
        return {topic.name: (ENCODED, (), "")}
    if topic.kind == IMAGE:
        return {topic.name: ((message.height, message.width, 3), (), "")}
    if topic.kind == TRAJECTORY:
        n = len(message.points[-1].positions)
        names = tuple(f"{name}_command" for name in map(str, message.joint_names))
        return {topic.name: ((n,), names if len(names) == n else (), "")}
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
    parts = names if len(names) == n else map(str, range(n))
    told = tuple(f"{tail}_{x}" for x in parts) if n > 1 else (tail,)
    return {topic.name: ((n,), told, units)}


def read_bags(paths: Sequence[Path], choice: ImportChoice) -> ForeignData:
    """Bags of the same topics, an episode each, at `choice.fps`. Without keys or a rate they are described
    alone."""
    held = [topics_of(path) for path in paths]
    if bare := [path for path, topics in zip(paths, held, strict=True) if not topics]:
        raise UserError(f"{bare[0]} has no messages of joints, poses, numbers or pictures")
    columns, names, units, notes = {}, {}, {}, {}
    for topic in held[0].values():
        for key, (shape, told, unit) in columns_of(topic).items():
            columns[key], names[key], units[key], notes[key] = shape, told, unit, _note(topic)
    joints = [k for k, topic in held[0].items() if topic.kind == JOINT_STATE]
    pictures = _views([name for name, topic in sorted(held[0].items()) if _is_seen(topic)])
    stand_ins = [
        ForeignEpisode(str(path), max(len(t.times) for t in topics.values()), columns, _unread)
        for path, topics in zip(paths, held, strict=True)
    ]
    state = tuple(k for k in joints if k.endswith("joint_states"))[:1]
    got = ForeignData("rosbag", stand_ins, state, (), pictures, names=names, counted="message", notes=notes)
    got = choose_keys(got, choice)
    if not (got.action and got.fps):
        return got
    for key in {*got.action} & {*got.state}:
        for table in (columns, names, units):
            table[key + NEXT] = table[key]
    got = replace(got, action=tuple(key + NEXT if key in got.state else key for key in got.action))
    keys = [*got.state, *got.action, *got.cameras.values()]
    episodes = [
        sampled(path, topics, {key: columns[key] for key in keys}, got, names)
        for path, topics in zip(paths, held, strict=True)
    ]
    known = [units[key] for key in got.action]
    stated = got.units or (",".join(known) if all(known) else "")
    each = [
        unit
        for key in got.action
        for unit in (units[key].split(",") if units[key] else ["1"] * columns[key][0])
    ]
    runs = [(unit, len(list(same))) for unit, same in itertools.groupby(each)]
    guess = ",".join(f"{unit}*{n}" if n > 1 else unit for unit, n in runs) if any(known) else ""
    return replace(got, episodes=episodes, units=stated, guess=guess, counted="step")


def _note(topic: Topic) -> str:
    """Messages a second; names of the first message's joints; how pictures are stored."""
    n, seconds = len(topic.times), float(topic.times[-1] - topic.times[0]) / 1e9
    rate = f"{(n - 1) / seconds:.3g} a second" if seconds > 0 else plural(n, "message")
    if topic.kind == JOINT_STATE:
        named = list(map(str, topic.first.name))
        return ", ".join([rate, *named[:7], *["…"] * (len(named) > 7)])
    return f"{rate}, {topic.first.encoding}" if topic.kind == IMAGE else rate


def _is_seen(topic: Topic) -> bool:
    """Whether it becomes a camera by itself: pictures, but not of depth."""
    if topic.kind == IMAGE:
        return topic.first.encoding in CHANNELS
    return topic.kind == COMPRESSED and "depth" not in topic.first.format.lower()


def _views(topics: Sequence[str]) -> dict[str, str]:
    """view -> topic. Of a camera's raw and compressed pictures the compressed ones; topics that only share
    their short name keep a long one."""
    out: dict[str, str] = {}
    for topic in topics:
        view = _view(topic)
        if view in out and topic != f"{out[view]}/compressed":
            view = topic.strip("/").replace("/", "_")
        out[view] = topic
    return out


def _view(topic: str) -> str:
    """camera of /camera/image_raw/compressed"""
    words = [w for w in topic.strip("/").split("/") if w not in ("image_raw", "image", "compressed", "color")]
    return "_".join(words) or "camera"


def _unread(key: str) -> np.ndarray:
    raise UserError("a bag is read once its keys and its rate are chosen")


def _topic(key: str) -> str:
    return key.removesuffix(NEXT).partition(":")[0]


def sampled(
    path: Path, topics: Mapping[str, Topic], columns: Mapping, got: ForeignData, names: Mapping
) -> ForeignEpisode:
    """The bag as an episode of `got.fps` steps a second."""
    used = {_topic(key) for key in columns}
    if lacking := sorted(used - {*topics}):
        raise UserError(f"{path} has no messages of {lacking[0]}; it has {', '.join(sorted(topics))}")
    step = 1e9 / got.fps
    start = max(int(topics[name].times[0]) for name in used)
    end = min(int(topics[name].times[-1]) for name in used)
    if end < start:
        late = max(used, key=lambda name: int(topics[name].times[0]))
        raise UserError(f"{path}: {late} begins when another chosen topic has ended already")
    _tell_silence(path, [topics[name] for name in sorted(used)], start, end, got.fps)
    ticks = start + np.arange(int((end - start) / step) + 1) * step
    at = {}
    for key in columns:
        times = topics[_topic(key)].times
        last = np.searchsorted(times, ticks + step, side="left")
        at[key] = (last if key in got.action else np.searchsorted(times, ticks, side="right")) - 1

    def part(key: str, rows: slice) -> np.ndarray:
        return read_messages(path, topics[_topic(key)], key, at[key][rows], names.get(key, ()))

    return ForeignEpisode(str(path), len(ticks), columns, lambda key: part(key, ALL), part=part, scans=True)


def _tell_silence(path: Path, topics: Sequence[Topic], start: int, end: int, fps: float) -> None:
    """A warning of topics that are silent for long; UserError: so long that the clock must have jumped."""
    for topic in topics:
        inside = np.concatenate([[start], topic.times, [end]]).clip(start, end)
        gap = float(np.diff(np.sort(inside)).max()) / 1e9
        if gap > JUMP:
            raise UserError(
                f"{path}: {topic.name} is silent for {gap:,.0f} s: the clock jumped, or these are several "
                "recordings; cut the bag there (ros2 bag convert)"
            )
        if gap > max(SILENCE, 5 / fps):
            warnings.warn(
                f"{path}: {topic.name} is silent for {gap:.1f} s; its last message stands for them",
                stacklevel=3,
            )


def read_messages(
    path: Path, topic: Topic, key: str, chosen: np.ndarray, names: tuple[str, ...]
) -> np.ndarray:
    """[n, ...]: the messages of these rising numbers int[n], the same one several times where it stands for
    several steps; object[n] of compressed pictures."""
    part = key.removesuffix(NEXT).partition(":")[2] or "position"
    wanted, first, times = np.unique(chosen, return_index=True, return_counts=True)
    due = dict(zip(wanted.tolist(), zip(first.tolist(), times.tolist(), strict=True), strict=True))
    out = np.empty(len(chosen), object) if topic.kind == COMPRESSED else None
    recent: deque[bytes] = deque(maxlen=RECENT)
    with reading(path) as reader:
        connections = [c for c in reader.connections if c.topic == topic.name]
        for k, (connection, _, raw) in enumerate(reader.messages(connections=connections)):
            recent.append(raw)
            if k not in due:
                continue
            messages = (reader.deserialize(x, connection.msgtype) for x in reversed(recent))
            values = (_value(message, topic.kind, part, names) for message in messages)
            value = next((x for x in values if x is not None), None)
            if value is None:
                raise UserError(f"{path}: messages of {key} are without the joints {', '.join(names)}")
            i, n = due.pop(k)
            if topic.kind != COMPRESSED:
                if out is None:
                    out = np.empty((len(chosen), *value.shape), value.dtype)
                if value.shape != out.shape[1:]:
                    raise UserError(f"{path}: messages of {key} have different sizes")
            assert out is not None  # since the lines above
            out[i : i + n] = value
            if not due:
                break
    if out is None or due:
        raise UserError(f"{path}: messages of {key} cannot be read to their end")
    return out


def _value(message: Any, kind: str, part: str, names: tuple[str, ...]) -> Any:
    """Numbers float64[n], or a picture; None of a message that has not all the joints."""
    if kind == COMPRESSED:
        return bytes(message.data)
    if kind == IMAGE:
        return _picture(message)
    if kind == TRAJECTORY:
        if not message.points:
            return None
        there, numbers, part = message.joint_names, message.points[-1].positions, "command"
    elif kind == JOINT_STATE:
        there, numbers = message.name, getattr(message, part)
    else:
        return np.asarray(NUMBERS[kind][0](message), np.float64)
    numbers = np.asarray(numbers, np.float64)
    order = [n if part == "position" else n.removesuffix(f"_{part}") for n in names]
    there = list(map(str, there))
    if not order or there == order:
        return numbers
    # a publisher may name its joints in another order each time, and another one may name others
    if not {*order} <= {*there} or len(numbers) != len(there):
        return None
    return numbers[[there.index(name) for name in order]]


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
