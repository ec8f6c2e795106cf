"""Judges of the whole video: the frames they are shown, OpenAI's protocol on a local stand-in, majority,
credit, bounds."""

import base64
import io
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from oracle import Oracle
from PIL import Image
from test_world_models import LIMIT, record
from test_world_models_judge import Stand, Watched
from toys import PointReach

from robo_rl.errors import UserError
from world_models import judge as judges
from world_models.env import WorldEnv
from world_models.imagine import play
from world_models.judge import confusion
from world_models.judge_http import KEY, ChatJudge, Endpoint
from world_models.judge_protocol import Clips, Seen, clip_rows


class Chat:
    """A stand-in for a server of OpenAI's protocol: `answer(request, k) -> text` of its k-th choice; keeps
    requests and headers."""

    def __init__(self, answer, most: int = 99):
        chat = self
        self.requests, self.headers = [], []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                assert self.path == "/v1/chat/completions"
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                chat.requests.append(request)
                chat.headers.append(dict(self.headers))
                choices = [
                    {"message": {"content": answer(request, k)}} for k in range(min(request["n"], most))
                ]
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"choices": choices}).encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


def frames_in(request) -> list[np.ndarray]:
    urls = [c["image_url"]["url"] for c in request["messages"][1]["content"] if c["type"] == "image_url"]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(u.split(",")[1])))) for u in urls]


def bright(request, k) -> str:
    """Success where the last frame is bright; a model that talks before it answers."""
    return f"I look. {json.dumps({'success': bool(frames_in(request)[-1].mean() > 128)})}"


def seen(levels, tasks=None, frames=3) -> Seen:
    """Clips that end with pictures of these levels of grey."""
    after = (np.ones((len(levels), 8, 8, 3)) * np.reshape(levels, (-1, 1, 1, 1))).astype(np.uint8)
    clip = {"image/top": np.stack([after * 0] * (frames - 1) + [after], 1)}
    obs = {"state": np.zeros((len(levels), 2), np.float32), "image/top": after}
    return Seen(
        obs,
        obs,
        np.array(tasks or ["reach"] * len(levels)),
        np.zeros((len(levels), 2)),
        np.zeros(len(levels)),
        clip,
    )


# ---- what it is shown --------------------------------------------------------------------------------------


class Shown:
    """A judge of four frames, three steps apart, that keeps what it was shown and says no."""

    every, frames, skip = 1, 4, 3

    def __init__(self):
        self.clips = []

    def __call__(self, seen):
        self.clips.append(seen.clip["image/top"][:, :, 0, 0, 0].copy())
        return np.zeros(len(seen.task))


class Counting(Watched):
    """A camera whose brightness is the number of steps made."""

    def _obs(self):
        out = super()._obs()
        return out | {
            "image/top": np.ones((self.num_envs, 16, 16, 3), np.uint8)
            * self.t.astype(np.uint8)[:, None, None, None]
        }


def test_the_frames_that_led_to_a_step_are_shown_oldest_first_in_the_env_in_play_and_of_a_recording():
    """After step t the newest kept frame is that of the last multiple of three below t, and an episode begins
    with copies of its first."""
    want = {
        1: [0, 0, 0, 1],
        3: [0, 0, 0, 3],
        4: [0, 0, 3, 4],
        7: [0, 3, 6, 7],
        10: [3, 6, 9, 10],
        12: [3, 6, 9, 12],
    }
    for t, row in want.items():
        assert (clip_rows(np.array([50 + t - 1]), np.array([50]), 4, 3)[0] - 50).tolist() == row
    judge = Shown()
    env = WorldEnv(Oracle(Counting(2, LIMIT)), 2, judge=judge)
    env.reset(seed=0)
    for _ in range(12):
        env.step(np.zeros((2, 2)))
    assert all(judge.clips[t - 1].tolist() == [row] * 2 for t, row in want.items())
    state = env.get_state()
    env.step(np.zeros((2, 2)))
    env.reset(seed=1)
    env.set_state(state)
    env.step(np.zeros((2, 2)))
    assert judge.clips[-1].tolist() == judge.clips[12].tolist() == [[6, 9, 12, 13]] * 2


