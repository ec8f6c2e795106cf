"""Runs, data sets and journals of an older version (commit 6e0c7db, `recorded_runs.tar.xz`) are read and
continued.

weak: a run of behaviour cloning, with the journal of a console that was killed. weak-hg_dagger-s0: its
correction, killed in the middle of a round. replay: a run of hil_serl with scripted help, killed after its
first checkpoint of online RL.
"""

import json
import tarfile
from pathlib import Path

import pytest
from commands import robo_rl

from robo_rl import old_names
from robo_rl.data.reader import load
from robo_rl.experiment.config import load_config
from robo_rl.experiment.config_file import read_config
from robo_rl.experiment.correct import read_rounds
from robo_rl.experiment.correct_options import CorrectOptions
from robo_rl.human.correction_journal import scan, unfinished
from robo_rl.human.fleet import OperatorStats
from robo_rl.log import read_metrics
from robo_rl.options import DemoSacOptions, ScriptedOperatorOptions

CORRECT = (
    "--no-video",
    "--episodes",
    4,
    "--robots",
    1,
    "--bc.updates",
    10,
    "--eval-episodes",
    4,
    "--rounds",
    1,
    "--max-steps",
    40,
    "--scripted-operator.notice-time",
    0.1,
    "--scripted-operator.disagreement",
    0.2,
)


@pytest.fixture
def recorded(tmp_path) -> Path:
    with tarfile.open(Path(__file__).parent / "recorded_runs.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.0 to 3.11.3 have none
        archive.extractall(tmp_path)
    return tmp_path


def test_an_older_runs_checkpoint_is_evaluated(recorded):
    done = robo_rl(recorded, "eval", "weak", "--episodes", 4, "--json")
    assert done.code == 0, done
    assert {k: json.loads(done.out)[k] for k in ("checkpoint", "sim", "n", "success_rate")} == {
        "checkpoint": "step_000000000000",
        "sim": "mujoco:reach",
        "n": 4,
        "success_rate": 0.0,
    }


def test_a_round_that_an_older_version_began_is_finished_as_that_version_would_have(recorded):
    done = robo_rl(recorded, "correct", "weak", *CORRECT, "--json")
    assert done.code == 0, done
    [_, row] = json.loads(done.out)
    # 22 steps of help are those before the kill
    assert row["interventions"] == 2 and row["human_share"] == pytest.approx(0.24375)
    # from attention to hand-back, whichever version began the round
    assert row["operator_minutes"] == pytest.approx(0.0306667, rel=1e-4) and row[
        "interventions_per_hour"
    ] == pytest.approx(2250)
    assert len(load(recorded / "weak-hg_dagger-s0" / "corrections")) == 4
    assert [r["operator_stats"].get("human_steps") for r in read_rounds(recorded / "weak-hg_dagger-s0")] == [
        None,
        39,
    ]
    assert not [
        *(recorded / "weak-hg_dagger-s0").glob("*account.json"),
        *(recorded / "weak-hg_dagger-s0").glob("operator_stats.json"),
    ]


def test_the_journal_of_an_older_console_gives_back_the_episode_with_help(recorded):
    [episode] = unfinished(scan(recorded / "weak" / "console.journal")[0], 0)
    assert (
        episode.source == ["policy"] * 2 + ["human"] * 2
        and episode.start == 11
        and episode.phase.tolist() == [0, 0, 3, 3]
    )


def test_an_older_run_of_replay_with_help_is_resumed_from_its_checkpoint(recorded):
    done = robo_rl(recorded, "train", "--resume", "replay")
    assert done.code == 0, done
    rows = [json.loads(line) for line in (recorded / "replay" / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in rows if "human/operator_minutes" in r][-1]
    assert (
        last["step"] == 512
        and last["human/operator_minutes"] > 0
        and len(load(recorded / "replay" / "corrections")) > 0
    )


# ---- names of before


def test_options_of_an_older_run_have_their_names_of_today(recorded):
    path = recorded / "replay" / "run.json"
    path.write_text(
        path.read_text().replace('"gate": 0.45', '"gate": 0.3').replace('"leave": 0.0', '"leave": 7.0')
    )
    person = ScriptedOperatorOptions(disagreement=0.3, leave_after=7.0)
    assert load_config(recorded / "replay").rl.scripted_operator == person
    assert read_config(path)["rl"]["scripted_operator"]["disagreement"] == 0.3  # as --config takes it
    done = robo_rl(recorded, "train", "--config", path, "--print-config")
    assert done.code == 0 and "disagreement = 0.3  # file" in done.out


def test_metrics_of_an_older_run_have_their_names_of_today(recorded):
    columns = read_metrics(recorded / "replay")
    assert {"human/step_share", "human/assisted", "human/unassisted_success", "train/learner_share"} <= {
        *columns
    }
    assert not {*old_names.METRICS} & {*columns}
    assert old_names.metrics({"step": 3, "stal/hist_2": 0.5, "train/loss": 1}) == {
        "step": 3,
        "staleness/hist_2": 0.5,
        "train/loss": 1,
    }


def test_rounds_of_an_older_version_have_their_names_of_today(tmp_path):
    stats = {"human_steps": 3, "alone": 2, "calls": 5, "alone_rate": 0.5}
    (tmp_path / "rounds.json").write_text(json.dumps([{"round": 1, "account": stats, "eval": {}}]))
    assert read_rounds(tmp_path) == [
        {
            "round": 1,
            "eval": {},
            "operator_stats": {
                "human_steps": 3,
                "unassisted_successes": 2,
                "help_requests": 5,
                "unassisted_success_rate": 0.5,
            },
        }
    ]


def test_every_name_of_today_in_the_table_is_an_option_or_a_metric():
    assert {*old_names.SCRIPTED_OPERATOR.values()} < {*ScriptedOperatorOptions.__dataclass_fields__}
    assert {*old_names.CORRECT.values()} < {*CorrectOptions.__dataclass_fields__}
    assert {*old_names.OPERATOR_STATS.values()} < {*OperatorStats(period=0.1).summary()}
    documented = (Path(__file__).parent.parent / "docs/reference/metrics.md").read_text()
    assert all(name.partition("/")[2] in documented for name in old_names.METRICS.values())
    assert all(f"`{name}" in documented for name in old_names.PREFIXES.values())


def test_a_run_that_was_called_rlpd_before_that_was_the_papers_method_is_one_of_demo_sac(tmp_path):
    was = {
        "algo": "rlpd",
        "task": "reach",
        "policy": {"kind": "squashed", "teacher": True},
        "bc": {},
        "rl": {"alpha": 0.001, "imitate": "success", "ramp": 1000, "bc_coef": 20.0, "utd": 4.0},
    }
    (tmp_path / "run.json").write_text(json.dumps({"config": was}))
    config = load_config(tmp_path)
    assert (
        config.algo == "demo_sac"
        and isinstance(config.rl, DemoSacOptions)
        and config.rl.imitate == "success"
        and config.rl.utd == 4
    )
    now = was | {"rl": {"alpha": 1.0, "utd": 20.0}}
    (tmp_path / "run.json").write_text(json.dumps({"config": now}))
    assert load_config(tmp_path).algo == "rlpd"
