"""The loop in time, the wire's contract, and the arm on it."""

import gc
import itertools
import math
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import dds_domain

from controllers.arm import Disturbance, SimArm
from controllers.law import LawOptions
from controllers.loop import NEWEST, SKIP, real_time, undisturbed
from controllers.node import ArmNode
from controllers.robot import load_robot
from controllers.services import parameter, value_of
from controllers.transport import (
    Bus,
    CompressedImage,
    Diagnostics,
    Flag,
    JointState,
    JointTrajectory,
    LoopbackTransport,
    NetworkConditions,
    Numbers,
    PoseStamped,
    Text,
    Transforms,
    WrenchStamped,
)
from controllers.transport import Clock as ClockMessage
from robo_rl.errors import UserError

ROBOT = load_robot("sim")


class Clock:
    """Time that passes in sleeps and in work."""

    def __init__(self):
        self.now = 10.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


# ---- real time ---------------------------------------------------------------------------------------------


def test_the_clock_does_not_drift_when_ticks_take_time():
    clock, at = Clock(), []

    def tick():
        at.append(clock.now)
        clock.now += 0.0004

    timing = real_time(tick, 0.001, 1.0, clock=clock, sleep=clock.sleep, cpu=clock)
    assert timing.ticks == 1000 and timing.late == timing.skipped == 0
    assert np.allclose(at, 10 + 0.001 * np.arange(1000), atol=1e-9)
    assert timing.period_p99 == pytest.approx(0.001)


def test_a_late_tick_is_caught_up_and_counted_but_a_long_gap_is_skipped():
    clock, at = Clock(), []

    def tick():
        at.append(clock.now)
        clock.now += {5: 0.0035, 50: 0.05}.get(len(at), 0.0)

    timing = real_time(tick, 0.001, 0.2, clock=clock, sleep=clock.sleep, cpu=lambda: 0.0)
    assert timing.late == 2 and 47 <= timing.skipped <= 50 and timing.ticks + timing.skipped == 200
    assert timing.period_max == pytest.approx(0.05)
    assert at[-1] == pytest.approx(10.199, abs=1e-3)
    assert f"{timing.skipped} skipped" in timing.text() and SKIP < 0.05


def test_the_loop_ends_when_it_is_told_to():
    clock, left = Clock(), iter([True] * 7 + [False])
    assert (
        real_time(
            lambda: None, 0.001, math.inf, clock=clock, sleep=clock.sleep, going=lambda: next(left)
        ).ticks
        == 7
    )


def test_a_loop_of_days_keeps_the_newest_periods_and_the_longest_of_all():
    clock, count = Clock(), itertools.count(1)

    def tick():
        clock.now += {5: 0.015}.get(next(count), 0.0)

    def used(seconds):
        tracemalloc.start()
        timing = real_time(tick, 0.001, seconds, clock=clock, sleep=clock.sleep, cpu=clock)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert timing.ticks == 1000 * seconds
        return timing, peak

    timing, one = used(NEWEST / 1000)
    assert timing.period_max == pytest.approx(0.015)
    assert used(3 * NEWEST / 1000)[1] < 1.5 * one


@pytest.mark.parametrize("there", [True, False])
def test_a_loop_keeps_cores_awake_where_the_system_permits(tmp_path, monkeypatch, there):
    from controllers import loop

    monkeypatch.setattr(loop, "AWAKE", str(tmp_path / "latency"))
    if there:
        (tmp_path / "latency").write_bytes(b"")
    gc.collect()  # files that earlier tests left to it
    before = len(list(Path("/proc/self/fd").iterdir()))
    with undisturbed():
        assert len(list(Path("/proc/self/fd").iterdir())) == before + there
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not there or (tmp_path / "latency").read_bytes() == bytes(4)


def test_a_quiet_loop_leaves_the_interpreter_as_it_was():
    before = sys.getswitchinterval()
    with undisturbed():
        assert not gc.isenabled()
    assert gc.isenabled() and sys.getswitchinterval() == before


def test_the_arm_runs_in_real_time():
    arm = SimArm(ROBOT)
    timing = real_time(arm.tick, arm.dt, 0.2)
    assert timing.ticks + timing.skipped >= 200 and arm.t == pytest.approx(timing.ticks * 1e-3)
    assert 0 < timing.core_share <= 1.05


