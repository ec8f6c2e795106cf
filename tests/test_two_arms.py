"""Two arms as one robot: the file, the distance between the arms, what holds both, hostile commanders, one
policy, data."""

import json
import math
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import mujoco
import numpy as np
import pytest
from commands import Command as Started
from commands import dds_domain, robo_rl
from pairs import BASES, aloha, aloha_arm, near, pair, waving

from controllers.arm import Disturbance
from controllers.capsules import LinkCapsules, closest, enclosing, least_room
from controllers.contracts import Command, State
from controllers.governor import ACTIVE, ARMED, DISARMED, HOLD, STOPPED, Governor
from controllers.limits import Limits
from controllers.model import arm_model
from controllers.node import SAFETY_STATE
from controllers.pair import ArmPair, load_pair
from controllers.pair_bridge import PairInterface
from controllers.pair_governor import TOLERANCE, PairGovernor
from controllers.pair_scene import pair_scene
from controllers.policy_client import InProcessPolicy
from controllers.robot import load_robot
from controllers.transport import Flag, JointState, LoopbackTransport, Text
from robo_rl.data.reader import load
from robo_rl.errors import UserError
from robo_rl.experiment.arm import stiff_law
from robo_rl.experiment.deploy_options import DeployOptions
from robo_rl.experiment.deploy_pair import PairRecorder, in_process, pair_interface
from robo_rl.experiment.robot_check import RobotOptions, check_robot
from robo_rl.experiment.sim_arm import SimArmOptions
from robo_rl.experiment.sim_pair import make_sim_pair

SIM = load_robot("sim")


# ---- the file ----------------------------------------------------------------------------------------------


def test_a_pairs_file_names_two_arms_their_bases_and_their_axes_in_order(tmp_path):
    made = load_pair(aloha(tmp_path))
    assert (
        list(made.arms) == ["left", "right"]
        and made.bases["right"].pos == (0, -0.4, 0)
        and made.clearance == 0.05
    )
    assert (
        len(made.axes) == 14
        and made.axes[0] == "left_waist"
        and made.axes[6:8] == ("left_gripper", "right_waist")
    )
    made.need_limits()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"arms": {"left": "sim"}}, "arms are two"),
        ({"arms": {"a": "sim", "b": "sim", "c": "sim"}}, "arms are two"),
        ({"arms": {"left": "sim", "a/b": "sim"}}, "letters, digits and _"),
        ({"arms": ["sim", "sim"]}, "arms is an object"),
        ({"arms": {"left": "sim", "right": "none"}}, "unknown robot .none."),
        ({"bases": {"left": {"pos": [0, 0, 0]}}}, "bases are those of"),
        ({"bases": BASES | {"right": {"pos": [0, 0]}}}, "pos needs 3"),
        ({"bases": BASES | {"right": {"quat": [1, 0, 0, 0]}}}, "has pos and quat"),
        ({"bases": BASES | {"right": {"pos": [0, 0, 0], "quat": [1, 1, 0, 0]}}}, "length 1"),
        ({"clearance": 0}, "clearance must be"),
        ({"clearance": "5 cm"}, "clearance is a number"),
        ({"rate": 0}, "rate must be"),
        ({"without": {"bases": "we have none"}}, "without"),
        ({"without": {"clearance": "no"}}, "a sentence"),
        ({"speed": 1}, "unknown speed"),
    ],
)
def test_a_pairs_file_that_makes_no_sense_is_refused_with_one_line(tmp_path, changed, words):
    with pytest.raises(UserError, match=words) as e:
        load_pair(pair(tmp_path, **changed))
    assert "\n" not in str(e.value)


def test_a_pair_without_bases_or_clearance_is_not_armed_unless_it_says_why(tmp_path):
    with pytest.raises(UserError, match="no bases and no clearance, nor why"):
        load_pair(pair(tmp_path, bases=None, clearance=None)).need_limits()
    why = {"clearance": "a wall stands between them"}
    load_pair(pair(tmp_path, clearance=None, without=why)).need_limits()
    with pytest.raises(UserError, match="robot fr3 is not armed"):
        load_pair(pair(tmp_path, "fr3")).need_limits()
    (tmp_path / "again").mkdir()
    with pytest.raises(UserError, match="a pair itself"):
        load_pair(pair(tmp_path / "again", "../pair.json"))


