import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sims
from robo_rl.human import detect
from robo_rl.human.lost import auroc_once_lost, caught_in_time, expert_wins, lost_from


def test_an_episode_is_lost_after_the_last_check_from_which_somebody_wins():
    assert lost_from([True, True, False, False]) == 2
    # a try that failed is no loss while a later one succeeds
    assert lost_from([True, False, True, False]) == 3
    assert lost_from([False, False]) == 0
    assert lost_from([False, True]) == -1 and lost_from([]) == -1


def test_the_clock_is_right_about_failures_only_as_often_as_it_is_wrong_about_successes():
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 80, 400)
    clock = detect.calibrate([detect.late_score(n) for n in lengths[::2]], 0.1, False)
    quiet = np.mean([detect.first_alarm(detect.late_score(n), clock) < 0 for n in lengths[1::2]])
    late = [detect.first_alarm(detect.late_score(100), clock)] * 30  # failures last to the limit of 100
    assert min(late) >= 0 and (caught_in_time(late, lengths[1::2]) + quiet) / 2 == pytest.approx(
        0.5, abs=1e-9
    )
    assert caught_in_time([0, -1], [5, 7]) == 0.5 and caught_in_time([5, 6], [6]) == 0.5
    assert np.isnan(caught_in_time([], [3]))


def test_a_score_that_sees_losses_is_told_from_one_that_does_not():
    lost = [None, None, 3, -1]  # the last was only late
    sees = [np.zeros(5), np.zeros(6), (np.arange(8) >= 3).astype(float), np.full(8, 9.0)]
    assert auroc_once_lost(sees, lost) == 1.0
    assert auroc_once_lost([-x for x in sees], lost) == 0.0
    assert auroc_once_lost([detect.late_score(len(x)) for x in sees], lost) == 0.5
    assert np.isnan(auroc_once_lost(sees[:2], lost[:2]))


def test_a_cube_that_is_pushed_off_the_ledge_is_lost_and_one_that_is_behind_time_is_not():
    env = sims.make("mujoco", "launch.ledge:PushOnLedge", 4, max_steps=400, threads=1)
    env.reset(options={"starts": np.arange(4)})
    on = env.get_state()
    off = {k: v.copy() for k, v in on.items()}
    names = [env.model.joint(j).name for j in range(env.model.njnt)]
    at = 1 + int(env.model.jnt_qposadr[names.index("cube")])  # time, then positions
    np.testing.assert_allclose(off["physics"][:, at : at + 2], env.scene.pos[0][:2].T, atol=1e-5)
    off["physics"][:, at + 1] += 0.3  # beside the ledge
    rows = [{k: v[i] for k, v in s.items()} for s in (on, off) for i in range(3)]
    assert expert_wins(env, rows, 200).tolist() == [True] * 3 + [False] * 3


def test_pushes_along_the_ledge_take_any_time_and_the_expert_drops_nothing():
    env = sims.make("mujoco", "launch.ledge:PushOnLedge", 60, threads=1)
    env.reset(options={"starts": np.arange(60)})
    took, over, won = np.zeros(60, int), np.zeros(60, bool), np.zeros(60, bool)
    while not over.all():
        _, _, terminated, truncated, info = env.step(env.expert_action())
        took += ~over
        won |= info["success"] & ~over
        over = terminated | truncated
    assert won.mean() > 0.9
    short, long = np.quantile(took[won], [0.1, 0.9])
    assert long > 2 * short


@pytest.mark.slow
def test_the_comparison_of_ways_to_help_runs_on_a_run_of_today(tmp_path):
    root = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for command in (
        [
            "-m",
            "robo_rl",
            "train",
            "--task",
            "launch.ledge:PushOnLedge",
            "--algo",
            "bc",
            "--preset",
            "quick",
            "--demos",
            "20",
            "--bc.updates",
            "60",
            "--workers",
            "0",
            "--no-video",
            "--out",
            tmp_path / "run",
        ],
        ["launch/compare_help.py", tmp_path / "run", "--episodes", "4", "--updates", "5", "--ways", "0", "3"],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=root, env=env, check=True, capture_output=True, text=True
        )
    nobody, recovering = done.stdout.splitlines()[-2:]
    assert nobody.startswith("nobody helps: ") and nobody.count("interventions 0.00") == 1
    assert recovering.startswith("backing out, then corrections") and "interventions 0.00" not in recovering
    assert (tmp_path / "run-help-3/corrections/meta/info.json").exists()
