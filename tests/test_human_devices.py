import contextlib
import os
import pty
import re
import struct
import termios
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from streams import NORTH, SELECT, SOUTH, SYN, TR, WEST, event, key, stick
from toys import PointReach

import sims
from controllers.transport import Bus, JointState, LoopbackTransport, PoseStamped
from robo_rl.errors import UserError
from robo_rl.experiment.console import PoseReader
from robo_rl.geometry import matrix
from robo_rl.human.device_files import MOST, DeviceFile, EventFile, HidSpaceMouse, TerminalKeys
from robo_rl.human.device_mapping import DEFAULTS, for_vendor, load_mapping
from robo_rl.human.devices import DeviceOperator, MappedDevice, open_device
from robo_rl.human.intervention import CORRECTION, PAUSE, POLICY, InterventionEnv, OperatorView
from robo_rl.human.leader_arm import LeaderArm, tool_of
from robo_rl.human.reading import Reading, command
from robo_rl.types import ActionAxis, ControlSpec

AXES = (
    *(ActionAxis(n, "m", -0.02, 0.02, "delta", "base") for n in ("dx", "dy", "dz")),
    ActionAxis("gripper", "m", 0.0, 0.08, "absolute"),
)
SPEC = ControlSpec("toy", "t", AXES, 0.02, 100)


@pytest.fixture
def pipe():
    r, w = os.pipe()
    yield r, w
    for fd in (r, w):
        with contextlib.suppress(OSError):
            os.close(fd)


def gamepad(fd, **more):
    return MappedDevice(EventFile(fd), replace(DEFAULTS["gamepad"], **more))


def test_a_gamepad_moves_nothing_until_its_dead_man_button_is_held(pipe):
    pad = gamepad(pipe[0])
    os.write(pipe[1], stick(1, -1) + stick(0, 0.03) + SYN)
    assert not pad.read().engaged and not pad.read().twist.any()
    os.write(pipe[1], key(TR) + key(SOUTH) + key(SOUTH, 0) + SYN)
    got = pad.read()
    assert got.engaged and np.allclose(got.twist, [1, 0, 0, 0, 0, 0]) and got.grip == -1  # 0.03 is rest
    os.write(pipe[1], key(TR, 0))
    assert not pad.read().engaged and not pad.read().twist.any()


def test_an_axis_begins_at_nothing_beyond_its_dead_zone(pipe):
    pad = gamepad(pipe[0], dead_man="", dead_zone=0.2, scale=0.5)
    os.write(pipe[1], stick(1, -0.21))
    assert 0 < pad.read().twist[0] < 0.01
    os.write(pipe[1], stick(1, -0.6))
    assert abs(pad.read().twist[0] - 0.25) < 1e-3


def test_a_press_is_a_mark_once_and_a_key_that_repeats_is_no_second_press(pipe):
    pad = gamepad(pipe[0])
    os.write(pipe[1], key(NORTH) + key(NORTH, 2) + key(NORTH, 2))
    assert pad.read().marks == ("success",) and pad.read().marks == ()
    os.write(pipe[1], key(NORTH, 0) + key(NORTH) + key(WEST))
    assert pad.read().marks == ("success", "failure")


@pytest.mark.parametrize(
    "vendor, success, failure", [(0x045E, WEST, NORTH), (0x054C, NORTH, WEST), (0, NORTH, WEST)]
)
def test_the_upper_button_marks_a_success_whatever_code_the_driver_gives_it(pipe, vendor, success, failure):
    """xpad says BTN_NORTH of the button labelled X, which is the left one."""
    pad = MappedDevice(EventFile(pipe[0]), for_vendor(DEFAULTS["gamepad"], vendor))
    os.write(pipe[1], key(success))
    assert pad.read().marks == ("success",)
    os.write(pipe[1], key(failure))
    assert pad.read().marks == ("failure",)
    mine = replace(DEFAULTS["gamepad"], buttons={"BTN_NORTH": "success"})
    assert for_vendor(mine, vendor) == mine  # the kernel's names, as the file has them


