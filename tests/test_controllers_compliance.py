"""A wrench and a stiffness that a commander asks for, behind the governor: bounds, ramps, silence, the lease, contact."""

import math

import mujoco
import numpy as np
import pytest
from test_controllers_governor import AT, DT, LIMITS, ROBOT, active, armed, command, state
from test_controllers_lease import Person
from test_controllers_manager import CARTESIAN, JOINT, There

from controllers.arm import SimArm, govern
from controllers.compliance import RAMP, SHARE, ComplianceCommand, nearer
from controllers.contracts import CONTRACTS, Command
from controllers.governor import ACTIVE, ARMED, DISARMED, HOLD, STOPPED, Governor
from controllers.limits import Limits
from controllers.model import ArmModel
from controllers.trace import Trace
from controllers.trace_replay import replay
from controllers.transport import Numbers, PoseStamped, WrenchStamped
from controllers.wrench import Observer
from robo_rl import geometry as g

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


# ---- the wrench --------------------------------------------------------------------------------------------------------


def test_a_wrench_goes_to_what_was_commanded_within_the_ramp_and_no_faster():
    it = active()
    goal = np.array([10.0, -5.0, 15.0, 1.0, 0.0, -2.0])
    out = np.array([c.wrench if c else NONE for c in ticks(it, 1.001, 0.3, every=streamed(it, *goal))])
    assert np.array_equal(out[-1], goal) and it.compliance.now().stiffness is None and it.compliance.now().spring == pytest.approx(MOST)
    steps = np.diff(np.vstack([np.zeros(6), out]), axis=0)
    for part, most in ((steps[:, :3], MOST[0]), (steps[:, 3:], MOST[1])):
        sizes = np.linalg.norm(part, axis=1)
        assert sizes.max() == pytest.approx(most * DT / RAMP)
    reached = int(np.argmax(np.all(out == goal, axis=1)))
    assert reached * DT == pytest.approx(RAMP * np.linalg.norm(goal[:3]) / MOST[0], abs=0.02)


@pytest.mark.parametrize(("asked", "allowed"), [
    ((1e9, 0, 0, 0, 0, 0), (MOST[0], 0, 0, 0, 0, 0)),
    ((0, -30.0, 40.0, 0, 0, 0), (0, -0.6 * MOST[0], 0.8 * MOST[0], 0, 0, 0)),
    ((1.0, 2.0, 3.0, 0, 1e300, 0), (1.0, 2.0, 3.0, 0, MOST[1], 0)),
    ((0, 0, 0, 12.0, 0, -16.0), (0, 0, 0, 0.6 * MOST[1], 0, -0.8 * MOST[1]))])
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


@pytest.mark.parametrize(("bad", "contract"), [
    ({"values": (1.0,) * 5}, "dimensions"), ({"values": ()}, "dimensions"), ({"values": (1.0, math.nan, 0, 0, 0, 0)}, "finite"),
    ({"values": (math.inf, 0, 0, 0, 0, 0)}, "finite"), ({"stamp": math.nan}, "finite"), ({"frame": "camera"}, "frame"),
    ({"source": "stranger"}, "commander"), ({"stamp": 1.001}, "order"), ({"stamp": 500.0}, "future"), ({"now": 1.5}, "stale")])
def test_a_wrench_that_makes_no_sense_is_blocked_counted_and_changes_nothing(bad, contract):
    it = active(Limits(command_timeout=1e3, state_timeout=1e3))
    it.comply(wrench(1.001, *[2.0] * 6), 1.001)
    before = it.compliance.goal
    made = {"source": "policy", "values": (1.0,) * 6, "frame": "base", "stamp": 1.002} | bad
    now = made.pop("now", 1.002)
    verdict = it.comply(ComplianceCommand(made["source"], "wrench", made["values"], made["frame"], made["stamp"]), now)
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


