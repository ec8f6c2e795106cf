"""`robo_rl bench train`: online RL end to end, against the bound of its bare parts and against what one could
run instead.

The limit of an env step is the time of physics alone (as `bench sim` has it) plus that of the bare update
(plain modules, their loss, AdamW, on data that lies ready), each at its fastest on this machine; for chains
also the bare matrix products of sampling. Acting, credit, minibatches, statistics and metrics are what is
above it. The peers are Stable-Baselines3 in its fastest setting and a plain script on envpool
(`bench_script`), with as many gradient steps.
"""

import importlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.bench.plain import product_chain
from robo_rl.bench.rows import BARE, Bar, Report, at_least, columns, in_turns, lacking, make_row, versioned
from robo_rl.bench.script import scripts
from robo_rl.experiment.config import TrainConfig, on_policy_options
from robo_rl.experiment.envs import make_env, obs_spec
from robo_rl.experiment.recipes import recipe
from robo_rl.policies import make_policy
from robo_rl.policies.nets import mlp
from robo_rl.rollout import Collector

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions

ROUNDS = 5
BOUND = "physics alone and the bare update"
MANY = 4  # bare updates of one call
# of the chains, whatever the recipe of Hopper has
BODY: dict[str, Any] = {
    **{"horizon": 4, "execute": 4, "hidden": 256, "layers": 3},
    **{"activation": "relu", "predict": "velocity"},
}
CHAINS: dict[str, dict[str, Any]] = {
    "pi_rl": {"noise": "sde", "noise_steps": "one"},
    "reinflow": {"noise": "learned", "noise_steps": "all"},
    "dppo": {"finetune_steps": 5, "std_scale": 1.0, "std_floor": 0.1, "logp_reduction": "mean"},
}


def measure(args: "BenchOptions", report: Report) -> None:
    """All rows of `robo_rl bench train`, or those of --task."""
    threads = torch.get_num_threads()
    try:
        if args.task in ("", "HalfCheetah-v5"):
            ppo(args, report)
        if args.task in ("", "Hopper-v5"):
            for algo in CHAINS:
                chain(args, report, algo)
        if args.task not in ("", "HalfCheetah-v5", "Hopper-v5"):
            report.skip(
                args.task, "bench train measures HalfCheetah-v5 (ppo) and Hopper-v5 (pi_rl, reinflow, dppo)"
            )
    finally:
        torch.set_num_threads(threads)


class Loop:
    """What `robo_rl train` repeats: a rollout, an update. It switches to its own number of torch threads."""

    def __init__(self, t: TrainConfig):
        self.t = t
        self.env = make_env(t, t.envs)
        self.policy: Any = make_policy(t.policy, obs_spec(self.env, False), 0)
        self.learner = importlib.import_module(f"robo_rl.algos.{t.algo}").make(self.policy, t.rl, 0)
        self.collector = Collector(self.env, self.policy, on_policy_options(t).gamma, 1)
        self.steps_per_call, self.calls = t.envs * on_policy_options(t).decisions * t.policy.execute, 0

    @property
    def gradient_steps(self) -> int:
        """Of the actor, so far."""
        return max((int(s["step"]) for s in self.learner.actor_opt.state.values()), default=0)

    def __call__(self) -> None:
        self.calls += 1
        torch.set_num_threads(self.t.torch_threads)
        rollout = self.collector.collect(self.learner.sampler, on_policy_options(self.t).decisions)
        self.learner.update(rollout, 0.1)
        self.learner.after_collect(rollout)


@dataclass(frozen=True)
class Bare:
    """The parts of the bound, as seconds per env step."""

    sim: Callable[[float], float]
    work: dict[str, tuple[Callable[[], object], float]]

    def turn(self, seconds: float) -> float:
        """Seconds per env step of the simulator and of the fastest way to do each other part."""
        total = self.sim(seconds / (1 + len(self.work)))
        parts: dict[str, float] = {}
        for name, t in in_turns(self.work, seconds).items():
            part = name.split(",")[0]
            parts[part] = min(parts.get(part, np.inf), float(np.median(t)))
        return total + sum(parts.values())


