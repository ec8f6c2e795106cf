"""Feetech servos: the wire's packets, a bus on which things go wrong, an SO-101 behind the bridge's governor,
and its commands."""

import json
import math
import os
import random
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from servo_bus import MemoryPort, Pty, Servo, ServoLine

from controllers.bridge import AXES, Bridge, PolicyInterface
from controllers.data_columns import action_columns, state_columns
from controllers.feetech import (
    GOAL_POSITION,
    HOMING_OFFSET,
    PRESENT,
    PRESENT_POSITION,
    SYNC_READ,
    TORQUE_ENABLE,
    Packets,
    SerialPort,
    ServoBus,
    error_text,
    packet,
    signed,
    with_sign,
)
from controllers.model import arm_model
from controllers.policy_client import InProcessPolicy
from controllers.robot import PRESETS, load_robot
from controllers.servo_arm import LEAD, TURN, ServoArm
from controllers.servo_file import GripperServo, read_driver
from controllers.transport import Bus, Flag, JointState, LoopbackTransport, Numbers
from robo_rl.cli import main
from robo_rl.errors import UserError
from robo_rl.experiment.deploy import limits_of
from robo_rl.experiment.robot_home import HomeOptions, home_robot

SO = load_robot("so101")
WHOLE = {
    "low": [0.05, -0.4, -0.02],
    "high": [0.5, 0.4, 0.5],
    "speed": [0.5, 4.0],
    "without": {"force": "nothing measures it: small servos"},
    "command": "forward_position",
}


def line_at(q=SO.home, gripper=2600, **kw):
    """Six servos whose joints are at q [5] [rad]."""
    steps = [round(2048 + x / TURN) for x in q]
    return ServoLine([Servo(k + 1, s) for k, s in enumerate([*steps, gripper])], **kw)


def bus_on(line, timeout=0.02):
    port = MemoryPort(line)
    return ServoBus(port, timeout, lambda: port.now)


class Driven:
    """The driver and a client on one wire; time passes in `run` alone."""

    def __init__(self, line=None, robot=SO):
        self.t, self.line = 0.0, line or line_at()
        wires = Bus(lambda: self.t)
        self.arm = ServoArm(robot, bus_on(self.line, 0.005), LoopbackTransport(wires, "servos"), 0.01)
        self.client = LoopbackTransport(wires, "client")
        self.goal = None  # a publisher, once this client commands
        self.joints = self.client.subscription("joint_states", JointState)

    def run(self, seconds, goal=None):
        for _ in range(round(seconds / 0.01)):
            if goal is not None:
                self.goal = self.goal or self.client.publisher(
                    "forward_position_controller/commands", Numbers, "command"
                )
                self.goal.publish(Numbers(tuple(goal)))
            self.line.turn(0.01)
            self.t += 0.01
            self.arm.step()

    def q(self):
        return np.array(self.joints.latest().message.position)


# ---- packets -----------------------------------------------------------------------------------------------


def test_packets_are_those_of_the_manuals_examples():
    """Feetech's manual: read 2 bytes at 0x38 of servo 1; ping servo 1; the answer that a servo at 2072
    gives."""
    assert packet(1, 2, bytes((0x38, 2))) == bytes.fromhex("ffff0104023802be")
    assert packet(1, 1) == bytes.fromhex("ffff010201fb")
    assert Packets(Counter()).feed(bytes.fromhex("ffff0104001808da")) == [(1, 0, b"\x18\x08")]
    assert (
        signed(0x8005, 15) == -5
        and with_sign(-5, 15) == 0x8005
        and signed(5, 15) == 5
        and signed(with_sign(-120, 11), 11) == -120
    )
    assert error_text(0b100101) == "voltage, temperature, overload" and error_text(0) == ""


def test_packets_come_out_of_pieces_noise_and_spoilt_neighbours():
    good, rng = [packet(k, 0, bytes((k, 2 * k))) for k in range(1, 6)], random.Random(0)
    spoilt = good[1][:-1] + bytes((good[1][-1] ^ 4,))
    stream = b"\x00\x13\xff" + good[0] + b"\xff" + spoilt + good[2] + b"\xff\xff\x07\xf0" + good[3] + good[4]
    for _ in range(20):
        faults = Counter()
        packets, out, at = Packets(faults), [], 0
        while at < len(stream):
            step = rng.randint(1, 7)
            out += packets.feed(stream[at : at + step])
            at += step
        assert [p[0] for p in out] == [1, 3, 4, 5] and faults["checksum"] == 1 and faults["noise"]
        assert len(packets.waiting) < 80


