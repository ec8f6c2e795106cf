"""How far a world model can be trusted, measured along recorded episodes: open-loop error, obedience, reward,
success, uncertainty, executability. What policies do in it and in the simulator:
`robo_rl.experiment.world_model`."""

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import torch

from robo_rl import files
from robo_rl.data.reader import load as load_data
from robo_rl.errors import quoted
from robo_rl.log import Progress, begun
from robo_rl.stats import success_rate
from world_models import baselines, conformal, eva, gate_report, instructions, trust
from world_models.calibrate import spread
from world_models.imagine import CHUNK, open_loop
from world_models.model import WorldSpec
from world_models.options import WorldEvalConfig
from world_models.own_units import as_commands, as_model_has_them
from world_models.units import errors_in_units
from world_models.windows import check_dataset, foreign_to, read_windows, unseen

LOOK, FRAMES = 64, 4096  # most windows of a model with images, and frames in all: they are held in memory
FEW = 20  # episodes, below which a note says that intervals over them are too narrow
SLACK = 0.03  # by which the coverage of a bound may miss what was promised


# ---- against recorded episodes -----------------------------------------------------------------------------


def measure_open_loop(
    model, w, scale: np.ndarray, config: WorldEvalConfig, tick: Callable[[int], None] = lambda done: None
) -> tuple[dict, dict]:
    """-> (document, arrays for the page) of a model along the windows."""
    batch = 16 if w.images else 256
    p = open_loop(model, w.start, w.actions, batch, config.seed, tick)
    steps = w.actions.shape[1]
    errors = {
        "state": (
            trust.state_error(p.state, w.state, scale),
            trust.state_error(trust.hold_last(w.start["state"], steps), w.state, scale),
        )
    }
    for v in w.images:
        errors[f"image/{v}"] = (
            trust.image_error(p.images[v], w.images[v]),
            trust.image_error(trust.hold_last(w.start[f"image/{v}"], steps), w.images[v]),
        )
    doc: dict = {"open_loop": {}}
    for name, (mine, held) in errors.items():
        own, base, less = compare_errors(mine, held, w)
        doc["open_loop"][name] = {"model": own, "hold_last": base} | less
    everything = np.concatenate(
        [np.isfinite(x).ravel() for x in (p.state, p.reward, p.success, p.uncertainty)]
    )
    doc["finite"] = bool(everything.all())
    control = model.spec.control
    doc["units"] = {
        name: {"unit": unit, "model": table_of(trust.by_horizon(e, w.seen, w.episode))}
        for name, (unit, e) in errors_in_units(control.sim, control.state_names, p.state, w.state).items()
    }
    doc["detail"] = {v: trust.fine_detail(p.images[v], w.images[v], w.seen) for v in w.images}
    doc |= {
        "success": judged(p.success, w.success, w),
        "terminal": judged(p.terminal, w.terminal, w),
        "reward": measure_reward(p.reward, w),
    }
    return doc, {"errors": errors, "predicted": p}


def table_of(rows: dict) -> dict[int, dict]:
    """{horizon: Interval} as a document has it."""
    return {h: i._asdict() for h, i in rows.items()}


def measure_baselines(
    mine: np.ndarray,
    w,
    scale: np.ndarray,
    predicted: dict[str, np.ndarray],
    settings: dict[str, str],
    transitions: int,
) -> dict:
    """Errors of the model, [B,T], beside those of what `baselines.predict` gave; "best": that with the least
    error at each horizon, standing still among them, and whether the model is surely better than it."""
    still = {"standing still": trust.hold_last(w.start["state"], mine.shape[1])}
    out: dict = {"settings": settings, "transitions": transitions, "rows": {}, "best": {}}
    for name, states in (predicted | still).items():
        own, other, less = compare_errors(mine, trust.state_error(states, w.state, scale), w)
        ratio = {h: own[h]["value"] / other[h]["value"] if other[h]["value"] > 0 else None for h in own}
        out["rows"][name] = {"error": other, "ratio": ratio} | less
    for h in next(iter(out["rows"].values()))["error"]:
        name = min(out["rows"], key=lambda n: out["rows"][n]["error"][h]["value"])
        best = out["rows"][name]
        out["best"][h] = {
            "name": name,
            "ratio": best["ratio"][h],
            "better": best["difference"][h]["high"] < 0,
            "worse": best["difference"][h]["low"] > 0,
        }
    return out


