"""The control law against mathematics, the model against differences, and the defects of public controllers."""

import json
import math
from dataclasses import replace

import mujoco
import numpy as np
import pytest
from plain_law import PlainLaw

from controllers.arm import Disturbance, SimArm
from controllers.law import (
    Admittance,
    AdmittanceOptions,
    Law,
    LawOptions,
    gravity_compensation,
    joint_impedance,
    operational_space,
)
from controllers.model import ArmModel, arm_model
from controllers.robot import PRESETS, by_name, load_robot, presets
from controllers.tick import between, cholesky, friction, limit_torque, rotate, solve, tick, turn
from robo_rl import geometry as g
from robo_rl.errors import UserError

ROBOT = load_robot("sim")
FREE = replace(ROBOT, torque_rate=1e9)
HOME = np.array(ROBOT.home)
MODEL = arm_model(ROBOT)
RNG = np.random.default_rng(0)
BENT = [HOME + d for d in RNG.uniform(-0.3, 0.3, (5, 7))]
AT_ONCE = {"target_speed": 1e9, "target_turn": 1e9, "filter_time": 0.0, "torque_rate": None, "ramp": 0.0,
           "feed_acceleration": (0.0, 0.0)}


def law_at(q, options=None, dq=None, model=None):
    model = model or MODEL
    model.update(np.asarray(q, float), np.zeros(7) if dq is None else dq)
    options = options or LawOptions()
    law = Law(options, FREE if options.torque_rate is None else ROBOT)
    law.activate(model)
    return law


# ---- model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", BENT)
def test_the_jacobian_is_the_derivative_of_the_pose_in_base_axes(q):
    model, h = arm_model(ROBOT), 1e-6
    model.update(q, np.zeros(7))
    jac = model.jac.copy()
    for i in range(7):
        poses = []
        for sign in (-1, 1):
            bent = q.copy()
            bent[i] += sign * h
            model.update(bent, np.zeros(7))
            poses.append((np.array(model.pos), np.array(model.quat)))
        moved = g.pose_error(*poses[1], *poses[0]) / (2 * h)
        assert np.allclose(jac[:, i], moved, atol=1e-7)


@pytest.mark.parametrize("q", BENT[:2])
def test_inertia_and_bias_agree_with_the_simulated_motion(q):
    arm = SimArm(ROBOT, q=q)
    dq = RNG.uniform(-0.5, 0.5, 7)
    arm.data.qvel[arm._dof] = dq
    arm.sense()
    m = arm.model
    assert np.allclose(m.minv_jt, (np.linalg.inv(m.inertia()) @ m.jac.T).T)
    torque = np.linspace(-5, 5, 7)
    arm.data.ctrl[arm._ctrl] = torque
    mujoco.mj_forward(arm.mj, arm.data)
    passive = arm.data.qfrc_passive[arm._dof]
    assert np.allclose(m.inertia() @ arm.data.qacc[arm._dof] + m.bias, torque + passive, atol=0.05)  # moving fingers


def test_gravity_and_coriolis_can_be_left_to_the_firmware():
    dq = np.linspace(-1, 1, 7)
    parts = {}
    for gravity in (True, False):
        for coriolis in (True, False):
            m = arm_model(ROBOT, gravity=gravity, coriolis=coriolis)
            m.update(HOME, dq)
            parts[gravity, coriolis] = m.bias.copy()
    assert not parts[False, False].any()
    assert np.allclose(parts[True, True], parts[True, False] + parts[False, True])
    assert np.abs(parts[True, False]).max() > 10 and 0.01 < np.abs(parts[False, True]).max() < 10


def test_the_data_file_is_the_arm_of_the_simulator():
    from sims.mujoco.model import scene_xml
    spec = mujoco.MjSpec.from_string(scene_xml(""))
    theirs = spec.compile()
    ours = mujoco.MjSpec.from_file(ROBOT.model).compile()
    a, b = mujoco.MjData(theirs), mujoco.MjData(ours)
    for q in BENT:
        for m, d in ((theirs, a), (ours, b)):
            d.qpos[:7] = q
            mujoco.mj_forward(m, d)
        hands = [d.body("link7") for d in (a, b)]
        assert np.allclose(hands[0].xpos, hands[1].xpos) and np.allclose(hands[0].xmat, hands[1].xmat)
    assert np.allclose(theirs.body_mass, ours.body_mass) and np.allclose(theirs.body_inertia, ours.body_inertia)
    assert np.allclose(theirs.dof_armature, ours.dof_armature) and np.allclose(theirs.jnt_range, ours.jnt_range)
    from sims.mujoco.kinematics import Arm
    arm = Arm(1)
    arm.forward(BENT[0].astype(np.float32)[:, None])
    MODEL.update(BENT[0], np.zeros(7))
    assert np.allclose(arm.tcp[:, 0], MODEL.pos, atol=1e-5)


URDF = """<robot name="two"><link name="base"/>
<link name="a"><inertial><mass value="2"/><origin xyz="0.5 0 0"/><inertia ixx="0.1" iyy="0.1" izz="0.1" ixy="0" ixz="0"
 iyz="0"/></inertial><visual><geometry><mesh filename="package://nowhere/a.stl"/></geometry></visual></link>
<link name="b"><inertial><mass value="1"/><origin xyz="0.5 0 0"/><inertia ixx="0.1" iyy="0.1" izz="0.1" ixy="0" ixz="0"
 iyz="0"/></inertial></link><link name="tip"/>
<joint name="j1" type="revolute"><parent link="base"/><child link="a"/><axis xyz="0 1 0"/>
 <limit lower="-3" upper="3" effort="50" velocity="2"/></joint>
<joint name="j2" type="revolute"><parent link="a"/><child link="b"/><origin xyz="1 0 0"/><axis xyz="0 1 0"/>
 <limit lower="-3" upper="3" effort="50" velocity="2"/></joint>
<joint name="fixed" type="fixed"><parent link="b"/><child link="tip"/><origin xyz="1 0 0"/></joint></robot>"""