def test_any_bytes_at_all_leave_the_reader_bounded_and_able_to_read_on():
    rng, packets = random.Random(1), Packets(Counter())
    for _ in range(3000):
        packets.feed(
            rng.randbytes(rng.randint(1, 40))
            if rng.random() < 0.7
            else b"\xff\xff\x01" + bytes((rng.randint(0, 255),))
        )
        assert len(packets.waiting) <= 200
    packets.feed(bytes(80))
    assert packets.feed(packet(9, 0, b"ab"))[-1] == (9, 0, b"ab")


# ---- the bus -----------------------------------------------------------------------------------------------


def test_reads_and_writes_reach_their_servo_and_a_synchronous_one_reaches_all():
    line = line_at()
    bus = bus_on(line)
    assert (
        bus.ping(3) and not bus.ping(77) and bus.read(2, PRESENT_POSITION) == round(2048 + SO.home[1] / TURN)
    )
    assert bus.write(4, TORQUE_ENABLE, 1) and line.servos[4].memory[40] == 1
    got = bus.sync_read(range(1, 7), PRESENT)
    assert sorted(got) == [1, 2, 3, 4, 5, 6] and got[6][6] == 74 and not bus.faults["checksum"]
    bus.sync_write(GOAL_POSITION, {1: 1000, 5: 3000})
    assert [line.servos[k].number(42) for k in (1, 5)] == [1000, 3000]


def test_a_missing_servo_a_spoilt_answer_and_a_foreign_one_cost_their_own_answer_alone():
    line = line_at()
    bus = bus_on(line, 0.01)
    line.silent = {2}
    assert (
        sorted(bus.sync_read(range(1, 7), PRESENT)) == [1, 3, 4, 5, 6]
        and bus.faults["no answer of servo 2"] == 1
    )
    line.silent, line.broken = (
        set(),
        lambda data: data[:-2] + bytes((data[-2] ^ 1, data[-1])) if data[2] == 4 else data,
    )
    assert sorted(bus.sync_read(range(1, 7), PRESENT)) == [1, 2, 3, 5, 6] and bus.faults["checksum"] == 1
    line.broken = lambda data: packet(9, 0, b"12345678") + data[:3] if data[2] == 1 else data
    assert 1 not in bus.sync_read(range(1, 7), PRESENT) and bus.faults["foreign"] == 1
    line.broken = lambda data: data
    assert len(bus.sync_read(range(1, 7), PRESENT)) == 6


def test_bit_errors_at_any_rate_never_give_a_number_that_no_servo_sent():
    """A checksum of one byte lets 1 in 256 spoilt packets through at worst: two errors in one byte column;
    single bits never pass."""
    line, rng = line_at(), random.Random(2)
    bus, truth = bus_on(line, 0.003), {k: bytes(s.memory[56:64]) for k, s in line_at().servos.items()}

    def flip(data):
        at = rng.randrange(4, len(data)) if rng.random() < 0.3 else None
        return data if at is None else data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]

    line.broken, seen = flip, 0
    for _ in range(60):
        for id, data in bus.sync_read(range(1, 7), PRESENT).items():
            assert data == truth[id]
            seen += 1
    assert seen > 150 and bus.faults["checksum"] > 30


# ---- the driver --------------------------------------------------------------------------------------------


def test_joint_states_have_signs_zeros_and_units_and_come_once_a_period():
    driver = {"servos": [{"id": 1, "sign": -1, "zero": 2000}, *({"id": k} for k in (2, 3, 4, 5))]}
    robot = replace(SO, driver=read_driver(driver, SO.joints, Path()))
    line = line_at((0.0,) * 5)
    line.servos[1].memory[58:60] = with_sign(-100, 15).to_bytes(2, "little")
    there = Driven(line, robot)
    there.run(0.1)
    m = there.joints.latest().message
    assert (
        m.names == SO.joints
        and m.position[0] == pytest.approx(-48 * TURN)
        and m.velocity[0] == pytest.approx(100 * TURN)
    )
    assert m.position[1:] == pytest.approx([0.0] * 4) and 2 * math.pi / 4096 == TURN
    before = there.arm.bus.port.line.random.getstate()
    there.arm.step()
    assert there.arm.bus.port.line.random.getstate() == before  # its period is not over