def test_play_shows_the_same_frames():
    judge, oracle = Shown(), Oracle(Counting(2, LIMIT))
    obs, _ = oracle.first(np.array([5, 6]))
    play(oracle, lambda o: np.zeros((2, 4, 2)), obs, 12, judge=judge)
    assert judge.clips[6].tolist() == [[0, 3, 6, 7]] * 2 and judge.clips[11].tolist() == [[3, 6, 9, 12]] * 2


def test_a_judge_of_single_frames_keeps_none():
    assert not Clips(Endpoint("http://x"), {"image/top": np.zeros((2, 4, 4, 3))}).kept


# ---- OpenAI's protocol -------------------------------------------------------------------------------------


def test_a_chat_judge_sends_task_and_frames_and_takes_the_majority():
    with Chat(lambda r, k: bright(r, k) if k != 1 else '{"success": false}') as chat:
        judge = judges.make(f"openai:{chat.url}#model=glm,frames=3,samples=5")
        assert isinstance(judge, ChatJudge) and judge(seen([200, 30])).tolist() == pytest.approx([0.8, 0])
    first = chat.requests[0]
    assert first["model"] == "glm" and first["n"] == 5 and first["temperature"] == 1
    assert "Task: reach" in first["messages"][1]["content"][0]["text"]
    assert [f.mean() for f in frames_in(first)] == [0, 0, 200]


def test_what_a_model_thinks_first_is_no_answer_and_its_length_is_an_option():
    thinks = "<think>maybe {success} or {failure}</think>"
    with Chat(lambda r, k: thinks + json.dumps({"success": True})) as chat:
        for option in ("samples=1", "samples=1,tokens=4000", "samples=1,tokens=0"):
            assert judges.make(f"openai:{chat.url}#{option}")(seen([200])).tolist() == [1]
    assert [r.get("max_tokens") for r in chat.requests] == [300, 4000, None]


def test_criteria_are_told_and_give_partial_credit(tmp_path):
    (tmp_path / "c.json").write_text('{"reach": ["the hand moved", "the mark is reached"], "": ["it moved"]}')

    def answer(request, k):
        if "Criterion 2: the mark is reached" in request["messages"][1]["content"][0]["text"]:
            return json.dumps({"success": False, "criteria": [True, k == 0]})
        return json.dumps({"success": True, "criteria": [True]})

    with Chat(answer) as chat:
        judge = ChatJudge(chat.url, frames=3, samples=2, criteria=str(tmp_path / "c.json"))
        share, credit = judge.votes(seen([9, 9], ["reach", "another"]))
    assert share.tolist() == [0, 1] and credit.tolist() == [0.75, 1]
    for text in ("[]", '{"reach": "moved"}', '{"reach": []}'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(UserError):
            ChatJudge("http://x", criteria=str(tmp_path / "c.json"))
    with pytest.raises(UserError, match="there is no such file"):
        ChatJudge("http://x", criteria="none.json")


def test_a_server_that_gives_one_choice_at_a_time_is_asked_until_there_are_enough():
    with Chat(bright, most=1) as chat:
        assert ChatJudge(chat.url, frames=3, samples=3)(seen([200])).tolist() == [1]
    assert [r["n"] for r in chat.requests] == [3, 2, 1]


def test_equal_clips_are_asked_about_once_and_the_whole_clip_counts():
    with Chat(bright) as chat:
        judge = ChatJudge(chat.url, frames=3, samples=1)
        s = seen([200, 200, 30])
        judge(s)
        assert len(chat.requests) == 2 and judge.answers.hits == 1
        judge(replace(s, clip={k: v + 1 for k, v in s.clip.items()}))
        assert len(chat.requests) == 4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("yes, it did", "gave 0 of 3 answers as JSON with success; the last other one: 'yes, it did'"),
        ('{"success": "yes"}', "gave 0 of 3 answers"),
        ('{"won": true}', "gave 0 of 3"),
    ],
)
def test_answers_that_are_none_end_in_one_line(answer, words):
    with Chat(lambda r, k: answer) as chat, pytest.raises(UserError, match=words):
        ChatJudge(chat.url, frames=3, samples=3)(seen([200]))


