"""Small vector envs under the contract, for tests that need one in milliseconds."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Text
from gymnasium.vector import AutoresetMode, VectorEnv

from robo_rl.starts import StartStream, StartTable, uniforms
from robo_rl.types import ActionAxis, ControlSpec


class PointReach(VectorEnv):
    """Move a point in the plane to a goal: success within `radius` terminates, `limit` steps truncate."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(
        self,
        num_envs: int,
        limit: int = 20,
        tasks: tuple[str, ...] = ("reach the goal",),
        radius: float = 0.1,
    ):
        self.num_envs, self.limit, self.tasks, self.radius = num_envs, limit, tasks, radius
        axes = tuple(ActionAxis(n, "m", -0.2, 0.2, "delta", "base") for n in "xy")
        self.spec = ControlSpec("toy", "point", axes, 0.1, limit)
        self.single_observation_space = Dict(state=Box(-np.inf, np.inf, (4,), np.float32), task=Text(64))
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.single_action_space = Box(-1, 1, (2,), np.float32)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.starts = StartStream(num_envs)
        self.pos, self.goal = np.zeros((num_envs, 2)), np.zeros((num_envs, 2))
        self.t, self.word = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        self.over = np.zeros((2, num_envs), bool)

    def _obs(self):
        state = np.concatenate([self.pos, self.goal - self.pos], 1).astype(np.float32)
        return {"state": state, "task": np.array(self.tasks)[self.word]}

    def reset(self, *, seed=None, options=None):
        options = options or {}
        mask = np.asarray(options.get("reset_mask", np.ones(self.num_envs, bool)))
        if seed is not None:
            self.starts.seed(seed, mask)
        ids = mask.nonzero()[0]
        starts = np.asarray(options["starts"])[ids] if "starts" in options else self.starts.draw(ids)
        u = uniforms(starts, 5)
        self.pos[ids], self.goal[ids] = u[:, :2] * 2 - 1, u[:, 2:4] * 2 - 1
        self.word[ids] = (u[:, 4] * len(self.tasks)).astype(int)
        self.t[ids], self.over[:, ids] = 0, False
        return self._obs(), {"success": self.over[0].copy()}

    def step(self, actions):
        live = ~self.over.any(0)
        self.pos[live] += 0.2 * np.clip(actions[live], -1, 1)
        self.t[live] += 1
        close = np.linalg.norm(self.goal - self.pos, axis=1) < self.radius
        self.over[0] |= live & close
        self.over[1] |= live & ~close & (self.t >= self.limit)
        reward = (live & close).astype(np.float32)
        return self._obs(), reward, self.over[0].copy(), self.over[1].copy(), {"success": self.over[0].copy()}

    def expert_action(self):
        return np.clip((self.goal - self.pos) / 0.2 * 0.7, -1, 1).astype(np.float32)

    def recovery_action(self):
        return np.clip(-self.pos / 0.2 * 0.7, -1, 1).astype(np.float32)

    def subtask(self):
        return self.over[0].astype(np.int64)

    def get_state(self):
        return {
            "pos": self.pos.copy(),
            "goal": self.goal.copy(),
            "t": self.t.copy(),
            "word": self.word.copy(),
            "over": self.over.T.copy(),
            "seeds": self.starts.seeds.copy(),
            "episodes": self.starts.episodes.copy(),
        }

    def set_state(self, state, mask=None):
        m = np.ones(self.num_envs, bool) if mask is None else mask
        for name, mine in (
            ("pos", self.pos),
            ("goal", self.goal),
            ("t", self.t),
            ("word", self.word),
            ("over", self.over.T),
            ("seeds", self.starts.seeds),
            ("episodes", self.starts.episodes),
        ):
            mine[m] = np.asarray(state[name])[m]


class Failures:
    """A sampler of four starts: the more of its episodes failed, the more often a start comes, by chance
    too."""

    def __init__(self):
        self.failed, self.seen = np.zeros(4, np.int64), 0

    def propose(self, generator):
        return StartTable(10 + np.arange(4), 1.0 + self.failed + generator.random(4), 0.25)

    def observe(self, starts, tasks, success, returns, lengths):
        mine = (starts >= 10) & (starts < 14)
        np.add.at(self.failed, starts[mine] - 10, ~success[mine])
        self.seen += len(starts)

    def metrics(self):
        return {"seen": float(self.seen)}

    def state_dict(self):
        return {"failed": self.failed.copy(), "seen": self.seen}

    def load_state_dict(self, state):
        self.failed, self.seen = np.array(state["failed"]), state["seen"]


def failures(seed, tasks):
    return Failures()
