"""The page of `robo_rl wm eval`."""

import base64
from itertools import groupby
from pathlib import Path

import numpy as np

from robo_rl import files
from robo_rl.report.charts import Series, chart, whisker
from robo_rl.report.text import esc, filled
from robo_rl.report.world_model_film import side_by_side
from robo_rl.types import Each, silently

# ---- the page ----------------------------------------------------------------------------------------------


def number(v: "float | None", digits: int = 2) -> str:
    return "–" if v is None else f"{v:.{digits}f}"


def tile(name: str, value: str, small: str) -> str:
    return (
        f'<div class="card tile"><span>{esc(name)}</span><b>{esc(value)}</b><small>{esc(small)}</small></div>'
    )


def interval_series(title: str, rows: dict, colour: int) -> Series:
    """{horizon: interval} as a line with its band."""
    x = np.array([int(h) for h in rows], float)
    y = np.array(
        [[np.nan if i[k] is None else i[k] for k in ("value", "low", "high")] for i in rows.values()]
    ).reshape(-1, 3)
    return Series(title, x, y[:, 0], colour, y[:, 1], y[:, 2], "dots")


def open_loop_chart(name: str, entry: dict, against: "dict | None", others: "dict | None" = None) -> str:
    """Error by horizon: model, copy-last, maybe another model, and simple predictors `others`."""
    lines = [
        interval_series("model", entry["model"], 1),
        interval_series("standing still", entry["hold_last"], 6),
    ]
    if against:
        lines.append(interval_series(f"against: {against['name']}", against["model"], 3))
    lines += [
        interval_series(n, row["error"], c)
        for c, (n, row) in zip((2, 4, 5), (others or {}).items(), strict=False)
    ]
    lines.append(lines.pop(0))  # drawn last, over what it is held against
    what = (
        "root mean square error in standard deviations of the data"
        if name == "state"
        else "root mean square error of pixels, 0..1"
    ) + "; bands: 95 % bootstrap over episodes"
    return chart(f"Open-loop error, {name}", what, lines, x_name="control steps ahead", zero=True, log=True)


def coverage_chart(bound: dict, title: str = "Bound on the error") -> str:
    """Share of episodes within the bound by horizon, beside the promise."""
    x = np.array([int(h) for h in bound["covered"]], float)
    lines = [
        interval_series("within the bound", bound["covered"], 1),
        Series("promised", x, np.full(len(x), bound["promised"]), 6),
    ]
    what = (
        f"share of episodes whose error is below its bound, made {bound['made']}; bands: 95 % bootstrap "
        "over episodes"
    )
    least = min((i["low"] for i in bound["covered"].values()), default=1.0)
    return chart(
        title,
        what,
        lines,
        percent=True,
        y_range=(0.5 if least > 0.5 else 0.0, 1.0),
        x_name="control steps ahead",
        missing="Too few episodes for a bound.",
    )


def units_table(units: dict) -> str:
    """Mean errors in the task's own units at the shared horizons."""
    horizons = list(next(iter(units.values()))["model"])
    head = "".join(f'<th class="n">{h}</th>' for h in horizons)
    rows = [
        f'<tr><td class="name">{esc(name)}</td><td>{esc(q["unit"])}</td>'
        + "".join(
            f'<td class="n">{q["model"][h]["value"]:.3g}<br><small>{q["model"][h]["low"]:.3g} … '
            f"{q['model'][h]['high']:.3g}</small></td>"
            for h in horizons
        )
        + "</tr>"
        for name, q in units.items()
    ]
    return (
        '<div class="card scroll pad"><table><tr><th>Mean error after so many steps</th><th>unit</th>'
        + head
        + "</tr>"
        + "".join(rows)
        + "</table></div>"
    )


def baselines_table(b: dict) -> str:
    """Error of the model divided by that of each simple predictor; a ratio surely below or above 1 is
    marked."""
    horizons = list(next(iter(b["rows"].values()))["error"])
    rows = []
    for name, row in b["rows"].items():
        cells = []
        for h in horizons:
            d = row["difference"][h]
            look = "up" if d["high"] < 0 else "down" if d["low"] > 0 else ""
            cells.append(f'<td class="n"><span class="{look}">{number(row["ratio"][h])}</span></td>')
        rows.append(
            "<tr><td "
            f'class="name">{esc(name)}</td><td><small>{esc(b["settings"].get(name, ""))}</small></td>{"".join(cells)}</tr>'  # noqa: E501
        )
    return (
        '<div class="card scroll pad"><table><tr><th>Error of the model, as a share of that of</th><th></th>'
        + "".join(f'<th class="n">{h}</th>' for h in horizons)
        + "</tr>"
        + "".join(rows)
        + "</table></div>"
    )


