"""Demonstrations in ManiSkill's own format, as data sets (`robo_rl data import`)."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robo_rl.data.episode import Episode
from robo_rl.data.lerobot import Writer, load
from robo_rl.demos import load_demos
from robo_rl.errors import UserError
from robo_rl.experiment.import_maniskill import import_maniskill
from robo_rl.types import ActionAxis, ControlSpec
from sims.maniskill.trajectories import read_recording, seed_of

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.filterwarnings("ignore")  # of ManiSkill and what it imports

# As a user of ManiSkill records: its own env and wrapper, without our steps; the actions are our expert's.
# argv: folder, control mode, number of episodes, seeds that are written in place of those played.
RECORD = """
import sys
import torch
from sims.maniskill.build import action_map, without_renderer
without_renderer()
import gymnasium as gym
import mani_skill.envs
from mani_skill.utils.wrappers import RecordEpisode
from sims.maniskill.expert import ManiSkillArm, pick_cube
out, control, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
env = gym.make("PickCube-v1", obs_mode="state", control_mode=control, sim_backend="physx_cpu",
               render_backend="none", robot_uids="panda_wristcam")
env = RecordEpisode(env, out, trajectory_name="t", save_video=False, source_type="motionplanning")
for seed in range(count):
    env.reset(seed=seed)
    raw = env.unwrapped
    middle, half = action_map(raw)
    arm, over = ManiSkillArm(raw, middle, half), False
    for _ in range(60):
        arm.read()
        action = torch.from_numpy((middle + half * arm.action(pick_cube(raw, arm)))[None])
        over = over or bool(env.step(action)[4]["success"])
        if over:
            break
