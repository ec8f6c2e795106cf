"""Joints that follow tool poses and joint targets, without an arm that they move."""

import numpy as np
import pytest

from controllers.model import arm_model
from controllers.robot import load_robot
from controllers.servo import FADE, JointServo
from controllers.setpoint import Setpoint

ROBOT = load_robot("sim")
HOME = np.array(ROBOT.home)
DT = 0.01


@pytest.fixture
def model():
    out = arm_model(ROBOT)
    out.update(HOME, np.zeros(7))
    return out


def pose_of(q):
    at = arm_model(ROBOT)
    at.place(q)
    return Setpoint("ACTIVE", tuple(at.pos), tuple(at.quat))


def off(q, out):
    """How far the tool of joints q is from a pose [m]."""
    return float(np.linalg.norm(np.subtract(pose_of(q).pos, out.pos)))


def test_a_pose_within_a_period_is_reached_in_one(model):
    servo, wanted = JointServo(ROBOT, model, DT), pose_of(HOME + 0.004)
    assert off(servo.step(model, wanted), wanted) < 0.02 * off(HOME, wanted)


def test_a_pose_farther_away_is_approached_at_the_joints_speed_and_no_faster(model):
    servo, wanted = JointServo(ROBOT, model, DT), pose_of(HOME + 0.3)
    before = HOME
    for _ in range(5):
        q = np.array(servo.step(model, wanted))
        assert np.abs((q - before) / servo.fastest).max() == pytest.approx(1.0)
        before = q


def test_poses_after_joint_targets_go_on_from_those_joints(model):
    servo, there = JointServo(ROBOT, model, DT), HOME + 0.3
    for _ in range(round(FADE / DT) + 2):  # from where the joints were asked to be before
        q = servo.step(model, Setpoint("ACTIVE", None, (1.0, 0.0, 0.0, 0.0), joints=tuple(there)))
    assert np.array_equal(q, there)
    assert np.allclose(servo.step(model, pose_of(there)), there, atol=1e-6)  # where it is already
    wanted = pose_of(there + 0.1)
    for _ in range(10):
        q = servo.step(model, wanted)
    assert off(q, wanted) < 0.01 * off(there, wanted)


def test_what_begins_anew_goes_on_from_the_measured_joints_not_from_targets_before(model):
    servo, wanted = JointServo(ROBOT, model, DT), pose_of(HOME)
    servo.step(model, Setpoint("ACTIVE", None, (1.0, 0.0, 0.0, 0.0), joints=tuple(HOME + 0.3)))
    servo.step(model, Setpoint("HOLD", wanted.pos, wanted.quat, rebased=True))
    for _ in range(round(FADE / DT) + 1):
        q = servo.step(model, Setpoint("HOLD", wanted.pos, wanted.quat))
    assert np.allclose(q, HOME, atol=1e-6)


def test_where_nothing_is_asked_the_servo_asks_for_nothing(model):
    assert JointServo(ROBOT, model, DT).step(model, Setpoint("DISARMED", None, (1.0, 0.0, 0.0, 0.0))) is None
