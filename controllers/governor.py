"""The last check before the wire: limits, watchdogs, one commander, e-stop. It reads no clock and sends nothing.

    DISARMED --arm--> ARMED --first good command--> ACTIVE --violation or silence--> HOLD --arm--> ARMED
    any --stop, lost state, silence for `give_up`--> STOPPED --reset--> DISARMED

Nothing but `arm` leads out of HOLD and nothing but `reset` out of STOPPED. In HOLD and STOPPED the setpoint brakes from
the measured pose and velocity and then stands; what is commanded there has no effect.

A command is judged by the contracts in the order of CONTRACTS; its verdict names the first one that it violates. Limits
of place and step rewrite the command to the nearest one allowed, everything else blocks it; too many of either within
`window` hold the arm. The setpoint moves to the last accepted command within the limits of speed and acceleration.
A command may name joint targets, with the tool pose that they mean as the receiver's own model has it: both are judged,
a place outside blocks it, a step too far is taken part of the way, and joints and tool move together.
Ages are measured on the receiver's monotonic clock, `now`; the sender's stamps only order its messages.
"""

import math
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Literal

from controllers.limits import Limits, box, near, pursue, slower, upright
from controllers.robot import Robot
from controllers.trace import Trace
from robo_rl.errors import UserError
from robo_rl.geometry import Floats, turn_between, turned, unit

DISARMED, ARMED, ACTIVE, HOLD, STOPPED = "DISARMED", "ARMED", "ACTIVE", "HOLD", "STOPPED"
JOINT_SHARE = 0.97  # of the joints' speeds, for joint targets: joints that lag behind them stay below
REWRITE = ("workspace", "orientation", "step", "joint_range")
CONTRACTS = ("dimensions", "finite", "quaternion", "frame", "commander", "order", "future", "stale", *REWRITE)
"""Of a command."""
STATE_CONTRACTS = ("state_dimensions", "state_finite", "joint_limit", "joint_speed", "tool_speed", "tool_place",
                   "wrench", "tracking", "state_age", "command_age", "violations", "clock", "estop")
"""Of the measured state and of time."""
BLAME = {"joint_limit": "arm", "joint_speed": "arm", "tool_speed": "arm", "tool_place": "arm", "wrench": "environment",
         "tracking": "environment", "state_dimensions": "sensor", "state_finite": "sensor", "state_age": "transport",
         "command_age": "transport", "clock": "governor", "estop": "person", "order": "transport", "stale": "transport",
         "future": "transport"}  # everything else is the commander's


@dataclass(frozen=True, slots=True)
class Command:
    """A tool pose as a commander sent it; nothing about it is trusted."""

    source: str
    stamp: float  # sender's clock [s]
    frame: str
    pos: tuple[float, ...]  # [m]
    quat: tuple[float, ...]  # (w, x, y, z)
    joints: tuple[float, ...] = ()  # targets [rad] whose tool pose pos and quat are; (): a pose alone


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
    """What became of a command or a tick: allow, rewrite, block, hold or stop, and the first contract violated."""

    action: Literal["allow", "rewrite", "block", "hold", "stop"]
    contract: str = ""
    blame: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Setpoint:
    """What may go onto the wire. pos is None while nothing is asked of the arm: it stays where its law holds it.
    `rebased`: the setpoint starts anew from the measured pose, springs must let go."""

    state: str
    pos: Floats | None
    quat: Floats
    rebased: bool = False
    joints: Floats | None = None  # where joint targets are commanded


ALLOW = Verdict("allow")