env.close()
"""

INSTALLED = importlib.util.find_spec("mani_skill") is not None
needs_maniskill = pytest.mark.skipif(not INSTALLED, reason="ManiSkill is absent: robo_rl[maniskill] has it")


def recorded(folder: Path, control: str) -> Path:
    subprocess.run(
        [sys.executable, "-c", RECORD, folder, control, "2"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return folder / "t.h5"


@needs_maniskill
@pytest.mark.maniskill
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_episodes_of_maniskill_become_a_data_set_of_what_our_env_observes(tmp_path):
    import h5py

    path = recorded(tmp_path / "there", "pd_joint_pos")
    got = import_maniskill([path], tmp_path / "here")
    assert (got.kept, got.played, got.again, got.recorded, got.repeated) == (2, 2, 2, 2, 2)
    assert got.task == "PickCube-v1,robot_uids=panda_wristcam" and got.control == "pd_joint_pos"
    data, grasped = load(tmp_path / "here"), 18  # which the recorded env knows from the episode before
    assert data.success.all() and list(data.tasks) == ["pick up the cube and hold it at the goal"]
    assert data.spec is not None and data.spec.axes[0].kind == "absolute" and data.spec.max_steps == 50
    with h5py.File(path) as opened:
        file: Any = opened
        first, theirs = data.episode(0), np.asarray(file["traj_0/obs"])
        assert first.terminated and first.start == 0 and first.reward is not None
        assert first.reward[-1] == 1 and first.reward[:-1].sum() == 0
        assert np.array_equal(np.delete(first.state, grasped, 1), np.delete(theirs[:-1], grasped, 1))
        low, high = (np.array([getattr(a, k) for a in data.spec.axes[:7]]) for k in ("low", "high"))
        mine = low + 0.5 * (first.action[:, :7] + 1) * (high - low)
        assert np.allclose(mine, file["traj_0/actions"][:, :7], atol=1e-5)

    # another seed in the JSON: the recorded states say where the episode was
    about = json.loads(path.with_suffix(".json").read_text())
    for episode in about["episodes"]:
        episode["reset_kwargs"]["seed"] = 1000 + episode["episode_id"]
    path.with_suffix(".json").write_text(json.dumps(about))
    got = import_maniskill([path], tmp_path / "moved", keep="all", episodes="0")
    again = load(tmp_path / "moved").episode(0)
    assert (got.kept, got.repeated) == (1, 0) and again.start == -1
    steps = min(len(again), len(first))
    assert np.abs(again.state[:steps, :9] - first.state[:steps, :9]).max() < 0.01  # joints [rad]


def test_what_is_no_recording_of_maniskill_is_told(tmp_path):
    path = tmp_path / "t.h5"
    with pytest.raises(UserError, match="t.h5 is missing: ManiSkill writes two files"):
        read_recording(path)
    path.write_bytes(b"no HDF5")
    with pytest.raises(UserError, match="t.json is missing"):
        read_recording(path)
    about = path.with_suffix(".json")
    about.write_text('{"env_info": {"env_id": "PickCube-v1"}}')
    with pytest.raises(UserError, match="not what ManiSkill's RecordEpisode writes"):
        read_recording(path)
    said = {"env_info": {"env_id": "PickCube-v1", "env_kwargs": {}}, "episodes": []}
    about.write_text(json.dumps(said))
    with pytest.raises(UserError, match="lists no episodes"):
        read_recording(path)
    said["episodes"] = [
        {"episode_id": k, "control_mode": m} for k, m in enumerate(("pd_joint_pos", "pd_joint_vel"))
    ]
    about.write_text(json.dumps(said))
    with pytest.raises(UserError, match=r"several control modes \(pd_joint_pos, pd_joint_vel\)"):
        read_recording(path)


def test_a_recording_names_its_task_with_the_arguments_that_matter(tmp_path):
    path, given = (
        tmp_path / "t.h5",
        {
            "obs_mode": "none",
            "control_mode": "pd_joint_pos",
            "render_mode": "rgb_array",
            "sensor_configs": {"shader_pack": "rt"},
            "robot_uids": "panda_wristcam",
            "sim_config": {"control_freq": 10, "sim_freq": 100},
            "num_envs": 1,
        },
    )
    path.write_bytes(b"")
    said = {
        "env_info": {"env_id": "PickCube-v1", "env_kwargs": given},
        "source_type": "human",
        "episodes": [{"episode_id": 3, "control_mode": "pd_joint_pos", "reset_kwargs": {"seed": [7]}}],
    }
    path.with_suffix(".json").write_text(json.dumps(said))
    got = read_recording(path)
    assert got.task == "PickCube-v1,robot_uids=panda_wristcam,sim_config={'control_freq':10,'sim_freq':100}"
    assert (got.control, got.source, seed_of(got.listed[0])) == ("pd_joint_pos", "human", 7)
    assert read_recording(path, "my_tasks:Pick-v2").task == "my_tasks:Pick-v2"
    assert seed_of({"episode_seed": 5}) == 5 and seed_of({"reset_kwargs": {"seed": None}}) is None


def test_a_file_in_place_of_a_data_set_is_told_the_command_that_imports_it(tmp_path):
    path = tmp_path / "trajectory.h5"
    path.write_bytes(b"")
    with pytest.raises(UserError, match="robo_rl data import .*trajectory.h5 --out DIR"):
        load(path)


def test_demonstrations_whose_axes_have_the_same_names_and_another_meaning_are_refused(tmp_path):
    axis = ActionAxis("joint1", "rad", -2.9, 2.9, "absolute", "joint")
    spec = ControlSpec("maniskill", "PickCube-v1", (axis,), 0.05, 50, ("q",))
    with Writer(tmp_path / "data", spec=spec) as writer:
        writer.add(Episode(state=np.zeros((3, 1)), action=np.zeros((3, 1))))
    assert len(load_demos(tmp_path / "data", SimpleNamespace(spec=spec))) == 1
    other = replace(spec, axes=(replace(axis, low=-0.1, high=0.1, kind="delta"),))
    with pytest.raises(UserError, match=r"'joint1' means -0.1 .. 0.1 rad \(delta joint\) here, .*--control"):
        load_demos(tmp_path / "data", SimpleNamespace(spec=other))
