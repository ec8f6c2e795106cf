"""The console's state: which operator holds which of N robots and what they command. A state machine with its
clock as an argument.

Rules. A robot is held by one operator. Only the holder commands it, and only with the number of that hold, so
commands of a stale tab are refused. A robot whose holder sends nothing for `DEADLINE` seconds stands still;
after `GRACE` the hold ends. A robot whose holder commands no motion stands still after `rest` seconds, or
`GRIP_TIME / REST` times as long after the gripper was turned: who looks and thinks teaches nothing. A robot
whose holder sees pictures older than `max_delay` stands still. Any operator may pause any robot. A refused
command raises UserError with one line for the page.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from robo_rl.errors import UserError, choose
from robo_rl.human.intervention import CORRECTION, PAUSE, POLICY, RECOVERY, Intervention, OperatorView
from robo_rl.human.reading import GRIP_TIME

# s without a command after which a held robot stops; with a step and the blend it stands within 0.2 s
DEADLINE = 0.08
GRACE = 10.0  # s without a command after which the hold ends
REST = 0.3  # s of robot time without motion after which a held robot stands still
DRIVES = {"recovery": RECOVERY, "correction": CORRECTION}


@dataclass(slots=True)
class Hold:
    """An operator's hold of a robot: its number, since when, the last command and when it came [s]."""

    operator: str
    number: int
    since: float
    last_command: float
    action: np.ndarray
    page_grip: float = 1.0  # of the gripper, as the page said last
    acts_until: float = -math.inf  # when the robot stands still, unless more is commanded
    phase: int = PAUSE
    first_command: float = math.nan  # when the first command of this hold was applied
    delay: float = 0.0  # age of the picture that the last command was given to [s]


@dataclass(slots=True)
class EpisodeLabel:
    """An operator's verdict on an episode; success None: it is discarded."""

    operator: str
    success: bool | None

    @property
    def word(self) -> str:
        return "success" if self.success else "discarded episode" if self.success is None else "failure"


