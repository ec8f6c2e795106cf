"""Learning on the arm: `--sim arm` in lockstep, `--sim dds` over the wire in real time."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import HANGS, TINY, TINY_REPLAY, Command, dds_domain, robo_rl

from robo_rl.data.reader import load
from robo_rl.errors import UserError
from robo_rl.experiment import envs
from robo_rl.experiment.recipes import recipe
from robo_rl.experiment.scenes import untold
from sims.check import check_env
from sims.mujoco.tasks import TASKS

REPLAY = [
    w
    for i in range(0, len(TINY_REPLAY) - 1, 2)
    for w in TINY_REPLAY[i : i + 2]
    if TINY_REPLAY[i] not in ("--task", "--envs", "--no-video", "--workers", "--threads")
]


@pytest.mark.parametrize(
    "task",
    [
        "reach",
        "push_cube",
        "stack_cube",
        "peg_insert",
        "pick_by_name",
        "stack_place",
        "reach_around",
        "pick_either",
    ],
)
def test_the_arm_begins_every_task_as_the_simulator_does_and_its_expert_ends_it(task):
    arm, direct = (envs.make(sim, task, 2) for sim in ("arm", "mujoco"))
    assert arm.spec.state_names == direct.spec.state_names
    a, b = (e.reset(options={"starts": np.array([3, 8])})[0] for e in (arm, direct))
    assert a["state"] == pytest.approx(b["state"], abs=3e-3) and (a["task"] == b["task"]).all()
    for _ in range(arm.spec.max_steps):
        *_, terminated, truncated, info = arm.step(arm.expert_action())
        if (terminated | truncated).all():
            break
    assert info["success"].all()
    arm.close(), direct.close()


def test_a_mark_is_known_by_its_name_wherever_its_xml_has_that():
    push = TASKS["push_cube"]
    turned = push.xml.replace(
        '<body name="goal" mocap="true" pos="0.5 0 0.2">', "<body pos='0.5 0 0.2' mocap='true' name='goal'>"
    )
    assert turned != push.xml and not untold(replace(push, xml=turned))
    assert "another name than goal" in untold(
        replace(push, xml=push.xml.replace('name="goal"', 'name="target"'))
    )


def test_what_ends_a_task_without_success_ends_it_on_the_arm():
    env = envs.make("arm", "pick_by_name", 1)
    first = next(
        k
        for k in range(50)
        if env.reset(options={"starts": np.array([k])})[0]["task"] != env.task.instructions[0]
    )
    env.asked[:] = 0  # the expert is told another colour than the one that is judged
    wrong = env.task.instructions.index(str(env.reset(options={"starts": np.array([first])})[0]["task"][0]))
    for _ in range(env.spec.max_steps):
        env.asked[:] = wrong
        action = env.expert_action()
        env.asked[:] = 0
        *_, terminated, _, info = env.step(action)
        if terminated.all():
            break
    assert terminated.all() and not info["success"].any()
    env.close()


def test_the_expert_picks_the_cube_up_from_what_the_arm_s_topics_tell():
    env = envs.make("arm", "pick_cube", 4)
    env.reset(seed=3)
    for _ in range(env.spec.max_steps):
        *_, terminated, truncated, info = env.step(env.expert_action())
        if (terminated | truncated).all():
            break
    assert info["success"].all()
    again = env.recovery_action()
    assert again.shape == (4, 7) and (again[:, 6] < 0).all()  # it backs out with what it holds
    env.close()


@pytest.mark.parametrize(
    ("sim", "more", "says"),
    [
        ("arm:speed=3", {}, "speed must be in"),
        ("arm:speed=fast", {}, "a number of m/s"),
        ("arm:domain=3", {}, "Allowed: controller, speed"),
        ("dds:domain=500", {}, "domain must be in"),
        ("dds", {"num_envs": 2}, "--sim dds is one arm"),
        ("arm", {"obs": "depth"}, "--obs state or rgb"),
        ("dds:domain=231", {"obs": "rgb"}, "--cameras front wrist --image-size 64"),
        (
            "arm",
            {"task": "open_drawer"},
            "not drawer, which the state of open_drawer has. Allowed: pick_cube, re",
        ),
        ("arm", {"num_envs": 65}, "at most 64"),
        ("arm:controller=loose", {}, "unknown --sim arm: controller 'loose'"),
    ],
)
def test_what_an_arm_cannot_do_is_one_line(sim, more, says):
    if sim == "dds:domain=231":
        pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
        pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    with pytest.raises(UserError, match=says):
        envs.make(sim, more.pop("task", ""), more.pop("num_envs", 1), **more)


@pytest.mark.parametrize("task", ["pick_cube", "push_cube"])
def test_the_arm_s_cameras_show_what_the_simulator_s_show(task):
    arm, direct = (envs.make(sim, task, 2, obs="rgb") for sim in ("arm", "mujoco"))
    assert arm.spec.state_names == direct.spec.state_names and arm.spec.views == direct.spec.views
    options = {"starts": np.array([3, 7])}
    a, b = (e.reset(options=options)[0] for e in (arm, direct))
    for view in arm.spec.views:  # edges of what lies a micrometre elsewhere
        assert (a[f"image/{view}"] != b[f"image/{view}"]).sum() <= (0 if task == "pick_cube" else 6)
    assert a["state"] == pytest.approx(b["state"], abs=3e-3)
    arm.images = False
    left = np.array([[0, 1.0, 0, 0, 0, 0, 1.0]] * 2, np.float32)
    for _ in range(3):
        seen = arm.step(left)[0]
        assert all(np.array_equal(seen[f"image/{v}"], a[f"image/{v}"]) for v in arm.spec.views)
    arm.images = True
    seen = arm.step(left)[0]
    assert not any(np.array_equal(seen[f"image/{v}"], a[f"image/{v}"]) for v in arm.spec.views)
    arm.close(), direct.close()


@pytest.mark.slow
def test_the_arm_with_cameras_keeps_the_contract():
    check_env(lambda n: envs.make("arm", "pick_cube", n, obs="rgb", image_size=32, max_steps=10), num_envs=3)


@pytest.mark.slow
def test_a_policy_learns_from_the_arm_s_cameras_and_is_judged_by_them(tmp_path):
    done = robo_rl(
        tmp_path,
        "train",
        "--sim",
        "arm",
        "--obs",
        "rgb",
        "--algo",
        "hil_serl",
        *REPLAY,
        "--image-size",
        32,
        "--envs",
        1,
        "--steps",
        96,
        "--rl.warmup",
        32,
        "--policy.width",
        32,
        "--policy.depth",
        1,
        "--eval-episodes",
        2,
        "--no-video",
        "--rl.operator",
        "scripted",
        "--out",
        "run",
    )
    assert done.code == 0 and "nothing was learnt" not in done.err, done
    done = robo_rl(tmp_path, "eval", "run", "--on", "arm", "--episodes", 2, "--envs", 2, "--json")
    assert done.code == 0 and json.loads(done.out)["sim"] == "arm:pick_cube", done


def test_an_arm_behind_dds_is_seen_through_its_cameras(tmp_path):
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    domain = dds_domain()
    arm = Command(
        tmp_path,
        ["sim-arm", "--domain", domain, "--speed", "1.5", "--cameras", "front", "wrist", "--image-size", 32],
    )
    arm.until(lambda: arm.out.exists() and "on the wire" in arm.out.read_text())
    env, direct = (
        envs.make(f"dds:domain={domain}", obs="rgb", image_size=32),
        envs.make("mujoco", "pick_cube", 1, obs="rgb", image_size=32),
    )
    env.bodies[0].wait = HANGS  # pictures are drawn as fast as this machine draws
    for start in (3, 7):  # the second one's pictures are not the first one's
        options = {"starts": np.array([start])}
        a, b = (e.reset(options=options)[0] for e in (env, direct))
        for v in env.spec.views:
            assert np.abs(a[f"image/{v}"].astype(int) - b[f"image/{v}"]).mean() < 1.0
    for _ in range(40):
        *_, info = env.step(env.expert_action())
    env.close(), direct.close()
    arm.signal(signal.SIGINT)
    assert arm.wait().code == 0


def test_presets_of_an_arm_fit_one_arm_that_does_not_wait():
    live = recipe("dds:domain=3", "", "hil_serl", "state", "full")
    assert (live.envs, live.workers) == (1, 1) and live.rl.warmup < live.steps
    assert recipe("arm", "", "pi_rl", "state", "full").workers == 0


@pytest.mark.slow
def test_methods_of_both_kinds_learn_on_arms_in_lockstep(tmp_path):
    on_policy = [
        w
        for i in range(0, len(TINY) - 1, 2)
        for w in TINY[i : i + 2]
        if TINY[i] in ("--policy.hidden", "--bc.updates", "--bc.batch", "--eval-episodes", "--demos")
    ]
    done = robo_rl(
        tmp_path,
        "train",
        "--sim",
        "arm",
        *on_policy,
        "--envs",
        2,
        "--steps",
        64,
        "--rl.decisions",
        2,
        "--rl.minibatch",
        4,
        "--eval-every",
        64,
        "--no-video",
        "--out",
        "on",
    )
    assert done.code == 0, done
    done = robo_rl(
        tmp_path,
        "train",
        "--sim",
        "arm",
        "--algo",
        "hil_serl",
        *REPLAY,
        "--envs",
        2,
        "--steps",
        256,
        "--eval-every",
        128,
        "--no-video",
        "--rl.operator",
        "scripted",
        "--out",
        "off",
    )
    assert done.code == 0 and "operator min" in done.err, done
    assert json.loads((tmp_path / "off" / "run.json").read_text())["config"]["workers"] == 1
    # on the arm; --sim mujoco: in its twin
    assert robo_rl(tmp_path, "eval", "off", "--episodes", 2, "--envs", 2).code == 0
    assert robo_rl(tmp_path, "collect", "--sim", "arm", "--episodes", 1, "--out", "data").code == 0
    assert load(tmp_path / "data").success.all()


@pytest.mark.slow
def test_an_arm_behind_dds_is_learnt_on_in_real_time(tmp_path):
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    domain = dds_domain()
    where = f"dds:domain={domain}"
    done = robo_rl(tmp_path, "train", "--sim", where, "--algo", "demo_sac", "--out", "none")
    assert "start one with robo_rl sim-arm --speed 1.5" in done.mistake and not (tmp_path / "none").exists()
    arm = Command(tmp_path, ["sim-arm", "--domain", domain, "--speed", "1.5", "--seconds", "200"])
    arm.until(lambda: arm.out.exists() and "on the wire" in arm.out.read_text())
    done = robo_rl(
        tmp_path,
        "train",
        "--sim",
        where,
        "--algo",
        "demo_sac",
        *REPLAY,
        "--steps",
        "192",
        "--eval-episodes",
        "2",
        "--no-video",
        "--out",
        "run",
    )
    assert done.code == 0, done
    rows = [json.loads(line) for line in Path(tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [r["rate/steps_per_s"] for r in rows if "rate/steps_per_s" in r]
    assert rows[-1]["step"] >= 192 and np.median(rates) < 60  # no faster than its clock of 50 Hz
    arm.signal(signal.SIGINT)
    assert arm.wait().code == 0
