"""openpi's wire: its messages, the server that batches, and a foreign server that is evaluated on our
starts."""

import contextlib
import random
import re
import signal
import socket
import struct
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import Command
from hypothesis import given, settings
from hypothesis import strategies as st
from test_deploy import write_run
from toys import PointReach

from controllers.openpi import packb, unpackb
from robo_rl.errors import UserError
from robo_rl.evaluation import evaluate
from robo_rl.experiment.batching import Batcher, BatchRequest
from robo_rl.experiment.console import open_session
from robo_rl.experiment.deploy import deploy
from robo_rl.experiment.deploy_options import DeployOptions
from robo_rl.experiment.evaluation import EvalConfig, evaluate_checkpoint
from robo_rl.experiment.openpi import (
    OpenpiClient,
    OpenpiPolicy,
    answer,
    batch_actor,
    open_server,
    policy_actor,
    read_observation,
)
from robo_rl.experiment.policy_server import ServeOptions
from robo_rl.human.console.options import ConsoleOptions
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy, obs_tensors
from robo_rl.starts import eval_starts

TOKEN = b"0123456789abcdef"
SPEC = ObsSpec(state=4, action=2, action_names=("x", "y"))
SEEN = ObsSpec(state=4, action=2, views=("front", "wrist"), image_size=16, language=True)
OPTIONS = ServeOptions(run="x", port=0, wire="openpi", clients=4, idle=30.0)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=8), x, max_size=4),
    max_leaves=12,
)


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return type(a) is type(b) and a == b


# ---- messages ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_a_message_comes_back_as_it_was(x):
    assert same(unpackb(packb(x)), x)


@pytest.mark.parametrize("kind", ["f4", "f8", "u1", "i8", "?"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_an_array_comes_back_bit_for_bit(kind, shape):
    x = np.random.default_rng(0).integers(0, 2, shape).astype(kind)
    assert same(unpackb(packb({"a": x, "n": np.float32(1.5)})), {"a": x, "n": 1.5})


def test_messages_are_msgpack_as_the_field_writes_it():
    """Bytes of the specification, in the short forms that msgpack-python writes."""
    array = (
        b"\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x08"
        + np.array([1, 2], "<f4").tobytes()
        + b"\xc4\x05dtype\xa3<f4\xc4\x05shape\x91\x02"
    )
    assert same(
        unpackb(b"\x82\xa5state" + array + b"\xa6prompt\xa2go"),
        {"state": np.array([1, 2], "f4"), "prompt": "go"},
    )
    assert unpackb(b"\x93\x01\xff\xcb" + struct.pack(">d", 0.5)) == [1, -1, 0.5]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 2000 + b"\x00",
        b"\xdd\x00\x10\x00\x00",
        b"\x9a" + (b"\xdc\x03\xe8" + 1000 * b"\x80") * 10,
        b"\xc7\x00\x01",
        b"\xd6\xff\x00\x00\x00\x01",
        b"\x01\x01",
        b"\xa2\xff\xff",
        packb({b"__ndarray__": True, b"data": b"abc", b"dtype": "<f4", b"shape": [1]}),
        packb({b"__ndarray__": True, b"data": b"abcdefgh", b"dtype": "O", b"shape": [1]}),
        packb({b"__ndarray__": True, b"data": b"abcd", b"dtype": "<f4", b"shape": [-1]}),
        b"\x81\x90\x01",
        packb({b"__ndarray__": True, b"data": b"", b"dtype": "(,)f4", b"shape": [0]}),
    ],
    ids=str,
)
def test_what_is_no_message_is_refused_in_one_line(data):
    with pytest.raises(UserError, match="no message of openpi"):
        unpackb(data)


# ---- observations ------------------------------------------------------------------------------------------


def test_an_observation_is_read_under_openpis_names_and_ours_and_pictures_of_any_size_fit():
    state, picture = np.arange(4.0), np.full((64, 64, 3), 200, np.uint8)
    ours = {"state": state, "image/front": picture, "image/wrist": picture[:16, :16], "prompt": "go"}
    theirs = {
        "observation/state": state.astype("f4"),
        "observation/image": picture,
        "observation/wrist_image": picture,
        "prompt": "go",
    }
    first = picture.transpose(2, 0, 1)  # [3, h, w]
    aloha = {"state": state, "images": {"front": first, "wrist": first, "low": first}, "prompt": "go"}
    for message in (ours, theirs, aloha):
        obs = read_observation(message, SEEN, "")
        assert (
            obs["task"] == "go"
            and obs["state"].dtype == np.float32
            and obs["image/front"].shape == (16, 16, 3)
        )
        assert (obs["image/front"] == 200).all()
    assert read_observation({"state": state}, SPEC, "reach")["task"] == "reach"


