"""Data sets on the disk as one `Recorded`: what a model learns from."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from robo_rl.errors import UserError, quoted
from world_models.options import PICTURED

if TYPE_CHECKING:
    from robo_rl.data.reader import Dataset
    from world_models.model import WorldSpec
    from world_models.recorded import Recorded


def read(
    paths: Sequence[str],
    images: bool = False,
    image_size: int = 0,
    model: "WorldSpec | None" = None,
    cameras: str = "",
) -> "Recorded":
    """The data sets at `paths`, one after the other; UserError for what differs, and where their pictures do
    not fit into memory. image_size: of the squares that pictures become (0: square ones stay). model: what
    the model stands for that they are for, as whose commands actions in their own units are told
    (`own_units`), of whose size pictures are made and of whose cameras. cameras: those to read, with commas
    between; "": all."""
    from robo_rl.data.reader import load
    from robo_rl.files import require_memory
    from robo_rl.log import Progress
    from world_models.own_pictures import as_squares
    from world_models.own_units import as_commands
    from world_models.recorded import Recorded, control_of
    from world_models.windows import units_differ

    if not paths:
        raise UserError(
            "name a data set: robo_rl wm train DATASET; record one with robo_rl collect --policy "
            "expert,random"
        )
    sets = [load(p) for p in paths]
    if images:
        sets = [_with_cameras(d, p, cameras, model) for d, p in zip(sets, paths, strict=True)]
    parts = []
    read_of = [replace(d.features, phases=False, **({} if images else {"views": ()})) for d in sets]
    for where, features in zip(paths, read_of, strict=True):
        if bad := features.differences(read_of[0]):
            raise UserError(
                f"data set {where} differs from {paths[0]}: {'; '.join(bad)}. Train on sets of one env"
            )
    shapes = tuple((h, w) for _, h, w in sets[0].features.views)
    size, resize = image_size, image_size > 0
    if model is not None:
        size, resize = model.image_size, model.resized
    if not images or all(h == w and (h == size or not resize) for h, w in shapes):
        shapes = ()
    _tell_unread(paths, sets, images)
    commanded = as_commands(sets, () if model is None else model.control.axes)
    squares = [as_squares(d, size, resize) for d in commanded]
    if images:
        require_memory(
            "learning from the pictures of " + " ".join(map(str, paths)),
            sum(len(d.action) * 3 * h * w for d in squares for h, w in d.views.values()),
            "--image-size N makes them smaller; or take fewer episodes (robo_rl data split)",
        )
    for where, d in zip(paths, squares, strict=True):
        control = d.spec or control_of(d.features, d.features.robot, int((d.to - d.from_).max()))
        if not images:
            control = replace(control, views=())
        if parts and (control.axes, control.period) != (parts[0].control.axes, parts[0].control.period):
            bad = units_differ(parts[0].control.axes, control.axes, "there", "here")
            raise UserError(
                f"data set {where} differs from {paths[0]} in what its actions "
                f"mean{': ' + bad[0] if bad else ''}; train on sets of one env; units that are wrong are "
                f"stated anew: robo_rl data label {quoted(where)} --units …"
            )
        with Progress(patience=2) as progress:
            pictures = {v: d.images(v, progress.each) for v in d.views} if images else {}
        task = d.task_index[d.from_]
        last = {v: d.final_images(v) for v in pictures}
        pictured = np.logical_and.reduce([known for _, known in last.values()]) if last else None
        parts.append(
            Recorded(
                d.state,
                d.action,
                d.reward,
                d.from_,
                d.to,
                d.success,
                d.terminated,
                task,
                tuple(d.tasks),
                control,
                pictures,
                d.final,
                {v: x for v, (x, _) in last.items()},
                pictured,
                shapes,
                sets[0].spec is None and d.spec is not None,
            )
        )
    return parts[0] if len(parts) == 1 else joined(parts)


def _tell_unread(paths: Sequence[str], sets: "Sequence[Dataset]", images: bool) -> None:
    """Warn of cameras that a model of states does not look through, and of episodes that nobody judged beside
    judged ones."""
    if not images and (
        seen := next(((p, d.views) for p, d in zip(paths, sets, strict=True) if d.views), None)
    ):
        warnings.warn(
            f"data set {seen[0]} has cameras, {', '.join(seen[1])}, and a model of this kind learns "
            f"its {len(sets[0].features.state)} state numbers alone: of what only pictures show it knows "
            f"nothing. With pictures: --kind {', '.join(PICTURED[:-1])} or {PICTURED[-1]}",
            stacklevel=3,
        )
    for where in (p for p, d in zip(paths, sets, strict=True) if not d.is_judged):
        if any(d.is_judged for d in sets):
            warnings.warn(
                f"data set {where}: nobody said which of its episodes succeeded, so all count as failures "
                f"beside those of the others; say it: robo_rl data label {quoted(where)} --success …",
                stacklevel=3,
            )


def _with_cameras(dataset: "Dataset", where: str, cameras: str, model: "WorldSpec | None") -> "Dataset":
    """What is read of a data set's cameras: those of the model that it is for, where it has them all (else
    `check_fits` tells what it lacks), and without a model those that were chosen."""
    from world_models.own_pictures import chosen, seen_by

    there = tuple(dataset.views)
    views = chosen(cameras, there, where) if model is None else model.control.views
    return seen_by(dataset, views) if set(views) <= set(there) else dataset


def joined(parts: Sequence):
    """Several recordings of one env as one."""
    tasks = tuple(dict.fromkeys(t for p in parts for t in p.tasks))
    offsets = np.cumsum([0, *(len(p.action) for p in parts[:-1])])

    def all_of(rows) -> np.ndarray:
        return np.concatenate([rows(p, o) for p, o in zip(parts, offsets, strict=True)])

    return type(parts[0])(
        **{
            k: all_of(lambda p, o, k=k: getattr(p, k))
            for k in ("state", "action", "reward", "success", "terminated", "final")
        },
        **{k: all_of(lambda p, o, k=k: getattr(p, k) + o) for k in ("first", "end")},
        task=all_of(lambda p, o: np.array([tasks.index(t) for t in p.tasks], np.int64)[p.task]),
        tasks=tasks,
        control=replace(parts[0].control, max_steps=max(p.control.max_steps for p in parts)),
        images={v: all_of(lambda p, o, v=v: p.images[v]) for v in parts[0].images},
        final_images={v: all_of(lambda p, o, v=v: p.final_images[v]) for v in parts[0].images},
        pictured=all_of(lambda p, o: p.pictured) if parts[0].images else None,
        shapes=parts[0].shapes,
        own=parts[0].own,
    )
