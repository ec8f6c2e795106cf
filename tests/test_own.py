"""What a user brings: a simulator, a task, a policy, a method named as module:object; the pages of
docs/tutorials run as they stand."""

import copy
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from commands import robo_rl as command
from test_readme import SKIPPED

import robo_rl
from controllers.robot import PRESETS, load_robot
from robo_rl import plugins
from robo_rl.algos import demo_sac, ppo
from robo_rl.algos.check import check_method
from robo_rl.errors import MissingDependency, UserError
from robo_rl.experiment.check import CheckOptions, check
from robo_rl.experiment.config import ALGOS, load_config, method_options
from robo_rl.experiment.evaluation import EvalConfig, evaluate_checkpoint
from robo_rl.experiment.methods import find_method
from robo_rl.experiment.plan import make_plan
from robo_rl.experiment.replay import tell_unsound
from robo_rl.experiment.world_model import evaluate_model
from robo_rl.options import PolicyOptions, PpoOptions, RolloutOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.check import check_policy
from robo_rl.policies.context import Context
from robo_rl.policies.policy import GaussianPolicy
from sims.mujoco.names import TASKS
from sims.mujoco.own import check_task
from sims.mujoco.tasks import PICK, REACH, start_of
from world_models import learning, options

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
PAGES = ("own_simulator", "own_task", "own_policy", "own_method", "own_replay")
RL = ("--rl.decisions", "4", "--rl.minibatch", "64", "--rl.critic-warmup", "0", "--rl.epochs", "2")
BUDGET = {
    "own_simulator": ("--envs", "8", "--workers", "1", *RL),
    "own_task": ("--envs", "8", "--workers", "1", *RL),
    "own_policy": ("--envs", "8", "--workers", "1", "--no-video", *RL),
    "own_method": ("--envs", "8", "--workers", "0", "--no-video", "--rl.decisions", "4"),
    "own_replay": (
        "--envs",
        "4",
        "--workers",
        "0",
        "--no-video",
        "--demos",
        "2",
        "--rl.warmup",
        "200",
        "--rl.pretrain",
        "5",
        "--rl.utd",
        "0.5",
    ),
}
TINY = (
    "--steps",
    "700",
    "--eval-every",
    "300",
    "--eval-episodes",
    "4",
    "--demos-most",
    "0",
    "--bc.updates",
    "20",
    "--bc.batch",
    "16",
    "--threads",
    "1",
    "--torch-threads",
    "1",
    "--policy.hidden",
    "32",
)
OPTIONS, SPEC = (
    PolicyOptions(kind="gaussian", horizon=3, execute=2, hidden=16, layers=1),
    ObsSpec(state=5, action=2),
)


def write_page(page: str, folder: Path) -> list[list[str]]:
    """Write the files that a page shows into `folder` -> the commands that it shows, in words, but those of
    which it says that no test runs them."""
    text = (TUTORIALS / f"{page}.md").read_text()
    text = re.sub(rf"{SKIPPED.rstrip('?')}```bash\n.*?```", "", text, flags=re.S)
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block)
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("robo_rl ")]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


# ---- the pages


def success_after(config) -> float:
    """Train in the present folder, then 100 episodes."""
    result = robo_rl.train(replace(config, out="run"))
    success = robo_rl.evaluate(robo_rl.load_policy(result.folder), episodes=100).success.mean()
    print(f"\n{config.algo}: {success}")
    return success


@pytest.mark.learning
@pytest.mark.timeout(1800)  # a busy machine
@pytest.mark.parametrize("algo", ["pi_rl", "reinflow", "dppo", "nft", "ppo"])
def test_without_demonstrations_every_policy_learns_a_simulator_of_the_users_own(algo, here):
    write_page("own_simulator", here)
    config = robo_rl.recipe(sim="point:make", algo=algo, preset="quick", steps=60_000, video=False, seed=3)
    assert success_after(config) >= 0.9


@pytest.mark.learning
@pytest.mark.timeout(3600)  # a busy machine
def test_without_demonstrations_a_policy_learns_from_pictures_of_the_users_own(here):
    write_page("own_simulator", here)
    sim = {"sim": "gym:dots:Dots-v0", "obs": "rgb", "image_size": 32}
    config = robo_rl.recipe(**sim, algo="ppo", steps=60_000, video=False, seed=3)
    assert success_after(config) >= 0.9


@pytest.mark.parametrize("page", [pytest.param(PAGES[0], marks=pytest.mark.slow), *PAGES[1:]])
def test_a_page_runs_as_it_stands_in_any_folder(page, tmp_path):
    commands = write_page(page, tmp_path)
    assert [c[0] for c in commands[:3]] == ["check", "train", "eval"]
    for argv in commands:
        more = {"train": (*TINY, *BUDGET[page]), "eval": ("--episodes", "4")}.get(argv[0], ())
        result = command(tmp_path, *argv, *more)
        assert result.code == 0, (argv, result.err)
        assert "Warning" not in result.err, result.err
    if (own := tmp_path / "own_loop.py").exists():
        here = os.environ | {"PYTHONPATH": str(TUTORIALS.parent.parent)}
        said = subprocess.run([sys.executable, own], cwd=tmp_path, env=here, capture_output=True, text=True)
        assert said.returncode == 0 and said.stdout.split()[-1] in ("True", "False"), said
    run = next((tmp_path / "runs").iterdir())
    assert command(tmp_path, "report", run).code == 0


