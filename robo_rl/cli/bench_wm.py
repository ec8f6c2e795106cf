"""`robo_rl bench wm`: a world model as an env against the simulator it stands for, in one run."""

import time
from typing import TYPE_CHECKING

import numpy as np

from robo_rl.cli.bench_rows import Report, at_least, make_row
from robo_rl.cli.bench_sim import all_of, columns
from robo_rl.errors import UserError

if TYPE_CHECKING:
    from robo_rl.cli.bench import Bench

ROUNDS, CHUNK = 5, 8


def measure(args: "Bench", report: Report) -> None:
    """A latent model of random weights (its speed does not depend on them), N = 256, on one thread: against the bare
    products of its networks, and against the real env with states and with two cameras of 64 pixels."""
    import torch

    import sims
    torch.set_num_threads(1)
    n, task = args.envs or 256, args.task or "pick_cube"
    real = sims.make("mujoco", task, n, threads=1)
    model = untrained(real)
    from world_models.env import WorldEnv
    dream = WorldEnv(model, n)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (CHUNK, *real.action_space.shape)).astype(np.float32)
    x = torch.randn(n, model.net.weights[0].shape[1])
    y = torch.randn(n, model.heads.weights[0].shape[1])

    def products() -> None:
        with torch.no_grad():
            for _ in range(CHUNK):
                model.net(x)
                model.heads(y)
    peers = {"mujoco, states": (real, n, False)}
    try:
        cameras = sims.make("mujoco", task, min(n, 32), obs="rgb", threads=1)
        cameras.reset(seed=0)
        peers |= {"mujoco, rgb every step": (cameras, cameras.num_envs, False),
                  f"mujoco, rgb once in {CHUNK} steps": (cameras, cameras.num_envs, True)}
    except UserError as e:
        report.skip("the real env with cameras", str(e))
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for _ in range(1 if args.quick else ROUNDS):
        ours, bare = seconds(lambda: play(dream, actions)) / n, seconds(products) / n
        for name, (env, lanes, lazy) in peers.items():
            rounds[name].append({"ours": ours, "the networks' products": bare,
                                 name: seconds(lambda env=env, lazy=lazy: play(env, actions, lazy)) / lanes})
    for name, rows in rounds.items():
        bars = all_of([lambda of_limit, over_peer: at_least("over peer", over_peer, 5)]) if "every" in name else None
        more = {} if bars is None else {"bars": bars}
        report.add(make_row(f"latent model of {task}, N = {n}, 4 x 3 x 128, 1 thread", "steps/s",
                            {k: v / CHUNK for k, v in columns(rows).items()}, "the networks' products", name, **more))
    for env in (dream, *(e for e, _, _ in peers.values())):
        env.close()


def untrained(env):
    """A calibrated model of the env's shapes, of the size that the README's are."""
    from world_models.latent import Latent, LatentOptions
    from world_models.model import Frames, WorldSpec
    s, n = env.single_observation_space["state"].shape[0], 64
    obs, _ = env.reset(seed=0)
    spec = WorldSpec(kind="latent", control=env.spec, state=s, tasks=(str(obs["task"][0]),), sparse=True,
                     horizon=env.spec.max_steps, data="none: for its speed")
    model = Latent(spec, LatentOptions(members=4, hidden=128))
    rows = np.resize(obs["state"], (n, s))
    model.frames = Frames({"state": rows}, np.zeros(n, np.int64), np.ones(n, bool), np.arange(n) % 10 == 9)
    return model


def play(env, actions: np.ndarray, lazy: bool = False) -> None:
    """Reset and a chunk of steps; `lazy`: images of the last step alone."""
    env.reset(seed=0)
    for j, a in enumerate(actions):
        if lazy:
            env.images = j == len(actions) - 1
        env.step(a[:env.num_envs])
    if lazy:
        env.images = True


def seconds(call) -> float:
    """CPU time of all threads, for a simulator and a renderer have theirs: on a busy machine that is what a call costs."""
    began = time.process_time()
    call()
    return max(time.process_time() - began, 1e-9)
