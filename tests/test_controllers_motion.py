"""Acceleration and jerk of the simulated arm, as its state shows them, in the events in which a set point
alone says little."""

import math
from dataclasses import replace

import numpy as np
import pytest
from test_controllers_tick import ROBOT

from controllers.arm import SimArm, govern
from controllers.contracts import Command
from controllers.governor import ACTIVE, DISARMED, HOLD, STOPPED, Governor
from controllers.law import Law, LawOptions, joint_impedance, operational_space
from controllers.limits import Limits
from controllers.model import arm_model
from controllers.pace import law_at
from controllers.supervisor import Supervisor, supervised
from robo_rl.experiment.arm import law_options, with_stiff_joints

STIFF = with_stiff_joints(ROBOT, "joint")
LAWS = {
    "impedance": LawOptions(),
    "stiff impedance": law_at(0.25),
    "operational space": operational_space(),
    "joints, by poses": law_options("joint", 0.25),
    "joints, by joints": law_options("joint", 0.25),
}
LIMITS = Limits(low=(None, None, None), step=(0.036, 0.18))
MEANT = arm_model(ROBOT)


class Drive:
    """One governed arm that somebody commands at 50 Hz; v [T, 6]: its tool's measured twist since `begin`."""

    def __init__(self, name, q=None):
        self.joints, options = name == "joints, by joints", LAWS[name]
        robot = STIFF if name.startswith("joints") else ROBOT
        self.arm = SimArm(robot, options, servo=name.startswith("joints"), q=q)
        self.governor = Governor(LIMITS, robot)
        self.arm.supervisor = Supervisor(robot, supervised(LIMITS))
        self.v, self.stamp = [], 0.0
        self.run(0.05)
        self.governor.arm(self.arm.t)
        self.home = np.array(self.arm.model.pos), tuple(self.arm.model.quat)

    def run(self, seconds, to=None):
        """`to`: of the tool, from its home [m]; None: nobody commands."""
        for k in range(round(seconds / self.arm.dt)):
            if to is not None and k % 20 == 0:
                self.command(np.array(to, float))
            govern(self.arm, self.governor)
            self.v.append(self.arm.twist().copy())

    def command(self, to):
        it, t = self.governor, self.arm.t
        if self.joints:  # joints 1, 2 and 6 take the tool about as far along y, x and z
            now = np.array(it.motion.joint_target if it.motion.joint_target is not None else self.arm.model.q)
            way = np.array(ROBOT.home) + np.array([2.0 * to[1], 2.0 * to[0], 0, 0, 0, 2.0 * to[2], 0]) - now
            q = now + way * min(1.0, 0.05 / max(np.abs(way).max(), 1e-9))
            MEANT.place(q)
            it.command(Command("one", t, "base", tuple(MEANT.pos), tuple(MEANT.quat), tuple(q.tolist())), t)
        else:
            way = self.home[0] + to - it.motion.target[0]
            pos = it.motion.target[0] + way * min(1.0, 0.0355 / max(np.linalg.norm(way), 1e-9))
            it.command(Command("one", t, "base", tuple(pos), self.home[1]), t)

    def begin(self):
        """Forget what was measured before."""
        self.v = self.v[-1:]

    def most(self):
        """Largest acceleration [m/s^2], [rad/s^2], a tick's, and largest jerk [m/s^3], the mean of 10 ms."""
        a = np.diff(self.v, axis=0) / self.arm.dt
        jerk = (a[10:] - a[:-10]) / (10 * self.arm.dt)
        return tuple(float(np.linalg.norm(x, axis=1).max()) for x in (a[:, :3], a[:, 3:], jerk[:, :3]))

    def at_rest(self):
        return all(np.linalg.norm(v[:3]) < 0.02 for v in self.v[-20:])


