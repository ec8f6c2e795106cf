"""`isaacgym.gymtorch`: Isaac Gym's tensor descriptors as torch tensors and back, without a copy."""

import torch

from .gymapi import Tensor

def wrap_tensor(gym_tensor: Tensor) -> torch.Tensor: ...
def unwrap_tensor(torch_tensor: torch.Tensor) -> Tensor: ...
