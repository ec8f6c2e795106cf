"""The two Isaac interfaces brought to one: step all envs, reset all, reset some."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from robo_rl.errors import UserError
from sims.isaac.protocols import IsaacGymVecTask, IsaacLabEnv


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all envs, tensors [N, ...] on the device."""

    obs: torch.Tensor  # [N, O]
    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor  # never where terminated
    success: torch.Tensor
    renewed: torch.Tensor  # the obs of this env is already the first of its next episode


class GymPort:
    """An IsaacGymEnvs task (`IsaacGymVecTask`)."""

    def __init__(self, task: IsaacGymVecTask):
        _require(task, IsaacGymVecTask, "IsaacGymEnvs VecTask")
        self._task = task
        self.num_envs, self.action_dim, self.obs_dim = task.num_envs, task.num_actions, task.num_obs
        self.device = torch.device(task.rl_device)
        self.period = task.dt * task.control_freq_inv
        self.max_steps = max(1, int(task.max_episode_length) - 1)

    def step(self, actions: torch.Tensor) -> Step:
        obs, reward, reset, extras = self._task.step(actions)
        reset = reset.bool()
        timed_out = _flag(extras.get("time_outs"), reset) & reset
        return Step(
            obs["obs"],
            reward.float(),
            reset & ~timed_out,
            timed_out,
            _success(extras, reset),
            reset & (self._task.progress_buf == 0).to(self.device),
        )

    def reset_all(self, seed: "int | None") -> torch.Tensor:
        if seed is not None:  # the task draws from these, as IsaacGymEnvs' own set_seed
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
        return self.reset_some(torch.arange(self.num_envs, device=self.device))

    def reset_some(self, ids: torch.Tensor) -> torch.Tensor:
        """As the task does between two steps: reset, then observe; no physics runs in between. obs [N, O]."""
        task = self._task
        ids = ids.to(task.reset_buf.device)
        task.reset_buf[ids] = 1
        task.reset_idx(ids)
        task.reset_buf[ids] = 0
        task.progress_buf[ids] = 0
        task.compute_observations()
        return task.obs_buf.clamp(-task.clip_obs, task.clip_obs).to(self.device)

    def close(self) -> None:
        """Isaac Gym has no way to close a simulation before the process ends."""


class LabPort:
    """A DirectRLEnv or ManagerBasedRLEnv of Isaac Lab (`IsaacLabEnv`)."""

    def __init__(self, env: IsaacLabEnv):
        _require(env, IsaacLabEnv, "Isaac Lab env")
        self._env = env
        self.num_envs, self.device = env.num_envs, torch.device(env.device)
        self.action_dim = int(np.prod(env.single_action_space.shape))
        self.obs_dim = int(self._policy(env.reset()[0]).shape[1])
        self.period = env.step_dt
        # Short of the env's own limit (L, or L - 1 by its tasks' common test), so that the time limit is the
        # adapter's and the last observation is there to bootstrap from.
        self.max_steps = max(1, int(env.max_episode_length) - 2)

    def step(self, actions: torch.Tensor) -> Step:
        obs, reward, terminated, truncated, extras = self._env.step(actions)
        terminated, truncated = terminated.bool(), truncated.bool()
        return Step(
            self._policy(obs),
            reward.float(),
            terminated.clone(),
            truncated & ~terminated,
            _success(extras, terminated),
            terminated | truncated,
        )

    def reset_all(self, seed: "int | None") -> torch.Tensor:
        return self._policy(self._env.reset(seed=seed)[0])

    def reset_some(self, ids: torch.Tensor) -> torch.Tensor:
        """obs [N, O] after the envs `ids` began again; no physics runs."""
        env: Any = self._env
        if hasattr(env, "observation_manager"):
            return self._policy(env.reset(env_ids=ids)[0])
        env._reset_idx(ids)  # DirectRLEnv.reset, for some envs
        env.scene.write_data_to_sim()
        env.sim.forward()
        return self._policy(env._get_observations())

    def close(self) -> None:
        self._env.close()

    def _policy(self, obs: dict[str, Any]) -> torch.Tensor:
        group = obs["policy"]
        if isinstance(group, dict):  # terms that were not concatenated
            return torch.cat([x.reshape(self._env.num_envs, -1) for x in group.values()], 1).float()
        return group.reshape(self._env.num_envs, -1).float()


def _require(env: object, protocol: type, what: str) -> None:
    members = [
        *protocol.__annotations__,
        *(k for k, v in vars(protocol).items() if callable(v) and k[0] != "_"),
    ]
    missing = [m for m in members if not hasattr(env, m)]
    if missing:
        raise UserError(f"{type(env).__name__} is no {what}: it lacks {', '.join(missing)}")


def _flag(x: "torch.Tensor | None", like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if x is None else x.to(like.device).bool()


def _success(extras: dict[str, Any], like: torch.Tensor) -> torch.Tensor:
    """extras["success"] or ["is_success"] of shape [N]; False where the task reports neither."""
    x = extras.get("success", extras.get("is_success"))
    return _flag(x if isinstance(x, torch.Tensor) and x.shape == like.shape else None, like)
