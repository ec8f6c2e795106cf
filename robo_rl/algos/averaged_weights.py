"""An average of a policy's weights over its updates, beside those that go on learning (Polyak and Juditsky
1992).

    mean <- mean + w (theta - mean)      after each update

The weights of one update hold the noise of that update's rollouts; the average holds as much less of it as it
is long, and lags as much behind what is still being learnt.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class AveragedWeights:
    """Of `params`, which are those of its beginning at first."""

    def __init__(self, params: Sequence[Tensor]):
        self.params = params
        self.mean = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def add(self, weight: float) -> None:
        """Move the average by the share `weight` in (0, 1] towards the present weights; 1 forgets what was
        before."""
        for mean, p in zip(self.mean, self.params, strict=True):
            mean.lerp_(p, weight)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the weights that learn."""
        for mean, p in zip(self.mean, self.params, strict=True):
            learns = p.detach().clone()
            p.copy_(mean)
            mean.copy_(learns)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within it the policy has the averaged weights, and `mean` holds those that learn."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def state_dict(self) -> list[Tensor]:
        """What the policy does not hold: within `shown` the weights that learn, else the average."""
        return [mean.clone() for mean in self.mean]

    def load_state_dict(self, state: list[Tensor]) -> None:
        for mean, stored in zip(self.mean, state, strict=True):
            mean.copy_(stored)
