"""The console: its state machine and journal alone, then the whole command, driven by WebSockets and by a
browser."""

import asyncio
import contextlib
import json
import os
import re
import signal
import struct
import time

import numpy as np
import pytest
from commands import robo_rl
from consoles import Page, connect, console, drive, trained

from robo_rl.data.reader import load
from robo_rl.errors import UserError
from robo_rl.experiment.console import open_session
from robo_rl.human import correction_journal as journal
from robo_rl.human.console.options import ConsoleOptions
from robo_rl.human.console.pages import PageConnection, execute_command
from robo_rl.human.console.recorder import JOURNAL_SIZE, CorrectionRecorder
from robo_rl.human.console.robots import ConsoleRobots
from robo_rl.human.console.state import DEADLINE, GRACE, ConsoleState
from robo_rl.human.device_files import HidSpaceMouse
from robo_rl.human.device_mapping import DEFAULTS
from robo_rl.human.devices import MappedDevice
from robo_rl.human.fleet import EpisodeBuffer
from robo_rl.human.intervention import CORRECTION, PAUSE, POLICY, RECOVERY, OperatorView
from robo_rl.human.leader_arm import LeaderArm, tool_of
from robo_rl.types import ActionAxis, ControlSpec

KILLS = int(os.environ.get("KILLS", "5"))

# ------------------------------------------------------------ the state of the console


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make_state(n=3):
    clock = Clock()
    d = ConsoleState(n, 2, clock=clock)
    d.begin(np.ones(n, bool), {})
    return d, clock


def look(n=3):
    return OperatorView(
        np.zeros((n, 2), np.float32), np.zeros((n, 2), np.float32), np.zeros(n, bool), np.ones(n, np.int64)
    )


def phases(d):
    return d.intervene(look(d.n)).phase.tolist()


def test_two_operators_never_hold_one_robot():
    d, _ = make_state()
    d.take("ann", 1)
    with pytest.raises(UserError, match="robot 1 is held by ann"):
        d.take("bob", 1)
    with pytest.raises(UserError, match="you hold robot 1"):
        d.take("ann", 2)
    with pytest.raises(UserError, match="you do not hold robot 1: ann does"):
        d.drive("bob", 1, 1, [0, 0], "correction")


def test_a_robot_that_is_taken_stands_still_until_its_holder_commands():
    d, _ = make_state()
    hold = d.take("ann", 1)
    assert phases(d) == [POLICY, PAUSE, POLICY]
    d.drive("ann", 1, hold, [0.5, 2.0], "recovery")
    help = d.intervene(look())
    assert help.phase.tolist() == [POLICY, RECOVERY, POLICY] and help.actions[1].tolist() == [0.5, 1.0]


def test_a_holder_who_commands_no_motion_teaches_nothing():
    clock = Clock()
    d = ConsoleState(1, 3, clock=clock, grips=np.array([False, False, True]), rest=0.3)
    d.begin(np.ones(1, bool), {})
    view = OperatorView(
        np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float32), np.zeros(1, bool), np.ones(1, np.int64)
    )
    hold = d.take("ann", 0, grip=-1.0)

    def said(action, seconds):
        """How many steps of so many seconds at 40 Hz are driven; the last command."""
        driven, got = 0, None
        for _ in range(round(seconds * 40)):
            clock.now += 0.025
            d.drive("ann", 0, hold, action, "correction")
            got = d.intervene(view)
            driven += int(got.phase[0] == CORRECTION)
        assert got is not None
        return driven, got.actions[0].tolist()

    assert said([0, 0, -1], 2)[0] == 0  # looks and thinks
    assert said([0.5, 0, -1], 1) == (40, [0.5, 0, -1])
    assert 11 <= said([0, 0, -1], 5)[0] <= 13  # and again
    driven, _ = said([0, 0, 1], 5)  # opens the gripper: it has its time
    assert 19 <= driven <= 21
    assert said([0, 0, 1], 1)[0] == 0 and d.holds[0] is not None


def test_a_silent_holder_stops_the_robot_and_loses_it_later():
    d, clock = make_state()
    d.drive("ann", 0, d.take("ann", 0), [1, 1], "correction")
    clock.now += DEADLINE / 2
    assert phases(d)[0] == CORRECTION
    clock.now += DEADLINE
    assert phases(d)[0] == PAUSE
    clock.now += GRACE
    assert phases(d)[0] == PAUSE and d.holds[0] is None and d.help_reason[0] == "its operator is gone"
    d.take("bob", 0)


