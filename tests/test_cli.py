"""The command line: a mistake is one line that helps and leaves nothing behind; the happy paths end to
end."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import TINY, robo_rl, without_progress

from robo_rl import other_names
from robo_rl.cli import COMMANDS, elsewhere, main, parse_arguments
from robo_rl.cli.eval import Eval, result_file
from robo_rl.cli.help import option_names
from robo_rl.cli.train import Train, parse
from robo_rl.errors import UserError, plural
from robo_rl.experiment.collect import CollectOptions
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.parallel import old_alone, whole_rollouts
from robo_rl.experiment.recipes import recipe
from robo_rl.options import ALGOS, OFF_POLICY, RL_OPTIONS, BcOptions, PolicyOptions
from robo_rl.plugins import OWN

CUT = (
    *TINY,
    "--demos",
    "20",
    "--bc.updates",
    "300",
    "--bc.batch",
    "128",
    "--policy.hidden",
    "64",
    "--eval-episodes",
    "24",
    "--steps",
    "1500",
)  # reaches now and then


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mistake(capsys, *argv: str) -> str:
    """The one line that `robo_rl *argv` answers with, exit status 2, and nothing on standard output."""
    with pytest.raises(SystemExit) as e:
        main(list(argv))
    said = capsys.readouterr()
    assert e.value.code == 2 and not said.out, (e.value.code, said)
    err = without_progress(said.err)
    assert err.startswith("robo_rl: ") and err.count("\n") == 1 and err.endswith("\n"), said.err
    return err


# ---- names: the valid ones, nearest first


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("trian", "unknown command 'trian'; did you mean 'train'? Allowed: train,"),
        ("--sim mujoco", "unknown command '--sim'. Allowed: "),
        ("train --sim mujco", "unknown sim 'mujco'; did you mean 'mujoco'? Allowed: mujoco,"),
        ("collect --sim mujco", "unknown sim 'mujco'; did you mean 'mujoco'? Allowed: mujoco,"),
        (
            "train --task pickcube",
            "unknown mujoco task 'pickcube'; did you mean 'pick_cube'? Allowed: pick_cube,",
        ),
        ("collect --task rech", "unknown mujoco task 'rech'; did you mean 'reach'? Allowed: reach,"),
        ("train --sim gym:Pendulm-v1", "unknown gym id 'Pendulm-v1'. Nearest: Pendulum-v1,"),
        ("train --sim gym:", "gym: needs an id after the colon, for example gym:Pendulum-v1"),
        ("train --sim gym:CartPole-v1", "gym:CartPole-v1 has Discrete actions; only continuous"),
        ("train --max-staleness -1", "--max-staleness must be "),
        ("train --workers 9 --envs 8", "--workers 9 need at least 9 --envs, got 8"),
        ("train --backend rai", "unknown backend 'rai'; did you mean 'ray'?"),
        ("train --backend ray --workers 0", "--backend ray needs "),
        ("train --algo PPO", "unknown algo 'PPO'; did you mean 'ppo'? Allowed: ppo, dppo,"),
        ("train --preset small", "unknown preset 'small'. Allowed: quick, full, paper"),
        ("train --steps 1e5", "--steps is a whole number, got '1e5' ("),
        ("train --workers two", "--workers is a whole number or None, got 'two' ("),
        ("train --rl.lr fast", "--rl.lr is a number, got 'fast' ("),
        ("train --algo pirl", "unknown algo 'pirl'; did you mean 'pi_rl'? Allowed: pi_rl,"),
        ("train --algo=dpo", "unknown algo 'dpo'; did you mean 'dppo'? Allowed: dppo,"),
        ("train --obs rbg", "unknown obs 'rbg'; did you mean 'rgb'? Allowed: rgb, state"),
        ("collect --obs rbg", "unknown obs 'rbg'; did you mean 'rgb'? Allowed: rgb, state"),
        ("train --preset quik", "unknown preset 'quik'; did you mean 'quick'? Allowed: quick, full, paper"),
        (
            "train --preset paper --algo nft",
            "--preset paper is there for dppo, dsrl, reinflow, rlpd, got --algo nft; use quick or full",
        ),
        (
            "train --control ee_delt",
            "unknown control 'ee_delt'; did you mean 'ee_delta'? Allowed: ee_delta, joint_delta",
        ),
        ("train --sim Pusher-v5", "unknown sim 'Pusher-v5'; did you mean --sim gym:Pusher-v5?"),
        ("train --sim pusher:Pusher-v5", "did you mean --sim gym:Pusher-v5?"),
        ("train --sim Pushr-v5", "did you mean --sim gym:Pusher-v5?"),
        ("train --sim colorsys:Mine-v0", "did you mean --sim gym:colorsys:Mine-v0?"),  # such a module
        ("train --sim no_module:Mine-v0", "Allowed: mujoco, mujoco_warp, maniskill"),
        (
            "train --sim HalfCheetah-v5",
            "did you mean --sim mujoco --task HalfCheetah-v5 or --sim gym:HalfCheetah-v5?",
        ),
        ("train --sim PickCube-v1", "did you mean --sim maniskill --task PickCube-v1?"),
        (
            "train --sim gym:Pendulum-v1 --task swing",
            "the id of --sim gym:Pendulum-v1 is the task, leave --task",
        ),
        ("check --sim gym:Pendulum-v1,g=9 --task up", "follow the id: gym:Pendulum-v1,radius=0.3"),
        ("train --task Pusher-v5", "unknown task 'Pusher-v5'; did you mean --sim gym:Pusher-v5?"),
        ("train --task Hoper-v5", "unknown mujoco task 'Hoper-v5'; did you mean 'Hopper-v5'?"),
        ("train --reward dens", "unknown reward 'dens'; did you mean 'dense'? Allowed: dense,"),
        ("train --randomise mas", "unknown randomise 'mas'; did you mean 'mass'? Allowed: mass,"),
        ("train --randomise latency", "randomise latency needs a number of control steps"),
        ("train --policy.kind flw", "unknown policy.kind 'flw'; did you mean 'flow'? Allowed: flow,"),
        (
            "train --rl.epoch 3",
            "Unrecognized options: --rl.epoch, 3; did you mean --rl.epochs? (robo_rl train --help lists",
        ),
        (
            "train --algo ppo --rl.beta 2",
            "Unrecognized options: --rl.beta, 2; did you mean --rl.istar-beta? (robo_rl train --help lists",
        ),
        ("train --taks reach", "Unrecognized options: --taks, reach; did you mean --task? ("),  # not --tasks
        ("train --evns=2", "Unrecognized options: --evns=2; did you mean --envs? ("),
        ("train --preset qucik", "unknown preset 'qucik'; did you mean 'quick'? Allowed: quick, full"),
        (
            "train --num_envs 8",
            "there is no option --num_envs; here it is --envs (robo_rl train --help lists",
        ),
        ("train --desired-kl 1", "there is no option --desired-kl; here it is --rl.trust-kl (robo_rl"),
        ("train --dataset.repo_id=a/b", "there is no option --dataset.repo_id; here it is --demos FOLDER"),
        ("train --gamma 0.9", "there is no option --gamma; here it is --rl.gamma (robo_rl"),
        ("train --algo ppo --lr 1", "there is no option --lr; here it is --bc.lr or --rl.lr (robo_rl"),
        ("wm train x --batch 2", "there is no option --batch; here it is --fit.batch (robo_rl wm train"),
        ("eval x --num_envs 8", "Unrecognized options: --num_envs, 8"),
        ("train stray", "Too many arguments: stray (robo_rl train --help"),
        (
            "report a b c",
            "Too many arguments: b, c; robo_rl compare takes several runs (robo_rl report --help",
        ),
        ("train --envs", "Missing value for argument '--envs'"),
        ("train --envs many", "--envs is a whole number, got 'many' ("),
        ("eval", "Missing from robo_rl eval: STR Run folder"),
        ("doctor --jsn", "Unrecognized options: --jsn; did you mean --json?"),
        ("report", "Missing from robo_rl report"),
        (
            "train --task Hopper-v5 --demos 5",
            "has no scripted expert; record demonstrations (robo_rl collect --operator RUN",
        ),
        (
            "train --sim maniskill --task RollBall-v1",
            "maniskill:RollBall-v1 has no scripted expert; make a data set of ManiSkill's own demonstrations",
        ),
        ("collect --sim maniskill --task RollBall-v1", "maniskill:RollBall-v1 has no scripted expert; make"),
        ("collect --task Hopper-v5", "mujoco:Hopper-v5 has no scripted expert"),
        (
            "train --task reach --demos 0 --rl.bc-coef 1",
            "--rl.bc-coef holds the policy near demonstrations: --demos N or",
        ),
        ("train --algo bc --demos 0", "--algo bc needs demonstrations: --demos N or --demos PATH"),
        ("train --algo nft --policy.kind gaussian", "nft needs --policy.kind flow, pi0, pi05"),
        (
            "train --algo ppo --policy.kind flow",
            "ppo needs --policy.kind gaussian, pi0_fast, openvla_oft, got flow",
        ),
        ("train --rl.advantage grpo --rl.group 7 --envs 16", "--envs must be a multiple of the group size 7"),
        ("train --over-provision 2", "--over-provision above 1 needs a group advantage"),
        ("train --server --workers 0", "and this run has none: add --workers 2, or leave --server out"),
        ("train --ray-address auto", "--ray-address auto is of a Ray cluster: add --backend ray"),
        (
            "train --rl.advantage grpo --workers 2 --max-staleness 1 --over-provision 3",
            "at most --max-staleness + 1 = 2",
        ),
        ("train --periodic 2", "--periodic takes one step per batch of fresh groups"),
        ("train --learners 2 --algo nft", "--learners above 1 goes with pi_rl, ppo, dppo"),
        ("train --learners 2 --rl.minibatch 63", "multiple of --learners 2"),
        ("workers nowhere 3", "nowhere is no run folder"),
        ("train --demos nowhere", "the folder of a data set, got 'nowhere': no such folder"),
        ("train --policy.folder .", "--policy.kind flow is none; --policy . finds its kind"),
        ("train --demos -3", "--demos must be a number or the folder of a data set, got '-3'"),
        ("train --demos ²", "--demos must be a number or the folder of a data set, got '²'"),
        ("train --demos .", "no data set at .: meta/info.json is missing (a relative path begins in /"),
        ("train --resume nowhere", "--resume: nowhere has no run.json; give a run folder or auto"),
        ("train --resume auto", "no run to resume below runs/; start one with: robo_rl train"),
        ("eval nowhere", "nowhere does not exist; no runs nearby: make one with robo_rl train"),
        ("report nowhere", "nowhere does not exist; no runs nearby"),
        ("collect --repair nowhere", "no data set at nowhere"),
    ],
    ids=lambda v: v.replace(" ", "_") if " " in v or v == "trian" else "",
)
def test_a_mistake_is_one_line_with_what_is_allowed_and_leaves_no_file(argv, says, here, capsys):
    assert says in mistake(capsys, *argv.split())
    assert not list(here.iterdir())


def test_data_that_is_made_old_in_one_process_is_told():
    def said(*more):
        return old_alone(parse(["--task", "reach", "--max-staleness", "2", *more]))

    assert "with --workers 0: data is made up to so many updates old" in said("--workers", "0")
    assert said("--workers", "2") == said("--workers", "0", "--rl.advantage", "grpo") == ""
    assert old_alone(parse(["--workers", "0"])) == ""


def test_a_run_says_at_its_start_and_end_that_whole_rollouts_make_more_than_the_steps_asked_for(here):
    argv = ("--demos", "0", "--algo", "ppo", "--eval-episodes", "2", "--rl.critic-warmup", "0")
    done = robo_rl(here, "train", *TINY, *argv, "--steps", "10", "--envs", "8", "--out", "run")
    begun, _, ended = done.err.partition("[rl]")
    whole = 8 * 4 * parse([]).policy.execute
    assert f"--steps 10: RL makes about {whole} control steps, for it stops after a whole rollout" in begun
    assert f"of {whole} (8 envs x 4 decisions x" in begun and done.code == 0
    assert f", {whole} control steps (--steps 10). Look at it: " in ended


def test_rollouts_that_fit_the_steps_are_not_spoken_of_and_those_of_groups_are_of_episodes():
    steps = 32 * 4 * parse([]).policy.execute
    fits = ("--envs", "32", "--rl.decisions", "4", "--steps")
    assert whole_rollouts(parse([*fits, str(10 * steps)]), 100) == ""
    assert f"about {3 * steps:,} control" in whole_rollouts(parse([*fits, str(2 * steps + 1)]), 100)
    group = ("--rl.advantage", "grpo", "--rl.group", "4", "--envs", "8", "--steps", "50")
    assert "up to 800 control steps" in (said := whole_rollouts(parse([*group]), 100))
    assert "8 episodes of up to 100 steps" in said and "fewer --envs make" in said


def test_the_lists_of_valid_names_are_complete(here, capsys):
    from sims import PREFIXES, SIMS
    from sims.mujoco import TASKS

    for argv, names in (
        (["x"], COMMANDS),
        (["train", "--sim", "x"], (*SIMS, *PREFIXES, OWN)),
        (["train", "--task", "x"], (*TASKS, OWN)),
        (["train", "--algo", "x"], (*ALGOS, OWN)),
        (["train", "--preset", "x"], ("quick", "full", "paper")),
    ):
        said = mistake(capsys, *argv)
        assert sorted(said.split("Allowed: ")[1].strip().split(", ")) == sorted(names)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("train --envs 0", "--envs must be in [1, 1e+06], got 0"),
        ("train --envs -5", "--envs must be in [1, 1e+06], got -5"),
        ("train --steps -1", "--steps must be in [0, 1e+12], got -1"),
        ("train --seed -1", "--seed must be in [0, "),
        ("train --target nan", "--target must be in [0, 1], got nan"),
        ("train --target 1.5", "--target must be in [0, 1], got 1.5"),
        ("train --image-size 5", "--image-size must be in [16, 1024], got 5"),
        ("train --threads 5000", "--threads must be in [0, 4096], got 5000"),
        ("train --rl.lr 7", "rl.lr must be in (0, 1], got 7.0"),
        ("train --rl.lr nan", "rl.lr must be in (0, 1], got nan"),
        ("train --rl.gamma inf", "rl.gamma must be in (0, 1], got inf"),
        ("train --rl.decisions 0", "rl.decisions must be in [1, 1e+06], got 0"),
        ("train --algo nft --rl.old-decay 1", "rl.old_decay must be in [0, 1), got 1.0"),
        ("train --policy.execute 99", "policy.execute (E <= H) must be in [1, 8], got 99"),
        ("train --policy.noise-min 0.5", "policy.noise_min (<= noise_max) must be in (0, 0.3], got 0.5"),
        (
            "train --algo dppo --policy.denoise-steps 7",
            "policy.denoise_steps must divide train_steps=20, got 7",
        ),
        ("train --bc.batch 0", "bc.batch must be in [1, 1e+06], got 0"),
        ("eval run --episodes 0", "--episodes must be in [1, 1e+06], got 0"),
        ("eval run --seed 9999", "--seed must be in [0, 2000], got 9999"),
        ("collect --episodes 0", "--episodes must be in [1, 1e+07], got 0"),
        ("collect --noise nan", "--noise must be in [0, 1], got nan"),
    ],
    ids=lambda v: v.replace(" ", "_") if v.split()[0] in COMMANDS else "",
)
def test_a_number_out_of_range_is_one_line_with_the_range(argv, says, here, capsys):
    assert says in mistake(capsys, *argv.split())
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    "cls",
    [PolicyOptions, BcOptions, *RL_OPTIONS.values(), TrainConfig, Eval, CollectOptions],
    ids=lambda c: c.__name__,
)
def test_every_number_among_the_options_has_a_range(cls):
    """No field takes NaN, infinity, -1 (-2 where -1 is the default) or a number without end; the message
    names the field."""
    default = cls(run="x") if cls is Eval else cls()
    for field in dataclasses.fields(cls):
        now = getattr(default, field.name)
        now = 0 if field.name in ("workers", "max_staleness") else now  # None: chosen for this machine
        if isinstance(now, bool) or not isinstance(now, (int, float)):
            continue
        for bad in (min(now, 0) - 1, 10**13) if isinstance(now, int) else (math.nan, math.inf, -1.0):
            with pytest.raises(UserError) as e:
                dataclasses.replace(default, **{field.name: bad})
            words = str(e.value)
            assert field.name in words.replace("-", "_") and str(bad) in words, f"{field.name}={bad}: {words}"


@pytest.mark.parametrize("algo", ALGOS)
def test_every_preset_can_be_trained_by_its_method(algo):
    import importlib

    from robo_rl.policies import ObsSpec, make_policy

    for sim, task in (
        ("mujoco", ""),
        ("mujoco", "Hopper-v5"),
        ("maniskill", ""),
        ("gym:Pendulum-v1", ""),
        ("envpool:MetaWorld/Reach-v3", ""),
    ):
        for obs in ("state", "rgb"):
            for name in ("quick", "full"):
                t = recipe(sim, task, algo, obs, name)
                assert (t.sim, t.task, t.algo, t.obs, t.preset) == (sim, task, algo, obs, name)
                if algo != "bc":
                    policy = make_policy(t.policy, ObsSpec(state=4, action=3), 0)
                    importlib.import_module(f"robo_rl.algos.{algo}").make(policy, t.rl, 0)


# the paper's method has no clamp
@pytest.mark.parametrize("algo", [a for a in ALGOS if a in OFF_POLICY and a != "rlpd"])
def test_targets_are_clamped_only_where_returns_lie_in_a_known_range(algo):
    def most(*argv):
        return parse(["--algo", algo, *argv]).rl.max_target

    assert most() == most("--sim", "maniskill") == most("--reward", "sparse") == most("--preset=quick") == 1
    assert (
        most("--reward", "dense")
        == most("--reward=dense")
        == most("--sim", "maniskill", "--reward", "dense")
        == 0
    )
    assert most("--task", "HalfCheetah-v5") == most("--sim", "gym:Pendulum-v1") == 0
    assert most("--sim", "maniskill", "--task", "MS-HopperStand-v1") == 0  # knows its dense reward alone
    assert most("--reward", "dense", "--rl.max-target", "5") == 5


def test_the_papers_numbers_have_their_own_preset_and_ours_another():
    t, ours = (recipe("mujoco", "pick_cube", "reinflow", "state", name) for name in ("paper", "full"))
    assert (t.rl.entropy_coef, t.rl.clip_low, t.rl.clip_high) == (0.03, 0.01, 0.01)
    assert (t.policy.noise_min, t.policy.noise_max, t.policy.noise, t.policy.noise_steps) == (
        0.10,
        0.24,
        "learned",
        "all",
    )
    assert (t.rl.lr, t.rl.critic_lr, t.rl.epochs, t.rl.target_kl, t.rl.noise_hold, t.rl.noise_end) == (
        4.5e-5,
        6.5e-4,
        5,
        1,
        0.35,
        0.7,
    )
    assert (t.envs, t.rl.decisions, t.rl.minibatch, t.rl.lam) == (40, 500, 50_000, 0.95)
    assert ours.rl != t.rl and ours.policy.logp_reduction == "sum"
    d = recipe("mujoco", "pick_cube", "dppo", "state", "paper")
    assert (
        d.policy.denoise_steps,
        d.policy.finetune_steps,
        d.policy.execute,
        d.rl.clip_base,
        d.rl.clip_coef,
    ) == (20, 10, 4, 0.001, 0.01)
    ours = recipe("mujoco", "pick_cube", "dppo", "state", "full")
    assert (d.policy.std_scale, d.policy.std_floor, ours.policy.std_scale) == (1.0, 0.1, 0.0)
    # theirs are per decision, ours per control step
    assert [x.rl.gamma**x.policy.execute for x in (t, d)] == pytest.approx([0.99, 0.999], abs=5e-5)
    for paper in (t, d):
        import importlib

        from robo_rl.policies import ObsSpec, make_policy

        importlib.import_module(f"robo_rl.algos.{paper.algo}").make(
            make_policy(paper.policy, ObsSpec(state=4, action=3), 0), paper.rl, 0
        )


def best_eval(run: Path) -> dict:
    """The report of the first of a run's checkpoints with the most success, then return, on the starts that
    choose."""
    evals = sorted((json.loads(p.read_text()) for p in (run / "evals").iterdir()), key=lambda e: e["step"])
    chosen = [e for e in evals if e["list"] == 0]
    assert len(chosen) >= 3
    best = max(chosen, key=lambda e: (sum(e["success"]), sum(e["return"])))
    return next(e for e in evals if e["list"] == 1 and e["step"] == best["step"])


# ---- what is not installed, cannot draw, cannot be written


@pytest.mark.parametrize(
    ("argv", "absent", "says"),
    [
        (
            "train --sim maniskill",
            "mani_skill",
            "the maniskill sim needs ManiSkill 3: pip install 'robo_rl[maniskill]'",
        ),
        ("collect --sim maniskill", "mani_skill", "pip install 'robo_rl[maniskill]'"),
        ("train --sim envpool:MetaWorld/Reach-v3", "envpool", "pip install 'robo_rl[envpool]'"),
        ("train --backend ray --workers 1", "ray", "--backend ray needs Ray: pip install 'robo_rl[ray]'"),
        ("train --wandb project", "wandb", "--wandb needs wandb: pip install 'robo_rl[wandb]'"),
        ("train --sim isaaclab --task Isaac-Cartpole-Direct-v0", "isaaclab", "pip install 'isaaclab"),
        ("train --sim isaacgym --task Cartpole", "isaacgym", "use isaaclab or mujoco instead"),
        (
            "train --sim gym:nowhere:Env-v0",
            "nowhere",
            "--sim gym:nowhere:Env-v0: there is no module 'nowhere'",
        ),
    ],
    ids=lambda v: v.split()[2] if v.startswith(("train", "collect")) else "",
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(argv, absent, says, tmp_path):
    assert says in robo_rl(tmp_path, *argv.split(), absent=[absent]).mistake
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.maniskill
@pytest.mark.skipif(importlib.util.find_spec("mani_skill") is None, reason="needs robo_rl[maniskill]")
def test_a_maniskill_task_that_needs_a_download_says_so_and_never_asks(tmp_path):
    said = robo_rl(tmp_path, "train", "--sim", "maniskill", "--task", "PickSingleYCB-v1").mistake
    assert "python -m mani_skill.utils.download_asset PickSingleYCB-v1" in said and "PickCube-v1" in said
    assert not list(tmp_path.iterdir())


NO_GL = {"MUJOCO_GL": "disable"}


def test_images_without_opengl_are_refused_with_what_to_install(tmp_path):
    for command in ("train", "collect"):
        said = robo_rl(tmp_path, command, "--task", "reach", "--obs", "rgb", "--envs", 2, env=NO_GL).mistake
        assert "rgb needs an off-screen OpenGL: apt-get install libegl1 libgl1-mesa-dri" in said


def test_training_on_state_needs_no_opengl_not_even_for_its_video(tmp_path):
    result = robo_rl(tmp_path, "train", *TINY, "--video", "--steps", 0, "--out", "run", env=NO_GL)
    assert result.code == 0 and "no video: rgb needs an off-screen OpenGL" in result.err, result
    result = robo_rl(tmp_path, "eval", "run", "--episodes", 2, "--video", "x.mp4", env=NO_GL)
    assert (
        result.code == 2
        and "robo_rl: rgb needs" in result.err
        and list((tmp_path / "run").glob("eval-*.json"))
    )


def test_a_gym_env_that_cannot_draw_trains_without_a_video_and_its_best_is_by_return(tmp_path):
    result = robo_rl(
        tmp_path,
        "train",
        "--sim",
        "gym:Pendulum-v1",
        "--algo",
        "ppo",
        "--envs",
        4,
        "--steps",
        600,
        "--workers",
        0,
        "--torch-threads",
        1,
        "--out",
        "run",
        "--rl.decisions",
        32,
        "--eval-every",
        128,
        "--eval-episodes",
        2,
        absent=["pygame"],
    )
    assert result.code == 0 and "no video: gym:Pendulum-v1 cannot draw" in result.err, result
    best = best_eval(tmp_path / "run")
    document = json.loads(robo_rl(tmp_path, "eval", "run", "--episodes", 2, "--json").out)
    assert document["step"] == best["step"] and document["return_mean"] == sum(best["return"]) / 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="needs robo_rl[envpool]")
def test_envpool_trains_and_is_evaluated(tmp_path):
    result = robo_rl(
        tmp_path,
        "train",
        "--sim",
        "envpool:MetaWorld/Reach-v3",
        "--algo",
        "ppo",
        "--envs",
        2,
        "--steps",
        20,
        "--rl.decisions",
        10,
        "--max-steps",
        10,
        "--eval-episodes",
        2,
        "--out",
        "run",
    )
    assert result.code == 0 and "no video" in result.err, result


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in robo_rl(tmp_path, "train", *TINY, "--out", "file").mistake
    assert (
        "file is a file; a data set is a folder"
        in robo_rl(tmp_path, "collect", "--task", "reach", "--out", "file").mistake
    )


# ---- data sets


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Path:
    """Five episodes of reach, made in two goes."""
    folder = tmp_path_factory.mktemp("demos")
    first = robo_rl(folder, "collect", "--task", "reach", "--episodes", 3, "--out", "d", "--threads", 1)
    assert first.code == 0 and "3 episodes added (expert succeeded in 3 of 3), 3 in all" in first.out, first
    again = robo_rl(
        folder, "collect", "--task", "reach", "--episodes", 2, "--out", "d", "--seed", 1, "--threads", 1
    )
    assert again.code == 0 and "2 episodes added (expert succeeded in 2 of 2), 5 in all" in again.out, again
    assert (folder / "d").stat().st_mode & 0o777 == 0o700
    return folder / "d"


def test_collect_extends_and_never_repeats_a_start(demos):
    from robo_rl.data.reader import load

    d = load(demos)
    assert len(d) == 5 and len(set(d.start)) == 5 and d.success.all()


def test_collect_extends_only_what_fits(demos, here, capsys):
    shutil.copytree(demos, "d")
    for argv, says in (
        ("--task reach --control joint_delta", "actions have 8 numbers here, 7 there"),
        ("--task pick_cube", "was made otherwise"),
    ):
        with pytest.raises(SystemExit) as e:
            main(["collect", *argv.split(), "--episodes", "1", "--out", "d", "--envs", "1"])
        said = capsys.readouterr().err
        assert e.value.code == 2 and "Traceback" not in said and said.splitlines()[-1].startswith("robo_rl: ")
        assert says in said or "does not fit the data set" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--control", "joint_delta"],
            "33 state and 7 action numbers, the env has 33 and 8; record it with the same",
        ),
        (["--task", "pick_cube"], "33 state and 7 action numbers, the env has 36 and 7"),
        (["--obs", "rgb"], "lacks the camera front, wrist (it has none); record it with --obs rgb"),
    ],
    ids=str,
)
def test_demonstrations_of_another_env_are_refused(options, says, demos, here, capsys):
    if "rgb" in options:
        from sims.mujoco.gl import gl_backend

        if gl_backend() is None:
            pytest.skip("needs an off-screen OpenGL")
    assert says in mistake(capsys, "train", *TINY, "--demos", str(demos), *options)
    assert not list(here.iterdir())


@pytest.mark.parametrize("harm", ["truncate", "delete"])
def test_a_damaged_data_set_is_named_with_its_repair_and_the_repair_helps(harm, demos, here, capsys):
    shutil.copytree(demos, "d")
    path = max(Path("d/data").rglob("*.parquet"))
    os.truncate(path, path.stat().st_size // 2) if harm == "truncate" else path.unlink()
    said = mistake(capsys, "train", *TINY, "--demos", "d")
    assert str(path) in said and ("robo_rl data repair d" in said or "record it again" in said)
    assert [p.name for p in here.iterdir()] == ["d"]


def test_repair_of_a_sound_data_set_keeps_it(demos, here, capsys):
    shutil.copytree(demos, "d")
    with pytest.raises(SystemExit) as e:
        main(["collect", "--repair", "d"])
    assert e.value.code == 0 and "kept 5 episodes, dropped 0; it was sound" in capsys.readouterr().out


@pytest.mark.gl
def test_a_truncated_video_of_demonstrations_is_named_and_so_is_another_image_size(here, capsys):
    from sims.mujoco.gl import gl_backend

    if gl_backend() is None:
        pytest.skip("needs an off-screen OpenGL")
    with pytest.raises(SystemExit) as e:
        main(
            [
                "collect",
                "--task",
                "reach",
                "--obs",
                "rgb",
                "--image-size",
                "32",
                "--episodes",
                "2",
                "--envs",
                "2",
                "--threads",
                "1",
                "--out",
                "d",
            ]
        )
    assert e.value.code == 0, capsys.readouterr()
    capsys.readouterr()
    said = mistake(
        capsys, "train", *TINY, "--obs", "rgb", "--demos", "d", "--envs", "2", "--image-size", "64"
    )
    assert "camera front is 32 x 32, the env's is 64 x 64; set --image-size" in said
    video = min(Path("d/videos").rglob("*.mp4"))
    os.truncate(video, video.stat().st_size // 2)
    said = mistake(
        capsys, "train", *TINY, "--obs", "rgb", "--image-size", "32", "--demos", "d", "--envs", "2"
    )
    assert str(video) in said and "the file is cut short" in said and not Path("runs").exists()


# ---- a run, end to end


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with the finished run `runs/a`."""
    folder = tmp_path_factory.mktemp("cli")
    result = robo_rl(folder, "train", *CUT, "--out", "runs/a")
    assert result.code == 0 and result.err.splitlines()[-1].endswith("Look at it: robo_rl report runs/a"), (
        result
    )
    return folder


