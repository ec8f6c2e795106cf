"""One policy for many sims: a process that decides for whichever workers ask, in one batch.

A request names a slot and a row; observations and decisions lie in the slot, so nothing but a few numbers
travels. A worker's noise has a key of its own: what it is given depends on no one else's requests (up to the
rounding of another batch size). If the server dies, workers ask its successor the same again.

The socket is a file in the run's folder, which only its user may enter; either side asks the kernel who the
other is (SO_PEERCRED). A request is 32 bytes, an answer 8: whatever else comes, or comes too slowly, ends
that connection alone.
"""

import contextlib
import os
import resource
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from robo_rl.errors import UserError
from robo_rl.noise import seed_noise
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec
from robo_rl.rollout import think
from robo_rl.runtime import snapshot
from robo_rl.runtime.published import follow
from robo_rl.runtime.rollout_buffer import RolloutBuffer

WAIT = 0.002  # seconds an early request waits for more
DEADLINE = 60.0  # seconds a worker waits for an answer
WHOLE = 2.0  # seconds in which a message, once begun, has come
REQUEST, ANSWER = struct.Struct("<3qQ"), struct.Struct("<q")  # slot, worker, row, key of the noise; version
MOST = 4096  # connections
NAME = "server.sock"


# ---- the socket --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """A path of the socket in `folder` that is short enough for the kernel (108 bytes), however long the
    folder's is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise UserError(f"{folder} belongs to another user; choose a run folder of your own")
        if os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, 0o700)
        yield f"/proc/self/fd/{fd}/{NAME}"
    finally:
        os.close(fd)


