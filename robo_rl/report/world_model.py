"""The page of `robo_rl wm eval`."""

import base64
from itertools import groupby
from pathlib import Path

import numpy as np

from robo_rl import files
from robo_rl.report.charts import Series, chart, whisker
from robo_rl.report.text import esc
from robo_rl.report.world_model_film import side_by_side

# ---- the page ----------------------------------------------------------------------------------------------------

def number(v: "float | None", digits: int = 2) -> str:
    return "–" if v is None else f"{v:.{digits}f}"


def tile(name: str, value: str, small: str) -> str:
    return f'<div class="card tile"><span>{esc(name)}</span><b>{esc(value)}</b><small>{esc(small)}</small></div>'


def open_loop_chart(name: str, entry: dict, against: "dict | None") -> str:
    """Error by horizon: model, copy-last, and maybe another model."""
    def series(title: str, rows: dict, colour: int) -> Series:
        x = np.array([int(h) for h in rows], float)
        y = np.array([[np.nan if i[k] is None else i[k] for k in ("value", "low", "high")] for i in rows.values()]).reshape(-1, 3)
        return Series(title, x, y[:, 0], colour, y[:, 1], y[:, 2], "dots")
    lines = [series("model", entry["model"], 1), series("copy last", entry["hold_last"], 6)]
    if against:
        lines.append(series(f"against: {against['name']}", against["model"], 3))
    what = ("root mean square error in standard deviations of the data" if name == "state"
            else "root mean square error of pixels, 0..1") + "; bands: 95 % bootstrap over windows"
    return chart(f"Open-loop error, {name}", what, lines, x_name="control steps ahead", zero=True)


def reliability_chart(title: str, what: str, bins: list[dict], x_name: str, line: bool) -> str:
    x, y = (np.array([b[k] for b in bins], float) for k in ("predicted", "actual"))
    series = [Series("measured", x, y, 1, look="dots")]
    if line:
        series.append(Series("perfect", np.array([0.0, 1.0]), np.array([0.0, 1.0]), 6))
    return chart(title, what, series, x_name=x_name, zero=True)


def policies_table(doc: dict) -> str:
    rows = []
    for p in doc["policies"]:
        gap = p["gap"]
        look = "down" if p["alarm"] else ""
        rows.append(f'<tr><td class="name">{esc(p["name"])}</td><td class="n">{100 * p["model"]:.1f} %</td>'
                    f'<td class="n"><b>{100 * p["real"]:.1f} %</b></td><td>{whisker(p["real"], p["real"], p["real"], 1)}</td>'
                    f'<td class="n"><span class="{look}">{100 * gap["value"]:+.1f}</span> <small>{100 * gap["low"]:+.1f} … '
                    f'{100 * gap["high"]:+.1f}</small></td><td class="n">{100 * p["cut"]:.0f} %</td>'
                    f'<td>{"<span class=&quot;badge bad&quot;>alarm</span>".replace("&quot;", chr(34)) if p["alarm"] else ""}</td></tr>')
    return ('<div class="card scroll pad"><table><tr><th>Policy</th><th class="n">In the model</th><th class="n">In the simulator</th>'
            '<th></th><th class="n">Gap in points</th><th class="n">Beyond its doubt</th><th></th></tr>' + "".join(rows) + "</table></div>")


def training_charts(doc: dict) -> str:
    """Model and real success over the checkpoints of each run."""
    figures = []
    for run, group in groupby(doc["policies"], lambda p: p["name"].rsplit("/", 1)[0]):
        ps = list(group)
        if len(ps) > 1:
            x = np.array([int(p["name"].rsplit("/", 1)[1]) for p in ps], float)
            figures.append(chart(run, "success of each checkpoint on the same starts",
                                 [Series(k, x, np.array([p[key] for p in ps]), c, look="dots")
                                  for k, key, c in (("in the model", "model", 3), ("in the simulator", "real", 1))],
                                 percent=True, y_range=(0.0, 1.0), x_name="environment steps of training"))
    return f'<div class="grid">{"".join(figures)}</div>' if figures else ""


