"""Who decides that a step in a model succeeded: the model's head, a classifier, or a vision-language model behind HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Seen:
    """n steps to judge: the observations after them, the instructions str[n], the actions [n,A] and the model's own
    probability of success [n]."""

    obs: Mapping[str, np.ndarray]
    task: np.ndarray
    action: np.ndarray
    chance: np.ndarray


class Judge(Protocol):
    """Probability of success [n]; asked every `every` steps of an episode and at its time limit."""

    every: int

    def __call__(self, seen: Seen) -> np.ndarray: ...


@dataclass(frozen=True)
class Head:
    """The model's own reward head."""

    every: int = 1

    def __call__(self, seen: Seen) -> np.ndarray:
        return seen.chance


def make(name: str) -> Judge:
    """The judge of `--judge`: head."""
    from robo_rl.errors import choose
    choose("judge", name, ("head",))
    return Head()
