"""Who may drive an arm: one lease with a name and a deadline, taken and given up on the wire.

Arming, resetting, switching controllers, parameters, the gripper and targets belong to the holder. A claim
under the holder's own name is granted at once, wherever it comes from: the same commander, started again. Any
other is refused by the holder's name until the lease ends. `ArmLease` is the arm's side, `LeaseClient` a
commander's; the words travel on the topics `safety_command` (claim NAME SECONDS, release NAME, arm NAME,
reset NAME), `safety_lease` (latched: "NAME SOURCE", "" for nobody) and `safety_refused` (what was refused,
and why).

A name is no secret: it keeps apart people who mean well, and keeps nobody out who does not.
"""

import math
import re
from collections.abc import Callable

from controllers.transport import Text, Transport
from robo_rl.errors import UserError, in_range

SAFETY_COMMAND, SAFETY_LEASE, SAFETY_REFUSED = "safety_command", "safety_lease", "safety_refused"
LONGEST = 3600.0  # s
NAME = re.compile(r"[\w.@-]{1,64}")


class ArmLease:
    """Of one arm. `now` [s]: the arm's monotonic clock; source: who sent a message, as the arm's transport
    names senders."""

    def __init__(self) -> None:
        self.name, self.source, self.until = "", "", -math.inf

    def holder(self, now: float) -> str:
        """The holder's name; "": nobody's."""
        return self.name if now < self.until else ""

    def claim(self, name: str, source: str, seconds: float, now: float) -> None:
        """Hold it for so many seconds from now on. UserError: another holds it."""
        if not NAME.fullmatch(name):
            raise UserError(f"a lease's name has 1 to 64 letters, digits and . _ @ -, got {name[:70]!r}")
        in_range("a lease's time", seconds, 0, LONGEST, open_low=True)
        if self.holder(now) not in ("", name):
            raise UserError(f"{self.name} holds the arm")
        self.name, self.source, self.until = name, source, now + seconds

    def release(self, name: str, now: float) -> None:
        """Give it up. UserError: another holds it."""
        self.check(now, name=name)
        self.revoke()

    def revoke(self) -> None:
        """End it now."""
        self.until = -math.inf

    def check(self, now: float, source: str = "", name: str = "") -> None:
        """UserError: it is held by nobody, or neither by `name` nor, without one, by `source`."""
        if not self.holder(now):
            raise UserError("nobody holds the arm: claim it first")
        if name != self.name and (name or source != self.source):
            raise UserError(f"{self.name} holds the arm")


def number(text: str) -> float:
    """Seconds as they are said on the wire. UserError: no number."""
    try:
        return float(text)
    except ValueError:
        raise UserError(f"a claim's time is a number of seconds, got {text[:20]!r}") from None


class LeaseClient:
    """A commander's lease on the arm behind `transport`; `renew` often while it drives."""

    def __init__(self, transport: Transport, name: str, seconds: float = 2.0):
        self.transport, self.name, self.seconds = transport, name, seconds
        self.orders = transport.publisher(SAFETY_COMMAND, Text, "command")
        self.told = transport.subscription(SAFETY_LEASE, Text, "latched")
        self.refused = transport.subscription(SAFETY_REFUSED, Text, "command", depth=16)
        self.said_at = -math.inf

    def holder(self) -> str:
        """Who holds the arm, as it says; "": nobody, or nobody knows yet."""
        got = self.told.latest()
        return "" if got is None else got.message.data.partition(" ")[0]

    def ours(self) -> bool:
        """Whether the arm says that we hold it."""
        got = self.told.latest()
        if got is None:
            return False
        name, _, source = got.message.data.partition(" ")
        return name == self.name and (not self.transport.identity or source == self.transport.identity)

    def claim(self, wait: Callable[[Callable[[], bool], float], bool], patience: float = 0.0) -> None:
        """Ask until the arm says that it is ours. wait(condition, seconds) -> whether the condition came
        true. UserError: after `patience` [s], at least one lease's length, another still holds it, or nothing
        answers."""
        end, why = self.transport.now() + max(patience, 1.2 * self.seconds), ""
        while not self.ours():
            if self.transport.now() > end:
                raise UserError(
                    why
                    or "no arm answers the claim of its lease (safety_lease): is it there, in this domain?"
                )
            self.renew(math.inf)
            wait(self.ours, 0.1)
            for refusal in self.refusals():
                if refusal.startswith(f"claim {self.name}: "):
                    why = refusal

    def renew(self, now: float) -> None:
        """Claim again, where a quarter of the time has passed; at once for inf."""
        if now - self.said_at >= 0.25 * self.seconds:
            self.said_at = self.transport.now()
            self.orders.publish(Text(f"claim {self.name} {self.seconds:g}"))

    def order(self, word: str) -> None:
        """arm or reset, in our name."""
        self.orders.publish(Text(f"{word} {self.name}"))

    def release(self) -> None:
        self.orders.publish(Text(f"release {self.name}"))

    def disarm(self) -> None:
        self.orders.publish(Text("disarm"))

    def give_up(self) -> None:
        """Disarm the arm, which is ours, and release it."""
        self.disarm()
        self.release()

    def refusals(self) -> list[str]:
        """What the arm refused since the last call, whoever asked."""
        return [got.message.data for got in self.refused.take()]
