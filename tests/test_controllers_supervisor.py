"""The last line below the law: a law that does anything at all, in every state."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_controllers_tick import HOME, MODEL, ROBOT

from controllers.arm import SimArm, govern
from controllers.contracts import Command
from controllers.governor import ACTIVE, ARMED, DISARMED, HOLD, STOPPED, Governor
from controllers.law import Law, LawOptions, gravity_compensation
from controllers.limits import Limits
from controllers.supervisor import Supervisor, SupervisorLimits, supervised
from robo_rl.errors import UserError

SPEED, TORQUE = np.array(ROBOT.velocity), np.array(ROBOT.torque)


class Wild(Law):
    """A law that from some tick on does what it was told to do."""

    def __init__(self, wild):
        super().__init__(LawOptions(), ROBOT)
        self.wild, self.ticks = wild, 0

    def tick(self, model, dt):
        self.ticks += 1
        if self.ticks <= 50:
            return super().tick(model, dt)
        self.tau[:] = self.wild(self.ticks, model, self.tau)
        return self.tau.copy()


WILD = {
    "full torque": lambda k, model, tau: TORQUE,
    "ten times the torque": lambda k, model, tau: -10 * TORQUE,
    "a slow rise": lambda k, model, tau: tau + 0.9,
    "from side to side": lambda k, model, tau: 0.9 * TORQUE * (-1) ** (k // 40),
    "no weight": lambda k, model, tau: np.zeros(7),
    "negative damping": lambda k, model, tau: np.clip(
        model.bias + 60 * model.dq + 0.5, tau - 0.99, tau + 0.99
    ),
    "not a number": lambda k, model, tau: np.full(7, np.nan),
}


def arm_in(state, law):
    arm = SimArm(ROBOT)
    arm.law = law
    law.activate(arm.model)
    law.stand()
    governor = Governor(Limits(low=(None, None, None)), ROBOT)
    arm.supervisor = Supervisor(ROBOT, supervised(governor.limits))
    pose = tuple(arm.model.pos), tuple(arm.model.quat)
    for k in range(40):
        if k == 5 and state in (ARMED, ACTIVE, HOLD):
            governor.arm(arm.t)
        if k > 5 and state == ACTIVE or k == 6 and state == HOLD:
            governor.command(Command("one", arm.t, "base", *pose), arm.t)
        if k == 20 and state == STOPPED:
            governor.stop(arm.t)
        if k == 20 and state == HOLD:
            governor._trip(HOLD, "violations", "a test")
        govern(arm, governor)
    assert governor.state == state
    return arm, governor, pose


@pytest.mark.parametrize("name", WILD)
@pytest.mark.parametrize("state", [DISARMED, ARMED, ACTIVE, HOLD, STOPPED])
def test_whatever_the_law_asks_for_the_arm_stays_within_its_limits_and_comes_to_rest(state, name):
    arm, governor, pose = arm_in(state, Wild(WILD[name]))
    fastest = 0.0
    for _ in range(1500):
        if governor.state in (ARMED, ACTIVE):
            governor.command(Command("one", arm.t, "base", *pose), arm.t)
        torque = arm.torque.copy()
        govern(arm, governor)
        fastest = max(fastest, float((np.abs(arm.data.qvel[arm._dof]) / SPEED).max()))
        assert (np.abs(arm.torque) <= TORQUE).all() and np.abs(
            arm.torque - torque
        ).max() <= ROBOT.torque_rate * arm.dt + 1e-6
    assert fastest < 1.6, fastest  # it is measured a tick late, and the torque changes no faster than it may
    if arm.supervisor.reason:
        assert governor.state == STOPPED and (np.abs(arm.model.dq) < 0.02).all()


def test_a_stop_is_said_and_latches_until_a_person_resets_it():
    arm, governor, pose = arm_in(DISARMED, Wild(WILD["full torque"]))
    while not arm.supervisor.reason:
        govern(arm, governor)
    assert governor.state == STOPPED and governor.reason == arm.supervisor.reason
    assert "is asked for" in governor.reason and "N m" in governor.reason
    with pytest.raises(UserError, match="reset first"):
        governor.arm(arm.t)
    arm.use(Law(LawOptions(), ROBOT), False)
    for _ in range(1000):
        govern(arm, governor)
    assert governor.state == STOPPED and arm.supervisor.reason
    governor.reset(arm.t)
    place = np.array(arm.model.pos)
    for _ in range(1000):
        govern(arm, governor)
    assert governor.state == DISARMED and not arm.supervisor.reason
    assert np.linalg.norm(arm.model.pos - place) < 1e-3  # the law took the arm where it stood
    governor.arm(arm.t)
    for _ in range(300):
        governor.command(Command("one", arm.t, "base", tuple(place), tuple(arm.model.quat)), arm.t)
        govern(arm, governor)
    assert governor.state == ACTIVE


def test_an_arm_that_somebody_throws_is_braked_by_torques_in_disarmed():
    arm = SimArm(ROBOT, gravity_compensation())
    governor = Governor(Limits(low=(None, None, None)), ROBOT)
    arm.supervisor = Supervisor(ROBOT)
    arm.push([0, 120.0, 0, 0, 0, 0], 0.25)
    speeds = []
    for _ in range(2000):
        govern(arm, governor)
        speeds.append(float(np.linalg.norm(arm.twist()[:3])))
    assert max(speeds) > 1.0 and governor.state == STOPPED and "the tool moves at" in governor.reason
    assert speeds[-1] < 0.01


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m, t: (m, t), ""),
        (lambda m, t: (m, t + np.eye(7)[2] * 1e-3), ""),
        (lambda m, t: (m, t + np.eye(7)[2] * 1.1), "joint3 is asked for a change of 1100 N m/s, beyond 1000"),
        (lambda m, t: (m, t * np.nan), "joint1 is asked for"),
    ],
)
def test_what_is_asked_for_is_judged_by_size_and_change(change, says):
    MODEL.update(HOME, np.zeros(7))
    before = MODEL.bias.copy()
    _, torque = change(MODEL, before)
    assert Supervisor(ROBOT).fault(MODEL, torque, before, 1e-3).startswith(says)
    assert bool(Supervisor(ROBOT).fault(MODEL, torque, before, 1e-3)) == bool(says)


@pytest.mark.parametrize("joint", range(7))
def test_every_joints_speed_and_torque_count_at_their_own_limit(joint):
    one, bias = np.eye(7)[joint], np.zeros(7)
    wide = SupervisorLimits(tool_speed=(100.0, 100.0), torque_rate=100.0)
    for factor, beyond in ((1.29, False), (1.31, True), (-1.29, False), (-1.31, True)):
        MODEL.update(HOME, factor * SPEED * one)
        assert (
            Supervisor(ROBOT, wide)
            .fault(MODEL, bias, bias, 1e-3)
            .startswith(f"{ROBOT.joints[joint]} turns at")
            == beyond
        )
    MODEL.update(HOME, np.zeros(7))
    for factor, beyond in ((0.999, False), (1.001, True), (-0.999, False), (-1.001, True)):
        torque = factor * TORQUE * one
        assert (
            Supervisor(ROBOT, wide)
            .fault(MODEL, torque, torque, 1e-3)
            .startswith(f"{ROBOT.joints[joint]} is asked for")
            == beyond
        )


def test_a_joint_at_its_limit_is_within_it_and_the_one_furthest_beyond_its_own_is_named():
    bias, wide = np.zeros(7), SupervisorLimits(joint_speed=1.0, tool_speed=(100.0, 100.0), torque_rate=100.0)
    MODEL.update(HOME, SPEED)
    assert Supervisor(ROBOT, wide).fault(MODEL, bias, bias, 1e-3) == ""
    least, most = int(np.argmin(TORQUE)), int(np.argmax(TORQUE))
    torque = 1.1 * TORQUE
    torque[least] = 1.2 * TORQUE[least]
    assert least != most and torque[least] < torque[most]
    MODEL.update(HOME, bias)
    assert (
        Supervisor(ROBOT, wide)
        .fault(MODEL, torque, torque, 1e-3)
        .startswith(f"{ROBOT.joints[least]} is asked for")
    )


@pytest.mark.parametrize(
    ("twist", "limits", "beyond"),
    [
        ((1.1, 0.0), (1.0, 9.0), True),
        ((0.9, 8.0), (1.0, 9.0), False),
        ((0.9, 1.1), (9.0, 1.0), True),
        ((8.0, 0.9), (9.0, 1.0), False),
    ],
)
def test_the_tools_speed_and_its_turning_have_a_limit_each(twist, limits, beyond):
    for axis in range(3):
        v = np.zeros(6)
        v[axis], v[3 + axis] = twist
        model = SimpleNamespace(dq=np.ones(7), jac=np.repeat(v[:, None] / 7, 7, 1))
        o = SupervisorLimits(joint_speed=100.0, tool_speed=limits)
        said = Supervisor(ROBOT, o).fault(model, np.zeros(7), np.zeros(7), 1e-3)
        assert said.startswith("the tool moves at") == beyond == bool(said)


def test_the_torques_of_a_stop_are_gravity_and_damping_within_size_and_rate():
    s = Supervisor(ROBOT)
    s.reason = "a test"
    MODEL.update(HOME, 0.1 * SPEED)
    wanted = MODEL.bias - 0.05 * TORQUE
    assert np.allclose(s.allowed(MODEL, np.full(7, 99.0), wanted, 1e-3), wanted)
    assert np.allclose(s.allowed(MODEL, np.full(7, 99.0), wanted + 5, 1e-3), wanted + 4)
    assert np.allclose(s.allowed(MODEL, np.full(7, 99.0), wanted - 5, 1e-3), wanted - 4)
    MODEL.update(HOME, -0.5 * SPEED)
    s.damping = 100 * s.damping
    assert np.allclose(s.allowed(MODEL, np.zeros(7), TORQUE - 0.5, 1e-3), TORQUE)
    MODEL.update(HOME, np.full(7, np.nan))
    assert s.allowed(MODEL, np.zeros(7), wanted, 1e-3).tolist() == wanted.tolist()
    MODEL.update(HOME, np.zeros(7))


def test_the_supervisor_stands_above_the_governor_at_every_speed():
    for speed, joint in ((0.5, 1.0), (3.75, 1.1)):
        limits = Limits(measured_speed=(speed, 4 * speed), joint_speed=joint)
        o = supervised(limits)
        assert o.tool_speed[0] > speed and o.tool_speed[1] > 4 * speed and o.joint_speed > joint
        default = SupervisorLimits()  # and where that is already above, no farther than need be
        for got, least, below in zip(
            (*o.tool_speed, o.joint_speed),
            (*default.tool_speed, default.joint_speed),
            (speed, 4 * speed, joint),
            strict=True,
        ):
            assert got == least or got < 1.3 * below


@pytest.mark.parametrize(
    "bad",
    [
        {"joint_speed": 0.0},
        {"torque": math.inf},
        {"torque": 100.5},
        {"tool_speed": (0.0, 1.0)},
        {"tool_speed": (1.0, 100.5)},
        {"tool_speed": (100.5, 1.0)},
        {"damping": -1.0},
    ],
)
def test_limits_that_are_none_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        SupervisorLimits(**bad)
    assert replace(SupervisorLimits(), torque=0.5).torque == 0.5
