"""`robo_rl data label --success judge`: a judge says which recorded episodes succeeded."""

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
from test_data_commands import run
from test_world_models_judge import Stand
from test_world_models_judge_video import Chat, frames_in

from robo_rl.cli import main
from robo_rl.data import layout
from robo_rl.data.lerobot import Episode, Features, Writer, load
from robo_rl.experiment.judge_episodes import ANSWERS, end_of
from robo_rl.files import write_json

pytestmark = pytest.mark.filterwarnings("ignore:data set .* without checksums")


@pytest.fixture(scope="module")
def so100(tmp_path_factory) -> Path:
    return datasets.write(
        tmp_path_factory.mktemp("sets") / "so100", "so100", episodes=3, length=12, size=(24, 32)
    )


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def numbered(tmp_path) -> Path:
    """Four episodes whose state counts; the last observation is 0.5 above the last frame's. Two are called
    successes."""
    with Writer(tmp_path / "set", Features(fps=10, state=("s", "t"), action=("a",))) as w:
        for i in range(4):
            state = np.stack([10 * i + np.arange(6.0), np.zeros(6)], 1)
            w.add(
                Episode(
                    state=state,
                    action=np.zeros((6, 1)),
                    final=state[-1] + 0.5,
                    success=i in (1, 2),
                    task=f"task {i}",
                )
            )
    return tmp_path / "set"


def test_a_judge_is_asked_about_the_end_of_every_episode_and_what_it_says_is_written(tmp_path, capsys):
    folder, seen = numbered(tmp_path), []

    def answer(items, stand):
        seen.extend((i["task"], i["state"][0]) for i in items)
        return [float(i["state"][0] > 20) for i in items]

    with Stand(answer) as stand:
        said = run(capsys, "label", folder, "--success", "judge", "--judge", stand.url)
    assert seen == [(f"task {i}", 10 * i + 5.5) for i in range(4)]
    assert f"2 of 4 episodes succeeded, as {stand.url} says; what was recorded agrees on 2; 1 request" in said
    assert load(folder).success.tolist() == [False, False, True, True]
    assert run(capsys, "check", folder).count("is sound")  # its checksums are right


def test_a_judge_that_is_asked_again_is_compared_with_labels_and_not_with_what_was_recorded(tmp_path, capsys):
    folder = numbered(tmp_path)
    with Stand(lambda items, stand: [1.0] * len(items)) as stand:
        first, second = (
            run(capsys, "label", folder, "--success", "judge", "--judge", stand.url) for _ in range(2)
        )
    assert "what was recorded agrees on 2" in first
    assert "the labels that it had agree on 4" in second and "recorded agrees" not in second


@pytest.mark.filterwarnings("ignore:2 answers of the judge are kept")
def test_a_judge_that_fails_is_not_asked_again_about_what_it_answered(so100, tmp_path, capsys):
    folder = copied(so100, tmp_path / "set")

    def answer(request, k):
        if 3 <= len(chat.requests) <= 6:
            return "no JSON"
        return json.dumps({"success": k == 0})  # divided: one of three

    with Chat(answer) as chat:
        words = ("label", folder, "--success", "judge", "--judge", f"openai:{chat.url}#samples=3,tries=1")
        assert "gave 0 of 3 answers" in run(capsys, *words, code=2)
        assert not (folder / layout.LABELS).exists() and (folder / ANSWERS).exists()
        assert run(capsys, "check", folder).count("is sound")
        said = run(capsys, *words)
    assert len(chat.requests) == 7  # two, four attempts of the third, and that again
    assert "0 of 3 episodes succeeded" in said and "divided on 100 %" in said
    assert not (folder / ANSWERS).exists()


def test_answers_of_another_judge_are_not_taken(so100, tmp_path, capsys):
    folder = copied(so100, tmp_path / "set")
    with Chat(lambda request, k: json.dumps({"success": True})) as chat:
        judge = f"openai:{chat.url}#samples=1"
        write_json(folder / ANSWERS, {"judge": judge + ",skip=2", "answers": {"00": [0.0, 0.0]}})
        said = run(capsys, "label", folder, "--success", "judge", "--judge", judge)
    assert len(chat.requests) == 3 and "3 of 3 episodes succeeded" in said


def test_answers_by_other_criteria_are_not_taken(so100, tmp_path, capsys):
    """The file of the criteria keeps its name; what it says changed after the attempt that was cut short."""
    folder, criteria = copied(so100, tmp_path / "set"), tmp_path / "criteria.json"

    def answer(request, k):
        if len(chat.requests) in (2, 3):
            return "no JSON"
        return json.dumps(
            {"success": "held" in request["messages"][1]["content"][0]["text"], "criteria": [True]}
        )

    with Chat(answer) as chat:
        judge = f"openai:{chat.url}#samples=1,tries=1,criteria={criteria}"
        words = ("label", folder, "--success", "judge", "--judge", judge)
        criteria.write_text('{"": ["it is near"]}')
        run(capsys, *words, code=2)
        criteria.write_text('{"": ["it is held"]}')
        said = run(capsys, *words)
    assert len(chat.requests) == 6 and "3 of 3 episodes succeeded" in said


