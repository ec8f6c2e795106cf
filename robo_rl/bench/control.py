"""`robo_rl bench control`: a tick of the control law, of the governed arm, and the arm's loop in real time.

The limits are bare calls: the two products with the Jacobian that no law of the tool can leave out, MuJoCo's
kinematics and dynamics, its step. The peers are what one would write instead: a plain impedance law, compiled
by numba and in NumPy, `mj_forward` for the model, and a loop that sleeps until the next period. Ticks are CPU
times of this thread; the loop is measured on the wall clock, so on a busy machine its periods are those of
the other programs.
"""

import time
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

import mujoco
import numpy as np
from numba import njit

from controllers.arm import SimArm, govern
from controllers.contracts import Command
from controllers.governor import Governor
from controllers.law import Law, LawOptions, joint_impedance, operational_space
from controllers.limits import Limits
from controllers.loop import Timing, real_time, undisturbed
from controllers.model import ArmModel, arm_model
from controllers.robot import load_robot
from robo_rl.bench.rows import (
    BARE,
    CPU,
    LEAST,
    PHYSICAL,
    Report,
    at_most,
    columns,
    in_turns,
    make_row,
    versioned,
)

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions

TICKS = 200  # of one call; the target moves within them
PRODUCTS, STEP = "J dq and J^T F", "mj_step"
STIFFNESS, DAMPING = (600.0,) * 3 + (30.0,) * 3, (50.0,) * 3 + (10.0,) * 3
PLAIN = LawOptions(
    stiffness=STIFFNESS,
    damping=DAMPING,
    error_clip=None,
    filter_time=0.0,
    feed_acceleration=(0.0, 0.0),
    nullspace="none",
    posture_stiffness=0.0,
    limit_torque=0.0,
    torque_rate=None,
    torque_fraction=1.0,
    ramp=0.0,
)
LAWS = {
    "plain impedance, the peers' law": PLAIN,
    "Cartesian impedance": LawOptions(),
    "operational space": operational_space(),
    "joint impedance": joint_impedance(damping=25.0),
}


def measure(args: "BenchOptions", report: Report) -> None:
    """All rows of `robo_rl bench control`."""
    robot = load_robot("sim")
    model = arm_model(robot)
    model.update(np.array(robot.home), np.full(7, 0.01))
    plain = plain_laws(model)
    for name, options in LAWS.items():
        law(args, report, name, Law(options, robot), model, plain)
    kinematics(args, report, model)
    governed_arm(args, report, plain)
    loop(args, report)


def law(
    args: "BenchOptions", report: Report, name: str, ours: Law, model: ArmModel, plain: dict[str, Callable]
) -> None:
    """One tick of a law for a model that is there, beside the products it needs and the plain law."""
    goal = np.array(model.pos) + [0.0, 0.02, 0.01], np.array(model.quat)
    out = np.zeros(model.n)
    same = ours.options == PLAIN
    if same:  # at a target that stands still the law is the plain one
        ours.activate(model)
        ours.set_target(*goal)
        for _ in range(3000):
            torque = ours.tick(model, 1e-3)
        for label, call in plain.items():
            call(model, *goal, out)
            assert np.allclose(torque, out, atol=1e-6), f"{label} gives other torques: {out} for {torque}"
    work = {"ours": (ticks(ours, model), TICKS)}
    work |= {k: (call, TICKS) for k, call in products(model).items()}
    limits = dict.fromkeys(list(work)[1:], BARE)
    peers = plain if args.peers else {}
    work |= {
        k: (lambda call=call: [call(model, *goal, out) for _ in range(TICKS)], TICKS)
        for k, call in peers.items()
    }
    said = (
        "all sides gave the same torques at rest; ours also moves its reference and looks after limits"
        if same
        else "the peers' law is the plain one: no reference that moves, no nullspace, no limits"
    )
    report.add(
        make_row(
            f"law, one tick: {name}, 7 joints",
            "us",
            in_turns(work, args.slice / 4, time.thread_time),
            limits,
            [*peers],
            bars=lambda ours, *_: [at_most("us", ours, 15)],
            clock=CPU,
            work=said,
            no_peer="" if args.peers else "--no-peers",
        )
    )


