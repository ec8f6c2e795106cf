"""`robo_rl correct` as a user runs it, small; and the lessons it learns from."""

import json
import re
import shutil
from dataclasses import fields

import numpy as np
import pytest
import torch
from commands import TINY, robo_rl

from robo_rl.data.episode import Episode, Features
from robo_rl.data.reader import load
from robo_rl.data.writer import Writer
from robo_rl.errors import UserError
from robo_rl.human.fleet import OperatorStats
from robo_rl.human.training_segments import segment_chunks, segment_ends, segment_sampler, trainable_frames
from robo_rl.policies import ObsSpec
from sims.mujoco.gl import gl_backend

FAST = (
    "--no-video",
    "--episodes",
    4,
    "--robots",
    2,
    "--bc.updates",
    20,
    "--eval-episodes",
    8,
    "--rounds",
    1,
    "--scripted-operator.notice-time",
    0.1,
    "--scripted-operator.disagreement",
    0.2,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("correct")
    tiny = [
        a
        for i, a in enumerate(TINY)
        if not (str(a).startswith("--rl.") or (i and str(TINY[i - 1]).startswith("--rl.")))
    ]
    done = robo_rl(folder, "train", "--algo", "bc", *tiny, "--out", "runs/weak")
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize("protocol", ["hg_dagger", "rac"])
def test_a_round_practises_with_help_learns_and_is_a_run_of_its_own(run, protocol):
    done = robo_rl(run, "correct", "runs/weak", "--protocol", protocol, *FAST, "--json")
    assert done.code == 0, done.err
    rows, out = json.loads(done.out), run / f"runs/weak-{protocol}-s0"
    assert out.stat().st_mode & 0o777 == 0o700
    assert [r["round"] for r in rows] == [0, 1] and rows[1]["interventions"] > 0 < rows[1]["human_share"] < 1
    assert "operator min" in done.err and "interventions/h" in done.err
    told = [r["report"] for r in rows if "report" in r]
    # chosen on one list, reported on another
    assert len(told) == 1 and told[0]["list"] == 1 and {r["list"] for r in rows} == {0}
    assert json.loads((out / "evals" / "best.json").read_text())["step"] == told[0]["round"]
    data = load(out / "corrections")
    assert np.isfinite(data.final).all() and np.isfinite(data.after).all()
    assert (
        len(data) == 4
        and data.features.phases
        and {"human", "policy"} <= {data.sources[c] for c in np.unique(data.source)}
    )
    assert (2 in data.phase) == (protocol == "rac") and 3 in data.phase and 1 not in data.phase
    assert json.loads((out / "rounds.json").read_text())[1]["operator_stats"]["operator_minutes"] > 0
    again = robo_rl(run, "eval", out, "--episodes", "4", "--json")
    assert again.code == 0 and json.loads(again.out)["checkpoint"].startswith("step_")


@pytest.mark.skipif(gl_backend() is None, reason="nothing draws here")
def test_practice_is_filmed_and_the_film_is_written_when_the_round_is_over(run):
    done = robo_rl(
        run, "correct", "runs/weak", *FAST[1:], "--max-steps", 30, "--eval-episodes", 2, "--out", "filmed"
    )
    assert done.code == 0, done.err
    assert (run / "filmed/videos/round_1.mp4").stat().st_size > 1000 and len(
        load(run / "filmed/corrections")
    ) == 4
    assert not (run / "runs/weak-rac-s0/videos").exists()  # --no-video


def test_with_a_twin_help_is_spent_where_the_policy_fails(run):
    done = robo_rl(
        run,
        "correct",
        "runs/weak",
        "--protocol",
        "twin_rl",
        "--twin-starts",
        40,
        "--twin-trials",
        2,
        *FAST,
        "--json",
    )
    assert done.code == 0, done.err
    failed = re.search(r"fails at (\d+) of 40 starts in the twin", done.err)
    assert failed and json.loads(done.out)[1]["interventions"] > 0
    account = load(run / "runs/weak-twin_rl-s0" / "corrections")
    assert len(account) == 4


def test_a_finished_result_goes_on_with_more_rounds_and_refuses_other_options(run):
    robo_rl(run, "correct", "runs/weak", *FAST, "--out", "more")
    done = robo_rl(
        run, "correct", "runs/weak", *FAST[:-6], "--rounds", 2, *FAST[-4:], "--out", "more", "--json"
    )
    assert done.code == 0 and len(json.loads(done.out)) == 3, done.err
    assert len(load(run / "more" / "corrections")) == 8
    assert "begun with another --episodes" in robo_rl(run, "correct", "runs/weak", "--out", "more").mistake


def test_a_kill_before_a_round_counts_makes_it_again_and_records_no_episode_twice(run):
    robo_rl(run, "correct", "runs/weak", *FAST, "--out", "killed")
    folder = run / "killed"
    stats = json.loads((folder / "rounds.json").read_text())[1]["operator_stats"]
    names = {field.name for field in fields(OperatorStats)}
    # as it is after a kill between an episode and its statistics, or between rounds.json and the checkpoint
    (folder / "operator_stats.json").write_text(
        json.dumps({"round": 1, "operator_stats": {k: v for k, v in stats.items() if k in names}})
    )
    shutil.rmtree(max((folder / "checkpoints").glob("step_*")))
    done = robo_rl(run, "correct", "runs/weak", *FAST, "--out", "killed", "--json")
    assert done.code == 0, done.err
    assert [r["round"] for r in json.loads(done.out)] == [0, 1]
    starts = load(folder / "corrections").start
    assert len(starts) == 4 == len(np.unique(starts))
    assert json.loads((folder / "rounds.json").read_text())[1]["operator_stats"]["episodes"] == 4


def test_corrections_that_were_recorded_after_a_round_are_one_more_round(run):
    argv = ("correct", "runs/weak", "--operator", "console", "--bc.updates", 5, "--eval-episodes", 4, "--out")
    demo = load(run / "runs/weak/demos")
    corrected = Episode(
        demo.state[:12],
        demo.action[:12],
        task=demo.tasks[0],
        phase=np.full(12, 3),
        source="human",
        success=True,
    )
    interventions = []
    for new in (1, 1, 0):  # the person comes again, then does not
        with Writer(run / "runs/weak/corrections", Features.of(corrected, fps=20)) as writer:
            for _ in range(new):
                writer.add(corrected)
        done = robo_rl(run, *argv, "learnt", "--json")
        assert done.code == 0, done.err
        interventions.append([r["interventions"] for r in json.loads(done.out)][1:])
    assert interventions == [[1], [1, 1], [1, 1]] and "no corrections since the last round" in done.err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--protocol", "dagger"], "Allowed: hg_dagger"),
        (["--rounds", "0"], "--rounds must be in [1, 1000]"),
        (["--operator", "me"], "unknown operator"),
        (["--scripted-operator.disagreement", "7"], "scripted_operator.disagreement must be in [0, 2]"),
        (["--phases", "pause"], "unknown phases 'pause'"),
        (["--out", "runs/weak"], "choose another folder"),
        (["--checkpoint", "nine"], "has no checkpoint 'nine'"),
    ],
)
def test_mistakes_are_one_line(run, argv, words):
    assert words in robo_rl(run, "correct", "runs/weak", *argv).mistake


