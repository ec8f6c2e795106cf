"""ManiSkill as a vector env. Tests that start simulators carry the mark `maniskill` and need
robo_rl[maniskill]."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import sims
from robo_rl.errors import LostDaemon, MissingDependency, UserError
from sims.check import check_env
from sims.maniskill import EXPERT_TASKS, TASKS, expert, make_maniskill, vulkan_problem, wire
from sims.maniskill.tasks import NEEDS_DOWNLOAD, NEEDS_RENDERER, instruction, split_task

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = importlib.util.find_spec("mani_skill") is not None
CUDA = INSTALLED and "torch" in sys.modules and __import__("torch").cuda.is_available()


def simulates(test):
    test = pytest.mark.skipif(not INSTALLED, reason="ManiSkill is absent: pip install 'robo_rl[maniskill]'")(
        test
    )
    return pytest.mark.maniskill(test)


@pytest.fixture(scope="module")
def pick():
    """PickCube, 4 envs in 2 workers, shared by the tests that leave it as they found it: usable after a
    reset."""
    env = make_maniskill(num_envs=4, threads=2)
    yield env
    env.close()


def episode(env, starts, actions=None):
    """States [T+1, N, S], actions [T, N, A] of the expert's (or a repeated) episode, and the last success."""
    states, acted = [env.reset(options={"starts": np.asarray(starts)})[0]["state"]], []
    for t in range(env.spec.max_steps if actions is None else len(actions)):
        acted.append(env.expert_action() if actions is None else actions[t])
        obs, _, terminated, truncated, info = env.step(acted[-1])
        states.append(obs["state"])
        if actions is None and (terminated | truncated).all():
            break
    return np.array(states), np.array(acted), info["success"]


# ---------------------------------------------------------------- without a simulator


def test_a_wrong_task_name_lists_the_nearest_first():
    for wrong in ("PickCub-v1", "PickCube", "pickcube-v1"):
        with pytest.raises(UserError, match=r"did you mean 'PickCube-v1'\? Nearest: PickCube-v1, "):
            make_maniskill(wrong)
    with pytest.raises(UserError, match="did you mean 'AnymalC-Reach-v1'.*MODULE:ID"):
        sims.check_names("maniskill", "AnymalC-Reach")


def test_arguments_follow_the_task_and_what_is_an_option_is_told_by_its_name():
    task = (
        'my.tasks:Pour-v2,robot_uids=("panda","fetch"),sim_config={"sim_freq":200,"control_freq":10},side=2'
    )
    sims.check_names("maniskill", task)
    module, id, arguments = split_task(task)
    assert (module, id) == ("my.tasks", "Pour-v2") and instruction(task) == "pour"
    assert arguments == {
        "robot_uids": ("panda", "fetch"),
        "sim_config": {"sim_freq": 200, "control_freq": 10},
        "side": 2,
    }
    with pytest.raises(UserError, match="control_mode is set by --control"):
        sims.check_names("maniskill", "PickCube-v1,control_mode=pd_joint_pos")
    with pytest.raises(UserError, match="only --sim mujoco plays several tasks"):
        sims.check_names("maniskill", "PickCube-v1,PushCube-v1")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"randomise": "mass"}, "no randomise options"),
        ({"threads": -1}, "threads must be >= 0"),
        ({"max_steps": -1}, "max_steps must be >= 0"),
        ({"device": "tpu"}, "device must be cpu, cuda or cuda:N"),
    ],
)
def test_a_wrong_argument_says_what_is_allowed(wrong, message):
    with pytest.raises(UserError, match=message):
        make_maniskill(**wrong)


def test_without_maniskill_the_error_is_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    with pytest.raises(MissingDependency, match=r"pip install 'robo_rl\[maniskill\]'"):
        sims.make("maniskill", "PickCube-v1")


def test_the_task_lists_do_not_overlap_and_the_default_has_an_expert():
    assert TASKS[0] == "PickCube-v1" and set(EXPERT_TASKS) == set(expert.EXPERTS) <= set(TASKS)
    assert len(TASKS) == len(set(TASKS)) == 45 and not set(TASKS) & set(NEEDS_DOWNLOAD)


