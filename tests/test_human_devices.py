import contextlib
import os
import struct

import numpy as np
import pytest
from toys import PointReach

import sims
from controllers.transport import Bus, JointState, LoopbackTransport, PoseStamped
from robo_rl.errors import UserError
from robo_rl.experiment.console import PoseReader
from robo_rl.geometry import matrix
from robo_rl.human.devices import (
    DeviceOperator,
    Gamepad,
    Keyboard,
    LeaderArm,
    Reading,
    SpaceMouse,
    command,
    open_device,
    tool_of,
)
from robo_rl.human.intervention import CORRECTION, PAUSE, POLICY, InterventionEnv
from robo_rl.types import ActionAxis, ControlSpec

AXES = (*(ActionAxis(n, "m", -0.02, 0.02, "delta", "base") for n in ("dx", "dy", "dz")),
        ActionAxis("gripper", "m", 0.0, 0.08, "absolute"))
SPEC = ControlSpec("toy", "t", AXES, 0.02, 100)


@pytest.fixture
def pipe():
    r, w = os.pipe()
    yield r, w
    for fd in (r, w):
        with contextlib.suppress(OSError):
            os.close(fd)


def js(kind, number, value):
    return struct.pack("<IhBB", 0, value, kind, number)


def test_a_gamepad_is_read_by_the_kernels_protocol(pipe):
    pad = Gamepad(pipe[0])
    assert not pad.read().engaged
    os.write(pipe[1], js(0x82, 1, 0) + js(2, 1, -32767) + js(2, 0, 1000) + js(1, 0, 1) + js(1, 0, 0))
    got = pad.read()
    assert got.engaged and got.twist.tolist() == [1, 0, 0, 0, 0, 0] and got.grip == -1  # 1000 is rest
    os.write(pipe[1], js(2, 1, 0))
    assert not pad.read().engaged


def test_a_space_mouse_is_read_by_its_reports(pipe):
    mouse = SpaceMouse(pipe[0])
    os.write(pipe[1], bytes([1]) + struct.pack("<3h", 0, -350, 175))
    assert np.allclose(mouse.read().twist, [1, 0, -0.5, 0, 0, 0])
    os.write(pipe[1], bytes([2]) + struct.pack("<3h", 0, 0, -350))
    assert np.allclose(mouse.read().twist, [1, 0, -0.5, 0, 0, 1])
    os.write(pipe[1], bytes([3, 1]))
    assert mouse.read().grip == -1


def test_a_typed_key_counts_for_a_moment(pipe):
    now = [0.0]
    keys = Keyboard(pipe[0], lambda: now[0])
    os.write(pipe[1], b"wa")
    assert keys.read().twist[:2].tolist() == [1, 1]
    now[0] = 0.1
    os.write(pipe[1], b"wg")
    got = keys.read()
    assert got.twist[0] == 1 and got.grip == -1
    now[0] = 0.3
    assert not keys.read().engaged


def test_a_device_unplugged_mid_motion_pauses_the_robot_and_keeps_it_paused(pipe):
    env = PointReach(1, limit=100)
    pad, now = Gamepad(pipe[0]), [0.0]
    wrapped = InterventionEnv(env, DeviceOperator(pad, env.spec, 1, clock=lambda: now[0]), blend=0)
    wrapped.reset(seed=0)
    env.goal[:] = 99
    act = np.full((1, 2), 0.5, np.float32)
    assert wrapped.step(act)[4]["phase"][0] == POLICY
    os.write(pipe[1], js(2, 1, -32767))
    assert wrapped.step(act)[4]["phase"][0] == CORRECTION
    os.close(pipe[1])
    at = env.pos.copy()
    for _ in range(30):
        now[0] += 0.1
        assert wrapped.step(act)[4]["phase"][0] == PAUSE
    assert np.array_equal(env.pos, at) and pad.gone


def test_letting_go_hands_back_after_a_moment(pipe):
    now = [0.0]
    operator = DeviceOperator(Gamepad(pipe[0]), PointReach(1).spec, 1, rest=0.55, clock=lambda: now[0])
    env = InterventionEnv(PointReach(1, limit=100), operator, blend=0)
    env.reset(seed=0)
    os.write(pipe[1], js(2, 1, 32767) + js(2, 1, 0))
    os.write(pipe[1], js(1, 5, 1))
    phases = []
    for t in range(12):
        now[0] = t * 0.1
        if t == 2:
            os.write(pipe[1], js(1, 5, 0))
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


@pytest.mark.parametrize("text, words", [("gamepad:/dev/input/js99", "cannot open /dev/input/js99"), ("mouse:/x",
                                                                                                      "Allowed"),
                                         ("gamepad", "a device is kind:file")])
def test_a_device_that_is_not_there_is_one_clear_line(text, words):
    with pytest.raises(UserError, match=words):
        open_device(text)