def test_an_arm_that_is_placed_follows_at_once_like_one_that_has_stood_there():
    """A policy on the wire is given the arm it learnt with from its first action on."""
    ways = []
    for wait in (0.0, 1.0):
        arm = SimArm(ROBOT, LawOptions(ramp=0.5))
        arm.reset(ROBOT.home)
        arm.run(wait)
        pos, quat = arm.pose()
        arm.law.set_target(pos + [0.0, 0.05, 0.0], quat)
        arm.run(0.2)
        ways.append(arm.pose()[0] - pos)
    assert np.allclose(*ways, atol=1e-4) and ways[0][1] > 0.03


# ---- transports: one contract ------------------------------------------------------------------------------


@contextmanager
def loop_pair():
    """Two nodes that see each other, and a function that lets messages arrive."""
    clock = Clock()
    bus = Bus(clock)
    yield LoopbackTransport(bus, "a"), LoopbackTransport(bus, "b"), lambda: clock.sleep(0.01)


DOMAIN = dds_domain()


@contextmanager
def dds_pair(kind=None):
    """The same on DDS over loopback, in a domain of their own. kind: () -> the second one's class."""
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    from controllers.dds import DdsTransport

    try:
        nodes = DdsTransport("a", domain=DOMAIN), (kind() if kind else DdsTransport)("b", domain=DOMAIN)
    except UserError as e:
        pytest.skip(f"no loopback for DDS here: {e}")
    try:
        yield *nodes, lambda: time.sleep(0.15)
    finally:
        for node in nodes:
            node.close()


@contextmanager
def ros_pair():
    """The same through rclpy's stand-in."""
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    import ros_stand_in

    if "rclpy" not in sys.modules:
        ros_stand_in.install()
    from controllers.ros import RosTransport

    nodes = RosTransport("a", domain=DOMAIN), RosTransport("b", domain=DOMAIN)
    yield *nodes, lambda: time.sleep(0.1)
    for node in nodes:
        if node.context.ok:
            node.close()


TRANSPORTS = [
    pytest.param(loop_pair, id="in-process"),
    pytest.param(dds_pair, id="dds"),
    pytest.param(ros_pair, id="rclpy stand-in"),
]
POSE = PoseStamped(1.5, "base", (0.1, 0.2, 0.3), (1.0, 0.0, 0.0, 0.0))
MESSAGES = [
    POSE,
    JointState(1.0, ("a", "b"), (1.0, 2.0), (), (0.5, 0.25)),
    WrenchStamped(0.0, "base", (1.0,) * 6),
    Numbers((1.0, 2.0)),
    Flag(True),
    Text("hello"),
    CompressedImage(2.0, "front", "jpeg", bytes(range(256))),
    ClockMessage(12.5),
    JointTrajectory(0.0, ("a", "b"), ((0.5, (1.0, 2.0)),)),
    Transforms(1.25, (("base", "tool", (0.1, 0.2, 0.3), (1.0, 0.0, 0.0, 0.0)),)),
    Diagnostics(1.5, ((2, "governor", "STOPPED", (("lease", "alice"),)),)),
]
SET_BOOL, ADD = "std_srvs/srv/SetBool", "example_interfaces/srv/AddTwoInts"


@pytest.mark.parametrize("pair", TRANSPORTS[1:])
def test_stamps_are_of_the_systems_clock_and_ages_of_the_monotonic_one(pair):
    with pair() as (a, _, _):
        assert abs(a.stamp() - time.time()) < 1.0 and abs(a.now() - time.monotonic()) < 1.0


@pytest.mark.parametrize("pair", TRANSPORTS)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_arrives_as_it_was_sent_with_time_and_source(pair, message):
    with pair() as (a, b, wait):
        box, sender = b.subscription("topic", type(message)), a.publisher("topic", type(message))
        wait()
        assert box.latest() is None and box.take() == []
        before = b.now()
        sender.publish(message)
        wait()
        [got] = box.take()
        assert got.message == message and before <= got.at <= b.now() and got.source
        assert box.take() == [] and box.latest() == got