def test_every_task_has_an_instruction_in_words():
    assert instruction("RotateValveLevel3-v1") == "rotate valve level 3"
    for task in TASKS:
        assert instruction(task) and "-v1" not in instruction(task)


def test_a_rotation_vector_turns_back_into_itself():
    rng = np.random.default_rng(0)
    for v in rng.normal(size=(50, 3)):
        v *= rng.uniform(0, 3.1) / np.linalg.norm(v)
        r = expert._turned(v)
        assert np.allclose(r @ r.T, np.eye(3)) and np.allclose(expert.rotvec(r), v, atol=1e-7)


def test_shared_arrays_do_not_overlap_and_both_maps_see_the_same_memory():
    info = {
        "axes": [0] * 3,
        "image_size": 4,
        "max_steps": 5,
        "state_names": ["a"] * 7,
        "views": ["top"],
        "frame": [2, 2],
    }
    layout, fd = wire.arrays(info, 3), os.memfd_create("test")
    mine, theirs = wire.map_memory(fd, layout, create=True), wire.map_memory(fd, layout)
    for k, name in enumerate(mine):
        mine[name][:] = k + 1
    for k, name in enumerate(mine):
        assert (theirs[name] == k + 1).all() and theirs[name].shape == layout[name][1]
    os.close(fd)


# ---------------------------------------------------------------- PickCube, one env for all


@simulates
def test_the_expert_solves_pick_cube_and_success_pays_once_and_ends_the_episode(pick):
    pick.reset(options={"starts": np.arange(4)})
    total = np.zeros(4)
    for _ in range(pick.spec.max_steps):
        _, reward, terminated, truncated, info = pick.step(pick.expert_action())
        total += reward
    assert info["success"].all() and terminated.all() and not truncated.any()
    assert (total == 1).all()


@simulates
def test_an_episode_with_a_grasp_is_the_same_bit_for_bit_in_another_env_after_another_history(pick):
    starts = np.array([3, 8, 21, 40])
    states, actions, _ = episode(pick, starts)
    for shift in (1, 2):
        again, _, _ = episode(pick, np.roll(starts, shift), np.roll(actions, shift, axis=1))
        assert np.array_equal(again, np.roll(states, shift, axis=1))


@simulates
def test_a_snapshot_taken_with_the_cube_in_the_hand_continues_exactly(pick):
    starts = np.array([5, 6, 7, 8])
    states, actions, _ = episode(pick, starts)
    pick.reset(options={"starts": starts})
    for a in actions[:18]:
        pick.step(a)
    state = pick.get_state()
    episode(pick, starts + 100)
    pick.set_state(state)
    assert np.array_equal(np.array([pick.step(a)[0]["state"] for a in actions[18:]]), states[19:])


@simulates
def test_a_snapshot_of_another_shape_is_refused(pick):
    pick.reset(seed=0)
    state = pick.get_state()
    with pytest.raises(UserError, match="state\\['history'\\] must have shape"):
        pick.set_state(state | {"history": state["history"][:, :3]})


@simulates
def test_the_spec_says_what_every_action_and_state_number_means(pick):
    spec = pick.spec
    assert spec.period == 0.05 and spec.max_steps == 50 and len(spec.state_names) == 42
    assert [a.unit for a in spec.axes] == ["rad"] * 7 + ["m"]
    assert np.allclose([(a.low, a.high) for a in spec.axes], [(-0.1, 0.1)] * 7 + [(-0.01, 0.04)])
    obs, _ = pick.reset(seed=0)
    named = dict(zip(spec.state_names, obs["state"].T, strict=True))
    assert np.allclose(named["tcp_to_obj_pos[2]"], named["obj_pose[2]"] - named["tcp_pose[2]"], atol=1e-6)


@simulates
def test_a_joint_command_moves_that_joint_the_way_the_spec_says(pick):
    for joint in range(7):
        before = pick.reset(options={"starts": np.arange(4)})[0]["state"][:, :7]
        act = np.zeros((4, 8), np.float32)
        act[:, joint], act[:, 7] = (1, -1, 1, -1), 1
        for _ in range(3):
            after = pick.step(act)[0]["state"][:, :7]
        assert (np.sign((after - before)[:, joint]) == act[:, joint]).all()


