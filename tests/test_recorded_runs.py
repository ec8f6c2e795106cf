"""Runs, data sets and journals of an older version (commit 6e0c7db, `recorded_runs.tar.xz`) are read and continued.

weak: a run of behaviour cloning, with the journal of a console that was killed. weak-hg_dagger-s0: its correction, killed in the middle of
a round. replay: a run of hil_serl with scripted help, killed after its first checkpoint of online RL.
"""

import json
import tarfile
from pathlib import Path

import pytest
from commands import robo_rl

from robo_rl.data.reader import load
from robo_rl.human.correction_journal import scan, unfinished

CORRECT = ("--episodes", 4, "--robots", 1, "--bc.updates", 10, "--eval-episodes", 4, "--rounds", 1, "--max-steps", 40,
           "--person.notice", 0.1,
           "--person.gate", 0.2)


@pytest.fixture
def recorded(tmp_path) -> Path:
    with tarfile.open(Path(__file__).parent / "recorded_runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_an_older_runs_checkpoint_is_evaluated(recorded):
    done = robo_rl(recorded, "eval", "weak", "--episodes", 4, "--json")
    assert done.code == 0, done
    assert {k: json.loads(done.out)[k] for k in ("checkpoint", "sim", "n", "success_rate")} == {
        "checkpoint": "step_000000000000", "sim": "mujoco:reach", "n": 4, "success_rate": 0.0}


def test_a_round_that_an_older_version_began_is_finished_as_that_version_would_have(recorded):
    done = robo_rl(recorded, "correct", "weak", *CORRECT, "--json")
    assert done.code == 0, done
    [_, row] = json.loads(done.out)
    assert row["interventions"] == 2 and row["human_share"] == pytest.approx(0.24375)  # 22 steps of help are those before the kill
    assert row["operator_minutes"] == pytest.approx(0.013) and row["interventions_per_hour"] == pytest.approx(2250)
    assert len(load(recorded / "weak-hg_dagger-s0" / "corrections")) == 4
    assert [r["account"].get("human_steps") for r in json.loads((recorded / "weak-hg_dagger-s0" / "rounds.json").read_text())] == [None, 39]


def test_the_journal_of_an_older_console_gives_back_the_episode_with_help(recorded):
    [episode] = unfinished(scan(recorded / "weak" / "console.journal")[0], 0)
    assert episode.source == ["policy"] * 2 + ["human"] * 2 and episode.start == 11 and episode.phase.tolist() == [0, 0, 3, 3]


def test_an_older_run_of_replay_with_help_is_resumed_from_its_checkpoint(recorded):
    done = robo_rl(recorded, "train", "--resume", "replay")
    assert done.code == 0, done
    rows = [json.loads(line) for line in (recorded / "replay" / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in rows if "human/operator_minutes" in r][-1]
    assert last["step"] == 512 and last["human/operator_minutes"] > 0 and len(load(recorded / "replay" / "corrections")) > 0
