"""The simulated arm on a wire, with the topics of a CRISP robot: it publishes its state and follows what is
commanded.

Beside CRISP's topics: the gripper, the free bodies of the scene as `objects/<name>` (what a camera would
tell), and with a governor `safety_command` (claim, release, arm, disarm, reset, stop: `lease` has their
words), `safety_state`, `safety_lease` (both latched, on change), `safety_refused` and `estop`. A message that
makes no sense is counted with the reason and has no effect: it must not take the arm's loop down. What it
serves is in `manager`.
"""

import math
from collections import Counter
from collections.abc import Callable

from controllers.arm import SimArm, govern
from controllers.arm_commands import GovernedCommands, LawCommands
from controllers.arm_topics import ArmTopics
from controllers.estop import SERVICE, EmergencyStop
from controllers.governor import ACTIVE, ARMED, HOLD, STOPPED, Governor
from controllers.law import vector
from controllers.lease import SAFETY_COMMAND, SAFETY_LEASE, SAFETY_REFUSED, ArmLease, number
from controllers.setpoint import Setpoint
from controllers.transport import Clock, Diagnostics, Flag, Numbers, Received, Text, Transport
from robo_rl.errors import UserError, choose

SAFETY_STATE = "safety_state"
SERVE_EVERY = 10  # ticks between two looks for calls of services
ORDERS = ("arm", "disarm", "reset", "stop")
LEASED = ("arm", "reset")  # orders that belong to the lease's holder; whoever is afraid may disarm and stop
DEPTH = 16  # messages of a command topic in a tick: a stranger's do not hide the holder's
KINDS = 200  # of refusals that are told apart
REFUSED_EVERY = 1.0  # s between two publications of one refusal


