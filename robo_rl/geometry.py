"""Rotations and poses in NumPy. Quaternions are w first, (w, x, y, z), as in MuJoCo; ROS messages are x
first.

A quaternion of a pose turns vectors of the body frame into the base frame: v_base = R(q) v_body. Products
compose the same way, R(a b) = R(a) R(b). q and -q are one rotation. Rotation vectors are axis * angle [rad],
angle in [0, pi]. Arrays carry the components in their last axis and broadcast over the others. The functions
of the second half work on tuples of Python floats: one rotation costs them a twentieth of what NumPy charges,
which a 1 kHz loop needs.
Source: Sola 2017, "Quaternion kinematics for the error-state Kalman filter", eq. 12, 101, 103 and 158.
"""

import math

import numpy as np

Floats = tuple[float, ...]
SMALL = 1e-8  # rad; below it sin(x)/x is 1 to the last bit


def from_xyzw(q: np.ndarray) -> np.ndarray:
    """ROS's (x, y, z, w) -> (w, x, y, z)."""
    return np.roll(q, 1, -1)


def to_xyzw(q: np.ndarray) -> np.ndarray:
    """(w, x, y, z) -> ROS's (x, y, z, w)."""
    return np.roll(q, -1, -1)


def normalise(q: np.ndarray) -> np.ndarray:
    """q/|q|, with w >= 0."""
    q = np.asarray(q, float)
    return q * (np.where(q[..., :1] < 0, -1.0, 1.0) / np.linalg.norm(q, axis=-1, keepdims=True))


def conjugate(q: np.ndarray) -> np.ndarray:
    """The inverse rotation of a unit quaternion."""
    return q * np.array([1.0, -1.0, -1.0, -1.0])


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Hamilton product: turn by b, then by a, both in the base frame."""
    a, b = np.broadcast_arrays(a, b)
    return np.stack(hamilton(np.moveaxis(a, -1, 0), np.moveaxis(b, -1, 0)), -1)


def rotate(q: np.ndarray, v: np.ndarray) -> np.ndarray:
    """R(q) v = v + 2 w (u x v) + 2 u x (u x v), with q = (w, u)."""
    u = q[..., 1:]
    t = 2 * np.cross(u, v)
    return v + q[..., :1] * t + np.cross(u, t)


def exp(r: np.ndarray) -> np.ndarray:
    """Rotation vector [..., 3] of any length -> quaternion (cos(|r|/2), sin(|r|/2) r/|r|)."""
    r = np.asarray(r, float)
    half = np.linalg.norm(r, axis=-1, keepdims=True) / 2
    return np.concatenate([np.cos(half), r * (np.sinc(half / np.pi) / 2)], -1)


def log(q: np.ndarray) -> np.ndarray:
    """Unit quaternion -> the shortest rotation vector, |r| <= pi; exactly at pi one of the two."""
    q = np.asarray(q, float)
    q = np.where(q[..., :1] < 0, -q, q)
    n = np.linalg.norm(q[..., 1:], axis=-1, keepdims=True)
    angle = 2 * np.arctan2(n, q[..., :1])
    return q[..., 1:] * np.where(n < SMALL, 2.0, angle / np.maximum(n, SMALL))


def angle_between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Angle of the rotation from b to a, in [0, pi] [rad]."""
    return np.linalg.norm(log(multiply(a, conjugate(b))), axis=-1)


def interpolate(a: np.ndarray, b: np.ndarray, s: np.ndarray | float) -> np.ndarray:
    """The point at fraction s of the geodesic from a (s=0) to b (s=1): exp(s log(b a^-1)) a."""
    step = log(multiply(b, conjugate(a)))
    return multiply(exp(np.asarray(s)[..., None] * step), a)


def matrix(q: np.ndarray) -> np.ndarray:
    """Rotation matrix [..., 3, 3]; its columns are the body's axes in the base frame."""
    q = np.asarray(q, float)
    return np.stack([rotate(q, axis) for axis in np.eye(3)], -1)


