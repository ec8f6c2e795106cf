"""POISE: a baseline from the actor's own contexts, crossed between the episodes of a group (arXiv
2605.07579).

    phi_i = [context of the first decision; context of the last decision]      of episode i
    g     = ridge regression on the last groups: phi_i -> mean outcome of the *other* episodes of i's group
    b_i   = mean of g(phi_j) over the others j of its group,     A_i = r_i - b_i

b_i does not depend on what episode i did, so the gradient stays unbiased, and g was fitted before the group
was played. Total variance ~ within/B + (m/B) between: with such a baseline two episodes a start are best at a
fixed budget B.
Where we differ: the paper's features also hold statistics of the entropy.
"""

from collections import deque

import torch
from torch import Tensor


def episode_features(context: Tensor, mask: Tensor) -> Tensor:
    """phi [N, 2C] of contexts [T,N,C] and the decisions that were made, `mask` [T,N]; first and last of each
    episode."""
    t, n = mask.shape
    last = (mask * torch.arange(1, t + 1, device=mask.device)[:, None]).argmax(0)
    first = mask.int().argmax(0)
    column = torch.arange(n, device=mask.device)
    return torch.cat([context[first, column], context[last, column]], -1)


def mean_of_others(x: Tensor) -> Tensor:
    """[Q,G] -> [Q,G]: of the other members of the group."""
    return (x.sum(1, keepdim=True) - x) / (x.shape[1] - 1)


class CrossedBaseline:
    """The probe g and its sliding buffer: the features and targets of the last `keep` rollouts. Where it was
    never fitted g is 0."""

    def __init__(self, keep: int = 8, ridge: float = 1.0):
        self.ridge = ridge
        self.buffer: deque[tuple[Tensor, Tensor]] = deque(maxlen=keep)

    def advantage(self, features: Tensor, outcome: Tensor) -> Tensor:
        """A [Q,G] of episodes with features [Q*G, D] and `outcome` [Q,G], by the probe as it was before them;
        then they join it."""
        g = self.predict(features).view_as(outcome)
        self.buffer.append(
            (features.detach().double().cpu(), mean_of_others(outcome).flatten().double().cpu())
        )
        return outcome - mean_of_others(g)

    def predict(self, features: Tensor) -> Tensor:
        """g [N] of features [N,D]: ridge regression with a free constant on standardised features."""
        x = (
            torch.cat([f for f, _ in self.buffer])
            if self.buffer
            else torch.zeros(0, features.shape[1], dtype=torch.float64)
        )
        if not len(x) or x.shape[1] != features.shape[1]:
            return torch.zeros(len(features), device=features.device)
        y = torch.cat([target for _, target in self.buffer])
        mean, std = x.mean(0), x.std(0, unbiased=False).clamp(min=1e-6)
        z = (x - mean) / std
        w = torch.linalg.solve(
            z.T @ z + self.ridge * torch.eye(z.shape[1], dtype=z.dtype), z.T @ (y - y.mean())
        )
        return (((features.detach().double().cpu() - mean) / std) @ w + y.mean()).float().to(features.device)

    def state_dict(self) -> dict:
        return {"buffer": [list(pair) for pair in self.buffer]}

    def load_state_dict(self, state: dict) -> None:
        self.buffer.clear()
        self.buffer.extend((f, y) for f, y in state["buffer"])