@simulates
def test_starts_beyond_maniskills_seeds_are_refused(pick):
    with pytest.raises(UserError, match="starts must be < 2\\^32"):
        pick.reset(options={"starts": np.full(4, 2**32)})


# ---------------------------------------------------------------- faults


@simulates
def test_a_killed_worker_is_an_error_that_names_it_not_a_hang():
    env = make_maniskill(num_envs=2, threads=2, max_steps=5)
    env.reset(seed=0)
    os.kill(env.workers.process.pid, signal.SIGKILL)
    with pytest.raises(LostDaemon, match=r"worker 1 of 2: was killed \(SIGKILL\); where memory is short"):
        env.step(np.zeros((2, 8), np.float32))
    with pytest.raises(RuntimeError, match="worker 1 of 2"):
        env.step(np.zeros((2, 8), np.float32))
    env.close()


@simulates
@pytest.mark.slow
def test_an_exception_in_a_worker_arrives_with_its_traceback():
    env = make_maniskill(num_envs=2, threads=2, max_steps=5)
    env.reset(seed=0)
    env.shared["starts"][1] = -1  # no seed of a random generator
    env.shared["mask"][:] = True
    with pytest.raises(RuntimeError, match=r"(?s)worker 2 of 2: Traceback.*ValueError"):
        env.workers.ask(wire.RESET)
    env.close()


@simulates
@pytest.mark.slow
def test_a_stopped_worker_runs_into_the_deadline():
    env = make_maniskill(num_envs=2, threads=2, max_steps=5)
    env.reset(seed=0)
    os.kill(env.workers.process.pid, signal.SIGSTOP)
    with pytest.raises(LostDaemon, match="gave no answer within 1 s"):
        env.workers.ask(wire.STEP, deadline=1.0)
    env.close()


@simulates
@pytest.mark.slow
def test_workers_end_when_the_process_that_made_the_env_is_killed():
    code = (
        "import os, signal, sims; env = sims.make('maniskill', 'PickCube-v1', 2, threads=2); "
        "print(env.workers.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    group = int(done.stdout)
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("workers still live 10 s after their env's process was killed")


@simulates
@pytest.mark.slow
def test_a_task_that_needs_a_download_says_so_and_asks_nothing():
    with pytest.raises(UserError, match=r"download_asset PickSingleYCB-v1`, or take a task that needs none"):
        make_maniskill("PickSingleYCB-v1")
    with pytest.raises(UserError, match=r"download_asset xarm6_robotiq`"):  # of the robot, not the task
        make_maniskill("PickCube-v1,robot_uids=xarm6_robotiq")


@simulates
@pytest.mark.slow
@pytest.mark.parametrize(
    "task, wrong, message",
    [
        (
            "PickCubeSO100-v1",
            {"control": "ee_delta"},
            "of PickCubeSO100-v1 'ee_delta'.*Allowed: joint_delta, pd_",
        ),
        ("StackPyramid-v1", {"reward": "dense"}, "has no dense reward. Allowed: sparse"),
        ("MS-CartpoleBalance-v1", {"reward": "sparse"}, "says nothing of success .* leave --reward out"),
        ("PickCube-v1,robot_uids=nobody", {}, "robot_uids=nobody cannot be made: .*nobody not found"),
        ("PickCube-v1,colour=red", {}, "unexpected keyword argument 'colour'$"),
    ],
)
def test_what_a_task_cannot_do_is_refused(task, wrong, message):
    with pytest.raises(UserError, match=message):
        make_maniskill(task, **wrong)


@simulates
@pytest.mark.slow
def test_images_without_vulkan_are_refused_with_the_remedy():
    if not vulkan_problem():
        pytest.skip("Vulkan works here")
    with pytest.raises(UserError, match="Install Mesa >= 25"):
        make_maniskill(obs="rgb")


# ---------------------------------------------------------------- contract, all kinds of task


@simulates
@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        "PickCube-v1",
        "PegInsertionSide-v1",
        "TwoRobotPickCube-v1",
        "MS-AntWalk-v1",
        "RotateValveLevel2-v1",
        "UnitreeG1Stand-v1",
    ],
)
def test_the_contract_holds_bit_for_bit(task):
    parts = check_env(lambda n: make_maniskill(task, num_envs=n, max_steps=12, threads=2), num_envs=3)
    assert {"starts", "frozen", "snapshot"} <= set(parts) and ("expert" in parts) == (task in EXPERT_TASKS)


