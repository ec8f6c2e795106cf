"""The actor of methods of replay as a process beside the learner: nothing lost, bounded lead, dead and hung
ones replaced."""

import errno
import json
import os
import signal
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from commands import TINY_REPLAY, Command, robo_rl
from toys import PointReach

from robo_rl.errors import UserError
from robo_rl.journal import ADD, Journal
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.replay import Replay, ReplayWriter
from robo_rl.runtime.actor import LEAD, ActorJob, SeparateProcessActor, Stage
from robo_rl.runtime.worker_pool import WorkerFailure

F = np.float32
N, E = 3, 2
SPEC = ObsSpec(state=4, action=2)
OPTIONS = PolicyOptions(kind="squashed", horizon=E, execute=E, hidden=8, layers=1)
ROWS = {"state": ((4,), np.dtype(F))}


def quiet() -> None: ...


def reach() -> Stage:
    return Stage(PointReach(N), None, None, quiet)


def mistaken() -> Stage:
    raise UserError("no such arm; say --robot sim")


def broken() -> Stage:
    raise RuntimeError("the gripper fell off")


def full() -> Stage:
    raise OSError(errno.ENOSPC, "No space left on device")


class Stuck(PointReach):
    """Stops for ever after 40 steps of its first life; `mark` says that it had one."""

    def __init__(self, mark):
        super().__init__(N)
        self.mark, self.first, self.count = mark, not mark.exists(), 0
        mark.touch()

    def step(self, actions):
        self.count += 1
        while self.first and self.count > 40:
            time.sleep(1)
        return super().step(actions)


class Fails(PointReach):
    """A simulator of a user that raises after so many steps of each life."""

    def __init__(self, after):
        super().__init__(N)
        self.after, self.count = after, 0

    def step(self, actions):
        self.count += 1
        if self.count > self.after:
            raise UserError(f"mine: step of env 1 failed after {self.count}: the solver diverged")
        return super().step(actions)


def fails(after) -> Stage:
    return Stage(Fails(after), None, None, quiet)


def stuck(mark) -> Stage:
    return Stage(Stuck(mark), None, None, quiet)


def beside(tmp_path, build=reach, **more) -> tuple[SeparateProcessActor, Replay, Replay]:
    policy = make_policy(OPTIONS, SPEC, 0).eval()
    online, corrections = (
        Replay(ROWS, 2, E, 0.9, 5000, N, Journal(tmp_path / "replay" / n, 5000))
        for n in ("online", "corrections")
    )
    kept = online.restore()
    job = ActorJob(
        build,
        OPTIONS,
        SPEC,
        ROWS,
        7,
        5000,
        tmp_path / "replay",
        tmp_path / "flight",
        kept,
        incarnation=int(kept > 0),
    )
    actor = SeparateProcessActor(job, policy, (online, corrections), 4 * N, back_off=(0.0,), **more)
    actor.policy = policy
    return actor, online, corrections