def test_a_urdf_without_its_meshes_gives_an_arm_with_its_fixed_links_by_name():
    arm = ArmModel(URDF, ("j1", "j2"), "tip")
    arm.update(np.zeros(2), np.zeros(2))
    assert np.allclose(arm.pos, [2, 0, 0])
    assert np.allclose(arm.bias, [-9.81 * (2 * 0.5 + 1 * 1.5), -9.81 * 0.5])
    assert np.allclose(arm.jac[:3], [[0, 0], [0, 0], [-2, -1]])


def test_joints_that_are_not_named_are_locked():
    one = ArmModel(URDF, ("j1",), "tip")
    one.update(np.zeros(1), np.zeros(1))
    assert np.allclose(one.pos, [2, 0, 0]) and one.n == 1


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_every_gain_in_it_is_an_option(name):
    robot = load_robot(name)
    Law(LawOptions(**{k: tuple(v) if isinstance(v, list) else v for k, v in robot.gains.items()}), robot)
    assert robot.topics["target_pose"] == "target_pose"


# ---- the arithmetic ------------------------------------------------------------------------------------------------------


def test_compiled_turns_are_those_of_geometry():
    for q, p, r in zip(RNG.normal(size=(50, 4)), RNG.normal(size=(50, 4)), RNG.normal(size=(50, 3)), strict=True):
        a, b = g.normalise(q), -g.normalise(p)
        assert np.allclose(between(a, b), g.turn_between(tuple(a), tuple(b)), atol=1e-14)
        assert between(a, a) == (0, 0, 0)
        for way, by in ((1, a), (-1, g.conjugate(a))):
            both = np.concatenate([r, -2 * r])
            rotate(both, a, way)
            assert np.allclose(both, [*g.rotate(by, r), *g.rotate(by, -2 * r)], atol=1e-14)
        for small in (1.0, 1e-10):
            turned = a.copy()
            turn(turned, *(small * r))
            assert np.allclose(turned, g.turned(tuple(a), *(small * r)), atol=1e-15)


def test_the_tick_is_compiled_before_the_first_one():
    law = law_at(HOME)
    before = len(tick.signatures)
    law.tick(MODEL, 1e-3)
    assert len(tick.signatures) == before >= 1


def test_the_compiled_solve_is_that_of_numpy():
    for half in RNG.normal(size=(20, 6, 8)):
        a, x = half @ half.T, RNG.normal(size=6)
        factor, y = a.copy(), x.copy()
        cholesky(factor, 1e-12)
        solve(factor, y)
        assert np.allclose(y, np.linalg.solve(a, x)) and np.allclose(np.tril(factor), np.linalg.cholesky(a))


@pytest.mark.parametrize("task", ["impedance", "operational_space"])
@pytest.mark.parametrize("frame", ["base", "tool"])
def test_a_tick_is_the_equation_in_the_laws_docstring(task, frame):
    """All terms at once, in plain NumPy."""
    k, eps = np.array([600.0, 300, 100, 30, 20, 10]), 0.003
    o = LawOptions(task=task, frame=frame, stiffness=tuple(k), torque_rate=None, ramp=0.0, regularisation=eps, target_speed=1e9,
                   target_turn=1e9, filter_time=0.5)
    for q in BENT:
        law = law_at(q, o, dq=RNG.uniform(-0.2, 0.2, 7))
        law.set_joints(q + 0.1, np.full(7, 0.05))
        law.set_wrench(np.array([1.0, -2, 3, 0.1, 0.2, -0.3]), "tool")
        law.set_target(np.array(MODEL.pos) + [0.01, 0.02, -0.01], g.multiply(g.exp(np.array([0.05, 0.02, 0.1])), np.array(MODEL.quat)))
        torque, r = law.tick(MODEL, 1e-3), law.reference
        turn = np.kron(np.eye(2), MODEL.rotation)
        axes = turn if frame == "tool" else np.eye(6)
        a = MODEL.jac @ MODEL.minv_j
        w = np.linalg.inv(a + eps * np.eye(6))
        own = axes.T @ a @ axes
        masses = np.minimum(np.diag(np.linalg.inv(own + eps * np.eye(6))), 4 / np.diag(own))
        d = 2 * np.sqrt(k * masses if task == "impedance" else k)
        e, slip = g.pose_error(r.pos, r.quat, np.array(MODEL.pos), np.array(MODEL.quat)), r.velocity - MODEL.jac @ MODEL.dq
        f = axes @ (k * (axes.T @ e) + d * (axes.T @ slip)) + turn @ law.feed
        t0 = np.clip(5 * (law.q_ref - q) + 2 * math.sqrt(5) * (0.05 - MODEL.dq), -5, 5)
        free = t0 - MODEL.jac.T @ w @ MODEL.minv_jt @ t0
        ad = np.clip(r.acceleration, [-4] * 3 + [-16] * 3, [4] * 3 + [16] * 3)
        task_torque = MODEL.jac.T @ (f + w @ ad if task == "impedance" else w @ (f + ad))
        assert np.allclose(torque, np.clip(task_torque + free + MODEL.bias, -0.8 * np.array(ROBOT.torque), 0.8 * np.array(ROBOT.torque)))


