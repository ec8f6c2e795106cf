"""`robo_rl wm tune MODEL DATASET --out RUN`: fine-tune a video model so that what it imagines decodes to motion that the arm
can follow (EVA)."""

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import tyro

from robo_rl.errors import UserError, in_range
from world_models.options import TuneOptions

FRESH = 10**6  # added to a seed: random numbers of the inverse model that measures


@dataclass(frozen=True, kw_only=True)
class WmTune:
    """Fine-tune a video model with EVA; OUT/model is the tuned one, OUT/tune.json says what it did."""

    model: tyro.conf.Positional[str]
    """Folder of a video model, or the run of robo_rl wm train --kind video that made it."""
    dataset: tyro.conf.Positional[str]
    """Recorded episodes (LeRobot v3) to tune on, one in ten held out; those the model learnt from will do."""
    out: str = ""
    """Run folder; empty: <MODEL>-eva."""
    check: str = ""
    """Measure on these recorded episodes; empty: on the held-out ones of DATASET."""
    windows: int = 64
    """Recorded stretches to measure on."""
    seed: int = 0
    torch_threads: int = 1
    json: bool = False
    fit: TuneOptions = field(default_factory=TuneOptions)

    def __post_init__(self) -> None:
        in_range("--windows", self.windows, 4, 10**4)
        in_range("--seed", self.seed, 0, 2**31 - 1)
        in_range("--torch-threads", self.torch_threads, 1, 4096)


def check_windows(args: WmTune, model, data, steps: int):
    """(whole windows of `steps` steps of episodes that neither the model nor the tuning saw, std of the states)."""
    from robo_rl.cli.wm_eval import check_fits, read_windows, unseen
    from robo_rl.data.reader import load

    where = args.check or args.dataset
    dataset = load(where)
    check_fits(model.spec, dataset.meta, where)
    used = {data.state[i].tobytes() for i in data.first[~data.held]}
    fresh = unseen(model, dataset) & np.array([dataset.state[i].tobytes() not in used for i in dataset.from_])
    fresh &= (dataset.to - dataset.from_) > steps
    if not fresh.any():
        raise UserError(f"{where} has no episode of more than {steps} steps that the model did not learn from; record some with "
                        "another --seed of robo_rl collect --obs rgb and name them with --check")
    scale = dataset.state.std(0)
    return read_windows(dataset, model.spec.control.views, np.flatnonzero(fresh), args.windows, steps, args.seed), \
        np.where(scale > 1e-5, scale, 0)


