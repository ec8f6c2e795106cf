"""`robo_rl wm eval MODEL DATASET --policies RUN…`: how far a world model can be trusted, measured against
recorded episodes and against the simulator; a table, one JSON document, one HTML page, side-by-side
videos."""

import json
import math
from pathlib import Path

from robo_rl.errors import UserError, plural, quoted
from world_models.options import WorldEvalConfig


def run(args: WorldEvalConfig) -> int:
    """Measure, write eval.json, eval.html and videos, print the table or the JSON."""
    from robo_rl.experiment.world_model import evaluate_model
    from robo_rl.files import plain
    from robo_rl.log import Progress
    from robo_rl.report.world_model import write_evaluation
    from world_models.model import find

    folder = Path(args.out) if args.out else find(args.model) / "eval"
    if not args.out:
        keep_other(folder, args.dataset)
    doc, arrays = evaluate_model(args)
    with Progress() as progress:
        write_evaluation(folder, doc, arrays, args.video, progress.each)
    if args.json:
        print(json.dumps(plain(doc), indent=1))
        return 0
    print(table(doc))
    print(f"open {folder / 'eval.html'}")
    return 0


def keep_other(folder: Path, dataset: str) -> None:
    """UserError: the page in `folder` tells of another data set, and would be lost."""
    from robo_rl.files import read_json

    page = folder / "eval.json"
    doc = read_json(page) if page.exists() else {}
    other = doc.get("data", dataset)
    # a path may be told from another folder than then
    if Path(doc.get("data_folder", other)).resolve() != Path(dataset).resolve():
        raise UserError(
            f"{folder} has the page of {other}; give that of {dataset} a folder of its own, --out "
            f"{quoted(f'{folder}-{Path(dataset).resolve().name}')}, or replace it, --out {quoted(folder)}"
        )


def table(doc: dict) -> str:
    """The numbers as text."""
    lines = [
        f"{doc['model']} · {doc['sim']} · {plural(doc['windows'], 'window')} of "
        f"{plural(doc['horizon'], 'step')} from {plural(doc['episodes'], 'episode')}"
    ]
    lines += [*error_lines(doc), *baseline_lines(doc["baselines"]), *head_lines(doc)]
    if "policies" in doc:
        lines += policy_lines(doc)
    if "probe" in doc:
        lines += probe_lines(doc["probe"])
    lines += [f"  note: {n}" for n in doc["notes"]]
    if "verdict" in doc:
        lines += [*(f"  against it: {o}" for o in doc["objections"]), doc["verdict"]]
    return "\n".join(lines)


def error_lines(doc: dict) -> list[str]:
    """Open-loop errors, in std of the data and in the task's own units, beside another model's."""
    lines = []
    for name, t in doc["open_loop"].items():
        lines.append(
            f"  open-loop error, {name}   horizon    model   95 % interval     still       apart   "
            "model less standing still, by window"
        )
        less = t["difference"]
        lines += [
            f"  {'':{22 + len(name)}}{h:>8}  {i['value']:7.4f}   [{i['low']:.4f}, {i['high']:.4f}]  "
            f"{t['hold_last'][h]['value']:9.4f}   {'yes' if t['apart'][h] else 'no':<5}   "
            f"{less[h]['value']:+.4f} [{less[h]['low']:+.4f}, {less[h]['high']:+.4f}]"
            for h, i in t["model"].items()
        ]
    if doc["units"]:
        lines.append(
            "  in the task's own units: "
            + "; ".join(f"{name} {unit_row(q)}" for name, q in doc["units"].items())
        )
    for view, rows in doc["detail"].items():
        lines.append(
            f"  fine detail of {view}, energy / error as shares of the true: "
            + ", ".join(f"{r['energy']:.2f} / {r['error']:.2f} after {h}" for h, r in rows.items())
        )
    for name, t in doc.get("against", {"open_loop": {}})["open_loop"].items():
        lines.append(
            f"  {name}, less the error of {doc['against']['model']} (paired by window)   horizon   "
            "difference   95 % interval"
        )
        lines += [
            f"  {h:>10}  {i['value']:+.4f}   [{i['low']:+.4f}, {i['high']:+.4f}]"
            for h, i in t["difference"].items()
        ]
    return lines


def unit_row(q: dict) -> str:
    """The error after 1, 8 steps and at the longest horizon."""
    shown = [h for h in q["model"] if int(h) in (1, 8)] + [h for h in q["model"] if int(h) > 8][-1:]
    return (
        ", ".join(f"{q['model'][h]['value']:.3g}" for h in shown)
        + f" {q['unit']} after {', '.join(map(str, shown))} steps"
    )


def baseline_lines(b: dict) -> list[str]:
    """Error of the model divided by that of each simple predictor."""
    horizons = list(next(iter(b["rows"].values()))["error"])
    lines = ["  error of the model / that of   " + "".join(f"{h:>8}" for h in horizons) + "   steps"]
    for name, row in b["rows"].items():
        told = f" ({b['settings'][name]})" if name in b["settings"] else ""
        lines.append(
            f"    {name:<29}"
            + "".join(
                f" {'–' if x is None else format(x, '.3f' if x < 100 else '.0f'):>7}"
                for x in map(row["ratio"].get, horizons)
            )
            + told
        )
    return lines