@pytest.mark.parametrize(
    "command", [("robot", "home"), ("robot", "drive"), ("robot", "teleop"), ("robot", "calibrate")]
)
def test_a_command_for_one_arm_refuses_a_pair_with_one_line(tmp_path, command):
    path = pair(tmp_path)
    more = {"calibrate": ("--camera", "front", "--poses", "x.json")}.get(command[1], ())
    assert "is a pair of arms, and this drives one arm" in robo_rl(tmp_path, *command, path, *more).mistake


def test_robot_check_of_a_pair_looks_at_both_files_bases_and_clearance_and_asks_what_a_pair_needs(tmp_path):
    said = []
    for name, changed, good in (
        ("whole", {}, True),
        ("bare", {"bases": None, "clearance": None}, False),
        ("near", {"bases": BASES | {"right": {"pos": [0, 0.2, 0]}}}, False),
    ):
        out = tmp_path / f"{name}_check.json"
        check_robot(
            RobotOptions(file=pair(tmp_path, name=name, **changed), out=str(out)), lambda q: "", said.append
        )
        rows = {f["key"]: f for f in json.loads(out.read_text())["findings"]}
        assert {"left_limits", "right_limits", "bases", "clearance", "bases_measured", "stops_both"} <= set(
            rows
        )
        assert (
            rows["bases"]["good"] is rows["clearance"]["good"] is (name != "bare")
            and rows["stops_both"]["good"] is None
        )
        assert (
            all(r["good"] for k, r in rows.items() if r["part"] == "The file" and "sources" not in k) is good
        )
    assert rows["homes_apart"]["good"] is False and "mm apart" in rows["homes_apart"]["answer"]
    assert any("no bases" in line for line in said)


# ---- how near they are -------------------------------------------------------------------------------------


def test_the_nearest_points_of_two_segments_are_those_of_a_search():
    rng, grid = np.random.default_rng(0), np.linspace(0, 1, 201)
    for k in range(60):
        a, b = rng.uniform(-1, 1, (2, 6))
        if k % 6 == 0:
            a[3:] = a[:3]  # a point
        if k % 10 == 0:
            b[3:] = b[:3] + 0.3 * (a[3:] - a[:3])  # parallel
        s, t = closest(a, b)

        def at(x, share):
            return x[:3] + np.multiply.outer(share, x[3:] - x[:3])

        least = np.linalg.norm(at(a, grid)[:, None] - at(b, grid)[None], axis=-1).min()
        assert 0 <= s <= 1 and 0 <= t <= 1
        assert least - 0.02 <= np.linalg.norm(at(a, s) - at(b, t)) <= least + 1e-12


def test_a_capsule_holds_every_sphere_that_it_is_made_for():
    rng = np.random.default_rng(1)
    for count in (1, 2, 5, 40):
        points, radii = rng.normal(size=(count, 3)) * rng.uniform(0.01, 1, 3), rng.uniform(0, 0.1, count)
        a, b, radius = enclosing(points, radii)
        for p, r in zip(points, radii, strict=True):
            share = 0.0 if (b == a).all() else np.clip((p - a) @ (b - a) / ((b - a) @ (b - a)), 0, 1)
            assert np.linalg.norm(p - a - share * (b - a)) + r <= radius + 1e-9


def test_the_capsules_are_nearer_than_the_shapes_wherever_the_arms_are_and_move_as_they_do(tmp_path):
    turned = {
        "left": {"pos": [0.1, 0.4, 0.2], "quat": [0.9659258, 0, 0, 0.258819]},
        "right": {"pos": [0, -0.4, 0]},
    }
    made = load_pair(pair(tmp_path, bases=turned))
    share = next(iter(pair_scene(made, 0.001, Disturbance()).values()))
    mj, data, rng = share.mj, share.data, np.random.default_rng(2)
    models = {n: arm_model(r) for n, r in made.arms.items()}
    capsules = [
        LinkCapsules(models[n], r.model, 0.0, made.bases[n].pos, made.bases[n].quat)
        for n, r in made.arms.items()
    ]
    shapes = [
        [g for g in range(mj.ngeom) if mj.body(mj.body_rootid[mj.geom_bodyid[g]]).name.startswith(f"{n}/")]
        for n in models
    ]
    for _ in range(6):
        q = {n: rng.uniform(np.array(r.lower), np.array(r.upper)) for n, r in made.arms.items()}
        dq = {n: rng.normal(size=7) for n in models}
        for name, robot in made.arms.items():
            for j, angle in zip(robot.joints, q[name], strict=True):
                data.qpos[mj.joint(f"{name}/{j}").qposadr[0]] = angle
        mujoco.mj_kinematics(mj, data)
        exact = min(mujoco.mj_geomDistance(mj, data, a, b, 5.0, None) for a in shapes[0] for b in shapes[1])
        places = []
        for step in (0.0, 1e-6):
            for name, c in zip(models, capsules, strict=True):
                models[name].update(q[name] + step * dq[name], dq[name])
                c.place()
            places.append([c.ends.copy() for c in capsules])
        a, b = capsules
        _, near, _, _ = least_room(a.ends, a.speeds, a.radii, b.ends, b.speeds, b.radii, 1.0, 1.0, 0.0, 0.0)
        assert near <= exact + 1e-6 and near > exact - 0.2
        for c, before, after in zip(capsules, *places, strict=True):
            np.testing.assert_allclose((after - before) / 1e-6, c.speeds, atol=1e-4)


