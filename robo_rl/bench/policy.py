"""`robo_rl bench policy`: sampling chains, re-scoring them in PPO updates, and one robot's chunk, each on one
thread.

The limits are the bare chain of matrix products of the same shapes through the fastest plain call torch (or
NumPy, for one robot) has, and the same number of operations at the rate of a large product. The peers do the
same job with plain modules (`bench_plain`), eager and through each compiler. The methods are measured one by
one: pi_rl re-scores one step of a chain, ReinFlow and DPPO all of them. Times are CPU times of the measuring
thread, so that a busy machine counts little.
"""

import copy
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.algos.credit import descend, make_adam
from robo_rl.algos.onpolicy import Rules, surrogate
from robo_rl.bench.plain import (
    OnnxForm,
    PlainChain,
    PlainChunk,
    at_peak,
    chain_flops,
    compiled_forms,
    product_chain,
    product_update,
    update_flops,
)
from robo_rl.bench.rows import (
    BARE,
    CPU,
    PHYSICAL,
    Bar,
    Report,
    at_least,
    at_most,
    in_turns,
    make_row,
    versioned,
)
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.numpy_actor import NumpyActor
from robo_rl.policies.policy import ChainPolicy

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions

ENVS, MINIBATCHES = 256, (512, 1024, 4096)
CHAIN = PolicyOptions(horizon=4, execute=4, denoise_steps=4, hidden=256, layers=3)
CHAINS = {
    "pi_rl, one random step of K = 4": CHAIN,
    "reinflow, all of K = 4": replace(CHAIN, noise="learned", noise_steps="all"),
    "dppo, the last 5 of K = 10": replace(CHAIN, kind="diffusion", denoise_steps=10, logp_reduction="mean"),
}
CHAIN_SPEC = ObsSpec(state=32, action=8)
ROBOT = PolicyOptions(horizon=16, execute=16, denoise_steps=4, hidden=256, layers=3)
ROBOT_SPEC = ObsSpec(state=32, action=7)
MM, PEAK = "the matrix products", "their operations at the rate of a large product"
PRODUCTS = {MM: BARE, PEAK: PHYSICAL}


