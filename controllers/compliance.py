"""What a commander asks of the arm's compliance: a wrench at the tool, and a stiffness. Bounded, ramped, gone
with its commander.

The wrench is at most SHARE of the force and the moment that hold the arm (`Limits.wrench`). While either is
in force so is the static pull of the Cartesian springs: together they stay below what holds the arm, whatever
stiffness was asked for. The wrench goes to what was commanded within RAMP, back to zero when its stream is
silent, and is zero at once where the governor brakes. A stiffness is sent once: it holds as long as its
commander goes on commanding.
"""

import math
from dataclasses import dataclass
from typing import Literal

from controllers.contracts import ALLOW, Verdict, sender_fault
from controllers.limits import Limits
from controllers.robot import Robot
from robo_rl.geometry import Floats, rotate1

# of the force that holds the arm: for the wrench, and for the springs; the rest is for what their motion adds
SHARE = 0.35
RAMP = 0.2  # s from nothing to the largest wrench
NOTHING: Floats = (0.0,) * 6


@dataclass(frozen=True, slots=True)
class ComplianceCommand:
    """As a commander sent it; nothing about it is trusted."""

    source: str
    stream: Literal["wrench", "stiffness"]
    # force [N] and moment [N m] in axes of `frame`, or stiffness along and about x y z [N/m], [N m/rad]
    values: tuple[float, ...]
    frame: str = ""  # of a wrench
    stamp: float | None = None  # sender's clock [s]; a stiffness has none

    def fault(
        self,
        now: float,
        limits: Limits,
        robot: Robot,
        commander: str | None,
        stamps: tuple[float, float] | None,
    ) -> tuple[str, str] | None:
        """As `Command.fault`."""
        if len(self.values) != 6:
            return "dimensions", f"a {self.stream} has 6 numbers, got {len(self.values)}"
        if not all(math.isfinite(x) for x in (*self.values, self.stamp or 0.0)):
            return "finite", f"the {self.stream} has a number that is not finite"
        if self.stream == "wrench" and self.frame not in (limits.frame, robot.site):
            return (
                "frame",
                f"a wrench must be in frame {limits.frame!r} or {robot.site!r}, got {self.frame!r}",
            )
        return sender_fault(self.source, self.stamp, now, limits, commander, stamps)


@dataclass(frozen=True, slots=True)
class Compliance:
    """What the law does: force [N] and moment [N m] at the tool in base axes, stiffness (None: its own), and
    the largest static force [N] and moment [N m] of its springs."""

    wrench: Floats
    stiffness: Floats | None
    spring: tuple[float, float]


class CommandedCompliance:
    """The governor's part of it. `take` what has no `fault`; `ramp` or `drop` once per period; `now` is what
    holds then."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.most = SHARE * limits.wrench[0], SHARE * limits.wrench[1]
        self.drop()

    def drop(self) -> None:
        """Nothing is asked for, at once."""
        self.wrench: Floats = NOTHING
        self.goal: Floats = NOTHING
        self.goal_at = -math.inf
        self.stiffness: Floats | None = None

    def take(self, c: ComplianceCommand, quat: Floats, now: float) -> Verdict:
        """Go to what is commanded, or to the nearest allowed. quat: of the measured tool, whose axes a wrench
        may be in."""
        if c.stream == "stiffness":
            most = self.limits.max_stiffness
            self.stiffness = tuple(min(max(x, 0.0), most[i // 3]) for i, x in enumerate(c.values))
            return (
                ALLOW
                if self.stiffness == tuple(c.values)
                else Verdict(
                    "rewrite",
                    "stiffness_range",
                    "commander",
                    f"a stiffness is 0 to {most[0]:g} N/m and {most[1]:g} N m/rad",
                )
            )
        goal, verdict = [], ALLOW
        for part, most, unit in ((c.values[:3], self.most[0], "N"), (c.values[3:], self.most[1], "N m")):
            size = math.hypot(*part)
            if size > most:
                part, verdict = (
                    tuple(most * (x / size) for x in part),
                    Verdict(
                        "rewrite", "wrench_range", "commander", f"a wrench is at most {most:g} {unit} here"
                    ),
                )
            goal += part if c.frame == self.limits.frame else rotate1(quat, part)
        self.goal, self.goal_at = tuple(goal), now
        return verdict

    def ramp(self, now: float, dt: float, commanded: bool) -> None:
        """One period on. commanded: whether the commander is still there."""
        if not commanded:
            self.stiffness = None
        if not commanded or now - self.goal_at > self.limits.command_timeout:
            self.goal = NOTHING
        if self.wrench != self.goal:
            self.wrench = (
                *nearer(self.wrench[:3], self.goal[:3], self.most[0] * dt / RAMP),
                *nearer(self.wrench[3:], self.goal[3:], self.most[1] * dt / RAMP),
            )

    def now(self) -> Compliance | None:
        """What is in force; None: nothing."""
        if self.stiffness is None and not any(self.wrench):
            return None
        return Compliance(self.wrench, self.stiffness, self.most)


def nearer(x: Floats, goal: Floats, step: float) -> Floats:
    """`goal`, or the point on the way to it at distance `step` from x."""
    far = math.dist(x, goal)
    return goal if far <= step else tuple(a + step / far * (b - a) for a, b in zip(x, goal, strict=True))
