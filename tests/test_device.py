"""Policies, learners and simulators on an accelerator, tested without one: see tests/away.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from away import Away, AwayTensor, bring
from torch import Tensor
from torch.utils._pytree import tree_map
from toys import PointReach

from robo_rl.algos.rehearsal import Rehearsal, kept_rows
from robo_rl.cli import main
from robo_rl.device_names import check_device
from robo_rl.devices import moved
from robo_rl.errors import UserError
from robo_rl.evaluation import evaluate
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.evaluation import EvalConfig, changed, moved_here
from robo_rl.experiment.methods import find_method
from robo_rl.experiment.recycle import Recycler
from robo_rl.film import FilmedEnv
from robo_rl.optim import AdamW
from robo_rl.options import (
    DppoOptions,
    LoraOptions,
    NftOptions,
    PiRlOptions,
    PolicyOptions,
    PpoOptions,
    ReinFlowOptions,
)
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.recording import Recorder, play, policy_actor, random_actor
from robo_rl.replay_collector import ReplayCollector
from robo_rl.rollout import Collector
from robo_rl.rollout_control import StartControl, Uniform
from robo_rl.runtime.device import DeviceCollector, DeviceFeed, on_device
from robo_rl.starts import eval_starts

PLAIN = PolicyOptions(horizon=4, execute=4, hidden=32, layers=2, denoise_steps=3)
SPEC = ObsSpec(state=4, action=2)
SEEN = ObsSpec(state=4, action=2, views=("front",), image_size=32, language=True)
METHODS = [
    ("pi_rl", PiRlOptions, {}),
    ("ppo", PpoOptions, {"kind": "gaussian"}),
    ("nft", NftOptions, {}),
    ("dppo", DppoOptions, {"kind": "diffusion", "denoise_steps": 5, "finetune_steps": 3}),
    ("reinflow", ReinFlowOptions, {"noise": "learned", "noise_steps": "all"}),
    ("pi_rl", PiRlOptions, {"horizon": 8, "execute": 4, "commit": 3, "commit_least": 1}),
]
SMALL = {"decisions": 2, "minibatch": 8, "epochs": 1, "critic_warmup": 0}


class TensorReach(PointReach):
    """The same env whose arrays are tensors on `device`, as Isaac's are; it counts its steps and takes no
    NumPy actions."""

    def __init__(self, num_envs: int, device, **options):
        super().__init__(num_envs, **options)
        self.device, self.steps = device, 0

    def _there(self, x):
        return x if x.dtype.kind == "U" else torch.from_numpy(np.array(x)).to(self.device)

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return {k: self._there(v) for k, v in obs.items()}, {k: self._there(v) for k, v in info.items()}

    def step(self, actions):
        self.steps += 1
        assert isinstance(actions, Tensor) and actions.device == self.device, (
            "actions came by way of the host"
        )
        obs, *flags, info = super().step(bring(actions).numpy())
        return (
            {k: self._there(v) for k, v in obs.items()},
            *map(self._there, flags),
            {k: self._there(v) for k, v in info.items()},
        )


@pytest.mark.parametrize(("algo", "kind", "changes"), METHODS, ids=[*(m[0] for m in METHODS[:-1]), "latency"])
def test_an_update_on_a_device_is_that_of_the_cpu_bit_for_bit(algo, kind, changes):
    def learnt(device) -> dict[str, Tensor]:
        policy = make_policy(replace(PLAIN, **changes), SPEC, 0).to(device)
        learner = find_method(algo)(policy, kind(**SMALL), 0)
        rollout = Collector(PointReach(8), learner.sampler, 0.99, 0).collect(
            learner.sampler, 2, explore=algo != "nft"
        )
        learner.update(rollout, 0.0)
        learner.after_collect(rollout)
        return {k: bring(v.detach()) for k, v in policy.state_dict().items()}

    here = learnt("cpu")
    with Away() as device:
        there = learnt(device)
    assert all(torch.equal(here[k], v) for k, v in there.items())
    fresh = make_policy(replace(PLAIN, **changes), SPEC, 0).state_dict()
    assert any(not torch.equal(fresh[k], v) for k, v in there.items())


GROUP = {"advantage": "grpo", "group": 4, "decisions": 0}
OPTIONS = (
    {"advantage": "gdpo"},
    {"flawed": "steps=4,change=0.1"},
    {"advantage": "istar"},
    {"advantage": "poise"},
    {"recycle": 2},
    {"replay": 0.5, "correction": "sequence"},
    {"rehearse": 0.1, "correction": "m2po", "proximal": "snapshot"},
    {"proximal": "ewma"},
)


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta")  # they are values all the same
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_an_update_has_beside_its_rollout_computes_on_a_device_too_also_in_a_run_that_goes_on(options):
    o = PpoOptions(**SMALL | GROUP | options)

    def learnt(device) -> dict[str, Tensor]:
        policy = make_policy(replace(PLAIN, kind="gaussian"), SPEC, 0).to(device)
        learner, recycler = find_method("ppo")(policy, o, 0), None
        for version in range(3):
            collector = Collector(
                PointReach(12, limit=12, radius=0.6), policy, 0.99, 4, starts=StartControl(Uniform(), 0)
            )
            # the last is stale
            rollout = collector.episodes(policy, np.repeat(np.arange(3), 4), version=max(0, version - 1))
            if o.rehearse and not version:
                learner.rehearsal = Rehearsal(kept_rows(rollout, 12), "js")
            if o.recycle and not version:
                config = TrainConfig(task="reach", algo="ppo", rl=o, policy=policy.options, workers=0)
                learner.lessons = recycler = Recycler(
                    replace(config, device="cpu"), SPEC, env=PointReach(6, 12)
                )
                recycler.device = device
            told = learner.update(rollout, 0.0, version)
            if recycler is not None:
                recycler.look(rollout, policy)
            if version == 1:  # as a checkpoint is read: on the CPU
                learner.load_state_dict(
                    tree_map(lambda x: bring(x) if isinstance(x, Tensor) else x, learner.state_dict())
                )
        assert np.isfinite(list(told.values())).all() and ("recycle_loss" in told) == bool(o.recycle)
        return {k: bring(v.detach()) for k, v in policy.state_dict().items()}

    here = learnt(torch.device("cpu"))
    with Away() as device:
        there = learnt(device)
    assert all(torch.equal(here[k], v) for k, v in there.items())


def test_what_a_policy_plays_for_a_data_set_comes_from_its_device():
    policy = make_policy(replace(PLAIN, kind="gaussian"), SPEC, 0)
    obs, _ = PointReach(3).reset(seed=0)
    want = policy_actor(policy, 1)(obs, 0)
    with Away() as device:
        assert np.array_equal(policy_actor(policy.to(device), 1)(obs, 0), want)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_policy_that_sees_pictures_acts_and_scores_on_a_device(dtype):
    policy = make_policy(replace(PLAIN, width=32, dtype=dtype, lora=LoraOptions(rank=2)), SEEN, 0)
    g = torch.Generator().manual_seed(1)
    obs = {
        "state": torch.randn(3, 4, generator=g),
        "tokens": torch.randint(1, 40, (3, 16), generator=g),
        "image/front": torch.randint(0, 255, (3, 32, 32, 3), generator=g, dtype=torch.uint8),
    }
    chunk = policy.act(obs, torch.Generator().manual_seed(2), True)
    with Away() as device:
        policy.to(device)
        away = {k: v.to(device) for k, v in obs.items()}
        mine = policy.act(away, torch.Generator().manual_seed(2), True)
        score = policy.score(policy.encode(away), mine.trace)[0]
        loss = policy.bc_loss(
            away, torch.zeros(3, 4, 2, device=device), torch.ones(3, 4, device=device), torch.Generator()
        )
        assert isinstance(mine.actions, AwayTensor) and isinstance(loss, AwayTensor)
    close = 1e-4 if dtype == "fp32" else 0.05  # another attention kernel
    torch.testing.assert_close(bring(mine.actions), chunk.actions, atol=close, rtol=0)
    torch.testing.assert_close(bring(score.detach()), bring(mine.logp), atol=1e-4, rtol=1e-5)


def test_the_double_refuses_what_an_accelerator_refuses():
    with Away() as device:
        there = torch.ones(3, device=device)
        with pytest.raises(RuntimeError, match="different devices"):
            there + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            np.asarray(there)
        assert (there.sum() + 1).item() == 4 and Away.waits == 1


@pytest.mark.parametrize("group", [0, 4])
def test_a_simulator_of_tensors_gives_the_rollout_of_the_same_one_of_arrays(group):
    policy = make_policy(PLAIN, SPEC, 0)
    starts = np.repeat([3, 5], 4)
    host = Collector(PointReach(8), policy, 0.9, 7)
    want = host.episodes(policy, starts) if group else host.collect(policy, 6)
    with Away() as device:
        policy.to(device)
        env = TensorReach(8, device)
        collector = DeviceCollector(env, policy, 0.9, 7)
        waits, env.steps = Away.waits, 0
        got = collector.episodes(policy, starts) if group else collector.collect(policy, 6)
        assert isinstance(got.rewards, AwayTensor) and on_device(env) and not on_device(host.env)
        made = got.rewards.shape[0]
        assert env.steps == 4 * made  # control steps
        # the host waited for decisions and for the sums at the end, not for steps
        assert Away.waits - waits < 4 * made + 20
    for name in ("rewards", "discounts", "done", "executed", "mask", "gains", "outcome", "x0", "logp"):
        torch.testing.assert_close(
            bring(getattr(got, name)),
            getattr(want, name)[:made] if name != "outcome" else want.outcome,
            atol=1e-6,
            rtol=1e-6,
            check_dtype=False,
        )
    for name in ("obs", "last_obs", "final_obs"):
        for k, v in getattr(want, name).items():
            assert torch.equal(bring(getattr(got, name)[k]), v)
    assert got.stats.keys() == want.stats.keys()
    assert got.stats["env_steps"] == want.stats["env_steps"] and got.stats.get("success") == want.stats.get(
        "success"
    )


def test_a_run_on_a_simulator_of_tensors_learns_from_its_own_device():
    with Away() as device:
        policy = make_policy(PLAIN, SPEC, 0).to(device)
        learner = find_method("pi_rl")(policy, PiRlOptions(**SMALL), 0)
        feed = DeviceFeed(DeviceCollector(TensorReach(8, device), policy, 0.99, 1), policy, 2, 0, True)
        for _ in range(2):
            metrics = learner.update(feed.next(), 0.0, feed.version)
            feed.publish()
        assert metrics["first_log_ratio"] < 1e-4 and feed.version == 2 and not feed.load_state(feed.state())
        result = evaluate(TensorEvaluation(4, device), policy, eval_starts(4), 0)
    assert len(result["success"]) == 4
    with pytest.raises(UserError, match="multiple of --rl.group"):
        DeviceFeed(
            DeviceCollector(TensorReach(6, torch.device("cpu")), make_policy(PLAIN, SPEC, 0), 0.99, 1),
            policy,
            2,
            4,
            True,
        )


class TensorPictures(TensorReach):
    """It is filmed by pictures that the host draws."""

    def step(self, actions):
        return super().step(torch.as_tensor(actions).to(self.device))

    def studio(self, ids) -> np.ndarray:
        return np.zeros((len(ids), 480, 640, 3), np.uint8)


def test_a_simulator_of_tensors_is_filmed_and_recorded():
    seen: list = []
    with Away() as device:
        filmed = FilmedEnv(TensorPictures(3, device), 2)
        evaluate(filmed, make_policy(PLAIN, SPEC, 0).to(device), eval_starts(3), 0)
        env = Recorder(TensorPictures(3, device), seen.append)
        assert play(env, random_actor(env, 0), 3, 0) <= 3
    assert len(filmed.takes) == 2 and len(seen) == 3 and seen[0].state.shape[1] == 4


def test_a_method_from_replay_refuses_a_simulator_on_a_device():
    with Away() as device, pytest.raises(UserError, match="methods from replay collect on the host"):
        ReplayCollector(TensorReach(3, device), make_policy(PLAIN, SPEC, 0), None, None, 0)


class TensorsHere(TensorReach):
    """A user's own simulator of tensors, as `--sim module:class` makes it."""

    def __init__(self, num_envs: int):
        super().__init__(num_envs, torch.device("cpu"))

    def step(self, actions):
        return super().step(torch.as_tensor(actions))


