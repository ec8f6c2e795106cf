"""The arithmetic of the control law's tick, compiled: `law.py` says what it computes, keeps its memory and
takes commands.

One record of numbers (`memory.py`) holds a law's options and memory, so that a tick is one call without an
object of Python in it. Compiled once per number of joints and kept on disk; the equations of turning are
those of `robo_rl.geometry`, and tests hold them equal.
"""

import math

from controllers.linear import cholesky, compiled, principal, solve
from robo_rl.compiled import kept

MASS_AGE = 0.02  # s between two looks at W_ii; joints turn 2 degrees in that time
SMALL = 1e-10  # m or rad; nearer than this the reference has arrived
RELEASE = 0.06  # s in which the torques of before a rebase or a switch go
LAG_PACE = 0.1  # s of lag that the low pass gets in a second, after a rebase took it
# N/m, of operational space in any direction: what torques that change at a limited rate can hold
STIFFEST = 20_000.0
ARM = 0.2  # m: a turn counts as motion at this distance, where directions of both are compared
TINY = 1e-8  # rad; below it sin(x)/x is 1 to the last bit
OPENING = 5.0  # 1/s: how fast a bound of the springs' pull grows when it is no longer asked for
UNBOUND = 1e5  # N, N m: from here on it is none
# times that the projection corrects what its regularisation leaves: eps/(A + eps) of the posture to that
# power + 1
REFINED = 2
FREE, KINEMATIC, DYNAMIC = range(3)  # the posture's projection


@kept()
def tick(memory, dt, state, jac, minv_jt, bias, pos, quat):
    """Advance `memory` by dt [s]; memory.tau are the torques then, or as they were, with one more of
    `faults`.

    state [2n] (q, dq), jac [6, n], minv_jt [6, n], bias [n], pos [3] and quat [4] as in `ArmModel`.
    """
    m, n = memory[0], len(bias)
    age(m, n, dt)
    if not m.settled:
        follow(m, dt)
    for i in range(6):
        for j in range(i + 1):
            x = 0.0
            for k in range(n):
                x += jac[i, k] * minv_jt[j, k]
            m.a[i, j] = m.a[j, i] = x
    weigh(m, dt, quat)
    spring(m, n, state, jac, pos, quat)

    # t = J^T (F + W (a_d - J M^-1 t_0)) + t_0: acceleration and projection share one solve
    for i in range(n):
        x = m.gain * m.kn[i] * (m.q_ref[i] - state[i]) + m.dn[i] * (m.dq_ref[i] - state[n + i])
        m.posture[i] = min(max(x, -m.posture_cap), m.posture_cap) if x == x else x
    if m.rigid:
        for i in range(6):
            for j in range(6):
                m.factor[i, j] = m.a[i, j]
            m.factor[i, i] += m.regularisation
            most = m.feed_linear if i < 3 else m.feed_angular
            x, felt_by_tool = min(max(m.acceleration[i], -most), most), 0.0
            if m.nullspace == DYNAMIC:
                for k in range(n):
                    felt_by_tool -= minv_jt[i, k] * m.posture[k]
            m.along[i] = felt_by_tool
            m.move[i] = x + felt_by_tool + m.wrench[i] if m.operational else x + felt_by_tool
        if m.operational:
            weighed(m)
        else:
            cholesky(m.factor, 1e-12)
            if m.nullspace == DYNAMIC:
                for _ in range(REFINED):
                    solve(m.factor, m.along)
                    for i in range(6):
                        m.along[i] *= m.regularisation
                        m.move[i] += m.along[i]
            solve(m.factor, m.move)
        for i in range(6):
            m.wrench[i] = m.move[i] if m.operational else m.wrench[i] + m.move[i]
    if m.nullspace == KINEMATIC:
        felt(m, n, jac)

    total, step, fade = 0.0, m.torque_rate * dt, m.fade * m.fade * (3 - 2 * m.fade)
    for i in range(n):
        q, pull, t = state[i], 0.0, m.posture[i] + bias[i]
        for j in range(6):
            pull += jac[j, i] * m.wrench[j]
        if m.friction:
            t += friction(state[n + i], m.phi1[i], m.phi2[i], m.phi3[i])
        if q < m.low[i] or q > m.high[i]:
            margin, lower, upper = m.limit_margin, m.low[i] - m.limit_margin, m.high[i] + m.limit_margin
            t += limit_torque(q, lower, upper, margin, m.limit_torque)
            pull += yielding(pull, state[n + i], q, lower, upper, margin, m.limit_torque)
        t += pull
        if m.carry:
            m.residual[i] = m.tau[i] - t
        t += fade * m.residual[i]
        t = min(max(t, m.tau[i] - step), m.tau[i] + step) if t == t else t
        m.out[i] = min(max(t, -m.most[i]), m.most[i]) if t == t else t
        total += m.out[i]
    if math.isfinite(total):
        put(m.tau, m.out)
        m.carry = 0
    else:
        m.faults += 1


