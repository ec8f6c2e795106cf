"""The governor's rules one by one, then fuzzed commands through governor, law and physics."""

import contextlib
import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from controllers import limits as lim
from controllers.arm import SimArm, follow, govern
from controllers.contracts import CONTRACTS, Command, State, nearest_allowed
from controllers.governor import ACTIVE, ARMED, DISARMED, HOLD, STOPPED, Governor
from controllers.limits import Limits
from controllers.model import arm_model
from controllers.robot import load_robot
from controllers.trace import Trace, digest, first_broken, read
from controllers.trace_replay import replay
from robo_rl import geometry as g
from robo_rl.errors import UserError

ROBOT = load_robot("sim")
DOWN = (0.0, 1.0, 0.0, 0.0)
AT = (0.5, 0.0, 0.3)
LIMITS = Limits(low=(0.2, -0.4, 0.0), high=(0.7, 0.4, 0.7), tilt=0.5)
DT = 1e-3


def state(pos=AT, quat=DOWN, twist=(0.0,) * 6, q=ROBOT.home, dq=(0.0,) * 7, wrench=None):
    return State(tuple(q), tuple(dq), tuple(pos), tuple(quat), tuple(twist), wrench)


def armed(limits=LIMITS, t=1.0, trace=None, **kw):
    it = Governor(limits, ROBOT, trace)
    it.measure(state(**kw), t)
    it.arm(t)
    return it


def command(t, pos=AT, quat=DOWN, source="policy", frame="base", stamp=None):
    return Command(source, t if stamp is None else stamp, frame, tuple(pos), tuple(quat))


def active(limits=LIMITS, **kw):
    it = armed(limits, **kw)
    assert it.command(command(1.0), 1.0).action == "allow" and it.state == ACTIVE
    return it


def run(it, begin, seconds, measured=None, every=None):
    """Ticks with a measured arm that sits where the setpoint is, or at `measured`; -> setpoints."""
    out = []
    for k in range(round(seconds / DT)):
        t = begin + k * DT
        if every:
            every(t)
        it.measure(
            measured or state(pos=it.motion.pos, quat=it.motion.quat, twist=(*it.motion.v, *it.motion.w)), t
        )
        out.append(it.tick(t, DT))
    return out


# ---- the state machine -------------------------------------------------------------------------------------


def test_nothing_moves_before_a_person_arms():
    it = Governor(LIMITS, ROBOT)
    assert it.state == DISARMED
    verdict = it.command(command(1.0, (0.6, 0, 0.3)), 1.0)
    assert verdict.action == "block" and it.state == DISARMED
    with pytest.raises(UserError, match="no measured state"):
        it.arm(1.0)
    it.measure(state(), 1.0)
    it.arm(1.01)
    assert it.state == ARMED and it.tick(1.01, DT).pos == AT
    it.command(command(1.02), 1.02)
    assert it.state == ACTIVE


def test_hold_ends_only_by_arming_and_stopped_only_by_a_reset():
    it = active()
    run(it, 1.0, 0.2)
    assert it.state == HOLD and "no command" in it.reason
    assert it.command(command(1.3), 1.3).action == "block" and it.state == HOLD
    it.measure(state(), 1.3)
    it.arm(1.3)
    assert it.state == ARMED
    it.stop(1.31)
    with pytest.raises(UserError, match="reset first"):
        it.arm(1.32)
    it.command(command(1.33), 1.33)
    assert it.state == STOPPED
    it.reset(1.34)
    assert it.state == DISARMED
    with pytest.raises(UserError, match="nothing to reset"):
        it.reset(1.35)


def test_a_hold_that_nobody_ends_becomes_a_stop():
    it = active()
    run(it, 1.0, 1.3)
    assert it.state == STOPPED and it.counts["command_age"] == 2


@pytest.mark.parametrize(
    ("kw", "says"),
    [({"twist": (0.1, 0, 0, 0, 0, 0)}, "the tool moves"), ({"pos": (0.9, 0, 0.3)}, "outside the workspace")],
)
def test_arming_is_refused_with_the_reason(kw, says):
    it = Governor(LIMITS, ROBOT)
    it.measure(state(**kw), 1.0)
    with pytest.raises(UserError, match=says):
        it.arm(1.0)


def test_an_emergency_stop_works_in_every_state_and_latches():
    for make in (lambda: Governor(LIMITS, ROBOT), armed, active):
        it = make()
        assert it.stop(2.0, "button").contract == "estop" and it.state == STOPPED and it.reason == "button"


