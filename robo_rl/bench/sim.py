"""`robo_rl bench sim`: each simulator against its bare physics or drawing, and against what a user could take
instead.

The limit of an env is the fastest bare call that does the same physics: `Batch` alone (with and without one
MjData per simulation) or `mj_step` in a loop. It repeats a stretch of the env's life, from the same states,
with the same controls and the same resets, and must end in the same states.
"""

import copy
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
from mujoco.batch import Batch

from robo_rl.bench.peers import Pool, arm_maker, envpool_pool, gymnasium_pools
from robo_rl.bench.rows import (
    BARE,
    LEAST,
    Bar,
    Report,
    at_least,
    columns,
    in_turns,
    lacking,
    make_row,
    versioned,
)
from robo_rl.errors import UserError

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions

WALKERS = ("HalfCheetah-v5", "Hopper-v5")
COUNTS = (1, 4, 16, 64, 256, 1024)  # N
PIXELS = (64, 128)
KEPT = 64  # up to here a batch that keeps one MjData per simulation may be the faster one
WANTED = {1: 0.5, 4: 0.5, 16: 0.8, 64: 0.9, 256: 0.9, 1024: 0.9}  # of the limit


def measure(args: "BenchOptions", report: Report) -> None:
    """All rows of `robo_rl bench sim`, or those of --task."""
    from sims.mujoco import LOCOMOTION, TASKS

    task = args.task
    arms = [t for t in (task or TASKS[0],) if t in TASKS and t not in LOCOMOTION]
    walkers = [t for t in ((task,) if task else WALKERS) if t in LOCOMOTION]
    for n in (args.envs,) if args.envs else COUNTS:
        for name in arms:
            simulator(args, report, name, n, 2, "ee_delta")
        for name in walkers:
            simulator(args, report, name, n, 2)
    n = args.envs or 256
    for name in arms:
        for control, threads in (("ee_delta", 1), ("joint_delta", 1), ("joint_delta", 2)):
            simulator(args, report, name, n, threads, control)
        for size in PIXELS:
            drawing(args, report, name, size)
    if not task or task not in TASKS:
        maniskill(args, report, task or "PickCube-v1")


# ---- the embedded simulator --------------------------------------------------------------------------------


