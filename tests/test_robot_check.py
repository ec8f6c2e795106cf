"""`robo_rl robot check FILE`: the checklist as a walk that writes what was answered."""

import io
import json
import sys

import pytest
from test_controllers_cell import WHOLE, ur, write

from robo_rl.cli import main
from robo_rl.errors import UserError
from robo_rl.experiment.robot_check import QUESTIONS, Question, read_answer

GOOD = {q.key: 10.0 if q.unit else True for q in QUESTIONS}
ASKED = {"gains": {"stiffness": [600] * 3 + [30] * 3}}


def check(folder, file, answers=None, monkeypatch=None, said="", capsys=None):
    """(exit code, the record, what was printed) of the command."""
    command = ["robot", "check", file, "--out", str(folder / "record.json")]
    if answers is not None:
        (folder / "answers.json").write_text(json.dumps(answers))
        command += ["--answers", str(folder / "answers.json")]
    else:
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    with pytest.raises(SystemExit) as e:
        main(command)
    return e.value.code, json.loads((folder / "record.json").read_text()), capsys.readouterr().out


def test_a_whole_robot_with_good_answers_passes_and_the_record_says_what_was_answered(tmp_path, capsys):
    code, record, said = check(tmp_path, write(tmp_path, WHOLE, **ASKED), GOOD, capsys=capsys)
    assert code == 0 and record["passed"] and record["robot"] == "mine", said
    answers = {f["key"]: f["answer"] for f in record["findings"]}
    assert answers["latency_us"] == 10.0 and answers["estop_tested"] is True and answers["limits"] is True
    assert {f["part"] for f in record["findings"]} == {"The file", *(q.part for q in QUESTIONS)}
    # a record is a file of answers too
    again, _, _ = check(tmp_path, write(tmp_path, WHOLE, **ASKED), record, capsys=capsys)
    assert again == 0


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        ({"estop_tested": False}, False),
        ({"latency_us": 140.0}, False),
        ({"latency_us": None}, None),
        ({"stop_topic_mm": 41}, False),
    ],
)
def test_one_bad_or_open_answer_is_a_no(tmp_path, capsys, answer, good):
    code, record, said = check(tmp_path, write(tmp_path, WHOLE, **ASKED), GOOD | answer, capsys=capsys)
    [key] = answer
    [finding] = [f for f in record["findings"] if f["key"] == key]
    assert code == 1 and not record["passed"] and finding["good"] is good
    assert ("open" if good is None else "NO") in said.splitlines()[-2]


@pytest.mark.parametrize(
    ("cell", "changed", "key", "says"),
    [
        ({}, {}, "limits", "no box, speed, force"),
        (WHOLE, {"gains": {"stiffness": [1e9] * 6}}, "gains", "stiffness needs 6 numbers"),
        (WHOLE, {"gains": {"stifness": [600] * 6}}, "gains", "unknown gain 'stifness'"),
        (
            WHOLE,
            {"data": {"columns": ["elbow"]}},
            "action_columns",
            "unknown elbow; a column of the action is",
        ),
        (WHOLE, {"sources": {}}, "sources", "none for lower"),
        (WHOLE, {"sources": {"lower": "from memory"}}, "memory", "lower"),
        (WHOLE, {"model": ""}, "model", "ships no model"),
        (WHOLE, {"upper": [2.8973] * 7}, "ranges", "joint2 goes from -1.7628 to 2.8973 rad in the file"),
        (WHOLE | {"high": [0.4, 0.3, 0.7]}, {}, "home", "home has the tool at"),
    ],
)
def test_what_a_file_lacks_is_named_before_anything_is_asked(tmp_path, capsys, cell, changed, key, says):
    code, record, said = check(tmp_path, write(tmp_path, cell, **(ASKED | changed)), GOOD, capsys=capsys)
    [finding] = [f for f in record["findings"] if f["key"] == key]
    assert code == 1 and finding["good"] is False and says in finding["answer"] and says in said


def test_a_person_is_asked_until_the_answer_is_one_and_the_end_of_the_input_leaves_the_rest_open(
    tmp_path, capsys, monkeypatch
):
    said = "maybe\ny\n" + "y\n" * 4 + "fast\n87\n"
    code, record, out = check(tmp_path, ur(tmp_path), None, monkeypatch, said, capsys)
    found = {f["key"]: f for f in record["findings"]}
    lines = [line for line in out.splitlines() if ", Enter: later)" in line]
    # two were asked again
    assert len(lines) == len(QUESTIONS) + 2 and all(line.count("Enter: later") == 1 for line in lines)
    assert lines[0].endswith("Enter: later) maybe") and lines[-1].endswith("Enter: later) ")
    assert code == 1 and "estop_tested: yes or no" in out and "latency_us: a number of us" in out
    assert (
        found["latency_us"]["answer"] == 87.0
        and found["one_middleware"]["good"] is None
        and found["without_force"]["good"]
    )


def test_answers_of_another_checklist_are_refused(tmp_path):
    (tmp_path / "answers.json").write_text(json.dumps({"estop_testet": True}))
    with pytest.raises(SystemExit) as e:
        main(
            [
                "robot",
                "check",
                "sim",
                "--answers",
                str(tmp_path / "answers.json"),
                "--out",
                str(tmp_path / "r.json"),
            ]
        )
    assert e.value.code == 2 and not (tmp_path / "r.json").exists()
    for question, answer in (
        (Question("a", "p", "t"), 1.0),
        (Question("a", "p", "t", "mm"), True),
        (Question("a", "p", "t", "mm"), -1.0),
    ):
        with pytest.raises(UserError, match="a: "):
            read_answer(question, answer)
