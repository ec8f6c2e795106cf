"""What a command and a measured state must keep to, judged one contract after the other: no state, no clock.

A command is judged by the contracts in the order of CONTRACTS; its verdict names the first one that it
violates.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, fields
from typing import Any, Literal

from controllers.limits import Limits, box, near, upright
from controllers.robot import Robot
from robo_rl.geometry import Floats, turn_between, unit

DRIFT = 2e-4  # by which two clocks of quartz may run apart: 0.2 ms a second
REWRITE = ("workspace", "orientation", "step", "joint_range", "wrench_range", "stiffness_range")
CONTRACTS = ("dimensions", "finite", "quaternion", "frame", "commander", "order", "future", "stale", *REWRITE)
"""Of a command."""
BLAME = {
    "joint_limit": "arm",
    "joint_speed": "arm",
    "tool_speed": "arm",
    "tool_place": "arm",
    "wrench": "environment",
    "tracking": "environment",
    "state_dimensions": "sensor",
    "state_finite": "sensor",
    "state_age": "transport",
    "command_age": "transport",
    "lease": "person",
    "clock": "governor",
    "estop": "person",
    "order": "transport",
    "stale": "transport",
    "future": "transport",
    "pair": "arm",
}  # everything else is the commander's


@dataclass(frozen=True, slots=True)
class Command:
    """A tool pose as a commander sent it; nothing about it is trusted."""

    source: str
    stamp: float  # sender's clock [s]
    frame: str
    pos: tuple[float, ...]  # [m]
    quat: tuple[float, ...]  # (w, x, y, z)
    joints: tuple[float, ...] = ()  # targets [rad] whose tool pose pos and quat are; (): a pose alone
    stream: str = ""  # of the source's, where it has several: stamps rise within each

    def fault(
        self,
        now: float,
        limits: Limits,
        robot: Robot,
        commander: str | None,
        stamps: tuple[float, float] | None,
    ) -> tuple[str, str] | None:
        """The first contract that makes it unusable, and a sentence; None: it may be used.

        commander: who commands at present; stamps: (last stamp, least delay) of its source and stream.
        """
        if len(self.pos) != 3 or len(self.quat) != 4:
            return "dimensions", f"a pose has 3 + 4 numbers, got {len(self.pos)} + {len(self.quat)}"
        if self.joints and len(self.joints) != len(robot.joints):
            return "dimensions", f"the arm has {len(robot.joints)} joints, got {len(self.joints)}"
        if not all(math.isfinite(x) for x in (*self.pos, *self.quat, *self.joints, self.stamp)):
            return "finite", "the command has a number that is not finite"
        length = math.hypot(*self.quat)
        if abs(length - 1) > 1e-2:
            return "quaternion", f"the quaternion must have length 1 within 0.01, got {length:.4g}"
        if self.frame != limits.frame:
            return "frame", f"commands must be in frame {limits.frame!r}, got {self.frame!r}"
        return sender_fault(self.source, self.stamp, now, limits, commander, stamps)


@dataclass(frozen=True, slots=True)
class State:
    """Measured joints and tool; wrench is the external one [N], [N m], None where nobody measures it."""

    q: tuple[float, ...]
    dq: tuple[float, ...]
    pos: tuple[float, ...]
    quat: tuple[float, ...]
    twist: tuple[float, ...]  # [m/s], [rad/s], base axes
    wrench: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a command or a tick: allow, rewrite, block, hold or stop, and the first contract
    violated."""

    action: Literal["allow", "rewrite", "block", "hold", "stop"]
    contract: str = ""
    blame: str = ""
    text: str = ""


ALLOW = Verdict("allow")


# ---- of a measured state -----------------------------------------------------------------------------------


def fields_of(x: Any) -> dict:
    """For a trace: the fields by name, as they are."""
    return {f.name: getattr(x, f.name) for f in fields(x)}


def state_fault(s: State, joints: int) -> tuple[str, str] | None:
    """The contract by which a measured state of an arm of so many joints is unusable, and a sentence; None:
    it may be used."""
    if (len(s.q), len(s.dq), len(s.pos), len(s.quat), len(s.twist)) != (joints, joints, 3, 4, 6) or (
        s.wrench is not None and len(s.wrench) != 6
    ):
        return "state_dimensions", f"state must have {joints} joints, a pose and a twist"
    total = (
        sum(s.q) + sum(s.dq) + sum(s.pos) + sum(s.quat) + sum(s.twist) + (sum(s.wrench) if s.wrench else 0.0)
    )
    if total - total != 0 or not 0.9 < math.hypot(*s.quat) < 1.1:
        return "state_finite", "the measured state is not finite or its quaternion not unit"
    return None


def arming_fault(s: State, limits: Limits) -> str:
    """Why an arm in this measured state is not armed; "" where it may be."""
    if math.hypot(*s.twist[:3]) > 0.02 or math.hypot(*s.twist[3:]) > 0.1:
        return "the tool moves"
    if math.dist(box(s.pos, limits), s.pos) > limits.measured_margin:
        return f"the tool at {[round(x, 3) for x in s.pos]} m is outside the workspace"
    return ""