class Stretch:
    """Some control steps of an env with random actions, recorded once, and the bare calls that repeat its
    physics.

    reset_share: what a lap owes for resets that it did not see, in full resets.
    """

    def __init__(self, env, threads: int, substeps: int, quick: bool):
        n, self.env, self.substeps = env.num_envs, env, substeps
        self.length = int(
            np.clip((200 if quick else 20000) // n, 1 if quick else 8, min(64, env.spec.max_steps - 8))
        )
        rng = np.random.default_rng(0)
        self.actions = rng.uniform(-1, 1, (self.length, n, *env.single_action_space.shape)).astype(np.float32)
        env.reset(seed=0)
        for a in self.actions[:4]:  # away from the starts
            self._env_step(a)
        self.begin, state, ctrl = env.get_state(), env.batch.state, env.batch.bind("ctrl")
        self.first, self.controls = state.copy(), []
        self.alive: list[np.ndarray | None] = []
        self.fresh: list[
            tuple[np.ndarray, np.ndarray] | None
        ] = []  # (ids, rows) of what was reset after a step
        over = np.zeros(n, bool)
        for a in self.actions:
            self.alive.append(None if not over.any() else ~over)
            _, _, terminated, truncated, _ = env.step(a)
            self.controls.append(ctrl.copy())
            ended = terminated | truncated
            if ended.any():
                env.reset(options={"reset_mask": ended})
            self.fresh.append((np.flatnonzero(ended), state[ended].copy()) if ended.any() else None)
        self.last = state.copy()
        resets = sum(len(f[0]) for f in self.fresh if f)
        self.reset_share = 0.0 if resets else self.length / env.spec.max_steps
        self.units = self.length * n
        self.calls = {
            f"Batch alone{', one MjData each' * kept}": self._batch(
                Batch(env.model, n, threads, persistent=kept)
            )
            for kept in ((False, True) if n <= KEPT else (False,))
        }
        if n <= 4:
            self.calls["mj_step in a loop, 1 thread"] = self._loop()

    def _env_step(self, a: np.ndarray) -> None:
        _, _, terminated, truncated, _ = self.env.step(a)
        ended = terminated | truncated
        if ended.any():
            self.env.reset(options={"reset_mask": ended})

    def lap(self) -> float:
        """Seconds of the env, its resets included."""
        self.env.set_state(self.begin)
        began = time.perf_counter()
        for a in self.actions:
            self._env_step(a)
        spent = time.perf_counter() - began
        if self.reset_share:
            began = time.perf_counter()
            self.env.reset(options={"starts": np.arange(self.env.num_envs)})
            spent += self.reset_share * (time.perf_counter() - began)
        return spent

    def _batch(self, batch: Batch) -> Callable[[], tuple[float, np.ndarray]]:
        ctrl = batch.bind("ctrl")

        def lap() -> tuple[float, np.ndarray]:
            batch.state[:] = self.first
            began = time.perf_counter()
            for control, fresh in zip(self.controls, self.fresh, strict=True):
                ctrl[:] = control
                batch.step(nstep=self.substeps)
                if fresh:
                    batch.state[fresh[0]] = fresh[1]
            return time.perf_counter() - began, batch.state

        return lap

    def _loop(self) -> Callable[[], tuple[float, np.ndarray]]:
        model, spec = self.env.model, int(mujoco.mjtState.mjSTATE_INTEGRATION)
        data = [mujoco.MjData(model) for _ in range(self.env.num_envs)]
        out = self.first.copy()

        def lap() -> tuple[float, np.ndarray]:
            for d, row in zip(data, self.first, strict=True):
                mujoco.mj_setState(model, d, row, spec)
            began = time.perf_counter()
            for control, fresh in zip(self.controls, self.fresh, strict=True):
                for d, u in zip(data, control, strict=True):
                    d.ctrl[:] = u
                    mujoco.mj_step(model, d, nstep=self.substeps)
                for i, row in zip(*fresh, strict=True) if fresh else ():
                    mujoco.mj_setState(model, data[i], row, spec)
            spent = time.perf_counter() - began
            for d, row in zip(data, out, strict=True):
                mujoco.mj_getState(model, d, row, spec)
            return spent, out

        return lap

    def check(self) -> None:
        """The env and every bare call end a lap in the recorded states."""
        self.env.set_state(self.begin)
        for a in self.actions:
            self._env_step(a)
        assert np.array_equal(self.env.batch.state, self.last), "the env does not repeat its own stretch"
        for name, call in self.calls.items():
            assert np.allclose(call()[1], self.last, rtol=0, atol=1e-9), (
                f"{name} did other physics than the env"
            )


def simulator(
    args: "BenchOptions", report: Report, task: str, n: int, threads: int, control: str = ""
) -> None:
    """One task at N envs: ours, the bare physics, and the peers."""
    import sims
    from sims.mujoco import LOCOMOTION
    from sims.mujoco.model import SUBSTEPS

    options: dict[str, Any] = {"control": control} if control else {}
    env: Any = sims.make("mujoco", task, n, threads=threads, **options)
    walker = task in LOCOMOTION
    stretch = Stretch(env, threads, env.walker.frame_skip if walker else SUBSTEPS, args.quick)
    stretch.check()
    pools, missing = (
        peers(args, report, task, n, threads, walker)
        if threads == 2 and control != "joint_delta"
        else ([], {})
    )
    times = laps(stretch, pools, args.slice)
    env.close()
    for pool in pools:
        pool.close()
    wanted = next(v for k, v in sorted(WANTED.items(), reverse=True) if n >= k)

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_least("of limit", of_limit, wanted)] * (threads == 2) + [
            at_least("over peer", over_peer, 1)
        ] * bool(pools)

    label = f"mujoco {task}, N = {n}{control and f', {control}'}, {threads} thread{'s' * (threads > 1)}"
    said = "" if walker else "; the peers' env does no more than mj_step and copying qpos and qvel"
    report.add(
        make_row(
            label,
            "steps/s",
            times,
            dict.fromkeys(stretch.calls, BARE),
            [p.name for p in pools],
            missing,
            bars,
            work=f"{stretch.length} control steps of {n} envs; the limit starts in the env's states, takes "
            f"its controls, takes its resets and ended in its states{said if pools else ''}",
            no_peer=""
            if pools or missing
            else "the row with end-effector control and 2 threads has them"
            if args.peers
            else "--no-peers",
        )
    )


def peers(
    args: "BenchOptions", report: Report, task: str, n: int, threads: int, walker: bool
) -> tuple[list[Pool], dict[str, str]]:
    """(running peers, {peer: why it is not among them}) of a simulator's row."""
    if not args.peers:
        return [], {}
    import gymnasium

    pool, missing = envpool_pool(task, n, threads)
    maker = (lambda: gymnasium.make(task, disable_env_checker=True)) if walker else arm_maker(task)
    pools = gymnasium_pools(maker, n, args.quick, report) + ([] if pool is None else [pool])
    if walker:
        for p in pools:
            assert p.env.step(p.actions[0])[0].shape == (p.n, _width(task)), (
                f"{p.name} observes something else"
            )
    return pools, missing


def _width(task: str) -> int:
    import sims

    return (sims.make("mujoco", task, 1).single_observation_space["state"].shape or (0,))[0]


def laps(stretch: Stretch, pools: list[Pool], seconds: float) -> dict[str, np.ndarray]:
    """Seconds per control step [repeats] of the env, the bare calls and the peers, in turns for about
    `seconds`."""
    sides = 1 + len(stretch.calls) + len(pools)
    turn = min(0.5, seconds / LEAST / sides)
    count = max(1, round(turn / max(stretch.lap(), 1e-6)))
    repeats, end = [], time.perf_counter() + seconds
    while len(repeats) < LEAST or time.perf_counter() < end:
        row = {"ours": sum(stretch.lap() for _ in range(count)) / count / stretch.units}
        for name, call in stretch.calls.items():
            row[name] = sum(call()[0] for _ in range(count)) / count / stretch.units
        for pool in pools:
            row[pool.name] = pool.turn(turn)
        repeats.append(row)
    return columns(repeats)


