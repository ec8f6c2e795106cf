"""The parts of Isaac's vector envs that the adapter uses, so that anything with these parts can stand in for
them.

Read from the sources of IsaacGymEnvs (`tasks/base/vec_task.py`) and Isaac Lab 2.3 (`envs/direct_rl_env.py`,
`envs/manager_based_env.py`). Axes: `N` envs, `A` actions, `O` observations; tensors live on the env's device.
"""

from typing import Any, Protocol

import torch


class IsaacGymVecTask(Protocol):
    """A task of IsaacGymEnvs: one step for all envs, a 4-tuple, quaternions xyzw.

    The usual task resets the envs that ended in the *next* step, after its physics and before its
    observations, so the observation of the step that ends an episode is that episode's last. Some tasks reset
    at once instead; `progress_buf` is 0 then.
    """

    num_envs: int
    num_obs: int
    num_actions: int
    rl_device: str
    clip_obs: float
    control_freq_inv: int
    dt: float  # physics period [s]; one control step is dt * control_freq_inv
    max_episode_length: float  # the task ends an episode after max_episode_length - 1 steps
    obs_buf: torch.Tensor  # [N, O]
    reset_buf: torch.Tensor  # int64 [N], 1: reset in the next step; ones at first
    progress_buf: torch.Tensor  # int64 [N], steps in this episode

    def step(
        self, actions: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Actions [N, A] -> ({"obs": [N, O]}, rewards [N], reset_buf [N], extras with "time_outs" [N])."""
        ...

    def reset_idx(self, env_ids: torch.Tensor) -> None:
        """Start new episodes; reads torch's global random state."""

    def compute_observations(self) -> Any:
        """Fill obs_buf from the present state of every env."""


class IsaacLabEnv(Protocol):
    """What `DirectRLEnv` and `ManagerBasedRLEnv` of Isaac Lab share: a 5-tuple, quaternions wxyz.

    Envs that end are reset inside `step`, before the observations: their last observation is never returned.
    """

    num_envs: int
    device: str
    step_dt: float  # control period [s]
    max_episode_length: int
    single_action_space: Any

    def step(
        self, action: torch.Tensor
    ) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Actions [N, A] -> ({"policy": [N, O], ...}, rewards [N], terminated [N], time_outs [N], extras)."""
        ...

    def reset(
        self, seed: "int | None" = None, options: "dict | None" = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start all envs again; a seed sets the global random states. ManagerBased takes `env_ids` as
        well."""
        ...

    def close(self) -> None: ...
