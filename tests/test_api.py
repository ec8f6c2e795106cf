"""What `import robo_rl` offers, used as a notebook would; configurations as files."""

import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tomllib
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from commands import robo_rl as command
from toys import PointReach
from vla_goldens import weights

import robo_rl
from robo_rl.cli.train import parse
from robo_rl.errors import UserError
from robo_rl.experiment import config_file, recipes, starts
from robo_rl.experiment.api import as_observation
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.onpolicy import tell_begin
from robo_rl.options import ALGOS, PiRlOptions

SMALL = {
    "task": "reach",
    "preset": "quick",
    "workers": 0,
    "envs": 8,
    "demos": "4",
    "steps": 256,
    "eval_episodes": 8,
    "eval_every": 128,
    "video": False,
    "policy": {"hidden": 16},
    "bc": {"updates": 20, "batch": 16},
    "rl": {"decisions": 4, "minibatch": 16, "critic_warmup": 1},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    events = []
    config = robo_rl.recipe(**SMALL, out=str(tmp_path_factory.mktemp("api") / "run"))
    return robo_rl.train(config, events.append, quiet=True), events


def test_every_name_that_is_offered_is_there():
    assert all(getattr(robo_rl, name) is not None for name in robo_rl.__all__)
    assert {*robo_rl.__all__} <= {*dir(robo_rl)}
    with pytest.raises(AttributeError, match="has no attribute 'trian'; it has .*train"):
        robo_rl.trian  # noqa: B018


def test_a_run_is_trained_and_its_events_are_those_of_the_log(trained, capsys):
    result, events = trained
    assert result.finished and result.low <= result.success <= result.high
    assert not capsys.readouterr().err  # quiet
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    told = [e for e in events if e.kind == "metrics"]
    assert [(e.step, e.stage) for e in told] == [(r["step"], r["stage"]) for r in rows]
    assert [e.metrics["train/kl"] for e in told if "train/kl" in e.metrics] == [
        r["train/kl"] for r in rows if "train/kl" in r
    ]
    assert {"stage", "progress", "metrics", "evaluation", "message", "checkpoint", "finished"} <= {
        e.kind for e in events
    }
    during = [e for e in events if e.kind == "progress" and e.stage == "rl"]
    alone = [e.text for e in during if "critic learns first" in e.text]
    assert during[0].step == 0 and during[0].text == "learns after each 128 steps"  # before the first is made
    assert len(alone) == 1 < len(during) and during[1].text == alone[0]
    assert events[-1].kind == "finished" and [e.stage for e in events if e.kind == "stage"] == [
        "demo",
        "sft",
        "rl",
    ]


SCRIPT = """
import robo_rl

options = {"envs": 4, "steps": 200, "eval_episodes": 2, "video": False, "out": "run"}
config = robo_rl.recipe(sim="toys:PointReach", workers=2, **options)
robo_rl.train(config, quiet=True)
"""


def test_training_leaves_memory_and_threads_of_the_process_as_they_were(tmp_path):
    class Node:
        pass

    node = Node()
    node.itself, freed = node, weakref.ref(node)  # garbage of the caller, or of an earlier run
    del node
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(2)
    gc.disable()
    try:
        robo_rl.train(robo_rl.recipe(**SMALL | {"steps": 0}, out=str(tmp_path / "run")), quiet=True)
        assert torch.get_num_threads() == 2 and not gc.isenabled()
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
    gc.collect()
    assert freed() is None


def test_of_groups_it_says_after_how_many_episodes_rl_learns(tmp_path):
    config = TrainConfig(envs=16, rl=PiRlOptions(advantage="grpo", group=4))
    said = []
    report = SimpleNamespace(start=lambda *a, **k: None, advance=lambda done, note: said.append(note))
    tell_begin(SimpleNamespace(config=config, report=report, step=0))
    assert said == ["learns after each 16 episodes"]


@pytest.mark.parametrize("given", [("-",), ("-m", "mine")])
def test_a_script_on_the_standard_input_or_of_a_package_trains_with_workers(tmp_path, given):
    """No worker imports either. `python -m robo_rl` is such a package."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__main__.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, *given],
        input=SCRIPT,
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("names_itself", [False, True])
def test_a_script_that_trains_as_it_is_imported_is_told_the_line_that_it_lacks(tmp_path, names_itself):
    """Before anything is made where it never asks for its name; else once a worker has imported it."""
    (tmp_path / "script.py").write_text(SCRIPT + "print(__name__)\n" * names_itself)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode and 'below the line if __name__ == "__main__":' in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1  # of the script, none of its workers
    assert (tmp_path / "run").exists() == names_itself


NOTEBOOK = """
import gymnasium
from test_api import Drift

import robo_rl
from robo_rl.errors import UserError


class Mine(Drift):
    pass


gymnasium.register("Mine-v0", Mine, max_episode_steps=9)
for sim in ("gym:Mine-v0", "gym:__main__:Mine"):
    config = robo_rl.recipe(sim=sim, algo="ppo", workers=2, out="run")
    try:
        robo_rl.train(config, quiet=True)
    except UserError as e:
        print(e)
"""


def test_workers_of_an_env_that_is_defined_in_a_notebook_alone_are_refused(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.count("sim names is defined in this notebook alone") == 2, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workers": "two"}, "workers must be int, got 'two'"),
        ({"max_staleness": 1.5}, "max_staleness must be int, got 1.5"),
        ({"rl": {"lr": None}}, "rl.lr must be float, got nothing"),
        ({"task": None}, "task must be str, got None"),
        ({"obs": ["state"]}, r"obs must be str, got \['state'\]"),
        ({"preset": None}, "preset must be str, got None"),
        ({"init": ("runs/a",)}, "init must be str, got .'runs/a',."),
        ({"policy": {"kind": None}}, "policy.kind must be str, got None"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_told_where_none_is_allowed_too(given, said):
    with pytest.raises(UserError, match=said):
        robo_rl.recipe(**{"task": "reach"} | given)
    assert robo_rl.recipe(task="reach", workers=None).workers is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task": None}, "task must be str, got None"),
        ({"control": 3}, "control must be str, got 3"),
        ({"image_size": "64"}, "image_size must be a whole number, got '64'"),
        ({"max_steps": 1.5}, "max_steps must be a whole number, got 1.5"),
    ],
    ids=str,
)
def test_an_option_of_make_env_of_another_type_is_told(given, said):
    with pytest.raises(UserError, match=said):
        robo_rl.make_env(**{"task": "reach"} | given)


@pytest.mark.parametrize("wrong", ["4", [4], float("nan")], ids=str)
def test_what_is_no_number_is_out_of_every_range(wrong):
    with pytest.raises(UserError, match=r"--envs must be in \[1, 1e\+06\], got"):
        replace(robo_rl.recipe(task="reach"), envs=wrong)


def test_the_number_of_envs_beside_an_env_is_refused():
    env = robo_rl.make_env(task="reach", num_envs=2)
    with pytest.raises(UserError, match="num_envs is of the env that evaluate makes itself"):
        robo_rl.evaluate(lambda obs: np.zeros((2, 7)), env, episodes=2, num_envs=4)
    env.close()


def test_what_the_callback_raises_ends_the_run_and_it_resumes(tmp_path):
    class Enough(Exception):
        pass

    def stop(event):
        if event.kind == "checkpoint" and event.step:
            raise Enough

    config = robo_rl.recipe(**SMALL, out=str(tmp_path / "run"))
    with pytest.raises(Enough):
        robo_rl.train(config, stop, quiet=True)
    assert robo_rl.resume(tmp_path / "run", quiet=True).finished


def test_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path):
    from robo_rl.experiment.train import unused

    names = []
    for _ in range(3):
        names.append(unused(tmp_path / "run").name)
        (tmp_path / names[-1]).mkdir()
        (tmp_path / names[-1] / "run.json").touch()
    assert names == ["run", "run-2", "run-3"]


def test_python_and_the_command_line_make_the_same_run(trained, tmp_path):
    result, _ = trained
    robo_rl.train(robo_rl.recipe(**SMALL, out=str(tmp_path / "again")), quiet=True)
    listed = [
        "--task",
        "reach",
        "--preset",
        "quick",
        "--workers",
        "0",
        "--envs",
        "8",
        "--demos",
        "4",
        "--steps",
        "256",
        "--eval-episodes",
        "8",
        "--eval-every",
        "128",
        "--no-video",
        "--policy.hidden",
        "16",
        "--bc.updates",
        "20",
        "--bc.batch",
        "16",
        "--rl.decisions",
        "4",
        "--rl.minibatch",
        "16",
        "--rl.critic-warmup",
        "1",
    ]
    assert command(tmp_path, "train", *listed, "--out", "typed").code == 0
    weights = [
        next(p for p in sorted((run / "checkpoints").iterdir(), reverse=True))
        .joinpath("policy.safetensors")
        .read_bytes()
        for run in (result.folder, tmp_path / "again", tmp_path / "typed")
    ]
    assert weights[0] == weights[1] == weights[2]


def test_a_policy_acts_and_is_evaluated_beside_a_plain_function(trained):
    policy = robo_rl.load_policy(trained[0].folder)
    env = robo_rl.make_env(task="reach", num_envs=4)
    obs, _ = env.reset(seed=0)
    actions = policy(obs)
    assert (
        actions.shape == (4, policy.config.policy.execute, env.single_action_space.shape[0])
        and actions.dtype == np.float32
    )
    for wrong, line in (
        ({}, "the policy sees state; the observation lacks state"),
        ({"state": obs["state"][0]}, r"of one env: state\[None\]"),
        ({"state": obs["state"][:, 1:]}, r"a state \[N, "),
        ({"state": obs["state"] * np.nan}, "not finite"),
        (obs["state"], "the policy sees state; the observation is a ndarray"),
    ):
        with pytest.raises(UserError, match=line):
            policy(wrong)
    far = policy({"state": 50 * obs["state"].astype(np.float64)})  # float64, as Gymnasium's own
    assert np.abs(far).max() <= 1
    seen = replace(policy.spec, views=("top",), image_size=8, language=True)
    picture, told = np.zeros((4, 8, 8, 3), np.uint8), ["go"] * 4
    fits = as_observation({**obs, "image/top": picture, "task": told}, seen)
    assert fits["state"].shape == obs["state"].shape
    for wrong, line in (
        ({"image/top": picture[:, :4], "task": told}, r"as uint8 \[4, 8, 8, 3\], got uint8 \[4, 4, 8, 3\]"),
        ({"image/top": picture / 255, "task": told}, "got float64"),
        ({"image/top": picture, "task": "go"}, "an instruction for each of the 4 envs"),
    ):
        with pytest.raises(UserError, match=line):
            as_observation({**obs, **wrong}, seen)
    mine = robo_rl.evaluate(policy, episodes=8)
    still = robo_rl.evaluate(lambda obs: np.zeros((len(obs["state"]), 7)), env, episodes=8)
    assert mine.n == 8 and "interval" in str(mine) and 0 <= mine.low <= mine.success_rate <= mine.high <= 1
    assert mine.minus(still)[0] == pytest.approx(mine.success_rate - still.success_rate)
    with pytest.raises(UserError, match="do not pair"):
        mine.minus(robo_rl.evaluate(lambda obs: np.zeros((len(obs["state"]), 7)), env, episodes=4))
    with pytest.raises(UserError, match="needs an env"):
        robo_rl.evaluate(lambda obs: obs)
    with pytest.raises(
        UserError, match="gave <class 'tuple'>, which is no array of numbers .*give the first"
    ):
        robo_rl.evaluate(lambda obs: (np.zeros((len(obs["state"]), 7)), None), env, episodes=4)
    with pytest.raises(UserError, match="evaluate takes a policy of robo_rl.load_policy"):
        robo_rl.evaluate(SimpleNamespace(act=lambda obs: obs), env, episodes=4)


def test_a_callback_that_is_no_function_of_an_event_is_refused_before_the_run(tmp_path):
    config = robo_rl.recipe(task="reach", preset="quick", out=str(tmp_path / "run"))
    for wrong, words in (
        (3, "train: callback must be a function"),
        (lambda: None, "must take .event.: too many"),
    ):
        with pytest.raises(UserError, match=words):
            robo_rl.train(config, wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="resume: callback must be a function"):
        robo_rl.resume(tmp_path, 3)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "run").exists()


def test_episodes_are_recorded_and_read(tmp_path):
    got = robo_rl.collect(tmp_path / "data", task="reach", episodes=3, envs=3)
    data = robo_rl.load_dataset(tmp_path / "data")
    assert got.episodes == len(data) == 3 and data.success.all()


def test_a_trained_policy_demonstrates_and_its_successes_alone_are_kept(tmp_path):
    from robo_rl.demos import PolicyExpert, record

    env, seen, kept = robo_rl.make_env(task="reach", num_envs=4), [], []

    def act(obs):  # the scripted expert of the first step of a chunk, for all three of its steps
        seen.append(obs["state"].copy())
        return np.repeat(np.asarray(env.expert_action())[:, None], 3, 1)

    tried = record(PolicyExpert(env, act), 4, 0, kept.append)
    assert tried >= len(kept) == 4 and all(e.success and e.source == "teacher" for e in kept)
    decisions = -(-max(len(e) for e in kept) // 3)
    assert len(seen) >= decisions and all(
        (e.action[0] == e.action[1]).all() and (e.action[1] == e.action[2]).all() for e in kept
    )
    assert not all((e.action[2] == e.action[3]).all() for e in kept)


def test_demonstrations_where_nobody_says_what_succeeds_are_refused_with_a_way_out():
    from robo_rl.demos import PolicyExpert, record

    env = robo_rl.make_env("gym:Pendulum-v1", num_envs=2, max_steps=3)
    with pytest.raises(
        UserError, match="says nothing of success, and only episodes that succeed are demonstrations"
    ):
        record(PolicyExpert(env, lambda obs: np.zeros((2, 1, 1))), 1, 0, lambda episode: None)


def test_the_policy_of_a_run_is_named_as_who_demonstrates(trained, tmp_path):
    with pytest.raises(UserError, match="leave one of them out"):
        robo_rl.collect(tmp_path / "d", task="reach", operator=str(trained[0].folder), policy="expert")
    with pytest.raises(UserError, match="runs/none: there is no such folder of a run"):
        robo_rl.collect(tmp_path / "d", task="reach", operator="runs/none")
    with pytest.raises(UserError, match="has 33 state|the env has|state"):
        robo_rl.collect(tmp_path / "d", task="pick_cube", operator=str(trained[0].folder))


class Drift(gym.Env):
    """Moves on by 0.1 to 0.3 a step, whatever it is told; says from 1 on that it succeeded, and goes on to
    its time limit."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(0, 0.5, 1).astype(np.float32)
        return self.x, {}

    def step(self, action):
        self.x = (self.x + 0.2 + 0.1 * action).astype(np.float32)
        return self.x, -5.0, False, False, {"success": self.x[0] > 1}


gym.register("RoboRlDrift-v0", Drift, max_episode_steps=12)


def test_from_an_env_without_an_expert_to_a_flow_policy(tmp_path):
    sim, small = "gym:RoboRlDrift-v0", {**SMALL, "steps": 128, "eval_every": 128, "task": ""}
    teacher = robo_rl.recipe(
        sim, algo="ppo", **small | {"demos": "0", "policy": {"hidden": 16}}, out=str(tmp_path / "teacher")
    )
    assert teacher.reward == "dense"
    events: list[robo_rl.Event] = []
    result = robo_rl.train(teacher, events.append, quiet=True)
    assert result.mean_return is not None and result.mean_return <= -5
    assert any(e.kind == "progress" and e.metrics.get("return", 0) < 0 for e in events)
    got = robo_rl.collect(tmp_path / "demos", sim=sim, operator=str(tmp_path / "teacher"), episodes=4)
    data = robo_rl.load_dataset(tmp_path / "demos")
    assert (
        got.episodes == len(data) == 4
        and data.success.all()
        and data.terminated.all()
        and (data.state[:, 0] <= 1).all()
    )
    taught = small | {"demos": str(tmp_path / "demos"), "rl": {"decisions": 4, "minibatch": 8}}
    flow = robo_rl.recipe(sim, **taught, out=str(tmp_path / "flow"))
    # its own limit: 3 times a demonstration is more
    assert flow.reward == "sparse" and flow.policy.kind == "flow" and flow.max_steps == 12
    assert robo_rl.train(flow, quiet=True).success == 1


class Broken(Drift):
    """Raises from its 200th step on, of all of them together, until it is mended."""

    left = 200

    def step(self, action):
        Broken.left -= 1
        if Broken.left < 0:
            raise IndexError("no joint 7")
        return super().step(action)


gym.register("RoboRlBroken-v0", Broken, max_episode_steps=12)


@pytest.mark.parametrize("algo", ["ppo", "rlpd"])
def test_a_run_whose_env_fails_says_how_it_goes_on_once_that_is_corrected(tmp_path, algo, monkeypatch):
    monkeypatch.setattr(Broken, "left", 200)
    sizes = {"steps": 320, "envs": 4, "workers": 0, "video": False, "eval_episodes": 2, "eval_every": 32}
    config = robo_rl.recipe("gym:RoboRlBroken-v0", algo=algo, **sizes, out=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"no joint 7 \(.*; the run is kept: robo_rl train --resume \S+/run "):
        robo_rl.train(config, quiet=True)
    Broken.left = 10_000
    before = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    robo_rl.resume(tmp_path / "run", quiet=True)
    after = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert len(before) > 1 and after[-1] > before[-1]


class PaysTooMuch(PointReach):
    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        return obs, reward + np.float32(1e30), *rest


def pays_too_much(num_envs, reward="", max_steps=0):
    return PaysTooMuch(num_envs, max_steps or 20)


def test_a_reward_that_no_critic_can_learn_is_told_once(tmp_path):
    config = robo_rl.recipe(
        f"{__name__}:pays_too_much",
        algo="rlpd",
        reward="dense",
        **{"steps": 128, "envs": 4, "workers": 0, "video": False, "eval_episodes": 2, "out": str(tmp_path)},
    )
    rl = replace(config.rl, warmup=32, pretrain=4, utd=1, batch=16)
    events: list[robo_rl.Event] = []
    robo_rl.train(replace(config, rl=rl), events.append, quiet=True)
    told = [e.text for e in events if e.kind == "warning" and "critics is not finite" in e.text]
    assert len(told) == 1 and "let the env pay less" in told[0], [e.text for e in events if e.text]


@pytest.mark.parametrize("reward, more", [("", " or --reward dense"), ("dense", "")])
def test_what_helps_a_run_without_success_is_what_it_does_not_do_yet(reward, more):
    said = []
    run = SimpleNamespace(
        config=TrainConfig(demos="0", starts="reverse", reward=reward),
        env=PointReach(2),
        folder=Path("none"),
        report=SimpleNamespace(say=lambda text, kind="": said.append(text)),
        looks=[],
        begun=None,
    )
    assert starts.reverse_control(run) is None
    assert said[0].endswith(f"(--demos 100), longer supervision (--bc.updates 5000){more}"), said


def test_a_run_too_short_to_learn_anything_says_so(tmp_path):
    short = {"steps": 64, "envs": 4, "workers": 0, "video": False, "eval_episodes": 2, "eval_every": 64}
    config = robo_rl.recipe("gym:RoboRlDrift-v0", algo="rlpd", **short, out=str(tmp_path / "short"))
    events: list[robo_rl.Event] = []
    robo_rl.train(config, events.append, quiet=True)
    told = [e.text for e in events if e.kind == "warning"]
    assert told[0].startswith("RL will learn nothing: its updates begin after 5,000 steps (--rl.warmup), of")
    assert (
        "nothing was learnt: updates begin after 5000 steps (--rl.warmup), the run made 64 (--steps)" in told
    )
    assert any(e.kind == "progress" and e.metrics.get("return", 0) < 0 for e in events)


def test_a_method_that_learns_nothing_before_rl_begins_no_stage_of_supervision(tmp_path):
    sizes = {"demos": 2, "steps": 64, "envs": 4, "workers": 0, "video": False, "eval_episodes": 2}
    config = robo_rl.recipe(algo="rlpd", task="reach", preset="quick", **sizes, out=str(tmp_path / "run"))
    stages: list[str] = []
    robo_rl.train(config, lambda e: stages.append(e.stage) if e.kind == "stage" else None, quiet=True)
    assert stages == ["demo", "rl"]


# ---- configurations as files


def test_what_print_config_prints_is_taken_back_value_for_value():
    for argv in (
        [],
        ["--algo", "rlpd"],
        ["--task", "reach", "--preset", "quick", "--rl.lr", "1e-4", "--steps", "5000"],
    ):
        config = parse(argv)
        document = tomllib.loads(config_file.as_toml(config, config_file.origins([("recipe", config)])))
        assert (
            config_file.merged(robo_rl.TrainConfig(algo=config.algo, rl=type(config.rl)()), document)
            == config
        )


def test_the_origin_of_every_value_is_told(tmp_path):
    (tmp_path / "c.toml").write_text('task = "reach"\nseed = 4\n[rl]\nlr = 2e-4\n')
    result = command(
        tmp_path, "train", "--config", "c.toml", "--preset", "quick", "--rl.gamma", "0.9", "--print-config"
    )
    lines = {line.split(" = ")[0]: line for line in result.out.splitlines() if " = " in line}
    assert result.code == 0 and lines["seed"] == "seed = 4  # file" and lines["lr"].endswith("# file")
    assert lines["gamma"] == "gamma = 0.9  # command line" and lines["hang"].endswith("# default")
    assert (
        lines["task"] == 'task = "reach"  # chosen'
        and lines["preset"].endswith("# chosen")
        and lines["algo"].endswith("# default")
    )
    assert lines["steps"].endswith("# recipe manipulation/on_policy/quick")
    assert (
        result.out.startswith("# recipe manipulation/on_policy: ")
        and "\n# recipe manipulation/on_policy/quick: minutes\n" in result.out
    )
    assert "rgb" not in result.out.partition("\n\n")[0]  # reasons of this run alone


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rl": {"judge": "classifer"}}, "unknown recipe: rl.judge 'classifer'; did you mean 'classifier'"),
        ({"policy": {"gripper": "toggel"}}, "unknown recipe: policy.gripper 'toggel'"),
        ({"demos": 2.5}, "demos is the folder of a data set, or how many to record, got a float"),
    ],
)
def test_a_value_that_an_option_does_not_have_is_told_from_python_too(changes, words):
    with pytest.raises(UserError, match=words):
        robo_rl.recipe(task="reach", algo="hil_serl", preset="quick", **changes)


