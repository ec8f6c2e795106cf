"""The page and the side-by-side videos of `robo_rl wm eval`."""

import base64
from itertools import groupby
from pathlib import Path

import numpy as np

from robo_rl import files
from robo_rl.report.charts import Series, chart, whisker
from robo_rl.report.text import esc

SHOWN = 6  # windows in a video
SIZE = 160  # pixels of a drawn panel


def side_by_side(folder: Path, arrays: dict) -> list[tuple[str, Path]]:
    """Write videos, reality above and the model below, a column per window -> (title, file) of each."""
    from robo_rl.data.video import write_video

    w, p, model = arrays["windows"], arrays["predicted"], arrays["model"]
    pick = np.flatnonzero(w.made[:, min(15, w.made.shape[1] - 1)])[:SHOWN if w.images else SHOWN // 2]  # drawn panels are wide
    if not len(pick):
        return []
    steps = int(w.seen[pick].sum(1).max())
    panels: dict[str, tuple[np.ndarray, ...]] = {f"camera {v}": (w.images[v][pick, :steps], p.images[v][pick, :steps]) for v in w.images}
    drawn = draw(model.spec.control.state_names, w.state[pick, :steps], p.state[pick, :steps])
    if drawn is not None and not panels:
        panels["the hand (blue) and what it moves to (other colours), from above and from the side"] = drawn
    out, rate = [], max(1, round(1 / model.spec.control.period / 2))
    for i, (title, (real, imagined)) in enumerate(panels.items()):
        grow = max(1, SIZE // real.shape[2])
        rows = [np.concatenate(list(x), 2).repeat(grow, 1).repeat(grow, 2) for x in (real, imagined)]
        line = np.full((steps, 4, *rows[0].shape[2:]), 200, np.uint8)
        path = folder / f"side-by-side-{i}.mp4"
        write_video(path, np.concatenate([rows[0], line, rows[1]], 1), rate)
        out.append((title, path))
    return out


def draw(names: tuple[str, ...], *states: np.ndarray) -> "tuple[np.ndarray, ...] | None":
    """States [B,T,S] as pictures uint8 [B,T,SIZE,2 SIZE,3]: the hand ee_x, ee_y, ee_z and each <thing>_dx, _dy, _dz
    from it, from above and from the side; None where the state has no such names."""
    if not {"ee_x", "ee_y", "ee_z"} <= set(names):
        return None
    at = {n: i for i, n in enumerate(names)}
    hand = [s[..., [at["ee_x"], at["ee_y"], at["ee_z"]]] for s in states]
    things = [n[:-3] for n in names if n.endswith("_dx") and f"{n[:-1]}y" in at and f"{n[:-1]}z" in at]
    points = [[h] + [h + s[..., [at[f"{t}_d{c}"] for c in "xyz"]] for t in things] for h, s in zip(hand, states, strict=False)]
    every = np.concatenate([p.reshape(-1, 3) for p in points[0]])
    middle, half = (every.max(0) + every.min(0)) / 2, max(float((every.max(0) - every.min(0)).max()) / 2 * 1.15, 1e-3)
    colours = ((37, 99, 235), (217, 119, 6), (219, 39, 119), (13, 148, 136))
    out = []
    for kind in points:
        b, t = kind[0].shape[:2]
        frames = np.full((b, t, SIZE, 2 * SIZE, 3), 246, np.uint8)
        frames[:, :, :, SIZE - 1:SIZE + 1] = 200
        for k in range(len(kind) - 1, -1, -1):
            unit = (kind[k] - middle) / half  # -1 .. 1
            for panel, (x, y) in enumerate(((1, 0), (1, 2))):
                px = ((1 - unit[..., x]) / 2 * (SIZE - 1)).clip(3, SIZE - 4).astype(int) + panel * SIZE
                py = ((1 - unit[..., y]) / 2 * (SIZE - 1)).clip(3, SIZE - 4).astype(int)
                r = 3 if k == 0 else 4
                for dy in range(-r + 1, r):
                    for dx in range(-r + 1, r):
                        if dx * dx + dy * dy < r * r:
                            frames[np.arange(b)[:, None], np.arange(t)[None], (py + dy).clip(0, SIZE - 1),
                                   (px + dx).clip(0, 2 * SIZE - 1)] = colours[k % len(colours)]
        out.append(frames)
    return tuple(out)


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
                          "<span>top: reality, bottom: the model, half speed</span></figcaption></figure>" for title, path in clips)
        more = ('<h2>Side by side</h2><p>Recorded episodes above; below what the model imagined from their first frame and '
                f'actions alone.</p><div class="grid">{figures}</div>')
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