def test_a_lost_state_stops_even_while_commands_come():
    it = active()
    for k in range(1, 100):
        t = 1.0 + k * DT
        it.command(command(t), t)
        it.tick(t, DT)
    assert (
        it.state == STOPPED
        and it.violations.first[1].contract == "state_age"
        and it.violations.first[1].blame == "transport"
    )


def test_time_running_backwards_stops():
    it = active()
    it.tick(1.01, DT)
    it.tick(1.0, DT)
    assert it.state == STOPPED and it.counts["clock"] == 1


# ---- contracts of a command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contract", "bad"),
    [
        ("dimensions", {"pos": (0.5, 0.0)}),
        ("dimensions", {"quat": (1.0, 0.0, 0.0)}),
        ("finite", {"pos": (0.5, math.nan, 0.3)}),
        ("finite", {"quat": (math.inf, 0, 0, 0)}),
        ("finite", {"stamp": math.nan}),
        ("quaternion", {"quat": (0.0, 1.2, 0.0, 0.0)}),
        ("quaternion", {"quat": (0.0,) * 4}),
        ("frame", {"frame": "camera"}),
        ("frame", {"frame": ""}),
        ("commander", {"source": "someone else"}),
        ("order", {"stamp": 0.99}),
        ("order", {"stamp": 1.0}),
        ("future", {"stamp": 3.0}),
    ],
)
def test_a_command_that_breaks_a_contract_is_blocked_with_its_name(contract, bad):
    it = active()
    it.measure(state(), 1.01)
    before = it.motion.target
    verdict = it.command(command(1.01, **{"pos": (0.51, 0, 0.3)} | bad), 1.01)
    assert (
        (verdict.action, verdict.contract) == ("block", contract)
        and verdict.text
        and "\n" not in verdict.text
    )
    assert (
        it.motion.target == before
        and it.counts[contract] >= 1
        and it.violations.first[1].contract == contract
    )


def test_a_late_command_is_stale_on_the_senders_own_clock():
    it = active()  # its stamps are the receiver's here, the least delay is 0
    it.measure(state(), 1.05)
    assert it.command(command(1.05, stamp=1.04), 1.05).action == "allow"
    assert it.command(command(1.3, stamp=1.05), 1.3).contract == "stale"
    far = armed()
    far.command(command(1.0, stamp=5000.0), 1.0)  # another clock is no fault
    assert far.command(command(1.05, stamp=5000.05), 1.05).action == "allow"


def test_a_second_commander_is_refused_by_name_and_the_first_goes_on():
    it = active()
    for k in range(100):  # more of them than of violations that hold an arm
        said = it.command(command(1.0 + 0.001 * k, (0.51, 0.0, 0.3), source="intruder"), 1.0 + 0.001 * k)
        assert said.contract == "commander" and "'intruder' commands while 'policy' does" in said.text
    it.measure(state(), 1.1)
    assert (
        it.command(command(1.1), 1.1).action == "allow"
        and it.state == ACTIVE
        and it.counts["commander"] == 100
    )
    assert it.motion.target[0] == AT


def test_two_streams_of_one_commander_keep_stamps_of_their_own():
    it = active()
    it.measure(state(), 1.02)
    assert it.command(command(1.02), 1.02).action == "allow"
    other = replace(command(1.02, stamp=1.01), stream="joints")
    assert it.command(other, 1.02).action == "allow" and it.command(other, 1.02).contract == "order"


def test_nothing_arms_or_resets_while_a_source_of_the_estop_says_stop():
    it = armed()
    it.stop(1.01, source="button")
    it.stop(1.02, source="pendant")
    it.measure(state(), 1.03)
    for step, left in (("button", "button, pendant"), ("pendant", "pendant")):
        for leads_out in (it.reset, it.arm):
            with pytest.raises(UserError, match=f"the e-stop says stop \\({left}\\): it must let go first"):
                leads_out(1.03)
        assert it.state == STOPPED
        it.let_go(1.03, step)
    with pytest.raises(UserError, match="reset first"):
        it.arm(1.03)
    it.let_go(1.03, "nobody's")
    it.reset(1.03)
    it.arm(1.03)
    assert it.state == ARMED
    it.disarm(1.04)
    it.stop(1.04, source="button")  # also where nothing is armed
    assert it.state == STOPPED