def compare(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> dict:
    """Means over windows and the paired bootstrap interval of after - before; errors by horizon."""
    from robo_rl.stats import bootstrap_mean

    def row(a: np.ndarray, b: np.ndarray) -> dict:
        return {"before": float(a.mean()), "after": float(b.mean()), "change": bootstrap_mean(b - a)._asdict()}
    return {k: row(a, after[k]) if a.ndim == 1 else
            {f"{h} steps": row(a[:, h - 1], after[k][:, h - 1]) for h in (1, 2, 4, 8, 16) if h <= a.shape[1]}
            | {"mean": row(a.mean(1), after[k].mean(1))}
            for k, a in before.items()}


def run(args: WmTune) -> int:
    """Learn two inverse models, tune, measure before and after, write OUT/model, OUT/tune.json and OUT/run.json."""
    import torch

    from robo_rl import files
    from robo_rl.cli import wm
    from robo_rl.log import Progress
    from robo_rl.provenance import Stop, git_hash, versions
    from world_models import model as worlds
    from world_models import recorded
    from world_models import video_tune as vt

    torch.set_num_threads(args.torch_threads)
    model = worlds.load(args.model)
    if model.spec.kind != "video":
        raise UserError(f"{args.model} is a {model.spec.kind} model; EVA tunes the frames of a video model: robo_rl wm train DATASET "
                        "--kind video")
    run_of = worlds.find(args.model)
    folder = Path(args.out or f"{run_of.parent if run_of.name == 'model' else run_of}-eva")
    if (folder / "run.json").exists() or (folder / "model").exists():
        raise UserError(f"{folder} already holds a run; choose another --out")
    data, began = wm.read((args.dataset,), images=True), time.monotonic()
    recorded.check(data, args.dataset)
    recorded.check_fits(model.spec, data, args.dataset)
    windows, scale = check_windows(args, model, data, vt.STEPS)
    with files.lock(folder), Progress() as progress:
        progress.say(f"run {folder}: two inverse-dynamics models of {len(data.action)} frames first")
        inverses, errors, n = {}, {}, args.fit.inverse
        progress.start("inverse", 2 * n, "updates")
        for i, (name, seed, width) in enumerate((("tuned_with", args.seed, 32), ("other", args.seed + FRESH, 48))):
            inverses[name], errors[name] = vt.fit_inverse(data, n, seed, width, tick=lambda k, i=i: progress.update(i * n + k))
        before = vt.measure(model, windows, inverses, scale, args.seed)
        progress.start("eva", args.fit.updates, "updates")

        def tick(update: int, parts: dict[str, float]) -> bool:
            progress.update(update, note=f"frames {parts['frames']:.4f}" + (f" score {parts['eva']:.3f}" if "eva" in parts else ""))
            return not stop.asked
        with Stop() as stop:
            tuned = vt.tune(model, data, inverses["tuned_with"], args.fit, args.seed, tick)
        progress.close()
        if tuned is None:
            progress.say(f"stopped; nothing was written to {folder}")
            return stop.code
        after = vt.measure(tuned, windows, inverses, scale, args.seed)
        doc = {"model": args.model, "data": args.dataset, "check": args.check, "windows": len(windows), "steps": vt.STEPS,
               "options": asdict(args.fit), "inverse": errors, "change": compare(before, after),
               "recorded": vt.references(windows, inverses, model.spec.control), "seconds": time.monotonic() - began}
        tuned.spec = tuned.proprio.spec = replace(model.spec, data=f"{model.spec.data}; tuned with EVA on {args.dataset}")
        tuned.frames = model.frames
        worlds.save(tuned, folder / "model")
        files.write_json(folder / "tune.json", doc)
        files.write_json(folder / "run.json", {
            "name": folder.name, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "version": versions().get("robo_rl", ""),
            "git": git_hash(), "seed": args.seed, "config": asdict(args), "versions": versions()})
        print(json.dumps(files.plain(doc), indent=1) if args.json else table(doc, folder))
    return 0


def table(doc: dict, folder: Path) -> str:
    """The numbers as text."""
    lines = [f"{doc['windows']} held-out windows of {doc['steps']} steps, before -> after, change [95 % of windows drawn again]"]

    def row(name: str, r: dict, digits: int) -> str:
        c = r["change"]
        return (f"  {name:<34}{r['before']:8.{digits}f} -> {r['after']:.{digits}f}   {c['value']:+.{digits}f} "
                f"[{c['low']:+.{digits}f}, {c['high']:+.{digits}f}]")
    change = doc["change"]
    for name, words in (("other", "an inverse model it never saw"), ("tuned_with", "the inverse model it was tuned with")):
        e, r = doc["inverse"][name], doc["recorded"]
        lines.append(f"decoded by {words} (R2 {e['r2']:.2f} on held-out frames); of recorded frames and of the commands themselves:")
        for k, label in (("score", "EVA score"), ("any", "beyond speed or acceleration"), ("arm", "  of the arm's axes alone"),
                         ("arm_jerk", "  beyond jerk, of the arm's axes"),
                         ("command_error", "RMS against the commands")):
            more = f"   ({r[f'{name}/{k}']:.3f}, {r[f'commands/{k}']:.3f})"
            lines.append(row(label, change[f"{name}/{k}"], 3) + more)
    for k, rows in change.items():
        if k == "state" or k.startswith("image/"):
            lines += [row(f"error of {k}, {h}", r, 4) for h, r in rows.items()]
    return "\n".join([*lines, f"use it: robo_rl wm eval {folder} DATASET"])
