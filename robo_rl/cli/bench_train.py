"""`robo_rl bench train`: online RL end to end, against the bound of its bare parts and against Stable-Baselines3.

The bound of an env step is the time of the bare simulator (`Batch` alone) plus that of the bare update (plain modules,
their loss, AdamW, on data that lies ready), each at its fastest on this machine; for chains also the bare matrix
products of sampling. Acting, credit, minibatches, statistics and metrics are what is above the bound.
"""

import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from robo_rl.cli.bench_policy import product_chain
from robo_rl.cli.bench_rows import Bar, Report, at_least, in_turns, make_row
from robo_rl.cli.presets import preset
from robo_rl.cli.train import Train, make_env, obs_spec
from robo_rl.policies import make_policy
from robo_rl.policies.nets import mlp
from robo_rl.rollout import Collector

if TYPE_CHECKING:
    from robo_rl.cli.bench import Bench

ROUNDS = 5
MANY = 4  # bare updates of one call


def measure(args: "Bench", report: Report) -> None:
    """All rows of `robo_rl bench train`, or those of --task."""
    threads = torch.get_num_threads()
    try:
        if args.task in ("", "HalfCheetah-v5"):
            ppo(args, report)
        if args.task in ("", "Hopper-v5"):
            for sim_threads in (1, 2):
                pi_rl(args, report, sim_threads)
        if args.task not in ("", "HalfCheetah-v5", "Hopper-v5"):
            report.skip(args.task, "bench train measures HalfCheetah-v5 (ppo) and Hopper-v5 (pi_rl)")
    finally:
        torch.set_num_threads(threads)


class Loop:
    """What `robo_rl train` repeats: a rollout, an update. It switches to its own number of torch threads."""

    def __init__(self, t: Train):
        self.t = t
        self.env = make_env(t, t.envs)
        self.policy = make_policy(t.policy, obs_spec(self.env, False), 0)
        self.learner = importlib.import_module(f"robo_rl.algos.{t.algo}").make(self.policy, t.rl, 0)
        self.collector = Collector(self.env, self.policy, t.rl.gamma, 1)
        self.steps_per_call = t.envs * t.rl.decisions * t.policy.execute

    def __call__(self) -> None:
        torch.set_num_threads(self.t.torch_threads)
        rollout = self.collector.collect(self.learner.sampler, self.t.rl.decisions)
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


def turns(args: "Bench", loop: Loop, bare: Bare, peer: "tuple[str, Callable[[], object], float] | None"):
    """Seconds per env step of ours, the bound and the peer, in turns."""
    rounds = []
    share = args.slice / ROUNDS / (3 if peer else 2)
    for warm in (loop, peer[1]) if peer else (loop,):
        warm()
    for _ in range(2 if args.quick else ROUNDS):
        row = {"ours": _once(loop, loop.steps_per_call, share), "bare simulator and bare update": bare.turn(share)}
        if peer:
            row[peer[0]] = _once(peer[1], peer[2], share)
        rounds.append(row)
    return {k: np.array([r[k] for r in rounds]) for k in rounds[0]}


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


# ---- PPO on HalfCheetah ------------------------------------------------------------------------------------------


def ppo(args: "Bench", report: Report) -> None:
    """64 envs x 32 steps, minibatch 512, 5 epochs, two layers of 256 tanh units for actor and critic."""
    t = preset("mujoco", "HalfCheetah-v5", "ppo", "state", "full")
    t = replace(t, envs=args.envs or 64, torch_threads=2, threads=2,
                policy=replace(t.policy, hidden=256, layers=2, activation="tanh"),
                rl=replace(t.rl, decisions=32, minibatch=512, epochs=5))
    loop = Loop(t)
    peer = sb3(args, report, t) if args.peers else None
    sizes = [loop.policy.spec.state, *[256] * 2]
    size = min(t.rl.minibatch, t.envs * t.rl.decisions)
    bare = Bare(_sim(t), update_work(bare_update([*sizes, loop.policy.chunk], [*sizes, 1], size, "tanh"),
                                     size / t.rl.epochs, args.quick))
    times = turns(args, loop, bare, peer[:3] if peer else None)

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_least("of limit", of_limit, 0.8)] + ([at_least("over peer", over_peer, 1.35)] if peer else [])
    report.add(make_row(f"PPO, HalfCheetah-v5, {t.envs} envs x 32 steps, end to end", "steps/s", times,
                        "bare simulator and bare update", peer[0] if peer else "", bars,
                        recorded={"the limit": 19400, "Stable-Baselines3": 11000, "rsl_rl": 11000,
                                  "sample-factory, asynchronous": 11700, "CleanRL": 5250}, note=stages(loop)))
    if peer:
        peer[3]()


