"""What a page sends and receives: commands as JSON, frames as binary messages.

A frame is one binary message: length of the head [4 bytes, little-endian], the head (JSON), then the JPEGs
that it names. The page acknowledges frames by number; the number of unacknowledged ones is bounded, so a slow
link gets fewer pictures and not old ones. The age of the newest acknowledged picture is the delay that
commands are judged by.
"""

import json
import struct
import time

from robo_rl.errors import UserError, in_range
from robo_rl.files import parse_json
from robo_rl.human.console.access import BYTES, DEPTH, RateLimit
from robo_rl.human.intervention import POLICY

FLIGHT = 6  # frames on their way at most; `SLOW_FLIGHT` where the delay is above `SLOW`
SLOW_FLIGHT, SLOW = 2, 0.4


class PageConnection:
    """One page: who it is of, which robot it looks at, what it has shown."""

    def __init__(self, ws, who: str):
        self.ws, self.who, self.rate = ws, who, RateLimit()
        self.robot = 0
        self.sent: dict[int, float] = {}  # frames on their way: number -> when they were taken
        # the newest frame sent; when the newest one shown was taken (-1: none)
        self.last, self.shown = -1, -1.0
        self.flood = 0.0  # since when it is above its rate

    def seen(self, number: int | None) -> None:
        """The page has shown frame `number`, and with it all before it."""
        if number is not None and number in self.sent:
            self.shown = self.sent[number]
            self.sent = {n: at for n, at in self.sent.items() if n > number}

    def delay(self, now: float) -> float:
        """Age of the newest picture that the page has shown [s]; 0 before the first acknowledgement."""
        return now - self.shown if self.shown >= 0 else 0.0

    def may_send(self, now: float) -> bool:
        return len(self.sent) < (SLOW_FLIGHT if self.delay(now) > SLOW else FLIGHT)


def answer_within_rate(session, page: PageConnection, message) -> dict | None:
    """The answer to one message of a page; messages above the rate are dropped, and the first of them is
    answered."""
    if page.rate.allows():
        page.flood = 0.0 if page.rate.level > 100 else page.flood
        return answer_message(session, page, message)
    first = not page.flood
    page.flood = page.flood or time.monotonic()
    return {"t": "error", "text": "too many messages: some are dropped", "of": ""} if first else None


def answer_message(session, page: PageConnection, message) -> dict | None:
    """The answer to one message of a page; a bad one is refused in one line."""
    m, of = {}, ""
    try:
        if not isinstance(message, str):
            raise UserError("messages are text")
        m = parse_json(message, "the message", limit=BYTES, depth=DEPTH)
        of = str(m.get("t"))[:20]
        with session.lock:
            return execute_command(session, page, m)
    except UserError as e:
        return {"t": "error", "text": str(e), "of": of, "number": m.get("number")}
    except Exception as e:  # noqa: BLE001 (the edge: whatever a page sends is answered)
        return {"t": "error", "text": f"that message makes no sense ({type(e).__name__})", "of": of}


def execute_command(session, page: PageConnection, m: dict) -> dict | None:
    """Execute a parsed message of a page -> the answer; under the lock."""
    state, who, kind, i = session.state, page.who, m.get("t"), m.get("robot")
    if kind == "ping":
        return {"t": "pong", "sent": m.get("sent")}
    if kind == "seen":
        page.seen(m.get("frame"))
    elif kind == "look":
        session.watched[who] = page.robot = state.robot_index(i)
    elif kind == "take":
        taken = state.robot_index(i)
        grip = session.gripper_command(taken)
        number = state.take(who, taken, grip)
        session.watched[who] = page.robot = taken
        return {"t": "hold", "robot": taken, "number": number, "grip": grip}
    elif kind == "drive":
        state.drive(who, i, m.get("number"), m.get("action"), m.get("phase"), page.delay(time.monotonic()))
    elif kind == "back":
        state.hand_back(who, i, m.get("number"))
        return {
            "t": "said",
            "text": f"Robot {i} is back with its policy."
            if state.alone == POLICY
            else f"Robot {i} stands still.",
        }
    elif kind == "pause":
        state.pause(who, i, bool(m.get("on")))
        return {"t": "said", "text": f"Robot {i} {'stands still' if m.get('on') else 'goes on'}."}
    elif kind == "mark":
        state.label(who, i, m.get("episode"), m.get("success", 0))
        word = "discarded" if m["success"] is None else f"marked a {'success' if m['success'] else 'failure'}"
        return {"t": "said", "text": f"Robot {i}: episode {word}."}
    elif kind == "rewind":
        state.require_hold(who, state.robot_index(i), m.get("number"))
        seconds = m.get("seconds", 1.0)
        in_range("seconds", seconds, 0, 1e4)
        session.request_rewind(i, seconds)
        return {"t": "said", "text": f"Robot {i} goes back {seconds:g} s."}
    else:
        raise UserError(f"unknown message {str(kind)[:40]!r}")
    return None


def packed(frame, robot: int) -> bytes:
    """A frame for a page that looks at `robot`: its cameras large, the first camera of the others small."""
    large = frame.large.get(robot, ())
    pictures = [(robot, view, 1, axes, data) for view, data, axes in large]
    pictures += [(i, "", 0, None, data) for i, data in enumerate(frame.small) if i != robot or not large]
    names = [
        {"robot": i, "view": view, "large": big, "bytes": len(data), "axes": axes}
        for i, view, big, axes, data in pictures
    ]
    head = json.dumps({"frame": frame.number, "pictures": names})
    return b"".join((struct.pack("<I", len(head)), head.encode(), *(p[-1] for p in pictures)))
