"""The governed arm and the bridge on one in-process wire, in lockstep on simulated time: no wall clock, no
thread."""

from collections.abc import Callable
from typing import Any

import numpy as np

from controllers.arm import SimArm
from controllers.bridge import Bridge, PolicyInterface
from controllers.data_interface import DataInterface
from controllers.governor import Governor
from controllers.law import LawOptions
from controllers.lease import LONGEST, SAFETY_COMMAND
from controllers.limits import Limits
from controllers.model import ArmModel
from controllers.node import ArmNode
from controllers.policy_client import PolicyClient
from controllers.robot import Robot
from controllers.supervisor import Supervisor, supervised
from controllers.transport import Bus, LoopbackTransport, NetworkConditions, Text, Transport

SETTLE = 0.02  # s of simulated time before an episode, for the first messages


class LockstepArm:
    """One arm in its scene, commanded over an in-process transport: a body for an env, or for a deployment
    without real time."""

    def __init__(
        self,
        robot: Robot,
        task: PolicyInterface | DataInterface,
        path: str,
        law: LawOptions,
        limits: Limits,
        model: ArmModel,
        conditions: NetworkConditions | None = None,
        dry_run: bool = False,
        servo: bool = False,
        wrap_transport: Callable[[Transport], Transport] = lambda wire: wire,
        command: str = "pose",
    ):
        """path: the scene as MJCF; model: the bridge's own; limits: of the bridge's governor and of the
        arm's; wrap_transport: wraps the bridge's transport; command: how it commands."""
        self.arm, self.robot, self.task, self.model = (
            SimArm(robot, law, path=path, servo=servo),
            robot,
            task,
            model,
        )
        self.limits, self.conditions, self.dry_run = limits, conditions, dry_run
        self.ticks = round(task.period / self.arm.dt)
        self.wrap_transport, self.command = wrap_transport, command
        # cameras for the bus of an episode: publish() draws and sends
        self.make_cameras: Callable[[Bus], Any] | None = None
        self.cameras: Any = None
        self.chunking, self.every = "blend", 0  # of the bridge

    def begin(self, joints: np.ndarray, objects: dict) -> None:
        """A new episode on a new wire: both governors armed, the arm at rest."""
        self.arm.reset(joints, objects, opening=1.0)
        self.bus = Bus(lambda: self.arm.t, self.conditions)
        self.governor = Governor(self.limits, self.robot)
        self.arm.supervisor = Supervisor(self.robot, supervised(self.limits))
        self.node = ArmNode(
            self.arm,
            LoopbackTransport(self.bus, "arm"),
            self.governor,
            pose_every=self.ticks,
            joints_every=self.ticks,
        )
        wire = self.wire = self.wrap_transport(LoopbackTransport(self.bus, "bridge"))
        self.close()
        self.cameras = self.make_cameras(self.bus) if self.make_cameras else None
        self.bridge = Bridge(
            self.robot, self.task, wire, self.model, self.limits, dry_run=self.dry_run, command=self.command
        )
        self.bridge.chunking, self.bridge.every = self.chunking, self.every
        self.order = wire.publisher(SAFETY_COMMAND, Text, "command")
        for _ in range(10):
            self.run()
            self.publish_images()
            if not self.bridge.observation_buffer.missing():
                break
        if not self.dry_run:
            self.order.publish(Text(f"claim bridge {LONGEST:g}"))
            self.order.publish(Text("arm bridge"))
        self.run()
        self.bridge.begin(self.arm.t)

    def publish_images(self) -> None:
        """Publish a picture of each camera."""
        if self.cameras is not None:
            self.cameras.publish()

    def close(self) -> None:
        """Close the cameras."""
        if self.cameras is not None:
            self.cameras.close()
            self.cameras = None

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

    def rest(self) -> None:
        """Nothing: time stands still between episodes."""

    def tick(self, policy: PolicyClient) -> None:
        """One period of the whole bridge, with its schedule and a policy."""
        self.bridge.tick(policy, self.arm.t)
        self.run()

    def state(self) -> np.ndarray:
        return self.bridge.observation()

    def pictures(self) -> dict[str, np.ndarray]:
        """A picture of each camera now: image/<view> uint8 [h, w, 3]."""
        self.publish_images()
        return self.bridge.observation_buffer.pictures()

    def tool(self) -> np.ndarray:
        return np.array(self.model.pos)

    def opening(self) -> float:
        return self.bridge.observation_buffer.opening

    def object(self, name: str) -> np.ndarray:
        return np.array(self.bridge.observation_buffer.poses[name].pos)