# ------------------------------------------------------------ lessons


def episode(phase, source, success=True, base=0.0):
    t = len(phase)
    return Episode(
        np.full((t, 3), base), np.arange(t)[:, None] / 100 + base, phase=phase, source=source, success=success
    )


def data_set(path, episodes):
    with Writer(path, Features.of(episodes[0], fps=20)) as w:
        for e in episodes:
            w.add(e)
    return load(path)


P, H = ["policy"], ["human"]


def test_a_chunk_never_crosses_from_policy_to_person_nor_from_recovery_to_correction(tmp_path):
    data = data_set(
        tmp_path / "d", [episode([0, 0, 2, 2, 3, 3, 0], P * 2 + H * 4 + P), episode([3, 3], H * 2, base=1)]
    )
    assert segment_ends(data).tolist() == [2, 2, 4, 4, 6, 6, 7, 9, 9]
    rows = trainable_frames(data)
    assert rows.tolist() == [False] * 2 + [True] * 4 + [False] + [True] * 2
    chunk, mask = segment_chunks(data, 3, rows)
    assert mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]]
    assert np.allclose(chunk[0, :, 0], [0.02, 0.03, 0.03]) and np.allclose(chunk[4, :, 0], [1, 1.01, 1.01])


def test_the_policys_own_frames_are_lessons_only_where_asked_and_where_it_succeeded_alone(tmp_path):
    data = data_set(
        tmp_path / "d",
        [episode([0, 0], P * 2), episode([0, 0], P * 2, success=False), episode([0, 3], P + H)],
    )
    assert trainable_frames(data).tolist() == [False] * 5 + [True]
    assert trainable_frames(data, own=True).tolist() == [True, True, False, False, False, True]