def judged(probability: np.ndarray, true: np.ndarray, w) -> dict:
    """Does the window succeed (or end) within its steps: counts of windows, and the share that does by the
    greatest probability of a step. An episode counts as one in the interval, whatever the number of its
    windows."""
    said, did = np.where(w.made, probability, 0).max(1), (true & w.made).any(1)
    c = trust.confusion(said > 0.5, did)
    bins = trust.reliability(said, did)
    return asdict(c) | {
        "accuracy": success_rate((said > 0.5) == did, w.episode)._asdict(),
        "precision": c.precision.value,
        "recall": c.recall.value,
        "calibration_error": trust.calibration_error(bins),
        "bins": [asdict(b) for b in bins],
        "auroc": trust.auroc(said, did),
    }


def measure_reward(reward: np.ndarray, w) -> dict:
    """Error of the predicted reward, and the confusion of "above the middle of what was recorded"."""
    mine, true = reward[w.made], w.reward[w.made]
    spread = float(true.var())
    middle = (true.min() + true.max()) / 2
    return {
        "rmse": float(np.sqrt(np.square(mine - true).mean())),
        "r2": 1 - float(np.square(mine - true).mean()) / spread if spread > 0 else None,
        "confusion": asdict(trust.confusion(mine > middle, true > middle)) if spread > 0 else None,
    }


def measure_doubt(uncertainty: np.ndarray, error: np.ndarray, w, model, foreign: bool = False) -> dict:
    """Does the uncertainty tell where the model errs: rank correlation, AUROC of the worst tenth,
    reliability, coverage of the bound by horizon. `foreign`: no window is of an episode that the model was
    learnt or calibrated on."""
    u, e = uncertainty[w.seen], error[w.seen]
    worst = e > np.quantile(e, 0.9)
    bins = trust.reliability(u, e)
    cut = (uncertainty > model.spec.threshold) & w.seen
    return {
        "spearman": trust.spearman(u, e),
        "auroc_worst_tenth": trust.auroc(u, worst),
        "bins": [asdict(b) for b in bins],
        "bound": measure_bound(uncertainty, error, w, model.spec, foreign),
        "threshold": model.spec.threshold,
        "calibrated_horizon": model.spec.horizon,
        "steps_cut": float(cut.sum() / max(w.seen.sum(), 1)),
        "error_kept": float(error[w.seen & ~cut].mean()) if (w.seen & ~cut).any() else None,
        "error_cut": float(error[cut].mean()) if cut.any() else None,
    }


def measure_bound(uncertainty: np.ndarray, error: np.ndarray, w, spec: WorldSpec, foreign: bool) -> dict:
    """Share of episodes below the bound on the error, by horizon, and the bound itself (its mean, in std of
    the data).

    The bound is the promise made in training (`spec.bounds`) where no window is of an episode it was
    calibrated on; else it is made anew from the other folds' episodes.
    """
    score = conformal.scores_of(error, uncertainty)
    promise = bool(spec.bounds) and foreign
    if promise:
        q = np.full(score.shape[1], np.inf)
        q[: len(spec.bounds)] = spec.bounds[: len(q)]
    else:
        q = conformal.cross_factors(score, w.seen, w.episode)
    inside = conformal.coverage(score, w.seen, w.episode, q, trust.HORIZONS)
    every = np.broadcast_to(q, score.shape)
    mean = {
        h: float((every * np.maximum(uncertainty, conformal.TINY))[w.seen[:, h - 1], h - 1].mean())
        for h in inside
    }
    return {
        "promised": conformal.LEVEL,
        "made": "in training" if promise else "from other episodes of this data set",
        "covered": table_of(inside),
        "bound": mean,
        "broken": [h for h, i in inside.items() if i.high < conformal.LEVEL - SLACK],
    }


def measure_following(model, w, config: WorldEvalConfig) -> dict:
    """Does the arm go where it is commanded, with the commands of other windows (`trust.OtherCommands`)."""
    steps = min(CHUNK, w.actions.shape[1])
    whole = w.seen[:, :steps].all(1)
    start = {k: v[whole] for k, v in w.start.items()}
    control = model.spec.control
    others = trust.OtherCommands.of(control.axes, control.state_names, start["state"])
    if whole.sum() < 2 * w.actions.shape[2] + 8 or not others.exchanged.any():
        return {"correlation": None, "gain": None, "windows": int(whole.sum())}
    order = np.random.default_rng([config.seed, 29]).permutation(int(whole.sum()))
    recorded = w.actions[whole][:, :steps]
    moved = w.state[whole, steps - 1] - start["state"]
    response = trust.respond(others.cause(recorded), moved)
    commands = others.commands(recorded, order)
    p = open_loop(model, start, commands, 16 if w.images else 256, config.seed)
    correlation, gain = trust.following(response, others.cause(commands), p.state[:, -1] - start["state"])
    obey = [n for n, r in zip(control.state_names, response.r2, strict=False) if r >= 0.5]
    return {"correlation": correlation, "gain": gain, "windows": int(whole.sum()), "dimensions": obey}


