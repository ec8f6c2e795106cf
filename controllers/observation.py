"""What is measured of an arm on the wire, as a policy sees it: the newest messages of its topics -> state and
observation."""

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from controllers.arm_topics import EXTERNAL_WRENCH, GRIPPER_STATE
from controllers.model import ArmModel
from controllers.robot import Robot, by_name
from controllers.transport import (
    CompressedImage,
    JointState,
    Mailbox,
    PoseStamped,
    Received,
    Transport,
    WrenchStamped,
)
from robo_rl.errors import UserError

HAND = ("ee_x", "ee_y", "ee_z", "ee_axis_x", "ee_axis_y", "ee_tilt_x", "ee_tilt_y")
OBJECT = ("dx", "dy", "dz", "z", "cos4yaw", "sin4yaw")
GOAL = "goal"  # a mark, told as an object is; the state has its way from the first object, or from the tool
GOAL_NAMES = ("goal_dx", "goal_dy", "goal_dz")
STALE_PICTURE = 0.5  # s behind the joints, at which a camera counts as lost
STALE_SIGHT = 0.5  # s behind the joints, at which what tells an object's pose or the gripper counts as lost
STALE_WRENCH = 0.2  # s behind the joints, at which the force sensor counts as lost
ONE_NODE = 0.5  # s within which a node speaks again, and another one did between: two nodes publish
DEPTH = 4  # newest messages of a control period that are read: a fast arm's others would cost time


def objects_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The objects in a state of these names, its mark last. UserError for a name that no topic carries."""
    objects = tuple(n.removesuffix("_cos4yaw") for n in names if n.endswith("_cos4yaw"))
    mark = (GOAL,) if set(GOAL_NAMES) & {*names} else ()
    joints = [n for n in names if n.startswith("joint")]
    known = {
        *joints,
        "gripper",
        "gripper_command",
        *HAND,
        *(f"{o}_{part}" for o in objects for part in OBJECT),
        *(GOAL_NAMES if mark else ()),
    }
    unknown = [n for n in names if n not in known]
    if unknown or not names:
        what = ", ".join(unknown[:5]) or "it is empty"
        raise UserError(
            f"the run's state does not fit the robot's topics: {what}. Allowed: joints, "
            f"gripper, {', '.join(HAND)}, of each body {', '.join(OBJECT)} and of a mark "
            f"{', '.join(GOAL_NAMES)}. What no topic tells, a policy may see: train it with --obs rgb"
        )
    return objects + mark


def camera_topic(view: str) -> str:
    """Topic of a camera's pictures, as image_transport names it."""
    return f"{view}/image_raw/compressed"


def topic_of(robot: Robot, view: str) -> str:
    """Topic of a robot's camera: its cell's, or as image_transport names it."""
    camera = robot.cell.cameras.get(view)
    return camera.topic if camera is not None and camera.topic else camera_topic(view)


def picture(message: CompressedImage, size: int = 0) -> np.ndarray:
    """uint8 [h, w, 3] of a compressed image; size: scaled to cover size x size pixels and cut to its middle.

    UserError: the bytes are no picture.
    """
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(message.data)).convert("RGB")
    except OSError as e:
        raise UserError(f"a picture of {message.frame or 'a camera'} cannot be read: {e}") from None
    if size and image.size != (size, size):
        w, h = image.size
        scale = size / min(w, h)
        image = image.resize(
            (max(size, round(w * scale)), max(size, round(h * scale))), Image.Resampling.BILINEAR
        )
        left, top = (image.width - size) // 2, (image.height - size) // 2
        image = image.crop((left, top, left + size, top + size))
    return np.asarray(image)