def test_where_nothing_was_recorded_after_the_last_action_the_last_frame_is_judged_with_the_frames_before_it(
    so100,
):
    class Sees:
        frames, skip = 3, 4

    data = load(so100)
    end = end_of(data, np.arange(3), Sees())
    for view in data.views:
        for e in range(3):
            whole = data.frames(view, e)
            assert np.array_equal(end.after[f"image/{view}"][e], whole[-1])
            newest = len(whole) - 1 - (len(whole) - 1) % 4
            assert np.array_equal(end.clip[f"image/{view}"][e], whole[[newest - 4, newest, -1]])
    assert np.array_equal(end.after["state"], data.state[data.to - 1]) and end.task[1] == data.task(1)


def test_a_model_that_speaks_openais_protocol_labels_a_data_set_that_says_nothing(so100, tmp_path, capsys):
    folder = copied(so100, tmp_path / "set")

    def answer(request, k):
        return json.dumps({"success": "lego" in request["messages"][1]["content"][0]["text"]})

    with Chat(answer) as chat:
        said = run(
            capsys, "label", folder, "--success", "judge", "--judge", f"openai:{chat.url}#samples=3,frames=2"
        )
    assert "2 of 3 episodes succeeded" in said and "divided on 0 %" in said and "agrees" not in said
    assert len(frames_in(chat.requests[0])) == 2 * 2 and chat.requests[0]["n"] == 3
    assert load(folder).is_judged and load(folder).success.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--success", "judge"), "--success judge needs --judge"),
        (("--success", "judge", "--judge", "head"), "--success judge needs --judge"),
        (("--success", "all", "--judge", "http://127.0.0.1:9/"), "--judge goes with --success judge"),
        (
            ("--success", "judge", "--judge", "http://127.0.0.1:9/#tries=1"),
            "the judge at http://127.0.0.1:9/ does not answer",
        ),
        (("--success", "judge", "--judge", "http://127.0.0.1:9/#every=x"), "judge options after # are"),
        (("--success", "judge", "--judge", "nowhere"), "is neither head, an http address"),
    ],
)
def test_a_judge_that_is_not_there_is_one_line_and_nothing_is_written(so100, tmp_path, capsys, words, line):
    folder = copied(so100, tmp_path / "set")
    with pytest.raises(SystemExit) as e:
        main(["data", "label", str(folder), *words])
    said = capsys.readouterr().err
    assert e.value.code == 2 and line in said and said.count("\n") == 1
    assert not (folder / layout.LABELS).exists()


def test_a_judge_that_lies_about_the_number_of_episodes_is_one_line(so100, tmp_path, capsys):
    folder = copied(so100, tmp_path / "set")
    with Stand(lambda items, stand: [1.0]) as stand:
        assert "must answer 3 numbers" in run(
            capsys, "label", folder, "--success", "judge", "--judge", stand.url, code=2
        )
    assert not (folder / layout.LABELS).exists()


def test_a_classifier_of_another_robot_is_refused_and_a_label_in_passing_says_where_to_go(
    so100, tmp_path, capsys
):
    from world_models.judge import Classifier, ClassifierOptions

    Classifier(4, 2, (), ClassifierOptions()).save(tmp_path / "judge")
    said = run(capsys, "label", so100, "--success", "judge", "--judge", tmp_path / "judge", code=2)
    assert "learnt from 4 state and 2 action numbers" in said and "has 6 and 6" in said
    Classifier(6, 6, ("top",), ClassifierOptions()).save(tmp_path / "other")
    assert "looks through top" in run(
        capsys, "label", so100, "--success", "judge", "--judge", tmp_path / "other", code=2
    )
    with pytest.raises(Exception, match="robo_rl data label FOLDER --success judge --judge WHO"):
        load(so100, label="success=judge")


def test_a_classifier_labels_data_of_its_robot(so100, tmp_path, capsys):
    from world_models.judge import Classifier, ClassifierOptions

    judge = Classifier(6, 6, ("laptop",), ClassifierOptions(), tasks=tuple(load(so100).tasks))
    judge.save(tmp_path / "judge")
    folder = copied(so100, tmp_path / "set")
    said = run(capsys, "label", folder, "--success", "judge", "--judge", tmp_path / "judge")
    want = judge(end_of(load(folder), np.arange(3), judge)) > 0.5
    assert f"{want.sum()} of 3 episodes succeeded" in said and load(folder).success.tolist() == want.tolist()
