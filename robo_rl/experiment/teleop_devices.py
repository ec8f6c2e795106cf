"""What a person at `robo_rl robot teleop` drives with: a device of this machine, a leader arm, or the
console's page in a browser.

Dead man: a device moves the arm while its button is held (or an axis is off its rest); a leader arm while it
is heard of, at most `leader_arm.SILENCE` s ago, and was brought to the tool since; a page while it holds the
robot and its commands come, at most `state.DEADLINE` s ago, given to pictures that are not too old. Else the
target becomes where the tool is, and the arm holds.
"""

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from robo_rl.experiment.console import LOOPBACK, leader_on, need_websockets, open_page, tell_addresses
from robo_rl.experiment.operators import check_person, open_person
from robo_rl.human.console.options import ConsoleOptions
from robo_rl.human.console.robots import ConsoleRobots
from robo_rl.human.console.terminal import enter_pressed
from robo_rl.human.fleet import OperatorStats
from robo_rl.human.intervention import PAUSE, OperatorView
from robo_rl.human.leader_arm import LeaderArm
from robo_rl.human.pace import Pace
from robo_rl.human.reading import Device, Reading, drive_of

MARKS = {True: "success", False: "failure", None: "discard"}
TELL = 2.0  # s between two hints
ASKED = 0.5  # s between two looks at the terminal
BLANK = 96  # pixels of the picture of an arm without cameras