@pytest.mark.parametrize("pair", TRANSPORTS)
def test_a_subscription_keeps_the_newest_or_as_many_as_asked_for(pair):
    with pair() as (a, b, wait):
        one, three, sender = (
            b.subscription("x", Flag),
            b.subscription("x", Flag, depth=3),
            a.publisher("x", Flag),
        )
        wait()
        for k in range(5):
            sender.publish(Flag(k == 4))
        wait()
        assert [g.message.data for g in one.take()] == [True]
        assert [g.message.data for g in three.take()] == [False, False, True]


@pytest.mark.parametrize("pair", TRANSPORTS)
def test_a_latched_message_reaches_those_who_come_later(pair):
    with pair() as (a, b, wait):
        a.publisher("estop", Flag, "latched").publish(Flag(True))
        a.publisher("other", Flag).publish(Flag(True))
        wait()
        late, other = b.subscription("estop", Flag, "latched"), b.subscription("other", Flag)
        wait()
        assert late.latest().message == Flag(True) and other.latest() is None


@pytest.mark.parametrize("pair", TRANSPORTS)
def test_publishers_are_counted_and_told_apart_and_leave_on_close(pair):
    with pair() as (a, b, wait):
        box = b.subscription("x", Flag, "command", depth=9)
        senders = [a.publisher("x", Flag, "command"), b.publisher("x", Flag, "command")]
        wait()
        assert b.publishers("x") == 2 and b.publishers("y") == 0
        for s in senders:
            s.publish(Flag(True))
        wait()
        # rclpy names all of them in one
        assert len({g.source for g in box.take()}) == (1 if pair is ros_pair else 2)
        a.close()
        wait()
        assert b.publishers("x") == 1


class Answering:
    """A server that answers in a thread of its own until it is left."""

    def __init__(self, node):
        self.node, self.over = node, threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self):
        while not self.over.is_set():
            self.node.serve()
            time.sleep(0.001)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


@pytest.mark.parametrize("pair", TRANSPORTS)
def test_a_service_answers_or_the_caller_is_told(pair):
    with pair() as (a, b, wait):
        asked = []
        a.service(
            "motor/enable", SET_BOOL, lambda r: asked.append(r["data"]) or {"success": True, "message": "on"}
        )
        a.service("motor/stop", "std_srvs/srv/Trigger", lambda r: {"success": not r, "message": "off"})
        wait()
        with Answering(a):
            assert b.call("motor/enable", SET_BOOL, {"data": True}) == {"success": True, "message": "on"}
            assert b.call("motor/enable", SET_BOOL, {}) == {"success": True, "message": "on"} and asked == [
                True,
                False,
            ]
            assert b.call("motor/stop", "std_srvs/srv/Trigger", {})["message"] == "off"
            with pytest.raises(UserError, match="no field dato in this message; it has data"):
                b.call("motor/enable", SET_BOOL, {"dato": True})
        with pytest.raises(UserError, match="nobody answers the service motor/disable within 0.05 s"):
            b.call("motor/disable", SET_BOOL, {}, timeout=0.05)
        with pytest.raises(UserError, match="offered already"):
            a.service("motor/enable", SET_BOOL, dict)
        with pytest.raises(UserError, match="unknown service type"):
            a.service("x", "std_srvs/srv/Add", dict)
        a.close()
        wait()
        with pytest.raises(UserError, match="nobody answers"):
            b.call("motor/enable", SET_BOOL, {}, timeout=0.05)


@pytest.mark.parametrize("pair", TRANSPORTS)
def test_parameters_of_every_kind_survive_a_call(pair):
    values = [True, -3, 0.25, "left"]
    with pair() as (a, b, wait):
        got = []

        def handler(request):
            got.extend((p["name"], value_of(p["value"])) for p in request["parameters"])
            return {"results": [{"successful": True, "reason": p["name"]} for p in request["parameters"]]}

        a.service("node/set_parameters", "rcl_interfaces/srv/SetParameters", handler)
        wait()
        with Answering(a):
            reply = b.call(
                "node/set_parameters",
                "rcl_interfaces/srv/SetParameters",
                {"parameters": [{"name": f"p{k}", "value": parameter(v)} for k, v in enumerate(values)]},
            )
        assert got == [(f"p{k}", v) for k, v in enumerate(values)]
        assert [r["reason"] for r in reply["results"]] == ["p0", "p1", "p2", "p3"]


