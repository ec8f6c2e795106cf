"""The last check before the wire: limits, watchdogs, one commander, e-stop. It reads no clock and sends
nothing.

    DISARMED --arm--> ARMED --first good command--> ACTIVE --violation or silence--> HOLD --arm--> ARMED
    any --stop, lost state, silence for `give_up`--> STOPPED --reset--> DISARMED

Nothing but `arm` leads out of HOLD and nothing but `reset` out of STOPPED; neither does while a source of the
e-stop says stop. In HOLD and STOPPED the setpoint brakes from the measured pose and velocity and then stands;
what is commanded there has no effect. A second commander is refused and moves nothing.

A command is judged by the contracts in the order of CONTRACTS; its verdict names the first one that it
violates. Limits of place and step rewrite the command to the nearest one allowed, everything else blocks it;
too many of either within `window` hold the arm. The setpoint moves to the last accepted command within the
limits of speed and acceleration. A command may name joint targets, with the tool pose that they mean as the
receiver's own model has it: both are judged, a place outside blocks it, a step too far is taken part of the
way, and joints and tool move together. Ages are measured on the receiver's monotonic clock, `now`; the
sender's stamps order its messages, and show one that is later or earlier than the fastest since `arm`.
"""

import math
from dataclasses import asdict
from typing import Literal

from controllers.compliance import CommandedCompliance, ComplianceCommand
from controllers.contracts import (
    ALLOW,
    BLAME,
    CONTRACTS,
    Command,
    State,
    Verdict,
    Violations,
    allowed_joints,
    arming_fault,
    fields_of,
    least_delay,
    measured_fault,
    nearest_allowed,
    state_fault,
)
from controllers.limits import Limits
from controllers.robot import Robot
from controllers.setpoint import Setpoint, SetpointMotion, traced
from controllers.trace import Trace
from robo_rl.errors import UserError
from robo_rl.geometry import unit

DISARMED, ARMED, ACTIVE, HOLD, STOPPED = "DISARMED", "ARMED", "ACTIVE", "HOLD", "STOPPED"
# why a command has no effect there
UNTOLD = {DISARMED: "not armed", ARMED: "nobody commands it yet", HOLD: "", STOPPED: ""}
# towards `violations`: a stranger holds nobody's arm
COUNTED = tuple(c for c in CONTRACTS if c != "commander")