RUBBING = replace(ROBOT, friction={"phi1": [0.5, 0.6, 0.5, 0.4, 0.8, 0.9, 0.7], "phi2": [5.0, 9.0, 4.0, 30.0, 10.0, 18.0, 11.0],
                                   "phi3": [0.04, 0.03, -0.02, 0.05, 0.02, 0.0, -0.03]})
VARIED = {
    "default": LawOptions(),
    "tool axes": LawOptions(frame="tool", stiffness=(900.0, 100.0, 400.0, 30.0, 5.0, 12.0), damping_ratio=0.7, ramp=0.05),
    "operational space": operational_space(stiffness=(400.0, 300.0, 0.0, 100.0, 50.0, 20.0), ramp=0.1),
    "kinematic projection": LawOptions(nullspace="kinematic", posture_damping=0.7, filter_time=0.0, ramp=0.0),
    "no projection": LawOptions(nullspace="none", posture_torque=None, damping=(20.0, 0.0, 5.0, 1.0, 2.0, 0.0), ramp=0.02),
    "no clips": LawOptions(error_clip=None, torque_rate=None, feed_acceleration=(0.0, 0.0), limit_margin=1.2, limit_torque=8.0),
    "posture by joint": LawOptions(posture_stiffness=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), posture_speed=0.3, posture_torque=0.4),
    "friction, slow": LawOptions(friction=True, target_speed=0.05, target_turn=0.2, filter_time=0.05, command_timeout=0.03),
    "joints alone": joint_impedance(stiffness=80.0, damping=(4.0, 5.0, 6.0, 7.0, 3.0, 2.0, 1.0), ramp=0.1),
    "floating": gravity_compensation(torque_fraction=0.3, regularisation=0.05),
    "stiff and bounded": LawOptions(max_stiffness=(700.0, 35.0), torque_rate=100.0, torque_fraction=0.2, regularisation=0.05),
}


@pytest.mark.parametrize("name", VARIED)
def test_ticks_under_random_commands_are_those_of_the_plain_law(name):
    """Every option and command, along a moving arm, against the equations in NumPy."""
    o, rng = VARIED[name], np.random.default_rng(len(name))
    robot = RUBBING if o.friction else FREE if o.torque_rate is None else ROBOT
    law, plain, model = Law(o, robot), PlainLaw(o, robot), arm_model(ROBOT)
    low, high = np.array(ROBOT.lower), np.array(ROBOT.upper)
    q, dq = HOME.copy(), rng.uniform(-0.5, 0.5, 7)
    model.update(q, dq)
    law.activate(model)
    plain.activate(model)
    for k in range(700):
        dt = (1e-3, 2e-3, 5e-4)[k % 3]
        dq = np.clip(dq + rng.normal(0, 0.03, 7), -1, 1)
        q = q + dt * dq
        dq = np.where((q < low + 0.01) | (q > high - 0.01), -dq, dq)
        q = np.clip(q, low, high)
        model.update(q, dq)
        for both, chance in (("target", 0.01), ("joints", 0.01), ("wrench", 0.008), ("stiffness", 0.006), ("rebase", 0.002), ("stand", 0.001)):
            if rng.random() > chance:
                continue
            if both == "target":
                pose = np.array(model.pos) + rng.uniform(-0.1, 0.1, 3), g.multiply(g.exp(rng.uniform(-0.4, 0.4, 3)), np.array(model.quat))
                said = pose[0], pose[1] * rng.uniform(0.995, 1.005)
            elif both == "joints":
                said = q + rng.uniform(-0.5, 0.5, 7), rng.uniform(-4, 4, 7)
            elif both == "wrench":
                said = rng.uniform(-5, 5, 6), rng.choice(["base", "tool"])
            elif both == "stiffness":
                said = (np.array(o.stiffness) * rng.uniform(0, 2, 6),)
            else:
                said = (model,) if both == "rebase" else ()
            for it in (law, plain):
                getattr(it, both if both in ("rebase", "stand") else f"set_{both}")(*said)
        assert np.allclose(law.tick(model, dt), plain.tick(model, dt), atol=2e-5), k
        assert np.allclose(law.reference.pos, plain.pos, atol=1e-9) and np.allclose(law.k, plain.k) and law.gain == pytest.approx(plain.gain)
        assert law.fed == (plain.feed_age <= o.command_timeout)


@pytest.mark.parametrize("options", [LawOptions(), operational_space()])
def test_an_arm_put_at_its_targets_has_its_damping_at_once(options):
    law = law_at(HOME, options)
    law.tick(MODEL, 1e-3)
    law.stand()
    law.tick(MODEL, 1e-3)
    assert (law.k == options.stiffness).all() and (law.d >= 1.9 * np.sqrt(law.k * np.minimum(law._m["masses"], 1))).all()


def test_stiffness_commanded_on_an_axis_without_one_goes_back_to_none():
    law = law_at(HOME, LawOptions(stiffness=(600.0, 600, 0, 30, 30, 30), ramp=0.1))
    law.set_stiffness(np.array([600.0, 600, 900, 30, 30, 30]))
    for _ in range(90):
        law.tick(MODEL, 1e-3)
    assert law.k[2] > 800
    for _ in range(150):
        law.tick(MODEL, 1e-3)
    assert law.k[2] == 0


