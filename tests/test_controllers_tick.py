"""The arithmetic of the control law's tick against mathematics and the plain law; quick also where nothing is
compiled."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numba import config, njit
from plain_law import PlainLaw

from controllers.arm import follow
from controllers.compliance import Compliance
from controllers.law import Law, LawOptions, gravity_compensation, joint_impedance, operational_space
from controllers.linear import cholesky, principal, solve
from controllers.model import arm_model
from controllers.robot import load_robot
from controllers.setpoint import Setpoint
from controllers.tick import between, friction, limit_torque, rotate, tick, turn, weighed, yielding
from robo_rl import geometry as g

ROBOT = load_robot("sim")
FREE = replace(ROBOT, torque_rate=1e9)
HOME = np.array(ROBOT.home)
MODEL = arm_model(ROBOT)
RNG = np.random.default_rng(0)
BENT = [HOME + d for d in RNG.uniform(-0.3, 0.3, (5, 7))]
AT_ONCE = {
    "target_speed": 1e9,
    "target_turn": 1e9,
    "filter_time": 0.0,
    "torque_rate": None,
    "ramp": 0.0,
    "feed_acceleration": (0.0, 0.0),
}


def law_at(q, options=None, dq=None, model=None):
    model = model or MODEL
    model.update(np.asarray(q, float), np.zeros(7) if dq is None else dq)
    options = options or LawOptions()
    law = Law(options, FREE if options.torque_rate is None else ROBOT)
    law.activate(model)
    return law


def test_compiled_turns_are_those_of_geometry():
    for q, p, r in zip(
        RNG.normal(size=(50, 4)), RNG.normal(size=(50, 4)), RNG.normal(size=(50, 3)), strict=True
    ):
        a, b = g.normalise(q), -g.normalise(p)
        assert np.allclose(between(a, b), g.turn_between(tuple(a), tuple(b)), atol=1e-14)
        assert between(a, a) == (0, 0, 0)
        for sign in (1, -1):  # so small a turn that the sine is the angle
            assert np.allclose(between(sign * g.multiply(g.exp(1e-9 * r), a), a), 1e-9 * r, rtol=1e-4, atol=0)
        for way, by in ((1, a), (-1, g.conjugate(a))):
            both = np.concatenate([r, -2 * r])
            rotate(both, a, way)
            assert np.allclose(both, [*g.rotate(by, r), *g.rotate(by, -2 * r)], atol=1e-14)
        for small in (1.0, 1e-10):
            turned = a.copy()
            turn(turned, *(small * r))
            assert np.allclose(turned, g.turned(tuple(a), *(small * r)), atol=1e-15)


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="NUMBA_DISABLE_JIT: nothing is compiled")
def test_the_tick_is_compiled_before_the_first_one():
    law = law_at(HOME)
    before = len(tick.signatures)
    law.tick(MODEL, 1e-3)
    assert len(tick.signatures) == before >= 1


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="NUMBA_DISABLE_JIT: nothing is compiled")
def test_what_others_compile_later_is_not_announced_as_the_law(capfd):
    law_at(HOME)
    njit(lambda x: x + 1)(1)
    assert "control law" not in capfd.readouterr().err


PLAIN = """
import sys
sys.path.insert(0, {tests!r})
from test_controllers_tick import HOME, MODEL, config, law_at
assert config.DISABLE_JIT
law = law_at(HOME, dq=HOME / 10)
for _ in range(3):
    print(*law.tick(MODEL, 1e-3).tolist())
