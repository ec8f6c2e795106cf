"""Data sets of any robot as a model takes them: actions in their own units become commands of -1 to 1, whose
axes say what these mean.

    command = 2 (action - low) / (high - low) - 1        low .. high: the smallest and largest recorded action
                                                         of the axis

A model's axes keep `low`, `high` and the unit, so other recordings, and policies that learnt in these units,
are told in the model's commands. Axes: `F` frames, `A` action.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from robo_rl.data.labels import need_units, units_of
from robo_rl.errors import UserError, quoted
from robo_rl.types import ActionAxis, to_commands
from world_models.model import WorldSpec
from world_models.options import PICTURED
from world_models.own_pictures import as_squares, unpadded
from world_models.recorded import control_of

FAR = 10.0  # times the model's range: degrees taken for radians are 57
NEAR = 1 / 30  # of the model's largest number: radians taken for degrees are 1/57
STILL = 1e-3  # half the range of an axis that never moves, in its unit


def as_commands(datasets: Sequence, axes: tuple[ActionAxis, ...] = ()) -> list:
    """The data sets (`robo_rl.data.reader.Dataset`) with commands for actions; those that have them already
    stay as they are.

    axes: of a model, whose ranges hold; without them the ranges are of all of these. Where nobody stated the
    units, numbers within -1 to 1 are taken for commands. UserError: they are larger than that.
    """
    own = [d for d in datasets if d.spec is None]
    if all(units_of(d.meta) is None and np.abs(d.action).max(initial=0) <= 1 for d in own):
        return list(datasets)
    same = bool(axes) and tuple(a.name for a in axes) == own[0].features.action
    if same:
        low, high = ends_of(axes)
    else:
        low, high = (np.asarray(f([f(d.action, 0) for d in own], 0), np.float64) for f in (np.min, np.max))
        _check_together(own, low, high)
        flat = high - low < 2 * STILL
        low, high = (
            np.where(flat, (low + high) / 2 - STILL, low),
            np.where(flat, (low + high) / 2 + STILL, high),
        )
    told = [d if d.spec is not None else _told(d, low, high) for d in datasets]
    if same:
        for d, new in zip(datasets, told, strict=True):
            _check_range(d, new.action, axes)
    return told


def as_model_has_them(dataset, spec: WorldSpec) -> Any:
    """One data set with the commands of a model, and pictures of its size."""
    return as_squares(as_commands([dataset], spec.control.axes)[0], spec.image_size, spec.resized)


def _check_range(d, commands: np.ndarray, axes: Sequence[ActionAxis]) -> None:
    """Raise UserError where most axes of recorded `commands` [F,A] go FAR times as far as the model's, or
    their actions NEAR times as far from 0."""
    far, low, high = np.abs(commands).max(0, initial=0), *ends_of(axes)
    if np.median(far) > FAR or is_near(d.action, low, high):
        i = int((far if np.median(far) > FAR else np.ptp(d.action, axis=0)).argmax())
        known = f"the model's recordings from {low[i]:.3g} to {high[i]:.3g}"
        raise other_units(
            d, i, axes[i].unit, known, f"learn a model of them: robo_rl wm train {quoted(d.meta.root)}"
        )


def _check_together(own: Sequence, low: np.ndarray, high: np.ndarray) -> None:
    """Raise UserError where one of several data sets of the same stated units goes NEAR times as far from 0
    as `low` .. `high` [A] of all."""
    units = [units_of(d.meta) for d in own]
    if units[0] is None or units.count(units[0]) < len(units):
        return
    for d in own:
        if is_near(d.action, low, high):
            i = int(np.ptp(d.action, axis=0).argmax())
            known = f"all data sets together from {low[i]:.3g} to {high[i]:.3g}"
            raise other_units(d, i, units[0].unit[i], known, "take data sets of the same units")


def other_units(d, i: int, unit: str, known: str, then: str) -> UserError:
    """Of a data set whose action `i` is in other units than `known` ones."""
    x, root = d.action[:, i], d.meta.root
    return UserError(
        f"{root}: action {d.features.action[i]!r} goes from {x.min():.3g} to {x.max():.3g} {unit}, in "
        f"{known}, and most axes are as far off: these are other units. State those that they are: "
        f"robo_rl data label {quoted(root)} --units …, and {then}"
    )


def is_near(action: np.ndarray, low: np.ndarray, high: np.ndarray) -> bool:
    """Whether most axes that move in recorded actions [F,A] stay within NEAR of the largest number of `low`
    .. `high` [A]."""
    if not len(action):
        return False
    most = np.maximum(np.abs(low), np.abs(high))
    moves = (np.ptp(action, axis=0) > STILL) & (most > STILL)
    return bool(moves.any() and np.median(np.abs(action).max(0)[moves] / most[moves]) < NEAR)


def _told(d, low: np.ndarray, high: np.ndarray):
    units = need_units(d.meta)
    control = control_of(d.features, d.features.robot, int((d.to - d.from_).max()))
    axes = tuple(
        replace(a, unit=u, kind=k, low=float(x), high=float(y))
        for a, u, k, x, y in zip(control.axes, units.unit, units.kind, low, high, strict=True)
    )
    commands = to_commands(d.action, *ends_of(axes))
    return replace(d, action=commands, meta=replace(d.meta, spec=replace(control, axes=axes)))


def ends_of(axes: Sequence[ActionAxis]) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) float64 [A]: what commands of -1 and 1 are."""
    return np.array([a.low for a in axes], np.float64), np.array([a.high for a in axes], np.float64)