def test_a_whole_run_on_a_simulator_of_tensors_ends(tmp_path):
    argv = (
        "train --sim test_device:TensorsHere --demos 0 --algo ppo --envs 8 --steps 640 --workers 0 "
        "--eval-episodes 4 --no-video --policy.hidden 16 --rl.decisions 4 --rl.minibatch 16 --max-staleness "
        "0 --starts uniform --threads 1"
    )
    with pytest.raises(SystemExit) as end:
        main([*argv.split(), "--out", str(tmp_path / "run")])
    assert not end.value.code and (tmp_path / "run" / "evals" / "final.json").exists()


class TensorEvaluation(TensorReach):
    """As Isaac: one seed for all envs, no starts, and actions from anywhere."""

    one_stream = True

    def reset(self, *, seed=None, options=None):
        assert not options
        return super().reset(seed=seed)

    def step(self, actions):
        return super().step(torch.as_tensor(actions).to(self.device))


def test_a_rollout_is_moved_whole():
    policy = make_policy(PLAIN, SPEC, 0)
    rollout = Collector(PointReach(4), policy, 0.99, 0).collect(policy, 2)
    assert moved(rollout, torch.device("cpu")) is rollout
    with Away() as device:
        there = moved(rollout, device)
        assert all(
            isinstance(x, AwayTensor)
            for x in (there.obs["state"], there.trace["x"], there.done, there.last_obs["state"])
        )


