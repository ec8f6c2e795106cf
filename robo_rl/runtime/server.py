"""One policy for many sims: a process that decides for whichever workers ask, in one batch.

A request names a slot and a row; observations and decisions lie in the slot, so nothing but a few numbers travels. A
worker's noise has a key of its own: what it is given depends on no one else's requests (up to the rounding of another
batch size). If the server dies, workers ask its successor the same again.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from multiprocessing import connection as mpc
from pathlib import Path

import torch

from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import think
from robo_rl.runtime import snapshot
from robo_rl.runtime.slots import Slots
from robo_rl.runtime.weights import WeightReader

WAIT = 0.002  # seconds an early request waits for more
DEADLINE = 60.0  # seconds a worker waits for an answer


@dataclass(frozen=True)
class ServerJob:
    """What the server is told once."""

    options: PolicyOptions
    spec: ObsSpec
    explore: bool
    folder: Path
    weights: Path
    clients: int
    threads: int = 1

    @property
    def address(self) -> str:
        return address(self.folder)


def address(folder: Path) -> str:
    """Where the server of a run listens: a name in the abstract namespace, for paths of sockets must be short."""
    return f"\0robo_rl{folder.resolve()}"


def main(job: ServerJob, pipe) -> None:
    """Serve until told to stop or orphaned."""
    with snapshot.at_work(job.folder, "server", job.threads), contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(job, pipe)


def _serve(job: ServerJob, pipe) -> None:
    parent = os.getppid()
    reader, policy = WeightReader.open(job.weights), make_policy(job.options, job.spec, 0).eval()
    version = reader.fetch()
    reader.swap(policy)
    slots = Slots.open(job.folder / "slots.bin")
    generators: list[torch.Generator] = []
    listener = mpc.Listener(job.address, "AF_UNIX", backlog=job.clients)
    clients: list[mpc.Connection] = []
    pipe.send(("ready", -1, os.getpid()))
    waiting: list[tuple[mpc.Connection, tuple]] = []
    since = 0.0
    while os.getppid() == parent:
        for thing in mpc.wait([listener._listener._socket, pipe, *clients], WAIT if waiting else 1.0):
            if thing is pipe:
                if pipe.recv() is None:
                    return
            elif thing in clients:
                try:
                    waiting.append((thing, thing.recv()))
                    since = since or time.monotonic()
                except (EOFError, OSError):
                    clients.remove(thing)
            else:
                clients.append(listener.accept())
        enough = len(waiting) >= max(1, len(clients) // 3)
        if not waiting or not enough and time.monotonic() - since < WAIT:
            continue
        if reader.version() != version and (new := reader.fetch()) is not None:
            reader.swap(policy)
            version = new
        parts, noise = [], []
        generators += [torch.Generator() for _ in range(len(waiting) - len(generators))]
        for generator, (_, (slot, worker, t, key)) in zip(generators, waiting):
            columns = slots.columns(slot, worker)
            parts.append((columns, t))
            noise.append((generator.manual_seed(key), columns["done"].shape[1]))
        think(policy, parts, noise if len(parts) > 1 else noise[0][0], version, job.explore)
        for client, _ in waiting:
            with contextlib.suppress(OSError):
                client.send(version)
        waiting, since = [], 0.0


class Remote:
    """A worker's side: ask for the decision of a row and wait for it."""

    def __init__(self, where: str, stop):
        self.where, self.stop, self.connection = where, stop, None

    def ask(self, slot: int, worker: int, t: int, key: int) -> int:
        """The decision is in the slot when this returns the version that made it. TimeoutError after a minute."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end and not self.stop():
            try:
                if self.connection is None:
                    self.connection = mpc.Client(self.where, "AF_UNIX")
                self.connection.send((slot, worker, t, key))
                while not self.connection.poll(1.0):
                    if self.stop() or time.monotonic() > end:
                        break
                else:
                    return self.connection.recv()
            except (EOFError, OSError):  # the server died; its successor will listen here
                self.connection = None
                time.sleep(0.05)
        raise TimeoutError(f"the policy server gave no answer for {DEADLINE:.0f} s")
