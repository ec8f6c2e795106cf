"""Who may talk to the console, and how much: one-time addresses, sessions, Host and Origin, connections.

An address that `robo_rl console` prints carries a token that works once: it is exchanged for a session in an
HttpOnly cookie. Tokens and sessions are kept as SHA-256 digests, so that the time of a look-up says nothing
about them. `renew` makes new addresses and ends the old sessions.
"""

import contextlib
import hashlib
import ipaddress
import resource
import secrets
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable

from robo_rl.errors import UserError

PENDING, PER_ADDRESS = 32, 16  # connections that have not shown a session, and those of one address
CONNECTIONS = 96  # all of them
RESERVED = 32  # descriptors kept for files
RATE, BURST = 200.0, 400.0  # messages per second of one page, and at once
BYTES, DEPTH = 4096, 4  # of one message


class Access:
    """Tokens and sessions of `operators`. url: the address of a reverse proxy in front, "" for none."""

    def __init__(self, operators: Iterable[str], url: str = "", clock: Callable[[], float] = time.monotonic):
        self.operators, self.url, self.clock = tuple(operators), url.rstrip("/"), clock
        self.names = {"localhost", socket.gethostname().lower()}
        self.names.add(urllib.parse.urlsplit(self.url).hostname or "localhost")
        self.renew()

    def renew(self) -> None:
        """New tokens for everybody; old tokens and sessions end."""
        self.tokens = {name: secrets.token_urlsafe(24) for name in self.operators}
        self._unused = {_digest(token): name for name, token in self.tokens.items()}
        self._used: dict[bytes, float] = {}
        self._sessions: dict[bytes, str] = {}

    def exchange(self, token: str) -> tuple[str, str]:
        """(operator, session) for a token, which is used up by that. UserError: nobody's, or used before."""
        key = _digest(token)
        if key in self._used:
            raise UserError(
                f"this address was used {self.clock() - self._used[key]:.0f} s ago, and works once; if it "
                "was not you, somebody else has read it: make new addresses"
            )
        if key not in self._unused:
            raise UserError("the token is missing or wrong: open the address that robo_rl console printed")
        name, session = self._unused.pop(key), secrets.token_urlsafe(32)
        self._used[key] = self.clock()
        self._sessions = {k: v for k, v in self._sessions.items() if v != name} | {_digest(session): name}
        return name, session

    def operator(self, session: str) -> str:
        """Whose session it is; "" if nobody's."""
        return self._sessions.get(_digest(session), "")

    def host_is_ours(self, host: str) -> bool:
        """Whether a Host header names this machine: an IP address, a name of ours, or that of the proxy.

        A page of a stranger whose DNS name was made to point here (rebinding) comes with that name.
        """
        name = _host_name(host)
        return name in self.names or _is_ip(name)

    def origin_is_ours(self, origin: str, host: str) -> bool:
        """Whether an Origin header is that of our own page, served under `host` or the proxy's address."""
        return origin in (f"http://{host}", f"https://{host}") or bool(self.url) and origin == self.url


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _host_name(host: str) -> str:
    try:
        parts = urllib.parse.urlsplit(f"//{host}")
        _ = parts.port  # ValueError for one that is no number
    except ValueError:
        return ""
    return (parts.hostname or "").lower() if parts.netloc == host and "@" not in host else ""


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def cookie(header: str, name: str) -> str:
    """The value of a cookie in a Cookie header; "" if it is not there."""
    for part in header.split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def exchange_address(address: str, timeout: float = 30) -> tuple[str, dict[str, str]]:
    """Use up an address that the console printed -> (its WebSocket's address, headers for it). For programs.

    UserError: the address is not taken.
    """
    url = urllib.parse.urlsplit(address)
    try:
        with urllib.request.urlopen(address, timeout=timeout) as answer:
            got = answer.headers.get("Set-Cookie", "")
    except urllib.error.HTTPError as e:
        why = e.read(500).decode(errors="replace").strip()
        raise UserError(f"the console refuses {url.netloc}: {why}") from None
    origin = f"{url.scheme}://{url.netloc}"
    return f"{origin.replace('http', 'ws', 1)}/ws", {"Origin": origin, "Cookie": got.split(";")[0]}


