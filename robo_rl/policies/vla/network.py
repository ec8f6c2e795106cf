"""A trunk and an expert made into one model: prefix, velocity, the K-step sample and the supervised loss map.

Trunk and expert are modules of their own, called through `forward` alone: a trunk is frozen, an expert is
copied or trained by itself, and hooks (FSDP2, LoRA, checkpointing) see every call.
Axes: B rows, V views, P words of the prompt, S state as wide as the model takes it, H steps, W action entries
of a step, the model's own width (an env's A <= W; the others are padding).
"""

import torch
from torch import Tensor, nn

from robo_rl.policies.context import Context
from robo_rl.policies.vla.groot import GrootConfig, GrootExpert, GrootTrunk
from robo_rl.policies.vla.groot_n17 import GrootN17Config, GrootN17Trunk
from robo_rl.policies.vla.openvla import Filler, OpenVlaConfig, OpenVlaTrunk, filled
from robo_rl.policies.vla.pi import PiConfig, PiExpert, PiTrunk
from robo_rl.policies.vla.pi_fast import EmbeddedPrefix, PiFastConfig, TokenWriter, logits
from robo_rl.policies.vla.smolvla import SmolVlaConfig, SmolVlaExpert, SmolVlaTrunk
from robo_rl.policies.vla.xvla import XVlaConfig, XVlaExpert, XVlaTrunk
from robo_rl.sampling import time_grid

VlaConfig = PiConfig | SmolVlaConfig | XVlaConfig | GrootConfig | PiFastConfig | OpenVlaConfig


class VlaModel(nn.Module):
    """The model of a configuration, with torch's default weights: `make.make_model` gives it those of a seed,
    `make.load_model` those of a checkpoint.

    `trunk(images, image_mask, tokens, token_mask, state, drop=True, length=None)` is `prefix`,
    `expert(context, x, t)` is `velocity`.
    `context_size`: width of `Context.pooled`, the mean over real tokens of what the last trunk layer gets,
    after the trunk's norm.
    """

    def __init__(self, config: VlaConfig):
        super().__init__()
        self.config = config
        self.trunk: nn.Module
        self.expert: nn.Module
        if isinstance(config, PiConfig):
            self.trunk, self.expert = PiTrunk(config), PiExpert(config)
        elif isinstance(config, XVlaConfig):
            self.trunk, self.expert = XVlaTrunk(config), XVlaExpert(config)
        elif isinstance(config, GrootConfig):
            self.trunk = GrootN17Trunk(config) if isinstance(config, GrootN17Config) else GrootTrunk(config)
            self.expert = GrootExpert(config)
        elif isinstance(config, PiFastConfig):
            self.trunk, self.expert = EmbeddedPrefix(config), TokenWriter(config)
        elif isinstance(config, OpenVlaConfig):
            self.trunk, self.expert = OpenVlaTrunk(config), Filler(config)
        else:
            self.trunk, self.expert = SmolVlaTrunk(config), SmolVlaExpert(config)
        self.context_size = (
            config.context_size if isinstance(config, PiFastConfig | OpenVlaConfig) else config.trunk.width
        )
        self.horizon, self.views = config.horizon, config.views
        self.action_width, self.state_width = config.action_width, config.state_width
        self.image_size = config.vision.image

    def prefix(
        self,
        images: Tensor,
        image_mask: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        state: Tensor,
        *,
        drop: bool = True,
        length: int | None = None,
    ) -> Context:
        """images [B,V,3,h,w] in -1..1, image_mask bool [B,V], tokens int64 [B,P], token_mask bool [B,P],
        state [B,S] -> context.

        `drop`: views and words that are masked are not computed (same result but for rounding). `length`:
        tokens of the prefix in any batch, padded and cut to; for shapes, and rounding, that do not depend on
        the other rows. ValueError: a row that has neither image nor word, or does not fit into `length`.
        """
        return self.trunk(images, image_mask, tokens, token_mask, state, drop=drop, length=length)

    def velocity(self, context: Context, x: Tensor, t: Tensor) -> Tensor:
        """x [B,H,W] at times t [B] -> velocity float32 [B,H,W], in the convention of `robo_rl.sampling`."""
        return self.expert(context, x, t)

    def sample(self, context: Context, noise: Tensor, steps: int) -> Tensor:
        """The chunk [B,H,W] that `steps` Euler steps make of noise [B,H,W]: x <- x - (t - t') v.

        X-VLA's own sampler goes back to the first noise at every step: x <- t' noise + (1 - t') clean. Euler
        is the same for one step.
        """
        x, grid = noise.float(), time_grid(steps).tolist()
        for t, after in zip(grid[:-1], grid[1:], strict=True):
            v = self.velocity(context, x, torch.full((len(x),), t, device=x.device))
            if isinstance(self.config, XVlaConfig):
                x = after * noise.float() + (1 - after) * (x - t * v)
            else:
                x = x - (t - after) * v
        return x

    def loss_map(self, context: Context, actions: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """(v(x_t, t) - (noise - actions))² [B,H,W] of chunks [B,H,W] with noise [B,H,W] at times t [B]."""
        at = t[:, None, None]
        return (self.velocity(context, at * noise + (1 - at) * actions, t) - (noise - actions)).square()


class TokenVlaModel(VlaModel):
    """A model that writes its actions as tokens (pi0-FAST): `logits` in place of a velocity."""

    trunk: EmbeddedPrefix
    expert: TokenWriter

    def logits(self, context: Context, tokens: Tensor, allowed: Tensor | None = None) -> Tensor:
        """See `pi_fast.logits`."""
        return logits(self.trunk, self.expert, context, tokens, allowed)

    def token_losses(self, context: Context, tokens: Tensor, mask: Tensor) -> Tensor:
        """Cross-entropy of every token but the first, [B,S-1], 0 where `mask` bool [B,S] is False."""
        scores = self.logits(context, tokens[:, :-1])
        losses = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return losses.view(mask[:, 1:].shape) * mask[:, 1:]


class OneStepVlaModel(VlaModel):
    """A model that gives all actions in one pass (OpenVLA-OFT): logits of their bins, or the actions."""

    trunk: OpenVlaTrunk
    expert: Filler

    def actions(self, context: Context, horizon: int = 0) -> Tensor:
        """See `openvla.Filler`; `horizon` 0: the model's."""
        return filled(self.trunk, self.expert, context, horizon or self.horizon)


def network_of(config: VlaConfig) -> VlaModel:
    """The model of a configuration."""
    if isinstance(config, OpenVlaConfig):
        return OneStepVlaModel(config)
    return TokenVlaModel(config) if isinstance(config, PiFastConfig) else VlaModel(config)
