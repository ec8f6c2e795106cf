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
    instruction: str = ""
    """What to do, for a policy that hears an instruction."""
    seed: int = 0

    def __post_init__(self) -> None:
        in_range("--port", self.port, 0, 65535)
        in_range("--seed", self.seed, 0, 2**31)


def actor(run: str, checkpoint: str, seed: int, words: str = ""):
    """(act: observation -> rows [E, A], run's config, ObsSpec) of a run: NumPy where that carries it, else torch.

    words: the instruction, for a policy that hears one.
    """
    import numpy as np

    from robo_rl import checkpoint as checkpoints
    from robo_rl.cli.eval import pick_checkpoint
    from robo_rl.cli.train import run_config
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


def misfit(obs: dict, spec) -> str:
    """Why the policy cannot take an observation; "" where it can."""
    wanted = {"state": (spec.state,)} | {f"image/{v}": (spec.image_size, spec.image_size, 3) for v in spec.views}
    for name, shape in wanted.items():
        got = obs[name].shape if name in obs else None
        if got != shape:
            return f"the run's {name} has {' x '.join(map(str, shape))} numbers, got {'none' if got is None else f'shape {got}'}"
    return ""


def answer(wire: socket.socket, act, spec) -> int:
    """Serve one client until it leaves -> chunks answered."""
    from controllers.remote import pack, unpack
    data, count = bytearray(), 0
    while piece := wire.recv(1 << 16):
        data += piece
        while (message := unpack(data)) is not None:
            head, obs, used = message
            del data[:used]
            if bad := misfit(obs, spec):
                wire.sendall(pack({}, error=bad))
                continue
            wire.sendall(pack({"rows": act(obs)}, t0=head.get("t0")))
            count += 1
    return count


def run(args: Serve) -> int:
    """Listen until interrupted."""
    act, config, spec = actor(args.run, args.checkpoint, args.seed, args.instruction)
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
                    print(f"{peer[0]}: {answer(wire, act, spec)} chunks", file=sys.stderr, flush=True)
                except (OSError, UserError) as e:
                    print(f"{peer[0]}: {e}", file=sys.stderr, flush=True)