def test_an_event_that_comes_in_two_halves_is_one(pipe):
    pad = gamepad(pipe[0], dead_man="")
    whole = stick(1, -1)
    os.write(pipe[1], whole[:10])
    assert not pad.read().engaged
    os.write(pipe[1], whole[10:])
    assert pad.read().twist[0] == 1


def test_events_that_the_kernel_dropped_leave_nothing_pressed(pipe):
    pad = gamepad(pipe[0])
    os.write(pipe[1], key(TR) + stick(1, -1) + SYN)
    assert pad.read().engaged
    os.write(pipe[1], event(0, 3, 0) + stick(0, 1) + SYN)  # among them the dead-man button's release
    got = pad.read()
    assert not got.engaged and not got.twist.any()


def test_a_device_that_floods_does_not_hold_up_the_loop(pipe):
    os.write(pipe[1], SYN * (MOST + 10))
    file = DeviceFile(pipe[0])
    assert len(file.packets(len(SYN))) == MOST and len(file.packets(len(SYN))) == 10


def test_a_space_mouse_is_read_by_its_reports(pipe):
    mouse = MappedDevice(HidSpaceMouse(pipe[0]), replace(DEFAULTS["spacemouse"], dead_zone=0.0))
    os.write(pipe[1], bytes([1]) + struct.pack("<3h", 0, -350, 175))
    assert np.allclose(mouse.read().twist, [1, 0, -0.5, 0, 0, 0])
    os.write(pipe[1], bytes([2]) + struct.pack("<3h", 0, 0, -350))
    assert np.allclose(mouse.read().twist, [1, 0, -0.5, 0, 0, 1])
    os.write(pipe[1], bytes([3, 1, 0]))
    assert mouse.read().grip == -1
    os.write(pipe[1], bytes([3, 3, 0]))
    got = mouse.read()
    assert got.marks == ("success",) and got.grip == -1  # button 0 is still the same press


def test_a_space_mouse_of_one_report_is_read_too(pipe):
    mouse = MappedDevice(HidSpaceMouse(pipe[0]), replace(DEFAULTS["spacemouse"], dead_zone=0.0))
    os.write(pipe[1], bytes([1]) + struct.pack("<6h", 0, -350, 0, 0, 0, -350))
    assert np.allclose(mouse.read().twist, [1, 0, 0, 0, 0, 1])


def test_a_typed_key_counts_for_a_moment():
    now, (ours, theirs) = [0.0], pty.openpty()
    keys = MappedDevice(TerminalKeys(theirs, lambda: now[0]), DEFAULTS["keyboard"], lambda: now[0])
    os.write(ours, b"wa")
    assert keys.read().twist[:2].tolist() == [1, 1]
    now[0] = 0.1
    os.write(ours, b"wy")
    got = keys.read()
    assert got.twist[0] == 1 and got.marks == ("success",)
    now[0] = 0.3
    assert not keys.read().engaged
    keys.close()
    os.close(ours)


def test_a_keyboard_without_a_terminal_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(6, "No such device or address")))
    with pytest.raises(UserError, match="start it in one, or name the keyboard's file"):
        TerminalKeys()


def test_a_terminal_is_as_it_was_after_its_keys_were_read():
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    keys = TerminalKeys(os.dup(theirs))
    assert not termios.tcgetattr(theirs)[3] & termios.ECHO
    keys.close()
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_a_keyboard_by_its_events_knows_that_a_key_is_up(pipe):
    keys = MappedDevice(EventFile(pipe[0]), DEFAULTS["keyboard"])
    os.write(pipe[1], key(17) + key(30))  # w, a
    assert keys.read().twist[:2].tolist() == [1, 1] and keys.read().engaged
    os.write(pipe[1], key(17, 0) + key(30, 0))
    assert not keys.read().engaged


def test_a_mapping_is_read_from_a_file_and_the_rest_is_the_devices_default(tmp_path, pipe):
    path = tmp_path / "mine.json"
    path.write_text('{"axes": {"ABS_Y": ["z", 0.5]}, "dead_man": "BTN_TL", "dead_zone": 0}')
    pad = MappedDevice(EventFile(pipe[0]), load_mapping(path, "gamepad"))
    os.write(pipe[1], stick(1, 1) + key(TR) + key(NORTH))
    got = pad.read()
    assert not got.engaged and got.marks == ("success",)
    os.write(pipe[1], key(0x136))
    assert np.allclose(pad.read().twist, [0, 0, 0.5, 0, 0, 0])