def test_a_command_given_to_an_old_picture_holds_the_robot_still():
    clock = Clock()
    d = ConsoleState(1, 2, clock=clock, max_delay=1.0)
    d.begin(np.ones(1, bool), {})
    hold = d.take("ann", 0)
    for delay, phase in (
        (0.02, CORRECTION),
        (0.99, CORRECTION),
        (1.01, PAUSE),
        (7.8, PAUSE),
        (0.5, CORRECTION),
    ):
        d.drive("ann", 0, hold, [1, 1], "correction", delay)
        assert phases(d) == [phase]
    assert d.holds[0] is not None


def test_how_an_episode_ended_is_told_to_who_held_it():
    d, _ = make_state()
    d.take("ann", 1)
    d.end_episode(1, "it succeeded")
    assert d.last_outcome == ["", "it succeeded", ""] and d.holds[1] is None


def test_a_lost_connection_stops_the_robot_at_once():
    d, _ = make_state()
    d.drive("ann", 0, d.take("ann", 0), [1, 1], "correction")
    d.disconnect("ann")
    assert phases(d)[0] == PAUSE


def test_what_a_stale_tab_sends_is_refused():
    d, _ = make_state()
    old = d.take("ann", 0)
    new = d.take("ann", 0)  # the same operator in a new tab
    with pytest.raises(UserError, match="this tab's hold of robot 0 is over"):
        d.drive("ann", 0, old, [1, 1], "correction")
    d.drive("ann", 0, new, [1, 1], "correction")


def test_an_operator_who_never_answers_costs_patience_and_no_more():
    d, clock = make_state()
    d.request_help(2, "it stands still")
    assert phases(d) == [POLICY, POLICY, PAUSE] and d.unanswered() == []
    clock.now += 61
    assert d.unanswered() == [2]
    d.end_episode(2, "nobody came")
    assert phases(d) == [POLICY] * 3


def test_contradictory_marks_are_refused_with_the_one_that_stands():
    d, _ = make_state()
    episode = int(d.episode[0])
    d.label("ann", 0, episode, True)
    with pytest.raises(UserError, match="ann already marked this episode a success"):
        d.label("bob", 0, episode, False)
    d.end_episode(0, "ann marked it a success")
    with pytest.raises(UserError, match=r"that episode of robot 0 is over \(ann marked it a success\)"):
        d.label("bob", 0, episode, False)
    with pytest.raises(UserError, match="robot 1 is held by ann: they mark it"):
        d.take("ann", 1)
        d.label("bob", 1, int(d.episode[1]), True)


@pytest.mark.parametrize("action", [[1], [1, 2, 3], [float("nan"), 0], "left", None, [[0, 1]], {}])
def test_a_command_that_is_none_is_refused(action):
    d, _ = make_state()
    hold = d.take("ann", 0)
    with pytest.raises(UserError, match="a command is 2 finite numbers"):
        d.drive("ann", 0, hold, action, "correction")


def test_anybody_may_pause_and_a_paused_robot_waits():
    d, _ = make_state()
    d.drive("ann", 0, d.take("ann", 0), [1, 1], "correction")
    d.pause("bob", 0, True)
    d.pause("bob", 1, True)
    assert phases(d) == [PAUSE, PAUSE, POLICY]
    d.pause("ann", 1, False)
    assert phases(d)[1] == POLICY
    for robot in (-1, 3, True, "0", None):
        with pytest.raises(UserError, match="there is no robot"):
            d.pause("ann", robot, True)


