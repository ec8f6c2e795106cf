"""Results: rows keep what made them, old ones are told from git, and the page and the README's table show
what the files say."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import TINY, robo_rl

from robo_rl import results
from robo_rl.errors import UserError
from robo_rl.provenance import git_hash
from robo_rl.report import results_chart, results_page
from robo_rl.results import ResultRow, add_rows, age, read

ROOT = Path(__file__).parent.parent
ROW = ResultRow(
    what="reach: success",
    value=0.5,
    unit="of 1",
    n=200,
    interval=(0.43, 0.57),
    seeds=(0,),
    commit="abc",
    date="2026-11-23",
    machine="2 cores",
    command="robo_rl train",
    files=("a.py",),
)


# ---- files of rows -----------------------------------------------------------------------------------------


def test_rows_are_read_back_as_they_were_written(tmp_path):
    rows = [ROW, replace(ROW, seeds=(1,), interval=None, n=None, note="slow", value="3 of 4")]
    path = add_rows(tmp_path / "new" / "x.json", "Success", rows)
    assert read(path).rows == tuple(rows) and read(path).title == "Success"


def test_a_row_takes_the_place_of_an_earlier_one_of_the_same_thing_and_others_stay(tmp_path):
    path = add_rows(tmp_path / "x.json", "T", [replace(ROW, headline="01"), replace(ROW, seeds=(1,))])
    add_rows(path, "another title", [replace(ROW, value=0.9, commit="def"), replace(ROW, what="new")])
    assert [(r.what, r.seeds, r.value) for r in read(path).rows] == [
        ("reach: success", (0,), 0.9),
        ("reach: success", (1,), 0.5),
        ("new", (0,), 0.5),
    ]
    assert read(path).title == "T" and read(path).rows[0].headline == "01", "in the README's table too"


def test_what_all_rows_share_stands_once_in_the_file(tmp_path):
    (tmp_path / "x.json").write_text(
        json.dumps(
            {
                "title": "T",
                "commit": "abc",
                "seeds": [3],
                "rows": [{"what": "a", "value": 1}, {"what": "b", "value": 2, "commit": "def"}],
            }
        )
    )
    a, b = read(tmp_path / "x.json").rows
    assert (a.commit, a.seeds, b.commit, b.seeds) == ("abc", (3,), "def", (3,))


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"title": "T"}, "has no rows"),
        ({"rows": [{"what": "a", "value": [1]}]}, "number or text"),
        ({"rows": [{"what": "a", "value": 1, "interval": [2, 1]}]}, r"must be \(low, high\)"),
        ({"rows": [{"value": 1}]}, "what"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(document, says, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=f"bad.json.*{says}"):
        read(path)


# ---- age ---------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path):
    """A repository of two commits, the second of which changes b.py -> (folder, first commit, second
    commit)."""

    def git(*words):
        return subprocess.run(
            ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    git("init", "-q")
    heads = []
    for text in ("1", "2"):
        (tmp_path / "a.py").write_text("1")
        (tmp_path / "b.py").write_text(text)
        git("add", "a.py", "b.py")
        git("commit", "-q", "-m", text)
        heads.append(git("rev-parse", "--short=12", "HEAD"))
    return tmp_path, *heads


def test_a_row_is_older_than_the_code_once_a_file_that_it_measures_changed(repository):
    folder, first, second = repository
    assert age(replace(ROW, commit=first, files=("a.py",)), folder) == results.CURRENT
    assert age(replace(ROW, commit=first, files=("a.py", "b.py")), folder) == results.OLDER
    # measured with changes
    assert age(replace(ROW, commit=first + "+", files=("b.py",)), folder) == results.OLDER
    assert age(replace(ROW, commit=second, files=("b.py",)), folder) == results.CURRENT


def test_a_commit_that_changed_the_form_of_code_alone_makes_no_row_older(repository):
    folder, first, second = repository
    whole = subprocess.run(
        ["git", "-C", folder, "rev-parse", second], check=True, capture_output=True, text=True
    ).stdout
    (folder / ".git-blame-ignore-revs").write_text(f"# form\n{whole}")
    assert age(replace(ROW, commit=first, files=("b.py",)), folder) == results.CURRENT


def test_a_row_that_cannot_be_compared_says_why(repository):
    folder, first, second = repository
    assert age(replace(ROW, commit="123456789abc"), folder) == results.FOREIGN
    assert age(replace(ROW, commit=first, files=()), folder) == results.NO_FILES
    assert age(replace(ROW, commit=first), None) == results.NO_GIT
    unknown = replace(ROW, commit=results.UNKNOWN, files=("b.py",))
    assert age(unknown, folder) == results.NO_COMMIT
    # it was measured before it was written down
    assert age(replace(unknown, recorded=first), folder) == results.OLDER
    assert age(replace(unknown, recorded=second), folder) == results.NO_COMMIT


def test_a_figure_that_was_written_down_without_its_commit_is_shown_as_of_that_commit_or_before(repository):
    folder, first, second = repository
    unknown = replace(ROW, commit=results.UNKNOWN, files=("b.py",))
    assert results_page.commit(replace(unknown, recorded=second), folder) == f"≤ {second}"
    assert results_page.commit(replace(unknown, recorded=first), folder) == f"≤ {first}"
    assert results_page.commit(unknown, folder) == f"*{results.NO_COMMIT}*"


def test_outside_a_repository_the_page_marks_nothing_and_says_so(tmp_path):
    add_rows(tmp_path / "results" / "x.json", "T", [ROW])
    assert results.repository_of(tmp_path) is None
    results_page.write_pages(tmp_path / "results", tmp_path / "docs" / "results.md", None)
    page = (tmp_path / "docs" / "results" / "x.md").read_text()
    assert "no row was compared with the code" in page and "*present code*" not in page


def test_a_commit_is_marked_as_changed_by_code_and_not_by_the_results_that_were_written_since(tmp_path):
    def git(*words):
        subprocess.run(
            ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words],
            check=True,
            capture_output=True,
        )

    (tmp_path / "results").mkdir()
    (tmp_path / "code").mkdir()
    for name in ("results/x.json", "code/a.py", "README.md"):
        (tmp_path / name).write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    commit = git_hash(tmp_path / "code")
    (tmp_path / "results/x.json").write_text("2")
    (tmp_path / "README.md").write_text("2")
    assert len(commit) == 12 and git_hash(tmp_path / "code") == commit
    (tmp_path / "code/a.py").write_text("2")
    assert git_hash(tmp_path / "code") == commit + "+"


# ---- page and README ---------------------------------------------------------------------------------------


def test_a_topic_has_a_page_with_a_line_per_thing_and_the_first_page_lists_them(repository):
    folder, first, _ = repository
    commands = [f"robo_rl train --seed {seed}" for seed in (0, 1)]
    rows = [
        replace(
            ROW,
            commit=first,
            files=("b.py",),
            what="a | b",
            note="a note",
            seeds=(seed,),
            command=commands[seed],
            value=0.5 + seed / 4,
        )
        for seed in (0, 1)
    ]
    add_rows(
        folder / "results" / "x.json",
        "Success",
        [*rows, replace(ROW, what="a | b", command="robo_rl train --fast")],
    )
    speed = replace(ROW, value=12345.6, unit="steps/s", interval_is="quartiles", date="2026-11-24")
    add_rows(folder / "results" / "y.json", "Speed", [speed])
    written = results_page.write_pages(folder / "results", folder / "docs" / "results.md", None)
    index, x, y = (Path(p).read_text() for p in written)
    assert (
        f"| a \\| b | 0.500 [0.430, 0.570], 0.750 [0.430, 0.570] | 200 | 0, 1 | {first} | 2026-11-23 "
        "| (1) a note |"
    ) in x and "1. `robo_rl train --seed SEED`; 2 cores" in x
    assert (
        "| a \\| b | 0.500 [0.430, 0.570] | 200 | 0 | abc *" in x
        and "2. `robo_rl train --fast`; 2 cores" in x
    )
    assert "12,346 steps/s [0.43, 0.57] quartiles" in y and "1. `robo_rl train`; 2 cores" in y
    assert (
        "| [Success](results/x.md) | 3 | 2026-11-23 | *0* |" in index
        and "| [Speed](results/y.md) | 1 | 2026-11-24 | *0* |" in index
    )
    assert "| 2026-11-23 | |" in results_page.without_marks(index)


def test_a_page_counts_what_is_of_earlier_code_and_marks_what_is_not(repository):
    """Most figures are of earlier code: a mark on nearly every row would tell nothing."""
    folder, first, second = repository
    older = replace(ROW, commit=first, files=("b.py",))
    present = replace(ROW, what="speed", commit=second, files=("b.py",), date="2026-11-24")
    add_rows(folder / "results" / "x.json", "Success", [older, present, replace(ROW, what="other")])
    add_rows(folder / "results" / "y.json", "Old", [older])
    written = results_page.write_pages(folder / "results", folder / "docs" / "results.md", None)
    index, x, y = (Path(p).read_text() for p in written)
    at, on = results.head_of(folder)
    compared = f"{results_page.COMPARED} at {at} of {on}: "
    why = "figures are of earlier code: a file that they measure changed after their commit."
    assert f"Newest figure: 2026-11-24, commit {second}.\n{compared}1 of 3 {why} The others are marked." in x
    assert f"| {second} *present code* |" in x and f"| {first} |" in x and f"*{results.FOREIGN}*" in x
    assert f"{compared}all 1 {why}\n" in y and "The others" not in y
    assert f"{compared}2 of 4 {why}" in index and "| 3 | 2026-11-23 to 2026-11-24 | *1* |" in index
    bare = results_page.without_marks(x)
    assert "present code" not in bare and compared not in bare and f"{second} |" in bare


def test_the_page_of_a_file_of_results_that_is_no_more_goes_and_others_stay(tmp_path):
    for name in ("x", "y"):
        add_rows(tmp_path / "results" / f"{name}.json", "T", [ROW])
    results_page.write_pages(tmp_path / "results", tmp_path / "results.md", None)
    (tmp_path / "results" / "notes.md").write_text("of a person")
    (tmp_path / "results" / "y.json").unlink()
    results_page.write_pages(tmp_path / "results", tmp_path / "results.md", None)
    assert sorted(p.name for p in (tmp_path / "results").glob("*.md")) == ["notes.md", "x.md"]


def test_the_readmes_table_has_the_rows_with_a_headline_in_their_order(tmp_path):
    rows = [replace(ROW, what="second", headline="2"), ROW, replace(ROW, what="first", headline="1")]
    add_rows(tmp_path / "results" / "x.json", "T", rows)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{results_page.BEGIN}\nold\n{results_page.END}\nafter\n")
    written = results_page.write_pages(tmp_path / "results", tmp_path / "page.md", readme)
    text = readme.read_text()
    assert (
        text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and len(written) == 3
    )
    assert (
        text.index("| first | 0.500 [0.430, 0.570] | 200 | 0 | abc |") < text.index("| second |")
        and "reach" not in text
    )
    readme.write_text("no marks")
    with pytest.raises(UserError, match="has no place for the table"):
        results_page.write_pages(tmp_path / "results", tmp_path / "page.md", readme)


def kept() -> list[results.ResultFile]:
    """The files of results that belong to the repository; a bench may have left others here."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "results"], capture_output=True, text=True, check=False
    ).stdout.split()
    found = results.read_all(ROOT / "results")
    return [f for f in found if str(f.path.relative_to(ROOT)) in listed] if listed else found


