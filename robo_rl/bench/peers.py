"""Simulators that a user could take instead of ours, for `robo_rl bench`: Gymnasium's vector envs and
envpool."""

import functools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from robo_rl.bench.rows import Report, lacking, versioned
from robo_rl.noise import mix

MOST = 64  # processes or envs that Gymnasium is asked to hold
COUNTS, COUNTS_QUICK = (1, 2, 4, 8, 16), (1, 2)  # envs; on 2 cores 32 and 64 were never the fastest


class Pool:
    """A vector env with random actions: `turn(seconds)` is seconds per step of one env, resets included.

    The call after an end resets an env and does not step it: it takes time and is not counted.
    """

    def __init__(self, name: str, env, n: int):
        self.name, self.env, self.n = name, env, n
        self.actions = (
            np.random.default_rng(0)
            .uniform(-1, 1, (16, n, *env.action_space.shape[-1:]))
            .astype(env.action_space.dtype)
        )
        self.count, self.over = 0, np.zeros(n, bool)
        env.reset()

    def turn(self, seconds: float) -> float:
        began, calls, steps, now = time.perf_counter(), 0, 0, 0.0
        while calls < 2 or now < seconds:
            _, _, terminated, truncated, _ = self.env.step(self.actions[self.count % 16])
            self.count, calls = self.count + 1, calls + 1
            steps += self.n - int(np.count_nonzero(self.over))
            self.over = terminated | truncated
            now = time.perf_counter() - began
        return now / max(steps, 1)

    def close(self) -> None:
        self.env.close()


def gymnasium_pools(maker: Callable[[], gymnasium.Env], n: int, quick: bool, report: Report) -> list[Pool]:
    """Gymnasium's SyncVectorEnv and AsyncVectorEnv of n envs; above MOST each at the size that is its
    fastest."""
    import mujoco

    mujoco.set_mju_user_warning(
        lambda text: None
    )  # one line of a deprecated XML attribute per env and process
    pools = []
    # Workers are not forked from this process: its threads may hold a lock that a forked child then waits
    # for, for ever.
    multiprocessing.set_forkserver_preload(["gymnasium", "mujoco", "sims.mujoco.env"])
    workers = functools.partial(gymnasium.vector.AsyncVectorEnv, context="forkserver")
    for name, mode in (("SyncVectorEnv", gymnasium.vector.SyncVectorEnv), ("AsyncVectorEnv", workers)):
        found: list[tuple[float, int]] = []
        for k in () if n <= MOST else COUNTS_QUICK if quick else COUNTS:
            pool = Pool("", mode([maker] * k), k)
            found.append((pool.turn(0.05 if quick else 0.3), k))
            pool.close()
        best = min(found)[1] if found else n
        if found:
            report.say(f"  {name}: fastest at n = {best}, {1 / min(found)[0]:,.0f} steps/s")
        pools.append(Pool(f"{versioned('gymnasium')} {name}, n = {best}", mode([maker] * best), best))
    return pools


def envpool_pool(task: str, n: int, threads: int) -> tuple[Pool | None, dict[str, str]]:
    """(envpool's env of a Gymnasium task, or None; {envpool: why not})."""
    why = lacking("envpool", "envpool", "envpool")
    if not why:
        import envpool

        why = "" if task in envpool.list_all_envs() else "it has no such task"
    if why:
        return None, {"envpool": why}
    env = envpool.make(task, env_type="gymnasium", num_envs=n, num_threads=min(n, threads), seed=0)
    return Pool(f"{versioned('envpool')}, {min(n, threads)} threads", env, n), {}