def test_what_a_page_says_of_python_holds(here):
    write_page("own_simulator", here)
    env = robo_rl.make_env("point:make", num_envs=8, reward="sparse")
    assert env.num_envs == 8 and not env.dense
    result = robo_rl.evaluate(
        lambda obs: np.clip(2 * obs["state"][:, 4:] - obs["state"][:, 2:4], -1, 1), env, episodes=16
    )
    assert result.success_rate == 1


def test_a_run_of_own_simulator_policy_and_method_is_stopped_and_resumes_bit_for_bit(here):
    for page in PAGES:
        write_page(page, here)
    config = robo_rl.recipe(
        sim="point:make",
        algo="reinforce:make",
        workers=0,
        envs=8,
        steps=800,
        eval_episodes=4,
        eval_every=300,
        max_steps=20,
        video=False,
        policy={"kind": "gauss:make", "hidden": 16},
        rl={"decisions": 4},
    )

    class Enough(Exception):
        pass

    def stop(event):
        if event.kind == "checkpoint" and event.step:
            raise Enough

    assert config.max_staleness == 0  # a method that says nothing of stale data gets none
    whole = robo_rl.train(config, quiet=True)
    # a folder's name has no colon
    assert re.fullmatch(r"point-goal-reinforce-make-s0-[\d-]+", whole.folder.name)
    with pytest.raises(Enough):
        robo_rl.train(replace(config, out="parts"), stop, quiet=True)
    assert load_config(Path("parts")).rl == config.rl and type(config.rl).__name__ == "Options"
    parts = robo_rl.resume("parts", quiet=True)
    last = [sorted((r.folder / "checkpoints").iterdir())[-1] for r in (whole, parts)]
    assert last[0].name == last[1].name
    assert (last[0] / "policy.safetensors").read_bytes() == (last[1] / "policy.safetensors").read_bytes()
    assert robo_rl.load_policy("parts").module.options.kind == "gauss:make"


SICK = """
import math

import {module}
from {module} import Options


class Sick({module}.{base}):
    def update(self, *args, **more):
        metrics = super().update(*args, **more)
        self.count = getattr(self, "count", 0) + 1
        if self.count > 4:
            next(self.policy.parameters()).data.fill_(math.nan)
        return metrics


def make(policy, options, seed, demos=None):
    return Sick(policy, options, seed)
"""


@pytest.mark.parametrize(
    ("page", "module", "base", "more"),
    [
        ("own_method", "reinforce", "Reinforce", {"rl": {"decisions": 2}}),
        ("own_replay", "doubt", "Doubt", {"demos": "2", "rl": {"warmup": 50, "pretrain": 0, "batch": 16}}),
    ],
)
def test_weights_that_an_own_method_spoils_late_are_told_as_its_doing(here, page, module, base, more):
    write_page(page, here)
    (here / "sick.py").write_text(SICK.format(module=module, base=base))
    config = robo_rl.recipe(
        task="reach",
        algo="sick:make",
        workers=0,
        envs=4,
        steps=2000,
        eval_episodes=4,
        eval_every=2000,
        video=False,
        policy={"hidden": 16},
        bc={"updates": 2, "batch": 16},
        out="sick-run",
        **more,
    )
    with pytest.raises(UserError, match="--algo sick:make: an update left the weights .* not finite") as told:
        robo_rl.train(config, quiet=True)
    assert "simulator" not in str(told.value) and "train --resume sick-run" in str(told.value)


@pytest.mark.slow
def test_workers_of_ray_find_what_the_learner_finds(tmp_path):
    pytest.importorskip("ray", reason="needs robo_rl[ray]")
    for page in PAGES:
        write_page(page, tmp_path)
    own = ("--sim", "point:make", "--algo", "reinforce:make", "--policy.kind", "gauss:make")
    result = command(
        tmp_path,
        "train",
        *own,
        "--backend",
        "ray",
        "--workers",
        "1",
        "--envs",
        "8",
        "--rl.decisions",
        "4",
        *TINY,
        timeout=240,
    )
    assert result.code == 0, result.err


# ---- names


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("my_pkg.sims:make", True),
        ("my_pkg.sims:make,a=1,b=[1,2]", True),
        ("my_pkg.sims:make,a", False),
        ("a:b.c", True),
        ("gym:Pendulum", False),
        ("envpool:X", False),
        ("wm:runs", False),
        ("dds:speed", False),
        ("mujoco", False),
        ("pick_cube", False),
        ("gym:Pendulum-v1", False),
        ("a:b/c", False),
        ("C:\\x", False),
        ("a b:c", False),
    ],
)
def test_prefixes_of_ours_are_no_modules(name, own):
    assert plugins.is_object(name) == own


