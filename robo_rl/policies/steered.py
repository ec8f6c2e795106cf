"""A flow policy whose initial noise another network chooses: the acting policy of DSRL (arXiv 2506.15799).

    w = reach tanh(N(mean(s), std(s)^2))        a = the end of the flow's ODE that begins at w

The flow is the supervised one and stays as it is. Axes as in `policies.offpolicy`; N = R W entries of noise,
R the rows of a chunk, or one that all of them begin with.
"""

import torch
from torch import Tensor

from robo_rl.options import PolicyOptions
from robo_rl.policies.context import Context
from robo_rl.policies.offpolicy import OwnUnits, SquashedHead, flow_from
from robo_rl.policies.policy import ChainPolicy, Chunk, Obs, ObsSpec
from robo_rl.sampling import Noise, randn


class SteeredPolicy(OwnUnits, ChainPolicy):
    """The flow is `head`, what chooses its noise `steer`. Until `steered` is set it is the plain flow,
    which with `steer_row` begins with one row, too.

    Noise is written in units of its reach, -1..1, as `steer` gives it."""

    steered: Tensor

    def __init__(self, options: PolicyOptions, spec: ObsSpec):
        super().__init__(options, spec)
        self.size = options.execute * spec.action
        rows = 1 if options.steer_row else options.horizon
        self.noise_size = rows * self.width
        self.steer = SquashedHead(
            self.context_size, self.noise_size, options.critic_hidden, options.critic_layers, options.init_std
        )
        self.register_buffer("steered", torch.zeros((), dtype=torch.bool))

    def begin(self, noise: Tensor) -> Tensor:
        """Noise [B,N] -> where the chain begins, [B,D]."""
        x = self.options.steer_reach * noise
        return x if self.noise_size == self.chunk else x.repeat(1, self.chunk // self.noise_size)

    def plain_noise(self, count: int, generator: Noise) -> Tensor:
        """Noise [B,N] as the flow was taught with: N(0, 1), in units of the reach."""
        x = randn(generator, count, self.noise_size).to(self.times.device)
        return x / self.options.steer_reach

    def follow(self, context: Context, noise: Tensor) -> Tensor:
        """Noise [B,N] of contexts -> the actions [B,D] that the flow makes of it; differentiable."""
        return flow_from(self, context, self.begin(noise), 1)[:, 0]

    @torch.no_grad()
    def act(self, obs: Obs, generator: Noise, explore: bool = True) -> Chunk:
        context = self.encode(obs)
        seen = context.pooled
        noise = (
            self.steer.sample(seen, generator)[0] if self.steered else self.plain_noise(len(seen), generator)
        )
        actions = self.follow(context, noise)
        actions = actions.view(len(context), self.options.execute, -1)
        return Chunk(actions, self.action_norm(actions), actions.new_empty(len(actions), 0), {})