def head_lines(doc: dict) -> list[str]:
    """Action following, success, uncertainty, executability."""
    f, s, u, v, lines = doc["following"], doc["success"], doc["uncertainty"], doc["eva"], []
    if f["correlation"] is not None:
        lines.append(
            f"  action following: correlation {f['correlation']:.3f}, gain {f['gain']:.2f} over "
            f"{len(f['dimensions'])} dimensions"
        )
    lines.append(
        "  success: not measured, for nobody said which episodes succeeded"
        if not s.get("known", True)
        else f"  success: {s['tp']} true, {s['fp']} false alarms, {s['fn']} missed, {s['tn']} rightly "
        f"denied; accuracy {s['accuracy']['value']:.3f} "
        f"[{s['accuracy']['low']:.3f}, {s['accuracy']['high']:.3f}]"
    )
    if r := doc.get("random"):
        lines.append(
            f"  random actions: succeed in {100 * r['model']:.0f} % of {r['episodes']} episodes in it; the "
            f"recordings in {100 * r['recorded']:.0f} %"
        )
    lines += [
        f"  uncertainty: rank correlation with the error {u['spearman']:.2f}, AUROC of the worst tenth "
        f"{auroc(u['auroc_worst_tenth'])}",
        *bound_lines(u["bound"], "  "),
        *gate_lines(doc.get("gate")),
    ]
    if v["model"] is not None:
        lines.append(
            f"  executability (EVA, 10 is best): imagined {v['model']:.2f}, recorded {v['recorded']:.2f}; "
            f"beyond the limits {100 * v['model_violations']:.1f} % of steps, recorded "
            f"{100 * v['recorded_violations']:.1f} % (inverse dynamics: R2 {v['inverse']['r2']:.2f} on "
            "held-out steps)"
        )
    return lines


def bound_lines(b: dict, indent: str) -> list[str]:
    """Coverage of the bound on the error, by horizon."""
    said = ", ".join(
        f"{100 * i['value']:.0f} [{100 * i['low']:.0f}, {100 * i['high']:.0f}] after {h}"
        for h, i in b["covered"].items()
    )
    return [
        f"{indent}bound on the error, made {b['made']}: promised {100 * b['promised']:.0f} % of episodes, "
        f"covers {said or 'unknown'}"
    ]


def gate_lines(g: dict | None) -> list[str]:
    """The learnt gate beside a threshold on the uncertainty, and its choice between model and memory."""
    if g is None:
        return []
    said = [
        f"{name} {100 * g[key]['kept']:.0f} % ({off_share(g[key]['off'])}, AUROC {auroc(g[key]['auroc'])})"
        for name, key in (("a learnt gate", "gate"), ("a threshold on the uncertainty", "threshold"))
    ]
    more = g["more"]
    rule = f"at most {100 * g['allowed']:.0f} % of them to be off by more than {g['tolerance']:g} std"
    lines = [
        f"  steps trusted, {rule}: {', '.join(said)}",
        f"    gate less threshold {100 * more['value']:+.1f} [{100 * more['low']:+.1f}, "
        f"{100 * more['high']:+.1f}] points, by episode",
    ]
    if m := g["memory"]:
        lines.append(
            "  model or memory, by the gate: "
            + "; ".join(
                f"{m['chosen'][h]['value']:.3f} after {h} (model {m['model'][h]['value']:.3f}, memory "
                f"{m['memory'][h]['value']:.3f}, the model in {100 * m['share'][h]:.0f} %)"
                for h in m["model"]
            )
        )
    return lines


def off_share(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f} % off"


def auroc(value: float | None) -> str:
    """– where all are of one kind, so that nothing is told apart."""
    return "–" if value is None or math.isnan(value) else f"{value:.2f}"


def policy_lines(doc: dict, indent: str = "  ") -> list[str]:
    """Policies in the model beside reality, and the alarms."""
    width = max(len(p["name"]) for p in doc["policies"])
    lines = [f"{indent}{'policy':<{width}}   model    real     gap   interval"]
    alarm = {"over": "  ALARM: overrated", "under": "  ALARM: underrated", "": ""}
    lines += [
        f"{indent}{p['name']:<{width}}   {p['model']:5.3f}   {p['real']:5.3f}  {p['gap']['value']:+.3f}   "
        f"[{p['gap']['low']:+.3f}, {p['gap']['high']:+.3f}]{alarm[p['side']]}"
        for p in doc["policies"]
    ]
    r, e = doc["ranking"], doc["alarm"]
    if r["policies"] > 1:
        s = r["spearman"]
        known = s["value"] is not None and math.isfinite(s["value"])
        told = (
            f"{s['value']:.3f} [{s['low']:.3f}, {s['high']:.3f}]"
            if known
            else "unknown, for all of them succeed alike in the model or for real"
        )
        lines.append(
            f"{indent}ranking of {r['policies']} policies ({r['real']}): Spearman {told}, worst "
            f"regret {r['worst_regret']:.3f}, regret of the model's choice {r['choice_regret']:.3f}"
        )
    said = [f"{side}rated {', '.join(e[side])}" for side in ("over", "under") if e[side]]
    lines.append(f"{indent}alarm: {'; '.join(said) or 'none'} (gap surely beyond {e['tolerance']:g})")
    return lines


def probe_lines(p: dict) -> list[str]:
    """What the model says of policies unlike its data."""
    best = p["searches"]
    if "real" not in best[0]:
        return [
            "  probe, not checked for want of a simulator: searches reached success "
            f"{', '.join(format(s['model'], '.3f') for s in best)} in the model; {p['count']} affine "
            f"policies {', '.join(format(q['model'], '.2f') for q in p['policies'])}"
        ]
    lines = [f"  probe: {p['count']} affine policies unlike the data", *policy_lines(p, "    ")]
    lines += [
        f"    {s['name']}, to exploit the model: {s['model']:.3f} in it without doubt, {s['real']:.3f} for "
        f"real [{s['gap']['low']:+.3f}, "
        f"{s['gap']['high']:+.3f}]{'  ALARM: overrated' if s['side'] == 'over' else ''}"
        for s in best
    ]
    return [*lines, *bound_lines(p["unlike"]["bound"], "    ")]
