"""The server of `remote`: a policy answers those who know its token.

One thread serves all clients: questions that have come while the policy decided are answered by one call of
it, and whatever a client sends, or leaves unsent, costs the others nothing but that. Who has not proved
within seconds to know the token, sends what is no message, sends too slowly or reads no answer is closed,
with one line.
"""

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from controllers.chunking import Prefix
from controllers.remote import MAGIC, NONCE, PIECE, PROOF, MessageParser, pack, plain_text, proof
from robo_rl.errors import UserError, plural

# s in which a client proves its token; in which a message, or an answer, has gone through
HELLO, MESSAGE = 5.0, 10.0
UNKNOWN = 128  # connections that have proved nothing yet; the oldest goes when another comes
SAY = 1.0  # s from one line about those to the next
# of the duration of a question's share of a call: waited for others where there were others the last time
COMPANY = 1.0
PICTURE = 4096  # most pixels of a side
# side of a square with as many pixels as a large camera has, 1280 x 720 and more
LARGE = 1024
RECORDS_NOTHING = "this server records no episodes; it does where it was started with --share FOLDER"


def wanted(spec, large: int = 0) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and type of each array that the policy takes; of pictures of any size that of a `large` one."""
    size = large if spec.raw_pictures else spec.image_size
    return {"state": ((spec.state,), np.float32)} | {
        f"image/{v}": ((size, size, 3), np.uint8) for v in spec.views
    }


def misfit(obs: dict, spec) -> str:
    """Why the policy cannot take an observation; "" where it can."""
    for name, (shape, kind) in wanted(spec).items():
        got = obs[name].shape if name in obs else None
        if got is not None and len(shape) == 3 and spec.raw_pictures:
            sides = got[:2] if len(got) == 3 and got[2] == 3 else (0,)
            if not 0 < min(sides) <= max(sides) <= PICTURE:
                return f"the run's {name} is h x w x 3 numbers of a picture, got shape {got}"
        elif got != shape:
            return (
                f"the run's {name} has {' x '.join(map(str, shape))} numbers, got "
                f"{'none' if got is None else f'shape {got}'}"
            )
        if obs[name].dtype != kind:
            return f"the run's {name} is {kind.__name__}, got {obs[name].dtype}"
        if kind is np.float32 and not np.isfinite(obs[name]).all():
            return f"the {name} is not finite"
    return ""


class SparseLog:
    """Lines about clients that proved nothing: at most one a second, and the next says how many there were
    before it."""

    def __init__(self, say: Callable[[str], None]):
        self.say, self.quiet_until, self.unsaid = say, 0.0, 0

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now < self.quiet_until:
            self.unsaid += 1
            return
        self.say(plain_text(line + (f" ({self.unsaid} more before it)" if self.unsaid else "")))
        self.quiet_until, self.unsaid = now + SAY, 0


class Sessions(Protocol):
    """Who keeps what clients do (`robo_rl.runtime.sessions`). who: a number of the connection; fields: of a
    message's header."""

    def before(self, who: int, fields: dict) -> "dict | np.ndarray | None":
        """What to answer with, fields or rows, without asking the policy; None: ask it. UserError: what is
        wrong with the fields."""
        ...

    def given(self, who: int, fields: dict, decision: Any) -> np.ndarray:
        """The rows that the client gets, of what the policy decided."""
        ...

    def left(self, who: int) -> None: ...


class ClientConnection:
    """One connection. known: it knows the token; since: when what we wait for began (0.0: nothing but a
    question)."""

    def __init__(self, wire: socket.socket, name: str, limit: int, now: float):
        self.wire, self.name, self.nonce = wire, name, secrets.token_bytes(NONCE)
        self.incoming, self.out, self.known, self.closing = (
            MessageParser(limit),
            bytearray(MAGIC + self.nonce),
            False,
            "",
        )
        self.since = self.asked_at = now
        self.count = 0  # chunks answered
        self.number = 0  # that the server knows it by