"""


def test_without_the_compiler_the_tick_is_the_same():
    """NUMBA_DISABLE_JIT=1, for a debugger and for the mutation run."""
    code = PLAIN.format(tests=str(Path(__file__).parent))
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        text=True,
        capture_output=True,
        check=True,
    )
    law = law_at(HOME, dq=HOME / 10)
    for line in said.stdout.splitlines():
        assert np.allclose(law.tick(MODEL, 1e-3), [float(x) for x in line.split()], atol=1e-9)
    assert len(said.stdout.splitlines()) == 3


def test_the_compiled_solve_is_that_of_numpy():
    for half in RNG.normal(size=(20, 6, 8)):
        a, x = half @ half.T, RNG.normal(size=6)
        factor, y = a.copy(), x.copy()
        cholesky(factor, 1e-12)
        solve(factor, y)
        assert np.allclose(y, np.linalg.solve(a, x)) and np.allclose(np.tril(factor), np.linalg.cholesky(a))


def test_principal_axes_are_those_of_numpy_from_any_that_are_orthonormal():
    u = np.linalg.qr(RNG.normal(size=(6, 6)))[0]
    for half in RNG.normal(size=(20, 6, 6)) * 10.0 ** RNG.uniform(-2, 1, (20, 6, 1)):
        a = half @ half.T
        diagonal = a.copy()
        principal(diagonal, u, np.zeros((6, 6)))
        assert np.allclose(
            np.sort(np.diag(diagonal)), np.linalg.eigvalsh(a), rtol=1e-9, atol=1e-12 * np.trace(a)
        )
        assert np.allclose(u.T @ u, np.eye(6), atol=1e-12)
        assert np.allclose(u @ np.diag(np.diag(diagonal)) @ u.T, a, atol=1e-11 * np.trace(a))
    same = np.eye(6)
    principal(same, u, np.zeros((6, 6)))
    assert np.allclose(same, np.eye(6), atol=1e-12)
    for diagonal in (np.eye(6), np.zeros((6, 6))):
        a, axes = diagonal.copy(), np.eye(6)
        principal(a, axes, np.zeros((6, 6)))
        assert np.array_equal(a, diagonal) and np.array_equal(axes, np.eye(6))


def test_operational_space_has_no_direction_heavier_than_its_limit_and_leaves_the_others_alone():
    """W by its eigenvalues; the force for an acceleration of 1 in each of its directions."""
    for q in BENT:
        law = law_at(
            q, operational_space(posture_stiffness=0.0, mass_limit=5.0, regularisation=1e-9, **AT_ONCE)
        )
        arm = np.diag([1.0] * 3 + [0.2] * 3)
        size, axes = np.linalg.eigh(arm @ MODEL.jac @ MODEL.minv_j @ arm)
        assert (size < 0.2).any() and (size > 0.2).any()
        for k in range(6):
            law.k[:] = 0.0
            law._m["move"][:] = np.linalg.inv(arm) @ axes[:, k]
            law._m["factor"][:] = MODEL.jac @ MODEL.minv_j
            weighed(law._m)
            assert np.allclose(np.linalg.inv(arm) @ law._m["move"], axes[:, k] / max(size[k], 0.2), atol=1e-8)


def test_operational_space_that_is_stiffer_has_less_mass_in_heavy_directions():
    law = law_at(
        HOME,
        operational_space(stiffness=(2000.0,) * 6, posture_stiffness=0.0, regularisation=1e-9, **AT_ONCE),
    )
    law.stand()
    pos, quat = np.array(MODEL.pos), np.array(MODEL.quat)
    law.set_target(pos + [0, 0, 0.01], quat)
    law.tick(MODEL, 1e-3)
    law.reference.velocity[:] = 0
    law.tick(MODEL, 1e-3)
    arm = np.diag([1.0] * 3 + [0.2] * 3)
    size, axes = np.linalg.eigh(arm @ MODEL.jac @ MODEL.minv_j @ arm)
    w = arm @ axes @ np.diag(1 / np.maximum(size, 2000 / 20_000)) @ axes.T @ arm
    assert size.min() < 0.1
    assert np.allclose(law._m["wrench"], w @ [0, 0, 20.0, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("task", ["impedance", "operational_space"])
@pytest.mark.parametrize("frame", ["base", "tool"])
def test_a_tick_is_the_equation_in_the_laws_docstring(task, frame):
    """All terms at once, in plain NumPy."""
    k, eps = np.array([600.0, 300, 100, 30, 20, 10]), 0.003
    o = LawOptions(
        task=task,
        frame=frame,
        stiffness=tuple(k),
        torque_rate=None,
        ramp=0.0,
        regularisation=eps,
        target_speed=1e9,
        target_turn=1e9,
        filter_time=0.5,
    )
    for q in BENT:
        law = law_at(q, o, dq=RNG.uniform(-0.2, 0.2, 7))
        law.set_joints(q + 0.1, np.full(7, 0.05))
        law.set_wrench(np.array([1.0, -2, 3, 0.1, 0.2, -0.3]), "tool")
        law.set_target(
            np.array(MODEL.pos) + [0.01, 0.02, -0.01],
            g.multiply(g.exp(np.array([0.05, 0.02, 0.1])), np.array(MODEL.quat)),
        )
        torque, r = law.tick(MODEL, 1e-3), law.reference
        turn = np.kron(np.eye(2), MODEL.rotation)
        axes = turn if frame == "tool" else np.eye(6)
        a = MODEL.jac @ MODEL.minv_j
        w = np.linalg.inv(a + eps * np.eye(6))
        own = axes.T @ a @ axes
        masses = np.minimum(np.diag(np.linalg.inv(own + eps * np.eye(6))), 4 / np.diag(own))
        d = 2 * np.sqrt(k * masses if task == "impedance" else k)
        e, slip = (
            g.pose_error(r.pos, r.quat, np.array(MODEL.pos), np.array(MODEL.quat)),
            r.velocity - MODEL.jac @ MODEL.dq,
        )
        f = axes @ (k * (axes.T @ e) + d * (axes.T @ slip)) + turn @ law.feed
        t0 = np.clip(5 * (law.q_ref - q) + 2 * math.sqrt(5) * (0.05 - MODEL.dq), -5, 5)
        left = eps * w if task == "impedance" else np.zeros((6, 6))
        free = t0 - MODEL.jac.T @ w @ (np.eye(6) + left + left @ left) @ MODEL.minv_jt @ t0
        ad = np.clip(r.acceleration, [-4] * 3 + [-16] * 3, [4] * 3 + [16] * 3)
        task_torque = MODEL.jac.T @ (f + w @ ad if task == "impedance" else w @ (f + ad))
        assert np.allclose(
            torque,
            np.clip(
                task_torque + free + MODEL.bias, -0.8 * np.array(ROBOT.torque), 0.8 * np.array(ROBOT.torque)
            ),
        )


RUBBING = replace(
    ROBOT,
    friction={
        "phi1": [0.5, 0.6, 0.5, 0.4, 0.8, 0.9, 0.7],
        "phi2": [5.0, 9.0, 4.0, 30.0, 10.0, 18.0, 11.0],
        "phi3": [0.04, 0.03, -0.02, 0.05, 0.02, 0.0, -0.03],
    },
)


VARIED = {
    "default": LawOptions(),
    "one stiff axis": LawOptions(stiffness=(0.0, 600.0, 0.0, 0.0, 0.0, 0.0), nullspace="none", ramp=0.05),
    "tool axes": LawOptions(
        frame="tool", stiffness=(900.0, 100.0, 400.0, 30.0, 5.0, 12.0), damping_ratio=0.7, ramp=0.05
    ),
    "operational space": operational_space(stiffness=(400.0, 300.0, 0.0, 100.0, 50.0, 20.0), ramp=0.1),
    "heavy directions given up": operational_space(
        stiffness=(900.0,) * 3 + (300.0,) * 3, mass_limit=8.0, ramp=0.1
    ),
    "kinematic projection": LawOptions(nullspace="kinematic", posture_damping=0.7, filter_time=0.0, ramp=0.0),
    "no projection": LawOptions(
        nullspace="none", posture_torque=None, damping=(20.0, 0.0, 5.0, 1.0, 2.0, 0.0), ramp=0.02
    ),
    "no clips": LawOptions(
        error_clip=None, torque_rate=None, feed_acceleration=(0.0, 0.0), limit_margin=1.2, limit_torque=8.0
    ),
    "posture by joint": LawOptions(
        posture_stiffness=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), posture_speed=0.3, posture_torque=0.4
    ),
    "friction, slow": LawOptions(
        friction=True, target_speed=0.05, target_turn=0.2, filter_time=0.05, command_timeout=0.03
    ),
    "joints alone": joint_impedance(stiffness=80.0, damping=(4.0, 5.0, 6.0, 7.0, 3.0, 2.0, 1.0), ramp=0.1),
    "floating": gravity_compensation(torque_fraction=0.3, regularisation=0.05),
    "stiff and bounded": LawOptions(
        max_stiffness=(700.0, 35.0), torque_rate=100.0, torque_fraction=0.2, regularisation=0.05
    ),
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
        for both, chance in (
            ("target", 0.01),
            ("joints", 0.01),
            ("wrench", 0.008),
            ("stiffness", 0.006),
            ("rebase", 0.002),
            ("stand", 0.001),
        ):
            if rng.random() > chance:
                continue
            if both == "target":
                pose = (
                    np.array(model.pos) + rng.uniform(-0.1, 0.1, 3),
                    g.multiply(g.exp(rng.uniform(-0.4, 0.4, 3)), np.array(model.quat)),
                )
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
        assert (
            np.allclose(law.reference.pos, plain.pos, atol=1e-9)
            and np.allclose(law.k, plain.k)
            and law.gain == pytest.approx(plain.gain)
        )
        assert law.fed == (plain.feed_age <= o.command_timeout)


@pytest.mark.parametrize("options", [LawOptions(), operational_space()])
def test_an_arm_put_at_its_targets_has_its_damping_at_once(options):
    law = law_at(HOME, options)
    law.tick(MODEL, 1e-3)
    law.stand()
    law.tick(MODEL, 1e-3)
    assert (law.k == options.stiffness).all() and (
        law.d >= 1.9 * np.sqrt(law.k * np.minimum(law._m["masses"], 1))
    ).all()


def test_stiffness_commanded_on_an_axis_without_one_goes_back_to_none():
    law = law_at(HOME, LawOptions(stiffness=(600.0, 600, 0, 30, 30, 30), ramp=0.1))
    law.set_stiffness(np.array([600.0, 600, 900, 30, 30, 30]))
    for _ in range(90):
        law.tick(MODEL, 1e-3)
    assert law.k[2] > 800
    for _ in range(150):
        law.tick(MODEL, 1e-3)
    assert law.k[2] == 0


@pytest.mark.parametrize(
    "options",
    [
        LawOptions(nullspace="none", posture_stiffness=0.0, **AT_ONCE),
        LawOptions(nullspace="none", posture_stiffness=0.0, frame="tool", **AT_ONCE),
        LawOptions(posture_stiffness=0.0, error_clip=None, **AT_ONCE),
    ],
)
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
    law = law_at(
        BENT[0], LawOptions(stiffness=k, frame="tool", nullspace="none", posture_stiffness=0.0, **AT_ONCE)
    )
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
    """Power identity dq . t = F . v + m . w in base axes: it fails with a Jacobian of another point or other
    axes."""
    for q in BENT:
        law = law_at(q, LawOptions(nullspace="none", posture_stiffness=0.0, **AT_ONCE))
        law.set_wrench(np.array([10.0, 0, 0, 0, 0, 0]))
        torque = law.tick(MODEL, 1e-3) - MODEL.bias
        dq = RNG.standard_normal(7)
        assert np.isclose(torque @ dq, 10 * (MODEL.jac @ dq)[0])


def test_joint_limits_push_back():
    low, high = -1.0, 1.0
    assert limit_torque(0.0, low, high, 0.1, 5.0) == 0
    assert limit_torque(0.95, low, high, 0.1, 5.0) == pytest.approx(-2.5)
    assert limit_torque(-0.95, low, high, 0.1, 5.0) == pytest.approx(2.5)
    assert (
        limit_torque(2.0, low, high, 0.1, 5.0) == -5 and limit_torque(0.0, -math.inf, math.inf, 0.1, 5.0) == 0
    )
    q = HOME.copy()
    q[3] = ROBOT.upper[3] - 0.02
    law = law_at(q, gravity_compensation(torque_rate=None))
    for _ in range(100):
        torque = law.tick(MODEL, 1e-3)
    assert (torque - MODEL.bias)[3] == pytest.approx(-4.0)


def test_at_a_joint_limit_the_pull_of_the_tool_goes_and_motion_towards_it_is_braked():
    brake = 2 * math.sqrt(5.0 / 0.1)
    for side in (-1, 1):
        for depth in (0.25, 1.0):
            q = side * (1.0 - 0.1 * (1 - depth))
            assert yielding(side * 8.0, 0.0, q, -1.0, 1.0, 0.1, 5.0) == pytest.approx(-side * depth * 8.0)
            assert yielding(-side * 8.0, -side * 3.0, q, -1.0, 1.0, 0.1, 5.0) == 0  # away from it: as ever
            assert yielding(0.0, side * 2.0, q, -1.0, 1.0, 0.1, 5.0) == pytest.approx(
                -side * depth * brake * 2.0
            )
        # no more beyond it
        assert yielding(side * 8.0, 0.0, side * 1.5, -1.0, 1.0, 0.1, 5.0) == pytest.approx(-side * 8.0)
    q = HOME.copy()
    q[3] = ROBOT.upper[3] - 0.03
    law = law_at(q, LawOptions(nullspace="none", posture_stiffness=0.0, **AT_ONCE))
    law.set_wrench(np.array([-40.0, 0, 0, 0, 0, 0]))
    torque, pull = law.tick(MODEL, 1e-3) - MODEL.bias, MODEL.jac.T @ [-40.0, 0, 0, 0, 0, 0]
    assert pull[3] > 1 and torque[3] == pytest.approx(0.3 * pull[3] - 3.5, abs=1e-6)
    assert np.allclose(np.delete(torque - pull, 3), 0, atol=1e-6)


def test_operational_space_gets_over_a_measurement_that_is_not_finite():
    law, bad = law_at(HOME, operational_space()), arm_model(ROBOT)
    law.tick(MODEL, 1e-3)
    bad.update(np.full(7, np.nan), np.zeros(7))
    law.tick(bad, 1e-3)
    assert law.faults == 1 and np.isfinite(law._m["axes"]).all()
    MODEL.update(HOME, np.zeros(7))
    assert np.isfinite(law.tick(MODEL, 1e-3)).all() and law.faults == 1


def test_friction_torque_is_smooth_and_zero_at_rest():
    phi = load_robot("fr3").friction
    for a, b, c in zip(*phi.values(), strict=True):
        assert friction(0.0, a, b, c) == 0 and math.isfinite(friction(-1e9, a, b, c))
        assert friction(1e4, a, b, c) == pytest.approx(a - a / (1 + math.exp(-b * c)))


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
    assert np.allclose(d**2 / k, d[-1] ** 2 / k[-1])  # D = 2 z sqrt(K W)


def test_torque_and_torque_rate_stay_within_their_limits_whatever_is_asked():
    law = law_at(
        HOME,
        LawOptions(
            target_speed=1e9,
            error_clip=None,
            filter_time=0,
            ramp=0,
            max_stiffness=(5000.0, 500.0),
            stiffness=(5000.0,) * 3 + (500.0,) * 3,
        ),
    )
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
    law, never = (
        law_at(
            HOME,
            LawOptions(
                stiffness=(0.0,) * 6, nullspace=nullspace, posture_stiffness=100.0, command_timeout=0.01
            ),
            dq=np.full(7, 0.01),
        )
        for _ in range(2)
    )
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
        assert np.allclose(
            g.turn_between(reference.quat, start), way * np.array([0.1, -0.2, 0.2]), atol=1e-12
        )
    assert np.array_equal(reference.quat, reference.target_quat) and reference.settled


def test_damping_of_zero_is_none():
    law = law_at(
        HOME,
        LawOptions(damping=(0.0,) * 6, nullspace="none", posture_stiffness=0.0, **AT_ONCE),
        dq=np.full(7, 0.3),
    )
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


@pytest.mark.parametrize("axis", range(3))
def test_the_low_pass_goes_along_and_turns_about_every_axis(axis):
    law, one = law_at(HOME, LawOptions(target_speed=1e9, target_turn=1e9, filter_time=0.1)), np.eye(3)[axis]
    pos, quat, share = np.array(MODEL.pos), np.array(MODEL.quat), 1 - math.exp(-0.2)

    def after_20_ticks(far, turn):
        law.activate(MODEL)
        law._m["lag"] = 0.1
        law.set_target(pos + far * one, g.multiply(g.exp(turn * one), quat))
        for _ in range(20):
            law.tick(MODEL, 1e-3)
        return law.reference

    assert np.allclose(after_20_ticks(0.1, 0.0).pos - pos, 0.1 * share * one, atol=1e-9)
    assert np.allclose(
        g.turn_between(tuple(after_20_ticks(0.0, 0.2).quat), tuple(quat)), 0.2 * share * one, atol=1e-9
    )


def test_springs_that_come_later_are_damped_by_the_inertia_of_that_moment():
    o = joint_impedance(torque_rate=None, ramp=0.0)
    law, plain, model = Law(o, FREE), PlainLaw(o, FREE), arm_model(ROBOT)
    model.update(HOME, np.zeros(7))
    law.activate(model)
    plain.activate(model)
    for k, (q, dq) in enumerate(((HOME, 0.0), (HOME, 0.0), (BENT[0], 0.2), (BENT[0], 0.2))):
        model.update(q, np.full(7, dq))
        if k == 2:
            for it in (law, plain):
                it.set_stiffness(np.array([900.0, 400.0, 600.0, 30.0, 20.0, 10.0]))
        assert np.allclose(law.tick(model, 1e-3), plain.tick(model, 1e-3), atol=2e-5)


@pytest.mark.parametrize("axis", [(1.0, 0.0, 0.0), (0.0, -1.0, 0.0), (0.0, 0.6, 0.8)])
def test_exactly_half_a_turn_goes_the_way_that_geometry_takes(axis):
    none, half = np.array([1.0, 0.0, 0.0, 0.0]), np.array([0.0, *axis])
    for a, b in ((half, none), (none, half)):
        assert np.allclose(between(a, b), g.turn_between(tuple(a), tuple(b)), atol=1e-14)
    assert between(half, none) == pytest.approx(math.pi * np.array(axis))


# ---- what a commander asks of the springs ------------------------------------------------------------------


PRESSED = (1500.0, 1500.0, 400.0, 60.0, 60.0, 20.0)
FREE_AXES = LawOptions(nullspace="none", posture_stiffness=0.0, error_clip=None, **AT_ONCE)


def pull(law, delta):
    """The springs' torque for a target that far from the tool, as force and moment."""
    law.set_target(
        np.array(MODEL.pos) + delta[:3], g.multiply(g.exp(np.array(delta[3:])), np.array(MODEL.quat))
    )
    law.tick(MODEL, 1e-3)
    law.reference.velocity[:] = law.reference.acceleration[:] = 0.0
    torque = law.tick(MODEL, 1e-3) - MODEL.bias
    return np.linalg.lstsq(MODEL.jac.T, torque, rcond=None)[0]


