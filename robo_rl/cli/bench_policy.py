"""`robo_rl bench policy`: sampling chains, re-scoring them in PPO updates, and one robot's chunk, each on one thread.

The limit is the bare chain of matrix products of the same shapes, through the fastest plain call torch (or NumPy, for
one robot) has. The peer does the same job with plain modules: `nn.Sequential` on `torch.cat`, time embedding and state
product made anew at every step. Times are CPU times of the measuring thread, so that a busy machine counts little.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.algos.credit import descend, make_adam
from robo_rl.algos.onpolicy import Rules, surrogate
from robo_rl.cli.bench_rows import Bar, Report, at_least, at_most, in_turns, make_row
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.nets import mlp, time_features
from robo_rl.policies.numpy_actor import NumpyActor
from robo_rl.policies.policy import ChainPolicy

if TYPE_CHECKING:
    from robo_rl.cli.bench import Bench

ENVS, MINIBATCHES = 256, (512, 1024, 2048, 4096)
CHAIN = PolicyOptions(horizon=4, execute=4, denoise_steps=4, hidden=256, layers=3)
CHAIN_SPEC = ObsSpec(state=32, action=8)
ROBOT = PolicyOptions(horizon=16, execute=16, denoise_steps=4, hidden=256, layers=3)
ROBOT_SPEC = ObsSpec(state=32, action=7)
RULES = Rules(True, 0.2, 0.2)


class PlainFlow(nn.Module):
    """The same function as a flow `ChainPolicy` in plain modules; its first layer is one matrix on [state, x, time]."""

    def __init__(self, policy: ChainPolicy):
        super().__init__()
        head, o = policy.head, policy.options
        self.steps, self.shape, self.level = o.denoise_steps, (o.horizon, policy.spec.action), o.noise_level
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU())
        self.time.load_state_dict({k: v for k, v in head.from_time.state_dict().items() if k.startswith("0.")})
        d = policy.chunk
        self.net = mlp([policy.spec.state + d + 64] + [o.hidden] * o.layers + [d], o.activation)
        linears = [m for m in self.net if isinstance(m, nn.Linear)]
        with torch.no_grad():
            linears[0].weight.copy_(torch.cat([head.from_context.weight, head.from_x.weight, head.from_time[2].weight], 1))
            linears[0].bias.copy_(head.from_context.bias)
            for mine, theirs in zip(linears[1:], [*head.body, head.out], strict=True):
                mine.load_state_dict(theirs.state_dict())

    def velocity(self, state: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """state [B,S], x [B,D], t [B] -> [B,D]."""
        return self.net(torch.cat([state, x, self.time(time_features(t))], -1))

    def step(self, x: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std of the Flow-SDE step from t [B]."""
        t, d = t[:, None], 1 / self.steps
        sigma = self.level * torch.sqrt(t / (1 - torch.where(t == 1, 1 - d, t)))
        x0, x1 = x - t * v, x + (1 - t) * v
        return (1 - t + d) * x0 + (t - d - sigma**2 * d / (2 * t)) * x1, sigma * math.sqrt(d)

    @torch.no_grad()
    def act(self, state: Tensor, generator: torch.Generator, explore: bool) -> tuple[Tensor, ...]:
        """One random step per row if exploring -> (chunk [B,D], x before, x after, step [B], logp [B])."""
        b = len(state)
        x = torch.randn(b, math.prod(self.shape), generator=generator)
        draw = torch.randint(0, self.steps, (b,), generator=generator)
        noise = torch.randn(x.shape, generator=generator) if explore else None
        before, after, logp = torch.empty_like(x), torch.empty_like(x), torch.zeros(b)
        for k in range(self.steps):
            t = torch.full((b,), 1 - k / self.steps)
            v = self.velocity(state, x, t)
            x_next = x - v / self.steps
            if explore:
                mean, std = self.step(x, v, t)
                mine = (draw == k)[:, None]
                x_next = torch.where(mine, mean + std * noise, x_next)
                before, after = torch.where(mine, x, before), torch.where(mine, x_next, after)
                logp = torch.where(draw == k, torch.distributions.Normal(mean, std).log_prob(x_next).sum(-1), logp)
            x = x_next
        return x, before, after, draw, logp

    def score(self, state: Tensor, before: Tensor, after: Tensor, draw: Tensor) -> Tensor:
        """Log-density of the random steps, [B]."""
        t = 1 - draw / self.steps
        mean, std = self.step(before, self.velocity(state, before, t), t)
        return torch.distributions.Normal(mean, std).log_prob(after).sum(-1)


def product_chain(rows: int, context: int, chunk: int, hidden: int, layers: int, steps: int) -> Callable[[], None]:
    """The matrix products of a chain of `steps`: the context's once, then x, body and out at every step."""
    body = [torch.randn(hidden, hidden) for _ in range(layers - 1)]
    weights, x = [torch.randn(chunk, hidden), *body, torch.randn(hidden, chunk)], torch.randn(rows, chunk)
    state, first = torch.randn(rows, context), torch.randn(context, hidden)
    buffers = [torch.empty(rows, w.shape[1]) for w in weights]

    def call() -> None:
        torch.mm(state, first, out=buffers[0])
        for _ in range(steps):
            h = x
            for w, out in zip(weights, buffers, strict=True):
                h = torch.mm(h, w, out=out)
    return call


