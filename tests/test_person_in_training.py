"""A person beside a run that learns: a device that is a fed stream, the console's page, and what they
mark."""

import json
import os
import re
import signal
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest
from commands import TINY_REPLAY, Command, robo_rl
from streams import NORTH, TR, WEST, Feed, key, press, stick
from toys import PointReach

from robo_rl.data.episode import Episode
from robo_rl.data.reader import load
from robo_rl.data.writer import Writer
from robo_rl.errors import UserError
from robo_rl.experiment.api import recipe
from robo_rl.experiment.console import renew_by_signal
from robo_rl.experiment.marks import marks_of_data
from robo_rl.experiment.parallel import workers
from robo_rl.experiment.stage import person_env
from robo_rl.human.console.options import ConsoleOptions
from robo_rl.human.console.training import TrainingConsole
from robo_rl.human.device_files import EventFile
from robo_rl.human.device_mapping import DEFAULTS
from robo_rl.human.devices import DeviceOperator, MappedDevice
from robo_rl.human.intervention import CORRECTION, PAUSE, POLICY, InterventionEnv
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.replay import HUMAN, Replay
from robo_rl.replay_collector import ReplayCollector
from robo_rl.rewards import marks_of
from robo_rl.runtime.actor import may_step

FEW = ("--steps", "96", "--rl.warmup", "32")
ONE = ("--envs", "1", "--rl.operator-speed", "0")


def own(*skip):
    """The options of a small run with one env."""
    pairs = [TINY_REPLAY[i : i + 2] for i in range(0, len(TINY_REPLAY) - 1, 2)]
    return [w for name, value in pairs if name not in (*skip, "--envs") for w in (name, value)] + [
        "--no-video",
        *ONE,
    ]


def test_what_a_person_does_with_a_device_is_learned_from_and_what_they_mark_is_the_reward(tmp_path):
    feed = Feed(
        tmp_path / "pad",
        [
            b"",
            b"",
            key(TR) + stick(1, -1),
            b"",
            b"",
            b"",
            press(NORTH),
            key(TR, 0) + stick(1, 0),
            *[b""] * 20,
        ],
    )
    env, now = PointReach(1, limit=100), [0.0]
    operator = DeviceOperator(
        MappedDevice(EventFile(str(feed.path)), DEFAULTS["gamepad"]),
        env.spec,
        1,
        clock=lambda: now[0],
        rest=0.15,
    )
    policy = make_policy(
        PolicyOptions(kind="squashed", horizon=2, execute=2, hidden=8, layers=1),
        ObsSpec(state=4, action=2),
        0,
    )
    online, corrections = (Replay({"state": ((4,), np.float32)}, 2, 2, 0.9, 100, 1) for _ in range(2))
    collector = ReplayCollector(InterventionEnv(env, operator, blend=0), policy, online, corrections, 0)
    env.goal[:] = 99
    for _ in range(7):
        now[0] += 0.1
        collector.step(policy)
    sums = collector.take()
    assert sums["episodes"] == sums["success"] == 1 and sums["return"] == 1 and sums["helped"] == 1
    assert collector.help_steps == 5  # from the button to the end of the episode
    assert len(online) and len(corrections)
    feed.close()


def recorded(folder, outcomes, rng):
    """Episodes of 20 states: the first number grows to 1 in a success, stays at 0 in a failure."""
    spec = PointReach(1).spec
    with Writer(folder, spec=spec) as writer:
        for won in outcomes:
            state = rng.normal(0, 0.05, (20, 4))
            state[:, 0] += np.linspace(0, 1, 20) ** 4 if won else 0
            writer.add(Episode(state, np.zeros((20, 2)), success=won, source="human", final=state[-1]))
    return folder


def test_the_last_states_of_a_success_are_marks_and_those_just_before_are_not_known():
    state = np.arange(12, dtype=np.float32)[:, None]
    got = marks_of(state, np.array([7, 5]), np.array([True, False]), last=2, hidden=3)
    assert got.state[:, 0].tolist() == [0, 1, 5, 6, 7, 8, 9, 10, 11]
    assert (
        got.success.tolist() == [False, False, True, True, *[False] * 5]
        and got.episode.tolist() == [0] * 4 + [1] * 5
    )


def test_a_robot_that_stood_still_before_the_mark_is_no_failure():
    state = np.float32([[0], [1], [1], [1], [1], [1], [1]])
    got = marks_of(state, np.array([7]), np.array([True]), last=2, hidden=1)
    assert got.state[:, 0].tolist() == [0, 1, 1] and got.success.tolist() == [False, True, True]