def measure(args: "BenchOptions", report: Report) -> None:
    """All rows of `robo_rl bench policy`."""
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        report.say("NumPy may use several threads; for one set OPENBLAS_NUM_THREADS=1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, options in CHAINS.items():
            sampling(args, report, name, options)
        for name, options in CHAINS.items():
            update(args, report, name, options, 2048)
        for size in () if args.quick else MINIBATCHES:
            update(args, report, *next(iter(CHAINS.items())), size)
        robot(args, report)
    finally:
        torch.set_num_threads(threads)


def sampling(args: "BenchOptions", report: Report, name: str, o: PolicyOptions) -> None:
    """Chains of all envs that explore, log-probs and trace."""
    spec, n = CHAIN_SPEC, args.envs or ENVS
    policy, generator = make_policy(o, spec, 0), torch.Generator().manual_seed(0)
    assert isinstance(policy, ChainPolicy)
    plain, obs = PlainChain(policy), {"state": torch.randn(n, spec.state)}
    shapes = (n, spec.state, policy.chunk, o.hidden, o.layers, o.denoise_steps)
    peers, missing = {}, {}
    if args.peers:
        example = (obs["state"], torch.randn(n, policy.chunk), plain.t[0].expand(n))
        forms, missing = compiled_forms(plain, example, args.quick, onnx=not args.quick)
        forms = {f"plain modules, {versioned('torch')} eager": None} | {
            f"plain modules, {k}": f for k, f in forms.items()
        }
        right = policy.act(obs, torch.Generator().manual_seed(1), True)
        for label, form in forms.items():
            x, *_, logp = plain.act(obs["state"], torch.Generator().manual_seed(1), form)
            assert torch.allclose(x, right.x0.flatten(1), atol=1e-3), f"{label} samples other chunks"
            assert torch.allclose(logp, right.logp, atol=1e-2), f"{label} gives other densities"
            peers[label] = (lambda form=form: plain.act(obs["state"], generator, form), 1)
    work = {
        "ours": (lambda: policy.act(obs, generator, True), 1),
        MM: (product_chain(*shapes), 1),
        PEAK: at_peak(chain_flops(*shapes)),
    } | peers
    report.add(
        make_row(
            f"chains of {n} envs, chunk 4 x 8, {name}",
            "ms",
            in_turns(work, args.slice, time.thread_time),
            PRODUCTS,
            [*peers],
            missing,
            lambda ours, of_limit, over_peer: [at_least("over peer", over_peer, 1)] * bool(peers),
            clock=CPU,
            work="chunks, trace and log-probs; from one seed every side gives the same",
            no_peer="" if args.peers else "--no-peers",
        )
    )


def update(args: "BenchOptions", report: Report, name: str, o: PolicyOptions, size: int) -> None:
    """Re-scoring a minibatch, backward pass, clipping and AdamW, per re-scored transition."""
    spec = CHAIN_SPEC
    size = min(size, 16 * args.envs) if args.envs else size
    policy, generator = make_policy(o, spec, 0), torch.Generator().manual_seed(0)
    assert isinstance(policy, ChainPolicy)
    plain, obs, adv = PlainChain(policy), {"state": torch.randn(size, spec.state)}, torch.randn(size)
    chunk, joint = policy.act(obs, generator, True), o.kind == "flow"
    rules, params = Rules(joint, 0.2, 0.2), [p for p in policy.parameters() if p.requires_grad]
    opt = make_adam(params, 1e-5)
    trace = (chunk.trace["x"].contiguous(), chunk.trace["x_next"].contiguous(), chunk.trace["k"].contiguous())

    def ours() -> Tensor:
        new, _ = policy.score(policy.encode(obs), chunk.trace)
        descend(surrogate(new, chunk.logp, adv, rules, 3.0)[0], params, opt, 1.0)
        return new

    work = {
        "ours": (ours, size),
        MM: (product_update(size * policy.factors, sizes(o, policy)), size),
        PEAK: _each(at_peak(update_flops(size * policy.factors, sizes(o, policy))), size),
    }
    peers, missing, torch_is = [], {}, versioned("torch")
    if args.peers:
        forms = {f"plain modules, {torch_is} eager": lambda m: m}
        if args.quick:
            missing["torch.compile"] = "left out by --quick (it compiles for a minute)"
        else:
            forms[f"plain modules, {torch_is} torch.compile"] = lambda m: torch.compile(m, dynamic=False)
        for label, form in forms.items():
            work[label] = (plain_update(plain, form, obs["state"], trace, chunk.logp, adv, joint), size)
            peers.append(label)
        right = policy.score(policy.encode(obs), chunk.trace)[0]
        assert torch.allclose(plain.score(obs["state"], *trace), right, atol=1e-2), (
            "the peer gives other densities"
        )
    report.add(
        make_row(
            f"PPO update, {name}, minibatch {size}, per re-scored transition",
            "us",
            in_turns(work, args.slice, time.thread_time),
            PRODUCTS,
            peers,
            missing,
            lambda ours, of_limit, over_peer: [at_least("over peer", over_peer, 1)] * bool(peers),
            clock=CPU,
            work=f"{policy.factors} step{'s' * (policy.factors > 1)} of a chain re-scored on every side, "
            "the densities compared; backward, norm, AdamW",
            no_peer="" if args.peers else "--no-peers",
        )
    )


def _each(work: tuple[Callable[[], object], float], units: float) -> tuple[Callable[[], object], float]:
    return work[0], work[1] * units


def sizes(o: PolicyOptions, policy) -> list[int]:
    """Widths of the head as one MLP on [state, x]."""
    return [policy.spec.state + policy.chunk, *[o.hidden] * o.layers, policy.chunk]


def plain_update(
    plain: PlainChain,
    form: Callable,
    state: Tensor,
    trace: tuple[Tensor, ...],
    logp_old: Tensor,
    adv: Tensor,
    joint: bool,
) -> Callable[[], None]:
    """One PPO step of a copy of the plain policy; form: how its score is compiled."""
    model = copy.deepcopy(plain)
    params = [p for n, p in model.named_parameters() if not n.startswith("base")]
    opt = torch.optim.AdamW(params, 1e-5)

    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *args: Tensor) -> Tensor:
            return self.model.score(*args)

    score = form(Score())

    def call() -> None:
        log_ratio = score(state, *trace) - logp_old
        ratio = (log_ratio.sum(1, keepdim=True) if joint else log_ratio).exp()
        gain = adv[:, None]
        loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()

    return call


