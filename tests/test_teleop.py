"""A person drives a governed arm: in lockstep in this process, and over DDS."""

import asyncio
import json
import signal
import time
from concurrent.futures import wait
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest
from commands import Command, dds_domain, robo_rl
from consoles import Page
from consoles import connect as connect_page
from consoles import drive as drive_page
from servo_bus import Pty, Servo, ServoLine
from streams import NORTH, SOUTH, START, TR, WEST, Feed, key, padded, press, stick
from ur_like import JOINTS, xml

import controllers
from controllers.model import arm_model
from controllers.robot import load_robot
from controllers.transport import PoseStamped
from robo_rl.data.labels import need_units
from robo_rl.data.reader import load
from robo_rl.errors import UserError
from robo_rl.experiment.teleop import TeleopOptions, TeleopRecorder, cut_square, interface, teleop
from robo_rl.experiment.teleop_devices import LedArm, TeleopConsole
from robo_rl.experiment.wire import connect
from robo_rl.human.console.options import ConsoleOptions
from robo_rl.human.leader_arm import LeaderArm
from robo_rl.human.reading import Reading

GO = [b"", b"", key(TR) + stick(1, -1), *[b""] * 24]
STAND = [key(TR, 0) + stick(1, 0), *[b""] * 12]


def own_arm(folder):
    """The file of an arm with a UR5e's joints, by those fields alone that a file must have, and a cell that
    may be armed."""
    (folder / "arm.xml").write_text(xml())
    raw = {
        "model": "arm.xml",
        "joints": JOINTS,
        "site": "tool0",
        "base_frame": "base",
        "gravity": True,
        "lower": [-6.2] * 6,
        "upper": [6.2] * 6,
        "velocity": [3.1] * 6,
        "torque": [150, 150, 150, 28, 28, 28],
        "torque_rate": 500,
        "home": [0.3, -1.2, 1.8, -0.6, 1.2, 0.2],
        "cell": {"without": dict.fromkeys(("box", "speed", "force"), "a simulated arm")},
    }
    (folder / "own.json").write_text(json.dumps(raw))
    return str(folder / "own.json")


def drive(tmp_path, steps, file="sim", **more):
    feed = Feed(tmp_path / "pad", steps)
    lines = []
    try:
        return teleop(
            TeleopOptions(
                file=file,
                operator=f"gamepad:{feed.path}",
                transport="inprocess",
                out=str(tmp_path / "data"),
                seconds=5,
                **more,
            ),
            lines.append,
            lines.append,
        )
    finally:
        feed.close()


def column(data, name):
    return data.state[:, data.features.state.index(name)]


def test_full_deflection_is_the_speed_limit_and_what_was_driven_is_recorded(tmp_path):
    got = drive(tmp_path, [*GO, *STAND, press(NORTH), press(START)], speed=0.2, task="go on")
    assert (got.kept, got.tried, got.held) == (1, 1, False)
    data = load(tmp_path / "data")
    x = column(data, "ee_x")
    assert (
        len(x) == 25
        and data.success.all()
        and set(data.episode(0).source) == {"human"}
        and data.tasks == ["go on"]
    )
    assert 0.5 < (x[-1] - x[-6]) / (5 * 0.02) / 0.2 <= 1.05  # near the end the tool has that speed
    assert np.allclose(data.action[:, 0] * 0.02, 0.2 * 0.02, rtol=1e-3) and not data.action[:, 1:6].any()


def test_a_tool_that_was_let_go_of_stands_within_a_stopping_distance(tmp_path):
    # two frames later tell where the tool stands
    again = [key(TR), b"", key(TR, 0), press(NORTH), press(START)]
    drive(tmp_path, [*GO, *STAND, *again], speed=0.2)
    x = column(load(tmp_path / "data"), "ee_x")
    assert 0 <= x[25] - x[24] < 0.03


def test_failures_are_recorded_if_asked_and_the_gripper_closes(tmp_path):
    got = drive(tmp_path, [b"", key(TR), press(SOUTH), b"", b"", press(WEST), press(START)], keep="all")
    assert (got.kept, got.tried) == (1, 1)
    data = load(tmp_path / "data")
    assert not data.success.any() and data.action[:, 6].tolist()[:3] == [1, -1, -1]


