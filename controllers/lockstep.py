"""The governed arm and the bridge on one in-process wire, in lockstep on simulated time: no wall clock, no thread."""

from collections.abc import Callable
from typing import Any

import numpy as np

from controllers.arm import SimArm
from controllers.bridge import Bridge, Task, Thinker
from controllers.governor import Governor, Limits
from controllers.law import LawOptions
from controllers.model import ArmModel
from controllers.node import SAFETY_COMMAND, ArmNode
from controllers.robot import Robot
from controllers.transport import Bus, Loop, Text, Transport, Weather

SETTLE = 0.02  # s of simulated time before an episode, for the first messages


class Lockstep:
    """One arm in its scene, commanded over a wire: a body for an env, or for a deployment without real time."""

    def __init__(self, robot: Robot, task: Task, path: str, law: LawOptions, limits: Limits, model: ArmModel,
                 weather: Weather | None = None, dry_run: bool = False, servo: bool = False,
                 wired: Callable[[Transport], Transport] = lambda wire: wire, joints: bool = False):
        """path: the scene as MJCF; model: the bridge's own; limits: of the bridge's governor and of the arm's; wired: what
        the bridge's transport is wrapped in; joints: it commands joint targets."""
        self.arm, self.robot, self.task, self.model = SimArm(robot, law, path=path, servo=servo), robot, task, model
        self.limits, self.weather, self.dry_run = limits, weather, dry_run
        self.ticks = round(task.period / self.arm.dt)
        self.wired, self.joints = wired, joints
        self.eyes: Callable[[Bus], Any] | None = None  # cameras for the bus of an episode: publish() draws and sends
        self.seeing: Any = None

    def begin(self, joints: np.ndarray, objects: dict) -> None:
        """A new episode on a new wire: both governors armed, the arm at rest."""
        self.arm.reset(joints, objects, opening=1.0)
        self.bus = Bus(lambda: self.arm.t, self.weather)
        self.governor = Governor(self.limits, self.robot)
        self.node = ArmNode(self.arm, Loop(self.bus, "arm"), self.governor, pose_every=self.ticks, joints_every=self.ticks)
        wire = self.wire = self.wired(Loop(self.bus, "bridge"))
        self.close()
        self.seeing = self.eyes(self.bus) if self.eyes else None
        self.bridge = Bridge(self.robot, self.task, wire, self.model, self.limits, dry_run=self.dry_run,
                             joints=self.joints)
        self.order = wire.publisher(SAFETY_COMMAND, Text, "command")
        for _ in range(10):
            self.run()
            self.look()
            if not self.bridge.senses.missing():
                break
        if not self.dry_run:
            self.order.publish(Text("arm"))
        self.run()
        self.bridge.begin(self.arm.t)

    def look(self) -> None:
        """Let the cameras send what they see now."""
        if self.seeing is not None:
            self.seeing.publish()

    def close(self) -> None:
        """Let the cameras go."""
        if self.seeing is not None:
            self.seeing.close()
            self.seeing = None

    def run(self) -> None:
        """One control period of the arm."""
        for _ in range(self.ticks):
            self.node.tick()

    def act(self, action: np.ndarray) -> None:
        """One action, executed."""
        self.bridge.act(action, self.arm.t)
        self.run()
        for _ in range(self.bridge.slow - 1):
            self.bridge.measure(self.arm.t)
            self.bridge.go_on(self.arm.t)
            self.run()
        self.bridge.measure(self.arm.t)

    def tick(self, thinker: Thinker) -> None:
        """One period of the whole bridge, with its schedule and a policy."""
        self.bridge.tick(thinker, self.arm.t)
        self.run()

    def state(self) -> np.ndarray:
        return self.bridge.observation()

    def pictures(self) -> dict[str, np.ndarray]:
        """What the cameras see now."""
        self.look()
        return self.bridge.senses.pictures()

    def tool(self) -> np.ndarray:
        return np.array(self.model.pos)

    def opening(self) -> float:
        return self.bridge.senses.opening

    def object(self, name: str) -> np.ndarray:
        return np.array(self.bridge.senses.poses[name].pos)
