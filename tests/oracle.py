"""A simulator as a world model: what it predicts is what happens. For proofs that the machinery around a
model is exact.

With it `WorldEnv` must play the simulator's own episodes, and training in it must be training in the
simulator.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from world_models.model import Carry, Frames, Prediction, WorldSpec


class Oracle:
    """`env` (with get_state and set_state) behind the protocol of a world model; serves at most env.num_envs
    lanes."""

    options = None

    def __init__(self, env, sparse: bool = True):
        self.env = env
        views = env.spec.views
        size = env.single_observation_space[f"image/{views[0]}"].shape[0] if views else 0
        obs, _ = env.reset(seed=0)
        self.words = sorted({str(t) for t in obs["task"]})
        self.spec = WorldSpec(
            kind="latent",
            control=env.spec,
            state=env.single_observation_space["state"].shape[0],
            image_size=size,
            tasks=tuple(self.words),
            horizon=env.spec.max_steps,
            sparse=sparse,
            data="the simulator itself",
        )
        none = np.zeros(0, np.int64)
        self.frames = Frames({}, none, none.astype(bool), none.astype(bool))

    def first(self, starts: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """First observations of `starts` [n] and their task numbers; `start` then takes them up."""
        n = self.env.num_envs
        ids = np.concatenate([starts, np.zeros(n - len(starts), np.int64)])
        obs, _ = self.env.reset(options={"reset_mask": np.ones(n, bool), "starts": ids})
        self._begun = {k: v[: len(starts)] for k, v in self.env.get_state().items()}
        rows = {k: np.asarray(v)[: len(starts)] for k, v in obs.items() if k != "task"}
        return rows, np.array([self.words.index(str(t)) for t in obs["task"][: len(starts)]])

    def start(self, obs: Mapping[str, np.ndarray], keys: np.ndarray) -> Carry:
        return {k: torch.from_numpy(v.copy()) for k, v in self._begun.items()}

    def step(self, carry: Carry, actions: Tensor) -> tuple[Carry, Prediction]:
        self.env.set_state({k: v.numpy() for k, v in carry.items()})
        rows: list[tuple] = []
        for a in actions.unbind(1):
            obs, reward, terminated, _, info = self.env.step(a.numpy())
            rows.append(
                (
                    {k: np.asarray(v) for k, v in obs.items() if k != "task"},
                    reward,
                    terminated,
                    info["success"],
                )
            )

        def stacked(column: list) -> Tensor:
            return torch.from_numpy(np.stack([np.array(x) for x in column], 1))

        obs = {k: stacked([r[0][k] for r in rows]) for k in rows[0][0]}
        reward, terminated, success = (stacked([r[i] for r in rows]).float() for i in (1, 2, 3))
        carry = {k: torch.from_numpy(np.array(v)) for k, v in self.env.get_state().items()}
        return carry, Prediction(obs, reward, terminated, success, torch.zeros_like(reward))

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass
