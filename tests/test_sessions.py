"""A policy server that records: what clients do becomes groups of episodes with log-probs, whatever the
clients do wrong."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import TINY, Command, robo_rl
from test_deploy import write_run
from test_share import SPEC, G, build, config, make

from controllers.openpi import packb, unpackb
from controllers.remote import RemotePolicyClient, read_token
from controllers.serving import PolicyServer
from robo_rl.algos import foreign, ppo
from robo_rl.errors import UserError
from robo_rl.experiment.batching import Batcher
from robo_rl.experiment.folder import NewestCheckpoint
from robo_rl.experiment.openpi import answer
from robo_rl.experiment.policy_server import ServeOptions, make_sessions, open_listener
from robo_rl.experiment.share import ExperienceSharing, space_of
from robo_rl.policies import make_policy
from robo_rl.rollout import Collector
from robo_rl.runtime.sessions import ExploringActor, SessionFields, SessionRecorder
from robo_rl.runtime.share import ShareFolder, parse_group

LONGEST = 4  # decisions of 3 steps


def recorder(folder, policy=None, **kw):
    policy = policy or make()
    obs = {"state": torch.zeros(1, 1, 4)}
    return SessionRecorder(
        ShareFolder(folder, "server", 256),
        space_of(build(1).spec, policy, "point", G, obs),
        foreign.actor_of(policy),
        LONGEST,
        **kw,
    )


def act(policy=None, version=3):
    return ExploringActor(policy or make(), 0, version)


def decide(rec, actor, who, state=0.0, **fields):
    """One question of a client, as a server takes it -> the rows that it gets."""
    known = rec.before(who, fields)
    if known is not None:
        return known
    (decision,) = actor([{"state": np.full(4, state, np.float32)}])
    return rec.given(who, fields, decision)


def traces(folder, kind):
    return [parse_group(p.read_bytes(), p.name) for p in sorted((folder / "server").glob(f"*-{kind}.trace"))]


def group_files(folder):
    return sorted((folder / "server").glob("*.group"))


# ---- sessions ----------------------------------------------------------------------------------------------


def test_questions_whose_steps_go_on_are_one_episode_and_every_decision_has_its_log_prob_and_version(
    tmp_path,
):
    rec, actor = recorder(tmp_path), act()
    asked = 0
    for k in range(G):
        for step in (0, 3, 5):
            decide(rec, actor, 1, k + step / 10, episode=str(k), step=step)
            asked += 1
        said = rec.before(1, {"episode": str(k), "success": k % 2 == 0, "steps": 7})
        assert said["recorded"] == 3
    (path,) = group_files(tmp_path)
    g = parse_group(path.read_bytes(), "x")
    assert g.executed.tolist() == [[3] * G, [2] * G, [2] * G] and int((g.executed > 0).sum()) == asked
    assert g.outcome.tolist() == [1, 0, 1, 0] and (g.behaviour["version"] == 3).all() and not rec.open
    assert np.allclose(g.obs["state"][:, :, 0], [[k + s for k in range(G)] for s in (0.0, 0.3, 0.5, 0.5)])
    policy, (t, n) = make(), g.executed.shape
    obs = {"state": torch.from_numpy(g.obs["state"][:t].reshape(t * n, 4).copy())}
    trace = {"x_next": torch.from_numpy(g.behaviour["trace/x_next"].reshape(t * n, 1, 8).copy())}
    logp, _ = policy.score(policy.encode(obs), trace)
    assert np.allclose(logp.detach().view(t, n, 1), g.behaviour["logp"], atol=1e-4)
    assert not traces(tmp_path, "done") and not traces(tmp_path, "open")


@pytest.mark.parametrize(
    ("steps", "lengths"), [((0, 3, 0, 3), [2]), ((0, 3, 7), [2]), ((0, 3, 2), [2]), ((0, 3, 6, 9, 12), [4])]
)
def test_a_step_that_goes_back_or_too_far_and_an_episode_that_is_too_long_are_cut_there(
    steps, lengths, tmp_path
):
    rec, actor = recorder(tmp_path), act()
    for k, step in enumerate(steps):
        decide(rec, actor, 1, step=step, request=f"r{k}")
    assert [len(e.executed) for e in traces(tmp_path, "open")] == lengths and rec.counts["truncated"] == 1


def test_sessions_never_merge_however_they_interleave(tmp_path):
    rec, actor, rng = recorder(tmp_path), act(), np.random.default_rng(0)
    told = {(who, e): [0, 3, 6] for who in (1, 2) for e in ("a", "b")}
    while any(told.values()):
        who, e = key = [k for k, v in told.items() if v][rng.integers(sum(map(bool, told.values())))]
        decide(rec, actor, who, 10 * who + (e == "b"), episode=e, step=told[key].pop(0))
    for who, e in ((1, "a"), (2, "b"), (1, "b"), (2, "a")):
        rec.before(who, {"episode": e, "outcome": float(who), "steps": 8})
    g = parse_group(group_files(tmp_path)[0].read_bytes(), "x")
    assert (g.obs["state"] == np.array([10, 21, 11, 20])[None, :, None]).all() and g.outcome.tolist() == [
        1,
        2,
        1,
        2,
    ]


def test_a_question_that_is_sent_again_gets_the_same_rows_and_is_recorded_once(tmp_path):
    rec, actor = recorder(tmp_path), act()
    first = decide(rec, actor, 1, step=0, request="a")
    assert decide(rec, actor, 1, step=0, request="a") is first
    second = decide(rec, actor, 1, step=3, request="b")
    assert decide(rec, actor, 1, step=0, request="a") is first and second is not first
    (late,) = actor([{"state": np.zeros(4, np.float32)}])
    assert rec.given(1, {"step": 3, "request": "b"}, late) is second  # both were on their way
    again = decide(rec, actor, 2, step=0)
    assert decide(rec, actor, 2, step=0) is again  # without a name, its step tells
    assert [len(s.decisions) for s in rec.open.values()] == [2, 1]


def test_a_client_that_crashes_leaves_a_valid_truncated_trace_of_which_nothing_is_learnt(tmp_path):
    rec, actor = recorder(tmp_path), act()
    for _ in range(2 * G):
        decide(rec, actor, 1, step=0)
        decide(rec, actor, 1, step=3)
        rec.left(1)
    assert len(traces(tmp_path, "open")) == 2 * G and not group_files(tmp_path) and not rec.open
    assert ShareFolder(tmp_path, "other", 8).foreign() == []
    with pytest.raises(UserError, match="there is no episode"):
        rec.before(1, {"success": True})


def test_a_server_that_is_killed_goes_on_with_the_episodes_that_had_ended_and_gives_a_group_once(tmp_path):
    def play(rec, k):
        decide(rec, actor, 1, k, episode=str(k), step=0)
        rec.before(1, {"episode": str(k), "outcome": k})

    actor, rec = act(), recorder(tmp_path)
    for k in range(G - 1):
        play(rec, k)
    kept = {p.name: p.read_bytes() for p in (tmp_path / "server").glob("*.trace")}
    rec.owned.close()  # as the system does for who is killed
    rec = recorder(tmp_path)
    play(rec, G - 1)
    (path,) = group_files(tmp_path)
    whole = path.read_bytes()
    assert parse_group(whole, "x").outcome.tolist() == [0, 1, 2, 3]
    for name, data in kept.items():  # killed after the group was written and before its traces went
        (tmp_path / "server" / name).write_bytes(data)
    rec.owned.close()
    rec = recorder(tmp_path)
    assert rec.number == G and len(rec.waiting[-1]) == G - 1


def test_ended_episodes_that_no_group_can_have_are_said_once_and_bounded_as_those_without_an_outcome(
    tmp_path,
):
    actor, rec, said = act(), recorder(tmp_path), []
    for k in range(G - 1):
        decide(rec, actor, 1, k, episode=str(k), step=0)
        rec.before(1, {"episode": str(k), "outcome": k})
    rec.close()
    (tmp_path / "server" / f"e{G:08d}-done.trace").write_bytes(b"damaged")
    other = recorder(tmp_path, make(horizon=6), say=said.append)
    assert not other.waiting and not list((tmp_path / "server").glob("*-done.trace"))
    assert len(list((tmp_path / "server").glob("*-open.trace"))) == G and other.number == G + 1
    assert len(said) == 2 and "of another policy" in said[0] and "damaged" in said[1]


def test_a_second_server_does_not_write_over_the_episodes_of_the_first(tmp_path):
    rec, actor = recorder(tmp_path), act()
    with pytest.raises(UserError, match="another process"):
        recorder(tmp_path)
    decide(rec, actor, 1, step=0)
    rec.close()
    assert recorder(tmp_path).number == 1


def test_episodes_of_one_start_make_a_group_of_their_own(tmp_path):
    rec, actor = recorder(tmp_path), act()
    for k in range(2 * G):
        decide(rec, actor, 1, episode=str(k), step=0, start=k % 2)
        rec.before(1, {"episode": str(k), "outcome": k})
    assert [parse_group(p.read_bytes(), "x").start for p in group_files(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"episode": ["a"]},
        {"episode": "x" * 65},
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"step": 1 << 40},
        {"success": 1},
        {"outcome": "good"},
        {"outcome": True},
        {"outcome": float("nan")},
        {"outcome": 1e300},
        {"start": "a"},
        {"request": {}},
    ],
    ids=str,
)
def test_fields_that_are_none_are_one_line(fields):
    with pytest.raises(UserError):
        SessionFields.read(fields)


def test_the_end_of_an_episode_must_be_within_its_last_chunk(tmp_path):
    rec, actor = recorder(tmp_path), act()
    decide(rec, actor, 1, step=0)
    with pytest.raises(UserError, match="steps is 1 to 3"):
        rec.before(1, {"success": True, "steps": 9})
    assert rec.before(1, {"success": True, "steps": 2})["recorded"] == 1


def test_what_one_client_has_open_is_bounded(tmp_path):
    rec, actor = recorder(tmp_path), act()
    for k in range(40):
        decide(rec, actor, 1, episode=str(k), step=0)
    assert len(rec.open) == 16 and rec.counts["truncated"] == 24


# ---- what is learnt from them ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "flow, one step"])
def test_a_run_learns_from_recorded_groups_with_the_log_probs_of_who_acted(kind, tmp_path):
    policy = make(kind)
    rec, actor = recorder(tmp_path / "share", policy), act(policy)
    for k in range(G):
        for step in (0, 3):
            decide(rec, actor, 1, k / 4, episode=str(k), step=step)
        rec.before(1, {"episode": str(k), "outcome": k})
    mine = ExperienceSharing(
        replace(config(tmp_path / "share"), share_foreign=1),
        tmp_path / "mine",
        build(1).spec,
        lambda *words: None,
    )
    mine.begin(None)
    line = Collector(build(4 * G), policy, 0.99, 0)
    own = line.episodes(policy, np.arange(4 * G) // G, version=5)
    own.outcome = torch.rand(4 * G, generator=torch.Generator().manual_seed(0))
    r = mine.mix(own, policy, 5)
    g = parse_group(group_files(tmp_path / "share")[0].read_bytes(), "x")
    n, t = 4 * G, len(g.executed)
    assert (
        mine.counts["taken"] == 1
        and np.array_equal(r.logp[:t, n:], g.behaviour["logp"])
        and (r.version[:t, n:] == 4).all()
    )
    assert all(np.array_equal(r.trace[k][:t, n:], g.behaviour[f"trace/{k}"]) for k in r.trace)
    if kind == "gaussian":  # of equal weights the correction weighs everything as it is
        metrics = ppo.make(policy, config("x").rl, 0).update(r, 0.0, 5)
        assert metrics["ess_frac"] == pytest.approx(1, abs=1e-3) and metrics["first_log_ratio"] < 1e-3
    other = make(kind)
    other.action_norm.mean.add_(0.5)  # chunks in other units: its traces would mean something else
    again = ExperienceSharing(
        replace(config(tmp_path / "share"), share_foreign=1),
        tmp_path / "again",
        build(1).spec,
        lambda *words: None,
    )
    again.begin(None)
    r = again.mix(own, other, 5)
    assert (
        again.counts["taken"] == 1
        and not np.array_equal(r.logp[:t, n:], g.behaviour["logp"])
        and (r.version[:, n:] == 5).all()
    )


def test_a_recorded_trace_with_steps_that_there_are_not_is_left_alone(tmp_path):
    policy = make("flow, one step")
    like = {
        "x": torch.zeros(4, 1, 8),
        "k": torch.zeros(4, 1, dtype=torch.int64),
        "x_next": torch.zeros(4, 1, 8),
    }
    told = {"logp": np.zeros((2, 2, 1), np.float32)} | {
        f"trace/{k}": v.numpy().reshape(2, 2, *v.shape[1:]) for k, v in like.items()
    }
    assert foreign.is_trace(policy, told, like, 2, 2)
    assert not foreign.is_trace(policy, told | {"trace/k": told["trace/k"] + 99}, like, 2, 2)
    assert not foreign.is_trace(policy, told | {"trace/more": told["logp"]}, like, 2, 2)
    assert not foreign.is_trace(policy, told | {"logp": told["logp"][..., :0]}, like, 2, 2)


# ---- on the wires ------------------------------------------------------------------------------------------


def test_both_wires_tell_episodes_and_outcomes(tmp_path):
    policy = make()
    rec, actor, token = recorder(tmp_path, policy), act(policy), b"0123456789abcdef"
    over = threading.Event()
    with open_listener("127.0.0.1", 0) as listener:
        server = PolicyServer(listener, actor, SPEC, token, many=actor, sessions=rec)

        def work():
            while not over.is_set():
                server.turn(0.02)

        thread = threading.Thread(target=work)
        thread.start()
        client = RemotePolicyClient(f"127.0.0.1:{listener.getsockname()[1]}", token, patience=10)
        try:
            for k in range(2):
                for step in (0, 3):
                    client.ask({"state": np.full(4, k, np.float32)}, float(step), episode=str(k), step=step)
                    rows, _ = client.poll(0.0)
                    assert rows.shape == (3, 2)
                assert client.tell(episode=str(k), outcome=float(k), steps=5)["recorded"] == 2
            with pytest.raises(UserError, match="there is no episode"):
                client.tell(episode="x", success=True)
            client.ask({"state": np.zeros(4, np.float32)}, 9.0, episode="open", step=0)
            assert client.poll(0.0) is not None
        finally:
            client.close()
            over.set()
            thread.join()
            server.close()
    assert len(traces(tmp_path, "open")) == 1
    batcher = Batcher(actor, 4).start()
    for k in range(2):
        for step in (0, 3, 3):  # one of them is sent again
            said = answer(
                packb({"observation/state": np.zeros(4), "episode": f"e{k}", "step": step}),
                batcher,
                SPEC,
                "",
                10,
                rec,
                7,
            )
            assert unpackb(said)["actions"].shape == (3, 2)
        assert (
            unpackb(answer(packb({"episode": f"e{k}", "success": True}), batcher, SPEC, "", 10, rec, 7))[
                "recorded"
            ]
            == 2
        )
    assert "there is no episode" in answer(
        packb({"episode": "x", "outcome": 1.0}), batcher, SPEC, "", 10, rec, 7
    )
    batcher.close()
    g = parse_group(group_files(tmp_path)[0].read_bytes(), "x")
    assert g.outcome.tolist() == [0, 1, 1, 1] and g.executed.tolist() == [[3] * 4, [2, 2, 3, 3]]


def test_newer_weights_are_served_as_soon_as_there_are_some(tmp_path):
    from robo_rl import checkpoint

    run, now = write_run(tmp_path / "run"), [0.0]
    newest = NewestCheckpoint(run, "last", run / "checkpoints" / checkpoint.name(0), 5.0, lambda: now[0])
    policy = checkpoint.load_policy(run / "checkpoints" / checkpoint.name(0))[0]
    checkpoint.save_checkpoint(
        run / "checkpoints" / checkpoint.name(640), policy, {}, {"step": 640, "best": {"step": -1}}
    )
    assert newest() is None
    now[0] = 6.0
    assert newest()[1] == 640 and newest() is None
    actor = ExploringActor(policy, 0, 0, newest=lambda: (policy, 640))
    assert actor([{"state": np.zeros(36, np.float32)}])[0].version == 640


def test_a_run_that_is_deleted_or_replaced_is_said_and_its_policy_stays_served(tmp_path):
    """The recorder keeps episodes of one kind: chunks of other sizes would be recorded as if they were of
    it."""
    from robo_rl import checkpoint

    run, said = write_run(tmp_path / "run"), []
    at, state = run / "checkpoints", [{"state": np.zeros(36, np.float32)}]
    policy = checkpoint.load_policy(at / checkpoint.name(0))[0]
    options = ServeOptions(run=str(run), checkpoint="last", share=str(tmp_path / "shared"), follow=1e-9)
    act = make_sessions(options, said.append)[0]

    def saved(step: int, horizon: int) -> None:
        newer = make_policy(replace(policy.options, horizon=horizon), policy.spec, 0)
        checkpoint.save_checkpoint(
            at / checkpoint.name(step), newer, {}, {"step": step, "best": {"step": -1}}
        )

    run.rename(tmp_path / "away")
    assert [act(state)[0].version for _ in range(2)] == [0, 0]
    (line,) = said
    assert (
        line.startswith("step_000000000000 stays served: nothing newer can be looked for (")
        and str(run) in line
    )
    (tmp_path / "away").rename(run)
    saved(640, 2 * policy.options.horizon)
    assert [(d.version, len(d.actions)) for _ in range(2) for d in act(state)] == 2 * [
        (0, policy.options.horizon)
    ]
    assert len(said) == 2 and "is of another run than was served" in said[1]
    saved(1280, policy.options.horizon)
    assert act(state)[0].version == 1280
    assert said[2:] == [f"serving {at / checkpoint.name(1280)} from now on"]


def test_a_server_that_records_nothing_says_so_to_who_tells_an_outcome():
    policy = make()
    actor, token, over = act(policy), b"0123456789abcdef", threading.Event()
    with open_listener("127.0.0.1", 0) as listener:
        server = PolicyServer(listener, actor, SPEC, token, many=actor)
        thread = threading.Thread(target=lambda: [server.turn(0.02) for _ in iter(over.is_set, True)])
        thread.start()
        client = RemotePolicyClient(f"127.0.0.1:{listener.getsockname()[1]}", token, patience=10)
        try:
            with pytest.raises(UserError, match="records no episodes; .* --share FOLDER"):
                client.tell(episode="1", success=True)
        finally:
            client.close()
            over.set()
            thread.join()
            server.close()
    batcher = Batcher(actor, 4).start()
    assert "--share FOLDER" in answer(packb({"episode": "1", "success": True}), batcher, SPEC, "", 10)
    batcher.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"follow": 3.0}, "--share FOLDER"),
        ({"share": "x", "task": "reach"}, "without --task"),
        ({"share": __file__}, "is a file"),
        ({"share": "x", "share_keep": 1}, "--share-keep"),
    ],
)
def test_options_of_a_server_that_cannot_record_are_one_line(options, words):
    with pytest.raises(UserError, match=words):
        ServeOptions(run="x", **options)


def test_a_robot_stack_drives_a_served_policy_and_a_run_learns_from_its_episodes(tmp_path):
    argv = (
        *TINY,
        "--envs",
        8,
        "--algo",
        "ppo",
        "--policy.kind",
        "gaussian",
        "--rl.advantage",
        "grpo",
        "--rl.group",
        4,
    )
    assert robo_rl(tmp_path, "train", *argv, "--steps", 0, "--out", "first").code == 0
    server = Command(tmp_path, ["serve", "first", "--port", "0", "--share", "shared", "--follow", "1"])
    server.until(lambda: server.out.exists() and "clients prove the token" in server.out.read_text())
    where = server.out.read_text().splitlines()[0].split(" on ")[-1]
    client = RemotePolicyClient(where, read_token(tmp_path / "first" / "serve.token"), patience=10)
    rng, said = np.random.default_rng(0), {}
    size = json.loads(next((tmp_path / "first" / "checkpoints").glob("*/meta.json")).read_text())["policy"][
        "spec"
    ]["state"]
    for k in range(4):
        step = 0
        while step < 20:
            client.ask(
                {"state": rng.standard_normal(size).astype(np.float32)},
                float(step),
                episode=str(k),
                step=step,
            )
            rows, _ = client.poll(0.0)
            step += len(rows)
        said = client.tell(episode=str(k), success=k % 2 == 0)
    client.close()
    assert said == {"recorded": said["recorded"], "waiting": 0} and said["recorded"] == -(-20 // len(rows))
    server.signal(15)
    server.wait()
    assert len(list((tmp_path / "shared").glob("serve-first-*/*.group"))) == 1
    end = robo_rl(
        tmp_path,
        "train",
        *argv,
        "--steps",
        800,
        "--out",
        "second",
        "--init",
        "first",
        "--demos",
        0,
        "--bc.updates",
        0,
        "--share",
        "shared",
    )
    assert end.code == 0, end
    told = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("share/taken", 0) for row in told) == 1 and any(
        row.get("train/ess_frac", 0) > 0.5 for row in told
    )