def test_a_name_that_leads_nowhere_says_where_it_was_looked_for_and_what_is_near(here):
    (here / "mine.py").write_text("def make_pour(): ...\n")
    (here / "needs.py").write_text("import absent_package_x\n")
    with pytest.raises(UserError, match=f"no module 'nowhere' in {re.escape(str(here))} .*PYTHONPATH"):
        plugins.load_object("nowhere:make", "--sim")
    with pytest.raises(UserError, match="no module 'mine.deep'"):
        plugins.load_object("mine.deep:make", "--sim")
    with pytest.raises(
        UserError, match="no 'mine'. Nearest: .*__main__ is the script or notebook that runs now"
    ):
        plugins.load_object("__main__:mine", "--policy.kind")
    with pytest.raises(UserError, match="mine has no 'make_por'. Nearest: make_pour$"):
        plugins.load_object("mine:make_por", "--sim")
    with pytest.raises(UserError, match="without .py: mine:make_pour"):
        plugins.load_object("mine.py:make_pour", "--sim")
    # the user's module is there, what it needs is not
    with pytest.raises(
        MissingDependency, match="needs the module 'absent_package_x', which is not installed"
    ):
        plugins.load_object("needs:make", "--sim")


def test_a_module_that_cannot_be_imported_says_what_it_raised_and_where(here):
    (here / "syntax_x.py").write_text("x = 1\ndef f(:\n")
    (here / "license_x.py").write_text("def begin():\n    raise OSError('no license\\nfile')\nbegin()\n")
    with pytest.raises(UserError, match=r"syntax_x cannot be imported: SyntaxError: .*syntax_x.py, line 2\)"):
        plugins.load_object("syntax_x:make", "--sim")
    with pytest.raises(UserError, match=r"imported: OSError: no license file \(.*license_x.py, line 2\)"):
        plugins.load_object("license_x:make", "--sim")


def test_a_module_of_the_current_folder_comes_before_an_installed_one(here):
    (here / "colorsys.py").write_text("mine = 1\n")
    sys.modules.pop("colorsys", None)
    try:
        assert plugins.load_object("colorsys:mine", "--sim") == 1
    finally:
        sys.modules.pop("colorsys", None)  # others want Python's own


# ---- simulators


def test_arguments_of_ones_own_simulator_follow_its_name(here):
    write_page("own_simulator", here)
    env = robo_rl.make_env("point:make,max_steps=7", num_envs=2)
    assert env.spec.max_steps == 7 and robo_rl.make_env("point:make", max_steps=8).spec.max_steps == 8
    assert robo_rl.recipe("point:make,max_steps=7", algo="ppo").demos == "0"


@pytest.mark.parametrize("sim", ["gym:two_links:TwoLinks-v0", "bare:make"])
def test_a_policy_that_learnt_in_a_model_is_judged_in_the_users_own_env_that_the_model_is_of(here, sim):
    """An id is its task, and a function need not take one: what was recorded of the task is left out."""
    write_page("own_simulator", here)
    (here / "bare.py").write_text(
        "from point import PointMass\n\n\ndef make(num_envs=1, max_steps=20):\n"
        "    return PointMass(num_envs, max_steps or 30, radius=0.2, dense=False)\n"
    )
    robo_rl.collect("data", sim=sim, episodes=30)
    tiny = options.LatentOptions(members=2, hidden=32, layers=1)
    fit = options.FitOptions(updates=150, batch=64, unroll=2, lr=3e-3)
    learnt = learning.train(options.WorldModelConfig(data=("data",), out="wm", net=tiny, fit=fit)).folder
    short = {"bc": {"updates": 2}, "demos": "data", "out": "in", "eval_episodes": 2, "video": False}
    robo_rl.train(robo_rl.recipe(sim="wm:wm", algo="bc", **short), quiet=True)
    assert evaluate_checkpoint("in", EvalConfig(sim=sim, episodes=3))["n"] == 3

    asked = {"windows": 4, "episodes": 2, "probe": 0, "inverse": 2, "video": False, "policies": ("in",)}
    ask = options.WorldEvalConfig(model=str(learnt), dataset="data", **asked)
    with pytest.raises(UserError, match="do not tell how that is made: name it, --sim"):
        evaluate_model(ask)
    assert "policies" in evaluate_model(replace(ask, sim=sim))[0]
    with pytest.raises(UserError, match="--sim is where --policies and --probe are played"):
        evaluate_model(replace(ask, sim=sim, policies=()))


def test_an_id_with_the_name_of_its_package_is_looked_for_there(here):
    (here / "pushing_envs.py").write_text(
        "import gymnasium as gym\n"
        "made_by = 'gymnasium.envs.classic_control:PendulumEnv'\n"
        "gym.register('pushing_envs/Push-v0', made_by, max_episode_steps=7)\n"
    )
    assert robo_rl.make_env("gym:pushing_envs/Push-v0", num_envs=1).spec.max_steps == 7
    with pytest.raises(UserError, match="Nearest: gym:pushing_envs:pushing_envs/Push-v0"):
        robo_rl.make_env("gym:pushing_envs/Pusk-v0", num_envs=1)
    with pytest.raises(UserError, match="unknown gym id 'no_such_package/Push-v0'"):
        robo_rl.make_env("gym:no_such_package/Push-v0", num_envs=1)


