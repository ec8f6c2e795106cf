"""How the bridge's setpoint goes onto the wire: a tool pose, joint targets, or positions for an arm that
follows joint positions alone.

pose, joint: to a law of torques on the arm's side (`target_pose`, `target_joint`). forward_position,
joint_trajectory: to ros2_control's controllers of those names, which put every position that they get
straight to the motors. Braking in HOLD is the governor's pose there too: nobody on the arm's side brakes.
"""

from typing import Any

from controllers.cell import COMMANDS
from controllers.governor import ACTIVE, HOLD
from controllers.model import ArmModel
from controllers.robot import POSITIONS, Robot
from controllers.servo import JointServo
from controllers.setpoint import Setpoint
from controllers.transport import JointState, JointTrajectory, Numbers, PoseStamped, Transport
from robo_rl.errors import UserError, choose

PREVIEW = "preview/target_pose"


class Output:
    """`send` once per control period. command: one of `cell.COMMANDS`; dry: a pose on PREVIEW, whatever it
    is."""

    def __init__(
        self,
        command: str,
        robot: Robot,
        transport: Transport,
        model: ArmModel,
        period: float,
        dry: bool = False,
    ):
        self.command, self.robot, self.period = choose("command", command, COMMANDS), robot, period
        if dry:
            self.command = "pose"
        self.joints = self.command != "pose"  # the governor is to judge joints with their pose
        topic = {"pose": "target_pose", "joint": "target_joint"}.get(self.command, self.command)
        if not dry and topic not in robot.topics:
            raise UserError(
                f"the file of robot {robot.name} names no controller {topic}: say "
                f'"topics": {{"{topic}": "{POSITIONS[topic]}"}} in it, where the robot has one'
            )
        self.topic = PREVIEW if dry else robot.topics[topic]
        kinds: dict[str, Any] = {
            "pose": PoseStamped,
            "joint": JointState,
            "forward_position": Numbers,
            "joint_trajectory": JointTrajectory,
        }
        self.publisher = transport.publisher(self.topic, kinds[self.command], "command")
        self.servo = JointServo(robot, model, period) if self.command in POSITIONS else None

    def send(self, stamp: float, out: Setpoint, model: ArmModel) -> bool:
        """Publish the setpoint -> whether there was anything to say. stamp [s]; model: the measured arm."""
        if out.pos is None or out.state not in (ACTIVE, HOLD):
            if self.servo is not None:
                # whoever moves the arm meanwhile: the next positions begin where it is
                self.servo.rest(model)
            return False
        if self.servo is not None:
            if (q := self.servo.step(model, out)) is None:
                return False
            self.publisher.publish(self._positions(tuple(q.tolist())))
        elif self.command == "pose":
            self.publisher.publish(PoseStamped(stamp, self.robot.base_frame, out.pos, out.quat))
        elif out.joints is not None:
            self.publisher.publish(JointState(stamp, self.robot.joints, out.joints))
        else:
            return False  # the arm's own watchdog brakes and holds it
        return True

    def _positions(self, q: tuple[float, ...]) -> Numbers | JointTrajectory:
        """Stamp 0: a trajectory that begins now."""
        if self.command == "forward_position":
            return Numbers(q)
        return JointTrajectory(0.0, self.robot.joints, ((2 * self.period, q),))
