"""What every kind of world model is learnt with: recorded episodes, calibration, the state of an unfinished fit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from robo_rl.errors import UserError


def read(paths: Sequence[str], images: bool = False):
    """The data sets at `paths`, one after the other, as `world_models.recorded.Recorded`; UserError for what differs."""
    import numpy as np

    from robo_rl.data.reader import load
    from world_models.recorded import Recorded, control_of
    if not paths:
        raise UserError("name a data set: robo_rl wm train DATASET; record one with robo_rl collect --policy expert,random")
    sets = [load(p) for p in paths]
    parts = []
    for where, d in zip(paths, sets, strict=True):
        if bad := d.features.differences(sets[0].features):
            raise UserError(f"data set {where} differs from {paths[0]}: {'; '.join(bad)}. Train on sets of one env")
        control = d.spec or control_of(d.features, d.features.robot, int((d.to - d.from_).max()))
        if not images:
            control = replace(control, views=())
        if parts and (control.axes, control.period) != (parts[0].control.axes, parts[0].control.period):
            raise UserError(f"data set {where} differs from {paths[0]} in what its actions mean; train on sets of one env")
        pictures = {v: d.images(v) for v in d.views} if images else {}
        task = d.task_index[d.from_]
        last = {v: d.final_images(v) for v in pictures}
        pictured = np.logical_and.reduce([known for _, known in last.values()]) if last else None
        parts.append(Recorded(d.state, d.action, d.reward, d.from_, d.to, d.success, d.terminated, task, tuple(d.tasks),
                              control, pictures, d.final, {v: x for v, (x, _) in last.items()}, pictured))
    return parts[0] if len(parts) == 1 else joined(parts, np)


def joined(parts: Sequence, np):
    """Several recordings of one env as one."""
    tasks = tuple(dict.fromkeys(t for p in parts for t in p.tasks))
    offsets = np.cumsum([0, *(len(p.action) for p in parts[:-1])])

    def all_of(rows) -> "np.ndarray":
        return np.concatenate([rows(p, o) for p, o in zip(parts, offsets, strict=True)])
    return type(parts[0])(
        **{k: all_of(lambda p, o, k=k: getattr(p, k)) for k in ("state", "action", "reward", "success", "terminated", "final")},
        **{k: all_of(lambda p, o, k=k: getattr(p, k) + o) for k in ("first", "end")},
        task=all_of(lambda p, o: np.array([tasks.index(t) for t in p.tasks], np.int64)[p.task]), tasks=tasks,
        control=replace(parts[0].control, max_steps=max(p.control.max_steps for p in parts)),
        images={v: all_of(lambda p, o, v=v: p.images[v]) for v in parts[0].images},
        final_images={v: all_of(lambda p, o, v=v: p.final_images[v]) for v in parts[0].images},
        pictured=all_of(lambda p, o: p.pictured) if parts[0].images else None)


def world_spec(data, kind: str, where: str):
    """What a model of this data stands for."""
    from world_models.model import WorldSpec
    size = next(iter(data.images.values())).shape[1] if data.images else 0
    return WorldSpec(kind=kind, control=data.control, state=data.state.shape[1], image_size=size, tasks=data.tasks,
                     sparse=data.sparse, ends_on_success=bool(data.terminated[data.success].all()),
                     data=f"{where}: {len(data)} episodes, {len(data.action)} frames, {int(data.success.sum())} successful")


def calibrated(model, data, horizon: int, tolerance: float):
    """(the model with its horizon and threshold, the numbers behind them)."""
    import numpy as np

    from world_models.calibrate import calibrate, open_loop
    run = open_loop(model, data, min(horizon, int(data.lengths.max()) - 1))
    steps, threshold = calibrate(run, tolerance)
    if data.control.max_steps - steps <= 1 and steps >= data.lengths.max() - 1:
        steps = max(steps, min(data.control.max_steps, horizon))  # no longer episode exists
    model.spec = model.spec.calibrated(steps, threshold)
    with np.errstate(invalid="ignore"):
        n = (~np.isnan(run.error)).sum(0).clip(1)
        means = {k: np.nansum(getattr(run, k), 0) / n for k in ("error", "copied", "uncertainty")}
    seen = ~np.isnan(run.error)
    report = {k: v.tolist() for k, v in means.items()} | {
        "windows": n.tolist(), "horizon": steps, "threshold": threshold, "tolerance": tolerance,
        "within": float((run.uncertainty[seen] <= threshold).mean())}
    return model, report


def save_fit(fitter, path: Path, frames: int) -> None:
    """One file, whole or not at all."""
    import json

    from safetensors.torch import save

    from robo_rl import files
    from robo_rl.checkpoint import pack
    tensors: dict = {}
    tree = pack(fitter.state_dict(), tensors)
    files.write_bytes(path, save(tensors, {"tree": json.dumps(tree), "frames": str(frames)}))


def load_fit(fitter, path: Path, frames: int) -> None:
    """Go on from `save_fit`; UserError if the data grew or shrank since, or the file is damaged."""
    from safetensors import SafetensorError, safe_open

    from robo_rl import files
    from robo_rl.checkpoint import unpack
    try:
        with safe_open(path, "pt") as f:
            meta = f.metadata()
            tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 (no mapping)
        if int(meta["frames"]) != frames:
            raise UserError(f"the data has {frames} frames, it had {meta['frames']} when this run began; start a new one")
        fitter.load_state_dict(unpack(files.parse_json(meta["tree"], str(path), limit=files.FILE), tensors))
    except (SafetensorError, KeyError, TypeError, ValueError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"{path} is damaged or of another version ({e}); delete it to start the fit anew") from e
