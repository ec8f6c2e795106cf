"""The console's doors: one-time addresses, Host and Origin, caps on connections, what cannot be saved; then
all of it attacked.
"""

import asyncio
import contextlib
import io
import os
import re
import resource
import signal
import socket
import time
from functools import partial

import numpy as np
import pytest
from commands import robo_rl
from consoles import Page, connect, console, drive, trained

from robo_rl.data.reader import load
from robo_rl.errors import UserError
from robo_rl.experiment.console import open_session
from robo_rl.human.console.access import (
    BURST,
    PER_ADDRESS,
    RATE,
    Access,
    BoundedListener,
    DescriptorReserve,
    RateLimit,
    cookie,
    exchange_address,
)
from robo_rl.human.console.options import ConsoleOptions
from robo_rl.human.console.pages import FLIGHT, SLOW_FLIGHT, PageConnection
from robo_rl.human.console.server import HEADERS, ConsoleServer
from robo_rl.human.correction_journal import scan, unfinished


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory)


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


# ------------------------------------------------------------ who may talk


def test_an_address_works_once_and_gives_a_session_of_its_operator():
    clock = Clock()
    access = Access(["ann", "bob"], clock=clock)
    who, session = access.exchange(access.tokens["ann"])
    assert who == "ann" and access.operator(session) == "ann" and session != access.tokens["ann"]
    clock.now += 12
    with pytest.raises(UserError, match="used 12 s ago, and works once"):
        access.exchange(access.tokens["ann"])
    for wrong in ("", "x", session, "\udcff", "a" * 5000):
        with pytest.raises(UserError, match="missing or wrong"):
            access.exchange(wrong)
        assert access.operator(wrong[::-1]) == ""


def test_new_addresses_end_the_old_ones_and_every_session():
    access = Access(["ann", "bob"])
    old, (_, session) = dict(access.tokens), access.exchange(access.tokens["ann"])
    access.renew()
    assert access.operator(session) == "" and not set(old.values()) & set(access.tokens.values())
    with pytest.raises(UserError):
        access.exchange(old["bob"])


def test_names_that_strangers_point_at_this_machine_are_refused():
    access = Access(["ann"], "https://console.lab.example")
    ours = [
        "127.0.0.1:8765",
        "localhost:9000",
        "[::1]:8765",
        "192.168.1.7",
        "LOCALHOST",
        "console.lab.example",
    ]
    theirs = [
        "evil.example",
        "127.0.0.1.evil.example:8765",
        "a@localhost",
        "",
        "localhost:x",
        "localhost/..",
        "[::1",
        "1.2.3",
    ]
    assert all(map(access.host_is_ours, ours)) and not any(map(access.host_is_ours, theirs))


def test_only_pages_of_the_same_origin_open_a_web_socket():
    access = Access(["ann"], "https://console.lab.example/")
    assert access.origin_is_ours("http://localhost:9000", "localhost:9000")
    # a proxy that keeps no Host
    assert access.origin_is_ours("https://console.lab.example", "127.0.0.1:8765")
    for origin in (
        "",
        "null",
        "http://evil.example",
        "http://localhost:9001",
        "http://localhost:9000.evil.example",
    ):
        assert not access.origin_is_ours(origin, "localhost:9000")


def test_a_cookie_is_found_among_others():
    assert cookie("a=1; robo_rl_console_8=x=y; b", "robo_rl_console_8") == "x=y" and cookie("xa=1", "a") == ""


def test_a_page_may_send_so_much_and_no_more():
    clock = Clock()
    rate = RateLimit(clock)
    assert sum(rate.allows() for _ in range(2000)) == BURST
    clock.now += 0.5
    assert sum(rate.allows() for _ in range(2000)) == RATE / 2


def test_frames_on_their_way_are_bounded_and_fewer_on_a_slow_link():
    view = PageConnection(None, "ann")
    for number in range(FLIGHT):
        assert view.may_send(1.0) and view.delay(1.0) == 0
        view.sent[number] = 1.0 + number / 20
    assert not view.may_send(1.0)
    view.seen(2)
    view.seen(1)  # late
    view.seen("2")
    assert view.may_send(1.2) and view.delay(1.2) == pytest.approx(0.1) and sorted(view.sent) == [3, 4, 5]
    assert not view.may_send(3.0)
    view.seen(6 - SLOW_FLIGHT)
    assert view.may_send(3.0) and view.delay(3.0) == pytest.approx(3 - 1.2)