@dataclass(frozen=True)
class Peer:
    """Another program on the same job: what iterates it, control steps of an iteration, what ends it."""

    name: str
    iterate: Callable[[], object]
    close: Callable[[], object]


def turns(args: "BenchOptions", loop: Loop, bare: Bare, peers: list[Peer]) -> dict[str, np.ndarray]:
    """Seconds per env step [repeats] of ours, the bound and the peers, in turns."""
    share = args.slice / ROUNDS / (2 + len(peers))
    for warm in (loop, *(p.iterate for p in peers)):
        warm()
    found = []
    for _ in range(3 if args.quick else ROUNDS):
        row = {"ours": _once(loop, loop.steps_per_call, share), BOUND: bare.turn(share)}
        found.append(row | {p.name: _once(p.iterate, loop.steps_per_call, share) for p in peers})
    return columns(found)


def script_peers(args: "BenchOptions", loop: Loop) -> list[Peer]:
    """The plain script, which takes as many gradient steps from as many control steps as ours."""
    if not args.peers:
        return []
    out = []
    for script in scripts(loop.t, loop.policy, loop.t.threads, args.quick, _thread_counts()):
        before = loop.gradient_steps, script.updates
        loop()
        script.iterate()
        took = loop.gradient_steps - before[0], script.updates - before[1]
        assert took[0] == took[1], f"ours took {took[0]} gradient steps, the script {took[1]}"
        out.append(Peer(script.name, script.iterate, script.close))
    return out


def _once(call: Callable[[], object], units: float, seconds: float) -> float:
    """Seconds per unit of work of a call that takes long: mean over about `seconds`, one call at least."""
    calls, began = 0, time.perf_counter()
    while not calls or time.perf_counter() - began < seconds:
        call()
        calls += 1
    return (time.perf_counter() - began) / (calls * units)


def stages(loop: Loop) -> str:
    """Where an iteration's time goes, in words."""
    loop.collector.timer.take()
    began = time.perf_counter()
    loop()
    total, seconds = time.perf_counter() - began, loop.collector.timer.take()
    rest = 1 - sum(seconds.values()) / total
    return ", ".join(f"{k} {v / total:.0%}" for k, v in (seconds | {"update and rest": rest * total}).items())


# ---- PPO on HalfCheetah ------------------------------------------------------------------------------------


def ppo(args: "BenchOptions", report: Report) -> None:
    """64 envs x 32 steps, minibatch 512, 5 epochs, two layers of 256 tanh units for actor and critic."""
    t = recipe("mujoco", "HalfCheetah-v5", "ppo", "state", "full")
    t = replace(
        t,
        envs=args.envs or 64,
        torch_threads=2,
        threads=2,
        policy=replace(t.policy, hidden=256, layers=2, activation="tanh"),
        rl=replace(t.rl, decisions=8 if args.quick else 32, minibatch=512, epochs=5),
    )
    loop = Loop(t)
    peers, missing = [], {}
    if args.peers:
        missing["sample-factory 2.1"] = (
            "it needs gymnasium below 1 and numpy below 2, so an interpreter of its own"
        )
        if why := lacking("stable_baselines3", "Stable-Baselines3"):
            missing["Stable-Baselines3"] = why
        else:
            peers.append(sb3(args, report, t))
        loop()
        peers += script_peers(args, loop)
    sizes = [loop.policy.spec.state, *[256] * 2]
    size = min(on_policy_options(t).minibatch, t.envs * on_policy_options(t).decisions)
    bare = Bare(
        _sim(t, args.quick),
        update_work(
            bare_update([*sizes, loop.policy.chunk], [*sizes, 1], size, "tanh"),
            size / on_policy_options(t).epochs,
            args.quick,
        ),
    )
    times = turns(args, loop, bare, peers)

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_least("of limit", of_limit, 0.8)] + [at_least("over peer", over_peer, 1)] * bool(peers)

    report.add(
        make_row(
            f"PPO, HalfCheetah-v5, {t.envs} envs x {on_policy_options(t).decisions} steps, end to end",
            "steps/s",
            times,
            {BOUND: BARE},
            [p.name for p in peers],
            missing,
            bars,
            note=stages(loop),
            work=_work(t),
            no_peer="" if args.peers else "--no-peers",
        )
    )
    for peer in peers:
        peer.close()


