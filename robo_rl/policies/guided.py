"""A policy's chunk that agrees with what is left of the chunk before it.

Guided, without being taught: inference-time inpainting of a flow,

    v <- v - g(t) J^T [W (Y - x0)],   x0 = x - t v,   J = dx0/dx

with the true product with J^T, by autograd. Source: Black et al. 2025, arXiv 2506.07339, algorithm 1, in our
convention of time.

Taught (`--policy.commit`): the rows that will have run are given, clean, at every step, and the others are
drawn to follow them.
Source: training-time real-time chunking, arXiv 2512.05964. There a time of 0 says which rows those are, to a
network that has a time for each, as ours with `--policy.window` and the vision-language-action models have. A
small policy without it is told by `Context.committed`.
"""

import numpy as np
import torch

from robo_rl.errors import UserError
from robo_rl.policies.policy import PolicyBase
from robo_rl.policies.protocol import Obs


def guided_chunk(
    policy, obs: Obs, generator: torch.Generator, actions: np.ndarray, weights: np.ndarray, gains: list[float]
) -> torch.Tensor:
    """Whole chunk [H, A] in the env's units, of one observation. actions [H, A]: to agree with; weights [H]:
    where; gains [K].

    UserError: the prefix is no chunk of it."""
    h, a = policy.options.horizon, policy.spec.action
    if actions.shape != (h, a) or weights.shape != (h,):
        raise UserError(
            f"a prefix has {h} rows of {a} numbers and a weight each, got {actions.shape} and {weights.shape}"
        )
    with torch.no_grad():
        context = policy.encode(obs)
        embedded, times = policy.head.embed(context), policy.head.steps(policy.features)
        goal = _goal(policy, context, actions)
    where = torch.zeros(1, h, policy.width)
    where[..., :a] = torch.as_tensor(weights, dtype=torch.float32)[:, None]
    where = where.flatten(1).to(goal.device)
    x = torch.randn(1, policy.chunk, generator=generator).to(goal.device)
    for k, (keep, step) in enumerate(policy.plain):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = policy.head(embedded, x, times[k])
            x0 = out if policy.clean else x - policy.times[k] * out
            [back] = torch.autograd.grad(x0, x, where * (goal - x0.detach()))
        x = keep * x.detach() + step * out.detach() + gains[k] / len(gains) * back
    with torch.no_grad():
        return policy.whole_chunk(x.view(1, h, policy.width), obs)[0]


def committed_chunk(
    policy, obs: Obs, generator: torch.Generator, actions: np.ndarray, count: int
) -> torch.Tensor:
    """Whole chunk [H, A] in the env's units, of one observation, whose first `count` rows are those of
    `actions` [H, A].

    UserError: the policy was not taught with so many rows given, or they are no chunk of it."""
    if not 0 <= count <= policy.options.commit:
        raise UserError(
            f"this policy was taught with at most {policy.options.commit} rows given (--policy.commit), got "
            f"{count}"
        )
    h, a = policy.options.horizon, policy.spec.action
    if actions.shape != (h, a):
        raise UserError(f"a prefix has {h} rows of {a} numbers, got {actions.shape}")
    with torch.no_grad():
        context = policy.encode(obs)
        goal = _goal(policy, context, actions)
        context, given = policy.commit(context, torch.full((1,), count, device=goal.device))
        embedded, times = policy.head.embed(context), policy.head.steps(policy.features)
        x = torch.randn(1, policy.chunk, generator=generator).to(goal.device)
        for (keep, step), time in zip(policy.plain, times, strict=True):
            x = torch.where(given, goal, x)
            x = keep * x + step * policy.head(embedded, x, time)
        return policy.whole_chunk(torch.where(given, goal, x).view(1, h, policy.width), obs)[0]


def _goal(policy, context, actions: np.ndarray) -> torch.Tensor:
    """Actions [H,A] as the chain has them [1,D], where the policy is: less what they are relative to."""
    rows = torch.as_tensor(actions, dtype=torch.float32)[None].to(policy.action_norm.device)
    return policy.clean_chunk(rows if context.origin is None else rows - context.origin[:, None])


def plain_chunks(policy, obs: Obs, generator: torch.Generator) -> torch.Tensor:
    """Whole chunks [B, H, A] in the env's units, without exploration."""
    with torch.no_grad():
        x = policy.act(obs, generator, explore=False).x0
        if isinstance(policy, PolicyBase):
            return policy.whole_chunk(x, obs)
        return policy.action_norm.inverse(x[..., : policy.spec.action])
