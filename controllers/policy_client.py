"""Who is asked for chunks of actions: in this thread, or over a connection (`remote`)."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from controllers.chunking import Prefix

Observation = dict[str, np.ndarray]  # state float32 [S], image/<view> uint8 [h, w, 3]


class PolicyClient(Protocol):
    """Requests chunks of a policy, which may come later; `blocks`: they come at once, and the loop waits for
    them."""

    blocks: bool

    def ask(self, obs: Observation, t0: float, prefix: Prefix | None = None) -> None:
        """Request a chunk for the observation of time t0 [s]; one request at a time. prefix: what it must
        agree with."""

    def poll(self, now: float) -> tuple[np.ndarray, float] | None:
        """(rows [E, A], t0) of the chunk, once; None until it has come. UserError: the policy is lost."""

    def close(self) -> None: ...


class InProcessPolicy:
    """A policy in this thread: act(observation), or act(observation, prefix) where a prefix was given.
    `delay(k)` [s] of its k-th answer is simulated latency."""

    def __init__(self, act: Callable[..., np.ndarray], delay: "Callable[[int], float] | None" = None):
        self.act, self.blocks, self.delay, self.count = act, delay is None, delay or (lambda k: 0.0), 0
        self.answer: tuple[np.ndarray, float, float] | None = None

    def ask(self, obs: Observation, t0: float, prefix: Prefix | None = None) -> None:
        rows = self.act(obs) if prefix is None else self.act(obs, prefix)
        self.answer = np.array(rows), t0, t0 + self.delay(self.count)
        self.count += 1

    def poll(self, now: float) -> tuple[np.ndarray, float] | None:
        if self.answer is None or now < self.answer[2] - 1e-9:
            return None
        (rows, t0, _), self.answer = self.answer, None
        return rows, t0

    def close(self) -> None:
        self.answer = None