@pytest.mark.parametrize("closed", [False, True])
def test_page_and_device_turn_one_gripper_and_taking_over_drops_nothing(closed):
    """A SpaceMouse beside the page: it comes to rest, and the page's own messages open nothing."""
    read, write = os.pipe()
    mouse = MappedDevice(HidSpaceMouse(read), DEFAULTS["spacemouse"])
    axes = (
        *(ActionAxis(n, "m", -0.02, 0.02, "delta", "base") for n in ("dx", "dy", "dz")),
        ActionAxis("gripper", "m", 0.0, 0.08, "absolute"),
    )
    robots = ConsoleRobots(
        ControlSpec("toy", "t", axes, 0.02, 100), 1, ConsoleOptions(run="", speed=1.0), 0, mouse
    )
    robots.steps = np.array([5])
    robots.executed = np.float32([[0, 0, 0, -1 if closed else 1]])
    robots.state.begin(np.ones(1, bool), {})
    page = PageConnection(None, "operator")
    told = execute_command(robots, page, {"t": "take", "robot": 0})
    assert told is not None and told["grip"] == (-1 if closed else 1)

    def step(*messages, page_grip):
        for data in messages:
            os.write(write, data)
        robots.state.drive("operator", 0, told["number"], [0, 0, 0, page_grip], "correction")
        robots.read_device()
        view = OperatorView(robots.executed, robots.executed, np.zeros(1, bool), robots.steps)
        said = robots.state.intervene(view)
        if said.phase[0] == CORRECTION:
            robots.executed = said.actions
        return robots.executed[0].tolist()

    grip = told["grip"]
    puck = bytes([1]) + struct.pack("<3h", 0, -350, 0)
    assert step(puck, page_grip=grip) == [0.5, 0, 0, grip]  # as it was
    assert step(bytes([3, 1, 0]), page_grip=grip) == [0.5, 0, 0, -grip]
    rest = bytes([1]) + struct.pack("<3h", 0, 0, 0)
    for _ in range(3):  # at rest, and the page says what it said
        assert step(rest, page_grip=grip)[3] == -grip
    assert robots.state.grip_of(0) == -grip  # which the page goes on from
    assert step(page_grip=-grip)[3] == -grip and step(page_grip=grip)[3] == grip  # G
    os.close(read)
    os.close(write)


# ------------------------------------------------------------ the journal


def frames(j, name, count, source=1, phase=3):
    for k in range(count):
        j.frame(
            name, 7, "pick", np.full(3, k, np.float32), np.full(2, k / 10, np.float32), 0.0, source, phase, {}
        )


def test_corrections_survive_any_kill_after_their_commit(tmp_path):
    j = journal.CorrectionJournal(tmp_path / "j")
    frames(j, "a", 3, source=0, phase=0)
    frames(j, "a", 4)
    j.commit()
    frames(j, "a", 5)  # never committed: the process is killed
    episodes = journal.unfinished(journal.scan(tmp_path / "j")[0], 0)
    assert len(episodes) == 1 and len(episodes[0]) == 7 and episodes[0].phase.tolist() == [0] * 3 + [3] * 4
    assert episodes[0].state[4, 0] == 1 and episodes[0].source[3:] == ["human"] * 4 and episodes[0].start == 7


@pytest.mark.parametrize("cut", [1, 5, 9, 60])
def test_a_torn_record_is_dropped_and_written_over(tmp_path, cut):
    j = journal.CorrectionJournal(tmp_path / "j")
    frames(j, "a", 3)
    j.commit()
    size = os.path.getsize(tmp_path / "j")
    os.truncate(tmp_path / "j", size - cut)
    assert len(journal.scan(tmp_path / "j")[0]) == 2
    j = journal.CorrectionJournal(tmp_path / "j")
    frames(j, "b", 2)
    j.close()
    assert [r["episode"] for r in journal.scan(tmp_path / "j")[0]] == ["a", "a", "b", "b"]


def test_an_episode_is_never_in_the_data_set_twice(tmp_path):
    j = journal.CorrectionJournal(tmp_path / "j")
    frames(j, "a", 3)
    j.close_episode("a", 5)  # killed before or after the data set had its episode number 5
    frames(j, "b", 2)
    j.close_episode("b", -1)  # taken back
    frames(j, "c", 2, source=0, phase=0)  # nobody helped
    j.commit()
    records = journal.scan(tmp_path / "j")[0]
    assert len(journal.unfinished(records, 5)) == 1 and journal.unfinished(records, 6) == []


