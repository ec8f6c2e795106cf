"""Vision-language models behind HTTP as judges of success: our own protocol, and any server that speaks
OpenAI's.

Ours: POST {"items": [{"task": str, "state": [S numbers], "images": {view: PNG in base64}}, ...]} at most
`batch` at a time, answered by {"scores": [probability, ...]} in that order. With `frames` K > 1 an item has
"clip": {view: [K PNGs, oldest first]} too.

OpenAI's: POST <url>/chat/completions with the instruction, the criteria and K frames of every view as data
URLs, `n` answers asked for; each is JSON {"success": bool, "criteria": [bool, ...]}. Success is what the
majority of the answers says; partial credit is the share of the criteria that are met, the mean over the
answers. Answers are kept by the content of what was asked. Source of the set-up (video, instruction,
criteria, majority of 5): World-Gymnast (see docs/explanation/world_models.md).
"""

import base64
import email.utils
import hashlib
import http.client
import io
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from robo_rl import files
from robo_rl.errors import UserError, in_range
from world_models.judge_protocol import Seen

LONGEST = 10_000_000  # bytes of an answer
SILENT = 5.0  # s after which an attempt that failed is told
ANOTHER = "name another judge: the folder of a classifier (robo_rl wm judge), or in a world model head"
T = TypeVar("T")
KEY = "OPENAI_API_KEY"  # environment variable whose value is sent as bearer token, where it is set


# ---- a request ---------------------------------------------------------------------------------------------


@dataclass
class Server:
    """One address: each request has `timeout` seconds and `tries` attempts; at most `budget` requests in all.
    What Retry-After asks for is waited, `timeout` at most. `keyed`: requests carry the key, where there is
    one. Owns the count `asked`, and `of_process`: by all servers of this process."""

    of_process: ClassVar[int] = 0

    url: str
    timeout: float = 10.0
    tries: int = 3
    pause: float = 0.2  # seconds before the second attempt; doubled before each further one
    budget: int = 100_000
    asked: int = 0
    silent: float = SILENT
    keyed: bool = False
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        for name, low, high in (("timeout", 1e-3, 3600), ("tries", 1, 20), ("budget", 1, 10**9)):
            in_range(f"judge {name}", getattr(self, name), low, high)

    def check(self) -> None:
        """UserError where nothing listens: before a run has learnt what this would judge. One that answers
        nothing but questions is found."""
        try:
            urllib.request.urlopen(
                urllib.request.Request(self.url, method="HEAD"), timeout=self.timeout
            ).close()
        except urllib.error.HTTPError:
            return
        except (OSError, http.client.HTTPException) as e:
            why = getattr(e, "reason", e)
            if isinstance(why, (ConnectionRefusedError, socket.gaierror)):
                raise UserError(
                    f"nothing listens where the judge should be, at {self.url} ({why}); start it, or "
                    f"{ANOTHER}"
                ) from None

    def post(self, body: bytes, headers: dict[str, str]) -> bytes:
        """The answer; UserError after the last attempt, or for one that does not end."""
        why, attempt, began, asked_for = "", 0, time.monotonic(), 0.0
        for attempt in range(self.tries):
            if attempt:
                rest = max(self.pause * 2 ** (attempt - 1), min(asked_for, self.timeout))
                if time.monotonic() - began + rest > self.silent:
                    warnings.warn(
                        f"the judge at {self.url} does not answer ({why}); attempt {attempt + 1} of "
                        f"{self.tries} of {self.timeout:g} s",
                        stacklevel=2,
                    )
                self.sleep(rest)
            if self.asked >= self.budget:
                raise UserError(
                    f"the judge at {self.url} was asked {self.asked} times, its budget; give it more behind "
                    "#: budget=…, or ask less often: every=…"
                )
            self.asked += 1
            Server.of_process += 1
            try:
                request = urllib.request.Request(
                    self.url, body, {"Content-Type": "application/json"} | headers
                )
                return within(self.timeout, partial(fetch, request, self.timeout))
            except urllib.error.HTTPError as e:
                why = f"status {e.code}" + (f" to {e.headers['Location']}" if e.code < 400 else "")
                if e.code < 500 and e.code != 429:
                    raise UserError(
                        f"the judge at {self.url} refuses the question with {why}{said_in(e)}; "
                        f"{self.cure(e.code)}, or {ANOTHER}"
                    ) from None
                asked_for = seconds_asked_for(e.headers.get("Retry-After", ""), time.time())
                why += f", to be asked again in {asked_for:.0f} s" * (asked_for > 0)
            except (OSError, http.client.HTTPException) as e:  # the latter: it does not speak HTTP
                why, asked_for = " ".join(str(getattr(e, "reason", e)).split())[:200] or type(e).__name__, 0.0
        raise UserError(
            f"the judge at {self.url} does not answer ({why}; {attempt + 1} attempt{'s' if attempt else ''} "
            f"of {self.timeout:g} s; with tries=9 behind # one that is started again is waited for 50 s); "
            f"start it, or {ANOTHER}"
        )

    def cure(self, status: int) -> str:
        """What mends a refusal, as a part of a sentence."""
        if status in (401, 403):
            if not self.keyed:
                return "it wants a key, which is sent by OpenAI's protocol alone (openai: before its address)"
            return f"mend its key (${KEY})" if os.environ.get(KEY) else f"set its key (${KEY})"
        return "mend its address" + " or its options behind #" * (status != 404)


