"""World models as a user runs them: collect, wm train, train in the model, check in the simulator, train with
a share."""

import json
import os
import re

import pytest
from commands import TINY, Command, robo_rl
from test_world_models_judge import Stand

from robo_rl.cli import wm_tune
from robo_rl.cli.wm_eval import keep_other
from robo_rl.errors import UserError
from robo_rl.experiment.api import load_policy
from robo_rl.experiment.planning import PlanningOptions, planned_actor
from robo_rl.policies import blank_obs

LEARN = ("--fit.updates", "60", "--fit.batch", "32", "--net.hidden", "32", "--net.members", "2")
SMALL = tuple(
    w
    for pair in zip(TINY[::2], TINY[1::2], strict=False)
    if pair[0] not in ("--task", "--demos")
    for w in pair
)


def ok(cwd, *argv, timeout=240):
    result = robo_rl(cwd, *argv, timeout=timeout)
    assert result.code == 0, result.err
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Demonstrations, recordings of all sorts, and a model of them."""
    folder = tmp_path_factory.mktemp("wm")
    ok(
        folder,
        "collect",
        "--task",
        "reach",
        "--episodes",
        "4",
        "--envs",
        "4",
        "--out",
        "demos",
        "--threads",
        "1",
    )
    ok(
        folder,
        "collect",
        "--task",
        "reach",
        "--policy",
        "expert,random",
        "--noise",
        "0.5",
        "--episodes",
        "40",
        "--envs",
        "20",
        "--out",
        "plays",
        "--threads",
        "1",
    )
    ok(folder, "wm", "train", "plays", "--out", "wm", *LEARN)
    return folder


@pytest.fixture(scope="module")
def inside(place):
    """What was said by the training of a policy in the model."""
    return ok(place, "train", "--sim", "wm:wm", "--demos", "demos", "--out", "inside", *SMALL).err


@pytest.fixture(scope="module")
def alone(place):
    """A policy that learnt from the demonstrations alone."""
    ok(
        place,
        "train",
        "--task",
        "reach",
        "--algo",
        "bc",
        "--demos",
        "demos",
        "--bc.updates",
        "60",
        "--out",
        "alone",
        "--no-video",
        "--eval-episodes",
        "8",
        "--workers",
        "0",
        "--threads",
        "1",
    )


def test_a_model_is_learnt_calibrated_and_goes_on_after_a_stop(place):
    assert (place / "wm").stat().st_mode & 0o777 == 0o700
    report = json.loads((place / "wm" / "calibration.json").read_text())
    assert report["horizon"] > 0 and report["threshold"] > 0 and len(report["error"]) == len(report["copied"])
    said = ok(place, "wm", "train", "--resume", "wm").err  # finished: it only measures again
    assert "open-loop error" in said
    assert "wm already holds a run" in robo_rl(place, "wm", "train", "plays", "--out", "wm").mistake


def test_a_policy_is_trained_in_the_model_and_checked_in_the_simulator(place, inside):
    assert "done in" in inside
    saved = json.loads((place / "inside" / "run.json").read_text())["config"]
    assert saved["sim"] == "wm:wm" and saved["task"] == "reach"
    ok(place, "eval", "inside", "--episodes", "8")
    ok(place, "eval", "inside", "--sim", "mujoco", "--episodes", "8")
    there = json.loads(
        (place / "inside" / next(p for p in os.listdir(place / "inside") if "mujoco" in p)).read_text()
    )
    assert there["sim"] == "mujoco:reach" and there["n"] == 8
    ok(
        place,
        "collect",
        "--sim",
        "wm:wm",
        "--policy",
        "inside,random",
        "--episodes",
        "6",
        "--envs",
        "3",
        "--out",
        "dreamt",
    )
    ok(place, "report", "inside", "--json")


def test_a_model_that_its_page_advises_against_is_told_before_it_is_used(place, inside):
    page = place / "wm" / "model" / "eval" / "eval.json"
    page.parent.mkdir()
    page.write_text(json.dumps({"verdict": "Do not use this model: too few episodes."}))
    said = ok(place, "eval", "inside", "--episodes", "2").err
    told = ok(
        place, "train", "--sim", "wm:wm", "--demos", "demos", "--algo", "bc", "--out", "told", *SMALL
    ).err
    for err in (said, told):
        assert (
            err.count("warning: wm eval on wm: Do not use this model: too few episodes. robo_rl wm eval") == 1
        )
    world = place / "wm" / "model" / "world.json"
    saved = world.read_text()
    doc = json.loads(saved)
    doc["spec"]["control"]["max_steps"] = 9999
    world.write_text(json.dumps(doc))
    limited = f"episodes in wm end after {doc['spec']['horizon']} step"
    assert f"note: {limited}" in ok(place, "eval", "inside", "--episodes", "2").err
    doc["spec"]["data"] = "plays: 40 episodes, 900 frames, 0 successful"
    world.write_text(json.dumps(doc))
    again = ("train", "--sim", "wm:wm", "--demos", "demos", "--algo", "bc", "--out", "none", *SMALL)
    for argv in (("eval", "inside", "--episodes", "2"), again):
        assert "warning: wm knows no success, for none of the episodes" in ok(place, *argv).err
    world.write_text(saved)
    page.write_text(json.dumps({"verdict": "Surely better than every simple predictor after 8 steps."}))
    assert "warning" not in ok(place, "eval", "inside", "--episodes", "2").err
    page.write_text(json.dumps({"verdict": "Surely better than every simple predictor.", "data": "plays"}))
    refused = robo_rl(place, "wm", "eval", "wm", "demos").mistake
    assert "eval has the page of plays; give that of demos a folder of its own, --out " in refused
    keep_other(page.parent, "./plays")  # the same data set is measured again
    moved = {"data": "plays", "data_folder": str(place / "plays")}  # measured there, looked at from here
    page.write_text(json.dumps(moved))
    keep_other(page.parent, str(place / "plays"))
    with pytest.raises(UserError, match="has the page of plays"):
        keep_other(page.parent, "plays")


def test_a_policy_plans_in_the_model_and_is_compared_with_itself_alone(place, alone):
    said = ok(
        place,
        "eval",
        "alone",
        "--plan-in",
        "wm",
        "--plan-candidates",
        "3",
        "--plan-rounds",
        "1",
        "--plan-ahead",
        "8",
        "--episodes",
        "8",
        "--against",
        "alone",
        "--json",
    )
    found = json.loads(said.out)
    assert found["planned"]["model"] == "wm" and 0 <= found["planned"]["changed"] <= 1
    alone = json.loads(ok(place, "eval", "alone", "--episodes", "8", "--json").out)
    assert (
        found["against"]["success_rate"] == alone["success_rate"]
        and "planned" in found["file"]
        and found["file"] != alone["file"]
    )
    few = ("--plan-candidates", "2", "--episodes", "2")
    said = ok(place, "eval", "alone", "--plan-in", "wm", *few).out
    assert "not the policy's own first" in said and "confirms itself" not in said
    said = ok(place, "eval", "alone", "--sim", "wm:wm", "--plan-in", str(place / "wm"), *few).out
    assert "that model judged it too, so the success confirms itself" in said


def test_a_deployment_plans_with_one_observation(place, alone):
    policy = load_policy(place / "alone")
    act = planned_actor(
        policy.module, PlanningOptions(plan_in=str(place / "wm"), plan_candidates=3), instruction="", seed=0
    )
    rows = act(blank_obs(policy.spec))
    assert rows.shape == (policy.module.options.execute, policy.spec.action) and act.choose("blend") is act


def test_workers_play_in_the_model_too(place):
    ok(
        place,
        "train",
        "--sim",
        "wm:wm",
        "--demos",
        "demos",
        "--out",
        "crew",
        *SMALL,
        "--workers",
        "2",
        "--steps",
        "1500",
    )


@pytest.mark.slow
def test_a_share_of_each_batch_is_dreamt_once_there_is_a_model(place):
    ok(
        place,
        "train",
        "--task",
        "reach",
        "--demos",
        "demos",
        "--dream",
        "0.5",
        "--dream-model",
        "wm",
        "--dream-refit",
        "1000",
        "--dream-updates",
        "5",
        "--out",
        "half",
        *SMALL,
    )
    rows = [json.loads(line) for line in (place / "half" / "metrics.jsonl").read_text().splitlines()]
    shares = [r["dream/share"] for r in rows if "dream/share" in r]
    # a poor model may be dropped at a refit, not shared less
    assert shares and all(abs(s - 0.5) < 1e-6 for s in shares)
    assert (place / "half" / "dream" / "data" / "meta" / "info.json").exists()


@pytest.mark.slow
def test_a_run_with_a_dreamt_share_goes_on_after_a_stop_and_learns_its_model_from_nothing(place):
    argv = [
        "train",
        "--task",
        "reach",
        "--demos",
        "demos",
        "--dream",
        "0.5",
        "--dream-refit",
        "3000",
        "--dream-updates",
        "20",
        "--out",
        "stopped",
        *SMALL,
        "--steps",
        "30000",
        "--envs",
        "64",
        "--workers",
        "1",
    ]
    command = Command(place, argv)
    metrics = place / "stopped" / "metrics.jsonl"
    command.until(lambda: metrics.exists() and "dream/within" in metrics.read_text(), 600)
    command.signal(2)
    assert command.wait().code == 130
    ok(place, "train", "--resume", "stopped")


def test_a_classifier_is_trained_and_judges(place):
    ok(place, "wm", "judge", "plays", "--out", "judge", "--updates", "50")
    result = ok(place, "wm", "judge", "plays", "--check", "judge", "--json")
    assert 0 <= json.loads(result.out)["disagreement"] <= 1
    ok(
        place,
        "train",
        "--sim",
        "wm:wm",
        "--judge",
        "judge",
        "--demos",
        "demos",
        "--out",
        "judged",
        *SMALL,
        "--steps",
        "600",
    )


def test_a_run_says_how_many_requests_its_judge_took(place):
    with Stand(lambda items, stand: [0.0] * len(items)) as stand:
        words = ("train", "--sim", "wm:wm", "--judge", f"{stand.url}#every=99", "--demos", "demos")
        result = ok(place, *words, "--out", "asked", *SMALL, "--steps", "600", "--workers", "0")
    said = re.search(r"its judge took (\d+) requests\. Look at it", result.err)
    assert said and int(said[1]) == stand.requests


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["wm", "train"], "name a data set"),
        (["wm", "train", "nowhere"], "no data set at nowhere"),
        (["wm", "train", "demos"], "4 episodes"),
        (["wm", "fly"], "unknown wm command 'fly'"),
        (["wm", "tune", "wm", "plays"], "wm is a model of --kind latent; EVA tunes"),
        (["wm", "tune", "nowhere", "plays"], "nowhere holds no"),
        (["wm", "tune", "wm", "plays", "--fit.weight", "-1"], "fit.weight must be in"),
        (["wm", "tune", "wm", "plays", "--windows", "2"], "--windows must be in"),
        (["train", "--sim", "wm:nowhere"], "nowhere holds no world model"),
        (["train", "--sim", "wm:wm"], "no scripted expert"),
        (["train", "--sim", "wm:wm", "--task", "pick_cube"], "is of the task reach, not of pick_cube"),
        (["eval", "inside", "--plan-rounds", "2"], "go with --plan-in MODEL"),
        (["eval", "inside", "--plan-in", "nowhere"], "nowhere holds no world model"),
        (["eval", "inside", "--plan-in", "wm", "--plan-candidates", "1"], r"--plan-candidates must be in"),
        (
            ["eval", "inside", "--plan-in", "wm", "--chunking", "blend"],
            "goes without --policy and --chunking",
        ),
        (["deploy", "inside", "--plan-in", "wm", "--chunking", "rtc"], "with --chunking blend or naive"),
        (["train", "--sim", "wm:wm", "--obs", "rgb"], "predicts state observations"),
        (["train", "--sim", "wm:wm", "--max-steps", "900"], "at most"),
        (["train", "--judge", "head"], "--judge is for a world model"),
        (["train", "--sim", "wm:wm", "--judge", "nobody", "--demos", "demos"], "neither head"),
        (["train", "--sim", "wm:wm", "--randomise", "mass"], "leave out --randomise"),
        (["collect", "--task", "reach", "--policy", "nobody", "--out", "x"], "neither expert nor random"),
    ],
)
def test_a_mistake_is_one_line(place, inside, argv, words):
    assert words in robo_rl(place, *argv).mistake


def test_an_inverse_model_that_reads_no_motion_is_told_beside_its_numbers(tmp_path):
    change = {"before": 1.0, "after": 1.0, "change": {"value": 0.0, "low": 0.0, "high": 0.0}}
    keys = ("score", "any", "arm", "arm_jerk", "command_error")
    doc = {
        "windows": 4,
        "steps": 8,
        "inverse": {"other": {"r2": -0.3}, "tuned_with": {"r2": 0.8}},
        "recorded": {f"{n}/{k}": 1.0 for n in ("other", "tuned_with", "commands") for k in keys},
        "change": {f"{n}/{k}": change for n in ("other", "tuned_with") for k in keys},
    }
    text = wm_tune.table(doc, tmp_path)
    assert text.count("these numbers say nothing: more updates of it (--fit.inverse), or more episodes") == 1
    assert text.index("say nothing") < text.index("EVA score")