def test_an_arm_needs_room_to_stop_where_it_goes_to_the_other_and_none_where_it_goes_away():
    a, b = np.array([[0.0, 0, 0, 0, 0, 1]]), np.array([[0.5, 0, 0, 0.5, 0, 1]])
    still, r = np.zeros((1, 6)), np.array([0.1])
    there = np.array([[0.4, 0, 0, 0.4, 0, 0]])  # along x, to b

    def room(va, vb):
        return least_room(a, va, r, b, vb, r, 2.0, 4.0, 0.05, 0.01)

    assert room(still, still)[:2] == pytest.approx((0.31, 0.3))
    assert room(there, still)[:2] == pytest.approx((0.3 - 0.4**2 / 4 - 0.4 * 0.05, 0.3))
    assert room(there, -there)[0] == pytest.approx(0.3 - 0.4**2 / 4 - 0.4**2 / 8 - 0.8 * 0.05)
    assert room(-there, there)[0] == pytest.approx(0.31)  # apart
    # b may stop at once: what it runs away gives nothing
    assert room(there, there)[0] == pytest.approx(0.3 - 0.4**2 / 4 - 0.4 * 0.05)


def test_a_model_without_shapes_needs_a_radius():
    model = arm_model(SIM)
    spec = model.spec.copy()
    for geom in list(spec.geoms):
        spec.delete(geom)
    bare = type(model)(spec, SIM.joints, SIM.site)
    with pytest.raises(UserError, match="no shapes"):
        LinkCapsules(bare, spec, 0.0, (0, 0, 0), (1, 0, 0, 0))
    made = LinkCapsules(bare, spec, 0.07, (0, 0, 0), (1, 0, 0, 0))
    made.place()
    assert (made.radii == 0.07).all() and made.ends[-1, 3:] == pytest.approx(bare.pos)


# ---- what holds both ---------------------------------------------------------------------------------------

STATE = State(SIM.home, (0.0,) * 7, (0.5, 0.0, 0.4), (0.0, 1.0, 0.0, 0.0), (0.0,) * 6)


class Both:
    """Two governors and the one above them, on a clock of our own."""

    def __init__(self):
        self.left, self.right = Governor(Limits(give_up=0.2), SIM), Governor(Limits(give_up=0.2), SIM)
        self.pair, self.now, self.silent, self.n = (
            PairGovernor({"left": self.left, "right": self.right}, None),
            0.0,
            (),
            0,
        )

    def run(self, seconds=0.05, moving=()):
        for _ in range(round(seconds / 0.01)):
            self.now, self.n = self.now + 0.01, self.n + 1
            for g in (self.left, self.right):
                if g not in self.silent:
                    g.measure(STATE, self.now)
                if g in moving:
                    g.command(Command("c", self.now, "base", STATE.pos, STATE.quat), self.now)
            self.pair.couple(self.now)
            for g in (self.left, self.right):
                g.tick(self.now, 0.01)

    def arm(self):
        self.run(0.01)
        self.pair.arm(self.now)
        self.run(moving=(self.left, self.right))
        assert self.pair.state == ACTIVE


def states(both):
    return both.left.state, both.right.state