def test_a_success_classifier_is_trained_from_what_people_marked(tmp_path):
    from robo_rl.rewards import train

    rng = np.random.default_rng(0)
    folders = [
        str(recorded(tmp_path / name, outcomes, rng))
        for name, outcomes in (("a", [True, False] * 10), ("b", [False] * 20))
    ]
    policy = make_policy(PolicyOptions(hidden=8, layers=1), ObsSpec(state=4, action=2), 0)
    marks = marks_of_data(folders, policy, 2)
    assert marks.episode.max() == 39 and marks.success.sum() == 20  # two states of ten episodes
    model, said = train(marks, 0.1, 2, 0)
    assert said["recall"] == 1 and model.probability(
        np.float32([[1, 0, 0, 0], [0, 0, 0, 0]])
    ).round().tolist() == [1, 0]


def test_marks_that_cannot_train_are_one_clear_line(tmp_path):
    policy = make_policy(PolicyOptions(hidden=8, layers=1), ObsSpec(state=4, action=2), 0)
    good = recorded(tmp_path / "good", [True, True], np.random.default_rng(0))
    with pytest.raises(UserError, match="2 successes and 0 failures"):
        marks_of_data([str(good)], policy, 2)
    with pytest.raises(UserError, match="no data set; record one"):
        marks_of_data([str(tmp_path / "none")], policy, 2)


def page_robots(n=2):
    env = PointReach(n, limit=100)
    console = TrainingConsole(env.spec, n, ConsoleOptions(run="", operators="ann,bob", speed=10.0))
    console.real_time.period, console.state.clock = 0.0, lambda: 0.0  # no hold ends, however slow we are
    made = InterventionEnv(env, console, blend=0)
    made.reset(seed=0)
    env.goal[:] = 99
    return console, made, np.full((n, 2), 0.5, np.float32)


def test_people_at_the_page_take_over_a_robot_that_learns_and_mark_it():
    console, env, act = page_robots()
    env.step(act)
    number = console.state.take("ann", 1)
    console.state.drive("ann", 1, number, [1, -1], "correction")
    info = env.step(act)[4]
    assert info["phase"].tolist() == [POLICY, CORRECTION] and info["executed"][1].tolist() == [1, -1]
    console.state.drive("ann", 1, number, [0, 0], "pause")
    info = env.step(act)[4]
    assert (
        info["phase"].tolist() == [POLICY, PAUSE]
        and not info["held"].any()
        and info["attended"].tolist() == [False, True]
    )
    console.state.label("ann", 1, int(console.state.episode[1]), True)
    _, reward, terminated, _, info = env.step(act)
    assert reward.tolist() == [0, 1] and terminated.tolist() == [False, True] and info["success"][1]
    obs, _ = env.reset(options={"reset_mask": np.array([False, True])})
    seen = console.page_state("ann")
    assert (
        seen["robots"][1]["last"] == "marked a success"
        and seen["robots"][1]["holder"] == ""
        and seen["account"]["successes"] == 1
    )
    assert console.operator_stats.attended_steps == 3 and console.operator_stats.human_steps == 1
    assert console.operator_stats.interventions == 1


def test_an_episode_lasts_as_long_as_a_person_helps_and_is_cut_by_its_limit_without_them():
    console, made, act = page_robots(2)
    env = InterventionEnv(made.env, console, blend=0, limit=10)
    env.reset(seed=0)
    made.env.goal[:] = 99
    number = console.state.take("ann", 1)
    cut = []
    for t in range(40):
        if t < 25:
            console.state.drive("ann", 1, number, [1, 0], "correction" if t % 2 else "pause")
        if t == 25:
            console.state.hand_back("ann", 1, number)
        _, _, terminated, truncated, _ = env.step(act)
        assert not terminated.any()
        cut.append(truncated.tolist())
        if truncated.any():
            env.reset(options={"reset_mask": truncated})
    ends = [[t for t, c in enumerate(cut) if c[i]] for i in range(2)]
    assert ends == [[9, 19, 29, 39], [34]]  # ten steps after the hand-back


def test_a_person_beside_a_run_has_time_and_does_not_wait_for_updates(monkeypatch):
    config = robo_rl_recipe(operator="console")
    monkeypatch.setattr("robo_rl.experiment.parallel.cores", lambda: 2)
    assert workers(config) == 1 and workers(robo_rl_recipe(operator="scripted")) == 0
    env, own, limit = person_env(config)
    assert own and (limit, env.spec.max_steps) == (50, 2000) and env.images
    env.close()