def test_torque_goes_on_where_the_arm_is_with_the_first_command_and_a_goal_is_followed():
    there = Driven()
    there.run(0.1)
    assert not any(s.memory[40] for s in there.line.servos.values()) and not there.line.written
    goal = np.array(SO.home) + 0.2
    there.run(0.01, goal)
    first = [w for w in there.line.written if w[1] == 42][:6]
    assert [int.from_bytes(d, "little") for _, _, d in first] == [round(2048 + x / TURN) for x in SO.home] + [
        2600
    ]
    assert all(s.memory[40] == 1 for s in there.line.servos.values())
    there.run(0.5, goal)
    assert np.abs(there.q() - goal).max() < 2 * TURN and not +there.arm.problems


def test_what_makes_no_sense_moves_nothing_and_a_goal_is_cut_to_range_and_lead():
    there = Driven()
    there.run(0.02)
    for bad in ((0.0,) * 4, (math.nan,) * 5, ()):
        there.run(0.02, bad)
    assert there.arm.problems["commands that make no sense"] == 6 and not there.line.written
    there.run(0.01, np.array(SO.home) + [0, 0, 0, 0, 2.0])
    assert there.line.servos[5].number(42) == round(2048 + LEAD / TURN)
    there.run(3.0, np.array([9.0, 0, 0, 0, 0]))
    assert (
        there.q()[0] == pytest.approx(SO.upper[0], abs=2 * TURN)
        and there.arm.problems["goals cut to the joints' range or lead"]
    )


def test_no_joint_state_is_told_and_no_goal_put_while_a_joint_does_not_answer():
    there = Driven()
    there.run(0.1, SO.home)
    there.line.silent = {3}
    there.joints.take()
    written = len(there.line.written)
    there.run(0.1, np.array(SO.home) + 0.1)
    assert not there.joints.take() and len(there.line.written) == written
    assert there.arm.problems["commands while a servo does not answer"] == 10
    there.line.silent = set()
    there.run(0.02, SO.home)
    assert there.joints.take() and len(there.line.written) > written


def test_the_e_stop_keeps_commands_from_the_servos_and_errors_of_a_servo_are_counted():
    there = Driven()
    estop = there.client.publisher("estop", Flag, "latched")
    there.run(0.05, SO.home)
    estop.publish(Flag(True))
    there.run(0.02)
    written = len(there.line.written)
    there.line.servos[2].error = 0b100000
    there.run(0.1, np.array(SO.home) + 0.2)
    assert len(there.line.written) == written and there.arm.problems["servo 2: overload"] == 10
    other = LoopbackTransport(there.client.bus, "other").publisher("estop", Flag, "latched")
    other.publish(Flag(False))  # it never said stop: the one that did still does
    there.run(0.05, SO.home)
    assert len(there.line.written) == written
    estop.publish(Flag(False))
    there.run(0.05, SO.home)
    assert len(there.line.written) > written


def test_of_two_commanders_neither_moves_the_servos():
    there = Driven()
    there.run(0.05, SO.home)
    written, second = len(there.line.written), LoopbackTransport(there.client.bus, "second")
    sender = second.publisher("forward_position_controller/commands", Numbers, "command")
    there.run(0.05, np.array(SO.home) + 0.1)
    sender.publish(Numbers(SO.home))
    there.run(0.02)
    assert (
        len(there.line.written) == written
        and there.arm.problems["commands while there is more than one commander"] == 6
    )
    second.close()
    there.run(0.05, SO.home)
    assert len(there.line.written) > written