@compiled
def friction(dq, phi1, phi2, phi3):
    """phi1/(1 + exp(-phi2 (dq + phi3))) - phi1/(1 + exp(-phi2 phi3)) of one joint [N m]: smooth, and 0 at
    rest.

    Source: Gaz et al. 2019, "Dynamic identification of the Franka Emika Panda", eq. 22.
    """
    return phi1 / (1 + math.exp(min(-phi2 * (dq + phi3), 500.0))) - phi1 / (1 + math.exp(-phi2 * phi3))


@compiled
def limit_torque(q, lower, upper, margin, most):
    """Repulsion of one joint from its limits [N m]: `most` at the limit and beyond, 0 from `margin` [rad]
    inside."""
    return most * (
        min(max((lower + margin - q) / margin, 0.0), 1.0) - min(max((q - upper + margin) / margin, 0.0), 1.0)
    )


@compiled
def yielding(pull, dq, q, lower, upper, margin, most):
    """What a joint at its limits adds to the torque of the tool's pull [N m]: from `margin` [rad] inside to
    the limit, all of a pull outwards goes, and motion outwards is braked, critically for `most` over the
    margin and unit inertia."""
    depth = min(max((lower + margin - q) / margin, (q - upper + margin) / margin), 1.0)
    out = -1.0 if q - lower < upper - q else 1.0
    return -out * depth * (max(out * pull, 0.0) + 2 * math.sqrt(most / margin) * max(out * dq, 0.0))


@compiled
def age(m, n, dt):
    """What expires, expires; what ramps, ramps."""
    m.feed_age += dt
    m.dq_age += dt
    m.k_age += dt
    if m.dq_age > m.command_timeout:
        fill(m.dq_ref, 0.0)
    if m.command_timeout < m.k_age < math.inf:
        m.k_age = math.inf
        for i in range(6):
            m.k_target[i], m.k_pace[i] = m.stiffness[i], max(m.stiffness[i], m.k[i])
    if m.opens:
        m.pull[0] *= 1 + OPENING * dt
        m.pull[1] *= 1 + OPENING * dt
        if min(m.pull[0], m.pull[1]) > UNBOUND:
            m.opens = 0
            fill(m.pull, math.inf)
    m.lag = nearer(m.lag, m.filter_time, LAG_PACE * dt)
    m.fade = 1.0 if m.carry else max(m.fade - dt / RELEASE, 0.0)
    part = dt / m.ramp if m.ramp > 0 else math.inf
    m.gain = min(m.gain + part, 1.0)
    moved, m.stale = m.stale, 0
    for i in range(6):
        if m.k[i] != m.k_target[i]:
            moved = 1
            m.k[i] = nearer(m.k[i], m.k_target[i], m.k_pace[i] * part)
        if m.error_clip[i] != m.clip_target[i]:
            if math.isfinite(m.error_clip[i]) and math.isfinite(m.clip_target[i]):
                m.error_clip[i] = nearer(
                    m.error_clip[i], m.clip_target[i], part * (0.5 if i < 3 else math.pi)
                )
            else:
                m.error_clip[i] = m.clip_target[i]
    if m.damping_ratio != m.ratio_target:
        moved = 1
        m.damping_ratio = nearer(m.damping_ratio, m.ratio_target, 2 * part)
    if moved:
        damp(m)
    for i in range(n):
        m.q_ref[i] = nearer(m.q_ref[i], m.q_target[i], m.posture_speed * dt)


@compiled
def nearer(x, target, most):
    """`target`, or the number on the way to it at distance `most` from x."""
    return target if abs(target - x) <= most else x + most if target > x else x - most


@compiled
def damp(m):
    """D's diagonal for the stiffness of this moment."""
    for i in range(6):
        if m.damping_given:
            m.d[i] = m.fixed_damping[i]
        else:
            m.d[i] = 2 * m.damping_ratio * math.sqrt(m.k[i] if m.operational else m.k[i] * m.masses[i])


