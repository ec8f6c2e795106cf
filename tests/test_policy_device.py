"""A trained policy that serves, deploys and is evaluated on an accelerator, tested without one: see
tests/away.py."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from away import Away, AwayTensor
from test_deploy import write_run
from test_device import PLAIN, SPEC, TensorEvaluation
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import PointReach

import robo_rl
from controllers.chunking import Prefix
from robo_rl import checkpoint
from robo_rl.cli import main
from robo_rl.errors import UserError
from robo_rl.evaluation import evaluate
from robo_rl.experiment.api import TrainedPolicy
from robo_rl.experiment.deploy_options import DeployOptions
from robo_rl.experiment.deploy_policy import choose_actor, serve_words
from robo_rl.experiment.evaluation import EvalConfig, evaluate_checkpoint
from robo_rl.experiment.folder import NewestCheckpoint
from robo_rl.experiment.openpi import batch_actor, policy_actor
from robo_rl.experiment.policy_server import (
    ServeOptions,
    load_actor,
    make_sessions,
    serving_threads,
    torch_actor,
)
from robo_rl.files import cores
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, blank_obs, make_policy
from robo_rl.starts import eval_starts

pytestmark = pytest.mark.filterwarnings(
    "ignore:for .* copying from a non-meta"
)  # they are values all the same
TOLD = ObsSpec(state=7, action=4, views=("front",), image_size=32, language=True, text=64)
FLOW = replace(PLAIN, horizon=8, commit=3)
POLICIES = {
    "flow": (FLOW, SPEC),
    "window": (replace(FLOW, window=4), SPEC),
    "pi05": (PolicyOptions(kind="pi05", horizon=8, execute=4, commit=3, hidden=16, layers=1), TOLD),
}


@pytest.fixture(autouse=True)
def one_kernel_of_attention():
    """That of the double: the CPU's own one rounds otherwise."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def made(name: str):
    """A policy whose chunks depend on what it sees, in units of its own."""
    policy = make_policy(*POLICIES[name], 0).eval()
    g = torch.Generator().manual_seed(5)
    policy.obs_norm.fit(torch.randn(50, policy.spec.state, generator=g))
    policy.action_norm.fit(0.3 * torch.randn(50, policy.spec.action, generator=g))
    return policy


def observation(spec: ObsSpec, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    obs = {k: rng.integers(0, 255, v.shape).astype(v.dtype) for k, v in blank_obs(spec).items()}
    return obs | {"state": rng.standard_normal(spec.state).astype(np.float32), "task": "pick up the red cube"}


@dataclass(frozen=True, kw_only=True)
class Unchecked(EvalConfig):
    """Also of a device that no machine has."""

    def __post_init__(self) -> None:
        pass


def on(options, device):
    """The options of a command whose policy computes on `device`, which no machine has."""
    object.__setattr__(options, "device", str(device))
    return options


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


@pytest.mark.parametrize("name", POLICIES)
def test_plain_guided_and_committed_chunks_on_a_device_are_those_of_the_cpu(name):
    policy = made(name)
    obs, other = (observation(policy.spec, seed) for seed in (1, 2))
    rows = np.random.default_rng(3).uniform(-0.5, 0.5, (8, policy.spec.action)).astype(np.float32)

    def chunks() -> list[np.ndarray]:
        act = torch_actor(policy, 0, "", policy.spec)
        many = act.many([obs, other])
        guided = act.choose("rtc")(obs, Prefix(rows, 2, 5))
        return [*many, guided, act.choose("trained")(obs, Prefix(rows, 2, 5))]

    want = chunks()
    assert np.allclose(want[3][:2], rows[:2], atol=1e-6) and not np.array_equal(want[0], want[2])
    with Away() as device:
        policy.to(device)
        got = chunks()
    assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_actions_for_clients_of_openpi_and_of_a_script_come_from_the_policys_device(run, name):
    policy = made(name)
    batch = [observation(policy.spec, seed) for seed in (1, 2)]
    stacked = {k: np.stack([obs[k] for obs in batch]) for k in batch[0]}

    def actions() -> list[np.ndarray]:
        own = TrainedPolicy(policy, run, run)
        return [*policy_actor(policy, 0)(batch), own(stacked), own(stacked, explore=True)]

    want = actions()
    with Away() as device:
        policy.to(device)
        got = actions()
    assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))


def test_an_evaluation_on_a_device_is_that_of_the_cpu():
    policy, starts = make_policy(PLAIN, SPEC, 0), eval_starts(8)
    want = evaluate(PointReach(4), policy, starts)
    with Away() as device:
        assert evaluate(PointReach(4), policy.to(device), starts) == want


def test_a_policy_on_the_cpu_acts_in_a_simulator_of_tensors():
    policy = make_policy(PLAIN, SPEC, 0)
    want = evaluate(TensorEvaluation(4, torch.device("cpu")), policy, eval_starts(4))
    with Away() as device:
        assert evaluate(TensorEvaluation(4, device), policy, eval_starts(4)) == want