def product_update(rows: int, sizes: list[int]) -> Callable[[], None]:
    """The matrix products of one forward and backward pass through an MLP of `sizes`."""
    weights = [torch.randn(a, b) for a, b in pairwise(sizes)]
    acts = [torch.randn(rows, s) for s in sizes]
    slopes, grads = [torch.empty(rows, s) for s in sizes], [torch.empty_like(w) for w in weights]

    def call() -> None:
        for i, w in enumerate(weights):
            torch.mm(acts[i], w, out=slopes[i + 1])
        for i in range(len(weights) - 1, -1, -1):
            torch.mm(acts[i].t(), acts[i + 1], out=grads[i])
            if i:
                torch.mm(acts[i + 1], weights[i].t(), out=slopes[i])
    return call


def measure(args: "Bench", report: Report) -> None:
    """All rows of `robo_rl bench policy`."""
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        report.say("NumPy may use several threads; for one set OPENBLAS_NUM_THREADS=1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sampling(args, report)
        for size in (2048,) if args.quick else MINIBATCHES:
            update(args, report, size)
        robot(args, report)
    finally:
        torch.set_num_threads(threads)


def sampling(args: "Bench", report: Report) -> None:
    """Chains of all envs with one random step each, log-probs and trace."""
    o, spec, n = CHAIN, CHAIN_SPEC, args.envs or ENVS
    policy, generator = make_policy(o, spec, 0), torch.Generator().manual_seed(0)
    plain, obs = PlainFlow(policy), {"state": torch.randn(n, spec.state)}
    bare = product_chain(n, spec.state, policy.chunk, o.hidden, o.layers, o.denoise_steps)
    work = {"ours": (lambda: policy.act(obs, generator, True), 1), "matrix products": (bare, 1)}
    if args.peers:
        work["plain modules"] = (lambda: plain.act(obs["state"], generator, True), 1)

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_most("ms", ours, 4.5), at_least("of limit", of_limit, 0.71)]
    report.add(make_row(f"chains of {n} envs, chunk 4 x 8, K = 4", "ms", in_turns(work, args.slice, time.thread_time),
                        "matrix products", "plain modules" if args.peers else "", bars,
                        recorded={"the limit": 3.2, "ReinFlow": 5.3, "DPPO": 7.4}))


def update(args: "Bench", report: Report, size: int) -> None:
    """Re-scoring a minibatch, backward pass and AdamW, per transition."""
    o, spec = CHAIN, CHAIN_SPEC
    size = min(size, 16 * args.envs) if args.envs else size
    policy, generator = make_policy(o, spec, 0), torch.Generator().manual_seed(0)
    plain, obs, adv = PlainFlow(policy), {"state": torch.randn(size, spec.state)}, torch.randn(size)
    chunk = policy.act(obs, generator, True)
    params, plain_params = list(policy.parameters()), list(plain.parameters())
    opt, plain_opt = make_adam(params, 1e-5), torch.optim.AdamW(plain_params, 1e-5)
    _, before, after, draw, logp = plain.act(obs["state"], generator, True)

    def ours() -> None:
        new, _ = policy.score(policy.encode(obs), chunk.trace)
        descend(surrogate(new, chunk.logp, adv, RULES, 3.0)[0], params, opt, 1.0)

    def theirs() -> None:
        ratio = (plain.score(obs["state"], before, after, draw) - logp).exp()
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        plain_opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain_params, 1.0)
        plain_opt.step()
    sizes = [spec.state + policy.chunk, *[o.hidden] * o.layers, policy.chunk]
    work = {"ours": (ours, size), "matrix products": (product_update(size, sizes), size)}
    if args.peers:
        work["plain modules"] = (theirs, size)

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_most("us", ours, 17), at_least("of limit", of_limit, 0.65)] if size == 2048 else []
    report.add(make_row(f"PPO update, minibatch {size}, per re-scored transition", "us",
                        in_turns(work, args.slice, time.thread_time), "matrix products",
                        "plain modules" if args.peers else "", bars,
                        recorded={"the limit": 11, "ReinFlow": 21, "DPPO": 36}))


def robot(args: "Bench", report: Report) -> None:
    """One chunk of one robot: weights carried by NumPy, and the torch policy."""
    o, spec = ROBOT, ROBOT_SPEC
    policy, generator = make_policy(o, spec, 0), torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    actor = NumpyActor({k: v.numpy() for k, v in policy.state_dict().items()}, asdict(o), asdict(spec))
    plain, state = PlainFlow(policy), rng.standard_normal(spec.state, dtype=np.float32)
    obs = {"state": torch.from_numpy(state[None])}
    sizes = [spec.state + policy.chunk, *[o.hidden] * o.layers, policy.chunk]
    chain = [(np.ones(a, np.float32), rng.standard_normal((a, b), dtype=np.float32), np.empty(b, np.float32))
             for a, b in pairwise(sizes)]

    def bare() -> None:
        for _ in range(o.denoise_steps):
            for x, weight, out in chain:
                np.dot(x, weight, out=out)
    calls = {"numpy": lambda: actor.act(state, rng=rng), "torch": lambda: policy.act(obs, generator, False),
             "vector products": bare}
    if args.peers:
        calls["plain modules"] = lambda: plain.act(obs["state"], generator, False)
    times = in_turns({k: (call, 1) for k, call in calls.items()}, args.slice, time.thread_time)
    for name in ("numpy", "torch"):
        def bars(ours: float, of_limit: float, over_peer: float, name=name) -> list[Bar]:
            return [at_most("us", ours, 100)] if name == "numpy" else []
        label = "NumPy alone" if name == "numpy" else "the torch policy"
        report.add(make_row(f"one chunk 16 x 7, K = 4, {label}", "us", times | {"ours": times[name]}, "vector products",
                            "plain modules" if args.peers else "", bars,
                            recorded={"eager modules": 160, "compiled": 123, "plain NumPy": 73}))
