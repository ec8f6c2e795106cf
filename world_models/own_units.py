"""Data sets of any robot as a model takes them: actions in their own units become commands of -1 to 1, whose axes say what these mean.

    command = 2 (action - low) / (high - low) - 1        low .. high: the smallest and largest recorded action of the axis

A model's axes keep `low`, `high` and the unit, so other recordings, and policies that learnt in these units, are told in the model's
commands. Axes: `F` frames, `A` action.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from robo_rl.data.labels import need_units, units_of
from robo_rl.types import ActionAxis, ControlSpec
from world_models.recorded import control_of

STILL = 1e-3  # half the range of an axis that never moves, in its unit


def as_commands(datasets: Sequence, axes: tuple[ActionAxis, ...] = ()) -> list:
    """The data sets (`robo_rl.data.reader.Dataset`) with commands for actions; those that have them already stay as they are.

    axes: of a model, whose ranges hold; without them the ranges are of all of these. Where nobody stated the units, numbers within -1 to 1
    are taken for commands. UserError: they are larger than that.
    """
    own = [d for d in datasets if d.spec is None]
    if all(units_of(d.meta) is None and np.abs(d.action).max(initial=0) <= 1 for d in own):
        return list(datasets)
    same = bool(axes) and tuple(a.name for a in axes) == own[0].features.action
    if same:
        low, high = (np.array([getattr(a, k) for a in axes], np.float64) for k in ("low", "high"))
    else:
        low, high = (np.asarray(f([f(d.action, 0) for d in own], 0), np.float64) for f in (np.min, np.max))
        flat = high - low < 2 * STILL
        low, high = np.where(flat, (low + high) / 2 - STILL, low), np.where(flat, (low + high) / 2 + STILL, high)
    return [d if d.spec is not None else _told(d, low, high) for d in datasets]


def _told(d, low: np.ndarray, high: np.ndarray):
    units = need_units(d.meta)
    control = control_of(d.features, d.features.robot, int((d.to - d.from_).max()))
    axes = tuple(replace(a, unit=u, kind=k, low=float(x), high=float(y))
                 for a, u, k, x, y in zip(control.axes, units.unit, units.kind, low, high, strict=True))
    return replace(d, action=to_commands(d.action, axes), meta=replace(d.meta, spec=replace(control, axes=axes)))


def to_commands(actions: np.ndarray, axes: Sequence[ActionAxis]) -> np.ndarray:
    """[..., A] in the axes' units -> commands float32 [..., A]."""
    low, high = (np.array([getattr(a, k) for a in axes], np.float64) for k in ("low", "high"))
    return (2 * (actions - low) / (high - low) - 1).astype(np.float32)


def in_commands(policy, control: ControlSpec) -> Callable[[np.ndarray], np.ndarray]:
    """What makes commands of a model of a policy's actions: nothing, but where it learnt in the units of the model's data."""
    if not getattr(getattr(policy, "spec", None), "units", ()):
        return lambda actions: actions
    return lambda actions: to_commands(actions, control.axes)
