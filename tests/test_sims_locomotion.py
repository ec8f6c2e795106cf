"""Gymnasium's locomotion tasks on Batch: equal to Gymnasium's own, step by step, and cheap around it."""

import gymnasium as gym
import mujoco
import numpy as np
import pytest

from robo_rl.errors import UserError
from sims.check import check_env
from sims.mujoco.locomotion import LOCOMOTION, WALKERS, load_model, make_locomotion, rates, start_state


def gymnasium_at(task: str, qpos: np.ndarray, qvel: np.ndarray):
    """Gymnasium's env put at (qpos, qvel) as its own reset does it, and its observation there."""
    ref = gym.make(task)
    ref.reset(seed=0)
    u = ref.unwrapped
    mujoco.mj_resetData(u.model, u.data)
    u.set_state(qpos.copy(), qvel.copy())
    return ref, u._get_obs()


@pytest.mark.parametrize("task", LOCOMOTION)
def test_every_step_equals_gymnasiums_own(task):
    n, steps = 3, 150
    env = make_locomotion(task, num_envs=n, threads=2)
    obs, _ = env.reset(seed=1)
    refs = []
    for i in range(n):
        ref, first = gymnasium_at(task, env.batch.qpos[i], env.batch.qvel[i])
        np.testing.assert_array_equal(obs["state"][i], first.astype(np.float32))
        refs.append(ref)
    rng, alive, compared = np.random.default_rng(0), np.ones(n, bool), 0
    for t in range(steps):
        a = rng.uniform(-1, 1, (n, env.model.nu)).astype(np.float32) * np.float32(0.3 if t < 60 else 1.0)
        obs, reward, terminated, _, _ = env.step(a)
        for i in np.flatnonzero(alive):
            o, r, end, _, _ = refs[i].step(a[i])
            np.testing.assert_array_equal(obs["state"][i], o.astype(np.float32), err_msg=f"step {t}")
            assert reward[i] == np.float32(r) and terminated[i] == end, f"step {t}"
            alive[i] = not end
            compared += 1
    assert compared > 100
    assert alive.all() == (task == "HalfCheetah-v5"), (
        "the others fall under random actions, and that is compared too"
    )
    env.close()


@pytest.mark.parametrize("speed", [90.0, 150.0, -150.0])
def test_a_hopper_beyond_all_bounds_is_judged_as_gymnasium_does(speed):
    env = make_locomotion("Hopper-v5", num_envs=1)
    qpos, qvel = env.model.qpos0.copy(), np.zeros(env.model.nv)
    qvel[0] = speed
    ref, _ = gymnasium_at("Hopper-v5", qpos, qvel)
    env.reset(seed=0)
    env.set_qpos_qvel(qpos[None], qvel[None], np.array([0]))
    _, reward, terminated, _, _ = env.step(np.zeros((1, 3)))
    _, r, end, _, _ = ref.step(np.zeros(3, np.float32))
    assert terminated[0] == end == (abs(speed) > 100) and reward[0] == np.float32(r)


def test_ants_contact_forces_are_seen_and_paid_for():
    env = make_locomotion("Ant-v5", num_envs=2)
    env.reset(seed=0)
    forces = np.stack([env.step(np.zeros((2, 8)))[0]["state"][:, 27:] for _ in range(40)])
    assert (forces != 0).any(axis=(0, 2)).all() and np.abs(forces).max() == 1.0
    env.close()


@pytest.mark.parametrize("task", LOCOMOTION)
def test_starts_follow_gymnasiums_distribution(task):
    model, w = load_model(task), WALKERS[task]
    qpos, qvel = start_state(task, model, np.arange(4000))
    ref = gym.make(task)
    theirs = np.array([ref.reset(seed=s)[0] for s in range(400)])[:, : model.nq + model.nv - w.hidden]
    ours = np.concatenate([qpos[:, w.hidden :], qvel], 1)
    np.testing.assert_allclose(ours.mean(0), theirs.mean(0), atol=0.25 * w.noise)
    np.testing.assert_allclose(ours.std(0), theirs.std(0), rtol=0.2)
    uniform = ours[:, : model.nq - w.hidden] if w.normal_qvel else ours
    assert (np.abs(uniform - uniform.mean(0)).max(0) > 0.97 * w.noise).all()
    if w.normal_qvel:
        beyond = (np.abs(qvel) > 2 * w.noise).mean()
        assert 0.04 < beyond < 0.052, "4.55 % of a normal lies beyond two standard deviations"


@pytest.mark.parametrize("task", LOCOMOTION)
def test_the_env_keeps_the_contract(task):
    parts = check_env(lambda n: make_locomotion(task, num_envs=n, max_steps=30, threads=1))
    assert {"starts", "snapshot", "frozen"} <= set(parts)


@pytest.mark.parametrize("task", ["HalfCheetah-v5", "Ant-v5"])
def test_the_number_of_threads_changes_nothing(task):
    runs = []
    for threads in (1, 3):
        env = make_locomotion(task, num_envs=5, threads=threads)
        env.reset(seed=2)
        rng = np.random.default_rng(0)
        runs.append([env.step(rng.uniform(-1, 1, (5, env.model.nu)))[0]["state"] for _ in range(20)])
        env.close()
    np.testing.assert_array_equal(runs[0], runs[1])


def test_a_fall_ends_the_episode_and_a_thousand_steps_cut_it():
    env = make_locomotion("Hopper-v5", num_envs=2)
    assert env.spec.max_steps == 1000
    env.reset(seed=0)
    for _ in range(300):
        obs, _, terminated, truncated, _ = env.step(np.ones((2, 3)))
    assert terminated.all() and not truncated.any() and (obs["state"][:, 0] > 0).all()
    cheetah = make_locomotion("HalfCheetah-v5", num_envs=1, max_steps=25)
    cheetah.reset(seed=0)
    flags = [cheetah.step(np.zeros((1, 6)))[2:4] for _ in range(25)]
    assert [bool(tr[0]) for _, tr in flags] == [False] * 24 + [True] and not flags[-1][0][0]


def test_the_axes_are_torques_of_the_gear():
    axes = make_locomotion("HalfCheetah-v5").spec.axes
    assert [(a.name, a.high, a.unit, a.kind) for a in axes[:2]] == [
        ("bthigh", 120.0, "N m", "effort"),
        ("bshin", 90.0, "N m", "effort"),
    ]


@pytest.mark.parametrize(
    "options, fault",
    [
        ({"task": "Hoper-v5"}, "did you mean 'Hopper-v5'"),
        ({"obs": "rgb"}, "obs 'state' only"),
        ({"reward": "sparse"}, "reward 'dense' only"),
        ({"control": "position"}, "unknown control 'position'"),
        ({"randomise": "mass"}, "no randomise options"),
        ({"device": "cuda"}, "device 'cpu' only"),
        ({"max_steps": -1}, "max_steps and threads must be >= 0"),
    ],
)
def test_options_it_has_not_are_refused(options, fault):
    with pytest.raises(UserError, match=fault):
        make_locomotion(**({"task": "Hopper-v5"} | options))


def test_the_env_costs_little_around_the_physics():
    seen = []
    for _ in range(5):  # other load on the machine blurs one measurement
        r = rates("HalfCheetah-v5", 64, threads=1, seconds=0.2)
        seen.append(r["step"] / r["raw"])
        if seen[-1] > 0.75:
            return
    raise AssertionError(f"step() / Batch is 0.85 or more on a quiet machine, got {np.round(seen, 2)}")
