"""What a deployment leaves behind: an episode of a data set, a rosbag2, a film; and whether the task was
done."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from robo_rl.errors import UserError

if TYPE_CHECKING:
    import numpy as np


class DeployRecorder:
    """Records one deployment of task `name` and judges success from the objects' poses, where a topic carries
    them. "": a policy of a data set, whose task has no rule.

    robot: the robot; task: what the policy expects of it (`controllers.bridge.Task`). record, bag, video:
    data set folder, bag folder and .mp4 to write, "" for none. log, warn: receive one line per file written,
    or not.

    The film shows the simulated arm's whole workspace, drawn at the end from what its topics told, another
    arm as its front camera sees it. It says that a dry run is one.
    """

    def __init__(
        self,
        name: str,
        robot,
        task,
        *,
        record: str = "",
        bag: str = "",
        video: str = "",
        instruction: str = "",
        go_on: bool = False,
        dry_run: bool = False,
        log: Callable[[str], None] = print,
        warn: Callable[[str], None] = print,
    ):
        from sims.mujoco.own import find_task

        self.name, self.robot, self.expects, self.rule = name, robot, task, find_task(name or "pick_cube")
        self.scene = self.rule.name  # where a simulated arm stands
        self.record, self.video, self.instruction, self.go_on = record, video, instruction, go_on
        self.log, self.warn = log, warn
        self.last: tuple | None = None  # state and pictures in which the task was done
        self.ended: tuple | None = None  # those in which the motion ended
        self.film: list[tuple] = []  # (step, a picture, or what `SceneView.show` draws one of)
        self.success_step: int | None = None
        self.steps, self.dry_run = 0, dry_run
        self.success_at: float | None = None
        self.bag = self.recording = self.joints = self.front = None
        self.bridge: Any = None  # until `watch`
        self.poses: dict = {}  # of the scene's objects; a policy of pictures does not observe them
        if video:
            self.check_video()
        if record:
            from robo_rl.experiment.arm_recording import ArmRecording, features_of
            from robo_rl.experiment.deploy_data import own_features, own_units

            spec = self.control_spec() if name else None
            self.recording = ArmRecording(
                record,
                own_features(task, task.image_size) if spec is None else features_of(spec, task.image_size),
                spec,
                units="" if name else own_units(task),
                sized=self.sized,
                log=log,
                tell=lambda line: warn(f"{line}; the motion goes on"),
            )
        if bag:
            from controllers.bag import BagWriter

            self.bag = BagWriter(bag)

    def check_video(self) -> None:
        """UserError: no film can be made."""
        from robo_rl.film import check_path, frame_rate

        check_path(self.video)
        self.every, self.fps = frame_rate(self.expects.period)
        if self.robot.name == "sim":
            from sims.mujoco.gl import NO_GL, gl_backend

            if gl_backend() is None:
                raise UserError(f"--video: {NO_GL}")

    def control_spec(self):
        """The ControlSpec of the recorded numbers."""
        from robo_rl.types import ControlSpec
        from sims.mujoco.env import axes_of

        t = self.expects
        return ControlSpec(
            "arm", self.name, axes_of("ee_delta"), t.period, self.rule.max_steps, t.state_names, t.views
        )

    def wrap_transport(self, wire):
        """The transport, with its messages written to the bag where one was asked for."""
        from controllers.bag import recorded

        return recorded(wire, self.bag)

    def watch(self, bridge, wire) -> None:
        """Record this bridge from now on."""
        from controllers.observation import camera_topic
        from controllers.transport import CompressedImage, JointState, PoseStamped
        from sims.arm import bodies_of, succeeded  # here: in the control loop it would hold it up for 0.3 s

        self.succeeded = succeeded
        self.bridge, have = bridge, bridge.observation_buffer.bodies
        self.bodies = {
            n: have[n] if n in have else wire.subscription(f"objects/{n}", PoseStamped)
            for n in bodies_of(self.rule)
        }
        if self.recording is not None:
            self.recording.task = self.words()
            bridge.on_action = self.recording.append
        if self.video and self.robot.name == "sim":
            self.joints = wire.subscription(self.robot.topics["joint_states"], JointState)
        elif self.video:
            self.front = wire.subscription(camera_topic("front"), CompressedImage)

    def after_tick(self, now: float) -> bool:
        """Record the period that ends at `now` [s] -> whether the task is done and the deployment ends."""
        self.poses = {n: got.message for n, box in self.bodies.items() if (got := box.latest()) is not None}
        known = self.name and len(self.poses) == len(self.bodies)
        if (
            self.success_at is None
            and known
            and self.bridge.commands
            and self.succeeded(self.rule, self, self.asked())
        ):
            self.success_at = now
            self.success_step = self.steps
            self.last = self.seen()
        if self.video and (self.steps % self.every == 0 or self.success_step == self.steps):
            self.shoot()
        self.steps += 1
        return self.success_at is not None and not self.go_on

    def shoot(self) -> None:
        """Keep what the film shows of this step: nothing is drawn while the arm moves."""
        from controllers.observation import picture
        from controllers.robot import by_name

        if self.front is not None and (got := self.front.latest()) is not None:
            self.film.append((self.steps, picture(got.message)))
        elif self.joints is not None and (got := self.joints.latest()) is not None:
            angles = by_name(self.robot.joints, got.message.names, got.message.position)
            self.film.append(
                (self.steps, (angles, self.opening(), {n: (p.pos, p.quat) for n, p in self.poses.items()}))
            )

    def tool(self):
        """Position of the tool [3] [m] (of `sims.arm.Body`, as the two below)."""
        return self.bridge.model.pos

    def opening(self) -> float:
        return self.bridge.observation_buffer.opening

    def object(self, name: str):
        return self.poses[name].pos

    def asked(self) -> int:
        """Which of the task's instructions was given; the first where it is none of them."""
        known = self.rule.instructions
        return known.index(self.instruction) if self.instruction in known else 0

    def sized(self, image):
        """A picture uint8 [h, w, 3] in the size of the data set: some policies take them as the cameras give
        them."""
        import numpy as np

        if image.shape[:2] == (self.expects.image_size,) * 2:
            return np.array(image)
        from PIL import Image

        return np.asarray(Image.fromarray(image).resize((self.expects.image_size,) * 2))

    def words(self) -> str:
        """The instruction, as far as anybody said one."""
        return self.instruction or (self.rule.instructions[0] if self.name else "")

    def look(self) -> None:
        """Keep what is seen in the end, while the arm's topics are still there."""
        if self.recording is not None and not self.recording.failed:
            self.ended = self.seen()

    def seen(self) -> "tuple[np.ndarray, dict] | None":
        """State and pictures now; None: a camera is lost, and what was recorded before stays."""
        try:
            return self.bridge.observation(), self.bridge.observation_buffer.pictures()
        except UserError:
            return None

    def close(self) -> None:
        """Write the files, each of them also where another cannot be written."""
        with ExitStack() as files:
            for write in (self._close_bag, self._close_film, self._close_data):  # the last one first
                files.callback(write)

    def _close_data(self) -> None:
        if self.recording is None:
            return
        done, final = self.success_at is not None, (None if self.go_on else self.last) or self.ended
        if frames := self.recording.finish(success=done, terminated=done, final=final):
            self.log(f"recorded {frames} frames in {self.record}")

    def _close_film(self) -> None:
        if self.film:
            self.write_film()
        elif self.video:
            self.warn(
                "no film: nothing came on the arm's topics"
                if self.robot.name == "sim"
                else "no picture came on front/image_raw/compressed; start the arm's front camera"
            )

    def _close_bag(self) -> None:
        if self.bag is not None:
            self.bag.close()
            if self.bag.counts:
                self.log(self.bag.text())

    def write_film(self) -> None:
        """Draw what was kept, and write the film."""
        from robo_rl.film import Take, write_film

        take = Take(
            f"{'dry run, commands nothing' if self.dry_run else self.robot.name}   {self.words()}",
            succeeded=[self.success_step],
            judged=bool(self.name) and not self.dry_run and len(self.poses) == len(self.bodies) > 0,
        )
        scene = None
        for step, shown in self.film:
            if isinstance(shown, tuple):
                from sims.mujoco.scene_view import SceneView

                scene = scene or SceneView(self.rule)
                scene.show(0, *shown)
                shown = scene.pictures()["studio"][0]
            take.add(step, shown)
        if scene is not None:
            scene.close()
        self.log(f"film of {write_film(self.video, [take], self.fps)} frames in {self.video}")