def test_the_gripper_goes_with_the_joints():
    there = Driven()
    grip = there.client.publisher("gripper_position_controller/commands", Numbers, "command")
    said = there.client.subscription("gripper/joint_states", JointState)
    there.run(0.05, SO.home)
    assert said.latest().message.position[0] == pytest.approx((2600 - 2048) / (3200 - 2048))
    grip.publish(Numbers((0.25,)))
    there.run(0.4, SO.home)
    assert there.line.servos[6].number(56) == 2048 + 288 and said.latest().message.position[
        0
    ] == pytest.approx(0.25, abs=0.01)
    assert GripperServo(id=1, closed=3000, opened=2000).opening(2250) == 0.75


def test_a_check_names_what_a_servo_lacks_and_writes_nothing(tmp_path):
    line = line_at()
    line.silent = {1}
    line.servos[2].memory[3:5], line.servos[3].memory[33] = (1284).to_bytes(2, "little"), 1
    line.servos[4].memory[31:33], line.servos[5].memory[63] = with_sign(-40, 11).to_bytes(2, "little"), 75
    line.servos[6].error = 1
    rows = {
        j: {
            "id": k,
            "drive_mode": 0,
            "homing_offset": -40 if k == 4 else 0,
            "range_min": 1024,
            "range_max": 3072,
        }
        for k, j in enumerate([*SO.joints, "gripper"], 1)
    }
    (tmp_path / "cal.json").write_text(json.dumps(rows))
    robot = replace(SO, driver=read_driver({"calibration": "cal.json"}, SO.joints, tmp_path))
    arm = ServoArm(robot, bus_on(line, 0.003), LoopbackTransport(Bus(lambda: 0.0), "a"))
    found = {key: fault for key, _, fault in arm.check()}
    assert found["servo_1"] == found["range_1"] == "it does not answer"
    assert "model 1284" in found["servo_2"] and "mode 1" in found["servo_3"]
    assert (
        found["servo_4"] == ""
        and "75 degrees" in found["servo_5"]
        and "reports voltage" in found["servo_6"]
        and not line.written
    )
    rows["wrist_flex"]["homing_offset"] = 7
    (tmp_path / "cal.json").write_text(json.dumps(rows))
    again = ServoArm(
        replace(SO, driver=read_driver({"calibration": "cal.json"}, SO.joints, tmp_path)),
        arm.bus,
        arm.transport,
    )
    assert "homing offset is -40, the file's 7" in {k: f for k, _, f in again.check()}["servo_4"]
    line.silent, line.servos[1].memory[56:58] = set(), (100).to_bytes(2, "little")
    assert "rad" in {k: f for k, _, f in arm.check()}["range_1"]
    with pytest.raises(UserError, match="servo 9 does not answer|does not confirm"):
        line.silent = {1, 2, 3, 4, 5, 6}
        arm.release()


# ---- the file ----------------------------------------------------------------------------------------------