def test_whoever_gives_up_the_arm_holds_it_and_only_arming_leads_out():
    it = active()
    assert it.hold(1.01, "lease", "the lease of one ended").action == "hold"
    assert (it.state, it.reason, it.counts["lease"]) == (HOLD, "the lease of one ended", 1)
    it = Governor(LIMITS, ROBOT)
    it.measure(state(), 1.0)
    it.hold(1.0, "lease", "x")
    assert it.state == DISARMED
    for act in (lambda g: g.hold(0.5, "lease", "x"), lambda g: g.let_go(0.5, "x")):
        it = active()
        act(it)
        assert it.state == STOPPED and it.counts["clock"] == 1


def test_the_first_contract_in_order_is_named():
    it = active()
    bad = command(1.01, pos=(math.nan, 0, 9), quat=(5.0, 0, 0, 0), frame="x", source="y", stamp=0.0)
    assert it.command(bad, 1.01).contract == "finite"
    assert CONTRACTS.index("finite") < CONTRACTS.index("quaternion") < CONTRACTS.index("frame")


def test_defect_4_a_table_at_height_zero_is_a_limit():
    """`min_z or -inf` switches the limit off when it is 0.0."""
    it = active(replace(LIMITS, step=(1.0, 3.0)))
    verdict = it.command(command(1.01, (0.5, 0, -0.2)), 1.01)
    assert (verdict.action, verdict.contract) == ("rewrite", "workspace") and it.motion.target[0] == (
        0.5,
        0.0,
        0.0,
    )
    assert lim.box((9.0, 9.0, -9.0), Limits(low=(None, None, None))) == (9.0, 9.0, -9.0)
    zero = (0.0, 0.0, 0.0)
    assert (
        lim.box((-1.0, -1.0, -1.0), Limits(low=zero))
        == lim.box((1.0, 1.0, 1.0), Limits(low=(None,) * 3, high=zero))
        == zero
    )
    for i in range(3):
        low, high = [None] * 3, [None] * 3
        low[i] = high[i] = 0.0
        one = [0.0] * 3
        one[i] = 1.0
        assert lim.box(tuple(-x for x in one), Limits(low=tuple(low))) == zero
        assert lim.box(tuple(one), Limits(low=(None,) * 3, high=tuple(high))) == zero


def test_rewriting_gives_an_allowed_pose_and_is_idempotent():
    it, rng = active(replace(LIMITS, violations=10**6)), np.random.default_rng(0)
    for k in range(500):
        t = 1.0 + (k + 1) * DT
        it.measure(state(), t)
        pos, quat = tuple(rng.uniform(-2, 2, 3)), tuple(g.normalise(rng.standard_normal(4)))
        last = it.motion.target
        it.command(command(t, pos, quat), t)
        p, q = it.motion.target
        assert lim.box(p, LIMITS) == p
        assert tilt(q) <= 0.5 + 1e-9
        assert math.dist(p, last[0]) <= LIMITS.step[0] + 1e-9
        again = nearest_allowed(p, q, it.motion.target, it.limits)
        assert math.dist(again[1], p) < 1e-12 and g.angle_between(np.array(again[2]), np.array(q)) < 1e-9


def tilt(quat):
    return math.acos(max(-1, min(1, -g.rotate1(tuple(quat), (0, 0, 1))[2])))


def test_an_upside_down_tool_is_turned_back_to_the_cone():
    assert tilt(lim.upright((1.0, 0.0, 0.0, 0.0), LIMITS)) == pytest.approx(0.5)
    assert lim.upright(DOWN, LIMITS) is DOWN


def test_a_tilt_a_little_too_large_is_reduced_to_the_cone():
    it = active(replace(LIMITS, step=(1.0, 3.0)))
    verdict = it.command(command(1.01, quat=g.multiply(g.exp(np.array([0.55, 0, 0])), np.array(DOWN))), 1.01)
    assert (verdict.action, verdict.contract) == ("rewrite", "orientation") and tilt(
        it.motion.target[1]
    ) == pytest.approx(0.5)


def test_repeated_violations_hold():
    it = active(replace(LIMITS, violations=5))
    for k in range(1, 7):
        assert it.state == ACTIVE
        it.command(command(1.0 + k * DT, frame="camera"), 1.0 + k * DT)
    assert it.state == HOLD and "the last by frame" in it.reason


def test_bad_commands_do_not_keep_the_watchdog_quiet():
    it = active(replace(LIMITS, violations=10**6))
    run(it, 1.0, 0.2, every=lambda t: it.command(command(t, frame="camera"), t))
    assert it.state == HOLD and it.counts["command_age"] == 1