def test_the_mapping_that_the_page_shows_is_one(tmp_path):
    page = (Path(__file__).parent.parent / "docs/howto/teleoperate.md").read_text()
    path = tmp_path / "pad.json"
    path.write_text(re.search(r"```json\n(.*?)```", page, re.S)[1])
    assert load_mapping(path, "gamepad").dead_man == "BTN_TL"


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"axes": {"ABS_Q": ["x", 1]}}', "unknown mapping: axes 'ABS_Q'"),
        ('{"axes": {"ABS_Y": "x"}}', "needs .axis, factor"),
        ('{"axes": {"ABS_Y": ["x", 2]}}', r"factor must be in \[-1, 1\]"),
        ('{"buttons": {"BTN_TR": "grip"}}', "one input does one thing"),
        ('{"buttons": {"BTN_EAST": "jump"}}', "Allowed: .*success"),
        ('{"deadman": "BTN_TL"}', "did you mean 'dead_man'"),
        ('{"axes": {}}', "needs axes"),
        ('{"dead_zone": 1}', "dead_zone must be in"),
        ("[1]", "mine.json"),
    ],
)
def test_a_mapping_that_is_wrong_is_one_clear_line(tmp_path, text, words):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        load_mapping(path, "gamepad")


@pytest.mark.parametrize(
    "code, ends, won",
    [(NORTH, "terminated", True), (WEST, "terminated", False), (SELECT, "truncated", False)],
)
def test_a_mark_ends_the_episode_as_it_says(pipe, code, ends, won):
    env = PointReach(2, limit=100)
    wrapped = InterventionEnv(env, DeviceOperator(gamepad(pipe[0]), env.spec, 2), blend=0)
    wrapped.reset(seed=0)
    env.goal[:] = 99
    still = np.zeros((2, 2), np.float32)
    assert not wrapped.step(still)[4]["mark"].any()
    os.write(pipe[1], key(code))
    _, reward, terminated, truncated, info = wrapped.step(still)
    assert (terminated | truncated).tolist() == [True, False] and (
        terminated if ends == "terminated" else truncated
    )[0]
    assert info["success"].tolist() == [won, False] and reward.tolist() == [float(won), 0]
    _, reward, *_, info = wrapped.step(still)
    assert not info["mark"].any() and reward[0] == 0


def test_attention_lasts_from_the_dead_man_button_to_the_hand_back_and_stopping_in_between_is_part_of_it(
    pipe,
):
    now, env = [0.0], PointReach(1, limit=100)
    wrapped = InterventionEnv(
        env, DeviceOperator(gamepad(pipe[0]), env.spec, 1, rest=0.25, clock=lambda: now[0]), blend=0
    )
    wrapped.reset(seed=0)
    env.goal[:] = 99
    attended = []
    for t in range(10):
        now[0] = t * 0.1
        if t in (2, 5):
            os.write(pipe[1], key(TR, int(t == 2)))
        attended.append(bool(wrapped.step(np.zeros((1, 2), np.float32))[4]["attended"][0]))
    assert attended == [False] * 2 + [True] * 5 + [False] * 3


def test_taking_over_leaves_the_gripper_as_it_is(pipe):
    now = [0.0]
    operator = DeviceOperator(gamepad(pipe[0]), SPEC, 1, clock=lambda: now[0])
    closed = OperatorView(
        np.zeros((1, 4), np.float32), np.float32([[0, 0, 0, -1]]), np.zeros(1, bool), np.array([5])
    )
    os.write(pipe[1], key(TR))
    assert operator.intervene(closed).actions[0, 3] == -1
    os.write(pipe[1], key(SOUTH))
    assert operator.intervene(closed).actions[0, 3] == 1