# ---- statics and energy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [LawOptions(nullspace="none", posture_stiffness=0.0, **AT_ONCE),
                                     LawOptions(nullspace="none", posture_stiffness=0.0, frame="tool", **AT_ONCE),
                                     LawOptions(posture_stiffness=0.0, error_clip=None, **AT_ONCE)])
def test_an_error_gives_the_springs_force_at_the_tool(options):
    for q in BENT:
        law = law_at(q, options)
        pos, quat = np.array(MODEL.pos), np.array(MODEL.quat)
        delta = np.array([0.02, -0.03, 0.01, 0.05, -0.02, 0.04])
        law.set_target(pos + delta[:3], g.multiply(g.exp(delta[3:]), quat))
        law.tick(MODEL, 1e-3)
        law.reference.velocity[:] = 0
        torque = law.tick(MODEL, 1e-3) - MODEL.bias
        assert np.allclose(torque, MODEL.jac.T @ (np.array([600] * 3 + [30] * 3) * delta), atol=1e-6)


def test_stiffness_in_tool_axes_turns_with_the_tool():
    k = (1000.0, 100.0, 10.0, 30.0, 20.0, 10.0)
    law = law_at(BENT[0], LawOptions(stiffness=k, frame="tool", nullspace="none", posture_stiffness=0.0, **AT_ONCE))
    turn = g.matrix(np.array(MODEL.quat))
    delta = np.array([0.01, 0.02, -0.01])
    law.set_target(np.array(MODEL.pos) + delta, np.array(MODEL.quat))
    law.tick(MODEL, 1e-3)
    torque = law.tick(MODEL, 1e-3) - MODEL.bias
    force = turn @ np.diag(k[:3]) @ turn.T @ delta
    assert np.allclose(torque, MODEL.jac[:3].T @ force, atol=1e-6)


def test_operational_space_accelerates_the_tool_as_a_unit_mass():
    law = law_at(BENT[1], operational_space(posture_stiffness=0.0, regularisation=1e-9, **AT_ONCE))
    law.set_target(np.array(MODEL.pos) + [0.01, 0, -0.02], np.array(MODEL.quat))
    law.tick(MODEL, 1e-3)
    torque = law.tick(MODEL, 1e-3) - MODEL.bias
    assert np.allclose(MODEL.minv_jt @ torque, 400 * np.array([0.01, 0, -0.02, 0, 0, 0]), atol=1e-6)


@pytest.mark.parametrize(("nullspace", "tol"), [("dynamic", 1e-5), ("kinematic", None)])
def test_the_posture_term_does_not_move_the_tool(nullspace, tol):
    law = law_at(BENT[2], LawOptions(nullspace=nullspace, regularisation=1e-8, **AT_ONCE))
    before = law.tick(MODEL, 1e-3)
    law.q_ref[:] = law.q_target[:] = MODEL.q + 0.4 * np.sin(np.arange(7))
    posture = law.tick(MODEL, 1e-3) - before
    assert np.abs(posture).max() > 0.1
    if nullspace == "dynamic":
        assert np.abs(MODEL.minv_jt @ posture).max() < tol  # no acceleration of the tool
    else:
        assert np.abs(MODEL.jac @ posture).max() < 1e-4


def test_torque_does_the_work_that_force_does_at_the_tool():
    """Power identity dq . t = F . v + m . w in base axes: it fails with a Jacobian of another point or other axes."""
    for q in BENT:
        law = law_at(q, LawOptions(nullspace="none", posture_stiffness=0.0, **AT_ONCE))
        law.set_wrench(np.array([10.0, 0, 0, 0, 0, 0]))
        torque = law.tick(MODEL, 1e-3) - MODEL.bias
        dq = RNG.standard_normal(7)
        assert np.isclose(torque @ dq, 10 * (MODEL.jac @ dq)[0])


def energy(arm, pos, quat, k, kr):
    m = arm.model
    e = g.pose_error(pos, quat, np.array(m.pos), np.array(m.quat))
    return 0.5 * m.dq @ m.inertia() @ m.dq + 0.5 * k * e[:3] @ e[:3] + 0.5 * kr * e[3:] @ e[3:]


def test_the_closed_loop_never_gains_energy():
    options = LawOptions(nullspace="none", posture_stiffness=0.0, error_clip=None, damping=(5.0,) * 3 + (0.5,) * 3,
                         **AT_ONCE)
    arm = SimArm(FREE, options)
    pos, quat = arm.pose()
    pos, quat = pos + [0.03, -0.05, 0.04], g.multiply(g.exp(np.array([0.2, -0.1, 0.15])), quat)
    arm.law.set_target(pos, quat)
    arm.tick()
    arm.law.reference.velocity[:] = 0
    seen = []
    arm.run(2.0, lambda: seen.append(energy(arm, pos, quat, 600, 30)))
    seen = np.array(seen[2:])
    assert seen[0] > 1.0 and seen[-1] < 0.02 * seen[0]
    assert np.diff(seen).max() < 2e-3 * seen[0]  # Euler steps of 1 ms