def measure_executability(
    model, dataset, w, p, config: WorldEvalConfig, progress: Progress | None = None
) -> dict:
    """EVA: could the arm do what was imagined? Actions decoded by an inverse-dynamics model of real
    transitions, scored."""
    row = np.flatnonzero(np.isfinite(dataset.after).all(1))
    if len(row) < eva.LEAST:
        return {"model": None, "recorded": None, "inverse": None}
    order = np.random.default_rng([config.seed, 31]).permutation(row)[:20_000]
    inverse, errors = eva.fit_inverse(
        dataset.state[order],
        dataset.after[order],
        dataset.action[order],
        updates=config.inverse,
        seed=config.seed,
        tick=begun(progress, "actions", config.inverse, "updates"),
    )
    steps = min(16, w.actions.shape[1])
    whole = w.seen[:, :steps].all(1)
    if steps < 4 or not whole.any():
        return {"model": None, "recorded": None, "inverse": errors}
    start = w.start["state"][whole][:, None]
    control = model.spec.control
    limits = eva.limits_of(control)
    penalties = eva.reference(limits, control.period)
    out: dict = {"inverse": errors, "steps": steps, "windows": int(whole.sum())}
    for name, state in (("model", p.state), ("recorded", w.state)):
        actions = eva.decode(inverse, torch.from_numpy(np.concatenate([start, state[whole][:, :steps]], 1)))
        at = eva.positions(actions, control)
        out[name] = float(eva.score(at, control.period, limits, penalties).mean())
        out[f"{name}_violations"] = float(eva.violations(at, control.period, limits).mean())
    at = eva.positions(torch.from_numpy(w.actions[whole][:, :steps]), control)
    return out | {
        "commanded": float(eva.score(at, control.period, limits, penalties).mean()),
        "commanded_violations": float(eva.violations(at, control.period, limits).mean()),
    }


# ---- another model on the same windows ---------------------------------------------------------------------


def compare_models(mine: dict, theirs: dict, w, name: str) -> dict:
    """This model's open-loop errors {key: ([B,T], _)} beside another's on the same windows."""
    out: dict = {"model": name, "open_loop": {}}
    for key in (k for k in mine if k in theirs):
        _, other, less = compare_errors(mine[key][0], theirs[key][0], w)
        out["open_loop"][key] = {"model": other} | less
    return out


def compare_errors(mine: np.ndarray, theirs: np.ndarray, w) -> tuple[dict, dict, dict]:
    """Two errors [B,T] of the same windows (`read_windows`), each by horizon, and "apart": the first's
    interval lies below the second's; "difference": paired by window, so that windows that are hard for both
    do not blur it."""
    own, other, paired = (trust.by_horizon(x, w.seen, w.episode) for x in (mine, theirs, mine - theirs))
    a, b, d = ({h: i._asdict() for h, i in t.items()} for t in (own, other, paired))
    return a, b, {"apart": trust.apart(own, other), "difference": d}


def reference_of(model, dataset, w, config: WorldEvalConfig) -> baselines.RecordedSteps:
    """What baselines learn from: this data set, and the model's own training data where they are still
    there."""
    parts = [baselines.transitions_of(dataset, np.arange(len(dataset)))]
    shown = {s.tobytes() for s in dataset.state[dataset.from_[np.unique(w.episode)]]}
    for where in training_data(config.model):
        [other] = as_commands([load_data(where)], model.spec.control.axes)
        if (
            other.state.shape[1:] == dataset.state.shape[1:]
            and Path(where).resolve() != Path(config.dataset).resolve()
        ):
            new = [e for e, row in enumerate(other.from_) if other.state[row].tobytes() not in shown]
            t = baselines.transitions_of(other, np.array(new, np.int64))
            # no episode of the data set has its number
            parts.append(replace(t, episode=t.episode - 1 - len(other) * len(parts)))
    return baselines.RecordedSteps(
        *(np.concatenate([getattr(t, f.name) for t in parts]) for f in fields(baselines.RecordedSteps))
    )


