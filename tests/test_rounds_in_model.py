"""The script that trains inside world models in rounds: what it makes, and what it does not do twice."""

import json
import re

import pytest
from commands import launch_script

import robo_rl
import robo_rl.experiment.api
from robo_rl.errors import UserError
from robo_rl.files import read_json
from world_models import learning, options

rounds = launch_script("rounds_in_model")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """(weak policy, data set) of reach."""
    at = tmp_path_factory.mktemp("begun")
    robo_rl.collect(at / "demos", task="reach", episodes=8)
    weak = robo_rl.train(
        robo_rl.recipe(
            task="reach",
            algo="bc",
            preset="quick",
            demos=str(at / "demos"),
            workers=0,
            video=False,
            eval_episodes=10,
            out=str(at / "weak"),
            bc={"updates": 60},
        ),
        quiet=True,
    ).folder
    robo_rl.collect(at / "data", task="reach", episodes=40, policy=f"{weak},expert", noise=0.15)
    return weak, at / "data"


def small(weak, data, out, count: int) -> list[str]:
    """A small run of `count` rounds."""
    sizes = ("--episodes", "12", "--steps", "2000", "--updates", "60", "--starts", "10", "--workers", "0")
    return [str(weak), str(data), "--out", str(out), "--rounds", str(count), *sizes]


def test_a_second_round_learns_from_what_the_first_one_led_to(begun, tmp_path, capsys):
    weak, data = begun
    robo_rl.collect(tmp_path / "out/data-0", task="reach", episodes=5, policy=str(weak))  # as after a stop
    rounds.main(small(weak, data, tmp_path / "out", 1))
    first = (tmp_path / "out/model-0/model/world.json").stat().st_mtime_ns
    capsys.readouterr()
    rounds.main(small(weak, data, tmp_path / "out", 2))
    assert (tmp_path / "out/model-0/model/world.json").stat().st_mtime_ns == first
    again = read_json(tmp_path / "out/model-1/run.json")["config"]
    assert again["data"] == [str(data), str(tmp_path / "out/data-0")]
    assert len(robo_rl.load_dataset(tmp_path / "out/data-0")) == 12  # what was missing of them
    inside = read_json(tmp_path / "out/inside-1/run.json")["config"]
    assert inside["sim"] == f"wm:{tmp_path / 'out/model-1'}" and inside["init"] == str(weak)
    said = capsys.readouterr().out
    assert len(re.findall(r"round \d: .*\n  in the model .*\n  in the simulator .*\n  gained ", said)) == 2


def test_a_fit_that_was_stopped_goes_on(begun, tmp_path, monkeypatch):
    weak, data = begun
    args = rounds.parsed(small(weak, data, tmp_path, 1))
    config = options.WorldModelConfig(
        data=(str(data),), out=str(tmp_path / "model-0"), fit=options.FitOptions(updates=60)
    )

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(learning, "calibrated", killed)
        with pytest.raises(KeyboardInterrupt):
            learning.train(config)
    assert rounds.learn(tmp_path / "model-0", [data], args, 0) == tmp_path / "model-0"
    assert (tmp_path / "model-0/model/world.json").exists()
    assert robo_rl.load_world_model(tmp_path / "model-0").spec.horizon > 0


def test_a_run_inside_that_was_stopped_goes_on(begun, tmp_path, monkeypatch):
    """It is resumed, not begun again."""
    weak, data = begun
    args = rounds.parsed(small(weak, data, tmp_path, 1))
    made = []

    def stopped(folder, callback=None, quiet=False):
        made.append(folder)
        return robo_rl.experiment.api.TrainResult(folder, False)

    (tmp_path / "inside-0").mkdir()
    (tmp_path / "inside-0/run.json").write_text(json.dumps({"config": {"init": str(weak)}}))
    monkeypatch.setattr(robo_rl, "resume", stopped, raising=False)
    with pytest.raises(UserError, match="the same command goes on"):
        rounds.improve(tmp_path / "inside-0", tmp_path / "model-0", args, 0)
    assert made == [tmp_path / "inside-0"]


def test_a_data_set_of_another_env_is_refused_before_a_model_is_learnt_from_it(begun, tmp_path):
    weak, _ = begun
    robo_rl.collect(tmp_path / "cube", task="pick_cube", episodes=2)
    with pytest.raises(UserError, match=r"data set .*cube has \d+ state and 7 action numbers, the env has"):
        rounds.main(small(weak, tmp_path / "cube", tmp_path / "out", 1))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("--starts", "0"), r"--starts must be in \[1, 1e\+09\], got 0"),
        (("--noise", "-1"), "--noise must be in"),
        (("--algo", "pirl"), "unknown algo 'pirl'"),
    ],
)
def test_a_mistake_is_told_before_a_model_is_learnt(begun, tmp_path, changed, words):
    with pytest.raises(UserError, match=words):
        rounds.main([*small(*begun, tmp_path / "out", 1), *changed])
    assert not (tmp_path / "out").exists()


def test_rounds_of_another_policy_or_other_data_are_not_gone_on_with(begun, tmp_path):
    """Their gain would be said of a policy that they do not come from."""
    weak, data = begun
    for run, key, value in (("model-0", "data", [str(data)]), ("inside-0", "init", str(weak))):
        (tmp_path / run).mkdir()
        (tmp_path / run / "run.json").write_text(json.dumps({"config": {key: value}}))
    (tmp_path / "model-0/model").mkdir()
    (tmp_path / "model-0/model/world.json").touch()
    args = rounds.parsed(small(weak, data, tmp_path, 1))
    assert rounds.learn(tmp_path / "model-0", [data], args, 0) == tmp_path / "model-0"
    with pytest.raises(UserError, match=rf"model-0 was begun with {data}, not with {data}, {tmp_path}; give"):
        rounds.learn(tmp_path / "model-0", [data, tmp_path], args, 0)
    args.policy = str(tmp_path / "other")
    with pytest.raises(
        UserError, match=rf"inside-0 was begun with {weak}, not with {tmp_path / 'other'}; give"
    ):
        rounds.improve(tmp_path / "inside-0", tmp_path / "model-0", args, 0)