def seconds_asked_for(retry_after: str, now: float) -> float:
    """Seconds from `now` [s since 1970] that a header Retry-After (seconds, or a date) asks to wait; 0 for
    none, or one that cannot be read."""
    try:
        return float(min(max(int(retry_after), 0), 10**9))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - now)
    except ValueError:
        return 0.0


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is a status like others: followed, a question would become a GET, and the key would go
    along to whatever host it names."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        return None


def fetch(request: urllib.request.Request, timeout: float) -> bytes:
    """The whole answer; TimeoutError: it is too long or drips in; IncompleteRead: it was cut."""
    with urllib.request.build_opener(NoRedirect).open(request, timeout=timeout) as answer:
        text, end = b"", time.monotonic() + timeout
        # bytes that drip in would else be waited for one by one
        while part := answer.read1(1 << 16):
            text += part
            if len(text) > LONGEST or time.monotonic() > end:
                raise TimeoutError(f"no whole answer in that time or of {LONGEST} bytes")
        if answer.length:  # `read1` ends in silence where the connection did
            raise http.client.IncompleteRead(text, answer.length)
    return text


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work()` gives or raises; TimeoutError after `seconds`: a socket's own timeout begins anew with
    every byte, also of the headers, and does not hold for a name that is looked up."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as e:  # noqa: BLE001 (raised where it is waited for)
            result.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    if not wait([result], seconds).done:
        raise TimeoutError("no whole answer in that time")
    return result.result()


def said_in(error: urllib.error.HTTPError) -> str:
    """What the body of an answer says, as the end of a sentence."""
    try:
        words = " ".join(error.read(1000).decode("utf-8", "replace").split())
    except OSError:
        words = ""
    return f": {words[:200]}" if words else ""


@dataclass
class Answers:
    """At most `most` answers by the content of what was asked; the oldest go. Owns the count of `hits`."""

    most: int = 100_000
    hits: int = 0
    kept: dict[bytes, tuple] = field(default_factory=dict)

    def of(self, keys: list[bytes], ask: Callable[[list[int]], list[tuple]]) -> list[tuple]:
        """The answer of every key; `ask(places)` gives those of keys that are not kept, asked about once if
        equal."""
        new = {k: i for i, k in enumerate(keys) if k not in self.kept}
        self.hits += len(keys) - len(new)
        known = self.kept | dict(zip(new, ask(list(new.values())), strict=True)) if new else self.kept
        out = [known[k] for k in keys]
        self.kept = known
        for k in list(self.kept)[: max(0, len(self.kept) - self.most)]:
            del self.kept[k]
        return out


def content_of(seen: Seen, i: int) -> bytes:
    """What decides an answer about row i, as a key."""
    h = hashlib.blake2b(str(seen.task[i]).encode(), digest_size=16)
    for part in (seen.after, seen.clip):
        for k in sorted(part):
            h.update(k.encode() + np.ascontiguousarray(part[k][i]).tobytes())
    return h.digest()


def png(image: np.ndarray) -> str:
    """uint8[h,w,3] as PNG in base64."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


# ---- our own protocol --------------------------------------------------------------------------------------


@dataclass
class Endpoint:
    """A judge at `url` that answers with probabilities."""

    url: str
    every: int = 8
    batch: int = 32
    frames: int = 1
    skip: int = 4
    timeout: float = 10.0
    tries: int = 3
    pause: float = 0.2
    budget: int = 100_000
    most: int = 100_000

    def __post_init__(self) -> None:
        check_rates(self)
        in_range("judge batch", self.batch, 1, 10**4)
        self.server = Server(self.url, self.timeout, self.tries, self.pause, self.budget)
        self.answers = Answers(self.most)

    def __call__(self, seen: Seen) -> np.ndarray:
        def ask(places: list[int]) -> list[tuple]:
            scores: list[float] = []
            for at in range(0, len(places), self.batch):
                items = [self.item(seen, i) for i in places[at : at + self.batch]]
                scores += read_scores(
                    self.server.post(json.dumps({"items": items}).encode(), {}), len(items), self.url
                )
            return [(s,) for s in scores]

        return np.array(
            [s for (s,) in self.answers.of([content_of(seen, i) for i in range(len(seen.task))], ask)],
            np.float32,
        )

    def item(self, seen: Seen, i: int) -> dict:
        """Row i as the protocol has it."""
        images = {k[6:]: png(v[i]) for k, v in seen.after.items() if k.startswith("image/")}
        clip = {"clip": {k[6:]: [png(x) for x in v[i]] for k, v in seen.clip.items()}} if seen.clip else {}
        return {
            "task": str(seen.task[i]),
            "state": [round(float(x), 6) for x in seen.after["state"][i]],
            "images": images,
        } | clip


def check_rates(judge) -> None:
    """Raise UserError for a judge's rates that are out of range."""
    for name, low, high in (("every", 1, 10**6), ("frames", 1, 64), ("skip", 1, 10**4)):
        in_range(f"judge {name}", getattr(judge, name), low, high)


def read_scores(text: bytes, n: int, url: str) -> list[float]:
    """The n probabilities of an answer; UserError for one that is none."""
    try:
        scores = [float(s) for s in files.parse_json(text, "its answer", limit=LONGEST)["scores"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f'the judge at {url} must answer {{"scores": [...]}}, got {text[:80]!r}') from None
    if len(scores) != n or not all(0 <= s <= 1 for s in scores):
        raise UserError(
            f"the judge at {url} must answer {n} numbers in [0, 1], got {len(scores)}: {scores[:4]}"
        )
    return scores


# ---- OpenAI's protocol -------------------------------------------------------------------------------------

SYSTEM = (
    "You judge whether a robot has done its task. You see frames of a video, oldest first, of every camera. "
    "Answer with one JSON "
    'object and nothing else: {"success": true or false, "criteria": [true or false for every criterion, in '
    "order]}. "
    "success means that the task is done in the last frame."
)
SURE = 20  # clips after which a judge that contradicts itself is told
SPLIT = 0.5  # most of them on which its answers may be divided
DIVIDED = 1 / 3  # share of a minority that makes answers divided


@dataclass
class ChatJudge:
    """A model that sees clips, behind `url` (which /chat/completions is added to). `criteria`: a JSON file
    {instruction: [criterion, ...]}, whose key "" holds for every instruction without an entry. Owns the
    counts of clips judged and divided."""

    url: str
    model: str = "default"
    every: int = 16
    frames: int = 8
    skip: int = 4
    samples: int = 5
    tokens: int = 300  # that an answer has at most; 0: the server's own limit
    criteria: str = ""
    timeout: float = 60.0
    tries: int = 3
    pause: float = 0.5
    budget: int = 10_000
    most: int = 100_000
    judged: int = 0
    divided: int = 0

    def __post_init__(self) -> None:
        check_rates(self)
        in_range("judge samples", self.samples, 1, 99)
        in_range("judge tokens", self.tokens, 0, 10**6)
        self.server = Server(
            self.url.rstrip("/") + "/chat/completions",
            self.timeout,
            self.tries,
            self.pause,
            self.budget,
            keyed=True,
        )
        self.answers, self.wanted = Answers(self.most), read_criteria(self.criteria) if self.criteria else {}

    def __call__(self, seen: Seen) -> np.ndarray:
        """Share of the answers that say success [n]."""
        return self.votes(seen)[0]

    def votes(self, seen: Seen) -> tuple[np.ndarray, np.ndarray]:
        """(share of the answers that say success, partial credit) float32[n]; without criteria the credit is
        that share.

        UserError: the server does not answer, answers with something else, or contradicts itself on most
        clips.
        """

        def ask(places: list[int]) -> list[tuple]:
            return [self.ask(seen, i) for i in places]

        got = np.array(
            self.answers.of([content_of(seen, i) for i in range(len(seen.task))], ask), np.float32
        ).reshape(-1, 2)
        return got[:, 0], got[:, 1]

    def ask(self, seen: Seen, i: int) -> tuple[float, float]:
        """Of row i, until there are `samples` answers."""
        wanted = self.wanted.get(str(seen.task[i]), self.wanted.get("", []))
        key, told, unread = os.environ.get(KEY, ""), [], ""
        for _ in range(self.samples + self.tries):
            body = self.body(seen, i, wanted, self.samples - len(told))
            text = self.server.post(
                json.dumps(body).encode(), {"Authorization": f"Bearer {key}"} if key else {}
            )
            found, unread = read_choices(text, len(wanted), self.server.url)
            told = (told + found)[: self.samples]
            if len(told) == self.samples:
                break
        else:
            raise UserError(
                f"the judge at {self.server.url} gave {len(told)} of {self.samples} answers as JSON with "
                f"success{' and criteria' if wanted else ''}; the last other one: {unread[:80]!r}; ask a "
                f"model that answers so (model=…), give it more tokens (tokens={self.tokens} now), or "
                f"{ANOTHER}"
            )
        share = sum(won for won, _ in told) / self.samples
        self.count([share])
        if self.judged >= SURE and self.divided > SPLIT * self.judged:
            raise UserError(
                f"the judge at {self.server.url} contradicts itself: its {self.samples} answers are divided "
                f"on {self.divided} of {self.judged} clips; give it more frames (frames=…), criteria=FILE or "
                f"a better model (model=…), or {ANOTHER}"
            )
        return share, sum(credit for _, credit in told) / self.samples if wanted else share

    def count(self, shares: Iterable[float]) -> None:
        """Count clips by the share of their answers that say success."""
        for share in shares:
            self.judged += 1
            self.divided += min(share, 1 - share) >= DIVIDED

    def body(self, seen: Seen, i: int, wanted: list[str], n: int) -> dict:
        """The request about row i for n answers."""
        listed = "".join(f"\nCriterion {k + 1}: {c}" for k, c in enumerate(wanted))
        content: list[dict] = [{"type": "text", "text": f"Task: {seen.task[i]}{listed}"}]
        clips = seen.clip or {k: v[:, None] for k, v in seen.after.items() if k.startswith("image/")}
        if not clips:
            raise UserError(
                f"the judge at {self.server.url} looks at pictures; the model or data set has none"
            )
        for view, frames in clips.items():
            content.append({"type": "text", "text": f"Camera {view.removeprefix('image/')}:"})
            content += [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(x)}"}}
                for x in frames[i]
            ]
        return {
            "model": self.model,
            "n": n,
            "temperature": 1.0 if self.samples > 1 else 0.0,
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}],
        } | ({"max_tokens": self.tokens} if self.tokens else {})


def read_criteria(path: str) -> dict[str, list[str]]:
    """{instruction: [criterion, ...]} of a file; UserError for another one."""
    if not Path(path).is_file():
        raise UserError(
            f'judge criteria={path}: there is no such file; it is JSON: {{"instruction": ["criterion", ...]}}'
        )
    found = files.read_json(path)
    if not all(isinstance(v, list) and v and all(isinstance(c, str) for c in v) for v in found.values()):
        raise UserError(f'judge criteria={path} must be JSON: {{"instruction": ["criterion", ...]}}')
    return found


def read_choices(text: bytes, criteria: int, url: str) -> tuple[list[tuple[bool, float]], str]:
    """([(success, share of criteria met) of every answer that can be read], the last that cannot). What a
    model thinks before </think> is no answer."""
    try:
        said = [
            str(c["message"]["content"])
            for c in files.parse_json(text, "its answer", limit=LONGEST)["choices"]
        ]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"the judge at {url} must answer as OpenAI's chat completions do, got {text[:80]!r}"
        ) from None
    out, unread = [], ""
    for words in said:
        found = re.search(r"\{.*\}", words.rpartition("</think>")[2], re.S)
        try:
            answer = files.parse_json(found[0], "an answer") if found else {}
            won, met = answer["success"], answer.get("criteria", [])
        except (UserError, KeyError, TypeError):
            unread = words
            continue
        if isinstance(won, bool) and (
            not criteria
            or (isinstance(met, list) and len(met) == criteria and all(isinstance(m, bool) for m in met))
        ):
            out.append((won, sum(met) / criteria if criteria else float(won)))
        else:
            unread = words
    return out, unread