def test_the_number_of_demonstrations_may_be_one():
    assert robo_rl.recipe(task="reach", preset="quick", demos=7).demos == "7"


# ---- recipes

SIMS = (
    ("mujoco", "reach"),
    ("mujoco", "reach,pick_cube"),
    ("maniskill", "PickCube-v1"),
    ("gym:HalfCheetah-v5", ""),
    ("pour:make", ""),
    ("arm", ""),
    ("dds", ""),
)


def every_recipe():
    """(words that choose one, the configurations it is made of) of all kinds of simulators, methods,
    observations, presets and policies."""
    for (sim, task), algo, obs, preset, reward in itertools.product(
        SIMS, ALGOS, ("state", "rgb"), recipes.PRESETS, ("", "dense")
    ):
        models = ("", *map(recipes.model_words, ("pi05", "pi0_fast"))) if obs == "rgb" else ("",)
        models += (recipes.model_words("pi05", "folder"),) if (sim, obs) == ("mujoco", "rgb") else ()
        for model in models:
            if preset != "paper" or algo in recipes.PAPERS:
                chosen = recipes.RecipeChoice(sim, task, algo, obs, preset, reward, model=model)
                yield chosen, recipes.steps(chosen)


def test_every_number_of_a_recipe_that_is_not_the_default_has_a_row_with_a_reason():
    assert len({row.name for row in recipes.ROWS}) == len(recipes.ROWS) and all(
        row.why for row in recipes.ROWS
    )
    for chosen, made in every_recipe():
        reasons = {f"recipe {row.name}" for row in recipes.rows(chosen)}
        plain, base = (config_file.flat(asdict(config)) for _, config in made)
        origin = config_file.origins(made)
        assert {origin[k] for k in base if base[k] != plain.get(k)} <= reasons | {"chosen"}, chosen


