"""`robo_rl train` with methods that learn from replay, as a user runs them: to the end, stopped, killed, and
mistaken."""

import json
import re
import shutil
import signal

import numpy as np
import pytest
import torch
from commands import CLASSIFIER, TINY_REPLAY, Command, robo_rl

from robo_rl import checkpoint
from robo_rl.experiment.recipes import recipe
from robo_rl.options import OFF_POLICY
from sims.mujoco.gl import NO_GL, gl_backend

QUICK_OPERATOR = ("--rl.scripted-operator.notice-time", 0.1, "--rl.scripted-operator.reaction-time", 0.1)


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demos")
    made = robo_rl(folder, "collect", "--task", "reach", "--episodes", 2, "--out", "d", "--threads", 1)
    assert made.code == 0, made
    return folder / "d"


@pytest.mark.parametrize(
    ("task", "reward", "beta"), [("pick_cube", "", 30.0), ("pick_cube", "dense", 3.0), ("Hopper-v5", "", 3.0)]
)
def test_iqls_temperature_is_that_of_its_returns(task, reward, beta):
    # in [0, 1], or as in the paper
    assert recipe("mujoco", task, "iql", "state", "full", reward).rl.beta == beta


@pytest.mark.parametrize("algo", OFF_POLICY)
def test_every_method_trains_evaluates_and_saves(algo, demos, tmp_path):
    result = robo_rl(tmp_path, "train", *TINY_REPLAY, "--algo", algo, "--demos", demos, "--out", "run")
    assert result.code == 0, result
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(r.get("train/updates", 0) for r in rows) >= 10 and rows[-1]["step"] >= 512
    again = json.loads(
        robo_rl(tmp_path, "eval", "run", "--checkpoint", "last", "--episodes", 4, "--json").out
    )
    final = json.loads((tmp_path / "run" / "evals" / "final.json").read_text())
    assert again["success_rate"] == sum(final["success"]) / 4
    assert "nothing to resume" in robo_rl(tmp_path, "train", "--resume", "run").err


def weights(run):
    return (checkpoint.checkpoints(run)[-1] / "policy.safetensors").read_bytes()


def forget(run, step: int) -> None:
    """As a kill after the checkpoint of `step` would have left it: the journals know more than the
    checkpoint."""
    for path in checkpoint.checkpoints(run):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


