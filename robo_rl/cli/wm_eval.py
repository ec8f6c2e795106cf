"""`robo_rl wm eval MODEL DATASET --policies RUN…`: how far a world model can be trusted, measured against recorded
episodes and against the simulator; a table, one JSON document, one HTML page, side-by-side videos."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import tyro

from robo_rl.errors import UserError, in_range

LOOK = 64  # most windows of a model with images: their frames are held in memory


@dataclass(frozen=True, kw_only=True)
class WmEval:
    """Measure a world model: open-loop error, obedience, reward and success, ranking of policies, exploitation, doubt."""

    model: tyro.conf.Positional[str]
    """Folder of the model, or the run of robo_rl wm train that made it."""
    dataset: tyro.conf.Positional[str]
    """Recorded episodes (LeRobot v3) with the same arm, cameras and rate; those it learnt from are left out."""
    policies: tuple[str, ...] = ()
    """Runs (each of their checkpoints is a policy) or checkpoint folders, ranked in the model and in the simulator."""
    against: str = ""
    """Another model, on the same windows: is this one better at every horizon?"""
    windows: int = 200
    """Recorded stretches to predict (at most 64 with images)."""
    horizon: int = 64
    """Control steps of each."""
    episodes: int = 100
    """Starts per policy, the same in the model and in the simulator."""
    tolerance: float = 0.15
    """Model success minus real success that is no alarm."""
    inverse: int = 800
    """Updates of the inverse-dynamics model that decodes imagined motion (EVA)."""
    seed: int = 0
    video: bool = True
    out: str = ""
    """Folder of what is written; empty: MODEL/eval."""
    json: bool = False

    def __post_init__(self) -> None:
        in_range("--windows", self.windows, 4, 10**5)
        in_range("--horizon", self.horizon, 1, 4096)
        in_range("--episodes", self.episodes, 2, 10**5)
        in_range("--tolerance", self.tolerance, 0, 1, open_high=True)
        in_range("--inverse", self.inverse, 1, 10**6)
        in_range("--seed", self.seed, 0, 2000)


# ---- data --------------------------------------------------------------------------------------------------------

def check_fits(spec, meta, where: str) -> None:
    """Raise UserError naming what differs between what a model stands for and recorded episodes."""
    f, control = meta.features, spec.control
    have = {v: (h, w) for v, h, w in f.views}
    for name, mine, theirs in (("action axes are", ", ".join(control.action_names), ", ".join(f.action)),
                               ("state size is", spec.state, len(f.state)),
                               ("control rate [Hz] is", round(1 / control.period), round(f.fps)),
                               *((f"camera {v} is", (spec.image_size,) * 2, have.get(v, "absent")) for v in control.views)):
        if mine != theirs:
            raise UserError(f"{where}: the model's {name} {mine}, the data set's {theirs}. Record it with the sim, task, "
                            "control and obs of what the model learnt from")


def unseen(model, dataset) -> np.ndarray:
    """bool[episodes]: the model did not learn from it (by the bytes of its first state)."""
    f = model.frames
    rows = np.asarray(f.obs["state"], np.float32)[f.first & ~f.held] if "state" in f.obs else ()
    learnt = {row.tobytes() for row in rows}
    return np.array([dataset.state[i].tobytes() not in learnt for i in dataset.from_])


def read_windows(dataset, views: tuple[str, ...], episodes: np.ndarray, count: int, steps: int, seed: int):
    """`count` windows of `steps` steps from the given episodes (indices)."""
    from world_models.imagine import Windows, pick_starts

    first, last = dataset.from_[episodes], dataset.to[episodes] - 1
    which, row = pick_starts(first, last, count, steps, seed)
    end = last[which][:, None]
    at = row[:, None] + np.arange(steps)
    final = at == end
    seen = (at <= end) & np.isfinite(after := dataset.after[np.minimum(at, end)]).all(-1)
    before = np.maximum(row - 1, first[which])
    images, start = {}, {"state": dataset.state[row], "before": dataset.state[before], "task": np.array([dataset.task(int(e)) for e in episodes[which]])}
    for view in views:
        clips = {}
        for e in np.unique(which):
            clip, last = dataset.frames(view, int(episodes[e])), dataset.final_image(view, int(episodes[e]))
            clips[e] = np.concatenate([clip, clip[-1:] if last is None else last[None]])
            if last is None:
                seen &= ~final | (which != e)[:, None]
        start[f"image/{view}"] = np.stack([clips[e][r - first[e]] for e, r in zip(which, row)])
        images[view] = np.stack([clips[e][np.minimum(a + 1 - first[e], len(clips[e]) - 1)] for e, a in zip(which, at)])
    before_end = dataset.state[np.minimum(at, end)]
    return Windows(start, dataset.action[np.minimum(at, end)], np.where(np.isfinite(after), after, before_end), images,
                   dataset.reward[np.minimum(at, end)], final & dataset.terminated[episodes[which]][:, None],
                   final & dataset.success[episodes[which]][:, None], seen, at <= end)


# ---- against recorded episodes -----------------------------------------------------------------------------------

def measure_open_loop(model, w, scale: np.ndarray, args: WmEval) -> tuple[dict, dict]:
    """-> (document, arrays for the page) of a model along the windows."""
    from world_models import trust
    from world_models.imagine import open_loop

    batch = 16 if w.images else 256
    p = open_loop(model, w.start, w.actions, batch, args.seed)
    steps = w.actions.shape[1]
    errors = {"state": (trust.state_error(p.state, w.state, scale),
                        trust.state_error(trust.hold_last(w.start["state"], steps), w.state, scale))}
    for v in w.images:
        errors[f"image/{v}"] = (trust.image_error(p.images[v], w.images[v]),
                                trust.image_error(trust.hold_last(w.start[f"image/{v}"], steps), w.images[v]))
    doc: dict = {"open_loop": {}}
    for name, (mine, held) in errors.items():
        own, base, less = compare_errors(mine, held, w.seen)
        doc["open_loop"][name] = {"model": own, "hold_last": base} | less
    everything = np.concatenate([np.isfinite(x).ravel() for x in (p.state, p.reward, p.success, p.uncertainty)])
    doc["finite"] = bool(everything.all())
    doc |= {"success": judged(p.success, w.success, w), "terminal": judged(p.terminal, w.terminal, w),
            "reward": measure_reward(p.reward, w), "uncertainty": measure_doubt(p.uncertainty, errors["state"][0], w, model)}
    return doc, {"errors": errors, "predicted": p}


def judged(probability: np.ndarray, true: np.ndarray, w) -> dict:
    """Does the window succeed (or end) within its steps: counts, and how well the probabilities are calibrated."""
    from world_models import trust

    said = np.where(w.made, probability, 0)
    c = trust.confusion((said > 0.5).any(1), (true & w.made).any(1))
    bins = trust.reliability(probability[w.made], true[w.made])
    return asdict(c) | {"accuracy": c.accuracy._asdict(), "precision": c.precision.value, "recall": c.recall.value,
                        "calibration_error": trust.calibration_error(bins), "bins": [asdict(b) for b in bins],
                        "auroc": trust.auroc(said.max(1), (true & w.made).any(1))}


def measure_reward(reward: np.ndarray, w) -> dict:
    """Error of the predicted reward, and the confusion of "above the middle of what was recorded"."""
    from world_models import trust

    mine, true = reward[w.made], w.reward[w.made]
    spread = float(true.var())
    middle = (true.min() + true.max()) / 2
    return {"rmse": float(np.sqrt(np.square(mine - true).mean())),
            "r2": 1 - float(np.square(mine - true).mean()) / spread if spread > 0 else None,
            "confusion": asdict(trust.confusion(mine > middle, true > middle)) if spread > 0 else None}


def measure_doubt(uncertainty: np.ndarray, error: np.ndarray, w, model) -> dict:
    """Does the uncertainty tell where the model errs: rank correlation, AUROC of the worst tenth, reliability, coverage
    of a bound fitted on the first half of the windows."""
    from world_models import trust

    u, e = uncertainty[w.seen], error[w.seen]
    worst = e > np.quantile(e, 0.9)
    half = len(w) // 2
    q = trust.upper_bound(uncertainty[:half][w.seen[:half]], error[:half][w.seen[:half]])
    covered = (error <= q * uncertainty)[half:][w.seen[half:]]
    bins = trust.reliability(u, e)
    cut = (uncertainty > model.spec.threshold) & w.seen
    return {"spearman": trust.spearman(u, e), "auroc_worst_tenth": trust.auroc(u, worst), "bins": [asdict(b) for b in bins],
            "bound_factor": q, "bound_promised": 0.9, "bound_covered": float(covered.mean()) if covered.size else None,
            "threshold": model.spec.threshold, "calibrated_horizon": model.spec.horizon, "steps_cut": float(cut.sum() / max(w.seen.sum(), 1)),
            "error_kept": float(error[w.seen & ~cut].mean()) if (w.seen & ~cut).any() else None,
            "error_cut": float(error[cut].mean()) if cut.any() else None}


def measure_following(model, w, args: WmEval) -> dict:
    """Does the arm go where it is commanded, with the commands of other windows."""
    from world_models import trust
    from world_models.imagine import CHUNK, open_loop

    steps = min(CHUNK, w.actions.shape[1])
    whole = w.seen[:, :steps].all(1)
    if whole.sum() < 2 * w.actions.shape[2] + 8:
        return {"correlation": None, "gain": None, "windows": int(whole.sum())}
    order = np.random.default_rng([args.seed, 29]).permutation(np.flatnonzero(whole))
    commands = w.actions[:, :steps].sum(1)
    response = trust.respond(commands[whole], (w.state[:, steps - 1] - w.start["state"])[whole])
    start = {k: v[whole] for k, v in w.start.items()}
    p = open_loop(model, start, w.actions[order][:, :steps], 16 if w.images else 256, args.seed)
    correlation, gain = trust.following(response, commands[order], p.state[:, -1] - start["state"])
    obey = [n for n, r in zip(model.spec.control.state_names, response.r2) if r >= 0.5]
    return {"correlation": correlation, "gain": gain, "windows": int(whole.sum()), "dimensions": obey}


def measure_executability(model, dataset, w, p, args: WmEval) -> dict:
    """EVA: could the arm do what was imagined? Actions decoded by an inverse-dynamics model of real transitions, scored."""
    import torch

    from world_models import eva

    row = np.flatnonzero(np.isfinite(dataset.after).all(1))
    order = np.random.default_rng([args.seed, 31]).permutation(row)[:20_000]
    inverse, errors = eva.fit_inverse(dataset.state[order], dataset.after[order], dataset.action[order], updates=args.inverse, seed=args.seed)
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
    return out | {"commanded": float(eva.score(at, control.period, limits, penalties).mean()),
                  "commanded_violations": float(eva.violations(at, control.period, limits).mean())}


# ---- against the simulator ---------------------------------------------------------------------------------------

def find_policies(paths: tuple[str, ...]) -> list[tuple[str, Path, Path]]:
    """(name, run folder, checkpoint folder) of every checkpoint of the runs, and of the checkpoints named."""
    from robo_rl import checkpoint
    from robo_rl.experiment.evaluation import pick_checkpoint

    out = []
    for path in map(Path, paths):
        run, folder = pick_checkpoint(path, "last")
        for at in [folder] if (path / "meta.json").exists() else checkpoint.checkpoints(run):
            out.append((f"{run.name}/{int(at.name.removeprefix('step_'))}", run, at))
    return out


def make_real(spec, runs: list[Path], num_envs: int):
    """The simulator that a model stands for, made as the first of the runs that did not act in a model."""
    from robo_rl.experiment.train import make_env, run_config

    configs = [run_config(r) for r in runs]
    real = next((c for c in configs if not c.sim.startswith("wm:")), None)
    control = spec.control
    config = real or replace(configs[0], sim=control.sim, task=control.task, judge="", obs="rgb" if control.views else "state")
    env = make_env(config, num_envs)
    for name, mine, theirs in (("action axes are", control.action_names, env.spec.action_names),
                               ("cameras are", control.views, env.spec.views), ("control period [s] is", control.period, env.spec.period),
                               ("state size is", spec.state, env.single_observation_space["state"].shape[0])):
        if mine != theirs:
            raise UserError(f"the model's {name} {mine}, those of {env.spec.id} are {theirs}: give --policies runs of the sim, "
                            "task, control and obs that the model learnt from")
    return env


def compare_policies(model, env, policies: list, args: WmEval, tick=lambda done: None) -> dict:
    """Success of every (name, policy) on the same starts in the model and in the simulator `env` -> document."""
    import torch

    from robo_rl.evaluate import eval_starts, evaluate
    from robo_rl.policies import obs_tensors
    from robo_rl.selection import REPORT
    from world_models import trust
    from world_models.imagine import play

    starts, n = eval_starts(args.episodes, REPORT + args.seed), env.num_envs  # no checkpoint was chosen on these
    imagined, real, rows = [], [], []
    for k, (_, policy) in enumerate(policies):
        real.append(evaluate(env, policy, starts, args.seed)["success"])
        won, cut, doubt = [], [], []
        for batch, first in enumerate(range(0, len(starts), n)):
            ids = starts[first:first + n]
            padded = np.concatenate([ids, np.repeat(ids[-1:], n - len(ids))])
            obs, _ = env.reset(options={"reset_mask": np.ones(n, bool), "starts": padded})
            generator = torch.Generator().manual_seed(args.seed * 7919 + batch)  # the noise that evaluate gave

            def act(o, policy=policy, generator=generator):
                return policy.act(obs_tensors(o, policy.spec), generator, explore=False).actions.numpy()
            got = play(model, act, {k: np.array(v) for k, v in obs.items()}, env.spec.max_steps, args.seed)
            for have, new in ((won, got.success), (cut, got.cut), (doubt, got.uncertainty)):
                have += new[:len(ids)].tolist()
        imagined.append(won)
        rows.append({"cut": float(np.mean(cut)), "uncertainty": float(np.mean(doubt))})
        tick(k + 1)
    names = [name for name, _ in policies]
    m, r = np.array(imagined, float), np.array(real, float)
    gaps = trust.exploitation(names, m, r, args.tolerance)
    a, b = m.mean(1), r.mean(1)
    ranking = {"policies": len(names), "spearman": trust.spearman_interval(m, r)._asdict(), "pearson": trust.pearson(a, b),
               "worst_regret": trust.worst_regret(a, b), "choice_regret": trust.choice_regret(a, b),
               "mean_max_rank_violation": trust.mean_max_rank_violation(a, b), "starts": args.episodes}
    return {"policies": [asdict(g) | {"gap": g.gap._asdict()} | row for g, row in zip(gaps, rows)], "ranking": ranking,
            "exploitation": {"alarm": any(g.alarm for g in gaps), "tolerance": args.tolerance,
                             "policies": [g.name for g in gaps if g.alarm]}}


# ---- all of it ---------------------------------------------------------------------------------------------------

def measure(model, dataset, args: WmEval) -> tuple[dict, dict]:
    """Everything that recorded episodes alone can tell -> (document, arrays for page and videos)."""
    check_fits(model.spec, dataset.meta, args.dataset)
    views, fresh, notes = model.spec.control.views, unseen(model, dataset), []
    if not fresh.any():
        fresh[:] = True
        notes.append("Every episode of this data set is one the model learnt from: the errors below are on the bright side.")
    w = read_windows(dataset, views, np.flatnonzero(fresh), min(args.windows, LOOK) if views else args.windows,
                     args.horizon, args.seed)
    scale = dataset.state.std(0)
    scale = np.where(scale > 1e-5, scale, 0)
    doc, arrays = measure_open_loop(model, w, scale, args)
    doc["following"] = measure_following(model, w, args)
    doc["eva"] = measure_executability(model, dataset, w, arrays["predicted"], args)
    if not doc["finite"]:
        notes.append("The model predicted numbers that are not finite: do not train in it.")
    if args.horizon > model.spec.horizon > 0:
        notes.append(f"The model was calibrated to {model.spec.horizon} steps; beyond them its uncertainty is a guess.")
    head = {"model": args.model, "kind": model.spec.kind, "sim": model.spec.control.id, "data": args.dataset,
            "learnt_from": model.spec.data, "episodes": int(fresh.sum()), "windows": len(w), "horizon": args.horizon,
            "seed": args.seed, "period": model.spec.control.period, "notes": notes}
    return head | doc, arrays | {"windows": w, "model": model, "scale": scale}


def evaluate_model(args: WmEval) -> tuple[dict, dict]:
    """`measure`, then the comparison with another model and with the simulator, if asked for."""
    from robo_rl import checkpoint
    from robo_rl.data.reader import load as load_data
    from robo_rl.log import Progress
    from world_models.model import load

    model, found = load(args.model), find_policies(args.policies)
    other = load(args.against) if args.against else None
    env = make_real(model.spec, [run for _, run, _ in found], min(args.episodes, 32 if model.spec.control.views else 10**5)) \
        if found else None
    doc, arrays = measure(model, load_data(args.dataset), args)
    if other is not None:
        _, theirs = measure_open_loop(other, arrays["windows"], arrays["scale"], args)
        doc["against"] = compare_models(arrays["errors"], theirs["errors"], arrays["windows"].seen, args.against)
    if env is not None:
        with Progress() as progress:
            progress.start("rank", len(found), "policies")
            policies = [(name, checkpoint.load_policy(folder)[0]) for name, _, folder in found]
            doc |= compare_policies(model, env, policies, args, progress.update)
        env.close()
    return doc, arrays


def compare_models(mine: dict, theirs: dict, seen: np.ndarray, name: str) -> dict:
    """This model's open-loop errors {key: ([B,T], _)} beside another's on the same windows, where seen [B,T]."""
    out: dict = {"model": name, "open_loop": {}}
    for key in (k for k in mine if k in theirs):
        _, other, less = compare_errors(mine[key][0], theirs[key][0], seen)
        out["open_loop"][key] = {"model": other} | less
    return out


def compare_errors(mine: np.ndarray, theirs: np.ndarray, seen: np.ndarray) -> tuple[dict, dict, dict]:
    """Two errors [B,T] of the same windows, where seen [B,T], each by horizon, and "apart": the first's interval lies below
    the second's; "difference": paired by window, so that windows that are hard for both do not blur it."""
    from world_models import trust

    own, other, paired = (trust.by_horizon(x, seen) for x in (mine, theirs, mine - theirs))
    a, b, d = ({h: i._asdict() for h, i in t.items()} for t in (own, other, paired))
    return a, b, {"apart": trust.apart(own, other), "difference": d}