def test_a_policy_of_pictures_of_another_shape_is_shown_them_as_it_learnt_and_asks_for_an_instruction():
    own, wide = replace(SEEN, fit="pad", language=True), np.full((12, 16, 3), 200, np.uint8)
    message = {"state": np.zeros(4), "image/front": wide, "image/wrist": wide, "prompt": "go"}
    seen = read_observation(message, own, "")["image/front"]
    assert seen.shape == (16, 16, 3) and not seen[:2].any() and (seen[2:14] == 200).all()
    reads = replace(own, text=64)  # a vision-language-action model makes them square by its own rule
    assert read_observation(message, reads, "")["image/front"] is wide
    with pytest.raises(UserError, match="lacks prompt: the policy takes an instruction"):
        read_observation(message | {"prompt": ""}, own, "")
    assert read_observation(message | {"prompt": ""}, own, "reach")["task"] == "reach"
    with pytest.raises(UserError, match=r"a picture uint8 \[h, w, 3\]"):
        read_observation(message | {"image/front": wide[0]}, own, "")


def test_a_model_of_recorded_pictures_answers_those_of_several_sizes_as_it_does_in_python():
    spec = replace(SPEC, state=4, views=("front",), image_size=96, language=True, text=64, fit="pad")
    spec = replace(spec, units=("rad",) * spec.action)
    policy = make_policy(PolicyOptions(kind="pi05"), spec, 0).eval()
    rng = np.random.default_rng(0)

    def seen(h, w):
        picture = rng.integers(0, 256, (h, w, 3), dtype=np.uint8)
        message = {"state": np.zeros(4), "image/front": picture, "prompt": "go"}
        return read_observation(message, spec, "")

    wide, tall = seen(120, 160), seen(48, 32)
    [alone] = policy_actor(policy, 3)([wide])
    batch = obs_tensors({k: np.stack([wide[k]]) for k in wide}, spec)
    own = policy.act(batch, torch.Generator().manual_seed(3), explore=False).actions[0].numpy()
    assert np.array_equal(alone, own)
    three = policy_actor(policy, 3)([wide, tall, wide])
    np.testing.assert_allclose(three[0], alone, atol=1e-5)
    assert [row.shape for row in three] == [alone.shape] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": np.zeros(3)}, "has 4 numbers, got shape"),
        ({"state": np.full(4, np.nan)}, "not finite"),
        ({"state": None}, "lacks state"),
        ({"state": [0.0] * 4}, r"state is an array \(numpy.asarray\), got list"),
        ({"image/front": np.zeros((4, 4, 3))}, "square picture uint8"),
        ({"image/front": np.zeros((4, 6, 3), np.uint8)}, "square picture"),
        ({"prompt": 5}, "prompt is text"),
    ],
    ids=str,
)
def test_an_observation_that_does_not_fit_is_one_line(change, said):
    good = {
        "state": np.zeros(4),
        "image/front": np.zeros((16, 16, 3), np.uint8),
        "image/wrist": np.zeros((16, 16, 3), np.uint8),
    }
    with pytest.raises(UserError, match=said):
        read_observation(good | change, SEEN, "")
    with pytest.raises(UserError, match="a map of names"):
        read_observation([1], SEEN, "")


# ---- batches -----------------------------------------------------------------------------------------------


def test_questions_that_wait_are_answered_together_the_most_urgent_first_and_late_ones_refused():
    now, sizes, gate, told = [0.0], [], threading.Event(), {}

    def act(batch):
        sizes.append(list(batch))
        return [x * 10 for x in batch]

    b = Batcher(act, 2, lambda: now[0])

    def ask(x, patience):
        try:
            told[x] = b.ask(x, patience)
        except UserError as e:
            told[x] = str(e)
        gate.set()

    threads = [
        threading.Thread(target=ask, args=(x, p)) for x, p in ((1, 30.0), (2, 10.0), (3, 20.0), (4, 1.0))
    ]
    for t in threads:
        t.start()
    while len(b.waiting) < 4:
        gate.wait(0.001)
    now[0] = 5.0
    assert b.turn() == 2 and b.turn() == 1 and b.turn() == 0
    for t in threads:
        t.join(10)
    assert (
        sizes == [[2, 3], [1]]
        and told[1] == 10
        and told[2] == 20
        and told[3] == 30
        and told[4].startswith("too late")
    )
    assert (b.batches, b.answered, b.late) == (2, 3, 1)
    b.close()
    with pytest.raises(UserError, match="the server ends"):
        b.ask(1, 1.0)