def test_a_killed_run_goes_on_bit_for_bit_and_one_whose_journal_is_damaged_says_what_is_lost(demos, tmp_path):
    argv = ("train", *TINY_REPLAY, "--algo", "demo_sac", "--demos", demos)
    assert robo_rl(tmp_path, *argv, "--out", "whole").code == 0
    for name in ("killed", "damaged"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        forget(tmp_path / name, 300)
    result = robo_rl(tmp_path, "train", "--resume", "killed")
    assert result.code == 0 and "goes on from step 256 exactly" in result.err, result
    assert weights(tmp_path / "whole") == weights(tmp_path / "killed")
    log = tmp_path / "damaged" / "replay" / "online" / "steps-000000.log"
    blob = log.read_bytes()
    log.write_bytes(blob[:5000] + bytes(300) + blob[5300:])
    result = robo_rl(tmp_path, "train", "--resume", "damaged")
    assert result.code == 0 and "exactly" not in result.err, result
    lost = int(re.search(r"online is damaged: (\d+) control steps of 256 are lost", result.err)[1])
    assert 4 <= lost <= 12 and f"replay keeps {256 - lost} steps" in result.err, result


def test_a_run_without_snapshots_counts_the_steps_that_it_had_journaled_and_learns_from_them(tmp_path):
    argv = ["train", *TINY_REPLAY[2:], "--sim", "gym:Pendulum-v1", "--algo", "demo_sac", "--demos", 0]
    assert robo_rl(tmp_path, *argv, "--out", "run").code == 0
    forget(tmp_path / "run", 0)
    said = (tmp_path / "run" / "run.json").read_text()
    (tmp_path / "run" / "run.json").write_text(said.replace('"steps": 512', '"steps": 640'))
    result = robo_rl(tmp_path, "train", "--resume", "run")
    assert result.code == 0 and "replay keeps 512 steps" in result.err and "from step 512, and" in result.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    made = [(r["step"], r["train/updates"]) for r in rows if "train/updates" in r]
    # as many updates as of a run that was not killed: of the critics before, then of each step after warm-up
    assert made[0] == (512, 10 + 0.5 * (512 - 128)) and made[-1] == (640, 10 + 0.5 * (640 - 128))


@pytest.mark.slow
def test_kill_minus_nine_loses_no_journaled_step_of_a_sim_without_snapshots(tmp_path):
    argv = (
        "train",
        *TINY_REPLAY[2:],
        "--sim",
        "gym:Pendulum-v1",
        "--algo",
        "demo_sac",
        "--demos",
        0,
        "--steps",
        20_000,
        "--eval-every",
        20_000,
        "--out",
        "run",
    )
    command = Command(tmp_path, argv)
    log = tmp_path / "run" / "replay" / "online" / "steps-000000.log"
    command.until(lambda: log.exists() and log.stat().st_size > 40_000)
    command.signal(signal.SIGKILL)
    command.wait()
    size = log.stat().st_size
    command = Command(tmp_path, ("train", "--resume", "run"))
    command.until(lambda: (tmp_path / "run" / "replay" / "online" / "steps-000001.log").exists())
    command.signal(signal.SIGTERM)
    result = command.wait()
    assert result.code == 128 + signal.SIGTERM and "steps that were journaled" in result.out + result.err, (
        result
    )
    assert log.stat().st_size == size


def test_a_run_tells_how_far_its_generator_of_transitions_is_and_can_be_stopped_meanwhile(demos, tmp_path):
    argv = ("train", *TINY_REPLAY, "--algo", "demo_sac", "--demos", demos, "--out", "run")
    synthetic = ("--rl.synthetic", 0.25, "--rl.synthetic-updates", 10**6, "--rl.warmup", 256)
    command = Command(tmp_path, (*argv, *synthetic))
    command.until(lambda: "of 1.00M updates" in command.said())
    command.signal(signal.SIGINT)
    result = command.wait()
    assert result.code == 128 + signal.SIGINT and "train --resume run" in result.err, result
    told = json.loads((checkpoint.checkpoints(tmp_path / "run")[-1] / "meta.json").read_text())
    assert told["step"] == 256 and not told["finished"]  # what was gathered is learnt from when it goes on


def test_a_scripted_person_s_steps_are_counted_and_go_to_the_demonstrations(demos, tmp_path):
    result = robo_rl(
        tmp_path,
        "train",
        *TINY_REPLAY,
        "--algo",
        "hil_serl",
        "--demos",
        demos,
        "--out",
        "run",
        "--rl.operator",
        "scripted",
        "--policy.gripper",
        "toggle",
        *QUICK_OPERATOR,
    )
    assert result.code == 0 and "operator min" in result.err + result.out, result
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "human/operator_minutes" in r]
    assert rows[-1]["human/operator_minutes"] > 0.01
    assert rows[-1]["replay/demonstrations"] > rows[0]["replay/demonstrations"]
    from robo_rl.data.reader import load

    data = load(tmp_path / "run" / "corrections")
    words = np.array(data.sources)[data.source]
    assert len(data) >= 1 and (words == "human").any() and set(data.phase[words == "human"]) & {2, 3}
    again = robo_rl(
        tmp_path, "train", *TINY_REPLAY, "--algo", "demo_sac", "--demos", "run/corrections", "--out", "next"
    )
    assert again.code == 0, again  # and they serve as demonstrations


