"""Hand-eye calibration: where a camera is, from poses of the tool and what the camera saw of a target.

    T_i X C_i = Y for all i       T_i: tool in base, C_i: target in camera, X: camera in tool (eye in hand),
                                  Y: target in base
    T_i^-1 X C_i = Y              X: camera in base (eye to hand), Y: target in tool

Between two poses this is A X = X B. Its rotation is the least-squares fit of the rotation vectors of A to
those of B (Park and Martin 1994), its translation follows linearly; then both X and Y are refined by
Gauss-Newton on all residuals log(Y^-1 T_i X C_i), rotations and translations weighted by their own spread.
Bounds are 95 % of the estimate's own covariance, for errors that are independent.
"""

import math
from dataclasses import dataclass

import numpy as np

from robo_rl.errors import UserError
from robo_rl.geometry import angle_between, conjugate, exp, from_matrix, log, matrix, multiply, rotate

LEAST_TURN = 0.2  # rad of rotation about a second axis, below which the position along the first is not known
ROUNDS, STEPS = 3, 12  # of weighting; of Gauss-Newton in each


@dataclass(frozen=True, slots=True)
class HandEye:
    """pos [3] [m], quat [4] (w, x, y, z) of the camera. pos_bound [m], angle_bound [rad]: 95 % of the errors
    are smaller; pos_rms [m], angle_rms [rad]: residuals of one pose."""

    pos: np.ndarray
    quat: np.ndarray
    pos_bound: float
    angle_bound: float
    pos_rms: float
    angle_rms: float
    poses: int


Pose = tuple[np.ndarray, np.ndarray]  # pos [..., 3] [m], quat [..., 4]


def compose(a: Pose, b: Pose) -> Pose:
    return a[0] + rotate(a[1], b[0]), multiply(a[1], b[1])


def inverse(a: Pose) -> Pose:
    q = conjugate(a[1])
    return -rotate(q, a[0]), q


def solve_hand_eye(tool: Pose, target: Pose, in_hand: bool = True) -> HandEye:
    """tool, target: poses [n,3] and [n,4] of the tool in the base and of the target in the camera. UserError:
    fewer than four poses, or the hand did not turn about two axes."""
    n = len(tool[0])
    if n < 4 or len(target[0]) != n:
        raise UserError(
            f"a calibration needs at least 4 poses, each of tool and target, got {n} and {len(target[0])}"
        )
    moved = tool if in_hand else inverse(tool)
    x = closed_form(moved, target)
    y = compose(compose((moved[0][0], moved[1][0]), x), (target[0][0], target[1][0]))
    spread = np.array([1.0, 1.0])
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            r, jac = residuals(moved, target, x, y), jacobian(moved, target, x, y)
            weight = np.tile(np.repeat(1 / spread, 3), n)
            step = -np.linalg.lstsq(jac * weight[:, None], r * weight, rcond=None)[0]
            x, y = moved_by(x, step[:6]), moved_by(y, step[6:])
            if np.abs(step).max() < 1e-8:
                break
        r = residuals(moved, target, x, y).reshape(n, 2, 3)
        share = n / (n - 2)  # twelve unknowns of 6 n numbers
        spread = np.maximum(np.sqrt((r**2).mean((0, 2)) * share), 1e-9)
    weight = np.tile(np.repeat(1 / spread, 3), n)
    j = jacobian(moved, target, x, y) * weight[:, None]
    sigma = np.sqrt(np.diag(np.linalg.inv(j.T @ j))[:6])
    chi = 2.796  # 95 % of a vector of three normal errors of spread 1 is shorter
    return HandEye(
        x[0],
        x[1],
        chi * float(sigma[:3].max()),
        chi * float(sigma[3:].max()),
        float(spread[0]) * math.sqrt(3),
        float(spread[1]) * math.sqrt(3),
        n,
    )


def closed_form(moved: Pose, target: Pose) -> Pose:
    """X of A X = X B over all pairs of poses. UserError: the rotations are about one axis."""
    first, second = np.triu_indices(len(moved[0]), 1)
    a = compose(inverse((moved[0][second], moved[1][second])), (moved[0][first], moved[1][first]))
    b = compose((target[0][second], target[1][second]), inverse((target[0][first], target[1][first])))
    alpha, beta = log(a[1]), log(b[1])
    turns = np.linalg.svd(alpha, compute_uv=False) / math.sqrt(len(alpha))
    if turns[1] < LEAST_TURN / 2:
        raise UserError(
            f"the hand turned about one axis alone ({math.degrees(2 * turns[1]):.1f} degrees about a "
            f"second): turn it by at least {math.degrees(LEAST_TURN):.0f} degrees about two axes, better by "
            "30 about all three"
        )
    u, _, vt = np.linalg.svd(alpha.T @ beta)
    r = u @ np.diag([1.0, 1.0, np.sign(np.linalg.det(u @ vt))]) @ vt
    left = (matrix(a[1]) - np.eye(3)).reshape(-1, 3)
    right = (b[0] @ r.T - a[0]).reshape(-1)
    return np.linalg.lstsq(left, right, rcond=None)[0], from_matrix(r)


def moved_by(x: Pose, step: np.ndarray) -> Pose:
    """x moved by step [6]: metres and radians in its own axes."""
    return compose(x, (step[:3], exp(step[3:])))


def residuals(moved: Pose, target: Pose, x: Pose, y: Pose) -> np.ndarray:
    """[6 n]: position [m] and rotation vector [rad] of Y^-1 T_i X C_i."""
    e = compose(inverse(y), compose(compose(moved, x), target))
    return np.concatenate([e[0], log(e[1])], 1).reshape(-1)


def jacobian(moved: Pose, target: Pose, x: Pose, y: Pose, h: float = 1e-6) -> np.ndarray:
    """[6 n, 12] of `residuals` by central differences."""
    out = []
    for k in range(12):
        d = h * np.eye(12)[k]
        ends = [residuals(moved, target, moved_by(x, s * d[:6]), moved_by(y, s * d[6:])) for s in (1, -1)]
        out.append((ends[0] - ends[1]) / (2 * h))
    return np.stack(out, 1)


def difference(a: HandEye, pos: np.ndarray, quat: np.ndarray) -> tuple[float, float]:
    """[m], [rad] between an estimate and a pose."""
    return float(np.linalg.norm(a.pos - pos)), float(angle_between(a.quat, quat))
