"""`robo_rl serve RUN`: a run's policy answers over TCP, one client after the other; no pickle on the wire."""

import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from robo_rl.errors import UserError, in_range


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve the policy of a run, for robo_rl deploy --policy HOST:PORT. There is no password: keep to trusted networks."""

    run: tyro.conf.Positional[str]
    """Run folder, or a checkpoint folder inside one."""
    checkpoint: str = "best"
    """best, last, sft, or the name of a folder below checkpoints/."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is reached from this machine alone."""
    port: int = 7447
    """0: any free one."""
    seed: int = 0

    def __post_init__(self) -> None:
        in_range("--port", self.port, 0, 65535)
        in_range("--seed", self.seed, 0, 2**31)


def actor(run: str, checkpoint: str, seed: int):
    """(act: state [S] -> rows [E, A], run's config, ObsSpec) of a run: NumPy where that carries it, else torch."""
    import numpy as np

    from robo_rl import checkpoint as checkpoints
    from robo_rl.cli.eval import pick_checkpoint
    from robo_rl.cli.train import run_config
    from robo_rl.policies import ObsSpec
    from robo_rl.policies.numpy_actor import NumpyActor

    where, folder = pick_checkpoint(Path(run), checkpoint)
    meta = checkpoints.read_meta(folder)
    spec = ObsSpec(**{k: tuple(v) if isinstance(v, list) else v for k, v in meta["policy"]["spec"].items()})
    if meta["policy"]["options"]["kind"] == "flow" and not spec.views and not spec.language:
        net, rng = NumpyActor.load(folder), np.random.default_rng(seed)
        return lambda state: net.act(state, rng=rng), run_config(where), spec
    import torch
    torch.set_num_threads(1)
    policy, _ = checkpoints.load_policy(folder)
    generator = torch.Generator().manual_seed(seed)

    def act(state):
        seen = {"state": torch.from_numpy(np.array(state, np.float32))[None]}
        return policy.act(seen, generator, explore=False).actions[0].numpy()
    return act, run_config(where), spec


def answer(wire: socket.socket, act, size: int) -> int:
    """Serve one client until it leaves -> chunks answered."""
    from controllers.remote import pack, unpack
    data, count = bytearray(), 0
    while piece := wire.recv(1 << 16):
        data += piece
        while (message := unpack(data)) is not None:
            head, state, used = message
            del data[:used]
            if state is None or state.shape != (size,):
                got = None if state is None else state.shape
                wire.sendall(pack(None, error=f"the run's state has {size} numbers, got shape {got}"))
                continue
            wire.sendall(pack(act(state), t0=head.get("t0")))
            count += 1
    return count


def run(args: Serve) -> int:
    """Listen until interrupted."""
    act, config, spec = actor(args.run, args.checkpoint, args.seed)
    if spec.views or spec.language:
        raise UserError("the wire carries states alone so far: serve a run trained with --obs state")
    with socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((args.host, args.port))
        except OSError as e:
            raise UserError(f"cannot listen on {args.host}:{args.port} ({e.strerror}); choose another --host or "
                            "--port") from None
        server.listen(1)
        print(f"serving {args.run} ({config.task or config.sim}) on {args.host}:{server.getsockname()[1]}", flush=True)
        while True:
            wire, peer = server.accept()
            with wire:
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    print(f"{peer[0]}: {answer(wire, act, spec.state)} chunks", file=sys.stderr, flush=True)
                except (OSError, UserError) as e:
                    print(f"{peer[0]}: {e}", file=sys.stderr, flush=True)