class PolicyServer:
    """Answers `act(observation)`, or `act(observation, prefix)`, with rows [H, A]: to every client of
    `listener` that knows `token`, `turn` after `turn`.

    many: at most `most` observations -> the rows of each, for those that wait at the same time; None: `act`
    takes them one by one. say: a line about a client that has gone. `clients` may be there at once; each is
    closed after `idle` s without a question, `message` s into one that does not end, and who has not proved
    the token within `hello` s.

    instruction: what the policy is told, as a client is that asks ("about").

    sessions: keeps what clients do (`Sessions`); `many` gives what it takes in place of rows, and a message
    is answered by it where it knows the answer. There are then no prefixes.
    """

    def __init__(
        self,
        listener: socket.socket,
        act: Callable[..., Any],
        spec,
        token: bytes,
        clients: int = 16,
        idle: float = 600.0,
        say: Callable[[str], None] = lambda line: None,
        hello: float = HELLO,
        message: float = MESSAGE,
        many: Callable[[list[dict]], list[Any]] | None = None,
        most: int = 64,
        sessions: "Sessions | None" = None,
        instruction: str = "",
    ):
        self.sessions, self.instruction = sessions, instruction
        self.hello, self.message, self.most = hello, message, most
        self.many = many or (lambda batch: [act(obs) for obs in batch])
        self.act, self.spec, self.token, self.seats, self.idle, self.say = (
            act,
            spec,
            token,
            clients,
            idle,
            say,
        )
        need = sum(
            int(np.prod(shape)) * np.dtype(kind).itemsize for shape, kind in wanted(spec, LARGE).values()
        )
        self.limit = max(1 << 20, 2 * need)
        self.numbers = 0  # of clients so far
        self.listener, self.selector, self.visitors = listener, selectors.DefaultSelector(), set()
        self.say_of_strangers = SparseLog(say)
        # questions of the last call, and how long to wait for as many again [s]
        self.last, self.patience = 0, 0.0
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    def turn(self, timeout: float = 1.0) -> None:
        """Wait up to `timeout` [s] for anything, take what came, answer one question of each client that has
        one."""
        self._take(0 if self._waiting() else timeout)
        # those whom the last call answered ask again within a moment of each other
        end = time.monotonic() + self.patience
        while 0 < self._waiting() < self.last and (left := end - time.monotonic()) > 0:
            self._take(left)
        self._answer(time.monotonic())
        for v in list(self.visitors):
            self._step(v)

    def close(self) -> None:
        """Close every connection; the listener is its owner's."""
        for v in list(self.visitors):
            self._drop(v, "the server ends")
        self.selector.close()

    def _waiting(self) -> int:
        """Clients with a question that is not answered."""
        return sum(v.known and not v.out and not v.closing and v.incoming.whole() for v in self.visitors)

    def _take(self, timeout: float) -> None:
        for key, events in self.selector.select(timeout):
            if key.data is None:
                self._accept()
            elif key.data in self.visitors and events & selectors.EVENT_READ and not self._has_all(key.data):
                self._read(key.data)

    @staticmethod
    def _has_all(v: ClientConnection) -> bool:
        """Whether nothing more is read of a client for now."""
        return v.incoming.whole() if v.known else len(v.incoming.data) >= NONCE + PROOF

    def _accept(self) -> None:
        try:
            wire, peer = self.listener.accept()
        except OSError:  # it left, or there are no descriptors for now
            time.sleep(0.01)
            return
        unknown = [v for v in self.visitors if not v.known]
        if len(unknown) >= UNKNOWN:
            self._drop(min(unknown, key=lambda v: v.since), "it has not said the token, and others wait")
        wire.setblocking(False)
        with contextlib.suppress(OSError):
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        v = ClientConnection(wire, peer[0], self.limit, time.monotonic())
        self.visitors.add(v)
        self.selector.register(wire, selectors.EVENT_READ, v)

    def _read(self, v: ClientConnection) -> None:
        try:
            piece = v.wire.recv(PIECE if v.known else NONCE + PROOF - len(v.incoming.data))
        except BlockingIOError:
            return
        except OSError as e:
            return self._drop(v, e.strerror or "it left")
        if not piece:
            return self._drop(v, "" if v.known else "it left without the token")
        if v.known and not v.since:
            v.since = time.monotonic()
        v.incoming.feed(piece)

    def _step(self, v: ClientConnection) -> None:
        """What can be done for a client now; its deadlines."""
        now = time.monotonic()
        try:
            if not v.known:
                self._prove(v, now)
            if v.out:
                del v.out[: v.wire.send(v.out[:PIECE])]
                if v.known and not v.out and not v.closing:  # what it has said meanwhile begins now
                    v.since = now if v.incoming.data else 0.0
        except BlockingIOError:
            pass
        except OSError as e:
            return self._drop(v, e.strerror or "it left")
        if v.closing and not v.out:
            return self._drop(v, v.closing)
        if v.since and now - v.since > (self.message if v.known else self.hello):
            return self._drop(v, "it is too slow" if v.known else "it has not said the token")
        if now - v.asked_at > self.idle:
            return self._drop(v, f"it asked nothing for {self.idle:g} s")
        reads = 0 if v.closing or v.known and (v.out or v.incoming.whole()) else selectors.EVENT_READ
        self._watch(v, reads | (selectors.EVENT_WRITE if v.out else 0))

    def _watch(self, v: ClientConnection, events: int) -> None:
        key = self.selector.get_map().get(v.wire)
        if key is None and events:
            self.selector.register(v.wire, events, v)
        elif key is not None and not events:
            self.selector.unregister(v.wire)
        elif key is not None and key.events != events:
            self.selector.modify(v.wire, events, v)

    def _prove(self, v: ClientConnection, now: float) -> None:
        data = v.incoming.data
        if v.closing or len(data) < NONCE + PROOF:
            return
        nonce, said = bytes(data[:NONCE]), bytes(data[NONCE:])
        data.clear()
        if not secrets.compare_digest(said, proof(self.token, b"client", v.nonce, nonce)):
            v.out, v.closing = v.out + bytes(PROOF), "it has another token"
        elif sum(o.known for o in self.visitors) >= self.seats:
            v.closing = f"all {self.seats} seats are taken"
        else:
            v.out += proof(self.token, b"server", v.nonce, nonce)
            v.known, v.since, v.asked_at = True, now, now
            v.number = self.numbers = self.numbers + 1

    def _answer(self, now: float) -> None:
        """Answer the question of each client that has one, those without a prefix by calls of at most
        `most`."""
        alike: list[tuple[ClientConnection, dict, dict]] = []
        for v in self.visitors:
            if not v.known or v.out or v.closing:
                continue
            try:
                if (message := v.incoming.take()) is None:
                    continue
                head, obs = message
                v.asked_at = v.since = now
                if not obs and head == {"about": True}:
                    v.out += pack({}, instruction=self.instruction)
                    continue
                if not obs and self.sessions is None and tells_outcome(head):
                    v.out += pack({}, error=RECORDS_NOTHING)
                    continue
                if self._known(v, head):
                    continue
                if bad := misfit(obs, self.spec):
                    v.out += pack({}, error=bad)
                    continue
                seen, t0 = {name: obs[name] for name in wanted(self.spec)}, number(head.get("t0"))
                if "prefix" in obs and self.sessions is not None:
                    raise UserError(
                        "this server records what it decides: it takes no prefixes of real-time chunking"
                    )
                if "prefix" in obs:
                    self._agree(v, t0, seen, prefix_of(head, obs["prefix"]))
                else:
                    alike.append((v, head, seen))
            except UserError as e:
                self._refuse(v, e)
        for k in range(0, len(alike), self.most):
            self._call(alike[k : k + self.most])
        if alike:
            self.last, self.patience = (
                len(alike),
                COMPANY * (time.monotonic() - now) / len(alike) if len(alike) > 1 else 0.0,
            )

    def _known(self, v: ClientConnection, head: dict) -> bool:
        """Answer what the sessions know the answer to -> whether they do."""
        try:
            reply = None if self.sessions is None else self.sessions.before(v.number, head)
        except UserError as e:
            reply = {"error": plain_text(e)}
        if isinstance(reply, dict):
            v.out += pack({}, **reply)
        elif reply is not None:
            self._say(v, number(head.get("t0")), reply)
        return reply is not None

    def _agree(self, v: ClientConnection, t0: float, seen: dict, prefix: Prefix) -> None:
        """Answer a question of real-time chunking."""
        try:
            rows = self.act(seen, prefix)
        except Exception as e:  # as in `_call`
            return self._refuse(v, failure(e))
        self._say(v, t0, rows)

    def _call(self, part: list[tuple[ClientConnection, dict, dict]]) -> None:
        """One call of the policy; where it cannot take them, halves, so that who asks what it refuses is
        refused alone."""
        try:
            answers = self.many([seen for *_, seen in part])
        except Exception as e:  # a policy is anybody's code, and the server outlives any question
            if len(part) == 1:
                return self._refuse(part[0][0], failure(e))
            self._call(part[: len(part) // 2])
            return self._call(part[len(part) // 2 :])
        for (v, head, _), rows in zip(part, answers, strict=True):
            self._say(
                v, head["t0"], rows if self.sessions is None else self.sessions.given(v.number, head, rows)
            )

    @staticmethod
    def _say(v: ClientConnection, t0: float, rows: np.ndarray) -> None:
        v.out += pack({"rows": rows}, t0=t0)
        v.count, v.since = v.count + 1, time.monotonic()  # the answer's time begins

    @staticmethod
    def _refuse(v: ClientConnection, why: object) -> None:
        v.out += pack({}, error=plain_text(why))
        v.closing, v.since = plain_text(why), time.monotonic()

    def _drop(self, v: ClientConnection, why: str) -> None:
        """Close a connection and say so; of those that proved nothing at most a line a second."""
        self.visitors.discard(v)
        with contextlib.suppress(KeyError):
            self.selector.unregister(v.wire)
        v.wire.close()
        if v.known and self.sessions is not None:
            self.sessions.left(v.number)
        if v.known:
            self.say(plain_text(f"{v.name}: " + ", ".join(filter(None, (plural(v.count, "chunk"), why)))))
        else:
            self.say_of_strangers(f"{v.name}: {why}")


def tells_outcome(fields: dict) -> bool:
    """Whether a message says how an episode went."""
    return not fields.keys().isdisjoint(("outcome", "success"))


def failure(e: Exception) -> object:
    """What a client is told of what a policy raises."""
    return e if isinstance(e, UserError) else f"the policy fails at it ({type(e).__name__}: {e})"


def prefix_of(head: dict, rows: np.ndarray) -> Prefix:
    """What a question for real-time chunking carries; UserError where it is none."""
    delay, end = head.get("delay"), head.get("end")
    if type(delay) is not int or type(end) is not int or rows.dtype != np.float32:
        raise UserError("a prefix has rows of float32, and delay and end as integers")
    return Prefix(rows, delay, end)


def number(t0: object) -> float:
    """The time that a question carries; UserError where it is none."""
    if isinstance(t0, bool) or not isinstance(t0, (int, float)):
        raise UserError("a question carries its time t0, a number")
    return t0