# ---- contracts of the state --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contract", "kw"),
    [
        (
            "joint_limit",
            {"q": [*ROBOT.home[:3], ROBOT.upper[3] - 0.01, *ROBOT.home[4:]], "dq": [0, 0, 0, 0.05, 0, 0, 0]},
        ),
        ("joint_limit", {"q": [*ROBOT.home[:3], ROBOT.upper[3] + 0.01, *ROBOT.home[4:]]}),
        ("joint_speed", {"dq": [0, 0, 0, 0, 0, 0, 2.7]}),
        ("tool_speed", {"twist": (0, 0.6, 0, 0, 0, 0)}),
        ("tool_place", {"pos": (0.5, 0, -0.04)}),
        ("wrench", {"wrench": (0, 0, -70.0, 0, 0, 0)}),
    ],
)
def test_a_measured_state_beyond_a_limit_holds(contract, kw):
    it = active()
    assert it.measure(state(**kw), 1.01).contract == contract and it.state == HOLD
    assert active().measure(state(q=kw.get("q", ROBOT.home)), 1.01).action == (
        "hold" if "dq" not in kw and "q" in kw else "allow"
    )


@pytest.mark.parametrize("bad", [state(q=(0.0,) * 6), state(pos=(math.nan, 0, 0)), state(quat=(0.0,) * 4)])
def test_a_broken_measurement_counts_as_none(bad):
    it = active()
    assert it.measure(bad, 1.01).action == "block" and it.measured.pos == AT


def test_broken_measurements_are_no_violations_of_the_commander():
    it = active()
    for k in range(2 * LIMITS.violations + 2):
        t = 1.0 + k * DT
        assert it.measure(state(pos=(math.nan, 0, 0)), t).action == "block"
        it.measure(state(pos=it.motion.pos), t)
    assert it.state == ACTIVE and it.counts["state_finite"] == 2 * LIMITS.violations + 2


@pytest.mark.parametrize(("late", "from_there"), [(-0.01, True), (0.01, False)])
def test_a_stop_goes_on_from_the_measured_pose_only_while_that_is_fresh(late, from_there):
    it = active()
    it.tick(1.0, DT)
    it.measure(state(pos=(0.51, 0.01, 0.29)), 1.0)
    t = 1.0 + LIMITS.state_timeout + late
    it.stop(t)
    out = it.tick(t, DT)
    assert (
        out.rebased == from_there
        and (out.pos == (0.51, 0.01, 0.29)) == from_there
        and (from_there or out.pos == AT)
    )


def test_a_tool_that_does_not_follow_holds():
    it = active(replace(LIMITS, step=(1.0, 1.0)))
    run(it, 1.0, 0.8, state(), lambda t: it.command(command(t, (0.6, 0, 0.3)), t))
    assert it.state == HOLD and it.counts["tracking"] == 1


# ---- the setpoint ------------------------------------------------------------------------------------------


def test_the_setpoint_keeps_to_speed_acceleration_and_box_and_arrives():
    limits = replace(LIMITS, step=(1.0, 3.0), tilt=None)
    it = active(limits)
    goal, turned = (0.7, 0.2, 0.1), tuple(g.multiply(g.exp(np.array([0, 0, 0.8])), np.array(DOWN)))
    points = run(it, 1.0, 3.0, every=lambda t: it.command(command(t, goal, turned, stamp=t), t))
    p = np.array([AT, AT, *(s.pos for s in points)])  # from rest
    v = np.diff(p, axis=0) / DT
    assert np.linalg.norm(v, axis=1).max() <= 0.25 + 1e-9
    assert np.linalg.norm(np.diff(v, axis=0), axis=1).max() / DT <= 2.5 + 1e-6
    assert (p >= np.array(limits.low) - 1e-12).all() and (p <= np.array(limits.high) + 1e-12).all()
    w = np.array([g.turn_between(b.quat, a.quat) for a, b in pairwise(points)]) / DT
    assert np.linalg.norm(w, axis=1).max() <= 1.0 + 1e-6
    assert (
        math.dist(p[-1], goal) < 1e-4 and g.angle_between(np.array(points[-1].quat), np.array(turned)) < 1e-3
    )


def test_holding_brakes_from_the_measured_pose_not_from_the_command():
    it = active()
    moving = state(pos=(0.45, 0.1, 0.3), twist=(0.2, 0, 0, 0, 0, 0))
    it.measure(moving, 1.05)
    it.stop(1.05)
    points = [it.tick(1.05 + k * DT, DT) for k in range(200)]
    assert points[0].rebased and not points[1].rebased
    p = np.array([s.pos for s in points])
    assert math.dist(p[0], (0.45, 0.1, 0.3)) < 3e-4
    assert (
        p[-1][0] - 0.45 == pytest.approx(0.2**2 / 2 / 4.0 + 0.2 * 4.0 / 200.0 / 2, rel=0.03)
        and (p[-1] == p[-2]).all()
    )


