"""A wrench and a stiffness that a commander asks for, as the governor judges them: bounds, ramps, silence. No
physics."""

import contextlib
import math

import numpy as np
import pytest
from test_controllers_governor import AT, DT, LIMITS, ROBOT, active, armed, command, state

from controllers.compliance import RAMP, SHARE, CommandedCompliance, ComplianceCommand, nearer
from controllers.contracts import CONTRACTS
from controllers.governor import ACTIVE, ARMED, DISARMED, HOLD, STOPPED, Governor
from controllers.limits import Limits
from controllers.trace import Trace
from controllers.trace_replay import replay
from robo_rl import geometry as g
from robo_rl.errors import UserError

NONE = (0.0,) * 6
MOST = (SHARE * 60.0, SHARE * 20.0)  # [N], [N m] of the default limits
STIFF = (1500.0, 1500.0, 400.0, 60.0, 60.0, 20.0)


def wrench(t, *values, source="policy", frame="base", stamp=None):
    return ComplianceCommand(source, "wrench", tuple(values), frame, t if stamp is None else stamp)


def stiffness(*values, source="policy"):
    return ComplianceCommand(source, "stiffness", tuple(values))


def ticks(it, begin, seconds, *, poses=True, every=lambda t: None, measured=None):
    """Ticks, with a pose each 20 ms; -> what is in force after each, None as nothing."""
    out = []
    for k in range(round(seconds / DT)):
        t = begin + k * DT
        it.measure(measured or state(), t)
        if poses and k % 20 == 0:
            it.command(command(t), t)
        every(t)
        out.append(it.tick(t, DT).compliance)
    return out


def streamed(it, *values, every=20, **kw):
    """A commander's stream of one wrench, for `ticks`."""
    return lambda t: it.comply(wrench(t, *values, **kw), t) if round(t / DT) % every == 0 else None


# ---- the wrench --------------------------------------------------------------------------------------------


def test_a_wrench_goes_to_what_was_commanded_within_the_ramp_and_no_faster():
    it = active()
    goal = np.array([10.0, -5.0, 15.0, 1.0, 0.0, -2.0])
    out = np.array([c.wrench if c else NONE for c in ticks(it, 1.001, 0.3, every=streamed(it, *goal))])
    assert (
        np.array_equal(out[-1], goal)
        and it.compliance.now().stiffness is None
        and it.compliance.now().spring == pytest.approx(MOST)
    )
    steps = np.diff(np.vstack([np.zeros(6), out]), axis=0)
    for part, most in ((steps[:, :3], MOST[0]), (steps[:, 3:], MOST[1])):
        sizes = np.linalg.norm(part, axis=1)
        assert sizes.max() == pytest.approx(most * DT / RAMP)
    reached = int(np.argmax(np.all(out == goal, axis=1)))
    assert reached * DT == pytest.approx(RAMP * np.linalg.norm(goal[:3]) / MOST[0], abs=0.02)


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ((1e9, 0, 0, 0, 0, 0), (MOST[0], 0, 0, 0, 0, 0)),
        ((0, -30.0, 40.0, 0, 0, 0), (0, -0.6 * MOST[0], 0.8 * MOST[0], 0, 0, 0)),
        ((1.0, 2.0, 3.0, 0, 1e300, 0), (1.0, 2.0, 3.0, 0, MOST[1], 0)),
        ((0, 0, 0, 12.0, 0, -16.0), (0, 0, 0, 0.6 * MOST[1], 0, -0.8 * MOST[1])),
    ],
)
def test_a_wrench_beyond_its_share_of_the_force_limit_keeps_its_direction_and_counts(asked, allowed):
    it = active()
    verdict = it.comply(wrench(1.001, *asked), 1.001)
    assert (verdict.action, verdict.contract, verdict.blame) == ("rewrite", "wrench_range", "commander")
    assert it.compliance.goal == pytest.approx(allowed) and it.counts["wrench_range"] == 1
    assert ("N m here" in verdict.text) == any(abs(x) > MOST[1] for x in asked[3:])


def test_what_holds_the_arm_bounds_the_wrench():
    it = active(Limits(wrench=(10.0, 2.0)))
    assert it.comply(wrench(1.001, 0, 3.5, 0, 0, 0, 0.7), 1.001).action == "allow"
    assert it.comply(wrench(1.002, 0, 3.6, 0, 0, 0, 0.7), 1.002).contract == "wrench_range"
    assert it.comply(wrench(1.003, 0, 3.5, 0, 0, 0, 0.71), 1.003).contract == "wrench_range"