@pytest.mark.slow
@pytest.mark.gl
@pytest.mark.skipif(gl_backend() is None, reason=NO_GL)
def test_pictures_are_learnt_from_as_what_the_supervised_trunk_makes_of_them(tmp_path):
    """HIL-SERL with two cameras and a person: replay keeps contexts, the corrections' data set the
    pictures."""
    few = (
        *TINY_REPLAY,
        "--algo",
        "hil_serl",
        "--obs",
        "rgb",
        "--image-size",
        32,
        "--policy.width",
        32,
        "--policy.depth",
        1,
        "--bc.updates",
        3,
        "--rl.operator",
        "scripted",
        *QUICK_OPERATOR,
    )
    assert robo_rl(tmp_path, "train", *few, "--out", "run").code == 0
    run = tmp_path / "run"
    first, last = (
        checkpoint.load_policy(p)[0].state_dict()
        for p in (checkpoint.checkpoints(run)[0], checkpoint.checkpoints(run)[-1])
    )
    changed = {k.split(".")[0] for k in first if not torch.equal(first[k], last[k])}
    assert "actor" in changed and "trunk" not in changed
    from robo_rl.data.reader import load

    data = load(run / "corrections")
    assert data.images("front").shape == (len(data.state), 32, 32, 3) and data.images("front").std() > 5
    assert (
        np.isfinite(data.final).all()
        and data.final_images("front")[1].all()
        and data.final_images("wrist")[1].all()
    )
    assert data.images("wrist").std() > 5 and not (data.images("front")[0] == data.images("front")[-1]).all()
    shutil.copytree(run, tmp_path / "stopped")
    forget(tmp_path / "stopped", 300)
    result = robo_rl(tmp_path, "train", "--resume", "stopped")
    assert result.code == 0, result
    assert weights(run) == weights(tmp_path / "stopped")
    beside = robo_rl(tmp_path, "train", *few, "--workers", 1, "--demos", "run/corrections", "--out", "beside")
    assert beside.code == 0, beside


@pytest.mark.slow
def test_a_classifier_trained_from_marks_pays_the_reward(tmp_path):
    result = robo_rl(tmp_path, "train", *TINY_REPLAY, *CLASSIFIER, "--steps", 1500, "--out", "run")
    assert result.code == 0 and "success classifier: threshold" in result.out + result.err, result
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("judge/recall" in r for r in rows) and any("judge/false" in r for r in rows)
    assert (tmp_path / "run" / "judge.safetensors").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--algo demo_sac --obs rgb --rl.synthetic 0.2", "--rl.synthetic makes transitions of --obs state"),
        (
            "--algo demo_sac --rl.synthetic-kind guided --rl.synthetic-rows 99",
            "without --rl.synthetic, the share of a batch (0.25), nothing is made: leave "
            "--rl.synthetic-kind, --rl.synthetic-rows out",
        ),
        (
            "--algo demo_sac --rl.synthetic 0.2 --rl.synthetic-window 3",
            "synther makes single transitions: leave --rl.synthetic-window out",
        ),
        ("--algo dsrl --policy.steer-reach 0", "policy.steer_reach must be in (0, 100]"),
        ("--algo dsrl --policy.kind flow", "dsrl needs --policy.kind steered, got flow"),
        ("--algo expo --workers 2", "learns beside one actor"),
        ("--algo expo --max-staleness 2", "learns from all that it has stored, however old: leave"),
        (
            "--algo pa_rl --policy.horizon 8 --policy.execute 4",
            "--policy.horizon must equal --policy.execute",
        ),
        ("--algo demo_sac --policy.kind flow", "demo_sac needs --policy.kind squashed"),
        ("--algo expo --rl.critics 9", "must equal those of --rl"),
        ("--algo wsrl --rl.demo-share 0.5", "wsrl keeps no offline data online"),
        ("--algo demo_sac --rl.capacity 150", "replay capacity must be at least"),
        ("--algo demo_sac --rl.subset 9", "rl.subset (<= critics) must be in [1, 2]"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(argv, says, tmp_path):
    assert says in robo_rl(tmp_path, "train", *argv.split()).mistake
    assert not list(tmp_path.iterdir())
