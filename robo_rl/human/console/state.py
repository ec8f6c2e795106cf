"""The console's operator: what people at several desks want of N robots, as one state machine with its clock
as an argument.

Rules. A robot is held by one operator. Only its holder drives it, and only with the number of that hold, so
what a stale tab sends is ignored. A holder who is silent for `DEADLINE` seconds makes the robot hold still at
once and loses it after `GRACE`. A holder whose picture of the robot is older than `max_delay` holds it still.
Anybody may pause any robot. Every command that is refused raises UserError with one line for the page.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from robo_rl.errors import UserError, choose
from robo_rl.human.intervention import CORRECTION, PAUSE, POLICY, RECOVERY, Intervention, OperatorView

DEADLINE = 0.08  # s of silence after which a held robot stops; with a step and the blend it stands within 0.2 s
GRACE = 10.0  # s of silence after which it is anybody's
DRIVES = {"recovery": RECOVERY, "correction": CORRECTION}


@dataclass(slots=True)
class Hold:
    """Who has a robot: number of the hold, since when, what they last commanded and when."""

    operator: str
    number: int
    since: float
    heard: float
    action: np.ndarray
    phase: int = PAUSE
    first: float = math.nan  # when the first command of this hold was applied
    delay: float = 0.0  # age of the picture that the last command was given to [s]


@dataclass(slots=True)
class EpisodeLabel:
    """What an operator said an episode was."""

    operator: str
    success: bool


class ConsoleState:
    """The people of `robo_rl console`; an Operator of `InterventionEnv`."""

    def __init__(self, num_robots: int, actions: int, patience: float = 60.0,
                 clock: Callable[[], float] = time.monotonic, max_delay: float = math.inf):
        n, self.max_delay = num_robots, max_delay
        self.clock, self.patience, self.n, self.a = clock, patience, n, actions
        self.holds: list[Hold | None] = [None] * n
        self.paused: list[str] = [""] * n  # who paused it
        self.why: list[str] = [""] * n  # why it needs help
        self.asked = np.full(n, np.nan)  # since when
        self.episode = np.zeros(n, np.int64)  # number of the episode, counted over the desk's life
        self.marks: list[EpisodeLabel | None] = [None] * n
        self.closed: dict[int, str] = {}  # episode -> how it ended, for late marks
        self.last: list[str] = [""] * n  # how the robot's last episode ended
        self.count = 0
        self.reactions: list[float] = []  # from a call for help to the take-over [s]
        self.latencies: list[float] = []  # from the take-over to the first human command applied [s]

    # ------------------------------------------------------------ what people say

    def robot(self, i: object) -> int:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < self.n:
            raise UserError(f"there is no robot {i!r}: they are 0 .. {self.n - 1}")
        return i

    def take(self, who: str, robot: int) -> int:
        """Operator `who` takes robot -> number of the hold, which its commands must carry."""
        i, now, hold = self.robot(robot), self.clock(), self.holds[self.robot(robot)]
        if hold is not None and hold.operator != who and now - hold.heard < GRACE:
            raise UserError(f"robot {i} is held by {hold.operator}")
        for j, other in enumerate(self.holds):
            if other is not None and other.operator == who and j != i:
                raise UserError(f"you hold robot {j}; hand it back before you take another")
        self.count += 1
        self.holds[i] = Hold(who, self.count, now, now, np.zeros(self.a, np.float32))
        if np.isfinite(self.asked[i]):
            self.reactions.append(now - self.asked[i])
        self.why[i], self.asked[i], self.paused[i] = "", np.nan, ""
        return self.count

    def held(self, who: str, robot: int, number: int) -> Hold:
        hold = self.holds[self.robot(robot)]
        if hold is None or hold.operator != who:
            raise UserError(f"you do not hold robot {robot}" + (f": {hold.operator} does" if hold else ""))
        if hold.number != number:
            raise UserError(f"this tab's hold of robot {robot} is over; take it again")
        return hold

    def drive(self, who: str, robot: int, number: int, action, phase: str, delay: float = 0.0) -> None:
        """The holder's present command, given to a picture `delay` seconds old; a sign of life, too."""
        hold = self.held(who, robot, number)
        choose("phase", phase, (*DRIVES, "pause"))
        try:
            a = np.asarray(action, np.float32)
        except (TypeError, ValueError):
            a = np.zeros(0, np.float32)
        if a.shape != (self.a,) or not np.isfinite(a).all():
            raise UserError(f"a command is {self.a} finite numbers")
        hold.action, hold.heard = a.clip(-1, 1), self.clock()
        hold.phase, hold.delay = DRIVES.get(phase, PAUSE), delay

    def hand_back(self, who: str, robot: int, number: int) -> None:
        self.held(who, robot, number)
        self.holds[robot] = None

    def pause(self, who: str, robot: int, on: bool) -> None:
        """Anybody may pause; a robot that nobody holds goes on when anybody says so."""
        i = self.robot(robot)
        self.paused[i] = who if on else ""
        if on and self.holds[i] is not None:
            self.holds[i].phase = PAUSE
        if not on:
            self.why[i], self.asked[i] = "", np.nan

    def mark(self, who: str, robot: int, episode: int, success: bool) -> None:
        """Say what an episode is; it then ends. A mark that contradicts one made before is refused."""
        i = self.robot(robot)
        if not isinstance(success, bool):
            raise UserError("success must be true or false")
        before = self.marks[i] if episode == self.episode[i] else None
        if before is not None and before.success != success:
            raise UserError(f"{before.operator} already marked this episode a {'success' if before.success else 'failure'}")
        if episode != self.episode[i]:
            how = self.closed.get(int(episode)) if isinstance(episode, int) else None
            raise UserError(f"that episode of robot {i} is over" + (f" ({how})" if how else ""))
        hold = self.holds[i]
        if hold is not None and hold.operator != who:
            raise UserError(f"robot {i} is held by {hold.operator}: they mark it")
        self.marks[i] = EpisodeLabel(who, success)

    def lost(self, who: str) -> None:
        """The connection of `who` is gone: what they hold stops now."""
        for hold in self.holds:
            if hold is not None and hold.operator == who:
                hold.phase, hold.heard = PAUSE, min(hold.heard, self.clock() - DEADLINE)

    def call(self, robot: int, why: str) -> None:
        """A detector says that a robot needs help; it holds still until somebody comes, or for `patience`."""
        if not self.why[robot] and self.holds[robot] is None and not self.paused[robot]:
            self.why[robot], self.asked[robot] = why, self.clock()

    def given_up(self) -> list[int]:
        """Robots that waited for help longer than `patience`."""
        return [i for i in range(self.n) if self.clock() - self.asked[i] > self.patience]

    def ended(self, robot: int, how: str) -> None:
        """The episode of a robot is over, and with it the hold."""
        self.closed[int(self.episode[robot])] = self.last[robot] = how
        while len(self.closed) > 256:
            del self.closed[next(iter(self.closed))]
        self.count += 1
        self.episode[robot] = self.count
        self.marks[robot], self.why[robot], self.asked[robot] = None, "", np.nan
        self.holds[robot] = None

    # ------------------------------------------------------------ Operator

    def begin(self, mask, obs):
        for i in np.flatnonzero(mask):
            if not self.episode[i]:
                self.count += 1
                self.episode[i] = self.count

    def intervene(self, view: OperatorView) -> Intervention:
        now = self.clock()
        actions, phase = np.zeros((self.n, self.a), np.float32), np.zeros(self.n, np.uint8)
        for i, hold in enumerate(self.holds):
            if hold is not None and now - hold.heard > GRACE:
                self.holds[i] = hold = None
                self.call(i, "its operator is gone")
            if hold is not None:
                late = now - hold.heard > DEADLINE or hold.delay > self.max_delay
                phase[i] = PAUSE if late or self.paused[i] else hold.phase
                if phase[i] > PAUSE:
                    actions[i] = hold.action
                    if math.isnan(hold.first):
                        hold.first = now
                        self.latencies.append(now - hold.since)
            elif self.paused[i] or self.why[i]:
                phase[i] = PAUSE
            else:
                phase[i] = POLICY
        return Intervention(actions, phase)

    def get_state(self):
        return {}

    def set_state(self, state, mask):
        pass