# ------------------------------------------------------------ connections


@contextlib.contextmanager
def listener(most):
    made = BoundedListener()
    made.bind(("127.0.0.1", 0))
    made.listen(256)
    made.most = most
    clients = []

    def come(source="127.0.0.1"):
        clients.append(socket.create_connection(made.getsockname(), timeout=10, source_address=(source, 0)))
        return made.accept()[0]

    try:
        yield made, come
    finally:
        for c in (*clients, made):
            c.close()


def closed(conn):
    conn.settimeout(5)
    return conn.recv(1) == b""


def test_silent_connections_of_an_address_make_room_for_the_newest():
    with listener(96) as (made, come):
        conns = [come() for _ in range(3 * PER_ADDRESS)]
        assert made.counts()[0] == PER_ADDRESS and made.refused == 2 * PER_ADDRESS
        assert all(map(closed, conns[: 2 * PER_ADDRESS]))  # shut down, oldest first
        conns[-1].settimeout(0.01)
        with pytest.raises(TimeoutError):
            conns[-1].recv(1)
        for c in conns[: 2 * PER_ADDRESS]:
            c.close()
        assert made.counts() == (PER_ADDRESS, PER_ADDRESS)
        for c in conns:
            c.close()


def test_those_who_said_who_they_are_are_never_shut_down():
    with listener(96) as (made, come):
        honest = come()
        made.vouch(honest.fileno())
        conns = [come() for _ in range(2 * PER_ADDRESS)]
        honest.settimeout(0.01)
        with pytest.raises(TimeoutError):
            honest.recv(1)
        for c in (honest, *conns):
            c.close()
        assert made.counts() == (0, 0)


def test_one_address_cannot_shut_out_another():
    with listener(40) as (_, come):
        other = come("127.0.0.2")
        conns = [come("127.0.0.1") for _ in range(25)]
        other.settimeout(0.01)
        with pytest.raises(TimeoutError):
            other.recv(1)
        for c in (other, *conns):
            c.close()


def test_beyond_all_connections_newcomers_are_closed():
    with listener(8) as (made, come):
        conns = []
        with pytest.raises(ConnectionAbortedError):
            conns.extend(come() for _ in range(9))  # what was shut down counts until it is closed
        assert len(conns) == 8 and made.counts()[1] == 8
        for c in conns:
            c.close()
        come().close()


def test_reserved_descriptors_are_free_while_something_is_saved():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reserve, taken = DescriptorReserve(8), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        with reserve:
            files = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
            for fd in files:
                os.close(fd)
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/dev/null", os.O_RDONLY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
        reserve.close()


# ------------------------------------------------------------ what cannot be saved


def make_session(run, **more):
    """A session in which no time passes: a machine that stalls ends nobody's hold."""
    session, _ = open_session(ConsoleOptions(run=str(run / "run"), robots=2, operators="ann,bob", **more))
    session.state.clock = Clock()
    return session


def leave_the_goal(session, phase="correction"):
    """Ann drives robot 0, which she holds, away from its goal, so that no episode ends; a step follows."""
    goal = [session.spec.state_names.index(name) for name in ("goal_dx", "goal_dy", "goal_dz")]
    action = np.full(len(session.spec.axes), 0.2)
    action[:3] = -0.2 * np.sign(session.fleet.obs["state"][0, goal])
    session.state.drive("ann", 0, session.state.holds[0].number, action, phase)
    session.tick()


class Full:
    """A writer on a full disk."""

    def __init__(self, writer):
        self.writer = writer

    def __getattr__(self, name):
        return getattr(self.writer, name)

    def __len__(self):
        return len(self.writer)

    def flush(self):
        raise UserError("cannot write the data set: No space left on device")

    close = flush


def correct(session, steps=12):
    """Ann corrects robot 0 for some steps, and marks the episode a success."""
    session.state.take("ann", 0)
    for _ in range(steps):
        leave_the_goal(session)
    session.state.label("ann", 0, int(session.state.episode[0]), True)
    session.tick()