MISTAKES = {
    "takes no control (got 'ee_delta'); it takes task, num_envs, reward, max_steps": "--sim point:make "
    "--control ee_delta",
    "must take (num_envs=…): missing a required argument: 'max_steps'": "--sim point:PointMass",
    "the env must be a gymnasium.vector.VectorEnv, got dict": "--sim wrong:no_env",
    "an env of one robot, of which Gymnasium's adapter runs many: say --sim gym:wrong:One": "--sim wrong:One",
    "must take (num_envs=…, raius=…): got an unexpected keyword": "--sim point:make,raius=1",
    "rewards must be float32 of shape (64,), got float64": "--sim wrong:rewards",
    "the same start must give the same first observation": "--sim wrong:starts",
    "must be a sims.mujoco.tasks.Task, got function": "--task wrong:no_env",
    "success must be bool, got float32": "--task wrong:success",
    "a policy must be a torch.nn.Module, got int": "--task reach --policy.kind wrong:number",
    "must take (options, spec, seed): too many positional arguments": "--task reach --policy.kind "
    "wrong:no_env",
    "the learner lacks the method 'update'": "--task reach --algo wrong:method --policy.kind gaussian",
    "must take (policy, options, seed, demos=…)": "--task reach --algo wrong:no_demos",
    "its options, the attribute Options of make or of its module, are missing": "--algo point:make",
    "must be a frozen dataclass that derives from RolloutOptions or OffPolicyOptions": "--algo "
    "wrong:bad_options",
}
WRONG = """
import dataclasses
import gymnasium
import numpy as np
from point import PointMass
from robo_rl.options import RolloutOptions
from sims.mujoco.tasks import REACH

def no_env(num_envs=1):
    return {}

class One(gymnasium.Env):
    def __init__(self, num_envs=1): ...

class Rewards(PointMass):
    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        return obs, reward.astype(float), *rest

class Starts(PointMass):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options={"reset_mask": (options or {}).get("reset_mask")})

def rewards(num_envs=1):
    return Rewards(num_envs, 10, 0.1, True)

def starts(num_envs=1):
    return Starts(num_envs, 10, 0.1, True)

success = dataclasses.replace(REACH, success=lambda s: s.opening)

def number(options, spec, seed):
    return 3

class Options(RolloutOptions):
    pass

def method(policy, options, seed, demos=None):
    return policy
method.Options = RolloutOptions

def no_demos(policy, options, seed):
    return policy
no_demos.Options = RolloutOptions

def bad_options(policy, options, seed, demos=None):
    return policy
bad_options.Options = dict
"""


@pytest.mark.parametrize("says", MISTAKES)
def test_what_is_wrong_with_it_is_one_line_before_a_run_begins(says, tmp_path):
    write_page("own_simulator", tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    argv = MISTAKES[says].split()
    result = command(
        tmp_path, "train", *argv, "--workers", "0", *(() if "--sim" in argv else ("--demos", "2"))
    )
    assert says in result.mistake
    assert not (tmp_path / "runs").exists()


# ---- tasks


def _anywhere(n):
    return start_of(n, [(np.random.uniform(0.4, 0.5, n), 0.0, 0.02)], [0.0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"xml": "<body>"}, "its MJCF is refused: XML parse error"),
        ({"objects": ("cub",)}, "objects names 'cub', but its xml has no <freejoint"),
        ({"joints": ("hinge",)}, "joints names 'hinge', but its xml has no hinge or slide"),
        ({"uses_goal": True}, "uses_goal needs a body with mocap"),
        ({"uses_slide": True}, "uses_slide needs a joint named drawer"),
        ({"place": lambda u: None}, "place must return a Start"),
        ({"place": REACH.place}, r"must give centre of shape \(3, 1, 3\), got \(3, 0, 3\)"),
        ({"success": lambda s: np.zeros(2, bool)}, r"success of 3 envs must have shape \(3,\), got \(2,\)"),
        ({"observed": ("x",)}, "observe gives the rows that observed names: one is missing"),
        ({"observe": lambda s: s.tcp, "observed": ("x",)}, r"must have shape \(1, 3\), got \(3, 3\)"),
        ({"instructions": "pick it up"}, "instructions must be a tuple of sentences.*add a comma"),
        ({"progress": lambda s: np.full(3, np.nan)}, "progress must be finite"),
        ({"place": lambda u: _anywhere(len(u))}, "place must follow from its uniforms alone.*another centre"),
        (
            {"observe": lambda s: s.tcp[:1], "observed": ("cube_z",)},
            "different names, 'cube_z' is there twice",
        ),
    ],
)
def test_a_task_that_does_not_fit_its_form_is_told_in_one_sentence(change, says):
    check_task(PICK)
    with pytest.raises(AssertionError, match=says):
        check_task(replace(PICK, **change))