@pytest.mark.parametrize("name", LAWS)
def test_an_arm_that_follows_is_within_the_governors_acceleration_whatever_the_targets_and_gains_do(name):
    d = Drive(name)
    d.run(0.2, (0, 0, 0))
    d.begin()
    for to in ((0, 0.15, 0), (0, -0.15, 0), (-0.1, 0, 0.1)):
        d.run(0.35, to)
    rng = np.random.default_rng(0)
    for _ in range(5):
        d.run(rng.uniform(0.02, 0.2), rng.uniform(-0.15, 0.15, 3))
    for gain, ratio in ((0.2, 0.1), (2.0, 2.0), (1.0, 1.0)):
        o = d.arm.law.options
        d.arm.law.set_options(replace(o, stiffness=tuple(gain * k for k in o.stiffness), damping_ratio=ratio))
        d.run(0.25, (0, 0.15 * gain, 0))
    a, turn, jerk = d.most()
    assert d.governor.state == ACTIVE
    assert 1.5 < a <= 1.15 * LIMITS.accel[0] and turn <= 1.15 * LIMITS.accel[1]
    assert jerk <= 2 * LIMITS.accel[0] / LawOptions().filter_time


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("event", ["kill", "stop", "disarm", "switch", "again"])
def test_an_arm_that_is_stopped_in_motion_brakes_as_its_limits_say_and_no_harder(name, event):
    d = Drive(name)
    d.run(0.45, (0, 0.25, 0))
    assert math.hypot(*d.arm.twist()[:3]) > 0.22
    d.begin()
    at, state = np.array(d.arm.model.pos), HOLD
    if event == "stop":
        d.governor.stop(d.arm.t)
        state = STOPPED
    elif event in ("disarm", "switch"):
        d.governor.disarm(d.arm.t)
        state = DISARMED
    elif event == "again":
        d.governor.hold(d.arm.t, "lease", "a test")
    if event == "switch":
        d.run(0.005)
        d.arm.use(Law(d.arm.law.options, d.arm.robot), d.arm.servo is not None)
    d.run(0.25)
    assert d.governor.state == state
    if event == "again":
        d.governor.arm(d.arm.t)
        d.run(0.3, (0, 0.1, 0))
    elif event != "switch":
        assert d.at_rest() and np.linalg.norm(d.arm.model.pos - at) < 0.04
    a, turn, jerk = d.most()
    factor = 1.5 if event == "switch" else 1.15
    assert 2.0 < a <= factor * LIMITS.brake[0] and turn <= factor * LIMITS.brake[1]
    assert jerk <= 2 * LIMITS.brake_jerk[0]
    assert not d.arm.supervisor.reason


# ---- full stretch ------------------------------------------------------------------------------------------

SHOULDER, REACH = np.array([0.0, 0.0, 0.333]), 0.947  # of the tool [m], whatever way it points


@pytest.mark.parametrize(
    ("way", "share"), [((1, 0, 0), 0.98), ((1, 0, 0), 1.1), ((1, 1, 0), 1.0), ((1, 0, 1), 1.02)]
)
@pytest.mark.parametrize(
    "options",
    [LawOptions(), operational_space(), operational_space((2000.0,) * 6)],
    ids=["impedance", "operational space", "stiff operational space"],
)
def test_an_arm_comes_to_rest_at_full_stretch_with_its_target_beyond_reach(options, way, share):
    arm = SimArm(ROBOT, options)
    _, quat = arm.pose()
    arm.law.set_target(SHOULDER + share * REACH * np.array(way) / np.linalg.norm(way), quat)
    speeds = []
    arm.run(6.0, lambda: speeds.append(float(np.abs(arm.model.dq).max())))
    assert max(speeds) < 1.25 * min(ROBOT.velocity) and max(speeds[-500:]) < 0.04  # nobody governs it here
    assert 0.75 < np.linalg.norm(arm.model.pos - SHOULDER) < 0.92
    arm.run(2.0)
    energy = arm.model.dq @ arm.model.inertia() @ arm.model.dq / 2
    assert energy < 1e-4