def bare_update(actor: list[int], critic: list[int], size: int, act: str) -> tuple[Callable[[], None], ...]:
    """One minibatch of plain PPO on tensors that lie ready, as (actor's step, critic's): MLP, loss, backward, fused
    AdamW, nothing else."""
    pi, v, log_std = mlp(actor, act), mlp(critic, act), nn.Parameter(torch.zeros(actor[-1]))
    opts = [torch.optim.AdamW([*pi.parameters(), log_std], 1e-5, fused=True),
            torch.optim.AdamW(v.parameters(), 1e-5, fused=True)]
    x, state, a = torch.randn(size, actor[0]), torch.randn(size, critic[0]), torch.randn(size, actor[-1])
    logp_old, adv, returns = torch.randn(3, size)

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


def update_work(steps: tuple[Callable[[], None], ...], units: float,
                quick: bool) -> dict[str, tuple[Callable[[], object], float]]:
    """Ways to do MANY bare updates of `units` env steps each: in turn on one thread, side by side, on two threads."""
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


def _sim(t: Train) -> Callable[[float], float]:
    from sims.mujoco import rates
    return lambda seconds: 1 / rates(t.task, t.envs, t.threads, seconds / 3)["raw"]


def _threads(k: int, call: Callable[[], object]) -> Callable[[], object]:
    def run():
        torch.set_num_threads(k)
        call()
    return run


def _thread_counts() -> tuple[int, ...]:
    return (1, 2) if (os.cpu_count() or 1) > 1 else (1,)


def sb3(args: "Bench", report: Report, t: Train) -> "tuple[str, Callable[[], object], float, Callable[[], None]] | None":
    """Stable-Baselines3's PPO on the same job in its fastest setting: (name, one iteration, env steps of it, close)."""
    if importlib.util.find_spec("stable_baselines3") is None:
        report.say("  no peer: Stable-Baselines3 is not installed (pip install 'robo_rl[bench]')")
        return None
    import gymnasium
    import mujoco
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
    mujoco.set_mju_user_warning(lambda text: None)  # one line of a deprecated XML attribute per env and process
    steps = t.envs * t.rl.decisions
    width = [t.policy.hidden] * t.policy.layers

    def build(kind: str, threads: int):
        makers = [lambda: gymnasium.make(t.task, disable_env_checker=True)] * t.envs
        env = DummyVecEnv(makers) if kind == "DummyVecEnv" else SubprocVecEnv(makers, start_method="fork")
        torch.set_num_threads(threads)
        model = PPO("MlpPolicy", env, n_steps=t.rl.decisions, batch_size=min(t.rl.minibatch, steps), device="cpu",
                    n_epochs=t.rl.epochs, seed=0,
                    policy_kwargs={"net_arch": {"pi": width, "vf": width}, "activation_fn": nn.Tanh})
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
            report.say(f"  Stable-Baselines3, {kind}, {threads} thread{'s' * (threads > 1)}: "
                       f"{1 / found[-1][0]:,.0f} steps/s")
    _, kind, threads = min(found)
    iterate, close = build(kind, threads)
    return f"Stable-Baselines3, {kind}, {threads} thread{'s' * (threads > 1)}", iterate, steps, close


# ---- pi_RL on Hopper ---------------------------------------------------------------------------------------------


def pi_rl(args: "Bench", report: Report, sim_threads: int) -> None:
    """40 envs, chunk 4, K = 4, three layers of 256, 5 epochs; torch on one thread."""
    t = preset("mujoco", "Hopper-v5", "pi_rl", "state", "full")
    t = replace(t, envs=args.envs or 40, torch_threads=1, threads=sim_threads,
                policy=replace(t.policy, horizon=4, execute=4, denoise_steps=4, hidden=256, layers=3),
                rl=replace(t.rl, decisions=32, minibatch=1280, epochs=5))
    loop = Loop(t)
    o, spec, chunk = t.policy, loop.policy.spec, loop.policy.chunk
    body, size = [o.hidden] * o.layers, min(t.rl.minibatch, t.envs * t.rl.decisions)
    products = product_chain(t.envs, spec.state, chunk, o.hidden, o.layers, o.denoise_steps)
    update = update_work(bare_update([spec.state + chunk, *body, chunk], [spec.state, *body, 1], size, o.activation),
                         size * o.execute / t.rl.epochs, True)
    bare = Bare(_sim(t), {"sampling": (_threads(1, products), t.envs * o.execute),
                          "update": update["update, 1 thread"]})

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_least("steps/s", ours, 2.5 * 5330), at_least("of limit", of_limit, 0.8)]
    report.add(make_row(
        f"pi_rl, Hopper-v5, {t.envs} envs, chunk 4, K = 4, {sim_threads} simulator thread{'s' * (sim_threads > 1)}",
        "steps/s", turns(args, loop, bare, None), "bare simulator and bare update", bars=bars,
        recorded={"ReinFlow": 5330, "DPPO": 3155, "DPPO, K = 10": 1605}, note=stages(loop)))
