"""The parts of the env contract that every env needs: spaces, reading a reset request, reading actions."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from robo_rl.errors import UserError
from robo_rl.types import ControlSpec

if TYPE_CHECKING:
    from torch import Tensor

RESET_OPTIONS = ("reset_mask", "starts")


class ControlEnv(VectorEnv):
    """A vector env of the contract, for type checkers: what its spec and spaces are and what `reset`
    takes."""

    spec: ControlSpec
    single_observation_space: spaces.Dict
    observation_space: spaces.Dict
    single_action_space: spaces.Box
    action_space: spaces.Box

    if TYPE_CHECKING:

        def reset(
            self,
            *,
            seed: "int | list[int] | np.ndarray | None" = None,
            options: "dict[str, Any] | None" = None,
        ) -> tuple[dict[str, Any], dict[str, Any]]: ...

        def step(self, actions: Any) -> tuple[dict[str, Any], Any, Any, Any, dict[str, Any]]: ...


def observation_spaces(state_dim: int, num_envs: int, views: tuple[str, ...] = (), size: int = 64):
    """(single, batched) Dict spaces: `state` float32 [S], `image/<view>` uint8 [size, size, 3]."""

    def dict_space(lead: tuple[int, ...]) -> spaces.Dict:
        boxes: dict[str, spaces.Space] = {
            "state": spaces.Box(-np.inf, np.inf, (*lead, state_dim), np.float32)
        }
        boxes |= {f"image/{v}": spaces.Box(0, 255, (*lead, size, size, 3), np.uint8) for v in views}
        return spaces.Dict(boxes)

    return dict_space(()), dict_space((num_envs,))


def action_spaces(action_dim: int, num_envs: int) -> tuple[spaces.Box, spaces.Box]:
    """(single, batched) Box [-1, 1] float32 spaces of shapes [A] and [N, A]."""
    return (
        spaces.Box(-1.0, 1.0, (action_dim,), np.float32),
        spaces.Box(-1.0, 1.0, (num_envs, action_dim), np.float32),
    )


def read_actions(actions, num_envs: int, action_dim: int) -> np.ndarray:
    """Actions as float32 [N, A] clipped to [-1, 1]; UserError for another shape, a NaN or an infinity."""
    try:
        a = np.asarray(actions, np.float32)
    except (TypeError, ValueError) as e:
        raise UserError(f"actions must be numbers of shape ({num_envs}, {action_dim}): {e}") from None
    if a.shape != (num_envs, action_dim):
        raise UserError(f"actions must have shape ({num_envs}, {action_dim}), one row per env, got {a.shape}")
    # the first is one call, and may overflow
    if not math.isfinite(np.vdot(a, a)) and not np.isfinite(a).all():
        bad = np.flatnonzero(~np.isfinite(a).all(1)).tolist()
        raise UserError(f"actions must be finite, got NaN or infinity in env {', '.join(map(str, bad[:5]))}")
    a = np.maximum(a, -1.0)  # two calls on a small array take a third of the time of `clip`
    return np.minimum(a, 1.0, out=a)


def read_device_actions(actions, shape: tuple[int, ...], device) -> "Tensor":
    """Actions as float32 `shape` [N, A] on a device, as they came; UserError for another shape."""
    import torch

    try:
        a = torch.as_tensor(actions, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError) as e:
        raise UserError(f"actions must be numbers of shape {shape}: {e}") from None
    if a.shape != shape:
        raise UserError(f"actions must have shape {shape}, one row per env, got {tuple(a.shape)}")
    return a


def read_reset(
    seed, options: dict | None, num_envs: int, ready: "np.ndarray | None" = None
) -> tuple[np.ndarray, "np.ndarray | None"]:
    """(mask bool [N], starts int64 [N] or None) of a reset request, checked; entries outside mask are free.

    With `ready` bool[N], which envs have been reset before, the request must cover the others.
    """
    options = options or {}
    unknown = [k for k in options if k not in RESET_OPTIONS]
    if unknown:
        raise UserError(f"unknown reset option {unknown[0]!r}. Allowed: {', '.join(RESET_OPTIONS)}")
    mask = options.get("reset_mask")
    mask = np.ones(num_envs, bool) if mask is None else np.asarray(mask)
    if mask.shape != (num_envs,) or mask.dtype != bool:
        raise UserError(
            f"reset_mask must be bool of shape ({num_envs},), got {mask.dtype} of shape {mask.shape}"
        )
    starts = options.get("starts")
    if starts is not None:
        starts = np.asarray(starts)
        if starts.shape != (num_envs,) or starts.dtype.kind not in "iu":
            raise UserError(f"starts must be {num_envs} integers, got {starts.dtype} of shape {starts.shape}")
        if mask.any() and starts[mask].min() < 0:
            raise UserError(f"starts must be >= 0, got {starts[mask].min()}")
        starts = starts.astype(np.int64)
    if seed is not None:
        s = np.asarray(seed)
        if s.dtype.kind not in "iu" or s.shape not in ((), (num_envs,)):
            raise UserError(f"seed must be one integer or {num_envs} integers, got {seed!r}")
    if ready is not None and not (mask | ready).all():
        raise UserError("the first reset must reset every env: leave reset_mask out")
    return mask, starts