def test_an_episode_that_cannot_be_saved_is_told_kept_and_saved_later(run):
    session = make_session(run)
    good, before = session.recorder.writer, session.recorder.writer.episodes
    try:
        session.recorder.writer = Full(good)
        correct(session)
        state = session.page_state("ann")
        assert (
            state["trouble"].startswith("corrections are not saved yet")
            and "No space left" in state["trouble"]
        )
        assert state["account"]["unsaved"] == 1 and good.episodes == before
        for _ in range(3):
            session.tick()  # the robots go on
        session.recorder.writer = good
        session.recorder.save()
        assert session.page_state("ann")["trouble"] == "" and good.episodes == before + 1
    finally:
        session.recorder.writer = good
        session.close()
    assert "human" in load(run / "run" / "corrections").episode(before).source


def test_a_console_that_ends_with_unsaved_episodes_leaves_them_to_the_next(run, capsys):
    session = make_session(run)
    before, good = session.recorder.writer.episodes, session.recorder.writer
    session.recorder.writer = Full(good)
    correct(session)
    session.close()
    assert "the next robo_rl console of this run puts it into the data set" in capsys.readouterr().err
    good._buffer = []
    good.close()
    assert len(unfinished(scan(run / "run" / "console.journal")[0], before)) == 1
    session = make_session(run)
    try:
        assert session.recorder.recovered == 1 and session.recorder.writer.episodes == before + 1
    finally:
        session.close()


def test_an_intervention_is_counted_once_however_often_the_person_pauses(run):
    session = make_session(run)
    try:
        number = session.state.take("ann", 0)
        for phase in ("correction", "pause", "correction", "pause", "recovery", "correction"):
            for _ in range(8):
                leave_the_goal(session, phase)
        assert session.page_state("ann")["account"]["interventions"] == 1
        session.state.hand_back("ann", 0, number)
        for _ in range(8):
            session.tick()
        number = session.state.take("ann", 0)
        for _ in range(8):
            leave_the_goal(session)
        assert session.page_state("ann")["account"]["interventions"] == 2
        session.state.hand_back("ann", 0, number)
        session.state.take("ann", 0)  # before the policy has acted
        for _ in range(8):
            leave_the_goal(session)
        assert session.page_state("ann")["account"]["interventions"] == 3
    finally:
        session.close()


def test_every_camera_of_the_robot_that_is_looked_at_is_filmed_whole(run):
    from PIL import Image

    session = make_session(run, size=240)
    try:
        session.connect("ann")
        session.watched["ann"] = 1
        session.draw()
        frame = session.frame
        assert (
            session.cameras.views == ["front", "wrist"] and list(frame.large) == [1] and len(frame.small) == 2
        )
        assert [view for view, _, _ in frame.large[1]] == ["front", "wrist"]
        assert all(Image.open(io.BytesIO(data)).size == (240, 240) for _, data, _ in frame.large[1])
        (u, v), *along = frame.large[1][0][2]
        assert 0 < u < 1 and 0 < v < 1 and along[2][1] < 0  # up in the front camera is up in the picture
        assert session.page_state("ann")["axes"][0]["words"] == ("back", "forward")
    finally:
        session.close()


# ------------------------------------------------------------ the attack


def ask(at, lines, timeout=20):
    """Raw bytes to the listener -> what it answers until it closes."""
    with socket.create_connection(at, timeout=timeout) as s, contextlib.suppress(OSError):
        s.sendall(lines)
        out = b""
        while part := s.recv(65536):
            out += part
        return out
    return b""


def get(at, path="/", host="127.0.0.1", headers=""):
    return ask(at, f"GET {path} HTTP/1.1\r\nHost: {host}:{at[1]}\r\n{headers}\r\n".encode())


def status(answer):
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def descriptors(count):
    """For the start of a command: it may open so many files."""
    return partial(resource.setrlimit, resource.RLIMIT_NOFILE, (count, count))


def port_of(addresses):
    return "127.0.0.1", int(re.search(r":(\d+)/", addresses["ann"])[1])