def test_weights_in_bf16_step_by_a_copy_in_fp32_that_a_state_carries():
    p, q = (torch.full((4,), 1.0, dtype=d, requires_grad=True) for d in (torch.bfloat16, torch.float32))
    mine, plain = AdamW([p], 1e-4), AdamW([q], 1e-4)
    for _ in range(40):
        p.grad, q.grad = torch.ones(4, dtype=torch.bfloat16), torch.ones(4)
        mine.step()
        plain.step()
    assert (
        torch.equal(mine.state[p]["master"], q)
        and torch.equal(p, q.bfloat16())
        and not torch.equal(p, torch.ones(4).bfloat16())
    )
    again = AdamW([torch.full((4,), 9.0, dtype=torch.bfloat16, requires_grad=True)], 1e-4)
    again.load_state_dict(mine.state_dict())
    assert torch.equal(next(iter(again.state.values()))["master"], q)


def test_bf16_keeps_traces_heads_and_statistics_in_fp32():
    policy = make_policy(replace(PLAIN, width=32, dtype="bf16"), SEEN, 0)
    assert {p.dtype for p in policy.trunk.parameters()} == {torch.bfloat16}
    assert (
        {p.dtype for p in policy.head.parameters()}
        == {torch.float32}
        == {b.dtype for b in policy.trunk.buffers()}
    )
    g = torch.Generator().manual_seed(1)
    obs = {
        "state": torch.randn(48, 4, generator=g),
        "tokens": torch.randint(1, 40, (48, 16), generator=g),
        "image/front": torch.randint(0, 255, (48, 32, 32, 3), generator=g, dtype=torch.uint8),
    }
    chunk = policy.act(obs, torch.Generator().manual_seed(2), True)
    assert (
        {v.dtype for v in chunk.trace.values() if v.is_floating_point()}
        == {torch.float32}
        == {chunk.logp.dtype}
    )
    some = torch.randperm(48, generator=g)[:16]
    context, part = policy.encode(obs), policy.encode({k: v[some] for k, v in obs.items()})
    full, few = (getattr(c, "pooled", c) for c in (context, part))
    assert torch.equal(few, full[some])  # the same bits in a minibatch of any size
    torch.testing.assert_close(
        policy.score(part, {k: v[some] for k, v in chunk.trace.items()})[0],
        chunk.logp[some],
        atol=1e-4,
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("name", "said"), [("tpu", "must be cpu, cuda or cuda:N"), ("meta", "must be cpu, cuda or cuda:N")]
)
def test_a_device_that_there_is_not_is_one_line(name, said):
    with pytest.raises(UserError, match=said):
        check_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_one_line_and_leaves_no_folder(tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        main(["train", "--device", "cuda", "--out", str(tmp_path / "r"), "--workers", "0"])
    assert e.value.code == 2 and not (tmp_path / "r").exists()
    assert "--device cuda needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(("sim", "said"), [("mujoco_warp", "it steps on cpu, slower"), ("mujoco", "")])
def test_a_run_from_a_machine_with_a_gpu_is_evaluated_on_one_without(sim, said):
    config, options = TrainConfig(sim=sim, task="ant", device="cuda:1"), EvalConfig()
    assert changed(config, options).device == "cpu"
    assert moved_here(config, options).endswith(said) and bool(moved_here(config, options)) == bool(said)
    assert not moved_here(config, replace(options, sim="mujoco"))  # another simulator was asked for


def test_an_update_of_which_one_minibatch_is_refused_ends_on_a_device_too():
    from robo_rl.losses import ppo

    with Away() as device:
        old, adv = torch.zeros(4, 1).to(device), torch.ones(4, 1).to(device)
        logs = [ppo(old + shift, old, adv, 0.2, 0.2)[1] for shift in (0.0, 30.0)]
        assert [float(bring(step["refused"])) for step in logs] == [0.0, 1.0]
        assert all(isinstance(torch.stack([step[k] for step in logs]), AwayTensor) for k in logs[0])
