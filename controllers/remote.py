"""A policy in another process or on another machine, over TCP: JSON and raw float32, no pickle.

First either side proves that it knows the token, which itself never travels (frames of fixed size,
HMAC-SHA256):
    server -> client   MAGIC [8], nonce s [32]
    client -> server   nonce c [32], HMAC(token, "client" + s + c) [32]
    server -> client   HMAC(token, "server" + s + c) [32], or 32 zeros: refused
Then messages: 4 bytes length of a JSON header (little endian), the header, then the arrays it lists as [name,
type, shape].
Request: an observation ("state" [S], "image/<view>" [h, w, 3]) and "t0", for real-time chunking also "prefix"
[H, A], "delay" and "end" (`chunking.Prefix`); answer: "rows" [H, A] and "t0", or {"error"}. To a server that
records: also "episode", "step", "start" and "request", and a message of "episode" and "outcome" or "success",
answered with {"recorded"}. {"about": true} alone is answered with {"instruction"}, what the policy is told. A
header is at most 64 KiB, an array has at most 4 dimensions, the arrays 8 MiB: what comes decides nothing
else. Nothing is encrypted: between machines go through ssh -L.
"""

import hmac
import json
import math
import os
import secrets
import select
import socket
import stat
import struct
import time
from pathlib import Path

import numpy as np

from controllers.chunking import Prefix
from robo_rl.errors import UserError
from robo_rl.files import parse_json, private_file, read_bytes

HEADER, ARRAY = 1 << 16, 8 << 20  # bytes at most
ARRAYS, RANK, NAME = 32, 4, 100  # arrays in a message, dimensions of one, letters of its name, at most
ROWS = 4096  # of a chunk at most
PIECE = 1 << 18  # bytes read at once
MAGIC, NONCE, PROOF = b"robo_rl\2", 32, 32
TYPES = {"f4": "<f4", "u1": "|u1"}
NO_MESSAGE = "the other side speaks no robo_rl"


# ---- messages ----------------------------------------------------------------------------------------------


def pack(arrays: dict[str, np.ndarray], **fields: object) -> bytes:
    """One message: float32 numbers, or uint8 pictures as they are."""
    made = {n: np.ascontiguousarray(x, "|u1" if x.dtype == np.uint8 else "<f4") for n, x in arrays.items()}
    head = json.dumps(
        fields | {"arrays": [[n, x.dtype.str[1:], list(x.shape)] for n, x in made.items()]}
    ).encode()
    return struct.pack("<I", len(head)) + head + b"".join(x.tobytes() for x in made.values())


# (fields, (name, type, shape, bytes) of each array, where the arrays begin)
Header = tuple[dict, list[tuple[str, str, list[int], int]], int]


class MessageParser:
    """Messages out of a stream of bytes; `limit`: bytes of the arrays of one."""

    def __init__(self, limit: int = ARRAY):
        self.limit, self.data = limit, bytearray()
        self._head: Header | None = None  # of the first message

    def feed(self, piece: bytes) -> None:
        """Bytes that came."""
        self.data += piece

    def whole(self) -> bool:
        """Whether the first message has all come, or is none: `take` has something to say."""
        try:
            head = self._begun()
        except UserError:
            return True
        return head is not None and len(self.data) >= head[2] + sum(n for *_, n in head[1])

    def take(self) -> tuple[dict, dict[str, np.ndarray]] | None:
        """(header, arrays) of the first message; None while it is incomplete. UserError: it is none."""
        if (begun := self._begun()) is None or not self.whole():
            return None
        (head, told, at), self._head, arrays = begun, None, {}
        for name, kind, shape, count in told:
            arrays[name] = np.frombuffer(self.data[at : at + count], kind).reshape(shape)  # of its own
            at += count
        del self.data[:at]
        return head, arrays

    def _begun(self) -> Header | None:
        """The header of the first message, as soon as it is known; it is read once."""
        data = self.data
        if self._head is None and len(data) >= 4:
            size = struct.unpack_from("<I", data)[0]
            if size > HEADER:
                raise UserError(f"{NO_MESSAGE}: a header of {size} bytes")
            if len(data) >= 4 + size:
                self._head = self._header(bytes(data[4 : 4 + size]), 4 + size)
        return self._head

    def _header(self, text: bytes, at: int) -> Header:
        """(fields, (name, type, shape, bytes) of each array, where the arrays begin)."""
        head = parse_json(text, "a message's header", limit=HEADER, depth=8)
        told, listed = {}, head.pop("arrays", None)
        if not isinstance(listed, list) or len(listed) > ARRAYS:
            raise UserError(f"{NO_MESSAGE}: a header lists at most {ARRAYS} arrays that follow")
        for item in listed:
            name, kind, shape = item if isinstance(item, list) and len(item) == 3 else ("", "", ())
            good = (
                isinstance(name, str) and 0 < len(name) <= NAME and name not in told and kind in list(TYPES)
            )
            if not good or not isinstance(shape, list) or len(shape) > RANK:
                raise UserError(f"{NO_MESSAGE}: an array is [its name, f4 or u1, at most {RANK} sizes]")
            if not all(type(k) is int and 0 < k <= self.limit for k in shape):
                raise UserError(f"{NO_MESSAGE}: an array's sizes are 1 or more, and {self.limit} at most")
            told[name] = TYPES[kind], shape, math.prod(shape) * int(kind[-1])
        if (total := sum(n for *_, n in told.values())) > self.limit:
            raise UserError(f"arrays of {total} bytes are above {self.limit}")
        return head, [(name, *rest) for name, rest in told.items()], at