def paid_data(folder, paid=1.0, sim="gym:Pendulum-v1"):
    """A data set of two episodes, of which the first succeeds and is paid for it."""
    from robo_rl.data.episode import Episode
    from robo_rl.data.writer import Writer

    env = robo_rl.make_env(sim)
    with Writer(folder, spec=env.spec) as writer:
        for success in (True, False):
            writer.add(
                Episode(
                    state=np.zeros((3, 3), np.float32),
                    action=np.zeros((3, 1), np.float32),
                    success=success,
                    task="t",
                    reward=np.array([0, 0, paid * success], np.float32),
                    terminated=success,
                )
            )
    return str(folder)


def test_demonstrations_paid_for_success_alone_turn_an_env_taken_as_it_is_into_one_to_learn_from_them(
    tmp_path,
):
    taken = robo_rl.recipe("gym:Pendulum-v1", demos=paid_data(tmp_path / "paid"))
    same = robo_rl.recipe(task="pick_cube")
    assert (
        taken.max_steps == 64
        and robo_rl.recipe("gym:Pendulum-v1", demos=str(tmp_path / "paid"), max_steps=50).max_steps == 50
    )
    assert (
        taken.reward == "sparse"
        and taken.policy == same.policy
        and taken.rl == replace(same.rl, max_return=1.0)
        and taken.bc == same.bc
    )
    assert parse(["--sim", "gym:Pendulum-v1", "--demos", str(tmp_path / "paid")]) == taken
    dense = robo_rl.recipe("gym:Pendulum-v1", demos=paid_data(tmp_path / "dense", paid=9.0))
    assert dense.reward == "dense" and dense.rl == robo_rl.recipe("gym:Pendulum-v1").rl
    assert robo_rl.recipe("pour:make", demos=str(tmp_path / "paid")).reward == ""
    assert (
        robo_rl.recipe("gym:Pendulum-v1", algo="rlpd", demos=str(tmp_path / "paid")).rl
        == robo_rl.recipe(algo="rlpd").rl
    )