def test_what_a_task_observes_itself_and_its_joints_end_the_state(here):
    write_page("own_task", here)
    (here / "more.py").write_text("""
from dataclasses import replace
from button import PushButton, top
Seen = replace(PushButton, observe=lambda s: top(s)[2:], observed=("top",), expert=None)
""")
    env = robo_rl.make_env(task="more:Seen", num_envs=3)
    assert env.spec.state_names[-2:] == ("press", "top") and env.spec.task == "more:Seen"
    expert = robo_rl.make_env(task="button:PushButton", num_envs=3)
    env.reset(seed=0)
    expert.reset(seed=0)
    for _ in range(60):
        action = expert.expert_action()
        expert.step(action)
        obs, *_, info = env.step(action)
    # pressed, and the state says how far
    assert info["success"].all() and (obs["state"][:, -2] > 0.012).all()
    assert np.allclose(obs["state"][:, -1], 0.05 - obs["state"][:, -2], atol=1e-6)
    assert not hasattr(env, "expert_action") and not hasattr(env, "recovery_action")
    with pytest.raises(UserError, match="more:Seen has no scripted expert"):
        robo_rl.collect(here / "data", task="more:Seen", episodes=1)


# ---- policies


class Ratio(GaussianPolicy):
    def score(self, context, trace):
        logp, entropy = super().score(context, trace)
        return logp + 1e-6, entropy


class Shape(GaussianPolicy):
    def act(self, obs, generator, explore=True):
        chunk = super().act(obs, generator, explore)
        chunk.actions = chunk.actions[:, :1]
        return chunk


class GlobalNoise(GaussianPolicy):
    def act(self, obs, generator, explore=True):
        torch.randn(1)
        return super().act(obs, generator, explore)


class Dropout(GaussianPolicy):
    def encode(self, obs):
        return super().encode(obs).map(torch.nn.functional.dropout)


class Remembers(GaussianPolicy):
    before = 0.0

    def encode(self, obs):
        self.before = super().encode(obs).map(lambda x: x + 0.5 * self.before).pooled
        return Context(self.before)


class Rows(GaussianPolicy):
    def encode(self, obs):
        return Context.of(obs) if "context" in obs else super().encode(obs).map(lambda x: x - x.mean(0))


class Unsaved(GaussianPolicy):
    def __init__(self, options, spec):
        super().__init__(options, spec)
        self.offset = torch.randn(self.chunk)

    def commands(self, x):
        return super().commands(x + self.offset.view(x.shape[1:]))


class Newtons(GaussianPolicy):
    def commands(self, x):
        return 40 + 10 * super().commands(x)


class OtherOptions(GaussianPolicy):
    def __init__(self, options, spec):
        super().__init__(replace(options, hidden=32), spec)


class NoGradient(GaussianPolicy):
    def bc_loss(self, *args, **more):
        return super().bc_loss(*args, **more).detach()


class NoNoises(GaussianPolicy):
    def bc_loss(self, obs, chunk, mask, generator):
        return super().bc_loss(obs, chunk, mask, generator)


class NoScale(GaussianPolicy):
    noise_scale = None


class Double(GaussianPolicy):
    def __init__(self, options, spec):
        super().__init__(options, spec)
        self.double()


class NoColumns(GaussianPolicy):
    def encode(self, obs):
        return super().encode({"state": obs["state"]})


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (NoNoises, r"must have the method bc_loss\(obs, chunk, mask, generator, noises\): too many"),
        (NoScale, "noise_scale must be a number, got None"),
        (Double, "pooled of encode must be float32, as critics are, got float64"),
        (NoColumns, "encode of a context's columns must be that context"),
        (Ratio, "a ratio of exactly 1: let act and score call one function"),
        (Shape, r"actions of act must be a tensor of shape \(5, 2, 2\), got \(5, 1, 2\)"),
        (GlobalNoise, "act must draw from its generator alone"),
        (Dropout, "act must draw from its generator alone, .* as dropout does"),
        (Remembers, "a policy keeps nothing from call to call: .* the observation must have"),
        (Rows, "must not depend on the other rows of the batch"),
        (Unsaved, "loads the state_dict of another must act as that does"),
        (Newtons, r"must be in \[-1, 1\].*half of them are beyond 4\d.*in the robot's units"),
        (OtherOptions, "policy.options and policy.spec must be those that it was made of"),
        (NoGradient, "bc_loss must be differentiable"),
    ],
)
def test_a_policy_that_breaks_the_contract_is_told_in_one_sentence(cls, says):
    def make(seed):
        torch.manual_seed(seed)
        return cls(OPTIONS, SPEC)

    with pytest.raises(AssertionError, match=says):
        check_policy(make, OPTIONS, SPEC)


@pytest.mark.parametrize("kind", ["flow", "diffusion", "gaussian"])
@pytest.mark.parametrize("views", [(), ("front",)])
def test_our_policies_keep_the_contract(kind, views):
    options = PolicyOptions(kind=kind, horizon=3, execute=2, hidden=16, layers=1, denoise_steps=5, depth=1)
    spec = replace(SPEC, views=views, image_size=32 * len(views), language=bool(views))
    assert "ratio" in check_policy(
        lambda seed: make_policy(options, spec, seed), options, spec, atol=0 if kind == "gaussian" else 1e-5
    )


