"""An arm on the wire as a body for an env, in real time: what a policy does takes the time that it takes.

It drives `robo_rl sim-arm`, whose scene a service places; both governors are armed anew for every episode.
Between two actions the arm goes on to the last target, as it does under a slow policy.
"""

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from controllers.bridge import Bridge, PolicyInterface
from controllers.governor import Governor
from controllers.lease import LeaseClient
from controllers.limits import Limits
from controllers.manager import placement
from controllers.model import ArmModel
from controllers.node import SAFETY_STATE
from controllers.robot import Robot
from controllers.services import parameter
from controllers.transport import Text, Transport
from robo_rl.errors import UserError

LEASE = 5.0  # s of the arm's lease, renewed at every action
NEAR = 0.02  # rad; the joints are there
FIRST_PICTURE = 30.0  # s that a camera may take to show a scene: it starts, or shares a busy machine
NOT_SHOWN = "the joints, objects or pictures of the placed scene did not come"
PICTURED = 0.1  # s after the joints are there, from which on pictures show it

_numbers = itertools.count(1)


class LiveArm:
    """One arm over a transport. late: periods in which the next action came after its time; stops: why a
    governor held."""

    def __init__(
        self,
        robot: Robot,
        task: PolicyInterface,
        transport: Transport,
        model: ArmModel,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wait: float = 5.0,
        command: str = "pose",
    ):
        self.transport, self.task, self.limits, self.robot = transport, task, limits, robot
        self.clock, self.sleep, self.wait = clock, sleep, wait
        self.bridge = Bridge(robot, task, transport, model, limits, command=command)
        self.safety = transport.subscription(SAFETY_STATE, Text, "latched", depth=8)
        self.lease = LeaseClient(transport, f"env-{os.getpid()}-{next(_numbers)}", LEASE)
        self.late, self.steps, self.stops, self.due = 0, 0, [], 0.0
        # s that an action came after its period began, of the newest
        self.lateness: deque[float] = deque(maxlen=100_000)

    def begin(self, joints: np.ndarray, objects: dict) -> None:
        """Place the scene, arm both governors. UserError: there is no simulated arm, another drives it, or it
        refuses."""
        self.end()
        self.take()
        row = tuple(placement(joints, objects))
        [said] = self.transport.call(
            "sim_arm/set_parameters",
            "rcl_interfaces/srv/SetParameters",
            {"parameters": [{"name": "placement", "value": parameter(row)}]},
            self.wait,
        )["results"]
        if not said["successful"]:
            raise UserError(f"the arm cannot be placed: {said['reason']}")
        placed = self.clock()
        buffer, goal = self.bridge.observation_buffer, np.asarray(joints, float)
        self.until(
            lambda: not buffer.missing() and self.there(placed, goal, objects),
            lambda: f"nothing came on {', '.join(buffer.missing())}" if buffer.missing() else NOT_SHOWN,
            max(self.wait, FIRST_PICTURE) if buffer.cameras else self.wait,
        )
        self.order("arm")
        self.bridge.governor = Governor(self.limits, self.robot)
        self.until(lambda: self.bridge.measure(self.clock()), lambda: "no joint states")
        self.bridge.begin(self.clock(), leased=True)
        self.safety.take()  # what was said until now is not about this episode
        self.due = self.clock()

    def take(self) -> None:
        """Take the arm's lease, then disarm it: an arm that another drives goes on. UserError: it does, or
        there is no arm."""
        self.lease.claim(self.wait_for)
        self.order("disarm")

    def leave(self) -> None:
        """Disarm the arm and give up its lease, where that is ours."""
        if self.lease.ours():
            self.lease.give_up()
            self.wait_for(lambda: not self.lease.ours(), 0.1)

    def there(self, placed: float, joints: np.ndarray, objects: dict) -> bool:
        """Whether what is measured is from after the scene was placed."""
        boxes = [
            self.bridge.observation_buffer.joints,
            *self.bridge.observation_buffer.bodies.values(),
            self.bridge.observation_buffer.gripper,
        ]
        new = [g for b in boxes if (g := b.latest()) is not None and g.at >= placed]
        if len(new) < len(boxes) or new[-1].message.position[0] < 0.95:
            return False
        pictures = [b.latest() for b in self.bridge.observation_buffer.cameras.values()]
        if any(g is None or g.at < placed + PICTURED for g in pictures):
            return False
        near = all(
            math.dist(g.message.pos, objects[n][0]) < 0.01
            for n, g in zip(self.bridge.observation_buffer.bodies, new[1:-1], strict=True)
        )
        return (
            near and float(np.abs(np.subtract(new[0].message.position[: len(joints)], joints)).max()) < NEAR
        )

    def act(self, action: np.ndarray) -> None:
        """One action, executed for the time it takes: one period, several where the arm is slow."""
        self.period(lambda now: self.bridge.act(action, now))
        for _ in range(self.bridge.slow - 1):
            self.period(self.bridge.go_on)
        self.steps += 1

    def period(self, do: Callable[[float], None]) -> None:
        """One period of real time that begins with do(now)."""
        now, period = self.clock(), self.task.period
        self.lateness.append(now - self.due)
        if now - self.due > period:  # the policy took longer than there was: the clock goes on from here
            self.late += 1
            self.due = now
        self.bridge.measure(now)
        self.lease.renew(now)
        do(now)
        self.due += period
        if (left := self.due - self.clock()) > 0:
            self.sleep(left)
        self.bridge.measure(self.clock())

    def rest(self) -> None:
        """Disarm the arm at once: what comes next (results, a learner's update) may take longer than the
        silence after which its governor stops for good."""
        self.lease.disarm()

    def state(self) -> np.ndarray:
        return self.bridge.observation()

    def pictures(self) -> dict[str, np.ndarray]:
        """The newest picture of each camera on the wire."""
        return self.bridge.observation_buffer.pictures()

    def tool(self) -> np.ndarray:
        return np.array(self.bridge.model.pos)

    def opening(self) -> float:
        return self.bridge.observation_buffer.opening

    def object(self, name: str) -> np.ndarray:
        return np.array(self.bridge.observation_buffer.poses[name].pos)

    def end(self) -> None:
        """Note why the last episode was held, if it was."""
        g = self.bridge.governor
        arms = [s for s in self.safety.take() if s.message.data.startswith(("HOLD", "STOPPED"))]
        if g.state in ("HOLD", "STOPPED"):
            self.stops.append(f"bridge: {g.reason}")
        elif arms and self.steps:
            self.stops.append(f"arm: {arms[0].message.data}")

    def order(self, word: str) -> None:
        """An order to the arm's governor; out of STOPPED by a reset, for this is a simulated arm."""
        reply = self.transport.call(f"safety/{word}", "std_srvs/srv/Trigger", {}, self.wait)
        if "STOPPED" in reply["message"] and word != "stop":
            self.lease.claim(self.wait_for)
            self.transport.call("safety/reset", "std_srvs/srv/Trigger", {}, self.wait)
            reply = self.transport.call(f"safety/{word}", "std_srvs/srv/Trigger", {}, self.wait)
        if not reply["success"]:
            raise UserError(f"the arm does not {word}: {reply['message']}")

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether the condition comes true within `seconds`."""
        end = self.clock() + seconds
        while not (true := condition()) and self.clock() < end:
            self.sleep(0.002)
        return true

    def until(
        self, condition: Callable[[], bool], what: Callable[[], str], seconds: float | None = None
    ) -> None:
        """Wait, with the arm's lease kept. UserError: the condition is not true within `seconds` (None:
        `wait`); what() says what is missing then."""
        seconds = self.wait if seconds is None else seconds

        def kept() -> bool:
            if condition():
                return True
            self.lease.renew(self.clock())
            return False

        if not self.wait_for(kept, seconds):
            raise UserError(
                f"{what()} within {seconds:g} s: is robo_rl sim-arm there, in this domain? "
                + " ".join(self.transport.complaints())
            )