def products(model: ArmModel) -> dict[str, Callable[[], None]]:
    """TICKS times the tool's twist and the torques of a force at the tool: through MuJoCo's C calls, and
    compiled."""
    force, twist, torque, jac, dq = np.ones(6), np.zeros(6), np.zeros(model.n), model.jac, model.dq.copy()

    @njit(error_model="numpy")
    def compiled(jac, dq, force, twist, torque):
        for i in range(6):
            twist[i] = 0.0
            for j in range(len(dq)):
                twist[i] += jac[i, j] * dq[j]
        for j in range(len(dq)):
            torque[j] = 0.0
            for i in range(6):
                torque[j] += jac[i, j] * force[i]

    def by_mujoco() -> None:
        for _ in range(TICKS):
            mujoco.mju_mulMatVec(twist, jac, dq)
            mujoco.mju_mulMatTVec(torque, jac, force)

    def by_numba() -> None:
        for _ in range(TICKS):
            compiled(jac, dq, force, twist, torque)

    return {f"{PRODUCTS}, MuJoCo's C calls": by_mujoco, f"{PRODUCTS}, compiled": by_numba}


def plain_laws(model: ArmModel) -> dict[str, Callable]:
    """t = J^T (K e - D J dq) + bias: (model, goal position [3], goal quaternion [4], torques [n] to fill)."""
    k, d = np.array(STIFFNESS), np.array(DAMPING)
    kk, dd, e, turn, back = np.diag(k), np.diag(d), np.zeros(6), np.zeros(4), np.zeros(4)

    @njit(error_model="numpy")
    def compiled(jac, dq, bias, pos, q, goal, g, out):
        f = np.empty(6)
        w = g[0] * q[0] + g[1] * q[1] + g[2] * q[2] + g[3] * q[3]  # g * conj(q)
        x = -g[0] * q[1] + g[1] * q[0] - g[2] * q[3] + g[3] * q[2]
        y = -g[0] * q[2] + g[1] * q[3] + g[2] * q[0] - g[3] * q[1]
        z = -g[0] * q[3] - g[1] * q[2] + g[2] * q[1] + g[3] * q[0]
        s = np.sqrt(x * x + y * y + z * z)
        if w < 0:
            w, s = -w, -s
        scale = 2.0 if abs(s) < 1e-9 else 2 * np.arctan2(abs(s), w) / s
        f[0], f[1], f[2] = goal[0] - pos[0], goal[1] - pos[1], goal[2] - pos[2]
        f[3], f[4], f[5] = scale * x, scale * y, scale * z
        for i in range(6):
            v = 0.0
            for j in range(len(dq)):
                v += jac[i, j] * dq[j]
            f[i] = k[i] * f[i] - d[i] * v
        for j in range(len(dq)):
            t = bias[j]
            for i in range(6):
                t += jac[i, j] * f[i]
            out[j] = t

    def by_numba(m: ArmModel, goal: np.ndarray, quat: np.ndarray, out: np.ndarray) -> None:
        compiled(m.jac, m.dq, m.bias, m.xpos, m.xquat, goal, quat, out)

    def by_numpy(m: ArmModel, goal: np.ndarray, quat: np.ndarray, out: np.ndarray) -> None:
        e[:3] = goal - m.xpos
        mujoco.mju_negQuat(back, m.xquat)
        mujoco.mju_mulQuat(turn, quat, back)
        mujoco.mju_quat2Vel(e[3:], turn, 1.0)
        out[:] = m.jac.T @ (kk @ e - dd @ (m.jac @ m.dq)) + m.bias

    return {
        f"a plain impedance law, {versioned('numba')}": by_numba,
        f"a plain impedance law, {versioned('numpy')}": by_numpy,
    }