def training_data(model: str) -> list[str]:
    """The data sets that a run of `robo_rl wm train` learnt from, of those that can be found."""
    at = Path(model) / "run.json"
    said = files.read_json(at).get("config", {}).get("data", []) if at.is_file() else []
    return [d for d in said if isinstance(d, str) and Path(d, "meta", "info.json").is_file()]


# ---- all of it ---------------------------------------------------------------------------------------------


def onward(tick: Callable[[int], None], before: int) -> Callable[[int], None]:
    """What to call with the units that are done beside the `before` ones."""
    return lambda done: tick(before + done)


def measure(model, dataset, config: WorldEvalConfig, progress: Progress | None = None) -> tuple[dict, dict]:
    """Everything that recorded episodes alone can tell -> (document, arrays for page and videos)."""
    dataset = as_model_has_them(dataset, model.spec)
    check_dataset(model.spec, dataset.meta, config.dataset, dataset.spec.axes if dataset.spec else ())
    recorded = [dataset.task(e) for e in range(len(dataset))]
    instructions.check_text(model.options, recorded, config.dataset)
    instructions.check_known(model.spec.tasks, recorded, config.dataset)
    views, fresh, notes = model.spec.control.views, unseen(model, dataset), []
    if not dataset.is_judged:
        notes.append(
            "Nobody said which episodes succeeded, so what the model says of success is not measured: "
            f"robo_rl data label {quoted(config.dataset)} --success …. A model that learnt from them so "
            "knows no success: train it anew."
        )
    if all_learnt := not fresh.any():
        fresh[:] = True
        notes.append(
            "Every episode of this data set is one the model learnt from: the errors below are on the bright "
            "side."
        )
    steps = config.horizon or model.spec.longest
    most = max(LOOK // 4, min(LOOK, FRAMES // steps)) if views else config.windows
    w = read_windows(dataset, views, np.flatnonzero(fresh), min(config.windows, most), steps, config.seed)
    if (several := len(np.unique(w.episode))) < FEW:
        notes.append(
            f"These {len(w)} windows are of {several} episode{'s' if several > 1 else ''} alone: intervals "
            "over so few are too narrow. Evaluate on more episodes that the model did not learn from."
        )
    scale = np.array(model.spec.scale or spread(dataset))
    doc, arrays = measure_open_loop(model, w, scale, config, begun(progress, "predict", len(w), "windows"))
    doc["success"]["known"] = dataset.is_judged
    tick = begun(progress, "measure", 2, "parts")
    error = arrays["errors"]["state"][0]
    foreign = bool(foreign_to(model, dataset)[w.episode].all())
    doc["uncertainty"] = measure_doubt(arrays["predicted"].uncertainty, error, w, model, foreign)
    reference = reference_of(model, dataset, w, config)
    predicted, settings = baselines.predict(reference, w, config.seed)
    doc["baselines"] = measure_baselines(error, w, scale, predicted, settings, len(reference.episode))
    remembered = (
        trust.state_error(predicted["neighbours"], w.state, scale) if "neighbours" in predicted else None
    )
    doc["gate"] = gate_report.compare(
        w,
        arrays["predicted"].state,
        arrays["predicted"].uncertainty,
        error,
        remembered,
        reference,
        config.seed,
    )
    tick(1)
    doc["following"] = measure_following(model, w, config)
    tick(2)
    doc["eva"] = measure_executability(model, dataset, w, arrays["predicted"], config, progress)
    if not doc["finite"]:
        notes.append("The model predicted numbers that are not finite: do not train in it.")
    if steps > model.spec.horizon > 0:
        notes.append(
            f"The model was calibrated to {model.spec.horizon} steps; beyond them its uncertainty is a guess."
        )
    head = {
        "model": config.model,
        "kind": model.spec.kind,
        "sim": model.spec.control.id,
        "data": config.dataset,
        "data_folder": str(Path(config.dataset).resolve()),
        "learnt_from": model.spec.data,
        "all_learnt": all_learnt,
        "episodes": int(fresh.sum()),
        "windows": len(w),
        "horizon": steps,
        "seed": config.seed,
        "period": model.spec.control.period,
        "notes": notes,
    }
    return head | doc, arrays | {"windows": w, "model": model, "scale": scale}
