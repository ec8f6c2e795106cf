"""Judges of success: a classifier, an HTTP endpoint that is down, slow or lying, and what each is worth."""

import json
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict
from oracle import Oracle
from test_world_models import LIMIT, record
from toys import PointReach

from robo_rl import demos
from robo_rl.errors import UserError
from robo_rl.recording import Recorder, expert_actor, play, random_actor
from world_models import judge as judges
from world_models.env import WorldEnv
from world_models.judge import Classifier, ClassifierOptions, Endpoint, Seen, confusion
from world_models.judge_http import KEY, Server, seconds_asked_for


@pytest.fixture(scope="module")
def data():
    return record(PointReach(20, LIMIT), 120)


class Stand:
    """A judge that stands in for a model server: `answer(items) -> body` or an exception; counts its
    requests."""

    def __init__(self, answer, status=200):
        stand = self
        self.requests, self.items, self.status = 0, 0, status

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
                stand.requests += 1
                stand.items += len(items)
                body = answer(items, stand)
                self.send_response(stand.status)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps({"scores": body}).encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/judge"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


def near(items, stand):
    """Success where the point is within 0.35 of its goal."""
    return [float(np.hypot(*i["state"][2:]) < 0.35) for i in items]


def seen(states, images=None) -> Seen:
    states = np.asarray(states, np.float32)
    obs = {"state": states} | ({"image/top": images} if images is not None else {})
    n = len(states)
    return Seen(
        obs, obs, np.array(["reach the goal"] * n), np.zeros((n, 2), np.float32), np.zeros(n, np.float32)
    )


STATES = np.array([[0, 0, 0.1, 0], [0, 0, 0.9, 0], [0, 0, 0.1, 0], [0, 0, 0, 0.2]])


def test_an_endpoint_is_asked_in_batches_and_once_about_equal_steps():
    with Stand(near) as stand:
        judge = Endpoint(stand.url, batch=2)
        assert judge(seen(STATES)).tolist() == [1, 0, 1, 1]
        assert (stand.requests, stand.items) == (2, 3)
        assert (
            judge(seen(STATES[::-1])).tolist() == [1, 1, 0, 1]
            and stand.requests == 2
            and judge.answers.hits == 5
        )


def test_the_picture_and_the_instruction_are_part_of_what_was_asked():
    images = np.zeros((2, 16, 16, 3), np.uint8)
    images[1] += 1
    with Stand(lambda items, stand: [len(i["images"]["top"]) % 2 / 2 for i in items]) as stand:
        judge = Endpoint(stand.url)
        s = seen(STATES[:1].repeat(2, 0), images)
        judge(s)
        assert stand.items == 2
        judge(replace(s, task=np.array(["another", "reach the goal"])))
        assert stand.items == 3


def test_old_answers_go_when_there_are_too_many():
    with Stand(near) as stand:
        judge = Endpoint(stand.url, most=2)
        judge(seen([[0, 0, x, 0] for x in (0.1, 0.2, 0.3)]))
        assert len(judge.answers.kept) == 2


def test_an_endpoint_that_is_down_is_one_clear_line_after_bounded_attempts():
    judge = Endpoint("http://127.0.0.1:9/judge", tries=3, pause=0.01, timeout=1)
    with pytest.raises(UserError, match=r"does not answer .*3 attempts"):
        judge(seen(STATES))
    assert judge.server.asked == 3


def test_an_env_whose_judge_is_down_is_refused_when_it_is_made():
    """Before a run has learnt what it would judge. One that answers nothing but questions is there."""
    with pytest.raises(
        UserError, match=r"nothing listens .* at http://127.0.0.1:9/judge .*start it, or name"
    ):
        Server("http://127.0.0.1:9/judge").check()
    with Stand(near) as stand:
        Server(stand.url).check()
        assert stand.requests == 0


def test_a_judge_that_keeps_one_waiting_is_told_before_it_is_asked_again():
    server = Server("http://127.0.0.1:9/", tries=2, pause=0, silent=0)
    with (
        pytest.warns(UserWarning, match="does not answer .*; attempt 2 of 2 of 10 s"),
        pytest.raises(UserError),
    ):
        server.post(b"{}", {})