def rounds(actor: SeparateProcessActor, count: int, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    for _ in range(count):
        actor.collect(actor.policy, lambda: time.monotonic() > end)
    assert time.monotonic() < end, "it took too long"


def written(tmp_path) -> int:
    return sum(n for kind, n, _ in Journal(tmp_path / "replay" / "online", 5000).read() if kind == ADD)


def same(a: Replay, b: Replay) -> None:
    assert a.total == b.total and len(a) == len(b)
    for name in ("action", "reward", "terminated", "final", "next", "bound", "startable"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    np.testing.assert_array_equal(a.obs["state"], b.obs["state"])


def holds_what_is_written(tmp_path, actor: SeparateProcessActor, online: Replay) -> None:
    assert actor.steps == written(tmp_path)
    again = Replay(ROWS, 2, E, 0.9, 5000, N, Journal(tmp_path / "replay" / "online", 5000))
    again.restore()
    same(online, again)


def test_a_reader_that_follows_a_journal_holds_what_the_writer_would(tmp_path):
    whole = Replay(ROWS, 2, E, 0.9, 200, N)
    tape = ReplayWriter(ROWS, Journal(tmp_path, 200, limit=2000))
    reader, journal, rng, seen = (
        Replay(ROWS, 2, E, 0.9, 200, N),
        Journal(tmp_path, 200),
        np.random.default_rng(0),
        0,
    )
    for t in range(120):
        obs, action = {"state": rng.normal(size=(N, 4)).astype(F)}, rng.normal(size=(N, 2)).astype(F)
        done = rng.random(N) < 0.1
        for store in (whole, tape):
            store.add(np.arange(N), obs, action, done.astype(F), done)
            if done.any():
                store.close(done.nonzero()[0], {"state": obs["state"][done] + 1})
        if t % 7 == 0:
            seen += reader.follow(journal)
    seen += reader.follow(journal)
    assert seen == 120 * N and reader.follow(journal) == 0
    assert len(journal.numbers()) > 1  # it went on in new files
    same(whole, reader)


def test_a_call_that_is_half_written_comes_when_it_is_whole_and_never_if_its_writer_died(tmp_path):
    writer, reader = ReplayWriter(ROWS, Journal(tmp_path, 200)), Replay(ROWS, 2, E, 0.9, 200, N)
    journal, step = (
        Journal(tmp_path, 200),
        ({"state": np.ones((N, 4), F)}, np.zeros((N, 2), F), np.zeros(N, F), np.zeros(N, bool)),
    )
    writer.add(np.arange(N), *step)
    path = writer.journal.path(0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert reader.follow(journal) == 0
    path.write_bytes(whole)
    assert reader.follow(journal) == N
    path.write_bytes(whole + whole[:30])  # a kill in the middle of the second call
    assert reader.follow(journal) == 0
    ReplayWriter(ROWS, Journal(tmp_path, 200)).add(np.arange(N), *step)
    assert reader.follow(journal) == N and reader.total == 2 * N


def test_it_acts_with_the_learners_weights_and_never_further_ahead_than_its_lead(tmp_path):
    actor, online, _ = beside(tmp_path)
    try:
        rounds(actor, 10)
        at = actor.steps
        time.sleep(0.3)  # the learner is busy
        assert at <= written(tmp_path) <= at + LEAD * actor.round
        with torch.no_grad():  # a policy that pushes to the upper right, whatever it sees
            for p in actor.policy.actor.parameters():
                p.zero_()
            actor.policy.actor.net[-1].bias[: E * 2] = 4.0
        rounds(actor, 2 * LEAD)
        before = online.total
        rounds(actor, 3)
        new = np.arange(before, online.total - N)
        new = new[~online.final[new]]
        assert online.action[new].mean() > 0.9 > online.action[:at].mean() and actor.take()["episodes"] > 0
    finally:
        actor.end()
    holds_what_is_written(tmp_path, actor, online)


def test_kill_minus_nine_at_any_moment_loses_no_step_that_was_written(tmp_path):
    actor, online, _ = beside(tmp_path)
    try:
        rng = np.random.default_rng(1)
        for _ in range(4):
            rounds(actor, 3)
            time.sleep(rng.uniform(0, 0.02))
            os.kill(actor.process.pid, signal.SIGKILL)
        rounds(actor, 3)
        assert actor.restarts == 4
    finally:
        actor.end()
    holds_what_is_written(tmp_path, actor, online)
    ends = online.gather(online.draw(200, rng))
    assert (ends.steps >= 1).all() and np.isfinite(ends.rewards).all()


def test_a_learner_that_died_finds_everything_and_its_actor_is_gone(tmp_path):
    first, online, _ = beside(tmp_path)
    rounds(first, 5)
    old = first.process
    second, again, _ = beside(tmp_path)  # the first one is not told; it still acts
    try:
        old.join(10)
        assert old.exitcode == -signal.SIGKILL
        rounds(second, 3)
        assert second.steps >= first.steps + 3 * second.round and again.total > online.total
    finally:
        second.end()
    holds_what_is_written(tmp_path, second, again)


def test_an_actor_that_hangs_is_asked_for_its_stack_and_replaced(tmp_path):
    # s, far above a pause of a busy machine
    actor, *_ = beside(tmp_path, partial(stuck, tmp_path / "mark"), hang=4.0)
    last, kill = [], actor._kill
    actor._kill = lambda why: (kill(why), last.append(actor.last))
    try:
        rounds(actor, 20)
        assert actor.restarts == 1 and "made no control step" in last[0] and "in step" in last[0]
    finally:
        actor.end()


def test_a_simulator_that_fails_now_and_then_is_started_anew_and_its_open_episodes_are_cut(tmp_path, capfd):
    actor, online, _ = beside(tmp_path, partial(fails, 120))  # a round is four steps of each env
    try:
        rounds(actor, 70)
        assert actor.restarts >= 2 and "the solver diverged" in capfd.readouterr().err
    finally:
        actor.end()
    holds_what_is_written(tmp_path, actor, online)
    ends = online.gather(online.draw(200, np.random.default_rng(1)))
    assert (ends.steps >= 1).all() and np.isfinite(ends.rewards).all()


def test_a_simulator_that_fails_all_the_time_ends_the_run_with_what_it_said(tmp_path):
    actor, *_ = beside(tmp_path, partial(fails, 12))
    with pytest.raises(WorkerFailure, match=r"6 times by the same error \(.*: rounds, \d+\): mine: step"):
        rounds(actor, 100)
    actor.end()
    actor, *_ = beside(tmp_path / "arm", partial(fails, 12))
    actor.job = replace(actor.job, whole=True)  # an arm, which a person looks after first
    with pytest.raises(UserError, match="^mine: step of env 1 failed"):
        rounds(actor, 100)
    actor.end()


def test_a_mistake_of_the_users_is_told_as_one_and_a_broken_actor_has_last_words(tmp_path):
    actor, *_ = beside(tmp_path / "a", mistaken)
    with pytest.raises(UserError, match="no such arm; say --robot sim"):
        rounds(actor, 1)
    actor.end()
    actor, *_ = beside(tmp_path / "c", full)
    with pytest.raises(UserError, match="^the disk is full: free some space"):
        rounds(actor, 1)
    actor.end()
    actor, *_ = beside(tmp_path / "b", broken)
    with pytest.raises(WorkerFailure, match="(?s)6 times in a row.*the gripper fell off"):
        rounds(actor, 1)
    actor.end()


@pytest.mark.slow
def test_train_with_an_actor_beside_it_survives_the_death_of_either(tmp_path):
    argv = [
        "train",
        *TINY_REPLAY[:-3],
        "--no-video",
        "--algo",
        "hil_serl",
        "--workers",
        "1",
        "--steps",
        "3000",
        "--eval-every",
        "1500",
        "--rl.operator",
        "scripted",
        "--out",
        "run",
    ]
    command = Command(tmp_path, argv)
    online = tmp_path / "run" / "replay" / "online"
    command.until(lambda: online.exists() and sum(p.stat().st_size for p in online.glob("*")) > 20_000, 120)
    os.kill(int((tmp_path / "run" / "flight" / "actor.pid").read_text().split()[0]), signal.SIGKILL)
    files = len(list(online.glob("*")))
    command.until(lambda: len(list(online.glob("*"))) > files, 120)
    command.signal(signal.SIGKILL)
    command.wait()
    result = robo_rl(tmp_path, "train", "--resume", "run")
    assert result.code == 0 and "steps that were journaled" in result.out + result.err, result
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] >= 3000 and any(r.get("human/operator_minutes", 0) > 0 for r in rows)
    assert not (tmp_path / "run" / "flight").exists()