def test_what_holds_one_arm_holds_both_and_both_are_armed_again():
    both = Both()
    both.arm()
    both.left.hold(both.now, "lease", "the lease of x ended")
    both.run(0.01, (both.right,))
    assert states(both) == (HOLD, HOLD) and both.right.reason == "left arm: the lease of x ended"
    assert both.pair.reason == "left arm: the lease of x ended"
    both.arm()
    both.right.stop(both.now, "too fast")
    both.run(0.01)
    assert states(both) == (STOPPED, STOPPED) and both.left.reason == "right arm: too fast"
    both.left.reset(both.now)
    both.run(0.01)
    assert states(both) == (DISARMED, STOPPED)  # one after the other
    both.right.reset(both.now)
    both.arm()
    both.pair.disarm(both.now)
    both.run(0.01)
    both.pair.arm(both.now)
    both.left.hold(both.now, "lease", "the lease of x ended")
    both.run(0.01)
    assert states(both) == (HOLD, HOLD)  # also who only stands


def test_an_arm_whose_state_is_silent_stops_both():
    both = Both()
    both.arm()
    both.silent = (both.right,)
    both.run(0.1, (both.left, both.right))
    assert states(both) == (STOPPED, STOPPED) and "no measured state" in both.left.reason


def test_an_arm_moves_only_while_the_other_is_armed():
    both = Both()
    both.run(0.01)
    both.left.arm(both.now)
    both.run()
    assert states(both) == (ARMED, DISARMED)  # it may be armed, so that the other can be next
    both.run(0.02, (both.left,))
    assert states(both) == (HOLD, DISARMED) and both.left.reason == "right arm: DISARMED"
    both = Both()
    both.arm()
    both.right.disarm(both.now)
    both.run(0.01, (both.left,))
    assert both.left.state == HOLD


def test_arming_both_arms_neither_where_one_refuses():
    both = Both()
    both.silent = (both.right,)
    both.run(0.01)
    with pytest.raises(UserError, match="right arm: cannot arm: no measured state"):
        both.pair.arm(both.now)
    assert both.left.state == DISARMED


# ---- the simulated pair ------------------------------------------------------------------------------------


class There:
    """The simulated pair and a client, on one wire in lockstep."""

    def __init__(self, path, **kw):
        self.sim, _ = make_sim_pair(SimArmOptions(robot=path, lockstep=True, seconds=1e9, **kw))
        self.wire = LoopbackTransport(self.sim.bus, "client")
        self.orders = {n: self.wire.publisher(f"{n}/safety_command", Text, "command") for n in self.sim.nodes}
        self.said = {
            n: self.wire.subscription(f"{n}/{SAFETY_STATE}", Text, "latched") for n in self.sim.nodes
        }
        self.joints = {
            n: self.wire.publisher(f"{n}/target_joint", JointState, "command") for n in self.sim.nodes
        }
        self.run(0.02)

    def run(self, seconds, every=lambda: None):
        for _ in range(round(seconds / self.sim.dt)):
            self.sim.tick()
            every()

    def order(self, text, *arms):
        for name in arms or self.sim.nodes:
            self.orders[name].publish(Text(text))
        self.run(0.002)

    def states(self):
        return [n.governor.state for n in self.sim.nodes.values()]

    def stream(self, seconds, names=("left", "right")):
        """Command the arms to stay where they are."""
        for _ in range(round(seconds / 0.02)):
            for name in names:
                arm = self.sim.nodes[name].arm
                self.joints[name].publish(
                    JointState(self.wire.now(), arm.robot.joints, tuple(arm.model.q.tolist()))
                )
            self.run(0.02)

    def start(self):
        self.order("claim me 3600")
        self.order("arm me")
        self.stream(0.06)
        assert self.states() == [ACTIVE, ACTIVE]


@pytest.fixture(scope="module")
def pair_file(tmp_path_factory):
    return pair(tmp_path_factory.mktemp("pair"))


def test_both_simulated_arms_stand_in_one_scene_under_their_names(pair_file):
    there = There(pair_file)
    sim = there.sim
    left, right = (np.array(sim.data.site(f"{n}/tcp").xpos) for n in sim.nodes)
    np.testing.assert_allclose(left - right, [0, 0.8, 0], atol=1e-3)
    assert (
        all(n.arm.mj is sim.mj and n.arm.opening is not None for n in sim.nodes.values())
        and sim.data.ncon == 0
    )
    before = there.wire.subscription("right/joint_states", JointState)
    there.run(0.002)
    assert before.latest().message.names == SIM.joints
    sim.nodes["left"].arm.push([0, 5, 0, 0, 0, 0])
    there.run(0.3)
    assert (
        sim.data.site("left/tcp").xpos[1] > left[1] + 1e-4
        and abs(sim.data.site("right/tcp").xpos[1] - right[1]) < 1e-4
    )


