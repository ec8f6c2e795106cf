"""The governor at its limits: each one allows exactly its value and refuses the next number; the motion of
the setpoint is held against its equations written out once more in NumPy. Times and limits are binary
fractions, so sums are exact."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from test_controllers_governor import AT, DOWN, ROBOT, command, jointed, joints, meaning, state

from controllers import limits as lim
from controllers.governor import ACTIVE, ARMED, DISARMED, HOLD, STOPPED, Governor
from controllers.limits import Limits
from controllers.trace import Trace
from robo_rl import geometry as g
from robo_rl.errors import UserError

TICK = 1 / 1024
EXACT = Limits(
    low=(0.25, -0.5, 0.0),
    high=(0.75, 0.5, 1.0),
    tilt=0.5,
    step=(0.0625, 0.25),
    speed=(0.25, 1.0),
    accel=(2.0, 8.0),
    brake=(4.0, 16.0),
    measured_speed=(0.5, 2.0),
    measured_margin=0.03125,
    joint_margin=0.03125,
    wrench=(64.0, 16.0),
    tracking=(0.0625, 0.25),
    command_timeout=0.125,
    give_up=0.5,
    state_timeout=0.0625,
    stale=0.125,
    violations=4,
    window=0.5,
)
HOME = (0.5, 0.0, 0.5)


def more(x):
    return math.nextafter(x, math.inf)


def less(x):
    return math.nextafter(x, -math.inf)


def begun(limits=EXACT, **kw):
    """A governor that took its first command at time 1."""
    it = Governor(limits, ROBOT)
    it.measure(state(**{"pos": HOME, **kw}), 1.0)
    it.arm(1.0)
    assert it.command(command(1.0, HOME), 1.0).action == "allow" and it.state == ACTIVE
    return it


def test_the_defaults_are_the_published_ones():
    plain = asdict(Limits())
    assert plain == {
        "frame": "base",
        "low": (None, None, 0.0),
        "high": (None, None, None),
        "tilt": None,
        "tilt_axis": (0.0, 0.0, -1.0),
        "step": (0.02, 0.105),
        "speed": (0.25, 1.0),
        "accel": (2.5, 10.0),
        "brake": (4.0, 16.0),
        "brake_jerk": (200.0, 800.0),
        "measured_speed": (0.5, 2.5),
        "measured_margin": 0.03,
        "joint_speed": 1.0,
        "joint_margin": 0.02,
        "wrench": (60.0, 20.0),
        "max_stiffness": (3000.0, 300.0),
        "tracking": (0.05, 0.2),
        "command_timeout": 0.1,
        "give_up": 1.0,
        "state_timeout": 0.05,
        "stale": 0.2,
        "violations": 20,
        "window": 1.0,
    }
    assert lim.JOINT_SHARE == 0.97


# ---- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["command_timeout", "give_up", "state_timeout", "stale", "window", "joint_speed"]
)
def test_a_time_must_be_above_0(name):
    assert (
        getattr(Limits(**{name: more(0.0)}), name) > 0
        and getattr(Limits(**{name: math.inf}), name) == math.inf
    )
    with pytest.raises(UserError, match=name):
        Limits(**{name: 0.0})


@pytest.mark.parametrize(
    "name",
    [
        "step",
        "speed",
        "accel",
        "brake",
        "brake_jerk",
        "measured_speed",
        "wrench",
        "max_stiffness",
        "tracking",
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_size_must_be_above_0(name, axis):
    pair = [1.0, 1.0]
    pair[axis] = more(0.0)
    assert getattr(Limits(**{name: tuple(pair)}), name) == tuple(pair)
    pair[axis] = 0.0
    with pytest.raises(UserError, match=name):
        Limits(**{name: tuple(pair)})


def test_a_box_has_a_width_and_a_cone_is_below_a_right_angle():
    with pytest.raises(UserError, match="low < high on y"):
        Limits(low=(0.0, 0.5, None), high=(1.0, 0.5, None))
    assert Limits(tilt=0.0).tilt == 0 and Limits(tilt=less(math.pi / 2)).tilt
    for wrong in (math.pi / 2, less(0.0)):
        with pytest.raises(UserError, match="tilt"):
            Limits(tilt=wrong)
    assert Limits(tilt=0.1, tilt_axis=(0, 0, 1.0009)).tilt == 0.1
    for axis in ((0, 0, 1.0011), (0, 0, 0.9989)):
        with pytest.raises(UserError, match="length 1"):
            Limits(tilt=0.1, tilt_axis=axis)
    assert Limits(violations=1).violations == 1 and Limits(violations=10**6).violations == 10**6
    for wrong in (0, 10**6 + 1):
        with pytest.raises(UserError, match="violations"):
            Limits(violations=wrong)
    with pytest.raises(UserError, match="3 numbers"):
        Limits(high=(1.0, 1.0))


# ---- pure pieces -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_box_keeps_its_faces_and_an_open_side_keeps_nothing(axis):
    low, high = [None] * 3, [None] * 3
    low[axis] = 0.25
    for at, want in ((0.25, 0.25), (less(0.25), 0.25), (99.0, 99.0)):
        p = [5.0] * 3
        p[axis] = at
        found = lim.box(tuple(p), Limits(low=tuple(low), high=tuple(high)))
        assert found[axis] == want and all(found[i] == 5.0 for i in range(3) if i != axis)
    low[axis], high[axis] = None, 0.25
    for at, want in ((0.25, 0.25), (more(0.25), 0.25), (-99.0, -99.0)):
        p = [-5.0] * 3
        p[axis] = at
        found = lim.box(tuple(p), Limits(low=tuple(low), high=tuple(high)))
        assert found[axis] == want and all(found[i] == -5.0 for i in range(3) if i != axis)
    inside = (0.3, 0.1, 0.2)
    assert lim.box(inside, EXACT) is inside


def z_axis(quat):
    return g.rotate(np.array(quat), np.array([0.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    "axis",
    [
        (0, 0, -1.0),
        (0, 0, 1.0),
        (1.0, 0, 0),
        (-1.0, 0, 0),
        (0, 1.0, 0),
        (0.6, 0, 0.8),
        (0.8, 0.6, 0),
        (0.95, 0, math.sqrt(1 - 0.95**2)),
        (0.95, math.sqrt(1 - 0.95**2), 0),
        (0.85, math.sqrt(1 - 0.85**2), 0),
    ],
)
def test_a_tilted_tool_turns_the_shortest_way_onto_the_cone(axis):
    limits, rng = Limits(tilt=0.5, tilt_axis=axis), np.random.default_rng(0)
    for k in range(200):
        quat = tuple(g.normalise(rng.normal(size=4)))
        if k == 0:  # exactly opposite: every way is as short
            a = np.array([0, 0, 1.0])
            towards = -np.array(axis)
            c = np.cross(a, towards)
            sine, cosine = np.linalg.norm(c), float(a @ towards)
            turn = (
                c / sine * math.atan2(sine, cosine)
                if sine > 1e-12
                else np.array([0.0 if cosine > 0 else math.pi, 0, 0])
            )
            quat = tuple(g.exp(turn))
            assert z_axis(quat) @ np.array(axis) == pytest.approx(-1)
        angle = math.acos(np.clip(z_axis(quat) @ np.array(axis), -1, 1))
        found = lim.upright(quat, limits)
        if angle <= 0.5 - 1e-9:
            assert found is quat
        elif angle > 0.5 + 1e-9:
            assert math.acos(np.clip(z_axis(found) @ np.array(axis), -1, 1)) == pytest.approx(0.5, abs=1e-6)
            assert float(g.angle_between(np.array(found), np.array(quat))) == pytest.approx(
                angle - 0.5, abs=1e-6
            )
    assert lim.upright((1.0, 0.0, 0.0, 0.0), Limits()) == (1.0, 0.0, 0.0, 0.0)


def test_a_pose_is_taken_as_far_as_a_step_goes_and_no_farther():
    step = (0.0625, 0.25)
    for far, way in ((0.0625, 0.0625), (0.125, 0.0625), (0.03125, 0.03125)):
        pos, quat = lim.near((0.5 + far, 0.0, 0.5), DOWN, HOME, DOWN, step)
        assert pos == (0.5 + way, 0.0, 0.5) and quat is DOWN
    at = (0.5625, 0.0, 0.5)
    assert lim.near(at, DOWN, HOME, DOWN, step)[0] is at
    for angle, want in ((0.2, 0.2), (0.6, 0.25)):
        turned = g.turned(DOWN, 0.0, angle, 0.0)
        _, quat = lim.near(HOME, turned, HOME, DOWN, step)
        assert (quat is turned) == (angle < 0.25)
        assert np.allclose(g.turn_between(quat, DOWN), (0.0, want, 0.0), atol=1e-12)


def pursued(error, velocity, speed, accel, dt):
    """`pursue`, its equation in NumPy."""
    error, velocity, b = np.array(error), np.array(velocity), 0.8 * accel * dt
    d = np.linalg.norm(error)
    size = min(speed, b * (math.sqrt(0.25 + 2 * d / (b * dt)) - 0.5), d / dt)
    change = (error / d * size if d else 0 * error) - velocity
    most = accel * dt
    norm = np.linalg.norm(change)
    return velocity + change * (min(1.0, most / norm) if norm else 0.0)


def test_pursuit_is_its_equation_and_brings_a_mass_to_rest_at_the_goal():
    rng = np.random.default_rng(1)
    for _ in range(500):
        error, v = (
            rng.normal(size=3) * 10.0 ** rng.uniform(-6, 0),
            rng.normal(size=3) * 10.0 ** rng.uniform(-4, 0),
        )
        speed, accel, dt = rng.uniform(0.1, 2), rng.uniform(1, 20), 10.0 ** rng.uniform(-4, -2)
        found = lim.pursue(tuple(error), tuple(v), speed, accel, dt)
        assert np.allclose(found, pursued(error, v, speed, accel, dt), rtol=1e-12, atol=1e-15)
    assert lim.pursue((0.0,) * 3, (0.0,) * 3, 1.0, 1.0, TICK) == (0.0,) * 3
    assert lim.pursue((0.0,) * 3, (3.0, 0.0, 4.0), 1.0, 1.0, TICK) == pytest.approx(
        (3 - 0.6 * TICK, 0, 4 - 0.8 * TICK)
    )


def test_braking_takes_its_deceleration_off_the_speed_until_nothing_is_left():
    far = 1e9  # a jerk that limits nothing
    assert lim.slower((3.0, 0.0, 4.0), 0.0, 1024.0, far, TICK) == (pytest.approx((2.4, 0.0, 3.2)), 1024.0)
    assert lim.slower((1.0, 0.0, 0.0), 0.0, 1024.0, far, TICK) == ((0.0, 0.0, 0.0), 1024.0)
    assert lim.slower((more(1.0), 0.0, 0.0), 0.0, 1024.0, far, TICK)[0][0] > 0
    assert lim.slower((0.0, 0.0, 0.0), 0.0, 1024.0, far, TICK) == ((0.0, 0.0, 0.0), 0.0)


def test_braking_comes_and_goes_at_its_jerk():
    v, b, seen = (0.25, 0.0, 0.0), 0.0, [0.0]
    speeds = [0.25]
    while v[0] > 0:
        v, b = lim.slower(v, b, 4.0, 200.0, TICK)
        seen.append((speeds[-1] - v[0]) / TICK)
        speeds.append(v[0])
    assert max(seen) == pytest.approx(4.0) and seen[1] == pytest.approx(200 * TICK)
    assert np.abs(np.diff(seen)[:-1]).max() <= 1.2 * 200 * TICK and seen[-1] <= 2 * 200 * TICK
    # a trapezium; in steps of a tick
    assert len(seen) * TICK == pytest.approx(0.25 / 4 + 4 / 200, abs=4 * TICK)


# ---- commands at their limits ------------------------------------------------------------------------------


def test_a_quaternion_may_be_a_hundredth_off_and_no_more():
    it = begun()
    for k, (length, action) in enumerate(
        ((1.0099, "allow"), (0.9901, "allow"), (1.0101, "block"), (0.9899, "block"))
    ):
        t = 1.0 + (k + 1) * TICK
        assert it.command(command(t, HOME, (0.0, length, 0.0, 0.0)), t).action == action


@pytest.mark.parametrize(("delay", "contract"), [(0.125, ""), (more(0.125), "stale"), (0.126, "stale")])
def test_a_command_may_be_late_by_exactly_what_is_allowed(delay, contract):
    it = begun()
    assert it.command(command(1.0625 + delay, HOME, stamp=1.0625), 1.0625 + delay).contract == (
        contract if 1.0625 + delay - 1.0625 > 0.125 else ""
    )


@pytest.mark.parametrize(("ahead", "contract"), [(0.125, ""), (0.1251, "future")])
def test_a_stamp_may_be_ahead_by_exactly_what_is_allowed(ahead, contract):
    it = begun()
    assert it.command(command(1.0625, HOME, stamp=1.0625 + ahead), 1.0625).contract == contract


def test_the_least_delay_of_a_sender_is_what_others_are_measured_by():
    it = begun()
    # 0.0625 s better than the first
    assert it.command(command(1.0625, HOME, stamp=1.125), 1.0625).action == "allow"
    # 0.125 s more than that
    assert it.command(command(1.203125, HOME, stamp=1.140625), 1.203125).action == "allow"
    assert it.command(command(1.2509765625, HOME, stamp=1.1875), 1.2509765625).contract == "stale"


@pytest.mark.parametrize(
    ("rate", "holds"), [(0.0, False), (1e-4, False), (-1e-4, False), (2e-3, True), (-2e-3, False)]
)
def test_clocks_may_drift_as_quartz_does_and_a_delay_that_grows_faster_is_one(rate, holds):
    it = begun(replace(EXACT, command_timeout=2.0, state_timeout=2.0))
    for now in range(2, 3602):  # an hour; the sender's clock runs slower by `rate`
        it.measure(state(pos=HOME), float(now))
        it.tick(float(now), TICK)
        it.command(command(now, HOME, stamp=1.0 + (now - 1.0) * (1 - rate)), float(now))
    assert (it.state != ACTIVE) == holds and bool(it.counts.get("stale")) == holds


@pytest.mark.parametrize(
    ("source", "stamp", "said"),
    [
        ("", 1.0625, ""),
        ("", 3601.0625, "; the last one was refused: the stamp is 3600.00 s ahead of its sender's others"),
        ("", -3598.9375, "; the last one was refused: stamp -3598.9375 s is not after 1.0000 s: repeated, "),
        ("another", 3601.0625, ""),
    ],
)
def test_a_hold_for_silence_says_why_commands_that_came_had_no_effect(source, stamp, said):
    it = begun(replace(EXACT, state_timeout=10.0))
    it.command(replace(command(1.0625, HOME, stamp=stamp), **({"source": source} if source else {})), 1.0625)
    it.tick(1.25, TICK)
    began = "no command for 0.188 s" if stamp == 1.0625 else "no command for 0.250 s"
    assert it.state == HOLD and it.reason.startswith(began + said) and ("refused" in it.reason) == bool(said)


def test_a_stamp_must_be_after_the_last_one():
    it = begun()
    assert it.command(command(1.001, HOME, stamp=1.0), 1.001).contract == "order"
    assert it.command(command(1.002, HOME, stamp=more(1.0)), 1.002).action == "allow"


def test_violations_are_counted_within_the_window_and_one_too_many_holds():
    def bad(it, t):
        return it.command(command(t, HOME, frame="world"), t)

    it = begun(replace(EXACT, command_timeout=10.0, state_timeout=10.0))
    for k in range(4):
        bad(it, 1.0 + k * 0.125)
    assert it.state == ACTIVE
    bad(it, 1.5)  # the first, half a second ago, counts still
    assert it.state == HOLD and it.counts["violations"] == 1
    it = begun(replace(EXACT, command_timeout=10.0, state_timeout=10.0))
    for k in range(4):
        bad(it, 1.0 + k * 0.125)
    bad(it, 1.5 + TICK)  # the first is out of the window
    assert it.state == ACTIVE and "violations" not in it.counts


def test_after_a_hold_for_violations_counting_begins_anew():
    it = begun(replace(EXACT, command_timeout=10.0, state_timeout=10.0))
    for k in range(5):
        it.command(command(1.0 + k * TICK, HOME, frame="world"), 1.0 + k * TICK)
    assert it.state == HOLD
    it.measure(state(pos=HOME), 1.0625)
    it.arm(1.0625)
    for k in range(4):
        it.command(command(1.0625 + k * TICK, HOME, frame="world"), 1.0625 + k * TICK)
    assert it.state == ARMED


# ---- the measured arm at its limits ------------------------------------------------------------------------


def measured(**kw):
    it = begun()
    verdict = it.measure(state(**{"pos": HOME, **kw}), 1.0 + TICK)
    return verdict.contract, it.state


@pytest.mark.parametrize(
    ("kw", "contract"),
    [
        ({"twist": (0.5, 0, 0, 0, 0, 0)}, ""),
        ({"twist": (more(0.5), 0, 0, 0, 0, 0)}, "tool_speed"),
        ({"twist": (0, 0, 0.5, 2.0, 0, 0)}, ""),
        ({"twist": (0, 0, 0, 0, 2.0, 0)}, ""),
        ({"twist": (0, 0, 0, 0, more(2.0), 0)}, "tool_speed"),
        ({"pos": (0.75 + 0.03125, 0, 0.5)}, ""),
        ({"pos": (more(0.75 + 0.03125), 0, 0.5)}, "tool_place"),
        ({"wrench": (64.0, 0, 0, 0, 0, 0)}, ""),
        ({"wrench": (0, more(64.0), 0, 0, 0, 0)}, "wrench"),
        ({"wrench": (64.0, 0, 0, 0, 0, 16.0)}, ""),
        ({"wrench": (0, 0, 64.0, 16.0, 0, 0)}, ""),
        ({"wrench": (0, 0, 0, 16.0, 0, 0)}, ""),
        ({"wrench": (0, 0, 0, 0, 0, more(16.0))}, "wrench"),
    ],
)
def test_the_measured_tool_may_be_exactly_at_a_limit(kw, contract):
    assert measured(**kw) == (contract, HOLD if contract else ACTIVE)


@pytest.mark.parametrize("j", range(7))
def test_a_measured_joint_may_be_exactly_at_a_limit(j):
    def at(q, dq):
        one, two = list(ROBOT.home), [0.0] * 7
        one[j], two[j] = q, dq
        return measured(q=one, dq=two)[0]

    low, high, most = ROBOT.lower[j], ROBOT.upper[j], ROBOT.velocity[j]
    middle = (low + high) / 2
    assert at(low, 0.0) == at(high, 0.0) == "" and at(less(low), 0.0) == at(more(high), 0.0) == "joint_limit"
    assert at(low + 0.03125, -0.5) == "" and at(less(low + 0.03125), -0.5) == "joint_limit"
    assert at(high - 0.03125, 0.5) == "" and at(more(high - 0.03125), 0.5) == "joint_limit"
    assert at(low + 0.01, -0.01) == at(low + 0.01, 0.5) == "" and at(low + 0.01, less(-0.01)) == "joint_limit"
    assert (
        at(high - 0.01, 0.01) == at(high - 0.01, -0.5) == "" and at(high - 0.01, more(0.01)) == "joint_limit"
    )
    assert (
        at(middle, most) == at(middle, -most) == ""
        and at(middle, more(most)) == at(middle, -more(most)) == "joint_speed"
    )


@pytest.mark.parametrize(
    ("kw", "contract"),
    [
        ({"quat": (0, 1.0999, 0, 0)}, ""),
        ({"quat": (0, 1.1, 0, 0)}, "state_finite"),
        ({"quat": (0, 0.9001, 0, 0)}, ""),
        ({"quat": (0, 0.9, 0, 0)}, "state_finite"),
        ({"dq": (math.inf,) + (0.0,) * 6}, "state_finite"),
        ({"q": (math.nan,) + (0.0,) * 6}, "state_finite"),
        ({"twist": (math.nan,) + (0.0,) * 5}, "state_finite"),
        ({"wrench": (math.nan,) + (0.0,) * 5}, "state_finite"),
        ({"wrench": (0.0,) * 5}, "state_dimensions"),
        ({"dq": (0.0,) * 6}, "state_dimensions"),
        ({"pos": HOME[:2]}, "state_dimensions"),
        ({"quat": (1.0, 0, 0)}, "state_dimensions"),
        ({"twist": (0.0,) * 5}, "state_dimensions"),
    ],
)
def test_a_measurement_has_its_numbers_and_they_are_finite(kw, contract):
    assert measured(**kw) == (contract, ACTIVE)


@pytest.mark.parametrize(
    ("kw", "refused"),
    [
        ({"twist": (0.02, 0, 0, 0, 0, 0)}, False),
        ({"twist": (more(0.02), 0, 0, 0, 0, 0)}, True),
        ({"twist": (0, 0, 0, 0.1, 0, 0)}, False),
        ({"twist": (0, 0, 0, more(0.1), 0, 0)}, True),
        ({"pos": (0.75 + 0.03125, 0, 0.5)}, False),
        ({"pos": (0.75 + 0.032, 0, 0.5)}, True),
    ],
)
def test_an_arm_may_be_armed_up_to_its_limits(kw, refused):
    it = Governor(EXACT, ROBOT)
    it.measure(state(**{"pos": HOME, **kw}), 1.0)
    if refused:
        with pytest.raises(UserError, match="cannot arm"):
            it.arm(1.0)
        assert it.state == DISARMED
    else:
        it.arm(1.0)
        assert it.state == ARMED and it.motion.pos == lim.box(kw.get("pos", HOME), EXACT)


def test_a_state_may_be_as_old_as_allowed_when_arming():
    it = Governor(EXACT, ROBOT)
    it.measure(state(pos=HOME), 1.0)
    with pytest.raises(UserError, match="no measured state"):
        it.arm(more(1.0625))
    it = Governor(EXACT, ROBOT)
    it.measure(state(pos=HOME), 1.0)
    it.arm(1.0625)
    assert it.state == ARMED


# ---- time at its limits ------------------------------------------------------------------------------------


def test_silence_is_allowed_up_to_each_timeout():
    for at, state_ in ((1.125, ACTIVE), (more(1.125), HOLD)):
        it = begun(replace(EXACT, state_timeout=10.0))
        it.tick(at, TICK)
        assert it.state == state_
    for at, state_ in ((1.0625, ACTIVE), (more(1.0625), STOPPED)):
        it = begun()
        it.tick(at, TICK)
        assert it.state == state_
    for at, state_ in ((1.75, HOLD), (more(1.75), STOPPED)):
        it = begun(replace(EXACT, state_timeout=10.0))
        it.tick(1.25, TICK)
        assert it.state == HOLD
        it.tick(at, TICK)
        assert it.state == state_


def test_a_tool_may_be_off_as_far_and_as_long_as_allowed():
    def after(off, seconds):
        it, t = begun(replace(EXACT, command_timeout=10.0, state_timeout=10.0)), 1.0
        it.measure(state(pos=(0.5 + off, 0.0, 0.5)), 1.0)
        it.tick(1.0, TICK)
        it.tick(t + seconds, TICK)
        return it.state

    assert after(0.0625, 9.0) == ACTIVE and after(0.07, 0.25) == ACTIVE and after(0.07, 0.25 + TICK) == HOLD
    # back in between: the time begins anew
    it = begun(replace(EXACT, command_timeout=10.0, state_timeout=10.0))
    for at, off in ((1.0, 0.07), (1.125, 0.0), (1.25, 0.07), (1.5, 0.07)):
        it.measure(state(pos=(0.5 + off, 0.0, 0.5)), at)
        it.tick(at, TICK)
    assert it.state == ACTIVE
    it.tick(1.5 + TICK, TICK)
    assert it.state == HOLD and "off" in it.reason


def test_how_long_a_tool_was_off_before_it_was_armed_again_does_not_count():
    it = begun(replace(EXACT, command_timeout=10.0, state_timeout=10.0))
    away = state(pos=(0.57, 0.0, 0.5))
    it.measure(away, 1.0)
    it.tick(1.0, TICK)
    it.disarm(1.125)
    it.measure(state(pos=HOME), 1.5)
    it.arm(1.5)
    assert it.command(command(1.5, HOME), 1.5).action == "allow"
    it.measure(away, 1.5)
    it.tick(1.5, TICK)
    it.tick(1.75, TICK)
    assert it.state == ACTIVE
    it.tick(1.75 + TICK, TICK)
    assert it.state == HOLD


def test_time_may_stand_but_not_run_back():
    it = begun()
    it.tick(1.0, TICK)
    assert it.state == ACTIVE
    it.tick(less(1.0), TICK)
    assert it.state == STOPPED and it.counts["clock"] == 1


# ---- the motion of the setpoint ----------------------------------------------------------------------------


def test_a_setpoint_follows_its_equations_step_by_step():
    it = begun(replace(EXACT, command_timeout=10.0, state_timeout=10.0))
    goal, facing = (0.53, 0.02, 0.49), g.turned(DOWN, 0.1, -0.05, 0.2)
    it.command(command(1.0 + TICK, goal, facing), 1.0 + TICK)
    pos, quat, v, w = np.array(HOME), DOWN, np.zeros(3), np.zeros(3)
    for k in range(300):
        out = it.tick(1.0 + TICK * (k + 2), TICK)
        v = pursued(np.array(goal) - pos, v, 0.25, 2.0, TICK)
        w = pursued(np.array(g.turn_between(facing, quat)), w, 1.0, 8.0, TICK)
        pos, quat = pos + v * TICK, g.turned(quat, *(w * TICK))
        assert np.allclose(out.pos, pos, atol=1e-12) and np.allclose(out.quat, quat, atol=1e-12)


def test_a_held_setpoint_goes_on_from_the_measured_motion_within_its_limits_and_brakes():
    for speed, turn in ((0.125, 0.5), (0.4, 1.75)):
        it = begun(replace(EXACT, state_timeout=10.0))
        it.measure(state(pos=(0.5, 0.1, 0.5), twist=(0.0, speed, 0.0, 0.0, 0.0, turn)), 1.0)
        it.stop(1.0)
        out = it.tick(1.0, TICK)
        v, w = min(speed, 0.25) - 200.0 * TICK**2, min(turn, 1.0) - 800.0 * TICK**2
        assert out.rebased and out.state == STOPPED and out.joints is None
        assert np.allclose(out.pos, (0.5, 0.1 + v * TICK, 0.5), atol=1e-12)
        assert np.allclose(out.quat, g.turned(DOWN, 0.0, 0.0, w * TICK), atol=1e-12)
        assert not it.tick(1.0 + TICK, TICK).rebased
        for k in range(2, 22):
            it.tick(1.0 + k * TICK, TICK)
        before = it.motion.v[1], it.motion.w[2]
        it.tick(1.0 + 22 * TICK, TICK)
        assert before[0] - it.motion.v[1] == pytest.approx(4.0 * TICK) and before[1] - it.motion.w[
            2
        ] == pytest.approx(16.0 * TICK)


def test_a_stop_goes_on_from_what_is_measured_until_it_is_followed():
    it = begun(replace(EXACT, state_timeout=10.0))
    it.stop(1.0)
    it.measure(state(pos=(0.5, 0.1, 0.5), twist=(0.0, 0.1, 0.0, 0.0, 0.0, 0.0)), 1.0)
    assert it.tick(1.0, TICK).pos[1] == pytest.approx(0.1 + 0.1 * TICK, abs=1e-6)
    it.measure(state(pos=(0.5, 0.3, 0.5)), 1.0)  # from here on it brakes by itself
    assert it.tick(1.0 + TICK, TICK).pos[1] < 0.11


def test_a_stop_while_it_holds_goes_on_braking_and_begins_nothing_anew():
    it = begun(replace(EXACT, state_timeout=10.0))
    it.measure(state(pos=HOME, twist=(0.2, 0, 0, 0, 0, 0)), 1.0)
    it.hold(1.0, "operator", "gave up")
    it.tick(1.0, TICK)
    speed = it.motion.v[0]
    it.measure(state(pos=(0.5, 0.1, 0.5)), 1.0)
    it.stop(1.0)
    out = it.tick(1.0 + TICK, TICK)
    assert out.state == STOPPED and not out.rebased and out.pos[1] == 0.0 and 0 < it.motion.v[0] < speed


def test_an_arm_that_is_armed_while_its_setpoint_still_brakes_stands():
    it = begun(replace(EXACT, state_timeout=10.0))
    it.measure(state(pos=HOME, twist=(0.2, 0, 0, 0, 0, 0.5)), 1.0)
    it.hold(1.0, "operator", "gave up")
    it.tick(1.0, TICK)
    assert it.motion.v[0] > 0.1 and it.motion.w[2] > 0.1
    it.measure(state(pos=HOME), 1.0 + TICK)
    it.arm(1.0 + TICK)
    assert it.motion.v == it.motion.w == (0.0, 0.0, 0.0)
    assert it.tick(1.0 + TICK, TICK).pos == HOME and it.state == ARMED


def test_a_hold_of_an_arm_that_nobody_armed_leaves_it_to_whoever_moves_it():
    it = Governor(EXACT, ROBOT)
    it.measure(state(pos=HOME, twist=(0.2, 0, 0, 0, 0, 0)), 1.0)
    it.hold(1.0, "operator", "gave up")
    out = it.tick(1.0, TICK)
    assert out.state == DISARMED and out.pos is None and not out.rebased


def test_at_a_face_of_the_box_only_what_points_out_of_it_stops():
    it = begun(replace(EXACT, state_timeout=10.0))
    it.measure(state(pos=(less(0.75), 0.0, 0.5), twist=(0.2, 0.1, 0.0, 0, 0, 0)), 1.0)
    it.stop(1.0)
    out = it.tick(1.0, TICK)
    assert (
        out.pos[0] == 0.75
        and out.pos[1] > 0
        and it.motion.v[0] == 0.0
        and it.motion.v[1] > 0
        and it.motion.v[2] == 0.0
    )


def test_disarmed_at_rest_there_is_no_setpoint_and_moving_by_hand_forgets_the_braking():
    it = begun(replace(EXACT, state_timeout=10.0))
    it.measure(state(pos=HOME, twist=(0.2, 0, 0, 0, 0, 0)), 1.0)
    it.disarm(1.0)
    assert it.state == DISARMED and it.tick(1.0, TICK).pos is not None
    it.moved(1.0)
    assert it.motion.pos is None and it.motion.v == it.motion.w == (0.0, 0.0, 0.0)
    it = begun(replace(EXACT, state_timeout=10.0))
    it.moved(1.0)
    assert it.motion.pos == HOME  # an armed arm is not moved by hand
    it.disarm(1.0)
    for k in range(4):
        out = it.tick(1.0 + k * TICK, TICK)
    assert out.pos is None


def test_a_joint_setpoint_follows_its_equations_step_by_step():
    it = jointed()
    target = np.array(ROBOT.home) + [0.02, 0.01, -0.015, 0.01, 0.015, -0.01, 0.3]
    start, o = meaning(ROBOT.home), it.limits
    said = it.command(joints(1.0, target), 1.0)
    goal, facing = meaning(target)
    turn = np.array(g.turn_between(facing, start[1]))
    share = min(1.0, o.step[0] / math.dist(goal, start[0]), o.step[1] / np.linalg.norm(turn))
    assert said.contract == "step" and share < 1
    wanted = np.array(ROBOT.home) + share * (target - ROBOT.home)
    assert np.allclose(it.motion.joint_target, wanted, atol=1e-12)
    q, pos, quat, dt = np.array(ROBOT.home), np.array(start[0]), start[1], 1e-3
    (goal, facing), scale = it.motion.target, 0.25 / (0.97 * np.array(ROBOT.velocity))

    def size(x):
        return max(np.linalg.norm(x[:3]), 0.25 * np.linalg.norm(x[3:6]), np.abs(scale * x[6:]).max())

    motion, b = np.zeros(13), 0.8 * 2.5 * dt
    for k in range(350):
        t = 1.0 + k * dt
        it.measure(state(*meaning(q), q=q.tolist()), t)
        if k % 50 == 49:
            it._command_at = t  # the commander goes on; what it says stays
        if k == 150:  # back again: it brakes first
            it.motion.joint_target = tuple(wanted - 0.05)
        out = it.tick(t, dt)
        error = np.concatenate(
            [np.array(goal) - pos, g.turn_between(facing, quat), np.array(it.motion.joint_target) - q]
        )
        far = size(error)
        go = min(0.25, b * (math.sqrt(0.25 + 2 * far / (b * dt)) - 0.5), far / dt) / far if far else 0.0
        change = go * error - motion
        motion = motion + change * min(1.0, 2.5 * dt / max(size(change), 1e-300))
        q, pos, quat = q + dt * motion[6:], pos + dt * motion[:3], g.turned(quat, *(dt * motion[3:6]))
        assert np.allclose(out.joints, q, atol=1e-9) and np.allclose(out.pos, pos, atol=1e-9)
        assert np.allclose(out.quat, quat, atol=1e-9)
    wanted = wanted - 0.05
    assert np.allclose(q, wanted, atol=1e-6)


def test_a_second_joint_target_is_measured_from_the_first():
    it, turn = jointed(), np.eye(7)[0]
    first = np.array(ROBOT.home) + 0.01 * turn
    it.command(joints(1.0, first), 1.0)
    it.command(joints(1.01, first + 0.5 * turn), 1.01)
    moved = np.array(it.motion.joint_target) - first
    far = math.dist(meaning(first + 0.5 * turn)[0], meaning(first)[0])
    assert moved[0] == pytest.approx(0.5 * min(0.02 / far, 0.105 / 0.5), rel=1e-6) and not moved[1:].any()


@pytest.mark.parametrize("j", range(7))
def test_a_joint_target_stays_a_margin_inside_its_limits(j):
    it = jointed()
    pos, quat = meaning(ROBOT.home)
    for beyond, want in (
        (ROBOT.upper[j] + 1, ROBOT.upper[j] - 0.02),
        (ROBOT.lower[j] - 1, ROBOT.lower[j] + 0.02),
    ):
        q = list(ROBOT.home)
        q[j] = beyond
        t = it.now + 0.01
        said = it.command(replace(command(t, pos, quat), joints=tuple(q)), t)
        assert said.contract == "joint_range" and it.motion.joint_target[j] == pytest.approx(want, abs=1e-12)


def test_a_governor_that_has_measured_nothing_asks_for_nothing_and_its_trace_begins_at_0():
    trace = Trace()
    out = Governor(EXACT, ROBOT, trace).tick(3.0, 1e-3)
    assert (out.state, out.pos, out.quat, out.rebased, out.joints) == (
        DISARMED,
        None,
        (1.0, 0.0, 0.0, 0.0),
        False,
        None,
    )
    assert [(e["kind"], e["t"]) for e in trace.events] == [("config", 0.0), ("tick", 3.0)]


def test_a_stop_is_blamed_on_a_person_and_a_silent_network_on_the_transport():
    it = begun(replace(EXACT, state_timeout=10.0))
    assert (
        it.stop(1.0).blame == "person"
        and it.violations.first[1].contract == "estop"
        and it.violations.first[0] == 1.0
    )
    it = begun()
    it.tick(1.5, TICK)
    said = it.violations.first[1]
    assert (said.contract, said.blame, said.action) == ("state_age", "transport", "stop")
    assert begun().command(command(1.1, HOME, frame="x"), 1.1).blame == "commander"
    assert begun().command(command(1.001, AT, stamp=0.5), 1.001).blame == "transport"
