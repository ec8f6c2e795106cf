"""A person beside a run that learns: a device that is a fed stream, the console's page, and what they
mark."""

import json
import os

import numpy as np
import pytest
from commands import TINY_REPLAY, robo_rl
from streams import NORTH, TR, WEST, Feed, key, press, stick
from toys import PointReach

from robo_rl.data.episode import Episode
from robo_rl.data.reader import load
from robo_rl.data.writer import Writer
from robo_rl.errors import UserError
from robo_rl.experiment.marks import marks_of_data
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
    console.real_time.period = 0.0
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
    ],
)
def test_a_person_who_cannot_be_there_is_one_clear_line(tmp_path, more, words):
    assert words in robo_rl(tmp_path, "train", "--algo", "hil_serl", *own(), "--out", "run", *more).err


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