def test_braking_ends_at_the_face_of_the_box():
    it = active()
    it.measure(state(pos=(0.699, 0.1, 0.3), twist=(0.2, 0.1, 0, 0, 0, 0)), 1.05)
    it.stop(1.05)
    p = np.array([it.tick(1.05 + k * DT, DT).pos for k in range(200)])
    assert p[:, 0].max() == 0.7 and p[-1, 1] > 0.101


def test_a_person_can_disarm_in_motion():
    it = active()
    it.disarm(1.02)
    assert it.state == DISARMED and it.tick(1.02, DT).state == DISARMED


# ---- trace -------------------------------------------------------------------------------------------------


def traced(path=None):
    trace, rng = Trace(path), np.random.default_rng(3)
    it = armed(trace=trace)
    for k in range(300):
        t = 1.0 + k * DT
        it.measure(state(pos=it.motion.pos, quat=it.motion.quat, twist=(*it.motion.v, *it.motion.w)), t)
        if k % 10 == 0:
            bad = (
                {}
                if rng.random() < 0.7
                else {"frame": "x"}
                if rng.random() < 0.5
                else {"pos": (math.nan, 0, math.inf)}
            )
            it.command(
                command(t, **{"pos": tuple(np.array(it.motion.pos) + rng.normal(0, 0.01, 3))} | bad), t
            )
        it.tick(t, DT)
    it.stop(2.0, "key")
    for call in (it.arm, it.reset):
        with contextlib.suppress(UserError):
            call(2.01)
    trace.close()
    return trace, it


def test_a_trace_replays_to_the_same_decisions(tmp_path):
    trace, _ = traced(tmp_path / "trace.jsonl")
    events = read(tmp_path / "trace.jsonl")
    assert first_broken(events) is None and len(events) == len(trace.events) > 600
    assert replay(events, ROBOT) is None
    kinds = {e["kind"] for e in events}
    assert {"config", "arm", "state", "command", "verdict", "tick", "stop", "reset"} <= kinds


@pytest.mark.parametrize("at", [0, 7, 300])
def test_a_changed_lost_or_reordered_event_breaks_the_chain_at_its_place(at):
    events = traced()[0].events
    changed = json.loads(json.dumps(events))
    changed[at]["t"] += 1e-9
    assert first_broken(changed) == at
    assert first_broken(events[:at] + events[at + 1 :]) == at
    assert first_broken(events[:at] + [events[at + 1], events[at]] + events[at + 2 :]) == at


def test_an_event_cut_out_with_the_rest_renumbered_breaks_the_chain():
    events = json.loads(json.dumps(traced()[0].events))
    del events[7]
    for i, e in enumerate(events):
        e["i"], e["hash"] = i, ""
        e["hash"] = digest(e)
    assert first_broken(events) == 7


def test_a_forged_output_is_found_by_replay_where_it_stands():
    events = json.loads(json.dumps(traced()[0].events))
    at = next(i for i, e in enumerate(events) if i > 200 and e["kind"] == "tick")
    events[at]["data"]["out"][2][0] += 0.01
    assert replay(events, ROBOT) == at


def test_the_first_violation_is_the_earliest_that_any_prefix_shows():
    trace, it = traced()
    bad = [
        i
        for i, e in enumerate(trace.events)
        if e["kind"] == "verdict" and e["data"]["verdict"][0] in ("rewrite", "block")
    ]
    t, verdict = it.violations.first
    assert trace.events[bad[0]]["data"]["verdict"][1] == verdict.contract and trace.events[bad[0]]["t"] == t


def test_once_its_commander_is_done_the_target_goes_with_the_setpoint_that_brakes():
    it = active()
    for k in range(1, 6):
        it.command(command(1.0 + 0.02 * k, pos=(AT[0], AT[1] + 0.015 * k, AT[2])), 1.0 + 0.02 * k)
        run(it, 1.0 + 0.02 * k + DT, 0.019)
    assert it.motion.target[0][1] - it.motion.pos[1] > 0.03 and it.motion.v[1] > 0.1
    it.finish(1.13)
    run(it, 1.131, 0.3)
    assert it.state == ARMED and not any(it.motion.v) and it.motion.target == (it.motion.pos, it.motion.quat)
    it.hold(1.44, "lease", "a test")
    it.motion.target = AT, DOWN
    run(it, 1.441, 0.01)
    assert it.motion.target == (AT, DOWN)  # in HOLD nobody reads it


