"""An average of a policy's weights over its updates, beside those that go on learning (Polyak and Juditsky
1992).

    mean <- mean + w (theta - mean)      after each update

The weights of one update hold the noise of that update's rollouts; the average holds as much less of it as it
is long, and lags as much behind what is still being learnt. Of weights in 16 bits it is in float32: what a
short step adds to it is less than they can hold, and it would stand still.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class AveragedWeights:
    """Of `params`, which are those of its beginning at first."""

    def __init__(self, params: Sequence[Tensor]):
        self.params = params
        self.mean = [p.detach().clone() if p.element_size() >= 4 else p.detach().float() for p in params]
        # of those in 16 bits the weights that learn, while the average is in their place
        self.held: list[Tensor | None] = [None] * len(self.mean)

    @torch.no_grad()
    def add(self, weight: float) -> None:
        """Move the average by the share `weight` in (0, 1] towards the present weights; 1 forgets what was
        before."""
        for mean, p in zip(self.mean, self.params, strict=True):
            mean.lerp_(p.to(mean.dtype), weight)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the weights that learn; in 16 bits the average is rounded, and kept as it
        is."""
        for i, (mean, p) in enumerate(zip(self.mean, self.params, strict=True)):
            learns, held = p.detach().clone(), self.held[i]
            if mean.dtype == p.dtype:
                p.copy_(mean)
                mean.copy_(learns)
            else:
                p.copy_(mean if held is None else held)
                self.held[i] = learns if held is None else None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within it the policy has the averaged weights, and `state_dict` those that learn."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def resume(self, state: list) -> None:
        """The policy's weights are the average, as a checkpoint that was made within `shown` has them; those
        of its `state` learn on."""
        self.load_state_dict(state)
        self.swap()

    def state_dict(self) -> list:
        """What the policy does not hold: within `shown` the weights that learn, else the average; of those in
        16 bits [the weights that learn, or None; the average]."""
        return [
            mean.clone() if mean.dtype == p.dtype else [None if held is None else held.clone(), mean.clone()]
            for mean, p, held in zip(self.mean, self.params, self.held, strict=True)
        ]

    def load_state_dict(self, state: list) -> None:
        for i, (mean, p, stored) in enumerate(zip(self.mean, self.params, state, strict=True)):
            if mean.dtype == p.dtype:
                mean.copy_(stored)
                continue
            # a checkpoint from before the average was in float32 has the weights that learn alone
            held, kept = stored if isinstance(stored, list) else (stored, p)
            self.held[i] = None if held is None else held.to(p)
            mean.copy_(kept)
