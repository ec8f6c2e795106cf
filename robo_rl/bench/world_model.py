"""`robo_rl bench wm`: a world model as an env against the simulator it stands for, in one run."""

import time
from typing import TYPE_CHECKING

import numpy as np

from robo_rl.bench.rows import BARE, LEAST, Report, at_least, columns, make_row, versioned
from robo_rl.errors import UserError

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions

CHUNK = 8
PRODUCTS = "the networks' matrix products"


def measure(args: "BenchOptions", report: Report) -> None:
    """A latent model of random weights (its speed does not depend on them), N = 256, on one thread:
    against the bare products of its networks, and against the real env with states and with two cameras
    of 64 pixels."""
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
    nets = [bare_products(net, n) for net in (model.net, model.heads)]

    def products() -> None:
        for _ in range(CHUNK):
            for net in nets:
                net()

    mujoco = versioned("mujoco")
    peers, missing = {f"{mujoco}, our env, states": (real, n, False)} if args.peers else {}, {}
    if args.peers:
        try:
            cameras = sims.make("mujoco", task, min(n, 32), obs="rgb", threads=1)
            cameras.reset(seed=0)
            peers |= {
                f"{mujoco}, our env, rgb every step": (cameras, cameras.num_envs, False),
                f"{mujoco}, our env, rgb once in {CHUNK} steps": (cameras, cameras.num_envs, True),
            }
        except UserError as e:
            missing["the real env with cameras"] = str(e)
    found = []
    for _ in range(LEAST):
        row = {"ours": seconds(lambda: play(dream, actions)) / n, PRODUCTS: seconds(products) / n}
        for name, (env, lanes, lazy) in peers.items():
            row[name] = seconds(lambda env=env, lazy=lazy: play(env, actions, lazy)) / lanes
        found.append(row)
    times = {k: v / CHUNK for k, v in columns(found).items()}
    drawn = [float(np.median(v / times["ours"])) for k, v in times.items() if "every step" in k]
    report.add(
        make_row(
            f"latent model of {task}, N = {n}, 4 x 3 x 80 gated, 1 thread",
            "steps/s",
            times,
            {PRODUCTS: BARE},
            [*peers],
            missing,
            lambda *_: [at_least("over rgb every step", x, 5) for x in drawn],
            clock="CPU time of all threads",
            work=f"a reset and {CHUNK} control steps of every env with the same actions; the model gives "
            "a state, reward and success, and no picture",
            no_peer="" if args.peers else "--no-peers",
        )
    )
    for env in (dream, *(e for e, _, _ in peers.values())):
        env.close()


def untrained(env):
    """A calibrated model of the env's shapes, of the size that the README's are."""
    from world_models.latent import Latent, LatentOptions
    from world_models.model import Frames, WorldSpec

    s, n = env.single_observation_space["state"].shape[0], 64
    obs, _ = env.reset(seed=0)
    spec = WorldSpec(
        kind="latent",
        control=env.spec,
        state=s,
        tasks=(str(obs["task"][0]),),
        sparse=True,
        horizon=env.spec.max_steps,
        data="none: for its speed",
    )
    model = Latent(spec, LatentOptions(members=4, hidden=80))
    rows = np.resize(obs["state"], (n, s))
    model.frames = Frames({"state": rows}, np.zeros(n, np.int64), np.ones(n, bool), np.arange(n) % 10 == 9)
    return model


def bare_products(net, rows: int):
    """The batched products of a network of members, into buffers that lie ready."""
    import torch

    weights = [p.detach() for p in net.parameters() if p.shape[1] > 1]  # the others are biases
    given = [torch.randn(len(w), rows, w.shape[1]) for w in weights]
    buffers = [torch.empty(len(w), rows, w.shape[2]) for w in weights]

    def call() -> None:
        for x, w, out in zip(given, weights, buffers, strict=True):
            torch.bmm(x, w, out=out)

    return call


def play(env, actions: np.ndarray, lazy: bool = False) -> None:
    """Reset and a chunk of steps; `lazy`: images of the last step alone."""
    env.reset(seed=0)
    for j, a in enumerate(actions):
        if lazy:
            env.images = j == len(actions) - 1
        env.step(a[: env.num_envs])
    if lazy:
        env.images = True


def seconds(call) -> float:
    """CPU time of all threads, for a simulator and a renderer have theirs: on a busy machine that is what
    a call costs."""
    began = time.process_time()
    call()
    return max(time.process_time() - began, 1e-9)
