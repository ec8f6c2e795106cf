"""The pages of measured results (docs/results.md, and docs/results/ with one for each file of results) and
the README's table."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from robo_rl import files, stats
from robo_rl.errors import UserError
from robo_rl.report import results_chart
from robo_rl.report.results_chart import RunDots, chart
from robo_rl.results import (
    CURRENT,
    FOREIGN,
    NO_COMMIT,
    NO_FILES,
    NO_GIT,
    OLDER,
    STEPS,
    UNKNOWN,
    ResultFile,
    ResultRow,
    age,
    head_of,
    read_all,
    repository_of,
)

BEGIN, END = "<!-- results -->", "<!-- /results -->"
MADE = "Generated from `results/{name}.json` by `robo_rl results page`; change the rows, not this page.\n"
HEAD = """# Measured results

{made}
The figures that say most are in the first table; every topic has a page with all of its rows, their commands and machines.
How the benches measure: [Measure speed](howto/bench.md). What falls short: [known limitations](limitations.md).

An interval is a Wilson 95 % interval unless its row says otherwise. *≤ abc1234*: measured at that commit or before; it is the one that
wrote the figure down. Where a line has several seeds, its figures are in their order.
"""  # noqa: E501
NO_REPOSITORY = "This page was made outside a git repository: no row was compared with the code.\n"
SECONDS = re.compile(r"^(\d+ s) from the start")  # how the note of a run's figure begins
OF_RUNS = {  # column of the table of runs: what `robo_rl results add RUN` calls its figures
    "after supervision": ("success after supervised learning", "return after supervised learning"),
    "after RL": (
        "success after online RL",
        "success at the end",
        "success after labelled episodes",
        "return after online RL",
    ),
    "best checkpoint": ("success best checkpoint", "return best checkpoint"),
    f"{STEPS[0].upper()}{STEPS[1:]}": (STEPS,),
}
ABOUT = ("commit", "date", "conditions")
COLUMN = {measure: column for column, measures in OF_RUNS.items() for measure in measures}
COMPARED = "Compared with the code"  # how the line that changes with every commit begins


def write_pages(folder: Path, page: Path, readme: "Path | None") -> list[str]:
    """Write the page, those of its topics, in the folder beside it that has its name, and the table between
    the marks of `readme` -> the paths that were written.

    UserError: there is no file of results, or the README lacks the marks.
    """
    found = read_all(folder)
    if not found:
        raise UserError(f"{folder} has no file of results; add one with: robo_rl results add RUN")
    text = readme.read_text(encoding="utf-8") if readme is not None and readme.exists() else None
    if text is not None and (BEGIN not in text or END not in text):
        raise UserError(
            f"{readme} has no place for the table: put {BEGIN} and {END} on lines of their own, or pass "
            "--readme ''"
        )
    repository, topics = repository_of(folder), page.with_suffix("")
    made = {page: index_text(found, repository, topics.name)}
    drawn = {file.path.stem: picture(file.rows) for file in found}
    made |= {topics / f"{f.path.stem}.md": topic_text(f, repository, bool(drawn[f.path.stem])) for f in found}
    made |= {topics / f"{stem}.svg": svg for stem, svg in drawn.items() if svg}
    if readme is not None and text is not None:
        made[readme] = with_table(text, found)
    for path, content in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(path, content.encode())
    for pattern, mark in (("*.md", MADE), ("*.svg", results_chart.MADE)):
        for path in topics.glob(pattern):  # of a file of results that is no more
            if path not in made and mark.format(name=path.stem) in path.read_text(encoding="utf-8"):
                path.unlink()
    return [str(path) for path in made]


def index_text(found: Sequence[ResultFile], repository: "Path | None", folder: str) -> str:
    """The first page in Markdown: the figures that say most, and a line per topic."""
    lines = ["| topic | figures | measured | of the present code |", "|---|---|---|---|"]
    for file in found:
        dates = sorted({row.date[:10] for row in file.rows})
        present = sum(age(row, repository) == CURRENT for row in file.rows)
        lines.append(
            cells(
                f"[{file.title}]({folder}/{file.path.stem}.md)",
                str(len(file.rows)),
                dates[0] + (f" to {dates[-1]}" if len(dates) > 1 else ""),
                f"*{present}*",
            )
        )
    parts = [
        HEAD.format(made=MADE.format(name="*")),
        age_text([row for file in found for row in file.rows], repository, " on the pages of their topics"),
        headline_table(found) + "\n",
        "## Topics\n",
        *lines,
    ]
    return "\n".join(parts) + "\n"


def topic_text(file: ResultFile, repository: "Path | None", drawn: bool) -> str:
    """The page of one file of results in Markdown; drawn: there is a picture of it."""
    about = [f"{file.about}\n"] if file.about else []
    return "\n".join(
        [
            f"# {file.title}\n",
            MADE.format(name=file.path.stem),
            *about,
            age_text(file.rows, repository),
            *([f"![Success after supervision and after RL]({file.path.stem}.svg)\n"] if drawn else []),
            table(file.rows, repository),
            conditions(file.rows),
        ]
    )


def age_text(rows: Sequence[ResultRow], repository: "Path | None", where: str = "") -> str:
    """What became of the code since the rows were measured. Code changes daily, so that most figures are of
    earlier code: these are counted here, and the others are marked (`where`) in tables (see `commit`)."""
    newest = max(rows, key=lambda row: row.date)
    said = f"Newest figure: {newest.date[:10]}, commit {origin(newest)}.\n"
    if repository is None:
        return said + NO_REPOSITORY
    older, n = sum(age(row, repository) == OLDER for row in rows), len(rows)
    at, on = head_of(repository)
    how_many = f"all {n}" if older == n else f"{older} of {n}"
    marked = "" if older == n else f" The others are marked{where}."
    return (
        f"{said}{COMPARED} at {at} of {on}: {how_many} figures are of earlier code: a file that they "
        f"measure changed after their commit.{marked}\n"
    )


def table(rows: Sequence[ResultRow], repository: "Path | None") -> str:
    """Tables: of runs, a line each with what supervision left and what RL made of it; and of all else, a line
    per thing with what was measured of it. The conditions are numbered (see `conditions`)."""
    numbers = condition_numbers(rows)
    groups: dict[tuple, dict[str, list[ResultRow]]] = {}
    for row in rows:
        subject, measure = subject_of(row)
        groups.setdefault((subject, condition(row)), {}).setdefault(measure, []).append(row)
    runs = {key: found for key, found in groups.items() if all(m in COLUMN for m in found)}
    columns = [c for c in OF_RUNS if any(COLUMN[m] == c for found in runs.values() for m in found)]
    tables = []
    if runs:
        tables.append(head_of_table(["run", "seeds", *columns, "n", *ABOUT]))
        tables += [
            run_line(subject, found, columns, numbers[at], repository)
            for (subject, at), found in runs.items()
        ]
    if len(runs) < len(groups):
        tables += [""] if runs else []
        tables.append(head_of_table(["what", "measured", "n", "seeds", *ABOUT]))
        tables += [
            line(subject, found, numbers[at], repository)
            for (subject, at), found in groups.items()
            if (subject, at) not in runs
        ]
    return "\n".join(tables) + "\n"


def picture(rows: Sequence[ResultRow]) -> str:
    """SVG of the runs whose success is known after supervision and after RL; "": of fewer than three."""
    dots: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        subject, measure = subject_of(row)
        if measure in COLUMN and row.unit == "of 1" and not isinstance(row.value, str):
            dots.setdefault(subject, {}).setdefault(COLUMN[measure], []).append(row.value)
    before, after = list(OF_RUNS)[:2]
    runs = [
        RunDots(subject, tuple(found[before]), tuple(found[after]))
        for subject, found in dots.items()
        if before in found and after in found
    ]
    return chart(sorted(runs, key=lambda run: run.name.partition(", ")[::-1])) if len(runs) > 2 else ""


def subject_of(row: ResultRow) -> tuple[str, str]:
    """(what, what was measured of it): "pi_rl, mujoco reach", "success after online RL"."""
    subject, _, measure = row.what.rpartition(": ")
    return (subject, measure) if subject else (measure, "")


def head_of_table(columns: Sequence[str]) -> str:
    return f"{cells(*columns)}\n|{'---|' * len(columns)}"


def run_line(
    subject: str,
    found: dict[str, list[ResultRow]],
    columns: Sequence[str],
    number_of: int,
    repository: "Path | None",
) -> str:
    """The seeds of one run under one condition: a figure of each in every column, in their order."""
    rows = [row for measured in found.values() for row in measured]
    seeds = sorted({row.seeds for row in rows})
    by_column: dict[str, dict[tuple, ResultRow]] = {}
    for measure, measured in found.items():
        by_column.setdefault(COLUMN[measure], {}).update({row.seeds: row for row in measured})
    notes = (row.note for row in rows if not SECONDS.match(row.note))
    return cells(
        subject,
        joined(str(seed) for of_one in seeds for seed in of_one),
        *(of_seeds([by_column.get(column, {}).get(seed) for seed in seeds]) for column in columns),
        joined(str(row.n or "") for row in rows),
        *about(rows, number_of, notes, repository),
    )


def of_seeds(rows: "Sequence[ResultRow | None]") -> str:
    """One figure of several runs. Of one: with its own interval. Of more: their mean with Student's interval
    over seeds, which no share leaves [0, 1] by, and all of them."""
    found = [row for row in rows if row is not None]
    if not found:
        return ""
    if subject_of(found[0])[1] == STEPS:
        return ", ".join(
            "–" if row is None else f"{value(row)} ({s[1]})" if (s := SECONDS.match(row.note)) else value(row)
            for row in rows
        )
    if len(rows) == 1:
        return f"{value(found[0])} {interval(found[0])}".strip()
    each = ", ".join("–" if row is None else value(row) for row in rows)
    if len(found) < 3 or not all(isinstance(row.value, float | int) for row in found):
        return each
    mean = stats.mean_over_seeds([float(row.value) for row in found])
    if found[0].unit == "of 1":
        return f"{mean.value:.3f} [{max(mean.low, 0):.2f}, {min(mean.high, 1):.2f}] of {each}"
    return f"{number(mean.value)} [{number(mean.low)}, {number(mean.high)}] of {each}"


def line(subject: str, found: dict[str, list[ResultRow]], number_of: int, repository: "Path | None") -> str:
    """The figures of one thing, under one condition: a line in its cell for each that has a name."""
    rows = [row for measured in found.values() for row in measured]
    only = len(found) == 1
    shown = [(measure, figures(measured)) for measure, measured in found.items()]
    return cells(
        shown[0][1][0] if only else subject,
        "<br>".join(said[1] if only else f"{measure or subject}: {said[1]}" for measure, said in shown),
        joined(said[2] for _, said in shown),
        joined(said[3] for _, said in shown),
        *about(rows, number_of, (row.note for row in rows), repository),
    )


def about(
    rows: Sequence[ResultRow], number_of: int, notes: Iterable[str], repository: "Path | None"
) -> tuple[str, str, str]:
    """Where figures are from: commits, dates, the number of their conditions with what is noted of them."""
    return (
        joined(commit(row, repository) for row in rows),
        dates(rows),
        f"({number_of}) {joined(notes, '; ')}".strip(),
    )


def figures(rows: Sequence[ResultRow]) -> tuple[str, str, str, str]:
    """Of rows of one thing: what, its figures with their intervals, n, seeds."""
    return (
        rows[0].what,
        ", ".join(f"{value(row)} {interval(row)}".strip() for row in rows),
        joined(str(row.n or "") for row in rows),
        ", ".join(str(seed) for row in rows for seed in row.seeds),
    )


def dates(rows: Sequence[ResultRow]) -> str:
    return joined(row.date[:10] for row in rows)


def condition(row: ResultRow) -> tuple[str, str]:
    """(the command without the number of its seed, the machine)."""
    return re.sub(r"--seed[ =]\d+", "--seed SEED", row.command), row.machine


def condition_numbers(rows: Sequence[ResultRow]) -> dict[tuple[str, str], int]:
    return {c: i + 1 for i, c in enumerate(dict.fromkeys(map(condition, rows)))}


def conditions(rows: Sequence[ResultRow]) -> str:
    """The commands and machines that the table's numbers stand for."""
    out = []
    for (command, machine), i in condition_numbers(rows).items():
        ran = "command unknown" if command == UNKNOWN else f"`{command}`"
        out.append(f"{i}. {ran}; " + ("machine unknown" if machine == UNKNOWN else machine))
    return "\n".join(out) + "\n"