def test_percents_of_a_calibrated_joint_are_those_that_lerobot_records(tmp_path):
    """Its motors' bus: 200 (steps - min) / (max - min) - 100, with the other sign where drive_mode is 1."""
    low, high = np.array([[900, 2900], [1100, 3300], [700, 2701], [1024, 3072], [5, 4090]]).T
    flips = np.array([0, 0, 1, 0, 0])
    rows = {
        j: {"id": k + 1, "drive_mode": int(f), "homing_offset": 0, "range_min": int(a), "range_max": int(b)}
        for k, (j, f, a, b) in enumerate(zip(SO.joints, flips, low, high, strict=True))
    }
    (tmp_path / "cal.json").write_text(json.dumps(rows))
    robot = replace(SO, driver=read_driver({"calibration": "cal.json"}, SO.joints, tmp_path))
    five, names = ("absolute",) * 5, tuple(f"{j}.pos" for j in SO.joints)
    columns = action_columns(names, SO.joints, ("%",) * 5, five, (), SO.joints, 30, robot.percent)
    seen = state_columns(names, SO.joints, (), columns, ("%",) * 5, (), robot.percent)
    zero, size = np.array([s.zero for s in robot.driver.servos]), np.array([c.factor for c in columns])
    assert size.tolist() == [c.factor for c in seen]
    for share in (0, 0.3, 0.5, 1):
        steps = low + share * (high - low)
        told = (200 * (steps - low) / (high - low) - 100) * np.where(flips, -1, 1)
        assert size * (steps - zero) * 2 * np.pi / 4096 == pytest.approx(told, abs=0.11)  # a step is 0.1 %
    with pytest.raises(
        UserError, match=r"shoulder_pan.pos is in % of the joint's calibrated range: name the"
    ):
        action_columns(
            names, SO.joints, ("%",) * 5, five, (), SO.joints, 30, replace(SO, driver=None).percent
        )


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        ({"servos": [{"id": 1}]}, "5 joints need as many servos, got 1"),
        ({}, "give servos, or a calibration"),
        ([], "driver is an object"),
        ({"servos": [{"id": 1}] * 5}, "each servo has its own id"),
        ({"servos": [{"id": k, "sign": 2} for k in range(5)]}, "sign of servo 0"),
        ({"servos": [{"id": 300}]}, "servo id must be in"),
        ({"servos": 3}, "servos is a list"),
        ({"servos": [{}]}, "lacks id"),
        ({"servos": [{"id": 1.5}]}, "whole numbers"),
        ({"servos": [{"id": k} for k in range(5)], "kind": "dynamixel"}, "kind is feetech"),
        ({"servos": [{"id": k} for k in range(5)], "baud": 12}, "baud must be one of 1000000"),
        ({"port": 1, "speed": 2}, "got speed"),
        (
            {"servos": [{"id": k} for k in range(5)], "gripper": {"id": 9, "closed": 5, "opened": 5}},
            "must differ",
        ),
        ({"servos": [{"id": k} for k in range(5)], "gripper": {"id": 9}}, "lacks closed, opened"),
        ({"calibration": "no.json"}, "no.json"),
        ({"servos": [{"id": k} for k in range(5)], "port": 7}, "port is a text"),
    ],
)
def test_a_driver_that_makes_no_sense_is_one_clear_line(tmp_path, driver, says):
    with pytest.raises(UserError, match=says) as e:
        read_driver(driver, SO.joints, tmp_path)
    assert "\n" not in str(e.value)