def of(x, patience: float) -> BatchRequest:
    return BatchRequest(x, patience, patience)


def test_a_batch_keeps_its_deadlines_and_who_cannot_be_answered_in_time_is_refused_at_once():
    now = [0.0]

    def act(batch):
        now[0] += 0.1 + 0.05 * len(batch)
        return batch

    b = Batcher(act, 64, lambda: now[0])
    for n in (1, 2, 4, 8, 16):
        b.waiting = [of(i, 100.0) for i in range(n)]
        assert b.turn() == n
    assert 0.8 < b.expected(16) - 0.1 * b.expected(16) < 0.9 and b.expected(64) == pytest.approx(
        4 * b.expected(16), rel=0.02
    )
    asked = [BatchRequest(i, now[0] + 0.62, 0.62) for i in range(30)]
    early, hopeless = asked[:], BatchRequest("x", now[0] + 0.1, 5.0)
    b.waiting = [*asked, hopeless]
    assert b.turn() == 8 and hopeless.error.startswith("too late")  # sixteen would take 0.9 s
    while b.waiting:
        b.turn()
    done = [q for q in early if q.done.is_set() and not q.error]
    assert len(done) == 8 and all(q.error for q in early if q not in done) and now[0] <= early[0].until + 0.5


def test_a_policy_that_was_once_too_slow_for_a_deadline_is_asked_again():
    now, takes = [0.0], [9.0]

    def act(batch):
        now[0] += takes[0]
        return batch

    b = Batcher(act, 4, lambda: now[0])
    b.waiting = [of(1, 1.0)]
    assert b.turn() == 1  # nothing was known
    takes[0] = 0.1
    b.waiting = [BatchRequest(2, now[0] + 1.0, 1.0)]
    assert b.turn() == 0 and b.late == 1
    b.waiting = [BatchRequest(3, now[0] + 1.0, 1.0)]
    assert b.turn() == 1


@pytest.mark.parametrize("error", [UserError("a prompt is too long"), RuntimeError("a shape")], ids=str)
def test_a_question_that_the_policy_cannot_take_is_refused_alone(error):
    def act(batch):
        if 3 in batch:
            raise error
        return [10 * x for x in batch]

    b = Batcher(act, 64)
    b.waiting = asked = [BatchRequest(i, 1e12, 1.0) for i in range(6)]
    assert b.turn() == 6 and b.turn() == 0
    assert [q.answer for q in asked] == [0, 10, 20, None, 40, 50] and str(error) in asked[3].error
    assert not any(q.error for q in asked if q.obs != 3)


# ---- what nobody honest sends ------------------------------------------------------------------------------