def test_an_arm_of_its_own_joints_without_a_gripper_is_recorded_as_it_is(tmp_path):
    """Its own joints and moves of the tool in m and rad: what `train --sim none` learns from and `deploy`
    commands."""
    got = drive(
        tmp_path, [*GO, *STAND, press(NORTH), press(START)], speed=0.2, file=own_arm(tmp_path), gripper=False
    )
    assert (got.kept, got.held) == (1, False)
    data = load(tmp_path / "data")
    assert data.features.state == (*JOINTS, "x", "y", "z") and data.features.action == (
        "dx",
        "dy",
        "dz",
        "rx",
        "ry",
        "rz",
    )
    units = need_units(data.meta)
    assert units.unit == ("m",) * 3 + ("rad",) * 3 and set(units.kind) == {"delta"}
    x = column(data, "x")
    assert 0.5 < (x[-1] - x[-6]) / (5 * 0.02) / 0.2 <= 1.05
    assert np.allclose(data.action[:, 0], 0.2 * 0.02, rtol=1e-3) and not data.action[:, 1:].any()


def test_a_picture_is_cut_to_its_middle():
    image = np.zeros((20, 40, 3), np.uint8)
    image[:, 10:30] = 200
    assert cut_square(image, 10).shape == (10, 10, 3) and (cut_square(image, 10) == 200).all()


class SlowWriter:
    """A data set that is written once `go` says so; `wrong`: with this mistake."""

    episodes = 0

    def __len__(self):
        return 0

    def __init__(self, wrong=None):
        self.go, self.wrong, self.written = Event(), wrong, []

    def add(self, episode):
        self.written.append(len(episode))

    def flush(self):
        assert self.go.wait(60), "the control loop waits for the disk"
        if self.wrong:
            raise self.wrong

    def close(self):
        pass


def recorder_of(folder, writer, lines, **more):
    """A recorder with two steps that somebody drove, and a mark of success."""
    options = TeleopOptions(file="sim", out=str(folder), **more)
    _, spec, share = interface(options, load_robot("sim"))
    client = SimpleNamespace(device=SimpleNamespace(), marks=["success"], engaged=True)
    recorder = TeleopRecorder(options, client, spec, share, lines.append)
    recorder.recording.writer.close()
    recorder.recording.writer = writer
    state = np.zeros(len(spec.state_names))
    recorder.bridge = SimpleNamespace(
        observation=lambda: state, observation_buffer=SimpleNamespace(pictures=dict)
    )
    for _ in range(2):
        recorder.act(state, {}, np.zeros(7))
    return recorder


def test_the_arm_is_commanded_on_while_an_episode_is_written(tmp_path):
    lines, writer = [], SlowWriter()
    recorder = recorder_of(tmp_path / "data", writer, lines, episodes=1)
    assert recorder.after_tick(0.0) and not lines  # the last one ends the session
    writer.go.set()
    recorder.close()
    assert writer.written == [2] and lines == ["episode 1: success, 2 steps"]


def test_an_episode_that_cannot_be_written_ends_the_session_and_is_in_the_data_set_of_the_next(tmp_path):
    lines, writer = [], SlowWriter(UserError("no space left"))
    recorder = recorder_of(tmp_path / "data", writer, lines)
    assert not recorder.after_tick(0.0)
    recorder.act(np.zeros(len(recorder.bridge.observation())), {}, np.zeros(7))  # driven on, and not marked
    writer.go.set()
    wait([future for future, _ in recorder.saving])
    with pytest.raises(UserError, match="no space left"):
        recorder.after_tick(0.02)
    with pytest.raises(UserError, match="no space left; what was recorded is in .*recording.journal"):
        recorder.close()
    assert not lines
    recorder_of(tmp_path / "data", SlowWriter(), lines)
    data = load(tmp_path / "data")
    assert lines == [f"{tmp_path / 'data'}: added 1 episode (2 frames) that an earlier recording left"]
    assert data.success.tolist() == [True] and data.reward.tolist() == [0, 1]
    assert set(data.episode(0).source) == {"human"} and np.isfinite(data.final).all()