def test_a_calibration_of_lerobot_gives_zeros_in_the_middle_and_a_bad_one_is_named(tmp_path):
    rows = {
        j: {"id": k, "drive_mode": 0, "homing_offset": 5 * k, "range_min": 700 + k, "range_max": 3300 + k}
        for k, j in enumerate([*SO.joints, "gripper"], 1)
    }
    (tmp_path / "cal.json").write_text(json.dumps(rows))
    driver = read_driver({"port": "/dev/ttyUSB1", "calibration": "cal.json"}, SO.joints, tmp_path)
    assert [(s.id, s.zero, s.offset, s.sign) for s in driver.servos[:2]] == [
        (1, 2001, 5, 1),
        (2, 2002, 10, 1),
    ]
    assert (driver.gripper.closed, driver.gripper.opened, driver.port) == (706, 3306, "/dev/ttyUSB1")
    rows["wrist_flex"]["range_max"] = rows["wrist_flex"]["range_min"]
    (tmp_path / "cal.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match="range_min and range_max of wrist_flex are equal"):
        read_driver({"calibration": "cal.json"}, SO.joints, tmp_path)
    del rows["elbow_flex"]
    (tmp_path / "cal.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match="elbow_flex needs whole numbers id, homing_offset"):
        read_driver({"calibration": "cal.json"}, SO.joints, tmp_path)


# ---- behind the bridge's governor, and on a terminal device ------------------------------------------------


def so_file(folder, port="/dev/ttyACM0", **cell):
    raw = json.loads((PRESETS / "so101.json").read_text())
    raw["model"], raw["cell"], raw["driver"]["port"] = SO.model, WHOLE | cell, port
    (folder / "so101.json").write_text(json.dumps(raw))
    return str(folder / "so101.json")


def test_an_so101_is_homed_by_positions_through_the_governor_of_the_bridge(tmp_path):
    start = np.array(SO.home) + [0.3, 0.2, -0.2, 0.1, 0.4]
    there, said = Driven(line_at(start)), []

    def sleep(seconds):
        there.run(max(seconds, 0.01))

    home_robot(
        HomeOptions(file=so_file(tmp_path), speed=0.2, joint_speed=0.5),
        said.append,
        said.append,
        [],
        LoopbackTransport(there.client.bus, "home"),
        sleep,
    )
    assert (
        np.abs(there.q() - SO.home).max() < 0.02
        and "0.400 rad from home" in said[0]
        and "by positions" in said[0]
    )
    steps = [
        int.from_bytes(d, "little") for id, address, d in there.line.written if id == 5 and address == 42
    ]
    assert np.abs(np.diff(steps)).max() * TURN <= 0.5 * SO.velocity[4] * 0.03  # no jump


def test_a_servo_that_goes_silent_on_the_way_stops_the_bridges_governor(tmp_path):
    there, said = Driven(line_at(np.array(SO.home) + [0.5, 0, 0, 0, 0])), []

    def sleep(seconds):
        there.run(max(seconds, 0.01))
        if there.arm.has_torque and there.t > 1.2:
            there.line.silent = {2}

    with pytest.raises(UserError, match="did not come home: no (measured state|joint states)"):
        home_robot(
            HomeOptions(file=so_file(tmp_path), speed=0.1),
            said.append,
            said.append,
            [],
            LoopbackTransport(there.client.bus, "home"),
            sleep,
        )
    at = there.line.servos[1].number(42)
    there.run(0.3)
    assert there.line.servos[1].number(42) == at


@pytest.fixture
def pty():
    made = Pty(line_at())
    yield made
    if not made.over.is_set():
        made.unplug()


def test_a_terminal_device_carries_the_bus_slow_answers_are_dropped_and_an_unplugged_one_is_said(pty):
    bus = ServoBus(SerialPort(pty.path), 5.0)  # a busy machine answers late too
    assert len(bus.sync_read(range(1, 7), PRESENT)) == 6 and bus.read(4, HOMING_OFFSET) == 0
    bus.timeout, pty.line.delay = 0.02, 0.06
    assert bus.sync_read(range(1, 7), PRESENT) == {} and bus.faults["no answer of servo 1"] == 1
    pty.line.delay, bus.timeout = 0.0, 5.0
    time.sleep(0.5)
    pty.line.servos[1].memory[56:58] = (3000).to_bytes(2, "little")
    got = bus.sync_read(range(1, 7), PRESENT)
    # the late ones are not taken for these
    assert len(got) == 6 and int.from_bytes(got[1][:2], "little") == 3000
    assert bus.write(2, TORQUE_ENABLE, 1)
    pty.unplug()
    with pytest.raises(UserError, match=r"serial port .* is gone"):
        for _ in range(3):
            bus.sync_read(range(1, 7), PRESENT)
    for path, says in ((pty.path, "is the arm plugged in"), (os.devnull, "is no serial port")):
        with pytest.raises(UserError, match=says):
            SerialPort(path)


def test_the_check_and_the_release_reach_the_servos_on_the_files_port(pty, tmp_path, capsys):
    file, record = so_file(tmp_path, pty.path), tmp_path / "record.json"
    (tmp_path / "answers.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(
            [
                "robot",
                "check",
                file,
                "--servos",
                "--answers",
                str(tmp_path / "answers.json"),
                "--out",
                str(record),
            ]
        )
    found = {f["key"]: f["answer"] for f in json.loads(record.read_text())["findings"]}
    assert (
        [found[f"servo_{k}"] for k in range(1, 7)] == [True] * 6
        and found["range_3"] is True
        and not pty.line.written
    )
    pty.line.servos[2].memory[40] = 1
    with pytest.raises(SystemExit) as e:
        main(["robot", "drive", file, "--release"])
    assert (
        e.value.code == 0
        and "torque is off" in capsys.readouterr().out
        and pty.line.servos[2].memory[40] == 0
    )
    pty.line.silent = {4}
    with pytest.raises(SystemExit) as e:
        main(["robot", "drive", file, "--seconds", "0.1", "--domain", "77"])
    err = capsys.readouterr().err
    assert e.value.code == 2 and "Servo 4 (wrist_flex)" in err and "it does not answer" in err


def test_a_robot_without_servos_is_not_driven(capsys):
    for argv in (["drive", "fr3"], ["check", "sim", "--servos", "--answers", os.devnull]):
        with pytest.raises(SystemExit) as e:
            main(["robot", *argv])
        assert e.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_synchronous_read_asks_all_at_once():
    asked = []

    class Spy(MemoryPort):
        def write(self, data):
            asked.append(data)
            super().write(data)

    ServoBus(Spy(line_at())).sync_read([1, 2, 3], PRESENT)
    assert asked == [packet(0xFE, SYNC_READ, bytes((56, 8, 1, 2, 3)))]


def test_a_policy_drives_an_so101_through_the_bridge_and_its_gripper_too(tmp_path):
    robot, start = load_robot(so_file(tmp_path)), (0.0, 0.2, 0.2, 0.8, 0.0)
    there = Driven(line_at(start), robot)
    task = PolicyInterface(
        state_names=("ee_x", "ee_z", "gripper"),
        action_names=AXES,
        scale=(0.036,) * 3 + (0.18,) * 3,
        period=0.04,
    )
    wire, model = LoopbackTransport(there.client.bus, "bridge"), arm_model(robot)
    bridge = Bridge(robot, task, wire, model, limits_of(robot, 0.1), command="forward_position")
    there.run(0.05)
    bridge.begin(there.t)
    z = model.pos[2]
    policy = InProcessPolicy(lambda obs: np.tile(np.float32([0, 0, 0.4, 0, 0, 0, -1]), (4, 1)))
    for _ in range(30):
        bridge.tick(policy, there.t)
        there.run(0.04)
    assert bridge.governor.state == "ACTIVE" and not bridge.lost, bridge.report()
    assert (
        0.03 < model.pos[2] - z < 0.1
        and abs(model.pos[1]) < 0.01
        and bridge.observation_buffer.opening == pytest.approx(0.0, abs=0.01)
    )
    there.line.silent = {3}
    for _ in range(5):
        bridge.tick(policy, there.t)
        there.run(0.04)
    assert bridge.governor.state == "STOPPED" and "no measured state" in bridge.governor.reason


# ---- the same servos under others' drivers ---------------------------------------------------------------
# ROBO_RL_LEROBOT_PYTHON=/path/to/python pytest tests/test_servo_arm.py -m slow

OTHER = os.environ.get("ROBO_RL_LEROBOT_PYTHON", "")
LEROBOT_DRIVES = """
import sys, time
from lerobot.motors import Motor, MotorCalibration, MotorNormMode
from lerobot.motors.feetech import FeetechMotorsBus
names = ["shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper"]
motors = {n: Motor(k, "sts3215", MotorNormMode.DEGREES) for k, n in enumerate(names, 1)}
ranges = {n: MotorCalibration(id=k, drive_mode=0, homing_offset=0, range_min=1024, range_max=3072) for k, n in enumerate(names, 1)}
bus = FeetechMotorsBus(sys.argv[1], motors, calibration=ranges)
bus.connect()
bus.enable_torque()
bus.sync_write("Goal_Position", {"shoulder_pan": 30.0, "elbow_flex": -20.0})
time.sleep(0.6)
print(*bus.sync_read("Present_Position").values())
bus.disconnect()
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(not OTHER, reason="ROBO_RL_LEROBOT_PYTHON is not set")
def test_lerobots_own_driver_moves_the_same_servos_to_the_angles_that_ours_then_reads(pty):
    for servo in pty.line.servos.values():
        # a firmware that it accepts, and limits that agree with its calibration
        servo.memory[0:2] = bytes((3, 10))
        servo.memory[9:11], servo.memory[11:13] = (1024).to_bytes(2, "little"), (3072).to_bytes(2, "little")
    made = subprocess.run(
        [OTHER, "-c", LEROBOT_DRIVES, pty.path], capture_output=True, text=True, timeout=120, check=False
    )
    assert made.returncode == 0, made.stderr
    theirs = [float(x) for x in made.stdout.split()][:5]
    there = ServoArm(SO, ServoBus(SerialPort(pty.path), 0.2), LoopbackTransport(Bus(time.monotonic), "ours"))
    box = there.transport.subscription("joint_states", JointState)
    there.step()
    # it takes 4095 steps for a turn, ours 4096
    assert np.allclose(np.degrees(box.latest().message.position), theirs, atol=0.05)
    assert theirs[0] == pytest.approx(30.0, abs=0.1) and theirs[2] == pytest.approx(-20.0, abs=0.1)