class Governor:
    """One owner of the state machine. Every method takes `now` [s], monotonic; `tick` once per period.

    counts: how often each contract was violated (`violations` has the first of all). motion: the setpoint's.
    """

    def __init__(self, limits: Limits, robot: Robot, trace: Trace | None = None):
        self.limits, self.robot, self.trace = limits, robot, trace
        self.state = DISARMED
        self.violations = Violations(limits)
        self.counts = self.violations.counts
        self.reason = ""
        self.measured: State | None = None
        self.now = self._state_at = self._command_at = self._changed_at = -math.inf
        self.motion, self.compliance = SetpointMotion(limits, robot), CommandedCompliance(limits)
        self.commander: str | None = None
        self._refusal = ""  # why the commander's last command had no effect; "" where it had
        self.stopped_by: set[str] = set()  # sources of the e-stop that say stop
        # source, stream -> (last stamp, least delay)
        self._stamps: dict[tuple[str, str], tuple[float, float]] = {}
        self._rebased = False
        if trace:
            trace.add("config", 0.0, {"limits": asdict(limits), "robot": robot.name})

    # ---- people --------------------------------------------------------------------------------------------

    def arm(self, now: float) -> None:
        """Allow commands. UserError says why not."""
        self._begin("arm", now)
        self._no_stop()
        if self.state == STOPPED:
            raise UserError(f"stopped ({self.reason}): reset first, then arm")
        if self.state in (ARMED, ACTIVE):
            raise UserError(f"already {self.state}")
        m = self.measured
        if m is None or now - self._state_at > self.limits.state_timeout:
            raise UserError(f"cannot arm: no measured state for {self.limits.state_timeout:g} s")
        if fault := arming_fault(m, self.limits):
            raise UserError(f"cannot arm: {fault}")
        self.motion.stand(m)
        self.commander = None
        self._stamps.clear()
        self.violations.forgive()
        self._rebased = True
        self._go(ARMED, now, "")

    def disarm(self, now: float) -> None:
        """Take no more commands; STOPPED stays."""
        self._begin("disarm", now)
        if self.state in (ARMED, ACTIVE):
            self._rest()
        if self.state != STOPPED:
            self._go(DISARMED, now, "disarmed")

    def stop(self, now: float, reason: str = "e-stop", source: str = "") -> Verdict:
        """Emergency stop, from anyone, at any time. It latches; of a `source`, nothing arms until that lets
        go."""
        self._begin("stop", now, {"reason": reason, "source": source})
        if source:
            self.stopped_by.add(source)
        return self._trip(STOPPED, "estop", reason)

    def let_go(self, now: float, source: str) -> None:
        """A source of the e-stop no longer says stop; STOPPED stays."""
        self._begin("let_go", now, {"source": source})
        self.stopped_by.discard(source)

    def hold(self, now: float, contract: str, reason: str) -> Verdict:
        """Brake and stand until somebody arms, for a reason outside: whoever drove gave up."""
        self._begin("hold", now, {"contract": contract, "reason": reason})
        return self._trip(HOLD, contract, reason)

    def finish(self, now: float) -> None:
        """Whoever commanded is done: brake, stand there ARMED, and follow the next that commands."""
        if self.state != ACTIVE:
            return
        self._begin("finish", now)
        if self.state == ACTIVE:
            self.motion.drop_joints()
            self.commander = None
            self._go(ARMED, now, "")

    def rebase(self, now: float) -> None:
        """Another law takes the armed arm, at rest: stand where it is measured and follow the next that
        commands. UserError: it moves."""
        self._begin("rebase", now)
        if self.state not in (ARMED, ACTIVE):
            return
        if self.measured is not None and (fault := arming_fault(self.measured, self.limits)):
            raise UserError(f"the arm is {self.state} and {fault}")
        self.finish(now)
        self._rest()
        self.motion.stay()

    def reset(self, now: float) -> None:
        """Out of STOPPED, to DISARMED."""
        self._begin("reset", now)
        self._no_stop()
        if self.state != STOPPED:
            raise UserError(f"nothing to reset: {self.state}")
        self._go(DISARMED, now, "reset")

    def moved(self, now: float) -> None:
        """Someone put the disarmed arm elsewhere: where it braked before is nothing to it."""
        self._begin("moved", now)
        if self.state == DISARMED:
            self.motion.forget()

    def measure(self, state: State, now: float) -> Verdict:
        """A measured state came in."""
        if self.trace:
            self._log("state", now, fields_of(state))
        self._clock(now)
        if unusable := state_fault(state, len(self.robot.joints)):
            return self._count("block", *unusable)
        self.measured, self._state_at = state, now
        if self._rebased and self.state not in (ARMED, ACTIVE):  # braking goes on from the latest
            self._rest()
        if self.state not in (ARMED, ACTIVE):
            return ALLOW
        broken = measured_fault(state, self.limits, self.robot)
        return self._trip(HOLD, *broken) if broken else ALLOW

    def command(self, c: Command, now: float) -> Verdict:
        """A command came in."""
        if refused := self._refused("command", c, now, (ARMED, ACTIVE)):
            return refused
        m = self.motion
        verdict, pos, quat = nearest_allowed(tuple(c.pos), unit(tuple(c.quat)), m.target, self.limits)
        if c.joints:
            assert self.measured is not None  # `arm` needs one
            at = m.joint_target if m.joint_target is not None else self.measured.q
            verdict, joints = allowed_joints(c, verdict, at, m.target, self.limits, self.robot)
            if verdict.action == "block":
                return self._said(self._count("block", verdict.contract, verdict.text))
            m.aim_joints((pos, quat), joints, self.measured.q)
        else:
            m.aim((pos, quat))
        return self._followed(verdict, now)

    def comply(self, c: ComplianceCommand, now: float) -> Verdict:
        """A wrench came in, a command as any other, or a stiffness, of whoever commands already."""
        if refused := self._refused("comply", c, now, (ARMED, ACTIVE) if c.stream == "wrench" else (ACTIVE,)):
            return refused
        assert self.measured is not None  # `arm` needs one
        return self._followed(self.compliance.take(c, unit(self.measured.quat), now), now)

    def _followed(self, verdict: Verdict, now: float) -> Verdict:
        """After a command that has its effect, whole or in part."""
        if self.state == ARMED:
            self._go(ACTIVE, now, "")
        if verdict is not ALLOW:
            self._count("rewrite", verdict.contract, verdict.text)
        return self._said(verdict)

    def _refused(
        self, kind: str, c: Command | ComplianceCommand, now: float, states: tuple[str, ...]
    ) -> Verdict | None:
        """The verdict on a command that has no effect; None: its source is the commander, and is heard of
        now."""
        if self.trace:
            self._log(kind, now, fields_of(c))
        self._clock(now)
        if self.state not in states:
            return self._said(
                Verdict("block", "state", "commander", f"{self.state}: {self.reason or UNTOLD[self.state]}")
            )
        key = c.source, c.stream
        stamps = self._stamps.get(key)
        if broken := c.fault(now, self.limits, self.robot, self.commander, stamps):
            if c.source == self.commander:
                self._refusal = f"; the last one was refused: {broken[1]}"
            return self._said(self._count("block", *broken))
        if c.stamp is not None:
            self._stamps[key] = c.stamp, least_delay(stamps, c.stamp, now)
        if c.stream != "stiffness":
            self.commander, self._command_at, self._refusal = c.source, now, ""
        return None

    def tick(self, now: float, dt: float) -> Setpoint:
        """The setpoint for the period of dt [s] that begins now."""
        o = self.limits
        self._clock(now)
        if self.state in (ARMED, ACTIVE, HOLD) and now - self._state_at > o.state_timeout:
            self._trip(STOPPED, "state_age", f"no measured state for {now - self._state_at:.3f} s")
        if self.state == ACTIVE:
            assert self.measured is not None  # since `arm`
            if now - self._command_at > o.command_timeout:
                silent = f"no command for {now - self._command_at:.3f} s"
                self._trip(HOLD, "command_age", silent + self._refusal)
            elif apart := self.motion.tracking_fault(self.measured, now):
                self._trip(HOLD, "tracking", apart)
        elif self.state == HOLD and now - self._changed_at > o.give_up:
            self._trip(
                STOPPED,
                "command_age" if "command" in self.reason else "violations",
                f"held for {o.give_up:g} s after: {self.reason}",
            )
        m = self.motion
        if self.state == ACTIVE:
            m.pursue(dt)
        else:
            m.brake(dt, ends=self.state == DISARMED, aims=self.state == ARMED)
        m.advance(dt)
        self.compliance.ramp(now, dt, self.state == ACTIVE)
        out = Setpoint(
            self.state,
            m.pos,
            m.quat,
            self._rebased,
            m.joints if self.state == ACTIVE else None,
            self.compliance.now(),
        )
        self._rebased = False
        if self.trace:
            self._log("tick", now, {"dt": dt, "out": traced(out, self.reason)})
        return out

    # ---- inside --------------------------------------------------------------------------------------------

    def _begin(self, kind: str, now: float, data: dict | None = None) -> None:
        """What every input begins with: the trace, then the clock."""
        self._log(kind, now, data or {})
        self._clock(now)

    def _clock(self, now: float) -> None:
        if not now >= self.now:  # NaN too
            self._trip(STOPPED, "clock", f"time went from {self.now:.4f} s to {now:.4f} s")
        else:
            self.now = now

    def _no_stop(self) -> None:
        if self.stopped_by:
            raise UserError(
                f"the e-stop says stop ({', '.join(sorted(self.stopped_by))}): it must let go first"
            )

    def _go(self, state: str, now: float, reason: str) -> None:
        self.state, self.reason, self._changed_at = state, reason, now

    def _rest(self) -> None:
        """Let the setpoint go on from where the arm is measured, braking; not from a state that is too old.
        No wrench, no stiffness."""
        self.compliance.drop()
        if self.measured is not None and self.now - self._state_at <= self.limits.state_timeout:
            self.motion.brake_from(self.measured)
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

    def _count(
        self, action: Literal["rewrite", "block", "hold", "stop"], contract: str, text: str
    ) -> Verdict:
        verdict = Verdict(action, contract, BLAME.get(contract, "commander"), text)
        changed = action in ("rewrite", "block") and contract in COUNTED and self.state in (ARMED, ACTIVE)
        if too_often := self.violations.add(verdict, self.now, changed):
            self._trip(HOLD, "violations", too_often)
        return verdict

    def _said(self, verdict: Verdict) -> Verdict:
        self._log("verdict", self.now, {"verdict": [verdict.action, verdict.contract, verdict.text]})
        return verdict

    def _log(self, kind: str, now: float, data: dict) -> None:
        if self.trace:
            self.trace.add(kind, now, data)