def test_a_number_of_demonstrations_is_a_number_beside_a_folder_of_that_name_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paid_data(tmp_path / "0")
    assert robo_rl.recipe(task="Ant-v5", demos=0).reward == "dense"


def test_so_many_successes_of_an_envs_own_expert_are_learnt_from_as_a_data_set_of_them_is(tmp_path):
    counted = robo_rl.recipe("gym:mine:Shown", demos=20)
    data = robo_rl.recipe("gym:mine:Shown", demos=paid_data(tmp_path / "paid"))
    assert counted.reward == "sparse" and counted.max_steps == 0
    assert (counted.policy, counted.rl, counted.eval_episodes) == (data.policy, data.rl, data.eval_episodes)
    scratch = robo_rl.recipe("gym:mine:Shown")
    assert robo_rl.recipe("gym:mine:Shown", demos=0).rl == scratch.rl != counted.rl
    for algo in ("ppo", "reinflow", "dppo", "nft"):  # each env has a model of its own, whatever learns there
        assert robo_rl.recipe("gym:mine:Shown", demos=20, algo=algo).envs == counted.envs == 64
    # what a simulator of one's own pays is not known: nothing is assumed of its returns
    own = robo_rl.recipe("pour:make", demos=20)
    assert own.policy == counted.policy and own.reward == ""
    assert (own.rl.max_return, own.rl.timeout) == (0.0, "bootstrap")
    assert robo_rl.recipe("pour:make", demos=20, reward="sparse").rl == counted.rl