@compiled
def weigh(m, dt, quat):
    """Every MASS_AGE look at W_ii [kg], [kg m^2] in the axes of the stiffness, at most 4/A_ii, and set the
    damping."""
    m.mass_age += dt
    springs = 0.0
    for i in range(6):
        springs += m.k[i]
    if m.mass_age < MASS_AGE or m.damping_given or m.operational or springs == 0:
        return
    for i in range(6):
        for j in range(6):
            m.factor[i, j] = m.a[i, j]
    if m.tool_axes:
        for i in range(6):
            rotate(m.factor[i], quat, -1)
        for j in range(6):
            rotate(m.factor[:, j], quat, -1)
    total = 0.0
    for i in range(6):
        total += m.factor[i, i]
    if not math.isfinite(total):
        return
    for i in range(6):
        m.masses[i] = 4 / max(m.factor[i, i], 1e-6)
        m.factor[i, i] += m.regularisation
    cholesky(m.factor, 1e-12)
    for i in range(6):
        fill(m.move, 0.0)
        m.move[i] = 1.0
        solve(m.factor, m.move)
        m.masses[i] = min(m.move[i], m.masses[i])
    m.mass_age = 0.0
    damp(m)


@compiled
def weighed(m):
    """m.move <- W m.move, with no direction heavier than the mass limit: m.factor = J M^-1 J^T + eps I in its
    principal axes, where a turn counts as motion at ARM, and `least`, or what keeps the stiffness below
    STIFFEST, instead of what is below it there."""
    total, y, least = 0.0, m.along, m.least
    for i in range(6):
        least = max(least, m.k[i] / STIFFEST)
        for j in range(6):
            m.factor[i, j] *= (1.0 if i < 3 else ARM) * (1.0 if j < 3 else ARM)
            total += m.factor[i, j]
    if math.isfinite(total):  # else the axes would be lost for good
        principal(m.factor, m.axes, m.spread)
    for k in range(6):
        y[k] = 0.0
        for i in range(6):
            y[k] += m.axes[i, k] * m.move[i] * (1.0 if i < 3 else ARM)
        y[k] /= max(m.factor[k, k], least)
    for i in range(6):
        x = 0.0
        for k in range(6):
            x += m.axes[i, k] * y[k]
        m.move[i] = x * (1.0 if i < 3 else ARM)


@compiled
def follow(m, dt):
    """The reference goes on towards the target: at a limited speed, through the low pass, on the geodesic."""
    go, rate = 1 - (math.exp(-dt / m.lag) if m.lag > 0 else 0.0), 1 / dt
    x, y, z = (
        m.target_pos[0] - m.limited_pos[0],
        m.target_pos[1] - m.limited_pos[1],
        m.target_pos[2] - m.limited_pos[2],
    )
    far, most = math.sqrt(x * x + y * y + z * z), m.target_speed * dt
    there = far <= most
    if there:
        put(m.limited_pos, m.target_pos)
    else:
        s = most / far
        m.limited_pos[0] += s * x
        m.limited_pos[1] += s * y
        m.limited_pos[2] += s * z
    if m.left != 0:  # all the way about one axis
        most = m.target_turn * dt
        if m.left < 0:
            x, y, z = between(m.target_quat, m.limited_quat)
            m.left = math.sqrt(x * x + y * y + z * z)
            if m.left > most:
                m.axis[0], m.axis[1], m.axis[2] = x / m.left, y / m.left, z / m.left
        if m.left <= most:
            m.left = 0.0
            put(m.limited_quat, m.target_quat)
        else:
            m.left -= most
            turn(m.limited_quat, most * m.axis[0], most * m.axis[1], most * m.axis[2])

    for i in range(3):
        step = go * (m.limited_pos[i] - m.pos[i])
        m.pos[i] += step
        m.acceleration[i] = rate * (rate * step - m.velocity[i])
        m.velocity[i] = rate * step
    a, b, c = between(m.limited_quat, m.quat)
    a, b, c = go * a, go * b, go * c
    near = SMALL * go
    if a * a + b * b + c * c < near * near and m.left == 0:
        put(m.quat, m.target_quat)
        there = there and a == 0 and b == 0 and c == 0
    else:
        turn(m.quat, a, b, c)
        there = False
    for i, step in ((3, a), (4, b), (5, c)):
        m.acceleration[i] = rate * (rate * step - m.velocity[i])
        m.velocity[i] = rate * step
    x, y, z = m.velocity[0], m.velocity[1], m.velocity[2]
    if there and x * x + y * y + z * z < (SMALL * rate) * (SMALL * rate):
        put(m.pos, m.target_pos)
        fill(m.velocity, 0.0)
        fill(m.acceleration, 0.0)
        m.settled = 1