class RateLimit:
    """A token bucket: `RATE` messages per second, `BURST` at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock, self.level, self.at = clock, BURST, clock()

    def allows(self) -> bool:
        """Whether one more message is within the rate; counts it."""
        now = self.clock()
        self.level, self.at = min(BURST, self.level + RATE * (now - self.at)), now
        if self.level < 1:
            return False
        self.level -= 1
        return True


def connection_limit() -> int:
    """How many connections this process can afford beside `RESERVED` descriptors; a low soft limit is raised.

    UserError: fewer than eight.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 if hard == resource.RLIM_INFINITY else min(1024, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    with open("/dev/null") as f:  # the lowest free descriptor: about as many are in use
        free = (CONNECTIONS * 2 if soft == resource.RLIM_INFINITY else soft - f.fileno()) - 2 * RESERVED
    if free < 8:
        raise UserError(
            f"the console needs {8 - free} more open files than this shell allows ({soft}): ulimit -n 1024"
        )
    return min(CONNECTIONS, free)


class DescriptorReserve:
    """Descriptors held back; while the block runs they are free, for files, whatever else is open."""

    def __init__(self, count: int = RESERVED):
        self.count, self._held = count, []
        self._fill()

    def _fill(self) -> None:
        try:
            while len(self._held) < self.count:
                self._held.append(open("/dev/null"))  # noqa: SIM115
        except OSError:  # none left: what we have is kept, the rest taken the next time
            pass

    def __enter__(self):
        self.close()
        return self

    def __exit__(self, *error) -> None:
        self._fill()

    def close(self) -> None:
        while self._held:
            self._held.pop().close()


class BoundedListener(socket.socket):
    """A listening socket that bounds what it has accepted.

    A connection is pending until `vouch` is called with its descriptor. Where a newcomer would be one too
    many of its address, or of all pending, the oldest pending one (of its address, of the address with the
    most) is shut down: whoever says at once who they are gets in, whatever waits in silence. Beyond `most`
    connections newcomers are closed.
    """

    most = CONNECTIONS
    refused = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # descriptor -> connection, address; in order
        self._pending: dict[int, tuple[socket.socket, str]] = {}
        self._others: dict[int, socket.socket] = {}  # vouched for, or shut down and not closed yet

    def accept(self):
        conn, address = super().accept()
        self._forget_closed()
        if len(self._pending) + len(self._others) >= self.most:
            conn.close()
            self.refused += 1
            raise ConnectionAbortedError("too many connections")  # asyncio asks again in its next turn
        host, held = address[0], Counter(a for _, a in self._pending.values())
        if held[host] >= min(PER_ADDRESS, self.most // 4):
            self._shut_down_oldest(host)
        elif len(self._pending) >= min(PENDING, self.most // 2):
            self._shut_down_oldest(held.most_common(1)[0][0])
        self._pending[conn.fileno()] = conn, host
        return conn, address

    def vouch(self, descriptor: int) -> None:
        """The connection with this descriptor has said who it is."""
        if descriptor in self._pending:
            self._others[descriptor] = self._pending.pop(descriptor)[0]

    def counts(self) -> tuple[int, int]:
        """(pending connections, all)"""
        self._forget_closed()
        return len(self._pending), len(self._pending) + len(self._others)

    def _forget_closed(self) -> None:
        self._pending = {k: v for k, v in self._pending.items() if v[0].fileno() == k}
        self._others = {k: v for k, v in self._others.items() if v.fileno() == k}

    def _shut_down_oldest(self, host: str) -> None:
        fd, (conn, _) = next((k, v) for k, v in self._pending.items() if v[1] == host)
        del self._pending[fd]
        self._others[fd] = conn
        self.refused += 1
        with contextlib.suppress(OSError):  # the other end was faster
            conn.shutdown(socket.SHUT_RDWR)