def content(folder: Path) -> dict:
    return {
        p.relative_to(folder): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }


def test_a_run_leaves_what_it_promises(runs):
    run = runs / "runs" / "a"
    assert run.stat().st_mode & 0o777 == 0o700  # nobody else's business
    info = json.loads((run / "run.json").read_text())
    assert (
        info["seed"] == 0
        and info["config"]["task"] == "reach"
        and info["versions"]["torch"]
        and "git" in info
    )
    assert {p.name for p in run.iterdir()} >= {
        "run.json",
        "metrics.jsonl",
        "checkpoints",
        "evals",
        "demos",
        "tensorboard",
    }
    assert {"sft.json", "final.json"} <= {p.name for p in (run / "evals").iterdir()}
    assert len(list((run / "tensorboard").glob("events.*"))) == 1


def test_options_beside_resume_are_refused_where_nobody_would_heed_them(runs):
    said = robo_rl(runs, "train", "--resume", "runs/a", "--seed", "7", "--no-video").mistake
    assert "so --seed, --no-video cannot be given beside it; to train the run's policy on" in said
    assert "--init RUN" in said
    said = robo_rl(runs, "wm", "train", "--resume=runs/a", "--fit.updates=7").mistake
    assert "so --fit.updates cannot be given beside it" in said


def test_a_finished_run_says_so_and_stays_as_it_is(runs):
    before = content(runs / "runs" / "a")
    for argv in (["--resume", "auto"], ["--resume", "runs/a"]):
        result = robo_rl(runs, "train", *argv)
        assert result.code == 0 and "this run is finished; nothing to resume" in result.err
        assert result.err.rstrip().endswith("robo_rl train --init runs/a")
    assert content(runs / "runs" / "a") == before
    said = robo_rl(runs, "train", *TINY, "--out", "runs/a").mistake
    assert (
        "runs/a already holds a run; go on with it: robo_rl train --resume runs/a, or choose another --out"
        in said
    )
    assert content(runs / "runs" / "a") == before


@pytest.mark.parametrize(("label", "name"), [("final", "last"), ("sft", "sft")])
def test_evaluating_a_checkpoint_gives_what_training_wrote_down_for_it(label, name, runs):
    """The same starts and noise in a fresh process and env."""
    then = json.loads((runs / "runs" / "a" / "evals" / f"{label}.json").read_text())
    assert 0 < sum(then["success"]) < len(then["success"])  # or equality would say little
    result = robo_rl(runs, "eval", "runs/a", "--checkpoint", name, "--episodes", 24, "--json")
    now = json.loads(Path(runs, json.loads(result.out)["file"]).read_text())
    for key in ("starts", "success", "return", "length", "task", "step"):
        assert now[key] == then[key], key


def test_evaluations_in_two_models_are_two_files(runs):
    run = runs / "runs" / "a"
    names = {
        result_file(Eval(run=str(run), sim=sim), {"checkpoint": "step_0"}).name
        for sim in ("wm:runs/a", "wm:runs/b", "gym:A-v1", "gym:B-v1", "mujoco")
    }
    assert len(names) == 5 and "eval-wm-runs-a-step_0-1-200.json" in names


def test_an_evaluation_twice_gives_the_same_bytes_and_pure_json(runs):
    def once() -> tuple[bytes, dict]:
        result = robo_rl(runs, "eval", "runs/a", "--episodes", 12, "--seed", 3, "--json")
        document = json.loads(result.out)
        return (runs / document["file"]).read_bytes(), document

    (first, document), (second, _) = once(), once()
    assert first == second
    assert document["n"] == 12 and document["low"] <= document["success_rate"] <= document["high"]
    assert document["step"] == best_eval(runs / "runs" / "a")["step"]


def test_two_checkpoints_are_compared_on_the_same_starts(runs):
    argv = ("--checkpoint", "last", "--episodes", 24, "--json")
    same = json.loads(robo_rl(runs, "eval", "runs/a", *argv, "--against", "runs/a").out)
    assert same["against"]["difference"] == 0
    sft = runs / "runs" / "a" / "checkpoints" / "step_000000000000"
    result = robo_rl(runs, "eval", "runs/a", "--checkpoint", "last", "--episodes", 24, "--against", sft)
    assert (
        result.code == 0
        and f"difference to a · {sft.name} (" in result.out
        and "95 % interval [" in result.out
    ), result
    document = json.loads(robo_rl(runs, "eval", "runs/a", *argv, "--against", sft).out)
    a = document["against"]
    assert a["checkpoint"] == sft.name and a["low"] <= a["difference"] <= a["high"]
    assert math.isclose(a["difference"], document["success_rate"] - a["success_rate"], abs_tol=1e-12)


def test_a_checkpoint_that_is_not_there_lists_those_that_are(runs):
    said = robo_rl(runs, "eval", "runs/a", "--checkpoint", "step_1").mistake
    assert "has no checkpoint 'step_1'. Allowed: best, last, sft, step_000000000000" in said
    for command in (("eval", "runs/a/checkpoints/step_1"), ("train", "--init", "runs/a/checkpoints/step_1")):
        assert (
            "runs/a has no checkpoint 'step_1'. Allowed: step_000000000000" in robo_rl(runs, *command).mistake
        )
    assert "Runs nearby, newest first: runs/a" in robo_rl(runs, "eval", "runs/b").mistake
    # before any work
    assert "nowhere does not exist" in robo_rl(runs, "eval", "runs/a", "--against", "nowhere").mistake


def test_a_run_without_a_checkpoint_says_so(runs, tmp_path):
    shutil.copytree(runs / "runs" / "a", tmp_path / "a", ignore=shutil.ignore_patterns("step_*"))
    assert "a has no checkpoint yet" in robo_rl(tmp_path, "eval", "a").mistake


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"control": "joint_delta"},
            "the policy's action size is 7, the env's 8. Use the sim, task, control and obs",
        ),
        ({"task": "pick_cube"}, "the policy's state size is 33, the env's 36"),
        ({"obs": "rgb"}, "the policy's camera views are none, the env's front, wrist"),
        ({"sim": "gym:Pendulum-v1", "task": ""}, "the policy's state size is 33, the env's 3"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_env_is_refused_with_what_differs(change, says, runs, tmp_path):
    shutil.copytree(runs / "runs" / "a", tmp_path / "a")
    info = json.loads((tmp_path / "a" / "run.json").read_text())
    info["config"] |= change
    (tmp_path / "a" / "run.json").write_text(json.dumps(info))
    for argv in (("eval", "a", "--episodes", 2), ("train", "--resume", "a")):
        result = robo_rl(tmp_path, *argv)
        assert result.code == 2 and "Traceback" not in result.err and says in result.err.splitlines()[-1], (
            result
        )
    if "sim" in change:
        said = robo_rl(tmp_path, "eval", runs / "runs" / "a", "--episodes", 2, "--against", "a")
        assert "--against: a is of gym:Pendulum-v1, " in said.mistake and " of mujoco reach; " in said.mistake


def test_report_writes_a_page_and_pure_json(runs):
    result = robo_rl(runs, "report", "runs/a", "--json")
    document = json.loads(result.out)
    assert result.code == 0 and (runs / document["page"]).stat().st_size > 10_000
    assert document["start"]["n"] == document["final"]["n"] == 24 and document["task"] == "reach"
    assert "open runs/a/report.html" in robo_rl(runs, "report", "runs/a").out


def test_demonstrations_from_a_folder_train_too(demos, tmp_path):
    result = robo_rl(tmp_path, "train", *TINY, "--algo", "bc", "--demos", demos, "--out", "run")
    assert result.code == 0 and not (tmp_path / "run" / "demos").exists(), result
    assert robo_rl(tmp_path, "train", "--resume", "run").code == 0


def test_a_run_begins_with_another_runs_policy_whatever_teaches_it_on(runs, demos, tmp_path):
    from robo_rl import checkpoint

    parent, few = (
        runs / "runs" / "a",
        ("--task", "reach", "--envs", 8, "--threads", 1, "--workers", 0, "--eval-episodes", 24, "--no-video"),
    )
    assert robo_rl(tmp_path, "train", *few, "--init", parent, "--steps", 0, "--out", "same").code == 0
    best = checkpoint.best(parent)
    old, new = (
        checkpoint.load_policy(p)[0].state_dict()
        for p in (best, tmp_path / "same" / "checkpoints" / checkpoint.name(0))
    )
    own = "noise.high"  # how much it explored belongs to the run before
    assert old.keys() == new.keys() and all(torch.equal(old[k], new[k]) for k in old if k != own)
    assert not (tmp_path / "same" / "demos").exists()
    there = json.loads(robo_rl(tmp_path, "eval", best, "--episodes", 24, "--json").out)["file"]
    assert (
        json.loads((tmp_path / "same" / "evals" / "sft.json").read_text())["success"]
        == json.loads((tmp_path / there).read_text())["success"]
    )
    # learnt sizes, the method's own exploration: a learned std is a new part of the network
    assert (
        robo_rl(
            tmp_path, "train", *few, "--algo", "reinflow", "--init", parent, "--steps", 0, "--out", "noisy"
        ).code
        == 0
    )
    assert (
        robo_rl(
            tmp_path,
            "train",
            *few,
            "--algo",
            "bc",
            "--init",
            best,
            "--demos",
            demos,
            "--bc.updates",
            3,
            "--out",
            "more",
        ).code
        == 0
    )
    taught = checkpoint.load_policy(tmp_path / "more" / "checkpoints" / checkpoint.name(0))[0].state_dict()
    assert not torch.equal(old["head.out.weight"], taught["head.out.weight"])
    assert torch.equal(old["obs_norm.mean"], taught["obs_norm.mean"])  # weights were learnt in these units


@pytest.mark.parametrize("algo", ["dsrl", "expo", "demo_flow"])
def test_a_small_flow_goes_on_under_a_method_that_acts_around_it_and_back(algo, runs, demos, tmp_path):
    """Its weights are the run's, what acts around it is the method's and fresh."""
    from robo_rl import checkpoint

    few = ("--task", "reach", "--envs", 2, "--threads", 1, "--workers", 0, "--eval-episodes", 4, "--no-video")
    small = ("--rl.batch", 8, "--rl.warmup", 64, "--rl.pretrain", 2, "--rl.utd", 0.2, "--demos", demos)
    made = robo_rl(
        tmp_path,
        "train",
        *few,
        *small,
        *("--algo", algo, "--init", runs / "runs" / "a", "--steps", 128, "--out", "around"),
    )
    assert made.code == 0, made
    flow = checkpoint.load_policy(checkpoint.best(runs / "runs" / "a"))[0]
    first, last = (checkpoint.load_policy(checkpoint.checkpoints(tmp_path / "around")[i])[0] for i in (0, -1))
    assert first.options.kind == ("steered" if algo == "dsrl" else "guided")
    assert (first.options.hidden, first.options.predict) == (flow.options.hidden, flow.options.predict)
    old, new, learnt = (p.state_dict() for p in (flow, first, last))
    assert all(
        torch.equal(v, new[k]) for k, v in old.items() if k.startswith(("head.", "trunk.", "obs_norm"))
    )
    assert not first.steered and last.steered
    assert any(not torch.equal(v, learnt[k]) for k, v in new.items() if k.startswith(("steer.", "judge.")))
    back = robo_rl(tmp_path, "train", *few, "--init", "around", "--steps", 0, "--out", "back")
    assert back.code == 0, back
    again = checkpoint.load_policy(checkpoint.checkpoints(tmp_path / "back")[0])[0]
    best = checkpoint.load_policy(checkpoint.best(tmp_path / "around"))[0].state_dict()
    assert again.options.kind == "flow"
    assert all(torch.equal(v, best[k]) for k, v in again.state_dict().items() if k.startswith("head."))


def test_a_policy_of_another_kind_is_refused_with_the_kinds_that_fit(tmp_path):
    few = ("--task", "reach", "--envs", 2, "--threads", 1, "--workers", 0, "--eval-episodes", 2, "--no-video")
    small = ("--policy.hidden", 16, "--bc.updates", 2, "--demos", 2, "--steps", 0)
    assert robo_rl(tmp_path, "train", *few, *small, "--algo", "demo_sac", "--out", "gaussian").code == 0
    dsrl = ("train", *few, "--init", "gaussian", "--algo", "dsrl", "--out", "more")
    done = robo_rl(tmp_path, *dsrl)
    assert done.code == 2 and "robo_rl: dsrl needs --policy.kind steered" in done.err, done
    assert "got squashed" in done.err
    done = robo_rl(tmp_path, *dsrl, "--policy.kind", "steered")
    assert done.code == 2 and done.err.strip() == (
        "robo_rl: --init gaussian: its policy is of kind squashed, whose weights do not fit --policy.kind "
        "steered: begin with a run whose policy is of kind flow or guided or steered, or choose an --algo "
        "that learns kind squashed"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--init", "nowhere"), "nowhere does not exist"),
        (("--policy.hidden", 24), "its weights do not fit these --policy options (size mismatch"),
        (("--bc.updates", 5), "--bc.updates needs demonstrations to teach from"),
        (("--task", "pick_cube"), "the policy's state size is 33, the env's 36"),
        (("--algo", "demo_sac"), "demo_sac needs --policy.kind squashed with"),
        (("--algo", "ppo"), "ppo needs --policy.kind gaussian, pi0_fast, openvla_oft, got flow"),
    ],
    ids=str,
)
def test_a_policy_that_does_not_fit_is_refused(options, says, runs, here, capsys):
    said = mistake(
        capsys,
        *map(
            str,
            (
                "train",
                "--task",
                "reach",
                "--envs",
                8,
                "--threads",
                1,
                "--init",
                runs / "runs" / "a",
                *options,
            ),
        ),
    )
    assert says in said and not Path("runs").exists()


