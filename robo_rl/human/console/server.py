"""The console's page and its WebSockets: HTTP and WebSocket on one port, in a thread of its own."""

import asyncio
import contextlib
import json
import logging
import sys
import threading
import time
import urllib.parse
from pathlib import Path

from robo_rl.errors import UserError
from robo_rl.human.console.access import BYTES, Access, BoundedListener, connection_limit, cookie
from robo_rl.human.console.pages import PageConnection, answer_within_rate, packed

HANDSHAKE = 5.0  # s from a connection to the end of its request
WRONG = 0.3  # s that a wrong token waits for its answer
FLOOD = 5.0  # s above the rate after which a page is cut off
SAY = 0.1  # s between two states
ASSETS = {
    "/": ("console.html", "text/html"),
    "/console.css": ("console.css", "text/css"),
    "/console.js": ("console.js", "text/javascript"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Connection", "close"),
)
ENTER = b"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta http-equiv="refresh" content="0; url=/">
<title>robo_rl console</title><p><a href="/">Open the console</a></p></html>
"""  # a page and no redirect: cookies of SameSite=Strict do not follow one that a page of another site began


class ConsoleServer:
    """The listener, its operators and their pages. One page per operator: a newer one replaces it.

    A fault of the listener or of a page is reported in one line and ends neither the process nor the other
    pages; a listener that is gone is opened anew.
    """

    def __init__(
        self, session, host: str, port: int, operators: str, url: str = "", port_option: str = "--port"
    ):
        self.session, self.host, self.port, self.port_option = session, host, port, port_option
        self.access = Access(operators.split(","), url)
        if host not in ("", "0.0.0.0", "::"):
            self.access.names.add(host.lower())
        self.files = {
            path: ((Path(__file__).parent / name).read_bytes(), f"{kind}; charset=utf-8")
            for path, (name, kind) in ASSETS.items()
        }
        self.most = connection_limit()
        self.pages: dict[str, PageConnection] = {}
        self.renewal = "press Enter in its terminal for new addresses"
        self.wrong, self.told, self.wake = 0, (0, 0), asyncio.Event()
        self.ended = self.listening = False
        self.loop, self.ready, self.failed = asyncio.new_event_loop(), threading.Event(), None
        self.thread = threading.Thread(target=self._run, name="console", daemon=True)

    def addresses(self) -> dict[str, str]:
        """{operator: an address that works once}"""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        base = self.access.url or f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        return {name: f"{base}/?token={token}" for name, token in self.access.tokens.items()}

    def start(self) -> None:
        self.thread.start()
        if not self.ready.wait(20) or self.failed:
            raise cannot_listen(self.host, self.port, self.port_option, self.failed)

    def stop(self) -> None:
        self.ended = True
        self.loop.call_soon_threadsafe(self.wake.set)
        self.thread.join(5)

    def renew(self) -> None:
        """New addresses for everybody; the pages of old sessions are closed."""
        self.access.renew()
        for page in list(self.pages.values()):
            asyncio.run_coroutine_threadsafe(page.ws.close(4003, "this session has ended"), self.loop)

    # ------------------------------------------------------------ the listener

    def _run(self) -> None:
        self.loop.set_exception_handler(lambda loop, context: None)  # of single connections
        while not self.failed and not self.ended:
            try:
                self.loop.run_until_complete(self._serve())
            except Exception as e:  # noqa: BLE001 (the robots must not be left without a console)
                if not self.ready.is_set():
                    self.failed = e
                    self.ready.set()
                    return
                self.listening = False
                warn(
                    f"the console's listener failed ({type(e).__name__}: {e}); the robots go on, it is "
                    "opened anew"
                )
                time.sleep(1)

    async def _serve(self) -> None:
        import socket

        from websockets.asyncio.server import serve

        found = socket.getaddrinfo(
            self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        self.wake.clear()
        self.told = 0, self.wrong
        self.listener = BoundedListener(family, kind, protocol)
        self.listener.most = self.most
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.listener.bind(address)
        except OSError:
            self.listener.close()
            raise
        logger = logging.getLogger("robo_rl.console")
        logger.setLevel(logging.CRITICAL)
        async with serve(
            self.handle,
            sock=self.listener,
            process_request=self.request,
            open_timeout=HANDSHAKE,
            max_size=BYTES,
            max_queue=16,
            ping_interval=5,
            ping_timeout=5,
            close_timeout=2,
            compression=None,
            server_header=None,
            logger=logger,
            backlog=16,
        ):
            self.listener.listen(256)  # the kernel's queue; of it at most 16 are accepted in one turn
            self.port = self.listener.getsockname()[1]
            self.listening = True
            self.ready.set()
            while not self.ended:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), 30)
                self.report_refused()

    def report_refused(self) -> None:
        """One line about who was turned away in the last half minute."""
        refused, wrong = (a - b for a, b in zip((self.listener.refused, self.wrong), self.told, strict=True))
        self.told = self.listener.refused, self.wrong
        if refused or wrong:
            warn(
                f"{refused} connections beyond the limits and {wrong} requests without a token or session "
                "were refused"
            )

    # ------------------------------------------------------------ requests

    @property
    def cookie(self) -> str:
        return f"robo_rl_console_{self.port}"

    async def request(self, connection, request):
        """The answer to a request; None lets a WebSocket open."""
        from websockets.datastructures import Headers
        from websockets.http11 import Response

        def answer(status: int, reason: str, body: bytes, kind: str = "text/plain; charset=utf-8", more=()):
            about = [("Content-Type", kind), ("Content-Length", str(len(body)))]
            return Response(status, reason, Headers([*about, *HEADERS, *more]), body)

        def one(name: str) -> str:
            values = request.headers.get_all(name)
            return values[0] if len(values) == 1 else ""

        url = urllib.parse.urlsplit(request.path)
        if getattr(request, "method", "GET") != "GET":
            return answer(405, "Method Not Allowed", b"only GET is answered\n")
        if not self.access.host_is_ours(one("Host")):
            return answer(
                421,
                "Misdirected Request",
                b"this console does not answer to that name; behind a proxy start it with --url\n",
            )
        if url.path == "/favicon.ico":
            return answer(204, "No Content", b"")
        if url.path != "/ws" and url.path not in self.files:
            return answer(404, "Not Found", b"there is nothing here\n")
        token = urllib.parse.parse_qs(url.query).get("token", [""])[0] if url.path == "/" else ""
        if token:
            try:
                _, session = self.access.exchange(token)
            except UserError as e:
                self.wrong += 1
                await asyncio.sleep(WRONG)
                return answer(403, "Forbidden", f"{e}\n({self.renewal})\n".encode())
            secure = "; Secure" if self.access.url.startswith("https:") else ""
            return answer(
                200,
                "OK",
                ENTER,
                "text/html; charset=utf-8",
                [("Set-Cookie", f"{self.cookie}={session}; HttpOnly; SameSite=Strict; Path=/{secure}")],
            )
        who = self.access.operator(cookie("; ".join(request.headers.get_all("Cookie")), self.cookie))
        if not who:
            self.wrong += 1
            return answer(
                403,
                "Forbidden",
                b"no session: open the address that robo_rl console printed (each works once)\n",
            )
        if url.path == "/ws":
            if not self.access.origin_is_ours(one("Origin"), one("Host")):
                return answer(403, "Forbidden", b"a page of another origin may not drive robots\n")
            connection.operator = who
            self.listener.vouch(connection.transport.get_extra_info("socket").fileno())
            return None
        return answer(200, "OK", *self.files[url.path])

    # ------------------------------------------------------------ pages

    async def handle(self, ws) -> None:
        """Serve one operator's page, from its opening to its end."""
        from websockets.exceptions import ConnectionClosed

        page = PageConnection(ws, ws.operator)
        who = page.who
        before, self.pages[who] = self.pages.get(who), page
        if before is not None:
            await before.ws.close(4001, "opened in another tab")
        self.session.connect(who)
        sending = asyncio.create_task(self.send(page))
        sending.add_done_callback(lambda task: task.cancelled() or task.exception() and ws.transport.abort())
        try:
            async for message in ws:
                answer = answer_within_rate(self.session, page, message)
                if answer is not None:
                    await ws.send(json.dumps(answer))
                if page.flood and time.monotonic() - page.flood > FLOOD:
                    await ws.close(1008, "too many messages")
        except ConnectionClosed:
            pass
        except Exception as e:  # noqa: BLE001 (one page's fault must not end the others)
            warn(f"the page of {who} failed ({type(e).__name__}: {e}); it may connect again")
        finally:
            sending.cancel()
            if self.pages.get(who) is page:
                del self.pages[who]
                self.session.disconnect(who)

    async def send(self, page: PageConnection) -> None:
        """Send the newest frame as the page has room for it, and the state ten times a second."""
        said = 0.0
        while True:
            now, frame = time.monotonic(), self.session.frame
            if frame.number != page.last and page.may_send(now):
                page.last = frame.number
                page.sent[frame.number] = frame.at
                await page.ws.send(packed(frame, page.robot))
            if now - said > SAY:
                said = now
                with self.session.lock:
                    document = self.session.page_state(page.who)
                document["delay"] = round(page.delay(now), 3)
                await page.ws.send(json.dumps(document))
            await asyncio.sleep(0.01)


def cannot_listen(host: str, port: int, option: str, error: Exception | None) -> UserError:
    """What to tell where nothing can listen there; option: what names the port."""
    why = f" ({getattr(error, 'strerror', '') or error})" if error else ""
    return UserError(f"cannot listen on {host}:{port}{why}; choose another {option}, 0 takes any free one")


def warn(text: str) -> None:
    print(f"robo_rl: {text}", file=sys.stderr, flush=True)