def cells(*texts: str) -> str:
    """A line of a table."""
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def number(x: "float | str") -> str:
    """Four digits that count, without an exponent; text as it is."""
    if isinstance(x, str):
        return x
    if float(x).is_integer() and abs(x) >= 10:
        return f"{int(x):,}"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def value(row: ResultRow) -> str:
    if row.unit == "of 1" and not isinstance(row.value, str):
        return f"{row.value:.3f}"
    return f"{number(row.value)} {row.unit}".strip()


def interval(row: ResultRow) -> str:
    if row.interval is None:
        return ""
    low, high = (f"{x:.3f}" if row.unit == "of 1" else number(x) for x in row.interval)
    return f"[{low}, {high}]" + (f" {row.interval_is}" if "Wilson" not in row.interval_is else "")


def commit(row: ResultRow, repository: "Path | None") -> str:
    """The commit and, in italics, its age, unless it is of earlier code, as most are (see `age_text`)."""
    mark = age(row, repository)
    said = mark not in (OLDER, NO_GIT) and not (mark == NO_COMMIT and row.recorded)
    return " ".join([*([] if origin(row) == UNKNOWN else [origin(row)]), *([f"*{mark}*"] if said else [])])


def without_marks(page: str) -> str:
    """The page without what changes with every commit of the code: the marks of age, and how many rows have
    them."""
    marks = "|".join((CURRENT, FOREIGN, NO_FILES, r"\d+"))
    return re.sub(rf" ?\*({marks})\*|(?m:^{COMPARED} .*$)", "", page)


def headline_table(found: Sequence[ResultFile]) -> str:
    """The rows that have a `headline`, in its order, as the README shows them."""
    groups: dict[str, list[ResultRow]] = {}
    for row in sorted(
        (row for file in found for row in file.rows if row.headline), key=lambda row: row.headline
    ):
        groups.setdefault(row.what, []).append(row)
    lines = ["| what | measured | n | seeds | commit | date |", "|---|---|---|---|---|---|"]
    lines += [cells(*figures(rows), joined(map(origin, rows)), dates(rows)) for rows in groups.values()]
    return "\n".join(lines)


def origin(row: ResultRow) -> str:
    """The commit of the measurement, or "≤" and the one that wrote it down."""
    return row.commit if row.commit != UNKNOWN else f"≤ {row.recorded[:12]}" if row.recorded else UNKNOWN


def joined(texts: Iterable[str], by: str = ", ") -> str:
    """The texts that say something, each once."""
    return by.join(filter(None, dict.fromkeys(texts)))


def with_table(text: str, found: Sequence[ResultFile]) -> str:
    """`text` with the present table between its marks."""
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{headline_table(found)}\n{END}{rest.split(END, 1)[1]}"