def test_a_wrench_in_the_tools_axes_is_turned_to_the_bases():
    it, quat = active(), (math.cos(0.4), 0.0, math.sin(0.4), 0.0)
    it.measure(state(quat=quat), 1.001)
    assert it.comply(wrench(1.001, 1.0, 2.0, 3.0, 0.1, 0.2, 0.3, frame=ROBOT.site), 1.001).action == "allow"
    turn = g.matrix(np.array(quat))
    assert it.compliance.goal == pytest.approx((*(turn @ [1.0, 2.0, 3.0]), *(turn @ [0.1, 0.2, 0.3])))


@pytest.mark.parametrize(
    ("bad", "contract"),
    [
        ({"values": (1.0,) * 5}, "dimensions"),
        ({"values": ()}, "dimensions"),
        ({"values": (1.0, math.nan, 0, 0, 0, 0)}, "finite"),
        ({"values": (math.inf, 0, 0, 0, 0, 0)}, "finite"),
        ({"stamp": math.nan}, "finite"),
        ({"frame": "camera"}, "frame"),
        ({"source": "stranger"}, "commander"),
        ({"stamp": 1.001}, "order"),
        ({"stamp": 500.0}, "future"),
        ({"now": 1.5}, "stale"),
    ],
)
def test_a_wrench_that_makes_no_sense_is_blocked_counted_and_changes_nothing(bad, contract):
    it = active(Limits(command_timeout=1e3, state_timeout=1e3))
    it.comply(wrench(1.001, *[2.0] * 6), 1.001)
    before = it.compliance.goal
    made = {"source": "policy", "values": (1.0,) * 6, "frame": "base", "stamp": 1.002} | bad
    now = made.pop("now", 1.002)
    verdict = it.comply(
        ComplianceCommand(made["source"], "wrench", made["values"], made["frame"], made["stamp"]), now
    )
    assert (verdict.action, verdict.contract) == ("block", contract) and it.counts[contract] == 1
    assert it.compliance.goal == before and it.commander == "policy"
    assert contract in CONTRACTS


def test_poses_and_wrenches_are_streams_of_their_own_stamps():
    it = active()
    assert it.comply(wrench(1.002, *NONE, stamp=0.5), 1.002).action == "allow"  # the pose's was 1.0
    assert it.command(command(1.003), 1.003).action == "allow"
    assert it.comply(wrench(1.004, *NONE, stamp=0.502), 1.004).action == "allow"


def test_too_many_wrenches_beyond_their_range_hold_the_arm():
    it = active()
    out = ticks(it, 1.001, 1.0, every=streamed(it, 1e9, 0, 0, 0, 0, 0))
    assert it.state == HOLD and "wrench_range" in it.reason
    assert out[-1] is None and max(math.hypot(*c.wrench[:3]) for c in out if c) <= MOST[0] + 1e-9


def test_a_silent_stream_lets_its_wrench_go_down_the_ramp_while_poses_go_on():
    it = active()
    ticks(it, 1.001, 0.5, every=streamed(it, 0, 0, MOST[0], 0, 0, 0))
    out = ticks(it, 1.501, 0.5)
    sizes = [c.wrench[2] if c else 0.0 for c in out]
    last = LIMITS.command_timeout
    assert sizes[round(last / DT) - 25] == MOST[0]  # 20 ms between two messages
    assert np.diff(sizes).min() >= -MOST[0] * DT / RAMP - 1e-9 and it.state == ACTIVE
    assert sizes[round((last + RAMP) / DT) + 2] == 0.0 and out[-1] is None


def test_a_wrench_is_silent_once_its_time_out_has_passed_not_at_it():
    it = CommandedCompliance(Limits(command_timeout=0.125))
    it.take(wrench(1.0, 1.0, 0, 0, 0, 0, 0), (1.0, 0.0, 0.0, 0.0), 1.0)
    it.ramp(1.125, DT, True)
    assert it.goal[0] == 1.0
    it.ramp(math.nextafter(1.125, 2.0), DT, True)
    assert it.goal == NONE