SWING = """
import gymnasium as gym

class Swing(gym.Wrapper):
    def __init__(self, render_mode=None):
        super().__init__(gym.make("Pendulum-v1", render_mode=render_mode))

    def step(self, action):
        seen, reward, over, cut, info = self.env.step(action)
        return seen, reward, over, cut, {"is_success": bool(seen[0] > 0.9)}
"""


def test_rl_of_a_policy_that_learnt_from_demonstrations_goes_on_as_theirs_does(tmp_path, monkeypatch):
    """--init in an env taken as it is: not the recipe of policies that begin with nothing, which ruins it."""
    (tmp_path / "swings.py").write_text(SWING)
    monkeypatch.syspath_prepend(tmp_path)
    sim, small = "gym:swings:Swing", {"policy": {"hidden": 16}, "bc": {"updates": 1}, "video": False}
    few = {"eval_episodes": 2, "envs": 2, "threads": 1, "workers": 0}
    paid = {"demos": paid_data(tmp_path / "paid", sim=sim), **small, **few}
    shown = robo_rl.recipe(sim, steps=0, max_steps=12, out=str(tmp_path / "shown"), **paid)
    robo_rl.train(shown, quiet=True)
    offline = robo_rl.recipe("none", algo="bc", out=str(tmp_path / "offline"), **paid)
    robo_rl.train(offline, quiet=True)
    theirs = robo_rl.recipe(sim, demos=paid["demos"])
    for name in ("shown", "offline"):
        again = robo_rl.recipe(sim, init=str(tmp_path / name))
        assert (again.reward, again.rl, again.envs) == ("sparse", theirs.rl, theirs.envs), name
        assert again.policy.noise == theirs.policy.noise and again.bc.updates == 0
        assert again.max_steps == (12 if name == "shown" else 0)
    assert robo_rl.recipe(sim, init=str(tmp_path / "shown"), max_steps=9).max_steps == 9
    # a checkpoint that was copied alone
    shutil.copytree(next((tmp_path / "shown/checkpoints").iterdir()), tmp_path / "alone")
    alone = robo_rl.recipe(sim, init=str(tmp_path / "alone"))
    assert (alone.reward, alone.rl, alone.max_steps) == ("sparse", theirs.rl, 0)
    # a run of its kind that was itself begun so
    longer = robo_rl.recipe(sim, init=str(tmp_path / "shown"), steps=1, out=str(tmp_path / "longer"), **few)
    robo_rl.train(longer, quiet=True)
    assert robo_rl.recipe(sim, init=str(tmp_path / "longer")).rl == theirs.rl
    nothing = robo_rl.recipe(sim, algo="ppo", steps=1, out=str(tmp_path / "nothing"), **small, **few)
    robo_rl.train(nothing, quiet=True)
    scratch = robo_rl.recipe(sim, algo="ppo")
    assert robo_rl.recipe(sim, algo="ppo", init=str(tmp_path / "nothing")).rl == scratch.rl != theirs.rl