def test_the_page_and_the_readme_say_what_the_files_of_results_say():
    """`robo_rl results page` makes them; the marks of age change with every commit and are left out."""
    found = kept()
    made = {"results.md": results_page.index_text(found, ROOT, "results")}
    drawn = {f"{file.path.stem}.svg": p for file in found if (p := results_page.picture(file.rows))}
    made |= {
        f"results/{file.path.stem}.md": results_page.topic_text(file, ROOT, f"{file.path.stem}.svg" in drawn)
        for file in found
    }
    for page, text in made.items():
        assert results_page.without_marks(text) == results_page.without_marks(
            (ROOT / "docs" / page).read_text()
        ), page
    assert {f"results/{p.name}" for p in (ROOT / "docs" / "results").glob("*.md")} == made.keys() - {
        "results.md"
    }
    assert drawn == {p.name: p.read_text() for p in (ROOT / "docs" / "results").glob("*.svg")}
    readme = (ROOT / "README.md").read_text()
    assert results_page.with_table(readme, found) == readme


def test_every_row_in_the_repository_says_what_made_it():
    for file in kept():
        for row in file.rows:
            assert row.commit != results.UNKNOWN or row.recorded, f"{file.path}: {row.what}"
            assert row.date != results.UNKNOWN and row.files, f"{file.path}: {row.what}"


