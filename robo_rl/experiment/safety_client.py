"""What a process that drives an arm asks of the arm's own governor, and of a simulated arm's scene."""

import time
from collections.abc import Callable

from robo_rl.errors import UserError

WAIT = 5.0  # s for the arm's topics


class SafetyClient:
    """Orders to the arm's own governor. state: subscription of what it says; lease: on the arm; stop: not
    empty once the user asked for the end; sleep(seconds): lets time pass."""

    def __init__(self, wire, state, lease, stop: list[int], sleep: Callable[[float], None] = time.sleep):
        self.wire, self.state, self.lease, self.stop, self.sleep = wire, state, lease, stop, sleep

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether the condition becomes true within `seconds`, or before the user asks for the end."""
        end = self.wire.now() + seconds
        while not (done := condition()) and self.wire.now() < end and not self.stop:
            self.sleep(0.01)
        return done

    def is_governed(self) -> bool:
        """Whether the arm has a governor of its own, which says its state; a busy machine may be slow to
        tell. UserError: it has one, which says nothing."""
        from controllers.node import SAFETY_STATE

        if self.wait_until(self._has_said, 1.0) or not self.wire.publishers(SAFETY_STATE):
            return self._has_said()
        if not self.wait_until(self._has_said, WAIT) and not self.stop:
            raise UserError(f"the arm's governor says nothing on {SAFETY_STATE}: does it still run?")
        return self._has_said()

    def _has_said(self) -> bool:
        return self.state.latest() is not None

    def says(self, *states: str) -> bool:
        """Whether the governor's last state is one of these."""
        return self.state.latest().message.data.startswith(states)

    def order(self, word: str, becomes: str) -> None:
        """Send an order until the governor is in the state that it leads to. UserError: it is not."""
        for _ in range(10):
            self.lease.renew(self.wire.now())
            self.lease.order(word)
            if self.wait_until(lambda: self.says(becomes), 0.2):
                return
        raise UserError(
            f"the arm does not {word}: it says {self.state.latest().message.data!r}. "
            "STOPPED needs --reset, after a look at why"
        )

    def claim(self, log: Callable[[str], None] = lambda line: None) -> None:
        """Take the lease; log: is told who holds the arm, where that is another. UserError: that one keeps
        it. KeyboardInterrupt: the user asks for the end meanwhile."""
        self.wait_until(lambda: self.lease.told.latest() is not None, 0.2)
        if (holder := self.lease.holder()) not in ("", self.lease.name):
            log(
                f"{holder} holds the arm: waiting up to {1.2 * self.lease.seconds:.3g} s for its lease to end"
            )

        def wait(condition: Callable[[], bool], seconds: float) -> bool:
            done = self.wait_until(condition, seconds)
            if self.stop:
                raise KeyboardInterrupt
            return done

        self.lease.claim(wait)

    def give_up(self) -> None:
        """Disarm the arm and give up its lease, while that is ours: another's motion goes on."""
        if self.lease.ours():
            self.lease.give_up()
            self.sleep(0.1)  # until it is on its way

    def arm(self, reset: bool, start: int, log: Callable[[str], None] = lambda line: None) -> None:
        """Take the lease and arm the governor; reset: first out of STOPPED; start: reset a simulated arm's
        scene to it, -1: leave it; log: as of `claim`."""
        self.claim(log)
        if reset and self.says("STOPPED"):
            self.order("reset", "DISARMED")
        if start >= 0:
            reset_scene(self.wire, start)
        if not self.says("ARMED", "ACTIVE"):
            self.order("arm", "ARMED")


def reset_scene(wire, start: int) -> None:
    """Reset the scene of a simulated arm to a start. UserError: it is no simulated arm, or it is
    commanded."""
    from controllers.services import parameter

    [result] = wire.call(
        "sim_arm/set_parameters",
        "rcl_interfaces/srv/SetParameters",
        {"parameters": [{"name": "start", "value": parameter(start)}]},
        WAIT,
    )["results"]
    if not result["successful"]:
        raise UserError(f"--start {start}: {result['reason']}")
    time.sleep(0.1)  # the arm's new state is on its way
