"""Where a policy computes, and in what precision: tensors are moved in one place.

Noise is drawn on the CPU wherever a policy computes (`robo_rl.noise`): a run draws the same numbers on every
device, and sending them waits for nothing.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from robo_rl.rollout import Rollout


def device_of(policy) -> torch.device:
    """Where a policy's weights are."""
    return policy.action_norm.device


def sampled_on(device: torch.device, sample: Callable[..., tuple[dict[str, Tensor], Tensor, Tensor]]):
    """A sampler of demonstrations whose (obs, chunk, mask) are on `device`."""
    if device.type == "cpu":
        return sample

    def there(size: int, generator: torch.Generator):
        obs, chunk, mask = sample(size, generator)
        return {k: v.to(device) for k, v in obs.items()}, chunk.to(device), mask.to(device)

    return there


def moved(rollout: Rollout, device: torch.device) -> Rollout:
    """A rollout whose tensors are on `device`; itself if they are."""
    if rollout.rewards.device == device:
        return rollout

    def to(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: to(v) for k, v in x.items()}
        return x.to(device, non_blocking=True) if isinstance(x, Tensor) else x

    return replace(
        rollout, **{f.name: to(getattr(rollout, f.name)) for f in fields(rollout) if f.name != "stats"}
    )
