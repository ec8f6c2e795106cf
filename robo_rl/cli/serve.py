"""`robo_rl serve RUN`: a run's policy answers over TCP those who know its token; no pickle on the wire."""

import ipaddress
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from robo_rl.errors import UserError, in_range

TOKEN = "serve.token"  # of a run folder


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve the policy of a run, for robo_rl deploy --policy HOST:PORT. Clients prove that they know its token; nothing is
    encrypted: between machines go through ssh -L 7447:127.0.0.1:7447 MACHINE."""

    run: tyro.conf.Positional[str]
    """Run folder, or a checkpoint folder inside one."""
    checkpoint: str = "best"
    """best, last, sft, or the name of a folder below checkpoints/."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is reached from this machine alone."""
    port: int = 7447
    """0: any free one."""
    instruction: str = ""
    """What to do, for a policy that hears an instruction."""
    token: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """File with the token, made if it is not there (0600); "": RUN/serve.token. ROBO_RL_TOKEN goes before it."""
    clients: int = 16
    """Seats; who comes when all are taken is sent away."""
    idle: float = 600.0
    """s without a question after which a seat is free again."""
    seed: int = 0

    def __post_init__(self) -> None:
        in_range("--port", self.port, 0, 65535)
        in_range("--clients", self.clients, 1, 256)
        in_range("--idle", self.idle, 1, 1e6)
        in_range("--seed", self.seed, 0, 2**31)


def actor(run: str, checkpoint: str, seed: int, words: str = ""):
    """(act: observation -> rows [E, A], run's config, ObsSpec) of a run: NumPy where that carries it, else torch.

    words: the instruction, for a policy that hears one.
    """
    import numpy as np

    from robo_rl import checkpoint as checkpoints
    from robo_rl.experiment.evaluation import pick_checkpoint
    from robo_rl.experiment.train import run_config
    from robo_rl.policies import ObsSpec
    from robo_rl.policies.numpy_actor import NumpyActor

    where, folder = pick_checkpoint(Path(run), checkpoint)
    meta = checkpoints.read_meta(folder)
    spec = ObsSpec(**{k: tuple(v) if isinstance(v, list) else v for k, v in meta["policy"]["spec"].items()})
    config = run_config(where)
    if spec.language and not words:
        words = only_instruction(config)
    if meta["policy"]["options"]["kind"] == "flow" and not spec.views and not spec.language:
        net, rng = NumpyActor.load(folder), np.random.default_rng(seed)
        return lambda obs: net.act(obs["state"], rng=rng), config, spec
    import torch

    from robo_rl.policies import obs_tensors
    torch.set_num_threads(1)
    policy, _ = checkpoints.load_policy(folder)
    generator = torch.Generator().manual_seed(seed)

    def act(obs):
        seen = {k: np.array(x)[None] for k, x in obs.items()} | {"task": np.array([words])}
        return policy.act(obs_tensors(seen, policy.spec), generator, explore=False).actions[0].numpy()
    blank = {"state": np.zeros(spec.state, np.float32)} | {
        f"image/{v}": np.zeros((spec.image_size, spec.image_size, 3), np.uint8) for v in spec.views}
    for _ in range(2):  # the first calls take ten times as long as all others
        act(blank)
    generator.manual_seed(seed)
    return act, config, spec


def only_instruction(config) -> str:
    """What a run's policy is told where its task has one instruction; UserError where it has several."""
    from sims.mujoco.tasks import TASKS
    known = TASKS[config.task or "pick_cube"].instructions if config.sim == "mujoco" else ()
    if len(known) != 1:
        raise UserError("the run's policy hears an instruction: say it with --instruction"
                        + (f", for example {known[0]!r}" if known else ""))
    return known[0]


def run(args: Serve) -> int:
    """Listen until interrupted."""
    from robo_rl.experiment.evaluation import pick_checkpoint
    source, _ = pick_checkpoint(Path(args.run), args.checkpoint)  # a wrong name is told before torch is loaded
    from controllers.remote import read_token
    from controllers.serving import PolicyServer
    act, config, spec = actor(args.run, args.checkpoint, args.seed, args.instruction)
    where = Path(args.token) if args.token else source / TOKEN
    token = read_token(where, make=True)
    with socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((args.host, args.port))
        except OSError as e:
            raise UserError(f"cannot listen on {args.host}:{args.port} ({e.strerror}); choose another --host or "
                            "--port") from None
        listener.listen(128)
        host, port = listener.getsockname()[:2]
        here = f"{f'[{args.host}]' if ':' in args.host else args.host}:{port}"
        print(f"serving {args.run} ({config.task or config.sim}) on {here}", flush=True)
        known = "the same ROBO_RL_TOKEN" if os.environ.get("ROBO_RL_TOKEN") else f"--token {where}, or its text as ROBO_RL_TOKEN"
        print(f"clients prove the token: robo_rl deploy RUN --policy {here} with {known}", flush=True)
        if not ipaddress.ip_address(host).is_loopback:
            print(f"warning: other machines reach {here} and nothing is encrypted; keep --host 127.0.0.1 and go through "
                  f"ssh -L {port}:127.0.0.1:{port} MACHINE", file=sys.stderr, flush=True)
        server = PolicyServer(listener, act, spec, token, args.clients, args.idle,
                              lambda line: print(line, file=sys.stderr, flush=True))
        try:
            while True:
                server.turn()
        finally:
            server.close()