@simulates
@pytest.mark.slow
def test_the_contract_holds_with_images():
    if vulkan_problem():
        pytest.skip(f"no usable Vulkan: {vulkan_problem()}")
    parts = check_env(
        lambda n: make_maniskill(num_envs=n, max_steps=4, threads=2, obs="rgb", image_size=32, render=True),
        num_envs=3,
    )
    assert "render" in parts


OWN = """
import torch
from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv
from mani_skill.utils.registration import register_env


@register_env("Push-v0", max_episode_steps=7)
class Push(PushCubeEnv):
    def __init__(self, *args, far=0.0, **kwargs):
        self.far = far
        super().__init__(*args, **kwargs)

    def evaluate(self):
        return {"success": self.obj.pose.p[:, 0] > self.far}

    def compute_normalized_dense_reward(self, obs, action, info):
        raise NotImplementedError

    def compute_dense_reward(self, obs, action, info):
        return self.obj.pose.p[:, 0] + 10


@register_env("PushOn-v0", max_episode_steps=7)
class PushOn(Push):
    def evaluate(self):
        if self.elapsed_steps > 1:
            raise ValueError("no more of this")
        return {"far": self.obj.pose.p[:, 0]}
"""


@simulates
@pytest.mark.slow
def test_a_task_of_ones_own_is_named_after_its_module_and_takes_arguments(tmp_path, monkeypatch):
    (tmp_path / "shove.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    env = make_maniskill("shove:Push-v0,far=-9.0", num_envs=2, threads=1)
    assert env.spec.task == "shove:Push-v0,far=-9.0" and env.spec.max_steps == 7
    obs, _ = env.reset(seed=0)
    _, reward, terminated, _, info = env.step(np.zeros((2, 8), np.float32))
    assert info["success"].all() and terminated.all() and (reward == 1).all() and obs["task"][0] == "push"
    assert not hasattr(env, "expert_action")
    env.close()
    env = make_maniskill("shove:Push-v0,far=9.0", reward="dense")
    env.reset(seed=0)
    assert 9 < env.step(np.zeros((1, 8), np.float32))[1][0] < 11  # its own, for it does not scale it
    env.close()
    env = make_maniskill("shove:PushOn-v0")  # knows no success: dense is the default
    env.reset(seed=0)
    assert not env.reports_success and 9 < env.step(np.zeros((1, 8), np.float32))[1][0] < 11
    with pytest.raises(
        UserError, match=r"shove:PushOn-v0: ValueError: no more of this \(.*shove.py, line 27\)"
    ):
        env.step(np.zeros((1, 8), np.float32))
    with pytest.raises(UserError, match="shove registers no 'Pull-v0' .* It registers Push-v0, PushOn-v0"):
        make_maniskill("shove:Pull-v0")
    with pytest.raises(UserError, match="there is no module 'shov'"):
        make_maniskill("shov:Push-v0")


# The same actions through bare ManiSkill (first episode of a new env) and through ours (second episode): one
# process each, since ours replaces primitives in its process. argv: raw|ours, output, tasks, controls.
COMPARE = """
import os, sys
import numpy as np, torch
from sims.maniskill import _config, wire, worker
from sims.maniskill.build import action_map, action_split, build, describe, split_action
kind, path, tasks, controls = sys.argv[1], sys.argv[2], sys.argv[3].split(" "), sys.argv[4].split(" ")
worker._import(_config("PickCube-v1", 1, "state", "", "", 64, 40, False) | {"raw": kind == "raw"})
out = {}
for task in tasks:
    for control in controls:
        try:
            config = _config(task, 1, "state", "dense", control, 64, 40, False)
            env = build(config)
        except ValueError:
            config = _config(task, 1, "state", "", control, 64, 40, False)  # success, or none
            env = build(config)
        info = describe(env, config)
        actions = np.random.default_rng(0).uniform(-1, 1, (40, len(info["axes"]))).astype(np.float32)
        rows = []
        if kind == "raw":
            middle, half = action_map(env)
            first, _ = env.reset(seed=3)
            rows.append(first.numpy()[0])
            for a in actions:
                a = split_action(torch.from_numpy((middle + half * a)[None]), action_split(env))
                obs, reward, _, _, i = env.step(a)
                reward = reward if config["reward"] == "dense" else i.get("success", torch.zeros(1))
                rows += [obs.numpy()[0], np.float32([float(reward[0])])]
        else:
            shared = wire.map_memory(os.memfd_create("x"), wire.arrays(info, 1), create=True)
            sim = worker._Sim(env, config, 0)
            for start in (4, 3):
                shared["starts"][0], rows = start, []
                sim.reset(shared)
                rows.append(shared["state"][0].copy())
                for a in actions:
                    sim.step(shared, a)
                    rows += [shared["state"][0].copy(), shared["reward"][:1].copy()]
        out[f"{task} {control}"] = np.concatenate(rows)
        env.close()
np.savez(path, **out)
"""


def compare(tmp_path, tasks, controls) -> dict[str, float]:
    """Largest difference per task and control between bare ManiSkill and ours."""
    got = {}
    for kind in ("raw", "ours"):
        path = tmp_path / f"{kind}.npz"
        subprocess.run(
            [sys.executable, "-c", COMPARE, kind, path, " ".join(tasks), " ".join(controls)],
            cwd=ROOT,
            check=True,
            capture_output=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        got[kind] = dict(np.load(path))
    assert got["raw"].keys() == got["ours"].keys()
    return {k: float(np.abs(x - got["ours"][k]).max()) for k, x in got["raw"].items()}


@simulates
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_our_cheaper_step_gives_the_numbers_of_maniskills_own_for_every_task(tmp_path):
    differ = compare(tmp_path, [t for t in TASKS if t not in NEEDS_RENDERER], ["joint_delta"])
    assert len(differ) == 44
    assert all(x == 0 for k, x in differ.items() if not k.startswith("RotateValve")), differ
    assert max(differ.values()) < 1e-7, differ  # the valve's reward: one rounding of a strided sum


@simulates
@pytest.mark.slow
def test_our_cheaper_step_gives_the_numbers_of_maniskills_own_with_hand_control(tmp_path):
    assert set(compare(tmp_path, EXPERT_TASKS, ["ee_delta"]).values()) == {0.0}


@simulates
@pytest.mark.slow
def test_our_cheaper_step_gives_the_numbers_of_maniskills_own_in_any_control_mode(tmp_path):
    tasks = ["PickCube-v1", "StackCube-v1,robot_uids=panda_wristcam", "PegInsertionSide-v1"]
    modes = (
        "joint_pos joint_vel joint_pos_vel joint_target_delta_pos ee_delta_pos ee_pose ee_target_delta_pose"
    )
    differ = compare(tmp_path, tasks, [f"pd_{mode}" for mode in modes.split()])
    assert len(differ) == 21 and set(differ.values()) == {0.0}, differ


@simulates
@pytest.mark.slow
def test_hand_control_moves_and_turns_the_hand_the_way_the_spec_says():
    env = make_maniskill(num_envs=6, threads=2, control="ee_delta")
    at = [env.spec.state_names.index(f"tcp_pose[{i}]") for i in range(7)]
    before = env.reset(options={"starts": np.full(6, 5)})[0]["state"][:, at]
    for _ in range(2):
        obs = env.step(np.hstack((np.eye(6), np.ones((6, 1)))).astype(np.float32))[0]
    after = obs["state"][:, at]
    moved = np.hstack(
        (
            after[:, :3] - before[:, :3],
            [
                expert.rotvec(expert.rotation(b[3:]) @ expert.rotation(a[3:]).T)
                for a, b in zip(before, after, strict=True)
            ],
        )
    )
    assert (moved.diagonal() > [0.02] * 3 + [0.03] * 3).all()
    env.close()


@simulates
@pytest.mark.slow
@pytest.mark.parametrize("control", ["joint_delta", "ee_delta", "pd_joint_pos"])
@pytest.mark.parametrize("task", EXPERT_TASKS)
def test_the_expert_succeeds_on_at_least_95_of_100_starts(task, control):
    env = make_maniskill(task, num_envs=20, threads=2, control=control)
    success = [episode(env, 1000 + np.arange(20) + 20 * k)[2] for k in range(5)]
    env.close()
    assert np.mean(success) >= 0.95


# ---------------------------------------------------------------- GPU backend


@simulates
def test_a_cuda_device_without_cuda_is_refused():
    if CUDA:
        pytest.skip("CUDA works here")
    with pytest.raises(UserError, match="needs an NVIDIA GPU and a CUDA build of torch"):
        make_maniskill(device="cuda")


GPU_CODE_ON_CPU = """
import json
import numpy as np, torch
from sims.maniskill import _config, make_maniskill
from sims.maniskill.gpu import ManiSkillGpuEnv
same = True
for task, control in (("PickCube-v1", "joint_delta"), ("TwoRobotPickCube-v1", "joint_delta"), ("PickCube-v1", "ee_delta")):
    a = ManiSkillGpuEnv(_config(task, 1, "state", "dense", control, 64, 20, False), "cpu")
    b = make_maniskill(task, num_envs=1, max_steps=20, control=control, reward="dense")
    acts = np.random.default_rng(0).uniform(-1, 1, (25, 1, len(a.spec.axes))).astype(np.float32)
    x, y = (e.reset(options={"starts": np.array([3])})[0] for e in (a, b))
    same &= np.array_equal(x["state"].numpy(), y["state"]) and a.spec == b.spec
    for act in acts:
        x, y = a.step(torch.from_numpy(act)), b.step(act)
        same &= np.array_equal(x[0]["state"].numpy(), y[0]["state"])
        same &= all(np.array_equal(p.numpy(), q) for p, q in zip(x[1:4], y[1:4]))
        same &= np.array_equal(x[4]["success"].numpy(), y[4]["success"])
    a.close(); b.close()
print(json.dumps(bool(same)))
"""  # noqa: E501


@simulates
@pytest.mark.slow
def test_the_gpu_envs_code_on_the_cpu_backend_equals_the_cpu_env():
    done = subprocess.run(
        [sys.executable, "-c", GPU_CODE_ON_CPU], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) is True


@simulates
@pytest.mark.slow
@pytest.mark.skipif(not CUDA, reason="no CUDA device here: ManiSkill's GPU physics did not run")
def test_the_gpu_backend_keeps_tensors_on_the_device_and_its_starts_at_any_index():
    import torch

    env = make_maniskill(num_envs=4, max_steps=12, device="cuda")
    starts = np.arange(4)
    first = env.reset(options={"starts": starts})[0]["state"]
    rolled = env.reset(options={"starts": np.roll(starts, 1)})[0]["state"]
    assert first.is_cuda and torch.allclose(rolled, first.roll(1, 0), atol=1e-4)
    act = torch.zeros(4, 8, device=env.device)
    for _ in range(12):
        obs, reward, terminated, truncated, info = env.step(act)
    assert all(x.is_cuda for x in (obs["state"], reward, terminated, truncated, info["success"]))
    assert (terminated | truncated).all()
    frozen, reward, *_ = env.step(act + 1)
    assert torch.equal(frozen["state"], obs["state"]) and (reward == 0).all()
    mask = np.array([False, True, False, False])
    after = env.reset(options={"reset_mask": mask})[0]["state"]
    assert torch.equal(after[~mask], obs["state"][~mask]) and not torch.equal(after[1], obs["state"][1])
    env.close()