def robot(args: "BenchOptions", report: Report) -> None:
    """One chunk of one robot, from a NumPy state: weights carried by NumPy, and the torch policy."""
    o, spec = ROBOT, ROBOT_SPEC
    policy, generator = make_policy(o, spec, 0), torch.Generator().manual_seed(0)
    assert isinstance(policy, ChainPolicy)
    rng = np.random.default_rng(0)
    actor = NumpyActor({k: v.numpy() for k, v in policy.state_dict().items()}, asdict(o), asdict(spec))
    state = rng.standard_normal(spec.state, dtype=np.float32)
    obs, d = {"state": torch.from_numpy(state[None])}, policy.chunk
    calls: dict[str, Callable[[], object]] = {
        "numpy": lambda: actor.act(state, rng=rng),
        "torch": lambda: policy.act(obs, generator, False),
    }
    calls |= one_row(sizes(o, policy), o, rng)
    limits = dict.fromkeys(list(calls)[2:], BARE)
    peers, missing = [], {}
    if args.peers:
        chunk = PlainChunk(PlainChain(policy)).eval()
        noise = rng.standard_normal((1, d), dtype=np.float32)
        forms, missing = compiled_forms(chunk, (obs["state"], torch.from_numpy(noise)), args.quick)
        forms = {f"{versioned('torch')} eager": chunk} | forms
        right = actor.act(state, noise=noise)
        for name, form in forms.items():
            got = form(obs["state"], torch.from_numpy(noise)).detach().view(o.horizon, -1).numpy()
            assert np.allclose(got, right, atol=1e-4), f"{name} gives another chunk than NumPy"
            calls[f"plain modules, {name}"] = _drawing(form, state[None], d, rng)
        peers = [f"plain modules, {name}" for name in forms]
    times = in_turns({k: (call, 1) for k, call in calls.items()}, args.slice, time.thread_time)
    for name, label in (("numpy", "NumPy alone"), ("torch", "the torch policy")):

        def bars(ours: float, of_limit: float, over_peer: float, name=name) -> list[Bar]:
            wanted = [at_most("us", ours, 100)] if name == "numpy" else []
            return wanted + [at_least("over peer", over_peer, 1)] * bool(peers)

        report.add(
            make_row(
                f"one chunk 16 x 7, K = 4, {label}",
                "us",
                times | {"ours": times[name]},
                limits,
                peers,
                missing,
                bars,
                clock=CPU,
                work="a state in, fresh noise, a chunk out; every peer gives NumPy's chunk for one noise",
                no_peer="" if args.peers else "--no-peers",
            )
        )


def _drawing(form: Callable, state: np.ndarray, d: int, rng: np.random.Generator) -> Callable[[], object]:
    """A chunk of fresh noise, arrays on both ends."""
    if isinstance(form, OnnxForm):
        return lambda: form.run(state, rng.standard_normal((1, d), dtype=np.float32))

    def call() -> object:
        with torch.inference_mode():
            noise = rng.standard_normal((1, d), dtype=np.float32)
            return form(torch.from_numpy(state), torch.from_numpy(noise)).numpy()

    return call


def one_row(widths: list[int], o: PolicyOptions, rng: np.random.Generator) -> dict[str, Callable[[], None]]:
    """The products of a chain of one row through NumPy and through torch."""
    weights = [rng.standard_normal((a, b), dtype=np.float32) for a, b in pairwise(widths)]
    rows = [(np.ones(len(w), np.float32), w, np.empty(w.shape[1], np.float32)) for w in weights]
    there = [
        (torch.ones(len(w)), torch.from_numpy(w).t().contiguous(), torch.empty(w.shape[1])) for w in weights
    ]

    def by_numpy() -> None:
        for _ in range(o.denoise_steps):
            for x, w, out in rows:
                np.dot(x, w, out=out)

    def by_torch() -> None:
        for _ in range(o.denoise_steps):
            for x, w, out in there:
                torch.mv(w, x, out=out)

    return {"np.dot of the same vectors": by_numpy, "torch.mv of the same vectors": by_torch}
