import math

import numpy as np
import pytest

from robo_rl import geometry as g

RNG = np.random.default_rng(0)
QUATS = g.normalise(RNG.standard_normal((200, 4)))
VECTORS = RNG.standard_normal((200, 3))
ONE = np.array([1.0, 0, 0, 0])


def same(a, b, tol=1e-12):
    """Equal as rotations: q and -q are one."""
    return np.allclose(np.abs((a * b).sum(-1)), 1, atol=tol)


def test_rotations_are_a_group():
    a, b, c = QUATS[:60], QUATS[60:120], QUATS[120:180]
    assert np.allclose(g.multiply(g.multiply(a, b), c), g.multiply(a, g.multiply(b, c)))
    assert np.allclose(g.multiply(a, ONE), a) and np.allclose(g.multiply(ONE, a), a)
    assert np.allclose(g.multiply(a, g.conjugate(a)), ONE)
    assert np.allclose(np.linalg.norm(g.multiply(a, b), axis=-1), 1)


def test_products_rotate_by_the_right_factor_first():
    a, b, v = QUATS[:100], QUATS[100:], VECTORS[:100]
    assert np.allclose(g.rotate(g.multiply(a, b), v), g.rotate(a, g.rotate(b, v)))
    assert np.allclose(g.rotate(a, v), np.einsum("nij,nj->ni", g.matrix(a), v))


def test_a_quarter_turn_about_z_takes_x_to_y():
    assert np.allclose(g.rotate(g.exp(np.array([0, 0, math.pi / 2])), np.array([1.0, 0, 0])), [0, 1, 0])


def test_matrices_are_proper_and_give_the_quaternion_back():
    m = g.matrix(QUATS)
    assert np.allclose(m @ np.swapaxes(m, -1, -2), np.eye(3)) and np.allclose(np.linalg.det(m), 1)
    assert np.allclose(g.from_matrix(m), QUATS)
    half_turns = g.exp(math.pi * np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0.6, 0.8, 0], [0, -0.6, 0.8]]))
    assert same(g.from_matrix(g.matrix(half_turns)), half_turns)


def test_log_and_exp_undo_each_other():
    assert same(g.exp(g.log(QUATS)), QUATS)
    for size in (0.0, 1e-12, 1e-9, 1e-8, 1e-5, 0.1, 3.0, math.pi - 1e-9):
        r = VECTORS / np.linalg.norm(VECTORS, axis=-1, keepdims=True) * size
        assert np.allclose(g.log(g.exp(r)), r, rtol=1e-7, atol=1e-15)
        assert np.allclose(g.log(-g.exp(r)), r, rtol=1e-7, atol=1e-15)  # -q is the same rotation
    assert (np.linalg.norm(g.log(QUATS), axis=-1) <= math.pi + 1e-12).all()


def test_log_is_the_matrix_logarithm():
    for q in QUATS[:10]:
        x, y, z = g.log(q)
        skew = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
        series, term = np.eye(3), np.eye(3)
        for k in range(1, 40):
            term = term @ skew / k
            series = series + term
        assert np.allclose(series, g.matrix(q))


def test_interpolation_moves_on_the_geodesic_at_constant_speed():
    a, b = QUATS[:100], QUATS[100:]
    assert same(g.interpolate(a, b, 0.0), a) and same(g.interpolate(a, b, 1.0), b)
    whole = g.angle_between(a, b)
    for s in (0.25, 0.5, 0.9):
        mid = g.interpolate(a, b, np.full(100, s))
        assert np.allclose(g.angle_between(mid, a), s * whole) and np.allclose(
            g.angle_between(b, mid), (1 - s) * whole
        )


def test_the_pose_error_moves_the_pose_onto_its_target():
    p, q, target_p, target_q = VECTORS[:50], QUATS[:50], VECTORS[50:100], QUATS[50:100]
    e = g.pose_error(target_p, target_q, p, q)
    assert np.allclose(p + e[:, :3], target_p) and same(g.multiply(g.exp(e[:, 3:]), q), target_q)


def test_scalar_functions_equal_the_array_ones():
    for a, b, r in zip(QUATS[:100], -QUATS[100:], VECTORS, strict=False):
        assert np.allclose(g.hamilton(tuple(a), tuple(b)), g.multiply(a, b))
        assert np.allclose(g.log1(*b), g.log(b))
        assert np.allclose(g.turn_between(tuple(a), tuple(b)), g.log(g.multiply(a, g.conjugate(b))))
        assert np.allclose(g.turned(tuple(a), *r), g.multiply(g.exp(r), a))
        assert np.allclose(g.turned(tuple(2 * a), *r * 1e-10), a)
        assert np.allclose(g.rotate1(tuple(a), tuple(r)), g.rotate(a, r))
        assert np.allclose(g.unit(tuple(3 * a)), a)


def test_ros_quaternions_are_x_first():
    assert np.allclose(g.from_xyzw(np.array([1, 2, 3, 4])), [4, 1, 2, 3])
    assert np.allclose(g.to_xyzw(g.from_xyzw(QUATS)), QUATS)


@pytest.mark.parametrize("q", [ONE, -ONE])
def test_the_identity_has_no_rotation_vector(q):
    assert np.array_equal(np.abs(g.log(q)), np.zeros(3)) and g.log1(*q) == (0, 0, 0)