def reliability_chart(title: str, what: str, bins: list[dict], x_name: str, line: bool) -> str:
    x, y = (np.array([b[k] for b in bins], float) for k in ("predicted", "actual"))
    series = [Series("measured", x, y, 1, look="dots")]
    if line:
        series.append(Series("perfect", np.array([0.0, 1.0]), np.array([0.0, 1.0]), 6))
    return chart(title, what, series, x_name=x_name, zero=True)


ALARMS = {"over": "overrated", "under": "underrated"}


def policies_table(doc: dict) -> str:
    """Success in the model and in reality of every policy, with the alarms to both sides."""
    rows = []
    for p in doc["policies"]:
        gap, badge = p["gap"], f'<span class="badge bad">{ALARMS[p["side"]]}</span>' if p["side"] else ""
        cut = f"{100 * p['cut']:.0f} %" if "cut" in p else ""
        rows.append(
            f'<tr><td class="name">{esc(p["name"])}</td><td class="n">{100 * p["model"]:.1f} %</td><td '
            f'class="n"><b>{100 * p["real"]:.1f} '
            f'%</b></td><td>{whisker(p["real"], p["real"], p["real"], 1)}</td><td class="n"><span '
            f'class="{"down" if p["alarm"] else ""}">{100 * gap["value"]:+.1f}</span> '
            f"<small>{100 * gap['low']:+.1f} … {100 * gap['high']:+.1f}</small></td><td "
            f'class="n">{cut}</td><td>{badge}</td></tr>'
        )
    real = "On the robot" if doc.get("ranking", {}).get("real") == "robot" else "In the simulator"
    return (
        '<div class="card scroll pad"><table><tr><th>Policy</th><th class="n">In the model</th><th '
        f'class="n">{real}</th><th></th><th class="n">Gap in points</th><th class="n">Beyond its '
        "doubt</th><th></th></tr>" + "".join(rows) + "</table></div>"
    )


def policies_section(doc: dict) -> str:
    """Ranking and alarms of the policies that were asked about."""
    r, e = doc["ranking"], doc["alarm"]
    same = "the same" if r["real"] == "simulator" else "its"
    return (
        f"<h2>Policies</h2><p>Success on {same} {r['starts']} starts. Gap: model minus {r['real']}, interval "
        f"widened for {r['policies']} looks; the alarm fires where it lies beyond {e['tolerance']:g} on "
        f"either side. Spearman {number(r['spearman']['value'])} [{number(r['spearman']['low'])}, "
        f"{number(r['spearman']['high'])}].</p>"
        f'{policies_table(doc)}<div class="gap"></div>{training_charts(doc)}'
    )


def probe_section(p: dict) -> str:
    """Policies unlike the data and the searches for one that exploits the model."""
    head = (
        f"<h2>Policies unlike the data</h2><p>{p['count']} affine policies of the state: the clone of the "
        "recorded successes with more and more noise, and random ones. Searches (CEM) look for success in "
        "the model that it does not itself doubt.</p>"
    )
    if "real" not in p["searches"][0]:
        rows = "".join(
            f'<tr><td class="name">{esc(q["name"])}</td><td class="n">{100 * q["model"]:.1f} %</td></tr>'
            for q in [*p["searches"], *p["policies"]]
        )
        return (
            head + "<p>There is no simulator to check them in: try on the robot what the model promises.</p>"
            '<div class="card scroll pad"><table><tr><th>Policy</th><th class="n">In the '
            f"model</th></tr>{rows}</table></div>"
        )
    r, unlike = p["ranking"], p["unlike"]
    return (
        head + f"<p>Ranking of the affine ones: Spearman {number(r['spearman']['value'])} "
        f"[{number(r['spearman']['low'])}, {number(r['spearman']['high'])}].</p>"
        + policies_table({"policies": [*p["searches"], *p["policies"]]})
        + '<div class="gap"></div><div class="grid">'
        + open_loop_chart("state", unlike, None)
        + coverage_chart(unlike["bound"], "Bound on the error off the data")
        + "</div>"
    )