def test_a_full_disk_ends_the_session_before_the_mark(tmp_path):
    recorder = recorder_of(tmp_path / "data", SlowWriter(), [])
    recorder.recording.failed = "the disk is too slow"
    with pytest.raises(
        UserError, match="the disk is too slow: the episode that was going on is not recorded"
    ):
        recorder.after_tick(0.0)


def test_a_device_that_is_lost_brakes_the_arm_and_ends_in_one_line(tmp_path):
    (tmp_path / "pad").write_bytes(padded(GO))  # and then the file ends
    with pytest.raises(UserError, match="the device is gone; the arm was braked and holds"):
        teleop(
            TeleopOptions(file="sim", operator=f"gamepad:{tmp_path / 'pad'}", transport="inprocess"),
            print,
            print,
        )


@pytest.mark.parametrize(
    "more, words",
    [
        ({"operator": "leader"}, "names the arm that is driven"),
        ({"operator": "mouse"}, "Allowed"),
        ({"port": 70000}, "--port"),
        ({"speed": 0}, "--speed must be in"),
        ({"transport": "tcp"}, "inprocess"),
    ],
)
def test_what_cannot_be_is_one_line(more, words):
    with pytest.raises(UserError, match=words):
        TeleopOptions(file="sim", **more)


# ---- a leader arm ------------------------------------------------------------------------------------------


class Marks:
    """A keyboard of which the marks count."""

    gone = False

    def __init__(self):
        self.marks = ()

    def read(self):
        marks, self.marks = self.marks, ()
        return Reading(np.zeros(6), 1.0, False, marks)

    def close(self):
        self.gone = True


def test_a_leader_leads_once_it_is_at_the_tool_and_a_silent_one_only_when_brought_there_again():
    quat = np.array([0.0, 1.0, 0.0, 0.0])
    at, lines, now, keys = [np.array([0.5, 0.1, 0.3]), quat, -1.0], [], [0.0], Marks()
    led = LedArm(LeaderArm(lambda: tuple(at) or None, (0.002, 0.01)), keys, lines.append, lambda: now[0])
    led.begin(SimpleNamespace(model=SimpleNamespace(pos=[0.5, 0.0, 0.3], quat=quat.tolist())))
    led.grip = 1.0  # as the arm's gripper is
    got = led.read()
    assert (
        not got.engaged
        and got.grip == 1.0
        and lines == ["bring the leader arm to the robot's tool: 10 cm and 0 degrees away"]
    )
    now[0] = 1.0
    led.read()
    assert len(lines) == 1  # it is not told at every tick
    at[0] = np.array([0.5, 0.01, 0.3])
    assert led.read().engaged and led.grip == -1.0 and lines[-1] == "the leader arm leads"
    at[0] = np.array([0.502, 0.01, 0.3])
    got = led.read()
    assert got.engaged and np.allclose(got.twist, [1, 0, 0, 0, 0, 0])
    there, at[:] = list(at), []
    keys.marks = ("success",)
    got = led.read()
    assert not got.engaged and not got.twist.any() and got.grip == -1.0 and got.marks == ("success",)
    assert lines[-1] == "the arm holds: the leader arm is silent"
    at[:] = there
    at[0] = np.array([0.6, 0.01, 0.3])
    assert not led.read().engaged  # it came back elsewhere
    led.close()
    assert keys.gone