@pytest.mark.parametrize("ratio", [0.3, 0.6])
def test_overshoot_is_that_of_the_damping_ratio(ratio):
    """Operational space makes each axis a unit mass: overshoot exp(-pi z/sqrt(1 - z^2)) of a step."""
    arm = SimArm(FREE, operational_space(damping_ratio=ratio, posture_stiffness=0.0, regularisation=1e-6, **AT_ONCE))
    pos, quat = arm.pose()
    arm.law.set_target(pos + [0, 0.02, 0], quat)
    arm.tick()
    arm.law.reference.velocity[:] = 0
    ys = []
    arm.run(0.6, lambda: ys.append(arm.model.pos[1] - pos[1]))
    expected = math.exp(-math.pi * ratio / math.sqrt(1 - ratio**2))
    assert max(ys) / 0.02 - 1 == pytest.approx(expected, abs=0.06)


# ---- what it must reach ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [LawOptions(), operational_space(), LawOptions(nullspace="kinematic")],
                         ids=["impedance", "operational_space", "kinematic"])
@pytest.mark.parametrize("axis", range(3))
def test_a_ten_centimetre_step_overshoots_by_less_than_5_percent_and_ends_within_1_mm(options, axis):
    arm = SimArm(ROBOT, options)
    arm.run(0.6)
    pos, quat = arm.pose()
    goal = pos.copy()
    goal[axis] += (-0.1 if axis == 0 else 0.1)
    arm.law.set_target(goal, quat)
    way = []
    arm.run(3.0, lambda: way.append(abs(arm.model.pos[axis] - pos[axis])))
    assert max(way) <= 0.105
    assert np.linalg.norm(arm.pose()[0] - goal) <= 1e-3


@pytest.mark.parametrize("push", [(30, 0, 0), (0, 30, 0), (0, 0, -30)])
def test_a_push_of_30_n_gives_way_by_f_over_k(push):
    arm = SimArm(ROBOT)
    arm.run(0.6)
    pos, _ = arm.pose()
    arm.push([*push, 0, 0, 0])
    arm.run(3.0)
    moved = arm.pose()[0] - pos
    assert moved == pytest.approx(np.array(push) / 600, abs=0.1 * 30 / 600)
    arm.push(np.zeros(6))
    arm.run(3.0)
    assert np.linalg.norm(arm.pose()[0] - pos) < 1e-3


def test_meeting_the_table_at_a_tenth_of_a_metre_per_second_pushes_less_than_the_bound():
    """Bound: impact v sqrt(W_zz k_contact) is absorbed in a tick or two, then the spring K clip = 60 N, plus damping."""
    arm = SimArm(ROBOT, LawOptions(target_speed=0.1))
    pos, quat = arm.pose()
    arm.law.set_target(pos - [0, 0, 0.35], quat)
    peak, force = 0.0, np.zeros(6)

    def look():
        nonlocal peak
        total = 0.0
        for i in range(arm.data.ncon):
            mujoco.mj_contactForce(arm.mj, arm.data, i, force)
            total += force[0]
        peak = max(peak, total)
    arm.run(5.0, look)
    assert arm.data.ncon > 0 and 40 < peak < 250
    steady = sum(_normal(arm, i) for i in range(arm.data.ncon))
    assert steady == pytest.approx(60, rel=0.15)  # K times the clipped error


def _normal(arm, i):
    force = np.zeros(6)
    mujoco.mj_contactForce(arm.mj, arm.data, i, force)
    return force[0]


def test_gravity_compensation_floats_and_a_payload_sags_by_its_weight():
    arm = SimArm(ROBOT, gravity_compensation())
    before, _ = arm.pose()
    arm.run(1.0)
    assert np.linalg.norm(arm.pose()[0] - before) < 1e-3
    arm = SimArm(ROBOT, disturbance=Disturbance(payload=1.0))
    before, _ = arm.pose()
    arm.run(4.0)
    assert (arm.pose()[0] - before)[2] == pytest.approx(-9.81 / 600, rel=0.1)


def test_joint_impedance_is_the_same_law_without_the_cartesian_spring():
    arm = SimArm(ROBOT, joint_impedance(damping=25.0))
    goal = HOME + [0.2, -0.1, 0.1, 0.2, -0.2, 0.1, 0.3]
    arm.law.set_joints(goal)
    arm.run(4.0)
    assert np.abs(arm.model.q - goal).max() < 5e-3


def test_joint_limits_push_back():
    low, high = -1.0, 1.0
    assert limit_torque(0.0, low, high, 0.1, 5.0) == 0
    assert limit_torque(0.95, low, high, 0.1, 5.0) == pytest.approx(-2.5)
    assert limit_torque(-0.95, low, high, 0.1, 5.0) == pytest.approx(2.5)
    assert limit_torque(2.0, low, high, 0.1, 5.0) == -5 and limit_torque(0.0, -math.inf, math.inf, 0.1, 5.0) == 0
    q = HOME.copy()
    q[3] = ROBOT.upper[3] - 0.02
    law = law_at(q, gravity_compensation(torque_rate=None))
    for _ in range(100):
        torque = law.tick(MODEL, 1e-3)
    assert (torque - MODEL.bias)[3] == pytest.approx(-4.0)


def test_friction_torque_is_smooth_and_zero_at_rest():
    phi = load_robot("fr3").friction
    for a, b, c in zip(*phi.values(), strict=True):
        assert friction(0.0, a, b, c) == 0 and math.isfinite(friction(-1e9, a, b, c))
        assert friction(1e4, a, b, c) == pytest.approx(a - a / (1 + math.exp(-b * c)))