def training_charts(doc: dict) -> str:
    """Model and real success over the checkpoints of each run."""
    figures = []
    for run, group in groupby(doc["policies"], lambda p: p["name"].rsplit("/", 1)[0]):
        ps = list(group)
        if len(ps) > 1:
            x = np.array([int(p["name"].rsplit("/", 1)[1]) for p in ps], float)
            figures.append(
                chart(
                    run,
                    "success of each checkpoint on the same starts",
                    [
                        Series(k, x, np.array([p[key] for p in ps]), c, look="dots")
                        for k, key, c in (("in the model", "model", 3), ("in the simulator", "real", 1))
                    ],
                    percent=True,
                    y_range=(0.0, 1.0),
                    x_name="environment steps of training",
                )
            )
    return f'<div class="grid">{"".join(figures)}</div>' if figures else ""


def tiles_of(doc: dict) -> str:
    """The numbers at the top."""
    f, s, u, b = doc["following"], doc["success"], doc["uncertainty"], doc["baselines"]["best"]
    first = next(iter(doc["open_loop"]))
    last = list(doc["open_loop"][first]["model"])[-1:]
    tiles = []
    if last:
        best = b.get(last[0])
        against = f"{best['name']}: × {number(best['ratio'])}" if best else "no simple predictor"
        tiles.append(
            tile(
                f"Error after {last[0]} steps",
                number(doc["open_loop"][first]["model"][last[0]]["value"], 3),
                against,
            )
        )
    covered = u["bound"]["covered"].values()
    tiles.append(
        tile(
            "Bound on the error",
            f"{100 * min(i['value'] for i in covered):.0f} %" if covered else "–",
            f"least coverage of a horizon; promised {100 * u['bound']['promised']:.0f} %",
        )
    )
    tiles.append(tile("Action following", number(f["correlation"]), f"correlation; gain {number(f['gain'])}"))
    did, known = s["tp"] + s["fn"], s.get("known", True)
    alarms = f"{s['fp']} false alarms" + ("" if did else "; no window here has a success")
    tiles.append(
        tile(
            "Successes found",
            f"{s['tp']} of {did}" if did else "–",
            alarms if known else "nobody said which episodes succeeded",
        )
    )
    tiles.append(tile("Uncertainty", number(u["auroc_worst_tenth"]), "AUROC of the worst tenth of errors"))
    if "policies" in doc:
        r, e = doc["ranking"], doc["alarm"]
        tiles.append(
            tile(
                "Spearman",
                number(r["spearman"]["value"]),
                f"{r['policies']} policies; worst regret {number(r['worst_regret'])}",
            )
        )
        tiles.append(
            tile(
                "Alarm",
                f"{len(e['over'])} over, {len(e['under'])} under" if e["over"] or e["under"] else "none",
                f"gap surely beyond {e['tolerance']:g}",
            )
        )
    if "eva" in doc:
        v = doc["eva"]
        tiles.append(
            tile(
                "Executability (EVA)",
                number(v["model"]),
                f"10 is best; the recording itself: {number(v['recorded'])}",
            )
        )
    return "".join(tiles)


def films(clips: list[tuple[str, Path]]) -> str:
    figures = "".join(
        '<figure class="card video"><video controls loop muted playsinline autoplay preload="auto" '
        f'src="data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"></video><figcaption><b>{esc(title)}</b>'
        "<span>left: recorded, right: the model; half speed, failures first</span></figcaption></figure>"
        for title, path in clips
    )
    return (
        (
            "<h2>Side by side</h2><p>Left what was recorded, right what the model predicts from the first "
            "frame and the "
            f'actions alone.</p><div class="grid wide">{figures}</div>'
        )
        if clips
        else ""
    )


def gate_section(g: dict) -> str:
    """What a learnt gate trusts beside what a threshold on the uncertainty does."""
    rows = "".join(
        f'<tr><td class="name">{name}</td><td class="n">{100 * g[key]["kept"]:.1f} %</td><td class="n">'
        f"{'' if g[key]['off'] is None else format(100 * g[key]['off'], '.1f') + ' %'}</td>"
        f'<td class="n">{number(g[key]["auroc"])}</td></tr>'
        for name, key in (("threshold on the uncertainty", "threshold"), ("learnt gate", "gate"))
    )
    return (
        "<h2>When to trust a rollout</h2><p>Steps trusted by rules that other episodes made, where one in "
        "ten may be off by more than "
        f'{g["tolerance"]:g} std; {100 * g["off"]:.1f} % of all are.</p><div class="card scroll '
        'pad"><table><tr><th>Rule</th><th class="n">Trusted</th><th class="n">Of these off</th><th '
        'class="n">AUROC of "off"</th></tr>' + rows + "</table></div>"
    )


