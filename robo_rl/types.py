"""What every env says of itself, and the axis legend used in names, annotations and docstrings.

Axes: `N` envs, `T` decisions, `H` steps in a chunk, `E` executed steps (E <= H), `A` action, `S` state,
`K` denoise steps, `F` log-prob factors of a chunk, `G` group, `B` batch. A *decision* is one chunk,
a *step* one control period, an *update* one call of a method's rule on a batch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

Each = Callable[[str, Sequence, str], Iterable]  # (stage, items, unit) -> the items: `log.Progress.each`


@dataclass(frozen=True, slots=True)
class ActionAxis:
    """What a command of -1 .. 1 on this axis means: `low` .. `high` in `unit`."""

    name: str
    unit: str  # "m", "rad", "N m", "m/s", "1" ...
    low: float
    high: float
    kind: Literal["delta", "absolute", "rate", "effort"]
    frame: str = ""  # "base", "ee", "joint"


@dataclass(frozen=True, slots=True)
class ControlSpec:
    """`env.spec`: which sim and task this is, how it is commanded and how long an episode may last."""

    sim: str
    task: str
    axes: tuple[ActionAxis, ...]
    period: float  # control period [s]
    max_steps: int  # control steps until `truncated`
    state_names: tuple[str, ...] = ()  # one per state dimension, where known
    views: tuple[str, ...] = ()  # image/<view> keys of the observation, without the prefix

    @property
    def action_names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes)

    @property
    def id(self) -> str:  # Gymnasium's repr of a vector env asks for it
        return f"{self.sim}:{self.task}"


def to_commands(actions: "np.ndarray", low: "np.ndarray", high: "np.ndarray") -> "np.ndarray":
    """Actions [..., A] in units of their own -> commands float32: 2 (action - low) / (high - low) - 1, where
    low, high [A] are what -1 and 1 mean."""
    return (2 * (actions - low) / (high - low) - 1).astype("float32")


def task_names(env) -> tuple[str, ...]:
    """The tasks that an env of the contract plays, one or several."""
    return tuple(getattr(env, "task_names", (env.spec.task,)))


def has_success(env) -> bool:
    """Whether the task of this env knows success; the success in the info of one that does not is always
    False. An env whose steps have yet to say it counts as one that does."""
    return getattr(env, "reports_success", True) is not False


def silently(stage: str, items: Sequence, unit: str) -> Iterable:
    """`items` without a word (`Each`)."""
    return items
