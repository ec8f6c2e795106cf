"""How RECAP labelled the actions of recorded episodes (`experiment.recap`): its table on a run's page."""

from robo_rl.errors import UserError
from robo_rl.files import read_json
from robo_rl.report.data import RunRecord
from robo_rl.report.text import esc

WORDS = """<h2>Labels</h2>
<p>Which recorded actions are called positive: those whose advantage is above the threshold, and those of a
person. The values are judged on episodes that they did not learn from. At 1 they explain the returns; at 0 or
below they tell nothing of them.</p>"""


def label_table(run: RunRecord) -> str:
    """The labels of every round, and of every instruction where there are several; "" of a run without."""
    try:
        rounds = read_json(run.folder / "recap.json", list)
    except (OSError, UserError, ValueError):
        return ""
    if not rounds:
        return ""
    several = len(rounds) > 1
    body = "".join(
        "<tr>"
        + f'<td class="n">{row["round"]}</td>' * several
        + f'<td class="n">{row["steps"]:,}</td>'
        + "".join(
            f'<td class="n">{row[name]:.2f}</td>'
            for name in ("value_explained", "value_loss", "value_loss_held_out")
        )
        + f'<td class="n">{row["epsilon"]:.3f}</td><td class="n"><b>{percent(row["positive"])}</b></td>'
        + "".join(
            f'<td class="n">{percent(row[name])}</td>'
            for name in ("positive_of_successes", "positive_of_failures", "forced")
        )
        + "</tr>"
        for row in rounds
    )
    names = ["Round"] * several + [
        "Control steps",
        "Returns explained",
        "Value loss [nats]",
        "held out",
        "Threshold",
        "Positive",
        "of successes",
        "of failures",
        "Of a person",
    ]
    return WORDS + table(names, body) + by_task(rounds[-1].get("tasks", []))


def by_task(tasks: list[dict]) -> str:
    """The labels of several instructions."""
    if len(tasks) < 2:
        return ""
    body = "".join(
        f'<tr><td class="name">{esc(t["task"])}</td><td class="n">{t["steps"]:,}</td>'
        f'<td class="n">{percent(t["of_successes"])}</td><td class="n">{percent(t["positive"])}</td></tr>'
        for t in tasks
    )
    return '<div class="gap"></div>' + table(
        ["Instruction", "Control steps", "In successes", "Positive"], body
    )


def table(names: list[str], body: str) -> str:
    """A table whose columns are numbers but for that of instructions."""
    head = "".join(f"<th{'' if name == 'Instruction' else ' class=n'}>{name}</th>" for name in names)
    return f'<div class="card scroll pad"><table><tr>{head}</tr>{body}</table></div>'


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