def page(doc: dict, clips: list[tuple[str, Path]]) -> str:
    """The whole page from eval.json's document."""
    facts = "".join(f"<li><span>{esc(k)}</span>{esc(doc[v])}</li>" for k, v in
                    (("kind", "kind"), ("env", "sim"), ("data", "data"), ("learnt from", "learnt_from"),
                     ("windows", "windows"), ("seed", "seed"))
                    if doc.get(v) not in (None, ""))
    first = next(iter(doc["open_loop"]))
    last = list(doc["open_loop"][first]["model"])[-1:]
    tiles = []
    if last:
        mine, held = (doc["open_loop"][first][k][last[0]]["value"] for k in ("model", "hold_last"))
        tiles.append(tile(f"Error after {last[0]} steps", number(mine, 3), f"copy last: {number(held, 3)}"))
    f, s, u = doc["following"], doc["success"], doc["uncertainty"]
    tiles.append(tile("Action following", number(f["correlation"]), f"correlation; gain {number(f['gain'])}"))
    tiles.append(tile("Success told right", f"{100 * s['accuracy']['value']:.0f} %" if s["accuracy"]["value"] is not None else "–",
                      f"{s['fp']} false alarms, {s['fn']} missed"))
    tiles.append(tile("Uncertainty", number(u["auroc_worst_tenth"]), "AUROC of the worst tenth of errors"))
    ranks, more = "", ""
    if "policies" in doc:
        r, e = doc["ranking"], doc["exploitation"]
        tiles.append(tile("Spearman", number(r["spearman"]["value"]),
                          f"{r['policies']} policies; worst regret {number(r['worst_regret'])}"))
        tiles.append(tile("Exploitation", "alarm" if e["alarm"] else "none", f"gap surely above {e['tolerance']:g}"))
        ranks = (f"<h2>Policies</h2><p>Success on the same {r['starts']} starts. Gap: model minus simulator, interval widened for "
                 f"{r['policies']} looks; the alarm fires where it lies above {e['tolerance']:g}.</p>{policies_table(doc)}"
                 f'<div class="gap"></div>{training_charts(doc)}')
    if "eva" in doc:
        v = doc["eva"]
        tiles.append(tile("Executability (EVA)", number(v["model"]), f"10 is best; the recording itself: {number(v['recorded'])}"))
    notes = ('<section class="card notes"><ul>' + "".join(f"<li>{esc(n)}</li>"
                                                          for n in doc["notes"]) + "</ul></section>") if doc["notes"] else ""
    against = doc.get("against")
    charts = "".join(open_loop_chart(n, t, {"name": against["model"], "model": against["open_loop"][n]["model"]}
                                     if against and n in against["open_loop"] else None) for n, t in doc["open_loop"].items())
    calibration = reliability_chart("Uncertainty against error", "mean open-loop error of ten equal groups by uncertainty", u["bins"],
                                    "predicted uncertainty", False)
    calibration += reliability_chart("Success probability", "share of steps that succeed, in ten equal groups by prediction", s["bins"],
                                     "predicted probability", True)
    if clips:
        figures = "".join('<figure class="card video"><video controls loop muted playsinline autoplay preload="auto" '
                          f'src="data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"></video><figcaption><b>{esc(title)}</b>'
                          "<span>left: recorded, right: the model; half speed, failures first</span></figcaption></figure>"
                          for title, path in clips)
        more = ('<h2>Side by side</h2><p>Left what was recorded, right what the model predicts from the first frame and the '
                f'actions alone.</p><div class="grid wide">{figures}</div>')
    body = f"""
<header><p class="eyebrow">robo_rl world model</p><h1>{esc(doc["model"])}</h1><ul class="facts">{facts}</ul></header>
<section class="tiles">{"".join(tiles)}</section>{notes}
{more}
<h2>Open-loop error</h2><p>The model sees one frame and the actions, never what came after.</p><div class="grid">{charts}</div>
{ranks}
<h2>Calibration</h2><p>A threshold on the uncertainty cuts imagined episodes; at {number(u["threshold"], 3)} it cuts
{100 * u["steps_cut"]:.1f} % of these steps,
where the mean error is {number(u["error_cut"], 3)} (kept steps: {number(u["error_kept"], 3)}).</p><div class="grid">{calibration}</div>
<footer>Made by <code>robo_rl wm eval</code>. Intervals: percentile bootstrap over windows, Newcombe's method 10 for gaps.</footer>"""
    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    return template.replace("{{title}}", esc(f"{doc['model']} · world model")).replace("{{body}}", body)


def write_evaluation(folder: Path, doc: dict, arrays: dict, video: bool = True) -> None:
    """Write eval.json, eval.html and, if asked for, side-by-side videos into `folder`; doc["page"] is the page's path then."""
    files.private_folder(folder)
    clips = side_by_side(folder, arrays) if video else []
    doc["page"] = str(folder / "eval.html")
    files.write_json(folder / "eval.json", doc)
    files.write_bytes(folder / "eval.html", page(files.plain(doc), clips).encode())