@pytest.mark.parametrize("pair", TRANSPORTS)
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda a, b: (a.publisher("x", Flag), a.subscription("x", Text)), "carries Flag, not Text"),
        (lambda a, b: a.publisher("x", Flag).publish(Text("no")), "carries Flag, not Text"),
        (lambda a, b: a.publisher("x", Flag, "best"), "unknown quality of service 'best'"),
        (lambda a, b: a.publisher("x", dict), "dict is no message"),
    ],
)
def test_wrong_use_is_one_clear_line(pair, call, says):
    with pair() as (a, b, _), pytest.raises(UserError, match=says):
        call(a, b)


def test_weather_delays_drops_repeats_and_reorders():
    def through(**kw):
        clock = Clock()
        bus = Bus(clock, NetworkConditions(seed=1, **kw))
        box, sender = (
            LoopbackTransport(bus, "b").subscription("x", Numbers, depth=1000),
            LoopbackTransport(bus, "a").publisher("x", Numbers),
        )
        for k in range(200):
            sender.publish(Numbers((k, clock.now)))
            clock.sleep(0.01)
        clock.sleep(10)
        got = box.take()
        return [g.message.data[0] for g in got], [g.at - g.message.data[1] for g in got]

    assert through()[0] == list(range(200))
    assert through(delay=0.25)[1] == pytest.approx([0.25] * 200)
    assert 60 < len(through(drop=0.5)[0]) < 140
    assert 240 < len(through(repeat=0.5)[0]) < 360
    order, delays = through(jitter=0.1)
    assert (
        order != sorted(order)
        and sorted(order) == list(range(200))
        and min(delays) >= 0
        and max(delays) <= 0.1
    )


# ---- DDS ---------------------------------------------------------------------------------------------------


@pytest.fixture
def dds():
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    import controllers.dds

    return controllers.dds


@pytest.fixture
def dds_types(dds):
    import controllers.dds_types

    return controllers.dds_types


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_way_to_ros_and_back(dds, message):
    codec = dds.Types().codec
    assert codec.from_ros(type(message), codec.to_ros(message)) == message


def test_a_quaternion_is_x_first_on_the_wire_and_the_bytes_are_ros_cdr(dds):
    types = dds.Types()
    ros = types.codec.to_ros(PoseStamped(2.25, "base", (1.0, 2.0, 3.0), (0.5, 0.1, 0.2, 0.3)))
    q = ros.pose.orientation
    assert (q.w, q.x, q.y, q.z) == (0.5, 0.1, 0.2, 0.3) and (
        ros.header.stamp.sec,
        ros.header.stamp.nanosec,
    ) == (2, 250000000)
    raw = types.wire("geometry_msgs/msg/PoseStamped")(ros).serialize()
    assert raw[:4] == bytes([0, 1, 0, 0])  # CDR, little endian
    assert (
        raw[4:20]
        == (2).to_bytes(4, "little") + (250000000).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"base"
    )
    assert np.frombuffer(raw[-56:]).tolist() == [1, 2, 3, 0.1, 0.2, 0.3, 0.5]


def test_type_hashes_and_names_are_ros(dds):
    types = dds.Types()
    assert types.hash("sensor_msgs/msg/JointState").startswith("RIHS01_a13ee3a3")
    assert (
        types.struct("sensor_msgs/msg/JointState").__idl__.idl_transformed_typename
        == "sensor_msgs::msg::dds_::JointState_"
    )