def test_episodes_that_are_longer_than_the_journal_shall_be_are_not_written_anew_at_every_step(tmp_path):
    path, picture = tmp_path / "journal", np.zeros((512, 512, 3), np.uint8)
    recorder = CorrectionRecorder(tmp_path / "data", path, ControlSpec("", "", (), 0.1, 100), 1)
    episode, files = EpisodeBuffer(), {}
    for _ in range(3 * JOURNAL_SIZE // picture.nbytes):
        row = np.zeros(1, np.float32)
        episode.frames.append((row, row, 0.0, 1, CORRECTION, {"front": picture}))
        recorder.record_frames([episode])
        recorder.maintain([episode])
        file = path.open("rb")  # kept open: no other file gets its number
        files.setdefault(os.fstat(file.fileno()).st_ino, file)
    assert 2 <= len(files) <= 3 and len(journal.scan(path)[0]) == len(episode.frames)
    recorder.close()


def test_damage_inside_a_journal_is_said(tmp_path):
    j = journal.CorrectionJournal(tmp_path / "j")
    frames(j, "a", 3)
    j.commit()
    raw = bytearray((tmp_path / "j").read_bytes())
    raw[20] ^= 255
    (tmp_path / "j").write_bytes(raw)
    with pytest.raises(UserError, match="damaged at byte 0"):
        journal.scan(tmp_path / "j")


@pytest.mark.parametrize("torn", [0, 10])
def test_frames_that_the_disk_refuses_wait_for_the_next_commit(tmp_path, torn):
    j = journal.CorrectionJournal(tmp_path / "j")
    frames(j, "a", 2)
    j.commit()
    whole, size = j._fd, os.path.getsize(tmp_path / "j")
    frames(j, "a", 1)
    if torn:  # part of it is written, then the disk is full
        os.pwrite(whole, bytes(torn), size)
    j._fd = os.open(tmp_path / "j", os.O_RDONLY)
    with pytest.raises(OSError):
        j.commit()
    os.close(j._fd)
    j._fd = whole
    assert len(j) == 1
    j.close_episode("a", -1)
    j.commit()
    assert [r["kind"] for r in journal.scan(tmp_path / "j")[0]] == ["frame"] * 3 + ["close"]
    j.close()


# ------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory)


def test_people_take_over_teach_and_hand_back_and_a_kill_loses_nothing(run):
    async def teach(addresses):
        async with connect(addresses["ann"]) as a, connect(addresses["bob"]) as b:
            ann, bob = Page(a), Page(b)
            await ann.hear(lambda p: p.state and p.pictures > 4)
            await bob.hear(lambda p: p.state)
            hold = await ann.ask(t="take", robot=0)
            assert "held by ann" in (await bob.ask(t="take", robot=0))["text"]
            assert (await bob.ask(t="nonsense"))["t"] == "error" and (await bob.ask(nothing=1))[
                "t"
            ] == "error"
            assert (
                "finite numbers"
                in (await ann.ask(t="drive", robot=0, number=hold["number"], action=[1], phase="correction"))[
                    "text"
                ]
            )
            while not (ann.state["robots"][0]["phase"] == "correction" and ann.state["account"]["human"] > 0):
                await drive(ann, hold["number"])
                ann.state = None
                await ann.hear(lambda p: p.state)
            return ann.state["account"]["human_steps"]

    with console(run, "--speed", "0.5") as (command, addresses):
        counted = asyncio.run(teach(addresses))
        command.signal(signal.SIGKILL)  # in the middle of the correction
        command.process.join()
    with console(run) as (command, addresses):
        command.signal(signal.SIGINT)
        assert command.wait().code == 0
    data = load(run / "run" / "corrections")
    assert (
        len(data) >= 1
        and (data.phase == CORRECTION).sum() >= counted > 0
        and "human" in data.episode(0).source
    )
    done = robo_rl(
        run, "correct", "run", "--operator", "console", "--bc.updates", 5, "--eval-episodes", 4, "--json"
    )
    assert done.code == 0 and json.loads(done.out)[1]["human_share"] > 0, done.err


def test_a_lost_connection_holds_the_robot_and_a_second_tab_replaces_the_first(run):
    async def lose(addresses):
        async with connect(addresses["bob"]) as b:
            bob = Page(b)
            a = await connect(addresses["ann"])
            ann = Page(a)
            await ann.hear(lambda p: p.state)
            hold = await ann.ask(t="take", robot=0)
            await drive(ann, hold["number"], 30)
            a.transport.abort()  # the cable is out
            bob.state = None
            await bob.hear(lambda p: p.state and p.state["robots"][0]["phase"] == "pause")
            first = await connect(addresses["ann"])
            second = await connect(addresses["ann"])
            with contextlib.suppress(Exception):
                while True:
                    await asyncio.wait_for(first.recv(), 30)
            assert first.close_code == 4001
            ann = Page(second)
            await ann.hear(lambda p: p.state)
            assert (await ann.ask(t="take", robot=0))["t"] == "hold"
            assert (
                "hold of robot 0 is over"  # the number is of the tab that was replaced
                in (await ann.ask(t="drive", robot=0, number=hold["number"], action=[0] * 7, phase="pause"))[
                    "text"
                ]
            )

    with console(run, "--speed", "0.5") as (_, addresses):
        asyncio.run(lose(addresses))


def test_a_leader_arm_leads_what_the_first_operator_holds_once_it_is_there(run):
    session, _ = open_session(ConsoleOptions(run=str(run / "run"), robots=2, operators="ann,bob"))
    try:
        here = [np.array([0.3, 0.4, 0.5]), np.array([0.0, 1.0, 0, 0]), -1.0]
        session.device = LeaderArm(lambda: here, (0.02, 0.1))
        session.state.take("bob", 1)
        session.read_device()
        # the second operator's is nobody's to lead
        assert session.page_state("ann")["robots"][1]["task"] == "reach the green mark"
        session.state.take("ann", 0)
        session.read_device()
        assert re.fullmatch(
            r"bring the leader arm to the robot's tool: \d+ cm and \d+ degrees away",
            session.page_state("ann")["robots"][0]["task"],
        )
        assert session.state.holds[0].phase == PAUSE
        here[0], here[1] = tool_of(session.fleet.obs["state"][0], session.spec.state_names)
        session.read_device()
        here[0] = here[0] + [0.01, 0, 0]
        session.read_device()
        hold = session.state.holds[0]
        assert hold.phase == CORRECTION and np.allclose(hold.action, [0.5, 0, 0, 0, 0, 0, -1], atol=1e-5)
        assert (
            session.page_state("ann")["robots"][0]["task"] == "reach the green mark"
            and session.state.holds[1].phase == PAUSE
        )
        session.device.pose = lambda: None
        session.read_device()
        assert session.page_state("ann")["robots"][0]["task"] == "the leader arm is silent"
    finally:
        session.close()


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--operators", "ann,ann"], "must be different names"),
        (["--speed", "0"], "--speed must be in (0, 10]"),
        (["--url", "lab"], "--url must be a scheme and a name"),
        (["--robots", "0"], "--robots must be in [1, 64]"),
        (["--checkpoint", "x"], "has no checkpoint 'x'"),
    ],
)
def test_mistakes_of_the_console_are_one_line(run, argv, words):
    assert words in robo_rl(run, "console", "run", *argv).mistake