# ---- with law and physics ----------------------------------------------------------------------------------


def fuzz(n, seed=0, per_tick=20, share=0.02):
    """n commands, a `share` of them bad in every kind, `per_tick` each millisecond, a person who arms again
    and again.

    -> counts of violations of the law's torque limits and of measured tool and setpoint limits, governor,
    share of the time in ACTIVE."""
    limits = replace(LIMITS, violations=10_000)
    rng, arm = np.random.default_rng(seed), SimArm(ROBOT)
    it = Governor(limits, ROBOT)
    low, high = np.array(limits.low), np.array(limits.high)
    most, rate = 0.8 * np.array(ROBOT.torque) + 1e-9, 0.5 + 1e-9
    wrong = dict.fromkeys(("torque", "rate", "place", "setpoint", "step", "speed"), 0)
    last_torque, last, goal, sent, alive = np.array(arm.law.tau), None, np.array([0.5, 0.0, 0.3]), 0, 0
    while sent < n:
        if it.state in (HOLD, DISARMED, STOPPED) and rng.random() < 0.05:
            with contextlib.suppress(UserError):
                it.reset(arm.t) if it.state == STOPPED else it.arm(arm.t)
        if it.state in (ARMED, ACTIVE) and rng.random() < 0.0002:
            it.stop(arm.t)
        for u in rng.random(per_tick).tolist():
            t, pos, quat, extra = arm.t + sent % per_tick * 1e-6, goal, np.array(it.motion.quat), {}
            bad = u < share
            if u > 1 - 0.01 / per_tick:
                goal = rng.uniform(low - 0.3, high + 0.3)
            kind = int(u * 1e6) % 9 if bad else -1
            # each intruder holds the arm: few of them, or nothing ever moves
            if kind == 5 and rng.random() < 0.98:
                kind = 0
            if kind == 0:
                pos = pos * np.nan
            elif kind == 1:
                pos = pos + rng.normal(0, 10.0 ** rng.uniform(-2, 6), 3)
            elif kind == 2:
                extra = {"stamp": t - rng.uniform(0, 2)}
            elif kind == 3:
                extra = {"stamp": t + rng.uniform(0, 100)}
            elif kind == 4:
                extra = {"frame": ["camera", "", "base "][sent % 3]}
            elif kind == 5:
                extra = {"source": "intruder"}
            elif kind == 6:
                quat = rng.standard_normal(4) * 10.0 ** rng.uniform(-3, 3)
            elif kind == 7:
                pos = pos[:2]
            elif kind == 8:
                quat = g.normalise(rng.standard_normal(4))
            else:  # good: a step to the goal
                way = goal - np.array(it.motion.target[0])
                far = np.linalg.norm(way)
                pos = it.motion.target[0] + way * min(1.0, 0.001 / max(far, 1e-9))
            it.command(command(t, pos, quat, **extra), t)
            sent += 1
        arm.t += per_tick * 1e-6
        out = govern(arm, it)
        alive += out.state == ACTIVE
        torque = arm.torque
        wrong["torque"] += bool((np.abs(torque) > most).any())
        wrong["rate"] += bool((np.abs(torque - last_torque) > rate).any())
        last_torque = torque
        pos = np.array(arm.model.pos)
        if out.pos is not None:
            wrong["setpoint"] += bool(
                (np.array(out.pos) < low - 1e-9).any() or (np.array(out.pos) > high + 1e-9).any()
            )
            if last is not None and not out.rebased:
                wrong["step"] += bool(math.dist(out.pos, last.pos) > limits.speed[0] * DT + 1e-9)
        wrong["place"] += bool((pos < low - 0.015).any() or (pos > high + 0.015).any())
        wrong["speed"] += bool(np.linalg.norm(arm.twist()[:3]) > limits.measured_speed[0])
        last = out if out.pos is not None else None
    return wrong, it, alive * per_tick / sent


def test_fuzzed_commands_break_no_limit_at_torques_and_pose():
    wrong, it, alive = fuzz(60_000)
    assert not any(wrong.values()), wrong
    assert alive > 0.5
    assert sum(it.counts[c] for c in CONTRACTS) > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_fuzzed_commands_break_no_limit_at_torques_and_pose():
    wrong, it, alive = fuzz(1_000_000, seed=1)
    print(dict(it.counts), wrong, alive)
    assert not any(wrong.values()), wrong
    assert alive > 0.5
    assert all(
        it.counts[c] for c in ("finite", "frame", "commander", "order", "quaternion", "dimensions", "step")
    )