def test_the_e_stop_of_one_arm_is_a_level_for_both(pair_file):
    there = There(pair_file)
    there.start()
    button = there.wire.publisher("left/estop", Flag, "latched")
    button.publish(Flag(True))
    there.run(0.003)
    assert there.states() == [STOPPED, STOPPED]
    assert [n.lease.holder(there.wire.now()) for n in there.sim.nodes.values()] == ["", ""]
    there.order("claim me 3600")
    there.order("reset me")
    assert there.states() == [STOPPED, STOPPED]  # also the arm whose own e-stop nobody pressed
    assert there.sim.nodes["right"].governor.counts["estop"] == 1  # told once, and it stays
    button.publish(Flag(False))
    there.run(0.003)
    there.order("claim me 3600")
    there.order("reset me")
    assert there.states() == [DISARMED, DISARMED]
    there.start()


def test_a_lease_that_ends_and_a_commander_that_is_silent_hold_both(pair_file):
    there = There(pair_file)
    there.order("claim me 3600", "left")
    there.order("claim me 0.3", "right")
    there.order("arm me")
    there.stream(0.4)
    assert HOLD in (s for s in there.states()) and ACTIVE not in there.states()
    assert "the lease of me ended" in there.sim.nodes["left"].governor.reason
    there.order("claim me 3600")
    there.order("arm me")
    there.stream(0.06)
    assert there.states() == [ACTIVE, ACTIVE]
    there.stream(0.2, ("right",))
    assert (
        there.states() == [HOLD, HOLD] and "left arm: no command" in there.sim.nodes["right"].governor.reason
    )


def hostile(there, seconds, seed, speed):
    """Random targets near or in the other arm, both armed again whenever they are held -> (least distance of
    the shapes [m], holds for the clearance, fastest tool [m/s] and joint as a share of its limit)."""
    sim, rng = there.sim, np.random.default_rng(seed)
    mj, data = sim.mj, sim.data
    shapes = [
        [g for g in range(mj.ngeom) if mj.body(mj.body_rootid[mj.geom_bodyid[g]]).name.startswith(f"{n}/")]
        for n in sim.nodes
    ]
    goal = {n: np.array(SIM.home) for n in sim.nodes}
    seen = SimpleNamespace(least=math.inf, tool=0.0, joint=0.0, until=0.0, sent=0.0, stuck=0)

    def look():
        t = sim.t
        for name, node in sim.nodes.items():
            arm = node.arm
            seen.tool = max(seen.tool, float(np.linalg.norm(arm.twist()[:3])))
            seen.joint = max(seen.joint, float((np.abs(arm.model.dq) / SIM.velocity).max()))
            if t > seen.until:
                away = 1.0 if name == "right" else -1.0  # the first joint turns to the other arm
                goal[name] = np.array(SIM.home) + rng.normal(size=7) * 0.5
                goal[name][0] = away * rng.uniform(0.3, 1.6)
                goal[name] = np.clip(goal[name], np.array(SIM.lower) + 0.1, np.array(SIM.upper) - 0.1)
            if t >= seen.sent:
                step = np.clip(goal[name] - arm.model.q, -0.06, 0.06)
                there.joints[name].publish(
                    JointState(there.wire.now(), arm.robot.joints, tuple((arm.model.q + step).tolist()))
                )
        if t > seen.until:
            seen.until = t + rng.uniform(0.2, 1.5)
        if t >= seen.sent:
            seen.sent = t + 0.02
            # a person moves them apart
            if sim.governor.separation.distance < sim.pair.clearance and seen.stuck > 10:
                for node in sim.nodes.values():
                    node.governor.disarm(node.transport.now())
                    node.arm.reset(np.array(SIM.home), opening=1.0)
                    node.governor.moved(node.transport.now())
                seen.stuck = 0
            elif any(s in (HOLD, STOPPED, DISARMED) for s in there.states()):
                seen.stuck += 1
                for name in sim.nodes:
                    for word in ("claim me 3600", "reset me", "arm me"):
                        there.orders[name].publish(Text(word))
        if round(t / sim.dt) % 10 == 0:
            closest_now = min(
                mujoco.mj_geomDistance(mj, data, a, b, 0.3, None) for a in shapes[0] for b in shapes[1]
            )
            seen.least = min(seen.least, closest_now)

    there.run(seconds, look)
    return seen, sum(n.governor.counts["clearance"] for n in sim.nodes.values())