@pytest.mark.slow
def test_a_leader_of_serial_servos_leads_an_arm_of_joint_targets_and_when_its_bus_goes_silent_the_arm_holds(
    tmp_path,
):
    """An SO-101 on a pty beside a simulated one: `robot drive` tells where the leader's tool is, `robot
    teleop` follows it."""
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    so = load_robot("so101")

    def place(joint, angle):
        line.servos[joint].memory[56:58] = (round(angle / (2 * np.pi) * 4096) + 2048).to_bytes(2, "little")

    line = ServoLine([Servo(k) for k in range(1, 7)])
    for joint, angle in enumerate(so.home, 1):
        place(joint, angle)
    pty, domain = Pty(line), dds_domain()
    raw = json.loads((Path(controllers.__file__).parent / "presets" / "so101.json").read_text())
    raw |= {
        "model": so.model,
        "cell": {
            "command": "forward_position",
            "without": dict.fromkeys(("box", "speed", "force"), "a simulated arm"),
        },
    }
    raw["driver"]["port"] = pty.path
    (tmp_path / "so.json").write_text(json.dumps(raw))

    def said(command):
        return command.out.read_text() if command.out.exists() else ""

    arm = Command(
        tmp_path,
        [
            "sim-arm",
            "--robot",
            "so.json",
            "--controller",
            "joint",
            "--scene",
            "none",
            "--domain",
            domain,
            "--seconds",
            "120",
        ],
    )
    leader = Command(
        tmp_path,
        ["robot", "drive", "so.json", "--namespace", "leader", "--domain", domain, "--seconds", "120"],
    )
    arm.until(lambda: "on the wire" in said(arm))
    leader.until(lambda: "on the network" in said(leader))
    reader = connect("test", domain)
    pose = reader.subscription("current_pose", PoseStamped)
    driven = Command(
        tmp_path,
        [
            "robot",
            "teleop",
            "so.json",
            "--operator",
            "leader:leader",
            "--speed",
            "0.1",
            "--seconds",
            "60",
            "--domain",
            domain,
            "--no-gripper",
        ],
        env={"PYTHONUNBUFFERED": "1"},
    )
    driven.until(lambda: "the leader arm leads" in said(driven))
    before = pose.latest().message.pos
    for k in range(40):
        place(1, so.home[0] + 0.25 * (k + 1) / 40)
        time.sleep(0.05)
    goal = arm_model(so)
    goal.place(np.array([so.home[0] + 0.25, *so.home[1:]]))
    driven.until(lambda: np.linalg.norm(np.subtract(pose.latest().message.pos, goal.pos)) < 0.005)
    assert np.linalg.norm(np.subtract(before, goal.pos)) > 0.03
    line.silent = {1}
    driven.until(lambda: "the arm holds: the leader arm is silent" in said(driven))
    place(1, so.home[0] - 0.5)
    line.silent = set()
    driven.until(lambda: "cm and" in said(driven))  # it is heard again, far away
    assert np.linalg.norm(np.subtract(pose.latest().message.pos, goal.pos)) < 0.01
    for command in (driven, arm, leader):
        command.signal(signal.SIGINT)
    assert driven.wait().code == 0 and arm.wait().code == 0 and leader.wait().code == 0
    reader.close()
    pty.unplug()


# ---- the browser's page ------------------------------------------------------------------------------------


def test_a_page_drives_while_it_holds_and_sends_and_marks_end_the_hold():
    _, spec, _ = interface(TeleopOptions(file="sim"), load_robot("sim"))
    now, said = [0.0], []
    page = TeleopConsole(spec, ConsoleOptions(run="", robots=1, speed=1.0), "go on", said.append)
    page.state.clock, page.grip = lambda: now[0], -1.0
    assert page.gripper_command(0) == 1 and not page.read().engaged
    assert page.gripper_command(0) == -1  # as it was, for who takes over
    number = page.state.take("operator", 0)
    page.state.drive("operator", 0, number, [0.5, 0, 0, 0, 0, 0, -1], "correction")
    got = page.read()
    assert got.engaged and got.twist.tolist() == [0.5, 0, 0, 0, 0, 0] and got.grip == -1.0
    now[0] += 0.1  # the page says no more
    got = page.read()
    assert not got.engaged and not got.twist.any() and got.grip == -1.0
    page.state.drive("operator", 0, number, [0.5, 0, 0, 0, 0, 0, -1], "correction")
    assert page.read().engaged
    page.disconnect("operator")
    assert not page.read().engaged
    page.state.drive("operator", 0, number, [0.5, 0, 0, 0, 0, 0, 1], "correction")
    page.state.label("operator", 0, int(page.state.episode[0]), True)
    assert page.read().marks == ("success",) and page.state.holds[0] is None
    assert (
        not page.read().engaged
        and page.results.tolist() == [[1, 0]]
        and page.page_state("operator")["account"]["interventions"] == 1
    )


