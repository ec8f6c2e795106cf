"""`robo_rl bench control`: a tick of the control law, of the governed arm, and the arm's loop in real time.

The limits are a bare impedance law (no filter, nullspace, limit or ramp, in plain NumPy) and MuJoCo's step, which no
simulated arm can do without. Ticks are CPU times of this thread; the loop is measured on the wall clock, so on a busy
machine its periods are those of the other programs.
"""

import time
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

import mujoco
import numpy as np

from controllers.arm import SimArm, govern
from controllers.governor import Command, Governor, Limits
from controllers.law import Law, LawOptions, joint_impedance, operational_space
from controllers.loop import real_time, undisturbed
from controllers.model import ArmModel, arm_model
from controllers.robot import load_robot
from robo_rl.cli.bench_rows import Report, Row, at_most, in_turns, make_row

if TYPE_CHECKING:
    from robo_rl.cli.bench import Bench

TICKS = 200  # of one call; the target moves within them
BARE, STEP = "a bare impedance law", "mj_step"
LAWS = {"Cartesian impedance": LawOptions(), "operational space": operational_space(),
        "joint impedance": joint_impedance(damping=25.0)}


def measure(args: "Bench", report: Report) -> None:
    """All rows of `robo_rl bench control`."""
    robot = load_robot("sim")
    model, arm = arm_model(robot), SimArm(robot)
    model.update(np.array(robot.home), np.full(7, 0.01))
    for name, options in LAWS.items():
        work = {"ours": (ticks(Law(options, robot), model), TICKS), BARE: (bare(model), TICKS), STEP: (steps(arm), TICKS)}
        times = in_turns(work, args.slice / 4, time.thread_time)
        first = options == LAWS["Cartesian impedance"]
        report.add(make_row(f"law, one tick: {name}, 7 joints, moving target", "us", times, BARE,
                            bars=lambda ours, *_, first=first: [at_most("us", ours, 30)] if first else [],
                            note=f"{STEP} beside it {1e6 * np.median(times[STEP]):.1f} us"))
    q, dq = model.q.copy(), model.dq.copy()
    times = in_turns({"ours": (lambda: [model.update(q, dq) for _ in range(TICKS)], TICKS), STEP: (steps(arm), TICKS)},
                     args.slice / 8, time.thread_time)
    report.add(make_row("kinematics and dynamics for the law", "us", times, STEP))
    times = in_turns({"ours": (governed(SimArm(robot)), TICKS), STEP: (steps(arm), TICKS)}, args.slice / 4,
                     time.thread_time)
    report.add(make_row("one tick of the arm: governor, model, law, physics", "us", times, STEP))
    loop(args, report)


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


def bare(model: ArmModel) -> Callable[[], None]:
    """t = J^T (K e - D J dq) + bias, as one writes it first."""
    k, d = np.diag([600.0] * 3 + [30.0] * 3), np.diag([50.0] * 3 + [10.0] * 3)
    pos, turn = np.array(model.pos) + 0.01, model.rotation.copy()
    e, q = np.zeros(6), np.zeros(4)

    def call() -> None:
        for _ in range(TICKS):
            e[:3] = pos - model.pos
            mujoco.mju_mat2Quat(q, (turn @ model.rotation.T).ravel())
            mujoco.mju_quat2Vel(e[3:], q, 1.0)
            model.jac.T @ (k @ e - d @ (model.jac @ model.dq)) + model.bias
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


def loop(args: "Bench", report: Report) -> None:
    """The governed arm at 1 kHz of real time."""
    arm = SimArm(load_robot("sim"))
    tick = commanded(arm, ready(arm))
    with undisturbed() as real:
        timing = real_time(tick, arm.dt, max(args.slice / 2, 0.05))
        began = time.thread_time()
        steps(arm)()
        step = (time.thread_time() - began) / TICKS
    said = f"{timing.text()}; real-time priority {'on' if real else 'not permitted'}"
    ours = 1e3 * timing.period_p99
    report.add(Row(what="arm at 1 kHz: p99 of the period", unit="ms", ours=ours, limit=1.0, limit_is="the period",
                   of_limit=1 / ours, bars=[at_most("ms", ours, 1.1 if real else 1.6)], note=said))
    busy = 1e6 * timing.core_share * arm.dt
    report.add(Row(what="arm at 1 kHz: CPU time of a period", unit="us", ours=busy, limit=1e6 * step, limit_is=STEP,
                   of_limit=1e6 * step / busy, bars=[at_most("share of a core", timing.core_share, 0.30)]))