def test_a_run_without_a_name_is_named_after_what_it_does(tmp_path):
    result = robo_rl(
        tmp_path,
        "train",
        "--task",
        "Hopper-v5",
        "--algo",
        "ppo",
        "--steps",
        0,
        "--envs",
        2,
        "--threads",
        1,
        "--workers",
        0,
        "--no-video",
        "--seed",
        7,
    )
    assert result.code == 0 and next((tmp_path / "runs").iterdir()).name.startswith(
        "mujoco-Hopper-v5-ppo-s7-"
    ), result


def test_version_and_help_go_to_standard_output(capsys):
    from robo_rl import __version__

    for argv, says in (
        (["--version"], __version__),
        ([], "usage: robo_rl COMMAND"),
        (["--help"], "train"),
        (["train", "--help"], "--rl.lr"),
    ):
        with pytest.raises(SystemExit) as e:
            main(argv)
        said = capsys.readouterr()
        assert not e.value.code and says in said.out and not said.err


# ---- help


def every_options_class() -> list[type]:
    import importlib

    from robo_rl.cli import results, vla
    from robo_rl.cli.wm import OPTIONS, SUBCOMMANDS

    own = [
        getattr(importlib.import_module(f"robo_rl.cli.{c.replace('-', '_')}"), name)
        for c, (name, _) in COMMANDS.items()
    ]
    grouped = (k for subs in (SUBCOMMANDS, results.SUBCOMMANDS, vla.SUBCOMMANDS) for k, _ in subs.values())
    found = list(dict.fromkeys([*own, *grouped, *OPTIONS.values(), *RL_OPTIONS.values()]))
    for cls in found:  # it grows: options within options
        found += [
            k for f in dataclasses.fields(cls) if dataclasses.is_dataclass(k := nested(f)) and k not in found
        ]
    return found


