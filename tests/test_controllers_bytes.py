"""What others put on the wire: bytes that no sender of ours makes, over DDS and through rclpy's stand-in."""

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_controllers_arm import DOMAIN, SET_BOOL, dds_pair, ros_pair

from controllers.services import REPLY, REQUEST, filled, text_of
from controllers.transport import (
    ROS_TYPES,
    Bus,
    CompressedImage,
    Flag,
    JointState,
    JointTrajectory,
    LoopbackTransport,
    Numbers,
    PoseStamped,
    Text,
    TwistStamped,
    WrenchStamped,
)
from robo_rl.errors import UserError
from robo_rl.experiment.sim_arm import SimArmOptions, make_sim_arm

SAMPLES = {
    PoseStamped: PoseStamped(1.5, "base_link", (0.1, 0.2, 0.3), (1.0, 0.0, 0.0, 0.0)),
    TwistStamped: TwistStamped(0.0, "base_link", (1.0,) * 6),
    WrenchStamped: WrenchStamped(0.0, "base_link", (1.0,) * 6),
    JointState: JointState(1.0, ("joint1", "joint2"), (1.0, 2.0), (0.0, 0.0), (0.5, 0.25)),
    Numbers: Numbers((1.0, 2.0)),
    JointTrajectory: JointTrajectory(0.0, ("joint1", "joint2"), ((0.5, (1.0, 2.0)),)),
    Flag: Flag(True),
    Text: Text("hello"),
    CompressedImage: CompressedImage(2.0, "front", "jpeg", bytes(range(64))),
}
LIST = "controller_manager_msgs/srv/ListControllers"
DROPPED = "could not be decoded or answered and were dropped"


def raw_writer(node, name, ros):
    """write(bytes) -> whether they went out: a sample of the topic or service part. Cyclone writes, as it
    reads, only what is laid out as the type; it does not look at what a text or a number is."""
    from controllers import dds

    made = node._topic(name, ros)
    writer = dds.DataWriter(node.participant, made, node._qos("command", ros))

    def write(data):
        try:
            writer.write(writer.data_type(None, raw=data))
        except dds.core.DDSException:
            return False
        return True

    return write


def cdr(node, message):
    return node.types.wire(ROS_TYPES[type(message)])(node.types.codec.to_ros(message)).serialize()