@pytest.mark.parametrize("algo", sorted({*ALGOS} - {"bc", "ppo", "recap"}))
def test_a_method_that_takes_no_policy_of_ones_own_says_which_methods_do(algo):
    policy = GaussianPolicy(replace(OPTIONS, kind="mine:make"), SPEC)
    with pytest.raises(
        UserError, match=f"{algo} needs .* got mine:make.*; a policy of your own goes with bc, "
    ):
        find_method(algo)(policy, method_options(algo)(), 0)


# ---- methods


class Learner:
    """A learner of PPO with one thing wrong: `broken` says what."""

    def __init__(self, policy, options, seed, broken):
        self.inner, self.policy, self.sampler, self.broken = (
            ppo.make(policy, options, seed),
            policy,
            policy,
            broken,
        )
        if broken == "head" and not hasattr(policy, "aux"):
            policy.aux = torch.nn.Linear(policy.context_size, 1)
        if broken == "sampler":
            self.sampler = copy.deepcopy(policy)
        if broken == "update":
            self.update = lambda rollout: {}

    def update(self, rollout, progress, version=None):
        if self.broken == "in place":
            rollout.rewards.sub_(rollout.rewards.mean())
        metrics = self.inner.update(rollout, progress, version)
        if self.broken == "weights":
            next(self.policy.parameters()).data.fill_(torch.nan)
        return {"none": None, "text": metrics | {"kl": "small"}}.get(self.broken, metrics)

    def after_collect(self, rollout):
        self.inner.after_collect(rollout)
        for new, old in zip(self.policy.parameters(), self.sampler.parameters(), strict=True):
            old.data.lerp_(new.data, 0.5)

    def state_dict(self):
        state = self.inner.state_dict()
        if self.broken in ("nothing", "key"):
            return None if self.broken == "nothing" else state | {"counts": {(0, 1): 2}}
        missing = {"state": "actor_opt", "critic's": "credit"}.get(self.broken)
        return (
            {k: v for k, v in state.items() if k != missing}
            if missing
            else {"odd": {1, 2}}
            if self.broken == "odd"
            else state
        )

    def load_state_dict(self, state):
        self.inner.load_state_dict(self.inner.state_dict() | state)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("none", "update must return a dict of metrics, got NoneType"),
        ("text", "must be numbers by name, got 'kl': str"),
        ("weights", "must leave the weights finite"),
        ("state", "a run would not resume exactly"),
        ("critic's", "a run would not resume exactly"),  # which shows in the policy an update later
        ("odd", "state_dict must be a dict of tensors"),
        ("key", r"cannot save the key \(0, 1\) of a dict at /counts"),
        ("nothing", "state_dict must return a dict, got NoneType"),
        ("sampler", "a run would not resume exactly"),  # which moves after the update
        ("head", "must not add weights to the policy, as aux.weight"),
        ("in place", "must not change the rollout that it is given, rewards differs"),
        ("update", r"must have the method update\(rollout, progress, version\): too many"),
    ],
)
def test_a_method_that_breaks_the_contract_is_told_in_one_sentence(broken, says):
    options = PpoOptions(critic_warmup=0, minibatch=8, epochs=1)

    def make(policy, options, seed):
        return Learner(policy, options, seed, broken)

    with pytest.raises(AssertionError, match=says):
        check_method(make, options, make_policy(OPTIONS, SPEC, 0))


@pytest.mark.parametrize("algo", ["pi_rl", "ppo", "dppo", "reinflow", "nft"])
@pytest.mark.parametrize("advantage", ["gae", "grpo", "poise"])
def test_our_methods_keep_the_contract(algo, advantage):
    head = robo_rl.recipe(task="reach", algo=algo, preset="quick").policy
    policy = make_policy(replace(head, horizon=3, execute=2, hidden=16, layers=1), SPEC, 0)
    options = method_options(algo)(critic_warmup=0, minibatch=8, epochs=2, advantage=advantage, group=2)
    assert check_method(find_method(algo), options, policy) == ("members", "metrics", "resume")


@pytest.mark.parametrize("algo", ["pi_rl", "nft"])
def test_a_method_with_supervision_beside_rl_is_checked_with_demonstrations(algo):
    head = robo_rl.recipe(task="reach", algo=algo, preset="quick").policy
    policy = make_policy(replace(head, horizon=3, execute=2, hidden=16, layers=1), SPEC, 0)
    options = method_options(algo)(critic_warmup=0, minibatch=8, epochs=2, bc_coef=0.5)
    asked = []

    def make(policy, options, seed, demos=None):
        def sample(size, generator):
            asked.append(size)
            obs, chunks, mask = demos(size, generator)
            assert chunks.shape == (size, 3, SPEC.action) and mask.shape == (size, 3)
            return obs, chunks, mask

        return find_method(algo)(policy, options, seed, demos=sample)

    assert check_method(make, options, policy) == ("members", "metrics", "resume") and asked