class ConsoleState:
    """The operators of `robo_rl console` and what they command; an Operator of `InterventionEnv`.

    alone: what a robot does that nobody holds: its policy acts, or it stands still (PAUSE). moving bool[A]:
    axes that are positions, on which a command of 1 moves by `rate`. grips bool[A]: axes of a gripper, which
    page and device turn: who turned it last decides. rest: see above; inf where 0 is a command like others.
    """

    def __init__(
        self,
        num_robots: int,
        actions: int,
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        max_delay: float = math.inf,
        alone: int = POLICY,
        moving: np.ndarray | None = None,
        rate: float = 0.0,
        grips: np.ndarray | None = None,
        rest: float = math.inf,
    ):
        self.grips, self.rest = np.zeros(actions, bool) if grips is None else grips, rest
        n, self.max_delay, self.alone = num_robots, max_delay, alone
        self.moving, self.rate = np.zeros(actions, bool) if moving is None else moving, rate
        self.clock, self.patience, self.n, self.a = clock, patience, n, actions
        self.holds: list[Hold | None] = [None] * n
        self.paused: list[str] = [""] * n  # who paused it
        self.help_reason: list[str] = [""] * n  # why it needs help
        self.waiting_since = np.full(n, np.nan)  # since when
        self.episode = np.zeros(n, np.int64)  # number of the episode, counted over all robots
        self.labels: list[EpisodeLabel | None] = [None] * n
        self.ended_as: dict[int, str] = {}  # episode -> how it ended, for labels that come late
        self.last_outcome: list[str] = [""] * n  # how the robot's last episode ended
        self.count = 0
        self.reactions: list[float] = []  # from a request for help to the take-over [s]
        self.latencies: list[float] = []  # from the take-over to the first human command applied [s]

    # ------------------------------------------------------------ commands of the pages

    def robot_index(self, i: object) -> int:
        """`i` if it is the number of a robot; UserError if not."""
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < self.n:
            raise UserError(f"there is no robot {i!r}: they are 0 .. {self.n - 1}")
        return i

    def take(self, who: str, robot: int, grip: float = 1.0) -> int:
        """Operator `who` takes robot, whose gripper is commanded `grip` -> number of the hold, which its
        commands must carry."""
        i, now, hold = self.robot_index(robot), self.clock(), self.holds[self.robot_index(robot)]
        if hold is not None and hold.operator != who and now - hold.last_command < GRACE:
            raise UserError(f"robot {i} is held by {hold.operator}")
        for j, other in enumerate(self.holds):
            if other is not None and other.operator == who and j != i:
                raise UserError(f"you hold robot {j}; hand it back before you take another")
        self.count += 1
        action = np.where(self.grips, grip, 0).astype(np.float32)
        self.holds[i] = Hold(who, self.count, now, now, action, grip)
        if np.isfinite(self.waiting_since[i]):
            self.reactions.append(now - self.waiting_since[i])
        self.help_reason[i], self.waiting_since[i], self.paused[i] = "", np.nan, ""
        return self.count

    def require_hold(self, who: str, robot: int, number: int) -> Hold:
        """The hold of robot that operator `who` has under this number; UserError if they have none."""
        hold = self.holds[self.robot_index(robot)]
        if hold is None or hold.operator != who:
            raise UserError(f"you do not hold robot {robot}" + (f": {hold.operator} does" if hold else ""))
        if hold.number != number:
            raise UserError(f"this tab's hold of robot {robot} is over; take it again")
        return hold

    def drive(self, who: str, robot: int, number: int, action, phase: str, delay: float = 0.0) -> None:
        """Set the holder's command, given to a picture `delay` seconds old; it also renews the hold."""
        hold = self.require_hold(who, robot, number)
        choose("phase", phase, (*DRIVES, "pause"))
        try:
            a = np.asarray(action, np.float32)
        except (TypeError, ValueError):
            a = np.zeros(0, np.float32)
        if a.shape != (self.a,) or not np.isfinite(a).all():
            raise UserError(f"a command is {self.a} finite numbers")
        grip = float(a[self.grips][0]) if self.grips.any() else hold.page_grip
        self.command(hold, a.clip(-1, 1), grip if grip != hold.page_grip else None)
        hold.page_grip, hold.phase, hold.delay = grip, DRIVES.get(phase, PAUSE), delay

    def command(self, hold: Hold, action: np.ndarray, grip: float | None, engaged: bool = False) -> None:
        """Set the command [A] of a hold now, with its gripper turned to `grip` (None: as it is). engaged: it
        counts as motion, whatever it is."""
        now = hold.last_command = self.clock()
        grips = hold.action[self.grips] if grip is None else grip
        hold.action = action.astype(np.float32)
        hold.action[self.grips] = grips
        if engaged or action[~self.grips].any():
            hold.acts_until = max(hold.acts_until, now + self.rest)
        if grip is not None:
            hold.acts_until = max(hold.acts_until, now + self.rest * GRIP_TIME / REST)

    def grip_of(self, robot: int) -> float:
        """How the holder of a robot commands its gripper; 0: nobody does."""
        hold = self.holds[robot]
        return float(hold.action[self.grips][0]) if hold is not None and self.grips.any() else 0.0

    def hand_back(self, who: str, robot: int, number: int) -> None:
        """End a hold; the policy acts again."""
        self.require_hold(who, robot, number)
        self.holds[robot] = None

    def pause(self, who: str, robot: int, on: bool) -> None:
        """Pause a robot, or let one that nobody holds go on; any operator may."""
        i = self.robot_index(robot)
        self.paused[i] = who if on else ""
        if on and (hold := self.holds[i]) is not None:
            hold.phase = PAUSE
        if not on:
            self.help_reason[i], self.waiting_since[i] = "", np.nan

    def label(self, who: str, robot: int, episode: int, success: bool | None) -> None:
        """Label an episode, which then ends; None discards it. UserError: it is over, held by another, or
        labelled differently."""
        i = self.robot_index(robot)
        if success not in (True, False, None) or isinstance(success, int) and not isinstance(success, bool):
            raise UserError("success must be true, false or null")
        before = self.labels[i] if episode == self.episode[i] else None
        if before is not None and before.success != success:
            raise UserError(f"{before.operator} already marked this episode a {before.word}")
        if episode != self.episode[i]:
            how = self.ended_as.get(int(episode)) if isinstance(episode, int) else None
            raise UserError(f"that episode of robot {i} is over" + (f" ({how})" if how else ""))
        hold = self.holds[i]
        if hold is not None and hold.operator != who:
            raise UserError(f"robot {i} is held by {hold.operator}: they mark it")
        self.labels[i] = EpisodeLabel(who, success)

    def disconnect(self, who: str) -> None:
        """Stop the robot that operator `who` holds: their connection is closed."""
        for hold in self.holds:
            if hold is not None and hold.operator == who:
                hold.phase, hold.last_command = PAUSE, min(hold.last_command, self.clock() - DEADLINE)

    def request_help(self, robot: int, why: str) -> None:
        """Request help for a robot; it stands still until an operator takes it, or for `patience`."""
        if not self.help_reason[robot] and self.holds[robot] is None and not self.paused[robot]:
            self.help_reason[robot], self.waiting_since[robot] = why, self.clock()

    def unanswered(self) -> list[int]:
        """Robots that have waited for help longer than `patience`."""
        return [i for i in range(self.n) if self.clock() - self.waiting_since[i] > self.patience]

    def end_episode(self, robot: int, how: str) -> None:
        """End a robot's episode, and with it its hold; how: what the page says of it."""
        self.ended_as[int(self.episode[robot])] = self.last_outcome[robot] = how
        while len(self.ended_as) > 256:
            del self.ended_as[next(iter(self.ended_as))]
        self.count += 1
        self.episode[robot] = self.count
        self.labels[robot], self.help_reason[robot], self.waiting_since[robot] = None, "", np.nan
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
            if hold is not None and now - hold.last_command > GRACE:
                self.holds[i] = hold = None
                self.request_help(i, "its operator is gone")
            if hold is not None:
                late = now - hold.last_command > DEADLINE or hold.delay > self.max_delay
                idle = self.rest < math.inf and now > hold.acts_until
                phase[i] = PAUSE if late or idle or self.paused[i] else hold.phase
                if phase[i] > PAUSE:
                    actions[i] = np.where(
                        self.moving, view.executed[i] + self.rate * hold.action, hold.action
                    )
                    if math.isnan(hold.first_command):
                        hold.first_command = now
                        self.latencies.append(now - hold.since)
            elif self.paused[i] or self.help_reason[i]:
                phase[i] = PAUSE
            else:
                phase[i] = self.alone
        return Intervention(actions, phase, attended=np.array([hold is not None for hold in self.holds]))

    def get_state(self):
        return {}

    def set_state(self, state, mask):
        pass