def table(doc: dict) -> str:
    """The numbers as text."""
    lines = [f"{doc['model']} · {doc['sim']} · {doc['windows']} windows of {doc['horizon']} steps from {doc['episodes']} episodes"]
    for name, t in doc["open_loop"].items():
        lines.append(f"  open-loop error, {name}   horizon    model   95 % interval     copy last   apart   model less copy last, by window")
        less = t["difference"]
        lines += [f"  {'':{22 + len(name)}}{h:>8}  {i['value']:7.4f}   [{i['low']:.4f}, {i['high']:.4f}]  {t['hold_last'][h]['value']:9.4f}   "
                  f"{'yes' if t['apart'][h] else 'no':<5}   {less[h]['value']:+.4f} [{less[h]['low']:+.4f}, {less[h]['high']:+.4f}]"
                  for h, i in t["model"].items()]
    for name, t in doc.get("against", {"open_loop": {}})["open_loop"].items():
        lines.append(f"  {name}, less the error of {doc['against']['model']} (paired by window)   horizon   difference   95 % interval")
        lines += [f"  {h:>10}  {i['value']:+.4f}   [{i['low']:+.4f}, {i['high']:+.4f}]" for h, i in t["difference"].items()]
    f, s, u = doc["following"], doc["success"], doc["uncertainty"]
    if f["correlation"] is not None:
        lines.append(f"  action following: correlation {f['correlation']:.3f}, gain {f['gain']:.2f} over {len(f['dimensions'])} dimensions")
    lines.append(f"  success: {s['tp']} true, {s['fp']} false alarms, {s['fn']} missed, {s['tn']} rightly denied; "
                 f"accuracy {s['accuracy']['value']:.3f} [{s['accuracy']['low']:.3f}, {s['accuracy']['high']:.3f}]")
    lines.append(f"  uncertainty: rank correlation with the error {u['spearman']:.2f}, AUROC of the worst tenth "
                 f"{u['auroc_worst_tenth']:.2f}, 90 % bound covers {100 * (u['bound_covered'] or 0):.0f} %")
    v = doc["eva"]
    if v["model"] is not None:
        lines.append(f"  executability (EVA, 10 is best): imagined {v['model']:.2f}, recorded {v['recorded']:.2f}; beyond the limits "
                     f"{100 * v['model_violations']:.1f} % of steps, recorded {100 * v['recorded_violations']:.1f} % "
                     f"(inverse dynamics: R2 {v['inverse']['r2']:.2f} on held-out steps)")
    if "policies" in doc:
        width = max(len(p["name"]) for p in doc["policies"])
        lines.append(f"  {'policy':<{width}}   model    real     gap   interval")
        lines += [f"  {p['name']:<{width}}   {p['model']:5.3f}   {p['real']:5.3f}  {p['gap']['value']:+.3f}   "
                  f"[{p['gap']['low']:+.3f}, {p['gap']['high']:+.3f}]{'  ALARM' if p['alarm'] else ''}" for p in doc["policies"]]
        r = doc["ranking"]
        lines.append(f"  ranking of {r['policies']} policies: Spearman {r['spearman']['value']:.3f} "
                     f"[{r['spearman']['low']:.3f}, {r['spearman']['high']:.3f}], worst regret {r['worst_regret']:.3f}, "
                     f"regret of the model's choice {r['choice_regret']:.3f}")
        e = doc["exploitation"]
        lines.append(f"  exploitation: {'ALARM, ' + ', '.join(e['policies']) if e['alarm'] else 'none'} "
                     f"(gap surely above {e['tolerance']:g})")
    return "\n".join([*lines, *(f"  note: {n}" for n in doc["notes"])])


def run(args: WmEval) -> int:
    """Measure, write eval.json, eval.html and videos, print the table or the JSON."""
    from robo_rl import files
    from robo_rl.report.world_model import page, side_by_side
    from world_models.model import find

    folder = Path(args.out) if args.out else find(args.model) / "eval"
    doc, arrays = evaluate_model(args)
    files.private_folder(folder)
    clips = side_by_side(folder, arrays) if args.video else []
    doc["page"] = str(folder / "eval.html")
    files.write_json(folder / "eval.json", doc)
    files.write_bytes(folder / "eval.html", page(files.plain(doc), clips).encode())
    if args.json:
        print(json.dumps(files.plain(doc), indent=1))
        return 0
    print(table(doc))
    print(f"open {folder / 'eval.html'}")
    return 0