GOOD = {
    "state": np.ones(4, "f4"),
    "image/front": np.zeros((16, 16, 3), np.uint8),
    "image/wrist": np.zeros((16, 16, 3), np.uint8),
    "prompt": "go",
}
LIES = ("O", "(,)f4", "V8", "M8[ns]", "<U9", "f4,f4", "<f4", "|u1", ">f8", "{", 4, None, b"<f4")
HUGE = (b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9")


def hostile(rng: random.Random) -> "bytes | str":
    """A message: random, cut, damaged, of wrong types, shapes and numbers, of huge lengths, deep, or
    whole."""
    kind, whole = rng.randrange(10), packb(GOOD)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return whole[: rng.randrange(len(whole))]
    if kind == 2:
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(min(len(data), 160)) if rng.random() < 0.8 else rng.randrange(len(data))] = (
                rng.randrange(256)
            )
        return bytes(data)
    if kind == 3:
        other = rng.choice(
            [None, True, 7, -1.5, "x", b"y", [1, [2]], {"a": {"b": []}}, [], {}, float("nan"), 2**63]
        )
        return packb(rng.choice([other, GOOD | {rng.choice(list(GOOD)): other}]))
    if kind == 4:
        shape = [rng.randrange(5) for _ in range(rng.randrange(5))]
        with np.errstate(all="ignore"):
            x = np.full(shape, rng.choice([0.0, np.nan, np.inf, -1e300])).astype(
                rng.choice(["f2", "f4", "f8", "u1", "?"])
            )
        return packb(GOOD | {rng.choice(list(GOOD)): x})
    if kind == 5:
        front = whole[: rng.randrange(len(whole))] if rng.random() < 0.5 else b""
        return (
            front
            + rng.choice(HUGE)
            + rng.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\1\0\0"])
            + rng.randbytes(9)
        )
    if kind == 6:
        return (
            rng.choice([b"\x91", b"\x81\xa1a", b"\x9f", b"\xdc\x0f\xff"]) * rng.randrange(1, 3000) + b"\x00"
        )
    if kind == 7:
        return rng.randbytes(40).decode("latin-1") if rng.random() < 0.5 else whole
    if kind == 8:
        lie = {
            b"__ndarray__": rng.choice([True, 0, None]),
            b"data": rng.choice([b"", bytes(16), "", 4]),
            b"dtype": rng.choice(LIES),
            b"shape": rng.choice([[4], [-1], [2**62, 2**62], [], [True] * 4, [0] * 40, 4, None, [4.0]]),
        }
        lie = (
            {
                b"__npgeneric__": True,
                b"data": rng.choice([1e400, -1, 2**63, True, b"x"]),
                b"dtype": rng.choice(LIES),
            }
            if rng.random() < 0.3
            else lie
        )
        return packb(rng.choice([lie, [lie], GOOD | {"state": lie}]))
    return whole


def fuzz_messages(count: int, seed: int) -> int:
    """How many of `count` hostile messages were answered with a chunk; each of the others with a line."""
    rng, chunks = random.Random(seed), 0
    # no thread to wait for
    alone: Any = SimpleNamespace(ask=lambda obs, patience: np.zeros((8, 2), np.float32))
    for _ in range(count):
        said = answer(hostile(rng), alone, SEEN, "", 30.0)
        assert isinstance(said, bytes) or 0 < len(said) <= 300 and said.isprintable()
        chunks += isinstance(said, bytes)
    return chunks


def test_hostile_messages_get_a_line_each_and_end_nothing():
    assert 200 < fuzz_messages(2000, 0) < 800


@pytest.mark.slow
def test_a_hundred_thousand_hostile_messages_get_a_line_each_and_end_nothing():
    assert sum(fuzz_messages(10_000, seed) for seed in range(1, 11)) > 10_000


# ---- a server ----------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path):
    """A server of a small policy for the point env: where it is, and its batcher."""
    pytest.importorskip("websockets", reason="needs robo_rl[console]")
    run = write_run(tmp_path / "run", state=36)
    act, spec = batch_actor(run / "checkpoints" / "step_000000000000", 0)
    batcher, lines = Batcher(act, 64).start(), []
    server = open_server(OPTIONS, TOKEN, batcher, spec, "", lines.append)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def until(condition) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, lines
            time.sleep(0.01)

    yield SimpleNamespace(
        until=until,
        url=f"ws://127.0.0.1:{server.socket.getsockname()[1]}",
        batcher=batcher,
        run=run,
        spec=spec,
        lines=lines,
    )
    server.shutdown()
    batcher.close()
    thread.join(10)


def test_a_client_that_knows_the_token_gets_chunks_and_others_nothing(served):
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with pytest.raises(InvalidStatus, match="401"):
        connect(served.url, additional_headers={"Authorization": "Api-Key wrong"})
    with pytest.raises(InvalidStatus, match="401"):
        connect(served.url)
    with connect(
        served.url, compression=None, additional_headers={"Authorization": f"Api-Key {TOKEN.decode()}"}
    ) as wire:
        about = unpackb(wire.recv(timeout=10))
        assert about["state"] == 36 and about["action"] == 7 and about["views"] == []
        # nothing of this ends the connection
        for message in (b"\xc1", packb({"state": np.zeros(3)}), "text", packb([1])):
            wire.send(message)
            assert isinstance(wire.recv(timeout=10), str)
        wire.send(packb({"observation/state": np.zeros(36)}))
        answer = unpackb(wire.recv(timeout=10))
        assert answer["actions"].shape == (8, 7) and answer["server_timing"]["infer_ms"] > 0
    refused = "127.0.0.1: refused, its API key is not the token of this server"
    served.until(lambda: served.lines[:1] == [refused] and served.lines[-1] == "127.0.0.1: 1 chunk")


