"""What people beside the robots did, and what it gave."""

from robo_rl.experiment.correct import read_rounds
from robo_rl.report.charts import chart
from robo_rl.report.data import RunRecord
from robo_rl.report.text import pct, points
from robo_rl.report.training import per_episode, rl_series


def people(run: RunRecord) -> str:
    """What the people beside the robots did, by round, and what it gave."""
    rounds = read_rounds(run.folder)
    if not rounds:
        return beside(run)
    names = [
        ("operator_minutes", "operator minutes", ".2f"),
        ("interventions", "interventions", "d"),
        ("interventions_per_hour", "per robot hour", ".0f"),
        ("interventions_per_success", "per success", ".2f"),
        ("reaction_mean", "reaction [s]", ".2f"),
        ("human_share", "human steps", ".1%"),
        ("utilisation", "operators busy", ".0%"),
    ]
    head = "".join(
        f"<th>{t}</th>" for t in ("round", "success", *(label for _, label, _ in names), "gain per minute")
    )
    rows, minutes = "", 0.0
    for x in rounds:
        a, e = x["operator_stats"], x["eval"]
        minutes += a.get("operator_minutes", 0.0)
        cells = [str(x["round"]), f"{pct(e['success'])} ({100 * e['low']:.1f} … {100 * e['high']:.1f} %)"]
        cells += [format(a[key], how) if key in a else "–" for key, _, how in names]
        cells.append(f"{(e['success'] - rounds[0]['eval']['success']) / minutes:+.3f}" if minutes else "–")
        rows += "<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
    return (
        "<h2>People</h2><p>Practice with a person beside the robots; success is without help, on the fixed "
        "starts. The gain is success per operator minute since round 0.</p><div class='card "
        f"pad'><table><tr>{head}</tr>{rows}</table></div>"
    )


def beside(run: RunRecord) -> str:
    """What the person beside a run that learns from replay did, and what a minute of it gave; "" where there
    was none."""
    minutes = rl_series(run, "human/operator_minutes", "operator minutes", 3)
    if not minutes or not len(minutes[0].y):
        return ""
    total, gain = float(minutes[0].y[-1]), ""
    if run.start is not None and run.end is not None and total > 0:
        gain = (
            f" Success without help went up by {points(run.end.rate.value - run.start.rate.value)} points, "
            f"{100 * (run.end.rate.value - run.start.rate.value) / total:.0f} a minute."
        )
    charts = [
        chart("Operator minutes", "since the start", minutes, zero=True),
        chart(
            "Human steps",
            "share of the control steps of the episodes that ended",
            per_episode(run, "human/step_share", "human"),
            percent=True,
            y_range=(0.0, 1.0),
            missing="Nobody took over.",
        ),
        chart(
            "Without help",
            "share of training episodes that succeeded without help",
            per_episode(run, "human/unassisted_success", "success"),
            percent=True,
            y_range=(0.0, 1.0),
            missing="No episode ended.",
        ),
    ]
    return (
        f"<h2>People</h2><p>A person helped for {total:.1f} minutes.{gain}</p><div "
        f"class='small'>{''.join(charts)}</div>"
    )