def test_without_websockets_the_remedy_is_named(run):
    assert "pip install 'robo_rl[console]'" in robo_rl(run, "console", "run", absent=["websockets"]).mistake


@pytest.mark.slow
def test_random_kills_of_the_console_lose_no_correction_that_was_counted(run):
    async def teach(addresses, wait):
        async with connect(addresses["ann"]) as ws:
            ann = Page(ws)
            await ann.hear(lambda p: p.state)
            hold = await ann.ask(t="take", robot=0)
            end = time.monotonic() + wait
            while time.monotonic() < end or not ann.state["account"]["human_steps"]:
                await drive(ann, hold["number"], 5)
                ann.state = None
                await ann.hear(lambda p: p.state)
                if not ann.state["robots"][0]["number"]:
                    hold = await ann.ask(t="take", robot=0)
            return ann.state["account"]["human_steps"]

    def frames():
        path = run / "run" / "corrections"
        return int((load(path).phase > PAUSE).sum()) if (path / "meta" / "info.json").exists() else 0

    rng, wanted = np.random.default_rng(0), frames()
    for _ in range(KILLS):
        with console(run) as (command, addresses):
            told = asyncio.run(teach(addresses, rng.uniform(0, 2)))
            command.signal(signal.SIGKILL)
            command.process.join()
        written = [
            r
            for r in journal.scan(run / "run" / "console.journal")[0]
            if r["kind"] == journal.FRAME and r["source"]
        ]
        assert len(written) >= told  # what was counted is on the disk, blends with it
        wanted += sum(r["phase"] > PAUSE for r in written)
    with console(run) as (command, _):
        command.signal(signal.SIGINT)
        assert command.wait().code == 0
    assert frames() >= wanted