def robo_rl_recipe(operator):
    return recipe(task="reach", algo="hil_serl", preset="quick", envs=1, rl={"operator": operator})


def test_what_a_person_did_since_the_last_checkpoint_survives_a_kill_in_one_process_too(tmp_path):
    help_ = [b""] * 6 + [key(TR) + stick(1, -1), *[b""] * 8, press(NORTH), key(TR, 0)]
    feed = Feed(tmp_path / "pad", [*help_, *[b""] * 60])
    argv = ["train", "--algo", "hil_serl", *own("--rl.warmup"), "--rl.warmup", "400", "--out", "run"]
    command = Command(tmp_path, [*argv, "--rl.operator", f"gamepad:{feed.path}", "--rl.operator-speed", "1"])
    info = tmp_path / "run" / "corrections" / "meta" / "info.json"
    command.until(lambda: info.exists() and json.loads(info.read_text())["total_episodes"] == 1)
    command.process.kill()
    command.process.join()
    feed.close()
    feed.path.unlink()
    feed = Feed(tmp_path / "pad", [b""] * 5)
    again = Command(tmp_path, ["train", "--resume", "run"])
    again.until(lambda: "around corrections" in again.out.read_text() + again.said())
    kept = re.search(r"(\d+) around corrections", again.out.read_text() + again.said())
    again.process.kill()
    again.process.join()
    feed.close()
    assert kept is not None and int(kept[1]) >= 1  # all that was not blended


def test_new_addresses_of_a_runs_page_are_printed_at_a_signal(monkeypatch):
    said, renewed = [], []
    server = SimpleNamespace(
        renewal="", renew=lambda: renewed.append(1), addresses=lambda: {"operator": "http://x"}
    )
    before = signal.getsignal(signal.SIGUSR2)
    try:
        renew_by_signal(server, said.append)
        assert str(os.getpid()) in server.renewal and "kill -USR2" in said[0]
        os.kill(os.getpid(), signal.SIGUSR2)
        end = time.monotonic() + 60
        while said[-1] != "operator: http://x":
            assert time.monotonic() < end, said
            time.sleep(0.01)
        assert renewed == [1]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_of_several_robots_only_one_that_somebody_helps_runs_ahead_of_the_learner():
    console, env, act = page_robots(2)
    policy = make_policy(
        PolicyOptions(kind="squashed", horizon=2, execute=2, hidden=8, layers=1),
        ObsSpec(state=4, action=2),
        0,
    )
    g = ReplayCollector(env, policy, Replay({"state": ((4,), np.float32)}, 2, 2, 0.9, 100, 2), None, 0)
    env.env.goal[:] = 99
    g.step(policy)
    assert g.lengths.any() and may_step(4, g, True) and not may_step(3, g, True)
    number = console.state.take("ann", 1)
    assert may_step(0, g, True) and not may_step(0, g, False)
    console.state.hand_back("ann", 1, number)
    assert not may_step(0, g, True)


@pytest.mark.parametrize("won", [True, False])
def test_help_with_pauses_in_it_is_learned_from_unless_it_ends_in_a_failure(won):
    console, env, _ = page_robots(1)
    policy = make_policy(
        PolicyOptions(kind="squashed", horizon=2, execute=2, hidden=8, layers=1),
        ObsSpec(state=4, action=2),
        0,
    )
    online, corrections = (Replay({"state": ((4,), np.float32)}, 2, 2, 0.9, 100, 1) for _ in range(2))
    collector = ReplayCollector(env, policy, online, corrections, 0)
    env.env.goal[:] = 99
    number = console.state.take("ann", 0)
    for phase in ("correction", "correction", *["pause"] * 5, "correction", *["pause"] * 5):
        console.state.drive("ann", 0, number, [1, 1], phase)
        collector.step(policy)
    console.state.label("ann", 0, int(console.state.episode[0]), won)
    console.state.drive("ann", 0, number, [0, 0], "pause")
    collector.step(policy)
    assert collector.take()["success"] == won
    assert len(corrections) == (3 if won else 0)  # chunks begin where a person acted