def nested(field: dataclasses.Field) -> type | None:
    """The class of the options that an option holds."""
    return None if field.default_factory is dataclasses.MISSING else type(field.default_factory())


@pytest.mark.parametrize("cls", every_options_class(), ids=lambda c: c.__name__)
def test_every_option_says_what_it_means(cls):
    from robo_rl.cli.help import docs

    texts = docs(cls)
    silent = [
        f.name
        for f in dataclasses.fields(cls)
        if not texts.get(f.name) and not dataclasses.is_dataclass(nested(f))
    ]
    assert not silent, f"{cls.__name__}: no text below {', '.join(silent)}"


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "eval",
        "collect",
        "correct",
        "deploy",
        "console",
        "serve",
        "sim-arm",
        "wm train",
        "wm train --kind video",
        "wm eval",
        "wm judge",
        "wm tune",
    ],
)
def test_a_command_of_many_options_groups_all_of_them(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert not {"Options", "Other options"} & {*lines} and max(map(len, lines)) <= 120
    assert len([line for line in lines if line and line[0].isupper()]) >= 3


@pytest.mark.parametrize(
    "cls", [c for c in every_options_class() if hasattr(c, "GROUPS")], ids=lambda c: c.__name__
)
def test_an_option_stands_in_one_group(cls):
    named = [name for names in cls.GROUPS.values() for name in names]
    assert len(named) == len({*named})
    known = {f.name for c in [cls, *cls.__subclasses__()] for f in dataclasses.fields(c)}
    assert not {*named} - known, "no such options"


def test_help_shows_group_text_range_and_default_of_an_option(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--task", "reach", "--preset", "quick", "--help"])
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  --patience"))
    text = " ".join(line.strip() for line in lines[at : at + 4])
    assert "[0, 1e+06]; default 2)" in text and "Evaluations that must follow" in text
    assert (
        lines.index("What is learnt")
        < lines.index("Evaluation, and when to stop")
        < at
        < lines.index("Processes")
    )
    steps = next(line for line in lines if line.startswith("  --steps"))
    # the recipe's, for what was said before
    assert "default 400000" in " ".join(lines[lines.index(steps) : lines.index(steps) + 2])
    assert max(map(len, lines)) <= 120
    assert "Other options" not in lines  # every option of training belongs to a group


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["teleop"], "there is no command 'teleop'; here it is robo_rl robot teleop"),
        (["lerobot-record", "--robot.type=so101"], "here it is robo_rl collect --operator gamepad"),
        (
            ["train", "--algo", "hil_serl", "--rl.discount", "0.97"],
            "no option --rl.discount; here it is --rl.gamma",
        ),
        (["train", "--algo", "hil_serl", "--cta-ratio", "2"], "here it is --rl.utd"),
        (["train", "--max_head_offpolicyness", "4"], "here it is --max-staleness"),
        (["train", "--async"], "here it is --max-staleness"),
        (
            ["train", "--rl.operator", "gamepad"],
            "this method has no option --rl.operator; --algo rlpd, demo_sac, hil_serl",
        ),
    ],
)
def test_what_other_projects_type_is_told_its_name_here(argv, words):
    with pytest.raises(UserError, match=re.escape(words)):
        parse_arguments(argv)