def test_at_full_stretch_operational_space_is_as_stiff_as_before_across_it():
    """x = (W K)^-1 F; what W is heavier than its limit in, along the arm, takes no part."""
    arm = SimArm(ROBOT, operational_space())
    _, quat = arm.pose()
    arm.law.set_target(SHOULDER + [1.02 * REACH, 0, 0], quat)
    arm.run(6.0)
    rest = np.array(arm.model.pos)
    mobility = arm.model.jac @ arm.model.minv_j + 0.003 * np.eye(6)
    assert (
        np.linalg.eigvalsh(np.diag([1, 1, 1, 0.2, 0.2, 0.2]) @ mobility @ np.diag([1, 1, 1, 0.2, 0.2, 0.2]))[
            0
        ]
        < 0.005
    )
    for force in (5.0, -5.0):
        arm.push([0, force, 0, 0, 0, 0])
        arm.run(2.0)
        assert arm.model.pos[1] - rest[1] == pytest.approx(mobility[1, 1] / 400 * force, rel=0.06)
        arm.push(np.zeros(6))
        arm.run(2.0)
        assert np.linalg.norm(arm.model.pos - rest) < 1e-3


# ---- joint limits ------------------------------------------------------------------------------------------

LOW, HIGH = np.array(ROBOT.lower), np.array(ROBOT.upper)
# there the tool is below the table
ENDS = [(joint, side) for joint in range(7) for side in (-1, 1) if (joint, side) != (1, 1)]


@pytest.mark.parametrize(
    ("joint", "side"), [pytest.param(*e, marks=() if e[0] in (3, 6) else pytest.mark.slow) for e in ENDS]
)
@pytest.mark.parametrize(
    "options",
    [LawOptions(), operational_space(), joint_impedance(damping=25.0)],
    ids=["impedance", "operational space", "joints"],
)
def test_a_joint_that_is_driven_against_its_limit_stays_inside_does_not_bounce_and_comes_back(
    options, joint, side
):
    limit = LOW[joint] if side < 0 else HIGH[joint]
    q = np.array(ROBOT.home)
    q[joint] = limit - side * 0.3
    beyond = q.copy()
    beyond[joint] = limit + side * 0.3
    arm = SimArm(ROBOT, options, q=q)
    home = arm.pose()
    MEANT.place(beyond)
    rows = []
    if any(options.stiffness):
        arm.law.set_target(np.array(MEANT.pos), np.array(MEANT.quat))
    else:
        arm.law.set_joints(beyond)
    arm.run(2.0, lambda: rows.append(arm.model.q.copy()))
    rows = np.array(rows)
    assert np.maximum(rows - HIGH, LOW - rows).max() < 0.002  # rad, of all joints
    way = side * rows[:, joint]
    nearest = int(np.argmax(way))
    assert side * limit - way[nearest] < 0.1 and np.ptp(way[nearest : nearest + 200]) < 0.03
    if any(options.stiffness):
        arm.law.set_target(*home)
    else:
        arm.law.set_joints(q)
    arm.run(3.0)
    assert np.linalg.norm(arm.model.pos - home[0]) < 2e-3


@pytest.mark.parametrize("side", [-1, 1])
def test_joint_targets_beyond_a_limit_end_inside_of_it_as_measured(side):
    at, end = np.array(ROBOT.home), (LOW if side < 0 else HIGH)[6]
    at[6] = end - side * 0.4
    d = Drive("joints, by joints", at)
    for _ in range(60):
        at[6] += side * 0.015
        MEANT.place(at)
        d.governor.command(
            Command("one", d.arm.t, "base", tuple(MEANT.pos), tuple(MEANT.quat), tuple(at.tolist())), d.arm.t
        )
        d.run(0.02)
        assert side * d.arm.model.q[6] < side * end
        if d.governor.state == HOLD:
            break
    d.run(0.3)
    assert 0.0 < side * (end - d.arm.model.q[6]) < 0.05 and d.at_rest()