@pytest.mark.parametrize(("seed", "speed"), [(0, 0.25), (1, 1.0)])
def test_hostile_targets_never_bring_the_arms_nearer_than_the_clearance_nor_faster_than_their_limits(
    tmp_path, seed, speed
):
    there = There(near(tmp_path), speed=speed)
    seen, held = hostile(there, 6.0, seed, speed)
    limits = there.sim.nodes["left"].governor.limits
    assert held >= 2, "they came near enough"
    assert 0.05 - TOLERANCE <= seen.least < 0.3 and there.sim.governor.separation.least >= 0.05 - TOLERANCE
    assert seen.tool <= 1.2 * limits.measured_speed[0] and seen.joint <= 1.2 * limits.joint_speed


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "speed"), [(2, 0.25), (3, 0.5), (4, 1.5)])
def test_hostile_targets_for_half_a_minute(tmp_path, seed, speed):
    there = There(near(tmp_path), speed=speed)
    seen, held = hostile(there, 30.0, seed, speed)
    print(
        f"{speed} m/s: {held} holds, least distance {1000 * there.sim.governor.separation.least:.1f} mm of "
        f"the capsules, {1000 * seen.least:.1f} mm of the shapes, tool {seen.tool:.2f} m/s, joint "
        f"{seen.joint:.2f}"
    )
    assert held >= 4 and min(seen.least, there.sim.governor.separation.least) >= 0.05 - TOLERANCE


# ---- one policy --------------------------------------------------------------------------------------------


def interface(path, names=None, units=None):
    made = load_pair(path)
    return PairInterface(
        pair=made, names=names or made.axes, units=units or (("rad",) * 6 + ("1",)) * 2, period=0.02
    )


def home(made: ArmPair):
    return np.concatenate([[*r.home, 0.5] for r in made.arms.values()])


def deploy(path, act, seconds=0.6, record="", task=None, **kw):
    task = task or interface(path)
    recorder = PairRecorder(task, record, "", "wave both", lambda line: None)
    options = DeployOptions(run="none", robot=path, transport="inprocess", seconds=seconds, **kw)
    bridge, _ = in_process(
        options, task, SimpleNamespace(execute=8), InProcessPolicy(act), recorder, print, print
    )
    recorder.close()
    return bridge


def test_one_policy_moves_both_arms_by_one_schedule_in_the_units_and_the_order_of_its_data(tmp_path):
    path = aloha(tmp_path)
    made = load_pair(path)
    task = interface(path)
    goal = home(made) + 0.04 * np.array([1, -1, 1, -1, 1, -1, 10] + [-1, 1, -1, 1, -1, 1, -5])
    bridge = deploy(path, lambda obs, prefix=None: np.tile(goal, (8, 1)), 1.5)
    assert bridge.governor.state == ACTIVE and bridge.schedule.counts["executed"] == 75
    np.testing.assert_allclose(bridge.row(), goal, atol=0.01)
    order = [*range(7, 14), *range(7)]  # the right arm first, in degrees and percent, with LeRobot's endings
    factors = np.array(([180 / math.pi] * 6 + [100]) * 2)
    other = interface(path, tuple(f"{task.names[k]}.pos" for k in order), (("deg",) * 6 + ("%",)) * 2)
    seen = []

    def act(obs, prefix=None):
        seen.append(obs["state"])
        return np.tile((goal * factors)[order], (8, 1))

    again = deploy(path, act, 1.5, task=other)
    np.testing.assert_allclose(again.row()[np.argsort(order)], bridge.row(), atol=2e-3)
    np.testing.assert_allclose(
        seen[0], (home(made) * factors)[order] + np.where(np.array(order) % 7 == 6, 50, 0), atol=0.1
    )