def measured_fault(s: State, limits: Limits, robot: Robot) -> tuple[str, str] | None:
    """The first contract that the measured state violates, and a sentence."""
    r, o = robot, limits
    margin = o.joint_margin
    for name, q, v, low, high, most in zip(r.joints, s.q, s.dq, r.lower, r.upper, r.velocity, strict=True):
        if (q < low + margin and v < -0.01) or (q > high - margin and v > 0.01) or not low <= q <= high:
            return "joint_limit", f"{name} at {q:.3f} rad, allowed {low:.3f} to {high:.3f}"
        if abs(v) > o.joint_speed * most:
            return "joint_speed", f"{name} at {v:.2f} rad/s, allowed {o.joint_speed * most:.3g}"
    if math.hypot(*s.twist[:3]) > o.measured_speed[0] or math.hypot(*s.twist[3:]) > o.measured_speed[1]:
        return "tool_speed", f"the tool moves at {math.hypot(*s.twist[:3]):.2f} m/s"
    inside = box(s.pos, o)
    if inside is not s.pos and math.dist(inside, s.pos) > o.measured_margin:
        return "tool_place", f"the tool is at {[round(x, 3) for x in s.pos]} m, outside the workspace"
    if s.wrench is not None and (
        math.hypot(*s.wrench[:3]) > o.wrench[0] or math.hypot(*s.wrench[3:]) > o.wrench[1]
    ):
        force, moment = math.hypot(*s.wrench[:3]), math.hypot(*s.wrench[3:])
        return "wrench", f"external force {force:.0f} N, moment {moment:.1f} N m"
    return None


# ---- of a command ------------------------------------------------------------------------------------------


def sender_fault(
    source: str,
    stamp: float | None,
    now: float,
    limits: Limits,
    commander: str | None,
    stamps: tuple[float, float] | None,
) -> tuple[str, str] | None:
    """The contract that a command's sender or its time [s] violates, and a sentence. stamp: None where the
    message has none."""
    if commander is not None and source != commander:
        return "commander", f"{source!r} commands while {commander!r} does"
    if stamps is not None and stamp is not None:
        last, least = stamps
        if stamp <= last:
            return (
                "order",
                f"stamp {stamp:.4f} s is not after {last:.4f} s: repeated, reordered or time ran back",
            )
        if now - stamp < least - limits.stale:
            return "future", f"the stamp is {least - now + stamp:.2f} s ahead of its sender's others"
        if now - stamp > least + limits.stale:
            return "stale", f"the command is {now - stamp - least:.2f} s late"
    return None


def least_delay(stamps: tuple[float, float] | None, stamp: float, now: float) -> float:
    """The least delay [s] of a sender's commands that the next is measured by, after one of this stamp.
    stamps: (last stamp, least delay) before it, None: it is the first. It rises by what two clocks may drift
    apart, so that only a delay that grows faster than that is one."""
    delay = now - stamp
    return delay if stamps is None else min(delay, stamps[1] + DRIFT * (stamp - stamps[0]))


def nearest_allowed(
    pos: Floats, quat: Floats, target: tuple[Floats, Floats], limits: Limits
) -> tuple[Verdict, Floats, Floats]:
    """The nearest allowed pose, at most a step from `target`, and the first contract that moved it."""
    o, verdict = limits, ALLOW
    inside = box(pos, o)
    if inside != pos:
        verdict = Verdict("rewrite", "workspace", "commander", f"{[round(x, 3) for x in pos]} m is outside")
    level = upright(quat, o)
    if verdict is ALLOW and level is not quat:
        verdict = Verdict("rewrite", "orientation", "commander", f"tilted beyond {o.tilt:g} rad")
    close, turned = near(inside, level, *target, o.step)
    if close is not inside or turned is not level:
        if verdict is ALLOW:
            verdict = Verdict(
                "rewrite",
                "step",
                "commander",
                f"{math.dist(inside, target[0]):.3f} m or "
                f"{math.hypot(*turn_between(level, target[1])):.2f} rad in one step",
            )
        turned = upright(turned, o)
    return verdict, close, turned


def allowed_joints(
    c: Command, verdict: Verdict, now: Floats, target: tuple[Floats, Floats], limits: Limits, robot: Robot
) -> tuple[Verdict, Floats]:
    """Joint targets within the joints' range, as far on the way from `now` as the tool may go, and the
    verdict with them: a place or a tilt outside blocks them."""
    if verdict.contract in ("workspace", "orientation"):
        return Verdict("block", verdict.contract, "commander", verdict.text), now
    margin, share = limits.joint_margin, 1.0
    if verdict.contract == "step":  # as far as the tool may go
        (p, q), o = target, limits.step
        far, turn = math.dist(c.pos, p), math.hypot(*turn_between(unit(tuple(c.quat)), q))
        share = min(o[0] / max(far, o[0]), o[1] / max(turn, o[1]))
    wanted = tuple(b + share * (a - b) for a, b in zip(c.joints, now, strict=True))
    allowed = tuple(
        min(max(x, low + margin), high - margin)
        for x, low, high in zip(wanted, robot.lower, robot.upper, strict=True)
    )
    if allowed != wanted and verdict is ALLOW:
        verdict = Verdict("rewrite", "joint_range", "commander", "a joint target is beyond its limits")
    return verdict, allowed


# ---- what became of all of them ----------------------------------------------------------------------------


class Violations:
    """The record of a governor's verdicts. counts: how often each contract was violated. first: the first
    violation of all, with its time [s]."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.counts: Counter[str] = Counter()
        self.first: tuple[float, Verdict] | None = None
        self._recent: deque[float] = deque()  # times of those that count towards the limit

    def add(self, verdict: Verdict, now: float, counted: bool) -> str:
        """Keep one; counted: it counts towards the limit -> a sentence when more than `violations` of those
        came within `window`."""
        self.counts[verdict.contract] += 1
        if self.first is None:
            self.first = now, verdict
        if not counted:
            return ""
        recent = self._recent
        recent.append(now)
        while recent[0] < now - self.limits.window:
            recent.popleft()
        if len(recent) <= self.limits.violations:
            return ""
        recent.clear()
        return (
            f"more than {self.limits.violations} commands refused or changed in {self.limits.window:g} s, "
            f"the last by {verdict.contract}: {verdict.text}"
        )

    def forgive(self) -> None:
        """Count towards the limit from now on."""
        self._recent.clear()
