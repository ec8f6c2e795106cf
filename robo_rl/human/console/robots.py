"""The robots as the console's pages see and command them: state, pictures, who is connected.

The thread that steps the env owns it. The page's thread reads `frame` and, under `lock`, calls `connect`,
`disconnect`, `page_state`, `request_rewind`, `gripper_command` and the commands of `state`, and sets
`watched`.
"""

import math
import threading
import time

import numpy as np

from robo_rl.data.episode import PHASES
from robo_rl.errors import UserError
from robo_rl.human.console.cameras import ConsoleCameras, Frame, words_of
from robo_rl.human.console.options import ConsoleOptions
from robo_rl.human.console.state import REST, ConsoleState
from robo_rl.human.intervention import CORRECTION, PAUSE, POLICY
from robo_rl.human.leader_arm import LeaderArm, tool_of
from robo_rl.human.reading import TARGET_RATE, Reading, command, drive_of, stands


class ConsoleRobots:
    """N robots of `spec` with the operators of `options`. limit: control steps of the task's own episodes, 0:
    it has none;
    device: what the first operator holds in their hand at this machine; alone: what a robot does that nobody
    holds, see `ConsoleState`.

    Subclasses keep `obs` (the newest observation), `phase` uint8[N], `executed` float32[N,A], `steps` int[N],
    `tasks` and `stats` (`OperatorStats.summary`).
    """

    obs: dict
    phase: np.ndarray
    executed: np.ndarray
    steps: np.ndarray
    tasks: list[str]
    stats: dict[str, float]

    def __init__(
        self, spec, num_robots: int, options: ConsoleOptions, limit: int, device=None, alone: int = POLICY
    ):
        self.options, self.limit, self.spec, self.device, self.n = options, limit, spec, device, num_robots
        self.pace = self.spec.period / options.speed
        delay = max(options.max_delay, 3 * self.pace, 3 / options.fps)
        self.drives = [drive_of(axis) for axis in spec.axes]
        self.state = ConsoleState(
            num_robots,
            len(spec.axes),
            options.patience,
            max_delay=delay,
            alone=alone,
            moving=np.array([d == "target" for d in self.drives]),
            rate=TARGET_RATE * spec.period,
            grips=np.array([d == "grip" for d in self.drives]),
            rest=REST / options.speed if all(map(stands, spec.axes)) else math.inf,
        )
        self.lock = threading.Lock()
        self.aligned_hold = 0  # number of the hold that a leader arm is aligned with
        self.cameras: ConsoleCameras | None = None  # until `watch`
        self.watched: dict[str, int] = {}  # operator -> the robot that their page shows large
        self.connected: set[str] = set()
        self.frame = Frame(0, time.monotonic())
        self.results = np.zeros((num_robots, 2), int)  # successes, failures
        self.drawn, self.draw_time, self.rate, self.picture_error = 0.0, 0.0, 0.0, ""
        self.kept = self.unsaved = 0
        self.is_stopped = False  # the person asked for the end

    # ------------------------------------------------------------ what a page asks for, under the lock

    def connect(self, who: str) -> None:
        """An operator's page opens."""
        with self.lock:
            self.connected.add(who)
            self.watched.setdefault(who, 0)

    def disconnect(self, who: str) -> None:
        """An operator's page closes: the robot that they hold stops."""
        with self.lock:
            self.connected.discard(who)
            self.watched.pop(who, None)
            self.state.disconnect(who)

    def request_rewind(self, i: int, seconds: float) -> None:
        """Rewind robot i before the next step. UserError: it cannot."""
        raise UserError("here robots cannot go back")

    def gripper_command(self, i: int) -> int:
        """1 or -1: how robot i's gripper was commanded last, so that taking over drops nothing."""
        at = [j for j, drive in enumerate(self.drives) if drive == "grip"]
        return -1 if at and self.steps[i] > 0 and self.executed[i, at[0]] < 0 else 1

    def page_state(self, who: str) -> dict:
        """What the page of operator `who` shows, as JSON."""
        state, stats, total = self.state, self.stats, self.results.sum(0)
        return {
            "t": "state",
            "robots": [self._robot_state(i, who) for i in range(self.n)],
            "you": who,
            "limit": round(self.limit * self.spec.period, 2),
            "axes": [
                {"name": a.name, "kind": a.kind, "unit": a.unit, "words": words_of(a), "drive": drive}
                for a, drive in zip(self.spec.axes, self.drives, strict=True)
            ],
            "views": self.cameras.views if self.cameras else [],
            "max_delay": state.max_delay,
            "trouble": self.trouble(),
            "people": sorted(self.connected),
            "rate": round(self.rate, 1),
            "pace": self.options.speed,
            "account": {
                "operator_minutes": round(stats["operator_minutes"], 2),
                "interventions": stats["interventions"],
                "per_hour": round(stats["interventions_per_hour"]),
                "human": round(100 * stats["human_share"], 1),
                "human_steps": stats["human_steps"],
                "first_ms": [round(1000 * x, 1) for x in state.latencies[-20:]],
                "reaction": round(sum(state.reactions) / len(state.reactions), 1) if state.reactions else 0,
                "successes": int(total[0]),
                "episodes": int(total.sum()),
                "kept": self.kept,
                "unsaved": self.unsaved,
            },
        }

    def trouble(self) -> str:
        """What is wrong, for the page."""
        return self.picture_error

    def _robot_state(self, i: int, who: str) -> dict:
        state, hold, steps = self.state, self.state.holds[i], int(self.steps[i])
        mine = hold is not None and hold.operator == who
        return {
            "phase": PHASES[int(self.phase[i])],
            "holder": hold.operator if hold else "",
            "number": hold.number if hold and mine else 0,
            "grip": self.state.grip_of(i),
            "late": bool(hold) and mine and hold.delay > state.max_delay,
            "why": state.help_reason[i],
            "paused": state.paused[i],
            "waiting": round(state.clock() - state.waiting_since[i], 1) if state.help_reason[i] else 0.0,
            "episode": int(state.episode[i]),
            "last": state.last_outcome[i],
            "time": round(steps * self.spec.period, 2),
            "task": self.alignment_hint(i) or self.tasks[i],
            "successes": int(self.results[i, 0]),
            "failures": int(self.results[i, 1]),
        }

    # ------------------------------------------------------------ parts of a step

    def read_device(self) -> None:
        """The device at this machine commands the robot that the first operator holds; unplugged, it stops
        that robot. Under the lock."""
        if self.device is None:
            return
        first = self.options.operators.split(",")[0]
        i, hold = next(
            ((i, h) for i, h in enumerate(self.state.holds) if h is not None and h.operator == first),
            (0, None),
        )
        grips, leads = self.state.grips, isinstance(self.device, LeaderArm)
        if hold is not None and grips.any() and not leads:
            self.device.grip = float(hold.action[grips][0])  # which the page may have turned
        before, reading = getattr(self.device, "grip", math.nan), self.device.read()
        self.is_stopped |= "stop" in reading.marks
        if hold is not None and leads and not (self.device.aligned and self.aligned_hold == hold.number):
            self.device.align(*tool_of(self.obs["state"][i], self.spec.state_names))
            self.aligned_hold = hold.number
        elif hold is not None:
            self.mark(i, first, reading)
            if self.device.gone:
                self.state.pause("the device, which is gone", i, True)
            elif reading.engaged:
                action = command(
                    reading, self.spec, 1.0 if leads else 0.5, np.zeros(len(self.spec.axes), np.float32)
                )
                # `state` moves positions on from where they are
                action[self.state.moving] /= max(self.state.rate, 1e-9)
                turned = reading.grip != (hold.action[grips][:1] if leads else before)
                self.state.command(hold, action, reading.grip if np.any(turned) else None, engaged=True)
                hold.phase = hold.phase if hold.phase > PAUSE else CORRECTION
        if self.device.gone:
            self.device = None

    def mark(self, i: int, who: str, reading: Reading) -> None:
        """What the device marked goes to robot i's episode."""
        for word, success in (("success", True), ("failure", False), ("discard", None)):
            if word in reading.marks and self.state.labels[i] is None:
                self.state.label(who, i, int(self.state.episode[i]), success)

    def alignment_hint(self, i: int) -> str:
        """How far a leader arm is from robot i, which it is to lead; "" where it is aligned, or leads
        none."""
        hold, leader = self.state.holds[i], self.device
        if (
            not isinstance(leader, LeaderArm)
            or leader.aligned
            or hold is None
            or hold.operator != self.options.operators.split(",")[0]
        ):
            return ""
        return leader.hint()

    def watch(self, env) -> None:
        """Draw the robots of this env from now on."""
        self.cameras = ConsoleCameras(env, self.options.size)

    def draw_in_time(self) -> None:
        """Draw where --fps says that it is time; late pictures are made up for by one, so that it holds on
        average."""
        now, gap = time.monotonic(), max(1 / self.options.fps, 2 * self.draw_time)
        if now - self.drawn >= gap:
            self.drawn = max(self.drawn + gap, now - gap)
            self.draw()

    def draw(self) -> None:
        """Draw the newest pictures: every robot small, those that an operator watches from every camera."""
        assert self.cameras is not None
        began = time.monotonic()
        with self.lock:
            large = sorted(set(self.watched.values()))
        try:
            self.frame = self.cameras.frame(self.frame.number + 1, began, self.obs, large)
            self.picture_error = ""
        except (OSError, RuntimeError, UserError) as e:
            if not self.frame.small:
                raise  # there never was one: no OpenGL
            self.picture_error = f"no new pictures ({e})"
        self.draw_time = time.monotonic() - began