def test_without_demonstrations_a_small_policy_decides_every_step_and_a_large_model_keeps_its_chunk():
    horizons = {
        kind: robo_rl.recipe("gym:Seen-v0", obs="rgb", policy={"kind": kind}).policy.horizon
        for kind in ("flow", "pi05", "openvla_oft")
    }
    assert horizons == {"flow": 1, "pi05": 4, "openvla_oft": 4}


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"num_envs": 8}, "there is no option num_envs; on the command line it is --envs$"),
        ({"total_timesteps": 8}, "no option total_timesteps; on the command line it is --steps, control"),
        ({"rl": {"learning_rate": 1e-3}}, "no option rl.learning_rate; on the command line it is --rl.lr;"),
        ({"policy": "gaussian"}, r"""policy is a dict, for example policy={"kind": 'gaussian'}, got"""),
    ],
    ids=str,
)
def test_what_is_named_as_elsewhere_is_told_its_name_in_python_too(changes, told):
    with pytest.raises(UserError, match=told):
        robo_rl.recipe(task="reach", **changes)


def test_train_says_what_it_takes():
    with pytest.raises(UserError, match=r"the configuration that robo_rl.recipe\(…\) makes, got 'mine.toml'"):
        robo_rl.train("mine.toml")


def test_no_row_is_left_over_and_each_sets_what_the_options_know():
    used = {row.name for chosen, _ in every_recipe() for row in recipes.rows(chosen)}
    own = {
        "own_method/on_policy",
        "data",
        "taken",
        "taken/on_policy",
        "taken/own_sim",
        "taken/on_policy/ours",
        "taken/on_policy/ours/dense",
    }  # these need a method, or data, of the user's own
    assert {row.name for row in recipes.ROWS} - used == own


