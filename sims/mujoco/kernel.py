"""The arithmetic of an arm env's control step, compiled once per machine (some 10 s) and kept on disk:
commands from actions, observation rows from the physics state.

Operation for operation that of `sims.mujoco.kinematics`, in float32 and in the same order, so that results
are the same to the last bit (`tests/test_sims_kernel.py`): a hundred and fifty NumPy calls per step are two
calls. A complex product there is re = fma(a.re, b.re, -(a.im b.im)), im = fma(a.re, b.im, a.im b.re), as
NumPy computes it on processors that fuse; sines and cosines stay NumPy's. Arrays have the batch last, as
there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from robo_rl import compiled
from sims.mujoco import model as m
from sims.mujoco.kinematics import HAND

F = np.float32
LINK = np.array([a for a, _, _ in m.DH], F)
QUARTER = np.array([q for _, q, _ in m.DH], np.int64)
OFFSET = np.array([d for _, _, d in m.DH], F)
TOOL, HAND_RE, HAND_IM = F(m.TOOL), HAND.real, HAND.imag
LEAD, JOINT_LEAD = F(0.06), F(0.25)  # how far targets run ahead of the hand [m] and of the joints [rad]
# targets stay in this box [m]
REACH_LOW, REACH_HIGH = np.array([0.2, -0.5, 0.009], F), np.array([0.8, 0.5, 0.7], F)
LOW, HIGH = np.array(m.JOINT_LOW, F), np.array(m.JOINT_HIGH, F)
SPEED = np.array(m.JOINT_SPEED, F) * F(m.DT * m.SUBSTEPS)
MOVE, TURN, JOINT = F(m.MOVE), F(m.TURN), F(m.JOINT)
DAMPING = F(0.03 * 0.03)
WIDE, FINGERS = F(0.5 / m.FINGER_OPEN), F(m.FINGER_OPEN / 2)
ZERO, HALF, ONE, TWO = F(0), F(0.5), F(1), F(2)
C6, C24, C120, C720 = F(1 / 6), F(1 / 24), F(1 / 120), F(1 / 720)


ANNOUNCEMENT = compiled.Announcement("the arm's control step")
A1, A2, A3, ROWS = "float32[::1]", "float32[:,::1]", "float32[:,:,::1]", "float64[:,:]"


def kept(*arguments: str) -> Callable[[Callable], Callable]:
    """Compiled for these types alone."""
    return compiled.kept(f"void({', '.join(arguments)})")


@intrinsic
def fma(typing, a, b, c):
    """a b + c in float32, rounded once."""

    def emit(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), emit


@njit(error_model="numpy")
def product(x, y, c, s) -> "tuple[Any, Any]":
    """(x + i y)(c + i s) -> (real, imaginary)."""
    return fma(x, c, -(y * s)), fma(x, s, y * c)  # pyright: ignore[reportCallIssue]  # numba passes `typing`


@njit(error_model="numpy")
def limited(x, low, high):
    return min(max(x, low), high)


@njit(error_model="numpy")
def cross(a, b, out):
    """out [3] = a x b."""
    out[0] = a[1] * b[2] - a[2] * b[1]
    out[1] = a[2] * b[0] - a[0] * b[2]
    out[2] = a[0] * b[1] - a[1] * b[0]


@njit(error_model="numpy")
def forward(e, spin, axes, anchors, frame, tcp):
    """`Arm.forward` of env e; spin [7, N] complex64 holds exp(i q)."""
    x, y, p, z = np.empty(3, F), np.empty(3, F), np.empty(3, F), np.empty(3, F)
    c, s = spin[0, e].real, -spin[0, e].imag
    x[0], y[0] = c, s
    x[1], y[1] = product(c, s, ZERO, ONE)
    x[2] = y[2] = ZERO
    p[0] = p[1] = ZERO
    p[2] = OFFSET[0]
    for i in range(1, 7):
        c, s = spin[i, e].real, -spin[i, e].imag
        for k in range(3):
            if LINK[i] != ZERO:
                p[k] += x[k] * LINK[i]
            last = axes[k, i - 1, e]
            if QUARTER[i] > 0:
                z[k], y[k] = -y[k], last
            else:
                z[k], y[k] = y[k], -last
            axes[k, i, e] = z[k]
            x[k], y[k] = product(x[k], y[k], c, s)
            if OFFSET[i] != ZERO:
                p[k] += z[k] * OFFSET[i]
            if i > 1:
                anchors[k, i, e] = p[k]
    for i in range(7):
        axes[3, i, e], axes[4, i, e] = axes[0, i, e], axes[1, i, e]
    for k in range(3):
        x[k], y[k] = product(x[k], y[k], HAND_RE, HAND_IM)
        frame[0, k, e], frame[1, k, e], frame[2, k, e] = x[k], y[k], z[k]
        tcp[k, e] = p[k] + z[k] * TOOL
    for i in range(3):
        frame[i, 3, e], frame[i, 4, e] = frame[i, 0, e], frame[i, 1, e]


@kept(
    ROWS,
    "float64[:,:,:]",
    A2,
    A2,
    A2,
    A1,
    "complex64[:,::1]",
    A3,
    A3,
    A3,
    A2,
    A2,
    A2,
    A1,
    "int64[::1]",
    "boolean",
    "boolean",
)
def observe(
    qvel,
    mocap,
    q,
    v,
    goal,
    opening,
    spin,
    axes,
    anchors,
    frame,
    tcp,
    rows,
    joints,
    grip,
    adr,
    uses_goal,
    uses_slide,
):
    """Refill scene and observation rows [S, N] from the physics state; q [nq, N] and spin are of this state
    already.

    qvel [N, nv], mocap [N, M, 3] float64; adr: where in q each object begins.
    """
    for e in range(q.shape[1]):
        for i in range(v.shape[0]):
            v[i, e] = F(qvel[e, i])
        if mocap.shape[1]:
            for k in range(3):
                goal[k, e] = F(mocap[e, 0, k])
        opening[e] = (q[7, e] + q[8, e]) * WIDE
        forward(e, spin, axes, anchors, frame, tcp)
        for i in range(7):
            rows[i, e], rows[7 + i, e] = q[i, e], v[i, e]
            rows[14 + i, e] = joints[i, e] - q[i, e]
        rows[21, e], rows[22, e] = opening[e], grip[e]
        for k in range(3):
            rows[23 + k, e] = tcp[k, e]
        hx, hy = frame[0, 0, e], frame[0, 1, e]
        rows[26, e], rows[27, e] = hx, hy
        rows[28, e], rows[29, e] = frame[2, 0, e], frame[2, 1, e]
        i = 30
        for a in adr:
            for k in range(3):
                rows[i + k, e] = q[a + k, e] - tcp[k, e]
            rows[i + 3, e] = q[a + 2, e]
            w, x, y, z = q[a + 3, e], q[a + 4, e], q[a + 5, e], q[a + 6, e]
            cx, cy = ONE - TWO * (y * y + z * z), TWO * (x * y + w * z)
            c, s = hx * cx + hy * cy, hx * cy - hy * cx
            c, s = c * c - s * s, TWO * c * s
            # of four times the yaw: a square has four fronts
            rows[i + 4, e], rows[i + 5, e] = c * c - s * s, TWO * c * s
            i += 6
        if uses_goal:
            for k in range(3):
                rows[i + k, e] = goal[k, e] - (q[adr[0] + k, e] if len(adr) else tcp[k, e])
            i += 3
        if uses_slide:
            slide = q[q.shape[0] - 1, e]
            rows[i - 3, e] -= slide  # the handle moves with the drawer
            rows[i, e] = slide


@njit(error_model="numpy")
def turned(w, frame, out):
    """`kinematics.turn` of one frame [3, 3] by w [3]."""
    s = w[0] * w[0] + w[1] * w[1] + w[2] * w[2]
    first = ONE - s * (C6 - s * C120)
    second = HALF - s * (C24 - s * C720)
    one, two = np.empty(3, F), np.empty(3, F)
    for i in range(3):
        cross(w, frame[i], one)
        cross(w, one, two)
        for k in range(3):
            out[i, k] = one[k] * first + frame[i, k] + two[k] * second


@njit(error_model="numpy")
def solve(jac, twist, mat, dq):
    """`kinematics.damped_step` of one arm: dq [7] = J^T (J J^T + damping^2 I)^-1 twist; twist [6] is written
    over."""
    for i in range(6):
        for j in range(6):
            acc = ZERO
            for k in range(7):
                acc += jac[i, k] * jac[j, k]
            mat[i, j] = acc
        mat[i, i] += DAMPING
    for k in range(5):
        mat[k, k] = ONE / mat[k, k]
        for i in range(k + 1, 6):
            factor = mat[k, i] * mat[k, k]
            for j in range(k + 1, 6):
                mat[i, j] -= factor * mat[k, j]
            twist[i] -= factor * twist[k]
    twist[5] /= mat[5, 5]
    for k in range(4, -1, -1):
        for i in range(k + 1):
            twist[i] -= mat[i, k + 1] * twist[k + 1]
        twist[k] *= mat[k, k]
    for k in range(7):
        acc = ZERO
        for i in range(6):
            acc += jac[i, k] * twist[i]
        dq[k] = acc


@kept(A2, "boolean[::1]", "boolean", A2, A2, A3, A3, A3, A2, A2, A1, A2, A3, ROWS, A2, A1, A2, A3)
def command(
    a,
    over,
    by_hand,
    q,
    tcp,
    frame,
    axes,
    anchors,
    rows,
    joints,
    grip,
    target,
    attitude,
    ctrl,
    new_joints,
    new_grip,
    new_target,
    new_attitude,
):
    """Move the targets by actions a [N, A] and write the actuators ctrl [N, nu]; envs that are `over` keep
    theirs.

    by_hand: ee_delta, else joint_delta, which leaves target and attitude alone.
    """
    jac, mat = np.empty((6, 7), F), np.empty((6, 6), F)
    r, z, w, twist, dq = np.empty(3, F), np.empty(3, F), np.empty(3, F), np.empty(6, F), np.empty(7, F)
    held, goal, part = np.empty((3, 3), F), np.empty((3, 3), F), np.empty((3, 3), F)
    for e in range(a.shape[0]):
        if by_hand:
            for i in range(7):
                for k in range(3):
                    r[k], z[k] = tcp[k, e] - anchors[k, i, e], axes[k, i, e]
                cross(z, r, w)
                for k in range(3):
                    jac[k, i], jac[3 + k, i] = w[k], z[k]
            for k in range(3):
                x = MOVE * a[e, k] + target[k, e]
                x = limited(limited(x, tcp[k, e] - LEAD, tcp[k, e] + LEAD), REACH_LOW[k], REACH_HIGH[k])
                new_target[k, e] = x
                twist[k] = x - tcp[k, e]
                w[k] = a[e, 3 + k] * TURN
                for i in range(3):
                    held[i, k] = attitude[i, k, e]
            turned(w, held, goal)
            for i in range(3):
                for k in range(3):
                    new_attitude[i, k, e] = goal[i, k]
                    held[i, k] = frame[i, k, e]
                cross(held[i], goal[i], part[i])
            for k in range(3):
                twist[3 + k] = (part[0, k] + part[1, k] + part[2, k]) * HALF
            for i in range(6):
                acc = ZERO
                for k in range(7):
                    acc += jac[i, k] * rows[14 + k, e]
                twist[i] -= acc  # what the joint targets are ahead already
            solve(jac, twist, mat, dq)
            for i in range(7):
                dq[i] = limited(dq[i], -SPEED[i], SPEED[i])
        else:
            for i in range(7):
                dq[i] = JOINT * a[e, i]
        for i in range(7):
            x = limited(dq[i] + joints[i, e], q[i, e] - JOINT_LEAD, q[i, e] + JOINT_LEAD)
            new_joints[i, e] = joints[i, e] if over[e] else limited(x, LOW[i], HIGH[i])
            ctrl[e, i] = new_joints[i, e]
        new_grip[e] = grip[e] if over[e] else a[e, a.shape[1] - 1]
        for i in range(7, ctrl.shape[1]):
            ctrl[e, i] = new_grip[e] * FINGERS + FINGERS
        if by_hand:
            for i in range(3):
                if over[e]:
                    new_target[i, e] = target[i, e]
                    for k in range(3):
                        new_attitude[i, k, e] = attitude[i, k, e]
                new_attitude[i, 3, e], new_attitude[i, 4, e] = new_attitude[i, 0, e], new_attitude[i, 1, e]


@kept(*["boolean[::1]"] * 3, "int64[::1]", "int64", *["boolean[::1]"] * 3, A1)
def settle(won, lost, over, steps, limit, success, terminated, truncated, reward):
    """Count the step of every env [N] that is not `over` and say how it stands: won, lost or out of time
    after `limit` steps.

    Updates steps, success, terminated and truncated; reward: 1 where the step won.
    """
    for e in range(len(won)):
        reward[e] = ZERO
        if over[e]:
            continue
        steps[e] += 1
        if won[e]:
            reward[e], success[e], terminated[e] = ONE, True, True
        if lost[e]:
            terminated[e] = True
        if not terminated[e] and steps[e] >= limit:
            truncated[e] = True


ANNOUNCEMENT.close()