# ---- rows of runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    done = robo_rl(folder, "train", *TINY, "--out", "run", "--seed", 3)
    assert done.code == 0, done.err
    return folder / "run"


def test_a_run_adds_its_final_evaluation_with_its_provenance(run):
    done = robo_rl(run.parent, "results", "add", "run", "--topic", "reach")
    assert done.code == 0, done.err
    rows = {row.what: row for row in read(run.parent / "results" / "reach.json").rows}
    final = rows["pi_rl, mujoco reach: success after online RL"]
    assert robo_rl(run.parent, "results", "add", ".", "--topic", "all").code == 0  # a folder of runs
    assert {r.what for r in read(run.parent / "results" / "all.json").rows} == rows.keys()
    document, said = (json.loads((run / name).read_text()) for name in ("evals/final.json", "run.json"))
    assert (
        final.value == sum(document["success"]) / 8
        and final.interval == tuple(document["wilson"])
        and final.n == 8
    )
    assert (final.seeds, final.machine, final.date) == ((3,), said["machine"], said["created"][:10])
    assert final.commit == (said["git"] or results.UNKNOWN) and final.command.startswith(
        "robo_rl train --task reach"
    )
    assert "--out" not in final.command and final.command.endswith("--no-video --seed 3")
    assert "pi_rl, mujoco reach: success after supervised learning" in rows
    assert all((ROOT / f).exists() for f in final.files)


