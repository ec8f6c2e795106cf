"""An arm of Feetech servos behind a serial port, with the topics that a bridge of a position-controlled arm
speaks.

    joint angle [rad] = sign (steps - zero) 2 pi / 4096

It publishes `joint_states` and the gripper's, and puts what comes on `forward_position_controller/commands`
to the servos. Positions are limits of the bridge's governor; here is what must hold without one: joints stay
in their range and a goal leads the measured joint by at most LEAD. Torque goes on with the first command, at
the measured position, and stays on: an arm without torque falls.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from controllers.arm_topics import GRIPPER_STATE
from controllers.estop import EmergencyStop, StopSources
from controllers.feetech import (
    GOAL_POSITION,
    HOMING_OFFSET,
    MODEL,
    MODEL_NUMBER,
    OPERATING_MODE,
    PRESENT,
    PRESENT_POSITION,
    TORQUE_ENABLE,
    ServoBus,
    error_text,
    signed,
)
from controllers.law import vector
from controllers.model import ArmModel
from controllers.robot import Robot
from controllers.servo_file import STEPS
from controllers.transport import Flag, JointState, Numbers, PoseStamped, Transport
from robo_rl.errors import UserError

LEAD = 0.3  # rad that a goal may be before the measured joint
PERIOD = 0.01  # s
TURN = 2 * math.pi / STEPS
HOT = 70  # degrees Celsius: what a check calls too warm
TRIES = 3  # of a write that a servo does not confirm


def raw_position(data: bytes) -> int:
    """Steps of a Present_Position register."""
    return signed(int.from_bytes(data[:2], "little"), 15)


@dataclass(slots=True)
class ServoState:
    """What one servo said last."""

    steps: int
    speed: float  # [steps/s]
    volts: float
    celsius: int


class ServoArm:
    """The servos of a robot whose file has a `driver`. `step` reads them and publishes; it does nothing
    before its period is over.

    problems: what was dropped or cut, by kind."""

    def __init__(
        self,
        robot: Robot,
        bus: ServoBus,
        transport: Transport,
        period: float = PERIOD,
        model: ArmModel | None = None,
    ):
        """period [s]: between two looks at the servos. model: where the tool is told from, too; None: it is
        not told."""
        if robot.driver is None:
            raise UserError(f"robot {robot.name} has no driver in its file")
        self.robot, self.driver, self.bus, self.transport, self.period = (
            robot,
            robot.driver,
            bus,
            transport,
            period,
        )
        self.ids = [s.id for s in self.driver.servos]
        self.sign = np.array([s.sign for s in self.driver.servos], float)
        self.zero = np.array([s.zero for s in self.driver.servos], float)
        self.low, self.high = np.array(robot.lower), np.array(robot.upper)
        self.problems: Counter[str] = Counter()
        self.states: dict[int, ServoState] = {}
        self.q = np.zeros(len(self.ids))
        self.fresh, self.has_torque, self.due = False, False, -math.inf
        names = robot.topics
        self.joints = transport.publisher(names["joint_states"], JointState)
        self.model, self.pose = (
            model,
            None if model is None else transport.publisher(names["current_pose"], PoseStamped),
        )
        self.gripper = transport.publisher(GRIPPER_STATE, JointState) if self.driver.gripper else None
        self.commands = transport.subscription(names["forward_position"], Numbers, "command")
        self.grips = transport.subscription(names["gripper"], Numbers, "command")
        self.estop, self.stops = (
            EmergencyStop(transport.subscription(names["estop"], Flag, "latched", depth=64)),
            StopSources(),
        )

    @property
    def all_ids(self) -> list[int]:
        return [*self.ids, *([self.driver.gripper.id] if self.driver.gripper else [])]

    def step(self) -> None:
        """Read the servos and publish, once a period. Joint states are those of a reading in which every
        joint answered."""
        now = self.transport.now()
        if now < self.due:
            return
        self.due = now + 0.9 * self.period  # a loop's tick may come a little early
        got = self.bus.sync_read(self.all_ids, PRESENT)
        for id, data in got.items():
            self.states[id] = ServoState(
                raw_position(data),
                float(signed(int.from_bytes(data[2:4], "little"), 15)),
                data[6] / 10,
                data[7],
            )
            if bits := self.bus.errors[id]:
                self.problems[f"servo {id}: {error_text(bits) or bits}"] += 1
        self.fresh = all(id in got for id in self.ids)
        if self.fresh:
            steps = np.array([self.states[id].steps for id in self.ids], float)
            self.q = self.sign * (steps - self.zero) * TURN
            speed = self.sign * np.array([self.states[id].speed for id in self.ids]) * TURN
            self.joints.publish(
                JointState(
                    self.transport.stamp(), self.robot.joints, tuple(self.q.tolist()), tuple(speed.tolist())
                )
            )
            if self.model is not None and self.pose is not None:
                self.model.place(self.q)
                self.pose.publish(
                    PoseStamped(
                        self.transport.stamp(),
                        self.robot.base_frame,
                        tuple(self.model.pos),
                        tuple(self.model.quat),
                    )
                )
        if self.gripper is not None and self.driver.gripper is not None and self.driver.gripper.id in got:
            opening = self.driver.gripper.opening(self.states[self.driver.gripper.id].steps)
            self.gripper.publish(JointState(self.transport.stamp(), ("gripper",), (opening,)))
        self.follow()

    def follow(self) -> None:
        """Put the newest commands to the servos."""
        self.estop.read(self.stops, self.transport.now())
        taken, grip = self.commands.take(), self.grips.take()
        if not taken or not self.states:
            return
        if self.stops.stopped_by:
            self.problems["commands while the e-stop says stop"] += len(taken)
            return
        if self.transport.publishers(self.robot.topics["forward_position"]) > 1:
            self.problems["commands while there is more than one commander"] += len(taken)
            return
        try:
            wanted = vector("joint positions", taken[-1].message.data, len(self.ids))
        except UserError:
            self.problems["commands that make no sense"] += 1
            return
        if not self.fresh:
            self.problems["commands while a servo does not answer"] += 1
            return
        if not self.has_torque:
            self.hold()
        goal = np.clip(np.clip(wanted, self.low, self.high), self.q - LEAD, self.q + LEAD)
        self.problems["goals cut to the joints' range or lead"] += int((np.abs(goal - wanted) > 1e-9).any())
        steps = {
            id: int(x) for id, x in zip(self.ids, np.rint(self.zero + self.sign * goal / TURN), strict=True)
        }
        if grip and self.driver.gripper is not None:
            opening = grip[-1].message.data
            if len(opening) == 1 and math.isfinite(opening[0]):
                steps[self.driver.gripper.id] = self.driver.gripper.steps(opening[0])
        self.bus.sync_write(GOAL_POSITION, {id: min(max(x, 0), STEPS - 1) for id, x in steps.items()})

    def hold(self) -> None:
        """Torque on, at the measured positions. UserError: a servo does not confirm it."""
        for id in self.all_ids:
            if id not in self.states:
                raise UserError(f"servo {id} does not answer: no torque goes on")
            self.write(id, GOAL_POSITION, min(max(self.states[id].steps, 0), STEPS - 1))
            self.write(id, TORQUE_ENABLE, 1)
        self.has_torque = True

    def release(self) -> None:
        """Torque off: the arm falls if nobody holds it."""
        for id in self.all_ids:
            self.write(id, TORQUE_ENABLE, 0)
        self.has_torque = False

    def write(self, id: int, register: tuple[int, int], value: int) -> None:
        if not any(self.bus.write(id, register, value) for _ in range(TRIES)):
            raise UserError(
                f"servo {id} does not confirm what is written to it: is its cable in, its power on?"
            )

    def close(self) -> None:
        self.bus.port.close()

    # ---- before anything moves -----------------------------------------------------------------------------

    def check(self) -> list[tuple[str, str, str]]:
        """(key, what is looked at, fault or "") of each servo; nothing is written."""
        out = []
        names = [*self.robot.joints, *(["gripper"] if self.driver.gripper else [])]
        servos = [*self.driver.servos, *([self.driver.gripper] if self.driver.gripper else [])]
        for name, servo in zip(names, servos, strict=True):
            out.append(
                (
                    f"servo_{servo.id}",
                    f"Servo {servo.id} ({name}) answers, is an STS3215 in position mode and keeps its "
                    "calibration",
                    self.servo_fault(servo),
                )
            )
        for name, low, high, servo in zip(
            self.robot.joints, self.low, self.high, self.driver.servos, strict=True
        ):
            position = self.asked(servo.id, PRESENT_POSITION)
            q = math.nan if position is None else servo.sign * (signed(position, 15) - servo.zero) * TURN
            fault = (
                "it does not answer"
                if position is None
                else f"it is at {q:.3f} rad"
                if not low <= q <= high
                else ""
            )
            out.append((f"range_{servo.id}", f"{name} is between {low:.3f} and {high:.3f} rad", fault))
        return out

    def asked(self, id: int, register: tuple[int, int]) -> int | None:
        """A register, asked for several times where no answer comes."""
        return next((x for _ in range(TRIES) if (x := self.bus.read(id, register)) is not None), None)

    def servo_fault(self, servo: Any) -> str:
        model, mode, offset = (self.asked(servo.id, r) for r in (MODEL_NUMBER, OPERATING_MODE, HOMING_OFFSET))
        present = self.bus.sync_read([servo.id], PRESENT).get(servo.id)
        if model is None or mode is None or offset is None or present is None:
            return "it does not answer"
        if model != MODEL:
            return f"it is model {model}, an STS3215 is {MODEL}"
        if mode != 0:
            return f"it is in mode {mode}, position mode is 0"
        if servo.offset is not None and signed(offset, 11) != servo.offset:
            return f"its homing offset is {signed(offset, 11)}, the file's {servo.offset}: calibrate it again"
        if bits := self.bus.errors.get(servo.id, 0):
            return f"it reports {error_text(bits) or bits}"
        return f"it has {present[7]} degrees Celsius" if present[7] >= HOT else ""
