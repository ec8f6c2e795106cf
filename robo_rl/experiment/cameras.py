"""The simulated arm's cameras, in a process of their own so that the arm's loop does not wait for them.

They know nothing but the wire: joints, gripper and bodies come from the topics, pictures are drawn as
sims/mujoco draws them and published as sensor_msgs/CompressedImage on <view>/image_raw/compressed. With
--sources the pictures are those of real cameras or files (`camera_sources`).
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from robo_rl.errors import UserError, choose, in_range
from robo_rl.experiment.pictures import encode
from robo_rl.experiment.ros_options import RosOptions

FORMATS = ("png", "jpeg")


@dataclass(frozen=True, kw_only=True)
class CameraOptions(RosOptions):
    """Draw and publish what the simulated arm's cameras see, or publish what real cameras and files show."""

    sources: tuple[str, ...] = ()
    """VIEW=PATH of each camera instead of a scene: a V4L2 device (front=/dev/video0), a video, or a folder of
    pictures, again and again."""
    scene: str = "pick_cube"
    """Scene to draw, as of sim-arm."""
    views: tuple[str, ...] = ("front", "wrist")
    """Cameras: front, wrist."""
    size: int = 64
    """Pixels of each side, 16 to 1024."""
    rate: float = 50.0
    """Pictures per second and view, up to 1000."""
    format: str = "png"
    """png keeps every pixel, jpeg is smaller above 128 pixels."""
    seconds: float = float("inf")
    """Time limit [s]; inf: until Ctrl-C."""
    robot: str = "sim"
    """Robot whose topic names to use: preset or JSON file."""
    parent: int = 0
    """Process id of the arm: the cameras end with it. 0: none."""

    def __post_init__(self) -> None:
        in_range("--size", self.size, 16, 1024)
        in_range("--rate", self.rate, 0, 1000, open_low=True)
        in_range("--seconds", self.seconds, 0, float("inf"), open_low=True)
        super().__post_init__()
        choose("--format", self.format, FORMATS)
        if twice := [v for v in self.names if self.names.count(v) > 1]:
            raise UserError(f"--sources: {twice[0]} is there twice")

    @property
    def names(self) -> tuple[str, ...]:
        """The views that are published."""
        return tuple(text.partition("=")[0] for text in self.sources) or self.views


class SceneCameras:
    """Renders a scene from the poses that the arm's topics carry. `render` draws, `publish` sends."""

    def __init__(
        self,
        transport,
        scene: str,
        views: tuple[str, ...],
        size: int,
        *,
        form: str = "png",
        robot: str = "sim",
    ):
        from controllers.arm_topics import GRIPPER_STATE
        from controllers.observation import camera_topic
        from controllers.robot import load_robot
        from controllers.transport import CompressedImage, JointState, PoseStamped
        from robo_rl.experiment.scenes import scene_task
        from sims.arm import bodies_of
        from sims.mujoco.scene_view import SceneView

        known = load_robot(robot)
        if known.name != "sim":
            raise UserError(f"the cameras draw the simulated arm, not {known.name}: --robot sim")
        task = scene_task(scene)
        self.transport, self.views, self.form = transport, views, form
        self.scene = SceneView(task, 1, views, size, size, fine=False, threads=1)
        self.joints = transport.subscription(known.topics["joint_states"], JointState)
        self.gripper = transport.subscription(GRIPPER_STATE, JointState)
        self.bodies = {n: transport.subscription(f"objects/{n}", PoseStamped) for n in bodies_of(task)}
        self.senders = {v: transport.publisher(camera_topic(v), CompressedImage) for v in views}
        self.names = known.joints

    def render(self) -> "tuple[float, dict[str, np.ndarray]] | None":
        """(stamp of the joints [s], uint8 [h, w, 3] per view); None until every topic has carried a
        message."""
        from controllers.robot import by_name

        joints, gripper = self.joints.latest(), self.gripper.latest()
        bodies = {n: b.latest() for n, b in self.bodies.items()}
        if joints is None or gripper is None or None in bodies.values():
            return None
        self.scene.show(
            0,
            by_name(self.names, joints.message.names, joints.message.position),
            gripper.message.position[0],
            {name: (got.message.pos, got.message.quat) for name, got in bodies.items()},
        )
        return joints.message.stamp, {v: x[0] for v, x in self.scene.pictures().items()}

    def publish(self) -> bool:
        """Draw and send one picture of each view -> whether there was anything to draw."""
        from controllers.transport import CompressedImage

        if (seen := self.render()) is None:
            return False
        for view, pixels in seen[1].items():
            self.senders[view].publish(CompressedImage(seen[0], view, self.form, encode(pixels, self.form)))
        return True

    def close(self) -> None:
        self.scene.close()


def open_cameras(options: CameraOptions, wire):
    """What publishes: `publish() -> whether there was anything`, `close()`."""
    if not options.sources:
        return SceneCameras(
            wire, options.scene, options.views, options.size, form=options.format, robot=options.robot
        )
    from robo_rl.experiment.camera_sources import SourceCameras, open_source

    return SourceCameras(
        wire,
        dict(open_source(text, options.rate) for text in options.sources),
        options.size,
        form=options.format,
        robot=options.robot,
    )


def publish_cameras(options: CameraOptions, on_start: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Publish pictures until --seconds, Ctrl-C or the end of the arm -> (pictures per view, the loop's timing
    in words)."""
    from controllers.loop import real_time
    from robo_rl.experiment.wire import connect

    wire = connect(
        "cameras" if options.sources else "sim_cameras",
        options.domain,
        options.interface,
        options.namespace,
        security=options.security,
    )
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: stop.append(n))
    try:
        cameras = open_cameras(options, wire)
        count = [0]

        def tick() -> None:
            count[0] += cameras.publish()

        def going() -> bool:
            return not stop and (not options.parent or os.getppid() == options.parent)

        on_start()
        try:
            timing = real_time(tick, 1 / options.rate, options.seconds, going=going, clock=time.monotonic)
        finally:
            cameras.close()
    finally:
        wire.close()
    return count[0], timing.text()