@pytest.mark.parametrize("frame", ["base", "tool"])
def test_the_static_pull_of_the_springs_is_bounded_and_keeps_its_direction(frame):
    law = law_at(
        HOME, LawOptions(nullspace="none", posture_stiffness=0.0, error_clip=None, frame=frame, **AT_ONCE)
    )
    far, held = np.array([0.03, -0.06, 0.06, 0.1, 0.0, 0.2]), Setpoint("ACTIVE", None, tuple(MODEL.quat))
    free = pull(law, far)
    assert np.allclose(free, np.array([600.0] * 3 + [30.0] * 3) * far, atol=1e-4)
    for most in ((10.0, 100.0), (1e3, 2.0), (20.0, 3.0)):
        law.comply(compliance(spring=most))
        size = np.linalg.norm(free[:3]), np.linalg.norm(free[3:])
        s = [min(1.0, m / x) for m, x in zip(most, size, strict=True)]
        assert np.allclose(pull(law, far), np.repeat(s, 3) * free, atol=1e-4)
    follow(law, MODEL, held)  # nothing is asked for any more: the bound opens, by a factor of e in 0.2 s
    assert not law.complies
    sizes = [np.linalg.norm(pull(law, far)[:3]) for _ in range(100)]  # 2 ticks each
    assert np.all(np.diff(sizes[:50]) > 0) and sizes[49] == pytest.approx(20.0 * math.exp(5 * 0.1), rel=0.01)
    for _ in range(2200):
        law.tick(MODEL, 1e-3)
    assert np.isinf(law._m["pull"]).all() and np.allclose(pull(law, far), free, atol=1e-4)