# ---- policies that learnt in these units -------------------------------------------------------------------

Observe = Callable[[dict], dict]
Command = Callable[[np.ndarray], np.ndarray]


def translate(policy, spec: WorldSpec) -> tuple[Observe, Command]:
    """(what a policy is shown of a model's observation, what its actions are as the model's commands): both
    as they are, but for a policy that learnt in the units of recordings. It sees pictures in the shape that
    was recorded, without the model's padding.

    UserError: the policy's cameras, state, axes or units are not the model's.
    """
    own = getattr(policy, "spec", None)
    if own is None:
        return _same, _same
    check_policy(own, spec)
    shapes = (
        dict(zip(spec.control.views, spec.pictures, strict=False))
        if own.fit and hasattr(policy, "act")
        else {}
    )

    def observe(obs: dict) -> dict:
        return obs | {
            k: unpadded(obs[k], *shapes[v]) for v in own.views if v in shapes and (k := f"image/{v}")
        }

    return observe if shapes else _same, (
        lambda actions: to_commands(actions, *ends_of(spec.control.axes))
    ) if own.units else _same


def _same(x):
    return x


def check_policy(own: Any, spec: WorldSpec) -> None:
    """Raise UserError for what a policy sees and commands (`robo_rl.policies.ObsSpec`) that a model does not
    give and take."""
    c = spec.control
    if own.views and not c.views:
        raise UserError(
            f"the policy sees the cameras {', '.join(own.views)}, and a {spec.kind} model predicts states "
            f"alone; learn one of pictures: robo_rl wm train DATASET --kind {', '.join(PICTURED[:-1])} or "
            f"{PICTURED[-1]}; or a policy of the state alone: robo_rl train … --data.cameras none"
        )
    if lost := [v for v in own.views if v not in c.views]:
        raise UserError(
            f"the policy sees the cameras {', '.join(own.views)}, the world model has {', '.join(c.views)}: "
            f"nothing shows it {', '.join(lost)}; learn both from the same cameras, by the same names "
            "(--data.cameras)"
        )
    for what, mine, model in (
        ("state size is", own.state, spec.state),
        ("action size is", own.action, len(c.axes)),
        ("action axes are", own.action_names or c.action_names, c.action_names),
        *((f"{a.name} is in", u, a.unit) for a, u in zip(c.axes, own.units, strict=False)),
        ("image size is", own.image_size, spec.image_size if own.views and not own.fit else own.image_size),
    ):
        mine, model = (", ".join(x) if isinstance(x, tuple) else x for x in (mine, model))
        if mine != model:
            raise UserError(
                f"the policy's {what} {mine}, the world model's {model}: take a policy that learnt from "
                "recordings like the model's, or learn a model from the policy's own: robo_rl wm train "
                "DATASET"
            )