@pytest.mark.parametrize("met", ["null", "3", '"y"', "[1]"])
def test_criteria_that_are_no_truths_end_in_one_line(met, tmp_path):
    (tmp_path / "c.json").write_text('{"": ["the door is open"]}')
    answer = f'{{"success": true, "criteria": {met}}}'
    with (
        Chat(lambda r, k: answer) as chat,
        pytest.raises(UserError, match="0 of 3 answers as JSON with success and"),
    ):
        ChatJudge(chat.url, frames=3, samples=3, criteria=str(tmp_path / "c.json"))(seen([200]))


def test_a_judge_that_contradicts_itself_is_told():
    with Chat(lambda r, k: json.dumps({"success": k % 2 == 0})) as chat:
        judge = ChatJudge(chat.url, frames=3, samples=5)
        judge(seen(np.arange(19)))
        assert judge.divided == 19
        with pytest.raises(
            UserError, match="contradicts itself: its 5 answers are divided on 20 of 20 clips"
        ):
            judge(seen([99]))


def test_requests_have_a_budget_and_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv(KEY, "a-key")
    with Chat(bright) as chat:
        judge = ChatJudge(chat.url, frames=3, samples=1, budget=2)
        judge(seen([1, 2]))
        with pytest.raises(UserError, match="was asked 2 times, its budget"):
            judge(seen([3]))
    assert chat.headers[0]["Authorization"] == "Bearer a-key"


def test_one_that_is_down_and_one_that_speaks_another_protocol_are_named():
    with pytest.raises(UserError, match=r"chat/completions does not answer .*2 attempts"):
        ChatJudge("http://127.0.0.1:9/v1", frames=3, tries=2, pause=0.01, timeout=1)(seen([1]))
    with (
        Stand(lambda items, stand: b"{}") as stand,
        pytest.raises(UserError, match=r"does not answer|must answer as OpenAI"),
    ):
        ChatJudge(stand.url, frames=3, tries=1)(seen([1]))
    with pytest.raises(UserError, match="looks at pictures"):
        s = seen([1])
        ChatJudge("http://127.0.0.1:9", tries=1)(replace(s, clip={}, after={"state": s.after["state"]}))


def test_our_own_protocol_sends_clips_too():
    shown = []

    def answer(items, stand):
        shown.extend(items)
        return [0.25] * len(items)

    with Stand(answer) as stand:
        judge = judges.make(f"{stand.url}#frames=3,skip=2")
        assert judge(seen([7])).tolist() == [0.25] and (judge.frames, judge.skip) == (3, 2)
    assert [len(v) for v in shown[0]["clip"].values()] == [3]


# ---- what it is worth --------------------------------------------------------------------------------------


def test_agreement_with_the_truth_is_told_per_instruction_with_its_interval():
    data = record(PointReach(20, LIMIT, tasks=("reach the goal", "go there")), 120)
    final = np.where(data.success[:, None, None, None], 220, 30).astype(np.uint8) * np.ones(
        (1, 8, 8, 3), np.uint8
    )
    data = replace(
        data,
        images={"top": np.full((len(data.state), 8, 8, 3), 30, np.uint8)},
        final_images={"top": final},
        pictured=np.ones(len(data), bool),
    )

    def half(request, k):
        return (
            bright(request, k)
            if "go there" in request["messages"][1]["content"][0]["text"]
            else '{"success": false}'
        )

    with Chat(half) as chat:
        found = confusion(ChatJudge(chat.url, frames=3, samples=1), data)
    a, b = found["tasks"]["go there"], found["tasks"]["reach the goal"]
    assert (
        a["value"] == 1
        and a["low"] < 1
        and 0.2 < b["value"] < 0.9
        and a["n"] + b["n"]
        == sum(found[k] for k in ("true_positive", "false_negative", "false_positive", "true_negative"))
    )
    assert found["credit"]["did_not"]["value"] == 0 and found["divided"] == 0
