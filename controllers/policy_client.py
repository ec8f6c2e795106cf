"""Who is asked for chunks of actions: in this thread, or over a connection (`remote`)."""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from controllers.chunking import Prefix
from controllers.schedule import Latency

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


class TimedPolicy:
    """A policy that blocks, and in `latency` how long each of its answers took [s] by `clock`."""

    blocks = True

    def __init__(self, policy: PolicyClient, clock: Callable[[], float] = time.perf_counter):
        assert policy.blocks
        self.policy, self.clock, self.latency = policy, clock, Latency(256)

    def ask(self, obs: Observation, t0: float, prefix: Prefix | None = None) -> None:
        began = self.clock()
        self.policy.ask(obs, t0, prefix)
        self.latency.add(self.clock() - began)

    def poll(self, now: float) -> tuple[np.ndarray, float] | None:
        return self.policy.poll(now)

    def close(self) -> None:
        self.policy.close()