def test_of_two_rows_the_later_counts_and_a_paper_has_its_numbers_on_any_simulator():
    rgb = recipes.recipe("maniskill", "PickCube-v1", "reinflow", "rgb", "full")
    assert (rgb.rl.decisions, rgb.rl.gamma, rgb.policy.horizon, rgb.demos, rgb.envs) == (
        16,
        0.99,
        4,
        "300",
        64,
    )
    state = recipes.recipe("maniskill", "PickCube-v1", "reinflow", "state", "full")
    assert (state.rl.decisions, state.rl.gamma, state.rl.minibatch, state.demos) == (13, 0.98, 208, "160")
    papers = [
        recipes.recipe(sim, task, "dppo", obs, "paper") for sim, task in SIMS[:4] for obs in ("state", "rgb")
    ]
    assert len({(p.rl, p.policy, p.envs, p.steps) for p in papers}) == 1 and papers[0].rl.clip_base == 0.001
    assert recipes.recipe("arm", "", "dppo", "state", "paper").envs == 8


def test_a_flow_taught_by_few_demonstrations_predicts_actions_by_default():
    for algo, preset in (("bc", "full"), ("pi_rl", "full"), ("pi_rl", "quick")):
        assert recipes.recipe("mujoco", "pick_cube", algo, "state", preset).policy.predict == "action"
    assert recipes.recipe("mujoco", "pick_cube", "pi_rl", "state", "full").policy.noise_steps == "last"
    assert recipes.recipe("mujoco", "pick_cube", "reinflow", "state", "paper").policy.predict == "velocity"