def _work(t: TrainConfig) -> str:
    """What every side does in an iteration."""
    o = on_policy_options(t)
    batches = -(-t.envs * o.decisions // o.minibatch)
    return (
        f"{t.envs * o.decisions * t.policy.execute} control steps, {o.epochs} x {batches} gradient steps "
        "of the actor (counted) and as many of the critic; ours also normalises, as the peers do not"
    )


def bare_update(
    actor: list[int], critic: list[int], size: int, act: str, states: int = 0
) -> tuple[Callable[[], None], ...]:
    """One minibatch of plain PPO on tensors that lie ready, as (actor's step, critic's): MLP, loss,
    backward, fused AdamW, nothing else. size: rows of the actor; states: those of the critic, if fewer."""
    pi, v, log_std = mlp(actor, act), mlp(critic, act), nn.Parameter(torch.zeros(actor[-1]))
    opts = [
        torch.optim.AdamW([*pi.parameters(), log_std], 1e-5, fused=True),
        torch.optim.AdamW(v.parameters(), 1e-5, fused=True),
    ]
    x, state, a = (
        torch.randn(size, actor[0]),
        torch.randn(states or size, critic[0]),
        torch.randn(size, actor[-1]),
    )
    (logp_old, adv), returns = torch.randn(2, size), torch.randn(states or size)

    def step(opt: torch.optim.Optimizer, loss: Tensor) -> None:
        opt.zero_grad()
        loss.backward()
        opt.step()

    def actor_step() -> None:
        logp = -(0.5 * ((a - pi(x)) / log_std.exp()).square() + log_std).sum(-1)
        ratio = (logp - logp_old).clamp(-1, 1).exp()
        step(opts[0], -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean())

    def critic_step() -> None:
        step(opts[1], (v(state).squeeze(-1) - returns).square().mean())

    return actor_step, critic_step


def update_work(
    steps: tuple[Callable[[], None], ...], units: float, quick: bool
) -> dict[str, tuple[Callable[[], object], float]]:
    """Ways to do MANY bare updates of `units` env steps each: in turn on one thread, side by side, on two
    threads."""

    def in_turn(threads: int) -> None:
        torch.set_num_threads(threads)
        for _ in range(MANY):
            for step in steps:
                step()

    def alone(step: Callable[[], None]) -> None:
        for _ in range(MANY):
            step()

    def side_by_side() -> None:
        torch.set_num_threads(1)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(alone, steps[1])
            alone(steps[0])
            other.result()

    ways = {"update, 1 thread": lambda: in_turn(1)}
    if len(_thread_counts()) > 1:
        ways["update, side by side"] = side_by_side
        if not quick:
            ways["update, 2 threads"] = lambda: in_turn(2)
    return {name: (way, MANY * units) for name, way in ways.items()}


def _sim(t: TrainConfig, quick: bool) -> Callable[[float], float]:
    """Seconds per env step of physics alone, over about some seconds."""
    from robo_rl.bench.sim import Stretch

    env: Any = make_env(t, t.envs)
    stretch = Stretch(env, t.threads, env.walker.frame_skip, quick)
    stretch.check()

    def measure(seconds: float) -> float:
        laps, end = [], time.perf_counter() + seconds
        while not laps or time.perf_counter() < end:
            laps.append(min(call()[0] for call in stretch.calls.values()) / stretch.units)
        return float(np.median(laps))

    return measure


def _threads(k: int, call: Callable[[], object]) -> Callable[[], object]:
    def run():
        torch.set_num_threads(k)
        call()

    return run


def _thread_counts() -> tuple[int, ...]:
    return (1, 2) if (os.cpu_count() or 1) > 1 else (1,)


def sb3(args: "BenchOptions", report: Report, t: TrainConfig) -> Peer:
    """Stable-Baselines3's PPO on the same job in its fastest setting."""
    import gymnasium
    import mujoco
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    mujoco.set_mju_user_warning(
        lambda text: None
    )  # one line of a deprecated XML attribute per env and process
    steps = t.envs * on_policy_options(t).decisions
    width = [t.policy.hidden] * t.policy.layers

    def build(kind: str, threads: int):
        makers = [lambda: gymnasium.make(t.task, disable_env_checker=True)] * t.envs
        env = DummyVecEnv(makers) if kind == "DummyVecEnv" else SubprocVecEnv(makers, start_method="fork")
        torch.set_num_threads(threads)
        model = PPO(
            "MlpPolicy",
            env,
            n_steps=on_policy_options(t).decisions,
            batch_size=min(on_policy_options(t).minibatch, steps),
            device="cpu",
            n_epochs=on_policy_options(t).epochs,
            seed=0,
            policy_kwargs={"net_arch": {"pi": width, "vf": width}, "activation_fn": nn.Tanh},
        )
        model.set_logger(Logger(None, []))  # no folder, no output

        def iterate() -> None:
            torch.set_num_threads(threads)
            model.learn(steps, reset_num_timesteps=False)

        return iterate, env.close

    found = []
    for kind in ("DummyVecEnv",) if args.quick else ("DummyVecEnv", "SubprocVecEnv"):
        for threads in (1,) if args.quick else _thread_counts():
            iterate, close = build(kind, threads)
            iterate()
            found.append((_once(iterate, steps, args.slice / 10), kind, threads))
            close()
            report.say(
                f"  Stable-Baselines3, {kind}, {threads} thread{'s' * (threads > 1)}: "
                f"{1 / found[-1][0]:,.0f} steps/s"
            )
    _, kind, threads = min(found)
    iterate, close = build(kind, threads)
    return Peer(
        f"{versioned('stable_baselines3')}, {kind}, {threads} thread{'s' * (threads > 1)}", iterate, close
    )


# ---- chains on Hopper --------------------------------------------------------------------------------------


def chain(args: "BenchOptions", report: Report, algo: str) -> None:
    """40 envs, chunk 4, three layers of 256, 5 epochs; torch on one thread. Every side re-scores as many
    steps of a chain."""
    t = recipe("mujoco", "Hopper-v5", algo, "state", "full")
    t = replace(
        t,
        envs=args.envs or 40,
        torch_threads=1,
        threads=2,
        policy=replace(t.policy, **BODY, **CHAINS[algo]),
        rl=replace(t.rl, decisions=8 if args.quick else 32, minibatch=1280, epochs=5),
    )
    loop = Loop(t)
    loop()
    o, spec, width = t.policy, loop.policy.spec, loop.policy.chunk
    body, size, factors = (
        [o.hidden] * o.layers,
        min(on_policy_options(t).minibatch, t.envs * on_policy_options(t).decisions),
        loop.policy.factors,
    )
    actor, critic = bare_update(
        [spec.state + width, *body, width], [spec.state, *body, 1], size * factors, o.activation, size
    )
    products = product_chain(t.envs, spec.state, width, o.hidden, o.layers, o.denoise_steps)
    update = update_work((actor, critic), size * o.execute / on_policy_options(t).epochs, True)
    bare = Bare(
        _sim(t, args.quick),
        {"sampling": (_threads(1, products), t.envs * o.execute), "update": update["update, 1 thread"]},
    )
    peers = script_peers(args, loop)
    report.add(
        make_row(
            f"{algo}, Hopper-v5, {t.envs} envs, chunk 4, {factors} of {o.denoise_steps} denoise steps learn",
            "steps/s",
            turns(args, loop, bare, peers),
            {BOUND: BARE},
            [p.name for p in peers],
            work=_work(t),
            note=stages(loop),
            bars=lambda ours, of_limit, over_peer: (
                [at_least("of limit", of_limit, 0.8)] * (algo == "pi_rl")
                + [at_least("over peer", over_peer, 1)] * bool(peers)
            ),
            no_peer="" if args.peers else "--no-peers",
        )
    )
    for peer in peers:
        peer.close()
