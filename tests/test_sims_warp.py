"""Locomotion on MuJoCo Warp, on the CPU with few worlds, against the same tasks on MuJoCo's batch.

What builds Warp's kernels takes a minute the first time and is marked slow.
"""

import importlib.util
import sys

import mujoco
import numpy as np
import pytest
import torch
from away import Away, AwayTensor, bring

import sims
from robo_rl.bench import gpu
from robo_rl.bench.rows import Report
from robo_rl.cli import main
from robo_rl.errors import MissingDependency, UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.parallel import workers
from robo_rl.experiment.recipes import recipe
from sims.check import check_env
from sims.mjwarp import WarpPhysics, make_mujoco_warp, most_contacts
from sims.mujoco.locomotion import LOCOMOTION, load_model, make_locomotion

INSTALLED = (
    importlib.util.find_spec("mujoco_warp") is not None and importlib.util.find_spec("warp") is not None
)
N = 4
FORWARD = 2e-4  # float32: how far states of some velocity [rad/s] come apart in a few steps with contacts


def warp(test):
    """A test that steps MuJoCo Warp."""
    test = pytest.mark.skipif(not INSTALLED, reason="MuJoCo Warp is absent: pip install 'robo_rl[warp]'")(
        test
    )
    return pytest.mark.slow(test)


@pytest.fixture(scope="module")
def pair():
    """(on Warp, on MuJoCo's batch), made once a task, reset to the same starts."""
    made: dict = {}

    def get(task: str):
        if task not in made:
            made[task] = make_mujoco_warp(task, num_envs=N), make_locomotion(task, num_envs=N)
        starts = {"starts": 7 + np.arange(N)}
        obs = [env.reset(options=dict(starts))[0]["state"] for env in made[task]]
        return *made[task], *obs

    return get


def put(env, other) -> None:
    """Give the envs on Warp the states of those of MuJoCo's batch."""
    p, there = env.physics, lambda x: torch.from_numpy(np.asarray(x, np.float32))
    env.set_qpos_qvel(other._qpos.copy(), other._qvel.copy(), np.arange(N))
    p.warm.copy_(there(other.batch.bind("qacc_warmstart")))
    env._x = there(other._x.copy())
    if other._forces is not None:
        env._forces = there(other._forces.copy())


def random_actions(steps: int, env) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (steps, N, env.model.nu)).astype(np.float32)


# ---------------------------------------------------------------- without a simulator


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "cartpole"}, "mujoco_warp task .*Ant-v5"),
        ({"task": "ant", "obs": "rgb"}, "has obs 'state' only"),
        ({"task": "ant", "reward": "sparse"}, "has reward 'dense' only"),
        ({"task": "ant", "randomise": "mass"}, "no randomise options"),
        ({"task": "ant", "device": "tpu"}, "device must be cpu, cuda or cuda:N, got 'tpu'"),
        ({"task": "ant", "device": "cpu:1"}, "device must be"),
        ({"task": "ant", "device": "cuda:-1"}, "device must be"),
        ({"task": "ant", "cameras": "front"}, "cameras"),
        ({"task": "ant,hopper"}, "only --sim mujoco plays several tasks"),
    ],
    ids=str,
)
def test_what_the_simulator_cannot_is_refused_in_one_line(options, words):
    with pytest.raises(UserError, match=words) as told:
        sims.make("mujoco_warp", **options)
    assert "\n" not in str(told.value)


def test_a_gpu_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        sims.make("mujoco_warp", "ant", device="cuda")


def test_without_warp_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with pytest.raises(MissingDependency, match=r"pip install 'robo_rl\[warp\]'"):
        sims.make("mujoco_warp", "ant")


@pytest.mark.skipif(not INSTALLED, reason="MuJoCo Warp is absent: pip install 'robo_rl[warp]'")
def test_a_driver_that_is_too_old_for_warp_is_told_in_one_line():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="needs an NVIDIA driver for CUDA .*found none"):
        WarpPhysics(load_model("Hopper-v5"), 1, 4, False, torch.device("cuda", 0))


def test_names_are_known_before_anything_is_loaded():
    for task in ("", "ant", "Ant-v5", "hopper", "halfcheetah", "Walker2d-v5"):
        sims.check_names("mujoco_warp", task)
    with pytest.raises(UserError, match="Hopper-v5"):
        sims.check_names("mujoco_warp", "hoper")
    assert sims.tasks("mujoco_warp")[0] == "Ant-v5" and set(sims.tasks("mujoco_warp")) == set(LOCOMOTION)


def test_a_run_on_warp_learns_from_nothing_in_one_process():
    short, long = (
        recipe(sim, task, "ppo", "state", "full")
        for sim, task in (("mujoco_warp", "ant"), ("mujoco", "Ant-v5"))
    )
    assert short.rl == long.rl and short.policy == long.policy and short.demos == "0"
    assert workers(TrainConfig(sim="mujoco_warp", task="ant", algo="pi_rl", envs=64)) == 0