def test_a_person_with_a_device_takes_part_in_a_whole_run(tmp_path):
    idle, help_ = [b""] * 6, [key(TR) + stick(1, -1), *[b""] * 8, press(NORTH), key(TR, 0)]
    feed = Feed(tmp_path / "pad", [*idle, *help_, *idle, *help_, *idle])
    result = robo_rl(
        tmp_path,
        "train",
        "--algo",
        "hil_serl",
        *own("--steps", "--rl.warmup"),
        *FEW,
        "--out",
        "run",
        "--rl.operator",
        f"gamepad:{feed.path}",
    )
    feed.close()
    assert result.code == 0 and "operator min" in result.err + result.out, result
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in rows if "human/operator_minutes" in r][-1]
    assert last["human/operator_minutes"] >= 20 * 0.02 / 60
    data = load(tmp_path / "run" / "corrections")
    assert len(data) == 2 and data.success.all() and (data.phase == CORRECTION).sum() >= 4  # the rest blends
    assert data.reward[data.to - 1].tolist() == [1, 1]


def test_a_person_marks_the_episodes_that_train_the_classifier_of_a_run(tmp_path):
    feed = Feed(tmp_path / "pad", [b"", *[b"", b"", press(NORTH), b"", b"", press(WEST)] * 12])
    result = robo_rl(
        tmp_path,
        "train",
        "--algo",
        "hil_serl",
        *own("--steps", "--rl.warmup"),
        *FEW,
        "--out",
        "run",
        "--rl.operator",
        f"gamepad:{feed.path}",
        "--rl.judge",
        "classifier",
        "--rl.judge-episodes",
        "24",
        "--rl.judge-rate",
        "0.2",
    )
    feed.close()
    assert result.code == 0 and "success classifier: threshold" in result.out + result.err, result
    marks = load(tmp_path / "run" / "marks")
    assert marks.success.tolist() == [True, False] * 12
    again = robo_rl(
        tmp_path,
        "train",
        "--algo",
        "demo_sac",
        *own("--steps", "--rl.warmup"),
        *FEW,
        "--out",
        "next",
        "--rl.judge",
        "classifier",
        "--rl.judge-marks",
        "run/marks",
        "--rl.judge-rate",
        "0.2",
    )
    assert again.code == 0 and "success classifier: threshold" in again.out + again.err, again


@pytest.mark.parametrize(
    "more, words",
    [
        (("--rl.operator", "joystick"), "unknown --rl.operator 'joystick'"),
        (("--rl.operator", "gamepad:/none"), "cannot open /none"),
        (("--rl.operator", "scripted:x"), "takes nothing after it"),
        (("--rl.judge", "classifier", "--rl.judge-marks", "none"), "none is no data set"),
        (("--rl.judge-marks", "none"), "trains the classifier of --rl.judge classifier: add that"),
        (("--rl.judge", "classifier", "--rl.judge-episodes", "20"), "it takes 38 marked ones, got 20"),
    ],
)
def test_a_person_who_cannot_be_there_is_one_clear_line(tmp_path, more, words):
    done = robo_rl(tmp_path, "train", "--algo", "hil_serl", *own(), "--out", "run", *more)
    assert done.code == 2 and words in done.err and not (tmp_path / "run").exists()


def test_a_port_that_is_taken_is_told_before_anything_is_done(tmp_path):
    pytest.importorskip("websockets", reason="needs robo_rl[console]")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = robo_rl(
            tmp_path,
            *("train", "--algo", "hil_serl", *own(), "--out", "run", "--rl.operator", "console"),
            *("--rl.operator-port", port),
        )
    assert done.code == 2 and f"cannot listen on 127.0.0.1:{port}" in done.err
    assert "choose another --rl.operator-port" in done.err and not (tmp_path / "run").exists()


def test_a_marked_episode_of_the_console_is_kept_for_the_classifier_whether_somebody_helped_or_not(tmp_path):
    from robo_rl.human.console.recorder import CorrectionRecorder

    spec = PointReach(1).spec
    recorder = CorrectionRecorder(
        tmp_path / "corrections", tmp_path / "journal", spec, 1, marks=tmp_path / "marks"
    )
    alone = Episode(np.zeros((3, 4)), np.zeros((3, 2)), success=True, source=["policy"] * 3, phase=[0] * 3)
    recorder.end_episode(alone, 0)
    recorder.save_mark(alone)
    recorder.close()
    assert len(load(tmp_path / "marks")) == 1 and recorder.kept == 0
    assert os.path.exists(tmp_path / "marks" / "meta" / "info.json") and HUMAN == 1