def page(doc: dict, clips: list[tuple[str, Path]]) -> str:
    """The whole page from eval.json's document."""
    facts = "".join(
        f"<li><span>{esc(k)}</span>{esc(doc[v])}</li>"
        for k, v in (
            ("kind", "kind"),
            ("env", "sim"),
            ("data", "data"),
            ("learnt from", "learnt_from"),
            ("windows", "windows"),
            ("seed", "seed"),
        )
        if doc.get(v) not in (None, "")
    )
    s, u, b = doc["success"], doc["uncertainty"], doc["baselines"]
    said = (
        '<section class="card pad"><p style="max-width: none; margin: 10px '
        f'14px"><b>{esc(doc["verdict"])}</b></p></section>'
        if "verdict" in doc
        else ""
    )
    # a verdict has the first of them or, where the model is of no use, none
    against_it = [o for o in doc.get("objections", []) if o not in doc.get("verdict", "")]
    notes = (
        (
            '<section class="card notes"><ul>'
            + "".join(
                f"<li>{esc(n)}</li>" for n in [*(f"Against it too: {o}." for o in against_it), *doc["notes"]]
            )
            + "</ul></section>"
        )
        if doc["notes"] or against_it
        else ""
    )
    against, moved = doc.get("against"), {n: r for n, r in b["rows"].items() if n != "standing still"}
    charts = "".join(
        open_loop_chart(
            n,
            t,
            {"name": against["model"], "model": against["open_loop"][n]["model"]}
            if against and n in against["open_loop"]
            else None,
            moved if n == "state" else None,
        )
        for n, t in doc["open_loop"].items()
    )
    calibration = coverage_chart(u["bound"]) + reliability_chart(
        "Uncertainty against error",
        "mean open-loop error of ten equal groups by uncertainty",
        u["bins"],
        "predicted uncertainty",
        False,
    )
    if s.get("known", True):
        calibration += reliability_chart(
            "Success probability",
            "share of windows that succeed, in ten equal groups by the greatest probability of a step",
            s["bins"],
            "greatest probability",
            True,
        )
    cut = "" if u["error_cut"] is None else f", whose mean error is {number(u['error_cut'], 3)}"
    body = f"""
<header><p class="eyebrow">robo_rl world model</p><h1>{esc(doc["model"])}</h1><ul class="facts">{facts}</ul></header>
{said}<section class="tiles">{tiles_of(doc)}</section>{notes}
{films(clips)}
<h2>Open-loop error</h2><p>The model sees one frame and the actions, never what came after. The simple predictors learnt from
{b["transitions"]} recorded steps of other episodes.</p><div class="grid">{charts}</div><div class="gap"></div>{baselines_table(b)}
{'<div class="gap"></div>' + units_table(doc["units"]) if doc["units"] else ""}
{policies_section(doc) if "policies" in doc else ""}
{probe_section(doc["probe"]) if "probe" in doc else ""}
<h2>Calibration</h2><p>A threshold on the uncertainty cuts imagined episodes; at {number(u["threshold"], 3)} it cuts
{100 * u["steps_cut"]:.1f} % of these steps{cut}. The mean error of kept steps is {number(u["error_kept"], 3)}.</p><div class="grid">{calibration}</div>
{gate_section(doc["gate"]) if doc.get("gate") else ""}
<footer>Made by <code>robo_rl wm eval</code>. Intervals: percentile bootstrap over episodes, Newcombe's method 10 for gaps.</footer>"""  # noqa: E501
    return filled(f"{doc['model']} · world model", body)


def write_evaluation(
    folder: Path, doc: dict, arrays: dict, video: bool = True, each: Each = silently
) -> None:
    """Write eval.json, eval.html and, if asked for, side-by-side videos into `folder`; doc["page"] is the
    page's path then."""
    files.private_folder(folder)
    clips = side_by_side(folder, arrays, each) if video else []
    doc["page"] = str(folder / "eval.html")
    files.write_json(folder / "eval.json", doc)
    files.write_bytes(folder / "eval.html", page(files.plain(doc), clips).encode())