def test_one_that_fails_at_first_is_asked_again_and_one_that_refuses_is_not():
    def flaky(items, stand):
        stand.status = 503 if stand.requests < 3 else 200
        return near(items, stand)

    with Stand(flaky) as stand:
        assert Endpoint(stand.url, pause=0.01)(seen(STATES)).tolist() == [1, 0, 1, 1] and stand.requests == 3
    with (
        Stand(near, status=404) as stand,
        pytest.raises(UserError, match="refuses the question with status 404.*mend its address, or name"),
    ):
        Endpoint(stand.url, pause=0.01)(seen(STATES))
    assert stand.requests == 1


def test_what_refuses_for_want_of_a_key_says_which_where_one_is_sent(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    with Stand(near, status=401) as stand, pytest.raises(UserError, match="status 401") as own:
        Endpoint(stand.url)(seen(STATES))
    assert KEY not in str(own.value) and "openai: before its address" in str(own.value)
    assert "set its key ($OPENAI_API_KEY)" in Server("http://here/", keyed=True).cure(403)
    monkeypatch.setenv(KEY, "wrong")
    assert "mend its key" in Server("http://here/", keyed=True).cure(401)
    assert KEY not in Server("http://here/", keyed=True).cure(404)


def test_a_judge_that_says_when_to_ask_again_is_asked_then_within_the_deadline():
    """Retry-After in seconds, as a date that has passed, as a time beyond the deadline, and as nonsense."""
    said, waits = ["2", "Wed, 21 Oct 2015 07:28:00 GMT", "3600", "soon"], []

    def busy(client, number):
        head = f"HTTP/1.1 429 Too Many\r\nRetry-After: {said[number]}\r\n" if number < len(said) else ""
        client.sendall(
            f"{head or 'HTTP/1.1 200 OK' + chr(13) + chr(10)}Content-Length: 2\r\n\r\n{{}}".encode()
        )

    listener, url = served(busy)
    with listener, pytest.warns(UserWarning, match="to be asked again in 3600 s"):
        server = Server(url, timeout=30, tries=5, pause=0.5, sleep=waits.append)
        assert server.post(b"{}", {}) == b"{}"
    assert waits == [2, 1, 30, 4]


def test_a_date_to_ask_again_at_is_counted_from_now():
    assert seconds_asked_for("Thu, 01 Jan 1970 00:01:30 GMT", 60.0) == 30
    assert seconds_asked_for("9" * 400, 0.0) == 10**9 and seconds_asked_for("-1", 0.0) == 0


def test_one_whose_answer_drips_in_without_end_runs_into_its_deadline_too():
    over = threading.Event()

    class Drip(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for _ in range(600):
                self.wfile.write(b" ")
                if over.wait(0.05):
                    return

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Drip)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        judge = Endpoint(f"http://127.0.0.1:{server.server_address[1]}/", timeout=0.3, tries=1)
        with pytest.raises(UserError, match="no whole answer in that time"):
            judge(seen(STATES[:1]))
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def served(answer):
    """A listener that answers each connection with `answer(client, number)`; its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        for number in range(100):
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.recv(1 << 16)
                answer(client, number)

    threading.Thread(target=serve, daemon=True).start()
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}/x"


@pytest.mark.parametrize(
    "answer", [b"hello there\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n"]
)
def test_one_that_does_not_speak_http_is_one_clear_line(answer):
    listener, url = served(lambda client, number: client.sendall(answer))
    with listener:
        server = Server(url, timeout=5, tries=2, pause=0.01)
        server.check()
        with pytest.raises(
            UserError, match="not answer .*2 attempts.*tries=9 behind # .* 50 s.*start it, or name"
        ):
            server.post(b"{}", {})


def test_one_whose_headers_drip_in_without_end_runs_into_its_deadline():
    over = threading.Event()

    def drip(client, number):
        client.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        while not over.wait(0.05):
            client.sendall(b"x")

    listener, url = served(drip)
    with listener, pytest.raises(UserError, match="does not answer .no whole answer in that time"):
        try:
            Server(url, timeout=0.3, tries=1).post(b"{}", {})
        finally:
            over.set()


def test_an_answer_that_is_cut_is_asked_for_again():
    def cut(client, number):
        body = b'{"scores": [1]}'
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        client.sendall(body if number else body[:9])

    listener, url = served(cut)
    with listener:
        server = Server(url, pause=0.01)
        assert server.post(b"{}", {}) == b'{"scores": [1]}' and server.asked == 2


def test_a_redirect_is_told_and_not_followed_for_the_key_would_go_along():
    hosts = []

    def elsewhere(client, number):
        hosts.append(number)
        client.sendall(b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n")

    listener, url = served(elsewhere)
    with listener, pytest.raises(UserError, match="status 302 to /login; mend its address"):
        Server(url, pause=0.01).post(b"{}", {"Authorization": "Bearer secret"})
    assert hosts == [0]


def test_one_that_is_slow_runs_into_its_deadline():
    over = threading.Event()

    def slow(items, stand):
        over.wait(200)
        return near(items, stand)

    with Stand(slow) as stand:
        with pytest.raises(UserError, match="does not answer"):
            Endpoint(stand.url, timeout=0.1, tries=2, pause=0.01)(seen(STATES))
        assert not over.is_set()  # nobody had answered
        over.set()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"I think yes", "must answer"),
        (b'{"scores": [1.0]}', r"4 numbers in \[0, 1\], got 1"),
        (b'{"scores": [1, 2, 0, 0]}', r"numbers in \[0, 1\]"),
        (b'{"scores": [NaN, 1, 0, 0]}', "must answer"),
    ],
)
def test_an_answer_that_is_none_is_refused(body, words):
    with Stand(lambda items, stand: body) as stand, pytest.raises(UserError, match=words):
        Endpoint(stand.url)(seen(np.random.default_rng(0).normal(size=(4, 4))))


def test_a_judge_that_lies_is_found_out_on_held_out_steps(data):
    with (
        Stand(near) as honest,
        Stand(lambda items, stand: [1 - s for s in near(items, stand)]) as liar,
        Stand(lambda items, stand: [1.0] * len(items)) as yes,
    ):
        good, bad, always = (confusion(Endpoint(s.url), data) for s in (honest, liar, yes))
    assert good["disagreement"] < 0.25 and bad["disagreement"] > 0.75
    assert always["disagreement"] == 0.5 and always["false_negative"] == 0 and always["true_negative"] == 0


def test_a_classifier_tells_recorded_successes_and_keeps_to_its_rate_of_false_alarms(data, tmp_path):
    judge = Classifier(4, 2, (), ClassifierOptions(updates=300, batch=64, false_alarms=0.02))
    judge.fit(data)
    held = np.repeat(data.held, data.lengths)
    won = np.isin(np.arange(len(held)), data.end[data.success] - 1)[held]
    said = judge(
        Seen(
            {},
            {"state": data.after[held]},
            np.array([""] * held.sum()),
            data.action[held],
            np.zeros(held.sum()),
        )
    )
    assert (said[won][:, None] > said[~won]).mean() > 0.9  # AUROC
    assert (said[~won] > 0.5).mean() <= 0.02 + 1 / (~won).sum()
    judge.save(tmp_path)
    again = judges.make(str(tmp_path))
    s = seen(STATES)
    assert np.array_equal(again(s), judge(s))
    (tmp_path / "judge.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="no sound judge"):
        judges.make(str(tmp_path))


def test_a_classifier_of_pictures_needs_no_state():
    data = record(PointReach(20, LIMIT), 60)
    images = np.full((len(data.state), 16, 16, 3), 30, np.uint8)
    last = np.where(data.success[:, None, None, None], 200, 30).astype(np.uint8) * np.ones(
        (1, 16, 16, 3), np.uint8
    )
    data = replace(
        data,
        images={"top": images},
        state=data.state * 0,
        final=data.final * 0,
        final_images={"top": last},
        pictured=np.ones(len(data), bool),
    )
    judge = Classifier(4, 2, ("top",), ClassifierOptions(updates=100, batch=32))
    judge.fit(data)
    assert confusion(judge, data)["disagreement"] == 0


class Watched(PointReach):
    """With a camera whose picture is bright where the point is at its goal."""

    def __init__(self, *args):
        super().__init__(*args)
        self.spec = replace(self.spec, views=("top",))
        self.single_observation_space = Dict(
            {**self.single_observation_space, "image/top": Box(0, 255, (16, 16, 3), np.uint8)}
        )

    def _obs(self):
        there = np.linalg.norm(self.goal - self.pos, axis=1) < self.radius
        picture = np.where(there[:, None, None, None], 220, 30).astype(np.uint8) * np.ones(
            (1, 16, 16, 3), np.uint8
        )
        return super()._obs() | {"image/top": picture}


class Witness:
    """A judge that notes what it is shown and says no."""

    every = 1

    def __call__(self, seen: Seen) -> np.ndarray:
        self.seen = seen
        return np.zeros(len(seen.task))


def test_what_a_judge_is_shown_of_a_success_is_the_successful_observation(data):
    witness = Witness()
    found = confusion(witness, data)
    n, far = found["false_negative"], lambda obs: np.hypot(*obs["state"][:, 2:].T)
    assert n >= 5
    assert (far(witness.seen.after)[:n] < 0.1).all() and (far(witness.seen.after)[n:] >= 0.1).all()
    assert (far(witness.seen.before) >= 0.1).all()


def test_in_a_recording_without_last_observations_the_judge_is_shown_the_one_before(data):
    witness = Witness()
    n = confusion(witness, replace(data, final=np.full_like(data.final, np.nan)))["false_negative"]
    assert np.array_equal(witness.seen.after["state"][:n], witness.seen.before["state"][:n])
    assert not np.array_equal(witness.seen.after["state"][n:], witness.seen.before["state"][n:])


def test_pictures_after_the_last_action_travel_from_the_recording_to_the_judge_and_the_models(tmp_path):
    """Recorded in an env, written, read: every success is seen in its picture, which no frame before it
    shows."""
    from robo_rl.data.writer import Writer
    from world_models.reading import joined, read

    for name in "ab":
        env = Watched(4, LIMIT)
        with Writer(tmp_path / name, spec=env.spec) as writer:
            recorder = Recorder(env, writer.add, "policy", 0.0, 0)
            play(recorder, expert_actor(env), 12, 0)
            play(recorder, random_actor(env, 0), 8, 1)
    data = read([tmp_path / "a", tmp_path / "b"], images=True)
    assert data.pictured.all() and data.known.all() and len(data) == 40
    bright = data.final_images["top"].mean((1, 2, 3)) > 128
    assert np.array_equal(bright, data.success) and not (data.images["top"].mean((1, 2, 3)) > 128).any()
    witness = Witness()
    n = confusion(witness, data)["false_negative"]
    assert (
        n
        and (
            (witness.seen.after["image/top"].mean((1, 2, 3)) > 128) == (np.arange(len(witness.seen.task)) < n)
        ).all()
    )
    whole, steps = data.extended()
    assert len(whole.state) == len(data.state) + 40 and np.array_equal(whole.state[steps], data.state)
    assert np.array_equal(whole.state[steps + 1], data.after) and not whole.action[whole.end - 1].any()
    assert np.array_equal(whole.images["top"][whole.end - 1], data.final_images["top"])
    parts = [read([tmp_path / name], images=True) for name in "ab"]
    assert np.array_equal(joined(parts).final_images["top"], data.final_images["top"])


def test_demonstrations_end_with_the_observation_that_succeeded():
    kept, env = [], Watched(4, LIMIT)
    demos.record(env, 6, 0, kept.append)
    assert len(kept) == 6
    for e in kept:
        assert np.hypot(*e.final[2:]) < 0.1 <= np.hypot(*e.state[-1, 2:])
        assert e.final_images["top"].mean() > 128 > e.images["top"].max()


def test_the_judges_word_is_the_envs_reward_and_end():
    env = WorldEnv(Oracle(PointReach(4, LIMIT)), 4)
    env.reset(seed=0)
    assert not env.step(np.zeros((4, 2)))[1].any()
    with Stand(lambda items, stand: [1.0] * len(items)) as stand:
        env = WorldEnv(Oracle(PointReach(4, LIMIT)), 4, judge=Endpoint(stand.url, every=2))
        env.reset(seed=0)
        assert not env.step(np.zeros((4, 2)))[1].any() and stand.requests == 0  # asked every second step
        _, reward, terminated, _, info = env.step(np.zeros((4, 2)))
        assert (
            reward.tolist() == [1] * 4 and terminated.all() and info["success"].all() and stand.requests == 1
        )


def test_what_is_no_judge_is_named(tmp_path):
    assert isinstance(judges.make("head"), judges.Head)
    judge = judges.make("http://x/y#every=5,timeout=2.5")
    assert (judge.url, judge.every, judge.timeout) == ("http://x/y", 5, 2.5)
    for name, words in (
        (str(tmp_path), "neither head"),
        ("http://x#often=3", "options after #"),
        ("http://x#every=0", "every"),
        ("http://", "is no address; it is http://HOST:PORT/PATH"),
        ("http://x:port/y", "is no address .*port"),
        ("http://x:99999/y", "is no address .*65535"),
        ("openai:http://[::1/v1", "is no address"),
        ("http://no host/y", "is no address"),
    ):
        with pytest.raises(UserError, match=words):
            judges.make(name)
    with pytest.raises(UserError, match="--check 'nowhere' is neither an http address"):
        judges.make("nowhere", "--check")