def test_the_address_leaves_a_cookie_and_every_answer_says_what_a_browser_may_do(run):
    with console(run) as (command, addresses):
        at, token = port_of(addresses), addresses["ann"].split("token=")[1]
        first = get(at, f"/?token={token}").decode()
        given = re.search(r"Set-Cookie: (\S+?)=(\S+); HttpOnly; SameSite=Strict; Path=/\r", first)
        assert status(first.encode()) == 200 and given and token not in first and "url=/" in first
        assert status(get(at, f"/?token={token}")) == 403  # once
        session = f"Cookie: {given[1]}={given[2]}\r\n"
        for path in ("/", "/console.js", "/console.css"):
            answer = get(at, path, headers=session).decode()
            assert status(answer.encode()) == 200 and all(f"{k}: {v}\r\n" in answer for k, v in HEADERS)
            assert token not in answer and given[2] not in answer
            if path == "/":
                assert "<style" not in answer and not re.search(
                    r"<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=|https?://", answer
                )
        assert "script-src 'self'" in answer and "frame-ancestors 'none'" in answer and "no-store" in answer
        assert [
            status(get(at, p)) for p in ("/", "/console.js", "/ws", "/?token=", "/nothing", "/../etc/passwd")
        ] == [403, 403, 403, 403, 404, 404]
        assert status(get(at, "/", host="evil.example", headers=session)) == 421
        assert status(ask(at, f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n{session}\r\n".encode())) in (0, 405)
        ws = (
            f"{session}Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: "
            f"13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n"
        )
        for origin in (
            "",
            "Origin: http://evil.example\r\n",
            "Origin: null\r\n",
            f"Origin: http://127.0.0.1:{at[1] + 1}\r\n",
        ):
            assert status(get(at, "/ws", headers=ws + origin)) == 403
        with socket.create_connection(at, timeout=20) as s:
            s.sendall(
                f"GET /ws HTTP/1.1\r\nHost: 127.0.0.1:{at[1]}\r\n{ws}Origin: "
                f"http://127.0.0.1:{at[1]}\r\n\r\n".encode()
            )
            assert s.recv(4096).startswith(b"HTTP/1.1 101")
            out = command.out.read_text()
            command.signal(signal.SIGUSR1)  # new addresses: this session ends
            command.until(lambda: command.out.read_text().count("http://") == 4, 60)
            with contextlib.suppress(OSError):
                while s.recv(65536):
                    pass
        new = dict(re.findall(r"(\w+): (http\S+)", command.out.read_text()[len(out) :]))
        assert status(get(at, "/", headers=session)) == 403 and new["bob"] != addresses["bob"]
        with pytest.raises(UserError, match="wrong"):
            exchange_address(addresses["bob"])
        assert exchange_address(new["bob"])[1]["Cookie"].startswith("robo_rl_console_")


BAD = [
    "[" * 4000,
    '{"t":' * 600 + "1" + "}" * 600,
    "null",
    "[]",
    '"drive"',
    "{}",
    '{"t": []}',
    "nonsense",
    '{"t": "drive"',
    '{"t": "rewind", "robot": 0, "seconds": 1e999}',
    '{"t": "look", "robot": ' + "9" * 400 + "}",
    '{"t": "mark", "robot": 0, "episode": {}, "success": true}',
    '{"t": "take", "robot": true}',
    '{"t": "drive", "robot": 0, "number": 1, "action": [[[]]], "phase": []}',
    "\u0000",
    '{"t": "\\ud800"}',
]


@pytest.mark.slow
def test_attackers_stop_neither_the_robots_nor_an_operator_nor_what_is_saved(run):
    """300 half-open connections on 256 descriptors, guesses, garbage, slow and silent pages, floods; ann
    works on.
    """

    async def teach(addresses):
        async with connect(addresses["ann"]) as a:
            ann = Page(a)
            await ann.hear(lambda p: p.state and p.pictures > 2)
            kept, hold = ann.state["account"]["kept"], await ann.ask(t="take", robot=0)
            while ann.state["robots"][0]["phase"] != "correction":
                await drive(ann, hold["number"], 5)
                ann.state = None
                await ann.hear(lambda p: p.state)
            await ann.ask(t="mark", robot=0, episode=ann.state["robots"][0]["episode"], success=True)
            await ann.hear(lambda p: p.state["account"]["kept"] > kept)
            assert ann.state["trouble"] == "" and ann.state["account"]["unsaved"] == 0
            return ann.state["account"]["kept"]

    async def bad_page(addresses):
        async with connect(addresses["bob"]) as b:
            bob = Page(b)
            await bob.hear(lambda p: p.state)
            for text in BAD:
                before = len(bob.said)
                await b.send(text)
                await bob.hear(lambda p, before=before: len(p.said) > before)
                assert (
                    bob.said[-1]["t"] == "error"
                    and "\n" not in bob.said[-1]["text"]
                    and len(bob.said[-1]["text"]) < 300
                ), text
            await b.send(bytes(1000))
            await bob.hear(lambda p: p.said[-1]["text"] == "messages are text")
            for _ in range(1500):
                await b.send('{"t": "ping", "sent": 1}')
            await bob.hear(lambda p: any("too many messages" in m.get("text", "") for m in p.said))
            await b.send("x" * 20_000)  # too large: this page is cut off, and no other
            with contextlib.suppress(Exception):
                while True:
                    await asyncio.wait_for(b.recv(), 30)
            assert b.close_code == 1009

    with console(run, first=descriptors(256)) as (command, addresses):
        at = port_of(addresses)
        open_files = f"/proc/{command.process.pid}/fd"
        half = []
        try:
            for k in range(320):
                with contextlib.suppress(OSError):
                    half.append(socket.create_connection(at, timeout=10))
                    half[-1].sendall(
                        (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", bytes(range(256)))[k % 4]
                    )
            assert len(half) > 250 and len(os.listdir(open_files)) < 200
            kept = asyncio.run(teach(addresses))
            assert kept == 1
            guesses = [status(get(at, f"/?token={k:032d}")) for k in range(4)]
            assert set(guesses) == {403}
            asyncio.run(bad_page(addresses))
            # a byte now and then: the deadline is for the whole request
            slow = socket.create_connection(at, timeout=60)
            began = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() - began < 60:
                    slow.sendall(b"G")
                    slow.settimeout(0.3)
                    with contextlib.suppress(TimeoutError):
                        if slow.recv(100) == b"":
                            break
            assert time.monotonic() - began < 50
            slow.close()
            assert asyncio.run(teach(addresses)) == 2
        finally:
            for s in half:
                s.close()
        asyncio.run(teach(addresses))  # and after it
        command.signal(signal.SIGINT)
        done = command.wait()
        assert done.code == 0 and "Traceback" not in done.err, done.err
        assert "(3 episodes with help)" in done.out
    data = load(run / "run" / "corrections")
    assert len(data) >= 3 and np.all([data.success[-3:]])


def test_a_listener_that_fails_is_opened_anew_while_the_robots_go_on(run):
    session = make_session(run)
    server = ConsoleServer(session, "127.0.0.1", 0, "ann")
    try:
        server.start()
        address, real = server.addresses()["ann"], server.report_refused

        def broken():
            server.report_refused = real
            raise RuntimeError("a fault of ours")

        server.report_refused = broken
        old = server.listener
        server.loop.call_soon_threadsafe(server.wake.set)
        end = time.monotonic() + 30
        while server.listener is old or not server.listening:
            session.tick()
            assert time.monotonic() < end
        assert exchange_address(address)[1]["Cookie"]
        server.stop()
        assert not server.thread.is_alive()
    finally:
        session.close()


def test_a_console_without_descriptors_says_how_to_get_some(run):
    done = robo_rl(run, "console", "run", "--port", "0", "--seconds", "1", first=descriptors(100))
    assert "ulimit -n 1024" in done.mistake


def test_programs_enter_as_a_browser_does(run):
    with console(run) as (_, addresses):
        at, headers = exchange_address(addresses["bob"])
        assert re.fullmatch(r"ws://127.0.0.1:\d+/ws", at) and set(headers) == {"Origin", "Cookie"}
        with pytest.raises(UserError, match="the console refuses .* works once"):
            exchange_address(addresses["bob"])