def test_no_world_can_have_more_contacts_than_there_is_room_for():
    # Ant: 12 capsules and a sphere touch the floor alone; 8 joints with limits, pyramids of 4 edges
    assert most_contacts(load_model("Ant-v5")) == (26, 26 * 4 + 2 * 8)
    for task in LOCOMOTION:
        m, room = load_model(task), most_contacts(load_model(task))
        d, rng = mujoco.MjData(m), np.random.default_rng(0)
        for _ in range(300):
            d.qpos[:] = m.qpos0 + rng.uniform(-1, 1, m.nq) * 1.5
            d.qpos[m.jnt_qposadr[1] if m.nq < 15 else 2] *= 0.3  # near the floor
            mujoco.mj_forward(m, d)
            assert d.ncon <= room[0] and d.nefc <= room[1]


# ---------------------------------------------------------------- against MuJoCo's batch


@warp
@pytest.mark.parametrize("task", LOCOMOTION)
def test_a_start_gives_the_observation_of_mujocos_batch(pair, task):
    mine, other, got, want = pair(task)
    assert mine.spec.state_names == other.spec.state_names and mine.spec.axes == other.spec.axes
    assert mine.spec.period == other.spec.period and mine.spec.max_steps == other.spec.max_steps
    assert got.dtype == torch.float32 and np.array_equal(got.numpy(), want)


@warp
@pytest.mark.parametrize("task", LOCOMOTION[:3])
def test_steps_are_those_of_mujocos_batch_to_the_rounding_of_float32(pair, task):
    """Warp computes in float32 and its solver stops at 1e-6; the planar robots touch the floor from the first
    steps on, which magnifies both."""
    mine, other, *_ = pair(task)
    for t, a in enumerate(random_actions(5, mine)):
        got, want = mine.step(a), other.step(a)
        if t in (0, 4):
            np.testing.assert_allclose(got[0]["state"], want[0]["state"], atol=FORWARD * (t + 1), rtol=0)
            np.testing.assert_allclose(got[1], want[1], atol=1e-4, rtol=0)
        assert got[2].tolist() == want[2].tolist() and got[3].tolist() == want[3].tolist()