def from_matrix(m: np.ndarray) -> np.ndarray:
    """Quaternion of rotation matrices [..., 3, 3], w >= 0.

    Of the four columns of 4 q q^T, which are sums of the matrix's entries, the longest is used (Shepperd
    1978).
    """
    m = np.asarray(m, float)
    (a, b, c), (d, e, f), (g, h, i) = np.moveaxis(m, (-2, -1), (0, 1))
    four = np.stack(
        [
            np.stack([1 + a + e + i, h - f, c - g, d - b], -1),
            np.stack([h - f, 1 + a - e - i, b + d, c + g], -1),
            np.stack([c - g, b + d, 1 - a + e - i, f + h], -1),
            np.stack([d - b, c + g, f + h, 1 - a - e + i], -1),
        ],
        -2,
    )
    best = np.argmax(np.diagonal(four, axis1=-2, axis2=-1), -1)
    return normalise(np.take_along_axis(four, best[..., None, None], -2)[..., 0, :])


def pose_error(
    target_pos: np.ndarray, target_quat: np.ndarray, pos: np.ndarray, quat: np.ndarray
) -> np.ndarray:
    """[..., 6] error (p_t - p [m], log(R_t R^T) [rad]), both in the base frame, translation and rotation
    apart."""
    return np.concatenate([target_pos - pos, log(multiply(target_quat, conjugate(quat)))], -1)


# ---- one rotation, on tuples of floats ---------------------------------------------------------------------


def hamilton(a: "Floats | np.ndarray", b: "Floats | np.ndarray") -> Floats:
    """a b; the components may also be arrays."""
    aw, ax, ay, az = a
    bw, bx, by, bz = b
    return (
        aw * bw - ax * bx - ay * by - az * bz,
        aw * bx + ax * bw + ay * bz - az * by,
        aw * by - ax * bz + ay * bw + az * bx,
        aw * bz + ax * by - ay * bx + az * bw,
    )


def log1(w: float, x: float, y: float, z: float) -> Floats:
    """`log` of one unit quaternion."""
    n = math.sqrt(x * x + y * y + z * z)
    if n < SMALL:
        s = 2.0 if w >= 0 else -2.0
    else:
        s = 2 * math.atan2(n, w) / n if w >= 0 else -2 * math.atan2(n, -w) / n
    return s * x, s * y, s * z


def turn_between(a: Floats, b: Floats) -> Floats:
    """log(a b^-1): the rotation vector, in the base frame, that turns b into a."""
    aw, ax, ay, az = a
    bw, bx, by, bz = b
    return log1(
        aw * bw + ax * bx + ay * by + az * bz,
        ax * bw - aw * bx - ay * bz + az * by,
        ay * bw - aw * by + ax * bz - az * bx,
        az * bw - aw * bz - ax * by + ay * bx,
    )


def rotate1(q: Floats, v: Floats) -> Floats:
    """`rotate` of one vector."""
    w, a, b, c = q
    x, y, z = v
    s, t, u = 2 * (b * z - c * y), 2 * (c * x - a * z), 2 * (a * y - b * x)
    return x + w * s + b * u - c * t, y + w * t + c * s - a * u, z + w * u + a * t - b * s


def turned(q: Floats, x: float, y: float, z: float) -> Floats:
    """unit(exp(x, y, z) q): q turned by a rotation vector in the base frame, in one call."""
    n = math.sqrt(x * x + y * y + z * z)
    if n < SMALL:
        aw, s = 1.0, 0.5
    else:
        aw, s = math.cos(n / 2), math.sin(n / 2) / n
    x, y, z = s * x, s * y, s * z
    bw, bx, by, bz = q
    w, x, y, z = (
        aw * bw - x * bx - y * by - z * bz,
        aw * bx + x * bw + y * bz - z * by,
        aw * by - x * bz + y * bw + z * bx,
        aw * bz + x * by - y * bx + z * bw,
    )
    s = 1 / math.sqrt(w * w + x * x + y * y + z * z)
    return w * s, x * s, y * s, z * s


def unit(q: Floats) -> Floats:
    """q/|q|, same sign."""
    w, x, y, z = q
    s = 1 / math.sqrt(w * w + x * x + y * y + z * z)
    return w * s, x * s, y * s, z * s