def test_friction_compensation_brings_the_arm_nearer_to_its_reference_in_motion():
    """Dry friction of 1 N m in the joints; what is identified is a little less."""
    knows = replace(ROBOT, friction={"phi1": [1.6] * 7, "phi2": [50.0] * 7, "phi3": [0.0] * 7})
    lags = []
    for on in (False, True):
        arm = SimArm(knows, LawOptions(friction=on), disturbance=Disturbance(joint_friction=1.0))
        pos, quat = arm.pose()
        arm.law.set_target(pos + [0, 0.15, 0], quat)
        off = []
        arm.run(0.6, lambda arm=arm, off=off: off.append(math.dist(arm.law.reference.pos, arm.model.pos)))
        lags.append(np.mean(off[200:]))
    assert lags[1] < 0.8 * lags[0]


def test_late_torques_do_not_shake_the_arm():
    arm = SimArm(ROBOT, disturbance=Disturbance(torque_delay=5))
    pos, quat = arm.pose()
    arm.law.set_target(pos + [0, 0.1, 0], quat)
    arm.run(3.0)
    assert np.linalg.norm(arm.pose()[0] - pos - [0, 0.1, 0]) < 1e-3 and np.abs(arm.model.dq).max() < 1e-2


def test_admittance_gives_way_by_f_over_k_and_comes_back():
    a = Admittance(AdmittanceOptions(), (0.5, 0.0, 0.3), (1.0, 0.0, 0.0, 0.0))
    for _ in range(4000):
        pos, quat = a.tick((0.5, 0.0, 0.3), (1.0, 0.0, 0.0, 0.0), (20.0, 0, 0, 0, 0, 1.0), 1e-3)
    assert pos == pytest.approx((0.6, 0.0, 0.3), abs=1e-4)
    assert g.log1(*quat) == pytest.approx((0, 0, 0.1), abs=1e-4)
    for _ in range(4000):
        pos, quat = a.tick((0.5, 0.0, 0.3), (1.0, 0.0, 0.0, 0.0), (math.nan,) * 6, 1e-3)
    assert pos == pytest.approx((0.5, 0.0, 0.3), abs=1e-4)


# ---- memory: activation, ramps, limits, rates ------------------------------------------------------------------------


def test_activation_is_bumpless_also_in_motion_and_a_second_time():
    dq = np.linspace(-0.2, 0.2, 7)
    law = law_at(HOME, dq=dq)
    carried = MODEL.bias.copy()
    first = law.tick(MODEL, 1e-3)
    assert np.abs(first - carried).max() <= 0.5 + 1e-9  # the rate limit of one tick
    assert not law.dq_ref.any() and not law.reference.velocity.any()
    law.set_target(np.array(MODEL.pos) + 0.1, np.array(MODEL.quat))
    for _ in range(300):
        law.tick(MODEL, 1e-3)
    held = np.full(7, 3.0)
    law.activate(MODEL, held)
    assert np.abs(law.tick(MODEL, 1e-3) - held).max() <= 0.5 + 1e-9
    assert np.array_equal(law.reference.target_pos, MODEL.pos)


def test_stiffness_grows_over_the_ramp_and_damping_with_it():
    law = law_at(HOME, LawOptions(ramp=0.5))
    seen = []
    for _ in range(600):
        law.tick(MODEL, 1e-3)
        seen.append((law.k[0], law.d[0]))
    k, d = np.array(seen).T
    assert k[0] == pytest.approx(1.2) and k[249] == pytest.approx(300) and k[-1] == 600
    assert np.allclose(d**2 / k, d[-1]**2 / k[-1])  # D = 2 z sqrt(K W)


def test_torque_and_torque_rate_stay_within_their_limits_whatever_is_asked():
    law = law_at(HOME, LawOptions(target_speed=1e9, error_clip=None, filter_time=0, ramp=0, stiffness=(1e5,) * 6))
    law.set_target(np.array([5.0, -3, 2]), np.array([0.0, 0, 1, 0]))
    last = np.array(law.tau)
    for _ in range(500):
        torque = law.tick(MODEL, 1e-3)
        assert (np.abs(torque) <= 0.8 * np.array(ROBOT.torque) + 1e-12).all()
        assert np.abs(torque - last).max() <= 0.5 + 1e-9
        last = torque


def test_a_measurement_that_is_not_finite_holds_the_last_torques_and_counts():
    law = law_at(HOME)
    before = law.tick(MODEL, 1e-3)
    bad = arm_model(ROBOT)
    bad.update(np.full(7, np.nan), np.zeros(7))
    assert np.array_equal(law.tick(bad, 1e-3), before) and law.faults == 1
    MODEL.update(HOME, np.zeros(7))
    assert np.isfinite(law.tick(MODEL, 1e-3)).all() and law.faults == 1


def test_the_reference_keeps_to_its_speeds():
    law = law_at(HOME, LawOptions(target_speed=0.2, target_turn=0.5))
    r = law.reference
    r.start((0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0))
    r.aim((1.0, 1.0, 0.0), tuple(g.exp(np.array([0, 0, 3.0]))))
    for _ in range(3000):
        pos, quat = r.pos.copy(), r.quat.copy()
        law.tick(MODEL, 1e-3)
        assert np.linalg.norm(r.pos - pos) <= 0.2e-3 + 1e-12
        assert g.angle_between(r.quat, quat) <= 0.5e-3 + 1e-9
    for _ in range(8000):
        law.tick(MODEL, 1e-3)
    assert r.settled and r.pos.tolist() == [1.0, 1.0, 0.0] and not r.velocity.any()


# ---- defects of public controllers that are not ours -----------------------------------------------------------------


