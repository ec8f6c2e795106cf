"""Simulators that a user could take instead of ours, for `robo_rl bench`: Gymnasium's vector envs and envpool."""

import time
from collections.abc import Callable

import gymnasium
import numpy as np

from robo_rl.cli.bench_rows import Report, lacking, versioned

MOST = 64  # processes or envs that Gymnasium is asked to hold
COUNTS, COUNTS_QUICK = (1, 2, 4, 8, 16, 32, 64), (1, 2)


class Pool:
    """A vector env with random actions: `turn(seconds)` is seconds per step of one env, resets included.

    The call after an end resets an env and does not step it: it takes time and is not counted.
    """

    def __init__(self, name: str, env, n: int):
        self.name, self.env, self.n = name, env, n
        self.actions = np.random.default_rng(0).uniform(-1, 1, (16, n, *env.action_space.shape[-1:])).astype(
            env.action_space.dtype)
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
    """Gymnasium's SyncVectorEnv and AsyncVectorEnv of n envs; above MOST each at the size that is its fastest."""
    import mujoco
    mujoco.set_mju_user_warning(lambda text: None)  # one line of a deprecated XML attribute per env and process
    pools = []
    for mode in (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv):
        found: list[tuple[float, int]] = []
        for k in () if n <= MOST else COUNTS_QUICK if quick else COUNTS:
            pool = Pool("", mode([maker] * k), k)
            found.append((pool.turn(0.05 if quick else 0.3), k))
            pool.close()
        best = min(found)[1] if found else n
        if found:
            report.say(f"  {mode.__name__}: fastest at n = {best}, {1 / min(found)[0]:,.0f} steps/s")
        pools.append(Pool(f"{versioned('gymnasium')} {mode.__name__}, n = {best}", mode([maker] * best), best))
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
    """The least that a Gymnasium env of the arm could do: one `mj_step`, qpos and qvel as observation, no reward."""
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