@pytest.mark.parametrize("ends", ["silence", "stop", "disarm", "lease", "push"])
def test_where_the_governor_brakes_wrench_and_stiffness_are_gone_in_the_same_tick(ends):
    it = active()
    it.comply(stiffness(*STIFF), 1.001)
    ticks(it, 1.001, 0.4, every=streamed(it, 5.0, 0, 0, 0, 0, 0))
    assert it.compliance.now().wrench[0] == 5.0 and it.compliance.now().stiffness == STIFF
    t = 1.401
    {
        "silence": lambda: None,
        "stop": lambda: it.stop(t),
        "disarm": lambda: it.disarm(t),
        "lease": lambda: it.hold(t, "lease", "a test"),
        "push": lambda: it.measure(state(wrench=(0, 70.0, 0, 0, 0, 0)), t),
    }[ends]()
    if ends == "silence":
        t += LIMITS.command_timeout
        it.measure(state(), t)
    assert it.tick(t, DT).compliance is None
    assert it.state == {"stop": STOPPED, "disarm": DISARMED}.get(ends, HOLD)
    if ends == "disarm":
        return
    assert (
        it.comply(wrench(t + DT, 5.0, 0, 0, 0, 0, 0), t + DT).contract == "state"
        and it.tick(t + DT, DT).compliance is None
    )


def test_when_the_commander_is_done_the_wrench_goes_down_the_ramp_and_the_next_one_finds_nothing_of_it():
    it = active()
    it.comply(stiffness(*STIFF), 1.001)
    ticks(it, 1.001, 0.4, every=streamed(it, MOST[0], 0, 0, 0, 0, 0))
    it.finish(1.401)
    out = ticks(it, 1.402, 0.3, poses=False)
    assert (
        it.state == ARMED
        and out[0].stiffness is None
        and out[0].wrench[0] == pytest.approx(MOST[0] * (1 - DT / RAMP))
    )
    assert out[-1] is None
    assert it.command(command(1.702, source="next"), 1.702).action == "allow"


def test_a_wrench_alone_is_a_command_it_wakes_the_armed_arm_and_keeps_it_from_silence():
    it = armed()
    assert (
        it.comply(wrench(1.0, 1.0, 0, 0, 0, 0, 0), 1.0).action == "allow"
        and it.state == ACTIVE
        and it.commander == "policy"
    )
    assert it.command(command(1.001, source="other"), 1.001).contract == "commander"
    ticks(it, 1.001, 0.5, poses=False, every=streamed(it, 1.0, 0, 0, 0, 0, 0))
    assert it.state == ACTIVE and it.motion.pos == AT
    ticks(it, 1.501, 0.2, poses=False)
    assert it.state == HOLD and it.counts["command_age"] == 1


def test_another_law_begins_without_the_wrench_of_the_one_before():
    it = active()
    it.comply(stiffness(*STIFF), 1.001)
    ticks(it, 1.001, 0.4, every=streamed(it, MOST[0], 0, 0, 0, 0, 0))
    it.measure(state(twist=(0.01, 0, 0, 0, 0.02, 0)), 1.402)
    it.rebase(1.402)
    assert it.motion.v == it.motion.w == (0.0, 0.0, 0.0) and it.motion.target == (
        it.motion.pos,
        it.motion.quat,
    )
    assert it.state == ARMED and it.tick(1.402, DT).compliance is None


# ---- the stiffness -----------------------------------------------------------------------------------------


def test_a_stiffness_is_sent_once_and_holds_while_its_commander_goes_on():
    it = active()
    assert it.comply(stiffness(*STIFF), 1.001).action == "allow"
    out = ticks(it, 1.001, 2.0)
    assert all(c.stiffness == STIFF and c.wrench == NONE and c.spring == pytest.approx(MOST) for c in out)
    assert it.comply(stiffness(*[300.0] * 3, *[20.0] * 3), 3.001).action == "allow"
    assert ticks(it, 3.001, 0.1)[-1].stiffness == (300.0,) * 3 + (20.0,) * 3
    ticks(it, 3.101, 0.3, poses=False)
    assert it.state == HOLD and it.compliance.now() is None


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ((1e9,) * 6, (3000.0,) * 3 + (300.0,) * 3),
        ((-5.0, 100.0, 0.0, 10.0, 400.0, 0.0), (0.0, 100.0, 0.0, 10.0, 300.0, 0.0)),
    ],
)
def test_a_stiffness_beyond_its_bounds_is_brought_into_them_and_counts(asked, allowed):
    it = active()
    verdict = it.comply(stiffness(*asked), 1.001)
    assert (verdict.action, verdict.contract) == (
        "rewrite",
        "stiffness_range",
    ) and it.compliance.stiffness == allowed
    assert "0 to 3000 N/m and 300 N m/rad" in verdict.text
    low = active(Limits(max_stiffness=(700.0, 40.0)))
    low.comply(stiffness(*[1000.0] * 6), 1.001)
    assert low.compliance.stiffness == (700.0,) * 3 + (40.0,) * 3