class LedArm:
    """A leader arm as the Device of one arm; keys: a device whose marks count (a terminal's keyboard), None:
    none."""

    gone = False

    def __init__(
        self,
        leader: LeaderArm,
        keys: Device | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.leader, self.keys, self.say, self.clock = leader, keys, say, clock
        self.grip, self.told, self.leads = 1.0, -TELL, False
        self.bridge: Any = None  # until `begin`

    def begin(self, bridge) -> None:
        """The arm that it is to lead."""
        self.bridge = bridge

    def read(self) -> Reading:
        leader = self.leader
        if not leader.aligned and self.bridge is not None:
            leader.align(np.array(self.bridge.model.pos), np.array(self.bridge.model.quat))
        reading, now = leader.read(), self.clock()
        self.grip = reading.grip if reading.engaged else self.grip
        if reading.engaged != self.leads:
            self.leads, self.told = reading.engaged, now
            self.say("the leader arm leads" if self.leads else f"the arm holds: {leader.hint()}")
        elif not self.leads and now - self.told >= TELL:
            self.told = now
            self.say(leader.hint())
        return Reading(
            reading.twist, self.grip, reading.engaged, () if self.keys is None else self.keys.read().marks
        )

    def close(self) -> None:
        self.leader.close()
        if self.keys is not None:
            self.keys.close()


class TeleopConsole(ConsoleRobots):
    """The console's page as the Device of one arm: who takes it and drives is the person. The thread that
    calls `read` owns it.

    pace: of an arm that waits for nobody, a simulated one in lockstep."""

    gone = False

    def __init__(
        self, spec, options: ConsoleOptions, task: str, say: Callable[[str], None], pace: Pace | None = None
    ):
        super().__init__(spec, 1, options, 0, None, alone=PAUSE)
        self.operator_stats = OperatorStats(spec.period, robots=1, operators=1)
        self.stats, self.tasks, self.say, self.real_time = self.operator_stats.summary(), [task], say, pace
        self.obs, self.phase, self.steps = {}, np.full(1, PAUSE, np.uint8), np.zeros(1, np.int64)
        self.executed = np.zeros((1, len(spec.axes)), np.float32)
        self.at_grip = next((j for j, axis in enumerate(spec.axes) if drive_of(axis) == "grip"), -1)
        self.server, self.asked, self.hold = None, -ASKED, 0
        self.state.begin(np.ones(1, bool), {})
        self.bridge: Any = None  # until `begin`

    def open(self) -> None:
        """Serve the page. UserError: it cannot listen there."""
        need_websockets()
        pictures = SimpleNamespace(views=self.spec.views, axes=self.spec.axes)
        self.watch(SimpleNamespace(spec=pictures, env=SimpleNamespace(render=no_camera)))
        self.server = open_page(self, self.options, self.say)
        self.say("The address works once; press Enter here for a new one, which ends the page that is open")

    def begin(self, bridge) -> None:
        """The arm that is driven, which the pictures are of."""
        self.bridge = bridge

    @property
    def grip(self) -> float:
        """How the gripper was commanded last, from -1 (closed) to 1."""
        return float(self.executed[0, self.at_grip]) if self.at_grip >= 0 else 1.0

    @grip.setter
    def grip(self, value: float) -> None:
        if self.at_grip >= 0:
            self.executed[0, self.at_grip] = value

    def read(self) -> Reading:
        if self.real_time is not None:
            self.real_time.wait()
        with self.lock:
            said = self.state.intervene(
                OperatorView(self.executed, self.executed, np.zeros(1, bool), self.steps)
            )
            held = self.state.holds[0]
            engaged = bool(said.phase[0] > PAUSE)
            if engaged:
                self.executed = said.actions
            mark, self.state.labels[0] = self.state.labels[0], None
            if mark is not None:
                self.results[0] += 0 if mark.success is None else (int(mark.success), int(not mark.success))
                self.state.end_episode(
                    0,
                    f"{mark.operator} "
                    f"{'discarded it' if mark.success is None else f'marked it a {mark.word}'}",
                )
                self.steps[:] = 0
            self.count(engaged, 0 if held is None else held.number)
            self.phase = said.phase
            if self.bridge is not None:
                self.obs = {name: x[None] for name, x in self.bridge.observation_buffer.pictures().items()}
        if self.cameras is not None and (self.obs or not self.spec.views):
            self.draw_in_time()
        self.renew()
        twist = np.array([x for j, x in enumerate(self.executed[0]) if j != self.at_grip], np.float32)
        return Reading(
            twist if engaged else np.zeros(6, np.float32),
            self.grip,
            engaged,
            () if mark is None else (MARKS[mark.success],),
        )

    def count(self, engaged: bool, hold: int) -> None:
        """One more control period, in which the arm moved as the person of this hold (0: none) commands or
        stood still."""
        a = self.operator_stats
        self.steps += 1
        a.steps += 1
        a.human_steps += engaged
        a.attended_steps += hold > 0
        a.interventions += hold not in (0, self.hold)
        self.hold, self.stats = hold, a.summary()

    def renew(self) -> None:
        """A new address where the person at the terminal asks for one."""
        now = time.monotonic()
        if self.server is not None and now - self.asked >= ASKED:
            self.asked = now
            if enter_pressed():
                self.server.renew()
                tell_addresses(self.server, self.say)

    def close(self) -> None:
        if self.server is not None:
            self.server.stop()


def no_camera() -> np.ndarray:
    """uint8 [1,h,w,3]: what a page shows of an arm that nobody films."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (BLANK, BLANK), (40, 44, 52))
    ImageDraw.Draw(picture).multiline_text(
        (BLANK / 2, BLANK / 2), "no camera\n--views", (200, 205, 215), anchor="mm", align="center"
    )
    return np.asarray(picture)[None]


def open_teleop_device(options, spec, task, say: Callable[[str], None]) -> Any:
    """What the person of these `TeleopOptions` drives with. task: what the bridge is commanded by, whose
    first six numbers are moves of the tool. UserError: it cannot be opened."""
    kind = check_person("--operator", options.operator)
    if kind == "leader":
        from robo_rl.experiment.wire import connect
        from robo_rl.human.device_mapping import DEFAULTS
        from robo_rl.human.devices import MappedDevice, TerminalKeys

        keys = MappedDevice(TerminalKeys(), DEFAULTS["keyboard"]) if sys.stdin.isatty() else None
        wire = connect(
            "robo_rl_leader",
            options.domain,
            options.interface,
            options.operator.partition(":")[2],
            security=options.security,
        )
        return LedArm(leader_on(wire, (float(task.scale[0]), float(task.scale[3]))), keys, say)
    if kind != "console":
        return open_person(options.operator, spec)
    if options.host not in LOOPBACK and not options.views:
        say("robo_rl: the person sees no picture of the arm: --views NAME")
    pace = Pace(spec.period) if options.transport == "inprocess" else None
    made = TeleopConsole(
        spec,
        ConsoleOptions(run="", robots=1, speed=1.0, port=options.port, host=options.host),
        options.task,
        say,
        pace,
    )
    try:
        made.open()
    except BaseException:
        made.close()
        raise
    return made
