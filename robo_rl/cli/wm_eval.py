"""`robo_rl wm eval MODEL DATASET --policies RUN…`: how far a world model can be trusted, measured against recorded
episodes and against the simulator; a table, one JSON document, one HTML page, side-by-side videos."""

import json
from pathlib import Path

from world_models.options import WorldEvalConfig


def run(args: WorldEvalConfig) -> int:
    """Measure, write eval.json, eval.html and videos, print the table or the JSON."""
    from robo_rl.experiment.world_model import evaluate_model
    from robo_rl.files import plain
    from robo_rl.report.world_model import write_evaluation
    from world_models.model import find

    folder = Path(args.out) if args.out else find(args.model) / "eval"
    doc, arrays = evaluate_model(args)
    write_evaluation(folder, doc, arrays, args.video)
    if args.json:
        print(json.dumps(plain(doc), indent=1))
        return 0
    print(table(doc))
    print(f"open {folder / 'eval.html'}")
    return 0


def table(doc: dict) -> str:
    """The numbers as text."""
    lines = [f"{doc['model']} · {doc['sim']} · {doc['windows']} windows of {doc['horizon']} steps from {doc['episodes']} episodes"]
    for name, t in doc["open_loop"].items():
        lines.append(f"  open-loop error, {name}   horizon    model   95 % interval     copy last   apart   "
                     "model less copy last, by window")
        less = t["difference"]
        lines += [f"  {'':{22 + len(name)}}{h:>8}  {i['value']:7.4f}   [{i['low']:.4f}, {i['high']:.4f}]  "
                  f"{t['hold_last'][h]['value']:9.4f}   {'yes' if t['apart'][h] else 'no':<5}   "
                  f"{less[h]['value']:+.4f} [{less[h]['low']:+.4f}, {less[h]['high']:+.4f}]"
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