@pytest.mark.parametrize("names", [("a",), ("joint1", "j2", "elbow"), tuple(f"joint{i}" for i in range(7))])
def test_the_quick_joint_state_has_the_bytes_of_the_slow_one(dds, names):
    types, rng = dds.Types(), np.random.default_rng(len(names))
    wire = types.wire("sensor_msgs/msg/JointState")
    form = None
    for k in range(3):
        m = JointState(1.5 + k / 3, names, *(tuple(rng.normal(size=len(names)).tolist()) for _ in range(3)))
        form = form or dds.JointForm(m, types.codec, wire)
        assert form.fits(m) and form.filled(m).serialize() == wire(types.codec.to_ros(m)).serialize()
    assert not form.fits(JointState(1.0, (*names, "more"))) and not form.fits(
        JointState(1.0, names, (0.0,) * len(names))
    )
    shape, slow = dds.JointShape(), lambda m: wire(types.codec.to_ros(m)).serialize()
    assert shape.read(slow(m)) is None
    shape.learn(slow(m), types.codec.from_ros(JointState, types.codec.to_ros(m)))
    for other in (m, JointState(7.25, names, *[(-1.5,) * len(names)] * 3)):
        assert shape.read(slow(other)) == types.codec.from_ros(JointState, types.codec.to_ros(other))
    for other in (
        JointState(1.0, (*names[:-1], "x" * len(names[-1])), *[(0.0,) * len(names)] * 3),
        JointState(1.0, names),
        JointState(1.0, (*names, "more"), *[(0.0,) * (len(names) + 1)] * 3),
    ):
        assert shape.read(slow(other)) is None
    empty = JointState(1.0, names)
    assert (
        dds.JointForm(empty, types.codec, wire).filled(empty).serialize()
        == wire(types.codec.to_ros(empty)).serialize()
    )


def test_the_hash_of_a_service_is_ros(dds, dds_types):
    """example_interfaces/srv/AddTwoInts, as ROS 2 prints it."""
    types = dds.Types()
    types.add_service(SET_BOOL)
    defs = types.store.fielddefs
    for _old, new, fields in (
        (SET_BOOL + "_Request", ADD + "_Request", ("a", "b")),
        (SET_BOOL + "_Response", ADD + "_Response", ("sum",)),
    ):
        defs[new] = [], [(f, (dds_types.Nodetype.BASE, ("int64", 0))) for f in fields]
    for part in ("", "_Event"):
        text = repr(defs[SET_BOOL + part]).replace(SET_BOOL, ADD)
        defs[ADD + part] = eval(
            re.sub(r"<Nodetype\.(\w+): \d>", r"Nodetype.\1", text), {"Nodetype": dds_types.Nodetype}
        )
    assert types.hash(ADD) == "RIHS01_e118de6bf5eeb66a2491b5bda11202e7b68f198d6f67922cf30364858239c81a"


def test_a_service_payload_is_rmw_cyclonedds(dds_types):
    """16 bytes {client, number} between CDR's header and the body, so that alignment stays."""
    cdr = bytes([0, 1, 0, 0]) + b"body"
    raw = dds_types.frame(cdr, 0x0102, -2)
    assert (
        raw[:4] == cdr[:4]
        and raw[4:12] == bytes([2, 1, 0, 0, 0, 0, 0, 0])
        and raw[12:20] == bytes([0xFE] + [0xFF] * 7)
    )
    assert raw[20:] == b"body" and dds_types.unframe(raw) == (cdr, 0x0102, -2)
    # no service's: nobody asked number 0, and it cannot be decoded
    assert dds_types.unframe(raw[:19]) == (raw[:19], 0, 0)


def test_a_service_of_another_vendor_or_another_type_is_refused_with_the_reason(dds):
    fast, cyclone = bytes([1, 0x0F]) + bytes(14), bytes([1, 0x10]) + bytes(14)
    assert not dds.service_fault("enable", SET_BOOL, cyclone, "RIHS01_a", "RIHS01_a")
    assert not dds.service_fault("enable", SET_BOOL, cyclone, "", "RIHS01_a")
    said = dds.service_fault("enable", SET_BOOL, fast, "RIHS01_a", "RIHS01_a")
    assert (
        "service enable is offered over Fast DDS" in said and "RMW_IMPLEMENTATION=rmw_cyclonedds_cpp" in said
    )
    assert "type hash RIHS01_b" in dds.service_fault("enable", SET_BOOL, cyclone, "RIHS01_b", "RIHS01_a")
    assert "DDS vendor 0177" in dds.service_fault("enable", SET_BOOL, bytes([1, 0x77]), "", "")


def test_a_guid_names_its_vendor(dds):
    with dds_pair() as (a, _, _):
        assert dds.vendor(a.participant.guid.bytes) == "Cyclone DDS"