def arm_maker(task: str) -> Callable[[], gymnasium.Env]:
    """The least that a Gymnasium env of the arm could do: one `mj_step`, qpos and qvel as observation, no
    reward."""

    def make() -> gymnasium.Env:
        import mujoco

        from sims.mujoco.env import HOME, build_model
        from sims.mujoco.model import FINGER_OPEN, SUBSTEPS
        from sims.mujoco.tasks import TASKS

        class BareArm(gymnasium.Env):
            def __init__(self):
                self.model = build_model(TASKS[task])
                self.data = mujoco.MjData(self.model)
                size = self.model.nq + self.model.nv
                self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)
                self.action_space = gymnasium.spaces.Box(-1, 1, (self.model.nu,), np.float32)
                self.rest = np.concatenate([HOME, np.full(self.model.nu - len(HOME), FINGER_OPEN)])

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                mujoco.mj_resetData(self.model, self.data)
                self.data.qpos[:7] = HOME
                self.steps = 0
                return self._obs(), {}

            def step(self, action):
                self.data.ctrl[:] = self.rest + 0.05 * action
                mujoco.mj_step(self.model, self.data, nstep=SUBSTEPS)
                self.steps += 1
                return self._obs(), 0.0, False, self.steps >= TASKS[task].max_steps, {}

            def _obs(self):
                return np.concatenate([self.data.qpos, self.data.qvel], dtype=np.float32)

        return BareArm()

    return make


class Share(gymnasium.Env):
    """Some rows of a contract env as one Gymnasium env: observations [m, S+4] end in reward, terminated,
    truncated, success."""

    def __init__(self, make: "Callable[[], Any]"):
        self.env = make()
        rows, self.width = self.env.num_envs, self.env.single_observation_space["state"].shape[0]
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (rows, self.width + 4), np.float32)
        self.action_space = gymnasium.spaces.Box(
            -1, 1, (rows, *self.env.single_action_space.shape), np.float32
        )
        self.out = np.zeros(self.observation_space.shape, np.float32)

    def reset(self, *, seed=None, options=None):
        return self.begin({"seed": seed}), {}

    def begin(self, how: dict) -> np.ndarray:
        """`reset` of the rows that `how` means."""
        obs, _ = self.env.reset(**how)
        self.out[:, : self.width], self.out[:, self.width :] = obs["state"], 0
        return self.out

    def step(self, action):
        obs, *rest, info = self.env.step(action)
        self.out[:, : self.width] = obs["state"]
        for k, column in enumerate((*rest, info["success"])):
            self.out[:, self.width + k] = column
        return self.out, 0.0, False, False, {}

    def close(self):
        self.env.close()


class Subprocesses:
    """A contract env whose rows live in the processes of Gymnasium's AsyncVectorEnv: the peer's way to use
    all cores."""

    def __init__(self, makers: "Sequence[Callable[[], Any]]"):
        probe = makers[0]()
        self.spec, self.single_observation_space = probe.spec, probe.single_observation_space
        self.single_action_space, rows = probe.single_action_space, probe.num_envs
        self.words = np.resize(probe.reset(seed=0)[0]["task"], rows * len(makers))
        probe.close()
        self.rows, self.num_envs = rows, rows * len(makers)
        self.many = gymnasium.vector.AsyncVectorEnv([functools.partial(Share, make) for make in makers])
        self.many.reset(seed=0)

    def _read(self, out: np.ndarray) -> tuple:
        out = out.reshape(self.num_envs, -1)
        reward, terminated, truncated, success = out[:, -4:].T
        return (
            {"state": out[:, :-4], "task": self.words},
            reward,
            terminated > 0,
            truncated > 0,
            {"success": success > 0},
        )

    def reset(self, *, seed=None, options=None):
        parts = [slice(i * self.rows, (i + 1) * self.rows) for i in range(len(self.many.env_fns))]
        hows = [
            {
                "seed": None if seed is None else mix(seed, i) >> 33,
                "options": None if options is None else {k: np.asarray(v)[part] for k, v in options.items()},
            }
            for i, part in enumerate(parts)
        ]
        obs, _, _, _, info = self._read(np.stack(self._begin(hows)))
        return obs, info

    def _begin(self, hows: list[dict]) -> tuple:
        for pipe, how in zip(self.many.parent_pipes, hows, strict=True):  # each process its own rows
            pipe.send(("_call", ("begin", [how], {})))
        answers = [pipe.recv() for pipe in self.many.parent_pipes]
        assert all(ok for _, ok in answers), "a process of AsyncVectorEnv failed"
        return tuple(x for x, _ in answers)

    def step(self, actions):
        out, *_ = self.many.step(
            np.ascontiguousarray(actions, np.float32).reshape(len(self.many.env_fns), self.rows, -1)
        )
        return self._read(out)

    def close(self) -> None:
        self.many.close()