@pytest.mark.parametrize("ends", ["silence", "stop", "disarm", "lease", "push"])
def test_where_the_governor_brakes_wrench_and_stiffness_are_gone_in_the_same_tick(ends):
    it = active()
    it.comply(stiffness(*STIFF), 1.001)
    ticks(it, 1.001, 0.4, every=streamed(it, 5.0, 0, 0, 0, 0, 0))
    assert it.compliance.now().wrench[0] == 5.0 and it.compliance.now().stiffness == STIFF
    t = 1.401
    {"silence": lambda: None, "stop": lambda: it.stop(t), "disarm": lambda: it.disarm(t),
     "lease": lambda: it.hold(t, "lease", "a test"), "push": lambda: it.measure(state(wrench=(0, 70.0, 0, 0, 0, 0)), t)}[ends]()
    if ends == "silence":
        t += LIMITS.command_timeout
        it.measure(state(), t)
    assert it.tick(t, DT).compliance is None
    assert it.state == {"stop": STOPPED, "disarm": DISARMED}.get(ends, HOLD)
    if ends == "disarm":
        return
    assert it.comply(wrench(t + DT, 5.0, 0, 0, 0, 0, 0), t + DT).contract == "state" and it.tick(t + DT, DT).compliance is None


def test_when_the_commander_is_done_the_wrench_goes_down_the_ramp_and_the_next_one_finds_nothing_of_it():
    it = active()
    it.comply(stiffness(*STIFF), 1.001)
    ticks(it, 1.001, 0.4, every=streamed(it, MOST[0], 0, 0, 0, 0, 0))
    it.finish(1.401)
    out = ticks(it, 1.402, 0.3, poses=False)
    assert it.state == ARMED and out[0].stiffness is None and out[0].wrench[0] == pytest.approx(MOST[0] * (1 - DT / RAMP))
    assert out[-1] is None
    assert it.command(command(1.702, source="next"), 1.702).action == "allow"


def test_a_wrench_alone_is_a_command_it_wakes_the_armed_arm_and_keeps_it_from_silence():
    it = armed()
    assert it.comply(wrench(1.0, 1.0, 0, 0, 0, 0, 0), 1.0).action == "allow" and it.state == ACTIVE and it.commander == "policy"
    assert it.command(command(1.001, source="other"), 1.001).contract == "commander"
    ticks(it, 1.001, 0.5, poses=False, every=streamed(it, 1.0, 0, 0, 0, 0, 0))
    assert it.state == ACTIVE and it.motion.pos == AT
    ticks(it, 1.501, 0.2, poses=False)
    assert it.state == HOLD and it.counts["command_age"] == 1


# ---- the stiffness -----------------------------------------------------------------------------------------------------


def test_a_stiffness_is_sent_once_and_holds_while_its_commander_goes_on():
    it = active()
    assert it.comply(stiffness(*STIFF), 1.001).action == "allow"
    out = ticks(it, 1.001, 2.0)
    assert all(c.stiffness == STIFF and c.wrench == NONE and c.spring == pytest.approx(MOST) for c in out)
    assert it.comply(stiffness(*[300.0] * 3, *[20.0] * 3), 3.001).action == "allow"
    assert ticks(it, 3.001, 0.1)[-1].stiffness == (300.0,) * 3 + (20.0,) * 3
    ticks(it, 3.101, 0.3, poses=False)
    assert it.state == HOLD and it.compliance.now() is None


@pytest.mark.parametrize(("asked", "allowed"), [
    ((1e9,) * 6, (3000.0,) * 3 + (300.0,) * 3), ((-5.0, 100.0, 0.0, 10.0, 400.0, 0.0), (0.0, 100.0, 0.0, 10.0, 300.0, 0.0))])
def test_a_stiffness_beyond_its_bounds_is_brought_into_them_and_counts(asked, allowed):
    it = active()
    verdict = it.comply(stiffness(*asked), 1.001)
    assert (verdict.action, verdict.contract) == ("rewrite", "stiffness_range") and it.compliance.stiffness == allowed
    assert "0 to 3000 N/m and 300 N m/rad" in verdict.text
    low = active(Limits(max_stiffness=(700.0, 40.0)))
    low.comply(stiffness(*[1000.0] * 6), 1.001)
    assert low.compliance.stiffness == (700.0,) * 3 + (40.0,) * 3


@pytest.mark.parametrize(("bad", "contract"), [
    (stiffness(*[1.0] * 36), "dimensions"), (stiffness(1, 1, 1, 1, 1, math.nan), "finite"), (stiffness(1, 1, math.inf, 1, 1, 1), "finite"),
    (stiffness(*STIFF, source="stranger"), "commander")])
def test_a_stiffness_that_makes_no_sense_is_blocked_counted_and_changes_nothing(bad, contract):
    it = active()
    verdict = it.comply(bad, 1.001)
    assert (verdict.action, verdict.contract) == ("block", contract) and it.counts[contract] == 1 and it.compliance.now() is None