def test_the_plan_and_the_check_of_a_method_give_it_demonstrations_as_a_run_does(here):
    (here / "held.py").write_text(
        "from dataclasses import dataclass\n"
        "from robo_rl.algos import pi_rl\n"
        "from robo_rl.options import PiRlOptions\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Options(PiRlOptions):\n"
        '    """pi_rl that is always held near demonstrations."""\n\n'
        "    bc_coef: float = 0.5\n\n\n"
        "def make(policy, options, seed, demos=None):\n"
        "    if options.bc_coef and demos is None:\n"
        "        raise ValueError('no demonstrations')\n"
        "    return pi_rl.make(policy, options, seed, demos=demos)\n"
    )
    assert check(CheckOptions(algo="held:make"))["held:make"] == ("members", "metrics", "resume")
    config = robo_rl.recipe(task="reach", algo="held:make", preset="quick", envs=8, workers=0)
    assert config.rl.bc_coef == 0.5 and make_plan(config).peak


@pytest.mark.parametrize("algo", ["demo_sac", "expo", "iql", "wsrl"])
def test_our_methods_of_replay_keep_the_contract(algo):
    config = robo_rl.recipe(task="reach", algo=algo, preset="quick")
    policy = make_policy(
        replace(config.policy, horizon=2, execute=2, hidden=16, layers=1, critic_hidden=16), SPEC, 0
    )
    options = replace(config.rl, critic_hidden=16, batch=32)
    assert check_method(find_method(algo), options, policy) == ("members", "metrics", "resume")


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("none", "update must return a dict of metrics, got NoneType"),
        ("state", "a run would not resume exactly"),
        ("online", "the learner lacks the method 'begin_online'"),
        ("actor", "learner.offline_actor must say whether"),
        ("owns", "parts of the learner that have a state_dict, 'options' is none"),
        ("step", "critic_step must return a dict of metrics, got NoneType"),
        ("vector", r"numbers or tensors of one number, got 'q': \(32,\)"),
        ("grad", "must not carry gradients"),
    ],
)
def test_a_method_of_replay_that_breaks_the_contract_is_told_in_one_sentence(broken, says):
    class Broken(demo_sac.DemoSacLearner):
        owns = {"state": ("critics", "actor_opt"), "owns": ("critics", "options")}.get(
            broken, demo_sac.DemoSacLearner.owns
        )
        offline_actor = None if broken == "actor" else False
        begin_online = None if broken == "online" else demo_sac.DemoSacLearner.begin_online

        def critic_step(self, rows):
            wrong = {
                "step": None,
                "vector": {"q": rows.rewards},
                "grad": {"q": torch.ones((), requires_grad=True)},
            }
            return wrong.get(broken, super().critic_step(rows))

        if broken == "none":

            def update(self, *args, **more):
                return None

    config = robo_rl.recipe(task="reach", algo="demo_sac", preset="quick")
    policy = make_policy(
        replace(config.policy, horizon=2, execute=2, hidden=16, layers=1, critic_hidden=16), SPEC, 0
    )
    with pytest.raises(AssertionError, match=says):
        check_method(Broken, replace(config.rl, critic_hidden=16, batch=32), policy)


def test_a_method_of_replay_without_the_loop_of_ours_is_refused():
    config = robo_rl.recipe(task="reach", algo="demo_sac", preset="quick")
    with pytest.raises(AssertionError, match="must derive from robo_rl.algos.offpolicy.OffPolicyLearner"):
        check_method(lambda *args: object(), config.rl, make_policy(config.policy, SPEC, 0))


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"critic_norm": math.inf, "q_target": 1e30}, "the critics is not finite.*targets: 1e+30 on average"),
        ({"critic_norm": math.nan, "q": 0.0}, "critic_norm of an update not finite"),
        ({"actor_loss": math.nan, "critic_norm": 1.0}, "actor_loss of an update not finite"),
    ],
)
def test_a_loss_of_replay_that_is_not_finite_is_told_once_whatever_metrics_a_method_gives(metrics, words):
    said = []
    run = SimpleNamespace(
        told_unsound=False, report=SimpleNamespace(say=lambda text, kind: said.append(text))
    )
    tell_unsound(run, {"critic_loss": 0.1, "q": math.nan})
    assert not said
    for _ in range(2):
        tell_unsound(run, metrics)
    assert len(said) == 1 and re.search(words.replace("+", r"\+"), said[0])


def test_a_method_that_derives_its_options_from_ours_starts_from_that_recipe_but_for_what_it_names_itself(
    here,
):
    write_page("own_replay", here)
    (here / "slower.py").write_text("""
from dataclasses import dataclass
import doubt
@dataclass(frozen=True, kw_only=True)
class Options(doubt.Options):
    utd: float = 0.25

def make(policy, options, seed, demos=None):
    return doubt.make(policy, options, seed)
""")
    ours, doubt, slower = (
        robo_rl.recipe(task="reach", algo=algo) for algo in ("demo_sac", "doubt:make", "slower:make")
    )
    of = [{f.name: getattr(c.rl, f.name) for f in fields(ours.rl)} for c in (ours, doubt, slower)]
    assert (
        of[1] == of[0] and of[2] == of[0] | {"utd": 0.25} and of[0]["utd"] != 0.25 and doubt.rl.doubt == 0.5
    )
    assert doubt.policy == ours.policy and (doubt.envs, doubt.steps, doubt.bc) == (
        ours.envs,
        ours.steps,
        ours.bc,
    )