def test_a_killed_commander_leaves_the_arm_stopped_within_a_quarter_second_and_40_mm():
    arm = SimArm(ROBOT)
    it = Governor(Limits(low=(0.2, -0.5, 0.02), high=(0.8, 0.5, 0.8)), ROBOT)
    for _ in range(600):
        govern(arm, it)
    it.arm(arm.t)
    pos, quat = arm.pose()
    log, killed = [], 1000
    for k in range(1800):
        if k % 20 == 0 and k < killed:  # 50 Hz
            goal = (pos[0], pos[1] + 0.25 * k * DT, pos[2])
            assert it.command(Command("policy", arm.t, "base", goal, tuple(quat)), arm.t).action == "allow"
        govern(arm, it)
        log.append((arm.t, arm.model.pos[1], float(np.linalg.norm(arm.twist()[:3]))))
    log = np.array(log)
    last = 980  # the last command that was sent; the kill is anywhere within 20 ms after it
    assert log[last, 2] > 0.24
    still = next(i for i in range(last, len(log)) if (log[i:, 2] < 0.02).all())
    assert log[still, 0] - log[last, 0] <= 0.25
    assert np.abs(log[last:, 1] - log[last, 1]).max() <= 0.040
    assert it.state == HOLD and "no command" in it.reason


def test_an_emergency_stop_before_arming_leaves_the_arm_where_it_is():
    arm = SimArm(ROBOT)
    it = Governor(LIMITS, ROBOT)
    before, _ = arm.pose()
    for k in range(600):
        if k == 100:
            it.stop(arm.t)
        out = govern(arm, it)
    assert out.state == STOPPED and np.linalg.norm(arm.pose()[0] - before) < 1e-3


def test_disarming_in_motion_brakes_the_arm_and_leaves_it_at_rest():
    arm = SimArm(ROBOT)
    it = Governor(replace(LIMITS, tilt=None, step=(1.0, 3.0)), ROBOT)
    for _ in range(600):
        govern(arm, it)
    it.arm(arm.t)
    pos, quat = arm.pose()
    for k in range(1500):
        if k < 500:
            it.command(Command("policy", arm.t, "base", (pos[0], pos[1] + 0.3, pos[2]), tuple(quat)), arm.t)
        if k == 500:
            it.disarm(arm.t)
            moving, at = np.linalg.norm(arm.twist()[:3]), arm.pose()[0]
        out = govern(arm, it)
    assert moving > 0.2 and out.pos is None
    assert np.linalg.norm(arm.twist()) < 1e-2 and np.linalg.norm(arm.pose()[0] - at) < 0.04
    assert not arm.law.reference.velocity.any()


def test_the_law_goes_on_from_the_measured_pose_when_the_governor_does():
    arm = SimArm(ROBOT)
    it = armed(replace(LIMITS, tilt=None), pos=arm.pose()[0], quat=arm.pose()[1])
    arm.law.set_target(np.array([0.5, 0.3, 0.3]), np.array(DOWN))
    arm.run(0.3)
    it.measure(state(*arm.pose(), twist=arm.twist()), 1.01)
    it.stop(1.01)
    follow(arm.law, arm.model, it.tick(1.011, DT))
    assert math.dist(arm.law.reference.pos, arm.model.pos) < 1e-9
    assert np.allclose(arm.law.reference.velocity, arm.twist())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Limits(low=(0.5, None, None), high=(0.1, None, None)), "low < high on x"),
        (lambda: Limits(low=(0.0, 0.0)), "3 numbers"),
        (lambda: Limits(tilt=2.0), "tilt"),
        (lambda: Limits(tilt=0.1, tilt_axis=(0, 0, 2.0)), "length 1"),
        (lambda: Limits(step=(0.0, 1.0)), "step must be"),
        (lambda: Limits(command_timeout=math.nan), "command_timeout"),
        (lambda: replay([], ROBOT), "begins with its config"),
    ],
)
def test_wrong_limits_are_one_clear_line(call, says):
    with pytest.raises(UserError, match=says) as e:
        call()
    assert "\n" not in str(e.value)


# ---- joint targets -----------------------------------------------------------------------------------------


MEANT = arm_model(ROBOT)
WIDE = replace(LIMITS, low=(0.2, -0.5, 0.0), high=(0.8, 0.5, 0.8), tilt=1.2)