@pytest.mark.parametrize("rest", [0.0, 0.5])
def test_a_gripper_that_is_turned_while_the_hand_stands_still_closes(pipe, rest):
    now, clock = [0.0], lambda: now[0]
    mouse = MappedDevice(HidSpaceMouse(pipe[0]), DEFAULTS["spacemouse"], clock)
    operator = DeviceOperator(mouse, SPEC, 1, rest=rest, clock=clock, alone=PAUSE)
    view = OperatorView(
        np.zeros((1, 4), np.float32), np.float32([[0, 0, 0, 1]]), np.zeros(1, bool), np.array([5])
    )
    assert operator.intervene(view).phase[0] == PAUSE
    now[0] = 10.0
    os.write(pipe[1], bytes([3, 1, 0]))
    driven = []
    for _ in range(60):
        said = operator.intervene(view)
        now[0] += 0.02
        if said.phase[0] == CORRECTION:
            driven.append(float(said.actions[0, 3]))
            view.executed[0] = said.actions[0]
    assert 25 <= len(driven) <= 26 + rest / 0.02 and set(driven) == {-1.0}
    os.write(pipe[1], bytes([1]) + struct.pack("<3h", 0, -350, 0))
    assert operator.intervene(view).actions[0].tolist() == [0.5, 0, 0, -1]  # and stays closed


def test_without_the_dead_man_button_the_gripper_does_not_turn(pipe):
    pad = gamepad(pipe[0])
    os.write(pipe[1], key(SOUTH) + key(SOUTH, 0) + SYN)
    assert pad.read().grip == 1 and not pad.read().engaged
    os.write(pipe[1], key(TR) + key(SOUTH) + key(SOUTH, 0) + SYN)
    assert pad.read().grip == -1


def test_a_device_unplugged_mid_motion_pauses_the_robot_and_keeps_it_paused(pipe):
    env = PointReach(1, limit=100)
    pad, now = gamepad(pipe[0]), [0.0]
    wrapped = InterventionEnv(env, DeviceOperator(pad, env.spec, 1, clock=lambda: now[0]), blend=0)
    wrapped.reset(seed=0)
    env.goal[:] = 99
    act = np.full((1, 2), 0.5, np.float32)
    assert wrapped.step(act)[4]["phase"][0] == POLICY
    os.write(pipe[1], stick(1, -1) + key(TR))
    assert wrapped.step(act)[4]["phase"][0] == CORRECTION
    os.close(pipe[1])
    at = env.pos.copy()
    for _ in range(30):
        now[0] += 0.1
        assert wrapped.step(act)[4]["phase"][0] == PAUSE
    assert np.array_equal(env.pos, at) and pad.gone


def test_letting_go_hands_back_after_a_moment(pipe):
    now = [0.0]
    operator = DeviceOperator(gamepad(pipe[0]), PointReach(1).spec, 1, rest=0.55, clock=lambda: now[0])
    env = InterventionEnv(PointReach(1, limit=100), operator, blend=0)
    env.reset(seed=0)
    os.write(pipe[1], stick(1, 1) + stick(1, 0) + key(TR))
    phases = []
    for t in range(12):
        now[0] = t * 0.1
        if t == 2:
            os.write(pipe[1], key(TR, 0))
        phases.append(int(env.step(np.zeros((1, 2), np.float32))[4]["phase"][0]))
    assert phases == [CORRECTION] * 7 + [POLICY] * 5


def test_a_leader_arm_engages_only_where_the_robot_is_and_moves_it_as_it_moves():
    tool, at = (np.array([0.4, 0, 0.2]), np.array([1.0, 0, 0, 0])), [np.array([0.5, 0, 0.2])]
    arm = LeaderArm(lambda: (at[0], np.array([1.0, 0, 0, 0]), 1.0), (0.02, 0.1))
    assert not arm.align(*tool) and not arm.read().engaged
    at[0] = np.array([0.41, 0, 0.2])
    assert arm.align(*tool)
    assert arm.read().twist.tolist() == [0] * 6  # taking over is no motion
    at[0] = np.array([0.42, 0, 0.195])
    assert np.allclose(arm.read().twist[:3], [0.5, 0, -0.25])
    arm.pose = lambda: None  # the topic is silent
    assert not arm.read().engaged
    arm.pose = lambda: (at[0], np.array([1.0, 0, 0, 0]), 1.0)
    assert not arm.read().engaged  # it must be aligned anew