def test_commands_of_other_projects_are_told_with_commands_that_exist():
    for theirs, ours in elsewhere.COMMANDS.items():
        assert theirs not in COMMANDS
        assert {part.split()[0] for part in ours.split("robo_rl ")} <= {*COMMANDS}, theirs


def test_what_other_projects_call_an_option_is_told_with_options_that_exist():
    options = {"--policy"}
    for algo in ("pi_rl", "hil_serl"):
        made = parse(["--algo", algo])
        options |= {
            *option_names(Train, Train(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)}))
        }
    for theirs, ours in other_names.NAMES.items():
        assert f"--{theirs.replace('_', '-')}" not in options, theirs
        for option in re.findall(r"--[a-z][\w.-]*\w", ours):
            assert option.replace("--no-", "--") in options, (theirs, option)


def test_of_an_option_that_is_given_twice_the_last_one_chooses_the_recipe_too():
    run = ["--sim", "gym:Pendulum-v1", "--algo", "demo_sac"]
    assert parse([*run, "--demos", "2", "--demos", "0"]) == parse([*run, "--demos", "0"])
    assert parse([*run, "--demos=0", "--demos=2"]).reward == "sparse" != parse([*run, "--demos", "0"]).reward


def test_of_a_kind_of_world_model_that_is_given_twice_the_last_one_counts():
    from robo_rl.cli import wm

    made = wm.parse(["train", "data", "--kind=video", "--kind", "encoded"])
    assert made == wm.parse(["train", "data", "--kind", "encoded"]) and made.kind == "encoded"


@pytest.mark.parametrize(
    "typed, cut, learn",
    [
        ([], None, None),
        (["--cut"], True, None),
        (["--no-cut", "--learn-from-successes", "--seed", "3"], False, True),
        (["--cut", "False", "--learn-from-successes", "True"], False, True),
    ],
)
def test_an_option_that_is_on_off_or_left_to_the_protocol_is_a_flag_as_its_help_says(typed, cut, learn):
    options = parse_arguments(["correct", "runs/a", *typed])[1]
    assert (options.cut, options.learn_from_successes) == (cut, learn)


@pytest.mark.parametrize("argv", [["results", "page"], ["doctor"], ["train"]])
def test_a_command_without_options_is_one(argv):
    assert parse_arguments(argv)


def test_one_of_a_kind_is_told_in_the_singular():
    assert [plural(n, "chunk") for n in (0, 1, 2)] == ["0 chunks", "1 chunk", "2 chunks"]