@warp
def test_ant_in_the_air_steps_as_on_mujocos_batch(pair):
    mine, other, *_ = pair("Ant-v5")
    a = random_actions(1, mine)[0]
    got, want = mine.step(a), other.step(a)
    np.testing.assert_allclose(got[0]["state"], want[0]["state"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(got[1], want[1], atol=1e-5, rtol=0)  # the torso's x of the last forward pass


@warp
def test_ant_on_the_floor_is_that_of_mujoco_where_friction_has_no_corners():
    """With cones that are round in both, states, lagging torso and contact forces are equal: the pyramids'
    edges alone differ (see `sims.mjwarp`)."""
    m = load_model("Ant-v5")
    m.opt.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    p, data = WarpPhysics(m, N, 5, True, torch.device("cpu")), [mujoco.MjData(m) for _ in range(N)]
    rng, touched = np.random.default_rng(0), 0
    for d in data:
        d.qvel[:] = 0.1 * rng.standard_normal(m.nv)
    for _ in range(20):
        for i, d in enumerate(data):
            d.ctrl[:] = rng.uniform(-1, 1, m.nu)
            for mine, theirs in (
                (p.qpos, d.qpos),
                (p.qvel, d.qvel),
                (p.warm, d.qacc_warmstart),
                (p.ctrl, d.ctrl),
            ):
                mine[i] = torch.from_numpy(theirs)
            mujoco.mj_step(m, d, nstep=5)
            mujoco.mj_rnePostConstraint(m, d)
            touched += d.ncon
        p.step()
        np.testing.assert_allclose(p.qpos, [d.qpos for d in data], atol=2e-4, rtol=0)
        np.testing.assert_allclose(p.qvel, [d.qvel for d in data], atol=5e-3, rtol=0)
        np.testing.assert_allclose(p.x, [d.xpos[1, 0] for d in data], atol=2e-4, rtol=0)
        np.testing.assert_allclose(
            p.forces.clamp(-1, 1), np.clip([d.cfrc_ext.ravel() for d in data], -1, 1), atol=0.05, rtol=0
        )
    assert touched > 20


@warp
@pytest.mark.parametrize("task", LOCOMOTION)
def test_rewards_and_ends_of_the_same_states_are_equal(pair, task):
    mine, other, *_ = pair(task)
    live, ends = torch.ones(N, dtype=torch.bool), 0
    for a in random_actions(60, mine):
        put(mine, other)
        x_before = mine._x.clone()
        _, want, terminated, _, _ = other.step(a)
        put(mine, other)
        got = mine._reward(torch.from_numpy(a), x_before, live, live)
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5)
        assert mine._terminated.tolist() == terminated.tolist()
        ends += int(terminated.sum())
        if terminated.any():
            other.reset(options={"reset_mask": terminated})
    assert ends or task in ("HalfCheetah-v5", "Ant-v5")  # those that fall did


# ---------------------------------------------------------------- the contract


@warp
@pytest.mark.parametrize("task", ["Hopper-v5", "Ant-v5"])
def test_the_env_keeps_the_contract_bit_for_bit(task):
    done = check_env(lambda n: sims.make("mujoco_warp", task, n, max_steps=20))
    assert {"seeds", "starts", "reset_mask", "frozen", "snapshot"} <= set(done)


@warp
def test_the_graph_of_a_step_does_what_its_kernels_do_one_by_one(pair):
    mine, *_ = pair("Hopper-v5")
    actions = random_actions(8, mine)
    for a in actions[:-1]:
        mine.step(a)
    before, p = mine.get_state(), mine.physics
    p.ctrl.copy_(torch.from_numpy(actions[-1]))
    p.step()
    by_graph = p.qpos.clone(), p.qvel.clone()
    mine.set_state(before)
    p.launch()
    assert torch.equal(p.qpos, by_graph[0]) and torch.equal(p.qvel, by_graph[1])


@warp
def test_an_env_whose_physics_breaks_keeps_its_state_and_terminates(pair):
    mine, *_ = pair("HalfCheetah-v5")
    a = torch.zeros(N, mine.model.nu)
    mine.step(a)
    before = mine.get_state()
    plain = mine.step(a)[0]["state"]
    mine.set_state(before)
    mine.physics.qvel[1] = 1e30
    seen = mine._obs()["state"]
    obs, reward, terminated, _, _ = mine.step(a)
    assert terminated.tolist() == [False, True, False, False] and reward.isfinite().all()
    assert torch.equal(obs["state"][1], seen[1])
    rest = [0, 2, 3]
    assert torch.equal(obs["state"][rest], plain[rest])


@warp
def test_contacts_without_room_are_told_once_at_a_reset(pair, recwarn):
    mine, *_ = pair("Hopper-v5")
    mine.physics.overflow[2] = 1
    try:
        for _ in range(2):
            mine.reset()
    finally:
        mine.physics.overflow.zero_()
    assert [str(w.message) for w in recwarn if "room" in str(w.message)] == [
        "Hopper-v5: envs had more contacts than there is room for, and some were left out"
    ]


# ---------------------------------------------------------------- on a device


@warp
@pytest.mark.parametrize("task", ["Hopper-v5", "Ant-v5"])
def test_on_a_device_no_step_waits_for_it_and_the_numbers_are_the_same(task):
    here, there = (make_mujoco_warp(task, num_envs=N, max_steps=6) for _ in range(2))
    actions = random_actions(9, here)
    actions[4, 2, 0] = np.nan
    want = [here.reset(seed=3)[0]["state"]]
    for a in actions:
        out = here.step(np.nan_to_num(a))
        want += [out[0]["state"], *out[1:4]]
    with Away() as device:
        for part in (there, there.physics):  # Warp's memory, read as that of a device
            for name, x in vars(part).items():
                if isinstance(x, torch.Tensor):
                    setattr(part, name, AwayTensor(x))
        there.device, there.checks_actions = device, False
        got = [there.reset(seed=3)[0]["state"]]
        waits = Away.waits
        for a in actions:
            out = there.step(torch.as_tensor(a).to(device))
            got += [out[0]["state"], *out[1:4]]
        assert Away.waits == waits
        assert all(isinstance(x, AwayTensor) for x in got)
        with pytest.raises(UserError, match="finite, got NaN or infinity in a step since the last reset"):
            there.reset(options={"reset_mask": np.arange(N) == 1})
        there.reset(options={"reset_mask": np.arange(N) == 1})
        state = there.get_state()
        there.set_state(state, np.arange(N) < 2)
        assert [bool(bring(x)) for x in there._truncated][1] is False
    assert all(torch.equal(bring(a), b) for a, b in zip(got, want, strict=True))


# ---------------------------------------------------------------- a run


@warp
def test_the_bench_measures_the_adapter_against_its_graph_alone():
    report = Report(lambda text: None)
    gpu.warp(gpu.Bench(gpu.TWIN, report, 0.05))
    (row,) = report.rows
    assert "N = 4" in row.what and row.ours > 0 and row.of_limit > 0 and not row.bars


@warp
@pytest.mark.gl
def test_the_host_draws_what_mujocos_batch_shows(pair):
    mine, other, *_ = pair("Hopper-v5")
    try:
        assert np.array_equal(mine.studio([1]), other.studio([1]))
    finally:
        mine.close()
        mine.close()
    with pytest.raises(UserError, match="render=True"):
        mine.render()


@warp
def test_a_run_learns_on_warp_is_evaluated_elsewhere_and_goes_on(tmp_path):
    argv = (
        "train --sim mujoco_warp --task hopper --algo ppo --envs 16 --steps 5000 --no-video "
        "--eval-episodes 4 --max-steps 100"
    )
    with pytest.raises(SystemExit) as end:
        main([*argv.split(), "--out", str(tmp_path / "run")])
    assert not end.value.code and (tmp_path / "run" / "evals" / "final.json").exists()
    with pytest.raises(SystemExit) as end:
        main(["eval", str(tmp_path / "run"), "--sim", "mujoco", "--task", "Hopper-v5", "--episodes", "2"])
    assert not end.value.code
    with pytest.raises(SystemExit) as end:
        main([*argv.split(), "--init", str(tmp_path / "run"), "--out", str(tmp_path / "on")])
    assert not end.value.code
