"""What the control law is told: its options' defaults and bounds, every command's check, admittance axis by
axis."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from test_controllers_tick import BENT, FREE, HOME, MODEL, ROBOT, law_at

from controllers.law import Law, LawOptions, gravity_compensation, joint_impedance, operational_space
from robo_rl import geometry as g
from robo_rl.errors import UserError

DEFAULTS = {
    "task": "impedance",
    "stiffness": (600.0,) * 3 + (30.0,) * 3,
    "damping_ratio": 1.0,
    "damping": None,
    "frame": "base",
    "error_clip": (0.1,) * 3 + (0.5,) * 3,
    "target_speed": 0.25,
    "target_turn": 1.0,
    "filter_time": 0.02,
    "feed_acceleration": (4.0, 16.0),
    "nullspace": "dynamic",
    "posture_stiffness": 5.0,
    "posture_damping": None,
    "posture_torque": 5.0,
    "posture_speed": 1.0,
    "limit_margin": 0.1,
    "limit_torque": 5.0,
    "friction": False,
    "torque_rate": 500.0,
    "torque_fraction": 0.8,
    "ramp": 0.5,
    "regularisation": 0.003,
    "command_timeout": 0.1,
    # an arm is held by these: nobody changes one without a second look here
    "mass_limit": 50.0,
    "max_stiffness": (3000.0, 300.0),
}
FROM_ZERO = ("filter_time", "limit_torque", "ramp")
ABOVE_ZERO = (
    "target_speed",
    "target_turn",
    "posture_speed",
    "limit_margin",
    "regularisation",
    "mass_limit",
    "command_timeout",
    "torque_fraction",
)


def test_the_defaults_of_the_law_and_of_its_three_kin():
    assert asdict(LawOptions()) == DEFAULTS
    joints = {
        "stiffness": (0.0,) * 6,
        "nullspace": "none",
        "posture_stiffness": 150.0,
        "posture_torque": None,
    }
    assert asdict(joint_impedance()) == DEFAULTS | joints
    assert asdict(joint_impedance(7.0, 3.0, posture_torque=9.0)) == DEFAULTS | joints | {
        "posture_stiffness": 7.0,
        "posture_damping": 3.0,
        "posture_torque": 9.0,
    }
    floating = {"stiffness": (0.0,) * 6, "nullspace": "none", "posture_stiffness": 0.0}
    assert asdict(gravity_compensation(ramp=0.0)) == DEFAULTS | floating | {"ramp": 0.0}
    assert asdict(operational_space()) == DEFAULTS | {"task": "operational_space", "stiffness": (400.0,) * 6}


@pytest.mark.parametrize(
    ("name", "along", "about"),
    [("stiffness", 3000.0, 300.0), ("damping", 500.0, 50.0), ("error_clip", 0.5, math.pi)],
)
def test_springs_take_six_numbers_up_to_their_bounds(name, along, about):
    for good in ((0.0,) * 6, (0.4, 0, 0.2, 0, 3.0, 0.5), (along,) * 3 + (about,) * 3):
        assert getattr(LawOptions(**{name: good}), name) == good
    one = (0.1,) * 5
    over = (
        (along * 1.001, *one),
        (*one[:2], along * 1.001, *one[:3]),
        (*one[:3], about * 1.001, *one[:2]),
        (*one, about * 1.001),
    )
    for bad in (
        (0.1,) * 4,
        (0.1,) * 7,
        (*one, -1e-9),
        (math.inf, *one),
        (0.1, math.nan, *one[:4]),
        (-1.0,) * 6,
        *over,
    ):
        with pytest.raises(
            UserError,
            match=f"{name} needs 6 numbers from 0 to {along:.4g} along and {about:.4g} about the axes",
        ):
            LawOptions(**{name: bad})


def test_the_upper_limits_of_a_stiffness_are_an_option_with_bounds_of_its_own():
    assert LawOptions(
        max_stiffness=(5000.0, 500.0), stiffness=(5000.0,) * 3 + (500.0,) * 3
    ).max_stiffness == (5000.0, 500.0)
    assert LawOptions(max_stiffness=(0.0, 0.0), stiffness=(0.0,) * 6).max_stiffness == (0.0, 0.0)
    for bad in ((5001.0, 1.0), (1.0, 501.0), (-1.0, 1.0), (1.0,), (1.0, 1.0, 1.0), (math.nan, 1.0)):
        with pytest.raises(
            UserError, match="max_stiffness needs 2 numbers from 0 to 5000 N/m and 500 N m/rad"
        ):
            LawOptions(max_stiffness=bad, stiffness=(0.0,) * 6)
    assert operational_space((2000.0,) * 6).stiffness == (2000.0,) * 6
    for more in ({}, {"max_stiffness": (5000.0, 500.0)}):
        with pytest.raises(UserError, match="stiffness needs 6 numbers from 0 to 2000 along and 2000 about"):
            operational_space((1.0,) * 5 + (2001.0,), **more)
    with pytest.raises(UserError, match="stiffness needs 6 numbers from 0 to 500 along and 500 about"):
        operational_space((1.0,) * 5 + (501.0,), max_stiffness=(500.0, 50.0))
    with pytest.raises(UserError, match="stiffness needs 6 numbers from 0 to 500 along"):
        LawOptions(max_stiffness=(500.0, 50.0))


def test_the_damping_ratio_lies_between_a_tenth_and_2():
    for good in (0.1, 1.0, 2.0):
        assert LawOptions(damping_ratio=good).damping_ratio == good
    for bad in (0.0999, 2.001, 1e9, -1.0, math.nan, math.inf):
        with pytest.raises(UserError, match="damping_ratio"):
            LawOptions(damping_ratio=bad)


@pytest.mark.parametrize("name", FROM_ZERO + ABOVE_ZERO)
def test_a_number_out_of_its_range_is_refused_by_name(name):
    assert getattr(LawOptions(**{name: 1e-6}), name) == 1e-6
    assert getattr(LawOptions(**{name: 0.9}), name) == 0.9
    if name in FROM_ZERO:
        assert getattr(LawOptions(**{name: 0.0}), name) == 0.0
    for bad in (-1e-6, math.inf, math.nan, *([0.0] if name in ABOVE_ZERO else [])):
        with pytest.raises(UserError, match=name):
            LawOptions(**{name: bad})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("task", ("impedance", "operational_space")),
        ("frame", ("base", "tool")),
        ("nullspace", ("dynamic", "kinematic", "none")),
    ],
)
def test_words_are_those_of_the_option(name, words):
    for word in words:
        assert getattr(LawOptions(**{name: word}), name) == word
    with pytest.raises(UserError, match=f"unknown {name}") as e:
        LawOptions(**{name: words[0] + "x"})
    assert all(word in str(e.value) for word in words)


def test_the_share_of_the_torque_limits_may_be_1_and_no_more():
    assert LawOptions(torque_fraction=1.0).torque_fraction == 1.0
    with pytest.raises(UserError, match="torque_fraction"):
        LawOptions(torque_fraction=1.001)


def test_posture_gains_are_one_number_or_one_per_joint():
    rows = tuple(range(7))
    law = Law(LawOptions(posture_stiffness=rows, posture_damping=rows[::-1]), ROBOT)
    assert law._m["kn"].tolist() == list(rows) and law._m["dn"].tolist() == list(rows[::-1])
    law = Law(LawOptions(posture_stiffness=9), ROBOT)
    assert law._m["kn"].tolist() == [9.0] * 7 and law._m["dn"].tolist() == [6.0] * 7
    for bad in ((1.0,) * 6, (1.0,) * 6 + (-1.0,), -1.0, math.inf, (math.nan,) * 7, 10_001.0):
        with pytest.raises(UserError, match="posture_stiffness needs one number or 7, from 0 to 10000"):
            Law(LawOptions(posture_stiffness=bad), ROBOT)
    with pytest.raises(UserError, match="posture_damping needs one number or 7, from 0 to 1000"):
        Law(LawOptions(posture_damping=1001.0), ROBOT)
    Law(LawOptions(posture_stiffness=10_000.0, posture_damping=1000.0), ROBOT)


def test_limits_are_the_stricter_of_the_laws_and_the_robots():
    m = Law(LawOptions(torque_rate=100.0, torque_fraction=0.5, limit_margin=0.2), ROBOT)._m
    assert m["torque_rate"] == 100.0 and m["most"].tolist() == [0.5 * t for t in ROBOT.torque]
    assert np.allclose(m["low"], np.array(ROBOT.lower) + 0.2) and np.allclose(
        m["high"], np.array(ROBOT.upper) - 0.2
    )
    for rate in (None, 10 * ROBOT.torque_rate):
        assert Law(LawOptions(torque_rate=rate), ROBOT)._m["torque_rate"] == ROBOT.torque_rate


def test_joint_targets_end_at_the_joints_limits_checked_or_not():
    law, (low, high) = law_at(HOME), (np.array(ROBOT.lower), np.array(ROBOT.upper))
    for way in (law.set_joints, law.aim_joints):
        for q in (low - 1, high + 1, np.where(np.arange(7) % 2, low - 1, high + 1), HOME):
            way(q)
            assert law.q_target.tolist() == np.clip(q, low, high).tolist()
    law.set_joints(HOME, np.array([9.0, -9, 0.1, -0.1, 0, 9, -9]))
    v = np.array(ROBOT.velocity)
    assert law.dq_ref.tolist() == np.clip([9.0, -9, 0.1, -0.1, 0, 9, -9], -v, v).tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda law: law.set_joints(np.full(7, np.nan)),
        lambda law: law.set_joints(HOME, np.zeros(6)),
        lambda law: law.set_joints(np.zeros(6)),
        lambda law: law.set_wrench(np.full(6, np.inf)),
        lambda law: law.set_stiffness(np.full(6, np.inf)),
        lambda law: law.set_stiffness([1, 1, 1, 1, 1, -1e-9]),
        lambda law: law.set_target(np.zeros(3), np.array([0.98, 0, 0, 0])),
        lambda law: law.activate(MODEL, np.full(7, np.nan)),
    ],
)
def test_a_command_that_is_refused_changes_nothing(call):
    law = law_at(HOME)
    before = law._record.copy()
    with pytest.raises(UserError):
        call(law)
    assert law._record.tobytes() == before.tobytes()


def test_a_target_quaternion_is_brought_to_length_1():
    law = law_at(HOME)
    law.set_target(np.array([0.4, 0.0, 0.3]), np.array([0.0, 1.005, 0.0, 0.0]))
    assert law.reference.target_quat.tolist() == [0, 1, 0, 0] and law.reference.target_pos.tolist() == [
        0.4,
        0,
        0.3,
    ]


def test_a_commanded_stiffness_ends_at_its_upper_limits_and_0_is_allowed():
    law = law_at(HOME)
    law.set_stiffness(np.array([1e6, 10, 0, 1e6, 20, 0]))
    assert law.k_target.tolist() == [3000, 10, 0, 300, 20, 0]
    law = law_at(HOME, operational_space())
    law.set_stiffness(np.array([1e6, 10, 0, 1e6, 20, 0]))
    assert law.k_target.tolist() == [2000, 10, 0, 2000, 20, 0]


def test_options_that_may_change_while_the_law_runs_and_those_that_may_not():
    law = law_at(HOME)
    free = {
        "stiffness": (2000.0,) * 3 + (300.0,) * 3,
        "damping_ratio": 0.7,
        "error_clip": (0.05,) * 6,
        "target_speed": 0.1,
        "target_turn": 0.3,
        "filter_time": 0.1,
    }
    law.set_options(replace(law.options, **free))
    m = law._m
    assert asdict(law.options) == DEFAULTS | free
    assert m["stiffness"].tolist() == law.k_target.tolist() == list(free["stiffness"])
    assert m["clip_target"].tolist() == [0.05] * 6 and m["ratio_target"] == 0.7
    # it goes there while it ticks
    assert m["error_clip"].tolist() == [0.1] * 3 + [0.5] * 3 and m["damping_ratio"] == 1.0
    assert (m["target_speed"], m["target_turn"], m["filter_time"]) == (0.1, 0.3, 0.1)
    law.set_options(replace(law.options, error_clip=None))
    assert np.isinf(m["clip_target"]).all()
    for name in DEFAULTS.keys() - free.keys():
        other = {
            "task": "operational_space",
            "damping": (1.0,) * 6,
            "frame": "tool",
            "nullspace": "none",
            "friction": True,
            "feed_acceleration": (0.0, 0.0),
            "max_stiffness": (4000.0, 400.0),
        }.get(name, 0.11)
        with pytest.raises(UserError, match="while the law runs it can change"):
            law.set_options(replace(law.options, **{name: other}))
    without = law_at(HOME, joint_impedance())
    with pytest.raises(UserError, match="no Cartesian spring"):
        without.set_options(replace(without.options, stiffness=(0.0,) * 5 + (1.0,)))
    assert without.options == joint_impedance()


def test_damping_ratio_and_error_clip_are_gone_to_within_the_ramp_and_the_damping_with_them():
    law = law_at(BENT[3], LawOptions(ramp=0.2))
    law.stand()
    law.tick(MODEL, 1e-3)
    m, full = law._m, law.d.copy()
    law.set_options(replace(law.options, damping_ratio=2.0, error_clip=(0.2,) * 3 + (0.1,) * 3))
    ratios, clips = [], []
    for _ in range(300):
        law.tick(MODEL, 1e-3)
        ratios.append(float(m["damping_ratio"]))
        clips.append(m["error_clip"][[0, 3]].tolist())
    assert np.diff([1.0, *ratios]).max() <= 2 * 1e-3 / 0.2 + 1e-12 and ratios[-1] == 2.0 and ratios[98] < 2.0
    assert (
        clips[-1] == [0.2, 0.1]
        and max(np.abs(np.diff(clips, axis=0)).max(0) / [0.5, math.pi]) <= 1e-3 / 0.2 + 1e-12
    )
    assert np.allclose(law.d, 2 * full, rtol=1e-6)
    law.set_options(replace(law.options, error_clip=None))
    law.tick(MODEL, 1e-3)
    assert np.isinf(m["error_clip"]).all()
    law.set_options(replace(law.options, error_clip=(0.1,) * 6, damping_ratio=0.5))
    law.activate(MODEL)
    assert m["error_clip"].tolist() == [0.1] * 6 and m["damping_ratio"] == 0.5


def test_activation_carries_the_torque_that_the_joints_carry_within_their_limits():
    law, most = law_at(HOME), 0.8 * np.array(ROBOT.torque)
    assert not Law(LawOptions(), ROBOT).activated and law.activated
    for torque in (np.full(7, 1e3), np.full(7, -1e3), np.linspace(-3, 3, 7)):
        law.activate(MODEL, torque)
        assert law.tau.tolist() == np.clip(torque, -most, most).tolist()
    law.activate(MODEL)
    assert law.tau.tolist() == np.clip(MODEL.bias, -most, most).tolist()
    assert law.gain == 0.0 and law_at(HOME, LawOptions(ramp=0.0)).gain == 1.0
    assert not law.fed
    law.set_wrench(np.zeros(6))
    assert law.fed


def test_a_robot_with_other_joints_than_the_model_is_refused():
    law = Law(LawOptions(), ROBOT)
    other = replace(
        ROBOT,
        joints=ROBOT.joints[:6],
        **{k: getattr(ROBOT, k)[:6] for k in ("home", "lower", "upper", "velocity", "torque")},
    )
    with pytest.raises(UserError, match="6 joints, the model 7"):
        Law(LawOptions(), other).activate(MODEL)
    law.activate(MODEL)


@pytest.mark.parametrize("axis", range(6))
def test_a_pose_that_is_no_number_on_one_axis_is_a_fault_and_no_clipped_error(axis):
    """A clip takes NaN for one of its ends."""
    law = law_at(BENT[0])
    held = law.tick(MODEL, 1e-3)
    (law.reference.pos if axis < 3 else law.reference.quat)[axis % 3] = np.nan
    law.reference._m["settled"] = 1  # the reference stays as it is
    assert law.tick(MODEL, 1e-3).tolist() == held.tolist() and law.faults == 1


def test_a_law_with_friction_needs_a_robot_whose_friction_is_known():
    with pytest.raises(UserError, match="no identified friction"):
        Law(LawOptions(friction=True), ROBOT)
    assert Law(LawOptions(), FREE)._m["friction"] == 0


def test_a_reference_that_starts_has_no_acceleration_and_no_turn_left():
    law = law_at(BENT[1], dq=np.full(7, 0.2))
    r, m = law.reference, law._m
    law.set_target(np.array([0.4, 0.0, 0.3]), np.array([0.0, 1.0, 0.0, 0.0]))
    for _ in range(5):
        law.tick(MODEL, 1e-3)
    assert r.acceleration.any() and m["left"] > 0 and not r.settled
    law.rebase(MODEL)
    assert not r.acceleration.any() and m["left"] == 0.0 and not r.settled
    assert r.velocity.tolist() == (MODEL.jac @ MODEL.dq).tolist()
    for place in (r.target_pos, r.pos, m["limited_pos"]):
        assert place.tolist() == list(MODEL.pos)
    for turn in (r.target_quat, r.quat, m["limited_quat"]):
        assert turn.tolist() == list(MODEL.quat)
    law.activate(MODEL)
    assert r.settled and not r.velocity.any() and not r.acceleration.any()
    r.aim(MODEL.pos, MODEL.quat)
    assert m["left"] == -1.0 and not r.settled


def test_one_stiff_axis_is_damped_by_the_inertia_that_follows_it_whatever_the_posture_does():
    def damping(**more):
        law = law_at(BENT[2], LawOptions(stiffness=(0.0, 600.0, 0.0, 0.0, 0.0, 0.0), ramp=0.0, **more))
        law.tick(MODEL, 1e-3)
        return law.d.copy()

    assert damping()[1] > 0 and damping(nullspace="none") == pytest.approx(damping(), rel=1e-12)


def test_the_last_part_of_a_turn_goes_through_the_low_pass_too():
    law = law_at(HOME, LawOptions(target_turn=1e6, filter_time=0.1))
    start = law.reference.quat.copy()
    law.set_target(np.array(MODEL.pos), g.multiply(g.exp(np.array([0.0, 0.0, 0.5])), start))
    for k in range(1, 40):
        law.tick(MODEL, 1e-3)
        assert g.angle_between(law.reference.quat, law.reference.target_quat) == pytest.approx(
            0.5 * math.exp(-k / 100), rel=1e-6
        )


def test_a_wrench_is_in_force_up_to_its_timeout_and_not_a_tick_longer():
    law = law_at(BENT[0], gravity_compensation(command_timeout=0.125, torque_rate=None, ramp=0.0))
    free = law.tick(MODEL, 0.0625)
    law.set_wrench(np.array([0.0, 0, 8, 0, 0, 0]))
    pushed = MODEL.jac[2] * 8
    # ages of 0.0625, 0.125 and 0.1875 s, exact in binary
    for ticks, there in ((1, True), (2, True), (3, False)):
        assert np.allclose(law.tick(MODEL, 0.0625) - free, pushed if there else 0, atol=1e-9), ticks
        assert law.fed == there
