"""`isaaclab.envs`: quaternions are wxyz; envs that end are reset inside `step`."""

from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

VecEnvObs: TypeAlias = dict[str, Tensor | dict[str, Tensor]]  # "policy" and, for asymmetric critics, "critic"

class _Env:
    cfg: Any
    scene: Any
    sim: Any
    num_envs: int
    device: str
    physics_dt: float
    step_dt: float
    max_episode_length_s: float
    max_episode_length: int
    episode_length_buf: Tensor
    common_step_counter: int
    obs_buf: VecEnvObs
    reward_buf: Tensor
    reset_buf: Tensor
    reset_terminated: Tensor
    reset_time_outs: Tensor
    extras: dict[str, Any]
    single_observation_space: Any
    single_action_space: Any
    observation_space: Any
    action_space: Any
    render_mode: str | None
    def __init__(self, cfg: Any, render_mode: str | None = None, **kwargs: Any) -> None: ...
    def step(self, action: Tensor) -> tuple[VecEnvObs, Tensor, Tensor, Tensor, dict[str, Any]]: ...
    @staticmethod
    def seed(seed: int = -1) -> int: ...
    def render(self, recompute: bool = False) -> np.ndarray | None: ...
    def close(self) -> None: ...
    def _reset_idx(self, env_ids: Tensor) -> None: ...

class DirectRLEnv(_Env):
    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[VecEnvObs, dict]: ...
    def _setup_scene(self) -> None: ...
    def _pre_physics_step(self, actions: Tensor) -> None: ...
    def _apply_action(self) -> None: ...
    def _get_observations(self) -> VecEnvObs: ...
    def _get_states(self) -> Tensor | None: ...
    def _get_rewards(self) -> Tensor: ...
    def _get_dones(self) -> tuple[Tensor, Tensor]: ...

class ManagerBasedRLEnv(_Env):
    observation_manager: Any
    action_manager: Any
    reward_manager: Any
    termination_manager: Any
    command_manager: Any
    event_manager: Any
    curriculum_manager: Any
    def reset(
        self, seed: int | None = None, env_ids: Tensor | None = None, options: dict[str, Any] | None = None
    ) -> tuple[VecEnvObs, dict]: ...
    def reset_to(
        self, state: dict, env_ids: Tensor | None, seed: int | None = None, is_relative: bool = False
    ) -> tuple[VecEnvObs, dict]: ...
