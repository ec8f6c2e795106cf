"""`robo_rl data import` of bags, made here."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_data_import import imported, refused

from robo_rl.data import foreign_bag as bags
from robo_rl.data.foreign import ForeignData
from robo_rl.data.lerobot import load

pytest.importorskip("rosbags", reason="needs robo_rl[formats]")


def bag_file(path: Path, kind: str = "mcap") -> None:
    """Two seconds: joints at 100 a second (in another order in every second message), a command at 20, 10 ms
    late, whose number is the time, pictures of two kinds at 10, brighter from one to the next."""
    from PIL import Image
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_HUMBLE)
    T = store.types
    stamp = T["builtin_interfaces/msg/Time"](sec=0, nanosec=0)
    header = T["std_msgs/msg/Header"](stamp=stamp, frame_id="")
    messages = []
    for k in range(200):
        names, q = ["a", "b"], [k / 100, 10 + k / 100]
        if k % 2:
            names, q = names[::-1], q[::-1]
        joints = T["sensor_msgs/msg/JointState"](
            header=header, name=names, position=np.array(q), velocity=np.zeros(2), effort=np.zeros(0)
        )
        messages.append((k * 10_000_000, "/joint_states", joints))
    layout = T["std_msgs/msg/MultiArrayLayout"](dim=[], data_offset=0)
    for k in range(40):
        told = T["std_msgs/msg/Float64MultiArray"](layout=layout, data=np.array([k / 20, 0.0]))
        messages.append((k * 50_000_000 + 10_000_000, "/command", told))
    for k in range(20):
        bright = np.full((6, 8, 3), 10 * k, np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(bright).save(buffer, "PNG")
        small = T["sensor_msgs/msg/CompressedImage"](
            header=header, format="png", data=np.frombuffer(buffer.getvalue(), np.uint8)
        )
        messages.append((k * 100_000_000, "/wrist/image_raw/compressed", small))
        blue = np.zeros((6, 9, 3), np.uint8)
        blue[:, :8, 0] = 10 * k  # of bgr, with three bytes behind each row
        raw = T["sensor_msgs/msg/Image"](
            header=header, height=6, width=8, encoding="bgr8", is_bigendian=0, step=27, data=blue.reshape(-1)
        )
        messages.append((k * 100_000_000, "/front/image_raw", raw))
    plugin = {"mcap": StoragePlugin.MCAP, "sqlite3": StoragePlugin.SQLITE3}[kind]
    with Writer(path, version=9, storage_plugin=plugin) as writer:
        kinds = {topic: message.__msgtype__ for _, topic, message in messages}
        connections = {t: writer.add_connection(t, name, typestore=store) for t, name in kinds.items()}
        for time, topic, message in sorted(messages, key=lambda m: m[0]):
            writer.write(connections[topic], time, store.serialize_cdr(message, message.__msgtype__))


@pytest.mark.parametrize("kind", ["mcap", "sqlite3"])
def test_a_bag_is_sampled_at_its_rate_and_an_action_is_what_was_told_next(tmp_path, capsys, kind):
    bag_file(tmp_path / "bag", kind)
    said = imported(capsys, tmp_path / "bag")
    assert "/joint_states" in said and "-> state" in said and "-> camera front" in said
    assert "--action KEY" in said and "--fps N" in said
    imported(
        capsys, tmp_path / "bag", "--out", tmp_path / "out", "--action", "/command", "--fps", "20", "--units",
        "rad", "--instruction", "wave",
    )  # fmt: skip
    data = load(tmp_path / "out")
    assert data.features.state == ("a", "b") and not data.is_judged
    episode = data.episode(0)
    # the first command came at 10 ms, and the last picture at 1.9 s
    t = 0.01 + np.arange(len(episode)) / 20
    assert t[-1] <= 1.9 < t[-1] + 0.05
    assert np.allclose(episode.state[:, 0], np.floor(t * 100 + 1e-6) / 100)
    assert np.allclose(episode.state[:, 1] - episode.state[:, 0], 10)
    assert np.allclose(episode.action[:, 0], np.arange(len(episode)) / 20)
    told = np.floor(t * 10 + 1e-6) * 10
    assert np.abs(data.frames("wrist", 0).mean((1, 2, 3)) - told).max() < 6
    blue = data.frames("front", 0)
    assert np.abs(blue[..., 2].mean((1, 2)) - told).max() < 8 and blue[..., 0].mean() < 12


def small_bag(path: Path, messages: list) -> None:
    """Of (seconds, topic, message); a message is (names, numbers) of joints or of a trajectory on /plan, a
    picture of raw bytes (height, width, encoding, bytes), or a JPEG (height, width)."""
    from PIL import Image
    from rosbags.rosbag2 import StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_HUMBLE)
    T = store.types
    header = T["std_msgs/msg/Header"](stamp=T["builtin_interfaces/msg/Time"](sec=0, nanosec=0), frame_id="")
    none = np.zeros(0)

    def made(topic, x):
        if len(x) == 4:
            h, w, encoding, data = x
            return T["sensor_msgs/msg/Image"](header, h, w, encoding, 0, data.size // h, data)
        if isinstance(x[0], int):
            buffer = io.BytesIO()
            Image.new("RGB", (x[1], x[0])).save(buffer, "JPEG")
            data = np.frombuffer(buffer.getvalue(), np.uint8)
            return T["sensor_msgs/msg/CompressedImage"](header, "jpeg", data)
        names, numbers = list(x[0]), np.array(x[1], float)
        if topic != "/plan":
            return T["sensor_msgs/msg/JointState"](header, names, numbers, none, none)
        at = T["builtin_interfaces/msg/Duration"](sec=0, nanosec=0)
        point = T["trajectory_msgs/msg/JointTrajectoryPoint"](numbers, none, none, none, at)
        return T["trajectory_msgs/msg/JointTrajectory"](header, names, [point] if names else [])

    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        connections = {}
        for seconds, topic, x in sorted(messages, key=lambda m: m[0]):
            message = made(topic, x)
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, message.__msgtype__, typestore=store)
            raw = store.serialize_cdr(message, message.__msgtype__)
            writer.write(connections[topic], round(seconds * 1e9), raw)


def joints(seconds: float = 2, start: float = 0) -> list:
    """Two joints at 100 a second."""
    ticks = range(round(100 * seconds))
    return [(start + k / 100, "/joint_states", ("ab", [k / 100, 10 + k / 100])) for k in ticks]


def test_of_joints_that_are_state_and_action_the_action_is_the_next(tmp_path, capsys):
    small_bag(tmp_path / "bag", joints())
    out = tmp_path / "out"
    imported(capsys, tmp_path / "bag", "--out", out, "--action", "/joint_states", "--fps", "10")
    episode = load(out).episode(0)
    t = np.arange(len(episode)) / 10
    assert np.allclose(episode.state[:, 0], t) and np.allclose(episode.action[:, 0], t + 0.09)
    assert load(out).features.action == ("a", "b")


def test_joints_that_another_publisher_or_a_stop_leaves_out_are_those_of_before(tmp_path, capsys):
    other = [(k / 100 + 0.001, "/joint_states", (["finger"], [5])) for k in range(200)]
    plan = [(k / 10, "/plan", (["b", "a"], [k, -k]) if k % 2 else ("ab", [-k, k])) for k in range(20)]
    stops = [(k / 10 + 0.05, "/plan", ((), ())) for k in range(19)]
    small_bag(tmp_path / "bag", joints() + other + plan + stops)
    imported(
        capsys, tmp_path / "bag", "--out", tmp_path / "out", "--action", "/plan", "--fps", "10", "--units",
        "rad",
    )  # fmt: skip
    data = load(tmp_path / "out")
    assert data.features.state == ("a", "b") and data.features.action == ("a_command", "b_command")
    episode = data.episode(0)
    assert np.allclose(episode.action[:, 1], np.arange(len(episode)))
    assert np.allclose(episode.action[:, 0], -episode.action[:, 1])
    assert np.allclose(episode.state[:, 1], 10 + np.arange(len(episode)) / 10)


def test_depth_is_no_camera_by_itself_and_the_rates_are_shown(tmp_path, capsys):
    depth = [(k / 10, "/depth/image_raw", (4, 6, "16UC1", np.zeros(48, np.uint8))) for k in range(20)]
    small_bag(tmp_path / "bag", joints() + depth)
    said = imported(capsys, tmp_path / "bag", tmp_path / "bag")
    assert (
        "2 episodes, 400 messages" in said and "100 a second, a, b" in said and "10 a second, 16UC1" in said
    )
    keys = "--action", "/joint_states", "--fps", "10", "--out", tmp_path / "out"
    imported(capsys, tmp_path / "bag", *keys)
    assert not load(tmp_path / "out").features.views
    keys = (*keys[:-1], tmp_path / "again", "--cameras", "d=/depth/image_raw")
    assert "encoding '16UC1' are not read; rgb8" in refused(capsys, tmp_path / "bag", *keys)


def test_topics_of_one_camera_are_a_view_and_those_of_two_are_two():
    raw, small = "/cam/image_raw", "/cam/image_raw/compressed"
    assert bags._views([raw, small]) == {"cam": small}
    other = "/cam/color/image_raw"
    assert bags._views([other, raw]) == {"cam": other, "cam_image_raw": raw}


def test_a_bag_that_cannot_be_an_episode_is_refused_in_a_line(tmp_path, capsys):
    pictures = [(k / 10, "/cam/compressed", (16 + k % 2 * 8, 16)) for k in range(20)]
    small_bag(tmp_path / "sizes", joints() + pictures)
    small_bag(tmp_path / "jump", joints() + joints(start=1.7e9))
    small_bag(tmp_path / "apart", joints() + [(9.0, "/plan", ("ab", [0, 0]))])
    small_bag(tmp_path / "none", [])
    keys = "--fps", "10", "--out", tmp_path / "out", "--action"
    assert "several sizes, 16 x 16 and 24 x 16" in refused(capsys, tmp_path / "sizes", *keys, "/joint_states")
    assert "the clock jumped" in refused(capsys, tmp_path / "jump", *keys, "/joint_states")
    assert "/plan begins when another" in refused(capsys, tmp_path / "apart", *keys, "/plan")
    assert "has no messages" in refused(capsys, tmp_path / "none", *keys, "/plan")
    assert not list(tmp_path.glob("*out*"))


def test_units_that_are_known_in_part_are_told(tmp_path, capsys):
    bag_file(tmp_path / "bag")
    keys = "--action", "/joint_states,/command", "--fps", "20", "--cameras", "none"
    said = imported(capsys, tmp_path / "bag", "--out", tmp_path / "out", *keys)
    assert "--units 'rad*2,1*2'" in said
    assert load(tmp_path / "out").features.action[-2:] == ("command_0", "command_1")


def test_a_topic_that_falls_silent_is_told(tmp_path):
    bag_file(tmp_path / "bag")
    topics = bags.topics_of(tmp_path / "bag")
    times = topics["/command"].times
    topics["/command"] = replace(topics["/command"], times=np.concatenate([times[:5], times[30:]]))
    got = ForeignData("rosbag", [], ("/joint_states",), ("/command",), fps=20)
    with pytest.warns(UserWarning, match=r"/command is silent for 1\.3 s"):
        bags.sampled(tmp_path / "bag", topics, {"/joint_states": (2,), "/command": (2,)}, got, {})
