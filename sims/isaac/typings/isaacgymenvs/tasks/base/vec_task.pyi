"""Stub of `VecTask`, the base of IsaacGymEnvs' tasks. `compute_observations` is the tasks' own, by custom."""

from typing import Any

from torch import Tensor

class VecTask:
    num_envs: int
    num_obs: int
    num_states: int
    num_acts: int
    num_actions: int
    observation_space: Any  # gym.spaces.Box of one env
    action_space: Any
    rl_device: str
    device: str
    dt: float
    control_freq_inv: int
    clip_obs: float
    clip_actions: float
    max_episode_length: float
    obs_buf: Tensor
    states_buf: Tensor
    rew_buf: Tensor
    reset_buf: Tensor
    timeout_buf: Tensor
    progress_buf: Tensor
    randomize_buf: Tensor
    extras: dict[str, Any]
    obs_dict: dict[str, Tensor]
    def __init__(
        self,
        config: dict[str, Any],
        rl_device: str,
        sim_device: str,
        graphics_device_id: int,
        headless: bool,
        virtual_screen_capture: bool = False,
        force_render: bool = False,
    ) -> None: ...
    def create_sim(self) -> None: ...
    def pre_physics_step(self, actions: Tensor) -> None: ...
    def post_physics_step(self) -> None: ...
    def compute_observations(self) -> Any: ...
    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Any]]: ...
    def reset(self) -> dict[str, Tensor]: ...
    def reset_idx(self, env_ids: Tensor) -> None: ...
    def reset_done(self) -> tuple[dict[str, Tensor], Tensor]: ...
    def zero_actions(self) -> Tensor: ...
    def get_state(self) -> Tensor: ...
    def render(self, mode: str = "rgb_array") -> Any: ...
    def set_train_info(self, env_frames: int) -> None: ...
    def get_env_state(self) -> Any: ...
    def set_env_state(self, env_state: Any) -> None: ...