def spoilt(data, rng):
    """A copy with a few bytes changed, cut, or grown."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        out[rng.randrange(len(out))] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    if rng.random() < 0.3:
        out = out[: rng.randrange(4, len(out) + 1)]
    elif rng.random() < 0.1:
        out += rng.randbytes(rng.randint(1, 64))
    return bytes(out)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (SAMPLES[PoseStamped], b"base_link"),
        (SAMPLES[JointState], b"joint2"),
        (SAMPLES[Text], b"hello"),
        (SAMPLES[CompressedImage], b"jpeg"),
    ],
)
def test_a_text_that_is_no_utf8_costs_its_own_sample_alone(message, text):
    """DDS checks lengths, not texts."""
    with dds_pair() as (a, b, wait):
        box, good = (
            b.subscription("x", type(message), "command", depth=5),
            a.publisher("x", type(message), "command"),
        )
        write = raw_writer(a, "rt/x", ROS_TYPES[type(message)])
        wait()
        data = cdr(a, message)
        assert data.count(text) == 1
        good.publish(message)
        write(data.replace(text, b"\xff" + text[1:]))
        good.publish(message)
        wait()
        assert [got.message for got in box.take()] == [message, message]
        assert b.complaints() == [f"x: 1 samples {DROPPED}"]
    assert b.complaints() == [f"x: 1 samples {DROPPED}"]  # and after it has left


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda k: k.__name__)
def test_no_bytes_on_a_topic_end_its_reader(kind):
    rng, message = random.Random(0), SAMPLES[kind]
    with dds_pair() as (a, b, wait):
        box, good = b.subscription("x", kind, "command", depth=64), a.publisher("x", kind, "command")
        write, data = raw_writer(a, "rt/x", ROS_TYPES[kind]), cdr(a, message)
        wait()
        written = 0
        for k in range(1000):
            written += write(spoilt(data, rng))
            if k % 20 == 19:
                assert all(type(got.message) is kind for got in box.take())
        assert written > 100
        wait()
        box.take()
        good.publish(message)
        wait()
        assert box.latest().message == message


def test_no_bytes_to_a_service_end_its_server_and_the_next_call_is_answered():
    rng = random.Random(1)
    with dds_pair() as (a, b, wait):
        b.service("enable", SET_BOOL, lambda request: {"success": request["data"], "message": "done"})
        a.types.add_service(SET_BOOL)
        ros = f"{SET_BOOL}_{REQUEST}"
        write = raw_writer(a, "rq/enableRequest", ros)
        wait()
        for k in range(300):
            write(spoilt(a.types.store.serialize_cdr(a.types.store.types[ros](data=True), ros), rng))
            if k % 8 == 7:
                b.serve()
        wait()
        for _ in range(50):
            b.serve()
        reply = answered(a, b.serve, "enable", SET_BOOL, {"data": True})
        assert reply == {"success": True, "message": "done"}


def answered(a, serve, name, kind, request, timeout=5.0):
    """The reply to `a`, while `serve` is called."""
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(a.call, name, kind, request, timeout)
        while not reply.done():
            serve()
            time.sleep(0.001)
        return reply.result()


def test_a_handler_that_fails_is_no_reply_and_the_server_goes_on():
    def handler(request):
        if request["data"]:
            raise ZeroDivisionError
        return {"success": True}

    for pair in (dds_pair, ros_pair):
        with pair() as (a, b, wait):
            b.service("enable", SET_BOOL, handler)
            wait()
            if pair is dds_pair:
                with pytest.raises(UserError, match="did not answer within 0.5 s"):
                    answered(a, b.serve, "enable", SET_BOOL, {"data": True}, timeout=0.5)
            else:  # ROS has zeros for it
                assert answered(a, b.serve, "enable", SET_BOOL, {"data": True}) == {
                    "success": False,
                    "message": "",
                }
            assert answered(a, b.serve, "enable", SET_BOOL, {"data": False})["success"]
            assert b.complaints() == [f"enable: 1 samples {DROPPED}"]


def test_a_reply_that_cannot_be_decoded_is_an_error_of_the_call():
    with dds_pair() as (a, b, wait):
        b.service("list", LIST, lambda request: {})
        ros = f"{LIST}_{REPLY}"
        from controllers import dds

        writer = dds.DataWriter(b.participant, b._topic("rr/listReply", ros), b._qos("command", ros))
        one = b._built(LIST, REPLY, filled(text_of(LIST, REPLY), {"controller": [{"name": "joint"}]}))
        raw = bytes(b.types.store.serialize_cdr(one, ros)).replace(b"joint", b"\xffoint")
        wait()

        def forge():
            if (client := a.clients.get("list")) is not None and client.count:
                writer.write(writer.data_type(None, client.id, client.count, raw))

        with pytest.raises(UserError, match="the service list answered with bytes that cannot be decoded"):
            answered(a, forge, "list", LIST, {})


def arm_time():
    """DDS whose clock the test moves on: a busy machine makes no state and no command late."""
    from controllers.dds import DdsTransport

    class ArmTime(DdsTransport):
        time = 0.0

        def now(self):
            return self.time

    return ArmTime


def whole_arm_under_fire(samples, seed):
    """The governed arm of `sim-arm` on DDS while spoilt samples come in on all its topics and services, and a
    person arms it again and again -> (samples that went out, largest share of a joint's speed limit and of
    its torque limit, what was said of them). Every other 200 ticks nothing comes that may stop it and the
    e-stop is let go, so that it moves: Cyclones differ in how many spoilt samples they let out, and with them
    in the ticks that a number of samples takes."""
    rng = random.Random(seed)
    with dds_pair(arm_time) as (a, b, wait):
        arm, node = make_sim_arm(SimArmOptions(controller="cartesian", domain=DOMAIN, scene="none"), b)
        kinds = {
            topic: kind
            for topic, kind in b.kinds.items()
            if any(topic == t for _, t, _ in node.commands) or topic == "estop"
        }
        x, y, z = arm.model.pos
        quat, frame = tuple(arm.model.quat), arm.robot.base_frame

        def pose(aside):
            return cdr(a, PoseStamped(0.0, frame, (x, y + aside, z), quat))

        fire, calm, let_go = [], [], []  # calm: it does not stop an arm
        for topic, kind in kinds.items():
            message = {Flag: Flag(False), JointState: JointState(0.0, arm.robot.joints, arm.robot.home)}.get(
                kind, SAMPLES.get(kind)
            )
            calm.append(topic not in ("estop", "safety_command"))
            fire.append(
                (
                    raw_writer(a, f"rt/{topic}", ROS_TYPES[kind]),
                    pose(0.02) if kind is PoseStamped else cdr(a, message),
                )
            )
            let_go += fire[-1:] if topic == "estop" else []
        for name, (_, _, kind, _) in b.servers.items():
            a.types.add_service(kind)
            ros, asked = f"{kind}_{REQUEST}", {}
            if kind.endswith("SetParameters"):
                asked = {
                    "parameters": [
                        {"name": "damping_ratio", "value": {"type": 3, "double_value": 1.0}},
                        {"name": "task.k_pos_x", "value": {"type": 3, "double_value": 600.0}},
                    ]
                }
            data = a.types.store.serialize_cdr(
                a._built(kind, REQUEST, filled(text_of(kind, REQUEST), asked)), ros
            )
            fire.append((raw_writer(a, f"rq/{name}Request", ros), bytes(data)))
            calm.append(name != "estop" and not name.startswith("safety/"))
            let_go += fire[-1:] if name == "estop" else []  # a request of zeros: not pressed
        wait()
        written = fastest = strongest = 0
        moving = [end for end, it_is in zip(fire, calm, strict=True) if it_is]
        aim = next(write for write, data in fire if data == pose(0.02))
        goals = [pose(-0.015), pose(0.015)]
        speed, torque = np.array(arm.robot.velocity), np.array(arm.robot.torque)
        while written < samples or node.count < 400:
            is_calm = node.count // 200 % 2
            for write, data in rng.sample(moving if is_calm else fire, 8):
                written += write(spoilt(data, rng))
            aim(goals[node.count // 100 % 2])
            if node.count % 20 == 0:
                for write, data in let_go if is_calm else ():
                    assert write(data)
                with contextlib.suppress(UserError):
                    node.order("reset")
                with contextlib.suppress(UserError):
                    node.order("arm")
            b.time += arm.dt
            node.tick()
            fastest = max(fastest, float((np.abs(arm.model.dq) / speed).max()))
            strongest = max(strongest, float((np.abs(arm.torque) / torque).max()))
        return written, fastest, strongest, b.complaints()


@pytest.mark.parametrize(
    ("samples", "seed"),
    [(2000, 0), pytest.param(1_000_000, 1, marks=(pytest.mark.slow, pytest.mark.timeout(3600)))],
)
def test_raw_samples_on_every_topic_and_service_neither_end_the_arm_nor_break_its_limits(samples, seed):
    written, fastest, strongest, said = whole_arm_under_fire(samples, seed)
    assert written >= samples and 0.001 < fastest <= 1.0 and strongest <= 1.0
    assert any(DROPPED in line for line in said)


def test_gains_of_any_size_over_the_parameter_services_leave_the_arm_within_its_limits():
    """In every state, of the controller that holds the arm and of those that wait, which then take over."""
    rng, clock = random.Random(0), Bus(lambda: 0.0)
    arm, node = make_sim_arm(
        SimArmOptions(controller="cartesian", scene="none"), LoopbackTransport(clock, "arm")
    )
    clock.clock = lambda: arm.ticks * arm.dt
    person, speed = LoopbackTransport(clock, "person"), np.array(arm.robot.velocity)
    names = [n.removesuffix("/set_parameters") for n in clock.services if n.endswith("/set_parameters")]
    assert len(names) >= 2
    accepted = switched = 0
    for k in range(300):
        name, size = rng.choice(names), 10.0 ** rng.uniform(-3, 10)
        key = rng.choice(("damping_ratio", "task.k_pos_x", "task.k_rot_z", "task.error_clip.x"))
        value = rng.choice((size, -size, float("nan"), float("inf"), rng.uniform(0, 3)))
        put = person.call(
            f"{name}/set_parameters",
            "rcl_interfaces/srv/SetParameters",
            {"parameters": [{"name": key, "value": {"type": 3, "double_value": value}}]},
        )
        accepted += put["results"][0]["successful"]
        if k % 10 == 9:
            other = rng.choice(names)
            switched += person.call(
                "controller_manager/switch_controller",
                "controller_manager_msgs/srv/SwitchController",
                {"activate_controllers": [other], "deactivate_controllers": [], "strictness": 1},
            )["ok"]
        for _ in range(40):
            node.tick()
            assert (np.abs(arm.model.dq) <= speed).all(), (k, name, key, value, node.governor.state)
    assert accepted > 10


def test_rclpy_that_cannot_decode_a_message_goes_on_with_the_next():
    with ros_pair() as (a, b, wait):
        box, sender = b.subscription("x", Flag, "command", depth=5), a.publisher("x", Flag, "command")

        def bad(_):
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

        b.node.work.put((bad, "a sample"))
        wait()
        sender.publish(Flag(True))
        end = time.monotonic() + 5
        while not (got := box.take()) and time.monotonic() < end:
            time.sleep(0.01)
        assert [g.message for g in got] == [Flag(True)]
        assert b.complaints() == [f"rclpy: 1 samples {DROPPED}"]