def test_a_stiffness_commands_no_motion_it_needs_who_commands_and_does_not_keep_that_one_from_silence():
    it = armed()
    verdict = it.comply(stiffness(*STIFF), 1.0)
    assert (verdict.action, verdict.contract, verdict.text) == ("block", "state", "ARMED: nobody commands it yet")
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


# ---- contact -----------------------------------------------------------------------------------------------------------


def above_the_table(height):
    """Joint angles with the tool, as at home, this high [m] above where it stands on the table at its fingers' tips."""
    model = ArmModel(SimArm(ROBOT).model.spec, ROBOT.joints, ROBOT.site)
    q = np.array(ROBOT.home)
    model.place(q)
    goal, facing = (*model.pos[:2], height), tuple(model.quat)
    for _ in range(100):
        model.place(q)
        error = np.array((*(a - b for a, b in zip(goal, model.pos, strict=True)), *g.turn_between(facing, tuple(model.quat))))
        q = q + np.clip(np.linalg.lstsq(model.jac, error, rcond=None)[0], -0.1, 0.1)
    return q


LOW = above_the_table(0.03)


class Pressing:
    """The governed arm near the table, and its measured contact forces."""

    def __init__(self):
        self.arm = SimArm(ROBOT, q=LOW)
        self.arm.observer = Observer(self.arm.model)
        self.it = Governor(Limits(low=(None, None, -1.0)), ROBOT)
        self.forces = []
        self.run(0.2)
        self.it.arm(self.arm.t)
        self.start, self.quat = (tuple(x) for x in self.arm.pose())

    def run(self, seconds, every=lambda t: None):
        for k in range(round(seconds / DT)):
            if k % 20 == 0:
                every(self.arm.t)
            govern(self.arm, self.it)
            self.forces.append(sum(normal(self.arm, i) for i in range(self.arm.data.ncon)))

    def aim(self, down):
        x, y, z = self.start
        now = self.arm.t
        self.it.command(Command("policy", now, "base", (x, y, z - down), self.quat), now)


def normal(arm, i):
    force = np.zeros(6)
    mujoco.mj_contactForce(arm.mj, arm.data, i, force)
    return force[0]


def test_a_wrench_presses_on_the_table_with_its_own_force_and_lets_go_with_its_commander():
    there = Pressing()
    arm, it = there.arm, there.it
    there.run(1.0, lambda t: (there.aim(0.0), it.comply(wrench(t, 0, 0, -8.0, 0, 0, 0), t)))
    assert it.state == ACTIVE and there.start[2] - arm.model.pos[2] == pytest.approx(8 / 600, rel=0.02)  # nothing there yet: F = K x
    down = there.start[2]
    there.run(2.5, lambda t: (there.aim(min(down, down * (t - 1.2) / 1.0)), it.comply(wrench(t, 0, 0, -8.0, 0, 0, 0), t)))
    assert it.state == ACTIVE and not it.counts
    lead = it.motion.pos[2] - arm.model.pos[2]
    assert np.mean(there.forces[-200:]) == pytest.approx(8.0 - 600 * lead, abs=0.3)
    there.run(0.3)  # silence
    assert it.state == HOLD and np.mean(there.forces[-20:]) < 3.0


def test_whatever_is_asked_for_the_force_on_the_table_stays_below_what_holds_the_arm():
    """The stiffest springs, the largest wrench, a target below the table: together below 60 N, and still the arm is not held for it."""
    there = Pressing()
    arm, it = there.arm, there.it
    most = (0, 0, -MOST[0], 0, 0, 0)
    there.run(1.4, lambda t: there.aim(0.02 * (t - 0.2)))
    assert arm.data.ncon  # it has met the table
    it.comply(stiffness(3000.0, 3000.0, 3000.0, 100.0, 100.0, 100.0), arm.t)
    met = len(there.forces)
    there.run(1.5, lambda t: (there.aim(min(0.045, 0.02 * (t - 0.2))), it.comply(wrench(t, *most), t)))
    assert it.state == ACTIVE and arm.law.k[2] == 3000.0
    assert 3000 * (arm.model.pos[2] - it.motion.pos[2]) > 60.0  # what the springs would pull by themselves
    assert 0.95 * 2 * MOST[0] < np.mean(there.forces[-200:]) < 60.0 and max(there.forces[met:]) < 60.0
    it.comply(wrench(arm.t, *[-1e9] * 6), arm.t)
    there.run(0.3, lambda t: there.aim(0.045))
    assert max(there.forces[met:]) < 60.0 and not it.counts["wrench"]