def test_recoveries_can_be_left_out_of_the_lessons(tmp_path):
    data = data_set(tmp_path / "d", [episode([0, 2, 3, 3], P + H * 3)])
    assert trainable_frames(data, phases=("correction",)).tolist() == [False, False, True, True]
    draw = segment_sampler([data], ObsSpec(state=3, action=1), 2, phases=("correction",))
    _, chunk, _ = draw(16, torch.Generator().manual_seed(0))
    assert (
        chunk[:, 0].min() >= 0.02
        and segment_sampler([data], ObsSpec(state=3, action=1), 2)(64, torch.Generator())[1][:, 0].min()
        < 0.02
    )


def test_blending_back_is_nobodys_lesson(tmp_path):
    data = data_set(tmp_path / "d", [episode([3, 0, 0], H * 2 + P)])  # the middle frame is a mixture
    assert trainable_frames(data).tolist() == [True, False, False]


def test_help_in_which_the_episode_failed_is_no_lesson_but_what_was_handed_back_before_is(tmp_path):
    data = data_set(
        tmp_path / "d",
        [episode([3, 3, 0, 3, 3], H * 2 + P + H * 2, success=False), episode([3, 3], H * 2, base=1)],
    )
    assert trainable_frames(data).tolist() == [True, True, False, False, False, True, True]


def test_shares_hold_in_every_batch_and_an_empty_source_leaves_its_share(tmp_path):
    demos = data_set(tmp_path / "a", [Episode(np.zeros((50, 3)), np.zeros((50, 1)))])
    mine = data_set(tmp_path / "b", [episode([3] * 4, H * 4, base=1)])
    none = data_set(tmp_path / "c", [episode([0] * 4, P * 4, base=2)])
    spec = ObsSpec(state=3, action=1)
    draw = segment_sampler([demos, mine, none], spec, 2, shares=[0.5, 0.5, 0.5])
    obs, chunk, mask = draw(64, torch.Generator().manual_seed(0))
    assert (
        obs["state"][:, 0].tolist() == [0.0] * 32 + [1.0] * 32
        and chunk.shape == (64, 2, 1)
        and mask.shape == (64, 2)
    )
    with pytest.raises(UserError, match="no frame was chosen by a person or an expert"):
        segment_sampler([none], spec, 2)


@pytest.mark.parametrize("best", [0, 1])
def test_rounds_that_made_it_no_better_are_followed_by_what_else_helps(best, capsys):
    from robo_rl.cli.correct import print_table

    result = {"success": 0.9, "low": 0.8, "high": 1.0, "n": 20, "list": 1, "round": best}
    nobody = {"operator_minutes": None}
    print_table([result | nobody | {"round": k} for k in range(2)], result)
    assert ("--learn-from-successes" in capsys.readouterr().out) == (best == 0)