class ArmNode:
    """`tick` once per control period: take commands, one tick of the arm, publish. refused: bad messages by
    reason.

    Without a lease, of two publishers on a command topic neither is followed, as CRISP's controller does;
    with one, its holder is.
    """

    def __init__(
        self,
        arm: SimArm,
        transport: Transport,
        governor: Governor | None = None,
        *,
        pose_every: int = 10,
        joints_every: int = 1,
        clock: bool = False,
    ):
        """clock: publish simulated time on `clock`, every millisecond of it. governor: the arm's own, between
        the wire and the law; every target is a command to it, so that nothing passes it.
        pose_every: ticks between two publications of pose, twist, gripper and objects; joints_every: of joint
        states."""
        self.arm, self.transport, self.governor, self.count = arm, transport, governor, 0
        self.said = ""
        self.hardware_active = True  # else nobody arms it
        self.before_governor: list[Callable[[float], None]] = []  # called once a tick with the time
        self.clock = transport.publisher("clock", Clock) if clock else None
        self.diagnostics = transport.publisher("diagnostics", Diagnostics)
        self.published = ArmTopics(arm, transport, self.stamp(), joints_every, pose_every)
        names = arm.robot.topics
        self.refused: Counter[str] = Counter()
        self.on_refusal: Callable[[str], None] = lambda line: None
        # the governor's state and the lease, at each change
        self.on_change: Callable[[str], None] = lambda line: None
        self._told: dict[str, float] = {}  # when a refusal was last published
        self.governed = GovernedCommands(arm, governor, transport) if governor else None
        followed = [*(self.governed or LawCommands(arm)).topics(), (names["gripper"], Numbers, self._grip)]
        if governor is not None:
            self.safety = transport.publisher(SAFETY_STATE, Text, "latched")
            self.leased = transport.publisher(SAFETY_LEASE, Text, "latched")
            self.refusals = transport.publisher(SAFETY_REFUSED, Text, "command")
            # armed_by: the holder for whom it was armed
            self.lease, self.lease_said, self.armed_by = ArmLease(), "?", ""
            followed.append((SAFETY_COMMAND, Text, self._order))
            self.estop = EmergencyStop(transport.subscription(names["estop"], Flag, "latched", depth=64))
        self.commands = [
            (
                transport.subscription(topic, kind, "command", depth=1 if governor is None else DEPTH),
                topic,
                follow,
            )
            for topic, kind, follow in followed
        ]

    def tick(self) -> None:
        """Commands, one tick of the arm, publications."""
        if self.governor is not None:
            self._look_after(self.governor)
        for box, topic, follow in self.commands:
            for got in box.take():
                try:
                    if topic != SAFETY_COMMAND:
                        self._may_command(got.source, topic)
                    follow(got)
                except UserError as e:
                    self.refuse(topic, str(e))
        arm = self.arm
        if self.governor is None:
            arm.tick()
        else:
            now = self.transport.now()
            for command in self.before_governor:
                command(now)
            self.setpoint: Setpoint = govern(arm, self.governor, now)
            if self.governor.state != self.said.split(":")[0]:
                self.said = f"{self.governor.state}: {self.governor.reason}"
                self.safety.publish(Text(self.said))
                self.on_change(self.said.removesuffix(": "))
        self.count += 1
        if self.count % SERVE_EVERY == 0:
            self.transport.serve()
        if self.clock is not None:
            self.clock.publish(Clock(arm.t))
        if self.count % round(1 / arm.dt) == 0:
            self.diagnostics.publish(self._diagnostics())
        self.published.publish(self.stamp(), self.count)

    def stamp(self) -> float:
        """The simulated time where it is published, for those who run on it; else the system's."""
        return self.transport.stamp() if self.clock is None else self.arm.t

    def _diagnostics(self) -> Diagnostics:
        """What /diagnostics says of the arm, once a second."""
        g, lines = self.governor, [("ticks", str(self.count)), ("refused", str(sum(self.refused.values())))]
        if g is None:
            return Diagnostics(self.stamp(), ((0, "arm", "no governor", tuple(lines)),))
        lines += [
            ("state", g.state),
            ("reason", g.reason),
            ("lease", self.lease.holder(self.transport.now())),
            ("e-stop", ", ".join(sorted(g.stopped_by))),
        ]
        lines += [(f"contract {name}", str(n)) for name, n in sorted(g.counts.items())]
        return Diagnostics(
            self.stamp(),
            (({HOLD: 1, STOPPED: 2}.get(g.state, 0), "governor", f"{g.state}: {g.reason}", tuple(lines)),),
        )

    def _grip(self, got: Received) -> None:
        opening = vector("gripper opening", got.message.data, 1)
        if (
            self.governor is None
            or self.governor.state in (ARMED, ACTIVE)
            and self.governor.commander in (None, got.source)
        ):
            self.arm.grip(float(opening[0]))

    # ---- who may -------------------------------------------------------------------------------------------

    def _look_after(self, governor: Governor) -> None:
        """The e-stop and the lease: who let go, whose time is over."""
        now = self.transport.now()
        if self.estop.read(governor, now):
            self.lease.revoke()
        holder = self.lease.holder(now)
        if self.armed_by and holder != self.armed_by:
            if governor.state in (ARMED, ACTIVE):
                governor.hold(now, "lease", f"the lease of {self.armed_by} ended")
            self.armed_by = ""
        said = f"{holder} {self.lease.source}" if holder else ""
        if said != self.lease_said:
            self.lease_said = said
            self.leased.publish(Text(said))
            self.on_change(f"{holder or 'nobody'} holds the arm")

    def _is_holders(self, source: str) -> bool:
        """Whether a source may do what is the lease's holder's: it is who claimed it, or that one has left
        (it was claimed from a shell, for whoever commands)."""
        if source == self.lease.source:
            return True
        there = next(box for box, t, _ in self.commands if t == SAFETY_COMMAND).sources()
        return there is not None and self.lease.source not in there

    def _may_command(self, source: str, topic: str) -> None:
        """UserError: a target or a gripper command of this source is another's to give."""
        if self.governor is not None and (holder := self.lease.holder(self.transport.now())):
            if source == self.lease.source:
                return
            if not self._is_holders(source):
                raise UserError(f"{source} commands while {holder} holds the arm")
        if self.transport.publishers(topic) > 1:
            raise UserError(f"{topic} has more than one publisher")

    def check_asker(self, source: str) -> None:
        """UserError: what the holder of the lease may ask for, `source` asks."""
        if (holder := self.lease.holder(self.transport.now())) and not self._is_holders(source):
            raise UserError(f"{holder} holds the arm")

    def check_change(self) -> None:
        """UserError: controllers, parameters and the scene are the lease's holder's to change, and the caller
        of the service that runs is another."""
        if self.governor is not None:
            self.check_asker(self.transport.caller)

    def refuse(self, topic: str, why: str) -> None:
        """Count a refusal, tell the process's owner of a new one at once, and everybody on the wire once in
        REFUSED_EVERY."""
        line = f"{topic}: {why}"[:300]
        if line not in self.refused and len(self.refused) >= KINDS:
            line = "more kinds of refusals"
        self.refused[line] += 1
        if self.refused[line] == 1:
            self.on_refusal(line)
        if (
            self.governor is not None
            and (now := self.transport.now()) - self._told.get(line, -math.inf) >= REFUSED_EVERY
        ):
            self._told[line] = now
            self.refusals.publish(Text(line))

    def order(self, order: str) -> None:
        """What a person here wants of the governor. UserError: it refuses."""
        getattr(self.governor, choose("safety command", order, ORDERS))(self.transport.now())
        if order == "stop":
            self.lease.revoke()
        self.said = ""  # it is told again, also where nothing changed

    def asked(self, order: str, source: str = "", name: str = "") -> None:
        """What somebody on the wire wants: by the lease's name, or else as who they are. UserError: it is not
        theirs, or refused."""
        if order in LEASED:
            self.lease.check(self.transport.now(), source, name)
        if order == "arm" and not self.hardware_active:
            raise UserError(
                "the hardware is inactive: activate it first "
                "(controller_manager/set_hardware_component_state)"
            )
        self.order(order)
        if order == "arm":
            self.armed_by = self.lease.name

    def _order(self, got: Received) -> None:
        assert self.governor is not None
        order, *words = got.message.data.split() or [""]
        choose("safety command", order, (*ORDERS, "claim", "release"))
        try:
            if order == "claim":
                if len(words) != 2:
                    raise UserError("a claim is: claim NAME SECONDS")
                if self.governor.stopped_by:
                    raise UserError(f"the e-stop says stop ({', '.join(sorted(self.governor.stopped_by))})")
                self.lease.claim(words[0], got.source, number(words[1]), self.transport.now())
            elif order == "release":
                self.lease.release(" ".join(words), self.transport.now())
            else:
                self.asked(order, got.source, " ".join(words))
        except UserError as e:
            self.refuse(" ".join([order, *words[:1]]), str(e))
            if order in ORDERS:
                self.safety.publish(Text(f"{self.governor.state}: refused to {order}: {e}"))

    def estop_service(self, pressed: bool) -> None:
        """Somebody's call: it says stop until a call says that it does not."""
        assert self.governor is not None
        now = self.transport.now()
        if pressed:
            self.governor.stop(now, SERVICE, SERVICE)
            self.lease.revoke()
        else:
            self.governor.let_go(now, SERVICE)