class Governor:
    """One owner of the state machine. Every method takes `now` [s], monotonic; `tick` once per period.

    counts: how often each contract was violated. first: the first violation of all, with its time.
    """

    def __init__(self, limits: Limits, robot: Robot, trace: Trace | None = None):
        self.limits, self.robot, self.trace = limits, robot, trace
        self.state = DISARMED
        self.counts: Counter[str] = Counter()
        self.first: tuple[float, Verdict] | None = None
        self.reason = ""
        self.measured: State | None = None
        self.now = self._state_at = self._command_at = self._changed_at = -math.inf
        self.pos: Floats | None = None
        self.quat: Floats = (1.0, 0.0, 0.0, 0.0)
        self._v: Floats = (0.0, 0.0, 0.0)
        self._w: Floats = (0.0, 0.0, 0.0)
        self.target: tuple[Floats, Floats] = (0.0, 0.0, 0.0), self.quat
        self.joints: Floats | None = None  # the setpoint and
        self.joint_target: Floats | None = None  # its goal, while joints are commanded
        self._pace = 0.0  # [m/s] on the way between them
        self.commander: str | None = None
        self._stamps: dict[str, tuple[float, float]] = {}  # source -> (last stamp, least delay)
        self._recent: deque[float] = deque()
        self._apart_since = math.inf
        self._rebased = False
        if trace:
            trace.add("config", 0.0, {"limits": asdict(limits), "robot": robot.name})

    # ---- people ---------------------------------------------------------------------------------------------------

    def arm(self, now: float) -> None:
        """Allow commands. UserError says why not."""
        self._log("arm", now, {})
        self._clock(now)
        if self.state == STOPPED:
            raise UserError(f"stopped ({self.reason}): reset first, then arm")
        if self.state in (ARMED, ACTIVE):
            raise UserError(f"already {self.state}")
        if self.measured is None or now - self._state_at > self.limits.state_timeout:
            raise UserError(f"cannot arm: no measured state for {self.limits.state_timeout:g} s")
        m = self.measured
        if math.hypot(*m.twist[:3]) > 0.02 or math.hypot(*m.twist[3:]) > 0.1:
            raise UserError("cannot arm: the tool moves")
        if math.dist(box(m.pos, self.limits), m.pos) > self.limits.measured_margin:
            raise UserError(f"cannot arm: the tool at {[round(x, 3) for x in m.pos]} m is outside the workspace")
        self.pos, self.quat = box(m.pos, self.limits), upright(unit(m.quat), self.limits)
        self.target = self.pos, self.quat
        self.joints, self.joint_target, self._pace = None, None, 0.0
        self._v = self._w = (0.0, 0.0, 0.0)
        self.commander, self._apart_since = None, math.inf
        self._stamps.clear()
        self._recent.clear()
        self._rebased = True
        self._go(ARMED, now, "")

    def disarm(self, now: float) -> None:
        """Take no more commands; STOPPED stays."""
        self._log("disarm", now, {})
        self._clock(now)
        if self.state in (ARMED, ACTIVE):
            self._rest()
        if self.state != STOPPED:
            self._go(DISARMED, now, "disarmed")

    def stop(self, now: float, reason: str = "e-stop") -> Verdict:
        """Emergency stop, from anyone, at any time. It latches."""
        self._log("stop", now, {"reason": reason})
        self._clock(now)
        return self._trip(STOPPED, "estop", reason)

    def reset(self, now: float) -> None:
        """Out of STOPPED, to DISARMED."""
        self._log("reset", now, {})
        self._clock(now)
        if self.state != STOPPED:
            raise UserError(f"nothing to reset: {self.state}")
        self._go(DISARMED, now, "reset")

    def moved(self, now: float) -> None:
        """Someone put the disarmed arm elsewhere: where it braked before is nothing to it."""
        self._log("moved", now, {})
        self._clock(now)
        if self.state == DISARMED:
            self.pos, self._v, self._w = None, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)

    # ---- messages -------------------------------------------------------------------------------------------------

    def measure(self, state: State, now: float) -> Verdict:
        """A measured state came in."""
        if self.trace:
            self._log("state", now, {"q": state.q, "dq": state.dq, "pos": state.pos, "quat": state.quat,
                                     "twist": state.twist, "wrench": state.wrench})
        self._clock(now)
        n = len(self.robot.joints)
        if (len(state.q), len(state.dq), len(state.pos), len(state.quat), len(state.twist)) != (n, n, 3, 4, 6) or \
                (state.wrench is not None and len(state.wrench) != 6):
            return self._count("block", "state_dimensions", f"state must have {n} joints, a pose and a twist")
        total = sum(state.q) + sum(state.dq) + sum(state.pos) + sum(state.quat) + sum(state.twist) + \
            (sum(state.wrench) if state.wrench else 0.0)
        if total - total != 0 or not 0.9 < math.hypot(*state.quat) < 1.1:
            return self._count("block", "state_finite", "the measured state is not finite or its quaternion not unit")
        self.measured, self._state_at = state, now
        if self.state not in (ARMED, ACTIVE):
            return ALLOW
        broken = self._measured_contract(state)
        return self._trip(HOLD, *broken) if broken else ALLOW

    def _measured_contract(self, s: State) -> tuple[str, str] | None:
        """The first contract that the measured state violates, and a sentence."""
        r, o = self.robot, self.limits
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
        if s.wrench is not None and (math.hypot(*s.wrench[:3]) > o.wrench[0] or math.hypot(*s.wrench[3:]) > o.wrench[1]):
            force, moment = math.hypot(*s.wrench[:3]), math.hypot(*s.wrench[3:])
            return "wrench", f"external force {force:.0f} N, moment {moment:.1f} N m"
        return None

    def command(self, c: Command, now: float) -> Verdict:
        """A command came in."""
        if self.trace:
            self._log("command", now, {"source": c.source, "stamp": c.stamp, "frame": c.frame, "pos": c.pos,
                                       "quat": c.quat, "joints": c.joints})
        self._clock(now)
        if self.state not in (ARMED, ACTIVE):
            return self._said(Verdict("block", "state", "commander", f"{self.state}: {self.reason or 'not armed'}"))
        broken = self.blocks(c, now)
        if broken:
            verdict = self._count("block", *broken)
            if broken[0] == "commander":
                self._trip(HOLD, *broken)
            return self._said(verdict)
        _, least = self._stamps.get(c.source, (-math.inf, math.inf))
        self._stamps[c.source] = c.stamp, min(least, now - c.stamp)
        self.commander, self._command_at = c.source, now
        verdict, pos, quat = self.rewrites(tuple(c.pos), unit(tuple(c.quat)))
        if c.joints:
            verdict = self._joint_command(c, verdict, pos, quat)
            if verdict.action == "block":
                return self._said(self._count("block", verdict.contract, verdict.text))
        else:
            self.target, self.joints, self.joint_target = (pos, quat), None, None
        if self.state == ARMED:
            self._go(ACTIVE, now, "")
        if verdict is not ALLOW:
            self._count("rewrite", verdict.contract, verdict.text)
        return self._said(verdict)

    def _joint_command(self, c: Command, verdict: Verdict, pos: Floats, quat: Floats) -> Verdict:
        """Take joint targets, whole or part of the way -> the verdict; "block" leaves everything as it was."""
        if verdict.contract in ("workspace", "orientation"):
            return Verdict("block", verdict.contract, "commander", verdict.text)
        r, margin = self.robot, self.limits.joint_margin
        now = self.joint_target if self.joint_target is not None else self.measured.q
        share = 1.0
        if verdict.contract == "step":  # as far as the tool may go
            (p, q), o = self.target, self.limits.step
            far, turn = math.dist(c.pos, p), math.hypot(*turn_between(unit(tuple(c.quat)), q))
            share = min(o[0] / max(far, o[0]), o[1] / max(turn, o[1]))
        wanted = tuple(b + share * (a - b) for a, b in zip(c.joints, now, strict=True))
        allowed = tuple(min(max(x, low + margin), high - margin)
                        for x, low, high in zip(wanted, r.lower, r.upper, strict=True))
        if allowed != wanted and verdict is ALLOW:
            verdict = Verdict("rewrite", "joint_range", "commander", "a joint target is beyond its limits")
        if self.joints is None:
            self.joints, self._pace = self.measured.q, 0.0
        self.target, self.joint_target = (pos, quat), allowed
        return verdict

    def blocks(self, c: Command, now: float) -> tuple[str, str] | None:
        """The first contract that makes the command unusable, and a sentence; None: it may be used."""
        if len(c.pos) != 3 or len(c.quat) != 4:
            return "dimensions", f"a pose has 3 + 4 numbers, got {len(c.pos)} + {len(c.quat)}"
        if c.joints and len(c.joints) != len(self.robot.joints):
            return "dimensions", f"the arm has {len(self.robot.joints)} joints, got {len(c.joints)}"
        if not all(math.isfinite(x) for x in (*c.pos, *c.quat, *c.joints, c.stamp)):
            return "finite", "the command has a number that is not finite"
        length = math.hypot(*c.quat)
        if abs(length - 1) > 1e-2:
            return "quaternion", f"the quaternion must have length 1 within 0.01, got {length:.4g}"
        if c.frame != self.limits.frame:
            return "frame", f"commands must be in frame {self.limits.frame!r}, got {c.frame!r}"
        if self.commander is not None and c.source != self.commander:
            return "commander", f"{c.source!r} commands while {self.commander!r} does"
        if c.source in self._stamps:
            last, least = self._stamps[c.source]
            if c.stamp <= last:
                return "order", f"stamp {c.stamp:.4f} s is not after {last:.4f} s: repeated, reordered or time ran back"
            if now - c.stamp < least - self.limits.stale:
                return "future", f"the stamp is {least - now + c.stamp:.2f} s ahead of its sender's others"
            if now - c.stamp > least + self.limits.stale:
                return "stale", f"the command is {now - c.stamp - least:.2f} s late"
        return None

    def rewrites(self, pos: Floats, quat: Floats) -> tuple[Verdict, Floats, Floats]:
        """The nearest allowed pose, and the first contract that moved it."""
        o, verdict = self.limits, ALLOW
        inside = box(pos, o)
        if inside != pos:
            verdict = Verdict("rewrite", "workspace", "commander", f"{[round(x, 3) for x in pos]} m is outside")
        level = upright(quat, o)
        if verdict is ALLOW and level is not quat:
            verdict = Verdict("rewrite", "orientation", "commander", f"tilted beyond {o.tilt:g} rad")
        close, turned = near(inside, level, *self.target, o.step)
        if close is not inside or turned is not level:
            if verdict is ALLOW:
                verdict = Verdict("rewrite", "step", "commander", f"{math.dist(inside, self.target[0]):.3f} m or "
                                  f"{math.hypot(*turn_between(level, self.target[1])):.2f} rad in one step")
            turned = upright(turned, o)
        return verdict, close, turned

    # ---- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float, dt: float) -> Setpoint:
        """The setpoint for the period of dt [s] that begins now."""
        o = self.limits
        self._clock(now)
        if self.state in (ARMED, ACTIVE, HOLD) and now - self._state_at > o.state_timeout:
            self._trip(STOPPED, "state_age", f"no measured state for {now - self._state_at:.3f} s")
        if self.state == ACTIVE:
            if now - self._command_at > o.command_timeout:
                self._trip(HOLD, "command_age", f"no command for {now - self._command_at:.3f} s")
            elif math.dist(self.pos, self.measured.pos) > o.tracking[0]:
                self._apart_since = min(self._apart_since, now)
                if now - self._apart_since > o.tracking[1]:
                    self._trip(HOLD, "tracking", f"the tool is {math.dist(self.pos, self.measured.pos):.3f} m off")
            else:
                self._apart_since = math.inf
        elif self.state == HOLD and now - self._changed_at > o.give_up:
            self._trip(STOPPED, "command_age" if "command" in self.reason else "violations",
                       f"held for {o.give_up:g} s after: {self.reason}")
        if self.state == ACTIVE and self.joint_target is not None:
            self._joint_step(dt)
        elif self.state == ACTIVE:
            goal, facing = self.target
            (a, b, c), (x, y, z) = goal, self.pos
            self._v = pursue((a - x, b - y, c - z), self._v, o.speed[0], o.accel[0], dt)
            self._w = pursue(turn_between(facing, self.quat), self._w, o.speed[1], o.accel[1], dt)
        else:
            self._v, self._w = slower(self._v, o.brake[0], dt), slower(self._w, o.brake[1], dt)
            if self.state == DISARMED and not any((*self._v, *self._w)):
                self.pos = None
        x, y, z = self._v
        if x or y or z:
            moved = (self.pos[0] + x * dt, self.pos[1] + y * dt, self.pos[2] + z * dt)
            self.pos = box(moved, o)
            if self.pos != moved:  # a face of the box: what points out of it stops
                self._v = tuple(v if a == b else 0.0 for v, a, b in zip(self._v, self.pos, moved, strict=True))
        x, y, z = self._w
        if x or y or z:
            self.quat = upright(turned(self.quat, x * dt, y * dt, z * dt), o)
        out = Setpoint(self.state, self.pos, self.quat, self._rebased, self.joints if self.state == ACTIVE else None)
        self._rebased = False
        if self.trace:
            self._log("tick", now, {"dt": dt, "out": [out.state, self.reason, out.pos, out.quat, out.rebased,
                                                           out.joints]})
        return out

    def _joint_step(self, dt: float) -> None:
        """Joints and tool together, by one share of the way that is left: within the tool's speed and acceleration and
        the joints' speeds. (Along so short a way the tool moves in a straight line, near enough.)"""
        o, (goal, facing) = self.limits, self.target
        turn = turn_between(facing, self.quat)
        way = max(math.dist(goal, self.pos), o.speed[0] / o.speed[1] * math.hypot(*turn))  # turns as the way they take
        share = 1.0  # a way too short to name: the null space's motion, at the joints' speeds
        if way > 1e-6:
            v, _, _ = pursue((way, 0.0, 0.0), (self._pace, 0.0, 0.0), o.speed[0], o.accel[0], dt)
            share = min(1.0, max(v, 0.0) * dt / way)
        for a, b, most in zip(self.joint_target, self.joints, self.robot.velocity, strict=True):
            if abs(a - b) * share > JOINT_SHARE * most * dt:
                share = JOINT_SHARE * most * dt / abs(a - b)
        self._pace = share * way / dt
        self.joints = tuple(b + share * (a - b) for a, b in zip(self.joint_target, self.joints, strict=True))
        self._v = tuple(share * (a - b) / dt for a, b in zip(goal, self.pos, strict=True))
        self._w = tuple(share * x / dt for x in turn)

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _clock(self, now: float) -> None:
        if not now >= self.now:  # NaN too
            self._trip(STOPPED, "clock", f"time went from {self.now:.4f} s to {now:.4f} s")
        else:
            self.now = now

    def _go(self, state: str, now: float, reason: str) -> None:
        self.state, self.reason, self._changed_at = state, reason, now

    def _rest(self) -> None:
        """Let the setpoint go on from the measured pose at the measured velocity, within the limits, braking."""
        if self.measured is not None and self.now - self._state_at <= self.limits.state_timeout:
            m, o = self.measured, self.limits
            self.pos, self.quat = box(m.pos, o), upright(unit(m.quat), o)
            self.joints, self.joint_target, self._pace = None, None, 0.0
            self._v, self._w = m.twist[:3], m.twist[3:]
            for name, top in (("_v", o.speed[0]), ("_w", o.speed[1])):
                size = math.hypot(*getattr(self, name))
                if size > top:
                    setattr(self, name, tuple(top / size * x for x in getattr(self, name)))
            self._rebased = True

    def _trip(self, to: str, contract: str, text: str) -> Verdict:
        """Into HOLD or STOPPED, unless it is there already."""
        verdict = self._count("stop" if to == STOPPED else "hold", contract, text)
        if self.state == STOPPED or self.state == to:
            return verdict
        if self.state in (ARMED, ACTIVE) or to == STOPPED and self.state == DISARMED:
            self._rest()
        if not (to == HOLD and self.state == DISARMED):
            self._go(to, self.now, text)
        return verdict

    def _count(self, action: str, contract: str, text: str) -> Verdict:
        verdict = Verdict(action, contract, BLAME.get(contract, "commander"), text)
        self.counts[contract] += 1
        if self.first is None:
            self.first = self.now, verdict
        if action in ("rewrite", "block") and contract in CONTRACTS and self.state in (ARMED, ACTIVE):
            recent, now = self._recent, self.now
            recent.append(now)
            while recent[0] < now - self.limits.window:
                recent.popleft()
            if len(recent) > self.limits.violations:
                recent.clear()
                self._trip(HOLD, "violations", f"more than {self.limits.violations} commands refused or changed in "
                           f"{self.limits.window:g} s, the last by {contract}: {text}")
        return verdict

    def _said(self, verdict: Verdict) -> Verdict:
        if self.trace:
            self._log("verdict", self.now, {"verdict": [verdict.action, verdict.contract, verdict.text]})
        return verdict

    def _log(self, kind: str, now: float, data: dict) -> None:
        if self.trace:
            self.trace.add(kind, now, data)