def plain_text(text: object, most: int = 300) -> str:
    """What another says as it may stand in a terminal: nothing but letters, and not too many."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])


# ---- the token ---------------------------------------------------------------------------------------------


def proof(token: bytes, who: bytes, server: bytes, client: bytes) -> bytes:
    """What only a side that knows the token can say, about these nonces."""
    return hmac.digest(token, who + server + client, "sha256")


def read_token(path: "str | Path" = "", make: bool = False) -> bytes:
    """The token of ROBO_RL_TOKEN, or in the file `path`, which only its owner may read; `make`: a new one if
    it has none."""
    text, where = os.environ.get("ROBO_RL_TOKEN", ""), "ROBO_RL_TOKEN"
    if not text:
        path = where = Path(path)
        if make and not path.exists():
            try:
                with open(private_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as f:
                    f.write(secrets.token_urlsafe(32) + "\n")
            except OSError as e:
                raise UserError(
                    f"no token can be written to {path} ({e.strerror}); name another file: --token FILE"
                ) from None
        if not path.exists():
            raise UserError(
                f"{path} does not exist: copy the token that robo_rl serve names, and give it with --token "
                "FILE or as ROBO_RL_TOKEN"
            )
        data = read_bytes(path, 4096)
        if os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(
                f"{path} holds a token and others may read it; close it with: chmod 600 {path}, and make a "
                "new one: delete the file and start robo_rl serve again"
            )
        text = data.decode(errors="replace")
    token = text.strip()
    if not token.isascii() or not 16 <= len(token) <= 1024:
        raise UserError(f"{where} must hold a token of 16 to 1024 ASCII letters; robo_rl serve makes one")
    return token.encode()


# ---- the client --------------------------------------------------------------------------------------------


def address(text: str) -> tuple[str, int]:
    """host:port"""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"a policy's address is host:port, for example 127.0.0.1:7447, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


class RemotePolicyClient:
    """`policy_client.PolicyClient` over a connection. ask() waits up to `patience` [s] for an answer that
    comes at once. blocks: the arm stands still meanwhile, and the policy is lost where none has come by then.

    Nothing that the server does or leaves undone holds the caller longer than that; `timeout` [s] is for the
    beginning (connection and token), and for what the server has not taken of a question.
    """

    def __init__(
        self, where: str, token: bytes, patience: float = 0.005, timeout: float = 5.0, blocks: bool = False
    ):
        self.where, self.patience, self.timeout, self.blocks = where, patience, timeout, blocks
        self.incoming, self.out, self.since = MessageParser(), bytearray(), 0.0
        self.asked: float | None = None  # t0 of the question that is open
        self.answer: tuple[np.ndarray, float] | None = None
        end = time.monotonic() + timeout
        try:
            self.wire = socket.create_connection(address(where), timeout)
        except OSError as e:
            raise UserError(
                f"no policy answers at {where} ({e.strerror or e}); start one with: robo_rl serve RUN"
            ) from None
        try:
            self._greet(token, end)
        except BaseException:
            self.wire.close()
            raise
        self.wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wire.setblocking(False)

    def _greet(self, token: bytes, end: float) -> None:
        """Prove to each other that both know the token."""
        told = self._exactly(len(MAGIC) + NONCE, end)
        if not told.startswith(MAGIC):
            raise UserError(
                f"{self.where} speaks no robo_rl of this version; start a policy there with: robo_rl serve "
                "RUN"
            )
        theirs, mine = told[len(MAGIC) :], secrets.token_bytes(NONCE)
        self.wire.sendall(mine + proof(token, b"client", theirs, mine))
        told = self._exactly(PROOF, end)
        if not any(told):
            raise UserError(
                f"the policy at {self.where} has another token; give the one that robo_rl serve named: "
                "--token FILE or ROBO_RL_TOKEN"
            )
        if not hmac.compare_digest(told, proof(token, b"server", theirs, mine)):
            raise UserError(
                f"whoever answers at {self.where} does not know the token: it is not the policy you started"
            )

    def _exactly(self, count: int, end: float) -> bytes:
        out = b""
        while len(out) < count:
            self.wire.settimeout(max(end - time.monotonic(), 1e-3))
            try:
                got = self.wire.recv(count - len(out))
            except OSError as e:
                got, why = b"", e.strerror or "it says nothing"
            else:
                why = "it closed the connection: it speaks no robo_rl, or has no seat left"
            if not got or time.monotonic() > end:
                raise UserError(
                    f"no policy answers at {self.where} ({why}); look at what robo_rl serve says there"
                )
            out += got
        return out

    def ask(
        self, obs: dict[str, np.ndarray], t0: float, prefix: Prefix | None = None, **session: object
    ) -> None:
        """session: to a server that records, the episode and step of this question (`robo_rl serve
        --share`)."""
        if prefix is None:
            self.out += pack(obs, t0=t0, **session)
        else:
            self.out += pack(
                obs | {"prefix": prefix.rows}, t0=t0, delay=prefix.delay, end=prefix.end, **session
            )
        self.asked, self.since = t0, time.monotonic()
        end = self.since + self.patience
        self._write()
        while self.answer is None and (left := end - time.monotonic()) > 0:
            self._read(left)
        if self.blocks and self.answer is None:
            raise UserError(f"the policy at {self.where} gave no answer within {self.patience:g} s")

    def poll(self, now: float) -> tuple[np.ndarray, float] | None:
        if self.answer is None:
            self._read(0.0)
        out, self.answer = self.answer, None
        return out

    def tell(self, **outcome: object) -> dict:
        """How an episode went, to a server that records: episode, outcome or success, steps -> what it says.
        No question may be open.
        UserError: it refuses, or does not answer in time."""
        message = self._said(pack({}, **outcome), "whether it recorded the outcome")
        if "error" in message[0] or "recorded" not in message[0]:
            raise UserError(
                f"the policy at {self.where}: {plain_text(message[0].get('error', 'it records nothing'))}"
            )
        return message[0]

    def instruction(self) -> str:
        """What the server tells its policy; "": nothing. No question may be open. UserError: it does not
        answer in time, or is of an older version."""
        head, _ = self._said(pack({}, about=True), "what it tells its policy")
        if not isinstance(told := head.get("instruction"), str):
            raise UserError(
                f"the policy at {self.where} is served by an older robo_rl, which does not say its "
                "instruction: take the same version there"
            )
        return told

    def _said(self, question: bytes, what: str) -> tuple[dict, dict[str, np.ndarray]]:
        """The answer to a message that is no question for a chunk. UserError: none comes in time."""
        assert self.asked is None and self.answer is None
        self.out += question
        self.since = time.monotonic()
        while (message := self._message(0.1)) is None:
            if time.monotonic() - self.since > self.timeout:
                raise UserError(f"the policy at {self.where} does not say {what}")
        return message

    def _write(self) -> None:
        """Send as much of what is to be said as the connection takes now."""
        try:
            while self.out:
                del self.out[: self.wire.send(self.out[:PIECE])]
        except BlockingIOError:
            if time.monotonic() - self.since > self.timeout:
                raise UserError(
                    f"the policy at {self.where} is lost: it takes no more observations"
                ) from None
        except OSError as e:
            raise UserError(f"the policy at {self.where} is lost ({e.strerror or e})") from None

    def _message(self, wait: float) -> tuple[dict, dict[str, np.ndarray]] | None:
        """The next message, if it is there within `wait` [s]; what is to be sent is sent meanwhile."""
        poll = select.poll()
        poll.register(self.wire, select.POLLIN | (select.POLLOUT if self.out else 0))
        events = poll.poll(1e3 * wait)
        if self.out:
            self._write()
        if not events or not events[0][1] & ~select.POLLOUT:
            return None
        try:
            got = self.wire.recv(PIECE)
        except BlockingIOError:
            return None
        except OSError:
            got = b""
        if not got:
            raise UserError(f"the policy at {self.where} is lost: it closed the connection")
        self.incoming.feed(got)
        return self.incoming.take()

    def _read(self, wait: float) -> None:
        if (message := self._message(wait)) is None:
            return
        head, arrays = message
        if "error" in head:
            raise UserError(
                f"the policy at {self.where}: {plain_text(head['error'])} (it must be that of this run: "
                "robo_rl serve RUN there)"
            )
        t0, rows = head.get("t0"), arrays.get("rows")
        if self.asked is None or t0 != self.asked:
            raise UserError(f"the policy at {self.where} answers what it was not asked")
        if (
            rows is None
            or rows.ndim != 2
            or rows.dtype != np.float32
            or len(rows) > ROWS
            or not np.isfinite(rows).all()
        ):
            raise UserError(f"the policy at {self.where} answered no chunk of finite numbers")
        self.answer, self.asked = (rows, float(self.asked)), None

    def close(self) -> None:
        self.wire.close()