@pytest.mark.parametrize(
    ("bad", "contract"),
    [
        (stiffness(*[1.0] * 36), "dimensions"),
        (stiffness(1, 1, 1, 1, 1, math.nan), "finite"),
        (stiffness(1, 1, math.inf, 1, 1, 1), "finite"),
        (stiffness(*STIFF, source="stranger"), "commander"),
    ],
)
def test_a_stiffness_that_makes_no_sense_is_blocked_counted_and_changes_nothing(bad, contract):
    it = active()
    verdict = it.comply(bad, 1.001)
    assert (
        (verdict.action, verdict.contract) == ("block", contract)
        and it.counts[contract] == 1
        and it.compliance.now() is None
    )


def test_a_stiffness_commands_no_motion_it_needs_who_commands_and_does_not_keep_that_one_from_silence():
    it = armed()
    verdict = it.comply(stiffness(*STIFF), 1.0)
    assert (verdict.action, verdict.contract, verdict.text) == (
        "block",
        "state",
        "ARMED: nobody commands it yet",
    )
    assert it.state == ARMED and it.commander is None
    it = active()
    ticks(it, 1.001, 0.3, poses=False, every=lambda t: it.comply(stiffness(*STIFF), t))
    assert it.state == HOLD and "no command" in it.reason
    it = Governor(LIMITS, ROBOT)
    assert it.comply(wrench(1.0, *NONE), 1.0).text == "DISARMED: not armed"


def test_a_trace_with_wrench_and_stiffness_replays_to_the_same_decisions():
    trace = Trace()
    it = armed(trace=trace)
    it.command(command(1.0), 1.0)
    it.comply(stiffness(*STIFF), 1.001)
    it.comply(wrench(1.001, math.nan, 0, 0, 0, 0, 0, frame=ROBOT.site), 1.001)
    ticks(it, 1.002, 0.4, every=streamed(it, 50.0, 0, 1.0, 0, 0, 0, frame=ROBOT.site))
    assert replay(trace.events, ROBOT) is None
    at = next(i for i, e in enumerate(trace.events) if e["kind"] == "tick" and len(e["data"]["out"]) == 7)
    trace.events[at]["data"]["out"][6]["wrench"][0] += 1.0
    assert replay(trace.events, ROBOT) == at


def test_nearer_is_the_goal_or_a_step_on_the_way_to_it():
    assert nearer((0.0, 0.0, 0.0), (3.0, 4.0, 0.0), 5.0) == (3.0, 4.0, 0.0)
    assert nearer((0.0, 0.0, 0.0), (3.0, 4.0, 0.0), 2.5) == pytest.approx((1.5, 2.0, 0.0))
    assert nearer((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), 0.0) == (1.0, 1.0, 1.0)


# ---- every input -------------------------------------------------------------------------------------------


INPUTS = {
    "arm": lambda it, t: it.arm(t),
    "disarm": lambda it, t: it.disarm(t),
    "stop": lambda it, t: it.stop(t),
    "let_go": lambda it, t: it.let_go(t, "a"),
    "hold": lambda it, t: it.hold(t, "lease", "a test"),
    "finish": lambda it, t: it.finish(t),
    "rebase": lambda it, t: it.rebase(t),
    "reset": lambda it, t: it.reset(t),
    "moved": lambda it, t: it.moved(t),
    "state": lambda it, t: it.measure(state(), t),
    "command": lambda it, t: it.command(command(t), t),
    "comply": lambda it, t: it.comply(stiffness(*STIFF), t),
    "tick": lambda it, t: it.tick(t, DT),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_every_input_is_in_the_trace_with_its_time_and_is_held_against_the_clock(kind):
    for t, back in ((1.5, False), (0.5, True)):
        trace = Trace()
        it = armed(trace=trace)
        it.command(command(1.0), 1.0)
        with contextlib.suppress(UserError):  # out of order: it is an input all the same
            INPUTS[kind](it, t)
        assert [e["t"] for e in trace.events if e["kind"] == kind][-1] == t
        assert it.counts["clock"] == back and it.now == (1.0 if back else 1.5)