@contextmanager
def older(dds, node, topic, kind):
    """A writer of another ROS distribution beside a node: the same type name, another hash."""
    ros = dds.t.ROS_TYPES[kind]
    q = node._qos("command", ros)
    other = dds.qos.Qos(
        *[p for p in q if not isinstance(p, dds.Policy.Userdata)],
        dds.Policy.Userdata(b"typehash=RIHS01_0dd;"),
    )
    participant = dds.DomainParticipant(DOMAIN)
    writer = dds.DataWriter(participant, dds.Topic(participant, f"rt/{topic}", node.types.wire(ros)), other)
    yield dds.DdsPublisher(writer, kind, node.types.codec, topic)


def test_a_writer_of_another_type_hash_is_named_and_not_read(dds):
    with dds_pair() as (a, b, wait):
        box = b.subscription("target", Flag, "command", depth=5)
        with older(dds, a, "target", Flag) as stranger:
            good = a.publisher("target", Flag, "command")
            wait()
            stranger.publish(Flag(True))
            good.publish(Flag(False))
            wait()
            assert [g.message for g in box.take()] == [Flag(False)]
            [said] = b.complaints()
            assert (
                "topic target is std_msgs/msg/Bool with type hash RIHS01_0dd" in said
                and "another ROS distribution" in said
            )


def test_a_topic_of_another_type_is_named(dds):
    with dds_pair() as (a, b, wait):
        a.publisher("target", Text, "command")
        b.subscription("target", Flag, "command")
        wait()
        assert any(
            "topic target is std_msgs::msg::dds_::String_ elsewhere, here std_msgs/msg/Bool" in c
            for c in b.complaints()
        )


def test_the_node_and_its_endpoints_are_in_ros_discovery_info(dds):
    """What `ros2 node list` and `ros2 service list` read."""
    with dds_pair() as (a, b, wait):
        a.service("enable", SET_BOOL, dict)
        a.publisher("state", Flag)
        wait()
        reader = dds.DataReader(
            b.participant, b._topic("ros_discovery_info", dds.DISCOVERY), b._qos("latched", dds.DISCOVERY, 9)
        )
        wait()
        infos = {bytes(s.message.gid.data): s.message for s in reader.take(N=9) if s.sample_info.valid_data}
        info = infos[a.participant.guid.bytes]
        [node] = info.node_entities_info_seq
        assert (node.node_namespace, node.node_name) == ("/", "a")
        assert [bytes(g.data) for g in node.writer_gid_seq] == a.gids["writer"] and len(a.gids["writer"]) == 2
        assert [bytes(g.data) for g in node.reader_gid_seq] == a.gids["reader"] and len(a.gids["reader"]) == 1
        ids = [
            dds.user_data(dds.userdata_of(e), "serviceid")
            for e in dds.BuiltinDataReader(b.participant, dds.BuiltinTopicDcpsSubscription).take(N=100)
            if getattr(e, "topic_name", "") == "rq/enableRequest"
        ]
        assert len(ids) == 1 and ids[0].count(".") == 15


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda d: d.DdsTransport("a", domain=500), "ROS domain must be"),
        (lambda d: d.Types("kinetic"), "unknown ROS distribution"),
        (lambda d: d.configuration(0, 'eth0"/>'), "no name of a network interface"),
        (
            lambda d: d.DdsTransport("a", domain=231, interface="nosuch0"),
            "cannot use the network interface nosuch0",
        ),
    ],
)
def test_wrong_dds_settings_are_one_clear_line(dds, call, says):
    with pytest.raises(UserError, match=says):
        call(dds)


def test_a_port_that_another_program_has_is_told_with_what_to_do(dds):
    domain = dds_domain()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("", 7401 + 250 * domain))
        with pytest.raises(UserError, match=f"has a port of DDS domain {domain} .* up to 101"):
            dds.DdsTransport("a", domain=domain)
    dds.DdsTransport("a", domain=domain).close()


def test_without_the_extra_the_message_has_the_command_that_installs_it():
    code = "import sys; sys.modules['cyclonedds'] = None; import controllers.dds"
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parent.parent,
    ).stderr
    assert "the DDS transport needs cyclonedds: pip install 'robo_rl[robot]'" in said


