"""The e-stop as a level: an arm is stopped while any source says so, and stays STOPPED after the last one has
let go.

A source is a publisher of the topic `estop`; its last message counts. One that has left the graph says
nothing any more, but only `reset` leads out of STOPPED. A transport that names all publishers of a topic at
once, as a+b (rclpy), cannot say who let go: there a release counts when it has one sender alone.
"""

from typing import Protocol

from controllers.transport import Mailbox

SERVICE = "the estop service"  # as a source: it has no publisher
OTHER_ARM = "the other arm"  # neither has the e-stop of an arm's companion, which `pair_governor` brings


class Stoppable(Protocol):
    """What is stopped while any source says so: a governor."""

    @property
    def stopped_by(self) -> set[str]: ...

    def stop(self, now: float, reason: str, source: str, /) -> object: ...

    def let_go(self, now: float, source: str, /) -> None: ...


class StopSources:
    """The sources that say stop, of what has no governor."""

    def __init__(self) -> None:
        self.stopped_by: set[str] = set()

    def stop(self, now: float, reason: str, source: str) -> None:
        self.stopped_by.add(source)

    def let_go(self, now: float, source: str) -> None:
        self.stopped_by.discard(source)


class EmergencyStop:
    """Reads the topic `estop` for a governor. box: its subscription, latched, deep enough for every
    publisher."""

    def __init__(self, box: Mailbox):
        self.box = box

    def read(self, governor: Stoppable, now: float) -> bool:
        """Tell the governor who stops the arm and who lets go -> whether somebody newly says stop."""
        new = False
        for got in self.box.take():
            names = got.source.split("+")
            if got.message.data:
                new |= not set(names) <= governor.stopped_by
                for name in names:
                    governor.stop(now, "e-stop topic", name)
            elif len(names) == 1:
                governor.let_go(now, names[0])
        if governor.stopped_by and (there := self.box.sources()) is not None:
            for name in governor.stopped_by - there - {SERVICE, OTHER_ARM}:
                governor.let_go(now, name)
        return new