def drawing(args: "BenchOptions", report: Report, task: str, size: int) -> None:
    """Two cameras per env through `Renderer`, against mjr_render and mjr_readPixels of prepared scenes
    alone."""
    import sims
    from sims.mujoco.render import Renderer

    n = min(args.envs or 32, 32)
    env: Any = sims.make("mujoco", task, n)
    env.reset(seed=0)
    what, views = f"rgb of {task}, {size} x {size}, two cameras, N = {n}", ("front", "wrist")
    try:
        renderer = Renderer(env.batch, env.model, views, size, size)
    except UserError as e:
        report.skip(what, str(e))
        return
    peer, why = f"{versioned('mujoco')} mujoco.Renderer, shadows, reflections and multisampling off", ""
    if args.peers and os.environ.get("MUJOCO_GL", "") not in ("egl", "osmesa"):
        why = (
            "mujoco.Renderer reads its backend when mujoco is imported: set MUJOCO_GL=egl before the command"
        )
    plain = plain_renderer(env.model, size) if args.peers and not why else None
    datas, spec = [mujoco.MjData(env.model) for _ in range(n)], int(mujoco.mjtState.mjSTATE_INTEGRATION)

    def by_mujoco() -> list[np.ndarray]:
        assert plain is not None
        out = []
        for d, row in zip(datas, env.batch.state, strict=True):
            mujoco.mj_setState(env.model, d, row, spec)
            mujoco.mj_forward(env.model, d)
            for view in views:
                plain.update_scene(d, view)
                out.append(plain.render())
        return out

    if plain:
        ours, theirs = renderer.render(), by_mujoco()
        assert np.stack(theirs[::2]).shape == ours["front"].shape, "the peer draws other images"
    repeats = []
    for _ in range(LEAST):
        r = renderer.rates(args.slice / LEAST / 3)
        repeats.append(
            {"ours": 1 / r["render"], "mjr_render and mjr_readPixels of prepared scenes": 1 / r["bare"]}
        )
        if plain:
            repeats[-1][peer] = float(
                np.median(in_turns({"peer": (by_mujoco, 2 * n)}, args.slice / LEAST / 3, least=1)["peer"])
            )
    renderer.close()
    if plain:
        plain.close()
    env.close()
    report.add(
        make_row(
            what,
            "images/s",
            columns(repeats),
            {"mjr_render and mjr_readPixels of prepared scenes": BARE},
            [peer] if plain else [],
            {peer: why} if why else {},
            work=f"{2 * n} images of the same states",
            no_peer="" if args.peers else "--no-peers",
            bars=lambda _, of_limit, __: [at_least("of limit", of_limit, 0.8)],
        )
    )


def plain_renderer(model: mujoco.MjModel, size: int) -> mujoco.Renderer:
    """MuJoCo's own renderer with what slows it down switched off."""
    model = copy.copy(model)
    model.vis.quality.offsamples = model.vis.quality.shadowsize = 0
    out = mujoco.Renderer(model, size, size)
    for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
        out.scene.flags[flag] = 0
    return out


# ---- ManiSkill ---------------------------------------------------------------------------------------------


def maniskill(args: "BenchOptions", report: Report, task: str) -> None:
    """Two worker processes against two bare PhysX systems and two of ManiSkill's own envs, state
    observations."""
    import sims

    what = f"maniskill {task}, 2 workers"
    if why := lacking("mani_skill", "ManiSkill", "maniskill"):
        report.skip(what, why)
        return
    from sims.maniskill import bare_rates

    bare, own = "two PhysX systems stepped alone", f"{versioned('mani_skill')}, two of its envs"
    for control in ("joint_delta",) if args.quick else ("joint_delta", "ee_delta"):
        n = args.envs or 16
        env = sims.make("maniskill", task, n, control=control, threads=2)
        env.reset(seed=0)
        actions = np.random.default_rng(0).uniform(-1, 1, (64, *env.action_space.shape)).astype(np.float32)
        count = iter(range(10**9))

        def step(env=env, actions=actions, count=count) -> None:
            _, _, terminated, truncated, _ = env.step(actions[next(count) % len(actions)])
            if (terminated | truncated).all():  # resets are not counted in the others' rates: keep them rare
                env.reset(options={"reset_mask": terminated | truncated})

        share, repeats = args.slice / 3 / LEAST, []
        with bare_rates(task, 2, share, control) as rates:
            for _ in range(LEAST):
                ours = in_turns({"ours": (step, n)}, share, least=2)["ours"]
                found = rates()
                repeats.append(
                    {"ours": float(np.median(ours)), bare: 1 / found["physics"], own: 1 / found["env"]}
                )
        env.close()
        report.add(
            make_row(
                f"{what}, {control}, N = {n}",
                "steps/s",
                columns(repeats),
                {bare: BARE},
                [own],
                work="control steps with random actions, resets rare or not counted; physics: as many "
                "PhysX steps per control step from the same reset",
                bars=lambda _, of_limit, over_peer: [at_least("over peer", over_peer, 1)],
            )
        )