def test_a_policy_that_sends_the_arms_into_each_other_is_held_before_they_touch(tmp_path):
    path = aloha(tmp_path, bases={"left": {"pos": [0, 0.3, 0]}, "right": {"pos": [0, -0.3, 0]}})
    goal = home(load_pair(path))
    goal[[0, 7]] = -1.2, 1.2
    bridge = deploy(path, lambda obs, prefix=None: np.tile(goal, (8, 1)), 6.0)
    assert bridge.governor.state in (HOLD, STOPPED) and "mm apart and come nearer" in bridge.governor.reason
    assert bridge.governor.separation.least >= 0.05 - TOLERANCE
    assert sum(b.governor.counts["clearance"] for b in bridge.bridges.values()) == 2


def test_an_arm_that_is_held_keeps_the_other_from_being_commanded_in_the_same_period(tmp_path):
    task = interface(aloha(tmp_path))
    at = home(task.pair)

    class Once(PairRecorder):
        def watch(self, bridge):
            left, right = bridge.bridges.values()

            def hold(*_):
                if right.commands == 10:
                    left.governor.hold(left.transport.now(), "lease", "the lease of x ended")

            bridge.on_action = hold

    options = DeployOptions(run="none", robot=aloha(tmp_path), transport="inprocess", seconds=1.0)
    policy = InProcessPolicy(lambda obs, prefix=None: np.tile(at, (8, 1)))
    bridge, _ = in_process(
        options, task, SimpleNamespace(execute=8), policy, Once(task, "", "", "", print), print, print
    )
    assert [b.commands for b in bridge.bridges.values()] == [
        10,
        10,
    ] and bridge.governor.reason == "left arm: the lease of x ended"


def test_a_policy_that_is_lost_brakes_both_and_rows_that_are_none_are_refused(tmp_path):
    path = aloha(tmp_path)
    bridge = deploy(path, lambda obs, prefix=None: np.zeros((8, 7)))
    assert (
        "rows of shape (8, 7)" in bridge.lost and "robo_rl serve RUN" in bridge.lost and bridge.commands == 0
    )


def test_axes_that_the_pair_has_not_are_named(tmp_path):
    path = aloha(tmp_path)
    axes = load_pair(path).axes
    for names, units, words in (
        (("a", *axes[1:]), None, "a, no left_waist"),
        ((axes[1], *axes[1:]), None, "no left_waist"),
        (None, ("m",) * 14, "left_waist is in 'm'"),
        (None, (("rad",) * 7) * 2, "left_gripper is in 'rad'"),
    ):
        with pytest.raises(UserError, match=words):
            interface(path, names, units)
    no_grippers = tuple(a for a in axes if "gripper" not in a)
    assert interface(path, no_grippers, ("rad",) * 12).columns("right") == [6, 7, 8, 9, 10, 11]


def test_what_was_recorded_is_a_data_set_of_14_axes_that_a_policy_learns_from_and_both_arms_are_driven_by(
    tmp_path,
):
    path = aloha(tmp_path)
    made = load_pair(path)
    assert deploy(path, waving(home(made)), 1.0, record=str(tmp_path / "data")).commands == 100
    data = load(tmp_path / "data")
    assert (
        data.features.action == data.features.state == made.axes
        and data.features.fps == 50
        and data.action.shape == (50, 14)
    )
    np.testing.assert_allclose(data.state[-1], data.action[-1], atol=0.1)  # 75 ms of lag, and the grippers'
    tiny = [
        "--bc.updates",
        "20",
        "--bc.batch",
        "8",
        "--bc.noises",
        "2",
        "--policy.hidden",
        "32",
        "--data.held-out",
        "0",
    ]
    done = robo_rl(
        tmp_path, "train", "--sim", "none", "--algo", "bc", "--demos", "data", "--out", "run", *tiny
    )
    assert done.code == 0, done
    done = robo_rl(
        tmp_path,
        "deploy",
        "run",
        "--robot",
        path,
        "--transport",
        "inprocess",
        "--seconds",
        "0.3",
        "--record",
        "again",
    )
    assert (
        done.code == 0
        and "15 executed" in done.out
        and "contracts violated: none; least distance" in done.out
    ), done
    assert load(tmp_path / "again").action.shape == (15, 14)
    for more, words in (
        (("--video", "a.mp4"), "--video is for one arm"),
        (("--start", "1"), "--start is for one arm"),
        (("--command", "pose"), "commands joints"),
    ):
        assert (
            words
            in robo_rl(tmp_path, "deploy", "run", "--robot", path, "--transport", "inprocess", *more).mistake
        )
    slow = aloha(tmp_path, rate=30)
    assert (
        "50 actions a second"
        in robo_rl(tmp_path, "deploy", "run", "--robot", slow, "--transport", "inprocess").mistake
    )