def test_a_run_of_an_own_method_of_replay_is_stopped_and_resumes_bit_for_bit(here):
    write_page("own_replay", here)
    config = robo_rl.recipe(
        task="reach",
        algo="doubt:make",
        workers=0,
        envs=4,
        steps=800,
        eval_episodes=4,
        eval_every=300,
        demos="2",
        video=False,
        policy={"hidden": 16},
        bc={"updates": 10, "batch": 16},
        rl={"warmup": 100, "pretrain": 5, "utd": 0.5, "batch": 32},
    )
    whole = robo_rl.train(config, quiet=True)

    class Enough(Exception):
        pass

    def stop(event):
        if event.kind == "checkpoint" and event.step:
            raise Enough

    with pytest.raises(Enough):
        robo_rl.train(replace(config, out="parts"), stop, quiet=True)
    parts = robo_rl.resume("parts", quiet=True)
    last = [sorted((r.folder / "checkpoints").iterdir())[-1] for r in (whole, parts)]
    assert last[0].name == last[1].name
    assert (last[0] / "policy.safetensors").read_bytes() == (last[1] / "policy.safetensors").read_bytes()


def test_options_without_a_default_or_with_values_that_a_run_cannot_keep_are_refused():
    @dataclass(frozen=True, kw_only=True)
    class Options(RolloutOptions):
        speed: float

    @dataclass(frozen=True, kw_only=True)
    class Kept(RolloutOptions):
        layers: tuple[int, ...] = (64, 64)
        limit: float | None = None

    @dataclass(frozen=True, kw_only=True)
    class Lost(Kept):
        table: Path = Path("a")

    def make(policy, options, seed, demos=None): ...

    for make.Options, words in (
        (Options, "must have a default for every option; speed has none"),
        (Lost, r"must have values that run.json can keep.*; table is PosixPath\('a'\)"),
    ):
        with pytest.raises(UserError, match=words):
            plugins.options_class(make, "a:make", "--algo", (RolloutOptions,))
    make.Options = Kept
    assert plugins.options_class(make, "a:make", "--algo", (RolloutOptions,)) is Kept


# ---- robots


def test_a_robot_is_a_file_of_any_folder_and_its_model_lies_beside_it(here, monkeypatch):
    (here / "deep" / "lab").mkdir(parents=True)
    for name, to in (("sim.json", "my.json"), ("panda_like.xml", "panda_like.xml")):
        shutil.copy(PRESETS / name, here / "deep" / "lab" / to)
    monkeypatch.chdir(here / "deep")
    for path in ("lab/my.json", "./lab/my.json", "../deep/lab/my.json", str(here / "deep/lab/my.json")):
        robot = load_robot(path)
        assert robot.name == "my" and Path(robot.model).samefile(here / "deep/lab/panda_like.xml")
    with pytest.raises(UserError, match="there is no robot file lab/me.json; in lab there is my.json"):
        load_robot("lab/me.json")


# ---- Gymnasium's names


def test_our_tasks_are_ids_of_gymnasium_once_they_are_registered():
    ids = robo_rl.register_envs()
    assert "robo_rl/pick_cube-v0" in ids and len(ids) == len(TASKS) and robo_rl.register_envs() == ids
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make_vec("robo_rl/pick_cube-v0", num_envs=4, reward="dense", max_episode_steps=20)
    ours = robo_rl.make_env(task="pick_cube", num_envs=4, reward="dense", max_steps=20)
    assert env.spec.id == "robo_rl/pick_cube-v0" and env.control == ours.spec and env.num_envs == 4
    assert env.action_space == ours.action_space and env.observation_space == ours.observation_space
    a, b = env.reset(seed=3)[0], ours.reset(seed=3)[0]
    assert np.array_equal(a["state"], b["state"])
    actions = np.random.default_rng(0).uniform(-1, 1, (25, 4, 7)).astype(np.float32)
    for action in actions:
        ours_now, theirs_now = ours.step(action), env.step(action)
        assert np.array_equal(ours_now[0]["state"], theirs_now[0]["state"]) and np.array_equal(
            ours_now[1], theirs_now[1]
        )
    assert theirs_now[3].all() and np.array_equal(env.expert_action(), ours.expert_action())
    env.close()
    env.close()


def test_an_id_with_its_module_needs_nothing_before_it(tmp_path):
    code = (
        "import gymnasium; print(gymnasium.make_vec('sims.gymnasium_ids:robo_rl/reach-v0', "
        "num_envs=2).control.task)"
    )
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TUTORIALS.parents[1]), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "reach\n"