def is_own(wire: socket.socket) -> bool:
    """Whether the process at the other end runs as the same user, as the kernel says."""
    _, user, _ = struct.unpack("3i", wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.geteuid()


def listen(folder: Path) -> socket.socket:
    """A listening socket in `folder`, which is closed to other users from now on; a predecessor's is
    replaced."""
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(folder) as where:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(where)
            wire.bind(where)
            os.chmod(where, 0o600)
        wire.listen(128)
        wire.setblocking(False)
    except BaseException:
        wire.close()
        raise
    return wire


def connect(folder: Path, timeout: float) -> socket.socket:
    """A connection to the process that listens in `folder`; OSError where none of this user does."""
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        wire.settimeout(timeout)
        with _address(folder) as where:
            wire.connect(where)
        if not is_own(wire):
            raise ConnectionRefusedError("the policy server's socket is another user's")
    except BaseException:
        wire.close()
        raise
    return wire


@dataclass(slots=True, eq=False)
class DecisionClient:
    """One connection. since: when it began, or its last request did; asked: that waits for an answer."""

    wire: socket.socket
    since: float
    data: bytearray = field(default_factory=bytearray)
    asked: bool = False


class Requests:
    """Requests of workers, over the socket in `folder`. `extra` is watched with it; `valid(slot, worker,
    row)` is required of a request. Closed are connections of another user, of who breaks the rules, and the
    longest silent beyond `most` (a worker connects again when it asks)."""

    def __init__(self, folder: Path, extra: Any, valid: Callable[[int, int, int], bool], most: int = MOST):
        self.valid, self.clients = valid, set()
        self.most = min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self.listener, self.selector = listen(folder), selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(extra, selectors.EVENT_READ, "extra")

    def take(self, timeout: float) -> tuple[list[tuple[DecisionClient, tuple[int, ...]]], bool]:
        """What has come within `timeout` [s]: (client, (slot, worker, row, key)) of each request; whether
        `extra` has."""
        out, extra, now = [], False, time.monotonic()
        for key, _ in self.selector.select(timeout):
            if key.data == "extra":
                extra = True
            elif key.data is None:
                self._accept()
            elif (request := self._read(key.data)) is not None:
                out.append((key.data, request))
        for client in [c for c in self.clients if c.data and now - c.since > WHOLE]:
            self.drop(client)
        return out, extra

    def answer(self, client: DecisionClient, version: int) -> None:
        """Answer a client: its decision is in the rollout buffer."""
        client.asked = False
        if client in self.clients:
            try:
                if client.wire.send(ANSWER.pack(version), socket.MSG_NOSIGNAL) == ANSWER.size:
                    return
            except OSError:
                pass
            self.drop(client)  # gone, or it never reads

    def drop(self, client: DecisionClient) -> None:
        """Close a connection."""
        if client in self.clients:
            self.clients.discard(client)
            self.selector.unregister(client.wire)
            client.wire.close()

    def close(self) -> None:
        """Close all."""
        for client in list(self.clients):
            self.drop(client)
        self.selector.close()
        self.listener.close()

    def _accept(self) -> None:
        try:
            wire, _ = self.listener.accept()
        except OSError:  # it left, or there are no descriptors left for now
            return
        if not is_own(wire):
            wire.close()
            return
        if len(self.clients) >= self.most and (silent := [c for c in self.clients if not c.asked]):
            self.drop(min(silent, key=lambda c: c.since))
        wire.setblocking(False)
        client = DecisionClient(wire, time.monotonic())
        self.clients.add(client)
        self.selector.register(wire, selectors.EVENT_READ, client)

    def _read(self, client: DecisionClient) -> "tuple[int, ...] | None":
        """The request that is now whole, if any."""
        try:
            got = client.wire.recv(REQUEST.size - len(client.data))
        except BlockingIOError:
            return None
        except OSError:
            got = b""
        if not got or client.asked:  # it left, or asks again before it was answered
            self.drop(client)
            return None
        client.since = client.since if client.data else time.monotonic()
        client.data += got
        if len(client.data) < REQUEST.size:
            return None
        request = REQUEST.unpack(client.data)
        client.data.clear()
        if not self.valid(*request[:3]):
            self.drop(client)
            return None
        client.asked = True
        return request


# ---- the process -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerJob:
    """The arguments of the server process."""

    options: PolicyOptions
    spec: ObsSpec
    explore: bool
    folder: Path
    weights: Path
    clients: int
    threads: int = 1


def main(job: ServerJob, pipe) -> None:
    """Serve until told to stop or orphaned. What else ends the process is sent (`snapshot.last_words`)."""
    try:
        with snapshot.at_work(job.folder, "server", job.threads):
            _serve(job, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the learner is gone
    except BaseException as e:  # noqa: BLE001 (the process ends; its last words go to the supervisor)
        pipe.send(snapshot.last_words(e))


def _serve(job: ServerJob, pipe) -> None:
    parent = os.getppid()
    reader, policy = follow(job.weights, job.options, job.spec)
    version = reader.current
    buffer = RolloutBuffer.open(job.folder / "slots.bin")
    generators: list[torch.Generator] = []
    requests = Requests(
        job.folder,
        pipe,
        lambda slot, worker, row: (
            0 <= slot < buffer.count and 0 <= worker < MOST and 0 <= row < buffer.decisions
        ),
    )
    pipe.send(("ready", -1, os.getpid()))
    waiting: list[tuple[DecisionClient, tuple[int, ...]]] = []
    since = 0.0
    while os.getppid() == parent:
        new, told = requests.take(WAIT if waiting else 1.0)
        if told and pipe.recv() is None:
            return
        waiting = [(c, r) for c, r in waiting if c in requests.clients] + new
        since = (since or time.monotonic()) if waiting else 0.0
        enough = len(waiting) >= max(1, len(requests.clients) // 3)
        if not waiting or not enough and time.monotonic() - since < WAIT:
            continue
        if reader.version() != version and (newest := reader.fetch()) is not None:
            reader.swap(policy)
            version = newest
        parts, noise = [], []
        generators += [torch.Generator() for _ in range(len(waiting) - len(generators))]
        for generator, (_, (slot, worker, t, key)) in zip(generators, waiting, strict=False):
            columns = buffer.columns(slot, worker)
            parts.append((columns, t))
            noise.append((seed_noise(generator, key), columns["done"].shape[1]))
        think(policy, parts, noise if len(parts) > 1 else noise[0][0], version, job.explore)
        for client, _ in waiting:
            requests.answer(client, version)
        waiting, since = [], 0.0


class PolicyServerClient:
    """The worker's side: request the decision of a row and wait for it."""

    def __init__(self, folder: Path, stop: Callable[[], bool]):
        self.folder, self.stop = folder, stop
        self.wire: socket.socket | None = None

    def ask(self, slot: int, worker: int, t: int, key: int) -> int:
        """Request a decision -> the version that made it, once it is in the rollout buffer. TimeoutError
        after a minute."""
        clock = snapshot.AwakeClock(2.0)  # the server was stopped when this process was
        while clock.now() < DEADLINE and not self.stop():
            try:
                if self.wire is None:
                    self.wire = connect(self.folder, 1.0)
                self.wire.sendall(REQUEST.pack(slot, worker, t, key))
                if (answer := self._answer(clock)) is not None:
                    return answer
            except OSError:  # the server died; its successor will listen here
                self.close()
                time.sleep(0.05)
        self.close()  # a late answer is no one's
        raise TimeoutError(f"the policy server gave no answer for {DEADLINE:.0f} s")

    def _answer(self, clock: snapshot.AwakeClock) -> "int | None":
        data = b""
        assert self.wire is not None
        while len(data) < ANSWER.size:
            if self.stop() or clock.now() > DEADLINE:
                return None
            with contextlib.suppress(TimeoutError):  # after a second, to look around
                got = self.wire.recv(ANSWER.size - len(data))
                if not got:
                    raise ConnectionResetError("the policy server is gone")
                data += got
        return ANSWER.unpack(data)[0]

    def close(self) -> None:
        """Close the connection."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None
