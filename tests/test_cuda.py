"""On a real GPU: golden outputs, log-probs that act and score agree on, chunks by one launch, an update.

Skipped without one; the other tests of devices are in test_device.py, against a double.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_offpolicy import METHODS as REPLAY
from test_offpolicy import SMALL as SIZES
from toys import PointReach
from vla_goldens import FAMILIES, STEPS, inputs, outputs, weights

from robo_rl.cli import main
from robo_rl.experiment.methods import find_method
from robo_rl.experiment.policy_server import load_actor
from robo_rl.options import PiRlOptions, PolicyOptions, PpoOptions
from robo_rl.policies import ObsSpec, blank_obs, make_policy
from robo_rl.policies.check import observations
from robo_rl.policies.guided import plain_chunks
from robo_rl.policies.vla.make import load_model
from robo_rl.policies.vla.quick import QuickChunks, fits
from robo_rl.replay import Replay
from robo_rl.replay_collector import ReplayCollector, replay_rows
from robo_rl.rollout import Collector

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
SPEC = ObsSpec(state=7, action=4, views=("front", "wrist"), image_size=32, language=True, text=64)
SMALL = ("flow", "gaussian")
TINY: dict[str, Any] = {**SIZES}
KINDS = (*SMALL, "pi0", "pi05", "smolvla", "xvla", "groot", "openvla_oft", "pi0_fast")
ROWS = 48
# of a log-prob: products of float32 are summed in another order for another number of rows; of 16 bits not,
# but X-VLA's, whose velocity is an error over a time that may be small
FAR = {"fp32": 1e-4, "bf16": 0.0, "xvla bf16": 1.0}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def made(kind: str, dtype: str, **options):
    spec = replace(SPEC, text=0) if kind in SMALL else SPEC
    policy = make_policy(
        PolicyOptions(kind=kind, dtype=dtype, execute=4, **({"horizon": 6} | options)), spec, 0
    )
    return policy.to("cuda")


def seen(policy, rows: int = ROWS):
    return {k: v.cuda() for k, v in observations(policy.spec, rows).items()}


@torch.no_grad()
def apart(policy, sizes) -> dict[int, float]:
    """Largest difference of a log-prob of `act` on ROWS observations from that of `score` on some of them."""
    obs, out = seen(policy), {}
    chunk = policy.act(obs, torch.Generator().manual_seed(1), True)
    for rows in sizes:
        some = torch.randperm(ROWS, generator=torch.Generator().manual_seed(rows))[:rows]
        some = (some if rows < ROWS else torch.arange(ROWS)).cuda()
        context = policy.encode({k: v[some] for k, v in obs.items()})
        logp, _ = policy.score(context, {k: v[some] for k, v in chunk.trace.items()})
        out[rows] = float((logp - chunk.logp[some]).abs().max())
    return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"]
)
@torch.no_grad()
def test_golden_losses_and_samples_come_out_on_a_gpu(family, dtype, most):
    model = load_model(weights(family), "cuda", dtype)
    io = {k: v.cuda() for k, v in outputs(family).items()}
    context = model.prefix(**{k: v.cuda() for k, v in inputs(family).items()})
    losses = model.loss_map(context, io["actions"], io["noise"], io["time"])
    sample, right = model.sample(context, io["noise"], STEPS), io["sample"]
    far = float((sample - right).abs().max()) if dtype == torch.float32 else relative(sample, right)
    print(family, dtype, far)
    assert far < most and abs(float(losses[..., :7].mean() / io["loss"]) - 1) < most


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_ratio_is_one_in_a_minibatch_of_any_size(kind, dtype):
    far = apart(made(kind, dtype, size="small"), (ROWS,) if kind in SMALL else (1, 2, 3, 7, 16, 31, ROWS))
    print(kind, dtype, far)
    # a small policy scores a drawn step by its noise, and again by what it led to
    most = FAR.get(f"{kind} {dtype}", FAR[dtype])
    assert max(far.values()) <= (1e-5 if kind in SMALL else most), far


def test_the_first_ratio_of_a_full_size_is_one_in_a_minibatch_of_seven_or_more():
    far = apart(made("pi05", "bf16", size="full", horizon=50), (1, 2, 7, 16, 31, ROWS))
    print("full", far)
    assert not any(v for rows, v in far.items() if rows >= 7) and max(far.values()) < 0.1, far


@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla", "groot"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_chunk_by_one_launch_is_the_plain_one(kind, dtype):
    policy = made(kind, dtype)
    assert fits(policy)
    quick = QuickChunks(policy, most=4, compiled=kind == "pi05")
    for rows in (1, 3, 4, 6):
        obs = seen(policy, rows)
        got = quick(obs, torch.Generator().manual_seed(3))
        want = plain_chunks(policy, obs, torch.Generator().manual_seed(3))
        assert relative(got, want) < (0.02 if dtype == "bf16" else 1e-4), rows


@pytest.mark.parametrize(
    ("algo", "options", "kind"), [("pi_rl", PiRlOptions, "flow"), ("ppo", PpoOptions, "gaussian")]
)
def test_an_update_on_a_gpu_is_that_of_the_cpu_but_for_rounding(algo, options, kind):
    def learnt(device):
        made = PolicyOptions(kind=kind, horizon=4, execute=4, hidden=32, layers=2)
        policy = make_policy(made, ObsSpec(state=4, action=2), 0).to(device)
        learner = find_method(algo)(policy, options(decisions=2, minibatch=8, epochs=1, critic_warmup=0), 0)
        rollout = Collector(PointReach(8), learner.sampler, 0.99, 0).collect(learner.sampler, 2)
        learner.update(rollout, 0.0)
        return {k: v.detach().cpu() for k, v in policy.state_dict().items()}

    here, there = learnt("cpu"), learnt("cuda")
    assert all(torch.allclose(v, there[k], atol=1e-4) for k, v in here.items() if v.is_floating_point())


@pytest.mark.parametrize("algo", ["demo_sac", "pa_rl", "iql"])
def test_a_method_from_replay_learns_on_a_gpu_as_on_the_cpu_but_for_rounding(algo):
    def learnt(device):
        policy_options, options = REPLAY[algo]
        policy = make_policy(PolicyOptions(**TINY | policy_options), ObsSpec(state=4, action=2), 0).to(device)
        learner = find_method(algo)(policy, options, 0)
        store, rng = Replay(replay_rows(policy), 2, 2, 0.9, 400, 4), np.random.default_rng(0)
        ReplayCollector(PointReach(4, 8), policy, store, None, 0).run(policy, 24)
        learner.update(lambda n: store.sample(n, rng), 2)
        return {k: v.detach().cpu() for k, v in policy.state_dict().items()}

    here, there = learnt("cpu"), learnt("cuda")
    assert all(torch.allclose(v, there[k], atol=1e-3) for k, v in here.items() if v.is_floating_point())


def test_a_run_on_a_gpu_is_served_there_and_on_a_cpu_alike(tmp_path, device="cuda"):
    run = tmp_path / "run"
    what = "--task reach --obs rgb --algo bc --policy pi05 --demos 3 --workers 0 --eval-episodes 2 --no-video"
    how = f"--device {device} --bc.updates 3 --bc.batch 8 --bc.compile --out {run}"
    with pytest.raises(SystemExit) as ended:
        main(["train", *what.split(), *how.split()])
    assert not ended.value.code
    here, _, spec = load_actor(str(run), "last", 0, told=True)
    there = load_actor(str(run), "last", 0, told=True, device=device, most=1)[0]
    obs = blank_obs(spec) | {"task": "reach the target"}
    a, b = here(obs), there(obs)
    assert a.shape == b.shape and abs(a - b).max() < 1e-3 * abs(a).max()