def kinematics(args: "BenchOptions", report: Report, model: ArmModel) -> None:
    """What the law needs of the arm: pose, Jacobian, M^-1 J^T, bias."""
    m, d, q, dq = model.mj, mujoco.MjData(model.mj), model.q.copy(), model.dq.copy()
    jac, minv, bias = np.zeros((6, m.nv)), np.zeros((6, m.nv)), np.zeros(m.nv)
    linear, angular = jac[:3], jac[3:]
    d.qpos[:], d.qvel[:] = q, dq

    def bare() -> None:
        for _ in range(TICKS):
            mujoco.mj_kinematics(m, d)
            mujoco.mj_comPos(m, d)
            mujoco.mj_makeM(m, d)
            mujoco.mj_factorM(m, d)
            mujoco.mj_comVel(m, d)
            mujoco.mj_rne(m, d, 0, bias)
            mujoco.mj_jacSite(m, d, linear, angular, model.site)
            mujoco.mj_solveM(m, d, minv, jac)

    def by_forward() -> None:
        for _ in range(TICKS):
            d.qpos[:], d.qvel[:] = q, dq
            mujoco.mj_forward(m, d)
            mujoco.mj_jacSite(m, d, linear, angular, model.site)
            mujoco.mj_solveM(m, d, minv, jac)
            bias[:] = d.qfrc_bias

    model.update(q, dq)
    for call in (bare, by_forward):
        call()
        assert (
            np.allclose(jac, model.jac) and np.allclose(minv, model.minv_jt) and np.allclose(bias, model.bias)
        )
    peer = f"mj_forward, mj_jacSite, mj_solveM, {versioned('mujoco')}"
    work = {
        "ours": (lambda: [model.update(q, dq) for _ in range(TICKS)], TICKS),
        "MuJoCo's calls alone": (bare, TICKS),
    }
    work |= {peer: (by_forward, TICKS)} if args.peers else {}
    report.add(
        make_row(
            "kinematics and dynamics for the law",
            "us",
            in_turns(work, args.slice / 8, time.thread_time),
            {"MuJoCo's calls alone": BARE},
            [peer] if args.peers else [],
            clock=CPU,
            work="Jacobian, M^-1 J^T and bias of one state, equal on every side",
            no_peer="" if args.peers else "--no-peers",
        )
    )


def plain_arm(arm: SimArm, plain: dict[str, Callable]) -> tuple[str, Callable[[], None]]:
    """The simulated arm under the compiled plain law, as a short script has it: model, law, step; no
    governor."""
    (name, call), model = next(iter(plain.items())), arm_model(arm.robot)
    pos, quat = np.array(model.pos), np.array(model.quat)
    dofs = [int(arm.mj.joint(j).dofadr[0]) for j in arm.robot.joints]
    angles = [int(arm.mj.joint(j).qposadr[0]) for j in arm.robot.joints]
    out = np.zeros(model.n)

    def tick() -> None:
        model.update(arm.data.qpos[angles], arm.data.qvel[dofs])
        call(model, pos, quat, out)
        arm.data.qfrc_applied[dofs] = out
        mujoco.mj_step(arm.mj, arm.data)

    return f"model, {name}, mj_step: no governor, no limits", tick


def governed_arm(args: "BenchOptions", report: Report, plain: dict[str, Callable]) -> None:
    """One tick of the governed arm, and a script's."""
    robot = load_robot("sim")
    name, tick = plain_arm(SimArm(robot), plain)
    work = {"ours": (governed(SimArm(robot)), TICKS), STEP: (steps(SimArm(robot)), TICKS)}
    work |= {name: (lambda: [tick() for _ in range(TICKS)], TICKS)} if args.peers else {}
    report.add(
        make_row(
            "one tick of the arm: governor, model, law, physics",
            "us",
            in_turns(work, args.slice / 4, time.thread_time),
            {STEP: BARE},
            [name] if args.peers else [],
            bars=lambda ours, *_: [at_most("us", ours, 120)],
            clock=CPU,
            work="one physics step of the same model on every side; the peer checks nothing",
            no_peer="" if args.peers else "--no-peers",
        )
    )