def test_a_vision_language_action_model_has_rows_of_its_own_and_fresh_weights_more_of_them(tmp_path):
    asked = ["--task", "pick_cube", "--obs", "rgb", "--policy", "smolvla"]
    small, fresh = parse(asked[:4]), parse(asked)
    assert (fresh.bc.lr, small.bc.lr) == (3e-3, 1e-3) and fresh.rl == small.rl and fresh.rl.trust_kl > 0
    assert fresh.policy.keep_prefix and not small.policy.keep_prefix
    assert (small.policy.predict, fresh.policy.predict) == ("action", "velocity")
    assert small.policy.keypoints == "white" and small.data.every == fresh.data.every == 16
    assert robo_rl.recipe(task="pick_cube", obs="rgb", policy={"kind": "smolvla"}) == fresh
    public = recipes.recipe(
        "mujoco", "pick_cube", "pi_rl", "rgb", "full", model=recipes.model_words("smolvla", str(tmp_path))
    )
    assert small.bc.head > 0 == fresh.bc.head and small.demos_most > 0 == fresh.demos_most
    for kind in ("openvla_oft", "mine:make"):
        assert parse([*asked[:4], "--policy", kind, "--algo", "ppo"]).bc.head == 0
    assert public.rl == fresh.rl and public.bc == replace(small.bc, lr=1e-4, head=0, head_every=0, own=0)


def test_public_weights_learn_at_their_publisher_s_rate_and_an_option_changes_it(tmp_path):
    shutil.copy(weights("pi05"), tmp_path / "model.safetensors")
    asked = ["--sim", "none", "--algo", "bc", "--demos", str(tmp_path), "--policy", str(tmp_path)]
    assert parse(asked).bc.lr == 2.5e-5 and parse([*asked, "--bc.lr", "1e-3"]).bc.lr == 1e-3
    assert parse([*asked[:-1], "pi05"]).bc.lr == 1e-3  # fresh weights
    assert robo_rl.recipe(policy={"kind": "groot", "folder": str(tmp_path)}, algo="bc").bc.lr == 1e-4


def test_on_own_data_a_public_model_has_the_chunk_that_its_folder_says_and_an_option_changes_it(
    tmp_path, capsys
):
    shutil.copy(weights("pi05"), tmp_path / "model.safetensors")
    asked = ["--sim", "none", "--algo", "bc", "--demos", str(tmp_path), "--policy", str(tmp_path)]
    usual, there = parse(asked).policy, ["--policy", str(tmp_path), "--obs", "rgb"]
    simulated = parse(there).policy
    settings = {"chunk_size": 20, "n_action_steps": 30, "num_inference_steps": 10}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    policy = parse(asked).policy
    assert (policy.horizon, policy.execute, policy.denoise_steps) == (20, 20, 10)
    assert parse([*asked, "--policy.execute", "5"]).policy == replace(policy, execute=5)
    made = robo_rl.recipe(
        sim="none", algo="bc", demos=str(tmp_path), policy={"kind": "pi05", "folder": str(tmp_path)}
    ).policy
    assert (made.horizon, made.execute, made.denoise_steps) == (20, 20, 10)
    # in a simulator the recipe's own: its methods were made for short chunks
    assert parse(there).policy == simulated
    (tmp_path / "config.json").write_text(json.dumps({"chunk_size": "50", "num_steps": 0}))
    assert parse(asked).policy == usual
    with pytest.raises(SystemExit):
        parse([*asked, "--print-config"])
    assert "# --policy" in capsys.readouterr().out


def test_a_run_s_own_configuration_starts_another(trained, tmp_path):
    again = parse(["--config", str(trained[0].folder / "run.json"), "--seed", "1"])
    assert (again.task, again.seed, again.steps, again.rl.minibatch, again.out) == ("reach", 1, 256, 16, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tsak = 'reach'", "no option tsak; did you mean task"),
        ("[rl]\nlr = 'big'", "rl.lr must be float, got 'big'"),
        ("rl = 3", "rl is a table of options"),
        ("seed = 1.5", "seed must be int, got 1.5"),
        ("seed = -1", "--seed"),
        ("seed =", "is no TOML"),
        ("[policy.lora]\ntargets = [3]", "policy.lora.targets must be a list of str, got [3]"),
        ("[policy.lora]\ntargets = 'head'", "policy.lora.targets must be a list of str, got 'head'"),
        ('{"config": [1]}', '"config" in c.json is no table of options, got [1]'),
        ('{"config": null}', '"config" in c.json is no table of options, got None'),
    ],
)
def test_a_mistake_in_a_file_is_one_line(text, said, tmp_path):
    name = "c.json" if text.startswith("{") else "c.toml"
    (tmp_path / name).write_text(text)
    result = command(tmp_path, "train", "--config", name)
    assert result.code == 2 and said in result.err and len(result.err.splitlines()) == 1
    assert command(tmp_path, "train", "--config", "none.toml").code == 2


def test_the_folder_of_a_run_is_no_policy():
    with pytest.raises(UserError, match=r"robo_rl.evaluate\(robo_rl.load_policy\('runs/first'\), …\)"):
        robo_rl.evaluate("runs/first")
