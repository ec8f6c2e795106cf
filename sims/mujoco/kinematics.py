"""The arm's kinematics for a whole batch in plain NumPy, float32.

The batch is the last axis, so every operation is a few long vector loops and no result depends on an env's
index or on the size of the batch (no BLAS, no LAPACK). Vectors are `[5, ...]`: rows x y z x y, so that the
cyclic shifts of a cross product are views. Frames are `[3, 5, N]`: axis of the frame, then its base
coordinates.
"""

import math

import numpy as np

from sims.mujoco.model import DH, HAND_YAW, TOOL

F = np.float32
HAND = np.complex64(complex(math.cos(HAND_YAW), -math.sin(HAND_YAW)))


def wrap(v: np.ndarray) -> None:
    """Fill rows 3, 4 of v [..., 5, N] with rows 0, 1."""
    v[..., 3:, :] = v[..., :2, :]


def contract(spec: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """einsum over axes before the batch. A batch of one is computed as two, else NumPy sums in another
    order."""
    if a.shape[-1] > 1:
        return np.einsum(spec, a, b)
    return np.einsum(spec, a.repeat(2, -1), b.repeat(2, -1))[..., :1]


class Arm:
    """Forward kinematics and Jacobian of `n` arms with reused buffers."""

    def __init__(self, n: int):
        self.axes = np.zeros((5, 7, n), F)  # joint axes in the base frame
        self.anchors = np.zeros((3, 7, n), F)  # a point on each axis [m]
        self.frame = np.zeros((3, 5, n), F)  # the hand's axes; fingers open along [1], approach along [2]
        self.tcp = np.zeros((3, n), F)  # the point between the finger tips, in the base frame [m]
        self.jac = np.zeros((6, 7, n), F)  # tcp velocity [m/rad] over angular velocity, base frame
        self._turn = np.zeros((7, n), np.complex64)
        # x axis + i * y axis of the frame on its way along the chain
        self._xy = np.zeros((3, n), np.complex64)
        self._p = np.zeros((3, n), F)
        self._t = np.zeros((3, n), F)
        self._r = np.zeros((5, 7, n), F)
        self.axes[2, 0], self.anchors[2, :2] = 1, DH[0][2]

    def forward(self, q: np.ndarray) -> None:
        """Fill `axes, anchors, frame, tcp` from joint angles q [7, n] float32 (Craig's modified DH).

        A turn by q about the frame's z axis multiplies x + i y by exp(-i q); a quarter turn about x trades y
        for z.
        """
        spin, xy, p, t = self._turn, self._xy, self._p, self._t
        np.cos(q, out=spin.real)
        np.sin(q, out=spin.imag)
        np.negative(spin.imag, out=spin.imag)
        x, y = xy.real, xy.imag
        xy[0] = spin[0]
        np.multiply(spin[0], 1j, out=xy[1])
        xy[2] = 0
        p[:2], p[2] = 0, DH[0][2]
        for i in range(1, 7):
            a, quarter, d = DH[i]
            if a:
                np.multiply(x, F(a), out=t)
                p += t
            z, last = self.axes[:3, i], self.axes[:3, i - 1]
            if quarter > 0:
                np.negative(y, out=z)
                y[:] = last
            else:
                z[:] = y
                np.negative(last, out=y)
            xy *= spin[i]
            if d:
                np.multiply(z, F(d), out=t)
                p += t
            if i > 1:
                self.anchors[:, i] = p
        self.axes[3:] = self.axes[:2]
        xy *= HAND
        self.frame[0, :3] = x
        self.frame[1, :3] = y
        self.frame[2, :3] = z
        wrap(self.frame)
        np.multiply(z, F(TOOL), out=t)
        np.add(p, t, out=self.tcp)

    def jacobian(self) -> np.ndarray:
        """Fill and return `jac` [6, 7, n] at the last `forward`."""
        z, r = self.axes, self._r
        np.subtract(self.tcp[:, None], self.anchors, out=r[:3])
        r[3:] = r[:2]
        np.multiply(z[1:4], r[2:5], out=self.jac[:3])
        self.jac[:3] -= z[2:5] * r[1:4]
        self.jac[3:] = z[:3]
        return self.jac


def rotation_error(now: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """[3, N] vector sin(angle) * axis that turns frame `now` [3, 5, N] into `goal`, in base coordinates."""
    out = now[:, 1:4] * goal[:, 2:5]
    out -= now[:, 2:5] * goal[:, 1:4]
    return out.sum(0) * F(0.5)


def turn(frame: np.ndarray, w: np.ndarray) -> np.ndarray:
    """`frame` [3, 5, N] turned by rotation vectors w [5, N] in base coordinates (for |w| < 0.2 rad)."""
    s = (w[:3] * w[:3]).sum(0)
    first = F(1) - s * (F(1 / 6) - s * F(1 / 120))  # sin(a) / a
    second = F(0.5) - s * (F(1 / 24) - s * F(1 / 720))  # (1 - cos(a)) / a^2
    one = np.empty_like(frame)
    np.multiply(w[1:4], frame[:, 2:5], out=one[:, :3])
    one[:, :3] -= w[2:5] * frame[:, 1:4]
    wrap(one)
    two = w[1:4] * one[:, 2:5]
    two -= w[2:5] * one[:, 1:4]
    one *= first
    two *= second
    one += frame
    one[:, :3] += two
    wrap(one)
    return one


def damped_step(jac: np.ndarray, twist: np.ndarray, damping: float = 0.03) -> np.ndarray:
    """dq [7, N] = J^T (J J^T + damping^2 I)^-1 twist; jac [6, 7, N], twist [6, N].

    Elimination without pivoting over the whole batch at once; the matrix is symmetric positive definite.
    """
    m = np.empty((6, 7, jac.shape[2]), F)  # J J^T + damping^2 I; the last column is the twist
    m[:, :6] = contract("ikn,jkn->ijn", jac, jac)
    m[:, 6] = twist
    diagonal = m.reshape(42, -1)[::8]
    diagonal += F(damping * damping)
    for k in range(5):
        np.reciprocal(m[k, k], out=m[k, k])
        m[k + 1 :, k + 1 :] -= (m[k, k + 1 : 6] * m[k, k])[:, None] * m[k, k + 1 :]
    x = m[:, 6]
    x[5] /= m[5, 5]
    for k in range(4, -1, -1):
        x[: k + 1] -= m[: k + 1, k + 1] * x[k + 1]
        x[k] *= m[k, k]
    return contract("ikn,in->kn", jac, x)