def test_rclpy_is_asked_for_the_qualities_that_crisp_needs():
    with ros_pair() as (a, b, _):
        import ros_stand_in as ros

        ros.GRAPH.calls.clear()
        a.publisher("target_pose", PoseStamped, "command")
        b.subscription("joint_states", JointState, depth=3)
        b.subscription("estop", Flag, "latched")
        (_, _, command), (_, _, state), (_, _, latched) = ros.GRAPH.calls
        assert (command.reliability, command.durability, command.depth) == (
            ros.Reliability.RELIABLE,
            ros.Durability.VOLATILE,
            1,
        )
        assert (state.reliability, state.depth) == (ros.Reliability.BEST_EFFORT, 3)
        assert (latched.reliability, latched.durability) == (
            ros.Reliability.RELIABLE,
            ros.Durability.TRANSIENT_LOCAL,
        )


def test_a_second_commander_changes_the_source_that_rclpy_gives():
    with ros_pair() as (a, b, wait):
        box, one = b.subscription("target", Flag, "command", depth=9), a.publisher("target", Flag, "command")
        one.publish(Flag(True))
        wait()
        a.publisher("target", Flag, "command")  # one participant's two streams are one source
        one.publish(Flag(True))
        wait()
        b.publisher("target", Flag, "command")
        one.publish(Flag(True))
        wait()
        first, same, second = box.take()
        assert first.source == same.source != second.source and second.source.count("+") == 1
        assert box.sources() == set(second.source.split("+"))


def test_a_message_package_that_the_workspace_lacks_is_named():
    with ros_pair():
        from controllers.ros import ros_class

        with pytest.raises(UserError, match="no nothing_msgs/msg/X: install ros-.ROS_DISTRO-nothing-msgs"):
            ros_class("nothing_msgs/msg/X")


def test_without_a_workspace_the_ros_transport_says_what_to_source():
    code = "import sys; sys.modules['rclpy'] = None; import controllers.ros"
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parent.parent,
    ).stderr
    assert "source a ROS 2 workspace" in said


# ---- the arm on the wire -----------------------------------------------------------------------------------


def on_the_wire(options=None, conditions=None):
    arm = SimArm(ROBOT, options)
    bus = Bus(lambda: arm.t, conditions)
    return arm, ArmNode(arm, LoopbackTransport(bus, "arm")), LoopbackTransport(bus, "client"), bus


def run(node, seconds):
    for _ in range(round(seconds / node.arm.dt)):
        node.tick()


@pytest.mark.parametrize("conditions", [None, NetworkConditions(delay=0.1, jitter=0.02, drop=0.3, seed=2)])
def test_a_client_moves_the_arm_and_sees_it_move(conditions):
    _, node, client, _ = on_the_wire(conditions=conditions)
    pose, joints = (
        client.subscription("current_pose", PoseStamped),
        client.subscription("joint_states", JointState),
    )
    target = client.publisher("target_pose", PoseStamped, "command")
    run(node, 0.6)
    start = pose.latest().message
    goal = (start.pos[0], start.pos[1] + 0.1, start.pos[2])
    for _ in range(100):
        target.publish(PoseStamped(client.now(), "base", goal, start.quat))
        run(node, 0.02)
    assert math.dist(pose.latest().message.pos, goal) < 2e-3
    assert joints.latest().message.names == ROBOT.joints and not node.refused


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (PoseStamped(0.0, "camera", (0.5, 0, 0.3), (0, 1, 0, 0)), "frame must be 'base', got 'camera'"),
        (PoseStamped(0.0, "base", (0.5, math.nan, 0.3), (0, 1, 0, 0)), "must be finite"),
        (PoseStamped(0.0, "base", (0.5, 0.0, 0.3), (0, 3, 0, 0)), "length 1"),
        (PoseStamped(0.0, "base", (0.5, 0.0), (0, 1, 0, 0)), "3 numbers"),
    ],
)
def test_a_bad_command_is_counted_with_its_reason_and_changes_nothing(message, says):
    arm, node, client, _ = on_the_wire()
    client.publisher("target_pose", PoseStamped, "command").publish(message)
    before = arm.law.reference.target_pos.copy()
    run(node, 0.01)
    [(reason, count)] = node.refused.items()
    assert says in reason and count == 1 and np.array_equal(arm.law.reference.target_pos, before)