def test_hostile_connections_neither_end_the_server_nor_keep_a_client_out(served):
    """Hundreds that say nothing or half a request, bytes that are no websocket, and a frame that is too
    long."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    rng, key = random.Random(0), {"Authorization": f"Api-Key {TOKEN.decode()}"}
    address = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    good = packb({"observation/state": np.zeros(36)})

    def chunk():
        with connect(served.url, compression=None, additional_headers=key) as wire:
            wire.recv(timeout=10)
            wire.send(good)
            return unpackb(wire.recv(timeout=10))["actions"].shape

    with contextlib.ExitStack() as held:
        for k in range(300):
            s = held.enter_context(socket.create_connection(address, timeout=10))
            with contextlib.suppress(OSError):  # it was turned away
                s.sendall((b"", b"GET / HTTP/1.1\r\nHost: x\r\n", rng.randbytes(60) + b"\r\n\r\n")[k % 3])
        assert chunk() == (8, 7)
    with (
        connect(served.url, compression=None, additional_headers=key) as wire,
        pytest.raises(ConnectionClosed),
    ):
        wire.recv(timeout=10)
        wire.send(bytes(1 << 21))
        wire.recv(timeout=10)
    assert chunk() == (8, 7)


def frame(rng: random.Random) -> bytes:
    """A websocket frame of a client, or nearly one: reserved bits and kinds, huge lengths, no mask, cut,
    several."""
    payload = hostile(rng)
    payload = payload if isinstance(payload, bytes) else payload.encode()
    first = rng.choice([0x82, 0x82, 0x81, 0x80, 0x02, 0x88, 0x89, 0xF2, 0x8B, 0x00])
    masked = 0x80 if rng.random() < 0.8 else 0
    size = rng.choice([len(payload), len(payload), 0, 2**63, 2**64 - 1, 2**40])
    head = (
        bytes([first, masked | size])
        if size < 126
        else bytes([first, masked | 126]) + struct.pack(">H", size)
        if size < 2**16
        else bytes([first, masked | 127]) + struct.pack(">Q", size)
    )
    mask = rng.randbytes(4)
    body = bytes(x ^ mask[i % 4] for i, x in enumerate(payload)) if masked else payload
    whole = head + (mask if masked else b"") + body
    return whole[: rng.randrange(len(whole))] if rng.random() < 0.3 else whole * rng.randrange(1, 3)


def fuzz_frames(served, count: int, seed: int) -> None:
    """`count` connections that know the token and then send frames that nobody honest sends; a client between
    them."""
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    rng, address = random.Random(seed), ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    hello = (
        "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: "
        "13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nAuthorization: Api-Key "
        f"{TOKEN.decode()}\r\n\r\n"
    ).encode()
    for k in range(count):
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=10) as s:
            s.sendall(hello)
            s.recv(4096)
            s.sendall(frame(rng))
            if rng.random() < 0.5:  # the others leave without a word
                s.settimeout(0.05)  # of a frame that is cut nothing comes
                s.recv(4096)
        while k % 20 == 19:
            with (
                contextlib.suppress(InvalidStatus),
                connect(  # until those before it have left their seats
                    served.url,
                    compression=None,
                    additional_headers={"Authorization": f"Api-Key {TOKEN.decode()}"},
                ) as wire,
            ):
                wire.recv(timeout=10)
                wire.send(packb({"observation/state": np.zeros(36)}))
                assert unpackb(wire.recv(timeout=10))["actions"].shape == (8, 7)
                break


def test_hostile_frames_end_no_more_than_their_connection(served):
    fuzz_frames(served, 60, 0)


@pytest.mark.slow
def test_thousands_of_hostile_frames_end_no_more_than_their_connection(served):
    fuzz_frames(served, 5000, 1)


def test_a_wire_of_pickles_is_refused_in_one_line():
    with pytest.raises(UserError, match="is a pickle, .* use --wire openpi or native"):
        ServeOptions(run="x", wire="lerobot")


def test_pypis_openpi_client_drives_the_server(served):
    client = pytest.importorskip(
        "openpi_client.websocket_client_policy", reason="needs openpi-client of PyPI"
    )
    policy = client.WebsocketClientPolicy(host=served.url, api_key=TOKEN.decode())
    assert policy.get_server_metadata()["state"] == 36
    actions = policy.infer({"observation/state": np.zeros(36, np.float32), "prompt": "pick up the cube"})[
        "actions"
    ]
    assert actions.shape == (8, 7) and np.isfinite(actions).all()


def test_a_run_is_evaluated_with_a_server_in_place_of_its_policy_on_the_same_starts(served, monkeypatch):
    monkeypatch.setenv("ROBO_RL_TOKEN", TOKEN.decode())
    options = EvalConfig(episodes=3, envs=3, max_steps=16, threads=1)
    there = evaluate_checkpoint(served.run, replace(options, policy=served.url))
    here = evaluate_checkpoint(served.run, options)
    assert there["starts"] == here["starts"] and there["policy"] == served.url and len(there["success"]) == 3
    assert served.batcher.answered >= 6 and served.batcher.batches <= served.batcher.answered
    with (
        contextlib.closing(OpenpiPolicy(served.url, served.spec, 9, TOKEN.decode())) as policy,
        pytest.raises(UserError, match="--execute 8"),
    ):
        policy({"state": np.zeros((1, 36)), "task": ["x"]})
    with pytest.raises(UserError, match=r"refuses \(401: give the server's token as the API key\); ROBO_RL_"):
        OpenpiPolicy(served.url, SPEC, 8, "another")
    with pytest.raises(UserError, match="no policy answers at ws://127.0.0.1:9"):
        OpenpiPolicy("ws://127.0.0.1:9", SPEC, 8)
    with pytest.raises(UserError, match="takes a state of 36 numbers"):
        OpenpiPolicy(served.url, SPEC, 8, TOKEN.decode())
    with pytest.raises(UserError, match="ws://HOST:PORT"):
        EvalConfig(policy="localhost:8000")


def test_a_server_drives_an_arm_and_robots_that_people_watch_and_its_end_is_one_line(served, monkeypatch):
    monkeypatch.setenv("ROBO_RL_TOKEN", TOKEN.decode())
    run, said = str(served.run), []
    options = DeployOptions(run=run, transport="inprocess", speed=1.5, seconds=1.0, policy=served.url)
    deploy(options, said.append, said.append)
    assert re.match(r"(1 chunk|[1-9]\d* chunks)\b", said[0]) and served.batcher.answered >= 3, said
    with pytest.raises(UserError, match="--execute 8"):
        deploy(replace(options, execute=9), said.append, said.append)
    session, _ = open_session(ConsoleOptions(run=run, robots=2, policy=served.url))
    try:
        assert session.fleet.plan().shape == (2, 7) and session.fleet.policy.timeout < 60
    finally:
        session.close()
    monkeypatch.delenv("ROBO_RL_TOKEN")
    with pytest.raises(UserError, match="refuses"):
        deploy(options, said.append, said.append)
    (file := served.run / "key").write_bytes(TOKEN + b"\n")
    file.chmod(0o600)
    deploy(replace(options, token=str(file), seconds=0.2), said.append, said.append)


@pytest.mark.parametrize("told, key", [("x" * 32, "ROBO_RL_TOKEN"), ("", "serve.token")])
def test_a_server_says_where_its_key_is(served, tmp_path, told, key):
    words = ["serve", str(served.run), "--wire", "openpi", "--port", "0"]
    server = Command(tmp_path, words, env={"ROBO_RL_TOKEN": told})
    server.until(lambda: "API key" in server.out.read_text())
    server.signal(signal.SIGINT)
    line = next(line for line in server.wait().out.splitlines() if "API key" in line)
    assert key in line and (served.run / "serve.token").exists() == (not told)


def test_an_arm_does_not_wait_for_a_server_and_knows_when_it_is_lost(served, monkeypatch):
    policy = OpenpiPolicy(served.url, served.spec, 8, TOKEN.decode())
    obs = {"state": np.zeros(36, np.float32)}
    with contextlib.closing(OpenpiClient(policy, "go", 30.0)) as client:
        client.ask(obs, 2.5)
        rows, t0 = client.poll(2.5) or (np.zeros(0), 0.0)
        assert t0 == 2.5 and rows.shape == (8, 7) and client.poll(2.5) is None
        with pytest.raises(UserError, match="takes no rows to agree with"):
            client.ask(obs, 0.0, prefix=object())
        policy.wires[0].close()  # as a server does where nothing was asked for a while
        client.ask(obs, 2.75)
        assert (client.poll(2.75) or (None, 0.0))[1] == 2.75
        client.patience, client.deadline = 0.0, -1.0
        over = threading.Event()
        monkeypatch.setattr(OpenpiPolicy, "__call__", lambda *args: over.wait(20))
        client.ask(obs, 3.0)
        with pytest.raises(UserError, match="takes nothing any more"):
            while client.poll(3.0) is None:
                time.sleep(0.01)
        over.set()


def test_a_server_that_falls_silent_is_lost_in_one_line_however_long_it_may_think(caplog):
    pytest.importorskip("websockets", reason="needs robo_rl[console]")
    from websockets.sync.server import serve

    over = threading.Event()

    def say_what_it_is_and_no_more(connection):
        connection.send(packb({"views": [], "state": 4, "action": 2}))
        over.wait(20)

    with serve(say_what_it_is_and_no_more, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        with contextlib.closing(OpenpiPolicy(url, SPEC, 8, timeout=0.3)) as policy:
            assert policy.wires[0].ping_interval is None  # one that decides in its only thread answers none
            with pytest.raises(UserError, match=rf"{url} is lost \(.*\); look at what its server says"):
                policy({"state": np.zeros((1, 4)), "task": ["x"]})
        over.set()
    assert not caplog.records


@pytest.mark.parametrize(
    "second, words", [("a/1", ""), ("b/1", "serves another policy by now: .*'policy': 'b/1'")]
)
def test_a_client_goes_on_with_the_same_policy_alone_where_its_server_was_started_again(second, words):
    """A server that is stopped says so on each connection, as one does that closes an idle one."""
    pytest.importorskip("websockets", reason="needs robo_rl[console]")
    from websockets.sync.server import serve

    served = iter(["a/1", second])

    def one_chunk(connection):
        connection.send(packb({"views": [], "state": 4, "action": 2, "policy": next(served)}))
        connection.recv()
        connection.send(packb({"actions": np.zeros((8, 2), np.float32)}))

    with serve(one_chunk, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        with contextlib.closing(OpenpiPolicy(url, SPEC, 8)) as policy:
            obs = {"state": np.zeros((1, 4)), "task": ["x"]}
            policy(obs)
            with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
                assert policy(obs).shape == (1, 8, 2)


@pytest.mark.parametrize(
    "said, words",
    [
        (packb({"actions": np.zeros((8, 14), np.float32)}), "actions of 14 numbers, the run's have 2"),
        (packb({"actions": np.full((8, 2), 1e300)}), "not finite"),
        (packb({"act": 1}), r"gives no actions \[H, 2\]"),
        (b"\xc1", "the policy at ws://.* no message of openpi"),
    ],
)
def test_actions_that_cannot_be_meant_for_this_robot_are_refused_in_one_line(said, words, recwarn):
    pytest.importorskip("websockets", reason="needs robo_rl[console]")
    from websockets.sync.server import serve

    def talk(connection):
        connection.send(packb({}))
        connection.recv()
        connection.send(said)

    with serve(talk, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        with contextlib.closing(OpenpiPolicy(url, SPEC, 8)) as policy, pytest.raises(UserError, match=words):
            policy({"state": np.zeros((1, 4)), "task": ["x"]})
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_a_batch_gives_each_what_it_would_get_alone_and_a_served_expert_succeeds(tmp_path):
    policy = make_policy(PolicyOptions(kind="gaussian", hidden=16, layers=1), SPEC, 0)
    from robo_rl.checkpoint import save_checkpoint

    save_checkpoint(tmp_path / "c", policy, {}, {})
    act, spec = batch_actor(tmp_path / "c", 0)
    many = [read_observation({"state": np.full(4, float(i))}, spec, "") for i in range(5)]
    for one, rows in zip(many, act(many), strict=True):
        np.testing.assert_allclose(act([one])[0], rows, atol=1e-6)

    def expert(obs):
        return np.clip(obs["state"][:, 2:] / 0.2 * 0.7, -1, 1).astype(np.float32)

    assert np.mean(evaluate(PointReach(4), expert, eval_starts(4))["success"]) == 1.0