def test_weights_of_a_checkpoint_go_to_the_device_and_torch_acts_there_in_place_of_numpy(run):
    at, obs = run / "checkpoints" / checkpoint.name(0), {"state": np.ones(36, np.float32)}
    want = load_actor(str(run), "last", 0, device="cpu:0")[0](obs)  # torch, as it is no plain "cpu"
    numpy = load_actor(str(run), "last", 0)[0](obs)
    rows = batch_actor(at, 0)[0]([obs | {"task": ""}])[0]
    with Away() as device:
        policy, _ = checkpoint.load_policy(at, device)
        assert all(isinstance(x.data, AwayTensor) for x in policy.state_dict().values())
        act, _, _ = load_actor(str(run), "last", 0, device=str(device))
        before = Away.products
        assert np.array_equal(act(obs), want) and Away.products > before
        act, _ = batch_actor(at, 0, str(device))
        before = Away.products
        assert np.array_equal(act([obs | {"task": ""}])[0], rows) and Away.products > before
    assert not np.array_equal(want, numpy)


@pytest.mark.parametrize("chunking", ["", "rtc"])
def test_a_checkpoint_is_evaluated_on_a_device(tmp_path, chunking):
    run = write_run(tmp_path / "run", max_steps=24)
    options = Unchecked(episodes=2, envs=2, chunking=chunking, latency=0.1 if chunking else None)
    # torch, as it is no plain "cpu"
    want = evaluate_checkpoint(run, replace(options, device="cpu:0"))
    with Away() as device:
        assert evaluate_checkpoint(run, replace(options, device=str(device))) == want and Away.products


def test_a_server_that_shares_explores_on_a_device_and_so_do_newer_weights(run, tmp_path):
    options = ServeOptions(run=str(run), share=str(tmp_path / "share"), follow=1.0, threads=1)
    obs = {"state": np.ones(36, np.float32)}
    [want] = make_sessions(options, print)[0]([obs])
    now, at = [0.0], run / "checkpoints" / checkpoint.name(0)
    with Away() as device:
        act, sessions, _, _ = make_sessions(on(options, device), print)
        before = Away.products
        [got] = act([obs])
        assert Away.products > before
        newest = NewestCheckpoint(run, "last", at, 1.0, lambda: now[0], str(device))
        saved = {"step": 8, "best": {"step": -1}}
        checkpoint.save_checkpoint(at.with_name(checkpoint.name(8)), checkpoint.load_policy(at)[0], {}, saved)
        now[0] = 2.0
        policy, version = newest()
        assert isinstance(policy.action_norm.mean, AwayTensor) and version == 8
        assert act.newest.device == str(device)
    sessions.close()
    assert np.array_equal(got.logp, want.logp) and np.array_equal(got.rows, want.rows)
    assert all(np.array_equal(got.trace[k], v) for k, v in want.trace.items())


def test_the_server_of_a_deployment_computes_where_the_deployment_says(run):
    options = on(DeployOptions(run=str(run), policy="process", task="reach"), "cuda:1")
    words = serve_words(options)
    assert words[:2] == ["serve", str(run)] and words[words.index("--device") + 1] == "cuda:1"
    assert words[words.index("--task") + 1] == "reach"
    assert serving_threads(0) == max(1, cores() - 1) and serving_threads(3) == 3  # a core is the arm's


@pytest.mark.parametrize("policy", ["process", "127.0.0.1:7447"])
def test_a_robot_reads_no_weight_of_a_policy_that_a_server_computes(run, policy):
    (run / "checkpoints" / checkpoint.name(0) / "policy.safetensors").unlink()
    act, config, spec = choose_actor(DeployOptions(run=str(run), policy=policy))
    assert act.execute == 8 and config.task == "pick_cube" and spec.state == 36
    with pytest.raises(UserError, match=r"--policy\.commit"):
        choose_actor(DeployOptions(run=str(run), policy=policy, chunking="trained"))
    with pytest.raises(UserError, match="is not a checkpoint that can be read"):
        choose_actor(DeployOptions(run=str(run)))


@pytest.mark.parametrize("command", ["serve", "deploy", "eval"])
@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("tpu", "--device must be cpu, cuda or cuda:N, got 'tpu'"),
        pytest.param(
            "cuda",
            "--device cuda needs an NVIDIA GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA"),
        ),
    ],
)
def test_a_device_that_there_is_not_is_one_line_before_anything_is_read(command, device, says, capsys):
    with pytest.raises(SystemExit) as e:
        main([command, "no/run", "--device", device])
    said = capsys.readouterr().err.strip()
    assert e.value.code == 2 and says in said and len(said.splitlines()) == 1
    with pytest.raises(UserError, match=says):
        robo_rl.load_policy("no/run", device=device)


@pytest.mark.parametrize(
    ("make", "policy"),
    [(DeployOptions, "127.0.0.1:7447"), (DeployOptions, "lerobot:x"), (EvalConfig, "ws://127.0.0.1:1")],
)
def test_a_policy_that_acts_elsewhere_has_no_device_here(make, policy):
    with pytest.raises(UserError, match=f"--device is of .* --policy {policy}"):
        make(policy=policy, device="cpu:0", **{"run": "r"} if make is DeployOptions else {})
