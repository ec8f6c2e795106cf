"""What stands above the governors of two arms: they are held together, and they stay apart. It reads no clock
and sends nothing.

`couple` runs once per period, before the set points are made:

    one arm goes to HOLD or STOPPED                   -> so does the other
    one arm is told to move, the other is not armed   -> HOLD
    a source of the e-stop says stop to one arm       -> it says so to the other, until it lets go
    least room (`capsules.least_room`) < clearance    -> HOLD of both

The room between two links is their distance less what both need to stop, at the speeds at which they are
measured to come nearer. Both brake therefore before the distance is below the clearance. Only who goes
towards the other arm is held for it: apart they may go, unless they are nearer than the clearance by more
than GRACE.
"""

import math
from collections import Counter

from controllers.capsules import LinkCapsules, least_room
from controllers.estop import OTHER_ARM
from controllers.governor import ACTIVE, ARMED, DISARMED, HOLD, STOPPED, Governor
from robo_rl.errors import UserError

BRAKE_SHARE = 0.5  # of the governors' deceleration of the tool, for that of any point of a link
# s that an arm goes on at its speed before it brakes, with joints as soft as those of a simulator
LAG = 0.075
GRACE = 0.002  # m below the clearance, where arms that stand may be armed, to go apart
TOLERANCE = 0.005  # m below the clearance that no command brings them to
WORST = {STOPPED: 3, HOLD: 2, DISARMED: 1, ARMED: 0, ACTIVE: 0}


class Separation:
    """How near two arms are. clearance [m]; period [s]: between two looks. distance, least [m]: at the last
    look, and of all."""

    def __init__(self, capsules: "list[LinkCapsules]", clearance: float, period: float):
        self.capsules, self.clearance, self.reaction = capsules, clearance, LAG + 2 * period
        self.distance = self.least = math.inf

    def fault(self, brakes: "list[float]") -> str:
        """Why both must brake; "" where they need not. brakes [m/s^2]: of the arms' governors. The models
        hold the measured state."""
        for one in self.capsules:
            one.place()
        a, b = self.capsules
        room, self.distance, _, _ = least_room(
            a.ends,
            a.speeds,
            a.radii,
            b.ends,
            b.speeds,
            b.radii,
            BRAKE_SHARE * brakes[0],
            BRAKE_SHARE * brakes[1],
            self.reaction,
            GRACE,
        )
        self.least = min(self.least, self.distance)
        if room >= self.clearance:
            return ""
        if self.distance < self.clearance - GRACE:
            return (
                f"the arms are {1000 * self.distance:.0f} mm apart, allowed {1000 * self.clearance:.0f} "
                "mm: move one away by hand"
            )
        return (
            f"the arms are {1000 * self.distance:.0f} mm apart and come nearer, allowed "
            f"{1000 * self.clearance:.0f} mm"
        )


class PairGovernor:
    """Two governors by their arms' names. separation: None where the pair's file says why there is no
    clearance; every: calls of `couple` between two looks at it."""

    def __init__(self, governors: dict[str, Governor], separation: Separation | None, every: int = 1):
        self.governors, self.separation, self.every, self.count = governors, separation, every, 0
        (a, left), (b, right) = governors.items()
        self._each = ((a, left, right), (b, right, left))
        self._seen = {name: g.state for name, g in governors.items()}

    @property
    def state(self) -> str:
        """The worse of both; of two that follow commands or wait for them, ACTIVE where one is."""
        states = [g.state for g in self.governors.values()]
        worst = max(states, key=lambda s: WORST[s])
        return ACTIVE if ACTIVE in states and WORST[worst] == 0 else worst

    @property
    def stopped_by(self) -> set[str]:
        """Sources of either arm's e-stop that say stop."""
        return set().union(*(g.stopped_by for g in self.governors.values())) - {OTHER_ARM}

    @property
    def reason(self) -> str:
        """Of the arm that was held first, with its name."""
        worst = [(n, g) for n, g in self.governors.items() if g.state == self.state and g.reason]
        own = [
            (n, g)
            for n, g in worst
            if not g.reason.startswith(tuple(f"{other} arm: " for other in self.governors))
        ] or worst
        return f"{own[0][0]} arm: {own[0][1].reason}" if own else ""

    @property
    def counts(self) -> Counter[str]:
        out: Counter[str] = Counter()
        for g in self.governors.values():
            out.update(g.counts)
        return out

    def arm(self, now: float) -> None:
        """Arm both, or neither. UserError says why not."""
        armed: list[Governor] = []
        for name, g in self.governors.items():
            try:
                g.arm(now)
            except UserError as e:
                for other in armed:
                    other.disarm(now)
                raise UserError(f"{name} arm: {e}") from None
            armed.append(g)
        self.couple(now)
        if self.state not in (ARMED, ACTIVE):
            raise UserError(self.reason)

    def disarm(self, now: float) -> None:
        for g in self.governors.values():
            g.disarm(now)

    def couple(self, now: float) -> None:
        """Look at both and hold what must be held; every governor has its newest measured state."""
        changed = any(g.state != self._seen[name] for name, g in self.governors.items())
        for name, other, mine in self._each:
            self._bring_estop(name, other, mine, now)
            state, reason = other.state, f"{name} arm: {other.reason or other.state}"
            if state != self._seen[name]:
                self._seen[name] = state
                if state == STOPPED and mine.state != STOPPED:
                    mine.stop(now, reason)
                elif state == HOLD and mine.state in (ARMED, ACTIVE):
                    mine.hold(now, "pair", reason)
            if mine.state == ACTIVE and other.state not in (ARMED, ACTIVE):
                mine.hold(now, "pair", reason)
        self._separate(now, changed)

    def _separate(self, now: float, changed: bool) -> None:
        """Hold both where they come too near; at once where a state changed."""
        self.count += 1
        moving = any(g.state in (ARMED, ACTIVE) for g in self.governors.values())
        if self.separation is None or not moving or self.count % self.every and not changed:
            return
        if fault := self.separation.fault([g.limits.brake[0] for g in self.governors.values()]):
            for g in self.governors.values():
                if g.state in (ARMED, ACTIVE):
                    g.hold(now, "clearance", fault)

    def _bring_estop(self, name: str, other: Governor, mine: Governor, now: float) -> None:
        """The e-stop of `other` is a level for this arm too."""
        pressed = other.stopped_by - {OTHER_ARM}
        if pressed and OTHER_ARM not in mine.stopped_by:
            mine.stop(now, f"{name} arm: e-stop", OTHER_ARM)
        elif not pressed and OTHER_ARM in mine.stopped_by:
            mine.let_go(now, OTHER_ARM)
