"""Envs without physics whose pictures are random: what a rollout of a policy costs where simulation costs
nothing."""

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv


class PictureEnv(VectorEnv):
    """N envs of `limit` steps with `views` cameras of `size` pixels, a state of 8 numbers and an action of 7;
    nobody succeeds."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    state, action = 8, 7

    def __init__(self, num_envs: int, views: int, size: int, limit: int = 100):
        self.num_envs, self.size, self.limit = num_envs, size, limit
        self.views = tuple(f"camera{i}" for i in range(views))
        seen: dict[str, Any] = {
            f"image/{v}": spaces.Box(0, 255, (size, size, 3), np.uint8) for v in self.views
        }
        seen["state"] = spaces.Box(-np.inf, np.inf, (self.state,), np.float32)
        self.single_observation_space: Any = spaces.Dict(seen)
        self.single_action_space = spaces.Box(-1, 1, (self.action,), np.float32)
        self.action_space = spaces.Box(-1, 1, (num_envs, self.action), np.float32)
        self.rng, self.steps = np.random.default_rng(0), np.zeros(num_envs, np.int64)
        self.frames = self.rng.integers(0, 256, (num_envs, size, size, 3), np.uint8)

    def _observe(self) -> dict[str, Any]:
        state = self.rng.standard_normal((self.num_envs, self.state)).astype(np.float32)
        return {"state": state, "task": np.array(["pick up the cube"] * self.num_envs)} | {
            f"image/{v}": self.frames for v in self.views
        }

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[dict[str, Any], dict]:
        """Gymnasium's masked reset."""
        self.steps[np.asarray((options or {}).get("reset_mask", np.ones(self.num_envs, bool)))] = 0
        return self._observe(), {}

    def step(self, actions: Any) -> tuple:
        """One step; an env that is over stays so."""
        self.steps += 1
        over, no = self.steps >= self.limit, np.zeros(self.num_envs, bool)
        return self._observe(), np.zeros(self.num_envs, np.float32), no, over, {"success": no}