def test_defect_1_a_target_that_crosses_pi_moves_the_reference_no_more_than_the_targets_are_apart():
    """An average of log6 jumps by 36 degrees and 92 mm there; gripper-down is exactly pi."""
    a, b = (g.exp(np.array([s * (math.pi - 0.01), 0, 0])) for s in (1, -1))
    law = law_at(HOME, LawOptions(target_turn=100.0, filter_time=1e-3))
    r = law.reference
    r.start((0.5, 0.0, 0.3), a)
    r.aim((0.5, 0.0, 0.3), tuple(b))
    last, apart = np.array(a), float(g.angle_between(a, b))
    for _ in range(100):
        law.tick(MODEL, 1e-3)
        now = r.quat.copy()
        assert g.angle_between(now, last) <= apart + 1e-9 and r.pos.tolist() == [0.5, 0.0, 0.3]
        last = now
    assert apart == pytest.approx(0.02) and g.angle_between(last, b) < 1e-9


def test_defect_2_a_pure_force_makes_no_moment_that_grows_with_the_distance_from_the_base():
    for q in BENT:
        law = law_at(q, LawOptions(nullspace="none", posture_stiffness=0.0, **AT_ONCE))
        law.set_wrench(np.array([0.0, 0, 10, 0, 0, 0]))
        torque = law.tick(MODEL, 1e-3) - MODEL.bias
        back = np.linalg.lstsq(MODEL.jac.T, torque, rcond=None)[0]
        assert np.allclose(back, [0, 0, 10, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("options", [LawOptions(), LawOptions(posture_stiffness=0.0, posture_damping=None),
                                     joint_impedance(), gravity_compensation()])
def test_defect_3_default_posture_damping_is_never_negative(options):
    assert (Law(options, ROBOT)._m["dn"] >= 0).all()
    dq = np.linspace(0.1, 0.4, 7)
    law = law_at(HOME, replace(options, stiffness=(0.0,) * 6, nullspace="none", torque_rate=None, ramp=0.0), dq=dq)
    for _ in range(50):
        torque = law.tick(MODEL, 1e-3)
    assert (torque - MODEL.bias) @ dq <= 1e-9
    with pytest.raises(UserError, match="posture_damping"):
        Law(LawOptions(posture_damping=-1.0), ROBOT)


def test_defect_5_joint_targets_go_by_name_and_velocities_have_their_own_size():
    names = list(reversed(ROBOT.joints)) + ["left_finger"]
    values = np.arange(8.0)
    assert by_name(ROBOT.joints, names, values).tolist() == [6, 5, 4, 3, 2, 1, 0]
    for bad, says in (((names, values[:3]), "3 values for 8 joint names"), ((names[1:], values[1:]), "lacks the joints joint7"),
                      ((names[:-1] + ["joint1"], values), "named twice")):
        with pytest.raises(UserError, match=says):
            by_name(ROBOT.joints, *bad)
    with pytest.raises(UserError, match="joint velocity reference must have 7 numbers"):
        law_at(HOME).set_joints(HOME, np.zeros(3))


def test_defect_6_operational_space_with_a_torque_rate_limit_survives_a_large_step():
    arm = SimArm(ROBOT, operational_space((1000.0,) * 6, damping=(100.0,) * 3 + (10.0,) * 3, torque_rate=500.0))
    pos, quat = arm.pose()
    goal = pos + [0, 0.12, 0]
    arm.law.set_target(goal, quat)
    fastest = []
    arm.run(3.0, lambda: fastest.append(np.abs(arm.model.dq).max()))
    assert np.linalg.norm(arm.pose()[0] - goal) < 1e-3 and max(fastest) < 1.5


def test_defect_8_wrench_velocity_reference_and_stiffness_expire():
    law = law_at(HOME, LawOptions(command_timeout=0.1, ramp=0.05))
    for _ in range(100):
        law.tick(MODEL, 1e-3)
    law.set_wrench(np.array([5.0, 0, 0, 0, 0, 0]))
    law.set_joints(HOME, np.full(7, 0.1))
    law.set_stiffness(np.array([900.0, 900, 900, 50, 50, 50]))
    for _ in range(90):
        law.tick(MODEL, 1e-3)
    assert law.dq_ref[0] == 0.1 and law.k[0] == 900 and law.fed
    for _ in range(100):
        law.tick(MODEL, 1e-3)
    assert not law.fed and not law.dq_ref.any() and law.k[0] == 600


def test_damping_follows_a_commanded_stiffness():
    law = law_at(HOME, LawOptions(ramp=0.0))
    law.tick(MODEL, 1e-3)
    before = law.d[0]
    law.set_stiffness(np.array([2400.0] * 3 + [30] * 3))
    law.tick(MODEL, 1e-3)
    assert law.k[0] == 2400 and law.d[0] == pytest.approx(2 * before)
    law.set_stiffness(np.array([1e9] * 6))
    law.tick(MODEL, 1e-3)
    assert law.k.tolist() == [3000.0] * 3 + [300.0] * 3


@pytest.mark.parametrize("nullspace", ["none", "kinematic"])
def test_a_wrench_that_has_expired_leaves_the_joints_springs_alone(nullspace):
    """Without springs at the tool its part of the tick is left out: nothing of an earlier wrench may stay."""
    law, never = (law_at(HOME, LawOptions(stiffness=(0.0,) * 6, nullspace=nullspace, posture_stiffness=100.0,
                                          command_timeout=0.01), dq=np.full(7, 0.01)) for _ in range(2))
    law.set_wrench(np.full(6, 5.0))
    apart = [float(np.abs(law.tick(MODEL, 1e-3) - never.tick(MODEL, 1e-3)).max()) for _ in range(40)]
    assert max(apart[:5]) > 1 and apart[-1] == 0


def test_the_reference_turns_at_its_pace_on_the_geodesic_and_stops_at_the_target():
    law = law_at(HOME, LawOptions(target_turn=1.0, filter_time=0.0))
    start, reference = tuple(law.reference.quat), law.reference
    goal = g.turned(start, 0.1, -0.2, 0.2)
    law.set_target(np.array(reference.pos), np.array(goal))
    for k in range(1, 400):
        law.tick(MODEL, 1e-3)
        way = min(1e-3 * k, 0.3) / 0.3
        assert np.allclose(g.turn_between(reference.quat, start), way * np.array([0.1, -0.2, 0.2]), atol=1e-12)
    assert np.array_equal(reference.quat, reference.target_quat) and reference.settled


def test_damping_of_zero_is_none():
    law = law_at(HOME, LawOptions(damping=(0.0,) * 6, nullspace="none", posture_stiffness=0.0, **AT_ONCE),
                 dq=np.full(7, 0.3))
    assert np.allclose(law.tick(MODEL, 1e-3), MODEL.bias)


def test_a_wrench_in_tool_axes_turns_with_the_tool():
    law = law_at(HOME, LawOptions(nullspace="none", posture_stiffness=0.0, **AT_ONCE))
    law.set_wrench(np.array([0.0, 0, 10, 0, 0, 0]), "tool")  # the tool points down
    torque = law.tick(MODEL, 1e-3) - MODEL.bias
    assert np.allclose(torque, MODEL.jac.T @ [0, 0, -10, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("dt", [0.0005, 0.002])
def test_filters_and_ramps_do_not_depend_on_the_rate_of_the_loop(dt):
    def at(period):
        law = law_at(HOME, LawOptions(target_speed=1e9, target_turn=1e9, filter_time=0.1, ramp=0.2))
        law.set_target(np.array(MODEL.pos) + [0, 0.1, 0], np.array(MODEL.quat))
        law.set_joints(HOME + 0.5)
        for _ in range(round(0.1 / period)):
            law.tick(MODEL, period)
        return np.array([law.reference.pos[1], law.k[0], law.q_ref[0], law.gain])
    assert np.allclose(at(dt), at(0.001), rtol=1e-9, atol=1e-9)
    assert at(dt)[0] == pytest.approx(0.1 * (1 - math.exp(-1)), abs=1e-9)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "says"), [
    (lambda: load_robot("frankka"), "unknown robot 'frankka'"),
    (lambda: ArmModel(ROBOT.model, ("joint1", "jiont2"), "tcp"), "unknown joint 'jiont2'; did you mean 'joint2'"),
    (lambda: ArmModel(ROBOT.model, ROBOT.joints, "tpc"), "unknown site or link 'tpc'; did you mean 'tcp'"),
    (lambda: ArmModel("nowhere.xml", ROBOT.joints, "tcp"), "no model file nowhere.xml"),
    (lambda: ArmModel("<mujoco><worldbody>", ROBOT.joints, "tcp"), "cannot be read"),
    (lambda: ArmModel(ROBOT.model, tuple(reversed(ROBOT.joints)), "tcp"), "from the base to the tool"),
    (lambda: arm_model(load_robot("fr3")), "fr3 ships no model"),
    (lambda: SimArm(load_robot("fr3")), "fr3 ships no model"),
    (lambda: law_at(HOME).set_target(np.zeros(2), np.zeros(4)), "target position must have 3 numbers"),
    (lambda: law_at(HOME).set_target(np.zeros(3), np.array([2.0, 0, 0, 0])), "length 1 within 0.01, got 2"),
    (lambda: law_at(HOME).set_target(np.array([0, np.nan, 0]), np.array([1.0, 0, 0, 0])), "must be finite"),
    (lambda: law_at(HOME).set_target("here", np.array([1.0, 0, 0, 0])), "must be 3 numbers"),
    (lambda: law_at(HOME).set_wrench(np.zeros(6), "camera"), "unknown frame 'camera'"),
    (lambda: law_at(HOME).set_stiffness(np.full(6, -1.0)), "at least 0"),
    (lambda: LawOptions(stiffness=(1.0, 2.0)), "stiffness needs 6"),
    (lambda: LawOptions(task="impedence"), "unknown task 'impedence'"),
    (lambda: LawOptions(torque_fraction=1.5), "torque_fraction"),
    (lambda: Law(LawOptions(posture_stiffness=(1.0,) * 6), ROBOT), "one number or 7"),
    (lambda: Law(LawOptions(friction=True), ROBOT), "no identified friction"),
    (lambda: AdmittanceOptions(mass=(0.0, 1.0)), "mass above 0"),
])
def test_wrong_input_is_one_clear_line(call, says):
    with pytest.raises(UserError, match=says) as e:
        call()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(("change", "says"), [({"home": [9.0] * 7}, "home between"), ({"torque": [1.0]}, "torque needs 7"),
                                              ({"velocity": [0.0] * 7}, "above 0"), ({"colour": 1}, "unknown .'colour'"),
                                              ({"joints": ["a"] * 7}, "each once")])
def test_a_wrong_robot_file_is_one_clear_line(tmp_path, change, says):
    raw = json.loads((PRESETS / "sim.json").read_text()) | change
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=says):
        load_robot(str(path))
