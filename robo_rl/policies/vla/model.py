"""What `VlaPolicy` asks of a model's network: a trunk that reads the prefix once, an expert that reads actions at every denoise step.

Trunk and expert are modules of their own, called through `forward` alone: so a trunk is frozen, an expert is copied or trained by
itself, and hooks (FSDP2, LoRA, checkpointing) see every call. Axes: B rows, V views, P tokens of the prompt, S state as wide as the
model takes it, H steps, W action entries of a step, the model's own width (an env's A <= W; the others are padding).
"""

from typing import Protocol

from torch import Tensor, nn

from robo_rl.policies.context import Context


class Trunk(Protocol):
    """Reads images, prompt and state; nothing of the actions."""

    def __call__(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor) -> Context:
        """images [B,V,3,h,w] in -1..1, image_mask bool [B,V], tokens int64 [B,P], token_mask bool [B,P], state [B,S], normalised
        and padded -> the context; `pooled` [B,context_size] is the masked mean of what the last layer gets after the trunk's last
        norm, float32. Ours also take `drop` and `length` (`network.VlaModel.prefix`)."""
        ...


class Expert(Protocol):
    """Velocity of noised actions."""

    def __call__(self, context: Context, x: Tensor, t: Tensor) -> Tensor:
        """x [B,H,W] and its time t [B] -> velocity [B,H,W] (`robo_rl.sampling`: noise at t = 1)."""
        ...


class FlowModel(Protocol):
    """A network with a trunk and an expert; also an nn.Module, whose forward nobody calls."""

    trunk: nn.Module  # a `Trunk`
    expert: nn.Module  # an `Expert`
    context_size: int
    horizon: int  # H
    action_width: int  # W
    state_width: int  # S
    image_size: int  # h = w
    views: int  # how many at most
