"""The arm under a commanded wrench and stiffness: contact with the table, and clients on the wire."""

import math

import mujoco
import numpy as np
import pytest
from test_controllers_compliance import DT, MOST, NONE, ROBOT, STIFF, stiffness, wrench
from test_controllers_lease import Person
from test_controllers_manager import CARTESIAN, JOINT, There

from controllers.arm import SimArm, govern
from controllers.contracts import Command
from controllers.governor import ACTIVE, HOLD, Governor
from controllers.limits import Limits
from controllers.model import ArmModel
from controllers.transport import Numbers, PoseStamped, WrenchStamped
from controllers.wrench import Observer
from robo_rl import geometry as g

# ---- contact -----------------------------------------------------------------------------------------------


def above_the_table(height):
    """Joint angles with the tool, as at home, this high [m] above where it stands on the table at its
    fingers' tips."""
    model = ArmModel(SimArm(ROBOT).model.spec, ROBOT.joints, ROBOT.site)
    q = np.array(ROBOT.home)
    model.place(q)
    goal, facing = (*model.pos[:2], height), tuple(model.quat)
    for _ in range(100):
        model.place(q)
        error = np.array(
            (
                *(a - b for a, b in zip(goal, model.pos, strict=True)),
                *g.turn_between(facing, tuple(model.quat)),
            )
        )
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
    # nothing there yet: F = K x
    assert it.state == ACTIVE and there.start[2] - arm.model.pos[2] == pytest.approx(8 / 600, rel=0.02)
    down = there.start[2]
    there.run(
        2.5,
        lambda t: (
            there.aim(min(down, down * (t - 1.2) / 1.0)),
            it.comply(wrench(t, 0, 0, -8.0, 0, 0, 0), t),
        ),
    )
    assert it.state == ACTIVE and not it.counts
    lead = it.motion.pos[2] - arm.model.pos[2]
    assert np.mean(there.forces[-200:]) == pytest.approx(8.0 - 600 * lead, abs=0.3)
    there.run(0.3)  # silence
    assert it.state == HOLD and np.mean(there.forces[-20:]) < 3.0


def test_whatever_is_asked_for_the_force_on_the_table_stays_below_what_holds_the_arm():
    """The stiffest springs, the largest wrench, a target below the table: together below 60 N, and still the
    arm is not held for it."""
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


# ---- on the wire -------------------------------------------------------------------------------------------


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
    assert (
        all("commands while alice holds the arm" in line for line in told)
        and there.node.governor.compliance.now() is None
    )
    alice.stiffnesses.publish(Numbers((100.0,) * 3))
    assert alice.stream(0.04) == ["target_stiffness: a stiffness has 6 numbers, got 3"]
    assert alice.stream(0.04, (math.nan,) * 6) == [
        "target_wrench: the wrench has a number that is not finite"
    ]
    [line] = alice.stream(0.04, NONE, "world")
    assert line == f"target_wrench: a wrench must be in frame 'base' or '{there.arm.robot.site}', got 'world'"
    alice.say("disarm")
    alice.stiffnesses.publish(Numbers(STIFF))
    # streams are silent: they go on
    assert alice.stream(0.04, NONE) == ["target_stiffness: DISARMED: disarmed"]


@pytest.mark.parametrize("name", [JOINT, "gravity_compensation"])
def test_a_law_without_springs_along_the_axes_takes_neither(name):
    there = There(controller="cartesian")
    crisp = Client(there, "crisp")
    assert there.active() == [CARTESIAN] and there.switch([name])["ok"]
    crisp.say("claim crisp 60", "arm crisp")
    crisp.stiffnesses.publish(Numbers(STIFF))
    told = crisp.stream(0.04, NONE)
    assert sorted(line.split(":")[0] for line in told) == ["target_stiffness", "target_wrench"]
    assert all(
        "needs a controller of Cartesian impedance: switch to cartesian_impedance_controller" in line
        for line in told
    )