def test_a_leader_that_turns_turns_the_robot():
    turn = [np.array([1.0, 0, 0, 0])]
    arm = LeaderArm(lambda: (np.zeros(3), turn[0], -1.0), (0.02, 0.2))
    arm.align(np.zeros(3), turn[0])
    arm.read()
    turn[0] = np.array([np.cos(0.05), 0, 0, np.sin(0.05)])
    assert np.allclose(arm.read().twist, [0, 0, 0, 0, 0, 0.5]) and arm.read().grip == -1


def test_a_leader_that_is_faster_than_the_robot_is_caught_up_with():
    at = [np.zeros(3)]
    arm = LeaderArm(lambda: (at[0], np.array([1.0, 0, 0, 0]), 1.0), (0.02, 0.1))
    arm.align(np.zeros(3), np.array([1.0, 0, 0, 0]))
    at[0] = np.array([0.05, 0, 0])
    assert np.allclose([arm.read().twist[0] for _ in range(4)], [1, 1, 0.5, 0])


def test_the_tools_pose_is_read_off_the_state():
    env = sims.make("mujoco", "pick_cube", 3, threads=1)
    obs, _ = env.reset(seed=0)
    for _ in range(20):
        obs, *_ = env.step(np.random.default_rng(0).uniform(-1, 1, (3, 7)).astype(np.float32))
    for i in range(3):
        position, quat = tool_of(obs["state"][i], env.spec.state_names)
        assert np.allclose(position, env.scene.tcp[:, i], atol=1e-6)
        assert np.allclose(matrix(quat), env.scene.frame[:, :3, i].T, atol=1e-4)
    with pytest.raises(UserError, match="a leader arm needs a state"):
        tool_of(np.zeros(2), ("x", "y"))


def test_an_arm_on_the_wire_that_falls_silent_is_no_leader():
    now = [5.0]
    bus = Bus(lambda: now[0])
    arm, ours = LoopbackTransport(bus, "arm"), LoopbackTransport(bus, "console")
    pose, grip = arm.publisher("current_pose", PoseStamped), arm.publisher("gripper/joint_states", JointState)
    heard = PoseReader(ours)
    assert heard() is None
    pose.publish(PoseStamped(0.0, "base", (0.4, 0.0, 0.2), (0.0, 1.0, 0.0, 0.0)))
    assert heard() == ((0.4, 0.0, 0.2), (0.0, 1.0, 0.0, 0.0), 1.0)
    grip.publish(JointState(0.0, ("gripper",), (0.2,)))
    assert heard()[2] == -1.0
    now[0] += 0.3
    assert heard() is None


def test_a_reading_becomes_a_command_of_the_envs_axes():
    got = command(Reading(np.array([1, -1, 0.5, 1, 1, 1], np.float32), -1.0, True), SPEC, 0.5)
    assert got.tolist() == [0.5, -0.5, 0.25, -1.0]


def test_each_axis_is_commanded_as_what_it_is():
    axes = (
        ActionAxis("torque", "1", -2, 2, "absolute"),
        ActionAxis("joint1", "rad", -3, 3, "absolute"),
        ActionAxis("gripper", "m", 0, 0.08, "absolute"),
        ActionAxis("panda_finger_joint1", "m", 0, 0.04, "absolute"),
    )
    spec, last = ControlSpec("toy", "t", axes, 0.1, 100), np.float32([0.3, 0.5, 1, 1])
    got = command(Reading(np.float32([-1, 0.5, 1, 0, 0, 0]), -1.0, True), spec, last=last)
    assert np.allclose(got, [-1, 0.55, -1, -1])  # a torque is the stick, a position goes on from where it is


@pytest.mark.parametrize(
    "text, words",
    [
        ("gamepad:/dev/input/event99", "cannot open /dev/input/event99"),
        ("mouse:/x", "Allowed"),
        ("gamepad:/a,/b", "a device is kind:file"),
        ("leader:left,mapping=x", "has no mapping"),
        ("leader:left", "no device of this"),
        ("gamepad:/dev/input/event99,mapping=/none.json", "none.json"),
        ("spacemouse", "no spacemouse is plugged in"),
    ],
)
def test_a_device_that_is_not_there_is_one_clear_line(text, words):
    with pytest.raises(UserError, match=words):
        open_device(text)
