"""A flow policy's chunk, guided to agree with what is left of the chunk before it: inference-time inpainting.

    v <- v - g(t) J^T [W (Y - x0)],   x0 = x - t v,   J = dx0/dx

with the true product with J^T, by autograd. Source: Black et al. 2025, arXiv 2506.07339, algorithm 1, in our convention of time.
"""

import numpy as np
import torch

from robo_rl.errors import UserError
from robo_rl.policies.policy import ChainPolicy
from robo_rl.policies.protocol import Obs


def guided_chunk(policy, obs: Obs, generator: torch.Generator, actions: np.ndarray, weights: np.ndarray, gains: list[float]
                 ) -> torch.Tensor:
    """Whole chunk [H, A] in the env's units, of one observation. actions [H, A]: to agree with; weights [H]: where; gains [K].

    UserError: the policy is no flow, or the prefix no chunk of it."""
    if not isinstance(policy, ChainPolicy) or policy.diffusion:
        raise UserError("--chunking rtc guides flow policies alone; this one is none: use --chunking blend")
    h, a = policy.options.horizon, policy.spec.action
    if actions.shape != (h, a) or weights.shape != (h,):
        raise UserError(f"a prefix has {h} rows of {a} numbers and a weight each, got {actions.shape} and {weights.shape}")
    with torch.no_grad():
        context = policy.encode(obs)
        embedded, times = policy.head.embed(context), policy.head.steps(policy.features)
        goal = policy.clean_chunk(torch.as_tensor(actions, dtype=torch.float32)[None])
    where = torch.zeros(1, h, policy.width)
    where[..., :a] = torch.as_tensor(weights, dtype=torch.float32)[:, None]
    where = where.flatten(1)
    x = torch.randn(1, policy.chunk, generator=generator)
    for k, (keep, step) in enumerate(policy.plain):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = policy.head(embedded, x, times[k])
            x0 = out if policy.clean else x - policy.times[k] * out
            [back] = torch.autograd.grad(x0, x, where * (goal - x0.detach()))
        x = keep * x.detach() + step * out.detach() + gains[k] / len(gains) * back
    return policy.action_norm.inverse(x.view(h, policy.width)[:, :a])


def plain_chunk(policy, obs: Obs, generator: torch.Generator) -> torch.Tensor:
    """Whole chunk [H, A] in the env's units, of one observation, without exploration."""
    with torch.no_grad():
        return policy.action_norm.inverse(policy.act(obs, generator, explore=False).x0[0, :, :policy.spec.action])