def compliance(wrench=(0.0,) * 6, stiffness=None, spring=(21.0, 7.0)):
    return Compliance(wrench, stiffness, spring)


def test_a_bound_hides_no_error_that_is_not_a_number():
    law = law_at(HOME, FREE_AXES)
    law.comply(compliance())
    law.reference.pos[0] = math.nan
    before = law.tau.copy()
    law.tick(MODEL, 1e-3)
    assert law.faults == 1 and np.array_equal(law.tau, before)


def test_the_law_takes_wrench_and_stiffness_for_as_long_as_the_setpoint_has_them():
    law = law_at(HOME, LawOptions(nullspace="none", posture_stiffness=0.0))
    for _ in range(600):
        law.tick(MODEL, 1e-3)
    asked, push = Setpoint("ACTIVE", None, tuple(MODEL.quat)), np.array([1.0, 2.0, 3.0, 0.1, 0.2, 0.3])
    follow(
        law, MODEL, Setpoint("ACTIVE", None, tuple(MODEL.quat), compliance=compliance(tuple(push), PRESSED))
    )
    assert law.fed and law.complies
    follow(law, MODEL, asked)
    assert not law.fed and not law.complies and law.k_target.tolist() == list(LawOptions().stiffness)
    for k in range(600):
        follow(
            law,
            MODEL,
            Setpoint("ACTIVE", None, tuple(MODEL.quat), compliance=compliance(tuple(push), PRESSED)),
        )
        torque = law.tick(MODEL, 1e-3)
        assert k > 2 or law.k[0] < 620  # it ramps
    assert law.k.tolist() == list(PRESSED) and np.allclose(torque - MODEL.bias, MODEL.jac.T @ push, atol=1e-6)
    law.activate(MODEL)
    assert not law.complies and np.isinf(law._m["pull"]).all() and not law._m["opens"]
