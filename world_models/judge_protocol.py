"""What a judge of success is: the steps it is shown (`Seen`), the frames that led to them (`Clips`), and the
model's own head."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Seen:
    """n steps to judge: the observations before and after them, the instructions str[n], the actions [n,A],
    the model's own probability of success [n], and for a judge of K frames `clip` {key: [n,K,...]}: what was
    observed up to after the step, oldest first."""

    before: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]
    task: np.ndarray
    action: np.ndarray
    chance: np.ndarray
    clip: Mapping[str, np.ndarray] = field(default_factory=dict)


class SuccessJudge(Protocol):
    """Probability of success [n]; asked every `every` steps of an episode and where it may end. A judge with
    `frames` K > 1 sees clips of K frames, `skip` steps apart."""

    @property
    def every(self) -> int: ...

    def __call__(self, seen: Seen) -> np.ndarray: ...


@dataclass(frozen=True)
class Head:
    """The model's own head."""

    every: int = 1

    def __call__(self, seen: Seen) -> np.ndarray:
        return seen.chance


class Clips:
    """The last K frames of N episodes, `skip` steps apart, for a judge that asks for them; owns `kept` {key:
    [N,K-1,...]}, oldest first.

    An episode shorter than that begins with copies of its first frame.
    """

    def __init__(self, judge: SuccessJudge, obs: Mapping[str, np.ndarray]):
        asks: Any = judge
        self.frames, self.skip = getattr(asks, "frames", 1), getattr(asks, "skip", 1)
        self.kept: dict[str, np.ndarray] = {}
        if self.frames > 1:
            self.kept = {
                k: np.repeat(np.asarray(v)[:, None], self.frames - 1, 1)
                for k, v in obs.items()
                if k.startswith("image/")
            }

    def begin(self, ids: np.ndarray, obs: Mapping[str, np.ndarray]) -> None:
        """Episodes `ids` begin with `obs` {key: [n,...]}."""
        for k, v in self.kept.items():
            v[ids] = np.asarray(obs[k])[:, None]

    def add(self, obs: Mapping[str, np.ndarray], steps: np.ndarray) -> None:
        """Step `steps` [N] of the episodes is about to be made from `obs` {key: [N,...]}."""
        if not self.kept:
            return
        rows = np.flatnonzero((steps % self.skip == 0) & (steps > 0))
        for k, v in self.kept.items():
            v[rows] = np.concatenate([v[rows, 1:], np.asarray(obs[k])[rows, None]], 1)

    def of(self, rows: np.ndarray, after: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Clips {key: [n,K,...]} of episodes `rows` that end with `after` {key: [N,...]}; {} where one frame
        is enough."""
        return {
            k: np.concatenate([v[rows], np.asarray(after[k])[rows, None]], 1) for k, v in self.kept.items()
        }


def clip_rows(row: np.ndarray, first: np.ndarray, frames: int, skip: int) -> np.ndarray:
    """int64[n,K]: rows of the frames of a recording that `Clips` would hold once step row - first of an
    episode was made, the last of them row + 1 (of `Recorded.extended`); `first` is the episode's first
    row."""
    made = row - first  # steps before this one
    newest = made - made % skip
    back = newest[:, None] - skip * np.arange(frames - 2, -1, -1)
    return np.concatenate([first[:, None] + np.maximum(back, 0), row[:, None] + 1], 1)