@compiled
def spring(m, n, state, jac, pos, quat):
    """m.wrench = F [6] in base axes."""
    error, slip = m.move, m.wrench  # both are free until F is known
    for i in range(3):
        error[i] = m.pos[i] - pos[i]
    error[3], error[4], error[5] = between(m.quat, quat)
    for i in range(6):
        v = m.velocity[i]
        for k in range(n):
            v -= jac[i, k] * state[n + k]
        slip[i] = v
    if m.tool_axes:
        rotate(error, quat, -1)
        rotate(slip, quat, -1)
    for first in (0, 3):
        s = held(m, error, first)
        for i in range(first, first + 3):
            m.wrench[i] = (
                s * m.k[i] * min(max(error[i], -m.error_clip[i]), m.error_clip[i]) + m.d[i] * slip[i]
            )
    for i in range(6):
        if error[i] != error[i]:
            m.wrench[i] = error[i]
    if m.tool_axes:
        rotate(m.wrench, quat, 1)
    if m.feed_age <= m.command_timeout:
        put(m.move, m.feed)
        if m.feed_tool_axes:
            rotate(m.move, quat, 1)
        for i in range(6):
            m.wrench[i] += m.move[i]


@compiled
def held(m, error, first):
    """Share of the springs' pull along (first 0) or about (3) the axes that is within the largest; 1 where
    nothing bounds it."""
    size, most = 0.0, m.pull[first // 3]
    for i in range(first, first + 3):
        x = m.k[i] * min(max(error[i], -m.error_clip[i]), m.error_clip[i])
        size += x * x
    return most / math.sqrt(size) if size > most * most else 1.0


@compiled
def felt(m, n, jac):
    """m.wrench -= (J J^T + 1e-6 I)^-1 J t_0: what of the posture's torque the tool would feel, by kinematics
    alone."""
    for i in range(6):
        x = 0.0
        for k in range(n):
            x += jac[i, k] * m.posture[k]
        m.move[i] = x
        for j in range(6):
            x = 1e-6 if i == j else 0.0
            for k in range(n):
                x += jac[i, k] * jac[j, k]
            m.factor[i, j] = x
    cholesky(m.factor, 1e-12)
    solve(m.factor, m.move)
    for i in range(6):
        m.wrench[i] -= m.move[i]


@compiled
def put(x, y):
    """x[:] = y (whose message for other shapes takes seconds to compile)."""
    for i in range(len(x)):
        x[i] = y[i]


@compiled
def fill(x, value):
    """x[:] = value."""
    for i in range(len(x)):
        x[i] = value


# ---- rotations: quaternions are (w, x, y, z) ---------------------------------------------------------------


@compiled
def between(a, b):
    """log(a b^-1): the rotation vector, in the base frame, that turns b into a."""
    w = a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
    x = a[1] * b[0] - a[0] * b[1] - a[2] * b[3] + a[3] * b[2]
    y = a[2] * b[0] - a[0] * b[2] + a[1] * b[3] - a[3] * b[1]
    z = a[3] * b[0] - a[0] * b[3] - a[1] * b[2] + a[2] * b[1]
    n = math.sqrt(x * x + y * y + z * z)
    if n < TINY:
        s = 2.0 if w >= 0 else -2.0
    else:
        s = 2 * math.atan2(n, w) / n if w >= 0 else -2 * math.atan2(n, -w) / n
    return s * x, s * y, s * z


@compiled
def turn(q, x, y, z):
    """q <- unit(exp(x, y, z) q): turned by a rotation vector in the base frame."""
    n = math.sqrt(x * x + y * y + z * z)
    w, s = (1.0, 0.5) if n < TINY else (math.cos(n / 2), math.sin(n / 2) / n)
    x, y, z = s * x, s * y, s * z
    a, b, c, d = (
        w * q[0] - x * q[1] - y * q[2] - z * q[3],
        w * q[1] + x * q[0] + y * q[3] - z * q[2],
        w * q[2] - x * q[3] + y * q[0] + z * q[1],
        w * q[3] + x * q[2] - y * q[1] + z * q[0],
    )
    s = 1 / math.sqrt(a * a + b * b + c * c + d * d)
    q[0], q[1], q[2], q[3] = a * s, b * s, c * s, d * s


@compiled
def rotate(v, q, way):
    """Turn both vectors in v [6], in their place: from the tool's axes to the base's (way 1), or back
    (-1)."""
    w, a, b, c = q[0], way * q[1], way * q[2], way * q[3]
    for i in (0, 3):
        x, y, z = v[i], v[i + 1], v[i + 2]
        s, t, u = 2 * (b * z - c * y), 2 * (c * x - a * z), 2 * (a * y - b * x)
        v[i], v[i + 1], v[i + 2] = (
            x + w * s + b * u - c * t,
            y + w * t + c * s - a * u,
            z + w * u + a * t - b * s,
        )