def ticks(law: Law, model: ArmModel) -> Callable[[], None]:
    """TICKS ticks towards a target that jumps from side to side in place and orientation."""
    law.activate(model)
    pos, quat = np.array(model.pos), np.array(model.quat)
    tilted = quat + [0.1, 0.0, 0.1, 0.0]
    tilted /= np.linalg.norm(tilted)
    turn = count()

    def call() -> None:
        side = next(turn) % 2
        law.set_target(pos + [0.0, 0.1 - 0.2 * side, 0.0], (quat, tilted)[side])
        for _ in range(TICKS):
            law.tick(model, 1e-3)

    return call


def steps(arm: SimArm) -> Callable[[], None]:
    """TICKS physics steps."""

    def call() -> None:
        for _ in range(TICKS):
            mujoco.mj_step(arm.mj, arm.data)

    return call


def commanded(arm: SimArm, governor: Governor) -> Callable[[], None]:
    """One governed tick; every 20th takes a command, a slow circle."""
    pos, quat = arm.pose()
    quat = tuple(quat)
    number = count()

    def call() -> None:
        k = next(number)
        if k % 20 == 0:
            a = k / 1000
            goal = (pos[0], pos[1] + 0.05 * np.sin(a), pos[2] + 0.05 * (1 - np.cos(a)))
            governor.command(Command("bench", arm.t, "base", goal, quat), arm.t)
        govern(arm, governor)

    return call


def ready(arm: SimArm) -> Governor:
    """A governor that is armed on the arm."""
    governor = Governor(Limits(give_up=1e9), arm.robot)
    for _ in range(2):
        govern(arm, governor)
    governor.arm(arm.t)
    return governor


def governed(arm: SimArm) -> Callable[[], None]:
    tick = commanded(arm, ready(arm))

    def call() -> None:
        for _ in range(TICKS):
            tick()

    return call


def sleeping(tick: Callable[[], object], dt: float, seconds: float) -> tuple[float, float]:
    """(p99 of the period, CPU time of a period) [s] of the loop one writes first: work, then sleep for
    what is left."""
    began, busy, end = [], time.thread_time(), time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        began.append(now)
        tick()
        time.sleep(max(0.0, dt - (time.monotonic() - now)))
    return float(np.percentile(np.diff(began), 99)), (time.thread_time() - busy) / len(began)


def loop(args: "BenchOptions", report: Report) -> None:
    """The governed arm at 1 kHz of real time, and a script's loop around the same tick."""
    arm = SimArm(load_robot("sim"))
    tick, step = commanded(arm, ready(arm)), steps(SimArm(load_robot("sim")))
    share, timings, periods, costs = max(args.slice / 2 / LEAST, 0.02), [], [], []
    peer = "work, then time.sleep for the rest of the period"
    with undisturbed() as real:
        for _ in range(LEAST):
            timing: Timing = real_time(tick, arm.dt, share)
            timings.append(timing)
            periods.append({"ours": timing.period_p99, "the period": arm.dt})
            costs.append({"ours": timing.core_share * arm.dt})
            if args.peers:
                periods[-1][peer], costs[-1][peer] = sleeping(tick, arm.dt, share)
            began = time.thread_time()
            step()
            costs[-1][STEP] = (time.thread_time() - began) / TICKS
    said = f"{timings[-1].text()}; real-time priority {'on' if real else 'not permitted'}"
    peers, none = [peer] if args.peers else [], "" if args.peers else "--no-peers"
    work = "the same governed tick; every loop under the same priority"
    report.add(
        make_row(
            "arm at 1 kHz: p99 of the period",
            "ms",
            columns(periods),
            {"the period": PHYSICAL},
            peers,
            bars=lambda ours, *_: [at_most("ms", ours, 1.1 if real else 1.6)],
            note=said,
            work=work,
            no_peer=none,
        )
    )
    report.add(
        make_row(
            "arm at 1 kHz: CPU time of a period",
            "us",
            columns(costs),
            {STEP: BARE},
            peers,
            bars=lambda ours, *_: [at_most("share of a core", ours / (1e6 * arm.dt), 0.30)],
            clock=CPU,
            work=work,
            no_peer=none,
        )
    )