class ObservationBuffer:
    """Buffers the newest message of each of the arm's topics -> measured state and observation.

    names: of the state's entries; views: cameras, whose pictures are cut to size x size pixels (0: as they
    are), then go through `fit`;
    joints: of the arm whose joints the state has. UserError: a name that no topic carries, or joints that
    this arm does not have."""

    def __init__(
        self,
        robot: Robot,
        transport: Transport,
        names: tuple[str, ...],
        views: tuple[str, ...] = (),
        size: int = 0,
        joints: int = 0,
        fit: "Callable[[np.ndarray], np.ndarray] | None" = None,
    ):
        topics = robot.topics
        self.size, self.fit = size, fit or np.asarray
        self.camera_topics = {v: topic_of(robot, v) for v in views}
        self.cameras = {
            v: transport.subscription(topic, CompressedImage, depth=DEPTH)
            for v, topic in self.camera_topics.items()
        }
        self.robot, self.names, self.objects = robot, names, objects_of(names)
        numbers = {n.removeprefix("joint").split("_")[0] for n in names if n.startswith("joint")}
        if numbers - {str(i + 1) for i in range(joints or len(robot.joints))}:
            raise UserError(
                f"the run's state has {len(numbers)} joints, robot {robot.name} has {len(robot.joints)}"
            )
        self.wrench = (
            transport.subscription(topics.get("external_wrench", EXTERNAL_WRENCH), WrenchStamped, depth=DEPTH)
            if robot.cell.force is not None
            else None
        )
        # a gripper's driver may publish there too: its messages come between the arm's
        self.joints = transport.subscription(topics["joint_states"], JointState, depth=DEPTH)
        self.gripper = transport.subscription(GRIPPER_STATE, JointState, depth=DEPTH)
        self.bodies = {
            n: transport.subscription(f"objects/{n}", PoseStamped, depth=DEPTH) for n in self.objects
        }
        self.seen = -math.inf  # when the newest joint state came
        self.opening = 1.0
        self.poses: dict[str, PoseStamped] = {}
        self._heard: dict[str, dict[str, float]] = {}  # topic -> the last two nodes, and when each spoke

    def missing(self) -> list[str]:
        """Topics on which no message has come."""
        return [topic for topic, box in self._boxes().items() if box.latest() is None]

    def _boxes(self) -> dict[str, Mailbox]:
        """The subscription of each topic that the policy or a limit needs."""
        boxes = {self.robot.topics["joint_states"]: self.joints} | {
            f"objects/{n}": b for n, b in self.bodies.items()
        }
        boxes |= {self.camera_topics[v]: b for v, b in self.cameras.items()}
        if self.wrench is not None:
            boxes[self.robot.topics.get("external_wrench", EXTERNAL_WRENCH)] = self.wrench
        if "gripper" in self.names:
            boxes[GRIPPER_STATE] = self.gripper
        return boxes

    def update(self, model: ArmModel) -> bool:
        """Read new messages -> whether there is a new joint state. UserError: it is another robot's, or two
        nodes tell one."""
        ours = set(self.robot.joints)
        told = [g for g in self.joints.take() if not ours.isdisjoint(g.message.names)]
        got = told[-1] if told else None
        if got is None and self.seen == -math.inf:
            got = self.joints.latest()  # of other joints alone: `by_name` says which
        if (grip := self.gripper.latest()) is not None and grip.message.position:
            self.opening = float(grip.message.position[0])
        for name, box in self.bodies.items():
            if (pose := box.latest()) is not None:
                self.poses[name] = pose.message
        if got is None or got.at <= self.seen:
            return False
        first, m = self.seen == -math.inf, got.message
        if first and (lost := [j for j in self.robot.joints if j not in m.names]):
            raise UserError(
                f"{self.robot.topics['joint_states']} lacks the joints {', '.join(lost)} of the file of "
                f"robot {self.robot.name}; named there are {', '.join(m.names) or 'none'}"
            )
        self.seen = got.at
        q = by_name(self.robot.joints, m.names, m.position)
        dq = by_name(self.robot.joints, m.names, m.velocity, "velocity")
        if not (np.isfinite(q).all() and np.isfinite(dq).all()):
            raise UserError("the measured joints are not finite")
        model.update(q, dq)
        for topic, box in self._boxes().items():
            for g in told if box is self.joints else box.take():
                self._of_one_node(topic, g)
        return True

    def _of_one_node(self, topic: str, got: Received) -> None:
        """UserError: the node that sent this message and another publish on the topic in turn."""
        heard = self._heard.setdefault(topic, {})
        last = next(reversed(heard), got.source)
        again = got.at - heard.pop(got.source, -math.inf) < ONE_NODE
        heard[got.source] = got.at
        if len(heard) > 2:
            del heard[next(iter(heard))]
        if again and last != got.source:
            raise UserError(
                f"two nodes publish on {topic} ({last}, {got.source}), so that what the policy sees jumps "
                f"between them: stop one of them (ros2 topic info -v {topic} names both)"
            )

    def check(self) -> None:
        """UserError: what tells an object's pose or the gripper's opening is silent or unusable, or is in
        another frame."""
        told = {f"objects/{n}": box.latest() for n, box in self.bodies.items()}
        if "gripper" in self.names:
            told[GRIPPER_STATE] = self.gripper.latest()
        for topic, got in told.items():
            if got is None or self.seen - got.at > STALE_SIGHT:
                age = "nothing ever came" if got is None else f"the last is {self.seen - got.at:.2f} s old"
                raise UserError(f"{topic} is silent: {age}")
            m = got.message
            if isinstance(m, PoseStamped) and m.frame != self.robot.base_frame:
                raise UserError(
                    f"{topic} is in frame {m.frame!r}, and the policy sees objects in the arm's base frame "
                    f"{self.robot.base_frame!r}: transform it there"
                )
            numbers = (*m.pos, *m.quat) if isinstance(m, PoseStamped) else m.position
            if not np.isfinite(numbers).all():
                raise UserError(f"{topic} tells a number that is not finite")

    def felt(self) -> tuple[float, ...] | None:
        """The newest external wrench [6] [N], [N m], of which sizes alone matter; None: nobody measures it.
        Not finite where it is too old: such a state is unusable, and without states the arm stops."""
        if self.wrench is None:
            return None
        got = self.wrench.latest()
        return (math.nan,) * 6 if got is None or self.seen - got.at > STALE_WRENCH else got.message.wrench

    def observation(self, model: ArmModel, hand: Any, slow: int = 1) -> np.ndarray:
        """float32 [S] in the order of the run's state names, in the time of a policy that acts `slow` times
        slower."""
        at = {"gripper": self.opening, "gripper_command": hand.grip}
        for i, (q, dq, target) in enumerate(zip(model.q, model.dq, hand.joints, strict=True), 1):
            at |= {f"joint{i}": q, f"joint{i}_velocity": slow * dq, f"joint{i}_command_error": target - q}
        r = model.rotation
        at |= dict(zip(HAND, (*model.pos, r[0, 0], r[1, 0], r[0, 2], r[1, 2]), strict=True))
        for name, pose in self.poses.items():
            (w, x, y, z), d = pose.quat, np.subtract(pose.pos, model.pos)
            four = (complex(1 - 2 * (y * y + z * z), 2 * (x * y + w * z)) * complex(r[0, 0], -r[1, 0])) ** 4
            at |= dict(
                zip(
                    (f"{name}_{part}" for part in OBJECT),
                    (*d, pose.pos[2], four.real, four.imag),
                    strict=True,
                )
            )
        if GOAL in self.poses:
            first = self.poses[self.objects[0]].pos if self.objects[0] != GOAL else model.pos
            at |= dict(zip(GOAL_NAMES, np.subtract(self.poses[GOAL].pos, first), strict=True))
        return np.array([at[n] for n in self.names], np.float32)

    def pictures(self) -> dict[str, np.ndarray]:
        """The newest picture of each camera: image/<view> uint8 [h, w, 3]. UserError: one is older than
        STALE_PICTURE."""
        out = {}
        for view, box in self.cameras.items():
            got = box.latest()
            if got is None or self.seen - got.at > STALE_PICTURE:
                age = "none ever came" if got is None else f"the last is {self.seen - got.at:.2f} s old"
                raise UserError(f"no picture on {self.camera_topics[view]}: {age}")
            out[f"image/{view}"] = self.fit(picture(got.message, self.size))
        return out