def test_a_run_adds_the_control_steps_that_it_took_until_success_was_common(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run" / "evals").glob("step_*.json"):
        path.unlink()
    final = json.loads((run / "evals" / "final.json").read_text())

    def row_after(*looks):
        for step, successes in looks:
            said = final | {
                "step": step,
                "time": step / 100,
                "n": 10,
                "success": [1] * successes + [0] * (10 - successes),
            }
            (tmp_path / "run" / "evals" / f"step_{step:09d}.json").write_text(json.dumps(said))
        return next(
            (
                row
                for row in results.run_rows(tmp_path / "run")
                if row.what == f"pi_rl, mujoco reach: {results.STEPS}"
            ),
            None,
        )

    assert row_after((0, 3)) is None
    row = row_after((5000, 8))
    assert row.value == "more than 5,000" and row.n == 10 and row.seeds == (3,)
    row = row_after((10_000, 9), (15_000, 10))
    assert row.value == 10_000 and row.note.startswith("100 s from the start")


def runs_of(*found: tuple[str, int, dict]) -> list[ResultRow]:
    """Rows as `run_rows` writes them, of (method, seed, {measure: value})."""
    return [
        replace(
            ROW,
            what=f"{method}, mujoco reach: {measure}",
            value=x,
            unit="" if measure == results.STEPS else "of 1",
            seeds=(seed,),
            command=f"robo_rl train --algo {method} --seed {seed}",
            note="91 s from the start, looks every 9 steps" if measure == results.STEPS else "",
        )
        for method, seed, figures in found
        for measure, x in figures.items()
    ]


def test_runs_are_a_line_each_with_a_figure_of_every_seed_in_its_place():
    before, after = "success after supervised learning", "success after online RL"
    made = runs_of(
        ("ppo", 1, {before: 0.6, results.STEPS: 3000, after: 0.9}),
        ("ppo", 0, {before: 0.5, after: 0.8}),
        ("ppo", 2, {before: 0.7, results.STEPS: "more than 9,000", after: 1.0}),
        ("pi_rl", 0, {before: 0.5}),
    )
    lines = results_page.table([*made, replace(ROW, what="speed: of reading")], None).splitlines()
    steps = "Control steps of RL until success 0.90"
    assert lines[0].startswith(f"| run | seeds | after supervision | after RL | {steps} | n |")
    assert lines[2].startswith(
        "| ppo, mujoco reach | 0, 1, 2 | 0.600 [0.35, 0.85] of 0.500, 0.600, 0.700 "
        "| 0.900 [0.65, 1.00] of 0.800, 0.900, 1.000 | –, 3,000 (91 s), more than 9,000 (91 s) | 200 |"
    )
    assert lines[3].startswith("| pi_rl, mujoco reach | 0 | 0.500 [0.430, 0.570] |  |  | 200 |")
    assert lines[4] == "" and lines[5].startswith("| what | measured |")
    assert lines[7].startswith("| speed: of reading | 0.500")


def test_runs_of_a_task_that_knows_no_success_have_their_returns_there():
    made = runs_of(
        *(("ppo", seed, {"return after online RL": x}) for seed, x in enumerate((1000, 2000, 3000)))
    )
    line = results_page.table([replace(row, unit="") for row in made], None).splitlines()[2]
    assert line.startswith(
        "| ppo, mujoco reach | 0, 1, 2 | 2,000 [-484.1, 4,484] of 1,000, 2,000, 3,000 | 200"
    )


def test_what_was_measured_of_one_thing_stands_in_one_cell():
    rows = [
        replace(ROW, what=f"the law: {name}", value=x, unit="us") for name, x in (("tick", 3), ("p99", 5))
    ]
    line = results_page.table(rows, None).splitlines()[2]
    assert line.startswith("| the law | tick: 3 us [0.43, 0.57]<br>p99: 5 us [0.43, 0.57] | 200 |")


def test_runs_that_rl_went_on_with_are_drawn_where_there_are_three(tmp_path):
    before, after = "success after supervised learning", "success at the end"
    figures = {before: 0.25, after: 0.75}
    two = runs_of(("ppo", 0, figures), ("nft", 0, figures), ("bc", 0, {before: 0.5}))
    assert not results_page.picture(two)
    rows = [*two, *runs_of(("a<b", 0, figures), ("a<b", 1, {before: 0.35, after: 1.0}))]
    add_rows(tmp_path / "results" / "x.json", "Success", rows)
    docs = tmp_path / "docs"
    (docs / "results").mkdir(parents=True)
    (docs / "results" / "gone.svg").write_text(f"of a file that is no more {results_chart.MADE}")
    (docs / "results" / "own.svg").write_text("a picture of the user's own")
    results_page.write_pages(tmp_path / "results", docs / "results.md", None)
    drawn = (docs / "results" / "x.svg").read_text()
    root = ElementTree.fromstring(drawn)  # well formed
    names = [t.text for t in root.iter() if t.tag.endswith("text") and t.get("text-anchor") == "end"]
    assert names == ["a<b, mujoco reach", "nft, mujoco reach", "ppo, mujoco reach"]
    dots = [c for c in root.iter() if c.tag.endswith("circle")][3:]
    assert len(dots) == 2 * 3 + 2 * 2  # means, and the seeds of the run that has two
    mean = dots[2]  # after the two seeds
    assert float(mean.get("cx")) == results_chart.at(0.3)
    assert "(x.svg)" in (docs / "results" / "x.md").read_text()
    assert sorted(p.name for p in (docs / "results").glob("*.svg")) == ["own.svg", "x.svg"]


def test_the_command_of_a_run_that_a_script_started_is_unknown():
    assert results.command_without_out(["--fast", "x"]) == results.command_without_out([]) == results.UNKNOWN
    assert results.command_without_out(["train", "--out=a", "--task", "b c"]) == "robo_rl train --task 'b c'"


def test_a_run_without_a_final_evaluation_is_refused(run, tmp_path):
    shutil.copytree(run, tmp_path / "half")
    (tmp_path / "half" / "evals" / "final.json").unlink()
    assert "has no final evaluation yet" in robo_rl(tmp_path, "results", "add", "half").mistake
    (tmp_path / "half" / "run.json").write_text('{"config": {"sim": "mujoco"}}')
    assert "does not say task, algo, seed, created" in robo_rl(tmp_path, "results", "add", "half").mistake


def test_an_evaluation_is_added_only_when_asked(run):
    assert robo_rl(run.parent, "eval", "run", "--episodes", 8).code == 0
    assert not (run.parent / "results" / "eval.json").exists()
    done = robo_rl(run.parent, "eval", "run", "--episodes", 8, "--save", "--json")
    assert done.code == 0, done.err
    (row,) = read(run.parent / "results" / "eval.json").rows
    said = json.loads(done.out)
    assert (row.value, row.n, row.interval) == (said["success_rate"], 8, (said["low"], said["high"]))
    assert (
        row.command == "robo_rl eval run --episodes 8" and said["saved"] == "results/eval.json" and row.files
    )


@pytest.mark.parametrize("algo", ["pi_rl", "hil_serl", "ppo", "dppo", "iql", "my_methods:MyMethod"])
@pytest.mark.parametrize(
    "sim", ["mujoco", "maniskill", "gym:Pendulum-v1", "envpool:x", "wm:runs/wm", "dds", "my_sims:make"]
)
def test_the_files_that_a_training_run_measures_exist(algo, sim):
    assert all((ROOT / f).exists() for f in results.measured_files(sim, algo))