@pytest.mark.slow
def test_what_a_page_drove_is_recorded_and_when_it_goes_away_the_arm_holds(tmp_path):
    pytest.importorskip("websockets", reason="needs robo_rl[console]")
    lines = Queue()
    got = []
    options = TeleopOptions(
        file="sim",
        operator="console",
        port=0,
        transport="inprocess",
        speed=0.2,
        seconds=60,
        task="go on",
        out=str(tmp_path / "data"),
        episodes=2,
    )
    thread = Thread(target=lambda: got.append(teleop(options, lines.put, lines.put)))
    thread.start()
    address = lines.get(timeout=60).split()[1]

    async def first(ws):
        page = Page(ws)
        await page.hear(lambda p: p.state is not None and p.pictures)
        number = (await page.ask(t="take", robot=0))["number"]
        await drive_page(page, number, 30, [0, 0, 0.5, 0, 0, 0, 1])
        await page.ask(t="mark", robot=0, episode=page.state["robots"][0]["episode"], success=True)
        await page.hear(lambda p: p.state["account"]["kept"] == 1)  # a mark ends the hold
        number = (await page.ask(t="take", robot=0))["number"]
        await drive_page(page, number, 20, [0, 0, 0.5, 0, 0, 0, 1])

    async def again(ws):
        page = Page(ws)
        await page.hear(lambda p: p.state is not None and p.state["robots"][0]["phase"] == "pause")
        assert page.state["account"]["kept"] == 1
        number = (await page.ask(t="take", robot=0))["number"]
        await page.hear(lambda p: p.state["robots"][0]["number"] == number)
        await drive_page(page, number, 5, [0, 0, -0.5, 0, 0, 0, 1])
        await page.ask(t="mark", robot=0, episode=page.state["robots"][0]["episode"], success=True)

    async def session():
        async with connect_page(address) as ws:
            await first(ws)
        async with connect_page(address) as ws:  # the page went away while it drove
            await again(ws)

    asyncio.run(session())
    thread.join(60)
    assert got and (got[0].kept, got[0].held) == (2, False)
    data = load(tmp_path / "data")
    z = [data.episode(i).state[:, data.features.state.index("ee_z")] for i in range(2)]
    assert z[0][-1] - z[0][0] > 0.02 and data.success.all()
    assert np.abs(np.diff(z[1])).max() < 0.01  # it stood until the next page took it


@pytest.mark.slow
def test_an_arm_on_the_wire_is_driven_with_the_lease_and_the_governor_in_between(tmp_path):
    pytest.importorskip("cyclonedds", reason="needs robo_rl[robot]")
    pytest.importorskip("rosbags", reason="needs robo_rl[robot]")
    domain = dds_domain()
    arm = Command(tmp_path, ["sim-arm", "--domain", domain, "--seconds", "120", "--speed", "0.5"])
    arm.until(lambda: arm.out.exists() and "on the wire" in arm.out.read_text())
    feed = Feed(tmp_path / "pad", [*GO, *STAND, press(NORTH), press(START)])
    done = robo_rl(
        tmp_path,
        "robot",
        "teleop",
        "sim",
        "--operator",
        f"gamepad:{feed.path}",
        "--domain",
        domain,
        "--speed",
        "0.2",
        "--out",
        "data",
        "--seconds",
        "20",
        "--lease",
        "30",
    )
    feed.close()
    feed = Feed(tmp_path / "second", [*GO, press(NORTH), press(START)])
    other = robo_rl(
        tmp_path,
        "collect",
        "--sim",
        f"dds:domain={domain}",
        "--operator",
        f"gamepad:{feed.path}",
        "--out",
        "env",
        "--episodes",
        1,
    )
    feed.close()
    arm.signal(signal.SIGINT)
    assert arm.wait().code == 0
    assert other.code == 0 and len(load(tmp_path / "env")) == 1, other  # and as an env
    assert done.code == 0 and "episode 1: success" in done.out, done
    data = load(tmp_path / "data")
    x = column(data, "ee_x")
    assert data.success.all() and len(x) > 5 and x[-1] - x[0] > 0.01