def test_a_run_of_one_arm_is_refused_for_two(tmp_path):
    spec = SimpleNamespace(units=(), state=36, action=7, action_names=("dx",) * 7, views=(), image_size=0)
    with pytest.raises(UserError, match="trained in mujoco"):
        pair_interface(SimpleNamespace(sim="mujoco", demos="3"), spec, load_pair(pair(tmp_path)))


def test_stiff_joints_of_any_arm_follow_as_those_of_the_simulator_do(tmp_path):
    aloha_arm(tmp_path)
    law = stiff_law(load_robot(str(tmp_path / "aloha_arm.json")))
    assert len(law.posture_stiffness) == 6 and all(
        d / k == pytest.approx(0.075) for d, k in zip(law.posture_damping, law.posture_stiffness, strict=True)
    )


def test_every_command_of_the_page_runs_on_the_pair_that_it_shows(tmp_path):
    page = (Path(__file__).parent.parent / "docs/howto/two_arms.md").read_text()
    (tmp_path / "pair.json").write_text(re.search(r"```json\n(.*?)```", page, re.S)[1])
    (tmp_path / "answers.json").write_text("{}")
    made = load_pair(str(tmp_path / "pair.json"))
    task = PairInterface(pair=made, names=made.axes, units=(("rad",) * 7 + ("1",)) * 2, period=0.02)
    deploy(str(tmp_path / "pair.json"), waving(home(made)), 0.4, str(tmp_path / "data/pair"), task)
    more = {
        "sim-arm": ["--lockstep", "--seconds", "0.05"],
        "deploy": ["--seconds", "0.1", "--transport", "inprocess"],
        "robot": [],
        "train": ["--bc.updates", "5", "--bc.batch", "8", "--policy.hidden", "16", "--data.held-out", "0"],
    }
    lines = [
        line.split("#")[0].split()[1:] for line in re.search(r"```bash\n(.*?)```", page, re.S)[1].splitlines()
    ]
    assert {argv[0] for argv in lines} == set(more)
    for argv in lines:
        cut = [a for a in argv if a not in ("--seconds", "2", "--transport", "inprocess")]
        done = robo_rl(tmp_path, *cut, *more[argv[0]])
        assert done.code == (1 if argv[0] == "robot" else 0), done  # the first day's questions are open
    assert load(tmp_path / "data/again").action.shape == (5, 16)


@pytest.mark.slow
def test_a_pair_is_driven_over_dds_and_a_bridge_that_is_killed_leaves_both_held(tmp_path):
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    path, domain = aloha(tmp_path), dds_domain()
    # learnt so well that nothing else holds the arms
    deploy(path, waving(home(load_pair(path))), 1.0, str(tmp_path / "data"))
    tiny = ["--bc.updates", "200", "--bc.batch", "32", "--policy.hidden", "32", "--data.held-out", "0"]
    assert (
        robo_rl(
            tmp_path, "train", "--sim", "none", "--algo", "bc", "--demos", "data", "--out", "run", *tiny
        ).code
        == 0
    )
    arms = Started(tmp_path, ["sim-arm", "--robot", path, "--domain", domain, "--seconds", "120"])
    arms.until(lambda: "left/safety_command and right/safety_command" in arms.out.read_text())
    done = robo_rl(
        tmp_path, "deploy", "run", "--robot", path, "--domain", domain, "--seconds", "1", "--record", "again"
    )
    assert (
        "commanding" in done.out
        and "contracts violated: none" in done.out
        and len(load(tmp_path / "again").action) > 30
    ), done
    bridge = Started(tmp_path, ["deploy", "run", "--robot", path, "--domain", domain, "--seconds", "60"])
    bridge.until(lambda: "commanding" in bridge.out.read_text())
    time.sleep(1.0)  # it says so before its first command
    bridge.signal(signal.SIGKILL)
    bridge.wait()
    time.sleep(0.5)  # the arms' governors wait 0.1 s for a command, and 1 s before they give up
    arms.signal(signal.SIGINT)
    end = arms.wait()
    assert end.code == 0 and len(re.findall("(left|right) (?:HOLD|STOPPED)", end.out)) == 2, end