def test_two_clients_on_one_topic_move_nothing():
    arm, node, client, bus = on_the_wire()
    before = arm.law.reference.target_pos.copy()
    for loop in (client, LoopbackTransport(bus, "second")):
        loop.publisher("target_pose", PoseStamped, "command").publish(
            PoseStamped(0.0, "base", (0.5, 0, 0.4), (0, 1, 0, 0))
        )
    run(node, 0.05)
    assert np.array_equal(arm.law.reference.target_pos, before) and "more than one publisher" in next(
        iter(node.refused)
    )


def test_joint_targets_on_the_wire_go_by_name():
    from controllers.law import joint_impedance

    arm, node, client, _ = on_the_wire(joint_impedance(damping=25.0))
    goal = dict(zip(ROBOT.joints, np.array(ROBOT.home) + 0.1, strict=True))
    names = tuple(reversed(ROBOT.joints))
    client.publisher("target_joint", JointState, "command").publish(
        JointState(0.0, names, tuple(float(goal[n]) for n in names))
    )
    run(node, 3.0)
    assert np.abs(arm.model.q - [goal[j] for j in ROBOT.joints]).max() < 5e-3
    client.publisher("target_joint", JointState, "command").publish(JointState(0.0, names[1:], (0.0,) * 6))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: SimArm(ROBOT, dt=1.0), "dt must be"),
        (lambda: SimArm(ROBOT, q=np.zeros(6)), "must have 7 numbers"),
        (lambda: SimArm(ROBOT, path="<mujoco/>"), "no joints joint1"),
        (lambda: Disturbance(payload=-1.0), "payload"),
        (lambda: NetworkConditions(drop=1.5), "drop"),
        (lambda: SimArm(ROBOT).push([1.0]), "push must have 6"),
        (lambda: real_time(lambda: None, 0.0, 1.0), "dt must be"),
        (lambda: LawOptions(ramp=-1.0), "ramp"),
    ],
)
def test_wrong_input_is_one_clear_line(call, says):
    with pytest.raises(UserError, match=says) as e:
        call()
    assert "\n" not in str(e.value)


def test_the_arm_works_in_the_simulators_scenes():
    """Position actuators give way to motors, the cube stays where it is."""
    from sims.mujoco.model import block_xml, scene_xml

    xml = scene_xml(block_xml("cube", (0.02, 0.02, 0.02), "red", 0.1))
    tool = load_robot("sim")
    arm = SimArm(replace(tool, site="link7"), path=xml)
    pos, _ = arm.pose()
    arm.run(0.5)
    assert np.linalg.norm(arm.pose()[0] - pos) < 1e-3
    assert arm.data.body("cube").xpos[2] == pytest.approx(0.02, abs=1e-3)


def test_a_jaw_that_is_a_hinge_opens_and_closes_and_its_arm_says_how_far():
    robot = load_robot("so101")
    arm = SimArm(robot)
    low, high = arm.mj.joint("gripper").range
    for opening in (1.0, 0.0, 0.3):
        arm.grip(opening)
        for _ in range(800):
            arm.tick()
        assert arm.opening == pytest.approx(opening, abs=0.01)
        angle = arm.data.qpos[arm.mj.joint("gripper").qposadr[0]]
        assert angle == pytest.approx(low + opening * (high - low), abs=0.02)
    arm.reset(np.array(robot.home), opening=1.0)
    assert arm.opening == 1.0
    bus = Bus(lambda: arm.t)
    node = ArmNode(arm, LoopbackTransport(bus, "arm"))
    heard = LoopbackTransport(bus, "client").subscription("gripper/joint_states", JointState)
    run(node, 0.2)
    assert heard.latest().message.position[0] == pytest.approx(arm.opening, abs=0.05)


def test_a_jaw_that_its_model_moves_keeps_its_motor(tmp_path):
    text = Path(load_robot("so101").model).read_text()
    motor = '<actuator><position name="jaw" joint="gripper" kp="7"/></actuator></mujoco>'
    (tmp_path / "arm.xml").write_text(text.replace("</mujoco>", motor))
    arm = SimArm(load_robot("so101"), path=str(tmp_path / "arm.xml"))
    assert [arm.mj.actuator(i).name for i in range(arm.mj.nu)].count("gripper") == 0
    arm.grip(1.0)
    for _ in range(800):
        arm.tick()
    assert arm.opening == pytest.approx(1.0, abs=0.02)
