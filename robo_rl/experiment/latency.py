"""A chunk policy in simulated real time: the robot goes on while inference takes its time.

Every env steps once per control period. A chunk that is asked for in a period comes `latency` (and up to
`jitter` more) seconds later; until then the rows of the old chunk run, and where none is left the target
stands still. What happens where chunks meet is `controllers.chunking`'s, the same that drives an arm.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from controllers.chunking import CHUNKING, ChunkRunner
from robo_rl.errors import UserError, choose, in_range
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.envs import task_count
from robo_rl.experiment.robot_names import ROBOTS
from robo_rl.types import has_success

TRAINED = ("pi_rl", "reinflow", "bc")  # methods that learn with --latency


def periods(seconds: float, period: float) -> int:
    """Control periods that begin within so many seconds, but for rounding."""
    return math.ceil(seconds / period - 1e-9)


def with_latency(config: TrainConfig, env) -> TrainConfig:
    """The configuration of a run with its --latency as rows of a chunk in the options of its policy. env: the
    run's, None without one.

    UserError: what does not go with a latency, or chunks that are too short for it."""
    from robo_rl.runtime.device import on_device

    policy = config.policy
    if not config.latency:
        if config.latency_jitter:
            raise UserError("--latency-jitter goes with --latency above 0")
        return config if not policy.commit_least else replace(config, policy=replace(policy, commit_least=0))
    if config.algo not in TRAINED:
        raise UserError(
            f"--latency goes with --algo {', '.join(TRAINED[:-1])} or {TRAINED[-1]}, got {config.algo}"
        )
    if env is None or config.sim.split(":")[0] in ROBOTS or on_device(env):
        raise UserError(
            f"--latency is simulated between the steps of a simulator on the CPU, got --sim {config.sim} "
            f"--device {config.device}"
        )
    if task_count(config) > 1:
        raise UserError(f"--latency goes with one task, got --task {config.task}")
    for name in ("dream", "share"):
        if getattr(config, name):
            raise UserError(f"--latency goes without --{name}")
    if config.learners > 1:
        raise UserError("--latency goes with --learners 1")
    if getattr(config.rl, "w2_coef", 0):
        raise UserError(
            "--latency goes with --rl.w2-coef 0: that loss compares chunks of which no row is given"
        )
    increments_of(env.spec)
    least, most = (
        periods(x, env.spec.period) for x in (config.latency, config.latency + config.latency_jitter)
    )
    if most > min(policy.execute, policy.horizon - policy.execute):
        both = f"{least} to {most}" if least < most else str(most)
        raise UserError(
            f"--latency {config.latency:g} --latency-jitter {config.latency_jitter:g} is {both} control "
            f"periods of {1e3 * env.spec.period:g} ms: it needs --policy.execute of at least {most} and "
            f"--policy.horizon of at least --policy.execute + {most}, got {policy.execute} and "
            f"{policy.horizon}"
        )
    return replace(config, policy=replace(policy, commit=most, commit_least=least))


def increments_of(spec) -> np.ndarray:
    """[A], which axes of an env's actions are increments. UserError: it does not say what its axes are."""
    if not spec.axes:
        raise UserError(f"--latency needs an env that says what its actions are; {spec.id} does not")
    return np.array([axis.kind == "delta" for axis in spec.axes])


class LateRobot:
    """One env's chunks: what it waits for and what it does."""

    def __init__(self, spec, chunking: str, every: int):
        made = increments_of(spec)
        self.runner = ChunkRunner(spec.period, made, np.ones(len(made)), chunking, every)
        # rows, time of the observation, time of arrival
        self.coming: tuple[np.ndarray, float, float] | None = None
        self.last = np.zeros(len(made), np.float32)
        self.before: np.ndarray | None = None  # the row before
        self.number = -1  # of the chunk that it was of
        self.seam = 0.0  # largest change of an increment where one chunk follows another

    def act(
        self, decide: Callable[..., np.ndarray], obs: dict, now: float, delay: Callable[[], float]
    ) -> np.ndarray:
        """The action [A] for the period that begins now [s]."""
        r = self.runner
        self.arrive(now)
        if r.due(now):
            prefix = r.ask(now, now)
            rows = decide(obs) if prefix is None else decide(obs, prefix)
            self.coming = rows, now, now + delay()
            self.arrive(now)
        row = r.row(now)
        action = np.where(r.increments, 0.0, self.last) if row is None else np.clip(row, -1, 1)
        r.ran(action)
        if self.before is not None and row is not None and r.schedule.number != self.number:
            self.seam = max(self.seam, float(np.abs(action - self.before)[r.increments].max(initial=0.0)))
        self.before, self.number = None if row is None else action, r.schedule.number
        self.last = action.astype(np.float32)
        return self.last

    def arrive(self, now: float) -> None:
        """Take the chunk that has come by now."""
        if self.coming is not None and now >= self.coming[2] - 1e-9:
            rows, t0, _ = self.coming
            self.coming = None
            self.runner.take(rows, t0, now, now)


def evaluate_late(
    env,
    decide: Callable[..., np.ndarray],
    execute: int,
    starts: np.ndarray,
    *,
    latency: float,
    jitter: float = 0.0,
    chunking: str = "blend",
    seed: int = 0,
    tick: Callable[[int], None] = lambda done: None,
) -> dict:
    """One episode per start. decide(obs) or decide(obs, prefix) -> rows [H, A] of one env, whose observation
    says its instruction as `task`; execute: rows after which it would decide again. -> lists as of
    `evaluation.evaluate`, and per episode: seam (largest change of an increment between two chunks, in
    actions), starved (periods without a row)."""
    choose("--chunking", chunking, CHUNKING)
    in_range("--latency", latency, 0, 10)
    in_range("--latency-jitter", jitter, 0, 10)
    n, out = env.num_envs, {k: [] for k in ("success", "return", "length", "task", "seam", "starved")}
    if (origin := getattr(env, "origins", lambda ids: None)(starts)) is not None:
        out["origin"] = origin.tolist()
    for batch, first in enumerate(range(0, len(starts), n)):
        ids = starts[first : first + n]
        obs, _ = env.reset(
            options={
                "reset_mask": np.ones(n, bool),
                "starts": np.concatenate([ids, np.repeat(ids[-1:], n - len(ids))]),
            }
        )
        rng = np.random.default_rng((seed, batch))
        robots = [LateRobot(env.spec, chunking, execute) for _ in range(n)]
        over, success = np.zeros(n, bool), np.zeros(n, bool)
        total, length, task = np.zeros(n), np.zeros(n, np.int64), [str(t) for t in obs["task"]]
        k = 0
        while not over.all():
            now = k * env.spec.period
            actions = np.zeros((n, len(env.spec.axes)), np.float32)
            for i in np.flatnonzero(~over):
                mine = {name: x[i] for name, x in obs.items()}
                actions[i] = robots[i].act(decide, mine, now, lambda rng=rng: latency + jitter * rng.random())
            obs, reward, terminated, truncated, info = env.step(actions)
            total += np.where(over, 0.0, reward)
            length += ~over
            success |= np.asarray(info["success"]) & ~over
            over |= terminated | truncated
            k += 1
        m = len(ids)
        out["success"] += success[:m].astype(int).tolist()
        out["return"] += [round(float(v), 6) for v in total[:m]]
        out["length"] += length[:m].tolist()
        out["task"] += task[:m]
        out["seam"] += [round(r.seam, 4) for r in robots[:m]]
        out["starved"] += [int(r.runner.schedule.counts["starved"]) for r in robots[:m]]
        tick(first + m)
    return out if has_success(env) else out | {"no_success": True}
