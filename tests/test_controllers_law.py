"""The control law on a simulated arm, the model against differences, and the defects of public
controllers."""

import json
import math
from dataclasses import replace

import mujoco
import numpy as np
import pytest
from test_controllers_tick import AT_ONCE, BENT, FREE, HOME, MODEL, RNG, ROBOT, law_at

from controllers.arm import Disturbance, SimArm
from controllers.cell import Payload
from controllers.law import Law, LawOptions, gravity_compensation, joint_impedance, operational_space
from controllers.model import ArmModel, arm_model
from controllers.robot import PRESETS, by_name, load_robot, presets
from robo_rl import geometry as g
from robo_rl.errors import UserError

# ---- model -------------------------------------------------------------------------------------------------


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
    # moving fingers
    assert np.allclose(m.inertia() @ arm.data.qacc[arm._dof] + m.bias, torque + passive, atol=0.05)


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
    assert np.allclose(theirs.body_mass, ours.body_mass) and np.allclose(
        theirs.body_inertia, ours.body_inertia
    )
    assert np.allclose(theirs.dof_armature, ours.dof_armature) and np.allclose(
        theirs.jnt_range, ours.jnt_range
    )
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
<joint name="fixed" type="fixed"><parent link="b"/><child link="tip"/><origin xyz="1 0 0"/></joint></robot>"""  # noqa: E501


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


# ---- energy ------------------------------------------------------------------------------------------------


def energy(arm, pos, quat, k, kr):
    m = arm.model
    e = g.pose_error(pos, quat, np.array(m.pos), np.array(m.quat))
    return 0.5 * m.dq @ m.inertia() @ m.dq + 0.5 * k * e[:3] @ e[:3] + 0.5 * kr * e[3:] @ e[3:]


def test_the_closed_loop_never_gains_energy():
    options = LawOptions(
        nullspace="none", posture_stiffness=0.0, error_clip=None, damping=(5.0,) * 3 + (0.5,) * 3, **AT_ONCE
    )
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
    arm = SimArm(
        FREE, operational_space(damping_ratio=ratio, posture_stiffness=0.0, regularisation=1e-6, **AT_ONCE)
    )
    pos, quat = arm.pose()
    arm.law.set_target(pos + [0, 0.02, 0], quat)
    arm.tick()
    arm.law.reference.velocity[:] = 0
    ys = []
    arm.run(0.6, lambda: ys.append(arm.model.pos[1] - pos[1]))
    expected = math.exp(-math.pi * ratio / math.sqrt(1 - ratio**2))
    assert max(ys) / 0.02 - 1 == pytest.approx(expected, abs=0.06)


# ---- what it must reach ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [LawOptions(), operational_space(), LawOptions(nullspace="kinematic")],
    ids=["impedance", "operational_space", "kinematic"],
)
@pytest.mark.parametrize("axis", range(3))
def test_a_ten_centimetre_step_overshoots_by_less_than_5_percent_and_ends_within_1_mm(options, axis):
    arm = SimArm(ROBOT, options)
    arm.run(0.6)
    pos, quat = arm.pose()
    goal = pos.copy()
    goal[axis] += -0.1 if axis == 0 else 0.1
    arm.law.set_target(goal, quat)
    way = []
    arm.run(3.0, lambda: way.append(abs(arm.model.pos[axis] - pos[axis])))
    assert max(way) <= 0.105
    assert np.linalg.norm(arm.pose()[0] - goal) <= 1e-3


@pytest.mark.parametrize(("stiffness", "settled"), [(200.0, 4.5), (1500.0, 1.5)])
@pytest.mark.parametrize("axis", range(6))
def test_a_push_gives_way_by_f_over_k_within_one_percent_along_and_about_every_axis(axis, stiffness, settled):
    """Soft springs leave the posture's motion in the null space to die away, with a time constant of 0.9
    s."""
    arm = SimArm(ROBOT, LawOptions(stiffness=(stiffness,) * 3 + (stiffness / 20,) * 3))
    pos, quat = arm.pose()
    push, k = np.zeros(6), np.repeat([stiffness, stiffness / 20], 3)
    push[axis] = min(0.05 * stiffness, 20.0) if axis < 3 else 0.1 * stiffness / 20
    arm.push(push)
    arm.run(settled)
    assert np.abs(k * g.pose_error(*arm.pose(), pos, quat) - push).max() < 0.01 * push[axis]
    if stiffness > 1000:
        arm.push(np.zeros(6))
        arm.run(1.0)
        assert np.linalg.norm(arm.pose()[0] - pos) < 1e-3


def test_dry_friction_in_the_joints_is_what_keeps_a_pushed_tool_from_its_place():
    """What friction holds at each joint no spring gets."""
    off = []
    for friction in (0.0, 0.5):
        arm = SimArm(
            ROBOT,
            LawOptions(stiffness=(1500.0,) * 3 + (75.0,) * 3),
            disturbance=Disturbance(joint_friction=friction),
        )
        pos, _ = arm.pose()
        arm.push([0, 20.0, 0, 0, 0, 0])
        arm.run(1.0)
        off.append(abs(1500 * (arm.pose()[0] - pos)[1] / 20 - 1))
    assert off[0] < 0.001 and off[1] > 0.02


@pytest.mark.parametrize(("speed", "stiffness"), [(0.05, 200.0), (0.1, 600.0), (0.25, 600.0), (0.25, 200.0)])
def test_meeting_the_table_pushes_within_the_stated_bounds_first_by_speed_then_by_stiffness(speed, stiffness):
    """First contact: v sqrt(m k) of the tool's mass on a stiff table, 1800 N per m/s here, whatever the
    spring; then K times the clip."""
    arm = SimArm(ROBOT, LawOptions(stiffness=(stiffness,) * 3 + (30.0,) * 3, target_speed=speed))
    pos, quat = arm.pose()
    arm.law.set_target(pos - [0, 0, 0.35], quat)
    forces = []
    arm.run(0.25 / speed + 2.0, lambda: forces.append(sum(_normal(arm, i) for i in range(arm.data.ncon))))
    met = next(k for k, f in enumerate(forces) if f > 0)
    first, steady = max(forces[met : met + 100]), float(np.mean(forces[-50:]))
    assert 1200 * speed < first <= 1800 * speed and max(forces) == first
    assert 0.095 * stiffness <= steady <= 0.105 * stiffness + 5


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


def test_a_payload_that_the_robots_file_names_does_not_sag():
    load = Payload(mass=1.0, centre=(0.0, 0.0, 0.05), inertia=(1e-3, 1e-3, 1e-3))
    knows = replace(ROBOT, cell=replace(ROBOT.cell, payload=load))
    model, bare = arm_model(knows), arm_model(ROBOT)
    model.update(HOME, np.zeros(7))
    bare.update(HOME, np.zeros(7))
    centre = np.array(bare.pos) + 0.05 * bare.rotation[:, 2]
    lever = bare.jac[:3] + np.cross(bare.jac[3:].T, centre - bare.pos).T
    assert np.allclose(model.bias - bare.bias, lever.T @ [0, 0, 9.81], atol=1e-6)
    for robot, disturbance, sag in (
        (knows, Disturbance(), 0.0),
        (ROBOT, Disturbance(payload=1.0), -9.81 / 600),
        (knows, Disturbance(payload=0.5), -4.905 / 600),
    ):
        arm = SimArm(robot, disturbance=disturbance)
        before, _ = arm.pose()
        arm.run(3.0)
        assert (arm.pose()[0] - before)[2] == pytest.approx(sag, rel=0.1, abs=2e-4)


def test_joint_impedance_is_the_same_law_without_the_cartesian_spring():
    arm = SimArm(ROBOT, joint_impedance(damping=25.0))
    goal = HOME + [0.2, -0.1, 0.1, 0.2, -0.2, 0.1, 0.3]
    arm.law.set_joints(goal)
    arm.run(4.0)
    assert np.abs(arm.model.q - goal).max() < 5e-3


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


# ---- memory: activation, ramps, limits, rates --------------------------------------------------------------


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


# ---- defects of public controllers that are not ours -------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        LawOptions(),
        LawOptions(posture_stiffness=0.0, posture_damping=None),
        joint_impedance(),
        gravity_compensation(),
    ],
)
def test_defect_3_default_posture_damping_is_never_negative(options):
    assert (Law(options, ROBOT)._m["dn"] >= 0).all()
    dq = np.linspace(0.1, 0.4, 7)
    law = law_at(
        HOME, replace(options, stiffness=(0.0,) * 6, nullspace="none", torque_rate=None, ramp=0.0), dq=dq
    )
    for _ in range(50):
        torque = law.tick(MODEL, 1e-3)
    assert (torque - MODEL.bias) @ dq <= 1e-9
    with pytest.raises(UserError, match="posture_damping"):
        Law(LawOptions(posture_damping=-1.0), ROBOT)


def test_defect_5_joint_targets_go_by_name_and_velocities_have_their_own_size():
    names = list(reversed(ROBOT.joints)) + ["left_finger"]
    values = np.arange(8.0)
    assert by_name(ROBOT.joints, names, values).tolist() == [6, 5, 4, 3, 2, 1, 0]
    for bad, says in (
        ((names, values[:3]), "3 values for 8 joint names"),
        ((names[1:], values[1:]), "lacks the joints joint7"),
        ((names[:-1] + ["joint1"], values), "named twice"),
    ):
        with pytest.raises(UserError, match=says):
            by_name(ROBOT.joints, *bad)
    with pytest.raises(UserError, match="joint velocity reference must have 7 numbers"):
        law_at(HOME).set_joints(HOME, np.zeros(3))


def test_defect_6_operational_space_with_a_torque_rate_limit_survives_a_large_step():
    arm = SimArm(
        ROBOT, operational_space((1000.0,) * 6, damping=(100.0,) * 3 + (10.0,) * 3, torque_rate=500.0)
    )
    pos, quat = arm.pose()
    goal = pos + [0, 0.12, 0]
    arm.law.set_target(goal, quat)
    fastest = []
    arm.run(3.0, lambda: fastest.append(np.abs(arm.model.dq).max()))
    assert np.linalg.norm(arm.pose()[0] - goal) < 1e-3 and max(fastest) < 1.5


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: load_robot("frankka"), "unknown robot 'frankka'"),
        (
            lambda: ArmModel(ROBOT.model, ("joint1", "jiont2"), "tcp"),
            "unknown joint 'jiont2'; did you mean 'joint2'",
        ),
        (
            lambda: ArmModel(ROBOT.model, ROBOT.joints, "tpc"),
            "unknown site or link 'tpc'; did you mean 'tcp'",
        ),
        (lambda: ArmModel("nowhere.xml", ROBOT.joints, "tcp"), "no model file nowhere.xml"),
        (lambda: ArmModel("<mujoco><worldbody>", ROBOT.joints, "tcp"), "cannot be read"),
        (lambda: ArmModel(ROBOT.model, tuple(reversed(ROBOT.joints)), "tcp"), "from the base to the tool"),
        (lambda: arm_model(load_robot("fr3")), "fr3 ships no model"),
        (lambda: SimArm(load_robot("fr3")), "fr3 ships no model"),
        (lambda: law_at(HOME).set_target(np.zeros(2), np.zeros(4)), "target position must have 3 numbers"),
        (
            lambda: law_at(HOME).set_target(np.zeros(3), np.array([2.0, 0, 0, 0])),
            "length 1 within 0.01, got 2",
        ),
        (
            lambda: law_at(HOME).set_target(np.array([0, np.nan, 0]), np.array([1.0, 0, 0, 0])),
            "must be finite",
        ),
        (lambda: law_at(HOME).set_target("here", np.array([1.0, 0, 0, 0])), "must be 3 numbers"),
        (lambda: law_at(HOME).set_wrench(np.zeros(6), "camera"), "unknown frame 'camera'"),
        (lambda: law_at(HOME).set_stiffness(np.full(6, -1.0)), "at least 0"),
        (lambda: LawOptions(stiffness=(1.0, 2.0)), "stiffness needs 6"),
        (lambda: LawOptions(task="impedence"), "unknown task 'impedence'"),
        (lambda: LawOptions(torque_fraction=1.5), "torque_fraction"),
        (lambda: Law(LawOptions(posture_stiffness=(1.0,) * 6), ROBOT), "one number or 7"),
        (lambda: Law(LawOptions(friction=True), ROBOT), "no identified friction"),
    ],
)
def test_wrong_input_is_one_clear_line(call, says):
    with pytest.raises(UserError, match=says) as e:
        call()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"home": [9.0] * 7}, "home between"),
        ({"torque": [1.0]}, "torque needs 7"),
        ({"velocity": [0.0] * 7}, "above 0"),
        ({"colour": 1}, "field 'colour'"),
        ({"joints": ["a"] * 7}, "each once"),
    ],
)
def test_a_wrong_robot_file_is_one_clear_line(tmp_path, change, says):
    raw = json.loads((PRESETS / "sim.json").read_text()) | change
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=says):
        load_robot(str(path))