# ---- on the wire -------------------------------------------------------------------------------------------------------


class Client(Person):
    """What crisp_py.Robot publishes: pose and wrench 50 times a second, a stiffness once."""

    def __init__(self, there, name):
        super().__init__(there, name)
        self.poses = self.wire.publisher("target_pose", PoseStamped, "command")
        self.wrenches = self.wire.publisher("target_wrench", WrenchStamped, "command")
        self.stiffnesses = self.wire.publisher("target_stiffness", Numbers, "command")
        self.at = tuple(there.arm.model.pos), tuple(there.arm.model.quat)

    def stream(self, seconds, wrench=None, frame="base", poses=True):
        """-> refusals, as told on the wire."""
        refused = []
        for _ in range(round(seconds / 0.02)):
            if poses:
                self.poses.publish(PoseStamped(self.wire.now(), "base", *self.at))
            if wrench is not None:
                self.wrenches.publish(WrenchStamped(self.wire.now(), frame, wrench))
            self.there.run(0.02)
            refused += [got.message.data for got in self.refused.take()]
        return refused


def test_crisps_wrench_and_stiffness_are_followed_behind_the_governor():
    there = There(controller="cartesian")
    crisp = Client(there, "crisp")
    crisp.say("claim crisp 60", "arm crisp")
    assert crisp.stream(0.1) == []
    stiff = there.arm.law.options.stiffness[1]
    assert crisp.stream(1.0, wrench=(0.0, 9.0, 0.0, 0.0, 0.0, 0.0)) == []
    assert there.arm.model.pos[1] - crisp.at[0][1] == pytest.approx(9 / stiff, rel=0.03)
    crisp.stiffnesses.publish(Numbers((300.0,) * 3 + (30.0,) * 3))
    assert crisp.stream(1.5, wrench=(0.0, 9.0, 0.0, 0.0, 0.0, 0.0)) == []
    assert there.arm.model.pos[1] - crisp.at[0][1] == pytest.approx(9 / 300, rel=0.03)
    assert there.node.governor.state == "ACTIVE" and not there.node.governor.counts
    crisp.stream(1.0)  # no wrench any more
    assert there.arm.model.pos[1] == pytest.approx(crisp.at[0][1], abs=1e-3) and there.arm.law.k[1] == 300.0


def test_only_the_leases_holder_presses_and_what_is_refused_says_why():
    there = There(controller="cartesian")
    alice, bob = Client(there, "alice"), Client(there, "bob")
    alice.say("claim alice 60", "arm alice")
    alice.stream(0.1)
    bob.wrenches.publish(WrenchStamped(bob.wire.now(), "base", (0.0, 20.0, 0.0, 0.0, 0.0, 0.0)))
    bob.stiffnesses.publish(Numbers((0.0,) * 6))
    told = alice.stream(0.1)
    assert [line.split(":")[0] for line in told] == ["target_wrench", "target_stiffness"]
    assert all("commands while alice holds the arm" in line for line in told) and there.node.governor.compliance.now() is None
    alice.stiffnesses.publish(Numbers((100.0,) * 3))
    assert alice.stream(0.04) == ["target_stiffness: a stiffness has 6 numbers, got 3"]
    assert alice.stream(0.04, (math.nan,) * 6) == ["target_wrench: the wrench has a number that is not finite"]
    [line] = alice.stream(0.04, NONE, "world")
    assert line == f"target_wrench: a wrench must be in frame 'base' or '{there.arm.robot.site}', got 'world'"
    alice.say("disarm")
    alice.stiffnesses.publish(Numbers(STIFF))
    assert alice.stream(0.04, NONE) == ["target_stiffness: DISARMED: disarmed"]  # streams are silent: they go on


@pytest.mark.parametrize("name", [JOINT, "gravity_compensation"])
def test_a_law_without_springs_along_the_axes_takes_neither(name):
    there = There(controller="cartesian")
    crisp = Client(there, "crisp")
    assert there.active() == [CARTESIAN] and there.switch([name])["ok"]
    crisp.say("claim crisp 60", "arm crisp")
    crisp.stiffnesses.publish(Numbers(STIFF))
    told = crisp.stream(0.04, NONE)
    assert sorted(line.split(":")[0] for line in told) == ["target_stiffness", "target_wrench"]
    assert all("needs a controller of Cartesian impedance: switch to cartesian_impedance_controller" in line for line in told)