def meaning(q):
    MEANT.place(np.array(q, float))
    return tuple(MEANT.pos), tuple(MEANT.quat)


def joints(t, q, source="policy", **kw):
    return replace(Command(source, t, "base", *meaning(q), tuple(q)), **kw)


def jointed(limits=WIDE):
    pos, quat = meaning(ROBOT.home)
    return armed(limits, pos=pos, quat=quat)


def test_joint_targets_are_followed_within_the_speeds_of_joints_and_tool():
    it, target = jointed(), np.array(ROBOT.home) + [0.04, 0.02, -0.03, 0.02, 0.03, -0.02, 0.05]
    assert it.command(joints(1.0, target), 1.0).action == "allow" and it.state == ACTIVE
    rows, tools = [np.array(ROBOT.home)], [np.array(meaning(ROBOT.home)[0])]
    for k in range(400):
        t = 1.0 + k * DT
        pos, quat = meaning(rows[-1])
        it.measure(state(pos=pos, quat=quat, q=rows[-1].tolist()), t)
        if k % 20 == 0 and k:
            it.command(joints(t, target), t)
        out = it.tick(t, DT)
        rows.append(np.array(out.joints))
        tools.append(np.array(meaning(rows[-1])[0]))
        assert np.linalg.norm(tools[-1] - out.pos) < 1e-3  # the straight line is near enough
    assert np.allclose(rows[-1], target, atol=1e-9)
    assert (np.abs(np.diff(rows, axis=0)) / DT <= 0.97 * np.array(ROBOT.velocity) + 1e-9).all()
    assert np.linalg.norm(np.diff(tools, axis=0), axis=1).max() / DT <= 0.25 * 1.02


@pytest.mark.parametrize(
    ("q", "verdict", "contract"),
    [
        ([0.0] * 6, "block", "dimensions"),
        ([math.nan] * 7, "block", "finite"),
        ([1.5, 0, 0, -2.37, 0, 2.37, 0.785], "block", "workspace"),
    ],
)
def test_joint_targets_that_break_a_contract_do_not_move_the_setpoint(q, verdict, contract):
    it = jointed()
    pos, quat = meaning(ROBOT.home if len(q) != 7 or not np.isfinite(q).all() else q)
    said = it.command(Command("policy", 1.0, "base", pos, quat, tuple(q)), 1.0)
    assert (said.action, said.contract) == (verdict, contract) and it.motion.joint_target is None


def test_a_joint_step_too_far_is_taken_part_of_the_way_and_limits_are_kept():
    it, far = jointed(), np.array(ROBOT.home) + [0.3, 0, 0, 0, 0, 0, 0]
    assert it.command(joints(1.0, far), 1.0).contract == "step"
    share = (it.motion.joint_target[0] - ROBOT.home[0]) / 0.3
    assert 0 < share < 0.5 and math.dist(it.motion.target[0], meaning(ROBOT.home)[0]) == pytest.approx(
        0.02, rel=0.01
    )
    it = jointed()
    beyond = [*ROBOT.home[:6], ROBOT.upper[6] + 1.0]
    # a commander who lies about the pose gains nothing
    near = replace(joints(1.0, ROBOT.home), joints=tuple(beyond))
    assert it.command(near, 1.0).contract == "joint_range" and it.motion.joint_target[6] == pytest.approx(
        ROBOT.upper[6] - 0.02
    )


def test_holding_and_a_pose_end_the_joint_targets():
    it = jointed()
    it.command(joints(1.0, ROBOT.home), 1.0)
    assert it.tick(1.001, DT).joints is not None
    it.stop(1.002)
    assert it.tick(1.002, DT).joints is None and it.motion.joint_target is None
    it = jointed()
    it.command(joints(1.0, ROBOT.home), 1.0)
    pos, quat = meaning(ROBOT.home)
    assert (
        it.command(Command("policy", 1.01, "base", pos, quat), 1.01).action == "allow"
        and it.tick(1.011, DT).joints is None
    )


def test_a_trace_with_joint_targets_replays():
    trace = Trace()
    it = Governor(WIDE, ROBOT, trace)
    pos, quat = meaning(ROBOT.home)
    it.measure(state(pos=pos, quat=quat), 1.0)
    it.arm(1.0)
    for k in range(50):
        t = 1.0 + k * DT
        it.measure(state(pos=pos, quat=quat), t)
        if k % 10 == 0:
            it.command(joints(t, np.array(ROBOT.home) + 0.001 * k), t)
        it.tick(t, DT)
    assert replay(json.loads(json.dumps(trace.events)), ROBOT) is None
